"""Every underscored name of torch that mmspeed uses exists and has the expected behaviour.

Legend: B batch, A heads, N items, D head width.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils.data import DataLoader

from mmspeed import torch_internals as internals
from mmspeed.compute.wgrad import LeavingLinear, WeightGradients
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.mesh import process_group
from mmspeed.mixin import mix_in
from mmspeed.parallel import take_float32_gradients
from mmspeed.plan.schedules import Pipeline, ScheduleName
from tests.support.graphs import CountingBackend
from tests.support.spawn import run_ranks

CPU = Device("cpu", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def attention_inputs(dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and the gradient of the output, each (B, A, N, D)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 32, 16, generator=generator).to(device, dtype) for _ in range(4)]


def reference(q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, dout_BAND: Tensor) -> list[Tensor]:
    """(out, dq, dk, dv) by formulas in float64."""
    inputs = [x.detach().double().requires_grad_() for x in (q_BAND, k_BAND, v_BAND)]
    q, k, v = inputs
    out_BAND = F.softmax(q @ k.mT / 4, -1) @ v
    return [out_BAND.detach(), *torch.autograd.grad(out_BAND, inputs, dout_BAND.double())]


def log_sum_exp(q_BAND: Tensor, k_BAND: Tensor) -> Tensor:
    return (q_BAND.double() @ k_BAND.double().mT / 4).logsumexp(-1)


def agree(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_version_of() -> None:
    tensor = torch.zeros(4)
    assert internals.base_of(tensor) is None and internals.base_of(tensor[1:][1:]) is tensor
    view, before = tensor[1:], internals.version_of(tensor)
    view.add_(1)
    assert internals.version_of(tensor) == internals.version_of(view) == before + 1
    with torch.inference_mode():
        unversioned = torch.zeros(1)
    with pytest.raises(RuntimeError):
        internals.version_of(unversioned)


def test_negative_view() -> None:
    tensor = torch.tensor([1.0, -2.0])
    view = internals.negative_view(tensor)
    assert view.is_neg() and view.tolist() == [-1.0, 2.0] and view.data_ptr() == tensor.data_ptr()


def test_storage_address() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    address = internals.storage_address(tensor.untyped_storage())
    assert internals.storage_address(tensor[2:].detach().untyped_storage()) == address
    assert internals.storage_address(other.untyped_storage()) != address
    tensor.untyped_storage().resize_(0)
    assert internals.storage_address(tensor.untyped_storage()) == address


def test_storage_at() -> None:
    tensor = torch.zeros(4)
    pointer, other = (internals.weak_pointer(tensor.untyped_storage()) for _ in range(2))
    assert pointer == other and hash(pointer) == hash(other)
    storage = internals.storage_at(pointer)
    assert storage is not None and storage.nbytes() == 16 and storage.data_ptr() == tensor.data_ptr()
    internals.free_weak_pointer(other)
    del storage, tensor
    assert internals.storage_at(pointer) is None  # it kept nothing alive, and its address is given to no other storage
    internals.free_weak_pointer(pointer)


def test_lists_of_tensors() -> None:
    tensors, ends = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.full((3,), 3.0)]
    internals.lerp_each_(tensors, ends, 0.25)
    internals.multiply_each_(tensors, torch.tensor(0.5))
    assert [t.tolist() for t in tensors] == [[0.125] * 2, [0.75] * 3]
    tensors = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    internals.copy_each_(tensors, [torch.tensor([1.0, 1.001]), torch.tensor([3.0])])
    assert [t.tolist() for t in tensors] == [[1.0, 1.0], [3.0]] and tensors[0].dtype == torch.bfloat16


class Watch(internals.TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(internals.packet_of(func)))
        return func(*args, **(kwargs or {}))


def test_names_of_operators() -> None:
    names = set(internals.ATTENTION_NAMES + internals.MATMUL_NAMES) - {"mkldnn_linear"}
    assert not [name for name in names if not hasattr(torch.ops.aten, name)]
    assert internals.changes_arguments(torch.ops.aten.add_.Tensor)
    assert not internals.changes_arguments(torch.ops.aten.add.Tensor)
    assert [each.name for each in internals.parameters_of(torch.ops.aten.add.Tensor)] == ["self", "other", "alpha"]


def test_cpu_flash() -> None:
    q, k, v, dout = attention_inputs(torch.float32, "cpu")
    with Watch() as seen:
        out, lse = internals.cpu_flash(q, k, v)
    assert seen.names == [internals.CPU_FLASH]
    assert agree(out, reference(q, k, v, dout)[0], 1e-5) and agree(lse, log_sum_exp(q, k), 1e-5)
    actual = internals.cpu_flash_backward(dout, q, k, v, out, lse, 0.0, False, attn_mask=None, scale=0.25)
    assert all(agree(x, y, 1e-4) for x, y in zip(actual, reference(q, k, v, dout)[1:], strict=True))
    bias = torch.zeros(2, 1, 1, 32).index_fill_(3, torch.arange(16, 32), -torch.inf)
    masked, _ = internals.cpu_flash(q, k, v, 0.0, False, attn_mask=bias, scale=0.25)
    assert agree(masked, reference(q, k[:, :, :16], v[:, :, :16], dout)[0], 1e-5)


# What runs on CUDA alone: elsewhere, tensors of the meta device show that the operators take the arguments that we give.


def where() -> str:
    return "cuda" if torch.cuda.is_available() else "meta"


def right(actual: Tensor, expected: Tensor) -> bool:
    """True where a result has the right numbers, on the meta device the right shape."""
    return actual.shape == expected.shape and (actual.is_meta or agree(actual, expected, 2e-2))


def test_cuda_flash() -> None:
    q, k, v, dout = attention_inputs(torch.bfloat16, where())
    out, lse = internals.cuda_flash(q, k, v, 0.0, False, False, scale=0.25)[:2]
    assert right(out, reference(q, k, v, dout)[0]) and right(lse[..., :32], log_sum_exp(q, k))
    seed, unused = (torch.zeros(size, dtype=torch.uint64, device=q.device) for size in (2, 0))
    arguments = (dout, q, k, v, out, lse, None, None, 32, 32, 0.0, False, seed, unused)
    actual = internals.cuda_flash_backward(*arguments, scale=0.25)
    assert all(right(x, y) for x, y in zip(actual, reference(q, k, v, dout)[1:], strict=True))


def test_cuda_efficient() -> None:
    q, k, v, dout = attention_inputs(torch.float32, where())
    out, lse = internals.cuda_efficient(q, k, v, None, True, 0.0, False, scale=0.25)[:2]
    assert right(out, reference(q, k, v, dout)[0]) and right(lse[..., :32], log_sum_exp(q, k))
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
    arguments = (dout, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], False)
    actual = internals.cuda_efficient_backward(*arguments, scale=0.25)[:3]
    assert all(right(x, y) for x, y in zip(actual, reference(q, k, v, dout)[1:], strict=True))


def packed(x_BAND: Tensor) -> Tensor:
    """One head, the batch's sequences one after the other: (T, 1, D)."""
    return x_BAND[:, 0].flatten(0, 1)[:, None]


