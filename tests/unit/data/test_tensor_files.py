"""Safetensors files written tensor by tensor are those that safetensors writes."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from mmspeed.data.cache.tensor_files import rows_of, write_safetensors


def test_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float64, torch.float8_e4m3fn, torch.int32)
    tensors = {f"{shape}{kind}": torch.ones(shape).to(kind) for shape in ((), (3, 5), (0, 2)) for kind in kinds}
    rows = rows_of(tensors)
    write_safetensors(tmp_path / "x", {"format": "pt"}, rows, (tensors[row.name] for row in rows))
    assert (tmp_path / "x").read_bytes() == safetensors.torch.save(tensors, metadata={"format": "pt"})
