"""Wrap an optimizer so that its float32 weights and states may lie outside of the device's memory between its steps.

The wrapper goes around any torch optimizer. Parameters are taken in buckets; the optimizer inside sees the masters of one bucket at a time,
while the next bucket comes from the host's memory and the previous one leaves for it. The tiers change only where weights and states are:
every tier gives the plain optimizer's bits. After the swapped and virtual optimizers of MindSpeed and its compressed copies of
parameters; there each is one optimizer's, here they are one wrapper.

It works for optimizers that update each parameter from its own gradient, weights and states (SGD, the Adam family, Muon, 8-bit states); not
for those that use all parameters together (Prodigy, LBFGS), nor for those that read weights when they are constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory.offload.copies import CopyEngine, HostPool, copies_for
from mmspeed.torch_internals import is_sharded

from .master_weights import local_gradient, local_part, masters_for
from .states import DeviceStates, State, states_for, transform

MasterTier = Literal["parameters", "float32", "split", "host"]
StateTier = Literal["device", "host"]


def cut_into_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in their order, cut where a bucket's part on this process would exceed so many bytes in float32. None is empty.

    A bucket's parameters have one number type.
    """
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        nbytes = 4 * local_part(parameter).numel()
        full = filled and filled + nbytes > bucket_bytes
        if not buckets or full or buckets[-1][-1].dtype != parameter.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += nbytes
    return buckets


