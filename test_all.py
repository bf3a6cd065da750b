"""All tests. Run with: pytest -q test_all.py

They assert mathematics and behaviour on the CPU in minutes. Tests that need a GPU or ../shared
(real checkpoints and tokenizers) skip where there is none. Errors are scale-free: rms of the
difference over rms of the reference.
"""

import ast
import base64
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import json
import locale
import math
import os
import pickle
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import unicodedata
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

if not torch.cuda.is_available():  # kernels run on the CPU; it must be set before triton loads
    os.environ.setdefault("TRITON_INTERPRET", "1")

import calibrate
import compress
import generate
import kernels
import model as model_file
from calibrate import fit_sals, save_artifact
from compress import METHODS, CacheContext, DenseCache, load_artifact, method_named, quantize
from generate import Engine, Sampling, decode_rows, sample
from kernels import attend_plain_reference
from model import (
    SHAPES,
    Llama,
    UserError,
    apply_rope,
    load_config,
    load_model,
    load_tokenizer,
    rope_tables,
)

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
ROOT = Path(__file__).parent
NANO = ROOT / "checkpoints" / "nano"
REAL = ROOT.parent / "shared" / "real"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU, DEVICE = torch.device("cpu"), "cuda" if torch.cuda.is_available() else "cpu"


def over(arguments: str, cases: Callable) -> Callable:
    """Marks a test that runs over cases(tests), `tests` being its module or one that imports it."""

    def mark(test: Callable) -> Callable:
        test.over = arguments, cases
        return test

    return mark


def pytest_generate_tests(metafunc) -> None:
    if marked := getattr(metafunc.function, "over", None):
        arguments, cases = marked
        metafunc.parametrize(arguments, list(cases(metafunc.module)))


def error(result, reference) -> float:
    """rms(result - reference) / rms(reference), in fp64; NaN anywhere is an infinite error."""
    result, reference = torch.as_tensor(result).double(), torch.as_tensor(reference).double()
    value = ((result - reference).square().mean() / reference.square().mean()).sqrt().item()
    return float("inf") if math.isnan(value) else value