def test_varlen_flash() -> None:
    q, k, v, dout = attention_inputs(torch.bfloat16, where())
    ends = torch.tensor([0, 32, 64], dtype=torch.int32, device=q.device)
    arguments = (*map(packed, (q, k, v)), ends, ends, 32, 32, 0.0, False, False)
    out, lse = internals.varlen_flash(*arguments, scale=0.25)[:2]
    assert right(out, packed(reference(q, k, v, dout)[0]))
    if not lse.is_meta:  # its shape on the meta device is that of sequences of one length
        assert right(lse[0], log_sum_exp(q, k)[:, 0].flatten())


@needs_cuda
def test_varlen_flash_backward() -> None:
    q, k, v, dout = attention_inputs(torch.bfloat16, "cuda")
    ends = torch.tensor([0, 32, 64], dtype=torch.int32, device=q.device)
    sequences = (ends, ends, 32, 32, 0.0, False)
    out, lse = internals.varlen_flash(*map(packed, (q, k, v)), *sequences, False, scale=0.25)[:2]
    seed, unused = (torch.zeros(size, dtype=torch.uint64, device=q.device) for size in (2, 0))
    arguments = (*map(packed, (dout, q, k, v)), out, lse, *sequences, seed, unused)
    actual = internals.varlen_flash_backward(*arguments, scale=0.25)
    assert all(right(x, packed(y)) for x, y in zip(actual, reference(q, k, v, dout)[1:], strict=True))


