"""Names of torch that begin with an underscore: mmspeed uses them in this file alone.

They may change with any release of torch. Each has a test in tests/unit/test_torch_internals.py, which fails on a torch that lacks one
or changes its behaviour. Costly modules are imported by the functions that need them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import (
    _disable_dynamo as disable_dynamo,  # `torch.compiler.disable`, without loading the compiler now
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["FakeTensorMode", "TorchDispatchMode", "disable_dynamo", "is_traceable_wrapper_subclass"]
__all__ += ["tree_flatten", "tree_leaves", "tree_map_only"]

# ---- tensors and storages


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor without values, of a `FakeTensorMode`."""
    return isinstance(tensor, FakeTensor)


def version_of(tensor: Tensor) -> int:
    """The number of changes in place that autograd has counted. Raises RuntimeError for inference tensors, which have no count."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which `tensor` is a view, as autograd knows it."""
    return tensor._base


def negative_view(tensor: Tensor) -> Tensor:
    """A view whose numbers are those of `tensor` with the other sign; they change when they are read."""
    return torch._neg_view(tensor)


def storage_address(storage: torch.UntypedStorage) -> int:
    """The address of the storage object: the same for tensors that share memory, and for those that are freed and filled again."""
    return storage._cdata


def weak_pointer(storage: torch.UntypedStorage) -> Any:
    """A weak pointer to a storage, which counts as a weak reference until `free_weak_pointer`."""
    return storage._weak_ref()


def storage_at(pointer: Any) -> torch.UntypedStorage | None:
    """The storage behind a weak pointer; None when it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(pointer)


def free_weak_pointer(pointer: Any) -> None:
    """Free a weak pointer."""
    torch.UntypedStorage._free_weak_ref(pointer)


# ---- lists of tensors, in place


def lerp_each_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move each tensor towards its end by a share `weight` of the way."""
    torch._foreach_lerp_(tensors, ends, weight)


def multiply_each_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by one factor ()."""
    torch._foreach_mul_(tensors, factor)


def copy_each_(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its tensor, in the tensor's dtype."""
    torch._foreach_copy_(tensors, sources)


class AdamWOfParts(torch.optim.AdamW):
    """AdamW that computes with this process's parts of sharded tensors, with the same numbers; states are sharded as their parameters.

    Of lists of sharded tensors torch derives the layout of every result, for seconds at the first step of each shape.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        *sharded, _ = lists  # parameters, gradients and moments; the last are counts of steps
        rows = list(zip(*filter(None, sharded), strict=True))
        if rows and all(self._alike(row) for row in rows):
            for tensors in sharded:
                tensors[:] = [cast(Any, tensor).to_local() for tensor in tensors]
        return has_complex

    @staticmethod
    def _alike(tensors: Sequence[Tensor]) -> bool:
        """True for sharded tensors of one layout whose parts are no summands."""
        layouts = [(t.device_mesh, t.placements) if is_sharded(t) else None for t in tensors]
        first = layouts[0]
        return first is not None and layouts.count(first) == len(layouts) and not any(p.is_partial() for p in first[1])


# ---- operators. Arguments and results are those of the operators of these names in torch's native_functions.yaml

MATMUL_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm",
    "convolution", "_convolution", "mkldnn_linear",
)  # fmt: skip
ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
TO_COPY, TO_NUMBER = "_to_copy", "_local_scalar_dense"
OPERATOR_STARTS = {  # of operators' names; a name that none starts is elementwise
    "optimizer": ("_foreach_", "_fused_adam", "_fused_sgd"),
    "casts and copies": ("_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd", "repeat"),
    "gather and scatter": ("index", "gather", "scatter", "embedding", "slice_", "select_", "searchsorted", "masked_"),
    "reductions": (
        "sum", "mean", "amax", "amin", "max", "min", "any", "all", "arg", "linalg_vector_norm", "logsumexp", "cumsum", "topk", "sort",
        "native_", "_fused_rms_norm", "_softmax", "_log_softmax",
    ),
}  # fmt: skip
WAITING_NAMES = (  # a host that waits for values
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
)
CPU_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
GROUPED_MM = "aten._grouped_mm"


def cpu_flash(*args: Any, **kwargs: Any) -> Any:
    """Flash attention on the CPU: (out, log-sum-exp)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(*args, **kwargs)


