"""Triton kernels of the compressed caches, each with a thin wrapper that checks its input.

`python kernels.py` benchmarks them.

B rows of a batch, S cached tokens (the capacity), Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head
dim, r rank. `pos` [B] int32 is the position of every row's newest token and is read on the device only, so
that one CUDA graph is right for every length. No kernel needs the rest of the project: copy one together with
its wrapper.
"""

import argparse
import copy
import csv
import functools
import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: the PyTorch path runs, and a wrapper says what is missing
    triton = None


def jit(function):
    return triton.jit(function) if triton else function


def constexpr_function(function):
    """Makes what runs in Python when a kernel is compiled."""
    return triton.constexpr_function(function) if triton else function


class _NoTriton:
    """Stands in for triton.language, so that the annotations of the kernels below can be read without it."""

    constexpr = int


if triton is None:
    tl = _NoTriton

SMS = 132  # multiprocessors of an H100/H200: how many programs it takes to fill the chip
LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2)) if triton else math.log(2)  # which kernels read


def operator(fake, mutates: tuple = (), library: str = "kv_kernels"):
    """Makes a wrapper a PyTorch operator, which torch.compile calls as it is; `fake` shapes its result."""

    def wrap(function):
        made = torch.library.custom_op(f"{library}::{function.__name__}", function, mutates_args=mutates)
        made.register_fake(fake)
        return made

    return wrap


