"""Train published video transformers of diffusers: from Python, or as a task of an installed package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from mmspeed.config import Config
from mmspeed.config.schema import ModelConfig, PublishedModelConfig
from mmspeed.data.loading.first_epoch import OnlineEncoder
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.small_published import PublishedModel, small_published
from mmspeed.pipelines.sparsify import sparsify_model
from mmspeed.protocols import ModelCall, SmallRun


class PublishedVideoDomain(VideoDomain):
    """The video task of a published text-to-video model: Wan, LTX, CogVideoX or HunyuanVideo.

    load = lambda: WanTransformer3DModel.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", subfolder="transformer")
    TrainPipeline(config, task=PublishedVideoDomain(config, load)).run()

    Only `sparse` is read from the config's `model` section: it makes self-attention of the loaded model sparse, as
    `mmspeed.sparsify_model` does. `vae`, `text` and `objective` must name those that the model was trained with. Every process calls
    `load` for each model that is made: once, and three times where a memory budget is measured. The loaded model has its weights, trains in
    float32, and needs no init_weights; parameters that `load` froze stay frozen.

    An adapter is `load`'s to put on (`model.add_adapter` of diffusers); `model.adapter` is refused.

    call: the call of another class's forward, an object like those of `mmspeed.models.families`; None: that of the class's name.
    Such a class names its blocks in an attribute `blocks` or in a plan (`mmspeed.protocols.declare_plan`).

    The commands of `mmspeed` find such a task where an installed package declares a class derived from this one (docs/any-model.md).
    """

    def __init__(
        self,
        config: Config,
        load: Callable[[], nn.Module],
        maker: OnlineEncoder | None = None,
        call: ModelCall | None = None,
    ) -> None:
        if config.adapter is not None:
            raise UserError(
                f"model.adapter: {type(self).__name__} trains the model that its program loads, as it is: put the adapter on there "
                "(add_adapter of diffusers) and leave the key out, or set task: video, which reads it"
            )
        super().__init__(config, maker, lambda section, *_: _loaded(load, section), call)
        self._load = load

    def compare_start(self, start: str) -> list[str]:
        """Differences beyond those of names and sizes of weights: none."""
        return []

    def small(self, folder: Path) -> SmallRun:
        """A small run of a model of the same class and heads, of the task `video`. Loads the model once, for its config.

        Raises UserError for a class that is not known, and for a model that was changed after it was made.
        """
        own = {name: value for name, value in self.config if name in Config.model_fields}
        config = Config.model_validate({**own, "task": "video"})
        return replace(small_published(config, PublishedModel.of(self._load(), self._call), folder), named=False)


def _loaded(load: Callable[[], nn.Module], section: ModelConfig | PublishedModelConfig) -> nn.Module:
    """A model with its weights, sparse where the section asks for it; training sets up the control of its thresholds itself."""
    model = load()
    if section.sparse is not None:
        sparsify_model(model, section.sparse)
    return model
