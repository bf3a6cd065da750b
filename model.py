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
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn


class UserError(Exception):
    """A mistake that the user can mend: one line says what is wrong and what to do. Ends with exit code 2."""


@contextmanager
def checked(path: Path, fault: str) -> Iterator[None]:
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
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON; download it again ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: no JSON object; download it again")
    return data


# ---------------------------------------------------------------------------------------------- configuration

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")


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
            advice = "give the folder of a Hugging Face download (of its cache, a folder in snapshots/)"
            raise UserError(f"{folder}: no config.json there; {advice}")
        hf = read_json(path)
        try:
            config = cls.from_hf(hf)
            config.check()
        except KeyError as error:
            raise UserError(f"{path}: not a usable config; it lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: not a usable config; {error}") from None
        return config

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """What a config.json says. Raises UserError for what this file does not compute."""
        family, rope = hf.get("model_type"), dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        kind, rotated = rope.get("rope_type", rope.get("type", "default")), "partial_rotary_factor"
        supported = {  # what config.json says, and what may stand there
            "model_type": (family, FAMILIES),
            "hidden_act": (hf.get("hidden_act", "silu"), ["silu"]),
            "RoPE type": (kind, ROPE_SCALINGS),
            rotated: (rope.get(rotated, hf.get(rotated, 1.0)), [1.0]),
            "quant_method": ((hf.get("quantization_config") or {}).get("quant_method"), [None]),
        }
        for name, (given, known) in supported.items():
            if given not in known:
                only = ", ".join(map(str, known))
                raise UserError(f"{name} {given!r} is not supported; supported: {only}")
        n_heads, positions = hf["num_attention_heads"], hf["max_position_embeddings"]
        original = "original_max_position_embeddings"
        rope |= {"rope_type": kind, original: hf.get(original) or rope.get(original) or positions}
        if kind in ("linear", "yarn"):  # they reach beyond what the model was made for
            positions = max(positions, math.floor(rope[original] * rope["factor"]))
        bias = hf.get("attention_bias") or False
        windowed = family in ("mistral", "phi3") or hf.get("use_sliding_window")
        given = {f.name: hf.get(f.metadata["hf"]) for f in fields(cls) if f.metadata}
        given = {name: value for name, value in given.items() if value is not None or not hasattr(cls, name)}
        made = {
            "n_kv_heads": hf.get("num_key_value_heads") or n_heads,
            "head_dim": hf.get("head_dim") or hf["hidden_size"] // n_heads,
            "max_positions": positions,
            "rope_theta": float(rope.get("rope_theta") or hf.get("rope_theta", 10000.0)),
            "rope_scaling": None if kind == "default" else rope,
            "norm_eps": float(hf["rms_norm_eps"]),
            "qkv_bias": bias or family == "qwen2",
            "out_bias": bias and family != "qwen2",
            "qk_norm": family == "qwen3",
            "sliding_window": windowed and hf.get("sliding_window") or None,
            "elitekv": hf.get("elitekv") or False,
        }
        return cls(**given | made)

    def to_hf(self) -> dict:
        """What from_hf reads, as a config.json has it."""
        named = {f.metadata["hf"]: getattr(self, f.name) for f in fields(self) if f.metadata}
        return {"architectures": [f"{self.family.title()}ForCausalLM"], "hidden_act": "silu"} | named

    def check(self) -> None:
        """Raises ValueError for a field of the wrong type or size, and for RoPE without finite angles."""
        for f in fields(self):
            value, limit = getattr(self, f.name), 1 << 25 if f.type is int else math.inf
            if not isinstance(value, f.type) or type(value) in (int, float) and not 0 < value < limit:
                raise ValueError(f"{f.name} is {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, and RoPE rotates pairs of dims")
        if not rope_tables(self, 2, torch.device("cpu"))[0].isfinite().all():
            raise ValueError(f"RoPE with rope_theta {self.rope_theta} and {self.rope_scaling} is not finite")


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


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        # A method may append rows to wqkv at load time (or put them in v's place, and change wo): `attend`
        # gets their results as further arguments.
        self.widths = [c.n_heads * c.head_dim, c.kv_dim, c.kv_dim]
        self.head_dim = c.head_dim
        self.wqkv = nn.Linear(c.dim, sum(self.widths), bias=c.qkv_bias)
        self.wo = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=c.out_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, attend) -> Tensor:
        return self.wo(self.attended(self.wqkv(x), attend))

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
        self.w13 = nn.Linear(c.dim, 2 * c.ffn_dim, bias=c.mlp_bias)  # gate rows, then up rows
        self.w2 = nn.Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


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

    def linears(self) -> list[nn.Linear]:
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

    MLP_CHUNK = 8192  # tokens that pass the MLP at once: bounds its [tokens, 2 * ffn_dim] buffer

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.fingerprint = "random"  # names the weights; an artifact of other weights is refused
        self.is_folded = False  # do the weights have what the method folds into them, before `Method.build`?
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
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

    def extend(self, tokens: Tensor, row: int, start: int, caches: list, tick: Callable[[], None]) -> Tensor:
        """Reads tokens [S] of row `row` at positions from `start` on into every cache -> the last logits [V].
        Layer by layer, so that one layer's full K and V exist at a time; tick is called after each."""
        x, span = self.embed(tokens), slice(start, start + len(tokens))  # [S, dim]
        for layer, cache in zip(self.layers, caches, strict=True):
            x += layer.attention(layer.attention_norm(x), partial(cache.extend, row, span))
            for chunk in x.split(self.MLP_CHUNK):
                chunk += layer.feed_forward(layer.ffn_norm(chunk))
            tick()
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