def test_torchdispatchmode() -> None:
    class Doubled(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2

    tensor = torch.ones(1)
    with Doubled():
        actual = tensor + tensor
    assert actual.item() == 4 and (tensor + tensor).item() == 2


def test_faketensormode() -> None:
    with internals.FakeTensorMode():
        actual = torch.zeros(1 << 40) + 1
    assert actual.shape == (1 << 40,) and actual.device.type == "cpu"
    assert internals.is_fake(actual) and not internals.is_fake(torch.zeros(1))


def test_is_traceable_wrapper_subclass() -> None:
    with process_group(CPU):
        mesh = dist.init_device_mesh("cpu", (1,))
        spread = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
        assert internals.is_traceable_wrapper_subclass(spread)
    assert not internals.is_traceable_wrapper_subclass(torch.zeros(2))


def test_trees() -> None:
    assert internals.tree_leaves({"a": [1, (2,)], "b": None, "c": 3}) == [1, 2, None, 3]
    assert internals.tree_map_only(int, lambda n: n + 1, {"a": [1, "x"]}) == {"a": [2, "x"]}


def test_counting_changes() -> None:
    class Detaches(internals.TorchDispatchMode):
        def __init__(self, counting: bool) -> None:
            super().__init__()
            self.counting, self.shared = counting, False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if self.counting:
                with internals.counting_changes():
                    detached = result.detach()
            else:
                detached = result.detach()
            before = internals.version_of(detached)
            with internals.counting_changes():
                result.add_(1)
            self.shared = internals.version_of(detached) == before + 1
            return result

    for counting in (False, True):
        with Detaches(counting) as mode:
            torch.ones(2) * 2
        assert mode.shared == counting


def test_at_end_of_backward() -> None:
    tensor, seen = torch.ones(1, requires_grad=True), list[bool]()

    def ended() -> None:
        seen.append(tensor.grad is not None)
        raise UserError("refused")

    product = tensor * 2
    product.register_hook(lambda _: internals.at_end_of_backward(ended))
    with pytest.raises(UserError, match="refused"):
        product.sum().backward()
    assert seen == [True]


def test_what_a_backward_pass_knows() -> None:
    seen, tensor = list[tuple[bool, bool]](), torch.ones(1, requires_grad=True)
    product = tensor * 2
    product.register_hook(lambda _: seen.append((internals.in_backward(), internals.keeps_graph())))
    product.sum().backward(retain_graph=True)
    product.sum().backward()
    assert seen == [(True, True), (True, False)] and not internals.in_backward() and internals.keeps_graph()


def test_add_gradient() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for weight in (leaf, leaf.bfloat16()):
        with torch.no_grad():
            internals.add_gradient(weight, torch.full((2,), 3, dtype=torch.bfloat16))
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32 and leaf.grad.tolist() == [6, 6]


@pytest.mark.slow
def test_disable_dynamo() -> None:
    code = (
        "import sys, torch; known = set(sys.modules)\n"
        "from mmspeed.torch_internals import disable_dynamo\n"
        "f = disable_dynamo(lambda x: (torch.compiler.is_compiling(), x + 1))\n"
        "assert not {m for m in set(sys.modules) - known if m.startswith(('torch._inductor', 'torch.distributed.tensor'))}\n"
        "g = torch.compile(lambda x: (torch.compiler.is_compiling(), f(x)), backend='eager')\n"
        "inside, (outside, value) = g(torch.ones(1))\n"
        "assert inside and not outside and value.item() == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_allow_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    config = cast(Any, torch._dynamo.config)
    with config.patch(recompile_limit=3):
        internals.allow_recompiles(5)
        assert config.recompile_limit == 5
        internals.allow_recompiles(4)
        assert config.recompile_limit == 5


def test_graphs_between_breaks() -> None:
    """Two graphs around a break in a called function, where torch by itself makes four; the setting is as before afterwards."""
    import torch._dynamo

    @internals.disable_dynamo
    def outside(x: Tensor) -> Tensor:
        return x + 1

    def called(x: Tensor) -> Tensor:
        return outside(x * 2) * 3

    def calls(x: Tensor) -> Tensor:
        return called(x - 4) * 5

    torch._dynamo.reset()
    backend, config = CountingBackend(), cast(Any, torch._dynamo.config)
    compiled = torch.compile(calls, backend=backend)
    with internals.GraphsBetweenBreaks():
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), -75.0))
    assert backend.graphs == 2 and not config.nested_graph_breaks


