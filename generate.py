"""Generate text through a compressed cache.

    python generate.py --method sals               the embedded model answers questions on demo.txt
    python generate.py --method sals --help        every option, with the method's own settings
    python generate.py --checkpoint FOLDER --prompt "Once upon a time" --max_new_tokens 100
    python generate.py --random_weights llama-3.1-8b --prompt 32768 --batch_size 8 --method sals
    torchrun --nproc_per_node 4 -- generate.py ... the same on 4 GPUs, or in 4 processes of a CPU
Text goes to stdout, the report to stderr; --json adds the report as one JSON object, the last line
of stdout.

The file follows the life of a request, in eight steps:
    1. text             a prompt is a text, token ids, or a chat that the model's template writes
    2. ids              the tokenizer's ids, and whether they fit the model and the cache
    3. prefill a row    the prompt goes through the model into one row of every cache
    4. the first token  is chosen by the last logits, when decoding starts and not before
    5. the step         one token of every row; compiled, and captured as a CUDA graph
    6. sample           the next ids, of logits: the largest, or a draw
    7. stream           decoding until each row stops; tokens and pieces of text as they are made
    8. report           the run in figures
Before them stands what loads a model and plans its memory; after them `LLM`, which takes a request
through all of them, and the command line, which is a thin user of `LLM`.
"""

import argparse
import dataclasses
import io
import json
import numbers
import os
import platform
import random
import re
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# Threads that wait for another one soon give up their core: on a busy machine that one may have
# none. GNU's OpenMP reads this when torch is imported. A user's own setting wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from torch import Tensor

import compress
import kernels
from compress import (
    Cache,
    CacheContext,
    cache_bytes,
    check_choice,
    check_number,
    dense_bytes,
    load_artifact,
    method_named,
    settings_from,
)
from model import (
    SHAPES,
    Llama,
    ModelConfig,
    StreamDecoder,
    Tokenizer,
    UserError,
    build,
    decode_layer,
    decode_logits,
    fingerprint,
    free_memory,
    human,
    load_model,
    load_tokenizer,
    random_model,
)

NANO = Path(__file__).resolve().parent / "checkpoints" / "nano"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICES = ("cpu", "cuda")
WEIGHTS = ("int8",)  # besides those of the dtype
COUNT = re.compile("[0-9]{1,4000}")  # as a prompt of the command line: so many random tokens
DEFAULT_LENGTH = 4096  # tokens that a row can hold where nothing else is said

Chat = list[dict[str, str]]  # messages, each with a role and its content
Prompt = str | list[int] | Tensor | Chat  # or a numpy array of ids


class ProgressLine:
    """How far a long job is, on stderr: a line that is rewritten, or in a log one each ten seconds.

        with ProgressLine("tokens", total=1000) as progress:
            progress.tick(10)

    A job within another one, such as reading a prompt in an evaluation, says nothing."""

    WIDTH = 79  # columns that the line may have
    outermost: "ProgressLine | None" = None  # of those that are open

    def __init__(self, label: str, total: float):
        self.label = label
        self.total = total
        self.done = 0
        self.started = time.time()
        self.last_shown = self.started
        self.is_rewritten = sys.stderr.isatty()

    def __enter__(self) -> "ProgressLine":
        if ProgressLine.outermost is None:
            ProgressLine.outermost = self
        return self

    def __exit__(self, *error) -> None:
        if ProgressLine.outermost is self:
            self.clear()
            ProgressLine.outermost = None

    def tick(self, n: float = 1) -> None:
        """n more of the total are done."""
        self.done = min(self.done + n, self.total)
        is_within_another = ProgressLine.outermost not in (None, self)
        if is_within_another or self.done in (0, self.total):
            return
        now = time.time()
        interval = 0.2 if self.is_rewritten else 10
        if now - self.last_shown < interval:
            return
        self.last_shown = now
        seconds_left = (now - self.started) / self.done * (self.total - self.done)
        text = f"{self.label}: {self.done:.0f} of {self.total:.0f}, {seconds_left:.0f} s left"
        if self.is_rewritten:
            text = text[: self.WIDTH].ljust(self.WIDTH)
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Makes the line empty, so that something else can be printed there."""
        if self.is_rewritten:
            print("\r" + " " * self.WIDTH + "\r", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- options: the limits of each, once
#
# The command line and LLM check by these. (max_new_tokens is not here: LLM takes 0, which only
# reads the prompt, and the command line does not.) An error names an option as the command line
# does; `errors_in_python_words` makes an argument's name of it.

LIMITS = {  # name -> kind of number, and the interval that it lies in
    "batch_size": (int, "[1, 4294967296]"),
    "max_seq_length": (int, "[1, 4294967296]"),
    "seed": (int, "[0, 4294967296]"),
    "temperature": (float, "[0, inf)"),
    "top_k": (int, "[0, 4294967296]"),
    "top_p": (float, "(0, 1]"),
}


def check_options(**options) -> None:
    """Raises UserError where an option of LIMITS has a value that it cannot have."""
    for name, value in options.items():
        kind, interval = LIMITS[name]
        check_number(name, value, kind, interval)


class PythonError(UserError):
    """A UserError for a caller in Python, whose options are arguments: "raise --batch_size" becomes
    "raise batch_size". `command_line` has the message as it was."""

    def __init__(self, message: str):
        # A message may end in a command to run, "python ...", which keeps its dashes.
        text, python, command = message.partition("python ")
        text = text.replace("--no-compile", "use_compile=False")
        text = text.replace("--no-kernels", "use_kernels=False")
        text = re.sub(r"(?<![\w/.-])--(?=[a-z])", "", text)  # at the start of a word
        super().__init__(text + python + command)
        self.command_line = message


def in_command_line_words(error: Exception) -> str:
    """An error's message for the command line, where options are written with dashes."""
    if isinstance(error, PythonError):
        return error.command_line
    return str(error)


@contextmanager
def errors_in_python_words() -> Iterator[None]:
    """Wraps what is called from Python, so that errors name arguments and not options."""
    try:
        yield
    except PythonError:
        raise
    except UserError as error:
        raise PythonError(str(error)) from error


# ----------------------------------------------------- before: loading, and whether the caches fit


def device_and_dtype(device: str, dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """torch's device and dtype, of names as --device and --dtype take them.

    "auto" is fp32 on the CPU and bf16 on a GPU. Raises UserError if torch sees no GPU here."""
    check_choice("device", device, DEVICES)
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here; use --device cpu")
    if dtype == "auto":
        dtype = "bf16" if device == "cuda" else "fp32"
    return torch.device(device), DTYPES[dtype]


def load_checkpoint(
    source: Path | ModelConfig,
    device: str,
    dtype: str = "auto",
    weights: str | None = None,
    method: str = "dense",
    options: dict | None = None,
    seed: int = 0,
) -> tuple[Llama, Tokenizer | None]:
    """Loads a checkpoint folder: the model and its tokenizer. A config as the source gives a model
    with random weights, and None for the tokenizer.

    weights: None keeps them in dtype. "int8" folds into them what the method needs before they are
    rounded, so that the model then serves this method alone."""
    settings = settings_from(method, options or {})
    torch_device, torch_dtype = device_and_dtype(device, dtype)
    check_choice("weights", weights, (None, *WEIGHTS))
    build_model = build
    if weights == "int8":
        from extras import int8

        artifact_of = lru_cache(partial(load_artifact, source, method))  # read once for all layers

        def fold(model: Llama, i: int) -> None:
            """Folds into layer i, before int8.build rounds it."""
            method_named(method).fold_all(model, settings, artifact_of(model), [i])

        build_model = partial(int8.build, fold=fold)
    if isinstance(source, ModelConfig):
        config = replace(source, max_positions=1 << 20)
        return random_model(config, torch_device, torch_dtype, seed, build_model), None
    if not source.is_dir():
        raise UserError(f"{source}: there is no such folder; give a Hugging Face checkpoint")
    return load_model(source, torch_device, torch_dtype, build_model), load_tokenizer(source)


def plan_caches(
    model: Llama, method: str, settings: object, artifact: dict[str, Tensor], capacity: int
) -> list[Cache]:
    """Builds the method's caches of one row on the meta device. They take no memory, but they know
    how many bytes they would take, and raise the errors of real ones."""
    with torch.device("meta"):
        shadow = Llama(model.config).to(model.norm.weight.dtype)
    context = CacheContext(shadow, 1, capacity)
    return method_named(method).build(shadow, settings, context, artifact)


def row_bytes(
    model: Llama, method: str, settings: object, artifact: dict[str, Tensor], capacity: int
) -> dict[str, int]:
    """Bytes that the caches take of each kind of memory, cpu or cuda, for one row."""
    caches = plan_caches(model, method, settings, artifact, capacity)
    device = model.norm.weight.device.type
    needs = {"cpu": sum(cache.bytes_host() for cache in caches)}
    needs[device] = needs.get(device, 0) + sum(cache.bytes_formula() for cache in caches)
    return needs


def check_memory(
    model: Llama,
    method: str,
    settings: object,
    artifact: dict[str, Tensor],
    rows: int,
    capacity: int,
) -> None:
    """Raises UserError, with what would fit, if the caches would not. Takes no memory itself."""
    for kind, bytes_of_row in row_bytes(model, method, settings, artifact, capacity).items():
        needed = rows * bytes_of_row
        share = free_memory(torch.device(kind)) / max(1, needed)  # of the rows, or of their tokens
        if share < 1:
            size = f"{rows} rows x {capacity} tokens needs {human(needed)} ({kind})"
            fits = f"{int(rows * share)} rows or {int(capacity * share)} tokens a row would fit"
            raise UserError(f"not enough memory: the {method} cache of {size}; {fits}")


def import_hopper(device: torch.device) -> ModuleType | None:
    """extras/hopper.py, which registers its faster function with kernels.py; None if the device is
    no Hopper GPU, or there is no such file."""
    if kernels.nvidia_generation(device) != 9:
        return None
    try:
        import extras.hopper as hopper
    except ModuleNotFoundError as error:
        if error.name not in ("extras", "extras.hopper"):  # a broken one says what it lacks
            raise
        return None
    return hopper


# ----------------------------------------------------------------------------------------- 1. text


def is_chat(prompt: object) -> bool:
    """Is this the messages of one chat?"""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], dict)


