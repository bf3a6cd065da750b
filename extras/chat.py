"""Talk with a model, one line a turn. The conversation stays in the compressed cache.

    python -m extras.chat --checkpoint FOLDER --method sals --chat    by the model's chat template
    python -m extras.chat                                             plain text, which it continues
Ctrl-C ends an answer, Ctrl-D ends the chat. /help lists the commands that save and load a
conversation. Under torchrun Ctrl-C ends the chat, too.
"""

import argparse
import io
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
from generate import LLM, Sampling, is_chat, saved_facts
from model import UserError, human

HELP = """\
/save FILE   keep this conversation and its cache in a file
/load FILE   go on with the conversation in a file
/reset       forget this conversation, but not its system message
/help        show these lines
To send a line that begins with a slash, put a space before it."""


class Conversation:
    """A conversation with an LLM of one row.

    `history` has its messages, dicts with role and content: perhaps one of the system, then the
    user's and the assistant's in turn. What was shown, and nothing else, is in the history and in
    the cache.

    with_template: turns are written by the model's chat template; otherwise they are plain text, a
    line after another. Raises UserError where the model has no template."""

    def __init__(
        self,
        llm: LLM,
        with_template: bool = False,
        system: str = "",
        max_new_tokens: int = 100,
        sampling: Sampling | None = None,
    ):
        self.llm = llm
        self.with_template = with_template
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling or Sampling()
        self.history: list[dict[str, str]] = []
        # the newest one, which may be open still
        self._answer: Generator[str, None, None] | None = None
        if system:
            self.history.append({"role": "system", "content": system})
        if not llm.engine:
            llm.build_engine(1)
        # Raises UserError now if the model cannot write a prompt.
        self._token_ids([*self.history, {"role": "user", "content": "hello"}])

    def say(self, line: str) -> Generator[str, None, None]:
        """The answer to one more line, piece by piece.

        Where the cache is full, the oldest turns are forgotten. Raises UserError, and changes
        nothing, where the line does not fit even so. The caller may stop early: the turn then ends
        with what was yielded, when the generator is closed, or the next line is said."""
        self._end_answer()
        self._answer = self._say(line)
        return self._answer

    def _end_answer(self) -> None:
        """Closes an answer of which the caller took only a part. There is one at a time in the
        cache."""
        if self._answer is not None:
            self._answer.close()

    def _say(self, line: str) -> Generator[str, None, None]:
        older, prompt = self._prompt_for(line)
        if len(older) < len(self.history):
            print("note: the cache is full; the oldest turns are forgotten", file=sys.stderr)
        pieces = self.llm.stream(
            prompt,
            self.max_new_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
        )
        answer = ""
        has_answered = False
        try:
            for piece in pieces:
                has_answered = True
                answer += piece
                yield piece
        finally:
            pieces.close()  # now, so that the LLM's own books end here, too
            if has_answered:
                user = {"role": "user", "content": line}
                assistant = {"role": "assistant", "content": answer}
                self.history = [*older, user, assistant]

    def _prompt_for(self, line: str) -> tuple[list[dict[str, str]], list[int]]:
        """The older messages that fit the cache beside a new line and its answer, and the ids to
        read."""
        message = {"role": "user", "content": line}
        older = list(self.history)
        in_cache = self.llm.token_ids[0]
        if in_cache and not self.with_template:
            # the same ids, and not the same text again
            prompt = self.llm.encode("\n" + line, in_cache)
        else:
            prompt = self._token_ids([*older, message])

        oldest = 0
        if older and older[0]["role"] == "system":
            oldest = 1  # this message stays
        while len(prompt) + self.max_new_tokens > self.llm.max_seq_length:
            if len(older) == oldest:
                needed = f"{len(prompt)} tokens and {self.max_new_tokens} of the answer"
                remedy = "shorten the line, or start with a larger --max_seq_length"
                raise UserError(
                    f"{needed} do not fit the cache of {self.llm.max_seq_length}; {remedy}"
                )
            del older[oldest : oldest + 2]
            prompt = self._token_ids([*older, message])
        return older, prompt

    def _token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a whole conversation, up to the answer that is to come."""
        if self.with_template:
            return self.llm.encode(messages)
        text = ""
        for message in messages:
            if text and message["role"] == "user":
                text += "\n"
            text += message["content"]
        return self.llm.encode(text)

    def save(self, path: Path) -> None:
        """Writes the history and the cache to a file; OSError where it cannot be."""
        self._end_answer()
        if not self.llm.token_ids[0]:
            raise UserError("there is nothing to save yet; say something first")
        self.llm.save(path, note=self.history)

    def load(self, path: Path) -> None:
        """Goes on with what a file of `save`, or of generate.py's --save_cache, holds.

        Raises UserError or OSError, and changes nothing, where it cannot be."""
        self._end_answer()
        facts = saved_facts(path)
        if len(facts.lengths) != 1:
            raise UserError(f"{path} has {len(facts.lengths)} rows; a conversation has one")
        history = facts.note or []
        if history and not is_chat(history):
            raise UserError(f"{path} was saved with a note that is no conversation")
        if self.with_template and not history:
            raise UserError(f"{path} has a prompt but no conversation; load it without --chat")
        self.llm.load(path)
        if not history:  # the prompt of generate.py: it stays, as a system message does
            text = self.llm.tokenizer.decode(self.llm.token_ids[0])
            history = [{"role": "system", "content": text}]
        self.history = history

    def reset(self) -> None:
        """Forgets all but the system message."""
        self._end_answer()
        self.history = [message for message in self.history if message["role"] == "system"]
        self.llm.token_ids = [[]]
        self.llm.engine.pos.zero_()


# --------------------------------------------------------------------------------- the command line


@contextmanager
def ctrl_c_noted() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, which is asked between two tokens: no step of the model ends
    half-way.

    Of several processes each would see it at another token, and those that go on would wait for
    the others forever. There it ends the command, as everywhere: torchrun ends all processes."""
    pressed = threading.Event()
    if generate.is_one_of_several_processes():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def print_answer(chat: Conversation, line: str) -> None:
    """Prints an answer as it is made, then what the cache holds."""
    with ctrl_c_noted() as pressed, closing(chat.say(line)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
            if piece and pressed.is_set():  # "" is within a character
                break
    print(flush=True)
    print_held(chat)


def print_held(chat: Conversation) -> None:
    """A line on stderr, dim on a terminal: how many tokens the cache holds, and their bytes."""
    held = chat.llm.held_memory()
    line = f"{held.tokens} tokens held in {human(held.bytes)}, {held.share:.0%} of dense"
    if sys.stderr.isatty():
        line = f"\033[2m{line}\033[0m"
    print(line, file=sys.stderr, flush=True)


def obey(chat: Conversation, line: str) -> None:
    """Does what a line says that begins with a slash."""
    command, _, rest = line.partition(" ")
    file = rest.strip()
    if command in ("/save", "/load") and not file:
        raise UserError(f"write {command} FILE")
    try:
        if command == "/save":
            chat.save(Path(file))
        elif command == "/load":
            chat.load(Path(file))
        elif command == "/reset":
            chat.reset()
        elif command == "/help":
            print(HELP, file=sys.stderr)
            return
        else:
            raise UserError(f"there is no command {command}; /help lists them")
    except ValueError as error:  # as of a name with a null character
        raise UserError(f"{file!r}: {error}") from None
    except OSError as error:
        message = str(error)
        if error.strerror:  # otherwise it names the file itself
            message = f"{file}: {error.strerror}"
        raise UserError(message) from None
    print_held(chat)


def run_chat(args: argparse.Namespace) -> None:
    # A line that is not UTF-8 shall not end the chat.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    llm = generate.llm_of(args, args.method, args.options)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    chat = Conversation(llm, args.chat, args.system, args.max_new_tokens, sampling)
    while True:
        print("> ", end="", flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            if generate.is_one_of_several_processes():
                raise  # the others read the same line, or none
            print("\n(Ctrl-D ends the chat)", file=sys.stderr)
            continue
        if not line:  # Ctrl-D
            break
        line = line.rstrip("\n")
        try:
            if line.startswith("/"):
                obey(chat, line)
            elif line:
                print_answer(chat, line)
        except UserError as error:
            print(f"error: {generate.in_command_line_words(error)}", file=sys.stderr)
    print()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = generate.parser_of_methods(__doc__, argv)
    generate.add_model_options(parser)
    generate.add_weights_option(parser)
    generate.add_chat_options(parser)
    generate.add_sampling_options(parser)
    about = "tokens that the cache can hold (default: 4096, or what the model takes)"
    parser.option("--max_seq_length", generate.limited("max_seq_length"), None, about)
    generate.add_engine_options(parser)
    parser.set_defaults(batch_size=1, random_weights=None)
    args = parser.parse_args(argv)
    args.options = generate.given_settings(args)
    args.chat = args.chat or args.system != ""
    return args


def main() -> None:
    run_chat(parse_args(sys.argv[1:]))


if __name__ == "__main__":
    generate.run_command(main)