def test_sum_in_float32() -> None:
    with process_group(CPU):
        layer = nn.Linear(2, 2).bfloat16()
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        assert internals.is_fully_sharded(layer) and internals.is_sharded(layer.weight)
        assert not internals.is_fully_sharded(nn.Linear(2, 2)) and not internals.is_sharded(torch.ones(1))
        state = internals.fsdp_state(layer)
        dtypes = []

        def before(*_: Any) -> None:
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                dtypes.append(group._orig_dtype)
            internals.sum_in_float32(state)
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                dtypes.append(group._orig_dtype)

        take_float32_gradients(layer)
        layer.register_forward_pre_hook(before)
        layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    assert dtypes == [torch.bfloat16, torch.float32]


def shards_after(waits: bool) -> list[Any]:
    """The summed shards of two micro-batches' gradients, in bfloat16 with sums in float32; of weights that wait, or by backward alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (2,))
    gradients = WeightGradients()
    if waits:
        mix_in(model[1], LeavingLinear)._gradients = gradients
    for module in (model[1], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for number in range(3):
        model.set_requires_gradient_sync(not waits and number == 2)
        x = torch.arange(16.0).reshape(2, 8) / (8 + number + dist.get_rank())
        model(x.requires_grad_()).square().sum().backward()
        gradients.take()()
        internals.keep_sums(model[1])
    if waits:
        internals.sum_over_shards(model[1])
        internals.sum_over_shards(model, root=True)
    return [cast(DTensor, p.grad).to_local().tolist() for p in model.parameters()]


def test_sums_over_shards_outside_of_a_backward_pass() -> None:
    assert run_ranks(shards_after, 2, True) == run_ranks(shards_after, 2, False)


def test_sum_in_float32_of_an_unknown_torch() -> None:
    with pytest.raises(RuntimeError, match="in another place than mmspeed knows"):
        internals.sum_in_float32(SimpleNamespace(_fsdp_param_group=object()))


def test_dtensor_like() -> None:
    with process_group(CPU):
        mesh = dist.init_device_mesh("cpu", (1,))
        like = distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()])
        local = torch.ones(4, 2, dtype=torch.bfloat16)
        actual = internals.dtensor_like(like, local)
        assert isinstance(actual, DTensor) and actual.placements == like.placements and actual.dtype == torch.bfloat16
        assert actual.shape == (4, 2) and actual.to_local().data_ptr() == local.data_ptr()


def test_launched_processes(tmp_path: Path) -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    logs = DefaultLogsSpecs(log_dir=str(tmp_path))
    context = start_processes("test", sys.executable, {0: ("-c", "pass")}, {0: {}}, logs)
    (process,) = internals.launched_processes(SimpleNamespace(_pcontext=context))
    assert process.wait(60) == process.returncode == 0
    context.close()
    assert "_pcontext" in LocalElasticAgent.__init__.__code__.co_names  # where torch's agent has it
    assert internals.launched_processes(None) == internals.launched_processes(SimpleNamespace()) == []


def test_end_loader() -> None:
    iterator = iter(DataLoader([1, 2, 3], num_workers=1, batch_size=None))  # type: ignore[arg-type,var-annotated]
    (process,) = internals.loader_processes(iterator)
    assert process.is_alive() and next(iterator) == 1
    internals.end_loader(iterator)
    assert not process.is_alive()


def test_end_loader_after_a_worker_was_killed() -> None:
    """It held the lock of the event by which torch asks workers to end: nobody else gets it any more."""
    context = multiprocessing.get_context("forkserver")
    data: Any = [torch.zeros(2), torch.ones(2)] * 50
    iterator = iter(DataLoader(data, num_workers=2, batch_size=None, multiprocessing_context=context))
    victim, other = internals.loader_processes(iterator)
    assert next(iterator).tolist() == [0, 0]
    iterator._workers_done_event._cond.acquire()
    victim.kill()
    victim.join()
    ended = threading.Thread(target=internals.end_loader, args=(iterator,), daemon=True)
    ended.start()
    ended.join(timeout=60)
    assert not ended.is_alive() and not other.is_alive()
    del iterator  # and nothing waits when it is collected


@needs_cuda
def test_memory_history_of_a_device() -> None:
    internals.record_memory_history(torch.cuda.memory, enabled="state", context="state", stacks="python")
    held = torch.zeros(1 << 20, device="cuda")
    blocks = [block for segment in internals.memory_segments(torch.cuda.memory) for block in segment["blocks"]]
    internals.record_memory_history(torch.cuda.memory, enabled=None)
    assert any(frame["filename"] == __file__ for block in blocks for frame in block.get("frames", ())) and held.is_cuda


def test_memory_segments() -> None:
    assert callable(torch.cuda.memory._snapshot) and callable(torch.cuda.memory._record_memory_history)
    memory = SimpleNamespace(_snapshot=lambda: {"segments": [{"blocks": []}]})
    assert internals.memory_segments(memory) == [{"blocks": []}]
    seen: dict[str, Any] = {}
    internals.record_memory_history(SimpleNamespace(_record_memory_history=seen.update), enabled="state")
    assert seen == {"enabled": "state"}


def test_memory_tracker_class() -> None:
    kinds, seen = internals.memory_kinds(), list[str]()
    assert {kind.name for kind in kinds} >= {"PARAM", "BUFFER", "GRAD", "ACT", "TEMP", "OPT", "OTH"}

    class Tracker(internals.memory_tracker_class()):  # type: ignore[misc]
        def kind_of(self, kind: Any) -> Any:
            return kinds.TEMP if kind == kinds.ACT else kind

        def peak_grew(self) -> None:
            seen.append("peak")

        def before_forward(self, module: nn.Module) -> None:
            seen.append(f"before {type(module).__name__} {self.in_backward} {len(self.running)}")

        def after_forward(self, module: nn.Module) -> None:
            seen.append(f"after {type(module).__name__}")

        def before_backward(self, module: nn.Module) -> None:
            seen.append(f"back {type(module).__name__} {self.in_backward}")

    layer, state = nn.Linear(64, 64, bias=False), torch.zeros(10)
    tracker = Tracker(torch.device("cpu"))
    assert isinstance(tracker, MemTracker)
    tracker.track_external(layer)
    tracker.count(kinds.OPT, state)
    tracker.count(kinds.GRAD, state)  # stays what it is
    with tracker:
        layer(torch.ones(8, 64)).sum().backward()
        snapshot = tracker.get_tracker_snapshot()[torch.device("cpu")]
        assert snapshot[kinds.PARAM] == 64 * 64 * 4 and snapshot[kinds.OPT] == 40 and snapshot[kinds.ACT] == 0
        tracker.recount(kinds.GRAD, state)
        assert tracker.get_tracker_snapshot()[torch.device("cpu")][kinds.OPT] == 0
    assert "peak" in seen
    events = [event for event in seen if event != "peak"]
    assert events == ["before Linear False 2", "after Linear", "back Linear True"]


class TwoStages:
    """The calls of a step of two stages that multiply, of micro-batches of several lengths."""

    xs = (torch.arange(1.0, 3.0), torch.arange(1.0, 5.0), torch.ones(1))

    def __init__(self) -> None:
        self.weights = [torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
        self.told: list[Any] = []

    def like(self, stage: int, number: int) -> list[Tensor]:
        return [self.xs[number]]

    def forward(self, stage: int, number: int, came: tuple[Tensor, ...]) -> Any:
        return (self.xs[number] * self.weights[0],) if stage == 0 else (came[0] * self.weights[1]).square().sum()

    def before_backward(self, stage: int, last: bool) -> None:
        self.told += [stage] * last

    def after_weights(self, stage: int, last: bool) -> None:
        self.told.append(("weights", stage, last))

    def together(self, ahead: int, behind: int, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.told.append("pair")
        forward()
        backward()

    def around(self, kind: Any, stage: int, number: int) -> Any:
        return nullcontext()

    def sent(self, what: str, to: int, tensors: Sequence[Tensor]) -> None:
        self.told.append((what, to, [tensor.numel() for tensor in tensors]))


def staged(schedule: ScheduleName) -> tuple[float, list[Any]]:
    """The gradient of this process's stage, and what a step told."""
    rank, group, pipeline = dist.get_rank(), dist.group.WORLD, Pipeline(2, 1, 0, schedule)
    assert group is not None
    calls, take = TwoStages(), (lambda: lambda: None) if pipeline.splits else None
    actions = internals.PipelineActions(pipeline.table(3), [rank], 2, 3, 1, torch.device("cpu"), group, take)
    for _ in range(2):
        calls.told.clear()
        actions.run(calls)
    assert internals.pipeline_stage() is internals.pipeline_stage()
    grad = calls.weights[rank].grad
    assert grad is not None
    return float(grad), calls.told


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_pipeline_actions_take_micro_batches_of_any_shapes(schedule: ScheduleName) -> None:
    (first, ahead), (second, behind) = run_ranks(staged, 2, schedule)
    squares = 5 + 30 + 1  # of all inputs
    assert first == pytest.approx(2 * 2 * 2 * 9 * squares) and second == pytest.approx(2 * 2 * 3 * 4 * squares)
    sizes = [[2], [4], [1]]
    assert [each for each in ahead if isinstance(each, tuple) and each[0] == "activations"] == [
        ("activations", 1, size) for size in sizes
    ]
    assert [each for each in behind if isinstance(each, tuple) and each[0] == "gradients"] == [
        ("gradients", 0, size) for size in sizes
    ]
    if schedule == "zb_h1":
        assert [each for each in ahead if isinstance(each, tuple) and each[0] == "weights"] == [
            ("weights", 0, last) for last in (False, False, True)
        ]
    else:
        assert ahead.count(0) == behind.count(1) == 1


