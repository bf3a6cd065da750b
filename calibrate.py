"""Calibration: collect statistics and fit what a method needs, evaluate through the cache, train.

    python calibrate.py fit --method sals           fit the artifacts of a checkpoint (no download)
    python calibrate.py eval --method sals          perplexity and retrieval, beside the dense cache
    python calibrate.py COMMAND --help              what a command does, its options and an example
Evaluation always decodes token by token through the method's own cache, with the dense row in the same run.
"""

import argparse
import bisect
import csv
import dataclasses
import inspect
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import compress
import model as model_file
from compress import Cache, Context, load_artifact, method_named, replacing, save_artifact, settings_from
from generate import Engine, Parser, Progress, Sampling, fraction, load, positive, whole
from model import Llama, ModelConfig, UserError, apply_rope, load_tokenizer, rope_tables

# -------------------------------------------------------------------------------------------- texts and files

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
STDLIB = Path(os.__file__).parent  # the text that every machine has: the standard library's sources
INSTALLED = ("site-packages", "dist-packages")  # in its folder, but other on every machine


def tracked(label: str, items: Collection) -> Iterator:
    """The items, one by one, with their progress."""
    bar = Progress(label, len(items))
    for item in items:
        yield item
        bar.tick()


def text_files(path: Path, held: bool | None = None) -> list[Path]:
    """The text files under a folder (or the one file), in order. held: only those that evaluation reads
    and training never does, one name in sixteen wherever it lies; False: only the others."""
    if not path.is_dir():
        generate.read_text(path)  # refuses what is no text
        return [path]
    files = sorted(f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file())
    files = [f for f in files if path != STDLIB or f.relative_to(path).parts[0] not in INSTALLED]
    files = [f for f in files if held is None or held == (zlib.crc32(f.name.encode()) % 16 == 0)]
    if not files:
        raise UserError(f"{path}: no text there (looked for {', '.join(TEXT_SUFFIXES)})")
    return files


def read_texts(files: list[Path]) -> Iterator[str]:
    """The files' texts in a seeded random order, without repeats and generated tables."""
    files, seen = list(files), set()
    random.Random(0).shuffle(files)
    for file in files:
        text = generate.read_text(file, errors="ignore")
        longest, digest = max(map(len, text.split("\n"))), zlib.crc32(text.encode())
        if len(text) >= 200 and digest not in seen and not (file.suffix == ".py" and longest > 2000):
            seen.add(digest)
            yield text


def text_ids(tokenizer, files: list[Path], most: int, vocabulary: int | None = None, bos=False) -> np.ndarray:
    """Up to `most` token ids (int32) of the texts, one text after another; bos: each led by BOS.
    Raises UserError for an id outside the model's vocabulary."""
    bar = Progress("tokens", most)

    def stream() -> Iterator[int]:
        for text in read_texts(files):
            ids = tokenizer.encode(text[: 64 * most], bos=bos)  # even a token of blanks is hardly longer
            bar.tick(len(ids))
            yield from ids

    ids = np.fromiter(itertools.islice(stream(), most), np.int32)
    if not len(ids):
        raise UserError(f"{files[0]}: no text of at least 200 characters there")
    if vocabulary and ids.max() >= vocabulary:
        counts = f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {vocabulary}"
        raise UserError(f"{counts}; the tokenizer belongs to another model")
    return ids


def windows(tokenizer, files: list[Path], length: int, count: int, vocabulary: int | None = None) -> Tensor:
    """Token ids [count, length] of consecutive windows of the texts, led by BOS if the model wants it."""
    ids, asked = text_ids(tokenizer, files, count * length, vocabulary), count
    count = len(ids) // length
    if not count:
        raise UserError(f"the text has {len(ids)} tokens, fewer than one window of {length}; give more text")
    if count < asked:
        print(f"note: the text has {count} windows of {length} tokens, not {asked}", file=sys.stderr)
    tokens = torch.from_numpy(ids[: count * length]).long().view(count, length)
    if tokenizer.add_bos:
        tokens[:, 0] = tokenizer.bos_id
    return tokens


def model_and_windows(args: argparse.Namespace) -> tuple[Llama, Tensor]:
    """A model, and windows of --text, or of what the standard library does not hold out, to fit it on."""
    model, tokenizer = load(args.checkpoint, args.device, args.dtype)
    c, files = model.config, text_files(args.text or STDLIB, None if args.text else False)
    longest = min(args.window, c.max_positions, c.sliding_window or c.max_positions)
    return model, windows(tokenizer, files, longest, args.windows, c.vocab_size)


def writable_folder(text: str) -> Path:
    """Reads an option's folder for results. A fault is said now, not when the results are there."""
    folder = Path(text)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"no file can be written into {folder}")
    return folder


def writable_file(text: str) -> Path:
    """The same for one file."""
    if (path := Path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"no file can be written at {path}")
    return writable_folder(str(path.parent)) / path.name


# ---------------------------------------------------------------------------------------------------- fitting


def observe(model: Llama, batches: Iterable[Tensor], see: Callable) -> None:
    """Runs tokens [B, S] each, and calls see(layer, cos, sin, q, k, v) of each layer before RoPE."""
    if model.config.elitekv:
        raise UserError("this checkpoint was uptrained for EliteKV and is calibrated already")

    def attend(i: int, cos: Tensor, sin: Tensor, *qkv: Tensor) -> Tensor:
        see(i, cos, sin, *qkv)
        return model.layers[i].attention.causal(cos, sin)(*qkv)

    for tokens in batches:
        model(tokens.to(model.norm.weight.device), attend)


def full_passes(model: Llama, windows: Collection[Tensor], attend: Callable | None = None) -> Tensor:
    """Next-token accuracy and perplexity of windows [S] by full passes: fp64 [2]; attend: Llama.forward's."""
    sums = torch.zeros(2, dtype=torch.float64)
    for window in windows:
        window = window.to(next(model.parameters()).device)
        logits = model.output(model(window[None], attend)[0, :-1]).float()
        right = (logits.argmax(-1) == window[1:]).double().mean()
        sums += torch.stack((right, F.cross_entropy(logits, window[1:]).double())).cpu()
    right, loss = sums / len(windows)
    return torch.stack((right, loss.exp()))


@dataclass
class KeyMoments:
    """Means over tokens, fp64: of all heads' keys jointly, and of the queries of a group."""

    second: Tensor  # K^T K / N [L, Hkv*D, Hkv*D]
    mean: Tensor  # [L, Hkv*D]
    queries: Tensor  # [L, Hkv, D/2]: |q|^2 of each pair of dims that RoPE rotates, summed over the group

    def covariance(self) -> Tensor:
        """[L, Hkv*D, Hkv*D]"""
        return self.second - self.mean[:, :, None] * self.mean[:, None]


@lru_cache(1)  # for the next fit; weights that change in place are not seen
def key_moments(model: Llama, tokens: Tensor) -> dict[str, KeyMoments]:
    """One streaming pass over tokens [N, S]: moments of the keys before ("pre") and after RoPE ("post")."""
    sums = {name: [[0.0] * 3] * model.config.n_layers for name in ("pre", "post")}

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        rotated = (apply_rope(x, cos, sin) for x in (q, k))
        for name, queries, keys in (("pre", q, k), ("post", *rotated)):
            rows = keys.flatten(-2).flatten(0, -2).double()  # [B * S, Hkv*D]
            grouped = queries.unflatten(-2, (model.config.n_kv_heads, -1)).double()  # [B, S, Hkv, G, D]
            pairs = grouped.unflatten(-1, (2, -1)).square().sum((0, 1, 3, 4))
            new = rows.T @ rows, rows.sum(0), pairs
            sums[name][i] = [total + x for total, x in zip(sums[name][i], new, strict=True)]

    observe(model, tracked("keys", tokens[:, None]), see)
    totals = {name: map(torch.stack, zip(*layers, strict=True)) for name, layers in sums.items()}
    return {name: KeyMoments(*(x.cpu() / tokens.numel() for x in each)) for name, each in totals.items()}


