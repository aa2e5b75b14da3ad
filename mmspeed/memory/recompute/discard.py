"""Discard and restore results: free one after its use, and compute it again when the gradient of its user arrives.

After Megatron-LM's checkpoint without output and MindSpeed's recomputation of activation functions. It is the second implementation of what
a region does by stopping early (`memory.region`), and its oracle: gradients and bytes kept after the forward pass are the same. The second
result is copied to where the first was, so for a moment it exists twice.

The functions whose results are freed run with their graph, of which no node holds a tensor, so they may use tensors that are not
arguments. Results of an exchange between devices are not freed, unless they may be exchanged again: then only the part before the exchange
is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import get_device_states, set_device_states

from mmspeed.replay import ExchangeRecord
from mmspeed.torch_internals import base_of, storage_address, storage_at, version_of

ONCE = "a discarded result is restored for one backward pass only, not for a second one (retain_graph)"


class Discard:
    """Results that are freed when `use` has used them.

    Args:
        exchange_again: whether results of exchanges are freed too, and exchanged again.
        rng: whether functions draw random numbers (from torch's generators) that must be drawn again.
    """

    def __init__(self, *, exchange_again: bool = False, rng: bool = False) -> None:
        self.exchange_again, self.rng = exchange_again, rng
        self.outputs: list[Output] = []
        self.restored = False

    def make(self, f: Callable[..., Tensor], *args: Any) -> Output:
        """The output of `f(*args)`, to be freed. Arguments may be earlier outputs.

        Raises ValueError where the result is no tensor with memory of its own.
        """
        output = Output(f, args, self.exchange_again, self.rng)
        self.outputs.append(output)
        return output

    def use(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """The result of `run(*args)`, where arguments may be outputs; then all outputs are freed until the result's gradient arrives.

        `run` must not change an output, and may keep it for its backward only. Raises ValueError where it does otherwise, and where
        an output is not kept at all.
        """
        result = run(*map(_value, args))
        self._check(result)
        for output in self.outputs:
            output.value = None
        if not result.requires_grad:  # none of them is kept
            self.outputs.clear()
            return result
        for place, output in enumerate(self.outputs):
            used_later = any(argument is output for later in self.outputs[place + 1 :] for argument in later.args)
            output.free(used_later)
        result.register_hook(self._restore)
        return result

    def _check(self, result: Tensor) -> None:
        if not isinstance(result, Tensor):
            raise ValueError(f"discard: the user of a result must return one tensor, not {type(result).__name__}")
        for output in self.outputs:
            assert output.value is not None
            if version_of(output.value) != output.version:
                raise ValueError("discard: a result was changed in place by its user, so it cannot be computed again")
            if _same_memory(result, output.value):
                raise ValueError("discard: the user of a result returns a view of it, which would lose its values")

    def _restore(self, _: Tensor | None = None) -> None:
        """Restore the outputs in the order of the forward pass: a function may need an earlier output."""
        if self.restored:
            raise RuntimeError(ONCE)
        self.restored = True
        for output in self.outputs:
            output.restore()
        for output in self.outputs:
            output.value, output.args, output.f = None, (), _never


def discarded(
    before: Callable[..., Tensor], run: Callable[[Tensor], Tensor], *args: Any, exchange_again: bool = False
) -> Tensor:
    """The result of `run(before(*args))`, keeping all for backward but the result of `before`. Raises ValueError as `Discard` does."""
    discard = Discard(exchange_again=exchange_again)
    return discard.use(run, discard.make(before, *args))


class Output:
    """A result that is freed. `value` is its tensor until then, and while others are computed again."""

    def __init__(self, f: Callable[..., Tensor], args: tuple[Any, ...], exchange_again: bool, rng: bool) -> None:
        self.f, self.args = f, args
        self.record = ExchangeRecord(exchange_again, within_region=True)
        self.circumstances = _Circumstances.now(args, rng)
        self.packed, self.saved = 0, list[Tensor | None]()
        with self.record.in_force(), saved_tensors_hooks(self._pack, self._unpack):
            value = _narrowed(f(*map(_value, args)))
        if not isinstance(value, Tensor):
            raise ValueError(
                f"discard: a function whose result is freed must return one tensor, not {type(value).__name__}"
            )
        self.value: Tensor | None = value
        self.requires_grad = value.requires_grad
        tensors = [x for x in map(_value, args) if isinstance(x, Tensor)]
        of_others = (value.is_leaf and value.requires_grad) or ((base := base_of(value)) is not None and base.is_leaf)
        if of_others or any(_same_memory(value, x) for x in tensors):
            raise ValueError("discard: the result is an input, or a view of one, and has no memory of its own to free")
        self.version, self.layout = version_of(value), (value.shape, value.stride(), value.dtype)
        self.memory = StorageWeakRef(value.untyped_storage())
        self.kept = any(_same_memory(value, x) for x in self.record.tensors())
        self.storage: torch.UntypedStorage | None = None
        self.bytes = value.untyped_storage().nbytes()

    def _pack(self, _: Tensor) -> int:
        self.packed += 1
        return self.packed - 1

    def _unpack(self, place: int) -> Tensor:
        if not self.saved:
            raise RuntimeError("discard: a freed result got a gradient from elsewhere than its user")
        tensor = self.saved[place]
        if tensor is None:
            raise RuntimeError(ONCE)
        self.saved[place] = None
        return tensor

    def free(self, used_later: bool) -> None:
        """Free the memory; other holders of the tensor see it empty. `used_later`: by a function whose result is freed too."""
        if self.kept:
            return
        storage = storage_at(self.memory.cdata)
        if storage is None:
            if not used_later:
                raise ValueError(
                    "discard: the user of a result does not keep it for backward, so there is nothing to free"
                )
            return
        storage.resize_(0)
        self.storage = storage

    def restore(self) -> None:
        """Run the function again: its result goes back to its place, and the tensors of its backward are kept until that runs."""
        again = list[Tensor | None]()

        def pack(tensor: Tensor) -> None:
            again.append(tensor.detach())

        arguments = [_detached(argument) for argument in self.args]
        with self.circumstances.again(), self.record.in_force(), saved_tensors_hooks(pack, _never), torch.enable_grad():
            value = _narrowed(self.f(*arguments)).detach()
        if len(again) != self.packed or (value.shape, value.stride(), value.dtype) != self.layout:
            raise RuntimeError("discard: the function computes something else when it runs again")
        self.saved, self.value = again, value
        if self.storage is not None:
            self.storage.resize_(self.bytes)
            self.storage.copy_(value.untyped_storage())  # unseen by version counters: the values are the same as before
            self.storage = None


@dataclass(frozen=True)
class _Circumstances:
    """The state that a function's result depends on beside its arguments: autocast, and that of torch's generators."""

    autocast: dict[str, dict[str, Any]]  # by type of device
    states: tuple[Tensor, list[int], list[Tensor]] | None = field(default=None)

    @classmethod
    def now(cls, args: tuple[Any, ...], rng: bool) -> _Circumstances:
        kinds = {"cpu"} | {x.device.type for x in map(_value, args) if isinstance(x, Tensor)}
        autocast = {
            kind: {
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        }
        return cls(autocast, (torch.get_rng_state(), *get_device_states(*map(_value, args))) if rng else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as opened:
            for kind, setting in self.autocast.items():
                opened.enter_context(torch.autocast(kind, **setting))
            if self.states is not None:
                host, devices, of_devices = self.states
                opened.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(host)
                set_device_states(devices, of_devices)
            yield


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Output) else argument


def _detached(argument: Any) -> Any:
    """A tensor outside of the graph, for the second run."""
    value = _value(argument)
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(argument.requires_grad)


def _narrowed(value: Tensor) -> Tensor:
    """The value, under autocast in its dtype, to which a matrix product would cast it anyway before keeping it."""
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or not torch.is_autocast_enabled(value.device.type)
    ):
        return value
    return value.to(torch.get_autocast_dtype(value.device.type))


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return storage_address(one.untyped_storage()) == storage_address(other.untyped_storage())


def _never(_: Any) -> Tensor:
    raise RuntimeError("the second run of a function has no backward of its own")
