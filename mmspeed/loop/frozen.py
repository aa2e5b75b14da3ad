"""The weights that do not train: their names, and the fingerprint that a checkpoint records in place of their values.

The fingerprint hashes the bits of each number with the number's place in its tensor and a key of the tensor's name, shape and number type
(the finalizer of splitmix64: Steele et al., 2014), and sums the hashes modulo 2^64. A sum has no order, so every process adds up the parts
that it holds, in any layout, and nothing but the sums is exchanged. The text is the SHA-256 of the sum and of all names, shapes and number
types. It distinguishes bases bit by bit, but does not protect against bases that are constructed to have the same one.

Legend: Z numbers of a piece of this process's part of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import all_gather_objects, all_reduce_sum
from mmspeed.parallel import unwrap
from mmspeed.parallel.stages import stages_of
from mmspeed.rng import key64
from mmspeed.torch_internals import is_sharded

PIECE = 1 << 20  # numbers hashed at a time: some 8 MB for each temporary
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = range(0, 64, 16)  # sums travel as float64, which holds sums of 16-bit words exactly


def frozen_names(model: nn.Module) -> list[str]:
    """Names of the bare model's parameters that do not train, in its order; every name of a shared one."""
    parameters = unwrap(model).named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if not parameter.requires_grad]


def frozen_fingerprint(model: nn.Module, group: dist.ProcessGroup | None = None) -> str | None:
    """The fingerprint of the parameters that do not train, the same in every layout; None where all train.

    All ranks call it, unless all train. `group` is a CPU group of all of them.
    """
    names = frozen_names(model)
    return fingerprint(model, names, group=group) if some_hold(model, names, group) else None


def some_hold(model: nn.Module, names: Collection[str], group: dist.ProcessGroup | None = None) -> bool:
    """True where one of these names is there, in any pipeline stage of the model; with stages, all ranks call it."""
    return bool(names) if stages_of(unwrap(model)) is None else any(all_gather_objects(bool(names), group))


@torch.no_grad()
def fingerprint(
    model: nn.Module, names: Collection[str], alone: bool = False, group: dist.ProcessGroup | None = None
) -> str:
    """The fingerprint of the named parameters. All ranks call it; or one process `alone`, which holds all of each.

    Of a model in pipeline stages, names are those of this stage, and the fingerprint is that of all.
    """
    wanted = set(names)
    chosen = {name: parameter for name, parameter in unwrap(model).named_parameters() if name in wanted}
    described = {name: [list(parameter.shape), str(parameter.dtype)] for name, parameter in chosen.items()}
    first, elsewhere = 0, list[dict[str, Any]]()  # the first rank of this stage; what earlier stages hold
    if (stages := stages_of(unwrap(model))) is not None:
        of_ranks = all_gather_objects(described, group)
        each = len(of_ranks) // stages.pipeline.ranks
        first = dist.get_rank() // each * each
        described, elsewhere = {name: facts for held in of_ranks for name, facts in held.items()}, of_ranks[:first]
    counted = {name: p for name, p in chosen.items() if not any(name in held for held in elsewhere)}
    total = sum(_hashed(name, p) for name, p in counted.items() if alone or _is_first_copy(p, first))
    if not alone:
        words = all_reduce_sum([float(total >> shift & 0xFFFF) for shift in _WORDS], group)
        total = sum(int(word) << shift for word, shift in zip(words, _WORDS, strict=True))
    text = json.dumps([sorted([name, *facts] for name, facts in described.items()), total % (1 << 64)])
    return hashlib.sha256(text.encode()).hexdigest()


def _is_first_copy(parameter: nn.Parameter, first: int) -> bool:
    """True where this process counts its part: one of those that hold the same part does. first: the first rank of all that do."""
    if not is_sharded(parameter):
        return not dist.is_initialized() or dist.get_rank() == first
    mesh = parameter.device_mesh
    at_first = zip(mesh.get_coordinate() or (), parameter.placements, strict=True)
    # a parameter whose mesh lacks an axis lies on one mesh for each place of that axis: that of the first rank counts
    return bool((mesh.mesh == first).any()) and all(at == 0 for at, place in at_first if place.is_replicate())


def _hashed(name: str, parameter: nn.Parameter) -> int:
    """The sum of the hashes of this process's part of a parameter, below 2^64."""
    key = key64("frozen", name, str(parameter.dtype), *parameter.shape)
    if not is_sharded(parameter):
        return _sum_of_hashes(parameter, [0] * parameter.ndim, parameter.shape, key)
    (part,) = parameter.__create_chunk_list__()  # the interface of torch's checkpoint engine
    return _sum_of_hashes(parameter.to_local(), part.offsets, parameter.shape, key)


def _sum_of_hashes(part: Tensor, offsets: Sequence[int], shape: torch.Size, key: int) -> int:
    """The sum of the hashes of a block, at `offsets`, of a tensor of `shape`."""
    bits = part.detach().contiguous().reshape(-1).view(_INTEGERS[part.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, len(bits), PIECE):
        bits_Z = bits[start : start + PIECE].long()
        local_Z = torch.arange(start, start + len(bits_Z), device=part.device)
        place_Z = _places(local_Z, part.shape, offsets, shape)
        total += _mixed(place_Z * _signed(0x9E3779B97F4A7C15) + bits_Z + key).sum()
    return int(total) % (1 << 64)


def _places(local_Z: Tensor, part: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Places in the whole tensor, flat, of places in a block of it."""
    if tuple(part[1:]) == tuple(shape[1:]):  # whole rows
        return local_Z + (offsets[0] * math.prod(shape[1:]) if offsets else 0)
    place_Z, stride = torch.zeros_like(local_Z), 1
    for size, offset, whole in reversed(list(zip(part, offsets, shape, strict=True))):
        place_Z += (local_Z % size + offset) * stride
        local_Z, stride = local_Z // size, stride * whole
    return place_Z


def _mixed(x_Z: Tensor) -> Tensor:
    """Each 64-bit number mapped to another, one to one, by the finalizer. Products wrap around."""
    x_Z = (x_Z ^ _shifted(x_Z, 30)) * _signed(0xBF58476D1CE4E5B9)
    x_Z = (x_Z ^ _shifted(x_Z, 27)) * _signed(0x94D049BB133111EB)
    return x_Z ^ _shifted(x_Z, 31)


def _shifted(x_Z: Tensor, bits: int) -> Tensor:
    """Each number shifted to the right, filled with zeros."""
    return (x_Z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 of the same bits as an unsigned number."""
    return number - (1 << 64) if number >> 63 else number
