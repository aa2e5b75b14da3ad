"""k-means of queries and of keys, without random draws: the same tensors give the same clusters.

In the logit metric two queries are near if their rows of scores over the keys are, up to a constant, since then their softmax rows are:
the mean squared distance of centred rows is (a - b)^T Sigma (a - b), with Sigma the covariance of the keys. As
(q - m)^T Sigma (q - m) = q^T Sigma q - 2 q^T Sigma m + m^T Sigma m, whose first term is the same for all centroids m, only the
centroids are multiplied by Sigma: no square root of it is needed and it may be singular.

Legend: G groups (samples x heads), N points, S sampled points, D width, C clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = {"cpu": 1 << 19}  # distances at a time: a CPU's cache
_BLOCK_ELSE = 1 << 26
_LEAST = 16  # least average number of points of a cluster in k-means


def spread(count: int, of: int, device: torch.device) -> Tensor:
    """Places, `count` among `of`, one in each of `count` equal parts: evenly, but not aligned with any grid. int64, ascending.

    Within its part a place moves by the golden ratio (a Weyl sequence), so that rows of a video are not all sampled in the same column.
    """
    part = torch.arange(count, device=device)
    return (((part << 16) + ((part * 40503) & 0xFFFF)) * of // max(1, count)) >> 16


def covariance(x_GND: Tensor, mask_GN: Tensor | None = None) -> Tensor:
    """The covariance (G, D, D) of points where the mask is True; finite for any points."""
    if mask_GN is None:
        mean = x_GND.mean(dim=1, keepdim=True)
        centred = x_GND - mean
        count: Tensor | int = x_GND.shape[1]
    else:
        x_GND = x_GND.masked_fill(~mask_GN[..., None], 0.0)
        count = mask_GN.sum(dim=1).clamp(min=1)[:, None, None]
        mean = x_GND.sum(dim=1, keepdim=True) / count
        centred = (x_GND - mean).masked_fill_(~mask_GN[..., None], 0.0)
    return ((centred.mT @ centred) / count).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def nearest(x_GND: Tensor, centroid_GCD: Tensor, sigma_GDD: Tensor | None = None) -> Tensor:
    """The nearest centroid of each point, int64; the first one among equals, the last one for NaN."""
    groups, points, _ = x_GND.shape
    clusters = centroid_GCD.shape[1]
    # distances do not change when all is shifted by the mean centroid; the centroids are shifted, against cancellation
    middle = centroid_GCD.mean(dim=1, keepdim=True)
    away = centroid_GCD - middle
    weight = away if sigma_GDD is None else away @ sigma_GDD
    bias_G1C = ((away + 2 * middle) * weight).sum(dim=-1)[:, None]
    # the first minimum, by passes that a CPU vectorises (unlike argmin), the same on every device
    back_C = torch.arange(clusters, 0, -1, device=x_GND.device, dtype=x_GND.dtype)
    label_GN = torch.empty(groups, points, dtype=torch.int64, device=x_GND.device)
    limit = _BLOCK.get(x_GND.device.type, _BLOCK_ELSE)
    wide = max(1, limit // (points * clusters))
    step = points if wide > 1 else max(1, limit // clusters)
    for g in range(0, groups, wide):
        some = slice(g, g + wide)
        for n in range(0, points, step):
            distance = torch.baddbmm(bias_G1C[some], x_GND[some, n : n + step], weight[some].mT, alpha=-2)
            least = distance.amin(dim=-1, keepdim=True)
            label_GN[some, n : n + step] = clusters - distance.eq_(least).mul_(back_C).amax(dim=-1)
    return label_GN.clamp_(max=clusters - 1)  # NaN is equal to nothing


def sums(x_GND: Tensor, label_GN: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """(sum of the points, number of points) of each cluster. Points with the label `clusters` do not count."""
    groups, _, width = x_GND.shape
    rows = clusters + 1
    flat = label_GN + torch.arange(groups, device=x_GND.device)[:, None] * rows
    counts = torch.bincount(flat.flatten(), minlength=groups * rows).view(groups, rows)[:, :clusters]
    if x_GND.device.type == "cpu":
        total = x_GND.new_zeros(groups * rows, width)
        total.index_add_(0, flat.flatten(), x_GND.reshape(-1, width))
        return total.view(groups, rows, width)[:, :clusters], counts
    # on other devices in-place additions have no fixed order; a matrix product has one
    total = x_GND.new_empty(groups, clusters, width)
    which = torch.arange(clusters, device=x_GND.device)[:, None]
    wide = max(1, _BLOCK_ELSE // max(1, clusters * x_GND.shape[1]))
    for g in range(0, groups, wide):
        some = slice(g, g + wide)
        total[some] = (label_GN[some, None] == which).to(x_GND.dtype) @ x_GND[some]
    return total, counts


def means(x_GND: Tensor, label_GN: Tensor, centroid_GCD: Tensor) -> Tensor:
    """Mean of the points of each cluster; an empty cluster keeps its centroid."""
    total, counts = sums(x_GND, label_GN, centroid_GCD.shape[1])
    mean = total / counts.clamp(min=1)[..., None]
    return torch.where((counts > 0)[..., None], mean, centroid_GCD)


def sorted_means(x_GND: Tensor, order_GN: Tensor, offsets_GC: Tensor, centroid_GCD: Tensor) -> Tensor:
    """The `means` of points whose order by clusters is known, with C + 1 offsets."""
    groups, points, width = x_GND.shape
    if x_GND.device.type != "cpu" or not points:
        label_GN = torch.empty_like(order_GN)
        place_N = torch.arange(points, device=x_GND.device).expand(groups, -1).contiguous()
        label_GN.scatter_(1, order_GN, torch.searchsorted(offsets_GC[:, 1:].contiguous(), place_N, right=True))
        return means(x_GND, label_GN, centroid_GCD)
    # sums over a bag of rows run in their order, and bags in parallel: faster than in-place additions
    first_G1 = torch.arange(groups)[:, None] * points
    bags = (offsets_GC[:, :-1] + first_G1).flatten()
    rows = x_GND.reshape(-1, width)
    total = torch.nn.functional.embedding_bag((order_GN + first_G1).flatten(), rows, bags, mode="sum")
    count_GC1 = offsets_GC.diff(dim=1)[..., None]
    mean = total.view_as(centroid_GCD) / count_GC1.clamp(min=1)
    return torch.where(count_GC1 > 0, mean, centroid_GCD)


def kmeans(
    x_GND: Tensor,
    clusters: int,
    *,
    iterations: int = 3,
    subsample: int = 4,
    start_GCD: Tensor | None = None,
    mask_GN: Tensor | None = None,
    sigma_GDD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels and centroids (label_GN, centroid_GCD): `iterations` of Lloyd's algorithm on one point in `subsample`, then all labels.

    Masked points have the label C and do not count. Centroids are those that gave the labels.
    Raises ValueError for a start of another shape.
    """
    groups, points, width = x_GND.shape
    if start_GCD is not None and start_GCD.shape != (groups, clusters, width):
        raise ValueError(f"centroids of the shape {tuple(start_GCD.shape)} are not {(groups, clusters, width)}")
    if start_GCD is not None:
        centroid_GCD = start_GCD.to(device=x_GND.device, dtype=x_GND.dtype)
    elif not points:
        return torch.empty(groups, 0, dtype=torch.int64, device=x_GND.device), x_GND[:, :clusters]
    else:
        centroid_GCD = take(x_GND, spread(clusters, points, x_GND.device), mask_GN)
    if iterations:
        some_GSD, some_mask = sample(x_GND, clusters, subsample, mask_GN)
        for _ in range(iterations):
            label_GS = _labels(some_GSD, centroid_GCD, some_mask, sigma_GDD)
            centroid_GCD = means(some_GSD, label_GS, centroid_GCD)
    return _labels(x_GND, centroid_GCD, mask_GN, sigma_GDD), centroid_GCD


