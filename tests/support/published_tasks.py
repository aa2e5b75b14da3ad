"""Tasks of published models as an installed package declares them: Wan and LTX of a saved folder, named in a config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmspeed.config import Config
from mmspeed.config.tasks import TaskEntry
from mmspeed.pipelines.tasks.published import PublishedVideoTask
from mmspeed.preprocess.preparation import VideoPreparation
from tests.support.published import load

HOME = "PUBLISHED_HOME"  # of the saved models, in the environment


class WanConfig(Config):
    """A run of the task `wan`."""

    task: Literal["wan"] = "wan"  # type: ignore[assignment]


class WanTask(PublishedVideoTask):
    """The saved Wan."""

    config_class: ClassVar[type[Config]] = WanConfig

    def __init__(self, config: Config, maker: Any = None) -> None:
        super().__init__(config, lambda: load(Path(os.environ[HOME]), "wan"), maker)


class PreparedWanTask(WanTask):
    """The same, whose data are made ready as any video's."""

    preparation_class = VideoPreparation


PREPARED = TaskEntry("tests.support.published_tasks:PreparedWanTask", origin="a test")
