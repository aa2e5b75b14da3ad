"""A control video from a manifest's column to a sampled video: further channels of SoraDiT, and Wan VACE, whose input is its pipeline's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from mmspeed import rng
from mmspeed.cli.sample_command import completed
from mmspeed.config import Bucket, Config, make_config, video_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights
from mmspeed.loop.checkpoint.load import load_start
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState
from mmspeed.media.pixel_rules import NEWEST_RULES
from mmspeed.media.reading import whole_window
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.sections import outline
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.check.official import check_against_official
from mmspeed.pipelines.check.official_calls import compared, official_calls, official_pipeline, recorded
from mmspeed.pipelines.diffusion.conditioning_frames import check_prompts, check_roles
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.inference.conditioning_media import check_request
from mmspeed.pipelines.inference.official import OfficialSampler
from mmspeed.pipelines.inference.prompts import VideoRequest, read_requests
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.preparation import VideoPreparation
from mmspeed.protocols import Batch, RunPlace
from mmspeed.protocols.calls import Conditioning
from tests.support.runs import CLIPS, small_tree
from tests.support.tiny_repositories import save_wan_vace

SIZE = Bucket(5, 32, 48)
FPS = 2.0  # at which the demo's clips have five frames
SORA: dict[str, Any] = {"width": 24, "depth": 2, "heads": 2, "latent_channels": 4, "text_width": 384, "adaln_rank": 4}
TAKES = Conditioning(roles=("control", "blank"))


def control_config(folder: Path, **sections: Any) -> Config:
    """Three clips, each with the next one as its control."""
    tree = small_tree(folder, clips=3)
    rows = [json.loads(line) for line in (folder / "clips.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "depth": rows[(n + 1) % 3]["video"]}) + "\n" for n, row in enumerate(rows)]
    (folder / "clips.jsonl").write_text("".join(lines))
    tree["data"] |= {"sources": [{"path": str(folder / "clips.jsonl"), "roles": {"control": "depth"}}], "fps": FPS}
    tree["train"] |= {"steps": 3, "batch_size": 2, "caption_dropout": 0.0}
    tree |= sections
    return make_config({name: section for name, section in tree.items() if section is not None}, origin="test")


def trained(config: Config) -> Config:
    CacheBuilder(config).run()
    TrainPipeline(config).run()
    return config


@pytest.fixture(scope="module")
def sora(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of SoraDiT with a control."""
    return trained(control_config(tmp_path_factory.mktemp("sora"), model={"size": "nano", "control": True}))


@pytest.fixture(scope="module")
def vace(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of a tiny Wan VACE."""
    folder = tmp_path_factory.mktemp("vace")
    model = {"kind": "diffusers", "pretrained": str(save_wan_vace(folder / "base"))}
    return trained(control_config(folder, model=model, vae=None))


def first_batch(domain: VideoDomain) -> Batch:
    """The first sample that training reads, alone."""
    place = RunPlace(Device("cpu", 0))
    domain.open(place)
    data = domain.data(place)
    return data.loader.collate([(data.sampler.draws(0)[0], 1.0)])


def control_file(config: Config, source: str) -> Path:
    """The control of the clip with a source's name."""
    rows = [json.loads(line) for line in Path(config.data.sources[0].path).read_text().splitlines()]
    return Path(next(row["depth"] for row in rows if row["video"].endswith(source)))


def test_with_new_channels_of_zero_the_loss_is_that_without_a_control(sora: Config) -> None:
    batch = first_batch(VideoDomain(sora))
    losses, models = [], [SoraDiT(SoraDiTConfig(**SORA, control=control)) for control in (False, True)]
    assert not models[1].state_dict()["control_in.weight"].any()
    for model in models:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != "control_in.weight":
                    parameter.add_(0.1 * rng.normal(parameter.shape, 1, "perturb", name))
        tree = sora.model_dump(mode="json", by_alias=True)
        if not model.config.control:
            tree |= {
                "model": {"size": "nano"},
                "data": tree["data"] | {"sources": [{"path": sora.data.sources[0].path}]},
            }
        domain = VideoDomain(video_config(make_config(tree, origin="test"), "test"))
        domain.open_without_data()
        losses.append(values_of(domain, {"model": model}, batch).loss.loss_I)
    assert torch.equal(*losses)
    counts = []
    for model in models:
        inputs = torch.zeros(1, 4, 2, 4, 6), torch.zeros(1), torch.zeros(1, 3, 384), torch.ones(1, 3, dtype=torch.bool)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*inputs, control_BCThw=inputs[0] if model.config.control else None)
        counts.append(counter.get_total_flops() - model.flops((2, 4, 6), 3))
    assert counts[0] == counts[1]  # the fused attention of a CPU is not counted
    losses[1].sum().backward()
    assert models[1].control_in.weight.grad.abs().max() > 0  # type: ignore[union-attr]
    x, text, mask = torch.zeros(1, 4, 2, 4, 6), torch.zeros(1, 3, 384), torch.ones(1, 3, dtype=torch.bool)
    for model, control, words in (
        (models[0], x, r"has the shape \(1, 4, 2, 4, 6\), the model takes None"),
        (models[1], None, r"has the shape None, the model takes \(1, 4, 2"),
        (models[1], x[:, :, :1], r"has the shape \(1, 4, 1, 4, 6\), the model takes \(1, 4, 2"),
    ):
        with pytest.raises(ValueError, match=words):
            model(x, torch.zeros(1), text, mask, control_BCThw=control)


