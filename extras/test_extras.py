"""Tests of extras/. Run with: pytest -q extras/test_extras.py

What all methods share is tested by test_all.py's own tests: those imported here run over the methods of
extras/baselines.py.
"""

import functools
import sys
from types import SimpleNamespace
from unittest import mock

import test_all  # noqa: F401  # isort: skip (it sets how triton runs, which triton reads when imported)
import pytest
import torch
import torch.nn.functional as F

import kernels
import model as model_file
from model import Llama
from test_all import (  # noqa: F401 (of fixtures)
    CPU,
    DEVICE,
    JOINT_LATENTS,
    NANO,
    RISES,
    SPARSE,
    attend_case,
    check_attend,
    check_plan,
    close,
    error,
    fitted_engine,
    instead,
    logits_through,
    make_engine,
    other,
    pairwise,
    poisoned,
    poisoned_memory,
    randn,
    random_ids,
    run_for_hopper,
    stored_keys,
    tiny_model,
    turned,
)

# -------------------------------------------------------------------------------------------- comparison rows

# ------------------------------------------------------------------------------------------------ GGUF files

# ------------------------------------------------------------------------------------- lm-evaluation-harness

# ------------------------------------------------------------------------------- speed, pictures (bench.py)

# ------------------------------------------------------------------------------------------------- hopper.py
# Skipped where there is no such file, or no Gluon. No interpreter runs Gluon: its kernels run on Hopper GPUs
# only, and elsewhere are compiled.


ON_HOPPER = kernels.nvidia_generation(torch.device(DEVICE)) == 9
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="Hopper's instructions")


@pytest.fixture
def hopper(monkeypatch):
    """extras/hopper.py, in use whatever the GPU."""
    module = pytest.importorskip("extras.hopper")
    monkeypatch.setattr(kernels, "hopper", lambda device: module)
    return module


