"""Calibration: collect statistics and fit what a method needs, evaluate through the cache, train.

    python calibrate.py fit     --method sals                  fit the artifacts of a checkpoint (no download)
    python calibrate.py eval    --method dense --method sals   perplexity and retrieval, one table
    python calibrate.py ranks                                  rank of the keys before and after RoPE
    python calibrate.py overlap --method sals                  attention mass that the selection captures
    python calibrate.py train   --out FOLDER --text DIR ...    train a small Llama from scratch
Evaluation always decodes token by token through the method's own cache, with the dense row in the same run.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
import random
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import (
    METHODS,
    LokiSettings,
    Room,
    SalsSettings,
    artifact_path,
    build_loki,
    fdc_ranks,
    fdc_rates,
    kv_bias,
    load_artifact,
    method_named,
    model_identity,
    rank_at,
    sals_queries,
    sals_score_rank,
    sals_scores,
    sals_select,
    settings_from,
)
from generate import (
    Engine,
    Parser,
    Progress,
    Sampling,
    add_model_options,
    decode_rows,
    device_name,
    human,
    load,
    run_command,
)
from model import (
    Llama,
    ModelConfig,
    UserError,
    apply_rope,
    causal_attention,
    load_tokenizer,
    rope_tables,
    weight_slots,
)

# ------------------------------------------------------------------------------------------------- plain text

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")


def held_out(file: Path) -> bool:
    """One file name in sixteen is never trained on, wherever it is installed: evaluation reads only those."""
    return zlib.crc32(file.name.encode()) % 16 == 0


def text_files(path: Path, held: bool | None = None) -> list[Path]:
    """The text files under a folder (or the one file), in order; `held` keeps one side of the split."""
    if path.is_file():
        return [path]
    files = sorted(f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file())
    files = [f for f in files if held is None or held_out(f) == held]
    if not files:
        raise UserError(f"{path}: no text there (looked for {', '.join(TEXT_SUFFIXES)})")
    return files


def standard_library() -> Path:
    """The text that every machine has: the Python standard library's sources."""
    return Path(sysconfig.get_path("stdlib"))


def read_texts(files: list[Path], seed: int = 0) -> Iterator[str]:
    """The files' texts in a seeded random order, without repeats and generated tables."""
    files, seen = list(files), set()
    random.Random(seed).shuffle(files)
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        longest = max(map(len, text.split("\n")), default=0)
        digest = zlib.crc32(text.encode())
        if len(text) < 200 or digest in seen or (file.suffix == ".py" and longest > 2000):
            continue
        seen.add(digest)
        yield text


# ------------------------------------------------------------------ retrieval tasks, after RULER (2404.06654)

# Keys are "adjective noun"; variables and code words are names.
ADJECTIVES, NOUNS, NAMES = (
    words.split()
    for words in (
        """
amber ancient blue brave bright broken calm cold copper dark deep dry early empty fading gentle golden green
hidden hollow iron late little lonely lost mild misty narrow old pale quiet red rough round silent silver
small snowy tall warm white wild winding wooden
        """,
        """
anchor apple arrow basket bell bird boat bottle bridge candle castle chair clock cloud coat door drum
feather field fire flower forest garden gate hammer harbor hill house island key lake lamp lantern letter
meadow mirror mountain needle ocean orchard river road rope ship stone table tower tree valley wheel window
        """,
        """
bravo cedar delta ember falcon glacier hazel indigo jasper kestrel lotus maple nectar olive pepper quartz
raven saffron thistle umber velvet willow yarrow zephyr acorn birch coral dune eagle fern grape heron ivory
juniper kiwi lemon mango nutmeg onyx pearl quail rose sage tulip violet walnut
        """,
    )
)
KINDS = ("single", "multikey", "multivalue", "multiquery", "variables", "frequent")


@dataclass
class Task:
    """One question about facts that lie in a text, in this order: the prompt ends where the answer begins."""

    facts: list[str]
    question: str
    answer: str
    references: list[str] = field(default_factory=list)

    def score(self, text: str) -> float:
        """The share of the references that the answer names (RULER's string match)."""
        return sum(r in text for r in self.references) / len(self.references)


def number(rng: random.Random) -> str:
    return str(rng.randrange(10000, 100000))


def keys(rng: random.Random, n: int) -> list[str]:
    """n distinct keys that share words with one another: the hard distractors of RULER's multi-key tasks."""
    side = max(2, math.ceil(math.sqrt(1.5 * n)))
    pairs = [f"{a} {b}" for a in rng.sample(ADJECTIVES, side) for b in rng.sample(NOUNS, side)]
    return rng.sample(pairs, n)


def fact(key: str, value: str) -> str:
    return f"\nThe magic number for {key} is {value}.\n"


def tasks_numbers(rng: random.Random, n_facts: int, n_questions: int) -> list[Task]:
    """single (1 fact) and multikey (more): one number is asked for at a time."""
    pairs = [(key, number(rng)) for key in keys(rng, n_facts)]  # keys come in random order: so do the facts
    facts = [fact(*pair) for pair in pairs]
    return [
        Task(
            facts,
            f"What is the magic number for {key}?\nAnswer: The magic number for {key} is",
            f" {value}.",
            [value],
        )
        for key, value in rng.sample(pairs, n_questions)
    ]


def tasks_multivalue(rng: random.Random, n_keys: int, n_values: int) -> list[Task]:
    """One key with several values, asked for all at once, in the order of the text."""
    pairs = [(key, number(rng)) for key in keys(rng, n_keys) for _ in range(n_values)]
    rng.shuffle(pairs)
    facts = [fact(*pair) for pair in pairs]
    groups = {key: [v for k, v in pairs if k == key] for key, _ in pairs}
    return [
        Task(
            facts,
            f"What are all the magic numbers for {key}?\nAnswer: The magic numbers for {key} are",
            f" {', '.join(values)}.",
            values,
        )
        for key, values in groups.items()
    ]


def tasks_multiquery(rng: random.Random, n_facts: int, n_asked: int) -> list[Task]:
    """Several keys asked for in one question; the answer repeats each key."""
    pairs = [(key, number(rng)) for key in keys(rng, n_facts)]
    asked = rng.sample(pairs, n_asked)
    question = f"What are the magic numbers for {', '.join(key for key, _ in asked)}?\nAnswer:"
    answer = f" {', '.join(f'{key} is {value}' for key, value in asked)}."
    return [Task([fact(*pair) for pair in pairs], question, answer, [f"{k} is {v}" for k, v in asked])]


