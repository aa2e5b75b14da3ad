"""The gradients of a step as a whole: their norm over all shards, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from mmspeed.mesh import Mesh, by_mesh, layout_of
from mmspeed.parallel import unwrap
from mmspeed.parallel.stages import copies
from mmspeed.parallel.tensor import local
from mmspeed.torch_internals import is_sharded, multiply_each_

CLIP_EPS = 1e-6  # as torch has it in clip_grads_with_norm_


def _norm_of(kinds: Sequence[Sequence[nn.Parameter]], mesh: Mesh | None) -> Tensor:
    """The norm of all processes' gradients, a scalar on the device, of parameters that have some, in lists of one device mesh each.

    Squares are summed over the axes that hold parts of a parameter and over the pipeline stages of `mesh`, and counted once over replicas.
    """
    wholes = [_over(get_total_norm(parts), groups) for kind in kinds for groups, parts in _parts(kind)]
    if not wholes:  # a pipeline stage of which nothing trains
        wholes = [torch.zeros((), device=mesh.dense.device_type if mesh is not None else "cpu")]
    norm = wholes[0] if len(wholes) == 1 else torch.stack(wholes).square().sum().sqrt()
    return _over(norm, mesh.across_stages() if mesh is not None else ())


def _parts(kind: Sequence[nn.Parameter]) -> list[tuple[tuple[dist.ProcessGroup, ...], list[Tensor]]]:
    """This process's parts of the gradients of one device mesh, with the groups whose processes hold the others.

    Of a list of sharded tensors torch would derive each layout: a tenth of a second and more at the first step, milliseconds later.
    """
    lists: dict[tuple[int, ...], list[Tensor]] = {}
    groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, ...]] = {}
    for parameter in kind:
        grad = parameter.grad
        assert grad is not None
        split: tuple[int, ...] = ()
        if is_sharded(grad):
            split = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
            groups.setdefault(split, tuple(grad.device_mesh.get_group(dim) for dim in split))
        lists.setdefault(split, []).append(local(grad))
    return [(groups.get(split, ()), parts) for split, parts in lists.items()]


def _over(norm: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """The norm of what all processes of the groups have, from that of each."""
    for group in groups:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    return norm


def clip_gradients(
    models: Sequence[nn.Module],
    clip_norm: float | None,
    mesh: Mesh | None = None,
    scale: float | None = None,
    weight: float = 1.0,
) -> Tensor:
    """The norm of all processes' gradients over `weight`; gradients whose norm so divided is above `clip_norm` are scaled down.

    A collective call. `weight` is the factor of the step that the gradients have, and keep. With `scale`, gradients are multiplied by it
    in the same pass, and the norm is that of the products.
    """
    # the process of the first stage counts them
    counted = {parameter for model in models for parameter in copies(unwrap(model))}
    trained = [p for model in models for p in model.parameters() if p.grad is not None]
    kinds = by_mesh(trained)
    norm = _norm_of(by_mesh([p for p in trained if p not in counted]) if counted else kinds, mesh)
    if weight != 1.0:
        norm = norm / weight
    factor = None
    if scale is not None:
        norm = norm * scale
        factor = torch.full_like(norm, scale)
    if clip_norm is not None:
        clip = (clip_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        factor = clip if factor is None else factor * clip
    if factor is not None:
        for kind in kinds:
            parts = [local(p.grad) for p in kind if p.grad is not None]
            multiply_each_(parts, factor.to(parts[0].device))
    return norm


@torch.no_grad()
def squared_norm(parameters: Iterable[nn.Parameter], mesh: Mesh | None = None) -> float:
    """The squared norm of this process's part of gradients; a part that several processes of `mesh` hold counts in equal shares.

    Its sum over all processes is the squared norm of the whole gradients. None: one process.
    Raises ValueError for shards without a mesh.
    """
    total: Tensor | None = None
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if mesh is None and is_sharded(grad):
            raise ValueError("the norm of sharded gradients needs the mesh, which knows their replicas")
        copies = mesh.copies(layout_of(parameter)) if mesh is not None else 1
        part = grad.to_local() if is_sharded(grad) else grad
        square = (
            torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)).double().square()
            / copies
        )
        total = square if total is None else total + square
    return total.item() if total is not None else 0.0
