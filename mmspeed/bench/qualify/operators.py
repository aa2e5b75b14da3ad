"""Check the operators of language models on a device: each implementation against its eager twin in float64 on the CPU, with gradients.

Legend: T tokens, A heads, K heads of the keys, D head width, W width of the values, E width, V vocabulary, G groups, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.compute.operators.permutation import ExpertOrder, RowOrder, order_by_expert, order_rows
from mmspeed.compute.registry import OPERATORS
from mmspeed.device import Device

from .oracle import Errors, number_types, short_name
from .rows import Check, Outcome

PART = "kernels"
Arguments = tuple[Any, ...]


def operator_checks(device: Device, small: bool) -> Iterator[Check]:
    """A check for each implementation of each operator, in each number type of the device."""
    for dtype in number_types(device):
        for name, operator in OPERATORS.items():
            for one in operator.implementations:
                what = f"{name} {one.name} {short_name(dtype)}"
                yield Check(PART, what, partial(check_operator, device, dtype, small, name, one.name))


def check_operator(device: Device, dtype: torch.dtype, small: bool, name: str, implementation: str) -> Outcome:
    """An implementation, forward and backward, on the calls that it serves."""
    errors, refusals = Errors(dtype), list[str]()
    operator = OPERATORS[name]
    for case, arguments in CALLS[name](64 if small else 1_024).items():
        rounded = tuple(_as(one, dtype) for one in arguments)
        here = tuple(_on(one, device) for one in rounded)
        reason = operator[implementation].refuses(*here)
        if reason:
            refusals.append(reason)
            continue
        trained = TRAINED[name]
        truth = _results(operator.eager.run, tuple(_as(one, torch.float64) for one in rounded), trained)
        errors.add(case, _results(operator[implementation].run, here, trained), truth)
    return errors.outcome(refusals)


def _results(run: Callable[..., Any], arguments: Arguments, trained: int) -> dict[str, Tensor]:
    """Results, and gradients of the first `trained` inputs, under weights of each number that are not all alike."""
    leaves = [
        one.detach().requires_grad_(place < trained) if _floats(one) else one for place, one in enumerate(arguments)
    ]
    outs = run(*leaves)
    named = {f"out {place}": out for place, out in enumerate(outs if isinstance(outs, tuple) else (outs,))}
    grads = [rng.normal(tuple(out.shape), 0, "qualify", "grad", name).to(out) for name, out in named.items()]
    gradients = torch.autograd.grad(list(named.values()), leaves[:trained], grads)
    return named | {f"gradient {place}": gradient for place, gradient in enumerate(gradients)}


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _floats(value) else value


def _on(value: Any, device: Device) -> Any:
    if isinstance(value, RowOrder):
        return replace(value, **{name: one.to(device.torch_device) for name, one in vars(value).items()})
    return value.to(device.torch_device) if isinstance(value, Tensor) else value


def _values(name: str, *shape: int) -> Tensor:
    return rng.normal(shape, 0, "qualify", "operator", name)


def _documents(tokens: int) -> dict[str, Arguments]:
    bounds_Z = torch.tensor([0, 1, tokens // 3, tokens // 3, tokens])
    cases: dict[str, Arguments] = {}
    for case, keys, value, window in (
        ("grouped keys", 2, 64, None),
        ("window", 4, 64, 9),
        ("narrow values", 4, 40, None),
    ):
        q_TAD, k_TKD = _values("q", tokens, 4, 64), _values("k", tokens, keys, 64)
        cases[case] = (q_TAD, k_TKD, _values("v", tokens, keys, value), bounds_Z, window)
    return cases


def _rotary(tokens: int) -> dict[str, Arguments]:
    angle_TH = torch.arange(tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, 32)
    # as whole numbers of 1/64, which every number type holds, so that tables are the same in all
    turn_21TH = (64 * torch.stack((angle_TH.cos(), angle_TH.sin()))).round()[:, None] / 64
    return {"half": (_values("x", 1, tokens, 4, 64), turn_21TH)}


def _cross_entropy(tokens: int) -> dict[str, Arguments]:
    target_T = torch.arange(tokens) % 997
    target_T[::7] = IGNORED
    return {"ignored targets": (_values("x", tokens, 64), 0.2 * _values("w", 1_000, 64), target_T)}


def _log_sums(tokens: int) -> dict[str, Arguments]:
    place_T = torch.arange(tokens) % 1_997 - 500
    return {"places beyond the rows": (_values("x", tokens, 64), 0.2 * _values("w", 1_000, 64), place_T)}


def _order(tokens: int) -> ExpertOrder:
    expert_TK = torch.stack((torch.arange(tokens) % 5, 5 + torch.arange(tokens) % 2), 1)  # of 8; the last has no rows
    return order_by_expert(expert_TK, 8)


def _orders(tokens: int) -> dict[str, RowOrder]:
    goes_TK = torch.arange(tokens)[:, None] % torch.tensor([2, 3])  # twice to one place, once, or nowhere
    return {"two of 8": _order(tokens), "pairs without a row": order_rows(goes_TK, int((goes_TK < 1).sum()))}


def _grouped(tokens: int) -> dict[str, Arguments]:
    return {"a group without rows": (_values("x", 2 * tokens, 64), _values("w", 8, 32, 64), _order(tokens).ends_G)}


CALLS: dict[str, Callable[[int], dict[str, Arguments]]] = {
    "document_attention": _documents,
    "rms_norm": lambda tokens: {"rows": (_values("x", tokens, 64), 1 + 0.1 * _values("w", 64), 1e-6)},
    "swiglu": lambda tokens: {"rows": (_values("gate", tokens, 64), _values("up", tokens, 64))},
    "rotary": _rotary,
    "linear_cross_entropy": _cross_entropy,
    "linear_log_sums": _log_sums,
    "grouped_product": _grouped,
    "permute": lambda tokens: {case: (_values("x", tokens, 64), order) for case, order in _orders(tokens).items()},
    "combine": lambda tokens: {
        case: (_values("x", len(order.order_R), 64), order) for case, order in _orders(tokens).items()
    },
}
# inputs that have a gradient, which come first
TRAINED = {
    "document_attention": 3,
    "rms_norm": 2,
    "swiglu": 2,
    "rotary": 1,
    "linear_cross_entropy": 2,
    "linear_log_sums": 2,
    "grouped_product": 2,
    "permute": 1,
    "combine": 1,
}
