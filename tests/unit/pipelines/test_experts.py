"""Both experts of one model are trained in one run: which step trains which, times, checkpoints, exports and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmspeed import rng
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.models.families.complete import completed
from mmspeed.models.text.encoders import load_text_encoder
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.inference.export import export_run
from mmspeed.pipelines.inference.generate import SampleSettings, sample_together
from mmspeed.pipelines.inference.official import OfficialSampler
from mmspeed.pipelines.tasks import maker_of
from mmspeed.protocols import Update
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.experts import SEED, WatchedTask, experts_config, train_experts
from tests.support.runs import losses
from tests.support.tiny_repositories import save_wan, save_wan_experts

LOW = "transformer_2"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository of two experts and a run of both, `whole`."""
    folder = tmp_path_factory.mktemp("experts")
    save_wan_experts(folder / "base")
    train_experts(str(folder), ("name=whole",))
    return folder


def drawn(steps: int) -> list[str]:
    """The experts of steps, by the rule itself."""
    return ["high" if rng.uniform(SEED, "expert", step) < 0.5 else "low" for step in range(steps)]


def of_role(tensors: dict[str, Any], part: str, role: str | None) -> dict[str, Any]:
    """A part of a role's state, by the model's names."""
    prefix = f"{part}." if role is None else f"{role}:{part}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def test_the_experts_are_those_of_the_repository(home: Path, tmp_path: Path) -> None:
    config = completed(experts_config(home))
    model: Any = config.model
    assert (model.subfolder, model.second_subfolder) == ("transformer", LOW)
    assert (config.objective.model_dump()["boundary"], config.objective.model_dump()["range"]) == (0.875, None)
    assert completed(config) == config
    save_wan(tmp_path / "base")
    with pytest.raises(UserError, match=r"objective.experts: .* has one transformer for all times: leave experts out"):
        completed(experts_config(tmp_path))
    with pytest.raises(UserError, match="leave expert and range out"):
        experts_config(home, experts="both", expert="high")
    with pytest.raises(UserError, match=r"objective.boundary and model.second_subfolder go together"):
        VideoDomain(experts_config(home, "objective={kind: flow, boundary: 0.5}"))
    with pytest.raises(UserError, match="boundary divides all times"):
        experts_config(home, "objective={kind: flow, boundary: 0.5, range: [0, 1]}")


def test_a_step_trains_the_expert_that_its_name_draws(home: Path) -> None:
    """Terms, moments, averages and weights of the other stay as they are; the third step is of one that was trained before."""
    rows = [row for row in read_metrics(home / "runs" / "whole" / "metrics.jsonl") if row["kind"] == "train"]
    names = drawn(3)
    assert [list(row["terms"]) for row in rows] == [[f"{name}.loss"] for name in names]
    assert set(names) == {"high", "low"}
    state = whole_checkpoint(home / "runs" / "whole")
    for role, expert, folder in ((None, "high", "transformer"), (LOW, "low", LOW)):
        count = names.count(expert)
        steps = {float(t) for name, t in of_role(state, "optimizer", role).items() if name.endswith(".step")}
        assert steps == {float(count)}
        base = load_file(home / "base" / folder / "diffusion_pytorch_model.safetensors")
        trained, averages = of_role(state, "model", role), of_role(state, "ema", role)
        assert trained.keys() == averages.keys() == base.keys()
        assert all(not torch.equal(trained[name], base[name]) for name in base)
        assert all(not torch.equal(averages[name], base[name]) for name in base)


def test_validation_names_the_experts(home: Path) -> None:
    (row,) = [row for row in read_metrics(home / "runs" / "whole" / "metrics.jsonl") if row["kind"] == "validation"]
    assert len(row["by_quantile"]) == 4 and set(row["by_expert"]) == {"high", "low"}
    assert row["loss"] == pytest.approx(sum(row["by_expert"].values()) / 2)
    assert row["by_expert"]["low"] == pytest.approx(sum(row["by_quantile"][:2]) / 2)


def test_times_are_in_the_range_of_the_steps_expert(home: Path) -> None:
    config = experts_config(home, "name=watched", "train.steps=8", "validate.samples=0", "train.ema_decay=null")
    task = WatchedTask(config, maker_of(config))
    TrainPipeline(config, task=task).run()
    assert [expert for expert, _, _ in task.times] == drawn(8)
    assert all(low >= 0.875 if expert == "high" else high <= 0.875 for expert, low, high in task.times)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(home: Path) -> None:
    for stop in ("train.steps=1", "train.steps=2", "train.steps=3"):
        train_experts(str(home), ("name=parts", stop))
    assert losses(experts_config(home, "name=parts")) == losses(experts_config(home, "name=whole"))
    assert differing(*(whole_checkpoint(home / "runs" / name) for name in ("parts", "whole"))) == []


def test_the_shares_of_steps_are_those_asked_for(home: Path) -> None:
    task = VideoDomain(experts_config(home, experts="both", high_share=0.2))
    high, low = map(Update.of, task.parts())
    assert (high.name, high.role, low.name, low.role) == ("high", "model", "low", LOW)
    draws = [high.due(step) for step in range(4000)]
    assert all(high.due(step) != low.due(step) for step in range(100))
    assert abs(sum(draws) / 4000 - 0.2) < 4 * (0.2 * 0.8 / 4000) ** 0.5


