"""Weights of the linear layers in int8: codes, and a scale in bf16 for each output. `--weights
int8`.

A decode step reads every weight once, so with half of the bytes a step of few rows takes less time
(docs/results.md has the figures). `build` stands in for model.build: it quantises each layer as
soon as the layer has its weights, and in them what the method folds, so that no more than one layer
is ever there in 16 bits. Below, linear_int8_reference defines the product, _linear_kernel
multiplies few rows by the codes, and many rows get a weight that _dequantize_kernel makes of them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model as model_file
from kernels import (
    _let_next_begin,
    _wait_for_previous,
    cdiv,
    check,
    jit,
    operator,
    overlapped,
    power2,
    quantize_int8,
    tl,
    triton,
)
from model import Layer, Llama, ModelConfig

# --------------------------------------------------------------------------------------- the layers

QUANTIZED_AT_ONCE = 1 << 19  # numbers of a weight: a CPU's caches hold so many


class Int8Linear(nn.Module):
    """A linear layer whose weight [N, K] is int8 codes * scale [N], in bf16."""

    def __init__(self, linear: nn.Linear):
        """Takes the place of a linear layer, whose bias it keeps as it is."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        rows = max(1, QUANTIZED_AT_ONCE // linear.weight.shape[1])
        codes = []
        scales = []
        for part in linear.weight.split(rows):
            part_codes, part_scale = quantize_int8(part, dtype=torch.bfloat16)
            codes.append(part_codes)
            scales.append(part_scale[:, 0])
        self.weight = nn.Parameter(torch.cat(codes), requires_grad=False)
        self.scale = nn.Parameter(torch.cat(scales), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear_int8(x, self.weight, self.scale, self.bias)


def quantize_layer(layer: Layer) -> None:
    """Makes the four large linear layers of a layer of the model int8."""
    attention = layer.attention
    feed_forward = layer.feed_forward
    attention.wqkv = Int8Linear(attention.wqkv)
    attention.wo = Int8Linear(attention.wo)
    feed_forward.w13 = Int8Linear(feed_forward.w13)
    feed_forward.w2 = Int8Linear(feed_forward.w2)


def build(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    fill: Callable[[Llama, str], None],
    fingerprint: str = "random",
    *,
    fold: Callable[[Llama, int], None],
) -> Llama:
    """model.build, with weights in int8. The model then serves one method alone: fold(model, i)
    folds into layer i what the method needs there, before the layer becomes int8.

    Raises UserError where the weights would not fit, before any memory is taken."""
    model = model_file.empty_model(config, dtype, fingerprint)
    model.tok_embeddings.to(torch.bfloat16)  # what stays in floating point need not take four bytes
    codes = sum(p.numel() for p in model.parameters())  # bytes, about
    model_file.check_weights_fit(codes, device)
    for part in model_file.weight_parts(model):
        model_file.give_weights(model, part, device, fill)
        if part == "output":
            model.output = Int8Linear(model.output)
        elif part.startswith("layers."):
            i = int(part.removeprefix("layers."))
            fold(model, i)
            quantize_layer(model.layers[i])
    model.is_folded = True
    return model


# -------------------------------------------------------------------------------------- the product


def linear_int8_reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """What linear_int8 computes, in PyTorch: x [..., K] * (codes [N, K] * scale [N])^T + bias.

    A CPU multiplies in bf16, which holds the codes exactly. Few rows multiply by the codes
    themselves; many rows do so only on a CPU without instructions for bf16."""
    if x.device.type != "cpu":
        return F.linear(x, codes * scale.to(x.dtype)[:, None], bias)
    rows = x.flatten(0, -2).bfloat16()
    if codes.shape[1] % 16 != 0:  # PyTorch's product reads 16 codes at a time
        reads_codes = False
    elif len(rows) <= 32:
        reads_codes = True
    else:  # bf16 is faster for many rows, where the CPU has instructions for it
        reads_codes = torch.backends.cpu.get_cpu_capability() != "AVX512"
    if reads_codes:
        y = torch.ops.aten._weight_int8pack_mm(rows, codes, scale)
    else:
        y = F.linear(rows, codes.bfloat16()) * scale
    y = y.view(*x.shape[:-1], -1).to(x.dtype)
    return y if bias is None else y + bias


LINEAR_ROWS = 64  # at most so many rows read the codes; more are worth a weight in their own dtype


def linear_config(M: int, N: int, itemsize: int) -> tuple[int, int, int, int]:
    """(rows, outputs and inputs of a tile, tiles in flight). Where outputs are many, larger tiles
    come in fewer waves."""
    if M == 1:
        return 1, 8, 1024, 3
    MP = min(power2(M, 16), 32)
    BK = 512 // itemsize
    if N > 8192:
        return MP, 64, BK, 3
    tiles_in_flight = 5 if MP == 16 else 3
    return MP, 32, BK, tiles_in_flight


@jit
def _linear_kernel(
    x_p,  # [M, K]
    codes_p,  # [N, K] int8
    scale_p,  # [N] bf16
    bias_p,  # [N], or None
    out_p,  # [M, N]
    M,
    N,
    K,
    MP: tl.constexpr,  # rows of a program
    BN: tl.constexpr,  # outputs of a program
    BK: tl.constexpr,  # inputs of a tile
    EVEN: tl.constexpr,  # is K whole tiles?
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = x (codes * scale)^T + bias. The programs of the same outputs lie side by side."""
    m = tl.program_id(0) * MP + tl.arange(0, MP)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x_at = x_p + m.to(tl.int64)[:, None] * K
    codes_at = codes_p + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    _wait_for_previous()
    out = tl.zeros([MP, BN] if MP > 1 else [BN, BK], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)[None, :]
        inside = (k < K) | EVEN
        x = tl.load(x_at + k, mask=(m < M)[:, None] & inside, other=0.0)
        codes = tl.load(codes_at + k, mask=inside, other=0)
        if MP > 1:
            out = tl.dot(x, tl.trans(codes.to(x.dtype)), out, input_precision="ieee")
        else:  # one row is faster without tensor cores
            out += codes.to(tl.float32) * x.to(tl.float32)
    if MP == 1:
        out = tl.sum(out, 1)[None, :]
    _let_next_begin()
    out *= tl.load(scale_p + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if bias_p is not None:
        out += tl.load(bias_p + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out_p + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, out.to(out_p.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@jit
def _dequantize_kernel(codes_p, scale_p, weight_p, K, BK: tl.constexpr):
    """weight [N, K] = codes [N, K] * scale [N]."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    codes = tl.load(codes_p + n * K + k, mask=k < K, other=0)
    weight = codes.to(tl.float32) * tl.load(scale_p + n).to(tl.float32)
    tl.store(weight_p + n * K + k, weight.to(weight_p.dtype.element_ty), mask=k < K)


@operator(lambda x, codes, *_: x.new_empty(len(x), len(codes)))
def launch_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] -> [M, N]."""
    M, K = x.shape
    N = len(codes)
    check(
        x=(x, x.dtype, M, K),
        codes=(codes, torch.int8, N, K),
        scale=(scale, torch.bfloat16, N),
        bias=(bias, x.dtype, N),
    )
    like = {"dtype": x.dtype, "device": x.device}
    if M > LINEAR_ROWS:
        weight = torch.empty(N, K, **like)
        BK = min(power2(K), 4096)
        _dequantize_kernel[N, cdiv(K, BK)](codes, scale, weight, K, BK)
        return F.linear(x, weight, bias)
    MP, BN, BK, STAGES = linear_config(M, N, x.element_size())
    out = torch.empty(M, N, **like)
    _linear_kernel[cdiv(M, MP), cdiv(N, BN)](
        x_p=x,
        codes_p=codes,
        scale_p=scale,
        bias_p=bias,
        out_p=out,
        M=M,
        N=N,
        K=K,
        MP=MP,
        BN=BN,
        BK=BK,
        EVEN=K % BK == 0,
        STAGES=STAGES,
        num_warps=4,
        **overlapped(x.device),
    )
    return out


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] through a linear layer in int8 -> [..., N] in x's dtype: weight codes [N, K] *
    scale [N] bf16, and bias [N] or None."""
    if triton is None or not x.is_cuda:
        return linear_int8_reference(x, codes, scale, bias)
    return launch_linear(x.flatten(0, -2).contiguous(), codes, scale, bias).view(*x.shape[:-1], -1)
