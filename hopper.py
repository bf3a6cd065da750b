"""Operators of kernels.py that are faster on Hopper GPUs (H100, H200) in Gluon, and `linear_chain`.

Gluon is the level below Triton: a kernel chooses its layouts, shared memory, barriers and groups of warps.
On a Hopper GPU compress.py takes this module in kernels.py's place. It has the same operators with the same
arguments. Each runs its kernel of this file where that serves, and otherwise the one of kernels.py; every
other name is kernels.py's own. This file is optional: delete it and everything still runs.

`python hopper.py` benchmarks these operators. The names of sizes are those of kernels.py.
"""

import functools
import sys
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import kernels
from kernels import (
    LOG2E,
    SMS,
    _half_at,
    _largest_sum,
    _split_rows,
    _wait_for_previous,
    attended,
    cdiv,
    check,
    merge_splits,
    need,
    nvidia_generation,
    overlapped,
    power2,
    split_outputs,
    tile_itemsize,
)

# Names that changed after triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_rows = getattr(ampere.async_copy, "async_load", None) or ampere.async_copy.async_copy_global_to_shared
copy_block = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared

operator = functools.partial(kernels.operator, library="kv_hopper")


def __getattr__(name: str):
    """What this module does not have itself is kernels.py's."""
    return getattr(kernels, name)


def on_hopper(device: torch.device) -> bool:
    return nvidia_generation(device) == 9


def aligned(*tensors: Tensor) -> bool:
    """Whether bulk copies, which begin at multiples of 16 bytes, can take the tensors."""
    return all(each.data_ptr() % 16 == 0 for each in tensors)


# ------------------------------------------------------- where the programs of a launch wait for one another