def is_one_prompt(prompts: object) -> bool:
    """Is this one prompt, and no list of prompts? One is a text, the messages of a chat, or token
    ids: a list of numbers, or a numpy array or torch tensor of one dim."""
    if isinstance(prompts, str) or is_chat(prompts):
        return True
    if hasattr(prompts, "ndim"):  # numpy's and torch's
        if prompts.ndim == 0:
            raise UserError("a prompt is a text, token ids or a chat's messages, not one number")
        return prompts.ndim == 1
    if not isinstance(prompts, list | tuple):
        kind = type(prompts).__name__
        raise UserError(f"a prompt is a text, token ids or a chat's messages, not {kind}")
    return len(prompts) > 0 and is_number(prompts[0])


def is_number(x: object) -> bool:
    """Is this one number: Python's, numpy's, or a torch tensor without dims?"""
    return isinstance(x, numbers.Number) or getattr(x, "ndim", None) == 0


def ids_as_list(prompt: object) -> list[int]:
    """Token ids of a list, a numpy array or a torch tensor. UserError for what is none of these."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, list | tuple):
        raise UserError(f"a prompt is a text, token ids or a chat's messages, not {prompt!r}")
    ids = []
    for value in values:
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"token ids are whole numbers, not {value!r}")
        ids.append(value)
    return ids


def check_messages(messages: object) -> None:
    """Raises UserError unless these are dicts, each with a role and its content, both texts."""
    wanted = 'a chat is a list of messages, {"role": "user", "content": "..."}'
    if not is_chat(messages):
        raise UserError(f"{wanted}, not {messages!r}")
    for message in messages:
        is_message = isinstance(message, dict)
        for key in ("role", "content"):
            if not is_message or not isinstance(message.get(key), str):
                raise UserError(f"{wanted}, not {message!r}")


def render_chat(template: str, **variables) -> str:
    """The text that a chat template makes, given what transformers gives it.

    Raises UserError in the template's own words, if it refuses the chat or fails."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = strftime_now
    # {% generation %} ... {% endgeneration %} marks what a model is trained on, and Jinja does not
    # know it. `if true` makes it a block without a meaning.
    template = re.sub(r"({%[-+]?\s*)endgeneration\b", r"\1endif", template)
    template = re.sub(r"({%[-+]?\s*)generation\b", r"\1if true", template)
    try:
        return jinja.from_string(template).render(variables, tools=None, documents=None)
    except Exception as error:  # a template is a program, which can fail in any way
        raise UserError(f"the model's chat template refuses this chat: {error}") from error


def unused_character(text: str) -> str:
    """A character that the text does not have, from Unicode's area for private use on."""
    for code in range(0xE000, 0x110000):
        if chr(code) not in text:
            return chr(code)
    raise ValueError("the text has every character")


def mark_control_tokens(content: str, names: list[str], mark: str) -> str:
    """Breaks the names of control tokens in a user's message, so that they stay text in the chat.

    A template writes names such as <|eot_id|> between messages. If a user writes one, too, then it
    must not end the message. So each name in a message gets a mark after its first character:
    <|eot_id|> becomes <MARK|eot_id|>. The template may trim and split the message, and the marks
    move with it. `split_control_tokens` then finds only the template's own names, and takes the
    marks out again. names: the longest first."""
    if not names:
        return content
    any_name = "|".join(map(re.escape, names))
    return re.sub(f"(?={any_name})(.)", rf"\1{mark}", content, flags=re.DOTALL)


def split_control_tokens(text: str, names: list[str], mark: str) -> list[tuple[str, bool]]:
    """Cuts a rendered chat into pieces, without marks: each with whether it is a control token."""
    if not names:
        return [(text, False)]
    any_name = "|".join(map(re.escape, names))
    # A name of one character is still whole before its mark, so it must not be followed by one.
    parts = re.split(f"({any_name})(?!{mark})", text)
    segments = []
    for i, part in enumerate(parts):
        is_name = i % 2 == 1  # re.split puts what the group found between the other parts
        if part:
            segments.append((part.replace(mark, ""), is_name))
    return segments


# ------------------------------------------------------------------------------------------ 2. ids


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Token ids of the prompt for a chat's next answer, by the model's own template.

    chat: dicts with role and content. A system message may come first; then the user and the
    assistant take turns, and the user is last. Raises UserError if the model has no template, or
    if its template refuses the chat."""
    template = tokenizer.chat_template
    if not template:
        remedy = "put a chat_template.jinja into its folder"
        raise UserError(f"this model has no chat template; {remedy}")
    # Names that a user wrote are marked before the template adds its own (`mark_control_tokens`).
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    contents = [message["content"] for message in chat]
    mark = unused_character("".join([template, *names, *contents]))
    messages = []
    for message in chat:
        content = mark_control_tokens(message["content"], names, mark)
        messages.append(message | {"content": content})
    text = render_chat(
        template, messages=messages, add_generation_prompt=True, **tokenizer.chat_variables
    )
    segments = split_control_tokens(text, names, mark)
    return tokenizer.encode_segments(segments, bos=False)  # the template writes BOS itself


def most_tokens(config: ModelConfig) -> int:
    """The longest row that the model was made for. A sliding window limits it, too, because no
    cache here forgets the tokens that leave the window."""
    if config.sliding_window:
        return min(config.max_positions, config.sliding_window)
    return config.max_positions


def check_capacity(
    capacity: int, config: ModelConfig, shorten: str = "the prompt or --max_new_tokens"
) -> None:
    """Raises UserError for more positions than the model was made for, with what to shorten."""
    most = most_tokens(config)
    if capacity > most:
        window = " (its sliding window)" if most == config.sliding_window else ""
        fault = f"{capacity} positions are more than the model's {most}{window}"
        raise UserError(f"{fault}; shorten {shorten}")


def check_lengths(
    prompts: list[list[int]], max_new_tokens: int, max_seq_length: int | None, config: ModelConfig
) -> int:
    """The tokens that a row must be able to hold: max_seq_length, or what the longest prompt needs.

    Raises UserError if a prompt is empty, if it does not fit together with its new tokens, or if an
    id is not one of the model's."""
    longest = max(len(ids) for ids in prompts) + max_new_tokens
    for ids in prompts:
        if not ids:
            raise UserError("the prompt has no tokens; give some text")
    for ids in prompts:
        for wrong in (min(ids), max(ids)):
            if not 0 <= wrong < config.vocab_size:
                vocabulary = f"the model's vocabulary of {config.vocab_size}"
                fault = f"token id {wrong} is outside {vocabulary}"
                raise UserError(f"{fault}; is the tokenizer another model's?")
    if max_seq_length is None:
        check_capacity(longest, config)
        return longest
    if longest > max_seq_length:
        needed = f"prompt and new tokens need {longest} positions, not {max_seq_length}"
        raise UserError(f"{needed}; raise --max_seq_length")
    check_capacity(max_seq_length, config, "--max_seq_length")
    return max_seq_length


# ----------------------------------------------------------- steps 3 to 5 belong to the engine


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.time()