def _labels(x_GND: Tensor, centroid_GCD: Tensor, mask_GN: Tensor | None, sigma_GDD: Tensor | None) -> Tensor:
    label_GN = nearest(x_GND, centroid_GCD, sigma_GDD)
    return label_GN if mask_GN is None else label_GN.masked_fill_(~mask_GN, centroid_GCD.shape[1])


def sample(x_GND: Tensor, clusters: int, subsample: int, mask_GN: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A sample of one point in `subsample`, evenly spread over those that count; larger where clusters would have too few."""
    points = x_GND.shape[1]
    stride = max(1, min(subsample, points // max(1, _LEAST * clusters)))
    if stride == 1:
        return x_GND, mask_GN
    return take(x_GND, spread(points // stride, points, x_GND.device), mask_GN), None


def take(x_GND: Tensor, place_S: Tensor, mask_GN: Tensor | None) -> Tensor:
    """Points at places; with a mask, at these places scaled to the points that count. Masked points are taken only where all are masked."""
    if mask_GN is None:
        return x_GND.index_select(1, place_S)
    first = (~mask_GN).sort(dim=1, stable=True).indices
    place_GS = place_S * mask_GN.sum(dim=1, keepdim=True) // x_GND.shape[1]
    return x_GND.gather(1, first.gather(1, place_GS)[..., None].expand(-1, -1, x_GND.shape[-1]))
