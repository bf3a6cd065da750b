"""Tasks of lm-evaluation-harness, answered through a compressed cache: its tables, and the bytes
beside them.

    pip install "lm-eval[hf,ruler]"
    python -m extras.harness --method dense --method sals --tasks ruler_vt ruler_cwe --limit 50

Contexts are prefilled but for their last token. It is decoded, and so is what is scored or
generated. The cache has room for the longest request. Budgets that are fractions are fractions of
that room, so run tasks of very different lengths in commands of their own.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.nn.functional as F

from extras.evaluate import Candidate, check_candidates, ledger, row_options
from generate import Engine, Parser, ProgressLine, positive, whole
from model import ModelConfig, Tokenizer, UserError, load_config, load_tokenizer

INSTALL = 'pip install "lm-eval[hf,ruler]"'

# ------------------------------------------------------------------------ what an engine does of it


def prefill_but_last(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Prefills each prompt but its last token, which the next step decodes: all logits are the
    method's. A prompt of one token is prefilled, and decoded in its own place."""
    engine.prefill([ids[:-1] or ids for ids in prompts])
    engine.tokens.copy_(torch.tensor([ids[-1] for ids in prompts]))
    engine.pos.copy_(torch.tensor([len(ids) - 1 for ids in prompts]))


class ScoredRow(NamedTuple):
    """A text whose last n tokens are scored."""

    ids: list[int]
    n: int


