"""The operations of a decode step, a block each: a reference in PyTorch, its Triton kernel, and a
wrapper.

    block              wrapper        what it does
    codes of a token   append         stores a new latent and value in codes (SALS)
    queries of blocks  block_queries  turns a query back by each block's rotation (SALS)
    scores             scores         scores tokens by the leading dims of vectors
    selection          select         the sinks and the best-scored tokens
    attention          attend         attends plain keys, latents, codes of channels
                       attend_rows    attends plain K and V, of which some are live (LRQK)
                       attend_logits  attends where the logits are there (H2O)
                       attend_latent  attends latents that all heads share (EliteKV)
                       attend_ragged  attends heads of unequal rank (FDC)
    fetching           fetch_rows     copies rows out of host memory to slots on the GPU (LRQK)

A wrapper NAME takes `kernel`: True for the Triton kernel where it takes the shapes, False for
PyTorch, the truth that tests hold it to: NAME_reference, for append the stores, for other ways to
attend a few lines. attend_ragged takes the kernel where its store has a table for it. launch_NAME
checks and launches.

To copy an operation, copy the header, which ends at the first block, and the operation's block
(with attend_latent the block of scores, too). On a GPU, `pytest test_all.py -k kernel` holds all of
them to their references, and `-k compile` compiles them for GPUs that are not there.

B rows of a batch, S cached tokens (the capacity), Hq query heads, Hkv key/value heads, G = Hq /
Hkv, D head dim, r rank. `pos` [B] int32 holds the position of each row's newest token. Kernels read
it on the device, so that one CUDA graph serves every length.
"""

import functools
import itertools
import math
from collections.abc import Sequence
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
    triton, tl = None, SimpleNamespace(constexpr=None)  # for the kernels' annotations
    jit = constexpr_function = lambda function: function

SMS = 132  # multiprocessors of an H100/H200: how many programs it takes to fill the chip
LOG2E = math.log2(math.e)


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


def tile_itemsize(dtype: torch.dtype, latent: Tensor) -> int:
    """Bytes of a number, by which tiles are chosen. fp32 models multiply codes as fp32, too."""
    if dtype == torch.float32:
        return 4
    return latent.element_size()


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
# Two formats of codes (ours), each with one scale a vector.
#
# Spread codes are for a vector whose numbers spread like normal ones, such as a rotated value. A
# code of
# `bits` bits stands for (2 code - top) scale, with top = 2**bits - 1.
#
# Mixed codes are for a latent, whose leading numbers matter most: int8 codes for these, and 4-bit
# codes for
# the trailing ones. The sixteen 4-bit levels are -60, -52, .., 60, so they lie in the range of the
# int8
# codes, and one scale serves both.

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


