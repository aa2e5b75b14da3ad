"""What comes before training of the video task. Imports what a command needs inside the method, so that others start at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspeed.config import RunConfig, video_config
from mmspeed.config.places import is_url

if TYPE_CHECKING:
    from mmspeed.preprocess.build.online import OnlineBuilder
    from mmspeed.preprocess.report.check import CheckReport

DEMO_CLIPS = "assets/demo-clips/metadata.jsonl"  # of the package

# Every demo clip has 49 frames at up to 30 in a second: 1.6 s, which is 13 frames at 8 in a second.
BUCKETS = [{"frames": 13, "height": 96, "width": 160}]


class VideoPreparation:
    """Clips and captions: encoded once into a cache, or during the first epoch."""

    def __init__(self, config: RunConfig) -> None:
        self.config = video_config(config, "config")

    @classmethod
    def starting_values(cls, name: str, videos: str | None) -> Mapping[str, Any]:
        """The data, the codec, the text encoder and the objective."""
        demo = Path(str(files("mmspeed"))).resolve() / DEMO_CLIPS
        source = {"path": str(demo) if videos is None else videos}
        return {
            "data": {"sources": [source], "cache": f"cache/{name}", "fps": 8.0, "buckets": BUCKETS},
            "vae": {"kind": "linear"},
            "text": {"kind": "minilm"},
            "objective": {"kind": "flow"},
        }

    def check(
        self, page: Path | None = None, suggest_buckets: int | None = None, ranks: Sequence[int] | None = None
    ) -> CheckReport:
        """The counts, costs and schedule of the data set. Raises UserError as `mmspeed.preprocess.check`."""
        from mmspeed.preprocess.report.check import check

        return check(self.config, page, suggest_buckets, ranks)

    def build(self, shard: str | None = None) -> list[str]:
        """Build or complete the cache. Raises UserError as `CacheBuilder`."""
        from mmspeed.preprocess.build.offline import CacheBuilder

        return CacheBuilder(self.config, shard).run().lines()

    def build_on_ray(self, workers: int | None = None) -> list[str]:
        """As `build`, on Ray. Raises UserError as `mmspeed.preprocess.build.ray.build_on_ray`."""
        from mmspeed.preprocess.build.ray import build_on_ray

        return build_on_ray(self.config, workers).lines()

    def maker(self) -> OnlineBuilder | None:
        """What encodes missing entries in the first epoch; None with `preprocess.online: false` and for a cache at a URL."""
        from mmspeed.preprocess.build.online import OnlineBuilder

        wanted = self.config.preprocess.online and not is_url(self.config.data.cache)
        return OnlineBuilder(self.config) if wanted else None