def need(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def check(pos: Tensor, rows: int, **tensors: Tensor) -> None:
    """What most wrappers ask: pos is int32 [B], and what `together` asks of it and the tensors."""
    need(
        pos.dtype == torch.int32 and pos.shape == (rows,), f"pos must be int32 [{rows}], not {describe(pos)}"
    )
    together(pos=pos, **tensors)


def together(**tensors: Tensor | None) -> None:
    """Asks that triton is there and that the tensors are contiguous, all on the first one's device."""
    if triton is None:
        raise RuntimeError("triton is not installed: use the PyTorch path")
    first = next(iter(tensors))
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor is not None:
            need(tensor.device == device, f"{name} is on {tensor.device}, {first} on {device}")
            need(tensor.is_contiguous(), f"{name} {list(tensor.shape)} must be contiguous")


def describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def shape(name: str, x: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> None:
    need(x.shape == sizes, f"{name} must be {list(sizes)}, not {list(x.shape)}")
    need(dtype is None or x.dtype == dtype, f"{name} must be {dtype}, not {x.dtype}")


def check_blocks(blocks: tuple[int, ...], S: int, block: int) -> None:
    """Raises ValueError where the queries of `blocks` blocks of S tokens (none: one for all) are not so many,
    or a tile would lie in two blocks."""
    need(
        tuple(blocks) == ((cdiv(S, block),) if block else ()),
        f"no queries for blocks of {block} of {S} tokens",
    )
    need(block % 16 == 0, f"block is {block}, not a multiple of 16")


def tile_itemsize(dtype: torch.dtype, latent: Tensor) -> int:
    """The bytes of a number that tiles are chosen by: in fp32 models codes, too, are multiplied as fp32."""
    return 4 if dtype == torch.float32 else latent.element_size()


def nvidia_generation(device: torch.device) -> int:
    """The major compute capability, 9 for Hopper; 0 where the device is no NVIDIA GPU."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if nvidia else 0


def roomy(device: torch.device) -> bool:
    """Whether a program can have 160 KB of shared memory (A100, H100), and not only the 99 KB of other
    GPUs."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024


def power2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def value_group(D: int, bits: int) -> int:
    """Channels that share a minimum and a scale, as compress.Rows has them: 32, or all of a narrow head."""
    group = min(32, D)
    need(bits in (2, 4, 8, 16), f"bits must be 2, 4, 8 or 16, not {bits}")
    fits = bits == 16 or (D % group == 0 and group == power2(group))
    need(fits, f"values of {bits} bits need a head dim of 16 or a multiple of 32, not {D}")
    return group


def check_values(
    pos: Tensor, values: Tensor, low_scale: Tensor | None, rows: tuple, D: int, bits: int, dtype: torch.dtype
) -> None:
    """Asks that values of `rows` (B first) are codes [*rows, D*bits/8] uint8 with low_scale
    [*rows, D/group, 2] fp16, or at 16 bits plain V [*rows, D] of the model's dtype, low_scale unused."""
    group = value_group(D, bits)
    check(pos, rows[0], values=values)
    if bits == 16:
        shape("values", values, *rows, D, dtype=dtype)
        return
    need(low_scale is not None, f"values of {bits} bits need low_scale")
    shape("values", values, *rows, D * bits // 8, dtype=torch.uint8)
    shape("low_scale", low_scale, *rows, D // group, 2, dtype=torch.float16)
    check(pos, rows[0], low_scale=low_scale)


def value_words(values: Tensor, low_scale: Tensor | None, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Values as the kernels read them: codes, and a group's minimum and scale, as words of 32 bits; plain V
    as it is, with pos in the place of low_scale, which is not read."""
    if values.dtype != torch.uint8:
        return values, pos
    return values.view(torch.int32), low_scale.view(torch.int32)


def value_packing(D: int, bits: int) -> tuple[int, int, int, int, int, int]:
    """(BITS, GROUP, PLANES, WIDTH, RUNS, RUN) of a head's values: byte j < WIDTH holds a code of each plane;
    a plane is RUNS runs of RUN channels, each in one group, or where WIDTH is no power of 2 one padded run
    over several. Plain V is one plane of D numbers."""
    group, width = value_group(D, bits), D * bits // 8
    if bits == 16:
        return bits, 1, 1, D, 1, power2(D)
    run = min(group, width) if width == power2(width) else power2(width)
    return bits, group, 8 // bits, width, power2(width) // run, run


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ------------------------------------------------------------------------------------ launches that overlap


def overlapped(device: torch.device) -> dict:
    """Options of a launch that need not wait until the kernel before it has ended (programmatic dependent
    launch, NVIDIA GPUs from Hopper on): most of what lies between two kernels then passes meanwhile.

    A kernel launched so calls `_wait_for_previous` before it reads or writes anything but weights, in each
    group of specialised warps that does, and before `_let_next_begin`. So it never ends before all ahead of
    it have, and weights are safe unless the kernel right before wrote them. `_let_next_begin` may be left
    out: once all programs have called it, or ended, those of the next kernel are let in, to wait there. They
    take the room that is free or becomes free first, so that they crowd on some multiprocessors where more
    of them fit than are meant to: a kernel of such programs that fills the chip is let in by none, or is
    launched plainly (hopper.py's for keys in int8)."""
    return {"launch_pdl": True} if nvidia_generation(device) >= 9 else {}


@constexpr_function
def _overlaps():
    """Whether the GPU that a kernel is compiled for can launch it so."""
    return not triton.knobs.runtime.interpret and tl.target_info.cuda_capability_geq(9, 0)


@jit
def _wait_for_previous():
    """Waits until the kernel before has ended, and with it all before, for which it waited itself."""
    if _overlaps():
        tl.extra.cuda.gdc_wait()


@jit
def _let_next_begin():
    """Lets the programs of the next kernel in, once all programs of this one have called this."""
    if _overlaps():
        tl.extra.cuda.gdc_launch_dependents()


# ---------------------------------------------------------------------------------------------------- scores


@jit
def _nearest(x):
    """The int32 nearest to x, |x| < 2**22, ties to even as in torch.round: fp32 numbers around 2**23 + 2**22,
    whose bits are 0x4B400000, are the integers in turn."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@jit
def _split_int8(x, largest):
    """x [N, R] = (high * 254 + low) * largest [N] / (127 * 254), high and low int8."""
    x = x.to(tl.float32) * (127 / tl.maximum(largest, 1e-30))[:, None]
    rest = x - ((x + 12582912.0) - 12582912.0)  # beyond _nearest(x), without a conversion back to fp32
    return _nearest(x).to(tl.int8), _nearest(rest * 254).to(tl.int8)


@jit
def _split_rows(x):
    """x [N, R] = (high * 254 + low) * scale [N]: 15 bits of a row's largest number."""
    largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    high, low = _split_int8(x, largest)
    return high, low, largest / (127 * 254)


def softmax_config(HP: int, r_score: int, itemsize: int) -> tuple:
    """(tokens a tile, ranks a block, warps, stages, programs) by shape; HP: heads, padded."""
    if itemsize == 1 and r_score <= 512 and HP * r_score <= 32768:
        RB = max(32, power2(r_score))  # all ranks at once, so that queries are split into int8 codes
        if RB > 256:
            return 64, RB, 4, 2, 2 * SMS
        return (128, RB, 4, 2, 2 * SMS) if RB == 256 else (128, RB, 4, 3, 3 * SMS)
    RB = min(power2(max(r_score, 16)), 64)
    return (16, RB, 4, 3, 2 * SMS) if itemsize == 4 else (128, RB, 4, 3, 3 * SMS)


@jit
def _scores_kernel(
    query_p,  # [B, H, N, r*], or of blocks [B, blocks, H, N, r*]
    rows_p,  # [B, H, S, r], in steps of whole rows
    row_scale_p,  # [B, H, S] fp32, alike; None: rows are not int8
    pos_p,  # [B] int32
    kept_p,  # softmax: exp(logit - running maximum) [B, H, S, NP]; else logits [B, H, N, S] fp32
    tile_max_p,  # softmax: the running maximum of each tile [B, H, tiles, NP] fp32
    max_p,  # [B, H, splits, NP] fp32
    sum_p,  # [B, H, splits, NP] fp32
    query_steps, steps, S, N, r_score, r, scale, boost, tiles, per_block,
    T: tl.constexpr, RB: tl.constexpr, NR: tl.constexpr, NP: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Logits of a head's rows with its N queries, in log2 units but for the rule each, and what RULE sums."""
    _wait_for_previous()
    split, splits, h, H = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(pos_p + b) + 1
    n, dims = tl.arange(0, NP), tl.arange(0, RB)[None, :]
    # The tiles of this program, of the live ones only where a second kernel writes the scores.
    count = tiles if RULE == "each" else tl.cdiv(length, T)
    share = tl.cdiv(count, splits)
    first, stop = split * share, tl.minimum((split + 1) * share, count)
    query_p += b * query_steps[0] + h * query_steps[2]
    query_at = query_p + n[:, None] * r_score + dims
    # Int8 rows are multiplied as they are where the queries can be split once and for all tiles of a block.
    SPLIT: tl.constexpr = row_scale_p is not None and NR == 1 and query_p.dtype.element_ty != tl.float32
    top = tl.full([NP], float("-inf"), tl.float32)
    total = tl.zeros([T, NP], tl.float32)  # summed over T at the end, not in every tile
    for block in range(first // per_block, tl.cdiv(stop, per_block)):
        tile_query_at = query_at + tl.cast(block, tl.int64) * query_steps[1]
        if NR == 1:  # the queries stay, and the loop over tiles is the one whose loads are kept in flight
            query = tl.load(tile_query_at, mask=(n < N)[:, None] & (dims < r_score), other=0.0)
            if SPLIT:
                high, low, query_scale = _split_rows(query)
        for tile in range(tl.maximum(first, block * per_block), tl.minimum(stop, (block + 1) * per_block)):
            tokens = (tile * T + tl.arange(0, T)).to(tl.int64)
            live = tokens < length
            row = b * steps[0] + h * steps[1] + tokens * steps[2]
            logits = tl.zeros([T, NP], tl.float32)
            row_at = rows_p + row[:, None] * r + dims
            if NR == 1:
                rows = tl.load(row_at, mask=live[:, None] & (dims < r_score), other=0.0)
                if SPLIT:
                    coarse = tl.dot(rows, tl.trans(high), out_dtype=tl.int32).to(tl.float32)
                    fine = tl.dot(rows, tl.trans(low), out_dtype=tl.int32).to(tl.float32)
                    logits = (coarse * 254 + fine) * query_scale[None, :]
                else:
                    logits = tl.dot(rows.to(query.dtype), tl.trans(query), logits, input_precision="ieee")
            else:
                for i in range(0, NR * RB, RB):
                    inside = dims + i < r_score
                    rows = tl.load(row_at + i, mask=live[:, None] & inside, other=0.0)
                    part = tl.load(tile_query_at + i, mask=(n < N)[:, None] & inside, other=0.0)
                    logits = tl.dot(rows.to(part.dtype), tl.trans(part), logits, input_precision="ieee")
            if row_scale_p is not None:
                logits *= tl.load(row_scale_p + row, mask=live, other=0.0)[:, None]
            logits = tl.where(live[:, None], logits * scale, float("-inf"))
            if RULE != "softmax":
                at = kept_p + ((b * H + h) * N + n[None, :]) * S + tokens[:, None]
                tl.store(at, logits, mask=(tokens < S)[:, None] & (n < N)[None, :])
            if RULE != "each":
                new_top = tl.maximum(top, tl.max(logits, 0))
                weight = tl.exp2(logits - new_top[None, :])
                total = total * tl.exp2(top - new_top)[None, :] + weight
                top = new_top
            if RULE == "softmax":
                at = kept_p + ((b * H + h) * S + tokens[:, None]) * NP + n[None, :]
                tl.store(at, (weight * boost).to(kept_p.dtype.element_ty), mask=live[:, None])
                tl.store(tile_max_p + ((b * H + h) * tiles + tile) * NP + n, top)
    if RULE != "each":
        at = ((b * H + h) * splits + split) * NP + n
        tl.store(max_p + at, top)
        tl.store(sum_p + at, tl.sum(total, 0))


@jit
def _reduce_scores_kernel(
    kept_p,  # of _scores_kernel, as all but the last
    tile_max_p,
    max_p,
    sum_p,
    pos_p,  # [B] int32
    out_p,  # [B, H, S] fp32
    S, N, splits, boost, tiles,
    T: tl.constexpr, NP: tl.constexpr, NQ: tl.constexpr, SP: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """softmax: sum over the queries of exp(logit) / their sum; largest: of logit - log2 of that sum the
    largest. -inf beyond pos."""
    _wait_for_previous()
    _let_next_begin()
    h, H, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    length = tl.load(pos_p + b) + 1
    n, split = tl.arange(0, NQ), tl.arange(0, SP)
    at = ((b * H + h) * splits + split[:, None]) * NP + n[None, :]
    tops = tl.load(max_p + at, mask=(split < splits)[:, None], other=float("-inf"))
    sums = tl.load(sum_p + at, mask=(split < splits)[:, None], other=0.0)
    top = tl.maximum(tl.max(tops, 0), -1e30)
    total = tl.sum(sums * tl.exp2(tops - top[None, :]), 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        tokens = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = tokens < length
        if RULE == "softmax":
            some = (n < N) & (n * 0 + tile * T < length)
            tile_max_at = tile_max_p + ((b * H + h) * tiles + tile) * NP + n
            tile_top = tl.load(tile_max_at, mask=some, other=float("-inf"))
            factor = tl.where(some, tl.exp2(tile_top - top) / (total * boost), 0.0)
            kept_at = kept_p + ((b * H + h) * S + tokens[:, None]) * NP + n[None, :]
            kept = tl.load(kept_at, mask=live[:, None], other=0.0)
            score = tl.sum(kept.to(tl.float32) * factor[None, :], 1)
        else:
            kept_at = kept_p + ((b * H + h) * N + n[:, None]) * S + tokens[None, :]
            kept = tl.load(kept_at, mask=(n < N)[:, None] & live[None, :], other=float("-inf"))
            score = tl.max(kept - (top + tl.log2(tl.maximum(total, 1e-38)))[:, None], 0) * LN2
        tl.store(out_p + (b * H + h) * S + tokens, tl.where(live, score, float("-inf")), mask=tokens < S)


@operator(
    lambda queries, rows, row_scale, pos, scale, rule, block=0: rows.new_empty(
        (len(rows), rows.shape[1] * (queries.shape[-2] if rule == "each" else 1), rows.shape[2]),
        dtype=torch.float32,
    )
)
def scores(
    queries: Tensor, rows: Tensor, row_scale: Tensor | None, pos: Tensor, scale: float, rule: str,
    block: int = 0
) -> Tensor:  # fmt: skip
    """Scores of a row's tokens from the leading dims of what is stored of them, which is read once.

    queries [B, H, N, r*], or [B, n, H, N, r*], one for each block of `block` tokens, a multiple of 16;
    rows [B, H, S, r], a view (row_steps) of the same dtype, r* <= r, or int8 codes with row_scale [B, H, S]
    fp32. Logits are q . row * scale over the tokens up to pos. rule:
        each     a score a query, its logit -> [B, H * N, S]
        softmax  the sum over a head's queries of the softmax of their logits -> [B, H, S]
        largest  the largest of the log-softmax of a head's queries -> [B, H, S]
    fp32, -inf beyond pos. For softmax a program keeps exp(logit - running maximum) in half precision (2 bytes
    a query and token) until maximum and sum of the row are known; a second kernel multiplies it by
    exp(that maximum - maximum) / sum. Truth: compress.sals_scores and group_scores."""
    *_, H, N, r_score = queries.shape
    (B, _, S, r), blocks = rows.shape, queries.shape[1:-3]
    need(
        len(queries) == B and H == rows.shape[1] and r_score <= r,
        f"queries {list(queries.shape)} do not fit rows {list(rows.shape)}",
    )
    need(rule in ("each", "softmax", "largest"), f"no rule {rule}")
    check_blocks(blocks, S, block)
    check(pos, B)
    steps, exact = row_steps("rows", rows), queries.dtype == torch.float32
    need(rows.dtype == (queries.dtype if row_scale is None else torch.int8), f"rows are {rows.dtype}")
    if row_scale is not None:
        shape("row_scale", row_scale, B, H, S, dtype=torch.float32)
        need(row_scale.stride() == steps, "the scales of rows must lie as the rows do")
    need(queries[0].is_contiguous(), "the queries of a row must be contiguous")
    query_steps = (queries.stride(0), H * N * r_score, N * r_score)
    if rule == "largest" and N == 1:
        rule = "each"  # which ranks tokens alike
    NP = max(16, power2(N))
    T, RB, warps, stages, programs = softmax_config(NP, r_score, tile_itemsize(queries.dtype, rows))
    if block:
        T = min(T, block & -block)  # a power of two that divides it
    tiles = cdiv(S, T)
    # Every program of the second kernel reads the sums of all splits.
    splits = max(1, min(tiles, programs // (B * H), max(128, 256 // B)))
    empty = functools.partial(torch.empty, device=rows.device)
    # Halves of up to 2**15 keep 2**39 of range below the maximum: more than a score can notice.
    boost, soft = 1.0 if exact else 2.0**15, rule == "softmax"
    if soft:
        kept = empty(B, H, S, NP, dtype=torch.float32 if exact else torch.float16)
    else:
        kept = empty(B, H * N, S, dtype=torch.float32)
    tile_max = empty(B, H, tiles if soft else 0, NP, dtype=torch.float32)
    tops, sums = empty(2, B, H, splits if rule != "each" else 0, NP, dtype=torch.float32)
    _scores_kernel[splits, H, B](
        queries, rows, row_scale, pos, kept, tile_max, tops, sums, query_steps, steps, S, N, r_score, r,
        scale * (1 if rule == "each" else LOG2E), boost, tiles, block // T if block else tiles, T, RB,
        cdiv(r_score, RB), NP, rule, num_warps=warps, num_stages=stages, **overlapped(rows.device),
    )  # fmt: skip
    if rule == "each":
        return kept
    out = empty(B, H, S, dtype=torch.float32)
    NQ, T, fill = (NP, T, 4) if soft else (power2(N), 512, 16)
    tiles = cdiv(S, T)
    _reduce_scores_kernel[max(1, min(tiles, fill * SMS // (B * H))), H, B](
        kept, tile_max, tops, sums, pos, out, S, N, splits, boost, tiles, T, NP, NQ, power2(splits), rule,
        num_warps=4, **overlapped(rows.device),
    )  # fmt: skip
    return out


# -------------------------------------------------------------------------------------------------- selection


@jit
def _sort_key(x):
    """An int32 that orders as the fp32 number does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _bracket(keys):
    """Of the keys that are alive (dead ones are -2**31): how many, the least, and more than the largest."""
    alive = keys > -2147483648
    return tl.sum(alive.to(tl.int32)), tl.min(tl.where(alive, keys, 2147483646)), tl.max(keys) + 1


@jit
def _start(count, lo, hi, most):
    """lo, hi, count(keys >= lo), count(keys >= hi) of a first bracket: lo = hi below all keys that are alive,
    if these are at most `most`."""
    few = count <= most
    return tl.where(few, -2147483647, lo), tl.where(few, -2147483647, hi), count, tl.where(few, count, 0)


@jit
def _guesses(lo, hi, count_lo, count_hi, goal):
    """Two keys between lo and hi: where interpolation on the counts sees the goal, and the middle, so that 32
    steps always find it."""
    # 32-bit scalars only, as 64-bit ones double the latency of a step; fp32 is exact enough for a guess.
    share = (count_lo.to(tl.float32) - goal) / (count_lo - count_hi).to(tl.float32)
    guess = (lo.to(tl.float32) + (hi.to(tl.float32) - lo.to(tl.float32)) * share).to(tl.int32)
    guess = tl.minimum(tl.maximum(guess, lo + 1), hi - 1)
    middle = (lo & hi) + ((lo ^ hi) >> 1)
    return tl.minimum(guess, middle), tl.maximum(guess, middle)


@jit
def _narrow(left, right, many, few, lo, hi, count_lo, count_hi, most):
    """The bracket lo, hi (more than `most` keys reach lo, at most that many hi) once `many` keys are known to
    reach left and `few` to reach right."""
    above_left, above_right = many > most, few > most  # the threshold is
    count_hi = tl.where(above_right, count_hi, tl.where(above_left, few, many))
    count_lo = tl.where(above_right, few, tl.where(above_left, many, count_lo))
    hi = tl.where(above_right, hi, tl.where(above_left, right, left))
    lo = tl.where(above_right, right, tl.where(above_left, left, lo))
    return lo, hi, count_lo, count_hi


@jit
def _threshold(keys, least, most):
    """lo, hi, count(keys >= hi): the count lies in least..most, or is less where fewer keys are alive (then
    lo = hi) or keys equal to lo = hi - 1 tie."""
    count, lo, hi = _bracket(keys)
    lo, hi, count_lo, count_hi = _start(count, lo, hi, most)
    while (count_hi < least) & (hi > lo + 1):
        left, right = _guesses(lo, hi, count_lo, count_hi, (least + most) * 0.5)
        counts = tl.sum(tl.where(keys >= right, 65537, tl.where(keys >= left, 1, 0)))
        many, few = counts & 65535, (counts >> 16) & 65535  # of at most 2**15 keys each
        lo, hi, count_lo, count_hi = _narrow(left, right, many, few, lo, hi, count_lo, count_hi, most)
    return lo, hi, count_hi


@jit
def _places(keep):
    """Where the kept of a tile [C, R] go, 0, 1, .., one row after another: a row lies in one thread, so that
    only C counts are summed across threads."""
    keep = keep.to(tl.int32)
    counts = tl.sum(keep, 1)
    return (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(keep, 1) - 1


@jit
def _tile_of(N: tl.constexpr, C: tl.constexpr):
    """0 .. N - 1 as a tile [C, N / C], neighbours in a column.

    The hint keeps loads at one number a thread, as a scatter has them: where they differ, all pointers move
    through shared memory."""
    i = tl.arange(0, C)[:, None] + tl.arange(0, N // C)[None, :] * C
    return tl.max_contiguous(i, [1, 1])


@jit
def _keys_at(scores_p, j, S, x, last):
    """Sort keys of tokens j; those that are no candidates are dead."""
    score = tl.load(scores_p + j, mask=j < S, other=0.0)
    alive = (j >= x) & (j <= last) & (j < S) & (score > float("-inf"))
    return tl.where(alive, _sort_key(score), -2147483648)


@jit
def _survivors_kernel(
    scores_p, pos_p, key_p, index_p, cut_p, S, x, z, least, chunks, N: tl.constexpr, C: tl.constexpr,
    CAP: tl.constexpr
):  # fmt: skip
    _wait_for_previous()
    _let_next_begin()
    b, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    last = tl.load(pos_p + b) - z
    # Chunks interleave in runs of 4, so that runs of high scores spread over all of them.
    i = _tile_of(N, C)
    j = ((i // 4) * chunks + chunk) * 4 + i % 4
    keys = _keys_at(scores_p + b * S, j, S, x, last)
    _, hi, count = _threshold(keys, least, CAP)
    keep = keys >= hi
    slot = (b * chunks + chunk) * CAP
    place = slot + _places(keep)
    tl.store(key_p + place, keys, mask=keep)
    tl.store(index_p + place, j, mask=keep)
    rest = tl.arange(0, CAP)
    tl.store(key_p + slot + rest, tl.full([CAP], -2147483648, tl.int32), mask=rest >= count)
    tl.store(cut_p + b * chunks + chunk, hi)


@jit
def _select_kernel(
    scores_p, pos_p, wanted_p, key_p, index_p, cut_p, out_p, S, x, y, z, N: tl.constexpr, C: tl.constexpr,
    CHUNKS: tl.constexpr, XP: tl.constexpr, YP: tl.constexpr, LEVEL: tl.constexpr
):  # fmt: skip
    _wait_for_previous()
    _let_next_begin()
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(pos_p + b) - z  # the newest token outside of the recent window
    want = y if wanted_p is None else tl.minimum(tl.load(wanted_p + b), y)
    scores_p += b * S
    out_p += b * (x + y)
    i = _tile_of(N, C)
    done = LEVEL < 3
    total = 0
    if LEVEL < 3:
        if LEVEL == 1:
            index = i
            keys = _keys_at(scores_p, i, S, x, last)
        else:
            cut = tl.load(cut_p + b * CHUNKS + tl.arange(0, CHUNKS))
            keys = tl.load(key_p + b * N + i)
            index = tl.load(index_p + b * N + i)
        lo, hi, total = _threshold(keys, want, want)
        if LEVEL == 2:  # a chunk dropped only keys below its cut: exact unless one could pass the threshold
            done = tl.max(cut, 0) <= hi
        keep = keys >= hi
        if (total < want) & (lo < hi):
            tie = keys == lo
            keep = keep | (tie & (_places(tie) < want - total))
            total = total * 0 + want
        tl.store(out_p + x + _places(keep), index, mask=keep)
    if not done:  # the same over the whole row, tile by tile
        count, lo, hi = last * 0, last * 0 + 2147483646, last * 0 - 2147483647
        for start in range(0, S, N):
            more, least, beyond = _bracket(_keys_at(scores_p, start + i, S, x, last))
            count, lo, hi = count + more, tl.minimum(lo, least), tl.maximum(hi, beyond)
        lo, hi, count_lo, count_hi = _start(count, lo, hi, want)
        while (count_hi < want) & (hi > lo + 1):
            left, right = _guesses(lo, hi, count_lo, count_hi, want * 1.0)
            many, few = last * 0, last * 0
            for start in range(0, S, N):
                keys = _keys_at(scores_p, start + i, S, x, last)
                many += tl.sum((keys >= left).to(tl.int32))
                few += tl.sum((keys >= right).to(tl.int32))
            lo, hi, count_lo, count_hi = _narrow(left, right, many, few, lo, hi, count_lo, count_hi, want)
        total, tied = last * 0, last * 0
        for start in range(0, S, N):
            keys = _keys_at(scores_p, start + i, S, x, last)
            tie = keys == lo
            keep = (keys >= hi) | (tie & (tied + _places(tie) < want - count_hi))
            tl.store(out_p + x + total + _places(keep), start + i, mask=keep)
            total += tl.sum(keep.to(tl.int32))
            tied += tl.sum(tie.to(tl.int32))
    sink, rest = tl.arange(0, XP), tl.arange(0, YP)
    tl.store(out_p + sink, tl.where(sink <= last, sink, -1), mask=sink < x)
    tl.store(out_p + x + rest, tl.full([YP], -1, tl.int32), mask=(rest >= total) & (rest < y))


@operator(lambda scores, pos, x, y, z, wanted=None: pos.new_empty(len(pos), x + y))
def select(scores: Tensor, pos: Tensor, x: int, y: int, z: int, wanted: Tensor | None = None) -> Tensor:
    """The x sinks and the exact top y of the tokens between sinks and recent window.

    scores [B, S] fp32, pos [B] -> index [B, x + y] int32; -1 stands where a row has no such token. wanted [B]
    int32: how many of the y a row takes, all if not given. Candidates are x <= j <= pos - z with a score
    above -inf. Of equal scores at the threshold any may be chosen, always the same ones. Order: sinks first,
    the rest the same from run to run but not sorted. Truth: compress.select (the same set). Long rows take
    two kernels: chunks keep a few more than their share of y, one program a row selects among those, and
    checks that no chunk dropped a key above the result (if one did: a slow but exact pass over the whole
    row)."""
    need(
        scores.ndim == 2 and scores.dtype == torch.float32,
        f"scores must be fp32 [B, S], not {describe(scores)}",
    )
    B, S = scores.shape
    need(min(x, z) >= 0 and y >= 1, f"x {x} and z {z} must not be negative, y {y} must be at least 1")
    check(pos, B, scores=scores)
    if wanted is not None:
        shape("wanted", wanted, B, dtype=torch.int32)
        check(pos, B, wanted=wanted)
    out = torch.empty(B, x + y, dtype=torch.int32, device=scores.device)
    XP, YP = power2(x), power2(y)
    plan = select_chunks(S, y)
    if plan is None:  # one program a row; beyond 8192 tokens the slow pass
        level, N = (3, 8192) if select_passes(S, y) else (1, max(128, power2(S)))
        C, warps = select_config(N)
        _select_kernel[B,](
            scores, pos, wanted, scores, scores, scores, out, S, x, y, z, N, C, 1, XP, YP, level,
            num_warps=warps, **overlapped(scores.device),
        )  # fmt: skip
        return out
    chunks, N, least, CAP = plan
    width = chunks * CAP
    keys, index = torch.empty(2, B, width, dtype=torch.int32, device=scores.device)
    cut = torch.empty(B, chunks, dtype=torch.int32, device=scores.device)
    C, warps = select_config(N, chunk=True)
    _survivors_kernel[chunks, B](
        scores, pos, keys, index, cut, S, x, z, least, chunks, N, C, CAP, num_warps=warps,
        **overlapped(scores.device),
    )  # fmt: skip
    C, warps = select_config(width)
    _select_kernel[B,](
        scores, pos, wanted, keys, index, cut, out, S, x, y, z, width, C, chunks, XP, YP, 2, num_warps=warps,
        **overlapped(scores.device),
    )  # fmt: skip
    return out


def select_chunks(S: int, y: int) -> tuple[int, int, int, int] | None:
    """How `select` cuts a row: (chunks, tokens of one, survivors of one at least, at most), powers of two but
    for the third; None where one program takes it: up to 4096 tokens, or if chunks would keep too much."""
    for tokens in (1024, 2048):  # of long rows more
        chunks = min(128, max(min(32, power2(cdiv(S, tokens))), power2(cdiv(S, 8192))))
        N = power2(cdiv(cdiv(S, 4), chunks) * 4)
        part = cdiv(y, chunks)
        least, most = part + int(3 * part**0.5) + 8, power2(part + int(6 * part**0.5) + 16)
        if S > 4096 and most < N and max(N, chunks * most) <= 32768:
            return chunks, N, least, most
    return None


def select_passes(S: int, y: int) -> bool:
    """Whether `select` must pass over such a row many times, since no chunks fit: topk is faster then."""
    return S > 8192 and select_chunks(S, y) is None


def select_config(N: int, chunk: bool = False) -> tuple[int, int]:
    """(rows of a tile of N keys: one a thread, warps). A chunk is searched less, so that loads weigh more."""
    warps = max(4, min(32, N // (256 if chunk else 512)))
    return min(N, 32 * warps), warps


# ---------------------------------------------------------------- what the kernels that attend have in common


@jit
def _half_at(words, shift: tl.constexpr):
    return ((words >> shift) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _load_rope(rope_p, at, mask, WORDS: tl.constexpr):
    """cos and sin of a position's pair: two halves of a 32-bit word, or two fp32 numbers."""
    if WORDS:
        word = tl.load(rope_p + at, mask=mask, other=0)
        return _half_at(word, 0), _half_at(word, 16)
    else:
        return tl.load(rope_p + 2 * at, mask=mask, other=0.0), tl.load(
            rope_p + 2 * at + 1, mask=mask, other=0.0
        )


@constexpr_function
def _largest_sum(dtype):
    """Sums of int8 products can exceed fp16's range. In fp16 the keys are divided by this, and the query is
    multiplied by it."""
    return 1024.0 if dtype == tl.float16 else 1.0


@jit
def _columns(PLANES: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr):
    """Column c of an unpacked tile of V is channel (plane, byte), padded where a plane is no power of two
    wide: the channel and whether it exists [C]."""
    column = tl.arange(0, PLANES * RUNS * RUN)
    byte = column % (RUNS * RUN)
    return (column // (RUNS * RUN)) * WIDTH + byte, byte < WIDTH


@jit
def _load_values(
    codes_p, low_scale_p, head, live, D: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr,
    WIDTH: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Words of four bytes of codes [T, 1, RUNS, RUN / 4, 1], and the minimum and scale of their groups as one
    32-bit word each: of a plane's run [T, PLANES, RUNS, 1, 1], or where planes are padded (then RUNS = 1) of
    its words [T, PLANES, 1, RUN / 4, 1]."""
    T: tl.constexpr = head.shape[0]
    word = tl.arange(0, RUNS * RUN // 4)[None, :]
    code_p = codes_p + head[:, None] * (WIDTH // 4) + word
    pair_p = low_scale_p + head[:, None, None, None, None] * (D // GROUP)
    channel = tl.arange(0, PLANES)[None, :, None, None, None] * WIDTH  # the first of each plane
    alive = live[:, None, None, None, None]
    if RUNS * RUN == WIDTH:
        code = tl.load(code_p, mask=live[:, None], other=0)
        if RUN == GROUP:  # the groups lie in this order: one wide load
            pair_at = low_scale_p + head[:, None] * (D // GROUP) + tl.arange(0, PLANES * RUNS)[None, :]
            pairs = tl.reshape(tl.load(pair_at, mask=live[:, None], other=0), [T, PLANES, RUNS, 1, 1])
        else:  # a plane is one run, of less than a group
            pairs = tl.load(pair_p + channel // GROUP, mask=alive, other=0)
    else:
        code = tl.load(code_p, mask=live[:, None] & (word < WIDTH // 4), other=0)
        channel += tl.arange(0, RUN // 4)[None, None, None, :, None] * 4  # the first of each word
        pairs = tl.load(pair_p + tl.minimum(channel, D - 1) // GROUP, mask=alive, other=0)
    return tl.reshape(code, [T, 1, RUNS, RUN // 4, 1]), pairs


@jit
def _decode(code, pairs, dtype: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr):
    """Words of codes and of their groups' (minimum, scale) -> code, low, step: value = code * step + low."""
    plane = tl.arange(0, PLANES)[None, :, None, None, None]
    byte = tl.arange(0, 4)[None, None, None, None, :]
    # A byte as the top bits of a mantissa, all but one of its codes masked out, reads 1 + code / 2**n, n = 8
    # less the bit where the code starts: no conversion (those run at a quarter of the rate), and one rotation
    # for all codes of the byte. The 1 stands for up to 256 steps, which costs sums 8 bits: too many for fp32,
    # where each code is rotated to the top by itself (n = BITS).
    SPAN: tl.constexpr = BITS if dtype == tl.float32 else 8
    plane *= BITS  # the bit of a byte where its codes start
    turn = (23 - SPAN - plane // SPAN * SPAN - byte * 8) & 31  # never 0; a rotation is one instruction
    mask = ((1 << BITS) - 1) << (23 - SPAN + plane % SPAN)
    step = _half_at(pairs, 16) * (1 << (SPAN - plane % SPAN)).to(tl.float32)
    code = code.to(tl.uint32, bitcast=True)
    code = ((code << turn) | (code >> (32 - turn))) & mask
    return (code | 0x3F800000).to(tl.float32, bitcast=True), _half_at(pairs, 0) - step, step


@jit
def _merge_parts(top, top_p, sum_p, part_p, first, count, step, D, d, inside, SB: tl.constexpr):
    """Of parts first, first + step, .. of a softmax, SB at a time, their maximum and top, and for that their
    sum and their row of numbers d of D."""
    top = tl.maximum(top, tl.max(tl.full([SB], -1e30, tl.float32), 0))
    total = tl.sum(tl.zeros([SB], tl.float32), 0)
    out = tl.zeros(d.shape, tl.float32)
    for start in range(0, count, SB):
        part = start + tl.arange(0, SB)
        at = first + part * step
        tops = tl.load(top_p + at, mask=part < count, other=-1e30)
        sums = tl.load(sum_p + at, mask=part < count, other=0.0)
        mask = (part < count)[:, None] & inside[None, :]
        parts = tl.load(part_p + at[:, None] * D + d[None, :], mask=mask, other=0.0)  # empty ones are 0
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - new_top)
        total = total * tl.exp2(top - new_top) + tl.sum(sums * weight, 0)
        out = out * tl.exp2(top - new_top) + tl.sum(parts * weight[:, None], 0)
        top = new_top
    return top, total, out


@jit
def _attend_tile(logits, live, v, top, total, out):
    """Online softmax: logits [T, GP] in log2 units, live [T], v [T, C] -> top [GP], total [T, GP] (summed
    over T at the end, not in every tile) and out [C, GP] with this tile; of one query out [T, C], likewise
    summed at the end."""
    logits = tl.where(live[:, None], logits, -1e30)
    new_top = tl.maximum(top, tl.max(logits, 0))
    weight = tl.where(live[:, None], tl.exp2(logits - new_top[None, :]), 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink[None, :] + weight
    if logits.shape[1] == 1:
        out = out * shrink[None, :] + v * weight
    else:
        out = tl.dot(tl.trans(v), weight.to(v.dtype), out * shrink[None, :], input_precision="ieee")
    return new_top, total, out


@jit
def _merge_kernel(top_p, sum_p, part_p, out_p, splits, D: tl.constexpr, DP: tl.constexpr, SB: tl.constexpr):
    _wait_for_previous()
    _let_next_begin()
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    _, total, out = _merge_parts(-1e30, top_p, sum_p, part_p, head * splits, splits, 1, D, d, d < D, SB)
    tl.store(out_p + head * D + d, (out / total).to(out_p.dtype.element_ty), mask=d < D)


def split_outputs(q: Tensor, splits: int, D: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result [B, Hq, D] for queries q, and what each of a head's splits leaves for merge_splits: its
    maximum and its sum [B, Hq, splits] and its part [B, Hq, splits, D], fp32; one split writes the result.
    D: the values' width where it is not q's."""
    B, Hq, D = (*q.shape[:2], D or q.shape[2])
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    tops, sums = torch.empty(2, B, Hq, splits, dtype=torch.float32, device=q.device)
    parts = out if splits == 1 else torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
    return out, tops, sums, parts


def merge_splits(out: Tensor, tops: Tensor, sums: Tensor, parts: Tensor) -> Tensor:
    """out, from the splits of split_outputs by log-sum-exp."""
    (B, Hq, D), splits = out.shape, tops.shape[-1]
    if splits > 1:
        SB, warps = min(16, power2(splits)), 1
        if splits > 16 and D <= 128:  # wider ones would run out of registers
            SB, warps = 64, 2
        _merge_kernel[B * Hq,](
            tops, sums, parts, out, splits, D, power2(D), SB, num_warps=warps, **overlapped(out.device)
        )
    return out


def rope_pairs(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """cos and sin [P, D/2] side by side, [P, D/2, 2], as the kernels read them: fp32 beside caches of fp32,
    else fp16, 4 bytes a pair (an eighth of bf16's rounding)."""
    return torch.stack((cos, sin), -1).to(torch.float32 if dtype == torch.float32 else torch.float16)


def rope_words(rope: Tensor, positions: int, D: int, dtype: torch.dtype) -> Tensor:
    """Checks a table of rope_pairs and shows its halves as words."""
    kind = torch.float32 if dtype == torch.float32 else torch.float16
    need(rope.ndim == 3 and len(rope) >= positions, f"rope has {len(rope)} positions, the cache {positions}")
    shape("rope", rope, len(rope), D // 2, 2, dtype=kind)
    return rope if kind == torch.float32 else rope.view(torch.int32)


def interleave_rope(basis: Tensor, n_kv_heads: int) -> Tensor:
    """The basis as attend wants it: dims of a RoPE pair side by side, heads padded to a power of two.

    basis [Hkv*D, r] -> [Hkv, DP, r]: dim 2c is old dim c, dim 2c + 1 is old dim c + D/2, DP - D zero rows
    after them."""
    heads = basis.unflatten(0, (n_kv_heads, 2, -1))  # [Hkv, 2, D/2, r]
    paired = heads.transpose(1, 2).flatten(1, 2)
    padding = power2(paired.shape[1]) - paired.shape[1]
    return torch.nn.functional.pad(paired, (0, 0, 0, padding)).contiguous()


# ------------------------------------------------------------------------------ attention over stored tokens
#
# A store is a matrix. A row belongs to one token of one KV head: it is number b * steps[0] + h * steps[1] +
# token * steps[2]. A format of keys is two functions: QUERIES prepares a group's queries once, LOGITS
# multiplies them with the keys of a tile of rows. A format of values is one function: VALUES, a tile of rows
# in q's dtype. SHAPE holds a launch's sizes: queries of a group G, padded to GP; key dims D, padded to DP;
# and for latents their rank r and how many ranks a product takes, KB. PACKING: of value_packing.


@jit
def _plain_queries(q_p, b, h, keys, SHAPE: tl.constexpr):
    """The queries of a group as columns, [DP, GP]."""
    g, d = tl.arange(0, SHAPE[1]), tl.arange(0, SHAPE[3])
    real = (g < SHAPE[0])[None, :] & (d < SHAPE[2])[:, None]
    return tl.load(q_p + g[None, :] * SHAPE[2] + d[:, None], mask=real, other=0.0)


@jit
def _plain_logits(query, keys, b, h, row, place, token, live, pos, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of 16-bit or fp32 keys, rows [.., D]."""
    d = tl.arange(0, SHAPE[3])
    mask = live[:, None] & (d < SHAPE[2])[None, :]
    k = tl.load(keys[0] + row[:, None] * SHAPE[2] + d[None, :], mask=mask, other=0.0)
    if SHAPE[1] == 1:
        return tl.sum(k.to(tl.float32) * tl.trans(query), 1, keep_dims=True) * scale
    else:
        return tl.dot(k, query, input_precision="ieee") * scale


@jit
def _int8_queries(q_p, b, h, keys, SHAPE: tl.constexpr):
    """The queries as two int8 numbers and a scale each, so that tensor cores take the keys' codes as they
    are; in fp32 as they are."""
    query = _plain_queries(q_p, b, h, keys, SHAPE)
    if query.dtype == tl.float32:
        return query, query, query
    else:
        high, low, scale = _split_rows(tl.trans(query))
        return tl.trans(high), tl.trans(low), scale


@jit
def _int8_logits(queries, keys, b, h, row, place, token, live, pos, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of keys in int8: codes in rows [.., D] and a scale a row, fp32."""
    d = tl.arange(0, SHAPE[3])
    mask = live[:, None] & (d < SHAPE[2])[None, :]
    k = tl.load(keys[0] + row[:, None] * SHAPE[2] + d[None, :], mask=mask, other=0)
    scale = tl.load(keys[1] + row, mask=live, other=0.0) * scale
    high, low, query_scale = queries
    if high.dtype == tl.float32:
        return tl.dot(k.to(tl.float32), high, input_precision="ieee") * scale[:, None]
    else:
        logits = tl.dot(k, high, out_dtype=tl.int32) * 254 + tl.dot(k, low, out_dtype=tl.int32)
        return logits.to(tl.float32) * (scale[:, None] * query_scale[None, :])


@jit
def _latent_queries(q_p, b, h, keys, SHAPE: tl.constexpr):
    """The queries as columns in the order of the basis (interleave_rope), [DP, GP], and the basis [KB, DP]
    where one product takes all ranks."""
    _, _, basis_p, basis_scale_p, _, _ = keys
    g, d, dims = tl.arange(0, SHAPE[1]), tl.arange(0, SHAPE[3]), tl.arange(0, SHAPE[5])
    paired = d // 2 + (d % 2) * (SHAPE[2] // 2)
    real = (g < SHAPE[0])[None, :] & (d < SHAPE[2])[:, None]
    query = tl.load(q_p + g[None, :] * SHAPE[2] + paired[:, None], mask=real, other=0.0)
    if basis_scale_p is not None:
        scale = tl.load(basis_scale_p + h * SHAPE[3] + d) * _largest_sum(query.dtype)
        query = (query * scale[:, None]).to(query.dtype)
    basis = query
    if SHAPE[5] >= SHAPE[4]:
        basis_at = basis_p + (h * SHAPE[3] + d)[None, :] * SHAPE[4] + dims[:, None]
        basis = tl.load(basis_at, mask=(dims < SHAPE[4])[:, None], other=0.0)
    return query, basis


@jit
def _latent_logits(queries, keys, b, h, row, place, token, live, pos, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of keys rebuilt from latents, RoPE(latent basis^T + bias): latents in rows [.., r], of
    q's dtype or int8 with a scale a row; basis [Hkv, DP, r] alike, with a scale for each of its rows."""
    latent_p, latent_scale_p, basis_p, _, bias_p, rope_p = keys
    query, basis = queries
    D: tl.constexpr = SHAPE[2]
    DP: tl.constexpr = SHAPE[3]
    R: tl.constexpr = SHAPE[4]
    KB: tl.constexpr = SHAPE[5]
    INT8: tl.constexpr = latent_scale_p is not None
    SUM: tl.constexpr = tl.int32 if INT8 else tl.float32
    d, pair, dims = tl.arange(0, DP), tl.arange(0, DP // 2), tl.arange(0, KB)
    latent_at = latent_p + row[:, None] * R + dims[None, :]
    if KB >= R:
        left = tl.load(latent_at, mask=live[:, None] & (dims < R)[None, :], other=0.0)
        k = tl.dot(left, basis, input_precision="ieee", out_dtype=SUM)
    else:
        basis_at = basis_p + (h * DP + d)[None, :] * R + dims[:, None]
        k = tl.zeros([row.shape[0], DP], SUM)
        for start in range(0, R, KB):
            left = tl.load(latent_at + start, mask=live[:, None] & (dims + start < R)[None, :], other=0.0)
            right = tl.load(basis_at + start, mask=(dims + start < R)[:, None], other=0.0)
            k = tl.dot(left, right, k, input_precision="ieee", out_dtype=SUM)
    if INT8:
        k = k.to(tl.float32) / _largest_sum(query.dtype)
        scale = (tl.load(latent_scale_p + row, mask=live, other=0.0) * scale)[:, None]
    if bias_p is not None:
        k += tl.load(bias_p + h * DP + d)[None, :]
    # The basis has its RoPE pairs side by side, so that the halves of a pair lie in one thread.
    real = live[:, None] & (pair < D // 2)[None, :]
    at = token[:, None].to(tl.int64) * (D // 2) + pair[None, :]
    cos, sin = _load_rope(rope_p, at, real, rope_p.dtype.element_ty == tl.int32)
    x, y = tl.split(tl.reshape(k, [row.shape[0], DP // 2, 2]))
    k = tl.reshape(tl.join(x * cos - y * sin, y * cos + x * sin), [row.shape[0], DP])
    return tl.dot(k.to(query.dtype), query, input_precision="ieee") * scale


@jit
def _no_queries(q_p, b, h, keys, SHAPE: tl.constexpr):
    return q_p


@jit
def _given_logits(queries, keys, b, h, row, place, token, live, pos, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] that are there, of keys (logits, steps of rows, heads and queries): each query's lie in
    line, by place and not by token."""
    g = tl.arange(0, SHAPE[1])[None, :]
    mask = live[:, None] & (g < SHAPE[0])
    logits_p = keys[0] + b * keys[1] + h * keys[2]  # one number: so places are known to be neighbours
    return tl.load(logits_p + place[:, None] + g * keys[3], mask=mask, other=0.0) * scale


@jit
def _channel_queries(q_p, b, h, keys, SHAPE: tl.constexpr):
    """The queries of a group as columns, in the order in which the keys' planes are decoded."""
    WIDTH: tl.constexpr = SHAPE[2] * SHAPE[4] // 8
    g = tl.arange(0, SHAPE[1])
    channel, inside = _columns(8 // SHAPE[4], WIDTH, 1, SHAPE[3] * SHAPE[4] // 8)
    real = (g < SHAPE[0])[None, :] & inside[:, None]
    return tl.load(q_p + g[None, :] * SHAPE[2] + channel[:, None], mask=real, other=0.0)


@jit
def _channel_logits(query, keys, b, h, row, place, token, live, pos, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of KIVI's keys: rows of codes, and for 32 tokens of each channel a minimum and a scale;
    since the last multiple of R exact, in a ring. SHAPE[5] tokens of a tile lie in one such group."""
    codes_p, low_scale_p, ring_p, R, Hkv = keys
    T: tl.constexpr = row.shape[0]
    D: tl.constexpr = SHAPE[2]
    BITS: tl.constexpr = SHAPE[4]
    PER: tl.constexpr = SHAPE[5]
    PLANES: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = D // PLANES
    WP: tl.constexpr = SHAPE[3] // PLANES
    byte = tl.arange(0, WP)
    mask = live[:, None] & (byte < WIDTH)[None, :]
    codes = tl.load(codes_p + row[:, None] * WIDTH + byte[None, :], mask=mask, other=0)
    group = tl.max(tl.reshape(tl.where(live, row // 32, -1), [T // PER, PER]), 1)
    channel, inside = _columns(PLANES, WIDTH, 1, WP)
    mask = (group >= 0)[:, None] & inside[None, :]
    pairs = tl.load(low_scale_p + group[:, None] * D + channel[None, :], mask=mask, other=0)
    pairs = tl.reshape(pairs, [T // PER, 1, PLANES, WP])
    codes = tl.reshape(codes.to(tl.int32), [T // PER, PER, 1, WP])
    codes = (codes >> (tl.arange(0, PLANES) * BITS)[None, None, :, None]) & ((1 << BITS) - 1)
    # The codes as the lowest bits of 2**23: no conversion, which runs at a quarter of the rate.
    codes = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    k = codes * _half_at(pairs, 16) + _half_at(pairs, 0)
    k = tl.reshape(k, [T, PLANES * WP]).to(query.dtype)
    exact = live & (token >= pos // R * R)
    if tl.max(exact.to(tl.int32), 0) > 0:
        ring_at = ring_p + ((b * R + token % R) * Hkv + h)[:, None] * D + channel[None, :]
        ring = tl.load(ring_at, mask=exact[:, None] & inside[None, :], other=0.0)
        k = tl.where(exact[:, None], ring, k)
    return tl.dot(k, query, input_precision="ieee") * scale


@jit
def _residual_values(values, b, h, row, token, live, pos, dtype: tl.constexpr, PACKING: tl.constexpr):
    """V [T, C] of packed codes, but for the last R tokens out of a ring [B, R, Hkv, DV], exact."""
    _, _, ring_p, R, Hkv = values
    v = _code_values(values, b, h, row, token, live, pos, dtype, PACKING)
    exact = live & (token > pos - R)
    if tl.max(exact.to(tl.int32), 0) > 0:
        channel, inside = _columns(PACKING[2], PACKING[3], PACKING[4], PACKING[5])
        at = ((b * R + token % R) * Hkv + h)[:, None] * (PACKING[2] * PACKING[3]) + channel[None, :]
        ring = tl.load(ring_p + at, mask=exact[:, None] & inside[None, :], other=0.0)
        v = tl.where(exact[:, None], ring, v)
    return v


@jit
def _plain_values(values, b, h, row, token, live, pos, dtype: tl.constexpr, PACKING: tl.constexpr):
    """V [T, C] of 16 bits or fp32, rows [.., DV], in the columns of PACKING."""
    channel, inside = _columns(PACKING[2], PACKING[3], PACKING[4], PACKING[5])
    at = values[0] + row[:, None] * (PACKING[2] * PACKING[3]) + channel[None, :]
    return tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)


@jit
def _code_values(values, b, h, row, token, live, pos, dtype: tl.constexpr, PACKING: tl.constexpr):
    """V [T, C] of packed codes: rows of words [.., DV * bits / 32] and (minimum, scale) [.., DV / group]."""
    BITS: tl.constexpr = PACKING[0]
    PLANES: tl.constexpr = PACKING[2]
    WIDTH: tl.constexpr = PACKING[3]
    RUNS: tl.constexpr = PACKING[4]
    RUN: tl.constexpr = PACKING[5]
    code, pairs = _load_values(
        values[0], values[1], row, live, PLANES * WIDTH, PACKING[1], PLANES, WIDTH, RUNS, RUN
    )
    code, low, step = _decode(code, pairs, dtype, BITS, PLANES)
    return tl.reshape(code * step + low, [row.shape[0], PLANES * RUNS * RUN]).to(dtype)


@jit
def _attend_kernel(
    q_p,  # [B, Hq, D]
    keys,  # stores of the format of keys
    values,  # stores of the format of values
    index_p,  # [B, sets, n] int32, -1: none; None: all tokens that are not in the window
    window_keys,  # one pointer, [B, z, Hkv, D] after RoPE, or None
    window_values,  # one pointer, [B, z, Hkv, DV], or None
    pos_p,  # [B] int32
    top_p,  # [B, Hq, splits] fp32
    sum_p,  # [B, Hq, splits] fp32
    out_p,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV]
    key_steps, value_steps, n, z, sets, Hkv, scale,
    QUERIES: tl.constexpr, LOGITS: tl.constexpr, VALUES: tl.constexpr, SHAPE: tl.constexpr,
    PACKING: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q K^T) V over a row's tokens and its exact window, the tokens cut into splits.

    A program takes the queries of a KV head, or where each query head has its own index, one of them."""
    _wait_for_previous()
    split, splits = tl.program_id(0), tl.num_programs(0)
    p, programs, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    h = p * Hkv // programs
    G: tl.constexpr = SHAPE[0]
    GP: tl.constexpr = SHAPE[1]
    dtype: tl.constexpr = q_p.dtype.element_ty
    C: tl.constexpr = PACKING[2] * PACKING[4] * PACKING[5]
    DV: tl.constexpr = PACKING[2] * PACKING[3]
    # 1. The tokens of this split.
    pos = tl.load(pos_p + b)
    length = n
    if index_p is None:
        length = tl.minimum(tl.maximum(pos + 1 - z, 0), n)
    share = tl.cdiv(tl.cdiv(length, T), splits)
    first, stop = split * share, tl.minimum((split + 1) * share, tl.cdiv(length, T))
    place = first * T + tl.arange(0, T)
    if index_p is not None:
        index_p += (b * sets + p * sets // programs) * n
        # One tile ahead: a load that waits for the load of its own index would not be prefetched.
        ahead = tl.load(index_p + place, mask=place < n, other=-1)
    # 2. The queries, and a softmax of nothing.
    head_row = (b * programs + p) * G
    queries = QUERIES(q_p + head_row * SHAPE[2], b, h, keys, SHAPE)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([T, GP], tl.float32)
    out = tl.zeros([T, C] if GP == 1 else [C, GP], tl.float32)
    # 3. The exact window, in the last split.
    if window_keys[0] is not None:
        if split == splits - 1:
            exact = _plain_queries(q_p + head_row * SHAPE[2], b, h, keys, SHAPE)
            for start in tl.range(0, z, T, num_stages=1):
                slot = start + tl.arange(0, T)
                live = (slot < z) & (slot <= pos)  # slots fill from the left
                row = (b * z + slot) * Hkv + h
                logits = _plain_logits(exact, window_keys, b, h, row, slot, slot, live, pos, scale, SHAPE)
                v = _plain_values(window_values, b, h, row, slot, live, pos, dtype, PACKING)
                top, total, out = _attend_tile(logits, live, v, top, total, out)
    # 4. The stored tokens.
    for tile in tl.range(first, stop, num_stages=STAGES):
        place = tile * T + tl.arange(0, T)
        if index_p is not None:
            token = ahead
            live = token >= 0
            ahead = tl.load(index_p + place + T, mask=place + T < n, other=-1)
        else:
            token = place
            live = place < length
        key_row = b * key_steps[0] + h * key_steps[1] + token.to(tl.int64) * key_steps[2]
        value_row = b * value_steps[0] + h * value_steps[1] + token.to(tl.int64) * value_steps[2]
        logits = LOGITS(queries, keys, b, h, key_row, place, token, live, pos, scale, SHAPE)
        v = VALUES(values, b, h, value_row, token, live, pos, dtype, PACKING)
        top, total, out = _attend_tile(logits, live, v, top, total, out)
    # 5. The result, or this split's part of it.
    total = tl.sum(total, 0)
    if GP == 1:
        out = tl.sum(out, 0)[:, None]
    g = tl.arange(0, GP)
    channel, inside = _columns(PACKING[2], PACKING[3], PACKING[4], PACKING[5])
    at = (head_row + g) * splits + split
    if FINAL:
        out = out / total[None, :]
    else:
        tl.store(top_p + at, top, mask=g < G)
        tl.store(sum_p + at, total, mask=g < G)
    mask = inside[:, None] & (g < G)[None, :]
    tl.store(out_p + at[None, :] * DV + channel[:, None], out.to(out_p.dtype.element_ty), mask=mask)


def row_steps(name: str, x: Tensor) -> tuple[int, ...]:
    """How many rows lie between the batch rows, the KV heads and the tokens of x [B, Hkv, S, width], a view
    of a store. Raises ValueError where the rows do not lie whole, at multiples of their width."""
    width, strides = x.shape[3], x.stride()
    need(
        (strides[3] == 1 or width == 1) and not any(s % width for s in strides[:3]),
        f"{name} must be whole rows",
    )
    return tuple(s // width for s in strides[:3])


def plain_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    """(stores, steps, (D, DP, r, KB), functions) of keys of q's dtype; the formats below give the same."""
    (k,), (B, _, D) = keys, q.shape
    shape("keys", k, B, Hkv, k.shape[2], D, dtype=q.dtype)
    return (k,), row_steps("keys", k), (D, max(16, power2(D)), 0, 0), (_plain_queries, _plain_logits)


def int8_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (k, scale), (B, _, D) = keys, q.shape
    need(D <= 512, f"sums of {D} products of int8 do not fit int32")
    shape("keys", k, B, Hkv, k.shape[2], D, dtype=torch.int8)
    shape("scale of keys", scale, *k.shape[:3], dtype=torch.float32)
    steps = row_steps("keys", k)
    need(scale.stride() == steps, "the scales of keys must lie as their rows do")
    return (k, scale), steps, (D, max(32, power2(D)), 0, 0), (_int8_queries, _int8_logits)


def latent_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (latent, latent_scale, basis, basis_scale, bias, rope), (B, _, D) = keys, q.shape
    (S, r), DP = latent.shape[2:], max(16, power2(D))
    shape("latents", latent, B, Hkv, S, r, dtype=q.dtype if latent_scale is None else torch.int8)
    shape("basis (of interleave_rope)", basis, Hkv, DP, r, dtype=latent.dtype)
    need((latent_scale is None) == (basis_scale is None), "latents and basis are of int8 together")
    need(bias is None or latent_scale is None, "latents in int8 take no bias")
    steps = row_steps("latents", latent)
    if latent_scale is not None:
        shape("scale of latents", latent_scale, *latent.shape[:3], dtype=torch.float32)
        need(latent_scale.stride() == steps, "the scales of latents must lie as their rows do")
        shape("basis_scale", basis_scale, Hkv, DP, 1, dtype=torch.float32)
    if bias is not None:
        shape("bias (of interleave_rope)", bias, Hkv, DP, 1, dtype=torch.float32)
    words = rope_words(rope, S, D, q.dtype)
    together(basis=basis, basis_scale=basis_scale, bias=bias, rope=rope)
    KB = ranks_at_once(r, tile_itemsize(q.dtype, latent), roomy(q.device))
    stores = (latent, latent_scale, basis, basis_scale, bias, words)
    return stores, steps, (D, DP, r, KB), (_latent_queries, _latent_logits)


def ranks_at_once(r: int, itemsize: int, roomy: bool) -> int:
    """How many ranks of latents a product takes: all, so that the basis waits in shared memory, where it
    fits; else as many as a line of memory holds, and the basis comes again for each tile."""
    KB = max(32, power2(r))
    return KB if KB * itemsize <= (512 if roomy else 256) else 128 // itemsize


def channel_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (codes, low_scale, ring), (B, _, D) = keys, q.shape
    tokens, width, R = codes.shape[2], codes.shape[3], ring.shape[1]
    bits = width * 8 // D
    need(bits in (2, 4) and R % 32 == 0, f"codes {list(codes.shape)} are of 2 or 4 bits, the ring of 32s")
    shape("codes of keys", codes, B, Hkv, tokens, D * bits // 8, dtype=torch.uint8)
    shape("low_scale of keys", low_scale, B, Hkv, tokens // 32, D, 2, dtype=torch.float16)
    shape("ring of keys", ring, B, R, Hkv, D, dtype=q.dtype)
    together(codes=codes, low_scale=low_scale, ring=ring)
    stores, sizes = (codes, low_scale.view(torch.int32), ring, R, Hkv), (D, max(16, power2(D)), bits, 32)
    return stores, row_steps("codes", codes), sizes, (_channel_queries, _channel_logits)


def given_logits(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (logits,), (B, Hq, D) = keys, q.shape
    shape("logits", logits, B, Hkv, Hq // Hkv, logits.shape[3], dtype=torch.float32)
    need(logits.stride(3) == 1, "the logits of a query must lie in line")
    stores = (logits, *logits.stride()[:3])
    return stores, (0, 0, 0), (D, max(16, power2(D)), 0, 0), (_no_queries, _given_logits)


KEYS = {
    "plain": plain_keys,
    "int8": int8_keys,
    "latents": latent_keys,
    "channels": channel_keys,
    "logits": given_logits,
}


def packed_values(q: Tensor, values: Sequence, bits: int) -> tuple:
    """(stores, steps, packing, function) of values, plain ones at 16 bits and else codes."""
    if bits == 16:
        need(values[0].dtype == q.dtype, f"values must be {q.dtype}, not {values[0].dtype}")
        packing = value_packing(values[0].shape[3], bits)
        return tuple(values), row_steps("values", values[0]), packing, _plain_values
    codes, low_scale, *ring = values
    DV = codes.shape[3] * 8 // bits
    group, steps = value_group(DV, bits), row_steps("values", codes)
    shape("values", codes, *codes.shape, dtype=torch.uint8)
    shape("low_scale", low_scale, *codes.shape[:3], DV // group, 2, dtype=torch.float16)
    lies = tuple(step * (DV // group) * 2 for step in steps)
    need(low_scale.stride()[:3] == lies, "low_scale must lie as the codes do")
    words = (codes.view(torch.int32), low_scale.view(torch.int32))
    if not ring:
        return words, steps, value_packing(DV, bits), _code_values
    B, Hkv = codes.shape[:2]
    R = ring[0].shape[1]
    shape("ring of values", ring[0], B, R, Hkv, DV, dtype=q.dtype)
    together(ring=ring[0])
    return (*words, ring[0], R, Hkv), steps, value_packing(DV, bits), _residual_values


def attended(q: Tensor, kind: str, keys: Sequence, values: Sequence, bits: int, *_) -> Tensor:
    """The shape of what attend gives."""
    return q.new_empty(*q.shape[:2], values[0].shape[3] * max(1, 8 // bits))


@operator(attended)
def attend(
    q: Tensor, kind: str, keys: Sequence[Tensor | None], values: Sequence[Tensor | None], bits: int,
    pos: Tensor, index: Tensor | None, window: Sequence[Tensor], scale: float
) -> Tensor:  # fmt: skip
    """Attention of one token a row, q [B, Hq, D] after RoPE, over stored tokens -> [B, Hq, DV].

    kind of the keys; each store is a view [B, Hkv, S, width] (row_steps) where nothing else is said:
        plain    k [.., D] of q's dtype
        int8     k [.., D] int8, scale [B, Hkv, S] fp32
        latents  latent [.., r]; its scale [B, Hkv, S] fp32, or None; basis [Hkv, DP, r] of interleave_rope;
                 its scale [Hkv, DP, 1] fp32, or None; bias [Hkv, DP, 1] fp32, or None; rope [>= S, D/2, 2] of
                 rope_pairs. A key is RoPE(latent basis^T + bias). Latent and basis are int8 with scales, or
                 of q's dtype without
        channels codes [B, Hkv, 32 n, D * bits / 8] uint8 of n groups of 32 tokens, low_scale
                 [B, Hkv, n, D, 2] fp16, ring [B, R, Hkv, D] of the tokens since the last multiple of R, which
                 are exact
        logits   none, but fp32 logits [B, Hkv, G, n], each query's in line: of the tokens of an index [B, n],
                 or without one of all
    values: v [.., DV] of q's dtype at 16 bits; below, codes [.., DV * bits / 8] uint8, low_scale
    [.., DV / group, 2] fp16, and where the last R tokens are exact their ring [B, R, Hkv, DV]. index int32:
    the tokens to attend, -1 for none, [B, n] for all heads, [B, Hkv, n] or [B, Hq, n]. Without it all tokens
    up to pos - z are attended, at most S. window: exact keys and values [B, z, Hkv, D and DV], filled from
    the left, which are attended besides, or () with z = 0. Truth: compress.attend over what the stores
    read."""
    (B, Hq, _), (Hkv, S) = q.shape, values[0].shape[1:3]
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    tokens = S if kind == "logits" else keys[0].shape[2]
    need(tokens >= S, f"keys of {tokens} tokens do not fit values of {S}")
    key_stores, key_steps, sizes, functions = KEYS[kind](q, keys, Hkv)
    value_stores, value_steps, packing, decoder = packed_values(q, values, bits)
    D, DV, z = sizes[0], packing[2] * packing[3], window[0].shape[1] if window else 0
    check(pos, B, q=q)
    if window:
        shape("window keys", window[0], B, z, Hkv, D, dtype=q.dtype)
        shape("window values", window[1], B, z, Hkv, DV, dtype=q.dtype)
        check(pos, B, window_keys=window[0], window_values=window[1])
    n, sets = S, 1
    if index is not None:
        need(index.ndim in (2, 3) and len(index) == B, f"index must be [{B}, .., n], not {list(index.shape)}")
        need(index.dtype == torch.int32, f"index must be int32, not {index.dtype}")
        check(pos, B, index=index)
        n, sets = index.shape[-1], index.shape[1:-1].numel()
        need(sets in (1, Hkv, Hq), f"index must have a set a row, a KV head or a query head, not {sets}")
    programs = max(Hkv, sets)  # of a row and split
    G = Hq // programs
    T, warps, stages, fill = attend_config(kind, DV, q.element_size(), roomy(q.device))
    if kind == "channels" and index is not None:
        sizes = (*sizes[:3], 1)  # chosen tokens each look their group up
    GP = 1 if G == 1 and kind == "logits" else max(16, power2(G))  # tensor cores take 16 queries at least
    splits = attend_splits(n, B * programs, fill)
    out, tops, sums, parts = split_outputs(q, splits, DV)
    _attend_kernel[splits, programs, B](
        q, key_stores, value_stores, index, tuple(window[:1]) or (None,), tuple(window[1:]) or (None,), pos,
        tops, sums, parts, key_steps, value_steps, n, z, sets, Hkv, scale * LOG2E, *functions, decoder,
        (G, GP, *sizes), packing, T, stages, splits == 1, num_warps=warps,
        **overlapped(q.device),
    )  # fmt: skip
    return merge_splits(out, tops, sums, parts)


@operator(lambda logits, v, pos: v.new_empty(len(v), logits.shape[1] * logits.shape[2], v.shape[3]))
def attend_logits(logits: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """Attention whose logits are there: softmax(logits) v over the tokens up to pos, at most S.

    logits [B, Hkv, G, S] fp32, each query's in line; v [B, Hkv, S, DV], whole rows -> [B, Hkv * G, DV] of v's
    dtype. Truth: Tensor.softmax, a product."""
    B, H, G, S = logits.shape
    shape("v", v, B, H, S, v.shape[3])
    q = v.new_empty(B, H * G, 16)  # its shape alone counts
    return attend(q, "logits", [logits], [v], 16, pos, None, [], 1.0)


def attend_splits(n: int, programs: int, fill: int) -> int:
    """Into how many parts n tokens are cut, so that `fill` programs a multiprocessor have work."""
    return max(1, min(cdiv(n, 128), fill * SMS // programs))


def attend_config(kind: str, DV: int, itemsize: int, roomy: bool) -> tuple[int, int, int, int]:
    """(tokens a tile, warps, stages, programs a multiprocessor)."""
    if itemsize == 4:
        return 32, 4, 2, 4
    if kind == "latents":
        return 64, 4, 3 if roomy else 2, 2
    if kind in ("plain", "logits"):
        return (64, 4, 3, 4) if roomy else (64 if DV <= 128 else 32, 4, 2, 4)
    return 32, 2, 3, 8


# -------------------------------------------------------------- attention over latents of all heads (EliteKV)


@jit
def _attend_latent_kernel(
    q_p,  # [B, Hq, W]
    rows_p,  # [B, S, W], of which the leading DV numbers are the value
    pos_p,  # [B] int32
    top_p,  # [B, Hq, splits] fp32
    sum_p,  # [B, Hq, splits] fp32
    out_p,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV]
    S, scale,
    W: tl.constexpr, WP: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, T: tl.constexpr,
    STAGES: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q R^T) R[:, :DV]: a row is key and value of all heads, and is read once."""
    _wait_for_previous()
    split, splits, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    length = tl.load(pos_p + b) + 1
    share = tl.cdiv(tl.cdiv(length, T), splits)
    first, stop = split * share, tl.minimum((split + 1) * share, tl.cdiv(length, T))
    head, w = tl.arange(0, HP), tl.arange(0, WP)
    real = (head < H)[None, :] & (w < W)[:, None]
    query = tl.load(q_p + (b * H + head[None, :]) * W + w[:, None], mask=real, other=0.0)
    top = tl.full([HP], -1e30, tl.float32)
    total = tl.zeros([T, HP], tl.float32)
    out = tl.zeros([WP, HP], tl.float32)
    for tile in tl.range(first, stop, num_stages=STAGES):
        token = tile * T + tl.arange(0, T)
        live = token < length
        row_at = rows_p + (b * S + token)[:, None] * W + w[None, :]
        rows = tl.load(row_at, mask=live[:, None] & (w < W)[None, :], other=0.0)
        logits = tl.dot(rows, query, input_precision="ieee") * scale
        top, total, out = _attend_tile(logits, live, rows, top, total, out)
    total = tl.sum(total, 0)
    at = (b * H + head) * splits + split
    if FINAL:
        out = out / total[None, :]
    else:
        tl.store(top_p + at, top, mask=head < H)
        tl.store(sum_p + at, total, mask=head < H)
    mask = (w < DV)[:, None] & (head < H)[None, :]
    tl.store(out_p + at[None, :] * DV + w[:, None], out.to(out_p.dtype.element_ty), mask=mask)


@operator(lambda q, latent, pos, DV, scale: q.new_empty(*q.shape[:2], DV))
def attend_latent(q: Tensor, latent: Tensor, pos: Tensor, DV: int, scale: float) -> Tensor:
    """Attention of one token a row over rows that are key and value of all heads, as in MLA's absorbed
    decode.

    q [B, Hq, W], latent [B, S, W] of the same dtype: keys, and in their leading DV numbers values. Tokens
    0..pos are attended -> [B, Hq, DV]. The sums of rows beyond 512 numbers do not fit in registers: there
    `scores` makes the logits, and `attend_logits` reads the values again.
    Truth: compress.attend with one KV head."""
    (B, Hq, W), S = q.shape, latent.shape[1]
    shape("latent", latent, B, S, W, dtype=q.dtype)
    need(0 < DV <= W, f"values are the leading 1 to {W} numbers of a row, not {DV}")
    check(pos, B, q=q, latent=latent)
    T, warps, stages, fill, widest = latent_config(q.element_size(), roomy(q.device))
    WP = max(16, power2(W))
    if WP > widest:
        logits = scores(q[:, None], latent[:, None], None, pos, scale, "each")[:, None]
        width = math.gcd(512, DV, W)  # of the blocks that take the places of KV heads
        blocks = latent.unflatten(-1, (-1, width))[:, :, : DV // width].transpose(1, 2)
        out = attend_logits(logits.expand(-1, blocks.shape[1], -1, -1), blocks, pos)
        return out.unflatten(1, (-1, Hq)).transpose(1, 2).flatten(2)
    splits = max(1, min(cdiv(S, 2 * T), fill * SMS // B))
    out, tops, sums, parts = split_outputs(q, splits, DV)
    _attend_latent_kernel[splits, B](
        q, latent, pos, tops, sums, parts, S, scale * LOG2E, W, WP, DV, Hq, max(16, power2(Hq)), T, stages,
        splits == 1, num_warps=warps, **overlapped(q.device),
    )  # fmt: skip
    return merge_splits(out, tops, sums, parts)


def latent_config(itemsize: int, roomy: bool) -> tuple[int, int, int, int, int]:
    """(tokens a tile, warps, stages, programs a multiprocessor, the widest row that one kernel attends)."""
    if itemsize == 4:
        return 16, 4, 2, 1, 256
    return (64 if roomy else 32, 4, 2, 1, 512)


# ---------------------------------------------------------------------------------------------------- append


@jit
def _store_new_values(
    values_p, low_scale_p, stored, v, planes,
    D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Stores a head's values v [DP], below 16 bits quantised, as row `stored` of the store.
    planes [8 / BITS, NP]: v as it is packed."""
    if BITS == 16:
        d = tl.arange(0, DP)
        tl.store(values_p + stored * D + d, v, mask=d < D)
    else:
        LEVELS: tl.constexpr = (1 << BITS) - 1
        group = tl.arange(0, DP // GROUP)
        x = tl.reshape(v.to(tl.float32), [DP // GROUP, GROUP])
        low = tl.min(x, 1).to(tl.float16)
        scale = tl.div_rn(tl.max(x, 1) - low.to(tl.float32), LEVELS * 1.0).to(tl.float16)
        at = low_scale_p + (stored * GROUPS + group) * 2
        tl.store(at, low, mask=group < GROUPS)
        tl.store(at + 1, scale, mask=group < GROUPS)
        plane, j = tl.arange(0, 8 // BITS)[:, None], tl.arange(0, NP)[None, :]
        group_of = tl.reshape(tl.minimum(plane * WIDTH + j, D - 1) // GROUP, [8 // BITS * NP])
        lows = tl.reshape(tl.gather(low, group_of, 0), [8 // BITS, NP]).to(tl.float32)
        scales = tl.reshape(tl.gather(scale, group_of, 0), [8 // BITS, NP]).to(tl.float32)
        code = tl.div_rn(planes - lows, tl.where(scales == 0, 1.0, scales))
        code = tl.minimum(tl.maximum(code, 0.0), LEVELS * 1.0)
        packed = tl.sum(_nearest(code) << (plane * BITS), 0)
        byte = tl.arange(0, NP)
        tl.store(values_p + stored * WIDTH + byte, packed.to(tl.uint8), mask=byte < WIDTH)


@jit
def _append_kernel(
    new_p,  # [B, r], k U_r, as all inputs of rows that may lie apart
    q_p,  # [B, Hq, D] before RoPE
    k_p,  # [B, Hkv, D] before RoPE
    v_p,  # [B, Hkv, D]
    pos_p,  # [B] int32
    rope_p,  # [S, D/2] words of rope_words
    latent_p,  # [B, S, r], or int8 codes
    latent_scale_p,  # [B, S] fp32, or None
    values_p,  # [B, S, Hkv, D * BITS / 8] uint8, or plain V
    low_scale_p,  # [B, S, Hkv, D / GROUP, 2] fp16
    window_k_p,  # [B, sinks + z, Hkv, D] after RoPE
    window_v_p,  # [B, sinks + z, Hkv, D]
    out_p,  # [B, Hq, D]: q after RoPE
    row_steps, S, r, sinks, z, slice_r,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, NP: tl.constexpr, RP: tl.constexpr,
    ROW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A KV head's share of one token a row: a slice of the latent, values, exact K and V; and q rotated."""
    _wait_for_previous()
    _let_next_begin()
    h, heads, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    new_p += b * row_steps[0]
    # All loads before the first store: they wait together, for memory once.
    pos = tl.load(pos_p + b)
    part = h * slice_r + tl.arange(0, RP)
    inside = (part < r) & (tl.arange(0, RP) < slice_r)
    new = tl.load(new_p + part, mask=inside, other=0.0)
    if latent_scale_p is not None:  # of the whole row, although this program writes a slice of it
        i = tl.arange(0, ROW)
        whole = tl.load(new_p + i, mask=i < r, other=0.0)
    d, pair, g = tl.arange(0, DP), tl.arange(0, DP // 2), tl.arange(0, GP)[:, None]
    real, query = pair < D // 2, (g < G) & (pair < D // 2)[None, :]
    k_at = k_p + b * row_steps[2] + h * D + pair
    k_a = tl.load(k_at, mask=real, other=0.0).to(tl.float32)
    k_c = tl.load(k_at + D // 2, mask=real, other=0.0).to(tl.float32)
    q_at = q_p + b * row_steps[1] + (h * G + g) * D + pair[None, :]
    q_a = tl.load(q_at, mask=query, other=0.0).to(tl.float32)
    q_c = tl.load(q_at + D // 2, mask=query, other=0.0).to(tl.float32)
    v_p += b * row_steps[3] + h * D
    v = tl.load(v_p + d, mask=d < D, other=0.0)
    planes = v
    if BITS < 16:  # as they are packed, [planes, NP]: byte j holds the channels that are WIDTH apart
        plane, j = tl.arange(0, 8 // BITS)[:, None], tl.arange(0, NP)[None, :]
        planes = tl.load(v_p + plane * WIDTH + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    cos, sin = _load_rope(rope_p, pos.to(tl.int64) * (D // 2) + pair, real, WORDS)
    dtype: tl.constexpr = window_k_p.dtype.element_ty
    row = b * S + pos
    if latent_scale_p is not None:
        latent_scale = tl.div_rn(tl.max(tl.abs(whole.to(tl.float32)), 0), 127.0)
        new = _nearest(tl.div_rn(new.to(tl.float32), tl.where(latent_scale == 0, 1.0, latent_scale)))
        tl.store(latent_scale_p + row, latent_scale, mask=h == 0)
    tl.store(latent_p + row * r + part, new.to(latent_p.dtype.element_ty), mask=inside)
    slot = tl.where(pos < sinks, pos, sinks + (pos - sinks) % z)
    ring = ((b * (sinks + z) + slot) * heads + h) * D
    tl.store(window_k_p + ring + pair, (k_a * cos - k_c * sin).to(dtype), mask=real)
    tl.store(window_k_p + ring + D // 2 + pair, (k_c * cos + k_a * sin).to(dtype), mask=real)
    tl.store(window_v_p + ring + d, v, mask=d < D)
    out_p += ((b * heads + h) * G + g) * D + pair[None, :]
    tl.store(out_p, (q_a * cos[None, :] - q_c * sin[None, :]).to(dtype), mask=query)
    tl.store(out_p + D // 2, (q_c * cos[None, :] + q_a * sin[None, :]).to(dtype), mask=query)
    _store_new_values(
        values_p, low_scale_p, row * heads + h, v, planes, D, DP, BITS, GROUP, GROUPS, WIDTH, NP
    )  # fmt: skip


@operator(
    lambda new, q, *_: q.new_empty(q.shape),
    mutates=("latent", "latent_scale", "values", "low_scale", "window_k", "window_v"),
)
def sals_append(
    new: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rope: Tensor, latent: Tensor,
    latent_scale: Tensor | None, values: Tensor, low_scale: Tensor | None, window_k: Tensor,
    window_v: Tensor, bits: int, sinks: int = 0
) -> Tensor:  # fmt: skip
    """Writes one token a row at pos: its latent, its values (quantised below 16 bits) and its exact K and V,
    into the window of `sinks` first tokens and a ring (compress.window_slot); returns q after RoPE.

    new [B, r] = k U_r, written as it is, or as int8 codes where there is a latent_scale; q [B, Hq, D] and
    k [B, Hkv, D] before RoPE, v [B, Hkv, D] (the rows of all four may lie apart, as in the output of wqkv);
    rope [>= S, D/2, 2] of rope_pairs; latent [B, S, r], latent_scale [B, S] fp32 or None; values: codes
    [B, S, Hkv, D*bits/8] uint8 with low_scale [B, S, Hkv, D/group, 2] fp16, or at 16 bits plain V
    [B, S, Hkv, D] and None; window_k (after RoPE) and window_v [B, sinks + z, Hkv, D].
    Truth: compress.quantize, quantize_int8, apply_rope, three assignments."""
    B, Hkv, D = k.shape
    S, r = latent.shape[1:]
    Hq, group, window = q.shape[1], value_group(D, bits), window_k.shape[1]
    G = Hq // Hkv
    need(D % 2 == 0 and Hq % Hkv == 0, f"q {list(q.shape)} does not fit k {list(k.shape)}")
    need(window > sinks, "the ring must hold at least one token")
    shape("new", new, B, r, dtype=k.dtype)
    shape("latent", latent, B, S, r, dtype=k.dtype if latent_scale is None else torch.int8)
    if latent_scale is not None:
        shape("latent_scale", latent_scale, B, S, dtype=torch.float32)
    shape("q", q, B, Hq, D, dtype=k.dtype)
    shape("v", v, B, Hkv, D, dtype=k.dtype)
    shape("window_k", window_k, B, window, Hkv, D, dtype=k.dtype)
    shape("window_v", window_v, B, window, Hkv, D, dtype=k.dtype)
    words = rope_words(rope, S, D, k.dtype)
    check(pos, B, new=new[0], q=q[0], k=k[0], v=v[0], rope=rope, latent=latent, latent_scale=latent_scale)
    check(pos, B, window_k=window_k, window_v=window_v)
    check_values(pos, values, low_scale, (B, S, Hkv), D, bits, k.dtype)
    width, slice_r = values.shape[-1], cdiv(r, Hkv)
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    _append_kernel[Hkv, B](
        new, q, k, v, pos, words, latent, latent_scale, values, pos if low_scale is None else low_scale,
        window_k, window_v, out, tuple(x.stride(0) for x in (new, q, k, v)), S, r, sinks, window - sinks,
        slice_r, D, power2(D), G, power2(G), bits, group, D // group, width, power2(width), power2(slice_r),
        power2(r), rope.dtype == torch.float16, num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return out


# -------------------------------------------------------------- attention over heads of unequal rank (FDC)


def rank_table(ranks: list[int], device: torch.device, balanced: bool = True) -> Tensor:
    """What the kernels below read of each KV head, int32 [5, Hkv]: d_qk, d_v, the sums of the ranks that are
    stored before its K' and before its V', and what a token of it costs.

    ranks: d_qk of all heads, then d_v. A tile takes about as long whatever it holds, so a token costs the
    width of the tile that it lies in; balanced=False: each head costs the same (the paper's /KE)."""
    heads, widest = len(ranks) // 2, tile_width(ranks)
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    widths = [max(widest // 4, power2(max(ranks[h], ranks[heads + h]))) for h in range(heads)]
    return torch.tensor(
        [*ranks, *starts, *(widths if balanced else [1] * heads)], dtype=torch.int32, device=device
    ).view(5, heads)


def tile_width(ranks: list[int]) -> int:
    """The widest tile; narrower heads lie in tiles of a half or a quarter of it, which has at least 16."""
    return max(64, power2(max(ranks)))


@jit
def _ranks_of(head, table_p, heads, UNIT: tl.constexpr):
    """d_qk, d_v and where K' and V' begin; told to the compiler as multiples of UNIT, so that it sees rows
    that are aligned."""
    d_qk, d_v = tl.load(table_p + head).to(tl.int64), tl.load(table_p + heads + head).to(tl.int64)
    k, v = tl.load(table_p + 2 * heads + head).to(tl.int64), tl.load(table_p + 3 * heads + head).to(tl.int64)
    return d_qk // UNIT * UNIT, d_v // UNIT * UNIT, k // UNIT * UNIT, v // UNIT * UNIT


def fdc_capacity(B: int, Hkv: int, ranks: list[int], table: Tensor, packed: Tensor) -> int:
    """S, tokens of a row, from the size of the packed cache."""
    fits = len(ranks) == 2 * Hkv and min(ranks, default=0) > 0
    need(fits, f"ranks must be d_qk and d_v of every head, at least 1, not {ranks}")
    shape("table (of rank_table)", table, 5, Hkv, dtype=torch.int32)
    S = packed.numel() // (B * sum(ranks))
    shape("packed", packed, B * S * sum(ranks))
    return S


@jit
def _work_line(table_p, pos_p, B, heads, BLOCK: tl.constexpr, BP: tl.constexpr, HP: tl.constexpr):
    """All work end to end, rows and within them heads: a head of a row takes blocks * cost units, blocks of
    BLOCK tokens. -> blocks of each row [BP], where rows end [BP], the sums of the heads' costs [HP]."""
    row, head = tl.arange(0, BP), tl.arange(0, HP)
    blocks = (tl.load(pos_p + row, mask=row < B, other=-1) + BLOCK) // BLOCK
    costs = tl.cumsum(tl.load(table_p + 4 * heads + head, mask=head < heads, other=0).to(tl.int64), 0)
    return blocks, tl.cumsum(blocks.to(tl.int64) * tl.max(costs, 0), 0), costs


@jit
def _pick(x, index, N: tl.constexpr):
    """x[index], 0 at -1."""
    return tl.sum(tl.where(tl.arange(0, N) == index, x, 0), 0)


@jit
def _fdc_part(
    q_p, k_p, v_p, top_p, sum_p, part_p, d_qk, d_v, first, stop, part, scale,
    G: tl.constexpr, GP: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The G queries of a head over its tokens first .. stop, in tiles of T tokens by W >= d_qk, d_v."""
    g, j, t = tl.arange(0, GP), tl.arange(0, W), tl.arange(0, T)
    q = tl.load(q_p + g[:, None] * DQ + j[None, :], mask=(g < G)[:, None] & (j < d_qk)[None, :], other=0.0)
    top = tl.full([GP], -1e30, tl.float32)
    sums = tl.zeros([GP, T], tl.float32)
    out = tl.zeros([GP, W], tl.float32)
    k_at, v_at = t[:, None] * d_qk + j[None, :], t[:, None] * d_v + j[None, :]
    k_p, v_p = k_p + first * d_qk, v_p + first * d_v
    for token in tl.range(first, stop, T, num_stages=STAGES):
        live = t < stop - token
        k = tl.load(k_p + k_at, mask=live[:, None] & (j < d_qk)[None, :], other=0.0)
        v = tl.load(v_p + v_at, mask=live[:, None] & (j < d_v)[None, :], other=0.0)
        k_p, v_p = k_p + T * d_qk, v_p + T * d_v
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(live[None, :], logits, -1e30)
        new_top = tl.maximum(top, tl.max(logits, 1))
        weight = tl.exp2(logits * scale - (new_top * scale)[:, None])
        shrink = tl.exp2((top - new_top) * scale)
        sums = sums * shrink[:, None] + weight
        out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = new_top
    part = part * G + g
    tl.store(top_p + part, top * scale, mask=g < G)
    tl.store(sum_p + part, tl.sum(sums, 1), mask=g < G)
    tl.store(part_p + part[:, None] * DV + j[None, :], out, mask=(g < G)[:, None] & (j < d_v)[None, :])


@jit
def _fdc_kernel(
    q_p, packed_p, table_p, pos_p, top_p, sum_p, part_p, B, S, heads, scale,
    G: tl.constexpr, GP: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    UNIT: tl.constexpr, HP: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    _wait_for_previous()
    p, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    blocks, row_ends, costs = _work_line(table_p, pos_p, B, heads, BLOCK, BP, HP)
    total = tl.max(row_ends, 0)
    at, stop = p * total // programs, (p + 1) * total // programs
    leave = tl.maximum(stop, at + 1)  # a program without work leaves one empty part
    while at < leave:
        # The row and the head that unit `at` belongs to, and their stretch of the line.
        row = tl.sum((row_ends <= at).to(tl.int64), 0)
        start, count = _pick(row_ends, row - 1, BP), _pick(blocks, row, BP)
        head = tl.sum((start + costs * count <= at).to(tl.int64), 0)
        before = _pick(costs, head - 1, HP)
        first, cost = start + before * count, _pick(costs, head, HP) - before
        # Blocks that begin in at .. stop: the next program goes on where this one ends.
        begin = ((at - first + cost - 1) // cost).to(tl.int32) * BLOCK
        until = tl.minimum((stop - first + cost - 1) // cost, count).to(tl.int32) * BLOCK
        until = tl.minimum(until, tl.load(pos_p + row) + 1)
        d_qk, d_v, k_start, v_start = _ranks_of(head, table_p, heads, UNIT)
        k_p, v_p = packed_p + (B * k_start + row * d_qk) * S, packed_p + (B * v_start + row * d_v) * S
        query_p = q_p + (row * heads + head) * G * DQ
        # Along the line the number of the head or of the program rises from part to part: so does their sum.
        part = row * heads + head + p
        widest = tl.maximum(d_qk, d_v)
        # fmt: off
        if widest <= W // 4:
            _fdc_part(query_p, k_p, v_p, top_p, sum_p, part_p, d_qk, d_v, begin, until, part, scale,
                      G, GP, DQ, DV, W // 4, T * 4, STAGES)
        elif widest <= W // 2:
            _fdc_part(query_p, k_p, v_p, top_p, sum_p, part_p, d_qk, d_v, begin, until, part, scale,
                      G, GP, DQ, DV, W // 2, T * 2, STAGES)
        else:
            _fdc_part(query_p, k_p, v_p, top_p, sum_p, part_p, d_qk, d_v, begin, until, part, scale,
                      G, GP, DQ, DV, W, T, STAGES)
        # fmt: on
        at = first + cost * count


@jit
def _fdc_merge_kernel(
    top_p, sum_p, part_p, table_p, pos_p, out_p, B, heads, programs, out_row, G: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, UNIT: tl.constexpr, HP: tl.constexpr, BP: tl.constexpr,
    BLOCK: tl.constexpr, SB: tl.constexpr
):  # fmt: skip
    _wait_for_previous()
    _let_next_begin()
    item, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = item // heads, item % heads
    blocks, row_ends, costs = _work_line(table_p, pos_p, B, heads, BLOCK, BP, HP)
    total = tl.max(row_ends, 0)
    start, count = _pick(row_ends, row - 1, BP), _pick(blocks, row, BP)
    first, end = start + _pick(costs, head - 1, HP) * count, start + _pick(costs, head, HP) * count
    # The first program that ends beyond `first`, and the first that begins at `end` or later.
    low, high = ((first + 1) * programs + total - 1) // total - 1, (end * programs + total - 1) // total
    _, d_v, _, v_start = _ranks_of(head, table_p, heads, UNIT)
    before = G * (v_start - tl.load(table_p + 3 * heads))
    i = tl.arange(0, DVP)
    part, parts = (item + low) * G + g, (high - low).to(tl.int32)
    _, weight, out = _merge_parts(-1e30, top_p, sum_p, part_p, part, parts, G, DV, i, i < d_v, SB)
    out_p += row * out_row + before + g * d_v + i
    tl.store(out_p, (out / weight).to(out_p.dtype.element_ty), mask=i < d_v)


@operator(
    lambda q, packed, table, ranks, *_: q.new_empty(
        len(q), q.shape[1] * 2 * sum(ranks[len(ranks) // 2 :]) // len(ranks)
    )
)
def fdc_attend(
    q: Tensor, packed: Tensor, table: Tensor, ranks: list[int], pos: Tensor, scale: float
) -> Tensor:  # fmt: skip
    """Attention of one token a row over the tokens 0..pos of heads of unequal rank, equal work a program.

    q [B, Hq, max d_qk], zero beyond a head's d_qk; packed [B * S * sum(ranks)]: K' [B, S, d_qk] head by head,
    then V' [B, S, d_v]; ranks: d_qk of all heads, then d_v, and table the rank_table of them; scale: that of
    the full head dim -> [B, sum of G d_v], heads in order. All heads of all rows lie end to end on one line;
    every program attends an equal stretch of it, found from pos on the device: ragged rows are balanced as
    well, and no step schedules anything. The parts merge by log-sum-exp. Truth: compress.attend for each
    head, and for the stretches compress.equal_stretches (arXiv 2408.04107, sec. 5.3, schedules whole
    heads)."""
    B, Hq, DQ = q.shape
    Hkv = len(ranks) // 2
    S = fdc_capacity(B, Hkv, ranks, table, packed)
    G = Hq // Hkv
    shape("q", q, B, Hkv * G, max(ranks[:Hkv]), dtype=packed.dtype)
    check(pos, B, q=q, packed=packed, table=table)
    T, warps, stages, fill, BLOCK = fdc_config(q.element_size())
    programs = min(fill * SMS, B * Hkv * cdiv(S, BLOCK))
    DV, W, UNIT, HP, BP = max(ranks[Hkv:]), tile_width(ranks), math.gcd(16, *ranks), power2(Hkv), power2(B)
    at_once = 16 if programs < 8 * B * Hkv else 64  # parts of a head that are merged together
    parts = (B * Hkv + programs - 1) * G
    tops, sums = torch.empty(2, parts, dtype=torch.float32, device=q.device)
    out_parts = torch.empty(parts, DV, dtype=torch.float32, device=q.device)
    out = torch.empty(B, G * sum(ranks[Hkv:]), dtype=q.dtype, device=q.device)
    _fdc_kernel[programs,](
        q, packed, table, pos, tops, sums, out_parts, B, S, Hkv, scale * LOG2E, G, max(16, power2(G)), DQ,
        DV, W, UNIT, HP, BP, BLOCK, T, stages, num_warps=warps, **overlapped(q.device),
    )  # fmt: skip
    _fdc_merge_kernel[B * Hkv, G](
        tops, sums, out_parts, table, pos, out, B, Hkv, programs, out.shape[1], G, DV, power2(DV), UNIT, HP,
        BP, BLOCK, at_once, num_warps=cdiv(at_once, 16), **overlapped(q.device),
    )  # fmt: skip
    return out


def fdc_config(itemsize: int) -> tuple[int, int, int, int, int]:
    """(tokens a tile at full width, warps, stages, programs a multiprocessor, tokens a block)."""
    return (16, 4, 2, 2, 64) if itemsize == 4 else (32, 2, 3, 4, 128)


# ----------------------------------------------------------------------------------- rows out of host memory


@jit
def _fetch_kernel(
    k_p, v_p, index_p, place_p, miss_p, hot_k_p, hot_v_p, S, n, slots, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    miss = tl.load(miss_p + head * n + entry, mask=entry < n, other=0) != 0
    index = tl.load(index_p + head * n + entry, mask=miss, other=0)
    place = tl.load(place_p + head * n + entry, mask=miss, other=0)
    d = tl.arange(0, DP)
    mask = miss[:, None] & (d < D)[None, :]  # lanes that are off read nothing over the bus
    source = (head * S + index)[:, None] * D + d[None, :]
    target = (head * slots + place)[:, None] * D + d[None, :]
    k = tl.load(k_p + source, mask=mask)  # both loads before the first store: twice as many in flight
    v = tl.load(v_p + source, mask=mask)
    tl.store(hot_k_p + target, k, mask=mask)
    tl.store(hot_v_p + target, v, mask=mask)


def fetch_rows(
    k: Tensor, v: Tensor, index: Tensor, place: Tensor, miss: Tensor, hot_k: Tensor, hot_v: Tensor
) -> None:
    """hot[place] = rows[index] where miss, for K and V; only missing rows are read.

    k, v [B, Hkv, S, D], on the GPU or host memory mapped into it; index, place int64 [B, Hkv, n] and miss
    bool [B, Hkv, n], the places of missing rows distinct; hot_k, hot_v [B, Hkv, slots, D]. Truth:
    compress.fetch_rows."""
    B, Hkv, S, D = k.shape
    n, slots, rows = index.shape[2], hot_k.shape[2], 16
    need(triton is not None, "triton is not installed: use the PyTorch path")
    shape("v", v, B, Hkv, S, D, dtype=k.dtype)
    shape("index", index, B, Hkv, n, dtype=torch.int64)
    shape("place", place, B, Hkv, n, dtype=torch.int64)
    shape("miss", miss, B, Hkv, n, dtype=torch.bool)
    shape("hot_k", hot_k, B, Hkv, slots, D, dtype=k.dtype)
    shape("hot_v", hot_v, B, Hkv, slots, D, dtype=k.dtype)
    tensors = {"k": k, "v": v, "index": index, "place": place, "miss": miss, "hot_k": hot_k, "hot_v": hot_v}
    for name, tensor in tensors.items():
        need(tensor.is_contiguous(), f"{name} {list(tensor.shape)} must be contiguous")
    if n:
        _fetch_kernel[B * Hkv, cdiv(n, rows)](
            k, v, index, place, miss.to(torch.int8), hot_k, hot_v, S, n, slots, D, power2(D), rows,
            num_warps=4,
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------- benchmark
#
# Tables of times on a CUDA GPU, in microseconds:
#     operation  each operator alone, with arguments that a method of compress.py gives it in a decode step
#     method     the attention of one layer in a decode step, compiled: from q, k and v before RoPE to the
#                heads' results. dense_us is cuDNN's attention over plain K and V
#     breakeven  the same at many lengths, and the length from which on a method is faster than cuDNN
# Weights are random, and all rows of the batch are full. A time is the median over replays of a CUDA graph.
# The graph takes several sets of inputs in turn, so that they come from memory: in a model, other layers'
# weights push them out of the L2 cache. limit_us is the least that a call can take: its bytes at the measured
# bandwidth, or its FLOPs at the measured rate if that is longer.

TABLES = ("operation", "method", "breakeven")
MODELS = {  # name -> name in model.SHAPES, shapes of the first two tables
    "7b": ("llama-2-7b", ["8x4096", "8x32768"]),
    "8b": ("llama-3.1-8b", ["8x32768", "1x131072"]),
}
GRID = {f"{B}x{1024 << i}": (B, 1024 << i) for B in (1, 2, 4, 8, 16) for i in range(8)}


def cases(B: int, S: int) -> dict[str, tuple[str, dict]]:
    """Name -> method and settings beside the defaults. Most that select attend 1/8 of the tokens."""
    made = {"dense": ("dense", {}), "sals": ("sals", {}), "sals-sum": ("sals", {"score": "sum"})}
    made |= {"sals-bf16": ("sals", {"latent_bits": 16}), "loki": ("loki", {"k": 0.125, "d": 0.5})}
    made |= {"lrqk": ("lrqk", {"kv_device": "cpu" if B == 1 else "cuda"})}
    made |= {name: (name, {}) for name in ("elitekv", "fdc", "palu", "kivi", "shadowkv")}
    made |= {name: (name, {"keep": 0.125}) for name in ("topk", "quest", "doublesparse", "h2o")}
    made |= {"topk-4bit": ("topk", {"keep": 0.125, "kv_bits": 4})}
    return made | {"streaming": ("streaming", {"recent": S // 8})}


def graph_time(calls: list, between=lambda: None, replays: int = 15) -> float:
    """Microseconds a call: the median over replays of one CUDA graph of all calls. `between` runs before each
    replay and is not timed."""
    graph, stream, times = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    for place in (torch.cuda.stream(stream), torch.cuda.graph(graph)):  # first what a capture cannot compile
        with place:
            for call in calls:
                call()
        torch.cuda.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < 0.05:  # until the clocks have settled after what ran before
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(replays):
        between()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return sorted(times)[replays // 2]


def measured_limits() -> tuple[float, float]:
    """(bytes/us, FLOP/us) of this GPU: the better of a large copy (reads and writes) and a read, and a large
    product of bf16."""
    x = torch.randn(1 << 15, 1 << 15, dtype=torch.bfloat16, device="cuda")
    y, rows = torch.empty_like(x), torch.empty_like(x[0])
    copied = 2 * x.nbytes / graph_time([lambda: torch.neg(x, out=y)])
    bandwidth = max(copied, x.nbytes / graph_time([lambda: torch.amax(x, 1, out=rows)]))
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    return bandwidth, 2 * 8192**3 / graph_time([lambda: a @ b] * 4)


def cold_sets(x, read: float, stored: float, kept: Sequence = ()) -> list:
    """x and deep copies of it, which share what is kept: as many as leave an L2 of 60 MB cold, if a call
    reads so many of the bytes stored in one, but at most 256 and what 16 GB hold."""
    n = max(2, min(256, math.ceil(240e6 / max(1, read)), int(16e9 / stored)))
    return [x, *(copy.deepcopy(x, {id(each): each for each in kept}) for _ in range(n - 1))]


@functools.cache
def cudnn_time(B: int, S: int, Hq: int, Hkv: int, D: int) -> float:
    """Microseconds of PyTorch's attention by cuDNN over plain K and V."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=Hq > Hkv)

    sizes, nbytes = ((B, Hq, 1, D), (B, Hkv, S, D), (B, Hkv, S, D)), 4 * B * S * Hkv * D
    inputs = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
    return graph_time([functools.partial(attend, *each) for each in cold_sets(inputs, nbytes, nbytes)])


def filled_layer(ops, config, B: int, S: int, case: str, device: str = "cuda") -> tuple:
    """A layer of random weights; its cache, which calls the operators of ops and holds S - 1 tokens a row;
    the next token's position, and what wqkv may give for it."""
    import compress  # nothing above imports the rest of the project
    import model

    name, settings = cases(B, S)[case]
    llama, method = model.empty_model(config, torch.device(device), torch.bfloat16), compress.METHODS[name]
    for weight in llama.parameters():
        weight.normal_(0, 0.02)
    room = compress.Room(llama, B, S, kernels=False)
    room.kernels, room.rope_pairs = ops, ops.rope_pairs(room.cos, room.sin, room.dtype)
    artifact = compress.random_artifact(name, config) if method.fitted else {}
    caches = method.build(llama, compress.settings_from(name, settings), room, artifact)
    layer, cache = llama.layers[2], caches[2]  # some methods treat the first two and the last otherwise
    prompt = layer.attention.wqkv(torch.randn(S - 1, config.dim, dtype=room.dtype, device=device))
    layer.attention.attended(prompt, lambda *parts: cache.prefill(0, *parts))
    for buffer in cache.buffers():
        if buffer.shape[:1] == (B,):
            buffer[1:] = buffer[:1]  # all rows are alike
        elif buffer.ndim == 1:
            buffer.normal_()  # FDC and Palu have all rows in one
    return layer, cache, torch.full((B,), S - 1, dtype=torch.int32, device=device), prompt[-B:].clone()


def method_rows(ops, config, B: int, S: int, case: str, limits: tuple) -> Iterator[dict]:
    """The time of a method's attention in one layer. Limit: the bytes that its cache says it reads."""
    layer, cache, pos, qkv = filled_layer(ops, config, B, S, case)
    attention, read = layer.attention, cache.bytes_read(S) * B
    on_host = [x for x in vars(cache).values() if isinstance(x, Tensor) and x.ndim == 4]
    kept = [ops, cache.room, attention.wqkv, attention.wo, *on_host]
    caches = cold_sets(cache, read, cache.measured(), kept)
    tokens = [qkv.clone() for _ in caches]

    def decode(qkv, cache):
        return attention.attended(qkv, lambda *parts: cache.decode(pos, *parts))

    def next_tokens():  # with a correlation of 0.8 to the last ones, so that LRQK misses some rows
        for qkv in tokens:
            qkv.mul_(0.8).add_(torch.randn_like(qkv), alpha=0.6)

    torch._dynamo.reset()
    step = torch.compile(decode, dynamic=False)
    calls = [functools.partial(step, *each) for each in zip(tokens, caches, strict=True)]
    us = graph_time(calls, next_tokens)
    dense_us = cudnn_time(B, S, config.n_heads, config.n_kv_heads, config.head_dim)
    yield {"method": case, "us": us, "dense_us": dense_us, "limit_us": read / limits[0]}


class Recorder(TorchDispatchMode):
    """Keeps what is called of the operators: (name, operator, arguments, result)."""

    calls = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.namespace.startswith("kv_"):  # made by `operator`
            self.calls = (*self.calls, (function._opname, function, args, out))
        return out


def bytes_of(*things) -> int:
    """Bytes of the tensors in nested lists; views of one storage count once."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(things) if isinstance(x, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def work_of(name: str, args: tuple, out) -> tuple[float, float]:
    """The least that a call can do: bytes, and FLOPs where they may take longer."""
    share, flops = 1.0, 0.0  # share of the arguments' bytes
    if name.endswith("append"):  # writes one token
        share = 0.0
    elif name == "scores":  # reads the leading dims of rows
        share = args[0].shape[-1] / args[1].shape[-1]
    elif name == "attend":
        q, kind, (latent, *_), (v, *_), _, _, index = args[:7]
        heads, S = v.shape[1:3]
        if index is not None:  # of a row, of each KV head or of each query head
            share = min(1, index[0].numel() / (heads if index.ndim == 3 else 1) / S)
        if kind == "latents":  # makes keys, in int8 at twice the rate of bf16
            flops = share * len(q) * S * latent.shape[-1] * heads * q.shape[-1] * latent.element_size()
    return share * bytes_of(args) + bytes_of(out), flops


def operator_rows(ops, config, B: int, S: int, case: str, limits: tuple) -> Iterator[dict]:
    """The times of what a layer calls in a decode step, its linear layers included."""
    from model import decode_layer

    layer, cache, pos, qkv = filled_layer(ops, config, B, S, case)
    x = torch.randn(B, config.dim, dtype=qkv.dtype, device=qkv.device)
    with Recorder() as recorder:
        decode_layer(layer, qkv, x, pos, cache, layer.attention_norm, layer.attention.wqkv)
    for name, function, args, out in recorder.calls:
        nbytes, flops = work_of(name, args, out)
        limit, sets = max(nbytes / limits[0], flops / limits[1]), cold_sets(args, nbytes, bytes_of(args))
        times = {name: graph_time([functools.partial(function, *each) for each in sets])}
        if (case, name) == ("dense", "attend"):
            times["cuDNN"] = cudnn_time(B, S, config.n_heads, config.n_kv_heads, config.head_dim)
        for timed, us in times.items():
            yield {"operator": f"{case} {timed}", "us": us, "limit_us": limit, "share": limit / us}


def benchmark(ops, table: str, name: str, shapes: Sequence, methods: Sequence, limits: tuple) -> Iterator:
    """A table's rows of a model, at the usual shapes if none are given. What fails, most often for lack of
    memory, says why in a line."""
    import model

    shape, usual = MODELS[name]
    config = replace(model.SHAPES[shape], n_layers=4, vocab_size=256, max_positions=1 << 20)
    if table == "breakeven":  # shapes at which K and V of a layer take 4 GB at most
        usual = [at for at, (B, S) in GRID.items() if B in (1, 8) and B * S * config.kv_dim <= 1 << 30]
    rows_of = operator_rows if table == "operation" else method_rows
    for at, case in itertools.product(shapes or usual, methods):
        B, S = GRID[at]
        try:
            for row in rows_of(ops, config, B, S, case, limits):
                row = {key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}
                yield {"model": name, "batch": B, "length": S} | row
        except Exception as error:
            show(name, B, S, case, f" {type(error).__name__}: {error}".partition("\n")[0])
        gc.collect()
        torch.cuda.empty_cache()


def breakeven(rows: list[dict]) -> dict[tuple, int | None]:
    """(model, batch, method) -> the length from which on it beats cuDNN; None where not at the longest."""
    found = {}
    for row in sorted((row for row in rows if "method" in row), key=lambda row: row["length"]):
        key = row["model"], row["batch"], row["method"]
        found[key] = (found.get(key) or row["length"]) if row["us"] < row["dense_us"] else None
    return found


def show(model, batch, length, name, *times) -> None:
    line = f"{model:>5} {batch:>5} {length:>7}  {name:<26}" + "".join(f"{each:>11}" for each in times)
    print(line, file=sys.stderr, flush=True)


def main(ops) -> None:
    def fail(message: str):
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)

    about = "Times on a CUDA GPU. Default: the first two tables, of all methods, at two shapes of each model."
    parser = argparse.ArgumentParser(description=about)
    parser.error = lambda message: fail(f"{message}; see --help")
    lists = {"table": TABLES, "model": MODELS, "method": cases(1, 1024), "shape": GRID}
    for name, choices in lists.items():
        parser.add_argument(f"--{name}", nargs="+", choices=choices, metavar="NAME", help=", ".join(choices))
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--json", action="store_true", help="one compact JSON line at the end")
    options = parser.parse_args()
    if options.csv and not os.path.isdir(os.path.dirname(options.csv) or "."):  # now, rather than afterwards
        fail(f"--csv {options.csv}: there is no such folder")
    if triton is None or not torch.cuda.is_available():
        fail("the benchmark needs a CUDA GPU and triton")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    limits, rows = measured_limits(), []
    print("{:.3g} TB/s, {:.3g} TFLOP/s".format(*(each / 1e6 for each in limits)), file=sys.stderr)
    for table, name in itertools.product(options.table or TABLES[:2], options.model or MODELS):
        for row in benchmark(ops, table, name, options.shape, options.method or lists["method"], limits):
            if not rows or row.keys() != rows[-1].keys():
                show(*row)
            show(*row.values())
            rows.append(row)
    if "breakeven" in (options.table or ()):
        show("model", "batch", "from", "method")
        for (name, batch, method), length in breakeven(rows).items():
            show(name, batch, length or "never", method)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
            writer.writeheader()
            writer.writerows(rows)
    if options.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        print(json.dumps({"device": torch.cuda.get_device_name(), "versions": versions, "rows": rows}))


if __name__ == "__main__":
    main(sys.modules[__name__])