def test_a_table_with_receipts_as_torch_runs_it() -> None:
    pipeline = Pipeline(2, 2, 0, "overlap")
    rows = internals.with_receipts(pipeline.table(8), pipeline.rank_of, pipeline.stages)
    for rank, row in enumerate(pipeline.table(8)):
        passes = [(part.kind, part.stage, part.batch) for entry in row for part in entry.parts]
        assert [each for each in rows[rank] if not each[0].startswith("receive")] == passes
        for place, (kind, stage, batch) in enumerate(rows[rank]):
            came = {"forward": ("receive_input", stage, batch), "backward": ("receive_gradient", stage, batch)}.get(
                kind
            )
            first_or_last = stage == (0 if kind == "forward" else pipeline.stages - 1)
            assert came is None or (came in rows[rank][:place]) == (not first_or_last)
    pairs = [entry for entry in internals._torch_table(pipeline.table(8))[0] if entry.sub_actions]
    assert len(pairs) == sum(len(entry.parts) == 2 for entry in pipeline.table(8)[0])


def test_memory_that_other_threads_take_and_free() -> None:
    def work() -> None:
        box = [torch.empty(5000)]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(box.clear).result()  # as gloo's threads do, which are not profiled
            pool.submit(internals.counted_alike(lambda: box.extend([torch.empty(6000), torch.empty(2000)]))).result()
            torch.empty(500)
            pool.submit(internals.counted_alike(box.clear)).result()
        torch.empty(8100)

    for _ in range(2):
        (size, total), *events = internals.cpu_totals(work)
        assert max(later for _, later in events) - (total - size) == 4 * 8500
        assert events[-1][1] == total - size
    assert Path(internals._allocator()._name).name.startswith("libc10")