def test_both_are_exported_and_loaded_by_the_official_pipeline(home: Path) -> None:
    from diffusers import WanPipeline

    written = export_run(home / "runs" / "whole", home / "out")
    assert written.components == ("transformer", LOW)
    state = whole_checkpoint(home / "runs" / "whole")
    pipeline: Any = WanPipeline.from_pretrained(home / "out")
    assert pipeline.config.boundary_ratio == 0.875
    for role, model in ((None, pipeline.transformer), (LOW, pipeline.transformer_2)):
        averages = of_role(state, "ema", role)
        assert all(torch.equal(value, averages[name]) for name, value in model.state_dict().items())


def test_a_changed_base_of_the_second_expert_is_refused(home: Path) -> None:
    (path,) = (home / "base" / LOW).glob("*.safetensors")
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-4] + bytes(4))
        for use in (
            lambda: export_run(home / "runs" / "whole", home / "changed"),
            lambda: OfficialSampler.open(home / "runs" / "whole"),
        ):
            with pytest.raises(UserError, match=f"another base: the weights of the role {LOW}"):
                use()
    finally:
        path.write_bytes(whole)


def test_a_run_begins_with_both_experts_of_another(home: Path) -> None:
    start = f"train.start_from={home / 'runs' / 'whole'}"
    train_experts(str(home), ("name=further", start, "train.steps=1"))
    further, whole = (whole_checkpoint(home / "runs" / name) for name in ("further", "whole"))
    resting, role = ("high", None) if drawn(1) == ["low"] else ("low", LOW)
    assert resting in ("high", "low")
    averages = of_role(whole, "ema", role)
    assert all(torch.equal(value, averages[name]) for name, value in of_role(further, "model", role).items())


PROMPT, NEGATIVE = "a rabbit runs over a green meadow", "dark"


def ours(pipe: TextToVideo, noise: Tensor, steps: int, guidance: float, guidance_2: float | None) -> Tensor:
    """Latents of a run's own models."""
    encoder = load_text_encoder(pipe.config.text, pipe.device)
    text, negative = encoder.encode([PROMPT, NEGATIVE])
    bucket = pipe.size()
    objective = pipe.objective.sized(bucket, pipe.predictor.tokens(pipe.codec.strides.latent(bucket)))
    settings = SampleSettings(steps, guidance, pipe.config.sample.sampler, 0, guidance_2=guidance_2)
    return sample_together(
        pipe.model, objective, [text], [negative], noise, settings, pipe.device, None, pipe.predictor, other=pipe.other
    )


def official(folder: Path, noise: Tensor, steps: int, guidance: float, guidance_2: float | None) -> Tensor:
    """Latents of the exported repository's pipeline, from the same noise."""
    from diffusers import WanPipeline

    pipeline: Any = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    (latents,) = pipeline(
        PROMPT, NEGATIVE, latents=noise.clone(), height=32, width=48, num_frames=5, num_inference_steps=steps,
        guidance_scale=guidance, guidance_scale_2=guidance_2, output_type="latent", return_dict=False,
    )  # fmt: skip
    return latents


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Path]:
    """A run of each expert alone, and one of both; each has been exported."""
    for expert in ("high", "low"):
        config = experts_config(home, f"name={expert}", "train.steps=1", "validate.samples=0", expert=expert)
        TrainPipeline(config, online=True).run()
    for name in ("high", "low", "whole"):
        export_run(home / "runs" / name, home / f"of-{name}")
    return {name: home / f"of-{name}" for name in ("high", "low", "whole")}


@pytest.mark.parametrize(
    ("name", "steps", "guidance", "guidance_2"), [("whole", 3, 4.0, 2.0), ("whole", 8, 1.0, None), ("low", 3, 4.0, 1.5)]
)
def test_latents_are_those_of_the_pipeline(
    home: Path, alone: dict[str, Path], name: str, steps: int, guidance: float, guidance_2: float | None
) -> None:
    """A run of one expert samples together with the other one of its base, in the times of each."""
    pipe = TextToVideo.from_run(home / "runs" / name, device="cpu")
    assert pipe.other is not None and pipe.other.noise == ("high" if name == "low" else "low")
    calls: list[tuple[str, float]] = []
    for expert, model in (("own", pipe.model), ("other", pipe.other.model)):
        model.register_forward_pre_hook(
            lambda _, args, kwargs, expert=expert: calls.append((expert, float(kwargs["timestep"].max()))),
            with_kwargs=True,
        )
    noise = torch.randn((1, 16, 2, 4, 6), generator=torch.Generator().manual_seed(3))
    actual = ours(pipe, noise, steps, guidance, guidance_2)
    torch.testing.assert_close(actual, official(alone[name], noise, steps, guidance, guidance_2), atol=1e-5, rtol=1e-5)
    high = "other" if name == "low" else "own"
    assert {expert for expert, _ in calls} == {"own", "other"}
    assert all((time >= 875) == (expert == high) for expert, time in calls)
    assert len(calls) == steps * (1 if guidance == 1 else 2)
