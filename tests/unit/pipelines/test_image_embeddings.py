"""Embeddings of given frames by a repository's image encoder: in the cache, in batches, in the models' counts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmspeed.cli.init import write_config
from mmspeed.config import Config, load_config
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.data import DatasetCache
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.media.source import Source
from mmspeed.models.families import FAMILIES, class_name
from mmspeed.models.image_encoder import image_fingerprint
from mmspeed.models.sections import bare, call_of, repository_of, stored_conditions
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.unused import freeze_unused
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.encoding.encode import Encoders, TrustedBatches, encode_latents
from mmspeed.protocols import Conditions, RunPlace
from mmspeed.shapes import Bucket, Strides
from tests.support.runs import losses
from tests.support.tiny_repositories import save_hunyuan_video15_images, save_wan_images

CPU = Device("cpu", 0)
SMALL = (
    "data.limit=3", "data.buckets=[{frames: 9, height: 32, width: 48}]", "data.val_fraction=0", "validate.prompts=[]",
    "train.steps=2", "train.log_every=1", "train.ema_decay=null", "preprocess.latent_dtype=float32",
)  # fmt: skip


def config_of(folder: Path, *overrides: str) -> Config:
    if not (folder / "own.yaml").exists():
        write_config(folder / "own.yaml", model=str(folder / "tiny"))
    return load_config(folder / "own.yaml", (*SMALL, *overrides))


def section(folder: Path) -> PublishedModelConfig:
    return PublishedModelConfig(kind="diffusers", pretrained=str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_a_model_is_trained_on_embeddings_from_its_cache(tmp_path: Path, last: bool) -> None:
    """Each entry holds the embedding of its clip's given frames, which the batch has; the base's image encoder is a part of its key."""
    save_wan_images(tmp_path / "tiny", last=last)
    mode, names = ("first_last", ["image_first", "image_last"]) if last else ("first", ["image_first"])
    config = config_of(tmp_path, f"conditioning={{{mode}: 1}}")
    assert stored_conditions(config) == (f"grey_{mode}", *names)
    TrainPipeline(config, online=True).run()
    assert len(losses(config)) == 2
    task = VideoDomain(config)
    task.open(RunPlace(CPU))
    (batch, *_) = (batch for step in task.data(RunPlace(CPU)).steps(0, 1) for batch in step.batches)
    assert batch["image"].shape == (batch.size, 1 + last, 257, 16)
    cache = DatasetCache(config.cache_root)
    for place, item in enumerate(batch.items):
        (key,) = next(sample.latent_keys for sample in cache.split("train") if sample.key == item.sample)
        stored = cache.latent(key)
        assert torch.equal(batch["image"][place], torch.stack([stored[name] for name in names]))
    assert not torch.equal(batch["image"][0], batch["image"][1])


def test_entries_hold_what_the_pipelines_encoder_makes_of_the_frames(tmp_path: Path) -> None:
    """And another image encoder gives other keys; a text-to-video model stores and loads none."""
    import diffusers

    save_wan_images(tmp_path / "tiny", last=True)
    config = config_of(tmp_path, "conditioning={first_last: 1}")
    encoders = Encoders(config, CPU)
    frames_FHWC = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)
    source = Source("a.mp4", "a.mp4", None, None, "video", ("a rabbit",), "train")
    one = Clip(source, Bucket(9, 32, 48), tuple(range(9)), (0, 0, 48, 32), "c", 8.0, 1.1)
    (entry,) = encode_latents(encoders, TrustedBatches(1), [(one, frames_FHWC)])
    assert isinstance(entry, dict) and {"mean", "grey_first_last", "image_first", "image_last"} <= set(entry)
    pipeline: Any = diffusers.WanImageToVideoPipeline.from_pretrained(tmp_path / "tiny")
    pictures = [Image.fromarray(frames_FHWC[place]) for place in (0, -1)]
    truth = pipeline.encode_image(pictures, "cpu")
    torch.testing.assert_close(torch.stack([entry["image_first"], entry["image_last"]]), truth, atol=1e-6, rtol=1e-6)
    assert encoders.loaded == ("codec", "image")
    key, parts = encoders.latent_key(one), encoders.latent_parts(one)
    assert parts["image_encoder"] == image_fingerprint(config) is not None
    weights = next((tmp_path / "tiny" / "image_encoder").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert Encoders(config, CPU).latent_key(one) != key


CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "wan 2.1, first and last": (lambda folder: save_wan_images(folder, last=True), "first_last"),
    "hunyuan-video-1.5": (save_hunyuan_video15_images, "first"),
}


@pytest.mark.parametrize("name", CASES)
def test_all_weights_train_and_operations_are_counted(tmp_path: Path, name: str) -> None:
    """Beside those of the last block of HunyuanVideo 1.5: what is unused without images is reached with them."""
    save, mode = CASES[name]
    save(tmp_path / "tiny")
    model = bare(repository_of(section(tmp_path / "tiny")))
    call, config = call_of(section(tmp_path / "tiny")), dict(model.config)  # type: ignore[arg-type]
    assert call is not None
    rule: Any = call.conditioning(config)  # type: ignore[attr-defined]
    assert rule.modes == (mode,) and not [each for each in freeze_unused(model, config, call) if "image" in each]
    kind = class_name(model)
    assert kind is not None and FAMILIES[kind].image is not None
    channels, latent, tokens = config["out_channels"], (3, 4, 6), 7
    named = {
        "conditioning_mask": torch.tensor([[True, False, mode == "first_last"]]), "condition": torch.zeros(1, channels, *latent),
        "image": torch.ones(1, *rule.image_size),
        "text_2": torch.zeros(1, 5, 24), "text_2_mask": torch.ones(1, 5, dtype=torch.bool),
    }  # fmt: skip
    conditions = Conditions(
        torch.zeros(1, tokens, 16), torch.ones(1, tokens, dtype=torch.bool), strides=Strides(4, 8), named=named
    )
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for parameter in (*model.parameters(), *model.buffers()):
            parameter.zero_()
        model(**call.call(config, torch.zeros(1, channels, *latent), torch.ones(1), conditions))
    assert counter.get_total_flops() == call.flops(config, latent, tokens)
    with pytest.raises(
        UserError, match=r"takes an image encoder's embedding of width 16 of each given frame, here none"
    ):
        only = {key: each for key, each in named.items() if key != "image"}
        call.call(
            config,
            torch.zeros(1, channels, *latent),
            torch.ones(1),
            Conditions(conditions.text_BLD, conditions.text_mask_BL, named=only),
        )