def test_a_run_begins_from_one_without_a_control(tmp_path: Path) -> None:
    plain, model = (SoraDiT(SoraDiTConfig(**SORA, control=control)) for control in (False, True))
    init_weights(plain, 7)
    CheckpointManager(tmp_path).save(1, TrainingState(plain), blocking=True)
    load_start(tmp_path / "step-00000001", model)
    state = model.state_dict()
    assert not state.pop("control_in.weight").any()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())
    CheckpointManager(tmp_path / "other").save(1, TrainingState(model), blocking=True)
    with pytest.raises(UserError, match=r"holds `model.control_in.weight`, which the model here does not have"):
        load_start(tmp_path / "other" / "step-00000001", plain)


def test_the_input_of_a_cached_sample_is_that_of_the_official_pipeline(vace: Config) -> None:
    """diffusers' WanVACEPipeline, with its components saved and loaded, encodes caption and control itself."""
    domain = VideoDomain(vace)
    batch = first_batch(domain)
    (source,) = (item.source for item in batch.items)
    prompt = next(row["caption"] for row in map(json.loads, CLIPS.read_text().splitlines()) if row["video"] in source)
    frames = whole_window(control_file(vace, Path(source).name), SIZE, FPS, 4, NEWEST_RULES)
    repository = Repository.open(vace.model.pretrained)  # type: ignore[union-attr]
    model = outline(vace.model, domain.sizes.channels, domain.sizes.text_width, repository)
    ours = recorded(model, partial(values_of, domain, {"model": model}, batch))
    video = {"video": [Image.fromarray(frame) for frame in frames]}
    pipeline = official_pipeline(repository, model, "WanVACEPipeline")
    official = compared(ours, official_calls(pipeline, model, domain, batch, [prompt], video))
    errors = {argument.name: argument.error for argument in official}
    assert ours["control_hidden_states"].shape == (1, 96, 2, 4, 6)
    assert errors.keys() == {
        "hidden_states", "timestep", "encoder_hidden_states", "control_hidden_states", "control_hidden_states_scale",
    }  # fmt: skip
    # the caption alone is computed again, in another batch: its last bits follow the machine's products
    assert all(
        error is not None and error <= (5e-6 if name == "encoder_hidden_states" else 0)
        for name, error in errors.items()
    ), errors


def test_the_check_against_the_official_pipeline_has_a_control_of_its_own(vace: Config) -> None:
    (check,) = check_against_official(vace)
    assert check.passed and check.batch == "random latents and control", check.lines()
    assert {argument.name: argument.error for argument in check.arguments}[
        "control_hidden_states (encoded frames)"
    ] == 0


