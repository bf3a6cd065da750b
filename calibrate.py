"""Calibration: read a text, collect statistics, and fit what a method needs.

    python calibrate.py fit --method sals           fit SALS for the embedded model (no download)
    python calibrate.py fit --checkpoint FOLDER --method all
    python calibrate.py ranks                       how many dims the keys of each layer need

A fit is written beside the checkpoint as METHOD.safetensors, where generate.py looks for it.
`python calibrate.py COMMAND --help` says what a command does and lists its options.
"""

import argparse
import csv
import inspect
import itertools
import json
import math
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
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import compress
from compress import method_named, replacing_file, save_artifact, written_file
from generate import Parser, ProgressLine, fraction, load_checkpoint, most_tokens, whole
from model import Llama, ModelConfig, UserError, apply_rope, causal_attention, rope_tables

# ----------------------------------------------------------------------------------------- progress


def tracked(label: str, items: Collection) -> Iterator:
    """The items, one by one, with their progress."""
    with ProgressLine(label, len(items)) as progress:
        for item in items:
            yield item
            progress.tick()


# -------------------------------------------------------------------------------------------- texts

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
STDLIB = Path(os.__file__).parent  # the text that every machine has: the standard library's sources
INSTALLED = ("site-packages", "dist-packages")  # in its folder, but different on every machine


def is_held_out(file: Path) -> bool:
    """Is this a file that evaluation reads, and training never does? One name in sixteen is.

    It depends on the name alone, so that a copy of a file elsewhere is held out, too."""
    return zlib.crc32(file.name.encode()) % 16 == 0


def text_files(path: Path, held: bool | None = None) -> list[Path]:
    """The text files under a folder, in order, or the one file.

    held: of a folder only the files that are held out for evaluation (True), or only the others
    (False). Raises UserError where there is no text."""
    if not path.is_dir():
        generate.read_text(path)  # refuses what is no text
        return [path]
    files = []
    for file in sorted(path.rglob("*")):
        if file.suffix not in TEXT_SUFFIXES or not file.is_file():
            continue
        if path == STDLIB and file.relative_to(path).parts[0] in INSTALLED:
            continue
        if held is None or held == is_held_out(file):
            files.append(file)
    if not files:
        raise UserError(f"{path}: no text there (looked for {', '.join(TEXT_SUFFIXES)})")
    return files


def read_texts(files: list[Path]) -> Iterator[str]:
    """The files' texts in a seeded random order, without repeats, short texts and tables."""
    files = list(files)
    random.Random(0).shuffle(files)
    seen = set()
    for file in files:
        text = generate.read_text(file, errors="ignore")
        longest_line = max(len(line) for line in text.split("\n"))
        # Generated code, such as tables of Unicode, has very long lines.
        is_table = file.suffix == ".py" and longest_line > 2000
        digest = zlib.crc32(text.encode())
        if len(text) >= 200 and digest not in seen and not is_table:
            seen.add(digest)
            yield text


def text_ids(
    tokenizer,
    files: list[Path],
    most: int,
    vocabulary: int | None = None,
    bos: bool = False,
) -> np.ndarray:
    """Up to `most` token ids of the files' texts, one text after another: int32 [n].

    bos: each text is led by the tokenizer's BOS token. Raises UserError where no file has a text,
    and for an id that a model with this vocabulary does not have."""

    def stream(progress: ProgressLine) -> Iterator[int]:
        for text in read_texts(files):
            # A text of which `most` tokens are wanted is not encoded whole. Even a token of blanks
            # is hardly longer than 64 characters.
            ids = tokenizer.encode(text[: 64 * most], bos=bos)
            progress.tick(len(ids))
            yield from ids

    with ProgressLine("tokens", most) as progress:
        ids = np.fromiter(itertools.islice(stream(progress), most), np.int32)
    if not len(ids):
        raise UserError(f"{files[0]}: no text of at least 200 characters there")
    if vocabulary and ids.max() >= vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {vocabulary}; "
            "the tokenizer belongs to another model"
        )
    return ids


def windows(
    tokenizer,
    files: list[Path],
    length: int,
    count: int,
    vocabulary: int | None = None,
) -> Tensor:
    """Cuts texts into consecutive windows of token ids: int64 [count, length], or fewer windows if
    the texts are short.

    If the model's prompts start with BOS, it takes the place of each window's first token. Raises
    UserError if there is not even one window."""
    ids = text_ids(tokenizer, files, count * length, vocabulary)
    found = len(ids) // length
    if not found:
        fault = f"the text has {len(ids)} tokens, fewer than one window of {length}"
        raise UserError(f"{fault}; give more text")
    if found < count:
        note = f"note: the text has {found} windows of {length} tokens, not {count}"
        print(note, file=sys.stderr)
    tokens = torch.from_numpy(ids[: found * length]).long().view(found, length)
    if tokenizer.add_bos:
        tokens[:, 0] = tokenizer.bos_id
    return tokens


def model_and_windows(args: argparse.Namespace) -> tuple[Llama, Tensor]:
    """The model of --checkpoint, and windows [N, S] of --text to fit it on.

    By default the text is what the standard library does not hold out for evaluation."""
    model, tokenizer = load_checkpoint(args.checkpoint, args.device, args.dtype)
    c = model.config
    if args.text:
        files = text_files(args.text)
    else:
        files = text_files(STDLIB, held=False)
    length = min(args.window, most_tokens(c))
    return model, windows(tokenizer, files, length, args.windows, c.vocab_size)


