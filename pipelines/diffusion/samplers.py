"""Samplers from noise to data: loops over a prediction function and a list of times, without a model.

Euler and Heun (Karras et al. 2022, arXiv:2206.00364, algorithm 1) integrate the velocity of a flow; DDIM (Song et al.
2020, arXiv:2010.02502, eta = 0) walks a noise schedule. Times and coefficients are float64 numbers; the sample
is float32 (or float64 when the noise is), also when the model answers in bfloat16.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Predict = Callable[[Tensor, Tensor], Tensor]  # (x_BCThw, t_B in [0, 1]) -> prediction of the shape of x_BCThw
OnStep = Callable[[int, int], None]  # (steps done, steps in all)
Decompose = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]  # (x_BCThw, prediction, abar) -> (x0, noise)


def euler(predict: Predict, noise_BCThw: Tensor, times: Sequence[float], on_step: OnStep | None = None) -> Tensor:
    """Integrate a velocity over the falling `times` with first-order steps; one call of `predict` a step."""
    x = at_least_float32(noise_BCThw)
    for i in range(len(times) - 1):
        x = x + (times[i + 1] - times[i]) * call(predict, x, times[i])
        tell(on_step, i + 1, len(times) - 1)
    return x


def heun(predict: Predict, noise_BCThw: Tensor, times: Sequence[float], on_step: OnStep | None = None) -> Tensor:
    """Integrate a velocity over the falling `times` with second-order steps; two calls of `predict` a step.

    The last step is a first-order one, so that the model is never called at its last time (as Karras et al. do).
    """
    x = at_least_float32(noise_BCThw)
    last = len(times) - 2
    for i in range(last + 1):
        dt = times[i + 1] - times[i]
        slope = call(predict, x, times[i])
        if i < last:
            slope = (slope + call(predict, x + dt * slope, times[i + 1])) / 2
        x = x + dt * slope
        tell(on_step, i + 1, last + 1)
    return x


def ddim(
    predict: Predict,
    noise_BCThw: Tensor,
    times: Sequence[float],
    abars: Sequence[float],
    decompose: Decompose,
    on_step: OnStep | None = None,
) -> Tensor:
    """Walk down a noise schedule without adding noise; one call of `predict` a step.

    `times` are the model times of the steps, `abars` the share of data in the variance at each step and, one more, at the
    end (1 for clean data). `decompose` returns the data and the noise that a prediction implies.
    """
    x = at_least_float32(noise_BCThw)
    for i, time in enumerate(times):
        x0, noise = decompose(x, call(predict, x, time), abars[i])
        x = abars[i + 1] ** 0.5 * x0 + (1 - abars[i + 1]) ** 0.5 * noise
        tell(on_step, i + 1, len(times))
    return x


Mix = Callable[[Tensor, Tensor, float], Tensor]  # (with the caption, without, scale) -> the guided prediction


def mixed(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """uncond + scale (cond - uncond), of the shape of both."""
    return uncond + scale * (cond - uncond)


def guided(
    predict_cond: Predict, predict_uncond: Predict, scale: float, rescale: float = 0.0, mix: Mix = mixed
) -> Predict:
    """The prediction under classifier-free guidance (Ho & Salimans 2022): uncond + scale (cond - uncond).

    Scales 1 and 0 are one of the two predictions alone, and call only that one. `rescale`: the share, from 0 to 1, by which the guided
    prediction of each sample gets the standard deviation of `cond` (Lin et al. 2023, section 3.4). `mix`: another rule in place of the sum.
    """
    if scale == 1:
        return predict_cond
    if scale == 0:
        return predict_uncond

    def predict(x_BCThw: Tensor, t_B: Tensor) -> Tensor:
        uncond = predict_uncond(x_BCThw, t_B).to(x_BCThw.dtype)
        cond = predict_cond(x_BCThw, t_B).to(x_BCThw.dtype)
        both = mix(cond, uncond, scale)
        return both if rescale == 0 else rescaled(both, cond, rescale)

    return predict


def rescaled(guided: Tensor, cond: Tensor, share: float) -> Tensor:
    """`guided` (B, ...), moved by `share` towards the standard deviation that `cond` has over all dims but the first."""
    dims = list(range(1, cond.ndim))
    spread = guided.std(dim=dims, keepdim=True)
    factor = torch.where(spread > 0, cond.std(dim=dims, keepdim=True) / spread, 1.0)  # a constant prediction stays
    return share * (guided * factor) + (1 - share) * guided


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32; one in float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def call(predict: Predict, x: Tensor, time: float) -> Tensor:
    """The prediction at one time for all samples, in the dtype of `x`."""
    t_B = torch.full((x.shape[0],), time, device=x.device, dtype=x.dtype)
    return predict(x, t_B).to(x.dtype)


def tell(on_step: OnStep | None, done: int, total: int) -> None:
    """Count a step that is done."""
    if on_step is not None:
        on_step(done, total)
