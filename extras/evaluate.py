"""Perplexity, KL, retrieval and long generation: a row for each method, and dense in the same run.

    python -m extras.evaluate --method sals --method sals:rank=0.125,bits=2 --text some.txt
    python -m extras.evaluate --method sals --method loki:k=0.125,d=0.5 --csv table.csv

Every method decodes token by token through its own cache. A method is written NAME:SETTING=VALUE,...;
@FOLDER after it takes another checkpoint. Perplexity: a text is prefilled, and what follows is decoded and
scored (--generate: what dense writes). Retrieval: facts lie in a long text, then comes a question (after
RULER).
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import re
import sys
import uuid
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
from torch import Tensor

import calibrate
import compress
from calibrate import result_options, save_csv, text_files, text_ids, windows
from compress import Cache, CacheContext, load_artifact, method_named, settings_from
from extras.parallel import all_gather_object, rank, world_size
from generate import Engine, Parser, Progress, Sampling, load, whole
from model import Llama, UserError, load_config, load_tokenizer

# ------------------------------------------------------------------ retrieval tasks, after RULER (2404.06654)

# Keys are "adjective noun"; variables and code words are names.
ADJECTIVES = """
amber ancient blue brave bright broken calm cold copper dark deep dry early empty fading gentle golden green
hidden hollow iron late little lonely lost mild misty narrow old pale quiet red rough round silent silver
small snowy tall warm white wild winding wooden
""".split()
NOUNS = """
anchor apple arrow basket bell bird boat bottle bridge candle castle chair clock cloud coat door drum
feather field fire flower forest garden gate hammer harbor hill house island key lake lamp lantern letter
meadow mirror mountain needle ocean orchard river road rope ship stone table tower tree valley wheel window
""".split()
NAMES = """
bravo cedar delta ember falcon glacier hazel indigo jasper kestrel lotus maple nectar olive pepper quartz
raven saffron thistle umber velvet willow yarrow zephyr acorn birch coral dune eagle fern grape heron ivory
juniper kiwi lemon mango nutmeg onyx pearl quail rose sage tulip violet walnut
""".split()
MOST_FACTS = min(len(ADJECTIVES), len(NOUNS)) ** 2 * 2 // 3  # with keys that share words


@dataclass
class Task:
    """One question about facts that lie in a text, in this order: the prompt ends where the answer begins."""

    facts: list[str]
    question: str
    answer: str
    references: list[str]

    def score(self, text: str) -> float:
        """The share of the references that the answer names, in either case (RULER's string match)."""
        return sum(r.lower() in text.lower() for r in self.references) / len(self.references)


def numbered_keys(rng: random.Random, n: int, each: int = 1) -> list[tuple[str, str]]:
    """n keys in random order, with `each` numbers a key. Keys share words: RULER's hard distractors."""
    side = max(2, math.ceil(math.sqrt(1.5 * n)))
    pairs = [f"{a} {b}" for a in rng.sample(ADJECTIVES, side) for b in rng.sample(NOUNS, side)]
    return [(key, str(rng.randrange(10000, 100000))) for key in rng.sample(pairs, n) for _ in range(each)]


WORDS = "The magic number for {} is", "What is the magic number for {}?"
REWORDED = "Locker {} opens with code", "Which code opens locker {}?"


def number_facts(pairs: list[tuple[str, str]], fact: str = WORDS[0]) -> list[str]:
    return [f"\n{fact.format(key)} {value}.\n" for key, value in pairs]


def fitting(rng: random.Random, n_tokens: int, least: int, most: int, each: int = 1) -> int:
    """How many times `each` facts, which of about 14 tokens should fill a third of the text at most."""
    return rng.randint(least, max(least, min(most, n_tokens // 48 // each)))


# Each kind of task makes some for a text of n_tokens. n_facts: as evaluation asks for, or None (training): a
# random number.


def tasks_multikey(rng: random.Random, n_tokens: int, n_facts: int | None, words=WORDS) -> list[Task]:
    """One number is asked for at a time."""
    n = n_facts or fitting(rng, n_tokens, 2, 32)
    pairs = numbered_keys(rng, n)
    facts, asked = number_facts(pairs, words[0]), rng.sample(pairs, 1 if n_facts else min(n, 8))
    ask = f"{words[1]}\nAnswer: {words[0]}"
    return [Task(facts, ask.format(key, key), f" {value}.", [value]) for key, value in asked]


def tasks_multivalue(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """Keys with four values each, asked for all at once, in the order of the text."""
    pairs = numbered_keys(rng, 1 if n_facts else fitting(rng, n_tokens, 1, 4, 4), 4)
    rng.shuffle(pairs)
    groups = {key: [v for k, v in pairs if k == key] for key, _ in pairs}
    ask = "What are all the magic numbers for {0}?\nAnswer: The magic numbers for {0} are"
    return [Task(number_facts(pairs), ask.format(k), f" {', '.join(ns)}.", ns) for k, ns in groups.items()]


def tasks_multiquery(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """Four keys asked for in one question; the answer repeats each key."""
    pairs = numbered_keys(rng, n_facts or fitting(rng, n_tokens, 4, 16))
    asked = rng.sample(pairs, 4)
    question = f"What are the magic numbers for {', '.join(key for key, _ in asked)}?\nAnswer:"
    answer = f" {', '.join(f'{key} is {value}' for key, value in asked)}."
    return [Task(number_facts(pairs), question, answer, [f"{k} is {v}" for k, v in asked])]


def tasks_variables(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """Variable tracking: a number is stored, then copied from variable to variable; name all that hold it."""
    n_chains = 2 if n_facts else fitting(rng, n_tokens, 1, 3, 5)
    names = rng.sample(NAMES, 5 * n_chains)
    chains = [(names[i::n_chains], str(rng.randrange(10000, 100000))) for i in range(n_chains)]
    facts = []
    for chain, value in chains:
        facts += [f"\nStore {value} in {chain[0]}.\n"]
        facts += [f"\nCopy {a} to {b}.\n" for a, b in itertools.pairwise(chain)]
    rng.shuffle(facts)
    ask = "Which variables hold {0}?\nAnswer: The variables that hold {0} are"
    return [Task(facts, ask.format(value), f" {', '.join(chain)}.", chain) for chain, value in chains]


def tasks_frequent(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """Frequent words: three of nine code words are mentioned far more often; name them, most often first."""
    words = rng.sample(NAMES, 9)
    shares = [(0.34, 5), (0.24, 4), (0.17, 3), *[(0.25 / 6, 1)] * 6]  # and the least
    counts = [max(least, round(n_tokens // 100 * share)) for share, least in shares]
    facts = [f"\nThe code word is {w}.\n" for w, c in zip(words, counts, strict=True) for _ in range(c)]
    rng.shuffle(facts)
    question = "Which three code words appear most often?\nAnswer: The three most frequent code words are"
    return [Task(facts, question, f" {', '.join(words[:3])}.", words[:3])]


def tasks_uuid(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """One UUID is the key of another, in a text of nothing else (Haystack.uuids): an exact copy is asked."""
    key, value = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
    ask = f"What is the value of {key}?\nAnswer: The value of {key} is"
    return [Task([f"\n{key}: {value}"], ask, f" {value}.", [value])]


def tasks_single(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """One fact alone, however many are asked for."""
    return tasks_multikey(rng, n_tokens, n_facts=1)


def tasks_reworded(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    """`single` in words that no training here has seen."""
    return tasks_multikey(rng, n_tokens, n_facts=1, words=REWORDED)


def tasks_reworded_multikey(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[Task]:
    return tasks_multikey(rng, n_tokens, n_facts, words=REWORDED)


TASKS = {
    "single": tasks_single,
    "multikey": tasks_multikey,
    "multivalue": tasks_multivalue,
    "multiquery": tasks_multiquery,
    "variables": tasks_variables,
    "frequent": tasks_frequent,
    "uuid": tasks_uuid,
    "reworded": tasks_reworded,
    "reworded_multikey": tasks_reworded_multikey,
}
# Training draws from these alone. The others show what a model does that was not trained on them.
TRAINED_TASKS = ("single", "multikey", "multivalue", "multiquery", "variables", "frequent")


class Haystack:
    """Plain text as token ids (one array a source, and its share of the samples), to lay facts into."""

    def __init__(self, tokenizer, tokens: list[np.ndarray], shares: list[float] | None = None):
        self.tokenizer, self.shares = tokenizer, shares
        self.tokens = [torch.from_numpy(ids) for ids in tokens]  # which processes share
        # [V]: may a fact stand before this token, without cutting a word?
        after, ids = tokenizer.encode_continuation("a"), range(tokenizer.vocab_size)
        self.starts_word = np.array([tokenizer.decode_ids([*after, i])[1:2] in (" ", "\n") for i in ids])

    @lru_cache(1 << 16)  # noqa: B019
    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode_continuation(text), np.int32)

    def sample(self, rng: random.Random, n: int) -> np.ndarray:
        """n consecutive tokens of a random place."""
        source = rng.choices(self.tokens, self.shares)[0]
        start = rng.randrange(max(1, len(source) - n))
        return np.resize(source[start : start + n].numpy(), n).astype(np.int32)

    def bury(self, rng: random.Random, facts: list[str], n: int, depth: float | None = None) -> list:
        """Pieces of a text of n tokens, odd ones facts: in order before random words, one alone at depth."""
        encoded = [self.encode(f) for f in facts]
        plain = self.sample(rng, max(1, n - sum(map(len, encoded))))
        starts = np.flatnonzero(self.starts_word[plain]).tolist() or [0]
        where = [rng.random() if depth is None or len(facts) > 1 else depth for _ in facts]
        cuts = sorted(starts[int(w * len(starts))] for w in where)
        *parts, last = np.split(plain, cuts)
        return [*itertools.chain(*zip(parts, encoded, strict=True)), last]

    def uuids(self, rng: random.Random, fact: str, n: int) -> list:
        """Lines of a text of n tokens: the fact at a random place among pairs of UUIDs. The first is cut."""
        lines, left = [], n - len(self.encode(fact))
        while left > 0:
            (pair,) = tasks_uuid(rng, n_tokens=0, n_facts=1)[0].facts
            lines.insert(0, self.encode(pair)[-left:])
            left -= len(lines[0])
        lines.insert(rng.randint(min(1, len(lines)), len(lines)), self.encode(fact))
        return lines


def eval_sample(hay: Haystack, kind: str, seed: int, n_tokens: int, n_facts=16, depth: float | None = None):
    """One evaluation prompt of exactly n_tokens (ids) and its task. The same seed gives the same sample."""
    rng = random.Random(f"{kind}-{seed}")
    task = TASKS[kind](rng, n_tokens, n_facts)[0]
    question = hay.encode(f"\nQuestion: {task.question}").tolist()
    bos = [hay.tokenizer.bos_id] if hay.tokenizer.add_bos else []
    room = n_tokens - len(question) - len(bos)
    pieces = hay.uuids(rng, *task.facts, room) if kind == "uuid" else hay.bury(rng, task.facts, room, depth)
    ids = [*bos, *np.concatenate(pieces).tolist(), *question]
    if len(ids) > n_tokens:
        fault = f"{kind}: facts and question take {len(ids)} tokens, more than {n_tokens}"
        raise UserError(f"{fault}; ask for longer prompts, or for fewer facts where there is --facts")
    return ids, task


# ------------------------------------------------------------------------------------------------- evaluation


class Watched:
    """A cache with the exact keys beside it, which sees what its `select` gives at each decode step.

    It counts how many of the tokens attended are among as many tokens of the largest attention weights, which
    are of a query head, or of all heads that share a selection. Sinks and recent tokens count.
    sums [4]: NAMES, means over heads and rows, and 1, summed over steps (fp64; a CUDA graph adds to them)."""

    NAMES = ("attended", "recall", "mass")  # the first is a fraction of the length

    def __init__(self, cache: Cache):
        c = cache.config
        context = cache.context
        self.cache = cache
        self.keys = context.zeros(c.n_kv_heads, context.max_seq_length, c.head_dim)
        self.sums = torch.zeros(1 + len(self.NAMES), dtype=torch.float64, device=context.device)
        self.select = cache.select
        cache.select = self.select_and_see

    def __getattr__(self, name: str):
        return getattr(self.cache, name)  # the ledger is the cache's own

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        self.sums.zero_()  # forgets what a graph's warm-up saw
        rotated = self.cache.rope_from(k, start)
        self.keys[row, :, start : start + len(k)] = rotated.transpose(0, 1)
        return self.cache.prefill(row, start, q, k, *rest)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        self.keys[self.cache.context.rows, :, pos] = self.cache.rope(k, pos)
        self.query = self.cache.rope(q, pos)
        return self.cache.decode(pos, q, k, *rest)

    def select_and_see(self, pos: Tensor, *args: Tensor) -> Tensor | None:
        """The cache's `select`, whose index is counted."""
        index = self.select(pos, *args)
        if index is not None:
            self.see(pos, index)
        return index

    def see(self, pos: Tensor, index: Tensor) -> None:
        """Counts the tokens of an index [B, Hkv or 1, G or 1, n], and those that are exact besides."""
        age = pos[:, None, None, None] - self.cache.context.positions  # [B, 1, 1, S]
        live = (index >= 0).float()
        chosen = torch.zeros(*index.shape[:-1], age.shape[-1], device=pos.device)
        chosen = chosen.scatter_add(-1, index.clamp(min=0).long(), live) > 0
        n_recent = self.cache.exact[0].n_recent if self.cache.exact else 0
        chosen = (chosen | (age < n_recent)) & (age >= 0)

        query = self.query.unflatten(1, (self.keys.shape[1], -1)).float()  # [B, Hkv, G, D]
        logits = query @ self.keys.float().transpose(-1, -2) * self.keys.shape[-1] ** -0.5
        weights = logits.masked_fill(age < 0, -torch.inf).log_softmax(-1)  # as logarithms: none becomes 0
        mass = (weights.exp() * chosen).sum(-1).mean()

        shared = [dim for dim in (1, 2) if index.shape[dim] == 1]  # these select by their weights together
        scores = weights.logsumexp(shared, keepdim=True) if shared else weights
        n = chosen.sum(-1)
        least = scores.sort(-1, descending=True).values.gather(-1, n[..., None].clamp(min=1) - 1)
        hits = (chosen & (scores >= least)).sum(-1)
        attended = (n / (pos + 1)[:, None, None]).mean()
        recall = (hits / n).mean()
        self.sums += torch.stack((attended, recall, mass, torch.ones_like(mass)))

    def result(self) -> dict[str, float]:
        """Means over the steps; empty for a cache that attends all its tokens."""
        *sums, steps = self.sums.tolist()
        return {name: total / steps for name, total in zip(self.NAMES, sums, strict=True) if steps}


ANSWER_ROOM = 96  # tokens of a cache beyond a retrieval prompt
BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass
class Candidate:
    """A row of the table: a method with its settings, for every capacity.

    It is written sals:rank=0.125,bits=2@FOLDER or sals:paper on the command line."""

    label: str
    method: str
    options: dict
    folder: Path | None = None  # of a checkpoint, instead of --checkpoint
    weights: str | None = None  # "int8": then the label says so

    @classmethod
    def parse(cls, text: str, weights: str | None = None) -> "Candidate":
        method_text, _, folder = text.partition("@")
        method, _, settings_text = method_text.partition(":")
        kinds = {f.name: f.type for f in dataclasses.fields(method_named(method).settings)}
        options = {}
        for pair in re.split(r",(?=\w+=)", settings_text):  # a value may hold commas: skip=0,1,-1
            if not pair:
                continue
            if pair in compress.VARIANTS:
                options["variant"] = pair
                continue
            name, _, value = pair.partition("=")
            kind = kinds.get(name, str)
            try:
                options[name] = BOOLEANS[value.lower()] if kind is bool else kind(value)
            except (KeyError, ValueError):
                wanted = f"{name}={kind.__name__.upper()}"
                raise UserError(f"--method {text}: write {wanted}, not {pair}") from None
        settings_from(method, options)  # refuses what is no setting
        label = f"{text} weights={weights}" if weights else text
        return cls(label, method, options, Path(folder) if folder else None, weights)

    def engine(self, args, rows: int, capacity: int, watched=False, least=None, temperature=0.0) -> Engine:
        """An engine over freshly loaded weights, since a method may change them.

        watched: by Watched. least: it has fewer rows, down to this, where the memory holds no more."""
        model = self.load(args)
        artifact = None
        while artifact is None:
            try:
                artifact = self.check(args, model, {capacity: rows})
            except UserError:
                if least is None or rows <= least:
                    raise
                rows = rows * 7 // 8
        settings = settings_from(self.method, self.options)
        context = CacheContext(model, min(all_gather_object(rows)), capacity)
        caches = method_named(self.method).build(model, settings, context, artifact)
        if watched and hasattr(settings, "budget"):  # the others attend all
            caches = [Watched(cache) for cache in caches]
        graphed = context.device.type == "cuda"
        return Engine(model, caches, context, Sampling(temperature), graphed=graphed)

    def load(self, args: argparse.Namespace) -> Llama:
        """The model, of the candidate's own folder where it names one."""
        folder = self.folder or args.checkpoint
        model, _ = load(folder, args.device, args.dtype, self.weights, self.method, self.options)
        return model

    def check(self, args: argparse.Namespace, model: Llama, rows: dict[int, int]) -> dict[str, Tensor]:
        """The artifact. UserError where a cache of rows[capacity] rows cannot be built or does not fit."""
        artifact = load_artifact(self.folder or args.checkpoint, self.method, model)
        settings = settings_from(self.method, self.options)
        for capacity in sorted(rows):
            generate.check_memory(model, self.method, settings, artifact, rows[capacity], capacity)
        return artifact


def eval_perplexity(engine: Engine, prompts: list, tokens: Tensor, reference: Tensor | None, bar) -> tuple:
    """Reads a prompt a row, then teacher-forces tokens [B, n] through the cache, one by one.
    reference [n, B, V]: dense's log-probabilities, None where the cache is dense's -> of each token the loss
    and KL in nats, and whether its likeliest is dense's: [3, n, B] fp64; the reference (fp16, on the CPU)."""
    figures, kept = [], []
    engine.prefill(prompts)
    for i, token in enumerate(tokens.T.to(engine.tokens)):
        dense = log_p = engine.logits.float().log_softmax(-1)  # [B, V]
        if reference is None:
            kept.append(log_p.half().cpu())
        else:
            dense = reference[i].to(log_p).log_softmax(-1)  # fp16 left its sum not quite 1
        loss, kl = -log_p.gather(1, token[:, None])[:, 0], (dense.exp() * (dense - log_p)).sum(-1)
        same = dense.gather(1, log_p.argmax(-1, True))[:, 0] == dense.amax(-1)  # in fp16 two may be equal
        figures.append(torch.stack((loss, kl, same)).cpu())
        engine.tokens.copy_(token)
        engine.step()
        bar.tick()
    return torch.stack(figures, 1).double(), torch.stack(kept) if reference is None else reference


def retrieval_scores(engine: Engine, hay: Haystack, args, kind: str, length: int, bar: Progress) -> Tensor:
    """Scores [args.samples] of one kind of task, fp64: prefill text and question, decode the answer greedily.
    A sample's number is its seed; depths rise evenly."""
    scores, rows, decode = [], engine.context.batch_size, hay.tokenizer.decode
    for first in range(0, args.samples, rows):
        samples = []
        for seed in range(first, first + rows):
            seed = min(seed, args.samples - 1)  # the last may repeat
            depth = (seed + 0.5) / args.samples
            samples.append(eval_sample(hay, kind, seed, length, args.facts, depth))
        prompts, tasks = zip(*samples, strict=True)
        engine.prefill(prompts)
        longest = max(len(hay.encode(task.answer)) for task in tasks) + 4
        answers = generate.decode_rows(engine, longest, lambda ids: "\n" in decode(ids[-2:]), stride=16)
        scores += [task.score(decode(ids)) for task, ids in zip(tasks, answers, strict=True)]
        bar.tick(min(rows, args.samples - first))
    return torch.tensor(scores[: args.samples], dtype=torch.float64)


def perplexity_row(candidate: Candidate, args, texts: dict[str, tuple], reference: dict, bar) -> dict:
    """Perplexity, KL and what is attended (means over texts); the first candidate fills `reference`. Of what
    dense wrote the drift, and not what is attended: to watch takes as long again."""
    row, seen = {"errors": {}}, []
    for name, (prompts, tokens) in texts.items():
        capacity = args.continuation + max(map(len, prompts))
        engine = candidate.engine(args, len(prompts), capacity, watched=not args.generate)
        figures, reference[name] = eval_perplexity(engine, prompts, tokens, reference.get(name), bar)
        loss, kl, _ = figures.mean(1)  # of each row
        ppl, kl = loss.mean().exp().item(), kl.clamp(min=0)  # inf beyond fp64's numbers
        row |= ledger(engine, capacity) | {f"ppl {name}": ppl, f"kl {name}": kl.mean().item()}
        row["errors"] |= {f"ppl {name}": ppl * standard_error(loss), f"kl {name}": standard_error(kl)}
        if args.generate:
            row |= drift(figures)
        watched = all_gather_object([cache.result() for cache in engine.caches if isinstance(cache, Watched)])
        seen += filter(None, itertools.chain(*watched))
    return row | {name: float(np.mean([part[name] for part in seen])) for name in Watched.NAMES if seen}


def drift(figures: Tensor) -> dict[str, float]:
    """figures [3, n, B] of eval_perplexity -> the KL and the fraction of equal likeliest tokens in
    each eighth of the n tokens, named by its end: "kl@N", "argmax@N"."""
    n = figures.shape[1] // 8
    _, kl, same = figures[:, : 8 * n].unflatten(1, (8, n)).mean((2, 3)).tolist()
    return {f"{name}@{n * i}": x for name, of in (("kl", kl), ("argmax", same)) for i, x in enumerate(of, 1)}


def standard_error(samples: Tensor) -> float:
    """Of the mean of independent samples [n]; 0 for one."""
    return samples.std().item() / math.sqrt(len(samples)) if len(samples) > 1 else 0.0


def ledger(engine: Engine, length: int) -> dict:
    """Measured bytes per token on the device and, where a method uses it, in host memory; and bytes that a
    step reads from a row of `length` tokens; of all ranks together."""
    tokens = engine.context.batch_size * engine.context.max_seq_length
    own = [(c.bytes_stored(), c.bytes_read(length), c.bytes_host()) for c in engine.caches]
    measured, read, host = map(sum, zip(*itertools.chain(*all_gather_object(own)), strict=True))
    row = {"bytes/token": measured / tokens, "read/step": read}
    return row | ({"host/token": host / tokens} if host else {})


def retrieval_row(candidate: Candidate, args, hay: Haystack, bar: Progress) -> dict:
    """The ledger (of the last length), and per cent right for each length and task; with standard errors."""
    row = {"errors": {}}
    for length in args.lengths:
        engine = candidate.engine(args, min(args.rows, args.samples), length + ANSWER_ROOM, least=1)
        row |= ledger(engine, length)
        for kind in args.tasks:
            scores = retrieval_scores(engine, hay, args, kind, length, bar)
            row[f"{kind} {length}"] = 100 * scores.mean().item()
            row["errors"][f"{kind} {length}"] = 100 * standard_error(scores)
    return row


def check_candidates(candidates: list[Candidate], args: argparse.Namespace, rows: dict[int, int]) -> None:
    """Candidate.check of all, before the long part; a folder's model is read once for its candidates."""
    for _, group in itertools.groupby(candidates, lambda candidate: candidate.folder):
        group = list(group)
        model = group[0].load(args)  # planning leaves it as it is
        generate.check_capacity(max(rows), model.config, "--prefix, --continuation or --lengths")
        for candidate in group:
            candidate.check(args, model, rows)


def evaluate(args: argparse.Namespace) -> dict:
    """Prints the table -> its rows, with what they were measured on."""
    if not args.perplexity_rows and (args.generate or not args.samples):
        raise UserError("nothing to evaluate: give --samples, or --perplexity_rows (with --generate, too)")
    args.continuation = args.generate or args.continuation
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    config = load_config(args.checkpoint)
    # Every table has the dense row of the same run, with the folder's weights; uptrained, it has none.
    if args.weights or candidates[0].label != "dense" and not config.elitekv:
        candidates.insert(0, Candidate.parse("elitekv" if config.elitekv else "dense"))
    tokenizer = load_tokenizer(args.checkpoint)
    texts, hay = eval_texts(args, tokenizer, config.vocab_size)

    capacities = {n + ANSWER_ROOM: 1 for n in args.lengths if args.samples}  # and the rows that must fit
    for prompts, _ in texts.values():
        n = args.continuation + max(map(len, prompts))
        capacities[n] = max(len(prompts), capacities.get(n, 0))
    check_candidates(candidates, args, capacities)
    if args.generate:
        prompts, _ = texts["written"]
        texts["written"] = prompts, written(candidates[0], args, prompts)
    for kind, seed in itertools.product(args.tasks, range(min(args.samples, 64))):  # in a second, not an hour
        eval_sample(hay, kind, seed, min(args.lengths), args.facts)  # refuses lengths without room for a task
    asked = len(args.lengths) * len(args.tasks) * args.samples
    results, reference = [], {}
    bar = Progress("eval", len(candidates) * (len(texts) * args.continuation + asked))
    for candidate in candidates:
        try:
            row = {"method": candidate.label} | perplexity_row(candidate, args, texts, reference, bar)
            tasks = retrieval_row(candidate, args, hay, bar) if args.samples else {}
        except (UserError, MemoryError, torch.OutOfMemoryError) as error:
            if not results or world_size() > 1:  # the others need dense's row, and ranks one another
                raise
            print(f"{candidate.label}: no row: {error or 'not enough memory'}", file=sys.stderr)
            continue
        row |= tasks | {"errors": row["errors"] | tasks.get("errors", {})}
        results.append(row | {"settings": candidate.options})
        named = {key for row in results for key, x in row.items() if isinstance(x, str | float | int)}
        leading = ("method", "bytes/token", "host/token", "read/step", *Watched.NAMES)
        columns = [key for key in dict.fromkeys((*leading, *results[0])) if key in named]
        figures = ", ".join(f"{column} {row[column]:.4g}" for column in columns[1:] if column in row)
        print(f"{candidate.label}: {figures}", file=sys.stderr, flush=True)
        if args.csv and rank() == 0:  # rank 0 writes it
            save_csv(args.csv, columns, results)
    print_table(results, columns[1:])
    device = generate.device_name(torch.device(args.device))
    return {"seeds": f"0 to {args.samples - 1}", "device": device, "rows": results}


def eval_texts(args: argparse.Namespace, tokenizer, vocabulary: int) -> tuple[dict[str, tuple], Haystack]:
    """Prompts of each text whose perplexity is measured, and tokens [B, n] that follow, by its name; and the
    text to hide facts in. With --generate what is to be "written" after all prompts, and after a chat's."""
    files = {"python": text_files(calibrate.STDLIB, held=True)}
    for path in args.text:
        if path.stem in files:
            raise UserError(f"--text {path}: there is a text named {path.stem} already; rename the file")
        files[path.stem] = text_files(path)
    length, rows, texts = args.prefix + args.continuation, args.perplexity_rows, {}
    for name, some in files.items() if rows else ():
        window = windows(tokenizer, some, length, rows, vocabulary)
        texts[name] = window[:, : args.prefix].tolist(), window[:, args.prefix :]
    if args.generate:
        prompts = [ids for prompts, _ in texts.values() for ids in prompts]
        if tokenizer.chat_template:
            asks = [f"Explain this text at length:\n{tokenizer.decode(ids)}" for ids in prompts[-rows:]]
            prompts += [generate.encode_chat(tokenizer, [{"role": "user", "content": ask}]) for ask in asks]
        texts = {"written": (prompts, None)}
    return texts, Haystack(tokenizer, [text_ids(tokenizer, files["python"], 1 << 19, vocabulary)])


def written(candidate: Candidate, args: argparse.Namespace, prompts: list[list[int]]) -> Tensor:
    """What the candidate writes after each prompt at temperature 0.7, by seed 0: tokens [B, --generate]."""
    engine = candidate.engine(args, len(prompts), args.generate + max(map(len, prompts)), temperature=0.7)
    engine.prefill(prompts)
    return torch.tensor(generate.decode_rows(engine, args.generate, lambda _: False, stride=16))


def print_table(rows: list[dict], columns: list[str]) -> None:
    """A plain table, one line a row, eight columns at a time; "-" where a row has no such figure."""
    width = max(len(row["method"]) for row in rows)
    for start in range(0, len(columns), 8):
        part = columns[start : start + 8]
        print(f"{'':{width}}  " + "  ".join(f"{c:>15}" for c in part))
        for row in rows:
            cells = (f"{row[c]:15.4g}" if c in row else f"{'-':>15}" for c in part)
            print(f"{row['method']:{width}}  " + "  ".join(cells))
        print()


# ------------------------------------------------------------------------------------------- the command line


def row_options(parser: Parser) -> None:
    """Options of every command that compares candidates."""
    generate.add_weights_option(parser)
    about = "a row of the table, such as sals:rank=0.125,bits=2; repeat it (default: dense and sals)"
    parser.option("--method", str, None, about, action="append", metavar="NAME[:SETTING=VALUE,...][@FOLDER]")
    parser.option("--rows", whole(1), 10, "prompts in a batch, fewer where the memory holds no more")


def parse_args(argv: list[str]) -> argparse.Namespace:
    p = Parser(description=__doc__)
    generate.add_model_options(p)
    row_options(p)
    result_options(p)
    p.option("--text", Path, [], "more text for perplexity; repeat it", action="append")
    p.option("--perplexity_rows", whole(0), 8, "texts whose continuation is scored; 0: none")
    p.option("--prefix", whole(1), 1024, "tokens that are prefilled")
    p.option("--continuation", whole(1), 128, "tokens that are then decoded and scored")
    p.option("--generate", whole(8), 0, "instead, tokens that dense writes, after chats, too", metavar="N")
    about = "retrieval tasks; uuid: a text of UUIDs alone"
    p.option("--tasks", str, TRAINED_TASKS, about, nargs="+", choices=TASKS)
    p.option("--lengths", whole(1), [1024, 2048], "tokens of a retrieval prompt", nargs="+")
    p.option("--samples", whole(0), 20, "prompts a task and length; 0: none")
    p.option("--facts", whole(4, MOST_FACTS), 16, "facts in the multi-key and multi-query tasks")
    return p.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    figures = evaluate(args)
    if args.json:
        print(json.dumps({"command": " ".join(sys.argv), "torch": torch.__version__} | figures))


if __name__ == "__main__":
    generate.run_command(main)
