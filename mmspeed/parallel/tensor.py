"""Check that heads divide for tensor parallelism, and sum the gradients of parameters that all its processes hold.

The split layers themselves are in `mmspeed.parallel.boundaries.linears`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import Axis
from mmspeed.comm.axis import nbytes
from mmspeed.errors import UserError
from mmspeed.mesh import layout_of
from mmspeed.torch_internals import is_sharded


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this process; any other tensor as it is. Gradients pass unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def check_heads(heads: int, ulysses: int, tp: int, key_heads: int | None = None) -> None:
    """Raise UserError where heads cannot be split over `tp` processes, and each part exchanged over `ulysses` processes.

    `key_heads`: the number of key heads, where keys have fewer than queries (GQA). Over `ulysses` they are repeated if they are too few;
    over `tp` each process must hold whole ones.
    """
    if key_heads is not None and key_heads % tp:
        fits = ", ".join(str(n) for n in range(1, key_heads + 1) if heads % n == key_heads % n == 0)
        raise UserError(
            f"parallel.tp {tp} does not divide the model's {key_heads} heads of keys: use one of {fits}, and ulysses, which repeats them, "
            "for the rest"
        )
    if heads % tp:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"parallel.tp {tp} does not divide the model's {heads} heads: use one of {fits}")
    if heads // tp < ulysses:
        each = "" if tp == 1 else f" (of {heads}, with parallel.tp {tp})"
        raise UserError(
            f"parallel.ulysses {ulysses} is more than the {heads // tp} heads of a device{each}: use ring for the rest"
        )


@torch.no_grad()
def sum_shared_gradients(parameters: Iterable[nn.Parameter], tensor: Axis) -> None:
    """Sum, over the tensor-parallel axis, gradients of parameters that all its processes hold: one all-reduce per dtype.

    Parameters that FSDP2 shards are summed shard by shard, after it has reduced their gradients.
    """
    if tensor.size == 1:
        return
    grads = [local(p.grad) for p in parameters if p.grad is not None and tensor.name in layout_of(p).replicas]
    for sent in sum_together(grads, tensor.group):
        tensor.count("all_reduce", 2 * sent * (tensor.size - 1) // tensor.size)  # as in a ring algorithm


@torch.no_grad()
def sum_together(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, pair: tuple[int, int] | None = None
) -> list[int]:
    """Sum tensors over a group in place, by one all-reduce for each dtype. Returns the bytes of each.

    pair: only these two ranks of the group sum theirs, this one among them; each sends its own to the other.
    """
    sizes = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        some = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        if pair is None:
            dist.all_reduce(flat, group=group)
        else:
            flat = flat + _swapped(flat, group, sum(pair) - dist.get_rank(group))
        sizes.append(nbytes(flat))
        for tensor, summed in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(summed.view_as(tensor))
    return sizes


def _swapped(sent: Tensor, group: dist.ProcessGroup | None, other: int) -> Tensor:
    came = torch.empty_like(sent)
    ways = ((dist.isend, sent), (dist.irecv, came))
    for work in dist.batch_isend_irecv([dist.P2POp(way, each, group=group, group_peer=other) for way, each in ways]):
        work.wait()
    return came
