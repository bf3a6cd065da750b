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
from kernels import attend_plain
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
    assert error(out, attend_plain(cache.rope_from(q[40:], 40), keys, values, live)) < 1e-5


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
    out = kernels.attend(q, keys, values, pos, index.to(DEVICE), scale=0.25, kernel=kernel)

    index = index.long().expand(-1, 4, 2, -1).flatten(1, 2)  # [B, Hq, n]
    live = torch.zeros(2, 8, 41, dtype=torch.bool).scatter(2, index.where(index >= 0, 40), True)
    k = keys.vectors.repeat_interleave(2, 1)
    v = values.vectors.repeat_interleave(2, 1)
    assert error(out, attend_plain(q, k, v, live[..., :40].to(DEVICE))) < 1e-5


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
        assert error(out, attend_plain(rotated[None], keys, values, chosen[None])) < bound, n
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


# ------------------------------------------------------------------------ codes, settings, refusals


def test_group_scores_rank_weights_that_underflow():
    """As weights, exp(-400) and exp(-500) are both 0 in fp32. Their logarithms differ."""
    logits = torch.tensor([0.0, -500.0, -400.0]).view(1, 1, 1, 3)  # [B, Hkv, G, S]
    live = torch.ones(1, 3, dtype=torch.bool)
    scores = kernels.group_scores(logits, live)
    assert scores[0, 0].argsort().tolist() == [1, 2, 0]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 160])
def test_a_weighted_sum_of_codes_is_that_of_the_decoded_values(head_dim, bits):
    """mix_codes multiplies codes, and applies each group's minimum and scale afterwards."""
    torch.manual_seed(0)
    values = torch.randn(2, 3, 40, head_dim)
    weights = torch.rand(2, 3, 4, 40)
    group = min(32, head_dim)
    codes, min_and_scale = quantize(values, bits, group)
    decoded = compress.dequantize(codes, min_and_scale, bits, group, torch.float32)
    mixed = compress.mix_codes(weights, codes, min_and_scale, bits)
    assert error(mixed, weights @ decoded) < 1e-5


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 160])
def test_logits_of_int8_codes_are_those_of_the_decoded_keys(head_dim, dtype, bound):
    """Of queries along a key, too, whose sums of products are beyond fp16's largest number."""
    torch.manual_seed(0)
    keys = torch.randn(2, 3, 40, head_dim)
    codes, scale = kernels.quantize_int8(keys)
    q = (30 * torch.sign(keys[:, :, :4])).to(dtype)
    logits = kernels.token_logits(q, codes, scale[..., 0])
    assert error(logits.float(), q.float() @ (codes * scale).mT) < bound


def command_line_options(options: dict) -> str:
    """Settings as the command line takes them: --name VALUE, or --name and --no-name for a bool."""
    words = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words.append(f"--{name} '{value}'")
    return " ".join(words)


@over("method, options", lambda tests: tests.CASES)
def test_methods_run_from_the_command_line(method, options, cli):
    """Every setting is an option that reaches the report; measured bytes are the formula's."""
    settings = command_line_options(options)
    report = cli.json(
        f"generate --method {method} --prompt 70 --prompt 5 --max_new_tokens 8 {settings}"
    )
    for name, value in options.items():
        assert report["settings"][name] == value
    assert report["bytes_read_per_step"] > 0
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"]


