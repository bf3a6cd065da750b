"""The operations of a decode step, a block each: the reference in PyTorch, its Triton kernel, and
the function that launches it.

    operation             what it does                      its block
    append                stores a token in codes (SALS)    codes of a token
    block_queries         turns queries back (SALS)         queries of blocks
    scores                scores tokens (Loki, LRQK, ..)    scores
    block_scores          scores tokens (SALS)              scores
    select                sinks and best-scored tokens      selection
    attend_plain          a flash-decode (most methods)     attention: plain K and V
    attend_latents        the fused sparse-latent kernel    attention: keys rebuilt from latents
    attend_channels       attention over KIVI's codes       attention: keys in channel codes
    attend_shared_latent  attention of EliteKV              attention: latents that all heads share
    attend_logits         softmax and values alone (H2O)    attention: given logits
    attend_ragged         balanced adaptive ranks (FDC)     attention: heads of unequal rank
    fetch_rows            copies tokens to the GPU (LRQK)   rows out of host memory

NAME_reference, or the PyTorch path of NAME, is the truth that tests hold a kernel to. launch_NAME
checks its arguments and launches the kernel; it is an operator of PyTorch, which torch.compile
takes as it is. NAME chooses between the two by its argument `kernel` (attend_ragged: `table`).
attend_latents and attend_channels have no such function: compress.attend decodes their stores for
PyTorch. Methods attend through compress.attend, which picks the operation for a cache's stores.

To copy an operation, copy the header, which ends at the first block, the block, and the blocks that
its first lines name. On a GPU, `pytest test_all.py -k kernel` holds all of them to their
references, `-k kernel_NAME` one, and `-k compile` compiles them for GPUs that are not there.

Kernels run on NVIDIA GPUs from compute capability 8.0 (A100) on. Their sizes were measured on H100
and H200; on GPUs with less shared memory (99 KB) they take smaller tiles.

B rows of a batch, S cached tokens (the capacity), Hq query heads, Hkv key/value heads, G = Hq /
Hkv, D head dim, DV that of values, r rank. `pos` [B] int32 holds the position of each row's newest
token, below S. Kernels read it on the device, so that one CUDA graph serves every length, and no
launcher waits for the GPU to check it. In a kernel, m, l and acc are the running maximum of the
logits, sum of weights and weighted sum of values of an online softmax, and a name with P at its end
(GP, NP, DP) is a size padded to a power of 2.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    # the first: what runs in Python when a kernel is compiled
    from triton import constexpr_function, jit
except ImportError:  # macOS, Windows: the PyTorch path runs, and a wrapper says what is missing
    triton = None
    tl = SimpleNamespace(constexpr=None)  # for the kernels' annotations

    def jit(function: Callable) -> Callable:
        return function

    constexpr_function = jit

SMS = 132  # multiprocessors of an H100/H200: how many programs it takes to fill the chip
LOG2E = math.log2(math.e)  # softmax is made of exp2, which GPUs have: exp(x) = exp2(x LOG2E)


def operator(fake, mutates: tuple = (), library: str = "kv_kernels"):
    """Makes a launcher a PyTorch operator, which torch.compile calls as it is.

    fake: a function of the same arguments that gives empty tensors of the result's shapes.
    mutates: the names of the arguments that the launcher writes to."""

    def wrap(function):
        name = f"{library}::{function.__name__.removeprefix('launch_')}"
        made = torch.library.custom_op(name, function, mutates_args=mutates)
        made.register_fake(fake)
        return made

    return wrap


def _no_result(*_) -> None:
    """The fake of an operator that only writes to its arguments."""


def need(ok: bool, message: str) -> None:
    """Raises ValueError with this message unless `ok`."""
    if not ok:
        raise ValueError(message)


def check_shape(name: str, x: Tensor, dtype: torch.dtype, *sizes: int) -> None:
    """Raises ValueError unless x has this dtype and these sizes."""
    need(x.shape == sizes, f"{name} must be {list(sizes)}, not {list(x.shape)}")
    need(x.dtype == dtype, f"{name} must be {dtype}, not {x.dtype}")


def check(**tensors: tuple) -> None:
    """Raises an error unless triton is installed and every tensor is one that a kernel can take.

    A tensor is given as NAME=(tensor or None, dtype, *sizes): it must have this dtype and these
    sizes, be contiguous, and lie on the device of the first one. None stands for a tensor that is
    left out."""
    if triton is None:
        raise RuntimeError("triton is not installed: use the PyTorch path")
    first_name = next(iter(tensors))
    device = tensors[first_name][0].device
    for name, (tensor, dtype, *sizes) in tensors.items():
        if tensor is None:
            continue
        check_shape(name, tensor, dtype, *sizes)
        need(tensor.device == device, f"{name} is on {tensor.device}, {first_name} on {device}")
        need(tensor.is_contiguous(), f"{name} {sizes} must be contiguous")


def check_positions(pos: Tensor, S: int, least: int | None = None) -> None:
    """Raises ValueError for a position beyond S - 1 or below `least`, on the CPU: to read a GPU's
    means to wait. A kernel reads no token of a row whose position is negative, but must not write
    there."""
    if pos.device.type == "cpu":
        fits = pos < S
        if least is not None:
            fits &= pos >= least
        span = f"in {S} tokens" if least is None else f"into {least} to {S - 1}"
        need(bool(fits.all()), f"positions {pos.tolist()} do not fit {span}")


def check_store(B: int, H: int, S: int, **parts: tuple) -> tuple[int, ...]:
    """The strides of a store in vectors: from a row of the batch, a KV head or a token to the next
    one.

    What is stored of a vector is given in parts, NAME=(view [B, H, S, *sizes] or None, dtype,
    *sizes). Raises ValueError unless each vector's part is contiguous, begins at a multiple of its
    size, and has the same strides as the other parts."""
    strides_of = {}
    for name, (x, dtype, *sizes) in parts.items():
        if x is None:
            continue
        check_shape(name, x, dtype, B, H, S, *sizes)
        size = math.prod(sizes)
        is_whole = x[:1, :1, :1].is_contiguous()
        for stride in x.stride()[:3]:
            is_whole = is_whole and stride % size == 0
        need(is_whole, f"{name} must be whole vectors")
        strides_of[name] = tuple(stride // size for stride in x.stride()[:3])
    first_name = next(iter(strides_of))
    for name, strides in strides_of.items():
        need(strides == strides_of[first_name], f"{name} must lie as {first_name} do")
    return strides_of[first_name]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power2(n: int, least: int = 1) -> int:
    """The least power of two that is at least n and at least `least`, itself a power of two."""
    return max(least, 1 << max(0, n - 1).bit_length())


_padded = constexpr_function(power2)  # power2 inside a kernel


def tile_itemsize(dtype: torch.dtype, stored: Tensor) -> int:
    """Bytes of a stored number, by which tiles are chosen. fp32 models multiply codes as fp32."""
    if dtype == torch.float32:
        return 4
    return stored.element_size()


def matmul_codes(w: Tensor, codes: Tensor) -> Tensor:
    """w @ codes: w [..., G, K], codes [..., K, N] of any dtype -> [..., G, N]."""
    if codes.is_floating_point():
        return w.to(codes.dtype) @ codes
    return w @ codes.to(w.dtype)


def nvidia_generation(device: torch.device) -> int:
    """The major compute capability, 9 for Hopper; 0 where the device is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def overlapped(device: torch.device) -> dict:
    """Launch options with which a kernel begins before the kernel ahead of it has ended
    (programmatic dependent launch, NVIDIA GPUs from Hopper on). This hides most of the gap between
    two kernels.

    Such a kernel calls `_wait_for_previous` before it reads or writes anything but weights, and
    before `_let_next_begin`. It leaves that out where the next kernel's programs would pile up."""
    if nvidia_generation(device) >= 9:
        return {"launch_pdl": True}
    return {}


@constexpr_function
def _has_ptx():
    """Whether a kernel is compiled for a GPU, which runs PTX; the interpreter does not."""
    return not triton.knobs.runtime.interpret


@constexpr_function
def _overlaps():
    """Whether the GPU that a kernel is compiled for overlaps launches."""
    return not triton.knobs.runtime.interpret and tl.target_info.cuda_capability_geq(9, 0)


@jit
def _wait_for_previous():
    """Waits until the kernel ahead has ended. That one has waited for all ahead of it."""
    if _overlaps():
        tl.extra.cuda.gdc_wait()


@jit
def _let_next_begin():
    """Lets the next kernel's programs begin, once all programs of this one have called it."""
    if _overlaps():
        tl.extra.cuda.gdc_launch_dependents()


