"""Differences in the meaning of weights between a video run and the one that `train.start_from` names."""

from __future__ import annotations

from pathlib import Path

from mmspeed.config import load_record, video_config
from mmspeed.config.schema import ModelConfig, PublishedModelConfig
from mmspeed.models.sora.sizes import resolve_config


def other_shape(place: str | Path, model: ModelConfig | PublishedModelConfig) -> list[str]:
    """Lines on settings in which the run at `place` (its folder, or a checkpoint's) differs from `model` while weights still fit.

    Such weights have the same names and sizes, but compute another function.
    """
    roots = (Path(place), Path(place).parent.parent)
    config_file = next((root / "config.yaml" for root in roots if (root / "config.yaml").is_file()), None)
    if config_file is None:
        return []
    recorded = video_config(load_record(config_file), str(config_file)).model
    if not isinstance(model, ModelConfig) or not isinstance(recorded, ModelConfig):
        return []  # a published class's names and sizes show all
    here, trained = (resolve_config(each, 1, 1) for each in (model, recorded))
    return [
        f"train.start_from: {place} was trained with model.{name} {getattr(trained, name)}, here it is {getattr(here, name)}"
        for name in ("arrangement", "heads", "patch", "control")
        if getattr(here, name) != getattr(trained, name)
    ]