def cpu_flash_backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of `cpu_flash`: (dq, dk, dv)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*args, **kwargs)


def cuda_flash(*args: Any, **kwargs: Any) -> Any:
    """Flash attention on CUDA, for half types: (out, log-sum-exp, ...)."""
    return torch.ops.aten._scaled_dot_product_flash_attention(*args, **kwargs)


def cuda_flash_backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of `cuda_flash`: (dq, dk, dv)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*args, **kwargs)


def cuda_efficient(*args: Any, **kwargs: Any) -> Any:
    """Memory-efficient attention on CUDA: (out, log-sum-exp, ...)."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(*args, **kwargs)


def cuda_efficient_backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of `cuda_efficient`: (dq, dk, dv, dbias)."""
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(*args, **kwargs)


def varlen_flash(*args: Any, **kwargs: Any) -> Any:
    """Flash attention on CUDA of packed sequences of several lengths: (out, log-sum-exp, ...)."""
    return torch.ops.aten._flash_attention_forward(*args, **kwargs)


def varlen_flash_backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of `varlen_flash`: (dq, dk, dv)."""
    return torch.ops.aten._flash_attention_backward(*args, **kwargs)


def changes_arguments(operator: Any) -> bool:
    """True for an operator that writes to its arguments."""
    return bool(operator._schema.is_mutable)


def parameters_of(operator: Any) -> Sequence[Any]:
    """The parameters that an operator declares, with what it writes to."""
    return operator._schema.arguments  # type: ignore[no-any-return]


def packet_of(operator: Any) -> Any:
    """The operator, with all its overloads, of an overload."""
    return operator._overloadpacket


# ---- autograd


def counting_changes() -> AbstractContextManager[None]:
    """Let `detach` share the count of in-place changes, as it does outside of a dispatch mode."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)  # type: ignore[return-value]


def in_backward() -> bool:
    """True inside of a backward pass of this thread."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """True where the backward pass that this thread is in retains its graph, so that another may follow, and outside of any."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass that this thread is in has ended; what it raises is raised by `backward`."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[no-untyped-call]


def add_gradient(tensor: Tensor, gradient: Tensor) -> None:
    """Take a gradient back from a tensor to its leaves: `torch.autograd.backward` without its checks, which cost more than small sums."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# ---- torch.compile


def allow_recompiles(most: int) -> None:
    """Let torch.compile make at least `most` graphs of one function."""
    import torch._dynamo  # here: it takes a second to load

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, most)


class GraphsBetweenBreaks:
    """Context in which graphs that torch.compile makes go from one break to the next, also through calls.

    By itself torch ends the graph of each function that calls one with a break, and again before and after the call.
    `torch._dynamo.config.patch` does the same in five times the time, which each block of each forward would take.
    """

    def __enter__(self) -> None:
        import torch._dynamo

        config: Any = torch._dynamo.config
        self._config, self._before = config, config.nested_graph_breaks
        config.nested_graph_breaks = True

    def __exit__(self, *_: object) -> None:
        self._config.nested_graph_breaks = self._before


# ---- distributed


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """True for a DTensor. Its module takes as long to load as half of torch, and where nothing has loaded it there is none."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_fully_sharded(module: object) -> TypeGuard[FSDPModule]:
    """True for a module that `fully_shard` was called with; as `is_sharded`, without loading FSDP2."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def fsdp_state(module: object) -> Any:
    """The state that `fully_shard` keeps for a module that it was called with."""
    wrapped: Any = module
    return wrapped._get_fsdp_state()


def sum_in_float32(state: Any) -> None:
    """Keep the sums of an `fsdp_state` in float32, once its first forward began. Raises RuntimeError for a torch that sums otherwise."""
    for group in _parameter_groups(state):
        if not hasattr(group, "_orig_dtype"):
            raise RuntimeError(
                f"torch {torch.__version__} rounds sums of gradients in another place than mmspeed knows; use torch 2.11 to 2.14"
            )
        group._orig_dtype = torch.float32


def dtensor_like(like: DTensor, local: Tensor) -> DTensor:
    """A DTensor of the placements of `like` whose local part is `local`, on any device; its memory is shared."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # not DTensor.from_local, which would bring a value in the host's memory to the mesh's devices
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, meta)
    return DTensor(local, spec, requires_grad=False)


