"""What Gluon does faster than Triton on Hopper GPUs (H100, H200): attention over chosen latents
(SALS), and `linear_chain`.

Gluon is the level below Triton: a kernel chooses its layouts, shared memory, barriers and groups of
warps. generate.py imports this file on such a GPU. Its last line registers attend_latents with
kernels.py, whose launcher then asks it first, and the engine takes `chained_decode` for its decode
step. This file is optional: delete it and everything still runs.
"""

import functools
import math
import os
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import kernels
from kernels import SMS, _half_at, _key_divisor, _wait_for_previous

# Names that changed after triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_rows = (
    getattr(ampere.async_copy, "async_load", None) or ampere.async_copy.async_copy_global_to_shared
)
copy_block = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared

operator = functools.partial(kernels.operator, library="kv_hopper")


def aligned(*tensors: Tensor) -> bool:
    """Whether bulk copies take the tensors: whole ones that begin at multiples of 16 bytes."""
    return all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors)


@gluon.jit
def _ring_barriers(SLOTS: gl.constexpr, COUNTS):
    """Barriers for each slot of a ring, of COUNTS arrivals: ready, of producers; free, of
    consumers."""
    made = ()
    for _ in gl.static_range(len(COUNTS)):
        made += (gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout()),)
    for slot in gl.static_range(SLOTS):
        for i in gl.static_range(len(COUNTS)):
            hopper.mbarrier.init(made[i].index(slot), count=COUNTS[i])
    hopper.fence_async_shared()
    barrier()
    return made


# ---------------------------------------------------------- attention over compressed tokens (SALS)


def attend_latents(
    q: Tensor,
    latent: Tensor,
    latent_scale: Tensor | None,
    int4_dims: Tensor | None,
    basis: Tensor,
    basis_scale: Tensor | None,
    bias: Tensor | None,
    rope: Tensor,
    v: Tensor,
    v_scale: Tensor | None,
    bits: int,
    pos: Tensor,
    index: Tensor | None,
    exact: Sequence[Tensor],
    scale: float,
) -> Tensor | None:
    """kernels.launch_attend_latents, of arguments that it has checked, where a kernel here makes
    the logits faster: those of chosen keys, rebuilt from latents that all heads share. Else
    None."""
    if index is None or index.ndim > 2:
        return None
    _, Hq, D = q.shape
    Hkv = v.shape[1]
    is_shared = latent.stride(1) == 0 or Hkv == 1
    width = 0 if int4_dims is None else int4_dims.shape[3]
    itemsize = kernels.tile_itemsize(q.dtype, latent)
    fits = streams_basis(q.device, *index.shape, Hq, Hkv, D, latent.shape[3], width, itemsize)
    if not (is_shared and fits and aligned(latent[:, 0], basis)):
        return None
    words = rope.view(torch.int32)
    logits = _streamed_logits(
        q, index, latent, latent_scale, int4_dims, basis, basis_scale, bias, words
    )
    return kernels.launch_attend_logits(q, logits, v, v_scale, bits, pos, index, exact, scale)


