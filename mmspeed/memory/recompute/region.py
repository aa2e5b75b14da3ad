"""Run a region: a part of the forward pass that keeps only some results for backward, and computes the others again.

It uses torch's checkpoint (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016), which stops the second pass when it has all
that backward needs. Results of the first pass are kept by kinds of operations, as in selective activation checkpointing
(Korthikanti et al., 2022); each kind's results are saved on the device, swapped to the host, or computed again. Torch's own selective
checkpoint cannot swap: it computes results again that it should offload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mmspeed.memory.offload.offloader import OffloadGroup
from mmspeed.memory.offload.storage_view import guarded
from mmspeed.replay import DecisionRecord, Kind, TensorFactory, apart
from mmspeed.torch_internals import (
    ATTENTION_NAMES,
    MATMUL_NAMES,
    TorchDispatchMode,
    changes_arguments,
    counting_changes,
    tree_map_only,
    version_of,
)

OpPolicy = Literal["save", "offload", "recompute"]


def _overloads(names: tuple[str, ...]) -> set[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    overloads = {
        getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()
    }
    # those that write to an argument cannot be replaced by their result
    return {overload for overload in overloads if not changes_arguments(overload)}


@dataclass(frozen=True)
class RegionPolicy:
    """The policy for the results of each kind of operation; those of all others are computed again."""

    matmul: OpPolicy = "recompute"
    attention: OpPolicy = "recompute"
    exchange: OpPolicy = "save"
    inputs: Literal["save", "offload"] = "save"

    @property
    def swaps(self) -> bool:
        return "offload" in (self.matmul, self.attention, self.exchange, self.inputs)

    def op_policies(self) -> dict[Any, OpPolicy]:
        """The policy of each operator whose results are kept."""
        kept: dict[Any, OpPolicy] = {}
        for names, fate in ((MATMUL_NAMES, self.matmul), (ATTENTION_NAMES, self.attention)):
            if fate != "recompute":
                kept |= dict.fromkeys(_overloads(names), fate)
        return kept


@dataclass(frozen=True)
class _StoredResult:
    """A kept tensor, returned by `give`."""

    give: Callable[[], Tensor]


class _RegionRecord(DecisionRecord):
    """The results that one region keeps of its first pass, until the second pass takes them."""

    within_region = True

    def __init__(self, policy: RegionPolicy, fates: dict[Any, OpPolicy], group: OffloadGroup | None) -> None:
        super().__init__()
        self.policy, self.op_policies, self.group = policy, fates, group
        self.results: deque[tuple[Any, Any]] = deque()  # (operator or key, stored result)
        self.second = False
        self.aside = False  # inside of a part that is kept, or computed again, as a whole

    def put(self, what: Any, fate: OpPolicy, result: Any) -> None:
        def hold(tensor: Tensor) -> _StoredResult:
            tensor = tensor.detach()  # what autograd gets is another object
            if fate == "offload" and self.group is not None:
                return _StoredResult(self.group.store(tensor))
            version = version_of(tensor)

            def unchanged() -> Tensor:
                if version_of(tensor) != version:
                    raise RuntimeError(
                        "a result that a region keeps for backward was changed in place after it was made"
                    )
                return tensor

            return _StoredResult(unchanged)

        with counting_changes():
            self.results.append((what, tree_map_only(Tensor, hold, result)))

    def take(self, what: Any) -> Any:
        if not self.results:
            raise RuntimeError(
                "a region keeps its results for one backward pass: none are left for a second one (retain_graph), nor for a second "
                "pass that computes other operations than the first"
            )
        of_first, held = self.results.popleft()
        if of_first != what:
            now, then = (one[0] if isinstance(one, tuple) else one for one in (what, of_first))
            raise RuntimeError(
                f"the second pass of a region computes {now} where the first computed {then if now != then else 'another one'}"
            )
        return tree_map_only(_StoredResult, lambda one: one.give(), held)

    def holds(self, kind: Kind) -> bool:
        fate: OpPolicy = getattr(self.policy, kind)
        return fate != "recompute"

    def checkpointed(self, kind: Kind, make: TensorFactory, what: object = None) -> tuple[Tensor, ...]:
        fate: OpPolicy = getattr(self.policy, kind)
        if fate != "recompute" and self.second:
            return tuple(self.take((kind, what)))
        with self._aside():  # its own operations are not kept one by one
            if fate == "recompute":
                return super().checkpointed(kind, make, what)
            with apart():
                results = super().checkpointed(kind, make, what)
        self.put((kind, what), fate, results)
        return results

    @contextmanager
    def _aside(self) -> Iterator[None]:
        before, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = before


class _Phase:
    """The first or the second pass of a region. It may be entered again: autograd does so for a retained graph."""

    def __init__(self, record: _RegionRecord, second: bool) -> None:
        self.record, self.second = record, second
        self.open = ExitStack()

    def __enter__(self) -> None:
        record = self.record
        record.second = self.second
        with ExitStack() as opened:
            if record.group is not None:
                if self.second:
                    record.group.fetch()
                else:
                    opened.callback(record.group.close)
            opened.enter_context(record.in_force())
            if record.op_policies:
                opened.enter_context(_Operations(record))
            self.open = opened.pop_all()

    def __exit__(self, *error: Any) -> None:
        self.open.close()
        if self.second:  # it stopped when backward had all that it needs
            self.record.results.clear()


class _Operations(TorchDispatchMode):
    """A mode that stores results of operations in the first pass, and returns them in the second instead of computing.

    Only operations whose gradient is recorded count: others, such as those of a replayed plan, may run in the first pass only.
    """

    supports_higher_order_operators = True  # they are computed again, as are all operators without a policy

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return (
            True  # operations inside a kernel of torch.compile do not count; otherwise torch would not use the kernel
        )

    def __init__(self, record: _RegionRecord) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = self.record
        fate = None if record.aside or not torch.is_grad_enabled() else record.op_policies.get(func)
        if fate is None:
            return func(*args, **(kwargs or {}))
        if record.second:
            return record.take(func)
        result = func(*args, **(kwargs or {}))
        record.put(func, fate, result)
        return result


def run_region(
    run: Callable[..., Any],
    *args: Any,
    policy: RegionPolicy,
    fates: dict[Any, OpPolicy],
    group: OffloadGroup | None,
    rng: bool,
    **kwargs: Any,
) -> Any:
    """The result of `run(*args)`, of which backward has the results that `policy` keeps.

    fates: `policy.op_policies()`, which is the same for every call. group: takes swapped tensors. rng: whether `run` draws random numbers
    (from torch's generators) that the second pass must draw again.
    """
    record = _RegionRecord(policy, fates, group)
    inputs = _offloaded_inputs(group) if group is not None and policy.inputs == "offload" else nullcontext()
    with inputs:
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=rng,
            context_fn=lambda: (_Phase(record, second=False), _Phase(record, second=True)),
            **kwargs,
        )


def _offloaded_inputs(group: OffloadGroup) -> saved_tensors_hooks:
    """Hooks that send kept inputs to the host, except positions and masks, which a model makes once and all its blocks share."""

    def keep(tensor: Tensor) -> Callable[[], Tensor]:
        return group.store(tensor) if tensor.is_floating_point() else guarded(tensor)

    return saved_tensors_hooks(keep, lambda give: give())
