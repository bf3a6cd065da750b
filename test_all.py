"""All tests. Run with: pytest -q test_all.py

They assert mathematics and behaviour on the CPU in minutes. Tests that need a GPU or ../shared (real checkpoints and
tokenizers) skip where there is none. Errors are scale-free: rms of the difference over rms of the reference.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import calibrate
import generate
from calibrate import (
    KINDS, Haystack, Stage, eigen, eval_sample, fit_sals, key_covariance, make_tasks, rank_at, save_artifact,
    save_checkpoint, train, training_document, windows,
)
from compress import (
    METHODS, DenseCache, Room, SalsCache, SalsSettings, artifact_path, build_sals, dequantize, load_artifact,
    model_identity, quantize, sals_queries, sals_scores, sals_select, settings_from,
)
from generate import Engine, Sampling, decode_rows
from model import (
    SHAPES, Llama, ModelConfig, UserError, apply_rope, load_model, load_tokenizer, random_model, rope_tables,
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
    return value if value == value else float("inf")


def tiny_config(group: int = 2, head_dim: int = 16, **changes) -> ModelConfig:
    config = ModelConfig(
        dim=48, n_layers=4, n_heads=8, n_kv_heads=8 // group, head_dim=head_dim, ffn_dim=64, vocab_size=96,
        max_positions=512,
    )
    return dataclasses.replace(config, **changes)


def tiny_model(seed: int = 0, **changes) -> Llama:
    """A random model whose attention is sharp enough for its selection to matter."""
    torch.manual_seed(seed)
    model = Llama(tiny_config(**changes)).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        p.copy_(torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1) + (1.0 if p.ndim == 1 and "norm" in name else 0.0))
    model.fingerprint = f"tiny-{seed}"
    return model


def orthonormal(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q.float()


def bases(model: Llama) -> dict[str, torch.Tensor]:
    """Full-rank orthonormal bases in the place of fitted ones: at full rank any of them is exact."""
    return {f"{i}.basis": orthonormal(model.config.kv_dim, i) for i in range(model.config.n_layers)}


FULL = {"rank": 1.0, "score_rank": 1.0, "bits": 16, "sinks": 4, "critical": 400, "recent": 8}
SPARSE = {"rank": 0.5, "bits": 4, "sinks": 4, "critical": 20, "recent": 8}


def make_engine(model: Llama, method: str, rows: int, capacity: int, **options) -> Engine:
    room = Room(model, rows, capacity)
    artifact = bases(model) if METHODS[method].fitted else {}
    return Engine(model, METHODS[method].build(model, settings_from(method, options), room, artifact), room, Sampling(), False)


def logits_through(engine: Engine, prompts: list[list[int]], continuation: list[list[int]]) -> torch.Tensor:
    """Logits [1 + n, B, V] after the prompts and after each teacher-forced token (continuation: one list a row)."""
    engine.prefill(prompts)
    logits = [engine.logits]
    for tokens in zip(*continuation, strict=True):
        engine.tokens.copy_(torch.tensor(tokens))
        engine.step()
        logits.append(engine.logits)
    return torch.stack(logits)


def random_ids(n: int, seed: int = 0, vocab: int = 96) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


# ------------------------------------------------------------------------------------------- model and checkpoints


def hf_model(family: str):
    transformers = pytest.importorskip("transformers")
    shape = dict(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        vocab_size=96, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32, "rope_theta": 10000.0}
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


FAMILIES = ["llama-2", "llama-3", "llama-3.1", "llama-3.2-tied", "llama-linear", "llama-bias", "yi-yarn", "mistral",
            "qwen2", "qwen2-yarn", "qwen3", "phi3"]


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
    billions = {"llama-2-7b": 6.738, "llama-2-13b": 13.016, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554,
                "mistral-7b": 7.242, "qwen2.5-7b": 7.616}
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


# --------------------------------------------------------------------------------------------- the exactness ladder


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


@pytest.mark.parametrize("method,options", [("dense", {}), ("sals", SPARSE), ("sals", SPARSE | {"score": "sum"}),
                                            ("sals", SPARSE | {"window": "half", "fold": False})])
def test_a_row_of_a_ragged_batch_equals_the_prompt_alone(method, options):
    prompts = [random_ids(n, n) for n in (1, 47, 90)]
    more = [random_ids(15, 100 + n) for n in (1, 47, 90)]
    together = logits_through(make_engine(tiny_model(), method, 3, 110, **options), prompts, more)
    for row in range(3):
        alone = logits_through(make_engine(tiny_model(), method, 1, 110, **options), [prompts[row]], [more[row]])
        # A sum in another order may move one value across a rounding boundary of the quantiser.
        assert error(together[:, row], alone[:, 0]) < (1e-5 if method == "dense" else 1e-3)


@pytest.mark.parametrize("method,options", [("dense", {}), ("sals", FULL)])
def test_prefill_then_decode_equals_decode_all_the_way(method, options):
    ids = random_ids(70)
    late = logits_through(make_engine(tiny_model(), method, 1, 80, **options), [ids[:60]], [ids[60:]])
    early = logits_through(make_engine(tiny_model(), method, 1, 80, **options), [ids[:1]], [ids[1:]])
    assert error(late, early[-len(late):]) < 1e-5


@pytest.mark.parametrize("options", [SPARSE, SPARSE | {"bits": 2}, SPARSE | {"bits": 16}, SPARSE | {"window": "half"}])
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
    """Full rank, so that only selection differs from dense: nothing is lost up to x + y + z tokens, one token after."""
    model = tiny_model()
    budget = {"rank": 1.0, "score_rank": 1.0, "bits": 16, "sinks": 2, "critical": 20, "recent": 8, "skip": "", "keep": 0.0}
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


# ----------------------------------------------------------------------------------------------------- the ledger


@pytest.mark.parametrize("options", [{}, {"rank": 0.125, "bits": 2}, {"window": "half"}, {"skip_as": "dense"},
                                     {"bits": 16, "keep": 0.25}, {"skip": ""}])
@pytest.mark.parametrize("group", [1, 4])
def test_measured_bytes_equal_the_formula(options, group):
    model = tiny_model(group=group, head_dim=32)
    for method, chosen in (("dense", {}), ("sals", options)):
        engine = make_engine(model, method, 3, 200, **chosen)
        for cache in engine.caches:
            assert cache.measured() == cache.formula() == sum(b.nbytes for b in cache.buffers())


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


# --------------------------------------------------------------------------------------------------- quantisation


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


# ------------------------------------------------------------------------------------------------ SALS invariants


def test_sals_fit_is_orthonormal_optimal_and_joint_beats_per_head():
    model = tiny_model(group=2)
    tokens = torch.randint(0, 96, (6, 64), generator=torch.Generator().manual_seed(0))
    tensors, _ = fit_sals(model, tokens, 1.0)
    covariance = key_covariance(model, tokens, "test")["pre"]
    for i in range(4):
        basis, values = tensors[f"{i}.basis"].double(), tensors["eigenvalues"][i].double()
        assert error(basis.T @ basis, torch.eye(64)) < 1e-5
        for r in (8, 16, 32):
            kept = (basis[:, :r].T @ covariance[i] @ basis[:, :r]).trace()
            assert abs(kept / values[:r].sum() - 1) < 1e-5
            per_head = sum(eigen(covariance[i][h : h + 16, h : h + 16])[0][: r // 4].sum() for h in range(0, 64, 16))
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
    swapped = q.unflatten(1, (4, 2)).flip(2).flatten(1, 2)  # the order of heads within a group is of no matter
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
    index = torch.tensor([[39, 3, 17, 0]])
    got, _ = cache.reconstruct(index)
    assert error(got[0], cache.rope(k, slice(0, 40))[index[0]]) < 1e-5


@pytest.mark.parametrize("score", ["sum", "softmax"])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_folded_projections_equal_unfolded(score, qkv_bias):
    prompts, more = [random_ids(50)], [random_ids(10, 1)]
    runs = []
    for fold in (True, False):
        model = tiny_model(qkv_bias=qkv_bias)
        runs.append(logits_through(make_engine(model, "sals", 1, 64, **SPARSE, score=score, fold=fold), prompts, more))
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


# ------------------------------------------------------------------------------------------- sampling and the engine


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
@pytest.mark.parametrize("method,options", [("dense", {}), ("sals", SPARSE), ("sals", SPARSE | {"score": "sum"})])
def test_graph_replay_equals_eager(method, options):
    prompts, tokens = [random_ids(n, n) for n in (5, 31, 60)], []
    for compiled in (False, True):
        model = tiny_model().cuda()
        room = Room(model, 3, 400)
        artifact = bases(model) if METHODS[method].fitted else {}
        caches = METHODS[method].build(model, settings_from(method, options), room, artifact)
        engine = Engine(model, caches, room, Sampling(), compiled)
        engine.prefill(prompts)
        tokens.append(decode_rows(engine, 300, lambda ids: False).token_ids)
    assert tokens[0] == tokens[1]
