"""A Llama in one file: configuration, the network, checkpoints, tokenizers.

Layouts, used everywhere in this project:
    B    rows of a batch                  S    tokens of one row (prompt or cache)
    Hq   query heads                      Hkv  key/value heads,  G = Hq / Hkv
    D    head dim                         dim  model width
    q    [..., Hq, D]    k, v [..., Hkv, D]    query head h reads key/value head h // G
RoPE is half-split (the Hugging Face order): pair c of a head is its dims c and c + D/2. Its tables are fp32.

One seam: Attention computes q, k, v BEFORE RoPE and hands them to `attend`, which is a cache's extend, a
cache's decode, or plain causal attention in training. What a method stores, and how, is the cache's business.
"""

import base64
import hashlib
import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from kernels import linear_int8

FAMILIES = {  # the first fields of ModelConfig, which a config.json may leave out as in transformers
    "llama": (4096, 32, 32, None, None, 11008, 32000, 2048, 10000.0, None, 1e-6),
    "mistral": (4096, 32, 32, 8, None, 14336, 32000, 131072, 10000.0, None, 1e-6),
    "qwen2": (4096, 32, 32, 32, None, 22016, 151936, 32768, 10000.0, None, 1e-6),
    "qwen3": (4096, 32, 32, 32, 128, 22016, 151936, 32768, 10000.0, None, 1e-6),
    "phi3": (3072, 32, 32, None, None, 8192, 32064, 4096, 10000.0, None, 1e-5),
}


class UserError(Exception):
    """A mistake that the user can mend: one line says what is wrong and what to do. Ends with exit code 2."""


def absent(folder: Path, fault: str) -> UserError:
    """The error for a folder without some file; of a Hugging Face cache it names the folder inside."""
    snapshot = max(folder.glob("snapshots/*/config.json"), default=None)
    return UserError(f"{folder}: {fault}" + (f", such as {snapshot.parent}" if snapshot else ""))


@contextmanager
def checked(path: Path, fault: str = "not a valid tokenizer file") -> Iterator[None]:
    """Around what is made of a file's content: what goes wrong with it is a UserError that names the file."""
    try:
        yield
    except (UserError, OSError, MemoryError, ImportError, NameError):
        raise
    except Exception as error:
        # Python says both of a wrong type in a JSON file and of a mistake here or in a package.
        json_type = re.search(r"\b(dict|list|sequence|str|string|int|float|bool|NoneType)\b", str(error))
        if isinstance(error, AttributeError | TypeError) and not json_type:
            raise
        raise UserError(f"{path}: {fault}; download it again ({error!r})") from error


def read_json(path: Path) -> dict:
    """The object in a JSON file, {} if there is no such file; UserError if it is damaged."""
    with checked(path, "not valid JSON"):
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return data


# ---------------------------------------------------------------------------------------------- several ranks
# torchrun starts N processes, the ranks. Each runs a Llama with a smaller config: its share of the heads and
# of ffn_dim. So methods and caches need not know of the others. W_o and W_2 sum their results over the ranks.


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


def summed(y: Tensor) -> Tensor:
    """The sum of what all ranks give as `y`, in its place."""
    if ranks()[1] > 1:
        dist.all_reduce(y)
    return y