@gluon.jit
def _goal(counter_p, programs):
    """What the counter is once all programs have arrived: between launches it is a multiple of their number,
    and before our own arrival, ahead of which this must be read, it stays below the next one."""
    return (gl.load(counter_p, volatile=True) // programs + 1) * programs


@gluon.jit
def _arrive(counter_p):
    barrier()  # the stores of all warps come before the release
    gl.atomic_add(counter_p, 1, sem="release", scope="gpu")


@gluon.jit
def _wait_for_all(counter_p, goal):
    """Waits until the counter has reached `goal`: what all programs stored before is then visible."""
    # 0 is added by a load of one thread, whose acquisition the others share past its barrier.
    while gl.atomic_add(counter_p, 0, sem="acquire", scope="gpu") < goal:
        pass


# ------------------------------------------------------------------------------ attention over stored tokens


@operator(attended)
def attend(
    q: Tensor, kind: str, keys: Sequence[Tensor | None], values: Sequence[Tensor | None], bits: int,
    pos: Tensor, index: Tensor | None, window: Sequence[Tensor], scale: float
) -> Tensor:  # fmt: skip
    """kernels.attend, faster for two formats: keys in int8 that queries share (shares_int8), and chosen
    tokens rebuilt from latents of all heads where heads share no keys (streams_basis): one kernel makes their
    logits, and kernels.attend does the rest."""
    natural = scale == q.shape[2] ** -0.5
    if kind == "int8" and index is None and not window and natural:
        packed = all(x.is_contiguous() for x in (*keys, *values))
        G, D = q.shape[1] // values[0].shape[1], q.shape[2]
        if packed and shares_int8(q.device, G, D, bits, q.dtype) and aligned(keys[0], *values):
            keys, values = checked_stores(q, kind, keys, values, bits, pos)
            return _attend_int8_shared(q, *keys, *values[:2], pos, bits)
    if kind == "latents" and index is not None and index.ndim == 2:
        latent, basis, bias = keys[0][:, 0], keys[2], keys[4]
        shared = keys[0].stride(1) == 0 or len(basis) == 1
        joint = shared and bias is None and q.shape[1] == len(basis)
        if joint and latent.is_contiguous():
            sizes = (*index.shape, *q.shape[1:], latent.shape[2], tile_itemsize(q.dtype, latent))
            if streams_basis(q.device, *sizes) and aligned(latent, basis):
                stores, _ = checked_stores(q, kind, keys, values, bits, pos)
                _, latent_scale, _, basis_scale, _, words = stores
                latent_scale = None if latent_scale is None else latent_scale[:, 0]
                logits = _streamed_logits(q, index, latent, latent_scale, basis, basis_scale, words)
                kind, keys = "logits", [logits]
    return kernels.attend(q, kind, keys, values, bits, pos, index, window, scale)


def checked_stores(q: Tensor, kind: str, keys: Sequence, values: Sequence, bits: int, pos: Tensor) -> tuple:
    """Asks what kernels.attend asks of the stores; returns those of keys and those of values as kernels take
    them."""
    check(pos=(pos, torch.int32, len(q)), q=(q, q.dtype, *q.shape))
    check_keys, *_ = kernels.KEYS[kind]
    return check_keys(q, keys, values[0].shape[1])[0], kernels.packed_values(q, values, bits)[0]


# ------------------------------------------------------------------- attention over compressed tokens (SALS)


@gluon.jit
def _stream_basis(basis, ring, ready, free, first, stop, Hkv, CHUNKS: gl.constexpr):
    """The producer, one warp: copies the basis of head after head into the ring, as its slots become free."""
    SLOTS: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[1]
    KB: gl.constexpr = ring.shape[2]
    for chunk in range((stop - first) * CHUNKS):
        slot = chunk % SLOTS
        head = (first + chunk // CHUNKS) % Hkv
        hopper.mbarrier.wait(free.index(slot), ((chunk // SLOTS) & 1) ^ 1)
        hopper.mbarrier.expect(ready.index(slot), D * KB * ring.dtype.primitive_bitwidth // 8)
        copy_block(basis, [head * D, chunk % CHUNKS * KB], ready.index(slot), ring.index(slot))


@gluon.jit
def _tile_tokens(index_p, start, stop, T: gl.constexpr, LAYOUT: gl.constexpr):
    """T places in line from `start` on, and their tokens: -1 where there is none."""
    line = start + gl.arange(0, T, layout=LAYOUT)
    return line, gl.load(index_p + line, mask=line < stop, other=-1)


@gluon.jit
def _begin_keys(latents, ring, ready, free, chunk, HALF: gl.constexpr, KEYS: gl.constexpr):
    """A half's latents times the basis of a head, whose chunks in the ring begin with `chunk`: the keys
    [T, D], the last product of which is still on its way."""
    SLOTS: gl.constexpr = ring.shape[0]
    CHUNKS: gl.constexpr = latents.shape[0] // 2
    SUM: gl.constexpr = gl.int32 if latents.dtype == gl.int8 else gl.float32
    k = gl.full([latents.shape[1], ring.shape[1]], 0, SUM, KEYS)
    for j in gl.static_range(CHUNKS):
        slot = (chunk + j) % SLOTS
        hopper.mbarrier.wait(ready.index(slot), ((chunk + j) // SLOTS) & 1)
        left, right = latents.index(HALF * CHUNKS + j), ring.index(slot).permute((1, 0))
        k = hopper.warpgroup_mma(left, right, k, use_acc=j > 0, is_async=True)
        if j > 0:  # the product before this one is done in all four warps: they give its slot back
            k = hopper.warpgroup_mma_wait(1, deps=[k])
            barrier()
            hopper.mbarrier.arrive(free.index((chunk + j - 1) % SLOTS))
    return k


@gluon.jit
def _end_keys(k, free, chunk):
    """Waits for the keys, and gives back the slot of the last of their chunks, before `chunk`."""
    k = hopper.warpgroup_mma_wait(0, deps=[k])
    barrier()
    hopper.mbarrier.arrive(free.index((chunk - 1) % free.shape[0]))
    return k


@gluon.jit
def _tile_logits(
    HALF: gl.constexpr, latents, queries, ring, ready, free, first, stop,
    q_p, index_p, latent_p, latent_scale_p, basis_scale_p, rope_p, logits_p, B, n, S, Hkv,
):  # fmt: skip
    """A consumer, four warps: the logits of its half of every tile."""
    _wait_for_previous()
    D: gl.constexpr = ring.shape[1]
    KB: gl.constexpr = ring.shape[2]
    CHUNKS: gl.constexpr = latents.shape[0] // 2
    T: gl.constexpr = latents.shape[1]
    NC: gl.constexpr = queries.shape[1]
    ITEM: gl.constexpr = latents.dtype.primitive_bitwidth // 8
    INT8: gl.constexpr = latent_scale_p is not None
    dtype: gl.constexpr = queries.dtype
    LARGE: gl.constexpr = _largest_sum(dtype)
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 // ITEM])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, NC])
    COPY: gl.constexpr = gl.BlockedLayout([1, 16 // ITEM], [4, 8], [4, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [4, 1], [1, 0])
    # The basis has its RoPE pairs side by side, so the halves of a pair lie in one thread.
    of_pairs, _ = gl.split(gl.reshape(gl.full([T, D], 0, gl.int32, KEYS), [T, D // 2, 2]))
    PAIRS: gl.constexpr = of_pairs.type.layout
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, PAIRS))
    kb = gl.arange(0, KB, layout=gl.SliceLayout(0, COPY))
    wide = gl.arange(0, D, layout=gl.SliceLayout(0, QUERY))
    dim = wide // 2 + (wide % 2) * (D // 2)
    column = gl.arange(0, NC, layout=gl.SliceLayout(1, QUERY))
    chunk = 0
    for tile in range(first // Hkv, gl.cdiv(stop, Hkv)):
        start = (tile * 2 + HALF) * T
        first_row = start // n
        # Dead slots read token 0, which is always written: no masks on the tiles, and no NaN.
        line, token = _tile_tokens(index_p, start, B * n, T, gl.SliceLayout(1, COPY))
        stored = gl.minimum(line // n, B - 1).to(gl.int64) * S + gl.maximum(token, 0)
        latent_row = latent_p + stored[:, None] * (CHUNKS * KB)
        for j in gl.static_range(CHUNKS):
            copy_rows(latents.index(HALF * CHUNKS + j), latent_row + (j * KB + kb)[None, :])
        ampere.async_copy.commit_group()
        line, token = _tile_tokens(index_p, start, B * n, T, gl.SliceLayout(1, PAIRS))
        words = gl.load(rope_p + gl.maximum(token, 0)[:, None].to(gl.int64) * (D // 2) + pair[None, :])
        cos, sin = _half_at(words, 0), _half_at(words, 16)
        line, token = _tile_tokens(index_p, start, B * n, T, gl.SliceLayout(1, LOGITS))
        row = line // n
        if INT8:
            stored = gl.minimum(row, B - 1).to(gl.int64) * S + gl.maximum(token, 0)
            token_scale = gl.load(latent_scale_p + stored)
        logits_row = logits_p + row.to(gl.int64) * (Hkv * n) + (line - row * n)
        own = gl.where(line < B * n, row - first_row, -1)
        mine = own[:, None] == gl.arange(0, NC, layout=gl.SliceLayout(0, LOGITS))[None, :]
        query_row = first_row + column
        real = query_row <= (gl.minimum(start + T, B * n) - 1) // n
        query_p = q_p + query_row.to(gl.int64)[:, None] * (Hkv * D) + dim[None, :]
        ampere.async_copy.wait_group(0)
        hopper.fence_async_shared()
        barrier()
        for unit in range(gl.maximum(first, tile * Hkv), gl.minimum(stop, (tile + 1) * Hkv)):
            head = unit - tile * Hkv
            query = gl.load(query_p + head * D, mask=real[:, None], other=0.0)
            k = _begin_keys(latents, ring, ready, free, chunk, HALF, KEYS)
            if INT8:
                pair_scale = gl.load(basis_scale_p + head * D + wide) * LARGE
                query = (query * pair_scale[None, :]).to(dtype)
            queries.index(HALF).store(query)
            chunk += CHUNKS
            k = _end_keys(k, free, chunk)
            # From here on the other consumer has the tensor cores, but for a small product with the query.
            if INT8:
                k = k.to(gl.float32) / LARGE
            a, c = gl.split(gl.reshape(k, [T, D // 2, 2]))
            rotated = gl.reshape(gl.join(a * cos - c * sin, c * cos + a * sin), [T, D]).to(dtype)
            left = gl.convert_layout(rotated, gl.DotOperandLayout(0, LOGITS, 2), assert_trivial=True)
            right = queries.index(HALF).permute((1, 0)).load(gl.DotOperandLayout(1, LOGITS, 2))
            logits = hopper.mma_v2(left, right, gl.full([T, NC], 0.0, gl.float32, LOGITS))
            if INT8:
                logits *= token_scale[:, None]
            to = gl.expand_dims(logits_row + head * n, 1) + gl.full([T, NC], 0, gl.int32, LOGITS)
            gl.store(to, logits, mask=mine)


@gluon.jit
def _streamed_logits_kernel(
    q_p, index_p, latent_p, latent_scale_p, basis, basis_scale_p, rope_p, logits_p, B, n, S, Hkv,
    T: gl.constexpr, NC: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    # Tiles of all rows times heads are one line of units, of which every program takes an equal run. The
    # latents of a tile stay in shared memory, a warp streams the basis past them by bulk copies, and of two
    # consumers, each of T tokens, one can multiply while the other rotates.
    LATENT: gl.constexpr = basis.dtype
    D: gl.constexpr = basis.block_shape[0]
    KB: gl.constexpr = basis.block_shape[1]
    pid, programs = gl.program_id(0), gl.num_programs(0)
    units = gl.cdiv(B * n, 2 * T).to(gl.int64) * Hkv
    first, stop = (pid * units // programs).to(gl.int32), ((pid + 1) * units // programs).to(gl.int32)
    latents = gl.allocate_shared_memory(LATENT, [2 * CHUNKS, T, KB], basis.layout)
    ring = gl.allocate_shared_memory(LATENT, [SLOTS, D, KB], basis.layout)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    queries = gl.allocate_shared_memory(q_p.dtype.element_ty, [2, NC, D], SWIZZLED)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(ready.index(slot), count=1)
        hopper.mbarrier.init(free.index(slot), count=2)  # both consumers
    hopper.fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_tile_logits, (gl.constexpr(0), latents, queries, ring, ready, free, first, stop, q_p, index_p,
                            latent_p, latent_scale_p, basis_scale_p, rope_p, logits_p, B, n, S, Hkv)),
            (_tile_logits, (gl.constexpr(1), latents, queries, ring, ready, free, first, stop, q_p, index_p,
                            latent_p, latent_scale_p, basis_scale_p, rope_p, logits_p, B, n, S, Hkv)),
            (_stream_basis, (basis, ring, ready, free, first, stop, Hkv, CHUNKS)),
        ],
        [4, 1],  # warps, beside the four of the first
        [200, 24],  # registers a thread
    )  # fmt: skip


def _streamed_logits(
    q: Tensor, index: Tensor, latent: Tensor, latent_scale: Tensor | None, basis: Tensor,
    basis_scale: Tensor | None, words: Tensor
) -> Tensor:  # fmt: skip
    """q . k [B, Hkv, 1, n] of chosen tokens whose keys are rebuilt from latents, heads sharing no keys (see
    streams_basis)."""
    (B, Hkv, D), (S, r), n = q.shape, latent.shape[1:], index.shape[1]
    itemsize = latent.element_size()
    T, NC, KB, SLOTS = 64, 8, 128 // itemsize, 4
    layout = gl.NVMMASharedLayout(128, 8 * itemsize, 2)
    chunks = TensorDescriptor.from_tensor(basis.view(Hkv * D, r), [D, KB], layout)
    logits = torch.empty(B, Hkv, 1, n, dtype=torch.float32, device=q.device)
    _streamed_logits_kernel[min(cdiv(B * n, 2 * T) * Hkv, SMS),](
        q, index, latent, latent_scale, chunks, basis_scale, words, logits, B, n, S, Hkv, T, NC, r // KB,
        SLOTS, num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return logits


def streams_basis(device: torch.device, B: int, n: int, Hkv: int, D: int, r: int, itemsize: int) -> bool:
    """Whether the logits of chosen tokens are made by _streamed_logits_kernel: latents of 16 or 8 bits, of
    whole chunks of 128 bytes of which 128 fit in shared memory; heads of 64 or 128; 64 tokens in line that
    span 8 rows of the batch at most; and (for speed) two heads or more for every program."""
    chunks = itemsize < 4 and r * itemsize % 128 == 0 and r * itemsize <= 1024
    fits = chunks and D in (64, 128) and n >= 8
    return on_hopper(device) and fits and cdiv(B * n, 128) * Hkv >= 2 * SMS


# ---------------------------------------------------------- attention over keys in int8 that queries share


@triton.constexpr_function
def _decode_ptx(BITS):
    """PTX of _decode_halves for two tokens: their words of codes $4 and $5, their groups' (minimum, scale) $6
    and $7, and $8, how far left to rotate byte 0 -> $0 .. $3: of byte 0 .. 3 both tokens' values."""
    mask, one = 0x10001 * (((1 << BITS) - 1) << (10 - BITS)), 0x3C003C00  # two halves of 1.0
    ptx = f"""mov.b32 code, {one + 0x10001 * (BITS << 10)};
        prmt.b32 low, $6, $7, 0x5410; prmt.b32 step, $6, $7, 0x7632;
        mul.f16x2 step, step, code; sub.f16x2 low, low, step;
        prmt.b32 front, $4, $5, 0x5410; prmt.b32 back, $4, $5, 0x7632;"""
    for byte, word in enumerate(("front", "front", "back", "back")):
        ptx += f"""sub.u32 turn, $8, {byte % 2 * 8}; shf.l.wrap.b32 code, {word}, {word}, turn;
            lop3.b32 code, code, {mask}, {one}, 0xEA; fma.rn.f16x2 ${byte}, code, step, low;"""
    return "{ .reg .b32 front, back, low, step, code, turn; " + ptx + " }"


@gluon.jit
def _decode_halves(words, pairs, turn, BITS: gl.constexpr):
    """Words of codes, and of their groups' (minimum, scale), to the values of byte 0 .. 3, in fp16: a code as
    the top bits of a mantissa reads 1 + code / 2**BITS (see kernels._decode), minimum + code * scale is then
    one FMA, and two tokens, neighbours in a thread's registers, share every instruction."""
    return gl.inline_asm_elementwise(
        _decode_ptx(BITS), "=r,=r,=r,=r,r,r,r,r,r,r", [words, pairs, turn],
        (gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.constexpr_function
def _word_layouts(T, PLANES, H):
    """Layouts of T tokens' words for every plane [T, PLANES, H, 8], and to match, of codes as stored
    [T, 8 H] and of their groups' (minimum, scale) [T, PLANES H]: each word in the thread that multiplies its
    values. A warp has 4 pairs of tokens and 8 words, 32 channels of a plane, in its lanes, and the rest in
    registers, neighbouring tokens first."""
    tokens = [[1, 0, 0, 0]] + [[1 << i, 0, 0, 0] for i in range(3, T.bit_length() - 1)]
    planes = [[0, 1 << i, 0, 0] for i in range(PLANES.bit_length() - 1)]
    runs = [[0, 0, 1 << i, 0] for i in range(H.bit_length() - 1)]
    lanes = [[2, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]

    def layout(place, registers, sizes):
        bits = ([place(*bit) for bit in each] for each in (registers, lanes))
        return gl.DistributedLinearLayout(*bits, [], [], sizes)

    return (
        layout(lambda *bit: list(bit), tokens + planes + runs, [T, PLANES, H, 8]),
        layout(lambda t, p, h, word: [t, 8 * h + word], tokens + runs, [T, 8 * H]),
        layout(lambda t, p, h, word: [t, H * p + h], tokens + planes + runs, [T, PLANES * H]),
    )


@gluon.jit
def _copy_tile(blocks, rings, ready, stage, row, some):
    """Copies a tile of keys, codes and pairs, from `row` on, to a stage of the rings, if there is one."""
    keys, codes, pairs = blocks
    T: gl.constexpr = keys.block_shape[0]
    BYTES: gl.constexpr = T * (keys.block_shape[1] + 4 * codes.block_shape[1] + 4 * pairs.block_shape[1])
    hopper.mbarrier.expect(ready.index(stage), BYTES, pred=some)
    for i in gl.static_range(3):
        copy_block(blocks[i], [row, 0], ready.index(stage), rings[i].index(stage), pred=some)


@gluon.jit
def _int8_shared_kernel(
    keys, codes, pairs, q_p, k_scale_p, pos_p, parts, S, scale,
    G: gl.constexpr, BITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # A program is one warp, and nothing moves between its threads but maxima: codes of keys come from shared
    # memory as tensor cores take them, the logits are then where those take weights, and values are decoded
    # where they are multiplied.
    T: gl.constexpr = keys.block_shape[0]
    D: gl.constexpr = keys.block_shape[1]
    W: gl.constexpr = codes.block_shape[1]
    H: gl.constexpr = W // 8
    PLANES: gl.constexpr = 8 // BITS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [1, 1], [1, 0])
    LAYOUTS: gl.constexpr = _word_layouts(T, PLANES, H)
    WORDS: gl.constexpr = LAYOUTS[0]
    CODES: gl.constexpr = LAYOUTS[1]
    PAIRS: gl.constexpr = LAYOUTS[2]
    split, splits = gl.program_id(0), gl.num_programs(0)
    row = gl.program_id(2).to(gl.int64) * gl.num_programs(1) + gl.program_id(1)
    length = gl.load(pos_p + gl.program_id(2)) + 1
    # Programs take tiles in turn: what is read at a time lies side by side, which memory serves faster.
    tiles = gl.maximum(gl.cdiv(gl.cdiv(length, T) - split, splits), 0)
    first = (row * S).to(gl.int32)
    k_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, T, D], keys.layout)
    code_ring = gl.allocate_shared_memory(codes.dtype, [STAGES, T, W], codes.layout)
    pair_ring = gl.allocate_shared_memory(pairs.dtype, [STAGES, T, PLANES * H], pairs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(slot), count=1)
    hopper.fence_async_shared()
    barrier()
    blocks, rings = (keys, codes, pairs), (k_ring, code_ring, pair_ring)
    for slot in gl.static_range(STAGES):
        _copy_tile(blocks, rings, ready, slot, first + (split + slot * splits) * T, slot < tiles)
    # Rows 0 to 7 are the high parts of the queries, 8 to 15 the low ones: their products meet in a thread.
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))[:, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))[None, :]
    high, low, q_scale = _split_rows(gl.load(q_p + (row * G + g) * D + d, mask=g < G, other=0.0))
    query = gl.reshape(gl.permute(gl.join(high, low), (2, 0, 1)), [16, D])
    query = gl.convert_layout(query, gl.DotOperandLayout(0, MMA, 4))
    zeros = gl.full([16, T], 0, gl.int32, MMA)
    of_queries, _ = gl.split(gl.permute(gl.reshape(zeros, [2, 8, T]), (1, 2, 0)))
    LOGITS: gl.constexpr = of_queries.type.layout
    QUERY: gl.constexpr = gl.SliceLayout(1, LOGITS)
    q_scale = gl.convert_layout(q_scale * scale, QUERY)
    plane = gl.arange(0, PLANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    spread = gl.full([T, PLANES, H, 8], 0, gl.int32, WORDS)
    turn = ((10 - BITS - plane * BITS) & 31)[None, :, None, None] + spread
    top = gl.full([8], -1e30, gl.float32, QUERY)
    total = gl.full([8, T], 0.0, gl.float32, LOGITS)  # summed over T at the end, not in every tile
    out = gl.full([D, 8], 0.0, gl.float32, MMA)
    place = split * T + gl.arange(0, T, layout=gl.SliceLayout(0, LOGITS))
    k_scale = gl.load(k_scale_p + row * S + place, mask=place < length, other=0.0)
    for i in range(tiles):
        stage = i % STAGES
        live, token_scale = place < length, k_scale
        place += splits * T
        k_scale = gl.load(k_scale_p + row * S + place, mask=place < length, other=0.0)
        hopper.mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        k = k_ring.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 4))
        products = gl.reshape(ampere.mma_v2(query, k, zeros), [2, 8, T])
        coarse, fine = gl.split(gl.permute(products, (1, 2, 0)))
        logits = (coarse * 254 + fine).to(gl.float32) * (q_scale[:, None] * token_scale[None, :])
        logits = gl.where(live[None, :], logits, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 1))
        if gl.max(new_top - top, 0) > 0:
            shrink = gl.exp2(top - new_top)
            total *= shrink[:, None]
            out *= gl.convert_layout(shrink, gl.SliceLayout(0, MMA))[None, :]
            top = new_top
        weight = gl.exp2(logits - top[:, None])
        total += weight
        weight = gl.permute(weight, (1, 0)).to(gl.float16)
        weight = gl.convert_layout(weight, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
        words = gl.reshape(code_ring.index(stage).load(CODES), [T, 1, H, 8])
        pair = pair_ring.index(stage).load(PAIRS)  # of tokens past the end anything, NaN as well
        real = gl.convert_layout(live, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
        pair = gl.reshape(gl.where(real, pair, 0), [T, PLANES, H, 1])
        words = gl.convert_layout(words, WORDS, assert_trivial=True) + spread
        pair = gl.convert_layout(pair, WORDS, assert_trivial=True) + spread
        v0, v1, v2, v3 = _decode_halves(words, pair, turn, BITS)
        v = gl.join(gl.join(v0, v2), gl.join(v1, v3))  # [T, PLANES, H, 8, byte // 2, byte % 2]
        v = gl.reshape(gl.permute(v, (1, 2, 4, 5, 3, 0)), [D, T])
        out = ampere.mma_v2(gl.convert_layout(v, gl.DotOperandLayout(0, MMA, 2)), weight, out)
        barrier()
        row_ahead = first + (split + (i + STAGES) * splits) * T
        _copy_tile(blocks, rings, ready, stage, row_ahead, i + STAGES < tiles)
    total = gl.sum(total, 1)
    top_p, sum_p, out_p = parts
    if top_p is None:
        out /= gl.convert_layout(total, gl.SliceLayout(0, MMA))[None, :]
    else:
        g = gl.arange(0, 8, layout=QUERY)
        at = (row * G + g) * splits + split
        gl.store(top_p + at, top, mask=g < G)
        gl.store(sum_p + at, total, mask=g < G)
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))[None, :]
    m = gl.arange(0, D, layout=gl.SliceLayout(1, MMA))[:, None]  # runs of 32 channels: (byte, word) of each
    channel = m // 32 * 32 + m % 8 * 4 + m // 8 % 4
    at = (row * G + g) * splits + split
    gl.store(out_p + at * D + channel, out.to(out_p.dtype.element_ty), mask=g < G)


def _attend_int8_shared(
    q: Tensor, k: Tensor, k_scale: Tensor, codes: Tensor, pairs: Tensor, pos: Tensor, bits: int
) -> Tensor:
    """attend of keys in int8 (see shares_int8), values in words. It is launched plainly, since programs of
    one warp would crowd if they were let in early (see overlapped)."""
    (B, Hq, D), (Hkv, S) = q.shape, k.shape[1:3]
    T, stages, fill = 32, 2, 8  # tokens a tile, tiles in shared memory, programs a multiprocessor
    splits = max(1, min(cdiv(S, T), fill * SMS // (B * Hkv)))
    out, parts = split_outputs(q, splits, D)
    blocks = []
    for store in (k, codes, pairs):
        store = store.view(B * Hkv * S, -1)
        width = store.shape[1] * store.element_size()
        layout = gl.NVMMASharedLayout(width if width > 16 else 0, 8 * store.element_size(), 2)
        blocks.append(TensorDescriptor.from_tensor(store, [T, store.shape[1]], layout))
    _int8_shared_kernel[splits, Hkv, B](
        *blocks, q, k_scale, pos, parts, S, D**-0.5 * LOG2E, Hq // Hkv, bits, stages, num_warps=1
    )
    return merge_splits(out, parts)


def shares_int8(device: torch.device, G: int, D: int, bits: int, dtype: torch.dtype) -> bool:
    """Whether keys in int8 that G queries share are attended by _int8_shared_kernel: up to 8 queries in bf16
    (halves as it decodes them would be too coarse for fp16), packed values, heads of 128 (whose rows bulk
    copies and a warp's lanes take)."""
    return on_hopper(device) and G <= 8 and D == 128 and bits < 16 and dtype == torch.bfloat16


# ------------------------------------------------------------------- the linear layers between two attentions

CHAIN_ROWS = 16  # at most; padded to 8 or 16, the narrow side of wgmma


@gluon.jit
def _share(N, HALF: gl.constexpr):
    """This program's outputs of N, in whole eights (the rows after which the swizzle of shared memory
    repeats): the first, how many, and in how many tiles of HALF at most."""
    eights, pid = gl.cdiv(N, 8), gl.program_id(0).to(gl.int64)
    first = (eights * pid // gl.num_programs(0)).to(gl.int32)
    count = (eights * (pid + 1) // gl.num_programs(0)).to(gl.int32) - first
    return first, count, gl.cdiv(count * 8, HALF)


@gluon.jit
def _tile(first, count, tiles, i):
    """The outputs of a tile: from, and up to; of like size, so that no slots of the ring are nearly empty."""
    return (first + count * i // tiles) * 8, (first + count * (i + 1) // tiles) * 8


@gluon.jit
def _stream_weights_of(weight, ring, ready, free, step, N, GATED: gl.constexpr):
    """Copies the weights of this program's outputs, tile by tile, into the ring from `step` on; returns the
    step after."""
    SLOTS: gl.constexpr = ring.shape[0]
    HALF: gl.constexpr = ring.shape[1] // 2
    KB: gl.constexpr = ring.shape[2]
    LATER: gl.constexpr = 0 if GATED else KB
    first, count, tiles = _share(N, HALF)
    for i in range(tiles):
        n, end = _tile(first, count, tiles, i)
        for k in range(0, weight.shape[1], KB + LATER):
            slot = step % SLOTS
            hopper.mbarrier.wait(free.index(slot), ((step // SLOTS) & 1) ^ 1)
            hopper.mbarrier.expect(ready.index(slot), 2 * HALF * KB * 2)
            for j in gl.static_range(0, HALF, 8):
                # Rows past the tile are another's: ask for rows past the matrix, zeros that are not read.
                row = gl.where(n + j < end, n + j, weight.shape[0])
                copy_block(weight, [row, k], ready.index(slot), ring.index(slot).slice(2 * j, 8))
                row += N if GATED else 0
                copy_block(weight, [row, k + LATER], ready.index(slot), ring.index(slot).slice(2 * j + 8, 8))
            step += 1
    return step


@gluon.jit
def _stream_weights(wo, w13, w2, w, ring, ready, free):
    """The first producer, one warp: the weights of all four layers, as slots become free."""
    dim, ffn = w2.shape[0], w2.shape[1]
    step = _stream_weights_of(wo, ring, ready, free, gl.to_tensor(0), dim, False)
    step = _stream_weights_of(w13, ring, ready, free, step, ffn, True)
    step = _stream_weights_of(w2, ring, ready, free, step, dim, False)
    _stream_weights_of(w, ring, ready, free, step, w.shape[0], False)


@gluon.jit
def _stream_input_of(x, xs, ready, free, step, N, HALF: gl.constexpr, GATED: gl.constexpr):
    """The same for the inputs x [rows, K], once for every tile."""
    SLOTS: gl.constexpr = xs.shape[0]
    MP: gl.constexpr = xs.shape[1] // 2
    KB: gl.constexpr = xs.shape[2]
    RUNS: gl.constexpr = 1 if GATED else 2
    _, _, tiles = _share(N, HALF)
    for _ in range(tiles):
        for k in range(0, x.shape[1], RUNS * KB):
            slot = step % SLOTS
            hopper.mbarrier.wait(free.index(slot), ((step // SLOTS) & 1) ^ 1)
            hopper.mbarrier.expect(ready.index(slot), RUNS * MP * KB * 2)
            for run in gl.static_range(RUNS):
                to = xs.index(slot).slice(run * MP, MP)
                copy_block(x, [0, k + run * KB], ready.index(slot), to)
            step += 1
    return step


@gluon.jit
def _wait_for_inputs(counter_p, goal):
    """Waits until bulk copies, which are of another proxy, see what all programs stored. One warp."""
    _wait_for_all(counter_p, goal)
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    fence: gl.constexpr = "fence.proxy.async; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(fence, "=r,r", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _stream_inputs(attended, scaled, gated, counters_p, N, xs, ready, free, HALF: gl.constexpr):
    """The second producer, one warp: the inputs of each layer, once all programs have written them."""
    _wait_for_previous()
    dim, ffn = scaled.shape[1], gated.shape[1]
    # One goal for all three counters. Our own arrival comes later: it needs the inputs below, and every
    # program has outputs.
    goal = _goal(counters_p, gl.num_programs(0))
    step = _stream_input_of(attended, xs, ready, free, gl.to_tensor(0), dim, HALF, False)
    _wait_for_inputs(counters_p, goal)
    step = _stream_input_of(scaled, xs, ready, free, step, ffn, HALF, True)
    _wait_for_inputs(counters_p + 1, goal)
    step = _stream_input_of(gated, xs, ready, free, step, dim, HALF, False)
    _wait_for_inputs(counters_p + 2, goal)
    _stream_input_of(scaled, xs, ready, free, step, N, HALF, False)


@gluon.jit
def _halves_product(ring, xs, ready, free, step, K, GATED: gl.constexpr, OUT: gl.constexpr):
    """Both halves of the weight rows in the ring, from `step` on, times the inputs: [HALF, MP] each, and the
    step after. Gate and up, or of other layers two sums over alternate runs of the inputs, to be added."""
    SLOTS: gl.constexpr = ring.shape[0]
    HALF: gl.constexpr = ring.shape[1] // 2
    MP: gl.constexpr = xs.shape[1] // 2
    WIDTH: gl.constexpr = MP if GATED else 2 * MP
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.full([2 * HALF, WIDTH], 0.0, gl.float32, ACC)
    for i in range(gl.cdiv(K, ring.shape[2] if GATED else 2 * ring.shape[2])):
        slot = step % SLOTS
        hopper.mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
        x = xs.index(slot).slice(0, WIDTH).permute((1, 0))
        acc = hopper.warpgroup_mma(ring.index(slot), x, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        barrier()  # the product before this one is done in all four warps: they give its slot back
        hopper.mbarrier.arrive(free.index((step + SLOTS - 1) % SLOTS), pred=i > 0)
        step += 1
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    barrier()
    hopper.mbarrier.arrive(free.index((step + SLOTS - 1) % SLOTS))
    if GATED:
        a, b = gl.split(gl.permute(gl.reshape(acc, [HALF // 8, 2, 8, MP]), (0, 2, 3, 1)))
    else:  # both halves of the rows met both runs of the inputs: keep each with its own
        acc = gl.permute(gl.reshape(acc, [HALF // 8, 2, 8, 2, MP]), (0, 2, 4, 1, 3))
        first, second = gl.split(acc)
        a, b = gl.split(first)[0], gl.split(second)[1]
    a = gl.convert_layout(gl.reshape(a, [HALF, MP]), OUT, assert_trivial=True)
    b = gl.convert_layout(gl.reshape(b, [HALF, MP]), OUT, assert_trivial=True)
    return a, b, step


@gluon.jit
def _outputs(n, end, rows, N, OUT: gl.constexpr, HALF: gl.constexpr, MP: gl.constexpr):
    """A tile's outputs, from n up to `end`, for MP rows: which [HALF], which exist there, their places
    [HALF, MP] in [rows, N], and which of these exist."""
    n += gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, OUT))
    inside = n < gl.minimum(end, N)
    return n, inside, m[None, :] * N + n[:, None], inside[:, None] & (m < rows)[None, :]


@gluon.jit
def _add_bias(out, bias_p, n, inside):
    if bias_p is not None:
        out += gl.load(bias_p + n, mask=inside, other=0.0).to(gl.float32)[:, None]
    return out


@gluon.jit
def _residual_layer(
    ring, xs, ready, free, step, K, bias_p, residual_p, norm_p, x_p, scaled_p, squares_p, rows, N,
    OUT: gl.constexpr,
):  # fmt: skip
    """x = residual + W y + b; and for the RMSNorm after it `scaled`, x times the norm's weight, and this
    program's part of each row's sum of squares: the next layer divides its product by the norm."""
    HALF: gl.constexpr = ring.shape[1] // 2
    MP: gl.constexpr = xs.shape[1] // 2
    first, count, tiles = _share(N, HALF)
    squares = gl.full([MP], 0.0, gl.float32, gl.SliceLayout(0, OUT))
    for i in range(tiles):
        start, end = _tile(first, count, tiles, i)
        n, inside, at, real = _outputs(start, end, rows, N, OUT, HALF, MP)
        norm = gl.load(norm_p + n, mask=inside, other=0.0).to(gl.float32)
        residual = gl.load(residual_p + at, mask=real, other=0.0).to(gl.float32)
        a, b, step = _halves_product(ring, xs, ready, free, step, K, False, OUT)
        x = (_add_bias(a + b, bias_p, n, inside) + residual).to(x_p.dtype.element_ty)
        gl.store(x_p + at, x, mask=real)
        x = x.to(gl.float32)
        gl.store(scaled_p + at, (x * norm[:, None]).to(scaled_p.dtype.element_ty), mask=real)
        squares += gl.sum(x * x, 0)
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, OUT))
    gl.store(squares_p + gl.program_id(0) * MP + m, squares)
    return step


@gluon.jit
def _inverse_norm(squares_p, K, eps, PP: gl.constexpr, MP: gl.constexpr, OUT: gl.constexpr):
    """1 / rms [MP] of each row, from the sums of squares [programs, MP]."""
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // MP, MP // 4], [4, 1], [1, 0])
    program = gl.arange(0, PP, layout=gl.SliceLayout(1, SQUARES))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, SQUARES))
    at = squares_p + program[:, None] * MP + m[None, :]
    mask = (program < gl.num_programs(0))[:, None]
    # Not from L1, which does not see what other programs write.
    squares = gl.sum(gl.load(at, mask=mask, other=0.0, cache_modifier=".cg"), 0)
    return gl.convert_layout(gl.rsqrt(squares / K + eps), gl.SliceLayout(0, OUT))


@gluon.jit
def _normed_layer(
    ring, xs, ready, free, step, K, bias_p, squares_p, eps, out_p, rows, N,
    GATED: gl.constexpr, PP: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """W norm(x) + b, or of gate and up silu(gate) * up."""
    HALF: gl.constexpr = ring.shape[1] // 2
    MP: gl.constexpr = xs.shape[1] // 2
    first, count, tiles = _share(N, HALF)
    norm = gl.full([MP], 0.0, gl.float32, gl.SliceLayout(0, OUT))
    for i in range(tiles):
        start, end = _tile(first, count, tiles, i)
        a, b, step = _halves_product(ring, xs, ready, free, step, K, GATED, OUT)
        if i == 0:
            norm = _inverse_norm(squares_p, K, eps, PP, MP, OUT)
        n, inside, at, real = _outputs(start, end, rows, N, OUT, HALF, MP)
        if GATED:
            gate = _add_bias(a * norm[None, :], bias_p, n, inside)
            up = _add_bias(b * norm[None, :], bias_p, N + n, inside)
            out = gate / (1 + gl.exp(-gate)) * up
        else:
            out = _add_bias((a + b) * norm[None, :], bias_p, n, inside)
        gl.store(out_p + at, out.to(out_p.dtype.element_ty), mask=real)
    return step


@gluon.jit
def _multiply(
    ring, xs, ready, free, residual_p, wo_bias_p, norm_p, w13_bias_p, w2_bias_p, next_norm_p, bias_p, sum_p,
    scaled_p, squares_p, gated_p, x_p, out_p, counters_p, rows, heads_dim, dim, ffn, N, eps, next_eps,
    PP: gl.constexpr,
):  # fmt: skip
    """The consumer, four warps: a layer after the other."""
    _wait_for_previous()
    OUT: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    step = _residual_layer(
        ring, xs, ready, free, gl.to_tensor(0), heads_dim, wo_bias_p, residual_p, norm_p, sum_p, scaled_p,
        squares_p, rows, dim, OUT,
    )  # fmt: skip
    _arrive(counters_p)
    step = _normed_layer(
        ring, xs, ready, free, step, dim, w13_bias_p, squares_p, eps, gated_p, rows, ffn, True, PP, OUT
    )
    _arrive(counters_p + 1)
    step = _residual_layer(
        ring, xs, ready, free, step, ffn, w2_bias_p, sum_p, next_norm_p, x_p, scaled_p,
        squares_p, rows, dim, OUT,
    )  # fmt: skip
    _arrive(counters_p + 2)
    _normed_layer(
        ring, xs, ready, free, step, dim, bias_p, squares_p, next_eps, out_p, rows, N, False, PP, OUT
    )


@gluon.jit
def _linear_chain_kernel(
    wo, w13, w2, w, attended, scaled, gated, residual_p, wo_bias_p, norm_p, w13_bias_p, w2_bias_p,
    next_norm_p, bias_p, sum_p, scaled_p, squares_p, gated_p, x_p, out_p, counters_p, rows, eps, next_eps,
    MP: gl.constexpr, HALF: gl.constexpr, SLOTS: gl.constexpr, PP: gl.constexpr,
):  # fmt: skip
    # Every program has a share of each layer's outputs, over all inputs. A warp streams their weights through
    # the slots of a ring, and on into the next layer's while the programs wait for one another in between:
    # the memory never rests. A slot has two halves of HALF weight rows: of w13 gate and up, of the others,
    # of which a program has fewer, the same outputs over two runs of inputs. The halves take turns of eight
    # rows, so that a thread has both of an output. MP and PP are rows and programs, padded.
    KB: gl.constexpr = wo.block_shape[1]
    dim, heads_dim, ffn, N = wo.shape[0], wo.shape[1], w2.shape[1], w.shape[0]
    ring = gl.allocate_shared_memory(wo.dtype, [SLOTS, 2 * HALF, KB], wo.layout)
    xs = gl.allocate_shared_memory(wo.dtype, [SLOTS, 2 * MP, KB], attended.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(ready.index(slot), count=2)  # both producers
        hopper.mbarrier.init(free.index(slot), count=1)
    hopper.fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_multiply, (ring, xs, ready, free, residual_p, wo_bias_p, norm_p, w13_bias_p, w2_bias_p,
                         next_norm_p, bias_p, sum_p, scaled_p, squares_p, gated_p, x_p, out_p, counters_p,
                         rows, heads_dim, dim, ffn, N, eps, next_eps, PP)),
            (_stream_weights, (wo, w13, w2, w, ring, ready, free)),
            (_stream_inputs, (attended, scaled, gated, counters_p, N, xs, ready, free, HALF)),
        ],
        [1, 1],  # warps, beside the four of the first
        [40, 40],  # registers a thread
    )  # fmt: skip


@functools.cache
def _chain_counters(device: torch.device, programs: int) -> Tensor:
    """Arrivals of so many programs at each of a chain's three grid-wide barriers, over all launches."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def _chain_results(attended, x, weights, biases, norms, eps):
    return torch.empty_like(x), x.new_empty(len(x), len(weights[3]))


@operator(_chain_results)
def linear_chain(
    attended: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], norms: list[Tensor],
    eps: list[float]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The linear layers from one attention to the next, for a few rows, in one launch: x' = x + W_o attended,
    x'' = x' + W_2 SwiGLU(W_13 norm(x')) (arXiv 2002.05202, RMSNorm 1910.07467), W norm(x'').

    attended [rows, heads * D] and x [rows, dim] of at most CHAIN_ROWS rows in bf16; weights: W_o
    [dim, heads * D], W_13 [2 ffn, dim], gate first, W_2 [dim, ffn], and W [N, dim], the next layer's W_qkv or
    the logits'; biases: of each, or None; norms and eps: weight [dim] and epsilon of the RMSNorm before W_13
    and of that before W -> x'' [rows, dim], and W norm(x'') + b [rows, N]. heads * D, dim and ffn are
    multiples of 8 (bulk copies take rows of whole 16 bytes); ValueError for what does not fit.

    A few rows cost what the weights' bytes cost. Layer by layer, each launch would begin and end with some
    3 us in which little is read; here all programs run through all layers, and wait for one another between
    them with the next weights on their way. The first ones are read while the kernel before still runs, which
    must not write them (see overlapped). The first call on a device must not be in a capture. Truth:
    model.decode_layer."""
    listed = [len(each) for each in (weights, biases, norms, eps)]
    need(listed == [4, 4, 2, 2], f"4 weights and biases, 2 norms and epsilons, not {listed}")
    matrices = all(each.ndim == 2 for each in (x, *weights))
    need(matrices and len(x), f"x and weights must be matrices: {[list(t.shape) for t in (x, *weights)]}")
    wo, w13, w2, w = weights
    (rows, dim), heads_dim, ffn, N = x.shape, wo.shape[1], w2.shape[1], len(w)
    dtype, names = x.dtype, ("wo", "w13", "w2", "w")
    sizes = ((dim, heads_dim), (2 * ffn, dim), (dim, ffn), (N, dim))
    copied = {"attended": (attended, dtype, rows, heads_dim)}
    copied |= {name: (each, dtype, *size) for name, each, size in zip(names, weights, sizes, strict=True)}
    given = {f"bias of {name}": (b, dtype, n) for name, b, (n, _) in zip(names, biases, sizes, strict=True)}
    given |= {name: (norm, dtype, dim) for name, norm in zip(("norm", "next norm"), norms, strict=True)}
    check(x=(x, dtype, rows, dim), **copied, **given)
    for name, (tensor, *_) in copied.items():
        need(aligned(tensor), f"{name} must start at a multiple of 16 bytes")
    need(
        chains_linears(x, heads_dim, dim, ffn),
        f"at most {CHAIN_ROWS} rows in bfloat16, of multiples of 8, on a Hopper GPU: not {dtype} "
        f"{list(x.shape)} on {x.device}, with layers of {heads_dim} and {ffn} inputs",
    )
    device = torch.cuda.get_device_properties(x.device)
    # Every program must have outputs of the layers that end in x (see _stream_inputs).
    programs = min(device.multi_processor_count, dim // 8)
    MP, HALF, KB = 8 if rows <= 8 else 16, 32, 128
    spare = 2048  # of shared memory, for barriers and sums over warps
    SLOTS = (device.shared_memory_per_block_optin - spare) // (2 * (HALF + MP) * KB * 2)
    kw = {"dtype": x.dtype, "device": x.device}
    total, scaled, out_x = (torch.empty(rows, dim, **kw) for _ in range(3))
    gated, out = torch.empty(rows, ffn, **kw), torch.empty(rows, N, **kw)
    squares = torch.empty(programs, MP, dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    blocks = [TensorDescriptor.from_tensor(weight, [8, KB], layout) for weight in weights]
    blocks += [TensorDescriptor.from_tensor(t, [MP, KB], layout) for t in (attended, scaled, gated)]
    _linear_chain_kernel[programs,](
        *blocks, x, biases[0], norms[0], biases[1], biases[2], norms[1], biases[3], total, scaled, squares,
        gated, out_x, out, _chain_counters(x.device, programs), rows, *eps, MP, HALF, SLOTS, power2(programs),
        num_warps=4, launch_cooperative_grid=True, **overlapped(x.device),
    )  # fmt: skip
    return out_x, out


def chains_linears(x: Tensor, *inputs: int) -> bool:
    """Whether `linear_chain` serves rows x in layers of so many inputs. Not in fp16, which may not hold x
    before it is normed, nor in fp32, which tensor cores do not multiply exactly."""
    fits = len(x) <= CHAIN_ROWS and x.dtype == torch.bfloat16 and all(K % 8 == 0 for K in inputs)
    return fits and on_hopper(x.device)


if __name__ == "__main__":
    kernels.main(sys.modules[__name__])
