"""Every cache: its settings, its mathematics, what it stores. A method is one block of this file.

The file goes from the simplest method to the hardest: the protocol of a cache, dense, exact top-k,
Loki, KIVI, SALS, LRQK, EliteKV, FDC; then what calibration stores, and the table METHODS.

A block goes from its paper to its cache: the settings; the paper's algorithm as one pure function
of plain tensors (`sals_step`, ...), in which the little that is ours is marked; where our default
differs, the step that runs by default (`sals_step_ours`, `lrqk_step_ours`); what these need, with
(ours) at what we changed; and the cache in the order of a request's life. A `*_step` gets q, k, v
of the new token and `stored`, what is stored of the S - 1 tokens before it; it gives the output,
the tokens attended if not all are, and what is stored now.

What lies in memory is a *store*, which owns its buffers. So the measured size of a cache is the sum
of its buffers, and nothing here only masks. A cache hands stores and an index of tokens to an
operation of kernels.py, which runs as a Triton kernel or as PyTorch.

    B rows of a batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dim
    S       tokens: in a step, of the sequence so far; in stores and scores, the cache's capacity
    pos     [B] on the device: the position of the newest token of each row
    index   [B, Hkv or 1, G or 1, n]: the tokens that a KV head, or a query head, attends; -1 for
            none. 1 in the place of Hkv or G: all heads, or all heads of a group, attend the same
            tokens.
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
from numbers import Integral, Real
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
from model import (
    Attention,
    Llama,
    ModelConfig,
    UserError,
    apply_rope,
    causal_attention,
    rope_tables,
)

VARIANTS = ("ours", "paper")  # of a method whose defaults are not all the paper's

# What an artifact holds: name -> float or int, then the shape; None where any size will do.
ArtifactShapes = dict[str, tuple]
Artifact = dict[str, Tensor]


def setting(default, text: str, choices: tuple | None = None, within: str = "[0, 1e9]"):
    """A field of a settings dataclass, which is a command-line option, too.

    choices: the values allowed, or None. within: the interval of the numbers allowed (`inside`)."""
    return field(default=default, metadata={"help": text, "choices": choices, "within": within})


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton kernels can run there: on a GPU, or on a CPU in tests, interpreted."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def kernels_run(config: ModelConfig, device: torch.device, wanted: bool | None) -> bool:
    """Whether operations run as Triton kernels, or as PyTorch. wanted None: where they can, on
    CUDA, with triton, for head dims from 16 up (a tensor core's tile). UserError if wanted
    elsewhere."""
    fits = kernels.triton is not None and config.head_dim >= 16
    if wanted and not (fits and triton_runs_on(device)):
        needs = "CUDA, triton and a head dim of at least 16"
        raise UserError(f"the kernels need {needs}; use --no-kernels")
    if wanted is None:
        return fits and device.type == "cuda"
    return wanted


# -------------------------------------------------------------------------- the protocol of a cache


class CacheContext:
    """What the caches of all layers share: the model's shape, the batch's, and RoPE's tables."""

    def __init__(
        self, model: Llama, batch_size: int, max_seq_length: int, kernel: bool | None = None
    ):
        """Caches of batch_size rows of at most max_seq_length tokens, on the model's device and in
        its dtype. kernel: whether operations run as Triton kernels; None: where they can."""
        config = model.config
        weight = model.norm.weight
        self.config = config
        self.batch_size = batch_size
        self.max_seq_length = max_seq_length
        self.device = weight.device
        self.dtype = weight.dtype
        self.softmax_scale = config.head_dim**-0.5  # what attention multiplies q . k by
        self.rows = torch.arange(batch_size, device=self.device)
        self.positions = torch.arange(max_seq_length, device=self.device)
        self.cos, self.sin = rope_tables(config, max_seq_length, self.device)  # [S, D/2] each
        self.kernel = kernels_run(config, self.device, kernel)
        if self.kernel:
            self.rope_pairs = kernels.rope_pairs(self.cos, self.sin, self.dtype)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer [B, *shape] of zeros: a masked weight of 0 times a stray NaN would be NaN."""
        return torch.zeros(self.batch_size, *shape, dtype=dtype or self.dtype, device=self.device)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x [..., H, D], whose tokens stand at positions [...]."""
        return apply_rope(x, self.cos[positions], self.sin[positions])

    def rope_from(self, x: Tensor, start: int) -> Tensor:
        """Rotates x [..., n, H, D], whose tokens stand at positions start, start + 1, ..."""
        stop = start + x.shape[-3]
        return apply_rope(x, self.cos[start:stop], self.sin[start:stop])


class Cache(nn.Module):
    """The cache of one layer, for all rows. Its methods are in the order of a request's life.

    `prefill` and `decode` get q, k and v BEFORE RoPE, and return the attention's output. A method
    may have added rows to W_qkv when the model was loaded. What these rows make of a token comes
    as `projected`: SALS's latents, for example, or FDC's values, whose v is then empty. (EliteKV
    has other weights, and gets its latent in the place of v.)"""

    def __init__(self, context: CacheContext):
        super().__init__()
        self.context = context
        self.config = context.config
        self.softmax_scale = context.softmax_scale
        self.kernel = context.kernel
        self.rope = context.rope
        self.rope_from = context.rope_from
        # None, or a store of exact keys and one of exact values (sinks, recent tokens). Other
        # stores may hold the same tokens, compressed; attention then takes the exact ones.
        self.exact: Sequence[RingStore] = ()
        self.tables = {}  # name -> what a new row's entries are
        self.table_bytes = 0

    # ---- 1. A prompt, and more of it

    def prefill(
        self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor
    ) -> Tensor:
        """Reads n tokens of one row, at positions start to start + n - 1: a prompt, or what follows
        it. They attend one another, and what is kept of the tokens before them.

        q [n, Hq, D], k and v [n, Hkv, D], projected [n, ...] -> the attention's output
        [n, Hq, D]."""
        raise NotImplementedError

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K after RoPE and V that are kept of a row's first `length` tokens,
        [length or fewer, Hkv, D] each, in any order. This is what caches do that have stores `keys`
        and `values`; others have a `past` of their own."""
        keys = self.keys.of_row(row, length)
        values = self.values.of_row(row, length)
        if self.exact:
            keys = self.exact[0].overlay(row, keys)
            values = self.exact[1].overlay(row, values)
        return keys, values

    def past_and_new(self, row: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What n new tokens of a row attend: what is kept of the `start` tokens before them, then
        their own k after RoPE and v [n, Hkv, D]. Call it before the new tokens are written, since
        a ring then loses old ones."""
        if start == 0:
            return k, v
        past_k, past_v = self.past(row, start)
        return torch.cat((past_k, k)), torch.cat((past_v, v))

    # ---- 2. One token after the other

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        """Reads one new token of every row, at positions pos [B].

        q [B, Hq, D], k and v [B, Hkv, D], projected [B, ...] -> [B, Hq, D]. Shapes are fixed and
        nothing is read back to the host, so that one CUDA graph of a step is right for every
        length.

        A method that attends only some tokens chooses them in its `select`, so that evaluation can
        wrap it: select(pos, ...) gives an index, or None for all tokens. The tokens of `exact` are
        attended besides."""
        raise NotImplementedError

    # ---- 3. Bytes

    def bytes_stored(self) -> int:
        """Bytes of all buffers on the device: the whole batch at full length, as measured."""
        measured = sum(buffer.untyped_storage().nbytes() for buffer in self.buffers())
        return measured - self.bytes_host()

    def bytes_formula(self) -> int:
        """The same by the method's formula; tests hold bytes_stored to it."""
        return round(sum(store.bytes_formula() for store in self.stores())) + self.table_bytes

    def bytes_host(self) -> int:
        """Bytes of buffers in host memory, which the two above leave out."""
        return 0

    def bytes_read(self, length: int) -> int:
        """Bytes that one decode step must read here for one row of `length` tokens."""
        return length * self.compressed_bytes_per_token()

    def compressed_bytes_per_token(self) -> int:
        """Bytes of one token in the stores that hold every token."""
        return sum(s.token_bytes for s in self.stores() if not isinstance(s, RingStore))

    def miss_rate(self, rows: int | None = None) -> float | None:
        """The fraction of selected tokens that had to come from host memory, or None. rows: count
        only so many first rows, if the others are idle."""
        return None

    # ---- 4. The state of a row: what saving, forking and going back need

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        """All that is stored of a row of `length` tokens, by name: views, to be copied if kept."""
        state = {name: getattr(self, name)[row] for name in self.tables}
        for name, store in self.named_modules():
            if isinstance(store, Store):
                for part, view in store.row_state(row, length).items():
                    state[f"{name}.{part}"] = view
        return state

    def restore_row(self, row: int, length: int, state: dict[str, Tensor]) -> None:
        """Copies a saved state into a row. state comes from row_state with the same length, of any
        row of a cache with the same settings."""
        self.reset(row)
        for name, view in self.row_state(row, length).items():
            copy_by_kernel(state[name], view)

    # ---- 5. An empty row again

    def reset(self, row: int) -> None:
        """Makes a row's tables as new. What stores hold beyond a row's length is never read."""
        for name, fill in self.tables.items():
            getattr(self, name)[row] = fill

    # ---- for the methods

    def add_table(
        self, name: str, *shape: int, dtype: torch.dtype = torch.int32, fill: int = 0
    ) -> None:
        """A buffer [B, *shape] beside the stores, such as positions in slots, full of `fill`."""
        table = self.context.zeros(*shape, dtype=dtype).fill_(fill)
        self.register_buffer(name, table)
        self.tables[name] = fill
        self.table_bytes += self.context.batch_size * math.prod(shape) * dtype.itemsize

    def stores(self) -> list["Store"]:
        """Its stores, each with buffers of its own."""
        return [part for part in self.modules() if isinstance(part, Store)]


def copy_by_kernel(source: Tensor, target: Tensor) -> None:
    """target.copy_(source), where target may be host memory that only kernels reach
    (`host_memory`). A plain copy is the driver's work; a copy to an index is a kernel's. So this
    writes to entry 0 of a tensor that has no other."""
    first = torch.zeros(1, dtype=torch.int64)
    target[None][first] = source.to(target.device)


def dense_bytes(context: CacheContext) -> int:
    """Bytes of a dense cache of one layer: B x S x 2 Hkv D."""
    tokens = context.batch_size * context.max_seq_length
    return tokens * 2 * context.config.kv_dim * context.dtype.itemsize


def cache_bytes(caches: Sequence[Cache]) -> dict[str, int]:
    """Bytes of all layers, by the names that a report has."""
    return {
        "cache_bytes_measured": sum(cache.bytes_stored() for cache in caches),
        "cache_bytes_formula": sum(cache.bytes_formula() for cache in caches),
        "cache_bytes_dense": sum(dense_bytes(cache.context) for cache in caches),
        "cache_bytes_host": sum(cache.bytes_host() for cache in caches),
    }


# ------------------------------------------------------------------------------------------- stores


class Store(nn.Module):
    """The tokens of H heads in memory, in one form: of each token and head a vector of `width`
    numbers, as they are or in codes.

    A cache writes to a store. Then it gives `attend` two stores, of keys and of values: either a
    kernel reads their buffers, or PyTorch calls `read` for chosen tokens, and `logits` (of keys)
    and `mix` (of values) for all."""

    kind = "plain"  # the form, by which `attend` finds a kernel
    bits = 16  # of a code; 16 means no codes, whatever the dtype
    token_bytes = 0  # of one token, all heads together

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        """x [n, H, width]: one row's tokens from position `start` on."""
        raise NotImplementedError

    def write_token(self, pos: Tensor, x: Tensor) -> None:
        """x [B, H, width]: one token of each row, at positions pos [B]."""
        raise NotImplementedError

    def of_row(self, row: int, length: int) -> Tensor:
        """What is kept of the first `length` tokens of one row, [length or fewer, H, width]."""
        raise NotImplementedError

    def read(self, index: Tensor) -> Tensor:
        """The vectors of an index's tokens: [B, H or 1, G or 1, n], none negative ->
        [B, H, G or 1, n, width]."""
        raise NotImplementedError

    def read_all(self) -> Tensor:
        """All tokens, [B, H, S, width]."""
        raise NotImplementedError

    def logits(self, q: Tensor) -> Tensor:
        """q [B, H, G, d] times the d leading numbers of all tokens -> [B, H, G, S]."""
        raise NotImplementedError

    def mix(self, weights: Tensor) -> Tensor:
        """weights [B, H, G, S] fp32 times all tokens -> [B, H, G, width]."""
        raise NotImplementedError

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        """Views of what the first `length` tokens of a row use of each buffer, by its name."""
        raise NotImplementedError

    def bytes_formula(self) -> float:
        """Bytes of its buffers on the device."""
        raise NotImplementedError


class TokenStore(Store):
    """The numbers as they are, in a buffer `vectors` [B, H, S, width].

    It is the base of stores that encode them, too. These have other buffers (`layout`), and an
    `encode` and a `decode`; all else they inherit."""

    def __init__(self, context: CacheContext, n_heads: int, n_tokens: int, width: int):
        super().__init__()
        self.context = context
        self.n_heads = n_heads
        self.n_tokens = n_tokens
        self.width = width
        self.token_bytes = 0
        for name, (shape, dtype) in self.layout().items():
            self.register_buffer(name, self.allocate(*shape, dtype=dtype))
            self.token_bytes += n_heads * math.prod(shape) * dtype.itemsize

    # What stores of another form replace

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The buffers: of each its name -> the shape and the dtype of one token's part of it, for
        one head."""
        return {"vectors": ((self.width,), self.context.dtype)}

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A buffer [B, H, S, *shape]."""
        return self.context.zeros(self.n_heads, self.n_tokens, *shape, dtype=dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., width] -> what goes into each buffer."""
        return (x,)

    def decode(self, vectors: Tensor) -> Tensor:
        """The inverse: what each buffer holds -> x [..., width]."""
        return vectors

    # The methods of a store, for all of them

    def parts(self) -> list[Tensor]:
        """The buffers, in the order of `layout`."""
        return [getattr(self, name) for name in self.layout()]

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        stop = start + len(x)
        for part, new in zip(self.parts(), self.encode(x), strict=True):
            part[row, :, start:stop] = new.transpose(0, 1)

    def write_token(self, pos: Tensor, x: Tensor) -> None:
        for part, new in zip(self.parts(), self.encode(x), strict=True):
            part[self.context.rows, :, pos] = new

    def of_row(self, row: int, length: int) -> Tensor:
        parts = [part[row, :, :length] for part in self.parts()]
        return self.decode(*parts).transpose(0, 1)

    def read(self, index: Tensor) -> Tensor:
        G, n = index.shape[2:]
        of_head = index.flatten(2).expand(-1, self.n_heads, -1)  # [B, H, G * n]
        parts = [gather_rows(part, of_head) for part in self.parts()]
        return self.decode(*parts).unflatten(2, (G, n))

    def read_all(self) -> Tensor:
        return self.decode(*self.parts())

    def logits(self, q: Tensor) -> Tensor:
        return token_logits(q, self.vectors)

    def mix(self, weights: Tensor) -> Tensor:
        return matmul_codes(weights, self.vectors)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        n = min(length, self.n_tokens)  # a store of fewer slots fills from the left, too
        return {name: getattr(self, name)[row, :, :n] for name in self.layout()}

    def bytes_formula(self) -> int:
        return self.context.batch_size * self.n_tokens * self.token_bytes


class RingStore(TokenStore):
    """The n_sinks first tokens and the n_recent last ones, and no others. A sink keeps its slot.
    The slots after these are a ring, where the newest token takes the place of the oldest."""

    def __init__(
        self, context: CacheContext, n_heads: int, width: int, n_sinks: int, n_recent: int
    ):
        super().__init__(context, n_heads, n_sinks + n_recent, width)
        self.n_sinks = n_sinks
        self.n_recent = n_recent

    def slot(self, position: Tensor) -> Tensor:
        """The slot of the token at a position, which it has while it is recent."""
        is_sink = position < self.n_sinks
        in_ring = self.n_sinks + (position - self.n_sinks) % self.n_recent
        return torch.where(is_sink, position, in_ring)

    def kept(self, start: int, stop: int) -> Tensor:
        """Which of the positions start to stop - 1 are here, once all of these are written: the
        sinks among them, and the last n_recent of the others."""
        positions = self.context.positions[start:stop]
        n_sinks = max(0, self.n_sinks - start)  # how many of these positions are sinks
        first_recent = max(n_sinks, len(positions) - self.n_recent)
        return torch.cat((positions[:n_sinks], positions[first_recent:]))

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        # The others would be overwritten at once, so they are not written.
        kept = self.kept(start, start + len(x))
        self.vectors[row, :, self.slot(kept)] = x[kept - start].transpose(0, 1)

    def write_token(self, pos: Tensor, x: Tensor) -> None:
        super().write_token(self.slot(pos), x)

    def positions(self, pos: Tensor) -> Tensor:
        """The position of the token in each slot, [B, slots], when pos [B] is the newest; negative
        where the slot is empty."""
        sinks = torch.arange(self.n_sinks, device=pos.device).expand(len(pos), -1)
        recent = self.n_sinks + ring_positions(pos - self.n_sinks, self.n_recent)
        in_slot = torch.cat((sinks, recent), 1)
        return in_slot.where(torch.arange(self.n_tokens, device=pos.device) <= pos[:, None], -1)

    def overlay(self, row: int, x: Tensor) -> Tensor:
        """x [n, H, width], all tokens of a row so far, but with this store's vectors for those that
        it holds."""
        kept = self.kept(0, len(x))
        return x.index_copy(0, kept, self.vectors[row, :, self.slot(kept)].transpose(0, 1))


def ring_positions(pos: Tensor, n: int) -> Tensor:
    """The position of the token in each of a ring's n slots, [B, n], when pos [B] is the newest;
    negative where the slot is empty. Position p has the slot p % n. So a slot's token is
    (pos - slot) % n positions older than the newest."""
    slot = torch.arange(n, device=pos.device)
    age = (pos[:, None] - slot) % n
    return pos[:, None] - age


# ---- attention over two stores


def attend(
    q: Tensor,
    keys: "Store | RebuiltKeys",
    values: Store,
    pos: Tensor,
    index: Tensor | None = None,
    exact: "Sequence[ExactStore]" = (),
    *,
    scale: float,
    kernel: bool,
) -> Tensor:
    """Attention of one new token of each row over stored tokens: q [B, Hq, D] after RoPE ->
    [B, Hq, DV].

    keys, values: stores, or RebuiltKeys, which makes keys from latents. index: which of their
    tokens are attended,
        [B, Hkv or 1, G or 1, n]    these; -1 stands for none
        None                        all of each row, up to pos [B]
    exact: none, or two stores (ExactStore) of exact keys and values. All of their tokens are
    attended. With an index they come besides. Without one they take the place of the row's last
    n_recent tokens, of which the other stores are then not read.
    kernel: run as a kernel, if kernels.py has one for these stores."""
    has_tokens = index is None or index.numel() > 0
    if kernel and has_tokens and has_kernel(q, keys, values, index):
        return attend_by_kernel(q, keys, values, pos, index, exact, scale)
    if index is not None:
        return attend_index(q, keys, values, pos, index, exact, scale)
    return attend_all(q, keys, values, pos, exact, scale)


def exact_tensors(exact: Sequence) -> list[Tensor]:
    """The vectors of exact keys and values as operations take them, [B, slots, Hkv, D] each; an
    empty list where a cache has no exact stores."""
    return [store.vectors.transpose(1, 2) for store in exact]


# In PyTorch


def attend_index(
    q: Tensor,
    keys: "Store | RebuiltKeys",
    values: Store,
    pos: Tensor,
    index: Tensor,
    exact: "Sequence[ExactStore]",
    scale: float,
) -> Tensor:
    """`attend` in PyTorch, where an index names the tokens: these are read and decoded, and then
    attended as plain K and V."""
    Hkv = values.n_heads
    is_token = (index >= 0).expand(-1, Hkv, -1, -1)  # [B, Hkv, G or 1, n]
    chosen = index.clamp(min=0).long()
    k = keys.read(chosen)  # [B, Hkv, G or 1, n, D]
    v = values.read(chosen)
    # If each query head of a group has tokens of its own, each needs keys and values of its own:
    # these are then of Hq heads, in the place of Hkv.
    return kernels.attend_plain(
        q,
        k.flatten(1, 2),
        v.flatten(1, 2),
        live=is_token.flatten(1, 2),
        pos=pos,
        exact=exact_tensors(exact),
        scale=scale,
        kernel=False,
    )


def attend_all(
    q: Tensor,
    keys: "Store | RebuiltKeys",
    values: Store,
    pos: Tensor,
    exact: "Sequence[ExactStore]",
    scale: float,
) -> Tensor:
    """`attend` in PyTorch, over all tokens up to pos. Stores in codes are not decoded: `logits` and
    `mix` multiply the codes as they are."""
    is_plain = keys.kind == values.kind == "plain"
    if is_plain and not exact:
        live = torch.arange(keys.n_tokens, device=pos.device) <= pos[:, None]
        return kernels.attend_plain_reference(q, keys.vectors, values.vectors, live, scale)

    q_of_group = q.unflatten(1, (values.n_heads, -1))  # [B, Hkv, G, D]
    last = pos[:, None, None, None]
    n_recent = exact[0].n_recent if exact else 0

    # Logits of all tokens but those that are exact, or later than pos.
    logits = keys.logits(q_of_group).float()  # [B, Hkv, G, S]
    S = logits.shape[-1]
    is_left_out = torch.arange(S, device=pos.device) > last - n_recent
    logits = logits.masked_fill(is_left_out, -torch.inf)

    # Logits of the exact ones, whose slots fill from the left: [B, Hkv, G, n_recent].
    if exact:
        is_empty = torch.arange(n_recent, device=pos.device) > last
        exact_logits = exact[0].logits(q_of_group).float().masked_fill(is_empty, -torch.inf)
        logits = torch.cat((logits, exact_logits), -1)

    # One softmax over both. Its division comes last, when both have added their values.
    weights = ((logits - logits.amax(-1, keepdim=True)) * scale).exp()
    out = values.mix(weights[..., :S])
    if exact:
        out = out + exact[1].mix(weights[..., S:])
    return (out / weights.sum(-1, keepdim=True)).to(q.dtype).flatten(1, 2)


# By a kernel


def has_kernel(q: Tensor, keys: "Store | RebuiltKeys", values: Store, index: Tensor | None) -> bool:
    """Whether kernels.py has a kernel for keys and values of these forms."""
    has_coded_values = values.bits < 16
    if has_coded_values and q.shape[-1] % 16:  # kernels.value_packing refuses such head dims
        return False
    if keys.kind == "plain":
        return values.kind == "plain"
    if keys.kind == "channels":
        return has_coded_values and index is None
    return keys.kind == "latents"


def attend_by_kernel(
    q: Tensor,
    keys: "Store | RebuiltKeys",
    values: Store,
    pos: Tensor,
    index: Tensor | None,
    exact: "Sequence[ExactStore]",
    scale: float,
) -> Tensor:
    """`attend` by a kernel: that of the keys' form, which takes their buffers."""
    q = q.contiguous()
    pos = pos.int()
    exact = exact_tensors(exact)
    if index is not None:
        index = kernel_index(index, values.n_heads)

    if keys.kind == "plain":
        return kernels.launch_attend_plain(
            q, keys.vectors, values.vectors, pos, index, exact, scale
        )

    v_scale = values.scale if values.bits < 16 else None
    if keys.kind == "channels":  # KIVI's
        return kernels.launch_attend_channels(
            q,
            keys.codes,
            keys.min_and_scale,
            values.vectors,
            v_scale,
            values.bits,
            pos,
            exact,
            scale,
        )

    # "latents": keys are rebuilt from them (SALS, Palu).
    latent, latent_scale, int4_dims = keys.latent_parts()
    return kernels.launch_attend_latents(
        q,
        latent,
        latent_scale,
        int4_dims,
        keys.kernel_basis.basis,
        keys.kernel_basis.scale,
        keys.kernel_basis.bias,
        keys.context.rope_pairs,
        values.vectors,
        v_scale,
        values.bits,
        pos,
        index,
        exact,
        scale,
    )


def kernel_index(index: Tensor, n_kv_heads: int) -> Tensor:
    """An index [B, Hkv or 1, G or 1, n] as kernels take it, int32: [B, n] if all heads attend the
    same tokens, else [B, Hkv, n] or [B, Hq, n]."""
    is_of_all_heads = index.shape[1] == index.shape[2] == 1
    if is_of_all_heads:
        return index[:, 0, 0].int()  # a view: of this form alone rows may lie apart in memory
    return index.expand(-1, n_kv_heads, -1, -1).flatten(1, 2).int().contiguous()


# -------------------------------------------------------------------------------------------- dense


@dataclass
class DenseSettings:
    """The full cache: nothing to set."""


class DenseCache(Cache):
    """Keys after RoPE and values of every token, as they are: what all methods are compared with.

    It is also the base of all caches that keep K and V in two stores. Such a cache may have other
    stores, another basis for its keys (`to_stored_basis`), and a `select` that chooses the tokens
    of a step."""

    def __init__(
        self, context: CacheContext, keys: Store | None = None, values: Store | None = None
    ):
        """keys, values: the stores, if they are not plain ones of every token."""
        super().__init__(context)
        c = context.config
        self.keys = keys or TokenStore(context, c.n_kv_heads, context.max_seq_length, c.head_dim)
        self.values = values or TokenStore(
            context, c.n_kv_heads, context.max_seq_length, c.head_dim
        )

    def to_stored_basis(self, x: Tensor) -> Tensor:
        """Queries or keys [..., H, D] after RoPE -> the same in the basis in which keys are stored,
        [..., H, width]."""
        return x

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        """k after RoPE and v [n, Hkv, D]: one row's tokens from position `start` on."""
        self.keys.write_prompt(row, start, self.to_stored_basis(k))
        self.values.write_prompt(row, start, v)

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        """k after RoPE and v [B, Hkv, D]: one token of each row, at positions pos [B]."""
        self.keys.write_token(pos, self.to_stored_basis(k))
        self.values.write_token(pos, v)

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        """q [B, Hq, width] in the stored basis -> the tokens to attend, an index
        [B, Hkv or 1, G or 1, n], or None for all."""
        return None

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)
        self.write_prompt(row, start, k, v)
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write_token(pos, self.rope(k, pos), v)
        q = self.to_stored_basis(self.rope(q, pos))
        index = self.select(pos, q)
        return attend(
            q,
            self.keys,
            self.values,
            pos,
            index,
            exact=self.exact,
            scale=self.softmax_scale,
            kernel=self.kernel,
        )

    def bytes_read(self, length: int) -> int:
        stored = min(length, self.keys.n_tokens)
        return round(stored * self.keys.token_bytes + stored * self.values.token_bytes)


