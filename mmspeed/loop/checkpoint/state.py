"""The part of a model and its optimizer in a checkpoint, the same wherever weights and states lie: float32, by names of parameters.

It is the state that a run changes: the parameters that train, persistent buffers, declared state (`protocol.DeclaredState`), states of
the optimizer. Parameters that do not train are represented by a fingerprint (frozen.py).

Weights are the optimizer's (the model may have them rounded), states those of its inner optimizer. Tensors that lie in the host's
memory, or exist for a moment only, are copied to the host, bucket by bucket, in the layout of their parameters.

8-bit states of torchao's optimizers are held in float32 too, so that any optimizer can go on with them. Such a state is a code for each
value, which a table maps to a share of the largest value of its block (Dettmers et al., 2022). Reading packs values into their former
codes; blocks with other boundaries, as on another number of ranks, are rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer, state_names
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.parallel import is_half, unwrap
from mmspeed.parallel.tensor import local
from mmspeed.protocols import DeclaredState, StateRule
from mmspeed.torch_internals import dtensor_like, is_sharded

LEAST = 4096  # 8-bit states: smaller tensors stay float32, and those that are no whole number of blocks
BLOCK = 256


def _engine() -> Any:
    """torch's functions for states in any layout; they take as long to load as half of torch."""
    from torch.distributed.checkpoint import state_dict

    return state_dict