class Engine:
    """A model, its caches, and the decode step over buffers that stay where they are in memory.

    tokens [B] int64    the next token of each row: a step writes its keys and values to the caches
    pos    [B] int32    the position of that token, which is the number of tokens that a row holds
    logits [B, V]       the logits after the last token that a row holds

    sampling: how tokens are chosen; it may be set anew at any time. compiled: layers are compiled
    by torch.compile. graphed: on CUDA the step is captured once as a CUDA graph, before any prompt
    is read; the graph is right for every length, because lengths are read on the device."""

    def __init__(
        self,
        model: Llama,
        caches: list[Cache],
        context: CacheContext,
        sampling: "Sampling | None" = None,
        compiled: bool = False,
        graphed: bool = False,
        seed: int = 0,
    ):
        self.model = model
        self.caches = caches
        self.context = context
        self.sampling = sampling or Sampling()
        self.generator = torch.Generator(context.device).manual_seed(seed)
        self.tokens = context.zeros(dtype=torch.int64)
        self.pos = context.zeros(dtype=torch.int32)
        self.logits = context.zeros(model.config.vocab_size)
        self.n_steps = 0  # decode steps so far
        self.graph: torch.cuda.CUDAGraph | None = None
        started = time.time()
        self._choose_functions(compiled)
        if graphed:
            self.graph = self._capture()
        elif compiled:
            self._run_step()  # compiles now
        # What warm-up wrote lies beyond every row's length: prefill and decode overwrite it.
        self.tokens.zero_()
        self.pos.zero_()
        self.capture_s = time.time() - started if compiled or graphed else 0.0

    # -------------------------------------------------------------------------- 3. prefill a row

    def prefill(self, prompts: list[list[int]]) -> None:
        """Forgets all rows, and reads a prompt into each. A row whose prompt is [] stays empty."""
        self.pos.zero_()
        for row, ids in enumerate(prompts):
            if not ids:  # it is decoded beside the others, without what it held
                for cache in self.caches:
                    cache.reset(row)
        self.append(prompts)

    def append(self, prompts: list[list[int]]) -> None:
        """Reads more tokens into each row, or none where they are []. `logits` are those after the
        last one."""
        rows = [row for row, ids in enumerate(prompts) if ids]
        with ProgressLine("reading", len(rows) * len(self.model.layers)) as progress:
            for row in rows:
                tokens = torch.tensor(prompts[row], device=self.context.device)
                start = int(self.pos[row])
                logits = self.model.extend(tokens, row, start, self.caches, progress.tick)
                self.logits[row] = logits
                self.pos[row] += len(tokens)
        self.check_logits(rows)

    def check_logits(self, rows: list[int] | None = None) -> None:
        """Raises UserError if the last logits of these rows (None: all) are not finite. An idle row
        may have left anything there, so callers name the rows that they use."""
        logits = self.logits if rows is None else self.logits[rows]
        if not logits.isfinite().all():
            dtype = self.logits.dtype
            raise UserError(f"the logits are not finite in {dtype}; use --dtype bf16 or fp32")

    def row_state(self, row: int, n: int) -> dict[str, Tensor]:
        """Views of everything that makes up a row of n tokens: its length, its logits, and its part
        of every cache."""
        state = {"pos": self.pos[row], "logits": self.logits[row]}
        for i, cache in enumerate(self.caches):
            for name, x in cache.row_state(row, n).items():
                state[f"{i}.{name}"] = x
        return state

    def copy_row_state(self, row: int) -> dict[str, Tensor]:
        """A copy of a row's state, in the computer's own memory."""
        state = self.row_state(row, int(self.pos[row]))
        return {name: copy_to_cpu(x) for name, x in state.items()}

    def restore_row(self, row: int, n: int, state: dict[str, Tensor]) -> None:
        """Writes a state back: the row then holds the n tokens of the row, this or another, of
        which `row_state` gave it."""
        self.pos[row] = state["pos"]
        self.logits[row] = state["logits"]
        for i, cache in enumerate(self.caches):
            own = {name: state[f"{i}.{name}"] for name in cache.row_state(row, n)}
            cache.restore_row(row, n, own)

    # ------------------------------------------------------------------------ 4. the first token

    def draw(self) -> None:
        """Chooses `tokens` by the last logits.

        A prompt's first token is drawn here, when decoding starts, and not when the prompt is read.
        So a row that was saved, forked or asked twice draws anew each time."""
        if self.sampling.temperature == 0:
            self.set_tokens(self.greedy(self.logits))
        else:
            self.set_tokens(sample(self.logits, self.sampling, self.generator))

    def set_tokens(self, ids: Tensor) -> None:
        """Makes ids [B] the `tokens`."""
        self.tokens.copy_(ids)

    # ------------------------------------------------------------------------------- 5. the step

    def step(self) -> None:
        """Writes `tokens` at `pos`, and replaces them by the next ones."""
        if self.graph is None:
            self._run_step()
        else:
            self.graph.replay()
        self.n_steps += 1
        # The step has chosen greedy tokens already. A draw replaces them, outside the graph: its
        # temperature, top_k and top_p may change from call to call, and random numbers drawn inside
        # a graph would have to be the graph's own.
        if self.sampling.temperature > 0:
            self.draw()

    def _run_step(self) -> None:
        """What a graph captures: `tokens` go through the model, and the likeliest next tokens take
        their place."""
        logits = self.decode(
            self.model, self.tokens, self.pos, self.caches, self.layer_step, self.last_step
        )
        self.logits.copy_(logits)
        self.set_tokens(self.greedy(self.logits))
        self.pos += 1

    def _choose_functions(self, compiled: bool) -> None:
        """Sets the functions of a step: `decode`, the two that it calls (`layer_step` for each
        layer, `last_step` for the logits), and `greedy`."""
        self.decode = Llama.decode
        self.layer_step = decode_layer
        self.last_step = decode_logits
        self.greedy = greedy
        hopper = import_hopper(self.context.device) if self.context.kernel else None
        if hopper:
            # On a Hopper GPU another decode step, which makes the same logits in fewer launches.
            chained = hopper.chained_decode(self.model, self.context.batch_size)
            if chained is not None:
                self.decode, self.layer_step, self.last_step = chained
        if compiled:
            # Layers of one kind share their compiled code: seconds, where the whole step would take
            # far longer.
            self.layer_step = torch.compile(self.layer_step, dynamic=False)
            self.last_step = torch.compile(self.last_step, dynamic=False)
            self.greedy = torch.compile(greedy, dynamic=False)
            # Kinds of layers and shapes, over all engines of a process; beyond this many they run
            # uncompiled.
            torch._dynamo.config.recompile_limit = 1 << 12
            torch._dynamo.config.accumulated_recompile_limit = 1 << 12

    def _capture(self) -> "torch.cuda.CUDAGraph":
        """The step as one CUDA graph; warmed up on a side stream first, as capture requires."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run_step()
                self.pos.zero_()  # a cache may have room for no more
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL has threads of its own
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run_step()
        return graph


FIRST = torch.zeros(1, dtype=torch.int64)  # as an index: the first element


def copy_to_cpu(x: Tensor) -> Tensor:
    """A copy of a tensor, in ordinary memory of the CPU.

    Some caches keep host memory that is mapped to the GPU (`compress.host_memory`). A plain copy
    does not reach it, but indexing by a tensor does, since it makes the GPU copy by a kernel."""
    one = x[None]
    copied = one[FIRST]
    return copied[0].cpu()


# --------------------------------------------------------------------------------------- 6. sample


class Sampling(NamedTuple):
    """How a token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def greedy(logits: Tensor) -> Tensor:
    """logits [B, V] -> ids [B] of the largest, the first of equal ones.

    It is logits.argmax(-1), but in two steps: first the largest logit in each of 64 parts of a row,
    then the best part. In one step a GPU would give each row to a single multiprocessor."""
    parts = 64
    V = logits.shape[-1]
    width = -(-V // parts)  # V / parts, rounded up
    padded = F.pad(logits, (0, parts * width - V), value=-torch.inf)
    best, place = padded.unflatten(-1, (parts, width)).max(-1)  # [B, parts] each
    part = best.argmax(-1, keepdim=True)  # [B, 1]
    ids = part * width + place.gather(-1, part)
    return ids[:, 0]


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """logits [B, V] -> token ids [B]. Fixed shapes, and no host sync.

    generator: of the random numbers; None: the process's own."""
    if sampling.temperature == 0:
        return greedy(logits)
    # 1. Temperature. The largest logit becomes 0, and 0 / 0 must not arise from a tiny temperature
    # that fp32 would round to 0.
    logits = logits.float()
    temperature = max(float(sampling.temperature), 1e-30)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature

    # 2. top_k: only the k largest logits stay.
    if sampling.top_k:
        k = min(sampling.top_k, logits.shape[-1])
        kth_largest = logits.topk(k).values[:, -1:]
        logits = logits.masked_fill(logits < kth_largest, -torch.inf)
    probs = logits.softmax(-1)

    # 3. top_p: a token stays if those before it, the likeliest first, sum to less than top_p. So
    # the token that crosses top_p stays, and the likeliest always, also where fp32 would round
    # top_p to 0.
    if sampling.top_p < 1:
        ordered, order = probs.sort(descending=True)
        sum_before = ordered.cumsum(-1) - ordered
        top_p = max(float(sampling.top_p), 1e-30)
        ordered = ordered.masked_fill(sum_before >= top_p, 0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)

    # 4. A draw. If each token waits for an Exponential(1) time, divided by its probability, then
    # the one that comes first is a draw from p. (torch.multinomial would wait for the host.)
    waiting_times = torch.empty_like(probs).exponential_(1, generator=generator)
    return (probs / waiting_times).argmax(-1)


# --------------------------------------------------------------------------------------- 7. stream


class NewToken(NamedTuple):
    """A token that a row has made."""

    row: int
    id: int
    is_stop: bool  # it ends the answer, and is no part of it


def decode_tokens(
    engine: Engine,
    max_new_tokens: int,
    stops: Callable[[list[int]], bool],
    stride: int = 1,
    rows: int | None = None,
) -> Iterator[NewToken]:
    """Generates until each of the first `rows` rows (None: all) has stopped or has max_new_tokens.

    stops(ids) says whether a row that has made these ids stops. stride: the host looks at the
    tokens once in so many steps. More than 1 spares the device the wait for the host, but a row
    may then run on after its stop, and what it made stays in the cache."""
    in_use = list(range(rows or engine.context.batch_size))
    running = list(in_use)
    ids_of = {row: [] for row in in_use}
    n_chosen = 0  # tokens of each row so far
    if max_new_tokens > 0:
        engine.draw()
    while n_chosen < max_new_tokens and running:
        # 1. A block of steps on the device. `tokens` are chosen already, and a step writes them to
        # the cache and chooses the next. Nothing follows the last ones, so they need no step.
        block = []
        for _ in range(min(stride, max_new_tokens - n_chosen)):
            block.append(engine.tokens.clone())
            n_chosen += 1
            if n_chosen < max_new_tokens:
                engine.step()

        # 2. The host reads what was chosen, and waits for the device here.
        for tokens in torch.stack(block).tolist():
            for row in list(running):
                ids_of[row].append(tokens[row])
                is_stop = stops(ids_of[row])
                if is_stop:
                    running.remove(row)
                yield NewToken(row, tokens[row], is_stop)
    engine.check_logits(in_use)


def decode_rows(
    engine: Engine, max_new_tokens: int, stops: Callable[[list[int]], bool], stride: int = 1
) -> list[list[int]]:
    """The ids that decode_tokens makes in each row, without those that stop it."""
    made = [[] for _ in range(engine.context.batch_size)]
    for token in decode_tokens(engine, max_new_tokens, stops, stride):
        if not token.is_stop:
            made[token.row].append(token.id)
    return made


@dataclass
class Output:
    """What was generated after one prompt.

    text           the answer as text ("" of a model without a tokenizer)
    token_ids      its ids
    prompt_tokens  how many tokens it follows: the prompt's, and what the row held before
    finish_reason  "stop": the model, or the end of a line, ended it; "length": max_new_tokens"""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str


class Request(NamedTuple):
    """What a call asks for, for each of its prompts."""

    max_new_tokens: int
    sampling: Sampling
    ignore_eos: bool = False
    one_line: bool = False  # the first line of text ends an answer
    streamed: bool = False  # each token is shown when it is made

    def stride(self, stop_ids: set[int], device: torch.device) -> int:
        """The `stride` of decode_tokens. Where an answer may end early it is 1: if a row ran on
        after its stop, then what follows would have to read the whole row again."""
        can_end_early = bool(stop_ids) or self.one_line or self.streamed
        if device.type == "cuda" and not can_end_early:
            return 16
        return 1


# --------------------------------------------------------------------------------------- 8. report


@dataclass
class Run:
    """The figures of one call of an LLM, filled while it runs."""

    outputs: list[Output] = field(default_factory=list)
    prefill_s: float = 0.0  # before the first token
    first_token_s: float | None = None  # from the start of reading
    decode_s: float = 0.0
    rows: int = 0  # prompts that were served at once, the last time
    row_steps: int = 0  # decode steps, counted once for each prompt

    def outputs_in_cache(self) -> list[Output]:
        """Those of the last prompts that were served at once."""
        return self.outputs[len(self.outputs) - self.rows :]


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that CUDA's allocator held, or this process's largest resident size.

    0 where that is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0


def device_name(device: torch.device) -> str:
    """The device as a report names it."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return torch.cuda.get_device_name(device)


def mean_miss_rate(caches: list[Cache], rows: int) -> float | None:
    """The miss rate of the first `rows` rows, averaged over the layers; None for a method that
    fetches nothing."""
    rates = []
    for cache in caches:
        rate = cache.miss_rate(rows)
        if rate is not None:
            rates.append(rate)
    return round(sum(rates) / len(rates), 4) if rates else None


def model_name(source: Path | ModelConfig) -> str:
    """A folder's path, or the name of a shape with random weights."""
    for name, shape in SHAPES.items():
        if source is shape:
            return name
    return str(source)


def report_of(llm: "LLM", run: Run) -> dict:
    """The figures of a run. Lists have one entry for each prompt; bytes are those of this
    process."""
    engine = llm.engine
    context = engine.context
    bytes_read = 0
    for output in run.outputs_in_cache():
        length = output.prompt_tokens + len(output.token_ids)
        bytes_read += sum(cache.bytes_read(length) for cache in engine.caches)
    tokens_per_s = None
    if run.row_steps:
        tokens_per_s = round(run.row_steps / run.decode_s, 2)
    first_token_s = None
    if run.first_token_s is not None:
        first_token_s = round(run.first_token_s, 4)
    return {
        "method": llm.method,
        "settings": dataclasses.asdict(llm.settings),
        "model": model_name(llm.source),
        "seed": llm.seed,
        "device": device_name(context.device),
        "dtype": str(context.dtype).removeprefix("torch."),
        "prompt_tokens": [output.prompt_tokens for output in run.outputs],
        "new_tokens": [len(output.token_ids) for output in run.outputs],
        "token_ids": [output.token_ids for output in run.outputs],
        "text": [output.text for output in run.outputs],
        "prefill_s": round(run.prefill_s, 4),
        "first_token_s": first_token_s,
        "decode_tokens_per_s": tokens_per_s,
        **cache_bytes(engine.caches),
        "bytes_read_per_step": bytes_read,
        "peak_memory_bytes": peak_memory(context.device),
        "miss_rate": mean_miss_rate(engine.caches, run.rows),
        "capture_s": round(engine.capture_s, 3),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


# ------------------------------------------------------------------------- all steps together: LLM


class SavedFacts(NamedTuple):
    """What a file of `LLM.save` says about its rows."""

    lengths: list[int]  # tokens that the cache holds of each row
    max_seq_length: int  # tokens that a row of the saved cache had room for
    note: object  # what the caller of `save` added, or None


def saved_facts(path: Path) -> SavedFacts:
    """The facts of a file of `LLM.save`, without its tensors. UserError if it is no such file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path}: truncated or damaged ({error}); save it again") from None
    return facts_of(metadata, path)


def facts_of(metadata: dict[str, str], path: Path) -> SavedFacts:
    """The facts in the metadata of a file of `LLM.save`. UserError if they are of no rows."""
    if "rows" not in metadata:
        raise UserError(f"{path}: this is not a saved cache; give a file of --save_cache")
    facts = SavedFacts(*json.loads(metadata["rows"]))
    if not facts.lengths:
        raise UserError(f"{path}: there is no row in it; save it again, after a prompt")
    return facts


class SavedRows(NamedTuple):
    """A file of `LLM.save`, read."""

    path: Path
    facts: SavedFacts
    tensors: dict[str, Tensor]  # "0.ids", and what the caches held of row 0; "1.ids", ...
    ids: list[list[int]]  # of each row; a step may still have to write the last one

    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row) for row in self.ids)


class HeldMemory(NamedTuple):
    """What all rows of a cache hold."""

    tokens: int
    bytes: int  # in all memory
    share: float  # of what a dense cache would take for them


def memory_error_in(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """What an error of the compiler stems from, if a GPU's memory was not enough."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


def can_go_back_by_position(cache: compress.Cache) -> bool:
    """Whether a cache can go back by its position alone, as a dense one of plain keys and values
    can. With codes it cannot: the last token, read again, would attend the codes of the tokens
    before it, where at its first reading it attended their exact keys and values."""
    if type(cache) is not compress.DenseCache:
        return False
    return type(cache.keys) is type(cache.values) is compress.TokenStore


class LLM:
    """A model and its cache: prompts in, text out.

        llm = LLM("FOLDER", method="sals", max_seq_length=8192)
        output = llm.generate("Once upon a time", max_new_tokens=50, temperature=0.8)
        print(output.text, llm.report()["cache_bytes_measured"])

    source          a Hugging Face folder; None: the embedded model; a ModelConfig: random weights
    method          what the cache stores: a name of compress.METHODS, or of extras/baselines.py
    max_seq_length  tokens that a row can hold, prompt and answer together (None: 4096, or what the
                    first call needs)
    batch_size      rows of the cache: prompts that are served at once (None: the first call's)
    device          "cpu" or "cuda" (None: "cuda" where there is one)
    dtype           "bf16", "fp16" or "fp32" ("auto": fp32 on a CPU, bf16 on a GPU)
    weights         "int8": the linear layers' weights in 8 bits (None: in dtype)
    seed            of the draws and of random weights; the process's random numbers stay untouched
    use_compile     compile the step by torch.compile (None: on a GPU)
    use_kernels     run operations as Triton kernels, or in PyTorch (None: as kernels on a GPU)
    settings        the method's own: `python generate.py --method sals --help` lists them

    A prompt is a text, token ids (a list, a numpy array, a torch tensor), or the messages of a
    chat, dicts with role and content. Every method raises UserError for what it cannot do, with one
    line that says what is wrong. `token_ids` has the ids that each row holds."""

    @errors_in_python_words()
    def __init__(
        self,
        source: str | Path | ModelConfig | None = None,
        method: str = "dense",
        max_seq_length: int | None = None,
        batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        weights: str | None = None,
        seed: int = 0,
        use_compile: bool | None = None,
        use_kernels: bool | None = None,
        **settings,
    ):
        check_options(seed=seed)
        if max_seq_length is not None:
            check_options(max_seq_length=max_seq_length)
        if batch_size is not None:
            check_options(batch_size=batch_size)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if not isinstance(source, ModelConfig):
            source = Path(source or NANO)
        self.source = source
        self.method = method
        self.settings = settings_from(method, settings)
        self.max_seq_length = max_seq_length
        self.batch_size = batch_size
        self.weights = weights
        self.seed = seed
        self.use_compile = use_compile
        self.use_kernels = use_kernels
        self.model, self.tokenizer = load_checkpoint(
            source, device, dtype, weights, method, settings, seed
        )
        self.engine: Engine | None = None  # `build_engine` makes it, when rows are known
        # The ids of each row, given and made. Its cache holds engine.pos[row] tokens: all of them,
        # or all but the last, which the next step writes. There are two exceptions, for which
        # `_settle` reads the rows again: a row that stopped has run on beside the others, so that
        # pos is larger, and for a row that was idle in the last call pos is 0.
        self.token_ids: list[list[int]] = []
        self.last_run: Run | None = None  # the last call
        # Weak: a stream that its caller drops ends, and holds no model.
        self._open_stream: weakref.ref[Generator[str, None, None]] | None = None

    # ---- what one calls

    @errors_in_python_words()
    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        ignore_eos: bool = False,
        follow: bool = False,
    ) -> Output | list[Output]:
        """The text after one prompt, or a list of outputs for a list of prompts, in its order.

        More prompts than rows are served in groups; with fewer, rows are idle.

        temperature: 0 takes the likeliest token. top_k: draw among the k likeliest (0: all). top_p:
        draw among the likeliest that together have this probability. ignore_eos: go on after the
        model's stop token. follow: each prompt goes on from what its row of the cache holds; a
        chat's messages are the whole chat all the same."""
        request = new_request(max_new_tokens, temperature, top_k, top_p, ignore_eos)
        is_one = is_one_prompt(prompts)
        ids = self._prompt_ids([prompts] if is_one else prompts, max_new_tokens, follow)
        self._begin_run(follow)
        rows = len(self.token_ids)
        for first in range(0, len(ids), rows):
            for _ in self._answer(ids[first : first + rows], request, follow):
                pass
        return self.last_run.outputs[0] if is_one else list(self.last_run.outputs)

    @errors_in_python_words()
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        ignore_eos: bool = False,
        follow: bool = False,
    ) -> Generator[str, None, None]:
        """The text after one prompt, piece by piece as tokens are made. Arguments as in `generate`.

        One may leave it early: the row then holds what was shown, and follow=True goes on from
        there. It ends by itself when anything else uses the cache."""
        request = new_request(max_new_tokens, temperature, top_k, top_p, ignore_eos, streamed=True)
        if not is_one_prompt(prompt) and len(prompt):
            raise UserError("stream takes one prompt; generate takes a list of them")
        self._end_stream()
        stream = self._pieces(prompt, request, follow)
        self._open_stream = weakref.ref(stream)
        return stream

    @errors_in_python_words()
    def chat(
        self,
        messages: Chat,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        ignore_eos: bool = False,
    ) -> Output:
        """The next message of a chat, by the model's own template. The rest is as in `generate`.

        messages: [{"role": "user", "content": "..."}, ...], the user's last."""
        check_messages(messages)
        return self.generate(messages, max_new_tokens, temperature, top_k, top_p, ignore_eos)

    @errors_in_python_words()
    def prefill(self, prompts: Prompt | list[Prompt]) -> None:
        """Reads one prompt, or a list of one for each row; rows without one hold nothing then.
        `generate` and `stream` with follow=True go on from there, and so does `ask`; `save` keeps
        it."""
        if not is_one_prompt(prompts):
            n = len(prompts)
            rows = len(self.token_ids) or self.batch_size or n
            if n > rows:
                raise UserError(f"{n} prompts are more than {rows} rows; set a larger --batch_size")
        else:
            prompts = [prompts]
        ids = self._prompt_ids(prompts, 0, follow=False)
        self._begin_run()
        for _ in self._answer(ids, Request(0, Sampling())):
            pass

    @errors_in_python_words()
    def ask(
        self,
        questions: str | list[str],
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        ignore_eos: bool = False,
    ) -> Output | list[Output]:
        """An answer of one line to each question about what row 0 holds.

        No question sees another question or its answer. As many are answered at once as there are
        rows. Afterwards row 0 is as it was, and the other rows hold nothing. Arguments as in
        `generate`."""
        request = new_request(max_new_tokens, temperature, top_k, top_p, ignore_eos, one_line=True)
        if not self.token_ids or not self.token_ids[0]:
            raise UserError("row 0 is empty; prefill or load what the questions are about")
        is_one = isinstance(questions, str)
        if is_one:
            questions = [questions]
        if not questions:
            raise UserError("there is no question; give one")
        document = self.token_ids[0]
        ids = [self.encode(f"\n{question}", document) for question in questions]
        check_lengths(ids, max_new_tokens, self.max_seq_length, self.model.config)
        self._begin_run(follow=True)
        self._settle()
        n = int(self.engine.pos[0])
        state = self.engine.copy_row_state(0)
        rows = len(self.token_ids)
        try:
            for first in range(0, len(ids), rows):
                group = ids[first : first + rows]
                for row in range(len(group)):  # each starts from the state after the document
                    self._restore(row, n, state, document)
                for _ in self._answer(group, request, follow=True):
                    pass
        finally:
            self._restore(0, n, state, document)
            self.engine.pos[1:] = 0
            for row in range(1, rows):
                self.token_ids[row] = []
        answers = [replace(output, text=output.text.strip()) for output in self.last_run.outputs]
        return answers[0] if is_one else answers

    @errors_in_python_words()
    def report(self) -> dict:
        """The figures of the last call: lists have an entry a prompt, bytes are of all rows."""
        if self.last_run is None:
            raise UserError("there is nothing to report yet; generate or prefill something first")
        return report_of(self, self.last_run)

    # ---- the rows of the cache

    @errors_in_python_words()
    def fork(self, row: int, n: int) -> None:
        """Makes the first n rows copies of one. Each draws its own tokens."""
        self._check_not_empty()
        rows = len(self.token_ids)
        check_number("row", row, int, f"[0, {rows})")
        check_number("n", n, int, f"[1, {rows}]")
        self._end_stream()
        self._settle()
        length = int(self.engine.pos[row])
        state = self.engine.row_state(row, length)
        ids = self.token_ids[row]
        for other in range(n):
            if other != row:
                self._restore(other, length, state, ids)

    @errors_in_python_words()
    def crop(self, n: int) -> None:
        """Takes every row back to its first n tokens; shorter rows stay as they are. A dense cache
        simply forgets the later tokens. Other caches cannot, so the n tokens are read once more."""
        self._check_not_empty()
        longest = max(len(ids) for ids in self.token_ids)
        check_number("n", n, int, f"[1, {max(1, longest)}]")
        self._end_stream()
        engine = self.engine
        self.token_ids = [ids[:n] for ids in self.token_ids]

        # The last token of each row is always read again, since its logits are wanted.
        lengths = [max(0, len(ids) - 1) for ids in self.token_ids]
        can_go_back = all(can_go_back_by_position(cache) for cache in engine.caches)
        for length, held in zip(lengths, engine.pos.tolist(), strict=True):
            if held < length:  # an idle row, whose cache no longer has what its ids say
                can_go_back = False
        if can_go_back:
            engine.pos.copy_(torch.tensor(lengths))
            engine.append([ids[-1:] for ids in self.token_ids])
        else:
            engine.prefill(self.token_ids)

    @errors_in_python_words()
    def save(self, path: str | Path, note: object = None) -> None:
        """Writes what the rows hold, and no more, as one safetensors file. Links are followed.

        note: anything in JSON that the file shall tell as well (`saved_facts` reads it). Raises
        OSError if the file cannot be written, and UserError if the path is that of a folder, a
        device or the like."""
        self._check_not_empty()
        self._end_stream()
        self._settle()
        tensors = {}
        lengths = []
        for row, n in enumerate(self.engine.pos.tolist()):
            if n == 0:
                continue
            state = self.engine.copy_row_state(row)
            state["ids"] = torch.tensor(self.token_ids[row])
            for name, x in state.items():
                tensors[f"{len(lengths)}.{name}"] = x
            lengths.append(n)
        facts = SavedFacts(lengths, self.max_seq_length, note)
        metadata = self.identity() | {"rows": json.dumps(facts)}
        compress.save_artifact(tensors, Path(path), metadata)

    @errors_in_python_words()
    def load(self, path: str | Path, room: int = 0) -> None:
        """Fills the rows with those of a file of `save`. If there are more rows than it has, they
        get its rows in turn.

        room: tokens that shall fit after them, if no max_seq_length was given. Raises UserError if
        the file is of another model, method or settings, or if its rows do not fit."""
        self._end_stream()
        started = time.time()
        saved = self._read_saved(Path(path))
        rows = len(self.token_ids) or self.batch_size or len(saved.ids)
        self._make_room_for(saved, rows, room)
        states = [self._saved_state(saved, i, room) for i in range(len(saved.ids))]

        self._begin_run()
        for row in range(rows):
            i = row % len(states)
            self._restore(row, saved.facts.lengths[i], states[i], saved.ids[i])
        self.last_run.outputs = [Output("", [], len(ids), "length") for ids in self.token_ids]
        self.last_run.rows = rows
        self.last_run.prefill_s = clock(self.engine.context.device) - started

    def _read_saved(self, path: Path) -> SavedRows:
        """A file of `save`. Raises UserError if it is no such file, damaged, or of another model,
        method or settings."""
        remedy = "load it with the options that saved it, or save it again"
        metadata, tensors = compress.read_tensors(path, self.identity(), remedy)
        facts = facts_of(metadata, path)
        ids = []
        for i in range(len(facts.lengths)):
            if f"{i}.ids" not in tensors:
                raise UserError(f"{path}: the ids of row {i} are missing; save it again")
            ids.append(tensors[f"{i}.ids"].tolist())
        return SavedRows(path, facts, tensors, ids)

    def _make_room_for(self, saved: SavedRows, rows: int, room: int) -> None:
        """Builds the engine if there is none, with room for a file's rows and for `room` tokens
        after them. Raises UserError if the file needs more than was asked for."""
        path = saved.path
        capacity = self.max_seq_length or max(saved.facts.max_seq_length, saved.longest() + room)
        if len(saved.ids) > rows:
            needed = f"{path} needs a --batch_size of {len(saved.ids)}, not {rows}"
            raise UserError(f"{needed}; raise --batch_size")
        if saved.longest() > capacity:
            needed = f"{path} needs a --max_seq_length of {saved.longest()}, not {capacity}"
            raise UserError(f"{needed}; raise --max_seq_length")
        if self.engine is None:
            self.max_seq_length = capacity
            self.build_engine(rows)

    def _saved_state(self, saved: SavedRows, i: int, room: int) -> dict[str, Tensor]:
        """What the caches held of a file's row i. Raises UserError if its tensors are of other
        shapes than those of this engine."""
        state = {}
        for name, x in self.engine.row_state(0, saved.facts.lengths[i]).items():
            tensor = saved.tensors.get(f"{i}.{name}")
            # A budget that is a fraction of max_seq_length makes tensors of other shapes.
            if tensor is None or tensor.shape != x.shape:
                capacity = self.max_seq_length
                saved_capacity = saved.facts.max_seq_length
                was = f"saved with --max_seq_length {saved_capacity}"
                fault = f"{was}, for which the budget differs from that of {capacity}"
                remedy = f"give --max_seq_length {saved_capacity}"
                if saved.longest() + room > saved_capacity:  # what is to follow would not fit
                    remedy = f"save it again with --max_seq_length {capacity}"
                raise UserError(f"{saved.path}: {fault}; {remedy}")
            state[name] = tensor
        return state

    def identity(self) -> dict[str, str]:
        """What a saved cache must agree on with this one."""
        identity = compress.model_identity(self.model)
        identity["method"] = self.method
        identity["settings"] = str(self.settings)
        identity["weights"] = str(self.weights)
        identity["dtype"] = str(self.model.norm.weight.dtype)
        artifact = method_named(self.method).artifact
        if artifact and isinstance(self.source, Path):
            identity["artifact"] = fingerprint([compress.artifact_path(self.source, artifact)])
        return identity

    def held_memory(self) -> HeldMemory:
        """What all rows hold, measured."""
        if self.engine is None:
            return HeldMemory(0, 0, 0.0)
        context = self.engine.context
        lengths = self.engine.pos.tolist()
        size = 0
        for row, n in enumerate(lengths):
            if n == 0:
                continue
            for cache in self.engine.caches:
                size += sum(x.nbytes for x in cache.row_state(row, n).values())
        tokens = sum(lengths)
        places = context.batch_size * context.max_seq_length
        dense = dense_bytes(context) * len(self.engine.caches) * tokens / places
        return HeldMemory(tokens, size, size / max(1, dense))

    # ---- the steps behind these calls

    def build_engine(self, rows: int, need: int = 0) -> Engine:
        """Builds the caches and the engine for so many rows. The method may change the model's
        weights.

        need: tokens that a row must hold, if there is no max_seq_length. Raises UserError, before
        anything is built, if something does not fit."""
        config = self.model.config
        capacity = self.max_seq_length
        if capacity is None:
            capacity = max(need, min(DEFAULT_LENGTH, most_tokens(config)))
        check_capacity(capacity, config, "--max_seq_length")
        artifact = load_artifact(self.source, self.method, self.model)
        check_memory(self.model, self.method, self.settings, artifact, rows, capacity)
        context = CacheContext(self.model, rows, capacity, self.use_kernels)
        caches = method_named(self.method).build(self.model, self.settings, context, artifact)
        if hasattr(self.settings, "budget") and sum(self.settings.budget(capacity)) >= capacity:
            note = f"note: the budget covers {capacity} tokens: every token is attended"
            print(note, file=sys.stderr)
        graphed = context.device.type == "cuda"
        compiled = graphed if self.use_compile is None else self.use_compile
        if compiled and not graphed:
            for cache in caches:  # they stay eager: Inductor drops some of KIVI's keys on a CPU
                cache.decode = torch.compiler.disable(cache.decode)
        try:
            self.engine = Engine(
                self.model,
                caches,
                context,
                compiled=compiled,
                graphed=graphed,
                seed=self.seed,
            )
        except torch._dynamo.exc.TorchDynamoException as error:
            memory_error = memory_error_in(error)
            if memory_error is not None:
                raise memory_error from error
            cause = str(error).split("\n")[0]
            raise UserError(f"the step cannot be compiled ({cause}); use --no-compile") from error
        self.max_seq_length = capacity
        self.token_ids = [[] for _ in range(rows)]
        return self.engine

    @errors_in_python_words()
    def encode(self, prompt: Prompt, after: list[int] | tuple[int, ...] = ()) -> list[int]:
        """Token ids: those that the prompt comes after, then its own. The messages of a chat are
        the whole chat, so nothing comes before them."""
        if is_chat(prompt):
            check_messages(prompt)
            return encode_chat(self._tokenizer_for_text(), prompt)
        if isinstance(prompt, str):
            tokenizer = self._tokenizer_for_text()
            if after:
                return [*after, *tokenizer.encode_continuation(prompt)]
            return tokenizer.encode(prompt)
        return [*after, *ids_as_list(prompt)]

    def _tokenizer_for_text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("random weights have no tokenizer; give token ids")
        return self.tokenizer

    def _prompt_ids(
        self, prompts: list[Prompt], max_new_tokens: int, follow: bool
    ) -> list[list[int]]:
        """Steps 1 and 2 for all prompts of a call: their token ids, with those that a row holds
        before them if they follow it. Builds the engine if there is none."""
        rows = len(self.token_ids) or self.batch_size or len(prompts)
        if len(prompts) == 0:
            raise UserError("there is no prompt; give one")
        if follow and len(prompts) > rows:
            raise UserError(f"{len(prompts)} prompts cannot follow the {rows} rows of the cache")
        self._end_stream()
        ids = []
        for i, prompt in enumerate(prompts):
            held = []
            if follow and self.token_ids:
                held = self.token_ids[i]
            ids.append(self.encode(prompt, held))
        need = check_lengths(ids, max_new_tokens, self.max_seq_length, self.model.config)
        if self.engine is None:
            self.build_engine(rows, need)
        return ids

    def _begin_run(self, follow: bool = False) -> None:
        """Begins the figures of a call.

        After `prefill` or `load` a call that follows is the one which answers that prompt, so the
        time of reading it counts here."""
        self._end_stream()
        read_s = 0.0
        if follow and self.last_run is not None and self.last_run.first_token_s is None:
            read_s = self.last_run.prefill_s
        self.last_run = Run(prefill_s=read_s)

    def _answer(
        self, prompts: list[list[int]], request: Request, follow: bool = False
    ) -> Iterator[NewToken]:
        """Steps 3 to 7 for one group of prompts, one in each of the first rows. Yields the tokens
        of their answers.

        follow: the other rows keep their ids, to be read again when they are wanted. A caller may
        stop taking tokens at any time: `token_ids` and the outputs have what was yielded."""
        engine = self.engine
        run = self.last_run
        device = engine.context.device

        # Step 3: read the prompts.
        run.rows = len(prompts)
        started = clock(device)
        self._read(prompts, follow)
        read_s = clock(device) - started
        if run.first_token_s is None:  # the first group's; later ones are read after that token
            run.prefill_s += read_s
        outputs = [Output("", [], len(ids), "length") for ids in prompts]
        run.outputs += outputs

        # What ends an answer.
        stop_ids: set[int] = set()
        if self.tokenizer and not request.ignore_eos:
            stop_ids = self.tokenizer.stop_ids

        def stops(ids: list[int]) -> bool:
            if ids[-1] in stop_ids:
                return True
            return request.one_line and "\n" in self.tokenizer.decode(ids).lstrip()

        # Steps 4 to 7: decode. A step is always one of all rows. So idle rows run along, from
        # position 0 on, where they cost least; what they held there is overwritten.
        engine.pos[len(prompts) :] = 0
        engine.sampling = request.sampling
        stride = request.stride(stop_ids, device)
        n_steps = engine.n_steps
        started = time.time()
        try:
            for token in decode_tokens(engine, request.max_new_tokens, stops, stride, len(prompts)):
                if run.first_token_s is None:
                    run.first_token_s = run.prefill_s + time.time() - started
                self.token_ids[token.row].append(token.id)
                if token.is_stop:
                    outputs[token.row].finish_reason = "stop"
                else:
                    outputs[token.row].token_ids.append(token.id)
                    yielded = time.time()
                    try:
                        yield token
                    finally:  # the time that the caller takes is no time of decoding
                        started += time.time() - yielded
        finally:  # also where the caller takes no more tokens
            run.decode_s += time.time() - started
            run.row_steps += len(prompts) * (engine.n_steps - n_steps)
            engine.pos[len(prompts) :] = 0
            if self.tokenizer:
                for output, prompt in zip(outputs, prompts, strict=True):
                    output.text = self.tokenizer.decode(output.token_ids, prompt)

    def _read(self, prompts: list[list[int]], follow: bool) -> None:
        """Makes the first rows hold a prompt each. If all prompts begin with what their rows hold
        already, only the new tokens are read. The ids of the other rows are forgotten, unless
        follow says to keep them."""
        lengths = self.engine.pos.tolist()
        new = []
        all_go_on = True
        for row, ids in enumerate(prompts):
            n = lengths[row]
            held = self.token_ids[row][:n]  # what the cache of the row has
            if n == 0 or len(held) < n or ids[:n] != held:
                all_go_on = False
            new.append(ids[n:])
        idle = [[] for _ in range(len(self.token_ids) - len(prompts))]
        try:
            if not all_go_on:
                self.engine.prefill(prompts + idle)
            elif any(new):
                self.engine.append(new + idle)
        except BaseException:  # Ctrl-C, too: some rows may hold half a prompt
            self.engine.pos.zero_()
            raise
        self.token_ids[: len(prompts)] = [list(ids) for ids in prompts]
        if not follow:
            self.token_ids[len(prompts) :] = idle

    def _pieces(self, prompt: Prompt, request: Request, follow: bool) -> Generator[str, None, None]:
        """The generator behind `stream`."""
        with errors_in_python_words():
            # What begins a call ends the open stream, which here is this generator itself. So it
            # is hidden until they are done.
            this_stream = self._open_stream
            self._open_stream = None
            ids = self._prompt_ids([prompt], request.max_new_tokens, follow)
            self._begin_run(follow)
            self._open_stream = this_stream
            self._tokenizer_for_text()
            decoder = StreamDecoder(self.tokenizer, ids[0])
            for token in self._answer(ids, request, follow):
                yield decoder.push(token.id)
            yield decoder.flush()

    def _end_stream(self) -> None:
        """Ends a stream that was left half-way, since the next call needs its cache."""
        if self._open_stream is None:
            return
        stream = self._open_stream()  # of a weak reference: None if its caller has dropped it
        self._open_stream = None
        if stream is not None:
            stream.close()

    def _settle(self) -> None:
        """Reads all rows again if the cache of one has not what its ids say. A row that stopped has
        run on while others were still decoded, and an idle row has lost its tokens."""
        for ids, n in zip(self.token_ids, self.engine.pos.tolist(), strict=True):
            is_whole = n == len(ids)
            lacks_last_token = n > 0 and n == len(ids) - 1  # the next step will write it
            if not is_whole and not lacks_last_token:
                self.engine.prefill(self.token_ids)
                return

    def _restore(self, row: int, n: int, state: dict[str, Tensor], ids: list[int]) -> None:
        """Makes a row hold these ids, by a state of n tokens that `row_state` gave. (n is one less
        than the ids where the last token is still to be written.)"""
        self.engine.restore_row(row, n, state)
        self.token_ids[row] = list(ids)

    def _check_not_empty(self) -> None:
        """Raises UserError if no row holds anything."""
        if not any(self.token_ids):
            raise UserError("the cache holds nothing yet; prefill, generate or load first")