def launched_processes(agent: Any) -> list[Any]:
    """The processes of a launcher's agent; none when another torch keeps them elsewhere."""
    context = getattr(agent, "_pcontext", None)
    return [handler.proc for handler in getattr(context, "subprocess_handlers", {}).values()]


@contextmanager
def asked_before_restarts(go_on: Callable[[dict[int, Any], int], bool]) -> Iterator[None]:
    """Make launchers that start inside call `go_on(failures by rank, restarts left)` before each restart; False ends the run instead."""
    from torch.distributed.launcher import api

    torchs_own = api.LocalElasticAgent

    class AskingAgent(torchs_own):  # type: ignore[misc, valid-type]
        """A launcher's agent that asks."""

        _remaining_restarts: int

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and self._remaining_restarts > 0:
                if not go_on(result.failures, self._remaining_restarts):
                    self._remaining_restarts = 0
            return result

    setattr(api, "LocalElasticAgent", AskingAgent)  # noqa: B010
    try:
        yield
    finally:
        setattr(api, "LocalElasticAgent", torchs_own)  # noqa: B010


# ---- pipelines


class PipelineCalls(Protocol):
    """What a step of a pipeline calls. Stages and micro-batches are numbers."""

    def like(self, stage: int, micro_batch: int) -> Sequence[Tensor]:
        """Tensors as those that come to a stage."""
        ...

    def forward(self, stage: int, micro_batch: int, came: tuple[Tensor, ...]) -> Any:
        """What goes on to the next stage, or the loss."""
        ...

    def before_backward(self, stage: int, last: bool) -> None:
        """Called before a backward pass, of input or of both; `last`: it is the stage's last one in one."""
        ...

    def after_weights(self, stage: int, last: bool) -> None:
        """Called after the gradients of weights that a pass left; `last`: there are no more of the stage."""
        ...

    def together(self, ahead: int, behind: int, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run the passes of a pair."""
        ...

    def around(self, kind: Any, stage: int, micro_batch: int) -> AbstractContextManager[object]:
        """Made around each backward pass."""
        ...

    def sent(self, what: str, to: int, tensors: Sequence[Tensor]) -> None:
        """Called with each message to another stage."""
        ...


class PipelineActions:
    """A table of a pipeline in torch's runtime, whose stages get receive buffers of each micro-batch's own shapes.

    torch's stages take the shapes of their first step, and abort at others. torch would also keep all that a step sends until its end; here
    outputs go with their backward, and a gradient with the next one.
    """

    def __init__(
        self,
        table: Sequence[Sequence[Any]],
        own: Sequence[int],
        stages: int,
        micro_batches: int,
        travels: int,
        device: torch.device,
        group: dist.ProcessGroup,
        take: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        """table: of `mmspeed.plan.schedules`. own: the stages of this process. travels: the number of tensors that do.

        take: gives a function that computes the gradients of weights that the last backward pass left; None: passes leave none.
        """
        from torch.distributed.pipelining import schedules as torch_schedules

        stage_class = pipeline_stage()
        self._stages = [stage_class(number, stages, micro_batches, travels, device, group, take) for number in own]
        self._schedule = torch_schedules._PipelineScheduleRuntime(
            self._stages, micro_batches, loss_fn=None, scale_grads=False
        )
        self._schedule.register_custom_function(torch_schedules.OVERLAP_F_B, self._pair)
        order = _torch_table(table)
        self._schedule.pipeline_order = order
        self._schedule._prepare_schedule_with_comms(order)
        self._schedule._stages_forward_initialized = self._schedule._stages_backward_initialized = True
        held = {stage.stage_index: stage for stage in self._stages}

        def send(action: Any, _context: Any) -> None:
            held[action.stage_index].send(action.microbatch_index, action.computation_type == torch_schedules.SEND_B)

        # `register_custom_function` takes computations alone
        self._schedule._comp_type_to_function_map |= {torch_schedules.SEND_F: send, torch_schedules.SEND_B: send}
        self._count = micro_batches

    def run(self, calls: PipelineCalls) -> None:
        """Run a step."""
        self._calls = calls
        self._schedule._has_backward = True
        for stage in self._stages:
            stage.begin(calls)
            stage.clear_runtime_states()
        numbers: list[Any] = [{"micro_batch": number} for number in range(self._count)]
        nothing: list[Any] = [None] * self._count
        logger = logging.getLogger("torch.distributed.pipelining.schedules")
        before, logger.disabled = logger.disabled, True  # on an error it logs the whole table
        try:
            self._schedule._step_microbatches([()] * self._count, numbers, nothing, None, return_outputs=False)
            for stage in self._stages:
                stage.wait_for(*stage.sent)
        finally:
            logger.disabled = before

    def _pair(self, action: Any, ctx: Any) -> None:
        """Run a pair, whose messages were asked for by actions before it."""
        from torch.distributed.pipelining.schedules import _wait_batch_p2p

        ahead, back = action.sub_actions
        stages = {stage.stage_index: stage for stage in self._stages}
        at, behind = ((each.stage_index, each.microbatch_index) for each in (ahead, back))
        for received, key in ((self._schedule.fwd_recv_ops, at), (self._schedule.bwd_recv_ops, behind)):
            _wait_batch_p2p(received.pop(key, []))

        def forward() -> None:
            number, micro_batch = at
            output = stages[number].forward_one_chunk(micro_batch, (), ctx.kwarg_mbs[micro_batch], False)
            if number + 1 in stages:
                stages[number + 1].set_local_fwd_input(output, micro_batch)

        def backward() -> None:
            number, micro_batch = behind
            full = back.computation_type == type(back.computation_type).FULL_BACKWARD
            counter = self._schedule.backward_counter
            counter[number] += full
            last = full and counter[number] == self._count
            stages[number].backward_one_chunk(micro_batch, full_backward=full, last_backward=last)
            if number - 1 in stages:
                stages[number - 1].set_local_bwd_input(stages[number].get_local_bwd_output(micro_batch), micro_batch)

        self._calls.together(at[0], behind[0], forward, counted_alike(backward))


def _torch_table(table: Sequence[Sequence[Any]]) -> dict[int, list[Any]]:
    """A table of `mmspeed.plan.schedules` as torch has it."""
    from torch.distributed.pipelining import schedules as torch_schedules

    kinds = {
        "forward": torch_schedules.FORWARD,
        "backward": torch_schedules.FULL_BACKWARD,
        "input": torch_schedules.BACKWARD_INPUT,
        "weight": torch_schedules.BACKWARD_WEIGHT,
    }

    def named(entry: Any) -> Any:
        if len(entry.parts) > 1:
            return torch_schedules._Action(-1, torch_schedules.OVERLAP_F_B, None, tuple(map(named, entry.parts)))
        return torch_schedules._Action(entry.stage, kinds[entry.kind], entry.batch)

    return {rank: list(map(named, row)) for rank, row in enumerate(table)}


def with_receipts(
    table: Sequence[Sequence[Any]], rank_of: Callable[[int], int], stages: int
) -> list[list[tuple[str, int, int]]]:
    """The passes of a table by rank in the order in which torch runs them, with the places of its receipts.

    Each is (what, stage, micro-batch): a kind of `mmspeed.plan.schedules`, or "receive_input" or "receive_gradient".
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    words = {
        torch_schedules.FORWARD: "forward",
        torch_schedules.FULL_BACKWARD: "backward",
        torch_schedules.BACKWARD_INPUT: "input",
        torch_schedules.BACKWARD_WEIGHT: "weight",
        torch_schedules.RECV_F: "receive_input",
        torch_schedules.RECV_B: "receive_gradient",
    }
    order = {rank: torch_schedules._add_unshard_reshard(row) for rank, row in _torch_table(table).items()}
    rows = torch_schedules._add_send_recv(order, rank_of, stages)
    parts = [[part for entry in rows[rank] for part in entry.sub_actions or (entry,)] for rank in sorted(rows)]
    return [
        [
            (words[part.computation_type], part.stage_index, int(part.microbatch_index or 0))
            for part in row
            if part.computation_type in words
        ]
        for row in parts
    ]


@cache
def pipeline_stage() -> Any:
    """torch's pipeline stage with buffers of each micro-batch's own shapes."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining._utils import _TensorMeta
    from torch.distributed.pipelining.schedules import _batch_p2p, _wait_batch_p2p
    from torch.distributed.pipelining.stage import _RecvInfo, _StageMeta

    class Stage(PipelineStage):
        """torch's stage with buffers that are made when a tensor is to come, and freed after its backward."""

        def __init__(
            self,
            number: int,
            stages: int,
            count: int,
            travels: int,
            device: torch.device,
            group: dist.ProcessGroup,
            take: Any,
        ) -> None:
            one = (torch.empty(1),)
            super().__init__(
                nn.Identity(), number, stages, device, input_args=one, output_args=one, group=group, dw_builder=take
            )
            self.count, self.travels = count, travels

        def begin(self, calls: PipelineCalls) -> None:
            self.calls = calls
            self.dw_runner.clear()
            self.losses: dict[int, Tensor] = {}
            self.has_backward, self.chunks = True, self.count
            self.args_recv_info, self.grad_recv_info = {}, {}
            self.sent: dict[int | str, list[Any]] = {}  # by micro-batch, and that of the last gradient
            after = [] if self.is_last else [self.stage_index + 1]
            self.act_send_info = {place: list(after) for place in range(self.travels)}
            self.grad_send_info = [None if self.is_first else self.stage_index - 1] * self.travels
            meta = tuple(_TensorMeta(torch.Size([0]), (1,), torch.float32, True) for _ in range(self.travels))
            inputs = () if self.is_first else meta
            self._stage_meta = _StageMeta(inputs=inputs, outputs=meta, input_grads=meta, output_grads=meta)

        def _room(self, tensors: Sequence[Tensor], source: int, grads: bool) -> tuple[Any, ...]:
            made = []
            for tensor in tensors:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                meta = _TensorMeta(buffer.shape, buffer.stride(), buffer.dtype, not grads)
                made.append(_RecvInfo(f"{source} to {self.stage_index}", source, buffer, meta))
            return tuple(made)

        def get_fwd_recv_ops(self, micro_batch: int) -> Any:
            if self.is_first:
                return []
            self.args_recv_info[micro_batch] = self._room(
                self.calls.like(self.stage_index, micro_batch), self.stage_index - 1, False
            )
            return super().get_fwd_recv_ops(micro_batch)

        def get_bwd_recv_ops(self, micro_batch: int) -> Any:
            if self.is_last:
                return []
            sent = self.fwd_cache[micro_batch][0]
            self.grad_recv_info[micro_batch] = self._room(sent, self.stage_index + 1, True)
            return super().get_bwd_recv_ops(micro_batch)

        def get_fwd_send_ops(self, micro_batch: int) -> Any:
            ops = super().get_fwd_send_ops(micro_batch)
            self.calls.sent("activations", self.stage_index + 1, [op.tensor for op in ops])
            return ops

        def get_bwd_send_ops(self, micro_batch: int) -> Any:
            ops = super().get_bwd_send_ops(micro_batch)
            self.calls.sent("gradients", self.stage_index - 1, [op.tensor for op in ops])
            return ops

        def set_local_fwd_input(self, outputs: Any, micro_batch: int) -> None:
            self.args_recv_info[micro_batch] = self._room(outputs, self.stage_index - 1, False)
            super().set_local_fwd_input(outputs, micro_batch)

        def set_local_bwd_input(self, grads: Any, micro_batch: int) -> None:
            self.grad_recv_info[micro_batch] = self._room(self.fwd_cache[micro_batch][0], self.stage_index + 1, True)
            super().set_local_bwd_input(grads, micro_batch)

        def send(self, micro_batch: int, gradient: bool) -> None:
            if gradient:
                self.wait_for("gradient")
            operations = (self.get_bwd_send_ops if gradient else self.get_fwd_send_ops)(micro_batch)
            self.sent["gradient" if gradient else micro_batch] = _batch_p2p(operations)

        def wait_for(self, *sent: int | str) -> None:
            for each in sent:
                _wait_batch_p2p(self.sent.pop(each, []))

        def forward_maybe_with_nosync(self, *came: Tensor, micro_batch: int) -> Any:
            output = self.calls.forward(self.stage_index, micro_batch, came)
            if self.is_last:
                self.losses[micro_batch] = output
            return output

        def backward_one_chunk(
            self, number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            self.calls.before_backward(self.stage_index, last_backward)
            self.wait_for(number)
            with self.calls.around("backward" if full_backward else "input", self.stage_index, number):
                super().backward_one_chunk(number, self.losses.pop(number, None), full_backward, last_backward)
                if full_backward and self.dw_builder is not None:
                    self.calls.after_weights(self.stage_index, last_backward)
            self.args_recv_info.pop(number, None)
            self.grad_recv_info.pop(number, None)

        def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:
            with self.calls.around("weight", self.stage_index, number):
                super().backward_weight_one_chunk(number, last_backward)
                self.calls.after_weights(self.stage_index, last_backward)

    return Stage


def keep_sums(module: Any) -> None:
    """Add gradients that came without a backward pass to those that `fully_shard` keeps, in the number type of its sums."""
    for group in _parameter_groups(fsdp_state(module)):
        for each in group.fsdp_params:
            gradient = each._unsharded_param.grad if hasattr(each, "_unsharded_param") else None
            if gradient is not None and each.unsharded_accumulated_grad is not None:
                each.unsharded_accumulated_grad += gradient
                each._unsharded_param.grad = None
            elif gradient is not None:
                each.to_accumulated_grad_if_needed()


def hold_whole(model: Any) -> None:
    """Gather all weights of a `fully_shard` model: they stay whole, and its hooks do nothing, until `sum_over_shards` of each module."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    fsdp_state(model)._lazy_init()
    for module in filter(is_fully_sharded, model.modules()):
        module.unshard()
        fsdp_state(module)._training_state = TrainingState.PRE_BACKWARD


def sum_over_shards(module: Any, root: bool = False) -> None:
    """Sum the gradients that a `fully_shard` module keeps over its shards, outside of a backward pass; that of the root comes last.

    Its weights are sharded again.
    """
    module.set_requires_gradient_sync(True, recurse=False)
    module.unshard()
    for group in _parameter_groups(fsdp_state(module)):
        group.post_backward()
    if root:
        fsdp_state(module)._root_post_backward_final_callback()


def _parameter_groups(state: Any) -> list[Any]:
    # torch 2.13 can have several groups of parameters a module, 2.11 has one
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


# ---- the loader's processes


def loader_processes(iterator: Any) -> Sequence[Any]:
    """The worker processes of a DataLoader's iterator."""
    workers: Sequence[Any] = iterator._workers
    return workers


def end_loader(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator.

    A worker that was killed may hold the lock of the event by which torch asks the others to end, and asking would wait for it for ever;
    torch relies on SIGCHLD there, which a child of the fork server does not send. The others are then killed.
    """
    from torch.utils.data import _utils

    if all(worker.is_alive() for worker in iterator._workers):
        iterator._shutdown_workers()
        return
    iterator._shutdown = True  # nothing is left for torch's own end to do, by name or when the iterator is collected
    if iterator._worker_pids_set:
        _utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.kill()
        worker.join()
    for queue in (*iterator._index_queues, iterator._worker_result_queue):
        queue.cancel_join_thread()
        queue.close()


# ---- the allocator. `memory`: the vendor's module, such as torch.cuda.memory


def record_memory_history(memory: Any, **settings: str | None) -> None:
    """Start, or stop, recording which code allocates memory."""
    memory._record_memory_history(**settings)


def memory_segments(memory: Any) -> list[dict[str, Any]]:
    """The allocator's segments on all devices, each with its blocks."""
    segments: list[dict[str, Any]] = memory._snapshot()["segments"]
    return segments


# ---- the memory of the CPU. torch's profiler notes it in the thread that started it alone


@cache
def _allocator() -> Any:
    """The library of torch's allocator."""
    return ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("*c10.*"))))