class FittedLayer(NamedTuple):
    """What the cache of a fitted method is made of, besides its settings."""

    attention: nn.Module  # the layer's, with what the method has folded into it
    artifact: Artifact
    i: int  # the layer's number


def each_layer(make: Callable[..., Cache]) -> Callable[..., list[Cache]]:
    """What a row of METHODS has as its `caches`, for a method whose layers all have the same kind
    of cache. Layers named by --skip, where there is such a setting, are dense.

    make: the class, or a function, that gives the cache of a layer: make(context, settings), or
    make(context, settings, fitted) if the method is fitted."""

    def build(
        model: Llama, settings: object, context: CacheContext, artifact: Artifact
    ) -> list[Cache]:
        skipped = set()
        if hasattr(settings, "skip"):
            skipped = skipped_layers(settings, len(model.layers))
        caches = []
        for i, layer in enumerate(model.layers):
            if i in skipped:
                caches.append(DenseCache(context))
            elif artifact:  # which is {} if the method is not fitted
                fitted = FittedLayer(layer.attention, artifact, i)
                caches.append(make(context, settings, fitted))
            else:
                caches.append(make(context, settings))
        return caches

    return build


def skipped_layers(settings: object, n_layers: int) -> set[int]:
    """The layers of --skip; of its default, those that a model of few layers has."""
    skip = settings.skip
    try:
        layers = [int(i) for i in skip.split(",") if i.strip()]
    except ValueError:
        wanted = "give layer numbers, such as 0,1,-1 (or '' for none)"
        raise UserError(f"--skip {skip!r}: {wanted}") from None
    known = range(-n_layers, n_layers)
    if skip != type(settings).skip and not all(i in known for i in layers):
        raise UserError(f"--skip {skip!r}: the layers are {-n_layers} to {n_layers - 1}")
    return {i % n_layers for i in layers if i in known}


# --------------------------------------------------- methods that attend the best tokens by a score


class Budget(NamedTuple):
    """How many tokens a step attends: the first ones, the best by their scores, the last ones."""

    n_sinks: int
    n_selected: int
    n_recent: int


def fit_budget(max_seq_length: int, n_sinks: int, n_selected: int, n_recent: int) -> Budget:
    """Cuts a budget to a length. Where it is too short for all, recent tokens go before selected
    ones, and these before sinks."""
    n_recent = min(n_recent, max_seq_length)
    n_selected = min(n_selected, max_seq_length - n_recent)
    n_sinks = min(n_sinks, max_seq_length - n_recent - n_selected)
    return Budget(n_sinks, n_selected, n_recent)


# A fraction of a short row would leave too few tokens to answer by: a quarter of "The capital of
# France is" is one. So a fraction means at least so many tokens (ours), or all of a shorter row.
LEAST_TOKENS = 64


def kept_tokens(keep: float, length: int, least: int | None = None) -> int:
    """How many of `length` tokens `keep` means. Above 1 it is a count. Up to 1 it is a fraction,
    but of at least `least` tokens (None: LEAST_TOKENS)."""
    if least is None:
        least = LEAST_TOKENS
    tokens = int(keep)
    if keep <= 1:
        tokens = max(least, int(keep * length))
    return max(1, min(length, tokens))


def left_to_select(
    keep: float, total: int, max_seq_length: int, n_sinks: int, n_recent: int
) -> int:
    """How many tokens are left to select, out of `total`, beside sinks and recent ones. keep and
    max_seq_length are for the UserError that says that none are."""
    if total < n_sinks + n_recent:
        fault = f"is fewer than {n_sinks} sinks and {n_recent} recent ones"
        raise UserError(f"--keep {keep:g} of {max_seq_length} tokens {fault}")
    return total - n_sinks - n_recent


def keep_setting(tokens: float):
    """The field of the methods that are given their tokens in all."""
    text = "tokens attended in all: above 1 a count, up to 1 a fraction of the cache's capacity"
    floor = f"but at least {LEAST_TOKENS} tokens (ours)"
    return setting(tokens, f"{text}, {floor}", within="(0, inf)")


@dataclass
class KeepSettings:
    """The settings of a method that selects: how many tokens a step attends in all. The newest one
    is always among them."""

    keep: float = keep_setting(512)

    def budget(self, max_seq_length: int) -> Budget:
        total = kept_tokens(self.keep, max_seq_length)
        if total == max_seq_length:  # nothing is left out, so there is nothing to select
            return Budget(n_sinks=0, n_selected=total, n_recent=0)
        return Budget(n_sinks=0, n_selected=total - 1, n_recent=1)


class ScoringCache(DenseCache):
    """The base of methods that keep K and V, and attend the best tokens by their `score`."""

    def __init__(
        self,
        context: CacheContext,
        budget: Budget,
        keys: Store | None = None,
        values: Store | None = None,
    ):
        super().__init__(context, keys, values)
        self.budget = budget

    def covers_all(self) -> bool:
        """Whether the budget is so large that there is nothing to select."""
        return sum(self.budget) >= self.context.max_seq_length

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """q [B, Hq, width] in the stored basis -> a score of every token [B, Hkv or 1, G or 1, S],
        -inf beyond pos."""
        raise NotImplementedError

    def n_best(self, pos: Tensor) -> Tensor | None:
        """How many tokens each row selects [B], where the budget's n_selected is only the most that
        any row may select; None: all rows select as many."""
        return None

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        if self.covers_all():
            return None
        return kernels.select(
            self.score(pos, q),
            pos,
            self.budget,
            self.n_best(pos),
            recent=True,
            kernel=self.kernel,
        )

    def bytes_read(self, length: int) -> int:
        """K and V of the tokens attended. A method adds the bytes that its scores read."""
        attended = min(length, sum(self.budget))
        return round(attended * self.keys.token_bytes + attended * self.values.token_bytes)


# -------------------------------------------------------------------------------------- exact top-k


@dataclass
class TopKSettings(KeepSettings):
    """Exact top-k: full logits choose the tokens. It saves no bytes, but shows what a perfect
    selection would reach."""


class TopKCache(ScoringCache):
    """K and V in full. The query heads that share a KV head choose the same tokens, together."""

    def __init__(self, context: CacheContext, settings: TopKSettings):
        super().__init__(context, settings.budget(context.max_seq_length))

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """The largest attention weight that any query head of a group gives, as a logarithm."""
        scores = kernels.scores(
            q, self.keys.vectors, None, pos, self.softmax_scale, "largest", kernel=self.kernel
        )
        return scores.unsqueeze(2)  # [B, Hkv, 1, S]

    def bytes_read(self, length: int) -> int:
        attended = min(length, sum(self.budget))
        return length * self.keys.token_bytes + attended * self.values.token_bytes


# --------------------------------------------------------------------------------------------- Loki


@dataclass
class LokiSettings:
    """Loki: low-rank keys for sparse attention (arXiv 2406.02542). Saves reads, not bytes."""

    k: float = setting(
        0.25,
        "k_f: tokens of a query head; up to 1 a fraction of the row's, "
        f"but at least {LEAST_TOKENS} tokens (ours)",
        within="(0, inf)",
    )
    d: float = setting(0.25, "d_f: leading fraction of D that scoring reads", within="(0, 1]")
    explained: float = setting(
        0.0, "instead of d: a layer's mean Rank@v (App. B.2)", within="[0, 1)"
    )
    basis: str = setting("post", "the PCA is of keys after RoPE, or before it", ("post", "pre"))
    share: str = setting(
        "query", "who has k tokens: a head, or a KV head (ours)", ("query", "group")
    )
    reduced: bool = setting(False, "PCAAttn (App. E): cache and attend d components of every token")

    def budget(self, max_seq_length: int) -> Budget:
        """The tokens that a query head attends when the cache is full. (Shorter rows take fewer of
        them: `LokiCache.n_best`.)"""
        n_selected = kept_tokens(self.k, max_seq_length)
        if self.reduced:
            n_selected = max_seq_length
        return Budget(n_sinks=0, n_selected=n_selected, n_recent=0)


def loki_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, P: Tensor, d: int, n_selected: int
) -> tuple[Tensor, Tensor, tuple]:
    """One decode step of Loki as published, for one KV head. Algorithm 1's lines number the steps.

    q [G, D], k and v [D]: after RoPE. stored: K in the basis P, and V, [S - 1, D] each. P [D, D]:
    the principal components of the keys as columns, the largest first. -> the output [G, D], each
    query's tokens [G, n_selected], and what is stored now."""
    # 2-4. Turn the new query and key into the basis P, which leaves full logits as they are (Lemma
    # 4.1), and append.
    q = q @ P
    k = k @ P
    keys, values = appended(stored, k, v)

    # 5. Score every token on the d leading components.
    scores = q[:, :d] @ keys[:, :d].mT  # [G, S]

    # 6, 7. Select the best tokens of each query.
    chosen = scores.topk(min(n_selected, len(keys))).indices  # [G, n]

    # 8, 9. Attend them, on all components.
    logits = (q[:, None] * keys[chosen]).sum(-1) / len(P) ** 0.5
    weights = logits.softmax(-1)
    output = (weights[..., None] * values[chosen]).sum(1)
    return output, chosen, (keys, values)


def appended(stored: Iterable[Tensor], *new: Tensor) -> tuple[Tensor, ...]:
    """Each tensor of `stored` [S - 1, ...], with the new token's part [...] behind it: [S, ...]."""
    return tuple(torch.cat((old, x[None])) for old, x in zip(stored, new, strict=True))


def rank_at(eigenvalues: Tensor, fraction: float) -> Tensor:
    """Rank@v (Loki Eq. 2): how many leading eigenvalues hold this fraction of their sum.

    eigenvalues [..., n], the largest first -> [...]."""
    below = eigenvalues.cumsum(-1) / eigenvalues.sum(-1, keepdim=True) < fraction
    return below[..., :-1].sum(-1) + 1  # all n hold 1, whatever rounding says


def rank_of(fraction: float, width: int) -> int:
    """How many dims a fraction of `width` dims is: the nearest number, at least 1."""
    return max(1, round(fraction * width))


def in_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Heads x [..., H, D], each times the basis of its KV head, [..., Hkv, D, r] -> [..., H, r]."""
    grouped = x.unflatten(-2, (basis.shape[-3], -1))
    return torch.einsum("...hgd,...hdr->...hgr", grouped, basis).flatten(-3, -2)


class LokiCache(ScoringCache):
    """Keys after RoPE in the basis P of each KV head's principal components, and plain V."""

    def __init__(self, context: CacheContext, settings: LokiSettings, fitted: FittedLayer):
        c = context.config
        artifact = fitted.artifact
        # Scores read d components: the fraction --d of D, or with --explained so many that they
        # hold this fraction of the keys' variance.
        d = rank_of(settings.d, c.head_dim)
        if settings.explained:
            eigenvalues = artifact[f"{settings.basis}.eigenvalues"][fitted.i]  # [Hkv, D]
            ranks = rank_at(eigenvalues, settings.explained)  # [Hkv]
            d = round(ranks.double().mean().item())
        width = d if settings.reduced else c.head_dim  # components that are cached
        keys = TokenStore(context, c.n_kv_heads, context.max_seq_length, width)
        super().__init__(context, settings.budget(context.max_seq_length), keys)
        P = artifact[f"{settings.basis}.basis"][fitted.i, ..., :width]  # [Hkv, D, width]
        self.P = P.to(context.device, context.dtype)
        self.settings = settings
        self.d = d
        self.least_tokens = LEAST_TOKENS  # as it was when the cache was made; tests change it

    def to_stored_basis(self, x: Tensor) -> Tensor:
        return in_basis(x, self.P)

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = super().past(row, length)
        # P^T turns them back. If reduced, what the columns left out held is lost.
        return in_basis(keys, self.P.mT), values

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """Line 5. Each query head scores for itself, by its logits on the d leading components:
        [B, Hkv, G, S]. With --share group one score serves a group, [B, Hkv, 1, S]: the largest
        attention weight that one of its heads gives, by the same components."""
        leading = q[..., : self.d]
        shares = self.settings.share == "group"
        rule = "largest" if shares else "each"
        scores = kernels.scores(
            leading, self.keys.vectors, None, pos, self.softmax_scale, rule, kernel=self.kernel
        )
        return scores.unsqueeze(2) if shares else scores

    def n_best(self, pos: Tensor) -> Tensor | None:
        if self.settings.k > 1:
            return None
        # --k is a fraction of each row's own length. This is `kept_tokens`, on the device.
        length = (pos + 1).double()
        return (self.settings.k * length).long().clamp(min=self.least_tokens)

    def bytes_read(self, length: int) -> int:
        """d components of every key, then K and V of the selected tokens. Each of a KV head's G
        query heads has a set of its own, so that it may be G times as many, if no token is in two
        sets."""
        if self.settings.reduced or self.covers_all():
            return DenseCache.bytes_read(self, length)
        sets = 1 if self.settings.share == "group" else self.config.group
        attended = min(length, sets * sum(self.settings.budget(length)))
        scored = length * self.d / self.config.head_dim  # in keys of full width
        keys = (attended + scored) * self.keys.token_bytes
        return round(keys + attended * self.values.token_bytes)


def shapes_of_heads(*names: str, **others: tuple) -> Callable[[ModelConfig], ArtifactShapes]:
    """What a row of METHODS has as its `tensors`: of each name what the artifact holds of every KV
    head, a matrix [D, D] if it is a basis, else numbers [D]. others: tensors of another shape."""

    def tensors(c: ModelConfig) -> ArtifactShapes:
        numbers = (float, c.n_layers, c.n_kv_heads, c.head_dim)
        matrices = (*numbers, c.head_dim)
        found = {}
        for name in names:
            found[name] = matrices if "basis" in name else numbers
        return found | others

    return tensors


loki_shapes = shapes_of_heads("pre.basis", "post.basis", "pre.eigenvalues", "post.eigenvalues")


# --------------------------------------------------------------------------------------------- KIVI