def test_weights_that_are_held_whole() -> None:
    """And hooks that do nothing, until gradients are summed: a pass that ends frees nothing of one that goes on."""
    with process_group(CPU):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = dist.init_device_mesh("cpu", (1,))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        model.set_requires_gradient_sync(False)
        internals.hold_whole(model)
        out = model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        out.sum().backward()
        assert not any(internals.is_sharded(parameter) for parameter in model.parameters())
        groups = [internals._parameter_groups(internals.fsdp_state(module)) for module in (model[0], model)]
        assert [len(group) for group in groups] == [1, 1]
        internals.sum_over_shards(model[0])
        internals.sum_over_shards(model, root=True)
        assert all(internals.is_sharded(parameter) for parameter in model.parameters())
        assert torch.equal(cast(DTensor, model[1].bias.grad).to_local(), torch.full((4,), 4.0))


def test_asked_before_restarts() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    asked: list[tuple[list[int], int]] = []

    def go_on(failures: dict[int, Any], left: int) -> bool:
        asked.append(([failure.exitcode for failure in failures.values()], left))
        return left == 3

    config = api.LaunchConfig(
        1, 1, 1, run_id="asked", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=3, monitor_interval=0.05
    )
    own = api.LocalElasticAgent
    with pytest.raises(ChildFailedError), internals.asked_before_restarts(go_on):
        api.elastic_launch(config, sys.executable)("-c", "import sys; sys.exit(3)")
    assert asked == [([3], 3), ([3], 2)]
    assert api.LocalElasticAgent is own