def cpu_totals(work: Callable[[], object]) -> list[tuple[int, int]]:
    """(bytes allocated or, below 0, freed, bytes in use behind it) in the course of `work`, of this thread and those of `counted_alike`.

    What other threads free, such as gloo's, counts in the bytes in use.
    """
    ctypes.c_bool.in_dll(_allocator(), "FLAGS_caffe2_report_cpu_memory_usage").value = True
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else some versions log each start and stop
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as recorded:
        work()
    assert recorded.kineto_results is not None
    found, left = [], list(recorded.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.total_allocated))
    return [(size, total) for _, size, total in sorted(found, key=lambda each: each[0])]


def counted_alike(work: Callable[[], None]) -> Callable[[], None]:
    """`work` for another thread, whose memory is noted with that of this one."""
    if not torch.autograd._profiler_enabled():
        return work
    c10 = _allocator()
    current = c10._ZN3c1020ThreadLocalDebugInfo7currentEv
    become = c10._ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E
    current.restype = become.restype = None
    own, none = (ctypes.c_void_p * 2)(), (ctypes.c_void_p * 2)()  # shared pointers, which are moved from
    current(ctypes.byref(own))

    def counted() -> None:
        become(ctypes.byref(own))
        try:
            work()
        finally:
            become(ctypes.byref(none))

    return counted