# ----------------------------------------------------------------------------------- files to write


def writable_folder(text: str) -> Path:
    """Reads an option: a folder for results, which need not exist.

    A fault is said now, rather than when the results are there."""
    folder = Path(text)
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            break
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"no file can be written into {folder}")
    return folder


def writable_file(text: str) -> Path:
    """Reads an option: a file for results, which need not exist. Symbolic links are followed."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"no file can be written at {path}")
    writable_folder(str(written_file(path).parent))
    return path


def save_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Writes a table in the place of an older one. Other keys of a row are left out."""
    with replacing_file(path) as unfinished:
        # Its own encoding, since a locale's may lack a character that a name of a file has.
        with unfinished.open("w", encoding="utf-8", errors="replace", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


# ------------------------------------------------------------------------- what the fits measure by


class Fitted(NamedTuple):
    """What a fit returns."""

    tensors: dict[str, Tensor]  # the artifact
    facts: dict[str, float]  # figures for the artifact's metadata, and for the report


def observe(model: Llama, batches: Iterable[Tensor], see: Callable[..., None]) -> None:
    """Runs batches of tokens [B, S] through the dense model, and shows `see` what each layer's
    attention gets.

    see(layer, cos, sin, q, k, v) gets q [B, S, Hq, D] and k, v [B, S, Hkv, D] before RoPE, and
    RoPE's tables [S, D/2]. Raises UserError for a checkpoint that EliteKV has changed."""
    if model.config.elitekv:
        raise UserError("this checkpoint was uptrained for EliteKV and is calibrated already")

    def attend(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        see(i, cos, sin, q, k, v)
        dense = model.layers[i].attention.causal(cos, sin)
        return dense(q, k, v)

    device = model.norm.weight.device
    for tokens in batches:
        model(tokens.to(device), attend)


class TextFigures(NamedTuple):
    """How well a model predicts a text."""

    accuracy: float  # the fraction of tokens that are the likeliest next ones
    perplexity: float


def measure_text(
    model: Llama,
    token_windows: Collection[Tensor],
    attend: Callable[..., Tensor] | None = None,
) -> TextFigures:
    """The figures of windows of tokens [S], each by one full pass.

    attend: what attends in the place of dense attention, as Llama.forward takes it."""
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64)
    for window in token_windows:
        window = window.to(device)
        hidden = model(window[None], attend)[0, :-1]  # [S - 1, dim]
        logits = model.output(hidden).float()  # [S - 1, V]
        labels = window[1:]
        accuracy = (logits.argmax(-1) == labels).double().mean()
        loss = F.cross_entropy(logits, labels).double()
        sums += torch.stack((accuracy, loss)).cpu()
    accuracy, loss = sums / len(token_windows)
    return TextFigures(accuracy.item(), loss.exp().item())


def eigen(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., n], the largest first, and eigenvectors [..., n, n], which are columns."""
    values, vectors = torch.linalg.eigh(covariance)  # the smallest first
    values = values.flip(-1).clamp(min=0)  # a rounding error may be below 0
    return values, vectors.flip(-1)


def leading_share(values: Tensor, n: int) -> float:
    """Which fraction of the sum of eigenvalues [..., m] the n largest hold, averaged over [...]."""
    shares = values[..., :n].sum(-1) / values.sum(-1)
    return shares.mean().item()


@dataclass
class KeyMoments:
    """Means over N tokens, in fp64, of each of L layers. K [N, Hkv*D] are a layer's keys, the heads
    of a token side by side."""

    second: Tensor  # [L, Hkv*D, Hkv*D]: K^T K / N
    mean: Tensor  # [L, Hkv*D]
    queries: Tensor  # [L, Hkv, D/2]: |q|^2 of each pair that RoPE rotates, summed over a group

    def covariance(self) -> Tensor:
        """The covariance of the keys, [L, Hkv*D, Hkv*D]: E[k k^T] - E[k] E[k]^T."""
        return self.second - self.mean[:, :, None] * self.mean[:, None, :]


class MomentSums:
    """The sums over tokens of which a KeyMoments is made, layer by layer."""

    def __init__(self, c: ModelConfig):
        self.n_kv_heads = c.n_kv_heads
        # Each becomes a tensor with the first tokens that are added.
        self.outer_sum = [0.0] * c.n_layers  # K^T K
        self.key_sum = [0.0] * c.n_layers
        self.square_sum = [0.0] * c.n_layers  # q^2 of each pair

    def add(self, i: int, q: Tensor, k: Tensor) -> None:
        """Adds tokens of layer i: q [B, S, Hq, D], k [B, S, Hkv, D]."""
        keys = k.flatten(-2).flatten(0, 1).double()  # [B * S, Hkv*D]
        self.outer_sum[i] = self.outer_sum[i] + keys.T @ keys
        self.key_sum[i] = self.key_sum[i] + keys.sum(0)

        queries = q.unflatten(-2, (self.n_kv_heads, -1)).double()  # [B, S, Hkv, G, D]
        pairs = queries.unflatten(-1, (2, -1))  # [B, S, Hkv, G, 2, D/2]: dims c and c + D/2
        self.square_sum[i] = self.square_sum[i] + pairs.square().sum((0, 1, 3, 4))  # [Hkv, D/2]

    def over(self, n_tokens: int) -> KeyMoments:
        """The sums divided by the number of tokens, on the CPU."""
        return KeyMoments(
            second=torch.stack(self.outer_sum).cpu() / n_tokens,
            mean=torch.stack(self.key_sum).cpu() / n_tokens,
            queries=torch.stack(self.square_sum).cpu() / n_tokens,
        )


# SALS and Loki are fitted by the same moments, so the last result is kept. It would be wrong for a
# model whose weights change in place.
@lru_cache(1)
def key_moments(model: Llama, tokens: Tensor) -> dict[str, KeyMoments]:
    """Moments of the keys of tokens [N, S], before RoPE ("pre") and after it ("post").

    The windows go through the model once, one by one. Only sums stay in memory, and no keys."""
    before = MomentSums(model.config)
    after = MomentSums(model.config)

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        before.add(i, q, k)
        after.add(i, apply_rope(q, cos, sin), apply_rope(k, cos, sin))

    batches = tokens[:, None]  # [N, 1, S]: one window each
    observe(model, tracked("keys", batches), see)
    return {"pre": before.over(tokens.numel()), "post": after.over(tokens.numel())}


def head_bases(
    model: Llama,
    tokens: Tensor,
    label: str,
    vectors_of: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """Singular values [L, H, D] and right singular vectors [L, H, D, D] of vectors of each head.

    vectors_of(layer, q, k, v) makes them, [n, H, D], of q [S, Hq, D] and k, v [S, Hkv, D] of each
    window of tokens [N, S]. They come from the eigendecomposition of X^T X, in fp64: in fp32 its
    rounding errors would exceed the small singular values."""
    grams = [0] * model.config.n_layers

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        x = vectors_of(i, q[0], k[0], v[0])
        x = x.transpose(0, 1).double()  # [H, n, D]
        grams[i] = grams[i] + x.transpose(1, 2) @ x

    observe(model, tracked(label, tokens[:, None]), see)
    values, vectors = eigen(torch.stack(grams).cpu())
    return values.sqrt(), vectors


# --------------------------------------------------------------------------------------------- SALS


def query_rms(moments: KeyMoments) -> Tensor:
    """S_q (ours): the root mean square of the queries in each pair of dims that RoPE rotates.

    [L, Hkv*D], both dims of a pair alike, with a mean square of one in each layer."""
    scale = moments.queries.sqrt().repeat(1, 1, 2).flatten(1)  # [L, Hkv*D]
    scale = scale / scale.square().mean(1, keepdim=True).sqrt()
    # Its inverse is needed, and a pair that no query uses would have 0.
    return scale.clamp(min=1e-3)


def fit_sals(model: Llama, tokens: Tensor, max_rank: float) -> Fitted:
    """The bases of SALS's joint latent, of keys before RoPE (sec. 4.2).

    "key" is the paper's U. "query" (ours) weighs each pair of dims by its queries, which keeps
    logits rather than keys. Both have max_rank * Hkv*D columns [L, Hkv*D, r], from which a cache
    takes the leading ones."""
    c = model.config
    moments = key_moments(model, tokens)["pre"]
    r = compress.rank_of(max_rank, c.kv_dim)

    # The paper: C = K^T K = U Sigma U^T. U_r has the r leading eigenvectors of C.
    key_values, key_basis = eigen(moments.second)

    # Ours: the same of S_q (k - m), where m is the mean key.
    scale = query_rms(moments)  # S_q
    covariance = scale[:, :, None] * moments.covariance() * scale[:, None]
    query_values, query_basis = eigen(covariance)

    tensors = {"scale": scale.float(), "mean": moments.mean.float()}
    facts = {"max_rank": max_rank}
    fitted = (("query", query_values, query_basis), ("key", key_values, key_basis))
    for metric, values, basis in fitted:
        tensors[f"{metric}_eigenvalues"] = values.float()
        for i in range(c.n_layers):
            tensors[f"{i}.{metric}_basis"] = basis[i, :, :r].float()
        for share in (0.25, 0.125):
            kept = leading_share(values, round(share * c.kv_dim))
            facts[f"energy of {share:.1%}, {metric}"] = kept
    return Fitted(tensors, facts)


def report_sals(facts: dict[str, float]) -> str:
    """The facts of fit_sals in sentences."""
    quarter = facts["energy of 25.0%, query"]
    eighth = facts["energy of 12.5%, query"]
    return (
        f"A latent of a quarter of the key dims keeps {quarter:.1%} of the keys' energy, as the "
        f"queries weigh it, and one of an eighth keeps {eighth:.1%}. The paper's basis, which does "
        f"not weigh, keeps {facts['energy of 25.0%, key']:.1%} and "
        f"{facts['energy of 12.5%, key']:.1%} of its energy. "
        f"With --rank you can choose up to {facts['max_rank']:g} of the dims."
    )


# --------------------------------------------------------------------------------------------- Loki


def fit_loki(model: Llama, tokens: Tensor) -> Fitted:
    """P, the principal components of each KV head's keys (Loki sec. 3): [L, Hkv, D, D], columns.

    There are two: "pre" is fitted on keys before RoPE, and "post" on keys after it. A cache rotates
    keys after RoPE by either. P is orthogonal, so the logits stay as they are (Lemma 4.1), whatever
    keys it was fitted on; only how well its leading components rank the tokens differs."""
    c = model.config
    D = c.head_dim
    tensors = {}
    facts = {}
    for name, moments in key_moments(model, tokens).items():
        # The covariance of one head: a block on the diagonal of that of all heads.
        joint = moments.covariance()  # [L, Hkv*D, Hkv*D]
        of_heads = []
        for h in range(c.n_kv_heads):
            dims = slice(h * D, (h + 1) * D)
            of_heads.append(joint[:, dims, dims])
        values, vectors = eigen(torch.stack(of_heads, dim=1))  # of [L, Hkv, D, D]
        tensors[f"{name}.eigenvalues"] = values.float()
        tensors[f"{name}.basis"] = vectors.float()
        facts[f"energy of 25%, {name}"] = leading_share(values, D // 4)
    return Fitted(tensors, facts)


def report_loki(facts: dict[str, float]) -> str:
    """The facts of fit_loki in a sentence."""
    return (
        f"A quarter of a head's components hold {facts['energy of 25%, pre']:.1%} of the variance "
        f"of its keys before RoPE, and {facts['energy of 25%, post']:.1%} after it."
    )


# ------------------------------------------------------------------------------------------ EliteKV

# RoPElite's sample (the paper: 2000 documents): so many windows, and so many queries of each.
ELITE_WINDOWS = 16
ELITE_QUERIES = 32


def rope_deltas(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Delta_c: what rotating pair c changes in the logits of one KV head (EliteKV sec. 3.1).

    With the pairs of a set E rotated, the logits differ from RoPE's by the sum of Delta_c over the
    pairs c that are not in E.

    q [N, I, G, D] at `positions` [I] and k [N, S, D], before RoPE, and tables [S, D/2] give
    [D/2, N, G, I, S], with the scale 1/sqrt(D), and 0 where a key comes after its query."""
    D = q.shape[-1]
    k = k.unsqueeze(-2)  # [N, S, 1, D], as apply_rope wants it

    # A pair has the dims a, b of q and u, v of k. Delta is (rotated a, b) . (rotated u, v), less
    # (a, b) . (u, v): four products, which one matmul adds up.
    q_rotated = apply_rope(q, cos[positions], sin[positions])
    q_terms = torch.cat((q_rotated, -q), -1).unflatten(-1, (4, D // 2))  # [N, I, G, 4, D/2]
    k_rotated = apply_rope(k, cos, sin)
    k_terms = torch.cat((k_rotated, k), -1).unflatten(-1, (4, D // 2))  # [N, S, 1, 4, D/2]
    deltas = torch.einsum("nigxc,nshxc->cngis", q_terms, k_terms) * D**-0.5

    is_past = torch.arange(k.shape[1], device=q.device) <= positions[:, None]  # [I, S]
    return deltas * is_past


def ropelite(deltas: Tensor) -> Tensor:
    """RoPElite, the greedy search for one KV head (EliteKV Alg. 1): its pairs [D/2], best first.

    deltas [D/2, ...] are rope_deltas'. Each round adds the pair to E that brings the logits nearest
    to RoPE's, in the mean absolute difference."""
    difference = deltas.sum(0)  # of the logits from RoPE's while E is empty
    candidates = list(range(len(deltas)))
    order = []
    while candidates:
        losses = [(difference - deltas[c]).abs().mean() for c in candidates]
        best = candidates.pop(int(torch.stack(losses).argmin()))
        order.append(best)
        difference = difference - deltas[best]
    return torch.tensor(order)


def pair_norms(x: Tensor) -> Tensor:
    """The mean norm of each pair that RoPE rotates: x [..., D] -> [D/2], mean over all the rest."""
    pairs = x.unflatten(-1, (2, -1))  # [..., 2, D/2]
    return pairs.norm(dim=-2).flatten(0, -2).mean(0)


def contribution(q: Tensor, k: Tensor) -> Tensor:
    """Contribution (EliteKV sec. 4.3.1) of each pair of one KV head: [D/2].

    It is the mean norm of the query's pair times that of the key's. No rotation changes a norm.
    q [..., G, D] is averaged over the query heads of the group, too; k [..., D]."""
    return pair_norms(q) * pair_norms(k)


def elite_orders(model: Llama, tokens: Tensor) -> dict[str, Tensor]:
    """The pairs of each KV head, best first: [L, Hkv, D/2], from one pass over tokens [N, S].

    "elite" is RoPElite's order, by the exact logits of ELITE_QUERIES random queries of each
    window; "contribution" the order by Contribution."""
    c = model.config
    device = model.norm.weight.device
    generator = torch.Generator().manual_seed(0)
    positions = torch.randperm(tokens.shape[1], generator=generator)[:ELITE_QUERIES].to(device)
    elite = []
    contributed = []
    progress = ProgressLine("elite pairs, heads", c.n_layers * c.n_kv_heads)

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        q = q.float().unflatten(-2, (c.n_kv_heads, -1))  # [N, S, Hkv, G, D]
        k = k.float()
        for h in range(c.n_kv_heads):
            deltas = rope_deltas(q[:, positions, h], k[:, :, h], positions, cos, sin)
            elite.append(ropelite(deltas))
            norms = contribution(q[:, :, h], k[:, :, h])
            contributed.append(norms.argsort(descending=True).cpu())
            progress.tick()

    with progress:
        observe(model, [tokens], see)
    by_layer = (c.n_layers, c.n_kv_heads)
    return {
        "elite": torch.stack(elite).unflatten(0, by_layer),
        "contribution": torch.stack(contributed).unflatten(0, by_layer),
    }


def elite_allocations(c: ModelConfig, fraction: float) -> list[tuple[int, int]]:
    """The sizes (r, d_ckv) that fill this fraction of the dense cache (EliteKV App. C).

    Of a head's pairs r are rotated, and a latent of d_ckv numbers holds the rest. So a token takes
    2 r Hkv + d_ckv numbers. Parameters are not added: the factors A [dim, d_ckv] and B [d_ckv, n]
    have at most those of the matrix that they replace, dim n, where n = Hkv (2D - 2r).

    d_ckv is a multiple of 128, or in small models of the largest smaller power of two that leaves
    four sizes to choose from (ours)."""
    numbers_per_token = round(fraction * 2 * c.kv_dim)
    for multiple in (128, 64, 32, 16, 8, 4, 2, 1):
        sizes = []
        for r in range(c.head_dim // 2, 0, -1):
            rotated = 2 * r * c.n_kv_heads
            d_ckv = numbers_per_token - rotated
            n = 2 * c.kv_dim - rotated
            adds_no_parameters = d_ckv * (c.dim + n) <= c.dim * n
            if d_ckv > 0 and d_ckv % multiple == 0 and adds_no_parameters:
                sizes.append((r, d_ckv))
        if len(sizes) >= 4:
            break
    return sizes


def input_roots(model: Llama, tokens: Tensor) -> dict[str, Tensor]:
    """The square root of E x x^T in each layer: "0.root", "1.root", ... [dim, dim], fp64.

    x are the inputs of the layer's attention for tokens [N]. With it `low_rank` keeps what the
    layer computes from such inputs, rather than its weights (ours)."""
    c = model.config
    device = next(model.parameters()).device
    sums = [0.0] * c.n_layers

    def add(i: int, attention: torch.nn.Module, inputs: tuple) -> None:
        x = inputs[0].flatten(0, -2).double()  # [n, dim]
        sums[i] = sums[i] + x.T @ x / len(tokens)

    hooks = []
    for i, layer in enumerate(model.layers):
        hooks.append(layer.attention.register_forward_pre_hook(partial(add, i)))
    length = min(2048, most_tokens(c))  # tokens of a pass
    for window in tracked("inputs", tokens.split(length)):
        model(window[None].to(device))
    for hook in hooks:
        hook.remove()

    values, vectors = eigen(torch.stack(sums))
    # A ridge, so that directions that are rare in this text still count.
    values = values + 0.1 * values.mean(-1, keepdim=True)
    roots = {}
    for i in range(c.n_layers):
        roots[f"{i}.root"] = (vectors[i] * values[i].sqrt()) @ vectors[i].T
    return roots


def elite_perplexity(
    model: Llama,
    size: tuple[int, int],
    artifact: dict[str, Tensor],
    tokens: Tensor,
) -> float:
    """The perplexity of tokens [N, S] when EliteKV has the size (r, d_ckv), without any training.

    It leaves the model as it was."""
    dense = [layer.attention for layer in model.layers]
    method_named("elitekv").fold_all(model, compress.EliteSettings(*size), artifact)
    figures = measure_text(model, tokens)
    for layer, attention in zip(model.layers, dense, strict=True):
        layer.attention = attention
    return figures.perplexity


def fit_elitekv(model: Llama, tokens: Tensor) -> Fitted:
    """EliteKV's pairs of every KV head, and its sizes r and d_ckv for a quarter of the cache.

    Of the sizes that App. C allows, it takes those of the lowest perplexity on the last windows of
    tokens [N, S]. Raises UserError where no sizes fit the model."""
    allocations = elite_allocations(model.config, 0.25)
    if not allocations:
        raise UserError("elitekv: no r and d_ckv give this model a quarter of its cache")
    sample = tokens[:ELITE_WINDOWS]
    tensors = elite_orders(model, sample)
    artifact = {**tensors, **input_roots(model, sample.flatten())}

    trials = {}
    for size in tracked("elitekv, sizes", allocations):
        trials[size] = elite_perplexity(model, size, artifact, tokens[-4:])
    r, d_ckv = min(trials, key=trials.get)

    tensors["r"] = torch.tensor(r)
    tensors["d_ckv"] = torch.tensor(d_ckv)
    facts = {"r": r, "d_ckv": d_ckv}
    for (trial_r, trial_d_ckv), perplexity in trials.items():
        facts[f"perplexity_{trial_r}_{trial_d_ckv}"] = perplexity
    return Fitted(tensors, facts)


def report_elitekv(facts: dict[str, float]) -> str:
    """The facts of fit_elitekv in a sentence."""
    r = facts["r"]
    d_ckv = facts["d_ckv"]
    n_trials = len(facts) - 2  # but for r and d_ckv
    return (
        f"Each head rotates {r} pairs of dims, beside a latent of {d_ckv} numbers: of {n_trials} "
        f"ways to fill a quarter of the cache this has the lowest perplexity without training, "
        f"{facts[f'perplexity_{r}_{d_ckv}']:.4g}."
    )


# ---------------------------------------------------------------------------------------------- FDC

RANDOM_TOKENS = 1 << 15  # of which FDC's bases are fitted; the paper: at least 8K


def fit_fdc(
    model: Llama,
    tokens: Tensor,
    accuracy: float = 0.99,
    positions: int | None = None,
    bases_from: str = "random",
) -> Fitted:
    """R of each KV head, from random tokens (FDC sec. 5.1), and the rate that F_p finds (sec. 5.2).

    accuracy: the fraction of the dense model's next-token accuracy, on the last windows of tokens
    [N, S], that the rate must keep. positions: the longest context to be served; None: the
    model's. bases_from: "random", or "text": R is found from tokens in place of random ones
    (ours)."""
    c = model.config
    positions = min(positions or c.max_positions, c.max_positions)
    if bases_from == "text":
        basis_tokens = tokens
    else:
        length = tokens.shape[1]
        count = -(-RANDOM_TOKENS // length)  # windows, rounded up
        generator = torch.Generator().manual_seed(0)
        basis_tokens = torch.randint(c.vocab_size, (count, length), generator=generator)
    tensors = fdc_bases(model, basis_tokens, positions)
    rate, kept_accuracy, perplexity_ratio = fdc_search(model, tokens[-8:], tensors, accuracy)

    facts = {
        "floor": accuracy,
        "positions": positions,
        "rate": rate,
        "accuracy of dense's": kept_accuracy,
        "perplexity of dense's": perplexity_ratio,
    }
    for kind, name in (("qk", "q and k"), ("v", "v")):
        ranks = compress.fdc_ranks(tensors[f"{kind}.values"], rate)
        facts[f"mean rank of {name}"] = ranks.double().mean().item()
    tensors["rate"] = torch.tensor(rate, dtype=torch.float64)
    return Fitted(tensors, facts)


def report_fdc(facts: dict[str, float]) -> str:
    """The facts of fit_fdc in sentences."""
    kept_accuracy = facts["accuracy of dense's"]
    perplexity_ratio = facts["perplexity of dense's"]
    ranks = (
        f"At a rate of {facts['rate']:.4g} a head keeps {facts['mean rank of q and k']:.1f} dims "
        f"of its queries and keys and {facts['mean rank of v']:.1f} of its values, in the mean."
    )
    if not math.isfinite(kept_accuracy):  # over 0
        return f"{ranks} The dense model predicts no token of this text right: try another text."
    return (
        f"{ranks} It predicts {kept_accuracy:.1%} as many tokens right as the dense model does "
        f"(--accuracy asks for {facts['floor']:.1%}), and its perplexity is "
        f"{perplexity_ratio:.4g} times as large."
    )


def fdc_bases(model: Llama, tokens: Tensor, positions: int) -> dict[str, Tensor]:
    """FDC's SVDs: singular values [L, Hkv, D] and right singular vectors [L, Hkv, D, D], in fp32.

    "qk.values" and "qk.basis" are of a head's queries and keys after RoPE on tokens [N, S]
    (sec. 5.1), "v.values" and "v.basis" of its W_V (sec. 5.2).

    q and k are rotated to random positions below `positions` (ours). What a layer computes does
    not depend on where a window lies, so a short window can stand for one far out."""
    c = model.config
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    cos, sin = rope_tables(c, positions, device)

    def queries_and_keys(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.randint(0, positions, (len(q),), generator=generator).to(device)
        q = apply_rope(q, cos[at], sin[at]).unflatten(1, (c.n_kv_heads, -1))  # [S, Hkv, G, D]
        k = apply_rope(k, cos[at], sin[at])[:, :, None]  # [S, Hkv, 1, D]
        stacked = torch.cat((q, k), 2)  # [S, Hkv, G + 1, D]
        return stacked.transpose(1, 2).flatten(0, 1)  # [S * (G + 1), Hkv, D]

    # 1. X = [Q; K] = U Theta R^T.
    qk_values, qk_basis = head_bases(model, tokens, "q and k", queries_and_keys)

    # 2. W_V = U Theta R_V^T.
    weights = []
    for layer in model.layers:
        _, _, w_v = layer.attention.wqkv.weight.split(layer.attention.widths)
        weights.append(w_v)
    w_v = torch.stack(weights).unflatten(1, (c.n_kv_heads, -1))  # [L, Hkv, D, dim]: transposed
    w_v = w_v.double().cpu()
    v_squares, v_basis = eigen(w_v @ w_v.transpose(-1, -2))

    return {
        "qk.values": qk_values.float(),
        "qk.basis": qk_basis.float(),
        "v.values": v_squares.sqrt().float(),
        "v.basis": v_basis.float(),
    }


def fdc_rates(*values: Tensor) -> list[float]:
    """All rates at which the rank of some head changes, rising, from 0: what F_p has to try.

    values [L, Hkv, D] are singular values. Ranks are multiples of 16."""
    steps = [torch.zeros(1, dtype=torch.float64)]
    for v in values:
        lost = compress.fdc_tails(v)  # [L, Hkv, D]: what a rank of 1, 2, .. D loses
        steps.append(lost[..., 15::16].flatten())  # a rank of 16, 32, ..
    return torch.cat(steps).unique().tolist()


def fdc_search(
    model: Llama,
    tokens: Tensor,
    tensors: dict[str, Tensor],
    accuracy: float,
) -> tuple[float, float, float]:
    """F_p (FDC sec. 5.2): the largest rate that keeps the floor, found by bisection.

    The floor is `accuracy` times the dense model's accuracy on tokens [N, S]. Returns the rate,
    and its accuracy and its perplexity over the dense ones."""
    rates = fdc_rates(tensors["qk.values"], tensors["v.values"])
    figures = {}  # by rate
    with ProgressLine("fdc, rates", len(rates).bit_length() + 1) as progress:

        def measure(rate: float) -> TextFigures:
            if rate not in figures:
                progress.tick()
                figures[rate] = measure_fdc(model, tokens, tensors, rate)
            return figures[rate]

        dense = measure(0.0)
        # rates[:kept] keep the floor, as 0 does, and rates[lost:] do not. Between is unknown.
        kept = 1
        lost = len(rates)
        while kept < lost:
            middle = (kept + lost) // 2
            if measure(rates[middle]).accuracy < accuracy * dense.accuracy:
                lost = middle
            else:
                kept = middle + 1
        best = rates[kept - 1]
        found = measure(best)
    kept_accuracy = math.nan  # where dense predicts no token right
    if dense.accuracy > 0:
        kept_accuracy = found.accuracy / dense.accuracy
    return best, kept_accuracy, found.perplexity / dense.perplexity


def measure_fdc(
    model: Llama,
    tokens: Tensor,
    tensors: dict[str, Tensor],
    rate: float,
) -> TextFigures:
    """The figures of FDC at a rate, by full passes over tokens [N, S].

    On the columns R that are kept, (q R) (k R)^T = q (k P)^T, where P = R R^T. So a plain forward
    pass with projected keys and values gives FDC's outputs."""
    c = model.config
    projectors = {}
    for kind in ("qk", "v"):
        ranks = compress.fdc_ranks(tensors[f"{kind}.values"], rate)[..., None, None]
        is_kept = torch.arange(c.head_dim) < ranks  # [L, Hkv, 1, D]
        basis = tensors[f"{kind}.basis"] * is_kept
        projector = basis @ basis.transpose(-1, -2)  # [L, Hkv, D, D]
        projectors[kind] = projector.to(model.tok_embeddings.weight)

    def attend(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        k = torch.einsum("bshd,hde->bshe", k, projectors["qk"][i])
        # The bias of V stays whole: FDC folds it into that of W_O.
        _, bias = compress.kv_bias(model.layers[i].attention, c)
        v = torch.einsum("bshd,hde->bshe", v - bias, projectors["v"][i]) + bias
        return causal_attention(q, k, v)

    return measure_text(model, tokens, attend)


# ---------------------------------------------------------------------------- the command line: fit

# How the facts of a fit are said, by the artifact's name. Others are listed.
REPORTS = {
    "sals": report_sals,
    "loki": report_loki,
    "elitekv": report_elitekv,
    "fdc": report_fdc,
}


def fits_of(method: str) -> dict[str, str]:
    """Reads an option: the fit (Method.fit) of a method, or those of "all", by the artifact's name.

    Raises UserError for a method that needs no fit."""
    names = compress.method_names() if method == "all" else [method]
    fits = {}
    for name in names:
        row = method_named(name)
        if row.fit:
            fits[row.artifact] = row.fit
    if not fits:
        raise UserError(f"{method} needs no fit; run it by generate.py --method {method}")
    return fits


def link_files(source: Path, folder: Path) -> None:
    """Makes a folder of links to a checkpoint's files; those that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            with suppress(FileExistsError):
                (folder / file.name).symlink_to(file.resolve())


def report_fit(name: str, facts: dict[str, float]) -> str:
    """What a fit found, in sentences."""
    if name in REPORTS:
        return REPORTS[name](facts)
    return ", ".join(f"{fact} {figure:.6g}" for fact, figure in facts.items())


def run_fit(args: argparse.Namespace) -> None:
    """Fit what a method needs, and store it beside the checkpoint.

    It runs a text through the model, by default the sources of Python's standard library, so that
    nothing is downloaded. What it finds is written as METHOD.safetensors into the checkpoint's
    folder, where generate.py looks for it. More text (--windows) makes a better fit.

    --method all fits every method that can take the model. Where the checkpoint's folder cannot be
    written, as in a cache of Hugging Face, --out makes a folder with the fits and with links to the
    checkpoint's files; give that one to generate.py.

    examples:
        python calibrate.py fit --method sals
        python calibrate.py fit --checkpoint FOLDER --method all --out FITTED
        python calibrate.py fit --checkpoint FOLDER --method fdc --accuracy 0.95 --text FILE"""
    folder = args.out or args.checkpoint
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise UserError(f"no file can be written into {folder}; give --out FOLDER")
    model, tokens = model_and_windows(args)
    if args.out:
        link_files(args.checkpoint, args.out)

    source = {
        "text": str(args.text or "Python standard library"),
        "tokens": str(tokens.numel()),
        **compress.model_identity(model),
    }
    options = {
        "sals": {"max_rank": args.max_rank},
        "fdc": {
            "accuracy": args.accuracy,
            "positions": args.positions,
            "bases_from": args.bases_from,
        },
    }
    for name, function_name in args.fits.items():
        fit = resolve_name(function_name)
        try:
            tensors, facts = fit(model, tokens, **options.get(name, {}))
        except UserError as error:
            if len(args.fits) == 1:
                raise
            print(f"{name}: not fitted: {error}", file=sys.stderr)
            continue
        metadata = {"method": name, **source}
        for fact, figure in facts.items():
            metadata[fact] = f"{figure:.6g}"
        path = compress.artifact_path(folder, name)
        if args.out and path.is_symlink():  # by link_files: what it leads to stays as it is
            path.unlink()
        save_artifact(tensors, path, metadata)
        print(f"{path}: {report_fit(name, facts)}", flush=True)


# -------------------------------------------------------------------------- the command line: ranks


def run_ranks(args: argparse.Namespace) -> dict:
    """Show how many dims the keys of each layer need, and how unlike its heads are.

    A rank is the number of joint dims of all heads that hold 90 % of the keys' energy, before RoPE
    and after it. Where it is small, a latent (SALS) loses little. cv_qk and cv_v are the standard
    deviation over the mean of the heads' largest singular values, of q and k after RoPE and of W_V.
    Where they are large, a rank for each head (FDC) pays.

    examples:
        python calibrate.py ranks
        python calibrate.py ranks --checkpoint FOLDER --windows 8 --window 512 --csv ranks.csv"""
    model, tokens = model_and_windows(args)
    c = model.config
    moments_by_rope = key_moments(model, tokens)
    bases = fdc_bases(model, tokens, c.max_positions)

    figures = {"layer": list(range(c.n_layers))}
    print(f"Rank@90% of the joint keys ({c.kv_dim} dims), {tokens.numel()} tokens")
    for name, moments in moments_by_rope.items():
        values, _ = eigen(moments.second)
        ranks = compress.rank_at(values, 0.9).tolist()
        figures[name] = ranks
        print(f"{name}-RoPE, mean {np.mean(ranks):.1f}, by layer:", *ranks)
    for kind in ("qk", "v"):
        largest = bases[f"{kind}.values"][..., 0]  # [L, Hkv]
        of_layers = largest.std(1, correction=0) / largest.mean(1)
        of_all = largest.std(correction=0) / largest.mean()
        figures[f"cv_{kind}"] = of_layers.tolist()
        print(f"cv_{kind}: {of_all:.3f} over the heads of all layers")

    if args.csv:
        rows = []
        for i in range(c.n_layers):
            rows.append({name: column[i] for name, column in figures.items()})
        save_csv(args.csv, list(figures), rows)
    return {"width": c.kv_dim, **figures}


# ------------------------------------------------------------------------ the command line: options


def add_command(commands, name: str, run: Callable[[argparse.Namespace], dict | None]) -> Parser:
    """A command that calls run; the docstring of that is the command's help."""
    description = inspect.getdoc(run)
    summary = description.split("\n")[0].rstrip(".")
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    return parser


def add_text_options(parser: Parser) -> None:
    text = "a text file or a folder of texts (default: the Python standard library)"
    parser.option("--text", Path, None, text, metavar="PATH")
    parser.option("--windows", whole(1), 128, "how many windows of text to read", metavar="N")
    parser.option("--window", whole(2), 2048, "tokens in a window", metavar="N")


def result_options(parser: Parser) -> None:
    """Options of a command that makes a table."""
    parser.flag("--json", "one JSON object as the last line of stdout")
    parser.option("--csv", writable_file, None, "also write the table to this file")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    fit = add_command(commands, "fit", run_fit)
    generate.add_model_options(fit)
    add_text_options(fit)
    method = "sals, loki, elitekv, fdc or another method that needs a fit; 'all' fits every one"
    fit.option("--method", fits_of, None, method, required=True, dest="fits", metavar="METHOD")
    max_rank = "sals: the largest --rank that can be chosen later, a fraction of the key dims"
    fit.option("--max_rank", fraction, 0.625, max_rank, metavar="FRACTION")
    out = "write the fits there, beside links to the checkpoint's files"
    fit.option("--out", writable_folder, None, out, metavar="FOLDER")
    accuracy = "fdc: the fraction of the dense model's next-token accuracy to keep"
    fit.option("--accuracy", fraction, 0.99, accuracy, metavar="FRACTION")
    positions = "fdc: the longest context to be served (default: the model's)"
    fit.option("--positions", whole(1), None, positions, metavar="N")
    bases_from = "fdc: find R from random tokens, as the paper does, or from the text"
    fit.option("--bases_from", str, "random", bases_from, choices=("random", "text"))

    ranks = add_command(commands, "ranks", run_ranks)
    generate.add_model_options(ranks)
    add_text_options(ranks)
    result_options(ranks)
    return parser.parse_args(argv)


MOVED = {"eval": "python -m extras.evaluate", "train": "python -m extras.train"}


def run() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in MOVED:
        raise UserError(f"calibrate.py {command} has moved; run {MOVED[command]}")
    args = parse_args(sys.argv[1:])
    if generate.is_one_of_several_processes():
        raise UserError("a fit runs in one process; start it with python, not with torchrun")
    figures = args.run(args)
    if figures and args.json:
        report = {"command": " ".join(sys.argv), "torch": torch.__version__, **figures}
        print(json.dumps(report))


if __name__ == "__main__":
    # An extra that imports calibrate gets this module, not a second copy of it.
    sys.modules["calibrate"] = sys.modules["__main__"]
    generate.run_command(run)
