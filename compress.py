"""Every cache: its settings, its mathematics, what it stores. A method is one block of this file.

A block reads from top to bottom: the settings; the paper's algorithm as one pure function of plain tensors
(`sals_step`, `lrqk_step`, ...); what we changed, each a function marked (ours); and the cache in the order of
a decode step: write, score, select, attend. A `*_step` gets q, k, v of the new token and `stored`, of the
S - 1 tokens before it; it gives the output, the tokens attended if not all are, and what is stored now.

A cache belongs to one layer and holds all entries of a batch. It gets q, k, v BEFORE RoPE:
    extend(batch, span, q, k, v, *folded)  entry `batch`'s tokens at positions `span`, a slice: its prompt or
                                           more of them, q [n, Hq, D], k and v [n, Hkv, D] -> [n, Hq, D]
    decode(pos, q, k, v, *folded)          one token each at positions pos [B], q [B, Hq, D] -> [B, Hq, D]
    formula(), bytes_read()                the byte ledger: what the method says it stores and reads
`folded` are products that a method has added to W_qkv, such as SALS's latents. FDC finds its values there
(its v is empty) and returns what its folded W_O takes; EliteKV gets one latent in the place of v, and
InfiniGen's decode besides the queries that it guessed.
Decode has fixed shapes and reads pos on the device, so a CUDA graph of it is right for every length.
What is stored is a buffer, so the measured size is the sum of the buffers: nothing here only masks.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import kernels
import model as model_file
from kernels import (
    LEVELS_APART,
    as_fp16,
    dequantize_mixed,
    gather_rows,
    group_scores,
    matmul_codes,
    mean_logits,
    pack,
    quantize_mixed,
    quantize_spread,
    token_logits,
    unpack,
)
from model import Attention, Linear, Llama, ModelConfig, UserError, apply_rope, causal_attention, rope_tables

VARIANTS = ("ours", "paper")

# What an artifact holds: name -> float or int, then the shape; None where any size will do.
Stored = dict[str, tuple]
Artifact = dict[str, Tensor]


def setting(default, text: str, choices: tuple | None = None, sets: str = "", within: str = "[0, inf)"):
    """A field of a settings dataclass: a command-line option. within: the interval of the numbers allowed.
    sets: what calibrate.py eval turns it for, "bytes" (a token), "tokens" (attended, of `budget`) or both."""
    return field(default=default, metadata={"help": text, "choices": choices, "sets": sets, "within": within})


def kernels_run(config: ModelConfig, device: torch.device, wanted: bool | None) -> bool:
    """Whether operations run as Triton kernels, or as PyTorch. wanted None: where they can, on CUDA, with
    triton, for head dims from 16 up (a tensor core's tile). UserError if wanted elsewhere."""
    fits = kernels.triton is not None and config.head_dim >= 16
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU, for tests
    if wanted and not (fits and runs):
        raise UserError("the kernels need CUDA, triton and a head dim of at least 16; use --no-kernels")
    return bool(wanted or wanted is None and fits and device.type == "cuda")


def inside(value: float, interval: str) -> bool:
    """Does the value lie in an interval such as "(0, 1]"?"""
    low, high = map(float, interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)


ONLY_ELITEKV = "this checkpoint was uptrained for EliteKV: run it with --method elitekv"

# ------------------------------------------------------------------------------------- what all caches share


class Context:
    """What all caches of a run share: the model's shape, the batch, RoPE, and whether operations run as
    kernels."""

    def __init__(self, model: Llama, batch_size: int, capacity: int, kernel: bool | None = None):
        self.config, self.batch_size, self.capacity = model.config, batch_size, capacity
        weight = model.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.cos, self.sin = rope_tables(model.config, capacity, self.device)  # [capacity, D/2] each
        self.batch_ids = torch.arange(batch_size, device=self.device)
        self.positions = torch.arange(capacity, device=self.device)
        self.scale = model.config.head_dim**-0.5  # of logits
        self.decode_steps = ()  # a method's own, in the place of Llama.decode and its two steps
        self.kernel = kernels_run(model.config, self.device, kernel)
        self.rope_pairs = kernels.rope_pairs(self.cos, self.sin, self.dtype)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Storage [B, *shape]. Zeroed, since a masked weight of 0 times a stray NaN would still be NaN."""
        return torch.zeros(self.batch_size, *shape, dtype=dtype or self.dtype, device=self.device)

    def rope(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """Rotates x [..., H, D] at positions [...], a tensor or a slice."""
        return apply_rope(x, self.cos[positions], self.sin[positions])


def mix_codes(weights: Tensor, codes: Tensor, low_scale: Tensor, bits: int) -> Tensor:
    """weights [B, H, G, S] fp32 times values in codes of `quantize` [B, H, S, D * bits / 8] -> [B, H, G, D]:
    a product for each run of channels that one group and one plane of the codes hold."""
    low, scale = low_scale.to(weights.dtype).unbind(-1)  # [B, H, S, n]
    width, n, parts = codes.shape[-1], low_scale.shape[-2], []
    group = width * 8 // bits // n  # channels
    run = math.gcd(group, width)
    for channel in range(0, group * n, run):
        (plane, byte), i = divmod(channel, width), channel // group
        part = (codes[..., byte : byte + run] >> (plane * bits)) & (2**bits - 1)
        if torch.compiler.is_compiling() and codes.device.type == "cpu":
            # One loop: a matrix product would write all codes to memory as floats.
            decoded = part * scale[..., i, None] + low[..., i, None]
            parts.append((weights[..., None] * decoded[:, :, None]).sum(-2))
        else:
            parts.append(matmul_codes(weights * scale[:, :, None, :, i], part) + weights @ low[..., i, None])
    return torch.cat(parts, -1)


def in_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Heads x [..., H, D] in the bases [..., Hkv, D, r] of their KV heads -> [..., H, r]."""
    grouped = x.unflatten(-2, (basis.shape[-3], -1))
    return torch.einsum("...hgd,...hdr->...hgr", grouped, basis).flatten(-3, -2)


def appended(stored: Iterable[Tensor], *new: Tensor) -> tuple[Tensor, ...]:
    """What is stored of S tokens, [S, ...] each: of S - 1 tokens `stored`, of the new one `new`."""
    return tuple(torch.cat((old, x[None])) for old, x in zip(stored, new, strict=True))


# ------------------------------------------------------------------------------------------------- budgets


def kept_tokens(keep: float, length: int) -> int:
    """Tokens out of `length` that a budget `keep` allows: a fraction, but at least 1, or above 1 a count."""
    return max(1, min(length, int(keep * length) if keep <= 1 else int(keep)))


def left_to_select(keep: float, total: int, capacity: int, x: int, z: int) -> int:
    """y: what a budget `keep`, of `total` tokens, leaves beside x sinks and z recent ones."""
    if total < x + z:
        raise UserError(f"--keep {keep:g} of {capacity} tokens is fewer than {x} sinks and {z} recent ones")
    return total - x - z


def within(capacity: int, *parts: int) -> tuple[int, ...]:
    """The parts of a budget, in tokens, each cut to what those after it leave of the capacity."""
    ends = [min(end, capacity) for end in itertools.accumulate(reversed(parts))]
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))[::-1]


def rank_of(fraction: float, width: int) -> int:
    """A fraction of so many dims, to the nearest but at least 1."""
    return max(1, round(fraction * width))


# -------------------------------------------------------------------------------------------------- stores
#
# A store holds numbers of tokens, [B, H heads, S tokens, width], in one form, and owns their buffers:
#     write(where, x)    where = (batch, tokens): an int and a slice for x [n, H, width] of one entry, or two
#                        tensors [B] for one token each, x [B, H, width]
#     read(pos, index)   the numbers of tokens index [B, 1 or H, n], or of all -> [B, H, n, width]
#     past(batch, n)     what is kept of an entry's first n tokens, as `read` gives it -> [<= n, H, width]
#     logits(q, pos)     q [B, H, G, d] times the d leading numbers of all tokens -> [B, H, G, S]
#     mix(weights, pos)  weights [B, H, G, S] fp32 times all of them -> [B, H, G, width]
#     kernel_form()      what kernels.attend takes; `kind` and `bits` say which form that is
#     token_bytes        of one token, all heads. formula(): of all. bytes_of(n, length): of n of `length`
# pos [B] is the newest token's position: forms with a ring ask for it.


class TokenStore(nn.Module):
    """The numbers as they are; the base of other stores. by_token: a token's heads lie side by side."""

    kind, bits = "plain", 16

    def __init__(self, context: Context, heads: int, tokens: int, width: int, by_token: bool = False):
        super().__init__()
        self.context, self.heads, self.tokens, self.width = context, heads, tokens, width
        self.token_bytes, places = 0, (tokens, heads) if by_token else (heads, tokens)
        for name, (shape, dtype) in self.layout().items():
            part = context.zeros(*places, *shape, dtype=dtype)
            self.register_buffer(name, part.transpose(1, 2) if by_token else part)
            self.token_bytes += heads * math.prod(shape) * dtype.itemsize

    def layout(self) -> dict[str, tuple]:
        """The buffers [B, H, S, ...]: name -> shape and dtype of what one head of one token has there."""
        return {"rows": ((self.width,), self.context.dtype)}

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the buffers hold of x [..., width]."""
        return (x,)

    def decode(self, rows: Tensor) -> Tensor:
        """The inverse."""
        return rows

    def parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.layout()]

    def write(self, where: tuple, x: Tensor) -> None:
        batch, tokens = where
        for part, new in zip(self.parts(), self.encode(x), strict=True):
            part[batch, :, tokens] = new.transpose(0, 1) if isinstance(batch, int) else new

    def read(self, pos: Tensor, index: Tensor | None = None) -> Tensor:
        parts = self.parts()
        if index is not None:
            parts = (gather_rows(part, index.expand(-1, self.heads, -1)) for part in parts)
        return self.decode(*parts)

    def past(self, batch: int, n: int) -> Tensor:
        return self.decode(*(part[batch, :, :n] for part in self.parts())).transpose(0, 1)

    def scored(self, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """All tokens as kernels.scores takes them: rows, and of codes their scales."""
        return self.rows, None

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        return token_logits(q, *self.scored(pos))

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return matmul_codes(weights, self.rows)

    kernel_form = parts

    def formula(self) -> int:
        return self.context.batch_size * self.tokens * self.token_bytes

    def bytes_of(self, n: float, length: int) -> float:
        return n * self.token_bytes


class Window(TokenStore):
    """The x first and z last tokens alone, as they are: slots of the sinks, then a ring, filled in order."""

    def __init__(self, context: Context, heads: int, width: int, x: int, z: int, by_token: bool = False):
        super().__init__(context, heads, x + z, width, by_token)
        self.x, self.z = x, z

    def slot(self, position: Tensor) -> Tensor:
        return torch.where(position < self.x, position, self.x + (position - self.x) % self.z)

    def kept(self, span: slice) -> Tensor:
        """The positions of `span` that the window holds once all of it is written."""
        places = self.context.positions[span]
        sinks = max(0, self.x - span.start)
        return torch.cat((places[:sinks], places[max(sinks, len(places) - self.z) :]))

    def write(self, where: tuple, x: Tensor) -> None:
        batch, tokens = where
        if isinstance(batch, int):
            span, tokens = tokens, self.kept(tokens)
            x = x[tokens - span.start]
        super().write((batch, self.slot(tokens)), x)

    def overlay(self, batch: int, x: Tensor) -> Tensor:
        """x [n, H, width], an entry's tokens so far, with the exact ones that the window holds."""
        places = self.kept(slice(0, len(x)))
        return x.index_copy(0, places, self.rows[batch, :, self.slot(places)].transpose(0, 1))


def ring_positions(pos: Tensor, z: int) -> Tensor:
    """The position in each slot of a ring of z once pos [B] is written: [B, z], negative where empty."""
    return pos[:, None] - (pos[:, None] - torch.arange(z, device=pos.device)) % z