@jit
def _nearest(x):
    """The int32 nearest to x, |x| < 2**22. Ties go to even, as in torch.round. Around 2**23 +
    2**22, whose bits are 0x4B400000, the fp32 numbers are the integers."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


# --------------------------------------------------------------------------------- codes of a token
# `append` stores the new token of each row in codes: its latent in mixed codes, its values in
# spread codes, two formats (ours) with one scale a vector each. It needs nothing but the header.
#
# Spread codes are for a vector whose numbers spread like normal ones, such as a rotated value. A
# code of `bits` bits stands for (2 code - top) scale, with top = 2**bits - 1.
#
# Mixed codes are for a latent, whose leading numbers matter most: int8 codes for these, and 4-bit
# codes for the trailing ones. The sixteen 4-bit levels are -60, -52, .., 60, so they lie in the
# range of the int8 codes, and one scale serves both.

# The distance of neighbouring levels at which a uniform code of normal numbers has the least mean
# square error, in standard deviations (J. Max, Quantizing for minimum distortion, 1960).
LEVELS_APART = {2: 0.9957, 4: 0.3352}


def four_bit_code(level):
    """The 4-bit code of a level, not yet rounded. The kernel runs this very function, too."""
    return (level + 60) / 8


def four_bit_level(code_times_8):
    """The level of a 4-bit code, from 8 times the code: of a byte's upper half that is one
    shift."""
    return code_times_8 - 60


_four_bit_code = jit(four_bit_code)
_four_bit_level = jit(four_bit_level)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., D] of `bits` bits as bytes [..., n] uint8, n = D * bits / 8.

    Byte j holds channels j, j + n, j + 2n, ... from its lowest bits up, so that unpacking gives
    contiguous runs of channels."""
    planes = codes.to(torch.uint8).unflatten(-1, (8 // bits, -1))  # [..., 8 / bits, n]
    packed = planes[..., 0, :]
    for i in range(1, 8 // bits):
        packed = packed + (planes[..., i, :] << (i * bits))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: bytes [..., n] uint8 -> codes [..., D] uint8."""
    mask = 2**bits - 1
    planes = []
    for i in range(8 // bits):
        planes.append((packed >> (i * bits)) & mask)
    return torch.cat(planes, dim=-1)


def as_fp16(x: Tensor) -> Tensor:
    """x in fp16, really rounded. Inductor drops the two casts of x.half().float(), so a scale would
    be used unrounded where it is compiled; it does not drop a bitwise operation on whole
    numbers."""
    return (x.half().view(torch.int16) & -1).view(torch.float16)


def quantize_spread(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Spread codes of vectors x [..., D] (ours): codes [..., D * bits / 8] uint8 (`pack`), scales
    [...] fp16.

    The step between levels is the best one for normal numbers of the vector's mean square. The
    scale is then set so that x . decoded = x . x, as RaBitQ does (arXiv 2405.12497)."""
    x = x.float()
    top = 2**bits - 1
    deviation = x.square().mean(-1, keepdim=True).sqrt()
    half_step = (deviation * (LEVELS_APART[bits] / 2)).clamp(min=1e-8)
    codes = ((x / half_step + top) / 2).round().clamp(0, top)
    level = 2 * codes - top
    scale = x.square().sum(-1) / (x * level).sum(-1).clamp(min=1e-8)
    return pack(codes, bits), as_fp16(scale)


def quantize_int8(
    x: Tensor, dims: tuple[int, ...] = (-1,), dtype=torch.float32
) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes of x and their scale, one for all numbers along dims: x = codes *
    scale."""
    scale = (x.float().abs().amax(dims, keepdim=True) / 127).to(dtype)
    return (x.float() / torch.where(scale == 0, 1, scale)).round().to(torch.int8), scale


def quantize_mixed(x: Tensor, n_int8: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed codes of vectors x [..., D] (ours): the first `n_int8` dims in int8 [..., n_int8];
    scales [...] fp32; and the other dims in 4-bit codes, [..., (D - n_int8) / 2] uint8 (`pack`).

    The int8 dims need the scale largest / 127, the 4-bit ones the scale at which neighbouring
    levels, 8 int8 steps apart, are LEVELS_APART deviations apart. The larger of the two serves
    both."""
    for_int8, for_int4 = x.float().split((n_int8, x.shape[-1] - n_int8), -1)
    scale_for_int8 = for_int8.abs().amax(-1) / 127
    scale_for_int4 = for_int4.square().mean(-1).sqrt() * (LEVELS_APART[4] / 8)
    scale = torch.maximum(scale_for_int8, scale_for_int4)
    step = torch.where(scale == 0, 1, scale)[..., None]
    int8_dims = (for_int8 / step).round().to(torch.int8)
    int4_dims = pack(four_bit_code(for_int4 / step).round().clamp(0, 15), 4)
    return int8_dims, scale, int4_dims


def dequantize_mixed(int8_dims: Tensor, scale: Tensor, int4_dims: Tensor) -> Tensor:
    """The inverse of `quantize_mixed`: vectors [..., D] fp32."""
    levels = four_bit_level(unpack(int4_dims, 4).to(torch.int8) * 8)
    return torch.cat((int8_dims, levels), -1) * scale[..., None]


@jit
def _append_kernel(
    latent_ptr,  # [B, LEAD + 2 REST] of v's dtype
    v_ptr,  # [B, Hkv, D]
    latent_stride,  # numbers between two rows of the batch
    v_stride,
    pos_ptr,  # [B] int32
    lead_ptr,  # [B, S, LEAD] int8
    rest_ptr,  # [B, S, REST] uint8
    latent_scale_ptr,  # [B, S] fp32
    code_ptr,  # [B, S, Hkv, D * BITS / 8] uint8
    scale_ptr,  # [B, S, Hkv] fp16
    S,
    apart,  # standard deviations between neighbouring levels of values
    rest_apart,  # and of the latents' 4-bit codes
    D: tl.constexpr,
    LEAD: tl.constexpr,  # r*, the leading dims of a latent
    REST: tl.constexpr,  # bytes of its trailing dims, two in a byte
    BITS: tl.constexpr,  # of a value's code
):
    """Stores the codes of one new token of each row, as quantize_mixed and quantize_spread make
    them.

    A program has the value of one KV head; the last program of a row has the latent."""
    _wait_for_previous()
    _let_next_begin()
    h = tl.program_id(0)
    Hkv = tl.num_programs(0) - 1
    b = tl.program_id(1).to(tl.int64)
    token = b * S + tl.load(pos_ptr + b)
    if h == Hkv:
        # The latent: read its leading dims, and its trailing ones as two halves of REST
        latent_ptr += b * latent_stride
        i = tl.arange(0, _padded(LEAD))
        half = tl.arange(0, 2)[:, None]
        pair = tl.arange(0, _padded(REST))
        lead = tl.load(latent_ptr + i, mask=i < LEAD, other=0.0).to(tl.float32)
        rest_at = latent_ptr + LEAD + half * REST + pair[None, :]
        rest = tl.load(rest_at, mask=(pair < REST)[None, :], other=0.0).to(tl.float32)

        # The scale that the parts need
        rest_scale = tl.sqrt(tl.sum(rest * rest) / (2 * REST)) * (rest_apart / 8)
        scale = tl.maximum(tl.max(tl.abs(lead)) / 127, rest_scale)
        step = tl.where(scale == 0, 1.0, scale)

        # Codes; the first half of the trailing ones goes to the lower four bits
        lead_code = _nearest(lead / step).to(tl.int8)
        rest_code = _nearest(tl.clamp(_four_bit_code(rest / step), 0.0, 15.0))
        rest_byte = tl.sum(rest_code << (half * 4), 0)
        tl.store(lead_ptr + token * LEAD + i, lead_code, mask=i < LEAD)
        tl.store(rest_ptr + token * REST + pair, rest_byte.to(tl.uint8), mask=pair < REST)
        tl.store(latent_scale_ptr + token, scale)
    else:
        # The value of head h, as planes [8 / BITS, BYTES] of its channels: each byte holds one
        # code of each plane
        TOP: tl.constexpr = 2.0**BITS - 1
        BYTES: tl.constexpr = D * BITS // 8
        plane = tl.arange(0, 8 // BITS)[:, None]
        byte = tl.arange(0, _padded(BYTES))
        v_at = v_ptr + b * v_stride + h * D + plane * BYTES + byte[None, :]
        v = tl.load(v_at, mask=(byte < BYTES)[None, :], other=0.0).to(tl.float32)

        energy = tl.sum(v * v)
        half_step = tl.maximum(tl.sqrt(energy / D) * (apart / 2), 1e-8)
        code = _nearest(tl.clamp((v / half_step + TOP) / 2, 0.0, TOP))
        level = 2 * code.to(tl.float32) - TOP
        scale = energy / tl.maximum(tl.sum(v * level), 1e-8)
        packed = tl.sum(code << (plane * BITS), 0)
        head = token * Hkv + h
        tl.store(code_ptr + head * BYTES + byte, packed.to(tl.uint8), mask=byte < BYTES)
        tl.store(scale_ptr + head, scale.to(tl.float16))


@operator(_no_result, mutates=("int8_dims", "int4_dims", "latent_scale", "codes", "scale"))
def launch_append(
    latent: Tensor,
    v: Tensor,
    pos: Tensor,
    int8_dims: Tensor,
    latent_scale: Tensor,
    int4_dims: Tensor,
    codes: Tensor,
    scale: Tensor,
) -> None:
    """Writes the codes of latent [B, r] and v [B, Hkv, D], whose rows of the batch may lie any
    stride apart, at positions pos [B] int32, which must be below S.

    The latent goes to int8_dims [B, 1, S, r*] int8, latent_scale [B, 1, S] fp32 and int4_dims
    [B, 1, S, (r - r*) / 2] uint8; v goes to codes [B, S, Hkv, D * bits / 8] uint8 and scale
    [B, S, Hkv] fp16."""
    B, Hkv, D = v.shape
    S, LEAD = int8_dims.shape[2:]
    REST = int4_dims.shape[3]
    need(REST > 0, "a latent needs trailing dims, in 4 bits")
    BYTES = codes.shape[3]
    bits = BYTES * 8 // D
    check_shape("latent", latent, v.dtype, B, LEAD + 2 * REST)
    check_shape("v", v, v.dtype, B, Hkv, D)
    need(latent[0].is_contiguous(), "a row of latent must be contiguous")
    need(v[0].is_contiguous(), "a row of v must be contiguous")
    need(
        bits in (2, 4) and BYTES * 8 == bits * D,
        f"{BYTES} bytes are no codes of {D} values in 2 or 4 bits",
    )
    check(
        pos=(pos, torch.int32, B),
        int8_dims=(int8_dims, torch.int8, B, 1, S, LEAD),
        int4_dims=(int4_dims, torch.uint8, B, 1, S, REST),
        latent_scale=(latent_scale, torch.float32, B, 1, S),
        codes=(codes, torch.uint8, B, S, Hkv, BYTES),
        scale=(scale, torch.float16, B, S, Hkv),
    )
    check_positions(pos, S, least=0)
    _append_kernel[Hkv + 1, B](
        latent_ptr=latent,
        v_ptr=v,
        latent_stride=latent.stride(0),
        v_stride=v.stride(0),
        pos_ptr=pos,
        lead_ptr=int8_dims,
        rest_ptr=int4_dims,
        latent_scale_ptr=latent_scale,
        code_ptr=codes,
        scale_ptr=scale,
        S=S,
        apart=LEVELS_APART[bits],
        rest_apart=LEVELS_APART[4],
        D=D,
        LEAD=LEAD,
        REST=REST,
        BITS=bits,
        num_warps=4,
        **overlapped(v.device),
    )


def append(pos: Tensor, latents, latent: Tensor, values, v: Tensor, *, kernel: bool) -> None:
    """Writes one new token of each row, at positions pos [B]: its latent [B, r] to a store of mixed
    codes, and its values v [B, Hkv, D] to a store of spread codes that lie by token."""
    if not kernel:
        latents.write_token(pos, latent[:, None])
        values.write_token(pos, v)
        return
    int8_dims, latent_scale, int4_dims = latents.parts()
    codes, scale = values.parts()
    launch_append(
        latent,
        v,
        pos.int(),
        int8_dims,
        latent_scale,
        int4_dims,
        codes.transpose(1, 2),  # as it lies in memory: a token's heads side by side
        scale.transpose(1, 2),
    )


# -------------------------------------------------------------------------------- queries of blocks
# `block_queries` makes what `block_scores` scores with. Scores of keys after RoPE would need each
# key rotated. Instead a query is rotated back by a token's position, since q . RoPE_j(k) =
# RoPE_-j(q) . k. Neighbouring tokens share one such query: that of their block, turned back by the
# block's mean rotation, and projected to the latent space. It needs the block of scores, for
# queries in codes.


def block_queries_reference(
    q: Tensor, cos: Tensor, sin: Tensor, basis: Tensor, mean: Tensor
) -> tuple[Tensor, None, Tensor]:
    """What block_queries says, in PyTorch."""
    B, Hq, D = q.shape
    basis = basis.unflatten(0, (-1, D))  # [Hkv, D, r*]
    Hkv = len(basis)
    first, second = q.float().view(B, 1, Hkv, Hq // Hkv, D).chunk(2, -1)  # [B, 1, Hkv, G, D/2] each
    cos_of_block = cos[:, None, None]  # [n, 1, 1, D/2]
    sin_of_block = sin[:, None, None]
    turned_first = first * cos_of_block + second * sin_of_block
    turned_second = second * cos_of_block - first * sin_of_block
    turned = torch.cat((turned_first, turned_second), -1).to(q.dtype)  # [B, n, Hkv, G, D]
    queries = torch.einsum("bnhgd,hdr->bnhgr", turned, basis).flatten(2, 3)
    return queries, None, mean_logits(q, cos, sin, mean)


def mean_logits(q: Tensor, cos: Tensor, sin: Tensor, mean: Tensor) -> Tensor:
    """q . RoPE(mean key), which the latents of centred keys lack (ours).

    q [B, Hq, D] after RoPE; cos, sin [n, D/2] of n positions, or means over blocks of them; mean
    [Hkv*D] -> [B, n, Hq] fp32."""
    times_cos, times_sin = rope_products(q, mean.view(-1, q.shape[-1]))
    return cos @ times_cos.mT + sin @ times_sin.mT


def rope_products(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """a and b [B, Hq, D/2], of which each pair of dims gives a cos_j + b sin_j to q . RoPE_j(k): so
    one key need not be rotated to every position j. q [B, Hq, D] after RoPE; k [Hkv, D] or
    [B, Hkv, D] fp32 before it."""
    k_first, k_second = k.unsqueeze(-2).chunk(2, -1)  # [Hkv, 1, D/2] each
    q_first, q_second = q.float().unflatten(1, (k.shape[-2], -1)).chunk(2, -1)  # [B, Hkv, G, D/2]
    times_cos = q_first * k_first + q_second * k_second
    times_sin = q_second * k_first - q_first * k_second
    return times_cos.flatten(1, 2), times_sin.flatten(1, 2)


@jit
def _block_queries_kernel(
    q_ptr,  # [B, Hkv, G, D]
    cos_ptr,  # [n, D / 2] fp32
    sin_ptr,  # [n, D / 2] fp32
    basis_ptr,  # [Hkv, D, r*] of q's dtype
    mean_ptr,  # [Hkv, D] fp32
    query_ptr,  # [B, n, Hkv, G, r*] of q's dtype; in codes int8 [2, ...], high and low
    query_scale_ptr,  # [B, n, Hkv, G] fp32 of queries in codes; else None
    offset_ptr,  # [B, n, Hkv, G] fp32
    B,
    n,  # blocks
    r_score,  # r*, the leading dims of a latent that scores read
    G: tl.constexpr,  # queries of a KV head
    D: tl.constexpr,
    T: tl.constexpr,  # queries (of B * n * G) of a program
    RB: tl.constexpr,  # dims of a program
):
    """query = q U and offset = q . mean, of each query head q turned back by the rotation of each
    block; U and mean are its KV head's parts of the basis and of the mean key.

    A program has T of the B * n * G queries of a KV head, and RB of the r* dims."""
    h = tl.program_id(1).to(tl.int64)
    Hkv = tl.num_programs(1)

    # This KV head's part of the basis: weights, so they are read before the wait
    pair = tl.arange(0, _padded(D // 2, 16))
    inside = pair < D // 2
    dim = tl.program_id(2) * RB + tl.arange(0, RB)
    basis_at = basis_ptr + (h * D + pair[:, None]) * r_score + dim[None, :]
    basis_mask = inside[:, None] & (dim < r_score)[None, :]
    basis_first = tl.load(basis_at, mask=basis_mask, other=0.0)
    basis_second = tl.load(basis_at + D // 2 * r_score, mask=basis_mask, other=0.0)

    # The rotations of this program's blocks
    query_number = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    g = query_number % G
    block = query_number // G % n
    b = query_number // G // n
    live = b < B
    mask = live[:, None] & inside[None, :]
    cos = tl.load(cos_ptr + block[:, None] * (D // 2) + pair[None, :], mask=mask, other=0.0)
    sin = tl.load(sin_ptr + block[:, None] * (D // 2) + pair[None, :], mask=mask, other=0.0)

    # The queries, turned back
    _wait_for_previous()
    q_at = q_ptr + ((b * Hkv + h) * G + g)[:, None] * D + pair[None, :]
    first = tl.load(q_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(q_at + D // 2, mask=mask, other=0.0).to(tl.float32)
    _let_next_begin()
    turned_first = first * cos + second * sin
    turned_second = second * cos - first * sin

    # What the mean key adds, once for all dims
    out_number = ((b * n + block) * Hkv + h) * G + g
    if tl.program_id(2) == 0:
        mean_first = tl.load(mean_ptr + h * D + pair, mask=inside, other=0.0)[None, :]
        mean_second = tl.load(mean_ptr + h * D + D // 2 + pair, mask=inside, other=0.0)[None, :]
        offset = tl.sum(turned_first * mean_first + turned_second * mean_second, 1)
        tl.store(offset_ptr + out_number, offset, mask=live)

    query = tl.dot(turned_first.to(basis_first.dtype), basis_first, input_precision="ieee")
    query = tl.dot(turned_second.to(basis_first.dtype), basis_second, query, input_precision="ieee")
    out_mask = live[:, None] & (dim < r_score)[None, :]
    out_at = query_ptr + out_number[:, None] * r_score + dim[None, :]
    if query_scale_ptr is not None:  # in codes: this program has all dims
        query, low, scale = _queries_as_int8(query)
        tl.store(query_scale_ptr + out_number, scale, mask=live)
        tl.store(out_at + tl.cast(B, tl.int64) * n * Hkv * G * r_score, low, mask=out_mask)
    tl.store(out_at, query.to(query_ptr.dtype.element_ty), mask=out_mask)


def empty_block_queries(
    q: Tensor, cos: Tensor, sin: Tensor, basis: Tensor, mean: Tensor, coded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for what launch_block_queries gives: queries, their scales (of size 0 if they
    are not coded), and what the mean key adds."""
    B, Hq, _ = q.shape
    n = len(cos)
    r_score = basis.shape[1]
    offset = q.new_empty(B, n, Hq, dtype=torch.float32)
    if coded:
        queries = q.new_empty(2, B, n, Hq, r_score, dtype=torch.int8)
        query_scale = q.new_empty(B, n, Hq, dtype=torch.float32)
    else:
        queries = q.new_empty(B, n, Hq, r_score)
        query_scale = q.new_empty(0, n, Hq, dtype=torch.float32)
    return queries, query_scale, offset


@operator(empty_block_queries)
def launch_block_queries(
    q: Tensor, cos: Tensor, sin: Tensor, basis: Tensor, mean: Tensor, coded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """block_queries by its kernel: q [B, Hq, D], cos and sin [n, D/2] fp32, basis [Hkv * D, r*] of
    q's dtype, mean [Hkv * D] fp32 -> queries [B, n, Hq, r*], an empty scale, offset [B, n, Hq]
    fp32. With `coded`: queries [2, B, n, Hq, r*] int8, and their scale [B, n, Hq] fp32."""
    B, Hq, D = q.shape
    n, half = cos.shape
    width, r_score = basis.shape
    Hkv = width // D
    need(D == 2 * half and width == Hkv * D and Hq % Hkv == 0, "q, rotations and basis do not fit")
    check(
        q=(q, q.dtype, B, Hq, D),
        basis=(basis, q.dtype, width, r_score),
        cos=(cos, torch.float32, n, half),
        sin=(sin, torch.float32, n, half),
        mean=(mean, torch.float32, width),
    )
    queries, query_scale, offset = empty_block_queries(q, cos, sin, basis, mean, coded)
    G = Hq // Hkv
    rows = B * n * G

    # Codes need all ranks in a program, for their largest number. Else a program takes so many that
    # each half of its part of the basis has 16 KB at most, in heads of 128 dims.
    RB = power2(r_score, 16)
    if not coded:
        RB = min(RB, 64 if q.element_size() == 4 else 128)
    # 64 rows are a tile that tensor cores take well, and 16 their least. Half as many where
    # programs would not fill the chip.
    T = min(64, power2(rows, 16))
    if cdiv(rows, T) * Hkv * cdiv(r_score, RB) < SMS:
        T = max(16, T // 2)
    _block_queries_kernel[cdiv(rows, T), Hkv, cdiv(r_score, RB)](
        q_ptr=q,
        cos_ptr=cos,
        sin_ptr=sin,
        basis_ptr=basis,
        mean_ptr=mean,
        query_ptr=queries,
        query_scale_ptr=query_scale if coded else None,
        offset_ptr=offset,
        B=B,
        n=n,
        r_score=r_score,
        G=G,
        D=D,
        T=T,
        RB=RB,
        num_warps=4,
        **overlapped(q.device),
    )
    return queries, query_scale, offset


def takes_codes(q: Tensor, r_score: int) -> bool:
    """Whether queries q [.., N, *] may be int8 codes of r* numbers: the programs that make them and
    those that score with them must have all ranks, which fit up to 256."""
    _, RB, *_ = scores_config(power2(q.shape[-2], 8), r_score, 1)
    return q.element_size() == 2 and r_score <= min(RB, 256)


def block_queries(
    q: Tensor, cos: Tensor, sin: Tensor, basis: Tensor, mean: Tensor, coded: bool, kernel: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Queries in the latent space, one for each of n blocks of tokens, and what the mean key adds
    to logits.

    q [B, Hq, D] after RoPE is turned back by each block's rotation, cos and sin [n, D/2] fp32
    (ours: the paper scores without RoPE). Gives three tensors:
        queries      q times its KV head's rows of the basis U_r* [Hkv * D, r*], of q's dtype,
                     [B, n, Hq, r*]
        query_scale  None
        offset       q times its KV head's part of the mean [Hkv * D] fp32, [B, n, Hq] fp32
    Where `coded` (the vectors to be scored are int8 codes) the kernel may give int8 codes of the
    queries, [2, B, n, Hq, r*], with their scales [B, n, Hq] fp32 (_queries_as_int8)."""
    if not kernel:
        return block_queries_reference(q, cos, sin, basis, mean)
    coded = coded and takes_codes(q, basis.shape[1])
    queries, query_scale, offset = launch_block_queries(
        q.contiguous(), cos, sin, basis, mean, coded
    )
    return queries, query_scale if coded else None, offset


# ------------------------------------------------------------------------------------------- scores
# Two operations score every cached token. `scores` multiplies a head's queries with the leading
# numbers of what is stored of each token (Loki, exact top-k, H2O and others). `block_scores` is
# SALS's (ours): one query for each block of tokens, and a token's score is the sum of its
# attention weights over the heads. Both need nothing but the header.


def group_scores(logits: Tensor, live: Tensor) -> Tensor:
    """The logarithm of the largest attention weight that any of a KV head's G queries gives, which
    ranks small weights, too: logits [B, Hkv, G, N], live [B, N] bool -> [B, Hkv, N] fp32, -inf if
    not live."""
    dead = ~live[:, None, None]
    logits = logits.float().masked_fill(dead, -torch.inf)
    return logits.log_softmax(-1).masked_fill(dead, -torch.inf).amax(2)


def token_logits(q: Tensor, vectors: Tensor, vector_scale: Tensor | None = None) -> Tensor:
    """q . vector of every token: q [B, H, N, d], vectors [B, H, S, >= d], vector_scale [B, H, S] of
    vectors that are codes, or None -> [B, H, N, S] fp32."""
    vectors = vectors[..., : q.shape[-1]]
    if vector_scale is None:
        return matmul_codes(q, vectors.mT).float()
    # Sums of products with codes can exceed fp16's range.
    logits = matmul_codes(q * 2**-7, vectors.mT).float()
    return logits * (vector_scale * 128)[:, :, None]


def scores_reference(
    q: Tensor, vectors: Tensor, vector_scale: Tensor | None, pos: Tensor, scale: float, rule: str
) -> Tensor:
    """What scores says, in PyTorch, of queries [B, H, N, d]."""
    live = torch.arange(vectors.shape[2], device=pos.device) <= pos[:, None]  # [B, S]
    logits = token_logits(q, vectors, vector_scale) * scale  # [B, H, N, S]
    if rule == "largest":
        return group_scores(logits, live)
    return logits.masked_fill(~live[:, None, None], -torch.inf)


@jit
def _queries_as_int8(x):
    """x [N, R] -> high, low, scale [N], with x = (high * 254 + low) * scale to 15 bits of a query's
    largest number. high and low are int8."""
    largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    x = x.to(tl.float32) * (127 / tl.maximum(largest, 1e-30))[:, None]
    rest = x - ((x + 12582912.0) - 12582912.0)  # x - _nearest(x), without a conversion back to fp32
    return _nearest(x).to(tl.int8), _nearest(rest * 254).to(tl.int8), largest / (127 * 254)


@jit
def _tile_queries(query_at, mask, INT8_QUERIES: tl.constexpr):
    """The queries of a tile [NP, RB]. For vectors in int8: high, low and scale; else the queries in
    all three places, of which only the first is used, since both results must be of one kind."""
    query = tl.load(query_at, mask=mask, other=0.0)
    return _queries_as_int8(query) if INT8_QUERIES else (query, query, query)


class ScoresConfig(NamedTuple):
    """How a kernel that scores is launched."""

    tokens: int  # of a tile
    ranks: int  # numbers of a vector that a product takes
    warps: int
    stages: int  # tiles in flight
    programs: int  # that run at a time


def scores_config(HP: int, r_score: int, itemsize: int) -> ScoresConfig:
    """HP: queries of a head, padded; itemsize: bytes of a stored number. Measured on an H200."""
    if itemsize == 1 and r_score <= 512 and HP * r_score <= 32768:
        # One product takes all ranks, so that queries can be split into int8 codes: up to 512
        # ranks, and 32 KB of codes. Wider vectors take fewer tokens a tile, and two tiles in
        # flight, so that two programs fit on a multiprocessor.
        ranks = power2(r_score, 32)
        tokens = 128 if ranks <= 256 else 64
        stages = 3 if ranks < 256 else 2
        return ScoresConfig(tokens, ranks, warps=4, stages=stages, programs=2 * SMS)
    ranks = min(power2(r_score, 16), 64)
    if itemsize == 4:  # fp32 is for tests
        return ScoresConfig(16, ranks, warps=4, stages=3, programs=2 * SMS)
    # At most 16 KB of vectors, and of logits, if that leaves 16 tokens, the fewest that tensor
    # cores take. Four programs a multiprocessor hide the memory's latency.
    tokens = max(16, min(256, 8192 // ranks, 4096 // HP))
    return ScoresConfig(tokens, ranks, warps=4, stages=3, programs=4 * SMS)


@functools.lru_cache
def tiles_a_program(tiles: int, rows: int, programs: int) -> int:
    """How many of a row's tiles a program takes, if so many programs run at a time: each wave of
    them lasts as long as its tiles, and one more to begin."""

    def time_of(n):
        waves = cdiv(cdiv(tiles, n) * rows, programs)
        return waves * (n + 1)

    return min(range(1, tiles + 1), key=time_of)


# ---- logits of each query, or a head's largest weight


@jit
def _scores_kernel(
    query_ptr,  # [B, H, N, r*] of the model's dtype
    vectors_ptr,  # [B, H, S, r] of the queries' dtype, or int8
    vector_scale_ptr,  # [B, H, S] fp32; None: vectors are not int8
    pos_ptr,  # [B] int32
    logits_ptr,  # [B, H, N, S] fp32
    m_ptr,  # [B, H, splits, NP] fp32: the largest logit of a split; None: rule "each"
    l_ptr,  # [B, H, splits, NP] fp32: its sum of exp2(logit - m)
    strides,  # vectors between two rows of the batch, two heads and two tokens
    S,
    tiles,  # of S tokens
    r_score: tl.constexpr,  # leading numbers of a vector that count
    r: tl.constexpr,  # numbers of a vector
    scale,  # of logits; with log2(e) if the rule is "largest"
    N: tl.constexpr,  # queries of a head
    T: tl.constexpr,  # tokens of a tile
    RB: tl.constexpr,  # ranks of a product
    STAGES: tl.constexpr,  # tiles in flight
):
    """Stores the logits scale q . vector of a head's N queries. For the rule "largest" these are in
    log2 units, and each split's m and l are stored, too. A program takes one split of the
    tokens."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    h = tl.program_id(1)
    H = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(pos_ptr + b) + 1
    LARGEST: tl.constexpr = m_ptr is not None
    NR: tl.constexpr = (r_score + RB - 1) // RB  # products of a vector
    NP: tl.constexpr = _padded(N, 8)
    # Int8 vectors are multiplied as they are, by queries that are split into int8, too.
    INT8_QUERIES: tl.constexpr = (
        vector_scale_ptr is not None and NR == 1 and query_ptr.dtype.element_ty != tl.float32
    )
    n = tl.arange(0, NP)
    dims = tl.arange(0, RB)[None, :]

    # 1. The tiles of this split. Those beyond pos are left out where _largest_kernel, which comes
    # next, writes the scores.
    count = tl.cdiv(length, T) if LARGEST else tiles
    share = tl.cdiv(count, splits)
    first = split * share
    stop = tl.minimum(first + share, count)

    # 2. The queries, if one product takes all ranks.
    query_at = query_ptr + (b * H + h) * N * r_score + n[:, None] * r_score + dims
    if NR == 1:
        query_mask = (n < N)[:, None] & (dims < r_score)
        query, low, query_scale = _tile_queries(query_at, query_mask, INT8_QUERIES)

    # 3. Tile after tile. Each of its T places has its own m and l, which are joined at the end.
    m = tl.full([T, NP], -1e30, tl.float32)
    l = tl.zeros([T, NP], tl.float32)
    for tile in tl.range(first, stop, num_stages=STAGES):
        token = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = token < length
        vector = b * strides[0] + h * strides[1] + token * strides[2]
        vector_scale = scale
        if vector_scale_ptr is not None:
            stored_scale = tl.load(vector_scale_ptr + vector, mask=live, other=0.0)
            vector_scale = stored_scale[:, None] * scale
        vector_at = vectors_ptr + vector[:, None] * r + dims
        logits = tl.zeros([T, NP], tl.float32)
        if NR == 1:
            x = tl.load(vector_at, mask=live[:, None] & (dims < r_score), other=0.0)
            if INT8_QUERIES:
                coarse = tl.dot(x, tl.trans(query), out_dtype=tl.int32)
                fine = tl.dot(x, tl.trans(low), out_dtype=tl.int32)
                logits = (coarse * 254 + fine).to(tl.float32) * query_scale[None, :]  # < 2**31
            else:
                x = x.to(query.dtype)
                logits = tl.dot(x, tl.trans(query), logits, input_precision="ieee")
        else:
            for i in range(0, NR * RB, RB):
                inside = dims + i < r_score
                x = tl.load(vector_at + i, mask=live[:, None] & inside, other=0.0)
                part = tl.load(query_at + i, mask=(n < N)[:, None] & inside, other=0.0)
                x = x.to(part.dtype)
                logits = tl.dot(x, tl.trans(part), logits, input_precision="ieee")
        # Always true. The compiler does not delay the next tile's loads for what is in a branch.
        if tile < stop:
            logits *= vector_scale
            logits = tl.where(live[:, None], logits, float("-inf"))
            at = logits_ptr + ((b * H + h) * N + n[None, :]) * S + token[:, None]
            tl.store(at, logits, mask=(token < S)[:, None] & (n < N)[None, :])
            if LARGEST:
                m_new = tl.maximum(m, logits)
                l = l * tl.exp2(m - m_new) + tl.exp2(logits - m_new)
                m = m_new
    if LARGEST:
        at = ((b * H + h) * splits + split) * NP + n
        largest = tl.max(m, 0)
        tl.store(m_ptr + at, largest)
        tl.store(l_ptr + at, tl.sum(l * tl.exp2(m - largest[None, :]), 0))


@jit
def _largest_kernel(
    logits_ptr,  # of _scores_kernel [B, H, N, S] fp32, log2 units
    m_ptr,  # [B, H, splits, NP] fp32
    l_ptr,  # [B, H, splits, NP] fp32
    pos_ptr,  # [B] int32
    out_ptr,  # [B, H, S] fp32
    S,
    splits,
    N: tl.constexpr,  # queries of a head
    T: tl.constexpr,  # tokens of a tile
    SP: tl.constexpr,  # splits, padded
):
    """out = the largest of log softmax(logits) over a head's queries, -inf beyond pos."""
    _wait_for_previous()
    _let_next_begin()
    h = tl.program_id(1)
    H = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(pos_ptr + b) + 1
    NP: tl.constexpr = _padded(N, 8)
    n = tl.arange(0, _padded(N))
    split = tl.arange(0, SP)
    # 1. The normaliser of each query, from all splits.
    at = ((b * H + h) * splits + split[:, None]) * NP + n[None, :]
    m_of_split = tl.load(m_ptr + at, mask=(split < splits)[:, None], other=float("-inf"))
    l_of_split = tl.load(l_ptr + at, mask=(split < splits)[:, None], other=0.0)
    m = tl.maximum(tl.max(m_of_split, 0), -1e30)
    l = tl.sum(l_of_split * tl.exp2(m_of_split - m[None, :]), 0)
    normaliser = m + tl.log2(tl.maximum(l, 1e-37))
    # 2. The scores.
    for tile in tl.range(tl.program_id(0), tl.cdiv(S, T), tl.num_programs(0), num_stages=3):
        token = (tile * T + tl.arange(0, T)).to(tl.int64)
        # Wide loads need a mask that is known to be equal for many tokens, which `live` is not.
        some = (n < N) & (n * 0 + tile * T < length)
        logits_at = logits_ptr + ((b * H + h) * N + n[:, None]) * S + token[None, :]
        mask = some[:, None] & (token < S)[None, :]
        logits = tl.load(logits_at, mask=mask, other=float("-inf"))
        score = tl.max(logits - normaliser[:, None], 0) * 0.6931471805599453  # ln 2
        score = tl.where(token < length, score, float("-inf"))
        tl.store(out_ptr + (b * H + h) * S + token, score, mask=token < S)


def empty_scores(
    queries: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    rule: str,
) -> Tensor:
    """An empty tensor of the shape that launch_scores gives."""
    B, H, S, _ = vectors.shape
    if rule == "each":
        return vectors.new_empty((B, H, queries.shape[2], S), dtype=torch.float32)
    return vectors.new_empty((B, H, S), dtype=torch.float32)


@operator(empty_scores)
def launch_scores(
    queries: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    rule: str,
) -> Tensor:
    """scores, of queries [B, H, N, r*]. Each vector [B, H, S, r], a view (check_store), is read
    once."""
    B, H, S, r = vectors.shape
    N, r_score = queries.shape[2:]
    need(
        len(queries) == B and r_score <= r,
        f"queries {list(queries.shape)} do not fit vectors {list(vectors.shape)}",
    )
    need(rule in ("each", "largest"), f"no rule {rule}")
    check(
        pos=(pos, torch.int32, B),
        queries=(queries, queries.dtype, B, H, N, r_score),
    )
    strides = check_store(
        B,
        H,
        S,
        **{
            "vectors": (vectors, queries.dtype if vector_scale is None else torch.int8, r),
            "scale of vectors": (vector_scale, torch.float32),
        },
    )
    check_positions(pos, S)
    is_largest = rule == "largest" and N > 1  # else the logits rank tokens alike
    NP = power2(N, 8)
    config = scores_config(NP, r_score, tile_itemsize(queries.dtype, vectors))
    T = config.tokens
    tiles = cdiv(S, T)
    splits = cdiv(tiles, tiles_a_program(tiles, B * H, config.programs))
    logits = torch.empty(B, H, N, S, dtype=torch.float32, device=vectors.device)
    m = l = None
    if is_largest:
        m = torch.empty(B, H, splits, NP, dtype=torch.float32, device=vectors.device)
        l = torch.empty(B, H, splits, NP, dtype=torch.float32, device=vectors.device)
    _scores_kernel[splits, H, B](
        query_ptr=queries,
        vectors_ptr=vectors,
        vector_scale_ptr=vector_scale,
        pos_ptr=pos,
        logits_ptr=logits,
        m_ptr=m,
        l_ptr=l,
        strides=strides,
        S=S,
        tiles=tiles,
        r_score=r_score,
        r=r,
        scale=scale * LOG2E if is_largest else scale,
        N=N,
        T=T,
        RB=config.ranks,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        **overlapped(vectors.device),
    )
    if rule == "each":
        return logits
    if not is_largest:
        return logits.view(B, H, S)
    out = torch.empty(B, H, S, dtype=torch.float32, device=vectors.device)
    T = 512  # long stretches of each query's logits
    # Programs are short, so there are enough to fill the chip 16 times, and four a head at least.
    programs = min(cdiv(S, T), max(4, 16 * SMS // (B * H)))
    _largest_kernel[programs, H, B](
        logits_ptr=logits,
        m_ptr=m,
        l_ptr=l,
        pos_ptr=pos,
        out_ptr=out,
        S=S,
        splits=splits,
        N=N,
        T=T,
        SP=power2(splits),
        num_warps=4,
        **overlapped(vectors.device),
    )
    return out


def scores(
    q: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    rule: str,
    *,
    kernel: bool,
) -> Tensor:
    """Scores the tokens up to pos by the leading d numbers of what is stored of each.

    q [B, Hq, d]; vectors [B, H, S, >= d] of any float dtype, or int8 codes with vector_scale
    [B, H, S] fp32: a head of them serves N = Hq / H queries. Logits are q . vector * scale. rule:
        each     every query's logit -> [B, H, N, S]
        largest  the largest attention weight of a head's queries, as a logarithm -> [B, H, S];
                 for one query a head the kernel gives its logits, which rank tokens alike
    fp32, -inf beyond pos."""
    need(rule in ("each", "largest"), f"no rule {rule}")
    dtype = vectors.dtype if vector_scale is None else q.dtype
    queries = q.unflatten(1, (vectors.shape[1], -1)).to(dtype)
    if not kernel:
        return scores_reference(queries, vectors, vector_scale, pos, scale, rule)
    return launch_scores(queries.contiguous(), vectors, vector_scale, pos.int(), scale, rule)


# ---- SALS's scores: a query for each block of tokens


def block_scores_reference(
    queries: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    block: int,
    offset: Tensor | None = None,
    run: int = 1,
) -> Tensor:
    """What block_scores says, in PyTorch, of queries [B, n, H, N, r*]."""
    H, N, r_score = queries.shape[2:]
    S = vectors.shape[2]
    tokens = torch.arange(S, device=pos.device)
    live = tokens <= pos[:, None]  # [B, S]
    vectors = vectors[..., :r_score]
    if vector_scale is not None:
        # Sums of products with codes can exceed fp16's range.
        queries = queries * 2**-7
        vectors = vectors.to(queries.dtype)
        vector_scale = vector_scale * 128
    logits = []  # of each block, [B, H, N, block]
    for i in range(queries.shape[1]):
        of_block = vectors[:, :, i * block : (i + 1) * block]
        logits.append(matmul_codes(queries[:, i], of_block.mT).float())
    logits = torch.cat(logits, -1)  # [B, H, N, S]
    if vector_scale is not None:
        logits = logits * vector_scale[:, :, None]
    if offset is not None:
        of_token = offset.mT[..., tokens // run]  # [B, H * N, S]
        logits = logits + of_token.unflatten(1, (H, N))
    logits = (logits * scale).masked_fill(~live[:, None, None], -torch.inf)
    return logits.softmax(-1).sum(2).masked_fill(~live[:, None], -torch.inf)


@jit
def _block_scores_kernel(
    query_ptr,  # [B, n, H, N, r*] of the model's dtype; in codes int8 [2, ...] (_queries_as_int8)
    query_scale_ptr,  # [B, n, H, N] fp32 of queries in codes; else None
    vectors_ptr,  # [B, H, S, r] of the queries' dtype, or int8
    vector_scale_ptr,  # [B, H, S] fp32; None: vectors are not int8
    offset_ptr,  # [B, runs, H, N] fp32; None: nothing is added to q . vector
    pos_ptr,  # [B] int32
    weight_ptr,  # exp2(logit - m of its tile) [B, H, S, NP], fp8 (e5m2) or fp32
    tile_m_ptr,  # [B, H, tiles, NP] fp32: m as it was when a tile was stored
    m_ptr,  # [B, H, splits, NP] fp32
    l_ptr,  # [B, H, splits, NP] fp32: the sums of exp2(logit - m) of splits
    query_strides,  # numbers between queries of two rows, blocks and heads, and from high to low
    strides,  # vectors between two rows of the batch, two heads and two tokens
    S,
    tiles,  # of S tokens
    r_score: tl.constexpr,  # leading numbers of a vector that count
    r: tl.constexpr,  # numbers of a vector
    scale,  # with log2(e)
    run,  # tokens that share an offset
    tiles_a_block,
    N: tl.constexpr,  # queries of a head
    T: tl.constexpr,  # tokens of a tile
    RB: tl.constexpr,  # ranks of a product
    STAGES: tl.constexpr,  # tiles in flight
    ONE_RUN: tl.constexpr,  # does a tile lie in one run?
):
    """Stores the weights exp2(logit - m) of a head's N queries, and what it takes to normalise
    them. m is near the largest logit so far: it rises only where a weight would leave e5m2's range,
    so each tile's own is stored. A program takes one split of the tokens."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    h = tl.program_id(1)
    H = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(pos_ptr + b) + 1
    NR: tl.constexpr = (r_score + RB - 1) // RB  # products of a vector
    NP: tl.constexpr = _padded(N, 8)
    # Int8 vectors are multiplied as they are, by queries that are split into int8, too.
    INT8_QUERIES: tl.constexpr = (
        vector_scale_ptr is not None and NR == 1 and query_ptr.dtype.element_ty != tl.float32
    )
    n = tl.arange(0, NP)
    dims = tl.arange(0, RB)[None, :]
    query_mask = (n < N)[:, None] & (dims < r_score)

    # 1. The tiles of this split.
    count = tl.cdiv(length, T)
    share = tl.cdiv(count, splits)
    first = split * share
    stop = tl.minimum(first + share, count)

    # 2. Tile after tile.
    m = tl.full([1, NP], -1e30, tl.float32)
    l = tl.zeros([T, NP], tl.float32)
    for tile in tl.range(first, stop, num_stages=STAGES):
        block = tl.cast(tile // tiles_a_block, tl.int64)
        query_row = b * query_strides[0] + block * query_strides[1] + h * query_strides[2]
        query_at = query_ptr + query_row + n[:, None] * r_score + dims
        token = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = token < length
        vector = b * strides[0] + h * strides[1] + token * strides[2]
        vector_scale = scale
        if vector_scale_ptr is not None:
            stored_scale = tl.load(vector_scale_ptr + vector, mask=live, other=0.0)
            vector_scale = stored_scale[:, None] * scale
        vector_at = vectors_ptr + vector[:, None] * r + dims
        logits = tl.zeros([T, NP], tl.float32)
        if NR == 1:
            x = tl.load(vector_at, mask=live[:, None] & (dims < r_score), other=0.0)
            if query_scale_ptr is not None:
                query = tl.load(query_at, mask=query_mask, other=0)
                low = tl.load(query_at + query_strides[3], mask=query_mask, other=0)
                scale_at = query_scale_ptr + query_row // r_score + n
                query_scale = tl.load(scale_at, mask=n < N, other=0.0)
            else:
                query, low, query_scale = _tile_queries(query_at, query_mask, INT8_QUERIES)
            if INT8_QUERIES:
                coarse = tl.dot(x, tl.trans(query), out_dtype=tl.int32)
                fine = tl.dot(x, tl.trans(low), out_dtype=tl.int32)
                logits = (coarse * 254 + fine).to(tl.float32) * query_scale[None, :]  # < 2**31
            else:
                x = x.to(query.dtype)
                logits = tl.dot(x, tl.trans(query), logits, input_precision="ieee")
        else:
            for i in range(0, NR * RB, RB):
                inside = dims + i < r_score
                x = tl.load(vector_at + i, mask=live[:, None] & inside, other=0.0)
                part = tl.load(query_at + i, mask=(n < N)[:, None] & inside, other=0.0)
                x = x.to(part.dtype)
                logits = tl.dot(x, tl.trans(part), logits, input_precision="ieee")
        # Always true where a tile lies in one run: no branch then. Else a branch, always taken, so
        # that the next tile's loads do not wait for what is in it.
        if ONE_RUN or tile < stop:
            logits *= vector_scale
            if offset_ptr is not None:
                runs = tl.cdiv(S, run)
                if ONE_RUN:
                    offset_at = ((b * runs + tile * T // run) * H + h) * N + n
                    offset = tl.load(offset_ptr + offset_at, mask=n < N, other=0.0)[None, :]
                else:
                    offset_row = ((b * runs + token // run)[:, None] * H + h) * N
                    mask = live[:, None] & (n < N)[None, :]
                    offset = tl.load(offset_ptr + offset_row + n[None, :], mask=mask, other=0.0)
                logits += offset * scale
            if tile * T + T > length:  # else all are live
                logits = tl.where(live[:, None], logits, float("-inf"))
            weight = tl.exp2(logits - m)
            # Rarely: m rises until the largest weight is 2**12. Below that e5m2 has 2**28 left.
            if tl.max(weight) > 32768:
                m_new = tl.maximum(m, tl.max(logits, 0)[None, :] - 12)
                l *= tl.exp2(m - m_new)
                weight = tl.exp2(logits - m_new)
                m = m_new
            l += weight
            at = weight_ptr + ((b * H + h) * S + token[:, None]) * NP + n[None, :]
            tl.store(at, weight.to(weight_ptr.dtype.element_ty), mask=live[:, None])
            tl.store(tile_m_ptr + ((b * H + h) * tiles + tile) * NP + n[None, :], m)
    at = ((b * H + h) * splits + split) * NP + n
    tl.store(m_ptr + at, tl.max(m, 0))
    tl.store(l_ptr + at, tl.sum(l, 0))


@jit
def _sum_weights_kernel(
    weight_ptr,  # of _block_scores_kernel [B, H, S, NP], fp8 (e5m2) or fp32
    tile_m_ptr,  # [B, H, tiles, NP] fp32
    m_ptr,  # [B, H, splits, NP] fp32
    l_ptr,  # [B, H, splits, NP] fp32
    pos_ptr,  # [B] int32
    out_ptr,  # [B, H, S] fp32
    S,
    splits,
    N: tl.constexpr,  # queries of a head
    T: tl.constexpr,  # tokens of a tile, as in _block_scores_kernel
    SP: tl.constexpr,  # splits, padded
):
    """out = the sum over a head's queries of a token's normalised weights, -inf beyond pos."""
    _wait_for_previous()
    _let_next_begin()
    h = tl.program_id(1)
    H = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(pos_ptr + b) + 1
    tiles = tl.cdiv(S, T)
    NP: tl.constexpr = _padded(N, 8)
    n = tl.arange(0, NP)
    split = tl.arange(0, SP)
    # 1. The normaliser of each query, from all splits.
    at = ((b * H + h) * splits + split[:, None]) * NP + n[None, :]
    m_of_split = tl.load(m_ptr + at, mask=(split < splits)[:, None], other=float("-inf"))
    l_of_split = tl.load(l_ptr + at, mask=(split < splits)[:, None], other=0.0)
    m = tl.maximum(tl.max(m_of_split, 0), -1e30)
    l = tl.sum(l_of_split * tl.exp2(m_of_split - m[None, :]), 0)
    # 2. The sums. Weights are not loaded ahead (one stage): from shared memory a thread would get
    # only a few bytes at once.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        token = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = token < length
        some = (n < N) & (n * 0 + tile * T < length)
        tile_m_at = tile_m_ptr + ((b * H + h) * tiles + tile) * NP + n
        tile_m = tl.load(tile_m_at, mask=some, other=float("-inf"))
        factor = tl.where(some, tl.exp2(tile_m - m) / l, 0.0)
        weight_at = weight_ptr + ((b * H + h) * S + token[:, None]) * NP + n[None, :]
        weight = tl.load(weight_at, mask=live[:, None], other=0.0)
        score = tl.sum(weight.to(tl.float32) * factor[None, :], 1)
        score = tl.where(live, score, float("-inf"))
        tl.store(out_ptr + (b * H + h) * S + token, score, mask=token < S)


def empty_block_scores(queries: Tensor, vectors: Tensor, *_: object, **more: object) -> Tensor:
    """An empty tensor of the shape that launch_block_scores gives."""
    return vectors.new_empty(vectors.shape[:3], dtype=torch.float32)


@operator(empty_block_scores)
def launch_block_scores(
    queries: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    block: int,
    offset: Tensor | None = None,
    run: int = 1,
    query_scale: Tensor | None = None,
) -> Tensor:
    """block_scores, of queries [B, n, H, N, r*], or codes [2, B, n, H, N, r*] with query_scale.
    vectors [B, H, S, r] are a view (check_store). block is a multiple of 16: else a tile would lie
    in two blocks."""
    coded = query_scale is not None
    first = queries[0] if coded else queries
    B, H, S, r = vectors.shape
    n, _, N, r_score = first.shape[1:]
    need(
        len(first) == B and r_score <= r,
        f"queries {list(queries.shape)} do not fit vectors {list(vectors.shape)}",
    )
    need(block > 0 and block % 16 == 0, f"block is {block}, not a multiple of 16")
    need(run > 0, f"a run has one token at least, not {run}")
    need(not coded or first.is_contiguous(), "queries in codes must be contiguous, as scales are")
    need(n == cdiv(S, block), f"no queries for blocks of {block} of {S} tokens")
    vector_dtype = queries.dtype if vector_scale is None else torch.int8
    query_dtype = torch.int8 if coded else queries.dtype
    strides = check_store(
        B,
        H,
        S,
        **{
            "vectors": (vectors, vector_dtype, r),
            "scale of vectors": (vector_scale, torch.float32),
        },
    )
    check(
        pos=(pos, torch.int32, B),
        **{
            "queries": (first[0], query_dtype, n, H, N, r_score),
            "scale of queries": (query_scale, torch.float32, B, n, H * N),
            "offset": (offset, torch.float32, B, cdiv(S, run), H * N),
        },
    )
    check_positions(pos, S)
    NP = power2(N, 8)
    config = scores_config(NP, r_score, tile_itemsize(queries.dtype, vectors))
    need(
        not coded or (config.ranks >= r_score and vector_dtype == torch.int8),
        "queries in codes do not fit the vectors",
    )
    T = min(config.tokens, block & -block)  # a power of two that divides the block
    tiles = cdiv(S, T)
    splits = cdiv(tiles, tiles_a_program(tiles, B * H, config.programs))
    # The interpreter rounds to e5m2 wrong.
    is_exact = queries.dtype == torch.float32 or triton.knobs.runtime.interpret
    weight_dtype = torch.float32 if is_exact else torch.float8_e5m2
    device = vectors.device
    weight = torch.empty(B, H, S, NP, dtype=weight_dtype, device=device)
    tile_m = torch.empty(B, H, tiles, NP, dtype=torch.float32, device=device)
    m = torch.empty(B, H, splits, NP, dtype=torch.float32, device=device)
    l = torch.empty(B, H, splits, NP, dtype=torch.float32, device=device)
    out = torch.empty(B, H, S, dtype=torch.float32, device=device)
    _block_scores_kernel[splits, H, B](
        query_ptr=queries,
        query_scale_ptr=query_scale,
        vectors_ptr=vectors,
        vector_scale_ptr=vector_scale,
        offset_ptr=offset,
        pos_ptr=pos,
        weight_ptr=weight,
        tile_m_ptr=tile_m,
        m_ptr=m,
        l_ptr=l,
        query_strides=(first.stride(0), H * N * r_score, N * r_score, queries.stride(0)),
        strides=strides,
        S=S,
        tiles=tiles,
        r_score=r_score,
        r=r,
        scale=scale * LOG2E,
        run=run,
        tiles_a_block=block // T,
        N=N,
        T=T,
        RB=config.ranks,
        STAGES=config.stages,
        ONE_RUN=run % T == 0,
        num_warps=config.warps,
        num_stages=config.stages,
        **overlapped(device),
    )
    # Programs are short, so there are enough to fill the chip 16 times, and four a head at least.
    # Warps: one for 1024 numbers of what the splits left, from two to four.
    programs = min(cdiv(S, max(T, 256)), max(4, 16 * SMS // (B * H)))
    _sum_weights_kernel[programs, H, B](
        weight_ptr=weight,
        tile_m_ptr=tile_m,
        m_ptr=m,
        l_ptr=l,
        pos_ptr=pos,
        out_ptr=out,
        S=S,
        splits=splits,
        N=N,
        T=T,
        SP=power2(splits),
        num_warps=max(2, min(4, power2(splits) * NP // 1024)),
        **overlapped(device),
    )
    return out


def block_scores(
    queries: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    block: int,
    offset: Tensor | None = None,
    run: int = 1,
    query_scale: Tensor | None = None,
    *,
    kernel: bool,
) -> Tensor:
    """A token's score is the sum over a head's queries of their attention weights (ours), where
    each block of `block` tokens has its own query.

    queries [B, n, Hq, r*] of n blocks, perhaps in codes with query_scale (block_queries). vectors
    [B, H, S, >= r*] of the queries' dtype, or int8 codes with vector_scale [B, H, S] fp32: a head
    of them serves N = Hq / H queries. Logits are (q . vector + offset) * scale; offset [B, runs,
    Hq] fp32, or None, one for each run of `run` tokens -> [B, H, S] fp32, -inf beyond pos. The
    kernel keeps weights in fp8 (e5m2) unless queries are fp32."""
    queries = queries.unflatten(-2, (vectors.shape[1], -1))
    if vector_scale is None:
        queries = queries.to(vectors.dtype)
    if not (kernel and block % 16 == 0):
        need(query_scale is None, "queries in codes need the kernel, and blocks of whole 16s")
        return block_scores_reference(
            queries, vectors, vector_scale, pos, scale, block, offset, run
        )
    return launch_block_scores(
        queries.contiguous(),
        vectors,
        vector_scale,
        pos.int(),
        scale,
        block,
        offset,
        run,
        query_scale,
    )


# ---------------------------------------------------------------------------------------- selection
# `select` finds the y tokens of the best scores, without sorting. A key is a score as an int32
# number of the same order, and the y best keys are those that reach a threshold. A search narrows a
# bracket lo, hi: more than `most` keys reach lo, and at most `most` keys reach hi. It needs nothing
# but the header.


def select_reference(
    scores: Tensor, pos: Tensor, x: int, y: int, z: int, wanted: Tensor | None
) -> Tensor:
    """What select says, in PyTorch, without the recent tokens."""
    S = scores.shape[-1]
    tokens = torch.arange(S, device=scores.device)
    one_a_row = (-1, *[1] * (scores.ndim - 1))  # [B, 1, .., 1]
    last = (pos - z).view(one_a_row)  # the newest token outside of the recent ones

    # The best of the candidates. NaN is none: topk would take it for the largest.
    is_candidate = (tokens >= x) & (tokens <= last) & ~scores.isnan()
    candidates = scores.masked_fill(~is_candidate, -torch.inf)
    best, index = candidates.topk(min(y, S), sorted=wanted is not None)
    is_chosen = best > -torch.inf
    if wanted is not None:
        is_chosen = is_chosen & (tokens[: index.shape[-1]] < wanted.view(one_a_row))
    chosen = index.where(is_chosen, -1)

    sinks = tokens[:x].where(tokens[:x] <= last, -1).expand(*index.shape[:-1], -1)
    return torch.cat((sinks, chosen), -1).int()


@jit
def _load_keys(scores_ptr, j, S, x, last):
    """The keys of tokens j of a row of scores [S] fp32. Candidates are the tokens x to last; any
    other has a dead key, -2**31."""
    score = tl.load(scores_ptr + j, mask=j < S, other=0.0)
    alive = (j >= x) & (j <= last) & (j < S) & (score > float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(alive, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@jit
def _reach(keys, row, left, right):
    """How many keys reach left, and how many reach right >= left: of a tile of keys; or, where row
    is given, of all tiles of that row (scores_ptr, tile's tokens, S, x, last)."""
    if row is None:
        # Both counts in one sum, the second in the upper 16 bits: a tile has 2**15 keys at most
        both = tl.sum(tl.where(keys >= right, 65537, tl.where(keys >= left, 1, 0)))
        return both & 65535, (both >> 16) & 65535
    else:
        scores_ptr, i, S, x, last = row
        reach_left = last * 0
        reach_right = last * 0
        for start in range(0, S, i.shape[0] * i.shape[1]):
            tile = _load_keys(scores_ptr, start + i, S, x, last)
            reach_left += tl.sum((tile >= left).to(tl.int32))
            reach_right += tl.sum((tile >= right).to(tl.int32))
        return reach_left, reach_right


@jit
def _guesses(lo, hi, count_lo, count_hi, goal):
    """Two numbers between lo and hi. One interpolates the counts to the goal. The other is the
    middle, so that 32 steps are always enough."""
    # 64-bit scalars would double the latency of a step. fp32 is exact enough for a guess.
    share = (count_lo.to(tl.float32) - goal) / (count_lo - count_hi).to(tl.float32)
    guess = (lo.to(tl.float32) + (hi.to(tl.float32) - lo.to(tl.float32)) * share).to(tl.int32)
    guess = tl.minimum(tl.maximum(guess, lo + 1), hi - 1)
    middle = (lo & hi) + ((lo ^ hi) >> 1)
    return tl.minimum(guess, middle), tl.maximum(guess, middle)


@jit
def _threshold(keys, row, least, most):
    """lo, hi, count(keys >= hi) of a tile or row. The count lies in least..most; it is less if keys
    tie at lo = hi - 1. If at most `most` keys are alive, lo = hi is below all of them."""
    count_lo, _ = _reach(keys, row, -2147483647, 2147483647)
    if row is None:
        lo = tl.min(tl.where(keys > -2147483648, keys, 2147483646))
        hi = tl.max(keys) + 1
    else:
        lo = -2139095041  # the key of minus infinity
        hi = 2139095041  # beyond that of infinity
    fits = count_lo <= most
    lo = tl.where(fits, -2147483647, lo)
    hi = tl.where(fits, -2147483647, hi)
    count_hi = tl.where(fits, count_lo, 0)
    while (count_hi < least) & (hi > lo + 1):
        left, right = _guesses(lo, hi, count_lo, count_hi, (least + most) * 0.5)
        reach_left, reach_right = _reach(keys, row, left, right)
        is_above_left = reach_left > most  # the threshold is
        is_above_right = reach_right > most
        count_hi = tl.where(
            is_above_right, count_hi, tl.where(is_above_left, reach_right, reach_left)
        )
        count_lo = tl.where(
            is_above_right, reach_right, tl.where(is_above_left, reach_left, count_lo)
        )
        hi = tl.where(is_above_right, hi, tl.where(is_above_left, right, left))
        lo = tl.where(is_above_right, right, tl.where(is_above_left, left, lo))
    return lo, hi, count_hi


@jit
def _places(keep):
    """Places 0, 1, .. of the kept numbers of a tile [C, R], row after row. A row lies in one
    thread, so only C counts are summed across threads."""
    keep = keep.to(tl.int32)
    counts = tl.sum(keep, 1)
    return (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(keep, 1) - 1


@jit
def _store_kept(out_ptr, keys, index, lo, hi, spare):
    """Stores the index of the keys that reach hi, and of the first `spare` keys that equal lo ->
    how many it stored, and how many of these equal lo."""
    keep = keys >= hi
    tied = keys < -2147483648  # none
    if spare > 0:
        tied = keys == lo
        tied &= _places(tied) < spare
        keep |= tied
    tl.store(out_ptr + _places(keep), index, mask=keep)
    return tl.sum(keep.to(tl.int32)), tl.sum(tied.to(tl.int32))


@jit
def _tile_of(N: tl.constexpr, C: tl.constexpr):
    """0 .. N - 1 as a tile [C, N / C], neighbours in a column.

    With the hint a thread loads one number at a time, as it stores them. Without it all pointers
    would move through shared memory."""
    i = tl.arange(0, C)[:, None] + tl.arange(0, N // C)[None, :] * C
    return tl.max_contiguous(i, [1, 1])


@jit
def _survivors_kernel(
    scores_ptr,  # [B, S] fp32
    pos_ptr,  # [B] int32
    key_ptr,  # [B, chunks, CAP] int32
    index_ptr,  # [B, chunks, CAP] int32
    cut_ptr,  # [B, chunks] int32
    S,
    x,  # sinks
    z,  # recent tokens: candidates are x .. pos - z
    least,  # tokens that a chunk keeps
    chunks,
    N: tl.constexpr,  # tokens of a chunk
    C: tl.constexpr,  # rows of its tile
    CAP: tl.constexpr,  # tokens that a chunk keeps at most
):
    """Keeps the best tokens of a chunk: `least` to CAP of them, or fewer where keys tie at the cut
    or the chunk has fewer. Stores their keys, followed by dead ones, their index, and the cut: all
    keys that are dropped lie below it."""
    _wait_for_previous()
    _let_next_begin()
    b = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    last = tl.load(pos_ptr + b) - z

    # Chunks interleave in runs of 4, so that neighbouring high scores spread over all chunks.
    i = _tile_of(N, C)
    j = ((i // 4) * chunks + chunk) * 4 + i % 4
    keys = _load_keys(scores_ptr + b * S, j, S, x, last)
    _, hi, count = _threshold(keys, None, least, CAP)

    keep = keys >= hi
    slot = (b * chunks + chunk) * CAP
    place = slot + _places(keep)
    tl.store(key_ptr + place, keys, mask=keep)
    tl.store(index_ptr + place, j, mask=keep)
    rest = tl.arange(0, CAP)
    tl.store(key_ptr + slot + rest, tl.full([CAP], -2147483648, tl.int32), mask=rest >= count)
    tl.store(cut_ptr + b * chunks + chunk, hi)


@jit
def _select_kernel(
    scores_ptr,  # [B, S] fp32
    pos_ptr,  # [B] int32
    wanted_ptr,  # [B] int32: how many tokens a row of the batch takes; None: y
    key_ptr,  # of _survivors_kernel [B, N] int32; None: candidates are all tokens
    index_ptr,  # [B, N] int32, or None
    cut_ptr,  # [B, CHUNKS] int32, or None
    out_ptr,  # [B, x + y] int32
    S,
    x,  # sinks
    y,  # tokens that are chosen
    z,  # recent tokens, which are not
    N: tl.constexpr,  # candidates of a tile
    C: tl.constexpr,  # rows of the tile
    CHUNKS: tl.constexpr,
    XP: tl.constexpr,  # x, padded
    YP: tl.constexpr,  # y, padded
):
    """Stores the sinks 0 .. x - 1, and the y tokens of x .. pos - z with the best scores; -1 if
    there are fewer."""
    _wait_for_previous()
    _let_next_begin()
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(pos_ptr + b) - z  # the newest token outside of the recent window
    if wanted_ptr is None:
        want = y
    else:
        want = tl.minimum(tl.load(wanted_ptr + b), y)
    scores_ptr += b * S
    out_ptr += b * (x + y)

    # The candidates
    i = _tile_of(N, C)
    if key_ptr is None:
        index = i
        keys = _load_keys(scores_ptr, i, S, x, last)
    else:
        cut = tl.load(cut_ptr + b * CHUNKS + tl.arange(0, CHUNKS))
        keys = tl.load(key_ptr + b * N + i)
        index = tl.load(index_ptr + b * N + i)

    # The best of them
    lo, hi, total = _threshold(keys, None, want, want)
    done = True
    if key_ptr is not None:  # dropped keys are below the cuts: exact, unless one could reach hi
        done = tl.max(cut, 0) <= hi
    spare = tl.where(lo < hi, want - total, 0)
    _store_kept(out_ptr + x, keys, index, lo, hi, spare)
    total += spare

    if not done:  # the same over all tokens, tile by tile
        lo, hi, total = _threshold(None, (scores_ptr, i, S, x, last), want, want)
        spare = tl.where(lo < hi, want - total, 0)
        total = last * 0
        for start in range(0, S, N):
            keys = _load_keys(scores_ptr, start + i, S, x, last)
            kept, ties = _store_kept(out_ptr + x + total, keys, start + i, lo, hi, spare)
            total += kept
            spare -= ties

    # The sinks, and -1 in the places that are left
    sink = tl.arange(0, XP)
    rest = tl.arange(0, YP)
    tl.store(out_ptr + sink, tl.where(sink <= last, sink, -1), mask=sink < x)
    tl.store(out_ptr + x + rest, tl.full([YP], -1, tl.int32), mask=(rest >= total) & (rest < y))


def empty_selection(
    scores: Tensor, pos: Tensor, x: int, y: int, z: int, wanted: Tensor | None = None
) -> Tensor:
    """An empty tensor for what launch_select gives."""
    return pos.new_empty(len(pos), x + y)


@operator(empty_selection)
def launch_select(
    scores: Tensor, pos: Tensor, x: int, y: int, z: int, wanted: Tensor | None = None
) -> Tensor:
    """scores [B, S] fp32 -> index [B, x + y] int32: the sinks 0 .. x - 1, and the y best-scored
    tokens of x .. pos - z, or wanted [B] int32 of them; -1 if there are fewer. Of equal scores at
    the threshold any may be chosen. Choice and order are the same in every run.

    A long row of scores takes two kernels. Chunks keep a few more tokens than their part of y, and
    a program for each row selects among them. If a chunk dropped one too many, it passes over all
    tokens."""
    need(scores.ndim == 2, f"scores must be [B, S], not {list(scores.shape)}")
    B, S = scores.shape
    need(
        min(x, z) >= 0 and y >= 1, f"x {x} and z {z} must not be negative, y {y} must be at least 1"
    )
    need(not select_passes(S, y), f"{y} of {S} tokens are more than chunks can keep: use topk")
    check(
        pos=(pos, torch.int32, B),
        scores=(scores, torch.float32, B, S),
        wanted=(wanted, torch.int32, B),
    )
    out = pos.new_empty(B, x + y)
    plan = select_chunks(S, y)
    if plan is None:
        n_chunks = 1
        n_candidates = power2(S, 128)
        key = index = cut = None
    else:
        n_chunks = plan.n_chunks
        n_candidates = plan.n_chunks * plan.most
        key = pos.new_empty(B, n_candidates)
        index = pos.new_empty(B, n_candidates)
        cut = pos.new_empty(B, n_chunks)
        tile_rows, warps = select_config(plan.tokens, chunk=True)
        _survivors_kernel[n_chunks, B](
            scores_ptr=scores,
            pos_ptr=pos,
            key_ptr=key,
            index_ptr=index,
            cut_ptr=cut,
            S=S,
            x=x,
            z=z,
            least=plan.least,
            chunks=n_chunks,
            N=plan.tokens,
            C=tile_rows,
            CAP=plan.most,
            num_warps=warps,
            **overlapped(scores.device),
        )
    tile_rows, warps = select_config(n_candidates)
    _select_kernel[B,](
        scores_ptr=scores,
        pos_ptr=pos,
        wanted_ptr=wanted,
        key_ptr=key,
        index_ptr=index,
        cut_ptr=cut,
        out_ptr=out,
        S=S,
        x=x,
        y=y,
        z=z,
        N=n_candidates,
        C=tile_rows,
        CHUNKS=n_chunks,
        XP=power2(x),
        YP=power2(y),
        num_warps=warps,
        **overlapped(scores.device),
    )
    return out


class SelectChunks(NamedTuple):
    """How `select` cuts a long row of scores into chunks; all but `least` are powers of two."""

    n_chunks: int
    tokens: int  # of a chunk
    least: int  # survivors of a chunk
    most: int


def select_chunks(S: int, y: int) -> SelectChunks | None:
    """How `select` cuts a row of S scores to find the y best. None: one program takes the row
    whole, as S is at most 4096, which one program searches soon, or chunks would keep too much."""
    if S <= 4096:
        return None
    # more tokens a chunk where the survivors of smaller ones are too many
    for tokens in (1024, 2048):
        # Up to 32 chunks of so many tokens, then larger ones: up to 128 of 8192 tokens
        n_chunks = max(min(32, power2(cdiv(S, tokens))), power2(cdiv(S, 8192)))
        n_chunks = min(128, n_chunks)
        tokens_of_chunk = power2(cdiv(cdiv(S, 4), n_chunks) * 4)  # chunks interleave in runs of 4

        # A chunk's part of y varies like a count of random hits, by its root: three deviations more
        # survive at least, six at most, and a few more where the part is small.
        part = cdiv(y, n_chunks)
        least = part + int(3 * part**0.5) + 8
        most = power2(part + int(6 * part**0.5) + 16)
        # A program holds its chunk, and later all survivors, in registers: 32768 keys are 32 a
        # thread.
        if most < tokens_of_chunk and max(tokens_of_chunk, n_chunks * most) <= 32768:
            return SelectChunks(n_chunks, tokens_of_chunk, least, most)
    return None


def select_passes(S: int, y: int) -> bool:
    """Whether the kernel would have to pass over such a row many times, as no chunks fit, and the
    row, of more than 8192 scores, is too long for one program: topk is faster."""
    return S > 8192 and select_chunks(S, y) is None


def select_config(N: int, chunk: bool = False) -> tuple[int, int]:
    """(rows of a tile of N keys, warps). A thread has one row. A chunk takes more warps: it is
    searched less, so loads weigh more."""
    keys_a_warp = 256 if chunk else 512
    warps = max(4, min(32, N // keys_a_warp))
    return min(N, 32 * warps), warps


def select(
    scores: Tensor,
    pos: Tensor,
    budget: tuple[int, int, int],
    wanted: Tensor | None = None,
    recent: bool = False,
    *,
    kernel: bool,
) -> Tensor:
    """The tokens of a budget: its n_sinks first ones, and of those between these and the n_recent
    last ones the n_selected best. With `recent` the last ones, too.

    scores [B, Hkv or 1, G or 1, S] fp32, of which -inf and NaN are never chosen; pos [B] -> an
    index [B, Hkv or 1, G or 1, n] int32, -1 where there is no such token. The sinks come first,
    then the selected ones, not sorted, then the recent ones. wanted [B]: how many are selected in
    each row; None: all."""
    n_sinks, n_selected, n_recent = budget
    S = scores.shape[-1]
    if kernel and n_selected and not select_passes(S, n_selected):
        sets = scores.shape[1:-1].numel()  # each is a row of its own
        pos_of_set = pos.int().repeat_interleave(sets)
        wanted_of_set = None if wanted is None else wanted.int().repeat_interleave(sets)
        index = launch_select(
            scores.flatten(0, -2), pos_of_set, n_sinks, n_selected, n_recent, wanted_of_set
        )
        index = index.unflatten(0, scores.shape[:-1])
    else:
        index = select_reference(scores, pos, n_sinks, n_selected, n_recent, wanted)
    if not recent or n_recent == 0:
        return index
    one_a_row = (-1, *[1] * (index.ndim - 1))
    newest = pos.view(one_a_row) - torch.arange(n_recent, device=pos.device)  # [B, 1, 1, n_recent]
    newest = newest.clamp(min=-1).int()
    return torch.cat((index, newest.expand(*index.shape[:-1], -1)), -1)


# ---------------------------------------------------------------- shared by the kernels that attend
# A program of a kernel that attends takes one split of a row's tokens, for the G queries that share
# a KV head (if each query head has its own index, for one query). It runs over tiles of T tokens
# with an online softmax:
#
#     m    [G]     the largest logit so far
#     l    [T, G]  the sum of exp2(logit - m), of every T-th token; summed over T at the end
#     acc  [D, G]  the sum of exp2(logit - m) v
#
# Logits are in log2 units: the launcher's scale has log2(e). A logit that is not there is -1e30,
# not -inf, since the difference of two of these would be NaN. Where there are several splits, each
# stores its m, l and acc, and a second kernel joins them. The block needs nothing but the header.


def attend_plain_reference(
    q: Tensor, k: Tensor, v: Tensor, live: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of one query each: q [B, Hq, D], k and v [B, Hkv, S, D], live [B, S] or [B, Hkv, S]
    bool -> [B, Hq, D]. A group's queries share K and V. scale None: 1 / sqrt(D)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, D]
    live = live[:, None, None] if live.ndim == 2 else live[:, :, None]
    if q.shape[-1] == v.shape[-1]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=live, scale=scale).flatten(1, 2)
    # Where widths differ, SDPA would first copy K and V.
    weights = matmul_codes(q * scale, k.mT).float().masked_fill(~live, -torch.inf).softmax(-1)
    return matmul_codes(weights, v).flatten(1, 2)


class Splits(NamedTuple):
    """Where the splits of a launch put their parts of the result."""

    m: Tensor | None  # [B, Hq, splits] fp32; None: there is one split, and no merge
    l: Tensor | None  # [B, Hq, splits] fp32
    out: Tensor  # [B, Hq, splits, D] fp32; of one split the result [B, Hq, D]


def attend_splits(n: int, programs: int, programs_a_sm: int) -> int:
    """How many splits n tokens are cut into. A split of all heads and rows is `programs` programs;
    there are as many splits as give each multiprocessor programs_a_sm of these, at least one, and
    none has fewer than 128 tokens, which are not worth a merge."""
    return max(1, min(cdiv(n, 128), programs_a_sm * SMS // programs))


def empty_splits(q: Tensor, splits: int, D: int) -> Splits:
    """Empty tensors for the parts of queries [B, Hq, *], of D numbers each."""
    B, Hq, _ = q.shape
    if splits == 1:
        return Splits(None, None, torch.empty(B, Hq, D, dtype=q.dtype, device=q.device))
    m = torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)
    l = torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)
    out = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
    return Splits(m, l, out)


@jit
def _merge_kernel(
    m_ptr,  # [B, Hq, splits] fp32
    l_ptr,  # [B, Hq, splits] fp32
    part_ptr,  # [B, Hq, splits, D] fp32
    out_ptr,  # [B, Hq, D] of q's dtype
    splits,
    D: tl.constexpr,
    N: tl.constexpr,  # splits at a time
):
    """out = sum of exp2(m) part / sum of exp2(m) l, over a head's splits. A program takes one."""
    _wait_for_previous()
    _let_next_begin()
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, _padded(D))
    m = tl.full([], -1e30, tl.float32)
    l = tl.full([], 0.0, tl.float32)
    acc = tl.zeros(d.shape, tl.float32)
    for start in range(0, splits, N):
        split = start + tl.arange(0, N)
        at = head * splits + split
        m_of_split = tl.load(m_ptr + at, mask=split < splits, other=-1e30)
        l_of_split = tl.load(l_ptr + at, mask=split < splits, other=0.0)
        mask = (split < splits)[:, None] & (d < D)[None, :]
        part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(m_of_split, 0))
        weight = tl.exp2(m_of_split - m_new)
        l = l * tl.exp2(m - m_new) + tl.sum(l_of_split * weight, 0)
        acc = acc * tl.exp2(m - m_new) + tl.sum(part * weight[:, None], 0)
        m = m_new
    tl.store(out_ptr + head * D + d, (acc / l).to(out_ptr.dtype.element_ty), mask=d < D)


def merge_splits(parts: Splits, q: Tensor) -> Tensor:
    """The result [B, Hq, D], of q's dtype, of the parts of a launch's splits."""
    if parts.m is None:
        return parts.out
    B, Hq, splits, D = parts.out.shape
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    # As many splits at once as registers hold: 64 of at most 128 numbers, in two warps, where there
    # are many; else up to 16, in one.
    if splits > 16 and D <= 128:
        splits_at_once = 64
        warps = 2
    else:
        splits_at_once = min(16, power2(splits))
        warps = 1
    _merge_kernel[B * Hq,](
        m_ptr=parts.m,
        l_ptr=parts.l,
        part_ptr=parts.out,
        out_ptr=out,
        splits=splits,
        D=D,
        N=splits_at_once,
        num_warps=warps,
        **overlapped(out.device),
    )
    return out


class IndexShape(NamedTuple):
    """What the kernels need to know of an index [B, n], [B, Hkv, n] or [B, Hq, n] int32."""

    n: int  # tokens; without an index those of the store
    sets: int  # of tokens in a row of the batch: 1, Hkv or Hq
    stride: int  # numbers between two rows of the batch


def check_index(index: Tensor | None, B: int, Hkv: int, Hq: int, S: int) -> IndexShape:
    """Raises ValueError for an index of another shape or dtype. None: all S tokens of a store."""
    if index is None:
        return IndexShape(S, 1, 0)
    shape = list(index.shape)
    need(len(shape) in (2, 3) and shape[0] == B, f"index must be [{B}, .., n], not {shape}")
    sets = index.shape[1:-1].numel()
    need(
        sets in (1, Hkv, Hq), f"index must have a set a row, a KV head or a query head, not {sets}"
    )
    check(index=(index[0], torch.int32, *shape[1:]))  # whose rows may lie apart
    return IndexShape(shape[-1], sets, index.stride(0))


def check_exact(exact: Sequence[Tensor], q: Tensor, Hkv: int, DV: int) -> int:
    """The number of exact slots, 0 without any. Raises ValueError unless there are none, or keys
    [B, z, Hkv, D] after RoPE and values [B, z, Hkv, DV] of q's dtype."""
    if not exact:
        return 0
    exact_k, exact_v = exact
    B, _, D = q.shape
    z = exact_k.shape[1]
    check(
        **{
            "exact keys": (exact_k, q.dtype, B, z, Hkv, D),
            "exact values": (exact_v, q.dtype, B, z, Hkv, DV),
        }
    )
    return z


@jit
def _load_queries(q_ptr, d, exists, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """The queries [G, D] of a group as columns [len(d), GP]: their dims d, zero unless `exists`."""
    g = tl.arange(0, GP)
    mask = (g < G)[None, :] & exists[:, None]
    return tl.load(q_ptr + g[None, :] * D + d[:, None], mask=mask, other=0.0)


@jit
def _attend_exact(
    q_ptr,  # [G, D]: the group's queries
    exact_k_ptr,  # [B, z, Hkv, D] of q's dtype, after RoPE
    exact_v_ptr,  # [B, z, Hkv, DV] of q's dtype
    b,  # the row
    h,  # its KV head
    Hkv,
    pos,  # of the row
    z,  # exact slots
    scale,  # with log2(e)
    m,  # [GP] fp32
    l,  # [T, GP] fp32
    acc,  # [len(channel), GP] fp32
    channel,  # the value channels of acc's rows
    has_channel,  # which of these there are
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    T: tl.constexpr,
):
    """The softmax (m, l, acc), and the exact tokens taken into it. Their slots fill from the left:
    with fewer than z tokens, slot i has token i, and the slots beyond pos are empty."""
    d = tl.arange(0, _padded(D, 16))
    query = _load_queries(q_ptr, d, d < D, D, G, GP)
    for start in tl.range(0, z, T, num_stages=1):
        slot = start + tl.arange(0, T)
        live = (slot < z) & (slot <= pos)
        vector = (b * z + slot) * Hkv + h
        k_at = exact_k_ptr + vector[:, None] * D + d[None, :]
        k = tl.load(k_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        logits = tl.dot(k, query, input_precision="ieee") * scale
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        acc = acc * shrink[None, :]
        # Values are loaded after the keys' product: triton 3.6 makes wrong code for Hopper GPUs
        # where two tiles go to shared memory before it, in a loop without loads ahead.
        v_at = exact_v_ptr + vector[:, None] * DV + channel[None, :]
        v = tl.load(v_at, mask=live[:, None] & has_channel[None, :], other=0.0)
        acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc, input_precision="ieee")
        m = m_new
    return m, l, acc


@jit
def _store_split(
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32
    out_ptr,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV] of q's dtype
    first_head,  # of the group, among all rows' heads
    split,
    splits,
    m,  # [GP] fp32
    l,  # [GP] fp32: summed over tokens
    acc,  # [len(channel), GP] fp32
    channel,  # the value channels of acc's rows
    has_channel,  # which of these there are
    G: tl.constexpr,
    GP: tl.constexpr,
    DV: tl.constexpr,
):
    """Stores the result, or a split's part of it."""
    g = tl.arange(0, GP)
    at = (first_head + g) * splits + split
    if m_ptr is None:
        acc = acc / l[None, :]
    else:
        tl.store(m_ptr + at, m, mask=g < G)
        tl.store(l_ptr + at, l, mask=g < G)
    out_at = out_ptr + at[None, :] * DV + channel[:, None]
    mask = has_channel[:, None] & (g < G)[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


class TileConfig(NamedTuple):
    """How a launch that attends is cut. Measured on an H200; fp32 is for tests."""

    tokens: int  # of a tile
    warps: int
    stages: int  # tiles in flight
    programs_a_sm: int  # that hide the memory's latency on a multiprocessor


def plain_config(dtype: torch.dtype, DV: int, is_large: bool) -> TileConfig:
    """Of plain values, DV numbers each. Keys and values of 64 tokens and 128 dims in 16 bits are 32
    KB a tile. Three in flight need large shared memory (is_large: has_large_shared_memory), else
    there are two, of 32 tokens if values are wider or numbers are in fp32."""
    if dtype == torch.float32:
        return TileConfig(32, warps=4, stages=2, programs_a_sm=4)
    if is_large:
        return TileConfig(64, warps=4, stages=3, programs_a_sm=4)
    return TileConfig(64 if DV <= 128 else 32, warps=4, stages=2, programs_a_sm=4)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have: 227 KB on an H100, 163 KB on an A100, and 99
    KB on the smallest GPUs that kernels run on, and where there is none."""
    if device.type != "cuda":
        return 99 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program can have 160 KB of shared memory (A100, H100)."""
    return shared_memory(device) >= 160 * 1024


# --------------------------------------------------- shared by the kernels that decode packed codes
# Codes of 2 or 4 bits, as KIVI's and SALS's values have them: how they lie in memory, and how a
# kernel reads a tile of them as numbers. The block needs the header, and check_store in it; a
# kernel loads codes as words of four bytes, which are decoded together.


class Packing(NamedTuple):
    """How a vector's codes lie, here D = 256 channels of BITS = 2 bits in WIDTH = 64 bytes:

        bits      7 6   5 4   3 2   1 0
        byte 0    192   128    64     0     the channels whose codes it holds
        byte 1    193   129    65     1
        ..
        plane       3     2     1     0     each has 64 channels: RUNS = 2 runs of RUN = 32

    The channels of a GROUP share a minimum and a scale. A run lies in one group. If WIDTH is no
    power of 2, a plane is one padded run over several groups."""

    BITS: int  # of a code
    GROUP: int  # channels that share a minimum and a scale
    WIDTH: int  # bytes of a vector, and channels of a plane
    RUN: int  # channels of a run
    RUNS: int  # of a plane
    PLANES: int  # codes of a byte
    D: int  # channels
    COLUMNS: int  # channels of a decoded tile, padded


def packing_of(D: int, bits: int, group: int, run: int) -> Packing:
    """The packing of D channels in runs of `run` bytes."""
    width = D * bits // 8
    planes = 8 // bits
    runs = max(1, power2(width) // run)
    return Packing(bits, group, width, run, runs, planes, D, planes * runs * run)


def value_packing(D: int, bits: int, has_one_scale: bool = False) -> Packing:
    """The packing of values: as `pack` makes it of codes whose groups of 32 channels, or of all in
    a narrow head, have a (minimum, scale); or as quantize_spread does, with one scale a vector."""
    need(bits in (2, 4), f"codes have 2 or 4 bits, not {bits}")
    group = D if has_one_scale else min(32, D)
    width = D * bits // 8
    is_whole = D % group == 0 and D * bits % 32 == 0
    need(
        is_whole and (has_one_scale or group == power2(group)),
        f"values of {bits} bits need a head dim of 16 or a multiple of 32, not {D}",
    )
    # Runs of 32 channels, as groups are; a plane that has to be padded is one run.
    run = min(32, width) if width == power2(width) else power2(width)
    return packing_of(D, bits, group, run)


@jit
def _half_at(words, shift):
    """The fp16 number in bits shift to shift + 15 of each word, as fp32."""
    return ((words >> shift) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _mantissas(words, plane, byte, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes out of words of four bytes as numbers 1 + code / 2**n, and how many codes 2**n a 1
    stands for.

    This takes no conversions, which run at a quarter of the rate. A rotation brings a byte to the
    top of a mantissa, and a mask leaves one code: n is 8 less the code's first bit. One rotation
    serves all codes of a byte. The 1 stands for up to 256 codes, which costs sums 8 bits. These are
    too many for fp32, where each code is rotated to the top by itself: n is BITS."""
    SPAN: tl.constexpr = BITS if dtype == tl.float32 else 8
    first_bit = plane * BITS  # of the code in its byte
    in_span = first_bit % SPAN
    # A rotation, never by 0, is one instruction.
    turn = (23 - SPAN - (first_bit - in_span) - byte * 8) & 31
    mask = ((1 << BITS) - 1) << (23 - SPAN + in_span)
    words = words.to(tl.uint32, bitcast=True)
    turned = (words << turn) | (words >> (32 - turn))
    number = ((turned & mask) | 0x3F800000).to(tl.float32, bitcast=True)
    codes_in_one = (1 << (SPAN - in_span)).to(tl.float32)
    return number, codes_in_one


@jit
def _columns(PACKING: tl.constexpr):
    """The channel of each column of a decoded tile, and whether it exists, [COLUMNS]. Columns go
    plane by plane, and a plane is padded to a power of two."""
    PLANE: tl.constexpr = PACKING.RUNS * PACKING.RUN
    column = tl.arange(0, PACKING.PLANES * PLANE)
    byte = column % PLANE
    return (column // PLANE) * PACKING.WIDTH + byte, byte < PACKING.WIDTH


@jit
def _decode_values(
    codes_ptr,  # words of four bytes [.., DV * BITS / 32]
    scale_ptr,  # (minimum, scale) in a word [.., DV / GROUP] int32; or one scale [..] fp16
    vector,  # [T]: their numbers
    live,  # [T]
    dtype: tl.constexpr,
    PACKING: tl.constexpr,
):
    """V [T, COLUMNS] of packed codes. With one scale a vector, which is a fp16 number, codes mean
    (2 code - 2**BITS + 1) scale."""
    BITS: tl.constexpr = PACKING.BITS
    PLANES: tl.constexpr = PACKING.PLANES
    WIDTH: tl.constexpr = PACKING.WIDTH
    RUNS: tl.constexpr = PACKING.RUNS
    WORDS: tl.constexpr = PACKING.RUN // 4
    GROUPS: tl.constexpr = PACKING.D // PACKING.GROUP
    ONE_SCALE: tl.constexpr = scale_ptr.dtype.element_ty != tl.int32
    T: tl.constexpr = vector.shape[0]

    # 1. Words of codes, [T, RUNS * WORDS].
    word = tl.arange(0, RUNS * WORDS)[None, :]
    words_at = codes_ptr + vector[:, None] * (WIDTH // 4) + word
    words = tl.load(words_at, mask=live[:, None] & (word < WIDTH // 4), other=0)

    # 2. The minimum and scale of each group. What is loaded ahead has four bytes at least.
    if ONE_SCALE:
        # The scales of two neighbouring vectors are one word.
        both_ptr = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        both = tl.load(both_ptr + (vector >> 1), mask=live, other=0)
        scale = _half_at(both, ((vector & 1) << 4).to(tl.int32))[:, None, None, None, None]
        low = scale * (1.0 - 2**BITS)
        step = scale * 2
    elif RUNS * WORDS * 4 == WIDTH:
        # Groups lie in the order of runs, so that one wide load takes them.
        group = tl.arange(0, PLANES * RUNS) // (PACKING.GROUP // PACKING.RUN)
        pair_at = scale_ptr + vector[:, None] * GROUPS + group[None, :]
        pairs = tl.load(pair_at, mask=live[:, None], other=0)
        pairs = tl.reshape(pairs, [T, PLANES, RUNS, 1, 1])
    else:
        # Planes are padded: each word has its own group.
        channel = (tl.arange(0, PLANES) * WIDTH)[:, None] + (tl.arange(0, WORDS) * 4)[None, :]
        group = tl.minimum(channel, PACKING.D - 1) // PACKING.GROUP
        pair_at = scale_ptr + vector[:, None, None] * GROUPS + group[None, :, :]
        pairs = tl.load(pair_at, mask=live[:, None, None], other=0)[:, :, None, :, None]

    # 3. Decode: minimum + code * scale.
    plane = tl.arange(0, PLANES)[None, :, None, None, None]
    byte = tl.arange(0, 4)[None, None, None, None, :]
    words = tl.reshape(words, [T, 1, RUNS, WORDS, 1])
    number, codes_in_one = _mantissas(words, plane, byte, BITS, dtype)
    if not ONE_SCALE:
        low = _half_at(pairs, 0)
        step = _half_at(pairs, 16)
    step = step * codes_in_one
    v = number * step + (low - step)
    return tl.reshape(v, [T, PLANES * RUNS * PACKING.RUN]).to(dtype)


def check_coded_values(
    codes: Tensor, scale: Tensor, B: int, Hkv: int, S: int, bits: int
) -> tuple[Packing, tuple[int, ...]]:
    """The packing and the strides (check_store) of values in codes [B, Hkv, S, DV * bits / 8]
    uint8, with (minimum, scale) [B, Hkv, S, DV / min(32, DV), 2] or one scale [B, Hkv, S], in fp16.
    Raises ValueError for others."""
    need(bits in (2, 4), f"codes have 2 or 4 bits, not {bits}")
    n_bytes = codes.shape[3]
    has_one_scale = scale.ndim == 3
    packing = value_packing(n_bytes * 8 // bits, bits, has_one_scale)
    # A kernel reads (minimum, scale), or the scales of two neighbouring vectors, as one word.
    need(scale.storage_offset() % 2 == 0, "scale of values must begin at a whole word")
    pair = () if has_one_scale else (packing.D // packing.GROUP, 2)
    strides = check_store(
        B,
        Hkv,
        S,
        **{
            "values": (codes, torch.uint8, n_bytes),
            "scale of values": (scale, torch.float16, *pair),
        },
    )
    return packing, strides


def as_words(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Values in codes as _decode_values takes them: words of codes, and (minimum, scale) as one."""
    words = codes.view(torch.int32)
    if scale.ndim == 3:
        return words, scale
    return words, scale.view(torch.int32)


class KernelValues(NamedTuple):
    """Values as a kernel takes them, plain or in codes."""

    v: Tensor  # plain, or words of codes
    scale: Tensor | None  # of codes
    packing: Packing | None  # of codes
    strides: tuple[int, ...]  # check_store
    DV: int


def kernel_values(
    v: Tensor, v_scale: Tensor | None, bits: int, dtype: torch.dtype, B: int, Hkv: int, S: int
) -> KernelValues:
    """v [B, Hkv, S, DV] of this dtype with bits = 16, whatever the dtype, and no scale; or codes of
    2 or 4 bits with the scale that check_coded_values wants. Raises ValueError for others."""
    if bits == 16:
        need(v_scale is None, "values of 16 bits have no scale")
        DV = v.shape[3]
        strides = check_store(B, Hkv, S, values=(v, dtype, DV))
        return KernelValues(v, None, None, strides, DV)
    need(v_scale is not None, f"values of {bits} bits need a scale")
    packing, strides = check_coded_values(v, v_scale, B, Hkv, S, bits)
    words, scale_words = as_words(v, v_scale)
    return KernelValues(words, scale_words, packing, strides, packing.D)


# ------------------------------------------------------------------------- attention: plain K and V
# A flash-decode over keys and values as they are: all tokens, or those of an index, and exact
# tokens besides. It needs the shared block of the kernels that attend, where attend_plain_reference
# is, too.


@jit
def _attend_plain_kernel(
    q_ptr,  # [B, Hq, D] of the model's dtype
    k_ptr,  # [B, Hkv, S, D] of q's dtype
    v_ptr,  # [B, Hkv, S, DV] of q's dtype
    index_ptr,  # [B, sets, n] int32, -1: no token; None: all tokens that are not exact
    exact_k_ptr,  # [B, z, Hkv, D] of q's dtype, after RoPE; None: there are none
    exact_v_ptr,  # [B, z, Hkv, DV] of q's dtype, or None
    pos_ptr,  # [B] int32
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV] of q's dtype
    k_strides,  # vectors between two rows of the batch, two KV heads and two tokens
    v_strides,  # and those of values
    n,  # tokens of the index; without one of the store
    sets,  # of the index in a row of the batch: 1, Hkv or Hq
    index_stride,  # numbers between two rows of it
    z,  # exact slots
    Hkv,
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a program
    GP: tl.constexpr,  # padded
    D: tl.constexpr,
    DV: tl.constexpr,
    T: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = softmax(scale q K^T) V."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    # A KV head of the row; where each query head has an index of its own, a query head
    p = tl.program_id(1)
    programs = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    h = p * Hkv // programs  # its KV head
    first_head = (b * programs + p) * G
    pos = tl.load(pos_ptr + b)
    d = tl.arange(0, _padded(D, 16))
    channel = tl.arange(0, _padded(DV, 16))

    # 1. The tokens of this split. The last split has the exact tokens, too, and so fewer of the
    # others.
    length = n
    if index_ptr is None:
        length = tl.minimum(tl.maximum(pos + 1 - z, 0), n)
    tiles = tl.cdiv(length, T)
    exact_tiles = 0 if exact_k_ptr is None else tl.cdiv(z, T)
    share = tl.cdiv(tiles + exact_tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)
    if index_ptr is not None:
        set_number = p * sets // programs  # the set of this program's head
        index_ptr += b * index_stride + set_number * n
        # One tile ahead: a load is not prefetched if it waits for the load of its index.
        offs = first * T + tl.arange(0, T)
        next_token = tl.load(index_ptr + offs, mask=offs < n, other=-1)

    # 2. The queries, and a softmax of nothing.
    query = _load_queries(q_ptr + first_head * D, d, d < D, D, G, GP)
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([T, GP], tl.float32)
    acc = tl.zeros([_padded(DV, 16), GP], tl.float32)
    if exact_k_ptr is not None:
        if split == splits - 1:
            m, l, acc = _attend_exact(
                q_ptr + first_head * D,
                exact_k_ptr,
                exact_v_ptr,
                b,
                h,
                Hkv,
                pos,
                z,
                scale,
                m,
                l,
                acc,
                channel,
                channel < DV,
                G,
                GP,
                D,
                DV,
                T,
            )

    # 3. The stored tokens.
    for tile in tl.range(first, stop, num_stages=STAGES):
        offs = tile * T + tl.arange(0, T)
        if index_ptr is None:
            token = offs
            live = offs < length
        else:
            token = next_token
            live = token >= 0
            next_token = tl.load(index_ptr + offs + T, mask=offs + T < n, other=-1)
        token = token.to(tl.int64)
        k_vector = b * k_strides[0] + h * k_strides[1] + token * k_strides[2]
        k_at = k_ptr + k_vector[:, None] * D + d[None, :]
        k = tl.load(k_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        logits = tl.dot(k, query, input_precision="ieee") * scale  # [T, GP]

        v_vector = b * v_strides[0] + h * v_strides[1] + token * v_strides[2]
        v_at = v_ptr + v_vector[:, None] * DV + channel[None, :]
        v = tl.load(v_at, mask=live[:, None] & (channel < DV)[None, :], other=0.0)
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc, input_precision="ieee")
        m = m_new

    # 4. The result, or this split's part of it.
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        first_head,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        channel,
        channel < DV,
        G,
        GP,
        DV,
    )


def empty_attend_plain(q: Tensor, k: Tensor, v: Tensor, *_: object, **more: object) -> Tensor:
    """An empty tensor of the shape that launch_attend_plain gives."""
    return q.new_empty(*q.shape[:2], v.shape[3])


@operator(empty_attend_plain)
def launch_attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    index: Tensor | None,
    exact: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attention of one new token of each row over plain K and V: q [B, Hq, D] after RoPE ->
    [B, Hq, DV].

    k [B, Hkv, S, D], v [B, Hkv, S, DV]: views (check_store) of q's dtype. index [B, n],
    [B, Hkv, n] or [B, Hq, n] int32: the tokens that are attended, -1 for none; None: all up to pos
    [B] int32. exact: (), or keys and values [B, z, Hkv, *] that are attended besides, without an
    index in the place of the z last tokens; their slots fill from the left."""
    B, Hq, D = q.shape
    _, Hkv, S, DV = v.shape
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    k_strides = check_store(B, Hkv, S, keys=(k, q.dtype, D))
    v_strides = check_store(B, Hkv, S, values=(v, q.dtype, DV))
    check(q=(q, q.dtype, B, Hq, D), pos=(pos, torch.int32, B))
    chosen = check_index(index, B, Hkv, Hq, S)
    z = check_exact(exact, q, Hkv, DV)
    exact_k, exact_v = exact or (None, None)
    programs = max(Hkv, chosen.sets)
    G = Hq // programs
    config = plain_config(q.dtype, DV, has_large_shared_memory(q.device))
    splits = attend_splits(chosen.n, B * programs, config.programs_a_sm)
    parts = empty_splits(q, splits, DV)
    _attend_plain_kernel[splits, programs, B](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        index_ptr=index,
        exact_k_ptr=exact_k,
        exact_v_ptr=exact_v,
        pos_ptr=pos,
        m_ptr=parts.m,
        l_ptr=parts.l,
        out_ptr=parts.out,
        k_strides=k_strides,
        v_strides=v_strides,
        n=chosen.n,
        sets=chosen.sets,
        index_stride=chosen.stride,
        z=z,
        Hkv=Hkv,
        scale=scale * LOG2E,
        G=G,
        GP=power2(G, 16),  # tensor cores take 16 queries faster than 8
        D=D,
        DV=DV,
        T=config.tokens,
        STAGES=config.stages,
        num_warps=config.warps,
        **overlapped(q.device),
    )
    return merge_splits(parts, q)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    live: Tensor,
    pos: Tensor,
    exact: Sequence[Tensor] = (),
    *,
    scale: float,
    kernel: bool,
) -> Tensor:
    """Attention of one query each, q [B, Hq, D], over the live [B, Hkv, S] of k, v [B, Hkv, S, D],
    and over exact keys and values [B, z, Hkv, D], whose slots up to pos [B] are filled."""
    if kernel:
        index = torch.arange(k.shape[2], device=q.device).where(live, -1).int()
        return launch_attend_plain(q.contiguous(), k, v, pos.int(), index, exact, scale)
    if exact:
        exact_k, exact_v = exact
        is_filled = torch.arange(exact_k.shape[1], device=pos.device) <= pos[:, None]  # [B, z]
        k = torch.cat((k, exact_k.transpose(1, 2)), 2)
        v = torch.cat((v, exact_v.transpose(1, 2)), 2)
        live = torch.cat((live, is_filled[:, None].expand(-1, live.shape[1], -1)), -1)
    return attend_plain_reference(q, k, v, live, scale)


# ------------------------------------------------------ attention: keys rebuilt from latents (SALS)
# The fused sparse-latent kernel: it gathers the latents and values of chosen tokens in their codes,
# rebuilds the keys (latent times basis, and bias), rotates them to their positions and attends
# them, with the exact tokens besides; none of this is written to memory. Without an index it
# attends all tokens (SALS's layers that are not sparse). Latents and basis are in codes (ours), or
# in 16 bits (the paper's SALS; Palu, whose heads have latents of their own). It needs both shared
# blocks, of the kernels that attend and of those that decode packed codes; and the codes of a
# token.
#
# A latent has r = R8 + 2 N4 dims. In codes the leading R8 (the r* of scores, and LEAD in the append
# kernel) are int8 and called `latent` here, and the others lie in N4 bytes (REST there): byte j has
# dims R8 + j and R8 + N4 + j. Not in codes, `latent` has all dims, R8 = r and N4 = 0.


def rope_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the kernel's cos and sin. Beside caches of 16 bits it is fp16: a pair is 4
    bytes, and its rounding an eighth of bf16's."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def rope_pairs(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """cos and sin [P, D/2] side by side, [P, D/2, 2], as the kernel reads them beside caches of a
    dtype."""
    return torch.stack((cos, sin), -1).to(rope_dtype(dtype))


def interleave_rope(basis: Tensor, n_kv_heads: int) -> Tensor:
    """basis [Hkv*D, r] -> [Hkv, DP, r], as the kernel takes it: dims c and c + D/2, a RoPE pair,
    become 2c and 2c + 1, and DP - D zero rows pad a head to a power of two."""
    heads = basis.unflatten(0, (n_kv_heads, 2, -1))  # [Hkv, 2, D/2, r]
    paired = heads.transpose(1, 2).flatten(1, 2)  # [Hkv, D, r]
    padding = power2(paired.shape[1], 16) - paired.shape[1]
    return F.pad(paired, (0, 0, 0, padding)).contiguous()


def attend_latents_reference(
    q: Tensor,
    latent: Tensor,
    basis: Tensor,
    bias: Tensor | None,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    live: Tensor,
    scale: float,
) -> Tensor:
    """What the kernel computes, in PyTorch, on decoded numbers and without exact tokens: latent
    [B, 1 or Hkv, S, r], basis [Hkv, D, r], bias [Hkv, D], v [B, Hkv, S, DV], cos and sin [S, D/2],
    live [B, S] or [B, Hkv, S] bool -> [B, Hq, DV]."""
    k = torch.einsum("bhsr,hdr->bhsd", latent.expand(-1, len(basis), -1, -1), basis)
    if bias is not None:
        k = k + bias[:, None]
    x, y = k.chunk(2, -1)
    k = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    return attend_plain_reference(q, k, v, live, scale)


@constexpr_function
def _key_divisor(dtype):
    """What rebuilt keys and their bias are divided by, and the query multiplied by: sums of int8
    products can exceed fp16's range."""
    return 1024.0 if dtype == tl.float16 else 1.0


@jit
def _load_rope(rope_ptr, at, mask):
    """cos and sin of a RoPE pair, from two halves of a 32-bit word or two fp32 numbers."""
    if rope_ptr.dtype.element_ty == tl.int32:
        word = tl.load(rope_ptr + at, mask=mask, other=0)
        return _half_at(word, 0), _half_at(word, 16)
    else:
        cos = tl.load(rope_ptr + 2 * at, mask=mask, other=0.0)
        sin = tl.load(rope_ptr + 2 * at + 1, mask=mask, other=0.0)
        return cos, sin


@jit
def _load_basis(basis_ptr, h, dims, inside, DP: tl.constexpr, R: tl.constexpr):
    """Dims of a head's basis [Hkv, DP, R] as rows [len(dims), DP]."""
    rows = basis_ptr + (h * DP + tl.arange(0, DP))[None, :] * R
    return tl.load(rows + dims[:, None], mask=inside[:, None], other=0.0)


@jit
def _four_bit_levels(packed):
    """The levels of the codes in bytes' low and high halves, int8. PTX decodes four bytes at once:
    bits 5 to 3 of a level are the code's last three, bit 2 is set, and the upper two are what the
    code's first bit is not."""
    if _has_ptx():
        ptx: tl.constexpr = """{ .reg .b32 low, high;
            shl.b32 low, $2, 3; lop3.b32 low, low, 0x78787878, 0x44444444, 0x6A;
            shr.b32 high, $2, 1; lop3.b32 high, high, 0x78787878, 0x44444444, 0x6A;
            shl.b32 $0, low, 1; lop3.b32 $0, $0, 0x80808080, low, 0xEA;
            shl.b32 $1, high, 1; lop3.b32 $1, $1, 0x80808080, high, 0xEA; }"""
        return tl.inline_asm_elementwise(
            ptx, "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low = _four_bit_level(((packed & 15) << 3).to(tl.int8))
        high = _four_bit_level(((packed & 240) >> 1).to(tl.int8))
        return low, high


@jit
def _add_int4(
    k,  # [T, DP] int32: the sums so far
    int4_ptr,  # [.., N4] uint8
    vector,
    live,
    byte,  # which bytes of a vector
    low_basis,  # [len(byte), DP] int8: the basis of the dims in the bytes' low halves
    high_basis,  # and in their high halves
    N4: tl.constexpr,
):
    """k + the 4-bit dims of a tile of latents times their basis: byte j holds dims j and j + N4."""
    inside = live[:, None] & (byte < N4)[None, :]
    packed = tl.load(int4_ptr + vector[:, None] * N4 + byte[None, :], mask=inside, other=0)
    low, high = _four_bit_levels(packed)
    k = tl.dot(low, low_basis, k, out_dtype=tl.int32)
    return tl.dot(high, high_basis, k, out_dtype=tl.int32)


@jit
def _attend_latents_kernel(
    q_ptr,  # [B, Hq, D] of the model's dtype
    latent_ptr,  # [B, Hkv, S, R8]: int8 codes of the leading dims, or all dims of q's dtype
    latent_scale_ptr,  # [B, Hkv, S] fp32; None: latents are no codes
    int4_ptr,  # [B, Hkv, S, N4] uint8: the other dims, two in a byte; None: there are none
    basis_ptr,  # [Hkv, DP, R8 + 2 N4] int8 or of q's dtype, RoPE pairs side by side
    basis_scale_ptr,  # [Hkv, DP] fp32; None: the basis is no codes
    bias_ptr,  # [Hkv, DP] fp32, in units of the scale; None: there is none
    rope_ptr,  # [>= S, D/2] cos and sin: words of two halves, or pairs of fp32 numbers
    v_ptr,  # words of codes [B, Hkv, S, DV * bits / 32] int32, or plain [B, Hkv, S, DV], q's dtype
    # (minimum, scale) words [B, Hkv, S, groups] int32, or a scale [B, Hkv, S] fp16; None: plain
    v_scale_ptr,
    index_ptr,  # [B, sets, n] int32, -1: no token; None: all tokens that are not exact
    exact_k_ptr,  # [B, z, Hkv, D] of q's dtype, after RoPE; None: there are none
    exact_v_ptr,  # [B, z, Hkv, DV] of q's dtype, or None
    pos_ptr,  # [B] int32
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV] of q's dtype
    latent_strides,  # vectors between two rows of the batch, two KV heads (0: shared), two tokens
    v_strides,  # and those of values
    n,  # tokens of the index; without one of the store
    sets,  # of the index in a row of the batch: 1, Hkv or Hq
    index_stride,  # numbers between two rows of it
    z,  # exact slots
    Hkv,
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a program
    GP: tl.constexpr,  # padded
    D: tl.constexpr,
    DV: tl.constexpr,
    R8: tl.constexpr,  # dims of a latent that are no 4-bit codes
    N4: tl.constexpr,  # bytes of 4-bit codes
    RB: tl.constexpr,  # dims of a product
    HELD: tl.constexpr,  # does a product take all R8 dims? The basis then stays in shared memory
    WIDE: tl.constexpr,  # if so, bytes of a first product of 4-bit dims
    NARROW: tl.constexpr,  # and of a second one; 0: one suffices
    PACKING: tl.constexpr,  # of the values' codes; None: they are plain
    T: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = softmax(scale q K^T) V, with K = RoPE(latent basis^T + bias)."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    # A KV head of the row; where each query head has an index of its own, a query head
    p = tl.program_id(1)
    programs = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    h = p * Hkv // programs  # its KV head
    first_head = (b * programs + p) * G
    pos = tl.load(pos_ptr + b)
    CODED: tl.constexpr = latent_scale_ptr is not None
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if CODED else tl.float32
    KEY_DIVISOR: tl.constexpr = _key_divisor(dtype) if CODED else 1.0
    DP: tl.constexpr = _padded(D, 16)
    R: tl.constexpr = R8 + 2 * N4
    d = tl.arange(0, DP)
    dims = tl.arange(0, RB)
    if PACKING is None:
        channel = tl.arange(0, _padded(DV, 16))
        has_channel = channel < DV
    else:
        channel, has_channel = _columns(PACKING)

    # 1. The tokens of this split. The last split has the exact tokens, too, and so fewer of the
    # others.
    length = n
    if index_ptr is None:
        length = tl.minimum(tl.maximum(pos + 1 - z, 0), n)
    tiles = tl.cdiv(length, T)
    exact_tiles = 0 if exact_k_ptr is None else tl.cdiv(z, T)
    share = tl.cdiv(tiles + exact_tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)
    if index_ptr is not None:
        set_number = p * sets // programs  # the set of this program's head
        index_ptr += b * index_stride + set_number * n
        # One tile ahead: a load is not prefetched if it waits for the load of its index.
        offs = first * T + tl.arange(0, T)
        next_token = tl.load(index_ptr + offs, mask=offs < n, other=-1)

    # 2. The queries, in the order of the basis, with its scales; and as much of the basis as stays.
    paired_dim = d // 2 + (d % 2) * (D // 2)
    query = _load_queries(q_ptr + first_head * D, paired_dim, d < D, D, G, GP)
    if CODED:
        basis_scale = tl.load(basis_scale_ptr + h * DP + d) * KEY_DIVISOR
        query = (query * basis_scale[:, None]).to(dtype)
    if HELD:
        basis = _load_basis(basis_ptr, h, dims, dims < R8, DP, R)
        if N4 > 0:
            wide = tl.arange(0, WIDE)
            wide_low = _load_basis(basis_ptr, h, R8 + wide, wide < N4, DP, R)
            wide_high = _load_basis(basis_ptr, h, R8 + N4 + wide, wide < N4, DP, R)
            if NARROW > 0:
                narrow = WIDE + tl.arange(0, NARROW)
                narrow_low = _load_basis(basis_ptr, h, R8 + narrow, narrow < N4, DP, R)
                narrow_high = _load_basis(basis_ptr, h, R8 + N4 + narrow, narrow < N4, DP, R)

    # 3. A softmax of the exact tokens, or of nothing.
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([T, GP], tl.float32)
    acc = tl.zeros([channel.shape[0], GP], tl.float32)
    if exact_k_ptr is not None:
        if split == splits - 1:
            m, l, acc = _attend_exact(
                q_ptr + first_head * D,
                exact_k_ptr,
                exact_v_ptr,
                b,
                h,
                Hkv,
                pos,
                z,
                scale,
                m,
                l,
                acc,
                channel,
                has_channel,
                G,
                GP,
                D,
                DV,
                T,
            )

    # 4. The stored tokens.
    for tile in tl.range(first, stop, num_stages=STAGES):
        offs = tile * T + tl.arange(0, T)
        if index_ptr is None:
            token = offs
            live = offs < length
        else:
            token = next_token
            live = token >= 0
            next_token = tl.load(index_ptr + offs + T, mask=offs + T < n, other=-1)
        token = token.to(tl.int64)
        vector = b * latent_strides[0] + h * latent_strides[1] + token * latent_strides[2]

        # Rebuild the keys, [T, DP]: latent times basis,
        k = tl.zeros([T, DP], SUM)
        for start in range(0, R8, RB):
            inside = dims + start < R8
            latent_at = latent_ptr + vector[:, None] * R8 + (dims + start)[None, :]
            latent = tl.load(latent_at, mask=live[:, None] & inside[None, :], other=0.0)
            right = basis if HELD else _load_basis(basis_ptr, h, dims + start, inside, DP, R)
            k = tl.dot(latent, right, k, input_precision="ieee", out_dtype=SUM)
        if N4 > 0:
            if HELD:
                k = _add_int4(k, int4_ptr, vector, live, wide, wide_low, wide_high, N4)
                if NARROW > 0:
                    k = _add_int4(k, int4_ptr, vector, live, narrow, narrow_low, narrow_high, N4)
            else:
                for start in range(0, N4, RB // 2):  # a byte has two dims
                    byte = start + tl.arange(0, RB // 2)
                    low = _load_basis(basis_ptr, h, R8 + byte, byte < N4, DP, R)
                    high = _load_basis(basis_ptr, h, R8 + N4 + byte, byte < N4, DP, R)
                    k = _add_int4(k, int4_ptr, vector, live, byte, low, high, N4)
        # times the latent's scale, and the bias.
        if CODED:
            latent_scale = tl.load(latent_scale_ptr + vector, mask=live, other=0.0) / KEY_DIVISOR
            k = k.to(tl.float32) * latent_scale[:, None]
        if bias_ptr is not None:
            k += (tl.load(bias_ptr + h * DP + d) / KEY_DIVISOR)[None, :]

        # Rotate them. The halves of a RoPE pair lie side by side, in one thread.
        pair = tl.arange(0, DP // 2)
        rope_at = token[:, None] * (D // 2) + pair[None, :]
        cos, sin = _load_rope(rope_ptr, rope_at, live[:, None] & (pair < D // 2)[None, :])
        x, y = tl.split(tl.reshape(k, [T, DP // 2, 2]))
        k = tl.reshape(tl.join(x * cos - y * sin, y * cos + x * sin), [T, DP]).to(dtype)
        logits = tl.dot(k, query, input_precision="ieee") * scale  # [T, GP]

        # Attend.
        v_vector = b * v_strides[0] + h * v_strides[1] + token * v_strides[2]
        if PACKING is None:
            v_at = v_ptr + v_vector[:, None] * DV + channel[None, :]
            v = tl.load(v_at, mask=live[:, None] & has_channel[None, :], other=0.0)
        else:
            v = _decode_values(v_ptr, v_scale_ptr, v_vector, live, dtype, PACKING)
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc, input_precision="ieee")
        m = m_new

    # 5. The result, or this split's part of it.
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        first_head,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        channel,
        has_channel,
        G,
        GP,
        DV,
    )


class LatentsConfig(NamedTuple):
    """How a launch multiplies latents with the basis, and in which tiles."""

    RB: int  # dims of a product
    HELD: bool  # does it take all that are no 4-bit codes?
    WIDE: int  # bytes of 4-bit codes of a first product, a power of two
    NARROW: int  # of a second one
    T: int  # tokens of a tile
    warps: int
    STAGES: int  # tiles in flight
    programs_a_sm: int  # programs that a multiprocessor has at once


def latents_config(
    dtype: torch.dtype,
    R8: int,
    N4: int,
    coded: bool,
    D: int,
    DV: int,
    plain_v: bool,
    shared: int,
) -> LatentsConfig:
    """R8: dims of a latent that are no 4-bit codes; N4: bytes of 4-bit codes; shared: bytes of
    shared memory. Measured on an H200."""
    itemsize = 4 if dtype == torch.float32 else 1 if coded else 2
    R = R8 + 2 * N4
    # The basis of a head stays in shared memory if it fits beside the tiles, else each tile loads
    # it again, in lines of 128 bytes. On a Hopper GPU half as many programs hold a basis of up to
    # 128 KB in codes, which is faster than to load it for each tile.
    is_large = shared >= 160 << 10
    has_int8_basis = coded and itemsize == 1
    basis_bytes = power2(R, 32) * itemsize * power2(D, 16)
    most_held = 32 << 10
    if is_large and (has_int8_basis or not coded):
        most_held = 64 << 10
    if has_int8_basis and shared >= 220 << 10:
        most_held = 128 << 10
    held = basis_bytes <= most_held
    if held:
        RB = power2(R8, 32)
    elif N4:
        RB = max(128 // itemsize, 64)  # a byte holds two dims, and an int8 product takes 32
    else:
        RB = 128 // itemsize
    # A first product takes the largest power of two of bytes, or all if these are few. A product
    # takes 32 at least, as tensor cores want them of int8.
    wide = power2(N4, 32) if N4 < 64 else power2(N4 + 1) // 2
    narrow = power2(N4 - wide, 32) if N4 > wide else 0
    T = 64
    stages = 2
    programs_a_sm = 2  # the basis takes most of the shared memory
    if itemsize == 4:  # for tests; numbers are twice as large as those of 16 bits
        T = 32
        programs_a_sm = 4
    elif has_int8_basis and held and basis_bytes > 64 << 10:
        programs_a_sm = 1
    elif has_int8_basis and held and basis_bytes > 32 << 10:
        stages = 1  # no tile is loaded ahead: the other program multiplies meanwhile
    elif is_large and not (plain_v and DV >= 128):  # these leave no room for a third
        stages = 3
    return LatentsConfig(RB, held, wide, narrow, T, 4, stages, programs_a_sm)


# Another function that does what launch_attend_latents does, which it asks first; it returns None
# where it is not faster. extras/hopper.py sets it when it is imported.
faster_attend_latents = None


def empty_attend_latents(
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
    *_: object,
) -> Tensor:
    """An empty tensor of the shape that launch_attend_latents gives."""
    return q.new_empty(*q.shape[:2], v.shape[3] * max(1, 8 // bits))


@operator(empty_attend_latents)
def launch_attend_latents(
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
) -> Tensor:
    """Attention of one new token of each row over keys rebuilt from latents, RoPE(latent basis^T +
    bias): q [B, Hq, D] after RoPE -> [B, Hq, DV].

    Stores are views [B, Hkv, S, *] (check_store); heads that share latents have a stride of 0.
        latent, latent_scale, int4_dims    in codes: int8 [.., R8], fp32 [..], uint8 [.., N4] of two
                                           dims each (quantize_mixed); else [.., R8] of q's dtype,
                                           None, None
        basis, basis_scale, bias           [Hkv, DP, R8 + 2 N4] of interleave_rope: int8 with a
                                           scale [Hkv, DP, 1] fp32, which is the same for the two
                                           dims of a RoPE pair (rows 2c and 2c + 1), since keys are
                                           rotated before they are scaled; or of q's dtype and None.
                                           bias [Hkv, DP, 1] fp32, divided by basis_scale, or None
        rope                               [>= S, D/2, 2] of rope_pairs
        v, v_scale, bits                   plain [.., DV] of q's dtype, None and 16, whatever the
                                           dtype; or of 2 or 4 bits as check_coded_values says
    index [B, n], [B, Hkv, n] or [B, Hq, n] int32: the tokens that are attended, -1 for none; None:
    all up to pos [B] int32. exact: (), or keys and values [B, z, Hkv, *] that are attended besides,
    without an index in the place of the z last tokens; their slots fill from the left."""
    B, Hq, D = q.shape
    _, Hkv, S, R8 = latent.shape
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    coded = latent_scale is not None
    need(
        (int4_dims is not None) == (basis_scale is not None) == coded,
        "codes of latents have scales, dims in 4 bits, and a basis with scales",
    )
    N4 = int4_dims.shape[3] if coded else 0
    need(N4 > 0 or not coded, "a latent in codes needs trailing dims, in 4 bits")
    DP = power2(D, 16)
    latent_dtype = torch.int8 if coded else q.dtype
    latent_strides = check_store(
        B,
        Hkv,
        S,
        **{
            "latents": (latent, latent_dtype, R8),
            "scale of latents": (latent_scale, torch.float32),
            "4-bit dims of latents": (int4_dims, torch.uint8, N4),
        },
    )
    need(len(rope) >= S, f"rope has {len(rope)} positions, the cache {S}")
    check(
        q=(q, q.dtype, B, Hq, D),
        pos=(pos, torch.int32, B),
        rope=(rope, rope_dtype(q.dtype), len(rope), D // 2, 2),
        basis_scale=(basis_scale, torch.float32, Hkv, DP, 1),
        **{
            "basis (of interleave_rope)": (basis, latent_dtype, Hkv, DP, R8 + 2 * N4),
            "bias (of interleave_rope)": (bias, torch.float32, Hkv, DP, 1),
        },
    )
    if coded and basis_scale.device.type == "cpu":  # to read a GPU's means to wait
        even_scale = basis_scale[:, ::2]
        odd_scale = basis_scale[:, 1::2]
        need(
            even_scale.equal(odd_scale), "both dims of a RoPE pair have the same scale of the basis"
        )
    values = kernel_values(v, v_scale, bits, q.dtype, B, Hkv, S)
    DV = values.DV
    chosen = check_index(index, B, Hkv, Hq, S)
    z = check_exact(exact, q, Hkv, DV)
    exact_k, exact_v = exact or (None, None)
    if faster_attend_latents is not None:
        out = faster_attend_latents(
            q,
            latent,
            latent_scale,
            int4_dims,
            basis,
            basis_scale,
            bias,
            rope,
            v,
            v_scale,
            bits,
            pos,
            index,
            exact,
            scale,
        )
        if out is not None:
            return out
    programs = max(Hkv, chosen.sets)
    G = Hq // programs
    config = latents_config(
        q.dtype, R8, N4, coded, D, DV, values.packing is None, shared_memory(q.device)
    )
    splits = attend_splits(chosen.n, B * programs, config.programs_a_sm)
    parts = empty_splits(q, splits, DV)
    _attend_latents_kernel[splits, programs, B](
        q_ptr=q,
        latent_ptr=latent,
        latent_scale_ptr=latent_scale,
        int4_ptr=int4_dims,
        basis_ptr=basis,
        basis_scale_ptr=basis_scale,
        bias_ptr=bias,
        rope_ptr=rope if q.element_size() == 4 else rope.view(torch.int32),
        v_ptr=values.v,
        v_scale_ptr=values.scale,
        index_ptr=index,
        exact_k_ptr=exact_k,
        exact_v_ptr=exact_v,
        pos_ptr=pos,
        m_ptr=parts.m,
        l_ptr=parts.l,
        out_ptr=parts.out,
        latent_strides=latent_strides,
        v_strides=values.strides,
        n=chosen.n,
        sets=chosen.sets,
        index_stride=chosen.stride,
        z=z,
        Hkv=Hkv,
        scale=scale * LOG2E,
        G=G,
        # Tensor cores take 8 queries at least, and rebuilt 16-bit keys faster with 16.
        GP=power2(G, 8 if coded else 16),
        D=D,
        DV=DV,
        R8=R8,
        N4=N4,
        RB=config.RB,
        HELD=config.HELD,
        WIDE=config.WIDE,
        NARROW=config.NARROW,
        PACKING=values.packing,
        T=config.T,
        STAGES=config.STAGES,
        num_warps=config.warps,
        **overlapped(q.device),
    )
    return merge_splits(parts, q)


# ---------------------------------------------------------- attention: keys in channel codes (KIVI)
# 32 tokens in line are a group: they share a minimum and a scale of each channel of the keys.
# Values have a minimum and a scale for each token's groups of channels. All tokens are attended, of
# which the last ones are exact. It needs both shared blocks, of the kernels that attend and of
# those that decode packed codes; and, for the reference, the codes of a token.


def attend_channels_reference(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    v: Tensor,
    live: Tensor,
    scale: float,
) -> Tensor:
    """What the kernel computes, in PyTorch, on decoded values and without exact tokens: k_codes
    [B, Hkv, S, D * bits / 8] uint8, k_scale [B, Hkv, S / 32, D, 2] fp16 (minimum, scale), v
    [B, Hkv, S, DV], live [B, S] bool, S a multiple of 32 -> [B, Hq, DV]."""
    bits = 8 * k_codes.shape[3] // q.shape[2]
    codes = unpack(k_codes, bits).to(q.dtype).unflatten(2, (-1, 32))  # [B, Hkv, S / 32, 32, D]
    low, step = k_scale.to(q.dtype)[:, :, :, None].unbind(-1)
    k = (codes * step + low).flatten(2, 3)
    return attend_plain_reference(q, k, v, live, scale)


@jit
def _attend_channels_kernel(
    q_ptr,  # [B, Hq, D] of the model's dtype
    k_ptr,  # words of codes [B, Hkv, k_tokens, D * bits / 32] int32
    k_scale_ptr,  # (minimum, scale) words [B, Hkv, k_tokens / 32, D] int32
    v_ptr,  # words of codes [B, Hkv, S, DV * bits / 32] int32
    v_scale_ptr,  # (minimum, scale) words [B, Hkv, S, groups] int32, or a scale [B, Hkv, S] fp16
    exact_k_ptr,  # [B, z, Hkv, D] of q's dtype, after RoPE; None: there are none
    exact_v_ptr,  # [B, z, Hkv, DV] of q's dtype, or None
    pos_ptr,  # [B] int32
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV] of q's dtype
    v_strides,  # vectors between two rows of the batch, two KV heads and two tokens
    k_tokens,  # of the keys' store, whole groups
    S,  # tokens of the values' store
    z,  # exact slots
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a KV head
    GP: tl.constexpr,  # padded
    D: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,  # the packing of keys: one run, for all channels of a plane
    VALUES: tl.constexpr,  # the packing of values
    T: tl.constexpr,  # tokens of a tile, whole groups
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = softmax(scale q K^T) V."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    h = tl.program_id(1)
    Hkv = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    first_head = (b * Hkv + h) * G
    pos = tl.load(pos_ptr + b)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    PLANES: tl.constexpr = KEYS.PLANES
    WORDS: tl.constexpr = KEYS.RUN // 4
    COLUMNS: tl.constexpr = VALUES.COLUMNS
    k_channel, has_k_channel = _columns(KEYS)
    channel, has_channel = _columns(VALUES)
    word = tl.arange(0, WORDS)[None, :]
    plane = tl.arange(0, PLANES)[None, None, :, None, None]
    byte = tl.arange(0, 4)[None, None, None, None, :]

    # 1. The tokens of this split. The last split has the exact tokens, too, and so fewer of the
    # others.
    length = tl.minimum(tl.maximum(pos + 1 - z, 0), S)
    tiles = tl.cdiv(length, T)
    exact_tiles = 0 if exact_k_ptr is None else tl.cdiv(z, T)
    share = tl.cdiv(tiles + exact_tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)

    # 2. The queries, in the order of decoded keys; a softmax of the exact tokens, or of nothing.
    query = _load_queries(q_ptr + first_head * D, k_channel, has_k_channel, D, G, GP)
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([T, GP], tl.float32)
    acc = tl.zeros([COLUMNS, GP], tl.float32)
    if exact_k_ptr is not None:
        if split == splits - 1:
            m, l, acc = _attend_exact(
                q_ptr + first_head * D,
                exact_k_ptr,
                exact_v_ptr,
                b,
                h,
                Hkv,
                pos,
                z,
                scale,
                m,
                l,
                acc,
                channel,
                has_channel,
                G,
                GP,
                D,
                DV,
                T,
            )

    # 3. The coded tokens.
    for tile in tl.range(first, stop, num_stages=STAGES):
        token = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = token < length

        # Decode the keys, [T, columns]: each group has a minimum and a scale of each channel.
        k_vector = (b * Hkv + h) * k_tokens + token
        words_at = k_ptr + k_vector[:, None] * (KEYS.WIDTH // 4) + word
        words = tl.load(words_at, mask=live[:, None] & (word < KEYS.WIDTH // 4), other=0)
        group = tl.max(tl.reshape(tl.where(live, k_vector // 32, -1), [T // 32, 32]), 1)
        pair_at = k_scale_ptr + group[:, None] * D + k_channel[None, :]
        pairs = tl.load(pair_at, mask=(group >= 0)[:, None] & has_k_channel[None, :], other=0)
        pairs = tl.reshape(pairs, [T // 32, 1, PLANES, WORDS, 4])
        words = tl.reshape(words, [T // 32, 32, 1, WORDS, 1])
        number, codes_in_one = _mantissas(words, plane, byte, KEYS.BITS, dtype)
        step = _half_at(pairs, 16) * codes_in_one
        k = number * step + (_half_at(pairs, 0) - step)
        k = tl.reshape(k, [T, PLANES * WORDS * 4]).to(dtype)
        logits = tl.dot(k, query, input_precision="ieee") * scale  # [T, GP]

        # Attend.
        v_vector = b * v_strides[0] + h * v_strides[1] + token * v_strides[2]
        v = _decode_values(v_ptr, v_scale_ptr, v_vector, live, dtype, VALUES)
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc, input_precision="ieee")
        m = m_new

    # 4. The result, or this split's part of it.
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        first_head,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        channel,
        has_channel,
        G,
        GP,
        DV,
    )


# ---- two codes at once, as halves
# The same for codes of 128 channels, in a model in bf16. What bounds the kernel is decoding, and
# numbers in fp16 take fewer instructions than those in fp32, since two of them are the halves of a
# word: a shift brings two codes to the tops of two mantissas, a mask leaves only them, and one FMA
# scales both and adds their minima. Codes of 2 bits need a shift for every two pairs only, since
# the second pair is taken two bits below the top.
#
# A thread decodes the words whose codes tensor cores want of it, so that no tile has to move
# between threads. The channels of these codes are not in line. So decoded tiles have channels in an
# order of their own (_columns_in_pairs, _rows_in_pairs): queries are loaded in that of the keys,
# and the result is stored in that of the values. The code of channel
#
#     plane * 16 * bits + word * 4 + byte
#
# is in that byte of that word, in its bits from plane * bits on. A vector has 4 * bits words. A
# shape in a comment says which part of which number each axis is.


def decodes_pairs(q: Tensor, k_bits: int, DV: int, bits: int, v_scale: Tensor) -> bool:
    """Whether codes are decoded as halves. These are too coarse for a model in fp16."""
    is_wide = q.shape[2] == DV == 128
    return q.dtype == torch.bfloat16 and is_wide and k_bits == bits and v_scale.ndim == 5


@jit
def _word_of_halves(lower, upper):
    """Two numbers as the halves of a word."""
    lower = lower.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    upper = upper.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return lower | (upper << 16)


@jit
def _swap_halves(first, second):
    """The lower halves of two words in one word, and their upper halves in another."""
    if _has_ptx():
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=&r,r,r",
            [first, second],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


@constexpr_function
def _pair_steps_ptx(ONE):
    """PTX of _pair_steps: $0 and $1 are low and step, $2 and $3 the words. 0x4C00 is 16 in fp16,
    and 0x4400 is 4."""
    one = {16: "0x4C004C00", 4: "0x44004400"}[ONE]
    return f"""{{ .reg .b32 one; mov.b32 one, {one};
        prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;
        mul.rn.f16x2 $1, $1, one; sub.rn.f16x2 $0, $0, $1; }}"""


@jit
def _pair_steps(first, second, ONE: tl.constexpr):
    """Two words (minimum, scale) as _decode_pairs takes them: a word of minimum - step of both, and
    one of step = ONE scale. ONE is how many codes the 1 of a mantissa stands for: 16 where the top
    bits are those of a 4-bit code, 4 where they are those of a 2-bit code."""
    if _has_ptx():
        return tl.inline_asm_elementwise(
            _pair_steps_ptx(ONE),
            "=&r,=&r,r,r",
            [first, second],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        step = _half_at(first, 16) * ONE
        other_step = _half_at(second, 16) * ONE
        low = _word_of_halves(_half_at(first, 0) - step, _half_at(second, 0) - other_step)
        return low, _word_of_halves(step, other_step)


@jit
def _pair_steps_of_planes(first, second):
    """_pair_steps for each plane of 2-bit codes: words [.., plane // 2, plane % 2] -> (low0, step0,
    .., low3, step3), each [..]. Pairs of planes 1 and 3 are the top bits of a mantissa; those of
    planes 0 and 2 lie two bits below, where a code counts a fourth."""
    first_even, first_odd = tl.split(first)
    second_even, second_odd = tl.split(second)
    low_even, step_even = _pair_steps(first_even, second_even, ONE=16)
    low_odd, step_odd = _pair_steps(first_odd, second_odd, ONE=4)
    low0, low2 = tl.split(low_even)
    step0, step2 = tl.split(step_even)
    low1, low3 = tl.split(low_odd)
    step1, step3 = tl.split(step_odd)
    return low0, step0, low1, step1, low2, step2, low3, step3


@constexpr_function
def _pairs_ptx(BITS, BYTE):
    """PTX of _decode_pairs: $0 .. $7 are the numbers, $8 is the word, $9 .. $12 are low0 .. low3,
    and $13 .. $16 step0 .. step3. 0x3C00 is 1.0. Of a mantissa, 0x03C0 are the first four bits, and
    0x00C0 the lower two of them: a code there counts in sixteenths. Under 0x0300, the first two, it
    counts in fourths."""
    shifts = ["shl.b32 x, $8, 6", "shl.b32 x, $8, 2", "shr.u32 x, $8, 2", "shr.u32 x, $8, 6"]
    masks = ["0x03C003C0"] * 4
    if BITS == 2:
        first, second = shifts[2 * BYTE : 2 * BYTE + 2]
        shifts = [first, first, second, second]
        masks = ["0x00C000C0", "0x03000300"] * 2
    ptx = ""
    for i in range(4):
        ptx += f"""{shifts[i]}; lop3.b32 x, x, {masks[i]}, 0x3C003C00, 0xEA;
            fma.rn.f16x2 x, x, ${13 + i}, ${9 + i};
            mov.b32 {{${2 * i}, ${2 * i + 1}}}, x;"""
    return "{ .reg .b32 x; " + ptx + " }"


@jit
def _decode_pair(words, low, step, FIRST: tl.constexpr, BITS: tl.constexpr, ONE: tl.constexpr):
    """In the interpreter, the pair whose codes begin at bit FIRST of both halves, [.., half]."""
    lower = 1.0 + ((words >> FIRST) & ((1 << BITS) - 1)).to(tl.float32) / ONE
    upper = 1.0 + ((words >> (16 + FIRST)) & ((1 << BITS) - 1)).to(tl.float32) / ONE
    lower = lower * _half_at(step, 0) + _half_at(low, 0)
    upper = upper * _half_at(step, 16) + _half_at(low, 16)
    return tl.join(lower, upper).to(tl.float16)


@jit
def _decode_pairs(words, steps, BITS: tl.constexpr, BYTE: tl.constexpr):
    """Eight codes of each word as fp16 numbers [.., half, N % 2, N // 2]: four pairs, of a code in
    each half. Of 4-bit codes pair N is in plane N % 2 and byte N // 2 of a half, so these are all.
    Of 2-bit codes it is in plane N and byte BYTE of a half. steps: (low0, step0, .., low3, step3),
    the _pair_steps of each pair."""
    low0, step0, low1, step1, low2, step2, low3, step3 = steps
    if _has_ptx():
        a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
            _pairs_ptx(BITS, BYTE),
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r,r,r,r,r",
            [words, low0, low1, low2, low3, step0, step1, step2, step3],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=1,
        )
        first = tl.join(tl.join(a0, b0), tl.join(a1, b1))
        second = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    else:
        FIRST: tl.constexpr = 8 * BYTE
        ODD: tl.constexpr = 16 if BITS == 4 else 4
        pair0 = _decode_pair(words, low0, step0, FIRST, BITS, 16)
        pair1 = _decode_pair(words, low1, step1, FIRST + BITS, BITS, ODD)
        pair2 = _decode_pair(words, low2, step2, FIRST + 2 * BITS, BITS, 16)
        pair3 = _decode_pair(words, low3, step3, FIRST + 3 * BITS, BITS, ODD)
        first = tl.join(pair0, pair1)
        second = tl.join(pair2, pair3)
    return tl.join(first, second)


@jit
def _load_4_bit_keys(words_ptr, pairs_ptr):
    """A tile's keys [32, 128] fp16 of its words of codes [32, 16] and its group's (minimum, scale)
    [128]. Columns are (byte % 2, plane, word % 4, word // 4, byte // 2): _columns_in_pairs."""
    token = tl.arange(0, 32)[:, None]
    words = tl.load(words_ptr + token * 16 + tl.arange(0, 16)[None, :])
    words = tl.reshape(words, [32, 4, 4])  # [token, word // 4, word % 4]

    # A word's halves are bytes 0 and 1, and bytes 2 and 3: low and step of pair N are of its plane
    # N % 2 and of both bytes that are N // 2 in their half.
    pairs = tl.load(pairs_ptr + tl.arange(0, 128)[None, :])
    pairs = tl.reshape(pairs, [1, 2, 4, 4, 2, 2])  # [1, plane, word // 4, word % 4, half, byte % 2]
    lower, upper = tl.split(tl.permute(pairs, (0, 2, 3, 5, 1, 4)))
    low, step = _pair_steps(lower, upper, ONE=16)  # [1, word // 4, word % 4, byte % 2, plane]
    low_plane0, low_plane1 = tl.split(low)
    step_plane0, step_plane1 = tl.split(step)
    low0, low2 = tl.split(low_plane0)
    low1, low3 = tl.split(low_plane1)
    step0, step2 = tl.split(step_plane0)
    step1, step3 = tl.split(step_plane1)

    # [token, word // 4, word % 4, half, plane, byte % 2]
    steps = (low0, step0, low1, step1, low2, step2, low3, step3)
    k = _decode_pairs(words, steps, BITS=4, BYTE=0)
    return tl.reshape(tl.permute(k, (0, 5, 4, 2, 1, 3)), [32, 128])


@jit
def _load_2_bit_keys(words_ptr, pairs_ptr):
    """A tile's keys [32, 128] fp16 of its words of codes [32, 8] and its group's (minimum, scale)
    [128]. Columns are (byte % 2, plane, word % 2, word // 2, byte // 2): _columns_in_pairs."""
    token = tl.arange(0, 32)[:, None]
    # The words 0 to 7, written so that a thread loads two in line and not four: the tensor cores
    # want two of each token.
    x = tl.arange(0, 8)[None, :]
    words = tl.load(words_ptr + token * 8 + x // 2 * 2 + x % 2)
    words = tl.reshape(words, [32, 4, 2])  # [token, word // 2, word % 2]

    pairs = tl.load(pairs_ptr + tl.arange(0, 128)[None, :])
    # [1, plane // 2, plane % 2, word // 2, word % 2, half, byte % 2]
    pairs = tl.reshape(pairs, [1, 2, 2, 4, 2, 2, 2])
    byte0, byte1 = tl.split(tl.permute(pairs, (0, 3, 4, 1, 2, 5, 6)))
    lower0, upper0 = tl.split(byte0)
    lower1, upper1 = tl.split(byte1)
    # [token, word // 2, word % 2, half, plane % 2, plane // 2]
    k0 = _decode_pairs(words, _pair_steps_of_planes(lower0, upper0), BITS=2, BYTE=0)
    k1 = _decode_pairs(words, _pair_steps_of_planes(lower1, upper1), BITS=2, BYTE=1)
    k = tl.join(k0, k1)  # [.., byte % 2]
    return tl.reshape(tl.permute(k, (0, 6, 5, 4, 2, 1, 3)), [32, 128])


@jit
def _columns_in_pairs(BITS: tl.constexpr):
    """The channel of each column of _load_4_bit_keys, or of _load_2_bit_keys."""
    column = tl.arange(0, 128)
    plane = column // (8 * BITS) % (8 // BITS)
    word = column // 2 % 4 * BITS + column // 8 % BITS
    byte = column % 2 * 2 + column // 64
    return plane * 16 * BITS + word * 4 + byte


@jit
def _load_4_bit_values(words_ptr, pairs_ptr, stride, last):
    """A tile's values, transposed, [128, 32] fp16, of words of codes [.., 16] and (minimum, scale)
    of a vector's groups [.., 4]; vectors lie `stride` apart. Tokens past the last one read that
    one: their store may end there, or have NaN, which shows even without a weight. Rows are
    (byte, plane, word % 2, word // 4, word // 2 % 2): _rows_in_pairs."""
    # Words of two neighbouring tokens, in places (x, y). A thread has the places of one x % 4 and
    # one y // 2, which are the tokens and rows that tensor cores want of it.
    x = tl.arange(0, 16)[:, None]
    y = tl.arange(0, 16)[None, :]
    token = 2 * (y // 2 % 4 + x // 4 * 4)
    word = y % 2 + y // 8 * 2 + x % 4 * 4
    even = tl.load(words_ptr + tl.minimum(token, last) * stride * 16 + word)
    odd = tl.load(words_ptr + tl.minimum(token + 1, last) * stride * 16 + word)

    # So that a pair is a channel of both tokens: bytes 0 and 1 of both, and bytes 2 and 3.
    front, back = _swap_halves(even, odd)
    # [x // 4, x // 2 % 2, x % 2, y // 8, y // 2 % 4, y % 2]
    front = tl.reshape(front, [4, 2, 2, 2, 4, 2])
    back = tl.reshape(back, [4, 2, 2, 2, 4, 2])

    # Low and step of a plane. A group, of 32 channels, is half of a plane: word // 8 = x // 2 % 2.
    token = tl.minimum(tl.arange(0, 32), last)[:, None] * stride
    pairs = tl.load(pairs_ptr + token * 4 + tl.arange(0, 4)[None, :])
    pairs = tl.reshape(pairs, [4, 4, 2, 2, 2])  # [x // 4, y // 2 % 4, token % 2, plane, word // 8]
    even_pairs, odd_pairs = tl.split(tl.permute(pairs, (0, 4, 1, 3, 2)))
    # [x // 4, word // 8, y // 2 % 4, plane]
    low, step = _pair_steps(even_pairs, odd_pairs, ONE=16)
    low0, low1 = tl.split(low)
    step0, step1 = tl.split(step)
    low0 = low0[:, :, None, None, :, None]
    low1 = low1[:, :, None, None, :, None]
    step0 = step0[:, :, None, None, :, None]
    step1 = step1[:, :, None, None, :, None]

    # [.., token % 2, plane, byte % 2]; both bytes are of one group
    steps = (low0, step0, low1, step1, low0, step0, low1, step1)
    front = _decode_pairs(front, steps, BITS=4, BYTE=0)
    back = _decode_pairs(back, steps, BITS=4, BYTE=0)
    v = tl.permute(tl.join(front, back), (9, 8, 7, 5, 1, 2, 3, 0, 4, 6))
    return tl.reshape(v, [128, 32])


@jit
def _load_2_bit_values(words_ptr, pairs_ptr, stride, last):
    """The same of words of 2-bit codes [.., 8], whose planes are the groups. Rows are (byte, plane,
    word): _rows_in_pairs."""
    # Words of two neighbouring tokens, in places (x, y). A thread has the places of one y.
    x = tl.arange(0, 4)[:, None]
    y = tl.arange(0, 32)[None, :]
    token = 2 * (y % 4 + x * 4)
    word = y // 4
    even = tl.load(words_ptr + tl.minimum(token, last) * stride * 8 + word)
    odd = tl.load(words_ptr + tl.minimum(token + 1, last) * stride * 8 + word)
    front, back = _swap_halves(even, odd)
    front = tl.reshape(front, [4, 8, 4])  # [x, word, y % 4]
    back = tl.reshape(back, [4, 8, 4])

    token = tl.minimum(tl.arange(0, 32), last)[:, None] * stride
    pairs = tl.load(pairs_ptr + token * 4 + tl.arange(0, 4)[None, :])
    pairs = tl.reshape(pairs, [4, 1, 4, 2, 2, 2])  # [x, 1, y % 4, token % 2, plane // 2, plane % 2]
    even_pairs, odd_pairs = tl.split(tl.permute(pairs, (0, 1, 2, 4, 5, 3)))
    steps = _pair_steps_of_planes(even_pairs, odd_pairs)  # each [x, 1, y % 4]

    # [x, word, y % 4, token % 2, plane % 2, plane // 2]
    v0 = _decode_pairs(front, steps, BITS=2, BYTE=0)
    v1 = _decode_pairs(front, steps, BITS=2, BYTE=1)
    v2 = _decode_pairs(back, steps, BITS=2, BYTE=0)
    v3 = _decode_pairs(back, steps, BITS=2, BYTE=1)
    v = tl.join(tl.join(v0, v1), tl.join(v2, v3))  # [.., byte % 2, byte // 2]
    return tl.reshape(tl.permute(v, (7, 6, 5, 4, 1, 0, 2, 3)), [128, 32])


@jit
def _rows_in_pairs(BITS: tl.constexpr):
    """The channel of each row of _load_4_bit_values, or of _load_2_bit_values."""
    row = tl.arange(0, 128)
    byte = row // 32
    if BITS == 4:
        plane = row // 16 % 2
        word = row // 8 % 2 + row % 2 * 2 + row // 2 % 4 * 4
    else:
        plane = row // 8 % 4
        word = row % 8
    return plane * 16 * BITS + word * 4 + byte


@jit
def _attend_channels_in_pairs_kernel(
    q_ptr,  # [B, Hq, 128] bf16
    k_ptr,  # words of codes [B, Hkv, k_tokens, 4 BITS] int32
    k_scale_ptr,  # (minimum, scale) words [B, Hkv, k_tokens / 32, 128] int32
    v_ptr,  # words of codes [B, Hkv, S, 4 BITS] int32
    v_scale_ptr,  # (minimum, scale) words [B, Hkv, S, 4] int32
    exact_k_ptr,  # [B, z, Hkv, 128] of q's dtype, after RoPE; None: there are none
    exact_v_ptr,  # [B, z, Hkv, 128] of q's dtype, or None
    pos_ptr,  # [B] int32
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, 128] fp32; of one split the result [B, Hq, 128] of q's dtype
    v_strides,  # vectors between two rows of the batch, two KV heads and two tokens
    k_tokens,  # of the keys' store, whole groups
    S,  # tokens of the values' store
    z,  # exact slots
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a KV head
    GP: tl.constexpr,  # padded
    BITS: tl.constexpr,  # of a code, 2 or 4
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = softmax(scale q K^T) V, as _attend_channels_kernel does it, in one warp."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    h = tl.program_id(1)
    Hkv = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    first_head = (b * Hkv + h) * G
    pos = tl.load(pos_ptr + b)
    D: tl.constexpr = 128
    T: tl.constexpr = 32  # tokens of a tile: a group
    WORDS: tl.constexpr = 4 * BITS  # of a vector
    k_channel = _columns_in_pairs(BITS)
    channel = _rows_in_pairs(BITS)

    # 1. The tokens of this split. The last split has the exact tokens, too, and so fewer of the
    # others.
    length = tl.minimum(tl.maximum(pos + 1 - z, 0), S)
    tiles = tl.cdiv(length, T)
    exact_tiles = 0 if exact_k_ptr is None else tl.cdiv(z, T)
    share = tl.cdiv(tiles + exact_tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)

    # 2. The queries, in the order of decoded keys; a softmax of the exact tokens, or of nothing.
    query = _load_queries(q_ptr + first_head * D, k_channel, k_channel < D, D, G, GP)
    query = query.to(tl.float16)
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([T, GP], tl.float32)
    acc = tl.zeros([D, GP], tl.float32)
    if exact_k_ptr is not None:
        if split == splits - 1:
            m, l, acc = _attend_exact(
                q_ptr + first_head * D,
                exact_k_ptr,
                exact_v_ptr,
                b,
                h,
                Hkv,
                pos,
                z,
                scale,
                m,
                l,
                acc,
                channel,
                channel < D,
                G,
                GP,
                D,
                D,
                T,
            )

    # 3. The coded tokens. Keys past the last one are decoded, too: their store has whole groups,
    # and their logits are masked.
    first_k = (b * Hkv + h) * k_tokens
    first_v = b * v_strides[0] + h * v_strides[1]
    for tile in tl.range(first, stop, num_stages=STAGES):
        k_words_ptr = k_ptr + (first_k + tile * T) * WORDS
        k_pairs_ptr = k_scale_ptr + (first_k // T + tile) * D
        v_vector = first_v + tile * T * v_strides[2]
        v_words_ptr = v_ptr + v_vector * WORDS
        v_pairs_ptr = v_scale_ptr + v_vector * 4
        last = length - 1 - tile * T
        if BITS == 4:
            k = _load_4_bit_keys(k_words_ptr, k_pairs_ptr)
            v = _load_4_bit_values(v_words_ptr, v_pairs_ptr, v_strides[2], last)
        else:
            k = _load_2_bit_keys(k_words_ptr, k_pairs_ptr)
            v = _load_2_bit_values(v_words_ptr, v_pairs_ptr, v_strides[2], last)
        logits = tl.dot(k, query, input_precision="ieee") * scale  # [T, GP]
        live = tl.arange(0, T) <= last
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        acc = acc * shrink[None, :]
        acc = tl.dot(v, weight.to(tl.float16), acc, input_precision="ieee")
        m = m_new

    # 4. The result, or this split's part of it.
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        first_head,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        channel,
        channel < D,
        G,
        GP,
        D,
    )


# ---- the launch of either


def empty_attend_channels(
    q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, bits: int, *_: object
) -> Tensor:
    """An empty tensor of the shape that launch_attend_channels gives."""
    return q.new_empty(*q.shape[:2], v.shape[3] * 8 // bits)


@operator(empty_attend_channels)
def launch_attend_channels(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    bits: int,
    pos: Tensor,
    exact: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attention of one new token of each row over KIVI's codes: q [B, Hq, D] after RoPE ->
    [B, Hq, DV].

    k [B, Hkv, tokens, D * bits / 8] uint8 of 2 or 4 bits (`pack`), tokens a multiple of 32, with
    k_scale [B, Hkv, tokens / 32, D, 2] fp16 (minimum, scale): a code stands for minimum + code *
    scale. v, v_scale and their bits as check_coded_values says, of S <= tokens. exact: (), or keys
    and values [B, z, Hkv, *], which are attended in the place of the z last tokens; their slots
    fill from the left."""
    B, Hq, D = q.shape
    _, Hkv, k_tokens, k_bytes = k.shape
    S = v.shape[2]
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    need(k_tokens >= S, f"keys of {k_tokens} tokens do not fit values of {S}")
    need(k_tokens % 32 == 0, f"keys of {k_tokens} tokens are not whole groups of 32")
    k_bits = k_bytes * 8 // D
    need(k_bits in (2, 4), f"codes of keys are of 2 or 4 bits, not {list(k.shape)}")
    need(D % 16 == 0, f"keys in codes need a head dim of whole words, not {D}")
    check(
        q=(q, q.dtype, B, Hq, D),
        pos=(pos, torch.int32, B),
        **{
            "codes of keys": (k, torch.uint8, B, Hkv, k_tokens, D * k_bits // 8),
            "scale of keys": (k_scale, torch.float16, B, Hkv, k_tokens // 32, D, 2),
        },
    )
    # One run takes a plane whole, since a channel's group is that of its tokens.
    keys = packing_of(D, k_bits, group=32, run=power2(D, 16) * k_bits // 8)
    values, v_strides = check_coded_values(v, v_scale, B, Hkv, S, bits)
    v_words, v_scale_words = as_words(v, v_scale)
    z = check_exact(exact, q, Hkv, values.D)
    exact_k, exact_v = exact or (None, None)
    G = Hq // Hkv
    in_pairs = decodes_pairs(q, k_bits, values.D, bits, v_scale)
    config = channels_config(q.dtype, in_pairs, bits)
    splits = attend_splits(S, B * Hkv, config.programs_a_sm)
    parts = empty_splits(q, splits, values.D)
    arguments = {  # of both kernels
        "q_ptr": q,
        "k_ptr": k.view(torch.int32),
        "k_scale_ptr": k_scale.view(torch.int32),
        "v_ptr": v_words,
        "v_scale_ptr": v_scale_words,
        "exact_k_ptr": exact_k,
        "exact_v_ptr": exact_v,
        "pos_ptr": pos,
        "m_ptr": parts.m,
        "l_ptr": parts.l,
        "out_ptr": parts.out,
        "v_strides": v_strides,
        "k_tokens": k_tokens,
        "S": S,
        "z": z,
        "scale": scale * LOG2E,
        "G": G,
        "GP": power2(G, 8),  # tensor cores take 8 queries at least
        "STAGES": config.stages,
        "num_warps": config.warps,
        **overlapped(q.device),
    }
    if in_pairs:
        _attend_channels_in_pairs_kernel[splits, Hkv, B](
            **arguments,
            BITS=bits,
            maxnreg=128,  # of a thread: as many as let 16 programs run on a multiprocessor
        )
    else:
        _attend_channels_kernel[splits, Hkv, B](
            **arguments,
            D=D,
            DV=values.D,
            KEYS=keys,
            VALUES=values,
            T=config.tokens,
        )
    return merge_splits(parts, q)


def channels_config(dtype: torch.dtype, in_pairs: bool, bits: int) -> TileConfig:
    """One warp decodes a group without waiting for others."""
    if dtype == torch.float32:
        return TileConfig(32, warps=4, stages=2, programs_a_sm=4)
    programs_a_sm = 8
    if in_pairs:
        # A multiprocessor runs 16 at once. In 2 bits, where each has half of the bytes to read,
        # twice as many are faster: a step of 8.79 ms in place of 8.97 (8B, 8 x 32768, an H200).
        programs_a_sm = 32 if bits == 2 else 16
    return TileConfig(32, warps=1, stages=3, programs_a_sm=programs_a_sm)


# ------------------------------------------------ attention: latents that all heads share (EliteKV)
# A latent is the key of every head, and its leading numbers are the value, so that it is read once.
# It needs the shared block of the kernels that attend. Latents beyond 512 numbers (256 in fp32)
# need scores and attention of given logits besides, and with it the block that decodes packed
# codes.


@jit
def _attend_shared_latent_kernel(
    q_ptr,  # [B, Hq, W] of the model's dtype
    latent_ptr,  # [B, S, W] of q's dtype
    pos_ptr,  # [B] int32
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV] of q's dtype
    S,
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a row: Hq
    GP: tl.constexpr,  # padded
    W: tl.constexpr,  # numbers of a latent
    DV: tl.constexpr,  # of these, leading ones that are the value
    T: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr,  # tiles in flight
    BRANCH: tl.constexpr,  # does the softmax lie in a branch, always taken?
):
    """out = softmax(scale q L^T) L[:, :DV], of latents L. A program has all query heads."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    b = tl.program_id(1).to(tl.int64)
    WP: tl.constexpr = _padded(W, 16)
    d = tl.arange(0, WP)

    # 1. The tokens of this split, and the queries.
    length = tl.minimum(tl.load(pos_ptr + b) + 1, S)
    tiles = tl.cdiv(length, T)
    share = tl.cdiv(tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)
    query = _load_queries(q_ptr + b * G * W, d, d < W, W, G, GP)
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([T, GP], tl.float32)
    acc = tl.zeros([WP, GP], tl.float32)

    # 2. The tokens. Columns of acc beyond DV are not stored.
    for tile in tl.range(first, stop, num_stages=STAGES):
        token = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = token < length
        latent_at = latent_ptr + (b * S + token)[:, None] * W + d[None, :]
        latent = tl.load(latent_at, mask=live[:, None] & (d < W)[None, :], other=0.0)
        logits = tl.dot(latent, query, input_precision="ieee") * scale  # [T, GP]
        # Two products of wgmma keep two tiles in shared memory. The compiler reads the older in a
        # branch, so that the next one's loads come before it.
        if not BRANCH or tile < stop:
            logits = tl.where(live[:, None], logits, -1e30)
            m_new = tl.maximum(m, tl.max(logits, 0))
            weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
            shrink = tl.exp2(m - m_new)
            l = l * shrink[None, :] + weight
            acc = acc * shrink[None, :]
            weight = weight.to(latent.dtype)
            acc = tl.dot(tl.trans(latent), weight, acc, input_precision="ieee")
            m = m_new

    # 3. The result, or this split's part of it.
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        b * G,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        d,
        d < DV,
        G,
        GP,
        DV,
    )


def empty_attend_shared_latent(
    q: Tensor, latent: Tensor, pos: Tensor, DV: int, scale: float
) -> Tensor:
    """An empty tensor of the shape that launch_attend_shared_latent gives."""
    return q.new_empty(*q.shape[:2], DV)


@operator(empty_attend_shared_latent)
def launch_attend_shared_latent(
    q: Tensor, latent: Tensor, pos: Tensor, DV: int, scale: float
) -> Tensor:
    """attend_shared_latent, of latents of at most 512 numbers (256 in fp32): q [B, Hq, W], latent
    [B, S, W] of its dtype, pos [B] int32 -> [B, Hq, DV]."""
    B, Hq, W = q.shape
    S = latent.shape[1]
    check(
        q=(q, q.dtype, B, Hq, W),
        latent=(latent, q.dtype, B, S, W),
        pos=(pos, torch.int32, B),
    )
    need(DV <= W, f"a latent of {W} numbers has no value of {DV}")
    need(
        W * q.element_size() <= 1024,
        f"a latent of {W} numbers is too wide: use attend_shared_latent",
    )
    if q.element_size() == 4:  # for tests
        T = 16
    else:  # two tiles of 64 latents of 512 numbers are 128 KB
        T = 64 if has_large_shared_memory(q.device) else 32
    # Where wgmma, Hopper's product, keeps two tiles in shared memory (see the kernel).
    branch = q.element_size() == 2 and W > 32 and nvidia_generation(q.device) == 9
    splits = attend_splits(S, B, programs_a_sm=1)  # a tile takes most of the shared memory
    parts = empty_splits(q, splits, DV)
    _attend_shared_latent_kernel[splits, B](
        q_ptr=q,
        latent_ptr=latent,
        pos_ptr=pos,
        m_ptr=parts.m,
        l_ptr=parts.l,
        out_ptr=parts.out,
        S=S,
        scale=scale * LOG2E,
        G=Hq,
        GP=power2(Hq, 16),
        W=W,
        DV=DV,
        T=T,
        STAGES=2,
        BRANCH=branch,
        num_warps=4,
        **overlapped(q.device),
    )
    return merge_splits(parts, q)


def attend_shared_latent(
    q: Tensor, latent: Tensor, pos: Tensor, DV: int, *, scale: float, kernel: bool
) -> Tensor:
    """Attention over latents [B, S, W] that all heads share, as in MLA's absorbed decode: q
    [B, Hq, W] -> [B, Hq, DV]. A latent is the key, and its leading DV numbers are the value.

    Sums of latents beyond 512 numbers (256 in fp32) do not fit in a kernel's registers. There
    scores makes the logits, and attend_logits reads the values again."""
    vectors = latent[:, None]  # [B, 1, S, W]
    if not kernel:
        live = torch.arange(latent.shape[1], device=pos.device) <= pos[:, None]
        return attend_plain_reference(q, vectors, vectors[..., :DV], live, scale)
    q = q.contiguous()
    pos = pos.int()
    if q.shape[2] * q.element_size() <= 1024:
        return launch_attend_shared_latent(q, latent, pos, DV, scale)
    logits = launch_scores(q[:, None], vectors, None, pos, scale, "each")  # [B, 1, Hq, S]
    # Blocks of a latent take the places of KV heads.
    width = math.gcd(512, DV, q.shape[2])
    blocks = latent.unflatten(-1, (-1, width))[:, :, : DV // width].transpose(1, 2)
    n_blocks = blocks.shape[1]
    out = attend_logits(logits.expand(-1, n_blocks, -1, -1), blocks, pos, kernel=True)
    return out.unflatten(1, (n_blocks, -1)).transpose(1, 2).flatten(2)  # [B, Hq, DV]


# -------------------------------------------------------------------------- attention: given logits
# Softmax and values alone: for H2O, which keeps the weights, for wide latents that all heads share,
# and for extras/hopper.py, which makes SALS's logits itself. It needs both shared blocks, of the
# kernels that attend and of those that decode packed codes.


@jit
def _attend_logits_kernel(
    q_ptr,  # [B, Hq, D] of the model's dtype, for the exact tokens
    logits_ptr,  # [B, Hkv, G, n] fp32: of the index's tokens in their order; without it of all
    v_ptr,  # [B, Hkv, S, DV] of q's dtype, or words of codes [B, Hkv, S, DV * bits / 32] int32
    # (minimum, scale) words [B, Hkv, S, groups] int32, or a scale [B, Hkv, S] fp16; None: plain
    v_scale_ptr,
    index_ptr,  # [B, n] int32, -1: no token; None: all tokens that are not exact
    exact_k_ptr,  # [B, z, Hkv, D] of q's dtype, after RoPE; None: there are none
    exact_v_ptr,  # [B, z, Hkv, DV] of q's dtype, or None
    pos_ptr,  # [B] int32
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV] of q's dtype
    logit_strides,  # numbers between two rows of the batch, two KV heads and two queries
    v_strides,  # vectors between two rows of the batch, two KV heads and two tokens
    n,  # tokens of the index; without one of the store
    index_stride,  # numbers between two rows of it
    z,  # exact slots
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a KV head
    GP: tl.constexpr,  # padded; 1: one query, which needs no tensor cores
    D: tl.constexpr,
    DV: tl.constexpr,
    PACKING: tl.constexpr,  # of the values' codes; None: they are plain
    T: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = softmax(scale logits) V."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    h = tl.program_id(1)
    Hkv = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    first_head = (b * Hkv + h) * G
    pos = tl.load(pos_ptr + b)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    g = tl.arange(0, GP)
    if PACKING is None:
        channel = tl.arange(0, _padded(DV, 16))
        has_channel = channel < DV
    else:
        channel, has_channel = _columns(PACKING)

    # 1. The tokens of this split. The last split has the exact tokens, too, and so fewer of the
    # others.
    length = n
    if index_ptr is None:
        length = tl.minimum(tl.maximum(pos + 1 - z, 0), n)
    tiles = tl.cdiv(length, T)
    exact_tiles = 0 if exact_k_ptr is None else tl.cdiv(z, T)
    share = tl.cdiv(tiles + exact_tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)
    logits_ptr += b * logit_strides[0] + h * logit_strides[1]
    if index_ptr is not None:
        index_ptr += b * index_stride
        # One tile ahead: a load is not prefetched if it waits for the load of its index.
        offs = first * T + tl.arange(0, T)
        next_token = tl.load(index_ptr + offs, mask=offs < n, other=-1)

    # 2. A softmax of the exact tokens, or of nothing. Tensor cores, which attend them, take 8
    # queries at least.
    EP: tl.constexpr = 8 if GP == 1 else GP
    m_exact = tl.full([EP], -1e30, tl.float32)
    l_exact = tl.zeros([T, EP], tl.float32)
    acc_exact = tl.zeros([channel.shape[0], EP], tl.float32)
    if exact_k_ptr is not None:
        if split == splits - 1:
            m_exact, l_exact, acc_exact = _attend_exact(
                q_ptr + first_head * D,
                exact_k_ptr,
                exact_v_ptr,
                b,
                h,
                Hkv,
                pos,
                z,
                scale,
                m_exact,
                l_exact,
                acc_exact,
                channel,
                has_channel,
                G,
                EP,
                D,
                DV,
                T,
            )
    if GP == 1:
        # One query: sums over tokens come at the end, from acc [T, channels]. The exact tokens'
        # sums are its first row.
        is_first_query = tl.arange(0, EP)[None, :] == 0
        is_first_row = (tl.arange(0, T) == 0)[:, None]
        m = tl.max(tl.where(is_first_query, m_exact[None, :], -1e30), 1)
        l = tl.sum(tl.where(is_first_query, l_exact, 0.0), 1)[:, None]
        acc_row = tl.sum(tl.where(is_first_query, acc_exact, 0.0), 1)
        acc = tl.where(is_first_row, acc_row[None, :], 0.0)
    else:
        m = m_exact
        l = l_exact
        acc = acc_exact

    # 3. The stored tokens.
    for tile in tl.range(first, stop, num_stages=STAGES):
        offs = tile * T + tl.arange(0, T)
        if index_ptr is None:
            token = offs
            live = offs < length
        else:
            token = next_token
            live = token >= 0
            next_token = tl.load(index_ptr + offs + T, mask=offs + T < n, other=-1)
        logits_at = logits_ptr + offs[:, None] + g[None, :] * logit_strides[2]
        mask = live[:, None] & (g < G)[None, :]
        logits = tl.load(logits_at, mask=mask, other=0.0) * scale  # [T, GP]
        v_vector = b * v_strides[0] + h * v_strides[1] + token.to(tl.int64) * v_strides[2]
        if PACKING is None:
            v_at = v_ptr + v_vector[:, None] * DV + channel[None, :]
            v = tl.load(v_at, mask=live[:, None] & has_channel[None, :], other=0.0)
        else:
            v = _decode_values(v_ptr, v_scale_ptr, v_vector, live, dtype, PACKING)
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        if GP == 1:
            acc = acc * shrink[None, :] + v * weight
        else:
            acc = acc * shrink[None, :]
            acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc, input_precision="ieee")
        m = m_new

    # 4. The result, or this split's part of it.
    if GP == 1:
        acc = tl.sum(acc, 0)[:, None]
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        first_head,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        channel,
        has_channel,
        G,
        GP,
        DV,
    )


def empty_attend_logits(
    q: Tensor, logits: Tensor, v: Tensor, v_scale: Tensor | None, bits: int, *_: object
) -> Tensor:
    """An empty tensor of the shape that launch_attend_logits gives."""
    return q.new_empty(*q.shape[:2], v.shape[3] * max(1, 8 // bits))


@operator(empty_attend_logits)
def launch_attend_logits(
    q: Tensor,
    logits: Tensor,
    v: Tensor,
    v_scale: Tensor | None,
    bits: int,
    pos: Tensor,
    index: Tensor | None,
    exact: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attention whose logits [B, Hkv, G, n] fp32 are there, each query's in line: of the tokens of
    an index [B, n] int32, -1 for none, or of all up to pos [B] int32 -> [B, Hq, DV] of q's dtype.

    q [B, Hq, D] counts for exact tokens alone. v, v_scale, bits: of 16 bits [B, Hkv, S, DV] of q's
    dtype, and None; of 2 or 4 bits as check_coded_values says. exact: (), or keys and values
    [B, z, Hkv, *] that are attended besides, without an index in the place of the z last tokens;
    their slots fill from the left."""
    B, Hq, D = q.shape
    _, Hkv, S, _ = v.shape
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    G = Hq // Hkv
    check_shape("logits", logits, torch.float32, B, Hkv, G, logits.shape[3])
    need(logits.stride(3) == 1, "the logits of a query must lie in line")
    check(q=(q, q.dtype, B, Hq, D), pos=(pos, torch.int32, B))
    values = kernel_values(v, v_scale, bits, q.dtype, B, Hkv, S)
    DV = values.DV
    chosen = check_index(index, B, Hkv, Hq, S)
    need(chosen.sets == 1, "all heads have the tokens of one index")
    need(logits.shape[3] >= chosen.n, f"{logits.shape[3]} logits are no {chosen.n} tokens'")
    z = check_exact(exact, q, Hkv, DV)
    exact_k, exact_v = exact or (None, None)
    config = plain_config(q.dtype, DV, has_large_shared_memory(q.device))
    if bits < 16 and q.element_size() == 2:
        # Values in codes are few bytes: more programs, of two warps where one query needs no
        # tensor cores.
        config = TileConfig(64, warps=4 if G > 1 else 2, stages=2, programs_a_sm=6)
    splits = attend_splits(chosen.n, B * Hkv, config.programs_a_sm)
    parts = empty_splits(q, splits, DV)
    _attend_logits_kernel[splits, Hkv, B](
        q_ptr=q,
        logits_ptr=logits,
        v_ptr=values.v,
        v_scale_ptr=values.scale,
        index_ptr=index,
        exact_k_ptr=exact_k,
        exact_v_ptr=exact_v,
        pos_ptr=pos,
        m_ptr=parts.m,
        l_ptr=parts.l,
        out_ptr=parts.out,
        logit_strides=logits.stride()[:3],
        v_strides=values.strides,
        n=chosen.n,
        index_stride=chosen.stride,
        z=z,
        scale=scale * LOG2E,
        G=G,
        GP=1 if G == 1 else power2(G, 8),
        D=D,
        DV=DV,
        PACKING=values.packing,
        T=config.tokens,
        STAGES=config.stages,
        num_warps=config.warps,
        **overlapped(q.device),
    )
    return merge_splits(parts, q)


def attend_logits(logits: Tensor, v: Tensor, pos: Tensor, *, kernel: bool) -> Tensor:
    """Attention whose logits [B, Hkv, G, S] fp32 are there, over the tokens up to pos of v
    [B, Hkv, S, DV] -> [B, Hkv * G, DV] of v's dtype."""
    B, Hkv, G, _ = logits.shape
    if not kernel:
        live = torch.arange(v.shape[2], device=pos.device) <= pos[:, None, None, None]
        return matmul_codes(logits.masked_fill(~live, -torch.inf).softmax(-1), v).flatten(1, 2)
    q = v.new_empty(B, Hkv * G, 16)  # of any width: only exact tokens would read it
    return launch_attend_logits(q, logits, v, None, 16, pos.int(), None, (), 1.0)


# ----------------------------------------------------------- attention: heads of unequal rank (FDC)
# The balanced adaptive-rank kernel. Each KV head keeps keys of d_qk and values of d_v numbers, so
# that equal numbers of tokens are unequal numbers of bytes. Programs take equal stretches of a line
# of work instead, whichever heads and rows these are:
#
#     head after head, the widest first; of a head all rows, one behind the other, in blocks of 16
#     tokens. A block's work is the head's d_qk + d_v, in 8s (balanced=False: 1, the paper's /KE).
#
# A block belongs to the program in whose stretch its work begins. A stretch is never shorter than a
# block of the widest head, so that every program between the first and the last of a row has a
# block of it. Where a stretch begins follows from the lengths of the rows, which are read on the
# device, so that one CUDA graph serves every length. A tile's tokens follow from the head's width:
# many of a narrow head. Each piece of a row that a program attends is a part of the result, and a
# second kernel joins a head's parts. It needs the shared block of the kernels that attend, for the
# reference.

RAGGED_BLOCK = 16  # tokens, the fewest that tensor cores take: pieces begin at multiples of it


class RaggedHead(NamedTuple):
    """An entry of the table: one head, and where its work begins on the line of work. Numbers are
    of one token."""

    head: int
    d_qk: int
    d_v: int
    k_before: int  # numbers that are stored before its keys, of all heads
    v_before: int  # and before its values
    work_before: int  # of one block of each head that comes first on the line
    work: int  # of a block, in 8s of numbers a token
    kind: int  # which of ragged_widths its products have, by number


def product_widths(rank: int) -> tuple[int, int]:
    """Vectors of a rank are multiplied in one or two parts, powers of two from 16 on (the least
    that tensor cores take), of which the second is the smaller: (64, 16) for 72, (64, 0) for 64.
    Zeros pad them."""
    whole = power2(rank, 16)
    half = whole // 2
    rest = power2(rank - half, 16)
    if half >= 16 and rest < half:
        return half, rest
    return whole, 0


def ragged_widths(ranks: list[int]) -> tuple[tuple[int, int], ...]:
    """The different product_widths of all heads. ranks: d_qk of each head, then d_v of each."""
    n = len(ranks) // 2
    return tuple(sorted({product_widths(max(ranks[h], ranks[n + h])) for h in range(n)}))


def ragged_heads(ranks: list[int], balanced: bool) -> list[RaggedHead]:
    """The table, in the order of the line. ranks: d_qk of each head, then d_v of each."""
    n = len(ranks) // 2
    before = [0, *itertools.accumulate(ranks)]
    widths = ragged_widths(ranks)
    widest_first = sorted(range(n), key=lambda h: -(ranks[h] + ranks[n + h]))
    heads = []
    work_before = 0
    for h in widest_first:
        d_qk = ranks[h]
        d_v = ranks[n + h]
        work = (d_qk + d_v) // 8 if balanced else 1
        kind = widths.index(product_widths(max(d_qk, d_v)))
        heads.append(RaggedHead(h, d_qk, d_v, before[h], before[n + h], work_before, work, kind))
        work_before += work
    return heads


def ragged_table(ranks: list[int], device: torch.device, balanced: bool = True) -> Tensor:
    """What launch_attend_ragged needs of ragged_heads, [Hkv, 8] int32."""
    return torch.tensor(ragged_heads(ranks, balanced), dtype=torch.int32, device=device)


def attend_ragged_reference(
    q: Tensor, keys: list[Tensor], values: list[Tensor], pos: Tensor, scale: float
) -> Tensor:
    """Head after head: q [B, Hq, max d_qk], read up to a head's d_qk; keys [B, S, d_qk] and values
    [B, S, d_v] of each KV head -> [B, sum of G d_v]."""
    live = torch.arange(keys[0].shape[1], device=pos.device) <= pos[:, None]  # [B, S]
    G = q.shape[1] // len(keys)
    outputs = []
    for h, (k, v) in enumerate(zip(keys, values, strict=True)):
        queries = q[:, h * G : (h + 1) * G, : k.shape[2]]
        out = attend_plain_reference(queries, k[:, None], v[:, None], live, scale)
        outputs.append(out.flatten(1))
    return torch.cat(outputs, 1)


@jit
def _row_blocks(pos_ptr, B, BP: tl.constexpr):
    """The length of each row [BP], and where its blocks, of RAGGED_BLOCK tokens, end on the line of
    a head [BP]."""
    row = tl.arange(0, BP)
    length = tl.load(pos_ptr + row, mask=row < B, other=-1) + 1
    return length, tl.cumsum(tl.cdiv(length, 16), 0)  # RAGGED_BLOCK


@constexpr_function
def _tile_tokens(widths, numbers, most):
    """Tokens of a tile: 16, or the largest power of two, up to `most`, of which the keys have no
    more than so many numbers, with the zeros that pad them to these widths."""
    tokens = 16
    while tokens < most and 2 * tokens * (widths[0] + widths[1]) <= numbers:
        tokens *= 2
    return tokens


@jit
def _attend_piece(
    q_ptr,  # [G, DQ] of the model's dtype: the queries of the piece's head
    k_ptr,  # [S, d_qk] of q's dtype: the keys of the row and head
    v_ptr,  # [S, d_v] of q's dtype
    out_ptr,  # [G, DV] fp32: the part's attention
    lse_ptr,  # [G] fp32: log2 of its sum of exp2(logit), its weight in the merge
    d_qk,
    d_v,
    first,  # token of the piece
    stop,  # and the one behind its last
    scale,  # with log2(e)
    DQ,  # numbers of a query: the largest d_qk
    G: tl.constexpr,  # queries of a KV head
    GP: tl.constexpr,  # padded
    DV: tl.constexpr,  # numbers of a part: the largest d_v
    W1: tl.constexpr,  # product_widths
    W2: tl.constexpr,
    T: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr,  # tiles in flight
):
    """Attends the tokens first to stop - 1 of a row."""
    g = tl.arange(0, GP)
    is_query = (g < G)[:, None]
    d1 = tl.arange(0, W1)[None, :]
    d2 = W1 + tl.arange(0, 16 if W2 == 0 else W2)[None, :]
    q1 = tl.load(q_ptr + g[:, None] * DQ + d1, mask=is_query & (d1 < d_qk), other=0.0)
    acc1 = tl.zeros([GP, W1], tl.float32)
    if W2 > 0:
        q2 = tl.load(q_ptr + g[:, None] * DQ + d2, mask=is_query & (d2 < d_qk), other=0.0)
        acc2 = tl.zeros([GP, W2], tl.float32)
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([GP], tl.float32)
    for start in tl.range(first, stop, T, num_stages=STAGES):
        token = start + tl.arange(0, T)
        is_live = (token < stop)[:, None]
        # K' and V' of a tile, in one or two parts.
        k_at = k_ptr + token[:, None] * d_qk
        v_at = v_ptr + token[:, None] * d_v
        k1 = tl.load(k_at + d1, mask=is_live & (d1 < d_qk), other=0.0)
        if W2 > 0:
            k2 = tl.load(k_at + d2, mask=is_live & (d2 < d_qk), other=0.0)
        v1 = tl.load(v_at + d1, mask=is_live & (d1 < d_v), other=0.0)
        if W2 > 0:
            v2 = tl.load(v_at + d2, mask=is_live & (d2 < d_v), other=0.0)

        logits = tl.dot(q1, tl.trans(k1), input_precision="ieee")  # [GP, T]
        if W2 > 0:
            logits = tl.dot(q2, tl.trans(k2), logits, input_precision="ieee")
        logits = tl.where((token < stop)[None, :], logits * scale, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 1))
        weight = tl.exp2(logits - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(weight, 1)
        weight = weight.to(v1.dtype)
        acc1 = tl.dot(weight, v1, acc1 * shrink[:, None], input_precision="ieee")
        if W2 > 0:
            acc2 = tl.dot(weight, v2, acc2 * shrink[:, None], input_precision="ieee")
        m = m_new
    out_at = out_ptr + g[:, None] * DV
    tl.store(out_at + d1, acc1 / l[:, None], mask=is_query & (d1 < d_v))
    if W2 > 0:
        tl.store(out_at + d2, acc2 / l[:, None], mask=is_query & (d2 < d_v))
    tl.store(lse_ptr + g, m + tl.log2(l), mask=g < G)


@jit
def _attend_ragged_kernel(
    q_ptr,  # [B, Hkv, G, DQ] of the model's dtype
    packed_ptr,  # K' [B, S, d_qk] of each head, then V' [B, S, d_v] of each, of q's dtype
    table_ptr,  # [Hkv, 8] int32: RaggedHead, a field a column
    pos_ptr,  # [B] int32
    out_ptr,  # [parts, G, DV] fp32
    lse_ptr,  # [parts, G] fp32
    B,
    S,
    Hkv,
    DQ,  # numbers of a query: the largest d_qk
    work_a_block,  # of one block of each head
    most_work,  # of a block of the widest head
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a KV head
    GP: tl.constexpr,  # padded
    DV: tl.constexpr,  # numbers of a part: the largest d_v
    BP: tl.constexpr,  # rows of the batch, padded
    HP: tl.constexpr,  # KV heads, padded
    WIDTHS: tl.constexpr,  # ragged_widths
    NUMBERS: tl.constexpr,  # of keys in a tile
    STAGES: tl.constexpr,  # tiles in flight
):
    """A program attends one stretch of the line of work, piece by piece: a piece lies in one row of
    one head. Its part of the result has the number program + i B + row, i being the head's place on
    the line: each next piece of the line has a larger one."""
    _wait_for_previous()
    _let_next_begin()
    program = tl.program_id(0)
    row_number = tl.arange(0, BP)
    length, row_end = _row_blocks(pos_ptr, B, BP)
    n_blocks = tl.max(row_end)
    tokens = tl.cast(B, tl.int64) * S

    # 1. The stretch, and the head in which it begins.
    share = tl.maximum(tl.cdiv(n_blocks * work_a_block, tl.num_programs(0)), most_work)
    work = program * share
    work_stop = tl.minimum(work + share, n_blocks * work_a_block)
    # Columns of the table: 0 head, 1 d_qk, 2 d_v, 3 k_before, 4 v_before, 5 work_before, 6 work,
    # 7 kind.
    head_number = tl.arange(0, HP)
    is_head = head_number < Hkv
    work_before = tl.load(table_ptr + head_number * 8 + 5, mask=is_head, other=0)
    work_of_block = tl.load(table_ptr + head_number * 8 + 6, mask=is_head, other=0)
    ends_before = (work_before + work_of_block) * n_blocks <= work
    i = tl.sum((ends_before & is_head).to(tl.int32))

    while work < work_stop:
        # 2. The head, and its blocks that begin in the stretch. Its ranks are multiples of 8,
        # which the compiler is to know.
        entry = table_ptr + i * 8
        h = tl.load(entry)
        d_qk = tl.load(entry + 1) // 8 * 8
        d_v = tl.load(entry + 2) // 8 * 8
        k_before = tl.load(entry + 3).to(tl.int64) // 8 * 8
        v_before = tl.load(entry + 4).to(tl.int64) // 8 * 8
        head_begin = tl.load(entry + 5) * n_blocks
        block_work = tl.load(entry + 6)
        kind = tl.load(entry + 7)
        block = tl.cdiv(work - head_begin, block_work)
        stop_block = tl.minimum(tl.cdiv(work_stop - head_begin, block_work), n_blocks)
        while block < stop_block:
            # 3. The piece: up to the end of the row, or of the stretch.
            row = tl.sum((row_end <= block).to(tl.int32))
            row_begin = tl.max(tl.where(row_end <= block, row_end, 0))
            own_row_end = tl.min(tl.where(row_end > block, row_end, 2147483647))
            own_length = tl.sum(tl.where(row_number == row, length, 0))
            piece_stop = tl.minimum(own_row_end, stop_block)
            # In tokens from here on, of which a block has RAGGED_BLOCK.
            first = (block - row_begin) * 16
            stop = tl.minimum((piece_stop - row_begin) * 16, own_length)
            part = (program + i * B + row).to(tl.int64)
            row = row.to(tl.int64)
            for j in tl.static_range(len(WIDTHS)):
                if kind == j:
                    _attend_piece(
                        q_ptr + (row * Hkv + h) * G * DQ,
                        packed_ptr + k_before * tokens + row * S * d_qk,
                        packed_ptr + v_before * tokens + row * S * d_v,
                        out_ptr + part * G * DV,
                        lse_ptr + part * G,
                        d_qk,
                        d_v,
                        first,
                        stop,
                        scale,
                        DQ,
                        G,
                        GP,
                        DV,
                        WIDTHS[j][0],
                        WIDTHS[j][1],
                        _tile_tokens(WIDTHS[j], NUMBERS, 128),
                        STAGES,
                    )
            block = piece_stop
        i += 1
        work = head_begin + n_blocks * block_work


@jit
def _merge_ragged_kernel(
    part_ptr,  # of _attend_ragged_kernel [parts, G, DV] fp32
    lse_ptr,  # [parts, G] fp32
    table_ptr,  # [Hkv, 8] int32: RaggedHead, a field a column
    pos_ptr,  # [B] int32
    out_ptr,  # [B, G * sum of d_v] of q's dtype: heads in the model's order
    B,
    programs,  # of _attend_ragged_kernel
    work_a_block,  # of one block of each head
    most_work,  # of a block of the widest head
    k_numbers,  # the sum of d_qk
    out_width,  # G * sum of d_v
    G: tl.constexpr,  # queries of a KV head
    DV: tl.constexpr,  # numbers of a part: the largest d_v
    BP: tl.constexpr,  # rows of the batch, padded
    N: tl.constexpr,  # parts at a time
    C: tl.constexpr,  # channels of a program
):
    """Joins the parts of a query. A program has some channels of one query of a row and head."""
    _wait_for_previous()
    _let_next_begin()
    unit = tl.program_id(0)  # i B + row, as parts are numbered
    g = tl.program_id(1)
    d = tl.program_id(2) * C + tl.arange(0, C)
    i = unit // B
    row = unit % B
    # 1. The programs whose stretches have blocks of this row and head: from that of its first block
    # to that of its last.
    row_number = tl.arange(0, BP)
    _, row_end = _row_blocks(pos_ptr, B, BP)
    n_blocks = tl.max(row_end)
    first_block = tl.sum(tl.where(row_number == row - 1, row_end, 0))
    stop_block = tl.sum(tl.where(row_number == row, row_end, 0))
    share = tl.maximum(tl.cdiv(n_blocks * work_a_block, programs), most_work)
    entry = table_ptr + i * 8  # columns as in _attend_ragged_kernel
    head_begin = tl.load(entry + 5) * n_blocks
    block_work = tl.load(entry + 6)
    first_program = (head_begin + first_block * block_work) // share
    last_program = (head_begin + (stop_block - 1) * block_work) // share
    # 2. Their parts.
    d_v = tl.load(entry + 2)
    v_before = tl.load(entry + 4) - k_numbers
    m = tl.full([], -1e30, tl.float32)
    l = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([C], tl.float32)
    for start in range(first_program, last_program + 1, N):
        program = start + tl.arange(0, N)
        exists = program <= last_program
        at = (program + unit).to(tl.int64) * G + g
        lse = tl.load(lse_ptr + at, mask=exists, other=-1e30)
        mask = exists[:, None] & (d < d_v)[None, :]
        part = tl.load(part_ptr + at[:, None] * DV + d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.where(exists, tl.exp2(lse - m_new), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        m = m_new
    out_at = out_ptr + row.to(tl.int64) * out_width + v_before * G + g * d_v + d
    tl.store(out_at, (acc / l).to(out_ptr.dtype.element_ty), mask=d < d_v)


class RaggedConfig(NamedTuple):
    """How a launch is cut into tiles and programs."""

    numbers: int  # of keys in a tile, and as many of values
    stages: int  # tiles in flight
    programs_a_sm: int


def ragged_config(dtype: torch.dtype) -> RaggedConfig:
    """One warp attends a tile without waiting for others, and eight such programs hide the memory's
    latency: 2048 numbers of keys and of values are 8 KB a tile, of which three are in flight.
    Measured on an H200. fp32 is for tests."""
    if dtype == torch.float32:
        return RaggedConfig(numbers=1024, stages=2, programs_a_sm=4)
    return RaggedConfig(numbers=2048, stages=3, programs_a_sm=8)


def empty_attend_ragged(
    q: Tensor, packed: Tensor, table: Tensor, ranks: list[int], *_: object, **more: object
) -> Tensor:
    """An empty tensor of the shape that launch_attend_ragged gives."""
    n = len(ranks) // 2
    G = q.shape[1] // n
    return q.new_empty(len(q), G * sum(ranks[n:]))


@operator(empty_attend_ragged)
def launch_attend_ragged(
    q: Tensor,
    packed: Tensor,
    table: Tensor,
    ranks: list[int],
    pos: Tensor,
    scale: float,
    balanced: bool = True,
) -> Tensor:
    """attend_ragged by its kernels: q [B, Hq, max d_qk], read up to a head's d_qk -> [B, G * sum of
    d_v], heads in the model's order.

    packed: K' [B, S, d_qk] of each head, then V' [B, S, d_v] of each, in one line of q's dtype; its
    size gives S. ranks: d_qk of each head, then d_v of each, multiples of 8. table [Hkv, 8] int32:
    their ragged_table of the same `balanced`. pos [B] int32 must be below S. scale: that of the
    full head dim. A row of no tokens, pos -1, leaves the others right; its own result means
    nothing."""
    B, Hq, DQ = q.shape
    Hkv = len(ranks) // 2
    fits = len(ranks) == 2 * Hkv > 0 and min(ranks) > 0 and Hq % Hkv == 0
    need(
        fits and math.gcd(8, *ranks) == 8,
        f"ranks must be d_qk and d_v of every head, in 8s, not {ranks}",
    )
    G = Hq // Hkv
    DV = max(ranks[Hkv:])
    S = packed.numel() // (B * sum(ranks))
    check(
        q=(q, packed.dtype, B, Hq, max(ranks[:Hkv])),
        packed=(packed, packed.dtype, B * S * sum(ranks)),
        table=(table, torch.int32, Hkv, 8),
        pos=(pos, torch.int32, B),
    )
    check_positions(pos, S)
    heads = ragged_heads(ranks, balanced)
    if table.device.type == "cpu":  # else the launch would have to wait for the GPU
        need(
            table.tolist() == [list(head) for head in heads],
            f"the table is not that of ranks {ranks} with balanced={balanced}",
        )
    work_a_block = sum(head.work for head in heads)
    most_work = max(head.work for head in heads)
    blocks = B * cdiv(S, RAGGED_BLOCK)
    config = ragged_config(q.dtype)
    programs = min(config.programs_a_sm * SMS, blocks * Hkv)
    # The line is counted in int32, up to the end of the last program's stretch; and so are the
    # numbers of a row of one head.
    need(
        (blocks + programs) * work_a_block < 2**31 and S * max(ranks) < 2**31,
        f"{B} rows of {S} tokens are too many for one launch",
    )
    parts = programs + B * Hkv
    out_of_part = torch.empty(parts, G, DV, dtype=torch.float32, device=q.device)
    lse_of_part = torch.empty(parts, G, dtype=torch.float32, device=q.device)
    out = torch.empty(B, G * sum(ranks[Hkv:]), dtype=q.dtype, device=q.device)
    _attend_ragged_kernel[programs,](
        q_ptr=q,
        packed_ptr=packed,
        table_ptr=table,
        pos_ptr=pos,
        out_ptr=out_of_part,
        lse_ptr=lse_of_part,
        B=B,
        S=S,
        Hkv=Hkv,
        DQ=DQ,
        work_a_block=work_a_block,
        most_work=most_work,
        scale=scale * LOG2E,
        G=G,
        GP=power2(G, 16),  # tensor cores take 16 rows at least
        DV=DV,
        BP=power2(B, 2),
        HP=power2(Hkv, 2),
        WIDTHS=ragged_widths(ranks),
        NUMBERS=config.numbers,
        STAGES=config.stages,
        num_warps=1,
        **overlapped(q.device),
    )
    channels = 32  # of a program: enough programs where few heads have many parts
    _merge_ragged_kernel[B * Hkv, G, cdiv(DV, channels)](
        part_ptr=out_of_part,
        lse_ptr=lse_of_part,
        table_ptr=table,
        pos_ptr=pos,
        out_ptr=out,
        B=B,
        programs=programs,
        work_a_block=work_a_block,
        most_work=most_work,
        k_numbers=sum(ranks[:Hkv]),
        out_width=out.shape[1],
        G=G,
        DV=DV,
        BP=power2(B, 2),
        N=64,  # of 32 numbers: 16 a thread of 4 warps
        C=channels,
        num_warps=4,
        **overlapped(q.device),
    )
    return out


def attend_ragged(
    q: Tensor,
    packed: Tensor,
    ranks: list[int],
    table: Tensor | None,
    pos: Tensor,
    *,
    scale: float,
    balanced: bool = True,
) -> Tensor:
    """Attention of one new token of each row over the tokens 0..pos of heads of unequal rank.

    q [B, Hq, max d_qk], read up to a head's d_qk; packed: K' [B, S, d_qk] of each head, then V'
    [B, S, d_v] of each, in one line; ranks: d_qk of each head, then d_v; scale: that of the full
    head dim -> [B, sum of G d_v]. table: ragged_table for the kernel, or None for PyTorch.
    balanced: programs take equal numbers of bytes; else equal numbers of tokens of each head."""
    if table is not None:
        return launch_attend_ragged(
            q.contiguous(), packed, table, ranks, pos.int(), scale, balanced
        )
    B = len(q)
    S = packed.numel() // (B * sum(ranks))
    views = []
    for part, rank in zip(packed.split([B * S * rank for rank in ranks]), ranks, strict=True):
        views.append(part.view(B, S, rank))
    Hkv = len(ranks) // 2
    return attend_ragged_reference(q, views[:Hkv], views[Hkv:], pos, scale)


# -------------------------------------------------------------------------- rows out of host memory
# `fetch_rows` copies selected tokens that have no slot on the GPU yet out of host memory, which the
# GPU reads itself. It needs nothing but the header.


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, Hkv, S, ...] at index [B, Hkv, n] -> [B, Hkv, n, ...], whether x lies by head or by
    token."""
    B, Hkv, S = x.shape[:3]
    b = torch.arange(B, device=x.device)[:, None, None]
    h = torch.arange(Hkv, device=x.device)[:, None]
    if x.is_contiguous():  # by head: [B, Hkv, S, ...] in memory
        rows = x
        number = (b * Hkv + h) * S + index.long()
    else:  # by token: [B, S, Hkv, ...] in memory
        rows = x.transpose(1, 2).contiguous()
        number = (b * S + index.long()) * Hkv + h
    gathered = rows.flatten(0, 2).index_select(0, number.flatten())
    return gathered.view(*index.shape, *x.shape[3:])


def fetch_rows_reference(
    rows: Tensor, index: Tensor, place: Tensor, miss: Tensor, hot: Tensor
) -> None:
    """What fetch_rows says, in PyTorch."""
    new = torch.where(miss[..., None], gather_rows(rows, index), gather_rows(hot, place))
    hot.scatter_(2, place[..., None].expand_as(new), new)


@jit
def _fetch_kernel(
    rows_ptr,  # [B, Hkv, S, W] of any dtype, perhaps in host memory
    index_ptr,  # [B, Hkv, n] int64
    place_ptr,  # [B, Hkv, n] int64
    miss_ptr,  # [B, Hkv, n] bool
    hot_ptr,  # [B, Hkv, slots, W] of rows' dtype
    S,
    n,  # entries of index, place and miss
    slots,
    W: tl.constexpr,  # numbers of a row
    ROWS: tl.constexpr,  # entries of a program
):
    """hot[place] = rows[index] where miss. Overlaps with no other kernel."""
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    miss = tl.load(miss_ptr + head * n + entry, mask=entry < n, other=0)
    index = tl.load(index_ptr + head * n + entry, mask=miss, other=0)
    place = tl.load(place_ptr + head * n + entry, mask=miss, other=0)
    d = tl.arange(0, _padded(W))[None, :]
    mask = miss[:, None] & (d < W)  # masked lanes read nothing over the bus
    row = tl.load(rows_ptr + (head * S + index)[:, None] * W + d, mask=mask, other=0.0)
    tl.store(hot_ptr + (head * slots + place)[:, None] * W + d, row, mask=mask)


@operator(_no_result, mutates=("hot",))
def launch_fetch_rows(
    rows: Tensor, index: Tensor, place: Tensor, miss: Tensor, hot: Tensor
) -> None:
    """fetch_rows by its kernel: rows [B, Hkv, S, W], perhaps mapped host memory; index and place
    int64, miss bool [B, Hkv, n]; hot [B, Hkv, slots, W] of rows' dtype, which it changes."""
    B, Hkv, S, W = rows.shape
    n = index.shape[2]
    slots = hot.shape[2]
    check(
        index=(index, torch.int64, B, Hkv, n),
        place=(place, torch.int64, B, Hkv, n),
        miss=(miss, torch.bool, B, Hkv, n),
        rows=(rows, rows.dtype, B, Hkv, S, W),
        hot=(hot, rows.dtype, B, Hkv, slots, W),
    )
    if n == 0:
        return
    rows_of_program = 16  # enough that a program has many loads from the bus in flight
    _fetch_kernel[B * Hkv, cdiv(n, rows_of_program)](
        rows_ptr=rows,
        index_ptr=index,
        place_ptr=place,
        miss_ptr=miss,
        hot_ptr=hot,
        S=S,
        n=n,
        slots=slots,
        W=W,
        ROWS=rows_of_program,
        num_warps=4,
    )


def fetch_rows(
    rows: Tensor, index: Tensor, place: Tensor, miss: Tensor, hot: Tensor, *, kernel: bool
) -> None:
    """hot[place] = rows[index] where miss. The kernel reads only missing rows.

    rows [B, Hkv, S, W] lie on the GPU, or in host memory that is mapped into it; index, place int64
    [B, Hkv, n]; miss bool [B, Hkv, n]; hot [B, Hkv, slots, W]. All places of a head are distinct,
    and every index is a token, where nothing is missing, too: PyTorch reads and writes these as
    well."""
    if kernel:
        launch_fetch_rows(rows, index, place, miss, hot)
    else:
        fetch_rows_reference(rows, index, place, miss, hot)
