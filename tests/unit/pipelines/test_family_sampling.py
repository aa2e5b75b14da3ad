"""Samples of published models: our loop with the repository's scheduler gives the latents of the official pipeline.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.config import Config, make_config
from mmspeed.device import Device
from mmspeed.models.families.complete import completed
from mmspeed.models.sections import call_of, repository_of
from mmspeed.models.text.encoders import load_text_encoder
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.diffusion.predictor import make_predictor
from mmspeed.pipelines.diffusion.schedulers import family_sampler
from mmspeed.pipelines.inference.generate import SampleSettings, sample_together
from mmspeed.shapes import Bucket
from tests.support.covers import slow_but
from tests.support.official_pipelines import FACTS, FPS, NEGATIVE, PROMPT, load_official, official_latents, shape_of
from tests.support.tiny_repositories import REPOSITORIES, save_cogvideox, save_mochi
from tests.unit.pipelines.test_family_steps import filled

CPU = Device("cpu", 0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repositories")
    for name in FACTS:
        REPOSITORIES.get(name, lambda place: save_cogvideox(place, "2b"))(folder / name)
    return folder


def config_of(home: Path, name: str, **sections: Any) -> Config:
    bucket = {"frames": 1, "height": 64, "width": 96}
    tree = {
        "data": {"sources": [{"path": "videos"}], "buckets": [bucket], "fps": FPS},
        "model": {"kind": "diffusers", "pretrained": str(home / name)},
        **sections,
    }
    return completed(make_config(tree))


def ours(home: Path, name: str, noise: Tensor, steps: int, guidance: float, negative_prompt: str = NEGATIVE) -> Tensor:
    """Latents of our loop."""
    config = config_of(home, name)
    model = filled(config.model, 0, 0, "cpu").eval()
    bucket, shape = shape_of(name)
    encoder = load_text_encoder(config.text, CPU)
    predictor = make_predictor(model, config.objective, shape[0], encoder.width, call_of(config.model))
    objective = make_objective(config.objective, family_sampler(config)).sized(bucket, predictor.tokens(shape[1:]))
    text, negative = encoder.encode([PROMPT, negative_prompt])
    settings = SampleSettings(steps, guidance, config.sample.sampler, 0)
    return sample_together(
        model, objective, [text], [negative], noise, settings, CPU, None, predictor, FPS, FACTS[name][0]
    )


CASES = {
    f"{name}-{steps}": (name, steps, guidance)
    for name, steps, guidance in (
        *((name, *each) for name in FACTS for each in ((3, 4.0), (8, 1.0))),
        ("cogvideox-5b", 30, 4.0),
    )
}
LONG = ("qwen-image", "hunyuan-video-1.5")  # 8 steps of these take long
FAST = {f"{name}-{3 if place % 2 or name in LONG else 8}" for place, name in enumerate(FACTS)}


@pytest.mark.parametrize("case", slow_but(CASES, FAST))
def test_samples_are_those_of_the_pipeline(home: Path, case: str) -> None:
    name, steps, guidance = CASES[case]
    _, shape = shape_of(name)
    noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(3))
    actual = ours(home, name, noise, steps, guidance)
    truth = official_latents(load_official(home / name), name, noise, steps, guidance)
    assert (actual - noise).abs().max() > 0.1  # it went somewhere
    torch.testing.assert_close(actual, truth, atol=1e-5, rtol=1e-5)


def test_mochi_masks_an_empty_negative_prompt_where_its_repository_says_so(tmp_path: Path) -> None:
    """The published repository does; the empty caption then has no rows, in sampling and in the cache's entry for dropped captions."""
    save_mochi(tmp_path / "mochi", forced=True)
    noise = torch.randn((1, *shape_of("mochi")[1]), generator=torch.Generator().manual_seed(3))
    actual = ours(tmp_path, "mochi", noise, 3, 4.0, "")
    truth = official_latents(load_official(tmp_path / "mochi"), "mochi", noise, 3, 4.0, "")
    torch.testing.assert_close(actual, truth, atol=1e-5, rtol=1e-5)
    encoder = load_text_encoder(config_of(tmp_path, "mochi").text, CPU)
    assert [tuple(entry.embeds_LD.shape) for entry in encoder.encode(["", "rain"])] == [(0, 16), (4, 16)]
    save_mochi(tmp_path / "other" / "mochi")
    other = ours(tmp_path / "other", "mochi", noise, 3, 4.0, "")
    assert (other - actual).abs().max() > 1e-4  # which sees the empty prompt's last token


def test_the_defaults_are_the_pipelines_own(home: Path) -> None:
    sample = config_of(home, "wan").sample
    assert (sample.sampler, sample.steps, sample.guidance) == ("family", 50, 5.0)
    sample = config_of(home, "hunyuan-video", sample={"steps": 4, "sampler": "euler"}).sample
    assert (sample.sampler, sample.steps, sample.guidance) == ("euler", 4, 6.0)
    own = completed(
        make_config({"data": {"sources": [{"path": "v"}], "buckets": [{"frames": 1, "height": 8, "width": 8}]}})
    )
    assert (own.sample.sampler, own.sample.steps, own.sample.guidance) == ("auto", 30, 4.0)


def test_objectives_are_those_of_the_schedulers(home: Path) -> None:
    from mmspeed.config.schema import DdpmConfig, FlowConfig
    from mmspeed.pipelines.diffusion.ddpm import alphas_cumprod

    for name in FACTS:
        config = config_of(home, name)
        scheduler = repository_of(config.model).config("scheduler")  # type: ignore[arg-type]
        if name.startswith("cogvideox"):
            import diffusers

            assert isinstance(config.objective, DdpmConfig)
            assert config.objective.snr_shift_scale == (3.0 if name == "cogvideox-2b" else 1.0)
            truth = diffusers.CogVideoXDDIMScheduler.from_config(scheduler).alphas_cumprod  # type: ignore[attr-defined]
            torch.testing.assert_close(alphas_cumprod(config.objective).float(), truth.float(), atol=1e-6, rtol=1e-4)
        else:
            assert isinstance(config.objective, FlowConfig)
            shift = config.objective.shift_of(Bucket(1, 64, 96), 1024)
            expected = {
                "wan": 3.0, "ltx": 2.71828**0.95, "hunyuan-video": 7.0, "mochi": 1.0, "flux": 2.71828**0.63, "qwen-image": 2.71828**0.63,
                "hunyuan-video-1.5": 5.0,
            }[name]  # fmt: skip
            assert shift == pytest.approx(expected, rel=1e-3)