def pairwise(*axes) -> list[tuple]:
    """Few cases of the product of some lists: any two values of two lists meet in at least one."""
    places = list(itertools.product(*map(range, map(len, axes))))
    pairs = [set(itertools.combinations(enumerate(place), 2)) for place in places]
    missing, cases = set().union(*pairs), []
    while missing:
        best = max(range(len(places)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        cases.append(tuple(axis[i] for axis, i in zip(axes, places[best], strict=True)))
    return cases


def tiny_config(group: int = 2, head_dim: int = 16, **changes) -> model_file.ModelConfig:
    shape = {"dim": 48, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8 // group, "head_dim": head_dim}
    return model_file.ModelConfig(
        **shape | {"ffn_dim": 64, "vocab_size": 96, "max_positions": 512} | changes
    )


def tiny_model(seed: int = 0, **changes) -> Llama:
    """A random model whose attention is sharp enough for its selection to matter."""
    torch.manual_seed(seed)
    model = Llama(tiny_config(**changes)).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        noise = torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1)
        p.copy_(noise + (1.0 if p.ndim == 1 and "norm" in name else 0.0))
    model.fingerprint = f"tiny-{seed}"
    return model


def save_checkpoint(model: Llama, folder: Path) -> None:
    """config.json and model.safetensors (bf16), as in a Hugging Face download."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_file.config_to_hf(model.config)
    config |= {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: slot.detach().bfloat16() for name, slot in model_file.weight_slots(model)}
    save_artifact(weights, folder / "model.safetensors", {"format": "pt"})


def orthonormal(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        .Q.float()
        .contiguous()
    )


def artifact_of(method: str, model: Llama) -> dict[str, torch.Tensor]:
    """An artifact without fitting: any rotation is exact at full rank, with any scale and mean."""
    c = model.config
    made = compress.random_artifact(method, c)
    if method == "sals":
        made |= {name: orthonormal(c.kv_dim, i) for i, name in enumerate(made) if "basis" in name}
    if method == "elitekv":
        seeded = torch.Generator().manual_seed(0)
        order = torch.rand(c.n_layers, c.n_kv_heads, c.head_dim // 2, generator=seeded).argsort(-1)
        made = {"elite": order, "contribution": order.flip(-1), "r": torch.tensor(2)}
        made["d_ckv"] = torch.tensor(16)
    return made


SPARSE = {"variant": "paper", "rank": 0.5, "score_rank": 0.5, "bits": 4}  # of SALS
SPARSE |= {"sinks": 4, "critical": 20, "recent": 8}
CODES = SPARSE | {"variant": "ours"}
FULL = SPARSE | {"rank": 1.0, "score_rank": 1.0, "critical": 400, "exact_values": True}
LRQK = {"rank": 8, "k": 20, "recent": 8}
# Of the methods of compress.py. extras/test_extras.py has other lists of these names, over which it
# runs the tests of this file that are `over` them.
# every method, in each way in which it stores and selects; a new method is tested by a line here
CASES = [
    *(("sals", options) for options in (SPARSE, SPARSE | {"bits": 2}, CODES)),
    ("sals", CODES | {"bits": 2, "score": "sum"}),
    ("loki", {"k": 0.3, "d": 0.5}),
    ("loki", {"k": 12, "d": 0.25}),
    ("loki", {"k": 12, "d": 0.5, "share": "group"}),
    ("loki", {"d": 0.5, "reduced": True}),
    ("lrqk", LRQK),
    ("lrqk", LRQK | {"variant": "paper", "slots": 2.0}),
    ("lrqk", LRQK | {"slots": 0.0}),
    ("elitekv", {"r": 3, "d_ckv": 20}),
    ("elitekv", {"pairs": "uniform", "lrd": "separate"}),
    ("fdc", {"rate": 0.3}),
    ("dense", {}),
    ("topk", {"keep": 24}),
    ("kivi", {"bits": 2, "residual": 32}),
    ("kivi", {"bits": 4, "residual": 64}),
]
# settings under which a method is dense attention: the rank is full, the budget covers all
EVERYTHING = [
    *(("sals", FULL | {"skip": skip}) for skip in ("0,-1", "")),
    ("loki", {"k": 1.0, "d": 0.25}),
    ("loki", {"k": 500, "d": 0.5, "share": "group"}),
    ("loki", {"d": 1.0, "reduced": True}),
    ("lrqk", {"rank": 12}),
    ("lrqk", {"rank": 12, "variant": "paper", "slots": 1.5}),
    ("lrqk", {"rank": 12, "slots": 0.0}),
    ("elitekv", {"r": 8, "d_ckv": 48}),
    ("fdc", {"rate": 0.0}),
    *((method, {}) for method in ("topk", "kivi")),
]


# Of these methods, and of others that test_extras.py adds.
WIDE = {"fdc"}  # whose ranks are multiples of 16: they differ in wide heads only
CODED = {"elitekv", "fdc"}  # whose prompts attend what is stored
BOUNDS = {"elitekv": 1e-4, "fdc": 1e-4}  # of errors that may be larger than 1e-5
OF_THE_PROMPT = set()  # buffers that a prompt alone decides, or that count what has happened since
OF_THE_CAPACITY = {"kivi": 1e-5}  # how far logits of a larger cache may be off: here by fp32's sums
# of 40 past tokens: its window
EXACT = {"sals": lambda cache, places: (places < 4) | (places >= 32)}


class PlainValues(compress.TokenStore):
    """Stands for CodedStore where a test needs values that lose nothing."""

    def __init__(self, context, n_heads, n_tokens, width, bits):
        super().__init__(context, n_heads, n_tokens, width)


class PlainValuesByToken(compress.ByToken, PlainValues):
    """Stands for the values of the paper's SALS, likewise."""


def make_engine(
    model, method, rows: int, capacity: int, artifact=None, kernel=None, **options
) -> Engine:
    """By default with an artifact_of the model. options: a method's, compiled, graphed,
    exact_values and block, of SALS's scores, which is short in short caches."""
    context, artifact = (
        CacheContext(model, rows, capacity, kernel),
        artifact or artifact_of(method, model),
    )
    how = {name: options.pop(name) for name in {"compiled", "graphed"} & options.keys()}
    with pytest.MonkeyPatch.context() as patch:
        if options.pop("exact_values", False):
            patch.setattr(compress, "CodedStore", PlainValues)
            patch.setattr(compress, "PaperSalsValues", PlainValuesByToken)
        patch.setattr(compress, "SCORE_BLOCK", options.pop("block", 16 if capacity < 512 else 512))
        caches = method_named(method).build(
            model, compress.settings_from(method, options), context, artifact
        )
    return Engine(model, caches, context, Sampling(), **how)


def fitted_engine(
    folder, method, rows, capacity, device="cpu", dtype=torch.float32, **options
) -> Engine:
    """An engine with the model and the artifact of a folder."""
    model = load_model(folder, torch.device(device), dtype)
    artifact = load_artifact(folder, method, model)
    return make_engine(model, method, rows, capacity, artifact, **options)


def logits_through(
    engine: Engine, prompts: list, continuation: list, parts: int = 1
) -> torch.Tensor:
    """Logits [1 + n, B, V] after the prompts and after each teacher-forced token (one list a row).
    The prompts are read in so many parts, of which some rows' later ones may be empty."""
    cuts = [range(0, len(p), -(-len(p) // parts)) for p in prompts]
    pieces = [[p[i : i + cut.step] for i in cut] for p, cut in zip(prompts, cuts, strict=True)]
    first, *later = itertools.zip_longest(*pieces, fillvalue=())
    engine.prefill(first)
    for more in later:
        engine.append(more)
    logits = [engine.logits.clone()]
    for tokens in zip(*continuation, strict=True):
        engine.tokens.copy_(torch.tensor(tokens))
        engine.step()
        logits.append(engine.logits.clone())
    return torch.stack(logits)


def python(*argv, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Another process, in which these variables have other values."""
    how = {
        "cwd": cwd,
        "env": os.environ | environment,
        "capture_output": True,
        "text": True,
        "timeout": 600,
    }
    return subprocess.run([sys.executable, *map(str, argv)], check=False, **how)


def random_ids(n: int, seed: int = 0, vocab: int = 96) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def stream(
    n: int, group: int = 2, dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [n, 8, dim], k and v [n, 8 / group, dim] of one layer, sharp enough for a selection to
    matter."""
    torch.manual_seed(0)
    return (
        torch.randn(n, 8, dim) * 2,
        torch.randn(n, 8 // group, dim),
        torch.randn(n, 8 // group, dim),
    )


def row_cache(method: str, model: Llama, rows: int, capacity: int, **options):
    """The cache of a model's first layer that is not skipped. SALS folds nothing into it."""
    model.config.qk_norm |= method == "sals"
    return make_engine(model, method, rows, capacity, **skip_none(method) | options).caches[0]


def reads(cache, n: int, q, k, v):
    """The cache, row 0 of which has now read the first n tokens of a stream as a prompt."""
    cache.prefill(0, 0, q[:n], k[:n], v[:n])
    return cache


def scene(
    method: str, n: int, total: int, capacity: int = 0, group: int = 2, dim: int = 16, **options
):
    """A method's cache that has read the first n tokens of a stream, and that stream of `total`
    tokens."""
    qkv, model = stream(total, group, dim), tiny_model(group=group, head_dim=dim)
    return reads(row_cache(method, model, 1, capacity or total, **options), n, *qkv), qkv


def skip_none(method: str) -> dict:
    return {"skip": ""} if "skip" in method_named(method).settings.__dataclass_fields__ else {}


def step(cache, n: int, q, k, v) -> torch.Tensor:
    """Decodes token n of a stream in every row."""
    rows = cache.context.batch_size
    pos = torch.full((rows,), n, dtype=torch.int32)
    return cache.decode(pos, *(x[n].expand(rows, *x[n].shape) for x in (q, k, v)))


def attended(cache, pos, index) -> torch.Tensor:
    """Which tokens each query head attends at a step whose `select` gave an index: [B, Hq, S]."""
    c = cache.config
    S = cache.context.max_seq_length
    index = index.long().expand(-1, c.n_kv_heads, c.group, -1)
    none = index.where(index >= 0, S)  # one place more, which is cut off
    chosen = torch.zeros(*index.shape[:3], S + 1, dtype=torch.bool).scatter(3, none, True)
    n_recent = cache.exact[0].n_recent if cache.exact else 0
    age = pos.view(-1, 1, 1) - torch.arange(S)
    return chosen[..., :S].flatten(1, 2) | (age >= 0) & (age < n_recent)


def see_selections(cache, seen: list) -> None:
    """From now on each step of the cache adds to `seen` what it attends."""
    select = getattr(type(cache), "select", None)
    if select is None:  # it attends all
        return

    def select_and_see(pos, *args):
        index = select(cache, pos, *args)
        if index is not None:
            seen.append(attended(cache, pos, index))
        return index

    cache.select = select_and_see


def watched_step(cache, n: int, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of step n of row 0, and which tokens its query heads attend [Hq, S]."""
    seen = []
    see_selections(cache, seen)
    return step(cache, n, q, k, v), seen[0][0]


def tiny_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(0))


def observed(model: Llama, tokens: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q, k, v before RoPE of each layer, [N, S, heads, D]."""
    seen = {}
    calibrate.observe(model, [tokens], lambda i, cos, sin, *qkv: seen.setdefault(i, []).append(qkv))
    return [tuple(map(torch.cat, zip(*seen[i], strict=True))) for i in range(len(seen))]


# ---------------------------------------------------------------------------- model and checkpoints


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
BETAS = {"beta_fast": 4, "beta_slow": 0.5, "truncate": False}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3_ROPE |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
FAMILIES = {  # transformers' class, changes to its config
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-3.2-tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": YARN | {"rope_type": "linear", "factor": 2.0}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "yi-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-factor": ("Qwen2", {"rope_parameters": YARN | BETAS | {"attention_factor": 1.3}}),
    "qwen2-mscale": ("Qwen2", {"rope_parameters": YARN | {"mscale": 0.2, "mscale_all_dim": 1.0}}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-2}),
    "phi3": ("Phi3", {}),
}


def hf_model(family: str, **changes):
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape |= {"intermediate_size": 80, "vocab_size": 96, "max_position_embeddings": 256}
    shape |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**shape, **extra, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.2)  # biases and norms start as 0 and 1: make them count
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family, tmp_path):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB" if family == "qwen2" else "1GB")
    ours = load_model(tmp_path, CPU, torch.float32)
    ids = torch.tensor([random_ids(150)])
    with torch.no_grad():
        reference = theirs(ids).logits
    assert error(ours.output(ours(ids)), reference) < 1e-4
    engine = make_engine(ours, "dense", 1, 150)
    got = logits_through(engine, [ids[0, :100].tolist()], [ids[0, 100:].tolist()])
    assert error(got[:, 0], reference[0, 99:]) < 1e-4


def test_named_shapes_have_published_parameter_counts():
    for name, count in zip(SHAPES, (6.738, 8.030, 70.554), strict=True):
        with torch.device("meta"):
            model = Llama(SHAPES[name])
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == count, name


def test_checkpoint_round_trip_and_dtypes(tmp_path):
    model = tiny_model(tied=True)
    slots = dict(model_file.weight_slots(model))
    save_checkpoint(model, tmp_path)
    loaded = load_model(tmp_path, CPU, torch.bfloat16)
    for name, slot in model_file.weight_slots(loaded):
        assert torch.equal(slot, slots[name].bfloat16()), name
    assert loaded.output.weight is loaded.tok_embeddings.weight
    slots["model.norm.weight"][0] += 1
    save_checkpoint(model, tmp_path)
    assert (before := load_model(tmp_path, CPU, torch.float32).fingerprint) != loaded.fingerprint
    data = bytearray((tmp_path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(data)
    assert model_file.fingerprint([tmp_path / WEIGHTS]) != before


def test_what_a_config_leaves_out():
    hf = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
    }
    hf |= {
        "vocab_size": 96,
        "max_position_embeddings": 99,
        "rms_norm_eps": 1e-6,
        "sliding_window": 32,
    }
    for family, uses in itertools.product(("llama", "mistral", "qwen2"), (False, True)):
        made = model_file.config_from_hf(hf | {"model_type": family, "use_sliding_window": uses})
        assert (made.n_kv_heads, made.head_dim, made.rope_theta, made.rope_scaling) == (
            4,
            12,
            10000.0,
            None,
        )
        assert made.sliding_window == (32 if uses or family == "mistral" else None)
        assert not made.tied and not made.out_bias


def test_linear_and_yarn_scaling_extend_the_positions():
    def config(**rope):
        hf = model_file.config_to_hf(
            tiny_config(family="qwen2", qkv_bias=True, max_positions=32768)
        )
        hf["rope_scaling"] = rope
        made = model_file.config_from_hf(hf | {"rope_parameters": LLAMA3_ROPE})  # which counts less
        # once, not at every saving
        assert model_file.config_from_hf(model_file.config_to_hf(made)) == made
        return made

    assert (
        config(type="yarn", factor=4.0, original_max_position_embeddings=32768).max_positions
        == 131072
    )
    assert config(type="yarn", factor=2.5).max_positions == 81920
    assert config(rope_type="linear", factor=2.0).max_positions == 65536
    assert (
        config(type="yarn", factor=4.0, original_max_position_embeddings=64).max_positions == 32768
    )
    assert (
        config(**LLAMA3_ROPE | {"original_max_position_embeddings": 32768}).max_positions == 32768
    )
    assert config(type="default").rope_scaling is None


def test_a_load_on_the_cpu_takes_little_more_memory_than_the_weights(tmp_path):
    model = Llama(tiny_config(dim=512, n_layers=8, ffn_dim=2048, vocab_size=4096)).requires_grad_(
        False
    )
    save_checkpoint(model, tmp_path)  # in bf16
    size = sum(p.nbytes for p in model.parameters())
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc")

    def resident(key):
        facts = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(facts[key].split()[0]) * 1024

    load_model(tmp_path, CPU, torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = resident("VmRSS")
    loaded = load_model(tmp_path, CPU, torch.float32)
    assert (
        resident("VmHWM") - before < 1.1 * size == 1.1 * sum(p.nbytes for p in loaded.parameters())
    )


# ----------------------------------------------------------------------------- the exactness ladder


def width_for(method: str) -> int:
    """A head dim at which the method's ranks differ."""
    return 48 if method in WIDE else 16


def options_for(c: model_file.ModelConfig, options: dict) -> dict:
    """With no more dims of a latent than the model has."""
    if "d_ckv" not in options:
        return options
    most = c.n_kv_heads * 2 * (c.head_dim - options.get("r", 0))
    return options | {"d_ckv": min(options["d_ckv"], most)}


@functools.cache
def dense_logits(rows: tuple, more: tuple, dtype=torch.float32, **changes) -> torch.Tensor:
    model = tiny_model(**changes).to(dtype)
    return logits_through(make_engine(model, "dense", len(rows), 80), rows, more)


@pytest.mark.parametrize(
    "group, dtype", [*((G, torch.float32) for G in (1, 4, 8)), (2, torch.bfloat16)]
)
@over("method, options", lambda tests: tests.EVERYTHING)
def test_full_rank_and_budget_is_dense(method, options, group, dtype):
    """Ragged rows, read in parts and decoded: shorter than any rank or window, long, of keys of
    rank 1."""
    prompts = *(tuple(random_ids(n, n)) for n in (1, 5, 60)), (7,) * 40
    more = tuple(tuple(random_ids(15, 100 + n)) for n in range(4))
    changes, biases = {"group": group, "head_dim": width_for(method)}, ("qkv_bias", "out_bias")
    changes |= dict.fromkeys(biases, group in (2, 4))
    model = tiny_model(**changes).to(dtype)
    engine = make_engine(model, method, 4, 80, **options_for(model.config, options))
    got = logits_through(engine, prompts, more, {1: 1, 2: 1, 4: 2, 8: 3}[group])
    bound = BOUNDS.get(method, 1e-5) if dtype == torch.float32 else 0.1
    assert got.dtype == dtype and error(got, dense_logits(prompts, more, dtype, **changes)) < bound


@over("method, options", lambda tests: tests.CASES)
def test_a_row_of_a_ragged_batch_equals_the_prompt_alone(method, options):
    """Alone in a cache that held a longer prompt before. Steps go beyond a window of 8 and a block
    of 32."""
    # In fp64: in fp32 a sum in another order may move a value across a rounding boundary of the
    # quantiser, or flip the choice between two tokens of like score (LRQK's in mode paper, on one
    # machine of three).
    prompts, more = (
        [random_ids(m or n, i + n) for n in (1, 47, 90)] for i, m in ((0, 0), (100, 8))
    )
    together, alone = (
        make_engine(tiny_model().double(), method, n, 110, **options) for n in (3, 1)
    )
    got = logits_through(together, prompts, more, 2)
    for row in (2, 1, 0):
        assert (
            error(got[:, row], logits_through(alone, [prompts[row]], [more[row]], 2)[:, 0]) < 1e-12
        )


def llm_over(method: str, rows: int, capacity: int, **options) -> generate.LLM:
    """An LLM of a tiny model, in fp64, without a tokenizer."""
    model = tiny_model(head_dim=width_for(method)).double()
    with mock.patch.object(generate, "load", lambda *_: (model, None)):
        llm = generate.LLM(model.config, method, device="cpu", max_seq_length=capacity, **options)
    llm.engine = make_engine(model, method, rows, capacity, block=16, **options)
    llm.token_ids = [[] for _ in range(rows)]
    return llm


def goes_on(engine: Engine) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """What each row makes of what it holds, and of three tokens after that; with its last
    logits."""
    first = decode_rows(engine, 9, lambda _: False)
    engine.append([[5, 6, 7]] * len(engine.tokens))
    then = decode_rows(engine, 6, lambda _: False)
    return [*zip(first, then, engine.logits.clone(), strict=True)]


@over("method, options", lambda tests: tests.CASES)
def test_rows_go_on_alike_after_they_were_saved_and_loaded_or_forked(method, options, tmp_path):
    """Ragged rows after some steps, into a cache that has held others: to the bit, where it is not
    larger."""
    first, again, larger = (
        llm_over(method, 3, capacity, **options) for capacity in (110, 110, 150)
    )
    first.generate([random_ids(n, n) for n in (70, 9, 33)], 5)
    first.save(tmp_path / "cache")
    for llm in (again, larger):
        llm.generate([random_ids(n, 100 + n) for n in (30, 90, 50)], 10)
        llm.load(tmp_path / "cache")
        assert llm.token_ids == first.token_ids and llm.engine.pos.equal(first.engine.pos)
    expected, found, near = (goes_on(llm.engine) for llm in (first, again, larger))
    for (*tokens, logits), (*same, bits), (*also, close) in zip(expected, found, near, strict=True):
        assert tokens == same and logits.equal(bits)
        bound = OF_THE_CAPACITY.get(method, 1e-12)
        assert bound == math.inf or tokens == also and error(close, logits) < bound
    again.load(tmp_path / "cache")
    again.fork(2, 2)
    *source, last = expected[2]
    for *tokens, logits in goes_on(again.engine):
        assert tokens == source and error(logits, last) < 1e-12


@over("method, options", lambda tests: tests.CASES)
def test_a_saved_row_is_as_large_as_the_ledger_of_a_cache_that_it_fills(method, options, tmp_path):
    llm = llm_over(method, 2, 128, **options)
    for n in (64, 128):
        llm.prefill([random_ids(n)])
        llm.save(tmp_path / "cache")
        saved = load_file(tmp_path / "cache")
        assert llm.held_memory().tokens == n
        size = sum(x.nbytes for name, x in saved.items() if re.match(r"0\.\d+\.", name))
        caches = llm_over(method, 1, n, **options).engine.caches
        assert (
            size
            == sum(cache.bytes_formula() + cache.bytes_host() for cache in caches)
            == llm.held_memory().bytes
        )
        assert not any(name.startswith("1.") for name in saved)  # an empty row


def forms(tests) -> list:
    """The first case of each method, and of each form of codes; all with COMPILE_ALL=1 in the
    environment."""
    found = {}
    for method, options in tests.CASES:
        form = map(options.get, ("reduced", "residual", "variant"))
        found.setdefault((method, *form), (method, options))
    return tests.CASES if "COMPILE_ALL" in os.environ else list(found.values())


@over("method, options", forms)
def test_compiled_decode_equals_eager(method, options):
    """Where a compiler errs first: G = 1, ragged rows, an odd capacity. A step reads what one has
    written. On the CPU without Inductor, which compiles no cache there."""
    model, lengths, logits = functools.partial(tiny_model, n_layers=1, group=1), (2, 31, 97), []
    prompts, more = ([random_ids(m, i + m) for m in n] for i, n in ((0, lengths), (9, (2, 2, 2))))
    for compiled in (False, True):
        made = model(head_dim=width_for(method))
        engine = make_engine(
            made, method, 3, 121, **options_for(made.config, options) | skip_none(method)
        )
        if compiled:
            (cache,) = engine.caches
            torch.compiler.reset()  # else it gives up after some caches
            backend = "inductor" if DEVICE == "cuda" else "aot_eager"
            cache.decode = torch.compile(
                cache.decode, dynamic=False, fullgraph=True, backend=backend
            )
        logits.append(logits_through(engine, prompts, more, 2))
    assert error(logits[1], logits[0]) < 1e-5


def test_caches_stay_eager_where_a_cpu_compiles_the_step():
    """Inductor would drop the last of KIVI's keys here."""
    logits = []
    for compiled in (False, True):
        model = tiny_model(n_layers=1, group=1)
        options = {
            "bits": 2,
            "residual": 32,
            "max_seq_length": 121,
            "use_compile": compiled,
            "device": "cpu",
        }
        with mock.patch.object(generate, "load", lambda *_, model=model: (model, None)):
            llm = generate.LLM(model.config, "kivi", **options)
        llm.generate([random_ids(n, n) for n in (2, 31, 97)], 4)
        logits.append(llm.engine.logits)
    assert error(logits[1], logits[0]) < 1e-5


def spread(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """What quantize_spread gives, and what it stands for."""
    codes, scale = kernels.quantize_spread(x, bits)
    return (
        codes,
        scale,
        (2.0 * kernels.unpack(codes, bits) - 2**bits + 1) * scale[..., None].float(),
    )


# ---- the papers' algorithms: a cache does what the *_step does after which its test is named


def by_head(cache, q, k, v, n: int, start, step):
    """Steps of one row, a KV head at a time: start(h) gives what head h has stored of the first n
    tokens, step(i, h, q, k, v, stored) an output, the tokens chosen (None: all) and what is stored
    then."""
    heads = range(cache.config.n_kv_heads)
    stored = [start(h) for h in heads]
    for i in range(n, len(q)):
        parts = zip(heads, q[i].unflatten(0, (len(heads), -1)), k[i], v[i], stored, strict=True)
        outputs, chosen, stored = zip(*(step(i, *part) for part in parts), strict=True)
        yield torch.cat(outputs).flatten(), chosen


def pure_sals(cache, row, n, q, k, v):
    """Of both variants: the paper's step, and ours."""
    bits = cache.values.bits
    k_rotated = cache.rope_from(k, 0)
    how = {"r_score": cache.r_score, "bits": bits, "budget": cache.budget, "rope": cache.rope}
    if isinstance(cache, compress.SalsCache):
        step = compress.sals_step_ours
        how["maps"] = compress.SalsMaps(cache.down, cache.keys.basis.flatten(0, 1), cache.mean)
        how["blocks"] = cache.blocks
        how["mean_blocks"] = cache.mean_blocks
        latents = kernels.quantize_mixed((k.flatten(1) - cache.mean) @ cache.down, cache.r_score)
        coded = *latents, *kernels.quantize_spread(v, bits)
        kind = compress.SalsStoredOurs
    else:
        step = compress.sals_step
        how["U"] = cache.U
        coded = k.flatten(1) @ cache.U, *quantize(v, bits, 16)
        kind = compress.SalsStored
    stored = kind(*(x[:n] for x in (*coded, k_rotated, v)))
    for i in range(n, len(q)):
        out, chosen, stored = step(q[i], k[i], v[i], stored, **how)
        yield out.flatten(), [chosen] * cache.config.n_kv_heads


def pure_lrqk(cache, row, n, q, k, v):
    """Of both variants: the paper's step, and ours."""
    q = cache.rope_from(q, 0).double()
    k = cache.rope_from(k, 0).double()
    grouped = q.unflatten(1, (k.shape[1], -1))
    _, n_selected, n_recent = cache.budget
    n_old = max(0, n - n_recent)

    def start_ours(h):
        return k[:n, h] @ w_k[h], k[:n, h], v[:n, h].double()

    def step_ours(i, h, q, k, v, stored):
        return compress.lrqk_step_ours(
            q, k, v.double(), stored, w_q[h], w_k[h], n_selected, n_recent
        )

    def start(h):  # Algorithm 1; the last query selects
        own = grouped[:n, h].flatten(0, 1), k[:n, h]
        columns = sum(x.abs().sum(0) for x in own).topk(cache.rank).indices
        factors = explicit_lrqk(*own, *(x[:, columns] for x in own), 2)
        bases = (torch.linalg.solve(a.mT @ a, a.mT @ x) for a, x in zip(factors, own, strict=True))
        (a_q, a_k), last = factors, grouped.shape[2]
        weights = (a_q[-last:] @ a_k[:n_old].mT / 4).log_softmax(-1).amax(0)  # D is 16
        chosen = weights.topk(min(n_selected, n_old)).indices
        return (
            (a_k, k[:n, h], v[:n, h].double()),
            tuple(bases),
            torch.cat((chosen, torch.arange(n_old, n))),
        )

    def step(i, h, q, k, v, state):
        stored, bases, omega = state
        out, omega, stored, bases = compress.lrqk_step(
            q, k, v.double(), stored, bases, omega, n_selected, n_recent
        )
        return out, omega, (stored, bases, omega)

    if isinstance(cache, compress.PaperLrqkCache):
        return by_head(cache, q, k, v, n, start, step)
    gram_q, _ = compress.lrqk_moments(grouped[:n])
    gram_k, _ = compress.lrqk_moments(k[:n, :, None])
    w_q, w_k = compress.lrqk_optimum(gram_q, gram_k, cache.rank)
    return by_head(cache, q, k, v, n, start_ours, step_ours)


def pure_loki(cache, row, n, q, k, v):
    q, k = (cache.rope_from(x, 0) for x in (q, k))
    basis, reduced = cache.P, cache.settings.reduced

    def step(i, h, q, k, v, stored):
        count = i + 1 if reduced else compress.kept_tokens(cache.settings.k, i + 1)
        out, chosen, stored = compress.loki_step(q, k, v, stored, basis[h], cache.d, count)
        return out, None if reduced else chosen, stored

    return by_head(cache, q, k, v, n, lambda h: (k[:n, h] @ basis[h], v[:n, h]), step)


def pure_kivi(cache, row, n, q, k, v):
    q, k = (cache.rope_from(x, 0) for x in (q, k))

    def step(i, h, q, k, v, stored):
        out, stored = compress.kivi_step(q, k, v, stored, cache.keys.bits, cache.keys.R)
        return out, None, stored

    return by_head(cache, q, k, v, n, lambda h: (k[:n, h], v[:n, h]), step)


def pure_fdc(cache, row, n, q, k, v, latent):
    q, k = (cache.rope_from(x, 0) for x in (q, k))
    bases = [basis[:, :rank] for basis, rank in zip(cache.R, cache.k_ranks, strict=True)]
    values = latent.split(cache.v_ranks, -1)

    def step(i, h, q, k, v, stored):
        out, stored = compress.fdc_step(q, k, v, stored, bases[h])
        return out.flatten(), None, stored

    def start(h):
        return k[:n, h] @ bases[h], values[h][:n]

    return by_head(cache, q, k, list(zip(*values, strict=True)), n, start, step)


def pure_elitekv(cache, row, n, q, k, latent):
    places = slice(0, len(q))
    q, k = (
        cache.attention.rotate(x, cache.context.cos[places], cache.context.sin[places])
        for x in (q, k)
    )
    up, stored = (
        cache.attention.up.weight.unflatten(0, (cache.config.n_kv_heads, -1)),
        (k[:n], latent[:n]),
    )
    b_k, b_v = up.split((up.shape[1] - 16, 16), 1)
    for i in range(n, len(q)):
        out, stored = compress.elitekv_step(q[i], k[i], latent[i], stored, b_k, b_v)
        yield out.flatten(), None


FEW, CLOSE = {"sinks": 3, "critical": 12, "recent": 6}, {"rank": 4, "k": 12, "recent": 6}
# The step, and the case -> options, the steps of a row, what a token has beside q if that is not k
# and v. Options are over the paper's, or where the step is ours over the defaults.
STEPS = {
    "sals_step": (FEW, pure_sals, None),
    "sals_step_ours": (FEW | {"score_rank": 0.25}, pure_sals, None),
    "sals_step_ours biased": (FEW | {"score_rank": 0.25}, pure_sals, None),
    "lrqk_step": (CLOSE, pure_lrqk, None),
    "lrqk_step_ours": (CLOSE | {"slots": 1.5}, pure_lrqk, None),
    "loki_step": ({"k": 0.4, "d": 0.5}, pure_loki, None),
    "loki_step reduced": ({"d": 0.5, "reduced": True}, pure_loki, None),
    "kivi_step": ({"bits": 4, "residual": 32}, pure_kivi, None),
    "kivi_step 2 bits": ({"bits": 2, "residual": 64}, pure_kivi, None),
    "fdc_step": ({"rate": 0.4}, pure_fdc, lambda c, G: [(8 // G, 48), (0, 48), (sum(c.v_ranks),)]),
    "elitekv_step": ({"r": 3, "d_ckv": 20}, pure_elitekv, lambda c, G: [(8 // G, 6), (20,)]),
}


@pytest.mark.parametrize("group", [1, 2, 8])
@over("name", lambda tests: tests.STEPS)
def test_a_cache_does_as(name, group, request):
    """Over 40 steps of ragged rows, across the budget's edge: equal outputs, equal sets."""
    (options, pure, parts), prompts = request.module.STEPS[name], (8, 30)
    method = name.split("_step")[0]
    has_variants = "variant" in method_named(method).settings.__dataclass_fields__
    if has_variants and "ours" not in name:
        options = options | {"variant": "paper"}
    dim = width_for(method)
    model = tiny_model(group=group, head_dim=dim, qkv_bias="biased" in name)
    cache = row_cache(method, model, 2, 70, **options)
    torch.manual_seed(0)
    shapes = [(8, dim), *(parts(cache, group) if parts else [(8 // group, dim)] * 2)]
    streams = [[torch.randn(70, *shape) * 2 for shape in shapes] for _ in prompts]
    ragged = list(enumerate(zip(prompts, streams, strict=True)))
    for row, (n, tokens) in ragged:
        cache.prefill(row, 0, *(x[:n] for x in tokens))
    truth, seen = (
        [list(itertools.islice(pure(cache, row, n, *x), 40)) for row, (n, x) in ragged],
        [],
    )
    see_selections(cache, seen)
    for i in range(40):
        pos = torch.tensor([n + i for n in prompts], dtype=torch.int32)
        new = zip(*([x[n + i] for x in tokens] for _, (n, tokens) in ragged), strict=True)
        out = cache.decode(pos, *map(torch.stack, new))
        for row, steps in enumerate(truth):
            want, chosen = steps[i]
            assert error(out[row].flatten(), want) < 1e-5, (i, row)
            for h, tokens in enumerate(chosen or ()):
                if tokens is not None:  # one set [n], or each query head's [G, n]
                    got = seen[-1][row].unflatten(0, (8 // group, group))[h]
                    sets = torch.zeros_like(got).scatter(1, tokens.expand(group, -1), True)
                    assert torch.equal(got, sets), (i, row, h)


SPLITS = [case for case in CASES if case[0] != "lrqk"]  # whose prompt alone decides its bases


@over("method, options", lambda tests: tests.SPLITS)
def test_any_split_of_prompt_follow_up_and_decode_leaves_the_same_cache(method, options):
    """Whole numbers (codes) to the bit; what waits to be packed, as it is read. And the same
    logits, where a prompt attends what is stored: so EliteKV's absorbed decode is its naive
    attention."""
    options, ids, whole = options | skip_none(method), random_ids(48), {}
    shape = {"n_layers": 1, "head_dim": width_for(method), "qkv_bias": True}
    # Splits at and beside the edges of pages, chunks, windows and blocks, and across them.
    ends = (
        (48, 48),
        (1, 1),
        (3, 40),
        (7, 40),
        (8, 48),
        (9, 30),
        (31, 33),
        (32, 32),
        (33, 48),
        (1, 31),
    )
    for group, (first, second) in itertools.product((1, 2, 8) if method in CODED else (2,), ends):
        model = tiny_model(**shape, group=group).double()
        engine = make_engine(model, method, 1, 64, **options_for(model.config, options))
        engine.prefill([ids[:first]])
        engine.append([ids[first:second]])
        for token in ids[second:]:
            engine.tokens.fill_(token)
            engine.step()
        (cache,) = engine.caches
        buffers = dict(cache.named_buffers())
        if "keys.codes" in buffers:
            buffers = dict(zip(("keys", "values"), cache.past(0, 48), strict=True))
        if method in CODED:
            buffers["logits"] = engine.logits
        for name, buffer in buffers.items():
            one = whole.setdefault((group, name), buffer)
            same = (
                torch.allclose(one, buffer, atol=1e-5)
                if one.is_floating_point()
                else one.equal(buffer)
            )
            assert same or name in OF_THE_PROMPT, (group, first, second, name)


@over("method, options", lambda tests: [case for case in tests.CASES if case[0] not in CODED])
def test_a_follow_up_attends_what_the_cache_keeps_and_itself(method, options):
    """Exactly, for every query: past() in any order, then the new tokens up to its own. What past()
    gives is what each store reads; tokens that a cache keeps exactly are exact there."""
    cache, (q, k, v) = scene(method, 40, 57, 60, **options | skip_none(method))
    past, k_all = [x.clone() for x in cache.past(0, 40)], cache.rope_from(k, 0)[:57]
    for store in cache.modules():
        if (
            isinstance(store, (compress.TokenStore, compress.RebuiltKeys))
            and store not in cache.exact
        ):
            got, read = store.of_row(0, 40), store.read_all()[0].transpose(0, 1)
            assert error(got, read[: len(got)]) < 1e-6, store
    near = (past[0] - k_all[:40][: len(past[0])]).abs().amax(-1) < 1e-5  # [n, Hkv]
    exact = EXACT.get(method, lambda *_: near)(cache, torch.arange(40)[:, None])
    assert torch.equal(near, exact.expand_as(near))
    out = cache.prefill(0, 40, q[40:], k[40:], v[40:])
    k_all, v_all = (torch.cat(pair) for pair in zip(past, (k_all[40:], v[40:]), strict=True))
    live = torch.arange(len(k_all)) < len(past[0]) + 1 + torch.arange(17)[:, None]
    keys, values = (x.transpose(0, 1).expand(17, -1, -1, -1) for x in (k_all, v_all))
    assert (
        error(out, attend_plain_reference(cache.rope_from(q[40:], 40), keys, values, live)) < 1e-5
    )


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_attend_takes_an_index_of_every_shape(heads, kernel):
    """[B, Hkv or 1, G or 1, n], -1 for no token: as attention of each query head over its own
    tokens."""
    context = CacheContext(tiny_model().to(DEVICE), 2, 40, kernel)
    keys = compress.TokenStore(context, 4, 40, 16)
    values = compress.TokenStore(context, 4, 40, 16)
    torch.manual_seed(0)
    keys.vectors.copy_(torch.randn(2, 4, 40, 16))
    values.vectors.copy_(torch.randn(2, 4, 40, 16))
    q = torch.randn(2, 8, 16).to(DEVICE)
    index = torch.rand(2, *heads, 40).argsort(-1)[..., :12].int()
    index[1, ..., 5:] = -1
    pos = torch.tensor([39, 39], dtype=torch.int32, device=DEVICE)
    out = compress.attend(q, keys, values, pos, index.to(DEVICE), scale=0.25, kernel=kernel)

    index = index.long().expand(-1, 4, 2, -1).flatten(1, 2)  # [B, Hq, n]
    live = torch.zeros(2, 8, 41, dtype=torch.bool).scatter(2, index.where(index >= 0, 40), True)
    k = keys.vectors.repeat_interleave(2, 1)
    v = values.vectors.repeat_interleave(2, 1)
    assert error(out, attend_plain_reference(q, k, v, live[..., :40].to(DEVICE))) < 1e-5


def test_a_ring_store_writes_each_of_its_slots_once():
    context = CacheContext(tiny_model(), 1, 60)
    spans = itertools.combinations((0, 2, 4, 7, 30, 31, 33, 60), 2)
    for x, z, (start, stop) in itertools.product((0, 1, 4), (1, 8), spans):
        store = compress.RingStore(context, 1, 16, x, z)
        kept = store.kept(start, stop)
        assert kept.tolist() == [p for p in range(start, stop) if p < x or p >= stop - z]
        assert len(set(store.slot(kept).tolist())) == len(kept)


KEEP_15 = {"k": 10, "recent": 5}
# Method, options, its budget, sinks, recent tokens, how much of the budget may stay free beyond its
# edge, and the rule by which it takes exactly the best: a group's largest weight (of old tokens),
# or each head's. Some leave it free "early", before the edge, too.
SELECTORS = [
    ("topk", {"keep": 0.31}, 24, 0, 1, 0, "largest"),  # of 80: rounded down
    ("loki", {"k": 12, "d": 0.25}, 12, 0, 0, 0, ""),
    ("loki", {"k": 9, "d": 1.0}, 9, 0, 0, 0, "each"),
    ("loki", {"k": 9, "d": 1.0, "share": "group"}, 9, 0, 0, 0, "largest"),
    ("lrqk", KEEP_15 | {"rank": 16}, 15, 0, 5, 0, "largest old"),
    ("lrqk", KEEP_15 | {"variant": "paper", "rank": 16}, 15, 0, 5, 0, "largest old"),
    ("lrqk", KEEP_15 | {"variant": "paper", "rank": 6}, 15, 0, 5, 0, ""),
    ("sals", FULL | {"sinks": 2, "critical": 20}, 30, 2, 8, 0, ""),
]


@over(
    "selector, group, n_prompt",
    lambda tests: pairwise(tests.SELECTORS, [1, 2], [1, 10, 15, 23, 40]),
)
def test_a_method_attends_what_it_says_within_its_budget(selector, group, n_prompt):
    """All tokens up to the budget's edge; then the sinks, the recent ones and the best, once
    each."""
    method, options, budget, sinks, recent, free, best = selector
    settings = {name: value for name, value in options.items() if name != "exact_values"}
    assert budget == sum(compress.settings_from(method, settings).budget(80))
    places, bound = torch.arange(80), BOUNDS.get(method, 1e-5)
    cache, qkv = scene(method, n_prompt, 75, 80, group=group, **options)
    dense = reads(DenseCache(cache.context), n_prompt, *qkv)
    for n in range(n_prompt, 75):
        (out, chosen), whole = watched_step(cache, n, *qkv), step(dense, n, *qkv)
        rotated = dense.rope(qkv[0][n], torch.tensor(n))
        keys, values = (
            x.repeat_interleave(group, 1) for x in (dense.keys.vectors, dense.values.vectors)
        )
        assert (
            error(out, attend_plain_reference(rotated[None], keys, values, chosen[None])) < bound
        ), n
        least = budget - free if n >= budget or best == "early" else budget
        assert (error(out, whole) < bound) == (n < budget) or least <= n < budget, n
        counts = chosen.sum(-1)
        assert (counts <= min(n + 1, budget)).all() and not chosen[:, n + 1 :].any()
        assert (counts >= min(n + 1, least)).all()
        assert (
            chosen[:, : min(sinks, n + 1)].all() and chosen[:, max(0, n + 1 - recent) : n + 1].all()
        )
        if best not in ("", "early") and n_prompt > 1:  # LRQK has its full rank from the prompt
            ranked = places <= (n - recent if best == "largest old" else n)
            logits = (
                torch.einsum("hd,hsd->hs", rotated, keys[0]).div(4).masked_fill(~ranked, -torch.inf)
            )
            scores = logits.log_softmax(-1).unflatten(0, (-1, group))
            scores = scores if best == "each" else scores.amax(1, keepdim=True).expand_as(scores)
            others = (places >= sinks) & (places <= n - recent)
            taken, left = (x & others for x in (chosen, ~chosen))
            low = scores.flatten(0, 1).masked_fill(~taken, torch.inf).amin(-1)
            assert (low >= scores.flatten(0, 1).masked_fill(~left, -torch.inf).amax(-1)).all()


# --------------------------------------------------------------------------------------- the ledger


STORES = [
    ("sals", {"variant": "paper"}),
    ("lrqk", {"k": 20, "slots": 1.5}),
    ("elitekv", {"r": 1, "d_ckv": 33}),
    ("fdc", {"adaptive": False}),
]


def stores(tests) -> list:
    return [*tests.CASES, *((method, {}) for method in tests.METHODS), *tests.STORES]


@pytest.mark.parametrize("group", [1, 4])
@over("method, options", stores)
def test_measured_bytes_equal_the_formula(method, options, group):
    model = tiny_model(group=group, head_dim=32)
    engine = make_engine(model, method, 3, 200, **options_for(model.config, options))
    for cache in engine.caches:
        held = sum(b.nbytes for b in cache.buffers()) - cache.bytes_host()
        assert cache.bytes_stored() == cache.bytes_formula() == held


def test_keep_is_the_share_of_tokens_attended():
    """And the full layers are the paper's."""
    for settings in (compress.SalsSettings(), compress.SalsSettings(keep=0.125)):
        assert settings.budget(4096) == (4, 444, 64)
    paper = compress.settings_from("sals", {"variant": "paper"})
    assert paper.budget(4096) == (16, 432, 64)  # on LongBench
    assert sum(compress.SalsSettings(keep=0.25).budget(8192)) == 2048
    assert compress.skipped_layers(compress.SalsSettings(), 32) == {0, 1, 31}
    assert compress.left_to_select(24, 24, 80, 16, 8) == 0  # sinks and recent tokens alone


def test_bytes_of_the_paper():
    """SALS Table 2: 0.28 and 0.15 of dense; 1 / 0.15625 is the abstract's 6.4 times."""
    norm = SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16))
    context = CacheContext(SimpleNamespace(config=SHAPES["llama-2-7b"], norm=norm), 1, 4096)
    for rank, bits, ratio in ((0.25, 4, 0.28125), (0.125, 2, 0.15625)):
        settings = compress.settings_from("sals", {"variant": "paper", "rank": rank, "bits": bits})
        cache = compress.PaperSalsCache(
            context, settings, True, torch.zeros(4096, round(4096 * rank))
        )
        assert cache.token_bytes() == ratio * 2 * 4096 * 2


# method, options, tokens -> bytes, by hand: K and V of a token are 2 * 4 heads * 16 * 4 = 512
BYTES_READ = [
    ("dense", {}, 80, 80 * 512),
    ("sals", SPARSE, 80, 72 * (32 * 4 + 32 + 16) + 8 * 512),  # layer 0 attends every token
    ("sals", SPARSE | {"skip": ""}, 80, 80 * 16 * 4 + 20 * (32 * 4 + 32 + 16) + (4 + 8) * 512),
    ("sals", CODES | {"skip": ""}, 80, 80 * 20 + 20 * (16 + 8 + 4 + 32 + 4 * 2) + (4 + 8) * 512),
    ("topk", {"keep": 24}, 80, (80 + 24) * 256),
    ("loki", {"k": 12, "d": 0.25}, 80, (80 // 4 + 24 + 24) * 256),
    # and the rings
    ("kivi", {"bits": 2, "residual": 32}, 80, 48 * (64 * 3 / 8 + 64 * 4 / 8) + 32 * 512),
    ("elitekv", {"r": 3, "d_ckv": 20}, 80, 80 * (2 * 3 * 4 + 20) * 4),
    # A_K, K and V, tables, bases
    ("lrqk", LRQK, 80, 16 * (72 * 8 + 28 * 32 + 3 * 20 + 2 * 8 * 16)),
]


@over("method, options, length, expected", lambda tests: tests.BYTES_READ)
def test_bytes_read_by_hand(method, options, length, expected):
    assert (
        make_engine(tiny_model(), method, 1, 100, **options).caches[0].bytes_read(length)
        == expected
    )


# ------------------------------------------------------------------------------------- quantisation


def coded(
    x: torch.Tensor, bits: int, dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, (minimum, scale) of groups of 32, and what they stand for."""
    codes, low_scale = quantize(x, bits, 32, dim)
    return codes, low_scale, compress.dequantize(codes, low_scale, bits, 32, torch.float32, dim)


@pytest.mark.parametrize("bits", [2, 4])
def test_quantiser_bounds_and_exact_cases(bits):
    torch.manual_seed(bits)
    x = torch.randn(5, 3, 64) * torch.logspace(-3, 3, 64)
    codes, low_scale, back = coded(x, bits)
    assert codes.shape == (5, 3, 64 * bits // 8) and codes.dtype == torch.uint8
    low, scale = low_scale.float().unbind(-1)
    # half a step, and the fp16 rounding of both
    bound = scale / 2 + (low.abs() + scale * 2**bits) * 2**-10
    assert ((back - x).unflatten(-1, (2, 32)).abs().amax(-1) <= bound).all()
    assert error(coded(back, bits)[2], back) < 2e-3
    every = torch.arange(256).remainder(2**bits).float().view(-1, 64)
    every[:, ::32], every[:, 1::32] = 0, 2**bits - 1
    for exact, dim in (
        (torch.full((1, 1, 64), 0.75), -1),
        (torch.full((2, 32, 8), 0.75), -2),
        (every, -1),
    ):
        assert torch.equal(coded(exact, bits, dim)[2], exact)
    least = 2.0**-24 * (torch.arange(64) % 2)  # of fp16, as scales are
    for steps, highest in ((1, 0), (int(1.45 * (2**bits - 1)), 2**bits - 1)):
        # The scale rounds down: to 0, or so far that codes must be clamped.
        assert (coded(steps * least[None], bits)[2][0, 1::2] == highest * 2.0**-24).all()
    outlier = x.clone()
    outlier[0, 0, 40] = 1e4  # touches its own group of 32 only
    changed = coded(outlier, bits)[2] != back
    assert not changed[0, 0, :32].any() and not changed[1:].any() and not changed[0, 1:].any()


def test_compiled_codes_are_of_the_minimum_and_scale_that_are_stored():
    """They equal the eager ones to the bit, and so does what they stand for."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 128) * torch.logspace(-9, 1, 128)

    def codes():
        return [part for how in ((2, -2), (8, -1)) for part in coded(x, *how)]

    torch.compiler.reset()
    assert all(map(torch.equal, torch.compile(codes, dynamic=False, fullgraph=True)(), codes()))


@pytest.mark.parametrize("bits, lost", [(2, 0.1188), (4, 0.01154)])
def test_spread_codes_keep_the_length_of_a_row_and_lose_as_little_as_a_uniform_code_can(bits, lost):
    """lost: of normal numbers, by the best uniform code (Max's table). A row that is not shortened
    has 1 / (1 - lost) times that error."""
    torch.manual_seed(bits)
    x = torch.randn(100, 4, 512) * torch.logspace(-1, 3, 100)[:, None, None]
    x[3] = 0
    codes, scale, back = spread(x, bits)
    assert (
        codes.shape == (100, 4, 64 * bits)
        and scale.shape == (100, 4)
        and scale.dtype == torch.float16
    )
    live, energy = torch.arange(100) != 3, x.square().sum(-1)
    assert not back[3].any() and ((x * back).sum(-1) / energy - 1)[live].abs().max() < 2**-10
    far = ((back - x).square().sum(-1) / energy)[live].mean()
    assert abs(far * (1 - lost) / lost - 1) < 0.05


def test_mixed_codes_are_int8_numbers_with_one_scale():
    """Int8 numbers to half a step, and odd multiples of 4 to four steps, or clamped. Latents that
    are as large as int4_gain makes them lose little more of the others than Max's 4 bits,
    .01154."""
    torch.manual_seed(0)
    energy, lead = torch.logspace(3, -2, 64), 16
    gains = torch.cat(
        (torch.ones(lead), torch.full((48,), float(compress.int4_gain(energy, lead, 64))))
    )
    R = compress.random_rotation(lead, 48)
    assert torch.equal(R, compress.random_rotation.__wrapped__(lead, 48))  # the same in every run
    x = torch.randn(2000, 64) * energy.sqrt() @ R * gains
    x *= torch.logspace(-3, 3, 2000)[:, None]
    x[0], x[1, :lead], x[2, lead:] = 0, 0, 0
    codes, scale, rest = kernels.quantize_mixed(x, lead)
    back = kernels.dequantize_mixed(codes, scale, rest)
    leading, others = x.split((lead, 48), -1)
    least = leading.abs().amax(-1) / 127, others.square().mean(-1).sqrt() * 0.3352 / 8
    assert torch.allclose(scale, torch.maximum(*least)) and not back[0].any()
    step, far = scale[:, None], (back - x).abs()
    assert codes.dtype == torch.int8 and rest.dtype == torch.uint8 and rest.shape == (2000, 24)
    assert (far[:, :lead] <= 0.501 * step).all()
    assert (far[:, lead:] <= torch.maximum(4.001 * step, others.abs() - 59.99 * step)).all()
    far, size = (((part / step)[3:] ** 2).split((lead, 48), -1) for part in (far, x))
    lost = [float(a.sum() / b.sum()) for a, b in zip(far, size, strict=True)]
    assert lost[0] < 2e-4 and 0.0105 < lost[1] < 0.015


# ---------------------------------------------------------------------------------- SALS invariants


def assert_best_basis(
    x: torch.Tensor, basis: torch.Tensor, ranks, values=None, bound: float = 1e-4
) -> None:
    """Eckart-Young: orthonormal columns of which no r lose less of x [n, d]; values: its
    covariance's."""
    x, basis = x.double(), basis.double()
    assert error(basis.T @ basis, torch.eye(basis.shape[1])) < 1e-5
    spectrum = torch.linalg.svdvals(x).square()
    assert values is None or error(values, spectrum / len(x)) < 1e-5
    for r in ranks:
        lost = (x - x @ basis[:, :r] @ basis[:, :r].T).square().sum()
        assert abs(lost / spectrum[r:].sum() - 1) < bound


def pair_energy(x: torch.Tensor) -> torch.Tensor:
    """Squared length of each pair of dims that RoPE rotates: [..., D] -> [..., D / 2]."""
    return x.square().unflatten(-1, (2, -1)).sum(-2)


@pytest.mark.parametrize("group", [1, 2])
def test_sals_maps_of_ours_keep_the_logits_best(group, monkeypatch):
    monkeypatch.setattr(
        compress, "quantize_basis", lambda basis: (basis, torch.ones(len(basis), 16, 1))
    )
    model, tokens = tiny_model(group=group), tiny_tokens(6, 64)
    for layer in model.layers:  # queries that need some pairs more than others, and one not at all
        dims = torch.tensor([4.0, 1.0, 0.2, *[0.1] * 4, 0.0]).repeat(2 * model.config.n_heads)
        layer.attention.wqkv.weight[: len(dims)] *= dims[:, None]
    tensors, _ = fit_sals(model, tokens, 1.0)
    for i, (q, k, _) in enumerate(observed(model, tokens)):
        how = {"artifact": tensors, "i": i, "device": CPU}
        sals_maps = functools.partial(compress.sals_layer_maps, model.config, **how)
        energy = pair_energy(q.double()).unflatten(-2, (-1, group)).sum((0, 1, 3))  # [Hkv, D / 2]
        k, n = k.double().flatten(0, 1), model.config.kv_dim
        key_fit = tensors[f"{i}.key_basis"], (8, 16, 32), tensors["key_eigenvalues"][i]
        assert_best_basis(k.flatten(1), *key_fit)  # the paper's
        scale = tensors["scale"][i].double()
        weight = energy * (scale.square().sum() / (2 * energy.sum()))  # the fit's unit
        assert error(scale.square(), weight.repeat(1, 2).flatten()) < 1e-5
        assert error(tensors["mean"][i], k.mean(0).flatten()) < 1e-5
        settings = compress.SalsSettings()  # 4-bit codes fit the others' size
        (down, *_), (r, lead) = sals_maps(settings), settings.ranks(model.config)
        latents = (k - k.mean(0)).flatten(1) @ down.double()
        leading, others = (x.square().mean() for x in latents.split((lead, r - lead), 1))
        largest = math.sqrt(2 * math.log(2 * lead))
        assert error((others / leading).sqrt() * 0.3352 / 8, largest / 127) < 1e-4
        for r in (n // 8, n // 4):
            maps = sals_maps(compress.SalsSettings(rank=r / n))
            ours = maps.down.double(), maps.up.double()
            settings = compress.SalsSettings(variant="paper", score="sum", rank=r / n)
            paper = compress.paper_basis(model.config, settings, **how).double()
            assert error(ours[0].T @ ours[1], torch.eye(r)) < 1e-5
            each = (k - k.mean(0), *ours), (k, paper, paper)  # of centred keys, and of all of a key
            rests = (x - (x.flatten(1) @ down @ up.T).view_as(x) for x, down, up in each)
            best, other = ((pair_energy(rest) * weight).sum() for rest in rests)
            # Eckart-Young
            assert abs(best / len(k) / tensors["query_eigenvalues"][i, r:].sum() - 1) < 1e-4
            assert best < 0.8 * other


SCORED = [("paper", "sum"), ("ours", "sum"), ("ours", "softmax")]  # variant and score


@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("block, run", [(16, 1), (16, 16)])
@pytest.mark.parametrize("variant, score", SCORED)
def test_sals_scores_are_of_a_keys_mean_logits_over_the_places_of_its_block(
    variant, score, block, run, scaling
):
    """And the mean key's over those of its run, which of biased keys is a token. Sums of all heads'
    weights, in any order of a group's heads. The rule sum has no RoPE: all keys stand at the
    query's place, but for yarn's factor, and the mean key counts equally for all."""
    model = tiny_model(rope_scaling=scaling, qkv_bias=run == 1)
    cache = row_cache(
        "sals", model, 2, 40, block=block, **CODES | {"variant": variant, "score": score}
    )
    up = cache.up if variant == "ours" else cache.U_score
    assert scaling is None or cache.context.cos[0, 0] > 1.1
    q, k, pos = torch.randn(2, 8, 16), torch.randn(2, 40, 4, 16), torch.tensor([36, 24])
    for row in range(2):
        cache.latents.write_prompt(row, 0, cache.latent(k[row])[:, None])
    keys = cache.latents.read_all()[:, 0, :, : cache.r_score] @ up.T  # as scoring sees them
    keys, places = keys.unflatten(-1, (4, 16)), torch.arange(40)

    def mean_logits(q, key, span):
        """[2, 40, Hq] of a key in each place, over the places of the `span` tokens around it."""
        near = (places // span == places[:, None] // span).float()
        turned = cache.rope_from(key[:, :, None].expand(2, 40, 40, 4, 16), 0).repeat_interleave(
            2, 3
        )
        return torch.einsum(
            "bhd,bjphd,jp->bjh", cache.rope(q, pos), turned, near / near.sum(1, keepdim=True)
        )

    for x in (q, q.unflatten(1, (4, 2)).flip(2).flatten(1, 2)):
        if score == "sum":
            logits = (x.view(2, 1, 4, 2, 16) * keys[:, :, :, None]).sum(-1).flatten(2)
        else:
            mean = cache.mean.view(4, 16).expand_as(keys)
            logits = mean_logits(x, keys, block) + mean_logits(x, mean, run)
        scores = (
            cache.score(pos, x) if variant == "paper" else cache.score(pos, x, cache.rope(x, pos))
        )
        for row, n in enumerate((pos + 1).tolist()):
            truth = logits[row, :n] / 4 if score == "sum" else (logits[row, :n] / 4).softmax(0)
            assert error(scores[row, 0, 0, :n], truth.sum(1)) < 1e-5
    assert scores[1, 0, 0, 25:].eq(-torch.inf).all()


@pytest.mark.parametrize("length", [1, 7, 8, 12, 13, 14, 40])
@pytest.mark.parametrize("wanted", [None, (6, 2), (0, 1)])
def test_selection_has_the_sinks_and_the_best_and_no_repeats(length, wanted):
    """Of each row and head, in plain Python; a score of -inf or NaN is never chosen."""
    torch.manual_seed(length)
    scores, chance = torch.randn(2, 3, 40), torch.rand(2, 3, 40)
    scores = scores.masked_fill(chance < 0.2, -torch.inf).masked_fill(chance > 0.9, torch.nan)
    pos = torch.tensor([length - 1, max(0, length - 2)])
    chosen = kernels.select_reference(
        scores, pos, x=3, y=6, z=4, wanted=wanted and torch.tensor(wanted)
    )
    assert chosen.shape == (2, 3, 9)
    for row, head in itertools.product(range(2), range(3)):
        old = range(max(0, int(pos[row]) - 3))
        best = [j for j in old[3:] if scores[row, head, j] > -torch.inf]
        best = sorted(best, key=lambda j: -scores[row, head, j])[: wanted[row] if wanted else 6]
        assert sorted(j for j in chosen[row, head].tolist() if j >= 0) == sorted([*old[:3], *best])


@pytest.mark.parametrize("group, biases, scored", pairwise([1, 2, 8], [False, True], SCORED))
def test_folded_projections_equal_unfolded(group, biases, scored):
    """And values, turned in W_V and W_O, change no logit of a prompt, which attends exactly."""
    shape, runs, ids = (
        {"group": group, "qkv_bias": biases, "out_bias": biases},
        [],
        tuple(random_ids(50)),
    )
    variant, score = scored
    options = SPARSE | {"variant": variant, "score": score}
    n = 128 // group  # Hkv*D
    for fold in (True, False):
        model = tiny_model(**shape)
        model.config.qk_norm = not fold  # where there are norms, only values fold
        engine = make_engine(model, "sals", 1, 64, **options)
        runs.append(logits_through(engine, [ids], [random_ids(10, 1)]))
        assert error(runs[-1][0], dense_logits((ids,), ((0,),), **shape)[0]) < 1e-5
        rows = model.layers[2].attention.wqkv.weight.shape[0]
        assert rows == 128 + 2 * n + fold * (n // 2 + (n // 4 if score == "sum" else 0))
    # a code may round otherwise
    assert error(runs[0], runs[1]) < (1e-4 if variant == "paper" else 0.02)


def test_weights_are_folded_once_where_an_engine_could_not_be_built(folder, monkeypatch):
    """A second try, say with another max_seq_length, runs over the weights that the first one has
    folded."""
    ids = random_ids(20)
    expected = generate.LLM(folder, "fdc", device="cpu").generate(ids, 4, ignore_eos=True)
    llm = generate.LLM(folder, "fdc", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(generate, "Engine", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            llm.generate(ids, 4)
    assert llm.generate(ids, 4, ignore_eos=True).token_ids == expected.token_ids


def test_a_row_of_one_token_is_saved_after_others_took_its_place(folder, tmp_path):
    """A row that idles loses its place in the cache; its one token is read again to be saved."""
    llm = generate.LLM(folder, device="cpu", batch_size=2, max_seq_length=64)
    llm.prefill([[5, 6], [7]])
    llm.generate([[9]], 2, follow=True, ignore_eos=True)
    llm.save(tmp_path / "cache")
    assert generate.saved_facts(tmp_path / "cache").lengths[1] == 1


@pytest.mark.parametrize("variant", ["ours", "paper"])
def test_prefill_holds_one_layers_keys_and_values_at_a_time(variant, monkeypatch):
    """No tensor of a layer's k may live on when the next layer's prefill runs."""
    seen = []
    engine = make_engine(tiny_model(), "sals", 1, 64, **SPARSE | {"variant": variant})
    cache_class = type(engine.caches[1])
    prefill = cache_class.prefill

    def watched(cache, row, start, q, k, *rest):
        assert all(ref() is None for ref in seen)
        seen.append(weakref.ref(k))
        return prefill(cache, row, start, q, k, *rest)

    monkeypatch.setattr(cache_class, "prefill", watched)
    engine.prefill([random_ids(60)])
    assert len(seen) == 4


# ------------------------------------------------------------------------------------------ EliteKV


def elite_tables(pairs: torch.Tensor, n: int, c) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE tables of each KV head [S, Hkv, D/2] that rotate only its pairs [Hkv, r]."""
    cos, sin = (t[:, None].expand(-1, len(pairs), -1) for t in rope_tables(c, n, CPU))
    elite = torch.zeros(cos.shape[1:], dtype=torch.bool).scatter(1, pairs, True)
    return torch.where(elite, cos, 1.0), torch.where(elite, sin, 0.0)


def elite_reference(attention, pairs: torch.Tensor, x: torch.Tensor, c) -> torch.Tensor:
    """RoPElite without factors: the dense attention of one layer, cos = 1 and sin = 0 for non-elite
    pairs."""
    cos, sin = elite_tables(pairs, x.shape[-2], c)

    def turned(t):  # [S, heads, D]
        return apply_rope(t.unflatten(-2, (len(pairs), -1)), cos, sin).flatten(-3, -2)

    return attention(x, lambda q, k, v: model_file.causal_attention(turned(q), turned(k), v))


def test_a_checkpoint_may_have_one_elite_key_for_all_heads():
    """As nano-elitekv: its artifact has one order a layer, and the heads' elite keys are the
    same."""
    model, x = tiny_model(), torch.randn(40, 48)
    dense, tables = model.layers[1].attention, rope_tables(model.config, 40, CPU)
    k = dense.wqkv.weight[128:192].view(4, 16, 48)
    k.copy_(k[:1].clone().expand(4, -1, -1))
    artifact = artifact_of("elitekv", model)
    artifact["elite"] = artifact["elite"][:, :1]
    method_named("elitekv").fold_all(model, compress.EliteSettings(8, 48), artifact)
    elite = model.layers[1].attention
    assert elite.widths == [128, 16, 48]
    assert error(elite(x, elite.causal(*tables)), dense(x, dense.causal(*tables))) < 1e-4


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_elitekv_at_full_rank_rotates_the_elite_pairs_only(group, qkv_bias):
    """Of the other pairs cos = 1 and sin = 0."""
    for r in (1, 3, 8):
        model = tiny_model(group=group, qkv_bias=qkv_bias)
        c, artifact, x = model.config, artifact_of("elitekv", model), torch.randn(40, 48)
        dense, (cos, sin) = [layer.attention for layer in model.layers], rope_tables(c, 57, CPU)
        latent = min(48, c.n_kv_heads * (32 - 2 * r))
        method_named("elitekv").fold_all(model, compress.EliteSettings(r=r, d_ckv=latent), artifact)
        for layer, attention, order in zip(model.layers, dense, artifact["elite"], strict=True):
            elite = layer.attention
            got = elite(x, elite.causal(cos[:40], sin[:40]))
            assert error(got, elite_reference(attention, order[:, :r], x, c)) < 1e-4
            # only distances count
            assert error(elite(x, elite.causal(cos[17:], sin[17:])), got) < 1e-4


def test_ropelite_takes_the_best_pair_in_each_round():
    """Brute force, from the definition, over the queries at some positions."""
    torch.manual_seed(1)
    q = torch.randn(2, 24, 2, 16)  # [N, S, G, D]
    k = torch.randn(2, 24, 1, 16)
    rows = torch.randperm(24)[:15]
    cos, sin = rope_tables(tiny_config(), 24, CPU)
    deltas = calibrate.rope_deltas(q[:, rows], k[:, :, 0], rows, cos, sin)
    assert deltas.shape == (8, 2, 2, 15, 24)  # [D / 2, N, G, I, S]
    order = calibrate.ropelite(deltas).tolist()
    all_pairs = set(range(8))
    assert set(order) == all_pairs and len(order) == 8

    def logits(pairs: list[int]) -> torch.Tensor:
        """Causal ones, if these pairs alone turn."""
        tables = elite_tables(torch.tensor([pairs], dtype=torch.long), 24, tiny_config())
        q_turned = apply_rope(q[:, :, None], *tables)
        k_turned = apply_rope(k[:, :, None], *tables)
        return torch.einsum("nihgd,njhod->nhgij", q_turned, k_turned).tril() / 4

    wanted = logits(list(all_pairs))
    assert error(deltas.sum(0), (wanted - logits([]))[:, 0, :, rows]) < 1e-5
    for n in range(7):  # the last pair is the only one that is left
        best = order[:n]
        losses = {}
        for pair in all_pairs - set(best):
            losses[pair] = (logits([*best, pair]) - wanted)[..., rows, :].abs().mean()
        assert min(losses, key=losses.get) == order[n]


def test_elite_orders_are_those_of_each_head_alone():
    """The search of a layer and head does not depend on the others; the group's queries are summed
    over."""
    model, tokens = tiny_model(group=4), tiny_tokens(3, 40)
    found = calibrate.elite_orders(model, tokens)
    assert found["elite"].shape == found["contribution"].shape == (4, 2, 8)
    q, k, _ = observed(model, tokens)[2]
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: calibrate.ELITE_ROWS]
    tables = rope_tables(model.config, 40, CPU)
    order = calibrate.ropelite(calibrate.rope_deltas(q[:, rows, 4:], k[:, :, 1], rows, *tables))
    assert torch.equal(order, found["elite"][2, 1])
    norms = math.prod(
        pair_energy(x).sqrt().flatten(0, -2).mean(0) for x in (q[:, :, 4:], k[:, :, 1])
    )
    assert torch.equal(norms.argsort(descending=True), found["contribution"][2, 1])


def test_uniform_order_of_pairs():
    spread = [0, 5, 11, 17, 22, 28, 34, 40, 45, 51, 57, 63]
    order = compress.uniform_order(64, 12).tolist()
    assert order[:12] == spread and sorted(order) == list(range(64))


def test_joint_factors_are_optimal_and_beat_separate_ones():
    torch.manual_seed(0)
    mix = torch.randn(10, 60)  # keys and values that share directions
    k, v = (torch.randn(48, 10) @ mix[:, :n] + torch.randn(48, n) for n in (40, 60))
    k, v = k.unflatten(1, (4, 10)), v.unflatten(1, (4, 15))
    m = torch.cat((k, v), -1).double().flatten(1)
    spectrum, *parts = (torch.linalg.svdvals(x.double().flatten(1)).square() for x in (m, k, v))
    whole, root = m.square().sum(), torch.randn(48, 48, dtype=torch.float64)
    root = root @ root.T + torch.eye(48)
    for d_ckv in (1, 7, 20, 40, 48):
        factors = [compress.low_rank(k, v, d_ckv, kind) for kind in ("joint", "separate")]
        joint, separate = ((m - a @ b.flatten(1)).square().sum() for a, b in factors)
        (a, b), (_, blocks) = factors
        assert error(a.T @ a, torch.eye(d_ckv)) < 1e-8 and b.shape == (d_ckv, 4, 25)
        assert abs(joint - spectrum[d_ckv:].sum()) < 1e-6 * whole  # Eckart-Young
        # for inputs x with x^T x = root^2
        seen, best = compress.low_rank(k, v, d_ckv, "joint", root)
        assert error(seen.T @ seen, torch.eye(d_ckv)) < 1e-8
        lost = (root @ (m - seen @ best.flatten(1))).square().sum()
        least = torch.linalg.svdvals(root @ m)[d_ckv:].square().sum()
        assert abs(lost - least) < 1e-6 * lost.clamp(min=whole)
        splits = range(max(0, d_ckv - 48), min(40, d_ckv) + 1)
        best = min(parts[0][n:].sum() + parts[1][d_ckv - n :].sum() for n in splits)
        assert abs(separate - best) < 1e-6 * whole and separate > joint - 1e-6
        of_keys, of_values = (x.flatten(1).abs().sum(1) > 1e-9 for x in blocks.split((10, 15), -1))
        assert not (of_keys & of_values).any()  # block-diagonal


def test_elitekv_numbers_of_parameters():
    """App. C: of K and V 2r Hkv d + c d + c Hkv (2D - 2r)."""
    model = tiny_model(group=2)
    before = sum(p.numel() for p in model.layers[0].attention.parameters())
    make_engine(model, "elitekv", 3, 50, r=3, d_ckv=20)
    after = sum(p.numel() for p in model.layers[0].attention.parameters())
    assert after - before == (2 * 3 * 4 * 48 + 20 * 48 + 20 * 4 * (32 - 6)) - 2 * 48 * 64
    llama, llama3, nano = SHAPES["llama-2-7b"], SHAPES["llama-3.1-8b"], load_config(NANO)
    for share, known in (
        (0.5, (26, 2432)),
        (0.34375, (12, 2048)),
        (0.25, (8, 1536)),
        (0.125, (4, 768)),
    ):
        found = calibrate.elite_allocations(llama, share)
        assert known in found and all(
            2 * r * 32 + d == share * 8192 and d % 128 == 0 for r, d in found
        )
    assert (8, 64) in calibrate.elite_allocations(nano, 0.25)
    for c, share in itertools.product((llama, llama3, nano), (0.25, 0.5, 0.9)):
        for r, d in calibrate.elite_allocations(c, share):
            rotated = 2 * r * c.n_kv_heads
            assert rotated * c.dim + d * (c.dim + 2 * c.kv_dim - rotated) <= 2 * c.dim * c.kv_dim


def test_the_trial_of_fit_leaves_the_model_as_it_was():
    """The size that it chose has the perplexity of input_roots' factors."""
    model = tiny_model()
    tokens = tiny_tokens(4, 40)
    dense_attention = [layer.attention for layer in model.layers]

    def put_back() -> None:
        for layer, attention in zip(model.layers, dense_attention, strict=True):
            layer.attention = attention

    tensors, facts = calibrate.fit_elitekv(model, tokens)
    for layer, attention in zip(model.layers, dense_attention, strict=True):
        assert layer.attention is attention

    # Of three or more sizes it chose the one of the lowest perplexity.
    trials = {name: facts[name] for name in facts if name.startswith("perplexity_")}
    r, d_ckv = int(tensors["r"]), int(tensors["d_ckv"])
    lowest = min(trials.values())
    assert len(trials) >= 3 and trials[f"perplexity_{r}_{d_ckv}"] == lowest

    # That perplexity is of the factors for these inputs.
    artifact = tensors | calibrate.input_roots(model, tokens.flatten())
    method_named("elitekv").fold_all(model, compress.EliteSettings(r, d_ckv), artifact)
    assert calibrate.full_passes(model, tokens)[1] == pytest.approx(lowest, rel=1e-3)
    put_back()

    # With all pairs and a full latent it is the dense model's.
    logits = model.output(model(tokens[:, :-1]))
    dense = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp().item()
    method_named("elitekv").fold_all(model, compress.EliteSettings(8, 48), tensors)
    assert calibrate.full_passes(model, tokens)[1] == pytest.approx(dense, rel=1e-3)
    put_back()


# ------------------------------------------------------------------------ codes, settings, refusals


def test_group_scores_rank_weights_that_underflow():
    loud = kernels.group_scores(
        torch.tensor([0.0, -500, -400]).view(1, 1, 1, 3), torch.ones(1, 3) > 0
    )
    assert loud[0, 0].argsort().tolist() == [1, 2, 0]  # as weights the last two would both be 0


@pytest.mark.parametrize(
    "head_dim, bits, dtype",
    pairwise([16, 64, 96, 128, 160], [2, 4], [torch.float32, torch.float16]),
)
def test_codes_that_are_multiplied_equal_codes_that_are_decoded(head_dim, bits, dtype):
    """Values in runs of channels, latents in int8 and keys in KIVI's groups; large queries in fp16,
    too."""
    torch.manual_seed(0)
    x, weights = torch.randn(2, 3, 40, head_dim), torch.rand(2, 3, 4, 40)
    codes, low_scale = quantize(x, bits, min(32, head_dim))
    decoded = compress.dequantize(codes, low_scale, bits, min(32, head_dim), torch.float32)
    mixed = compress.mix_codes(weights, codes, low_scale, bits)
    assert error(mixed, weights @ decoded) < 1e-5
    codes, scale = kernels.quantize_int8(x)
    q = (30 * torch.sign(x[:, :, :4])).to(dtype)  # along a key, so that the sums are large
    logits = kernels.token_logits(q, codes, scale[..., 0])
    assert error(logits.float(), q.float() @ (codes * scale).mT) < (
        1e-5 if dtype == torch.float32 else 2e-3
    )


@over("method, options", lambda tests: tests.CASES)
def test_methods_run_from_the_command_line(method, options, cli):
    """Every setting is an option; the plan of their memory and the ledger agree; --json has
    them."""
    line = f"generate --method {method} --prompt 70 --prompt 5 --max_new_tokens 8"
    for name, value in options.items():
        flag = f" --no-{name}" if value is False else f" --{name}"
        line += flag if isinstance(value, bool) else f"{flag} '{value}'"
    report = cli.json(line)
    assert options.items() <= report["settings"].items() and report["bytes_read_per_step"] > 0
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"]


REFUSED_SETTINGS = [  # method, options, the message, and changes to the model if any
    ("topk", {"keep": 0}, r"--keep 0: give a number in \(0, inf\)"),
    ("sals", {"keep": 0.25}, "--keep 0.25 of 80 tokens is fewer than 4 sinks and 64 recent"),
    ("sals", {"variant": "paper", "score": "softmax"}, "leave --score out"),
    ("kivi", {"residual": 48}, "a multiple of 32"),
    ("elitekv", {}, "q/k norms", {"qk_norm": True}),
    ("elitekv", {}, "yarn", {"rope_scaling": YARN}),
    ("kivi", {}, "bit values need a head dim that groups of 32", {"head_dim": 48}),
    # narrower than a tensor core's tile
    ("dense", {"kernel": True}, "--no-kernels", {"head_dim": 8}),
]


@over("case", lambda tests: tests.REFUSED_SETTINGS)
def test_methods_refuse_what_does_not_fit(case):
    method, options, message, *changes = case
    with pytest.raises(UserError, match=message) as caught:
        make_engine(tiny_model(**dict(*changes)).to(DEVICE), method, 1, 80, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head_dim, n_layers, tokens", [(8, 2, 24), (16, 1, 24), (8, 2, 3)])
@over("method", lambda tests: tests.METHODS)
def test_every_method_runs_at_its_defaults_on_a_small_model(method, head_dim, n_layers, tokens):
    """A default gives way to a small model or a short context; only what was asked for is
    refused."""
    model = tiny_model(head_dim=head_dim, n_layers=n_layers)
    artifact = compress.random_artifact(method, model.config)
    engine = make_engine(model, method, 1, tokens, artifact)
    assert logits_through(engine, [random_ids(tokens - 2)], [[7]]).isfinite().all()
    assert (
        sum(getattr(compress.settings_from(method, {}), "budget", lambda n: [n])(tokens)) <= tokens
    )


@over("method", lambda tests: tests.METHODS)
def test_huge_and_negative_settings_run_or_are_refused_at_once(method):
    numbers = [
        f.name for f in dataclasses.fields(method_named(method).settings) if f.type in (int, float)
    ]
    for name, value in itertools.product(numbers, (1 << 31, 1 << 62, -1)):
        started = time.time()
        with contextlib.suppress(UserError):
            engine = make_engine(tiny_model(), method, 1, 60, **{name: value})
            assert logits_through(engine, [random_ids(50)], [[7]]).isfinite().all()
            assert (
                sum(cache.bytes_stored() + cache.bytes_host() for cache in engine.caches) < 1 << 22
            )
        assert time.time() - started < 20


# ---------------------------------------------------------------------------------- Loki invariants


def test_loki_fit_is_a_centred_pca_of_each_head():
    model, tokens = tiny_model(qkv_bias=True), tiny_tokens(8, 64)
    model.layers[2].attention.wqkv.bias.fill_(3)  # keys that are far from centred, after RoPE, too
    tensors, _ = calibrate.fit_loki(model, tokens)
    every = observed(model, tokens)[2][1]  # of layer 2, before RoPE
    tables = rope_tables(model.config, 64, CPU)
    for kind, keys in (("post", apply_rope(every, *tables)), ("pre", every)):
        keys = keys.flatten(0, 1)[:, 1].double()  # of head 1
        values = tensors[f"{kind}.eigenvalues"][2, 1].double()
        assert_best_basis(keys - keys.mean(0), tensors[f"{kind}.basis"][2, 1], (1, 4, 12), values)


# ---------------------------------------------------------------------------------- LRQK invariants


def explicit_lrqk(q, k, a_q, a_k, rounds: int):
    """A_Q and A_K of Alg. 1 as it is written, on A_Q and A_K themselves."""
    solve = torch.linalg.solve
    for _ in range(rounds):
        b_q, b_k = (solve(a.mT @ a, a.mT @ x) for a, x in ((a_q, q), (a_k, k)))
        a_k = solve(a_q.mT @ a_q + b_k @ b_k.mT, (k @ (q.mT @ a_q + b_k.mT)).mT).mT
        a_q = solve(a_k.mT @ a_k + b_q @ b_q.mT, (q @ (k.mT @ a_k + b_q.mT)).mT).mT
    return a_q, a_k


def test_lrqk_moments_count_every_token():
    x = torch.randn(5000, 2, 3, 4)  # more than one part
    (gram, total), rows = compress.lrqk_moments(x), x.double().transpose(0, 1).flatten(1, 2)
    assert error(gram, compress.add_ridge(rows.mT @ rows, 1e-6)) < 1e-12
    assert error(total, rows.abs().sum(1)) < 1e-12


@pytest.mark.parametrize("group", [1, 4])
def test_lrqks_closed_form_is_the_optimum(group, monkeypatch):
    """Invariant 2 (Eckart-Young): nothing of rank r beats the tail of the singular values of R_Q
    R_K^T. The closed form reaches it, for all heads of a group with one W_Q, in a gauge of equal
    diagonal Grams."""
    monkeypatch.setattr(compress, "add_ridge", lambda m, fraction: m)
    generator = torch.Generator().manual_seed(group)
    q, k = torch.randn(2, 2, 300 * group, 16, generator=generator, dtype=torch.float64)
    mix = orthonormal(16).double() * torch.logspace(1, -1, 16, dtype=torch.float64)
    q, k = q @ mix, k[:, :300] @ mix.roll(1, 1)  # of two KV heads, of falling spectra
    grams = [x.mT @ x for x in (q, k)]
    best, whole = compress.lrqk_optimum(*grams, 6), q @ k.mT
    kept, tail = (q @ best[0]) @ (k @ best[1]).mT, torch.linalg.svdvals(whole)[:, 6:].square().sum()
    assert abs((whole - kept).square().sum() - tail) < 1e-9 * whole.square().sum()
    made = [w.mT @ g @ w for w, g in zip(best, grams, strict=True)]
    diagonal = made[0].diagonal(dim1=1, dim2=2)
    assert error(made[0], made[1]) < 1e-6 and error(torch.diag_embed(diagonal), made[0]) < 1e-6
    assert (diagonal.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("ratio", [1, 1.5, 2])
def test_lrqk_slot_table(ratio):
    """Invariant 7 over 60 steps of drifting selections: the tables are inverse to each other, hits
    stay where they are, exactly the selected are stamped and hold host memory's bytes, and what
    goes is what was unused for the longest time. With C = k the residents are the selection."""
    B, heads, S, k, D = 2, 3, 80, 8, 4
    C, rng = int(ratio * k), np.random.default_rng(0)
    rows, hot = torch.randn(B, heads, S, 2 * D), torch.zeros(B, heads, C, 2 * D)  # K and V
    slot_of, pos_of, stamp = (torch.full((B, heads, n), -1, dtype=torch.int32) for n in (S, C, C))
    used = {where: {} for where in np.ndindex(B, heads)}  # position -> last step, for each resident
    for step in range(60):
        scores = torch.from_numpy(rng.normal(size=(B, heads, S)) - abs(np.arange(S) - step) / 4)
        scores[0, :, 3 + step :] = -torch.inf  # a short row: fewer candidates than k at first
        best, index = scores.topk(k, sorted=False)
        live = best > -torch.inf
        # as compress.LrqkCache.fetch has it: a position without a slot
        index = index.where(live, S - 1)
        now = torch.tensor(step, dtype=torch.int32)
        place, miss = compress.take_slots(index, live, slot_of, pos_of, stamp, now)
        kernels.fetch_rows_reference(rows, index, place, miss, hot)
        for where, old in used.items():
            chosen, missed = (set(index[where][mask[where]].tolist()) for mask in (live, miss))
            slots = (pos_of[where] >= 0).nonzero()[:, 0]
            places = pos_of[where][slots]
            assert torch.equal(slot_of[where][places], slots.int())
            assert (slot_of[where] >= 0).sum() == len(slots)
            assert missed == chosen - set(old)
            gone, idle = set(old) - set(places.tolist()), set(old) - chosen
            oldest = sorted(old[p] for p in idle)[: max(0, len(set(old) | chosen) - C)]
            assert sorted(old[p] for p in gone) == oldest  # ties aside
            used[where] = {p: s for p, s in old.items() if p not in gone} | dict.fromkeys(
                chosen, step
            )
            assert (
                dict(zip(places.tolist(), stamp[where][slots].tolist(), strict=True)) == used[where]
            )
            assert torch.equal(hot[where][slots], rows[where][places])


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_output_does_not_depend_on_where_rows_lie(variant):
    """Invariant 9: no hit/miss (slots 0), or more slots: the same."""
    options, qkv = {"rank": 6, "k": 10, "recent": 5, "variant": variant}, stream(64)
    caches = [
        row_cache("lrqk", tiny_model(), 1, 64, **options, slots=share) for share in (1.0, 2.0, 0.0)
    ]
    cache = caches[0]
    for each in caches:
        reads(each, 40, *qkv)
    for n in range(40, 60):
        truth = step(cache, n, *qkv)
        for other in caches[1:]:
            assert error(step(other, n, *qkv), truth) < 1e-5
    assert cache.bytes_host() == 4 * 64 * 2 * 16 * 4  # K and V of all tokens
    rates = [c.miss_rate() for c in caches]
    assert 0 < rates[1] < rates[0] < rates[2] == 1
    for n in (20, 40):  # rates begin anew with a prompt
        reads(cache, n, *qkv)
        for pos in range(n, n + 20):
            step(cache, pos, *qkv)
    assert cache.miss_rate() == rates[0]


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqks_proxies_fit_fp16_where_its_keys_do(variant):
    """Of keys near fp16's largest number, 65504."""
    cache = row_cache("lrqk", tiny_model().half(), 1, 80, rank=8, k=20, recent=8, variant=variant)
    q, k, v = (
        x + bias * (torch.arange(16) == 3)
        for x, bias in zip(stream(80), (300, 6e4, 0), strict=True)
    )
    qkv = [x.half() for x in (q, k, v)]
    reads(cache, 60, *qkv)
    assert all(step(cache, n, *qkv).isfinite().all() for n in range(60, 80))
    assert cache.a_k.abs().max() <= 1.01 * cache.kv.vectors.abs().max() < torch.inf


def test_lrqk_says_that_weights_are_damaged():
    model = tiny_model()
    model.layers[1].attention.wqkv.weight[130:140] = 3e38  # of the keys
    with pytest.raises(UserError, match="^[^\n]*are not finite; the weights are damaged$"):
        make_engine(model, "lrqk", 1, 60, rank=6).prefill([random_ids(40)])


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_writes_a_follow_up_as_decode_does(variant):
    """By the prompt's bases. The paper's bases follow each step: there by least squares on them."""
    (once, qkv), (steps, _) = (
        scene("lrqk", 40, 60, **LRQK | {"variant": variant}) for _ in range(2)
    )
    once.prefill(0, 40, *(x[40:] for x in qkv))
    for n in range(40, 60):
        step(steps, n, *qkv)
    assert torch.allclose(once.kv.vectors, steps.kv.vectors, atol=1e-5)
    for exact in zip(once.exact, steps.exact, strict=True):
        assert torch.allclose(*(store.vectors for store in exact), atol=1e-5)
    if variant == "ours":
        assert torch.allclose(once.a_k, steps.a_k, atol=1e-4)
        stamped = (c.pos_of.where(c.stamp == c.step, -1) for c in (once, steps))
        assert torch.equal(*(places.sort(-1).values for places in stamped))
    residual = once.kv.vectors[..., 40:, :16] - once.a_k[..., 40:, :] @ once.basis_k
    across = residual @ once.basis_k.mT
    assert variant == "ours" or across.abs().max() < 1e-3 * residual.abs().max()


# ----------------------------------------------------------------------------------- FDC invariants


@pytest.fixture(scope="module")
def fdc_fit():
    """On text that the model itself would write: a random model predicts it well."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    engine = make_engine(model, "dense", 6, 48)
    engine.prefill([[i] for i in range(6)])
    written = decode_rows(engine, 47, lambda _: False)
    tokens = torch.tensor([[i, *ids] for i, ids in enumerate(written)])
    return model, tokens, *calibrate.fit_fdc(model, tokens, 0.5)


def test_fdc_basis_is_a_rotation_that_keeps_the_most_energy(fdc_fit):
    """Of unseen random tokens, up to the last position: keys' R belongs to the model, values' to
    weights."""
    model, _, tensors, _ = fdc_fit
    places = torch.randint(0, 512, (20, 64), generator=torch.Generator().manual_seed(1))
    cos, sin = rope_tables(model.config, 512, CPU)
    cos = cos[places]
    sin = sin[places]
    seen = observed(model, torch.tensor(random_ids(20 * 64)).view(20, 64))
    for layer, head in ((0, 1), (3, 2)):
        basis = tensors["qk.basis"][layer, head].double()
        energy = tensors["qk.values"][layer, head].double().square()
        assert error(basis.T @ basis, torch.eye(48)) < 1e-5

        # The head's queries and key.
        q, k, _ = seen[layer]
        q = apply_rope(q, cos, sin).double().unflatten(2, (4, -1))[:, :, head]
        k = apply_rope(k, cos, sin).double()[:, :, head]
        x = torch.cat((q.flatten(0, 2), k.flatten(0, 1)))  # [n, D]

        def kept(rotation: torch.Tensor, p: int, x=x) -> float:
            """The fraction of the energy in the leading p columns."""
            return ((x @ rotation[:, :p]).square().sum() / x.square().sum()).item()

        for p in (16, 32):
            share = (energy[:p].sum() / energy.sum()).item()
            assert kept(basis, p) == pytest.approx(share, rel=0.02)
            for seed in range(5):
                assert kept(basis, p) > kept(orthonormal(48, seed).double(), p)

    attention = model.layers[1].attention
    _, _, w_v = attention.wqkv.weight.split(attention.widths)
    values = tensors["v.values"][1, 1].square() / 48
    assert_best_basis(w_v[48:96].T, tensors["v.basis"][1, 1], (8, 16, 40), values, 1e-3)


def test_fdc_rates_are_where_ranks_change():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2, 3, 80, generator=generator).sort(-1, descending=True).values
    rates = calibrate.fdc_rates(values)
    assert rates[0] == 0 and len(rates) == 1 + 2 * 3 * 4

    def total(rate: float) -> int:
        return int(compress.fdc_ranks(values, rate).sum())

    for rate, next_rate in itertools.pairwise(rates):
        assert total(rate) - total(next_rate) == 16
        assert total((rate + next_rate) / 2) == total(rate)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.3, 0.6, 0.99])
def test_fdc_ranks_obey_equation_1(rate):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2, 3, 80, generator=generator).sort(-1, descending=True).values
    values[0, 0, 20:] = 0  # a head that is of rank 20
    ranks = compress.fdc_ranks(values, rate)
    for layer, head in itertools.product(range(2), range(3)):
        theta = values[layer, head].double()
        # The least number of columns beside which at most `rate` is lost, rounded up to 16.
        m = 1
        while theta[m:].sum() > rate * theta.sum():
            m += 1
        assert ranks[layer, head] == min(80, math.ceil(m / 16) * 16)
    assert (ranks >= compress.fdc_ranks(values, rate + 0.005)).all()
    equal = compress.fdc_ranks(values, rate, adaptive=False)
    assert (equal == equal[0, 0]).all()
    assert 0 <= ranks.double().mean() - equal[0, 0] < 1


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_fdc_search_measures_what_the_cache_does(fdc_fit, rate):
    """One forward pass with projectors gives the perplexity of token-by-token decoding through the
    cache. The cache holds each head at its rank, and the weights of V and its output shrink to the
    ranks."""
    _, tokens, tensors, _ = fdc_fit
    model = tiny_model(head_dim=48, qkv_bias=True)
    qk, v = (compress.fdc_ranks(tensors[f"{kind}.values"], rate) for kind in ("qk", "v"))
    searched = calibrate.fdc_accuracy(model, tokens, tensors, rate)[1].item()
    before = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    engine = make_engine(model, "fdc", *tokens.shape, tensors, rate=rate)
    prompts, rest = tokens[:, :1].tolist(), tokens[:, 1:]
    logits = logits_through(engine, prompts, rest.tolist())[:-1]  # [n, B, V]
    loss = F.cross_entropy(logits.flatten(0, 1), rest.T.flatten())
    assert math.exp(loss) == pytest.approx(searched, 1e-4)
    assert (
        sum(cache.bytes_stored() for cache in engine.caches)
        == tokens.numel() * int((qk + v).sum()) * 4
    )
    lost = int((48 - v).sum()) * 48 * (1 + 2)  # of W_V, and of W_O for both heads of a group
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2) == before - lost


def test_fdc_search_finds_the_largest_rate_above_the_floor(fdc_fit):
    model, tokens, tensors, facts = fdc_fit

    def accuracy(rate: float) -> float:
        return calibrate.fdc_accuracy(model, tokens, tensors, rate)[0].item()

    rates = calibrate.fdc_rates(tensors["qk.values"], tensors["v.values"])
    found = rates.index(float(tensors["rate"]))
    assert found > 0
    dense = accuracy(0.0)
    assert dense > 0.95  # the model wrote the text itself
    assert accuracy(rates[found]) >= 0.5 * dense > accuracy(rates[found + 1])
    ratio = accuracy(rates[found]) / dense
    assert facts["accuracy of dense's"] == pytest.approx(ratio)

    rate, kept_accuracy, _ = calibrate.fdc_search(model, tokens, tensors, 1.0)
    assert rate < rates[found]
    assert kept_accuracy >= 1


# -------------------------------------------------------------------------- sampling and the engine


def test_greedy_top_k_and_top_p():
    """Greedy takes the first of the largest."""
    torch.manual_seed(0)
    for vocabulary in (1, 5, 63, 64, 65, 1000, 4096):
        logits = randn(7, vocabulary)
        least, broken = torch.full((2, vocabulary), -torch.inf), logits.masked_fill(logits > 1, NAN)
        for each in (logits, logits.round(), least, broken):
            assert torch.equal(sample(each, Sampling()), each.argmax(-1))
    logits = torch.tensor([[0.1, 3.0, 2.0, -1.0, 2.9]]).repeat(4000, 1)
    for options, expected in (
        ({"top_k": 2}, {1, 4}),
        ({"top_p": 0.5}, {1, 4}),
        ({"top_p": 0.3}, {1}),
    ):
        assert set(sample(logits, Sampling(1.0, **options)).tolist()) == expected
    half = sample(torch.zeros(99, 2), Sampling(1.0, top_p=0.5))
    assert len(set(half.tolist())) == 1  # which holds just .5
    assert (sample(logits, Sampling(1.0, top_k=9)) < 5).all()  # more than there are: all
    assert (sample(logits, Sampling(1e-300)) == 1).all()  # less than fp32 can hold
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.bincount(sample(logits, Sampling(temperature)), minlength=5) / 4000
        assert (drawn - (logits[0] / temperature).softmax(-1)).abs().max() < 0.03


def test_a_capture_warms_up_in_a_cache_of_one_token(monkeypatch):
    for name in ("Stream", "current_stream", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    engine = make_engine(tiny_model(), "dense", 2, 1, graphed=True)
    assert engine.pos.tolist() == engine.tokens.tolist() == [0, 0]


GRAPHED = CASES


@needs_cuda
@over("method, options", lambda tests: tests.GRAPHED)
def test_graph_replay_equals_eager(method, options):
    """One graph over 300 steps of a ragged batch, across the budget's edge at 32 tokens."""
    prompts, tokens = [random_ids(n, n) for n in (5, 31, 60)], []
    for graphed in (False, True):
        engine = make_engine(tiny_model().cuda(), method, 3, 400, graphed=graphed, **options)
        engine.prefill(prompts)
        tokens.append((decode_rows(engine, 300, lambda ids: False), engine.logits.tolist()))
    assert tokens[0] == tokens[1]


NANO_CASES = [
    *(("sals", options) for options in ({}, {"score": "sum"}, {"variant": "paper"})),
    *((method, {}) for method in ("dense", "fdc", "loki")),
    ("topk", {"keep": 256}),
    *(("lrqk", options) for options in ({"k": 256}, {"variant": "paper"})),
]


@needs_cuda
@over("method, options", lambda tests: tests.NANO_CASES)
def test_nanos_greedy_tokens_with_and_without_kernels_and_graph(method, options):
    """The compiled graph neither compiles again nor waits for the host once it is captured."""
    prompts = [nano_question(2000, "silent harbor"), nano_question(4000, "amber lantern")]
    tokens = []
    for kernel, graphed in itertools.product((False, True), repeat=2):
        how = {"kernel": kernel, "compiled": graphed, "graphed": graphed}
        engine = fitted_engine(NANO, method, 2, 1600, "cuda", **how, **options)
        engine.prefill(prompts)
        engine.draw()
        if graphed:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            torch.compiler.set_stance("fail_on_recompile")
        made = []
        for _ in range(24):
            made.append(engine.tokens.clone())
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
        torch.compiler.set_stance("default")
        tokens.append(torch.stack(made).tolist())
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


@pytest.mark.parametrize("size", ["MLP_CHUNK", "QUERY_CHUNK"])
def test_long_prompts_are_read_in_chunks(size, monkeypatch):
    """Up to the capacity's end: by the MLP, by attention over a past."""
    whole, parts = (make_engine(tiny_model(), "dense", 1, 30) for _ in range(2))
    whole.prefill([random_ids(30)])
    monkeypatch.setattr(next(x for x in (Llama, model_file) if hasattr(x, size)), size, 7)
    parts.prefill([random_ids(30)[:5]])
    parts.append([random_ids(30)[5:]])
    assert error(parts.logits, whole.logits) < 1e-5 and torch.equal(parts.pos, whole.pos)


def test_a_follow_up_of_one_row_changes_nothing_of_the_others():
    """And reading draws no token: that is for decoding."""
    engine = make_engine(tiny_model(), "dense", 9, 40)
    engine.sampling = Sampling(50.0)
    engine.prefill([random_ids(9)] * 9)
    before = engine.logits.clone()
    numbers = engine.generator.get_state()
    engine.append([random_ids(11), *[[]] * 8])
    assert engine.logits[1:].equal(before[1:]) and not engine.logits[0].equal(before[0])
    assert engine.generator.get_state().equal(numbers) and not engine.tokens.any()


@pytest.mark.parametrize("group, dim", [(1, 16), (4, 96), (2, 128)])
def test_causal_attention_over_a_past(group, dim, monkeypatch):
    """By masks, and in half precision on CUDA by flash attention."""
    monkeypatch.setattr(model_file, "QUERY_CHUNK", 32)
    kinds = (torch.float32, 1e-5), (torch.bfloat16, 2e-2)
    for (dtype, bound), n, past in itertools.product(kinds, (1, 32, 70), (0, 1, 77)):
        q, *kv = (randn(m, h, dim, dtype=dtype) for m, h in ((n, 8), *[(past + n, 8 // group)] * 2))
        heads = (x.float().repeat_interleave(8 // x.shape[1], 1).transpose(0, 1) for x in (q, *kv))
        live = torch.ones(n, past + n, dtype=torch.bool, device=DEVICE).tril(past)
        want = F.scaled_dot_product_attention(*heads, attn_mask=live).transpose(0, 1)
        assert error(model_file.causal_attention(q, *kv), want) < bound, (dtype, n, past)


# --------------------------------------------------------------------------------------- tokenizers

LLAMA2, LLAMA3, QWEN, STORIES = (
    "tokenizers/llama2",
    "tokenizers/llama3",
    "tokenizers/qwen2.5",
    "stories260k",
)
TEXTS = [
    "",
    " leading and  double   spaces ",
    "\n\n\ttabs\r\nand lines\n",
    "def f(x):\n    return x**2  # ü",
    "0 12 345 6789 3.14159 1e-10 ²½",
    "I'll don't WE'RE it's naïve café Ångström İstanbul",
    "你好，世界。こんにちは 안녕하세요 Привет мир مرحبا नमस्ते",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 zero\u200bwidth \u00a0 nbsp \u3000 wide",
    "<|eot_id|> </s> <s> <|im_end|> [INST]" + "a" * 1000,
    "\x00\x01\x7f\U0001f9ffx\U00020000",
]


def folder_of(name):
    if not (REAL / name).exists():
        pytest.skip(f"no {REAL / name}")
    return REAL / name


@functools.cache
def real(name):
    return load_tokenizer(folder_of(name))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> Path:
    """A folder with Qwen's tokenizer.json, made from vocab.json and merges.txt as the error
    says."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen") / "folder"
    shutil.copytree(folder_of(QWEN), folder)
    with pytest.raises(
        UserError, match=r"merges\.txt without a tokenizer\.json; write one with: python -c"
    ) as error:
        load_tokenizer(folder)
    exec(shlex.split(str(error.value))[-1])
    return folder


def sentencepiece_of(name):
    """Of a folder, or of its name in REAL."""
    return SentencePieceProcessor(model_file=str(folder_of(name) / "tokenizer.model"))


def write_tiktoken(folder, merges):
    """A tokenizer.model like Llama 3's of the 256 bytes and a few merges."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [bytes([byte]) for byte in range(256)] + [word.encode() for word in merges]
    lines = [base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(words)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


GPT2_BYTES = [chr(b) for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b >= 174]
GPT2_BYTES += [chr(256 + i) for i in range(68)]
MERGES = ["1 2", "Ġ 12", "t h", "th e", "Ġ the", "a .", ". .", "Ġ Ġ", "! !"]
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
UNSPLIT = BYTE_LEVEL | {"use_regex": False}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token
SPLIT = {"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated", "invert": False}


def in_turn(*parts) -> dict:
    """Several steps of a tokenizer.json, one after the other."""
    kinds = "pretokenizers", "normalizers", "processors"
    return {"type": "Sequence"} | dict.fromkeys(kinds, list(parts))


def special_tokens(*names: str, first: int = 256) -> list[dict]:
    """Added tokens of a tokenizer.json, with ids from `first` on."""
    flags = dict.fromkeys(FLAGS, False)
    return [
        {"id": first + i, "content": name, "special": True} | flags for i, name in enumerate(names)
    ]


def tokenizer_json(vocab=None, merges=(), pre_tokenizer=BYTE_LEVEL, added=(), **parts):
    """The contents of a tokenizer.json; by default of single bytes."""
    vocab = vocab or {
        word: i for i, word in enumerate(GPT2_BYTES + ["".join(m.split()) for m in merges])
    }
    model = {"type": "BPE", "vocab": vocab, "merges": list(merges)} | parts.pop("model", {})
    data = {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": None,
        "post_processor": None,
    }
    return data | {"pre_tokenizer": pre_tokenizer, "decoder": BYTE_LEVEL, "model": model} | parts


def tokenizer_of(folder: Path, **files):
    """Of a folder that gets these JSON files."""
    folder.mkdir(exist_ok=True)
    for name, contents in files.items():
        (folder / f"{name}.json").write_text(json.dumps(contents), encoding="utf-8")
    return load_tokenizer(folder)


def encode_named(tokenizer, text: str, bos: bool = True) -> list[int]:
    """Token ids of text in which names such as <|eot_id|> are those tokens."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    parts = enumerate(re.split(f"({'|'.join(map(re.escape, names))})", text))
    return tokenizer.encode_segments([(part, i % 2 == 1) for i, part in parts if part], bos)


def with_auto(folder: Path) -> tuple:
    """The tokenizer of a folder, ours and transformers'."""
    return load_tokenizer(folder), pytest.importorskip(
        "transformers"
    ).AutoTokenizer.from_pretrained(folder)


# ---- ids that are known


def test_llama3_vector_and_special_tokens():
    tokenizer = real(LLAMA3)
    ids = [128000, 2028, 374, 264, 1296, 11914, 13, 128001]
    assert encode_named(tokenizer, "This is a test sentence.<|end_of_text|>") == ids
    assert tokenizer.encode("This", bos=False) == [2028]
    assert tokenizer.vocab_size == 128256 and tokenizer.bos_id == 128000
    assert tokenizer.stop_ids == {128001, 128008, 128009}
    known = {"<|python_tag|>": 128010, "<|reserved_special_token_246|>": 128255}
    assert (
        known.items() <= tokenizer.special_tokens.items() and len(tokenizer.special_tokens) == 256
    )


# ---- round trips and oracles


def test_llama3_against_transformers():
    """Which knows no control tokens of a bare tokenizer.model, so that their names are text to
    it."""
    tokenizer, oracle = with_auto(folder_of(LLAMA3))
    for text in [
        *TEXTS,
        "<|begin_of_text|><|eot_id|>",
        Path(json.__file__).read_text(encoding="utf-8"),
    ]:
        ids = oracle.encode(text, add_special_tokens=False)
        assert (
            tokenizer.encode(text) == [128000, *ids] and tokenizer.encode_continuation(text) == ids
        )
        assert tokenizer.decode(ids) == oracle.decode(ids) == text


@pytest.mark.parametrize("name", [NANO, LLAMA2, STORIES])
def test_sentencepiece_oracle(name):
    tokenizer, oracle = real(name), sentencepiece_of(name)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text, bos=False) == ids and tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == oracle.decode(ids)


def test_qwen_against_transformers(qwen):
    tokenizer, oracle = with_auto(qwen)
    texts = [
        *TEXTS,
        "e\u0301 u\u0308 \u1100\u1161",
        "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>",
    ]
    texts += [
        "<tool_call>{}</tool_call> <|im_end|>",
        Path(json.__file__).read_text(encoding="utf-8"),
    ]
    texts += [
        path.read_text(encoding="utf-8")[:20_000] for path in sorted((REAL / "text").rglob("*.txt"))
    ]
    for text in texts:
        expected = oracle.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text) == expected  # and no BOS
    chat = "<|im_start|>user\nHi<|im_end|>\n<tool_call>"
    assert encode_named(tokenizer, chat) == oracle.encode(chat, add_special_tokens=False)
    assert tokenizer.vocab_size == len(oracle) and tokenizer.bos_id is None
    # the first is added but not special
    assert tokenizer.decode([151657, 151644, 13048]) == "<tool_call>Hi"
    messages = [
        {"role": "user", "content": "Hi <|im_end|>"},
        {"role": "assistant", "content": "<tool_call>"},
    ]
    messages += [{"role": "user", "content": " \u4f60\n"}]
    for n in (1, 3):
        ids = generate.encode_chat(tokenizer, messages[:n])
        text = oracle.apply_chat_template(messages[:n], add_generation_prompt=True, tokenize=False)
        # the template's own
        assert tokenizer.decode_ids(ids) == text and ids.count(151645) == n + 1
        plain = [
            message | {"content": message["content"].replace("<|im_end|>", "")}
            for message in messages[:n]
        ]
        expected = oracle.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert generate.encode_chat(tokenizer, plain) == expected


@pytest.mark.parametrize("legacy", [False, True, None])
def test_llama2_and_mistral_against_transformers(legacy, tmp_path):
    """As a bare tokenizer.model with the settings of a Hugging Face folder, and as a
    tokenizer.json."""
    shutil.copy(folder_of(LLAMA2) / "tokenizer.model", tmp_path)
    special = {token.pop("id"): token for token in special_tokens("<unk>", "<s>", "</s>", first=0)}
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"unk_token": "<unk>", "added_tokens_decoder": special, "add_bos_token": True}
    if legacy is not None:
        settings["legacy"] = legacy
    tokenizer_of(tmp_path, tokenizer_config=settings, config={"model_type": "llama"})
    tokenizer, oracle = with_auto(tmp_path)
    oracle.save_pretrained(tmp_path / "json")
    from_json = load_tokenizer(tmp_path / "json")
    for text in [*TEXTS, " ", " Hello", "Hello", "a <s> b", "\u2581a", "a  b"]:
        ids = oracle.encode(text, split_special_tokens=True)
        assert from_json.encode(text) == ids
        assert from_json.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        if "  " not in text:  # transformers takes other merges of two spaces from a tokenizer.model
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    for each in (tokenizer, from_json):
        assert each.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2} and each.stop_ids == {2}
        assert (
            each.decode(each.encode("a")) + each.decode(each.encode_continuation(" b"), [1, 263])
            == "a b"
        )
        text = "<s>[INST] Hi [/INST] Hello </s><s>[INST] "
        assert encode_named(each, text) == oracle.encode(text, add_special_tokens=False)


ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
SPACED = [  # what puts a space before a text, and the same without it
    *(
        (METASPACE | {"prepend_scheme": x}, METASPACE | {"prepend_scheme": "never"})
        for x in ("first", "always")
    ),
    (in_turn({"type": "Prepend", "prepend": "▁"}, ESCAPE), ESCAPE),
    (BYTE_LEVEL | {"add_prefix_space": True}, BYTE_LEVEL),
]
# lacks some of the bytes
VOCAB = {word: i for i, word in enumerate([*GPT2_BYTES[:188], "12", "<|end|>"])}
UNIGRAM = [["<unk>", 0.0], ["<s>", 0.0], ["<|end|>", 0.0], *([c, -9.0] for c in "▁<>|/sendabht12.")]
MADE = [  # tokenizers whose library makes a control token of text: as a word, as the unknown token
    {"vocab": VOCAB, "pre_tokenizer": in_turn(SPLIT, UNSPLIT), "model": {"ignore_merges": True}},
    {"vocab": VOCAB, "model": {"unk_token": "<|end|>"}},
    {"model": {"type": "Unigram", "vocab": UNIGRAM, "unk_id": 0}, "pre_tokenizer": METASPACE},
]


@pytest.mark.parametrize("parts", MADE, ids=["word", "unknown", "unigram"])
def test_no_text_becomes_a_control_token_that_the_library_makes_of_it(parts, tmp_path):
    i = 2 if "Unigram" in str(parts) else VOCAB["<|end|>"]
    data = tokenizer_json(**parts, added=special_tokens("<|end|>", first=i))
    tokenizer = tokenizer_of(tmp_path, tokenizer=data)
    for text in ("<|end|>", "a.<|end|>", "a<|end|>b", "你"):
        assert i not in tokenizer.encode(text)
    letters = [j for c in "<|end|>" for j in tokenizer.encode_continuation(c)]
    assert tokenizer.encode("a.<|end|>")[-7:] == letters and encode_named(tokenizer, "<|end|>") == [
        i
    ]


@pytest.mark.parametrize("steps", SPACED, ids=["first", "always", "prepend", "bytes"])
def test_text_that_goes_on_gets_no_space(steps, tmp_path):
    base = json.loads(with_auto(NANO)[1].backend_tokenizer.to_str())
    base |= {
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "added_tokens": special_tokens("<|end|>", first=4096),
    }
    kinds = (
        "normalizer" if step["type"] in ("Sequence", "Replace") else "pre_tokenizer"
        for step in steps
    )
    files = [base | {kind: step} for kind, step in zip(kinds, steps, strict=True)]
    spaced, plain = (
        tokenizer_of(tmp_path / str(i), tokenizer=data) for i, data in enumerate(files)
    )
    for text in TEXTS:
        assert spaced.encode_continuation(text) == plain.encode(text)
    assert spaced.encode("the") != plain.encode("the")
    after = (plain if "first" in str(steps) else spaced).encode("the")
    assert encode_named(spaced, "the<|end|>the") == [*spaced.encode("the"), 4096, *after]


def test_a_tokenizer_model_with_added_tokens_is_as_transformers_has_it(tmp_path):
    shutil.copy(NANO / "tokenizer.model", tmp_path)
    names = ["<think>", "  ", "xx", "a<t", "<t>", "   ", " x", "e\u0301x", "<t>>", "<|end|>"]
    flags = itertools.cycle(
        [{}, *({flag: True} for flag in FLAGS[:3]), {"lstrip": True, "rstrip": True}]
    )
    added = {token.pop("id"): token | next(flags) for token in special_tokens(*names, first=4096)}
    for token in added.values():
        token["special"] = token["content"] == "<|end|>"
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "added_tokens_decoder": added}
    tokenizer_of(
        tmp_path, config={"model_type": "llama", "vocab_size": 4120}, tokenizer_config=settings
    )
    tokenizer, oracle = with_auto(tmp_path)
    oracle, rng = oracle.backend_tokenizer, random.Random(0)
    oracle.encode_special_tokens = True
    alphabet = [
        "the",
        "  ",
        " ",
        "\n",
        "\u00e9",
        *"< <t <t> <think> <|end|> <s> xx x a A ! .".split(" "),
    ]
    for text in [
        *TEXTS,
        *("".join(rng.choices(alphabet, k=rng.randrange(1, 9))) for _ in range(500)),
    ]:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, bos=False) == ids and tokenizer.decode(ids) == oracle.decode(
            ids
        )
    assert tokenizer.vocab_size == 4106 and tokenizer.stop_ids == {2, 4105}
    # the model has more ids
    assert tokenizer.decode([4105, *tokenizer.encode("Hello"), 4119]) == "Hello"
    for bad in (4120, -1):
        with pytest.raises(UserError, match=f"{bad} is outside"):
            tokenizer.decode([4, bad])


@pytest.mark.parametrize(
    "kind, rule", [("bpe", "identity"), ("bpe", "nmt_nfkc"), ("unigram", "nmt_nfkc")]
)
@pytest.mark.parametrize(
    "adds_space, removes_spaces", [(False, False), (True, True), (True, False)]
)
def test_sentencepiece_models_of_other_kinds(kind, rule, adds_space, removes_spaces, tmp_path):
    """Words that users defined are found in text, but for a control token's name."""
    file = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello there", "hello world"] * 9),
        model_writer=file,
        model_type=kind,
        normalization_rule_name=rule,
        add_dummy_prefix=adds_space,
        remove_extra_whitespaces=removes_spaces,
        user_defined_symbols=["<|im_end|>", "<think>"],
        bos_id=-1,
        byte_fallback=True,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(file.getvalue())
    sp = sentencepiece_of(tmp_path)
    end = sp.piece_to_id("<|im_end|>")
    added = {str(end): {"content": "<|im_end|>", "special": True}}
    tokenizer = tokenizer_of(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    for text in ("hello there", "  hello  world ", " ", "a<think>b", "\u00bd \ufb01\t\tx"):
        ids = sp.encode(text)
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == sp.decode(ids)
    assert end in sp.encode("<|im_end|>a") and end not in tokenizer.encode("hello<|im_end|> a")
    assert tokenizer.bos_id is None and tokenizer.stop_ids == {2, end}
    both = [*tokenizer.encode("hello"), *tokenizer.encode_continuation(" world")]
    assert both == tokenizer.encode("hello world")


def test_a_long_run_of_one_character(tmp_path):
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, ["  "]))
    assert len(tokenizer.encode(" " * 400_000, bos=False)) == 200_000


# ---- decoding


@pytest.mark.parametrize("name", [NANO, LLAMA2, LLAMA3, QWEN, STORIES])
def test_stream_decoder(name, request):
    """It gives what decoding at once gives, which is the text (of all but the stories' few
    pieces)."""
    tokenizer = load_tokenizer(request.getfixturevalue("qwen")) if name == QWEN else real(name)
    rng = random.Random(0)
    for text in [*TEXTS, "👩‍👩‍👧‍👦你好🧿" * 5]:
        ids, stream = tokenizer.encode(text), model_file.StreamDecoder(tokenizer)
        pieces = [stream.push(i) for i in ids]
        assert not any("\ufffd" in piece for piece in pieces) and stream.flush() == ""
        assert "".join(pieces) == tokenizer.decode(ids)
        assert name == STORIES or tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    words = range(259 if name in (NANO, LLAMA2, STORIES) else 0, tokenizer.vocab_size)  # no bytes
    for _ in range(200):
        ids = [i for i in rng.choices(words, k=20) if i not in tokenizer.special_tokens.values()]
        assert tokenizer.decode(ids) == tokenizer.decode_ids(ids)


def test_stream_gives_text_as_soon_as_it_is_final(tmp_path):
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, []))
    stream = model_file.StreamDecoder(tokenizer)
    assert [stream.push(i) for i in "a你b".encode()] == ["a", "", "", "你", "b"]
    assert [stream.push(i) for i in "👍".encode()[:3]] == [
        "",
        "",
        "",
    ] and stream.flush() == "\ufffd"
    nano = load_tokenizer(NANO)  # a text's first space is no part of it, that after a prompt is
    before, ids = nano.encode("the"), nano.encode_continuation(" world")
    stream = model_file.StreamDecoder(nano, before)
    assert "".join(map(stream.push, ids)) == nano.decode(ids, before) == " world"
    assert nano.decode(ids) == "world"


# ---- BOS, stop ids, added tokens


def bos_first(ids: list) -> dict:
    """A post-processor that puts <s> first, which has these ids."""
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    known = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"]}}
    parts = {"single": [bos, texts[0]], "pair": [bos, *texts], "special_tokens": known}
    return {"type": "TemplateProcessing"} | parts


def test_bos_is_added_as_the_files_say(tmp_path):
    steps, added = in_turn(BYTE_LEVEL, bos_first([256])), special_tokens("<s>", "<x>")
    plain, bosed = (tokenizer_json(added=added, post_processor=x) for x in (None, steps))
    for name, data, settings, expected in [
        ("plain", plain, {"bos_token": "<s>"}, [0]),
        ("template", bosed, {}, [256, 0]),
        ("off", bosed, {"add_bos_token": False}, [0]),
        ("null", bosed, {"add_bos_token": None, "bos_token": "<x>"}, [256, 0]),
        ("on", plain, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, [256, 0]),
    ]:
        tokenizer = tokenizer_of(tmp_path / name, tokenizer=data, tokenizer_config=settings)
        assert tokenizer.bos_id == 256 and tokenizer.encode("!") == expected, name
        assert tokenizer.encode("!", bos=False) == [0]
        assert encode_named(tokenizer, "<s>!") == [256, 0]  # never twice


MAP = {"bos_token": "<bos>", "eos_token": "<end>"}
MAPS = [  # tokenizer_config.json
    {key: {"content": name, "__type": "AddedToken"} for key, name in MAP.items()},
    MAP | {"eos_token": "<x>", "additional_special_tokens": ["<x>"]},
    MAP | {"extra_special_tokens": ["<x>"]},
    MAP | {"extra_special_tokens": {"image_token": "<x>"}},
]


@pytest.mark.parametrize("settings", MAPS)
def test_special_tokens_are_those_that_transformers_knows(settings, tmp_path):
    """They are in the vocabulary, and no list of added tokens has them, or not as special."""
    added = [token | {"special": False} for token in special_tokens("<x>", first=258)]
    words = {word: i for i, word in enumerate([*GPT2_BYTES, "<bos>", "<end>", "<x>"])}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    files = {"tokenizer": tokenizer_json(words, added=added), "tokenizer_config": settings}
    tokenizer_of(tmp_path, **files)
    tokenizer, oracle = with_auto(tmp_path)
    text = "a <bos><end> <x>"
    assert tokenizer.special_tokens == {name: words[name] for name in oracle.all_special_tokens}
    assert tokenizer.chat_variables == oracle.special_tokens_map
    assert encode_named(tokenizer, text, False) == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.stop_ids == {oracle.eos_token_id}
    assert not {*tokenizer.encode(text)} & {*tokenizer.special_tokens.values()}


def test_stop_ids_come_from_every_file(tmp_path):
    files = {"tokenizer": tokenizer_json(added=special_tokens("<end>", "<|eom_id|>", "<x>"))}
    files |= {"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [3, 4]}}
    files["tokenizer_config"] = {"eos_token": {"content": "<end>"}}
    assert tokenizer_of(tmp_path, **files).stop_ids == {3, 4, 7, 256, 257}
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    assert load_tokenizer(NANO).chat_variables == ends  # LlamaTokenizer's
    none = {"config": {"eos_token_id": None}, "generation_config": {}, "tokenizer_config": {}}
    assert tokenizer_of(tmp_path, **none).stop_ids == {257}


# ---- chat

# what the templates of models do: text between tokens, refusals, dates, a look into answers
TEMPLATES = {
    "Llama 2, Mistral": """{%- if messages[0].role == 'system' %}
        {%- set system = messages[0].content %}
        {%- set messages = messages[1:] %}{% endif %}{% for m in messages %}
        {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate!') }}
        {%- elif m.role == 'user' %}{{ bos_token + '[INST] ' }}
            {%- if system is defined and loop.last %}{{ system + '\n' }}{% endif %}
            {{- m.content + '[/INST]' }}
        {%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "Phi-3": "{% for m in messages %}"
    "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "Llama 3.1": """{{- bos_token }}
        {%- if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}
        {%- if tools is not none %}{{ raise_exception('tools') }}{% endif %}
        {{- '<|im_start|>Today: ' + date + '<|im_end|>' + messages | tojson(indent=2) }}
        {%- for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}
    {%- generation %}
    <|im_start|>{{ m['role'] }}:{{ m['content'] | trim }}<|im_end|>
    {% endgeneration %}
        {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}""",
}
TURNS = ("Hi, I'm  \u00fc", " Four. ", "\nwhy?\n", "<think>\nwell\n</think>\n\nSo.", "a b c \ue000")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["first", "always", "bytes"])
def test_chat_ids_are_those_of_transformers(name, kind, tmp_path):
    """Of a sentencepiece model that puts a space first, or after each token, and of a byte-level
    BPE."""
    names = (
        "[INST] [/INST] <|system|> <|user|> <|assistant|> <|end|> <|im_start|> <|im_end|>".split()
    )
    added = {token.pop("id"): token for token in special_tokens(*names, first=4096)}
    for i in (4098, 4099, 4100, 4101):
        added[i]["rstrip"] = True  # as Phi-3's
    for i in (4101, 4103):
        added[i]["lstrip"] = True  # as Phi-4's
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {
        "legacy": kind == "always",
        "added_tokens_decoder": added,
        "chat_template": TEMPLATES[name],
    }
    if kind == "bytes":
        names = special_tokens("<s>", "</s>", *names, first=256 + len(MERGES))
        names[-1]["lstrip"] = True
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
        tokenizer_of(tmp_path, tokenizer=tokenizer_json(merges=MERGES, added=names))
    else:
        shutil.copy(NANO / "tokenizer.model", tmp_path)
    tokenizer_of(tmp_path, tokenizer_config=settings, config={"model_type": "llama"})
    tokenizer, oracle = with_auto(tmp_path)
    for n, system in itertools.product((1, 3, 5), (None, "Be brief.")):
        chat = [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate(TURNS[:n])
        ]
        messages = ([{"role": "system", "content": system}] if system else []) + chat
        try:
            expected = oracle.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            with pytest.raises(UserError, match=f"chat template refuses this chat: {error}"):
                generate.encode_chat(tokenizer, messages)
        else:
            assert generate.encode_chat(tokenizer, messages) == expected


def test_no_message_becomes_a_control_token(tmp_path):
    """Names of one character, within one another, side by side, and characters that might be
    marks."""
    names = ["你", "你你", "<a>", "b<a>", "[<a>]", "\ue001"]
    settings = {"chat_template": "<a>{% for m in messages %}{{ m.content | trim }}你你{% endfor %}"}
    data = tokenizer_json(added=special_tokens(*names))
    tokenizer, rng = (
        tokenizer_of(tmp_path, tokenizer=data, tokenizer_config=settings),
        random.Random(0),
    )
    alphabet = [*names, *"<a>[]bx", " ", "\ue000", "\ue002", "\U000f0000"]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=8))
        ids = generate.encode_chat(tokenizer, [{"role": "user", "content": text}])
        assert ids == [258, *tokenizer.encode(text.strip()), 257]
    settings["chat_template"] = [
        {"name": "rag", "template": "a"},
        {"name": "default", "template": "b"},
    ]
    assert tokenizer_of(tmp_path, tokenizer_config=settings).chat_template == "b"
    settings["chat_template"] = "{{ ''.__class__.mro() }}"  # a template may not look into Python
    tokenizer = tokenizer_of(tmp_path, tokenizer_config=settings)
    with pytest.raises(UserError, match="unsafe"):
        generate.encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert tokenizer_of(tmp_path).chat_template == "file"


# ---- bad files

GOOD = json.dumps(tokenizer_json())
DAMAGED = [  # files
    {"tokenizer.json": "{}"},
    {"tokenizer.model": "version https://git-lfs.github.com/spec/v1\noid sha256:12\n"},
    {"tokenizer.model": "YWI= 0\nYWM= 2\n"},  # a rank is missing
    {"tokenizer.model": "YQ== 0\nYg== 1\n"},  # bytes are missing
    {"tokenizer.model": "YQ== 0\nYg==\n"},
    {
        "tokenizer.model": (NANO / "tokenizer.model")
        .read_bytes()[:30_000]
        .decode(errors="surrogateescape")
    },
    *({"tokenizer.json": tokenizer_json(model={"merges": merges})} for merges in (5, ["a b"])),
]
BAD_TOKENIZERS = [(files, ": not a valid tokenizer; download it again") for files in DAMAGED] + [
    ({"tokenizer.json": "[]"}, ": no JSON object; download it again"),
    *((files, "no tokenizer.json and no tokenizer.model") for files in ({}, {"vocab.json": "{}"})),
    (
        {"vocab.json": '{"a": 0}', "merges.txt": "a b"},
        "merges.txt without a tokenizer.json; write one with: python",
    ),
    ({"tokenizer.model": ""}, "tokenizer.model: an empty file; download it again"),
    ({"tokenizer.json": GOOD[:-9]}, "tokenizer.json: not valid JSON; download"),
    ({"tokenizer.json": "\udcff"}, "tokenizer.json: not valid JSON; download"),
    (
        {"tokenizer.json": GOOD, "tokenizer_config.json": "{"},
        "tokenizer_config.json: not valid JSON",
    ),
    (
        {"tokenizer.json": GOOD, "chat_template.jinja": "\udcff"},
        "chat_template.jinja: not UTF-8 text",
    ),
    (
        {"tokenizer.json": tokenizer_json(added=special_tokens("<x>", first=300))},
        "<x> cannot have the id 300",
    ),
    ({"tokenizer.json": GOOD, "config.json": '{"a":'}, "config.json: not valid JSON"),
]


@pytest.mark.parametrize("files, message", BAD_TOKENIZERS)
def test_bad_files_end_in_one_line(tmp_path, capfd, files, message):
    for name, contents in files.items():
        contents = contents if isinstance(contents, str) else json.dumps(contents)
        (tmp_path / name).write_text(contents, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert (
        message in str(error.value) and "\n" not in str(error.value) and not any(capfd.readouterr())
    )


# ------------------------------------------------------------------------------------------ kernels
# In triton's interpreter on the CPU (fp32 and fp16: tl.dot on bf16 is wrong there), in fp16 and
# bf16 on CUDA.


TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
NAN = float("nan")


def close(out, truth, dtype):
    """As close as sums in this dtype are."""
    assert error(out, truth) < TOLERANCE[dtype]


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def positions(*pos):
    return torch.tensor(pos, dtype=torch.int32, device=DEVICE)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What wrappers allocate is NaN (or -7), to show a forgotten element; a strip behind stays as
    it was."""
    strips, empty = [], torch.empty

    def poisoned(*sizes, dtype, device):
        poison = NAN if dtype.is_floating_point else -7
        count = torch.Size(sizes).numel()
        memory = empty(count + 4096, dtype=dtype, device=device).fill_(poison)
        strips.append(memory[count:])
        return memory[:count].view(sizes)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(
        torch, "empty_like", lambda x: poisoned(*x.shape, dtype=x.dtype, device=x.device)
    )
    yield
    for strip in strips:
        assert (strip.isnan() if strip.dtype.is_floating_point else strip == -7).all(), (
            "written past the end"
        )


poisoned = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def without_hopper(monkeypatch):
    """On such a GPU, too, the tests of this file are of kernels.py; extras/hopper.py has its
    own."""
    monkeypatch.setattr(generate, "import_hopper", lambda device: None)
    monkeypatch.setattr(kernels, "faster_attend_latents", None)
    monkeypatch.setattr(kernels, "faster_attend_channels", None)


# ---- codes of a token, queries of blocks, scores

APPENDED = [(2, 2, 64, 20, 10, 50, 2), (3, 1, 32, 16, 8, 40, 4), (2, 3, 96, 33, 7, 9, 4)]


def appended(B, Hkv, D, lead, width, S, bits, dtype):
    """Arguments of append: latents and values side by side, as wqkv gives them, and poisoned
    stores."""
    latent, v = randn(B, lead + 2 * width + Hkv * D, dtype=dtype).split(
        (lead + 2 * width, Hkv * D), 1
    )
    shapes = [((1, S, lead), torch.int8), ((1, S), torch.float32), ((1, S, width), torch.uint8)]
    shapes += [((S, Hkv, D * bits // 8), torch.uint8), ((S, Hkv), torch.float16)]
    stores = [torch.full((B, *shape), 77, dtype=kind, device=DEVICE) for shape, kind in shapes]
    return latent, v.unflatten(1, (Hkv, D)), positions(*[S - 1, 0, S // 2][:B]), *stores


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, APPENDED))
@poisoned
def test_kernel_append(dtype, sizes):
    """Codes and scales of the token at pos; all others stay as they are."""
    latent, v, pos, *stores = given = appended(*sizes, dtype)
    codes = *kernels.quantize_mixed(latent, sizes[3]), *kernels.quantize_spread(v, sizes[-1])
    each, truth = torch.arange(len(v), device=DEVICE), [x.clone() for x in stores]
    for store, x in zip((*(t[:, 0] for t in truth[:3]), *truth[3:]), codes, strict=True):
        store[each, pos.long()] = x
    kernels.launch_append(*given)
    for got, want in zip(stores, truth, strict=True):  # GPUs may round a half otherwise
        same = torch.isclose(got.float(), want.float(), rtol=1e-3).float().mean()
        assert same >= (1 if DEVICE == "cpu" else 0.995)


# B, n, Hkv, G, D, r*
PLACED = [(2, 5, 2, 3, 64, 20), (3, 1, 4, 1, 24, 33), (1, 70, 2, 4, 128, 128)]


def placed_queries(B, n, Hkv, G, D, r, dtype):
    """Arguments of block_queries."""
    angle, basis = 6 * randn(n, D // 2, seed=1), randn(Hkv * D, r, seed=2, dtype=dtype)
    return (
        randn(B, Hkv * G, D, dtype=dtype),
        angle.cos(),
        angle.sin(),
        basis,
        randn(Hkv * D, seed=3),
    )


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, PLACED))
@poisoned
def test_kernel_block_queries(dtype, sizes):
    given = placed_queries(*sizes, dtype)
    queries, _, offset = kernels.block_queries_reference(*given)
    for coded in (False, True):
        got, scale, got_offset = kernels.launch_block_queries(*given, coded)
        assert got.dtype == (torch.int8 if coded else dtype) and got_offset.dtype == torch.float32
        assert scale.numel() == coded * offset.numel()
        decoded = (got[0] * 254.0 + got[1]) * scale[..., None] if coded else got
        assert error(decoded, queries) < max(TOLERANCE[dtype], 1e-4 * coded)
        close(got_offset, offset, torch.float32)


def poison(x, dead):
    """x in its own strides, NaN where dead, a mask of its leading dims."""
    x = x.clone()
    x[dead] = NAN
    return x


def split_queries(x):
    """x [B, n, H, N, r] as launch_scores takes int8 codes, and their scales [B, n, H N]."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    high = (x / scale).round()
    codes = torch.stack((high, ((x / scale - high) * 254).round())).to(torch.int8)
    return codes, (scale[..., 0] / 254).flatten(2)


def live_tokens(B, S):
    """pos [B] of rows of unlike length, and which tokens are live [B, S]."""
    pos = positions(*[S - 1, S // 2, 0][:B])
    return pos, torch.arange(S, device=DEVICE) <= pos[:, None]


def scored_vectors(B, S, H, r, int8, live, dtype):
    """Vectors [B, H, S, r] as they are stored, their scale or None, NaN where dead; and what they
    stand for, in fp32."""
    x = randn(B, S, H, r, dtype=dtype)
    if not int8:
        return poison(x, ~live).transpose(1, 2), None, x.float().transpose(1, 2)
    codes, scale = kernels.quantize_int8(x)
    stored_scale = poison(scale[..., 0], ~live).transpose(1, 2)
    return codes.transpose(1, 2), stored_scale, (codes * scale).float().transpose(1, 2)


def check_scores(dtype, rule, int8, B, S, H, N, r, r_score):
    pos, live = live_tokens(B, S)
    vectors, vector_scale, decoded = scored_vectors(B, S, H, r, int8, live, dtype)
    queries = 2 * randn(B, H, N, r_score, seed=1, dtype=dtype)
    queries[..., 0, :] *= N == 1  # a query without a largest number
    logits = queries.float() @ decoded[..., :r_score].mT * 0.3  # [B, H, N, S]
    if rule == "each":
        truth = logits.masked_fill(~live[:, None, None], -torch.inf)
    elif N == 1:  # a single query's logits rank tokens as its weights do
        truth = logits[:, :, 0].masked_fill(~live[:, None], -torch.inf)
    else:
        truth = kernels.group_scores(logits, live)
    out = kernels.launch_scores(queries, vectors, vector_scale, pos, 0.3, rule)
    assert torch.equal(out > -torch.inf, truth > -torch.inf) and not out.isnan().any()
    close(out[out > -torch.inf], truth[truth > -torch.inf], dtype)


def check_block_scores(dtype, int8, B, S, H, N, r, r_score, block, run):
    """run: tokens that share an offset; 0: none is added."""
    pos, live = live_tokens(B, S)
    vectors, vector_scale, decoded = scored_vectors(B, S, H, r, int8, live, dtype)
    n = -(-S // block)
    queries = 2 * randn(B, n, H, N, r_score, seed=1, dtype=dtype)
    queries[..., 0, :] *= N == 1  # a query without a largest number
    of_token = queries[:, torch.arange(S, device=DEVICE) // block].float()  # [B, S, H, N, r*]
    logits = torch.einsum("bshnr,bhsr->bhns", of_token, decoded[..., :r_score])
    offset = None
    if run:
        offset = randn(B, -(-S // run), H * N, seed=2)
        # logits that rise and rise
        offset += torch.linspace(0, 100, offset.shape[1], device=DEVICE)[:, None]
        of_token = offset[:, torch.arange(S, device=DEVICE) // run]  # [B, S, H N]
        logits = logits + of_token.unflatten(2, (H, N)).permute(0, 2, 3, 1)
    weights = (logits * 0.3).masked_fill(~live[:, None, None], -torch.inf).softmax(-1)
    truth = weights.sum(2).masked_fill(~live[:, None], -torch.inf)
    if dtype == torch.float32:
        reference = kernels.block_scores_reference(
            queries, vectors, vector_scale, pos, 0.3, block, offset, run or 1
        )
        close(reference[truth > -torch.inf], truth[truth > -torch.inf], dtype)
    given = [(queries, None)]
    if int8 and kernels.takes_codes(queries, r_score):
        given.append(split_queries(queries))
    for queries, query_scale in given:
        out = kernels.launch_block_scores(
            queries, vectors, vector_scale, pos, 0.3, block, offset, run or 1, query_scale
        )
        assert torch.equal(out > -torch.inf, truth > -torch.inf) and not out.isnan().any()
        if DEVICE == "cuda":  # weights are kept in e5m2: two bits of fraction
            torch.testing.assert_close(out, truth, rtol=1 / 8 + TOLERANCE[dtype], atol=1e-6)
        else:
            close(out[out > -torch.inf], truth[truth > -torch.inf], dtype)


RULES = ["each", "largest"]
SCORES_SIZES = [  # B, S, H, N, r, r_score, tiles: so many programs, 0: as it is
    (1, 70, 1, 4, 32, 16, 0),
    (3, 130, 2, 1, 48, 20, 0),
    (2, 90, 3, 6, 64, 64, 0),
    (2, 200, 1, 3, 40, 33, 0),
    (3, 97, 1, 32, 530, 520, 0),
    (1, 129, 1, 8, 9, 5, 0),
    (2, 220, 1, 4, 40, 32, 6),
]
BLOCK_SCORES_SIZES = [  # B, S, H, N, r, r_score, block, run, tiles
    (3, 130, 2, 1, 48, 20, 48, 0, 0),
    (2, 200, 1, 3, 40, 33, 48, 0, 0),
    (3, 97, 1, 32, 530, 520, 512, 0, 0),
    (1, 129, 1, 8, 9, 5, 48, 0, 0),
    (2, 130, 2, 3, 40, 32, 48, 1, 0),
    (2, 130, 2, 3, 40, 32, 48, 16, 0),
    (2, 220, 1, 4, 40, 32, 48, 0, 6),
    (2, 220, 1, 4, 40, 32, 48, 0, 24),  # a block for each
]


def use_small_tiles(monkeypatch, programs):
    """Makes kernels that score take tiles of 16 tokens, and so many programs."""
    config = kernels.ScoresConfig(tokens=16, ranks=32, warps=4, stages=2, programs=programs)
    monkeypatch.setattr(kernels, "scores_config", lambda *_: config)


@pytest.mark.parametrize(
    "dtype, rule, int8, sizes", pairwise(DTYPES, RULES, [False, True], SCORES_SIZES)
)
@poisoned
def test_kernel_scores(dtype, rule, int8, sizes, monkeypatch):
    """Both rules, over vectors of 16 bits, fp32 and int8, of one tile a program and of several."""
    *sizes, programs = sizes
    if programs:
        use_small_tiles(monkeypatch, programs)
    check_scores(dtype, rule, int8, *sizes)


@pytest.mark.parametrize("dtype, int8, sizes", pairwise(DTYPES, [False, True], BLOCK_SCORES_SIZES))
@poisoned
def test_kernel_block_scores(dtype, int8, sizes, monkeypatch):
    """A query for each block, over vectors of 16 bits, fp32 and int8, with an offset for runs of
    tokens and without, of one tile a program and of several."""
    *sizes, programs = sizes
    if programs:
        use_small_tiles(monkeypatch, programs)
    check_block_scores(dtype, int8, *sizes)


@pytest.mark.skipif(DEVICE == "cpu", reason="4 GB of rows")
def test_kernel_scores_beyond_two_to_the_31_numbers():
    B, S, r = 2, 1 << 20, 2048
    rows = torch.zeros(B, 1, S, r, dtype=torch.int8, device=DEVICE)
    rows[1, :, -4096:] = 1
    scale, queries = torch.ones(B, 1, S, device=DEVICE), torch.ones(B, 1, 1, 64, device=DEVICE)
    out = kernels.launch_scores(queries, rows, scale, positions(S - 1, S - 1), 1.0, "each")
    assert out.sum((1, 2)).tolist() == [0, 4096 * 64]


# ---- select


MOST = torch.finfo(torch.float32).max
LEVELS = torch.tensor([torch.inf, MOST, 1e-45, 0.0, -0.0, -1e-45, -MOST, -torch.inf], device=DEVICE)


def in_chunk(x):
    """The places of a chunk, or two, of the first kernel."""
    return torch.arange(x.shape[1], device=DEVICE) // 4 % 8 == 0


SCORES = {  # of normal numbers [B, S]
    "normal": lambda x: x,
    "ties": lambda x: (x * 2).round(),
    "equal": torch.ones_like,
    "heavy": lambda x: (x * 8).exp(),
    "offset": lambda x: x + 500,
    # more than can be spared
    "masked": lambda x: x.masked_fill(randn(*x.shape, seed=1) < 0.5, -torch.inf),
    "NaN": lambda x: x.masked_fill(x > 2, torch.nan).masked_fill(x < -2, torch.nan).copysign(x),
    "extremes": lambda x: LEVELS[(x.abs() * 2.5).long().clamp(max=7)],
    "one chunk": lambda x: x + 50 * in_chunk(x),  # has all winners: the slow path must save it
    # The same, and what that chunk drops is next above the threshold.
    "near ties": lambda x: 1 + torch.where(in_chunk(x), 3 + (x > 2), 1 + (x > 1.3)) * 2.0**-23,
    "huge": lambda x: torch.where(x > 0, 3e38, -3e38),
}
SHORT_ROWS = [  # S, x, y, z, pos: in one program
    (257, 4, 33, 8, (256, 100, 17)),
    (300, 0, 1, 1, (299, 1, 0)),
    (4096, 16, 432, 64, (4095, 300)),
    (40, 3, 64, 5, (39, 20, 6)),
]
CHUNKED = (5000, 4, 600, 16, (4999, 700))  # in several
SELECTED = [
    *((kind, *row) for kind in SCORES for row in (*SHORT_ROWS, CHUNKED)),
    *((kind, 5000, 4, 4000, 16, (4999,)) for kind in ("normal", "extremes", "near ties")),
    *((kind, 8193, 4, 256, 16, (8192, 7)) for kind in ("ties", "one chunk", "near ties")),
    *((kind, 10000, 4, 2000, 8, (9999,)) for kind in ("equal", "masked", "offset")),
    ("normal", 65536, 4, 16384, 64, (65535,)),  # the widest tile of survivors that a program takes
]
WANTED = [(257, 4, 33, 8, (256, 128, 51)), (5000, 4, 600, 16, (4999, 2500, 1000))]  # not all of y
WANTED += [(10000, 4, 2000, 8, (9999, 5000, 2000))]
# shares of y
SELECTED += [(kind, *row, (0.3, 0.0, 1.5)) for kind in ("ties", "masked") for row in WANTED]


@pytest.mark.parametrize("case", SELECTED)
@poisoned
def test_kernel_select(case):
    check_select(*case)


def test_kernel_select_chunks_keep_enough_of_every_row():
    lengths = (4096, 4097, 8192, 8193, 30000, 131072, 1 << 20)
    for S, y in itertools.product(lengths, (1, 16, 432, 1968, 4096, 16384, 32768)):
        plan = kernels.select_chunks(S, min(y, S))
        if plan:
            chunks, N, least, most = plan
            assert chunks * N >= S and chunks * least >= min(y, S) and least <= most < N
            assert max(N, chunks * most) <= 32768 and all(
                n & (n - 1) == 0 for n in (chunks, N, most)
            )
        else:
            assert S <= 4096 or y > min(S // 16, 16384)


def test_tiles_a_program_fill_its_last_wave():
    """Of (tiles, rows, programs at a time): one each where all run at once, else the shortest
    waves."""
    known = {(10, 1, 100): 1, (64, 4, 16): 16, (65, 4, 16): 17, (39, 8, 264): 2, (9, 3, 2): 5}
    assert {sizes: kernels.tiles_a_program(*sizes) for sizes in known} == known


@pytest.mark.parametrize(
    "S, y, to_topk", [(8193, 4, False), (8193, 8000, True), (8192, 8000, False)]
)
@pytest.mark.parametrize("wanted", [None, 3])
def test_kernel_select_leaves_long_rows_to_topk(S, y, to_topk, wanted, monkeypatch):
    """In several passes over the row the kernel would take longer."""
    calls, launch = [], kernels.launch_select
    monkeypatch.setattr(kernels, "launch_select", lambda *x: calls.append(x) or launch(*x))
    scores, pos, wanted = randn(1, S), positions(S - 1), wanted and positions(wanted)
    index = kernels.select(scores, pos, (4, y, 16), wanted, kernel=True)
    assert bool(calls) == (not to_topk)
    truth = kernels.select_reference(scores, pos, 4, y, 16, wanted)
    assert set(index[0].tolist()) == set(truth[0].tolist())


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter counts the steps")
@pytest.mark.parametrize("kind, most", [("normal", 24), ("offset", 16), ("ties", 32), ("huge", 32)])
@pytest.mark.parametrize("sign", [1, -1])
def test_kernel_select_guesses_inside_its_bracket_and_soon_ends(kind, most, sign, monkeypatch):
    guesses, steps, S = kernels._guesses, [], 1000

    def counted(lo, hi, *counts):
        left, right = guesses(lo, hi, *counts)
        assert (lo < left) & (left <= right) & (right < hi)
        steps.append(None)
        return left, right

    monkeypatch.setattr(kernels, "_guesses", counted)
    scores = SCORES[kind](randn(1, S)) * sign
    for y in (1, 100, 499, 501, 999, S):  # the last takes all
        steps.clear()
        kernels.launch_select(scores, positions(S - 1), 0, y, 0)
        assert len(steps) <= most * (y < S)


def check_select(kind, S, x, y, z, pos, shares=None):
    pos = positions(*pos)
    scores = SCORES[kind](randn(len(pos), S))
    scores[torch.arange(S, device=DEVICE) > pos[:, None]] = NAN
    wanted = shares and positions(*(int(share * y) for share in shares))
    out = kernels.launch_select(scores, pos, x, y, z, wanted)
    truth = kernels.select_reference(scores, pos, x, y, z, wanted)
    for b in range(len(pos)):
        got, want = (index[b][index[b] >= 0].long() for index in (out, truth))
        assert (out[b] >= -1).all() and len(got) == len(got.unique()) == len(want)
        assert (got <= pos[b] - z).all() and torch.equal(out[b, :x], truth[b, :x])
        got, want = (scores[b, index].sort().values for index in (got, want))
        assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True)  # a sink's may be NaN
    if DEVICE == "cuda":  # the interpreter has no order of programs
        assert torch.equal(out, kernels.launch_select(scores, pos, x, y, z, wanted))


# ---- attend

JOINT_LATENTS = ["joint latents", "joint mixed latents"]
LATENT_FORMS = ["latents", *JOINT_LATENTS]
FORMATS = ["plain", *LATENT_FORMS, "channels"]


def stored_keys(form, dtype, read, D, r=24, bits=4):
    """Random stores of a format of keys, NaN where a KV head does not read a token (read
    [B, Hkv, S]); and the keys [B, Hkv, S, D] that they hold, in fp32.

    plain     k
    latents   latent, its scale, its 4-bit dims, basis, its scale, bias, rope;
              "joint": of all heads; "mixed": in codes, else in 16 bits
    channels  codes, (minimum, scale)"""
    B, Hkv, S = read.shape
    k = randn(B, S, Hkv, D, seed=1, dtype=dtype).transpose(1, 2)
    if form == "plain":
        return [poison(k, ~read)], k.float()

    if form == "channels":
        padding = -S % 32
        codes, pairs = quantize(F.pad(k.contiguous(), (0, 0, 0, padding)), bits, 32, -2)
        truth = compress.dequantize(codes, pairs, bits, 32, dtype, -2)[:, :, :S].float()
        is_read = F.pad(read, (0, padding)).unflatten(2, (-1, 32)).any(3)
        return [codes, poison(pairs, ~is_read)], truth

    is_joint = "joint" in form
    cos, sin = rope_tables(tiny_config(head_dim=D), S, torch.device(DEVICE))
    latent = randn(B, 1 if is_joint else Hkv, S, r, dtype=dtype)
    basis = r**-0.5 * randn(Hkv * D, r, seed=2, dtype=dtype)
    bias = randn(Hkv * D, 1, seed=3)
    dead = ~read.any(1, keepdim=True) if is_joint else ~read  # those of all heads, as SALS has them
    if "mixed" in form:
        codes, scale, int4_dims = kernels.quantize_mixed(latent, int8_dims_of(r))
        decoded = kernels.dequantize_mixed(codes, scale, int4_dims)
        basis_codes, basis_scale = compress.quantize_basis(basis.unflatten(0, (Hkv, -1)))
        decoded_basis = basis_codes * basis_scale
        flat_scale = basis_scale.flatten(0, 1)
        stores = [codes, poison(scale, dead), int4_dims]
        for_heads = [basis_codes.flatten(0, 1), flat_scale, bias / flat_scale]
    else:
        decoded = latent
        decoded_basis = basis.unflatten(0, (Hkv, D))
        stores = [poison(latent, dead), None, None]
        for_heads = [basis, None, bias]
    stores = [x if x is None else x.expand(B, Hkv, *x.shape[2:]) for x in stores]
    for_heads = [x if x is None else kernels.interleave_rope(x, Hkv) for x in for_heads]
    k = (decoded.float() @ decoded_basis.float().mT) + bias.view(Hkv, 1, D)
    truth = apply_rope(k.transpose(1, 2), cos, sin).transpose(1, 2)
    return [*stores, *for_heads, kernels.rope_pairs(cos, sin, dtype)], truth


def int8_dims_of(r):
    """How many dims of a mixed latent are in int8; of large r parts that extras/hopper.py takes."""
    if r % 512 == 0:
        return r // 4
    pairs_of_chunks = (r // 128 - 1) // 2  # of two times 128 dims in 4 bits
    if pairs_of_chunks > 0:
        return r - 256 * pairs_of_chunks
    return r // 3 + (r - r // 3) % 2


def stored_values(form, dtype, read, DV, bits):
    """The same of values: plain ones, codes in groups, or with one scale a vector beside latents in
    codes. They lie by token, beside channels by head."""
    B, Hkv, S = read.shape
    v = randn(B, S, Hkv, DV, seed=6, dtype=dtype)
    if form == "channels":
        v = v.transpose(1, 2).contiguous()
    if bits == 16:
        parts, truth = [v], v.float()
    elif form == "plain" or "mixed" not in form and "latents" in form or form == "channels":
        group = min(32, DV)
        parts = [*quantize(v, bits, group)]
        truth = compress.dequantize(*parts, bits, group, dtype).float()
    else:
        codes, scale, truth = spread(v, bits)
        parts = [codes, scale]
    if form != "channels":
        parts = [x.transpose(1, 2) for x in parts]
        truth = truth.transpose(1, 2)
    return [*parts[:-1], poison(parts[-1], ~read)], truth


def chosen_tokens(sets, n, B, S, pos):
    """For each set n places, some of none (-1), of distinct tokens up to pos; which tokens
    [B, sets, S]."""
    later = torch.arange(S, device=DEVICE) > pos.view(-1, *[1] * len(sets), 1)
    best, index = randn(B, *sets, S, seed=5).masked_fill(later, -torch.inf).topk(min(n, S))
    index = index.where(best > -torch.inf, -1).int()
    index[..., 2::7] = -1
    if not sets:
        index = F.pad(index, (3, 0))[:, 3:]  # rows that lie apart
    member = torch.zeros(B, *sets, S + 1, dtype=torch.bool, device=DEVICE)
    return index, member.scatter(-1, index.long().where(index >= 0, S), True)[..., :S]


def attend_case(
    dtype, form, tokens, B, S, Hkv, G, D, DV, bits, z, pos, n=40, r=24, rise=None, written=False
):
    """Arguments of `launch_attend`, with NaN in every slot that it must not read, or if `written`
    only where there is no token; and what it gives, in fp32.

    tokens: "all", or who has a set of its own in the index: "row", "KV head" or "query head". z:
    exact slots. rise: from the first to the last of them keys are their query times factors from
    rise[0] to rise[1]."""
    pos = positions(*pos)
    Hq = Hkv * G
    places = torch.arange(S, device=DEVICE)
    # 1. Which tokens are attended, live [B, Hq, S], and so read by a KV head.
    index = None
    if tokens == "all":
        live = (places <= pos[:, None] - z)[:, None].expand(-1, Hq, -1)
    else:
        sets = {"row": (), "KV head": (Hkv,), "query head": (Hq,)}[tokens]
        index, member = chosen_tokens(sets, n, B, S, pos)
        queries_of_set = Hq // max(1, *sets, 1)
        live = member.reshape(B, -1, S).repeat_interleave(queries_of_set, 1)
    read = live.unflatten(1, (Hkv, G)).any(2)
    if written:
        read = (places <= pos[:, None])[:, None].expand(-1, Hkv, -1)
    # 2. What is stored.
    q = randn(B, Hq, D, dtype=dtype)
    keys, k = stored_keys(form, dtype, read, D, r, 2 if bits == 2 else 4)
    values, v = stored_values(form, dtype, read, DV, bits)
    exact = []
    if z:
        exact_k = randn(B, z, Hkv, D, seed=7, dtype=dtype)
        exact_v = randn(B, z, Hkv, DV, seed=7, dtype=dtype)
        if rise:
            factors = torch.linspace(*rise, z, device=DEVICE)[:, None, None]
            exact_k = (q[:, None, ::G].float() * factors).to(dtype)
        is_filled = torch.arange(z, device=DEVICE) <= pos[:, None]
        k = torch.cat((k, exact_k.transpose(1, 2).float()), 2)
        v = torch.cat((v, exact_v.transpose(1, 2).float()), 2)
        live = torch.cat((live, is_filled[:, None].expand(-1, Hq, -1)), 2)
        exact = [poison(exact_k, ~is_filled), poison(exact_v, ~is_filled)]
    # 3. What attention gives.
    k = k.repeat_interleave(G, 1)
    v = v.repeat_interleave(G, 1)
    logits = torch.einsum("bhd,bhnd->bhn", q.float(), k) * D**-0.5
    weights = logits.masked_fill(~live, -torch.inf).softmax(-1)
    truth = torch.einsum("bhn,bhnd->bhd", weights, v)
    kind = form.split()[-1]
    return (q, kind, keys, values, bits, pos, index, exact, D**-0.5), truth


def launch_attend(q, kind, keys, values, bits, pos, index, exact, scale):
    """The operation for a kind of keys, on what attend_case makes."""
    v, v_scale = [*values, None][:2]
    if kind == "plain":
        return kernels.launch_attend_plain(q, keys[0], v, pos, index, exact, scale)
    if kind == "channels":
        assert index is None
        return kernels.launch_attend_channels(q, *keys, v, v_scale, bits, pos, exact, scale)
    return kernels.launch_attend_latents(q, *keys, v, v_scale, bits, pos, index, exact, scale)


def check_attend(dtype, *case, **options):
    given, truth = attend_case(dtype, *case, **options)
    close(launch_attend(*given), truth, dtype)


ATTEND_SIZES = [  # B, S, Hkv, G, D, DV, bits, z, pos
    (1, 70, 2, 1, 64, 40, 16, 0, (69,)),
    (3, 130, 2, 4, 128, 128, 4, 24, (129, 64, 3)),
    (2, 300, 1, 3, 96, 96, 2, 0, (299, 32)),
    (1, 90, 1, 8, 256, 64, 4, 7, (80,)),
    (3, 150, 2, 1, 128, 128, 2, 70, (149, 60, 0)),
    (2, 90, 1, 20, 16, 16, 4, 0, (89, 31)),
    (2, 90, 3, 2, 96, 96, 2, 5, (89, 0)),
    (2, 90, 2, 2, 64, 64, 16, 24, (80, 40)),
]
PLAIN_SIZES = [(*sizes[:6], 16, *sizes[7:]) for sizes in ATTEND_SIZES]
CODED_SIZES = [sizes for sizes in ATTEND_SIZES if sizes[6] < 16]
INDEXES = ["all", "row", "KV head", "query head"]


@pytest.mark.parametrize("dtype, tokens, sizes", pairwise(DTYPES, INDEXES, PLAIN_SIZES))
@poisoned
def test_kernel_attend_plain(dtype, tokens, sizes):
    """Every kind of index, with exact tokens and without."""
    check_attend(dtype, "plain", tokens, *sizes)


@pytest.mark.parametrize(
    "dtype, form, tokens, sizes", pairwise(DTYPES, LATENT_FORMS, INDEXES, ATTEND_SIZES)
)
@poisoned
def test_kernel_attend_latents(dtype, form, tokens, sizes):
    """Latents in codes and in 16 bits, of all heads and of each, values of every form, every kind
    of index, with exact tokens and without."""
    check_attend(dtype, form, tokens, *sizes)


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, CODED_SIZES))
@poisoned
def test_kernel_attend_channels(dtype, sizes):
    """Keys and values of 2 and of 4 bits, with exact tokens and without."""
    check_attend(dtype, "channels", "all", *sizes)


@pytest.mark.parametrize("tokens", ["all", "KV head"])
def test_kernel_attend_plain_reads_e4m3(tokens):
    """Numbers in e4m3 with a scale of each head, against their decoded numbers."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    dtype = DTYPES[1]
    (q, _, (k,), (v,), _, pos, index, exact, scale), _ = attend_case(
        dtype, "plain", tokens, 2, 90, 2, 2, 64, 64, 16, 24, (89, 40), written=True
    )
    k, v = k.nan_to_num(), v.nan_to_num()
    k_scale = torch.tensor([[0.5, 0.02], [0.1, 0.03]], device=DEVICE)
    v_scale = torch.tensor([[0.04, 0.3], [0.2, 0.01]], device=DEVICE)
    k_codes = (k.float() / k_scale[..., None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    v_codes = (v.float() / v_scale[..., None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    k = (k_codes.float() * k_scale[..., None, None]).to(dtype)
    v = (v_codes.float() * v_scale[..., None, None]).to(dtype)
    given = pos, index, exact, scale
    truth = kernels.launch_attend_plain(q, k, v, *given)
    out = kernels.launch_attend_plain(q, k_codes, v_codes, *given, k_scale, v_scale)
    assert error(out, truth) < 10 * TOLERANCE[dtype]


# KV heads, D, tokens a tile, ranks a product, splits.
TILES = [(2, 96, 16, 64, 1), (2, 128, 64, 32, 3), (1, 64, 32, 16, 5), (1, 160, 16, 64, 20)]
TILED = [*pairwise(FORMATS, ["all", "query head"], TILES), ("plain", "all", (1, 64, 32, 16, 70))]


@pytest.mark.parametrize("form, tokens, sizes", TILED)
@poisoned
def test_kernel_attend_tiles(monkeypatch, form, tokens, sizes):
    """The basis at once and in steps; empty splits, and more than a merge takes at once."""
    Hkv, D, tile, ranks, splits = sizes
    if form == "channels":
        tile = max(32, tile)  # whole groups of 32 tokens
        tokens = "all"
    if "mixed" in form:
        ranks = max(64, ranks)
    latents_config = kernels.latents_config

    def small_config(dtype, R8, N4, *more):
        config = latents_config(dtype, R8, N4, *more)
        is_held = ranks >= R8 + 2 * N4
        RB = kernels.power2(R8, 32) if is_held else ranks
        return config._replace(RB=RB, HELD=is_held, T=tile, STAGES=2)

    monkeypatch.setattr(kernels, "latents_config", small_config)
    monkeypatch.setattr(kernels, "plain_config", lambda *_: (tile, 2))
    monkeypatch.setattr(kernels, "channels_config", lambda *_: (tile, 4, 2, 1))
    monkeypatch.setattr(kernels, "attend_splits", lambda *_: splits)
    bits = 16 if form == "plain" else 4
    sizes = (2, 310, Hkv, 2, D, D, bits, 100, (309, 120))
    check_attend(torch.float16, form, tokens, *sizes, n=130, r=57)


RISES = [(-3, 3), (3, -3), (-40, -40)]


@pytest.mark.parametrize("G, rise", [(1, RISES[0]), (4, RISES[1]), (4, RISES[2])])
@poisoned
def test_kernel_attend_latents_beside_several_tiles_of_exact_tokens(G, rise):
    """Logits that rise from slot to slot, that fall, and all far below those of slots still
    empty."""
    case = ("joint latents", "row", 3, 200, 2, G, 64, 64, 4, 100, (199, 120, 30))
    check_attend(torch.float16, *case, rise=rise)


LATENT_ROWS = [  # tokens, B, S, Hkv, G, bits, z, n, r
    ("row", 16, 1000, 32, 1, 2, 64, 448, 512),
    ("row", 4, 5000, 32, 1, 4, 64, 4032, 512),
    ("row", 8, 3000, 8, 4, 4, 80, 1984, 256),
    ("all", 1, 3000, 8, 4, 4, 64, 0, 256),
]
REAL_SIZES = [(form, *row) for form in JOINT_LATENTS for row in LATENT_ROWS]
REAL_SIZES += [("channels", "all", 4, 3000, 8, G, 4, 128, 0, 0) for G in (1, 4)]
REAL_SIZES += [("plain", tokens, 4, 3000, 8, 4, 16, 0, 448, 0) for tokens in ("all", "KV head")]


@pytest.mark.skipif(DEVICE == "cpu", reason="the sizes of real models")
@pytest.mark.parametrize("form, tokens, B, S, Hkv, G, bits, z, n, r", REAL_SIZES)
@poisoned
def test_kernel_attend_real_sizes(form, tokens, B, S, Hkv, G, bits, z, n, r):
    pos = [S - 1 - 7 * b for b in range(B)]
    check_attend(torch.bfloat16, form, tokens, B, S, Hkv, G, 128, 128, bits, z, pos, n=n, r=r)


LOGITS_SIZES = [  # B, S, Hkv, G, DV, pos
    (1, 70, 2, 1, 37, (69,)),
    (3, 300, 1, 8, 64, (299, 5, 0)),
    (2, 130, 2, 5, 200, (400, 64)),
    (2, 90, 3, 3, 20, (88, 31)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, S, Hkv, G, DV, pos", LOGITS_SIZES)
@poisoned
def test_kernel_attend_logits(dtype, B, S, Hkv, G, DV, pos):
    """A row whose pos lies beyond S attends all S."""
    pos = positions(*pos)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    logits = 3 * randn(B, G, Hkv, S + 5).transpose(1, 2)[..., :S]
    v = randn(B, S, Hkv, DV, dtype=dtype).transpose(1, 2)
    weights = logits.masked_fill(later[:, None, None], -torch.inf).softmax(-1)
    truth = (weights @ v.float()).flatten(1, 2)
    logits = logits.masked_fill(later[:, None, None], NAN)
    v = poison(v, later[:, None].expand(-1, Hkv, -1))
    close(kernels.attend_logits(logits, v, pos, kernel=True), truth, dtype)


@pytest.mark.parametrize("dtype, G, sizes", pairwise(DTYPES, [1, 3], CODED_SIZES[:5]))
@poisoned
def test_kernel_attend_logits_of_an_index_beside_exact_tokens(dtype, G, sizes):
    """Values in codes, as extras/hopper.py has it for SALS: its logits are given here, in the order
    of the index."""
    B, S, Hkv, _, D, _, bits, z, pos = sizes
    form = "joint mixed latents"
    case = (dtype, form, "row", B, S, Hkv, G, D, D, bits, z, pos)
    (q, _, _, values, _, pos, index, exact, scale), truth = attend_case(*case)
    every = torch.ones(B, Hkv, S, dtype=torch.bool, device=DEVICE)
    _, k = stored_keys(form, dtype, every, D)
    logits = torch.einsum("bhgd,bhsd->bhgs", q.unflatten(1, (Hkv, G)).float(), k)
    at = index.clamp(min=0).long()[:, None, None].expand(-1, Hkv, G, -1)
    logits = logits.gather(3, at).masked_fill(index[:, None, None] < 0, NAN)
    out = kernels.launch_attend_logits(q, logits, *values, bits, pos, index, exact, scale)
    close(out, truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, S, Hq, W, DV, pos, wide",
    [
        (1, 70, 4, 48, 32, (69,), False),
        (3, 130, 20, 100, 60, (129, 64, 0), False),
        (2, 300, 8, 36, 36, (299, 31), False),
        (1, 40, 3, 600, 520, (31,), True),
        (3, 40, 8, 1024, 768, (39, 15, 0), True),
        (1, 500, 8, 256, 192, (497,), False),
        (1, 500, 4, 24, 16, (497,), False),
    ],
)
@poisoned
def test_kernel_attend_shared_latent(monkeypatch, dtype, B, S, Hq, W, DV, pos, wide):
    """In one kernel, whose programs have several tiles; and latents too wide for it, by their
    logits."""
    monkeypatch.setattr(kernels, "attend_splits", lambda *_, **__: 1 if S == 500 else 3)
    calls = []
    launch_scores = kernels.launch_scores

    def counted_scores(*given):
        calls.append(given)
        return launch_scores(*given)

    monkeypatch.setattr(kernels, "launch_scores", counted_scores)
    pos = positions(*pos)
    q = randn(B, Hq, W, dtype=dtype)
    latents = randn(B, S, W, seed=1, dtype=dtype)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    logits = (q.float() @ latents.float().mT * W**-0.5).masked_fill(later[:, None], -torch.inf)
    truth = logits.softmax(-1) @ latents[..., :DV].float()
    latents = poison(latents, later)
    out = kernels.attend_shared_latent(q, latents, pos, DV, scale=W**-0.5, kernel=True)
    close(out, truth, dtype)
    assert bool(calls) == wide


RAGGED_SIZES = [  # d_qk of each head, then d_v; B, S, G, pos
    ([32, 32, 32, 32], 1, 70, 1, (69,)),
    ([16, 96, 48, 64, 80, 16], 3, 300, 2, (299, 0, 64)),
    ([16, 96, 48, 64, 80, 16], 5, 90, 1, (1, 89, 63, 3, 0)),
    ([40, 24, 8, 96], 2, 130, 8, (127, 128)),
    ([16 * (1 + h % 6) for h in range(20)], 2, 150, 1, (149, 40)),
    ([256, 16, 16, 200], 3, 75, 4, (3, 74, 40)),
    ([88, 112, 24, 72], 1, 33, 3, (31,)),
    ([16, 24], 1, 8400, 1, (8399,)),  # more parts than a merge takes at once
]


@pytest.mark.parametrize(
    "dtype, balanced, sms, sizes", pairwise(DTYPES, [True, False], [1, 3, 40], RAGGED_SIZES)
)
@poisoned
def test_kernel_attend_ragged(monkeypatch, dtype, balanced, sms, sizes):
    """Against each head on its own, in the packed buffer and of the queries at its own rank, cut
    for few programs and for many."""
    ranks, B, S, G, pos = sizes
    monkeypatch.setattr(kernels, "SMS", sms)
    Hkv = len(ranks) // 2
    pos = positions(*pos)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    parts = [randn(B, S, rank, seed=i, dtype=dtype) for i, rank in enumerate(ranks)]
    q = randn(B, Hkv, G, max(ranks[:Hkv]), dtype=dtype)
    truth = []
    for h, rank in enumerate(ranks[:Hkv]):
        logits = q[:, h, :, :rank].float() @ parts[h].float().mT * 0.2
        weights = logits.masked_fill(later[:, None], -torch.inf).softmax(-1)
        truth.append((weights @ parts[Hkv + h].float()).flatten(1))
        q[:, h, :, rank:] = NAN
    packed = torch.cat([poison(part, later).flatten() for part in parts])
    table = kernels.ragged_table(ranks, DEVICE, balanced)
    out = kernels.launch_attend_ragged(q.flatten(1, 2), packed, table, ranks, pos, 0.2, balanced)
    close(out, torch.cat(truth, 1), dtype)


def test_kernel_attend_ragged_gives_programs_equal_bytes():
    """The line of work: the widest head first, and a block's work is what it reads. Without the
    balance a block of each head is the same work."""
    ranks = [16, 96, 48, 64, 80, 16]
    heads = kernels.ragged_heads(ranks, balanced=True)
    assert [head.head for head in heads] == [1, 0, 2]  # of 176, 80 and 64 numbers a token
    assert [head.work for head in heads] == [22, 10, 8]
    assert [head.work_before for head in heads] == [0, 22, 32]
    assert [head.k_before for head in heads] == [16, 0, 112]
    assert [head.v_before for head in heads] == [224, 160, 304]
    assert [head.work for head in kernels.ragged_heads(ranks, balanced=False)] == [1, 1, 1]


def test_kernel_attend_ragged_pads_ranks_by_less_than_half():
    """product_widths: two parts where these are less than one."""
    widths = {rank: kernels.product_widths(rank) for rank in range(8, 257, 8)}
    for rank, (first, second) in widths.items():
        assert rank <= first + second < max(17, 1.5 * rank)
    assert widths[72] == (64, 16) and widths[64] == (64, 0) and widths[112] == (128, 0)


# ---- copied into another project


@functools.cache
def definitions() -> dict[str, tuple[str, ast.stmt]]:
    """What three files define, by name: the file, and the node; in order."""
    found = {}
    for file in ("kernels.py", "model.py", "compress.py"):
        for node in ast.parse((ROOT / file).read_text()).body:
            names = (
                [node.name]
                if hasattr(node, "name")
                else map(ast.unparse, getattr(node, "targets", ()))
            )
            found |= dict.fromkeys(names, (file, node))
    return found


def to_copy(name: str) -> list[str]:
    """The names of what a function needs of these files, and itself, in an order that Python can
    run."""
    known, needed = definitions(), [name]
    for each in needed:  # it grows
        parts = [*ast.walk(known[each][1])]
        names = [part for part in parts if isinstance(part, ast.Name)]
        own = {part.id for part in names if isinstance(part.ctx, ast.Store)}
        own |= {part.arg for part in parts if isinstance(part, ast.arg)}
        used = [part.id for part in names if part.id not in own]
        of_modules = (part for part in parts if isinstance(part, ast.Attribute))
        used += [
            part.attr for part in of_modules if ast.unparse(part.value) in ("kernels", "model_file")
        ]
        needed += dict.fromkeys(x for x in used if x in known and x not in needed)
    return [each for each in known if each in needed]


def listed(name: str) -> str:
    """What README shows of to_copy: a paragraph a file."""
    files = itertools.groupby(to_copy(name), lambda each: definitions()[each][0])
    return "\n".join(textwrap.fill(f"{file}: {', '.join(names)}", 110) for file, names in files)


def copied(name: str, folder: Path):
    """A module in a folder of its own, with nothing else of this project: that, and the files'
    imports."""
    files = dict.fromkeys(file for file, _ in definitions().values())
    lines = [
        ast.unparse(node)
        for file in files
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Try)
    ]
    lines = [
        line
        for line in dict.fromkeys(lines)
        if not re.match(r"(from|import) (kernels|model)\b", line)
    ]
    lines += dict.fromkeys(ast.unparse(definitions()[each][1]) for each in to_copy(name))
    (folder / "copied.py").write_text("\n".join(lines).replace("kv_kernels", f"kv_copied_{name}"))
    spec = importlib.util.spec_from_file_location("copied", folder / "copied.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_the_step_of_sals_runs_where_nothing_else_of_this_project_is(tmp_path):
    """From no tokens on, on plain tensors. README lists what is copied."""
    readme = (ROOT / "README.md").read_text()
    assert listed("sals_step_ours") in readme and listed("launch_select") in readme
    q, k, v = stream(40)
    cos, sin = (table[:40] for table in rope_tables(tiny_config(), 40, CPU))
    int8_dims, scale, int4_dims = kernels.quantize_mixed(torch.zeros(0, 40), 16)
    v_codes, v_scale = kernels.quantize_spread(v[:0], 4)
    module = copied("sals_step_ours", tmp_path)
    found = []
    for source in (compress, module):
        each_token = source.Rotations(1, cos, sin)
        how = {
            "maps": source.SalsMaps(
                orthonormal(64)[:, :40], orthonormal(64)[:, :40], torch.zeros(64)
            ),
            "r_score": 16,
            "bits": 4,
            "budget": source.Budget(n_sinks=2, n_selected=10, n_recent=4),
            "rope": lambda x, at: source.apply_rope(x, cos[at], sin[at]),  # noqa: B023
            "blocks": each_token,
            "mean_blocks": each_token,
        }
        stored = source.SalsStoredOurs(int8_dims, scale, int4_dims, v_codes, v_scale, k[:0], v[:0])
        for i in range(40):
            out, _, stored = source.sals_step_ours(q[i], k[i], v[i], stored, **how)
            found.append(out)
    assert torch.equal(torch.stack(found[40:]), torch.stack(found[:40])) and out.isfinite().all()
    assert error(found[40], v[0].repeat_interleave(2, 0)) < 0.2  # one token: its own value


def check_operation(name, launch):
    """Runs `launch`, a copy of kernels.launch_NAME, against the truth of its own test."""
    pos = positions(80, 3)
    if name == "attend_plain":
        check_attend(torch.float16, "plain", "row", 2, 90, 2, 2, 64, 64, 16, 8, (80, 3))
    elif name == "attend_latents":
        form = "joint mixed latents"
        check_attend(torch.float16, form, "row", 2, 90, 2, 2, 64, 64, 4, 8, (80, 3))
    elif name == "attend_channels":
        check_attend(torch.float16, "channels", "all", 2, 90, 2, 2, 64, 64, 4, 8, (80, 3))
    elif name == "attend_shared_latent":
        q = randn(2, 4, 48)
        latent = randn(2, 90, 48, seed=1)
        truth = kernels.attend_shared_latent(q, latent, pos, 32, scale=0.2, kernel=False)
        close(launch(q, latent, pos, 32, 0.2), truth, torch.float32)
    elif name == "attend_logits":
        logits = randn(2, 2, 3, 90)
        v = randn(2, 2, 90, 32, seed=1)
        truth = kernels.attend_logits(logits, v, pos, kernel=False)
        q = randn(2, 6, 16)
        close(launch(q, logits, v, None, 16, pos, None, [], 1.0), truth, torch.float32)
    elif name == "attend_ragged":
        ranks = [16, 40, 24, 8]
        q = randn(2, 4, 40)
        packed = randn(2 * 90 * sum(ranks), seed=1)
        truth = kernels.attend_ragged(q, packed, ranks, None, pos, scale=0.2)
        table = kernels.ragged_table(ranks, DEVICE)
        close(launch(q, packed, table, ranks, pos, 0.2), truth, torch.float32)
    elif name == "scores":
        check_scores(torch.float16, "largest", True, 2, 90, 1, 4, 40, 32)
    elif name == "block_scores":
        check_block_scores(torch.float16, True, 2, 90, 1, 4, 40, 32, 48, 0)
    else:
        check_select("ties", 257, 4, 33, 8, (256, 17))


COPIED_OPERATIONS = [
    "attend_plain",
    "attend_latents",
    "attend_channels",
    "attend_shared_latent",
    "attend_logits",
    "attend_ragged",
    "scores",
    "block_scores",
    "select",
]


@pytest.mark.parametrize("name", COPIED_OPERATIONS)
def test_an_operation_of_kernels_runs_in_a_file_of_its_own(name, tmp_path, monkeypatch):
    """Copied with the functions and constants that it names, and they name."""
    module = copied(f"launch_{name}", tmp_path)
    size = (tmp_path / "copied.py").stat().st_size
    assert size < (ROOT / "kernels.py").stat().st_size * 0.3
    launch = getattr(module, f"launch_{name}")
    monkeypatch.setattr(kernels, f"launch_{name}", launch)
    check_operation(name, launch)


# ---- compiled for GPUs that are not there


def run_for_hopper(*programs, capability=90):
    """Runs them with a driver that can only compile: Compile stands for a kernel of a module, and
    puts what a launch of it compiles into `compiled`, with its name."""
    before = f"""
        import re, torch, types, kernels
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        class Hopper:  # enough of a driver to compile
            get_current_target = staticmethod(lambda: GPUTarget("cuda", {capability}, 32))
            get_current_device = staticmethod(lambda: 0)
            get_current_stream = staticmethod(lambda device: 0)
        driver.set_active(Hopper())
        kernels.nvidia_generation = lambda device: {capability} // 10
        compiled = []
        class Compile:
            def __init__(self, name, module=kernels):
                self.kernel, self.name = getattr(module, name), name
            def __getitem__(self, grid):
                def launch(*args, **options):
                    compiled.append((self.name, self.kernel.warmup(*args, grid=grid, **options)))
                return launch
        def zeros(*shape, dtype=torch.bfloat16):
            return torch.zeros(*shape, dtype=dtype)
        i8, i32, half, fp32 = torch.int8, torch.int32, torch.half, torch.float32
        how = {{"scale": 1.0, "kernel": True}}
    """
    program = "".join(map(textwrap.dedent, (before, *programs)))
    done = python("-c", program, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_operations_compile_for_every_gpu_within_99_kb_of_shared_memory(capability):
    """Of every format and rule at the sizes of an 8B and a 7B model, for the triton that is
    installed. Where launches overlap, kernels wait for the one before they touch memory."""
    program = """
        import test_all
        names = {name for name in vars(kernels) if name.endswith("_kernel")}
        names -= {"_fetch_kernel"}  # which overlaps with none
        for name in names:
            setattr(kernels, name, Compile(name))
        B, S, D, bf16 = 2, 512, 128, torch.bfloat16
        pos = zeros(B, dtype=i32)
        kernels.launch_select(zeros(B, 4992, dtype=fp32), pos, 4, 200, 16)

        def attend(form, H, G, bits, z, tokens="all", r=256, dtype=bf16):
            sizes = B, S, H, G, D, D, bits, z, (S - 1, 9)
            given = test_all.attend_case(dtype, form, tokens, *sizes, n=448, r=r)[0]
            test_all.launch_attend(*given)

        for H, G in ((8, 4), (32, 1)):
            for tokens in ("all", "query head"):
                attend("plain", H, G, 16, 0, tokens)
                attend("plain", H, G, 16, 80, tokens)
                attend("joint latents", H, G, 4, 80, tokens)
                attend("joint mixed latents", H, G, 4, 80, tokens, 512)
                attend("latents", H, G, 16, 0, tokens)
            attend("joint mixed latents", H, G, 4, 80, r=512, dtype=fp32)
            attend("channels", H, G, 4, 80)
            k = zeros(B, H, S, D)
            for rule in test_all.RULES:
                kernels.launch_scores(zeros(B, H, G, 64), k, None, pos, 1.0, rule)
            logits = zeros(B, H, G, S, dtype=fp32)
            kernels.attend_logits(logits, k, pos, kernel=True)
            mixed = test_all.attend_case(
                bf16, "joint mixed latents", "row", B, S, H, G, D, D, 4, 80, (S - 1, 9), n=448
            )[0]
            q, _, _, values, bits, _, index, exact, _ = mixed
            kernels.launch_attend_logits(q, logits, *values, bits, pos, index, exact, 1.0)
            if overlaps or e4m3:
                e = zeros(B, H, S, D, dtype=torch.float8_e4m3fn)
                one = torch.ones(B, H)
                kernels.launch_attend_plain(q, e, e, pos, None, [], 1.0, one, one)
            for W, DV in ((576, 512), (512, 448), (100, 60), (2048, 1536)):
                kernels.attend_shared_latent(zeros(B, H * G, W), zeros(B, 4992, W), pos, DV, **how)
        kernels.launch_append(*test_all.appended(B, 32, D, 128, 192, S, 2, bf16))
        for coded in (False, True):
            kernels.launch_block_queries(*test_all.placed_queries(B, 4, 8, 4, D, 200, bf16), coded)
        latents = zeros(B, 1, S, 128, dtype=i8), zeros(B, 1, S, dtype=fp32)
        latents += (pos, 1.0, 128, zeros(B, 32, 32, dtype=fp32), 16)
        kernels.launch_block_scores(zeros(B, 4, 1, 32, 128), *latents)
        codes = zeros(2, B, 4, 1, 32, 128, dtype=i8)
        kernels.launch_block_scores(codes, *latents, query_scale=zeros(B, 4, 32, dtype=fp32))
        ranks = [96, 48, 24, 80, 16, 72]
        table, packed = kernels.ragged_table(ranks, torch.device("cpu")), zeros(B * S * sum(ranks))
        kernels.launch_attend_ragged(zeros(B, 12, 96), packed, table, ranks, pos, 1.0)
        assert {name for name, _ in compiled} == names, names - {name for name, _ in compiled}
        small = len(compiled)
        if overlaps:  # Hopper GPUs, which have more: a basis that is held, wide plain values
            kernels.has_large_shared_memory = lambda device: True
            attend("joint latents", 8, 4, 16, 80)
            for W, DV in ((32, 32), (40, 24), (64, 40), (104, 60), (256, 256), (512, 448)):
                kernels.attend_shared_latent(zeros(B, 32, W), zeros(B, 4992, W), pos, DV, **how)
                name = "_attend_shared_latent_kernel"
                kernel = [kernel for each, kernel in compiled if each == name][-1]
                code = kernel.asm["ttgir"]
                # A tile is read in a branch after the loads of the next one have begun.
                has_branch = "scf.if" in code
                has_two_tiles = f"memdesc<2x64x{kernels.power2(W, 16)}x" in code
                assert has_branch == has_two_tiles == (W > 32)
        for i, (name, kernel) in enumerate(compiled):
            most = 99 if i < small else 227
            assert kernel.metadata.shared <= most * 1024, (name, kernel.metadata.shared)
            if overlaps:
                before, after = kernel.asm["ptx"].split("griddepcontrol.wait")  # one
                assert kernel.metadata.launch_pdl, name
                touches = "ld.global st.global cp.async atom red.g launch_dependents"
                for touch in touches.split():
                    weights = name == "_block_queries_kernel" and touch == "ld.global"
                    assert weights or touch not in before, (name, touch)
    """
    flags = f"overlaps, e4m3 = {capability >= 90}, {capability >= 89}\n"
    run_for_hopper(flags, program, capability=capability)


# ---- rows of host memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, Hkv, S, W, n, slots", [(1, 1, 9, 16, 1, 3), (2, 3, 70, 24, 37, 50), (3, 2, 40, 256, 32, 32)]
)
def test_kernel_fetch_rows(dtype, B, Hkv, S, W, n, slots):
    """Only missing rows move; the others' rows may hold anything, and their places stay as they
    are."""
    rows, hot = randn(B, Hkv, S, W, dtype=dtype), randn(B, Hkv, slots, W, seed=2, dtype=dtype)
    index = torch.stack([torch.randperm(S)[:n] for _ in range(B * Hkv)]).view(B, Hkv, n).to(DEVICE)
    place = (
        torch.stack([torch.randperm(slots)[:n] for _ in range(B * Hkv)]).view(B, Hkv, n).to(DEVICE)
    )
    for share in (0.0, 0.4, 1.0):
        miss = (torch.rand(B, Hkv, n) < share).to(DEVICE)
        truth = hot.clone()
        kernels.fetch_rows_reference(rows, index, place, miss, truth)
        codes = hot.clone().view(torch.uint8)
        kernels.launch_fetch_rows(rows.view(torch.uint8), index, place, miss, codes)
        kernels.launch_fetch_rows(rows, index, place, miss, hot)
        assert torch.equal(hot, truth) and torch.equal(codes, truth.view(torch.uint8))
        assert share < 1 or torch.equal(hot[0, 0, place[0, 0]], rows[0, 0, index[0, 0]])


@needs_cuda
def test_kernels_reach_host_memory_through_its_address():
    context = CacheContext(tiny_model().cuda(), 2, 50)
    shape = 3, 50, 16
    rows = compress.host_memory(context, *shape, dtype=torch.float32)
    assert rows.is_cuda and not rows.any()
    index = torch.arange(50, device="cuda")
    rows[1, :, index] = torch.ones(shape, device="cuda")
    before = torch.cuda.memory_allocated()
    codes = compress.host_memory(context, *shape, dtype=torch.uint8)
    assert codes.dtype == torch.uint8 and codes.sum() == 0 and rows.sum() == 3 * 50 * 16
    assert torch.cuda.memory_allocated() - before < rows.nbytes


# ---- operators: torch.compile, CUDA graphs, refusals


SALS_0 = SPARSE | {"skip": "0"}
OPERATIONS = ["append", "block_queries", "block_scores", "scores", "select", "attend_ragged"]
OPERATIONS += ["attend_plain", "attend_latents", "attend_channels", "attend_shared_latent"]
OURS = "block_queries attend_latents block_scores select"  # of our SALS
WIDE_BIAS = {"skip": "", "bits": 2, "rank": 0.8, "qkv_bias": True}
PAPER_LRQK = {"rank": 8, "k": 24, "recent": 8, "variant": "paper", "slots": 1.5}
# method, options (and head_dim), group, operations
SAME_WITH_KERNELS = [
    ("dense", {}, 4, "attend_plain"),
    ("sals", SALS_0, 2, "attend_latents scores select"),
    ("sals", SALS_0 | {"bits": 2, "rank": 0.3}, 1, "attend_latents scores select"),
    ("sals", CODES | {"skip": ""}, 8, f"append {OURS}"),
    ("sals", CODES | {"skip": "0", "head_dim": 128}, 2, f"append attend_channels {OURS}"),
    ("sals", CODES | WIDE_BIAS, 1, f"append {OURS}"),
    ("sals", CODES | {"skip": "", "bits": 2, "head_dim": 80}, 1, f"append {OURS}"),
    ("sals", CODES | {"skip": "", "score": "sum"}, 4, "append attend_latents scores select"),
    # values of 24 channels in codes: no kernel attends these
    (
        "sals",
        CODES | {"skip": "", "head_dim": 24, "rank": 0.8},
        2,
        "append block_queries block_scores select",
    ),
    ("fdc", {"rate": 0.2}, 2, "attend_ragged"),
    ("fdc", {"adaptive": False}, 8, "attend_ragged"),
    ("fdc", {"rate": 0.2, "balanced": False}, 1, "attend_ragged"),
    ("kivi", {"residual": 32}, 4, "attend_channels"),
    ("kivi", {"residual": 32, "bits": 2}, 1, "attend_channels"),
    ("elitekv", {}, 2, "attend_shared_latent"),
    ("loki", {"reduced": True, "d": 0.5}, 2, "attend_plain"),
    ("loki", {"k": 0.5, "d": 0.25}, 2, "attend_plain scores select"),
    ("lrqk", {"rank": 8, "k": 24, "recent": 8}, 2, "attend_plain scores select"),
    ("lrqk", PAPER_LRQK, 2, "attend_plain scores select"),
    ("topk", {"keep": 32}, 2, "attend_plain scores select"),
]


@over("method, options, group, operations", lambda tests: tests.SAME_WITH_KERNELS)
def test_decode_with_kernels_equals_decode_without(method, options, group, operations, monkeypatch):
    """The same logits, ragged rows, on both sides of the budget's edge at 32 tokens."""
    logits, calls, options = [], set(), dict(options)
    shape = {
        "n_layers": 2,
        "n_heads": 2 * group,
        "n_kv_heads": 2,
        "head_dim": options.pop("head_dim", 16),
    }
    shape["qkv_bias"] = options.pop("qkv_bias", False)
    for name in OPERATIONS:
        operation = getattr(kernels, f"launch_{name}")

        def spy(*given, name=name, operation=operation):
            calls.add(name)
            return operation(*given)

        monkeypatch.setattr(kernels, f"launch_{name}", spy)
    for kernel in (False, True):
        engine = make_engine(
            tiny_model(**shape).to(DEVICE), method, 3, 64, kernel=kernel, **options
        )
        logits.append(
            logits_through(engine, [random_ids(n, n) for n in (5, 31, 58)], [random_ids(2)] * 3)
        )
        assert calls == (set(operations.split()) if kernel else set())
    assert error(logits[1], logits[0]) < 1e-5


def good_attend_arguments(form: str) -> dict:
    """Arguments by name of the operation for a form of keys, at which nothing is wrong."""
    tokens, G = ("row", 1) if "latents" in form else ("all", 2)
    bits = 16 if form == "plain" else 4
    sizes = 1, 40, 2, G, 32, 32, bits, 4, (39,)
    given, _ = attend_case(torch.float32, form, tokens, *sizes, written=True)
    q, _, keys, values, _, pos, index, exact, scale = given
    always = {"q": q, "pos": pos, "exact": exact, "scale": scale}
    if form == "plain":
        return always | {"k": keys[0], "v": values[0], "index": index}
    always |= {"v": values[0], "v_scale": values[1], "bits": bits}
    if form == "channels":
        return always | {"k": keys[0], "k_scale": keys[1]}
    names = "latent latent_scale int4_dims basis basis_scale bias rope".split()
    return always | dict(zip(names, keys, strict=True)) | {"index": index}


def good_arguments(name: str) -> dict:
    """Arguments of an operation, or of attend over a form of keys, by name, at which nothing is
    wrong."""
    if name in FORMATS:
        return good_attend_arguments(name)
    pos, q = positions(9), randn(1, 2, 16)
    rows, hot, index = (
        randn(1, 2, 9, 16),
        randn(1, 2, 3, 16),
        torch.zeros(1, 2, 1).long().to(DEVICE),
    )
    table = kernels.ragged_table([16, 16], DEVICE)
    fdc = {"q": q, "packed": randn(640), "table": table, "ranks": [16, 16]}
    fetch = {"rows": rows, "index": index, "place": index, "miss": index == 0, "hot": hot}
    scores = {"queries": randn(1, 1, 4, 8), "vectors": randn(1, 1, 10, 8), "vector_scale": None}
    placed = dict(
        zip("q cos sin basis mean".split(), placed_queries(*PLACED[0], torch.float32), strict=True)
    )
    placed["coded"] = True
    names = "latent v pos lead latent_scale rest codes scale".split()
    return {
        "append": dict(zip(names, appended(*APPENDED[0], torch.float32), strict=True)),
        "block_queries": placed,
        "select": {"scores": randn(1, 10), "pos": pos, "x": 1, "y": 2, "z": 3},
        "scores": scores | {"pos": pos, "scale": 1.0, "rule": "each"},
        "attend_logits": {
            "logits": randn(1, 2, 2, 9),
            "v": randn(1, 2, 9, 8),
            "pos": pos,
            "kernel": True,
        },
        "attend_shared_latent": {
            "q": q,
            "latent": randn(1, 10, 16),
            "pos": pos,
            "DV": 8,
            "scale": 1.0,
        },
        "block_scores": {
            "queries": randn(1, 2, 1, 4, 8),
            "vectors": randn(1, 1, 20, 8),
            "vector_scale": None,
            "pos": pos,
            "scale": 1.0,
            "block": 16,
        },
        "attend_ragged": fdc | {"pos": pos, "scale": 1.0},
        "fetch_rows": fetch,
        "value_packing": {"D": 32, "bits": 4},
    }[name]


def other(place, change):
    """A change of one of a list's tensors."""
    return lambda tensors: [change(x) if i == place else x for i, x in enumerate(tensors)]


def instead(value):
    return lambda _: value


def turned(x):
    """x, not contiguous."""
    return x.mT.contiguous().mT


MIXED = "joint mixed latents"
REFUSED = [  # operation or form of keys, arguments and their changes, the message
    ("plain", {"q": lambda q: q[:, :3]}, "3 query heads do not divide over 2"),
    ("plain", {"q": turned}, "q .* must be contiguous"),
    ("plain", {"q": lambda q: q.half()}, "keys must be torch.float16"),
    ("plain", {"pos": lambda pos: pos.long()}, "pos must be torch.int32"),
    ("plain", {"k": turned}, "keys must be whole vectors"),
    ("plain", {"v": lambda v: v.half()}, "values must be torch.float32"),
    ("plain", {"k_scale": lambda _: randn(1, 2)}, "keys must be torch.float8"),
    ("plain", {"v_scale": lambda _: randn(1, 2)}, "have scales, or none"),
    ("plain", {"exact": other(0, lambda x: x.half())}, "exact keys must be torch.float32"),
    ("plain", {"exact": other(1, lambda x: x[:, 1:])}, "exact values must be"),
    (
        "plain",
        {"index": lambda _: torch.zeros(1, 2, 9, device=DEVICE)},
        "index must be torch.int32",
    ),
    ("plain", {"index": lambda _: positions(1, 2, 3)}, r"index must be \[1, .., n\]"),
    ("plain", {"index": lambda _: positions(1, 2, 3).view(1, 3, 1)}, "a query head, not 3"),
    ("joint latents", {"latent_scale": lambda _: randn(1, 2, 40)}, "codes of latents have"),
    ("joint latents", {"basis_scale": lambda _: randn(2, 32, 1)}, "codes of latents have"),
    ("joint latents", {"int4_dims": lambda _: randn(1, 2, 40, 4)}, "codes of latents have"),
    ("joint latents", {"v_scale": instead(None)}, "values of 4 bits need a scale"),
    ("joint latents", {"basis": lambda x: x[:, :16]}, "basis .* must be"),
    ("joint latents", {"bias": lambda _: randn(2, 16, 1)}, "bias .* must be"),
    ("joint latents", {"rope": lambda x: x[:39]}, "rope has 39 positions, the cache 40"),
    ("joint latents", {"bits": instead(3)}, "codes have 2 or 4 bits, not 3"),
    (MIXED, {"v_scale": lambda x: x.float()}, "scale of values must be torch.float16"),
    (MIXED, {"v_scale": lambda x: x.contiguous()}, "scale of values must lie as"),
    ("channels", {"k": lambda x: x[..., :4]}, "2 or 4 bits, not"),
    ("channels", {"k_scale": lambda x: x[:, :, :1]}, "scale of keys must be"),
    ("channels", {"k": lambda x: x[:, :, :32]}, "keys of 32 tokens do not fit values of 40"),
    ("attend_shared_latent", {"latent": lambda x: x.half()}, "latent must be torch.float32"),
    ("attend_shared_latent", {"DV": instead(17)}, "no value of 17"),
    ("append", {"latent": turned}, "row of latent must be contiguous"),
    ("append", {"codes": lambda x: x[..., :15]}, "15 bytes are no codes of 64 values"),
    ("append", {"scale": lambda x: x.float()}, "scale must be torch.float16"),
    ("block_queries", {"basis": lambda x: x[:17]}, "q, rotations and basis do not fit"),
    ("block_queries", {"mean": lambda x: x.half()}, "mean must be torch.float32"),
    ("select", {"scores": lambda x: x.double()}, "scores must be torch.float32"),
    ("select", {"y": instead(0)}, "at least 1"),
    ("select", {"wanted": lambda _: positions(1, 1)}, r"wanted must be \[1\]"),
    (
        "select",
        {"scores": lambda _: randn(2, 10), "pos": lambda p: p.repeat(4)[::2]},
        "pos .* must be c",
    ),
    ("scores", {"queries": lambda _: randn(1, 1, 4, 9)}, "do not fit vectors"),
    ("block_scores", {"offset": lambda _: randn(1, 9, 4), "run": instead(1)}, "offset must be"),
    ("scores", {"rule": instead("sum")}, "no rule sum"),
    ("scores", {"vector_scale": lambda _: randn(1, 1, 10)}, "vectors must be torch.int8"),
    (
        "scores",
        {"queries": lambda _: randn(1, 1, 4, 3), "vectors": lambda x: x[..., :3]},
        "must be whole vectors",
    ),
    ("block_scores", {"queries": lambda _: randn(1, 3, 1, 4, 8)}, "no queries for blocks"),
    ("block_scores", {"block": instead(8)}, "not a multiple of 16"),
    ("attend_logits", {"logits": lambda x: x.half()}, "must be torch.float32"),
    ("attend_logits", {"v": lambda v: v[:, :1]}, "do not divide|logits must be"),
    ("attend_ragged", {"ranks": instead([16])}, "ranks must be d_qk and d_v"),
    ("fetch_rows", {"index": lambda index: index.int()}, "index must be torch.int64"),
    ("fetch_rows", {"rows": turned}, "rows .* must be contiguous"),
    ("value_packing", {"D": instead(48)}, "multiple of 32"),
]


def operation_of(name: str) -> Callable:
    if name in FORMATS:
        name = f"attend_{name.split()[-1]}"
    if name == "attend_logits":
        return kernels.attend_logits
    return getattr(kernels, f"launch_{name}", None) or getattr(kernels, name)


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_operations_refuse_what_they_would_get_wrong(name, changes, message):
    given, operation = good_arguments(name), operation_of(name)
    operation(**given)
    with pytest.raises(ValueError, match=message):
        operation(**given | {key: change(given.get(key)) for key, change in changes.items()})


def test_kernel_operators_do_what_torch_compile_is_told():
    for name in dict.fromkeys(name for name, *_ in REFUSED):
        if isinstance(operation := operation_of(name), torch.library.CustomOpDef):
            torch.library.opcheck(operation, (), good_arguments(name))


# ------------------------------------------------------------------------------------- golden texts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("method,options", [("dense", {}), ("sals", FULL)])
def test_stories260k_gives_its_golden_text(method, options, device):
    folder = folder_of(STORIES)
    golden = json.loads((folder / "golden.json").read_text())
    model = load_model(folder, torch.device(device), torch.float32)
    engine = make_engine(model, method, 1, 256, **options)
    prompt, ids = golden["prompt_ids"], golden["greedy_ids"]
    engine.prefill([prompt])
    assert prompt + decode_rows(engine, len(ids) - len(prompt), lambda ids: False)[0] == ids


# Facts in the words that nano was trained on. Keys share words.
NANO_FACTS = {
    "silent harbor": 52871,
    "golden harbor": 30964,
    "silent bridge": 77402,
    "amber lantern": 18635,
}


def nano_question(characters: int, key: str) -> list[int]:
    """Token ids of a source text of the standard library with NANO_FACTS spread over it, and a
    question."""
    tokenizer = load_tokenizer(NANO)
    lines = Path(textwrap.__file__).read_text()[:characters].splitlines()
    for i, (name, number) in enumerate(NANO_FACTS.items()):
        place = (2 * i + 1) * len(lines) // 8
        lines.insert(place, f"\nThe magic number for {name} is {number}.\n")
    question = (
        f"\nQuestion: What is the magic number for {key}?\nAnswer: The magic number for {key} is"
    )
    return tokenizer.encode("\n".join(lines)) + tokenizer.encode_continuation(question)


@pytest.mark.parametrize(
    "method, options", [("dense", {}), ("sals", {}), ("sals", {"rank": 0.125, "bits": 2})]
)
def test_nano_retrieves_through_the_cache(method, options):
    """About 1500 tokens, of which SALS attends a third. Each row is asked for a fact of its own."""
    asked = ["silent harbor", "silent bridge"]
    prompts = [nano_question(4000, key) for key in asked]
    engine = fitted_engine(NANO, method, len(prompts), 1600, **options)
    engine.prefill(prompts)
    answers = decode_rows(engine, 8, lambda ids: False)
    tokenizer = load_tokenizer(NANO)
    for key, token_ids in zip(asked, answers, strict=True):
        assert tokenizer.decode(token_ids).startswith(f"{NANO_FACTS[key]}.")


# ----------------------------------------------------------------------------------- texts and fits


def test_explained_is_the_mean_of_the_heads_ranks():
    """Sec. 3.1: Rank@v of a layer averages its heads; here 1, 1, 1 and 8 of 16, mean 2.75."""
    model, values = tiny_model(), torch.full((4, 4, 16), 1e-6)
    values[:, :, 0], values[:, 3, :8] = 1.0, 1.0
    artifact = artifact_of("loki", model) | {"post.eigenvalues": values}
    engine = make_engine(model, "loki", 1, 20, artifact, explained=0.9)
    assert [cache.d for cache in engine.caches] == [3] * 4
    assert [compress.rank_at(torch.tensor([2.0, 1, 1]), share) for share in (0.5, 0.51, 0.75)] == [
        1,
        2,
        2,
    ]


def test_texts_come_once_and_begin_with_bos(tmp_path):
    tokenizer = load_tokenizer(NANO)
    code = "x = 1\n" * 99
    prose = "some words and more " * 100
    texts = {
        "a.py": code,
        "b.py": code,  # a copy
        "c.py": "short",
        "d.py": "y" * 3000,  # a table
        "e.py": "\ufeff" + code.replace("\n", "\r\n"),  # a copy, as Windows writes it
        "f.py": prose,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    files = calibrate.text_files(tmp_path)
    assert sorted(calibrate.read_texts(files)) == [prose, code]

    windows = calibrate.windows(tokenizer, files, 32, 3)
    assert windows[:, 0].tolist() == [tokenizer.bos_id] * 3
    ids = np.concatenate([tokenizer.encode(text) for text in calibrate.read_texts(files)])
    assert (calibrate.text_ids(tokenizer, files, len(ids) - 9, bos=True) == ids[:-9]).all()
    assert (calibrate.text_ids(tokenizer, files, 9) == ids[1:10]).all()  # without BOS


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_one_rewritten_line_and_in_a_log_a_line_each_ten_seconds(
    is_terminal, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with calibrate.ProgressLine("windows", total=8) as progress:
        progress.started -= 12
        progress.tick(3)  # at once: not shown
        for _ in range(2):
            progress.last_shown -= 11
            progress.tick()
    lines = ["windows: 4 of 8, 12 s left", "windows: 5 of 8, 7 s left"]
    if is_terminal:
        lines = [*(line.ljust(79) for line in lines), " " * 79]
        expected = "".join(f"\r{line}" for line in lines) + "\r"
    else:
        expected = "".join(f"{line}\n" for line in lines)
    assert capsys.readouterr() == ("", expected)


def test_a_fit_of_fdc_says_when_the_dense_model_predicts_nothing():
    facts = {"rate": 0.0, "mean rank of q and k": 16.0, "mean rank of v": 16.0, "floor": 0.99}
    facts["perplexity of dense's"] = 1.0
    facts["accuracy of dense's"] = math.nan
    assert calibrate.report_fit("fdc", facts).endswith(
        "no token of this text right: try another text."
    )
    facts["accuracy of dense's"] = 0.995
    assert "It predicts 99.5% as many tokens right" in calibrate.report_fit("fdc", facts)


def test_fit_is_of_one_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "fit", "--method", "sals"])
    monkeypatch.setattr(generate, "is_one_of_several_processes", lambda: True)
    with pytest.raises(UserError, match="start it with python, not with torchrun"):
        calibrate.run()


# --------------------------------------------------------------------------------- the command line


class CommandLine:
    """Runs command lines in this process, on the CPU unless they name CUDA. A line begins with
    generate or a command of calibrate."""

    programs = {}  # others, by the word that a line begins with

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, line: str, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; the last two are kept as `out` and `err`."""
        if stdin is not None:
            bytes_read = io.BytesIO(stdin.encode())
            self.monkeypatch.setattr(
                sys, "stdin", io.TextIOWrapper(bytes_read, "ascii", newline="")
            )
        program, *argv = shlex.split(line)
        run = self.programs.get(program)
        if program != "generate" and not run:
            run, argv = calibrate.run, [program, *argv]
        if "cuda" not in argv:
            self.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        self.monkeypatch.setattr(sys, "argv", ["command", *argv])
        code = 0
        try:
            generate.run_command(run) if run else generate.main()
        except SystemExit as stop:
            code = stop.code or 0
        self.out, self.err = self.capsys.readouterr()
        return code, self.out, self.err

    def json(self, line: str, stdin: str | None = None) -> dict:
        """What a command prints as the last line of stdout."""
        code, out, err = self(f"{line} --json", stdin)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    def refusal(self, line: str) -> str:
        """The one line in which a command ends that cannot run."""
        for progress in (generate.Progress, calibrate.ProgressLine):  # a slow machine would show it
            self.monkeypatch.setattr(progress, "tick", lambda *_: None)
        code, out, err = self(line)
        assert (code, out, err[:7], err.count("\n")) == (2, "", "error: ", 1), err
        return err


def tiny_checkpoint(folder: Path, tests=sys.modules[__name__], **changes) -> Path:
    """A folder with a random model that nano's tokenizer fits, calibrated for every method of
    `tests`."""
    model = tiny_model(vocab_size=4096, tied=True, **changes)
    save_checkpoint(model, folder)
    shutil.copy(NANO / "tokenizer.model", folder)
    model = load_model(folder, CPU, torch.float32)
    for method in fitted(tests):
        put_artifact(folder, method, artifact_of(method, model), model)
    return folder


def fitted(tests) -> list[str]:
    """The artifacts of the methods of `tests`; each has the name of a method."""
    return sorted({row.artifact for row in tests.METHODS.values() if row.fit})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, request):
    """A tiny checkpoint with bases of half the rank for SALS."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", request.module)
    put_artifact(folder, "sals", compress.random_artifact("sals", tiny_config()))
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A few files of the standard library, of which evaluation reads two."""
    folder, wanted = tmp_path_factory.mktemp("library"), {True: 2, False: 6}
    for file in sorted(calibrate.STDLIB.glob("*.py"), key=lambda file: -file.stat().st_size):
        held = zlib.crc32(file.name.encode()) % 16 == 0
        if wanted[held]:
            wanted[held] -= 1
            (folder / file.name).write_bytes(file.read_bytes()[:40000])
    return folder


@pytest.fixture
def cli(checkpoint, library, monkeypatch, capsys):
    """A CommandLine whose --checkpoint is the tiny one by default, and whose text a small one."""
    monkeypatch.setattr(generate, "NANO", checkpoint)
    monkeypatch.setattr(calibrate, "STDLIB", library)
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def folder(cli, checkpoint, tmp_path, monkeypatch):
    """A copy of the checkpoint, for tests that change it; cli takes it by default."""
    monkeypatch.setattr(generate, "NANO", shutil.copytree(checkpoint, tmp_path / "model"))
    return tmp_path / "model"


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_key(path: Path, name: str) -> None:
    data = json.loads(path.read_text())
    del data[name]
    path.write_text(json.dumps(data))


def put_weight(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a tensor, or drops it."""
    tensors = load_file(folder / WEIGHTS) | {name: tensor}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / WEIGHTS)


def move_weights(folder: Path, **shards: str) -> None:
    """They go out of the folder; its index names shards."""
    shutil.move(folder / WEIGHTS, folder.parent / "outside.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": shards}))


def put_artifact(folder: Path, method: str, tensors: dict, model: Llama | None = None) -> None:
    """As fitted to this folder's model by default; None: without this tensor."""
    model = model or load_model(folder, CPU, torch.float32)
    # A file wants tensors that share no memory.
    tensors = {name: t.contiguous().clone() for name, t in tensors.items() if t is not None}
    save_artifact(tensors, compress.artifact_path(folder, method), compress.model_identity(model))


def truncate(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


WEIGHTS, NORM, UP = "model.safetensors", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
INDEX = f"{WEIGHTS}.index.json"
# What the error says, and the change of config.json, or of the folder, that it is about.
DAMAGE = [
    ("config.json: not valid JSON", lambda f: truncate(f / "config.json")),
    ("config.json: no JSON object", lambda f: (f / "config.json").write_text("[1, 2]")),
    (
        "not a usable config; it lacks 'rms_norm_eps'",
        lambda f: drop_key(f / "config.json", "rms_norm_eps"),
    ),
    (
        "index.json: no weight_map in it",
        lambda f: (move_weights(f), edit_json(f / INDEX, weight_map=None)),
    ),
    ("head_dim is", {"head_dim": 1 << 31}),
    ("38 tensors cannot be 500000 layers", {"num_hidden_layers": 500_000}),
    ("rope_theta is inf", {"rope_theta": math.inf}),
    ("RoPE rotates pairs of dims", {"head_dim": 15}),
    ("max_positions", {"max_position_embeddings": None}),
    ("dim", {"hidden_size": None}),
    ("not a usable config", {"rope_scaling": {"rope_type": "llama3", "factor": [2]}}),
    ("not a usable config", {"rope_scaling": {"rope_type": "linear"}}),
    ("'longrope' is not supported", {"rope_scaling": {"rope_type": "longrope"}}),
    ("'gpt2' is not supported", {"model_type": "gpt2"}),
    ("'gelu' is not supported; supported: silu", {"hidden_act": "gelu"}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("do not belong together", {"intermediate_size": 63}),
    ("asks for none; the two do not belong together", {"num_hidden_layers": 2}),
    ("cannot share", {"num_key_value_heads": 3}),
    ("sliding window", {"model_type": "mistral", "sliding_window": 8}),
    ("no config.json", lambda f: (f / "config.json").unlink()),
    (
        "not finite in torch.float32; download it",
        lambda f: put_weight(f, NORM, torch.full((48,), torch.nan)),
    ),
    ("'fp8' is not supported", {"quantization_config": {"quant_method": "fp8"}}),
    (f"tensor {UP} is missing, config.json asks for [64, 48]", lambda f: put_weight(f, UP, None)),
    ("outside.safetensors is missing", lambda f: move_weights(f, norm="../outside.safetensors")),
    ("download it again", lambda f: truncate(f / WEIGHTS)),
    ("saved as safetensors", lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin")),
    ("saved as safetensors", lambda f: move_weights(f)),
    (
        "outside the model's vocabulary of 100",
        lambda f: save_checkpoint(tiny_model(vocab_size=100), f),
    ),
    ("calibrate.py fit", lambda f: compress.artifact_path(f, "sals").unlink()),
    ("make it again", lambda f: truncate(compress.artifact_path(f, "sals"))),
    (
        "of another fingerprint",
        lambda f: put_artifact(f, "sals", {"0.basis": torch.eye(64)}, tiny_model()),
    ),
]


def test_logits_that_are_not_finite_end_in_one_line(cli, folder):
    norm = load_file(folder / WEIGHTS)["model.norm.weight"]
    put_weight(folder, "model.norm.weight", torch.full_like(norm, 6e4))
    line = "generate --prompt hello --max_new_tokens 3 --dtype"
    assert "not finite in torch.float16; use --dtype bf16 or fp32" in cli.refusal(f"{line} fp16")
    assert cli(f"{line} bf16")[0] == 0
    put_weight(folder, "model.norm.weight", torch.full_like(norm, 1e5))
    assert "model.norm.weight is not finite in torch.float16; use --dtype bf16" in cli.refusal(
        f"{line} fp16"
    )
    engine = make_engine(tiny_model(), "dense", 1, 9)
    engine.prefill([[5]])
    with mock.patch.object(engine, "decode", lambda *_: torch.full((1, 96), torch.nan)):
        with pytest.raises(UserError, match="not finite in torch.float32; use"):
            decode_rows(engine, 3, lambda ids: False)


def test_a_failed_compile_ends_in_one_line(cli):
    with torch._inductor.config.patch(
        {"cpp.cxx": (None, "/no/compiler"), "force_disable_caches": True}
    ):
        told = cli.refusal("generate --prompt hello --compile")
    assert "/no/compiler" in told and told.endswith("; use --no-compile\n")


@pytest.mark.parametrize("message,damage", DAMAGE)
def test_damaged_folders_end_in_one_line(message, damage, cli, folder):
    damage(folder) if callable(damage) else edit_json(folder / "config.json", **damage)
    before = sorted(folder.iterdir())
    assert message in cli.refusal(
        "generate --method sals --prompt 'hello there' --max_new_tokens 20"
    )
    assert sorted(folder.iterdir()) == before


# Command lines and what their errors say. few.txt is a text, again a folder with a tokenizer.
BAD_COMMANDS = {
    "generate --prompt 5 --batch_size 2147483647": "not enough memory (",
    "generate --method magic": "unknown method 'magic'; the methods are: "
    "dense, sals, elitekv, loki, lrqk, fdc, topk, kivi",
    "generate --rank 0.5": "unrecognized arguments: --rank 0.5",
    f"generate --method kivi --residual {10**20}": f"{10**20}: give a number in [0, 1e9]",
    "generate --method sals --rank x": "--rank: invalid float value: 'x'",
    f"generate --prompt {'1' * 5000}": "more than the model's 512",
    "generate --prompt ''": "empty",
    "generate --prompt hi --system x": "no chat template",
    "generate --prompt 0": "no tokens",
    "generate --prompt @nowhere.txt": "No such file",
    "generate --prompt @/dev/zero": "no regular file",
    "generate --prompt @latin.txt": "latin.txt: not UTF-8",
    "generate --prompt 5 --batch_size 0": "--batch_size: 0: give a number in [1, 4294967296]",
    "generate --device meta --prompt 5": "--device: invalid choice: 'meta'",
    "generate --chat --prompt hello": "no chat template; put a chat_template.jinja into its folder",
    "generate --chat": "--chat needs a --prompt",
    "generate --random_weights llama-2-7b --prompt 5 --ask x": "tokenizer",
    "generate --prompt hello --max_seq_length 600": "the model's 512; shorten --max_seq_length",
    "generate --prompt a --prompt b --ask who?": "--ask takes one --prompt",
    "generate --prompt 60 --max_seq_length 40": "raise --max_seq_length",
    "generate --checkpoint nowhere": "no such folder",
    "generate --checkpoint few.txt --random_weights llama-2-7b --prompt 5": "not both",
    "generate --random_weights llama-2-7b --prompt hi": "give --prompt N",
    "generate --chat --prompt hi --ask who?": "takes no --ask",
    "generate": "no demo.txt",
    "generate --method sals --rank 0.9 --prompt 5": "--max_rank",
    "generate --method sals --skip 9 --prompt 5": "the layers are -4 to 3",
    "generate --method elitekv --r 9 --prompt 5": "--r 9: a head has 1 to 8 pairs",
    "generate --method elitekv --d_ckv 49 --prompt 5": "the latent can have 1 to 48 dims",
    "generate --method lrqk --rank 8 --slots 0.5 --prompt 5": "give 0 (no hit/miss) or a mult",
    "generate --method sals --skip first --prompt 5": "layer numbers",
    "generate --prompt 5 --prompt 6 --batch_size 1": "at least the number of prompts",
    "generate --device cuda": "--device cpu",
    # before the dense run of the demo
    "generate --checkpoint nano --method sals --rank 2": "in [0, 1]",
    "generate --checkpoint nano-elitekv --method sals --prompt hi": "run it with --method eli",
    "generate --checkpoint nano-elitekv --method elitekv --r 4 --prompt hi": "are fixed; leave",
    "fly": "invalid choice",
    "fit --checkpoint small --method loki": "has 4096 ids, the model's vocabulary 300",
    "fit --checkpoint nano-elitekv --method sals --windows 2 --window 64": "calibrated already",
    "fit --method sals --text none": "No such file",
    "fit --method sals --text nano/model.safetensors": "not UTF-8 text",
}
BAD_COMMANDS["fit --out few.txt/x"] = "--out: no file can be written"


@pytest.fixture(scope="module")
def desk(checkpoint, tmp_path_factory):
    """The folder in which bad commands run."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "few.txt").write_text("too short")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    save_checkpoint(tiny_model(vocab_size=300), folder / "small")
    (folder / "again").mkdir()
    for name in ("small", "again"):
        shutil.copy(NANO / "tokenizer.model", folder / name)
    added = {4096: {"content": "magic number"}}
    (folder / "again" / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added})
    )
    for path in (checkpoint, NANO, NANO.parent / "nano-elitekv"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def little_memory():
    """A GB more than this process has, where the system tells that."""
    if not (statm := Path("/proc/self/statm")).exists():
        yield
        return
    import resource

    before, pages = resource.getrlimit(resource.RLIMIT_AS), int(statm.read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@over("line, message", lambda tests: tests.BAD_COMMANDS.items())
def test_bad_commands_end_in_one_line_before_anything_runs(
    line, message, desk, cli, monkeypatch, little_memory
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("ran"))
    monkeypatch.chdir(desk)
    before = sorted(desk.rglob("*"))
    assert message in cli.refusal(line)
    assert sorted(desk.rglob("*")) == before


@pytest.mark.parametrize("name, module", [("eval", "extras.evaluate"), ("train", "extras.train")])
def test_a_command_that_has_moved_says_where(name, module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", name, "--method", "sals"])
    with pytest.raises(SystemExit) as stop:
        generate.run_command(calibrate.run)
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err == f"error: calibrate.py {name} has moved; run python -m {module}\n"
    )


def test_a_rank_is_the_nearest_to_its_share():
    assert [compress.rank_of(share, 256) for share in (1, 0.25, 0.0059, 0.001)] == [256, 64, 2, 1]
    for heads, sizes in (
        (1, (10, 8)),
        (4, (40, 32)),
        (12, (120, 32)),
        (16, (128, 32)),
        (64, (512, 128)),
    ):
        c = tiny_config(n_heads=heads, n_kv_heads=heads)
        assert compress.SalsSettings().ranks(c) == sizes  # r and r*
        kivi = compress.kivi_layers(c, compress.SalsSettings(skip="0"))
        assert kivi == ({0} if heads >= 16 else set())  # of narrow keys latents


@pytest.mark.parametrize("method, options", [("dense", {}), ("lrqk", LRQK)])
def test_too_little_memory_says_what_would_fit(method, options, monkeypatch):
    """To the byte; where the model runs on the CPU host memory counts."""
    model, settings = tiny_model(), compress.settings_from(method, options)
    row = sum(
        c.bytes_formula() + c.bytes_host()
        for c in make_engine(model, method, 1, 60, **options).caches
    )
    for free, rows, more, tokens in (
        (row, 1, 2, 30),
        (2 * row - 1, 1, 2, 59),
        (row * 5 // 2, 2, 4, 37),
    ):
        monkeypatch.setattr(generate, "free_memory", lambda device, free=free: free)
        generate.check_memory(model, method, settings, {}, rows, 60)
        with pytest.raises(
            UserError, match=f"memory.* {rows} rows or {tokens} tokens a row would fit"
        ):
            generate.check_memory(model, method, settings, {}, more, 60)


@pytest.mark.parametrize("own, spins", [({}, "1000"), ({"OMP_WAIT_POLICY": "passive"}, "0")])
def test_a_start_imports_no_transformers_and_lets_waiting_threads_spin_little(
    own, spins, monkeypatch
):
    """Unless a user says how."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # which this process has set
    code = "import generate, calibrate, sys; assert 'transformers' not in sys.modules"
    run = python("-c", code, OMP_DISPLAY_ENV="VERBOSE", **own)
    # nothing where torch has another OpenMP
    said = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr)
    assert run.returncode == 0 and set(said) <= {spins}


def test_json_is_the_last_line_and_complete(cli):
    """Of a cache that lies in two memories."""
    names = """method settings model device dtype prompt_tokens new_tokens token_ids text prefill_s
        first_token_s decode_tokens_per_s cache_bytes_measured cache_bytes_formula cache_bytes_dense
        cache_bytes_host miss_rate bytes_read_per_step peak_memory_bytes capture_s seed versions"""
    line = "generate --prompt 30 --prompt 30 --batch_size 3 --max_new_tokens 9 --ignore_eos"
    report = cli.json(f"{line} --method lrqk --rank 8 --k 10 --recent 4")
    assert report["prompt_tokens"] == [30, 30, 30] and report["new_tokens"] == [9, 9, 9]
    ids = report["token_ids"]
    # two random prompts
    assert [len(row) for row in ids] == [9, 9, 9] and ids[0] == ids[2] != ids[1]
    assert report["settings"]["rank"] == 8 and report["seed"] == 0
    assert 50e6 < report["peak_memory_bytes"] < 1e12
    assert set(names.split()) <= set(report)
    assert (
        0 < report["miss_rate"] < 1 and f"miss_rate             {report['miss_rate']}\n" in cli.err
    )
    assert (
        report["cache_bytes_host"] == report["cache_bytes_dense"] > report["cache_bytes_measured"]
    )
    plain = cli.json(line)
    assert plain["cache_bytes_host"] == 0 and plain["miss_rate"] is None
    assert "cache_bytes_host" not in cli.err and "every token is attended" not in cli.err


def test_the_first_token_waits_for_prompt_and_questions(cli, monkeypatch):
    append, slow = generate.Engine.append, 0.25
    monkeypatch.setattr(generate.Engine, "append", lambda *args: time.sleep(slow) or append(*args))
    line = "generate --prompt 'once upon a time' --max_new_tokens 2 --ignore_eos"
    plain, asked = cli.json(line), cli.json(f"{line} --ask 'who is it' --ask where?")
    assert plain["first_token_s"] >= plain["prefill_s"] >= slow
    assert asked["first_token_s"] >= asked["prefill_s"] > 2 * slow
    assert len(asked["prompt_tokens"]) == len(asked["token_ids"]) == len(asked["text"]) == 2
    assert min(asked["prompt_tokens"]) > plain["prompt_tokens"][0]  # with the question
    # A step reads what the row holds: the prompt, the last question and its answer.
    lengths = [report["prompt_tokens"][-1] + report["new_tokens"][-1] for report in (plain, asked)]
    read = [report["bytes_read_per_step"] for report in (plain, asked)]
    assert read[1] * lengths[0] == read[0] * lengths[1]


def test_a_prompt_is_read_once_and_asked_often(cli, tmp_path):
    """From a file, and in a batch: as if each question were the only one after the prompt."""
    line = "generate --method sals --prompt 'once upon a time'"
    end = f"--max_new_tokens 6 --save_cache {tmp_path}/c"
    alone = [cli.json(f"{line} --ask '{ask} is it' {end}") for ask in ("who", "where")]
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6"
    both = cli.json(f"{line} --ask 'who is it' --ask 'where is it' --batch_size 3 {end}")
    again = cli.json(f"{load} --ask 'where is it'")
    twice = cli.json(f"{load} --ask 'who is it' --batch_size 2")
    went_on, never_left = (
        cli.json(f"{load} --save_cache {tmp_path}/d"),
        cli.json(f"{line} --max_new_tokens 6"),
    )
    loaded, saved_again = (load_file(tmp_path / name) for name in "cd")
    assert loaded.keys() == saved_again.keys()
    assert all(loaded[name].equal(saved_again[name]) for name in loaded)
    for name in ("token_ids", "text", "prompt_tokens"):
        assert both[name] == [*alone[0][name], *alone[1][name], *alone[0][name]]
        assert again[name] == alone[1][name] and twice[name] == alone[0][name] * 2
        assert went_on[name] == never_left[name]
    # no dense one has it
    assert cli(f"{load} --ask 'who is it'")[0] == 0 and cli.out.count("sals:") == 1
    # whose cache is not the one saved
    assert cli(f"{line} --ask 'who is it' {end}")[1].count("dense:") == 1
    assert cli.json(f"{load} --ask 'where is it'")["text"] == alone[1]["text"]


def test_a_cache_of_another_run_is_refused(cli, folder, tmp_path):
    line, file = "generate --max_new_tokens 4 --method lrqk --recent 8", tmp_path / "c"

    def told(options: str) -> str:
        return cli.refusal(f"{line} --k 20 --load_cache {file} {options}")

    assert cli(f"{line} --k 20 --prompt 60 --prompt 9 --save_cache {file}")[0] == 0
    assert cli(f"{line} --k 20 --load_cache {file} --max_seq_length 99")[0] == 0
    assert "of another method (lrqk, here dense)" in cli.refusal(f"generate --load_cache {file}")
    assert "of another settings (" in told("--k 9")
    dtypes = "of another dtype (torch.float32, here torch.bfloat16); load it with the options that"
    assert dtypes in told("--dtype bf16")
    assert "needs a --batch_size of 2, not 1; raise --batch_size" in told("--batch_size 1")
    assert "needs a --max_seq_length of 60, not 40; raise --max_seq_length" in told(
        "--max_seq_length 40"
    )
    assert "need 64 positions, not 62; raise --max_seq_length" in told("--max_seq_length 62")
    assert "has the prompt; give --ask" in told("--prompt 5")
    assert "--chat needs a --prompt" in told("--system brief")
    assert f"{file}: " in cli.refusal(f"generate --prompt 5 --save_cache {file}/c")
    assert "No such file" in cli.refusal(f"generate --load_cache {file}.d")
    put_weight(folder, NORM, load_file(folder / WEIGHTS)[NORM] + 1)
    assert "of another fingerprint (" in told("")
    truncate(file)
    assert "truncated or damaged" in told("")
    # A budget that was cut by the cache is another in a larger one.
    assert cli(f"{line} --k 99 --prompt 60 --save_cache {file}")[0] == 0
    assert "every token is attended" in cli.err
    larger = f"{line} --k 99 --load_cache {file} --max_seq_length 150"
    assert "saved with --max_seq_length 64, for which" in cli.refusal(larger)
    assert sorted(tmp_path.iterdir()) == [file, folder]


@needs_cuda
@pytest.mark.parametrize("method", ["dense", "sals"])
def test_commands_run_on_cuda(method, cli):
    report = cli.json(
        f"generate --device cuda --method {method} --prompt 60 --ignore_eos --max_new_tokens 8"
    )
    assert report["device"] == torch.cuda.get_device_name() and report["dtype"] == "bfloat16"
    assert report["capture_s"] > 0 and report["new_tokens"] == [8]
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"]


def test_prompts_from_text_file_and_stdin_agree(cli, folder, tmp_path):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    text, file, lengths = "some words\nand caf\u00e9", tmp_path / "prompt.txt", []
    raw = "\ufeff" + text.replace("\n", "\r\n")
    file.write_bytes(raw.encode())
    for chat in ("", "--chat"):
        line = f"generate {chat} --max_new_tokens 12 --prompt"
        first, *others = (
            cli.json(f"{line} '{prompt}'", stdin=raw) for prompt in (text, f"@{file}", "-")
        )
        for name in ("prompt_tokens", "token_ids", "text"):
            assert all(other[name] == first[name] for other in others)
        lengths += first["prompt_tokens"]
    # "?" in the place of BOS
    assert lengths[0] == len(load_tokenizer(NANO).encode(text)) == lengths[1]
    chat = generate.LLM(folder, device="cpu").chat([{"role": "user", "content": text}], 12)
    assert [chat.token_ids] == first["token_ids"] and [chat.text] == first["text"]


@over("method", lambda tests: tests.METHODS)
def test_help_names_every_method_and_setting(method, cli):
    code, out, _ = cli(f"generate --method {method} --help")
    assert code == 0 and f"\n  {method} " in out
    for f in dataclasses.fields(method_named(method).settings):
        assert f"--{f.name}" in out and f.metadata["help"].split()[-1] in out


def test_a_script_called_by_a_symbolic_link_finds_nano(tmp_path):
    (tmp_path / "link.py").symlink_to(ROOT / "generate.py")
    assert runpy.run_path(str(tmp_path / "link.py"))["NANO"] == NANO


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_random_weights_take_prompts_beyond_the_trained_length(method, cli, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config(max_positions=64))
    line = f"generate --random_weights tiny --method {method} --prompt 100"
    line += " --batch_size 2 --max_new_tokens 4"
    report = cli.json(line)
    assert report["prompt_tokens"] == [100, 100] and [len(ids) for ids in report["token_ids"]] == [
        4,
        4,
    ]


def test_fit_writes_artifacts_and_goes_on_where_a_method_cannot_take_the_model(
    cli, folder, monkeypatch
):
    methods = calibrate.fits_of("all").keys()
    for method in fitted(sys.modules[__name__]):
        compress.artifact_path(folder, method).unlink()
    size, model = "--windows 4 --window 64", load_model(folder, CPU, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "fit_elitekv", mock.Mock(side_effect=UserError("not this model")))
        code, out, err = cli(f"fit --method all {size} --dtype bf16")
        assert code == 0 and "elitekv: not fitted" in err
        for sentence in (
            r"sals.safetensors: A latent of a quarter of the key dims keeps \d\d\.\d% of",
            r"loki.safetensors: A quarter of a head's components hold \d\d\.\d% of the variance",
            r"fdc.safetensors: At a rate of [\d.]+ a head keeps [\d.]+ dims of its queries",
        ):
            assert re.search(sentence, out)
        assert cli(f"fit --method elitekv {size}")[0] == 2
    assert {path.stem for path in folder.glob("*.safetensors")} == {"model", *methods} - {"elitekv"}
    code, out, _ = cli(f"fit --method elitekv {size}")
    assert code == 0 and re.search(
        r"rotates \d+ pairs of dims, beside a latent of \d+ numbers", out
    )
    for method in methods:
        assert load_artifact(folder, method, model)
    tensors = load_artifact(folder, "sals", model)
    assert tensors["0.query_basis"].shape == tensors["0.key_basis"].shape == (64, 40)
    assert cli("generate --method sals --prompt hello --max_new_tokens 3")[0] == 0
    assert cli(f"fit --method sals {size} --max_rank 0.25")[0] == 0
    assert load_artifact(folder, "sals", model)["0.query_basis"].shape == (64, 16)


def test_fit_out_makes_a_folder_of_links(cli, folder, tmp_path):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "cache" / "fits"
    for method in ("loki", "sals"):
        assert cli(f"fit --method {method} --out {out} --windows 2 --window 4")[0] == 0
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    assert (out / WEIGHTS).is_symlink() and not (out / "loki.safetensors").is_symlink()
    assert (
        cli(f"generate --checkpoint {out} --method loki --prompt hello --max_new_tokens 3")[0] == 0
    )
    with mock.patch.object(os, "access", lambda *_: False):
        assert f"written into {folder}; give --out FOLDER" in cli.refusal("fit --method loki")


def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(cli, monkeypatch):
    monkeypatch.setattr(model_file, "free_memory", lambda device: 10**5)
    for line in ("generate --random_weights llama-2-7b --prompt 5", "generate"):
        assert "the weights need" in cli.refusal(line)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(cli, monkeypatch):
    monkeypatch.setattr(generate, "free_memory", lambda device: 10**9)
    line = "generate --prompt 5 --batch_size 2147483647"
    assert "the dense cache of 2147483647 rows" in cli.refusal(line)


@over("method", fitted)
def test_an_artifact_is_held_to_the_tensors_of_its_method(method, checkpoint, tmp_path):
    model = load_model(checkpoint, CPU, torch.float32)
    good = artifact_of(method, model)

    def reloaded(tensors: dict) -> dict:
        put_artifact(tmp_path, method, tensors, model)
        return load_artifact(tmp_path, method, model)

    for name, (kind, *shape) in method_named(method).tensors(model.config).items():
        tensor = good[name]
        wrong = [(f"{name} is missing", None), (rf"{name} is \[", torch.stack((tensor, tensor)))]
        for other in (torch.complex64, torch.int8, torch.int32 if kind is float else torch.float32):
            wrong.append(("numbers", tensor.to(other)))
        if kind is float:
            wrong.append(("not finite", tensor * torch.nan))
        elif shape:
            wrong.append(("is no order", tensor + 1))
        for message, instead in wrong:
            with pytest.raises(UserError, match=message):
                reloaded(good | {name: instead})
    for tensors in (good, compress.random_artifact(method, model.config)):
        assert reloaded(tensors).keys() == tensors.keys()


def test_files_are_replaced_together_or_not_at_all(folder, tmp_path):
    """A full disk, or Ctrl-C, leaves the old files."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    tensors = {"a": torch.zeros(2)}

    def replace_two(target: Path) -> None:
        with compress.replacing(target, "two") as partial:
            (partial / "config.json").write_text("{}")
            save_artifact(tensors, partial / WEIGHTS, {})

    for mistake, says in (
        (OSError("No space left on device"), "No space left"),
        (KeyboardInterrupt(), "^$"),
    ):
        told = type(mistake)

        def half(path, data, mistake=mistake):
            path.write_text("half")
            raise mistake

        with mock.patch.object(Path, "write_bytes", half):
            for target in (folder, tmp_path / "new"):
                with pytest.raises(told, match=says):
                    replace_two(target)
            with pytest.raises(told, match=says):
                save_artifact(tensors, folder / "b.safetensors", {})
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        assert not (tmp_path / "new").exists()
    replace_two(folder)
    assert set(folder.iterdir()) == before.keys()
    assert (folder / WEIGHTS).read_bytes() != before[folder / WEIGHTS]
    (tmp_path / "plain").write_text("")
    # all can read it
    assert (folder / WEIGHTS).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_two_that_write_one_file_do_not_meet(tmp_path):
    (killed := tmp_path / "a.killed.partial").mkdir()
    os.utime(killed, (0, 0))
    with calibrate.replacing(tmp_path, "a") as first:
        (first / "a").write_text("first")
        with calibrate.replacing(tmp_path, "a") as second:
            (second / "a").write_text("second")
        assert (tmp_path / "a").read_text() == "second"
    assert (tmp_path / "a").read_text() == "first" and list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_the_index_names_the_files(folder):
    tensors, before = (
        load_file(folder / WEIGHTS),
        load_model(folder, CPU, torch.float32).state_dict(),
    )
    (folder / WEIGHTS).unlink()
    index = dict(zip(tensors, itertools.cycle("ab"), strict=False))
    for file in "ab":  # what it does not name there is old
        part = {name: t if index[name] == file else t + 1 for name, t in tensors.items()}
        save_file(part | {"old": torch.ones(2)}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    after = load_model(folder, CPU, torch.float32).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_tied_matrix_may_have_the_name_of_the_output(folder):
    expected = load_model(folder, CPU, torch.float32).output.weight.clone()
    put_weight(folder, "model.embed_tokens.weight", None)
    put_weight(folder, "lm_head.weight", expected)
    model = load_model(folder, CPU, torch.float32)
    assert model.output.weight is model.tok_embeddings.weight and torch.equal(
        model.output.weight, expected
    )
    # the files may hold both, and they count
    put_weight(folder, "model.embed_tokens.weight", expected + 1)
    model = load_model(folder, CPU, torch.float32)
    assert torch.equal(model.output.weight, expected) and not model.config.tied
    assert torch.equal(model.tok_embeddings.weight, expected + 1)


def test_streams_and_locales_that_know_other_characters(cli, tmp_path, monkeypatch):
    """Files are UTF-8 in every locale."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        calibrate.save_csv(tmp_path / "t.csv", ["caf\u00e9"], [{"caf\u00e9": "\udce9"}])
        assert generate.read_text(tmp_path / "t.csv") == "caf\u00e9\n?\n"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    for errors in ("strict", "surrogateescape"):  # as the locale has it
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors))
        assert "not UTF-8" in cli.refusal("generate --prompt -")
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    generate.run_command(lambda: print("snow \u2603", flush=True))
    assert stdout.buffer.getvalue() == b"snow ?\n"


def test_the_readmes_first_command_prints_what_the_readme_shows():
    readme = (ROOT / "README.md").read_text()
    assert "python generate.py --method sals" in readme
    # The README shows a CPU's answer.
    run = python("generate.py", "--method", "sals", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    shown = readme.split("```\nQuestion:")[1].split("```")[0]
    assert "Question:" + shown in run.stdout
    took, would_take = re.search(r"took ([\d.]+) MB .*dense would take ([\d.]+)", readme).groups()
    assert re.search(rf"measured +{took} MB\n.*\n.*dense +{would_take} MB", run.stderr), run.stderr


def test_the_readmes_own_method_runs(cli):
    code = (ROOT / "README.md").read_text().split("```python\n")[2].split("```")[0]
    prompts = [random_ids(n, n) for n in (5, 60, 33)]
    more = [random_ids(20, 100 + n) for n in (5, 60, 33)]
    dense = logits_through(make_engine(tiny_model(), "dense", 3, 80), prompts, more)
    with mock.patch.dict(METHODS):
        exec(code, {"__name__": "keynorm"})
        whole = logits_through(make_engine(tiny_model(), "keynorm", 3, 80, keep=80), prompts, more)
        assert error(whole, dense) < 1e-5
        engine = make_engine(tiny_model(), "keynorm", 3, 80, keep=24)
        few = logits_through(engine, prompts, more)
        assert error(few[:20, 0], dense[:20, 0]) < 1e-5  # 5 + 19 tokens fit
        assert error(few[1:, 1], dense[1:, 1]) > 1e-2  # 60 do not
        for cache in engine.caches:
            assert (
                cache.bytes_stored()
                == cache.bytes_formula()
                == compress.dense_bytes(cache.context) * 24 // 80
            )
        run = "generate --method keynorm --keep 24 --ignore_eos --prompt hello --max_new_tokens 4"
        report = cli.json(run)
    assert report["settings"]["keep"] == 24 and len(report["token_ids"][0]) == 4
    assert "keynorm" not in METHODS


def test_the_top_works_without_extras(tmp_path):
    """In a copy of the tree that lacks the folder. A file that is there and broken says so where
    needed."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    tests = "run_from_the_command_line and dense or help_names or refuse_what or bytes_read"
    run = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_all.py", "-k", tests, cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout
    names = "import compress; assert compress.method_names() == [*compress.METHODS]"
    assert python("-c", names, cwd=tmp_path).returncode == 0
    (tmp_path / "extras").mkdir()
    (tmp_path / "extras" / "baselines.py").write_text("import nowhere")
    look_up = "import compress; [compress.method_named(name) for name in ('sals', 'h2o')]"
    told = python("-c", look_up, cwd=tmp_path).stderr
    assert "'h2o'" not in told and told.endswith("No module named 'nowhere'\n")


def test_the_names_in_the_docs_are_in_the_code():
    methods, readme = (ROOT / "docs" / "methods.md").read_text(), (ROOT / "README.md").read_text()
    code = "".join(path.read_text() for path in (*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")))
    if not (ROOT / "extras").is_dir():
        methods = re.sub(r"## Comparison rows.*?\n(?=## )", "", methods, flags=re.S)
        readme = re.sub(
            r"Everything else is in `extras/`.*?\n(?=Delete `extras/`)", "", readme, flags=re.S
        )
    for name in re.findall(r"`(_?[a-z]+_\w+|[A-Z][a-z]\w+)(?:\.(\w+))?`", methods + readme):
        assert all(re.search(rf"\b{part}\b", code) for part in name if part), name


def test_the_exercises_name_functions_and_selections_that_there_are():
    """Those of docs/methods.md: delete a body, and the tests that `-k` selects say when it is
    back."""
    row = r"^\| (\d+) \| `(\w+)`.* \| `-k (\w+)` \|"
    exercises = re.findall(row, (ROOT / "docs/methods.md").read_text(), flags=re.M)
    tests = [*STEPS, *(name for name in globals() if name.startswith("test_"))]
    for _, function, selection in exercises:
        assert any(
            callable(getattr(part, function, 0)) for part in (compress, kernels, calibrate)
        ), function
        assert any(selection in name for name in tests), selection
    assert [int(number) for number, *_ in exercises] == [*range(1, 11)]


def test_the_docs_key_format_passes_its_own_test_on_the_kernel(tmp_path):
    code = (ROOT / "docs/methods.md").read_text().split("```python\n")[1].split("```")[0]
    path = tmp_path / "scaled.py"
    path.write_text(code)  # Triton reads a kernel's source from its file
    spec = importlib.util.spec_from_file_location("scaled", path)
    with mock.patch.dict(kernels.KEYS):
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        module.test_scaled_keys_are_attended_as_in_pytorch()
    assert "scaled" not in kernels.KEYS


def test_sampling_options_and_the_seed_reach_the_draw(cli):
    def ids(options: str) -> list[list[int]]:
        return cli.json(f"generate --prompt hello --max_new_tokens 12 --ignore_eos {options}")[
            "token_ids"
        ]

    hot = "--temperature 50"
    assert ids(f"{hot} --seed 1") == ids(f"{hot} --seed 1") != ids(f"{hot} --seed 2")
    assert ids(f"{hot} --top_k 1") == ids(f"{hot} --top_p 1e-6") == ids("") != ids(hot)


def test_rows_stop_one_by_one_at_the_models_stop_token(cli, folder, monkeypatch):
    line, prefill, prompts = "generate --max_new_tokens 20", generate.Engine.prefill, []
    batch = f"{line} --prompt hello --prompt 'and so on' --prompt who"
    free = cli.json(f"{batch} --ignore_eos")["token_ids"]
    stop = free[0][5]
    edit_json(folder / "config.json", eos_token_id=stop)
    stopped = [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert cli.json(batch)["token_ids"] == stopped and 20 in map(len, stopped)
    assert cli.json(f"{batch} --ignore_eos")["token_ids"] == free
    # A follow-up goes on after it without reading again.
    monkeypatch.setattr(
        generate.Engine, "prefill", lambda *args: prompts.append(args) or prefill(*args)
    )
    llm = generate.LLM(folder, device="cpu", max_seq_length=80)
    answer = llm.generate("hello", 20)
    assert answer.finish_reason == "stop" and llm.token_ids[0][-1] == stop != answer.token_ids[-1]
    llm.generate(" how are you", 4, follow=True)
    assert len(prompts) == 1


def test_the_readmes_python_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec((ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0], {})
    said = capsys.readouterr().out
    assert (
        "number for silent lantern is 73308" in said
        and said.count("Answer: The magic number for") == 2
    )


def test_an_answer_of_one_line_may_begin_with_a_new_one():
    llm = generate.LLM(max_seq_length=256, device="cpu")
    llm.prefill(
        "The magic number for green river is 48213. The magic number for red hill is 90417."
    )
    answer = llm.ask("Question: What is the magic number for green river?")
    assert answer.text == "Answer: The magic number for green river is 48213."


def test_a_report_counts_prompts_and_what_they_follow(checkpoint):
    llm, texts = generate.LLM(checkpoint, device="cpu", max_seq_length=64, batch_size=3), [""] * 3
    for call, fault in (
        (llm.report, "nothing to report yet"),
        (lambda: llm.ask(["who?"]), "prefill or load it first"),
        (lambda: llm.fork(0, 2), "holds nothing yet"),
        (lambda: llm.save("nowhere"), "holds nothing yet"),
    ):
        with pytest.raises(UserError, match=fault):
            call()
    for prompts, fault in (([], "there is no prompt"), ([[]], "no tokens")):
        with pytest.raises(UserError, match=fault):
            llm.generate(prompts)
    for follow, prompts in ((False, ["hello", "hello there", "who"]), (True, [" world"] * 3)):
        outputs = llm.generate(prompts, 4, ignore_eos=True, follow=follow)
        for row, output in enumerate(outputs):
            texts[row] += prompts[row] + output.text
        # with the space before a first word
        assert [llm.tokenizer.decode(ids) for ids in llm.token_ids] == texts
        lengths = [len(ids) for ids in llm.token_ids]
        assert llm.engine.pos.tolist() == [n - 1 for n in lengths]
        assert [output.prompt_tokens + 4 for output in outputs] == lengths
        report = llm.report()
        assert (
            report["prompt_tokens"] == [n - 4 for n in lengths] and report["new_tokens"] == [4] * 3
        )
        assert report["text"] == [output.text for output in outputs]
        assert report["bytes_read_per_step"] == sum(lengths) * 4 * 2 * 64 * 4
        llm.run.decode_s = 0.75
        # 3 rows, a step each quarter of a second
        assert llm.report()["decode_tokens_per_s"] == 12.0
    with pytest.raises(UserError, match="4 prompts cannot follow the 3 rows"):
        llm.generate(["a"] * 4, follow=True)
    with pytest.raises(UserError, match="4 prompts are more than 3 rows; set a larger batch_size"):
        llm.prefill(["a"] * 4)


def test_a_stream_that_is_left_early_is_followed_without_reading_again(checkpoint, monkeypatch):
    llm, prefill = generate.LLM(checkpoint, device="cpu", max_seq_length=64), mock.Mock()
    pieces = llm.stream("hello there", 8, ignore_eos=True)
    shown = next(pieces) + next(pieces)
    assert llm.tokenizer.decode(llm.token_ids[0]) == "hello there" + shown  # at each token
    pieces.close()
    assert llm.tokenizer.decode(llm.token_ids[0]) == "hello there" + shown
    assert llm.report()["text"] == [shown] and llm.report()["new_tokens"] == [2]
    assert len(llm.token_ids[0]) == int(llm.engine.pos[0])
    monkeypatch.setattr(generate.Engine, "prefill", prefill)
    more = llm.generate([[]], 6, ignore_eos=True, follow=True)[0]
    assert not prefill.called
    monkeypatch.undo()
    fresh = generate.LLM(checkpoint, device="cpu", max_seq_length=64)
    whole = fresh.generate("hello there", 8, ignore_eos=True)
    assert whole.token_ids[2:] == more.token_ids and whole.text == shown + more.text


# ---- the Python API (`LLM`)


def small_llm(checkpoint: Path, **options) -> generate.LLM:
    return generate.LLM(checkpoint, **{"device": "cpu", "max_seq_length": 64, **options})


PROMPT = "the magic number for silent lantern"


def test_each_call_and_each_row_draws_for_itself(checkpoint, tmp_path):
    """The token after a prompt is drawn when decoding starts: not when it is read, saved or
    forked."""
    llm = small_llm(checkpoint, batch_size=8)
    assert len({llm.generate(PROMPT, 1, temperature=2.0).token_ids[0] for _ in range(8)}) > 4
    llm.prefill(PROMPT)
    llm.save(tmp_path / "read")
    llm.fork(0, 8)
    outputs = llm.generate([[]] * 8, 1, temperature=2.0, follow=True)
    assert len({output.token_ids[0] for output in outputs}) > 4
    greedy = small_llm(checkpoint).generate(PROMPT, 4)
    llm.load(tmp_path / "read")
    assert llm.generate([[]], 4, follow=True)[0].token_ids == greedy.token_ids
    firsts = set()
    for seed in range(6):
        llm = small_llm(checkpoint, seed=seed)
        llm.load(tmp_path / "read")
        firsts.add(llm.generate([[]], 1, temperature=2.0, follow=True)[0].token_ids[0])
    assert len(firsts) > 3


def test_random_numbers_are_the_llms_own(checkpoint):
    def draws(llm: generate.LLM) -> list[int]:
        return llm.generate(PROMPT, 8, temperature=2.0, ignore_eos=True).token_ids

    after = []
    for seed in (123, 999):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        llm = small_llm(checkpoint)
        first, second = draws(llm), draws(llm)
        assert torch.get_rng_state().equal(state)
        after.append((first, second))
    assert after[0] == after[1] and first != second
    llm = small_llm(checkpoint)
    assert draws(llm) == first
    draws(small_llm(checkpoint))  # another one resets nothing
    assert draws(llm) == second
    assert draws(small_llm(checkpoint, seed=1)) != first


@pytest.mark.parametrize(
    "use",
    [
        lambda llm, path: "".join(llm.stream("who", 4)),
        lambda llm, path: llm.generate("who", 4),
        lambda llm, path: llm.prefill("who"),
        lambda llm, path: llm.ask("who", 4),
        lambda llm, path: llm.fork(0, 1),
        lambda llm, path: llm.crop(2),
        lambda llm, path: llm.save(path),
        lambda llm, path: llm.load(path),
    ],
)
def test_a_stream_ends_when_something_else_uses_the_cache(use, checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill("who")
    llm.save(tmp_path / "cache")
    pieces = llm.stream(PROMPT, 12, ignore_eos=True)
    assert next(pieces) + next(pieces)
    use(llm, tmp_path / "cache")
    held = [list(ids) for ids in llm.token_ids]
    assert list(pieces) == [] and llm.token_ids == held
    fresh = small_llm(checkpoint)
    again = [each.generate(PROMPT, 6).token_ids for each in (llm, fresh)]
    assert again[0] == again[1]


BAD_ARGUMENTS = [  # of LLM
    ({"dtype": "float16"}, "dtype float16: choose from auto, bf16, fp16, fp32"),
    ({"weights": "int4"}, "weights int4: choose from None, int8"),
    ({"device": "mps"}, "device mps: choose from cpu, cuda"),
    ({"seed": None}, "seed None: give a whole number"),
    ({"seed": -1}, "seed -1: give a whole number in"),
    ({"batch_size": -1}, "batch_size -1: give a whole number in"),
    ({"batch_size": 2.5}, "batch_size 2.5: give a whole number in"),
    ({"max_seq_length": 0}, "max_seq_length 0: give a whole number in"),
    ({"max_seq_length": 600}, "more than the model's 512; shorten max_seq_length"),
    ({"model": "x"}, "model is not a setting of dense; its settings are: none"),
    ({"method": "sals", "rank": 2}, "rank 2: give a number in"),
    ({"method": "magic"}, "unknown method 'magic'"),
    ({"use_kernels": True}, "use use_kernels=False"),
]
BAD_CALLS = [  # of its methods
    ({"top_p": 0.0}, "top_p 0.0: give a number in (0, 1]"),
    ({"top_k": -1}, "top_k -1: give a whole number in"),
    ({"temperature": -1.0}, "temperature -1.0: give a number in [0, inf)"),
    ({"temperature": math.nan}, "temperature nan: give a number in"),
    ({"temperature": "hot"}, "temperature hot: give a number in"),
    ({"max_new_tokens": -3}, "max_new_tokens -3: give a whole number in"),
    ({"max_new_tokens": 100}, "raise max_seq_length"),
]


@pytest.mark.parametrize("options, message", BAD_ARGUMENTS)
def test_an_llm_refuses_what_the_command_line_refuses_in_words_of_python(
    options, message, checkpoint, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=re.escape(message)) as refusal:
        small_llm(checkpoint, **options).generate(PROMPT, 1)
    assert "--" not in str(refusal.value)


@pytest.mark.parametrize("options, message", BAD_CALLS)
def test_a_call_refuses_what_the_command_line_refuses(options, message, checkpoint):
    llm = small_llm(checkpoint)
    llm.prefill(PROMPT)
    for call in (llm.generate, llm.ask, lambda text, **more: list(llm.stream(text, **more))):
        with pytest.raises(UserError, match=re.escape(message)) as refusal:
            call("who is it", **options)
        assert "--" not in str(refusal.value)


def test_a_command_in_an_error_of_python_can_be_run(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "a--b")
    compress.artifact_path(tmp_path / "a--b", "sals").unlink()
    with pytest.raises(UserError) as refusal:
        small_llm(tmp_path / "a--b", method="sals").generate(PROMPT, 1)
    command = f"python calibrate.py fit --checkpoint {tmp_path}/a--b --method sals"
    assert str(refusal.value).startswith(f"{tmp_path}/a--b/") and str(refusal.value).endswith(
        command
    )


def test_an_output_outlives_its_llm(checkpoint):
    def answer() -> generate.Output:
        llm = small_llm(checkpoint)
        alive.append(weakref.ref(llm.model))
        made = llm.generate(PROMPT, 3, ignore_eos=True)
        next(llm.stream(PROMPT, 3, ignore_eos=True))  # dropped: it keeps nothing alive
        return made

    alive = []
    gc.disable()  # memory is free at once
    output = answer()
    gc.enable()
    assert alive[0]() is None
    stored = pickle.dumps(output)
    assert pickle.loads(stored) == output and len(stored) < 1000
    assert set(dataclasses.asdict(output)) == {
        "text",
        "token_ids",
        "prompt_tokens",
        "finish_reason",
    }
    assert output.finish_reason == "length" and len(output.token_ids) == 3


def test_a_prompt_is_a_text_ids_or_messages(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    llm = small_llm(folder)
    messages = [{"role": "user", "content": PROMPT}]
    kinds = [PROMPT, messages]
    ids = [llm.encode(PROMPT), llm.encode(messages)]
    expected = [small_llm(folder).generate(each, 3, ignore_eos=True).token_ids for each in ids]
    for prompt, own_ids, made in zip(kinds, ids, expected, strict=True):
        forms = [prompt, own_ids, tuple(own_ids), np.array(own_ids), torch.tensor(own_ids)]
        forms += [list(np.array(own_ids)), list(torch.tensor(own_ids, dtype=torch.int32))]
        for form in forms:
            # one prompt, one output
            assert llm.generate(form, 3, ignore_eos=True).token_ids == made
            outputs = llm.generate([form], 3, ignore_eos=True)
            assert [output.token_ids for output in outputs] == [made]
            said = "".join(llm.stream(form, 3, ignore_eos=True))
            assert said == outputs[0].text
        llm.prefill(prompt)
        assert llm.token_ids == [own_ids]
    assert llm.chat(messages, 3, ignore_eos=True).token_ids == expected[1]
    assert llm.generate(np.array([[5, 6, 7], [8, 9, 10]]), 2, ignore_eos=True)[1].prompt_tokens == 3
    for wrong, message in (
        ([5, -6, 7], "token id -6 is outside the model's vocabulary of 4096"),
        (torch.tensor([5, 4096]), "token id 4096 is outside"),
        ([5.5], "token ids are whole numbers, not 5.5"),
        ([True], "token ids are whole numbers, not True"),
        (7, "a prompt is a text, token ids or a chat's messages, not int"),
        ([None], "a prompt is a text, token ids or a chat's messages, not None"),
        ([{"role": "user"}], "a chat is a list of messages"),
        ([{"content": "who"}], "a chat is a list of messages"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            llm.generate(wrong, 2)
    for wrong in ("hi", [], ["hi"], {"role": "user", "content": "hi"}):
        with pytest.raises(UserError, match="a chat is a list of messages"):
            llm.chat(wrong)
    with pytest.raises(UserError, match="stream takes one prompt"):
        llm.stream(["a", "b"])


def test_random_weights_take_ids_and_no_text():
    llm = generate.LLM(tiny_config(), device="cpu", max_seq_length=64)
    output = llm.generate([5, 6, 7], 3)
    assert output.text == "" and len(output.token_ids) == 3
    with pytest.raises(UserError, match="no tokenizer; give token ids"):
        llm.generate("text", 3)


def test_no_new_tokens_read_alone(checkpoint):
    llm = small_llm(checkpoint)
    output = llm.generate(PROMPT, 0)
    report = llm.report()
    assert output.token_ids == [] and output.finish_reason == "length"
    assert report["decode_tokens_per_s"] is None and report["first_token_s"] is None
    assert int(llm.engine.pos[0]) == output.prompt_tokens
    whole = small_llm(checkpoint).generate(PROMPT, 5)
    assert llm.generate([[]], 5, follow=True)[0].token_ids == whole.token_ids


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_prompts_are_served_in_groups_and_rows_without_one_are_idle(method, checkpoint, tmp_path):
    texts = ["who", "hello there", "the magic number", "and so on", "where is it"]
    alone = {}
    for text in texts:
        alone[text] = small_llm(checkpoint, method=method).generate(text, 5, ignore_eos=True)
    llm = small_llm(checkpoint, method=method)
    for group in (texts[:3], texts, texts[3:], texts[1:2]):
        outputs = llm.generate(group, 5, ignore_eos=True)
        assert len(llm.token_ids) == 3  # rows, by the first call
        assert outputs == [alone[text] for text in group]
        assert llm.report()["token_ids"] == [output.token_ids for output in outputs]
    assert llm.engine.pos[1:].tolist() == [0, 0] and llm.token_ids[1:] == [[], []]
    assert llm.held_memory().tokens == len(llm.token_ids[0]) - 1
    llm.save(tmp_path / "cache")
    assert generate.saved_facts(tmp_path / "cache").lengths == [len(llm.token_ids[0]) - 1]
    # Beside others that go on, a row that is idle keeps its ids, and is read again when it is
    # followed.
    llm.generate(texts[:3], 5, ignore_eos=True)
    llm.generate(" then", 50, ignore_eos=True, follow=True)
    expected = small_llm(checkpoint, method=method)
    expected.prefill([list(ids) for ids in llm.token_ids])
    again = [
        each.generate([" so"] * 3, 4, follow=True, ignore_eos=True) for each in (llm, expected)
    ]
    assert again[0] == again[1]


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_each_question_is_answered_from_the_document(method, checkpoint):
    """Whatever the number of rows; and the document is there afterwards."""
    document = "once upon a time there was a green river"
    questions = ["who is it", "where is it", "what is the magic number for green river"]
    size = {"method": method, "max_seq_length": 128}
    expected = []
    for question in questions:
        llm = small_llm(checkpoint, **size)
        llm.prefill(document)
        expected.append(llm.generate(f"\n{question}", 8, follow=True))
    for rows in (1, 2, 3, 4):
        llm = small_llm(checkpoint, batch_size=rows, **size)
        llm.prefill(document)
        before = [list(ids) for ids in llm.token_ids], llm.engine.pos.tolist()
        for _ in range(2):
            with mock.patch.object(
                generate.Engine, "prefill", side_effect=AssertionError("read again")
            ):
                outputs = llm.ask(questions, 8)
            report = llm.report()
            assert [output.prompt_tokens for output in outputs] == report["prompt_tokens"]
            for output, text, answer in zip(outputs, report["text"], expected, strict=True):
                assert answer.token_ids[: len(output.token_ids)] == output.token_ids
                assert output.prompt_tokens == answer.prompt_tokens and output.text == text.strip()
                ends = "length" if output.token_ids == answer.token_ids else "stop"
                assert output.finish_reason == (
                    ends if answer.finish_reason == "length" else "stop"
                )
            assert (llm.token_ids, llm.engine.pos.tolist()) == before
        assert llm.ask(questions[1], 8) == outputs[1]
        assert llm.generate(f"\n{questions[2]}", 8, follow=True) == expected[2]
    with pytest.raises(UserError, match="there is no question"):
        llm.ask([])


@pytest.mark.parametrize("method", ["dense", "sals", "kivi"])
def test_crop_takes_rows_back(method, checkpoint):
    llm = small_llm(checkpoint, method=method)
    ids = llm.encode("once upon a time there was a green river")
    llm.generate(ids, 6, ignore_eos=True)
    for n in (len(ids) + 4, len(ids), 5, 1):
        llm.crop(n)
        held = list(llm.token_ids[0])
        assert len(held) == n and int(llm.engine.pos[0]) == n
        fresh = small_llm(checkpoint, method=method)
        fresh.prefill(held)
        assert error(llm.engine.logits, fresh.engine.logits) < 1e-5
        more = [each.generate([[]], 6, ignore_eos=True, follow=True)[0] for each in (llm, fresh)]
        assert more[0] == more[1]
        llm.crop(n)
    with pytest.raises(UserError, match="n 2: give a whole number in"):
        llm.crop(2)


def test_a_dense_cache_goes_back_without_reading(checkpoint, monkeypatch):
    llm = small_llm(checkpoint)
    llm.generate(PROMPT, 6, ignore_eos=True)
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("all is read again"))
    llm.crop(4)
    assert int(llm.engine.pos[0]) == 4


def test_rows_that_stopped_are_saved_as_their_ids_say(folder, tmp_path):
    """A row that stops runs on while others are made."""
    texts = ["hello", "and so on", "who"]
    llm = small_llm(folder)
    made = llm.generate(texts, 20, ignore_eos=True)
    edit_json(folder / "config.json", eos_token_id=made[0].token_ids[5])
    llm = small_llm(folder)
    outputs = llm.generate(texts, 20)
    assert outputs[0].finish_reason == "stop" and "length" in [o.finish_reason for o in outputs]
    llm.save(tmp_path / "cache")
    again = small_llm(folder)
    again.load(tmp_path / "cache")
    lengths = generate.saved_facts(tmp_path / "cache").lengths
    assert again.token_ids == llm.token_ids and lengths == [len(ids) for ids in llm.token_ids]


def test_saved_rows_fill_more_rows_in_turn(checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill(["who is it", "hello there"])
    llm.save(tmp_path / "cache")
    more = small_llm(checkpoint, batch_size=4)
    more.load(tmp_path / "cache")
    assert more.token_ids == llm.token_ids * 2 and more.token_ids[0] != more.token_ids[1]
    assert error(more.engine.logits, llm.engine.logits.repeat(2, 1)) < 1e-6
    assert more.report()["prompt_tokens"] == [len(ids) for ids in llm.token_ids] * 2
    fewer = small_llm(checkpoint, batch_size=1)
    with pytest.raises(UserError, match="needs a batch_size of 2, not 1; raise batch_size"):
        fewer.load(tmp_path / "cache")


def test_a_reading_that_fails_leaves_no_rows_of_another_prompt(checkpoint):
    llm = small_llm(checkpoint)
    document = llm.encode("once upon a time there was a green river")
    llm.prefill(document)
    with mock.patch.object(generate.Engine, "check_logits", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            llm.generate([7] * (len(document) - 2), 3)
    assert llm.token_ids == [document]
    fresh = small_llm(checkpoint)
    fresh.prefill(document)
    more = [each.generate(" who", 6, ignore_eos=True, follow=True) for each in (llm, fresh)]
    assert more[0] == more[1]


def test_help_describes_every_argument_of_an_llm():
    for call in (generate.LLM, generate.LLM.generate, generate.LLM.ask, generate.LLM.stream):
        for name, parameter in inspect.signature(call).parameters.items():
            if name not in ("self", "settings"):
                assert parameter.annotation is not inspect.Parameter.empty, (call, name)
    described = inspect.getdoc(generate.LLM)
    for name in inspect.signature(generate.LLM).parameters:
        assert re.search(rf"^ *{name} ", described, flags=re.M), name
    for name in ("temperature", "top_k", "top_p", "ignore_eos", "follow"):
        assert f"{name}:" in inspect.getdoc(generate.LLM.generate)


def test_a_loaded_cache_is_saved_again_though_questions_are_asked(cli, tmp_path):
    assert cli(f"generate --prompt hello --max_new_tokens 1 --save_cache {tmp_path}/a")[0] == 0
    load = f"generate --load_cache {tmp_path}/a --max_new_tokens 3"
    assert cli(f"{load} --ask 'who is it' --save_cache {tmp_path}/b")[0] == 0
    saved, again = (load_file(tmp_path / name) for name in "ab")
    assert saved.keys() == again.keys() and all(saved[name].equal(again[name]) for name in saved)


def test_the_command_line_answers_each_question_alone(cli):
    line = "generate --prompt 'once upon a time' --max_new_tokens 6"
    asks = ["who is it", "where is it"]
    alone = [cli.json(f"{line} --ask '{ask}'") for ask in asks]
    both = cli.json(f"{line} --ask '{asks[0]}' --ask '{asks[1]}'")
    for name in ("prompt_tokens", "new_tokens", "token_ids", "text"):
        assert both[name] == [*alone[0][name], *alone[1][name]]


def test_progress_is_on_stderr(capsys):
    progress = generate.Progress("slow", 4)
    progress.tick()
    progress.shown = progress.started = progress.started - 30
    progress.tick()
    assert capsys.readouterr() == ("", "slow 2/4, 30 s left\n")


def test_a_command_ends_with_130_or_one_line_that_moves_no_terminal(capsys):
    for mistake, code in (
        (KeyboardInterrupt(), 130),
        (UserError("first\x1b[31m\n\u202ex\rlast"), 2),
    ):
        with pytest.raises(SystemExit) as stop:
            generate.run_command(mock.Mock(side_effect=mistake))
        assert stop.value.code == code
    assert capsys.readouterr().err == "interrupted\nerror: first?[31m??x?last\n"


def test_what_evaluation_reads_is_never_calibrated_on(cli, tmp_path, monkeypatch):
    names = {f"{i}.py" for i in range(40)}
    for name in names:
        (tmp_path / name).write_text(name * 100)
    # lie in the library's folder, but are not of it
    for name in ("site-packages", "dist-packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text(name * 100)
    held = {name for name in names if zlib.crc32(name.encode()) % 16 == 0}
    assert 0 < len(held) < 10
    read = mock.Mock(side_effect=UserError("read"))
    monkeypatch.setattr(calibrate, "STDLIB", tmp_path)
    monkeypatch.setattr(calibrate, "text_ids", read)
    assert "read" in cli.refusal("fit --method sals")
    _, files, *_ = read.call_args.args
    assert {file.name for file in files} == names - held


def test_ranks_prints_what_its_json_and_its_table_have_and_how_heads_vary(cli, tmp_path):
    """cv_v is of the weights alone; cv_qk is 0 where every head computes the same."""
    figures = cli.json(f"ranks --windows 2 --window 64 --csv {tmp_path}/ranks.csv")
    assert figures["pre"] != figures["post"]
    for name in ("pre", "post"):
        ranks = figures[name]
        assert (
            f"{name}-RoPE, mean {sum(ranks) / 4:.1f}, by layer: {' '.join(map(str, ranks))}\n"
            in cli.out
        )
    names = ["pre", "post", "cv_qk", "cv_v"]
    rows = zip(range(4), *(figures[name] for name in names), strict=True)
    table = [",".join(["layer", *names]), *(",".join(map(str, row)) for row in rows)]
    assert (tmp_path / "ranks.csv").read_text().splitlines() == table
    model = load_model(generate.NANO, CPU, torch.float32)
    for layer, cv in zip(model.layers, figures["cv_v"], strict=True):
        weight = layer.attention.wqkv.weight.split(layer.attention.widths)[2].unflatten(0, (4, -1))
        largest = torch.linalg.matrix_norm(weight, 2).numpy()
        assert cv == pytest.approx(largest.std() / largest.mean(), rel=1e-4) and cv > 0.01
    for layer in model.layers:
        q, k, _ = layer.attention.wqkv.weight.split(layer.attention.widths)
        q.copy_(q[:16].repeat(8, 1)), k.copy_(k[:16].repeat(4, 1))
    values = calibrate.fdc_bases(model, tiny_tokens(1, 32), 512)["qk.values"]
    assert error(values, values[:, :1].expand_as(values)) < 1e-5
