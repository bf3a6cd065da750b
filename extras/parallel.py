"""Several GPUs, with a process for each: tensor parallelism (Megatron-LM, arXiv 1909.08053, sec.
3).

    torchrun --nproc_per_node 4 -- generate.py --checkpoint FOLDER --method loki --d 0.5
    torchrun --nproc_per_node 4 -m extras.bench step \\
        --row "sals|llama-3.1-70b|8|32768|--method sals"

Without the two dashes torchrun would take options such as --d for its own.

Every process runs the whole command over a smaller Llama: its share of the query heads, of the KV
heads and of ffn_dim. It has the weights and the cache of these heads and no others; embeddings,
norms and the output matrix are whole in every process. What comes out of W_o and W_2 is then a part
of a sum, and the processes add these parts up: two all-reduces a layer. To a method the share is a
model like any other.

model.py, compress.py and generate.py know nothing of this. generate.run_command calls
`run_together` where torchrun started the process, and `cut_models` replaces a few of their
functions, which it lists.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import torch
import torch.distributed as dist
from torch import Tensor

import compress
import model as model_file
from compress import Artifact, Method
from model import Llama, ModelConfig, UserError, projections

# ---------------------------------------------------------------------------------- the processes


def rank() -> int:
    """This process's number, from 0 on."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_gather_object(value: object) -> list:
    """What every process gives as `value`, in the order of their ranks; in all processes."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_of_processes(value: float) -> float:
    """The sum of what every process gives as `value`; in all processes."""
    return sum(all_gather_object(value))


class SharedInput:
    """The stdin of process 0, in the place of every process's own: all read the same."""

    def __init__(self, stream):
        self.stream = stream

    def read(self, size: int = -1) -> str:
        return self._share(lambda: self.stream.read(size))

    def readline(self) -> str:
        return self._share(self.stream.readline)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")

    def _share(self, read: Callable[[], str]) -> str:
        text = read() if rank() == 0 else None
        return all_gather_object(text)[0]


def join() -> "dist.Store":
    """Joins the processes that torchrun started -> the store of keys and values that they share."""
    from torch.distributed.rendezvous import rendezvous  # not in every build of PyTorch

    store, own_rank, n = next(rendezvous("env://"))
    # Gloo moves tensors of the CPU, NCCL those of GPUs.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # The timeout is long, since the processes may wait for a user who types.
    a_day = timedelta(days=1)
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=n, timeout=a_day)
    return store


def run_together(run: Callable[[], None]) -> NoReturn:
    """Runs a command in this process, one of several that torchrun started, and ends the process.

    Only process 0 prints and reads stdin. The first process that fails says why and ends with an
    exit code other than 0, on which torchrun ends the others."""
    own_stderr = sys.stderr

    def run_in_this_process() -> None:
        store = join()
        cut_models()
        sys.stdin = SharedInput(sys.stdin)
        if rank() > 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")
        try:
            run()
            sys.stdout.flush()
        except Exception:
            is_first = store.add("failed", 1) == 1
            if not is_first:
                os._exit(2)
            sys.stderr = own_stderr
            raise
        dist.destroy_process_group()

    code = 0
    try:
        generate.run_alone(run_in_this_process)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end may wait for the other processes


# -------------------------------------------------------------------------- the share of a process


@dataclass
class ShareConfig(ModelConfig):
    """The config of one process's share of a model, and that of the whole model."""

    whole: ModelConfig | None = None
    first_kv_head: int = 0  # the number that this share's first KV head has in the whole model