def laid_out(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, this process's part, as a tensor in the layout of `parameter`; it shares the memory of `value`, on any device."""
    if not is_sharded(parameter):
        return value
    if value.device.type == "cpu" and value.storage_offset():
        value = torch.from_numpy(
            value.numpy()
        )  # a DTensor in the host's memory that begins inside of other memory cannot be copied
    return dtensor_like(parameter, value)


def has_masters(model: nn.Module, optimizer: Any) -> bool:
    """True where the optimizer holds the float32 weights, and the model's parameters are roundings of them."""
    return isinstance(optimizer, TieredOptimizer) and is_half(model)


def named_masters(model: nn.Module, optimizer: TieredOptimizer) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """(name, parameter, this process's float32 values), in the optimizer's order; one bucket is in memory at a time."""
    names = {parameter: name for name, parameter in unwrap(model).named_parameters()}
    for parameter, values in optimizer.masters():
        yield names[parameter], parameter, values


# ---- weights and state that is no parameter ----


def declared_state(model: nn.Module) -> dict[str, StateRule]:
    """The rule of each buffer that a module of `model` declares, by its name in the bare model.

    Raises ValueError for a declared name that is no buffer.
    """
    rules: dict[str, StateRule] = {}
    for prefix, module in unwrap(model).named_modules():
        for name, rule in module.state_buffers.items() if isinstance(module, DeclaredState) else ():
            if name not in dict(module.named_buffers()):
                raise ValueError(f"{type(module).__name__} declares the state `{name}`, which is none of its buffers")
            rules[f"{prefix}.{name}" if prefix else name] = rule
    return rules


def _weights_and_state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, the persistent buffers and the declared ones, by name."""
    tensors = cast(dict[str, Tensor], _engine().get_model_state_dict(model))
    buffers = dict(unwrap(model).named_buffers())
    return tensors | {name: buffers[name] for name in declared_state(model)}


def weights_to_save(
    model: nn.Module, optimizer: AnyOptimizer | None, copy: Callable[[str, Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """The float32 weights that train, the persistent buffers and the declared state, by name.

    `copy` makes the copy in the host's memory of values that exist for a moment only.
    """
    tensors = _weights_and_state(model)
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            del tensors[name]
    if isinstance(optimizer, TieredOptimizer) and has_masters(model, optimizer):
        for name, parameter, values in named_masters(model, optimizer):
            values = values.detach()
            tensors[name] = laid_out(parameter, copy(name, values) if copy else values.to("cpu", copy=True))
    return tensors


def room_for_weights(model: nn.Module, optimizer: AnyOptimizer | None) -> dict[str, Tensor]:
    """Tensors to read weights, frozen ones too, and state into; `take_weights` moves them to the model or the optimizer."""
    tensors = _weights_and_state(model)
    for name, parameter in _with_masters(model, optimizer):
        tensors[name] = laid_out(parameter, torch.empty(local(parameter).shape, dtype=torch.float32))
    return tensors


def take_weights(model: nn.Module, optimizer: AnyOptimizer | None, weights: dict[str, Tensor]) -> None:
    """Write the tensors read into `room_for_weights` to the optimizer; those that are the model's own need no copy, nor do absent ones."""
    for name, parameter in _with_masters(model, optimizer):
        if name not in weights:
            continue
        cast(TieredOptimizer, optimizer).set_master(parameter, local(weights.pop(name)).to(local(parameter).device))


def _with_masters(model: nn.Module, optimizer: AnyOptimizer | None) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of each parameter whose float32 weights the optimizer holds."""
    if isinstance(optimizer, TieredOptimizer) and has_masters(model, optimizer):
        yield from ((name, p) for name, p in unwrap(model).named_parameters() if optimizer.has(p))


# ---- states of the optimizer ----


def unpacked(state: Tensor) -> Tensor:
    """The float32 values of a state; a state that is float32 is returned as it is."""
    dequantize = getattr(state, "dequantize", None)
    return state if type(state) in (Tensor, torch.nn.Parameter) or dequantize is None else dequantize().float()


def packed(name: str, values: Tensor) -> Tensor:
    """float32 values as the 8-bit state called `name` (`exp_avg`, else a state that is never below zero), on their device."""
    if values.numel() < LEAST or values.numel() % BLOCK:
        return values
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros(values.shape, name == "exp_avg", BLOCK, values.device, dtype=values.dtype)
    blocks = values.reshape(-1, BLOCK)
    least, scales = state.qmap[0], blocks.amax(1)
    if (
        name == "exp_avg"
    ):  # the table goes from `least`, which is above -1, to 1: a block's largest value may have been rounded to it
        scales = torch.where(-blocks.amin(1) >= scales, blocks.amin(1) / least, scales)
    shares = blocks / scales.clamp(min=1e-12)[:, None]
    state.codes.copy_(quantize_8bit_with_qmap(shares.reshape(values.shape), state.qmap))
    state.scale.copy_(scales)
    packed_state: Tensor = state
    return packed_state


def _flat() -> Any:
    return _engine().StateDictOptions(flatten_optimizer_state_dict=True)


def _states_of(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Any]:
    """The states of an optimizer of torch by torch's names."""
    return dict(_engine().get_optimizer_state_dict(model, optimizer, options=_flat()))


def states_to_save(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """The optimizer's states, `state.<parameter>.<name>`; none before the first step."""
    if not isinstance(optimizer, TieredOptimizer):
        # asking for an empty state would make torch take a step
        return _tensors(_states_of(model, optimizer)) if optimizer.state else {}
    states: dict[str, Tensor] = {}
    for name, parameter in unwrap(model).named_parameters():
        for key, value in optimizer.state_of(parameter).items() if optimizer.has(parameter) else ():
            if key == "step":
                states[f"state.{name}.{key}"] = torch.as_tensor(value, dtype=torch.float32)
            elif isinstance(value, Tensor):
                states[f"state.{name}.{key}"] = laid_out(parameter, unpacked(value))
    return states


class StatesRoom:
    """Tensors to read an optimizer's states into, by their names (`tensors`); `take` moves them to the optimizer."""

    def __init__(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        if isinstance(optimizer, TieredOptimizer):
            self.tensors = dict(self._empty_states(optimizer))
        else:
            self._all = _states_of(model, optimizer)
            self.tensors = _tensors(self._all)

    def _empty_states(self, optimizer: TieredOptimizer) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, group in _with_groups(self._model, optimizer):
            for key in state_names(group):
                shape = torch.Size() if key == "step" else local(parameter).shape
                value = torch.empty(shape, dtype=torch.float32)
                yield f"state.{name}.{key}", value if key == "step" else laid_out(parameter, value)

    def take(self) -> None:
        """Write the tensors that were read into the optimizer."""
        optimizer = self._optimizer
        if not isinstance(optimizer, TieredOptimizer):
            states = self._all | self.tensors
            _engine().set_optimizer_state_dict(self._model, optimizer, states, options=_flat())
            return
        for name, parameter, group in _with_groups(self._model, optimizer):
            read = {key: local(self.tensors.pop(f"state.{name}.{key}")) for key in state_names(group)}
            if group.get("eight_bit"):
                device = local(parameter).device
                read = {key: packed(key, value.to(device)) if key != "step" else value for key, value in read.items()}
            optimizer.load_state_of(parameter, read)


def _with_groups(model: nn.Module, optimizer: TieredOptimizer) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """(name, parameter, its group), in the optimizer's order, which is that of its buckets."""
    names = {parameter: name for name, parameter in unwrap(model).named_parameters()}
    parameters = (parameter for bucket in optimizer.buckets for parameter in bucket)
    for group in optimizer.param_groups:
        for _, parameter in zip(group["params"], parameters, strict=False):
            yield names[parameter], parameter, group


def _tensors(states: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in states.items() if isinstance(value, Tensor)}
