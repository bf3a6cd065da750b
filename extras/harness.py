"""Tasks of lm-evaluation-harness, answered through a compressed cache: its tables, and the bytes
beside them.

    python -m extras.harness --method dense --method sals --tasks ruler_vt ruler_cwe --limit 50

Contexts are prefilled but for their last token. It is decoded, and so is what is scored or
generated. The cache has room for the longest request; budgets are fractions of it: run tasks of
unlike lengths apart.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.nn.functional as F

from extras.evaluate import Candidate, check_candidates, ledger, row_options
from generate import Engine, Parser, Progress, positive, whole
from model import UserError, load_config, load_tokenizer


def prefill_but_last(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Prefills each prompt but its last token, which the next step decodes: all logits are the
    method's. A prompt of one token is prefilled, and decoded in its own place."""
    engine.prefill([ids[:-1] or ids for ids in prompts])
    engine.tokens.copy_(torch.tensor([ids[-1] for ids in prompts]))
    engine.pos.copy_(torch.tensor([len(ids) - 1 for ids in prompts]))


@torch.inference_mode()
def decode_scores(
    engine: Engine, rows: Sequence[tuple[list[int], int]]
) -> list[tuple[float, bool]]:
    """Rows (ids, n) of unlike lengths -> log-probability of the last n ids, and are they the
    likeliest?"""
    prefill_but_last(engine, [ids[:-n] for ids, n in rows])
    ends, total, greedy = torch.tensor([len(ids) - 2 for ids, _ in rows]).to(engine.pos), 0.0, True
    scored = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids[-n:]) for ids, n in rows], True, -1)
    for token in scored.T.to(engine.tokens):
        engine.pos.clamp_(max=ends)  # a row at its end writes its last place again
        engine.step()
        total -= F.cross_entropy(engine.logits.float(), token, ignore_index=-1, reduction="none")
        greedy &= (token < 0) | (engine.tokens == token)
        engine.tokens.copy_(token.clamp(min=0))
    engine.check_logits()
    return [*zip(total.tolist(), greedy.tolist(), strict=True)]


@torch.inference_mode()
def decode_texts(
    engine: Engine, prompts: Sequence[list[int]], most: int, until: tuple, tokenizer
) -> list:
    """The greedy text after each prompt: of at most so many tokens, and up to any of the texts
    `until`."""

    # one token late: the one that completes a text may hold more of it
    def stops(ids: list[int]) -> bool:
        return ids[-1] in tokenizer.stop_ids or any(
            text in tokenizer.decode(ids[-64:-1]) for text in until
        )

    prefill_but_last(engine, prompts)
    engine.step()
    made = map(tokenizer.decode, generate.decode_rows(engine, most, stops, stride=16))
    return [min((text.split(end)[0] for end in until), key=len, default=text) for text in made]


SAMPLING, GREEDY = ("temperature", "top_p", "top_k"), (("do_sample", False), ("num_beams", 1))


