"""Preparation of the video task: the steps before training. Methods import what they need, so that other commands start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspeed.config import RunConfig, video_config
from mmspeed.config.places import absolute_places, is_url

if TYPE_CHECKING:
    from mmspeed.preprocess.build.online import OnlineBuilder
    from mmspeed.preprocess.report.check import CheckReport

DEMO_CLIPS = "assets/demo-clips/metadata.jsonl"  # of the package

# Every demo clip has 49 frames at up to 30 fps: 1.6 s, which is 13 frames at 8 fps.
BUCKETS = [{"frames": 13, "height": 96, "width": 160}]


class VideoPreparation:
    """Preparation of clips and captions: they are encoded once into a cache, or during the first epoch."""

    def __init__(self, config: RunConfig) -> None:
        self.config = video_config(config, "config")

    @classmethod
    def starting_values(cls, name: str, videos: str | None) -> Mapping[str, Any]:
        """Initial values of the sections for data, codec, text encoder and objective."""
        demo = Path(str(files("mmspeed"))).resolve() / DEMO_CLIPS
        source = {"path": str(demo) if videos is None else videos}
        return {
            "data": {"sources": [source], "cache": f"cache/{name}", "fps": 8.0, "buckets": BUCKETS},
            "vae": {"kind": "linear"},
            "text": {"kind": "minilm"},
            "objective": {"kind": "flow"},
        }

    @classmethod
    def fitted_values(cls, name: str, videos: str, folder: Path) -> tuple[Mapping[str, Any], Sequence[str]]:
        """The initial values with frame rate, buckets, held-out share and prompts that suit the media. Raises UserError like `fit_data`."""
        from mmspeed.preprocess.report.starting import fit_data

        fit = fit_data(absolute_places(folder, videos))
        values, fitted = dict(cls.starting_values(name, videos)), fit.values()
        source = {**values["data"]["sources"][0], **fit.columns}
        values["data"] = {**values["data"], "sources": [source], **fitted["data"]}
        return {**values, "validate": fitted["validate"]}, fit.lines()

    def check(
        self, page: Path | None = None, suggest_buckets: int | None = None, ranks: Sequence[int] | None = None
    ) -> CheckReport:
        """The counts, costs and schedule of the data set. Raises UserError like `mmspeed.preprocess.check`."""
        from mmspeed.preprocess.report.check import check

        return check(self.config, page, suggest_buckets, ranks)

    def build(self, shard: str | None = None, upgrade: Sequence[str] = ()) -> list[str]:
        """Build or complete the cache. Raises UserError like `CacheBuilder`."""
        from mmspeed.preprocess.build.offline import CacheBuilder

        return CacheBuilder(self.config, shard, upgrade).run().lines()

    def build_on_ray(self, workers: int | None = None) -> list[str]:
        """Build or complete the cache on Ray. Raises UserError like `mmspeed.preprocess.build.ray.build_on_ray`."""
        from mmspeed.preprocess.build.ray import build_on_ray

        return build_on_ray(self.config, workers).lines()

    def maker(self) -> OnlineBuilder | None:
        """The encoder of missing entries in the first epoch; None with `preprocess.online: false` and for a cache at a URL."""
        from mmspeed.preprocess.build.online import OnlineBuilder

        enabled = self.config.preprocess.online and not is_url(self.config.data.cache)
        return OnlineBuilder(self.config) if enabled else None