class ShardedLists(internals.TorchDispatchMode):
    """The operators that are called with lists of sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(part, list | tuple) and any(isinstance(t, DTensor) for t in part) for part in args):
            self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_adamw_of_parts_is_adamw_bit_by_bit() -> None:
    """And torch is asked for no list of sharded tensors, whose layouts it would derive."""
    results, lists = [], []
    for kind in (torch.optim.AdamW, internals.AdamWOfParts):
        with process_group(CPU):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
            optimizer = kind(model.parameters(), lr=0.1, foreach=True)
            for _ in range(3):
                model(torch.ones(2, 5)).square().sum().backward()
                with ShardedLists() as seen:
                    optimizer.step()
                optimizer.zero_grad()
            states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            assert all(isinstance(state, DTensor) for state in states)
            results.append([tensor.full_tensor() for tensor in (*model.parameters(), *states)])
            lists.append({name for name in seen.names if name.startswith("_foreach")})
    assert all(map(torch.equal, *results))
    assert lists[0] and not lists[1]


def test_adamw_of_parts_leaves_other_tensors_to_adamw() -> None:
    """Plain ones, and gradients that are summands."""
    for sharded in (False, True):
        with process_group(CPU):
            mesh, value = dist.init_device_mesh("cpu", (1,)), torch.tensor([1.0, 2.0])
            parameters = []
            for _ in range(2):
                weight = value.clone()
                parameter = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]) if sharded else weight)
                parameter.grad = DTensor.from_local(value, mesh, [Partial()]) if sharded else value
                parameters.append(parameter)
            for kind, parameter in zip((torch.optim.AdamW, internals.AdamWOfParts), parameters, strict=True):
                kind([parameter], lr=0.1, foreach=True).step()
            first, second = (p.full_tensor() if isinstance(p, DTensor) else p for p in parameters)
            assert torch.equal(first, second) and not torch.equal(first, value)
