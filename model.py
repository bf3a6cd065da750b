"""A Llama in one file: the network, RoPE's variants, checkpoint folders, tokenizers.

Layouts, used everywhere in this project:
    B    rows of a batch                  S    tokens of one row (prompt or cache)
    Hq   query heads                      Hkv  key/value heads,  G = Hq / Hkv
    D    head dim                         dim  model width
    q    [..., Hq, D]    k, v [..., Hkv, D]    query head h reads key/value head h // G
RoPE is half-split (the Hugging Face order): pair c of a head is its dims c and c + D/2. Its tables
are fp32.

One seam: Attention computes q, k and v BEFORE RoPE and hands them to `attend`, which is a cache's
prefill, a cache's decode, or plain causal attention in training. What a method stores, and how, is
the cache's business.
"""

import base64
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn


class UserError(Exception):
    """A mistake that the user can mend: one line says what is wrong and what to do. Ends with exit
    code 2."""


@dataclass
class ModelConfig:
    """The shape of a Llama-like model."""

    dim: int
    n_layers: int
    n_heads: int  # Hq
    n_kv_heads: int  # Hkv
    head_dim: int  # D
    ffn_dim: int
    vocab_size: int
    max_positions: int  # that the model was made for
    rope_theta: float = 10000.0
    # what config.json says of it, with a rope_type of ROPE_SCALINGS
    rope_scaling: dict | None = None
    norm_eps: float = 1e-5
    tied: bool = False  # are the output's weights those of the embedding?
    qkv_bias: bool = False
    out_bias: bool = False  # of W_o
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMSNorm on each head's q and k, before RoPE (Qwen3)
    sliding_window: int | None = None  # tokens that the model's attention reaches back
    family: str = "llama"
    elitekv: bool = False  # uptrained for EliteKV: only each head's elite pairs are rotated

    @property
    def group(self) -> int:
        """G, the query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def kv_dim(self) -> int:
        """Width of a token's keys, or values, in one layer."""
        return self.n_kv_heads * self.head_dim


# -------------------------------------------------------------------------------------- the network


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., S, H, D] by cos and sin [..., S, D/2], in fp32; returns x's dtype."""
    cos = cos.unsqueeze(-2)
    sin = sin.unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)  # [..., S, H, D/2] each
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


