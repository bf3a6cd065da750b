"""Every cache: its settings, its mathematics, what it stores. A method is one block of this file.

A block reads from top to bottom: the settings; the paper's algorithm as one pure function of plain tensors
(`sals_step`, ...); where ours differs, the step that runs by default (`sals_step_ours`, `lrqk_step_ours`);
what these need, with (ours) at what we changed; and the cache in the order of a decode step: write, score,
select, attend. A `*_step` gets q, k, v of the new token and `stored`, of the S - 1 tokens before it; it gives
the output, the tokens attended if not all are, and what is stored now.

A cache belongs to one layer and holds all rows of a batch. It gets q, k, v BEFORE RoPE:
    extend(row, span, q, k, v, *projected)  a row's tokens at positions `span`, a slice: its prompt or
                                            more of them, q [n, Hq, D], k and v [n, Hkv, D] -> [n, Hq, D]
    decode(pos, q, k, v, *projected)        one token each at positions pos [B], q [B, Hq, D] -> [B, Hq, D]
    formula(), bytes_read()                 the byte ledger: what the method says it stores and reads
`projected` are products that a method has added to W_qkv, such as SALS's latents. FDC finds its values there
(its v is empty) and returns what its folded W_O takes; EliteKV gets one latent in the place of v.
Decode has fixed shapes and reads pos on the device, so a CUDA graph of it is right for every length.
What is stored is a buffer, so the measured size is the sum of the buffers: nothing here only masks.
"""

import dataclasses
import functools
import glob
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

import kernels
from kernels import (
    LEVELS_APART,
    as_fp16,
    dequantize_mixed,
    gather_rows,
    matmul_codes,
    mean_logits,
    pack,
    quantize_mixed,
    quantize_spread,
    token_logits,
    unpack,
)
from model import Attention, Llama, ModelConfig, UserError, apply_rope, causal_attention, rope_tables

VARIANTS = ("ours", "paper")  # of a method whose defaults are not all the paper's

# What an artifact holds: name -> float or int, then the shape; None where any size will do.
Stored = dict[str, tuple]
Artifact = dict[str, Tensor]


def setting(default, text: str, choices: tuple | None = None, within: str = "[0, 1e9]"):
    """A field of a settings dataclass, which is a command-line option, too.

    choices: the values allowed, or None. within: the interval of the numbers allowed (`inside`)."""
    return field(default=default, metadata={"help": text, "choices": choices, "within": within})


def kernels_run(config: ModelConfig, device: torch.device, wanted: bool | None) -> bool:
    """Whether operations run as Triton kernels, or as PyTorch. wanted None: where they can, on CUDA, with
    triton, for head dims from 16 up (a tensor core's tile). UserError if wanted elsewhere."""
    fits = kernels.triton is not None and config.head_dim >= 16
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU, for tests
    if wanted and not (fits and runs):
        raise UserError("the kernels need CUDA, triton and a head dim of at least 16; use --no-kernels")
    return bool(wanted or wanted is None and fits and device.type == "cuda")


# ------------------------------------------------------------------------------------- what all caches share


class Context:
    """What all caches of a run share: the model's shape, the batch, RoPE, and whether operations run as
    kernels."""

    def __init__(self, model: Llama, batch_size: int, capacity: int, kernel: bool | None = None):
        self.config, self.batch_size, self.capacity = model.config, batch_size, capacity
        weight = model.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.cos, self.sin = rope_tables(model.config, capacity, self.device)  # [capacity, D/2] each
        self.rows = torch.arange(batch_size, device=self.device)
        self.positions = torch.arange(capacity, device=self.device)
        self.scale = model.config.head_dim**-0.5  # of logits
        self.kernel = kernels_run(model.config, self.device, kernel)
        if self.kernel:
            self.rope_pairs = kernels.rope_pairs(self.cos, self.sin, self.dtype)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Storage [B, *shape]. Zeroed, since a masked weight of 0 times a stray NaN would still be NaN."""
        return torch.zeros(self.batch_size, *shape, dtype=dtype or self.dtype, device=self.device)

    def rope(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """Rotates x [..., H, D] at positions [...], a tensor or a slice."""
        return apply_rope(x, self.cos[positions], self.sin[positions])


def in_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Heads x [..., H, D] in the bases [..., Hkv, D, r] of their KV heads -> [..., H, r]."""
    grouped = x.unflatten(-2, (basis.shape[-3], -1))
    return torch.einsum("...hgd,...hdr->...hgr", grouped, basis).flatten(-3, -2)


def appended(stored: Iterable[Tensor], *new: Tensor) -> tuple[Tensor, ...]:
    """What is stored of S tokens, [S, ...] each: of S - 1 tokens `stored`, of the new one `new`."""
    return tuple(torch.cat((old, x[None])) for old, x in zip(stored, new, strict=True))


def linear_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> nn.Linear:
    """A frozen layer of weight [out, in] and bias [out] or None, in dtype (None: as they are)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(dtype).contiguous(), False)
    layer.bias = bias if bias is None else nn.Parameter(bias.to(dtype).contiguous(), False)
    return layer


# ------------------------------------------------------------------------------------------------- budgets


def kept_tokens(keep: float, length: int) -> int:
    """Tokens out of `length` that a budget `keep` allows: a fraction, but at least 1, or above 1 a count."""
    return max(1, min(length, int(keep * length) if keep <= 1 else int(keep)))


def left_to_select(keep: float, total: int, capacity: int, x: int, z: int) -> int:
    """y: what a budget `keep`, of `total` tokens, leaves beside x sinks and z recent ones."""
    if total < x + z:
        raise UserError(f"--keep {keep:g} of {capacity} tokens is fewer than {x} sinks and {z} recent ones")
    return total - x - z


def fit_budget(capacity: int, n_sinks: int, n_selected: int, n_recent: int) -> tuple[int, int, int]:
    """Cuts a budget to the capacity: recent tokens come first, then selected ones, then sinks."""
    n_recent = min(n_recent, capacity)
    n_selected = min(n_selected, capacity - n_recent)
    n_sinks = min(n_sinks, capacity - n_recent - n_selected)
    return n_sinks, n_selected, n_recent


def rank_of(fraction: float, width: int) -> int:
    """A fraction of so many dims, to the nearest but at least 1."""
    return max(1, round(fraction * width))


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
    """quantize_spread's scales [...] as (minimum, scale) of one group [..., 1, 2], as `dequantize` has it."""
    scale = scale.float()
    return torch.stack(((1 - 2**bits) * scale, 2 * scale), -1)[..., None, :]


# ---- products with codes as they are: a CPU would take longer to decode them first


def mix_codes(weights: Tensor, codes: Tensor, low_scale: Tensor, bits: int) -> Tensor:
    """weights [B, H, G, S] fp32 times values in codes per token [B, H, S, D * bits / 8] -> [B, H, G, D]: a
    product for each run of channels that one group and one plane of the codes hold."""
    low, scale = low_scale.to(weights.dtype).unbind(-1)  # [B, H, S, groups]
    width = codes.shape[-1]  # bytes of a token, and channels of a plane
    n_groups = low_scale.shape[-2]
    group = width * 8 // bits // n_groups  # channels
    run = math.gcd(group, width)
    parts = []
    for channel in range(0, group * n_groups, run):
        plane, byte = divmod(channel, width)
        i = channel // group
        part = (codes[..., byte : byte + run] >> (plane * bits)) & (2**bits - 1)
        mixed = matmul_codes(weights * scale[:, :, None, :, i], part)
        parts.append(mixed + weights @ low[..., i, None])
    return torch.cat(parts, -1)


