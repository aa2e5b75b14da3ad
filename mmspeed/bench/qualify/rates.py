"""Measure the rates of matrix products and of attention beside the device's peak.

Legend: B batch, A heads, N tokens, D head width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from mmspeed.compute.attention import attention
from mmspeed.compute.block_attention import KERNELS, block_backward, block_forward
from mmspeed.compute.block_kernels import HALF
from mmspeed.device import PEAK_FLOPS, Device

from .oracle import number_types, short_name
from .rows import Check, Outcome

PART = "rates"
# Least shares of a known device's peak. A well-installed device reaches 0.6 to 0.8 with products and 0.3 to 0.6 with attention; less than
# these means a wrong library, a device that is throttled, or one that others use.
MATMUL_GOAL, ATTENTION_GOAL = 0.4, 0.2
ROUNDS = 5
BACKWARD = 2.5  # arithmetic of attention's backward as a multiple of its forward: five products for two


@dataclass(frozen=True)
class RateSizes:
    """Sizes to measure: the square matrix, tokens and width of an MLP's product, and tokens, heads and width of attention."""

    square: int
    rows: int
    model_width: int
    tokens: int
    heads: int
    width: int


FULL = RateSizes(8192, 32_768, 1152, 16_384, 16, 128)  # the MLP of XL/2
SMALL = RateSizes(256, 256, 192, 256, 4, 64)


def known_peak(device: Device) -> bool:
    """True where the peak is a data sheet's, so that shares of it have goals."""
    return device.kind != "cpu" and any(label in device.name for label in PEAK_FLOPS)


@cache
def peak_of(device: Device, dtype: torch.dtype) -> tuple[float, str]:
    """`Device.peak_flops`, measured once where no data sheet is known."""
    return device.peak_flops(dtype)


def seconds_of(device: Device, work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median time of `work`, up to its completion on the device, after a first run that is not counted."""
    taken = []
    for turn in range(rounds + 1):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        if turn:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def rate_checks(device: Device, small: bool) -> Iterator[Check]:
    """Checks of products and of attention in each number type, and of each fused block kernel in the training one."""
    sizes = SMALL if small else FULL
    types = number_types(device)
    for dtype in types:
        name = short_name(dtype)
        yield Check(PART, f"square product {name}", partial(check_square, device, dtype, sizes), 2.0)
        yield Check(PART, f"MLP product {name}", partial(check_mlp, device, dtype, sizes), 2.0)
    yield Check(PART, f"attention {short_name(types[0])}", lambda: check_attention(device, types[0], sizes), 5.0)
    for kernel in KERNELS:
        if kernel != "eager":
            what = f"attention by block {kernel} {short_name(types[0])}"
            yield Check(PART, what, partial(check_kernel_rate, device, types[0], sizes, kernel), 5.0)


def check_square(device: Device, dtype: torch.dtype, sizes: RateSizes) -> Outcome:
    """The product of two square matrices."""
    n = sizes.square
    a, b = (torch.randn(n, n, device=device.torch_device).to(dtype) for _ in range(2))
    return rated(device, dtype, 2 * n**3, seconds_of(device, lambda: a @ b), MATMUL_GOAL, f"{n} x {n} x {n}")


def check_mlp(device: Device, dtype: torch.dtype, sizes: RateSizes) -> Outcome:
    """The first product of an MLP with its gradients."""
    rows, width, hidden = sizes.rows, sizes.model_width, 4 * sizes.model_width
    x = torch.randn(rows, width, device=device.torch_device).to(dtype).requires_grad_()
    weight = torch.randn(hidden, width, device=device.torch_device).to(dtype).requires_grad_()
    dout = torch.randn(rows, hidden, device=device.torch_device).to(dtype)

    def work() -> None:
        torch.autograd.grad(torch.nn.functional.linear(x, weight), (x, weight), dout)

    flops = 3 * 2 * rows * width * hidden
    shape = f"{rows} x {width} x {hidden}, with gradients"
    return rated(device, dtype, flops, seconds_of(device, work), MATMUL_GOAL, shape)


def _qkv(device: Device, dtype: torch.dtype, sizes: RateSizes) -> list[Tensor]:
    shape = (1, sizes.heads, sizes.tokens, sizes.width)
    return [torch.randn(shape, device=device.torch_device).to(dtype) for _ in range(4)]


def _attention_flops(sizes: RateSizes) -> int:
    return 4 * sizes.heads * sizes.tokens**2 * sizes.width


def check_attention(device: Device, dtype: torch.dtype, sizes: RateSizes) -> Outcome:
    """Dense attention as models call it: forward, and forward with backward."""
    *inputs, dout = _qkv(device, dtype, sizes)
    leaves = [x.requires_grad_() for x in inputs]
    flops = _attention_flops(sizes)

    def both() -> None:
        torch.autograd.grad(attention(leaves[0], leaves[1], leaves[2]), leaves, dout)

    with torch.no_grad():
        forward = seconds_of(device, lambda: attention(leaves[0], leaves[1], leaves[2]))
    whole = seconds_of(device, both)
    shape = f"{sizes.tokens:,} tokens, {sizes.heads} heads of {sizes.width}, forward {flops / forward / 1e12:.3g}, with backward"
    return rated(device, dtype, (1 + BACKWARD) * flops, whole, ATTENTION_GOAL, shape)


def check_kernel_rate(device: Device, dtype: torch.dtype, sizes: RateSizes, kernel: str) -> Outcome:
    """A block kernel, forward with backward; it has no goal of its own."""
    q, k, v, dout = _qkv(device, dtype, sizes)
    reason = KERNELS[kernel].refuses(q, k, None, False)
    if reason:
        return Outcome("absent", reason)

    def both() -> None:
        out, lse = block_forward(q, k, v, backend=kernel)
        block_backward(dout, q, k, v, out, lse, backend=kernel)

    flops = (1 + BACKWARD) * _attention_flops(sizes)
    return rated(device, dtype, flops, seconds_of(device, both), None, f"{sizes.tokens:,} tokens, with backward")


def rated(device: Device, dtype: torch.dtype, flops: float, seconds: float, goal: float | None, what: str) -> Outcome:
    """A rate beside the peak: short where it is below the goal of a device whose peak is known."""
    half = dtype in HALF
    peak, source = peak_of(device, torch.bfloat16 if half else dtype)  # data sheets give both half types one figure
    rate = flops / seconds
    share = rate / peak
    figures = {"flops_per_s": rate, "peak": peak, "peak_from": source, "share": share, "seconds": seconds, "goal": goal}
    text = f"{rate / 1e12:.3g} TFLOP/s, {share:.0%} of {peak / 1e12:.3g} ({source}); {what}"
    # a data sheet's float32 figure is of lowered precision, which training does not ask for
    if goal is not None and half and known_peak(device) and share < goal:
        return Outcome("short", f"{text}; at least {goal:.0%} is expected", figures)
    return Outcome("passed", text, figures)