HF_NAMES = {  # of our modules: one name, or one for each part of a fused matrix's rows
    "tok_embeddings": "embed_tokens",
    "norm": "norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wqkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w13": "mlp.gate_proj mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
PHI3_NAMES = {"attention.wqkv": "self_attn.qkv_proj", "feed_forward.w13": "mlp.gate_up_proj"}


def projections(rows: Tensor, name: str, c: ModelConfig) -> tuple[Tensor, ...]:
    """The rows of a matrix or bias of this name by projection, as views: some matrices are fused."""
    if re.search(r"\.(wqkv|qkv_proj)\.", name):
        return rows.split([c.n_heads * c.head_dim, c.kv_dim, c.kv_dim])
    return rows.split(c.ffn_dim if re.search(r"\.(w13|gate_up_proj)\.", name) else len(rows))


def weight_slots(model: Llama, of: str = "") -> Iterator[tuple[str, Tensor]]:
    """Where each Hugging Face tensor of a module goes: its name, and a view of (a part of) a parameter."""
    names = HF_NAMES | (PHI3_NAMES if model.config.family == "phi3" else {})
    for path, parameter in model.get_submodule(of).named_parameters(of):
        layer, module, kind = re.fullmatch(r"(layers\.\d+\.|)(.+)\.(\w+)", path).groups()
        hf, prefix = names[module].split(), "" if module == "output" else "model."
        views = projections(parameter, path, model.config) if len(hf) > 1 else [parameter]
        yield from zip((f"{prefix}{layer}{name}.{kind}" for name in hf), views, strict=True)


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """A folder's safetensors files, with the index's tensors (None: all). UserError if one is missing."""
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
            names = [name for name in tensors.keys() if not name.endswith("rotary_emb.inv_freq")]  # unused
            return {name: tensors.get_slice(name).get_shape() for name in names}
    except SafetensorError as error:
        message = f"{file}: truncated or not a safetensors file; download it again ({error})"
        raise UserError(message) from None


def find_weights(files: dict[Path, set[str] | None], config: ModelConfig) -> dict[str, Path]:
    """Which file holds each tensor, by the files' headers. UserError for a damaged file, and for the first
    tensor that is not as the config asks.

    A tied model's one matrix may have either of two names. A model whose files have both is not tied."""
    found, embeddings, head = {}, "model.embed_tokens.weight", "lm_head.weight"
    folder = next(iter(files)).parent
    for file, indexed in files.items():
        shapes = read_shapes(file)
        stale = [name for name in shapes if indexed and name not in indexed]
        if stale:
            fault = f"left out {len(stale)} tensors that the index does not name here, such as {stale[0]}"
            print(f"note: {file}: {fault}", file=sys.stderr)
        for name, shape in shapes.items():
            if name not in stale:
                found[name] = (file, shape)
    if config.tied and head in found:
        config.tied = embeddings not in found
        if config.tied:
            found[embeddings] = found.pop(head)
    if config.n_layers > len(found):
        raise UserError(f"{folder}: {len(found)} tensors cannot be {config.n_layers} layers")
    with torch.device("meta"):
        asked = {name: list(slot.shape) for name, slot in weight_slots(Llama(config))}
    for name in asked | found:
        file, shape = found.get(name, (folder, "missing"))
        if shape != asked.get(name):
            fault = f"is {shape}, config.json asks for {asked.get(name, 'none')}"
            raise UserError(f"{file}: tensor {name} {fault}; the two do not belong together")
    return {name: file for name, (file, _) in found.items()}


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


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a GPU. Of a CPU's memory no limit is known."""
    if device.type != "cuda":
        return math.inf
    held_by_pytorch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held_by_pytorch


def empty_model(config: ModelConfig, dtype: torch.dtype, fingerprint: str = "random") -> Llama:
    """A Llama on the meta device: its weights take no memory yet. fingerprint: names those to come."""
    with torch.device("meta"):
        model = Llama(config)
    model.fingerprint = fingerprint
    return model.to(dtype).eval().requires_grad_(False)


def check_weights_fit(needed: int, device: torch.device) -> None:
    """Raises UserError where weights of so many bytes would not fit the device."""
    free = free_memory(device)
    if needed > free:
        fault = f"the weights need {human(needed)}, {human(free)} are free ({device.type})"
        raise UserError(f"not enough memory: {fault}; use a smaller model, --dtype bf16 or --weights int8")


def weight_parts(model: Llama) -> list[str]:
    """Names of the modules that get their weights one after another."""
    layers = [f"layers.{i}" for i in range(len(model.layers))]
    return ["tok_embeddings", "norm", "output", *layers]


def give_weights(model: Llama, part: str, device: torch.device, fill: Callable[[Llama, str], None]) -> None:
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
    """Copies a checkpoint's tensor of this name to its slot, which is a parameter of the model, or a part of
    one. A function of its own for extras that copy something else."""
    slot.copy_(tensor)


def load_model(folder: Path, device: torch.device, dtype: torch.dtype, build: Callable = build) -> Llama:
    """Loads a Hugging Face folder, tensor by tensor into the final weights. build: makes the model of them.

    Raises UserError for a missing, truncated or foreign file, for tensors that disagree with config.json
    (before any memory is taken), and for numbers that are not finite."""
    config, files = ModelConfig.from_folder(folder), weight_files(folder)
    file_of = find_weights(files, config)

    def fill(model: Llama, part: str) -> None:
        for name, slot in weight_slots(model, part):
            with safe_open(file_of[name], "pt") as file:  # opened for each: its pages leave the memory again
                tensor = file.get_tensor(name if name in file.keys() else "lm_head.weight")
            copy_weight(model, name, slot, tensor)
            if not torch.stack(slot.aminmax()).isfinite().all():
                advice = "use --dtype bf16" if tensor.isfinite().all() else "download it again"
                raise UserError(f"{file_of[name]}: tensor {name} is not finite in {dtype}; {advice}")

    return build(config, device, dtype, fill, fingerprint(files))


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0, build: Callable = build
) -> Llama:
    """A model with random weights, for benchmarks. build: makes the model of them."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(model: Llama, part: str) -> None:
        for name, parameter in model.get_submodule(part).named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)

    return build(config, device, dtype, fill)


# ------------------------------------------------------------------------------------------------- tokenizers
# Hugging Face's package runs them all, as a tokenizer.json says it. Other files become such a one.

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


class Tokenizer:
    """A checkpoint folder's tokenizer: text into token ids and back.

    special_tokens: ids by name; no text of a user's ever becomes one. rows: of the model's embedding, which
    may have more ids than the vocabulary. add_bos: do this model's prompts start with bos_id?
    chat_template: the model's own, in Jinja. chat_variables: what it may name, such as bos_token."""

    def __init__(self, folder: Path):
        """Raises an Exception for files that are damaged."""
        import tokenizers  # only now: random prompts need none

        self.folder = folder
        names = ("tokenizer_config", "special_tokens_map", "config", "generation_config", "added_tokens")
        settings, mapped, config, generation, added = (read_json(folder / f"{name}.json") for name in names)
        settings |= {} if "added_tokens_decoder" in settings else mapped  # as in transformers
        data, defaults = tokenizer_json(folder, settings)
        settings = defaults | {key: value for key, value in settings.items() if value is not None}

        # Special tokens: those that the settings name, and the added ones that are called so.
        more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or {}
        more = more if isinstance(more, dict) else dict(enumerate(more))
        more = more | {key: token for key, token in settings.items() if key.endswith("_token")}
        texts = {key: {"content": token} for key, token in more.items() if isinstance(token, str)}
        named = {key: FLAGS | t for key, t in (more | texts).items() if isinstance(t, dict)}
        self.chat_variables = {key: t["content"] for key, t in named.items() if isinstance(key, str)}
        named.pop("unk_token", None)  # a text may become that one
        special = {token["content"]: token for token in named.values()}
        tokens = {name: {"content": name, "id": i, "special": True} for name, i in added.items()}
        tokens |= {token["content"]: token for token in data.get("added_tokens") or []}
        decoder = settings.get("added_tokens_decoder") or {}
        tokens |= {token["content"]: token | {"id": int(i)} for i, token in decoder.items()}
        for name, token in tokens.items():
            is_special = token.get("special") or name in {*special, *STOP_TOKENS}
            tokens[name] = FLAGS | token | {"special": bool(is_special)}
        special |= {name: token for name, token in tokens.items() if token["special"]}

        def library(steps: dict) -> tokenizers.Tokenizer:
            made = tokenizers.Tokenizer.from_str(json.dumps(data | steps))
            made.encode_special_tokens = True  # as text
            return made

        data |= {"added_tokens": sorted(tokens.values(), key=lambda token: token["id"])}
        data |= {"truncation": None, "padding": None}  # a prompt stays as it is
        text = json.dumps({key: data.get(key) for key in ("normalizer", "pre_tokenizer")})
        steps, self.space_once = json.loads(text), '"first"' in text
        later = json.loads(text, object_hook=lambda part: part | NO_SPACE.get(part.get("type"), {}))
        self.library = library(steps)
        self.continuing = self.library if later == steps else library(later)
        vocab, lead = self.library.get_vocab(), self.library.encode("a")
        if any(vocab.get(name, token["id"]) != token["id"] for name, token in tokens.items()):
            raise ValueError("the ids of added tokens do not follow those of the vocabulary")

        special = {name: token for name, token in special.items() if name in vocab}
        self.special_tokens = {name: vocab[name] for name in special}
        self.strips_before = {vocab[name] for name, token in special.items() if token["lstrip"]}
        self.strips_after = {vocab[name] for name, token in special.items() if token["rstrip"]}
        unknown_id = vocab.get(data["model"].get("unk_token"), data["model"].get("unk_id"))
        # The template of a tokenizer.json says what leads a text.
        self.bos_id = lead.ids[0] if lead.special_tokens_mask[:1] == [1] else None
        self.add_bos = bool(settings.get("add_bos_token", self.bos_id is not None))
        if self.bos_id is None:
            self.bos_id = self.special_tokens.get(self.chat_variables.get("bos_token"))
        ends = [self.chat_variables.get("eos_token"), *STOP_TOKENS]
        self.stop_ids = {self.special_tokens[name] for name in ends if name in special}
        for ids in (file.get("eos_token_id") for file in (config, generation)):
            self.stop_ids |= {*ids} if isinstance(ids, list) else {ids} - {None}
        self.vocab_size = max(vocab.values()) + 1
        # Ids that no text may become, with the characters to encode instead.
        letters = ((i, name * (i != unknown_id)) for name, i in self.special_tokens.items())
        self.spelled = {i: name for i, name in letters if name or i in {self.bos_id, *self.stop_ids}}
        self.rows = max(self.vocab_size, config.get("vocab_size", 0))
        jinja, template = folder / "chat_template.jinja", settings.get("chat_template")
        if isinstance(template, list):  # several, each for a use
            template = {choice["name"]: choice["template"] for choice in template}.get("default")
        self.chat_template = jinja.read_text(encoding="utf-8") if jinja.exists() else str(template or "")

    def __reduce__(self) -> tuple:  # the library cannot be pickled for another process, which loads it again
        return load_tokenizer, (self.folder,)

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
                text = text.lstrip() if ids and ids[-1] in self.strips_after else text
                text = text.rstrip() if ends and self.special_tokens[name] in self.strips_before else text
                ids += self.encode_continuation(text, not (ids and self.space_once))
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_continuation(self, text: str, space: bool = False) -> list[int]:
        """Token ids, none special, of text that goes on. space: does it get the space that some put first?"""
        # half a surrogate pair (from a command line that is not UTF-8) becomes U+FFFD
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        library, ids = self.library if space else self.continuing, []
        for i in library.encode(text, add_special_tokens=False).ids:
            if i not in self.spelled:
                ids.append(i)
            elif len(name := self.spelled[i]) > 1:  # some vocabularies have special tokens as words
                ids += [j for c in name for j in self.encode_continuation(c)]
        return ids

    def decode_ids(self, ids: list[int]) -> str:
        """Text of ids, special tokens by name, "" for the padding of the embedding."""
        return self.library.decode(ids, skip_special_tokens=False)

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Text of `ids`, special tokens left out; UserError for an id outside the vocabulary.

        after: the ids that these continue, so that decode(a) + decode(b, after=a) == decode(a + b)."""
        stream = StreamDecoder(self, after)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()


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
    """Loads a checkpoint folder's tokenizer. UserError for files that are missing or damaged."""
    with checked(folder, "not a valid tokenizer"):
        return Tokenizer(folder)