@dataclass
class KiviSettings:
    """KIVI (arXiv 2402.02750): keys in codes per channel, values per token; attends all."""

    bits: int = setting(4, "bits of a code; the paper: 2, and 4 under grouped queries", (2, 4))
    residual: int = setting(128, "R: last values that stay exact, and keys of a block")


GROUP = 32  # numbers that share a minimum and a scale


def kivi_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, bits: int, R: int
) -> tuple[Tensor, tuple]:
    """One decode step of KIVI as published (sec. 3.2), for one KV head.

    q [G, D], k and v [D]: after RoPE -> output [G, D]. stored: K and V [S - 1, D], of which each
    step makes codes anew."""
    K, V = appended(stored, k, v)

    # 1. Keys in codes per channel, 32 tokens a group. Those of an unfinished block of R tokens are
    # exact.
    n_coded = len(K) // R * R
    codes, min_and_scale = quantize(K[:n_coded], bits, GROUP, dim=-2)
    coded = dequantize(codes, min_and_scale, bits, GROUP, K.dtype, dim=-2)
    keys = torch.cat((coded, K[n_coded:]))

    # 2. Values in codes per token, 32 channels a group. The last R are exact.
    n_coded = max(0, len(V) - R)
    n_channels = min(GROUP, len(v))  # of a value, that share a scale
    codes, min_and_scale = quantize(V[:n_coded], bits, n_channels)
    coded = dequantize(codes, min_and_scale, bits, n_channels, V.dtype)
    values = torch.cat((coded, V[n_coded:]))

    # 3. Attend every token.
    logits = q @ keys.mT / len(k) ** 0.5
    output = logits.softmax(-1) @ values
    return output, (K, V)


# ---- codes