# ---- torch's memory tracker. Importing it imports torch's compiler, half a second of it


def memory_kinds() -> Any:
    """The enumeration of what memory is for: PARAM, BUFFER, GRAD, ACT, TEMP, OPT, OTH."""
    from torch.distributed._tools.mem_tracker import _MemRefType

    return _MemRefType


@cache
def memory_tracker_class() -> Any:
    """torch's MemTracker as a base class, with public names for what a subclass may change (`kind_of` to `before_backward`)."""
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.mod_tracker import ModTracker

    class Modules(ModTracker):
        """A tracker that does not wait for the gradients of a module's inputs: it would hold them, and so measure itself."""

        def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
            super()._fw_pre_hook(mod, ())

    class WatchedTracker(MemTracker):
        """A tracker that reports peaks of `device`."""

        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self._mod_tracker = Modules()
            self.device = device

        @property
        def in_backward(self) -> bool:
            return self._mod_tracker.is_bw

        @property
        def running(self) -> set[str]:
            """The names of the modules that are running, with the tracker's name for the whole."""
            return self._mod_tracker.parents

        def count(self, kind: Any, tensor: Tensor) -> None:
            """Count a tensor; one that is known keeps its kind."""
            super()._track(kind, tensor)

        def recount(self, kind: Any, tensor: Tensor) -> None:
            """Count a tensor as of this kind, whatever its kind was before."""
            self._update_and_maybe_create_winfos(tensor, kind)

        def kind_of(self, kind: Any) -> Any:
            return kind

        def peak_grew(self) -> None:
            pass

        def before_forward(self, module: nn.Module) -> None:
            pass

        def after_forward(self, module: nn.Module) -> None:
            pass

        def before_backward(self, module: nn.Module) -> None:
            pass

        def _track(self, reftype: Any, t: Tensor) -> None:
            super()._track(self.kind_of(reftype), t)

        def _update_peak_stats(self, peak_state: Any) -> None:
            before = self._peak_mem.get(self.device, 0)
            super()._update_peak_stats(peak_state)
            if self._peak_mem.get(self.device, 0) > before:
                self.peak_grew()

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
            self.before_forward(module)
            super()._pre_fw_hook(module, inputs)

        def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
            super()._post_fw_hook(module, inputs, outputs)
            self.after_forward(module)

        def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
            self.before_backward(module)
            super()._pre_bw_hook(module, args)

    return WatchedTracker