def channel_logits(q: Tensor, codes: Tensor, low_scale: Tensor, bits: int) -> Tensor:
    """q [B, H, G, D] times keys in codes per channel [B, H, S, D * bits / 8], in groups of 32 tokens ->
    [B, H, G, S] fp32: q . (low + scale code) = q . low + (q scale) . code, a plane at a time."""
    low, scale = low_scale.float().unbind(-1)  # [B, H, n, D]
    weights = q[:, :, None] * scale[:, :, :, None].to(q.dtype)  # [B, H, n, G, D]
    groups = codes.unflatten(2, (-1, 32))  # [B, H, n, 32, D * bits / 8]
    planes = [(groups >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    coded = 0.0
    for plane, weight in zip(planes, weights.chunk(8 // bits, -1), strict=True):
        coded = coded + (plane.to(q.dtype) @ weight.mT).float()  # [B, H, n, 32, G]
    of_group = (q.float() @ low.mT).mT  # [B, H, n, G]
    return (coded + of_group[:, :, :, None]).flatten(2, 3).mT


# -------------------------------------------------------------------------------------------------- stores
#
# A store holds numbers of tokens, [B, H heads, S tokens, width], in one form, and owns their buffers:
#     write(where, x)    where = (row, tokens): an int and a slice for x [n, H, width] of one row, or two
#                        tensors [B] for one token each, x [B, H, width]
#     read(pos, index)   the numbers of tokens index [B, 1 or H, n], or of all -> [B, H, n, width]
#     past(row, n)       what is kept of a row's first n tokens, as `read` gives it -> [<= n, H, width]
#     logits(q, pos)     q [B, H, G, d] times the d leading numbers of all tokens -> [B, H, G, S]
#     mix(weights, pos)  weights [B, H, G, S] fp32 times all of them -> [B, H, G, width]
#     kernel_form()      what kernels.attend takes; `kind` and `bits` say which form that is
#     used(row, n)       views of what the first n tokens of a row use of each buffer
#     token_bytes        of one token, all heads. formula(): of all
# pos [B] is the newest token's position: keys that are rebuilt ask for it.


class TokenStore(nn.Module):
    """The numbers as they are; the base of other stores. by_token: a token's heads lie side by side. host:
    they lie in host memory (host_memory), and do not count."""

    kind, bits = "plain", 16

    def __init__(
        self, context: Context, heads: int, tokens: int, width: int, by_token: bool = False,
        host: bool = False
    ):  # fmt: skip
        super().__init__()
        self.context, self.heads, self.tokens, self.width, self.host = context, heads, tokens, width, host
        self.token_bytes, sizes = 0, (tokens, heads) if by_token else (heads, tokens)
        zeros = host_memory if host else Context.zeros
        for name, (shape, dtype) in self.layout().items():
            part = zeros(context, *sizes, *shape, dtype=dtype)
            self.register_buffer(name, part.transpose(1, 2) if by_token else part)
            self.token_bytes += 0 if host else heads * math.prod(shape) * dtype.itemsize

    def layout(self) -> dict[str, tuple]:
        """The buffers [B, H, S, ...]: name -> shape and dtype of what one head of one token has there."""
        return {"vectors": ((self.width,), self.context.dtype)}

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the buffers hold of x [..., width]."""
        return (x,)

    def decode(self, vectors: Tensor) -> Tensor:
        """The inverse."""
        return vectors

    def parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.layout()]

    def as_index(self, tokens: Tensor | slice) -> Tensor | slice:
        """The tokens as an index that reads and writes by a kernel: a slice copies, which host memory is not
        for."""
        return self.context.positions[tokens] if self.host and isinstance(tokens, slice) else tokens

    def write(self, where: tuple, x: Tensor) -> None:
        row, tokens = where[0], self.as_index(where[1])
        for part, new in zip(self.parts(), self.encode(x), strict=True):
            part[row, :, tokens] = new.transpose(0, 1) if isinstance(row, int) else new

    def read(self, pos: Tensor, index: Tensor | None = None) -> Tensor:
        parts = self.parts()
        if index is not None:
            parts = (gather_rows(part, index.expand(-1, self.heads, -1)) for part in parts)
        return self.decode(*parts)

    def past(self, row: int, n: int) -> Tensor:
        tokens = self.as_index(slice(n))
        return self.decode(*(part[row, :, tokens] for part in self.parts())).transpose(0, 1)

    def scored(self, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """All tokens as kernels.scores takes them: vectors, and of codes their scales."""
        return self.vectors, None

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        return token_logits(q, *self.scored(pos))

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return matmul_codes(weights, self.vectors)

    kernel_form = parts

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        """What a row of n tokens uses of each buffer; slots of fewer tokens fill from the left, too."""
        return {name: getattr(self, name)[row, :, : min(n, self.tokens)] for name in self.layout()}

    def formula(self) -> int:
        return self.context.batch_size * self.tokens * self.token_bytes


class Window(TokenStore):
    """The x first and z last tokens alone, as they are: slots of the sinks, then a ring, filled in order."""

    def __init__(self, context: Context, heads: int, width: int, x: int, z: int, by_token: bool = False):
        super().__init__(context, heads, x + z, width, by_token)
        self.x, self.z = x, z

    def slot(self, position: Tensor) -> Tensor:
        return torch.where(position < self.x, position, self.x + (position - self.x) % self.z)

    def positions(self, pos: Tensor) -> Tensor:
        """The position in each slot once pos [B] is written: [B, x + z], negative where empty."""
        sinks = torch.arange(self.x, device=pos.device).expand(len(pos), -1)
        held = torch.cat((sinks, self.x + ring_positions(pos - self.x, self.z)), 1)
        return held.where(torch.arange(self.tokens, device=pos.device) <= pos[:, None], -1)

    def kept(self, span: slice) -> Tensor:
        """The positions of `span` that the window holds once all of it is written."""
        positions = self.context.positions[span]
        sinks = max(0, self.x - span.start)
        return torch.cat((positions[:sinks], positions[max(sinks, len(positions) - self.z) :]))

    def write(self, where: tuple, x: Tensor) -> None:
        row, tokens = where
        if isinstance(row, int):
            span, tokens = tokens, self.kept(tokens)
            x = x[tokens - span.start]
        super().write((row, self.slot(tokens)), x)

    def overlay(self, row: int, x: Tensor) -> Tensor:
        """x [n, H, width], a row's tokens so far, with the exact ones that the window holds."""
        kept = self.kept(slice(0, len(x)))
        return x.index_copy(0, kept, self.vectors[row, :, self.slot(kept)].transpose(0, 1))


def ring_positions(pos: Tensor, z: int) -> Tensor:
    """The position in each slot of a ring of z once pos [B] is written: [B, z], negative where empty."""
    return pos[:, None] - (pos[:, None] - torch.arange(z, device=pos.device)) % z


class CodedStore(TokenStore):
    """Codes of 2 or 4 bits with a minimum and a scale for 32 channels, or a narrow vector (`quantize`)."""

    group = 32  # channels that share them

    def __init__(
        self, context: Context, heads: int, tokens: int, width: int, bits: int, by_token: bool = False
    ):
        self.bits, self.group = bits, min(self.group, width)
        if width % self.group or width * bits % 8:
            fault = "need a head dim that groups of 32 divide, or that fills whole bytes"
            raise UserError(f"{bits}-bit values {fault}, not {width}")
        super().__init__(context, heads, tokens, width, by_token)

    def layout(self) -> dict[str, tuple]:
        codes = (self.width * self.bits // 8,), torch.uint8
        return {"vectors": codes, "scale": ((self.width // self.group, 2), torch.float16)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, self.bits, self.group)

    def low_scale(self, scale: Tensor) -> Tensor:
        """(minimum, scale) of each group [..., groups, 2], of what is stored."""
        return scale

    def decode(self, vectors: Tensor, scale: Tensor) -> Tensor:
        return dequantize(vectors, self.low_scale(scale), self.bits, self.group, self.context.dtype)

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return mix_codes(weights, self.vectors, self.low_scale(self.scale), self.bits)


class ScaledStore(CodedStore):
    """Codes of 2 or 4 bits with one scale for a vector, which is evenly spread (`quantize_spread`)."""

    kind = "spread"
    group = math.inf  # all of a vector

    def layout(self) -> dict[str, tuple]:
        return super().layout() | {"scale": ((), torch.float16)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_spread(x, self.bits)

    def low_scale(self, scale: Tensor) -> Tensor:
        return spread_levels(scale, self.bits)


def host_memory(context: Context, *shape: int, dtype: torch.dtype) -> Tensor:
    """Zeroed host memory [B, *shape]. On CUDA it is pinned and seen as a CUDA tensor, through its address:
    kernels read and write it themselves, inside a CUDA graph, as if it lay on the GPU."""
    if context.device.type != "cuda":
        return context.zeros(*shape, dtype=dtype)
    pinned = torch.zeros(context.batch_size, *shape, dtype=dtype, pin_memory=True)
    data = (pinned.data_ptr(), False)
    interface = {"shape": (pinned.nbytes,), "typestr": "|u1", "data": data, "version": 3}
    view = SimpleNamespace(__cuda_array_interface__=interface, memory=pinned)  # the result keeps it alive
    return torch.as_tensor(view, device=context.device).view(dtype).view(pinned.shape)


# ------------------------------------------------------------------------------ the base of all caches, dense


class Cache(nn.Module):
    """The base of all caches: exact attention of tokens that are read at once, the ledger, `report_selected`.

    keys, values: what is stored of every token; window: exact K and V of some, which count instead.
    write_chunk(row, span, q, k, v, before, *projected): stores tokens; q and k after RoPE, before: k."""

    watch: Callable[..., None] | None = None  # what evaluation listens with (extras.evaluate.Watched)

    def __init__(self, context: Context):
        super().__init__()
        self.context, self.config, self.rope = context, context.config, context.rope
        self.scale, self.kernel = context.scale, context.kernel
        self.window: Sequence[Window] = ()
        self.table_bytes, self.fills = 0, {}

    def table(self, name: str, *shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> None:
        """A buffer [B, *shape] beside the stores, such as positions of slots. The formula counts it."""
        self.register_buffer(name, self.context.zeros(*shape, dtype=dtype).fill_(fill))
        self.fills[name] = fill
        self.table_bytes += self.context.batch_size * math.prod(shape) * dtype.itemsize

    def extend(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        """A row's tokens at positions `span` attend one another and what is kept of the past, exactly."""
        q, rotated = self.rope(q, span), self.rope(k, span)
        keys, values = rotated, v
        if span.start:
            past = self.past(row, span.start)
            keys, values = (torch.cat(pair) for pair in zip(past, (rotated, v), strict=True))
        self.write_chunk(row, span, q, rotated, v, k, *projected)
        return causal_attention(q, keys, values)

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        """K after RoPE and V [<= n, Hkv, D] that a method keeps of a row's first n tokens."""
        stored = self.keys.past(row, n), self.values.past(row, n)
        if not self.window:
            return stored
        return tuple(window.overlay(row, x) for window, x in zip(self.window, stored, strict=True))

    def report_selected(self, pos: Tensor, index: Tensor, live: Tensor, recent: int = 0) -> None:
        """Decode tells evaluation here which tokens it attends if not all: index [B, n] for all heads,
        [B, Hkv, n] or [B, Hkv, G, n]; live, alike, which of them count; and the last `recent` up to pos."""
        if self.watch:
            self.watch(pos, index, live, recent)

    def measured(self) -> int:
        """Bytes of the live storage on the device: the whole batch at full capacity."""
        return sum(b.untyped_storage().nbytes() for b in self.buffers()) - self.host_bytes()

    def stores(self) -> list[nn.Module]:
        """Its stores, each with buffers of its own."""
        return [part for part in self.modules() if part is not self and hasattr(part, "formula")]

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        """Views of all that a row of n tokens uses: of stores their part, of tables the row. By name. What
        another cache of these settings has there makes its row this one's."""
        parts = {name: getattr(self, name)[row] for name in self.fills}
        for name, store in self.named_modules():
            if store is not self and hasattr(store, "used"):
                parts |= {f"{name}.{part}": x for part, x in store.used(row, n).items()}
        return parts

    def clear(self, row: int) -> None:
        """Makes a row's tables as new: what stores hold beyond a row's length is never read."""
        for name, fill in self.fills.items():
            getattr(self, name)[row] = fill

    def token_bytes(self) -> int:
        """Bytes of one token in the stores that hold all of them."""
        return sum(store.token_bytes for store in self.stores() if not isinstance(store, Window))

    def formula(self) -> int:
        """Bytes that stores and tables say they hold, for the whole batch; tests hold measured() to it."""
        return round(sum(store.formula() for store in self.stores())) + self.table_bytes

    def bytes_read(self, length: int) -> int:
        """Bytes that one decode step must read from this layer's cache for one row of `length` tokens."""
        return length * self.token_bytes()

    def host_bytes(self) -> int:
        """Bytes of host memory that a mixed cache uses besides; measured() and formula() are the device's."""
        return sum(store.vectors.nbytes for store in self.stores() if getattr(store, "host", False))

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

    def write_chunk(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> None:
        self.write((row, span), k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        self.write((self.context.rows, pos), self.rope(k, pos), v)
        q = self.to_stored_basis(self.rope(q, pos))
        index = self.select(pos, q) if self.count < self.context.capacity else None
        if index is not None:
            self.report_selected(pos, index, index >= 0)
            index = index.flatten(1, -2)
        how = {"window": self.window, "scale": self.scale, "kernel": self.kernel}
        return kernels.attend(q, self.keys, self.values, pos, index, **how)

    def tokens_read(self, length: int) -> tuple[float, float]:
        """Tokens of K and of V that one decode step must read, a KV head."""
        return min(length, self.count), min(length, self.count)

    def bytes_read(self, length: int) -> int:
        keys, values = self.tokens_read(length)
        return round(keys * self.keys.token_bytes + values * self.values.token_bytes)


def dense_bytes(context: Context) -> int:
    """Bytes of a dense cache of one layer: B x capacity x 2 Hkv D."""
    return context.batch_size * context.capacity * 2 * context.config.kv_dim * context.dtype.itemsize


def cache_bytes(caches: Iterable[Cache]) -> dict[str, int]:
    """Bytes of all layers by name: on the device measured and by formula, of dense, and on the host."""
    return {
        "cache_bytes_measured": sum(cache.measured() for cache in caches),
        "cache_bytes_formula": sum(cache.formula() for cache in caches),
        "cache_bytes_dense": sum(dense_bytes(cache.context) for cache in caches),
        "cache_bytes_host": sum(cache.host_bytes() for cache in caches),
    }


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


# ------------------------------------------------------------------------------------------------------- KIVI


@dataclass
class KiviSettings:
    """KIVI (arXiv 2402.02750): keys quantised per channel, values per token; all tokens attended."""

    bits: int = setting(4, "bits of a code; the paper: 2, and 4 under grouped queries", (2, 4))
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


class ChannelKeys(nn.Module):
    """Keys quantised per channel in groups of 32 tokens. Those of an unfinished block of R are exact, and in
    `ring` alone; there the last keys of the block before are as its codes have them."""

    kind = "channels"

    def __init__(self, context: Context, bits: int, ring: Window):
        super().__init__()
        heads, width = context.config.n_kv_heads, context.config.head_dim
        self.context, self.bits, self.ring, self.R = context, bits, ring, ring.z
        self.tokens = -(-context.capacity // self.R) * self.R
        self.token_bytes = heads * width * (bits + 1) / 8  # codes, and a part of their (minimum, scale)
        self.register_buffer("codes", context.zeros(heads, self.tokens, width * bits // 8, dtype=torch.uint8))
        self.register_buffer("low_scale", context.zeros(heads, self.tokens // 32, width, 2, dtype=torch.half))

    def decode(self, codes: Tensor, low_scale: Tensor) -> Tensor:
        """Codes [..., S, width * bits / 8] to keys [..., S, width]."""
        return dequantize(codes, low_scale, self.bits, 32, self.context.dtype, -2)

    def write(self, where: tuple, x: Tensor) -> None:
        (self.write_chunk if isinstance(where[0], int) else self.write_token)(*where, x)

    def write_chunk(self, row: int, span: slice, x: Tensor) -> None:
        first = span.start // self.R * self.R  # of the unfinished block, which the ring has from slot 0 on
        x = torch.cat((self.ring.vectors[row, :, : span.start - first].transpose(0, 1), x))
        self.ring.write((row, slice(first, span.stop)), x)
        full = len(x) // self.R * self.R
        codes, low_scale = quantize(x[:full].transpose(0, 1), self.bits, 32, -2)
        self.codes[row, :, first : first + full] = codes
        self.low_scale[row, :, first // 32 : (first + full) // 32] = low_scale
        if full:  # the last full block fills the ring from slot 0 on; the keys after it lie there now
            block = self.decode(codes[:, -self.R :], low_scale[:, -self.R // 32 :])  # [Hkv, R, width]
            self.ring.vectors[row, :, len(x) - full :] = block[:, len(x) - full :]

    def write_token(self, row: Tensor, pos: Tensor, x: Tensor) -> None:
        self.ring.write((row, pos), x)
        # The block is written at every step and read when it is full: a condition would have to ask the host.
        ring = self.ring.vectors.transpose(1, 2)  # as it lies in memory: else a compiled step copies it
        codes, low_scale = quantize(ring.transpose(1, 2), self.bits, 32, -2)  # [B, Hkv, R or R / 32, .]
        full = (pos % self.R == self.R - 1)[:, None, None, None]
        ring.copy_(torch.where(full, self.decode(codes, low_scale).transpose(1, 2), ring))
        row, first = row[:, None], (pos // self.R * self.R)[:, None]
        tokens = first + torch.arange(self.R, device=pos.device)
        groups = first // 32 + torch.arange(self.R // 32, device=pos.device)
        self.codes[row, :, tokens] = codes.transpose(1, 2)
        self.low_scale[row, :, groups] = low_scale.transpose(1, 2)

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        groups = -(-n // 32)
        codes, low_scale = self.codes[row, :, : groups * 32], self.low_scale[row, :, :groups]
        return {"codes": codes, "low_scale": low_scale}

    def formula(self) -> float:
        return self.context.batch_size * self.tokens * self.token_bytes

    def past(self, row: int, n: int) -> Tensor:
        return self.decode(**self.used(row, n))[:, :n].transpose(0, 1)

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        logits = channel_logits(q, self.codes, self.low_scale, self.bits)
        return logits[..., : self.context.capacity]

    def kernel_form(self) -> list[Tensor]:
        return [self.codes, self.low_scale]


class KiviCache(DenseCache):
    """Keys in codes per channel, values in codes per token, and a window of the last R as they count."""

    def __init__(self, context: Context, settings: KiviSettings):
        c, R = context.config, settings.residual
        if R < 32 or R % 32:
            raise UserError(f"--residual {R}: give a multiple of 32, at least 32")
        exact = c.n_kv_heads, c.head_dim, 0, min(R, -(-context.capacity // 32) * 32)
        window = [Window(context, *exact, by_token=True) for _ in range(2)]
        values = CodedStore(context, c.n_kv_heads, context.capacity, c.head_dim, settings.bits)
        super().__init__(context, ChannelKeys(context, settings.bits, window[0]), values)
        self.window = nn.ModuleList(window)

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        super().write(where, k, v)  # the keys' window, too
        self.window[1].write(where, v)

    def bytes_read(self, length: int) -> int:
        recent, exact_bytes = min(length, self.keys.R), sum(store.token_bytes for store in self.window)
        return round((length - recent) * self.token_bytes() + recent * exact_bytes)


# ------------------------------------------------------------------------------------------------------- SALS


@dataclass
class SalsSettings:
    """SALS, Sparse Attention in Latent Space (arXiv 2510.24273)."""

    variant: str = setting(
        "ours", "the published step and settings, or what is better on real models", VARIANTS
    )
    rank: float = setting(0.0, "r / (Hkv*D), of latents; 0: 1/2, narrow 5/8", within="[0, 1]")
    score_rank: float = setting(0.0, "r*/r, dims that scoring reads; 0: 1/4, but >= 32 dims", within="[0, 1]")
    bits: int = setting(2, "bits of a value code", (2, 4))
    sinks: int = setting(4, "x: first tokens that are always attended")
    critical: int = setting(444, "y: tokens selected by score, at each step and layer")
    recent: int = setting(64, "z: last tokens that are always attended, kept exact", within="[1, 1e9]")
    keep: float = setting(0.0, "sets y: x + y + z, as part of the capacity", within="[0, 1]")
    score: str = setting("softmax", "softmax; or sum of logits, without RoPE (paper)", ("softmax", "sum"))
    skip: str = setting("0,1,-1", "layers that attend every token (the paper's 0, 1 and the last)")

    def __post_init__(self):
        if self.variant == "paper" and self.score != "sum":
            raise UserError("--variant paper has --score sum alone; leave --score out")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """(x, y, z): sinks, selected and recent tokens that a sparse layer attends."""
        n_selected = self.critical
        if self.keep:
            total = round(self.keep * capacity)
            n_selected = left_to_select(self.keep, total, capacity, self.sinks, self.recent)
        return fit_budget(capacity, self.sinks, n_selected, self.recent)

    def ranks(self, c: ModelConfig) -> tuple[int, int]:
        """(r, r*). r is --rank, or half of the keys' width but at most 1024, the paper's 25 % of the widest
        keys, and five eighths of narrow ones; r* is a quarter of r, at most an eighth of the width, at least
        32 (ours). Our codes leave an even r - r* > 0: a byte holds two dims."""
        if self.rank:
            fraction = self.rank
        elif narrow(c):
            fraction = 0.625
        else:
            fraction = min(0.5, 1024 / c.kv_dim)
        r = rank_of(fraction, c.kv_dim)
        if self.score_rank:
            r_score = rank_of(self.score_rank, r)
        else:
            r_score = max(32, min(r // 4, c.kv_dim // 8))
        if self.variant == "paper":
            return r, min(r, r_score)
        r = max(r, 4)
        r_score = min(r_score, r - 2)
        return r, r_score + (r - r_score) % 2


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
    positions = torch.arange(S)
    near = (positions < x) | (positions >= S - z)
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
    return out, torch.cat((chosen, positions[near])), stored


def sals_step_ours(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, maps: tuple, r_score: int, bits: int, budget: tuple, rope,
    blocks: tuple, runs: tuple
) -> tuple:  # fmt: skip
    """The same step as it runs by default, for one sequence: what we changed is in steps 2, 3, 4 and 6.

    q [Hq, D], k, v [Hkv, D]: before RoPE -> [Hq, D]; W_V, W_O have rotate_values' rotation. stored: of
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
    leading, scale, trailing, codes, v_scale, k_exact, v_exact = stored
    latents = dequantize_mixed(leading, scale, trailing)
    # 4. Scores on the r* leading dims: q is turned back by the rotation of a token's block, so that scores
    # know the distance; each head's logits become weights, and a token's score is their sum.
    positions = torch.arange(S)
    in_block, in_run = (apply_rope(q, c[positions // n], -s[positions // n]) for n, c, s in (blocks, runs))
    k_score, grouped = latents[:, :r_score] @ up[:, :r_score].T, (heads, -1)  # [S, Hkv*D]
    logits = (in_block.unflatten(1, grouped) * k_score.view(S, heads, 1, D)).sum(-1)  # [S, Hkv, G]
    logits = logits + (in_run.unflatten(1, grouped) * mean.view(heads, 1, D)).sum(-1)
    scores = logits.mul(D**-0.5).softmax(0).sum((1, 2))
    # 5. The y best of the tokens between the x first and the z last (sec. 4.4).
    near = (positions < x) | (positions >= S - z)
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
    return out, torch.cat((chosen, positions[near])), stored


# ---- from the fit to the maps and weights that a step takes

SCORE_BLOCK = 512  # tokens for which scoring turns a query back once (ours); a multiple of a kernel's tile


@functools.lru_cache
def random_rotation(*sizes: int) -> Tensor:
    """A fixed random rotation of consecutive parts of so many dims (ours): it spreads their energy evenly."""
    seeded = torch.Generator().manual_seed(0)
    parts = (torch.randn(n, n, generator=seeded) for n in sizes)
    return torch.block_diag(*(torch.linalg.qr(part).Q for part in parts))


def rotate_values(attention: Attention, c: ModelConfig) -> None:
    """Rotates V of every head by random_rotation's R: W_V becomes R^T W_V, W_O becomes W_O R (ours)."""
    linear, wo = attention.wqkv, attention.wo
    R = random_rotation(c.head_dim).to(wo.weight.device)
    for name, parameter in list(linear.named_parameters()):
        q, k, v = parameter.float().split(attention.widths)
        v = torch.einsum("de,hd...->he...", R, v.unflatten(0, (c.n_kv_heads, -1))).flatten(0, 1)
        setattr(linear, name, nn.Parameter(torch.cat((q, k, v)).to(parameter.dtype), False))
    turned = (wo.weight.float().unflatten(1, (-1, c.head_dim)) @ R).flatten(1)
    wo.weight = nn.Parameter(turned.to(wo.weight.dtype), False)


def trailing_gain(values: Tensor, lead: int, r: int) -> Tensor:
    """What multiplies a latent's dims from `lead` on, of these mean squares, so that quantize_mixed's 4-bit
    codes fit them (ours). The largest of n normal numbers is on the mean below sqrt(2 ln 2n) deviations."""
    leading, trailing = values[:lead].mean().sqrt(), values[lead:r].mean().sqrt()
    unit = leading * (math.sqrt(2 * math.log(2 * lead)) / 127)
    return (8 / LEVELS_APART[4] * unit / trailing.clamp(min=1e-12)).clamp(1e-2, 1e2)


def quantize_basis(basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis [Hkv, D, r] in int8 codes (ours), and scales [Hkv, D, 1], one for both dims of a RoPE pair."""
    codes, scale = kernels.quantize_int8(basis.unflatten(1, (2, -1)), (1, 3))  # [Hkv, 2, D/2, r]
    return codes.flatten(1, 2), scale.expand(-1, 2, -1, -1).flatten(1, 2)


class SalsMaps(NamedTuple):
    """What leads to a layer's latents, and back (ours)."""

    down: Tensor  # [Hkv*D, r]: keys, less the mean key, to latents
    up: Tensor  # [Hkv*D, r]: latents to keys, and queries to what scores latents
    mean: Tensor  # [Hkv*D]: the mean key


def leading_basis(c: ModelConfig, settings: SalsSettings, artifact: Artifact, name: str, device) -> Tensor:
    """The r leading directions U_r [Hkv*D, r] of a fitted basis. UserError if it has fewer."""
    r, _ = settings.ranks(c)
    basis = artifact[name].float().to(device)  # [Hkv*D, fitted rank], its best first
    if basis.shape[1] < r:
        fault = f"rank {r} is more than the {basis.shape[1]} directions in the artifact"
        raise UserError(f"{fault}; run calibrate.py fit with --max_rank {r / c.kv_dim:g}")
    return basis[:, :r]


def paper_basis(c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int, device) -> Tensor:
    """Layer i's U_r [Hkv*D, r] of the paper: leading eigenvectors of K^T K, keys before RoPE (Eq. 1)."""
    return leading_basis(c, settings, artifact, f"{i}.key_basis", device)


def sals_layer_maps(c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int, device) -> SalsMaps:
    """Layer i's maps: S U_r and S^-1 U_r of keys S (k - mean), rotated and scaled for codes, `up` as its int8
    codes hold it."""
    r, r_score = settings.ranks(c)
    U_r = leading_basis(c, settings, artifact, f"{i}.query_basis", device)
    S = artifact["scale"][i].to(device)[:, None]
    mix = random_rotation(r_score, r - r_score).to(device)
    gains = torch.ones(r, device=device)
    gains[r_score:] = trailing_gain(artifact["query_eigenvalues"][i], r_score, r)
    up = (U_r / S) @ mix / gains
    codes, pair_scale = quantize_basis(up.unflatten(0, (c.n_kv_heads, -1)))
    return SalsMaps(
        down=(U_r * S) @ mix * gains,
        up=(codes * pair_scale).flatten(0, 1),
        mean=artifact["mean"][i].to(device),
    )


class Rotations(NamedTuple):
    """Rotations by which scores turn a query back, one for each `tokens` tokens: cos, sin [n, D/2]."""

    tokens: int
    cos: Tensor
    sin: Tensor


def mean_rotations(context: Context) -> Rotations:
    """Of each block of SCORE_BLOCK positions the mean cos and sin over its tokens (ours)."""
    cos = [block.mean(0) for block in context.cos.split(SCORE_BLOCK)]
    sin = [block.mean(0) for block in context.sin.split(SCORE_BLOCK)]
    return Rotations(SCORE_BLOCK, torch.stack(cos), torch.stack(sin))


def summed_query(q: Tensor, basis: Tensor, n_kv_heads: int) -> Tensor:
    """The one query [..., 1, r*] whose logits are the sums of all heads' (paper, sec. 4.3), of q [..., Hq, D]
    before RoPE, in the basis U_r* [Hkv*D, r*]. The heads of a group share their keys."""
    return q.unflatten(-2, (n_kv_heads, -1)).sum(-2).flatten(-2)[..., None, :] @ basis


def kivi_layers(c: ModelConfig, settings: SalsSettings) -> set[int]:
    """The layers that attend all in KIVI's 4-bit codes (ours): to rebuild their keys would take longer."""
    if settings.variant == "paper" or narrow(c):
        return set()
    return skipped_layers(settings, c.n_layers)


def fold_sals(
    attention: Attention, c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int
) -> Attention:
    """Layer i's attention, with values rotated for our codes. Where q and k have no norms, wqkv gets rows
    that make the latents of keys, and for --score sum of the queries."""
    device = attention.wqkv.weight.device
    if settings.variant == "paper":
        if not c.qk_norm:
            U_r = paper_basis(c, settings, artifact, i, device)
            add_latent_rows(attention, c, settings, i, down=U_r, up=U_r, mean=None)
        return attention
    if i in kivi_layers(c, settings):
        return attention
    rotate_values(attention, c)
    if not c.qk_norm:
        maps = sals_layer_maps(c, settings, artifact, i, device)
        add_latent_rows(attention, c, settings, i, down=maps.down, up=maps.up, mean=maps.mean)
    return attention


def add_latent_rows(
    attention: Attention,
    c: ModelConfig,
    settings: SalsSettings,
    i: int,
    down: Tensor,
    up: Tensor,
    mean: Tensor | None,
) -> None:
    """Adds to wqkv the rows down^T W_k, and for --score sum up^T of the queries summed over groups, on the r*
    leading dims: down, up [Hkv*D, r]. Biases fold alike, and take off the mean key [Hkv*D]."""
    linear = attention.wqkv
    sums_queries = settings.score == "sum" and i not in skipped_layers(settings, c.n_layers)
    _, r_score = settings.ranks(c)
    if linear.bias is None and mean is not None:
        linear.bias = nn.Parameter(linear.weight.new_zeros(sum(attention.widths)), False)
    for name, parameter in list(linear.named_parameters()):
        q, k, _ = parameter.float().split(attention.widths)
        if name == "bias" and mean is not None:
            k = k - mean
        rows = [down.T @ k]
        if sums_queries:
            summed = q.unflatten(0, (c.n_kv_heads, c.group, -1)).sum(1).flatten(0, 1)
            rows.append(up[:, :r_score].T @ summed)
        stacked = torch.cat([parameter, *[part.to(parameter.dtype) for part in rows]])
        setattr(linear, name, nn.Parameter(stacked, False))
    attention.widths = [*attention.widths, *map(len, rows)]
    linear.out_features = sum(attention.widths)


class MixedStore(TokenStore):
    """Int8 codes of the r* leading numbers of a vector, 4-bit codes of the trailing ones, and one scale."""

    kind = "mixed"

    def __init__(self, context: Context, heads: int, tokens: int, width: int, lead: int):
        self.lead = lead
        super().__init__(context, heads, tokens, width)

    def layout(self) -> dict[str, tuple]:
        packed = ((self.width - self.lead) // 2,), torch.uint8
        return {"vectors": ((self.lead,), torch.int8), "scale": ((), torch.float32), "trailing": packed}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return quantize_mixed(x, self.lead)

    def decode(self, vectors: Tensor, scale: Tensor, trailing: Tensor) -> Tensor:
        return dequantize_mixed(vectors, scale, trailing).to(self.context.dtype)

    def scored(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.vectors, self.scale


class RebuiltKeys(nn.Module):
    """Keys RoPE(latent basis^T + bias), rebuilt where they are read: a store over latents [B, 1, S, r] in
    codes, which all heads share. basis [Hkv, D, r], as quantize_basis holds it; bias [Hkv, D]."""

    kind = "latents"

    def __init__(self, latents: TokenStore, basis: Tensor, bias: Tensor):
        super().__init__()
        self.latents = latents
        self.context = latents.context
        self.basis = basis.to(self.context.dtype)
        self.bias = bias
        if self.context.kernel:
            self.kernel_basis = self.for_kernel(basis)

    def for_kernel(self, basis: Tensor) -> list[Tensor | None]:
        """The basis, its scale, and the bias in units of this, as the kernel takes them: the two dims of a
        RoPE pair side by side."""
        codes, scale = quantize_basis(basis)
        bias = self.bias.float()[..., None] / scale
        return [kernels.interleave_rope(x.flatten(0, 1), len(basis)) for x in (codes, scale, bias)]

    def rebuilt(self, latents: Tensor, positions: Tensor | slice) -> Tensor:
        """Keys of latents [..., 1 or Hkv, n, r] at `positions`, a slice or [..., 1 or Hkv, n]."""
        keys = torch.einsum("...hnr,hdr->...hnd", latents, self.basis)
        keys = keys + self.bias[:, None]  # which may be in fp32
        return self.context.rope(keys[..., None, :], positions)[..., 0, :].to(self.context.dtype)

    def read(self, pos: Tensor, index: Tensor | None = None) -> Tensor:
        latents = self.latents.read(pos, index)
        return self.rebuilt(latents, slice(0, latents.shape[2]) if index is None else index)

    def past(self, row: int, n: int) -> Tensor:
        return self.rebuilt(self.latents.past(row, n).transpose(0, 1), slice(0, n)).transpose(0, 1)

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        return q @ self.read(pos).mT

    def kernel_form(self) -> list[Tensor | None]:
        heads = len(self.basis)
        latents = [part.expand(-1, heads, *part.shape[2:]) for part in self.latents.parts()]
        return [*latents, *self.kernel_basis, self.context.rope_pairs]


def exact_windows(context: Context, n_sinks: int, n_recent: int) -> nn.ModuleList:
    """Windows of exact keys and values."""
    c = context.config
    return nn.ModuleList(
        Window(context, c.n_kv_heads, c.head_dim, n_sinks, n_recent, by_token=True) for _ in range(2)
    )


class SalsCache(Cache):
    """Our step for a batch: latents of keys before RoPE and values, both in codes, of every token; a window
    of exact ones. A sparse layer attends x + y + z tokens. Others attend all, of narrow keys, and have no
    sinks in their window."""

    def __init__(
        self,
        context: Context,
        settings: SalsSettings,
        is_sparse: bool,
        maps: SalsMaps,
        blocks: Rotations,
        runs: Rotations,
    ):
        """blocks: the rotations by which scores turn a query back; runs: those for the mean key, which are
        blocks, or each token's own if keys have a bias."""
        super().__init__(context)
        c = context.config
        r, r_score = settings.ranks(c)
        self.budget = settings.budget(context.capacity)
        n_sinks, _, n_recent = self.budget
        self.is_sparse = is_sparse
        self.r_score = r_score
        self.blocks = blocks
        self.runs = runs
        # weights, not cache
        self.up = maps.up[:, :r_score].to(context.dtype).contiguous()
        self.mean = maps.mean
        self.down = maps.down.to(context.dtype) if c.qk_norm else None  # else wqkv has it, less the mean
        self.mean_latent = (maps.mean @ maps.down).to(context.dtype)
        # cache
        self.latents = MixedStore(context, 1, context.capacity, r, r_score)
        self.values = ScaledStore(
            context, c.n_kv_heads, context.capacity, c.head_dim, settings.bits, by_token=True
        )
        basis = maps.up.unflatten(0, (c.n_kv_heads, -1))
        self.keys = RebuiltKeys(self.latents, basis, maps.mean.view(c.n_kv_heads, -1))
        self.window = exact_windows(context, n_sinks if is_sparse else 0, n_recent)

    def latent(self, k: Tensor, *projected: Tensor) -> Tensor:
        """k [n, Hkv, D] before RoPE, or what wqkv made of it -> latents [n, r]."""
        if projected:
            return projected[0]
        return k.flatten(1) @ self.down - self.mean_latent

    def write(self, where: tuple, latent: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores tokens, of latents [n, r] and k, v [n, Hkv, D] after RoPE."""
        kernels.append(where, self.latents, latent, self.values, v, kernel=self.kernel)
        self.window[0].write(where, k)
        self.window[1].write(where, v)

    def write_chunk(
        self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, before: Tensor, *projected: Tensor
    ) -> None:
        self.write((row, span), self.latent(before, *projected), k, v)

    def score(self, pos: Tensor, q: Tensor, rotated: Tensor, *projected: Tensor) -> Tensor:
        """Scores of all tokens [B, S]: the sum over heads of their attention weights. q [B, Hq, D]: before
        RoPE; rotated: after; projected: the query that wqkv made, if scores use one."""
        queries, query_scale, offset = kernels.block_queries(
            rotated, self.blocks.cos, self.blocks.sin, self.up, self.mean, coded=True, kernel=self.kernel
        )
        if self.runs.tokens < self.blocks.tokens:
            offset = mean_logits(rotated, self.runs.cos, self.runs.sin, self.mean)
        scores = kernels.scores(
            queries,
            self.latents.vectors,
            self.latents.scale,
            pos,
            self.scale,
            "softmax",
            block=self.blocks.tokens,
            offset=offset,
            run=self.runs.tokens,
            query_scale=query_scale,
            kernel=self.kernel,
        )
        return scores.flatten(1)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        n_sinks, _, n_recent = self.budget
        rotated = self.rope(q, pos)
        self.write((self.context.rows, pos), self.latent(k, *projected), self.rope(k, pos), v)
        index = None
        if self.is_sparse:
            scores = self.score(pos, q, rotated, *projected[1:])
            index = kernels.select(scores, pos, self.budget, kernel=self.kernel)  # [B, x + y], -1 for none
            self.report_selected(pos, index.clamp(min=0), index >= 0, recent=n_recent)
            index = index[:, n_sinks:]  # to rebuild: the sinks, which come first, are exact
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
        if not self.is_sparse:
            return bytes_read_of_all(self, length)
        scored = self.r_score * self.latents.vectors.itemsize + self.latents.scale.itemsize
        return bytes_read_of_sparse(self, length, scored)


class SumScoreSalsCache(SalsCache):
    """Our stores, with the paper's scores (`--score sum`)."""

    def score(self, pos: Tensor, q: Tensor, rotated: Tensor, *projected: Tensor) -> Tensor:
        """The sums of all heads' logits, without RoPE. The mean key counts alike for all tokens."""
        if projected:
            query = projected[0][:, None]  # [B, 1, r*]
        else:
            query = summed_query(q, self.up, self.config.n_kv_heads)
        latents, latent_scale = self.latents.vectors, self.latents.scale
        scores = kernels.scores(query, latents, latent_scale, pos, self.scale, "each", kernel=self.kernel)
        return scores.flatten(1)


class PaperSalsCache(Cache):
    """The published step for a batch: latents of keys before RoPE in 16 bits, and values in codes of groups.
    A window has the x first and z last tokens exactly, which the paper compresses by half."""

    def __init__(self, context: Context, settings: SalsSettings, is_sparse: bool, U_r: Tensor):
        """U_r [Hkv*D, r]: of paper_basis. A layer that is not sparse attends every token."""
        super().__init__(context)
        c = context.config
        r, r_score = settings.ranks(c)
        self.budget = settings.budget(context.capacity)
        n_sinks, _, n_recent = self.budget
        self.is_sparse = is_sparse
        self.r_score = r_score
        # weights, not cache
        self.U = U_r.to(context.dtype)
        self.U_score = self.U[:, :r_score].contiguous()
        # cache
        self.latents = TokenStore(context, 1, context.capacity, r)
        self.values = CodedStore(
            context, c.n_kv_heads, context.capacity, c.head_dim, settings.bits, by_token=True
        )
        self.window = exact_windows(context, n_sinks if is_sparse else 0, n_recent)

    def latent(self, k: Tensor, *projected: Tensor) -> Tensor:
        """k [n, Hkv, D] before RoPE, or what wqkv made of it -> latents [n, r]."""
        if projected:
            return projected[0]
        return k.flatten(1) @ self.U

    def write(self, where: tuple, latent: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores tokens, of latents [n, r] and k, v [n, Hkv, D] after RoPE."""
        self.latents.write(where, latent[:, None])
        self.values.write(where, v)
        self.window[0].write(where, k)
        self.window[1].write(where, v)

    def write_chunk(
        self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, before: Tensor, *projected: Tensor
    ) -> None:
        self.write((row, span), self.latent(before, *projected), k, v)

    def rebuilt(self, latents: Tensor, positions: Tensor | slice) -> Tensor:
        """Keys after RoPE [..., n, Hkv, D] of latents [..., n, r] at `positions`, a slice or [..., n]."""
        keys = (latents @ self.U.mT).unflatten(-1, (self.config.n_kv_heads, -1))
        return self.rope(keys, positions)

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        keys = self.rebuilt(self.latents.past(row, n)[:, 0], slice(0, n))
        values = self.values.past(row, n)
        return self.window[0].overlay(row, keys), self.window[1].overlay(row, values)

    def score(self, pos: Tensor, q: Tensor, *projected: Tensor) -> Tensor:
        """Scores of all tokens [B, S]: the sums of all heads' logits, without RoPE (sec. 4.3). q [B, Hq, D]:
        before RoPE; projected: the query that wqkv made of it."""
        if projected:
            query = projected[0][:, None]  # [B, 1, r*]
        else:
            query = summed_query(q, self.U_score, self.config.n_kv_heads)
        scores = kernels.scores(
            query, self.latents.vectors, None, pos, self.scale, "each", kernel=self.kernel
        )
        return scores.flatten(1)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        n_sinks, _, n_recent = self.budget
        rotated = self.rope(q, pos)
        self.write((self.context.rows, pos), self.latent(k, *projected), self.rope(k, pos), v)
        if self.is_sparse:
            scores = self.score(pos, q, *projected[1:])
            index = kernels.select(scores, pos, self.budget, kernel=self.kernel)  # [B, x + y], -1 for none
            self.report_selected(pos, index.clamp(min=0), index >= 0, recent=n_recent)
            index = index[:, n_sinks:]  # to rebuild: the sinks, which come first, are exact
            live = index >= 0
            index = index.clamp(min=0)
            latents = self.latents.read(pos, index[:, None])[:, 0]  # [B, y, r]
            keys = self.rebuilt(latents, index)  # [B, y, Hkv, D]
            values = self.values.read(pos, index[:, None])  # [B, Hkv, y, D]
        else:
            live = self.context.positions <= pos[:, None] - n_recent  # [B, S]
            keys = self.rebuilt(self.latents.read(pos)[:, 0], slice(0, self.context.capacity))
            values = self.values.read(pos)
        return kernels.attend_rows(
            rotated,
            keys.transpose(1, 2),
            values,
            live[:, None].expand(-1, self.config.n_kv_heads, -1),
            pos,
            window=self.window,
            scale=self.scale,
            kernel=self.kernel,
        )

    def bytes_read(self, length: int) -> int:
        if not self.is_sparse:
            return bytes_read_of_all(self, length)
        return bytes_read_of_sparse(self, length, self.r_score * self.latents.vectors.itemsize)


def bytes_read_of_all(cache: SalsCache | PaperSalsCache, length: int) -> int:
    """Bytes that a step of a layer that attends all must read: exact tokens, and what the others have."""
    recent = min(cache.budget[2], length)
    exact_bytes = sum(store.token_bytes for store in cache.window)
    return (length - recent) * cache.token_bytes() + recent * exact_bytes


def bytes_read_of_sparse(cache: SalsCache | PaperSalsCache, length: int, scored: int) -> int:
    """Paper, sec. 4.5, with the values' true size: `scored` bytes of every token, then every attended token
    once. Not what a step computes, such as the blocks' queries."""
    n_sinks, n_selected, n_recent = cache.budget
    recent = min(n_recent, length)
    chosen = min(n_sinks + n_selected, length - recent)
    sinks = min(n_sinks, chosen)
    exact_bytes = sum(store.token_bytes for store in cache.window)
    return length * scored + (chosen - sinks) * cache.token_bytes() + (sinks + recent) * exact_bytes


def sals_caches(model: Llama, settings: SalsSettings, context: Context, artifact: Artifact) -> list[Cache]:
    """The caches of all layers: the layers of --skip attend every token."""
    c = model.config
    skipped = skipped_layers(settings, c.n_layers)
    if settings.variant == "paper":
        caches = []
        for i in range(c.n_layers):
            U_r = paper_basis(c, settings, artifact, i, context.device)
            caches.append(PaperSalsCache(context, settings, i not in skipped, U_r))
        return caches

    kivi = kivi_layers(c, settings)
    kind = SumScoreSalsCache if settings.score == "sum" else SalsCache
    blocks = mean_rotations(context)
    runs = blocks
    if c.qkv_bias:  # a biased channel turns within a block
        runs = Rotations(1, context.cos, context.sin)
    caches = []
    for i in range(c.n_layers):
        if i in kivi:
            caches.append(KiviCache(context, KiviSettings(4, 32)))
        else:
            maps = sals_layer_maps(c, settings, artifact, i, context.device)
            caches.append(kind(context, settings, i not in skipped, maps, blocks, runs))
    return caches


def sals_tensors(c: ModelConfig) -> Stored:
    bases = (f"{i}.{metric}_basis" for i in range(c.n_layers) for metric in ("query", "key"))
    rows = ("scale", "mean", "query_eigenvalues", "key_eigenvalues")
    return dict.fromkeys(rows, (float, c.n_layers, c.kv_dim)) | dict.fromkeys(bases, (float, c.kv_dim, None))


# ---------------------------------------------------------------------------------------------------- EliteKV


@dataclass
class EliteSettings:
    """EliteKV: a few rotated pairs a head, all else of K and V in one latent (arXiv 2503.01586)."""

    r: int = setting(0, "r: elite pairs of each head, which stay rotated (0: as calibrated or uptrained)")
    d_ckv: int = setting(0, "d_ckv: dims of the latent of all else (0: as calibrated)")
    pairs: str = setting("elite", "which pairs are rotated", ("elite", "uniform", "contribution"))
    lrd: str = setting("joint", "J-LRD, one latent of K and V, or S-LRD, one of each", ("joint", "separate"))


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


class EliteAttention(nn.Module):
    """Attention of which `attend` gets q [..., Hq, D], elite keys k_e [..., He, 2r] and the latent c_kv
    [..., d_ckv], before RoPE, dims in the order of `elite_dims`. order [He, D/2]: He is Hkv, or 1 where heads
    share an elite key. wqkv: rows of W_q, W_k^e, A^T. up: B^T, of each head D - 2r key and D value rows."""

    def __init__(self, c: ModelConfig, order: Tensor, r: int, wqkv: nn.Linear, up: nn.Linear, wo: nn.Linear):
        super().__init__()
        self.config, self.order, self.r = c, order, r
        self.pairs = order[:, :r].sort(-1).values  # [He, r]
        self.widths = [c.n_heads * c.head_dim, len(order) * 2 * r, up.in_features]
        self.wqkv, self.up, self.wo = wqkv, up, wo

    forward = Attention.forward

    def attend_heads(self, qkv: Tensor, attend) -> Tensor:
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
    """Layer i as EliteAttention. Uptrained weights are of rank d_ckv: they give their factors again."""
    (r, d_ckv), d, heads = elite_sizes(c, settings, artifact), c.head_dim, c.n_kv_heads
    wqkv, root = attention.wqkv, artifact.get(f"{i}.root")  # only of uptraining
    uniform = uniform_order(d // 2, r).expand(heads, -1)  # [Hkv, D/2]
    order = uniform if settings.pairs == "uniform" else artifact[settings.pairs][i]
    order = order.to(wqkv.weight.device)
    dims = elite_dims(order, r).expand(heads, -1)  # [Hkv, D]
    rows = wqkv.weight if wqkv.bias is None else torch.cat((wqkv.weight, wqkv.bias[:, None]), 1)
    q, k, v = rows.split(attention.widths)
    q, k, v = in_order(q, dims), in_order(k, dims)[:, 0], v.unflatten(0, (heads, -1))
    elite, rest = k.split((2 * r, d - 2 * r), 1)
    elite = elite[: len(order)]  # uptrained with one elite key for all heads: all have the same
    a, b = low_rank(*(x[..., : c.dim].permute(2, 0, 1) for x in (rest, v)), d_ckv, settings.lrd, root)
    stacked, up = torch.cat((q.flatten(0, 2), elite.flatten(0, 1).to(q))), b.flatten(1).T.to(q)
    bias = up_bias = None
    if wqkv.bias is not None:  # A x has none: what it would add comes with the biases of `up`
        bias = torch.cat((stacked[:, -1], q.new_zeros(a.shape[1])))
        up_bias = torch.cat((rest, v), 1)[..., -1].flatten()
    stacked = linear_of(torch.cat((stacked[:, : c.dim], a.T.to(q))), bias)
    return EliteAttention(c, order, r, stacked, linear_of(up, up_bias), attention.wo)


class EliteCache(Cache):
    """One vector a token: a latent of all heads' values and un-rotated keys, then the rotated elite keys.
    Decode absorbs B_k into the query, zero at other heads' elite keys, and B_v into the output."""

    def __init__(self, context: Context, settings: EliteSettings, attention: EliteAttention, *_):
        super().__init__(context)
        self.attention, self.r, self.d_ckv = attention, attention.r, attention.widths[2]
        self.latents = TokenStore(context, 1, context.capacity, sum(attention.widths[1:]))

    def extend(self, row: int, span: slice, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        q, k = (self.attention.rotate(x, self.context.cos[span], self.context.sin[span]) for x in (q, k))
        self.latents.write((row, span), torch.cat((latent, k.flatten(1)), -1)[:, None])
        latent, k = self.latents.past(row, span.stop)[:, 0].tensor_split((self.d_ckv,), -1)
        return self.attention.naive(q, k.unflatten(-1, (-1, 2 * self.r)), latent)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        c, up, r2 = self.config, self.attention.up, 2 * self.r
        q, k = (self.attention.rotate(x, self.context.cos[pos], self.context.sin[pos]) for x in (q, k))
        self.latents.write((self.context.rows, pos), torch.cat((latent, k.flatten(1)), -1)[:, None])
        b_k, b_v = up.weight.unflatten(0, (c.n_kv_heads, -1)).split((c.head_dim - r2, c.head_dim), 1)
        elite, rest = q.unflatten(1, (c.n_kv_heads, -1)).split((r2, b_k.shape[1]), -1)  # [B, Hkv, G, .]
        # A bias of the un-rotated keys would add the same to every token's logit: softmax drops it.
        rest = torch.einsum("bhgd,hdc->bhgc", rest, b_k)
        own = torch.eye(len(self.attention.pairs), dtype=q.dtype, device=q.device)[:, None, :, None]
        elite = (elite[..., None, :] * own).flatten(-2)  # [B, Hkv, G, He * 2r]
        query = torch.cat((rest, elite), -1).flatten(1, 2)
        mixed = kernels.attend_latent(
            query, self.latents.vectors[:, 0], pos, self.d_ckv, scale=self.scale, kernel=self.kernel
        )
        out = torch.einsum("bhgc,hdc->bhgd", mixed.unflatten(1, (c.n_kv_heads, -1)), b_v)
        if up.bias is not None:  # weights sum to one
            out = out + up.bias.unflatten(0, (c.n_kv_heads, 1, -1))[..., -c.head_dim :]
        return out.flatten(1, 2)


def elite_tensors(c: ModelConfig) -> Stored:
    order, sizes = (int, c.n_layers, c.n_kv_heads, c.head_dim // 2), {"r": (int,), "d_ckv": (int,)}
    if not c.elitekv:
        return sizes | {"elite": order, "contribution": order}
    # An uptrained checkpoint's pairs are fixed: one order a head, or one where the heads share an elite key.
    return sizes | {"elite": (int, c.n_layers, None, c.head_dim // 2)}


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

    k: float = setting(0.25, "k_f: tokens of a query head, or a fraction", within="(0, inf)")
    d: float = setting(0.25, "d_f: leading fraction of D that scoring reads", within="(0, 1]")
    explained: float = setting(0.0, "instead of d: a layer's mean Rank@v (App. B.2)", within="[0, 1)")
    basis: str = setting("post", "the PCA is of keys after RoPE, or before it", ("post", "pre"))
    share: str = setting("query", "who has k tokens: a head, or a KV head (ours)", ("query", "group"))
    reduced: bool = setting(False, "PCAAttn (App. E): cache and attend d components of every token")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """(x, y, z): sinks, selected and recent tokens of a query head, in a cache that is full."""
        n_selected = capacity if self.reduced else kept_tokens(self.k, capacity)
        return 0, n_selected, 0


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


def rank_at(values: Tensor, fraction: float) -> Tensor:
    """Rank@v (Loki Eq. 2): the least n whose leading eigenvalues [..., n] hold this fraction of their sum."""
    below = values.cumsum(-1) / values.sum(-1, keepdim=True) < fraction
    return below[..., :-1].sum(-1) + 1  # all n hold 1, whatever rounding says


class LokiCache(DenseCache):
    """Post-RoPE keys in the basis of their principal components, P per KV head, and plain V."""

    def __init__(self, context: Context, settings: LokiSettings, _, artifact: Artifact, i: int):
        c = context.config
        # d components are scored: a fraction of D, or as many as hold a fraction of the keys' energy.
        d = rank_of(settings.d, c.head_dim)
        if settings.explained:
            ranks = rank_at(artifact[f"{settings.basis}.eigenvalues"][i], settings.explained)  # [Hkv]
            d = round(ranks.double().mean().item())
        # Components that are cached: the scale of their logits stays that of the full head dim.
        width = d if settings.reduced else c.head_dim
        keys = TokenStore(context, c.n_kv_heads, context.capacity, width)
        super().__init__(context, keys, budget=settings.budget(context.capacity))
        basis = artifact[f"{settings.basis}.basis"][i, ..., :width]  # P [Hkv, D, .], by falling eigenvalue
        self.basis = basis.to(context.device, context.dtype)
        self.settings = settings
        self.d = d
        self.score_rule = "largest" if settings.share == "group" else "each"

    def to_stored_basis(self, x: Tensor) -> Tensor:
        return in_basis(x, self.basis)

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        keys, values = super().past(row, n)
        return in_basis(keys, self.basis.mT), values

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """Lines 5-7: the k best tokens of each query [B, Hkv, G, k], or of a group (group_scores)."""
        leading = q[..., : self.d]
        vectors, vector_scale = self.keys.scored(pos)
        scores = kernels.scores(
            leading, vectors, vector_scale, pos, self.scale, self.score_rule, kernel=self.kernel
        )
        wanted = None
        if self.settings.k <= 1:  # a fraction of each row's own length
            wanted = (self.settings.k * (pos + 1).double()).long().clamp(min=1)
        return kernels.select(scores, pos, self.budget, wanted, kernel=self.kernel)

    def tokens_read(self, length: int) -> tuple[float, float]:
        """d of every key, then K and V of the selected tokens: at most G k distinct ones a KV head."""
        if self.settings.reduced:
            return length, length
        sets = 1 if self.settings.share == "group" else self.config.group
        chosen = min(length, sets * sum(self.settings.budget(length)))
        return chosen + length * self.d / self.config.head_dim, chosen


def of_heads(*names: str, **others: tuple) -> Callable[[ModelConfig], Stored]:
    """The `tensors` of a method: of each KV head bases [D, D] or other numbers [D], and others."""

    def tensors(c: ModelConfig) -> Stored:
        heads = (float, c.n_layers, c.n_kv_heads, c.head_dim)
        return {name: (*heads, c.head_dim) if "basis" in name else heads for name in names} | others

    return tensors


loki_tensors = of_heads("pre.basis", "post.basis", "pre.eigenvalues", "post.eigenvalues")


# ------------------------------------------------------------------------------------------------------- LRQK


@dataclass
class LrqkSettings:
    """LRQK: low-rank query and key attention over a mixed cache (arXiv 2510.23649). Few bytes on the GPU."""

    variant: str = setting("ours", "Algorithms 1 and 2 as published, or a closed form (ours)", VARIANTS)
    rank: int = setting(0, "r: dims of A_Q and A_K, for each KV head (0: 32, or D if less)")
    k: int = setting(2048, "tokens that each KV head selects by its proxy scores")
    recent: int = setting(64, "lite tokens: the last ones, always attended, on the GPU", within="[1, 1e9]")
    slots: float = setting(1.0, "hot slots on the GPU, in multiples of k (> 1: an LRU cache; 0: fetch all k)")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        if self.slots != 0 and not 1 <= self.slots < float("inf"):
            raise UserError(f"--slots {self.slots}: give 0 (no hit/miss) or a multiple of k from 1 up")
        return fit_budget(capacity, 0, self.k, self.recent)


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
    """The same step as it runs by default, for one KV head: q [G, D], k, v [D] after RoPE -> [G, D]. stored:
    A_K [S - 1, r], K and V [S - 1, D]. The prompt's projections W_Q, W_K [D, r] are its best (lrqk_optimum)
    and stay: a step does not refit them, and so needs nothing of Omega before it selects."""
    # 1-7. The new token's proxies are products. 8. Append.
    q_hat, (a_k, keys, values) = q @ w_q, appended(stored, k @ w_k, k, v)
    # 9. The best of the tokens that are not recent.
    old = max(0, len(a_k) - recent)
    logits = q_hat @ a_k[:old].mT * q.shape[-1] ** -0.5
    chosen = logits.log_softmax(-1).amax(0).topk(min(n, old)).indices
    # 10-13. What is chosen and is in no slot on the GPU is fetched, into a slot that no hit needs.
    near = torch.cat((chosen, torch.arange(old, len(a_k))))
    # 14. Attend.
    weights = (q @ keys[near].mT * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ values[near], near, (a_k, keys, values)


# ---- what these use


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
    """W_Q, W_K [Hkv, D, r] that make ||Q K^T - A_Q A_K^T|| least (ours). Q = O_Q L_Q^T with O_Q orthonormal,
    so the SVD of Q K^T is that of the small L_Q^T L_K. A_Q^T A_Q = A_K^T A_K, diagonal."""
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
    # 2. The n-th miss takes the n-th of the other slots.
    n = misses_so_far(hit)
    others = slots_for_misses(stamp, step, index.shape[-1]).gather(-1, n.long()).long()
    place = torch.where(hit, slot, others)  # distinct: k entries, C >= k slots
    # 3. The tables forget what is evicted, and learn what comes.
    miss, before = live & ~hit, pos_of.gather(-1, place)
    slot_of.scatter_(-1, torch.where(miss & (before >= 0), before, index), -1)  # its own is set next
    slot_of.scatter_(-1, index, torch.where(live, place, -1).int())
    pos_of.scatter_(-1, place, torch.where(live, index, before).int())
    stamp.scatter_(-1, place, torch.where(live, step, stamp.gather(-1, place)))
    return place, miss


def misses_so_far(hit: Tensor) -> Tensor:
    """How many entries of hit [..., k] are misses, up to each: [..., k] int32.

    One number more goes first into the sum: so Inductor does not fuse into it the gather that gave `hit`,
    which would then wait for it."""
    return F.pad(~hit, (1, 0)).cumsum(-1, dtype=torch.int32)[..., 1:]


def slots_for_misses(stamp: Tensor, step: Tensor, k: int) -> Tensor:
    """The slots [..., 1 + C], from place 1 on, in the order in which misses take them: the longest unused
    first; if all may be needed (C = k), in any order. Those that this step has stamped come last."""
    if stamp.shape[-1] > k:
        return F.pad(stamp.argsort(dim=-1, stable=True), (1, 0))
    free = stamp < step  # as many misses may need all of these: any order will do
    order = torch.where(free, free.cumsum(-1, dtype=torch.int32), 0).long()
    slots = torch.arange(stamp.shape[-1], dtype=torch.int32, device=stamp.device).expand_as(order)
    return F.pad(torch.zeros_like(slots), (1, 0)).scatter(-1, order, slots)


class LrqkCache(Cache):
    """A_K of every token; K beside V of all in host memory, and of the selected ones in C hot slots, to which
    they are fetched if they miss. The window has the recent tokens."""

    def __init__(self, context: Context, settings: LrqkSettings):
        super().__init__(context)
        c = context.config
        if settings.rank > c.head_dim:
            raise UserError(f"--rank {settings.rank}: r must be 1 to {c.head_dim}, the head dim (or 0)")
        heads = c.n_kv_heads
        capacity = context.capacity
        self.budget = settings.budget(capacity)
        _, self.chosen, self.z = self.budget
        self.rank = settings.rank or min(32, c.head_dim)
        self.reuse = settings.slots > 0  # else every step fetches all that it selects
        self.slots = self.chosen
        if self.reuse:
            self.slots = round(min(settings.slots * self.chosen, capacity - self.z))
        self.kv = TokenStore(context, heads, capacity, 2 * c.head_dim, host=True)
        self.table("a_k", heads, capacity, self.rank, dtype=context.dtype)
        # of each prompt: W_Q^T and W_K^T, and of the paper B_Q and B_K
        self.table("basis_q", heads, self.rank, c.head_dim, dtype=torch.float32)
        self.table("basis_k", heads, self.rank, c.head_dim, dtype=torch.float32)
        self.window = exact_windows(context, 0, self.z)
        self.table("hot_vectors", heads, self.slots, 2 * c.head_dim, dtype=context.dtype)
        self.table("slot_of", heads, capacity, fill=-1)
        self.table("pos_of", heads, self.slots, fill=-1)
        self.table("stamp", heads, self.slots, fill=-1)
        self.table("step", 1, 1)
        self.table("counts", 2, dtype=torch.int64)  # tokens selected, tokens missed

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        k, v = self.kv.past(row, n).chunk(2, -1)
        return self.window[0].overlay(row, k), self.window[1].overlay(row, v)

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        """Stores tokens, of k, v [n, Hkv, D] after RoPE; where: as stores have it."""
        self.kv.write(where, torch.cat((k, v), -1))
        self.window[0].write(where, k)
        self.window[1].write(where, v)

    def write_chunk(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> None:
        is_prompt = span.start == 0
        if is_prompt:
            w_q, w_k = self.factorise(row, q, k)
        else:
            w_q, w_k = self.prompt_bases(row)
        self.write((row, span), k, v)
        self.a_k[row, :, span] = (k.transpose(0, 1).float() @ w_k).to(self.a_k.dtype)
        # The hot slots start with what the last token selects.
        self.slot_of[row] = -1
        self.pos_of[row] = -1
        self.stamp[row] = -1
        last = torch.full((1,), span.stop - 1, device=q.device)
        q_hat = q[-1:].unflatten(1, (self.config.n_kv_heads, -1)).float() @ w_q
        self.load(slice(row, row + 1), last, q_hat)
        if is_prompt:
            self.counts[row] = 0

    def prompt_moments(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q^T Q and K^T K [Hkv, D, D] of a prompt's q [S, Hq, D], k [S, Hkv, D], and the sums of |Q| and |K|
        [Hkv, D]. On the CPU: LAPACK takes a millisecond for matrices this small, cuSOLVER tens."""
        gram_q, sum_q = lrqk_moments(q.unflatten(1, (self.config.n_kv_heads, -1)))
        gram_k, sum_k = lrqk_moments(k[:, :, None])
        return gram_q.cpu(), gram_k.cpu(), sum_q.cpu() + sum_k.cpu()

    def factorise(self, row: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """W_Q, W_K [Hkv, D, r] fp32 from a prompt's q [S, Hq, D], k [S, Hkv, D]; stores its bases."""
        gram_q, gram_k, _ = self.prompt_moments(q, k)
        w_q, w_k = lrqk_optimum(gram_q, gram_k, self.rank)
        self.basis_q[row] = w_q.mT
        self.basis_k[row] = w_k.mT
        return w_q.float().to(q.device), w_k.float().to(q.device)

    def prompt_bases(self, row: int) -> tuple[Tensor, Tensor]:
        """W_Q, W_K [Hkv, D, r] fp32 for tokens after the prompt."""
        return self.basis_q[row].mT, self.basis_k[row].mT

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        row = self.context.rows
        q = self.rope(q, pos).unflatten(1, (self.config.n_kv_heads, -1))  # [B, Hkv, G, D]
        k = self.rope(k, pos)
        q_hat, k_hat = self.project(pos, q.float(), k[:, :, None].float())
        self.a_k[row, :, pos] = k_hat[:, :, 0].to(self.a_k.dtype)
        self.write((row, pos), k, v)
        self.step += 1
        self.load(slice(None), pos, q_hat)
        attended = self.omega(pos)
        self.report_selected(pos, attended, attended >= 0)
        keys, values = self.hot_vectors.chunk(2, -1)
        return kernels.attend_rows(
            q.flatten(1, 2),
            keys,
            values,
            self.stamp == self.step,
            pos,
            window=self.window,
            scale=self.scale,
            kernel=self.kernel,
        )

    def omega(self, pos: Tensor) -> Tensor:
        """The positions of what a step at pos attends: selected tokens, then the window [B, Hkv, C + z],
        negative for none."""
        window = self.window[0].positions(pos)[:, None].expand(-1, self.config.n_kv_heads, -1)
        return torch.cat((self.pos_of.where(self.stamp == self.step, -1), window), -1)

    def project(self, pos: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q^ [B, Hkv, G, r] and k^ [B, Hkv, 1, r] of q [B, Hkv, G, D], k [B, Hkv, 1, D], fp32."""
        return q @ self.basis_q.mT, k @ self.basis_k.mT

    def load(self, row: slice, pos: Tensor, q_hat: Tensor) -> None:
        """Selects the k best tokens outside of the window, by the rows' q^, and brings them to hot slots."""
        scores = kernels.scores(
            q_hat.flatten(1, 2), self.a_k[row], None, pos - self.z, self.scale, "largest", kernel=self.kernel
        )
        index = kernels.select(scores, pos, self.budget, kernel=self.kernel)  # [B, Hkv, k]
        live = index >= 0
        index = index.where(live, pos[:, None, None]).long()  # the newest stands for none: it has no slot
        if not self.reuse:  # no hit/miss: forget what is there
            self.slot_of[row] = -1
        place, miss = take_slots(
            index, live, self.slot_of[row], self.pos_of[row], self.stamp[row], self.step[row]
        )
        kernels.fetch_rows(
            self.kv.vectors[row], index, place, miss, self.hot_vectors[row], kernel=self.kernel
        )
        self.counts[row] += torch.stack((live, miss), 1).sum((2, 3))

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        return super().used(row, n) | {"a_k": self.a_k[row, :, :n], "slot_of": self.slot_of[row, :, :n]}

    def miss_rate(self) -> float:
        """Tokens fetched over tokens selected since the prompt."""
        selected, missed = self.counts.sum(0).tolist()
        return missed / max(1, selected)

    def bytes_read(self, length: int) -> int:
        """Of the device: A_K of every token that left the ring, K and V of the selected and the recent ones,
        stamps of all slots, slot and position of the selected ones, the bases."""
        c = self.config
        itemsize = self.context.dtype.itemsize
        recent = min(self.z, length)
        chosen = min(self.chosen, length - recent)
        a_k = (length - recent) * self.rank * itemsize
        kv = (chosen + recent) * 2 * c.head_dim * itemsize
        tables = self.slots + 2 * chosen + 2 * self.rank * c.head_dim  # of 4 bytes
        return (a_k + kv + tables * 4) * c.n_kv_heads


class PaperLrqkCache(LrqkCache):
    """The published step for a batch: Algorithm 1 factorises prompts, and Algorithm 2 moves the bases in each
    step. They keep Algorithm 1's own gauge, on which Algorithm 2 depends."""

    def factorise(self, row: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        gram_q, gram_k, columns = self.prompt_moments(q, k)
        w_q, w_k, b_q, b_k = lrqk_prompt(gram_q, gram_k, columns, self.rank)
        self.basis_q[row] = b_q
        self.basis_k[row] = b_k
        return w_q.float().to(q.device), w_k.float().to(q.device)

    def prompt_bases(self, row: int) -> tuple[Tensor, Tensor]:
        """Least squares on B_Q and B_K, since they have moved since the prompt."""
        b_q = self.basis_q[row].double()
        b_k = self.basis_k[row].double()
        w_q = spd_solve(b_q @ b_q.mT, b_q).mT
        w_k = spd_solve(b_k @ b_k.mT, b_k).mT
        return w_q.float(), w_k.float()

    def project(self, pos: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # What the last step attended; the new token has not replaced the oldest of the ring yet.
        position = self.omega(pos - 1)
        where = position.clamp(min=0)[..., None].long().expand(-1, -1, -1, self.rank)
        a_near = self.a_k.gather(2, where).masked_fill(position[..., None] < 0, 0)
        hot_keys, _ = self.hot_vectors.chunk(2, -1)
        keys = torch.cat((hot_keys, self.window[0].read(pos)), 2)
        # fp64, since the gauge is not balanced: in fp32 the solves need a ridge that changes the selection.
        q_hat, k_hat, b_q, b_k = lrqk_refit(
            q.double(),
            k.double(),
            self.basis_q.double(),
            self.basis_k.double(),
            a_near.double(),
            keys.double(),
        )
        self.basis_q.copy_(b_q)
        self.basis_k.copy_(b_k)
        return q_hat.float(), k_hat.float()


def lrqk_cache(context: Context, settings: LrqkSettings) -> LrqkCache:
    if settings.variant == "paper":
        return PaperLrqkCache(context, settings)
    return LrqkCache(context, settings)


# ----------------------------------------------------------------------------------------------- exact top-k


def keep_setting(tokens: float):
    """The field of the methods that are given their tokens in all."""
    text = "tokens attended in all: above 1 a count, up to 1 a fraction of the cache's capacity"
    return setting(tokens, text, within="(0, inf)")


@dataclass
class KeepSettings:
    """What a method that selects is given: tokens in all, of which the newest is always one."""

    keep: float = keep_setting(512)

    def budget(self, capacity: int) -> tuple[int, int, int]:
        total = kept_tokens(self.keep, capacity)
        if total == capacity:
            return 0, total, 0
        return 0, total - 1, 1


@dataclass
class TopKSettings(KeepSettings):
    """Exact top-k: full logits choose the tokens. It saves no bytes: the oracle of all selections."""


class TopKCache(DenseCache):
    """K and V in full."""

    def __init__(self, context: Context, settings: TopKSettings):
        super().__init__(context, budget=settings.budget(context.capacity))

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        scores = kernels.scores(q, *self.keys.scored(pos), pos, self.scale, "largest", kernel=self.kernel)
        return kernels.select(scores, pos, self.budget, recent=True, kernel=self.kernel)

    def tokens_read(self, length: int) -> tuple[float, float]:
        return length, min(length, self.count)


# -------------------------------------------------------------------------------------------------------- FDC


@dataclass
class FdcSettings:
    """FDC, Fast KV Dimensionality Compression (arXiv 2408.04107): attention on compressed vectors."""

    rate: float = setting(-1.0, "r: singular values lost (-1: as fitted)", within="[-1, 1)")
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


def own_columns(ranks: list[int], G: int) -> Tensor:
    """Which of the numbers [Hkv, G, max rank] are a head's own, and not what it is padded with."""
    inside = torch.arange(max(ranks)) < torch.tensor(ranks)[:, None, None]
    return inside.expand(-1, G, -1).flatten().nonzero()[:, 0]


class RaggedStore(nn.Module):
    """Heads of unequal rank in one flat buffer: K' [B, S, d_qk] head by head, then V' [B, S, d_v]."""

    def __init__(self, context: Context, k_ranks: list[int], v_ranks: list[int]):
        super().__init__()
        self.context, self.n, self.ranks = context, len(k_ranks), [*k_ranks, *v_ranks]
        self.token_bytes = sum(self.ranks) * context.dtype.itemsize
        self.register_buffer("packed", context.zeros(context.capacity * sum(self.ranks)).flatten())
        # Number j of token t (of all rows, end to end) goes to starts[j] + t * strides[j] of the buffer.
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
        (row, tokens), x = where, torch.cat((k.flatten(1)[:, self.k_columns], v), -1)
        if isinstance(row, int):
            for view, part in zip(self.views(), x.split(self.ranks, -1), strict=True):
                view[row, tokens] = part
        else:  # one scatter for all heads: a compiled step writes in place, with no copy of the buffer
            token = (row * self.context.capacity + tokens)[:, None]
            self.packed[self.starts + token * self.strides] = x

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        return {str(i): view[row, :n] for i, view in enumerate(self.views())}

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

    def extend(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.vectors.write((row, span), self.compress(k, span), latent)
        q, n = self.compress(q, span).unflatten(1, (len(self.k_ranks), -1)), len(self.k_ranks)
        stored = [view[row, : span.stop] for view in self.vectors.views()]  # K' of n heads, then V' of them
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
        self.vectors.write((self.context.rows, pos), self.compress(k, pos), latent)
        return kernels.attend_ragged(self.compress(q, pos), self.vectors, pos, scale=self.scale)[:, None]


fdc_tensors = of_heads("qk.basis", "v.basis", "qk.values", "v.values", rate=(float,))


def random_fdc(c: ModelConfig) -> Artifact:
    """Singular values of which some heads' fall off faster: the ranks differ."""
    steepness = torch.linspace(1, 6, c.n_kv_heads)[:, None] * torch.linspace(0, 1, c.head_dim)
    values = (-steepness).exp().expand(c.n_layers, -1, -1)
    return {"qk.values": values, "v.values": values, "rate": torch.tensor(0.2, dtype=torch.float64)}


# -------------------------------------------------------------------------------------- calibration artifacts


def artifact_path(folder: Path, method: str) -> Path:
    return folder / f"{method}.safetensors"


def model_identity(model: Llama) -> dict[str, str]:
    """What an artifact must agree on with the model: its shape and the fingerprint of its weights."""
    c = model.config
    shape = f"{c.n_layers}x{c.n_heads}x{c.n_kv_heads}x{c.head_dim}"
    return {"shape": shape, "fingerprint": model.fingerprint}


def read_tensors(path: Path, identity: dict[str, str], remedy: str) -> tuple[dict[str, str], Artifact]:
    """The metadata and tensors of a file of save_artifact, on the CPU. Raises UserError, with the remedy,
    where the file is damaged, or its metadata are not those of `identity`."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); {remedy}") from None
    for key, value in identity.items():
        if (found := metadata.get(key)) != value:
            raise UserError(f"{path}: of another {key} ({found}, here {value}); {remedy}")
    return metadata, tensors


def load_artifact(source: Path | ModelConfig, method: str, model: Llama) -> Artifact:
    """What `calibrate.py fit` stored for this method beside the checkpoint, on the CPU. For a config (random
    weights): random_artifact. {} of a method that is not fitted. Raises UserError where there is none, or one
    of another model, or where the checkpoint cannot run by this method."""
    if isinstance(source, ModelConfig):
        return random_artifact(method, model.config)
    row = method_named(method)
    if model.config.elitekv and method != "elitekv":
        raise UserError("this checkpoint was uptrained for EliteKV: run it with --method elitekv")
    if not row.fit:
        return {}
    path = artifact_path(source, row.artifact)
    command = f"python calibrate.py fit --checkpoint {source} --method {row.artifact}"
    if not path.is_file():
        raise UserError(f"{path}: {method} must be calibrated first: {command}")
    return read_artifact(path, row, model, f"make it again: {command}")


def read_artifact(path: Path, row: "Method", model: Llama, remedy: str) -> Artifact:
    """The tensors of a method's artifact in a file. Raises UserError, with the remedy, where the file is
    damaged, is of another model, or lacks what the method needs of this model."""
    _, tensors = read_tensors(path, model_identity(model), remedy)
    for name, stored in row.tensors(model.config).items():
        if fault := artifact_fault(tensors.get(name), *stored):
            raise UserError(f"{path}: {name} {fault}; {remedy}")
    return tensors


@contextmanager
def replacing(folder: Path, name: str) -> Iterator[Path]:
    """A new folder to make files in, NAME.*.partial. They replace those of `folder` when the block ends,
    config.json last."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{glob.escape(name)}.*.partial"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(".partial", f"{name}.", folder) as partial:
            yield Path(partial)
            for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(folder / file.name)
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def save_artifact(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes one safetensors file in the place of an old one; OSError where it cannot be."""
    data = save({name: t.contiguous() for name, t in tensors.items()}, metadata)
    with replacing(path.parent, path.name) as partial:
        (partial / path.name).write_bytes(data)  # not save_file, whose files other users cannot read


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
    """An artifact of no meaning, for random weights: orthonormal bases, random numbers near 1, row.random. {}
    of a method that is not fitted."""
    row = method_named(method)
    made, seeded = row.random(c) if row.random else {}, torch.Generator().manual_seed(0)
    for name, (kind, *shape) in row.tensors(c).items() if row.fit else ():
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
    one a layer. paper: the settings of --variant paper. A method that is fitted says how:
        fit      the function, as "module:fit_NAME", found when asked for; NAME.safetensors is the artifact
        tensors  those of the artifact; random: of random_artifact those that are not numbers near 1
        fold     (attention, config, settings, artifact, i) -> layer i's attention with what the method folds
                 into weights, maybe on the meta device"""

    settings: type
    caches: Callable[..., list[Cache]]
    fit: str = ""
    tensors: Callable[[ModelConfig], Stored] | None = None
    random: Callable[[ModelConfig], Artifact] | None = None
    fold: Callable[..., Attention] | None = None
    paper: dict = field(default_factory=dict)

    @property
    def artifact(self) -> str:
        """The name of its artifact, which another method may have, too."""
        return self.fit.rpartition("fit_")[2]

    def fold_all(self, model: Llama, settings: object, artifact: Artifact, layers=None) -> None:
        """Folds what the method folds into every layer of a model, or into those whose numbers are given."""
        for i in (layers or range(len(model.layers))) if self.fold else ():
            layer = model.layers[i]
            layer.attention = self.fold(layer.attention, model.config, settings, artifact, i)

    def build(self, model: Llama, settings: object, context: Context, artifact: Artifact) -> list[Cache]:
        """The caches of all layers; it changes the model's weights where the method folds something."""
        if not model.is_folded:
            self.fold_all(model, settings, artifact)
        return self.caches(model, settings, context, artifact)


SALS_PAPER = {
    "rank": 0.25,
    "score_rank": 0.5,
    "bits": 4,
    "score": "sum",
    "sinks": 16,
    "critical": 432,
}
SALS = "calibrate:fit_sals", sals_tensors
ELITE = "calibrate:fit_elitekv", elite_tensors
METHODS = {
    "dense": Method(DenseSettings, each_layer(lambda context, _: DenseCache(context))),
    "sals": Method(SalsSettings, sals_caches, *SALS, fold=fold_sals, paper=SALS_PAPER),
    "elitekv": Method(EliteSettings, each_layer(EliteCache), *ELITE, random_elitekv, fold_elitekv),
    "loki": Method(LokiSettings, each_layer(LokiCache), "calibrate:fit_loki", loki_tensors),
    "lrqk": Method(LrqkSettings, each_layer(lrqk_cache)),
    "fdc": Method(
        FdcSettings, each_layer(FdcCache), "calibrate:fit_fdc", fdc_tensors, random_fdc, fold_values
    ),
    "topk": Method(TopKSettings, each_layer(TopKCache)),
    "kivi": Method(KiviSettings, each_layer(KiviCache)),
}


def extra_methods() -> dict[str, Method]:
    """The table of extras/baselines.py; empty where that file is not there."""
    try:
        import extras.baselines as baselines  # only now: it imports this file
    except ModuleNotFoundError as error:
        if error.name not in ("extras", "extras.baselines"):  # a broken one says what it lacks
            raise
        return {}
    return baselines.METHODS


def method_names() -> list[str]:
    return [*METHODS, *extra_methods()]


def method_named(name: str) -> Method:
    """The row of a method. UserError where there is none."""
    row = METHODS.get(name) or extra_methods().get(name)
    if row is None:
        raise UserError(f"unknown method {name!r}; the methods are: {', '.join(method_names())}")
    return row


def settings_from(method: str, options: dict) -> object:
    """The method's settings: `options` over the defaults of their `variant`. UserError where one is unknown,
    or has a value that its field does not allow."""
    row = method_named(method)
    fields = {f.name: f.metadata for f in dataclasses.fields(row.settings)}
    for name, value in options.items():
        if name not in fields:
            fault = f"--{name} is not a setting of {method}"
            raise UserError(f"{fault}; its settings are: {', '.join(fields) or 'none'}")
        choices = fields[name]["choices"]
        interval = fields[name]["within"]
        if choices and value not in choices:
            raise UserError(f"--{name} {value}: choose from {', '.join(map(str, choices))}")
        if not (choices or isinstance(value, str) or inside(value, interval)):
            raise UserError(f"--{name} {value}: give a number in {interval}")
    if options.get("variant") == "paper":
        options = row.paper | options
    return row.settings(**options)


def inside(value: float, interval: str) -> bool:
    """Does the value lie in an interval such as "(0, 1]"?"""
    low, high = map(float, interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)