Fitted = tuple[dict[str, Tensor], dict[str, float]]  # an artifact's tensors, and figures for its metadata


def eigen(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., n] and eigenvectors [..., n, n] (columns), largest first."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)


def fit_sals(model: Llama, tokens: Tensor, max_rank: float) -> Fitted:
    """U of each layer: leading eigenvectors of K^T K of its keys before RoPE ("key": SALS sec. 4.2), and of
    the covariance of S k, where S is the queries' rms in each pair that RoPE rotates ("query": ours)."""
    c, keys = model.config, key_moments(model, tokens)["pre"]
    scale = keys.queries.sqrt().repeat(1, 1, 2).flatten(1)  # [L, Hkv*D]
    scale = scale / scale.square().mean(1, keepdim=True).sqrt()
    scale = scale.clamp(min=1e-3)  # a pair that no query uses must not divide by zero
    r = max(1, round(max_rank * c.kv_dim))
    tensors, facts = {"scale": scale.float(), "mean": keys.mean.float()}, {"max_rank": max_rank}
    spread = scale[:, :, None] * keys.covariance() * scale[:, None]
    for metric, second in (("query", spread), ("key", keys.second)):
        values, vectors = eigen(second)
        tensors[f"{metric}_eigenvalues"] = values.float()
        for i in range(c.n_layers):
            tensors[f"{i}.{metric}_basis"] = vectors[i, :, :r].float()
        for share in (0.25, 0.125):
            kept = values[:, : round(share * c.kv_dim)].sum(1) / values.sum(1)
            facts[f"energy of {share:.1%}, {metric}"] = kept.mean().item()
    return tensors, facts


