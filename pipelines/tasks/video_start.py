"""What the weights of another video run mean, where `train.start_from` names it."""

from __future__ import annotations

from pathlib import Path

from mmspeed.config import load_record, video_config
from mmspeed.config.schema import ModelConfig
from mmspeed.models.sora.sizes import resolve_config


def other_shape(place: str | Path, model: ModelConfig) -> list[str]:
    """What the weights of the run at `place` (its folder, or that of a checkpoint) were trained as, where `model` reads them otherwise.

    Such weights fit by their names and sizes, and mean something else.
    """
    roots = (Path(place), Path(place).parent.parent)
    found = next((root / "config.yaml" for root in roots if (root / "config.yaml").is_file()), None)
    if found is None:
        return []
    here, there = (resolve_config(each, 1, 1) for each in (model, video_config(load_record(found), str(found)).model))
    return [
        f"train.start_from: {place} was trained with model.{name} {getattr(there, name)}, here it is {getattr(here, name)}"
        for name in ("arrangement", "heads", "patch")
        if getattr(here, name) != getattr(there, name)
    ]