def quantize_mixed(x: Tensor, lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed codes of vectors x [..., D] (ours), of which the first `lead` numbers lead: int8
    [..., lead]; scales [...] fp32; and 4-bit codes of the others, [..., (D - lead) / 2] uint8
    (`pack`).

    The leading numbers need the scale largest / 127, the trailing ones the scale at which
    neighbouring 4-bit levels, 8 int8 steps apart, are LEVELS_APART deviations apart. The larger of
    the two serves both."""
    leading, trailing = x.float().split((lead, x.shape[-1] - lead), -1)
    scale_for_leading = leading.abs().amax(-1) / 127
    scale_for_trailing = trailing.square().mean(-1).sqrt() * (LEVELS_APART[4] / 8)
    scale = torch.maximum(scale_for_leading, scale_for_trailing)
    step = torch.where(scale == 0, 1, scale)[..., None]
    leading_codes = (leading / step).round().to(torch.int8)
    trailing_codes = four_bit_code(trailing / step).round().clamp(0, 15)
    return leading_codes, scale, pack(trailing_codes, 4)


def dequantize_mixed(leading: Tensor, scale: Tensor, trailing: Tensor) -> Tensor:
    """The inverse of `quantize_mixed`: vectors [..., D] fp32."""
    levels = four_bit_level(unpack(trailing, 4).to(torch.int8) * 8)
    return torch.cat((leading, levels), -1) * scale[..., None]


@jit
def _append_kernel(
    # [B, LEAD + 2 REST], each row of the batch `latent_stride` numbers after the one before
    latent_p,
    v_p,  # [B, Hkv, D], each row `v_stride` numbers after the one before
    latent_stride,
    v_stride,
    pos_p,  # [B] int32
    lead_p,  # [B, S, LEAD] int8
    rest_p,  # [B, S, REST] uint8
    latent_scale_p,  # [B, S] fp32
    code_p,  # [B, S, Hkv, D * BITS / 8] uint8
    scale_p,  # [B, S, Hkv] fp16
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
    token = b * S + tl.load(pos_p + b)
    if h == Hkv:
        # The latent: read its leading dims, and its trailing ones as two halves of REST
        latent_p += b * latent_stride
        i = tl.arange(0, _padded(LEAD))
        half = tl.arange(0, 2)[:, None]
        pair = tl.arange(0, _padded(REST))
        lead = tl.load(latent_p + i, mask=i < LEAD, other=0.0).to(tl.float32)
        rest_at = latent_p + LEAD + half * REST + pair[None, :]
        rest = tl.load(rest_at, mask=(pair < REST)[None, :], other=0.0).to(tl.float32)

        # The scale that the parts need
        rest_scale = tl.sqrt(tl.sum(rest * rest) / (2 * REST)) * (rest_apart / 8)
        scale = tl.maximum(tl.max(tl.abs(lead)) / 127, rest_scale)
        step = tl.where(scale == 0, 1.0, scale)

        # Codes; the first half of the trailing ones goes to the lower four bits
        lead_code = _nearest(lead / step).to(tl.int8)
        rest_code = _nearest(tl.clamp(_four_bit_code(rest / step), 0.0, 15.0))
        rest_byte = tl.sum(rest_code << (half * 4), 0)
        tl.store(lead_p + token * LEAD + i, lead_code, mask=i < LEAD)
        tl.store(rest_p + token * REST + pair, rest_byte.to(tl.uint8), mask=pair < REST)
        tl.store(latent_scale_p + token, scale)
    else:
        # The value of head h, as planes [8 / BITS, BYTES] of its channels: a plane a code of each
        # byte
        TOP: tl.constexpr = 2.0**BITS - 1
        BYTES: tl.constexpr = D * BITS // 8
        plane = tl.arange(0, 8 // BITS)[:, None]
        byte = tl.arange(0, _padded(BYTES))
        v_at = v_p + b * v_stride + h * D + plane * BYTES + byte[None, :]
        v = tl.load(v_at, mask=(byte < BYTES)[None, :], other=0.0).to(tl.float32)

        energy = tl.sum(v * v)
        half_step = tl.maximum(tl.sqrt(energy / D) * (apart / 2), 1e-8)
        code = _nearest(tl.clamp((v / half_step + TOP) / 2, 0.0, TOP))
        level = 2 * code.to(tl.float32) - TOP
        scale = energy / tl.maximum(tl.sum(v * level), 1e-8)
        packed = tl.sum(code << (plane * BITS), 0)
        head = token * Hkv + h
        tl.store(code_p + head * BYTES + byte, packed.to(tl.uint8), mask=byte < BYTES)
        tl.store(scale_p + head, scale.to(tl.float16))


def _no_result(*_) -> None:
    """The fake of an operator that only writes to its arguments."""


@operator(_no_result, mutates=("lead", "rest", "latent_scale", "codes", "scale"))
def launch_append(
    latent: Tensor,
    v: Tensor,
    pos: Tensor,
    lead: Tensor,
    latent_scale: Tensor,
    rest: Tensor,
    codes: Tensor,
    scale: Tensor,
) -> None:
    """Writes the codes of latent [B, r] and v [B, Hkv, D], whose rows of the batch may lie any
    stride apart, at positions pos [B] int32.

    The latent goes to lead [B, 1, S, r*] int8, latent_scale [B, 1, S] fp32 and rest
    [B, 1, S, (r - r*) / 2] uint8; v goes to codes [B, S, Hkv, D * bits / 8] uint8 and scale
    [B, S, Hkv] fp16."""
    B, Hkv, D = v.shape
    S, LEAD = lead.shape[2:]
    REST = rest.shape[3]
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
        lead=(lead, torch.int8, B, 1, S, LEAD),
        rest=(rest, torch.uint8, B, 1, S, REST),
        latent_scale=(latent_scale, torch.float32, B, 1, S),
        codes=(codes, torch.uint8, B, S, Hkv, BYTES),
        scale=(scale, torch.float16, B, S, Hkv),
    )
    _append_kernel[Hkv + 1, B](
        latent_p=latent,
        v_p=v,
        latent_stride=latent.stride(0),
        v_stride=v.stride(0),
        pos_p=pos,
        lead_p=lead,
        rest_p=rest,
        latent_scale_p=latent_scale,
        code_p=codes,
        scale_p=scale,
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
    lead, latent_scale, rest = latents.parts()
    codes, scale = values.parts()
    launch_append(
        latent,
        v,
        pos.int(),
        lead,
        latent_scale,
        rest,
        codes.transpose(1, 2),  # as it lies in memory: a token's heads side by side
        scale.transpose(1, 2),
    )


# -------------------------------------------------------------------------------- queries of blocks


# Scores of keys after RoPE would need each key rotated. Instead a query is rotated back by a
# token's position, since q . RoPE_j(k) = RoPE_-j(q) . k. Neighbouring tokens share one such query:
# that of their block, turned back by the block's mean rotation, and projected to the latent space.


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
    D = q.shape[-1]
    mean_first, mean_second = mean.view(-1, 1, D).chunk(2, -1)  # [Hkv, 1, D/2] each
    Hkv = len(mean_first)
    first, second = q.float().unflatten(1, (Hkv, -1)).chunk(2, -1)  # [B, Hkv, G, D/2] each
    times_cos = (first * mean_first + second * mean_second).flatten(1, 2)  # [B, Hq, D/2]
    times_sin = (second * mean_first - first * mean_second).flatten(1, 2)
    return cos @ times_cos.mT + sin @ times_sin.mT


@jit
def _block_queries_kernel(
    q_p,  # [B, Hkv, G, D]
    cos_p,  # [n, D / 2] fp32
    sin_p,  # [n, D / 2] fp32
    basis_p,  # [Hkv, D, r*]
    mean_p,  # [Hkv, D] fp32
    # [B, n, Hkv, G, r*] of q's dtype; with scales int8 [2, B, n, Hkv, G, r*], high and low
    query_p,
    query_scale_p,  # [B, n, Hkv, G] fp32, or None
    offset_p,  # [B, n, Hkv, G] fp32
    B,
    n,
    r_score,
    G: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,  # rows (of B * n * G) of a program
    RB: tl.constexpr,  # ranks of a program
):
    """query = q U_h and offset = q . mean, of each query head turned back by the rotation of each
    block.

    A program has T of the B * n * G queries of a KV head, and RB of the r* ranks."""
    h = tl.program_id(1).to(tl.int64)
    Hkv = tl.num_programs(1)

    # This KV head's part of the basis: weights, so they are read before the wait
    pair = tl.arange(0, _padded(D // 2, 16))
    inside = pair < D // 2
    rank = tl.program_id(2) * RB + tl.arange(0, RB)
    basis_at = basis_p + (h * D + pair[:, None]) * r_score + rank[None, :]
    basis_mask = inside[:, None] & (rank < r_score)[None, :]
    basis_first = tl.load(basis_at, mask=basis_mask, other=0.0)
    basis_second = tl.load(basis_at + D // 2 * r_score, mask=basis_mask, other=0.0)

    # The rotations of this program's blocks
    row = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    g = row % G
    block = row // G % n
    b = row // G // n
    live = b < B
    mask = live[:, None] & inside[None, :]
    cos = tl.load(cos_p + block[:, None] * (D // 2) + pair[None, :], mask=mask, other=0.0)
    sin = tl.load(sin_p + block[:, None] * (D // 2) + pair[None, :], mask=mask, other=0.0)

    # The queries, turned back
    _wait_for_previous()
    q_at = q_p + ((b * Hkv + h) * G + g)[:, None] * D + pair[None, :]
    first = tl.load(q_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(q_at + D // 2, mask=mask, other=0.0).to(tl.float32)
    _let_next_begin()
    turned_first = first * cos + second * sin
    turned_second = second * cos - first * sin

    # What the mean key adds, once for all ranks
    out_row = ((b * n + block) * Hkv + h) * G + g
    if tl.program_id(2) == 0:
        mean_first = tl.load(mean_p + h * D + pair, mask=inside, other=0.0)[None, :]
        mean_second = tl.load(mean_p + h * D + D // 2 + pair, mask=inside, other=0.0)[None, :]
        offset = tl.sum(turned_first * mean_first + turned_second * mean_second, 1)
        tl.store(offset_p + out_row, offset, mask=live)

    query = tl.dot(turned_first.to(basis_first.dtype), basis_first, input_precision="ieee")
    query = tl.dot(turned_second.to(basis_first.dtype), basis_second, query, input_precision="ieee")
    out_mask = live[:, None] & (rank < r_score)[None, :]
    out_at = query_p + out_row[:, None] * r_score + rank[None, :]
    if query_scale_p is not None:  # in codes: this program has all ranks
        query, low, scale = _split_queries(query)
        tl.store(query_scale_p + out_row, scale, mask=live)
        tl.store(out_at + tl.cast(B, tl.int64) * n * Hkv * G * r_score, low, mask=out_mask)
    tl.store(out_at, query.to(query_p.dtype.element_ty), mask=out_mask)


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
    """block_queries by its kernel; `coded` gives int8 codes of the queries."""
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

    # Codes need all ranks in a program, for their largest number. Else a part of the basis has 16
    # KB at most.
    RB = power2(r_score, 16)
    if not coded:
        RB = min(RB, 64 if q.element_size() == 4 else 128)
    # As many rows as a tensor core's tile takes well, but at least a program for each
    # multiprocessor
    T = min(64, power2(rows, 16))
    if cdiv(rows, T) * Hkv * cdiv(r_score, RB) < SMS:
        T = max(16, T // 2)
    _block_queries_kernel[cdiv(rows, T), Hkv, cdiv(r_score, RB)](
        q_p=q,
        cos_p=cos,
        sin_p=sin,
        basis_p=basis,
        mean_p=mean,
        query_p=queries,
        query_scale_p=query_scale if coded else None,
        offset_p=offset,
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
    """Whether queries q [.., N, *] may be int8 codes of r* numbers: programs must have all
    ranks."""
    _, RB, *_ = scores_config(power2(q.shape[-2], 8), r_score, 1)
    return q.element_size() == 2 and r_score <= min(RB, 256)


def block_queries(
    q: Tensor, cos: Tensor, sin: Tensor, basis: Tensor, mean: Tensor, coded: bool, kernel: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Queries in the latent space, one for each of n blocks of tokens, and what the mean key adds
    to logits.

    q [B, Hq, D] after RoPE is turned back by each block's rotation, cos and sin [n, D/2] fp32
    (ours: the paper scores without RoPE). Gives three tensors:
        queries      q times its KV head's rows of the basis U_r* [Hkv * D, r*], of q's dtype, [B,
                     n, Hq, r*]
        query_scale  None
        offset       q times its KV head's part of the mean [Hkv * D] fp32, [B, n, Hq] fp32
    Where `coded` (the vectors to be scored are int8 codes) the kernel may give int8 codes of the
    queries, [2, B, n, Hq, r*], with their scales [B, n, Hq] fp32 (_split_queries)."""
    if not kernel:
        return block_queries_reference(q, cos, sin, basis, mean)
    coded = coded and takes_codes(q, basis.shape[1])
    queries, query_scale, offset = launch_block_queries(
        q.contiguous(), cos, sin, basis, mean, coded
    )
    return queries, query_scale if coded else None, offset


# ------------------------------------------------------------------------------------------- scores


def token_logits(
    q: Tensor, vectors: Tensor, vector_scale: Tensor | None = None, block: int = 0
) -> Tensor:
    """q . vector of every token: q [B, H, N, d], with `block` [B, n, H, N, d], one for so many;
    vectors [B, H, S, >= d]; vector_scale [B, H, S]: of vectors that are codes -> [B, H, N, S]
    fp32."""
    vectors = vectors[..., : q.shape[-1]]
    if vector_scale is not None:  # sums of products with codes can exceed fp16's range
        q, vector_scale, vectors = q * 2**-7, vector_scale * 128, vectors.to(q.dtype)
    if block:
        n = q.shape[1] - 1  # whole blocks, and the last one
        # [B, n, H, block, d]
        whole = vectors[:, :, : n * block].unflatten(2, (n, block)).transpose(1, 2)
        # [B, H, N, n * block]
        whole = matmul_codes(q[:, :n], whole.mT).permute(0, 2, 3, 1, 4).flatten(3)
        logits = torch.cat(
            (whole, matmul_codes(q[:, n], vectors[:, :, n * block :].mT)), -1
        ).float()
    else:
        logits = matmul_codes(q, vectors.mT).float()
    return logits if vector_scale is None else logits * vector_scale[:, :, None]


def group_scores(logits: Tensor, live: Tensor) -> Tensor:
    """The logarithm of the largest attention weight that any of a KV head's G queries gives, which
    ranks small weights, too: logits [B, Hkv, G, N], live [B, N] bool -> [B, Hkv, N] fp32, -inf if
    not live."""
    dead = ~live[:, None, None]
    logits = logits.float().masked_fill(dead, -torch.inf)
    return logits.log_softmax(-1).masked_fill(dead, -torch.inf).amax(2)


def scores_reference(
    q: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    rule: str,
    block: int = 0,
    offset: Tensor | None = None,
    run: int = 1,
) -> Tensor:
    """What scores says, in PyTorch, of queries [B, H, N, d] or [B, n, H, N, d]."""
    tokens = torch.arange(vectors.shape[2], device=pos.device)
    live = tokens <= pos[:, None]  # [B, S]
    logits = token_logits(q, vectors, vector_scale, block)  # [B, H, N, S]
    if offset is not None:
        logits = logits + offset.mT[..., tokens // run].unflatten(1, logits.shape[1:3])
    logits = (logits * scale).masked_fill(~live[:, None, None], -torch.inf)
    if rule == "softmax":
        return logits.softmax(-1).sum(2).masked_fill(~live[:, None], -torch.inf)
    return logits if rule == "each" else group_scores(logits, live)


@jit
def _split_queries(x):
    """x [N, R] -> high, low, scale [N], with x = (high * 254 + low) * scale to 15 bits of a query's
    largest number. high and low are int8."""
    largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    x = x.to(tl.float32) * (127 / tl.maximum(largest, 1e-30))[:, None]
    rest = x - ((x + 12582912.0) - 12582912.0)  # x - _nearest(x), without a conversion back to fp32
    return _nearest(x).to(tl.int8), _nearest(rest * 254).to(tl.int8), largest / (127 * 254)


@jit
def _tile_queries(query_at, mask, SPLIT: tl.constexpr):
    """The queries of a tile, split for vectors in int8."""
    query = tl.load(query_at, mask=mask, other=0.0)
    return _split_queries(query) if SPLIT else (query, query, query)


def scores_config(HP: int, r_score: int, itemsize: int) -> tuple:
    """(tokens a tile, ranks a block, warps, stages, programs). HP: queries of a head, padded."""
    if itemsize == 1 and r_score <= 512 and HP * r_score <= 32768:
        RB = power2(r_score, 32)  # all ranks at once: then queries are split into int8 codes
        return 128 if RB <= 256 else 64, RB, 4, 3 if RB < 256 else 2, 2 * SMS
    RB = min(power2(r_score, 16), 64)
    # if possible, at most 16 KB of vectors and of logits
    T = max(16, min(256, 8192 // RB, 4096 // HP))
    return (16, RB, 4, 3, 2 * SMS) if itemsize == 4 else (T, RB, 4, 3, 4 * SMS)


@jit
def _scores_kernel(
    # [B, H, N, r*], or of blocks [B, blocks, H, N, r*]; with scales int8 [2, ...], high and low
    query_p,
    query_scale_p,  # [B, blocks, H, N] fp32, or None
    vectors_p,  # [B, H, S, r] of the queries' dtype, or int8
    vector_scale_p,  # [B, H, S] fp32; None: vectors are not int8
    offset_p,  # [B, runs, H, N] fp32; None: nothing is added to q . vector
    pos_p,  # [B] int32
    # softmax: exp2(logit - top) [B, H, S, NP] fp8 (e5m2) or fp32; else logits [B, H, N, S] fp32
    kept_p,
    tile_max_p,  # softmax: tops [B, H, tiles, NP] fp32
    max_p,  # tops of splits [B, H, splits, NP] fp32
    sum_p,  # sums of splits [B, H, splits, NP] fp32
    # numbers between queries of two rows of the batch, blocks and heads, and from high to low
    query_steps,
    steps,  # vectors between two rows of the batch, two heads and two tokens
    S,
    tiles,
    r_score: tl.constexpr,  # leading numbers of a vector that count
    r: tl.constexpr,  # numbers of a vector
    scale,
    run,  # tokens of a run
    per_block,  # tiles of a block of queries; None: one block
    N: tl.constexpr,  # queries of a head
    NR: tl.constexpr,  # blocks of ranks
    T: tl.constexpr,  # tokens of a tile
    RB: tl.constexpr,  # ranks of a block
    RULE: tl.constexpr,
    STAGES: tl.constexpr,  # tiles in flight
    ONE_RUN: tl.constexpr,  # does a tile lie in one run?
):
    """Stores logits scale q . vector of a head's N queries. They are in log2 units, except under
    rule each.

    Rules softmax and largest also store, for each split of the tokens, its maximum (softmax: a
    reference not far from it) and the sum of exp2(logit - maximum). Rule softmax stores exp2(logit
    - reference) in the logits' place, and for each tile the reference, which rises where a weight
    would leave e5m2's range."""
    _wait_for_previous()
    split, splits, h, H = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(pos_p + b) + 1
    NP: tl.constexpr = _padded(N, 8)
    n, dims = tl.arange(0, NP), tl.arange(0, RB)[None, :]
    # The tiles of this program. Dead tiles are left out where a second kernel writes the scores.
    count = tiles if RULE == "each" else tl.cdiv(length, T)
    share = tl.cdiv(count, splits)
    first, stop = split * share, tl.minimum((split + 1) * share, count)
    query_row = b * query_steps[0] + h * query_steps[2]
    query_mask = (n < N)[:, None] & (dims < r_score)
    # Int8 vectors are multiplied as they are, by queries that are split, too.
    SPLIT: tl.constexpr = (
        vector_scale_p is not None and NR == 1 and query_p.dtype.element_ty != tl.float32
    )
    if NR == 1 and per_block is None:
        query_at = query_p + query_row + n[:, None] * r_score + dims
        query, low, query_scale = _tile_queries(query_at, query_mask, SPLIT)
    # A maximum of every T-th token, joined at the end. Softmax stores weights, and so needs one
    # reference.
    top = tl.full([1 if RULE == "softmax" else T, NP], -1e30, tl.float32)
    total = tl.zeros([T, NP], tl.float32)
    # Because the loop names its stages, loads of scales, which no product takes, are in flight,
    # too.
    for tile in tl.range(first, stop, num_stages=STAGES):
        tile_row = query_row
        if per_block is not None:
            tile_row += tl.cast(tile // per_block, tl.int64) * query_steps[1]
        query_at = query_p + tile_row + n[:, None] * r_score + dims
        tokens = (tile * T + tl.arange(0, T)).to(tl.int64)
        live = tokens < length
        vector = b * steps[0] + h * steps[1] + tokens * steps[2]
        vector_scale = scale
        if vector_scale_p is not None:
            vector_scale = tl.load(vector_scale_p + vector, mask=live, other=0.0)[:, None] * scale
        logits = tl.zeros([T, NP], tl.float32)
        vector_at = vectors_p + vector[:, None] * r + dims
        if NR == 1:
            vector_tile = tl.load(vector_at, mask=live[:, None] & (dims < r_score), other=0.0)
            if query_scale_p is not None:
                query = tl.load(query_at, mask=query_mask, other=0)
                low = tl.load(query_at + query_steps[3], mask=query_mask, other=0)
                query_scale = tl.load(
                    query_scale_p + tile_row // r_score + n, mask=n < N, other=0.0
                )
            elif per_block is not None:
                query, low, query_scale = _tile_queries(query_at, query_mask, SPLIT)
            if SPLIT:
                coarse = tl.dot(vector_tile, tl.trans(query), out_dtype=tl.int32)
                fine = tl.dot(vector_tile, tl.trans(low), out_dtype=tl.int32)
                logits = (coarse * 254 + fine).to(tl.float32) * query_scale[None, :]  # < 2**31
            else:
                vector_tile = vector_tile.to(query.dtype)
                logits = tl.dot(vector_tile, tl.trans(query), logits, input_precision="ieee")
        else:
            for i in range(0, NR * RB, RB):
                inside = dims + i < r_score
                vector_tile = tl.load(vector_at + i, mask=live[:, None] & inside, other=0.0)
                part = tl.load(query_at + i, mask=(n < N)[:, None] & inside, other=0.0)
                logits = tl.dot(
                    vector_tile.to(part.dtype), tl.trans(part), logits, input_precision="ieee"
                )
        # Always true: a branch does not delay the next tile's loads. Those of a tile's queries it
        # does.
        if (per_block is not None and ONE_RUN) or tile < stop:
            logits *= vector_scale
            if offset_p is not None:
                if ONE_RUN:
                    offset_at = ((b * tl.cdiv(S, run) + tile * T // run) * H + h) * N + n
                    offset = tl.load(offset_p + offset_at, mask=n < N, other=0.0)[None, :]
                else:
                    offset_at = ((b * tl.cdiv(S, run) + tokens // run)[:, None] * H + h) * N + n[
                        None, :
                    ]
                    some = live[:, None] & (n < N)[None, :]
                    offset = tl.load(offset_p + offset_at, mask=some, other=0.0)
                logits += offset * scale
            if RULE == "each" or tile * T + T > length:  # else all are live
                logits = tl.where(live[:, None], logits, float("-inf"))
            if RULE != "softmax":
                at = kept_p + ((b * H + h) * N + n[None, :]) * S + tokens[:, None]
                tl.store(at, logits, mask=(tokens < S)[:, None] & (n < N)[None, :])
            if RULE == "largest":
                new_top = tl.maximum(top, logits)
                total = total * tl.exp2(top - new_top) + tl.exp2(logits - new_top)
                top = new_top
            if RULE == "softmax":
                weight = tl.exp2(logits - top)
                if tl.max(weight) > 32768:  # rarely: e5m2 has a range of 2**28 below 2**12
                    new_top = tl.maximum(top, tl.max(logits, 0)[None, :] - 12)
                    total *= tl.exp2(top - new_top)
                    weight = tl.exp2(logits - new_top)
                    top = new_top
                total += weight
                at = kept_p + ((b * H + h) * S + tokens[:, None]) * NP + n[None, :]
                tl.store(at, weight.to(kept_p.dtype.element_ty), mask=live[:, None])
                tl.store(tile_max_p + ((b * H + h) * tiles + tile) * NP + n[None, :], top)
    if RULE != "each":
        at = ((b * H + h) * splits + split) * NP + n
        largest = tl.max(top, 0)
        tl.store(max_p + at, largest)
        tl.store(sum_p + at, tl.sum(total * tl.exp2(top - largest[None, :]), 0))


@jit
def _reduce_scores_kernel(
    kept_p,  # of _scores_kernel: softmax [B, H, S, NP], largest [B, H, N, S]
    tile_max_p,  # [B, H, tiles, NP]
    max_p,  # [B, H, splits, NP]
    sum_p,  # [B, H, splits, NP]
    pos_p,  # [B] int32
    out_p,  # [B, H, S] fp32
    S,
    splits,
    N: tl.constexpr,  # queries of a head
    T: tl.constexpr,  # tokens of a tile
    SP: tl.constexpr,  # splits, padded
    RULE: tl.constexpr,
):
    """Stores scores from the softmax of each query's logits over the tokens. Rule softmax sums it
    over the queries, rule largest takes the largest of its logarithms. Beyond pos scores are
    -inf."""
    _wait_for_previous()
    _let_next_begin()
    h, H, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    length, tiles = tl.load(pos_p + b) + 1, tl.cdiv(S, T)
    NP: tl.constexpr = _padded(N, 8)
    n, split = tl.arange(0, NP if RULE == "softmax" else _padded(N)), tl.arange(0, SP)
    at = ((b * H + h) * splits + split[:, None]) * NP + n[None, :]
    tops = tl.load(max_p + at, mask=(split < splits)[:, None], other=float("-inf"))
    totals = tl.load(sum_p + at, mask=(split < splits)[:, None], other=0.0)
    top = tl.maximum(tl.max(tops, 0), -1e30)
    total = tl.sum(totals * tl.exp2(tops - top[None, :]), 0)
    # Softmax's weights are not loaded ahead: from shared memory a thread would get only a few bytes
    # at once.
    STAGES: tl.constexpr = 1 if RULE == "softmax" else 3
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tokens = (tile * T + tl.arange(0, T)).to(tl.int64)
        live, some = tokens < length, (n < N) & (n * 0 + tile * T < length)
        if RULE == "softmax":
            tile_max_at = tile_max_p + ((b * H + h) * tiles + tile) * NP + n
            tile_top = tl.load(tile_max_at, mask=some, other=float("-inf"))
            factor = tl.exp2(tile_top - top) / total
            kept_at = kept_p + ((b * H + h) * S + tokens[:, None]) * NP + n[None, :]
            kept = tl.load(kept_at, mask=live[:, None], other=0.0)
            score = tl.sum(kept.to(tl.float32) * tl.where(some, factor, 0.0)[None, :], 1)
        else:
            kept_at = kept_p + ((b * H + h) * N + n[:, None]) * S + tokens[None, :]
            # Wide loads need a mask that is known to be equal for many tokens. `live` is not.
            kept = tl.load(kept_at, mask=some[:, None] & (tokens < S)[None, :], other=float("-inf"))
            score = tl.max(kept - (top + tl.log2(tl.maximum(total, 1e-37)))[:, None], 0)
            score *= 0.6931471805599453  # ln 2
        tl.store(
            out_p + (b * H + h) * S + tokens, tl.where(live, score, float("-inf")), mask=tokens < S
        )


@functools.lru_cache
def tiles_a_program(tiles: int, rows: int, programs: int) -> int:
    """How many of a row's tiles a program takes, if so many programs run at a time: each wave of
    them lasts as long as its tiles, and one more to begin."""
    return min(range(1, tiles + 1), key=lambda n: cdiv(cdiv(tiles, n) * rows, programs) * (n + 1))


@operator(
    lambda queries, vectors, vector_scale, pos, scale, rule, *_, **more: vectors.new_empty(
        (
            len(vectors),
            vectors.shape[1] * (queries.shape[-2] if rule == "each" else 1),
            vectors.shape[2],
        ),
        dtype=torch.float32,
    )
)
def launch_scores(
    queries: Tensor,
    vectors: Tensor,
    vector_scale: Tensor | None,
    pos: Tensor,
    scale: float,
    rule: str,
    block: int = 0,
    offset: Tensor | None = None,
    run: int = 1,
    query_scale: Tensor | None = None,
) -> Tensor:
    """Each vector is read once. queries are [B, H, N, r*] or [B, n, H, N, r*], in codes
    [2, B, n, H, N, r*], and block is a multiple of 16. vectors [B, H, S, r] are a view
    (check_store). Rule each gives [B, H * N, S]."""
    *_, H, N, r_score = queries.shape
    (B, _, S, r), coded = vectors.shape, query_scale is not None
    first = queries[0] if coded else queries
    blocks, fits = tuple(first.shape[1:-3]), len(first) == B and r_score <= r
    need(fits, f"queries {list(queries.shape)} do not fit vectors {list(vectors.shape)}")
    need(rule in ("each", "softmax", "largest"), f"no rule {rule}")
    need(
        blocks == ((cdiv(S, block),) if block else ()),
        f"no queries for blocks of {block} of {S} tokens",
    )
    # else a tile would lie in two blocks
    need(block % 16 == 0, f"block is {block}, not a multiple of 16")
    dtype = queries.dtype if vector_scale is None else torch.int8
    stored = {"vectors": (vectors, dtype, r), "scale of vectors": (vector_scale, torch.float32)}
    steps = check_store(B, H, S, **stored)
    given = {"queries": (first[0], torch.int8 if coded else queries.dtype, *blocks, H, N, r_score)}
    given["scale of queries"] = (query_scale, torch.float32, B, *blocks, H * N)
    given["offset"] = (offset, torch.float32, B, cdiv(S, run), H * N)
    check(pos=(pos, torch.int32, B), **given)
    query_steps = (first.stride(0), H * N * r_score, N * r_score, queries.stride(0))
    rule = "each" if rule == "largest" and N == 1 else rule  # it ranks tokens alike
    NP, soft = power2(N, 8), rule == "softmax"
    T, RB, warps, stages, programs = scores_config(
        NP, r_score, tile_itemsize(queries.dtype, vectors)
    )
    need(
        not coded or RB >= r_score and dtype == torch.int8,
        "queries in codes do not fit the vectors",
    )
    if block:
        T = min(T, block & -block)  # a power of two that divides it
    tiles = cdiv(S, T)
    splits = cdiv(tiles, tiles_a_program(tiles, B * H, programs))
    empty = functools.partial(torch.empty, dtype=torch.float32, device=vectors.device)
    # which rounds to e5m2 wrong
    exact = queries.dtype == torch.float32 or triton.knobs.runtime.interpret
    kept_dtype = torch.float32 if exact else torch.float8_e5m2
    kept = empty(B, H, S, NP, dtype=kept_dtype) if soft else empty(B, H * N, S)
    tile_max = empty(B, H, tiles if soft else 0, NP)
    sums = (tile_max, *empty(2, B, H, splits if rule != "each" else 0, NP))
    _scores_kernel[splits, H, B](
        queries,
        query_scale,
        vectors,
        vector_scale,
        offset,
        pos,
        kept,
        *sums,
        query_steps,
        steps,
        S,
        tiles,
        r_score,
        r,
        scale * (1 if rule == "each" else LOG2E),
        run,
        block // T if block else None,
        N,
        cdiv(r_score, RB),
        T,
        RB,
        rule,
        stages,
        run % T == 0,
        num_warps=warps,
        num_stages=stages,
        **overlapped(vectors.device),
    )
    if rule == "each":
        return kept
    out, T = empty(B, H, S), T if soft else 512
    # which hold the sums of all splits
    warps = max(2, min(4, power2(splits) * NP // 1024)) if soft else 4
    _reduce_scores_kernel[min(cdiv(S, max(T, 256)), max(4, 16 * SMS // (B * H))), H, B](
        kept,
        *sums,
        pos,
        out,
        S,
        splits,
        N,
        T,
        power2(splits),
        rule,
        num_warps=warps,
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
    block: int = 0,
    offset: Tensor | None = None,
    run: int = 1,
    query_scale: Tensor | None = None,
    *,
    kernel: bool,
) -> Tensor:
    """Scores the tokens up to pos by the leading d numbers of what is stored of each.

    q [B, Hq, d], or [B, n, Hq, d]: one for each of n blocks of `block` tokens, perhaps in codes
    with query_scale (block_queries). vectors [B, H, S, >= d] of any float dtype, or int8 codes with
    vector_scale [B, H, S] fp32: a head of them serves N = Hq / H queries. Logits are (q . vector +
    offset) * scale; offset [B, n, Hq] fp32, or None, one for each of n runs of `run` tokens. rule:
        each     every query's logit -> [B, H, N, S]
        softmax  the sum over a head's queries of their attention weights, each of which a kernel
                 keeps in
                 fp8 (e5m2) unless q is fp32 -> [B, H, S]
        largest  the largest of these weights, as a logarithm -> [B, H, S]
    fp32, -inf beyond pos."""
    q = q.unflatten(-2, (vectors.shape[1], -1)).to(
        vectors.dtype if vector_scale is None else q.dtype
    )
    if not (kernel and block % 16 == 0):
        return scores_reference(q, vectors, vector_scale, pos, scale, rule, block, offset, run)
    given = vectors, vector_scale, pos.int(), scale, rule, block, offset, run, query_scale
    made = launch_scores(q.contiguous(), *given)
    return made.unflatten(1, q.shape[-3:-1]) if rule == "each" else made


# ---------------------------------------------------------------------------------------- selection
# A key is a score as an int32 number of the same order. The y best keys are those that reach a
# threshold. A
# search narrows a bracket lo, hi: more than `most` keys reach lo, and at most `most` keys reach hi.


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
def _load_keys(scores_p, j, S, x, last):
    """The keys of tokens j. A token that is no candidate has a dead key, -2**31."""
    score = tl.load(scores_p + j, mask=j < S, other=0.0)
    alive = (j >= x) & (j <= last) & (j < S) & (score > float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(alive, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@jit
def _reach(keys, row, left, right):
    """How many keys reach left, and how many reach right >= left. keys is a tile; None: the tiles
    of row."""
    if row is None:
        # Both counts in one sum, the second in the upper 16 bits: a tile has 2**15 keys at most
        both = tl.sum(tl.where(keys >= right, 65537, tl.where(keys >= left, 1, 0)))
        return both & 65535, (both >> 16) & 65535
    else:
        scores_p, i, S, x, last = row
        reach_left = last * 0
        reach_right = last * 0
        for start in range(0, S, i.shape[0] * i.shape[1]):
            tile = _load_keys(scores_p, start + i, S, x, last)
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
        lo = -2139095041  # the keys of minus infinity and infinity
        hi = 2139095041
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
def _store_kept(out_p, keys, index, lo, hi, spare):
    """Stores the index of the keys that reach hi, and of the first `spare` keys that equal lo ->
    how many it stored, and how many of these equal lo."""
    keep, tied = keys >= hi, keys < -2147483648
    if spare > 0:
        tied = keys == lo
        tied &= _places(tied) < spare
        keep |= tied
    tl.store(out_p + _places(keep), index, mask=keep)
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
    scores_p,  # [B, S] fp32
    pos_p,  # [B] int32
    key_p,  # [B, chunks, CAP] int32
    index_p,  # [B, chunks, CAP] int32
    cut_p,  # [B, chunks] int32
    S,
    x,
    z,
    least,
    chunks,
    N: tl.constexpr,  # tokens of a chunk
    C: tl.constexpr,  # rows of its tile
    CAP: tl.constexpr,
):
    """Keeps the best `least` to CAP tokens of a chunk. Stores their keys, followed by dead ones,
    their index, and the cut: all keys that are dropped lie below it."""
    _wait_for_previous()
    _let_next_begin()
    b = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    last = tl.load(pos_p + b) - z

    # Chunks interleave in runs of 4, so that neighbouring high scores spread over all chunks.
    i = _tile_of(N, C)
    j = ((i // 4) * chunks + chunk) * 4 + i % 4
    keys = _load_keys(scores_p + b * S, j, S, x, last)
    _, hi, count = _threshold(keys, None, least, CAP)

    keep = keys >= hi
    slot = (b * chunks + chunk) * CAP
    place = slot + _places(keep)
    tl.store(key_p + place, keys, mask=keep)
    tl.store(index_p + place, j, mask=keep)
    rest = tl.arange(0, CAP)
    tl.store(key_p + slot + rest, tl.full([CAP], -2147483648, tl.int32), mask=rest >= count)
    tl.store(cut_p + b * chunks + chunk, hi)


@jit
def _select_kernel(
    scores_p,  # [B, S] fp32
    pos_p,  # [B] int32
    wanted_p,  # [B] int32: how many tokens a row of the batch takes; None: y
    key_p,  # of _survivors_kernel [B, N]; None, as the next two: candidates are all tokens
    index_p,  # [B, N]
    cut_p,  # [B, CHUNKS]
    out_p,  # [B, x + y] int32
    S,
    x,
    y,
    z,
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
    last = tl.load(pos_p + b) - z  # the newest token outside of the recent window
    if wanted_p is None:
        want = y
    else:
        want = tl.minimum(tl.load(wanted_p + b), y)
    scores_p += b * S
    out_p += b * (x + y)

    # The candidates
    i = _tile_of(N, C)
    if key_p is None:
        index = i
        keys = _load_keys(scores_p, i, S, x, last)
    else:
        cut = tl.load(cut_p + b * CHUNKS + tl.arange(0, CHUNKS))
        keys = tl.load(key_p + b * N + i)
        index = tl.load(index_p + b * N + i)

    # The best of them
    lo, hi, total = _threshold(keys, None, want, want)
    done = True
    if key_p is not None:  # dropped keys are below the cuts: exact, unless one could reach hi
        done = tl.max(cut, 0) <= hi
    spare = tl.where(lo < hi, want - total, 0)
    _store_kept(out_p + x, keys, index, lo, hi, spare)
    total += spare

    if not done:  # the same over all tokens, tile by tile
        lo, hi, total = _threshold(None, (scores_p, i, S, x, last), want, want)
        spare = tl.where(lo < hi, want - total, 0)
        total = last * 0
        for start in range(0, S, N):
            keys = _load_keys(scores_p, start + i, S, x, last)
            kept, ties = _store_kept(out_p + x + total, keys, start + i, lo, hi, spare)
            total += kept
            spare -= ties

    # The sinks, and -1 in the places that are left
    sink = tl.arange(0, XP)
    rest = tl.arange(0, YP)
    tl.store(out_p + sink, tl.where(sink <= last, sink, -1), mask=sink < x)
    tl.store(out_p + x + rest, tl.full([YP], -1, tl.int32), mask=(rest >= total) & (rest < y))


def empty_selection(
    scores: Tensor, pos: Tensor, x: int, y: int, z: int, wanted: Tensor | None = None
) -> Tensor:
    """An empty tensor for what launch_select gives."""
    return pos.new_empty(len(pos), x + y)


@operator(empty_selection)
def launch_select(
    scores: Tensor, pos: Tensor, x: int, y: int, z: int, wanted: Tensor | None = None
) -> Tensor:
    """scores [B, S] -> index [B, x + y]. Of equal scores at the threshold any may be chosen. Choice
    and order are the same in every run.

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
            scores_p=scores,
            pos_p=pos,
            key_p=key,
            index_p=index,
            cut_p=cut,
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
        scores_p=scores,
        pos_p=pos,
        wanted_p=wanted,
        key_p=key,
        index_p=index,
        cut_p=cut,
        out_p=out,
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
    whole, as S is at most 4096, or chunks would keep too much."""
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
    """Whether the kernel would have to pass over such a row many times, as no chunks fit: topk is
    faster."""
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
    return torch.cat((index, newest.expand(*index.shape[:-1], -1)), -1)


# --------------------------------------------------------------------- attention over stored tokens
# A store is a matrix of vectors, one for each token and KV head. A vector's number is b * steps[0]
# +
# h * steps[1] + token * steps[2] (check_store). A format of keys is two functions. QUERIES
# prepares a group's
# queries once. LOGITS multiplies them with the keys of a tile of tokens, and returns logits and
# keys. What a
# format stores is one tuple, `keys` or `values`, since formats differ in it. Every other argument
# of a kernel
# has a name.
#
# A plain flash-decode is here, too: read _attend_kernel with kind "plain", where QUERIES is
# _plain_queries,
# LOGITS is _plain_logits and _values is _plain_values; then _attend_tile and _merge_kernel.


def attend_plain(
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


def attend_reference(
    q: Tensor, keys, values, pos: Tensor, index: Tensor | None, exact, scale: float
) -> Tensor:
    """What attend says, in PyTorch. All tokens of stores in codes are attended by products with the
    codes."""
    Hkv, S = values.kernel_form()[0].shape[1:3]
    if index is not None:
        live = (index >= 0).expand(-1, Hkv, -1, -1).flatten(1, 2)  # [B, Hkv or Hq, n]
        chosen = index.clamp(min=0).long()
        k = keys.read(chosen).flatten(1, 2)  # [B, Hkv or Hq, n, D]
        v = values.read(chosen).flatten(1, 2)
        return attend_rows(q, k, v, live, pos, exact, scale=scale, kernel=False)

    tokens = torch.arange(S, device=pos.device)
    if not exact and keys.kind == "plain" and values.bits == 16:
        return attend_plain(q, keys.vectors, values.vectors, tokens <= pos[:, None], scale)
    last = pos[:, None, None, None]
    n_recent = exact[0].n_recent if exact else 0
    grouped = q.unflatten(1, (Hkv, -1))
    logits = keys.logits(grouped).float()  # [B, Hkv, G, S]
    logits = logits.masked_fill(tokens > last - n_recent, -torch.inf)
    if exact:  # its slots fill from the left
        is_empty = torch.arange(n_recent, device=pos.device) > last
        of_recent = exact[0].logits(grouped).float().masked_fill(is_empty, -torch.inf)
        logits = torch.cat((logits, of_recent), -1)
    weights = ((logits - logits.amax(-1, keepdim=True)) * scale).exp()
    out = values.mix(weights[..., :S])
    if exact:
        out = out + exact[1].mix(weights[..., S:])
    return (out / weights.sum(-1, keepdim=True)).to(q.dtype).flatten(1, 2)


class Packing(NamedTuple):
    """How a head's values lie, here D = 256 channels of BITS = 2 bits in WIDTH = 64 bytes:

        bits      7 6   5 4   3 2   1 0
        byte 0    192   128    64     0     the channels whose codes it holds
        byte 1    193   129    65     1
        ..
        plane       3     2     1     0     each has 64 channels: RUNS = 2 runs of RUN = 32

    The channels of a GROUP share a minimum and a scale. A run lies in one group. If WIDTH is no
    power of 2, a plane is one padded run over several groups. Plain V is one plane of D numbers."""

    BITS: int
    GROUP: int
    WIDTH: int
    RUN: int
    RUNS: int
    PLANES: int
    D: int  # channels
    COLUMNS: int  # channels, padded


def packing_of(bits: int, group: int, width: int, run: int) -> Packing:
    runs, planes = max(1, power2(width) // run), max(1, 8 // bits)
    return Packing(bits, group, width, run, runs, planes, planes * width, planes * runs * run)


def value_packing(D: int, bits: int, vector_scale: bool = False) -> Packing:
    """Groups have 32 channels, or all of a narrow head or of a vector with one scale, as in
    compress.py."""
    group, width = D if vector_scale else min(32, D), D * bits // 8
    need(bits in (2, 4, 16), f"bits must be 2, 4 or 16, not {bits}")
    if bits == 16:
        return packing_of(bits, 1, D, power2(D))
    fits = D % group == width % 4 == 0 and (vector_scale or group == power2(group))
    need(fits, f"values of {bits} bits need a head dim of 16 or a multiple of 32, not {D}")
    run = min(32, width) if width == power2(width) else power2(width)
    return packing_of(bits, group, width, run)


class Shape(NamedTuple):
    """Sizes of a launch."""

    G: int  # queries of a group
    GP: int  # padded
    D: int  # dims of a key
    DP: int  # padded
    T: int  # tokens of a tile
    STAGES: int  # tiles in flight
    R: int = 0  # rank of latents
    KB: int = 0  # ranks of a product
    HELD: bool = False  # does a product take all ranks? The basis then stays in shared memory
    REST: int = 0  # bytes of a latent's dims in 4 bits, which follow its R dims in int8
    WIDE: int = 0  # of them those of a first product, a power of two
    NARROW: int = 0  # of a second one, padded
    CODES: Packing | None = None  # of channels
    # the softmax lies in a branch, always taken, so that the next loads come before it
    EARLY: bool = False


@jit
def _half_at(words, shift):
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
    first = plane * BITS  # bit of a byte
    # never 0; a rotation is one instruction
    turn = (23 - SPAN - first // SPAN * SPAN - byte * 8) & 31
    words = words.to(tl.uint32, bitcast=True)
    words = ((words << turn) | (words >> (32 - turn))) & (
        ((1 << BITS) - 1) << (23 - SPAN + first % SPAN)
    )
    return (words | 0x3F800000).to(tl.float32, bitcast=True), (1 << (SPAN - first % SPAN)).to(
        tl.float32
    )


@jit
def _load_rope(rope_p, at, mask):
    """cos and sin of a RoPE pair, from two halves of a 32-bit word or two fp32 numbers."""
    if rope_p.dtype.element_ty == tl.int32:
        word = tl.load(rope_p + at, mask=mask, other=0)
        return _half_at(word, 0), _half_at(word, 16)
    else:
        cos = tl.load(rope_p + 2 * at, mask=mask, other=0.0)
        return cos, tl.load(rope_p + 2 * at + 1, mask=mask, other=0.0)


@constexpr_function
def _largest_sum(dtype):
    """Sums of int8 products can exceed fp16's range. In fp16 the keys and their bias are divided by
    this, and the query is multiplied by it."""
    return 1024.0 if dtype == tl.float16 else 1.0


@jit
def _columns(PACKING: tl.constexpr):
    """The channel of each column of an unpacked tile, and whether it exists, [C]. Columns go plane
    by plane, and a plane is padded to a power of two."""
    PLANE: tl.constexpr = PACKING.RUNS * PACKING.RUN
    column = tl.arange(0, PACKING.PLANES * PLANE)
    byte = column % PLANE
    return (column // PLANE) * PACKING.WIDTH + byte, byte < PACKING.WIDTH


# ---- formats of keys


def rope_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp16 beside caches of 16 bits: 4 bytes a pair, with an eighth of bf16's rounding."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def rope_pairs(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """cos and sin [P, D/2] side by side, [P, D/2, 2], as the kernels read them beside caches of a
    dtype."""
    return torch.stack((cos, sin), -1).to(rope_dtype(dtype))


def interleave_rope(basis: Tensor, n_kv_heads: int) -> Tensor:
    """basis [Hkv*D, r] -> [Hkv, DP, r], as attend takes it: dims c and c + D/2, a RoPE pair, become
    2c and 2c + 1, and DP - D zero rows pad a head to a power of two."""
    heads = basis.unflatten(0, (n_kv_heads, 2, -1))  # [Hkv, 2, D/2, r]
    paired = heads.transpose(1, 2).flatten(1, 2)
    padding = power2(paired.shape[1]) - paired.shape[1]
    return F.pad(paired, (0, 0, 0, padding)).contiguous()


@jit
def _load_queries(q_p, channel, real, SHAPE: tl.constexpr):
    """The queries of a group as columns [len(channel), GP]."""
    g = tl.arange(0, SHAPE.GP)
    real = (g < SHAPE.G)[None, :] & real[:, None]
    return tl.load(q_p + g[None, :] * SHAPE.D + channel[:, None], mask=real, other=0.0)


def plain_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    """(stores, steps, fields of Shape) of plain keys. The other formats' checks return the same."""
    (k,), (B, _, D) = keys, q.shape
    return (k,), check_store(B, Hkv, k.shape[2], keys=(k, q.dtype, D)), {}


@jit
def _plain_queries(q_p, h, keys, SHAPE: tl.constexpr):
    """The queries of a group as columns [DP, GP]."""
    d = tl.arange(0, SHAPE.DP)
    return _load_queries(q_p, d, d < SHAPE.D, SHAPE)


@jit
def _plain_logits(query, keys, b, h, vector, place, token, live, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of plain keys [.., D] of q's dtype."""
    (k_p,) = keys
    d = tl.arange(0, SHAPE.DP)
    mask = live[:, None] & (d < SHAPE.D)[None, :]
    k = tl.load(k_p + vector[:, None] * SHAPE.D + d[None, :], mask=mask, other=0.0)
    if SHAPE.GP == 1:
        return tl.sum(k.to(tl.float32) * tl.trans(query), 1, keep_dims=True) * scale, k
    else:
        return tl.dot(k, query, input_precision="ieee") * scale, k


def latent_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (latent, scale, rest, basis, basis_scale, bias, rope), (B, _, D) = keys, q.shape
    (S, r), DP, f32 = latent.shape[2:], power2(D, 16), torch.float32
    dtype, width = q.dtype if scale is None else torch.int8, 0 if rest is None else rest.shape[3]
    together = len({x is None for x in (scale, rest, basis_scale)}) == 1
    need(together, "codes of latents have scales, dims in 4 bits, and a basis with scales")
    stored = {"latents": (latent, dtype, r), "scale of latents": (scale, f32)}
    steps = check_store(B, Hkv, S, **stored, trailing=(rest, torch.uint8, width))
    need(len(rope) >= S, f"rope has {len(rope)} positions, the cache {S}")
    given = {"basis (of interleave_rope)": (basis, dtype, Hkv, DP, r + 2 * width)}
    given["bias (of interleave_rope)"] = (bias, f32, Hkv, DP, 1)
    pairs = rope, rope_dtype(q.dtype), len(rope), D // 2, 2
    check(**given, basis_scale=(basis_scale, f32, Hkv, DP, 1), rope=pairs)
    KB = ranks_at_once(
        r + 2 * width, tile_itemsize(q.dtype, latent), roomy(q.device) and rest is None
    )
    KB = KB if rest is None else max(KB, 64)  # a byte holds two dims, and an int8 product takes 32
    held = KB >= r + 2 * width
    first = power2(width, 32) if width < 64 else power2(width + 1) // 2
    split = {
        "REST": width,
        "WIDE": first,
        "NARROW": power2(width - first, 32) if width > first else 0,
    }
    words = rope if rope.dtype == f32 else rope.view(torch.int32)  # of two halves
    stores = (latent, scale, rest, basis, basis_scale, bias, words)
    return stores, steps, {"R": r, "KB": power2(r, 32) if held else KB, "HELD": held} | split


def roomy(device: torch.device) -> bool:
    """Whether a program can have 160 KB of shared memory (A100, H100): other GPUs give 99 KB."""
    cuda = device.type == "cuda"
    return (
        cuda
        and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024
    )


def ranks_at_once(r: int, itemsize: int, roomy: bool) -> int:
    """How many ranks of latents a product takes. It takes all if the basis fits in shared memory,
    where it then stays. Else it takes a line of memory, 128 bytes, and each tile loads the basis
    again."""
    KB = power2(r, 32)
    return KB if KB * itemsize <= (512 if roomy else 256) else 128 // itemsize


@jit
def _latent_queries(q_p, h, keys, SHAPE: tl.constexpr):
    """The queries as columns [DP, GP], in the order of the basis (interleave_rope), and the basis
    [KB, DP] if one product takes all ranks."""
    _, _, _, basis_p, basis_scale_p, _, _ = keys
    d, dims = tl.arange(0, SHAPE.DP), tl.arange(0, SHAPE.KB)
    query = _load_queries(q_p, d // 2 + (d % 2) * (SHAPE.D // 2), d < SHAPE.D, SHAPE)
    if basis_scale_p is not None:
        scale = tl.load(basis_scale_p + h * SHAPE.DP + d) * _largest_sum(query.dtype)
        query = (query * scale[:, None]).to(query.dtype)
    basis = query
    wide, narrow = (query, query), (query, query)
    if SHAPE.HELD:
        basis = _load_basis(basis_p, h, dims, dims < SHAPE.R, SHAPE)
        if SHAPE.REST > 0:
            wide = _rest_basis(basis_p, h, tl.arange(0, SHAPE.WIDE), SHAPE)
            if SHAPE.NARROW > 0:
                narrow = _rest_basis(basis_p, h, SHAPE.WIDE + tl.arange(0, SHAPE.NARROW), SHAPE)
    return query, basis, wide, narrow


@jit
def _load_basis(basis_p, h, dims, inside, SHAPE: tl.constexpr):
    """Dims of a head's basis as rows [len(dims), DP]."""
    rows = basis_p + (h * SHAPE.DP + tl.arange(0, SHAPE.DP))[None, :] * (SHAPE.R + 2 * SHAPE.REST)
    return tl.load(rows + dims[:, None], mask=inside[:, None], other=0.0)


@jit
def _rest_basis(basis_p, h, byte, SHAPE: tl.constexpr):
    """A head's basis of the two dims that each byte holds."""
    low, inside = SHAPE.R + byte, byte < SHAPE.REST
    low_basis = _load_basis(basis_p, h, low, inside, SHAPE)
    return low_basis, _load_basis(basis_p, h, low + SHAPE.REST, inside, SHAPE)


@jit
def _add_rest(k, rest_p, vector, byte, live, basis, SHAPE: tl.constexpr):
    """k + the dims in 4 bits of a tile of latents times their basis: byte j holds dims j and j +
    REST."""
    inside = live[:, None] & (byte < SHAPE.REST)[None, :]
    packed = tl.load(rest_p + vector[:, None] * SHAPE.REST + byte[None, :], mask=inside, other=0)
    low_basis, high_basis = basis
    low = _four_bit_level(((packed & 15) << 3).to(tl.int8))
    k = tl.dot(low, low_basis, k, out_dtype=tl.int32)
    high = _four_bit_level(((packed & 240) >> 1).to(tl.int8))
    return tl.dot(high, high_basis, k, out_dtype=tl.int32)


@jit
def _latent_logits(queries, keys, b, h, vector, place, token, live, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of keys rebuilt from latents, RoPE(latent basis^T + bias). Latents [.., r] and
    the basis [Hkv, DP, r] are of q's dtype, or int8 with a scale a vector; a latent's last dims may
    lie in 4 bits."""
    latent_p, latent_scale_p, rest_p, basis_p, _, bias_p, rope_p = keys
    query, basis, wide, narrow = queries
    DP: tl.constexpr = SHAPE.DP
    R: tl.constexpr = SHAPE.R
    HALF: tl.constexpr = SHAPE.D // 2
    INT8: tl.constexpr = latent_scale_p is not None
    SUM: tl.constexpr = tl.int32 if INT8 else tl.float32
    LARGE: tl.constexpr = _largest_sum(query.dtype) if INT8 else 1.0
    d, pair, dims = tl.arange(0, DP), tl.arange(0, DP // 2), tl.arange(0, SHAPE.KB)
    k = tl.zeros([vector.shape[0], DP], SUM)
    for start in range(0, R, SHAPE.KB):
        inside = dims + start < R
        left_at = latent_p + vector[:, None] * R + (dims + start)[None, :]
        left = tl.load(left_at, mask=live[:, None] & inside[None, :], other=0.0)
        right = basis if SHAPE.HELD else _load_basis(basis_p, h, dims + start, inside, SHAPE)
        k = tl.dot(left, right, k, input_precision="ieee", out_dtype=SUM)
    if rest_p is not None:
        if SHAPE.HELD:
            k = _add_rest(k, rest_p, vector, tl.arange(0, SHAPE.WIDE), live, wide, SHAPE)
            if SHAPE.NARROW > 0:
                k = _add_rest(
                    k, rest_p, vector, SHAPE.WIDE + tl.arange(0, SHAPE.NARROW), live, narrow, SHAPE
                )
        else:
            for start in range(0, SHAPE.REST, SHAPE.KB // 2):  # of a byte two dims
                byte = start + tl.arange(0, SHAPE.KB // 2)
                k = _add_rest(
                    k, rest_p, vector, byte, live, _rest_basis(basis_p, h, byte, SHAPE), SHAPE
                )
    if INT8:
        k = (
            k.to(tl.float32)
            * (tl.load(latent_scale_p + vector, mask=live, other=0.0) / LARGE)[:, None]
        )
    if bias_p is not None:
        k += (tl.load(bias_p + h * DP + d) / LARGE)[None, :]
    # The basis has RoPE pairs side by side, so that the halves of a pair lie in one thread.
    real = live[:, None] & (pair < HALF)[None, :]
    cos, sin = _load_rope(rope_p, token[:, None].to(tl.int64) * HALF + pair[None, :], real)
    x, y = tl.split(tl.reshape(k, [vector.shape[0], DP // 2, 2]))
    k = tl.reshape(tl.join(x * cos - y * sin, y * cos + x * sin), [vector.shape[0], DP]).to(
        query.dtype
    )
    return tl.dot(k, query, input_precision="ieee") * scale, k


def given_logits(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (logits,), (B, Hq, _) = keys, q.shape
    check_shape("logits", logits, torch.float32, B, Hkv, Hq // Hkv, logits.shape[3])
    need(logits.stride(3) == 1, "the logits of a query must lie in line")
    return (logits, *logits.stride()[:3]), (0, 0, 0), {}


@jit
def _given_logits(queries, keys, b, h, vector, place, token, live, scale, SHAPE: tl.constexpr):
    """Given logits [T, GP]. A query's logits lie in line, by place and not by token."""
    logits_p, step_b, step_h, step_g = keys
    g = tl.arange(0, SHAPE.GP)[None, :]
    mask = live[:, None] & (g < SHAPE.G)
    # one number: the compiler sees that places are neighbours
    logits_p = logits_p + b * step_b + h * step_h
    logits = tl.load(logits_p + place[:, None] + g * step_g, mask=mask, other=0.0)
    return logits * scale, logits


def channel_keys(q: Tensor, keys: Sequence, Hkv: int) -> tuple:
    (codes, low_scale), (B, _, D) = keys, q.shape
    tokens, width = codes.shape[2:]
    bits = width * 8 // D
    need(bits in (2, 4), f"codes of keys are of 2 or 4 bits, not {list(codes.shape)}")
    given = {"codes of keys": (codes, torch.uint8, B, Hkv, tokens, D * bits // 8)}
    check(**given, **{"low_scale of keys": (low_scale, torch.float16, B, Hkv, tokens // 32, D, 2)})
    need(D % 16 == 0, f"keys in codes need a head dim of whole words, not {D}")
    stores = codes.view(torch.int32), low_scale.view(torch.int32)
    steps = Hkv * tokens, tokens, 1
    return stores, steps, {"CODES": packing_of(bits, 32, width, power2(D, 16) * bits // 8)}


@jit
def _channel_queries(q_p, h, keys, SHAPE: tl.constexpr):
    """The queries of a group as columns, in the order of decoded keys (_columns)."""
    CODES: tl.constexpr = SHAPE.CODES
    channel, inside = _columns(CODES)
    return _load_queries(q_p, channel, inside, SHAPE)


@jit
def _channel_logits(query, keys, b, h, vector, place, token, live, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of KIVI's keys. 32 tokens in line are a group: they share a minimum and a
    scale of each channel."""
    codes_p, low_scale_p = keys
    CODES: tl.constexpr = SHAPE.CODES
    PLANES: tl.constexpr = CODES.PLANES
    WORDS: tl.constexpr = CODES.RUN // 4
    T: tl.constexpr = vector.shape[0]
    word = tl.arange(0, WORDS)[None, :]
    mask = live[:, None] & (word < CODES.WIDTH // 4)
    words = tl.load(codes_p + vector[:, None] * (CODES.WIDTH // 4) + word, mask=mask, other=0)
    group = tl.max(tl.reshape(tl.where(live, vector // 32, -1), [T // 32, 32]), 1)
    channel, inside = _columns(CODES)
    mask = (group >= 0)[:, None] & inside[None, :]
    pairs = tl.load(low_scale_p + group[:, None] * SHAPE.D + channel[None, :], mask=mask, other=0)
    pairs = tl.reshape(pairs, [T // 32, 1, PLANES, WORDS, 4])
    words = tl.reshape(words, [T // 32, 32, 1, WORDS, 1])
    plane, byte = (
        tl.arange(0, PLANES)[None, None, :, None, None],
        tl.arange(0, 4)[None, None, None, None, :],
    )
    codes, unit = _mantissas(words, plane, byte, CODES.BITS, query.dtype)
    step = _half_at(pairs, 16) * unit
    k = codes * step + (_half_at(pairs, 0) - step)
    k = tl.reshape(k, [T, PLANES * WORDS * 4]).to(query.dtype)
    return tl.dot(k, query, input_precision="ieee") * scale, k


@jit
def _rank(table_p, row, h, Hkv):
    """A number of rank_table. The compiler sees that 8 divides it, so that vectors are aligned."""
    return tl.load(table_p + row * Hkv + h).to(tl.int64) // 8 * 8


@jit
def _ragged_queries(q_p, h, keys, SHAPE: tl.constexpr):
    """The queries of a group as columns [DP, GP], d_qk, d_v, and the sums of ranks before K' and
    V'."""
    _, table_p, _, _, Hkv = keys
    d, d_qk = tl.arange(0, SHAPE.DP), _rank(table_p, 0, h, Hkv)
    query, d_v = _load_queries(q_p, d, d < d_qk, SHAPE), _rank(table_p, 1, h, Hkv)
    return query, d_qk, d_v, _rank(table_p, 2, h, Hkv), _rank(table_p, 3, h, Hkv)


@jit
def _ragged_logits(queries, keys, b, h, vector, place, token, live, scale, SHAPE: tl.constexpr):
    """Logits [T, GP] of K', and V' [T, DP]. First K' [B, S, d_qk] of each head is stored, then V'
    [B, S, d_v] of each head."""
    query, d_qk, d_v, before_k, before_v = queries
    packed_p, _, B, S, _ = keys
    d, token = tl.arange(0, SHAPE.DP)[None, :], token.to(tl.int64)[:, None]
    k_p, v_p = packed_p + (B * before_k + b * d_qk) * S, packed_p + (B * before_v + b * d_v) * S
    k = tl.load(k_p + token * d_qk + d, mask=live[:, None] & (d < d_qk), other=0.0)
    v = tl.load(v_p + token * d_v + d, mask=live[:, None] & (d < d_v), other=0.0)
    return tl.dot(k, query, input_precision="ieee") * scale, v


KEYS = {  # kind -> its check, QUERIES, LOGITS
    **dict.fromkeys(("plain", "mla"), (plain_keys, _plain_queries, _plain_logits)),
    "latents": (latent_keys, _latent_queries, _latent_logits),
    "channels": (channel_keys, _channel_queries, _channel_logits),
    # queries that nothing reads are not loaded
    "logits": (given_logits, _plain_queries, _given_logits),
}


# ---- formats of values


def packed_values(q: Tensor, values: Sequence, bits: int) -> tuple:
    """(stores, steps, packing) of values. They are plain at 16 bits, else codes, with (minimum,
    scale) of each group, or one scale a vector."""
    v, low_scale = (*values, None)[:2]
    width, paired = v.shape[3], low_scale is not None and low_scale.ndim == 5
    packing = value_packing(width * 8 // bits if bits < 16 else width, bits, not paired)
    need(bits == 16 or low_scale is not None, f"values of {bits} bits need low_scale")
    pairs = (packing.D // packing.GROUP, 2) if paired else ()
    stored = {"values": (v, q.dtype if bits == 16 else torch.uint8, width)}
    steps = check_store(
        *v.shape[:3], **stored, **{"scale of values": (low_scale, torch.float16, *pairs)}
    )
    if bits == 16:
        return (v, None), steps, packing
    return (
        (v.view(torch.int32), low_scale.view(torch.int32) if paired else low_scale),
        steps,
        packing,
    )


@jit
def _plain_values(v_p, vector, live, PACKING: tl.constexpr):
    """V [T, C] of 16 bits or fp32, stored as [.., DV], in the columns of PACKING."""
    channel, inside = _columns(PACKING)
    at = v_p + vector[:, None] * PACKING.D + channel[None, :]
    return tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)


@jit
def _code_values(codes_p, pairs_p, vector, live, dtype: tl.constexpr, PACKING: tl.constexpr):
    """V [T, C] of packed codes, words [.., DV * bits / 32] with (minimum, scale) [.., DV / group].
    With one scale [..] a vector they mean (2 code - 2**bits + 1) scale."""
    BITS: tl.constexpr = PACKING.BITS
    PLANES: tl.constexpr = PACKING.PLANES
    WIDTH: tl.constexpr = PACKING.WIDTH
    RUNS: tl.constexpr = PACKING.RUNS
    WORDS: tl.constexpr = PACKING.RUN // 4
    GROUPS: tl.constexpr = PACKING.D // PACKING.GROUP
    PAIRED: tl.constexpr = pairs_p.dtype.element_ty == tl.int32
    T: tl.constexpr = vector.shape[0]
    # 1. Load words of four bytes [T, 1, RUNS, WORDS, 1], and (minimum, scale) of their groups as
    # one word. A run has one of these, [T, PLANES, RUNS, 1, 1]. If planes are padded, each word has
    # one, [T, PLANES, 1, WORDS, 1].
    word = tl.arange(0, RUNS * WORDS)[None, :]
    code_at = codes_p + vector[:, None] * (WIDTH // 4) + word
    code = tl.load(code_at, mask=live[:, None] & (word < WIDTH // 4), other=0)
    if not PAIRED:
        # Two vectors' scales as one word: what is loaded ahead has four bytes at least.
        both = tl.load(
            pairs_p.to(tl.pointer_type(tl.int32), bitcast=True) + (vector >> 1), mask=live, other=0
        )
        half = _half_at(both, ((vector & 1) << 4).to(tl.int32))[:, None, None, None, None]
        low, step = half * (1.0 - 2**BITS), half * 2
    elif RUNS * WORDS * 4 == WIDTH:
        # Groups lie in the order of runs, so that one wide load takes them.
        group = tl.arange(0, PLANES * RUNS) // (PACKING.GROUP // PACKING.RUN)
        pair_at = pairs_p + vector[:, None] * GROUPS + group[None, :]
        pairs = tl.reshape(tl.load(pair_at, mask=live[:, None], other=0), [T, PLANES, RUNS, 1, 1])
    else:
        channel = (tl.arange(0, PLANES) * WIDTH)[:, None] + (tl.arange(0, WORDS) * 4)[None, :]
        group = tl.minimum(channel, PACKING.D - 1) // PACKING.GROUP
        pair_at = pairs_p + vector[:, None, None] * GROUPS + group[None, :, :]
        pairs = tl.load(pair_at, mask=live[:, None, None], other=0)[:, :, None, :, None]
    # 2. Decode.
    plane, byte = (
        tl.arange(0, PLANES)[None, :, None, None, None],
        tl.arange(0, 4)[None, None, None, None, :],
    )
    code, unit = _mantissas(tl.reshape(code, [T, 1, RUNS, WORDS, 1]), plane, byte, BITS, dtype)
    if PAIRED:
        low, step = _half_at(pairs, 0), _half_at(pairs, 16)
    step = step * unit
    v = code * step + (low - step)
    return tl.reshape(v, [T, PLANES * RUNS * PACKING.RUN]).to(dtype)


@jit
def _values(values, k, vector, live, dtype: tl.constexpr, PACKING: tl.constexpr):
    """V [T, C], plain or decoded. Without stored values V is the keys k."""
    values_p, pairs_p = values
    if values_p is None:
        return k
    elif pairs_p is None:
        return _plain_values(values_p, vector, live, PACKING)
    else:
        return _code_values(values_p, pairs_p, vector, live, dtype, PACKING)


# ---- the kernel, and the one that joins its splits


@jit
def _attend_tile(logits, live, v, top, total, out):
    """A step of online softmax: logits [T, GP] in log2 units, live [T], v [T, C] -> top [GP], total
    [T, GP], out [C, GP] with this tile. total is summed over T at the end. With one query out is
    [T, C], and is summed at the end, too."""
    logits = tl.where(live[:, None], logits, -1e30)
    new_top = tl.maximum(top, tl.max(logits, 0))
    weight = tl.where(live[:, None], tl.exp2(logits - new_top[None, :]), 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink[None, :] + weight
    if logits.shape[1] == 1:
        out = out * shrink[None, :] + v * weight
    else:
        out = tl.dot(tl.trans(v), weight.to(v.dtype), out * shrink[None, :], input_precision="ieee")
    return new_top, total, out


@jit
def _attend_kernel(
    q_p,  # [B, Hq, D]
    keys,  # what the format of keys stores
    values,  # what packed_values gives
    index_p,  # [B, sets, n] int32, -1: no token; None: all tokens that are not in the window
    index_step,  # numbers between two rows of the index
    window_k_p,  # exact keys [B, z, Hkv, D] after RoPE; None: there is no window
    window_v_p,  # [B, z, Hkv, DV]
    pos_p,  # [B] int32
    max_p,  # [B, Hq, splits] fp32; None: there is one split
    sum_p,  # [B, Hq, splits] fp32
    out_p,  # [B, Hq, splits, DV] fp32; of one split the result [B, Hq, DV]
    key_steps,  # vectors of keys between two rows of the batch, two KV heads and two tokens
    value_steps,  # the same of values
    n,  # tokens of an index; without one of the stores
    z,
    sets,  # of an index
    Hkv,
    scale,
    QUERIES: tl.constexpr,  # the two functions of the format of keys
    LOGITS: tl.constexpr,
    SHAPE: tl.constexpr,
    PACKING: tl.constexpr,  # of values
):
    """out = softmax(scale q K^T) V over stored tokens, which are cut into splits, and an exact
    window.

    A program takes the queries of a KV head. If each query head has its own index, it takes one
    query."""
    _wait_for_previous()
    split, splits = tl.program_id(0), tl.num_programs(0)
    p, programs, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    h = p * Hkv // programs
    GP: tl.constexpr = SHAPE.GP
    T: tl.constexpr = SHAPE.T
    C: tl.constexpr = PACKING.COLUMNS
    # 1. The tokens of this split.
    pos = tl.load(pos_p + b)
    length = n
    if index_p is None:
        length = tl.minimum(tl.maximum(pos + 1 - z, 0), n)
    # The last split has the window, too, and fewer of the others.
    share = tl.cdiv(tl.cdiv(length, T) + (0 if window_k_p is None else tl.cdiv(z, T)), splits)
    first, stop = split * share, tl.minimum((split + 1) * share, tl.cdiv(length, T))
    place = first * T + tl.arange(0, T)
    if index_p is not None:
        index_p += b * index_step + p * sets // programs * n
        # One tile ahead: a load is not prefetched if it waits for the load of its index.
        ahead = tl.load(index_p + place, mask=place < n, other=-1)
    # 2. The queries, and a softmax of nothing.
    head_row = (b * programs + p) * SHAPE.G
    queries = QUERIES(q_p + head_row * SHAPE.D, h, keys, SHAPE)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([T, GP], tl.float32)
    out = tl.zeros([T, C] if GP == 1 else [C, GP], tl.float32)
    # 3. The exact window, in the last split.
    if window_k_p is not None:
        if split == splits - 1:
            exact_k = (window_k_p,)
            exact = _plain_queries(q_p + head_row * SHAPE.D, h, exact_k, SHAPE)
            for start in tl.range(0, z, T, num_stages=1):
                slot = start + tl.arange(0, T)
                live = (slot < z) & (slot <= pos)  # slots fill from the left
                vector = (b * z + slot) * Hkv + h
                logits, _ = _plain_logits(
                    exact, exact_k, b, h, vector, slot, slot, live, scale, SHAPE
                )
                v = _plain_values(window_v_p, vector, live, PACKING)
                top, total, out = _attend_tile(logits, live, v, top, total, out)
    # 4. The stored tokens.
    for tile in tl.range(first, stop, num_stages=SHAPE.STAGES):
        place = tile * T + tl.arange(0, T)
        if index_p is not None:
            token = ahead
            live = token >= 0
            ahead = tl.load(index_p + place + T, mask=place + T < n, other=-1)
        else:
            token = place
            live = place < length
        key_vector = b * key_steps[0] + h * key_steps[1] + token.to(tl.int64) * key_steps[2]
        value_vector = b * value_steps[0] + h * value_steps[1] + token.to(tl.int64) * value_steps[2]
        logits, k = LOGITS(queries, keys, b, h, key_vector, place, token, live, scale, SHAPE)
        v = _values(values, k, value_vector, live, q_p.dtype.element_ty, PACKING)
        if not SHAPE.EARLY or tile < stop:
            top, total, out = _attend_tile(logits, live, v, top, total, out)
    # 5. The result, or this split's part of it.
    total = tl.sum(total, 0)
    if GP == 1:
        out = tl.sum(out, 0)[:, None]
    g = tl.arange(0, GP)
    channel, inside = _columns(PACKING)
    at = (head_row + g) * splits + split
    if max_p is None:
        out = out / total[None, :]
    else:
        tl.store(max_p + at, top, mask=g < SHAPE.G)
        tl.store(sum_p + at, total, mask=g < SHAPE.G)
    mask = inside[:, None] & (g < SHAPE.G)[None, :]
    out_at = out_p + at[None, :] * PACKING.D + channel[:, None]
    tl.store(out_at, out.to(out_p.dtype.element_ty), mask=mask)


@jit
def _merge_kernel(
    max_p,  # of _attend_kernel [B, Hq, splits]
    sum_p,  # [B, Hq, splits]
    part_p,  # [B, Hq, splits, D]
    out_p,  # [B, Hq, D]
    splits,
    D: tl.constexpr,
    SB: tl.constexpr,  # splits at a time
):
    """out = sum of exp2(max) part / sum of exp2(max) sum, over a head's splits, SB at a time."""
    _wait_for_previous()
    _let_next_begin()
    head, d = tl.program_id(0).to(tl.int64), tl.arange(0, _padded(D))
    top, total = tl.full([], -1e30, tl.float32), tl.full([], 0.0, tl.float32)
    out = tl.zeros(d.shape, tl.float32)
    for start in range(0, splits, SB):
        part = start + tl.arange(0, SB)
        at = head * splits + part
        tops = tl.load(max_p + at, mask=part < splits, other=-1e30)
        sums = tl.load(sum_p + at, mask=part < splits, other=0.0)
        mask = (part < splits)[:, None] & (d < D)[None, :]
        numbers = tl.load(part_p + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - new_top)
        total = total * tl.exp2(top - new_top) + tl.sum(sums * weight, 0)
        out = out * tl.exp2(top - new_top) + tl.sum(numbers * weight[:, None], 0)
        top = new_top
    tl.store(out_p + head * D + d, (out / total).to(out_p.dtype.element_ty), mask=d < D)


def split_outputs(q: Tensor, splits: int, D: int) -> tuple[Tensor, tuple]:
    """Empty tensors for a launch: the result [B, Hq, D], and the parts, (maximum [B, Hq, splits],
    sum [B, Hq, splits], part [B, Hq, splits, D]) in fp32. With one split the parts are (None, None,
    result)."""
    out = torch.empty(*q.shape[:2], D, dtype=q.dtype, device=q.device)
    if splits == 1:
        return out, (None, None, out)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    return out, (*empty(2, *q.shape[:2], splits), empty(*q.shape[:2], splits, D))


def merge_splits(out: Tensor, parts: tuple) -> Tensor:
    """out, joined from the parts of split_outputs by log-sum-exp."""
    if parts[0] is not None:
        splits, D = parts[2].shape[2:]
        many = splits > 16 and D <= 128  # wider ones would run out of registers
        SB, warps = (64, 2) if many else (min(16, power2(splits)), 1)
        _merge_kernel[out.numel() // D,](
            *parts, out, splits, D, SB, num_warps=warps, **overlapped(out.device)
        )
    return out


# Another function that attends, which launch_attend asks first: it returns None where it is not
# faster. extras/hopper.py sets it when it is imported.
faster_attend = None


def attended(q: Tensor, kind: str, keys: Sequence, values: Sequence, bits: int, *_) -> Tensor:
    """The shape of what attend gives."""
    return q.new_empty(*q.shape[:2], values[0].shape[3] * max(1, 8 // bits))


@operator(attended)
def launch_attend(
    q: Tensor,
    kind: str,
    keys: Sequence[Tensor | None],
    values: Sequence[Tensor | None],
    bits: int,
    pos: Tensor,
    index: Tensor | None,
    window: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """attend, over what stores hold: views [B, Hkv, S, width] (check_store), unless a shape is
    given. kind of the keys:
        plain    k [.., D] of q's dtype
        mla      the same; values are a key's DV leading numbers
        latents  latent [.., r]; its scale [B, Hkv, S] fp32, or None; the rest of its dims [.., n]
                 uint8, two
                 in a byte (quantize_mixed), or None; basis [Hkv, DP, r + 2n] of interleave_rope;
                 its scale [Hkv, DP, 1] fp32, or None; bias [Hkv, DP, 1] fp32 in units of the scale,
                 or None; rope [>= S, D/2, 2] of rope_pairs. A key is RoPE(latent basis^T + bias).
                 Latent and basis are int8 with scales, or of q's dtype without
        channels codes [B, Hkv, 32 n, D * bits / 8] uint8 of n groups of 32 tokens; low_scale
                 [B, Hkv, n, D, 2] fp16
        logits   no keys, but their logits [B, Hkv, G, n] fp32, each query's in line. They belong
                 to the
                 tokens of an index [B, n]; without one to all values are v [.., DV] of q's dtype at
    16 bits. Below they are codes [.., DV * bits / 8] uint8 and low_scale [.., DV / group, 2] fp16,
    or one scale [B, Hkv, S] fp16 a vector. index is int32; of channels there is none. window is
    exact keys and values [B, z, Hkv, D and DV], which fill from the left, or ()."""
    (B, Hq, D), (Hkv, n, DV) = q.shape, values[0].shape[1:]
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    tokens = n if kind == "logits" else keys[0].shape[2]
    need(tokens >= n, f"keys of {tokens} tokens do not fit values of {n}")
    check_keys, *functions = KEYS[kind]
    key_stores, key_steps, sizes = check_keys(q, keys, Hkv)
    value_stores, value_steps, packing = (
        (None, None),
        (0, 0, 0),
        packing_of(16, 1, DV, power2(D, 16)),
    )
    if kind != "mla":
        value_stores, value_steps, packing = packed_values(q, values, bits)
    chosen = torch.Size([B, n]) if index is None else index.shape
    need(
        len(chosen) in (2, 3) and chosen[0] == B, f"index must be [{B}, .., n], not {list(chosen)}"
    )
    n, sets = chosen[-1], chosen[1:-1].numel()
    need(
        sets in (1, Hkv, Hq), f"index must have a set a row, a KV head or a query head, not {sets}"
    )
    z = window[0].shape[1] if window else 0
    beside = zip(("window keys", "window values"), window, (D, packing.D), strict=False)
    exact = {name: (x, q.dtype, B, z, Hkv, width) for name, x, width in beside}
    step, entry = (0, None) if index is None else (index.stride(0), index[0])
    given = {"q": (q, q.dtype, B, Hq, D), "index": (entry, torch.int32, *chosen[1:])}
    check(pos=(pos, torch.int32, B), **given, **exact)
    if faster_attend is not None:
        made = faster_attend(
            q, kind, keys, values, bits, pos, index, window, scale, key_stores, value_stores
        )
        if made is not None:
            return made
    programs = max(Hkv, sets)  # of a row and split
    G = Hq // programs
    T, warps, stages, fill = attend_config(
        kind, G, packing.D, bits, q.element_size(), roomy(q.device)
    )
    need(kind != "channels" or index is None, "of channels all tokens are attended")
    # two products of wgmma keep two tiles in shared memory: the branch reads the older
    if kind == "mla":
        sizes["EARLY"] = q.element_size() == 2 and D > 32 and nvidia_generation(q.device) == 9
    # Tensor cores take 8 queries at least, and keys that are no codes faster with 16.
    uncoded = kind in ("plain", "mla") or kind == "latents" and keys[1] is None
    GP = 1 if G == 1 and kind == "logits" else power2(G, 16 if uncoded else 8)
    SHAPE = Shape(G, GP, D, power2(D, 16), T, stages, **sizes)
    splits = attend_splits(n, B * programs, fill)
    out, parts = split_outputs(q, splits, packing.D)
    _attend_kernel[splits, programs, B](
        q,
        key_stores,
        value_stores,
        index,
        step,
        *(window or (None, None)),
        pos,
        *parts,
        key_steps,
        value_steps,
        n,
        z,
        sets,
        Hkv,
        scale * LOG2E,
        *functions,
        SHAPE,
        packing,
        num_warps=warps,
        **overlapped(q.device),
    )
    return merge_splits(out, parts)


def attend_splits(n: int, programs: int, fill: int) -> int:
    """How many splits n tokens are cut into, so that each multiprocessor has work for `fill`
    programs."""
    return max(1, min(cdiv(n, 128), fill * SMS // programs))


def attend_config(kind: str, G: int, DV: int, bits: int, itemsize: int, roomy: bool) -> tuple:
    """(tokens a tile, warps, stages, programs a multiprocessor)."""
    if kind == "mla":
        return (16 if itemsize == 4 else 64 if roomy else 32), 4, 2, 1
    if itemsize == 4:
        return 32, 4, 2, 4
    # wide plain values beside a basis that is held leave no room for a third stage
    if kind == "latents":
        return 64, 4, 3 if roomy and (bits < 16 or DV < 128) else 2, 2
    if kind == "logits" and bits < 16:
        return 64, 4 if G > 1 else 2, 2, 6
    if kind in ("plain", "logits"):
        return (64, 4, 3, 4) if roomy else (64 if DV <= 128 else 32, 4, 2, 4)
    return 32, 1, 3, 8


def attend(
    q: Tensor,
    keys,
    values,
    pos: Tensor,
    index: Tensor | None = None,
    exact: Sequence = (),
    *,
    scale: float,
    kernel: bool,
) -> Tensor:
    """Attention of one new token of each row over stored tokens: q [B, Hq, D] after RoPE ->
    [B, Hq, DV].

    keys, values: stores (compress.Store). index [B, Hkv or 1, G or 1, n]: the tokens that are
    attended, -1 for none; None: all up to pos. exact: no stores, or two of exact keys and values
    that lie by token (compress.ExactStore), whose tokens are attended besides, or without an index
    in the place of the last."""
    unpackable = values.bits < 16 and q.shape[-1] % 16  # see value_packing
    nothing_chosen = index is not None and not index.numel()
    if not kernel or unpackable or keys.kind not in KEYS or nothing_chosen:
        return attend_reference(q, keys, values, pos, index, exact, scale)
    stored = keys.kind, keys.kernel_form(), values.kernel_form(), values.bits
    exact = [store.vectors.transpose(1, 2) for store in exact]
    if index is not None:
        index = kernel_index(index, n_kv_heads=stored[2][0].shape[1])
    return launch_attend(q.contiguous(), *stored, pos.int(), index, exact, scale)


def kernel_index(index: Tensor, n_kv_heads: int) -> Tensor:
    """An index [B, Hkv or 1, G or 1, n] as launch_attend takes it: int32 [B, n], [B, Hkv, n] or
    [B, Hq, n]."""
    if index.shape[1] == index.shape[2] == 1:
        return index[:, 0, 0].int()  # one set a row: rows may lie apart
    return index.expand(-1, n_kv_heads, -1, -1).flatten(1, 2).int().contiguous()


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    live: Tensor,
    pos: Tensor,
    exact: Sequence = (),
    *,
    scale: float,
    kernel: bool,
) -> Tensor:
    """Attention of one query each, q [B, Hq, D], over the live [B, Hkv, S] of k, v [B, Hkv, S, D],
    and over exact tokens as in attend."""
    if kernel:
        index = torch.arange(k.shape[2], device=q.device).where(live, -1).int()
        exact = [store.vectors.transpose(1, 2) for store in exact]
        return launch_attend(q.contiguous(), "plain", [k], [v], 16, pos.int(), index, exact, scale)
    if exact:  # its slots fill from the left
        exact_k, exact_v = exact
        is_filled = torch.arange(exact_k.n_tokens, device=pos.device) <= pos[:, None]  # [B, slots]
        k = torch.cat((k, exact_k.read_all()), 2)
        v = torch.cat((v, exact_v.read_all()), 2)
        live = torch.cat((live, is_filled[:, None].expand(-1, live.shape[1], -1)), -1)
    return attend_plain(q, k, v, live, scale)


def attend_logits(logits: Tensor, v: Tensor, pos: Tensor, *, kernel: bool) -> Tensor:
    """Attention whose logits [B, Hkv, G, S] fp32 are there, over the tokens up to pos of v
    [B, Hkv, S, DV] -> [B, Hkv * G, DV] of v's dtype."""
    if not kernel:
        live = torch.arange(v.shape[2], device=pos.device) <= pos[:, None, None, None]
        return matmul_codes(logits.masked_fill(~live, -torch.inf).softmax(-1), v).flatten(1, 2)
    q = v.new_empty(len(v), logits.shape[1] * logits.shape[2], 16)  # only its shape is used
    return launch_attend(q, "logits", [logits], [v], 16, pos.int(), None, [], 1.0)


def attend_latent(
    q: Tensor, latent: Tensor, pos: Tensor, DV: int, *, scale: float, kernel: bool
) -> Tensor:
    """Attention over latents [B, S, W] that all heads share, as in MLA's absorbed decode: q
    [B, Hq, W] -> [B, Hq, DV]. A latent is the key, and its leading DV numbers are the value.

    Sums of latents beyond 512 numbers (256 in fp32) do not fit in a kernel's registers. There
    scores makes the logits, and attend_logits reads the values again."""
    q, pos, vectors = q.contiguous(), pos.int(), latent[:, None]
    if not kernel:
        live = torch.arange(latent.shape[1], device=pos.device) <= pos[:, None]
        return attend_plain(q, vectors, vectors[..., :DV], live, scale)
    if q.shape[2] * q.element_size() <= 1024:
        return launch_attend(q, "mla", [vectors], [vectors[..., :DV]], 16, pos, None, [], scale)
    logits = launch_scores(q[:, None], vectors, None, pos, scale, "each")[:, None]
    width = math.gcd(512, DV, q.shape[2])  # of blocks, which take the places of KV heads
    blocks = latent.unflatten(-1, (-1, width))[:, :, : DV // width].transpose(1, 2)
    out = attend_logits(logits.expand(-1, blocks.shape[1], -1, -1), blocks, pos, kernel=True)
    return out.unflatten(1, (-1, q.shape[1])).transpose(1, 2).flatten(2)


# ---- heads of unequal rank (FDC)


def rank_table(ranks: list[int], device: torch.device) -> Tensor:
    """attend_ragged's table, int32 [4, Hkv]: each KV head's d_qk, d_v, and the sums of ranks stored
    before its K' and its V'. ranks: d_qk of all heads, then d_v."""
    before = itertools.accumulate(ranks[:-1], initial=0)
    return torch.tensor([*ranks, *before], dtype=torch.int32, device=device).view(4, -1)


@operator(
    lambda q, packed, table, ranks, *_: q.new_empty(*q.shape[:2], max(ranks[len(ranks) // 2 :]))
)
def launch_attend_ragged(
    q: Tensor, packed: Tensor, table: Tensor, ranks: list[int], pos: Tensor, scale: float
) -> Tensor:
    """Attention of one new token of each row over the tokens 0..pos of heads of unequal rank.

    q [B, Hq, max d_qk], read up to a head's d_qk; packed [B * S * sum(ranks)] (_ragged_logits);
    ranks and their rank_table; scale, that of the full head dim -> [B, Hq, max d_v], zero beyond a
    head's d_v. All heads have the same number of splits, because the time of a tile does not depend
    on the rank."""
    (B, Hq, _), Hkv = q.shape, len(ranks) // 2
    fits = len(ranks) == 2 * Hkv > 0 and min(ranks) > 0 and Hq % Hkv == 0
    need(
        fits and math.gcd(8, *ranks) == 8,
        f"ranks must be d_qk and d_v of every head, in 8s, not {ranks}",
    )
    G, DQ, DV, S = Hq // Hkv, max(ranks[:Hkv]), max(ranks[Hkv:]), packed.numel() // (B * sum(ranks))
    given = {"q": (q, packed.dtype, B, Hq, DQ), "table": (table, torch.int32, 4, Hkv)}
    check(pos=(pos, torch.int32, B), packed=(packed, packed.dtype, B * S * sum(ranks)), **given)
    T, warps, stages, fill = attend_config(
        "plain", G, max(ranks), 16, q.element_size(), roomy(q.device)
    )
    W, splits = power2(max(ranks), 16), attend_splits(S, B * Hkv, fill)
    SHAPE = Shape(G, power2(G, 16), DQ, W, T, stages)
    out, parts = split_outputs(q, splits, DV)
    _attend_kernel[splits, Hkv, B](
        q,
        (packed, table, B, S, Hkv),
        (None, None),
        None,
        0,
        None,
        None,
        pos,
        *parts,
        (0, 0, 0),
        (0, 0, 0),
        S,
        0,
        1,
        Hkv,
        scale * LOG2E,
        _ragged_queries,
        _ragged_logits,
        SHAPE,
        packing_of(16, 1, DV, W),
        num_warps=warps,
        **overlapped(q.device),
    )
    return merge_splits(out, parts)


def attend_ragged(q: Tensor, vectors, pos: Tensor, *, scale: float) -> Tensor:
    """Attention over a RaggedStore: q [B, Hq, max d_qk] -> [B, sum of G d_v]. The kernel runs where
    the store has a table, else a head is attended at a time."""
    if vectors.table is not None:
        stored = vectors.packed, vectors.table, vectors.ranks
        out = launch_attend_ragged(q.contiguous(), *stored, pos.int(), scale)
        return out.flatten(1)[:, vectors.v_columns]
    views = vectors.views()
    live = torch.arange(views[0].shape[1], device=pos.device) <= pos[:, None]
    heads = zip(q.chunk(vectors.n, 1), views[: vectors.n], views[vectors.n :], strict=True)
    out = (
        attend_plain(x[..., : k.shape[-1]], k[:, None], v[:, None], live, scale)
        for x, k, v in heads
    )
    return torch.cat([x.flatten(1) for x in out], -1)


# -------------------------------------------------------------------------- rows out of host memory


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
    rows_p,  # [B, Hkv, S, W]
    index_p,  # [B, Hkv, n] int64
    place_p,  # [B, Hkv, n] int64
    miss_p,  # [B, Hkv, n] bool
    hot_p,  # [B, Hkv, slots, W]
    S,
    n,
    slots,
    W: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
):
    """hot[place] = rows[index] where miss."""
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    miss = tl.load(miss_p + head * n + entry, mask=entry < n, other=0)
    index = tl.load(index_p + head * n + entry, mask=miss, other=0)
    place = tl.load(place_p + head * n + entry, mask=miss, other=0)
    d = tl.arange(0, _padded(W))[None, :]
    mask = miss[:, None] & (d < W)  # masked lanes read nothing over the bus
    row = tl.load(rows_p + (head * S + index)[:, None] * W + d, mask=mask, other=0.0)
    tl.store(hot_p + (head * slots + place)[:, None] * W + d, row, mask=mask)


@operator(_no_result, mutates=("hot",))
def launch_fetch_rows(
    rows: Tensor, index: Tensor, place: Tensor, miss: Tensor, hot: Tensor
) -> None:
    """fetch_rows by its kernel."""
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
        rows_p=rows,
        index_p=index,
        place_p=place,
        miss_p=miss,
        hot_p=hot,
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
    [B, Hkv, n]; miss bool [B, Hkv, n]; hot [B, Hkv, slots, W]. The places of missing rows are
    distinct."""
    if kernel:
        launch_fetch_rows(rows, index, place, miss, hot)
    else:
        fetch_rows_reference(rows, index, place, miss, hot)