class TieredOptimizer:
    """An optimizer that steps a model's parameters bucket by bucket. `make` builds the optimizer inside, over groups of masters.

    Masters are plain float32 tensors, the parts of parameters that this process holds. `param_groups` are the inner optimizer's, with
    masters in the order of the parameters; learning rates are set there.

    When a step fails (memory, a copy) the error is raised as it is. If weights or states may have changed by then, any later read or step
    raises UserError: some of them would be of this step and some of the previous one.
    Raises ValueError for parameters of a dtype that the tier does not have.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        master: MasterTier,
        states: StateTier,
        bucket_bytes: int,
        device: Device,
        copies: CopyEngine | None = None,
    ) -> None:
        parameters = [p for group in groups for p in group["params"]]
        if not parameters or len({id(p) for p in parameters}) < len(parameters):
            raise ValueError("an optimizer needs parameters, and each in one group only")
        copies = copies or copies_for(device)
        pool = HostPool(device, "leave the optimizer's weights or states on the device: memory.master, memory.states")
        self.device, self.master, self.states = device, master, states
        self.buckets = cut_into_buckets(parameters, bucket_bytes)
        self._where = {p: (b, k) for b, bucket in enumerate(self.buckets) for k, p in enumerate(bucket)}
        self._masters = [masters_for(master, bucket, device, copies, pool) for bucket in self.buckets]
        self.inner = make([{**group, "params": [self.master_of(p) for p in group["params"]]} for group in groups])
        # mapped, where the device has such memory
        mapped = states == "host" and device.swapped_empty((1,), torch.float32) is not None
        self._states: list[DeviceStates] = [
            states_for("mapped" if mapped else states, m.masters, self.inner.state, device, copies, pool)
            for m in self._masters
        ]
        self._group_of = {m: g for g, group in enumerate(self.param_groups) for m in group["params"]}
        self._narrow = self._by_bucket()
        self._stepped: set[int] = set()  # buckets, in this step
        # by group: the values that the step has changed, before and after
        self._advanced: dict[int, dict[str, tuple[Any, Any]]] = {}
        self._fetched: set[int] = set()  # buckets that are to be stepped
        self._leaving: list[int] = []  # buckets, oldest first
        self._loading: int | None = None  # bucket whose states are being set
        self._failure: str | None = None
        for box in self._states:
            box.collect()  # for optimizers that make their states when constructed
        self.finish()

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The inner optimizer's parameter, which it has in its groups."""
        bucket, index = self._where[parameter]
        return self._masters[bucket].masters[index]

    def _by_bucket(self) -> list[list[list[nn.Parameter]]]:
        """The masters of each group that are in a bucket, by bucket and group."""
        narrow: list[list[list[nn.Parameter]]] = [[[] for _ in self.param_groups] for _ in self.buckets]
        for b, box in enumerate(self._masters):
            for m in box.masters:
                narrow[b][self._group_of[m]].append(m)
        return narrow

    # ---- the step ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        for parameter in self._where:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.finish()
        order = [b for b, bucket in enumerate(self.buckets) if any(p.grad is not None for p in bucket)]
        for k, bucket in enumerate(order):
            for ahead in order[k : k + 2]:  # the second comes while the first is stepped
                self.prefetch(ahead)
            self.step_bucket(bucket)
        self.finish()

    @torch.no_grad()
    def prefetch(self, bucket: int) -> None:
        """Begin to bring a bucket from the host's memory. One bucket may be leaving meanwhile: older ones are waited for."""
        with self._whole():
            while len(self._leaving) > 1 or self._leaving == [bucket]:
                self._settle_oldest()
            self._fetched.add(bucket)
            self._masters[bucket].fetch()
            self._states[bucket].fetch()

    @torch.no_grad()
    def step_bucket(self, bucket: int) -> None:
        """Update one bucket's parameters that have gradients. Call `finish` after the last bucket of a step."""
        if bucket in self._stepped or self._loading is not None:
            self.finish()
        self.prefetch(bucket)
        masters, states = self._masters[bucket], self._states[bucket]
        gradients = [local_gradient(p) for p in masters.parameters]
        with self._whole():
            if all(gradient is None for gradient in gradients):
                self._stepped.add(bucket)
                return
            states.put()
            masters.open()
            self._stepped.add(bucket)
            for m, gradient in zip(masters.masters, gradients, strict=True):
                m.grad = gradient
            del gradients
            with self._narrowed(bucket):
                self.inner.step()
            for m in masters.masters:
                m.grad = None
            self._fetched.discard(bucket)
            self._leaving.append(bucket)
            masters.close()
            states.collect()

    @torch.no_grad()
    def finish(self) -> None:
        """End the step: copies to the host's memory are waited for (by the device; by this thread on a CPU)."""
        with self._whole():
            if self._loading is not None:
                self._states[self._loading].collect()
                self._fetched.discard(self._loading)
                self._leaving.append(self._loading)
                self._loading = None
            while self._fetched:  # and not stepped: nothing has changed
                unchanged = self._fetched.pop()
                self._masters[unchanged].forget()
                self._states[unchanged].forget()
            while self._leaving:
                self._settle_oldest()
            self._stepped.clear()
            self._advanced.clear()

    def _settle_oldest(self) -> None:
        self._masters[self._leaving[0]].settle()
        self._states[self._leaving[0]].settle()
        del self._leaving[0]

    @contextmanager
    def _narrowed(self, bucket: int) -> Iterator[None]:
        """Give the inner optimizer the masters of one bucket only, and let values that it keeps by group advance once in a step."""
        groups = self.param_groups
        whole = [group["params"] for group in groups]
        for g, group in enumerate(groups):
            group["params"] = self._narrow[bucket][g]
            group.update({key: before for key, (before, _) in self._advanced.get(g, {}).items()})
        values_before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        try:
            yield
        finally:
            for g, group in enumerate(groups):
                group["params"] = whole[g]
                for key, before in values_before[g].items():
                    if group[key] is not before and not _same(group[key], before):
                        self._advanced.setdefault(g, {})[key] = (before, group[key])

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Note a failure inside after which weights and states are of two steps. Raises UserError if one was noted before."""
        if self._failure is not None:
            raise UserError(
                f"an optimizer step broke off ({self._failure}): weights and states are partly those of the previous step; "
                "restart from the last checkpoint"
            )
        try:
            yield
        except BaseException as error:
            if self._stepped or self._leaving or self._loading is not None:
                self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
            raise

    # ---- masters and states ----

    def has(self, parameter: nn.Parameter) -> bool:
        """True where a parameter is updated here; those that do not train are not."""
        return parameter in self._where

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(model parameter, this process's part of its float32 values), one bucket in memory at a time; values last until the next pair."""
        self.finish()
        for b, box in enumerate(self._masters):
            with self._whole():
                box.fetch()
                values = box.values()
                box.forget()
            yield from zip(self.buckets[b], values, strict=True)
            del values

    @torch.no_grad()
    def set_master(self, parameter: nn.Parameter, local_float32: Tensor) -> None:
        """Set this process's part of a parameter's float32 values: the rounded parameter, and the bits that it lacks."""
        self.finish()
        bucket, index = self._where[parameter]
        if local_float32.shape != local_part(parameter).shape:
            raise ValueError(f"values {tuple(local_float32.shape)} for a part {tuple(local_part(parameter).shape)}")
        values = local_float32.detach().to(self.device.torch_device, torch.float32)
        with self._whole():
            self._masters[bucket].write(index, values)

    @torch.no_grad()
    def state_of(self, parameter: nn.Parameter) -> State:
        """The inner optimizer's state of this process's part of one parameter; tensors on the host where their tier is there.

        Empty before the parameter's first step. The tensors are not copies: the next step changes them.
        """
        self.finish()
        with self._whole():
            return self._states[self._where[parameter][0]].read(self.master_of(parameter))

    @torch.no_grad()
    def load_state_of(self, parameter: nn.Parameter, state: State) -> None:
        """Set the inner optimizer's state of one parameter, from `state_of` in any tier. Fastest bucket by bucket."""
        bucket = self._where[parameter][0]
        if self._loading != bucket:
            self.finish()  # the previous bucket goes back whole
            self.prefetch(bucket)
            with self._whole():
                self._states[bucket].put()
                self._loading = bucket
        m = self.master_of(parameter)
        group = self.param_groups[self._group_of[m]]
        on_device = bool(group.get("capturable") or group.get("fused"))
        with self._whole():
            for key, value in state.items():
                # torch keeps the count of steps on the CPU, unless its kernels read it
                where = "cpu" if key == "step" and not on_device else self.device.torch_device
                local = local_part(value) if is_sharded(value) else value
                self.inner.state[m][key] = transform(local, partial(Tensor.to, device=where, copy=True))

    def _finish_if_whole(self) -> None:
        if self._failure is None:
            self.finish()

    def device_bytes(self) -> dict[str, int]:
        """Bytes on this device now, of `parameters`, `master` (float32 masters, or the bits that bfloat16 lacks) and `states`.

        It works after a failed step too: a bucket that is on its way may then count twice.
        """
        self._finish_if_whole()
        storages = [local_part(p).untyped_storage() for p in self._where]
        return {
            "parameters": sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values()),
            "master": sum(box.device_bytes() for box in self._masters),
            "states": sum(box.device_bytes() for box in self._states),
        }

    def host_bytes(self) -> dict[str, int]:
        """Bytes in the host's memory now, by the same keys as `device_bytes`."""
        self._finish_if_whole()
        return {
            "parameters": 0,
            "master": sum(box.host_bytes() for box in self._masters),
            "states": sum(box.host_bytes() for box in self._states),
        }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False  # not the same object: replaced
    return bool(a == b)
