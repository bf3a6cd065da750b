"""All tests. Run with: pytest -q test_all.py

They assert mathematics and behaviour on the CPU in minutes. Tests that need a GPU or ../shared (real
checkpoints and tokenizers) skip where there is none. Errors are scale-free: rms of the difference over rms
of the reference.
"""

import base64
import dataclasses
import functools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # kernels run on the CPU; it must be set before triton loads

import calibrate
import generate
import kernels
import model as model_file
from calibrate import (
    KINDS,
    Haystack,
    Stage,
    eigen,
    eval_sample,
    fit_sals,
    key_moments,
    make_tasks,
    rank_at,
    save_artifact,
    save_checkpoint,
    train,
    training_document,
)
from compress import (
    METHODS,
    DenseCache,
    LokiCache,
    LokiSettings,
    Room,
    SalsCache,
    SalsSettings,
    StreamingCache,
    StreamingSettings,
    artifact_path,
    attend,
    dequantize,
    load_artifact,
    loki_count,
    model_identity,
    quantize,
    sals_queries,
    sals_scores,
    sals_select,
    settings_from,
)
from generate import Engine, Sampling, decode_rows
from model import (
    SHAPES,
    Llama,
    ModelConfig,
    StreamDecoder,
    UserError,
    apply_rope,
    load_model,
    load_tokenizer,
    rope_tables,
    weight_slots,
)

ROOT = Path(__file__).parent
NANO = ROOT / "checkpoints" / "nano"
REAL = ROOT.parent / "shared" / "real"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/real")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def error(result, reference) -> float:
    """rms(result - reference) / rms(reference), in fp64; NaN anywhere is an infinite error."""
    result, reference = torch.as_tensor(result).double(), torch.as_tensor(reference).double()
    value = ((result - reference).square().mean() / reference.square().mean()).sqrt().item()
    return float("inf") if math.isnan(value) else value


def tiny_config(group: int = 2, head_dim: int = 16, **changes) -> ModelConfig:
    config = ModelConfig(
        dim=48,
        n_layers=4,
        n_heads=8,
        n_kv_heads=8 // group,
        head_dim=head_dim,
        ffn_dim=64,
        vocab_size=96,
        max_positions=512,
    )
    return dataclasses.replace(config, **changes)


def tiny_model(seed: int = 0, **changes) -> Llama:
    """A random model whose attention is sharp enough for its selection to matter."""
    torch.manual_seed(seed)
    model = Llama(tiny_config(**changes)).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        p.copy_(
            torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1)
            + (1.0 if p.ndim == 1 and "norm" in name else 0.0)
        )
    model.fingerprint = f"tiny-{seed}"
    return model


def orthonormal(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q.float().contiguous()


def bases(model: Llama) -> dict[str, torch.Tensor]:
    """Full-rank orthonormal bases in the place of fitted ones: at full rank any of them is exact."""
    return {f"{i}.basis": orthonormal(model.config.kv_dim, i) for i in range(model.config.n_layers)}


def artifact_of(method: str, model: Llama) -> dict[str, torch.Tensor]:
    """An artifact without fitting: any rotation is exact at full rank."""
    c = model.config
    if method == "loki":
        rotations = [orthonormal(c.head_dim, i) for i in range(c.n_layers * c.n_kv_heads)]
        basis = torch.stack(rotations).unflatten(0, (c.n_layers, c.n_kv_heads))
        return {
            "post.basis": basis,
            "post.eigenvalues": torch.ones(basis.shape[:-1]),
            "better": torch.tensor(1),
        }
    return bases(model) if METHODS[method].fitted else {}


FULL = {"rank": 1.0, "score_rank": 1.0, "bits": 16, "sinks": 4, "critical": 400, "recent": 8}
SPARSE = {"rank": 0.5, "bits": 4, "sinks": 4, "critical": 20, "recent": 8}


def make_engine(model: Llama, method: str, rows: int, capacity: int, **options) -> Engine:
    room = Room(model, rows, capacity)
    artifact = artifact_of(method, model)
    return Engine(
        model,
        METHODS[method].build(model, settings_from(method, options), room, artifact),
        room,
        Sampling(),
    )


def logits_through(engine: Engine, prompts: list[list[int]], continuation: list[list[int]]) -> torch.Tensor:
    """Logits [1 + n, B, V] after the prompts and after each teacher-forced token (one list a row)."""
    engine.prefill(prompts)
    logits = [engine.logits.clone()]
    for tokens in zip(*continuation, strict=True):
        engine.tokens.copy_(torch.tensor(tokens))
        engine.step()
        logits.append(engine.logits.clone())
    return torch.stack(logits)


def random_ids(n: int, seed: int = 0, vocab: int = 96) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


# -------------------------------------------------------------------------------------- model and checkpoints


def hf_model(family: str):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 80, "vocab_size": 96, "max_position_embeddings": 256}
    shape |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    kinds = {
        "llama-2": ("Llama", {"num_key_value_heads": 4}),
        "llama-3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        "llama-3.1": ("Llama", {"rope_parameters": llama3}),
        "llama-3.2-tied": ("Llama", {"rope_parameters": llama3, "tie_word_embeddings": True}),
        "llama-linear": ("Llama", {"rope_parameters": linear}),
        "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
        "yi-yarn": ("Llama", {"rope_parameters": yarn, "head_dim": 16}),
        "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
        "qwen2": ("Qwen2", {}),
        "qwen2-yarn": ("Qwen2", {"rope_parameters": yarn}),
        "qwen3": ("Qwen3", {"head_dim": 16}),
        "phi3": ("Phi3", {}),
    }
    name, extra = kinds[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**shape, **extra})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.2)  # biases and norms start as 0 and 1: make them count
    return model


FAMILIES = [
    "llama-2",
    "llama-3",
    "llama-3.1",
    "llama-3.2-tied",
    "llama-linear",
    "llama-bias",
    "yi-yarn",
    "mistral",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
    "phi3",
]


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


def test_rope_is_half_split_and_relative():
    cos, sin = rope_tables(tiny_config(), 64, CPU)
    q, k = torch.randn(1, 16), torch.randn(1, 16)

    def logit(i, j):
        return (apply_rope(q, cos[i], sin[i]) * apply_rope(k, cos[j], sin[j])).sum()

    assert torch.allclose(logit(50, 40), logit(20, 10), atol=1e-4)
    x = torch.zeros(1, 16)
    x[0, 3] = 1  # pair 3 is dims 3 and 3 + 8
    rotated = apply_rope(x, cos[5], sin[5])[0]
    assert torch.allclose(rotated[[3, 11]], torch.stack((cos[5, 3], sin[5, 3])))
    assert rotated.abs().sum() == rotated[[3, 11]].abs().sum()


def test_named_shapes_have_published_parameter_counts():
    billions = {
        "llama-2-7b": 6.738,
        "llama-2-13b": 13.016,
        "llama-3.1-8b": 8.030,
        "llama-3.1-70b": 70.554,
        "mistral-7b": 7.242,
        "qwen2.5-7b": 7.616,
    }
    for name, count in billions.items():
        with torch.device("meta"):
            model = Llama(SHAPES[name])
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == count, name


def test_checkpoint_round_trip_and_dtypes(tmp_path):
    model = tiny_model(tied=True)
    save_checkpoint(model, tmp_path)
    loaded = load_model(tmp_path, CPU, torch.bfloat16)
    for name, slot in weight_slots(loaded).items():
        assert torch.equal(slot, weight_slots(model)[name].bfloat16()), name
    assert loaded.output.weight is loaded.tok_embeddings.weight
    first = loaded.fingerprint
    weight_slots(model)["model.norm.weight"][0] += 1
    save_checkpoint(model, tmp_path)
    assert load_model(tmp_path, CPU, torch.float32).fingerprint != first


# --------------------------------------------------------------------------------------- the exactness ladder


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("score", ["sum", "softmax"])
@pytest.mark.parametrize("window", ["exact", "half"])
def test_sals_at_full_rank_and_budget_is_dense(group, score, window):
    prompts = [random_ids(n, n) for n in (5, 60, 33)]
    more = [random_ids(20, 100 + n) for n in (5, 60, 33)]
    reference = logits_through(make_engine(tiny_model(group=group), "dense", 3, 80), prompts, more)
    for skip in ("", "0,-1"):
        model = tiny_model(group=group)
        options = FULL | {"score": score, "skip": skip}
        if window == "half":  # the window's own latent is at rank 1/2 and 8 bits: close, not equal
            engine = make_engine(model, "sals", 3, 80, **options, window=window)
            got = logits_through(engine, prompts, more)
            assert 1e-4 < error(got[1:], reference[1:]) < 1.5
        else:
            got = logits_through(make_engine(model, "sals", 3, 80, **options), prompts, more)
            assert error(got, reference) < 1e-5


@pytest.mark.parametrize(
    "method,options",
    [
        ("dense", {}),
        ("sals", SPARSE),
        ("sals", SPARSE | {"score": "sum"}),
        ("sals", SPARSE | {"bits": 16}),
        ("sals", SPARSE | {"bits": 16, "score": "sum", "skip_as": "dense"}),
        ("sals", SPARSE | {"window": "half", "fold": False}),
        ("loki", {"k": 0.3, "d": 0.5}),
        ("loki", {"k": 12, "d": 0.25, "sinks": 2, "recent": 4}),
        ("loki", {"d": 0.5, "reduced": True}),
        ("streaming", {"sinks": 2, "recent": 20}),
    ],
)
def test_a_row_of_a_ragged_batch_equals_the_prompt_alone(method, options):
    prompts = [random_ids(n, n) for n in (1, 47, 90)]
    more = [random_ids(15, 100 + n) for n in (1, 47, 90)]
    together = logits_through(make_engine(tiny_model(), method, 3, 110, **options), prompts, more)
    for row in range(3):
        alone = logits_through(
            make_engine(tiny_model(), method, 1, 110, **options), [prompts[row]], [more[row]]
        )
        # A sum in another order may move one value across a rounding boundary of the quantiser.
        assert error(together[:, row], alone[:, 0]) < (1e-2 if options.get("bits") == 4 else 1e-5)


@pytest.mark.parametrize(
    "method,options",
    [("dense", {}), ("sals", FULL), ("loki", {"k": 1.0}), ("loki", {"d": 1.0, "reduced": True})],
)
def test_prefill_then_decode_equals_decode_all_the_way(method, options):
    ids = random_ids(70)
    late = logits_through(make_engine(tiny_model(), method, 1, 80, **options), [ids[:60]], [ids[60:]])
    early = logits_through(make_engine(tiny_model(), method, 1, 80, **options), [ids[:1]], [ids[1:]])
    assert error(late, early[-len(late) :]) < 1e-5


@pytest.mark.parametrize(
    "options", [SPARSE, SPARSE | {"bits": 2}, SPARSE | {"bits": 16}, SPARSE | {"window": "half"}]
)
@pytest.mark.parametrize("n", [3, 8, 50])
def test_sals_prefill_writes_what_decode_writes(options, n):
    model = tiny_model()
    room, c = Room(model, 1, 64), model.config
    settings = SalsSettings(**options)
    one, other = (SalsCache(room, settings, orthonormal(c.kv_dim), True) for _ in range(2))
    q, k, v = torch.randn(n, 8, 16), torch.randn(n, 4, 16), torch.randn(n, 4, 16)
    one.prefill(0, q, k, v)
    for i in range(n):
        other.decode(torch.tensor([i], dtype=torch.int32), q[i : i + 1], k[i : i + 1], v[i : i + 1])
    for (name, a), (_, b) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-5), name


def test_sals_drops_exactly_one_token_past_the_budget():
    """At full rank only selection differs from dense: nothing is lost up to x + y + z tokens, then one is."""
    model = tiny_model()
    budget = {
        "rank": 1.0,
        "score_rank": 1.0,
        "bits": 16,
        "sinks": 2,
        "critical": 20,
        "recent": 8,
        "skip": "",
        "keep": 0.0,
    }
    cache = SalsCache(Room(model, 1, 64), SalsSettings(**budget), orthonormal(64), True)
    dense = DenseCache(Room(model, 1, 64))
    q, k, v = torch.randn(40, 8, 16), torch.randn(40, 4, 16), torch.randn(40, 4, 16)
    for n in range(40):
        pos = torch.tensor([n], dtype=torch.int32)
        step = (pos, q[n : n + 1], k[n : n + 1], v[n : n + 1])
        difference = error(cache.decode(*step), dense.decode(*step))
        index, live = cache.select(pos, q[n : n + 1])
        chosen = set(index[live].tolist()) | set(range(max(0, n - 7), n + 1))
        assert len(chosen) == min(n + 1, 30) == int(live.sum()) + min(n + 1, 8)
        assert {0, 1, n} <= chosen | {1} and chosen >= set(range(max(0, n - 7), n + 1))
        assert (difference < 1e-5) == (n + 1 <= 30), n