QUERY_CHUNK = 512  # queries that attend a past at once: bounds their mask


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Exact causal attention after RoPE: q [..., S, Hq, D], k and v [..., P + S, Hkv, D] ->
    [..., S, Hq, D].

    The last S keys are those of the queries' own tokens. The first P keys are of the past, in any
    order, and every query attends all of them."""
    S = q.shape[-3]
    P = k.shape[-3] - S
    # v may be a slice of wqkv's output, at any offset. CUDA's kernels want it aligned to 16 bytes.
    v = v.contiguous()

    def heads_first(x: Tensor) -> Tensor:
        """[..., S, H, D] -> [B, H, S, D], as scaled_dot_product_attention wants them."""
        S, H, D = x.shape[-3:]
        return x.reshape(-1, S, H, D).transpose(1, 2)

    shares_keys = q.shape[-2] != k.shape[-2]
    attention = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=shares_keys)
    queries = heads_first(q)
    keys = heads_first(k)
    values = heads_first(v)
    if P == 0:
        out = attention(queries, keys, values, is_causal=True)
    elif q.is_cuda and q.dtype != torch.float32:
        # Flash attention, which knows this mask without reading one from memory.
        from torch.nn.attention.bias import causal_lower_right  # only now: it imports triton

        out = attention(queries, keys, values, attn_mask=causal_lower_right(S, P + S))
    else:
        # A mask of all queries would take S x (P + S) bytes, so they attend in chunks.
        parts = []
        for first in range(0, S, QUERY_CHUNK):
            chunk = queries[:, :, first : first + QUERY_CHUNK]
            position = torch.arange(P + first, P + first + chunk.shape[2], device=q.device)
            may_attend = torch.arange(P + S, device=q.device) <= position[:, None]  # [chunk, P + S]
            parts.append(attention(chunk, keys, values, attn_mask=may_attend))
        out = torch.cat(parts, 2)
    return out.transpose(1, 2).reshape(q.shape)


class Attention(nn.Module):
    """Multi-head attention with grouped queries, up to the one seam: `attend` gets q, k and v
    before RoPE.

    When the model is loaded, a method may fold a matrix of its own into wqkv, as rows after v's, or
    in place of them (then it changes wo, too). `attend` gets what these rows make of x as further
    arguments, `folded`."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.widths = [c.n_heads * c.head_dim, c.kv_dim, c.kv_dim]  # of q, k, v in wqkv's output
        self.wqkv = nn.Linear(c.dim, sum(self.widths), bias=c.qkv_bias)
        self.wo = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=c.out_bias)
        if c.qk_norm:
            self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps)
        else:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """x [..., dim] -> [..., dim]. attend(q, k, v, *folded) makes the output of each head,
        [..., Hq, D]."""
        return self.wo(self.attend_heads(self.wqkv(x), attend))

    def attend_heads(self, qkv: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """wqkv's output [..., sum of widths] -> all heads' outputs side by side [..., Hq * D] (of a
        method that folds values, their ranks in place of D), the input of wo."""
        q, k, v, *folded = qkv.split(self.widths, dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim)))  # [..., Hq, D]
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim)))  # [..., Hkv, D]
        v = v.unflatten(-1, (-1, self.head_dim))
        return attend(q, k, v, *folded).flatten(-2)

    def causal(self, cos: Tensor, sin: Tensor) -> Callable[..., Tensor]:
        """The `attend` of training: exact causal attention under RoPE tables [S, D/2]."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)

        return attend


class FeedForward(nn.Module):
    """SwiGLU: W_2 (silu(W_1 x) * W_3 x)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        # rows of the gate W_1, then of W_3
        self.w13 = nn.Linear(c.dim, 2 * c.ffn_dim, bias=c.mlp_bias)
        self.w2 = nn.Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Layer(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward network."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.feed_forward = FeedForward(c)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attend)
        return x + self.feed_forward(self.ffn_norm(x))

    def linears(self) -> list[nn.Module]:
        """The four large linear layers, in the order in which a token passes them."""
        return [self.attention.wqkv, self.attention.wo, self.feed_forward.w13, self.feed_forward.w2]


class Llama(nn.Module):
    """The network. Rows of a batch are independent: each has its own length, and no cache holds
    padding."""

    MLP_CHUNK = 8192  # tokens that pass the MLP at once: bounds its [tokens, 2 * ffn_dim] buffer

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # Names the weights, so that what was fitted to other weights can be refused.
        self.fingerprint = "random"
        self.is_folded = False  # has a method folded something into the weights (`Method.build`)?
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> x [..., dim]."""
        return self.tok_embeddings(tokens).to(self.norm.weight.dtype)

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor] | None = None) -> Tensor:
        """A pass for training and as a reference: tokens [B, S] -> hidden states [B, S, dim], of
        which `output` makes logits.

        attend(i, cos, sin, q, k, v) replaces exact attention; it gets q and k of layer i before
        RoPE."""
        cos, sin = rope_tables(self.config, tokens.shape[-1], tokens.device)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if attend is None:
                x = layer(x, layer.attention.causal(cos, sin))
            else:
                x = layer(x, partial(attend, i, cos, sin))
        return self.norm(x)

    def extend(
        self, tokens: Tensor, row: int, start: int, caches: list, tick: Callable[[], None]
    ) -> Tensor:
        """Reads tokens [S] into row `row` of every cache, at positions from `start` on. Returns the
        logits after the last token, [V].

        All tokens go through one layer before the next, so only one layer's full K and V exist at a
        time. tick is called after each layer."""
        x = self.embed(tokens)  # [S, dim]
        for layer, cache in zip(self.layers, caches, strict=True):
            attend = partial(cache.prefill, row, start)
            x += layer.attention(layer.attention_norm(x), attend)
            for chunk in x.split(self.MLP_CHUNK):  # views of x, which the sum changes in place
                chunk += layer.feed_forward(layer.ffn_norm(chunk))
            tick()
        return self.output(self.norm(x[-1:]))[0]

    def decode(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: list,
        layer_step: Callable | None = None,
        last_step: Callable | None = None,
    ) -> Tensor:
        """One token of each row: tokens [B] at positions pos [B] (int32, on the device) -> logits
        [B, V].

        layer_step, last_step: decode_layer and decode_logits, or what torch.compile makes of
        them."""
        layer_step = layer_step or decode_layer
        last_step = last_step or decode_logits
        x = self.embed(tokens)  # [B, dim]
        update = torch.zeros_like(x)  # what the MLP of a layer adds to x; the next layer adds it
        for layer, cache in zip(self.layers, caches, strict=True):
            x, update = layer_step(layer, x, update, pos, cache)
        return last_step(self.norm, self.output, x, update)


def decode_layer(
    layer: Layer, x: Tensor, update: Tensor, pos: Tensor, cache
) -> tuple[Tensor, Tensor]:
    """One layer of a decode step: x [B, dim], and what the MLP of the layer before adds to it ->
    x, and what this layer's MLP adds to it.

    The sum x + update waits for the next layer, because torch.compile can fuse it with the norm
    there."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *folded: Tensor) -> Tensor:
        return cache.decode(pos, q, k, v, *folded)

    x = x + update
    x = x + layer.attention(layer.attention_norm(x), attend)
    return x, layer.feed_forward(layer.ffn_norm(x))


def decode_logits(norm: nn.RMSNorm, output: nn.Module, x: Tensor, update: Tensor) -> Tensor:
    """The end of a decode step: logits [B, V]."""
    return output(norm(x + update))


# ---------------------------------------------------------------------------------- RoPE's variants
# Pair c of a head turns by inv_freq[c] radians a token. Models that were extended to longer
# contexts slow the pairs down. A variant gets the frequencies of plain RoPE [D/2] fp64 and what
# config.json says under rope_scaling; it gives the frequencies, and what cos and sin are
# multiplied by.


class ScaledRope(NamedTuple):
    inv_freq: Tensor  # [D/2]
    scale: float  # of cos and sin


def scale_default(inv_freq: Tensor, rope: dict, config: ModelConfig) -> ScaledRope:
    """Plain RoPE."""
    return ScaledRope(inv_freq, 1.0)


def scale_linear(inv_freq: Tensor, rope: dict, config: ModelConfig) -> ScaledRope:
    """Position interpolation (arXiv 2306.15595): all pairs are slowed by `factor`."""
    return ScaledRope(inv_freq / rope["factor"], 1.0)


def scale_llama3(inv_freq: Tensor, rope: dict, config: ModelConfig) -> ScaledRope:
    """Llama 3.1: pairs that turn slowly are slowed by `factor`, fast ones stay as they are, and
    those between are blended."""
    low = rope["low_freq_factor"]  # turns up to which a pair is slow
    high = rope["high_freq_factor"]  # turns from which it is fast
    # how often each pair turns over the original context
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow, 1: fast
    slow_part = (1 - kept) * inv_freq / rope["factor"]
    fast_part = kept * inv_freq
    return ScaledRope(slow_part + fast_part, 1.0)


def scale_yarn(inv_freq: Tensor, rope: dict, config: ModelConfig) -> ScaledRope:
    """YaRN (arXiv 2309.00071): slows the slow pairs, too, and scales cos and sin, so that the
    logits keep their spread in a longer context."""
    factor = rope["factor"]
    original = rope["original_max_position_embeddings"]

    # 1. Pairs up to `low` are kept, pairs from `high` on are slowed by `factor`.
    def pair_of(turns: float) -> float:
        """The pair that makes so many full turns over the original context."""
        pairs = config.head_dim / 2
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(config.rope_theta)

    low = pair_of(rope.get("beta_fast") or 32)
    high = pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, config.head_dim - 1)
    pair = torch.arange(len(inv_freq), dtype=inv_freq.dtype)
    slowed = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    inv_freq = inv_freq * (1 - slowed) + inv_freq / factor * slowed

    # 2. The scale. config.json may give it, or two numbers that it follows from, or neither.
    gain = 0.1 * math.log(max(factor, 1.0))
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = (1 + gain * rope["mscale"]) / (1 + gain * rope["mscale_all_dim"])
    if scale is None:
        scale = 1 + gain
    return ScaledRope(inv_freq, scale)


