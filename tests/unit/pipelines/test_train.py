"""A user's whole way in one process: train, stop, go on, sample, report, and what goes wrong."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mmspeed.config import Config
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.manager import CheckpointManager
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.run.run_folder import RunFolder
from tests.support.decoding import video_of
from tests.support.runs import losses, small_config


def tensors(config: Config, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, EMA and moments."""
    results: dict[str, torch.Tensor] = {}
    for file in sorted((config.run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")):
        results |= safetensors.torch.load_file(file)
    return results


@pytest.fixture(scope="module")
def finished(home: Path) -> Config:
    """A run that was never stopped; it trains on while checkpoints are written."""
    often = ("checkpoint.every=2", "checkpoint.keep_best=true")
    config = small_config(home, "name=whole", "validate.prompts=[a rabbit in a meadow]", *often)
    TrainPipeline(config).run()
    return config


def test_metrics_hold_what_a_user_reads(finished: Config) -> None:
    rows = read_metrics(finished.run_dir / "metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5, 6]
    for row in train:
        assert np.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert row["samples_per_s"] > 0 and row["tokens_per_s"] > row["samples_per_s"]
        assert 0 <= row["data_wait"] <= 1 and row["memory_bytes"] > 1e6 and row["mfu"] > 0
        assert row["peak_source"] == "device.peak_tflops in the config"
    assert [row["lr"] for row in train] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3, 1e-3])
    held_out = [row for row in rows if row["kind"] == "validation"]
    assert [row["step"] for row in held_out] == [3, 6]
    assert all(row["samples"] == 1 and len(row["by_quantile"]) == 2 for row in held_out)
    saved = [row for row in rows if row["kind"] == "checkpoint"]
    assert saved[-1]["step"] == 6 and all(row["wait_seconds"] >= 0 and row["copy_seconds"] > 0 for row in saved)


def test_a_run_leaves_no_model_behind(home: Path) -> None:
    """Nothing that a run holds waits for a search of garbage: its events, which may stop it, know no more of it when it has ended."""
    gc.collect()
    gc.disable()
    try:
        TrainPipeline(small_config(home, "name=leaves", "train.steps=1")).run()
        assert not [one for one in gc.get_objects() if isinstance(one, CheckpointManager)]
    finally:
        gc.enable()


def test_seven_samples_in_batches_of_three_end_each_epoch_with_a_batch_of_one(finished: Config) -> None:
    rows = [row for row in read_metrics(finished.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    for epoch in (0, 1):
        assert sum(row["samples"] for row in rows if row["epoch"] == epoch) == 7


def test_a_run_that_is_stopped_at_every_step_equals_one_that_is_not(home: Path) -> None:
    overrides = (
        "model.arrangement=full",
        "objective.kind=ddpm",
        "memory.activation_policy={block: recompute}",
        "train.schedule=cosine",
    )
    whole = small_config(home, "name=never-stopped", *overrides)
    TrainPipeline(whole).run()
    parts = small_config(home, "name=parts", *overrides)
    for step in range(1, 7):
        (parts.run_dir).mkdir(parents=True, exist_ok=True)
        (parts.run_dir / "stop").touch()
        result = TrainPipeline(parts).run()
        assert (result.step, result.finished, result.asked) == (step, step == 6, True)
        assert not (parts.run_dir / "stop").exists()
    assert TrainPipeline(parts).run().finished
    assert losses(parts) == losses(whole)
    expected, got = tensors(whole, 6), tensors(parts, 6)
    assert expected.keys() == got.keys() and len(expected) > 100
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


def test_a_finished_run_says_so_and_goes_on_with_more_steps(home: Path) -> None:
    config = small_config(home, "name=more", "train.steps=2")
    TrainPipeline(config).run()
    again = TrainPipeline(config).run()
    assert again.already and "is finished: 2 steps" in again.lines()[0]
    assert losses(config) == losses(config)[:2]
    assert TrainPipeline(small_config(home, "name=more", "train.steps=4")).run().step == 4


def test_save_file_saves_and_keeps_only_the_newest(home: Path) -> None:
    config = small_config(home, "name=save", "checkpoint.keep_last=1", "train.divergence.action=none")
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "save").touch()
    TrainPipeline(config).run()
    kept = sorted(path.name for path in (config.run_dir / "checkpoints").glob("step-*"))
    assert kept == ["step-00000006"]
    recorded = json.loads((config.run_dir / "checkpoints" / "latest.json").read_text())
    assert "1" not in [str(row["step"]) for row in recorded["checkpoints"]]


def test_no_pickle_in_a_run(finished: Config) -> None:
    endings = {path.suffix for path in finished.run_dir.rglob("*") if path.is_file()}
    assert endings - {""} == {".yaml", ".json", ".jsonl", ".safetensors", ".mp4", ".txt", ".png"}


def test_a_run_is_trained_by_one_process_at_a_time(home: Path) -> None:
    config = small_config(home, "name=twice", "train.steps=2")
    with RunFolder(config.run_dir).locked(), pytest.raises(UserError, match="is being trained by another process"):
        TrainPipeline(config).run()
    assert TrainPipeline(config).run().finished


def test_samples_during_training_are_videos(finished: Config) -> None:
    for step in (3, 6):
        folder = finished.run_dir / "samples" / f"step-{step:08d}"
        frames_FHWC, _ = video_of(folder / "000.mp4")
        assert frames_FHWC.shape == (5, 32, 48, 3)
        assert (folder / "000.txt").read_text() == "a rabbit in a meadow"
        assert (folder / "contact-sheet.png").stat().st_size > 500


def test_sampling_is_a_function_of_prompt_and_seed(finished: Config) -> None:
    pipe = TextToVideo.from_run(finished.run_dir)
    one = pipe("a rabbit", seed=3)[0]
    both = pipe(["a bird", "a rabbit"], seed=3)
    assert one.frames_FHWC.shape == (5, 32, 48, 3) and one.fps == 8.0
    assert np.array_equal(both[1].frames_FHWC, one.frames_FHWC)  # in any company: one is sampled after the other
    assert np.array_equal(pipe("a rabbit", seed=3)[0].frames_FHWC, one.frames_FHWC)
    assert not np.array_equal(pipe("a rabbit", seed=4)[0].frames_FHWC, one.frames_FHWC)
    assert not np.array_equal(both[0].frames_FHWC, both[1].frames_FHWC)
    larger = pipe(
        "a rabbit", frames=9, height=48, width=64, steps=1, sampler="heun", negative_prompt="blurry", guidance=2.0
    )
    assert larger[0].frames_FHWC.shape == (9, 48, 64, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"frames": 6}, "6 frames do not fit"),
        ({"height": 24}, "no multiple of 2 of the model's patch"),
        ({"sampler": "ddim"}, "ddim"),
    ],
)
def test_sampling_refuses_what_it_cannot_do(finished: Config, arguments: dict, words: str) -> None:
    pipe = TextToVideo.from_run(finished.run_dir)
    with pytest.raises(UserError, match=words):
        pipe("a rabbit", **arguments)


