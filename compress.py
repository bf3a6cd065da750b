"""Every cache: its settings, its mathematics, what it stores. A method is one block of this file.

A cache belongs to one layer and holds all rows of a batch. It gets q, k, v BEFORE RoPE and has three calls:
    prefill(row, q, k, v)   a whole prompt, q [S, Hq, D], k and v [S, Hkv, D] -> attention output [S, Hq, D]
    decode(pos, q, k, v)    one token a row at positions pos [B], q [B, Hq, D] -> attention output [B, Hq, D]
    formula(), bytes_read() the byte ledger: what the method says it stores and reads
Decode has fixed shapes and reads pos on the device, so a CUDA graph of it is right for every length.
What is stored is a buffer, so the measured size is the sum of the buffers: nothing here only masks.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import (
    Attention,
    Llama,
    ModelConfig,
    UserError,
    apply_rope,
    causal_attention,
    rope_tables,
)


def setting(default, text: str, choices: tuple | None = None):
    """A field of a settings dataclass; generate.py makes its command-line option out of it."""
    return field(default=default, metadata={"help": text, "choices": choices})


def triton_kernels(config: ModelConfig, device: torch.device, wanted: bool | None):
    """The module kernels.py, or None for plain PyTorch. wanted None: where they run, which is on CUDA with
    triton and head dims of at least 16 (a tensor core's tile). Raises UserError if wanted elsewhere."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU, for tests
    found = importlib.util.find_spec("triton") is not None
    if wanted and not (found and config.head_dim >= 16 and (device.type == "cuda" or interpreted)):
        raise UserError("the kernels need CUDA, triton and a head dim of at least 16; use --no-kernels")
    if wanted is False or not (found and config.head_dim >= 16 and (wanted or device.type == "cuda")):
        return None
    import kernels  # only now: it imports triton

    return kernels


class Room:
    """What all caches of a run share: the model's shape, B rows of `capacity` tokens, RoPE, device, dtype,
    and the Triton kernels (None: PyTorch does it all)."""

    def __init__(self, model: Llama, rows: int, capacity: int, kernels: bool | None = None):
        self.config, self.rows, self.capacity = model.config, rows, capacity
        weight = model.tok_embeddings.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.cos, self.sin = rope_tables(model.config, capacity, self.device)  # [capacity, D/2] each
        self.row_ids = torch.arange(rows, device=self.device)
        self.positions = torch.arange(capacity, device=self.device)
        self.kernels = triton_kernels(model.config, self.device, kernels)


class Cache(nn.Module):
    """The base of all caches: RoPE at given positions, zeroed storage, and the ledger."""

    def __init__(self, room: Room):
        super().__init__()
        self.room, self.config = room, room.config

    def store(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        # Zeroed, since a masked weight of 0 times a stray NaN would still be NaN.
        return torch.zeros(self.room.rows, *shape, dtype=dtype or self.room.dtype, device=self.room.device)

    def rope(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """Rotates x [..., H, D] at positions [...], a tensor or a slice."""
        return apply_rope(x, self.room.cos[positions], self.room.sin[positions])

    def measured(self) -> int:
        """Bytes of the live storage: all rows at full capacity."""
        return sum(b.untyped_storage().nbytes() for b in self.buffers())

    def formula(self) -> int:
        """Bytes that the method's formula gives for these rows and capacity; tests hold measured() to it."""
        raise NotImplementedError

    def bytes_read(self, length: int) -> int:
        """Bytes that one decode step must read from this layer's cache for one row of `length` tokens."""
        raise NotImplementedError


def attend(q: Tensor, k: Tensor, v: Tensor, live: Tensor) -> Tensor:
    """One query a row: q [B, Hq, D], k and v [B, Hkv, S, D], live [B, S] bool -> [B, Hq, D].

    The G query heads of a group stand as G queries over one key/value head: K and V are never repeated."""
    q = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, D]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live[:, None, None]).flatten(1, 2)


# ------------------------------------------------------------------------------------------------------ dense


@dataclass
class DenseSettings:
    """The full cache: nothing to set."""


class DenseCache(Cache):
    """Post-RoPE K and V of every token: the truth that all others are measured against."""

    def __init__(self, room: Room):
        super().__init__(room)
        c = room.config
        self.register_buffer("k", self.store(c.n_kv_heads, room.capacity, c.head_dim))
        self.register_buffer("v", self.store(c.n_kv_heads, room.capacity, c.head_dim))

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        span = slice(0, q.shape[0])
        q, k = self.rope(q, span), self.rope(k, span)
        self.k[row, :, span], self.v[row, :, span] = k.transpose(0, 1), v.transpose(0, 1)
        return causal_attention(q, k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        rows = self.room.row_ids
        self.k[rows, :, pos], self.v[rows, :, pos] = self.rope(k, pos), v
        q = self.rope(q, pos)
        if self.room.kernels:
            return self.room.kernels.dense_attend(q, self.k, self.v, pos)
        return attend(q, self.k, self.v, self.room.positions <= pos[:, None])

    def formula(self) -> int:
        return dense_bytes(self.room)

    def bytes_read(self, length: int) -> int:
        return length * 2 * self.config.kv_dim * self.room.dtype.itemsize


def dense_bytes(room: Room) -> int:
    """Bytes of a dense cache of one layer: rows x capacity x 2 Hkv D."""
    return room.rows * room.capacity * 2 * room.config.kv_dim * room.dtype.itemsize


def build_dense(
    model: Llama, settings: DenseSettings, room: Room, artifact: dict[str, Tensor]
) -> list[Cache]:
    return [DenseCache(room) for _ in model.layers]


# -------------------------------------------------------------------------- grouped quantisation (KIVI, SALS)


def quantize(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Asymmetric codes of groups of channels within each token (KIVI's value scheme, arXiv 2402.02750).

    x [..., D] -> codes [..., D * bits / 8] uint8 and (minimum, scale) [..., D / group, 2] fp16.
    Byte j holds channels j, j + n, j + 2n, ... (n = D * bits / 8) from its lowest bits up: unpacking gives
    contiguous runs of channels, which is what a GPU kernel wants."""
    grouped = x.float().unflatten(-1, (-1, group))  # [..., D / group, group]
    low, high = grouped.aminmax(dim=-1)
    # Round the scale and minimum to what is stored first: the codes then belong to the stored values.
    low = low.half()
    scale = ((high - low.float()) / (2**bits - 1)).half()
    step = torch.where(scale == 0, 1, scale.float())  # a constant group decodes to its minimum
    codes = ((grouped - low.float()[..., None]) / step[..., None]).round().clamp(0, 2**bits - 1)
    planes = codes.flatten(-2).to(torch.uint8).unflatten(-1, (8 // bits, -1))  # [..., 8 / bits, n]
    packed = planes[..., 0, :].clone()
    for i in range(1, 8 // bits):
        packed |= planes[..., i, :] << (i * bits)
    return packed, torch.stack((low, scale), dim=-1)


def dequantize(codes: Tensor, low_scale: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """The inverse: codes [..., D * bits / 8], low_scale [..., D / group, 2] -> x [..., D]."""
    planes = [(codes >> (i * bits)) & (2**bits - 1) for i in range(8 // bits)]
    grouped = torch.cat(planes, dim=-1).float().unflatten(-1, (-1, group))
    low, scale = low_scale.float().unbind(-1)
    return (grouped * scale[..., None] + low[..., None]).flatten(-2).to(dtype)


class Values(nn.Module):
    """V of every token, quantised per token in groups of channels; bits = 16 keeps the model's dtype."""

    def __init__(self, cache: Cache, tokens: int, bits: int):
        super().__init__()
        c = cache.config
        self.bits, self.group, self.dtype = bits, min(32, c.head_dim), cache.room.dtype
        self.row_bytes = c.kv_dim * self.dtype.itemsize  # of one token
        if bits == 16:
            self.register_buffer("plain", cache.store(tokens, c.n_kv_heads, c.head_dim))
        else:
            self.row_bytes = c.kv_dim * bits // 8 + c.kv_dim // self.group * 4
            self.register_buffer(
                "codes", cache.store(tokens, c.n_kv_heads, c.head_dim * bits // 8, dtype=torch.uint8)
            )
            shape = (tokens, c.n_kv_heads, c.head_dim // self.group, 2)
            self.register_buffer("low_scale", cache.store(*shape, dtype=torch.float16))

    def write(self, where: tuple, v: Tensor) -> None:
        """Stores v [..., Hkv, D] at index `where` of [B, tokens]."""
        if self.bits == 16:
            self.plain[where] = v
        else:
            self.codes[where], self.low_scale[where] = quantize(v, self.bits, self.group)

    def read(self, where: tuple) -> Tensor:
        """V [..., Hkv, D] at index `where` of [B, tokens]."""
        if self.bits == 16:
            return self.plain[where]
        return dequantize(self.codes[where], self.low_scale[where], self.bits, self.group, self.dtype)


# ------------------------------------------------------------------------------------------------------- SALS


@dataclass
class SalsSettings:
    """SALS, Sparse Attention in Latent Space (arXiv 2510.24273)."""

    rank: float = setting(0.25, "d_r: rank of the key latent as a share of Hkv*D (r = rank * Hkv*D)")
    score_rank: float = setting(0.5, "r*/r: share of the latent's leading dims that scoring reads")
    bits: int = setting(
        4, "bits of a value code; the paper pairs 4 with rank 0.25 and 2 with 0.125", (2, 4, 8, 16)
    )
    sinks: int = setting(16, "x: first tokens that are always attended")
    critical: int = setting(432, "y: tokens selected by score, at each step and layer")
    recent: int = setting(64, "z: last tokens that are always attended, kept exact")
    keep: float = setting(
        0.0, "share of the cache's capacity that is attended in all: sets y so that x + y + z is this share"
    )
    score: str = setting(
        "softmax",
        "per-head softmax of the latent logits, summed; or the paper's sum of raw logits",
        ("softmax", "sum"),
    )
    skip: str = setting("0,1,-1", "layers that attend every token (the paper's 0, 1 and the last)")
    skip_as: str = setting(
        "latent", "how those layers are stored: compressed, or as a dense cache", ("latent", "dense")
    )
    window: str = setting(
        "exact",
        "the z recent tokens: exact K and V, or the paper's half (rank 1/2, 8-bit V)",
        ("exact", "half"),
    )
    fold: bool = setting(True, "fold U_r into the projection weights (not possible with q/k norms)")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """(x, y, z) in tokens for a cache of this capacity."""
        x, y, z = self.sinks, self.critical, self.recent
        if self.keep:
            y = round(self.keep * capacity) - x - z
            if y < 0:
                raise UserError(
                    f"--keep {self.keep} of {capacity} tokens is fewer than {x} sinks and {z} recent tokens"
                )
        return min(x, capacity), min(y, capacity), min(z, capacity)


def sals_queries(q: Tensor, basis: Tensor, n_kv_heads: int, rule: str) -> Tensor:
    """Queries in the latent space: q [B, Hq, D] before RoPE, basis U_r* [Hkv*D, r*] -> [B, heads, r*].

    sum (paper, sec. 4.3): one query for all heads, q~ = U^T sum over each group of q; then q~ . k~ equals
    the sum of all heads' pre-RoPE logits. softmax (ours): one query a head, q~_h = q_h U_h, over the same
    latent rows."""
    grouped = q.unflatten(1, (n_kv_heads, -1))  # [B, Hkv, G, D]
    if rule == "sum":
        return grouped.sum(2).flatten(1)[:, None] @ basis
    return torch.einsum("bhgd,hdr->bhgr", grouped, basis.unflatten(0, (n_kv_heads, -1))).flatten(1, 2)


def sals_scores(queries: Tensor, latent: Tensor, live: Tensor, rule: str, head_dim: int) -> Tensor:
    """One score a token: queries [B, heads, r*], latent [B, S, r*], live [B, S] bool -> [B, S] fp32.

    sum: s_j = q~ . k~_j (paper, sec. 4.3). softmax (ours): each head's logits become attention weights over
    the live tokens before they are summed, so that one loud head cannot decide for all."""
    logits = (queries @ latent.transpose(1, 2)).float()  # [B, heads, S]
    if rule == "softmax":
        logits = (logits * head_dim**-0.5).masked_fill(~live[:, None], -torch.inf).softmax(-1)
    return logits.sum(1)


def sals_select(scores: Tensor, pos: Tensor, x: int, y: int, z: int) -> tuple[Tensor, Tensor]:
    """C without the recent window: x sinks and the y best of the tokens between sinks and window.

    scores [B, S], pos [B] -> indices [B, x + y], and which of them count (short rows have fewer)."""
    places = torch.arange(scores.shape[1], device=scores.device)
    oldest_recent = pos[:, None] - z + 1  # [B, 1]
    candidates = scores.masked_fill((places < x) | (places >= oldest_recent), -torch.inf)
    best, index = candidates.topk(min(y, scores.shape[1]), dim=-1, sorted=False)
    sinks = places[:x].expand(len(pos), -1)
    return torch.cat((sinks, index), 1), torch.cat((sinks < oldest_recent, best > -torch.inf), 1)


class SalsCache(Cache):
    """Joint latent of the pre-RoPE keys, quantised values, and a ring of the z most recent tokens.

    Every token is written to the latent and value stores at once; the ring holds the last z exactly (or at
    rank 1/2). `sparse` layers attend x + y + z tokens; the others reconstruct and attend every token."""

    def __init__(self, room: Room, settings: SalsSettings, basis: Tensor, sparse: bool):
        super().__init__(room)
        c, self.settings, self.sparse = room.config, settings, sparse
        self.x, self.y, self.z = settings.budget(room.capacity)
        self.r = sals_rank(settings, c)
        self.r_score = sals_score_rank(settings, c)
        self.basis = basis[:, : self.r].to(room.device, room.dtype)  # U_r [Hkv*D, r]: a weight, not cache
        self.register_buffer("latent", self.store(room.capacity, self.r))
        self.values = Values(self, room.capacity, settings.bits)
        self.half = settings.window == "half"
        if self.half:
            self.half_basis = basis[:, : c.kv_dim // 2].to(room.device, room.dtype)
            self.register_buffer("ring_latent", self.store(self.z, c.kv_dim // 2))
            self.ring_values = Values(self, self.z, 8)
        else:
            self.register_buffer("ring_k", self.store(self.z, c.n_kv_heads, c.head_dim))
            self.ring_values = Values(self, self.z, 16)
        self.fused = room.kernels is not None and not self.half and self.y > 0
        if self.fused:
            self.paired_basis = room.kernels.interleave_rope(self.basis, c.n_kv_heads)

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        length = q.shape[0]
        rotated = self.rope(k, slice(0, length))
        self.latent[row, :length] = folded[0] if folded else k.flatten(1) @ self.basis
        self.values.write((row, slice(0, length)), v)
        last = torch.arange(max(0, length - self.z), length, device=q.device)
        self.write_ring((row, last % self.z), k[last], rotated[last], v[last])
        return causal_attention(self.rope(q, slice(0, length)), rotated, v)

    def write_ring(self, where: tuple, k: Tensor, rotated: Tensor, v: Tensor) -> None:
        if self.half:
            self.ring_latent[where] = k.flatten(-2) @ self.half_basis
        else:
            self.ring_k[where] = rotated
        self.ring_values.write(where, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        if self.fused:
            return self.decode_fused(pos, q, k, v, *folded)
        rows = self.room.row_ids
        self.latent[rows, pos] = folded[0] if folded else k.flatten(1) @ self.basis
        self.values.write((rows, pos), v)
        self.write_ring((rows, pos % self.z), k, self.rope(k, pos), v)

        if self.sparse:
            index, live = self.select(pos, q, *folded[1:])
        else:
            index = self.room.positions.expand(len(pos), -1)
            live = index <= pos[:, None] - self.z
        k_old, v_old = self.reconstruct(index)
        k_new, v_new, ring_live = self.read_ring(pos)
        k_all = torch.cat((k_old, k_new), 1).transpose(1, 2)  # [B, Hkv, n + z, D]
        v_all = torch.cat((v_old, v_new), 1).transpose(1, 2)
        return attend(self.rope(q, pos), k_all, v_all, torch.cat((live, ring_live), 1))

    def decode_fused(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        """The same as decode in Triton kernels."""
        kernels, room, bits, index = self.room.kernels, self.room, self.settings.bits, None
        values, low_scale = (
            (self.values.plain, None) if bits == 16 else (self.values.codes, self.values.low_scale)
        )
        ring_k, ring_v, rope = self.ring_k, self.ring_values.plain, (pos, room.cos, room.sin)
        new = folded[0] if folded else k.flatten(1) @ self.basis
        rotated = kernels.sals_append(
            new, q, k, v, *rope, self.latent, values, low_scale, ring_k, ring_v, bits
        )
        if self.sparse:
            queries, scale = self.queries(q, *folded[1:]), self.config.head_dim**-0.5
            scores = kernels.latent_scores(queries, self.latent, pos, scale, self.settings.score)
            index = kernels.select(scores, pos, self.x, self.y, self.z)
        stores = (self.latent, self.paired_basis, values, low_scale, ring_k, ring_v)
        return kernels.sals_attend(rotated, index, *stores, *rope, bits)

    def queries(self, q: Tensor, *folded: Tensor) -> Tensor:
        """The latent queries [B, heads, r*]; folded in for the sum rule."""
        if folded:
            return folded[0][:, None]
        basis = self.basis[:, : self.r_score]
        return sals_queries(q, basis, self.config.n_kv_heads, self.settings.score).contiguous()

    def select(self, pos: Tensor, q: Tensor, *folded: Tensor) -> tuple[Tensor, Tensor]:
        c, rule = self.config, self.settings.score
        queries = self.queries(q, *folded)
        live = self.room.positions <= pos[:, None]
        scores = sals_scores(queries, self.latent[..., : self.r_score], live, rule, c.head_dim)
        return sals_select(scores, pos, self.x, self.y, self.z)

    def reconstruct(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B, n, Hkv, D] of tokens index [B, n]: K_C = K~_C U_r^T, RoPE at the original positions."""
        where = (self.room.row_ids[:, None], index)
        k = (self.latent[where] @ self.basis.T).unflatten(-1, (self.config.n_kv_heads, -1))
        return self.rope(k, index), self.values.read(where)

    def read_ring(self, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K, V [B, z, Hkv, D] of the recent window and which slots hold a token; slot s holds the latest
        position that is s modulo z."""
        slots = torch.arange(self.z, device=pos.device)
        position = pos[:, None] - (pos[:, None] - slots) % self.z  # [B, z], negative where still empty
        v = self.ring_values.read((slice(None),))
        if not self.half:
            return self.ring_k, v, position >= 0
        k = (self.ring_latent @ self.half_basis.T).unflatten(-1, (self.config.n_kv_heads, -1))
        return self.rope(k, position.clamp(min=0)), v, position >= 0

    def token_bytes(self) -> int:
        """Bytes of one compressed token: latent + codes + (minimum, scale) of each group."""
        return self.r * self.room.dtype.itemsize + self.values.row_bytes

    def ring_bytes(self) -> int:
        width = self.config.kv_dim // 2 if self.half else self.config.kv_dim
        return width * self.room.dtype.itemsize + self.ring_values.row_bytes

    def formula(self) -> int:
        return self.room.rows * (self.room.capacity * self.token_bytes() + self.z * self.ring_bytes())

    def bytes_read(self, length: int) -> int:
        """Paper, sec. 4.5, with the values' true size: s r* for scoring, then every attended token once."""
        recent = min(self.z, length)
        if not self.sparse:
            return (length - recent) * self.token_bytes() + recent * self.ring_bytes()
        chosen = min(self.x + self.y, length - recent)
        scored = length * self.r_score * self.room.dtype.itemsize
        return scored + chosen * self.token_bytes() + recent * self.ring_bytes()


def sals_rank(settings: SalsSettings, config: ModelConfig) -> int:
    r = round(settings.rank * config.kv_dim)
    if not 1 <= r <= config.kv_dim:
        raise UserError(
            f"--rank {settings.rank} gives r = {r}; the keys allow 1 to {config.kv_dim}, a share of at most 1"
        )
    return r


def sals_score_rank(settings: SalsSettings, config: ModelConfig) -> int:
    if not 0 < settings.score_rank <= 1:
        raise UserError(f"--score_rank {settings.score_rank}: r*/r must lie in (0, 1]")
    return max(1, round(settings.score_rank * sals_rank(settings, config)))


def sals_fold(attention: Attention, config: ModelConfig, basis: Tensor, r_score: int | None) -> None:
    """Appends W_k U_r, and for the sum rule (sum over each group of W_q) U_r*, to the rows of wqkv.

    Exact, since everything up to the latent is linear; biases fold the same way. basis [Hkv*D, r]."""
    linear = attention.wqkv
    parameters = {"weight": linear.weight, "bias": linear.bias}
    widths = [basis.shape[1]] + ([r_score] if r_score else [])
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        q, k, _ = parameter.float().split(attention.widths)
        rows = [basis.T @ k]
        if r_score:
            summed = q.unflatten(0, (config.n_kv_heads, config.group, config.head_dim)).sum(1).flatten(0, 1)
            rows.append(basis[:, :r_score].T @ summed)
        setattr(
            linear, name, nn.Parameter(torch.cat((parameter, *(r.to(parameter.dtype) for r in rows))), False)
        )
    attention.widths = attention.widths + widths
    linear.out_features = sum(attention.widths)


def build_sals(model: Llama, settings: SalsSettings, room: Room, artifact: dict[str, Tensor]) -> list[Cache]:
    """One cache a layer; with `fold`, the latent's rows are appended to the model's wqkv."""
    c = model.config
    try:
        skipped = {int(i) % c.n_layers for i in settings.skip.split(",") if i.strip()}
    except ValueError:
        raise UserError(
            f"--skip {settings.skip!r}: give layer numbers, such as 0,1,-1 (or '' for none)"
        ) from None
    if min(settings.sinks, settings.critical) < 0 or settings.recent < 1 or not 0 <= settings.keep <= 1:
        raise UserError(
            "the budget must have sinks >= 0, critical >= 0, recent >= 1 and keep between 0 and 1"
        )
    if settings.bits < 16 and (c.head_dim * settings.bits) % 8:
        raise UserError(f"--bits {settings.bits}: {c.head_dim} channels a head do not fill whole bytes")
    caches = []
    for i, layer in enumerate(model.layers):
        if i in skipped and settings.skip_as == "dense":
            caches.append(DenseCache(room))
            continue
        basis = artifact[f"{i}.basis"].to(room.device)  # [Hkv*D, fitted rank], best direction first
        need = c.kv_dim // 2 if settings.window == "half" else 0
        need = max(need, sals_rank(settings, c))
        if basis.shape[1] < need:
            raise UserError(
                f"rank {need} is more than the {basis.shape[1]} directions in the artifact; "
                f"run calibrate.py fit with --max_rank {need / c.kv_dim:g}"
            )
        cache = SalsCache(room, settings, basis, sparse=i not in skipped)
        if settings.fold and not c.qk_norm:
            folded_scores = cache.r_score if settings.score == "sum" and cache.sparse else None
            sals_fold(layer.attention, c, basis[:, : cache.r].float(), folded_scores)
        caches.append(cache)
    return caches


def random_sals(model: Llama) -> dict[str, Tensor]:
    n = model.config.kv_dim
    return dict.fromkeys((f"{i}.basis" for i in range(model.config.n_layers)), random_basis(n, n // 2))


# ------------------------------------------------------------------------------------------------------- Loki


@dataclass
class LokiSettings:
    """Loki: low-rank keys for sparse attention (arXiv 2406.02542). Saves reads, not bytes."""

    k: float = setting(
        0.25, "k_f: tokens each query head attends, as a share of the length; above 1: a count"
    )
    d: float = setting(0.25, "d_f: leading principal components that scoring reads, as a share of D")
    explained: float = setting(
        0.0, "instead of d: per layer the Rank@v that explains this share (App. B.2; 0: off)"
    )
    basis: str = setting("auto", "keys the PCA was fitted on; auto: the better one", ("auto", "pre", "post"))
    sinks: int = setting(0, "first tokens that are always among the k (the paper: none)")
    recent: int = setting(0, "last tokens that are always among the k (the paper: none)")
    reduced: bool = setting(
        False, "PCAAttn (App. E): cache and attend d components of every token, no selection"
    )


class LokiCache(Cache):
    """Post-RoPE keys in the basis of their principal components, P per KV head, and plain V.

    The leading d components score all tokens; each query head attends its own k best, exactly. Since P is a
    rotation, full logits are unchanged (Lemma 4.1) and no second copy of the keys is kept."""

    def __init__(self, room: Room, settings: LokiSettings, basis: Tensor, d: int):
        super().__init__(room)
        c, self.settings, self.d = room.config, settings, d
        self.width = d if settings.reduced else c.head_dim  # components that are cached
        self.basis = basis.to(room.device, room.dtype)  # P [Hkv, D, D], columns by falling eigenvalue
        self.register_buffer("k", self.store(c.n_kv_heads, room.capacity, self.width))
        self.register_buffer("v", self.store(c.n_kv_heads, room.capacity, c.head_dim))

    def rotate(self, x: Tensor) -> Tensor:
        """x [..., H, D] after RoPE -> the same in the basis of its KV head, [..., Hkv, H / Hkv, width]."""
        grouped = x.unflatten(-2, (self.config.n_kv_heads, -1))
        return grouped @ self.basis[..., : self.width]

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        span = slice(0, q.shape[0])
        q, k = self.rope(q, span), self.rope(k, span)
        self.k[row, :, span] = self.rotate(k)[:, :, 0].transpose(0, 1)
        self.v[row, :, span] = v.transpose(0, 1)
        return causal_attention(q, k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        rows = self.room.row_ids
        self.k[rows, :, pos], self.v[rows, :, pos] = self.rotate(self.rope(k, pos))[:, :, 0], v
        q = self.rotate(self.rope(q, pos))  # [B, Hkv, G, width]
        if self.settings.reduced:  # the scale stays that of the full head dim
            live = (self.room.positions <= pos[:, None])[:, None, None]
            scale = self.config.head_dim**-0.5
            return F.scaled_dot_product_attention(q, self.k, self.v, live, scale=scale).flatten(1, 2)
        index, live = self.select(pos, q)  # [B, Hkv, G, k]
        kv_heads = torch.arange(self.config.n_kv_heads, device=pos.device)[:, None, None]
        where = (rows[:, None, None, None], kv_heads, index)
        logits = torch.einsum("bhgd,bhgkd->bhgk", q, self.k[where]).float() * self.config.head_dim**-0.5
        weights = logits.masked_fill(~live, -torch.inf).softmax(-1).to(v.dtype)
        return torch.einsum("bhgk,bhgkd->bhgd", weights, self.v[where]).flatten(1, 2)

    def select(self, pos: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Algorithm 1, lines 5-7: the k best tokens of each query head by their leading d components.

        q [B, Hkv, G, D] -> indices [B, Hkv, G, k] and which of them count, since short rows have fewer."""
        places, length = self.room.positions, (pos + 1)[:, None, None, None]
        scores = (q[..., : self.d] @ self.k[..., : self.d].transpose(-1, -2)).float()  # [B, Hkv, G, S]
        forced = (places < self.settings.sinks) | (places >= length - self.settings.recent)
        scores = scores.masked_fill(forced, torch.inf).masked_fill(places >= length, -torch.inf)
        index = scores.topk(loki_count(self.settings.k, self.room.capacity), dim=-1).indices
        ranks = torch.arange(index.shape[-1], device=pos.device)
        wanted = (self.settings.k * length).long() if self.settings.k <= 1 else length
        return index, ranks < wanted.clamp(min=1).minimum(length)

    def formula(self) -> int:
        return dense_bytes(self.room) * (self.width + self.config.head_dim) // (2 * self.config.head_dim)

    def bytes_read(self, length: int) -> int:
        """d of every key, then K and V of the selected rows: at most G k distinct ones a KV head."""
        c, size = self.config, self.room.dtype.itemsize
        if self.settings.reduced:
            return length * c.n_kv_heads * (self.width + c.head_dim) * size
        chosen = min(length, c.group * loki_count(self.settings.k, length))
        return (length * self.d + chosen * 2 * c.head_dim) * c.n_kv_heads * size


def loki_count(k: float, length: int) -> int:
    """Tokens attended out of `length`: floor(k_f * length) but at least 1, or the count k."""
    return max(1, min(length, int(k * length) if k <= 1 else int(k)))


def rank_at(values: Tensor, share: float) -> Tensor:
    """Rank@v (Loki Eq. 2): the least n whose leading eigenvalues [..., n] hold `share` of their sum."""
    return (values.cumsum(-1) / values.sum(-1, keepdim=True) < share).sum(-1) + 1


def build_loki(model: Llama, settings: LokiSettings, room: Room, artifact: dict[str, Tensor]) -> list[Cache]:
    if settings.k <= 0 or not 0 < settings.d <= 1 or not 0 <= settings.explained < 1:
        raise UserError("--k must be above 0, --d in (0, 1], --explained in [0, 1)")
    kind = ("pre", "post")[int(artifact["better"])] if settings.basis == "auto" else settings.basis
    caches = []
    for i in range(len(model.layers)):
        d = max(1, round(settings.d * model.config.head_dim))
        if settings.explained:
            d = int(rank_at(artifact[f"{kind}.eigenvalues"][i], settings.explained).max())
        caches.append(LokiCache(room, settings, artifact[f"{kind}.basis"][i], d))
    return caches


def random_loki(model: Llama) -> dict[str, Tensor]:
    c = model.config
    shape = (c.n_layers, c.n_kv_heads, c.head_dim)
    basis = random_basis(*shape, c.head_dim)
    return {"post.basis": basis, "post.eigenvalues": torch.ones(shape), "better": torch.tensor(1)}


# ----------------------------------------------------------------------------------------------- StreamingLLM


@dataclass
class StreamingSettings:
    """StreamingLLM (arXiv 2309.17453): the first and the last tokens, all others forgotten."""

    sinks: int = setting(4, "x: first tokens that are kept")
    recent: int = setting(508, "w: last tokens that are kept")


class StreamingCache(Cache):
    """x sinks and a ring of the w most recent tokens, at their original positions.

    The paper re-rotates by the place within the cache, to go on beyond the trained length; within it the
    original positions serve, and are what the other methods here use."""

    def __init__(self, room: Room, settings: StreamingSettings):
        super().__init__(room)
        c = room.config
        self.x = min(settings.sinks, room.capacity)
        self.w = min(settings.recent, room.capacity)
        self.register_buffer("k", self.store(c.n_kv_heads, self.x + self.w, c.head_dim))
        self.register_buffer("v", self.store(c.n_kv_heads, self.x + self.w, c.head_dim))

    def slot(self, position: Tensor) -> Tensor:
        return torch.where(position < self.x, position, self.x + (position - self.x) % self.w)

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        length = q.shape[0]
        q, k = self.rope(q, slice(0, length)), self.rope(k, slice(0, length))
        places = self.room.positions[:length]
        kept = places[(places < self.x) | (places >= length - self.w)]
        self.k[row, :, self.slot(kept)] = k[kept].transpose(0, 1)
        self.v[row, :, self.slot(kept)] = v[kept].transpose(0, 1)
        return causal_attention(q, k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        rows, slot = self.room.row_ids, self.slot(pos)
        self.k[rows, :, slot], self.v[rows, :, slot] = self.rope(k, pos), v
        live = torch.arange(self.x + self.w, device=pos.device) <= pos[:, None]  # slots fill from the left
        return attend(self.rope(q, pos), self.k, self.v, live)

    def formula(self) -> int:
        return dense_bytes(self.room) // self.room.capacity * (self.x + self.w)

    def bytes_read(self, length: int) -> int:
        return min(length, self.x + self.w) * 2 * self.config.kv_dim * self.room.dtype.itemsize


def build_streaming(
    model: Llama, settings: StreamingSettings, room: Room, artifact: dict[str, Tensor]
) -> list[Cache]:
    if settings.sinks < 0 or settings.recent < 1:
        raise UserError("--sinks must be at least 0 and --recent at least 1")
    return [StreamingCache(room, settings) for _ in model.layers]


# -------------------------------------------------------------------------------------- calibration artifacts


def artifact_path(folder: Path, method: str) -> Path:
    return folder / f"{method}.safetensors"


def model_identity(model: Llama) -> dict[str, str]:
    """What an artifact must agree on with the model: its shape and the fingerprint of its weights."""
    c = model.config
    return {
        "shape": f"{c.n_layers}x{c.n_heads}x{c.n_kv_heads}x{c.head_dim}",
        "fingerprint": model.fingerprint,
    }


def load_artifact(folder: Path, method: str, model: Llama) -> dict[str, Tensor]:
    """What `calibrate.py fit` stored for this method beside the checkpoint: name -> tensor, on the CPU.

    Raises UserError where there is none, where it is damaged, and where it was fitted to another model."""
    path = artifact_path(folder, method)
    command = f"python calibrate.py fit --checkpoint {folder} --method {method}"
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
            raise UserError(
                f"{path}: fitted to another model ({key} {metadata.get(key)}, this one has {value}); "
                f"make it again: {command}"
            )
    return tensors


def random_basis(*shape: int) -> Tensor:
    """Orthonormal columns of no meaning [..., n, r], in the place of fitted ones where weights are random."""
    return torch.linalg.qr(torch.randn(*shape, generator=torch.Generator().manual_seed(0))).Q


# -------------------------------------------------------------------------------------------------- the table


@dataclass
class Method:
    """A row of METHODS: its settings, how its caches are built, and for a method that `calibrate.py fit`
    must fit first, an artifact of no meaning for benchmarks with random weights."""

    settings: type
    build: Callable[..., list[Cache]]
    about: str
    random: Callable[[Llama], dict[str, Tensor]] | None = None

    @property
    def fitted(self) -> bool:
        return self.random is not None


METHODS = {
    "dense": Method(DenseSettings, build_dense, "the full cache"),
    "sals": Method(SalsSettings, build_sals, "sparse attention over a joint latent of the keys", random_sals),
    "loki": Method(
        LokiSettings, build_loki, "top-k attention, scored on principal components of the keys", random_loki
    ),
    "streaming": Method(StreamingSettings, build_streaming, "the first and the last tokens only"),
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}; the methods are: {', '.join(METHODS)}")
    return METHODS[name]


def settings_from(method: str, options: dict) -> object:
    """The method's settings with `options` (name -> value) over its defaults; unknown names are refused."""
    known = {f.name: f for f in dataclasses.fields(method_named(method).settings)}
    for name, value in options.items():
        if name not in known:
            raise UserError(
                f"--{name} is not a setting of {method}; its settings are: {', '.join(known) or 'none'}"
            )
        choices = known[name].metadata["choices"]
        if choices and value not in choices:
            raise UserError(f"--{name} {value}: choose from {', '.join(map(str, choices))}")
    return METHODS[method].settings(**options)
