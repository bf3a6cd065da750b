"""Calibration: read a text, collect statistics, and fit what a method needs.

    python calibrate.py fit --method sals           fit the artifacts of a checkpoint (no download)
    python calibrate.py ranks                       the rank of each layer's keys
    python calibrate.py COMMAND --help              what a command does, its options and an example
A fit is written beside the checkpoint, as METHOD.safetensors.
"""

import argparse
import bisect
import csv
import inspect
import itertools
import json
import os
import random
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import compress
import model as model_file
from compress import method_named, replacing, save_artifact
from generate import Parser, Progress, fraction, load, whole
from model import Llama, ModelConfig, UserError, apply_rope, rope_tables

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


def save_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    """The table so far, in the place of an older one."""
    path = path.resolve()  # what a link points to
    how = {"encoding": "utf-8", "errors": "replace", "newline": ""}  # in every locale
    with replacing(path.parent, path.name) as partial, (partial / path.name).open("w", **how) as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


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
    the checkpoint's folder. `--method all` fits every method that can take the model. Where that folder
    cannot be written, as a Hugging Face cache, `--out` makes one of links to its files.

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

    command(commands, run_ranks, model, text_options, result_options)
    return parser.parse_args(argv)


MOVED = {"eval": "python -m extras.evaluate", "train": "python -m extras.train"}


def run() -> None:
    command_name = sys.argv[1] if len(sys.argv) > 1 else ""
    if command_name in MOVED:
        raise UserError(f"calibrate.py {command_name} has moved; run {MOVED[command_name]}")
    args = parse_args(sys.argv[1:])
    if generate.is_one_of_several_processes():
        raise UserError("a fit runs in one process; start it with python, not with torchrun")
    figures = args.run(args)
    if figures and args.json:
        print(json.dumps({"command": " ".join(sys.argv), "torch": torch.__version__} | figures))


if __name__ == "__main__":
    sys.modules["calibrate"] = sys.modules["__main__"]  # an extra that imports calibrate gets this one
    generate.run_command(run)
