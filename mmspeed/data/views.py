"""Tensors as views of the bytes they were stored in: a safetensors payload read without a copy, every bound checked."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

_LENGTH = 8  # bytes of the number that says how long the header is


def tensors_of(payload: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors payload, by name; they share its memory and keep it alive.

    Raises ValueError when the payload is none, whatever its header says.
    """
    if len(payload) < _LENGTH:
        raise ValueError("shorter than a header")
    start = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
    if start > len(payload):
        raise ValueError("shorter than its header")
    try:
        header = json.loads(bytes(payload[_LENGTH:start]))
    except RecursionError:
        raise ValueError("a header of too many layers") from None
    if not isinstance(header, dict):
        raise ValueError("a header that is no mapping")
    return {name: _tensor(payload, start, row) for name, row in header.items() if name != "__metadata__"}


def _tensor(payload: memoryview, start: int, row: object) -> Tensor:
    if not isinstance(row, dict):
        raise ValueError("a tensor without description")
    dtype, shape, span = _dtypes().get(str(row.get("dtype"))), _sizes(row.get("shape")), _sizes(row.get("data_offsets"))
    if dtype is None or len(span) != 2 or len(shape) > 16:
        raise ValueError("a tensor of unknown form")
    begin, end = span
    count = math.prod(shape)
    if not begin <= end <= len(payload) - start or end - begin != count * dtype.itemsize:
        raise ValueError("a tensor beyond the payload's end")
    if count == 0:
        return torch.empty([min(size, 1 << 31) for size in shape], dtype=dtype)
    part = payload[start + begin : start + end]
    flat = torch.frombuffer(part, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:  # other writers may not align; our tars and headers do
        flat = torch.frombuffer(bytearray(part), dtype=dtype)
    return flat.reshape(shape)


def _sizes(value: object) -> list[int]:
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError("a size that is no number")
    return value


def _dtypes() -> dict[str, torch.dtype]:
    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