REFUSED_SETTINGS = [  # method, options, what the error says, and changes to the model, if any
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
    method, options, message, *model_changes = case
    model = tiny_model(**dict(*model_changes)).to(DEVICE)
    with pytest.raises(UserError, match=message) as refusal:
        make_engine(model, method, 1, 80, **options)
    assert "\n" not in str(refusal.value)


SMALL_MODELS = [  # head dim, layers, and tokens that a row can hold
    (8, 2, 24),
    (16, 1, 24),
    (8, 2, 3),
]


@pytest.mark.parametrize("head_dim, n_layers, max_seq_length", SMALL_MODELS)
@over("method", lambda tests: tests.METHODS)
def test_every_method_runs_at_its_defaults_on_a_small_model(
    method, head_dim, n_layers, max_seq_length
):
    """A default gives way to a small model or a short cache; only what was asked for is refused."""
    model = tiny_model(head_dim=head_dim, n_layers=n_layers)
    artifact = compress.random_artifact(method, model.config)
    engine = make_engine(model, method, 1, max_seq_length, artifact)
    prompt = random_ids(max_seq_length - 2)
    assert logits_through(engine, [prompt], [[7]]).isfinite().all()
    settings = compress.settings_from(method, {})
    if hasattr(settings, "budget"):
        assert sum(settings.budget(max_seq_length)) <= max_seq_length


@over("method", lambda tests: tests.METHODS)
def test_huge_and_negative_settings_run_or_are_refused_at_once(method):
    """A setting has a limit, or is cut to the cache: it takes neither minutes nor gigabytes."""
    for field in dataclasses.fields(method_named(method).settings):
        if field.type not in (int, float):
            continue
        for value in (1 << 31, 1 << 62, -1):
            started = time.time()
            with contextlib.suppress(UserError):
                engine = make_engine(tiny_model(), method, 1, 60, **{field.name: value})
                assert logits_through(engine, [random_ids(50)], [[7]]).isfinite().all()
                for cache in engine.caches:
                    assert cache.bytes_stored() + cache.bytes_host() < 1 << 20
            assert time.time() - started < 20, (field.name, value)


# ---------------------------------------------------------------------------------- Loki invariants


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_loki_fit_is_a_centred_pca_of_each_head(kind):
    """Of keys after RoPE, or before it, which have a bias: the mean key is taken off first."""
    layer = 2
    head = 1
    model = tiny_model(qkv_bias=True)
    model.layers[layer].attention.wqkv.bias.fill_(3)  # keys that are far from centred
    tokens = tiny_tokens(8, 64)
    tensors, _ = calibrate.fit_loki(model, tokens)

    _, keys, _ = observed(model, tokens)[layer]  # [N, S, Hkv, D] before RoPE
    if kind == "post":
        cos, sin = rope_tables(model.config, 64, CPU)
        keys = apply_rope(keys, cos, sin)
    keys = keys.flatten(0, 1)[:, head].double()
    centred = keys - keys.mean(0)
    basis = tensors[f"{kind}.basis"][layer, head]
    eigenvalues = tensors[f"{kind}.eigenvalues"][layer, head].double()
    assert_best_basis(centred, basis, (1, 4, 12), eigenvalues)


# ---------------------------------------------------------------------------------- SALS invariants


def assert_best_basis(
    x: torch.Tensor, basis: torch.Tensor, ranks, values=None, bound: float = 1e-4
) -> None:
    """Eckart-Young: the columns of `basis` are orthonormal, and for each r of `ranks` no other r
    directions lose less of the rows of x [n, d]. values [d]: the eigenvalues of x^T x / n."""
    x = x.double()
    basis = basis.double()
    assert error(basis.T @ basis, torch.eye(basis.shape[1])) < 1e-5
    spectrum = torch.linalg.svdvals(x).square()
    if values is not None:
        assert error(values, spectrum / len(x)) < 1e-5
    for r in ranks:
        leading = basis[:, :r]
        lost = (x - x @ leading @ leading.T).square().sum()
        least = spectrum[r:].sum()
        assert abs(lost / least - 1) < bound


def pair_energy(x: torch.Tensor) -> torch.Tensor:
    """Squared length of each pair of dims that RoPE rotates: [..., D] -> [..., D / 2]."""
    return x.square().unflatten(-1, (2, -1)).sum(-2)


def queries_that_need_some_pairs_more(model: Llama) -> None:
    """Scales the pairs of each query head unequally, and one to nothing."""
    pairs = [4.0, 1.0, 0.2, 0.1, 0.1, 0.1, 0.1, 0.0]
    of_head = torch.tensor([*pairs, *pairs])  # pair c is the dims c and c + D/2
    of_all_heads = of_head.repeat(model.config.n_heads)
    for layer in model.layers:
        q_rows = layer.attention.wqkv.weight[: len(of_all_heads)]
        q_rows *= of_all_heads[:, None]


@dataclasses.dataclass
class SalsFit:
    """A fit of SALS, and what it has seen."""

    model: Llama
    tensors: dict[str, torch.Tensor]
    queries: list[torch.Tensor]  # of each layer [n, Hq, D], before RoPE
    keys: list[torch.Tensor]  # of each layer [n, Hkv, D], before RoPE


@pytest.fixture(scope="module", params=[1, 2])
def sals_fit(request):
    """At full rank, of query groups of 1 and of 2 heads; in fp64."""
    model = tiny_model(group=request.param)
    queries_that_need_some_pairs_more(model)
    tokens = tiny_tokens(6, 64)
    tensors, _ = fit_sals(model, tokens, 1.0)
    queries = []
    keys = []
    for q, k, _ in observed(model, tokens):
        queries.append(q.double().flatten(0, 1))
        keys.append(k.double().flatten(0, 1))
    return SalsFit(model, tensors, queries, keys)


def pair_weights(fit: SalsFit, i: int) -> torch.Tensor:
    """What an error in each pair of layer i's keys counts: the energy of the group's queries there,
    [Hkv, D / 2], in the unit that the fit's scales have."""
    config = fit.model.config
    of_group = fit.queries[i].unflatten(1, (config.n_kv_heads, -1))  # [n, Hkv, G, D]
    energy = pair_energy(of_group).sum((0, 2))
    scale = fit.tensors["scale"][i].double()
    return energy * (scale.square().sum() / (2 * energy.sum()))


def test_sals_fit_has_the_best_basis_of_keys(sals_fit):
    """The paper's Eq. 1, of keys that are not centred."""
    for i, keys in enumerate(sals_fit.keys):
        basis = sals_fit.tensors[f"{i}.key_basis"]
        eigenvalues = sals_fit.tensors["key_eigenvalues"][i]
        assert_best_basis(keys.flatten(1), basis, (8, 16, 32), eigenvalues)


def test_sals_fit_weighs_keys_by_the_energy_of_their_queries(sals_fit):
    """An error of a key counts as much as the queries are large in its pair (ours)."""
    for i, keys in enumerate(sals_fit.keys):
        scale = sals_fit.tensors["scale"][i].double()
        of_dims = pair_weights(sals_fit, i).repeat(1, 2).flatten()  # both dims of a pair alike
        assert error(scale.square(), of_dims) < 1e-5
        assert error(sals_fit.tensors["mean"][i], keys.mean(0).flatten()) < 1e-5


def test_sals_latents_fit_the_codes_of_both_their_parts(sals_fit):
    """A latent's 8-bit and 4-bit codes share one scale. The first part needs the scale largest /
    127, the second one at which 4-bit levels, 8 steps apart, are 0.3352 deviations apart (the best
    for normal numbers). The maps make the two the same."""
    config = sals_fit.model.config
    settings = compress.SalsSettings()
    r, r_score = settings.ranks(config)
    for i, keys in enumerate(sals_fit.keys):
        maps = compress.sals_layer_maps(config, settings, sals_fit.tensors, i, CPU)
        latents = (keys - keys.mean(0)).flatten(1) @ maps.down.double()
        int8_deviation = latents[:, :r_score].square().mean().sqrt()
        int4_deviation = latents[:, r_score:r].square().mean().sqrt()
        largest = math.sqrt(2 * math.log(2 * r_score))  # of so many normal numbers, in deviations
        int8_scale = int8_deviation * largest / 127
        int4_scale = int4_deviation * 0.3352 / 8
        assert error(int4_scale, int8_scale) < 1e-4


def lost_energy(
    keys: torch.Tensor, down: torch.Tensor, up: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What is lost of keys [n, Hkv, D] in latents: the energy of each pair, times its weight."""
    rebuilt = (keys.flatten(1) @ down @ up.T).view_as(keys)
    return (pair_energy(keys - rebuilt) * weights).sum()


@pytest.mark.parametrize("fraction", [8, 4])
def test_sals_maps_of_ours_keep_the_logits_best(sals_fit, fraction, monkeypatch):
    """Of all maps of rank r they lose the least of the keys, weighted by the queries' energy
    (Eckart-Young), and far less than the paper's basis. Without the maps' codes."""

    def exact_basis(basis: torch.Tensor):
        return basis, torch.ones(len(basis), 16, 1)

    monkeypatch.setattr(compress, "quantize_basis", exact_basis)
    config = sals_fit.model.config
    r = config.kv_dim // fraction
    rank = r / config.kv_dim
    ours = compress.SalsSettings(rank=rank)
    paper = compress.SalsSettings(variant="paper", score="sum", rank=rank)
    for i, keys in enumerate(sals_fit.keys):
        weights = pair_weights(sals_fit, i)
        maps = compress.sals_layer_maps(config, ours, sals_fit.tensors, i, CPU)
        down = maps.down.double()
        up = maps.up.double()
        assert error(down.T @ up, torch.eye(r)) < 1e-5  # latents come back as they were

        lost_by_ours = lost_energy(keys - keys.mean(0), down, up, weights)
        least = len(keys) * sals_fit.tensors["query_eigenvalues"][i, r:].sum()
        assert abs(lost_by_ours / least - 1) < 1e-4

        U_r = compress.paper_basis(config, paper, sals_fit.tensors, i, CPU).double()
        assert lost_by_ours < 0.8 * lost_energy(keys, U_r, U_r, weights)


def sals_cache_of_random_keys(rope_scaling, qkv_bias: bool, block: int = 16, **options):
    """A SALS cache of two rows that hold the latents of 40 random keys each, and these keys
    [2, 40, Hkv, D] as scoring sees them: rebuilt from the r* leading dims, before RoPE."""
    model = tiny_model(rope_scaling=rope_scaling, qkv_bias=qkv_bias)
    cache = row_cache("sals", model, 2, 40, block=block, **CODES | options)
    if rope_scaling is not None:
        assert cache.context.cos[0, 0] > 1.1  # yarn scales keys and queries
    k = torch.randn(2, 40, 4, 16)
    for row in range(2):
        latents = cache.latent(k[row])
        cache.latents.write_prompt(row, 0, latents[:, None])
    up = cache.U_score if options["variant"] == "paper" else cache.up
    stored = cache.latents.read_all()[:, 0, :, : cache.r_score]
    return cache, (stored @ up.T).unflatten(-1, (4, 16))


def queries_in_two_orders() -> list[torch.Tensor]:
    """Random queries [2, Hq, D], and the same with the two heads of each group exchanged."""
    q = torch.randn(2, 8, 16)
    exchanged = q.unflatten(1, (4, 2)).flip(2).flatten(1, 2)
    return [q, exchanged]


def assert_scores_up_to(pos: torch.Tensor, scores: torch.Tensor, truth: torch.Tensor) -> None:
    """scores [B, 1, 1, S] are truth [B, S] of the tokens up to pos [B], and -inf after them."""
    for row, last in enumerate(pos.tolist()):
        n = last + 1
        assert error(scores[row, 0, 0, :n], truth[row, :n]) < 1e-5
        assert scores[row, 0, 0, n:].eq(-torch.inf).all()


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("rope_scaling", [None, YARN])
@pytest.mark.parametrize("variant", ["paper", "ours"])
def test_sals_sum_scores_are_the_sums_of_all_heads_logits_without_rope(
    variant, rope_scaling, qkv_bias
):
    """All keys stand at the query's place; not even yarn's factor counts. The mean key, which our
    latents lack, would add the same to every token."""
    cache, keys = sals_cache_of_random_keys(rope_scaling, qkv_bias, variant=variant, score="sum")
    pos = torch.tensor([36, 24])
    for q in queries_in_two_orders():
        if variant == "paper":
            scores = cache.score(pos, q)
        else:
            scores = cache.score(pos, q, cache.rope(q, pos))
        of_group = q.unflatten(1, (4, 2))  # [2, Hkv, G, D]
        logits = torch.einsum("bhgd,bjhd->bjhg", of_group, keys) / 4  # 4 is sqrt(D)
        assert_scores_up_to(pos, scores, logits.sum((2, 3)))


def mean_logits_in_places(cache, q, keys, pos, span: int) -> torch.Tensor:
    """Logits [B, S, Hq], times sqrt(D), of keys [B, S, Hkv, D] for queries q [B, Hq, D] at pos,
    both before RoPE: of a token's key the mean over all places of the `span` tokens that it is
    among, as if it stood in each of them."""
    B, S, Hkv, D = keys.shape
    in_each_place = keys[:, :, None].expand(B, S, S, Hkv, D)  # the key of token j in place p
    turned = cache.rope_from(in_each_place, 0)
    turned = turned.repeat_interleave(q.shape[1] // Hkv, dim=3)  # [B, S, S, Hq, D]
    logits = torch.einsum("bhd,bjphd->bjph", cache.rope(q, pos), turned)
    places = torch.arange(S)
    is_near = places // span == places[:, None] // span  # [j, p]
    share = is_near / is_near.sum(1, keepdim=True)
    return torch.einsum("bjph,jp->bjh", logits, share)


@pytest.mark.parametrize("rope_scaling", [None, YARN])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_sals_softmax_scores_are_of_mean_logits_over_a_block(qkv_bias, rope_scaling):
    """A score is the sum of all heads' attention weights. Their logits are means over the places of
    a key's block of tokens, because a query is turned back once for each block. So it is with the
    mean key; but where keys have biases it is large, and stands in each token's own place."""
    block = 16
    cache, keys = sals_cache_of_random_keys(
        rope_scaling, qkv_bias, block, variant="ours", score="softmax"
    )
    mean_block = 1 if qkv_bias else block
    mean = cache.mean.view(4, 16).expand_as(keys)
    pos = torch.tensor([36, 24])
    is_later = torch.arange(40) > pos[:, None]  # [2, S]
    for q in queries_in_two_orders():
        scores = cache.score(pos, q, cache.rope(q, pos))
        logits = mean_logits_in_places(cache, q, keys, pos, block)
        logits = logits + mean_logits_in_places(cache, q, mean, pos, mean_block)
        logits = logits.masked_fill(is_later[..., None], -torch.inf) / 4  # 4 is sqrt(D)
        weights = logits.softmax(1)  # [2, S, Hq]
        assert_scores_up_to(pos, scores, weights.sum(2))


def best_tokens(scores: list[float], tokens: range, n: int) -> list[int]:
    """The n of these tokens that have the largest scores, or fewer: -inf and NaN are none."""
    candidates = [token for token in tokens if scores[token] > -math.inf]
    candidates.sort(key=lambda token: scores[token], reverse=True)
    return candidates[:n]


@pytest.mark.parametrize("length", [1, 7, 8, 12, 13, 14, 40])
@pytest.mark.parametrize("wanted", [None, (6, 2), (0, 1)])
def test_selection_has_the_sinks_and_the_best_and_no_repeats(length, wanted):
    """Of each row and head, in plain Python. A score of -inf or NaN is never chosen.

    wanted: how many each row may select, of the y for which there is room; None: y."""
    n_sinks = 3
    n_selected = 6
    n_recent = 4
    torch.manual_seed(length)
    scores = torch.randn(2, 3, 40)
    chance = torch.rand(2, 3, 40)
    scores = scores.masked_fill(chance < 0.2, -torch.inf)
    scores = scores.masked_fill(chance > 0.9, torch.nan)
    pos = torch.tensor([length - 1, max(0, length - 2)])
    chosen = kernels.select_reference(
        scores,
        pos,
        x=n_sinks,
        y=n_selected,
        z=n_recent,
        wanted=None if wanted is None else torch.tensor(wanted),
    )
    assert chosen.shape == (2, 3, n_sinks + n_selected)

    for row in range(2):
        n_tokens = int(pos[row]) + 1
        n_old = max(0, n_tokens - n_recent)
        most = n_selected if wanted is None else wanted[row]
        for head in range(3):
            sinks = range(min(n_sinks, n_old))
            best = best_tokens(scores[row, head].tolist(), range(n_sinks, n_old), most)
            expected = [*sinks, *best]
            found = [token for token in chosen[row, head].tolist() if token >= 0]
            assert sorted(found) == sorted(expected)


SCORED = [("paper", "sum"), ("ours", "sum"), ("ours", "softmax")]  # variant and score


@pytest.mark.parametrize("group, biases, scored", pairwise([1, 2, 8], [False, True], SCORED))
def test_folded_projections_equal_unfolded(group, biases, scored):
    """wqkv makes latents, and for the score "sum" queries of latents, but where q and k have norms.
    Values turned in W_V and W_O change no logit of a prompt, which attends exactly."""
    variant, score = scored
    options = SPARSE | {"variant": variant, "score": score}
    shape = {"group": group, "qkv_bias": biases, "out_bias": biases}
    prompt = tuple(random_ids(50))
    more = random_ids(10, 1)
    dense = dense_logits((prompt,), ((0,),), **shape)[0]

    logits = {}
    rows_of_wqkv = {}
    for is_folded in (True, False):
        model = tiny_model(**shape)
        model.config.qk_norm = not is_folded  # the weights have none: this says what is folded
        engine = make_engine(model, "sals", 1, 64, **options)
        logits[is_folded] = logits_through(engine, [prompt], [more])
        rows_of_wqkv[is_folded] = len(model.layers[2].attention.wqkv.weight)
        assert error(logits[is_folded][0], dense) < 1e-5
    # Ours has codes, and one may round otherwise.
    bound = 1e-4 if variant == "paper" else 0.02
    assert error(logits[True], logits[False]) < bound

    kv_dim = 128 // group
    r = kv_dim // 2
    r_score = r // 2
    assert rows_of_wqkv[False] == 128 + 2 * kv_dim
    added = r + r_score if score == "sum" else r
    assert rows_of_wqkv[True] == rows_of_wqkv[False] + added


@pytest.mark.parametrize("variant", ["ours", "paper"])
def test_prefill_holds_one_layers_keys_and_values_at_a_time(variant, monkeypatch):
    """No tensor of a layer's k may live on when the next layer's prefill runs."""
    keys_seen = []
    engine = make_engine(tiny_model(), "sals", 1, 64, **SPARSE | {"variant": variant})
    cache_class = type(engine.caches[1])
    prefill = cache_class.prefill

    def watched_prefill(cache, row, start, q, k, *rest):
        for earlier in keys_seen:
            assert earlier() is None
        keys_seen.append(weakref.ref(k))
        return prefill(cache, row, start, q, k, *rest)

    monkeypatch.setattr(cache_class, "prefill", watched_prefill)
    engine.prefill([random_ids(60)])
    assert len(keys_seen) == 4  # layers


def test_a_rank_is_the_nearest_to_its_share():
    assert compress.rank_of(1, 256) == 256
    assert compress.rank_of(0.25, 256) == 64
    assert compress.rank_of(0.0059, 256) == 2
    assert compress.rank_of(0.001, 256) == 1  # at least


SALS_SIZES = [  # KV heads of 16 dims, and the default r and r*
    (1, (10, 8)),
    (4, (40, 32)),  # five eighths of narrow keys, and at least 32 dims that scores read
    (12, (120, 32)),
    (15, (150, 32)),  # scores read at most an eighth of the keys' 240 dims
    (16, (128, 32)),  # half of 256 dims
    (64, (512, 128)),
    (256, (1024, 256)),  # a quarter of 4096 dims, as in the paper
]


@pytest.mark.parametrize("n_heads, sizes", SALS_SIZES)
def test_sals_sizes_follow_from_the_keys_width(n_heads, sizes):
    """Where keys are narrow, the layers that attend all have latents, too; else KIVI's codes."""
    config = tiny_config(n_heads=n_heads, n_kv_heads=n_heads)
    assert compress.SalsSettings().ranks(config) == sizes
    kivi = compress.kivi_layers(config, compress.SalsSettings(skip="0"))
    is_narrow = config.kv_dim < 256
    assert kivi == (set() if is_narrow else {0})


# ---------------------------------------------------------------------------------- LRQK invariants


def explicit_lrqk(q, k, a_q, a_k, rounds: int):
    """A_Q and A_K of Algorithm 1 as it is written: on the matrices themselves, of all tokens.

    q, k [n, D]; a_q, a_k [n, r]: the factors to start from."""
    solve = torch.linalg.solve
    for _ in range(rounds):
        # B_Q and B_K, by least squares (lines 3, 4).
        b_q = solve(a_q.mT @ a_q, a_q.mT @ q)
        b_k = solve(a_k.mT @ a_k, a_k.mT @ k)
        # A_K, then A_Q with the new A_K (lines 5, 6).
        a_k = solve(a_q.mT @ a_q + b_k @ b_k.mT, (k @ (q.mT @ a_q + b_k.mT)).mT).mT
        a_q = solve(a_k.mT @ a_k + b_q @ b_q.mT, (q @ (k.mT @ a_k + b_q.mT)).mT).mT
    return a_q, a_k


def test_lrqk_moments_count_every_token():
    x = torch.randn(5000, 2, 3, 4)  # [S, Hkv, G, D]: longer than a part that is summed at once
    gram, total = compress.lrqk_moments(x)
    rows = x.double().transpose(0, 1).flatten(1, 2)  # [Hkv, S * G, D]
    assert error(gram, compress.add_ridge(rows.mT @ rows, 1e-6)) < 1e-12
    assert error(total, rows.abs().sum(1)) < 1e-12


@pytest.mark.parametrize("group", [1, 4])
def test_lrqks_closed_form_is_the_optimum(group, monkeypatch):
    """Invariant 2 (Eckart-Young): no product of rank r loses less of R_Q R_K^T than the tail of its
    singular values. The closed form loses just that, with one W_Q for all heads of a group. Of the
    many pairs that do, its A_Q and A_K have the same Gram matrix, which is diagonal."""
    monkeypatch.setattr(compress, "add_ridge", lambda m, fraction: m)
    r = 6
    generator = torch.Generator().manual_seed(group)
    q, k = torch.randn(2, 2, 300 * group, 16, generator=generator, dtype=torch.float64)
    # Two KV heads [2, n, D], of spectra that fall, in bases of their own.
    mix = orthonormal(16).double() * torch.logspace(1, -1, 16, dtype=torch.float64)
    q = q @ mix
    k = k[:, :300] @ mix.roll(1, 1)
    w_q, w_k = compress.lrqk_optimum(q.mT @ q, k.mT @ k, r)
    a_q = q @ w_q
    a_k = k @ w_k

    logits = q @ k.mT
    lost = (logits - a_q @ a_k.mT).square().sum()
    tail = torch.linalg.svdvals(logits)[:, r:].square().sum()
    assert abs(lost - tail) < 1e-9 * logits.square().sum()

    gram_q = a_q.mT @ a_q
    gram_k = a_k.mT @ a_k
    diagonal = gram_q.diagonal(dim1=1, dim2=2)
    assert error(gram_q, gram_k) < 1e-6
    assert error(torch.diag_embed(diagonal), gram_q) < 1e-6
    assert (diagonal.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("ratio", [1, 1.5, 2])
def test_lrqk_slot_table(ratio):
    """Invariant 7, over 60 steps whose selections drift: hits stay, exactly the selected are
    stamped, slots hold what host memory has of their tokens, and what goes was unused for the
    longest time."""
    B = 2
    Hkv = 3
    S = 80
    k = 8
    C = int(ratio * k)
    rng = np.random.default_rng(0)
    host = torch.randn(B, Hkv, S, 8)  # K and V of every token
    hot = torch.zeros(B, Hkv, C, 8)
    slot_of = torch.full((B, Hkv, S), -1, dtype=torch.int32)
    pos_of = torch.full((B, Hkv, C), -1, dtype=torch.int32)
    stamp = torch.full((B, Hkv, C), -1, dtype=torch.int32)
    residents = {}  # of each row and head: a token in a slot -> the last step that used it
    for head in np.ndindex(B, Hkv):
        residents[head] = {}

    for step in range(60):
        distance = abs(np.arange(S) - step)
        scores = torch.from_numpy(rng.normal(size=(B, Hkv, S)) - distance / 4)
        scores[0, :, 3 + step :] = -torch.inf  # a short row: fewer candidates than k at first
        best, index = scores.topk(k, sorted=False)
        live = best > -torch.inf
        index = index.where(live, S - 1)  # a token without a slot stands for none, as in `fetch`
        now = torch.tensor(step, dtype=torch.int32)
        place, miss = compress.take_slots(index, live, slot_of, pos_of, stamp, now)
        kernels.fetch_rows_reference(host, index, place, miss, hot)

        for head, before in residents.items():
            chosen = set(index[head][live[head]].tolist())
            missed = set(index[head][miss[head]].tolist())
            slots = (pos_of[head] >= 0).nonzero()[:, 0]
            tokens = pos_of[head][slots]

            # The two tables are inverse to each other.
            assert torch.equal(slot_of[head][tokens], slots.int())
            assert (slot_of[head] >= 0).sum() == len(slots)

            # What had a slot is a hit. Hits were not fetched, and are still right: they stayed.
            assert missed == chosen - set(before)
            assert torch.equal(hot[head][slots], host[head][tokens])

            # No more goes than must, the longest unused first. Which of equal ones is left open.
            gone = set(before) - set(tokens.tolist())
            n_gone = max(0, len(set(before) | chosen) - C)
            unused_since = sorted(before[token] for token in set(before) - chosen)
            assert sorted(before[token] for token in gone) == unused_since[:n_gone]

            # The selected have this step's stamp, and the others keep theirs.
            after = dict(before)
            for token in gone:
                del after[token]
            for token in chosen:
                after[token] = step
            stamps = stamp[head][slots].tolist()
            assert dict(zip(tokens.tolist(), stamps, strict=True)) == after
            residents[head] = after


def lrqk_caches_of_slots(variant: str, slots: list[float]) -> list:
    """LRQK caches that differ in how many hot slots they have."""
    options = {"variant": variant, "rank": 6, "k": 10, "recent": 5}
    return [row_cache("lrqk", tiny_model(), 1, 64, slots=n, **options) for n in slots]


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_output_does_not_depend_on_where_rows_lie(variant):
    """Invariant 9: twice as many slots, or none that is kept from step to step."""
    cache, *others = lrqk_caches_of_slots(variant, [1.0, 2.0, 0.0])
    qkv = stream(64)
    for each in (cache, *others):
        reads(each, 40, *qkv)
    for n in range(40, 60):
        expected = step(cache, n, *qkv)
        for other in others:
            assert error(step(other, n, *qkv), expected) < 1e-5


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_misses_fewer_tokens_with_more_slots(variant):
    qkv = stream(64)
    rates = []
    for cache in lrqk_caches_of_slots(variant, [2.0, 1.0, 0.0]):
        reads(cache, 40, *qkv)
        for n in range(40, 60):
            step(cache, n, *qkv)
        rates.append(cache.miss_rate())
    with_many, with_k, with_none = rates
    assert 0 < with_many < with_k < with_none == 1


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqks_miss_rate_begins_anew_with_a_prompt(variant):
    (cache,) = lrqk_caches_of_slots(variant, [1.0])
    qkv = stream(64)
    rates = []
    for n_prompt in (40, 20, 40):
        reads(cache, n_prompt, *qkv)
        for n in range(n_prompt, n_prompt + 20):
            step(cache, n, *qkv)
        rates.append(cache.miss_rate())
    assert rates[2] == rates[0]


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_holds_the_keys_and_values_of_all_tokens_in_host_memory(variant):
    (cache,) = lrqk_caches_of_slots(variant, [1.0])
    numbers = 4 * 64 * 2 * 16  # Hkv, S, K and V, D
    assert cache.bytes_host() == 4 * numbers  # in fp32


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqks_proxies_fit_fp16_where_its_keys_do(variant):
    """Of keys near fp16's largest number, 65504."""
    cache = row_cache("lrqk", tiny_model().half(), 1, 80, rank=8, k=20, recent=8, variant=variant)
    q, k, v = stream(80)
    q[..., 3] += 300
    k[..., 3] += 6e4
    q = q.half()
    k = k.half()
    v = v.half()
    reads(cache, 60, q, k, v)
    for n in range(60, 80):
        assert step(cache, n, q, k, v).isfinite().all()
    largest_key = cache.kv.vectors.abs().max()
    assert largest_key < torch.inf
    assert cache.a_k.abs().max() <= 1.01 * largest_key


def test_lrqk_says_that_weights_are_damaged():
    model = tiny_model()
    model.layers[1].attention.wqkv.weight[130:140] = 3e38  # of the keys
    engine = make_engine(model, "lrqk", 1, 60, rank=6)
    with pytest.raises(UserError, match="^[^\n]*are not finite; the weights are damaged$"):
        engine.prefill([random_ids(40)])


def lrqk_caches_after_a_follow_up(variant: str):
    """Two caches after the same 40 tokens of a prompt and the same 20 more: the first one has read
    these at once, the second one in steps."""
    options = LRQK | {"variant": variant}
    at_once, (q, k, v) = scene("lrqk", 40, 60, **options)
    in_steps, _ = scene("lrqk", 40, 60, **options)
    at_once.prefill(0, 40, q[40:], k[40:], v[40:])
    for n in range(40, 60):
        step(in_steps, n, q, k, v)
    return at_once, in_steps


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_stores_a_follow_up_as_decode_does(variant):
    at_once, in_steps = lrqk_caches_after_a_follow_up(variant)
    assert torch.allclose(at_once.kv.vectors, in_steps.kv.vectors, atol=1e-5)
    for i in range(2):  # the exact keys, the exact values
        assert torch.allclose(at_once.exact[i].vectors, in_steps.exact[i].vectors, atol=1e-5)


def test_lrqk_of_ours_projects_a_follow_up_as_decode_does():
    """By the prompt's projections. The slots of this step have the same tokens, in any order."""
    at_once, in_steps = lrqk_caches_after_a_follow_up("ours")
    assert torch.allclose(at_once.a_k, in_steps.a_k, atol=1e-4)
    selected = []
    for cache in (at_once, in_steps):
        tokens = cache.pos_of.where(cache.stamp == cache.step, -1)
        selected.append(tokens.sort(-1).values)
    assert torch.equal(selected[0], selected[1])


def test_lrqk_of_the_paper_projects_a_follow_up_by_least_squares():
    """Its bases move in each step, so there is no projection of the prompt's. What B_K leaves of a
    new key is orthogonal to it."""
    cache, _ = lrqk_caches_after_a_follow_up("paper")
    new_keys = cache.kv.vectors[..., 40:, :16]
    residual = new_keys - cache.a_k[..., 40:, :] @ cache.basis_k
    along_b_k = residual @ cache.basis_k.mT
    assert along_b_k.abs().max() < 1e-3 * residual.abs().max()


# ------------------------------------------------------------------------------------------ EliteKV


def elite_tables(pairs: torch.Tensor, n: int, c) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE tables of each KV head [S, Hkv, D/2] that rotate only its pairs [Hkv, r]: of the others
    cos = 1 and sin = 0."""
    cos, sin = rope_tables(c, n, CPU)
    Hkv = len(pairs)
    cos = cos[:, None].expand(-1, Hkv, -1)
    sin = sin[:, None].expand(-1, Hkv, -1)
    is_elite = torch.zeros(Hkv, cos.shape[-1], dtype=torch.bool).scatter(1, pairs, True)
    return torch.where(is_elite, cos, 1.0), torch.where(is_elite, sin, 0.0)


def elite_reference(attention, pairs: torch.Tensor, x: torch.Tensor, c) -> torch.Tensor:
    """RoPElite without factors: the dense attention of one layer, of which only these pairs
    [Hkv, r] of each head are rotated."""
    cos, sin = elite_tables(pairs, x.shape[-2], c)

    def rotate(t):  # [S, heads, D]
        by_kv_head = t.unflatten(-2, (len(pairs), -1))
        return apply_rope(by_kv_head, cos, sin).flatten(-3, -2)

    def attend(q, k, v):
        return model_file.causal_attention(rotate(q), rotate(k), v)

    return attention(x, attend)


@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_elitekv_at_full_rank_rotates_the_elite_pairs_only(group, qkv_bias, r):
    model = tiny_model(group=group, qkv_bias=qkv_bias)
    c = model.config
    artifact = artifact_of("elitekv", model)
    dense = [layer.attention for layer in model.layers]
    full_rank = min(48, c.n_kv_heads * (32 - 2 * r))  # dim, or the columns of [W_k^n | W_v]
    settings = compress.EliteSettings(r=r, d_ckv=full_rank)
    method_named("elitekv").fold_all(model, settings, artifact)

    x = torch.randn(40, 48)
    cos, sin = rope_tables(c, 57, CPU)
    for i, layer in enumerate(model.layers):
        elite = layer.attention
        output = elite(x, elite.causal(cos[:40], sin[:40]))
        pairs = artifact["elite"][i][:, :r]
        assert error(output, elite_reference(dense[i], pairs, x, c)) < 1e-4
        # RoPE knows distances alone: 17 places further on it is the same.
        assert error(elite(x, elite.causal(cos[17:], sin[17:])), output) < 1e-4


def test_a_checkpoint_may_have_one_elite_key_for_all_heads():
    """As nano-elitekv: its artifact has one order a layer, and the heads' keys are the same."""
    model = tiny_model()
    dense = model.layers[1].attention
    keys = dense.wqkv.weight[128:192].view(4, 16, 48)  # [Hkv, D, dim]
    keys.copy_(keys[:1].clone().expand(4, -1, -1))
    artifact = artifact_of("elitekv", model)
    artifact["elite"] = artifact["elite"][:, :1]
    method_named("elitekv").fold_all(model, compress.EliteSettings(r=8, d_ckv=48), artifact)

    elite = model.layers[1].attention
    assert elite.widths == [128, 16, 48]  # Hq*D, one head's 2r, d_ckv
    x = torch.randn(40, 48)
    cos, sin = rope_tables(model.config, 40, CPU)
    assert error(elite(x, elite.causal(cos, sin)), dense(x, dense.causal(cos, sin))) < 1e-4


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
    assert sorted(order) == list(range(8))

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
    """Of one KV head of one layer, by its group's queries: the search does not know the others."""
    layer = 2
    head = 1
    model = tiny_model(group=4)
    tokens = tiny_tokens(3, 40)
    orders = calibrate.elite_orders(model, tokens)
    assert orders["elite"].shape == orders["contribution"].shape == (4, 2, 8)

    q, k, _ = observed(model, tokens)[layer]
    q = q[:, :, 4 * head : 4 * head + 4]
    k = k[:, :, head]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(40, generator=generator)[: calibrate.ELITE_ROWS]
    cos, sin = rope_tables(model.config, 40, CPU)
    elite = calibrate.ropelite(calibrate.rope_deltas(q[:, rows], k, rows, cos, sin))
    assert torch.equal(orders["elite"][layer, head], elite)

    q_norm = pair_energy(q).sqrt().flatten(0, -2).mean(0)  # of each pair, [D / 2]
    k_norm = pair_energy(k).sqrt().flatten(0, -2).mean(0)
    by_contribution = (q_norm * k_norm).argsort(descending=True)
    assert torch.equal(orders["contribution"][layer, head], by_contribution)


def test_uniform_order_of_pairs():
    """12 of 64 pairs, spread evenly (int(linspace(0, 63, 12)), sec. 4.3.1); then the others."""
    order = compress.uniform_order(64, 12).tolist()
    assert order[:12] == [0, 5, 11, 17, 22, 28, 34, 40, 45, 51, 57, 63]
    assert sorted(order) == list(range(64))


def key_and_value_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """k [48, 4, 10], v [48, 4, 15]: weights of 48 inputs, which share directions."""
    torch.manual_seed(0)
    mix = torch.randn(10, 60)
    k = torch.randn(48, 10) @ mix[:, :40] + torch.randn(48, 40)
    v = torch.randn(48, 10) @ mix + torch.randn(48, 60)
    return k.unflatten(1, (4, 10)), v.unflatten(1, (4, 15))


def squared_singular_values(m: torch.Tensor) -> torch.Tensor:
    """Of weights [dim, ...] as a matrix [dim, n], the largest first."""
    return torch.linalg.svdvals(m.double().flatten(1)).square()


LATENT_SIZES = [1, 7, 20, 40, 48]  # d_ckv, of 48 inputs, 40 numbers of keys and 60 of values


@pytest.mark.parametrize("d_ckv", LATENT_SIZES)
def test_joint_factors_are_optimal_and_beat_separate_ones(d_ckv):
    """Eckart-Young, for [W_k^n | W_v] as one matrix."""
    k, v = key_and_value_weights()
    m = torch.cat((k, v), -1).double().flatten(1)
    a, b = compress.low_rank(k, v, d_ckv, "joint")
    assert b.shape == (d_ckv, 4, 25)
    assert error(a.T @ a, torch.eye(d_ckv)) < 1e-8
    lost = (m - a @ b.flatten(1)).square().sum()
    tail = squared_singular_values(m)[d_ckv:].sum()
    assert abs(lost - tail) < 1e-6 * m.square().sum()

    separate_a, separate_b = compress.low_rank(k, v, d_ckv, "separate")
    lost_apart = (m - separate_a @ separate_b.flatten(1)).square().sum()
    assert lost_apart > lost - 1e-6


@pytest.mark.parametrize("d_ckv", LATENT_SIZES)
def test_separate_factors_are_optimal_and_of_keys_or_values_alone(d_ckv):
    """Of all ways to share out d_ckv dims, n of them to keys and the rest to values, none loses
    less."""
    k, v = key_and_value_weights()
    m = torch.cat((k, v), -1).double().flatten(1)
    a, b = compress.low_rank(k, v, d_ckv, "separate")
    lost = (m - a @ b.flatten(1)).square().sum()

    of_k = squared_singular_values(k)
    of_v = squared_singular_values(v)
    losses = []
    for n in range(max(0, d_ckv - 48), min(40, d_ckv) + 1):
        losses.append(of_k[n:].sum() + of_v[d_ckv - n :].sum())
    assert abs(lost - min(losses)) < 1e-6 * m.square().sum()

    b_k, b_v = b.split((10, 15), -1)
    makes_keys = b_k.flatten(1).abs().sum(1) > 1e-9
    makes_values = b_v.flatten(1).abs().sum(1) > 1e-9
    assert not (makes_keys & makes_values).any()  # [W_k^n | W_v] is block-diagonal in the latent


@pytest.mark.parametrize("d_ckv", LATENT_SIZES)
def test_joint_factors_are_optimal_for_inputs_that_were_seen(d_ckv):
    """For inputs x whose E x x^T is root^2 (ours), nothing loses less of x [W_k^n | W_v]."""
    k, v = key_and_value_weights()
    m = torch.cat((k, v), -1).double().flatten(1)
    root = torch.randn(48, 48, dtype=torch.float64)
    root = root @ root.T + torch.eye(48)
    a, b = compress.low_rank(k, v, d_ckv, "joint", root)
    assert error(a.T @ a, torch.eye(d_ckv)) < 1e-8  # as training wants it
    lost = (root @ (m - a @ b.flatten(1))).square().sum()
    tail = squared_singular_values(root @ m)[d_ckv:].sum()
    assert abs(lost - tail) < 1e-6 * lost.clamp(min=m.square().sum())


def test_elitekv_numbers_of_parameters():
    """App. C: K and V take 2r Hkv d + c d + c Hkv (2D - 2r), with d = dim and c = d_ckv."""
    model = tiny_model(group=2)
    attention = model.layers[0].attention
    before = sum(p.numel() for p in attention.parameters())
    make_engine(model, "elitekv", 3, 50, r=3, d_ckv=20)
    attention = model.layers[0].attention
    after = sum(p.numel() for p in attention.parameters())
    r = 3
    c = 20
    Hkv = 4
    D = 16
    d = 48
    of_dense = 2 * d * Hkv * D
    assert after - before == 2 * r * Hkv * d + c * d + c * Hkv * (2 * D - 2 * r) - of_dense


LLAMA2_SIZES = [  # of Llama-2-7B: a fraction of the cache, and (r, d_ckv) that the paper has for it
    (0.5, (26, 2432)),
    (0.34375, (12, 2048)),
    (0.25, (8, 1536)),
    (0.125, (4, 768)),
]


@pytest.mark.parametrize("fraction, papers", LLAMA2_SIZES)
def test_elitekv_sizes_of_llama_2_are_the_papers(fraction, papers):
    sizes = calibrate.elite_allocations(SHAPES["llama-2-7b"], fraction)
    assert papers in sizes
    for r, d_ckv in sizes:
        assert 2 * r * 32 + d_ckv == fraction * 2 * 32 * 128  # of 32 heads of 128 dims
        assert d_ckv % 128 == 0


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_elitekv_sizes_add_no_parameters(fraction):
    for c in (SHAPES["llama-2-7b"], SHAPES["llama-3.1-8b"], load_config(NANO)):
        for r, d_ckv in calibrate.elite_allocations(c, fraction):
            rotated = 2 * r * c.n_kv_heads
            of_elite_keys = rotated * c.dim
            of_factors = d_ckv * (c.dim + 2 * c.kv_dim - rotated)
            assert of_elite_keys + of_factors <= 2 * c.dim * c.kv_dim


def test_elitekv_sizes_of_nano_are_multiples_of_less():
    """Multiples of 128 would leave it no choice of sizes."""
    sizes = calibrate.elite_allocations(load_config(NANO), 0.25)
    assert (8, 64) in sizes
    assert len(sizes) >= 4


def test_the_fit_of_elitekv_takes_the_size_of_the_lowest_perplexity():
    """Of three or more. That perplexity is of the factors for the inputs of this text. The trials
    leave the model as it was."""
    model = tiny_model()
    tokens = tiny_tokens(4, 40)
    dense = [layer.attention for layer in model.layers]
    tensors, facts = calibrate.fit_elitekv(model, tokens)
    for layer, attention in zip(model.layers, dense, strict=True):
        assert layer.attention is attention

    trials = {name: facts[name] for name in facts if name.startswith("perplexity_")}
    r = int(tensors["r"])
    d_ckv = int(tensors["d_ckv"])
    lowest = min(trials.values())
    assert len(trials) >= 3
    assert trials[f"perplexity_{r}_{d_ckv}"] == lowest

    artifact = tensors | calibrate.input_roots(model, tokens.flatten())
    method_named("elitekv").fold_all(model, compress.EliteSettings(r, d_ckv), artifact)
    assert calibrate.full_passes(model, tokens)[1] == pytest.approx(lowest, rel=1e-3)


def test_elitekv_with_all_pairs_and_a_full_latent_has_the_dense_perplexity():
    model = tiny_model()
    tokens = tiny_tokens(4, 40)
    logits = model.output(model(tokens[:, :-1]))
    dense = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp().item()
    artifact = calibrate.elite_orders(model, tokens)
    method_named("elitekv").fold_all(model, compress.EliteSettings(8, 48), artifact)
    assert calibrate.full_passes(model, tokens)[1] == pytest.approx(dense, rel=1e-3)


# ----------------------------------------------------------------------------------- FDC invariants


@dataclasses.dataclass
class FdcFit:
    """A fit of FDC, and what it is of."""

    model: Llama
    tokens: torch.Tensor  # [6, 48]
    tensors: dict[str, torch.Tensor]
    facts: dict[str, float]


@pytest.fixture(scope="module")
def fdc_fit():
    """On text that the model itself would write, since a random model predicts no other text."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    engine = make_engine(model, "dense", 6, 48)
    engine.prefill([[first] for first in range(6)])
    written = decode_rows(engine, 47, lambda _: False)
    texts = [[first, *ids] for first, ids in enumerate(written)]
    tokens = torch.tensor(texts)
    tensors, facts = calibrate.fit_fdc(model, tokens, 0.5)
    return FdcFit(model, tokens, tensors, facts)


def queries_and_keys_at_random_positions(model: Llama, layer: int, head: int) -> torch.Tensor:
    """After RoPE [n, D] in fp64: of one KV head its keys and its group's queries, of random tokens
    that stand in any of the model's positions."""
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(0, model.config.max_positions, (20, 64), generator=generator)
    tokens = torch.tensor(random_ids(20 * 64)).view(20, 64)
    cos, sin = rope_tables(model.config, model.config.max_positions, CPU)
    cos = cos[places]
    sin = sin[places]
    q, k, _ = observed(model, tokens)[layer]
    q = apply_rope(q, cos, sin).double().unflatten(2, (model.config.n_kv_heads, -1))
    k = apply_rope(k, cos, sin).double()
    return torch.cat((q[:, :, head].flatten(0, 2), k[:, :, head].flatten(0, 1)))


@pytest.mark.parametrize("layer, head", [(0, 1), (3, 2)])
def test_fdc_basis_is_a_rotation_that_keeps_the_most_energy(fdc_fit, layer, head):
    """Of random tokens that the fit has not seen, up to the last position: R belongs to the model,
    not to a text."""
    basis = fdc_fit.tensors["qk.basis"][layer, head].double()
    energy = fdc_fit.tensors["qk.values"][layer, head].double().square()
    assert error(basis.T @ basis, torch.eye(48)) < 1e-5

    x = queries_and_keys_at_random_positions(fdc_fit.model, layer, head)

    def kept(rotation: torch.Tensor, p: int) -> float:
        """The fraction of the energy of x in the leading p columns."""
        return ((x @ rotation[:, :p]).square().sum() / x.square().sum()).item()

    for p in (16, 32):
        fitted = (energy[:p].sum() / energy.sum()).item()
        assert kept(basis, p) == pytest.approx(fitted, rel=0.02)
        for seed in range(5):
            assert kept(basis, p) > kept(orthonormal(48, seed).double(), p)


def test_fdc_basis_of_values_is_the_best_of_the_weights(fdc_fit):
    layer = 1
    head = 1
    attention = fdc_fit.model.layers[layer].attention
    _, _, w_v = attention.wqkv.weight.split(attention.widths)
    of_head = w_v.unflatten(0, (4, 48))[head]  # [D, dim]
    basis = fdc_fit.tensors["v.basis"][layer, head]
    squares = fdc_fit.tensors["v.values"][layer, head].square()
    assert_best_basis(of_head.T, basis, (8, 16, 40), squares / len(of_head.T), 1e-3)


def falling_values() -> torch.Tensor:
    """Singular values [L, Hkv, D] of 2 layers and 3 heads, the largest first."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(2, 3, 80, generator=generator).sort(-1, descending=True).values


def test_fdc_rates_are_where_ranks_change():
    """Each rate is the least one at which some head goes down by 16 columns."""
    values = falling_values()
    rates = calibrate.fdc_rates(values)
    assert rates[0] == 0
    assert len(rates) == 1 + 2 * 3 * 4  # from 80 columns, a head can lose 16 four times

    def total(rate: float) -> int:
        return int(compress.fdc_ranks(values, rate).sum())

    for rate, next_rate in itertools.pairwise(rates):
        assert total(rate) - total(next_rate) == 16
        assert total((rate + next_rate) / 2) == total(rate)


FDC_RATES = [0.0, 0.01, 0.1, 0.3, 0.6, 0.99]


@pytest.mark.parametrize("rate", FDC_RATES)
def test_fdc_ranks_obey_equation_1(rate):
    values = falling_values()
    values[0, 0, 20:] = 0  # a head that is of rank 20
    ranks = compress.fdc_ranks(values, rate)
    for layer in range(2):
        for head in range(3):
            theta = values[layer, head].double()
            # The least number of columns beside which at most `rate` is lost, rounded up to 16.
            m = 1
            while theta[m:].sum() > rate * theta.sum():
                m += 1
            assert ranks[layer, head] == min(80, math.ceil(m / 16) * 16)


@pytest.mark.parametrize("rate", FDC_RATES)
def test_fdc_ranks_fall_with_the_rate(rate):
    values = falling_values()
    assert (compress.fdc_ranks(values, rate) >= compress.fdc_ranks(values, rate + 0.005)).all()


@pytest.mark.parametrize("rate", FDC_RATES)
def test_fdc_without_adaptive_ranks_gives_all_heads_their_mean(rate):
    """Rounded down: a whole number of columns, and no more bytes."""
    values = falling_values()
    values[0, 0, 20:] = 0
    ranks = compress.fdc_ranks(values, rate)
    equal = compress.fdc_ranks(values, rate, adaptive=False)
    assert equal.shape == ranks.shape
    assert (equal == equal[0, 0]).all()
    assert 0 <= ranks.double().mean() - equal[0, 0] < 1


def number_of_weights(model: Llama) -> int:
    """Of its matrices, without biases and norms."""
    return sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_fdc_search_measures_what_the_cache_does(fdc_fit, rate):
    """One forward pass with projectors has the perplexity of decoding token by token through the
    cache."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    tokens = fdc_fit.tokens
    _, searched = calibrate.fdc_accuracy(model, tokens, fdc_fit.tensors, rate).tolist()

    engine = make_engine(model, "fdc", *tokens.shape, fdc_fit.tensors, rate=rate)
    first = tokens[:, :1]
    rest = tokens[:, 1:]
    logits = logits_through(engine, first.tolist(), rest.tolist())[:-1]  # [n, B, V]
    loss = F.cross_entropy(logits.flatten(0, 1), rest.T.flatten())
    assert math.exp(loss) == pytest.approx(searched, 1e-4)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_fdc_stores_and_multiplies_each_head_at_its_rank(fdc_fit, rate):
    """In the cache, and in the weights of V and of the output."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    k_ranks = compress.fdc_ranks(fdc_fit.tensors["qk.values"], rate)
    v_ranks = compress.fdc_ranks(fdc_fit.tensors["v.values"], rate)
    before = number_of_weights(model)
    engine = make_engine(model, "fdc", 6, 48, fdc_fit.tensors, rate=rate)

    stored = sum(cache.bytes_stored() for cache in engine.caches)
    numbers_of_a_token = int((k_ranks + v_ranks).sum())
    assert stored == 6 * 48 * numbers_of_a_token * 4  # rows, tokens, fp32

    columns_lost = int((48 - v_ranks).sum())
    dim = 48
    of_w_v = columns_lost * dim
    of_w_o = columns_lost * dim * 2  # for both heads of a group
    assert number_of_weights(model) == before - of_w_v - of_w_o


def test_fdc_search_finds_the_largest_rate_above_the_floor(fdc_fit):
    def accuracy(rate: float) -> float:
        figures = calibrate.fdc_accuracy(fdc_fit.model, fdc_fit.tokens, fdc_fit.tensors, rate)
        return figures[0].item()

    rates = calibrate.fdc_rates(fdc_fit.tensors["qk.values"], fdc_fit.tensors["v.values"])
    found = rates.index(float(fdc_fit.tensors["rate"]))
    assert found > 0
    dense = accuracy(0.0)
    assert dense > 0.95  # the model wrote the text itself
    floor = 0.5 * dense  # as fdc_fit asks
    assert accuracy(rates[found]) >= floor
    assert accuracy(rates[found + 1]) < floor
    assert fdc_fit.facts["accuracy of dense's"] == pytest.approx(accuracy(rates[found]) / dense)


def test_fdc_search_finds_a_smaller_rate_for_a_higher_floor(fdc_fit):
    rate, kept_accuracy, _ = calibrate.fdc_search(
        fdc_fit.model, fdc_fit.tokens, fdc_fit.tensors, 1.0
    )
    assert rate < float(fdc_fit.tensors["rate"])
    assert kept_accuracy >= 1


# -------------------------------------------------------------------------- sampling and the engine


@pytest.mark.parametrize("vocabulary", [1, 5, 63, 64, 65, 1000, 4096])
def test_greedy_takes_the_first_of_the_largest(vocabulary):
    """As argmax does, though parts of a row are searched side by side: of vocabularies that fill
    them, of logits that are alike, -inf, or NaN, which argmax takes for the largest."""
    logits = randn(7, vocabulary)
    rounded = logits.round()
    least = torch.full((2, vocabulary), -torch.inf)
    broken = logits.masked_fill(logits > 1, NAN)
    for each in (logits, rounded, least, broken):
        assert torch.equal(sample(each, Sampling()), each.argmax(-1))


LOGITS = [0.1, 3.0, 2.0, -1.0, 2.9]  # probabilities .02, .42, .15, .01, .38
DRAWN_IDS = [  # sampling, and all ids that are drawn from LOGITS in the end
    (Sampling(1.0), {0, 1, 2, 3, 4}),
    (Sampling(1.0, top_k=2), {1, 4}),
    (Sampling(1.0, top_k=9), {0, 1, 2, 3, 4}),  # more than there are: all
    (Sampling(1.0, top_p=0.5), {1, 4}),  # the id that crosses top_p is one of them
    (Sampling(1.0, top_p=0.3), {1}),
    (Sampling(1e-300), {1}),  # less than fp32 can hold
]


@pytest.mark.parametrize("sampling, expected", DRAWN_IDS)
def test_top_k_and_top_p_leave_the_likeliest(sampling, expected):
    torch.manual_seed(0)
    logits = torch.tensor([LOGITS]).repeat(4000, 1)
    assert set(sample(logits, sampling).tolist()) == expected


def test_top_p_leaves_no_more_than_hold_it():
    """Of two equal ids the first one holds just .5."""
    drawn = sample(torch.zeros(99, 2), Sampling(1.0, top_p=0.5))
    assert len(set(drawn.tolist())) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_draw_is_of_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.tensor(LOGITS)
    drawn = sample(logits.repeat(4000, 1), Sampling(temperature))
    frequency = torch.bincount(drawn, minlength=5) / 4000
    probability = (logits / temperature).softmax(-1)
    assert (frequency - probability).abs().max() < 0.03


def test_a_capture_warms_up_in_a_cache_of_one_token(monkeypatch):
    """It runs the step four times, and each time in the first place."""
    for name in ("Stream", "current_stream", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    engine = make_engine(tiny_model(), "dense", 2, 1, graphed=True)
    assert engine.pos.tolist() == [0, 0]
    assert engine.tokens.tolist() == [0, 0]


GRAPHED = CASES


@needs_cuda
@over("method, options", lambda tests: tests.GRAPHED)
def test_graph_replay_equals_eager(method, options):
    """One graph over 300 steps of a ragged batch, across the budget's edge at 32 tokens."""
    prompts = [random_ids(n, n) for n in (5, 31, 60)]
    results = []
    for graphed in (False, True):
        model = tiny_model().cuda()
        engine = make_engine(model, method, 3, 400, graphed=graphed, **options)
        engine.prefill(prompts)
        tokens = decode_rows(engine, 300, lambda ids: False)
        results.append((tokens, engine.logits.tolist()))
    eager, replayed = results
    assert replayed == eager


NANO_CASES = [  # method, and settings
    ("sals", {}),
    ("sals", {"score": "sum"}),
    ("sals", {"variant": "paper"}),
    ("dense", {}),
    ("fdc", {}),
    ("loki", {}),
    ("topk", {"keep": 256}),
    ("lrqk", {"k": 256}),
    ("lrqk", {"variant": "paper"}),
]


@contextlib.contextmanager
def no_wait_for_the_device_and_no_compile():
    """Around steps of a captured graph: a wait of the host is an error, and so is a compilation."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.compiler.set_stance("default")


@needs_cuda
@over("method, options", lambda tests: tests.NANO_CASES)
def test_nanos_greedy_tokens_with_and_without_kernels_and_graph(method, options):
    """The compiled graph neither compiles again nor waits for the host once it is captured."""
    prompts = [nano_question(2000, "silent harbor"), nano_question(4000, "amber lantern")]
    tokens = []
    for kernel in (False, True):
        for graphed in (False, True):
            engine = fitted_engine(
                NANO,
                method,
                2,
                1600,
                "cuda",
                kernel=kernel,
                compiled=graphed,
                graphed=graphed,
                **options,
            )
            engine.prefill(prompts)
            engine.draw()
            made = []
            if graphed:
                around_steps = no_wait_for_the_device_and_no_compile()
            else:
                around_steps = contextlib.nullcontext()
            with around_steps:
                for _ in range(24):
                    made.append(engine.tokens.clone())
                    engine.step()
            tokens.append(torch.stack(made).tolist())
    for others in tokens[1:]:
        assert others == tokens[0]


CHUNKED = [  # whose attribute says how long a chunk is: of the MLP, and of attention over a past
    (Llama, "MLP_CHUNK"),
    (model_file, "QUERY_CHUNK"),
]


@pytest.mark.parametrize("owner, chunk", CHUNKED)
def test_long_prompts_are_read_in_chunks(owner, chunk, monkeypatch):
    """Up to the capacity's end."""
    ids = random_ids(30)
    whole = make_engine(tiny_model(), "dense", 1, 30)
    whole.prefill([ids])
    monkeypatch.setattr(owner, chunk, 7)
    in_chunks = make_engine(tiny_model(), "dense", 1, 30)
    in_chunks.prefill([ids[:5]])
    in_chunks.append([ids[5:]])
    assert error(in_chunks.logits, whole.logits) < 1e-5
    assert torch.equal(in_chunks.pos, whole.pos)


def test_a_follow_up_of_one_row_changes_nothing_of_the_others():
    engine = make_engine(tiny_model(), "dense", 9, 40)
    engine.prefill([random_ids(9)] * 9)
    before = engine.logits.clone()
    others_read_nothing = [[] for _ in range(8)]
    engine.append([random_ids(11), *others_read_nothing])
    assert engine.logits[1:].equal(before[1:])
    assert not engine.logits[0].equal(before[0])


def test_reading_draws_no_token():
    """That is for decoding: so a row that was read once can be drawn from often."""
    engine = make_engine(tiny_model(), "dense", 9, 40)
    engine.sampling = Sampling(50.0)
    numbers = engine.generator.get_state()
    engine.prefill([random_ids(9)] * 9)
    engine.append([random_ids(11)] * 9)
    assert engine.generator.get_state().equal(numbers)
    assert not engine.tokens.any()


@pytest.mark.parametrize("past", [0, 1, 77])
@pytest.mark.parametrize("n", [1, 32, 70])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("group, dim", [(1, 16), (4, 96), (2, 128)])
def test_causal_attention_over_a_past(group, dim, dtype, bound, n, past, monkeypatch):
    """By masks, and in half precision on CUDA by flash attention."""
    monkeypatch.setattr(model_file, "QUERY_CHUNK", 32)
    q = randn(n, 8, dim, dtype=dtype)
    k = randn(past + n, 8 // group, dim, dtype=dtype)
    v = randn(past + n, 8 // group, dim, seed=1, dtype=dtype)
    live = torch.ones(n, past + n, dtype=torch.bool, device=DEVICE).tril(past)
    expected = F.scaled_dot_product_attention(
        q.float().transpose(0, 1),
        k.float().repeat_interleave(group, 1).transpose(0, 1),
        v.float().repeat_interleave(group, 1).transpose(0, 1),
        attn_mask=live,
    )
    output = model_file.causal_attention(q, k, v)
    assert error(output, expected.transpose(0, 1)) < bound


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
    monkeypatch.setattr(kernels, "faster_attend", None)


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


def check_scores(dtype, rule, int8, B, S, H, N, r, r_score, block, run):
    pos = positions(*[S - 1, S // 2, 0][:B])
    live = torch.arange(S, device=DEVICE) <= pos[:, None]
    x = randn(B, S, H, r, dtype=dtype)
    rows, scale = kernels.quantize_int8(x) if int8 else (x, None)
    decoded = (rows * scale if int8 else x).float()[..., :r_score].transpose(1, 2)
    n = -(-S // block) if block else 1
    queries = 2 * randn(B, n, H, N, r_score, seed=1, dtype=dtype)
    queries[..., 0, :] *= N == 1  # a query without a largest number
    of_token = torch.arange(S, device=DEVICE) // (block or S)
    logits = torch.einsum("bshnr,bhsr->bhns", queries[:, of_token].float(), decoded)
    offset = randn(B, -(-S // run), H * N, seed=2) if run else None
    if run:
        # logits that rise and rise
        offset += torch.linspace(0, 100, offset.shape[1], device=DEVICE)[:, None]
        each = offset[:, torch.arange(S, device=DEVICE) // run]  # [B, S, H N]
        logits = logits + each.unflatten(2, (H, N)).permute(0, 2, 3, 1)
    logits = logits * 0.3
    logits = logits.masked_fill(~live[:, None, None], -torch.inf)
    if rule == "each":
        truth = logits.flatten(1, 2)
    elif rule == "largest":  # ranks alike without the constant of a single query
        truth = kernels.group_scores(logits, live) if N > 1 else logits[:, :, 0]
    else:
        truth = logits.softmax(-1).sum(2).masked_fill(~live[:, None], -torch.inf)
    if int8:
        scale = poison(scale[..., 0], ~live).transpose(1, 2)
    else:
        rows = poison(rows, ~live)
    queries, stored = queries if block else queries[:, 0], (rows.transpose(1, 2), scale)
    given = [(queries, None)]
    if int8 and block and kernels.takes_codes(queries, r_score):
        given.append(split_queries(queries))
    for queries, query_scale in given:
        out = kernels.launch_scores(
            queries, *stored, pos, 0.3, rule, block, offset, run or 1, query_scale
        )
        assert torch.equal(out > -torch.inf, truth > -torch.inf) and not out.isnan().any()
        if rule == "softmax" and DEVICE == "cuda":  # weights are kept in e5m2: two bits of fraction
            torch.testing.assert_close(out, truth, rtol=1 / 8 + TOLERANCE[dtype], atol=1e-6)
        else:
            close(out[out > -torch.inf], truth[truth > -torch.inf], dtype)


RULES = ["each", "largest", "softmax"]
# B, S, H, N, r, r_score, block; how often the mean key is rotated; blocks a program has
SCORES_SIZES = [
    (1, 70, 1, 4, 32, 16, 0, 0, 0),
    (3, 130, 2, 1, 48, 20, 48, 0, 0),
    (2, 90, 3, 6, 64, 64, 0, 0, 0),
    (2, 200, 1, 3, 40, 33, 48, 0, 0),
    (3, 97, 1, 32, 530, 520, 0, 0, 0),
    (3, 97, 1, 32, 530, 520, 512, 0, 0),
    (1, 129, 1, 8, 9, 5, 48, 0, 0),
    *((2, 130, 2, 3, 40, 32, block, run, 0) for block in (0, 48) for run in (1, 16)),
    # 24: a block for each
    *((2, 220, 1, 4, 40, 32, block, 0, n) for block in (0, 48) for n in (6, 24)),
]


@pytest.mark.parametrize(
    "dtype, rule, int8, sizes", pairwise(DTYPES, RULES, [False, True], SCORES_SIZES)
)
@poisoned
def test_kernel_scores(dtype, rule, int8, sizes, monkeypatch):
    """Every rule, with one query for all tokens or one a block, over rows of 16 bits, fp32 and
    int8, with an offset for runs of tokens, of one tile a program and of several."""
    *sizes, tiles = sizes
    if tiles:
        monkeypatch.setattr(kernels, "scores_config", lambda *_: (16, 32, 4, 2, tiles))
    check_scores(dtype, rule, int8, *sizes)


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
FORMATS = ["plain", "latents", *JOINT_LATENTS, "channels"]


def stored_keys(form, dtype, read, D, r=24, bits=4):
    """Random stores of a format as launch_attend takes them, NaN where a KV head does not read a
    token (read [B, Hkv, S]); and the keys [B, Hkv, S, D] that they hold, in fp32."""
    B, Hkv, S = read.shape
    k = randn(B, S, Hkv, D, seed=1, dtype=dtype).transpose(1, 2)
    if form == "plain":
        return [poison(k, ~read)], k.float()
    k = k.contiguous()
    if form == "channels":
        codes, low_scale = quantize(F.pad(k, (0, 0, 0, -S % 32)), bits, 32, -2)
        truth = compress.dequantize(codes, low_scale, bits, 32, dtype, -2)[:, :, :S].float()
        coded = F.pad(read, (0, -S % 32)).unflatten(2, (-1, 32)).any(3)
        return [codes, poison(low_scale, ~coded)], truth
    joint = "joint" in form
    cos, sin = rope_tables(tiny_config(head_dim=D), S, torch.device(DEVICE))
    latent = randn(B, 1 if joint else Hkv, S, r, dtype=dtype)
    basis, bias = r**-0.5 * randn(Hkv * D, r, seed=2, dtype=dtype), randn(Hkv * D, 1, seed=3)
    dead = ~read.any(1, keepdim=True) if joint else ~read  # those of all heads, as SALS has them
    if "mixed" in form:
        chunks = (r // 128 - 1) // 2  # of two times 128 dims, which hopper.py takes
        lead = r - 256 * chunks if chunks > 0 else r // 3 + (r - r // 3) % 2
        lead = r // 4 if r % 512 == 0 else lead
        codes, scale, rest = kernels.quantize_mixed(latent, lead)
        latent = kernels.dequantize_mixed(codes, scale, rest)
        basis_codes, basis_scale = compress.quantize_basis(basis.unflatten(0, (Hkv, -1)))
        basis, flat = (
            basis_codes * basis_scale,
            [basis_codes.flatten(0, 1), basis_scale.flatten(0, 1)],
        )
        flat.append(bias / flat[1])
        stores = [codes, poison(scale, dead), rest]
    else:
        flat, stores = [basis, None, bias], [poison(latent, dead), None, None]
        basis = basis.unflatten(0, (Hkv, D))
    stores = [x if x is None else x.expand(B, Hkv, *x.shape[2:]) for x in stores]
    paired = [x if x is None else kernels.interleave_rope(x, Hkv) for x in flat]
    k = (latent.float() @ basis.float().mT) + bias.view(Hkv, 1, D)
    truth = apply_rope(k.transpose(1, 2), cos, sin).transpose(1, 2)
    return [*stores, *paired, kernels.rope_pairs(cos, sin, dtype)], truth


def stored_values(form, dtype, read, DV, bits):
    """The same of values: by token, beside channels by head."""
    B, Hkv, S = read.shape
    v = randn(B, S, Hkv, DV, seed=6, dtype=dtype)
    v = v.transpose(1, 2).contiguous() if form == "channels" else v
    codes, low_scale, truth = v, None, v.float()
    if bits < 16:
        codes, low_scale = quantize(v, bits, min(32, DV))
        truth = compress.dequantize(codes, low_scale, bits, min(32, DV), dtype).float()
    if bits < 16 and "latents" in form:  # one scale a row
        codes, low_scale, truth = spread(v, bits)
    if form != "channels":
        codes, low_scale, truth = (
            x if x is None else x.transpose(1, 2) for x in (codes, low_scale, truth)
        )
    if bits == 16:
        return [poison(codes, ~read)], truth
    return [codes, poison(low_scale, ~read)], truth


def chosen_tokens(sets, n, B, S, pos):
    """For each set n places, some of none (-1), of distinct tokens up to pos; which tokens
    [B, sets, S]."""
    later = torch.arange(S, device=DEVICE) > pos.view(-1, *[1] * len(sets), 1)
    best, index = randn(B, *sets, S, seed=5).masked_fill(later, -torch.inf).topk(min(n, S))
    index = index.where(best > -torch.inf, -1).int()
    index[..., 2::7] = -1
    index = index if sets else F.pad(index, (3, 0))[:, 3:]  # rows that lie apart
    member = torch.zeros(B, *sets, S + 1, dtype=torch.bool, device=DEVICE)
    return index, member.scatter(-1, index.long().where(index >= 0, S), True)[..., :S]


def attend_case(
    dtype, form, tokens, B, S, Hkv, G, D, DV, bits, z, pos, n=40, r=24, rise=None, written=False
):
    """Arguments of launch_attend, with NaN in every slot that it must not read, or if `written`
    only where there is no token; and what it gives, in fp32.

    tokens: "all", or the kind of the index. rise: from the first to the last slot of the window
    keys are their query times factors from rise[0] to rise[1]."""
    pos, Hq = positions(*pos), Hkv * G
    places = torch.arange(S, device=DEVICE)
    if tokens == "all":
        index, live = None, (places <= pos[:, None] - z)[:, None].expand(-1, Hq, -1)
    else:
        sets = {"row": (), "KV head": (Hkv,), "query head": (Hq,)}[tokens]
        index, member = chosen_tokens(sets, n, B, S, pos)
        live = member.reshape(B, -1, S).repeat_interleave(Hq // max(1, *sets, 1), 1)
    read = live.unflatten(1, (Hkv, G)).any(2)
    if written:
        read = (places <= pos[:, None])[:, None].expand(-1, Hkv, -1)
    q = randn(B, Hq, D, dtype=dtype)
    keys, k = stored_keys(form, dtype, read, D, r, 2 if bits == 2 else 4)
    values, v = stored_values(form, dtype, read, DV, bits)
    window = [randn(B, z, Hkv, width, seed=7, dtype=dtype) for width in (D, DV)] if z else []
    if rise:
        factors = torch.linspace(*rise, z, device=DEVICE)[:, None, None]
        window[0] = (q[:, None, ::G].float() * factors).to(dtype)
    if z:
        k, v = (
            torch.cat((x, w.transpose(1, 2).float()), 2)
            for x, w in zip((k, v), window, strict=True)
        )
        filled = torch.arange(z, device=DEVICE) <= pos[:, None]
        live = torch.cat((live, filled[:, None].expand(-1, Hq, -1)), 2)
        window = [poison(x, ~filled) for x in window]
    k, v = (x.repeat_interleave(G, 1) for x in (k, v))
    logits = torch.einsum("bhd,bhnd->bhn", q.float(), k) * D**-0.5
    truth = torch.einsum("bhn,bhnd->bhd", logits.masked_fill(~live, -torch.inf).softmax(-1), v)
    kind = form.split()[-1]
    return (q, kind, keys, values, bits, pos, index, window, D**-0.5), truth


def check_attend(dtype, *case, **options):
    given, truth = attend_case(dtype, *case, **options)
    close(kernels.launch_attend(*given), truth, dtype)


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
INDEXES = ["all", "row", "KV head", "query head"]


@pytest.mark.parametrize(
    "dtype, form, tokens, sizes", pairwise(DTYPES, FORMATS, INDEXES, ATTEND_SIZES)
)
@poisoned
def test_kernel_attend(dtype, form, tokens, sizes):
    """Every format of keys and of values, every kind of index, with a window of exact tokens and
    without."""
    check_attend(dtype, form, "all" if form == "channels" else tokens, *sizes)


# KV heads, D, tokens a tile, ranks a step, splits.
TILES = [(2, 96, 16, 64, 1), (2, 128, 64, 32, 3), (1, 64, 32, 16, 5), (1, 160, 16, 64, 20)]
TILED = [*pairwise(FORMATS, ["all", "query head"], TILES), ("plain", "all", (1, 64, 32, 16, 70))]


@pytest.mark.parametrize("form, tokens, sizes", TILED)
@poisoned
def test_kernel_attend_tiles(monkeypatch, form, tokens, sizes):
    """The basis at once and in steps; empty splits, and more than a merge takes at once."""
    Hkv, D, tile, step, splits = sizes
    if form == "channels":
        tile, tokens = max(32, tile), "all"  # whole groups of 32 tokens
    step = max(64, step) if "mixed" in form else step
    monkeypatch.setattr(kernels, "ranks_at_once", lambda *_: step)
    monkeypatch.setattr(kernels, "attend_config", lambda *_: (tile, 4, 2, 1))
    monkeypatch.setattr(kernels, "attend_splits", lambda *_: splits)
    check_attend(torch.float16, form, tokens, 2, 310, Hkv, 2, D, D, 4, 100, (309, 120), n=130, r=57)


RISES = [(-3, 3), (3, -3), (-40, -40)]


@pytest.mark.parametrize("G, rise", [*zip((1, 4, 4), RISES, strict=True)])
@poisoned
def test_kernel_attend_window_of_several_tiles(G, rise):
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


LOGITS_SIZES = [
    (1, 70, 2, 1, 37, (69,)),
    (3, 300, 1, 8, 64, (299, 5, 0)),
    (2, 130, 2, 5, 200, (400, 64)),
]
LOGITS_SIZES += [(2, 90, 3, 3, 20, (88, 31))]


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
    logits, dead = logits.masked_fill(later[:, None, None], NAN), later[:, None].expand(-1, Hkv, -1)
    close(kernels.attend_logits(logits, poison(v, dead), pos, kernel=True), truth, dtype)


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
def test_kernel_attend_latent(monkeypatch, dtype, B, S, Hq, W, DV, pos, wide):
    """In one kernel, whose programs have several tiles; and rows too wide for it, by their
    logits."""
    monkeypatch.setattr(kernels, "attend_splits", lambda *_: 1 if S == 500 else 3)
    calls, scores = [], kernels.launch_scores
    monkeypatch.setattr(
        kernels, "launch_scores", lambda *given: calls.append(given) or scores(*given)
    )
    pos, q, rows = (
        positions(*pos),
        randn(B, Hq, W, dtype=dtype),
        randn(B, S, W, seed=1, dtype=dtype),
    )
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    logits = (q.float() @ rows.float().mT * W**-0.5).masked_fill(later[:, None], -torch.inf)
    truth = logits.softmax(-1) @ rows[..., :DV].float()
    out = kernels.attend_latent(q, poison(rows, later), pos, DV, scale=W**-0.5, kernel=True)
    close(out, truth, dtype)
    assert bool(calls) == wide


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


@pytest.mark.parametrize("name", ["attend", "scores", "select"])
def test_an_operation_of_kernels_runs_in_a_file_of_its_own(name, tmp_path, monkeypatch):
    """Copied with the functions and constants that it names, and they name."""
    module = copied(f"launch_{name}", tmp_path)
    assert (tmp_path / "copied.py").stat().st_size < (ROOT / "kernels.py").stat().st_size * 0.4
    monkeypatch.setattr(kernels, f"launch_{name}", getattr(module, f"launch_{name}"))
    if name == "attend":
        sizes = (2, 90, 2, 2, 64, 64, 4, 8, (80, 3))
        check_attend(torch.float16, "joint mixed latents", "row", *sizes)
    elif name == "scores":
        check_scores(torch.float16, "softmax", True, 2, 90, 1, 4, 40, 32, 48, 0)
    else:
        check_select("ties", 257, 4, 33, 8, (256, 17))


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

        def attend(form, H, G, bits, z, tokens="all", r=256, dtype=bf16, values=None):
            sizes = B, S, H, G, D, D, bits, z, (S - 1, 9)
            given = [*test_all.attend_case(dtype, form, tokens, *sizes, n=448, r=r)[0]]
            given[3] = values or given[3]
            kernels.launch_attend(*given)
            return given[3]

        for H, G in ((8, 4), (32, 1)):
            for tokens in ("all", "query head"):
                attend("plain", H, G, 16, 0, tokens)
                attend("plain", H, G, 16, 80, tokens)
                in_groups = attend("plain", H, G, 4, 80, tokens)
                attend("joint latents", H, G, 4, 80, tokens, values=in_groups)
                attend("joint mixed latents", H, G, 4, 80, tokens, 512)
            attend("joint mixed latents", H, G, 4, 80, r=512, dtype=fp32)
            attend("channels", H, G, 4, 80)
            k = zeros(B, H, S, D)
            for rule in test_all.RULES:
                kernels.launch_scores(zeros(B, H, G, 64), k, None, pos, 1.0, rule)
            kernels.attend_logits(zeros(B, H, G, S, dtype=fp32), k, pos, kernel=True)
            for W, DV in ((576, 512), (512, 448), (100, 60), (2048, 1536)):
                kernels.attend_latent(zeros(B, H * G, W), zeros(B, 4992, W), pos, DV, **how)
        kernels.launch_append(*test_all.appended(B, 32, D, 128, 192, S, 2, bf16))
        for coded in (False, True):
            kernels.launch_block_queries(*test_all.placed_queries(B, 4, 8, 4, D, 200, bf16), coded)
        latents = zeros(B, 1, S, 128, dtype=i8), zeros(B, 1, S, dtype=fp32)
        latents += (pos, 1.0, "softmax", 128, zeros(B, 32, 32, dtype=fp32), 16)
        kernels.launch_scores(zeros(B, 4, 1, 32, 128), *latents)
        codes = zeros(2, B, 4, 1, 32, 128, dtype=i8)
        kernels.launch_scores(codes, *latents, query_scale=zeros(B, 4, 32, dtype=fp32))
        ranks = [96, 48, 80, 16]
        table, packed = kernels.rank_table(ranks, torch.device("cpu")), zeros(B * S * sum(ranks))
        kernels.launch_attend_ragged(zeros(B, 8, 96), packed, table, ranks, pos, 1.0)
        assert {name for name, _ in compiled} == names, names - {name for name, _ in compiled}
        small = len(compiled)
        if overlaps:  # Hopper GPUs, which have more: a basis that is held, wide plain values
            kernels.roomy = lambda device: True
            attend("joint latents", 8, 4, 16, 80)
            for W, DV in ((32, 32), (40, 24), (64, 40), (104, 60), (256, 256), (512, 448)):
                kernels.attend_latent(zeros(B, 32, W), zeros(B, 4992, W), pos, DV, **how)
                kernel = [kernel for name, kernel in compiled if name == "_attend_kernel"][-1]
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
    run_for_hopper(f"overlaps = {capability >= 90}\n", program, capability=capability)


# ---- heads of unequal rank, rows of host memory


UNEQUAL = [16, 96, 48, 64, 80, 16]
FDC_SIZES = [  # d_qk of each head, then d_v; B, S, G, pos
    ([32, 32, 32, 32], 1, 70, 1, (69,)),
    (UNEQUAL, 3, 300, 2, (299, 0, 64)),
    (UNEQUAL, 5, 90, 1, (1, 89, 63, 3, 0)),
    ([40, 24, 8, 96], 2, 130, 8, (127, 128)),
    ([16 * (1 + h % 6) for h in range(20)], 2, 150, 1, (149, 40)),
    ([16, 24], 1, 8400, 1, (8399,)),  # 66 splits, of which a merge takes 64 at once
]


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, FDC_SIZES))
@poisoned
def test_kernel_fdc_attend(dtype, sizes):
    """Against each head on its own, in the packed buffer and of the queries at its own rank."""
    ranks, B, S, G, pos = sizes
    Hkv, pos = len(ranks) // 2, positions(*pos)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    parts = [randn(B, S, rank, seed=i, dtype=dtype) for i, rank in enumerate(ranks)]
    q = randn(B, Hkv, G, max(ranks[:Hkv]), dtype=dtype)
    truth = []
    for h, rank in enumerate(ranks[:Hkv]):
        logits = q[:, h, :, :rank].float() @ parts[h].float().mT * 0.2
        weights = logits.masked_fill(later[:, None], -torch.inf).softmax(-1)
        truth.append(weights @ parts[Hkv + h].float())
        q[:, h, :, rank:] = NAN
    packed = torch.cat([poison(part, later).flatten() for part in parts])
    stored = packed, kernels.rank_table(ranks, DEVICE), ranks
    out = kernels.launch_attend_ragged(q.flatten(1, 2), *stored, pos, 0.2).unflatten(1, (Hkv, G))
    for h, rank in enumerate(ranks[Hkv:]):
        close(out[:, h, :, :rank], truth[h], dtype)
        assert not out[:, h, :, rank:].any()


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
OPERATIONS = "append attend attend_ragged block_queries scores select".split()
CHOSEN = "block_queries latents scores select"
# method, options (and head_dim), group, operations (of attend, the kinds of keys)
SAME_WITH_KERNELS = [
    ("dense", {}, 4, "plain"),
    ("sals", SALS_0, 2, "plain scores select"),
    ("sals", CODES | {"skip": ""}, 8, "append " + CHOSEN),
    ("sals", SALS_0 | {"bits": 2, "rank": 0.3}, 1, "plain scores select"),
    ("sals", CODES | {"skip": "0", "head_dim": 128}, 2, "append channels " + CHOSEN),
    ("sals", CODES | {"skip": "", "bits": 2, "rank": 0.8, "qkv_bias": True}, 1, "append " + CHOSEN),
    ("sals", CODES | {"skip": "", "bits": 2, "head_dim": 80}, 1, "append " + CHOSEN),
    ("sals", CODES | {"skip": "", "score": "sum"}, 4, "append latents scores select"),
    (
        "sals",
        CODES | {"skip": "", "head_dim": 24, "rank": 0.8},
        2,
        "append block_queries scores select",
    ),
    ("fdc", {"rate": 0.2}, 2, "attend_ragged"),
    ("fdc", {"adaptive": False}, 8, "attend_ragged"),
    ("kivi", {"residual": 32}, 4, "channels"),
    ("kivi", {"residual": 32, "bits": 2}, 1, "channels"),
    ("elitekv", {}, 2, "mla"),
    ("loki", {"reduced": True, "d": 0.5}, 2, "plain"),
    ("loki", {"k": 0.5, "d": 0.25}, 2, "plain scores select"),
    ("lrqk", {"rank": 8, "k": 24, "recent": 8}, 2, "plain scores select"),
    (
        "lrqk",
        {"rank": 8, "k": 24, "recent": 8, "variant": "paper", "slots": 1.5},
        2,
        "plain scores select",
    ),
    ("topk", {"keep": 32}, 2, "plain scores select"),
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
            calls.add(given[1] if name == "attend" else name)
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


def good_arguments(name: str) -> dict:
    """Arguments of an operation, or of attend over a format of keys, by name, at which nothing is
    wrong."""
    if name in FORMATS:
        names = ("q", "kind", "keys", "values", "bits", "pos", "index", "window", "scale")
        tokens, G = ("row", 1) if "latents" in name else ("all", 2)
        sizes = 1, 40, 2, G, 32, 32, 4, 4, (39,)
        given, _ = attend_case(torch.float32, name, tokens, *sizes, written=True)
        return dict(zip(names, given, strict=True))
    pos, q = positions(9), randn(1, 2, 16)
    rows, hot, index = (
        randn(1, 2, 9, 16),
        randn(1, 2, 3, 16),
        torch.zeros(1, 2, 1).long().to(DEVICE),
    )
    table = kernels.rank_table([16, 16], DEVICE)
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


REFUSED = [  # operation or format of keys, arguments and their changes, the message
    ("plain", {"q": lambda q: q[:, :3]}, "3 query heads do not divide over 2"),
    ("plain", {"q": turned}, "q .* must be contiguous"),
    ("plain", {"q": lambda q: q.half()}, "keys must be torch.float16"),
    ("plain", {"pos": lambda pos: pos.long()}, "pos must be torch.int32"),
    ("plain", {"keys": other(0, turned)}, "keys must be whole vectors"),
    ("plain", {"bits": instead(3)}, "bits must be 2, 4 or 16"),
    ("plain", {"bits": instead(16)}, "values must be torch.float32"),
    ("plain", {"values": other(1, lambda x: x.float())}, "scale of values must be torch.float16"),
    ("plain", {"values": other(1, lambda x: x.contiguous())}, "scale of values must lie as"),
    ("plain", {"window": other(0, lambda x: x.half())}, "window keys must be torch.float32"),
    ("plain", {"window": other(1, lambda x: x[:, 1:])}, "window values must be"),
    (
        "plain",
        {"index": lambda _: torch.zeros(1, 2, 9, device=DEVICE)},
        "index must be torch.int32",
    ),
    ("plain", {"index": lambda _: positions(1, 2, 3)}, r"index must be \[1, .., n\]"),
    ("plain", {"index": lambda _: positions(1, 2, 3).view(1, 3, 1)}, "a query head, not 3"),
    ("joint latents", {"keys": other(1, lambda _: randn(1, 2, 40))}, "codes of latents have"),
    ("joint latents", {"keys": other(4, lambda _: randn(2, 32, 1))}, "codes of latents have"),
    ("joint latents", {"keys": other(2, lambda _: randn(1, 2, 40, 4))}, "codes of latents have"),
    ("plain", {"values": lambda values: values[:1]}, "need low_scale"),
    ("joint latents", {"keys": other(3, lambda x: x[:, :16])}, "basis .* must be"),
    ("joint latents", {"keys": other(5, lambda _: randn(2, 16, 1))}, "bias .* must be"),
    ("joint latents", {"keys": other(6, lambda x: x[:39])}, "rope has 39 positions, the cache 40"),
    ("channels", {"keys": other(0, lambda x: x[..., :4])}, "2 or 4 bits, not"),
    (
        "channels",
        {"index": lambda _: positions(1, 2).view(1, 2)},
        "of channels all tokens are attended",
    ),
    ("channels", {"keys": other(1, lambda x: x[:, :, :1])}, "low_scale of keys must be"),
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
    ("scores", {"offset": lambda _: randn(1, 9, 4), "run": instead(1)}, "offset must be"),
    ("scores", {"rule": instead("sum")}, "no rule sum"),
    ("scores", {"vector_scale": lambda _: randn(1, 1, 10)}, "vectors must be torch.int8"),
    (
        "scores",
        {"queries": lambda q: q[..., :3], "vectors": lambda x: x[..., :3]},
        "must be whole vectors",
    ),
    (
        "scores",
        {"queries": lambda _: randn(1, 3, 1, 4, 8), "block": instead(8)},
        "no queries for blocks",
    ),
    (
        "scores",
        {"queries": lambda _: randn(1, 2, 1, 4, 8), "block": instead(8)},
        "not a multiple of 16",
    ),
    ("attend_logits", {"logits": lambda x: x.half()}, "must be torch.float32"),
    ("attend_logits", {"v": lambda v: v[:, :1]}, "do not divide|logits must be"),
    ("attend_ragged", {"ranks": instead([16])}, "ranks must be d_qk and d_v"),
    ("fetch_rows", {"index": lambda index: index.int()}, "index must be torch.int64"),
    ("fetch_rows", {"rows": turned}, "rows .* must be contiguous"),
    ("value_packing", {"D": instead(48)}, "multiple of 32"),
]


def operation_of(name: str) -> Callable:
    name = "attend" if name in FORMATS else name
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


# ------------------------------------------------- a tiny checkpoint, command lines in this process


class CommandLine:
    """Runs command lines in this process, on the CPU unless they name CUDA. A line begins with
    generate, with a command of calibrate, or with a name of `programs`."""

    programs = {}  # others, by the word that a line begins with

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, line: str, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; the last two are kept as `out` and `err`."""
        if stdin is not None:
            data = io.BytesIO(stdin.encode())
            # The locale's encoding is another: a command reads UTF-8 all the same.
            self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, "ascii", newline=""))
        program, *argv = shlex.split(line)
        if "cuda" not in argv:
            self.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code = 0
        try:
            self.run(program, argv)
        except SystemExit as stop:
            code = stop.code or 0
        self.out, self.err = self.capsys.readouterr()
        return code, self.out, self.err

    def run(self, program: str, argv: list[str]) -> None:
        """Runs a program with these arguments; it may raise SystemExit."""
        if program == "generate":
            self.monkeypatch.setattr(sys, "argv", ["command", *argv])
            generate.main()
        elif program in self.programs:
            self.monkeypatch.setattr(sys, "argv", ["command", *argv])
            generate.run_command(self.programs[program])
        else:
            self.monkeypatch.setattr(sys, "argv", ["command", program, *argv])
            generate.run_command(calibrate.run)

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
        assert code == 2, err
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        return err


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def fitted(tests) -> list[str]:
    """The artifacts of the methods of `tests`; each has the name of a method."""
    return sorted({row.artifact for row in tests.METHODS.values() if row.fit})


def put_artifact(folder: Path, method: str, tensors: dict, model: Llama | None = None) -> None:
    """As fitted to this folder's model by default; None: without this tensor."""
    model = model or load_model(folder, CPU, torch.float32)
    # A file wants tensors that share no memory.
    copies = {name: t.contiguous().clone() for name, t in tensors.items() if t is not None}
    path = compress.artifact_path(folder, method)
    save_artifact(copies, path, compress.model_identity(model))


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, request):
    """A tiny checkpoint with bases of five eighths of the rank for SALS."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", request.module)
    put_artifact(folder, "sals", compress.random_artifact("sals", tiny_config()))
    return folder


def is_held_out(name: str) -> bool:
    """Whether evaluation reads a file of the standard library, and so calibration does not."""
    return zlib.crc32(name.encode()) % 16 == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The largest files of the standard library: two that evaluation reads, six others."""
    folder = tmp_path_factory.mktemp("library")
    room = {True: 2, False: 6}  # by is_held_out
    for file in sorted(calibrate.STDLIB.glob("*.py"), key=lambda file: -file.stat().st_size):
        held = is_held_out(file.name)
        if room[held] > 0:
            room[held] -= 1
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
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    monkeypatch.setattr(generate, "NANO", path)
    return path


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_key(path: Path, name: str) -> None:
    data = json.loads(path.read_text())
    del data[name]
    path.write_text(json.dumps(data))


def put_weight(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a tensor of the checkpoint, or with None drops it."""
    tensors = load_file(folder / WEIGHTS)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def move_weights(folder: Path, **shards: str) -> None:
    """They go out of the folder; its index names shards."""
    shutil.move(folder / WEIGHTS, folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))


def truncate(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder."""
    return {path: path.read_bytes() for path in folder.iterdir()}


# --------------------------------------------------------------- files: damaged, read, and replaced

BAD_CONFIGS = [  # changes to config.json, and what the error says
    ({"head_dim": 1 << 31}, "head_dim is"),
    ({"head_dim": 15}, "RoPE rotates pairs of dims"),
    ({"num_hidden_layers": 500_000}, "38 tensors cannot be 500000 layers"),
    ({"num_hidden_layers": 2}, "asks for none; the two do not belong together"),
    ({"intermediate_size": 63}, "do not belong together"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"max_position_embeddings": None}, "max_positions"),
    ({"hidden_size": None}, "dim"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": [2]}}, "not a usable config"),
    ({"rope_scaling": {"rope_type": "linear"}}, "not a usable config"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"model_type": "mistral", "sliding_window": 8}, "sliding window"),
    ({"hidden_act": "gelu"}, "'gelu' is not supported; supported: silu"),
    ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' is not supported"),
]


def assert_refused_and_nothing_written(message: str, cli, folder: Path) -> None:
    before = sorted(folder.iterdir())
    line = "generate --method sals --prompt 'hello there' --max_new_tokens 20"
    assert message in cli.refusal(line)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("changes, message", BAD_CONFIGS)
def test_a_config_that_cannot_be_used_ends_in_one_line(changes, message, cli, folder):
    edit_json(folder / "config.json", **changes)
    assert_refused_and_nothing_written(message, cli, folder)


def write_a_list_as_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def write_an_index_of_nothing(folder: Path) -> None:
    move_weights(folder)
    edit_json(folder / INDEX, weight_map=None)


def put_nan_into_a_norm(folder: Path) -> None:
    put_weight(folder, NORM, torch.full((48,), torch.nan))


def put_a_smaller_vocabulary(folder: Path) -> None:
    save_checkpoint(tiny_model(vocab_size=100), folder)


def put_the_artifact_of_another_model(folder: Path) -> None:
    put_artifact(folder, "sals", {"0.basis": torch.eye(64)}, tiny_model())


DAMAGE = [  # what is done to the folder, and what the error says
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: truncate(f / "config.json"), "config.json: not valid JSON"),
    (write_a_list_as_config, "config.json: no JSON object"),
    (
        lambda f: drop_key(f / "config.json", "rms_norm_eps"),
        "not a usable config; it lacks 'rms_norm_eps'",
    ),
    (write_an_index_of_nothing, "index.json: no weight_map in it"),
    (lambda f: move_weights(f), "saved as safetensors"),
    (
        lambda f: move_weights(f, norm="../outside.safetensors"),
        "outside.safetensors is missing",
    ),
    (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "saved as safetensors"),
    (lambda f: truncate(f / WEIGHTS), "download it again"),
    (put_nan_into_a_norm, "not finite in torch.float32; download it"),
    (lambda f: put_weight(f, UP, None), f"tensor {UP} is missing, config.json asks for [64, 48]"),
    (put_a_smaller_vocabulary, "outside the model's vocabulary of 100"),
    (lambda f: compress.artifact_path(f, "sals").unlink(), "calibrate.py fit"),
    (lambda f: truncate(compress.artifact_path(f, "sals")), "make it again"),
    (put_the_artifact_of_another_model, "of another fingerprint"),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_damaged_folders_end_in_one_line(damage, message, cli, folder):
    damage(folder)
    assert_refused_and_nothing_written(message, cli, folder)


def test_logits_beyond_fp16_end_in_one_line(cli, folder):
    """The weights are within fp16's range. In bf16, as the error says, the same model runs."""
    norm = load_file(folder / WEIGHTS)[NORM]
    put_weight(folder, NORM, torch.full_like(norm, 6e4))
    line = "generate --prompt hello --max_new_tokens 3 --dtype"
    told = cli.refusal(f"{line} fp16")
    assert "not finite in torch.float16; use --dtype bf16 or fp32" in told
    assert cli(f"{line} bf16")[0] == 0


def test_weights_beyond_fp16_end_in_one_line(cli, folder):
    norm = load_file(folder / WEIGHTS)[NORM]
    put_weight(folder, NORM, torch.full_like(norm, 1e5))
    told = cli.refusal("generate --prompt hello --max_new_tokens 3 --dtype fp16")
    assert "model.norm.weight is not finite in torch.float16; use --dtype bf16" in told


def test_logits_that_become_nan_while_decoding_are_refused():
    engine = make_engine(tiny_model(), "dense", 1, 9)
    engine.prefill([[5]])
    nan_logits = torch.full((1, 96), torch.nan)
    with mock.patch.object(engine, "decode", lambda *_: nan_logits):
        with pytest.raises(UserError, match="not finite in torch.float32; use"):
            decode_rows(engine, 3, lambda ids: False)


def test_the_index_names_the_files(folder):
    """A tensor is read from the file that the index has for it, whatever other files hold."""
    before = load_model(folder, CPU, torch.float32).state_dict()
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {"a": {"old": torch.ones(2)}, "b": {"old": torch.ones(2)}}
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        own, other = ("a", "b") if i % 2 == 0 else ("b", "a")
        weight_map[name] = own
        files[own][name] = tensor
        files[other][name] = tensor + 1  # left from an older version, say
    for file, held in files.items():
        save_file(held, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    after = load_model(folder, CPU, torch.float32).state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_a_tied_matrix_may_have_the_name_of_the_output(folder):
    expected = load_model(folder, CPU, torch.float32).output.weight.clone()
    put_weight(folder, "model.embed_tokens.weight", None)
    put_weight(folder, "lm_head.weight", expected)
    model = load_model(folder, CPU, torch.float32)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, expected)


def test_a_tied_matrix_that_the_files_hold_twice_is_two(folder):
    """The config says tied, but the files count."""
    output = load_model(folder, CPU, torch.float32).output.weight.clone()
    put_weight(folder, "lm_head.weight", output)
    put_weight(folder, "model.embed_tokens.weight", output + 1)
    model = load_model(folder, CPU, torch.float32)
    assert not model.config.tied
    assert torch.equal(model.output.weight, output)
    assert torch.equal(model.tok_embeddings.weight, output + 1)


def wrong_tensors(tensor: torch.Tensor, kind: type, n_dims: int) -> list:
    """Tensors in the place of an artifact's, and what their errors say."""
    wrong = [
        (None, "is missing"),
        (torch.stack((tensor, tensor)), r"is \["),
        (tensor.to(torch.complex64), "numbers"),
        (tensor.to(torch.int8), "numbers"),
    ]
    if n_dims > 0:
        wrong.append((torch.cat((tensor, tensor)), r"is \["))
        wrong.append((tensor[:-1], r"is \["))
    if kind is float:
        wrong.append((tensor.to(torch.int32), "numbers"))
        wrong.append((tensor * torch.nan, "not finite"))
    else:
        wrong.append((tensor.to(torch.float32), "numbers"))
        if n_dims > 0:
            wrong.append((tensor + 1, "is no order"))
    return wrong


@over("method", fitted)
def test_an_artifact_is_held_to_the_tensors_of_its_method(method, checkpoint, tmp_path):
    model = load_model(checkpoint, CPU, torch.float32)
    good = artifact_of(method, model)
    for name, (kind, *shape) in method_named(method).tensors(model.config).items():
        for tensor, message in wrong_tensors(good[name], kind, len(shape)):
            put_artifact(tmp_path, method, good | {name: tensor}, model)
            with pytest.raises(UserError, match=f"{re.escape(name)} .*{message}"):
                load_artifact(tmp_path, method, model)


@over("method", fitted)
def test_an_artifact_that_has_all_tensors_of_its_method_is_loaded(method, checkpoint, tmp_path):
    model = load_model(checkpoint, CPU, torch.float32)
    for tensors in (artifact_of(method, model), compress.random_artifact(method, model.config)):
        put_artifact(tmp_path, method, tensors, model)
        assert load_artifact(tmp_path, method, model).keys() == tensors.keys()


def replace_two_files(folder: Path) -> None:
    """A config.json and weights that are no model's."""
    with compress.replacing(folder, "two") as partial:
        (partial / "config.json").write_text("{}")
        save_artifact({"a": torch.zeros(2)}, partial / WEIGHTS, {})


MISTAKES = [  # while a file is written
    OSError("No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_while_files_are_written_leaves_the_old_ones(mistake, folder, tmp_path):
    before = contents(folder)

    def write_half(path, data):
        path.write_text("half")
        raise mistake

    with mock.patch.object(Path, "write_bytes", write_half):
        for target in (folder, tmp_path / "new"):
            with pytest.raises(type(mistake), match=f"^{mistake}$"):
                replace_two_files(target)
        with pytest.raises(type(mistake), match=f"^{mistake}$"):
            save_artifact({"a": torch.zeros(2)}, folder / "b.safetensors", {})
    assert contents(folder) == before
    assert not (tmp_path / "new").exists()


def test_files_are_replaced_together(folder, tmp_path):
    before = contents(folder)
    replace_two_files(folder)
    after = contents(folder)
    assert after.keys() == before.keys()
    assert after[folder / "config.json"] == b"{}"
    assert after[folder / WEIGHTS] != before[folder / WEIGHTS]
    # Whoever can read other files can read these.
    (tmp_path / "plain").write_text("")
    assert (folder / WEIGHTS).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_config_json_is_replaced_last(folder, monkeypatch):
    """Whoever finds the new config finds the new weights, too."""
    replaced = []
    replace = Path.replace

    def watched_replace(path, target):
        replaced.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched_replace)
    replace_two_files(folder)
    assert replaced[-2:] == [WEIGHTS, "config.json"]


def test_two_that_write_one_file_do_not_meet(tmp_path):
    """Each writes into a folder of its own. One that a killed process has left long ago goes."""
    killed = tmp_path / "a.killed.partial"
    killed.mkdir()
    os.utime(killed, (0, 0))
    with calibrate.replacing(tmp_path, "a") as first:
        (first / "a").write_text("first")
        with calibrate.replacing(tmp_path, "a") as second:
            (second / "a").write_text("second")
        assert (tmp_path / "a").read_text() == "second"
    assert (tmp_path / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_files_are_utf_8_in_every_locale(tmp_path):
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        calibrate.save_csv(tmp_path / "t.csv", ["caf\u00e9"], [{"caf\u00e9": "\udce9"}])
        # What UTF-8 cannot hold, half of a surrogate pair, becomes a question mark.
        assert generate.read_text(tmp_path / "t.csv") == "caf\u00e9\n?\n"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


# ----------------------------------------------------------------------------- the Python API (LLM)

PROMPT = "the magic number for silent lantern"


def small_llm(checkpoint: Path, **options) -> generate.LLM:
    return generate.LLM(checkpoint, **{"device": "cpu", "max_seq_length": 64, **options})


# ---- generate


def test_a_prompt_is_a_text_ids_or_messages(folder):
    """Ids in a list, a tuple, an array or a tensor, alone or as the one prompt of a list."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    llm = small_llm(folder)
    messages = [{"role": "user", "content": PROMPT}]
    for prompt in (PROMPT, messages):
        ids = llm.encode(prompt)
        expected = small_llm(folder).generate(ids, 3, ignore_eos=True).token_ids
        forms = [
            prompt,
            ids,
            tuple(ids),
            np.array(ids),
            torch.tensor(ids),
            list(np.array(ids)),
            list(torch.tensor(ids, dtype=torch.int32)),
        ]
        for form in forms:
            output = llm.generate(form, 3, ignore_eos=True)
            assert output.token_ids == expected
            outputs = llm.generate([form], 3, ignore_eos=True)
            assert [each.token_ids for each in outputs] == [expected]
            streamed = "".join(llm.stream(form, 3, ignore_eos=True))
            assert streamed == output.text
        llm.prefill(prompt)
        assert llm.token_ids == [ids]
    assert llm.chat(messages, 3, ignore_eos=True).token_ids == expected


def test_an_array_of_two_dims_is_a_list_of_prompts(checkpoint):
    prompts = np.array([[5, 6, 7], [8, 9, 10]])
    outputs = small_llm(checkpoint).generate(prompts, 2, ignore_eos=True)
    assert [output.prompt_tokens for output in outputs] == [3, 3]


NO_PROMPTS = [  # and what the error says
    ([5, -6, 7], "token id -6 is outside the model's vocabulary of 4096"),
    (torch.tensor([5, 4096]), "token id 4096 is outside"),
    ([5.5], "token ids are whole numbers, not 5.5"),
    ([True], "token ids are whole numbers, not True"),
    (7, "a prompt is a text, token ids or a chat's messages, not int"),
    ([None], "a prompt is a text, token ids or a chat's messages, not None"),
    ([{"role": "user"}], "a chat is a list of messages"),
    ([{"content": "who"}], "a chat is a list of messages"),
    ([], "there is no prompt"),
    ([[]], "no tokens"),
]


@pytest.mark.parametrize("wrong, message", NO_PROMPTS)
def test_what_is_no_prompt_is_refused(wrong, message, checkpoint):
    with pytest.raises(UserError, match=re.escape(message)):
        small_llm(checkpoint).generate(wrong, 2)


@pytest.mark.parametrize("wrong", ["hi", [], ["hi"], {"role": "user", "content": "hi"}])
def test_what_is_no_chat_is_refused(wrong, checkpoint):
    with pytest.raises(UserError, match="a chat is a list of messages"):
        small_llm(checkpoint).chat(wrong)


def test_a_stream_is_of_one_prompt(checkpoint):
    with pytest.raises(UserError, match="stream takes one prompt"):
        small_llm(checkpoint).stream(["a", "b"])


def test_random_weights_take_ids_and_no_text():
    llm = generate.LLM(tiny_config(), device="cpu", max_seq_length=64)
    output = llm.generate([5, 6, 7], 3)
    assert output.text == ""
    assert len(output.token_ids) == 3
    with pytest.raises(UserError, match="no tokenizer; give token ids"):
        llm.generate("text", 3)


def test_no_new_tokens_read_alone(checkpoint):
    llm = small_llm(checkpoint)
    output = llm.generate(PROMPT, 0)
    assert output.token_ids == []
    assert output.finish_reason == "length"
    assert int(llm.engine.pos[0]) == output.prompt_tokens
    report = llm.report()
    assert report["decode_tokens_per_s"] is None
    assert report["first_token_s"] is None
    never_paused = small_llm(checkpoint).generate(PROMPT, 5)
    assert llm.generate([[]], 5, follow=True)[0].token_ids == never_paused.token_ids


def test_an_output_outlives_its_llm(checkpoint):
    """It can be stored, and holds no model. Nor does a stream that was dropped."""
    models = []

    def answer() -> generate.Output:
        llm = small_llm(checkpoint)
        models.append(weakref.ref(llm.model))
        output = llm.generate(PROMPT, 3, ignore_eos=True)
        next(llm.stream(PROMPT, 3, ignore_eos=True))
        return output

    gc.disable()  # memory is free at once, without a collection of cycles
    output = answer()
    gc.enable()
    assert models[0]() is None

    stored = pickle.dumps(output)
    assert pickle.loads(stored) == output
    assert len(stored) < 1000
    names = {"text", "token_ids", "prompt_tokens", "finish_reason"}
    assert set(dataclasses.asdict(output)) == names
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 3


TEXTS_OF_GROUPS = ["who", "hello there", "the magic number", "and so on", "where is it"]


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_prompts_are_served_in_groups_and_rows_without_one_are_idle(method, checkpoint, tmp_path):
    """Each prompt has the output that it has alone, whatever its row, and the rows before it."""
    texts = TEXTS_OF_GROUPS
    alone = {}
    for text in texts:
        alone[text] = small_llm(checkpoint, method=method).generate(text, 5, ignore_eos=True)
    llm = small_llm(checkpoint, method=method)
    for prompts in (texts[:3], texts, texts[3:], texts[1:2]):
        outputs = llm.generate(prompts, 5, ignore_eos=True)
        assert len(llm.token_ids) == 3  # rows, by the first call
        assert outputs == [alone[text] for text in prompts]
        assert llm.report()["token_ids"] == [output.token_ids for output in outputs]

    # The last call had one prompt: the other rows hold nothing, and nothing of them is saved.
    assert llm.engine.pos[1:].tolist() == [0, 0]
    assert llm.token_ids[1:] == [[], []]
    n_written = len(llm.token_ids[0]) - 1  # a step is still to write the last token
    assert llm.held_memory().tokens == n_written
    llm.save(tmp_path / "cache")
    assert generate.saved_facts(tmp_path / "cache").lengths == [n_written]


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_an_idle_row_is_read_again_when_it_is_followed(method, checkpoint):
    """Beside a row that goes on, it loses its place in the cache, but keeps its ids."""
    llm = small_llm(checkpoint, method=method)
    llm.generate(TEXTS_OF_GROUPS[:3], 5, ignore_eos=True)
    llm.generate(" then", 50, ignore_eos=True, follow=True)
    expected = small_llm(checkpoint, method=method)
    expected.prefill([list(ids) for ids in llm.token_ids])
    outputs = []
    for each in (llm, expected):
        outputs.append(each.generate([" so"] * 3, 4, follow=True, ignore_eos=True))
    assert outputs[0] == outputs[1]


def test_a_row_of_one_token_is_saved_after_others_took_its_place(folder, tmp_path):
    """A row that idles loses its place in the cache; its one token is read again to be saved."""
    llm = generate.LLM(folder, device="cpu", batch_size=2, max_seq_length=64)
    llm.prefill([[5, 6], [7]])
    llm.generate([[9]], 2, follow=True, ignore_eos=True)
    llm.save(tmp_path / "cache")
    assert generate.saved_facts(tmp_path / "cache").lengths[1] == 1


def test_a_follow_up_goes_on_after_a_stop_token_without_reading_again(folder, monkeypatch):
    """The stop token is in the row, and no part of the answer."""
    free = small_llm(folder).generate("hello", 20, ignore_eos=True)
    stop = free.token_ids[5]
    edit_json(folder / "config.json", eos_token_id=stop)
    llm = generate.LLM(folder, device="cpu", max_seq_length=80)
    answer = llm.generate("hello", 20)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop)]
    assert llm.token_ids[0][-1] == stop
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("read again"))
    llm.generate(" how are you", 4, follow=True)


def test_a_reading_that_fails_leaves_no_rows_of_another_prompt(checkpoint):
    """Ctrl-C, say, while another prompt is read: the row is still the document's, and is read again
    when it is followed."""
    llm = small_llm(checkpoint)
    document = llm.encode("once upon a time there was a green river")
    llm.prefill(document)
    with mock.patch.object(generate.Engine, "check_logits", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            llm.generate([7] * (len(document) - 2), 3)
    assert llm.token_ids == [document]
    fresh = small_llm(checkpoint)
    fresh.prefill(document)
    outputs = []
    for each in (llm, fresh):
        outputs.append(each.generate(" who", 6, ignore_eos=True, follow=True))
    assert outputs[0] == outputs[1]


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


# ---- random numbers


def test_each_call_draws_anew(checkpoint):
    llm = small_llm(checkpoint)
    drawn = [llm.generate(PROMPT, 1, temperature=2.0).token_ids[0] for _ in range(8)]
    assert len(set(drawn)) > 4


def test_forked_rows_draw_for_themselves(checkpoint):
    """The token after a prompt is drawn when decoding starts, not when the prompt is read."""
    llm = small_llm(checkpoint, batch_size=8)
    llm.prefill(PROMPT)
    llm.fork(0, 8)
    outputs = llm.generate([[]] * 8, 1, temperature=2.0, follow=True)
    drawn = [output.token_ids[0] for output in outputs]
    assert len(set(drawn)) > 4


def test_a_saved_row_draws_each_time_that_it_is_loaded(checkpoint, tmp_path):
    """By the sampling and the seed of that time."""
    llm = small_llm(checkpoint)
    llm.prefill(PROMPT)
    llm.save(tmp_path / "read")
    greedy = small_llm(checkpoint).generate(PROMPT, 4)
    llm.generate([[]], 4, temperature=2.0, follow=True)
    llm.load(tmp_path / "read")
    assert llm.generate([[]], 4, follow=True)[0].token_ids == greedy.token_ids

    drawn = []
    for seed in range(6):
        llm = small_llm(checkpoint, seed=seed)
        llm.load(tmp_path / "read")
        drawn.append(llm.generate([[]], 1, temperature=2.0, follow=True)[0].token_ids[0])
    assert len(set(drawn)) > 3


def draws(llm: generate.LLM) -> list[int]:
    return llm.generate(PROMPT, 8, temperature=2.0, ignore_eos=True).token_ids


def test_an_llm_leaves_the_processs_random_numbers_alone(checkpoint):
    """And does not depend on them."""
    of_each_seed = []
    for seed in (123, 999):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        llm = small_llm(checkpoint)
        first = draws(llm)
        second = draws(llm)
        assert first != second
        assert torch.get_rng_state().equal(state)
        of_each_seed.append((first, second))
    assert of_each_seed[0] == of_each_seed[1]


def test_random_numbers_are_the_llms_own(checkpoint):
    llm = small_llm(checkpoint)
    expected = [draws(llm), draws(llm)]
    again = small_llm(checkpoint)
    assert draws(again) == expected[0]
    draws(small_llm(checkpoint))  # another one resets nothing
    assert draws(again) == expected[1]
    assert draws(small_llm(checkpoint, seed=1)) != expected[0]


# ---- stream


def test_a_stream_that_is_left_early_is_followed_without_reading_again(checkpoint, monkeypatch):
    """The row holds what was shown, at each token, and the report counts that."""
    llm = small_llm(checkpoint)
    pieces = llm.stream("hello there", 8, ignore_eos=True)
    shown = next(pieces) + next(pieces)
    assert llm.tokenizer.decode(llm.token_ids[0]) == "hello there" + shown
    pieces.close()
    assert llm.tokenizer.decode(llm.token_ids[0]) == "hello there" + shown
    assert len(llm.token_ids[0]) == int(llm.engine.pos[0])
    assert llm.report()["text"] == [shown]
    assert llm.report()["new_tokens"] == [2]

    with monkeypatch.context() as patch:
        patch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("read again"))
        more = llm.generate([[]], 6, ignore_eos=True, follow=True)[0]
    never_left = small_llm(checkpoint).generate("hello there", 8, ignore_eos=True)
    assert more.token_ids == never_left.token_ids[2:]
    assert shown + more.text == never_left.text


USES_OF_THE_CACHE = {
    "stream": lambda llm, path: "".join(llm.stream("who", 4)),
    "generate": lambda llm, path: llm.generate("who", 4),
    "prefill": lambda llm, path: llm.prefill("who"),
    "ask": lambda llm, path: llm.ask("who", 4),
    "fork": lambda llm, path: llm.fork(0, 1),
    "crop": lambda llm, path: llm.crop(2),
    "save": lambda llm, path: llm.save(path),
    "load": lambda llm, path: llm.load(path),
}


@pytest.mark.parametrize("name", USES_OF_THE_CACHE)
def test_a_stream_ends_when_something_else_uses_the_cache(name, checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill("who")
    llm.save(tmp_path / "cache")
    pieces = llm.stream(PROMPT, 12, ignore_eos=True)
    assert next(pieces) + next(pieces)
    USES_OF_THE_CACHE[name](llm, tmp_path / "cache")
    held = [list(ids) for ids in llm.token_ids]
    assert list(pieces) == []
    assert llm.token_ids == held
    expected = small_llm(checkpoint).generate(PROMPT, 6)
    assert llm.generate(PROMPT, 6).token_ids == expected.token_ids


# ---- ask


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["dense", "sals"])
def test_each_question_is_answered_from_the_document(method, rows, checkpoint):
    """Whatever the number of rows, without reading the document again, and it is there afterwards.
    An answer is what `generate` would make of the question, up to the end of its line."""
    document = "once upon a time there was a green river"
    questions = ["who is it", "where is it", "what is the magic number for green river"]
    size = {"method": method, "max_seq_length": 128}
    expected = []
    for question in questions:
        llm = small_llm(checkpoint, **size)
        llm.prefill(document)
        expected.append(llm.generate(f"\n{question}", 8, follow=True))

    llm = small_llm(checkpoint, batch_size=rows, **size)
    llm.prefill(document)
    held = [list(ids) for ids in llm.token_ids]
    positions = llm.engine.pos.tolist()
    for _ in range(2):
        with mock.patch.object(generate.Engine, "prefill", side_effect=AssertionError):
            answers = llm.ask(questions, 8)
        report = llm.report()
        assert report["prompt_tokens"] == [answer.prompt_tokens for answer in answers]
        for answer, text, whole in zip(answers, report["text"], expected, strict=True):
            n = len(answer.token_ids)
            assert answer.token_ids == whole.token_ids[:n]
            assert answer.prompt_tokens == whole.prompt_tokens
            assert answer.text == text.strip()
            is_whole = n == len(whole.token_ids)
            assert answer.finish_reason == (whole.finish_reason if is_whole else "stop")
        assert llm.token_ids == held
        assert llm.engine.pos.tolist() == positions
    assert llm.ask(questions[1], 8) == answers[1]  # one question, one answer
    assert llm.generate(f"\n{questions[2]}", 8, follow=True) == expected[2]


def test_an_answer_of_one_line_may_begin_with_a_new_one():
    llm = generate.LLM(max_seq_length=256, device="cpu")
    llm.prefill(
        "The magic number for green river is 48213. The magic number for red hill is 90417."
    )
    answer = llm.ask("Question: What is the magic number for green river?")
    assert answer.text == "Answer: The magic number for green river is 48213."


def test_to_ask_needs_a_question(checkpoint):
    llm = small_llm(checkpoint)
    llm.prefill("once upon a time")
    with pytest.raises(UserError, match="there is no question"):
        llm.ask([])


# ---- the report


def test_a_report_counts_prompts_and_what_they_follow(checkpoint):
    llm = small_llm(checkpoint, batch_size=3)
    texts = ["", "", ""]  # of each row, all that it was given and has made
    calls = [  # follow, and the prompts
        (False, ["hello", "hello there", "who"]),
        (True, [" world", " world", " world"]),
    ]
    for follow, prompts in calls:
        outputs = llm.generate(prompts, 4, ignore_eos=True, follow=follow)
        for row in range(3):
            texts[row] += prompts[row] + outputs[row].text
        # The texts of outputs have the space before a first word.
        assert [llm.tokenizer.decode(ids) for ids in llm.token_ids] == texts
        lengths = [len(ids) for ids in llm.token_ids]
        assert llm.engine.pos.tolist() == [n - 1 for n in lengths]

        report = llm.report()
        assert report["prompt_tokens"] == [n - 4 for n in lengths]
        assert [output.prompt_tokens for output in outputs] == [n - 4 for n in lengths]
        assert report["new_tokens"] == [4, 4, 4]
        assert report["text"] == [output.text for output in outputs]
        bytes_of_a_token = 4 * 2 * 64 * 4  # layers, K and V, Hkv * D, fp32
        assert report["bytes_read_per_step"] == sum(lengths) * bytes_of_a_token
        llm.run.decode_s = 0.75  # four tokens take three steps, of three rows
        assert llm.report()["decode_tokens_per_s"] == 3 * 3 / 0.75


NEED_A_READING = [  # calls of an LLM that has read nothing, and what the error says
    (lambda llm: llm.report(), "nothing to report yet"),
    (lambda llm: llm.ask(["who?"]), "prefill or load it first"),
    (lambda llm: llm.fork(0, 2), "holds nothing yet"),
    (lambda llm: llm.save("nowhere"), "holds nothing yet"),
]


@pytest.mark.parametrize("call, message", NEED_A_READING)
def test_what_needs_a_reading_says_so(call, message, checkpoint):
    with pytest.raises(UserError, match=message):
        call(small_llm(checkpoint))


def test_more_prompts_than_rows_are_neither_followed_nor_read(checkpoint):
    llm = small_llm(checkpoint, batch_size=3)
    llm.generate(["hello", "hello there", "who"], 4)
    with pytest.raises(UserError, match="4 prompts cannot follow the 3 rows"):
        llm.generate(["a"] * 4, follow=True)
    with pytest.raises(UserError, match="4 prompts are more than 3 rows; set a larger batch_size"):
        llm.prefill(["a"] * 4)


# ---- crop, save and load


@pytest.mark.parametrize("method", ["dense", "sals", "kivi"])
def test_crop_takes_rows_back(method, checkpoint):
    """The row is as if its first n tokens had been read alone."""
    llm = small_llm(checkpoint, method=method)
    ids = llm.encode("once upon a time there was a green river")
    llm.generate(ids, 6, ignore_eos=True)
    for n in (len(ids) + 4, len(ids), 5, 1):
        llm.crop(n)
        held = list(llm.token_ids[0])
        assert len(held) == n
        assert int(llm.engine.pos[0]) == n
        fresh = small_llm(checkpoint, method=method)
        fresh.prefill(held)
        assert error(llm.engine.logits, fresh.engine.logits) < 1e-5
        outputs = []
        for each in (llm, fresh):
            outputs.append(each.generate([[]], 6, ignore_eos=True, follow=True)[0])
        assert outputs[0] == outputs[1]
        llm.crop(n)
    with pytest.raises(UserError, match="n 2: give a whole number in"):
        llm.crop(2)  # the row holds one token


def test_a_dense_cache_goes_back_without_reading(checkpoint, monkeypatch):
    llm = small_llm(checkpoint)
    llm.generate(PROMPT, 6, ignore_eos=True)
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("all is read again"))
    llm.crop(4)
    assert int(llm.engine.pos[0]) == 4


def test_rows_that_stopped_are_saved_as_their_ids_say(folder, tmp_path):
    """A row that stops runs on while others are made."""
    texts = ["hello", "and so on", "who"]
    free = small_llm(folder).generate(texts, 20, ignore_eos=True)
    edit_json(folder / "config.json", eos_token_id=free[0].token_ids[5])
    llm = small_llm(folder)
    outputs = llm.generate(texts, 20)
    assert outputs[0].finish_reason == "stop"
    assert "length" in [output.finish_reason for output in outputs]
    llm.save(tmp_path / "cache")
    again = small_llm(folder)
    again.load(tmp_path / "cache")
    assert again.token_ids == llm.token_ids
    lengths = generate.saved_facts(tmp_path / "cache").lengths
    assert lengths == [len(ids) for ids in llm.token_ids]


def test_saved_rows_fill_more_rows_in_turn(checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill(["who is it", "hello there"])
    llm.save(tmp_path / "cache")
    more = small_llm(checkpoint, batch_size=4)
    more.load(tmp_path / "cache")
    assert more.token_ids == llm.token_ids * 2
    assert more.token_ids[0] != more.token_ids[1]
    assert error(more.engine.logits, llm.engine.logits.repeat(2, 1)) < 1e-6
    assert more.report()["prompt_tokens"] == [len(ids) for ids in llm.token_ids] * 2


def test_saved_rows_need_as_many_rows(checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill(["who is it", "hello there"])
    llm.save(tmp_path / "cache")
    fewer = small_llm(checkpoint, batch_size=1)
    with pytest.raises(UserError, match="needs a batch_size of 2, not 1; raise batch_size"):
        fewer.load(tmp_path / "cache")


# ---- what an LLM refuses, and its help


BAD_ARGUMENTS = [  # of LLM, and what the error says
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


@pytest.mark.parametrize("options, message", BAD_ARGUMENTS)
def test_an_llm_refuses_what_the_command_line_refuses_in_words_of_python(
    options, message, checkpoint, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with which kernels run on the CPU
    with pytest.raises(UserError, match=re.escape(message)) as refusal:
        small_llm(checkpoint, **options).generate(PROMPT, 1)
    assert "--" not in str(refusal.value)


BAD_CALLS = [  # arguments of its methods, and what the error says
    ({"top_p": 0.0}, "top_p 0.0: give a number in (0, 1]"),
    ({"top_k": -1}, "top_k -1: give a whole number in"),
    ({"temperature": -1.0}, "temperature -1.0: give a number in [0, inf)"),
    ({"temperature": math.nan}, "temperature nan: give a number in"),
    ({"temperature": "hot"}, "temperature hot: give a number in"),
    ({"max_new_tokens": -3}, "max_new_tokens -3: give a whole number in"),
    ({"max_new_tokens": 100}, "raise max_seq_length"),
]


@pytest.mark.parametrize("options, message", BAD_CALLS)
def test_a_call_refuses_what_the_command_line_refuses(options, message, checkpoint):
    llm = small_llm(checkpoint)
    llm.prefill(PROMPT)

    def stream(text, **options):
        return list(llm.stream(text, **options))

    for call in (llm.generate, llm.ask, stream):
        with pytest.raises(UserError, match=re.escape(message)) as refusal:
            call("who is it", **options)
        assert "--" not in str(refusal.value)


def test_a_command_in_an_error_of_python_can_be_run(checkpoint, tmp_path):
    """Dashes are left in it, in its options and in the folder's name."""
    folder = tmp_path / "a--b"
    shutil.copytree(checkpoint, folder)
    compress.artifact_path(folder, "sals").unlink()
    with pytest.raises(UserError) as refusal:
        small_llm(folder, method="sals").generate(PROMPT, 1)
    said = str(refusal.value)
    assert said.startswith(f"{folder}/")
    assert said.endswith(f"python calibrate.py fit --checkpoint {folder} --method sals")


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


# --------------------------------------------------------------------------------- the command line

# ---- what it refuses

BAD_COMMANDS = {  # and what the error says. few.txt is a text, again a folder with a tokenizer.
    # the method and its settings
    "generate --method magic": "unknown method 'magic'; the methods are: "
    "dense, sals, elitekv, loki, lrqk, fdc, topk, kivi",
    "generate --rank 0.5": "unrecognized arguments: --rank 0.5",
    f"generate --method kivi --residual {10**20}": f"{10**20}: give a number in [0, 1e9]",
    "generate --method sals --rank x": "--rank: invalid float value: 'x'",
    "generate --method sals --rank 0.9 --prompt 5": "--max_rank",
    "generate --method sals --skip 9 --prompt 5": "the layers are -4 to 3",
    "generate --method sals --skip first --prompt 5": "layer numbers",
    "generate --method elitekv --r 9 --prompt 5": "--r 9: a head has 1 to 8 pairs",
    "generate --method elitekv --d_ckv 49 --prompt 5": "the latent can have 1 to 48 dims",
    "generate --method lrqk --rank 8 --slots 0.5 --prompt 5": "give 0 (no hit/miss) or a mult",
    # before the dense run of the demo
    "generate --checkpoint nano --method sals --rank 2": "in [0, 1]",
    "generate --checkpoint nano-elitekv --method sals --prompt hi": "run it with --method eli",
    "generate --checkpoint nano-elitekv --method elitekv --r 4 --prompt hi": "are fixed; leave",
    # the prompt
    "generate": "no demo.txt",
    "generate --prompt ''": "empty",
    "generate --prompt 0": "no tokens",
    f"generate --prompt {'1' * 5000}": "more than the model's 512",
    "generate --prompt @nowhere.txt": "No such file",
    "generate --prompt @/dev/zero": "no regular file",
    "generate --prompt @latin.txt": "latin.txt: not UTF-8",
    "generate --prompt hi --system x": "no chat template",
    "generate --chat --prompt hello": "no chat template; put a chat_template.jinja into its folder",
    "generate --chat": "--chat needs a --prompt",
    "generate --chat --prompt hi --ask who?": "takes no --ask",
    "generate --prompt a --prompt b --ask who?": "--ask takes one --prompt",
    # rows and lengths
    "generate --prompt 5 --batch_size 0": "--batch_size: 0: give a number in [1, 4294967296]",
    "generate --prompt 5 --batch_size 2147483647": "not enough memory (",
    "generate --prompt 5 --prompt 6 --batch_size 1": "at least the number of prompts",
    "generate --prompt hello --max_seq_length 600": "the model's 512; shorten --max_seq_length",
    "generate --prompt 60 --max_seq_length 40": "raise --max_seq_length",
    # the model and the device
    "generate --device meta --prompt 5": "--device: invalid choice: 'meta'",
    "generate --device cuda": "--device cpu",
    "generate --checkpoint nowhere": "no such folder",
    "generate --checkpoint few.txt --random_weights llama-2-7b --prompt 5": "not both",
    "generate --random_weights llama-2-7b --prompt hi": "give --prompt N",
    "generate --random_weights llama-2-7b --prompt 5 --ask x": "tokenizer",
    # calibrate
    "fly": "invalid choice",
    "fit --checkpoint small --method loki": "has 4096 ids, the model's vocabulary 300",
    "fit --checkpoint nano-elitekv --method sals --windows 2 --window 64": "calibrated already",
    "fit --method sals --text none": "No such file",
    "fit --method sals --text nano/model.safetensors": "not UTF-8 text",
    "fit --out few.txt/x": "--out: no file can be written",
}


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
    added = {"added_tokens_decoder": {4096: {"content": "magic number"}}}
    (folder / "again" / "tokenizer_config.json").write_text(json.dumps(added))
    for path in (checkpoint, NANO, NANO.parent / "nano-elitekv"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def little_memory():
    """A GB more than this process has, where the system tells that."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    import resource

    pages = int(statm.read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    a_gigabyte_more = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (a_gigabyte_more, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@over("line, message", lambda tests: tests.BAD_COMMANDS.items())
def test_bad_commands_end_in_one_line_before_anything_runs(
    line, message, desk, cli, monkeypatch, little_memory
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # --device cuda, too
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
    said = capsys.readouterr().err
    assert said == f"error: calibrate.py {name} has moved; run python -m {module}\n"


def test_a_failed_compile_ends_in_one_line(cli):
    no_compiler = {"cpp.cxx": (None, "/no/compiler"), "force_disable_caches": True}
    with torch._inductor.config.patch(no_compiler):
        told = cli.refusal("generate --prompt hello --compile")
    assert "/no/compiler" in told
    assert told.endswith("; use --no-compile\n")


ROOMS = [  # free memory in rows of 60 tokens, rows that are asked for, and what would fit
    (1.0, 2, "1 rows or 30 tokens a row"),
    (2.5, 4, "2 rows or 37 tokens a row"),
]


def bytes_of_a_row(method: str, options: dict) -> int:
    """Of 60 tokens, in all memory."""
    caches = make_engine(tiny_model(), method, 1, 60, **options).caches
    return sum(cache.bytes_formula() + cache.bytes_host() for cache in caches)


@pytest.mark.parametrize("method, options", [("dense", {}), ("lrqk", LRQK)])
@pytest.mark.parametrize("room, rows, what_fits", ROOMS)
def test_too_little_memory_says_what_would_fit(method, options, room, rows, what_fits, monkeypatch):
    """Where the model runs on the CPU, host memory counts, too."""
    model = tiny_model()
    settings = compress.settings_from(method, options)
    free = int(room * bytes_of_a_row(method, options))
    monkeypatch.setattr(generate, "free_memory", lambda device: free)
    with pytest.raises(UserError, match=f"memory.* {what_fits} would fit"):
        generate.check_memory(model, method, settings, {}, rows, 60)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("method, options", [("dense", {}), ("lrqk", LRQK)])
def test_memory_that_is_just_enough_is_enough_and_a_byte_less_is_not(
    method, options, rows, monkeypatch
):
    model = tiny_model()
    settings = compress.settings_from(method, options)
    enough = rows * bytes_of_a_row(method, options)
    monkeypatch.setattr(generate, "free_memory", lambda device: enough)
    generate.check_memory(model, method, settings, {}, rows, 60)
    monkeypatch.setattr(generate, "free_memory", lambda device: enough - 1)
    with pytest.raises(UserError, match=f"memory.* {rows - 1} rows or 59 tokens a row would fit"):
        generate.check_memory(model, method, settings, {}, rows, 60)


def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(cli, monkeypatch):
    monkeypatch.setattr(model_file, "free_memory", lambda device: 10**5)
    for line in ("generate --random_weights llama-2-7b --prompt 5", "generate"):
        assert "the weights need" in cli.refusal(line)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(cli, monkeypatch):
    monkeypatch.setattr(generate, "free_memory", lambda device: 10**9)
    line = "generate --prompt 5 --batch_size 2147483647"
    assert "the dense cache of 2147483647 rows" in cli.refusal(line)


ENDS_OF_A_COMMAND = [  # what ends it, the exit code, and the line on stderr
    (KeyboardInterrupt(), 130, "interrupted\n"),
    # Escapes, line breaks and a change of direction would move a terminal.
    (UserError("first\x1b[31m\n\u202ex\rlast"), 2, "error: first?[31m??x?last\n"),
]


@pytest.mark.parametrize("end, code, line", ENDS_OF_A_COMMAND)
def test_a_command_ends_with_130_or_one_line_that_moves_no_terminal(end, code, line, capsys):
    with pytest.raises(SystemExit) as stop:
        generate.run_command(mock.Mock(side_effect=end))
    assert stop.value.code == code
    assert capsys.readouterr().err == line


# ---- how it starts, and its streams


GIVEN_SPINS = [  # what a user has set, and how often a waiting thread looks again
    ({}, "1000"),
    ({"OMP_WAIT_POLICY": "passive"}, "0"),
]


@pytest.mark.parametrize("own, spins", GIVEN_SPINS)
def test_a_start_imports_no_transformers_and_lets_waiting_threads_spin_little(
    own, spins, monkeypatch
):
    """Unless a user says how."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # which this process has set
    code = "import generate, calibrate, sys; assert 'transformers' not in sys.modules"
    run = python("-c", code, OMP_DISPLAY_ENV="VERBOSE", **own)
    assert run.returncode == 0, run.stderr
    # OpenMP tells its settings; nothing like it where torch has another OpenMP.
    told = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr)
    assert set(told) <= {spins}


def test_a_script_called_by_a_symbolic_link_finds_nano(tmp_path):
    (tmp_path / "link.py").symlink_to(ROOT / "generate.py")
    assert runpy.run_path(str(tmp_path / "link.py"))["NANO"] == NANO


@over("method", lambda tests: tests.METHODS)
def test_help_names_every_method_and_setting(method, cli):
    code, out, _ = cli(f"generate --method {method} --help")
    assert code == 0
    assert f"\n  {method} " in out
    for field in dataclasses.fields(method_named(method).settings):
        assert f"--{field.name}" in out
        assert field.metadata["help"].split()[-1] in out


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as the locale has it
def test_a_stdin_that_is_not_utf_8_is_refused(errors, cli, monkeypatch):
    data = io.BytesIO(b"caf\xe9")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, "utf-8", errors))
    assert "not UTF-8" in cli.refusal("generate --prompt -")


def test_a_terminal_that_lacks_a_character_gets_a_question_mark(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    generate.run_command(lambda: print("snow \u2603", flush=True))
    assert stdout.buffer.getvalue() == b"snow ?\n"


def test_progress_is_on_stderr(capsys):
    progress = generate.Progress("slow", 4)
    progress.tick()
    progress.started -= 30
    progress.shown = progress.started
    progress.tick()
    assert capsys.readouterr() == ("", "slow 2/4, 30 s left\n")


# ---- generate


@pytest.mark.parametrize("chat", ["", "--chat"])
def test_prompts_from_text_file_and_stdin_agree(chat, cli, folder, tmp_path):
    """A file and stdin have a byte-order mark and line ends of Windows here, which do not count."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    text = "some words\nand caf\u00e9"
    raw = "\ufeff" + text.replace("\n", "\r\n")
    file = tmp_path / "prompt.txt"
    file.write_bytes(raw.encode())
    line = f"generate {chat} --max_new_tokens 12 --prompt"
    first = cli.json(f"{line} '{text}'")
    # A chat has no BOS, and "?" at its end.
    assert first["prompt_tokens"] == [len(load_tokenizer(NANO).encode(text))]
    for prompt in (f"@{file}", "-"):
        other = cli.json(f"{line} '{prompt}'", stdin=raw)
        for name in ("prompt_tokens", "token_ids", "text"):
            assert other[name] == first[name]


def test_a_chat_of_the_command_line_is_that_of_an_llm(cli, folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    report = cli.json("generate --chat --max_new_tokens 12 --prompt 'some words'")
    messages = [{"role": "user", "content": "some words"}]
    output = generate.LLM(folder, device="cpu").chat(messages, 12)
    assert report["token_ids"] == [output.token_ids]
    assert report["text"] == [output.text]


FIGURES = """method settings model device dtype prompt_tokens new_tokens token_ids text prefill_s
    first_token_s decode_tokens_per_s cache_bytes_measured cache_bytes_formula cache_bytes_dense
    cache_bytes_host miss_rate bytes_read_per_step peak_memory_bytes capture_s seed versions"""


def test_json_is_the_last_line_and_complete(cli):
    """Of three rows with two prompts of 30 random tokens; the first one is repeated."""
    line = "generate --prompt 30 --prompt 30 --batch_size 3 --max_new_tokens 9 --ignore_eos"
    report = cli.json(line)
    assert set(FIGURES.split()) <= set(report)
    assert report["prompt_tokens"] == [30, 30, 30]
    assert report["new_tokens"] == [9, 9, 9]
    ids = report["token_ids"]
    assert [len(row) for row in ids] == [9, 9, 9]
    assert ids[0] == ids[2] != ids[1]
    assert report["seed"] == 0
    assert 50e6 < report["peak_memory_bytes"] < 1e12


def test_a_report_has_the_bytes_and_misses_of_a_cache_in_two_memories(cli):
    line = "generate --prompt 30 --max_new_tokens 9 --ignore_eos --method lrqk"
    report = cli.json(f"{line} --rank 8 --k 10 --recent 4")
    assert report["settings"]["rank"] == 8
    assert report["cache_bytes_host"] == report["cache_bytes_dense"]  # K and V of all tokens
    assert report["cache_bytes_measured"] < report["cache_bytes_host"]
    assert 0 < report["miss_rate"] < 1
    assert f"miss_rate             {report['miss_rate']}\n" in cli.err


def test_a_report_does_not_speak_of_another_memory_where_there_is_none(cli):
    report = cli.json("generate --prompt 30 --max_new_tokens 9 --ignore_eos")
    assert report["cache_bytes_host"] == 0
    assert report["miss_rate"] is None
    assert "cache_bytes_host" not in cli.err
    assert "every token is attended" not in cli.err  # as of a budget that covers all


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_random_weights_take_prompts_beyond_the_trained_length(method, cli, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config(max_positions=64))
    line = f"generate --random_weights tiny --method {method} --prompt 100"
    report = cli.json(f"{line} --batch_size 2 --max_new_tokens 4")
    assert report["prompt_tokens"] == [100, 100]
    assert report["new_tokens"] == [4, 4]
    assert [len(ids) for ids in report["token_ids"]] == [4, 4]


def test_sampling_options_and_the_seed_reach_the_draw(cli):
    def ids(options: str) -> list[list[int]]:
        line = "generate --prompt hello --max_new_tokens 12 --ignore_eos"
        return cli.json(f"{line} {options}")["token_ids"]

    hot = "--temperature 50"
    greedy = ids("")
    assert ids(hot) != greedy
    assert ids(f"{hot} --top_k 1") == greedy
    assert ids(f"{hot} --top_p 1e-6") == greedy
    assert ids(f"{hot} --seed 1") == ids(f"{hot} --seed 1")
    assert ids(f"{hot} --seed 1") != ids(f"{hot} --seed 2")


def test_rows_stop_one_by_one_at_the_models_stop_token(cli, folder):
    batch = "generate --max_new_tokens 20 --prompt hello --prompt 'and so on' --prompt who"
    free = cli.json(f"{batch} --ignore_eos")["token_ids"]
    stop = free[0][5]
    edit_json(folder / "config.json", eos_token_id=stop)
    expected = []
    for ids in free:
        expected.append(ids[: ids.index(stop)] if stop in ids else ids)
    assert 20 in map(len, expected)  # a row that does not stop
    assert cli.json(batch)["token_ids"] == expected
    assert cli.json(f"{batch} --ignore_eos")["token_ids"] == free


@needs_cuda
@pytest.mark.parametrize("method", ["dense", "sals"])
def test_commands_run_on_cuda(method, cli):
    line = f"generate --device cuda --method {method} --prompt 60 --ignore_eos --max_new_tokens 8"
    report = cli.json(line)
    assert report["device"] == torch.cuda.get_device_name()
    assert report["dtype"] == "bfloat16"
    assert report["capture_s"] > 0
    assert report["new_tokens"] == [8]
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"]


# ---- generate --ask, --save_cache and --load_cache


ONCE = "generate --prompt 'once upon a time'"
ASKED = ("prompt_tokens", "new_tokens", "token_ids", "text")  # what a report has of each question


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_the_command_line_answers_each_question_alone(method, cli):
    """As if each were the only one after the prompt; in turn, where there are more rows."""
    line = f"{ONCE} --method {method} --max_new_tokens 6"
    who = cli.json(f"{line} --ask 'who is it'")
    where = cli.json(f"{line} --ask 'where is it'")
    both = cli.json(f"{line} --ask 'who is it' --ask 'where is it'")
    three = cli.json(f"{line} --ask 'who is it' --ask 'where is it' --batch_size 3")
    for name in ASKED:
        assert both[name] == [*who[name], *where[name]]
        assert three[name] == [*who[name], *where[name], *who[name]]


def test_the_first_token_waits_for_prompt_and_questions(cli, monkeypatch):
    append = generate.Engine.append
    slow = 0.25

    def slow_append(*args):
        time.sleep(slow)
        return append(*args)

    monkeypatch.setattr(generate.Engine, "append", slow_append)
    line = f"{ONCE} --max_new_tokens 2 --ignore_eos"
    plain = cli.json(line)
    assert plain["first_token_s"] >= plain["prefill_s"] >= slow
    asked = cli.json(f"{line} --ask 'who is it' --ask where?")
    assert asked["first_token_s"] >= asked["prefill_s"] > 2 * slow  # the prompt and a question


def test_a_report_counts_each_question_and_reads_what_the_row_holds(cli):
    line = f"{ONCE} --max_new_tokens 2 --ignore_eos"
    plain = cli.json(line)
    asked = cli.json(f"{line} --ask 'who is it' --ask where?")
    for name in ASKED:
        assert len(asked[name]) == 2
    assert min(asked["prompt_tokens"]) > plain["prompt_tokens"][0]  # with the question

    # A step reads of a dense cache what the row holds: the prompt, the last question, its answer.
    of_a_token = []
    for report in (plain, asked):
        length = report["prompt_tokens"][-1] + report["new_tokens"][-1]
        of_a_token.append(report["bytes_read_per_step"] / length)
    assert of_a_token[0] == of_a_token[1]


def test_a_saved_cache_is_asked_as_the_prompt_is(cli, tmp_path):
    """Also where it was saved before several questions were asked, in more rows."""
    line = f"{ONCE} --method sals --max_new_tokens 6"
    who = cli.json(f"{line} --ask 'who is it'")
    where = cli.json(f"{line} --ask 'where is it'")
    cli.json(
        f"{line} --ask 'who is it' --ask 'where is it' --batch_size 3 --save_cache {tmp_path}/c"
    )
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6"
    asked = cli.json(f"{load} --ask 'where is it'")
    twice = cli.json(f"{load} --ask 'who is it' --batch_size 2")
    for name in ASKED:
        assert asked[name] == where[name]
        assert twice[name] == who[name] * 2


def assert_same_tensors(path: Path, other: Path) -> None:
    tensors = load_file(path)
    others = load_file(other)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.equal(others[name]), name


def test_a_saved_cache_goes_on_as_the_prompt_does_and_is_saved_again(cli, tmp_path):
    line = f"{ONCE} --method sals --max_new_tokens 6"
    never_left = cli.json(line)
    cli.json(f"{line} --save_cache {tmp_path}/c")
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6"
    went_on = cli.json(f"{load} --save_cache {tmp_path}/d")
    for name in ("token_ids", "text", "prompt_tokens"):
        assert went_on[name] == never_left[name]
    assert_same_tensors(tmp_path / "c", tmp_path / "d")


def test_a_loaded_cache_is_saved_again_though_questions_are_asked(cli, tmp_path):
    assert cli(f"generate --prompt hello --max_new_tokens 1 --save_cache {tmp_path}/a")[0] == 0
    load = f"generate --load_cache {tmp_path}/a --max_new_tokens 3"
    assert cli(f"{load} --ask 'who is it' --save_cache {tmp_path}/b")[0] == 0
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


def test_answers_stand_above_the_dense_ones_unless_the_cache_was_loaded(cli, tmp_path):
    """No dense cache has what was saved. The one that is saved is not the dense one."""
    line = f"{ONCE} --method sals --max_new_tokens 6 --ask 'who is it' --save_cache {tmp_path}/c"
    code, out, _ = cli(line)
    assert code == 0
    assert out.count("sals:") == 1
    assert out.count("dense:") == 1
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6 --ask 'who is it'"
    code, out, _ = cli(load)
    assert code == 0
    assert out.count("sals:") == 1
    assert out.count("dense:") == 0


LOADED_OTHERWISE = [  # options of load_cache beside those that saved, and what the error says
    ("--k 9", "of another settings ("),
    (
        "--dtype bf16",
        "of another dtype (torch.float32, here torch.bfloat16); load it with the options that",
    ),
    ("--batch_size 1", "needs a --batch_size of 2, not 1; raise --batch_size"),
    ("--max_seq_length 40", "needs a --max_seq_length of 60, not 40; raise --max_seq_length"),
    ("--max_seq_length 62", "need 64 positions, not 62; raise --max_seq_length"),
    ("--prompt 5", "has the prompt; give --ask"),
    ("--system brief", "--chat needs a --prompt"),
]
SAVED = "generate --max_new_tokens 4 --method lrqk --recent 8 --k 20"


def test_a_cache_is_loaded_by_the_options_that_saved_it_alone(cli, tmp_path):
    """A longer cache takes it, too."""
    file = tmp_path / "c"
    assert cli(f"{SAVED} --prompt 60 --prompt 9 --save_cache {file}")[0] == 0
    assert cli(f"{SAVED} --load_cache {file} --max_seq_length 99")[0] == 0
    for options, message in LOADED_OTHERWISE:
        assert message in cli.refusal(f"{SAVED} --load_cache {file} {options}"), options
    assert "of another method (lrqk, here dense)" in cli.refusal(f"generate --load_cache {file}")
    assert list(tmp_path.iterdir()) == [file]


def test_a_cache_of_another_model_or_a_damaged_one_is_refused(cli, folder, tmp_path):
    file = tmp_path / "c"
    assert cli(f"{SAVED} --prompt 60 --save_cache {file}")[0] == 0
    put_weight(folder, NORM, load_file(folder / WEIGHTS)[NORM] + 1)
    assert "of another fingerprint (" in cli.refusal(f"{SAVED} --load_cache {file}")
    truncate(file)
    assert "truncated or damaged" in cli.refusal(f"{SAVED} --load_cache {file}")
    assert "No such file" in cli.refusal(f"generate --load_cache {file}.d")
    assert f"{file}: " in cli.refusal(f"generate --prompt 5 --save_cache {file}/c")
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_a_cache_whose_budget_was_cut_is_refused_by_a_larger_one(cli, tmp_path):
    """There the same settings give a larger budget, and so other buffers."""
    file = tmp_path / "c"
    line = "generate --max_new_tokens 4 --method lrqk --recent 8 --k 99"
    assert cli(f"{line} --prompt 60 --save_cache {file}")[0] == 0
    assert "every token is attended" in cli.err
    told = cli.refusal(f"{line} --load_cache {file} --max_seq_length 150")
    assert "saved with --max_seq_length 64, for which" in told


# ---- what the docs show


def code_block(document: str, number: int) -> str:
    """A Python block of a document."""
    text = (ROOT / document).read_text()
    return text.split("```python\n")[number + 1].split("```")[0]


def test_the_readmes_first_command_prints_what_the_readme_shows():
    readme = (ROOT / "README.md").read_text()
    assert "python generate.py --method sals" in readme
    # The README shows a CPU's answer.
    run = python("generate.py", "--method", "sals", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    shown = readme.split("```\nQuestion:")[1].split("```")[0]
    assert "Question:" + shown in run.stdout
    took, would_take = re.search(r"took ([\d.]+) MB .*dense would take ([\d.]+)", readme).groups()
    figures = rf"measured +{took} MB\n.*\n.*dense +{would_take} MB"
    assert re.search(figures, run.stderr), run.stderr


def test_the_readmes_python_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(code_block("README.md", 0), {})
    said = capsys.readouterr().out
    assert "number for silent lantern is 73308" in said
    assert said.count("Answer: The magic number for") == 2


@pytest.fixture
def keynorm():
    """The README's own method, in METHODS while a test runs."""
    with mock.patch.dict(METHODS):
        exec(code_block("README.md", 1), {"__name__": "keynorm"})
        yield
    assert "keynorm" not in METHODS


def keynorm_and_dense_logits(keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of three ragged rows, and 20 tokens after them: [21, 3, V] each."""
    prompts = []
    more = []
    for n in (5, 60, 33):
        prompts.append(random_ids(n, n))
        more.append(random_ids(20, 100 + n))
    dense = make_engine(tiny_model(), "dense", 3, 80)
    engine = make_engine(tiny_model(), "keynorm", 3, 80, keep=keep)
    return logits_through(engine, prompts, more), logits_through(dense, prompts, more)


def test_the_readmes_own_method_is_dense_where_it_keeps_all(keynorm):
    logits, dense = keynorm_and_dense_logits(keep=80)
    assert error(logits, dense) < 1e-5


def test_the_readmes_own_method_drops_tokens(keynorm):
    logits, dense = keynorm_and_dense_logits(keep=24)
    assert error(logits[:20, 0], dense[:20, 0]) < 1e-5  # 5 + 19 tokens fit
    assert error(logits[1:, 1], dense[1:, 1]) > 1e-2  # 60 do not
    for cache in make_engine(tiny_model(), "keynorm", 3, 80, keep=24).caches:
        assert cache.bytes_stored() == cache.bytes_formula()
        assert cache.bytes_stored() == compress.dense_bytes(cache.context) * 24 // 80


def test_the_readmes_own_method_runs(keynorm, cli):
    line = "generate --method keynorm --keep 24 --ignore_eos --prompt hello --max_new_tokens 4"
    report = cli.json(line)
    assert report["settings"]["keep"] == 24
    assert len(report["token_ids"][0]) == 4


@pytest.fixture
def top_alone(tmp_path):
    """A copy of the tree without extras."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    return tmp_path


def test_the_top_works_without_extras(top_alone):
    tests = "run_from_the_command_line and dense or help_names or refuse_what or bytes_read"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_all.py", "-k", tests]
    run = python(*command, cwd=top_alone)
    assert run.returncode == 0, run.stdout
    names = "import compress; assert compress.method_names() == [*compress.METHODS]"
    assert python("-c", names, cwd=top_alone).returncode == 0


def test_extras_that_are_there_and_broken_say_so_where_they_are_needed(top_alone):
    (top_alone / "extras").mkdir()
    (top_alone / "extras" / "baselines.py").write_text("import nowhere")
    look_up = "import compress; [compress.method_named(name) for name in ('sals', 'h2o')]"
    told = python("-c", look_up, cwd=top_alone).stderr
    assert "'h2o'" not in told  # no unknown method
    assert told.endswith("No module named 'nowhere'\n")


def without_section(text: str, start: str, end: str) -> str:
    """The text without what begins with a line `start` and goes up to a line `end`."""
    return re.sub(rf"{start}.*?\n(?={end})", "", text, flags=re.S)


def test_the_names_in_the_docs_are_in_the_code():
    """Each name in backquotes that has an underscore or is a class, with what stands after a
    dot."""
    methods = (ROOT / "docs" / "methods.md").read_text()
    readme = (ROOT / "README.md").read_text()
    code = ""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")):
        code += path.read_text()
    if not (ROOT / "extras").is_dir():
        methods = without_section(methods, "## Comparison rows", "## ")
        readme = without_section(readme, "Everything else is in `extras/`", "Delete `extras/`")
    names = re.findall(r"`(_?[a-z]+_\w+|[A-Z][a-z]\w+)(?:\.(\w+))?`", methods + readme)
    assert len(names) > 50
    for name, attribute in names:
        assert re.search(rf"\b{name}\b", code), name
        if attribute:
            assert re.search(rf"\b{attribute}\b", code), f"{name}.{attribute}"


def test_the_exercises_name_functions_and_selections_that_there_are():
    """Those of docs/methods.md: delete a body, and the tests that `-k` selects say when it is
    back."""
    row = r"^\| (\d+) \| `(\w+)`.* \| `-k (\w+)` \|"
    text = (ROOT / "docs" / "methods.md").read_text()
    exercises = re.findall(row, text, flags=re.M)
    assert [int(number) for number, _, _ in exercises] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    names = list(STEPS)  # of which pytest makes names of tests
    for name in globals():
        if name.startswith("test_"):
            names.append(name)
    for _, function, selection in exercises:
        defined = [vars(module).get(function) for module in (compress, kernels, calibrate)]
        assert any(map(callable, defined)), function
        assert any(selection in name for name in names), selection


def test_the_docs_key_format_passes_its_own_test_on_the_kernel(tmp_path):
    path = tmp_path / "scaled.py"
    path.write_text(
        code_block("docs/methods.md", 0)
    )  # Triton reads a kernel's source from its file
    spec = importlib.util.spec_from_file_location("scaled", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(kernels.KEYS):
        spec.loader.exec_module(module)
        module.test_scaled_keys_are_attended_as_in_pytorch()
    assert "scaled" not in kernels.KEYS


# ---- calibrate: fit and ranks


FIT = "--windows 4 --window 64"


def test_fit_writes_artifacts_and_goes_on_where_a_method_cannot_take_the_model(
    cli, folder, monkeypatch
):
    methods = set(calibrate.fits_of("all"))
    for method in fitted(sys.modules[__name__]):
        compress.artifact_path(folder, method).unlink()
    refusal = mock.Mock(side_effect=UserError("not this model"))
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "fit_elitekv", refusal)
        code, out, err = cli(f"fit --method all {FIT} --dtype bf16")
        assert code == 0
        assert "elitekv: not fitted" in err
        for sentence in (
            r"sals.safetensors: A latent of a quarter of the key dims keeps \d\d\.\d% of",
            r"loki.safetensors: A quarter of a head's components hold \d\d\.\d% of the variance",
            r"fdc.safetensors: At a rate of [\d.]+ a head keeps [\d.]+ dims of its queries",
        ):
            assert re.search(sentence, out)
        assert cli(f"fit --method elitekv {FIT}")[0] == 2  # asked for alone it ends the command
    files = {path.stem for path in folder.glob("*.safetensors")}
    assert files == {"model", *methods} - {"elitekv"}

    code, out, _ = cli(f"fit --method elitekv {FIT}")
    assert code == 0
    assert re.search(r"rotates \d+ pairs of dims, beside a latent of \d+ numbers", out)
    model = load_model(folder, CPU, torch.float32)
    for method in methods:
        assert load_artifact(folder, method, model)


def test_fit_of_sals_has_the_ranks_that_were_asked_for(cli, folder):
    """Five eighths of 64 dims, as the widest default needs, or --max_rank of them."""
    model = load_model(folder, CPU, torch.float32)
    assert cli(f"fit --method sals {FIT}")[0] == 0
    tensors = load_artifact(folder, "sals", model)
    assert tensors["0.query_basis"].shape == tensors["0.key_basis"].shape == (64, 40)
    assert cli("generate --method sals --prompt hello --max_new_tokens 3")[0] == 0
    assert cli(f"fit --method sals {FIT} --max_rank 0.25")[0] == 0
    assert load_artifact(folder, "sals", model)["0.query_basis"].shape == (64, 16)


def test_fit_out_makes_a_folder_of_links(cli, folder, tmp_path):
    before = contents(folder)
    out = tmp_path / "cache" / "fits"
    for method in ("loki", "sals"):
        assert cli(f"fit --method {method} --out {out} --windows 2 --window 4")[0] == 0
    assert contents(folder) == before
    assert (out / WEIGHTS).is_symlink()
    assert not (out / "loki.safetensors").is_symlink()
    line = f"generate --checkpoint {out} --method loki --prompt hello --max_new_tokens 3"
    assert cli(line)[0] == 0


def test_fit_says_what_to_do_where_the_folder_cannot_be_written(cli, folder):
    with mock.patch.object(os, "access", lambda *_: False):
        assert f"written into {folder}; give --out FOLDER" in cli.refusal("fit --method loki")


def test_what_evaluation_reads_is_never_calibrated_on(cli, tmp_path, monkeypatch):
    names = {f"{i}.py" for i in range(40)}
    held = {name for name in names if is_held_out(name)}
    assert 0 < len(held) < 10
    for name in names:
        (tmp_path / name).write_text(name * 100)
    for name in ("site-packages", "dist-packages"):  # lie in the library's folder: no part of it
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text(name * 100)
    text_ids = mock.Mock(side_effect=UserError("read"))
    monkeypatch.setattr(calibrate, "STDLIB", tmp_path)
    monkeypatch.setattr(calibrate, "text_ids", text_ids)
    assert "read" in cli.refusal("fit --method sals")
    _, files, *_ = text_ids.call_args.args
    assert {file.name for file in files} == names - held


def test_ranks_prints_what_its_json_and_its_table_have(cli, tmp_path):
    figures = cli.json(f"ranks --windows 2 --window 64 --csv {tmp_path}/ranks.csv")
    assert figures["pre"] != figures["post"]
    for name in ("pre", "post"):
        ranks = figures[name]
        by_layer = " ".join(map(str, ranks))
        line = f"{name}-RoPE, mean {sum(ranks) / 4:.1f}, by layer: {by_layer}\n"
        assert line in cli.out
    names = ["pre", "post", "cv_qk", "cv_v"]
    table = [",".join(["layer", *names])]
    for layer in range(4):
        numbers = [layer]
        for name in names:
            numbers.append(figures[name][layer])
        table.append(",".join(map(str, numbers)))
    assert (tmp_path / "ranks.csv").read_text().splitlines() == table


def test_ranks_says_how_the_heads_values_vary(cli):
    """cv_v is of the weights alone: of the largest singular value of each head's W_V."""
    figures = cli.json("ranks --windows 2 --window 64")
    model = load_model(generate.NANO, CPU, torch.float32)
    for layer, cv in zip(model.layers, figures["cv_v"], strict=True):
        attention = layer.attention
        _, _, w_v = attention.wqkv.weight.split(attention.widths)
        of_heads = w_v.unflatten(0, (4, -1))
        largest = torch.linalg.matrix_norm(of_heads, 2).numpy()
        assert cv == pytest.approx(largest.std() / largest.mean(), rel=1e-4)
        assert cv > 0.01


def test_heads_that_compute_the_same_do_not_vary(checkpoint):
    """Then the singular values of queries and keys, of which cv_qk is, are alike."""
    model = load_model(checkpoint, CPU, torch.float32)
    for layer in model.layers:
        q, k, _ = layer.attention.wqkv.weight.split(layer.attention.widths)
        q.copy_(q[:16].repeat(8, 1))
        k.copy_(k[:16].repeat(4, 1))
    values = calibrate.fdc_bases(model, tiny_tokens(1, 32), 512)["qk.values"]
    assert error(values, values[:, :1].expand_as(values)) < 1e-5