def test_videos_are_those_of_the_official_pipeline_and_go_by_their_control(vace: Config) -> None:
    files = [str(control_file(vace, f"{name}.mp4")) for name in ("bbb_000", "bbb_001")]
    requests = [VideoRequest("a fox", control=file) for file in files]
    ours = [
        video.frames_FHWC.astype(int) for _, video in TextToVideo.from_run(vace.run_dir, device="cpu").sample(requests)
    ]
    official = [
        video.frames_FHWC.astype(int) for _, video in OfficialSampler.open(vace.run_dir, device="cpu").sample(requests)
    ]
    for one, other in zip(ours, official, strict=True):
        assert one.shape == (*(SIZE.frames, SIZE.height, SIZE.width), 3) and np.abs(one - other).max() <= 1
    assert np.abs(ours[0] - ours[1]).max() > 4
    for request, words in ((replace(requests[0], control=None), "makes videos by a control: give --control"),):
        with pytest.raises(UserError, match=words):
            OfficialSampler.open(vace.run_dir, device="cpu").sizes([request])


def test_samples_in_training_have_the_controls_of_held_out_clips(sora: Config, vace: Config) -> None:
    for config in (sora, vace):
        (folder,) = (config.run_dir / "samples").iterdir()
        assert (folder / "000.mp4").stat().st_size and "bbb_000" in (folder / "000.txt").read_text()


def test_a_control_that_does_not_serve_is_said(sora: Config, tmp_path: Path) -> None:
    pipe, file = TextToVideo.from_run(sora.run_dir, device="cpu"), str(control_file(sora, "bbb_000.mp4"))
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    for request, words in (
        (VideoRequest("a"), "the model of this run makes videos by a control: give --control FILE"),
        (
            VideoRequest("a", control=file, frames=9),
            "has 5 frames at 2 a second, and the video 9: give --frames 5, or another",
        ),
        (
            VideoRequest("a", control=file, frames=1),
            "has 5 frames at 2 a second, and the video 1: give --frames 5, or another",
        ),
        (VideoRequest("a", control=str(broken)), "broken.mp4: is no video that can be read"),
        (VideoRequest("a", control=str(tmp_path / "gone.mp4")), "gone.mp4: is no video that can be read"),
    ):
        with pytest.raises(UserError, match=words):
            list(pipe.sample([request]))
    with pytest.raises(UserError, match="--control: the model of this run takes no control: leave it out"):
        check_request(VideoRequest("a", control=file), sora, Conditioning())
    assert pipe("a", control=file, steps=1)[0].frames_FHWC.shape[0] == SIZE.frames


def test_the_roles_of_the_data_are_those_of_the_model() -> None:
    check_roles(("control", "blank"), TAKES, "Wan")
    check_roles(("control", "blank"), Conditioning(roles=("control",)), "ours")
    check_roles(("chosen", "rejected"), Conditioning(), "ours")  # a method's, not inputs
    for roles, rule, words in (
        ((), TAKES, r"Wan is always given a control: name .* roles: \{control: control_path\}"),
        (("control", "blank"), Conditioning(), r"Wan takes no control: leave the role out, or .* model.control: true"),
    ):
        with pytest.raises(UserError, match=words):
            check_roles(roles, rule, "Wan")
    with pytest.raises(UserError, match=r"makes videos by a control alone, and a prompt has none: .* with --control"):
        check_prompts(["a"], TAKES)


def test_prompts_files_and_new_configs_name_a_control(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "control": "c.mp4"}\n{"prompt": "b"}\n')
    rows = [completed(row, None, 0, {}, {}, Path("d.mp4")) for row in read_requests(tmp_path / "p.jsonl")]
    assert [row.control for row in rows] == [str(tmp_path / "c.mp4"), "d.mp4"]
    values = VideoPreparation.starting_values("new", "clips.jsonl", "wan2.1-vace-1.3b")
    assert values["data"]["sources"] == [{"path": "clips.jsonl", "roles": {"control": "control"}}]