def new_request(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    ignore_eos: bool,
    one_line: bool = False,
    streamed: bool = False,
) -> Request:
    """What a call asks for. UserError where a value cannot be."""
    check_number("max_new_tokens", max_new_tokens, int, "[0, 4294967296]")
    check_options(temperature=temperature, top_k=top_k, top_p=top_p)
    sampling = Sampling(temperature, top_k, top_p)
    return Request(max_new_tokens, sampling, ignore_eos, one_line, streamed)


# ------------------------------------------------------------------------------- the command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and that takes only full names of options."""

    def __init__(self, **kwargs):
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=as_written, **kwargs)

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")

    def option(self, name: str, kind: Callable, default: object, about: str, **more) -> None:
        """An option of one value, or of several (nargs, or action "append"), and its default."""
        if default not in (None, "", []):
            shown = default
            if isinstance(default, tuple | list):
                shown = " ".join(map(str, default))
            about = f"{about} (default {shown})"
        self.add_argument(name, type=kind, default=default, help=about.replace("%", "%%"), **more)

    def flag(self, name: str, about: str, action: object = "store_true") -> None:
        self.add_argument(name, action=action, help=about)


def number_in(interval: str, kind: type = float) -> Callable[[str], float]:
    """Reads a number of the command line that lies in an interval such as "(0, 1]"."""

    def number(text: str) -> float:
        value = kind(text)
        if not compress.inside(value, interval):
            raise argparse.ArgumentTypeError(f"{text}: give a number in {interval}")
        return value

    if kind is int:
        number.__name__ = "whole number"  # argparse says "invalid whole number value: '1.5'"
    return number