def tokenizer_json(folder: Path, settings: dict) -> tuple[dict, dict]:
    """A folder's tokenizer.json, or what its vocab.json + merges.txt or its tokenizer.model are as one; and
    what its tokenizer_config.json, which `settings` are, may leave out."""
    path, merges, model = (folder / name for name in ("tokenizer.json", "merges.txt", "tokenizer.model"))
    if path.exists():
        return read_json(path), {}
    if merges.exists() and (vocab := read_json(folder / "vocab.json")):  # of GPT-2 and Qwen2
        lines = merges.read_text(encoding="utf-8").split("\n")
        pairs = list(filter(None, lines[lines[0].startswith("#version") :]))  # others with # are merges
        is_gpt2 = "GPT2" in str(settings.get("tokenizer_class"))
        return byte_level_json(vocab, pairs, [GPT2_SPLIT if is_gpt2 else QWEN2_SPLIT], nfc=not is_gpt2), {}
    if not model.exists():
        raise UserError(f"{folder}: no tokenizer.model, no tokenizer.json, no vocab.json with merges.txt")
    content = model.read_bytes()
    is_tiktoken = re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content)
    with checked(model, "not a valid tokenizer"):
        return tiktoken_json(content) if is_tiktoken else sentencepiece_json(content, settings)


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


