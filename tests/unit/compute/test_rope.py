"""Rotary positions: the precision of angles and turns, and that of a model in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.rope import apply_rope, axis_pairs, grid_positions, rope_cos_sin, rope_dtype, turned
from mmspeed.models.sora.layers import SelfAttention, position_turns
from mmspeed.protocols.plan import Structure

POSITIONS = grid_positions((5, 60, 104), offset=(200, 0, 0))[::997]


def turned_exactly(x_BAND: Tensor, pos_NX: Tensor, theta: float = 10_000.0) -> np.ndarray:
    """The turns of pairs in extended precision."""
    x, parts = x_BAND.numpy().astype(np.longdouble), []
    for axis, pairs in enumerate(axis_pairs(x.shape[-1], pos_NX.shape[1])):
        steps = np.arange(pairs, dtype=np.longdouble) / pairs
        parts.append(pos_NX[:, axis].numpy().astype(np.longdouble)[:, None] * np.longdouble(theta) ** -steps)
    angle_NH = np.concatenate(parts, axis=-1)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle_NH), np.sin(angle_NH)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


# float64: angles up to 205 with 2^-53 of themselves, and two products; float32 alike
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-13), (torch.float32, 5e-5), (torch.bfloat16, 0.05)])
def test_turns_have_the_precision_of_what_turns(dtype: torch.dtype, within: float) -> None:
    x_BAND = rng.normal((2, 3, len(POSITIONS), 20), 0, "rope").to(dtype)
    cos_NH, sin_NH = rope_cos_sin(POSITIONS, 20, dtype=rope_dtype(dtype))
    assert cos_NH.dtype == sin_NH.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    turned_BAND = apply_rope(x_BAND, cos_NH, sin_NH)
    assert turned_BAND.dtype == dtype
    assert np.abs(turned_BAND.double().numpy() - turned_exactly(x_BAND.double(), POSITIONS)).max() < within


class Noted(nn.Module):
    """The mean of the values, and the queries that were met."""

    def forward(self, q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, structure: Structure) -> Tensor:
        self.q_BAND = q_BAND.detach()
        return (q_BAND * k_BAND).tanh() + v_BAND


def test_a_model_in_float64_turns_in_float64() -> None:
    torch.manual_seed(0)
    noted = Noted()
    layer = SelfAttention(24, 2, "full", noted).double()
    x_BTSE = torch.randn(1, 1, 6, 24, dtype=torch.float64, requires_grad=True)
    zero, one = (torch.full((1, 1, 1, 24), value, dtype=torch.float64) for value in (0.0, 1.0))
    places_NX = POSITIONS[:6]
    turn_2NH = position_turns(places_NX, "full", 12, torch.float64)

    def forward(x_BTSE: Tensor) -> Tensor:
        out: Tensor = layer(x_BTSE, zero, zero, one, places_NX, turn_2NH, None, False)
        return out

    forward(x_BTSE)
    qkv = layer.qkv(x_BTSE, zero, zero).unflatten(-1, (2, 3, 12))[..., 0, :]  # B T S A D
    straight_BAND = layer.q_norm(qkv.flatten(0, 1).transpose(1, 2)).detach()
    assert np.abs(noted.q_BAND.numpy() - turned_exactly(straight_BAND, places_NX)).max() < 1e-13
    # float32 anywhere on the way would be steps of 1e-7, which a difference of 1e-6 sees as a slope of a tenth
    assert torch.autograd.gradcheck(forward, (x_BTSE,), eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_few_launches_turn_to_the_same_numbers(dtype: torch.dtype, columns: tuple[int, ...]) -> None:
    shape = (2, *columns, 3, len(POSITIONS), 20)
    tables = rope_cos_sin(POSITIONS, 20, dtype=rope_dtype(dtype))
    results = []
    for turn in (lambda x: turned(x, torch.stack(tables)), lambda x: apply_rope(x, *tables)):
        x_BAND = rng.normal(shape, 0, "rope").to(dtype).requires_grad_()
        out_BAND = turn(x_BAND)
        (out_BAND * rng.normal(shape, 1, "rope").to(dtype)).sum().backward()
        results.append((out_BAND, x_BAND.grad))
    (out, grad), (wanted, wanted_grad) = results
    assert torch.equal(out, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    assert dtype == torch.bfloat16 or torch.equal(grad, wanted_grad)  # bfloat16 was rounded once more
