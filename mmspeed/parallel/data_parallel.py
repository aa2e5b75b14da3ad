"""Train data-parallel: sharded (FSDP2, after ZeRO: Rajbhandari et al., 2020), hybrid-sharded, or replicated (DDP).

Both engines sum gradients over the ranks that hold a parameter instead of averaging: `mmspeed.loop.step` divides the loss by a number that
every rank knows before its first forward. So parameters on another mesh than the rest need no factor of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmspeed.axes import AxisName
from mmspeed.errors import UserError
from mmspeed.mesh import Mesh
from mmspeed.mixin import mix_in
from mmspeed.protocols import blocks_of, stays_float32
from mmspeed.torch_internals import at_end_of_backward, fsdp_state, is_fully_sharded, sum_in_float32, tree_leaves

from .experts import sharded_dim, spread_modules

Strategy = Literal["none", "ddp", "fsdp"]


class _Autocast(nn.Module):
    """Mixed in before a model's own class: its forward runs under torch.autocast."""

    _autocast_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = chain(self.parameters(), filter(torch.is_tensor, tree_leaves((args, kwargs))))
        with torch.autocast(next(tensors).device.type, self._autocast_dtype):  # a stage may have no parameters
            return super().forward(*args, **kwargs)


class _InFloat32(nn.Module):
    """Mixed in before the class of a module that stays float32: its forward runs outside of autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            return super().forward(*args, **kwargs)


def autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute its matrix products in `dtype`, in place; parameters and names stay as they are.

    Modules that the model declares to stay float32 compute in float32.
    """
    for name, module in model.named_modules():
        within = stays_float32(model, name.rpartition(".")[0])  # inside a module that stays float32 itself
        if name and stays_float32(model, name) and not within and next(module.parameters(), None) is not None:
            mix_in(module, _InFloat32, rename=False)
    mix_in(
        model, _Autocast, rename=False
    )._autocast_dtype = dtype  # diffusers writes the name into a checkpoint's config


def shard(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype, host: bool = False) -> nn.Module:
    """Apply `fully_shard` (FSDP2) to each block, then to the root; with `dp_replicate` > 1 the sharded model is replicated (HSDP).

    Parameters are gathered in `compute_dtype`; gradients are reduced in float32, over both axes. Inputs are not cast, since the root would
    round timesteps to `compute_dtype` too; autocast casts what matrix products need. Parameters that stay float32 are gathered in float32,
    in parameter groups of their own, since FSDP2 has one dtype per group.

    host: frozen weights of blocks lie in the host's memory, pinned unless the device is the host, and come to the device a block ahead of
    its forward and its backward; what trains in a block is a group of its own, which stays on the device.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    axes = (AxisName.DP_REPLICATE, AxisName.SHARD) if mesh.size(AxisName.DP_REPLICATE) > 1 else (AxisName.SHARD,)
    sharded = mesh.submesh(*axes)
    engine = partial(fully_shard, mesh=sharded)
    apart = float32_parameters(model) if compute_dtype != torch.float32 or is_half(model) else set()
    frozen = (
        partial(engine, offload_policy=CPUOffloadPolicy(pin_memory=sharded.device_type != "cpu")) if host else engine
    )
    for module in spread_modules(model):  # over the processes that hold the same experts
        same, count = mesh.submesh(*axes[:-1], AxisName.EDP), mesh.size(AxisName.EDP)
        placed = partial(
            fully_shard, mesh=same, shard_placement_fn=lambda p, n=count: Shard(cast(int, sharded_dim(p, n)))
        )
        _shard_module(module, placed, compute_dtype, apart)
    for _, block in blocks_of(model):
        if host:
            _shard_trained(block, engine, compute_dtype)
        _shard_module(block, frozen, compute_dtype, apart)
    # The root is resharded too (not torch's default): after an evaluation its gathered parameters would otherwise
    # stay, and hide what an EMA swap or a loaded checkpoint writes into the shards.
    _shard_module(model, partial(engine, reshard_after_forward=True), compute_dtype, apart)
    if host:  # in backward FSDP2 does it by itself
        blocks = [block for _, block in blocks_of(model)]
        for block, following in pairwise(blocks):
            assert is_fully_sharded(block) and is_fully_sharded(following)
            block.set_modules_to_forward_prefetch([following])
    sum_gradients(model)
    if is_half(model):
        _keep_sums_in_float32(model)
    return model


def float32_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that stay float32: those that the model declares, and those held directly by the modules that contain them."""
    named = dict(model.named_parameters())
    declared = [name for name in named if stays_float32(model, name)]
    around = {name[:end] for name in declared for end in range(len(name)) if name[end] == "." or end == 0}
    return {p for name, p in named.items() if name in declared or name.rpartition(".")[0] in around}


def _shard_module(
    module: nn.Module, engine: Callable[..., object], compute_dtype: torch.dtype, apart: set[nn.Parameter]
) -> None:
    """Shard the parameters of a module that are not sharded yet; those in `apart` are gathered in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if not apart.isdisjoint(module.parameters()):
        others = list(_free_modules(module, apart))
        if others:
            engine(others, mp_policy=policy)
        policy = replace(policy, param_dtype=torch.float32)
    engine(module, mp_policy=policy)


def _shard_trained(block: nn.Module, engine: Callable[..., object], compute_dtype: torch.dtype) -> None:
    """Shard the modules of a block that hold parameters that train, such as adapters, as one group."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    trained = [m for m in block.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if trained:
        engine(
            trained,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        )