@gluon.jit
def _stream_basis(basis, ring, ready, free, first, stop, Hkv, CHUNKS: gl.constexpr):
    """The producer, one warp: copies the basis of head after head into the ring, as its slots
    become free."""
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
def _tile_rows(index_p, index_step, start, B, n, S, T: gl.constexpr, LAYOUT: gl.constexpr):
    """Which vectors, of S a row, hold the tokens of T places in line from `start` on. Dead slots
    read token 0, which is always written: no masks on the tiles, and no NaN."""
    line = start + gl.arange(0, T, layout=LAYOUT)
    token = gl.load(index_p + line // n * index_step + line % n, mask=line < B * n, other=0)
    return gl.minimum(line // n, B - 1).to(gl.int64) * S + gl.maximum(token, 0)


@gluon.jit
def _unpack(packed):
    """The levels of the two codes of each byte (kernels.four_bit_level) in int8, four bytes at a
    time: bits 5 to 3 are the code's last three, bit 2 is set, and the upper two are what its first
    bit is not."""
    ptx: gl.constexpr = """{ .reg .b32 low, high;
        shl.b32 low, $2, 3; lop3.b32 low, low, 0x78787878, 0x44444444, 0x6A;
        shr.b32 high, $2, 1; lop3.b32 high, high, 0x78787878, 0x44444444, 0x6A;
        shl.b32 $0, low, 1; lop3.b32 $0, $0, 0x80808080, low, 0xEA;
        shl.b32 $1, high, 1; lop3.b32 $1, $1, 0x80808080, high, 0xEA; }"""
    return gl.inline_asm_elementwise(
        ptx, "=&r,=&r,r", [packed], (gl.int8, gl.int8), is_pure=True, pack=4
    )


@gluon.jit
def _tile_logits(HALF: gl.constexpr, G: gl.constexpr, RESTS: gl.constexpr, both):
    """A consumer, four warps: the logits of its half of every tile. RESTS: chunks of bytes of two
    codes.
    both: what the two consumers share."""
    _wait_for_previous()
    (
        latents,
        queries,
        ring,
        ready,
        free,
        first,
        stop,
        q_p,
        index_p,
        index_step,
        latent_p,
        latent_scale_p,
        rest_p,
        basis_scale_p,
        bias_p,
        rope_p,
        logits_p,
        B,
        n,
        S,
        Hkv,
    ) = both
    SLOTS: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[1]
    KB: gl.constexpr = ring.shape[2]
    CHUNKS: gl.constexpr = latents.shape[0] // 2
    LEADS: gl.constexpr = CHUNKS - 2 * RESTS
    T: gl.constexpr = latents.shape[1]
    NC: gl.constexpr = queries.shape[1]
    ITEM: gl.constexpr = latents.dtype.primitive_bitwidth // 8
    INT8: gl.constexpr = latent_scale_p is not None
    dtype: gl.constexpr = queries.dtype
    KEY_DIVISOR: gl.constexpr = _key_divisor(dtype)
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 // ITEM])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, NC])
    LANES: gl.constexpr = KB * ITEM // 16  # of a chunk of a token
    COPY: gl.constexpr = gl.BlockedLayout([1, 16 // ITEM], [32 // LANES, LANES], [4, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [4, 1], [1, 0])
    # The basis has its RoPE pairs side by side, so the halves of a pair lie in one thread.
    of_pairs, _ = gl.split(gl.reshape(gl.full([T, D], 0, gl.int32, KEYS), [T, D // 2, 2]))
    PAIRS: gl.constexpr = of_pairs.type.layout
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, PAIRS))
    kb = gl.arange(0, KB, layout=gl.SliceLayout(0, COPY))
    wide = gl.arange(0, D, layout=gl.SliceLayout(0, QUERY))
    dim = wide // 2 + (wide % 2) * (D // 2)
    column = gl.arange(0, NC, layout=gl.SliceLayout(1, QUERY))  # of a row of the batch G queries
    column_of_logit = gl.arange(0, NC, layout=gl.SliceLayout(0, LOGITS))[None, :]
    column_of_key = gl.arange(0, D, layout=gl.SliceLayout(0, KEYS))
    chunk = 0
    for tile in range(first // Hkv, gl.cdiv(stop, Hkv)):
        start = (tile * 2 + HALF) * T
        first_row = start // n
        stored = _tile_rows(index_p, index_step, start, B, n, S, T, gl.SliceLayout(1, COPY))
        latent_row = latent_p + stored[:, None] * (LEADS * KB)
        for j in gl.static_range(LEADS):
            copy_rows(latents.index(HALF * CHUNKS + j), latent_row + (j * KB + kb)[None, :])
        ampere.async_copy.commit_group()
        packed = ()
        for j in gl.static_range(RESTS):
            packed += (gl.load(rest_p + stored[:, None] * (RESTS * KB) + (j * KB + kb)[None, :]),)
        position = _tile_rows(index_p, index_step, start, B, n, S, T, gl.SliceLayout(1, PAIRS)) % S
        words = gl.load(rope_p + position[:, None] * (D // 2) + pair[None, :])
        if INT8:
            scaled = _tile_rows(index_p, index_step, start, B, n, S, T, gl.SliceLayout(1, KEYS))
            token_scale = gl.load(latent_scale_p + scaled) / KEY_DIVISOR
        for j in gl.static_range(RESTS):  # once all loads are on their way
            low, high = _unpack(packed[j])
            latents.index(HALF * CHUNKS + LEADS + j).store(low)
            latents.index(HALF * CHUNKS + LEADS + RESTS + j).store(high)
        cos, sin = _half_at(words, 0), _half_at(words, 16)
        line = start + gl.arange(0, T, layout=gl.SliceLayout(1, LOGITS))
        row = line // n
        to = (row.to(gl.int64) * (Hkv * G * n) + (line - row * n))[
            :, None
        ] + column_of_logit % G * n
        mine = (line < B * n)[:, None] & ((row - first_row)[:, None] == column_of_logit // G)
        query_row = first_row + column // G
        real = query_row <= (gl.minimum(start + T, B * n) - 1) // n
        query_p = (
            q_p + (query_row.to(gl.int64) * (Hkv * G) + column % G)[:, None] * D + dim[None, :]
        )
        ampere.async_copy.wait_group(0)
        hopper.fence_async_shared()
        barrier()
        for unit in range(gl.maximum(first, tile * Hkv), gl.minimum(stop, (tile + 1) * Hkv)):
            head = unit - tile * Hkv
            query = gl.load(query_p + head * (G * D), mask=real[:, None], other=0.0)
            # Keys [T, D]: latents times the head's basis, whose chunks in the ring begin with
            # `chunk`.
            k = gl.full([T, D], 0, gl.int32 if INT8 else gl.float32, KEYS)
            for j in gl.static_range(CHUNKS):
                slot = (chunk + j) % SLOTS
                hopper.mbarrier.wait(ready.index(slot), ((chunk + j) // SLOTS) & 1)
                left, right = latents.index(HALF * CHUNKS + j), ring.index(slot).permute((1, 0))
                k = hopper.warpgroup_mma(left, right, k, use_acc=j > 0, is_async=True)
                # the product before this one is done in all four warps: they give its slot back
                if j > 0:
                    k = hopper.warpgroup_mma_wait(1, deps=[k])
                    barrier()
                    hopper.mbarrier.arrive(free.index((chunk + j - 1) % SLOTS))
            if INT8:
                pair_scale = gl.load(basis_scale_p + head * D + wide) * KEY_DIVISOR
                query = (query * pair_scale[None, :]).to(dtype)
            queries.index(HALF).store(query)
            chunk += CHUNKS
            k = hopper.warpgroup_mma_wait(0, deps=[k])
            barrier()
            hopper.mbarrier.arrive(free.index((chunk - 1) % SLOTS))
            # From here on the other consumer has the tensor cores, but for a small product with the
            # query.
            if INT8:
                k = k.to(gl.float32) * token_scale[:, None]
            if bias_p is not None:
                k += (gl.load(bias_p + head * D + column_of_key) / (KEY_DIVISOR if INT8 else 1.0))[
                    None, :
                ]
            a, c = gl.split(gl.reshape(k, [T, D // 2, 2]))
            rotated = gl.reshape(gl.join(a * cos - c * sin, c * cos + a * sin), [T, D]).to(dtype)
            left = gl.convert_layout(
                rotated, gl.DotOperandLayout(0, LOGITS, 2), assert_trivial=True
            )
            right = queries.index(HALF).permute((1, 0)).load(gl.DotOperandLayout(1, LOGITS, 2))
            logits = hopper.mma_v2(left, right, gl.full([T, NC], 0.0, gl.float32, LOGITS))
            gl.store(logits_p + to + head * (G * n), logits, mask=mine)


@gluon.jit
def _streamed_logits_kernel(
    q_p,  # [B, Hkv, G, D]
    index_p,  # [B, n] int32, -1: none; rows of index_step numbers
    index_step,
    latent_p,  # [B, S, KB LEADS]
    latent_scale_p,  # [B, S] fp32, or None
    rest_p,  # [B, S, KB RESTS] uint8, or None
    basis,  # [Hkv * D, r], in blocks [D, KB]
    basis_scale_p,  # [Hkv, D] fp32, or None
    bias_p,  # [Hkv, D] fp32, or None
    rope_p,  # [>= S, D / 2] words of rope_pairs
    logits_p,  # [B, Hkv, G, n] fp32
    B,
    n,
    S,
    Hkv,
    G: gl.constexpr,
    T: gl.constexpr,
    NC: gl.constexpr,
    CHUNKS: gl.constexpr,
    RESTS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Tiles of all rows times heads are one line of units, of which every program takes an equal
    run. The latents of a tile stay in shared memory, a warp streams the basis past them by bulk
    copies, and of two consumers, each of T tokens, one can multiply while the other rotates. NC:
    columns of queries, padded."""
    D: gl.constexpr = basis.block_shape[0]
    KB: gl.constexpr = basis.block_shape[1]
    pid, programs = gl.program_id(0), gl.num_programs(0)
    units = gl.cdiv(B * n, 2 * T).to(gl.int64) * Hkv
    first, stop = (
        (pid * units // programs).to(gl.int32),
        ((pid + 1) * units // programs).to(gl.int32),
    )
    latents = gl.allocate_shared_memory(basis.dtype, [2 * CHUNKS, T, KB], basis.layout)
    ring = gl.allocate_shared_memory(basis.dtype, [SLOTS, D, KB], basis.layout)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    queries = gl.allocate_shared_memory(q_p.dtype.element_ty, [2, NC, D], SWIZZLED)
    ready, free = _ring_barriers(SLOTS, (1, 2))
    both = (
        latents,
        queries,
        ring,
        ready,
        free,
        first,
        stop,
        q_p,
        index_p,
        index_step,
        latent_p,
        latent_scale_p,
        rest_p,
        basis_scale_p,
        bias_p,
        rope_p,
        logits_p,
        B,
        n,
        S,
        Hkv,
    )
    gl.warp_specialize(
        [
            (_tile_logits, (gl.constexpr(0), gl.constexpr(G), gl.constexpr(RESTS), both)),
            (_tile_logits, (gl.constexpr(1), gl.constexpr(G), gl.constexpr(RESTS), both)),
            (_stream_basis, (basis, ring, ready, free, first, stop, Hkv, CHUNKS)),
        ],
        [4, 1],  # warps, beside the four of the first
        [200, 24],  # registers a thread
    )


def _streamed_logits(
    q, index, latent, latent_scale, rest, basis, basis_scale, bias, words
) -> Tensor:
    """q . k [B, Hkv, G, n] of chosen tokens, from the stores of keys in latents of all heads."""
    B, Hq, D = q.shape
    _, Hkv, S, lead = latent.shape
    n = index.shape[1]
    r = basis.shape[2]
    width = 0 if rest is None else rest.shape[3]
    G = Hq // Hkv
    T = 64  # tokens of a consumer
    NC = 8  # columns of queries
    itemsize = latent.element_size()
    chunk = math.gcd(128, lead * itemsize, width)  # bytes; both parts of a latent are whole chunks
    KB = chunk // itemsize
    SLOTS = 512 // chunk
    layout = gl.NVMMASharedLayout(chunk, 8 * itemsize, 2)
    chunks = TensorDescriptor.from_tensor(basis.view(Hkv * D, r), [D, KB], layout)
    logits = torch.empty(B, Hkv, G, n, dtype=torch.float32, device=q.device)
    _streamed_logits_kernel[min(kernels.cdiv(B * n, 2 * T) * Hkv, SMS),](
        q,
        index,
        index.stride(0),
        latent,
        latent_scale,
        rest,
        chunks,
        basis_scale,
        bias,
        words,
        logits,
        B,
        n,
        S,
        Hkv,
        G,
        T,
        NC,
        r // KB,
        width // KB,
        SLOTS,
        num_warps=4,
        **kernels.overlapped(q.device),
    )
    return logits


def streams_basis(
    device: torch.device,
    B: int,
    n: int,
    Hq: int,
    Hkv: int,
    D: int,
    r: int,
    width: int,
    itemsize: int,
) -> bool:
    """Whether _streamed_logits_kernel makes the logits: latents are of r dims in 8 or 16 bits, and
    `width` bytes of two dims each, in whole chunks of 64 bytes, and shared memory holds 128 of
    them; heads have 64 or 128 dims; 64 tokens in line have 8 queries of a KV head at most; and, for
    speed, no program is idle."""
    chunks = (
        itemsize < 4
        and math.gcd(64, r * itemsize, width) == 64
        and r * itemsize + 2 * width <= 1024
    )
    # of the rows of the batch that 64 tokens span at most
    queries = ((62 + n) // n + 1) * (Hq // Hkv)
    fits = chunks and D in (64, 128) and queries <= 8 and kernels.cdiv(B * n, 128) * Hkv >= SMS
    return fits and kernels.nvidia_generation(device) == 9


# --------------------------------------------------------- the linear layers between two attentions

CHAIN_ROWS = 16  # at most; padded to 8 or 16, the narrow side of wgmma
OUT = gl.constexpr(gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0]))  # of outputs [HALF, MP]


@gluon.jit
def _share(N, HALF: gl.constexpr):
    """This program's outputs of N, in whole eights (the rows after which the swizzle of shared
    memory repeats): the first, how many, and in how many tiles of HALF at most."""
    eights, pid = gl.cdiv(N, 8), gl.program_id(0).to(gl.int64)
    first = (eights * pid // gl.num_programs(0)).to(gl.int32)
    count = (eights * (pid + 1) // gl.num_programs(0)).to(gl.int32) - first
    return first, count, gl.cdiv(count * 8, HALF)


@gluon.jit
def _tile(first, count, tiles, i):
    """The outputs of a tile: from, and up to; of like size, so that no slots of the ring are nearly
    empty."""
    return (first + count * i // tiles) * 8, (first + count * (i + 1) // tiles) * 8


@gluon.jit
def _stream_weights_of(weight, ring, ready, free, step, N, GATED: gl.constexpr):
    """Copies this program's weights, tile by tile, into the ring from `step` on; returns the next
    step."""
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
                # Rows past the tile are another's: ask for rows past the matrix, zeros that are not
                # read.
                row = gl.where(n + j < end, n + j, weight.shape[0])
                copy_block(weight, [row, k], ready.index(slot), ring.index(slot).slice(2 * j, 8))
                row += N if GATED else 0
                copy_block(
                    weight,
                    [row, k + LATER],
                    ready.index(slot),
                    ring.index(slot).slice(2 * j + 8, 8),
                )
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
    """Copies the inputs x [rows, K] likewise, once for every tile."""
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
def _arrive(counter_p):
    barrier()  # the stores of all warps come before the release
    gl.atomic_add(counter_p, 1, sem="release", scope="gpu")


@gluon.jit
def _wait_for_inputs(counter_p, goal):
    """Waits until the counter is at `goal`. Bulk copies of this warp then see what all programs
    stored."""
    # 0 is added by a load of one thread, whose acquisition the others share past its barrier.
    while gl.atomic_add(counter_p, 0, sem="acquire", scope="gpu") < goal:
        pass
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    fence: gl.constexpr = "fence.proxy.async; mov.b32 $0, $1;"  # bulk copies are of another proxy
    gl.inline_asm_elementwise(fence, "=r,r", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _stream_inputs(attended, scaled, gated, counters_p, N, xs, ready, free, HALF: gl.constexpr):
    """The second producer, one warp: the inputs of each layer, once all programs have written
    them."""
    _wait_for_previous()
    dim, ffn = scaled.shape[1], gated.shape[1]
    # What all three counters are once all programs have arrived. Between launches a counter is a
    # multiple of their number, and it stays below the next one until we arrive ourselves, which
    # needs the inputs below.
    goal = (gl.load(counters_p, volatile=True) // gl.num_programs(0) + 1) * gl.num_programs(0)
    step = _stream_input_of(attended, xs, ready, free, gl.to_tensor(0), dim, HALF, False)
    _wait_for_inputs(counters_p, goal)
    step = _stream_input_of(scaled, xs, ready, free, step, ffn, HALF, True)
    _wait_for_inputs(counters_p + 1, goal)
    step = _stream_input_of(gated, xs, ready, free, step, dim, HALF, False)
    _wait_for_inputs(counters_p + 2, goal)
    _stream_input_of(scaled, xs, ready, free, step, N, HALF, False)


@gluon.jit
def _halves_product(ring, xs, ready, free, step, K, GATED: gl.constexpr):
    """The products [HALF, MP] of both halves of the weight rows, from `step` on, and the step after
    them."""
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
def _outputs(n, end, rows, N, HALF: gl.constexpr, MP: gl.constexpr):
    """A tile's outputs, from n up to `end`, for MP rows: which [HALF], which exist there, their
    places [HALF, MP] in [rows, N], and which of these exist."""
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
def _sum_over_ranks(part, n, inside, place, N, shared_p, RANK: gl.constexpr, RANKS: gl.constexpr):
    """The sum of all ranks' parts [HALF, MP] of outputs n. A rank's memory is fp32
    [2 places, RANKS, N, MP], the parts that it got, and int64 [programs, RANKS], how many of a
    program have come from each rank."""
    MP: gl.constexpr = part.shape[1]
    at = n[:, None] * MP + gl.arange(0, MP, layout=gl.SliceLayout(0, OUT))[None, :]
    counts = RANKS * N * MP + gl.program_id(0) * RANKS  # from the memory's start on, 8 bytes each
    for r in gl.static_range(RANKS):
        parts_p = gl.load(shared_p + r).to(gl.pointer_type(gl.float32), bitcast=True)
        gl.store(parts_p + (place * RANKS + RANK) * N * MP + at, part, mask=inside[:, None])
    barrier()  # the stores of all warps come before the releases
    for r in gl.static_range(RANKS):
        counts_p = gl.load(shared_p + r).to(gl.pointer_type(gl.int64), bitcast=True) + counts
        gl.atomic_add(counts_p + RANK, 1, sem="release", scope="sys")
    parts_p = gl.load(shared_p + RANK).to(gl.pointer_type(gl.float32), bitcast=True)
    counts_p = gl.load(shared_p + RANK).to(gl.pointer_type(gl.int64), bitcast=True) + counts
    goal = gl.atomic_add(counts_p + RANK, 0, sem="acquire", scope="sys")
    total = gl.full(part.shape, 0.0, gl.float32, OUT)
    for r in gl.static_range(RANKS):  # in one order: all ranks have the same sum
        while gl.atomic_add(counts_p + r, 0, sem="acquire", scope="sys") < goal:
            pass
        of_rank = parts_p + (place * RANKS + r) * N * MP + at
        total += gl.load(of_rank, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _residual_layer(
    ring,
    xs,
    ready,
    free,
    step,
    K,  # inputs of an output
    bias_p,  # [N], or None
    residual_p,  # [rows, N]
    norm_p,  # [N]
    x_p,  # [rows, N]
    scaled_p,  # [rows, N]
    squares_p,  # [programs, MP] fp32
    rows,
    N,  # outputs
    place,
    shared_p,  # [RANKS] int64, or None
    RANK: gl.constexpr,
    RANKS: gl.constexpr,
):
    """x = residual + W y + b, W y + b summed over the ranks. Of the RMSNorm after it: `scaled`, x
    times the norm's weight, and this program's part of each row's sum of squares, by which the next
    layer scales its product. place: 0 and 1 in turn. Who has got the others' parts there knows that
    they have read all of the place before, which so is free again."""
    HALF: gl.constexpr = ring.shape[1] // 2
    MP: gl.constexpr = xs.shape[1] // 2
    first, count, tiles = _share(N, HALF)
    squares = gl.full([MP], 0.0, gl.float32, gl.SliceLayout(0, OUT))
    for i in range(tiles):
        start, end = _tile(first, count, tiles, i)
        n, inside, at, real = _outputs(start, end, rows, N, HALF, MP)
        norm = gl.load(norm_p + n, mask=inside, other=0.0).to(gl.float32)
        residual = gl.load(residual_p + at, mask=real, other=0.0).to(gl.float32)
        a, b, step = _halves_product(ring, xs, ready, free, step, K, False)
        x = _add_bias(a + b, bias_p, n, inside)
        if RANKS > 1:
            x = _sum_over_ranks(x, n, inside, place, N, shared_p, RANK, RANKS)
        x = (x + residual).to(x_p.dtype.element_ty)
        gl.store(x_p + at, x, mask=real)
        x = x.to(gl.float32)
        gl.store(scaled_p + at, (x * norm[:, None]).to(scaled_p.dtype.element_ty), mask=real)
        squares += gl.sum(x * x, 0)
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, OUT))
    gl.store(squares_p + gl.program_id(0) * MP + m, squares)
    return step


@gluon.jit
def _normed_layer(
    ring,
    xs,
    ready,
    free,
    step,
    K,  # inputs of an output
    bias_p,  # [N], of gate and up [2 N], or None
    squares_p,  # [programs, MP] fp32
    eps,
    out_p,  # [rows, N]
    rows,
    N,  # outputs
    GATED: gl.constexpr,
    PP: gl.constexpr,
):
    """W norm(x) + b, or of gate and up silu(gate) * up."""
    HALF: gl.constexpr = ring.shape[1] // 2
    MP: gl.constexpr = xs.shape[1] // 2
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // MP, MP // 4], [4, 1], [1, 0])
    first, count, tiles = _share(N, HALF)
    norm = gl.full([MP], 0.0, gl.float32, gl.SliceLayout(0, OUT))
    for i in range(tiles):
        start, end = _tile(first, count, tiles, i)
        a, b, step = _halves_product(ring, xs, ready, free, step, K, GATED)
        if i == 0:  # 1 / rms [MP] of each row, from the sums of squares [programs, MP]
            program = gl.arange(0, PP, layout=gl.SliceLayout(1, SQUARES))
            m = gl.arange(0, MP, layout=gl.SliceLayout(0, SQUARES))
            at = squares_p + program[:, None] * MP + m[None, :]
            some = (program < gl.num_programs(0))[:, None]
            # Not from L1, which does not see what other programs write.
            squares = gl.sum(gl.load(at, mask=some, other=0.0, cache_modifier=".cg"), 0)
            norm = gl.convert_layout(gl.rsqrt(squares / K + eps), gl.SliceLayout(0, OUT))
        n, inside, at, real = _outputs(start, end, rows, N, HALF, MP)
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
    ring,
    xs,
    ready,
    free,
    residual_p,  # [rows, dim]
    wo_bias_p,  # [dim], or None, as the other biases
    norm_p,  # [dim]
    w13_bias_p,  # [2 ffn]
    w2_bias_p,  # [dim]
    next_norm_p,  # [dim]
    bias_p,  # [N]
    sum_p,  # [rows, dim]
    scaled_p,  # [rows, dim]
    squares_p,  # [programs, MP] fp32
    gated_p,  # [rows, ffn]
    x_p,  # [rows, dim]
    out_p,  # [rows, N]
    counters_p,  # [3] int64
    shared_p,  # [RANKS] int64, or None
    rows,
    heads_dim,
    dim,
    ffn,
    N,
    eps,
    next_eps,
    PP: gl.constexpr,
    RANK: gl.constexpr,
    RANKS: gl.constexpr,
):
    """The consumer, four warps: a layer after the other."""
    _wait_for_previous()
    step = _residual_layer(
        ring,
        xs,
        ready,
        free,
        gl.to_tensor(0),
        heads_dim,
        wo_bias_p,
        residual_p,
        norm_p,
        sum_p,
        scaled_p,
        squares_p,
        rows,
        dim,
        0,
        shared_p,
        RANK,
        RANKS,
    )
    _arrive(counters_p)
    step = _normed_layer(
        ring, xs, ready, free, step, dim, w13_bias_p, squares_p, eps, gated_p, rows, ffn, True, PP
    )
    _arrive(counters_p + 1)
    step = _residual_layer(
        ring,
        xs,
        ready,
        free,
        step,
        ffn,
        w2_bias_p,
        sum_p,
        next_norm_p,
        x_p,
        scaled_p,
        squares_p,
        rows,
        dim,
        1,
        shared_p,
        RANK,
        RANKS,
    )
    _arrive(counters_p + 2)
    _normed_layer(
        ring, xs, ready, free, step, dim, bias_p, squares_p, next_eps, out_p, rows, N, False, PP
    )


@gluon.jit
def _linear_chain_kernel(
    wo,
    w13,
    w2,
    w,  # in blocks [8, KB]
    attended,
    scaled,
    gated,  # [rows, heads_dim], [rows, dim], [rows, ffn], in blocks [MP, KB]
    residual_p,  # [rows, dim], as sum_p, scaled_p and x_p
    wo_bias_p,
    norm_p,
    w13_bias_p,
    w2_bias_p,
    next_norm_p,
    bias_p,  # a number an output, or None
    sum_p,
    scaled_p,
    squares_p,  # squares [programs, MP] fp32
    gated_p,
    x_p,
    out_p,  # gated [rows, ffn], out [rows, N]
    counters_p,  # [3] int64
    shared_p,  # [RANKS] int64: where each rank's memory lies for this one
    rows,
    eps,
    next_eps,
    MP: gl.constexpr,
    HALF: gl.constexpr,
    SLOTS: gl.constexpr,
    PP: gl.constexpr,
    RANK: gl.constexpr,
    RANKS: gl.constexpr,
):
    """Every program has a share of each layer's outputs, over all inputs. A warp streams their
    weights through the slots of a ring, and on into the next layer's while the programs wait for
    one another: the memory never rests, where launches of a layer each would lose some 3 us. A
    slot has two halves of HALF weight rows: gate and up of w13, else the same outputs (there are
    fewer) over two runs of inputs. The halves take turns of eight rows, so that a thread has both
    of an output. MP, PP: rows and programs, padded."""
    dim, heads_dim, ffn, N = wo.shape[0], wo.shape[1], w2.shape[1], w.shape[0]
    ring = gl.allocate_shared_memory(wo.dtype, [SLOTS, 2 * HALF, wo.block_shape[1]], wo.layout)
    xs = gl.allocate_shared_memory(wo.dtype, [SLOTS, 2 * MP, wo.block_shape[1]], attended.layout)
    ready, free = _ring_barriers(SLOTS, (2, 1))
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    ring,
                    xs,
                    ready,
                    free,
                    residual_p,
                    wo_bias_p,
                    norm_p,
                    w13_bias_p,
                    w2_bias_p,
                    next_norm_p,
                    bias_p,
                    sum_p,
                    scaled_p,
                    squares_p,
                    gated_p,
                    x_p,
                    out_p,
                    counters_p,
                    shared_p,
                    rows,
                    heads_dim,
                    dim,
                    ffn,
                    N,
                    eps,
                    next_eps,
                    PP,
                    RANK,
                    RANKS,
                ),
            ),
            (_stream_weights, (wo, w13, w2, w, ring, ready, free)),
            (_stream_inputs, (attended, scaled, gated, counters_p, N, xs, ready, free, HALF)),
        ],
        [1, 1],  # warps, beside the four of the first
        [40, 40],  # registers a thread
    )


@functools.cache
def _chain_counters(device: torch.device, programs: int) -> Tensor:
    """Arrivals of so many programs at each of a chain's three grid-wide barriers, over all
    launches."""
    return torch.zeros(3, dtype=torch.int64, device=device)


@operator(
    lambda attended, x, weights, *_: (torch.empty_like(x), x.new_empty(len(x), len(weights[3])))
)
def linear_chain(
    attended: Tensor,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    norms: list[Tensor],
    eps: list[float],
    shared: Tensor | None = None,
    rank: int = 0,
) -> tuple[Tensor, Tensor]:
    """The linear layers from one attention to the next, of a few rows, in one launch: x' = x + W_o
    attended, x'' = x' + W_2 SwiGLU(W_13 norm(x')) (arXiv 2002.05202, RMSNorm 1910.07467), W
    norm(x'').

    attended [rows, heads * D] and x [rows, dim], bf16, at most CHAIN_ROWS rows; weights W_o
    [dim, heads * D], W_13 [2 ffn, dim], gate first, W_2 [dim, ffn] and W [N, dim], the next layer's
    W_qkv or the logits'; their biases, or None; norms and eps, of the RMSNorm before W_13 and of
    that before W -> x'' [rows, dim] and W norm(x'') + b [rows, N]. heads * D, dim and ffn are
    multiples of 8. ValueError for what does not fit. shared, rank: of several ranks with GPUs of
    one kind, the two last of shared_memory.

    The kernel before must not write the first weights, which are read while it still runs (see
    overlapped). The first call on a device must not be in a capture. Truth: model.Layer."""
    counts = [len(weights), len(biases), len(norms), len(eps)]
    kernels.need(
        counts == [4, 4, 2, 2], f"4 weights and biases, 2 norms and epsilons, not {counts}"
    )
    wo, w13, w2, w = weights
    dtype = x.dtype
    rows = len(x)
    dim = x.shape[-1]
    heads_dim = wo.shape[-1]
    ffn = w2.shape[-1]
    N = len(w)
    tensors = {
        "x": (x, dtype, rows, dim),
        "attended": (attended, dtype, rows, heads_dim),
        "norm": (norms[0], dtype, dim),
        "next norm": (norms[1], dtype, dim),
        "wo": (wo, dtype, dim, heads_dim),
        "bias of wo": (biases[0], dtype, dim),
        "w13": (w13, dtype, 2 * ffn, dim),
        "bias of w13": (biases[1], dtype, 2 * ffn),
        "w2": (w2, dtype, dim, ffn),
        "bias of w2": (biases[2], dtype, dim),
        "w": (w, dtype, N, dim),
        "bias of w": (biases[3], dtype, N),
    }
    kernels.check(**tensors)
    for name in ("attended", "wo", "w13", "w2", "w"):  # which bulk copies take
        kernels.need(aligned(tensors[name][0]), f"{name} must start at a multiple of 16 bytes")
    most = f"at most {CHAIN_ROWS} rows in bfloat16, of multiples of 8, on a Hopper GPU"
    kernels.need(
        chains_linears(x, heads_dim, dim, ffn), f"{most}: not {dtype} {list(x.shape)} on {x.device}"
    )
    device = torch.cuda.get_device_properties(x.device)
    # Every program must have outputs of the layers that end in x (see _stream_inputs).
    programs = min(device.multi_processor_count, dim // 8)
    MP = 8 if rows <= 8 else 16
    HALF = 32  # weight rows of half a slot
    KB = 128  # inputs of a block
    spare = 2048  # of shared memory, for barriers and sums over warps
    SLOTS = (device.shared_memory_per_block_optin - spare) // (2 * (HALF + MP) * KB * 2)
    total = torch.empty_like(x)
    scaled = torch.empty_like(x)
    out_x = torch.empty_like(x)
    gated = x.new_empty(rows, ffn)
    out = x.new_empty(rows, N)
    squares = x.new_empty(programs, MP, dtype=torch.float32)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    blocks = [TensorDescriptor.from_tensor(weight, [8, KB], layout) for weight in weights]
    blocks += [TensorDescriptor.from_tensor(t, [MP, KB], layout) for t in (attended, scaled, gated)]
    _linear_chain_kernel[programs,](
        *blocks,
        x,
        biases[0],
        norms[0],
        biases[1],
        biases[2],
        norms[1],
        biases[3],
        total,
        scaled,
        squares,
        gated,
        out_x,
        out,
        _chain_counters(x.device, programs),
        shared,
        rows,
        *eps,
        MP,
        HALF,
        SLOTS,
        kernels.power2(programs),
        rank,
        1 if shared is None else len(shared),
        num_warps=4,
        launch_cooperative_grid=True,
        **kernels.overlapped(x.device),
    )
    return out_x, out


def chains_linears(x: Tensor, *inputs: int) -> bool:
    """Whether `linear_chain` serves rows x in layers of so many inputs. It does not in fp16, which
    may not hold x before it is normed, nor in fp32, which tensor cores do not multiply exactly."""
    fits = (
        0 < len(x) <= CHAIN_ROWS and x.dtype == torch.bfloat16 and all(K % 8 == 0 for K in inputs)
    )
    return fits and kernels.nvidia_generation(x.device) == 9


# ---- a decode step of chains, in place of Llama.decode: each ends in the next wqkv, or in the
# logits


def chained_first(embeddings, layer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [B] -> the output of the first layer's wqkv, and x [B, dim]."""
    x = embeddings(tokens)
    return layer.attention.wqkv(layer.attention_norm(x)), x


def chained_attention(layer, qkv: Tensor, pos: Tensor, cache) -> Tensor:
    """wqkv's output -> the heads' results. Only this is compiled: layers of a kind share the
    code."""
    return layer.attention.attend_heads(qkv, lambda *parts: cache.decode(pos, *parts)).contiguous()


def chained_layer(
    layer, attended: Tensor, x: Tensor, norm, linear, *shared
) -> tuple[Tensor, Tensor]:
    """The heads' results and x [B, dim] -> x after the layer, and linear(norm(x))."""
    linears = [*layer.linears()[1:], linear]  # without the layer's own wqkv
    weights = [each.weight for each in linears]
    biases = [each.bias for each in linears]
    norms = [layer.ffn_norm.weight, norm.weight]
    eps = [layer.ffn_norm.eps, norm.eps]
    return linear_chain(attended, x, weights, biases, norms, eps, *shared)


def decode_in_chains(shared, model, tokens, pos, caches, first, attend) -> Tensor:
    out, x = first(model.tok_embeddings, model.layers[0], tokens)
    ends = [(layer.attention_norm, layer.attention.wqkv) for layer in model.layers[1:]]
    for layer, cache, end in zip(
        model.layers, caches, [*ends, (model.norm, model.output)], strict=True
    ):
        x, out = chained_layer(layer, attend(layer, out, pos, cache), x, *end, *shared[1:])
    return out


@functools.lru_cache
def shared_memory(
    nbytes: int, device: torch.device
) -> tuple[Tensor, Tensor, int] | tuple[()] | None:
    """Memory of this rank that all ranks read and write, zeros [ranks * nbytes] uint8; where each
    rank's lies for this one, int64 [ranks]; and this rank. () if it is alone, None where GPUs
    cannot reach one another. The first call is of all ranks together."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    rank = dist.get_rank()
    n = dist.get_world_size()
    if n == 1:
        return ()
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(n)
    pairs = permutations(range(n), 2)
    if not (one_host and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)):
        return None
    import torch.distributed._symmetric_memory as symmetric  # only now: it imports much

    memory = symmetric.empty(n * nbytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize()  # before others write there
    addresses = symmetric.rendezvous(memory, dist.group.WORLD).buffer_ptrs
    return memory, torch.tensor(addresses, device=device), rank


def chained_decode(model, rows: int) -> tuple | None:
    """decode_in_chains and its two steps, if linear_chain serves so many rows in all layers: none
    in int8. None as well where several ranks share no memory."""
    x = model.tok_embeddings.weight[:1].expand(rows, -1)
    inputs = {linear.in_features for layer in model.layers for linear in layer.linears()}
    if not chains_linears(x, *inputs) or model.output.weight.dtype != x.dtype:
        return None
    # Of each rank two places of fp32 for the padded rows, and a count for each program, of 8
    # outputs or more.
    shared = shared_memory((2 * 4 * (8 if rows <= 8 else 16) + 1) * x.shape[1], x.device)
    decode = functools.partial(decode_in_chains, shared)
    return None if shared is None else (decode, chained_first, chained_attention)


kernels.faster_attend_latents = attend_latents