def fit_loki(model: Llama, tokens: Tensor) -> Fitted:
    """P: principal components of each KV head's keys, centred, of keys before RoPE ("pre") and after it
    ("post"; Loki sec. 3). Both are used on keys after RoPE."""
    heads = (model.config.n_kv_heads, model.config.head_dim)
    tensors, facts = {}, {}
    for name, keys in key_moments(model, tokens).items():
        blocks = keys.covariance().unflatten(2, heads).unflatten(1, heads)
        own = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # [L, Hkv, D, D]
        values, vectors = eigen(own)
        tensors[f"{name}.eigenvalues"] = values.float()
        tensors[f"{name}.basis"] = vectors.float()
        kept = values[..., : model.config.head_dim // 4].sum(-1) / values.sum(-1)
        facts[f"energy of 25%, {name}"] = kept.mean().item()
    return tensors, facts


def rope_deltas(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Delta_c: what rotating pair c changes in a KV head's logits: s(RoPE) - s(E) = sum of c not in E.

    q [N, I, G, D] at `positions` [I] and k [N, S, D] before RoPE, tables [S, D/2] -> [D/2, N, G, I, S],
    with the scale 1/sqrt(D), and 0 where the key comes after the query."""
    half, k = q.shape[-1] // 2, k.unsqueeze(-2)
    # Four products a pair: (rotated a, b) . (rotated u, v) - (a, b) . (u, v), in one matmul.
    q = torch.cat((apply_rope(q, cos[positions], sin[positions]), -q), -1).unflatten(-1, (4, half))
    k = torch.cat((apply_rope(k, cos, sin), k), -1).unflatten(-1, (4, half))
    deltas = torch.einsum("nigxc,nshxc->cngis", q, k) * (2 * half) ** -0.5
    return deltas * (torch.arange(k.shape[1], device=q.device) <= positions[:, None])


def ropelite(deltas: Tensor) -> Tensor:
    """RoPElite's greedy search for one KV head (Alg. 1): deltas [D/2, ...] -> the pairs, best first [D/2].

    Each round rotates the pair that brings the logits nearest to RoPE's in mean absolute difference."""
    rest, left, order = deltas.sum(0), list(range(len(deltas))), []
    while left:
        losses = torch.stack([(rest - deltas[c]).abs().mean() for c in left])
        order.append(left.pop(int(losses.argmin())))
        rest = rest - deltas[order[-1]]
    return torch.tensor(order)


def contribution(q: Tensor, k: Tensor) -> Tensor:
    """Contribution (sec. 4.3.1) of one KV head: the mean norm of q's pair times that of k's, which no
    rotation changes. q [..., G, D], averaged over the query heads of the group, k [..., D] -> [D/2]."""
    q, k = (x.unflatten(-1, (2, -1)).norm(dim=-2).flatten(0, -2).mean(0) for x in (q, k))
    return q * k


ELITE_WINDOWS, ELITE_ROWS = 16, 32  # RoPElite's sample: so many windows, so many query rows of each


def elite_orders(model: Llama, tokens: Tensor) -> dict[str, Tensor]:
    """The pairs of each KV head, best first: [L, Hkv, D/2] by RoPElite ("elite"; exact, for ELITE_ROWS random
    queries of each window) and by Contribution. One forward pass over tokens [N, S]."""
    c, orders = model.config, {"elite": [], "contribution": []}
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(tokens.shape[1], generator=generator)[:ELITE_ROWS].to(model.norm.weight.device)

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        q, k = q.float().unflatten(-2, (c.n_kv_heads, -1)), k.float()  # [N, S, Hkv, G, D]
        for h in range(c.n_kv_heads):
            orders["elite"].append(ropelite(rope_deltas(q[:, rows, h], k[:, :, h], rows, cos, sin)))
            orders["contribution"].append(contribution(q[:, :, h], k[:, :, h]).argsort(descending=True).cpu())
            bar.tick()

    bar = Progress("elitekv", c.n_layers * c.n_kv_heads)
    observe(model, [tokens], see)
    return {name: torch.stack(heads).unflatten(0, (c.n_layers, -1)) for name, heads in orders.items()}


def elite_allocations(c: ModelConfig, fraction: float) -> list[tuple[int, int]]:
    """(r, d_ckv) that fill this fraction of the dense cache and add no parameters (App. C), so that
    d_ckv (dim + n) <= dim n with n = Hkv (2D - 2r).

    d_ckv is a multiple of 128, or in small models of the largest smaller power of two that leaves four."""
    total, step, found = round(fraction * 2 * c.kv_dim), 256, []
    while len(found) < 4 and step > 1:
        step //= 2
        sizes = ((r, 2 * r * c.n_kv_heads) for r in range(c.head_dim // 2, 0, -1))
        sizes = ((r, total - rotated, 2 * c.kv_dim - rotated) for r, rotated in sizes)
        found = [(r, d) for r, d, n in sizes if d > 0 and d % step == 0 and d * (c.dim + n) <= c.dim * n]
    return found


def fit_elitekv(model: Llama, tokens: Tensor) -> Fitted:
    """Elite pairs of every KV head, and the allocation (r, d_ckv) of a quarter of the cache that has the
    lowest perplexity on the last windows by input_roots' factors (App. C). Leaves the model as it was."""
    if not (allocations := elite_allocations(model.config, 0.25)):
        raise UserError("elitekv: no r and d_ckv give this model a quarter of its cache")
    tensors = elite_orders(model, tokens[:ELITE_WINDOWS])
    start = tensors | input_roots(model, tokens[:ELITE_WINDOWS].flatten())
    dense, trials = [layer.attention for layer in model.layers], {}
    for size in tracked("elitekv", allocations):
        method_named("elitekv").fold_all(model, compress.EliteSettings(*size), start)
        trials[size] = full_passes(model, tokens[-4:])[1].item()
        for layer, attention in zip(model.layers, dense, strict=True):
            layer.attention = attention
    r, d_ckv = min(trials, key=trials.get)
    tensors |= {"r": torch.tensor(r), "d_ckv": torch.tensor(d_ckv)}
    facts = {f"perplexity_{r}_{d}": perplexity for (r, d), perplexity in trials.items()}
    return tensors, {"r": r, "d_ckv": d_ckv} | facts


def head_bases(model: Llama, tokens: Tensor, label: str, rows: Callable) -> tuple[Tensor, Tensor]:
    """Singular values [L, H, D] and right singular vectors [L, H, D, D] of rows(layer, q, k, v) [n, H, D].
    On tokens [N, S], in fp64: fp32 noise in a Gram matrix is larger than the small singular values."""
    grams = [0] * model.config.n_layers

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        x = rows(i, q[0], k[0], v[0]).transpose(0, 1).double()  # [H, n, D]
        grams[i] = grams[i] + x.transpose(1, 2) @ x

    observe(model, tracked(label, tokens[:, None]), see)
    values, vectors = eigen(torch.stack(grams).cpu())
    return values.sqrt(), vectors


def fit_fdc(model: Llama, tokens: Tensor, accuracy=0.99, positions=None) -> Fitted:
    """R of each KV head from random tokens (FDC sec. 5.1), and F_p(accuracy) (sec. 5.2)."""
    positions = min(positions or model.config.max_positions, model.config.max_positions)
    shape = (-(-(1 << 15) // tokens.shape[1]), tokens.shape[1])  # 32K tokens; the paper: at least 8K
    noise = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    tensors = fdc_bases(model, noise, positions)
    rate, reached, perplexity = fdc_search(model, tokens[-8:], tensors, accuracy)
    facts = {"floor": accuracy, "positions": positions, "rate": rate}
    facts |= {"accuracy of dense's": reached, "perplexity of dense's": perplexity}
    for kind, name in (("qk", "q and k"), ("v", "v")):
        ranks = compress.fdc_ranks(tensors[f"{kind}.values"], rate)
        facts[f"mean rank of {name}"] = ranks.double().mean().item()
    return tensors | {"rate": torch.tensor(rate, dtype=torch.float64)}, facts


def fdc_bases(model: Llama, tokens: Tensor, positions: int) -> dict[str, Tensor]:
    """Singular values [L, Hkv, D] and R [L, Hkv, D, D] of q and k after RoPE ("qk"), of tokens [N, S], and of
    W_V ("v"). Hidden states do not depend on where a window lies: q and k are rotated to random positions."""
    c, device = model.config, next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    cos, sin = rope_tables(c, positions, device)

    def queries_and_keys(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = torch.randint(0, positions, (len(q),), generator=generator).to(device)
        q, k = (apply_rope(x, cos[where], sin[where]) for x in (q, k))
        stacked = torch.cat((q.unflatten(1, (c.n_kv_heads, -1)), k[:, :, None]), 2)  # [S, Hkv, G + 1, D]
        return stacked.transpose(1, 2).flatten(0, 1)

    qk_values, qk_basis = head_bases(model, tokens, "q and k", queries_and_keys)
    weights = torch.stack([x.attention.wqkv.weight.split(x.attention.widths)[2] for x in model.layers])
    weights = weights.unflatten(1, (c.n_kv_heads, -1)).double().cpu()  # [L, Hkv, D, dim]: W_V transposed
    v_squares, v_basis = eigen(weights @ weights.transpose(-1, -2))
    tensors = {"qk.values": qk_values, "qk.basis": qk_basis, "v.values": v_squares.sqrt(), "v.basis": v_basis}
    return {name: tensor.float() for name, tensor in tensors.items()}


def fdc_rates(*values: Tensor) -> list[float]:
    """Every rate at which some head's rank changes, rising, from 0: what the search of F_p has to try."""
    steps = [compress.fdc_tails(v)[..., 15::16].flatten() for v in values]  # a rank of 16, 32, ...
    return torch.cat((torch.zeros(1, dtype=torch.float64), *steps)).unique().tolist()


def fdc_search(model: Llama, tokens: Tensor, tensors: dict[str, Tensor], accuracy: float) -> tuple:
    """F_p (FDC sec. 5.2): the largest rate that keeps `accuracy` of the dense model's on tokens [N, S].
    -> the rate, its accuracy and perplexity over the dense ones, by bisection of the rates that matter."""
    rates = fdc_rates(tensors["qk.values"], tensors["v.values"])  # of them 0 holds the floor

    @lru_cache(None)
    def found(rate: float) -> Tensor:
        bar.tick()
        return fdc_accuracy(model, tokens, tensors, rate)

    bar = Progress("rate", len(rates).bit_length() + 1)
    dense = found(0.0)
    held = bisect.bisect(rates, False, 1, key=lambda rate: bool(found(rate)[0] < accuracy * dense[0]))
    return rates[held - 1], *(found(rates[held - 1]) / dense).tolist()


def fdc_accuracy(model: Llama, tokens: Tensor, tensors: dict[str, Tensor], rate: float) -> Tensor:
    """full_passes of tokens [N, S] by FDC at `rate`: the share predicted right, and the perplexity.
    q R (k R)^T on the kept columns is q (k P)^T, P = R R^T: one plain forward pass is the same."""
    projectors, weight = {}, model.tok_embeddings.weight
    for kind in ("qk", "v"):
        ranks = compress.fdc_ranks(tensors[f"{kind}.values"], rate)[..., None, None]
        basis = tensors[f"{kind}.basis"] * (torch.arange(model.config.head_dim) < ranks)
        projectors[kind] = (basis @ basis.transpose(-1, -2)).to(weight)  # [L, Hkv, D, D]

    def attend(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.einsum("bshd,hde->bshe", apply_rope(k, cos, sin), projectors["qk"][i])
        _, bias = compress.kv_bias(model.layers[i].attention, model.config)  # stays whole: folded into W_O's
        v = torch.einsum("bshd,hde->bshe", v - bias, projectors["v"][i]) + bias
        return model_file.causal_attention(apply_rope(q, cos, sin), k, v)

    return full_passes(model, tokens, attend)


def fits_of(method: str) -> dict[str, str]:
    """Reads an option: the artifact of a method, or those of "all", and how each is fitted (Method.fit)."""
    rows = map(method_named, compress.method_names() if method == "all" else [method])
    if fits := {row.artifact: row.fit for row in rows if row.fit}:
        return fits
    raise UserError(f"{method} needs no calibration")


def run_fit(args: argparse.Namespace) -> None:
    """Fit what a method needs and store it beside the checkpoint.

    It reads a text (by default the Python standard library: no download) and writes METHOD.safetensors into
    the checkpoint's folder, for generate and eval. `--method all` fits every method that can take the model.
    Where that folder cannot be written, as a Hugging Face cache, `--out` makes one of links to its files.

        python calibrate.py fit --checkpoint FOLDER --method sals
        python calibrate.py fit --checkpoint FOLDER --method fdc --accuracy 0.95"""
    folder = args.out or args.checkpoint
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise UserError(f"no file can be written into {folder}; give --out FOLDER")
    model, tokens = model_and_windows(args)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for file in filter(Path.is_file, args.checkpoint.iterdir()):
            with suppress(FileExistsError):
                (args.out / file.name).symlink_to(file.resolve())
    source = {"text": str(args.text or "Python standard library"), "tokens": str(tokens.numel())}
    source |= compress.model_identity(model)
    options = {"sals": {"max_rank": args.max_rank}}
    options |= {"fdc": {"accuracy": args.accuracy, "positions": args.positions}}
    for name, fit in args.fits.items():
        path = compress.artifact_path(folder, name)
        try:
            tensors, facts = resolve_name(fit)(model, tokens, **options.get(name, {}))
        except UserError as error:
            if len(args.fits) == 1:
                raise
            print(f"{name}: not fitted: {error}", file=sys.stderr)
            continue
        facts = {fact: f"{x:.6g}" for fact, x in facts.items()}
        save_artifact(tensors, path, {"method": name} | source | facts)
        print(f"{path}:", ", ".join(f"{fact} {x}" for fact, x in facts.items()))


def run_ranks(args: argparse.Namespace) -> dict:
    """Rank of the keys of each layer, before and after RoPE, and how unlike its heads are.

    A rank is the number of joint dims of all heads that hold 90 % of the keys' energy. cv_qk and cv_v are the
    deviation over the mean of the heads' largest singular values: of q and k after RoPE, and of W_V.

        python calibrate.py ranks --checkpoint FOLDER --windows 8 --window 512 --csv ranks.csv"""
    model, tokens = model_and_windows(args)
    moments, bases = key_moments(model, tokens), fdc_bases(model, tokens, model.config.max_positions)
    figures = {"layer": [*range(model.config.n_layers)]}
    print(f"Rank@90% of the joint keys ({model.config.kv_dim} dims), {tokens.numel()} tokens")
    for name, of_keys in moments.items():
        figures[name] = of_layers = compress.rank_at(eigen(of_keys.second)[0], 0.9).tolist()
        print(f"{name}-RoPE, mean {np.mean(of_layers):.1f}, by layer:", *of_layers)
    for kind in ("qk", "v"):
        largest = bases[f"{kind}.values"][..., 0]  # [L, Hkv]
        figures[f"cv_{kind}"] = (largest.std(1, correction=0) / largest.mean(1)).tolist()
        print(f"cv_{kind}: {largest.std(correction=0) / largest.mean():.3f} over the heads of all layers")
    if args.csv:
        layers = zip(*figures.values(), strict=True)
        save_csv(args.csv, [*figures], [dict(zip(figures, row, strict=True)) for row in layers])
    return {"width": model.config.kv_dim, **figures}


# --------------------------------------------------------------------------------------------------- training


@dataclass
class Stage:
    """steps batches of batch x length tokens."""

    batch: int
    length: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> "Stage":
        try:
            return cls(*map(whole(1), text.split("x")))
        except (TypeError, ValueError, argparse.ArgumentTypeError):
            raise UserError(f"stage {text!r}: write BATCHxLENGTHxSTEPS, such as 64x2048x1000") from None


def training_batch(hay: "Haystack", plan: list[Stage], seed: int, i: int) -> tuple[Tensor, Tensor]:
    """Batch i: tokens [B, S + 1] int64 and weights [B, S] fp32 of plan[i], made by any process."""
    rng, stage = random.Random(f"{seed}-{i}"), plan[i]
    documents = [training_document(hay, rng, stage.length + 1) for _ in range(stage.batch)]
    tokens, weights = (torch.from_numpy(np.stack(each)) for each in zip(*documents, strict=True))
    return tokens.long(), weights[:, 1:].contiguous()


NANO = ModelConfig(256, 8, 4, 4, 64, 704, 4096, 32768, 500000.0, tied=True)
# Long documents come before the last stage: at the end, few and noisy, they undo what retrieval has learnt.
NANO_STAGES = ("128x512x3000", "64x2048x2500", "4x32768x300", "16x8192x7000")
HEAD_CHUNK = 4096  # tokens whose logits exist at once


def initialise(model: Llama, seed: int) -> None:
    """Normal weights of deviation 0.02; those that write into the residual stream over sqrt(2 layers)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # a norm's are ones already
            layers = model.config.n_layers if name.endswith(("wo.weight", "w2.weight")) else 0.5
            torch.nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers), generator)


def head_loss(x, labels, a, y, b, weight, teacher_weight) -> Tensor:
    """a [N] times the cross entropy of labels [N], plus b times the KL to the teacher's distribution, summed
    over tokens. Logits are x [N, dim] times weight [V, dim], the teacher's y times its own (or None)."""
    log_p = (x @ weight.T).float().log_softmax(-1)  # [N, V]
    loss = (a * F.nll_loss(log_p, labels, reduction="none")).sum()
    if y is not None:
        log_q = (y @ teacher_weight.T).float().log_softmax(-1)
        loss = loss + b * F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    return loss


def attention_outputs(model: Llama, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of Llama.forward, and what each layer's heads give [B, S, Hq, D]."""
    outputs = []

    def attend(i: int, cos: Tensor, sin: Tensor, *qkv: Tensor) -> Tensor:
        outputs.append(model.layers[i].attention.causal(cos, sin)(*qkv))
        return outputs[-1]

    return model(tokens, attend), outputs


def training_loss(
    model, tokens, weights, teacher=None, share=0.0, layers=False, forward=attention_outputs, head=head_loss
) -> Tensor:
    """1 - share times the mean next-token cross entropy under weights [B, S], and share times the mean KL of
    the teacher's distribution to the model's; tokens [B, S + 1]. layers: and the mean relative squared error
    of what the heads give. forward, head: these functions, or compiled."""
    inputs, labels, y, targets = tokens[:, :-1], tokens[:, 1:].flatten(), None, []
    if teacher:
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            y, targets = forward(teacher, inputs)
    x, outputs = forward(model, inputs)
    a = (1 - share) * weights.flatten() / weights.sum()
    matrices = share / len(labels), model.output.weight, teacher and teacher.output.weight
    parts = [t.split(HEAD_CHUNK) for t in (x.flatten(0, 1), labels, a)]
    parts.append(y.flatten(0, 1).split(HEAD_CHUNK) if teacher else itertools.repeat(None))
    # Logits are made again for the gradients, so that few tokens' exist at a time.
    loss = sum(checkpoint(head, *part, *matrices, use_reentrant=False) for part in zip(*parts, strict=False))
    for x, y in zip(outputs, targets, strict=True) if layers else ():
        loss = loss + F.mse_loss(x.float(), y.float()) / y.float().square().mean() / len(outputs)
    return loss


def make_optimizer(model: Llama, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay 0.1 on matrices and none on norms."""
    matrices, norms = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def save_state(path: Path, model: Llama, optimizer: torch.optim.AdamW, done: int) -> None:
    """Weights, both moments and the number of steps done, in one file of torch.save."""
    with replacing(path.parent, path.name) as partial:
        state = {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, partial / path.name)


def load_state(path: Path, model: Llama, optimizer: torch.optim.AdamW) -> int:
    """Takes up what save_state left; returns the number of steps done."""
    try:
        with path.open("rb") as file:  # whose name does not say its format
            saved = torch.load(file, next(model.parameters()).device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]
    except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, TypeError, ValueError):
        raise UserError(f"--state {path}: not what training this model has left") from None


@contextmanager
def deferred_interrupts() -> Iterator[list]:
    """A list that takes the first Ctrl-C or SIGTERM, so that no step is cut in two; the second ends all."""
    stops = []

    def defer(number: int, _) -> None:
        if stops:
            raise KeyboardInterrupt
        stops.append(number)
        print("stopping after this step; Ctrl-C again: at once, nothing is kept", file=sys.stderr)

    with ExitStack() as after:
        for number in (signal.SIGINT, signal.SIGTERM):
            after.callback(signal.signal, number, signal.signal(number, defer))
        yield stops


def ignore_interrupts(*_) -> None:
    """For processes that make batches: they end with the one that takes them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def train(model, hay, stages, lr, seed, workers, state, minutes, log=None, teacher=None, share=0.0) -> bool:
    """AdamW under a warm-up and a cosine over all stages, weights in fp32 with bf16 autocast.
    state and log: files or None, as --state and --log; teacher and share: of training_loss.
    -> whether it is done, before `minutes` ran out, or a Ctrl-C or SIGTERM came."""
    device = next(model.parameters()).device
    compiled = partial(torch.compile, dynamic=False) if (cuda := device.type == "cuda") else lambda f: f
    forward, head = compiled(attention_outputs), compiled(head_loss)
    optimizer = make_optimizer(model, lr)
    done = load_state(state, model, optimizer) if state and state.is_file() else 0
    plan = [stage for stage in stages for _ in range(stage.steps)]
    total, started = len(plan), time.time()
    how = {"num_workers": workers, "worker_init_fn": ignore_interrupts, "pin_memory": cuda}
    batches = DataLoader(range(done, total), None, collate_fn=partial(training_batch, hay, plan, seed), **how)
    read, recent = sum(stage.batch * stage.length for stage in plan[:done]), []  # losses since the last line
    if log and not done:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("tokens,loss\n", encoding="utf-8")
    warm_up = max(1, min(200, total // 10))
    with deferred_interrupts() as stops:
        for tokens, weights in batches if done < total else ():
            warm, decay = min(1.0, (done + 1) / warm_up), 0.1 + 0.45 * (1 + math.cos(math.pi * done / total))
            for group in optimizer.param_groups:  # after the warm-up a cosine to a tenth
                group["lr"] = lr * warm * decay
            tokens, weights = (x.to(device, non_blocking=True) for x in (tokens, weights))
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):  # gradients add in fp32
                early = bool(teacher) and 10 * done < total
                loss = training_loss(model, tokens, weights, teacher, share, early, forward, head)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done, read = done + 1, read + weights.numel()
            recent.append(loss.detach())
            if done % 20 == 0 or done == total:
                mean = torch.stack(recent).mean().item()
                recent.clear()
                if log:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(f"{read},{mean:.4f}\n")
                line = f"step {done}/{total}  {tokens.shape[0]}x{weights.shape[1]}  loss {mean:.3f}  "
                print(f"{line}{time.time() - started:.0f} s", file=sys.stderr, flush=True)
                if not math.isfinite(mean):
                    break
            if stops or done < total and time.time() - started > 60 * minutes:
                break
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"the weights are no numbers after step {done}; nothing is saved: lower --lr")
        if state and done:
            save_state(state, model, optimizer, done)
    return done >= total


def text_share(text: str) -> tuple[Path, float]:
    """PATH:SHARE, or PATH for a fraction of 1. A path may hold colons: C:\\books, or a folder run:2."""
    path, _, share = text.rpartition(":")
    is_path = not path or re.search(r"[/\\]", share) or Path(text).exists()
    return (Path(text), 1.0) if is_path else (Path(path), positive(share))


def run_train(args: argparse.Namespace) -> None:
    """Train the embedded model from scratch, or uptrain a checkpoint for EliteKV.

    A document is plain text, repeated random segments, or facts with questions. Stages follow one another.
    With --state a later call goes on where this one stopped. The tokenizer is --out's, or the embedded one.

        python calibrate.py train --out FOLDER --text books:0.3 code:0.7 --state nano.state --minutes 10
        python calibrate.py train --from FOLDER --out NEW --distill --text books --stages 16x2048x6000"""
    if (args.method or args.distill) and not args.source:
        raise UserError("--method and --distill are for uptraining; give the checkpoint with --from FOLDER")
    stages = [Stage.parse(text) for text in args.stages]
    paths, shares = zip(*args.text, strict=True)
    device, dtype = generate.device_and_dtype(args.device)
    files = [text_files(path, held=False) for path in paths]
    model, tokenizer = uptraining_model(args, device, files) if args.source else (Llama(NANO), None)
    generate.check_capacity(max(stage.length for stage in stages), model.config, "--stages")
    if not args.source:
        home = args.out if (args.out / "tokenizer.model").is_file() else generate.NANO
        tokenizer = load_tokenizer(home)
        initialise(model, args.seed)
    tokens = [text_ids(tokenizer, f, args.max_tokens, model.config.vocab_size, bos=True) for f in files]
    hay = Haystack(tokenizer, tokens, list(shares))
    teacher = model_file.load_model(args.source, device, dtype) if args.distill else None
    lr = args.lr or (5e-4 if args.source else 2e-3)
    loop = (lr, args.seed, args.workers, args.state, args.minutes, args.log, teacher, args.distill)
    done = train(model.to(device), hay, stages, *loop)
    if not args.source and home != args.out:
        with replacing(args.out, "tokenizer") as partial:
            shutil.copy(home / "tokenizer.model", partial)
    save_checkpoint(model, args.out, args.source)
    print("finished" if done else "not finished: the same command goes on, if it had a --state")


def uptraining_model(args: argparse.Namespace, device: torch.device, files: list[list[Path]]) -> tuple:
    """The model of --from in EliteKV's form, to train in fp32, and its tokenizer. files: of each text."""
    if not args.source.is_dir() or args.out.resolve() == args.source.resolve():
        raise UserError(f"--from {args.source}: give the folder of a checkpoint, and another one as --out")
    candidate = Candidate.parse(args.method or "elitekv")
    if candidate.method != "elitekv":
        raise UserError(f"--method {args.method}: only elitekv is uptrained")
    model = model_file.load_model(args.source, device, torch.float32)
    if model.config.qkv_bias or model.config.qk_norm or model.config.elitekv:
        raise UserError(f"--from {args.source}: give a dense checkpoint, without qkv biases or q/k norms")
    artifact, tokenizer = load_artifact(args.source, "elitekv", model), load_tokenizer(args.source)
    most, vocabulary = (1 << 17) // len(files), model.config.vocab_size
    texts = [text_ids(tokenizer, some, most, vocabulary, bos=True) for some in files]
    artifact |= input_roots(model, torch.from_numpy(np.concatenate(texts)).long())
    method_named("elitekv").fold_all(model, settings_from("elitekv", candidate.options), artifact)
    return model.requires_grad_(True), tokenizer


def input_roots(model: Llama, tokens: Tensor) -> dict[str, Tensor]:
    """Of each layer the square root [dim, dim] of E x x^T, x being its attention's inputs for tokens [N]:
    with it low_rank keeps what the layer computes rather than its weights (ours)."""
    sums, device = [0.0] * model.config.n_layers, next(model.parameters()).device

    def add(i: int, attention: torch.nn.Module, inputs: tuple) -> None:
        x = inputs[0].flatten(0, -2).double()
        sums[i] = sums[i] + x.T @ x / len(tokens)

    hooks = [x.attention.register_forward_pre_hook(partial(add, i)) for i, x in enumerate(model.layers)]
    for window in tracked("inputs", tokens.split(2048)):
        model(window[None].to(device))
    for hook in hooks:
        hook.remove()
    values, vectors = eigen(torch.stack(sums))
    values = values + 0.1 * values.mean(-1, keepdim=True)  # what the texts hardly have counts a little, too
    return {f"{i}.root": (v * e.sqrt()) @ v.T for i, (e, v) in enumerate(zip(values, vectors, strict=True))}


def dense_attention(elite: compress.EliteAttention) -> model_file.Attention:
    """The inverse of fold_elitekv, without biases: W_k and W_v expanded from A B, dims as they were."""
    c, r = elite.config, elite.r
    back = compress.elite_dims(elite.order, r).argsort(-1).expand(c.n_kv_heads, -1)  # [Hkv, D]
    q, k, a = elite.wqkv.weight.split(elite.widths)
    expanded = (elite.up.weight @ a).unflatten(0, (c.n_kv_heads, -1))
    rest, v = expanded.split((c.head_dim - 2 * r, c.head_dim), 1)
    k = k.unflatten(0, (-1, 2 * r)).expand(c.n_kv_heads, -1, -1)  # a shared elite key is every head's
    k = torch.cat((k, rest), 1).flatten(0, 1)  # [Hkv * D, dim]
    rows = [compress.in_order(x, back).flatten(0, 2) for x in (q, k)]
    attention = model_file.Attention(c)
    attention.wqkv, attention.wo = compress.linear_of(torch.cat((*rows, v.flatten(0, 1))), None), elite.wo
    return attention


@torch.no_grad()
def save_checkpoint(model: Llama, folder: Path, source: Path | None = None) -> None:
    """Writes config.json and model.safetensors (bf16) in the layout of a Hugging Face download.
    source: what the model, in EliteKV's form, was uptrained from; it becomes dense. Other files are copied,
    and the artifact has the elite pairs: EliteKV alone can run the checkpoint."""
    config = model.config.to_hf() | {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    with replacing(folder, "checkpoint") as partial:
        if source:
            for file in source.iterdir():
                if file.suffix in (".json", ".model", ".txt", ".jinja") and ".index." not in file.name:
                    shutil.copy(file, partial)
            config = model_file.read_json(partial / "config.json") | {"elitekv": True}
            elite = [layer.attention for layer in model.layers]
            sizes = {"r": torch.tensor(elite[0].r), "d_ckv": torch.tensor(elite[0].up.in_features)}
            artifact = sizes | {"elite": torch.stack([attention.order for attention in elite])}
            for layer in model.layers:
                layer.attention = dense_attention(layer.attention)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {name: slot.detach().bfloat16() for name, slot in model_file.weight_slots(model)}
        save_artifact(weights, partial / "model.safetensors", {"format": "pt"})
        if source:
            model.fingerprint = model_file.fingerprint(model_file.weight_files(partial))
            metadata = {"method": "elitekv"} | compress.model_identity(model)
            save_artifact(artifact, compress.artifact_path(partial, "elitekv"), metadata)


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
ANSWER_WEIGHT, FACT_WEIGHT = 3.0, 0.2  # of the loss, where a token of plain text has 1


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


# Each kind of task makes some for a text of n_tokens. n_facts: as evaluation asks for; None: a random number.


def tasks_multikey(rng: random.Random, n_tokens: int, n_facts: int | None, words=WORDS) -> list[Task]:
    """One number is asked for at a time; of a single fact the task `single`."""
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


def tasks_uuid(rng: random.Random, *_) -> list[Task]:
    """One UUID is the key of another, in a text of nothing else (Haystack.uuids): an exact copy is asked."""
    key, value = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
    ask = f"What is the value of {key}?\nAnswer: The value of {key} is"
    return [Task([f"\n{key}: {value}"], ask, f" {value}.", [value])]


TASKS = (tasks_multikey, tasks_multivalue, tasks_multiquery, tasks_variables, tasks_frequent)
TASKS = {make.__name__.removeprefix("tasks_"): make for make in TASKS}
TASKS = {"single": lambda rng, *_: tasks_multikey(rng, 0, 1)} | TASKS
KINDS = [*TASKS]  # what training draws from, and never these:
TASKS |= {"uuid": tasks_uuid, "reworded": lambda rng, *_: tasks_multikey(rng, 0, 1, REWORDED)}
TASKS["reworded_multikey"] = lambda rng, *given: tasks_multikey(rng, *given, REWORDED)


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
            lines.insert(0, self.encode(*tasks_uuid(rng)[0].facts)[-left:])
            left -= len(lines[0])
        lines.insert(rng.randint(min(1, len(lines)), len(lines)), self.encode(fact))
        return lines


def training_document(hay: Haystack, rng: random.Random, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n token ids (BOS first) and loss weights: 40 % plain text, 10 % repeated segments, 50 % retrieval."""
    draw = rng.random()
    if draw >= 0.5:
        pieces = retrieval_document(hay, rng, n)
        ids = np.concatenate([p for p, _ in pieces])[-n:]
        weights = np.concatenate([np.full(len(p), w, np.float32) for p, w in pieces])[-n:]
    else:
        ids, weights = hay.sample(rng, n), np.ones(n, np.float32)
    if 0.4 <= draw < 0.5:
        longest = max(1, min(256, n // 4))
        length = rng.randint(min(8, longest), longest)
        segment = np.array([rng.randrange(3, len(hay.starts_word)) for _ in range(length)], np.int32)
        starts = range(0, max(1, n - length), length)
        for i, start in enumerate(sorted(rng.sample(starts, min(rng.randint(2, 3), len(starts))))):
            ids[start : start + length] = segment
            weights[start : start + length] = FACT_WEIGHT if i == 0 else 1.0
    ids[0] = hay.tokenizer.bos_id
    return ids, weights


def retrieval_document(hay: Haystack, rng: random.Random, n: int) -> list[tuple[np.ndarray, float]]:
    """Pieces of n tokens and their loss weights: a text with facts of one to three kinds, then questions."""
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3)) if n >= 1024 else 1)
    tasks = [TASKS[kind](rng, n // len(kinds), None) for kind in kinds]
    turns = [queue for group in tasks for queue in [iter(group[0].facts)] * len(group[0].facts)]
    rng.shuffle(turns)
    facts = [next(queue) for queue in turns]  # those of one kind in their order
    tail, questions = [], [task for group in tasks for task in group]
    for task in rng.sample(questions, len(questions)):
        tail.append((hay.encode(f"\nQuestion: {task.question}"), FACT_WEIGHT))
        tail.append((hay.encode(task.answer + "\n"), ANSWER_WEIGHT))
    context = n - sum(len(ids) for ids, _ in tail)
    return [(p, FACT_WEIGHT if i % 2 else 1.0) for i, p in enumerate(hay.bury(rng, facts, context))] + tail


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
    """A cache with the exact keys beside it: how many it attends of as many tokens of the largest attention
    weights, which are of a query head, or of all heads that share a selection. Sinks and recent tokens count.
    sums [4]: NAMES, means over heads and rows, and 1, summed over steps (fp64; a CUDA graph adds to them)."""

    NAMES = ("attended", "recall", "mass")  # the first is a fraction of the length

    def __init__(self, cache: Cache):
        c, context = cache.config, cache.context
        self.cache, self.keys = cache, context.zeros(c.n_kv_heads, context.capacity, c.head_dim)
        self.sums = torch.zeros(1 + len(self.NAMES), dtype=torch.float64, device=context.device)
        for part in cache.modules():  # a cache may hold another one
            if isinstance(part, Cache):
                part.watch = self.see

    def __getattr__(self, name: str):
        return getattr(self.cache, name)  # the ledger is the cache's own

    def extend(self, row: int, span: slice, q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        self.sums.zero_()  # forgets what a graph's warm-up saw
        self.keys[row, :, span] = self.cache.rope(k, span).transpose(0, 1)
        return self.cache.extend(row, span, q, k, *rest)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        self.keys[self.cache.context.rows, :, pos] = self.cache.rope(k, pos)
        self.query = self.cache.rope(q, pos)
        return self.cache.decode(pos, q, k, *rest)

    def see(self, pos: Tensor, index: Tensor, live: Tensor, recent: int) -> None:
        """Called by the cache's decode (Cache.report_selected)."""
        heads = (*index.shape[:-1], 1, 1)[:3]  # [B, Hkv or 1, G or 1]: the heads that select for themselves
        live, index = live.expand_as(index).reshape(*heads, -1), index.reshape(*heads, -1)
        age = pos[:, None, None, None] - self.cache.context.positions  # [B, 1, 1, S]
        chosen = torch.zeros(*heads, age.shape[-1], device=pos.device)
        chosen = chosen.scatter_add(-1, index.where(live, 0).long(), live.float()) > 0
        chosen = (chosen | (age < recent)) & (age >= 0)
        query = self.query.unflatten(1, (self.keys.shape[1], -1)).float()  # [B, Hkv, G, D]
        logits = query @ self.keys.float().transpose(-1, -2) * self.keys.shape[-1] ** -0.5
        weights = logits.masked_fill(age < 0, -torch.inf).log_softmax(-1)  # as logarithms: none becomes 0
        mass = (weights.exp() * chosen).sum(-1).mean()
        shared = [dim for dim in (1, 2) if heads[dim] == 1]  # these select by their weights together
        scores = weights.logsumexp(shared, keepdim=True) if shared else weights
        n = chosen.sum(-1)
        least = scores.sort(-1, descending=True).values.gather(-1, n[..., None].clamp(min=1) - 1)
        hits = (chosen & (scores >= least)).sum(-1)
        attended, recall = (n / (pos + 1)[:, None, None]).mean(), (hits / n).mean()
        self.sums += torch.stack((attended, recall, mass, torch.ones_like(mass)))

    def result(self) -> dict[str, float]:
        """Means over the steps; empty for a cache that attends all its tokens."""
        *sums, steps = self.sums.tolist()
        return {name: total / steps for name, total in zip(self.NAMES, sums, strict=True) if steps}


def ranks() -> tuple[int, int]:
    """This process's rank and how many ranks there are: 0 and 1 unless torchrun started several."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gathered(value) -> list:
    """What every rank gives as `value`, by rank; on all ranks."""
    values = [value] * ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


ANSWER_ROOM = 96  # tokens of a cache beyond a retrieval prompt
BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass
class Candidate:
    """A method with its settings, written sals:rank=0.125,bits=2@FOLDER or sals:paper on the command line."""

    label: str
    method: str
    options: dict
    folder: Path | None = None  # of a checkpoint, instead of --checkpoint
    weights: str | None = None  # "int8": then the label says so
    used: dict[int, dict] = field(default_factory=dict)  # the options of each capacity, once equalised
    over: set[str] = field(default_factory=set)  # costs that no setting brought down to their share

    @classmethod
    def parse(cls, text: str, weights: str | None = None) -> "Candidate":
        method_text, _, folder = text.partition("@")
        method, _, rest = method_text.partition(":")
        kinds = {f.name: f.type for f in dataclasses.fields(method_named(method).settings)}
        options = {}
        for pair in filter(None, re.split(r",(?=\w+=)", rest)):  # a value may hold commas: skip=0,1,-1
            name, _, value = (f"variant={pair}" if pair in compress.VARIANTS else pair).partition("=")
            kind = kinds.get(name, str)
            try:
                options[name] = BOOLEANS[value.lower()] if kind is bool else kind(value)
            except (KeyError, ValueError):
                wanted = f"{name}={kind.__name__.upper()}"
                raise UserError(f"--method {text}: write {wanted}, not {pair}") from None
        settings_from(method, options)
        label = f"{text} weights={weights}" if weights else text
        return cls(label, method, options, Path(folder) if folder else None, weights)

    def engine(self, args, rows: int, capacity: int, watched=False, least=None, temperature=0.0) -> Engine:
        """An engine over freshly loaded weights, since a method may change them; watched: by Watched.
        least: it has fewer rows, down to this, where the memory holds no more."""
        model, artifact = self.load(args, capacity), None
        while artifact is None:
            try:
                artifact = self.check(args, model, {capacity: rows})
            except UserError:
                if rows <= (least or rows):
                    raise
                rows = rows * 7 // 8
        method, context = method_named(self.method), Context(model, min(gathered(rows)), capacity)
        settings = settings_from(self.method, self.used[capacity])
        caches = method.build(model, settings, context, artifact)
        if watched and hasattr(settings, "budget"):  # the others attend all
            caches = [Watched(cache) for cache in caches]
        return Engine(model, caches, context, Sampling(temperature), graphed=context.device.type == "cuda")

    def load(self, args: argparse.Namespace, capacity: int = 0) -> Llama:
        """The model, of the candidate's own folder where it names one."""
        where = self.folder or args.checkpoint, args.device, args.dtype
        return load(*where, self.weights, self.method, self.used.get(capacity, self.options))[0]

    def check(self, args: argparse.Namespace, model: Llama, rows: dict[int, int]) -> dict[str, Tensor]:
        """The artifact. UserError where a cache of rows[capacity] rows cannot be built or does not fit."""
        method = method_named(self.method)
        artifact = load_artifact(self.folder or args.checkpoint, self.method, model)
        shares = {name: s for name, s in (("tokens", args.equal_tokens), ("bytes", args.equal_bytes)) if s}
        costs = partial(cost_shares, model, self.method, artifact)
        for capacity in sorted(rows):
            if capacity not in self.used:
                self.used[capacity] = equal_options(method.settings, self.options, shares, costs, capacity)
                paid = costs(self.used[capacity], capacity)
                self.over |= {name for name in shares if paid[name] > shares[name]}
            settings = settings_from(self.method, self.used[capacity])
            generate.check_memory(model, self.method, settings, artifact, rows[capacity], capacity)
        return artifact


def cost_shares(model: Llama, method: str, artifact: dict, options: dict, capacity: int) -> dict[str, float]:
    """Bytes per token by formula, and tokens attended of a full row, as shares of dense."""
    settings = settings_from(method, options)
    held = compress.cache_bytes(generate.plan_caches(model, method, settings, artifact, capacity))
    budget = settings.budget(capacity) if hasattr(settings, "budget") else (capacity,)
    share = held["cache_bytes_formula"] / held["cache_bytes_dense"]
    return {"bytes": share, "tokens": min(1.0, sum(budget) / capacity)}


def equal_options(settings: type, options: dict, shares: dict, costs: Callable, capacity: int) -> dict:
    """Options with each knob (compress.setting's `sets`) at the most that its share of dense allows.
    shares: of bytes, of tokens, or of both; costs(options, capacity) -> what these cost of each. Knobs of
    tokens come first, since attended tokens may take bytes too. A knob of no allowed value stays as it is."""
    for knob in sorted(dataclasses.fields(settings), key=lambda f: "tokens" not in f.metadata["sets"]):
        limits = {name: shares[name] for name in knob.metadata["sets"].split() if name in shares}
        if limits and (best := dearest(knob, options, limits, costs, capacity)) is not None:
            options = options | {knob.name: best}
    return options


def dearest(knob: dataclasses.Field, options: dict, limits: dict, costs: Callable, capacity: int):
    """The value of a knob that costs most within all limits; None if none does, or all cost the same.
    Shares lie in (0, 1], whole numbers in 1 .. capacity. Every round looks closer around the best one."""

    def cost(value) -> float | None:
        try:
            paid = costs(options | {knob.name: value}, capacity)
        except UserError:  # not a value for this method and model
            return None
        return max(paid[n] for n in limits) if all(paid[n] <= limits[n] for n in limits) else None

    top = capacity if knob.type is int else 1.0
    tried = (*limits.values(), *(i / 8 for i in range(1, 9)), *(2.0**-i for i in range(4, 14)))
    values = knob.metadata["choices"] or sorted({knob.type(top * x) for x in tried} - {0})
    best = None
    for _ in range(1 if knob.metadata["choices"] else 4):
        allowed = [(paid, value) for value in values if (paid := cost(value)) is not None]
        idle = len(allowed) == len(values) and len({paid for paid, _ in allowed}) == 1
        if not allowed or idle:
            return best
        paid, best = max(allowed)
        if paid == min(limits.values()):
            break
        i = values.index(best)
        low, high = values[max(0, i - 1)], values[min(i + 1, len(values) - 1)]
        values = sorted({knob.type(low + (high - low) * j / 8) for j in range(9)} | {best})
    return best


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
        output = generate.decode_rows(engine, longest, lambda ids: "\n" in decode(ids[-2:]), stride=16)
        scores += [task.score(decode(ids)) for task, ids in zip(tasks, output.token_ids, strict=True)]
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
        watched = gathered([cache.result() for cache in engine.caches if isinstance(cache, Watched)])
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
    tokens = engine.context.batch_size * engine.context.capacity
    own = [(c.measured(), c.bytes_read(length), c.host_bytes()) for c in engine.caches]
    measured, read, host = map(sum, zip(*itertools.chain(*gathered(own)), strict=True))
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


def run_eval(args: argparse.Namespace) -> dict:
    """Perplexity and retrieval, token by token through the cache: a row a method, dense in the same run.

    A method is written NAME:SETTING=VALUE,...; @FOLDER after it takes another checkpoint. Perplexity: a text
    is prefilled, and what follows is decoded and scored (--generate: what dense writes). Retrieval: facts lie
    in a long text, then comes a question (after RULER). --equal_bytes, --equal_tokens: fair settings.

        python calibrate.py eval --method sals --method sals:rank=0.125,bits=2 --text some.txt
        python calibrate.py eval --method sals --method loki --equal_tokens 0.125 --csv table.csv"""
    if not args.perplexity_rows and (args.generate or not args.samples):
        raise UserError("nothing to evaluate: give --samples, or --perplexity_rows (with --generate, too)")
    args.continuation = args.generate or args.continuation
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    config = ModelConfig.from_folder(args.checkpoint)
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
            if not results or ranks()[1] > 1:  # the others need dense's row, and ranks one another
                raise
            print(f"{candidate.label}: no row: {error or 'not enough memory'}", file=sys.stderr)
            continue
        row |= tasks | {"errors": row["errors"] | tasks.get("errors", {})}
        results.append(row | {"settings": candidate.used, "over": sorted(candidate.over)})
        named = {key for row in results for key, x in row.items() if isinstance(x, str | float | int)}
        leading = ("method", "bytes/token", "host/token", "read/step", *Watched.NAMES)
        columns = [key for key in dict.fromkeys((*leading, *results[0])) if key in named]
        figures = ", ".join(f"{column} {row[column]:.4g}" for column in columns[1:] if column in row)
        print(f"{candidate.label}: {figures}", file=sys.stderr, flush=True)
        if args.csv and not ranks()[0]:  # rank 0 writes it
            save_csv(args.csv, columns, results)
    print_table(results, columns[1:])
    if args.equal_bytes or args.equal_tokens:
        print("the settings at each capacity; * where none gets down to the share of dense's")
        for candidate in candidates:
            for capacity, options in candidate.used.items():
                chosen = ", ".join(f"{name}={value}" for name, value in options.items())
                print(f"{candidate.label}, {capacity} tokens: {chosen or 'as it is'}")
    device = generate.device_name(torch.device(args.device))
    return {"seeds": f"0 to {args.samples - 1}", "device": device, "rows": results}


def eval_texts(args: argparse.Namespace, tokenizer, vocabulary: int) -> tuple[dict[str, tuple], Haystack]:
    """Prompts of each text whose perplexity is measured, and tokens [B, n] that follow, by its name; and the
    text to hide facts in. With --generate what is to be "written" after all prompts, and after a chat's."""
    files = {"python": text_files(STDLIB, held=True)}
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
    torch.manual_seed(0)
    engine.prefill(prompts)
    return torch.tensor(generate.decode_rows(engine, args.generate, lambda _: False, stride=16).token_ids)


def save_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    """The table so far, in the place of an older one."""
    path = path.resolve()  # what a link points to
    how = {"encoding": "utf-8", "errors": "replace", "newline": ""}  # in every locale
    with replacing(path.parent, path.name) as partial, (partial / path.name).open("w", **how) as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def print_table(rows: list[dict], columns: list[str]) -> None:
    """A plain table, one line a row, eight columns at a time; "-" where a row has no such figure."""
    names = [row["method"] + (" *" if row.get("over") else "") for row in rows]
    width = max(map(len, names))
    for start in range(0, len(columns), 8):
        part = columns[start : start + 8]
        print(f"{'':{width}}  " + "  ".join(f"{c:>15}" for c in part))
        for name, row in zip(names, rows, strict=True):
            cells = (f"{row[c]:15.4g}" if c in row else f"{'-':>15}" for c in part)
            print(f"{name:{width}}  " + "  ".join(cells))
        print()


# ------------------------------------------------------------------------------------------- the command line


def command(commands, run: Callable, *add_options: Callable[[Parser], None]) -> Parser:
    """The command of a function run_NAME, whose docstring is its help."""
    text = inspect.cleandoc(run.__doc__)
    name, about = run.__name__.removeprefix("run_"), text.split("\n")[0].rstrip(".")
    parser = commands.add_parser(name, help=about, description=text)
    parser.set_defaults(run=run)
    for add in add_options:
        add(parser)
    return parser


def text_options(parser: Parser) -> None:
    parser.option("--text", Path, None, "a text file or folder (default: the Python standard library)")
    parser.option("--windows", whole(1), 128, "how many windows of text to read")
    parser.option("--window", whole(2), 2048, "tokens in a window")


def row_options(parser: Parser) -> None:
    generate.add_weights_option(parser)
    about = "a row of the table, such as sals:rank=0.125,bits=2; repeat it (default: dense and sals)"
    parser.option("--method", str, None, about, action="append", metavar="NAME[:SETTING=VALUE,...][@FOLDER]")
    parser.option("--rows", whole(1), 10, "prompts in a batch, fewer where the memory holds no more")
    for name, cost in (("bytes", "bytes per token"), ("tokens", "attended tokens")):
        about = f"settings with at most this share of dense's {cost}"
        parser.option(f"--equal_{name}", fraction, None, about, metavar="SHARE")


def result_options(parser: Parser) -> None:
    parser.flag("--json", "one JSON object as the last line of stdout")
    parser.option("--csv", writable_file, None, "also write the table to this file")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    model = generate.add_model_options
    p = command(commands, run_fit, model, text_options)
    p.option("--method", fits_of, None, "the method to fit, or all", required=True, dest="fits")
    p.option("--max_rank", fraction, 0.625, "sals: the highest rank that can be chosen later, of Hkv*D")
    p.option("--out", writable_folder, None, "for the fits, with links to the checkpoint", metavar="FOLDER")
    p.option("--accuracy", fraction, 0.99, "fdc: the fraction of the dense next-token accuracy to keep")
    p.option("--positions", whole(1), None, "fdc: the longest context to be served (default: the model's)")

    p = command(commands, run_eval, model, row_options, result_options)
    p.option("--text", Path, [], "more text for perplexity; repeat it", action="append")
    p.option("--perplexity_rows", whole(0), 8, "texts whose continuation is scored; 0: none")
    p.option("--prefix", whole(1), 1024, "tokens that are prefilled")
    p.option("--continuation", whole(1), 128, "tokens that are then decoded and scored")
    p.option("--generate", whole(8), 0, "instead, tokens that dense writes, after chats, too", metavar="N")
    p.option("--tasks", str, KINDS, "retrieval tasks; uuid: a text of UUIDs alone", nargs="+", choices=TASKS)
    p.option("--lengths", whole(1), [1024, 2048], "tokens of a retrieval prompt", nargs="+")
    p.option("--samples", whole(0), 20, "prompts a task and length; 0: none")
    p.option("--facts", whole(4, MOST_FACTS), 16, "facts in the multi-key and multi-query tasks")

    command(commands, run_ranks, model, text_options, result_options)

    p = command(commands, run_train, generate.add_device_option)
    p.option("--out", writable_folder, None, "folder for config.json and model.safetensors", required=True)
    p.option("--from", Path, None, "uptrain this calibrated checkpoint", dest="source", metavar="FOLDER")
    p.option("--method", str, None, "with --from: its settings", metavar="elitekv[:SETTING=VALUE,...]")
    about = "folders or files of text, and how much of the plain text to draw from each (default 1)"
    p.option("--text", text_share, None, about, nargs="+", required=True, metavar="PATH[:SHARE]")
    p.option("--stages", str, NANO_STAGES, "one after another", nargs="+", metavar="BATCHxLENGTHxSTEPS")
    p.option("--lr", positive, None, "peak learning rate (default 2e-3, with --from 5e-4)")
    about = "with --from: the fraction of the loss that is the KL to it (alone: 1), and not of labels"
    p.option("--distill", fraction, 0.0, about, nargs="?", const=1.0, metavar="SHARE")
    p.option("--seed", whole(0), 0, "of weights and batches")
    p.option("--workers", whole(1, 256), min(12, os.cpu_count() or 1), "processes that make batches")
    p.option("--state", writable_file, None, "file that keeps weights and moments, to stop and resume")
    p.option("--minutes", positive, math.inf, "stop (and keep the state) after this time")
    p.option("--log", writable_file, None, "CSV of tokens read and mean loss, a line every 20 steps")
    p.option("--max_tokens", whole(1), 200_000_000, "tokens read from each text")
    return parser.parse_args(argv)


def run() -> None:
    args = parse_args(sys.argv[1:])
    if generate.is_one_of_several_processes() and args.run is not run_eval:
        raise UserError("of these commands only eval takes torchrun; start the others with python")
    figures = args.run(args)
    if figures and args.json:
        print(json.dumps({"command": " ".join(sys.argv), "torch": torch.__version__} | figures))


if __name__ == "__main__":
    sys.modules["calibrate"] = sys.modules["__main__"]  # an extra that imports calibrate gets this one
    generate.run_command(run)