class Int8Store(TokenStore):
    """Int8 codes with one scale for a head's row (`quantize_int8`)."""

    kind, bits = "int8", 8

    def layout(self) -> dict[str, tuple]:
        return {"rows": ((self.width,), torch.int8), "scale": ((), torch.float32)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = model_file.quantize_int8(x)
        return codes, scale[..., 0]

    def decode(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.to(self.context.dtype) * scale[..., None]).to(self.context.dtype)

    def scored(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows, self.scale

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return matmul_codes(weights * self.scale[:, :, None], self.rows)


class MixedStore(Int8Store):
    """Int8 codes of the r* leading numbers of a row, 4-bit codes of the others, and one scale (SALS)."""

    kind = "mixed"

    def __init__(self, context: Context, heads: int, tokens: int, width: int, lead: int):
        self.lead = lead
        super().__init__(context, heads, tokens, width)

    def layout(self) -> dict[str, tuple]:
        packed = ((self.width - self.lead) // 2,), torch.uint8
        return {"rows": ((self.lead,), torch.int8), "scale": ((), torch.float32), "rest": packed}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return quantize_mixed(x, self.lead)

    def decode(self, rows: Tensor, scale: Tensor, rest: Tensor) -> Tensor:
        return dequantize_mixed(rows, scale, rest).to(self.context.dtype)


class CodedStore(TokenStore):
    """Codes of 2 or 4 bits with a minimum and a scale for 32 channels, or a narrow row (`quantize`)."""

    group = 32  # channels that share them

    def __init__(self, context: Context, heads: int, tokens: int, width: int, bits: int, by_token=False):
        self.bits, self.group = bits, min(self.group, width)
        if width % self.group or width * bits % 8:
            fault = "need a head dim that groups of 32 divide, or that fills whole bytes"
            raise UserError(f"{bits}-bit values {fault}, not {width}")
        super().__init__(context, heads, tokens, width, by_token)

    def layout(self) -> dict[str, tuple]:
        codes = (self.width * self.bits // 8,), torch.uint8
        return {"rows": codes, "scale": ((self.width // self.group, 2), torch.float16)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, self.bits, self.group)

    def low_scale(self, scale: Tensor) -> Tensor:
        """(minimum, scale) of each group [..., groups, 2], of what is stored."""
        return scale

    def decode(self, rows: Tensor, scale: Tensor) -> Tensor:
        return dequantize(rows, self.low_scale(scale), self.bits, self.group, self.context.dtype)

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return mix_codes(weights, self.rows, self.low_scale(self.scale), self.bits)


class ScaledStore(CodedStore):
    """Codes of 2 or 4 bits with one scale for a head's row, which is evenly spread (`quantize_spread`)."""

    kind = "spread"
    group = math.inf  # all of a row

    def layout(self) -> dict[str, tuple]:
        return super().layout() | {"scale": ((), torch.float16)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_spread(x, self.bits)

    def low_scale(self, scale: Tensor) -> Tensor:
        return spread_levels(scale, self.bits)


class HostStore(TokenStore):
    """The numbers as they are, in host memory, which kernels read and write (host_rows)."""

    def __init__(self, context: Context, heads: int, tokens: int, width: int):
        super().__init__(context, heads, 0, width)  # of no tokens on the device
        del self.rows
        self.rows = host_rows(context, heads, tokens, width)

    def write(self, where: tuple, x: Tensor) -> None:
        batch, tokens = where
        if isinstance(tokens, slice):  # it would be written by a copy, not by a kernel
            tokens = self.context.positions[tokens]
        super().write((batch, tokens), x)

    def past(self, batch: int, n: int) -> Tensor:
        return self.rows[batch, :, self.context.positions[:n]].transpose(0, 1)


class RebuiltKeys(nn.Module):
    """Keys RoPE(latent basis^T + bias), rebuilt where they are read: a store over `latents` [B, 1 or Hkv, S,
    r], basis [Hkv, D, r], bias [Hkv, D] or None. Int8 latents go with a basis of quantize_basis."""

    kind = "latents"

    def __init__(self, latents: TokenStore, basis: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.latents, self.context = latents, latents.context
        self.basis, self.bias = basis.to(self.context.dtype), bias
        if self.context.kernel:  # what it takes: RoPE's pairs side by side
            n, coded = len(basis), latents.kind == "mixed"
            codes, scale = quantize_basis(basis) if coded else (self.basis, None)
            bias = bias if bias is None else bias.float()[..., None] / (scale if coded else 1)
            given = codes, scale, bias
            self.paired = [x if x is None else kernels.interleave_rope(x.flatten(0, 1), n) for x in given]

    def rebuilt(self, latents: Tensor, places: Tensor | slice) -> Tensor:
        """Keys of latents [..., 1 or Hkv, n, r] at positions `places`, a slice or [..., 1 or Hkv, n]."""
        keys = torch.einsum("...hnr,hdr->...hnd", latents, self.basis)
        keys = keys if self.bias is None else keys + self.bias[:, None]  # which may be in fp32
        return self.context.rope(keys[..., None, :], places)[..., 0, :].to(self.context.dtype)

    def read(self, pos: Tensor, index: Tensor | None = None) -> Tensor:
        latents = self.latents.read(pos, index)
        return self.rebuilt(latents, slice(0, latents.shape[2]) if index is None else index)

    def past(self, batch: int, n: int) -> Tensor:
        return self.rebuilt(self.latents.past(batch, n).transpose(0, 1), slice(0, n)).transpose(0, 1)

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        return q @ self.read(pos).mT

    def kernel_form(self) -> list[Tensor | None]:
        stored = [x.expand(-1, len(self.basis), *x.shape[2:]) for x in self.latents.kernel_form()]
        return [*stored, *[None] * (3 - len(stored)), *self.paired, self.context.rope_pairs]


# ------------------------------------------------------------------------------ the base of all caches, dense


class Cache(nn.Module):
    """The base of all caches: exact attention of tokens that are read at once, the ledger, `report_selected`.

    past(batch, n): K after RoPE and V [<= n, Hkv, D] that a method keeps of an entry's first n tokens.
    write_chunk(batch, span, q, k, v, *rest): stores tokens; q, k after RoPE, rest: k before it, `folded`."""

    watch: Callable[..., None] | None = None  # evaluation's listener (calibrate.Watched)
    elite_rope = False  # rotates only a head's elite pairs, as a checkpoint uptrained for EliteKV must be

    def __init__(self, context: Context):
        super().__init__()
        if context.config.elitekv and not self.elite_rope:
            raise UserError(ONLY_ELITEKV)
        self.context, self.config, self.rope = context, context.config, context.rope
        self.scale, self.kernel = context.scale, context.kernel
        self.table_bytes = 0

    def table(self, name: str, *shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> None:
        """A buffer [B, *shape] beside the stores, such as positions of slots. The formula counts it."""
        self.register_buffer(name, self.context.zeros(*shape, dtype=dtype).fill_(fill))
        self.table_bytes += self.context.batch_size * math.prod(shape) * dtype.itemsize

    def extend(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        """An entry's tokens at positions `span` attend one another and what is kept of the past, exactly."""
        q, rotated = self.rope(q, span), self.rope(k, span)
        keys, values = rotated, v
        if span.start:
            past = self.past(batch, span.start)
            keys, values = (torch.cat(pair) for pair in zip(past, (rotated, v), strict=True))
        self.write_chunk(batch, span, q, rotated, v, k, *folded)
        return causal_attention(q, keys, values)

    def report_selected(self, pos: Tensor, index: Tensor, live: Tensor, recent: int = 0) -> None:
        """Decode tells evaluation here which tokens it attends if not all: index [B, n] for all heads,
        [B, Hkv, n] or [B, Hkv, G, n]; live, alike, which of them count; and the last `recent` up to pos."""
        if self.watch:
            self.watch(pos, index, live, recent)

    def measured(self) -> int:
        """Bytes of the live storage: the whole batch at full capacity."""
        return sum(b.untyped_storage().nbytes() for b in self.buffers())

    def stores(self) -> list[nn.Module]:
        """Its stores, each with buffers of its own."""
        return [part for part in self.modules() if part is not self and hasattr(part, "formula")]

    def token_bytes(self) -> int:
        """Bytes of one token in the stores that hold all of them."""
        return sum(store.token_bytes for store in self.stores() if not isinstance(store, Window))

    def formula(self) -> int:
        """Bytes that stores and tables say they hold, for the whole batch; tests hold measured() to it."""
        return round(sum(store.formula() for store in self.stores())) + self.table_bytes

    def bytes_read(self, length: int) -> int:
        """Bytes that one decode step must read from this layer's cache for one entry of `length` tokens."""
        return length * self.token_bytes()

    def host_bytes(self) -> int:
        """Bytes of host memory that a mixed cache uses besides; measured() and formula() are the device's."""
        return sum(store.rows.nbytes for store in self.stores() if isinstance(store, HostStore))

    def miss_rate(self) -> float | None:
        """Rows that a mixed cache had to fetch from host memory, as a fraction of those selected."""
        return None


@dataclass
class DenseSettings:
    """The full cache: nothing to set."""


class DenseCache(Cache):
    """Post-RoPE K and V of every token: the truth. The base of caches that keep K and V in two stores. A step
    attends `count` tokens, those of a budget, which `select` names, or else all that are stored."""

    def __init__(self, context: Context, keys=None, values=None, budget: tuple[int, ...] = ()):
        super().__init__(context)
        shape = context.config.n_kv_heads, context.capacity, context.config.head_dim
        self.keys, self.values = keys or TokenStore(context, *shape), values or TokenStore(context, *shape)
        self.budget, self.count = budget, min(sum(budget) or self.keys.tokens, context.capacity)

    def to_stored_basis(self, x: Tensor) -> Tensor:
        """Queries or keys [..., H, D] after RoPE as they are multiplied and kept, [..., H, width]."""
        return x

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        """Stores tokens, of k, v [n, Hkv, D] after RoPE; where: as stores have it."""
        self.keys.write(where, self.to_stored_basis(k))
        self.values.write(where, v)

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        """q [B, Hq, width] -> tokens to attend [B, Hkv, n] or [B, Hkv, G, n], negative: none. None: all."""

    def past(self, batch: int, n: int) -> tuple[Tensor, Tensor]:
        return self.keys.past(batch, n), self.values.past(batch, n)

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        self.write((batch, span), k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        self.write((self.context.batch_ids, pos), self.rope(k, pos), v)
        q = self.to_stored_basis(self.rope(q, pos))
        index = self.select(pos, q) if self.count < self.context.capacity else None
        if index is not None:
            self.report_selected(pos, index, index >= 0)
            index = index.flatten(1, -2)
        return kernels.attend(q, self.keys, self.values, pos, index, scale=self.scale, kernel=self.kernel)

    def tokens_read(self, length: int) -> tuple[float, float]:
        """Tokens of K and of V that one decode step must read, a KV head."""
        return min(length, self.count), min(length, self.count)

    def bytes_read(self, length: int) -> int:
        keys, values = self.tokens_read(length)
        return round(self.keys.bytes_of(keys, length) + self.values.bytes_of(values, length))


def dense_bytes(context: Context) -> int:
    """Bytes of a dense cache of one layer: B x capacity x 2 Hkv D."""
    return context.batch_size * context.capacity * 2 * context.config.kv_dim * context.dtype.itemsize


def each_layer(make: Callable[..., Cache]) -> Callable[..., list[Cache]]:
    """The `caches` of a method whose layers are alike, but for those of --skip, which are dense. make gets
    context and settings, and of a fitted method the layer's attention, the artifact and its number."""

    def build(model: Llama, settings: object, context: Context, artifact: Artifact) -> list[Cache]:
        caches = []
        skipped = skipped_layers(settings, len(model.layers)) if hasattr(settings, "skip") else ()
        for i, layer in enumerate(model.layers):
            fitted = (layer.attention, artifact, i) if artifact else ()
            caches.append(DenseCache(context) if i in skipped else make(context, settings, *fitted))
        return caches

    return build


def skipped_layers(settings: object, n_layers: int) -> set[int]:
    """The layers of --skip; of its default, those that a model of few layers has."""
    skip = settings.skip
    try:
        layers = [int(i) for i in skip.split(",") if i.strip()]
    except ValueError:
        raise UserError(f"--skip {skip!r}: give layer numbers, such as 0,1,-1 (or '' for none)") from None
    known = range(-n_layers, n_layers)
    if skip != type(settings).skip and not all(i in known for i in layers):
        raise UserError(f"--skip {skip!r}: the layers are {-n_layers} to {n_layers - 1}")
    return {i % n_layers for i in layers if i in known}


# -------------------------------------------------------------------------------- quantisation (KIVI, SALS)


def quantize(x: Tensor, bits: int, group: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Asymmetric codes of groups of channels in a token, as KIVI's values, or with dim -2 of tokens in a
    channel, as its keys (arXiv 2402.02750). x [..., S, D] -> codes [..., S, D * bits / 8] uint8 (`pack`), and
    (minimum, scale) of each group in fp16, [..., S, D / group, 2] or [..., S / group, D, 2]."""
    grouped = x.float().unflatten(dim, (-1, group))
    low, high = grouped.aminmax(dim=dim, keepdim=True)
    # Round the scale and minimum to what is stored first: the codes then belong to the stored values.
    low = as_fp16(low)
    scale = as_fp16((high - low.float()) / (2**bits - 1))
    step = torch.where(scale == 0, 1, scale.float())  # a constant group decodes to its minimum
    codes = ((grouped - low.float()) / step).round().clamp(0, 2**bits - 1)
    return pack(codes.flatten(dim - 1, dim), bits), torch.stack((low, scale), dim=-1).squeeze(dim - 1)


def dequantize(codes: Tensor, low_scale: Tensor, bits: int, group: int, dtype, dim: int = -1) -> Tensor:
    """The inverse: codes [..., S, D * bits / 8] and the groups' (minimum, scale) -> x [..., S, D]."""
    grouped = unpack(codes, bits).float().unflatten(dim, (-1, group))
    low, scale = (part.unsqueeze(dim) for part in low_scale.float().unbind(-1))
    return (grouped * scale + low).flatten(dim - 1, dim).to(dtype)


def spread_levels(scale: Tensor, bits: int) -> Tensor:
    """Their scales [...] as (minimum, scale) of one group a row, [..., 1, 2], as `dequantize` takes them."""
    scale = scale.float()
    return torch.stack(((1 - 2**bits) * scale, 2 * scale), -1)[..., None, :]


# ------------------------------------------------------------------------------------------------------- SALS


@dataclass
class SalsSettings:
    """SALS, Sparse Attention in Latent Space (arXiv 2510.24273)."""

    rank: float = setting(0.0, "r / (Hkv*D), of latents; 0: 1/2, narrow 5/8", sets="bytes", within="[0, 1]")
    score_rank: float = setting(0.0, "r*/r, dims that scoring reads; 0: 1/4, but >= 32 dims", within="[0, 1]")
    bits: int = setting(2, "bits of a value code", (2, 4))
    form: str = setting("ours", "latents in codes, V rotated (ours), or 16-bit latents (paper)", VARIANTS)
    sinks: int = setting(4, "x: first tokens that are always attended")
    critical: int = setting(444, "y: tokens selected by score, at each step and layer")
    recent: int = setting(64, "z: last tokens that are always attended, kept exact", within="[1, inf)")
    keep: float = setting(0.0, "sets y: x + y + z, as part of the capacity", sets="tokens", within="[0, 1]")
    score: str = setting("softmax", "softmax; or sum of logits, without RoPE (paper)", ("softmax", "sum"))
    skip: str = setting("0,1,-1", "layers that attend every token (the paper's 0, 1 and the last)")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        x, y, z = self.sinks, self.critical, self.recent
        if self.keep:
            y = left_to_select(self.keep, round(self.keep * capacity), capacity, x, z)
        return within(capacity, x, y, z)

    def ranks(self, c: ModelConfig) -> tuple[int, int]:
        """(r, r*). r is --rank, or half of the keys' width but at most 1024, the paper's 25 % of the widest
        keys, and five eighths of narrow ones; r* is a quarter of r, at most an eighth of the width, at least
        32 (ours). Our codes leave an even r - r* > 0: a byte holds two dims."""
        r = rank_of(self.rank or (0.625 if narrow(c) else min(0.5, 1024 / c.kv_dim)), c.kv_dim)
        lead = rank_of(self.score_rank, r) if self.score_rank else max(32, min(r // 4, c.kv_dim // 8))
        if self.form == "paper":
            return r, min(r, lead)
        r = max(r, 4)
        lead = min(lead, r - 2)
        return r, lead + (r - lead) % 2


def narrow(c: ModelConfig) -> bool:
    """Are a layer's keys of so few dims (ours: below 256) that there is little to save? Then SALS's default
    keeps more of them, and to rebuild all keys is cheap."""
    return c.kv_dim < 256


def sals_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, U: Tensor, r_score: int, bits: int, budget: tuple, rope
) -> tuple:
    """One decode step of SALS as published (Algorithm 1, whose lines number the steps), for one sequence.
    The x first and z last tokens are exact here: the paper compresses the last ones by half.

    q [Hq, D], k, v [Hkv, D]: before RoPE -> [Hq, D]. stored: latents [S - 1, r]; values in codes and their
    scales (`quantize`); K after RoPE and V [S - 1, Hkv, D], of which only the x first and z last are read.
    U [Hkv*D, r]; rope(x, positions) rotates x [n, H, D]."""
    (x, y, z), (heads, D), S = budget, k.shape, len(stored[0]) + 1
    # 2. Project the new token. The query of a group is the sum of its heads, which share its keys.
    k_latent = k.flatten() @ U
    q_latent = q.unflatten(0, (heads, -1)).sum(1).flatten() @ U
    # 3. Append.
    rotated = rope(k[None], torch.tensor([S - 1]))[0]
    stored = appended(stored, k_latent, *quantize(v, bits, min(32, D)), rotated, v)
    latents, codes, scales, k_exact, v_exact = stored
    # 4. Scores on the r* leading dims (sec. 4.3): without RoPE, for all heads at once.
    scores = latents[:, :r_score] @ q_latent[:r_score]
    # 5. The y best of the tokens between the x first and the z last (sec. 4.4).
    places = torch.arange(S)
    near = (places < x) | (places >= S - z)
    chosen = scores.masked_fill(near, -torch.inf).topk(min(y, S - int(near.sum()))).indices
    # 6. Rebuild their keys; decode their values.
    k_chosen = (latents[chosen] @ U.T).unflatten(-1, (heads, D))
    v_chosen = dequantize(codes[chosen], scales[chosen], bits, min(32, D), v.dtype)
    # 7. Rotate the query and the rebuilt keys, each at its own position.
    q, k_chosen = rope(q[None], torch.tensor([S - 1]))[0], rope(k_chosen, chosen)
    keys, values = torch.cat((k_chosen, k_exact[near])), torch.cat((v_chosen, v_exact[near]))  # [n, Hkv, D]
    # 8, 9. Attend.
    weights = torch.einsum("hgd,nhd->hgn", q.unflatten(0, (heads, -1)), keys).mul(D**-0.5).softmax(-1)
    out = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
    return out, torch.cat((chosen, places[near])), stored


def sals_step_ours(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, maps: tuple, r_score: int, bits: int, budget: tuple, rope,
    blocks: tuple, runs: tuple
) -> tuple:  # fmt: skip
    """The same step as it runs by default, for one sequence: what we changed is in steps 2, 3, 4 and 6.

    q [Hq, D], k, v [Hkv, D]: before RoPE -> [Hq, D], where W_V and W_O have mix_values' rotation. stored: of
    latents int8 codes [S - 1, r*], scales and 4-bit codes (`quantize_mixed`); of values codes and scales
    (`quantize_spread`); K after RoPE and V [S - 1, Hkv, D], of which only the x first and z last are read.
    maps: `down`, `up` [Hkv*D, r] and the mean key [Hkv*D] (sals_layer_maps); rope(x, positions) rotates x
    [n, H, D]; blocks: tokens of a block, and cos, sin [n, D/2] of each (mean_rotations);
    runs: the same of those for which the mean key is rotated once: blocks, or tokens if keys have a bias."""
    (x, y, z), (heads, D), S, (down, up, mean) = budget, k.shape, len(stored[0]) + 1, maps
    # 2. Project the new token, less the mean key. The query is rotated: each head scores for itself.
    k_latent, q = (k.flatten() - mean) @ down, rope(q[None], torch.tensor([S - 1]))
    # 3. Append, in codes: r* dims in int8, the others in 4 bits; each value's head with one scale.
    rotated = rope(k[None], torch.tensor([S - 1]))[0]
    new = *quantize_mixed(k_latent, r_score), *quantize_spread(v, bits), rotated, v
    stored = appended(stored, *new)
    lead, scale, rest, codes, v_scale, k_exact, v_exact = stored
    latents = dequantize_mixed(lead, scale, rest)
    # 4. Scores on the r* leading dims: q is turned back by the rotation of a token's block, so that scores
    # know the distance; each head's logits become weights, and a token's score is their sum.
    places = torch.arange(S)
    in_block, in_run = (apply_rope(q, c[places // n], -s[places // n]) for n, c, s in (blocks, runs))
    k_score, grouped = latents[:, :r_score] @ up[:, :r_score].T, (heads, -1)  # [S, Hkv*D]
    logits = (in_block.unflatten(1, grouped) * k_score.view(S, heads, 1, D)).sum(-1)  # [S, Hkv, G]
    logits = logits + (in_run.unflatten(1, grouped) * mean.view(heads, 1, D)).sum(-1)
    scores = logits.mul(D**-0.5).softmax(0).sum((1, 2))
    # 5. The y best of the tokens between the x first and the z last (sec. 4.4).
    near = (places < x) | (places >= S - z)
    chosen = scores.masked_fill(near, -torch.inf).topk(min(y, S - int(near.sum()))).indices
    # 6. Rebuild their keys, with the mean; decode their values.
    k_chosen = (latents[chosen] @ up.T + mean).unflatten(-1, (heads, D))
    v_chosen = dequantize(codes[chosen], spread_levels(v_scale[chosen], bits), bits, D, v.dtype)
    # 7. Rotate the rebuilt keys, each at its own position.
    k_chosen = rope(k_chosen, chosen)
    keys, values = torch.cat((k_chosen, k_exact[near])), torch.cat((v_chosen, v_exact[near]))  # [n, Hkv, D]
    # 8, 9. Attend.
    weights = torch.einsum("hgd,nhd->hgn", q[0].unflatten(0, (heads, -1)), keys).mul(D**-0.5).softmax(-1)
    out = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
    return out, torch.cat((chosen, places[near])), stored


# ---- what these use

SCORE_BLOCK = 512  # tokens for which scoring turns a query back once (ours); a multiple of a kernel's tile


@functools.lru_cache
def mix_rotation(*sizes: int) -> Tensor:
    """A fixed random rotation of consecutive parts of so many dims (ours): it spreads their energy evenly."""
    seeded = torch.Generator().manual_seed(0)
    parts = (torch.randn(n, n, generator=seeded) for n in sizes)
    return torch.block_diag(*(torch.linalg.qr(part).Q for part in parts))


def mix_values(attention: Attention, c: ModelConfig) -> None:
    """Rotates V of every head by mix_rotation's R: W_V becomes R^T W_V, W_O becomes W_O R (ours)."""
    linear, wo = attention.wqkv, attention.wo
    R = mix_rotation(c.head_dim).to(wo.weight.device)
    for name, parameter in list(linear.named_parameters()):
        q, k, v = parameter.float().split(attention.widths)
        v = torch.einsum("de,hd...->he...", R, v.unflatten(0, (c.n_kv_heads, -1))).flatten(0, 1)
        setattr(linear, name, nn.Parameter(torch.cat((q, k, v)).to(parameter.dtype), False))
    turned = (wo.weight.float().unflatten(1, (-1, c.head_dim)) @ R).flatten(1)
    wo.weight = nn.Parameter(turned.to(wo.weight.dtype), False)


def rest_gain(values: Tensor, lead: int, r: int) -> Tensor:
    """What multiplies a latent's dims from `lead` on, of these mean squares, so that quantize_mixed's 4-bit
    codes fit them (ours). The largest of n normal numbers is on the mean below sqrt(2 ln 2n) deviations."""
    leading, rest = values[:lead].mean().sqrt(), values[lead:r].mean().sqrt()
    unit = leading * (math.sqrt(2 * math.log(2 * lead)) / 127)
    return (8 / LEVELS_APART[4] * unit / rest.clamp(min=1e-12)).clamp(1e-2, 1e2)


def quantize_basis(basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis [Hkv, D, r] in int8 codes (ours), and scales [Hkv, D, 1], one for both dims of a RoPE pair."""
    codes, scale = model_file.quantize_int8(basis.unflatten(1, (2, -1)), (1, 3))  # [Hkv, 2, D/2, r]
    return codes.flatten(1, 2), scale.expand(-1, 2, -1, -1).flatten(1, 2)


def sals_layer_maps(c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int, device) -> tuple:
    """Layer i's `down` (keys to latents) and `up` (latents to keys, queries to latents) [Hkv*D, r], and the
    mean key [Hkv*D], which latents lack. Paper: U_r twice, and None. Ours: S U_r and S^-1 U_r of keys S (k -
    mean), rotated and scaled for codes, `up` as its int8 codes hold it. UserError if the rank is too high."""
    metric, (r, lead) = "key" if settings.form == "paper" else "query", settings.ranks(c)
    basis = artifact[f"{i}.{metric}_basis"].float().to(device)  # [Hkv*D, fitted rank], its best first
    if basis.shape[1] < r:
        fault = f"rank {r} is more than the {basis.shape[1]} directions in the artifact"
        raise UserError(f"{fault}; run calibrate.py fit with --max_rank {r / c.kv_dim:g}")
    U_r = basis[:, :r]
    if settings.form == "paper":
        return U_r, U_r, None
    S, mean = (artifact[name][i].to(device) for name in ("scale", "mean"))
    mix, gains = mix_rotation(lead, r - lead).to(device), torch.ones(r, device=device)
    gains[lead:] = rest_gain(artifact["query_eigenvalues"][i], lead, r)
    up = (U_r / S[:, None]) @ mix / gains
    codes, pair_scale = quantize_basis(up.unflatten(0, (c.n_kv_heads, -1)))
    return (U_r * S[:, None]) @ mix * gains, (codes * pair_scale).flatten(0, 1), mean


def mean_rotations(context: Context) -> tuple[int, Tensor, Tensor]:
    """SCORE_BLOCK, and cos and sin [n, D/2] of each block of positions: means over its tokens (ours)."""
    parts = (table.split(SCORE_BLOCK) for table in (context.cos, context.sin))
    return SCORE_BLOCK, *(torch.stack([part.mean(0) for part in each]) for each in parts)


def summed_query(q: Tensor, basis: Tensor, n_kv_heads: int) -> Tensor:
    """The one query [..., 1, r*] whose logits are the sums of all heads' (paper, sec. 4.3), of q [..., Hq, D]
    before RoPE, in the basis U_r* [Hkv*D, r*]. The heads of a group share their keys."""
    return q.unflatten(-2, (n_kv_heads, -1)).sum(-2).flatten(-2)[..., None, :] @ basis


def kivi_layers(c: ModelConfig, settings: SalsSettings) -> set[int]:
    """The layers that attend all in KIVI's 4-bit codes (ours): to rebuild their keys would take longer."""
    kivi = settings.form == "ours" and not narrow(c)
    return skipped_layers(settings, c.n_layers) if kivi else set()


def fold_sals(attention: Attention, c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int):
    """Layer i's attention with values rotated for our codes, and where q and k have no norms rows of wqkv:
    W_k U_r, and for score sum (sum over each group of W_q) U_r*. Biases fold alike, and take off the mean."""
    skipped, linear = i in skipped_layers(settings, c.n_layers), attention.wqkv
    if i in kivi_layers(c, settings):
        return attention
    if settings.form == "ours":
        mix_values(attention, c)
    if c.qk_norm:
        return attention
    down, up, mean = sals_layer_maps(c, settings, artifact, i, linear.weight.device)
    if linear.bias is None and mean is not None:
        linear.bias = nn.Parameter(linear.weight.new_zeros(sum(attention.widths)), False)
    for name, parameter in list(linear.named_parameters()):
        q, k, _ = parameter.float().split(attention.widths)
        rows = [down.T @ (k - mean if name == "bias" and mean is not None else k)]
        if settings.score == "sum" and not skipped:
            summed = q.unflatten(0, (c.n_kv_heads, c.group, -1)).sum(1).flatten(0, 1)
            rows.append(up[:, : settings.ranks(c)[1]].T @ summed)
        stacked = torch.cat((parameter, *(r.to(parameter.dtype) for r in rows)))
        setattr(linear, name, nn.Parameter(stacked, False))
    attention.widths = [*attention.widths, *map(len, rows)]
    linear.out_features = sum(attention.widths)
    return attention


class SalsCache(Cache):
    """Joint latents of pre-RoPE keys and values in codes, of every token; a window of exact ones. A `sparse`
    layer attends x + y + z tokens; others rebuild and attend all, and have no sinks in their window.

    maps: of sals_layer_maps. blocks, runs: of the score softmax, as sals_step_ours has them."""

    def __init__(
        self, context: Context, settings: SalsSettings, sparse: bool, maps: tuple, blocks=(), runs=()
    ):  # fmt: skip
        super().__init__(context)
        c, self.settings, self.sparse = context.config, settings, sparse
        self.budget, self.blocks, self.runs = settings.budget(context.capacity), blocks, runs
        self.r, self.r_score = settings.ranks(c)
        down, up, self.mean = maps
        self.up = up[:, : self.r_score].to(context.dtype).contiguous()  # weights, not cache
        self.down = down.to(context.dtype) if c.qk_norm else None  # else wqkv has it, and the mean's latent
        self.mean_latent = 0.0 if self.mean is None else (self.mean @ down).to(context.dtype)
        latents, ours = (context, 1, context.capacity, self.r), settings.form == "ours"
        self.latents = MixedStore(*latents, self.r_score) if ours else TokenStore(*latents)
        values = context, c.n_kv_heads, context.capacity, c.head_dim, settings.bits
        self.values = (ScaledStore if ours else CodedStore)(*values, by_token=True)
        mean = self.mean if self.mean is None else self.mean.view(c.n_kv_heads, -1)
        self.keys = RebuiltKeys(self.latents, up.unflatten(0, (c.n_kv_heads, -1)), mean)
        x, _, z = self.budget
        exact = c.n_kv_heads, c.head_dim, x if sparse else 0, z
        self.window = nn.ModuleList(Window(context, *exact, by_token=True) for _ in range(2))  # K, V

    def latent(self, k: Tensor, *folded: Tensor) -> Tensor:
        """k [n, Hkv, D] before RoPE, or what wqkv made of it -> latents [n, r]."""
        return folded[0] if folded else k.flatten(1) @ self.down - self.mean_latent

    def write(self, where: tuple, latent: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores tokens, of latents [n, r] and k, v [n, Hkv, D] after RoPE."""
        kernels.append(where, self.latents, latent, self.values, v, kernel=self.kernel)
        for store, x in zip(self.window, (k, v), strict=True):
            store.write(where, x)

    def past(self, batch: int, n: int) -> tuple[Tensor, Tensor]:
        stores = zip(self.window, (self.keys, self.values), strict=True)
        return tuple(window.overlay(batch, store.past(batch, n)) for window, store in stores)

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        self.write((batch, span), self.latent(*rest), k, v)

    def score(self, pos: Tensor, q: Tensor, rotated: Tensor, *folded: Tensor) -> Tensor:
        """One score a token, [B, S]. q: before RoPE; rotated: after; folded: the query that wqkv made."""
        stored = *self.latents.scored(pos), pos, self.scale
        if self.settings.score == "sum":  # the logits of the one query; the mean counts alike for all tokens
            query = folded[0][:, None] if folded else summed_query(q, self.up, self.config.n_kv_heads)
            return kernels.scores(query, *stored, "each", kernel=self.kernel).flatten(1)
        (block, *rotations), (run, *each) = self.blocks, self.runs
        queries, offset = kernels.block_queries(rotated, *rotations, self.up, self.mean, kernel=self.kernel)
        if run < block and self.mean is not None:
            offset = mean_logits(rotated, *each, self.mean)
        scores = kernels.scores(queries, *stored, "softmax", block, offset, run, kernel=self.kernel)
        return scores.flatten(1)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        rotated, index, (x, _, z) = self.rope(q, pos), None, self.budget
        self.write((self.context.batch_ids, pos), self.latent(k, *folded), self.rope(k, pos), v)
        if self.sparse:
            scores = self.score(pos, q, rotated, *folded[1:])
            index = kernels.select(scores, pos, self.budget, kernel=self.kernel)  # [B, x + y], -1 for none
            self.report_selected(pos, index.clamp(min=0), index >= 0, recent=z)
            index = index[:, x:]  # to rebuild: the sinks, which come first, are exact
        return kernels.attend(
            rotated,
            self.keys,
            self.values,
            pos,
            index,
            window=self.window,
            scale=self.scale,
            kernel=self.kernel,
        )

    def bytes_read(self, length: int) -> int:
        """Paper, sec. 4.5, with the values' true size: s r* for scoring, then every attended token once. Not
        what a step computes, such as the blocks' queries."""
        x, y, z = self.budget if self.sparse else (0, length, self.budget[2])
        scale = 4 if self.settings.form == "ours" else 0
        scored = self.r_score * self.latents.rows.element_size() + scale if self.sparse else 0
        recent, exact_bytes = min(z, length), sum(store.token_bytes for store in self.window)
        chosen = min(x + y, length - recent)
        exact = min(x, chosen)
        return length * scored + (chosen - exact) * self.token_bytes() + (exact + recent) * exact_bytes


def sals_caches(model: Llama, settings: SalsSettings, context: Context, artifact: Artifact) -> list[Cache]:
    c, blocks = model.config, mean_rotations(context)
    skipped, kivi = skipped_layers(settings, c.n_layers), kivi_layers(c, settings)
    runs = (1, context.cos, context.sin) if c.qkv_bias else blocks  # a biased channel turns within a block

    def cache(i: int) -> Cache:
        if i in kivi:
            return DenseCache(context, *kivi_kv(context, KiviSettings(4, 32)))
        maps = sals_layer_maps(c, settings, artifact, i, context.device)
        return SalsCache(context, settings, i not in skipped, maps, blocks, runs)

    return [cache(i) for i in range(c.n_layers)]


def sals_tensors(c: ModelConfig) -> Stored:
    bases = (f"{i}.{metric}_basis" for i in range(c.n_layers) for metric in ("query", "key"))
    rows = ("scale", "mean", "query_eigenvalues", "key_eigenvalues")
    return dict.fromkeys(rows, (float, c.n_layers, c.kv_dim)) | dict.fromkeys(bases, (float, c.kv_dim, None))


def sals_local_part(artifact: Artifact, c: ModelConfig) -> None:
    """Replaces each U by one of this rank's heads alone (ours): U_h diag(eigenvalues) U_h^T, of the rows U_h
    of these heads, is their block of the covariance. Its eigenvectors are U_h's left singular vectors."""
    for i, metric in itertools.product(range(c.n_layers), ("query", "key")):
        own = model_file.local_part(artifact[name := f"{i}.{metric}_basis"], (c.kv_dim, None)).double()
        values = artifact[f"{metric}_eigenvalues"][i]  # of all heads, then of these
        roots = values[: own.shape[1]].double().clamp(min=0).sqrt()
        U, singular, _ = torch.linalg.svd(own * roots, full_matrices=False)
        artifact[name], values[: len(singular)] = U.float(), singular.square()
    for name in ("query_eigenvalues", "key_eigenvalues"):
        artifact[name] = artifact[name][:, : c.kv_dim].contiguous()


# ---------------------------------------------------------------------------------------------------- EliteKV


@dataclass
class EliteSettings:
    """EliteKV: a few rotated pairs a head, all else of K and V in one latent (arXiv 2503.01586)."""

    r: int = setting(0, "r: elite pairs of each head, which stay rotated (0: as calibrated or uptrained)")
    d_ckv: int = setting(0, "d_ckv: dims of the latent of all else (0: as calibrated)", sets="bytes")
    pairs: str = setting("elite", "which pairs are rotated", ("elite", "uniform", "contribution"))
    lrd: str = setting("joint", "J-LRD, one latent of K and V, or S-LRD, one of each", ("joint", "separate"))
    shared: bool = setting(False, "one elite key for all heads of a layer, as MLA has it (ours)")


def elitekv_step(q: Tensor, k: Tensor, latent: Tensor, stored: tuple, b_k: Tensor, b_v: Tensor) -> tuple:
    """One decode step of EliteKV as published (sec. 3.2, Eq. 2), for one sequence, each head's 2r elite dims
    first. q [Hq, D] and k [Hkv, 2r]: elite dims rotated -> [Hq, D]. latent [d_ckv]: c = x A of all else.
    stored: elite keys [S - 1, Hkv, 2r] and latents. b_k [Hkv, D - 2r, d_ckv], b_v [Hkv, D, d_ckv]: B^T."""
    # 1. Append: the elite keys of each head, and one latent for all else of K and V.
    keys, latents = stored = appended(stored, k, latent)
    # 2. Expand what is not rotated, and the values: [K^n | V] = c B (Eq. 2).
    rest = torch.einsum("sc,hdc->shd", latents, b_k)
    values = torch.einsum("sc,hdc->shd", latents, b_v)
    # 3. Attend.
    grouped = q.unflatten(0, (len(b_k), -1))  # [Hkv, G, D]
    logits = torch.einsum("hgd,shd->hgs", grouped, torch.cat((keys, rest), -1)) * q.shape[-1] ** -0.5
    return torch.einsum("hgs,shd->hgd", logits.softmax(-1), values).flatten(0, 1), stored


def uniform_order(half: int, r: int) -> Tensor:
    """Uniform (sec. 4.3.1): r pairs spread evenly over the `half` = D/2, then the others; [half]."""
    chosen = [i * (half - 1) // max(1, r - 1) for i in range(r)]
    return torch.tensor(chosen + [c for c in range(half) if c not in chosen])


def elite_dims(order: Tensor, r: int) -> Tensor:
    """The dims of each head with its r elite pairs first: order of its pairs [Hkv, D/2] -> [Hkv, D]. Both
    parts are half-split again, pairs ascending, so that apply_rope turns the first 2r dims."""
    half = order.shape[1]
    elite, rest = order[:, :r].sort(-1).values, order[:, r:].sort(-1).values
    return torch.cat((elite, elite + half, rest, rest + half), 1)


def low_rank(k: Tensor, v: Tensor, d_ckv: int, kind: str, root: Tensor | None = None) -> tuple:
    """Factors of the un-rotated key weights and the value weights: [W_k^n | W_v] ~ A B (Eq. 2).

    k [dim, Hkv, D - 2r], v [dim, Hkv, D] -> A [dim, d_ckv] orthonormal (J-LRD), B [d_ckv, Hkv, 2D - 2r], keys
    before values; fp64. root [dim, dim], the square root of E x x^T: the best for inputs x (ours)."""
    if root is not None:
        a, b = low_rank(*(torch.tensordot(root, t.double(), 1) for t in (k, v)), d_ckv, kind)
        a, mix = torch.linalg.qr(torch.linalg.solve(root, a))  # training wants A orthonormal again
        return a, torch.tensordot(mix, b, 1)
    m = torch.cat((k, v), -1).double()
    if kind == "joint":
        a = left_singular(m)[1][:, :d_ckv]
        return a, torch.tensordot(a, m, ([0], [0]))
    values, vectors = zip(*(left_singular(part.double()) for part in (k, v)), strict=True)
    best = torch.cat(values).topk(d_ckv).indices  # below dim: of the keys
    a = torch.cat(vectors, 1)[:, best]
    is_key = torch.arange(m.shape[-1], device=m.device) < k.shape[-1]
    return a, torch.tensordot(a, m, ([0], [0])) * ((best < len(m))[:, None, None] == is_key)


def left_singular(m: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values [dim] and left singular vectors [dim, dim] of m [dim, ...], largest first."""
    values, vectors = torch.linalg.eigh(m.flatten(1) @ m.flatten(1).T)
    return values.flip(-1), vectors.flip(-1)


def shared_elite(q: Tensor, k: Tensor, root: Tensor | None) -> tuple[Tensor, Tensor]:
    """One elite key for all heads (ours): q [Hkv, G, 2r, n], k [Hkv, 2r, n] -> q and k [1, 2r, n]. Pairs are
    complex numbers: k_h ~ conj(f_h) k, by the SVD over the heads, and q_h takes f_h. root: see low_rank."""
    keys = torch.complex(*k.double().chunk(2, 1)).transpose(0, 1)  # [r, Hkv, n]
    seen = keys if root is None else keys[..., : len(root)] @ root.to(keys)
    factors = torch.linalg.svd(seen.mT, full_matrices=False)[2][:, :1].conj()  # [r, 1, Hkv]
    shared = (factors @ keys)[:, 0]  # [r, n]
    q = torch.complex(*q.double().chunk(2, 2)) * factors.permute(2, 1, 0)[..., None]  # [Hkv, G, r, n]
    return torch.cat((q.real, q.imag), 2), torch.cat((shared.real, shared.imag))[None]


def linear_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(dtype).contiguous(), False)
    layer.bias = bias if bias is None else nn.Parameter(bias.to(dtype).contiguous(), False)
    return layer


class EliteAttention(nn.Module):
    """Attention of which `attend` gets q [..., Hq, D], elite keys k_e [..., He, 2r] and the latent c_kv
    [..., d_ckv], before RoPE, dims in the order of `elite_dims`. order [He, D/2]: He is Hkv, or 1 where heads
    share an elite key. wqkv: rows of W_q, W_k^e, A^T. up: B^T, of each head D - 2r key and D value rows."""

    def __init__(self, c: ModelConfig, order: Tensor, r: int, wqkv: Linear, up: Linear, wo: Linear):
        super().__init__()
        self.config, self.order, self.r = c, order, r
        self.pairs = order[:, :r].sort(-1).values  # [He, r]
        self.widths = [c.n_heads * c.head_dim, len(order) * 2 * r, up.in_features]
        self.wqkv, self.up, self.wo = wqkv, up, wo

    forward = Attention.forward

    def attended(self, qkv: Tensor, attend) -> Tensor:
        q, k, latent = qkv.split(self.widths, dim=-1)
        q = q.unflatten(-1, (self.config.n_heads, -1))
        return attend(q, k.unflatten(-1, (-1, 2 * self.r)), latent).flatten(-2)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first 2r dims of x [..., S, H, n] by its head's elite angles; tables [..., S, D/2]."""
        x = x.unflatten(-2, (len(self.pairs), -1))  # [..., S, He, H / He, n]
        elite = apply_rope(x[..., : 2 * self.r], cos[..., self.pairs], sin[..., self.pairs])
        return torch.cat((elite, x[..., 2 * self.r :]), -1).flatten(-3, -2)

    def naive(self, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        """Causal attention over expanded K and V, from rotated q [..., S, Hq, D], k [..., P + S, He, 2r]."""
        d, heads = self.config.head_dim, self.config.n_kv_heads
        rest, v = self.up(latent).unflatten(-1, (heads, -1)).split((d - 2 * self.r, d), dim=-1)
        return causal_attention(q, torch.cat((k.expand(*rest.shape[:-1], -1), rest), -1), v)

    def causal(self, cos: Tensor, sin: Tensor):
        return lambda q, k, latent: self.naive(self.rotate(q, cos, sin), self.rotate(k, cos, sin), latent)


def in_order(rows: Tensor, dims: Tensor) -> Tensor:
    """Rows of H heads [H * D, ...] -> [Hkv, H / Hkv, D, ...], D in the order dims [Hkv, D] of its KV head."""
    rows = rows.unflatten(0, (len(dims), -1, dims.shape[1]))
    return rows.take_along_dim(dims.reshape(len(dims), 1, -1, *[1] * (rows.ndim - 3)), 2)


class EliteCache(Cache):
    """One row a token: a latent of all heads' values and un-rotated keys, then the rotated elite keys. Decode
    absorbs B_k into the query, zero at other heads' elite keys, and B_v into the output."""

    elite_rope = True

    def __init__(self, context: Context, settings: EliteSettings, attention: EliteAttention, *_):
        super().__init__(context)
        self.attention, self.r, self.d_ckv = attention, attention.r, attention.widths[2]
        self.latents = TokenStore(context, 1, context.capacity, sum(attention.widths[1:]))

    def extend(self, batch: int, span: slice, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        q, k = (self.attention.rotate(x, self.context.cos[span], self.context.sin[span]) for x in (q, k))
        self.latents.write((batch, span), torch.cat((latent, k.flatten(1)), -1)[:, None])
        latent, k = self.latents.past(batch, span.stop)[:, 0].tensor_split((self.d_ckv,), -1)
        return self.attention.naive(q, k.unflatten(-1, (-1, 2 * self.r)), latent)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        c, up, r2 = self.config, self.attention.up, 2 * self.r
        q, k = (self.attention.rotate(x, self.context.cos[pos], self.context.sin[pos]) for x in (q, k))
        self.latents.write((self.context.batch_ids, pos), torch.cat((latent, k.flatten(1)), -1)[:, None])
        b_k, b_v = up.weight.unflatten(0, (c.n_kv_heads, -1)).split((c.head_dim - r2, c.head_dim), 1)
        elite, rest = q.unflatten(1, (c.n_kv_heads, -1)).split((r2, b_k.shape[1]), -1)  # [B, Hkv, G, .]
        # A bias of the un-rotated keys would add the same to every token's logit: softmax drops it.
        rest = torch.einsum("bhgd,hdc->bhgc", rest, b_k)
        own = torch.eye(len(self.attention.pairs), dtype=q.dtype, device=q.device)[:, None, :, None]
        elite = (elite[..., None, :] * own).flatten(-2)  # [B, Hkv, G, He * 2r]
        query = torch.cat((rest, elite), -1).flatten(1, 2)
        mixed = kernels.attend_latent(
            query, self.latents.rows[:, 0], pos, self.d_ckv, scale=self.scale, kernel=self.kernel
        )
        out = torch.einsum("bhgc,hdc->bhgd", mixed.unflatten(1, (c.n_kv_heads, -1)), b_v)
        if up.bias is not None:  # weights sum to one
            out = out + up.bias.unflatten(0, (c.n_kv_heads, 1, -1))[..., -c.head_dim :]
        return out.flatten(1, 2)


def elite_sizes(c: ModelConfig, settings: EliteSettings, artifact: Artifact) -> tuple[int, int]:
    """r and d_ckv. Raises UserError where they do not fit the model, or the model not the method."""
    if c.qk_norm:
        raise UserError("elitekv cannot compress the keys of a model with q/k norms (Qwen3)")
    if rope_tables(c, 1, torch.device("cpu"))[0].ne(1).any():
        raise UserError("elitekv cannot take a RoPE that scales q, k (yarn): un-rotated pairs would not be")
    if c.elitekv and settings != EliteSettings():
        raise UserError("this checkpoint was uptrained: its r, d_ckv, pairs, lrd are fixed; leave them out")
    r, d_ckv = settings.r or int(artifact["r"]), settings.d_ckv or int(artifact["d_ckv"])
    if not 1 <= r <= c.head_dim // 2:
        raise UserError(f"--r {r}: a head has 1 to {c.head_dim // 2} pairs")
    most = min(c.dim, c.n_kv_heads * (2 * c.head_dim - 2 * r))
    if not 1 <= d_ckv <= most:
        raise UserError(f"--d_ckv {d_ckv}: with r = {r} the latent can have 1 to {most} dims")
    return r, d_ckv


def fold_elitekv(attention: Attention, c: ModelConfig, settings: EliteSettings, artifact: Artifact, i: int):
    """Layer i as EliteAttention. Uptrained factors A, B come from the artifact, others from the weights."""
    (r, d_ckv), d, heads = elite_sizes(c, settings, artifact), c.head_dim, c.n_kv_heads
    wqkv, root = attention.wqkv, artifact.get(f"{i}.root")  # only of uptraining
    uniform = uniform_order(d // 2, r).expand(heads, -1)  # [Hkv, D/2]
    order = uniform if settings.pairs == "uniform" else artifact[settings.pairs][i]
    if settings.shared:  # the pairs that come first in the mean over the heads
        order = order.argsort(-1).float().mean(0, keepdim=True).argsort(-1)
    order = order.to(wqkv.weight.device)
    dims = elite_dims(order, r).expand(heads, -1)  # [Hkv, D]
    rows = wqkv.weight if wqkv.bias is None else torch.cat((wqkv.weight, wqkv.bias[:, None]), 1)
    q, k, v = rows.split(attention.widths)
    q, k, v = in_order(q, dims), in_order(k, dims)[:, 0], v.unflatten(0, (heads, -1))
    elite, rest = k.split((2 * r, d - 2 * r), 1)
    if len(order) < heads:
        turned, elite = shared_elite(q[:, :, : 2 * r], elite, root)
        q = torch.cat((turned.to(q), q[:, :, 2 * r :]), 2)
    if f"{i}.A" in artifact and (r, d_ckv, settings.lrd) == (artifact["r"], artifact["d_ckv"], "joint"):
        a, b = (artifact[f"{i}.{name}"].to(order.device) for name in "AB")
    else:
        a, b = low_rank(*(x[..., : c.dim].permute(2, 0, 1) for x in (rest, v)), d_ckv, settings.lrd, root)
    stacked, up = torch.cat((q.flatten(0, 2), elite.flatten(0, 1).to(q))), b.flatten(1).T.to(q)
    bias = up_bias = None
    if wqkv.bias is not None:  # A x has none: what it would add comes with the biases of `up`
        bias = torch.cat((stacked[:, -1], q.new_zeros(a.shape[1])))
        up_bias = torch.cat((rest, v), 1)[..., -1].flatten()
    stacked = linear_of(torch.cat((stacked[:, : c.dim], a.T.to(q))), bias)
    return EliteAttention(c, order, r, stacked, linear_of(up, up_bias), attention.wo)


def elite_tensors(c: ModelConfig) -> Stored:
    # An uptrained checkpoint's pairs are fixed, and its factors are not made from the weights.
    order, sizes = (int, c.n_layers, c.n_kv_heads, c.head_dim // 2), {"r": (int,), "d_ckv": (int,)}
    if not c.elitekv:
        return sizes | {"elite": order, "contribution": order}
    factors = {f"{i}.A": (float, c.dim, None) for i in range(c.n_layers)}
    order = (int, c.n_layers, None, c.head_dim // 2)  # one a head, or one where the heads share an elite key
    return sizes | {"elite": order} | factors | {f"{i}.B": (float, None, None) for i in range(c.n_layers)}


def random_elitekv(c: ModelConfig) -> Artifact:
    """The paper's 25 % for Llama-2-7B (r = D/16), with factors of no meaning."""
    r = max(1, c.head_dim // 16)
    d_ckv = max(1, c.kv_dim // 2 - 2 * r * c.n_kv_heads)
    order = torch.arange(c.head_dim // 2).expand(c.n_layers, c.n_kv_heads, -1)
    a, n = random_basis(c.dim, d_ckv), c.n_kv_heads * (2 * c.head_dim - 2 * r)
    b = 0.02 * torch.randn(d_ckv, n, generator=torch.Generator().manual_seed(0))
    made = {f"{i}.{name}": x for i in range(c.n_layers) for name, x in (("A", a), ("B", b))}
    return made | {"r": torch.tensor(r), "d_ckv": torch.tensor(d_ckv), "elite": order, "contribution": order}


# ------------------------------------------------------------------------------------------------------- Loki


@dataclass
class LokiSettings:
    """Loki: low-rank keys for sparse attention (arXiv 2406.02542). Saves reads, not bytes."""

    k: float = setting(0.25, "k_f: tokens of a query head, or a fraction", sets="tokens", within="(0, inf)")
    d: float = setting(0.25, "d_f: leading fraction of D that scoring reads", sets="bytes", within="(0, 1]")
    explained: float = setting(0.0, "instead of d: a layer's mean Rank@v (App. B.2)", within="[0, 1)")
    basis: str = setting("auto", "keys the PCA was fitted on; auto: the better one", ("auto", "pre", "post"))
    share: str = setting("query", "who has k tokens: a head, or a KV head (ours)", ("query", "group"))
    reduced: bool = setting(False, "PCAAttn (App. E): cache and attend d components of every token")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """(x, y, z): sinks, selected and recent tokens of a query head, in a cache that is full."""
        return 0, capacity if self.reduced else kept_tokens(self.k, capacity), 0


def loki_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, P: Tensor, d: int, n: int) -> tuple:
    """One decode step of Loki as published (Algorithm 1, whose lines number the steps), for one KV head:
    q [G, D], k, v [D] after RoPE -> [G, D], and each query's n tokens [G, n]. stored: K P and V [S - 1, D].
    P [D, D]: principal components of the keys, the largest first."""
    # 2-4. Into the basis, which leaves full logits as they are (Lemma 4.1); append.
    q, k = q @ P, k @ P
    keys, values = stored = appended(stored, k, v)
    # 5. Scores on the d leading components.
    scores = q[:, :d] @ keys[:, :d].mT
    # 6, 7. The n best tokens of each query.
    chosen = scores.topk(min(n, len(keys))).indices
    # 8, 9. Attend them, on all components.
    weights = (q[:, None] * keys[chosen]).sum(-1).mul(len(P) ** -0.5).softmax(-1)  # [G, n]
    return (weights[..., None] * values[chosen]).sum(1), chosen, stored


class LokiCache(DenseCache):
    """Post-RoPE keys in the basis of their principal components, P per KV head, and plain V."""

    def __init__(self, context: Context, settings: LokiSettings, _, artifact: Artifact, i: int):
        c = context.config
        kind = ("pre", "post")[bool(artifact["better"])] if settings.basis == "auto" else settings.basis
        d = rank_of(settings.d, c.head_dim)
        if settings.explained:
            ranks = rank_at(artifact[f"{kind}.eigenvalues"][i], settings.explained)
            d = round(ranks.double().mean().item())
        # Components that are cached: the scale of their logits stays that of the full head dim.
        self.width = d if settings.reduced else c.head_dim
        keys = TokenStore(context, c.n_kv_heads, context.capacity, self.width)
        super().__init__(context, keys, budget=settings.budget(context.capacity))
        self.settings, self.d = settings, d
        basis = artifact[f"{kind}.basis"][i, ..., : self.width]  # P [Hkv, D, .], by falling eigenvalue
        self.basis = basis.to(context.device, context.dtype)

    def to_stored_basis(self, x: Tensor) -> Tensor:
        return in_basis(x, self.basis)

    def past(self, batch: int, n: int) -> tuple[Tensor, Tensor]:
        keys, values = super().past(batch, n)
        return in_basis(keys, self.basis.mT), values

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """Lines 5-7: the k best tokens of each query [B, Hkv, G, k], or of a group (group_scores)."""
        rule = {"query": "each", "group": "largest"}[self.settings.share]
        scores = kernels.scores(
            q[..., : self.d], *self.keys.scored(pos), pos, self.scale, rule, kernel=self.kernel
        )
        wanted = None
        if self.settings.k <= 1:  # a fraction of each entry's own length
            wanted = (self.settings.k * (pos + 1).double()).long().clamp(min=1)
        return kernels.select(scores, pos, self.budget, wanted, kernel=self.kernel)

    def tokens_read(self, length: int) -> tuple[float, float]:
        """d of every key, then K and V of the selected tokens: at most G k distinct ones a KV head."""
        if self.settings.reduced:
            return length, length
        sets = self.config.group if self.settings.share == "query" else 1
        chosen = min(length, sets * sum(self.settings.budget(length)))
        return chosen + length * self.d / self.width, chosen


def rank_at(values: Tensor, fraction: float) -> Tensor:
    """Rank@v (Loki Eq. 2): the least n whose leading eigenvalues [..., n] hold this fraction of their sum."""
    below = values.cumsum(-1) / values.sum(-1, keepdim=True) < fraction
    return below[..., :-1].sum(-1) + 1  # all n hold 1, whatever rounding says


def of_heads(*names: str, **others: tuple) -> Callable[[ModelConfig], Stored]:
    """The `tensors` of a method: of each KV head bases [D, D] or other numbers [D], and others."""

    def tensors(c: ModelConfig) -> Stored:
        heads = (float, c.n_layers, c.n_kv_heads, c.head_dim)
        return {name: (*heads, c.head_dim) if "basis" in name else heads for name in names} | others

    return tensors


loki_tensors = of_heads("pre.basis", "post.basis", "pre.eigenvalues", "post.eigenvalues", better=(int,))


# ------------------------------------------------------------------------------------------------------- LRQK


@dataclass
class LrqkSettings:
    """LRQK: low-rank query and key attention over a mixed cache (arXiv 2510.23649). Few bytes on the GPU."""

    rank: int = setting(0, "r: dims of A_Q and A_K, for each KV head (0: 32, or D if less)", sets="bytes")
    k: int = setting(2048, "tokens that each KV head selects by its proxy scores", sets="tokens")
    recent: int = setting(64, "lite tokens: the last ones, always attended, on the GPU", within="[1, inf)")
    mode: str = setting("optimal", "projection by a closed form (ours) or Alg. 2", ("optimal", "paper"))
    slots: float = setting(1.0, "hot slots on the GPU, in multiples of k (> 1: an LRU cache; 0: fetch all k)")
    kv_device: str = setting("cpu", "where all K and V live: pinned host memory or the GPU", ("cpu", "cuda"))

    def budget(self, capacity: int) -> tuple[int, int]:
        if self.slots != 0 and not 1 <= self.slots < float("inf"):
            raise UserError(f"--slots {self.slots}: give 0 (no hit/miss) or a multiple of k from 1 up")
        return within(capacity, self.k, self.recent)


LRQK_STEPS = 2  # max_iter of both algorithms; the paper's tol would be a wait for the host


def lrqk_prompt(gram_q: Tensor, gram_k: Tensor, columns: Tensor, r: int) -> tuple[Tensor, ...]:
    """A prompt's factors as published (Algorithm 1, all lambda = 1): W_Q, W_K [Hkv, D, r] after LRQK_STEPS
    rounds, and B_Q, B_K [Hkv, r, D]. Since A_Q is always Q W_Q, and A_K is K W_K, the rounds need only
    G_Q = Q^T Q and G_K = K^T K [Hkv, D, D]. columns [Hkv, D]: the sums of |Q| and |K|."""
    # 1. A_Q and A_K start as the r columns of the largest sums ("topcol").
    eye = torch.eye(columns.shape[-1], dtype=columns.dtype, device=columns.device)
    w_q = w_k = eye[columns.topk(r).indices].mT

    def bases() -> tuple[Tensor, Tensor]:  # 3, 4. Least squares of Q ~ A_Q B_Q and K ~ A_K B_K (Eq. 6)
        return tuple(spd_solve(w.mT @ g @ w, w.mT @ g) for w, g in ((w_q, gram_q), (w_k, gram_k)))

    for _ in range(LRQK_STEPS):
        b_q, b_k = bases()
        # 5. A_K, then 6. A_Q with the new A_K.
        w_k = spd_solve(w_q.mT @ gram_q @ w_q + b_k @ b_k.mT, (gram_q @ w_q + b_k.mT).mT).mT
        w_q = spd_solve(w_k.mT @ gram_k @ w_k + b_q @ b_q.mT, (gram_k @ w_k + b_q.mT).mT).mT
    return w_q, w_k, *bases()  # fitted once more to the final A, as in the released code


def lrqk_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, bases: tuple, near: Tensor, n: int, recent: int
) -> tuple:
    """One decode step of LRQK as published (Algorithm 2, whose lines number the steps), for one KV head.

    q [G, D], k, v [D]: after RoPE -> [G, D], and at last the new bases. stored: A_K [S - 1, r], K and V
    [S - 1, D]. bases: B_Q, B_K [r, D]. near: Omega, what the last step attended. n: the paper's k."""
    # 1-7. The new token's proxies q^ and k^, and a step of the bases towards it.
    a_k, keys, values = stored
    q_hat, k_hat, *bases = lrqk_refit(q, k[None], *bases, a_k[near], keys[near])
    # 8. Append.
    a_k, keys, values = stored = appended(stored, k_hat[0], k, v)
    # 9. The best by q^ . k^ of the tokens that are not recent. The queries of a group choose together.
    old = max(0, len(a_k) - recent)
    logits = q_hat @ a_k[:old].mT * q.shape[-1] ** -0.5
    chosen = logits.log_softmax(-1).amax(0).topk(min(n, old)).indices
    # 10-13. What is chosen and not in Omega is fetched from the CPU. The new token goes there, too.
    near = torch.cat((chosen, torch.arange(old, len(a_k))))
    # 14. Attend Omega.
    weights = (q @ keys[near].mT * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ values[near], near, stored, tuple(bases)


def lrqk_step_ours(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, w_q: Tensor, w_k: Tensor, n: int, recent: int
) -> tuple:
    """The same step as it runs by default: the prompt's projections W_Q, W_K [D, r] are its best
    (lrqk_optimum) and stay. A step does not refit them, and so needs nothing of Omega before it selects."""
    # 1-7. The new token's proxies are products. 8. Append.
    q_hat, (a_k, keys, values) = q @ w_q, appended(stored, k @ w_k, k, v)
    # 9. The best of the tokens that are not recent.
    old = max(0, len(a_k) - recent)
    logits = q_hat @ a_k[:old].mT * q.shape[-1] ** -0.5
    chosen = logits.log_softmax(-1).amax(0).topk(min(n, old)).indices
    # 10-13. What is chosen and is in no slot on the GPU is fetched into the least recently used one.
    near = torch.cat((chosen, torch.arange(old, len(a_k))))
    # 14. Attend.
    weights = (q @ keys[near].mT * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ values[near], near, (a_k, keys, values)


def lrqk_refit(q: Tensor, k: Tensor, b_q: Tensor, b_k: Tensor, a_near: Tensor, k_near: Tensor) -> tuple:
    """Alg. 2, lines 1-7, all lambda = 1: q^ [..., G, r], k^ [..., 1, r] and the new B_Q, B_K.

    q [..., G, D], k [..., 1, D]; B_Q, B_K [..., r, D]; a_near [..., n, r], k_near [..., n, D]: A_K and K of
    Omega, a_near zero where there is no token. The G queries share B_Q: Eq. 9 to 11 sum over them."""
    s = q @ k.mT  # [..., G, 1]
    gram_b, k_b = b_k @ b_k.mT, k @ b_k.mT
    m_r = b_q @ b_q.mT + a_near.mT @ a_near
    m_l = q @ b_q.mT + (q @ k_near.mT) @ a_near
    k_hat = spd_solve(gram_b, k_b.mT).mT
    for _ in range(LRQK_STEPS):
        q_hat = spd_solve(m_r + k_hat.mT @ k_hat, (m_l + s * k_hat).mT).mT
        total = k_b + (s * q_hat).sum(-2, keepdim=True)
        k_hat = spd_solve(gram_b + q_hat.mT @ q_hat, total.mT).mT
    return q_hat, k_hat, lrqk_gradient_step(b_q, q_hat, q), lrqk_gradient_step(b_k, k_hat, k)


def lrqk_gradient_step(b: Tensor, x_hat: Tensor, x: Tensor) -> Tensor:
    """B [..., r, D] after one gradient step on ||x^ B - x||^2, as long as is best (Eq. 10, 11), of x^
    [..., G, r], x [..., G, D]. One row (G = 1) is then reproduced, by the least change."""
    residual = x_hat @ b - x
    gradient = x_hat.mT @ residual
    moved = x_hat @ gradient
    length = (residual * moved).sum((-2, -1), keepdim=True)
    return b - length / moved.square().sum((-2, -1), keepdim=True).clamp(min=1e-30) * gradient


def spd_solve(m: Tensor, rhs: Tensor) -> Tensor:
    """m^-1 rhs for symmetric positive m [..., n, n], rhs [..., n, j], by Gauss-Jordan elimination
    in plain operations, since a CUDA graph cannot capture cuSOLVER. fp64 spares a larger ridge."""
    n = m.shape[-1]
    eye = torch.eye(n, dtype=m.dtype, device=m.device)
    x = torch.cat((add_ridge(m, 1e-10), rhs), -1)
    for i in range(n):
        row = x[..., i : i + 1, :] / x[..., i : i + 1, i : i + 1]
        x = x - (x[..., i : i + 1] - eye[:, i : i + 1]) * row  # row i becomes `row`, the others lose column i
    return x[..., n:]


def add_ridge(m: Tensor, fraction: float) -> Tensor:
    """m [..., n, n] plus this fraction of its mean diagonal on the diagonal (and a trifle, should m be 0)."""
    ridge = fraction * m.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] + 1e-30
    return m + ridge * torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)


# ---- what we changed


def lrqk_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [S, Hkv, G, D] after RoPE -> X^T X with a ridge [Hkv, D, D], and the sum of |X| [Hkv, D], fp64."""
    gram, total = 0.0, 0.0
    if not x.isfinite().all():
        raise UserError("the queries or keys of this prompt are not finite; the weights are damaged")
    for part in x.split(4096):  # an fp64 copy of few tokens at a time
        rows = part.double().permute(1, 0, 2, 3).flatten(1, 2)  # [Hkv, tokens * G, D]
        gram, total = gram + rows.mT @ rows, total + rows.abs().sum(1)
    return add_ridge(gram, 1e-6), total


def lrqk_optimum(gram_q: Tensor, gram_k: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """W_Q, W_K [Hkv, D, r] that make ||Q K^T - A_Q A_K^T|| least (ours; mode optimal). Q = O_Q L_Q^T with O_Q
    orthonormal, so the SVD of Q K^T is that of the small L_Q^T L_K. A_Q^T A_Q = A_K^T A_K, diagonal."""
    l_q, l_k = (torch.linalg.cholesky(add_ridge(gram, 1e-10)) for gram in (gram_q, gram_k))
    u, s, vt = torch.linalg.svd(l_q.mT @ l_k)
    root = s[..., None, :r].sqrt()
    pairs = (l_q, u), (l_k, vt.mT)
    return tuple(torch.linalg.solve_triangular(m.mT, x[..., :r] * root, upper=True) for m, x in pairs)


def take_slots(index: Tensor, live: Tensor, slot_of, pos_of, stamp, step: Tensor) -> tuple[Tensor, Tensor]:
    """The hot slots [B, Hkv, k] of the selected tokens, and which miss: these take slots of no hit (ours).

    index [B, Hkv, k]: positions, distinct where live. Tables: slot_of [B, Hkv, S], of a position; pos_of and
    stamp [B, Hkv, C], of a slot: the position in it (-1: none) and the last step that used it."""
    slot = slot_of.gather(-1, index).long()
    hit = slot >= 0  # what does not count has no slot
    # 1. Stamp the slots of hits. (Misses stamp one slot more, which is cut off.)
    used = F.pad(stamp, (0, 1)).scatter(-1, torch.where(hit, slot, stamp.shape[-1]), step.expand_as(slot))
    stamp.copy_(used[..., :-1])
    # 2. The n-th miss takes the n-th of the other slots. One number more goes first into the sum: so Inductor
    # does not fuse into it the gather that gave `hit`, which would then wait for it.
    n = F.pad(~hit, (1, 0)).cumsum(-1, dtype=torch.int32)[..., 1:]
    others = least_recent(stamp, step, index.shape[-1]).gather(-1, n.long()).long()
    place = torch.where(hit, slot, others)  # distinct: k entries, C >= k slots
    # 3. The tables forget what is evicted, and learn what comes.
    miss, before = live & ~hit, pos_of.gather(-1, place)
    slot_of.scatter_(-1, torch.where(miss & (before >= 0), before, index), -1)  # its own is set next
    slot_of.scatter_(-1, index, torch.where(live, place, -1).int())
    pos_of.scatter_(-1, place, torch.where(live, index, before).int())
    stamp.scatter_(-1, place, torch.where(live, step, stamp.gather(-1, place)))
    return place, miss


def least_recent(stamp: Tensor, step: Tensor, k: int) -> Tensor:
    """The slots [..., 1 + C], from place 1 on, in the order in which misses take them; this step's last."""
    if stamp.shape[-1] > k:
        return F.pad(stamp.argsort(dim=-1, stable=True), (1, 0))
    free = stamp < step  # as many misses may need all of these: any order will do
    order = torch.where(free, free.cumsum(-1, dtype=torch.int32), 0).long()
    slots = torch.arange(stamp.shape[-1], dtype=torch.int32, device=stamp.device).expand_as(order)
    return F.pad(torch.zeros_like(slots), (1, 0)).scatter(-1, order, slots)


def host_rows(context: Context, *shape: int) -> Tensor:
    """Zeroed host memory [B, *shape]. On CUDA it is pinned and seen as a CUDA tensor, through its address:
    kernels read and write it themselves, inside a CUDA graph, as if it lay on the GPU."""
    if context.device.type != "cuda":
        return context.zeros(*shape)
    pinned = torch.zeros(context.batch_size, *shape, dtype=context.dtype, pin_memory=True)
    data = (pinned.data_ptr(), False)
    interface = {"shape": (pinned.nbytes,), "typestr": "|u1", "data": data, "version": 3}
    view = SimpleNamespace(__cuda_array_interface__=interface, memory=pinned)  # the result keeps it alive
    return torch.as_tensor(view, device=context.device).view(context.dtype).view(pinned.shape)


class LrqkCache(Cache):
    """A_K of every token, K beside V of those in use, in host memory of all. `hot` has C slots of selected
    tokens, which are fetched if they miss, then a ring of recent ones: slot C + p % z has position p."""

    def __init__(self, context: Context, settings: LrqkSettings):
        super().__init__(context)
        c, self.settings = context.config, settings
        if settings.rank > c.head_dim:
            raise UserError(f"--rank {settings.rank}: r must be 1 to {c.head_dim}, the head dim (or 0)")
        self.chosen, self.z = k, z = settings.budget(context.capacity)
        self.rank = settings.rank or min(32, c.head_dim)
        self.reuse = settings.slots > 0 and settings.kv_device == "cpu"
        heads, capacity, width = c.n_kv_heads, context.capacity, 2 * c.head_dim
        self.slots = round(min(settings.slots * k, capacity - z)) if self.reuse else k
        self.kv = {"cpu": HostStore, "cuda": TokenStore}[settings.kv_device](context, heads, capacity, width)
        self.table("a_k", heads, capacity, self.rank, dtype=context.dtype)
        for name in ("basis_q", "basis_k"):  # of each prompt: B_Q and B_K in mode paper, else W_Q^T and W_K^T
            self.table(name, heads, self.rank, c.head_dim, dtype=torch.float32)
        self.table("hot", heads, self.slots + self.z, width, dtype=context.dtype)
        for name, places in (("slot_of", capacity), ("pos_of", self.slots), ("stamp", self.slots)):
            self.table(name, heads, places, fill=-1)
        self.table("step", 1, 1)
        self.table("counts", 2, dtype=torch.int64)  # tokens selected, tokens missed

    def past(self, batch: int, n: int) -> tuple[Tensor, Tensor]:
        return self.kv.past(batch, n).chunk(2, -1)

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        w_q, w_k = self.prompt_bases(batch) if span.start else self.factorise(batch, q, k)
        kv, recent = torch.cat((k, v), -1), self.context.positions[span][-self.z :]
        self.kv.write((batch, span), kv)
        self.a_k[batch, :, span] = (k.transpose(0, 1).float() @ w_k).to(self.a_k.dtype)
        self.hot[batch, :, self.slots + recent % self.z] = kv[-self.z :].transpose(0, 1)
        # The hot slots start with what the last token selects.
        self.slot_of[batch], self.pos_of[batch], self.stamp[batch] = -1, -1, -1
        q_hat = q[-1:].unflatten(1, (self.config.n_kv_heads, -1)).float() @ w_q
        self.load(slice(batch, batch + 1), torch.full((1,), span.stop - 1, device=q.device), q_hat)
        if not span.start:
            self.counts[batch] = 0

    def factorise(self, batch: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """W_Q, W_K [Hkv, D, r] fp32 from a prompt's q [S, Hq, D], k [S, Hkv, D]; stores its bases."""
        moments = lrqk_moments(q.unflatten(1, (self.config.n_kv_heads, -1))), lrqk_moments(k[:, :, None])
        # On the CPU: LAPACK takes a millisecond for matrices this small, cuSOLVER tens.
        (gram_q, sum_q), (gram_k, sum_k) = ((gram.cpu(), total.cpu()) for gram, total in moments)
        if self.settings.mode == "paper":  # in Alg. 1's own gauge, on which Alg. 2's step depends
            w_q, w_k, *bases = lrqk_prompt(gram_q, gram_k, sum_q + sum_k, self.rank)
        else:
            w_q, w_k = lrqk_optimum(gram_q, gram_k, self.rank)
            bases = w_q.mT, w_k.mT
        self.basis_q[batch], self.basis_k[batch] = bases
        return w_q.float().to(q.device), w_k.float().to(q.device)

    def prompt_bases(self, batch: int) -> tuple[Tensor, Tensor]:
        """W_Q, W_K [Hkv, D, r] fp32 for tokens after the prompt: in mode paper least squares on B_Q, B_K."""
        bases = self.basis_q[batch].double(), self.basis_k[batch].double()
        if self.settings.mode == "paper":
            bases = (spd_solve(b @ b.mT, b) for b in bases)
        return tuple(b.mT.float() for b in bases)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        q = self.rope(q, pos).unflatten(1, (self.config.n_kv_heads, -1))  # [B, Hkv, G, D]
        k = self.rope(k, pos)
        q_hat, k_hat = self.project(pos, q.float(), k[:, :, None].float())
        batch, kv = self.context.batch_ids, torch.cat((k, v), -1)
        self.a_k[batch, :, pos] = k_hat[:, :, 0].to(self.a_k.dtype)
        self.kv.write((batch, pos), kv)
        self.hot[batch, :, self.slots + pos % self.z] = kv
        self.step += 1
        self.load(slice(None), pos, q_hat)
        live, ring = self.stamp == self.step, ring_positions(pos, self.z) >= 0
        self.report_selected(pos, self.pos_of, live, recent=self.z)
        live = torch.cat((live, ring[:, None].expand(-1, self.config.n_kv_heads, -1)), -1)
        return kernels.attend_rows(
            q.flatten(1, 2), *self.hot.chunk(2, -1), live, scale=self.scale, kernel=self.kernel
        )

    def project(self, pos: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q^ [B, Hkv, G, r] and k^ [B, Hkv, 1, r] of q [B, Hkv, G, D], k [B, Hkv, 1, D], fp32."""
        if self.settings.mode == "optimal":
            return q @ self.basis_q.mT, k @ self.basis_k.mT
        # Omega: what the last step attended; the new token has not replaced the oldest of the ring yet.
        position = ring_positions(pos - 1, self.z)[:, None].expand(-1, self.config.n_kv_heads, -1)
        position = torch.cat((torch.where(self.stamp == self.step, self.pos_of, -1), position), -1)
        where = position.clamp(min=0)[..., None].long().expand(-1, -1, -1, self.rank)
        a_near = self.a_k.gather(2, where).masked_fill(position[..., None] < 0, 0)
        given = (q, k, self.basis_q, self.basis_k, a_near, self.hot[..., : self.config.head_dim])
        # fp64, since the gauge is not balanced: in fp32 the solves need a ridge that changes the selection.
        q_hat, k_hat, b_q, b_k = lrqk_refit(*(t.double() for t in given))
        self.basis_q.copy_(b_q)
        self.basis_k.copy_(b_k)
        return q_hat.float(), k_hat.float()

    def load(self, batch: slice, pos: Tensor, q_hat: Tensor) -> None:
        """Selects the k best tokens that left the ring, by the entries' q^, and brings them to hot slots."""
        stored = self.a_k[batch], None, pos - self.z, self.scale
        scores = kernels.scores(q_hat.flatten(1, 2), *stored, "largest", kernel=self.kernel)
        index = kernels.select(scores, pos, (0, self.chosen, self.z), kernel=self.kernel)  # [B, Hkv, k]
        live = index >= 0
        index = index.where(live, pos[:, None, None]).long()  # the newest stands for none: it has no slot
        if not self.reuse:  # no hit/miss: forget what is there
            self.slot_of[batch] = -1
        tables = (table[batch] for table in (self.slot_of, self.pos_of, self.stamp, self.step))
        place, miss = take_slots(index, live, *tables)
        kernels.fetch_rows(self.kv.rows[batch], index, place, miss, self.hot[batch], kernel=self.kernel)
        self.counts[batch] += torch.stack((live, miss), 1).sum((2, 3))

    def miss_rate(self) -> float | None:
        """Tokens fetched over tokens selected since the prompt; None where all are on the device."""
        selected, missed = self.counts.sum(0).tolist()
        return missed / max(1, selected) if self.settings.kv_device == "cpu" else None

    def bytes_read(self, length: int) -> int:
        """Of the device: A_K of every token that left the ring, K and V of the selected and the recent ones,
        stamps of all slots, slot and position of the selected ones, and the bases."""
        c, size, recent = self.config, self.context.dtype.itemsize, min(self.z, length)
        old = length - recent
        chosen = min(self.chosen, old)
        numbers = old * self.rank + (recent + chosen) * 2 * c.head_dim
        tables = self.slots + 2 * chosen + 2 * self.rank * c.head_dim  # of 4 bytes
        return (numbers * size + tables * 4) * c.n_kv_heads


def lrqk_cache(context: Context, settings: LrqkSettings) -> Cache:
    if settings.kv_device == "cuda" and context.device.type == "cpu":
        raise UserError("--kv_device cuda keeps K and V on the GPU, but the model runs on the CPU: give cpu")
    return LrqkCache(context, settings)


# ----------------------------------------------------------------------------------------------- StreamingLLM


@dataclass
class StreamingSettings:
    """StreamingLLM (arXiv 2309.17453): the first and the last tokens, all others forgotten."""

    sinks: int = setting(4, "x: first tokens that are kept")
    recent: int = setting(508, "w: last tokens that are kept", sets="bytes tokens", within="[1, inf)")

    def budget(self, capacity: int) -> tuple[int, int]:
        return within(capacity, self.sinks, self.recent)


class StreamingCache(DenseCache):
    """x sinks and a ring of the w last tokens, at their own positions (paper: at places in the cache)."""

    def __init__(self, context: Context, settings: StreamingSettings):
        shape = context.config.n_kv_heads, context.config.head_dim, *settings.budget(context.capacity)
        super().__init__(context, *(Window(context, *shape) for _ in range(2)))

    def select(self, pos: Tensor, q: Tensor) -> None:
        """All slots: they fill from the left, so that those up to pos hold a token."""
        sinks = self.context.positions[: self.keys.x].expand(len(pos), -1)
        self.report_selected(pos, sinks, sinks <= pos[:, None], recent=self.keys.z)


# -------------------------------------------------- exact top-k, and what the rows that select have in common


def keep_setting(tokens: int, sets: str = "tokens"):
    """The field of the methods that are given their tokens in all."""
    text = "tokens attended in all: above 1 a count, up to 1 a fraction of the cache's capacity"
    return setting(tokens, text, sets=sets, within="(0, inf)")


@dataclass
class KeepSettings:
    """What exact top-k and Double Sparsity are given: tokens in all, and those that are always among them."""

    keep: float = keep_setting(512)
    sinks: int = setting(0, "x: first tokens that are always among them")
    recent: int = setting(1, "z: last tokens that are always among them", within="[1, inf)")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        total, x, z = kept_tokens(self.keep, capacity), self.sinks, self.recent
        if total == capacity:
            return 0, total, 0
        return x, left_to_select(self.keep, total, capacity, x, z), z


@dataclass
class TopKSettings(KeepSettings):
    """Exact top-k: full logits choose the tokens. It saves no bytes: the oracle of all selections."""

    kv_bits: int = setting(16, "bits of K and V, packed by KIVI's quantiser; 16: as they are", (2, 4, 16))


def page_tokens(pages: Tensor, page: int) -> Tensor:
    """The positions [..., n * page] of the tokens of pages [..., n]; of negative pages they are negative."""
    return (pages[..., None] * page + torch.arange(page, device=pages.device)).flatten(-2)


class ProxyCache(DenseCache):
    """K and V in full, and `proxies`, a store of what scoring reads instead of K: keys in a `basis` [Hkv, D,
    r], or [B, Hkv, D, r], one of each entry."""

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        super().write(where, k, v)
        self.write_proxies(where, k)

    def write_proxies(self, where: tuple, k: Tensor) -> None:
        basis = self.basis if self.basis.ndim == 3 else self.basis[where[0]]
        self.proxies.write(where, in_basis(k, basis))

    def select_pages(self, scores: Tensor, pos: Tensor, tail: int) -> Tensor:
        """Tokens [B, Hkv, n], negative for none, of the last pages and the best by scores [B, Hkv, pages]."""
        budget = 0, self.count // self.page - tail, tail
        index = page_tokens(
            kernels.select(scores, pos // self.page, budget, recent=True, kernel=self.kernel), self.page
        )
        return index.where(index <= pos[:, None, None], -1)

    def score_bytes(self, length: int) -> int:
        return length * self.proxies.token_bytes

    def bytes_read(self, length: int) -> int:
        return super().bytes_read(length) + (self.score_bytes(length) if length > self.count else 0)


class TopKCache(DenseCache):
    """K and V in full, or in KIVI's codes."""

    def __init__(self, context: Context, settings: TopKSettings):
        stores = () if settings.kv_bits == 16 else kivi_kv(context, KiviSettings(settings.kv_bits))
        super().__init__(context, *stores, budget=settings.budget(context.capacity))

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        scores = kernels.scores(q, *self.keys.scored(pos), pos, self.scale, "largest", kernel=self.kernel)
        return kernels.select(scores, pos, self.budget, recent=True, kernel=self.kernel)

    def tokens_read(self, length: int) -> tuple[float, float]:
        return length, min(length, self.count)


# --------------------------------------------------------------------------------------------- H2O, Keyformer


@dataclass
class H2oSettings:
    """H2O, the heavy-hitter oracle (arXiv 2306.14048): what got little attention so far is evicted."""

    keep: float = keep_setting(512, sets="bytes tokens")
    heavy: float = setting(0.5, "fraction of these that are heavy hitters, not recent", within="[0, 1]")
    window: int = setting(64, "W: last queries of a prompt that attention is summed of", within="[1, inf)")

    def budget(self, capacity: int) -> tuple[int, int]:
        """(heavy, recent) in tokens."""
        total = kept_tokens(self.keep, capacity)
        recent = max(1, total - round(self.heavy * total))
        return total - recent, recent


@dataclass
class KeyformerSettings(H2oSettings):
    """Keyformer (arXiv 2403.09054): H2O whose scores have Gumbel noise and a temperature."""


def h2o_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, slots: int, recent: int) -> tuple:
    """One decode step of H2O as published (Algorithm 1), for one KV head: q [G, D], k, v [D] after RoPE ->
    [G, D]. stored, of n <= slots tokens: K and V [n, D], positions in order and attention so far [n]."""
    keys, values, positions, attention = stored
    # 1. Where all slots are taken, forget the token with the least attention that is not recent.
    now = int(positions[-1]) + 1
    kept = torch.ones(len(keys), dtype=torch.bool)
    if len(keys) == slots:
        kept[attention.masked_fill(positions > now - recent, torch.inf).argmin()] = False
    new = k, v, torch.tensor(now), attention.new_tensor(0)
    keys, values, positions, attention = appended((x[kept] for x in stored), *new)
    # 2. Attend what is left, and add what each token gets.
    weights = (q @ keys.mT * len(k) ** -0.5).softmax(-1)
    return weights @ values, positions, (keys, values, positions, attention + weights.sum(0))


class H2oCache(DenseCache):
    """C = heavy + recent slots a KV head, each with the attention that its token has got so far."""

    def __init__(self, context: Context, settings: H2oSettings):
        budget, heads = settings.budget(context.capacity), context.config.n_kv_heads
        shape = heads, sum(budget), context.config.head_dim
        super().__init__(context, *(TokenStore(context, *shape) for _ in range(2)))
        self.settings, self.recent = settings, budget[1]
        self.table("position", heads, self.count, fill=-1)
        self.table("attention", heads, self.count, dtype=torch.float32)
        self.table("left", fill=context.capacity)  # tokens, by the prompt

    def weights(self, logits: Tensor, part: Tensor | int = 0, first: Tensor | int = 0) -> Tensor:
        """What is accumulated, of logits [..., N]; part generated so far, first draw: Keyformer's."""
        return logits.softmax(-1)

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        c, places = self.config, self.context.positions[span]
        # What is kept of the past, in slots from 0 on, and the new tokens: [Hkv, N, ...] each.
        held, slots = min(span.start, self.count), (self.keys.rows, self.values.rows, self.position)
        pairs = zip(slots, (k, v, places[:, None].expand(-1, c.n_kv_heads)), strict=True)
        tokens = [torch.cat((old[batch, :, :held], x.transpose(0, 1)), 1) for old, x in pairs]
        keys, _, position = tokens
        last = q[-self.settings.window :].unflatten(1, (c.n_kv_heads, -1)).permute(1, 2, 0, 3)
        logits = (last @ keys[:, None].mT).float() * self.context.scale  # [Hkv, G, W, N]
        later = position[:, None, None] > places[-last.shape[2] :, None]
        attention = self.weights(logits.masked_fill(later, -torch.inf)[None])[0].sum((1, 2))
        attention[:, :held] += self.attention[batch, :, :held]
        ranked = attention.masked_fill(position >= span.stop - self.recent, torch.inf)
        kept = ranked.topk(min(self.count, span.stop)).indices.sort(-1).values  # [Hkv, n]
        for slot, x in zip((*slots, self.attention), (*tokens, attention), strict=True):
            slot[batch, :, : kept.shape[1]] = gather_rows(x[None], kept[None])[0]
        self.position[batch, :, kept.shape[1] :] = -1
        self.left[batch] = self.context.capacity - span.stop

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        q, now = self.rope(q, pos), pos[:, None, None]
        # 1. The new token takes an empty slot, or that of the least attention that is not recent.
        cost = self.attention.masked_fill(self.position > now - self.recent, torch.inf)
        victim = cost.masked_fill(self.position < 0, -torch.inf).argmin(-1)  # [B, Hkv]
        where = self.context.batch_ids[:, None], torch.arange(victim.shape[1], device=pos.device), victim
        self.keys.rows[where], self.values.rows[where] = self.rope(k, pos), v
        self.position[where] = pos[:, None]
        self.attention.scatter_(2, victim[..., None], 0.0)
        # 2. Attend all slots, and add what each has got.
        live = self.position >= 0
        self.report_selected(pos, self.position, live)
        every = torch.full_like(pos, self.count - 1)
        logits = kernels.scores(
            q, self.keys.rows, None, every, self.scale, "each", kernel=self.kernel
        )  # [B, Hkv, G, C]
        logits = logits.masked_fill(~live[:, :, None], -torch.inf)
        part = 1 - (self.context.capacity - now[..., None]) / self.left[:, None, None, None]
        self.attention += self.weights(logits, part, now[..., None].long() * logits[0].numel()).sum(2)
        return kernels.attend_logits(logits, self.values.rows, every, kernel=self.kernel)

    def bytes_read(self, length: int) -> int:
        return super().bytes_read(length) + min(length, self.count) * self.config.n_kv_heads * 8


class KeyformerCache(H2oCache):
    """H2O's, but softmax((logits + Gumbel noise) / tau) is accumulated; tau goes from 1 to 2."""

    def __init__(self, context: Context, settings: KeyformerSettings):
        super().__init__(context, settings)
        # A tape of draws, read in a circle: a CUDA graph runs no generator of ours. Its length is prime.
        tape = torch.rand(65521, generator=torch.Generator().manual_seed(0)).clamp(min=1e-10)
        self.gumbel = -(-tape.log()).log().to(context.device)  # noise, not cache

    def weights(self, logits: Tensor, part: Tensor | int = 0, first: Tensor | int = 0) -> Tensor:
        draws = first + torch.arange(logits[0].numel(), device=logits.device).view(logits[0].shape)
        return ((logits + self.gumbel[draws % len(self.gumbel)]) / (1 + part)).softmax(-1)


# ------------------------------------------------------------------------------------------------------ Quest


@dataclass
class QuestSettings:
    """Quest (arXiv 2406.10774): pages of tokens, ranked by an upper bound of their logits."""

    keep: float = keep_setting(512)
    page: int = setting(16, "tokens of a page", within="[1, inf)")
    skip: str = setting("0,1", "layers that attend every token")

    def budget(self, capacity: int) -> tuple[int]:
        """Tokens of all pages: as many whole ones as fit, the released code's 3 at least."""
        count, page = kept_tokens(self.keep, capacity), min(self.page, capacity)
        return (count if count == capacity else min(max(3, count // page) * page, capacity),)


def quest_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, page: int, n: int) -> tuple:
    """One decode step of Quest as published (sec. 3.3), for one KV head, whose queries choose n pages:
    q [G, D], k, v [D] after RoPE -> [G, D]. stored: K and V [S - 1, D]."""
    keys, values = stored = appended(stored, k, v)
    # 1. The least and the largest key of each page bound a query's logits there.
    bounds = (page_keys.aminmax(dim=0) for page_keys in keys.split(page))
    low, high = map(torch.stack, zip(*bounds, strict=True))  # [pages, D]
    bound = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1) * len(k) ** -0.5  # [G, pages]
    # 2. The best pages, and the last.
    last = len(low) - 1
    best = bound.log_softmax(-1).amax(0)[:last].topk(min(n - 1, last)).indices
    tokens = (torch.cat((best, torch.tensor([last])))[:, None] * page + torch.arange(page)).flatten()
    tokens = tokens[tokens < len(keys)]
    # 3. Attend their tokens.
    return (q @ keys[tokens].mT * len(k) ** -0.5).softmax(-1) @ values[tokens], tokens, stored


class QuestCache(ProxyCache):
    """The proxy of a page is the largest and the least key of every channel, after RoPE."""

    def __init__(self, context: Context, settings: QuestSettings):
        super().__init__(context, budget=settings.budget(context.capacity))
        c, self.page = context.config, min(settings.page, context.capacity)
        self.proxies = TokenStore(context, c.n_kv_heads, -(-context.capacity // self.page), 2 * c.head_dim)

    def write_proxies(self, where: tuple, k: Tensor) -> None:
        batch, pos = where
        if isinstance(batch, int):  # whole pages, the first from its beginning; the last token fills up
            page = slice(pos.start // self.page, -(-pos.stop // self.page))
            tokens = torch.arange(page.start * self.page, page.stop * self.page, device=k.device)
            k = self.keys.rows[batch, :, tokens.clamp(max=pos.stop - 1)].transpose(0, 1)
            low, high = k.unflatten(0, (-1, self.page)).aminmax(dim=1)  # [n, Hkv, D]
        else:
            page, first = pos // self.page, (pos % self.page == 0)[:, None, None]
            high, low = self.proxies.rows[batch, :, page].chunk(2, -1)  # [B, Hkv, D]
            high, low = torch.where(first, k, high.maximum(k)), torch.where(first, k, low.minimum(k))
        self.proxies.write((batch, page), torch.cat((high, low), -1))

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """[max(q, 0), min(q, 0)] . [largest, least] key is the largest logit in a page (sec. 3.3)."""
        last, bounds = pos // self.page, torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)
        scores = kernels.scores(
            bounds, *self.proxies.scored(last), last, self.scale, "largest", kernel=self.kernel
        )
        return self.select_pages(scores, pos, 1)

    def score_bytes(self, length: int) -> int:
        return super().score_bytes(-(-length // self.page))


# ------------------------------------------------------------------------------------------- SALS as deployed


@dataclass
class SalsCannSettings(QuestSettings):
    """SALS as in CANN's quant_sals_indexer: int8 K and V, in pages that low-rank keys in 4 bits choose."""

    keep: float = keep_setting(0.25)
    skip: str = setting("", "layers that attend every token")
    rank: float = setting(0.5, "rank of the keys that are scored / D", sets="bytes", within="(0, 1]")
    tail: int = setting(8, "last pages, which are always attended", within="[1, inf)")


class SalsCannCache(ProxyCache):
    """K and V in int8; the proxy of a key is its r leading components in 4 bits. Nothing is rebuilt."""

    def __init__(self, context: Context, settings: SalsCannSettings, _, artifact: Artifact, i: int):
        shape, D = (context, context.config.n_kv_heads, context.capacity), context.config.head_dim
        stores = (Int8Store(*shape, D) for _ in range(2))
        super().__init__(context, *stores, budget=settings.budget(context.capacity))
        self.page = min(settings.page, context.capacity)
        self.tail = min(settings.tail, self.count // self.page - 1)
        r = rank_of(settings.rank, D)
        r = max(2, r - r % (32 if r > 32 else 2))  # as codes come
        self.basis = artifact["post.basis"][i, ..., :r].to(context.device, context.dtype)  # [Hkv, D, r]
        self.proxies = ScaledStore(*shape, r, 4)

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """A page's score is the log-sum-exp of its logits, of the mean of a group's queries."""
        query = in_basis(q.unflatten(1, (self.config.n_kv_heads, -1)).mean(2), self.basis)
        logits = kernels.scores(
            query, self.proxies.read(pos), None, pos, self.scale, "each", kernel=self.kernel
        ).flatten(2)  # [B, Hkv, S]
        logits = F.pad(logits, (0, -logits.shape[2] % self.page), value=-torch.inf)
        scores = logits.unflatten(2, (-1, self.page)).logsumexp(-1)
        return self.select_pages(scores, pos, self.tail)


# ------------------------------------------------------------------------------------ Double Sparsity, HShare


@dataclass
class DoubleSparseSettings(KeepSettings):
    """Double Sparsity (arXiv 2408.07092): top-k tokens, scored on the channels that matter most."""

    channels: float = setting(0.125, "r_c: channels that are scored, as a fraction of D", within="(0, 1]")
    skip: str = setting("0,1", "layers that attend every token")


class DoubleSparseCache(ProxyCache):
    """The proxy of a key is its label: its r_c most important channels, after RoPE."""

    def __init__(self, context: Context, settings: DoubleSparseSettings, _, artifact: Artifact, i: int):
        super().__init__(context, budget=settings.budget(context.capacity))
        c = context.config
        r = rank_of(settings.channels, c.head_dim)
        channels = F.one_hot(artifact["importance"][i].topk(r).indices, c.head_dim).mT  # [Hkv, D, r_c]
        self.basis = channels.to(context.device, context.dtype)
        self.proxies = TokenStore(context, c.n_kv_heads, context.capacity, r)

    def best(self, pos: Tensor, q: Tensor, label: Tensor, count: int) -> Tensor:
        """The `count` best by their labels [B, Hkv, S, r_c] -> index [B, Hkv, count], negative where none."""
        scores, (x, _, z) = (
            kernels.scores(
                in_basis(q, self.basis), label, None, pos, self.scale, "largest", kernel=self.kernel
            ),
            self.budget,
        )
        return kernels.select(scores, pos, (x, count - x - z, z), recent=True, kernel=self.kernel)

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        return self.best(pos, q, self.proxies.rows, self.count)


@dataclass
class HshareSettings(DoubleSparseSettings):
    """HShare (ICLR 2025): Double Sparsity whose selections serve several steps and several heads."""

    every: int = setting(8, "steps for which a selection is used", within="[1, inf)")
    share_heads: int = setting(0, "KV heads that use the selection of another one, by their overlap")


def share_map(overlap: Tensor, merged: int) -> Tensor:
    """HShare's greedy map f [n]: item i uses what item f(i) <= i has; `merged` items have f(i) < i. Of
    overlap [n, n], |C_i and C_j|, the most similar pair i > j is merged, i to j, again and again."""
    n = len(overlap)
    f = torch.arange(n, device=overlap.device)
    pairs = overlap.float().masked_fill(~torch.ones_like(overlap, dtype=torch.bool).tril(-1), -torch.inf)
    for _ in range(merged):
        i, j = divmod(int(pairs.argmax()), n)
        f[f == i] = j  # i itself, and what was merged into it before
        pairs[i], pairs[:, i] = -torch.inf, -torch.inf
    return f


class HshareCache(DoubleSparseCache):
    """A selection is held for `every` steps; each new token joins it. `share_heads` heads use another's."""

    def __init__(self, context: Context, settings: HshareSettings, *fitted):
        super().__init__(context, settings, *fitted)
        heads, every, merged = context.config.n_kv_heads, settings.every, settings.share_heads
        if merged >= heads:
            raise UserError(f"--share_heads {merged}: of {heads} KV heads, 0 to {heads - 1} can be merged")
        selects, most = self.count < context.capacity, self.budget[1] + 1
        if every > most and selects:
            raise UserError(f"--every {every}: give at most {most}, 1 + the tokens selected")
        self.every, self.merged = (every, merged) if selects else (1, 0)
        self.held_count = self.count - self.every + 1  # tokens of a selection; the others join it
        self.table("held", heads, self.held_count)  # the selection
        self.table("since", fill=-self.every)
        self.table("head", heads)  # whose selection a head uses

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        super().write_chunk(batch, span, q, k, v)
        self.since[batch] = -self.every  # the first step selects
        self.head[batch] = torch.arange(k.shape[1], device=k.device)
        if self.merged:
            # Heads that select nearly all of a short prompt are all alike: half of it tells them apart.
            x, _, z = self.budget
            count = min(self.held_count, max(x + z + 1, span.stop // 2))
            last, label = torch.tensor([span.stop - 1], device=k.device), self.proxies.rows[batch : batch + 1]
            index = self.best(last, q[-1:], label, count)[0]  # [Hkv, n]
            index = index.clamp(min=0)  # where some are none, all tokens are chosen, and 0 too
            member = torch.zeros(len(index), self.context.capacity, device=k.device).scatter_(1, index, 1.0)
            self.head[batch] = share_map(member @ member.T, self.merged).int()

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        index = self.best(pos, q, self.proxies.rows, self.held_count)
        index = index.gather(1, self.head.long()[..., None].expand_as(index))
        due = pos - self.since >= self.every  # [B]
        self.since.copy_(torch.where(due, pos, self.since))
        self.held.copy_(torch.where(due[:, None, None], index, self.held))
        newer = self.since[:, None, None] + torch.arange(1, self.every, device=pos.device)  # [B, 1, .]
        # An entry that the budget covers is attended whole: its first `count` places, as far as written.
        whole, places = (pos < self.count)[:, None, None], self.context.positions[: self.count]
        index = torch.where(whole, places, torch.cat((self.held, newer.expand(-1, index.shape[1], -1)), -1))
        return index.where(index <= pos[:, None, None], -1)

    def score_bytes(self, length: int) -> int:
        heads = self.config.n_kv_heads
        return super().score_bytes(length) * (heads - self.merged) // heads // self.every


# -------------------------------------------------------------------------------------------------- InfiniGen


@dataclass
class InfinigenSettings(KeepSettings):
    """InfiniGen (OSDI 24): tokens are chosen by a guess of a layer earlier; K and V are in host memory."""

    keep: float = keep_setting(0.2)
    partial: float = setting(0.3, "fraction of skewed columns on the device", sets="bytes", within="(0, 1]")
    alpha: float = setting(5.0, "tokens count whose logit is less than this below the largest")
    skip: str = setting("0,1", "layers that attend every token, and stay on the device")


def infinigen_columns(q: Tensor, k: Tensor, p: int) -> Tensor:
    """The p columns A [Hkv, D, p] of V where a prompt's q V and k V are largest (secs. 4.2, 4.3), of its own
    Q = U Sigma V^T (ours: the paper's V is of another text). q [S, Hkv, G, D], k [S, Hkv, D]: after RoPE."""
    V = torch.linalg.eigh(lrqk_moments(q)[0].cpu()).eigenvectors.to(q)  # [Hkv, D, D]
    skewed = (torch.einsum("shgd,hde->hsge", x, V) for x in (q, k[:, :, None]))
    sums = sum(x.abs().sum((1, 2), dtype=torch.float64) for x in skewed)  # [Hkv, D]
    return V.gather(2, sums.topk(p).indices[:, None].expand(-1, V.shape[1], -1))


def infinigen_step(
    q: Tensor, guess: Tensor, k: Tensor, v: Tensor, stored: tuple, A: Tensor, alpha: float, most: int
) -> tuple:
    """One decode step of InfiniGen as published (sec. 4.3), for one sequence.

    q [Hq, D], k, v [Hkv, D]: after RoPE -> [Hq, D], and each KV head's tokens. guess [Hq, D]: queries made of
    the last layer's input. stored: partial keys [S - 1, Hkv, p], K and V [S - 1, Hkv, D]. A [Hkv, D, p]."""
    (partial, keys, _), (heads, D) = stored, k.shape
    # 1. Guess the logits of the stored tokens, from the partial queries and keys.
    logits = torch.einsum("hgd,hdp,shp->hgs", guess.unflatten(0, (heads, -1)), A, partial) * D**-0.5
    # 2. How many lie less than alpha below the largest: a mean over the heads, at most so many.
    near = (logits > logits.amax(-1, keepdim=True) - alpha).sum(-1)
    n = min(most, int(near.float().mean()))
    # 3. So many are fetched for each head; the queries of a group choose together. The new one is there.
    chosen = F.pad(logits.log_softmax(-1).amax(1).topk(n).indices, (0, 1), value=len(keys))  # [Hkv, n + 1]
    stored = appended(stored, torch.einsum("hd,hdp->hp", k, A), k, v)
    # 4. Attend them.
    k, v = (x.transpose(0, 1).take_along_dim(chosen[..., None], 1) for x in stored[1:])
    weights = (q.unflatten(0, (heads, -1)) @ k.mT * D**-0.5).softmax(-1)
    return (weights @ v).flatten(0, 1), chosen, stored


def early_layer(layer, x: Tensor, update: Tensor, before: Tensor, pos: Tensor, cache) -> tuple:
    """decode_layer with queries guessed from `before`, the last layer's normed input; it gives its own."""
    x = x + update
    normed, attention = layer.attention_norm(x), layer.attention
    guess = attention.attended(attention.wqkv(before), lambda q, *_: q)
    x = x + attention(normed, lambda *qkv: cache.decode(pos, *qkv, guess))
    return x, layer.feed_forward(layer.ffn_norm(x)), normed


def early_decode(model: Llama, tokens: Tensor, pos: Tensor, caches: list, step, last) -> Tensor:
    """Llama.decode in early_layers. The first layer has none before it: it guesses from its own input."""
    x = model.embed(tokens)
    update, before = torch.zeros_like(x), model.layers[0].attention_norm(x)
    for layer, cache in zip(model.layers, caches, strict=True):
        x, update, before = step(layer, x, update, before, pos, cache)
    return last(model.norm, model.output, x, update)


class InfinigenCache(ProxyCache):
    """K and V in host memory; the proxy of a key is its part in the columns that its prompt has chosen."""

    def __init__(self, context: Context, settings: InfinigenSettings):
        c, capacity = context.config, context.capacity
        stores = (HostStore(context, c.n_kv_heads, capacity, c.head_dim) for _ in range(2))
        super().__init__(context, *stores, budget=settings.budget(capacity))
        self.alpha, p = settings.alpha, rank_of(settings.partial, c.head_dim)
        self.proxies = TokenStore(context, c.n_kv_heads, capacity, p)
        self.table("basis", c.n_kv_heads, c.head_dim, p, dtype=context.dtype)
        context.decode_steps = early_decode, early_layer, model_file.decode_logits

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        if not span.start:
            self.basis[batch] = infinigen_columns(q.unflatten(1, (k.shape[1], -1)), k, self.basis.shape[-1])
        self.write((batch, span), k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *guess: Tensor) -> Tensor:
        """guess [B, Hq D]: before RoPE; where there is none, the queries themselves choose."""
        self.guess = self.rope(guess[0].view(q.shape) if guess else q, pos)
        return super().decode(pos, q, k, v)

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        old, guess = pos - self.budget[2], in_basis(self.guess, self.basis)
        logits = kernels.scores(guess, *self.proxies.scored(old), old, self.scale, "each", kernel=self.kernel)
        near = logits > logits.amax(-1, keepdim=True) - self.alpha  # [B, Hkv, G, S]
        scores = group_scores(logits, self.context.positions <= old[:, None])
        count = near.sum(-1).double().mean((1, 2)).long()
        return kernels.select(scores, pos, self.budget, count, recent=True, kernel=self.kernel)

    def score_bytes(self, length: int) -> int:
        return super().score_bytes(length) + self.basis[0].nbytes


# ------------------------------------------------------------------------------------------------------- KIVI


@dataclass
class KiviSettings:
    """KIVI (arXiv 2402.02750): keys quantised per channel, values per token; all tokens attended."""

    bits: int = setting(4, "bits of a code; the paper: 2, and 4 under grouped queries", (2, 4), sets="bytes")
    residual: int = setting(128, "R: last values that stay exact, and keys of a block")


def kivi_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, bits: int, R: int) -> tuple[Tensor, tuple]:
    """One decode step of KIVI as published (sec. 3.2), for one KV head: q [G, D], k, v [D] after RoPE ->
    [G, D]. stored: K and V [S - 1, D], of which each step makes codes."""
    keys, values = stored = appended(stored, k, v)
    # 1. Keys in codes per channel, 32 tokens a group; those of an unfinished block of R are exact.
    full, group = len(keys) // R * R, min(32, len(k))
    coded = dequantize(*quantize(keys[:full], bits, 32, -2), bits, 32, keys.dtype, -2)
    keys = torch.cat((coded, keys[full:]))
    # 2. Values in codes per token, 32 channels a group; the last R are exact.
    old = max(0, len(values) - R)
    coded = dequantize(*quantize(values[:old], bits, group), bits, group, values.dtype)
    # 3. Attend every token.
    weights = (q @ keys.mT * len(k) ** -0.5).softmax(-1)
    return weights @ torch.cat((coded, values[old:])), stored


class RingStore(nn.Module):
    """Codes, `token_bytes` a token, and a ring of the last R tokens as attended. The base of KIVI's two."""

    def __init__(self, context: Context, bits: int, R: int):
        super().__init__()
        self.context, self.bits, self.R = context, bits, R
        self.ring = Window(context, context.config.n_kv_heads, context.config.head_dim, 0, R, by_token=True)

    def recent(self, pos: Tensor) -> Tensor:
        """Which tokens are in the ring, [B, S]."""
        return self.context.positions > pos[:, None] - self.R

    def read(self, pos: Tensor, index: Tensor | None = None) -> Tensor:
        ring = self.ring.rows[:, :, self.context.positions % self.R]  # [B, Hkv, S, width]
        x = torch.where(self.recent(pos)[:, None, :, None], ring, self.decoded())
        return x if index is None else gather_rows(x, index)

    def scored(self, pos: Tensor) -> tuple[Tensor, None]:
        return self.read(pos), None

    def bytes_of(self, n: float, length: int) -> float:
        """Those in the ring are taken to be among the n."""
        recent = min(n, length, self.R)
        return recent * self.ring.token_bytes + (n - recent) * self.token_bytes


class ChannelKeys(RingStore):
    """Keys quantised per channel in groups of 32 tokens. Those of an unfinished block of R are exact."""

    kind = "channels"

    def __init__(self, context: Context, bits: int, residual: int):
        capacity, heads, width = context.capacity, context.config.n_kv_heads, context.config.head_dim
        if residual < 32 or residual % 32:
            raise UserError(f"--residual {residual}: give a multiple of 32, at least 32")
        super().__init__(context, bits, min(residual, -(-capacity // 32) * 32))
        self.tokens = -(-capacity // self.R) * self.R
        self.token_bytes = heads * width * (bits + 1) / 8  # codes, and a part of their (minimum, scale)
        self.register_buffer("codes", context.zeros(heads, self.tokens, width * bits // 8, dtype=torch.uint8))
        self.register_buffer("low_scale", context.zeros(heads, self.tokens // 32, width, 2, dtype=torch.half))

    def decode(self, codes: Tensor, low_scale: Tensor) -> Tensor:
        """Codes [..., S, width * bits / 8] to keys [..., S, width]."""
        return dequantize(codes, low_scale, self.bits, 32, self.context.dtype, -2)

    def write(self, where: tuple, x: Tensor) -> None:
        (self.write_chunk if isinstance(where[0], int) else self.write_token)(*where, x)

    def write_chunk(self, batch: int, span: slice, x: Tensor) -> None:
        first = span.start // self.R * self.R  # of the unfinished block, which the ring has from slot 0 on
        x = torch.cat((self.ring.rows[batch, :, : span.start - first].transpose(0, 1), x))
        self.ring.write((batch, slice(first, span.stop)), x)
        full = len(x) // self.R * self.R
        codes, low_scale = quantize(x[:full].transpose(0, 1), self.bits, 32, -2)
        self.codes[batch, :, first : first + full] = codes
        self.low_scale[batch, :, first // 32 : (first + full) // 32] = low_scale
        if full:  # the last full block fills the ring from slot 0 on; the keys after it lie there now
            block = self.decode(codes[:, -self.R :], low_scale[:, -self.R // 32 :])  # [Hkv, R, width]
            self.ring.rows[batch, :, len(x) - full :] = block[:, len(x) - full :]

    def write_token(self, batch: Tensor, pos: Tensor, x: Tensor) -> None:
        self.ring.write((batch, pos), x)
        # The block is written at every step and read when it is full: a condition would have to ask the host.
        ring = self.ring.rows.transpose(1, 2)  # as it lies in memory: else a compiled step copies it
        codes, low_scale = quantize(ring.transpose(1, 2), self.bits, 32, -2)  # [B, Hkv, R or R / 32, .]
        full = (pos % self.R == self.R - 1)[:, None, None, None]
        ring.copy_(torch.where(full, self.decode(codes, low_scale).transpose(1, 2), ring))
        batch, first = batch[:, None], (pos // self.R * self.R)[:, None]
        tokens = first + torch.arange(self.R, device=pos.device)
        groups = first // 32 + torch.arange(self.R // 32, device=pos.device)
        self.codes[batch, :, tokens] = codes.transpose(1, 2)
        self.low_scale[batch, :, groups] = low_scale.transpose(1, 2)

    def formula(self) -> float:
        return self.context.batch_size * self.tokens * self.token_bytes  # beside the ring

    def decoded(self) -> Tensor:
        return self.decode(self.codes, self.low_scale)[:, :, : self.context.capacity]

    def past(self, batch: int, n: int) -> Tensor:
        groups = -(-n // 32)
        keys = self.decode(self.codes[batch, :, : groups * 32], self.low_scale[batch, :, :groups])
        return self.ring.overlay(batch, keys[:, :n].transpose(0, 1))

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        """q . (low + scale code) = q . low + (q scale) . code, in groups of 32 tokens, a plane at a time."""
        low, scale = self.low_scale.float().unbind(-1)  # [B, Hkv, n, width]
        weights = q[:, :, None] * scale[:, :, :, None].to(q.dtype)  # [B, Hkv, n, G, width]
        codes = self.codes.unflatten(2, (-1, 32)).mT  # [B, Hkv, n, width * bits / 8, 32]
        planes = ((codes >> i) & (2**self.bits - 1) for i in range(0, 8, self.bits))
        parts = (x.contiguous() for x in weights.chunk(8 // self.bits, -1))
        coded = sum(matmul_codes(x, plane).float() for x, plane in zip(parts, planes, strict=True))
        places = self.context.positions
        coded = coded.transpose(2, 3).flatten(3)[..., : len(places)]  # of [B, Hkv, n, G, 32]
        # A group's number for each of its tokens by an index: where it is expanded and sliced, Inductor
        # loops over whole groups, and the tokens of the last one get no value.
        coded = coded + (q.float() @ low.mT)[..., places // 32]  # [B, Hkv, G, S]
        recent = q @ self.ring.rows.mT  # [B, Hkv, G, R]
        return torch.where(self.recent(pos)[:, None, None], recent[..., places % self.R], coded)

    def kernel_form(self) -> list[Tensor]:
        return [self.codes, self.low_scale, self.ring.rows.transpose(1, 2)]


class TokenValues(RingStore):
    """Values quantised per token in groups of 32 channels; the last R are exact."""

    def __init__(self, context: Context, bits: int, R: int):
        c = context.config
        super().__init__(context, bits, R)
        self.coded = CodedStore(context, c.n_kv_heads, context.capacity, c.head_dim, bits)
        self.token_bytes = self.coded.token_bytes

    def write(self, where: tuple, x: Tensor) -> None:
        self.coded.write(where, x)
        self.ring.write(where, x)

    def decoded(self) -> Tensor:
        return self.coded.read(None)

    def past(self, batch: int, n: int) -> Tensor:
        return self.ring.overlay(batch, self.coded.past(batch, n))

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        position = ring_positions(pos, self.R)[:, None, None]  # [B, 1, 1, R]
        recent = weights.gather(-1, position.clamp(min=0).long().expand(*weights.shape[:3], -1))
        recent = self.ring.mix(recent.masked_fill(position < 0, 0), pos)
        return self.coded.mix(weights.masked_fill(self.recent(pos)[:, None, None], 0), pos) + recent

    def kernel_form(self) -> list[Tensor]:
        return [*self.coded.kernel_form(), self.ring.rows.transpose(1, 2)]


def kivi_kv(context: Context, settings: KiviSettings) -> tuple[ChannelKeys, TokenValues]:
    keys = ChannelKeys(context, settings.bits, settings.residual)
    return keys, TokenValues(context, settings.bits, keys.R)


# ------------------------------------------------------------------------------------------------- TurboQuant


@dataclass
class TurboQuantSettings:
    """TurboQuant (arXiv 2504.19874): rotated keys and values, each number at the nearest of fixed levels."""

    bits: int = setting(4, "bits of a code", (2, 3, 4), sets="bytes")


# The levels above 0 at which normal numbers have the least mean square error, in standard deviations (Max,
# as above). A coordinate of a random unit vector in D dims is nearly normal (Lemma 1), of deviation D^-1/2.
LEVELS = {2: (0.4528, 1.51), 3: (0.2451, 0.756, 1.344, 2.152)}
LEVELS[4] = (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)


def turboquant(x: Tensor, Pi: Tensor, levels: Tensor) -> Tensor:
    """x [..., D] as its codes decode (Algorithm 1, with its line numbers); Pi [D, D]: a random rotation."""
    norm = x.norm(dim=-1, keepdim=True)
    y = x / norm @ Pi.mT  # 5. Rotate the unit vector.
    codes = (y[..., None] - levels).abs().argmin(-1)  # 6. The nearest level of each number.
    return as_fp16(norm) * (levels[codes] @ Pi)  # 9, 10. Decode, and rotate back.


class LevelStore(ScaledStore):
    """Codes of a rotated row's numbers, each of the nearest level of a unit vector's, and the row's norm."""

    kind = "levels"  # which no kernel knows

    def __init__(self, context: Context, bits: int):
        width = context.config.head_dim
        super().__init__(context, context.config.n_kv_heads, context.capacity, width, bits)
        levels = torch.tensor(LEVELS[bits], device=context.device) * width**-0.5
        self.levels = torch.cat((-levels.flip(0), levels))
        self.rotation = mix_rotation(width).to(context.device)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        norm, middles = x.float().norm(dim=-1), (self.levels[1:] + self.levels[:-1]) / 2
        rotated = x.float() / norm.clamp(min=1e-20)[..., None] @ self.rotation
        return pack(torch.bucketize(rotated, middles), self.bits), as_fp16(norm)

    def rotated(self, rows: Tensor, scale: Tensor) -> Tensor:
        return self.levels[unpack(rows, self.bits).int()] * scale[..., None].float()

    def decode(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (self.rotated(rows, scale) @ self.rotation.mT).to(self.context.dtype)

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        return q.float() @ self.rotation @ self.rotated(self.rows, self.scale).mT

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return weights @ self.rotated(self.rows, self.scale) @ self.rotation.mT


def turboquant_cache(context: Context, settings: TurboQuantSettings) -> Cache:
    return DenseCache(context, *(LevelStore(context, settings.bits) for _ in range(2)))


# --------------------------------------------------------------------------------------------------- ShadowKV


@dataclass
class ShadowKvSettings:
    """ShadowKV (arXiv 2410.21465): low-rank pre-RoPE keys, values in host memory, chunks with landmarks."""

    keep: float = keep_setting(1024)
    rank: float = setting(0.15625, "rank of the keys / (Hkv*D), as 160 / 1024", sets="bytes", within="(0, 1]")
    chunk: int = setting(8, "tokens of a chunk", within="[1, inf)")
    outliers: int = setting(48, "chunks least like their mean, kept exactly")
    recent: int = setting(32, "last tokens, kept exactly, with up to a chunk more", within="[1, inf)")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """(selected, outliers, recent) in tokens that are attended at most."""
        return within(capacity, *self.layout(capacity))

    def layout(self, capacity: int) -> tuple[int, int, int]:
        """What is stored and selected for it, whole chunks; room for all in each where all are attended."""
        chunk = min(self.chunk, capacity)
        outliers, recent = self.outliers * chunk, self.recent + chunk - 1
        total, chunks = kept_tokens(self.keep, capacity), -(-capacity // chunk)
        if total >= capacity:
            return chunks * chunk, min(self.outliers, chunks) * chunk, min(recent, capacity)
        selected = (total - outliers - recent) // chunk
        if selected < 1:
            exact = f"{self.outliers} outlier chunks and {recent} recent tokens; lower --outliers or --recent"
            raise UserError(f"--keep {self.keep:g} of {capacity} leaves no chunk of {chunk} beside {exact}")
        return selected * chunk, outliers, recent


def shadowkv_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, U: Tensor, outliers: Tensor, budget: tuple, rope
) -> tuple:
    """One decode step of ShadowKV as published (Algorithm 2), for one sequence.

    q [Hq, D], k, v [Hkv, D]: before RoPE -> [Hq, D], and each KV head's tokens. stored: latents [S - 1, r], K
    after RoPE (for landmarks, outliers, recent tokens) and V [S - 1, Hkv, D]. U [Hkv*D, r]: of the prompt's
    SVD. outliers [Hkv, .]: exact chunks. budget: chunks to select, tokens of a chunk, recent tokens."""
    (n, chunk, recent), S, (heads, D), outputs, chosen = budget, len(stored[0]) + 1, k.shape, [], []
    q, rotated = (rope(x[None], torch.tensor([S - 1]))[0] for x in (q, k))
    latents, keys, values = stored = appended(stored, k.flatten() @ U, rotated, v)
    q, near = q.unflatten(0, (heads, -1)), max(0, S - recent) // chunk
    for h in range(heads):
        # 1. The n best of the older chunks, by the largest weight that a query gives their mean key.
        landmarks = keys[: S // chunk * chunk, h].unflatten(0, (-1, chunk)).mean(1)
        scores = (q[h] @ landmarks.mT * D**-0.5).log_softmax(-1).amax(0)[:near]
        scores[outliers[h][outliers[h] < near]] = -torch.inf
        best = scores.topk(min(n, int(scores.isfinite().sum()))).indices
        # 2. Rebuild their keys; outliers and recent tokens are exact.
        rebuilt, far = ((c[:, None] * chunk + torch.arange(chunk)).flatten() for c in (best, outliers[h]))
        exact = torch.cat((far, torch.arange(near * chunk, S)))
        k_best = rope((latents[rebuilt] @ U.unflatten(0, (heads, D))[h].mT)[:, None], rebuilt)[:, 0]
        # 3. Attend. The values of what is rebuilt come from host memory.
        tokens = torch.cat((rebuilt, exact))
        weights = (q[h] @ torch.cat((k_best, keys[exact, h])).mT * D**-0.5).softmax(-1)
        outputs.append(weights @ values[tokens, h])
        chosen.append(tokens)
    return torch.cat(outputs), chosen, stored


class ShadowKvCache(Cache):
    """Latents of pre-RoPE keys on the basis of the prompt's own SVD, joint over heads; landmarks of chunks;
    outlier chunks and a ring of recent tokens, K beside V; V of every token in host memory."""

    def __init__(self, context: Context, settings: ShadowKvSettings):
        super().__init__(context)
        c, self.settings, self.chunk = context.config, settings, min(settings.chunk, context.capacity)
        self.selected, self.outlier_tokens, self.z = settings.layout(context.capacity)
        self.r = rank_of(settings.rank, c.kv_dim)
        heads, d = c.n_kv_heads, c.head_dim
        self.table("basis", c.kv_dim, self.r, dtype=context.dtype)
        self.table("latent", context.capacity, self.r, dtype=context.dtype)
        self.table("landmark", heads, -(-context.capacity // self.chunk), d, dtype=context.dtype)
        self.table("outlier", heads, self.outlier_tokens // self.chunk, fill=-1)
        self.outliers = TokenStore(context, heads, self.outlier_tokens, 2 * d)
        self.ring = Window(context, heads, 2 * d, 0, self.z)
        self.values = HostStore(context, heads, context.capacity, d)

    def past(self, batch: int, n: int) -> tuple[Tensor, Tensor]:
        """Rebuilt keys, but for those of outliers and recent tokens."""
        keys = (self.latent[batch, :n] @ self.basis[batch].T).unflatten(1, (self.config.n_kv_heads, -1))
        kv = torch.cat((self.rope(keys, slice(0, n)), self.values.past(batch, n)), -1)
        index = page_tokens(self.outlier[batch], self.chunk)  # [Hkv, m], negative for none
        head, place = (index >= 0).nonzero(as_tuple=True)
        kv[index[head, place], head] = self.outliers.rows[batch, head, place]
        return self.ring.overlay(batch, kv).chunk(2, -1)

    def write_chunk(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        flat, first = rest[0].flatten(1), span.start // self.chunk  # the chunk that goes on, or begins
        if not span.start:
            gram = flat.double().T @ flat.double()  # its eigenvectors are the right singular vectors of K
            self.basis[batch] = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, : self.r].to(flat.dtype)
        self.latent[batch, span] = flat @ self.basis[batch]
        begun = self.context.positions[first * self.chunk : span.start] % self.z  # its tokens in the ring
        keys = torch.cat((self.ring.rows[batch, :, begun].chunk(2, -1)[0].transpose(0, 1), k))
        chunks = keys[: len(keys) // self.chunk * self.chunk].unflatten(0, (-1, self.chunk)).float()
        landmark = chunks.mean(1)  # [n, Hkv, D]
        self.landmark[batch, :, first : first + len(chunks)] = landmark.transpose(0, 1).to(k.dtype)
        kv = torch.cat((k, v), -1)
        if not span.start:  # the outliers: old chunks that are least like their mean
            old = max(0, len(k) - self.settings.recent) // self.chunk
            likeness = F.cosine_similarity(chunks[:old], landmark[:old, None], dim=-1).amin(1)  # [old, Hkv]
            ids = likeness.T.topk(min(self.outlier.shape[-1], old), largest=False).indices  # [Hkv, n]
            self.outlier[batch], self.outlier[batch, :, : ids.shape[1]] = -1, ids.int()
            tokens, heads = page_tokens(ids, self.chunk), torch.arange(len(ids), device=k.device)[:, None]
            self.outliers.rows[batch, :, : tokens.shape[1]] = kv[tokens, heads]
        self.values.write((batch, span), v)
        self.ring.write((batch, span), kv)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        batch = self.context.batch_ids
        self.latent[batch, pos] = (k.flatten(1)[:, None] @ self.basis)[:, 0]
        q, k = self.rope(q, pos), self.rope(k, pos)
        self.ring.write((batch, pos), torch.cat((k, v), -1))
        self.values.write((batch, pos), v)
        # The mean of the last chunk is written at every step and read when the chunk is whole.
        newest = page_tokens((pos // self.chunk)[:, None], self.chunk) % self.z
        mean = self.ring.rows[batch[:, None], :, newest].float().mean(1).chunk(2, -1)[0]  # [B, Hkv, D]
        self.landmark[batch, :, pos // self.chunk] = mean.to(k.dtype)
        first = (pos + 1 - self.settings.recent).clamp(min=0) // self.chunk  # chunk of the recent tokens
        near = ring_positions(pos, self.z)[:, None].expand(-1, k.shape[1], -1)  # [B, Hkv, z]
        near = near.where(near >= (first * self.chunk)[:, None, None], -1)
        index = self.select(pos, q, first - 1)
        tokens = torch.cat((page_tokens(self.outlier, self.chunk), index, near), 2)  # negative for none
        self.report_selected(pos, tokens, tokens >= 0)
        # K = RoPE(A U^T) and V of the selected tokens.
        index = index.clamp(min=0)
        latent = self.latent[batch[:, None, None], index]  # [B, Hkv, n, r]
        rebuilt = latent @ self.basis.unflatten(1, (k.shape[1], -1)).transpose(-1, -2)
        chosen = self.rope(rebuilt[..., None, :], index)[..., 0, :], self.values.read(None, index)
        parts = zip(self.outliers.rows.chunk(2, -1), chosen, self.ring.rows.chunk(2, -1), strict=True)
        k_all, v_all = (torch.cat(part, 2) for part in parts)
        return kernels.attend_rows(q, k_all, v_all, tokens >= 0, scale=self.scale, kernel=self.kernel)

    def select(self, pos: Tensor, q: Tensor, last: Tensor) -> Tensor:
        """Tokens of the chunks up to `last` with the best landmarks [B, Hkv, n], negative for none."""
        whole = (pos + 1) // self.chunk - 1  # the newest chunk that is whole
        outlier = (self.outlier[..., None] == torch.arange(self.landmark.shape[2], device=pos.device)).any(2)
        scores = kernels.scores(
            q, self.landmark, None, whole, self.scale, "largest", kernel=self.kernel
        ).masked_fill(outlier, -torch.inf)
        best = kernels.select(scores, last, (0, self.selected // self.chunk, 0), kernel=self.kernel)
        return page_tokens(best, self.chunk)

    def bytes_read(self, length: int) -> int:
        """Landmarks, outliers, ring, each head's chosen latents, the basis, and V of the chosen (host)."""
        c, recent = self.config, min(self.z, length)
        outliers = min(self.outlier_tokens, max(0, length - recent))
        chosen = min(self.selected, max(0, length - recent - outliers))
        elements = (length // self.chunk + 2 * (outliers + recent) + chosen) * c.kv_dim
        elements += (min(length, c.n_kv_heads * chosen) + c.kv_dim) * self.r
        return elements * self.context.dtype.itemsize


# -------------------------------------------------------------------------------------------------------- FDC


@dataclass
class FdcSettings:
    """FDC, Fast KV Dimensionality Compression (arXiv 2408.04107): attention on compressed vectors."""

    rate: float = setting(-1.0, "r: singular values lost (-1: as fitted)", sets="bytes", within="[-1, 1)")
    adaptive: bool = setting(True, "each head has its own rank; else all their mean (the paper's /AC)")

    def bases(self, artifact: Artifact, i: int, kind: str) -> list[Tensor]:
        """Layer i's bases R [D, rank] of each KV head, of kind "qk" or "v"."""
        rate = float(artifact["rate"]) if self.rate == -1 else self.rate
        ranks = fdc_ranks(artifact[f"{kind}.values"], rate, self.adaptive)  # of all layers, for their mean
        bases = zip(artifact[f"{kind}.basis"][i], ranks[i].tolist(), strict=True)
        return [basis[:, :rank] for basis, rank in bases]


def fdc_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, R: Tensor) -> tuple[Tensor, tuple]:
    """One decode step of FDC as published (sec. 5.1), for one KV head; so is prefill. q [G, D], k [D] after
    RoPE -> [G, d_v]. v [d_v]: x W_V R_V, whose basis is folded into the weights, as is R_V^T into W_O.
    stored: K' [S - 1, d_qk] and V' [S - 1, d_v]. R [D, d_qk]: the leading columns of the head's rotation."""
    # 1. Compress the query and the key after RoPE; append.
    q, k = q @ R, k @ R
    keys, values = stored = appended(stored, k, v)
    # 2. Attend the compressed vectors, at the scale of the full head dim.
    return (q @ keys.mT * len(R) ** -0.5).softmax(-1) @ values, stored


def fdc_tails(values: Tensor) -> Tensor:
    """Fraction of the singular values [..., D] lost where the first m = 1 .. D stay -> [..., D] fp64."""
    tails = values.double().flip(-1).cumsum(-1).flip(-1)
    return F.pad(tails[..., 1:], (0, 1)) / tails[..., :1]


def fdc_ranks(values: Tensor, rate: float, adaptive: bool = True) -> Tensor:
    """Columns that each head keeps (Eq. 1): the least m that loses at most `rate`, rounded up to 16 (by real
    columns, not zeros): values [L, Hkv, D] -> ranks [L, Hkv]. Not adaptive: the mean of them all."""
    ranks = (fdc_tails(values) > rate).sum(-1) + 1
    ranks = (-(-ranks // 16) * 16).clamp(max=values.shape[-1])
    return ranks if adaptive else ranks.double().mean().long().expand(ranks.shape)


def kv_bias(attention: Attention, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """The biases of the key and value projections, [Hkv, D] each (V folded: [Hkv, 0]), or zeros."""
    bias = attention.wqkv.bias
    bias = attention.wqkv.weight.new_zeros(sum(attention.widths)) if bias is None else bias
    return tuple(b.view(c.n_kv_heads, len(b) // c.n_kv_heads) for b in bias.split(attention.widths)[1:3])


def fold_values(attention: Attention, c: ModelConfig, settings: object, artifact: Artifact, i: int):
    """Layer i's attention with W_V R in the place of W_V and R^T W_O in that of W_O, for FDC and Palu: the
    cache holds and returns x W_V R. V's bias moves into W_O's, since attention weights sum to one."""
    wqkv, wo = attention.wqkv, attention.wo
    heads, weight, bias, constant = (c.n_kv_heads, -1), wqkv.weight, wqkv.bias, wo.bias
    bases = [basis.to(weight.device) for basis in settings.bases(artifact, i, "v")]  # R [D, d_v] of KV heads
    q, k, v = weight.float().split(attention.widths)
    values = [basis.T @ rows for basis, rows in zip(bases, v.unflatten(0, heads), strict=True)]  # [d_v, dim]
    columns = wo.weight.float().unflatten(1, (c.n_kv_heads, c.group, -1))  # [dim, Hkv, G, D]
    output = [(columns[:, h] @ basis).flatten(1) for h, basis in enumerate(bases)]  # [dim, G * d_v]
    width = sum(map(len, values))
    if bias is not None:
        *own, v_bias = bias.float().split(attention.widths)
        constant = 0 if constant is None else constant
        constant = constant + torch.einsum("ohgd,hd->o", columns, v_bias.unflatten(0, heads))
        bias = torch.cat((*own, bias.new_zeros(width)))
    attention.wqkv = linear_of(torch.cat((q, k, *values)), bias, weight.dtype)
    attention.wo = linear_of(torch.cat(output, 1), constant, weight.dtype)
    # `attend` gets v of no heads, and the latents of all heads as its last argument.
    attention.widths = [*attention.widths[:2], 0, width]
    return attention


class RaggedStore(nn.Module):
    """Heads of unequal rank in one flat buffer: K' [B, S, d_qk] head by head, then V' [B, S, d_v]."""

    def __init__(self, context: Context, k_ranks: list[int], v_ranks: list[int]):
        super().__init__()
        self.context, self.n, self.ranks = context, len(k_ranks), [*k_ranks, *v_ranks]
        self.token_bytes = sum(self.ranks) * context.dtype.itemsize
        self.register_buffer("packed", context.zeros(context.capacity * sum(self.ranks)).flatten())
        # Number j of token t (of all entries, end to end) goes to starts[j] + t * strides[j] of the buffer.
        ranks = torch.tensor(self.ranks)
        first = (ranks.cumsum(0) - ranks).repeat_interleave(ranks)
        starts = first * (context.batch_size * context.capacity - 1) + torch.arange(sum(self.ranks))
        self.starts, self.strides = (x.to(context.device) for x in (starts, ranks.repeat_interleave(ranks)))
        self.k_columns = own_columns(k_ranks, 1).to(context.device)
        self.v_columns = own_columns(v_ranks, context.config.group).to(context.device)
        whole = context.kernel and math.gcd(8, *self.ranks) == 8  # rows of 16 bytes
        self.table = kernels.rank_table(self.ranks, context.device) if whole else None

    def views(self) -> list[Tensor]:
        """K' [B, S, d_qk] of each head, then V' [B, S, d_v] of each."""
        tokens = self.context.batch_size, self.context.capacity
        parts = self.packed.split([math.prod(tokens) * rank for rank in self.ranks])
        return [part.view(*tokens, rank) for part, rank in zip(parts, self.ranks, strict=True)]

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        """Stores tokens' K' [n, Hkv, max d_qk] and V' [n, sum of d_v]; where: as other stores have it."""
        (batch, tokens), x = where, torch.cat((k.flatten(1)[:, self.k_columns], v), -1)
        if isinstance(batch, int):
            for view, part in zip(self.views(), x.split(self.ranks, -1), strict=True):
                view[batch, tokens] = part
        else:  # one scatter for all heads: a compiled step writes in place, with no copy of the buffer
            token = (batch * self.context.capacity + tokens)[:, None]
            self.packed[self.starts + token * self.strides] = x

    def formula(self) -> int:
        return self.context.batch_size * self.context.capacity * self.token_bytes


class FdcCache(Cache):
    """K' = K R of keys after RoPE and folded values V', each KV head at its own ranks d_qk and d_v."""

    def __init__(self, context: Context, settings: FdcSettings, _, artifact: Artifact, i: int):
        super().__init__(context)
        k_bases, v_bases = (settings.bases(artifact, i, kind) for kind in ("qk", "v"))
        self.k_ranks, self.v_ranks = ([basis.shape[1] for basis in bases] for bases in (k_bases, v_bases))
        padded = [F.pad(basis, (0, max(self.k_ranks) - basis.shape[1])) for basis in k_bases]
        self.basis = torch.stack(padded).to(context.device, context.dtype)  # weights, not cache
        self.vectors = RaggedStore(context, self.k_ranks, self.v_ranks)

    def compress(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """x [..., H, D] before RoPE -> x R after RoPE [..., H, max d_qk], zero beyond d_qk."""
        return in_basis(self.rope(x, positions), self.basis)

    def extend(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.vectors.write((batch, span), self.compress(k, span), latent)
        q, n = self.compress(q, span).unflatten(1, (len(self.k_ranks), -1)), len(self.k_ranks)
        stored = [view[batch, : span.stop] for view in self.vectors.views()]  # K' of n heads, then V' of them
        # Flash attention wants one width for q, k and v: zeros up to the next multiple of 32 change nothing
        # (of those beyond d_qk some are cut off), and heads of one width go together.
        widths = [-(-max(ranks) // 32) * 32 for ranks in zip(self.k_ranks, self.v_ranks, strict=True)]
        outputs = {}
        for width in set(widths):
            members = [h for h, w in enumerate(widths) if w == width]
            own = F.pad(q[:, members].flatten(1, 2), (0, width - q.shape[-1]))
            parts = ([F.pad(stored[h], (0, width - stored[h].shape[1])) for h in (m, m + n)] for m in members)
            k, v = (torch.stack(part, 1) for part in zip(*parts, strict=True))
            output = causal_attention(own, k, v, self.context.scale).unflatten(1, (len(members), -1))
            outputs |= {h: output[:, i, :, : self.v_ranks[h]].flatten(1) for i, h in enumerate(members)}
        return torch.cat([outputs[h] for h in range(len(widths))], -1)[:, None]  # [S, 1, sum of G d_v]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.vectors.write((self.context.batch_ids, pos), self.compress(k, pos), latent)
        return kernels.attend_ragged(self.compress(q, pos), self.vectors, pos, scale=self.scale)[:, None]


def own_columns(ranks: list[int], G: int) -> Tensor:
    """Which of the numbers [Hkv, G, max rank] are a head's own, and not what it is padded with."""
    inside = torch.arange(max(ranks)) < torch.tensor(ranks)[:, None, None]
    return inside.expand(-1, G, -1).flatten().nonzero()[:, 0]


fdc_tensors = of_heads("qk.basis", "v.basis", "qk.values", "v.values", rate=(float,))


def random_fdc(c: ModelConfig) -> Artifact:
    """Singular values of which some heads' fall off faster: the ranks differ."""
    steepness = torch.linspace(1, 6, c.n_kv_heads)[:, None] * torch.linspace(0, 1, c.head_dim)
    values = (-steepness).exp().expand(c.n_layers, -1, -1)
    return {"qk.values": values, "v.values": values, "rate": torch.tensor(0.2, dtype=torch.float64)}


# ------------------------------------------------------------------------------------------------------- Palu


@dataclass
class PaluSettings:
    """Palu (arXiv 2407.21118), one head a group: low-rank K and V, keys rebuilt before RoPE at each step."""

    keep: float = setting(0.5, "rank of each head's K and V, a fraction of D", sets="bytes", within="(0, 1]")

    def bases(self, artifact: Artifact, i: int, kind: str) -> Tensor:
        """Layer i's bases R [Hkv, D, r] of the keys ("k") or the values ("v")."""
        basis = artifact[f"{kind}.basis"][i]
        return basis[..., : rank_of(self.keep, basis.shape[-1])]


def palu_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, R: Tensor, rope) -> tuple[Tensor, tuple]:
    """One decode step of Palu as published (sec. 3.1), for one KV head of its own group: q [G, D] after RoPE,
    k [D] before it, v [d_v] -> [G, d_v]. stored: latents of the keys [S - 1, r] and of the values [S - 1,
    d_v], whose basis W_V and W_O have. R [D, r] is orthonormal; rope(x, positions) rotates x [n, D]."""
    latents, values = stored = appended(stored, k @ R, v)
    keys = rope(latents @ R.mT, torch.arange(len(latents)))  # every step rebuilds and rotates all keys
    return (q @ keys.mT * len(R) ** -0.5).softmax(-1) @ values, stored


class PaluCache(Cache):
    """Folded values, and latents of the keys before RoPE and bias: FDC's /PRC, no post-RoPE compression."""

    def __init__(self, context: Context, settings: PaluSettings, attention, artifact: Artifact, i: int):
        super().__init__(context)
        basis, bias = settings.bases(artifact, i, "k"), kv_bias(attention, context.config)[0]
        shape = len(basis), context.capacity, basis.shape[2]
        latents, basis = TokenStore(context, *shape), basis.to(context.device)
        self.keys = RebuiltKeys(latents, basis, bias.to(context.dtype))
        self.values = TokenStore(context, *shape)

    def write(self, where: tuple, k: Tensor, latent: Tensor) -> None:
        """Stores tokens, of k [n, Hkv, D] before RoPE and folded values [n, Hkv r]."""
        self.keys.latents.write(where, in_basis(k - self.keys.bias, self.keys.basis))
        self.values.write(where, latent.unflatten(-1, (self.config.n_kv_heads, -1)))

    def extend(self, batch: int, span: slice, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.write((batch, span), k, latent)
        k, v = (store.past(batch, span.stop) for store in (self.keys, self.values))
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # flash attention wants one width
        return causal_attention(self.rope(q, span), k, padded)[..., : v.shape[-1]]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.write((self.context.batch_ids, pos), k, latent)
        return kernels.attend(
            self.rope(q, pos), self.keys, self.values, pos, scale=self.scale, kernel=self.kernel
        )


# -------------------------------------------------------------------------------------- calibration artifacts


def artifact_path(folder: Path, method: str) -> Path:
    return folder / f"{method}.safetensors"


def model_identity(model: Llama) -> dict[str, str]:
    """What an artifact must agree on with the model: its shape and the fingerprint of its weights."""
    c = model.whole
    shape = f"{c.n_layers}x{c.n_heads}x{c.n_kv_heads}x{c.head_dim}"
    return {"shape": shape, "fingerprint": model.fingerprint}


def load_artifact(folder: Path, method: str, model: Llama) -> Artifact:
    """What `calibrate.py fit` stored for this method beside the checkpoint, on the CPU; of several ranks,
    each has the part of its KV heads. Raises UserError where there is none, or one of another model."""
    method = METHODS[method].artifact or method
    path = artifact_path(folder, method)
    command = f"python calibrate.py fit --checkpoint {folder} --method {method}"
    if model.config.elitekv and method != "elitekv":
        raise UserError(ONLY_ELITEKV)
    if not path.is_file():
        raise UserError(f"{path}: {method} must be calibrated first: {command}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); make it again: {command}") from None
    for key, value in model_identity(model).items():
        if metadata.get(key) != value:
            fault = f"fitted to another model ({key} {metadata.get(key)}, this one has {value})"
            raise UserError(f"{path}: {fault}; make it again: {command}")
    for name, stored in METHODS[method].tensors(model.whole).items():
        if fault := artifact_fault(tensors.get(name), *stored):
            raise UserError(f"{path}: {name} {fault}; make it again: {command}")
    shards = model.whole.n_kv_heads // model.config.n_kv_heads
    if method == "sals" and shards > 1:
        sals_local_part(tensors, model.config)
    for name, (_, *shape) in METHODS[method].tensors(model.config).items():
        tensors[name] = model_file.local_part(tensors[name], shape)
    if "d_ckv" in tensors:  # EliteKV: each rank has a latent of its own heads, made of its weights (ours)
        tensors["d_ckv"] = (tensors["d_ckv"] // shards).clamp(min=1)
    return tensors


def artifact_fault(tensor: Tensor | None, kind: type, *shape: int | None) -> str:
    """What is wrong with a tensor of an artifact, "" if nothing. Whole numbers of a shape are orders."""
    if tensor is None:
        return "is missing"
    sizes = zip(tensor.shape, shape, strict=False)
    if tensor.ndim != len(shape) or any(wanted not in (None, size) for size, wanted in sizes):
        return f"is {list(tensor.shape)}, not [{', '.join(str(size or 'any') for size in shape)}]"
    if not (tensor.is_floating_point() if kind is float else tensor.dtype in (torch.int32, torch.int64)):
        return f"holds {str(tensor.dtype).removeprefix('torch.')} numbers"
    if kind is float and not tensor.isfinite().all():
        return "is not finite"
    if kind is int and shape and (tensor.sort(-1).values != torch.arange(shape[-1])).any():
        return "is no order"
    return ""


def random_artifact(method: str, c: ModelConfig) -> Artifact:
    """An artifact of no meaning, for random weights: orthonormal bases, random numbers near 1, row.random."""
    row = METHODS[METHODS[method].artifact or method]
    made, seeded = row.random(c) if row.random else {}, torch.Generator().manual_seed(0)
    for name, (kind, *shape) in row.tensors(c).items():
        if name not in made:
            sizes = [shape[-2] * 5 // 8 if size is None else size for size in shape]
            if "basis" in name:
                made[name] = random_basis(*sizes)
            else:
                made[name] = torch.tensor(1) if kind is int else 0.5 + torch.rand(sizes, generator=seeded)
    return made


@functools.lru_cache(1)
def random_basis(*shape: int) -> Tensor:
    """Orthonormal columns of no meaning [..., n, r], in the place of fitted ones where weights are random."""
    return torch.linalg.qr(torch.randn(*shape, generator=torch.Generator().manual_seed(0))).Q


# -------------------------------------------------------------------------------------------------- the table


@dataclass
class Method:
    """A row of METHODS. settings: their docstring is in `--help`. caches(model, settings, context, artifact):
    one a layer. tensors: of its artifact, if it is fitted, or `artifact`: the method whose it uses; random:
    those of random_artifact that are not numbers near 1. fold(attention, config, settings, artifact, i):
    layer i's attention with what it folds into weights, maybe on the meta device. paper: --variant paper."""

    settings: type
    caches: Callable[..., list[Cache]]
    tensors: Callable[[ModelConfig], Stored] | None = None
    random: Callable[[ModelConfig], Artifact] | None = None
    fold: Callable[..., Attention] | None = None
    paper: dict = field(default_factory=dict)
    artifact: str = ""

    def fold_all(self, model: Llama, settings: object, artifact: Artifact, layers=None) -> None:
        """Folds what the method folds into every layer of a model, or into those whose numbers are given."""
        for i in (layers or range(len(model.layers))) if self.fold else ():
            layer = model.layers[i]
            layer.attention = self.fold(layer.attention, model.config, settings, artifact, i)

    def build(self, model: Llama, settings: object, context: Context, artifact: Artifact) -> list[Cache]:
        """The caches of all layers; it changes the model's weights where the method folds something."""
        if model.output.weight.dtype != torch.int8:  # else it was done before the weights became int8
            self.fold_all(model, settings, artifact)
        return self.caches(model, settings, context, artifact)

    @property
    def fitted(self) -> bool:
        return bool(self.tensors or self.artifact)


SALS_PAPER = {"rank": 0.25, "score_rank": 0.5, "bits": 4, "form": "paper", "score": "sum"}
SALS_PAPER |= {"sinks": 16, "critical": 432}
METHODS = {
    "dense": Method(DenseSettings, each_layer(lambda context, _: DenseCache(context))),
    "sals": Method(SalsSettings, sals_caches, sals_tensors, fold=fold_sals, paper=SALS_PAPER),
    "elitekv": Method(EliteSettings, each_layer(EliteCache), elite_tensors, random_elitekv, fold_elitekv),
    "loki": Method(LokiSettings, each_layer(LokiCache), loki_tensors),
    "lrqk": Method(LrqkSettings, each_layer(lrqk_cache), paper={"mode": "paper"}),
    "fdc": Method(FdcSettings, each_layer(FdcCache), fdc_tensors, random_fdc, fold_values),
    "streaming": Method(StreamingSettings, each_layer(StreamingCache)),
    "topk": Method(TopKSettings, each_layer(TopKCache)),
    "h2o": Method(H2oSettings, each_layer(H2oCache)),
    "keyformer": Method(KeyformerSettings, each_layer(KeyformerCache)),
    "quest": Method(QuestSettings, each_layer(QuestCache)),
    "sals_cann": Method(SalsCannSettings, each_layer(SalsCannCache), artifact="loki"),
    "doublesparse": Method(DoubleSparseSettings, each_layer(DoubleSparseCache), of_heads("importance")),
    "hshare": Method(HshareSettings, each_layer(HshareCache), artifact="doublesparse"),
    "infinigen": Method(InfinigenSettings, each_layer(InfinigenCache)),
    "kivi": Method(KiviSettings, each_layer(lambda context, s: DenseCache(context, *kivi_kv(context, s)))),
    "turboquant": Method(TurboQuantSettings, each_layer(turboquant_cache)),
    "shadowkv": Method(ShadowKvSettings, each_layer(ShadowKvCache)),
    "palu": Method(PaluSettings, each_layer(PaluCache), of_heads("k.basis", "v.basis"), fold=fold_values),
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}; the methods are: {', '.join(METHODS)}")
    return METHODS[name]


def settings_from(method: str, options: dict) -> object:
    """The method's settings: `options` over the defaults of their `variant`. UserError for unknown ones."""
    row, options = method_named(method), dict(options)
    known = {f.name: f for f in dataclasses.fields(row.settings)}
    if row.paper and (variant := options.pop("variant", "ours")) != "ours":
        if variant != "paper":
            raise UserError(f"--variant {variant}: choose from {', '.join(VARIANTS)}")
        options = row.paper | options
    for name, value in options.items():
        if name not in known:
            fault = f"--{name} is not a setting of {method}"
            raise UserError(f"{fault}; its settings are: {', '.join(known) or 'none'}")
        choices, interval = (known[name].metadata[key] for key in ("choices", "within"))
        if choices and value not in choices:
            raise UserError(f"--{name} {value}: choose from {', '.join(map(str, choices))}")
        if not isinstance(value, str) and not inside(value, interval):
            raise UserError(f"--{name} {value}: give a number in {interval}")
    return row.settings(**options)