positive = number_in("(0, inf)")
fraction = number_in("(0, 1]")


def limited(name: str) -> Callable[[str], float]:
    """Reads the number of an option that LIMITS has."""
    kind, interval = LIMITS[name]
    return number_in(interval, kind)


def whole(least: int, most: int = 1 << 32) -> Callable[[str], int]:
    return number_in(f"[{least}, {most}]", int)


def add_settings(parser: Parser, method: str) -> None:
    """One option for each field of the method's settings dataclass."""
    settings_class = method_named(method).settings
    in_papers = method_named(method).paper  # name -> the paper's value
    group = parser.add_argument_group(
        f"settings of --method {method}", settings_class.__doc__, argument_default=argparse.SUPPRESS
    )
    for f in dataclasses.fields(settings_class):
        default = f.default
        if f.type is bool:
            default = "on" if f.default else "off"
        in_paper = ""
        if f.name in in_papers:
            in_paper = f"; paper {in_papers[f.name]}"
        about = f"{f.metadata['help']} (default {default}{in_paper})".replace("%", "%%")
        option = f"--{f.name}"
        if f.type is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, help=about)
        else:
            group.add_argument(option, type=f.type, choices=f.metadata["choices"], help=about)


def add_device_option(parser: Parser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = "the device that runs the model; cuda is the default if torch sees a GPU"
    parser.option("--device", str, device, about, choices=DEVICES)


def add_model_options(parser: Parser) -> None:
    about = "a Hugging Face folder: config.json, *.safetensors, tokenizer"
    about += " (default: the embedded model)"
    parser.add_argument("--checkpoint", type=Path, default=NANO, metavar="FOLDER", help=about)
    add_device_option(parser)
    about = "auto: fp32 on the CPU, bf16 on a GPU"
    parser.option("--dtype", str, "auto", about, choices=("auto", *DTYPES))


def add_weights_option(parser: Parser) -> None:
    about = "store the weights of the linear layers in 8 bits (default: in --dtype)"
    parser.option("--weights", str, None, about, choices=WEIGHTS)


def add_engine_options(parser: Parser) -> None:
    yes_or_no = argparse.BooleanOptionalAction
    parser.flag("--compile", "compile the step (default: on CUDA)", yes_or_no)
    about = "run operations as Triton kernels, rather than in PyTorch (default: on CUDA)"
    parser.flag("--kernels", about, yes_or_no)


def add_sampling_options(parser: Parser) -> None:
    parser.option("--max_new_tokens", whole(1), 100, "tokens to make for each prompt")
    parser.option("--temperature", limited("temperature"), 0.0, "0 is greedy")
    parser.option("--top_k", limited("top_k"), 0, "sample among the k likeliest tokens; 0: all")
    about = "sample among the likeliest tokens that together have this probability"
    parser.option("--top_p", limited("top_p"), 1.0, about)
    about = "seed of sampling, random prompts and random weights"
    parser.option("--seed", limited("seed"), 0, about)


def sampling_options(args: argparse.Namespace) -> dict:
    """What add_sampling_options has read, as the methods of `LLM` take it."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
    }


def add_chat_options(parser: Parser) -> None:
    parser.flag("--chat", "write each prompt as a chat message, by the model's own template")
    about = "a system message for the chat; it implies --chat"
    parser.option("--system", str, "", about, metavar="TEXT")


def parser_of_methods(doc: str, argv: list[str]) -> Parser:
    """A parser with --method and the settings of the method that argv names; its help lists all.

    doc: a module's docstring, whose second paragraph becomes the end of the help."""
    description, epilog = doc.split("\n\n")[:2]
    if "-h" in argv or "--help" in argv:
        description += "\n\nmethods:"
        for name in compress.method_names():
            about = " ".join(method_named(name).settings.__doc__.split())
            description += f"\n  {name:13}{about}"
    parser = Parser(description=description, epilog=epilog)
    parser.option("--method", str, "dense", "what the cache stores; its settings appear below")
    # The method decides which settings exist, so a small parser reads it before all else.
    parser_of_method = Parser(add_help=False)
    parser_of_method.add_argument("--method", default="dense")
    known, _ = parser_of_method.parse_known_args(argv)
    add_settings(parser, known.method)
    return parser


def given_settings(args: argparse.Namespace) -> dict:
    """The settings of the method that a command line names, as `LLM` takes them."""
    settings_class = method_named(args.method).settings
    names = [f.name for f in dataclasses.fields(settings_class)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = parser_of_methods(__doc__, argv)
    add_model_options(parser)
    add_weights_option(parser)
    about = "use random weights of this model's shape, to time a step"
    parser.option("--random_weights", str, None, about, choices=SHAPES)
    parser.flag("--json", "print the report as one JSON object, the last line of stdout")
    about = "text, a file, stdin, or N random tokens; repeat it for a batch"
    about += " (default: the folder's demo.txt)"
    parser.option("--prompt", str, [], about, action="append", metavar="TEXT|@FILE|-|N")
    about = "a question about the prompt, answered in one line; repeat it for more questions"
    parser.option("--ask", str, [], about, action="append", metavar="QUESTION")
    about = "rows of the cache; fewer prompts (or questions) are repeated to fill it"
    parser.option("--batch_size", limited("batch_size"), None, about)
    about = "write the prompt's cache to this file once it has been read"
    parser.option("--save_cache", Path, None, about, metavar="FILE")
    about = "continue from a file of --save_cache, in place of --prompt"
    parser.option("--load_cache", Path, None, about, metavar="FILE")
    add_chat_options(parser)
    add_sampling_options(parser)
    parser.flag("--ignore_eos", "always make max_new_tokens tokens")
    about = "tokens that a row can hold (default: what the prompts need)"
    parser.option("--max_seq_length", limited("max_seq_length"), None, about)
    add_engine_options(parser)
    args = parser.parse_args(argv)
    args.options = given_settings(args)
    args.chat = args.chat or args.system != ""

    all_random = all(COUNT.fullmatch(text) for text in args.prompt)
    if args.random_weights and (args.ask or args.chat or not all_random):
        parser.error("random weights have no tokenizer: give --prompt N, and no --ask or --chat")
    if args.random_weights and not args.prompt and not args.load_cache:
        parser.error("random weights have no demo.txt: give --prompt N or --load_cache")
    if args.random_weights and args.checkpoint != NANO:
        parser.error("give --random_weights or --checkpoint, not both")
    if args.batch_size and args.batch_size < len(args.prompt):
        parser.error("--batch_size must be at least the number of prompts")
    if args.ask and len(args.prompt) > 1:
        parser.error("--ask takes one --prompt")
    if args.load_cache and args.prompt:
        parser.error("--load_cache has the prompt; give --ask, or nothing")
    if args.chat and (args.ask or not args.prompt):
        parser.error("--chat needs a --prompt, and takes no --ask")
    if args.save_cache:
        compress.written_file(args.save_cache)  # refuses a wrong path now, not after the prompt
    return args


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's text without a byte-order mark and with \\n for each line end, as stdin's."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: no regular file; copy the text into one")
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except UnicodeError as error:
        raise UserError(f"{path}: not UTF-8 text; convert it first ({error})") from None


def read_prompts(args: argparse.Namespace, llm: LLM) -> tuple[list[list[int]], list[str]]:
    """Token ids of the prompts, and the questions to ask after them."""
    texts = args.prompt
    asks = args.ask
    if not texts and not args.load_cache:
        path = args.checkpoint / "demo.txt"
        if not path.is_file():
            raise UserError("give a --prompt: this checkpoint has no demo.txt")
        document, *questions = read_text(path).split("\nQuestion:")
        texts = [document]
        asks = asks or [f"Question:{text}".rstrip("\n") for text in questions]
    rows = args.batch_size or 1
    if rows > 1 and rows < len(asks):  # one row answers them one after another
        raise UserError(f"--batch_size must be at least the number of questions, {len(asks)}")

    prompts = []
    for i, text in enumerate(texts):
        if COUNT.fullmatch(text) and not args.chat:
            prompts.append(random_prompt(int(text), args.seed + i, llm.model.config))
            continue
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = read_text(Path(text[1:]))
        if not text:
            raise UserError("the prompt is empty; give some text, @FILE, - or a number of tokens")
        if args.chat:
            messages = [{"role": "user", "content": text}]
            if args.system:
                messages.insert(0, {"role": "system", "content": args.system})
            prompts.append(llm.encode(messages))
        else:
            prompts.append(llm.encode(text))
    return prompts, asks


def random_prompt(n: int, seed: int, config: ModelConfig) -> list[int]:
    """n random ids, or one more than the model's positions, which is refused, if n is larger. Ids 0
    to 2 are left out, which are often <unk>, <s> and </s>."""
    rng = random.Random(seed)
    n = min(n, config.max_positions + 1)
    return [rng.randrange(3, config.vocab_size) for _ in range(n)]


def llm_of(args: argparse.Namespace, method: str, settings: dict) -> LLM:
    """The LLM that a command line describes, with this method and these of its settings."""
    source = args.checkpoint
    if args.random_weights:
        source = SHAPES[args.random_weights]
    return LLM(
        source,
        method,
        max_seq_length=args.max_seq_length,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        weights=args.weights,
        seed=args.seed,
        use_compile=args.compile,
        use_kernels=args.kernels,
        **settings,
    )


def fill_rows(items: list, rows: int) -> list:
    """The items, repeated in turn where there are more rows."""
    return [items[i % len(items)] for i in range(max(rows, len(items)))]


def read_or_load(
    llm: LLM, args: argparse.Namespace, prompts: list[list[int]], asks: list[str]
) -> None:
    """Reads or loads the prompts, with room for what comes after: a question and its answer."""
    room = args.max_new_tokens
    if asks:
        before = [0]  # some token that a question comes after, so that it gets no BOS
        lengths = [len(llm.encode(f"\n{ask}", before)) - len(before) for ask in asks]
        room += max(lengths)
    if args.load_cache:
        llm.load(args.load_cache, room)
        return
    rows = args.batch_size or len(prompts)
    llm.max_seq_length = check_lengths(prompts, room, args.max_seq_length, llm.model.config)
    llm.build_engine(rows)  # says whether so many rows fit, before there is a prompt for each
    llm.prefill(prompts if asks else fill_rows(prompts, rows))


def answers_to(llm: LLM, args: argparse.Namespace, asks: list[str]) -> list[str]:
    """The answer to each question; where there are more rows, they answer the questions in turn."""
    questions = fill_rows(asks, len(llm.token_ids))
    outputs = llm.ask(questions, ignore_eos=args.ignore_eos, **sampling_options(args))
    return [output.text for output in outputs[: len(asks)]]


def run_generate(args: argparse.Namespace) -> None:
    """The command: reads, answers or goes on, and reports."""
    llm = llm_of(args, args.method, args.options)
    prompts, asks = read_prompts(args, llm)
    read_or_load(llm, args, prompts, asks)
    if args.save_cache:
        llm.save(args.save_cache)

    answers = {}  # of each method, one for each question
    has_tokenizer = llm.tokenizer is not None
    is_streamed = has_tokenizer and len(llm.token_ids) == 1 and not asks and not args.json
    options = sampling_options(args)
    if asks:
        answers[args.method] = answers_to(llm, args, asks)
    elif is_streamed:
        for piece in llm.stream([], ignore_eos=args.ignore_eos, follow=True, **options):
            print(piece, end="", flush=True)
        print()
    else:
        nothing_more = [[]] * len(llm.token_ids)
        llm.generate(nothing_more, ignore_eos=args.ignore_eos, follow=True, **options)
    figures = llm.report()

    # The same questions without compression, to compare with.
    is_compressed = args.method != "dense" and not llm.model.config.elitekv
    if asks and is_compressed and not args.json and not args.load_cache:
        del llm  # the method may have changed its weights, so the model is loaded again
        dense = llm_of(args, "dense", {})
        read_or_load(dense, args, prompts, asks)
        answers["dense"] = answers_to(dense, args, asks)

    for i, ask in enumerate(asks):
        print(ask.split("\n")[0])
        for method, answers_of_method in answers.items():
            print(f"  {method + ':':10} {answers_of_method[i]}")
    if has_tokenizer and not asks and not is_streamed:
        for i, text in enumerate(figures["text"]):
            print(f"[row {i}] {text}")
    print_report(figures)
    if args.json:
        print(json.dumps(figures, separators=(",", ":")))


def print_report(figures: dict) -> None:
    """The single figures of a report on stderr, a line each. Lists are only in --json, and so are
    those that are 0 or None."""
    print(file=sys.stderr)
    for name, value in figures.items():
        if value and not isinstance(value, list | dict):
            shown = human(value) if "bytes" in name else value
            print(f"{name:21} {shown}", file=sys.stderr)


def run_command(run: Callable[[], None]) -> None:
    """Runs a command, in each process where torchrun has started several.

    What a user gets wrong ends in one line on stderr and exit code 2."""
    if is_one_of_several_processes():
        from extras import parallel

        parallel.run_together(run)  # ends the process
    run_alone(run)


def is_one_of_several_processes() -> bool:
    """Did torchrun start this process, and others with it?"""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def run_alone(run: Callable[[], None]) -> None:
    """Runs a command in this process."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", newline=None)  # as files are read
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack characters of the model's
    try:
        run()
    except UserError as error:
        leave(2, f"error: {in_command_line_words(error)}")
    except UnicodeError as error:
        leave(2, f"error: not UTF-8 text; convert it first ({error})")
    except BrokenPipeError:  # whoever read stdout has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.filename:
            leave(2, f"error: {error.filename}: {error.strerror}")
        leave(2, f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        cause = str(error) or "out of memory"
        is_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_of_memory and "allocate memory" not in cause:
            raise
        cause = cause.splitlines()[0]
        leave(2, f"error: not enough memory ({cause}); use a smaller model, fewer or shorter rows")
    except KeyboardInterrupt:
        leave(130, "interrupted")


def leave(code: int, line: str) -> None:
    """Ends the process with a line on stderr, of characters that move no terminal."""
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(code)


def main() -> None:
    run_command(lambda: run_generate(parse_args(sys.argv[1:])))


if __name__ == "__main__":
    sys.modules["generate"] = sys.modules["__main__"]  # for an extra that imports generate
    main()
