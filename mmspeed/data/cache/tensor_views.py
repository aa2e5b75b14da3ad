"""Read a safetensors payload into tensors that view its bytes, without a copy and with every bound checked."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LENGTH = 8  # bytes of the header's length
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class _Field:
    """One tensor of a payload: type, shape, and range of its bytes after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_of(payload: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors payload, by name; they share its memory and keep it alive.

    Raises ValueError if the payload is not valid, for any content of its header.
    """
    if len(payload) < _LENGTH:
        raise ValueError("shorter than a header")
    start = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
    if start > len(payload):
        raise ValueError("shorter than its header")
    return {field.name: _tensor(payload, start, field) for field in _fields(bytes(payload[_LENGTH:start]))}


@functools.lru_cache(maxsize=1024)  # the entries of a bucket, and captions of a length, have one header
def _fields(text: bytes) -> tuple[_Field, ...]:
    """Parse a header and check its consistency. Raises ValueError."""
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("a header with too many nested levels") from None
    if not isinstance(header, dict):
        raise ValueError("a header that is not a mapping")
    return tuple(_field(name, row) for name, row in header.items() if name != "__metadata__")


def _field(name: str, row: object) -> _Field:
    if not isinstance(row, dict):
        raise ValueError("a tensor without description")
    dtype, shape, span = _DTYPES.get(str(row.get("dtype"))), _sizes(row.get("shape")), _sizes(row.get("data_offsets"))
    if dtype is None or len(span) != 2 or len(shape) > 16:
        raise ValueError("a tensor of unknown form")
    begin, end = span
    if begin > end or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor whose size is not that of its bytes")
    return _Field(name, dtype, tuple(shape), begin, end)


def _tensor(payload: memoryview, start: int, field: _Field) -> Tensor:
    if field.end > len(payload) - start:
        raise ValueError("a tensor beyond the payload's end")
    if field.begin == field.end:
        return torch.empty([min(size, 1 << 31) for size in field.shape], dtype=field.dtype)
    part = payload[start + field.begin : start + field.end]
    flat = torch.frombuffer(part, dtype=field.dtype)
    if flat.data_ptr() % field.dtype.itemsize:  # other writers may not align their data as mmspeed does
        flat = torch.frombuffer(bytearray(part), dtype=field.dtype)
    return flat.view(field.shape)


def _sizes(value: object) -> list[int]:
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError("a size that is not a number")
    return value