def test_hopper_is_used_on_such_a_gpu_where_the_file_is(monkeypatch):
    def found(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        return kernels.hopper.__wrapped__(torch.device("cuda"))

    assert found(8) is found(10) is None and found(9) is pytest.importorskip("extras.hopper")
    monkeypatch.setitem(sys.modules, "extras.hopper", None)  # as if there were no such file
    assert found(9) is None
    broken = mock.Mock(side_effect=ModuleNotFoundError("No module named 'nosuch'", name="nosuch"))
    monkeypatch.setattr(kernels.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="nosuch"):
        found(9)


@needs_hopper
def test_kernel_hopper_operators_do_what_torch_compile_is_told(hopper):
    given, _ = attend_case(torch.bfloat16, "channels", "all", 2, 300, 2, 2, 128, 128, 4, 0, (299, 100))
    torch.library.opcheck(kernels.launch_attend, given)
    torch.library.opcheck(hopper.linear_chain, chain_inputs(2, 48, 64, 32, 40, biased=True))


@pytest.fixture
def streamed(hopper, monkeypatch):
    """hopper.py, whose own way is the only one to attend latents."""
    monkeypatch.setattr(hopper, "streams_basis", lambda *_: True)
    monkeypatch.setitem(kernels.KEYS, "latents", (kernels.latent_keys, None, None))
    return hopper


@pytest.mark.parametrize("form", JOINT_LATENTS)
def test_kernel_hopper_plans_count_numbers_of_fp32_where_the_model_is(hopper, monkeypatch, form):
    check_plan(monkeypatch, hopper, "streams_basis", -1, form)


# Tiles that span rows, that end before their second half or in it, ranks of one chunk and of more chunks than
# the ring has slots, programs of one head, of part of a tile and of several, windows of several tiles and
# hardly begun: B, Hkv, G, D, chunks, n, bits, z, programs.
LATENT_SIZES = [
    (1, 2, 1, 128, 1, 64, 2, 24, 2),
    (3, 4, 1, 128, 2, 128, 4, 64, 1),
    (3, 3, 2, 128, 4, 70, 2, 100, 3),
    (9, 5, 1, 64, 3, 9, 2, 1, 5),
    (17, 4, 1, 128, 2, 8, 4, 130, 3),
    (2, 32, 1, 128, 8, 448, 2, 300, 7),
    (16, 32, 1, 128, 8, 444, 2, 68, None),
    (8, 8, 4, 128, 4, 444, 2, 68, None),
    (5, 8, 3, 64, 5, 130, 4, 33, 2),
    (1, 3, 4, 64, 8, 300, 4, 24, 2),
    (2, 4, 1, 128, 8, 257, 4, 24, None),
]


@needs_hopper
@pytest.mark.parametrize("sizes", LATENT_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", JOINT_LATENTS)
@poisoned
def test_kernel_hopper_attend_latents(streamed, monkeypatch, form, dtype, sizes):
    B, Hkv, G, D, chunks, n, bits, z, programs = sizes
    if programs:
        monkeypatch.setattr(streamed, "SMS", programs)
    pos, r = [max(3, 599 - 150 * b) for b in range(B)], chunks * (64 if form == JOINT_LATENTS[0] else 128)
    case = (dtype, form, "row", B, 600, Hkv, G, D, D, bits, z, pos)
    if "mixed" not in form or chunks > 2:
        check_attend(*case, n=n, r=r, written=True)


@needs_hopper
@poisoned
def test_kernel_hopper_attend_windows_of_several_tiles(streamed):
    for rise in RISES:
        case = (torch.float16, "joint latents", "row", 3, 200, 2, 1, 64, 64, 4, 100, (199, 120, 30))
        check_attend(*case, r=64, rise=rise, written=True)


HALF, WHOLE = torch.float16, torch.float32
WINDOWED = [(HALF, 2, 16, 33), (WHOLE, 4, 130, 90), (WHOLE, 2, 5, 84), (HALF, 4, 300, 9)]


@pytest.mark.parametrize("dtype, bits, z, n", WINDOWED)
@poisoned
def test_kernel_hopper_attends_by_logits_beside_an_exact_window(streamed, monkeypatch, dtype, bits, z, n):
    """As _streamed_logits makes them, for which no interpreter is; where there is no token anything."""
    S = z + 84
    case = (dtype, "joint latents", "row", 4, S, 2, 1, 32, 32, bits, z, (S - 1, 0, 70, 7))
    (q, kind, keys, *rest), truth = attend_case(*case, n=n, written=True)
    every = torch.ones(4, 2, S, dtype=torch.bool, device=DEVICE)
    _, k = stored_keys("joint latents", dtype, every, 32, rest[2])

    def make_logits(q, index, *_):
        logits = torch.einsum("bhd,bhsd->bhs", q.float(), k)
        logits = logits.gather(2, index.clamp(min=0).long()[:, None].expand(-1, 2, -1))
        return logits.masked_fill(index[:, None] < 0, torch.nan)[:, :, None]

    monkeypatch.setattr(streamed, "_streamed_logits", make_logits)
    close(kernels.launch_attend(q, kind, keys, *rest), truth, dtype)


def test_kernel_hopper_streams_the_basis_where_it_can(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    takes, cuda = hopper.streams_basis, torch.device("cuda")
    fits = [16, 448, 32, 32, 128, 512, 0, 2]  # B, n, Hq, Hkv, D, r, width, itemsize
    assert takes(cuda, *fits) and not takes(CPU, *fits) and takes(cuda, *fits[:5], 1024, 0, 1)
    assert takes(cuda, *fits[:5], 256, 384, 1) and not takes(cuda, *fits[:5], 256, 96, 1)
    assert takes(cuda, 8, 444, 32, 8, 128, 128, 192, 1) and not takes(cuda, 8, 60, 32, 8, 128, 128, 192, 1)
    assert not takes(cuda, *fits[:5], 500, 0, 2)  # no whole chunks
    assert not takes(cuda, *fits[:5], 256, 0, 4)  # fp32
    for i, changed in ((0, 1), (1, 7), (2, 320), (3, 2), (4, 256), (5, 1024)):  # each too few or too many
        assert not takes(cuda, *fits[:i], changed, *fits[i + 1 :])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not takes(cuda, *fits)


SHARED = (2, 4)  # bits of keys and of values


@needs_hopper
@pytest.mark.parametrize("bits", SHARED)
@pytest.mark.parametrize("G, programs", [(2, 1), (4, 4), (5, 132), (8, 40)])
@poisoned
def test_kernel_hopper_attend_shared_keys(hopper, monkeypatch, bits, G, programs):
    """One program a head, which writes the result itself, several, and more than short rows have tiles."""
    monkeypatch.setattr(hopper, "SMS", programs)
    monkeypatch.setattr(kernels, "_attend_kernel", None)
    for B, S, Hkv, pos in ((4, 1001, 3, (1000, 0, 511, 32)), (2, 7, 1, (6, 2)), (3, 96, 2, (95, 64, 63))):
        check_attend(torch.bfloat16, "channels", "all", B, S, Hkv, G, 128, 128, bits, 0, pos)


@pytest.mark.parametrize("joint", [True, False])
def test_kernel_hopper_goes_without_bulk_copies_where_tensors_are_not_aligned(hopper, monkeypatch, joint):
    asked = []
    for plan in ("streams_basis", "shares_keys"):
        monkeypatch.setattr(hopper, plan, lambda *_: asked.append(True) or True)
    for kernel in ("_streamed_logits", "_attend_shared"):
        monkeypatch.setattr(hopper, kernel, None)
    case = ("joint latents", "row", 1, 90, 2, 1) if joint else ("channels", "all", 1, 96, 2, 4)
    given, truth = attend_case(torch.float16, *case, 64, 64, 4, 8 * joint, (80,), written=True)
    first, *others = given[2]
    stored = first[:, :1] if joint else first
    context = torch.empty(stored.numel() + 1, dtype=first.dtype, device=DEVICE)
    shifted = context[1:].view(stored.shape).copy_(stored).expand(first.shape)
    close(kernels.launch_attend(*given[:2], [shifted, *others], *given[3:]), truth, torch.float16)
    assert asked


@needs_hopper
@pytest.mark.parametrize("form", JOINT_LATENTS)
def test_kernel_hopper_attends_latents_with_the_same_bits_again(streamed, form):
    """Over many launches, in a graph with other inputs and another grid in turn: a part of the call before
    would show."""
    cases = []
    for B, pos in ((4, 4095), (4, 4086), (3, 4095)):
        case = (torch.bfloat16, form, "row", B, 4096, 32, 1, 128, 128, 2, 64, (pos,) * B)
        cases.append(attend_case(*case, n=432, r=512, written=True)[0])
    truths = [kernels.launch_attend(*given) for given in cases]
    assert not torch.equal(*truths[:2])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outs = [kernels.launch_attend(*given) for given in cases * 10]
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, truths[i % 3]) for i, out in enumerate(outs))


PLAIN, MIXED = JOINT_LATENTS
OVERLAPPING = [("hopper", 8, 2, 2, PLAIN), ("hopper", 8, 2, 4, MIXED), ("hopper", 4, 4, 2, PLAIN)]
OVERLAPPING += [("streamed", 32, 32, bits, PLAIN) for bits in (2, 4)]


@needs_hopper
@pytest.mark.parametrize("rule", ["each", "softmax"])
@pytest.mark.parametrize("fixture, Hq, Hkv, bits, form", OVERLAPPING)
def test_kernel_launches_that_overlap_agree(request, monkeypatch, rule, fixture, Hq, Hkv, bits, form):
    """Layers in which every kernel reads what the one before wrote, in one graph, again and again."""
    B, S, D, r, x, y, z, ffn = 4, 6000, 128, 128, 4, 300, 16, 1024
    hopper = request.getfixturevalue(fixture)
    widths, scale = [Hq * D, r, 32 * (1 if rule == "each" else Hq)], D**-0.5
    first_attended, first_x, *linears = chain_inputs(B, Hq * D, Hq * D, ffn, sum(widths))
    case = (torch.bfloat16, form, "row", B, S, Hkv, Hq // Hkv, D, D, bits, z, (S - 1,) * B)
    layers = [attend_case(*case, r=r, written=True)[0] for _ in range(2)]
    written, pos = [given[2][0][:, 0] for given in layers], layers[0][5]
    begin = [t.clone() for t in written]

    def steps():
        attended, x_, seen = first_attended, first_x, []
        for _, kind, keys, values, _, _, _, window, _ in layers * 3:
            x_, new = hopper.linear_chain(attended, x_, *linears)
            q, latent, queries = new.split(widths, 1)
            keys[0][:, 0, -1] = latent[:, : keys[0].shape[-1]].to(keys[0].dtype)  # of codes the leading ones
            q, queries = q.unflatten(1, (-1, D)).contiguous(), queries.unflatten(1, (1, -1, 32))
            joint = [t if t is None else t[:, :1] for t in keys[:2]]
            scores = kernels.launch_scores(queries, *joint, pos, scale, rule)[:, 0]
            index = kernels.launch_select(scores, pos, x, y, z)
            attended = kernels.launch_attend(q, kind, keys, values, bits, pos, index, window, scale).flatten(
                1
            )
            seen += [x_, index, attended]
        return seen

    def replayed(times):
        steps()  # before a capture, as linear_chain asks
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = steps()
        for _ in range(times):
            # Were it all there from the replay before, what is read too early would look right.
            for t, start in zip(written, begin, strict=True):
                t.copy_(start)
            for t in seen:
                t.zero_()
            graph.replay()
            yield [t.clone() for t in seen]

    assert kernels.overlapped(torch.device("cuda"))["launch_pdl"]
    overlapped = list(replayed(20))
    monkeypatch.setattr(kernels, "overlapped", lambda device: {})
    (truth,) = replayed(1)
    assert all(t.count_nonzero() for t in truth)
    for result in overlapped:
        assert all(torch.equal(a, b) for a, b in zip(result, truth, strict=True))


def chain_inputs(rows, heads_dim, dim, ffn, N, biased=False, size=1):
    """Arguments of hopper.linear_chain."""
    shapes, dtype = [(dim, heads_dim), (2 * ffn, dim), (dim, ffn), (N, dim)], torch.bfloat16
    weights = [randn(*shape, seed=i, dtype=dtype) * shape[1] ** -0.5 for i, shape in enumerate(shapes)]
    biases = [randn(len(w), seed=4 + i, dtype=dtype) if biased else None for i, w in enumerate(weights)]
    norms = [(1 + randn(dim, seed=i) / 4).to(dtype) for i in range(2)]
    attended, x = randn(rows, heads_dim, dtype=dtype) * size, randn(rows, dim, seed=1, dtype=dtype) * size
    return attended, x, weights, biases, norms, [0.1, 1e-5]


def chain_truth(attended, x, weights, biases, norms, eps):
    """linear_chain in fp32, as model.Layer has it."""
    w, b = ([t if t is None else t.float() for t in ts] for ts in (weights, biases))

    def norm(x, i):
        return F.rms_norm(x, norms[i].shape, norms[i].float(), eps[i])

    dtype, x = x.dtype, x.float() + F.linear(attended.float(), w[0], b[0])
    gate, up = F.linear(norm(x, 0), w[1], b[1]).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, w[2], b[2])
    return x.to(dtype), F.linear(norm(x, 1), w[3], b[3]).to(dtype)


def share_of_chain(given, rank, n):
    """What one of n ranks gives linear_chain: columns of W_o and W_2, rows of W_13."""
    attended, x, (wo, w13, w2, w), (b, b13, b2, last), *others = given

    def part(t, dim):
        return t if t is None else t.chunk(n, dim)[rank].contiguous()

    w13, b13 = (t if t is None else torch.cat([part(half, 0) for half in t.chunk(2)]) for t in (w13, b13))
    b, b2 = (t if t is None or rank == 0 else torch.zeros_like(t) for t in (b, b2))
    return part(attended, 1), x, [part(wo, 1), w13, part(w2, 1), w], [b, b13, b2, last], *others


def check_chain(given, outs):
    for out, truth in zip(outs, chain_truth(*given), strict=True):
        close(out, truth.float(), torch.bfloat16)
        wrong, size = ((x.float() ** 2).mean(0) for x in (out - truth, truth))  # of each output
        assert wrong.max() < 3e-3 * size.mean()


# Shares of several tiles and of none, that end in mid-tile and in mid-eight, rings that are longer than a
# layer; 1 to 16 rows.
CHAINS = [(256, 256, 768, 512), (64, 72, 96, 200), (512, 320, 1000, 1111), (128, 4096, 8888, 999)]
REAL_CHAINS = [(4096, 4096, 11008, 12288), (4096, 4096, 14336, 6144), (4096, 4096, 14336, 128256)]


@needs_hopper
@pytest.mark.parametrize("sizes", CHAINS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("programs", [3, 20, 132])
@pytest.mark.parametrize("biased", [False, True])
@poisoned
def test_kernel_hopper_linear_chain(hopper, monkeypatch, rows, sizes, programs, biased):
    names = ("shared_memory_per_block_optin", "major", "minor")
    device = {name: getattr(torch.cuda.get_device_properties(0), name) for name in names}
    few = SimpleNamespace(multi_processor_count=programs, **device)
    programs = min(programs, sizes[1] // 8)
    counters = hopper._chain_counters(torch.device("cuda", 0), programs)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    given, before = chain_inputs(rows, *sizes, biased), counters.clone()
    first = hopper.linear_chain(*given)
    check_chain(given, first)
    for _ in range(10):  # the same to the bit: no order of programs shows
        assert all(map(torch.equal, hopper.linear_chain(*given), first))
    assert (counters - before).tolist() == [11 * programs] * 3


@needs_hopper
@pytest.mark.parametrize("rows, sizes", [(3, (96, 72, 288, 200)), (16, (768, 4096, 2664, 999))])
def test_kernel_hopper_linear_chain_sums_over_ranks(hopper, rows, sizes):
    """One rank of three at a time. The others' parts lie in its memory already, so that it waits for none."""
    given, dim, MP = chain_inputs(rows, *sizes, biased=True), sizes[1], 8 if rows <= 8 else 16
    shares, x = [share_of_chain(given, rank, 3) for rank in range(3)], given[1].float()
    w, b = zip(*[[[t.float() for t in ts] for ts in share[2:4]] for share in shares], strict=True)
    parts = torch.zeros(2, 3, dim, MP, device=DEVICE)  # what each rank adds to x by W_o, and by W_2
    for place in range(2):
        for rank, (attended, *_, norms, eps) in enumerate(shares):
            y = attended.float()
            if place:
                normed = F.rms_norm(x, (dim,), norms[0].float(), eps[0])
                gate, up = F.linear(normed, w[rank][1], b[rank][1]).chunk(2, -1)
                y = F.silu(gate) * up
            parts[place, rank, :, :rows] = F.linear(y, w[rank][2 * place], b[rank][2 * place]).T
        x = x + parts[place].sum(0).T[:rows]
    for rank, share in enumerate(shares):
        memories = torch.zeros(3, 3 * dim * MP + dim // 8 * 3, dtype=torch.int64, device=DEVICE)
        got = memories[:, : 3 * dim * MP].view(torch.float32).unflatten(1, parts.shape)
        counts = memories[:, 3 * dim * MP :].unflatten(1, (-1, 3))
        others = [i for i in range(3) if i != rank]
        got[rank, :, others], counts[rank, :, others] = parts[:, others], 1 << 40
        addresses = torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE)
        check_chain(given, hopper.linear_chain(*share, addresses, rank))
        for memory in got:
            close(memory[:, rank, :, :rows], parts[:, rank, :, :rows], torch.bfloat16)
        assert (counts[..., rank] > 0).any(1).all()


@needs_hopper
@pytest.mark.parametrize("rows, sizes, size", pairwise([1, 4, 8, 16], REAL_CHAINS, [1e-3, 1, 300]))
def test_kernel_hopper_linear_chain_real_sizes(hopper, rows, sizes, size):
    """In CUDA graphs, many chains in a row, in turn with another's of other sizes; small rows meet the norms'
    epsilons."""
    chains, outs, graphs = [chain_inputs(rows, *sizes, size=size), chain_inputs(2, 64, 512, 96, 200)], [], []
    for given in chains:
        outs.append([hopper.linear_chain(*given)])
        check_chain(given, outs[-1][0])
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs[-1] += [hopper.linear_chain(*given) for _ in range(5)]
    for _ in range(10):
        for graph in graphs:
            graph.replay()
    for first, *others in outs:
        assert all(torch.equal(a, b) for out in others for a, b in zip(out, first, strict=True))


@needs_hopper
@pytest.mark.parametrize("method", ["dense", "elitekv"])
def test_nano_in_bf16_decodes_by_chains(hopper, method, monkeypatch):
    """Compiled and in a CUDA graph, with the logits of PyTorch's products."""
    logits, launches, chain = [], mock.MagicMock(), hopper._linear_chain_kernel
    launches.__getitem__.side_effect = lambda grid: chain[grid]
    monkeypatch.setattr(hopper, "_linear_chain_kernel", launches)
    ids = random_ids(260, 1)
    for kernel in (False, True):
        how = dict.fromkeys(("kernel", "compiled", "graphed"), kernel)
        engine = fitted_engine(NANO, method, 1, 300, "cuda", torch.bfloat16, **how)
        engine.prefill([ids[:200]])
        made = []
        for token in ids[200:]:
            engine.tokens.fill_(token)
            engine.step()
            made.append(engine.logits[0].float().cpu())
        logits.append(torch.stack(made))
        assert launches.__getitem__.called == kernel
    assert error(logits[1], logits[0]) < 5e-2


def test_kernel_hopper_linear_chain_refuses(hopper):
    names = ("attended", "x", "weights", "biases", "norms", "eps")
    given = dict(zip(names, chain_inputs(2, 48, 64, 32, 40, biased=True), strict=True))

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            hopper.linear_chain(**given | {name: change(given[name]) for name, change in changes.items()})

    for place, name in enumerate(("wo", "w13", "w2", "w")):
        for what in ("weights", "biases"):
            refused(f"{name} must be torch.bfloat16", **{what: other(place, torch.Tensor.float)})
            must = "bias of w must be" if name == "w" else f"{name} must be"
            refused(must, **{what: other(place, lambda x: x[1:].clone())})
    refused("attended must be", attended=lambda x: x[:1])
    refused("x must be", x=lambda x: x[None])
    refused("attended must be", x=lambda x: x[:0])
    refused("4 weights and biases, 2 norms", norms=lambda norms: norms[:1])
    refused("x .* must be contiguous", x=turned)
    refused("next norm must be", norms=other(1, lambda norm: norm[:32]))
    askew = randn(64 * 32 + 1, dtype=torch.bfloat16)[1:].view(64, 32)
    refused("w2 must start at a multiple of 16", weights=other(2, instead(askew)))
    if not ON_HOPPER:
        refused("on a Hopper GPU: not torch.bfloat16 \\[2, 64\\] on ")
    for rows, heads_dim in ((17, 48), (2, 44)):
        given = dict(zip(names, chain_inputs(rows, heads_dim, 64, 32, 40), strict=True))
        refused("at most 16 rows")


@pytest.mark.parametrize(
    "method, changes",
    [
        ("dense", {"qkv_bias": True, "mlp_bias": True, "out_bias": True}),
        ("dense", {"qk_norm": True, "n_kv_heads": 2}),
        ("dense", {"tied": True}),
        ("sals", {}),
        ("elitekv", {}),
        ("fdc", {"n_heads": 5, "n_kv_heads": 5, "head_dim": 16}),  # whose wo has 80 inputs
    ],
)
def test_decode_layers_in_chains_equal_those_in_products(hopper, method, changes, monkeypatch):
    """Over prompts and new tokens, and that there is a chain for each layer, the last one with the logits."""
    calls, logits = [], []
    monkeypatch.setattr(hopper, "linear_chain", lambda *given: calls.append(given) or chain_truth(*given[:6]))
    monkeypatch.setattr(model_file, "shared_memory", lambda *_: (None, "addresses", 3))
    for chained in (False, True):
        monkeypatch.setattr(hopper, "chains_linears", lambda *_, chained=chained: chained)
        model = tiny_model(**({"dim": 64, "ffn_dim": 192, "n_layers": 2} | changes)).to(DEVICE)
        for layer in model.layers:
            layer.ffn_norm.eps = 0.1  # another than the first norm's
        options = {"sals": SPARSE | {"skip": "0"}, "fdc": {"rate": 0.4}}.get(method, {})
        engine = make_engine(model, method, 2, 40, kernel=True, **options)
        decode = getattr(engine.decode, "func", engine.decode)
        assert decode is (hopper.decode_in_chains if chained else Llama.decode)
        logits.append(logits_through(engine, [random_ids(n, n) for n in (5, 21)], [random_ids(2)] * 2))
        assert len(calls) == 2 * len(model.layers) * chained
    assert error(logits[1], logits[0]) < 1e-5
    assert all(given[0].is_contiguous() and given[6:] == ("addresses", 3) for given in calls)


@pytest.mark.parametrize("chained", [False, True])
def test_layers_of_a_kind_share_their_compiled_code(chained, hopper, monkeypatch):
    """Whatever follows them: a graph for each of two kinds, and those of a step's ends and of greedy."""
    monkeypatch.setattr(hopper, "linear_chain", lambda *given: chain_truth(*given))
    monkeypatch.setattr(hopper, "chains_linears", lambda *_: chained)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(dim=64, ffn_dim=192, n_layers=6).to(DEVICE)
    make_engine(model, "sals", 2, 40, kernel=True, compiled=True, **SPARSE | {"skip": "0,1,-1"})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_which_rows_chains_serve(hopper, monkeypatch):
    def served(rows, *inputs, generation=9, device="cuda", dtype=torch.bfloat16):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
        with torch._subclasses.FakeTensorMode():  # no GPU need be there
            return hopper.chains_linears(torch.empty(rows, 128, dtype=dtype, device=device), *inputs)

    assert served(16, 128, 200)
    assert not served(16, 128, 100) and not served(17, 128, 200)
    assert not served(16, 128, device="cpu") and not served(16, 128, dtype=torch.float16)
    assert not served(16, 128, generation=8) and not served(16, 128, generation=10)
    monkeypatch.setattr(hopper, "chains_linears", lambda *_: True)
    model = tiny_model()
    assert hopper.chained_decode(model, 2, lambda *_: ()) and not hopper.chained_decode(
        model, 2, lambda *_: None
    )


# No interpreter runs Gluon: this much of it is tested on the CPU, for the triton that is installed.
# Of attend: form, Hkv, G, D, bits, z, r.
LATENTS = [("joint latents", 32, 1, 128, 4, 64, 512), ("joint mixed latents", 32, 1, 128, 2, 64, 1024)]
LATENTS += [("joint mixed latents", 8, 4, 128, 2, 64, 512)]
COMPILED = [  # a kernel, how it multiplies, how many of its partitions wait for the kernel before, cases
    ("_streamed_logits_kernel", "wgmma", 2, LATENTS),  # both consumers
    ("_shared_keys_kernel", "mma.sync", 0, [("channels", 8, 4, 128, bits, 0, 0) for bits in SHARED]),
    ("_linear_chain_kernel", "wgmma", 2, [(4, 1), (16, 2)]),  # the consumer, and who loads its inputs
]


@pytest.mark.parametrize("kernel, multiply, waits, cases", COMPILED, ids=["latents", "shared", "chain"])
def test_hopper_operations_compile_without_a_gpu(hopper, kernel, multiply, waits, cases, tmp_path):
    def arguments(what, *sizes):
        if kernel == "_linear_chain_kernel":
            given = chain_inputs(what, 512, 256, 768, 1000, biased=sizes[0] > 1)
            return given + (torch.zeros(sizes[0], dtype=torch.int64), sizes[0] - 1) * (sizes[0] > 1)
        Hkv, G, D, bits, z, r = sizes
        case = (torch.bfloat16, what, "row" if z else "all", 4, 500, Hkv, G, D, D, bits, z, (499,) * 4)
        return attend_case(*case, n=448, r=r)[0]

    torch.save([arguments(*case) for case in cases], tmp_path / "calls")
    program = f"""
        import extras.hopper as hopper
        kernels.hopper = lambda device: hopper
        torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
            multi_processor_count=132, shared_memory_per_block_optin=227 << 10,
            shared_memory_per_multiprocessor=228 << 10)
        hopper.{kernel} = Compile("{kernel}", hopper)
        kernels._attend_kernel = Compile("_attend_kernel")
        kernels.merge_splits = lambda out, *_: out
        hopper.streams_basis = hopper.shares_keys = hopper.chains_linears = lambda *_: True
        hopper.SMS, operation = 1, hopper.linear_chain if "chain" in "{kernel}" else kernels.launch_attend
        for given in torch.load("{tmp_path}/calls", map_location="cpu"):
            operation(*given)
        made = [kernel for name, kernel in compiled if name == "{kernel}"]
        assert len(made) == {len(cases)}
        for kernel in made:
            ptx = kernel.asm["ptx"]
            assert kernel.metadata.shared <= 227 * 1024 and kernel.metadata.launch_pdl == ({waits} > 0)
            assert "{multiply}" in ptx and "cp.async.bulk" in ptx
            assert ptx.count("griddepcontrol.wait") == {waits}
            if operation is hopper.linear_chain:  # no GPU need show that one of these is missing
                assert ptx.count(".gpu.acquire") == 3 and ptx.count("fence.proxy.async; mov") == 3
                assert ptx.count(".gpu.release.add") == 3
                assert ptx.count("ld.volatile.global") == 1
                summed = 2 * 2 * (kernel is made[1])  # in two layers of two ranks
                assert len(re.findall(r"(red|atom)[.]global[.]sys[.]release", ptx)) == summed
                assert ptx.count("ld.global.sys.acquire") == summed * 3 // 2
    """
    run_for_hopper(program)
