"""Describe a tensor's view of its memory, notice changes in place, and recognise tensors that need no copy to come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspeed.torch_internals import base_of, is_sharded, negative_view, storage_address, version_of

from .copies import ALIGNMENT

CHANGED = "a tensor that backward needs was changed in place after a span that swaps had stored it"


@dataclass(frozen=True)
class StorageView:
    """The view of a storage that a tensor is; `offset` in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def into(self, memory_Z: Tensor, start: int = 0) -> Tensor:
        """The same view of flat bytes, which begin at byte `start` of the storage."""
        offset = memory_Z.storage_offset() + self.offset - start
        looking = torch.empty(0, dtype=self.dtype, device=memory_Z.device)
        # not a view in autograd's sense: it may be the result of an operator
        looking.set_(memory_Z.untyped_storage(), offset // self.dtype.itemsize, self.shape, self.strides)  # type: ignore[call-overload]
        looking = looking.conj() if self.conjugate else looking
        return negative_view(looking) if self.negative else looking

    def reach(self) -> tuple[int, int]:
        """The first byte of the storage that it sees, and the one after the last; for a tensor that is not empty."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + (last + 1) * self.dtype.itemsize


def part_of_storage(look: StorageView, nbytes: int) -> tuple[int, int]:
    """The range copied for a tensor, (start, end) in bytes: all of a storage of `nbytes` if it sees half of it, else what it sees.

    It begins where the device's memory is aligned, so that kernels get the same alignment as before.
    """
    start, end = look.reach()
    return (0, nbytes) if 2 * (end - start) >= nbytes else (start // ALIGNMENT * ALIGNMENT, end)


def flat_bytes(storage: torch.UntypedStorage, start: int, end: int) -> Tensor:
    """Bytes of a storage as a tensor (end - start,)."""
    flat_Z = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat_Z.set_(storage, start, (end - start,), (1,))  # type: ignore[call-overload,no-any-return]


class VersionGuard:
    """A guard that notices changes in place of a tensor, as autograd does, without holding its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._counts = tensor.detach()  # has the same version counter, and keeps it with other data
        self._counts.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.version = version_of(tensor)

    @property
    def changed(self) -> bool:
        return version_of(self._counts) != self.version

    def check(self) -> None:
        """Raises RuntimeError for a tensor that was changed."""
        if self.changed:
            raise RuntimeError(CHANGED)


def guarded(tensor: Tensor) -> Callable[[], Tensor]:
    """A function that returns a tensor that stays where it is. It raises RuntimeError if the tensor was changed in place meanwhile."""
    if not tensor.is_leaf:
        tensor = tensor.detach()  # a node must not hold its own result: nothing would free the two
    version = -1 if tensor.is_inference() else version_of(tensor)

    def give() -> Tensor:
        if version >= 0 and version_of(tensor) != version:
            raise RuntimeError(CHANGED)
        return tensor

    return give


def cast_of_parameter(tensor: Tensor) -> nn.Parameter | None:
    """The parameter of which `tensor` is, or views, a copy in another dtype, as autocast makes it; None for all others."""
    copy: Tensor = tensor if (base := base_of(tensor)) is None else base
    if copy.grad_fn is None or copy.grad_fn.name() != "ToCopyBackward0":
        return None
    source = getattr(copy.grad_fn.next_functions[0][0], "variable", None)
    if type(source) is not nn.Parameter or copy.device != source.device or version_of(copy):
        return None
    same = (source.shape, source.stride()) == (copy.shape, copy.stride())
    return source if same and copy.untyped_storage().nbytes() == copy.numel() * copy.element_size() else None


def views_parameter(tensor: Tensor) -> bool:
    """True where a tensor sees the memory of a parameter that is a DTensor: this process's part of it, as layers compute with it."""
    node = tensor.grad_fn
    for _ in range(4):  # a few views
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        parameter = getattr(node, "variable", None)
        if is_sharded(parameter):
            with torch.no_grad():
                local = parameter.to_local()
            return storage_address(local.untyped_storage()) == storage_address(tensor.untyped_storage())
    return False


def cast_again(tensor: Tensor, source: nn.Parameter) -> Callable[[], Tensor]:
    """A function that returns the tensor of `cast_of_parameter` by casting the parameter again."""
    look, copied, parameter = StorageView.of(tensor), VersionGuard(tensor), VersionGuard(source)

    def give() -> Tensor:
        copied.check()
        parameter.check()
        with torch.no_grad():
            return look.into(source.detach().to(look.dtype))

    return give