def share_of(config: ModelConfig, n: int) -> ShareConfig:
    """The config of one of n equal shares. Several processes may have the same KV head, each with
    other query heads. Raises UserError where the sizes do not divide."""
    if config.elitekv:
        raise UserError(
            "an uptrained EliteKV model has one latent of all heads: run it without torchrun"
        )
    kv_heads_divide = config.n_kv_heads % n == 0 or n % config.n_kv_heads == 0
    if config.n_heads % n or config.ffn_dim % n or not kv_heads_divide:
        heads = f"{config.n_heads} query heads, {config.n_kv_heads} KV heads"
        fault = f"{n} ranks cannot evenly share {heads} and ffn_dim {config.ffn_dim}"
        raise UserError(f"{fault}; use another --nproc_per_node")
    n_kv_heads = max(1, config.n_kv_heads // n)
    smaller = {
        "n_heads": config.n_heads // n,
        "n_kv_heads": n_kv_heads,
        "ffn_dim": config.ffn_dim // n,
    }
    first_kv_head = own_place(config.n_kv_heads // n_kv_heads, n) * n_kv_heads
    return ShareConfig(**vars(config) | smaller, whole=config, first_kv_head=first_kv_head)


def own_place(n_parts: int, n: int) -> int:
    """Which of n_parts equal parts this one of n processes has. Where there are fewer parts than
    processes, neighbours have the same."""
    return rank() * n_parts // n


def own_part(whole: Tensor, shape: Sequence[int | None]) -> Tensor:
    """This process's part of a tensor of the whole model: a view of this shape, not cut in dims of
    None."""
    part = whole
    for dim, size in enumerate(shape):
        if size is None or size == whole.shape[dim]:
            continue
        place = own_place(whole.shape[dim] // size, world_size())
        part = part.narrow(dim, place * size, size)
    return part


whole_artifact = compress.read_artifact


def read_own_artifact(path: Path, row: Method, model: Llama, remedy: str) -> Artifact:
    """compress.read_artifact, checked against the whole model and then cut to this process's KV
    heads."""
    share = model.config
    whole_model = SimpleNamespace(config=share.whole, fingerprint=model.fingerprint)
    artifact = whole_artifact(path, row, whole_model, remedy)
    if share.n_kv_heads < share.whole.n_kv_heads:
        if row.artifact == "sals":
            make_own_sals(artifact, share)
        elif row.artifact == "elitekv":
            make_own_elitekv(artifact, share)
    for name, (_, *shape) in row.shapes(share).items():
        artifact[name] = own_part(artifact[name], shape)
    return artifact


def make_own_sals(artifact: Artifact, share: ShareConfig) -> None:
    """Gives this process a latent of its own heads (ours); one of all heads would need their keys.

    With the rows U_h of its heads, U_h diag(eigenvalues) U_h^T is their block of the covariance.
    The block's eigenvectors are the left singular vectors of U_h diag(eigenvalues)^(1/2)."""
    for metric in ("query", "key"):
        eigenvalues = artifact[f"{metric}_eigenvalues"]  # [n_layers, Hkv*D] of all heads
        for i in range(share.n_layers):
            U = artifact[f"{i}.{metric}_basis"]  # [Hkv*D, r]
            U_h = own_part(U, (share.kv_dim, None)).double()
            roots = eigenvalues[i, : U.shape[1]].double().clamp(min=0).sqrt()
            own_U, singular_values, _ = torch.linalg.svd(U_h * roots, full_matrices=False)
            artifact[f"{i}.{metric}_basis"] = own_U.float()
            eigenvalues[i, : len(singular_values)] = singular_values.square()
        artifact[f"{metric}_eigenvalues"] = eigenvalues[:, : share.kv_dim].contiguous()


def make_own_elitekv(artifact: Artifact, share: ShareConfig) -> None:
    """Gives this process a latent of its own heads (ours), with its share of the dims. EliteKV's
    fold makes it of the weights, which are those of these heads already."""
    n_latents = share.whole.n_kv_heads // share.n_kv_heads
    artifact["d_ckv"] = (artifact["d_ckv"] // n_latents).clamp(min=1)


# ------------------------------------------------------------------- what takes functions' places

whole_empty_model = model_file.empty_model
rank_fraction = compress.SalsSettings.rank_fraction
has_few_key_dims = compress.has_few_key_dims
attention_forward = model_file.Attention.forward
elite_attention_forward = compress.EliteAttention.forward
feed_forward_forward = model_file.FeedForward.forward
device_and_dtype = generate.device_and_dtype
set_tokens = generate.Engine.set_tokens


def cut_models() -> None:
    """Cuts every model that is built from now on. It replaces

    model.empty_model            by one of this process's share
    model.copy_weight            by a copy of this process's rows or columns
    Attention.forward,           in model.py, and EliteAttention's in compress.py, by ones whose
    FeedForward.forward          results are summed over the processes
    compress.read_artifact       by one that cuts what it has read
    SalsSettings.rank_fraction   and compress.has_few_key_dims by ones that are asked of the whole
                                 model, so that a share has the same defaults
    generate.device_and_dtype    by one that gives each process a GPU of its own
    Engine.set_tokens            by one after which all have the tokens that process 0 drew
    LLM.identity                 by a refusal: a file of a cache would be one process's share
    """
    model_file.empty_model = empty_share
    model_file.copy_weight = copy_own_part
    model_file.Attention.forward = all_reduced(attention_forward)
    compress.EliteAttention.forward = all_reduced(elite_attention_forward)
    model_file.FeedForward.forward = all_reduced(feed_forward_forward)
    compress.read_artifact = read_own_artifact
    compress.SalsSettings.rank_fraction = whole_rank_fraction
    compress.has_few_key_dims = whole_has_few_key_dims
    generate.device_and_dtype = own_device_and_dtype
    generate.Engine.set_tokens = set_the_same_tokens
    generate.LLM.identity = refuse_to_save


def empty_share(config: ModelConfig, dtype: torch.dtype, fingerprint: str = "random") -> Llama:
    return whole_empty_model(share_of(config, world_size()), dtype, fingerprint)


def whole_of(config: ModelConfig) -> ModelConfig:
    """The config of the whole model, of a share's config or of its own."""
    return getattr(config, "whole", None) or config


def whole_rank_fraction(settings: compress.SalsSettings, config: ModelConfig) -> float:
    return rank_fraction(settings, whole_of(config))


def whole_has_few_key_dims(config: ModelConfig) -> bool:
    return has_few_key_dims(whole_of(config))


def copy_own_part(model: Llama, name: str, slot: Tensor, tensor: Tensor) -> None:
    """Copies this process's part of a checkpoint's tensor to its slot in the share. A fused matrix,
    as Phi-3 has, is cut projection by projection."""
    whole_parts = projections(tensor, name, model.config.whole)
    own_parts = projections(slot, name, model.config)
    for whole, own in zip(whole_parts, own_parts, strict=True):
        own.copy_(own_part(whole, own.shape))
    if rank() > 0 and name.endswith(("o_proj.bias", "down_proj.bias")):
        slot.zero_()  # process 0 alone adds it to the sum


def all_reduced(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A module's forward whose result is summed over the processes."""

    def forward_and_sum(module, *inputs) -> Tensor:
        y = forward(module, *inputs)
        dist.all_reduce(y)
        return y

    return forward_and_sum


def own_device_and_dtype(device: str, dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    chosen = device_and_dtype(device, dtype)
    if device == "cuda":
        gpu = int(os.environ["LOCAL_RANK"])
        n_gpus = torch.cuda.device_count()
        if gpu >= n_gpus:
            raise UserError(f"each process needs a GPU of its own; use --nproc_per_node {n_gpus}")
        torch.cuda.set_device(gpu)
    return chosen


def set_the_same_tokens(engine, ids: Tensor) -> None:
    """Makes `tokens` those that process 0 chose: processes whose rows ended at different steps
    would wait for one another forever. This sends B numbers a step, and B more for a draw."""
    set_tokens(engine, ids)
    dist.broadcast(engine.tokens, 0)


def refuse_to_save(llm) -> NoReturn:
    raise UserError("a cache is saved and loaded by one process; leave out torchrun")