# ------------------------------------------------------------------------------------------------- the ledger


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 0.125, "bits": 2},
        {"window": "half"},
        {"skip_as": "dense"},
        {"bits": 16, "keep": 0.5},
        {"skip": ""},
    ],
)
@pytest.mark.parametrize("group", [1, 4])
def test_measured_bytes_equal_the_formula(options, group):
    model = tiny_model(group=group, head_dim=32)
    others = [("loki", {}), ("loki", {"reduced": True, "d": 0.25}), ("streaming", {"recent": 20})]
    for method, chosen in [("dense", {}), ("sals", options), *others]:
        engine = make_engine(model, method, 3, 200, **chosen)
        for cache in engine.caches:
            assert cache.measured() == cache.formula() == sum(b.nbytes for b in cache.buffers())


def test_keep_is_the_share_of_tokens_attended():
    assert SalsSettings(keep=0.125).budget(4096) == (16, 432, 64)  # the paper's setting on LongBench
    assert sum(SalsSettings(keep=0.25).budget(8192)) == 2048
    with pytest.raises(UserError, match="fewer than"):
        SalsSettings(keep=0.01).budget(1000)


def test_bytes_of_the_paper():
    """SALS Table 2: 0.28 and 0.15 of dense; 1 / 0.15625 is the abstract's 6.4 times."""
    model = Llama.__new__(Llama)
    torch.nn.Module.__init__(model)
    model.config = SHAPES["llama-2-7b"]
    model.tok_embeddings = torch.nn.Embedding(2, 2, dtype=torch.bfloat16)
    room = Room(model, 1, 4096)
    for rank, bits, ratio in ((0.25, 4, 0.28125), (0.125, 2, 0.15625)):
        cache = SalsCache(room, SalsSettings(rank=rank, bits=bits), torch.zeros(4096, 1024), True)
        assert cache.token_bytes() == ratio * 2 * 4096 * 2
        length, chosen = 4096, 16 + 432
        expected = length * cache.r_score * 2 + chosen * cache.token_bytes() + 64 * 4 * 4096
        assert cache.bytes_read(length) == expected