ROPE_SCALINGS = {
    "default": scale_default,
    "linear": scale_linear,
    "llama3": scale_llama3,
    "yarn": scale_yarn,
}


def rope_tables(
    config: ModelConfig, n_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair: two fp32 tables [n_positions, D/2]."""
    # 1. Plain RoPE: pair c turns by theta^(-2c/D) radians a token. The model's variant changes it.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim  # [D/2]
    plain_inv_freq = config.rope_theta**-exponent
    rope = config.rope_scaling or {"rope_type": "default"}
    scale_variant = ROPE_SCALINGS[rope["rope_type"]]
    scaled = scale_variant(plain_inv_freq, rope, config)

    # 2. The tables. Models were trained with frequencies in fp32, so they are rounded to fp32;
    # their products with positions are exact.
    inv_freq = scaled.inv_freq.float().double()
    position = torch.arange(n_positions, dtype=torch.float64)
    angles = torch.outer(position, inv_freq)
    cos = (angles.cos() * scaled.scale).float()
    sin = (angles.sin() * scaled.scale).float()
    return cos.to(device), sin.to(device)


# ------------------------------------------------------------------------ published shapes, configs

# For benchmarks without weights (--random_weights NAME).
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    "llama-2-7b": ModelConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        head_dim=128,
        ffn_dim=11008,
        vocab_size=32000,
        max_positions=4096,
    ),
    "llama-3.1-8b": ModelConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=14336,
        vocab_size=128256,
        max_positions=131072,
        rope_theta=500000.0,
        rope_scaling=LLAMA31_ROPE,
    ),
    "llama-3.1-70b": ModelConfig(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=28672,
        vocab_size=128256,
        max_positions=131072,
        rope_theta=500000.0,
        rope_scaling=LLAMA31_ROPE,
    ),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # values of model_type that are supported


def read_json(path: Path) -> dict:
    """The object in a JSON file, {} if there is no such file; UserError if it is damaged."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON; download it again ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return data


def load_config(folder: Path) -> ModelConfig:
    """Reads folder/config.json. Raises UserError for anything that this file cannot compute
    exactly."""
    path = folder / "config.json"
    if not path.is_file():
        advice = "give the folder of a Hugging Face download (of its cache, a folder in snapshots/)"
        raise UserError(f"{folder}: no config.json there; {advice}")
    hf = read_json(path)
    try:
        config = config_from_hf(hf)
        check_config(config)
    except KeyError as error:
        raise UserError(f"{path}: not a usable config; it lacks {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"{path}: not a usable config; {error}") from None
    return config


def config_from_hf(hf: dict) -> ModelConfig:
    """The ModelConfig of a config.json's fields. Raises UserError for what this file does not
    compute, and KeyError for a field that is missing."""
    family = hf.get("model_type")
    quantization = hf.get("quantization_config") or {}
    check_supported("model_type", family, FAMILIES)
    check_supported("hidden_act", hf.get("hidden_act", "silu"), ("silu",))
    check_supported("quant_method", quantization.get("quant_method"), (None,))

    # RoPE. Its fields have had several names, and some have stood at the top level.
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    rotated_part = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    check_supported("RoPE type", rope["rope_type"], ROPE_SCALINGS)
    check_supported("partial_rotary_factor", rotated_part, (1.0,))
    max_positions = hf["max_position_embeddings"]
    original = "original_max_position_embeddings"
    rope[original] = hf.get(original) or rope.get(original) or max_positions
    if rope["rope_type"] in ("linear", "yarn"):  # max_position_embeddings may be the original's
        max_positions = max(max_positions, math.floor(rope[original] * rope["factor"]))

    # Some families have biases or a sliding window by their code, and not by these fields.
    attention_bias = hf.get("attention_bias") or False
    sliding_window = None
    if family in ("mistral", "phi3") or hf.get("use_sliding_window"):
        # transformers' default, where the field is missing; null says that there is no window.
        missing = 4096 if family in ("mistral", "qwen2", "qwen3") else None
        sliding_window = hf.get("sliding_window", missing) or None

    n_heads = hf["num_attention_heads"]
    return ModelConfig(
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=hf.get("num_key_value_heads") or n_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // n_heads,
        ffn_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_positions=max_positions,
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        norm_eps=float(hf["rms_norm_eps"]),
        tied=hf.get("tie_word_embeddings") or False,
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias and family != "qwen2",
        mlp_bias=hf.get("mlp_bias") or False,
        qk_norm=family == "qwen3",
        sliding_window=sliding_window,
        family=family,
        elitekv=hf.get("elitekv") or False,
    )


def check_supported(name: str, value: object, supported: Iterable) -> None:
    """Raises UserError where config.json has a value that this file does not compute."""
    if value not in supported:
        only = ", ".join(map(str, supported))
        raise UserError(f"{name} {value!r} is not supported; supported: {only}")


def config_to_hf(config: ModelConfig) -> dict:
    """The fields of a config.json of which config_from_hf makes this config (but for elitekv)."""
    return {
        "architectures": [f"{config.family.title()}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,  # Qwen's; others have none
        "model_type": config.family,
    }


LARGEST_SIZE = 1 << 25  # beyond any model's; a damaged config must not ask for such a tensor


def check_config(config: ModelConfig) -> None:
    """Raises ValueError for a field of the wrong type or size, and for RoPE without finite
    angles."""
    sizes = (
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "ffn_dim",
        "vocab_size",
        "max_positions",
    )
    for name in sizes:
        value = getattr(config, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not 0 < value < LARGEST_SIZE:
            raise ValueError(
                f"{name} is {value!r}, not a whole number from 1 to {LARGEST_SIZE - 1}"
            )
    for name in ("rope_theta", "norm_eps"):
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, not a positive number")
    for name in ("tied", "qkv_bias", "out_bias", "mlp_bias", "elitekv"):
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, not true or false")
    window = config.sliding_window
    if window is not None and (not isinstance(window, int) or window <= 0):
        raise ValueError(f"sliding_window is {window!r}, not a whole number from 1 on")
    if config.n_heads % config.n_kv_heads:
        raise ValueError(
            f"{config.n_heads} query heads cannot share {config.n_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}, and RoPE rotates pairs of dims")
    cos, _ = rope_tables(config, 2, torch.device("cpu"))
    if not cos.isfinite().all():
        raise ValueError(
            f"RoPE with rope_theta {config.rope_theta} and {config.rope_scaling} is not finite"
        )


# -------------------------------------------------------------------------------------- checkpoints

# The Hugging Face names of our modules; of a fused matrix, those of its parts, in the order of
# their rows
HF_NAMES = {
    "tok_embeddings": ("embed_tokens",),
    "norm": ("norm",),
    "output": ("lm_head",),
    "attention_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "feed_forward.w13": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w2": ("mlp.down_proj",),
}
PHI3_NAMES = HF_NAMES | {  # Phi-3 fuses as we do
    "attention.wqkv": ("self_attn.qkv_proj",),
    "feed_forward.w13": ("mlp.gate_up_proj",),
}


def projections(rows: Tensor, name: str, c: ModelConfig) -> tuple[Tensor, ...]:
    """Splits a fused matrix or bias into views: the rows of q, k and v, or those of the gate and
    the up projection. Others stay whole. name: ours or a checkpoint's, which says what it is."""
    if ".wqkv." in name or ".qkv_proj." in name:
        return rows.split([c.n_heads * c.head_dim, c.kv_dim, c.kv_dim])
    if ".w13." in name or ".gate_up_proj." in name:
        return rows.split(c.ffn_dim)
    return (rows,)


def weight_slots(model: Llama, part: str = "") -> Iterator[tuple[str, Tensor]]:
    """Where each Hugging Face tensor goes: its name, and a view of a parameter, or of rows of one.

    part: a submodule whose tensors are wanted, such as "layers.3"; "" for the whole model."""
    hf_names = PHI3_NAMES if model.config.family == "phi3" else HF_NAMES
    for path, parameter in model.get_submodule(part).named_parameters(part):
        # "layers.3.attention.wqkv.weight" -> "layers.3.", "attention.wqkv", "weight"
        layer, module, kind = re.fullmatch(r"(layers\.\d+\.|)(.+)\.(\w+)", path).groups()
        names = hf_names[module]
        slots = (parameter,)
        if len(names) > 1:
            slots = projections(parameter, path, model.config)
        prefix = "" if module == "output" else "model."
        for name, slot in zip(names, slots, strict=True):
            yield f"{prefix}{layer}{name}.{kind}", slot


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """A folder's safetensors files, each with the names of the tensors that the folder's index
    finds in it; None means all. Raises UserError if a file is missing."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    files = {}
    if index.is_file() and not single.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: no weight_map in it; download it again")
        for name, file in weight_map.items():
            files.setdefault(folder / Path(file).name, set()).add(name)
    if not files:
        files = {single: None}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing; download the model again, saved as safetensors")
    return dict(sorted(files.items()))


def read_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of a safetensors file's tensors, by its header. UserError for a damaged file."""
    try:
        with safe_open(file, "pt") as tensors:
            shapes = {}
            for name in tensors.keys():
                if not name.endswith("rotary_emb.inv_freq"):  # old files have it; it is computed
                    shapes[name] = tensors.get_slice(name).get_shape()
            return shapes
    except SafetensorError as error:
        message = f"{file}: truncated or not a safetensors file; download it again ({error})"
        raise UserError(message) from None


def find_weights(files: dict[Path, set[str] | None], config: ModelConfig) -> dict[str, Path]:
    """Which file holds each tensor, by the files' headers. Sets config.tied to what the files say.

    Raises UserError for a damaged file, and for the first tensor that is not as the config asks."""
    folder = next(iter(files)).parent

    # 1. All tensors of the files, but for those that an index does not name.
    file_of = {}
    shape_of = {}
    for file, indexed in files.items():
        shapes = read_shapes(file)
        stale = [name for name in shapes if indexed is not None and name not in indexed]
        if stale:
            fault = f"left out {len(stale)} tensors that the index does not name here"
            print(f"note: {file}: {fault}, such as {stale[0]}", file=sys.stderr)
        for name, shape in shapes.items():
            if name not in stale:
                file_of[name] = file
                shape_of[name] = shape

    # 2. A tied model has one matrix for its embedding and its output, under either name. A model
    # whose files have both is not tied, whatever its config says.
    embeddings = "model.embed_tokens.weight"
    head = "lm_head.weight"
    if config.tied and head in file_of:
        if embeddings in file_of:
            config.tied = False
        else:
            file_of[embeddings] = file_of.pop(head)
            shape_of[embeddings] = shape_of.pop(head)

    # 3. Each tensor has the shape that the config asks for, none is missing, and none is too many.
    if config.n_layers > len(file_of):
        raise UserError(f"{folder}: {len(file_of)} tensors cannot be {config.n_layers} layers")
    with torch.device("meta"):
        asked = {name: list(slot.shape) for name, slot in weight_slots(Llama(config))}
    for name in [*asked, *shape_of]:
        found = shape_of.get(name)
        wanted = asked.get(name)
        if found != wanted:
            found = "missing" if found is None else found
            wanted = "none" if wanted is None else wanted
            fault = f"is {found}, config.json asks for {wanted}"
            where = file_of.get(name, folder)
            raise UserError(f"{where}: tensor {name} {fault}; the two do not belong together")
    return file_of


def fingerprint(files: Iterable[Path]) -> str:
    """A hash that other weights would not have: of each file's size, and of 64 blocks of 4 KiB that
    are spread over it. Reading all of a file would take too long."""
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
    """Bytes with a unit: 1234567 -> "1.235 MB"."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.4g} {unit}"
        n = n / 1000
    return f"{n:.4g} GB"


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a GPU. Of a CPU's memory no limit is known."""
    if device.type != "cuda":
        return math.inf
    held_by_pytorch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held_by_pytorch


def empty_model(config: ModelConfig, dtype: torch.dtype, fingerprint: str = "random") -> Llama:
    """A Llama on the meta device: its weights take no memory yet. fingerprint: names those to
    come."""
    with torch.device("meta"):
        model = Llama(config)
    model.fingerprint = fingerprint
    return model.to(dtype).eval().requires_grad_(False)


def check_weights_fit(needed: int, device: torch.device) -> None:
    """Raises UserError where weights of so many bytes would not fit the device."""
    free = free_memory(device)
    if needed > free:
        fault = f"the weights need {human(needed)}, {human(free)} are free ({device.type})"
        raise UserError(
            f"not enough memory: {fault}; use a smaller model, --dtype bf16 or --weights int8"
        )


def weight_parts(model: Llama) -> list[str]:
    """Names of the modules that get their weights one after another."""
    layers = [f"layers.{i}" for i in range(len(model.layers))]
    return ["tok_embeddings", "norm", "output", *layers]


def give_weights(
    model: Llama, part: str, device: torch.device, fill: Callable[[Llama, str], None]
) -> None:
    """Allocates one of weight_parts on the device; fill(model, part) writes its weights."""
    module = model.get_submodule(part)
    if part == "output" and model.config.tied:
        module.weight = model.tok_embeddings.weight
    else:
        module.to_empty(device=device)
        fill(model, part)


def build(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    fill: Callable[[Llama, str], None],
    fingerprint: str = "random",
) -> Llama:
    """The network with its weights, which fill(model, part) writes, a part at a time.

    Raises UserError where they would not fit, before any memory is taken."""
    model = empty_model(config, dtype, fingerprint)
    check_weights_fit(sum(p.nbytes for p in model.parameters()), device)
    for part in weight_parts(model):
        give_weights(model, part, device, fill)
    return model


def copy_weight(model: Llama, name: str, slot: Tensor, tensor: Tensor) -> None:
    """Copies a checkpoint's tensor of this name to its slot, which is a parameter of the model, or
    a part of one. A function of its own for extras that copy something else."""
    slot.copy_(tensor)


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype, build: Callable = build
) -> Llama:
    """Loads a Hugging Face folder, tensor by tensor into the final weights. build: makes the model
    of them.

    Raises UserError for a missing, truncated or foreign file, for tensors that disagree with
    config.json (before any memory is taken), and for numbers that are not finite."""
    config = load_config(folder)
    files = weight_files(folder)
    file_of = find_weights(files, config)

    def fill(model: Llama, part: str) -> None:
        for name, slot in weight_slots(model, part):
            # The file is opened for each tensor, so that its pages leave the memory again.
            with safe_open(file_of[name], "pt") as file:
                stored_name = name if name in file.keys() else "lm_head.weight"  # of a tied model
                tensor = file.get_tensor(stored_name)
            copy_weight(model, name, slot, tensor)
            # The least and the largest weight say it, and need no mask as large as the tensor.
            is_finite = torch.stack(slot.aminmax()).isfinite().all()
            if not is_finite:
                advice = "use --dtype bf16" if tensor.isfinite().all() else "download it again"
                raise UserError(
                    f"{file_of[name]}: tensor {name} is not finite in {dtype}; {advice}"
                )

    return build(config, device, dtype, fill, fingerprint(files))


def random_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    build: Callable = build,
) -> Llama:
    """A model with random weights, for benchmarks. build: makes the model of them."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(model: Llama, part: str) -> None:
        for name, parameter in model.get_submodule(part).named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
            elif name.endswith("bias"):
                parameter.fill_(0.0)
            else:  # of a norm
                parameter.fill_(1.0)

    return build(config, device, dtype, fill)


# --------------------------------------------------------------------------------------- tokenizers
# Three kinds of files, each read by the library that is made for it. A class imports its library
# only when a tokenizer is loaded, since prompts of random tokens need none.

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1"
    " finetune_right_pad_id step_id start_header_id end_header_id eom_id eot_id python_tag"
).split() + [f"reserved_special_token_{i}" for i in range(2, 247)]
STOP_TOKENS = "</s> <|end_of_text|> <|eot_id|> <|eom_id|> <|endoftext|> <|im_end|> <|end|>".split()


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Loads a checkpoint folder's tokenizer. Raises UserError for files that are missing or
    damaged."""
    if (folder / "tokenizer.json").exists():
        return HfTokenizer(folder)
    if (folder / "tokenizer.model").exists():
        content = (folder / "tokenizer.model").read_bytes()
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content):  # Llama 3's lines of "base64 rank"
            return TiktokenTokenizer(folder)
        return SentencePieceTokenizer(folder)
    if (folder / "merges.txt").exists():
        load = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        command = f'python -c "from transformers import AutoTokenizer; {load}"'
        raise UserError(f"{folder}: merges.txt without a tokenizer.json; write one with: {command}")
    raise UserError(f"{folder}: no tokenizer.json and no tokenizer.model; download one of them")


class Tokenizer:
    """Text into token ids and back: what the three kinds below have in common.

    special_tokens  name -> id of each control token; a user's text never becomes one of them
    stop_ids        tokens that end an answer: the files' eos_token_id, and those of STOP_TOKENS
    bos_id          the token before a text, or None
    add_bos         do this model's prompts start with bos_id?
    vocab_size      how many ids the tokenizer has
    rows            how many the model's embedding has, which may be more (padding)
    chat_template   the model's own, in Jinja, or ""
    chat_variables  tokens that the template may name, such as bos_token -> "<s>"

    A kind has three methods of its own: load, text_ids and decode_ids."""

    vocab_size: int

    def __init__(self, folder: Path):
        # 1. What the files say, without a library.
        self.folder = folder
        settings = read_json(folder / "tokenizer_config.json")
        self.settings = {key: value for key, value in settings.items() if value is not None}
        self.chat_template = read_chat_template(folder, self.settings)
        self.chat_variables = token_names(self.settings)

        # 2. What the library says. `load` may set any of these.
        self.bos_id = None
        self.add_bos = False
        self.unknown_id = None  # the token for what the vocabulary cannot write
        self.space_after_special = False  # may text after a control token get a space before it?
        self.strips_before: set[int] = set()  # added tokens that take the spaces before them
        self.strips_after: set[int] = set()  # and those after them
        self.special_tokens = self.load()

        # 3. BOS.
        if self.bos_id is None:
            self.bos_id = self.special_tokens.get(self.chat_variables.get("bos_token"))
        adds_bos = bool(self.settings.get("add_bos_token", self.add_bos))
        self.add_bos = adds_bos and self.bos_id is not None

        # 4. Tokens that end an answer: some are known by name, and two files give ids.
        config = read_json(folder / "config.json")
        self.rows = max(self.vocab_size, config.get("vocab_size", 0))
        self.stop_ids = set()
        for name in (self.chat_variables.get("eos_token"), *STOP_TOKENS):
            if name in self.special_tokens:
                self.stop_ids.add(self.special_tokens[name])
        for file in (config, read_json(folder / "generation_config.json")):
            eos = file.get("eos_token_id")
            if isinstance(eos, list):
                self.stop_ids.update(eos)
            elif eos is not None:
                self.stop_ids.add(eos)

        # 5. Tokens that no text may become. The unknown one may, unless it has another task.
        self.control_ids = set(self.special_tokens.values())
        if self.unknown_id not in {self.bos_id, *self.stop_ids}:
            self.control_ids.discard(self.unknown_id)

    def load(self) -> dict[str, int]:
        """Opens the library, and gives the ids of the control tokens by name."""
        raise NotImplementedError

    def text_ids(self, text: str, add_space: bool) -> list[int]:
        """The library's ids of a text, in which a control token's name is plain text.

        add_space: put a space first, if this model's texts get one."""
        raise NotImplementedError

    def decode_ids(self, ids: list[int]) -> str:
        """Text of ids, control tokens by name, "" for the padding of the embedding."""
        raise NotImplementedError

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of a user's text. bos: put BOS first, if this model's prompts start with it."""
        return self.encode_segments([(text, False)], bos)

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a user's text that goes on: without BOS and without a space before it."""
        return self.encode_text(text, add_space=False)

    def encode_segments(self, segments: list[tuple[str, bool]], bos: bool = True) -> list[int]:
        """Token ids of pieces of text, each with whether it is the name of a control token.

        bos: put BOS first, if this model's prompts start with it and the text does not already."""
        ids = []
        for i, (text, is_special) in enumerate(segments):
            if is_special:
                ids.append(self.special_tokens[text])
                continue
            # Spaces beside a control token may belong to it.
            if ids and ids[-1] in self.strips_after:
                text = text.lstrip()
            if i + 1 < len(segments):
                next_text, next_is_special = segments[i + 1]
                if next_is_special and self.special_tokens[next_text] in self.strips_before:
                    text = text.rstrip()
            is_start = not ids
            ids += self.encode_text(text, add_space=is_start or self.space_after_special)
        if bos and self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_text(self, text: str, add_space: bool) -> list[int]:
        """Token ids of a user's text, none of which is a control token.

        `text_ids` takes a control token's name for plain text. It may still give the token's id,
        since a vocabulary can have the name among its words; then the ids of its letters stand in
        for it. It may also give the token for what the vocabulary cannot write. If that one is a
        control token, because it ends answers, too, then it is left out."""
        ids = []
        for token_id in self.text_ids(text, add_space):
            if token_id not in self.control_ids:
                ids.append(token_id)
            elif token_id != self.unknown_id:
                for letter in self.special_name(token_id):
                    for letter_id in self.text_ids(letter, False):
                        if letter_id not in self.control_ids:
                            ids.append(letter_id)
        return ids

    def special_name(self, token_id: int) -> str:
        """The name of a control token."""
        for name, special_id in self.special_tokens.items():
            if special_id == token_id:
                return name
        raise KeyError(token_id)

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Text of ids, control tokens left out; UserError for an id outside the vocabulary.

        after: the ids that these continue, so that decode(a) + decode(b, after=a) == decode(a +
        b)."""
        stream = StreamDecoder(self, after)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()

    def note_spaces(self, token_id: int, flags: dict) -> None:
        """Remembers what an added token's flags lstrip and rstrip say of the spaces beside it."""
        if flags.get("lstrip"):
            self.strips_before.add(token_id)
        if flags.get("rstrip"):
            self.strips_after.add(token_id)

    def __reduce__(self) -> tuple:
        """How a tokenizer is pickled: as its folder, from which another process loads it again."""
        return load_tokenizer, (self.folder,)


def read_chat_template(folder: Path, settings: dict) -> str:
    """The text of chat_template.jinja, or what tokenizer_config.json has; "" if there is none."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text; download it again") from error
    template = settings.get("chat_template", "")
    if isinstance(template, list):  # several, each with a name that says what it is for
        templates = {choice["name"]: choice["template"] for choice in template}
        template = templates.get("default", "")
    return template


def token_names(settings: dict) -> dict[str, str]:
    """The tokens that have a task by tokenizer_config.json: {"eos_token": "</s>", ...}.

    A token is given as its name, or as an object with the name as its content."""
    tokens = {key: token for key, token in settings.items() if key.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens.update(extra)
    names = {}
    for key, token in tokens.items():
        name = token["content"] if isinstance(token, dict) else token
        if isinstance(name, str):  # add_bos_token is a bool
            names[key] = name
    return names


def control_names(settings: dict) -> set[str]:
    """The names of all tokens that tokenizer_config.json says are control tokens."""
    names = {name for key, name in token_names(settings).items() if key != "unk_token"}
    for key in ("extra_special_tokens", "additional_special_tokens"):
        more = settings.get(key, [])
        if isinstance(more, list):
            for token in more:
                names.add(token["content"] if isinstance(token, dict) else token)
    return names


class HfTokenizer(Tokenizer):
    """A tokenizer.json, run by Hugging Face's `tokenizers`."""

    def load(self) -> dict[str, int]:
        import tokenizers

        path = self.folder / "tokenizer.json"
        data = read_json(path)

        # 1. Two libraries: one for the start of a text, which may get a space before it, and one
        # for text that goes on, without the steps that put it there.
        steps = {key: data.get(key) for key in ("normalizer", "pre_tokenizer")}
        steps_without_space = json.loads(json.dumps(steps), object_hook=without_space)
        # With the prepend_scheme "first" only a text's very start gets a space.
        self.space_after_special = '"prepend_scheme": "first"' not in json.dumps(steps)

        def open_library(data: dict) -> tokenizers.Tokenizer:
            try:
                library = tokenizers.Tokenizer.from_str(json.dumps(data))
            except Exception as error:  # the library has no class of its own for this
                raise UserError(
                    f"{path}: not a valid tokenizer; download it again ({error})"
                ) from error
            library.no_truncation()
            library.no_padding()
            library.encode_special_tokens = True  # a control token's name in a text is text
            return library

        self.library = open_library(data)
        self.continuing = self.library
        if steps_without_space != steps:
            self.continuing = open_library(data | steps_without_space)

        # 2. Ids of all tokens. The library numbers added tokens itself, so the file must agree.
        vocab = self.library.get_vocab()
        added = {token["content"]: token for token in data.get("added_tokens") or []}
        for name, token in added.items():
            if vocab[name] != token["id"]:
                raise UserError(f"{path}: the added token {name} cannot have the id {token['id']}")
        self.vocab_size = max(vocab.values()) + 1
        self.unknown_id = vocab.get(data["model"].get("unk_token"), data["model"].get("unk_id"))

        # 3. Control tokens: those that the file calls special, and those that only the settings, or
        # STOP_TOKENS, say are such. The library has to be told of these.
        special = {name for name, token in added.items() if token["special"]}
        by_name = {name for name in STOP_TOKENS if name in added}
        by_name.update(control_names(self.settings) & vocab.keys())
        for library in (self.library, self.continuing):
            library.add_special_tokens(sorted(by_name - special))
        special |= by_name
        for name in special:
            self.note_spaces(vocab[name], added.get(name, {}))

        # 4. BOS, if the file puts a control token before a text.
        encoding = self.library.encode("a")
        if encoding.special_tokens_mask[:1] == [1]:
            self.bos_id = encoding.ids[0]
            self.add_bos = True
        return {name: vocab[name] for name in sorted(special)}

    def text_ids(self, text: str, add_space: bool) -> list[int]:
        library = self.library if add_space else self.continuing
        return library.encode(text, add_special_tokens=False).ids

    def decode_ids(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=False)


def without_space(step: dict) -> dict:
    """A step of a tokenizer.json, changed to put no space before a text."""
    kind = step.get("type")
    if kind == "Prepend":
        return step | {"prepend": ""}
    if kind == "Metaspace":
        return step | {"prepend_scheme": "never", "add_prefix_space": False}
    if kind == "ByteLevel":
        return step | {"add_prefix_space": False}
    return step


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer.model without a tokenizer.json, run by sentencepiece (Llama 2, Mistral, nano).

    sentencepiece puts a space before a text, so that a word is the same token at the start and in
    the middle. We put one where transformers does: not before a text that starts with a space, if
    it is a LlamaTokenizer, and after a control token only if that is a `legacy` one."""

    def load(self) -> dict[str, int]:
        from sentencepiece import SentencePieceProcessor

        path = self.folder / "tokenizer.model"
        content = path.read_bytes()
        if not content:  # sentencepiece would load this as a model without pieces
            raise UserError(f"{path}: an empty file; download it again")
        # In protobuf, fields that are appended override the earlier ones. These bytes are
        # normalizer_spec { add_dummy_prefix: false }: no space before text that goes on.
        no_space = b"\x1a\x02\x18\x00"
        try:
            self.processor = SentencePieceProcessor(model_proto=content)
            self.continuing = SentencePieceProcessor(model_proto=content + no_space)
        except RuntimeError as error:
            raise UserError(
                f"{path}: not a valid tokenizer; download it again ({error})"
            ) from error
        sp = self.processor

        # 1. Spaces: what the settings say, and what the file does.
        legacy = self.settings.get("legacy")
        is_llama = "Llama" in self.settings.get("tokenizer_class", "")
        self.first_space_is_enough = is_llama or legacy is False
        self.space_after_special = bool(legacy) or not self.first_space_is_enough
        self.adds_space = sp.encode("a") != self.continuing.encode("a")
        self.removes_spaces = sp.encode("a  a") == sp.encode("a a")  # all but one between words

        # 2. The vocabulary: sentencepiece's, and what tokenizer_config.json adds.
        self.vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
        special = {name for name, i in self.vocab.items() if sp.is_control(i)}
        special.update(STOP_TOKENS, control_names(self.settings))
        self.text_tokens = {}  # added, but no control tokens: found in a text as a whole
        for token_id, token in self.settings.get("added_tokens_decoder", {}).items():
            name = token["content"]
            self.vocab[name] = int(token_id)
            self.note_spaces(int(token_id), token)
            if token.get("special"):
                special.add(name)
            elif name not in special and int(token_id) >= sp.vocab_size():
                self.text_tokens[name] = token
        self.names = {i: name for name, i in self.vocab.items()}
        self.vocab_size = max(self.names) + 1
        self.unknown_id = sp.unk_id()
        # A regular expression takes the first alternative that fits, so the longest name is first.
        longest_first = sorted(self.text_tokens, key=len, reverse=True)
        any_name = "|".join(map(re.escape, longest_first))
        matches_nothing = "(?!)"
        self.text_token_pattern = re.compile(any_name or matches_nothing)

        # 3. BOS and EOS, if tokenizer_config.json does not name them.
        for key, i in (("bos_token", sp.bos_id()), ("eos_token", sp.eos_id())):
            if i >= 0:
                self.chat_variables.setdefault(key, sp.id_to_piece(i))
        self.add_bos = True
        return {name: self.vocab[name] for name in sorted(special) if name in self.vocab}

    def text_ids(self, text: str, add_space: bool) -> list[int]:
        ids = []
        done = 0  # characters of the text whose ids are there
        for match in self.text_token_pattern.finditer(text):
            start, end = match.span()
            token = self.text_tokens[match[0]]
            neighbours = text[max(start - 1, 0) : start] + text[end : end + 1]
            if token.get("single_word") and re.search(r"\w", neighbours):
                continue  # a part of a longer word
            before = text[done:start]
            if token.get("lstrip"):
                before = before.rstrip()
            ids += self.processor_ids(before, add_space)
            ids.append(self.vocab[match[0]])
            if token.get("rstrip"):
                end = re.compile(r"\s*").match(text, end).end()
            done = end
            add_space = add_space and self.space_after_special
        return ids + self.processor_ids(text[done:], add_space)

    def processor_ids(self, text: str, add_space: bool) -> list[int]:
        """Ids of a text without added tokens. In sentencepiece's words a space is written ▁."""
        if text.startswith(" ") and self.removes_spaces:
            add_space = True  # for the text's own space, which the processor removes
        elif text.startswith((" ", "▁")) and self.first_space_is_enough:
            add_space = False
        processor = self.processor if add_space else self.continuing
        return processor.encode(text)

    def decode_ids(self, ids: list[int]) -> str:
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.adds_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's part of a text, which may be a part of a character."""
        name = self.names.get(token_id, "")
        if token_id < self.processor.vocab_size() and self.processor.is_byte(token_id):
            return bytes([int(name[3:5], 16)])  # <0x0A>
        return name.replace("▁", " ").encode()


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer.model, lines of "base64 rank" without a tokenizer.json, run by
    tiktoken."""

    def load(self) -> dict[str, int]:
        import tiktoken

        path = self.folder / "tokenizer.model"
        # Not by tiktoken.load, which keeps a copy of each file and finds it by the path alone.
        ranks = {}
        try:
            for line in path.read_bytes().splitlines():
                word, rank = line.split()
                ranks[base64.b64decode(word, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"{path}: not a valid tokenizer; download it again ({error})"
            ) from error
        has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
        if list(ranks.values()) != list(range(len(ranks))) or not has_all_bytes:
            raise UserError(
                f"{path}: not a valid tokenizer; download it again (ranks or bytes are missing)"
            )

        names = [f"<|{name}|>" for name in LLAMA3_SPECIAL]
        special = {name: len(ranks) + i for i, name in enumerate(names)}
        self.library = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + len(special)
        self.chat_variables.setdefault("bos_token", "<|begin_of_text|>")
        self.add_bos = True
        return special

    def text_ids(self, text: str, add_space: bool) -> list[int]:
        return self.library.encode_ordinary(text)  # a control token's name in a text is text

    def decode_ids(self, ids: list[int]) -> str:
        known = [i for i in ids if i < self.vocab_size]
        return self.library.decode(known, errors="replace")


class StreamDecoder:
    """Decodes token by token, in pieces of which none ends within a character. Tokenizer.decode
    joins them.

    A token has no text of its own: it may be a part of a character, and at the start of a text it
    may lose a space. So `pending` tokens wait until their text is complete, and they are decoded
    together with the `shown` tokens before them, whose text is then cut off."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.special_ids = set(tokenizer.special_tokens.values())
        self.pending: list[int] = []
        self.shown: list[int] = []
        # Of the tokens before, the last one that has some text is enough.
        for token_id in reversed(after):
            if token_id in self.special_ids:
                continue
            if tokenizer.decode_ids([token_id]).strip("\ufffd"):
                self.shown = [token_id]
                break

    def push(self, token_id: int) -> str:
        """The text that this token completes: "" in the middle of a character."""
        rows = self.tokenizer.rows
        if not 0 <= token_id < rows:
            raise UserError(f"token id {token_id} is outside the vocabulary of {rows} ids")
        if token_id not in self.special_ids:
            self.pending.append(token_id)
        text = self.flush()
        if not text or text.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        self.shown = self.pending
        self.pending = []
        return text

    def flush(self) -> str:
        """The text of what is pending: U+FFFD where it stops in the middle of a character."""
        shown_text = self.tokenizer.decode_ids(self.shown)
        text = self.tokenizer.decode_ids(self.shown + self.pending)
        return text[len(shown_text) :]