def harness_model(candidate: Candidate, args: argparse.Namespace) -> object:
    """The model that lm-evaluation-harness asks. Its class is made here, since few have the
    package."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    folder = candidate.folder or args.checkpoint
    tokenizer, c = load_tokenizer(folder), load_config(folder)
    longest = min(
        args.max_length or c.max_positions, c.max_positions, c.sliding_window or c.max_positions
    )
    eos = tokenizer.special_tokens.get(tokenizer.chat_variables.get("eos_token"))

    class CompressedLM(TemplateLM):
        max_length, ledgers = longest, {}
        eot_token_id = min(tokenizer.stop_ids, default=0) if eos is None else eos
        prefix_token_id = eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            return tokenizer.encode(string, bos=add_special_tokens is not False)

        def answer(self, label: str, requests: list[tuple], decode: Callable) -> list:
            """decode(engine, inputs, *options) -> answers to requests (options, tokens to hold,
            input), the long ones first. The cache has room for the longest: budgets may be
            fractions of that."""
            size = max(n for _, n, _ in requests)
            engine = candidate.engine(args, min(args.rows, len(requests)), size, least=1)
            self.ledgers[size], rows = ledger(engine, size), engine.context.batch_size
            order, answers = (
                sorted(range(len(requests)), key=lambda i: requests[i][:2], reverse=True),
                {},
            )
            bar = Progress(f"{candidate.label}: {label}", len(requests))
            for options, alike in itertools.groupby(order, lambda i: requests[i][0]):
                while some := [*itertools.islice(alike, rows)]:
                    batch = some + some[-1:] * (rows - len(some))
                    made = decode(engine, [requests[i][2] for i in batch], *options)
                    answers |= zip(batch, made, strict=True)
                    bar.tick(len(some))
            return [answers[i] for i in range(len(requests))]

        def _loglikelihood_tokens(self, requests: list, **_) -> list[tuple[float, bool]]:
            rows = [((a + b)[-longest - 1 :], len(b)) for _, a, b in requests]
            if wrong := [n for ids, n in rows if not 0 < n < len(ids)]:
                raise UserError(f"{wrong[0]} tokens are to be scored, of at most {longest}")
            return self.answer(
                "scoring", [((), len(ids) - 1, (ids, n)) for ids, n in rows], decode_scores
            )

        def loglikelihood_rolling(self, requests: list, **_) -> list[float]:
            texts = (self.tok_encode(request.args[0]) for request in requests)
            rolled = [
                get_rolling_token_windows(ids, self.prefix_token_id, longest, 1) for ids in texts
            ]
            windows = [[(None, *make_disjoint_window(part)) for part in parts] for parts in rolled]
            scores = iter(self._loglikelihood_tokens([*itertools.chain(*windows)]))
            return [
                sum(score for score, _ in itertools.islice(scores, len(parts))) for parts in windows
            ]

        def generate_until(self, requests: list, **_) -> list[str]:
            asked = []
            for request in requests:
                options = normalize_gen_kwargs(request.args[1])
                most, until = options.pop("max_gen_toks"), tuple(filter(None, options.pop("until")))
                other = {
                    n: x for n, x in options.items() if n not in SAMPLING and (n, x) not in GREEDY
                }
                if other or most >= longest:
                    fault = (
                        f"{request.task_name}: {other or {'max_gen_toks': most}} is not supported"
                    )
                    raise UserError(f"{fault}; only greedy texts below {longest} tokens are")
                ids = self.tok_encode(request.args[0])[most - longest :] or [self.prefix_token_id]
                asked.append(((most, until), len(ids) + most, ids))
            return self.answer("generating", asked, partial(decode_texts, tokenizer=tokenizer))

    return CompressedLM()


def evaluate(args: argparse.Namespace) -> list[dict]:
    """Prints the harness's tables -> for each method its ledger and the tasks' results."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise UserError(
            'tasks need lm-evaluation-harness: pip install "lm-eval[hf,ruler]"'
        ) from None

    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    models, rows = [harness_model(candidate, args) for candidate in candidates], []
    # no row's memory yet
    check_candidates(candidates, args, {min(lm.max_length for lm in models): 0})
    metadata = {"tokenizer": str(args.checkpoint), "max_seq_lengths": [args.length]}  # RULER's
    manager = TaskManager(include_path=args.include_path, metadata=metadata)
    if unknown := [name for name in args.tasks if not manager.match_tasks([name])]:
        raise UserError(f"--tasks {unknown[0]}: the harness has no such task; see lm_eval ls tasks")
    random.seed(0)
    np.random.seed(1234)  # the harness's seeds: RULER's texts are drawn at random
    try:
        loaded = manager.load(args.tasks)
    # no network, or a tokenizer that transformers cannot read
    except (OSError, ValueError) as error:
        fault, _, _ = str(error).partition("\n")
        raise UserError(
            f"--tasks {' '.join(args.tasks)}: the harness has no documents: {fault}"
        ) from None
    inner = {*itertools.chain(*loaded["group_map"].values())}
    tasks = [
        task for name, task in (loaded["groups"] | loaded["tasks"]).items() if name not in inner
    ]
    for candidate, lm in zip(candidates, models, strict=True):
        how = {"task_manager": manager, "limit": args.limit, "log_samples": False}
        results = simple_evaluate(lm, tasks=tasks, **how)
        n = max(lm.ledgers)  # tokens of the longest request
        row = {"method": candidate.label, "settings": candidate.options} | lm.ledgers[n]
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        print(
            *(make_table(results, part) for part in ("results", "groups") if part in results),
            sep="\n",
        )
        rows.append(row | results["results"])
    return rows


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    generate.add_model_options(parser)
    row_options(parser)
    parser.option(
        "--tasks", str, None, "tasks, groups or tags of the harness", nargs="+", required=True
    )
    parser.option(
        "--include_path", str, None, "a folder with tasks of your own (YAML)", metavar="FOLDER"
    )
    parser.option(
        "--limit", positive, None, "documents of each task, or below 1 a fraction (default: all)"
    )
    parser.option("--length", whole(1), 4096, "tokens of a prompt of RULER's tasks")
    parser.option(
        "--max_length", whole(2), None, "cut texts on the left to so many (default: the model's)"
    )
    parser.flag("--json", "one JSON object as the last line of stdout")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    rows = evaluate(args)
    if args.json:
        print(json.dumps({"command": " ".join(sys.argv), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    generate.run_command(main)
