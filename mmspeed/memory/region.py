"""A region: a part of the forward pass of which backward finds only some results, and computes the others again.

By torch's checkpoint (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016), which stops the second pass when it has all
that backward needs. What is kept of the first pass is told by kinds of operations, as in selective activation checkpointing
(Korthikanti et al., 2022); each kind's results are saved on the device, swapped to the host, or computed again. Torch's own selective
checkpoint has no way to swap: it computes again what it was told to offload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from mmspeed.replay import Kind, Record

from .swap import Group

Fate = Literal["save", "swap", "recompute"]

_MATMUL_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm",
    "convolution", "_convolution", "mkldnn_linear",
)  # fmt: skip
_ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def _overloads(names: tuple[str, ...]) -> set[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return {getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()}


@dataclass(frozen=True)
class Policy:
    """What becomes of the results of each kind of operation; those of all others are computed again."""

    matmul: Fate = "recompute"
    attention: Fate = "recompute"
    exchange: Fate = "save"
    inputs: Literal["save", "swap"] = "save"

    @property
    def swaps(self) -> bool:
        return "swap" in (self.matmul, self.attention, self.exchange, self.inputs)

    def fates(self) -> dict[Any, Fate]:
        """By operator, for those whose results are kept."""
        kept: dict[Any, Fate] = {}
        for names, fate in ((_MATMUL_NAMES, self.matmul), (_ATTENTION_NAMES, self.attention)):
            if fate != "recompute":
                kept |= dict.fromkeys(_overloads(names), fate)
        return kept


class _Pass(Record):
    """What one region keeps of its first pass. Results are given up as the second pass takes them."""

    def __init__(self, policy: Policy, fates: dict[Any, Fate], group: Group | None) -> None:
        super().__init__()
        self.policy, self.fates, self.group = policy, fates, group
        self.results: deque[Any] = deque()
        self.second = False
        self.aside = False  # inside of a result that is kept as a whole

    def put(self, fate: Fate, result: Any) -> None:
        def hold(tensor: Tensor) -> Callable[[], Tensor]:
            tensor = tensor.detach()  # what autograd gets is another object
            if fate == "swap" and self.group is not None:
                return self.group.store(tensor)
            version = tensor._version

            def unchanged() -> Tensor:
                if tensor._version != version:
                    raise RuntimeError(
                        "a result that a region keeps for backward was changed in place after it was made"
                    )
                return tensor

            return unchanged

        self.results.append(tree_map_only(Tensor, hold, result))

    def take(self) -> Any:
        if not self.results:
            raise RuntimeError(
                "a region keeps its results for one backward pass: a second one (retain_graph) finds none, and so does a second pass "
                "that computes other operations than the first"
            )
        return tree_map_only(_HELD, lambda give: give(), self.results.popleft())

    def kept(self, kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        fate: Fate = getattr(self.policy, kind)
        if fate == "recompute" or self.aside:
            return make()
        if self.second:
            return tuple(self.take())
        self.aside = True
        try:
            made = make()
        finally:
            self.aside = False
        self.put(fate, made)
        return made

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        try:
            with self.in_force(), _Operations(self) if self.fates else nullcontext():
                yield
        finally:
            if self.group is not None:
                self.group.close()

    @contextmanager
    def second_pass(self) -> Iterator[None]:
        self.second = True
        if self.group is not None:
            self.group.fetch()
        with self.in_force(), _Operations(self) if self.fates else nullcontext():
            yield


_HELD = type(lambda: None)


class _Operations(TorchDispatchMode):
    """Sees every operation of a pass: in the first it holds results, in the second it gives them in place of computing."""

    def __init__(self, record: _Pass) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = self.record
        fate = None if record.aside else record.fates.get(func)
        if fate is None:
            return func(*args, **(kwargs or {}))
        if record.second:
            return record.take()
        result = func(*args, **(kwargs or {}))
        record.put(fate, result)
        return result


def run_region(
    run: Callable[..., Any],
    *args: Any,
    policy: Policy,
    fates: dict[Any, Fate],
    group: Group | None,
    rng: bool,
    **kwargs: Any,
) -> Any:
    """`run(*args)`, of which backward finds what `policy` keeps.

    fates: `policy.fates()`, which is the same for every call. group: where swapped tensors go. rng: whether `run` draws random numbers
    (from torch's generators) that the second pass must draw again.
    """
    record = _Pass(policy, fates, group)
    inputs = group.hooks() if group is not None and policy.inputs == "swap" else nullcontext()
    with inputs:
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=rng,
            context_fn=lambda: (record.first_pass(), record.second_pass()),
            **kwargs,
        )
