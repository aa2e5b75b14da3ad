"""Preparation of the video task: the steps before training. Methods import what they need, so that other commands start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspeed.config import RunConfig, video_config
from mmspeed.config.known_models import videos_of
from mmspeed.config.places import absolute_places, is_url
from mmspeed.errors import UserError
from mmspeed.preprocess.texts.preparation import recipes

if TYPE_CHECKING:
    from mmspeed.data.cache.made_from import MadeFrom
    from mmspeed.preprocess.build.online import OnlineBuilder
    from mmspeed.preprocess.report.check import CheckReport

DEMO_CLIPS = "assets/demo-clips/metadata.jsonl"  # of the package

# Every demo clip has 49 frames at up to 30 fps: 1.6 s, which is 13 frames at 8 fps.
BUCKETS = [{"frames": 13, "height": 96, "width": 160}]


FINE_TUNING_RATE = 1e-5  # of published models, a tenth of the rate from the beginning


def _demo() -> str:
    """The path of the clips that ship with the package."""
    return str(Path(str(files("mmspeed"))).resolve() / DEMO_CLIPS)


class VideoPreparation:
    """Preparation of clips and captions: they are encoded once into a cache, or during the first epoch."""

    def __init__(self, config: RunConfig) -> None:
        self.config = video_config(config, "config")

    @classmethod
    def starting_values(cls, name: str, videos: str | None, model: str | None = None) -> Mapping[str, Any]:
        """Initial values of the sections for data, codec, text encoder and objective; for a published model those of its repository.

        Raises UserError for a `model` that is no short name, hub id or folder of one.
        """
        source: dict[str, Any] = {"path": _demo() if videos is None else videos}
        data = {"sources": [source], "cache": f"cache/{name}", "fps": 8.0, "buckets": BUCKETS}
        if model is not None:
            from mmspeed.preprocess.report.starting import target_of

            target = target_of(model)
            bucket = {"frames": target.frames, **dict(zip(("height", "width"), target.sizes[0], strict=True))}
            section = {"kind": "diffusers", "pretrained": target.repository}
            data = {**data, "fps": target.fps, "buckets": [bucket]}
            if target.control:  # the usual name of the column
                source["roles"] = {"control": "control"}
            modes = {} if target.mode is None else {"conditioning": {target.mode: 1.0}}
            experts = {"objective": {"kind": "family", "experts": "both"}} if target.experts else {}
            one_card: dict[str, Any] = {
                "train": {"lr": FINE_TUNING_RATE, "micro_batch_size": 1},
                "device": {"dtype": "bfloat16"},
            }
            if not experts:  # a budget does not go with two
                one_card["memory"] = {"fraction": 0.9}
            return {"data": data, "model": section, **experts, **modes, **one_card}
        return {"data": data, "vae": {"kind": "linear"}, "text": {"kind": "minilm"}, "objective": {"kind": "flow"}}

    @classmethod
    def fitted_values(
        cls, name: str, videos: str | None, folder: Path, model: str | None = None
    ) -> tuple[Mapping[str, Any], Sequence[str]]:
        """The initial values with frame rate, buckets, held-out share and prompts that suit the media, and the model.

        Raises UserError like `fit_data` and `starting_values`.
        """
        if model is not None:
            if model.removeprefix("tiny-") in recipes():
                raise UserError(
                    f"--model: {model} is a language model: add --task language, or --texts in place of --videos"
                )
            videos_of(model)  # names a word that is none before anything is loaded
        from mmspeed.preprocess.report.starting import fit_data, target_of

        place = _demo() if videos is None else absolute_places(folder, videos)
        fit = fit_data(place, target=None if model is None else target_of(model))
        values, fitted = dict(cls.starting_values(name, videos, model)), fit.values()
        source = {**values["data"]["sources"][0], **fit.columns}
        values["data"] = {**values["data"], "sources": [source], **fitted["data"]}
        if "conditioning" in values or "roles" in source:  # prompts in training have neither images nor a control
            return values, fit.lines()
        return {**values, "validate": fitted["validate"]}, fit.lines()

    def check(
        self,
        page: Path | None = None,
        suggest_buckets: int | None = None,
        ranks: Sequence[int] | None = None,
        schedule: bool = False,
    ) -> CheckReport:
        """The counts, costs and schedule of the data set. Raises UserError like `mmspeed.preprocess.check`."""
        from mmspeed.preprocess import check

        return check(self.config, page, suggest_buckets, ranks, schedule)

    def build(self, shard: str | None = None) -> list[str]:
        """Build or complete the cache. Raises UserError like `CacheBuilder`."""
        from mmspeed.preprocess import CacheBuilder

        return CacheBuilder(self.config, shard).run().lines()

    def build_on_ray(self, workers: int | None = None) -> list[str]:
        """Build or complete the cache on Ray. Raises UserError like `mmspeed.preprocess.build.ray.build_on_ray`."""
        from mmspeed.preprocess.build.ray import build_on_ray

        return build_on_ray(self.config, workers).lines()

    def sources_now(self) -> MadeFrom:
        """The record of the sources as they are now. Raises UserError like `list_sources`, and for stores that are slow."""
        from mmspeed.preprocess.sources.made_from import listed_now

        return listed_now(self.config.data)

    def maker(self) -> OnlineBuilder | None:
        """The encoder of missing entries in the first epoch; None with `preprocess.online: false` and for a cache at a URL."""
        from mmspeed.preprocess.build.online import OnlineBuilder

        enabled = self.config.preprocess.online and not is_url(self.config.data.cache)
        return OnlineBuilder(self.config) if enabled else None
