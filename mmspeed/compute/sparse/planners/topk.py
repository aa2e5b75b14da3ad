"""The largest elements of rows, and weighted quantiles of many values, the same on every device.

Legend: R rows, M columns, S values, g and c some groups and clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BINS = 4096


def largest(x_RM: Tensor, count_R: Tensor) -> Tensor:
    """True at the `count` largest of each row (any leading shape), the first among equals. Allows -inf and larger counts, but no NaN."""
    most = min(int(count_R.max()), x_RM.shape[-1]) if count_R.numel() else 0
    if most == 0:
        return torch.zeros_like(x_RM, dtype=torch.bool)
    top = x_RM.topk(most, dim=-1).values
    edge = top.gather(-1, count_R.clamp(1, most)[..., None] - 1)
    largest_RM = x_RM >= edge
    largest_RM &= (count_R > 0)[..., None]
    over = largest_RM.sum(dim=-1) > count_R
    if over.any():  # equals at the edge: the first of them
        rows, edge, count = x_RM[over], edge[over], count_R[over]
        above, equal = rows > edge, rows == edge
        room = count - above.sum(dim=-1)
        largest_RM[over] = above | (equal & (equal.cumsum(dim=-1) <= room[..., None]))
    return largest_RM


def strided(x_gcM: Tensor, stride: int, first: int = 0) -> Tensor:
    """A sample of one in `stride` elements of each row, at places that change along it and from row to row: (g, c, M // stride).

    The rows of each group are numbered from `first`.
    """
    if stride == 1:
        return x_gcM
    groups, rows, columns = x_gcM.shape
    place = torch.arange(columns // stride, device=x_gcM.device)
    row_c1 = torch.arange(first, first + rows, device=x_gcM.device)[:, None]
    phase = (((row_c1 * 7919 + place) * 40503 & 0xFFFF) * stride) >> 16
    return x_gcM.gather(-1, (place * stride + phase).expand(groups, -1, -1))


def tau_of_share(x: Tensor, weight: Tensor, share: float) -> Tensor:
    """The threshold on exp(x) that keeps `share` of the weight, float32; among equals, all. 0 for a share of 1."""
    if share >= 1.0:
        return torch.zeros((), device=x.device)
    # a little lower, so that values that differ by rounding alone are on the same side
    return (upper_quantile(x.flatten(), weight.flatten(), share) - 1e-5).exp().float()


def upper_quantile(value_S: Tensor, weight_S: Tensor, share: float) -> Tensor:
    """The value such that it and all above hold `share` of the weight; by histograms of ever finer bins, up to rounding.

    Weights are integers, so that sums do not depend on the order. +inf is above all; NaN and -inf are below.
    """
    finite = value_S.isfinite()
    wanted = weight_S.sum() * share
    above = weight_S.masked_fill(value_S != torch.inf, 0).sum()
    low = value_S.masked_fill(~finite, torch.inf).amin()
    high = value_S.masked_fill(~finite, -torch.inf).amax()
    if not bool(low <= high) or bool(above >= wanted):  # no finite values, or +inf alone reaches the share
        return value_S.new_tensor(torch.inf)
    weight_S = weight_S.masked_fill(~finite, 0)
    value_S = value_S.masked_fill(~finite, 0.0)
    for _ in range(2):
        width = ((high - low) / _BINS).clamp(min=1e-7)
        bin_S = (high - value_S).div_(width).floor_()
        weight_S = weight_S.masked_fill(
            (bin_S < 0) | (bin_S >= _BINS + 1), 0
        )  # the lowest value may fall after the last bin
        bin_S = bin_S.clamp_(0, _BINS - 1).long()
        mass = torch.zeros(_BINS, dtype=torch.int64, device=value_S.device).scatter_add_(0, bin_S, weight_S)
        total = mass.cumsum(dim=0) + above
        bin = (total < wanted).sum().clamp(max=_BINS - 1)
        above = total[bin] - mass[bin]
        high, low = high - bin * width, high - (bin + 1) * width
    return low