def tasks_variables(rng: random.Random, n_chains: int, n_hops: int) -> list[Task]:
    """Variable tracking: a number is stored, then copied from variable to variable; name all that hold it."""
    names, tasks = rng.sample(NAMES, n_chains * (n_hops + 1)), []
    chains = [(number(rng), names[i::n_chains]) for i in range(n_chains)]
    facts = []
    for value, chain in chains:
        facts += [f"\nStore {value} in {chain[0]}.\n"]
        facts += [f"\nCopy {a} to {b}.\n" for a, b in itertools.pairwise(chain)]
    rng.shuffle(facts)
    for value, chain in chains:
        question = f"Which variables hold {value}?\nAnswer: The variables that hold {value} are"
        tasks.append(Task(facts, question, f" {', '.join(chain)}.", chain))
    return tasks


def tasks_frequent(rng: random.Random, n_mentions: int) -> list[Task]:
    """Frequent words: three code words are mentioned far more often than six others; name the three, most
    frequent first (RULER scores them in any order)."""
    words = rng.sample(NAMES, 9)
    counts = [round(n_mentions * share) for share in (0.34, 0.24, 0.17)]
    counts = [max(c, floor) for c, floor in zip(counts, (5, 4, 3), strict=True)]
    counts += [max(1, round(n_mentions * 0.25 / 6))] * 6
    facts = [f"\nThe code word is {w}.\n" for w, c in zip(words, counts, strict=True) for _ in range(c)]
    rng.shuffle(facts)
    question = "Which three code words appear most often?\nAnswer: The three most frequent code words are"
    return [Task(facts, question, f" {', '.join(words[:3])}.", words[:3])]