def merges_of(words: list[str]) -> list[tuple[str, str]]:
    """The pairs of words that make a word, by the order of what they make."""
    known = {*words}
    cuts = ((word[:i], word[i:]) for word in words for i in range(1, len(word)))
    return [pair for pair in cuts if known.issuperset(pair)]


def tiktoken_json(content: bytes) -> tuple[dict, dict]:
    """Llama 3's tokenizer.model, lines of "base64 rank", as a tokenizer.json and a tokenizer_config.json."""
    lines = [line.split() for line in content.splitlines()]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = dict(zip(printable + others, map(chr, [*printable, *range(256, 324)]), strict=True))
    vocab = {"".join(map(letters.get, base64.b64decode(word, validate=True))): int(i) for word, i in lines}
    if list(vocab.values()) != list(range(len(lines))) or not vocab.keys() >= {*letters.values()}:
        raise ValueError("its ranks are not 0, 1, 2, ..., or it lacks some of the 256 bytes")
    made = byte_level_json(vocab, merges_of([*vocab]), [LLAMA3_SPLIT], nfc=False)
    made["model"]["ignore_merges"] = True
    names = [f"<|{name}|>" for name in LLAMA3_SPECIAL]
    tokens = [{"id": len(vocab) + i, "content": name, "special": True} for i, name in enumerate(names)]
    return made | {"added_tokens": tokens}, {"bos_token": names[0], "add_bos_token": True}


