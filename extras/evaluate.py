"""Compare methods: perplexity, KL to the dense model, facts found and bytes, a row for each method.

    python -m extras.evaluate --method sals --method kivi
    python -m extras.evaluate --method sals:rank=0.125,bits=2 --method sals:paper --csv table.csv
    python -m extras.evaluate --method sals --samples 0 --text FILE         perplexity and KL alone
    python -m extras.evaluate --method loki --perplexity_rows 0 --tasks single --lengths 4096
    python -m extras.evaluate --checkpoint FOLDER --full             as large as in docs/results.md

A model of 135 M parameters takes six to ten minutes on two CPU cores, and hours with --full.

Every method decodes token by token through its own cache, and the dense model has a row in the same
run. A method is written NAME:SETTING=VALUE,...; @FOLDER after it takes another checkpoint.

Perplexity and KL: the beginning of a text is prefilled, and what follows is decoded and scored.
With --generate what follows is what the dense model itself writes. Facts found, after RULER: facts
are hidden in a long text, then comes a question about them. The kinds of facts (--tasks):

    single              one number: "The magic number for green river is 48213."
    multikey            one number of many (--facts) is asked for
    multivalue          a key has four numbers, and all are asked for
    multiquery          the numbers of four keys are asked for
    variables           a number is stored in a variable, and copied on to others: name them
    frequent            three of nine code words come far more often: name them
    uuid                a UUID is the key of another one, in a text of such pairs alone
    reworded, reworded_multikey
                        single and multikey in other words, which no training here has seen
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
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
from torch import Tensor

import calibrate
import compress
from calibrate import result_options, save_csv, text_files, text_ids, windows
from compress import Cache, CacheContext, load_artifact, method_named, settings_from
from extras.parallel import all_gather_object, rank, sum_of_processes, world_size
from generate import Engine, Parser, ProgressLine, Sampling, load_checkpoint, whole
from model import Llama, UserError, load_config, load_tokenizer

# -------------------------------------------------------- retrieval tasks, after RULER (2404.06654)

# Keys are "adjective noun"; variables and code words are names.
ADJECTIVES = """
amber ancient blue brave bright broken calm cold copper dark deep dry early empty fading gentle
golden green hidden hollow iron late little lonely lost mild misty narrow old pale quiet red rough
round silent silver small snowy tall warm white wild winding wooden
""".split()
NOUNS = """
anchor apple arrow basket bell bird boat bottle bridge candle castle chair clock cloud coat door
drum feather field fire flower forest garden gate hammer harbor hill house island key lake lamp
lantern letter meadow mirror mountain needle ocean orchard river road rope ship stone table tower
tree valley wheel window
""".split()
NAMES = """
bravo cedar delta ember falcon glacier hazel indigo jasper kestrel lotus maple nectar olive pepper
quartz raven saffron thistle umber velvet willow yarrow zephyr acorn birch coral dune eagle fern
grape heron ivory juniper kiwi lemon mango nutmeg onyx pearl quail rose sage tulip violet walnut
""".split()
MOST_FACTS = min(len(ADJECTIVES), len(NOUNS)) ** 2 * 2 // 3  # with keys that share words

# A fact has about 14 tokens, and facts should fill a third of a text at most.
TOKENS_PER_FACT = 48


@dataclass
class FactTask:
    """A question about facts in a text, which ends a prompt: the model goes on with the answer."""

    facts: list[str]  # in the order of the text
    question: str
    answer: str  # as training shows it
    references: list[str]

    def score(self, text: str) -> float:
        """The share of the references that a text names, in either case (RULER's string match)."""
        named = 0
        for reference in self.references:
            if reference.lower() in text.lower():
                named += 1
        return named / len(self.references)


class Wording(NamedTuple):
    """How a number is told and asked for. {} is its key; the number follows the fact."""

    fact: str
    question: str


MAGIC_NUMBER = Wording("The magic number for {} is", "What is the magic number for {}?")
REWORDED = Wording("Locker {} opens with code", "Which code opens locker {}?")


class Number(NamedTuple):
    """A number to remember, and the words to ask for it by."""

    key: str
    value: str


def random_number(rng: random.Random) -> str:
    return str(rng.randrange(10000, 100000))


def random_numbers(rng: random.Random, n_keys: int, per_key: int = 1) -> list[Number]:
    """Numbers of n_keys keys in random order. Keys share words, which makes them hard to tell apart
    (RULER's hard distractors)."""
    side = max(2, math.ceil(math.sqrt(1.5 * n_keys)))
    keys = []
    for adjective in rng.sample(ADJECTIVES, side):
        for noun in rng.sample(NOUNS, side):
            keys.append(f"{adjective} {noun}")
    numbers = []
    for key in rng.sample(keys, n_keys):
        for _ in range(per_key):
            numbers.append(Number(key, random_number(rng)))
    return numbers


def number_facts(numbers: list[Number], wording: Wording = MAGIC_NUMBER) -> list[str]:
    return [f"\n{wording.fact.format(number.key)} {number.value}.\n" for number in numbers]


def random_count(
    rng: random.Random,
    n_tokens: int,
    least: int,
    most: int,
    facts_each: int = 1,
) -> int:
    """How many things, each of so many facts, a text of n_tokens shall have: least to most."""
    room = n_tokens // TOKENS_PER_FACT // facts_each
    return rng.randint(least, max(least, min(most, room)))


# A function for each kind of task. It makes one or more tasks about the same facts, for a text of
# n_tokens. n_facts: how many facts evaluation asks for; None, in training: a random number.


def tasks_multikey(
    rng: random.Random,
    n_tokens: int,
    n_facts: int | None,
    wording: Wording = MAGIC_NUMBER,
) -> list[FactTask]:
    """One number of many is asked for; in training up to eight, one after another."""
    n = n_facts or random_count(rng, n_tokens, 2, 32)
    numbers = random_numbers(rng, n)
    facts = number_facts(numbers, wording)
    n_asked = 1 if n_facts else min(n, 8)
    tasks = []
    for key, value in rng.sample(numbers, n_asked):
        question = f"{wording.question.format(key)}\nAnswer: {wording.fact.format(key)}"
        tasks.append(FactTask(facts, question, f" {value}.", [value]))
    return tasks


def tasks_multivalue(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """A key has four values, which are asked for all at once, in the order of the text."""
    n_keys = 1 if n_facts else random_count(rng, n_tokens, 1, 4, facts_each=4)
    numbers = random_numbers(rng, n_keys, per_key=4)
    rng.shuffle(numbers)
    facts = number_facts(numbers)
    values_of = {}
    for key, value in numbers:
        values_of.setdefault(key, []).append(value)
    tasks = []
    for key, values in values_of.items():
        question = f"What are all the magic numbers for {key}?\n"
        question += f"Answer: The magic numbers for {key} are"
        tasks.append(FactTask(facts, question, f" {', '.join(values)}.", values))
    return tasks


def tasks_multiquery(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """Four keys are asked for in one question; the answer repeats each key."""
    n = n_facts or random_count(rng, n_tokens, 4, 16)
    numbers = random_numbers(rng, n)
    asked = rng.sample(numbers, 4)
    keys = ", ".join(number.key for number in asked)
    references = [f"{number.key} is {number.value}" for number in asked]
    question = f"What are the magic numbers for {keys}?\nAnswer:"
    return [FactTask(number_facts(numbers), question, f" {', '.join(references)}.", references)]


def tasks_variables(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """Variable tracking: a number is stored, then copied on from variable to variable."""
    n_chains = 2 if n_facts else random_count(rng, n_tokens, 1, 3, facts_each=5)
    names = rng.sample(NAMES, 5 * n_chains)
    facts = []
    asked = []  # the question about each chain, and its variables
    for i in range(n_chains):
        chain = names[i::n_chains]
        value = random_number(rng)
        facts.append(f"\nStore {value} in {chain[0]}.\n")
        for source, copy in itertools.pairwise(chain):
            facts.append(f"\nCopy {source} to {copy}.\n")
        question = f"Which variables hold {value}?\nAnswer: The variables that hold {value} are"
        asked.append((question, chain))
    rng.shuffle(facts)
    return [FactTask(facts, question, f" {', '.join(chain)}.", chain) for question, chain in asked]


def tasks_frequent(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """Frequent words: three of nine code words come far more often. Name them, most often first."""
    words = rng.sample(NAMES, 9)
    # Of each word the share of the facts, and how many it has at least: without the latter, short
    # texts would have words that come equally often.
    shares = [(0.34, 5), (0.24, 4), (0.17, 3)] + [(0.25 / 6, 1)] * 6
    n = n_tokens // 100  # facts in all
    facts = []
    for word, (share, least) in zip(words, shares, strict=True):
        count = max(least, round(n * share))
        facts += [f"\nThe code word is {word}.\n"] * count
    rng.shuffle(facts)
    question = "Which three code words appear most often?\n"
    question += "Answer: The three most frequent code words are"
    best = words[:3]
    return [FactTask(facts, question, f" {', '.join(best)}.", best)]


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def tasks_uuid(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """A UUID is the key of another one, in a text of such pairs alone (Haystack.uuids): the answer
    is an exact copy."""
    key = random_uuid(rng)
    value = random_uuid(rng)
    question = f"What is the value of {key}?\nAnswer: The value of {key} is"
    return [FactTask([f"\n{key}: {value}"], question, f" {value}.", [value])]


def tasks_single(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """One number alone, whatever n_facts is."""
    return tasks_multikey(rng, n_tokens, n_facts=1)


def tasks_reworded(rng: random.Random, n_tokens: int, n_facts: int | None) -> list[FactTask]:
    """`single`, in words that no training here has seen."""
    return tasks_multikey(rng, n_tokens, n_facts=1, wording=REWORDED)


def tasks_reworded_multikey(
    rng: random.Random, n_tokens: int, n_facts: int | None
) -> list[FactTask]:
    """`multikey`, in words that no training here has seen."""
    return tasks_multikey(rng, n_tokens, n_facts, wording=REWORDED)


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
    """Plain text as token ids, to hide facts in.

    tokens: one array of ids for each source. shares: how often each is drawn from; None:
    equally."""

    def __init__(self, tokenizer, tokens: list[np.ndarray], shares: list[float] | None = None):
        self.tokenizer = tokenizer
        self.shares = shares
        # As tensors, since processes that make batches share those, and do not copy them.
        self.tokens = [torch.from_numpy(ids) for ids in tokens]
        # [V]: may a fact stand before this token, without cutting a word?
        letter = tokenizer.encode_continuation("a")
        starts_word = []
        for token_id in range(tokenizer.vocab_size):
            second = tokenizer.decode_ids([*letter, token_id])[1:2]
            starts_word.append(second in (" ", "\n"))
        self.starts_word = np.array(starts_word)

    @lru_cache(1 << 16)  # noqa: B019
    def encode(self, text: str) -> np.ndarray:
        """The int32 token ids of a text that goes on."""
        return np.array(self.tokenizer.encode_continuation(text), np.int32)

    def sample(self, rng: random.Random, n: int) -> np.ndarray:
        """n consecutive tokens of a random place; a source that has fewer is repeated."""
        source = rng.choices(self.tokens, self.shares)[0]
        start = rng.randrange(max(1, len(source) - n))
        ids = source[start : start + n].numpy()
        return np.resize(ids, n).astype(np.int32)

    def bury(
        self,
        rng: random.Random,
        facts: list[str],
        n: int,
        depth: float | None = None,
    ) -> list[np.ndarray]:
        """Hides facts in a text, so that both have n tokens: text, fact, text, fact, ..., text.

        Facts lie before random words, in the order given. One that is alone lies at depth, from 0
        to 1, if that is given."""
        encoded = [self.encode(fact) for fact in facts]
        n_fact_tokens = sum(len(ids) for ids in encoded)
        plain = self.sample(rng, max(1, n - n_fact_tokens))
        word_starts = np.flatnonzero(self.starts_word[plain]).tolist() or [0]
        cuts = []
        for _ in facts:
            if depth is None or len(facts) > 1:
                place = rng.random()
            else:
                place = depth
            cuts.append(word_starts[int(place * len(word_starts))])
        parts = np.split(plain, sorted(cuts))
        pieces = [parts[0]]
        for fact, part in zip(encoded, parts[1:], strict=True):
            pieces += [fact, part]
        return pieces

    def uuids(self, rng: random.Random, fact: str, n: int) -> list[np.ndarray]:
        """The lines of a text of n tokens: a pair of UUIDs at a random place among others."""
        encoded = self.encode(fact)
        lines = []
        left = n - len(encoded)
        while left > 0:
            (other,) = tasks_uuid(rng, n_tokens=0, n_facts=1)[0].facts
            line = self.encode(other)[-left:]  # the text's first line is cut to fit
            lines.insert(0, line)
            left -= len(line)
        first = min(1, len(lines))  # not before the line that is cut
        lines.insert(rng.randint(first, len(lines)), encoded)
        return lines


def eval_sample(
    hay: Haystack,
    kind: str,
    seed: int,
    n_tokens: int,
    n_facts: int = 16,
    depth: float | None = None,
) -> tuple[list[int], FactTask]:
    """The ids of one prompt of exactly n_tokens, and its task; the same for the same seed.

    Raises UserError where facts and question do not fit."""
    rng = random.Random(f"{kind}-{seed}")
    task = TASKS[kind](rng, n_tokens, n_facts)[0]
    question = hay.encode(f"\nQuestion: {task.question}").tolist()
    bos = [hay.tokenizer.bos_id] if hay.tokenizer.add_bos else []
    room = n_tokens - len(question) - len(bos)
    if kind == "uuid":
        pieces = hay.uuids(rng, task.facts[0], room)
    else:
        pieces = hay.bury(rng, task.facts, room, depth)
    ids = [*bos, *np.concatenate(pieces).tolist(), *question]
    if len(ids) > n_tokens:
        raise UserError(
            f"{kind}: facts and question take {len(ids)} tokens, more than {n_tokens}; "
            "ask for longer prompts, or for fewer facts where there is --facts"
        )
    return ids, task


# --------------------------------------------------------------------------------------- evaluation


class Watched:
    """A cache with the exact keys beside it, which sees what its `select` gives at each decode
    step.

    It counts how many of the tokens attended are among as many tokens of the largest attention
    weights. Heads that share a selection are judged by the sum of their weights, and any other head
    by its own. Sinks and recent tokens count. sums [4] over steps: of each of NAMES the mean over
    heads and rows, then the number of steps (fp64; a CUDA graph adds to them)."""

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
        return getattr(self.cache, name)  # bytes are counted without the keys beside it

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
        """Counts the tokens of an index [B, Hkv or 1, G or 1, n], and those that are exact
        besides."""
        age = pos[:, None, None, None] - self.cache.context.positions  # [B, 1, 1, S]
        live = (index >= 0).float()
        chosen = torch.zeros(*index.shape[:-1], age.shape[-1], device=pos.device)
        chosen = chosen.scatter_add(-1, index.clamp(min=0).long(), live) > 0
        n_recent = self.cache.exact[0].n_recent if self.cache.exact else 0
        chosen = (chosen | (age < n_recent)) & (age >= 0)

        query = self.query.unflatten(1, (self.keys.shape[1], -1)).float()  # [B, Hkv, G, D]
        logits = query @ self.keys.float().transpose(-1, -2) * self.keys.shape[-1] ** -0.5
        # In logarithms, since small weights would round to 0.
        weights = logits.masked_fill(age < 0, -torch.inf).log_softmax(-1)
        mass = (weights.exp() * chosen).sum(-1).mean()

        # Heads that share a selection are judged by the sum of their weights.
        shared = [dim for dim in (1, 2) if index.shape[dim] == 1]
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
        if steps == 0:
            return {}
        means = [total / steps for total in sums]
        return dict(zip(self.NAMES, means, strict=True))


ANSWER_ROOM = 96  # tokens of a cache beyond a retrieval prompt
STEP_COST = 10  # what decoding one token costs in the progress bar, in prompt tokens

# ------------------------------------------------------------------------------- a row of the table


def parse_value(text: str, kind: type) -> object:
    """A setting's value of the type of its field. Raises ValueError where it is none."""
    if kind is not bool:
        return kind(text)
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def parse_settings(method: str, text: str) -> dict[str, object]:
    """Reads SETTING=VALUE,..., of which one may be a variant's name alone.

    Raises UserError for an unknown method, and ValueError for a value that is not of its kind."""
    kinds = {}
    for field in dataclasses.fields(method_named(method).settings):
        kinds[field.name] = field.type
    options = {}
    # A comma separates settings, but may be a part of a value, too: skip=0,1,-1
    variants = "|".join(compress.VARIANTS)
    for setting in re.split(rf",(?=\w+=|(?:{variants})(?:,|$))", text):
        if not setting:
            continue
        if setting in compress.VARIANTS:
            options["variant"] = setting
            continue
        name, _, value = setting.partition("=")
        kind = kinds.get(name, str)
        try:
            options[name] = parse_value(value, kind)
        except ValueError:
            wanted = f"{name}={kind.__name__.upper()}"
            raise ValueError(f"write {wanted}, not {setting}") from None
    return options


@dataclass
class Candidate:
    """What a row of the table is of: a method with its settings, at any capacity.

    It is written sals:rank=0.125,bits=2@FOLDER or sals:paper on the command line."""

    label: str
    method: str
    options: dict[str, object]
    folder: Path | None = None  # of a checkpoint, instead of --checkpoint
    weights: str | None = None  # "int8": then the label says so

    @classmethod
    def parse(cls, text: str, weights: str | None = None) -> "Candidate":
        """Reads a --method. Raises UserError for what is no method, or no setting of it."""
        method_text, _, folder = text.partition("@")
        method, _, settings_text = method_text.partition(":")
        try:
            options = parse_settings(method, settings_text)
        except ValueError as error:
            raise UserError(f"--method {text}: {error}") from None
        settings_from(method, options)  # refuses what is no setting
        return cls(
            label=f"{text} weights={weights}" if weights else text,
            method=method,
            options=options,
            folder=Path(folder) if folder else None,
            weights=weights,
        )

    def load(self, args: argparse.Namespace) -> Llama:
        """The model, of the candidate's own folder where it names one."""
        folder = self.folder or args.checkpoint
        model, _ = load_checkpoint(
            folder, args.device, args.dtype, self.weights, self.method, self.options
        )
        return model

    def check(
        self,
        args: argparse.Namespace,
        model: Llama,
        rows: dict[int, int],
    ) -> dict[str, Tensor]:
        """The artifact. Raises UserError where a cache of rows[capacity] rows cannot be built, or
        does not fit into the memory."""
        artifact = load_artifact(self.folder or args.checkpoint, self.method, model)
        settings = settings_from(self.method, self.options)
        for capacity in sorted(rows):
            generate.check_memory(model, self.method, settings, artifact, rows[capacity], capacity)
        return artifact

    def engine(
        self,
        args: argparse.Namespace,
        rows: int,
        capacity: int,
        watched: bool = False,
        least: int | None = None,
        temperature: float = 0.0,
    ) -> Engine:
        """An engine over freshly loaded weights, since a method may change them.

        watched: caches that select are inside of Watched. least: where the memory does not hold all
        rows, there may be fewer, down to this number."""
        model = self.load(args)
        while True:
            try:
                artifact = self.check(args, model, {capacity: rows})
                break
            except UserError:
                if least is None or rows <= least:
                    raise
                rows = rows * 7 // 8
        rows = min(all_gather_object(rows))  # of all processes
        settings = settings_from(self.method, self.options)
        context = CacheContext(model, rows, capacity)
        caches = method_named(self.method).build(model, settings, context, artifact)
        if watched and hasattr(settings, "budget"):  # the others attend all
            caches = [Watched(cache) for cache in caches]
        graphed = context.device.type == "cuda"
        return Engine(model, caches, context, Sampling(temperature), graphed=graphed)


def with_baseline(
    candidates: list[Candidate],
    weights: str | None,
    is_uptrained: bool,
) -> list[Candidate]:
    """The candidates, each once, after one that is the model as it is, in the folder's own weights.

    That is the dense model, if it is not the first candidate already. A model that was uptrained
    for EliteKV cannot run as a dense one. Its candidates are EliteKV's anyway, so that another one
    is added only where --weights changes them."""
    if is_uptrained:
        baseline = "elitekv"
        is_missing = weights is not None
    else:
        baseline = "dense"
        is_missing = weights is not None or candidates[0].label != "dense"
    if is_missing:
        candidates = [Candidate.parse(baseline), *candidates]
    each_once = {}
    for candidate in candidates:
        each_once.setdefault(candidate.label, candidate)
    return list(each_once.values())


def check_candidates(
    candidates: list[Candidate],
    args: argparse.Namespace,
    rows: dict[int, int],
    shorten: str = "--prefix, --continuation or --lengths",
) -> None:
    """Candidate.check of all, before the long part.

    Candidates of one folder that follow one another share a model, which checks leave as it is."""
    model = None
    folder = None
    for candidate in candidates:
        if model is None or candidate.folder != folder:
            check_tokens(candidate, args)
            model = candidate.load(args)
            folder = candidate.folder
            generate.check_capacity(max(rows), model.config, shorten)
        candidate.check(args, model, rows)


def check_tokens(candidate: Candidate, args: argparse.Namespace) -> None:
    """Raises UserError where a candidate's own folder has other tokens than --checkpoint, whose
    tokenizer makes all texts."""
    folder = candidate.folder
    if folder is None:
        return
    same_size = load_config(folder).vocab_size == load_config(args.checkpoint).vocab_size
    sample = "The 48213 tokens of a text, def main(): return [x ** 2]"
    ids = load_tokenizer(folder).encode(sample)
    expected = load_tokenizer(args.checkpoint).encode(sample)
    if not same_size or ids != expected:
        fault = f"--method {candidate.label}: its tokens are not those of --checkpoint"
        raise UserError(f"{fault} {args.checkpoint}")


def ledger(engine: Engine, length: int) -> dict[str, float]:
    """Bytes, of all processes together: "bytes/token", measured on the device; "host/token", in
    host memory, where a method uses it; "read/step", from a row of `length` tokens."""
    caches = engine.caches
    measured = sum_of_processes(sum(cache.bytes_stored() for cache in caches))
    read = sum_of_processes(sum(cache.bytes_read(length) for cache in caches))
    host = sum_of_processes(sum(cache.bytes_host() for cache in caches))
    tokens = engine.context.batch_size * engine.context.max_seq_length
    row = {"bytes/token": measured / tokens, "read/step": read}
    if host:
        row["host/token"] = host / tokens
    return row


def standard_error(samples: Tensor) -> float:
    """Of the mean of independent samples [n]; 0 for one."""
    if len(samples) < 2:
        return 0.0
    return samples.std().item() / math.sqrt(len(samples))


# -------------------------------------------------------------------------------- perplexity and KL


class ScoredText(NamedTuple):
    """Texts whose continuations are scored, a row each."""

    prompts: list[list[int]]
    tokens: Tensor | None  # [B, n], which follow; None: the dense model still has to write them

    def capacity(self, n: int) -> int:
        """Tokens of a cache that holds a prompt and n that follow."""
        return n + max(len(prompt) for prompt in self.prompts)


def eval_perplexity(
    engine: Engine,
    prompts: list[list[int]],
    tokens: Tensor,
    reference: Tensor | None,
    progress: ProgressLine,
) -> tuple[Tensor, Tensor]:
    """Reads a prompt a row, then feeds tokens [B, n] through the cache one by one, and scores each.

    reference: log-probabilities of the dense model, [n, B, V] in fp16 on the CPU; None where this
    engine is the dense one's. Returns figures of each token, [3, n, B] fp64: its loss in nats, the
    KL from the reference in nats, and whether (1 or 0) the likeliest token is the reference's; then
    the reference."""
    figures = []
    kept = []
    engine.prefill(prompts)
    progress.tick(sum(len(prompt) for prompt in prompts))
    for i, token in enumerate(tokens.T.to(engine.tokens)):
        log_p = engine.logits.float().log_softmax(-1)  # [B, V]
        if reference is None:
            kept.append(log_p.half().cpu())
            dense = log_p
        else:
            dense = reference[i].to(log_p).log_softmax(-1)  # fp16 left its sum not quite 1
        loss = -log_p.gather(1, token[:, None])[:, 0]
        kl = (dense.exp() * (dense - log_p)).sum(-1)
        likeliest = log_p.argmax(-1, keepdim=True)
        same = dense.gather(1, likeliest)[:, 0] == dense.amax(-1)  # in fp16 two may be equal
        figures.append(torch.stack((loss, kl, same)).cpu())
        engine.tokens.copy_(token)
        engine.step()
        progress.tick(STEP_COST * len(prompts))
    if reference is None:
        reference = torch.stack(kept)
    return torch.stack(figures, 1).double(), reference


def drift(figures: Tensor) -> dict[str, float]:
    """The mean KL, and the fraction of equal likeliest tokens, in each eighth of the tokens.

    figures [3, n, B] are eval_perplexity's. An eighth is named by its last token: "kl@N",
    "argmax@N"."""
    n = figures.shape[1] // 8
    eighths = figures[:, : 8 * n].unflatten(1, (8, n))  # [3, 8, n, B]
    _, kl, same = eighths.mean((2, 3)).tolist()
    row = {}
    for i in range(8):
        row[f"kl@{n * (i + 1)}"] = kl[i]
    for i in range(8):
        row[f"argmax@{n * (i + 1)}"] = same[i]
    return row


def perplexity_row(
    candidate: Candidate,
    args: argparse.Namespace,
    texts: dict[str, ScoredText],
    references: dict[str, Tensor],
    progress: ProgressLine,
) -> dict:
    """A row's part: bytes, and "ppl NAME" and "kl NAME" of each text, with standard errors over
    its windows. "kl NAME ±" is a column of its own, since a KL says little without its error.

    references: of each text those of the dense model, which the first candidate adds. A method that
    selects says what it attends, too, in the mean of all texts (Watched.NAMES). With --generate it
    does not, since to watch takes as long again, but says how the KL grows (drift)."""
    row = {"errors": {}}
    seen = []
    for name, text in texts.items():
        capacity = text.capacity(args.continuation)
        watched = not args.generate
        engine = candidate.engine(args, len(text.prompts), capacity, watched=watched)
        reference = references.get(name)
        figures, reference = eval_perplexity(engine, text.prompts, text.tokens, reference, progress)
        references[name] = reference

        loss, kl, _ = figures.mean(1)  # [B] each
        perplexity = loss.mean().exp().item()  # inf beyond the numbers of fp64
        kl = kl.clamp(min=0)
        row.update(ledger(engine, capacity))
        row[f"ppl {name}"] = perplexity
        row[f"kl {name}"] = kl.mean().item()
        row[f"kl {name} ±"] = standard_error(kl)
        row["errors"][f"ppl {name}"] = perplexity * standard_error(loss)
        row["errors"][f"kl {name}"] = row[f"kl {name} ±"]
        if args.generate:
            row.update(drift(figures))

        own = [cache.result() for cache in engine.caches if isinstance(cache, Watched)]
        for results in all_gather_object(own):
            seen += [result for result in results if result]
    if seen:
        for name in Watched.NAMES:
            row[name] = float(np.mean([result[name] for result in seen]))
    return row


# -------------------------------------------------------------------------------------- facts found


def retrieval_scores(
    engine: Engine,
    hay: Haystack,
    kind: str,
    length: int,
    n_samples: int,
    n_facts: int,
    progress: ProgressLine,
) -> Tensor:
    """Scores [n_samples] of one kind of task, fp64, from prompts of `length` tokens.

    Each prompt is prefilled, and the answer decoded greedily. A sample's number is its seed; depths
    rise evenly with it."""
    scores = []
    rows = engine.context.batch_size
    decode = hay.tokenizer.decode

    def ends_a_line(ids: list[int]) -> bool:
        return "\n" in decode(ids[-2:])

    for first in range(0, n_samples, rows):
        prompts = []
        tasks = []
        for seed in range(first, first + rows):
            seed = min(seed, n_samples - 1)  # the last may repeat, to fill the batch
            depth = (seed + 0.5) / n_samples
            prompt, task = eval_sample(hay, kind, seed, length, n_facts, depth)
            prompts.append(prompt)
            tasks.append(task)
        engine.prefill(prompts)
        longest = max(len(hay.encode(task.answer)) for task in tasks) + 4
        answers = generate.decode_rows(engine, longest, ends_a_line, stride=16)
        for task, ids in zip(tasks, answers, strict=True):
            scores.append(task.score(decode(ids)))
        progress.tick(min(rows, n_samples - first) * length)
    return torch.tensor(scores[:n_samples], dtype=torch.float64)


def retrieval_row(
    candidate: Candidate,
    args: argparse.Namespace,
    hay: Haystack,
    progress: ProgressLine,
) -> dict:
    """A row's part: bytes at the last length, and "TASK LENGTH", per cent right, with errors."""
    row = {"errors": {}}
    for length in args.lengths:
        rows = min(args.rows, args.samples)
        engine = candidate.engine(args, rows, length + ANSWER_ROOM, least=1)
        row.update(ledger(engine, length))
        for kind in args.tasks:
            scores = retrieval_scores(engine, hay, kind, length, args.samples, args.facts, progress)
            row[f"{kind} {length}"] = 100 * scores.mean().item()
            row["errors"][f"{kind} {length}"] = 100 * standard_error(scores)
    return row


# ---------------------------------------------------------------------------------------- the table


def text_sources(args: argparse.Namespace) -> dict[str, list[Path]]:
    """The files of each text by its name: Python sources that no fit and no training reads, and
    each --text."""
    files = {"python": text_files(calibrate.STDLIB, held=True)}
    for path in args.text:
        if path.stem in files:
            fault = f"there is a text named {path.stem} already"
            raise UserError(f"--text {path}: {fault}; rename the file")
        files[path.stem] = text_files(path)
    return files


def texts_to_continue(args: argparse.Namespace, tokenizer, prompts: list[list[int]]) -> ScoredText:
    """What --generate continues: all prompts, and of a chat model chats about the last text."""
    prompts = list(prompts)
    if tokenizer.chat_template:
        for ids in prompts[-args.perplexity_rows :]:
            request = f"Explain this text at length:\n{tokenizer.decode(ids)}"
            messages = [{"role": "user", "content": request}]
            prompts.append(generate.encode_chat(tokenizer, messages))
    return ScoredText(prompts, None)


def eval_texts(
    args: argparse.Namespace,
    tokenizer,
    vocabulary: int,
) -> tuple[dict[str, ScoredText], Haystack]:
    """The texts whose perplexity is measured, by their names, and the text to hide facts in.

    With --generate there is one, "written", whose tokens are still to be written."""
    sources = text_sources(args)
    texts = {}
    if args.perplexity_rows:
        length = args.prefix + args.continuation
        for name, files in sources.items():
            window = windows(tokenizer, files, length, args.perplexity_rows, vocabulary)
            prompts = window[:, : args.prefix].tolist()
            texts[name] = ScoredText(prompts, window[:, args.prefix :])
    if args.generate:
        prompts = []
        for text in texts.values():
            prompts += text.prompts
        texts = {"written": texts_to_continue(args, tokenizer, prompts)}
    haystack_ids = text_ids(tokenizer, sources["python"], 1 << 19, vocabulary)
    return texts, Haystack(tokenizer, [haystack_ids])


def write_continuation(
    candidate: Candidate,
    args: argparse.Namespace,
    text: ScoredText,
) -> ScoredText:
    """A text with the --generate tokens that the candidate writes, at temperature 0.7 by seed 0."""
    capacity = text.capacity(args.generate)
    engine = candidate.engine(args, len(text.prompts), capacity, temperature=0.7)
    engine.prefill(text.prompts)
    answers = generate.decode_rows(engine, args.generate, lambda ids: False, stride=16)
    return ScoredText(text.prompts, torch.tensor(answers))


def rows_needed(args: argparse.Namespace, texts: dict[str, ScoredText]) -> dict[int, int]:
    """Of each capacity that a cache will have, the rows that must fit; retrieval can do with
    one."""
    rows = {}
    if args.samples:
        for length in args.lengths:
            rows[length + ANSWER_ROOM] = 1
    for text in texts.values():
        capacity = text.capacity(args.continuation)
        rows[capacity] = max(len(text.prompts), rows.get(capacity, 0))
    return rows


def columns_with_figures(rows: list[dict]) -> list[str]:
    """The columns of the table: those that some row has a figure of, costs before results."""
    first = ("method", "bytes/token", "host/token", "read/step", *Watched.NAMES)
    columns = []
    for column in (*first, *rows[0]):
        has_figure = any(isinstance(row.get(column), str | float | int) for row in rows)
        if has_figure and column not in columns:
            columns.append(column)
    return columns


def print_table(rows: list[dict], columns: list[str]) -> None:
    """Prints a line a row, eight columns at a time, with "-" where a row has no such figure."""
    width = max(len(row["method"]) for row in rows)
    for start in range(0, len(columns), 8):
        part = columns[start : start + 8]
        header = [f"{column:>15}" for column in part]
        print(f"{'':{width}}  " + "  ".join(header))
        for row in rows:
            cells = []
            for column in part:
                cells.append(f"{row[column]:15.4g}" if column in row else f"{'-':>15}")
            print(f"{row['method']:{width}}  " + "  ".join(cells))
        print()


def evaluate(args: argparse.Namespace) -> dict:
    """Prints the table, and returns its rows with what they were measured on."""
    if not args.perplexity_rows and (args.generate or not args.samples):
        needed = "give --samples, or --perplexity_rows (with --generate, too)"
        raise UserError(f"nothing to evaluate: {needed}")
    args.continuation = args.generate or args.continuation

    # 1. What is compared, and on which texts.
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    config = load_config(args.checkpoint)
    candidates = with_baseline(candidates, args.weights, config.elitekv)
    tokenizer = load_tokenizer(args.checkpoint)
    texts, hay = eval_texts(args, tokenizer, config.vocab_size)

    # 2. What cannot work is refused in a second, rather than after an hour.
    check_candidates(candidates, args, rows_needed(args, texts))
    if args.generate:
        texts["written"] = write_continuation(candidates[0], args, texts["written"])
    for kind in args.tasks:
        for seed in range(min(args.samples, 64)):
            eval_sample(hay, kind, seed, min(args.lengths), args.facts)

    # 3. A row for each candidate, shown as soon as it is there.
    rows = []
    references = {}
    n_tokens = args.samples * len(args.tasks) * sum(args.lengths)
    for text in texts.values():
        n_tokens += sum(len(prompt) + STEP_COST * args.continuation for prompt in text.prompts)
    with ProgressLine("evaluate, tokens", len(candidates) * n_tokens) as progress:
        for candidate in candidates:
            try:
                row = perplexity_row(candidate, args, texts, references, progress)
                found = retrieval_row(candidate, args, hay, progress) if args.samples else {}
            except (UserError, MemoryError, torch.OutOfMemoryError) as error:
                if not rows or world_size() > 1:
                    raise  # the other rows need the dense one, and processes one another
                progress.clear()
                fault = error or "not enough memory"
                print(f"{candidate.label}: no row: {fault}", file=sys.stderr)
                continue
            errors = {**row["errors"], **found.get("errors", {})}
            row = {"method": candidate.label, **row, **found}
            row["errors"] = errors
            row["settings"] = candidate.options
            rows.append(row)

            columns = columns_with_figures(rows)
            figures = [f"{column} {row[column]:.4g}" for column in columns[1:] if column in row]
            progress.clear()
            print(f"{candidate.label}: {', '.join(figures)}", file=sys.stderr, flush=True)
            if args.csv and rank() == 0:
                save_csv(args.csv, columns, rows)

    # 4. The table.
    print_table(rows, columns[1:])
    device = generate.device_name(torch.device(args.device))
    return {"seeds": f"0 to {args.samples - 1}", "device": device, "rows": rows}


# --------------------------------------------------------------------------------- the command line


class Sizes(NamedTuple):
    """How much is measured, where no option says it."""

    perplexity_rows: int
    prefix: int
    continuation: int
    lengths: tuple[int, ...]
    samples: int
    rows: int


QUICK = Sizes(
    perplexity_rows=4,
    prefix=1024,
    continuation=64,
    lengths=(1024,),
    samples=5,
    rows=10,
)
FULL = Sizes(  # as KL and TASKS in docs/results.md
    perplexity_rows=16,
    prefix=4096,
    continuation=96,
    lengths=(4096,),
    samples=100,
    rows=50,
)


def row_options(parser: Parser, rows: int = QUICK.rows, prompts: str = "prompts") -> None:
    """Options of every command that compares candidates."""
    generate.add_weights_option(parser)
    method = "a row of the table, as sals:rank=0.125,bits=2; repeat it (default: dense and sals)"
    form = "NAME[:SETTING=VALUE,...][@FOLDER]"
    parser.option("--method", str, None, method, action="append", metavar=form)
    about = f"{prompts} in a batch, fewer where the memory holds no more"
    parser.option("--rows", whole(1), rows, about, metavar="N")


def parse_args(argv: list[str]) -> argparse.Namespace:
    sizes = FULL if "--full" in argv else QUICK
    parser = Parser(description=__doc__)
    generate.add_model_options(parser)
    row_options(parser, sizes.rows, "prompts with facts")
    result_options(parser)
    parser.flag("--full", "the sizes of docs/results.md, where no option gives another one")

    text = "more text for perplexity; repeat it"
    parser.option("--text", Path, [], text, action="append", metavar="PATH")
    rows = "windows of each text whose continuation is scored, all in one batch; 0: none"
    parser.option("--perplexity_rows", whole(0), sizes.perplexity_rows, rows, metavar="N")
    prefix = "tokens of a window that are prefilled"
    parser.option("--prefix", whole(1), sizes.prefix, prefix, metavar="N")
    continuation = "tokens that are then decoded and scored"
    parser.option("--continuation", whole(1), sizes.continuation, continuation, metavar="N")
    written = "score instead N tokens that the dense model writes; after chats, too"
    parser.option("--generate", whole(8), 0, written, metavar="N")

    tasks = "kinds of facts to find, of those above"
    parser.option("--tasks", str, TRAINED_TASKS, tasks, nargs="+", choices=TASKS, metavar="TASK")
    lengths = "tokens of a prompt with facts"
    parser.option("--lengths", whole(1), sizes.lengths, lengths, nargs="+", metavar="N")
    samples = "prompts of each task and length; 0: none"
    parser.option("--samples", whole(0), sizes.samples, samples, metavar="N")
    facts = "facts in the multikey and multiquery tasks"
    parser.option("--facts", whole(4, MOST_FACTS), 16, facts, metavar="N")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    figures = evaluate(args)
    if args.json:
        report = {"command": " ".join(sys.argv), "torch": torch.__version__, **figures}
        print(json.dumps(report))


if __name__ == "__main__":
    generate.run_command(main)