def local_part(whole: Tensor, shape: Iterable[int | None]) -> Tensor:
    """This rank's part of a tensor of the whole model, a view of this shape; a dim of None is not shared.

    Where a dim has fewer parts than there are ranks, as few KV heads do, neighbours have the same part."""
    rank, n = ranks()
    for dim, size in enumerate(shape):
        if size is not None and size < whole.shape[dim]:
            whole = whole.narrow(dim, rank * (whole.shape[dim] // size) // n * size, size)
    return whole


@lru_cache
def shared_memory(nbytes: int, device: torch.device) -> tuple[Tensor, Tensor, int] | tuple[()] | None:
    """Memory of this rank that all ranks read and write, zeros [ranks * nbytes] uint8; where each rank's lies
    for this one, int64 [ranks]; and this rank. () if it is alone, None where GPUs cannot reach one another.
    The first call is of all ranks together."""
    rank, n = ranks()
    if n == 1:
        return ()
    one_host, pairs = os.environ.get("LOCAL_WORLD_SIZE") == str(n), permutations(range(n), 2)
    if not (one_host and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)):
        return None
    import torch.distributed._symmetric_memory as symmetric  # only now: it imports much

    memory = symmetric.empty(n * nbytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize()  # before others write there
    addresses = symmetric.rendezvous(memory, dist.group.WORLD).buffer_ptrs
    return memory, torch.tensor(addresses, device=device), rank


# ---------------------------------------------------------------------------------------------- configuration


def named(hf: str, default: object = MISSING) -> object:
    """A field of ModelConfig that config.json has under the name `hf`."""
    return field(default=default, metadata={"hf": hf})


@dataclass
class ModelConfig:
    """The shape of a Llama-like model, read from a Hugging Face config.json or from the table SHAPES."""

    dim: int = named("hidden_size")
    n_layers: int = named("num_hidden_layers")
    n_heads: int = named("num_attention_heads")
    n_kv_heads: int = named("num_key_value_heads")
    head_dim: int = named("head_dim")
    ffn_dim: int = named("intermediate_size")
    vocab_size: int = named("vocab_size")
    max_positions: int = named("max_position_embeddings")
    rope_theta: float = named("rope_theta", 10000.0)
    rope_scaling: dict | None = named("rope_scaling", None)
    norm_eps: float = named("rms_norm_eps", 1e-5)
    tied: bool = named("tie_word_embeddings", False)
    qkv_bias: bool = False
    out_bias: bool = named("attention_bias", False)
    mlp_bias: bool = named("mlp_bias", False)
    qk_norm: bool = False
    sliding_window: int | None = named("sliding_window", None)
    family: str = named("model_type", "llama")
    elitekv: bool = False  # uptrained for EliteKV: only each head's elite pairs are rotated

    LARGEST = 1 << 19  # of any width and count: so that no product of three of them overflows 63 bits

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads folder/config.json. Raises UserError for anything that this file cannot compute exactly."""
        path = folder / "config.json"
        if not path.is_file():
            raise absent(folder, "no config.json there; give the folder of a Hugging Face download")
        with checked(path, "not a usable config"):
            config = cls.from_hf(read_json(path))
            config.check()
        return config

    def check(self) -> None:
        """Raises ValueError for a field of the wrong type or size, and for RoPE without finite angles."""
        for f in fields(self):
            value, limit = getattr(self, f.name), self.LARGEST << 5 * (f.name == "max_positions")
            typed = isinstance(value, float | int if f.type is float else f.type)
            fits = typed and isinstance(value, bool) == (f.type is bool)
            if not fits or type(value) in (int, float) and not 0 < value < math.inf:
                raise ValueError(f"{f.name} is {value!r}")
            if f.type is int and value > limit:
                raise ValueError(f"{f.name} is more than {limit}")
        for key, value in (self.rope_scaling or {}).items():
            if "type" not in key and not isinstance(value, float | int | None):
                raise ValueError(f"{key} is {value!r}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, and RoPE rotates pairs of dims")
        if not rope_tables(self, 2, torch.device("cpu"))[0].isfinite().all():
            raise ValueError(f"RoPE with rope_theta {self.rope_theta} and {self.rope_scaling} is not finite")

    def shard(self, n: int) -> "ModelConfig":
        """The config of one of n ranks; several may share a KV head. UserError where sizes do not divide."""

        def fits(n: int) -> bool:
            shared = self.n_kv_heads % n == 0 or n % self.n_kv_heads == 0
            return shared and self.n_heads % n == self.ffn_dim % n == 0

        if n > 1 and self.elitekv:
            raise UserError("an uptrained EliteKV model has one latent of all heads: run it without torchrun")
        if (most := next(m for m in range(n, 0, -1) if fits(m))) < n:
            shapes = f"{self.n_heads} query heads, {self.n_kv_heads} KV heads and ffn_dim {self.ffn_dim}"
            raise UserError(f"{n} ranks cannot evenly share {shapes}; use --nproc_per_node {most}")
        heads, kv_heads = self.n_heads // n, max(1, self.n_kv_heads // n)
        return replace(self, n_heads=heads, n_kv_heads=kv_heads, ffn_dim=self.ffn_dim // n)

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        family = hf.get("model_type")
        if family not in FAMILIES:
            raise UserError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
        if hf.get("hidden_act", "silu") != "silu":
            raise UserError(f"hidden_act {hf['hidden_act']!r} is not supported; only silu (SwiGLU) is")
        hf = dict(zip((f.metadata["hf"] for f in fields(cls)[:11]), FAMILIES[family], strict=True)) | hf
        if quantised := hf.get("quantization_config"):
            method = quantised.get("quant_method", "some method")
            raise UserError(f"quantised by {method}: not supported; give the bf16, fp16 or fp32 checkpoint")
        rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_SCALINGS:
            raise UserError(f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_SCALINGS)}")
        if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
            raise UserError("partial_rotary_factor below 1 is not supported: every head dim must be rotated")
        n_heads = hf["num_attention_heads"]
        n_kv_heads, positions = hf.get("num_key_value_heads") or n_heads, hf["max_position_embeddings"]
        if n_heads % n_kv_heads:
            raise UserError(f"{n_heads} query heads cannot share {n_kv_heads} key/value heads evenly")
        original = "original_max_position_embeddings"
        rope |= {"rope_type": kind, original: hf.get(original) or rope.get(original) or positions}
        if kind in ("linear", "yarn"):  # they reach beyond what the model was made for
            positions = max(positions, math.floor(rope[original] * rope["factor"]))
        bias = hf.get("attention_bias") or False
        windowed = family in ("mistral", "phi3") or hf.get("use_sliding_window")
        given = {f.name: value for f in fields(cls) if (value := hf.get(f.metadata.get("hf"))) is not None}
        made = {
            "n_kv_heads": n_kv_heads,
            "max_positions": positions,
            "head_dim": hf.get("head_dim") or hf["hidden_size"] // n_heads,
            "rope_theta": rope.get("rope_theta") or hf["rope_theta"],
            "rope_scaling": None if kind == "default" else rope,
            "qkv_bias": bias or family == "qwen2",
            "out_bias": bias and family != "qwen2",
            "qk_norm": family == "qwen3",
            "sliding_window": windowed and hf.get("sliding_window", 4096 * (family != "phi3")) or None,
            "elitekv": hf.get("elitekv") or False,
        }
        required = dict.fromkeys(f.name for f in fields(cls) if f.default is MISSING)  # None: `check` refuses
        return cls(**required | given | made)

    def to_hf(self) -> dict:
        """What from_hf reads, as a config.json has it."""
        named = {f.metadata["hf"]: getattr(self, f.name) for f in fields(self) if f.metadata}
        return {"architectures": [f"{self.family.title()}ForCausalLM"], "hidden_act": "silu"} | named


# Published shapes, for benchmarks without weights (--random_weights NAME).
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    "llama-2-7b": ModelConfig(4096, 32, 32, 32, 128, 11008, 32000, 4096),
    "llama-3.1-8b": ModelConfig(4096, 32, 32, 8, 128, 14336, 128256, 131072, 500000.0, LLAMA31_ROPE),
    "llama-3.1-70b": ModelConfig(8192, 80, 64, 8, 128, 28672, 128256, 131072, 500000.0, LLAMA31_ROPE),
}


# ------------------------------------------------------------------------------------------------------- RoPE


def scale_llama3(inv_freq: Tensor, rope: dict, config: ModelConfig) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs are slowed by `factor`, fast pairs kept, the pairs between blended."""
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / rope["factor"] + blend * inv_freq, 1.0


def scale_yarn(inv_freq: Tensor, rope: dict, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): blends by wavelength, and scales cos and sin to keep the logits' spread."""
    factor, original, half = rope["factor"], rope["original_max_position_embeddings"], config.head_dim / 2

    def pair_of(turns: float) -> float:  # the pair that makes `turns` full turns over the original context
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(config.rope_theta)

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = ((torch.arange(len(inv_freq), dtype=inv_freq.dtype) - low) / max(high - low, 1e-3)).clamp(0, 1)
    gain = 0.1 * math.log(max(factor, 1.0))
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = (1 + gain * rope["mscale"]) / (1 + gain * rope["mscale_all_dim"])
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, 1 + gain if scale is None else scale


ROPE_SCALINGS = {
    "default": lambda inv_freq, rope, config: (inv_freq, 1.0),
    "linear": lambda inv_freq, rope, config: (inv_freq / rope["factor"], 1.0),
    "llama3": scale_llama3,
    "yarn": scale_yarn,
}


def rope_tables(config: ModelConfig, n_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair: two fp32 tables [n_positions, D/2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    rope = config.rope_scaling or {"rope_type": "default"}
    inv_freq, scale = ROPE_SCALINGS[rope["rope_type"]](config.rope_theta**-exponent, rope, config)
    # Rounded to fp32 as in the training code of the models; the angles themselves are exact products.
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64), inv_freq.float().double())
    return (angles.cos() * scale).float().to(device), (angles.sin() * scale).float().to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., S, H, D] by cos, sin [..., S, D/2] in fp32; returns x's dtype."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


QUERY_CHUNK = 512  # queries that attend a past at once: bounds their mask


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Exact causal attention after RoPE: q [..., S, Hq, D], k and v [..., P + S, Hkv, D] -> [..., S, Hq, D].

    The first P keys are of the past, in any order: every query attends them."""
    v = v.contiguous()  # CUDA's kernels need 16-byte rows, and folded ranks make those of wqkv any width
    heads = [t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in (q, k, v)]  # [B, H, S, D], as flash wants
    S, P = q.shape[-3], k.shape[-3] - q.shape[-3]
    attention = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[-2] != k.shape[-2])
    if not P:
        out = attention(*heads, is_causal=True)
    elif q.is_cuda and q.dtype != torch.float32:  # flash attention, which reads no mask
        from torch.nn.attention.bias import causal_lower_right  # only now: it imports triton

        out = attention(*heads, attn_mask=causal_lower_right(S, P + S))
    else:
        last = torch.arange(P, P + S, device=q.device)[:, None].split(QUERY_CHUNK)
        masks = (torch.arange(P + S, device=q.device) <= part for part in last)
        parts = zip(heads[0].split(QUERY_CHUNK, 2), masks, strict=True)
        out = torch.cat([attention(part, *heads[1:], attn_mask=mask) for part, mask in parts], 2)
    return out.transpose(1, 2).reshape(q.shape)


# ------------------------------------------------------------------------------------------------ the network


def quantize_int8(x: Tensor, dims: tuple[int, ...] = (-1,), dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes of x and their scale, one for all numbers along dims: x = codes * scale."""
    scale = (x.float().abs().amax(dims, keepdim=True) / 127).to(dtype)
    return (x.float() / torch.where(scale == 0, 1, scale)).round().to(torch.int8), scale


class Linear(nn.Linear):
    """A linear layer. `quantize` makes its weight int8 codes, with a scale in bf16 for each output."""

    def quantize(self) -> None:
        codes = torch.empty_like(self.weight, dtype=torch.int8)
        scale = torch.empty_like(self.weight[:, :1], dtype=torch.bfloat16)
        n = max(1, (1 << 19) // codes.shape[1])  # rows at once, which a CPU's caches hold
        for i in range(0, len(codes), n):
            codes[i : i + n], scale[i : i + n] = quantize_int8(self.weight[i : i + n], dtype=scale.dtype)
        self.weight, self.scale = nn.Parameter(codes, False), nn.Parameter(scale[:, 0], False)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.int8:
            return super().forward(x)
        return linear_int8(x, self.weight, self.scale, self.bias)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        # A method may append rows to wqkv at load time (or put them in v's place, and change wo): `attend`
        # gets their results as further arguments.
        self.widths = [c.n_heads * c.head_dim, c.kv_dim, c.kv_dim]
        self.head_dim = c.head_dim
        self.wqkv = Linear(c.dim, sum(self.widths), bias=c.qkv_bias)
        self.wo = Linear(c.n_heads * c.head_dim, c.dim, bias=c.out_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, attend) -> Tensor:
        return summed(self.wo(self.attended(self.wqkv(x), attend)))

    def attended(self, qkv: Tensor, attend) -> Tensor:
        """From wqkv's output to the concatenated heads' outputs, the input of wo."""
        q, k, v, *folded = qkv.split(self.widths, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # [..., H, D]
        return attend(self.q_norm(q), self.k_norm(k), v, *folded).flatten(-2)

    def causal(self, cos: Tensor, sin: Tensor):
        """The `attend` of training: exact causal attention under RoPE tables [S, D/2]."""
        return lambda q, k, v: causal_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)


class FeedForward(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.w13 = Linear(c.dim, 2 * c.ffn_dim, bias=c.mlp_bias)  # gate rows, then up rows
        self.w2 = Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return summed(self.w2(F.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.feed_forward = FeedForward(c)

    def forward(self, x: Tensor, attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attend)
        return x + self.feed_forward(self.ffn_norm(x))

    def linears(self) -> list[Linear]:
        return [self.attention.wqkv, self.attention.wo, self.feed_forward.w13, self.feed_forward.w2]


def decode_layer(layer: Layer, x: Tensor, update: Tensor, pos: Tensor, cache) -> tuple[Tensor, Tensor]:
    """One layer of a decode step: x [B, dim], and the last MLP's update of it -> the same after this layer.

    x + update is summed here, and not in the layer before, so that torch.compile fuses it with the norm."""
    x = x + update
    x = x + layer.attention(layer.attention_norm(x), lambda *qkv: cache.decode(pos, *qkv))
    return x, layer.feed_forward(layer.ffn_norm(x))


def decode_logits(norm: nn.RMSNorm, output: nn.Linear, x: Tensor, update: Tensor) -> Tensor:
    """The end of a decode step: logits [B, V]."""
    return output(norm(x + update))


class Llama(nn.Module):
    """The network. Rows of a batch are independent: each has its own length, and no cache holds padding."""

    PROMPT_CHUNK = 1 << 32  # tokens of a prompt that are read at once
    MLP_CHUNK = 8192  # tokens that pass the MLP at once: bounds its [tokens, 2 * ffn_dim] buffer

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = self.whole = config  # `whole` is the model's; several ranks have smaller configs
        self.fingerprint = "random"  # names the weights; an artifact of other weights is refused
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, attend: Callable | None = None) -> Tensor:
        """Training and reference pass: tokens [B, S] -> hidden states [B, S, dim], for `output`.
        attend(layer, cos, sin, q, k, v), with q and k before RoPE, takes the place of exact attention."""
        cos, sin = rope_tables(self.config, tokens.shape[-1], tokens.device)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, partial(attend, i, cos, sin) if attend else layer.attention.causal(cos, sin))
        return self.norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tok_embeddings(tokens).to(self.norm.weight.dtype)

    def extend(self, tokens: Tensor, row: int, start: int, caches: list) -> Tensor:
        """Reads tokens [S] of row `row` at positions from `start` on into every cache -> the last logits [V].
        Layer by layer over all of them: one layer's full K and V exist at a time, never all."""
        x, span = self.embed(tokens), slice(start, start + len(tokens))  # [S, dim]
        for layer, cache in zip(self.layers, caches, strict=True):
            x += layer.attention(layer.attention_norm(x), partial(cache.extend, row, span))
            for chunk in x.split(self.MLP_CHUNK):
                chunk += layer.feed_forward(layer.ffn_norm(chunk))
        return self.output(self.norm(x[-1:]))[0]

    def decode(self, tokens: Tensor, pos: Tensor, caches, step=decode_layer, last=decode_logits) -> Tensor:
        """One token a row: tokens [B] at positions pos [B] (int32, on the device) -> logits [B, V].
        step, last: the functions, or what torch.compile makes of them."""
        x = self.embed(tokens)  # [B, dim]
        update = torch.zeros_like(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, update = step(layer, x, update, pos, cache)
        return last(self.norm, self.output, x, update)


# ------------------------------------------------------------------------------------------------ checkpoints


def weight_slots(
    model: Llama, names: Collection[str] = ("model.embed_tokens.weight",), parts: Iterable | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Where each Hugging Face tensor goes: its name, and a view of the parameter (or part of a fused one).

    names: those of the files: a tied model's one matrix may have either of two. parts: of `allocated`."""
    c, embeddings = model.config, "model.embed_tokens.weight"
    first = embeddings if not c.tied or embeddings in names else "lm_head.weight"
    for i, part in enumerate(parts or (None, *model.layers), -1):
        if i < 0:
            yield from {first: model.tok_embeddings.weight, "model.norm.weight": model.norm.weight}.items()
            yield from () if c.tied else [("lm_head.weight", model.output.weight)]
            continue
        attention, mlp = part.attention, part.feed_forward
        modules = {  # the names that a module's rows have, and how many rows each takes (None: all)
            part.attention_norm: {"input_layernorm": None},
            part.ffn_norm: {"post_attention_layernorm": None},
            attention.q_norm: {"self_attn.q_norm": None},
            attention.k_norm: {"self_attn.k_norm": None},
            attention.wo: {"self_attn.o_proj": None},
            mlp.w2: {"mlp.down_proj": None},
            attention.wqkv: {f"self_attn.{x}_proj": n for x, n in zip("qkv", attention.widths, strict=True)},
            mlp.w13: {"mlp.gate_proj": c.ffn_dim, "mlp.up_proj": c.ffn_dim},
        }
        if c.family == "phi3":
            modules |= {attention.wqkv: {"self_attn.qkv_proj": None}, mlp.w13: {"mlp.gate_up_proj": None}}
        for module, rows in modules.items():
            for kind, parameter in module.named_parameters():
                views = parameter.split([n or len(parameter) for n in rows.values()])
                yield from zip((f"model.layers.{i}.{x}.{kind}" for x in rows), views, strict=True)


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a folder, with the tensors to take from each by the index (None: all).
    Raises UserError where one is missing."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise UserError(f"{folder}: neither {single.name} nor {index.name}; save the model as safetensors")
    files = {}
    with checked(index, "not a usable index"):
        for name, file in sorted(read_json(index)["weight_map"].items(), key=lambda item: item[1]):
            files.setdefault(folder / file, set()).add(name)
        if any(file.parent != folder for file in files):
            raise ValueError("a shard lies outside of the folder")
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: this shard of the checkpoint is missing; download it again")
    return files


def weight_headers(files: dict[Path, set[str] | None]) -> dict[str, tuple[Path, list[int], str]]:
    """What the files say of their tensors: name -> file, shape, dtype; UserError for a damaged file."""
    found = {}
    for file, named in files.items():
        with checked(file, "truncated or not a safetensors file"), safe_open(file, "pt") as tensors:
            for name in (names := tensors.offset_keys()):
                if named is None or name in named:
                    part = tensors.get_slice(name)
                    found[name] = file, part.get_shape(), part.get_dtype()
        if named is not None and (others := set(names) - named):
            text = f"left out {len(others)} tensors, such as {min(others)}: the index does not name them here"
            print(f"note: {file}: {text}", file=sys.stderr)
    return found


def fingerprint(files: Iterable[Path]) -> str:
    """A hash of the sizes and of 64 spread 4 KiB blocks of the files: cheap, and new for new weights."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            for i in range(64):
                stream.seek(max(0, size - 4096) * i // 63)
                digest.update(stream.read(4096))
    return digest.hexdigest()[:16]


def human(n: float) -> str:
    power = sum(n >= 1000**p for p in (1, 2, 3))
    return f"{n / 1000**power:.4g} {('B', 'KB', 'MB', 'GB')[power]}"


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; of the CPU as Linux tells it, elsewhere no limit."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, unused
        return torch.cuda.mem_get_info(device)[0] + kept
    return min(cpu_memory(Path("/")), default=sys.maxsize)


def cpu_memory(root: Path) -> Iterator[int]:
    """Free bytes of the machine, and of each control group (as containers have) that limits this process."""
    with suppress(OSError, TypeError):
        yield int(re.search(r"MemAvailable: *(\d+)", (root / "proc/meminfo").read_text())[1]) * 1024
    paths, groups = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    lines = paths.read_text() if os.access(paths, os.R_OK) else ""
    for version1, path in re.findall(r"^\d+:(memory)?:/(.*)", lines, re.M):
        files = ("limit_in_bytes", "usage_in_bytes") if version1 else ("max", "current")
        for part in (Path(path), *Path(path).parents):
            # "max" is no limit, and a container may not see its host's folders.
            with suppress(OSError, LookupError, ValueError):
                folder = groups / version1 / part
                limit, used = (int((folder / f"memory.{file}").read_text()) for file in files)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = (stat.get(f"total_{key}", stat[key]) for key in ("active_file", "inactive_file"))
                yield limit - used + sum(map(int, cached))  # files' pages can be dropped


def check_free(needed: int, device: torch.device, what: str, advice: str) -> None:
    """Raises UserError where less than `needed` bytes are free."""
    if needed > (free := free_memory(device)):
        fault = f"{what} need {human(needed)}, {human(free)} are free ({device.type})"
        raise UserError(f"not enough memory: {fault}; {advice}")


def outline(whole: ModelConfig, device: torch.device, dtype: torch.dtype, int8: bool = False) -> Llama:
    """The network, or this rank's share of it, on the meta device; UserError where it would not fit."""
    with torch.device("meta"):
        model = Llama(whole.shard(ranks()[1])).to(dtype).eval().requires_grad_(False)
    model.whole = whole
    if int8:  # what stays in floating point need not take four bytes
        model.tok_embeddings.to(torch.bfloat16)
    needed = sum(p.numel() if int8 else p.nbytes for p in model.parameters())
    advice = "use a smaller model" if int8 else "use a smaller model or --weights int8"
    check_free(needed, device, "the weights", advice + " or --dtype bf16" * (dtype == torch.float32))
    return model


def allocated(model: Llama, device: torch.device, fold: Callable | None = None) -> Iterator[nn.Module]:
    """Gives an outline its memory, to be filled part by part: first what lies in no layer, then each layer.

    With fold weights become int8 before the next part, a layer's after fold(model, i) has changed them."""
    ends = nn.ModuleList((model.tok_embeddings, model.norm, model.output))
    for i, part in enumerate((ends, *model.layers), -1):
        part.to_empty(device=device)
        if part is ends and model.config.tied:
            model.output.weight = model.tok_embeddings.weight
        yield part
        if fold and part is not ends:
            fold(model, i)
        for linear in ([model.output] if part is ends else part.linears()) if fold else ():
            linear.quantize()


def copy_local_part(tensor: Tensor, slot: Tensor, name: str, *configs: ModelConfig) -> None:
    """Copies this rank's share of a file's tensor. configs: the whole model's and this rank's.
    Phi-3 fuses projections: a rank has its share of each."""

    def parts(rows: Tensor, c: ModelConfig) -> Iterable[Tensor]:
        heads = [c.n_heads * c.head_dim, c.kv_dim, c.kv_dim]
        fused = heads if "qkv_proj" in name else [c.ffn_dim] * 2 if "gate_up_proj" in name else len(rows)
        return rows.split(fused)

    for part, target in zip(*map(parts, (tensor, slot), configs), strict=True):
        target.copy_(local_part(part, target.shape))


def check_weights(folder: Path, model: Llama, headers: dict[str, tuple[Path, list[int], str]]) -> None:
    """Raises UserError for the first tensor of the files that is not the model's, or that they lack."""
    slots, unused = dict(weight_slots(model, headers)), ("lm_head.weight", "rotary_emb.inv_freq")
    for name, (file, shape, dtype) in headers.items():
        fault = ""
        if name not in slots and not name.endswith(unused):
            fault = f"has no place in a {model.config.family} model of this config.json"
        elif name in slots and list(slots[name].shape) != shape:
            fault = f"is {shape}, but config.json asks for {list(slots[name].shape)}"
        elif name in slots and dtype not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{file}: tensor {name} holds {dtype} numbers; give bf16, fp16 or fp32 weights")
        if fault:
            raise UserError(f"{file}: tensor {name} {fault}; the two do not belong together")
    if missing := [name for name in slots if name not in headers]:
        fault = f"the weights lack {len(missing)} of {len(slots)} tensors"
        raise UserError(f"{folder}: {fault}, the first is {missing[0]}")


def load_model(folder: Path, device: torch.device, dtype: torch.dtype, fold: Callable | None = None) -> Llama:
    """Loads a Hugging Face folder, tensor by tensor into the final weights. fold: as in `allocated`.

    Raises UserError for a missing, truncated or foreign file, for tensors that disagree with config.json
    (before any memory is taken), and for numbers that are not finite."""
    config, files = ModelConfig.from_folder(folder), weight_files(folder)
    headers = weight_headers(files)
    pair = {"lm_head.weight", "model.embed_tokens.weight"}
    if config.tied and headers.keys() >= pair:  # the files may hold a head of its own
        matrices = (safe_open(headers[name][0], "pt").get_tensor(name) for name in pair)
        config.tied = torch.equal(*(matrix.flatten().view(torch.uint8) for matrix in matrices))
    if config.n_layers > len(headers):
        fault = f"config.json asks for {config.n_layers} layers, there are {len(headers)} tensors"
        raise UserError(f"{folder}: {fault}; the two do not belong together")
    with torch.device("meta"):
        check_weights(folder, Llama(config), headers)
    model, rank = outline(config, device, dtype, bool(fold)), ranks()[0]
    model.fingerprint = fingerprint(files)
    for name, slot in weight_slots(model, headers, allocated(model, device, fold)):
        file = headers[name][0]
        with safe_open(file, "pt") as tensors:  # opened for each, so that its pages leave the memory again
            copy_local_part(tensors.get_tensor(name), slot, name, config, model.config)
        if rank and name.endswith(("o_proj.bias", "down_proj.bias")):
            slot.zero_()  # one rank adds it to the sum
        if not torch.stack(slot.aminmax()).isfinite().all():
            sound = safe_open(file, "pt").get_tensor(name).isfinite().all()
            advice = "use --dtype bf16" if sound else "download it again"
            raise UserError(f"{file}: tensor {name} is not finite in {dtype}; {advice}")
    return model


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed=0, fold=None) -> Llama:
    """A model with random weights, for benchmarks. fold: as in `allocated`."""
    model, generator = outline(config, device, dtype, bool(fold)), torch.Generator(device).manual_seed(seed)
    for part in allocated(model, device, fold):
        for name, parameter in part.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)
    return model


# ------------------------------------------------------------------------------------------------- tokenizers
# Three packages read them: tokenizers (Hugging Face's files), sentencepiece (Llama 2), tiktoken (Llama 3).

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id"
    " step_id start_header_id end_header_id eom_id eot_id python_tag"
).split() + [f"reserved_special_token_{i}" for i in range(2, 247)]
STOP_TOKENS = "</s> <|end_of_text|> <|eot_id|> <|eom_id|> <|endoftext|> <|im_end|> <|end|>".split()
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}  # of an added token
NO_SPACE = {  # what steps of a tokenizer.json become where text goes on
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never", "add_prefix_space": False},
    "ByteLevel": {"add_prefix_space": False},
}

AddedTokens = dict[str, dict]  # by name, with flags as a tokenizer.json has them


@dataclass
class Tokenizer:
    """Turns text into token ids and back; made by `load_tokenizer`."""

    encode_text: Callable[[str, bool], list[int]]  # of text and whether it gets the space that some put first
    decode_ids: Callable[[list[int]], str]  # "" for the padding of the embedding
    vocab: dict[str, int]  # ids by name
    special_tokens: dict[str, int]  # by name; no text of a user's ever becomes one
    unknown_id: int | None  # what a text becomes that the vocabulary lacks
    bos_id: int | None = None
    add_bos: bool = False  # do this model's prompts start with BOS?
    rows: int = 0  # of the model's embedding, which may have more ids
    stop_ids: set[int] = field(default_factory=set)
    strip_before: set[int] = field(default_factory=set)  # special tokens that swallow the blanks before them
    strip_after: set[int] = field(default_factory=set)  # and those after them
    space_after: str = ""  # "first": text after a token gets no space; "always": only if it has none; "": one
    split: Callable[[str], Iterable] = lambda text: [(text, None)]  # at added tokens that encode_text lacks
    chat_template: str = ""  # the model's own, in Jinja
    chat_variables: dict[str, str] = field(default_factory=dict)  # what it may name, such as bos_token
    folder: Path | None = None  # where it lies

    def __reduce__(self) -> tuple:  # what encodes cannot be pickled for another process, which loads it again
        return load_tokenizer, (self.folder,)

    @cached_property
    def vocab_size(self) -> int:
        return max(self.vocab.values()) + 1

    @cached_property
    def spelled(self) -> dict[int, str]:
        """Ids that no text may become, with the characters to encode instead."""
        ends = {self.bos_id, *self.stop_ids}
        names = ((i, name * (i != self.unknown_id)) for name, i in self.special_tokens.items())
        return {i: name for i, name in names if name or i in ends}

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of a user's text, none of a special token. bos: as in encode_segments."""
        return self.encode_segments([(text, False)], bos)

    def encode_segments(self, segments: list[tuple[str, bool]], bos: bool = True) -> list[int]:
        """Token ids of pieces of text, each with whether it is the name of a special token.

        bos: put BOS first if this model's prompts start with it and the text does not already."""
        ids: list[int] = []
        for (text, is_special), (name, ends) in zip(segments, [*segments[1:], ("", False)], strict=True):
            if is_special:
                ids.append(self.special_tokens[text])
            else:
                text = text.lstrip() if ids and ids[-1] in self.strip_after else text
                text = text.rstrip() if ends and self.special_tokens[name] in self.strip_before else text
                ids += self.encode_continuation(text, self.spaced(text) if ids else True)
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_continuation(self, text: str, space: bool = False) -> list[int]:
        """Token ids, none special, of text that goes on. space: does it get the space that some put first?"""
        # half a surrogate pair (from a command line that is not UTF-8) becomes U+FFFD
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for part, token in self.split(text):
            space = self.spaced(part) if ids else space
            for i in self.encode_text(part, space) if token is None else [token]:
                # some vocabularies have special tokens as words
                letters = [j for c in self.spelled.get(i, "") for j in self.encode_text(c, False)]
                ids += [j for j in letters if j not in self.spelled] if i in self.spelled else [i]
        return ids

    def spaced(self, text: str) -> bool:
        """Does text after a token get the space that sentencepiece puts first?"""
        return not self.space_after or self.space_after == "always" and not text.startswith(" ")

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Text of `ids`, special tokens left out; UserError for an id outside the vocabulary.

        after: the ids that these continue, so that decode(a) + decode(b, after=a) == decode(a + b)."""
        stream = StreamDecoder(self, after)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()


def splitter(tokens: AddedTokens) -> Callable[[str], Iterator[tuple[str, int | None]]]:
    """The function that cuts text at these added tokens: parts, with their ids or None."""
    import tokenizers

    finder = tokenizers.Tokenizer(tokenizers.models.BPE())
    flags = ({flag: token[flag] for flag in FLAGS} for token in tokens.values())
    finder.add_tokens([tokenizers.AddedToken(name, **each) for name, each in zip(tokens, flags, strict=True)])

    def split(text: str) -> Iterator[tuple[str, int | None]]:
        found, end = finder.encode(text), 0
        for i, (start, stop) in zip(found.ids, found.offsets, strict=True):
            yield text[end:start], None
            yield text[start:stop], tokens[finder.id_to_token(i)]["id"]
            end = stop
        yield text[end:], None

    return split


class StreamDecoder:
    """Decodes token by token and never cuts a character; the pieces join to what `Tokenizer.decode` gives."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self.decode, self.rows, self.new = tokenizer.decode_ids, tokenizer.rows, []
        self.special = {*tokenizer.special_tokens.values()}
        # Some tokenizers drop a text's first space: before it goes some token that has a text
        shown = ([i] for i in reversed(after) if i not in self.special)
        self.old = next((ids for ids in shown if self.decode(ids).strip("\ufffd")), [])

    def push(self, token_id: int) -> str:
        """The text that this token completes: "" in the middle of a character."""
        if not 0 <= token_id < self.rows:
            raise UserError(f"token id {token_id} is outside the vocabulary of {self.rows} ids")
        self.new += [token_id] * (token_id not in self.special)
        text = self.flush()
        if not text or text.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        self.old, self.new = self.new, []
        return text

    def flush(self) -> str:
        """The end of the text: U+FFFD where it stops in the middle of a character, else ""."""
        return self.decode(self.old + self.new)[len(self.decode(self.old)) :]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a checkpoint folder's tokenizer.json, else its vocab.json + merges.txt, else its tokenizer.model.

    The JSON files beside it count, too. UserError for files that are missing or damaged."""
    names = ("tokenizer", "tokenizer_config", "special_tokens_map", "config", "generation_config")
    data, settings, mapped, config, generation = (read_json(folder / f"{name}.json") for name in names)
    files = ["tokenizer.json", *["merges.txt"] * (folder / "vocab.json").exists()]
    files = [folder / name for name in (*files, "tokenizer.model", "tokenizer.model.v3")]
    if not (path := next(filter(Path.exists, files), None)):
        raise absent(folder, "no tokenizer.model, no tokenizer.json, no vocab.json with merges.txt")
    kind, is_model = str(settings.get("tokenizer_class") or ""), path.name.startswith("tokenizer.model")
    with checked(folder / "tokenizer_config.json"):
        settings |= {} if "added_tokens_decoder" in settings else mapped  # as in transformers
        if "Llama" in kind or is_model:  # transformers' class has them by itself
            settings = {"bos_token": "<s>", "eos_token": "</s>"} | settings
        more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or {}
        more = more if isinstance(more, dict) else dict(enumerate(more))
        more = more | {key: token for key, token in settings.items() if key.endswith("_token")}
        more = {key: {"content": token} if isinstance(token, str) else token for key, token in more.items()}
        more = {key: token for key, token in more.items() if isinstance(token, dict)}
        variables = {key: token["content"] for key, token in more.items()}
        bos, eos = variables.get("bos_token"), variables.get("eos_token")
        more.pop("unk_token", None)  # a text may become that one
        named = {token["content"]: FLAGS | token | {"special": True} for token in more.values()}
    tokens = added_tokens(folder, data, settings, named)
    with checked(path):
        if path.name == "merges.txt":  # of GPT-2 and Qwen2
            is_gpt2 = "GPT2" in kind
            lines = path.read_text(encoding="utf-8").split("\n")
            merges = list(filter(None, lines[lines[0].startswith("#version") :]))  # others with # are merges
            splits = [GPT2_SPLIT if is_gpt2 else QWEN2_SPLIT]
            data = byte_level_json(read_json(folder / "vocab.json"), merges, splits, nfc=not is_gpt2)
        if is_model:
            tokenizer = load_tokenizer_model(path.read_bytes(), tokens)
        else:
            tokenizer = load_tokenizer_json(data, tokens)
    special, vocab = tokenizer.special_tokens, tokenizer.vocab
    flags = {name: t for name, t in (named | tokens).items() if t["special"] and name in vocab}
    special |= {name: vocab[name] for name in flags}
    tokenizer.strip_before = {vocab[name] for name, token in flags.items() if token["lstrip"]}
    tokenizer.strip_after = {vocab[name] for name, token in flags.items() if token["rstrip"]}
    if is_model and (settings.get("legacy") is False or "Llama" in kind):
        tokenizer.space_after = "always" if settings.get("legacy") else "first"
    if is_model or tokenizer.bos_id is None:  # the template of a tokenizer.json says what leads a text
        tokenizer.bos_id = special.get(bos, tokenizer.bos_id)
    if settings.get("add_bos_token") is not None:
        tokenizer.add_bos = bool(settings["add_bos_token"])
    tokenizer.chat_variables = {key: name for key, name in variables.items() if isinstance(key, str)}
    tokenizer.stop_ids = {special[name] for name in [eos, *STOP_TOKENS] if name in special}
    for name, data in (("config.json", config), ("generation_config.json", generation)):
        with checked(folder / name):
            ids = data.get("eos_token_id")
            tokenizer.stop_ids |= set(ids) if isinstance(ids, list) else {ids} - {None}
    with checked(folder / "config.json"):
        tokenizer.rows = max(tokenizer.vocab_size, token_id(config.get("vocab_size", 0)))
    with checked(jinja := folder / "chat_template.jinja"):
        template = jinja.read_text(encoding="utf-8") if jinja.exists() else settings.get("chat_template")
        if isinstance(template, list):  # several, each for a use
            template = {each["name"]: each["template"] for each in template}.get("default")
        tokenizer.chat_template = str(template or "")
    tokenizer.folder = folder
    return tokenizer


def added_tokens(folder: Path, data: dict, settings: dict, named: Collection[str]) -> AddedTokens:
    """Those of a tokenizer.json, a tokenizer_config.json and an added_tokens.json; the last file counts.

    Those that are `named` are special. Raises UserError."""
    tokens: AddedTokens = {}

    def add(token: dict, i: int) -> None:
        name, known = token["content"], tokens.get(token["content"], {})
        name.encode()  # ValueError for half a surrogate pair
        special = name in {*named, *STOP_TOKENS} or known.get("special") or token.get("special")
        tokens[name] = FLAGS | token | {"id": token_id(i), "special": bool(special)}

    with checked(folder / "tokenizer.json"):
        for token in data.get("added_tokens") or []:
            add(token, token["id"])
    with checked(folder / "tokenizer_config.json"):
        for i, token in (settings.get("added_tokens_decoder") or {}).items():
            add(token, int(i))
    with checked(folder / "added_tokens.json"):  # it does not say which are special
        for name, i in read_json(folder / "added_tokens.json").items():
            if name not in tokens:
                add({"content": name, "special": True}, i)
    tokens.pop("", None)
    return tokens


def token_id(value) -> int:
    """`value`, where it can be a token id. Raises ValueError for others, before memory goes to so many."""
    if type(value) is not int or not 0 <= value < 1 << 22:  # several times what any vocabulary has
        raise ValueError(f"{value!r:.40} is no token id")
    return value


def load_tokenizer_model(data: bytes, tokens: AddedTokens) -> Tokenizer:
    """A tokenizer.model with these added tokens: lines of "base64 rank" (Llama 3), else a sentencepiece model
    as its trainer wrote it. Raises ValueError or RuntimeError for other bytes."""
    unknown_id, spaced = None, ""
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", data):
        import regex  # tiktoken depends on it, whose own overflows on many blanks
        import tiktoken

        lines = [line.split() for line in data.splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if list(ranks.values()) != list(range(len(lines))):
            raise ValueError("its ranks are not 0, 1, 2, ...")
        if not {bytes([byte]) for byte in range(256)} <= ranks.keys():  # tiktoken would panic
            raise ValueError("it lacks some of the 256 bytes")
        bpe = tiktoken.Encoding("bpe", pat_str=".", mergeable_ranks=ranks, special_tokens={})
        split = regex.compile(LLAMA3_SPLIT)
        vocab = special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(LLAMA3_SPECIAL)}
        pieces, bos_id = dict(enumerate(ranks)), len(ranks)

        def encode(text: str, space: bool) -> list[int]:
            return [i for part in split.findall(text) for i in bpe._encode_single_piece(part.encode())]

    elif not data:  # sentencepiece would load this as a model without pieces
        raise ValueError("empty file")
    else:
        from sentencepiece import SentencePieceProcessor

        sp = SentencePieceProcessor(model_proto=data)
        vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
        special = {name: i for name, i in vocab.items() if sp.is_control(i)}
        pieces = {i: name.replace("▁", " ").encode() for name, i in vocab.items()}
        pieces |= {i: bytes([int(name[3:5], 16)]) for name, i in vocab.items() if sp.is_byte(i)}  # "<0x0A>"
        unknown_id = sp.unk_id()
        pieces[unknown_id] = sp.decode([unknown_id]).encode()  # each model has its own sign for it
        bos_id = None if sp.bos_id() < 0 else sp.bos_id()
        spaced = "".join(sp.encode("a", out_type=str))  # some models have the space after each word

        def encode(text: str, space: bool) -> list[int]:
            lead = "" if space or not spaced.startswith("▁") else "\n"
            return sp.encode(lead + text)[len(sp.encode(lead)) :]

    def decode(ids: list[int]) -> str:
        text = b"".join(pieces.get(i, b"") for i in ids).decode(errors="replace")
        return text.removeprefix(" ") if "▁" in spaced else text

    pieces |= {token["id"]: name.encode() for name, token in tokens.items()}
    vocab = vocab | {name: token["id"] for name, token in tokens.items()}
    plain = {name: token for name, token in tokens.items() if not token["special"]}
    return Tokenizer(encode, decode, vocab, special, unknown_id, bos_id, True, split=splitter(plain))


def load_tokenizer_json(data: dict, tokens: AddedTokens) -> Tokenizer:
    """A tokenizer.json with these added tokens, by Hugging Face's package, which raises an Exception for what
    it cannot read."""
    import tokenizers

    data = data | {"added_tokens": sorted(tokens.values(), key=lambda token: token["id"])}
    data |= {"truncation": None, "padding": None}  # a prompt stays as it is
    steps = json.dumps({key: data.get(key) for key in ("normalizer", "pre_tokenizer")})
    goes_on = json.loads(steps, object_hook=lambda part: part | NO_SPACE.get(part.get("type"), {}))
    goes_on = json.dumps(goes_on)

    @lru_cache
    def library(steps: str) -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer.from_str(json.dumps(data | json.loads(steps)))
        made.encode_special_tokens = True
        return made

    def encode(text: str, space: bool) -> list[int]:
        return library(steps if space else goes_on).encode(text, add_special_tokens=False).ids

    vocab, lead = library(steps).get_vocab(), library(steps).encode("a")
    if any(vocab[name] != token["id"] for name, token in tokens.items()):
        raise ValueError("the ids of added tokens do not follow those of the vocabulary")
    token_id(max(vocab.values()))
    bos_id = token_id(lead.ids[0]) if lead.special_tokens_mask[:1] == [1] else None
    unknown_id = vocab.get(data["model"].get("unk_token"), data["model"].get("unk_id"))
    decode, after = partial(library(steps).decode, skip_special_tokens=False), "first" * ('"first"' in steps)
    return Tokenizer(encode, decode, vocab, {}, unknown_id, bos_id, bos_id is not None, space_after=after)


def byte_level_json(vocab: dict, merges: list, patterns: list[str], nfc: bool) -> dict:
    """A byte-level BPE as a tokenizer.json has it; patterns: what cuts the text, one after another."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cut = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [cut | {"pattern": {"Regex": pattern}} for pattern in patterns] + [level]
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def sentencepiece_model(pieces: Iterable[tuple[str, float, int]], add_space: bool = False) -> bytes:
    """A tokenizer.model that holds a BPE with byte fallback: each id's piece, score and type.

    add_space: whether a text gets a space before it. Types: 1 normal, 2 unknown, 3 control, 4 user-defined,
    5 unused, 6 byte. Source: github.com/google/sentencepiece, src/sentencepiece_model.proto."""

    def sized(tag: int, message: bytes) -> bytes:  # a protobuf field, its length as a varint of three bytes
        n = len(message)
        return bytes([tag, n & 127 | 128, n >> 7 & 127 | 128, n >> 14]) + message

    # BPE with byte fallback, then what is done to spaces: maybe one added, none removed, written as ▁
    spaces = bytes([0x18, add_space, 0x20, 0, 0x28, 1])
    proto = bytearray(sized(0x12, b"\x18\2\x98\2\1") + sized(0x1A, spaces))
    for word, score, kind in pieces:
        data = sized(0x0A, word.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
        proto += sized(0x0A, data)
    return bytes(proto)