# ----------------------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantiser_bounds_and_exact_cases(bits):
    torch.manual_seed(bits)
    x = torch.randn(5, 3, 64) * torch.logspace(-3, 3, 64)
    codes, low_scale = quantize(x, bits, 32)
    assert codes.shape == (5, 3, 64 * bits // 8) and codes.dtype == torch.uint8
    back = dequantize(codes, low_scale, bits, 32, torch.float32)
    low, scale = low_scale.float().unbind(-1)
    bound = scale / 2 + (low.abs() + scale * 2**bits) * 2**-10  # half a step, and the fp16 rounding of both
    assert ((back - x).unflatten(-1, (2, 32)).abs().amax(-1) <= bound).all()
    again = quantize(back, bits, 32)
    assert error(dequantize(*again, bits, 32, torch.float32), back) < 2e-3
    constant = torch.full((1, 1, 64), 0.75)
    assert torch.equal(dequantize(*quantize(constant, bits, 32), bits, 32, torch.float32), constant)
    outlier = x.clone()
    outlier[0, 0, 40] = 1e4  # touches its own group of 32 only
    changed = dequantize(*quantize(outlier, bits, 32), bits, 32, torch.float32) != back
    assert not changed[0, 0, :32].any() and not changed[1:].any() and not changed[0, 1:].any()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_round_trips_every_code(bits):
    codes = torch.arange(2**bits).repeat(64 // 2**bits + 1)[:64].float()
    if bits == 8:
        codes = torch.cat((torch.zeros(1), torch.full((1,), 255.0), torch.arange(62.0)))
    else:
        codes[0], codes[1] = 0, 2**bits - 1
    x = codes.view(1, 64)
    assert torch.equal(dequantize(*quantize(x, bits, 64), bits, 64, torch.float32), x)


# -------------------------------------------------------------------------------------------- SALS invariants


def test_sals_fit_is_orthonormal_optimal_and_joint_beats_per_head():
    model = tiny_model(group=2)
    tokens = torch.randint(0, 96, (6, 64), generator=torch.Generator().manual_seed(0))
    tensors, _ = fit_sals(model, tokens, key_moments(model, tokens, "test"), 1.0)
    covariance = key_moments(model, tokens, "test")["pre"].second
    for i in range(4):
        basis, values = tensors[f"{i}.basis"].double(), tensors["eigenvalues"][i].double()
        assert error(basis.T @ basis, torch.eye(64)) < 1e-5
        for r in (8, 16, 32):
            kept = (basis[:, :r].T @ covariance[i] @ basis[:, :r]).trace()
            assert abs(kept / values[:r].sum() - 1) < 1e-5
            per_head = sum(
                eigen(covariance[i][h : h + 16, h : h + 16])[0][: r // 4].sum() for h in range(0, 64, 16)
            )
            assert kept >= per_head * (1 - 1e-9)  # Lemma 1
            other = orthonormal(64, r)[:, :r].double()
            assert kept >= (other.T @ covariance[i] @ other).trace()


def test_sals_sum_scores_equal_the_sum_of_all_heads_logits():
    q, k = torch.randn(2, 8, 16, dtype=torch.float64), torch.randn(2, 30, 4, 16, dtype=torch.float64)
    basis, live = orthonormal(64).double(), torch.ones(2, 30, dtype=torch.bool)
    latent = k.flatten(2) @ basis
    scores = sals_scores(sals_queries(q, basis, 4, "sum"), latent, live, "sum", 16)
    truth = torch.einsum("bhd,bshd->bs", q, k.repeat_interleave(2, dim=2))
    assert error(scores, truth) < 1e-5
    swapped = (
        q.unflatten(1, (4, 2)).flip(2).flatten(1, 2)
    )  # the order of heads within a group is of no matter
    for rule in ("sum", "softmax"):
        a, b = (sals_scores(sals_queries(x, basis, 4, rule), latent, live, rule, 16) for x in (q, swapped))
        assert error(a, b) < 1e-5


def test_sals_softmax_scores_are_the_mean_pre_rope_attention():
    q, k = torch.randn(1, 8, 16), torch.randn(1, 30, 4, 16)
    basis, live = orthonormal(64), torch.arange(30)[None] < 25
    scores = sals_scores(sals_queries(q, basis, 4, "softmax"), k.flatten(2) @ basis, live, "softmax", 16)
    logits = torch.einsum("bhd,bshd->bhs", q, k.repeat_interleave(2, dim=2)) / 4
    truth = logits[..., :25].softmax(-1).sum(1)
    assert error(scores[:, :25], truth) < 1e-5 and (scores[:, 25:] == 0).all()


@pytest.mark.parametrize("length", [1, 7, 8, 12, 13, 14, 40])
def test_sals_selection_has_the_sinks_and_the_best_and_no_repeats(length):
    torch.manual_seed(length)
    scores = torch.randn(2, 40)
    pos = torch.tensor([length - 1, max(0, length - 2)])
    index, live = sals_select(scores, pos, x=3, y=6, z=4)
    for row in range(2):
        n = int(pos[row]) + 1
        old = list(range(max(0, n - 4)))
        chosen = index[row][live[row]].tolist()
        assert len(set(chosen)) == len(chosen) == min(len(old), 9)
        assert set(old[:3]) <= set(chosen)
        best = sorted(old[3:], key=lambda j: -scores[row, j])[:6]
        assert set(chosen) - set(old[:3]) == set(best)


def test_sals_reconstruction_commutes_with_gathering():
    model = tiny_model()
    cache = SalsCache(Room(model, 1, 40), SalsSettings(**FULL), orthonormal(64), True)
    k = torch.randn(40, 4, 16)
    cache.prefill(0, torch.randn(40, 8, 16), k, torch.randn(40, 4, 16))
    index = torch.tensor([[39, 3, 17, 5]])
    got, _ = cache.reconstruct(index)
    assert error(got[0], cache.rope(k, slice(0, 40))[index[0]]) < 1e-5


@pytest.mark.parametrize("length", [3, 8, 21])
def test_sals_half_window_reconstructs_at_the_right_positions(length):
    """Keys that lie in the half-rank subspace come back exactly, each rotated at its own position."""
    settings = SalsSettings(**SPARSE, window="half")
    cache = SalsCache(Room(tiny_model(), 1, 40), settings, orthonormal(64), True)
    k = (torch.randn(length, 32) @ orthonormal(64)[:, :32].T).unflatten(-1, (4, 16))
    cache.prefill(0, torch.randn(length, 8, 16), k, torch.randn(length, 4, 16))
    got, _, live = cache.read_ring(torch.tensor([length - 1]))
    for p in range(max(0, length - 8), length):
        assert live[0, p % 8] and error(got[0, p % 8], cache.rope(k, slice(0, length))[p]) < 1e-5
    assert live.sum() == min(8, length)


@pytest.mark.parametrize("score", ["sum", "softmax"])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_folded_projections_equal_unfolded(score, qkv_bias):
    prompts, more = [random_ids(50)], [random_ids(10, 1)]
    runs = []
    for fold in (True, False):
        model = tiny_model(qkv_bias=qkv_bias)
        runs.append(
            logits_through(make_engine(model, "sals", 1, 64, **SPARSE, score=score, fold=fold), prompts, more)
        )
        rows = model.layers[2].attention.wqkv.weight.shape[0]
        assert rows == 256 + fold * (32 + (16 if score == "sum" else 0))
    assert error(runs[0], runs[1]) < 1e-4


def test_prefill_holds_one_layers_keys_and_values_at_a_time():
    """No tensor of a layer's k may live on when the next layer's prefill runs."""
    import weakref

    model = tiny_model()
    engine = make_engine(model, "sals", 1, 64, **SPARSE)
    seen = []
    for cache in engine.caches:
        inner = cache.prefill

        def prefill(row, q, k, v, *folded, inner=inner):
            assert all(ref() is None for ref in seen)
            seen.append(weakref.ref(k))
            return inner(row, q, k, v, *folded)

        cache.prefill = prefill
    engine.prefill([random_ids(60)])
    assert len(seen) == 4


# ----------------------------------------------------------------------------------------------- StreamingLLM


@pytest.mark.parametrize("sinks,recent", [(0, 6), (3, 6), (4, 60)])
def test_streaming_attends_exactly_the_first_and_the_last(sinks, recent):
    """Against dense attention masked to the kept tokens; prefill and decode leave the same cache."""
    room = Room(tiny_model(), 1, 40)
    settings = StreamingSettings(sinks=sinks, recent=recent)
    streaming, dense, late = StreamingCache(room, settings), DenseCache(room), StreamingCache(room, settings)
    q, k, v = torch.randn(30, 8, 16), torch.randn(30, 4, 16), torch.randn(30, 4, 16)
    for n in range(30):
        pos = torch.tensor([n], dtype=torch.int32)
        step = (pos, q[n : n + 1], k[n : n + 1], v[n : n + 1])
        got = streaming.decode(*step)
        dense.decode(*step)
        kept = (room.positions <= n) & ((room.positions < sinks) | (room.positions > n - recent))
        truth = attend(dense.rope(q[n : n + 1], pos), dense.k, dense.v, kept[None])
        assert error(got, truth) < 1e-5, n
    late.prefill(0, q, k, v)
    assert torch.allclose(late.k, streaming.k, atol=1e-5) and torch.equal(late.v, streaming.v)


# ------------------------------------------------------------------------------------------- Loki invariants


def loki_cache(group: int = 2, **options) -> tuple[LokiCache, DenseCache, tuple]:
    """A Loki and a dense cache that read the same 40 tokens, and the next step's (pos, q, k, v)."""
    model = tiny_model(group=group)
    room, settings = Room(model, 1, 41), LokiSettings(**options)
    heads = 8 // group
    basis = torch.stack([orthonormal(16, h) for h in range(heads)])
    caches = LokiCache(room, settings, basis, max(1, round(settings.d * 16))), DenseCache(room)
    torch.manual_seed(0)
    q, k, v = torch.randn(41, 8, 16), torch.randn(41, heads, 16) * 2, torch.randn(41, heads, 16)
    for cache in caches:
        cache.prefill(0, q[:40], k[:40], v[:40])
    return *caches, (torch.tensor([40], dtype=torch.int32), q[40:], k[40:], v[40:])


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(
    "options", [{"k": 1.0, "d": 0.25}, {"k": 500, "d": 0.5}, {"reduced": True, "d": 1.0}]
)
def test_loki_with_every_token_or_component_is_dense(group, options):
    loki, dense, step = loki_cache(group, **options)
    assert error(loki.decode(*step), dense.decode(*step)) < 1e-5


def test_loki_with_all_components_is_exact_top_k():
    loki, dense, step = loki_cache(k=9, d=1.0)
    got = loki.decode(*step)
    pos, q, _, _ = step
    dense.decode(*step)
    logits = torch.einsum("hgd,hsd->hgs", dense.rope(q, pos)[0].unflatten(0, (4, 2)), dense.k[0]) / 4
    index = logits.topk(9, dim=-1).indices
    chosen, live = loki.select(pos, loki.rotate(loki.rope(q, pos)))
    assert live.all() and torch.equal(chosen[0].sort(-1).values, index.sort(-1).values)
    masked = torch.full_like(logits, -torch.inf).scatter(-1, index, logits.gather(-1, index))
    assert error(got[0], (masked.softmax(-1) @ dense.v[0]).flatten(0, 1)) < 1e-5
    # Mixture identity: full attention is m * (attention on the chosen) + (1 - m) * (attention on the rest).
    weights = logits.softmax(-1)
    m = weights.gather(-1, index).sum(-1, keepdim=True)
    rest = logits.scatter(-1, index, -torch.inf).softmax(-1) @ dense.v[0]
    mixed = m * got[0].unflatten(0, (4, 2)) + (1 - m) * rest
    assert error(mixed, weights @ dense.v[0]) < 1e-5


def test_loki_scores_on_the_leading_components():
    """Keys that live in the leading d components are ranked by these alone as by all."""
    loki, _, (pos, q, _, _) = loki_cache(k=10, d=0.25)
    loki.k[..., 4:] = 0
    queries = loki.rotate(loki.rope(q, pos))
    index, _ = loki.select(pos, queries)
    exact = (queries @ loki.k.transpose(-1, -2)).topk(10).indices
    assert torch.equal(index.sort(-1).values, exact.sort(-1).values)


@pytest.mark.parametrize(
    "length,k,count", [(1, 0.25, 1), (3, 0.25, 1), (8, 0.25, 2), (39, 0.25, 9), (40, 7, 7)]
)
def test_loki_attends_floor_of_k_but_at_least_one(length, k, count):
    loki, _, (_, q, _, _) = loki_cache(k=k)
    _, live = loki.select(torch.tensor([length - 1]), loki.rotate(q))
    assert (live.sum(-1) == count).all() and loki_count(k, length) == count


def test_loki_is_blind_to_a_shift_of_all_keys_and_to_their_order():
    """Subtracting a vector from all post-RoPE keys, or reordering the cached tokens, changes nothing."""
    loki, _, step = loki_cache(k=10, d=0.5)
    pos, q, _, _ = step
    truth = loki.decode(*step)
    index, _ = loki.select(pos, loki.rotate(loki.rope(q, pos)))
    loki.k -= torch.randn(4, 1, 16)
    shifted, _ = loki.select(pos, loki.rotate(loki.rope(q, pos)))
    assert torch.equal(index.sort(-1).values, shifted.sort(-1).values)
    loki, _, step = loki_cache(k=10, d=0.5)
    order = torch.randperm(40)
    loki.k[:, :, :40], loki.v[:, :, :40] = loki.k[:, :, order], loki.v[:, :, order]
    assert error(loki.decode(*step), truth) < 1e-5


def test_loki_sinks_and_recent_count_in_the_budget():
    loki, _, (pos, q, _, _) = loki_cache(k=8, d=0.5, sinks=2, recent=3)
    index, live = loki.select(pos, loki.rotate(q))
    assert live.all() and index.shape[-1] == 8
    assert all({0, 1, 38, 39, 40} <= set(head.tolist()) for head in index.flatten(0, 2))


def test_loki_fit_is_a_centred_pca_of_each_head():
    model = tiny_model(vocab_size=96)
    tokens = torch.randint(0, 96, (8, 64), generator=torch.Generator().manual_seed(0))
    tensors, facts = calibrate.fit_loki(model, tokens, key_moments(model, tokens, "test"), 0.5)
    seen = []
    for window in tokens:
        calibrate.observe(model, window[None], lambda i, q, k, v: seen.append((i, k[0])))
    keys = torch.cat([k for i, k in seen if i == 2])[:, 1].double()  # layer 2, head 1, before RoPE
    centred = keys - keys.mean(0)
    basis, values = tensors["pre.basis"][2, 1].double(), tensors["pre.eigenvalues"][2, 1].double()
    assert error(basis.T @ basis, torch.eye(16)) < 1e-5
    for d in (1, 4, 12):  # Eckart-Young: the residual is the tail of the eigenvalues
        residual = (centred - centred @ basis[:, :d] @ basis[:, :d].T).square().sum(1).mean()
        assert abs(residual / values[d:].sum() - 1) < 1e-4
    worse = "pre" if tensors["better"] else "post"
    better = "post" if tensors["better"] else "pre"
    assert float(facts[f"perplexity_{better}"]) <= float(facts[f"perplexity_{worse}"])
    moved = keys @ orthonormal(16, 5).double() * 3 + 7  # Rank@v is blind to rotation, scale and shift
    again = eigen((moved - moved.mean(0)).T @ (moved - moved.mean(0)) / len(moved))[0]
    assert torch.equal(rank_at(again, 0.8), rank_at(values, 0.8))


# ------------------------------------------------------------------------------------ sampling and the engine


def test_greedy_top_k_and_top_p():
    torch.manual_seed(0)
    logits = torch.tensor([[0.1, 3.0, 2.0, -1.0, 2.9]]).repeat(4000, 1)
    assert (Sampling()(logits) == 1).all()
    assert set(Sampling(1.0, top_k=2)(logits).tolist()) == {1, 4}
    probs = logits[0].softmax(-1)
    drawn = torch.bincount(Sampling(1.0)(logits), minlength=5) / 4000
    assert (drawn - probs).abs().max() < 0.03
    assert set(Sampling(1.0, top_p=0.5)(logits).tolist()) == {1, 4}
    assert set(Sampling(1.0, top_p=0.3)(logits).tolist()) == {1}


def test_rows_stop_one_by_one():
    engine = make_engine(tiny_model(), "dense", 3, 40)
    engine.prefill([random_ids(n, n) for n in (3, 9, 5)])
    free = decode_rows(engine, 12, lambda ids: False).token_ids
    stop = free[1][4]
    engine = make_engine(tiny_model(), "dense", 3, 40)
    engine.prefill([random_ids(n, n) for n in (3, 9, 5)])
    stopped = decode_rows(engine, 12, lambda ids: ids[-1] == stop).token_ids
    for a, b in zip(free, stopped, strict=True):
        assert b == (a[: a.index(stop)] if stop in a else a)


def test_the_same_seed_gives_the_same_sample():
    texts = []
    for seed in (1, 1, 2):
        engine = make_engine(tiny_model(), "dense", 2, 40)
        engine.sampling = Sampling(1.5, top_k=50)
        torch.manual_seed(seed)
        engine.prefill([random_ids(4), random_ids(6)])
        texts.append(decode_rows(engine, 20, lambda ids: False).token_ids)
    assert texts[0] == texts[1] != texts[2]


@needs_cuda
@pytest.mark.parametrize(
    "method,options",
    [("dense", {}), ("sals", SPARSE), ("sals", SPARSE | {"score": "sum"}), ("loki", {"k": 0.3, "d": 0.5})],
)
def test_graph_replay_equals_eager(method, options):
    """One graph over 300 steps of a ragged batch, across the budget's edge at 32 tokens."""
    prompts, tokens = [random_ids(n, n) for n in (5, 31, 60)], []
    for graphed in (False, True):
        model = tiny_model().cuda()
        room = Room(model, 3, 400)
        artifact = artifact_of(method, model)
        caches = METHODS[method].build(model, settings_from(method, options), room, artifact)
        engine = Engine(model, caches, room, Sampling(), graphed=graphed)
        engine.prefill(prompts)
        tokens.append((decode_rows(engine, 300, lambda ids: False).token_ids, engine.logits.tolist()))
    assert tokens[0] == tokens[1]


@needs_cuda
@pytest.mark.parametrize("method,options", [("dense", {}), ("sals", {}), ("sals", {"score": "sum"})])
def test_nanos_greedy_tokens_with_and_without_kernels_and_graph(method, options, nano_haystack):
    """The compiled graph neither compiles again nor waits for the host once it is captured."""
    prompts = [eval_sample(nano_haystack, "multikey", seed, n)[0] for seed, n in ((0, 700), (1, 1500))]
    tokens = []
    for kernels_, graphed in ((False, False), (True, False), (False, True), (True, True)):
        model = load_model(NANO, torch.device("cuda"), torch.float32)
        artifact = load_artifact(NANO, method, model) if METHODS[method].fitted else {}
        room = Room(model, 2, 1600, kernels_)
        caches = METHODS[method].build(model, settings_from(method, options), room, artifact)
        engine = Engine(model, caches, room, Sampling(), compiled=graphed, graphed=graphed)
        engine.prefill(prompts)
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


# ------------------------------------------------------------------------------------------------- tokenizers

LLAMA2, LLAMA3, QWEN, STORIES = "tokenizers/llama2", "tokenizers/llama3", "tokenizers/qwen2.5", "stories260k"
TEXTS = [
    "",
    "Hello, world!",
    " leading and  double   spaces ",
    "\n\n\ttabs\r\nand lines\n",
    "def f(x):\n    return x**2  # ü",
    "0 12 345 6789 3.14159 1e-10 ²½",
    "I'll don't WE'RE it's",
    "naïve café Ångström Straße İstanbul",
    "你好，世界。こんにちは 안녕하세요",
    "Привет мир مرحبا नमस्ते",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 end",
    "zero\u200bwidth \u00a0 nbsp \u3000 wide",
    "<|eot_id|> </s> <s> <|im_end|> [INST]",
    "a" * 1000,
    "\x00\x01\x7f",
    "\U0001f9ffx\U00020000",
]


def folder_of(name):
    if not (REAL / name).exists():
        pytest.skip(f"no {REAL / name}")
    return REAL / name


@functools.cache
def real(name):
    return load_tokenizer(folder_of(name))


def sentencepiece_of(name):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(folder_of(name) / "tokenizer.model"))


def write_tiktoken(folder, merges):
    """A tokenizer.model like Llama 3's of the 256 bytes and a few merges."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [bytes([byte]) for byte in range(256)] + [word.encode() for word in merges]
    lines = [base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(words)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


GPT2_BYTES = [chr(b) for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b >= 174] + [
    chr(256 + i) for i in range(68)
]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated", "invert": False}


def tokenizer_json(vocab=None, merges=(), pre_tokenizer=BYTE_LEVEL, added=(), **parts):
    """The contents of a tokenizer.json; by default of single bytes."""
    vocab = vocab or {word: i for i, word in enumerate(GPT2_BYTES + ["".join(m.split()) for m in merges])}
    return {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": list(merges)} | parts.pop("model", {}),
    } | parts


def write_json(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        (folder / f"{name}.json").write_text(json.dumps(contents), encoding="utf-8")
    return folder


def qwen_files():
    folder = folder_of(QWEN)
    merges = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    return json.loads((folder / "vocab.json").read_text(encoding="utf-8")), [line for line in merges if line]


# ---- ids that are known


def test_llama3_vector_and_special_tokens():
    tokenizer = real(LLAMA3)
    assert tokenizer.encode("This is a test sentence.<|end_of_text|>", allow_special=True) == [
        128000,
        2028,
        374,
        264,
        1296,
        11914,
        13,
        128001,
    ]
    assert tokenizer.encode("This", bos=False) == [2028]
    assert tokenizer.vocab_size == 128256 and tokenizer.bos_id == 128000
    assert tokenizer.stop_ids == {128001, 128008, 128009}
    names = {
        128003: "reserved_special_token_1",
        128004: "finetune_right_pad_id",
        128005: "step_id",
        128006: "start_header_id",
        128007: "end_header_id",
        128008: "eom_id",
        128009: "eot_id",
        128010: "python_tag",
        128011: "reserved_special_token_2",
        128255: "reserved_special_token_246",
    }
    assert {f"<|{name}|>": i for i, name in names.items()}.items() <= tokenizer.special_tokens.items()
    assert len(tokenizer.special_tokens) == 256


def test_stories_golden_text_and_join():
    tokenizer = real(STORIES)
    golden = json.loads((folder_of(STORIES) / "golden.json").read_text(encoding="utf-8"))
    ids, text = golden["greedy_ids"], golden["greedy_text"]
    assert tokenizer.encode(golden["prompt"]) == golden["prompt_ids"]
    assert tokenizer.decode(ids) == tokenizer.decode(ids[1:]) == text
    for cut in range(len(ids)):
        assert tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:], after=ids[:cut]) == text
    assert tokenizer.stop_ids == {1, 2}  # 1 is BOS: the next story


# ---- round trips and oracles


@pytest.mark.parametrize("name", [LLAMA2, LLAMA3, QWEN])
def test_round_trip(name):
    tokenizer = real(name)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", [LLAMA2, STORIES])
def test_sentencepiece_oracle(name):
    tokenizer, oracle = real(name), sentencepiece_of(name)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text, bos=False) == ids and tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == oracle.decode(ids)
    spaces = [i for i in range(259, oracle.vocab_size()) if oracle.id_to_piece(i).startswith("▁▁")]
    words = [0, 1, 2, *(i for i in range(259, oracle.vocab_size()) if i not in spaces)]
    rng = random.Random(0)
    for _ in range(300):
        ids = [words[-1], *rng.choices(words, k=6)]
        assert tokenizer.decode(ids) == oracle.decode(ids)


def test_qwen_against_transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    try:
        oracle = transformers.AutoTokenizer.from_pretrained(folder_of(QWEN))
    except (OSError, ValueError) as error:
        pytest.skip(f"transformers cannot load the files: {error}")
    tokenizer = real(QWEN)
    texts = [*TEXTS, "e\u0301 u\u0308 \u1100\u1161", Path(json.__file__).read_text(encoding="utf-8")]
    texts += [path.read_text(encoding="utf-8")[:100_000] for path in sorted((REAL / "text").rglob("*.txt"))]
    for text in texts:
        expected = oracle.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text) == expected  # and no BOS
    chat = "<|im_start|>user\nHi<|im_end|>\n<tool_call>"
    assert tokenizer.encode(chat, allow_special=True) == oracle.encode(chat, add_special_tokens=False)
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.decode([151657, 151644, 13048]) == "<tool_call>Hi"  # the first is added but not special


def test_qwen_composes_characters():
    assert real(QWEN).encode("e\u0301") == real(QWEN).encode("é") != real(LLAMA3).encode("e\u0301")
    assert real(LLAMA3).decode(real(LLAMA3).encode("e\u0301")) == "e\u0301"


def test_tokenizer_json_equals_vocab_and_merges(tmp_path):
    vocab, merges = qwen_files()
    split = SPLIT | {"pattern": {"Regex": model_file.QWEN2_SPLIT}}
    splits = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}
    parts = {
        "pre_tokenizer": splits,
        "normalizer": {"type": "NFC"},
        "added": [{"id": 151645, "content": "<|im_end|>", "special": True, "rstrip": False}],
    }
    texts = [*TEXTS, "e\u0301", Path(json.__file__).read_text(encoding="utf-8")]
    expected = [real(QWEN).encode(text) for text in texts]
    write_json(tmp_path / "strings", tokenizer=tokenizer_json(vocab, merges, **parts))
    tokenizer = load_tokenizer(tmp_path / "strings")
    assert [tokenizer.encode(text) for text in texts] == expected
    assert tokenizer.stop_ids == {151645} and tokenizer.vocab_size == 151646

    # pairs instead of strings, and ids that run against the order of the merges
    backwards = {word: len(vocab) - 1 - i for word, i in vocab.items()}
    pairs = [merge.split(" ") for merge in merges]
    write_json(tmp_path / "pairs", tokenizer=tokenizer_json(backwards, pairs, **parts))
    tokenizer = load_tokenizer(tmp_path / "pairs")
    assert [[len(vocab) - 1 - i for i in tokenizer.encode(text)] for text in texts] == expected
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == [
        unicodedata.normalize("NFC", text) for text in texts
    ]


@pytest.mark.parametrize(
    "splits",
    [
        [BYTE_LEVEL],
        [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],  # SmolLM
        [SPLIT, {"type": "Digits", "individual_digits": False}, BYTE_LEVEL | {"use_regex": False}],
        [BYTE_LEVEL | {"use_regex": False}],
    ],
    ids=["gpt2", "digits", "gaps", "whole"],
)
def test_tokenizer_json_splits_like_hugging_face(tmp_path, splits):
    oracle_of = pytest.importorskip("tokenizers").Tokenizer.from_file
    merges = ["1 2", "Ġ 12", "t h", "th e", "Ġ the", "a .", ". .", "Ġ Ġ", "! !"]
    data = tokenizer_json(merges=merges, pre_tokenizer={"type": "Sequence", "pretokenizers": splits})
    write_json(tmp_path, tokenizer=data)
    tokenizer, oracle = load_tokenizer(tmp_path), oracle_of(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, "the  the 12 1212 12.12 a..!! the", "12", " 12 "]:
        assert tokenizer.encode(text) == oracle.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocab_and_merges(tmp_path):
    words = ["##", "ab", "12", "abab", "<a b>"]  # the last is no byte-level word
    write_json(tmp_path, vocab={word: i for i, word in enumerate([*GPT2_BYTES, *words])})
    for header in ("#version: 0.2\n", ""):
        (tmp_path / "merges.txt").write_text(header + "# #\na b\n1 2\nab ab\n", encoding="utf-8")
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.encode("##ababab") == [256, 259, 257]
        assert len(tokenizer.encode("12")) == 2  # Qwen's digits stand alone
        assert tokenizer.decode([257, 260]) == "ab"
    write_json(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    assert load_tokenizer(tmp_path).encode("12") == [258]


def test_sentencepiece_without_bos_and_prefix(tmp_path):
    import sentencepiece

    sentences, options = iter(["hello there", "hello world"]), {"vocab_size": 20, "hard_vocab_limit": False}
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=file,
            bos_id=-1,
            add_dummy_prefix=False,
            minloglevel=2,
            **options,
        )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id is None and None not in tokenizer.encode("hello")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    space = tokenizer.pieces.index(b" ")
    assert tokenizer.decode([space, *tokenizer.encode("hello")]) == " hello"


def test_folders_do_not_share_a_vocabulary(tmp_path, monkeypatch):
    ids = []
    for name, merge in (("one", "ab"), ("two", "bc")):
        monkeypatch.chdir(write_tiktoken(tmp_path / name, [merge]))
        ids.append(load_tokenizer(Path(".")).encode("abc", bos=False))
    assert ids == [[256, ord("c")], [ord("a"), 256]]


def test_long_and_broken_text(tmp_path):
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, ["  "]))
    assert len(tokenizer.encode(" " * 1_200_000, bos=False)) == 600_000
    names = [tokenizer] + ([real(LLAMA2)] if REAL.exists() else [])
    for each in names:
        assert each.decode(each.encode("a\udc80b")) == "a\ufffdb"


# ---- decoding


@pytest.mark.parametrize("name", [LLAMA2, LLAMA3, QWEN, STORIES])
def test_stream_decoder(name):
    tokenizer = real(name)
    for text in [*TEXTS, "👩‍👩‍👧‍👦你好🧿" * 5]:
        ids = tokenizer.encode(text)
        stream = StreamDecoder(tokenizer)
        pieces = [stream.push(i) for i in ids]
        assert not any("\ufffd" in piece for piece in pieces) and stream.flush() == ""
        assert "".join(pieces) == tokenizer.decode(ids)
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20)]
        stream = StreamDecoder(tokenizer)
        assert "".join([stream.push(i) for i in ids]) + stream.flush() == tokenizer.decode(ids)


def test_stream_gives_text_as_soon_as_it_is_final(tmp_path):
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, []))
    stream = StreamDecoder(tokenizer)
    assert [stream.push(i) for i in "a你b".encode()] == ["a", "", "", "你", "b"]
    assert [stream.push(i) for i in "👍".encode()[:3]] == ["", "", ""] and stream.flush() == "\ufffd"


def test_ids_outside_the_vocabulary_and_padding(tmp_path):
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(folder_of(QWEN) / name, tmp_path)
    write_json(tmp_path, config={"vocab_size": 151936})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 151665 and tokenizer.decode([13048, 151935, 151643]) == "Hi"
    for bad in (151936, -1):
        with pytest.raises(UserError, match=f"{bad} is outside"):
            tokenizer.decode([13048, bad])


# ---- BOS, stop ids, added tokens


def test_bos_is_added_as_the_files_say(tmp_path):
    bos = {"id": 256, "content": "<s>", "special": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    steps = {"type": "Sequence", "processors": [BYTE_LEVEL, template]}
    plain, bosed = tokenizer_json(added=[bos]), tokenizer_json(added=[bos], post_processor=steps)
    for name, data, settings, expected in [
        ("plain", plain, {"bos_token": "<s>"}, [0]),
        ("template", bosed, {}, [256, 0]),
        ("off", bosed, {"add_bos_token": False}, [0]),
        ("null", bosed, {"add_bos_token": None}, [256, 0]),
        ("on", plain, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, [256, 0]),
    ]:
        tokenizer = load_tokenizer(write_json(tmp_path / name, tokenizer=data, tokenizer_config=settings))
        assert tokenizer.bos_id == 256 and tokenizer.encode("!") == expected, name
        assert tokenizer.encode("!", bos=False) == [0]
        assert tokenizer.encode("<s>!", allow_special=True) == [256, 0]  # never twice
    assert real(QWEN).bos_id is None and real(QWEN).encode("Hi") == [13048]


def test_stop_ids_come_from_every_file(tmp_path):
    names = ["<end>", "<|eom_id|>", "<x>"]
    added = [{"id": 256 + i, "content": name, "special": True} for i, name in enumerate(names)]
    write_json(
        tmp_path,
        tokenizer=tokenizer_json(added=added),
        config={"eos_token_id": 7},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        generation_config={"eos_token_id": [3, 4]},
    )
    assert load_tokenizer(tmp_path).stop_ids == {3, 4, 7, 256, 257}
    write_json(tmp_path, config={"eos_token_id": None}, generation_config={}, tokenizer_config={})
    assert load_tokenizer(tmp_path).stop_ids == {257}


@pytest.mark.parametrize(
    "name, token", [(LLAMA2, "</s>"), (LLAMA3, "<|eot_id|>"), (QWEN, "<|im_end|>"), (STORIES, "<s>")]
)
def test_special_tokens_in_text_are_text(name, token):
    tokenizer = real(name)
    special, text = tokenizer.special_tokens[token], f"say {token} now"
    plain = tokenizer.encode(text, bos=False)
    assert special not in plain and tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, bos=False, allow_special=True)
    assert parsed == [*tokenizer.encode("say ", bos=False), special, *tokenizer.encode(" now", bos=False)]


def test_longest_special_token_wins(tmp_path):
    added = [{"id": 256 + i, "content": "x" * (i + 1), "special": True} for i in range(2)]
    write_json(tmp_path, tokenizer=tokenizer_json(added=added))
    assert load_tokenizer(tmp_path).encode("xxx!", allow_special=True) == [257, 256, 0]


def phi3_folder(folder, **tokenizer_config):
    """Llama 2's tokenizer.model with the added tokens of Phi-3."""
    folder.mkdir(exist_ok=True)
    shutil.copy(folder_of(LLAMA2) / "tokenizer.model", folder)
    names = {32000: "endoftext", 32001: "assistant", 32006: "system", 32007: "end", 32010: "user"}
    tokens = {
        i: {"content": f"<|{name}|>", "special": True, "rstrip": i > 32000} for i, name in names.items()
    }
    return write_json(
        folder,
        config={"vocab_size": 32064, "model_type": "phi3"},
        tokenizer_config={"added_tokens_decoder": tokens} | tokenizer_config,
    )


def test_added_tokens_above_sentencepiece(tmp_path):
    tokenizer, plain = load_tokenizer(phi3_folder(tmp_path, add_bos_token=False)), real(LLAMA2)
    assert tokenizer.vocab_size == 32011 and tokenizer.stop_ids == {2, 32000, 32007}
    assert tokenizer.decode([32010, 15043, 32007, 32063]) == "Hello"
    with pytest.raises(UserError, match="32064"):
        tokenizer.decode([32064])
    hello = plain.encode("Hello", bos=False)
    chat = model_file.encode_chat(tokenizer, "phi-3", [{"role": "user", "content": "Hello"}])
    assert chat == [32010, *hello, 32007, 32001]  # Phi-3's tokens swallow the line breaks after them
    assert tokenizer.encode("<|user|>\nHello<|end|>\n<|assistant|>\n", allow_special=True) == chat
    (tmp_path / "tokenizer_config.json").unlink()
    write_json(tmp_path, added_tokens={"<|end|>": 32007})
    assert load_tokenizer(tmp_path).encode("Hello<|end|>", allow_special=True) == [1, *hello, 32007]


# ---- chat

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
CHAT = [SYSTEM, USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": " Why? "}]
PROMPTS = {
    "llama-2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Why? [/INST]",
        "<s>[INST] Hi [/INST]",
    ),
    "llama-3": (
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
    ),
    "mistral": ("<s>[INST] Be brief.\n\nHi [/INST] Hello.</s>[INST]  Why?  [/INST]", "<s>[INST] Hi [/INST]"),
    "qwen": (
        (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n Why? <|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi-3": (
        (
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n"
            "<|user|>\n Why? <|end|>\n<|assistant|>\n"
        ),
        "<|user|>\nHi<|end|>\n<|assistant|>\n",
    ),
}


@pytest.mark.parametrize("style", PROMPTS)
def test_chat_prompts(style):
    for messages, expected in zip((CHAT, [USER]), PROMPTS[style], strict=True):
        assert "".join(text for text, _ in model_file.render_chat(style, messages)) == expected
    text = "{role} {content} <|eot_id|> <|im_end|> <|end|> </s>"
    segments = model_file.render_chat(style, [{"role": "user", "content": text}])
    assert [is_special for part, is_special in segments if text in part] == [False]


def test_chat_ids():
    assert set(PROMPTS) == set(model_file.CHAT_MARKERS)
    llama2, llama3, qwen = real(LLAMA2), real(LLAMA3), real(QWEN)
    sp = sentencepiece_of(LLAMA2)
    first = sp.encode("[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. ")
    assert model_file.encode_chat(llama2, "llama-2", CHAT) == [
        1,
        *first,
        2,
        1,
        *sp.encode("[INST] Why? [/INST]"),
    ]
    answered = sp.encode("[INST] Hi [/INST] Hello.")
    assert model_file.encode_chat(llama2, "mistral", CHAT[1:]) == [
        1,
        *answered,
        2,
        *sp.encode("[INST]  Why?  [/INST]"),
    ]
    assert model_file.encode_chat(llama3, "llama-3", [USER]) == [
        128000,
        128006,
        882,
        128007,
        271,
        13347,
        128009,
        128006,
        78191,
        128007,
        271,
    ]
    assert model_file.encode_chat(qwen, "qwen", [USER]) == [
        151644,
        872,
        198,
        13048,
        151645,
        198,
        151644,
        77091,
        198,
    ]
    for tokenizer, style in ((llama3, "llama-3"), (qwen, "qwen")):
        ids = model_file.encode_chat(tokenizer, style, CHAT)
        assert tokenizer.encode(PROMPTS[style][0], allow_special=True) == ids
        attack = model_file.encode_chat(
            tokenizer, style, [USER | {"content": "".join(tokenizer.special_tokens)}]
        )
        specials = set(tokenizer.special_tokens.values())
        plain = model_file.encode_chat(tokenizer, style, [USER])
        assert [i for i in attack if i in specials] == [i for i in plain if i in specials]
    with pytest.raises(UserError, match="no token <|im_start|>".replace("|", r"\|")):
        model_file.encode_chat(llama3, "qwen", [USER])


def test_chat_style(tmp_path):
    def guess(template="", special=(), config=None):
        tokenizer = model_file.Tokenizer(list, [], dict.fromkeys(special, 0), chat_template=template)
        return model_file.chat_style(config or {}, tokenizer)

    assert (
        model_file.chat_style({}, real(LLAMA3)) == "llama-3"
        and model_file.chat_style({}, real(QWEN)) == "qwen"
    )
    assert guess(special=["<|user|>", "<|end|>"]) == "phi-3"
    assert guess("{{ '<s>[INST] <<SYS>>' }}", ["<s>"]) == "llama-2"
    assert guess("{{ '<s>[INST] ' }}", ["<s>"]) == guess(config={"model_type": "mistral"}) == "mistral"
    for args in [
        ("", ["<s>", "</s>"]),  # a base model
        ("{{ '<|user|>' }}", ["</s>"], {"model_type": "mistral"}),  # Zephyr
        ("{{ '<｜User｜>' }}", ["<|start_header_id|>"]),  # DeepSeek-R1 in Llama 3's clothes
        ("{{ '[INST]' }}", ["[INST]"]),
        ("<|im_start|><|im_sep|>", ["<|im_start|>", "<|im_sep|>"]),
    ]:
        with pytest.raises(UserError, match="name one of llama-3"):
            guess(*args)
    write_json(tmp_path, tokenizer=tokenizer_json())
    (tmp_path / "chat_template.jinja").write_text("[INST] <<SYS>>", encoding="utf-8")
    assert model_file.chat_style({}, load_tokenizer(tmp_path)) == "llama-2"


@pytest.mark.parametrize(
    "messages",
    [[], [SYSTEM], [USER, USER], CHAT[:3], [USER, SYSTEM, USER], [USER | {"role": "tool"}], [CHAT[2], USER]],
)
def test_chat_needs_turns(messages):
    for style in PROMPTS:
        with pytest.raises(UserError, match="user last"):
            model_file.render_chat(style, messages)
    with pytest.raises(UserError, match="unknown chat style alpaca: choose one of llama-3"):
        model_file.render_chat("alpaca", [USER])


# ---- bad files

NO_FILES = "no tokenizer.model, no tokenizer.json, no vocab.json with merges.txt"
DAMAGED = ": not a valid tokenizer file; download it again"
MODEL, JSON = "tokenizer.model" + DAMAGED, "tokenizer.json" + DAMAGED
NOT_BYTES = "put the model's tokenizer.model beside it"


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, NO_FILES),
        ({"vocab.json": "{}"}, NO_FILES),
        ({"merges.txt": "a b"}, NO_FILES),
        ({"tokenizer.model": ""}, MODEL),
        ({"tokenizer.model": "version https://git-lfs.github.com/spec/v1\noid sha256:12\n"}, MODEL),
        ({"tokenizer.model": "YWI= 0\nYW?M= 1\n"}, MODEL),  # not base64
        ({"tokenizer.model": "YWI= 0\nYWM=\n"}, MODEL),  # cut off
        ({"tokenizer.model": "YWI= 0\nYWM= 2\n"}, MODEL),  # a rank is missing
        ({"tokenizer.model": "YWI= 0\nYWI= 1\n"}, MODEL),  # a word twice
        ({"vocab.json": "{}", "merges.txt": "a b"}, "merges.txt" + DAMAGED),
        ({"tokenizer.json": json.dumps(tokenizer_json())[:-9]}, "tokenizer.json: not valid JSON; download"),
        ({"tokenizer.json": "[]"}, "tokenizer.json: not a JSON object; download it again"),
        ({"tokenizer.json": "{}"}, JSON),
        ({"tokenizer.json": tokenizer_json(), "generation_config.json": "{"}, "config.json: not valid JSON"),
        ({"tokenizer.json": tokenizer_json({"a": 0})}, JSON),  # lacks bytes
        ({"tokenizer.json": tokenizer_json(model={"merges": ["a b"]})}, JSON),  # lacks "ab"
        ({"tokenizer.json": tokenizer_json(model={"type": "Unigram"})}, NOT_BYTES),
        ({"tokenizer.json": tokenizer_json(model={"byte_fallback": True}, pre_tokenizer=None)}, NOT_BYTES),
        ({"tokenizer.json": tokenizer_json(pre_tokenizer={"type": "Metaspace"})}, NOT_BYTES),
        (
            {
                "tokenizer.json": tokenizer_json(
                    pre_tokenizer={"pretokenizers": [{"type": "Metaspace"}, BYTE_LEVEL]}
                )
            },
            "the pre_tokenizer Metaspace is not supported",
        ),
        (
            {
                "tokenizer.json": tokenizer_json(
                    pre_tokenizer={"pretokenizers": [SPLIT | {"behavior": "MergedWithNext"}, BYTE_LEVEL]}
                )
            },
            "the pre_tokenizer Split is not supported",
        ),
        (
            {
                "tokenizer.json": tokenizer_json(
                    normalizer={"normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
                )
            },
            "the normalizer NFC, Lowercase is not supported",
        ),
    ],
)
def test_bad_files_end_in_one_line(tmp_path, capfd, files, message):
    for name, contents in files.items():
        contents = contents if isinstance(contents, str) else json.dumps(contents)
        (tmp_path / name).write_text(contents, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value) and not any(capfd.readouterr())


def test_truncated_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((folder_of(LLAMA2) / "tokenizer.model").read_bytes()[:200_000])
    with pytest.raises(UserError, match=MODEL):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------------------------------------------- kernels
# In triton's interpreter on the CPU (fp32 and fp16: tl.dot on bf16 is wrong there), in fp16 and bf16 on CUDA.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
NAN = float("nan")


def close(out, truth, dtype):
    """Scale-free error: rms of the difference over rms of the truth; NaN never passes."""
    error = ((out.float() - truth).square().mean() / truth.square().mean()).sqrt().item()
    assert error < TOLERANCE[dtype], error


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def positions(*pos):
    return torch.tensor(pos, dtype=torch.int32, device=DEVICE)


def tables(S, D):
    angles = torch.outer(torch.arange(S).float(), 10000 ** -(torch.arange(0, D, 2) / D)).to(DEVICE)
    return angles.cos(), angles.sin()


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What the wrappers allocate is NaN (or -7), so that a forgotten element is seen; beyond its
    end lies a strip that must stay as it was."""
    strips, empty = [], torch.empty

    def poisoned(*sizes, dtype, device):
        poison = NAN if dtype.is_floating_point else -7
        count = torch.Size(sizes).numel()
        memory = empty(count + 4096, dtype=dtype, device=device).fill_(poison)
        strips.append(memory[count:])
        return memory[:count].view(sizes)

    monkeypatch.setattr(kernels.torch, "empty", poisoned)
    monkeypatch.setattr(
        kernels.torch, "empty_like", lambda x: poisoned(*x.shape, dtype=x.dtype, device=x.device)
    )
    yield
    for strip in strips:
        assert (strip.isnan() if strip.dtype.is_floating_point else strip == -7).all(), "written past the end"


poisoned = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, S, heads, r_score, r",
    [(1, 70, 1, 5, 9), (3, 130, 1, 64, 128), (3, 300, 3, 33, 40), (1, 129, 8, 64, 64), (3, 97, 32, 520, 530)],
)
@pytest.mark.parametrize("rule", ["sum", "softmax"])
@poisoned
def test_kernel_latent_scores(dtype, B, S, heads, r_score, r, rule):
    heads = 1 if rule == "sum" else heads
    queries, latent = randn(B, heads, r_score, dtype=dtype), randn(B, S, r, dtype=dtype)
    pos = positions(*[S - 1, S // 2, 0][:B])
    live = torch.arange(S, device=DEVICE) <= pos[:, None]
    truth = sals_scores(queries.float(), latent[..., :r_score].float(), live, rule, 16)
    latent[~live] = NAN
    out = kernels.latent_scores(queries, latent, pos, 16**-0.5, rule)
    assert (out[~live] == -torch.inf).all()
    close(out[live], truth[live], dtype)


@poisoned
def test_kernel_softmax_scores_of_several_tiles_a_program(monkeypatch):
    monkeypatch.setattr(kernels, "scores_config", lambda *_: (16, 32, 4, 2, 6))
    queries, latent = 3 * randn(3, 4, 32, dtype=torch.float16), randn(3, 300, 40, dtype=torch.float16)
    pos = positions(299, 100, 17)
    live = torch.arange(300, device=DEVICE) <= pos[:, None]
    truth = sals_scores(queries.float(), latent[..., :32].float(), live, "softmax", 16)
    out = kernels.latent_scores(queries, latent, pos, 16**-0.5, "softmax")
    close(out[live], truth[live], torch.float16)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "heavy", "offset", "one chunk"])
@pytest.mark.parametrize(
    "S, x, y, z, pos",
    [
        (257, 4, 33, 8, (256, 100, 17)),
        (300, 0, 1, 1, (299, 1, 0)),
        (4096, 16, 432, 64, (4095, 300)),
        (40, 3, 64, 5, (39, 20)),
        (5000, 4, 600, 16, (4999, 700)),
        (5000, 4, 4000, 16, (4999,)),
        (8193, 4, 256, 16, (8192, 5000, 7)),
        (10000, 4, 7000, 8, (9999,)),
    ],
)
@poisoned
def test_kernel_select(kind, S, x, y, z, pos):
    pos = positions(*pos)
    B = len(pos)
    scores = randn(B, S)
    places = torch.arange(S, device=DEVICE)
    if kind == "ties":
        scores = (scores * 2).round()
    elif kind == "equal":
        scores = torch.ones_like(scores)
    elif kind == "heavy":
        scores = (scores * 8).exp()
    elif kind == "offset":
        scores = scores + 500
    elif (
        kind == "one chunk"
    ):  # all winners fall into one chunk of the first kernel: the slow path must save it
        scores = scores + 50 * ((places // 4) % 8 == 0)
    live = places <= pos[:, None]
    out = kernels.select(scores.masked_fill(~live, NAN), pos, x, y, z)
    index, counts = sals_select(scores.masked_fill(~live, 0), pos, x, y, z)
    for b in range(B):
        got, want = out[b][out[b] >= 0].long(), index[b][counts[b]]
        assert (out[b] >= -1).all() and len(got) == len(got.unique()) == len(want)
        assert (got <= pos[b] - z).all()
        assert torch.equal(scores[b, got].sort().values, scores[b, want].sort().values)
    again = kernels.select(scores.masked_fill(~live, NAN), pos, x, y, z)
    assert torch.equal(out, again)


def sals_truth(q, index, live, latent, basis, v, ring_k, ring_v, pos, cos, sin):
    """fp32, row by row; v [B, S, Hkv, D] decoded; index and live [B, n]."""
    B, Hq, D = q.shape
    Hkv, z = ring_k.shape[2], ring_k.shape[1]
    rows = []
    for b in range(B):
        chosen = index[b][live[b]].long()
        k = (latent[b, chosen].float() @ basis.float().T).unflatten(-1, (Hkv, D))
        k = apply_rope(k, cos[chosen], sin[chosen])
        recent = torch.arange(max(0, int(pos[b]) - z + 1), int(pos[b]) + 1, device=q.device) % z
        k = torch.cat((k, ring_k[b, recent].float())).repeat_interleave(Hq // Hkv, 1)
        values = torch.cat((v[b, chosen].float(), ring_v[b, recent].float())).repeat_interleave(Hq // Hkv, 1)
        weight = (torch.einsum("hd,nhd->hn", q[b].float(), k) * D**-0.5).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weight, values))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, S, Hkv, G, D, r, bits, n, z, pos",
    [
        (1, 100, 2, 1, 64, 32, 4, 40, 8, (99,)),
        (3, 150, 2, 1, 128, 37, 2, 70, 16, (149, 60, 3)),
        (3, 150, 1, 4, 128, 48, 4, 70, 16, (149, 60, 3)),
        (1, 90, 2, 8, 64, 64, 2, 33, 7, (80,)),
        (3, 90, 2, 1, 96, 40, 4, 33, 7, (80, 40, 0)),
        (3, 90, 1, 4, 96, 17, 2, 33, 7, (80, 40, 0)),
        (1, 90, 3, 1, 64, 24, 8, 33, 7, (80,)),
        (1, 90, 2, 4, 96, 24, 8, 33, 7, (80,)),
        (3, 90, 2, 1, 128, 24, 16, 33, 70, (80, 40, 0)),
        (1, 90, 1, 8, 64, 24, 16, 33, 7, (80,)),
        (3, 200, 2, 1, 64, 32, 4, None, 8, (199, 60, 3)),
        (3, 200, 1, 4, 128, 32, 2, None, 8, (199, 60, 7)),
    ],
)
@poisoned
def test_kernel_sals_attend(dtype, B, S, Hkv, G, D, r, bits, n, z, pos):
    check_sals_attend(dtype, B, S, Hkv, G, D, r, bits, n, z, pos)


def check_sals_attend(dtype, B, S, Hkv, G, D, r, bits, n, z, pos):
    pos = positions(*pos)
    group = min(32, D)
    q, latent = randn(B, Hkv * G, D, dtype=dtype), randn(B, S, r, dtype=dtype)
    basis = randn(Hkv * D, r, dtype=dtype) * r**-0.5
    v = randn(B, S, Hkv, D, seed=1, dtype=dtype)
    ring_k, ring_v = randn(B, z, Hkv, D, seed=2, dtype=dtype), randn(B, z, Hkv, D, seed=3, dtype=dtype)
    cos, sin = tables(S, D)
    live_tokens = torch.arange(S, device=DEVICE) <= pos[:, None]
    values, low_scale, decoded = v, None, v
    if bits < 16:
        values, low_scale = quantize(v, bits, group)
        decoded = dequantize(values, low_scale, bits, group, torch.float32)
        low_scale[~live_tokens] = NAN
    else:
        values = v.clone()
        values[~live_tokens] = NAN
    if n is None:
        index = torch.arange(S, device=DEVICE).expand(B, -1)
        live = index <= pos[:, None] - z
        given = None
    else:
        given = torch.stack(
            [torch.randperm(S, generator=torch.Generator().manual_seed(b)) for b in range(B)]
        )[:, :n]
        given = given.to(DEVICE, torch.int32)
        given[given > pos[:, None] - z] = -1
        index, live = given, given >= 0
    truth = sals_truth(q, index, live, latent, basis, decoded, ring_k, ring_v, pos, cos, sin)
    latent = latent.masked_fill(~live_tokens[..., None], NAN)
    empty = torch.arange(z, device=DEVICE) > pos[:, None]
    ring_k[empty], ring_v[empty] = NAN, NAN
    paired = kernels.interleave_rope(basis, Hkv)
    out = kernels.sals_attend(
        q, given, latent, paired, values, low_scale, ring_k, ring_v, pos, cos, sin, bits
    )
    close(out, truth, dtype)


# (tokens a tile, heads a tile, ranks a step, warps, stages, programs): tiles that span one, two and several
# rows, programs that stop in the middle of a tile; then (tokens a tile, warps, stages, splits): one and
# several splits.
@pytest.mark.parametrize("G, D", [(1, 64), (4, 96)])
@pytest.mark.parametrize("n", [128, 33, None])
@pytest.mark.parametrize(
    "logits, values",
    [
        ((128, 2, 32, 8, 3, 3), (32, 2, 4, 1)),
        ((64, 2, 16, 4, 3, 5), (64, 4, 3, 2)),
        ((64, 1, 32, 4, 3, 100), (16, 4, 2, 5)),
    ],
)
@poisoned
def test_kernel_sals_attend_tiles(monkeypatch, G, D, n, logits, values):
    monkeypatch.setattr(kernels, "logits_config", lambda *_: logits)
    monkeypatch.setattr(kernels, "values_config", lambda *_: values)
    check_sals_attend(torch.float16, 3, 200, 4, G, D, 64, 4, n, 24, (199, 120, 30))


@pytest.mark.skipif(DEVICE == "cpu", reason="the sizes of real models")
@pytest.mark.parametrize(
    "B, S, Hkv, G, r, bits, n",
    [(16, 1000, 32, 1, 512, 2, 448), (8, 3000, 8, 4, 256, 4, 1984), (1, 3000, 8, 4, 256, 4, None)],
)
@poisoned
def test_kernel_sals_attend_real_sizes(B, S, Hkv, G, r, bits, n):
    check_sals_attend(torch.bfloat16, B, S, Hkv, G, 128, r, bits, n, 64, [S - 1 - 7 * b for b in range(B)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, S, Hkv, G, D, pos",
    [
        (1, 70, 2, 1, 64, (69,)),
        (3, 130, 2, 4, 128, (129, 64, 0)),
        (3, 90, 1, 8, 96, (88, 31, 32)),
        (3, 300, 1, 1, 128, (299, 5, 0)),
        (1, 200, 3, 1, 96, (150,)),
    ],
)
@poisoned
def test_kernel_dense_attend(dtype, B, S, Hkv, G, D, pos):
    pos = positions(*pos)
    q = randn(B, Hkv * G, D, dtype=dtype)
    k, v = randn(B, Hkv, S, D, seed=1, dtype=dtype), randn(B, Hkv, S, D, seed=2, dtype=dtype)
    truth = []
    for b in range(B):
        keys, values = (t[b, :, : pos[b] + 1].float().repeat_interleave(G, 0) for t in (k, v))
        weight = (torch.einsum("hd,hnd->hn", q[b].float(), keys) * D**-0.5).softmax(-1)
        truth.append(torch.einsum("hn,hnd->hd", weight, values))
        k[b, :, pos[b] + 1 :], v[b, :, pos[b] + 1 :] = NAN, NAN
    close(kernels.dense_attend(q, k, v, pos), torch.stack(truth), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("Hkv, D, r", [(2, 64, 33), (3, 96, 20), (1, 128, 64), (5, 16, 3)])
@poisoned
def test_kernel_sals_append(dtype, bits, Hkv, D, r):
    B, S, z, group = 3, 20, 8, min(32, D)
    pos = positions(19, 8, 0)
    rows = torch.arange(B, device=DEVICE)
    G = 3 if Hkv == 1 else 2
    qkv = randn(B, (G + 2) * Hkv * D + r, dtype=dtype)  # rows as wqkv gives them: apart
    q, k, v, new = qkv.split([G * Hkv * D, Hkv * D, Hkv * D, r], 1)
    q, k, v = (t.unflatten(1, (-1, D)) for t in (q, k, v))
    v[0, 0] = 1.5  # a constant group has scale 0
    cos, sin = tables(S, D)
    latent, ring_k, ring_v = (
        randn(B, S, r, dtype=dtype),
        randn(B, z, Hkv, D, dtype=dtype),
        randn(B, z, Hkv, D, dtype=dtype),
    )
    values, low_scale = randn(B, S, Hkv, D, dtype=dtype), None
    if bits < 16:
        values, low_scale = quantize(values, bits, group)
    stores = [latent, values, low_scale, ring_k, ring_v]
    truth = [None if s is None else s.clone() for s in stores]
    truth[0][rows, pos.long()] = new
    truth[3][rows, pos.long() % z] = apply_rope(
        k[:, None], cos[pos.long()][:, None], sin[pos.long()][:, None]
    )[:, 0]
    truth[4][rows, pos.long() % z] = v
    if bits < 16:
        truth[1][rows, pos.long()], truth[2][rows, pos.long()] = quantize(v, bits, group)
    else:
        truth[1][rows, pos.long()] = v
    rotated = kernels.sals_append(new, q, k, v, pos, cos, sin, *stores, bits)
    close(rotated, apply_rope(q.float(), cos[pos.long()], sin[pos.long()]), dtype)
    for i, (got, want) in enumerate(zip(stores, truth)):
        if i == 3:
            close(got, want.float(), dtype)
        elif got is not None:
            assert torch.equal(got, want), i


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
@poisoned
def test_kernel_graph_follows_pos():
    """One capture is right for every length: replayed at other positions it equals eager, bit for bit."""
    B, S, Hkv, G, D, r, z = 3, 3000, 4, 2, 64, 64, 16
    bf16 = torch.bfloat16
    q, k, v = (randn(B, h, D, seed=i, dtype=bf16) for i, h in enumerate((Hkv * G, Hkv, Hkv)))
    dense_k, dense_v = randn(B, Hkv, S, D, dtype=bf16), randn(B, Hkv, S, D, seed=1, dtype=bf16)
    values, low_scale = quantize(randn(B, S, Hkv, D, dtype=bf16), 4, 32)
    latent, basis = randn(B, S, r, dtype=bf16), kernels.interleave_rope(randn(Hkv * D, r, dtype=bf16), Hkv)
    ring_k, ring_v = randn(B, z, Hkv, D, dtype=bf16), randn(B, z, Hkv, D, seed=1, dtype=bf16)
    queries, new = randn(B, Hkv * G, 32, dtype=bf16), randn(B, r, dtype=bf16)
    cos, sin = tables(S, D)
    pos = positions(2000, 500, 5)

    def step():
        rotated = kernels.sals_append(
            new, q, k, v, pos, cos, sin, latent, values, low_scale, ring_k, ring_v, 4
        )
        index = kernels.select(
            kernels.latent_scores(queries, latent, pos, D**-0.5, "softmax"), pos, 4, 100, z
        )
        stores = (latent, basis, values, low_scale, ring_k, ring_v, pos, cos, sin, 4)
        sparse, full = (kernels.sals_attend(rotated, i, *stores) for i in (index, None))
        return index, sparse, full, kernels.dense_attend(q, dense_k, dense_v, pos)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new_pos in ((5, 119, 120), (121, 2999, 0), (2048, 15, 16)):
        pos.copy_(positions(*new_pos))
        graph.replay()
        replayed = [x.clone() for x in captured]
        for got, want in zip(replayed, step()):
            assert torch.equal(got, want)


OLD = {"window": "half"}  # no kernel for it: such a cache decodes in PyTorch


@pytest.mark.parametrize(
    "method,options,group",
    [("dense", {}, 4), ("sals", SPARSE, 2), ("sals", SPARSE | {"score": "sum", "bits": 16, "rank": 0.3}, 1)]
    + [("sals", SPARSE | {"fold": False, "skip_as": "dense"}, 8), ("sals", SPARSE | OLD, 2)],
)
def test_decode_with_kernels_equals_decode_without(method, options, group):
    """The same tokens and logits, ragged rows, on both sides of the budget's edge at 32 tokens."""
    results = []
    for kernels_ in (False, True):
        model = tiny_model(group=group).to(DEVICE)
        room = Room(model, 2, 64, kernels_)
        caches = METHODS[method].build(
            model, settings_from(method, options), room, artifact_of(method, model)
        )
        assert method == "dense" or caches[2].fused == (kernels_ and options.get("window") != "half")
        engine = Engine(model, caches, room, Sampling())
        engine.prefill([random_ids(n, n) for n in (5, 31)])
        results.append((decode_rows(engine, 4, lambda ids: False).token_ids, engine.logits.cpu()))
    assert results[0][0] == results[1][0]
    assert error(results[1][1], results[0][1]) < 1e-5


def test_head_dims_below_a_tensor_core_tile_run_in_pytorch():
    model = tiny_model(head_dim=8).to(DEVICE)
    assert Room(model, 1, 20).kernels is None
    with pytest.raises(UserError, match="--no-kernels"):
        Room(model, 1, 20, True)


@poisoned
def test_kernel_bad_input():
    pos, scores = positions(9), randn(1, 10)
    with pytest.raises(ValueError, match="fp32"):
        kernels.select(scores.double(), pos, 1, 2, 3)
    with pytest.raises(ValueError, match="int32"):
        kernels.select(scores, pos.long(), 1, 2, 3)
    with pytest.raises(ValueError, match="at least 1"):
        kernels.select(scores, pos, 1, 0, 3)
    with pytest.raises(ValueError, match="rule"):
        kernels.latent_scores(randn(1, 1, 4), randn(1, 10, 4), pos, 1.0, "max")
    with pytest.raises(ValueError, match="contiguous"):
        kernels.latent_scores(randn(1, 1, 4), randn(1, 10, 8)[..., :4], pos)


# ----------------------------------------------------------------------------------------------- golden texts


@needs_real
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("method,options", [("dense", []), ("sals", FULL)])
def test_stories260k_gives_its_golden_text(method, options, device):
    golden = json.loads((REAL / "stories260k" / "golden.json").read_text())
    model, tokenizer = (
        load_model(REAL / "stories260k", torch.device(device), torch.float32),
        load_tokenizer(REAL / "stories260k"),
    )
    prompt = tokenizer.encode(golden["prompt"])
    assert prompt == golden["prompt_ids"]
    engine = make_engine(model, method, 1, 256, **dict(options))
    engine.prefill([prompt])
    new = len(golden["greedy_ids"]) - len(prompt)
    ids = prompt + decode_rows(engine, new, lambda ids: False).token_ids[0]
    assert ids == golden["greedy_ids"]
    assert tokenizer.decode(ids) == golden["greedy_text"]


@pytest.fixture(scope="module")
def nano_haystack():
    tokenizer = load_tokenizer(NANO)
    text = "\n".join(p.read_text() for p in sorted(ROOT.glob("*.py"))[:3])
    return Haystack(tokenizer, [np.array(tokenizer.encode(text))])


@pytest.mark.parametrize(
    "method,options", [("dense", {}), ("sals", {}), ("sals", {"rank": 0.125, "bits": 2})]
)
def test_nano_retrieves_through_the_cache(method, options, nano_haystack):
    model = load_model(NANO, CPU, torch.float32)
    artifact = load_artifact(NANO, method, model) if METHODS[method].fitted else {}
    room = Room(model, 4, 1600)
    engine = Engine(
        model,
        METHODS[method].build(model, settings_from(method, options), room, artifact),
        room,
        Sampling(),
    )
    scores = calibrate.eval_retrieval(
        engine, nano_haystack, "single", [0, 1, 2, 3], 1500, 16, [0.1, 0.3, 0.6, 0.9]
    )
    assert sum(scores) >= 3
    if method == "dense":
        assert (
            sum(calibrate.eval_retrieval(engine, nano_haystack, "multikey", [0, 1, 2, 3], 1500, 16, [])) >= 3
        )


# ------------------------------------------------------------------------------- tasks, calibration, training


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_samples_are_exact_and_answerable(kind, nano_haystack):
    tokenizer = nano_haystack.tokenizer
    for seed in range(3):
        ids, task = eval_sample(nano_haystack, kind, seed, 900)
        assert len(ids) == 900 and ids[0] == tokenizer.bos_id
        text = tokenizer.decode(ids)
        assert all(fact in text for fact in task.facts)
        assert text.endswith(task.question)
        assert task.score(task.answer) == 1.0 and task.score("nothing") == 0.0
        assert (ids, task) == eval_sample(nano_haystack, kind, seed, 900)
        places = [text.index(fact) for fact in dict.fromkeys(task.facts)]
        assert kind == "frequent" or places == sorted(places)  # facts lie in the order that the task gives


def test_needle_depth_is_where_it_was_asked(nano_haystack):
    for depth in (0.0, 0.5, 0.99):
        ids, task = eval_sample(nano_haystack, "single", 0, 1000, depth=depth)
        text = nano_haystack.tokenizer.decode(ids)
        assert abs(text.index(task.facts[0]) / len(text) - depth) < 0.1


def test_frequent_words_are_the_most_frequent():
    for seed in range(5):
        task = make_tasks("frequent", random.Random(seed), 2000)[0]
        counts = {w: sum(w in f for f in task.facts) for w in {f.split()[-1][:-1] for f in task.facts}}
        ordered = sorted(counts, key=lambda w: -counts[w])
        assert ordered[:3] == task.references and counts[ordered[2]] > counts[ordered[3]]


def test_training_documents_have_length_weights_and_bos(nano_haystack):
    rng, answers = random.Random(0), 0
    for _ in range(40):
        ids, weights = training_document(nano_haystack, rng, 513)
        assert len(ids) == len(weights) == 513 and ids[0] == nano_haystack.tokenizer.bos_id
        answers += (weights == calibrate.ANSWER_WEIGHT).any()
    assert 10 <= answers <= 30  # about half of the documents ask something


def test_training_learns_and_resumes_where_it_stopped(nano_haystack, tmp_path):
    config = tiny_config(vocab_size=4096, tied=True)
    stages = [Stage(4, 64, 12), Stage(2, 128, 6)]

    def losses(minutes_first: float) -> tuple[dict, float]:
        state = tmp_path / f"{minutes_first}.safetensors"
        model = Llama(config)
        calibrate.initialise(model, 0)
        done = train(model, nano_haystack, stages, 5e-3, 0, 0, state, minutes_first)
        if not done:
            model = Llama(config)
            done = train(model, nano_haystack, stages, 5e-3, 0, 0, state, math.inf)
        tokens, weights = next(iter(calibrate.TrainingBatches(nano_haystack, 4, 64, 0, 1, 0)))
        with torch.no_grad():
            return load_file(state), calibrate.weighted_loss(model, tokens, weights).item()

    (whole, loss), (resumed, _) = losses(math.inf), losses(0.0)
    assert loss < math.log(4096) - 0.1
    assert whole["step"] == resumed["step"] == 18
    for name, tensor in whole.items():
        assert torch.allclose(tensor, resumed[name], atol=1e-6), name


def test_trained_tokenizer_keeps_digits_spaces_and_newlines(tmp_path):
    (tmp_path / "text").mkdir()
    for file in ("model.py", "compress.py", "calibrate.py"):
        shutil.copy(ROOT / file, tmp_path / "text")
    calibrate.train_tokenizer([tmp_path / "text"], tmp_path / "tokenizer.model", 600)
    tokenizer = load_tokenizer(tmp_path)
    text = "def f(x):\n    return x + 12345  # caf\u00e9 \u4f60"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == 600 and tokenizer.decode(ids) == text
    assert [tokenizer.pieces[i] for i in ids if tokenizer.pieces[i].isdigit()] == [
        b"1",
        b"2",
        b"3",
        b"4",
        b"5",
    ]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["text", "tokenizer.model"]


def test_rank_at_counts_the_leading_eigenvalues():
    values = torch.tensor([[5.0, 3.0, 1.0, 1.0], [10.0, 0.0, 0.0, 0.0]])
    assert rank_at(values, 0.5).tolist() == [1, 1] and rank_at(values, 0.8).tolist() == [2, 1]
    assert rank_at(values, 0.9).tolist() == [3, 1] and rank_at(values, 1.0).tolist() == [4, 1]


def test_overlap_of_everything_is_one_and_of_more_is_more():
    model = tiny_model()
    prompts = [random_ids(60), random_ids(60, 1)]
    last = None
    for critical in (4, 20, 60):
        settings = SalsSettings(rank=1.0, score_rank=1.0, sinks=2, critical=critical, recent=4)
        score = calibrate.overlap_scores(model, bases(model), settings, prompts)
        assert last is None or (score >= last - 1e-6).all()
        last = score
    assert torch.allclose(last, torch.ones(4), atol=1e-5)


def test_an_interrupted_artifact_leaves_nothing(tmp_path, monkeypatch):
    def broken(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        save_artifact({"a": torch.zeros(2)}, tmp_path / "sals.safetensors", {})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- the command line


def run_main(main, argv: list[str], monkeypatch, capsys) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, argv)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def tiny_checkpoint(folder: Path, **changes) -> Path:
    """A folder with a random model that nano's tokenizer fits, calibrated for SALS."""
    model = tiny_model(vocab_size=4096, tied=True, **changes)
    save_checkpoint(model, folder)
    shutil.copy(NANO / "tokenizer.model", folder)
    model = load_model(folder, CPU, torch.float32)
    for method in ("sals", "loki"):
        save_artifact(artifact_of(method, model), artifact_path(folder, method), model_identity(model))
    return folder


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def foreign_artifact(folder: Path) -> None:
    save_artifact(bases(tiny_model()), artifact_path(folder, "sals"), model_identity(tiny_model()))


DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "not a usable config"),
    "config lacks a field": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        "not a usable config",
    ),
    "architecture": (lambda f: edit_json(f / "config.json", model_type="gpt2"), "'gpt2' is not supported"),
    "RoPE type": (
        lambda f: edit_json(f / "config.json", rope_scaling={"rope_type": "longrope"}),
        "'longrope'",
    ),
    "activation": (lambda f: edit_json(f / "config.json", hidden_act="gelu"), "only silu"),
    "quantised": (lambda f: edit_json(f / "config.json", quantization_config={"bits": 4}), "quantised"),
    "shape disagrees": (
        lambda f: edit_json(f / "config.json", intermediate_size=63),
        "do not belong together",
    ),
    "layers disagree": (lambda f: edit_json(f / "config.json", num_hidden_layers=9), "tensors are missing"),
    "fewer layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=2), "do not belong together"),
    "heads disagree": (lambda f: edit_json(f / "config.json", num_key_value_heads=3), "cannot share"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "truncated weights": (lambda f: truncate(f / "model.safetensors"), "download it again"),
    "missing tensor": (drop_tensor, "tensors are missing, the first is model.layers.1.mlp.up_proj.weight"),
    "missing shard": (lose_a_shard, "shard"),
    "no tokenizer": (lambda f: (f / "tokenizer.model").unlink(), "no tokenizer.model"),
    "damaged tokenizer": (
        lambda f: (f / "tokenizer.model").write_bytes(b"nonsense"),
        "not a valid tokenizer",
    ),
    "no artifact": (lambda f: artifact_path(f, "sals").unlink(), "calibrate.py fit"),
    "truncated artifact": (lambda f: truncate(artifact_path(f, "sals")), "make it again"),
    "artifact of another model": (foreign_artifact, "fitted to another model"),
    "sliding window": (
        lambda f: edit_json(f / "config.json", model_type="mistral", sliding_window=8),
        "sliding window",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_end_in_one_line(damage, tmp_path, monkeypatch, capsys):
    folder = tiny_checkpoint(tmp_path)
    argv = ["--checkpoint", folder, "--method", "sals", "--prompt", "hello there", "--max_new_tokens", 20]
    code, out, _ = run_main(generate.main, argv, monkeypatch, capsys)
    assert code == 0 and out
    spoil, message = DAMAGE[damage]
    spoil(folder)
    before = sorted(folder.iterdir())
    code, out, err = run_main(generate.main, argv, monkeypatch, capsys)
    assert code == 2 and out == "" and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


BAD_OPTIONS = {
    "unknown method": (
        ["--method", "magic"],
        "unknown method 'magic'; the methods are: dense, sals, loki, streaming",
    ),
    "setting of another method": (["--rank", "0.5"], "--rank"),
    "bad choice": (["--method", "sals", "--bits", "3"], "--bits"),
    "empty prompt": (["--prompt", ""], "empty"),
    "empty number": (["--prompt", "0"], "empty"),
    "no such file": (["--prompt", "@nowhere.txt"], "no such file"),
    "prompt too long": (["--prompt", "600"], "more than the model's 512"),
    "cache too small": (["--prompt", "60", "--context", "40"], "raise --context"),
    "no such folder": (["--checkpoint", "nowhere"], "no such folder"),
    "no such shape": (["--random_weights", "llama-9"], "the shapes are"),
    "no demo": ([], "no demo.txt"),
    "rank too large": (["--method", "sals", "--rank", "1.5", "--prompt", "5"], "1 to 64"),
    "rank beyond the artifact": (["--method", "sals", "--rank", "0.9", "--prompt", "5"], "--max_rank"),
    "no tokens": (["--method", "loki", "--k", "0", "--prompt", "5"], "--k must be above 0"),
    "no components": (["--method", "loki", "--d", "1.5", "--prompt", "5"], "--d in (0, 1]"),
    "no recent tokens": (["--method", "sals", "--recent", "0", "--prompt", "5"], "recent >= 1"),
    "bad layer list": (["--method", "sals", "--skip", "first", "--prompt", "5"], "layer numbers"),
    "bad sampling": (["--top_p", "0", "--prompt", "5"], "--top_p"),
    "batch smaller than prompts": (
        ["--prompt", "5", "--prompt", "6", "--batch_size", "1"],
        "less than the 2 prompts",
    ),
    "no device": (["--device", "abacus", "--prompt", "5"], "not a device"),
    "no chat template": (["--chat", "--prompt", "hi"], "chat style"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    model = load_model(folder, CPU, torch.float32)
    half = {name: basis[:, :32].contiguous() for name, basis in bases(model).items()}
    save_artifact(half, artifact_path(folder, "sals"), model_identity(model))
    return folder


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_end_in_one_line(case, checkpoint, monkeypatch, capsys):
    options, message = BAD_OPTIONS[case]
    options = options if "--checkpoint" in options else ["--checkpoint", checkpoint, *options]
    code, out, err = run_main(generate.main, options, monkeypatch, capsys)
    assert code == 2 and out == "" and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_but_absent(checkpoint, monkeypatch, capsys):
    code, _, err = run_main(
        generate.main, ["--checkpoint", checkpoint, "--device", "cuda"], monkeypatch, capsys
    )
    assert code == 2 and "--device cpu" in err


def test_a_token_id_outside_the_model_is_refused(checkpoint, tmp_path, monkeypatch, capsys):
    folder = tiny_checkpoint(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "small", dirs_exist_ok=True)
    save_checkpoint(
        tiny_model(vocab_size=100), tmp_path / "small"
    )  # fewer embeddings than nano's tokenizer has ids
    argv = ["--checkpoint", tmp_path / "small", "--prompt", "hello"]
    code, _, err = run_main(generate.main, argv, monkeypatch, capsys)
    assert code == 2 and "outside the model's vocabulary of 100" in err, folder


def test_too_little_memory_says_what_would_fit(checkpoint, monkeypatch, capsys):
    model = load_model(checkpoint, CPU, torch.float32)
    one_row = sum(cache.formula() for cache in make_engine(model, "dense", 1, 60).caches)
    monkeypatch.setattr(generate, "free_memory", lambda device: int(2.5 * one_row))
    argv = [
        "--checkpoint",
        checkpoint,
        "--prompt",
        "50",
        "--max_new_tokens",
        "10",
        "--ignore_eos",
        "--batch_size",
    ]
    assert run_main(generate.main, [*argv, 2], monkeypatch, capsys)[0] == 0
    code, out, err = run_main(generate.main, [*argv, 4], monkeypatch, capsys)
    assert code == 2 and out == "" and "2 rows, or 37 tokens a row, would fit" in err


def test_a_budget_beyond_the_context_says_so_and_equals_dense(tmp_path, monkeypatch, capsys):
    folder = tiny_checkpoint(tmp_path)
    texts = []
    for argv in (
        ["--method", "dense"],
        ["--method", "sals", "--rank", "1", "--score_rank", "1", "--bits", "16"],
    ):
        argv += ["--checkpoint", folder, "--prompt", "40", "--max_new_tokens", "10"]
        code, out, err = run_main(generate.main, argv, monkeypatch, capsys)
        texts.append(out)
        assert code == 0 and ("every token is attended" in err) == ("sals" in argv)
    assert texts[0] == texts[1]


def test_json_is_the_last_line_and_complete(checkpoint, monkeypatch, capsys):
    argv = [
        "--checkpoint",
        checkpoint,
        "--method",
        "sals",
        "--rank",
        "0.25",
        "--prompt",
        "30",
        "--prompt",
        "7",
        "--batch_size",
        "3",
        "--max_new_tokens",
        "9",
        "--recent",
        "4",
        "--json",
        "--ignore_eos",
    ]
    code, out, _ = run_main(generate.main, argv, monkeypatch, capsys)
    report = json.loads(out.splitlines()[-1])
    assert code == 0
    assert report["prompt_tokens"] == [30, 7, 30] and report["new_tokens"] == [9, 9, 9]
    assert [len(ids) for ids in report["token_ids"]] == [9, 9, 9] and report["token_ids"][0] != report[
        "token_ids"
    ][1]
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"] < report["cache_bytes_dense"]
    assert report["settings"]["rank"] == 0.25 and report["seed"] == 0
    keys = (
        "method settings model device dtype prompt_tokens new_tokens token_ids text prefill_s first_token_s "
        "decode_tokens_per_s cache_bytes_measured cache_bytes_formula cache_bytes_dense bytes_read_per_step "
        "bandwidth_share peak_memory_bytes capture_s seed versions"
    )
    assert set(keys.split()) <= set(report)


def test_prompts_from_text_file_and_stdin_agree(checkpoint, tmp_path, monkeypatch, capsys):
    import io

    (tmp_path / "prompt.txt").write_text("some words\nand more")
    outputs = set()
    for prompt in ("some words\nand more", f"@{tmp_path / 'prompt.txt'}", "-"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("some words\nand more"))
        argv = ["--checkpoint", checkpoint, "--prompt", prompt, "--max_new_tokens", "12"]
        outputs.add(run_main(generate.main, argv, monkeypatch, capsys)[:2])
    assert len(outputs) == 1 and outputs.pop()[0] == 0


def test_help_names_every_setting_with_the_papers_symbol(monkeypatch, capsys):
    code, out, _ = run_main(generate.main, ["--method", "sals", "--help"], monkeypatch, capsys)
    assert code == 0
    for f in dataclasses.fields(SalsSettings):
        assert f"--{f.name}" in out
    assert "d_r" in out and "r*/r" in out and "x:" in out


def test_interactive_turns_equal_one_prompt_of_the_same_tokens(checkpoint, monkeypatch, capsys):
    """Two turns through the cache give what one prefill of all their tokens gives."""
    import io

    seen = []
    original = generate.decode_rows

    def spy(engine, *args, **kwargs):
        seen.append(engine.logits.clone())
        return original(engine, *args, **kwargs)

    monkeypatch.setattr(generate, "decode_rows", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nhow are you\n"))
    argv = ["--checkpoint", checkpoint, "--interactive", "--max_new_tokens", "12", "--context", "80"]
    assert run_main(generate.main, argv, monkeypatch, capsys)[0] == 0
    model, tokenizer = load_model(checkpoint, CPU, torch.float32), load_tokenizer(checkpoint)
    engine = make_engine(model, "dense", 1, 80)
    ids = tokenizer.encode("hello")
    engine.prefill([ids])
    output = original(engine, 12, lambda recent: recent[-1] in tokenizer.stop_ids)
    ids += output.token_ids[0] + ([] if output.stop_token is None else [output.stop_token])
    engine.prefill([ids + tokenizer.encode_continuation("\nhow are you")])
    assert error(seen[1], engine.logits) < 1e-5


def test_interactive_keeps_the_conversation(checkpoint, monkeypatch, capsys):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nhow are you\n"))
    argv = ["--checkpoint", checkpoint, "--interactive", "--max_new_tokens", "5", "--context", "64"]
    code, out, _ = run_main(generate.main, argv, monkeypatch, capsys)
    assert code == 0 and out.count("> ") == 3


def test_fit_writes_an_artifact_that_generate_takes(tmp_path, monkeypatch, capsys):
    folder = tiny_checkpoint(tmp_path)
    artifact_path(folder, "sals").unlink()
    argv = ["fit", "--checkpoint", folder, "--method", "all", "--windows", "4", "--window", "64"]
    code, out, _ = run_main(calibrate.main, argv, monkeypatch, capsys)
    assert code == 0 and "energy kept" in out
    model = load_model(folder, CPU, torch.float32)
    tensors = load_artifact(folder, "sals", model)
    assert tensors["0.basis"].shape == (64, 32) and tensors["eigenvalues"].shape == (4, 64)
    argv = ["--checkpoint", folder, "--method", "sals", "--prompt", "hello", "--max_new_tokens", "3"]
    assert run_main(generate.main, argv, monkeypatch, capsys)[0] == 0


def test_eval_prints_dense_first_and_json(checkpoint, tmp_path, monkeypatch, capsys):
    argv = [
        "eval",
        "--checkpoint",
        checkpoint,
        "--method",
        "sals:rank=0.25,bits=2",
        "--samples",
        "2",
        "--rows",
        "2",
        "--lengths",
        "200",
        "--perplexity_rows",
        "2",
        "--prefix",
        "40",
        "--continuation",
        "8",
        "--json",
        "--csv",
        tmp_path / "table.csv",
        "--tasks",
        "single",
        "multikey",
        "--facts",
        "4",
    ]
    code, out, _ = run_main(calibrate.main, argv, monkeypatch, capsys)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert code == 0 and [row["method"] for row in rows] == ["dense", "sals:rank=0.25,bits=2"]
    assert rows[0]["kl python"] == 0 < rows[1]["kl python"]
    assert rows[1]["bytes/token"] < rows[0]["bytes/token"]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 3
    assert len(rows[0]["depth 200"]) == 2  # two samples fill two of the five fifths


def test_perplexity_through_the_cache_equals_a_full_forward(checkpoint):
    model = load_model(checkpoint, CPU, torch.float32)
    tokens = torch.randint(3, 4096, (2, 50))
    engine = make_engine(model, "dense", 2, 50)
    bar = generate.Progress("test", 10)
    ppl, _, _ = calibrate.eval_perplexity(engine, tokens, 40, None, bar)
    log_p = model.output(model(tokens[:, :-1]))[:, 39:].log_softmax(-1)
    reference = (-log_p.gather(-1, tokens[:, 40:, None]).mean()).exp()
    assert abs(ppl / reference - 1) < 1e-4


def test_calibrate_errors_are_one_line(checkpoint, tmp_path, monkeypatch, capsys):
    cases = [
        (
            ["fit", "--checkpoint", checkpoint, "--method", "sals", "--text", tmp_path / "none"],
            "no text there",
        ),
        (["eval", "--checkpoint", checkpoint, "--method", "sals:rank=x"], "rank must be a float"),
        (["eval", "--checkpoint", checkpoint, "--method", "magic"], "the methods are"),
        (
            ["eval", "--checkpoint", checkpoint, "--method", "sals:depth=3"],
            "--depth is not a setting of sals",
        ),
        (["train", "--out", checkpoint, "--text", checkpoint, "--stages", "8x8"], "BATCHxLENGTHxSTEPS"),
        (["fly"], "invalid choice"),
        (["overlap", "--checkpoint", checkpoint, "--method", "dense"], "the overlap is that of sals"),
    ]
    for argv, message in cases:
        code, _, err = run_main(calibrate.main, argv, monkeypatch, capsys)
        assert code == 2 and message in err and err.count("\n") == 1, argv


def test_nothing_imports_triton_or_transformers_at_start():
    code = "import generate, calibrate, sys; assert not {'triton', 'transformers'} & set(sys.modules)"
    if "triton" in torch.__dict__.get("__all__", []):
        pytest.skip("this torch imports triton by itself")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_the_readmes_first_command_prints_what_the_readme_shows():
    readme = (ROOT / "README.md").read_text()
    assert "python generate.py --method sals" in readme
    run = subprocess.run(
        [sys.executable, "generate.py", "--method", "sals"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shown = readme.split("```\nQuestion:")[1].split("```")[0]
    assert "Question:" + shown in run.stdout