def sentencepiece_json(content: bytes, settings: dict) -> tuple[dict, dict]:
    """A sentencepiece BPE with byte fallback, as a tokenizer.json and a tokenizer_config.json have it."""
    import tokenizers
    from sentencepiece import SentencePieceProcessor

    if not content:  # sentencepiece would load this as a model without pieces
        raise ValueError("empty file")
    sp = SentencePieceProcessor(model_proto=content)
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    not_text = (sp.is_control, sp.is_unknown, sp.is_byte, sp.is_unused)
    words = [name for name, i in vocab.items() if not any(is_kind(i) for is_kind in not_text)]
    merges = merges_of(sorted(words, key=lambda name: -sp.get_score(vocab[name])))
    made = {a + b for a, b in merges}
    defined = {name for name in words if len(name) > 1 and name not in made}  # by users: found as a whole
    added = [(name, name not in defined) for name, i in vocab.items() if name in defined or sp.is_control(i)]

    spaced = sp.encode("a", out_type=str)[0].startswith("▁")
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [escape]
    if sp.encode("a  a") == sp.encode("a a"):  # it keeps one of several spaces
        steps = [escape | {"pattern": {"Regex": r"(?<= ) +| +\z"}, "content": ""}, escape]
    back = [escape | {"pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * spaced
    data = {
        "added_tokens": [FLAGS | {"id": vocab[n], "content": n, "special": special} for n, special in added],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "fuse_unk": True}
        | {"unk_token": sp.id_to_piece(sp.unk_id())},
    }
    legacy, is_llama = settings.get("legacy"), "Llama" in str(settings.get("tokenizer_class"))
    if spaced and (is_llama or legacy is False):  # transformers puts a space elsewhere
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "split": False}
        data["pre_tokenizer"]["prepend_scheme"] = "always" if legacy else "first"
    elif spaced:
        steps.insert(0, {"type": "Prepend", "prepend": " "})
    text = "a" + "".join(name for name in words if name not in defined).replace("▁", " ") + "½ﬁ"
    if sp.encode(text) != tokenizers.Tokenizer.from_str(json.dumps(data)).encode(text).ids:
        raise UserError("tokenizer.model is no BPE with byte fallback; save the tokenizer as tokenizer.json")
    ends = {"bos_token": sp.bos_id(), "eos_token": sp.eos_id()}
    defaults = {key: sp.id_to_piece(i) for key, i in ends.items() if i >= 0}
    return data, defaults | {"add_bos_token": True}