def _free_modules(module: nn.Module, apart: set[nn.Parameter]) -> Iterator[nn.Module]:
    """Yield the outermost modules within a module that hold parameters, none of them in `apart` and none sharded yet."""
    for child in module.children():
        if is_fully_sharded(child):
            continue
        sharded = any(is_fully_sharded(inner) for inner in child.modules())
        own = list(child.parameters())
        if own and not sharded and apart.isdisjoint(own):
            yield child
        else:
            yield from _free_modules(child, apart)


class _Undivided:
    """A divisor that equals 1 and returns the dividend as it is.

    With the number 1.0, torch would really divide where a group has one shard (replicas of bfloat16 parameters): one more pass over all
    gradients, and as much memory again.
    """

    def __rtruediv__(self, gradient: Tensor) -> Tensor:
        return gradient

    def __eq__(self, other: object) -> bool:
        return other == 1


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 sum gradients, which it averages by default, in every module that `fully_shard` was called on."""
    for module in model.modules():
        if is_fully_sharded(module):  # neither call is recursive
            module.set_gradient_divide_factor(cast(float, _Undivided()))
            module.set_force_sum_reduction_for_comms(True)  # else the collective scales too, which gloo cannot do


def make_half(model: nn.Module) -> None:
    """Make trainable parameters bfloat16, in place, except those that the model declares to stay float32.

    Buffers and frozen parameters stay too: no optimizer keeps float32 weights for them. Call it on the meta device, or before the
    parameters are filled.
    """
    kept = float32_parameters(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in kept:
                module.register_parameter(name, nn.Parameter(parameter.detach().to(torch.bfloat16)))


def is_half(model: nn.Module) -> bool:
    """True where a trainable parameter is bfloat16; a frozen base may be of any dtype."""
    return any(parameter.dtype == torch.bfloat16 for parameter in model.parameters() if parameter.requires_grad)


def take_float32_gradients(model: nn.Module) -> None:
    """Give bfloat16 parameters float32 gradients, so that micro-batches are not summed in bfloat16. Call it before the first backward."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32


def _keep_sums_in_float32(model: nn.Module) -> None:
    """Keep gradients summed over ranks in float32, which FSDP2 would round to the parameters' dtype.

    It looks that dtype up at the first forward, so this runs before each forward.
    """
    states = [fsdp_state(module) for module in model.modules() if is_fully_sharded(module)]

    def before(*_: Any) -> None:
        for state in states:
            sum_in_float32(state)

    model.register_forward_pre_hook(before)  # comes after the engine's own


def replicate(model: nn.Module) -> nn.Module:
    """Wrap the model in a DistributedDataParallel that sums gradients over all ranks.

    Every parameter must be used in every step: its backward raises UserError where one that trains gets no gradient.
    """
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name is unknown to 2.11, and buffers change alike on all ranks
        warnings.simplefilter("ignore", FutureWarning)
        replicas = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    watch = _SumWatch(replicas)
    # without a hook it averages; a lambda, since torch refuses annotations that are strings
    replicas.register_comm_hook(replicas.process_group, lambda group, bucket: watch.summed(group, bucket))
    return replicas


class _SumWatch:
    """Raises UserError at the end of a backward after which gradients are not summed: DDP waits for one of every parameter, in silence."""

    def __init__(self, replicas: DistributedDataParallel) -> None:
        self.replicas, self.complete = replicas, True
        replicas.register_forward_hook(lambda _, __, output: self._expect(output))

    def summed(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The sum of a bucket of gradients; buckets follow one another in their order."""
        self.complete = bucket.is_last()
        return _summed(group, bucket)

    def _expect(self, output: Any) -> None:
        if not torch.is_grad_enabled() or not self.replicas.require_backward_grad_sync:
            return
        self.complete = False
        for tensor in filter(lambda tensor: tensor.requires_grad, tensors_of(output)):
            tensor.register_hook(lambda _: at_end_of_backward(self._check))

    def _check(self) -> None:
        if self.complete:
            return
        trained = [(name, p) for name, p in self.replicas.module.named_parameters() if p.requires_grad]
        missing = [name for name, p in trained if p.grad is None]
        if len(missing) == len(trained):  # nothing to sum: `torch.autograd.grad` of an input
            return
        missing = missing or ["one of an earlier micro-batch"]
        raise UserError(
            f"parallel.strategy ddp: {len(missing)} parameters that train got no gradient, first {missing[0]}, so that none of this step is "
            "summed over processes: freeze them before (requires_grad_(False)), or use fsdp"
        )


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output, those of dataclasses among them."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_of(vars(leaf))


def _summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum of a bucket of gradients over a group, in the bucket's own memory."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda reduced: reduced.value()[0])
    return summed


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model inside DistributedDataParallel; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def no_sync(model: nn.Module, strategy: Strategy, last: bool) -> Iterator[None]:
    """Exchange gradients only for the `last` micro-batch of a step. Use around its forward and backward."""
    if is_fully_sharded(model):
        model.set_requires_gradient_sync(last)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
        yield
