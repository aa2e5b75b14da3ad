"""What checkpoints hold, whole, whatever the number of ranks that wrote them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mmspeed.loop.checkpoint.load import latest, open_checkpoint


def whole_checkpoint(run: Path, folder: Path | None = None) -> dict[str, Tensor]:
    """Every tensor of a run's latest checkpoint (or of `folder`) by its name: model.*, ema.*, optimizer.*."""
    place = folder or latest(run / "checkpoints")
    assert place is not None
    results: dict[str, Tensor] = {}
    with ExitStack() as stack:
        opened = cache(lambda file: stack.enter_context(safe_open(place / file, "pt")))  # each reads its header
        for name, entry in open_checkpoint(place)[1]["tensors"].items():
            for chunk in entry["chunks"]:
                part = opened(chunk["file"]).get_tensor(name)
                if name not in results:
                    results[name] = torch.empty(entry["shape"], dtype=part.dtype)
                slices = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["shape"], strict=True))
                results[name][slices] = part.reshape(chunk["shape"])
    return results


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not bitwise the same."""
    assert one.keys() == other.keys() and one
    bits = [{name: tensor.reshape(-1).view(torch.uint8) for name, tensor in each.items()} for each in (one, other)]
    return [name for name in one if not torch.equal(bits[0][name], bits[1][name])]


def farthest(one: dict[str, Tensor], other: dict[str, Tensor], prefix: str) -> float:
    """The greatest difference of two numbers in the same place of the tensors whose names begin with `prefix`."""
    names = [name for name in one if name.startswith(prefix)]
    assert names and one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in names if one[name].numel())


def farthest_gradient(true: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The greatest distance of two first moments of AdamW, which after one step are a tenth of the gradients, as a share of their norm.

    A norm counts as a tenth of the largest one at least: in the smallest, larger numbers nearly cancel, and are rounded.
    """
    moments = {name: value for name, value in true.items() if name.endswith(".exp_avg")}
    least = 0.1 * max(value.norm() for value in moments.values())
    assert all(value.any() for value in moments.values())
    return max(float((other[name] - value).norm() / max(value.norm(), least)) for name, value in moments.items())