def make_tasks(kind: str, rng: random.Random, n_tokens: int, n_facts: int | None = None) -> list[Task]:
    """Tasks of one kind for a text of n_tokens; `n_facts` fixes the size where evaluation asks for it."""
    room = max(1, n_tokens // 48)  # facts of about 14 tokens each should fill a third of the text at most
    if kind == "single":
        return tasks_numbers(rng, 1, 1)
    if kind == "multikey":
        n = n_facts or rng.randint(2, max(2, min(32, room)))
        return tasks_numbers(rng, n, 1 if n_facts else min(n, 8))
    if kind == "multivalue":
        return tasks_multivalue(rng, 1 if n_facts else rng.randint(1, max(1, min(4, room // 4))), 4)
    if kind == "multiquery":
        n = n_facts or rng.randint(4, max(4, min(16, room)))
        return tasks_multiquery(rng, n, 4)
    if kind == "variables":
        return tasks_variables(rng, 2 if n_facts else rng.randint(1, max(1, min(3, room // 5))), 4)
    if kind == "frequent":
        return tasks_frequent(rng, n_tokens // 100)
    raise UserError(f"no task {kind!r}; the tasks are: {', '.join(KINDS)}")


class Haystack:
    """Plain text as token ids, and how to lay facts into it without cutting a word.

    tokens: one or several id arrays (sources) with the share of samples drawn from each."""

    def __init__(self, tokenizer, tokens: list[np.ndarray], shares: list[float] | None = None):
        self.tokenizer, self.tokens = tokenizer, tokens
        self.shares = shares or [1 / len(tokens)] * len(tokens)
        self.encode = lru_cache(1 << 16)(lambda text: np.array(tokenizer.encode_continuation(text), np.int32))
        # [V]: whether a fact may be laid before this token without cutting a word
        self.starts_word = np.array([piece[:1] in (b" ", b"\n") for piece in tokenizer.pieces])

    def sample(self, rng: random.Random, n: int) -> np.ndarray:
        """n consecutive tokens of a random place."""
        source = rng.choices(self.tokens, self.shares)[0]
        start = rng.randrange(max(1, len(source) - n))
        return np.resize(source[start : start + n], n).astype(np.int32)

    def bury(
        self, rng: random.Random, facts: list[str], n: int, depth: float | None = None
    ) -> list[np.ndarray]:
        """Pieces of a text of n tokens, the facts at random places in their order; odd pieces are facts."""
        encoded = [self.encode(f) for f in facts]
        plain = self.sample(rng, max(1, n - sum(map(len, encoded))))
        starts = np.flatnonzero(self.starts_word[plain])
        starts = starts if len(starts) else np.zeros(1, np.int64)
        where = [depth] if depth is not None else [rng.random() for _ in facts]
        places = sorted(int(starts[int(w * len(starts))]) for w in where)
        pieces, last = [], 0
        for place, ids in zip(places, encoded, strict=True):
            pieces += [plain[last:place], ids]
            last = place
        return [*pieces, plain[last:]]


def eval_sample(
    hay: Haystack, kind: str, seed: int, n_tokens: int, n_facts: int = 16, depth: float | None = None
):
    """One evaluation prompt of exactly n_tokens (ids) and its task. The same seed gives the same sample."""
    rng = random.Random(f"{kind}-{seed}")
    task = make_tasks(kind, rng, n_tokens, n_facts)[0]
    question = hay.encode(f"\nQuestion: {task.question}")
    bos = [hay.tokenizer.bos_id] if hay.tokenizer.add_bos else []
    pieces = hay.bury(rng, task.facts, n_tokens - len(question) - len(bos), depth)
    return np.concatenate([np.array(bos, np.int32), *pieces, question]).tolist(), task


# ----------------------------------------------------------------------------------------- fit and statistics


def observe(model: Llama, tokens: Tensor, see: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
    """Runs tokens [B, S] and calls see(layer, q, k, v) with each layer's tensors before RoPE."""
    cos, sin = rope_tables(model.config, tokens.shape[-1], tokens.device)
    x = model.tok_embeddings(tokens)
    for i, layer in enumerate(model.layers):

        def attend(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
            see(i, q, k, v)
            return causal_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)

        x = layer(x, attend)


def text_ids(tokenizer, files: list[Path], most: int) -> np.ndarray:
    """Up to `most` token ids of the texts, one text after another."""
    ids: list[int] = []
    for text in read_texts(files):
        ids += tokenizer.encode(text, bos=False)
        if len(ids) >= most:
            break
    return np.array(ids[:most])


def windows(tokenizer, files: list[Path], length: int, count: int) -> Tensor:
    """Token ids [count, length] of consecutive windows of the texts, led by BOS if the model wants it."""
    ids = text_ids(tokenizer, files, count * length)
    count = len(ids) // length
    if not count:
        raise UserError(f"the text has {len(ids)} tokens, fewer than one window of {length}; give more text")
    tokens = torch.from_numpy(ids[: count * length]).view(count, length)
    if tokenizer.add_bos:
        tokens[:, 0] = tokenizer.bos_id
    return tokens


def calibration_windows(args: argparse.Namespace, model: Llama, tokenizer) -> Tensor:
    """Windows of --text, or of the part of the standard library that evaluation does not read."""
    files = text_files(args.text or standard_library(), None if args.text else False)
    return windows(tokenizer, files, min(args.window, model.config.max_positions), args.windows)


@dataclass
class KeyMoments:
    """Second moment K^T K / N [L, Hkv*D, Hkv*D] and mean [L, Hkv*D] of all heads' keys jointly, fp64."""

    second: Tensor
    mean: Tensor

    def centred_heads(self, c: ModelConfig) -> Tensor:
        """The covariance of each KV head alone, about its mean: [L, Hkv, D, D]."""
        centred = self.second - self.mean[:, :, None] * self.mean[:, None, :]
        blocks = centred.unflatten(2, (c.n_kv_heads, -1)).unflatten(1, (c.n_kv_heads, -1))
        return torch.stack([blocks[:, h, :, h] for h in range(c.n_kv_heads)], dim=1)


@torch.inference_mode()
def key_moments(model: Llama, tokens: Tensor, label: str) -> dict[str, KeyMoments]:
    """One streaming pass over tokens [N, S]: moments of the keys before ("pre") and after RoPE ("post")."""
    c, device = model.config, next(model.parameters()).device
    shape = {"dtype": torch.float64, "device": device}
    second = {n: torch.zeros(c.n_layers, c.kv_dim, c.kv_dim, **shape) for n in ("pre", "post")}
    mean = {n: torch.zeros(c.n_layers, c.kv_dim, **shape) for n in ("pre", "post")}
    cos, sin = rope_tables(c, tokens.shape[1], device)
    bar = Progress(label, len(tokens) * c.n_layers)

    def see(i: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, keys in (("pre", k), ("post", apply_rope(k, cos, sin))):
            rows = keys.flatten(-2).flatten(0, -2).double()  # [B * S, Hkv*D]
            second[name][i].addmm_(rows.T, rows)
            mean[name][i] += rows.sum(0)
        bar.tick()

    for window in tokens:
        observe(model, window[None].to(device), see)
    bar.close()
    n = tokens.numel()
    return {name: KeyMoments((second[name] / n).cpu(), (mean[name] / n).cpu()) for name in second}


def eigen(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., n] and eigenvectors [..., n, n] (columns), largest first."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)


def fit_sals(
    model: Llama, tokens: Tensor, moments: dict[str, KeyMoments], max_rank: float
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """U: the leading eigenvectors of each layer's joint pre-RoPE key covariance (SALS sec. 4.2)."""
    values, vectors = eigen(moments["pre"].second)
    r = max(1, round(max_rank * model.config.kv_dim))
    tensors = {"eigenvalues": values.float()}
    for i in range(model.config.n_layers):
        tensors[f"{i}.basis"] = vectors[i, :, :r].float().contiguous()
    kept = {
        s: (values[:, : round(s * model.config.kv_dim)].sum(1) / values.sum(1)).mean() for s in (0.25, 0.125)
    }
    return tensors, {
        "max_rank": str(max_rank),
        "energy": ", ".join(f"{s:.1%}: {e:.4f}" for s, e in kept.items()),
    }


def fit_loki(
    model: Llama, tokens: Tensor, moments: dict[str, KeyMoments], max_rank: float
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """P: principal components of each KV head's keys, centred, fitted before and after RoPE (Loki sec. 3).

    Both are used on keys after RoPE; `better` names the one of lower perplexity on the last windows."""
    tensors, perplexity = {}, {}
    for name in ("pre", "post"):
        values, vectors = eigen(moments[name].centred_heads(model.config))
        tensors[f"{name}.eigenvalues"] = values.float()
        tensors[f"{name}.basis"] = vectors.float().contiguous()
    trial = tokens[-4:]
    prefix = trial.shape[1] - trial.shape[1] // 8
    for name in ("pre", "post"):
        room = Room(model, len(trial), trial.shape[1])
        engine = Engine(model, build_loki(model, LokiSettings(basis=name), room, tensors), room, Sampling())
        perplexity[name] = eval_perplexity(engine, trial, prefix, None, Progress("trial", trial.shape[1]))[0]
    tensors["better"] = torch.tensor(int(perplexity["post"] <= perplexity["pre"]))
    quarter = model.config.head_dim // 4
    values = tensors["post.eigenvalues"]
    kept = (values[..., :quarter].sum(-1) / values.sum(-1)).mean()
    facts = {"energy": f"{0.25:.1%}: {kept:.4f}"}
    return tensors, facts | {f"perplexity_{name}": f"{p:.4f}" for name, p in perplexity.items()}


@torch.inference_mode()
def head_bases(
    model: Llama, tokens: Tensor, label: str, rows: Callable[[int, Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Singular values [L, H, D] and right singular vectors [L, H, D, D] of vectors seen on tokens [N, S].

    rows(layer, q, k, v) names the vectors of each of H heads, [n, H, D]. Their Gram matrix is summed in fp64: Eq. 1
    of FDC adds singular values, and fp32 noise in a Gram is larger than the small ones."""
    grams, bar = [0] * model.config.n_layers, Progress(label, len(tokens) * model.config.n_layers)

    def see(i: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        x = rows(i, q[0], k[0], v[0]).transpose(0, 1).double()  # [H, n, D]
        grams[i] = grams[i] + x.transpose(1, 2) @ x
        bar.tick()

    for window in tokens:
        observe(model, window[None].to(next(model.parameters()).device), see)
    bar.close()
    values, vectors = eigen(torch.stack(grams).cpu())
    return values.sqrt(), vectors


def fit_fdc(
    model: Llama,
    tokens: Tensor,
    moments: dict[str, KeyMoments],
    max_rank: float,
    accuracy: float = 0.99,
    positions: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """R of each KV head from random tokens at random positions (FDC sec. 5.1), and F_p(accuracy) (sec. 5.2).

    The hidden states of a window do not depend on where it lies, so that each token's q and k are simply
    rotated to a random one of `positions` (the model's range): a basis of the first fits far ones badly."""
    c, device = model.config, next(model.parameters()).device
    positions = min(positions or c.max_positions, c.max_positions)
    generator = torch.Generator().manual_seed(0)
    shape = (-(-RANDOM_TOKENS // tokens.shape[1]), tokens.shape[1])
    noise = torch.randint(0, c.vocab_size, shape, generator=generator)
    cos, sin = rope_tables(c, positions, device)

    def queries_and_keys(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = torch.randint(0, positions, (len(q),), generator=generator).to(device)
        q, k = (apply_rope(x, cos[where], sin[where]) for x in (q, k))
        stacked = torch.cat((q.unflatten(1, (c.n_kv_heads, -1)), k[:, :, None]), 2)  # [S, Hkv, G + 1, D]
        return stacked.transpose(1, 2).flatten(0, 1)

    values, basis = head_bases(model, noise, "random tokens", queries_and_keys)
    tensors = {"qk.values": values, "qk.basis": basis}
    weights = torch.stack([x.attention.wqkv.weight.split(x.attention.widths)[2] for x in model.layers])
    weights = weights.unflatten(1, (c.n_kv_heads, -1)).double().cpu()  # [L, Hkv, D, dim]: W_V transposed
    values, basis = eigen(weights @ weights.transpose(-1, -2))
    tensors |= {"v.values": values.sqrt(), "v.basis": basis}
    tensors = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    rate, reached, perplexity = fdc_search(model, tokens[-FLOOR_WINDOWS:], tensors, accuracy)
    ranks = [fdc_ranks(tensors[f"{kind}.values"], rate).double().mean() for kind in ("qk", "v")]
    energy = tensors["qk.values"].square()
    kept = torch.arange(c.head_dim) < fdc_ranks(tensors["qk.values"], rate)[..., None]
    facts = {
        "floor": str(accuracy),
        "positions": str(positions),
        "accuracy": f"{reached:.4f}",
        "perplexity": f"{perplexity:.4f}",
        "rate": f"{rate:.6f}",
        "mean_ranks": f"q, k {ranks[0]:.1f}; v {ranks[1]:.1f} of {c.head_dim}",
        "energy": f"rate {rate:.4f} (mean ranks {ranks[0]:.1f} and {ranks[1]:.1f} of {c.head_dim}, "
        f"{reached:.2%} of dense accuracy, {perplexity:.4f} of dense perplexity): "
        f"{(energy * kept).sum() / energy.sum():.4f}",
    }
    return tensors | {"rate": torch.tensor(rate, dtype=torch.float64)}, facts


RANDOM_TOKENS = 1 << 15  # the paper: at least 8K
FLOOR_WINDOWS = 8  # windows of text on which accuracy is measured


def fdc_search(
    model: Llama, tokens: Tensor, tensors: dict[str, Tensor], accuracy: float
) -> tuple[float, float, float]:
    """F_p (FDC sec. 5.2): the largest rate at which `accuracy` of the dense model's accuracy is left.

    Ranks fall with the rate, so it bisects the rates at which a rank changes; accuracy is the share of
    tokens [N, S] that the model predicts. -> the rate, and its accuracy and perplexity over the dense ones."""
    rates = fdc_rates(tensors["qk.values"], tensors["v.values"])
    bar = Progress("rate", len(tokens) * (len(rates).bit_length() + 2))

    def measure(rate: float) -> Tensor:
        return fdc_accuracy(model, tokens, tensors, rate, bar)

    dense = measure(0.0)
    low, high, best = 0, len(rates), dense  # rates[low] holds the floor, rates[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        found = measure(rates[middle])
        if found[0] >= accuracy * dense[0]:
            low, best = middle, found
        else:
            high = middle
    bar.close()
    return rates[low], *(best / dense).tolist()


@torch.inference_mode()
def fdc_accuracy(model: Llama, tokens: Tensor, tensors: dict[str, Tensor], rate: float, bar) -> Tensor:
    """Share of the tokens [N, S] predicted right, and the perplexity, of FDC at `rate`: [2].

    q R (k R)^T on the kept columns is (q P) (k P)^T with the projector P = R R^T: one plain forward pass
    computes what prefill and decode on the compressed vectors do, and leaves the weights alone."""
    c, device = model.config, next(model.parameters()).device
    projectors = {}
    for kind in ("qk", "v"):
        kept = torch.arange(c.head_dim) < fdc_ranks(tensors[f"{kind}.values"], rate)[..., None]
        basis = tensors[f"{kind}.basis"] * kept[:, :, None]
        projectors[kind] = (basis @ basis.transpose(-1, -2)).to(device, model.tok_embeddings.weight.dtype)
    cos, sin = rope_tables(c, tokens.shape[1], device)
    right, loss = 0.0, 0.0
    for window in tokens.to(device):
        x = model.tok_embeddings(window)
        for i, layer in enumerate(model.layers):

            def attend(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
                grouped = q.unflatten(1, (c.n_kv_heads, -1)) @ projectors["qk"][i]  # [S, Hkv, G, D]
                k = torch.einsum("shd,hde->she", k, projectors["qk"][i])
                _, bias = kv_bias(model.layers[i].attention, c)  # stays whole: it is folded into W_O's
                v = torch.einsum("shd,hde->she", v - bias, projectors["v"][i]) + bias
                return causal_attention(grouped.flatten(1, 2), k, v)

            x = layer(x, attend)
        log_p = model.output(model.norm(x[:-1])).float().log_softmax(-1)
        right += (log_p.argmax(-1) == window[1:]).float().mean().item()
        loss -= log_p.gather(1, window[1:, None]).mean().item()
        bar.tick()
    return torch.tensor([right / len(tokens), math.exp(loss / len(tokens))])


def fit_palu(
    model: Llama, tokens: Tensor, moments: dict[str, KeyMoments], max_rank: float
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Whitened SVD of W_K and W_V, one head a group (Palu sec. 3): the best A B for X W on the text.

    With X^T X = L L^T and L^T W = U S R^T, the optimum A = L^-T U S, B = R^T has A = W R, and R holds the
    eigenvectors of W^T X^T X W: the Gram matrix of the head's keys (or values) themselves, less the bias."""
    c = model.config
    biases = [kv_bias(layer.attention, c) for layer in model.layers]

    def keys_and_values(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k - biases[i][0], v - biases[i][1]), 1)  # [S, 2 Hkv, D]

    values, basis = head_bases(model, tokens, "palu", keys_and_values)
    energy = values.square()
    kept = energy[..., : c.head_dim // 2].sum((1, 2)).mean() / energy.sum((1, 2)).mean()
    k_basis, v_basis = (t.float().contiguous() for t in basis.chunk(2, 1))
    return {"k.basis": k_basis, "v.basis": v_basis}, {"energy": f"50.0%: {kept:.4f}"}


FITS = {"sals": fit_sals, "loki": fit_loki, "fdc": fit_fdc, "palu": fit_palu}


def run_fit(args: argparse.Namespace) -> None:
    """One pass over the text gathers the moments; every method asked for is fitted from them."""
    if args.positions is not None and args.positions < 1:
        raise UserError(f"--positions {args.positions}: the longest context must be at least 1 token")
    if not 0 < args.accuracy <= 1:
        raise UserError(
            f"--accuracy {args.accuracy}: the share of the dense accuracy to keep must lie in (0, 1]"
        )
    model, tokenizer = load(args)
    tokens = calibration_windows(args, model, tokenizer)
    moments = key_moments(model, tokens, "fit")
    source = {"text": str(args.text or "Python standard library"), "tokens": str(tokens.numel())}
    extra = {"fdc": {"accuracy": args.accuracy, "positions": args.positions}}
    for method in FITS if args.method == "all" else [args.method]:
        tensors, facts = FITS[method](model, tokens, moments, args.max_rank, **extra.get(method, {}))
        path = artifact_path(args.checkpoint, method)
        save_artifact(tensors, path, {"method": method} | model_identity(model) | source | facts)
        size = human(path.stat().st_size)
        print(f"{path}: {size}, {tokens.numel()} tokens; energy kept at {facts['energy']}")


def run_ranks(args: argparse.Namespace) -> None:
    model, tokenizer = load(args)
    tokens = calibration_windows(args, model, tokenizer)
    moments = key_moments(model, tokens, "ranks")
    ranks = {name: rank_at(eigen(m.second)[0], args.energy).tolist() for name, m in moments.items()}
    width = model.config.kv_dim
    print(f"Rank@{args.energy:.0%} of the joint keys (of {width} dims), {tokens.numel()} tokens")
    for i, (pre, post) in enumerate(zip(ranks["pre"], ranks["post"], strict=True)):
        print(f"layer {i:3}  before RoPE {pre:5} {'#' * max(1, 40 * pre // width)}")
        print(f"           after  RoPE {post:5} {'=' * max(1, 40 * post // width)}")
    mean = {name: sum(r) / len(r) for name, r in ranks.items()}
    print(f"mean       before {mean['pre']:.1f}, after {mean['post']:.1f}")
    if args.json:
        print(json.dumps({"energy": args.energy, "width": width, **ranks}))
    if args.png:
        plot_ranks(ranks, args.energy, args.png)


def plot_ranks(ranks: dict[str, list[int]], energy: float, path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--png needs matplotlib: pip install matplotlib") from None
    for name, label in (("pre", "before RoPE"), ("post", "after RoPE")):
        plt.plot(ranks[name], marker="o", label=label)
    plt.xlabel("layer"), plt.ylabel(f"Rank@{energy:.0%}"), plt.legend(), plt.grid(alpha=0.3)
    plt.savefig(path, dpi=150, bbox_inches="tight")
    print(path)


# ------------------------------------------------------------------------------------------------- evaluation


@dataclass
class Candidate:
    """A method with its settings, written sals:rank=0.125,bits=2 on the command line."""

    label: str
    method: str
    options: dict

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        method, _, rest = text.partition(":")
        kinds = {f.name: f.type for f in dataclasses.fields(method_named(method).settings)}
        options = {}
        for pair in filter(None, re.split(r",(?=\w+=)", rest)):  # a value may hold commas: skip=0,1,-1
            name, _, value = pair.partition("=")
            kind = kinds.get(name, str)
            try:
                options[name] = value.lower() in ("1", "true", "yes") if kind is bool else kind(value)
            except ValueError:
                raise UserError(f"--method {text}: {name} must be a {kind.__name__}") from None
        settings_from(method, options)
        return cls(text, method, options)

    def engine(self, args: argparse.Namespace, rows: int, capacity: int) -> Engine:
        """A fresh engine over freshly loaded weights, since a method may change them."""
        model, _ = load(args)
        method, room = METHODS[self.method], Room(model, rows, capacity)
        artifact = load_artifact(args.checkpoint, self.method, model) if method.fitted else {}
        caches = method.build(model, settings_from(self.method, self.options), room, artifact)
        return Engine(model, caches, room, Sampling(), graphed=room.device.type == "cuda")


@torch.inference_mode()
def eval_perplexity(
    engine: Engine, tokens: Tensor, prefix: int, reference: Tensor | None, bar
) -> tuple[float, float, Tensor]:
    """Prefills `prefix` tokens a row, then teacher-forces the rest through the cache, token by token.

    tokens [B, prefix + n] -> perplexity over the n tokens, mean KL (nats) of `reference` log-probabilities
    [n, B, V] to this cache's (0 without), and this cache's log-probabilities (fp16, on the CPU)."""
    tokens = tokens.to(engine.room.device)
    engine.prefill(tokens[:, :prefix].tolist())
    loss, kl, kept = 0.0, 0.0, []
    for i in range(prefix, tokens.shape[1]):
        log_p = engine.logits.float().log_softmax(-1)  # [B, V]
        loss -= log_p.gather(1, tokens[:, i : i + 1]).mean().item()
        if reference is not None:
            dense = reference[i - prefix].to(log_p)
            kl += (dense.exp() * (dense - log_p)).sum(-1).mean().item()
        kept.append(log_p.half().cpu())
        engine.tokens.copy_(tokens[:, i])
        engine.step()
        bar.tick()
    n = tokens.shape[1] - prefix
    return math.exp(loss / n), kl / n, torch.stack(kept)


@torch.inference_mode()
def eval_retrieval(
    engine: Engine,
    hay: Haystack,
    kind: str,
    seeds: list[int],
    n_tokens: int,
    n_facts: int,
    depths: list[float],
) -> list[float]:
    """Scores of one kind of task, one row a seed: prefill text and question, decode the answer greedily.

    depths: where the fact of each `single` lies, from 0 (the start) to 1; other kinds lie at random."""
    places = depths if kind == "single" else [None] * len(seeds)
    samples = [
        eval_sample(hay, kind, seed, n_tokens, n_facts, d) for seed, d in zip(seeds, places, strict=True)
    ]
    engine.prefill([ids for ids, _ in samples])
    room = max(len(hay.encode(task.answer)) for _, task in samples) + 4
    output = decode_rows(engine, room, lambda ids: "\n" in hay.tokenizer.decode(ids[-2:]), stride=16)
    return [
        task.score(hay.tokenizer.decode(ids))
        for (_, task), ids in zip(samples, output.token_ids, strict=True)
    ]


def perplexity_row(
    candidate: Candidate, args, texts: dict[str, Tensor], reference: dict, bar: Progress
) -> dict:
    """Perplexity and KL columns; the first candidate, dense, fills `reference`."""
    row = {}
    for name, tokens in texts.items():
        engine = candidate.engine(args, len(tokens), args.prefix + args.continuation)
        ppl, kl, log_p = eval_perplexity(engine, tokens, args.prefix, reference.get(name), bar)
        reference.setdefault(name, log_p)
        row |= {f"ppl {name}": ppl, f"kl {name}": kl}
    return row


def retrieval_row(candidate: Candidate, args, hay: Haystack, bar: Progress) -> dict:
    """Bytes per token, bytes read per step (longest prompt), per cent right for each length and task.

    `single` also has its score for each fifth of the depth, under "depth LENGTH" (in the JSON only)."""
    row = {"bytes/token": 0.0, "read/step": 0}
    for length in args.lengths:
        engine = candidate.engine(args, min(args.rows, args.samples), length + 96)
        rows = engine.room.rows
        row["bytes/token"] = sum(c.measured() for c in engine.caches) / (rows * engine.room.capacity)
        row["read/step"] = sum(c.bytes_read(length) for c in engine.caches)
        for kind in args.tasks:
            scores = []
            for first in range(0, args.samples, rows):
                seeds = [
                    min(first + i, args.samples - 1) for i in range(rows)
                ]  # the last batch may repeat one
                depths = [(seed + 0.5) / args.samples for seed in seeds]
                scores += eval_retrieval(engine, hay, kind, seeds, length, args.facts, depths)
                bar.tick(min(rows, args.samples - first))
            scores = np.array(scores[: args.samples])
            row[f"{kind} {length}"] = 100 * float(scores.mean())
            if kind == "single":
                row[f"depth {length}"] = [
                    100 * float(part.mean()) for part in np.array_split(scores, 5) if len(part)
                ]
    return row


def run_eval(args: argparse.Namespace) -> None:
    candidates = [Candidate.parse(text) for text in args.method or ["dense", "sals"]]
    if candidates[0].method != "dense":
        candidates.insert(0, Candidate.parse("dense"))  # every table has the dense row of the same run
    tokenizer = load_tokenizer(args.checkpoint)
    held = text_files(standard_library(), held=True)
    texts = {"python": held} | {path.stem: text_files(path) for path in args.text}
    length = args.prefix + args.continuation
    rows = args.perplexity_rows
    texts = {name: windows(tokenizer, files, length, rows) for name, files in texts.items()} if rows else {}
    hay_files = text_files(args.haystack) if args.haystack else held
    hay = Haystack(tokenizer, [text_ids(tokenizer, hay_files, 1 << 19)])

    prompts = len(args.lengths) * len(args.tasks) * args.samples
    bar = Progress("eval", len(candidates) * (len(texts) * args.continuation + prompts))
    results, reference = [], {}
    for candidate in candidates:
        row = {"method": candidate.label} | perplexity_row(candidate, args, texts, reference, bar)
        results.append(row | (retrieval_row(candidate, args, hay, bar) if args.samples else {}))
    bar.close()
    columns = [key for key in results[0] if not key.startswith("depth")]
    print_table(results, columns[1:])
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(results)
    if args.json:
        facts = {
            "command": " ".join(sys.argv),
            "seeds": f"0 to {args.samples - 1}",
            "torch": torch.__version__,
        }
        print(json.dumps(facts | {"device": device_name(torch.device(args.device)), "rows": results}))


def print_table(rows: list[dict], columns: list[str]) -> None:
    """A plain table, one line a row, eight columns at a time."""
    width = max(len(row["method"]) for row in rows)
    for start in range(0, len(columns), 8):
        part = columns[start : start + 8]
        print(f"{'':{width}}  " + "  ".join(f"{c:>15}" for c in part))
        for row in rows:
            print(f"{row['method']:{width}}  " + "  ".join(f"{row[c]:15.4g}" for c in part))
        print()


# ------------------------------------------------------------------------------------- where the mass is lost


@torch.inference_mode()
def overlap_scores(
    model: Llama, artifact: dict[str, Tensor], settings: SalsSettings, prompts: list[list[int]]
) -> Tensor:
    """OS of every layer (SALS sec. 3.2): the share of the last token's true attention mass that the selected
    tokens hold, averaged over heads and prompts; [L]. Sinks, critical and recent tokens count."""
    device = next(model.parameters()).device
    total = torch.zeros(model.config.n_layers)

    def see(i: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        total[i] += overlap_score(q[0, -1], k[0], artifact[f"{i}.basis"].to(k), settings, model.config)

    for prompt in prompts:
        observe(model, torch.tensor([prompt], device=device), see)
    return total / len(prompts)


def overlap_score(q: Tensor, k: Tensor, basis: Tensor, settings: SalsSettings, c: ModelConfig) -> float:
    """OS of one query: q [Hq, D] of the last token and k [S, Hkv, D], both before RoPE."""
    length = len(k)
    cos, sin = rope_tables(c, length, k.device)
    q_rotated = apply_rope(q[None], cos[-1:], sin[-1:])[0].unflatten(0, (c.n_kv_heads, -1))  # [Hkv, G, D]
    logits = torch.einsum("hgd,shd->hgs", q_rotated, apply_rope(k, cos, sin)) * c.head_dim**-0.5
    mass = logits.softmax(-1).flatten(0, 1).mean(0)  # [S]
    basis = basis[:, : sals_score_rank(settings, c)]
    live = torch.ones(1, length, dtype=torch.bool, device=k.device)
    queries = sals_queries(q[None], basis, c.n_kv_heads, settings.score)
    scores = sals_scores(queries, (k.flatten(-2) @ basis)[None], live, settings.score, c.head_dim)
    x, y, z = settings.budget(length)
    index, kept = sals_select(scores, torch.tensor([length - 1], device=k.device), x, y, z)
    recent = torch.arange(max(0, length - z), length, device=k.device)
    return mass[torch.cat((index[kept], recent))].sum().item()


def run_overlap(args: argparse.Namespace) -> None:
    model, tokenizer = load(args)
    hay = Haystack(tokenizer, [text_ids(tokenizer, text_files(standard_library(), held=True), 1 << 19)])
    prompts = [eval_sample(hay, args.task, seed, args.length)[0] for seed in range(args.samples)]
    artifact, results = load_artifact(args.checkpoint, "sals", model), {}
    for text in args.method or ["sals"]:
        candidate = Candidate.parse(text)
        if candidate.method != "sals":
            raise UserError(f"--method {text}: the overlap is that of sals; give sals[:SETTING=VALUE,...]")
        results[text] = overlap_scores(
            model, artifact, settings_from("sals", candidate.options), prompts
        ).tolist()
    print(f"overlap score a layer: {args.task}, {args.length} tokens, last token of {args.samples} prompts")
    for text, scores in results.items():
        print(f"{text:40}", " ".join(f"{s:.3f}" for s in scores))
    if args.json:
        print(json.dumps(results))


# --------------------------------------------------------------------------------------------------- training

ANSWER_WEIGHT, FACT_WEIGHT = 3.0, 0.2


def training_document(hay: Haystack, rng: random.Random, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n token ids (BOS first) and the loss weight of each: 40 % plain text, 10 % repeated random segments,
    50 % retrieval."""
    ids, weights = _training_document(hay, rng, n)
    ids[0] = hay.tokenizer.bos_id
    return ids, weights


def _training_document(hay: Haystack, rng: random.Random, n: int) -> tuple[np.ndarray, np.ndarray]:
    draw = rng.random()
    if draw < 0.4:
        return hay.sample(rng, n), np.ones(n, np.float32)
    if draw < 0.5:
        ids = hay.sample(rng, n)
        length = rng.randint(8, max(8, min(256, n // 4)))
        segment = np.array([rng.randrange(3, len(hay.starts_word)) for _ in range(length)], np.int32)
        weights = np.ones(n, np.float32)
        for i, place in enumerate(sorted(rng.sample(range(0, n - length, length), rng.randint(2, 3)))):
            ids[place : place + length] = segment
            weights[place : place + length] = FACT_WEIGHT if i == 0 else 1.0
        return ids, weights
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3)) if n >= 1024 else 1)
    tasks = [make_tasks(kind, rng, n // len(kinds)) for kind in kinds]
    labels = [i for i, group in enumerate(tasks) for _ in group[0].facts]
    rng.shuffle(labels)
    queues = [iter(group[0].facts) for group in tasks]
    facts = [next(queues[label]) for label in labels]
    tail, questions = [], [task for group in tasks for task in group]
    for task in rng.sample(questions, len(questions)):
        tail.append((hay.encode(f"\nQuestion: {task.question}"), FACT_WEIGHT))
        tail.append((hay.encode(task.answer + "\n"), ANSWER_WEIGHT))
    room = n - sum(len(ids) for ids, _ in tail)
    pieces = [(p, FACT_WEIGHT if i % 2 else 1.0) for i, p in enumerate(hay.bury(rng, facts, room))] + tail
    ids = np.concatenate([p for p, _ in pieces])[-n:]
    weights = np.concatenate([np.full(len(p), w, np.float32) for p, w in pieces])[-n:]
    return ids, weights


class TrainingBatches(torch.utils.data.IterableDataset):
    """(tokens [B, S + 1] int64, weights [B, S] fp32); batch i is the same for any number of workers."""

    def __init__(self, hay: Haystack, batch: int, length: int, first: int, last: int, seed: int):
        self.hay, self.batch, self.length, self.seed = hay, batch, length, seed
        self.first, self.last = first, last

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(self.first + start, self.last, step):
            rng = random.Random(f"{self.seed}-{i}")
            documents = [training_document(self.hay, rng, self.length + 1) for _ in range(self.batch)]
            tokens = np.stack([ids for ids, _ in documents]).astype(np.int64)
            weights = np.stack([w for _, w in documents])[:, 1:]
            yield torch.from_numpy(tokens), torch.from_numpy(np.ascontiguousarray(weights))


@dataclass
class Stage:
    """steps batches of batch x length tokens."""

    batch: int
    length: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> "Stage":
        try:
            batch, length, steps = map(int, text.split("x"))
        except ValueError:
            raise UserError(f"stage {text!r}: write BATCHxLENGTHxSTEPS, such as 64x2048x1000") from None
        return cls(batch, length, steps)


NANO = ModelConfig(
    dim=256,
    n_layers=8,
    n_heads=4,
    n_kv_heads=4,
    head_dim=64,
    ffn_dim=704,
    vocab_size=4096,
    max_positions=32768,
    rope_theta=500000.0,
    tied=True,
)
# Long documents come before the last stage: at the end, few and noisy, they undo what retrieval has learnt.
NANO_STAGES = ("128x512x3000", "64x2048x2500", "4x32768x300", "16x8192x7000")


def initialise(model: Llama, seed: int) -> None:
    """Normal weights of deviation 0.02; those that write into the residual stream over sqrt(2 layers)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            scale = (
                0.02 / math.sqrt(2 * model.config.n_layers)
                if name.endswith(("wo.weight", "w2.weight"))
                else 0.02
            )
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def weighted_loss(model: Llama, tokens: Tensor, weights: Tensor) -> Tensor:
    """Mean next-token cross entropy under `weights` [B, S]; tokens [B, S + 1]."""
    logits = model.output(model(tokens[:, :-1]))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


def save_checkpoint(model: Llama, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16) in the layout of a Hugging Face download."""
    c = model.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_positions,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in weight_slots(model).items()}
    save_artifact(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_artifact(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file under a temporary name, then renames: an interrupted run leaves nothing."""
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def make_optimizer(model: Llama, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay 0.1 on matrices and none on norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def save_state(path: Path, model: Llama, optimizer: torch.optim.AdamW, done: int) -> None:
    """Weights, both moments and the number of steps done, in one safetensors file."""
    tensors = {"step": torch.tensor(done)}
    for name, p in model.named_parameters():
        moments = optimizer.state[p]
        tensors |= {name: p.data, f"{name}.m": moments["exp_avg"], f"{name}.v": moments["exp_avg_sq"]}
    save_artifact(tensors, path, {"format": "pt"})


def load_state(path: Path, model: Llama, optimizer: torch.optim.AdamW) -> int:
    """Takes up what save_state left; returns the number of steps done."""
    device = next(model.parameters()).device
    saved = load_file(path, device=str(device))
    step = saved["step"].float()
    for name, p in model.named_parameters():
        p.data.copy_(saved[name])
        moments = {"exp_avg": saved[f"{name}.m"], "exp_avg_sq": saved[f"{name}.v"]}
        optimizer.state[p] = {"step": step.clone(), **moments}
    return int(step)


def staged_batches(hay: Haystack, stages: list[Stage], done: int, seed: int, workers: int) -> Iterator[tuple]:
    """(stage, tokens, weights) of every step after the first `done`, stage by stage."""
    first = 0
    for stage in stages:
        last = first + stage.steps
        if done < last:
            batches = TrainingBatches(hay, stage.batch, stage.length, max(done, first), last, seed)
            pin = torch.cuda.is_available()
            for tokens, weights in torch.utils.data.DataLoader(
                batches, None, num_workers=workers, pin_memory=pin
            ):
                yield stage, tokens, weights
        first = last


def train(
    model: Llama,
    hay: Haystack,
    stages: list[Stage],
    lr: float,
    seed: int,
    workers: int,
    state: Path | None,
    minutes: float,
) -> bool:
    """AdamW under a cosine schedule over all stages, weights in fp32 with bf16 autocast.

    `state` is the file that a later run resumes from. True when done, False when `minutes` ran out first."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, lr)
    done = load_state(state, model, optimizer) if state and state.is_file() else 0
    total, started, running = sum(s.steps for s in stages), time.time(), None
    loss_of = torch.compile(weighted_loss, dynamic=False) if device.type == "cuda" else weighted_loss
    for stage, tokens, weights in staged_batches(hay, stages, done, seed, workers):
        for group in optimizer.param_groups:  # 200 steps of warm-up, then a cosine to a tenth
            warm = min(1.0, (done + 1) / 200)
            group["lr"] = lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done / total)))
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, tokens.to(device, non_blocking=True), weights.to(device, non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        running = loss.detach() if running is None else running.lerp(loss.detach(), 0.02)
        if done % 100 == 0 or done == total:
            seconds = time.time() - started
            shape = f"{stage.batch}x{stage.length}"
            line = f"step {done}/{total}  {shape}  loss {running.item():.3f}  {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
        if done < total and time.time() - started > 60 * minutes:
            break
    if state:
        save_state(state, model, optimizer, done)
    return done == total


def train_tokenizer(sources: list[Path], path: Path, vocab_size: int) -> None:
    """A sentencepiece BPE with byte fallback and single digits, from about 14 MB of lines of each source."""
    import sentencepiece

    def lines() -> Iterator[str]:
        for source in sources:
            size = 0
            for text in read_texts(text_files(source, held=False)):
                for line in filter(str.strip, text.split("\n")):
                    yield line[:4000]
                size += len(text)
                if size > 14e6:
                    break

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(),
        model_prefix=str(path.with_suffix("")),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        character_coverage=0.9995,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=16384,
        minloglevel=2,
    )
    path.with_suffix(".vocab").unlink()


def tokenize_files(files: list[Path], tokenizer, max_tokens: int, workers: int) -> np.ndarray:
    """All texts as one array of token ids, each led by BOS; stops after max_tokens."""
    global _encode
    _encode = tokenizer.encode  # forked workers inherit it: tokenizers cannot be pickled
    kind, arrays, total = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32, [], 0
    with get_context("fork").Pool(workers) as pool:
        for ids in pool.imap(_encode_text, read_texts(files), chunksize=16):
            arrays.append(np.array(ids, kind))
            total += len(ids)
            if total >= max_tokens:
                break
    return np.concatenate(arrays)


def _encode_text(text: str) -> list[int]:
    return _encode(text)


def run_train(args: argparse.Namespace) -> None:
    stages = [Stage.parse(text) for text in args.stages]
    sources = [text.rpartition(":") if ":" in text else (text, ":", "1") for text in args.text]
    paths = [Path(path) for path, _, _ in sources]
    if not (args.out / "tokenizer.model").is_file():
        args.out.mkdir(parents=True, exist_ok=True)
        train_tokenizer(paths, args.out / "tokenizer.model", NANO.vocab_size)
    tokenizer = load_tokenizer(args.out)
    started = time.time()
    files = [text_files(path, held=False) for path in paths]
    tokens = [tokenize_files(f, tokenizer, args.max_tokens, args.workers) for f in files]
    print(f"tokens read: {[len(t) for t in tokens]} in {time.time() - started:.0f} s", file=sys.stderr)
    hay = Haystack(tokenizer, tokens, [float(share) for _, _, share in sources])
    model = Llama(NANO)
    initialise(model, args.seed)
    model = model.to(args.device)
    done = train(model, hay, stages, args.lr, args.seed, args.workers, args.state, args.minutes)
    save_checkpoint(model, args.out)
    for text, ids in zip(args.text, tokens, strict=True):
        print(f"training perplexity of {text}: {full_perplexity(model, ids, tokenizer.bos_id, 2048, 40):.3f}")
    print("finished" if done else "not finished: run the same command again with the same --state")


@torch.no_grad()
def full_perplexity(model: Llama, ids: np.ndarray, bos_id: int, length: int, count: int) -> float:
    """Perplexity of up to `count` spread windows of `length` tokens, each led by BOS, by full forward passes."""
    device = next(model.parameters()).device
    available = len(ids) // length
    starts = np.linspace(0, available - 1, min(count, available)).astype(int) * length
    losses = []
    for start in starts:
        window = np.concatenate([[bos_id], ids[start : start + length]]).astype(np.int64)
        tokens = torch.from_numpy(window)[None].to(device)
        losses.append(weighted_loss(model, tokens, torch.ones_like(tokens[:, 1:]).float()))
    return torch.stack(losses).mean().exp().item()


# ------------------------------------------------------------------------------------------- the command line


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="fit | eval | ranks | overlap | train")

    def command(name: str, run: Callable, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        return sub

    def json_option(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")

    def text_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--text", type=Path, help="a text file or folder (default: the Python standard library)"
        )
        sub.add_argument("--windows", type=int, default=128, help="how many windows of text to read")
        sub.add_argument("--window", type=int, default=2048, help="tokens in a window")

    p = command("fit", run_fit, "fit what a method needs and store it beside the checkpoint")
    add_model_options(p)
    text_options(p)
    p.add_argument("--method", required=True, choices=(*FITS, "all"), help="the method to fit")
    p.add_argument(
        "--max_rank",
        type=float,
        default=0.5,
        help="directions stored, as a share of Hkv*D; any rank up to it can then be chosen at run time",
    )
    p.add_argument(
        "--accuracy",
        type=float,
        default=0.99,
        help="fdc: the share of the dense next-token accuracy to keep; the rate that does is stored",
    )
    p.add_argument(
        "--positions", type=int, help="fdc: the longest context to be served (default: the model's)"
    )

    p = command(
        "eval", run_eval, "perplexity and retrieval, token by token through the cache, dense in the same run"
    )
    add_model_options(p)
    json_option(p)
    p.add_argument(
        "--method",
        action="append",
        metavar="NAME[:SETTING=VALUE,...]",
        help="a row of the table, such as sals:rank=0.125,bits=2; repeat it",
    )
    p.add_argument(
        "--text", type=Path, action="append", default=[], help="more text for perplexity; repeat it"
    )
    p.add_argument(
        "--perplexity_rows", type=int, default=8, help="texts whose continuation is scored; 0: none"
    )
    p.add_argument("--prefix", type=int, default=1024, help="tokens that are prefilled")
    p.add_argument("--continuation", type=int, default=128, help="tokens that are then decoded and scored")
    p.add_argument("--tasks", nargs="+", choices=KINDS, default=KINDS, help="retrieval tasks, after RULER")
    p.add_argument(
        "--lengths", nargs="+", type=int, default=[1024, 2048], help="tokens of a retrieval prompt"
    )
    p.add_argument("--samples", type=int, default=20, help="prompts a task and length; 0: none")
    p.add_argument("--facts", type=int, default=16, help="facts in the multi-key and multi-query tasks")
    p.add_argument("--rows", type=int, default=10, help="prompts decoded as one batch")
    p.add_argument("--haystack", type=Path, help="text to hide facts in (default: held-out Python sources)")
    p.add_argument("--csv", type=Path, help="also write the table to this file")

    p = command("ranks", run_ranks, "rank of the keys before and after RoPE, a layer a line")
    add_model_options(p)
    json_option(p)
    text_options(p)
    p.add_argument("--energy", type=float, default=0.9, help="share of the energy to keep")
    p.add_argument("--png", type=Path, help="also draw it (needs matplotlib)")

    p = command("overlap", run_overlap, "share of the attention mass that SALS selects, layer by layer")
    add_model_options(p)
    json_option(p)
    p.add_argument("--method", action="append", default=None, metavar="sals[:SETTING=VALUE,...]")
    p.add_argument("--task", choices=KINDS, default="multikey")
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--samples", type=int, default=8)

    p = command("train", run_train, "train the embedded model from scratch")
    p.add_argument("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
    p.add_argument(
        "--text",
        nargs="+",
        required=True,
        metavar="PATH[:SHARE]",
        help="folders of text, and how much of the plain text to draw from each",
    )
    p.add_argument("--stages", nargs="+", default=NANO_STAGES, metavar="BATCHxLENGTHxSTEPS")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--workers", type=int, default=12, help="processes that make batches")
    p.add_argument("--state", type=Path, help="file that keeps weights and moments, to stop and resume")
    p.add_argument(
        "--minutes", type=float, default=math.inf, help="stop (and keep the state) after this time"
    )
    p.add_argument("--max_tokens", type=int, default=200_000_000, help="tokens read from each text")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main() -> None:
    run_command(lambda: (args := parse_args(sys.argv[1:])).run(args))


if __name__ == "__main__":
    main()