def quantize(x: Tensor, bits: int, group: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Codes of `bits` bits: a number is its group's minimum + scale * code. A group is `group`
    channels of one token (dim -1, as KIVI's values have it), or `group` tokens of one channel
    (dim -2, as its keys).

    x [..., S, D] -> codes [..., S, D * bits / 8] uint8 (`pack`), and the minimum and scale of each
    group in fp16, [..., S, D / group, 2] or with dim -2 [..., S / group, D, 2]."""
    # [..., S, D / group, group], or with dim -2 [..., S / group, group, D]: a group lies along dim.
    grouped = x.float().unflatten(dim, (-1, group))
    low, high = grouped.aminmax(dim=dim, keepdim=True)
    # Round the minimum and the scale to what is stored before they are used, so that the codes
    # belong to the stored ones.
    low = as_fp16(low)
    scale = as_fp16((high - low.float()) / (2**bits - 1))
    step = torch.where(scale == 0, 1, scale.float())  # a constant group decodes to its minimum
    codes = ((grouped - low.float()) / step).round().clamp(0, 2**bits - 1)
    packed = pack(codes.flatten(dim - 1, dim), bits)  # of [..., S, D] again
    # Of a group along dim one pair is left. The pair is a new last dim, so dim is now dim - 1.
    return packed, torch.stack((low, scale), dim=-1).squeeze(dim - 1)


def dequantize(
    codes: Tensor, min_and_scale: Tensor, bits: int, group: int, dtype: torch.dtype, dim: int = -1
) -> Tensor:
    """The inverse of `quantize`: codes, and minimum and scale of each group -> x [..., S, D]."""
    grouped = unpack(codes, bits).float().unflatten(dim, (-1, group))
    low, scale = min_and_scale.float().unbind(-1)
    x = grouped * scale.unsqueeze(dim) + low.unsqueeze(dim)
    return x.flatten(dim - 1, dim).to(dtype)


# Products with codes as they are, since a CPU would take longer to decode them first.


def mix_codes(weights: Tensor, codes: Tensor, min_and_scale: Tensor, bits: int) -> Tensor:
    """weights [B, H, G, S] fp32 times values in codes per token [B, H, S, D * bits / 8] ->
    [B, H, G, D].

    Over tokens s, sum of w_s (low_s + scale_s code_s) = w . low + (w scale) . code. `pack` puts
    channel c into byte c % width, where it has the bits of plane c // width. So there is a product
    for each run of channels that share both a group, with its low and scale, and a plane."""
    low, scale = min_and_scale.to(weights.dtype).unbind(-1)  # [B, H, S, n_groups]
    width = codes.shape[-1]  # bytes of a token, which is also the number of channels in a plane
    D = width * 8 // bits
    n_groups = min_and_scale.shape[-2]
    group = D // n_groups  # channels of a group
    run = math.gcd(group, width)
    parts = []
    for channel in range(0, D, run):
        plane, byte = divmod(channel, width)
        i = channel // group
        codes_of_run = (codes[..., byte : byte + run] >> (plane * bits)) & (2**bits - 1)
        mixed = matmul_codes(weights * scale[:, :, None, :, i], codes_of_run)
        parts.append(mixed + weights @ low[..., i, None])
    return torch.cat(parts, -1)


def channel_logits(q: Tensor, codes: Tensor, min_and_scale: Tensor, bits: int) -> Tensor:
    """q [B, H, G, D] times keys in codes per channel [B, H, S, D * bits / 8] -> [B, H, G, S] fp32.

    A group is n = S / 32 times 32 tokens, with a low and a scale for each channel. In a group
    q . (low + scale code) = q . low + (q scale) . code. The second product goes plane by plane of
    the codes (`pack`)."""
    low, scale = min_and_scale.float().unbind(-1)  # [B, H, n, D]
    q_scaled = q[:, :, None] * scale[:, :, :, None].to(q.dtype)  # [B, H, n, G, D]
    codes_of_group = codes.unflatten(2, (-1, GROUP))  # [B, H, n, 32, D * bits / 8]
    n_planes = 8 // bits
    q_of_plane = q_scaled.chunk(n_planes, -1)
    of_codes = 0.0
    for i in range(n_planes):
        plane = (codes_of_group >> (i * bits)) & (2**bits - 1)
        of_codes = of_codes + (plane.to(q.dtype) @ q_of_plane[i].mT).float()  # [B, H, n, 32, G]
    of_low = (q.float() @ low.mT).mT  # [B, H, n, G]: alike for the tokens of a group
    return (of_codes + of_low[:, :, :, None]).flatten(2, 3).mT


# ---- its stores


class CodedStore(TokenStore):
    """Codes of 2 or 4 bits (`quantize`), in `vectors`. A group of 32 channels (or all, of fewer)
    shares a minimum and a scale, which lie side by side in `scale`."""

    kind = "codes"
    group = GROUP  # channels that share them

    def __init__(self, context: CacheContext, n_heads: int, n_tokens: int, width: int, bits: int):
        self.bits = bits
        self.group = min(self.group, width)
        if width % self.group or width * bits % 8:
            fault = "need a head dim that groups of 32 divide"
            fault += ", or one below 32 that fills whole bytes"
            raise UserError(f"{bits}-bit values {fault}, not {width}")
        super().__init__(context, n_heads, n_tokens, width)

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        n_bytes = self.width * self.bits // 8
        n_groups = self.width // self.group
        return {"vectors": ((n_bytes,), torch.uint8), "scale": ((n_groups, 2), torch.float16)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, self.bits, self.group)

    def min_and_scale(self, scale: Tensor) -> Tensor:
        """What the buffer `scale` holds -> the minimum and scale of each group [..., groups, 2]."""
        return scale

    def decode(self, vectors: Tensor, scale: Tensor) -> Tensor:
        pairs = self.min_and_scale(scale)
        return dequantize(vectors, pairs, self.bits, self.group, self.context.dtype)

    def mix(self, weights: Tensor) -> Tensor:
        return mix_codes(weights, self.vectors, self.min_and_scale(self.scale), self.bits)


class ByToken:
    """Another order in memory for a store: the heads of a token side by side, [B, S, H, ...]. What
    is seen is [B, H, S, ...] as ever. A step that attends chosen tokens then reads longer pieces.
    (To be named before the store among a class's bases.)"""

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        buffer = self.context.zeros(self.n_tokens, self.n_heads, *shape, dtype=dtype)
        return buffer.transpose(1, 2)


class ExactStore(ByToken, RingStore):
    """Exact K or V of sinks and recent tokens, which `attend` takes beside stores in codes."""


def exact_stores(context: CacheContext, n_sinks: int, n_recent: int) -> nn.ModuleList:
    """The stores of exact keys and of exact values: a cache's `exact`."""
    c = context.config
    keys = ExactStore(context, c.n_kv_heads, c.head_dim, n_sinks, n_recent)
    values = ExactStore(context, c.n_kv_heads, c.head_dim, n_sinks, n_recent)
    return nn.ModuleList([keys, values])


class ChannelKeys(Store):
    """Keys quantised per channel in groups of 32 tokens, a block of R tokens at a time.

    The keys of an unfinished block are exact, and only in `ring`, which has R slots: token t is in
    slot t % R. `attend` takes the ring for the row's last R tokens. So the slots that this block
    has not reached yet must hold the last tokens of the block before. That block is full, so they
    hold its keys as its codes give them."""

    kind = "channels"

    def __init__(self, context: CacheContext, bits: int, ring: ExactStore):
        super().__init__()
        n_heads = context.config.n_kv_heads
        width = context.config.head_dim
        self.context = context
        self.bits = bits
        self.ring = ring
        self.R = ring.n_recent
        self.n_tokens = -(-context.max_seq_length // self.R) * self.R  # whole blocks
        # The minimum and scale of a group add 32 bits to 32 numbers: one bit each.
        self.token_bytes = n_heads * width * (bits + 1) / 8
        codes = context.zeros(n_heads, self.n_tokens, width * bits // 8, dtype=torch.uint8)
        pairs = context.zeros(n_heads, self.n_tokens // GROUP, width, 2, dtype=torch.float16)
        self.register_buffer("codes", codes)
        self.register_buffer("min_and_scale", pairs)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., S, width] of whole groups to codes, and their minima and scales."""
        return quantize(x, self.bits, GROUP, dim=-2)

    def decode(self, codes: Tensor, min_and_scale: Tensor) -> Tensor:
        """The inverse: codes [..., S, width * bits / 8] to keys [..., S, width]."""
        return dequantize(codes, min_and_scale, self.bits, GROUP, self.context.dtype, dim=-2)

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        # Go on with the unfinished block, whose exact keys are the first slots of the ring.
        first = start // self.R * self.R
        unfinished = self.ring.vectors[row, :, : start - first].transpose(0, 1)
        x = torch.cat((unfinished, x))
        self.ring.write_prompt(row, first, x)
        # Full blocks become codes.
        n_coded = len(x) // self.R * self.R
        stop = first + n_coded
        codes, pairs = self.encode(x[:n_coded].transpose(0, 1))
        self.codes[row, :, first:stop] = codes
        self.min_and_scale[row, :, first // GROUP : stop // GROUP] = pairs
        # The slots that the new unfinished block has not reached get the decoded block before it.
        if n_coded > 0:
            n_groups = self.R // GROUP
            block = self.decode(codes[:, -self.R :], pairs[:, -n_groups:])  # [Hkv, R, width]
            n_unfinished = len(x) - n_coded
            self.ring.vectors[row, :, n_unfinished:] = block[:, n_unfinished:]

    def write_token(self, pos: Tensor, x: Tensor) -> None:
        self.ring.write_token(pos, x)
        # The block is encoded in every step, since to ask whether it is full would be to wait for
        # the host. Its codes are read only when it is: until then the ring counts.
        # The ring is taken as it lies in memory, [B, R, Hkv, width]: a compiled step would copy it
        # otherwise.
        ring = self.ring.vectors.transpose(1, 2)
        codes, pairs = self.encode(ring.transpose(1, 2))  # [B, Hkv, R or R / 32, ...]
        # When the block is full, its keys in the ring become what the codes give.
        is_full = (pos % self.R == self.R - 1)[:, None, None, None]
        ring.copy_(torch.where(is_full, self.decode(codes, pairs).transpose(1, 2), ring))
        # Where the codes go: the block's tokens [B, R], and its groups [B, R / 32].
        row = self.context.rows[:, None]
        first = (pos // self.R * self.R)[:, None]
        tokens = first + torch.arange(self.R, device=pos.device)
        groups = first // GROUP + torch.arange(self.R // GROUP, device=pos.device)
        self.codes[row, :, tokens] = codes.transpose(1, 2)
        self.min_and_scale[row, :, groups] = pairs.transpose(1, 2)

    def of_row(self, row: int, length: int) -> Tensor:
        return self.decode(**self.row_state(row, length))[:, :length].transpose(0, 1)

    def logits(self, q: Tensor) -> Tensor:
        logits = channel_logits(q, self.codes, self.min_and_scale, self.bits)
        return logits[..., : self.context.max_seq_length]

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        n_groups = -(-length // GROUP)
        codes = self.codes[row, :, : n_groups * GROUP]
        return {"codes": codes, "min_and_scale": self.min_and_scale[row, :, :n_groups]}

    def bytes_formula(self) -> float:
        return self.context.batch_size * self.n_tokens * self.token_bytes


class KiviCache(DenseCache):
    """Keys in codes per channel, values in codes per token, and the last R of both exactly."""

    def __init__(self, context: CacheContext, settings: KiviSettings):
        c = context.config
        R = settings.residual
        if R < GROUP or R % GROUP:
            raise UserError(f"--residual {R}: give a multiple of 32, at least 32")
        # A cache of fewer than R tokens takes a smaller ring. It is longer than the cache, so that
        # its block never fills: the paper quantises nothing before there are R tokens.
        n_recent = min(R, (context.max_seq_length // GROUP + 1) * GROUP)
        exact = exact_stores(context, n_sinks=0, n_recent=n_recent)
        keys = ChannelKeys(context, settings.bits, ring=exact[0])
        values = CodedStore(
            context, c.n_kv_heads, context.max_seq_length, c.head_dim, settings.bits
        )
        super().__init__(context, keys, values)
        self.exact = exact

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        super().write_prompt(row, start, k, v)  # which writes exact keys: they are the keys' ring
        self.exact[1].write_prompt(row, start, v)

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        super().write_token(pos, k, v)
        self.exact[1].write_token(pos, v)

    def bytes_read(self, length: int) -> int:
        recent = min(length, self.keys.R)
        exact_bytes = sum(store.token_bytes for store in self.exact)
        return round((length - recent) * self.compressed_bytes_per_token() + recent * exact_bytes)


# --------------------------------------------------------------------------------------------- SALS


@dataclass
class SalsSettings:
    """SALS, Sparse Attention in Latent Space (arXiv 2510.24273)."""

    variant: str = setting(
        "ours", "the step as published, or changed where that is better (ours)", VARIANTS
    )
    rank: float = setting(
        0.0,
        "r / (Hkv*D), of latents; 0: 1/2, at most 1024 dims, and 5/8 if Hkv*D < 256",
        within="[0, 1]",
    )
    score_rank: float = setting(
        0.0,
        "r*/r, dims that scoring reads; 0: 1/4, at most Hkv*D/8 dims and at least 32",
        within="[0, 1]",
    )
    bits: int = setting(0, "bits of a value's code; 0: 2, and 4 if Hkv*D < 256", (0, 2, 4))
    sinks: int = setting(4, "x: first tokens that are always attended")
    critical: int = setting(444, "y: tokens selected by score, at each step and layer")
    recent: int = setting(
        64, "z: last tokens that are always attended, kept exact", within="[1, 1e9]"
    )
    keep: float = setting(
        0.0,
        "sets y: x + y + z as a fraction of the capacity (the paper's: of the row's length)",
        within="[0, 1]",
    )
    score: str = setting(
        "softmax", "softmax; or sum of logits, without RoPE (paper)", ("softmax", "sum")
    )
    skip: str = setting("0,1,-1", "layers that attend every token (the paper's 0, 1 and the last)")

    def __post_init__(self):
        if self.variant == "paper" and self.score != "sum":
            in_python = 'settings_from("sals", {"variant": "paper"})'
            remedy = f"leave --score out (in Python, {in_python} has the paper's settings)"
            raise UserError(f"--variant paper has --score sum alone; {remedy}")

    def budget(self, max_seq_length: int) -> Budget:
        """The tokens that a sparse layer attends: x sinks, y selected and z recent ones."""
        n_selected = self.critical
        if self.keep:
            total = round(self.keep * max_seq_length)
            n_selected = left_to_select(self.keep, total, max_seq_length, self.sinks, self.recent)
        return fit_budget(max_seq_length, self.sinks, n_selected, self.recent)

    def value_bits(self, c: ModelConfig) -> int:
        """Bits of a value's code: --bits, or 2, and 4 where keys are narrow (ours). There 2 bits
        make about half of SALS's loss (docs/results.md, "values in 2 and 4 bits")."""
        if self.bits:
            return self.bits
        return 4 if has_few_key_dims(c) else 2

    def rank_fraction(self, c: ModelConfig) -> float:
        """r / (Hkv*D): --rank, or half but at most 1024 dims, the paper's 25 % of the widest keys,
        and five eighths of narrow ones (ours)."""
        if self.rank:
            return self.rank
        if has_few_key_dims(c):
            return 0.625
        return min(0.5, 1024 / c.kv_dim)

    def ranks(self, c: ModelConfig) -> tuple[int, int]:
        """(r, r*): dims of a latent, and how many of them scores read.

        r* is a quarter of r, at most an eighth of the keys' width, and at least 32 (ours). Our
        codes leave an even r - r* > 0, since a byte holds two dims."""
        r = rank_of(self.rank_fraction(c), c.kv_dim)
        if self.score_rank:
            r_score = rank_of(self.score_rank, r)
        else:
            r_score = max(32, min(r // 4, c.kv_dim // 8))
        if self.variant == "paper":
            return r, min(r, r_score)
        r = max(r, 4)
        r_score = min(r_score, r - 2)
        return r, r_score + (r - r_score) % 2


def has_few_key_dims(c: ModelConfig) -> bool:
    """Whether the keys of a layer's token have so few dims (ours: below 256) that there is little
    to save. Then SALS's default keeps more of them, and to rebuild all keys is cheap."""
    return c.kv_dim < 256


class SalsStored(NamedTuple):
    """What the published step has stored of S tokens of one sequence."""

    latents: Tensor  # [S, r]
    v_codes: Tensor  # [S, Hkv, D * bits / 8]: values in codes (`quantize`)
    v_pairs: Tensor  # [S, Hkv, groups, 2]: the minimum and scale of each group
    k_exact: Tensor  # [S, Hkv, D] after RoPE, of which only sinks and recent tokens are read
    v_exact: Tensor  # [S, Hkv, D], of which the same are read


def sals_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: SalsStored,
    U: Tensor,
    r_score: int,
    bits: int,
    budget: Budget,
    rope: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, SalsStored]:
    """One decode step of SALS as published (Algorithm 1, whose lines number the steps), for one
    sequence.

    q [Hq, D], k and v [Hkv, D]: before RoPE. U [Hkv*D, r]: the leading eigenvectors of keys.
    r_score: the paper's r*. bits: of a value's code. rope(x, positions) rotates x [n, H, D]. -> the
    output [Hq, D], the tokens attended [n], and what is stored now.

    Sinks and recent tokens are exact here (ours); the paper compresses both, recent ones by
    half."""
    n_sinks, n_selected, n_recent = budget
    Hkv, D = k.shape
    S = len(stored.latents) + 1
    now = torch.tensor([S - 1])
    n_channels = min(GROUP, D)  # of a value, that share a scale

    # 2. Project the new key and query. A group's heads share their keys, so their queries are
    # summed.
    latent = k.flatten() @ U  # [r]
    q_of_group = q.unflatten(0, (Hkv, -1)).sum(1)  # [Hkv, D]
    q_latent = q_of_group.flatten() @ U

    # 3. Append.
    k_rotated = rope(k[None], now)[0]
    v_codes, v_pairs = quantize(v, bits, n_channels)
    stored = SalsStored(*appended(stored, latent, v_codes, v_pairs, k_rotated, v))

    # 4. Score every token on the r* leading dims (sec. 4.3): without RoPE, for all heads at once.
    scores = stored.latents[:, :r_score] @ q_latent[:r_score]  # [S]

    # 5. Select the best tokens between the sinks and the recent ones (sec. 4.4).
    position = torch.arange(S)
    is_exact = (position < n_sinks) | (position >= S - n_recent)
    n = min(n_selected, S - int(is_exact.sum()))
    chosen = scores.masked_fill(is_exact, -torch.inf).topk(n).indices

    # 6. Rebuild their keys, and decode their values.
    k_chosen = (stored.latents[chosen] @ U.T).unflatten(-1, (Hkv, D))
    v_chosen = dequantize(stored.v_codes[chosen], stored.v_pairs[chosen], bits, n_channels, v.dtype)

    # 7. Rotate the query and the rebuilt keys, each at its own position.
    q = rope(q[None], now)[0]
    k_chosen = rope(k_chosen, chosen)

    # 8, 9. Attend them, and sinks and recent tokens.
    keys = torch.cat((k_chosen, stored.k_exact[is_exact]))  # [n, Hkv, D]
    values = torch.cat((v_chosen, stored.v_exact[is_exact]))
    logits = torch.einsum("hgd,nhd->hgn", q.unflatten(0, (Hkv, -1)), keys) / D**0.5
    output = torch.einsum("hgn,nhd->hgd", logits.softmax(-1), values).flatten(0, 1)
    return output, torch.cat((chosen, position[is_exact])), stored


class SalsMaps(NamedTuple):
    """What leads to a layer's latents, and back (ours)."""

    down: Tensor  # [Hkv*D, r]: keys, less the mean key, to latents
    up: Tensor  # [Hkv*D, r]: latents to keys, and queries to what scores latents
    mean: Tensor  # [Hkv*D]: the mean key


class Rotations(NamedTuple):
    """Rotations by which scores turn a query back, one for each `tokens` tokens."""

    tokens: int
    cos: Tensor  # [n, D/2]
    sin: Tensor  # [n, D/2]


class SalsStoredOurs(NamedTuple):
    """What our step has stored of S tokens of one sequence."""

    int8_dims: Tensor  # [S, r*]: the leading dims of latents in int8 codes (`quantize_mixed`)
    scale: Tensor  # [S]: one of a token's latent
    int4_dims: Tensor  # [S, (r - r*) / 2] uint8: the other dims in 4-bit codes
    v_codes: Tensor  # [S, Hkv, D * bits / 8]: values in codes (`quantize_spread`)
    v_scale: Tensor  # [S, Hkv]: one of each head's value
    k_exact: Tensor  # [S, Hkv, D] after RoPE, of which only sinks and recent tokens are read
    v_exact: Tensor  # [S, Hkv, D], of which the same are read


def sals_step_ours(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: SalsStoredOurs,
    maps: SalsMaps,
    r_score: int,
    bits: int,
    budget: Budget,
    rope: Callable[[Tensor, Tensor], Tensor],
    blocks: Rotations,
    mean_blocks: Rotations,
) -> tuple[Tensor, Tensor, SalsStoredOurs]:
    """The same step as it runs by default, for one sequence: what we changed is in steps 2, 3, 4
    and 6.

    q [Hq, D], k and v [Hkv, D]: before RoPE; v and the output are in the basis of `rotate_values`,
    which W_V and W_O have. rope(x, positions) rotates x [n, H, D]. Scores turn queries back by two
    sets of rotations. blocks: the mean rotation of each block of tokens (`mean_rotations`), for
    what latents say of a key. mean_blocks: for the mean key; the same, or where keys have a bias,
    so that the mean key is large, each token's own rotation. -> the output [Hq, D], the tokens
    attended [n], and what is stored now."""
    n_sinks, n_selected, n_recent = budget
    Hkv, D = k.shape
    G = len(q) // Hkv
    S = len(stored.scale) + 1
    now = torch.tensor([S - 1])

    # 2. Project the new key, less the mean key. The query is rotated: each head scores for itself.
    latent = (k.flatten() - maps.mean) @ maps.down  # [r]
    q = rope(q[None], now)[0]
    k_rotated = rope(k[None], now)[0]

    # 3. Append, in codes: r* dims of a latent in int8, the others in 4 bits; of a value each head's
    # numbers with one scale.
    int8_dims, scale, int4_dims = quantize_mixed(latent, r_score)
    v_codes, v_scale = quantize_spread(v, bits)
    new = SalsStoredOurs(int8_dims, scale, int4_dims, v_codes, v_scale, k_rotated, v)
    stored = SalsStoredOurs(*appended(stored, *new))
    latents = dequantize_mixed(stored.int8_dims, stored.scale, stored.int4_dims)  # [S, r]

    # 4. Score every token on the r* leading dims. q . RoPE_j(k) = RoPE_-j(q) . k, so the query is
    # turned back, once for each block of tokens: scores then know the distance.
    position = torch.arange(S)
    block = position // blocks.tokens
    q_back = apply_rope(q, blocks.cos[block], -blocks.sin[block]).view(S, Hkv, G, D)
    k_score = (latents[:, :r_score] @ maps.up[:, :r_score].T).view(S, Hkv, 1, D)
    logits = (q_back * k_score).sum(-1)  # [S, Hkv, G]
    # Then the mean key, which latents lack.
    block = position // mean_blocks.tokens
    q_back = apply_rope(q, mean_blocks.cos[block], -mean_blocks.sin[block]).view(S, Hkv, G, D)
    logits = logits + (q_back * maps.mean.view(Hkv, 1, D)).sum(-1)
    # Each head's logits become weights, and a token's score is the sum of its weights.
    weights = (logits / D**0.5).softmax(0)
    scores = weights.sum((1, 2))  # [S]

    # 5. Select the best tokens between the sinks and the recent ones (sec. 4.4).
    is_exact = (position < n_sinks) | (position >= S - n_recent)
    n = min(n_selected, S - int(is_exact.sum()))
    chosen = scores.masked_fill(is_exact, -torch.inf).topk(n).indices

    # 6. Rebuild their keys, with the mean key, and decode their values.
    k_chosen = (latents[chosen] @ maps.up.T + maps.mean).unflatten(-1, (Hkv, D))
    v_pairs = spread_levels(stored.v_scale[chosen], bits)
    v_chosen = dequantize(stored.v_codes[chosen], v_pairs, bits, D, v.dtype)

    # 7. Rotate the rebuilt keys, each at its own position.
    k_chosen = rope(k_chosen, chosen)

    # 8, 9. Attend them, and sinks and recent tokens.
    keys = torch.cat((k_chosen, stored.k_exact[is_exact]))  # [n, Hkv, D]
    values = torch.cat((v_chosen, stored.v_exact[is_exact]))
    logits = torch.einsum("hgd,nhd->hgn", q.unflatten(0, (Hkv, G)), keys) / D**0.5
    output = torch.einsum("hgn,nhd->hgd", logits.softmax(-1), values).flatten(0, 1)
    return output, torch.cat((chosen, position[is_exact])), stored


# ---- from the fit to the maps and weights that a step takes

# Tokens for which scoring turns a query back once (ours); a multiple of a kernel's tile.
SCORE_BLOCK = 512


@functools.lru_cache
def random_rotation(*sizes: int) -> Tensor:
    """A fixed random rotation (ours), which makes the dims of a vector about equally large. Given
    several sizes, it rotates consecutive parts of a vector, each for itself: block-diagonal."""
    seeded = torch.Generator().manual_seed(0)
    parts = []
    for n in sizes:
        parts.append(torch.linalg.qr(torch.randn(n, n, generator=seeded)).Q)
    return torch.block_diag(*parts)


def rotate_values(attention: Attention, c: ModelConfig) -> None:
    """Rotates V of every head (ours): W_V becomes R^T W_V, W_O becomes W_O R."""
    linear = attention.wqkv
    wo = attention.wo
    R = random_rotation(c.head_dim).to(wo.weight.device)
    for name, parameter in list(linear.named_parameters()):
        q, k, v = parameter.float().split(attention.widths)
        v = torch.einsum("de,hd...->he...", R, v.unflatten(0, (c.n_kv_heads, -1))).flatten(0, 1)
        rotated = torch.cat((q, k, v)).to(parameter.dtype)
        setattr(linear, name, nn.Parameter(rotated, False))
    rotated = (wo.weight.float().unflatten(1, (-1, c.head_dim)) @ R).flatten(1)
    wo.weight = nn.Parameter(rotated.to(wo.weight.dtype), False)


def int4_gain(variances: Tensor, r_score: int, r: int) -> Tensor:
    """The factor for the dims of a latent beyond r*, by which both its parts need about the same
    scale (ours), since `quantize_mixed` has one for both.

    variances [Hkv*D]: the mean square of each dim of a latent. The int8 part needs the scale
    `largest / 127`, where the largest of n normal numbers is about sqrt(2 ln 2n) deviations. The
    4-bit part needs the scale at which its levels, 8 scales apart, are LEVELS_APART deviations
    apart."""
    int8_deviation = variances[:r_score].mean().sqrt()
    int4_deviation = variances[r_score:r].mean().sqrt()
    unit = int8_deviation * (math.sqrt(2 * math.log(2 * r_score)) / 127)
    gain = 8 / LEVELS_APART[4] * unit / int4_deviation.clamp(min=1e-12)
    return gain.clamp(1e-2, 1e2)


def quantize_basis(basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis [Hkv, D, r] in int8 codes (ours), and a scale for each of its rows [Hkv, D, 1], the
    same for the two dims of a RoPE pair, so that a key can be rotated before it is scaled."""
    pairs = basis.unflatten(1, (2, -1))  # [Hkv, 2, D/2, r]
    codes, scale = kernels.quantize_int8(pairs, (1, 3))
    return codes.flatten(1, 2), scale.expand(-1, 2, -1, -1).flatten(1, 2)


def spread_levels(scale: Tensor, bits: int) -> Tensor:
    """The scales [...] of `quantize_spread` as `dequantize` takes them: minimum and scale of one
    group [..., 1, 2]. A spread code stands for (2 code - top) scale, with top = 2**bits - 1. So the
    minimum is -top scale, and the step between levels is 2 scale."""
    scale = scale.float()
    return torch.stack(((1 - 2**bits) * scale, 2 * scale), -1)[..., None, :]


def leading_basis(
    c: ModelConfig, settings: SalsSettings, artifact: Artifact, name: str, device: torch.device
) -> Tensor:
    """The r leading directions U_r [Hkv*D, r] of a fitted basis. UserError if it has fewer."""
    r, _ = settings.ranks(c)
    basis = artifact[name].float().to(device)  # [Hkv*D, fitted rank], its best first
    if basis.shape[1] < r:
        fault = f"rank {r} is more than the {basis.shape[1]} directions in the artifact"
        command = f"python calibrate.py fit --method sals --max_rank {r / c.kv_dim:g}"
        raise UserError(f"{fault}; lower --rank, or make it again: {command}")
    return basis[:, :r]


def paper_basis(
    c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int, device: torch.device
) -> Tensor:
    """Layer i's U_r [Hkv*D, r] of Eq. 1: leading eigenvectors of K^T K, keys before RoPE."""
    return leading_basis(c, settings, artifact, f"{i}.key_basis", device)


def sals_layer_maps(
    c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int, device: torch.device
) -> SalsMaps:
    """Layer i's maps (docs/methods.md, "maps"): down = S_q U_r M gain and up = S_q^-1 U_r M
    gain^-1. S_q weighs the dims of a key as queries do, and U_r has the leading directions of
    S_q (k - mean). M and the gain suit a latent to its codes. `up` has the numbers that its own
    int8 codes give."""
    r, r_score = settings.ranks(c)
    U_r = leading_basis(c, settings, artifact, f"{i}.query_basis", device)
    S_q = artifact["scale"][i].to(device)[:, None]
    mix = random_rotation(r_score, r - r_score).to(device)
    gains = torch.ones(r, device=device)
    gains[r_score:] = int4_gain(artifact["query_eigenvalues"][i], r_score, r)
    up = (U_r / S_q) @ mix / gains
    codes, pair_scale = quantize_basis(up.unflatten(0, (c.n_kv_heads, -1)))
    return SalsMaps(
        down=(U_r * S_q) @ mix * gains,
        up=(codes * pair_scale).flatten(0, 1),
        mean=artifact["mean"][i].to(device),
    )


def mean_rotations(context: CacheContext) -> Rotations:
    """The mean cos and sin of each block of SCORE_BLOCK positions (ours).

    A cache may end within its last block. The mean is over the whole block even then, so that what
    a row attends does not depend on how many tokens the cache has room for."""
    n_blocks = -(-context.max_seq_length // SCORE_BLOCK)
    cos, sin = rope_tables(context.config, n_blocks * SCORE_BLOCK, context.device)
    # A mean for each block: one reduction over all might sum in an order that depends on how many
    # there are.
    mean_cos = [block.mean(0) for block in cos.split(SCORE_BLOCK)]
    mean_sin = [block.mean(0) for block in sin.split(SCORE_BLOCK)]
    return Rotations(SCORE_BLOCK, torch.stack(mean_cos), torch.stack(mean_sin))


def summed_query(q: Tensor, basis: Tensor, n_kv_heads: int) -> Tensor:
    """The one query whose logits are the sums of all heads' logits (paper, sec. 4.3): q
    [..., Hq, D] before RoPE, in the basis U_r* [Hkv*D, r*] -> [..., 1, r*]. The heads of a group
    have the same keys, so their queries are summed first."""
    of_group = q.unflatten(-2, (n_kv_heads, -1)).sum(-2)  # [..., Hkv, D]
    return of_group.flatten(-2)[..., None, :] @ basis


def kivi_layers(c: ModelConfig, settings: SalsSettings) -> set[int]:
    """The layers that have KIVI's 4-bit codes in the place of latents (ours): those of --skip. They
    attend all tokens, and would have to rebuild all keys in each step."""
    if settings.variant == "paper" or has_few_key_dims(c):
        return set()
    return skipped_layers(settings, c.n_layers)


def fold_sals(
    attention: Attention, c: ModelConfig, settings: SalsSettings, artifact: Artifact, i: int
) -> Attention:
    """Layer i's attention with what SALS folds into it: the rotation of values (ours alone), and
    rows of wqkv that make latents. Where q and k have norms there are no such rows: a norm comes
    between W_k and the key, so the cache itself makes the latent (`SalsCache.latent`)."""
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
    """Adds rows to wqkv: down^T W_k, which make a token's latent, and for --score sum
    up[:, :r*]^T (sum of a group's W_q), which make the query that scores. down, up [Hkv*D, r]. A
    bias gets the same rows. It also takes off the mean key [Hkv*D], as the latent's bias."""
    linear = attention.wqkv
    sums_queries = settings.score == "sum" and i not in skipped_layers(settings, c.n_layers)
    r, r_score = settings.ranks(c)
    if linear.bias is None and mean is not None:
        linear.bias = nn.Parameter(linear.weight.new_zeros(sum(attention.widths)), False)
    for name, parameter in list(linear.named_parameters()):  # the weight, and the bias if any
        q, k, _ = parameter.float().split(attention.widths)
        if name == "bias" and mean is not None:
            k = k - mean
        rows = [parameter, (down.T @ k).to(parameter.dtype)]
        if sums_queries:
            summed = q.unflatten(0, (c.n_kv_heads, c.group, -1)).sum(1).flatten(0, 1)
            rows.append((up[:, :r_score].T @ summed).to(parameter.dtype))
        setattr(linear, name, nn.Parameter(torch.cat(rows), False))
    attention.widths = [*attention.widths, r]
    if sums_queries:
        attention.widths.append(r_score)
    linear.out_features = sum(attention.widths)


# ---- its stores


class MixedStore(TokenStore):
    """Int8 codes of a vector's first `n_int8` dims, 4-bit codes of the others, and one scale."""

    kind = "mixed"

    def __init__(self, context: CacheContext, n_heads: int, n_tokens: int, width: int, n_int8: int):
        self.n_int8 = n_int8
        super().__init__(context, n_heads, n_tokens, width)

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        n_bytes = (self.width - self.n_int8) // 2
        return {
            "vectors": ((self.n_int8,), torch.int8),  # the int8 dims
            "scale": ((), torch.float32),
            "int4_dims": ((n_bytes,), torch.uint8),
        }

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return quantize_mixed(x, self.n_int8)

    def decode(self, int8_dims: Tensor, scale: Tensor, int4_dims: Tensor) -> Tensor:
        return dequantize_mixed(int8_dims, scale, int4_dims).to(self.context.dtype)


class ScaledStore(CodedStore):
    """Codes of 2 or 4 bits with one scale a vector (`quantize_spread`), for vectors whose numbers
    are about equally large: one group has all channels."""

    kind = "spread"
    group = math.inf  # so that CodedStore makes it the width

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return super().layout() | {"scale": ((), torch.float16)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_spread(x, self.bits)

    def min_and_scale(self, scale: Tensor) -> Tensor:
        return spread_levels(scale, self.bits)


class SalsValues(ByToken, ScaledStore):
    """The values of our step, by token: it attends few tokens, but all heads of each."""


class PaperSalsValues(ByToken, CodedStore):
    """The values of the paper's step, by token for the same reason."""


class RebuiltBasis(NamedTuple):
    """What rebuilds keys from latents, as `kernels.launch_attend_latents` takes it."""

    basis: Tensor  # [Hkv, DP, r]: in int8 codes, or in the cache's dtype
    scale: Tensor | None  # [Hkv, DP, 1] of the codes
    bias: Tensor | None  # [Hkv, DP, 1], divided by the scale


def interleaved(x: Tensor) -> Tensor:
    """x [Hkv, D, n] -> [Hkv, DP, n] as the kernel takes it: the two dims of a RoPE pair side by
    side, and zeros up to DP, a power of two."""
    return kernels.interleave_rope(x.flatten(0, 1), n_kv_heads=len(x))


class RebuiltKeys(nn.Module):
    """Keys that are not stored: each is rebuilt from its token's latent where it is read, as
    RoPE(latent basis^T + bias).

    `attend` and `Cache.past` use it as they use a store of keys. It is no `Store`, since it has no
    buffers and nothing is written to it: a cache writes to the store of latents."""

    kind = "latents"

    def __init__(self, latents: TokenStore, basis: Tensor, bias: Tensor | None):
        """latents: a store of one head, if all heads share a latent, or of Hkv; width r. basis
        [Hkv, D, r]; bias [Hkv, D], or None."""
        super().__init__()
        self.latents = latents
        self.context = latents.context
        self.basis = basis.to(self.context.dtype)
        self.bias = bias
        if self.context.kernel:
            self.kernel_basis = self.for_kernel(basis)

    # In PyTorch

    def rebuilt(self, latents: Tensor) -> Tensor:
        """Keys before RoPE [..., Hkv, n, D] of latents [..., 1 or Hkv, n, r]."""
        keys = torch.einsum("...hnr,hdr->...hnd", latents, self.basis)
        if self.bias is None:
            return keys
        return keys + self.bias[:, None]  # which may be in fp32

    def read(self, index: Tensor) -> Tensor:
        G, n = index.shape[2:]
        positions = index.flatten(2)  # [B, 1 or H, G * n]
        latents = self.latents.read(positions[:, :, None])[:, :, 0]  # [B, 1 or H, G * n, r]
        keys = self.rebuilt(latents)  # [B, Hkv, G * n, D]
        # `rope` wants heads after tokens. Here they come before, so each token has one head there.
        keys = self.context.rope(keys[..., None, :], positions)[..., 0, :]
        return keys.to(self.context.dtype).unflatten(2, (G, n))

    def read_all(self) -> Tensor:
        keys = self.rebuilt(self.latents.read_all())  # [B, Hkv, S, D]
        keys = self.context.rope_from(keys[..., None, :], 0)[..., 0, :]
        return keys.to(self.context.dtype)

    def of_row(self, row: int, length: int) -> Tensor:
        latents = self.latents.of_row(row, length)  # [length, 1 or Hkv, r]
        keys = self.rebuilt(latents.transpose(0, 1)).transpose(0, 1)  # [length, Hkv, D]
        return self.context.rope_from(keys, 0).to(self.context.dtype)

    def logits(self, q: Tensor) -> Tensor:
        return q @ self.read_all().mT

    # For the kernel

    def for_kernel(self, basis: Tensor) -> RebuiltBasis:
        """The basis [Hkv, D, r] and the bias as the kernel takes them."""
        bias = None
        if self.bias is not None:
            bias = interleaved(self.bias.float()[..., None])
        return RebuiltBasis(interleaved(basis.to(self.context.dtype)), None, bias)

    def latent_parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The latents as the kernel takes them: their numbers, or int8 codes [B, Hkv, S, *]; and of
        codes the scale [B, Hkv, S] and the 4-bit dims [B, Hkv, S, *]."""
        return self.of_each_head(self.latents.vectors), None, None

    def of_each_head(self, x: Tensor) -> Tensor:
        """x [B, 1 or Hkv, S, ...] seen as [B, Hkv, S, ...]: heads that share a latent see it."""
        Hkv = len(self.basis)
        return x.expand(-1, Hkv, *x.shape[2:])


class CodedRebuiltKeys(RebuiltKeys):
    """Keys rebuilt from latents in codes (MixedStore). For these the kernel has the basis in int8
    codes, too, so that it multiplies int8 numbers."""

    def for_kernel(self, basis: Tensor) -> RebuiltBasis:
        codes, scale = quantize_basis(basis)
        bias = self.bias.float()[..., None] / scale
        return RebuiltBasis(interleaved(codes), interleaved(scale), interleaved(bias))

    def latent_parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        codes, scale, int4_dims = self.latents.parts()
        return self.of_each_head(codes), self.of_each_head(scale), self.of_each_head(int4_dims)


# ---- the caches of both variants


class LatentCache(Cache):
    """What the caches of both variants have in common.

    Each has a `budget`, is sparse or not, and has four kinds of tokens: `latents` and `values` of
    all, `keys` rebuilt from the latents, and `exact` ones. It says how it makes a `latent` and
    scores tokens, and may write a token in one launch (`write_latent`)."""

    budget: Budget
    is_sparse: bool
    latents: TokenStore
    values: TokenStore
    keys: RebuiltKeys

    def latent(self, k: Tensor, *projected: Tensor) -> Tensor:
        """The latents [n, r] of k [n, Hkv, D] before RoPE; projected: as wqkv made them, if it
        did."""
        raise NotImplementedError

    def score(self, pos: Tensor, q: Tensor, q_rotated: Tensor, *projected: Tensor) -> Tensor:
        """A score of every token [B, 1, 1, S]. q [B, Hq, D]: before RoPE; q_rotated: after it;
        projected: what wqkv made besides the latent."""
        raise NotImplementedError

    def scored_bytes(self) -> int:
        """Bytes that scoring reads of each token."""
        raise NotImplementedError

    def prefill(
        self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor
    ) -> Tensor:
        latent = self.latent(k, *projected)
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)
        self.latents.write_prompt(row, start, latent[:, None])
        self.values.write_prompt(row, start, v)
        self.exact[0].write_prompt(row, start, k)
        self.exact[1].write_prompt(row, start, v)
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def write_latent(self, pos: Tensor, latent: Tensor, v: Tensor) -> None:
        """The latent [B, r] and values v [B, Hkv, D] of one token of each row."""
        self.latents.write_token(pos, latent[:, None])
        self.values.write_token(pos, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        # Write.
        q_rotated = self.rope(q, pos)
        self.write_latent(pos, self.latent(k, *projected), v)
        self.exact[0].write_token(pos, self.rope(k, pos))
        self.exact[1].write_token(pos, v)
        # Score and select. The sinks, which come first, are exact; the others' keys are rebuilt.
        index = None
        if self.is_sparse:
            scores = self.score(pos, q, q_rotated, *projected[1:])  # projected[0] is the latent
            index = self.select(pos, scores)[..., self.budget.n_sinks :]
        # Attend.
        return attend(
            q_rotated,
            self.keys,
            self.values,
            pos,
            index,
            exact=self.exact,
            scale=self.softmax_scale,
            kernel=self.kernel,
        )

    def select(self, pos: Tensor, scores: Tensor) -> Tensor:
        """The sinks, then the best tokens before the recent ones: an index [B, 1, 1, x + y]."""
        return kernels.select(scores, pos, self.budget, kernel=self.kernel)

    def bytes_read(self, length: int) -> int:
        """Of a sparse layer as in the paper (sec. 4.5), with the true size of values: what scores
        read of every token, then every attended token once. What a step itself computes, such as
        the queries of blocks, does not count."""
        n_sinks, n_selected, n_recent = self.budget
        recent = min(n_recent, length)
        exact_bytes = sum(store.token_bytes for store in self.exact)
        if not self.is_sparse:
            return (length - recent) * self.compressed_bytes_per_token() + recent * exact_bytes
        chosen = min(n_sinks + n_selected, length - recent)
        sinks = min(n_sinks, chosen)
        selected_bytes = (chosen - sinks) * self.compressed_bytes_per_token()
        return length * self.scored_bytes() + selected_bytes + (sinks + recent) * exact_bytes


class SalsCache(LatentCache):
    """Our step for a batch. Of every token a latent of its keys before RoPE, and its values, both
    in codes; of sinks and recent tokens exact keys and values, too.

    A sparse layer attends x + y + z tokens. Another attends all: its exact tokens are then the last
    ones alone (`attend` without an index), so it has no exact sinks."""

    def __init__(
        self,
        context: CacheContext,
        settings: SalsSettings,
        is_sparse: bool,
        maps: SalsMaps,
        blocks: Rotations,
        mean_blocks: Rotations,
    ):
        """blocks and mean_blocks: the rotations by which scores turn a query back, as
        `sals_step_ours` has them."""
        super().__init__(context)
        c = context.config
        r, r_score = settings.ranks(c)
        self.budget = settings.budget(context.max_seq_length)
        self.is_sparse = is_sparse
        self.r_score = r_score
        self.blocks = blocks
        self.mean_blocks = mean_blocks
        # Weights, not cache: for scores, and for latents where wqkv makes none (fold_sals).
        self.up = maps.up[:, :r_score].to(context.dtype).contiguous()
        self.mean = maps.mean
        self.down = maps.down.to(context.dtype) if c.qk_norm else None
        self.mean_latent = (maps.mean @ maps.down).to(context.dtype)
        # cache
        self.latents = MixedStore(context, 1, context.max_seq_length, r, r_score)
        self.values = SalsValues(
            context, c.n_kv_heads, context.max_seq_length, c.head_dim, settings.value_bits(c)
        )
        basis = maps.up.unflatten(0, (c.n_kv_heads, -1))
        self.keys = CodedRebuiltKeys(self.latents, basis, maps.mean.view(c.n_kv_heads, -1))
        n_sinks = self.budget.n_sinks if is_sparse else 0
        self.exact = exact_stores(context, n_sinks, self.budget.n_recent)

    def latent(self, k: Tensor, *projected: Tensor) -> Tensor:
        """The latents [n, r]: what wqkv made of the tokens, or made here of k [n, Hkv, D] before
        RoPE."""
        if projected:
            return projected[0]
        return k.flatten(1) @ self.down - self.mean_latent  # (k - mean) down

    def score(self, pos: Tensor, q: Tensor, q_rotated: Tensor, *projected: Tensor) -> Tensor:
        """A score of every token [B, 1, 1, S], the sum over heads of their attention weights
        (ours), from the r* leading dims of latents.

        q [B, Hq, D]: before RoPE, which --score sum uses; q_rotated: after it. projected: the query
        that wqkv made for --score sum."""
        # A latent-space query for each block of tokens, and the mean key's logit for each block.
        queries, query_scale, mean_logit = kernels.block_queries(
            q_rotated,
            self.blocks.cos,
            self.blocks.sin,
            self.up,
            self.mean,
            coded=True,
            kernel=self.kernel,
        )
        if self.mean_blocks.tokens < self.blocks.tokens:  # but for each token, where it is large
            mean_logit = mean_logits(
                q_rotated, self.mean_blocks.cos, self.mean_blocks.sin, self.mean
            )
        scores = kernels.block_scores(
            queries,
            self.latents.vectors,
            self.latents.scale,
            pos,
            self.softmax_scale,
            block=self.blocks.tokens,
            offset=mean_logit,
            run=self.mean_blocks.tokens,
            query_scale=query_scale,
            kernel=self.kernel,
        )
        return scores.unsqueeze(2)

    def write_latent(self, pos: Tensor, latent: Tensor, v: Tensor) -> None:
        kernels.append(pos, self.latents, latent, self.values, v, kernel=self.kernel)

    def scored_bytes(self) -> int:
        return self.r_score * self.latents.vectors.itemsize + self.latents.scale.itemsize


class SumScoreSalsCache(SalsCache):
    """Our stores, with the paper's scores (`--score sum`)."""

    def score(self, pos: Tensor, q: Tensor, q_rotated: Tensor, *projected: Tensor) -> Tensor:
        """The sums of all heads' logits, without RoPE. The mean key, which would add the same to
        every token's score, is left out."""
        if projected:
            query = projected[0][:, None]  # [B, 1, r*]
        else:
            query = summed_query(q, self.up, self.config.n_kv_heads)
        return kernels.scores(
            query,
            self.latents.vectors,
            self.latents.scale,
            pos,
            self.softmax_scale,
            "each",
            kernel=self.kernel,
        )


class PaperSalsCache(LatentCache):
    """The published step for a batch: of every token a latent of its keys before RoPE, in 16 bits,
    and its values in codes of groups. The x first and z last tokens are exact, too (ours; see
    `sals_step`)."""

    def __init__(self, context: CacheContext, settings: SalsSettings, is_sparse: bool, U_r: Tensor):
        """U_r [Hkv*D, r]: of paper_basis. A layer that is not sparse attends every token."""
        super().__init__(context)
        c = context.config
        r, r_score = settings.ranks(c)
        self.budget = settings.budget(context.max_seq_length)
        self.is_sparse = is_sparse
        self.r_score = r_score
        # weights, not cache
        self.U = U_r.to(context.dtype)
        self.U_score = self.U[:, :r_score].contiguous()
        # cache
        self.latents = TokenStore(context, 1, context.max_seq_length, r)
        self.values = PaperSalsValues(
            context, c.n_kv_heads, context.max_seq_length, c.head_dim, settings.value_bits(c)
        )
        basis = self.U.unflatten(0, (c.n_kv_heads, -1))
        self.keys = RebuiltKeys(self.latents, basis, bias=None)
        n_sinks = self.budget.n_sinks if is_sparse else 0
        self.exact = exact_stores(context, n_sinks, self.budget.n_recent)

    def latent(self, k: Tensor, *projected: Tensor) -> Tensor:
        """The latents [n, r]: what wqkv made of the tokens, or made here of k [n, Hkv, D] before
        RoPE."""
        if projected:
            return projected[0]
        return k.flatten(1) @ self.U

    def score(self, pos: Tensor, q: Tensor, q_rotated: Tensor, *projected: Tensor) -> Tensor:
        """A score of every token [B, 1, 1, S]: the sum of all heads' logits, without RoPE (sec.
        4.3).

        q [B, Hq, D]: before RoPE; projected: the query that wqkv made of it."""
        if projected:
            query = projected[0][:, None]  # [B, 1, r*]
        else:
            query = summed_query(q, self.U_score, self.config.n_kv_heads)
        return kernels.scores(
            query, self.latents.vectors, None, pos, self.softmax_scale, "each", kernel=self.kernel
        )

    def scored_bytes(self) -> int:
        return self.r_score * self.latents.vectors.itemsize


def sals_caches(
    model: Llama, settings: SalsSettings, context: CacheContext, artifact: Artifact
) -> list[Cache]:
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
    mean_blocks = blocks
    if c.qkv_bias:  # the mean key is large then, and turns within a block
        mean_blocks = Rotations(1, context.cos, context.sin)
    caches = []
    for i in range(c.n_layers):
        if i in kivi:
            caches.append(KiviCache(context, KiviSettings(4, 32)))
        else:
            maps = sals_layer_maps(c, settings, artifact, i, context.device)
            caches.append(kind(context, settings, i not in skipped, maps, blocks, mean_blocks))
    return caches


def sals_shapes(c: ModelConfig) -> ArtifactShapes:
    found = {}
    for name in ("scale", "mean", "query_eigenvalues", "key_eigenvalues"):  # "scale" is S_q
        found[name] = (float, c.n_layers, c.kv_dim)
    for i in range(c.n_layers):
        found[f"{i}.query_basis"] = (float, c.kv_dim, None)
        found[f"{i}.key_basis"] = (float, c.kv_dim, None)
    return found


# --------------------------------------------------------------------------------------------- LRQK


@dataclass
class LrqkSettings:
    """LRQK: low-rank attention over a mixed cache (arXiv 2510.23649). Few bytes on the GPU."""

    variant: str = setting(
        "ours", "Algorithms 1 and 2 as published, or a closed form (ours)", VARIANTS
    )
    rank: int = setting(0, "r: dims of A_Q and A_K, for each KV head (0: 32, or D if less)")
    k: int = setting(2048, "tokens that each KV head selects by its proxy scores")
    recent: int = setting(
        64, "lite tokens: the last ones, always attended, on the GPU", within="[1, 1e9]"
    )
    slots: float = setting(
        1.0, "hot slots on the GPU, in multiples of k (> 1: an LRU cache; 0: fetch all k)"
    )

    def budget(self, max_seq_length: int) -> Budget:
        if self.slots != 0 and not 1 <= self.slots < float("inf"):
            wanted = "give 0 (no hit/miss) or a multiple of k from 1 up"
            raise UserError(f"--slots {self.slots}: {wanted}")
        return fit_budget(max_seq_length, 0, self.k, self.recent)


LRQK_STEPS = 2  # max_iter of both algorithms; the paper's tol would be a wait for the host


class LrqkFactors(NamedTuple):
    """A prompt's factors of Algorithm 1: Q ~ A_Q B_Q with A_Q = Q W_Q, and K alike."""

    w_q: Tensor  # [Hkv, D, r]
    w_k: Tensor  # [Hkv, D, r]
    b_q: Tensor  # [Hkv, r, D]
    b_k: Tensor  # [Hkv, r, D]


def lrqk_prompt(gram_q: Tensor, gram_k: Tensor, columns: Tensor, r: int) -> LrqkFactors:
    """A prompt's factors as published (Algorithm 1, all lambda = 1), after LRQK_STEPS rounds.

    A_Q is always Q W_Q for some W_Q, and A_K is K W_K. So the rounds find W_Q and W_K, for which
    they need Q and K only as G_Q = Q^T Q and G_K = K^T K: gram_q, gram_k [Hkv, D, D]. columns
    [Hkv, D]: the sums of |Q| and |K|."""
    # 1. A_Q and A_K start as the r columns of the largest sums ("topcol").
    eye = torch.eye(columns.shape[-1], dtype=columns.dtype, device=columns.device)
    w_q = eye[columns.topk(r).indices].mT
    w_k = w_q

    for _ in range(LRQK_STEPS):
        # 3, 4. B_Q and B_K, by least squares.
        b_q = lrqk_base(w_q, gram_q)
        b_k = lrqk_base(w_k, gram_k)
        # 5. A_K makes ||Q K^T - A_Q A_K^T||^2 + ||K - A_K B_K||^2 least, which W_K does with
        # W_K (A_Q^T A_Q + B_K B_K^T) = G_Q W_Q + B_K^T.
        left = w_q.mT @ gram_q @ w_q + b_k @ b_k.mT
        right = gram_q @ w_q + b_k.mT
        w_k = spd_solve(left, right.mT).mT
        # 6. A_Q likewise, with the new A_K.
        left = w_k.mT @ gram_k @ w_k + b_q @ b_q.mT
        right = gram_k @ w_k + b_q.mT
        w_q = spd_solve(left, right.mT).mT

    # Fitted once more to the final A_Q and A_K, as in the released code.
    return LrqkFactors(w_q, w_k, lrqk_base(w_q, gram_q), lrqk_base(w_k, gram_k))


def lrqk_base(w: Tensor, gram: Tensor) -> Tensor:
    """B [..., r, D] that makes ||X - A B||^2 least (Eq. 6), where A = X W, w [..., D, r], and gram
    is X^T X [..., D, D]."""
    return spd_solve(w.mT @ gram @ w, w.mT @ gram)


def lrqk_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: tuple,
    bases: tuple,
    omega: Tensor,
    n_selected: int,
    n_recent: int,
) -> tuple[Tensor, Tensor, tuple, tuple]:
    """One decode step of LRQK as published (Algorithm 2, whose lines number the steps), for one KV
    head.

    q [G, D], k and v [D]: after RoPE. stored: A_K [S - 1, r], K and V [S - 1, D]. bases: B_Q and
    B_K [r, D]. omega: the tokens that the last step attended. n_selected: the paper's k. -> the
    output [G, D], the tokens attended, what is stored now, and the new bases."""
    b_q, b_k = bases
    a_k, keys, values = stored

    # 1-7. The new token's proxies q^ and k^, and a step of the bases towards it.
    q_hat, k_hat, b_q, b_k = lrqk_refit(q, k[None], b_q, b_k, a_k[omega], keys[omega])

    # 8. Append.
    a_k, keys, values = appended(stored, k_hat[0], k, v)

    # 9. Select the best by q^ . k^ of the tokens that are not recent. A group's queries choose
    # together (ours).
    n_old = max(0, len(a_k) - n_recent)
    logits = q_hat @ a_k[:n_old].mT / q.shape[-1] ** 0.5  # [G, n_old]
    scores = logits.log_softmax(-1).amax(0)
    chosen = scores.topk(min(n_selected, n_old)).indices

    # 10-13. What is chosen and was not in omega is fetched from the CPU. The new token goes there,
    # too.
    omega = torch.cat((chosen, torch.arange(n_old, len(a_k))))

    # 14. Attend omega.
    logits = q @ keys[omega].mT / q.shape[-1] ** 0.5
    output = logits.softmax(-1) @ values[omega]
    return output, omega, (a_k, keys, values), (b_q, b_k)


def lrqk_step_ours(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: tuple,
    w_q: Tensor,
    w_k: Tensor,
    n_selected: int,
    n_recent: int,
) -> tuple[Tensor, Tensor, tuple]:
    """The same step as it runs by default, for one KV head.

    q [G, D], k and v [D]: after RoPE. stored: A_K [S - 1, r], K and V [S - 1, D]. w_q, w_k [D, r]:
    the prompt's best projections (`lrqk_optimum`). No step changes them, so a step needs nothing of
    the last one's omega before it selects. -> the output [G, D], the tokens attended, and what is
    stored now."""
    # 1-7. The new token's proxies are products. 8. Append.
    q_hat = q @ w_q
    a_k, keys, values = appended(stored, k @ w_k, k, v)

    # 9. Select the best of the tokens that are not recent.
    n_old = max(0, len(a_k) - n_recent)
    logits = q_hat @ a_k[:n_old].mT / q.shape[-1] ** 0.5  # [G, n_old]
    scores = logits.log_softmax(-1).amax(0)
    chosen = scores.topk(min(n_selected, n_old)).indices

    # 10-13. What is chosen and is in no slot on the GPU is fetched, into a slot that no hit needs.
    omega = torch.cat((chosen, torch.arange(n_old, len(a_k))))

    # 14. Attend omega.
    logits = q @ keys[omega].mT / q.shape[-1] ** 0.5
    output = logits.softmax(-1) @ values[omega]
    return output, omega, (a_k, keys, values)


# ---- what these use


def lrqk_refit(
    q: Tensor, k: Tensor, b_q: Tensor, b_k: Tensor, a_near: Tensor, k_near: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Algorithm 2, lines 1 to 7, all lambda = 1 -> q^ [..., G, r], k^ [..., 1, r], and the new B_Q
    and B_K.

    q [..., G, D], k [..., 1, D]; b_q, b_k [..., r, D]: B_Q and B_K. a_near [..., n, r], k_near
    [..., n, D]: A_K and K of omega; a_near is zero where there is no token. The G queries share
    B_Q, so Eq. 9 to 11 sum over them."""
    # With s = q . k, the best q^ for a given k^ makes least
    #     ||q^ B_Q - q||^2 + ||q^ A_near^T - q K_near^T||^2 + (q^ . k^ - s)^2,
    # which is q^ (left_q + k^^T k^) = right_q + s k^. The best k^ for a given q^ makes least
    #     ||k^ B_K - k||^2 + (q^ . k^ - s)^2, summed over the G queries.
    s = q @ k.mT  # [..., G, 1]
    left_k = b_k @ b_k.mT
    right_k = k @ b_k.mT
    left_q = b_q @ b_q.mT + a_near.mT @ a_near
    right_q = q @ b_q.mT + (q @ k_near.mT) @ a_near

    k_hat = spd_solve(left_k, right_k.mT).mT  # at first without q^
    for _ in range(LRQK_STEPS):
        q_hat = spd_solve(left_q + k_hat.mT @ k_hat, (right_q + s * k_hat).mT).mT
        right = right_k + (s * q_hat).sum(-2, keepdim=True)
        k_hat = spd_solve(left_k + q_hat.mT @ q_hat, right.mT).mT
    return q_hat, k_hat, lrqk_gradient_step(b_q, q_hat, q), lrqk_gradient_step(b_k, k_hat, k)


def lrqk_gradient_step(b: Tensor, x_hat: Tensor, x: Tensor) -> Tensor:
    """B [..., r, D] after one gradient step on ||x^ B - x||^2, of the length that makes it least
    (Eq. 10, 11): x_hat [..., G, r], x [..., G, D]. If G = 1 then x^ B is x afterwards, and B has
    changed as little as it can."""
    residual = x_hat @ b - x
    gradient = x_hat.mT @ residual
    moved = x_hat @ gradient  # by this x^ B moves in a step of length 1
    along = (residual * moved).sum((-2, -1), keepdim=True)
    squared = moved.square().sum((-2, -1), keepdim=True).clamp(min=1e-30)
    return b - along / squared * gradient


def spd_solve(m: Tensor, rhs: Tensor) -> Tensor:
    """m^-1 rhs for symmetric positive m [..., n, n], rhs [..., n, j].

    By Gauss-Jordan elimination in plain operations, since a CUDA graph cannot capture cuSOLVER. In
    fp64 a small ridge is enough."""
    n = m.shape[-1]
    eye = torch.eye(n, dtype=m.dtype, device=m.device)
    x = torch.cat((add_ridge(m, 1e-10), rhs), -1)
    for i in range(n):
        row = x[..., i : i + 1, :] / x[..., i : i + 1, i : i + 1]
        # Row i becomes `row`; the others lose column i.
        x = x - (x[..., i : i + 1] - eye[:, i : i + 1]) * row
    return x[..., n:]


def add_ridge(m: Tensor, fraction: float) -> Tensor:
    """m [..., n, n], to whose diagonal this fraction of its mean (and a trifle) is added."""
    ridge = fraction * m.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] + 1e-30
    return m + ridge * torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)


def lrqk_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [S, Hkv, G, D] -> X^T X with a ridge [Hkv, D, D], and the sum of |X| [Hkv, D]; fp64."""
    if not x.isfinite().all():
        fault = "the queries or keys of this prompt are not finite"
        raise UserError(f"{fault}; the weights are damaged")
    gram = 0.0
    total = 0.0
    for part in x.split(4096):  # an fp64 copy of few tokens at a time
        rows = part.double().permute(1, 0, 2, 3).flatten(1, 2)  # [Hkv, tokens * G, D]
        gram = gram + rows.mT @ rows
        total = total + rows.abs().sum(1)
    return add_ridge(gram, 1e-6), total


def lrqk_optimum(gram_q: Tensor, gram_k: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """W_Q, W_K [Hkv, D, r] that make ||Q K^T - A_Q A_K^T|| least (ours), of Q^T Q and K^T K.

    Q = O_Q R_Q with O_Q orthonormal and R_Q upper triangular, and K alike. So the SVD of Q K^T is
    that of the small matrix R_Q R_K^T, but for O_Q and O_K. Its singular values are divided evenly:
    A_Q^T A_Q and A_K^T A_K are the same diagonal matrix."""
    upper_q = torch.linalg.cholesky(add_ridge(gram_q, 1e-10)).mT  # R_Q: R_Q^T R_Q = Q^T Q
    upper_k = torch.linalg.cholesky(add_ridge(gram_k, 1e-10)).mT
    u, s, vt = torch.linalg.svd(upper_q @ upper_k.mT)
    root = s[..., None, :r].sqrt()
    w_q = torch.linalg.solve_triangular(upper_q, u[..., :r] * root, upper=True)
    w_k = torch.linalg.solve_triangular(upper_k, vt.mT[..., :r] * root, upper=True)
    return w_q, w_k


# ---- hot slots


def take_slots(
    index: Tensor, live: Tensor, slot_of: Tensor, pos_of: Tensor, stamp: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Gives every selected token a hot slot (ours). A token that has one already is a hit, and
    keeps it. The others miss, and take slots that no hit needs. -> the slots [B, Hkv, k], and which
    tokens miss [B, Hkv, k].

    index [B, Hkv, k]: positions, distinct where `live` [B, Hkv, k]. Where `live` is False there is
    no token; the entry is then any position without a slot, and the slot it is given is not used.
    step: this step's number. Three tables are changed:
        slot_of [B, Hkv, S]   of a position: its slot, or -1
        pos_of  [B, Hkv, C]   of a slot: the position in it, or -1
        stamp   [B, Hkv, C]   of a slot: the last step that used it"""
    slot_of_hit = slot_of.gather(-1, index).long()  # -1 for a miss
    hit = slot_of_hit >= 0

    # 1. Stamp the slots of hits. (Misses stamp a spare slot behind the last, which is cut off.)
    spare = stamp.shape[-1]
    stamped_slot = torch.where(hit, slot_of_hit, spare)
    stamped = F.pad(stamp, (0, 1)).scatter(-1, stamped_slot, step.expand_as(stamped_slot))
    stamp.copy_(stamped[..., :-1])

    # 2. The n-th miss takes the n-th of the other slots. There are enough: C >= k.
    n = misses_so_far(hit)  # of a miss its number, from 1 on
    slot_of_miss = slots_for_misses(stamp, step, index.shape[-1]).gather(-1, n.long()).long()
    slot = torch.where(hit, slot_of_hit, slot_of_miss)  # all distinct

    # 3. The tables forget what is evicted, and learn what comes.
    miss = live & ~hit
    previous = pos_of.gather(-1, slot)  # the position in each of these slots so far, or -1
    # Clear the slots of evicted tokens. A token that evicts nothing clears its own slot, and the
    # next line sets that again: so the shapes stay fixed.
    evicted = torch.where(miss & (previous >= 0), previous, index)
    slot_of.scatter_(-1, evicted, -1)
    slot_of.scatter_(-1, index, torch.where(live, slot, -1).int())
    pos_of.scatter_(-1, slot, torch.where(live, index, previous).int())
    stamp.scatter_(-1, slot, torch.where(live, step, stamp.gather(-1, slot)))
    return slot, miss


def misses_so_far(hit: Tensor) -> Tensor:
    """How many of the entries up to each, itself included, are no hits: hit [..., k] -> [..., k]
    int32.

    The sum is over one number more, a zero in front. With it Inductor does not fuse the sum with
    the gather that gave `hit`, in which case all would wait for the sum."""
    return F.pad(~hit, (1, 0)).cumsum(-1, dtype=torch.int32)[..., 1:]


def slots_for_misses(stamp: Tensor, step: Tensor, k: int) -> Tensor:
    """The slots in the order in which misses take them, [..., 1 + C]: entry n is for the n-th miss,
    from 1 on, and entry 0 is for none. Slots that this step has stamped are hits', and come last.

    stamp [..., C]; k: how many tokens are selected, at most C."""
    if stamp.shape[-1] > k:  # some slots stay as they are: the longest unused go first
        return F.pad(stamp.argsort(dim=-1, stable=True), (1, 0))
    # With C = k slots the misses may take all that are no hits', so any order will do: the n-th
    # free slot is entry n. (Slots of hits all write to entry 0.)
    is_free = stamp < step
    n = torch.where(is_free, is_free.cumsum(-1, dtype=torch.int32), 0).long()
    slots = torch.arange(stamp.shape[-1], dtype=torch.int32, device=stamp.device).expand_as(n)
    return F.pad(torch.zeros_like(slots), (1, 0)).scatter(-1, n, slots)


# ---- the cache


def host_memory(context: CacheContext, *shape: int, dtype: torch.dtype) -> Tensor:
    """Zeroed host memory [B, *shape]. On CUDA it is pinned memory that is seen as a CUDA tensor: a
    kernel that is given its address reads and writes it over the bus, as if it lay on the GPU, and
    inside a CUDA graph, too."""
    if context.device.type != "cuda":
        return context.zeros(*shape, dtype=dtype)
    pinned = torch.zeros(context.batch_size, *shape, dtype=dtype, pin_memory=True)
    data = (pinned.data_ptr(), False)
    # PyTorch takes any object that says where its bytes are, and keeps it alive: with it `memory`.
    interface = {"shape": (pinned.nbytes,), "typestr": "|u1", "data": data, "version": 3}
    view = SimpleNamespace(__cuda_array_interface__=interface, memory=pinned)
    return torch.as_tensor(view, device=context.device).view(dtype).view(pinned.shape)


class HostStore(TokenStore):
    """Numbers as they are, in host memory (`host_memory`). A prompt's tokens are written and read
    by a tensor of positions, so that kernels move them. A slice would be copied by the driver,
    which does not know this memory as the GPU's."""

    def __init__(self, context: CacheContext, n_heads: int, n_tokens: int, width: int):
        super().__init__(context, n_heads, n_tokens, width)
        self.token_bytes = 0  # on the device

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return host_memory(self.context, self.n_heads, self.n_tokens, *shape, dtype=dtype)

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        positions = self.context.positions[start : start + len(x)]
        self.vectors[row, :, positions] = x.transpose(0, 1)

    def of_row(self, row: int, length: int) -> Tensor:
        positions = self.context.positions[:length]
        return self.vectors[row, :, positions].transpose(0, 1)


class LrqkCache(Cache):
    """Our step for a batch. Host memory has K and V of every token, side by side. The GPU has A_K
    of every token, by which a step selects; K and V of selected tokens, in C hot slots; and exact K
    and V of the recent ones."""

    def __init__(self, context: CacheContext, settings: LrqkSettings):
        super().__init__(context)
        c = context.config
        n_heads = c.n_kv_heads
        S = context.max_seq_length
        if settings.rank > c.head_dim:
            wanted = f"r must be 1 to {c.head_dim}, the head dim (or 0)"
            raise UserError(f"--rank {settings.rank}: {wanted}")
        self.budget = settings.budget(S)
        self.rank = settings.rank or min(32, c.head_dim)
        self.reuse = settings.slots > 0  # of what is in slots; else every step fetches all anew
        self.n_slots = self.budget.n_selected
        if self.reuse:
            wanted = settings.slots * self.budget.n_selected
            self.n_slots = round(min(wanted, S - self.budget.n_recent))
        self.kv = HostStore(context, n_heads, S, 2 * c.head_dim)
        self.add_table("a_k", n_heads, S, self.rank, dtype=context.dtype)
        # A prompt's W_Q^T and W_K^T; in PaperLrqkCache B_Q and B_K.
        self.add_table("basis_q", n_heads, self.rank, c.head_dim, dtype=torch.float32)
        self.add_table("basis_k", n_heads, self.rank, c.head_dim, dtype=torch.float32)
        self.exact = exact_stores(context, n_sinks=0, n_recent=self.budget.n_recent)
        # The hot slots: a key and its value in each, and the tables of `take_slots`.
        self.add_table("hot_vectors", n_heads, self.n_slots, 2 * c.head_dim, dtype=context.dtype)
        self.add_table("slot_of", n_heads, S, fill=-1)
        self.add_table("pos_of", n_heads, self.n_slots, fill=-1)
        self.add_table("stamp", n_heads, self.n_slots, fill=-1)
        self.add_table("step", 1, 1)
        self.add_table("counts", 2, dtype=torch.int64)  # tokens selected, tokens missed

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        k, v = self.kv.of_row(row, length).chunk(2, -1)
        return self.exact[0].overlay(row, k), self.exact[1].overlay(row, v)

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop = start + len(q)
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)
        # A prompt decides the projections; what follows it is projected by them.
        is_prompt = start == 0
        if is_prompt:
            w_q, w_k = self.factorise(row, q, k)
        else:
            w_q, w_k = self.prompt_projections(row)
        # Write.
        self.kv.write_prompt(row, start, torch.cat((k, v), -1))
        self.exact[0].write_prompt(row, start, k)
        self.exact[1].write_prompt(row, start, v)
        self.a_k[row, :, start:stop] = (k.transpose(0, 1).float() @ w_k).to(self.a_k.dtype)
        # Empty the hot slots, and fetch what the last token selects: the next step finds it there.
        self.slot_of[row] = -1
        self.pos_of[row] = -1
        self.stamp[row] = -1
        one_row = slice(row, row + 1)
        last = torch.full((1,), stop - 1, device=q.device)
        q_hat = q[-1:].unflatten(1, (self.config.n_kv_heads, -1)).float() @ w_q
        self.fetch(one_row, last, self.best_tokens(one_row, last, q_hat))
        if is_prompt:
            self.counts[row] = 0
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def prompt_moments(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A prompt's q [S, Hq, D] and k [S, Hkv, D] -> Q^T Q and K^T K [Hkv, D, D], and the sum of
        |Q| and |K| over all tokens [Hkv, D]. They are on the CPU, where LAPACK factorises matrices
        this small in a millisecond; cuSOLVER takes tens of them."""
        gram_q, sum_q = lrqk_moments(q.unflatten(1, (self.config.n_kv_heads, -1)))
        gram_k, sum_k = lrqk_moments(k[:, :, None])
        return gram_q.cpu(), gram_k.cpu(), sum_q.cpu() + sum_k.cpu()

    def factorise(self, row: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """W_Q, W_K [Hkv, D, r] fp32 of a prompt's q [S, Hq, D], k [S, Hkv, D]. They are stored for
        later tokens, too."""
        gram_q, gram_k, _ = self.prompt_moments(q, k)
        w_q, w_k = lrqk_optimum(gram_q, gram_k, self.rank)
        self.basis_q[row] = w_q.mT
        self.basis_k[row] = w_k.mT
        return w_q.float().to(q.device), w_k.float().to(q.device)

    def prompt_projections(self, row: int) -> tuple[Tensor, Tensor]:
        """W_Q, W_K [Hkv, D, r] fp32 for tokens after the prompt."""
        return self.basis_q[row].mT, self.basis_k[row].mT

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = self.context.rows
        q = self.rope(q, pos).unflatten(1, (self.config.n_kv_heads, -1))  # [B, Hkv, G, D]
        k = self.rope(k, pos)
        # Project, and write.
        q_hat, k_hat = self.project(pos, q.float(), k[:, :, None].float())
        self.a_k[rows, :, pos] = k_hat[:, :, 0].to(self.a_k.dtype)
        self.kv.write_token(pos, torch.cat((k, v), -1))
        self.exact[0].write_token(pos, k)
        self.exact[1].write_token(pos, v)
        # Select, and fetch what is in no slot. This stamps the slots of all that is selected.
        self.step += 1
        index = self.select(pos, q_hat)
        self.fetch(slice(None), pos, index)
        # Attend what lies in the slots of this stamp, and the recent tokens.
        keys, values = self.hot_vectors.chunk(2, -1)
        return kernels.attend_plain(
            q.flatten(1, 2),
            keys,
            values,
            self.stamp == self.step,
            pos,
            exact=exact_tensors(self.exact),
            scale=self.softmax_scale,
            kernel=self.kernel,
        )

    def project(self, pos: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The proxies q^ [B, Hkv, G, r] and k^ [B, Hkv, 1, r] of the new token's q [B, Hkv, G, D]
        and k [B, Hkv, 1, D]; fp32."""
        w_q = self.basis_q.mT  # the tables hold W^T here; PaperLrqkCache holds B in them
        w_k = self.basis_k.mT
        return q @ w_q, k @ w_k

    def select(self, pos: Tensor, q_hat: Tensor) -> Tensor:
        """q_hat [B, Hkv, G, r] -> the best tokens before the recent ones, an index
        [B, Hkv, 1, k]."""
        return self.best_tokens(slice(None), pos, q_hat)

    def best_tokens(self, rows: slice, pos: Tensor, q_hat: Tensor) -> Tensor:
        """`select` for some of the rows: pos and q_hat are theirs."""
        # The largest weight that a query of the group gives, among the tokens that are not recent.
        newest_old = pos - self.budget.n_recent
        scores = kernels.scores(
            q_hat.flatten(1, 2),
            self.a_k[rows],
            None,
            newest_old,
            self.softmax_scale,
            "largest",
            kernel=self.kernel,
        )
        return kernels.select(scores.unsqueeze(2), pos, self.budget, kernel=self.kernel)

    def fetch(self, rows: slice, pos: Tensor, index: Tensor) -> None:
        """Brings the tokens of an index [B, Hkv, 1, k] into hot slots of these rows, if they are in
        none yet."""
        index = index[:, :, 0]
        live = index >= 0
        # Where the index names no token, take_slots wants one that is in no slot. The newest is
        # in none, since it is a recent one.
        index = index.where(live, pos[:, None, None]).long()
        if not self.reuse:  # forget what is there, so that all tokens miss
            self.slot_of[rows] = -1
        slot, miss = take_slots(
            index,
            live,
            self.slot_of[rows],
            self.pos_of[rows],
            self.stamp[rows],
            self.step[rows],
        )
        kernels.fetch_rows(
            self.kv.vectors[rows], index, slot, miss, self.hot_vectors[rows], kernel=self.kernel
        )
        self.counts[rows] += torch.stack((live, miss), 1).sum((2, 3))

    def bytes_host(self) -> int:
        return self.kv.vectors.nbytes

    def bytes_read(self, length: int) -> int:
        """Of the device: A_K of every token that is not recent; K and V of the selected tokens and
        the recent ones; stamps of all slots; slot and position of the selected tokens; the
        bases."""
        c = self.config
        itemsize = self.context.dtype.itemsize
        recent = min(self.budget.n_recent, length)
        chosen = min(self.budget.n_selected, length - recent)
        a_k = (length - recent) * self.rank * itemsize
        kv = (chosen + recent) * 2 * c.head_dim * itemsize
        tables = self.n_slots + 2 * chosen + 2 * self.rank * c.head_dim  # of 4 bytes
        return (a_k + kv + tables * 4) * c.n_kv_heads

    def miss_rate(self, rows: int | None = None) -> float:
        """Since the prompt, the tokens that were fetched over those that were selected."""
        selected, missed = self.counts[:rows].sum(0).tolist()
        return missed / max(1, selected)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        # These two tables have an entry for each position, of which the row uses the first.
        state["a_k"] = self.a_k[row, :, :length]
        state["slot_of"] = self.slot_of[row, :, :length]
        return state


class PaperLrqkCache(LrqkCache):
    """The published step for a batch: Algorithm 1 factorises prompts, and Algorithm 2 moves the
    bases in each step.

    A_Q N and A_K N^-T give the same scores for every invertible N. Ours takes the N that suits
    bf16. Here it is Algorithm 1's, since the steps of Algorithm 2 depend on it."""

    def factorise(self, row: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        gram_q, gram_k, columns = self.prompt_moments(q, k)
        factors = lrqk_prompt(gram_q, gram_k, columns, self.rank)
        self.basis_q[row] = factors.b_q
        self.basis_k[row] = factors.b_k
        return factors.w_q.float().to(q.device), factors.w_k.float().to(q.device)

    def prompt_projections(self, row: int) -> tuple[Tensor, Tensor]:
        """W_Q and W_K by least squares of x ~ (x W) B, on B_Q and B_K as they are now: they have
        moved since the prompt."""
        b_q = self.basis_q[row].double()
        b_k = self.basis_k[row].double()
        w_q = spd_solve(b_q @ b_q.mT, b_q).mT
        w_k = spd_solve(b_k @ b_k.mT, b_k).mT
        return w_q.float(), w_k.float()

    def project(self, pos: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # A_K and K of what the last step attended: hot slots, and the ring, where the new token has
        # not taken the place of the oldest yet.
        omega = self.omega(pos - 1)
        where = omega.clamp(min=0)[..., None].long().expand(-1, -1, -1, self.rank)
        a_near = self.a_k.gather(2, where).masked_fill(omega[..., None] < 0, 0)
        hot_keys, _ = self.hot_vectors.chunk(2, -1)
        k_near = torch.cat((hot_keys, self.exact[0].read_all()), 2)
        # In fp64, since A_Q and A_K may be of very different size: in fp32 the solves would need a
        # ridge so large that it changes the selection.
        q_hat, k_hat, b_q, b_k = lrqk_refit(
            q.double(),
            k.double(),
            self.basis_q.double(),
            self.basis_k.double(),
            a_near.double(),
            k_near.double(),
        )
        self.basis_q.copy_(b_q)
        self.basis_k.copy_(b_k)
        return q_hat.float(), k_hat.float()

    def omega(self, pos: Tensor) -> Tensor:
        """The positions that the step at pos has attended: those in hot slots, then the recent
        ones, [B, Hkv, C + n_recent]; negative for none."""
        recent = self.exact[0].positions(pos)[:, None].expand(-1, self.config.n_kv_heads, -1)
        return torch.cat((self.pos_of.where(self.stamp == self.step, -1), recent), -1)


def lrqk_cache(context: CacheContext, settings: LrqkSettings) -> LrqkCache:
    if settings.variant == "paper":
        return PaperLrqkCache(context, settings)
    return LrqkCache(context, settings)


# ------------------------------------------------------------------------------------------ EliteKV


@dataclass
class EliteSettings:
    """EliteKV: a few rotated pairs a head, all else of K and V in one latent (arXiv 2503.01586)."""

    r: int = setting(
        0, "r: elite pairs of each head, which stay rotated (0: as calibrated or uptrained)"
    )
    d_ckv: int = setting(0, "d_ckv: dims of the latent of all else (0: as calibrated)")
    pairs: str = setting("elite", "which pairs are rotated", ("elite", "uniform", "contribution"))
    lrd: str = setting(
        "joint", "J-LRD, one latent of K and V, or S-LRD, one of each", ("joint", "separate")
    )


def elitekv_step(
    q: Tensor, k: Tensor, latent: Tensor, stored: tuple, b_k: Tensor, b_v: Tensor
) -> tuple[Tensor, tuple]:
    """One decode step of EliteKV as published (sec. 3.2, Eq. 2), for one sequence.

    Each head has its 2r elite dims first. q [Hq, D] and k [Hkv, 2r]: elite dims rotated; latent
    [d_ckv]: c = u A of all else -> output [Hq, D]. stored: elite keys [S - 1, Hkv, 2r] and latents
    [S - 1, d_ckv]. b_k [Hkv, D - 2r, d_ckv] and b_v [Hkv, D, d_ckv]: B^T."""
    Hkv = len(b_k)
    D = q.shape[-1]

    # 1. Append: the elite keys of each head, and one latent for all else of K and V.
    elite, latents = appended(stored, k, latent)

    # 2. Expand what is not rotated, and the values: [K^n | V] = c B (Eq. 2).
    rest = torch.einsum("sc,hdc->shd", latents, b_k)
    values = torch.einsum("sc,hdc->shd", latents, b_v)
    keys = torch.cat((elite, rest), -1)  # [S, Hkv, D]

    # 3. Attend.
    logits = torch.einsum("hgd,shd->hgs", q.unflatten(0, (Hkv, -1)), keys) / D**0.5
    output = torch.einsum("hgs,shd->hgd", logits.softmax(-1), values).flatten(0, 1)
    return output, (elite, latents)


# ---- the pairs of a head, and the factors of its weights


def uniform_order(half: int, r: int) -> Tensor:
    """Uniform (sec. 4.3.1): r pairs spread evenly over the `half` = D/2, then the others."""
    chosen = [i * (half - 1) // max(1, r - 1) for i in range(r)]
    others = [c for c in range(half) if c not in chosen]
    return torch.tensor(chosen + others)


def elite_dims(order: Tensor, r: int) -> Tensor:
    """The dims of each head with its r elite pairs first: order of its pairs [Hkv, D/2] ->
    [Hkv, D]. Both parts are half-split again, pairs ascending, so that apply_rope turns the first
    2r dims."""
    half = order.shape[1]
    elite = order[:, :r].sort(-1).values
    rest = order[:, r:].sort(-1).values
    return torch.cat((elite, elite + half, rest, rest + half), 1)


def low_rank(
    k: Tensor, v: Tensor, d_ckv: int, kind: str, root: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Factors of the un-rotated key weights and the value weights: [W_k^n | W_v] ~ A B (Eq. 2).

    k [dim, Hkv, D - 2r], v [dim, Hkv, D] -> A [dim, d_ckv] orthonormal (J-LRD), B
    [d_ckv, Hkv, 2D - 2r], keys before values; fp64. root [dim, dim], the square root of E x x^T:
    the best for inputs x (ours)."""
    if root is not None:
        k_seen = torch.tensordot(root, k.double(), 1)
        v_seen = torch.tensordot(root, v.double(), 1)
        a, b = low_rank(k_seen, v_seen, d_ckv, kind)
        a, mix = torch.linalg.qr(torch.linalg.solve(root, a))  # training wants A orthonormal again
        return a, torch.tensordot(mix, b, 1)
    m = torch.cat((k, v), -1).double()  # [dim, Hkv, 2D - 2r]
    if kind == "joint":
        _, vectors = left_singular(m)
        a = vectors[:, :d_ckv]
        return a, torch.tensordot(a, m, ([0], [0]))
    # Separate: the best d_ckv directions of both, each of which serves the keys or the values
    # alone.
    k_values, k_vectors = left_singular(k.double())
    v_values, v_vectors = left_singular(v.double())
    best = torch.cat((k_values, v_values)).topk(d_ckv).indices
    a = torch.cat((k_vectors, v_vectors), 1)[:, best]
    b = torch.tensordot(a, m, ([0], [0]))  # [d_ckv, Hkv, 2D - 2r]

    # A latent dim that was chosen for keys makes no value, and one chosen for values makes no key.
    dim_is_of_keys = (best < len(m))[:, None, None]
    column_is_of_keys = torch.arange(m.shape[-1], device=m.device) < k.shape[-1]
    return a, b * (dim_is_of_keys == column_is_of_keys)


def left_singular(m: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values [dim] and left singular vectors [dim, dim] of m [dim, ...]."""
    values, vectors = torch.linalg.eigh(m.flatten(1) @ m.flatten(1).T)
    return values.flip(-1), vectors.flip(-1)


class EliteAttention(nn.Module):
    """Attention with EliteKV's weights. It calls `attend` with q [..., Hq, D], the elite keys
    k_e [..., Hkv, 2r] and the latent c_kv [..., d_ckv], all before RoPE, with each head's dims in
    the order of `elite_dims`.

    order [Hkv, D/2]: each head's pairs, the elite ones first. wqkv has the rows of W_q, W_k^e and
    A^T. up has B^T: for each head D - 2r rows of keys, then D of values."""

    def __init__(
        self,
        c: ModelConfig,
        order: Tensor,
        r: int,
        wqkv: nn.Linear,
        up: nn.Linear,
        wo: nn.Linear,
    ):
        super().__init__()
        self.config = c
        self.order = order
        self.r = r
        self.pairs = order[:, :r].sort(-1).values  # [Hkv, r]
        self.widths = [c.n_heads * c.head_dim, c.n_kv_heads * 2 * r, up.in_features]
        self.wqkv = wqkv
        self.up = up
        self.wo = wo

    forward = Attention.forward

    def attend_heads(self, qkv: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, latent = qkv.split(self.widths, dim=-1)
        q = q.unflatten(-1, (self.config.n_heads, -1))
        k = k.unflatten(-1, (-1, 2 * self.r))
        return attend(q, k, latent).flatten(-2)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first 2r dims of x [..., S, H, n] by its head's elite angles; tables
        [..., S, D/2]."""
        x = x.unflatten(-2, (len(self.pairs), -1))  # [..., S, Hkv, H / Hkv, n]
        elite = apply_rope(x[..., : 2 * self.r], cos[..., self.pairs], sin[..., self.pairs])
        return torch.cat((elite, x[..., 2 * self.r :]), -1).flatten(-3, -2)

    def expand_and_attend(self, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        """Causal attention over K and V that are expanded from latents: rotated q [..., S, Hq, D]
        and k [..., P + S, Hkv, 2r], latent [..., P + S, d_ckv], of P past and S new tokens."""
        D = self.config.head_dim
        expanded = self.up(latent).unflatten(-1, (self.config.n_kv_heads, -1))
        rest, v = expanded.split((D - 2 * self.r, D), dim=-1)
        keys = torch.cat((k, rest), -1)
        return causal_attention(q, keys, v)

    def causal(self, cos: Tensor, sin: Tensor) -> Callable[..., Tensor]:
        """The `attend` of training, as Attention has it."""

        def attend(q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
            q = self.rotate(q, cos, sin)
            k = self.rotate(k, cos, sin)
            return self.expand_and_attend(q, k, latent)

        return attend


def in_order(rows: Tensor, dims: Tensor) -> Tensor:
    """Rows of H heads [H * D, ...] -> [Hkv, H / Hkv, D, ...], D in the order dims [Hkv, D]."""
    Hkv, D = dims.shape
    rows = rows.unflatten(0, (Hkv, -1, D))
    trailing = [1] * (rows.ndim - 3)
    return rows.take_along_dim(dims.reshape(Hkv, 1, D, *trailing), 2)


def check_elite_model(c: ModelConfig) -> None:
    """Raises UserError where EliteKV cannot take a model."""
    if c.qk_norm:
        raise UserError("elitekv cannot compress the keys of a model with q/k norms (Qwen3)")
    cos, _ = rope_tables(c, 1, torch.device("cpu"))  # of position 0, where every angle is 0
    if (cos != 1).any():
        fault = "elitekv cannot compress a model whose RoPE also scales q and k (yarn)"
        raise UserError(f"{fault}: the pairs that it leaves un-rotated would lack the factor")


def elite_sizes(c: ModelConfig, settings: EliteSettings, artifact: Artifact) -> tuple[int, int]:
    """r and d_ckv. UserError where they do not fit the model, or the model not the method."""
    check_elite_model(c)
    if c.elitekv and settings != EliteSettings():
        fault = "this checkpoint was uptrained: its r, d_ckv, pairs, lrd are fixed"
        raise UserError(f"{fault}; leave them out")
    r = settings.r or int(artifact["r"])
    d_ckv = settings.d_ckv or int(artifact["d_ckv"])
    if not 1 <= r <= c.head_dim // 2:
        raise UserError(f"--r {r}: a head has 1 to {c.head_dim // 2} pairs")
    most = min(c.dim, c.n_kv_heads * (2 * c.head_dim - 2 * r))
    if not 1 <= d_ckv <= most:
        raise UserError(f"--d_ckv {d_ckv}: with r = {r} the latent can have 1 to {most} dims")
    return r, d_ckv


def fold_elitekv(
    attention: Attention, c: ModelConfig, settings: EliteSettings, artifact: Artifact, i: int
) -> EliteAttention:
    """Layer i as EliteAttention. Uptrained weights have rank d_ckv: their factors come back."""
    r, d_ckv = elite_sizes(c, settings, artifact)
    D = c.head_dim
    Hkv = c.n_kv_heads
    wqkv = attention.wqkv
    root = artifact.get(f"{i}.root")  # only of uptraining

    # The order of each head's pairs.
    if settings.pairs == "uniform":
        order = uniform_order(D // 2, r).expand(Hkv, -1)  # [Hkv, D/2]
    else:
        order = artifact[settings.pairs][i]
    order = order.to(wqkv.weight.device)
    dims = elite_dims(order, r)  # [Hkv, D]

    # W_q, W_k and W_v in this order; a bias is one more column.
    rows = wqkv.weight
    if wqkv.bias is not None:
        rows = torch.cat((wqkv.weight, wqkv.bias[:, None]), 1)
    q, k, v = rows.split(attention.widths)
    q = in_order(q, dims)
    k = in_order(k, dims)[:, 0]
    v = v.unflatten(0, (Hkv, -1))
    elite, rest = k.split((2 * r, D - 2 * r), 1)

    # The factors A and B of all that is not rotated.
    k_weights = rest[..., : c.dim].permute(2, 0, 1)  # [dim, Hkv, D - 2r]
    v_weights = v[..., : c.dim].permute(2, 0, 1)
    a, b = low_rank(k_weights, v_weights, d_ckv, settings.lrd, root)

    stacked = torch.cat((q.flatten(0, 2), elite.flatten(0, 1).to(q)))
    up = b.flatten(1).T.to(q)
    bias = None
    up_bias = None
    if wqkv.bias is not None:  # A x has none: what it would add comes with the biases of `up`
        bias = torch.cat((stacked[:, -1], q.new_zeros(a.shape[1])))
        up_bias = torch.cat((rest, v), 1)[..., -1].flatten()
    stacked = torch.cat((stacked[:, : c.dim], a.T.to(q)))
    return EliteAttention(
        c, order, r, linear_of(stacked, bias), linear_of(up, up_bias), attention.wo
    )


def linear_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> nn.Linear:
    """A frozen layer of weight [out, in] and bias [out] or None, in dtype (None: the
    weight's)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    dtype = dtype or weight.dtype
    layer.weight = nn.Parameter(weight.to(dtype).contiguous(), False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype).contiguous(), False)
    return layer


# ---- the cache


class EliteCache(Cache):
    """One vector a token: a latent of all heads' values and un-rotated keys, then the rotated elite
    keys. Decode absorbs B_k into the query, zero at other heads' elite keys, and B_v into the
    output."""

    def __init__(self, context: CacheContext, settings: EliteSettings, fitted: FittedLayer):
        super().__init__(context)
        self.attention = fitted.attention  # an EliteAttention
        _, elite_width, d_ckv = self.attention.widths
        self.r = self.attention.r
        self.d_ckv = d_ckv
        self.latents = TokenStore(context, 1, context.max_seq_length, d_ckv + elite_width)

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        """k [n, Hkv, 2r]: elite keys; latent [n, d_ckv]."""
        stop = start + len(q)
        cos = self.context.cos[start:stop]
        sin = self.context.sin[start:stop]
        q = self.attention.rotate(q, cos, sin)
        k = self.attention.rotate(k, cos, sin)
        self.latents.write_prompt(row, start, torch.cat((latent, k.flatten(1)), -1)[:, None])
        past_and_new = self.latents.of_row(row, stop)[:, 0]
        latent, k = past_and_new.tensor_split((self.d_ckv,), -1)
        return self.attention.expand_and_attend(q, k.unflatten(-1, (-1, 2 * self.r)), latent)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, latent: Tensor) -> Tensor:
        """k [B, Hkv, 2r]: elite keys; latent [B, d_ckv]."""
        Hkv = self.config.n_kv_heads
        D = self.config.head_dim
        elite_width = 2 * self.r
        up = self.attention.up
        # Write.
        cos = self.context.cos[pos]
        sin = self.context.sin[pos]
        q = self.attention.rotate(q, cos, sin)
        k = self.attention.rotate(k, cos, sin)
        self.latents.write_token(pos, torch.cat((latent, k.flatten(1)), -1)[:, None])
        # Absorb B_k into the query. A bias of the un-rotated keys would add the same to every
        # token's logit, which softmax drops.
        b_k, b_v = up.weight.unflatten(0, (Hkv, -1)).split((D - elite_width, D), 1)
        grouped = q.unflatten(1, (Hkv, -1))  # [B, Hkv, G, D]
        elite, rest = grouped.split((elite_width, D - elite_width), -1)
        rest = torch.einsum("bhgd,hdc->bhgc", rest, b_k)
        own = torch.eye(Hkv, dtype=q.dtype, device=q.device)[:, None, :, None]
        elite = (elite[..., None, :] * own).flatten(-2)  # [B, Hkv, G, Hkv * 2r]
        query = torch.cat((rest, elite), -1).flatten(1, 2)
        # Attend the latents; then B_v makes a head's values of their mean.
        mixed = kernels.attend_shared_latent(
            query,
            self.latents.vectors[:, 0],
            pos,
            self.d_ckv,
            scale=self.softmax_scale,
            kernel=self.kernel,
        )
        output = torch.einsum("bhgc,hdc->bhgd", mixed.unflatten(1, (Hkv, -1)), b_v)
        if up.bias is not None:  # attention weights sum to one
            output = output + up.bias.unflatten(0, (Hkv, 1, -1))[..., -D:]
        return output.flatten(1, 2)


def elite_shapes(c: ModelConfig) -> ArtifactShapes:
    order = (int, c.n_layers, c.n_kv_heads, c.head_dim // 2)
    stored = {"r": (int,), "d_ckv": (int,), "elite": order}
    if not c.elitekv:  # an uptrained checkpoint's pairs are fixed
        stored["contribution"] = order
    return stored


def random_elitekv(c: ModelConfig) -> Artifact:
    """The paper's 25 % for Llama-2-7B (r = D/16), with pairs in their own order, of no meaning."""
    r = max(1, c.head_dim // 16)
    d_ckv = max(1, c.kv_dim // 2 - 2 * r * c.n_kv_heads)
    order = torch.arange(c.head_dim // 2).expand(c.n_layers, c.n_kv_heads, -1)
    return {
        "r": torch.tensor(r),
        "d_ckv": torch.tensor(d_ckv),
        "elite": order,
        "contribution": order,
    }


# ---------------------------------------------------------------------------------------------- FDC


@dataclass
class FdcSettings:
    """FDC, Fast KV Dimensionality Compression (arXiv 2408.04107): attends compressed vectors."""

    rate: float = setting(-1.0, "r: singular values lost (-1: as fitted)", within="[-1, 1)")
    adaptive: bool = setting(
        True, "each head has its own rank; else all have the mean of these ranks, in 8s"
    )
    balanced: bool = setting(
        True,
        "a step's programs read equal bytes, and a prompt's heads go by width; else equal tokens "
        "(the paper's /KE), and a prompt's heads are padded to the widest",
    )

    def __post_init__(self):
        if self.rate < 0 and self.rate != -1:
            raise UserError(f"--rate {self.rate:g}: give 0 to below 1, or -1 for the fitted rate")

    def bases(self, artifact: Artifact, i: int, kind: str) -> list[Tensor]:
        """Layer i's bases R [D, rank] of each KV head, of kind "qk" or "v"."""
        rate = float(artifact["rate"]) if self.rate == -1 else self.rate
        # The ranks of all layers, though one layer's are wanted: their mean is over all.
        ranks = fdc_ranks(artifact[f"{kind}.values"], rate, self.adaptive)
        bases = []
        for basis, rank in zip(artifact[f"{kind}.basis"][i], ranks[i].tolist(), strict=True):
            bases.append(basis[:, :rank])
        return bases


def fdc_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, R: Tensor) -> tuple[Tensor, tuple]:
    """One decode step of FDC as published (sec. 5.1), for one KV head. Prompts are read alike.

    q [G, D] and k [D]: after RoPE. v [d_v] is compressed already: R_V is folded into W_V, and R_V^T
    into W_O, which takes the output. stored: K' [S - 1, d_qk] and V' [S - 1, d_v]. R [D, d_qk]: the
    leading columns of the head's rotation. -> the output [G, d_v], and what is stored now."""
    # 1. Compress the query and the key after RoPE, and append.
    q = q @ R
    k = k @ R
    keys, values = appended(stored, k, v)

    # 2. Attend the compressed vectors, at the scale of the full head dim.
    logits = q @ keys.mT / len(R) ** 0.5
    output = logits.softmax(-1) @ values
    return output, (keys, values)


def fdc_tails(values: Tensor) -> Tensor:
    """Which fraction of the singular values' sum is lost where the first 1, 2, .. D of them stay:
    values [..., D] -> [..., D] fp64."""
    tails = values.double().flip(-1).cumsum(-1).flip(-1)
    return F.pad(tails[..., 1:], (0, 1)) / tails[..., :1]


def fdc_ranks(values: Tensor, rate: float, adaptive: bool = True) -> Tensor:
    """How many columns each head keeps (Eq. 1): the least number that loses at most `rate`, rounded
    up to a multiple of 16 (by real columns, where the paper pads with zeros). Singular values
    [L, Hkv, D] -> ranks [L, Hkv]. Not adaptive: all heads have the mean of these ranks (ours), to
    the nearest multiple of 8, since the kernel takes no others (or D, where all keep all)."""
    ranks = (fdc_tails(values) > rate).sum(-1) + 1
    ranks = (-(-ranks // 16) * 16).clamp(max=values.shape[-1])
    if adaptive:
        return ranks
    D = values.shape[-1]
    mean = ranks.double().mean().item()
    rank = D
    if mean < D:
        rank = min(max(1, round(mean / 8)) * 8, D)
    return torch.full_like(ranks, rank)


def kv_bias(attention: Attention, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """The biases of the key and value projections, [Hkv, D] each, or zeros if there are none.
    (Where values are folded, `attend` gets a v of no dims, and that bias is [Hkv, 0].)"""
    bias = attention.wqkv.bias
    if bias is None:
        bias = attention.wqkv.weight.new_zeros(sum(attention.widths))
    _, k_bias, v_bias, *_ = bias.split(attention.widths)
    n_kv_heads = c.n_kv_heads
    k_bias = k_bias.view(n_kv_heads, len(k_bias) // n_kv_heads)
    v_bias = v_bias.view(n_kv_heads, len(v_bias) // n_kv_heads)
    return k_bias, v_bias


def fold_values(
    attention: Attention, c: ModelConfig, settings: object, artifact: Artifact, i: int
) -> Attention:
    """Layer i's attention with W_V R in the place of W_V, and R^T W_O in the place of W_O, for FDC
    and Palu: the cache gets x W_V R, holds it, and returns its weighted sums. V's bias moves into
    W_O's: attention weights sum to one, so it adds the same to every output."""
    Hkv = c.n_kv_heads
    weight = attention.wqkv.weight
    bias = attention.wqkv.bias
    bases = [basis.to(weight.device) for basis in settings.bases(artifact, i, "v")]  # R [D, d_v]
    q, k, v = weight.float().split(attention.widths)
    rows_of_head = v.unflatten(0, (Hkv, -1))
    columns = attention.wo.weight.float().unflatten(1, (Hkv, c.group, -1))  # [dim, Hkv, G, D]
    values = []
    output = []
    for h in range(Hkv):
        values.append(bases[h].T @ rows_of_head[h])  # [d_v, dim]
        output.append((columns[:, h] @ bases[h]).flatten(1))  # [dim, G * d_v]
    width = sum(map(len, values))

    constant = attention.wo.bias
    if bias is not None:
        q_bias, k_bias, v_bias = bias.float().split(attention.widths)
        moved = torch.einsum("ohgd,hd->o", columns, v_bias.unflatten(0, (Hkv, -1)))
        constant = moved if constant is None else constant + moved
        bias = torch.cat((q_bias, k_bias, bias.new_zeros(width)))
    attention.wqkv = linear_of(torch.cat((q, k, *values)), bias, weight.dtype)
    attention.wo = linear_of(torch.cat(output, 1), constant, weight.dtype)
    # Heads have different numbers of values. So v, which has a width for all heads, is empty, and
    # the values of all heads come side by side as `projected` (Cache).
    attention.widths = [*attention.widths[:2], 0, width]
    return attention


# ---- its store, and the cache


class RaggedStore(Store):
    """Keys and values of heads of unequal rank, in one flat buffer without padding: one part behind
    the other, K' [B, S, d_qk] of each head and then V' [B, S, d_v] of each.

    K' and V' of a token are written together. An operation of its own attends them, so `attend` and
    the methods that it calls are not for this store."""

    def __init__(
        self, context: CacheContext, k_ranks: list[int], v_ranks: list[int], balanced: bool
    ):
        """k_ranks: d_qk of each KV head; v_ranks: d_v. balanced: how the kernel divides its work
        (kernels.attend_ragged)."""
        super().__init__()
        self.context = context
        self.balanced = balanced
        self.ranks = [*k_ranks, *v_ranks]  # of each part
        width = sum(self.ranks)  # numbers of a token
        self.token_bytes = width * context.dtype.itemsize
        packed = context.zeros(context.max_seq_length * width).flatten()
        self.register_buffer("packed", packed)

        # Where the numbers of a token go, side by side [width]. A part before which there are
        # `before` numbers of a token begins at before * n_tokens, and has `rank` numbers a token.
        # So number i of it has the place before * n_tokens + t * rank + i, where t counts the
        # tokens of all rows, end to end. That is starts + t * strides.
        n_tokens = context.batch_size * context.max_seq_length
        starts = []
        strides = []
        before = 0
        for rank in self.ranks:
            starts.append(before * n_tokens + torch.arange(rank))
            strides.append(torch.full((rank,), rank))
            before += rank
        self.starts = torch.cat(starts).to(context.device)
        self.strides = torch.cat(strides).to(context.device)

        # Keys come padded to the widest head, [Hkv, max d_qk]. Which of these numbers count:
        is_own = torch.arange(max(k_ranks)) < torch.tensor(k_ranks)[:, None]
        self.k_columns = is_own.flatten().nonzero()[:, 0].to(context.device)

        self.table = None  # for the kernel, which takes ranks that are multiples of 8
        if context.kernel and all(rank % 8 == 0 for rank in self.ranks):
            self.table = kernels.ragged_table(self.ranks, context.device, balanced)

    def views(self) -> list[Tensor]:
        """The parts: K' [B, S, d_qk] of each head, then V' [B, S, d_v] of each."""
        B = self.context.batch_size
        S = self.context.max_seq_length
        parts = self.packed.split([B * S * rank for rank in self.ranks])
        return [part.view(B, S, rank) for part, rank in zip(parts, self.ranks, strict=True)]

    def joined(self, k: Tensor, v: Tensor) -> Tensor:
        """K' [n, Hkv, max d_qk], padded, and V' [n, sum of d_v] of n tokens -> all numbers of a
        token, without padding [n, sum of all ranks]."""
        return torch.cat((k.flatten(1)[:, self.k_columns], v), -1)

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        """K' [n, Hkv, max d_qk], padded, and V' [n, sum of d_v]: one row's tokens from position
        `start` on."""
        stop = start + len(k)
        parts = self.joined(k, v).split(self.ranks, -1)
        for view, part in zip(self.views(), parts, strict=True):
            view[row, start:stop] = part

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        """K' [B, Hkv, max d_qk], padded, and V' [B, sum of d_v]: one token of each row, at
        positions pos [B]."""
        numbers = self.joined(k, v)
        # One write for all heads: a compiled step makes it in place, with no copy of the buffer.
        token = (self.context.rows * self.context.max_seq_length + pos)[:, None]
        self.packed[self.starts + token * self.strides] = numbers

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        return {str(i): view[row, :length] for i, view in enumerate(self.views())}

    def bytes_formula(self) -> int:
        return self.context.batch_size * self.context.max_seq_length * self.token_bytes


class FdcCache(Cache):
    """K' = K R of keys after RoPE, and the folded values V', each KV head at its own ranks."""

    def __init__(self, context: CacheContext, settings: FdcSettings, fitted: FittedLayer):
        super().__init__(context)
        k_bases = settings.bases(fitted.artifact, fitted.i, "qk")
        v_bases = settings.bases(fitted.artifact, fitted.i, "v")
        self.k_ranks = [basis.shape[1] for basis in k_bases]
        self.v_ranks = [basis.shape[1] for basis in v_bases]
        # One product turns all heads, so R of a head is padded to the widest. (weights, not cache)
        padded = [F.pad(basis, (0, max(self.k_ranks) - basis.shape[1])) for basis in k_bases]
        self.R = torch.stack(padded).to(context.device, context.dtype)  # [Hkv, D, max d_qk]
        self.vectors = RaggedStore(context, self.k_ranks, self.v_ranks, settings.balanced)

    def prefill(
        self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor, folded_v: Tensor
    ) -> Tensor:
        """folded_v [n, sum of d_v]: the values of all heads, as W_V R makes them; v is empty. ->
        The output of all query heads side by side, [n, 1, sum of G d_v]."""
        stop = start + len(q)
        Hkv = len(self.k_ranks)
        q = in_basis(self.rope_from(q, start), self.R)
        k = in_basis(self.rope_from(k, start), self.R)
        self.vectors.write_prompt(row, start, k, folded_v)
        views = [view[row, :stop] for view in self.vectors.views()]
        keys = views[:Hkv]  # K' of each head, [stop, d_qk]
        values = views[Hkv:]
        q = q.unflatten(1, (Hkv, -1))  # [n, Hkv, G, max d_qk]

        # Flash attention wants one width for q, k and v of all its heads. So each head is padded
        # with zeros, which change no product, to a multiple of 32. Heads of the same width then go
        # together, in one launch. Without balance all are padded to the widest.
        widths = []
        for k_rank, v_rank in zip(self.k_ranks, self.v_ranks, strict=True):
            widths.append(-(-max(k_rank, v_rank) // 32) * 32)
        if not self.vectors.balanced:
            widths = [max(widths)] * Hkv
        heads_of_width = {}
        for h, width in enumerate(widths):
            heads_of_width.setdefault(width, []).append(h)
        outputs = [None] * Hkv
        for width, heads in heads_of_width.items():
            # Queries have the width of the widest key of all: a negative padding cuts what is zero.
            queries = F.pad(q[:, heads].flatten(1, 2), (0, width - q.shape[-1]))
            padded_k = [F.pad(keys[h], (0, width - self.k_ranks[h])) for h in heads]
            padded_v = [F.pad(values[h], (0, width - self.v_ranks[h])) for h in heads]
            output = causal_attention(
                queries,
                torch.stack(padded_k, 1),
                torch.stack(padded_v, 1),
                self.context.softmax_scale,
            )
            output = output.unflatten(1, (len(heads), -1))  # [n, heads, G, width]
            for i, h in enumerate(heads):
                outputs[h] = output[:, i, :, : self.v_ranks[h]].flatten(1)
        return torch.cat(outputs, -1)[:, None]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, folded_v: Tensor) -> Tensor:
        """folded_v [B, sum of d_v]: the values of all heads, as W_V R makes them; v is empty. ->
        The output of all query heads side by side, [B, 1, sum of G d_v]."""
        k = in_basis(self.rope(k, pos), self.R)
        self.vectors.write_token(pos, k, folded_v)
        q = in_basis(self.rope(q, pos), self.R)
        out = kernels.attend_ragged(
            q,
            self.vectors.packed,
            self.vectors.ranks,
            self.vectors.table,
            pos,
            scale=self.softmax_scale,
            balanced=self.vectors.balanced,
        )
        return out[:, None]


fdc_shapes = shapes_of_heads("qk.basis", "v.basis", "qk.values", "v.values", rate=(float,))


def random_fdc(c: ModelConfig) -> Artifact:
    """Singular values of which some heads' fall off faster: the ranks differ."""
    steepness = torch.linspace(1, 6, c.n_kv_heads)[:, None] * torch.linspace(0, 1, c.head_dim)
    values = (-steepness).exp().expand(c.n_layers, -1, -1)
    return {"qk.values": values, "v.values": values, "rate": torch.tensor(0.2, dtype=torch.float64)}


# ---------------------------------------------------------------------------- calibration artifacts


def artifact_path(folder: Path, method: str) -> Path:
    return folder / f"{method}.safetensors"


def model_identity(model: Llama) -> dict[str, str]:
    """What an artifact must agree on with the model: shape and the weights' fingerprint."""
    c = model.config
    shape = f"{c.n_layers}x{c.n_heads}x{c.n_kv_heads}x{c.head_dim}"
    return {"shape": shape, "fingerprint": model.fingerprint}


def load_artifact(source: Path | ModelConfig, method: str, model: Llama) -> Artifact:
    """What `calibrate.py fit` stored for this method beside the checkpoint, on the CPU. For a
    config (random weights): random_artifact. {} of a method that is not fitted. Raises UserError
    where there is none, or one of another model, or where the checkpoint cannot run by this
    method."""
    if isinstance(source, ModelConfig):
        return random_artifact(method, model.config)
    row = method_named(method)
    if model.config.elitekv and method != "elitekv":
        raise UserError("this checkpoint was uptrained for EliteKV: run it with --method elitekv")
    if not row.fit:
        return {}
    if method == "elitekv":
        check_elite_model(model.config)  # before a fit is asked for, which would be refused
    path = artifact_path(source, row.artifact)
    command = f"python calibrate.py fit --checkpoint {source} --method {row.artifact}"
    if model.config.elitekv:  # training has written the weights and the artifact together
        command = f"python -m extras.train --from FOLDER --out {source}"
    if not path.is_file():
        raise UserError(f"{path}: {method} must be calibrated first: {command}")
    return read_artifact(path, row, model, f"make it again: {command}")


def read_artifact(path: Path, row: "Method", model: Llama, remedy: str) -> Artifact:
    """The tensors of a method's artifact in a file. Raises UserError, with the remedy, where the
    file is damaged, is of another model, or lacks what the method needs of this model."""
    _, tensors = read_tensors(path, model_identity(model), remedy)
    for name, (kind, *shape) in row.shapes(model.config).items():
        fault = artifact_fault(tensors.get(name), kind, *shape)
        if fault:
            raise UserError(f"{path}: {name} {fault}; {remedy}")
    return tensors


def read_tensors(
    path: Path, identity: dict[str, str], remedy: str
) -> tuple[dict[str, str], Artifact]:
    """The metadata and tensors of a file of save_artifact, on the CPU. Raises UserError, with the
    remedy, where the file is damaged, or its metadata are not those of `identity`."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); {remedy}") from None
    for key, value in identity.items():
        found = metadata.get(key)
        if found != value:
            raise UserError(f"{path} was made for {key} {found}, not {value}; {remedy}")
    return metadata, tensors


def artifact_fault(tensor: Tensor | None, kind: type, *shape: int | None) -> str:
    """What is wrong with a tensor of an artifact, or "". An integer tensor with a shape must hold a
    permutation in its last dim."""
    if tensor is None:
        return "is missing"
    fits = tensor.ndim == len(shape)
    for size, wanted in zip(tensor.shape, shape, strict=False):
        if wanted is not None and wanted != size:
            fits = False
    if not fits:
        sizes = ", ".join(str(size or "any") for size in shape)
        return f"is {list(tensor.shape)}, not [{sizes}]"
    if kind is float:
        is_of_kind = tensor.is_floating_point()
    else:
        is_of_kind = tensor.dtype in (torch.int32, torch.int64)
    if not is_of_kind:
        return f"holds {str(tensor.dtype).removeprefix('torch.')} numbers"
    if kind is float and not tensor.isfinite().all():
        return "is not finite"
    if kind is int and shape and (tensor.sort(-1).values != torch.arange(shape[-1])).any():
        return f"is not a permutation of 0 .. {shape[-1] - 1}"
    return ""


def save_artifact(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes one safetensors file in the place of an old one; OSError where it cannot be."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    with replacing_file(path) as partial:
        partial.write_bytes(data)  # not save_file, whose files other users cannot read


def written_file(path: Path) -> Path:
    """The file that is written where a user names this path: symbolic links are followed.

    UserError for what is there and is no regular file: a folder, a pipe, a device, a link to
    itself. A file put in its place would end it."""
    target = Path(os.path.realpath(path))
    # /dev/stdout may lead to a pipe, which is there but has no name: so ask for the path itself.
    if target.is_symlink() or path.exists() and not path.is_file():
        raise UserError(f"{path}: no regular file, so nothing is written there; name another file")
    return target


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A new file to write, which replaces that of a path (written_file) when the block ends."""
    target = written_file(path)
    with replacing(target.parent, target.name) as partial:
        yield partial / target.name


@contextmanager
def replacing(folder: Path, name: str) -> Iterator[Path]:
    """A new folder to make files in, NAME.*.partial. They replace those of `folder` when the block
    ends, config.json last. Links there are replaced: in a folder of `fit --out` they lead to the
    files of another checkpoint."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{glob.escape(name)}.*.partial"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(".partial", f"{name}.", folder) as partial:
            yield Path(partial)
            for file in sorted(
                Path(partial).iterdir(), key=lambda file: file.name == "config.json"
            ):
                file.replace(folder / file.name)
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def random_artifact(method: str, c: ModelConfig) -> Artifact:
    """An artifact of no meaning, for random weights: orthonormal bases, random numbers near 1, and
    what the method's `random` makes. {} of a method that is not fitted."""
    row = method_named(method)
    if not row.fit:
        return {}
    artifact = row.random(c) if row.random else {}
    seeded = torch.Generator().manual_seed(0)
    for name, (kind, *shape) in row.shapes(c).items():
        if name in artifact:
            continue
        # A size of None is the rank of a SALS basis: 5/8 of all directions, the most that the
        # defaults need.
        sizes = [shape[-2] * 5 // 8 if size is None else size for size in shape]
        if "basis" in name:
            artifact[name] = random_basis(*sizes)
        elif kind is int:
            artifact[name] = torch.tensor(1)
        else:
            artifact[name] = 0.5 + torch.rand(sizes, generator=seeded)
    return artifact


@functools.lru_cache(1)
def random_basis(*shape: int) -> Tensor:
    """Orthonormal columns of no meaning [..., n, r], as fitted ones where weights are random."""
    return torch.linalg.qr(torch.randn(*shape, generator=torch.Generator().manual_seed(0))).Q


# ---------------------------------------------------------------------------------------- the table


@dataclass
class Method:
    """A row of METHODS."""

    settings: type  # their docstring is in `--help`
    caches: Callable[..., list[Cache]]  # (model, settings, context, artifact) -> one a layer
    paper: dict = field(default_factory=dict)  # the settings of --variant paper
    # Of a method that is fitted: the function, as "module:fit_NAME", which is found when it is
    # asked for. NAME.safetensors is the artifact.
    fit: str = ""
    shapes: Callable[[ModelConfig], ArtifactShapes] | None = None  # of the artifact's tensors
    # What random_artifact cannot make by itself.
    random: Callable[[ModelConfig], Artifact] | None = None
    # (attention, config, settings, artifact, i) -> layer i's attention with what the method folds
    # into weights, maybe on the meta device
    fold: Callable[..., Attention] | None = None

    @property
    def artifact(self) -> str:
        """The name of its artifact, which another method may have, too."""
        return self.fit.rpartition("fit_")[2]

    def fold_all(self, model: Llama, settings: object, artifact: Artifact, layers=None) -> None:
        """Folds what the method folds into every layer, or into those of these numbers."""
        if not self.fold:
            return
        if layers is None:
            layers = range(len(model.layers))
        for i in layers:
            layer = model.layers[i]
            layer.attention = self.fold(layer.attention, model.config, settings, artifact, i)

    def build(
        self, model: Llama, settings: object, context: CacheContext, artifact: Artifact
    ) -> list[Cache]:
        """The caches of all layers. The model's weights change, once, if the method folds
        something."""
        if not model.is_folded:
            self.fold_all(model, settings, artifact)
            model.is_folded = self.fold is not None
        return self.caches(model, settings, context, artifact)


SALS_PAPER = {
    "rank": 0.25,
    "score_rank": 0.5,
    "bits": 4,
    "score": "sum",
    "sinks": 16,
    "critical": 432,
}


def dense_cache(context: CacheContext, settings: DenseSettings) -> DenseCache:
    return DenseCache(context)


METHODS = {
    "dense": Method(DenseSettings, each_layer(dense_cache)),
    "sals": Method(
        SalsSettings,
        sals_caches,
        paper=SALS_PAPER,
        fit="calibrate:fit_sals",
        shapes=sals_shapes,
        fold=fold_sals,
    ),
    "elitekv": Method(
        EliteSettings,
        each_layer(EliteCache),
        fit="calibrate:fit_elitekv",
        shapes=elite_shapes,
        random=random_elitekv,
        fold=fold_elitekv,
    ),
    "loki": Method(
        LokiSettings, each_layer(LokiCache), fit="calibrate:fit_loki", shapes=loki_shapes
    ),
    "lrqk": Method(LrqkSettings, each_layer(lrqk_cache)),
    "fdc": Method(
        FdcSettings,
        each_layer(FdcCache),
        fit="calibrate:fit_fdc",
        shapes=fdc_shapes,
        random=random_fdc,
        fold=fold_values,
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
    """The method's settings: `options` over the defaults of their `variant`. UserError where one is
    unknown, or has a value that its field does not allow."""
    row = method_named(method)
    fields = {f.name: f for f in dataclasses.fields(row.settings)}
    for name, value in options.items():
        if name not in fields:
            fault = f"--{name} is not a setting of {method}"
            raise UserError(f"{fault}; its settings are: {', '.join(fields) or 'none'}")
        kind = fields[name].type
        choices = fields[name].metadata["choices"]
        interval = fields[name].metadata["within"]
        if choices:
            check_choice(name, value, choices)
        if kind in (int, float):
            check_number(name, value, kind, interval)
        elif not isinstance(value, kind):
            wanted = "True or False" if kind is bool else "a text"
            raise UserError(f"--{name} {value}: give {wanted}")
    if options.get("variant") == "paper":
        options = row.paper | options
    return row.settings(**options)


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raises UserError unless the value is one of the choices."""
    if value not in choices:
        raise UserError(f"--{name} {value}: choose from {', '.join(map(str, choices))}")


def check_number(name: str, value: object, kind: type, interval: str) -> None:
    """Raises UserError unless the value is such a number, int or float, in the interval (`inside`).
    numpy's numbers are numbers, too."""
    wanted = Integral if kind is int else Real
    is_number = isinstance(value, wanted) and not isinstance(value, bool)
    if not is_number or not inside(value, interval):
        a_number = "a whole number" if kind is int else "a number"
        raise UserError(f"--{name} {value}: give {a_number} in {interval}")


def inside(value: float, interval: str) -> bool:
    """Does the value lie in an interval such as "(0, 1]"?"""
    low, high = map(float, interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    below = value < high if interval[-1] == ")" else value <= high
    return above and below