@torch.inference_mode()
def decode_scores(engine: Engine, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
    """The log-probability of the last n ids of each row, and whether they are the likeliest. Rows
    may be of unlike lengths."""
    scored = [torch.tensor(ids[-n:]) for ids, n in rows]
    padded = torch.nn.utils.rnn.pad_sequence(scored, batch_first=True, padding_value=-1)  # [B, n]
    last_place = torch.tensor([len(ids) - 2 for ids, _ in rows]).to(engine.pos)
    prefill_but_last(engine, [ids[:-n] for ids, n in rows])
    total = torch.zeros(len(rows), device=engine.tokens.device)
    likeliest = torch.ones(len(rows), dtype=torch.bool, device=engine.tokens.device)
    for token in padded.T.to(engine.tokens):
        engine.pos.clamp_(max=last_place)  # a row at its end writes its last place again
        engine.step()
        total -= F.cross_entropy(engine.logits.float(), token, ignore_index=-1, reduction="none")
        likeliest &= (token < 0) | (engine.tokens == token)
        engine.tokens.copy_(token.clamp(min=0))
    engine.check_logits()
    return list(zip(total.tolist(), likeliest.tolist(), strict=True))


def until_first(text: str, ends: Sequence[str]) -> str:
    """A text up to the first place where one of the ends begins."""
    for end in ends:
        text = text.split(end)[0]
    return text


@torch.inference_mode()
def decode_texts(
    engine: Engine,
    prompts: Sequence[list[int]],
    most: int,
    until: Sequence[str],
    tokenizer: Tokenizer,
) -> list[str]:
    """The greedy text after each prompt, of at most so many tokens, up to any of the texts
    `until`."""

    def stops(ids: list[int]) -> bool:
        if ids[-1] in tokenizer.stop_ids:
            return True
        # One token late: the one that completes an end may hold more of it.
        text = tokenizer.decode(ids[-64:-1])
        return any(end in text for end in until)

    prefill_but_last(engine, prompts)
    engine.step()
    answers = generate.decode_rows(engine, most, stops, stride=16)
    return [until_first(tokenizer.decode(ids), until) for ids in answers]


# ------------------------------------------------------------------ the model that the harness asks


class DecodeRequest(NamedTuple):
    """What the harness asks for, as an engine decodes it."""

    options: tuple  # what the batch is decoded with; requests of unlike options are decoded apart
    capacity: int  # tokens that a row must hold
    row: object  # what one row is: a ScoredRow, or a prompt


def batches(requests: list[DecodeRequest], size: int) -> Iterator[list[int]]:
    """The numbers of the requests, in batches of the same options, the long ones first."""

    def key(i: int) -> tuple:
        return requests[i].options, requests[i].capacity

    order = sorted(range(len(requests)), key=key, reverse=True)
    for _, alike in itertools.groupby(order, lambda i: requests[i].options):
        numbers = list(alike)
        for first in range(0, len(numbers), size):
            yield numbers[first : first + size]


def longest_text(args: argparse.Namespace, c: ModelConfig) -> int:
    """Tokens to which a text is cut: what the model takes, or fewer by --max_length."""
    longest = generate.most_tokens(c)
    return min(args.max_length or longest, longest)


def generation_options(request: object, longest: int) -> tuple[int, tuple[str, ...]]:
    """The most new tokens and the ends of a request for text. Raises UserError for what a greedy
    choice does not do."""
    from lm_eval.models.utils import normalize_gen_kwargs

    options = normalize_gen_kwargs(request.args[1])
    most = options.pop("max_gen_toks")
    until = tuple(end for end in options.pop("until") if end)
    other = {}
    for name, value in options.items():
        is_greedy = (name, value) in (("do_sample", False), ("num_beams", 1))
        is_of_sampling = name in ("temperature", "top_p", "top_k")
        if not is_greedy and not is_of_sampling:
            other[name] = value
    if most >= longest and not other:
        other = {"max_gen_toks": most}
    if other:
        raise UserError(
            f"{request.task_name}: {other} is not supported; "
            f"only greedy texts below {longest} tokens are"
        )
    return most, until


def harness_model(candidate: Candidate, args: argparse.Namespace) -> object:
    """The model that lm-evaluation-harness asks. Its class is made here, since few have the
    package."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    folder = candidate.folder or args.checkpoint
    tokenizer = load_tokenizer(folder)
    longest = longest_text(args, load_config(folder))
    end_id = tokenizer.special_tokens.get(tokenizer.chat_variables.get("eos_token"))
    if end_id is None:
        end_id = min(tokenizer.stop_ids, default=0)

    class CompressedLM(TemplateLM):
        max_length = longest
        ledgers = {}  # by the cache's capacity
        eot_token_id = end_id
        prefix_token_id = end_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            return tokenizer.encode(string, bos=add_special_tokens is not False)

        def answer(self, label: str, requests: list[DecodeRequest], decode: Callable) -> list:
            """The answer to each request: decode(engine, rows, *options) gives those of a batch.

            The cache has room for the longest, since budgets may be fractions of that."""
            capacity = max(request.capacity for request in requests)
            n_rows = min(args.rows, len(requests))
            engine = candidate.engine(args, n_rows, capacity, least=1)
            self.ledgers[capacity] = ledger(engine, capacity)
            n_rows = engine.context.batch_size
            answers = [None] * len(requests)
            with ProgressLine(f"{candidate.label}: {label}", len(requests)) as progress:
                for batch in batches(requests, n_rows):
                    filled = batch + batch[-1:] * (n_rows - len(batch))  # the last one repeats
                    rows = [requests[i].row for i in filled]
                    made = decode(engine, rows, *requests[batch[0]].options)
                    for i, own in zip(filled, made, strict=True):
                        answers[i] = own
                    progress.tick(len(batch))
            return answers

        def _loglikelihood_tokens(self, requests: list, **_) -> list[tuple[float, bool]]:
            asked = []
            for _, context, continuation in requests:
                ids = (context + continuation)[-longest - 1 :]
                n = len(continuation)
                if not 0 < n < len(ids):
                    raise UserError(f"{n} tokens are to be scored, of at most {longest}")
                asked.append(DecodeRequest((), len(ids) - 1, ScoredRow(ids, n)))
            return self.answer("scoring", asked, decode_scores)

        def loglikelihood_rolling(self, requests: list, **_) -> list[float]:
            windows = []  # of all texts, one after another
            n_windows = []  # of each text
            for request in requests:
                ids = self.tok_encode(request.args[0])
                parts = list(get_rolling_token_windows(ids, self.prefix_token_id, longest, 1))
                for part in parts:
                    context, continuation = make_disjoint_window(part)
                    windows.append((None, context, continuation))
                n_windows.append(len(parts))
            scores = iter(self._loglikelihood_tokens(windows))
            return [sum(score for score, _ in itertools.islice(scores, n)) for n in n_windows]

        def generate_until(self, requests: list, **_) -> list[str]:
            asked = []
            n_cut = 0
            for request in requests:
                most, until = generation_options(request, longest)
                ids = self.tok_encode(request.args[0])
                room = longest - most
                if len(ids) > room:
                    n_cut += 1
                ids = ids[-room:] or [self.prefix_token_id]
                asked.append(DecodeRequest((most, until), len(ids) + most, ids))
            if n_cut:
                note = f"note: {n_cut} of {len(asked)} prompts are cut on the left"
                print(f"{note}, to fit {longest} tokens with their answers", file=sys.stderr)
            return self.answer("generating", asked, partial(decode_texts, tokenizer=tokenizer))

    return CompressedLM()


# ---------------------------------------------------------------------------------------- its tasks


def ruler_length(task: object) -> int | None:
    """How many tokens RULER's texts have in this task; None if it is not one of RULER's."""
    first = next(iter(task.eval_docs), None)
    if first is not None and {"input", "outputs", "length", "max_length"} <= first.keys():
        return first["max_length"]
    return None


def load_tasks(args: argparse.Namespace, manager: object) -> tuple[list, list]:
    """The tasks and groups that --tasks names, and the tasks in them. Raises UserError where there
    are none."""
    names = " ".join(args.tasks)
    for name in args.tasks:
        if not manager.match_tasks([name]):
            raise UserError(f"--tasks {name}: the harness has no such task; see lm_eval ls tasks")
    random.seed(0)
    np.random.seed(1234)  # the harness's seeds: RULER's texts are drawn at random
    try:
        loaded = manager.load(args.tasks)
    except ImportError as error:
        cause = str(error).partition("\n")[0]
        raise UserError(f"--tasks {names}: a package is missing ({cause}): {INSTALL}") from None
    # no network, or a tokenizer that transformers cannot read
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise UserError(f"--tasks {names}: the harness has no documents: {cause}") from None
    inner = set()  # names of what a group has
    for children in loaded["group_map"].values():
        inner.update(children)
    tops = []
    for name, task in {**loaded["groups"], **loaded["tasks"]}.items():
        if name not in inner:
            tops.append(task)
    return tops, list(loaded["tasks"].values())


def check_lengths(args: argparse.Namespace, tasks: list, longest: int) -> None:
    """Raises UserError where RULER's texts would be cut: the facts asked for would be gone."""
    for task in tasks:
        length = ruler_length(task)
        if length is not None and length > longest:
            limit = f"--max_length {longest}" if args.max_length else f"the model's {longest}"
            raise UserError(
                f"RULER's prompts of {length} tokens would be cut to {limit}; "
                f"give --length {longest}, which makes them of that length"
            )


def evaluate(args: argparse.Namespace) -> list[dict]:
    """Prints the harness's tables -> for each method its ledger and the tasks' results."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise UserError(f"tasks need lm-evaluation-harness: {INSTALL}") from None

    # 1. What cannot work is refused in a second, rather than after an hour.
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    models = [harness_model(candidate, args) for candidate in candidates]
    longest = min(lm.max_length for lm in models)
    check_candidates(candidates, args, {longest: 0})  # of no rows yet
    metadata = {"tokenizer": str(args.checkpoint), "max_seq_lengths": [args.length]}  # RULER's
    manager = TaskManager(include_path=args.include_path, metadata=metadata)
    tops, tasks = load_tasks(args, manager)
    check_lengths(args, tasks, longest)

    # 2. A table for each candidate.
    rows = []
    for candidate, lm in zip(candidates, models, strict=True):
        results = simple_evaluate(
            lm, tasks=tops, task_manager=manager, limit=args.limit, log_samples=False
        )
        capacity = max(lm.ledgers)  # of the longest request
        row = {"method": candidate.label, "settings": candidate.options, **lm.ledgers[capacity]}
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        for part in ("results", "groups"):
            if part in results:
                print(make_table(results, part))
        rows.append({**row, **results["results"]})
    return rows


# --------------------------------------------------------------------------------- the command line


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    generate.add_model_options(parser)
    row_options(parser)
    tasks = "tasks, groups or tags of the harness"
    parser.option("--tasks", str, None, tasks, nargs="+", required=True)
    own = "a folder with tasks of your own (YAML)"
    parser.option("--include_path", str, None, own, metavar="FOLDER")
    limit = "documents of each task, or below 1 a fraction (default: all)"
    parser.option("--limit", positive, None, limit)
    parser.option("--length", whole(1), 4096, "tokens of a prompt of RULER's tasks")
    longest = "cut other texts on the left to so many (default: the model's)"
    parser.option("--max_length", whole(2), None, longest)
    parser.flag("--json", "one JSON object as the last line of stdout")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    rows = evaluate(args)
    if args.json:
        print(json.dumps({"command": " ".join(sys.argv), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    generate.run_command(main)