def test_checkpoints_by_name(finished: Config, home: Path) -> None:
    assert TextToVideo.from_run(finished.run_dir, checkpoint="best", weights="model")
    assert TextToVideo.from_run(finished.run_dir, checkpoint=6)
    with pytest.raises(UserError, match="no checkpoint '5'"):
        TextToVideo.from_run(finished.run_dir, checkpoint="5")
    with pytest.raises(UserError, match="no such run"):
        TextToVideo.from_run(home / "nothing")
    with pytest.raises(UserError, match="not a run folder"):
        TextToVideo.from_run(home)


def test_a_run_refuses_another_model_and_another_codec(finished: Config, home: Path) -> None:
    with pytest.raises(UserError, match="another model"):
        TrainPipeline(small_config(home, "name=whole", "model.depth=3")).run()
    with pytest.raises(UserError, match=r"another model\.control"):  # a key that records lack at its default
        RunFolder(finished.run_dir).check_same(small_config(home, "name=whole", "model.control=true"))
    with pytest.raises(UserError, match="was made with another `text`"):
        TrainPipeline(small_config(home, "name=other", "text.max_tokens=7")).run()
    with pytest.raises(UserError, match="run mmspeed preprocess first"):
        TrainPipeline(small_config(home, f"data.cache={home}/none")).run()


def test_a_cache_that_was_made_for_other_data_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match=r"other data\.fps; run"):
        TrainPipeline(small_config(home, "name=other-data", "data.fps=4")).run()


def test_a_sample_size_that_cannot_be_made_is_reported_before_the_first_step(home: Path) -> None:
    config = small_config(home, "name=size", "sample.width=24", "validate.prompts=[a rabbit]")
    with pytest.raises(UserError, match="no multiple of 2 of the model's patch"):
        TrainPipeline(config).run()
    assert losses(config) == []


def test_a_bucket_that_the_model_cannot_cut_is_reported_before_training(home: Path) -> None:
    with pytest.raises(UserError, match="bucket 5x32x48 does not fit the model"):
        TrainPipeline(small_config(home, "name=patch", "model.patch=[1,3,3]")).run()


def test_a_loss_that_is_not_finite_names_step_and_sample(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspeed.loop.callbacks.learning_rate", lambda step, config: 1e30)
    config = small_config(home, "name=nan", "train.clip_norm=null", "train.steps=4")
    with pytest.raises(UserError, match=r"step 2: .*bbb_0\d\d.*Nothing was updated") as caught:
        TrainPipeline(config).run()
    assert len(str(caught.value).splitlines()) == 1
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert rows[-1]["kind"] == "non_finite" and rows[-1]["samples"]
    skipping = small_config(home, "name=nan2", "train.skip_non_finite=9", "train.steps=3")
    TrainPipeline(skipping).run()
    train = [row for row in read_metrics(skipping.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["skipped_steps"] for row in train] == [0, 1, 2] and train[-1]["loss"] is None
    # skips before a stop count after it
    more = small_config(home, "name=nan2", "train.skip_non_finite=3", "train.steps=9")
    with pytest.raises(UserError, match="step 5"):
        TrainPipeline(more).run()


def test_the_best_validation_is_saved_where_no_checkpoint_falls(home: Path) -> None:
    config = small_config(
        home, "name=best", "train.steps=5", "validate.every=3", "checkpoint.keep_best=true", "checkpoint.keep_last=1"
    )
    TrainPipeline(config).run()
    rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "validation"]
    lowest = min(rows, key=lambda row: row["loss"])["step"]
    kept = {int(path.name.removeprefix("step-")) for path in (config.run_dir / "checkpoints").glob("step-*")}
    assert kept == {lowest, 5}
    assert TextToVideo.from_run(config.run_dir, checkpoint="best")


def test_bfloat16_trains_close_to_float32_and_keeps_float32_weights(home: Path, finished: Config) -> None:
    config = small_config(home, "name=half", "device.dtype=bfloat16")
    TrainPipeline(config).run()
    assert losses(config) == pytest.approx(losses(finished), rel=0.02)
    assert losses(config) != losses(finished)
    weights = [tensor for name, tensor in tensors(config, 6).items() if name.startswith("model.")]
    assert {tensor.dtype for tensor in weights} == {torch.float32}
    assert TextToVideo.from_run(config.run_dir)("a rabbit")[0].frames_FHWC.shape == (5, 32, 48, 3)
