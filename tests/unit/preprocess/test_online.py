"""Training on a cache that is not whole: the first epoch makes what is missing, and nobody can tell afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmspeed.cli.app import run
from mmspeed.config import Config, dump_config, make_config
from mmspeed.data import BatchSampler, DatasetCache, FirstEpoch, SampleUse
from mmspeed.data.sampling.order import TrainingStage
from mmspeed.device import pick
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder, OnlineBuilder, check
from tests.support.caches import tar_bytes
from tests.support.runs import losses, small_config, small_tree


def online(config: Config) -> OnlineBuilder:
    """Train with a builder; the builder afterwards."""
    builder = OnlineBuilder(config)
    TrainPipeline(config, builder).run()
    return builder


def cache_row(config: Config) -> dict:
    """The last record of the first epoch in metrics.jsonl."""
    return [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "cache"][-1]


def table(config: Config) -> bytes:
    return (config.cache_dir / "index" / "samples.parquet").read_bytes()


@pytest.fixture(scope="module")
def offline(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run on a cache that `mmspeed preprocess` made."""
    config = small_config(Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("offline") / "home")))
    TrainPipeline(config).run()
    return config


def test_same_losses_and_the_same_bytes_as_preprocess_and_train(offline: Config, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    online(config)
    assert losses(config) == losses(offline)
    assert tar_bytes(config.cache_dir) == tar_bytes(offline.cache_dir)
    assert table(config) == table(offline)
    assert cache_row(config)["entries"] == 16 and cache_row(config)["lost"] == 0  # 8 clips, 8 captions
    report = CacheBuilder(config).run()
    assert (report.encoded, report.reused, report.texts) == (0, 8, 0)


class Absent(OnlineBuilder):
    """Takes the videos away when the encoders are freed."""

    def free(self) -> tuple[int, int]:
        freed = super().free()
        assert self.setup.encoders.loaded == ()
        shutil.rmtree(Path(self.config.data.sources[0].path).parent / "videos")
        return freed


def with_own_videos(folder: Path, *overrides: str, clips: int = 8) -> Config:
    """`small_config` on copies of the clips, which a test may damage or delete."""
    config = small_config(folder, *overrides, clips=clips)
    manifest = Path(config.data.sources[0].path)
    (folder / "videos").mkdir()
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["video"] = shutil.copy(row["video"], folder / "videos")
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return config


@pytest.mark.slow
def test_from_the_second_epoch_no_video_is_opened_and_no_encoder_loaded(tmp_path: Path) -> None:
    config = with_own_videos(tmp_path)
    TrainPipeline(config, Absent(config)).run()
    assert len(losses(config)) == 6 and not (tmp_path / "videos").exists()
    row = cache_row(config)
    assert row["memory_before"] > 0 and row["memory_after"] > 0
    again = small_config(tmp_path, "name=again")
    TrainPipeline(again, OnlineBuilder(again)).run()  # whole: needs no sources
    assert losses(again) == losses(config)


@pytest.mark.slow
def test_interrupted_in_the_first_epoch_it_goes_on(offline: Config, tmp_path: Path) -> None:
    """7 samples in batches of 3 are 3 steps; 2 are trained first. Nothing is encoded twice."""
    first = small_config(tmp_path, "train.steps=2", "train.warmup_steps=2")
    online(first)
    entries = cache_row(first)["entries"]
    assert 0 < entries < 16 and "memory_after" not in cache_row(first)
    with pytest.raises(UserError, match="no stored encoding"):
        DatasetCache(first.cache_dir)
    config = small_config(tmp_path)
    online(config)
    assert entries + cache_row(config)["entries"] == 16
    assert losses(config) == losses(offline)
    assert tar_bytes(config.cache_dir) == tar_bytes(offline.cache_dir) and table(config) == table(offline)


STAGES = "curriculum=[{steps: 12, max_pixels: 1024}, {steps: 5, weights: {clips.jsonl: 1}}, {weights: {clips.jsonl: 9, rare: 1}}]"


def staged_config(folder: Path) -> Config:
    """Two data sets, one with a share so small that an epoch uses a part of it, in stages, in mixed steps of several micro-batches."""
    tree = small_tree(folder, clips=10)
    manifest = Path(tree["data"]["sources"][0]["path"])
    rows = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    manifest.write_text("".join(rows[:3]), encoding="utf-8")
    (folder / "rare.jsonl").write_text("".join(rows[3:]), encoding="utf-8")
    tree["data"] |= {
        "sources": [*tree["data"]["sources"], {"path": str(folder / "rare.jsonl"), "name": "rare"}],
        "buckets": [{"frames": 5, "height": 32, "width": width} for width in (48, 32)],
        "buckets_per_clip": 2,
    }
    tree["train"] |= {"batch_size": None, "steps": 24}
    tree["batching"] = {"by": "tokens", "mix": "window", "accumulate": 3}
    return make_config(tree, [STAGES], origin="test")


@pytest.mark.slow
def test_stages_and_shares(tmp_path: Path) -> None:
    """Entries are encoded when a stage first uses them; those that no stage has used, at the end of the first epoch."""
    here, offline = staged_config(tmp_path / "online"), staged_config(tmp_path / "off")
    CacheBuilder(offline).run()
    TrainPipeline(offline).run()
    online(here)
    assert losses(here) == losses(offline)
    assert tar_bytes(here.cache_dir) == tar_bytes(offline.cache_dir) and table(here) == table(offline)
    assert cache_row(here)["entries"] == 2 * 10 + 10 and "memory_after" in cache_row(here)


def test_a_long_stage_is_planned_by_its_first_epoch(tmp_path: Path) -> None:
    """Later epochs of a stage lack nothing: to look at their draws would take as long as a training run reads."""
    asked = []

    class Asked(BatchSampler):
        def draws(self, step: int) -> list[SampleUse]:
            asked.append(step)
            return super().draws(step)

    config = small_config(tmp_path)
    builder = OnlineBuilder(config)
    builder.plan(pick("cpu"), 0, 1, None)
    cache = DatasetCache(config.cache_dir, partial=True)
    sampler = Asked(cache.split("train"), 3, seed=0, stages=[TrainingStage(5000), TrainingStage()])
    FirstEpoch(cache, sampler, builder, 0, 1, start=0, stop=10_000).close()
    assert asked == [0, 1, 2, 5000, 5001, 5002]


def damage(path: Path) -> None:
    """Zero most of the pictures, and leave what a probe reads."""
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    stop = data.index(b"moov") - 4 if data.index(b"moov") > start else len(data)
    start += (stop - start) // 3
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


@pytest.mark.slow
def test_samples_whose_source_fails_are_lost_counted_and_named(tmp_path: Path) -> None:
    """Steps of one sample: a lost one leaves its step without any. Stopped and gone on with, the run is the same."""
    runs = {}
    for name in ("whole", "stopped"):
        config = with_own_videos(tmp_path / name, "train.batch_size=1", "train.steps=9", "checkpoint.every=1")
        videos = sorted((tmp_path / name / "videos").iterdir())
        for path in videos[2:4]:
            damage(path)
        if name == "stopped":
            for steps in (2, 4):
                online(config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})}))
        online(config)
        runs[name] = config
    whole, stopped = runs["whole"], runs["stopped"]
    assert losses(whole) == losses(stopped)
    for config in runs.values():
        rows = read_metrics(config.run_dir / "metrics.jsonl")
        lost = [row["step"] for row in rows if row["kind"] == "lost"]
        assert cache_row(config)["lost"] == 2 and len(lost) >= 2
        assert sorted(lost + [row["step"] for row in rows if row["kind"] == "train"]) == list(range(1, 10))
        cache = DatasetCache(config.cache_dir)
        assert sum(sample.lost for sample in cache.samples) == 2
        assert {reject["reason"] for reject in cache.rejects()} <= {"undecodable", "truncated"}
        assert len(cache.rejects()) == 2


def test_no_source_to_make_it_from(tmp_path: Path) -> None:
    config = with_own_videos(tmp_path, clips=3)
    Path(config.data.sources[0].path).unlink()
    with pytest.raises(UserError, match=r"no dataset cache .* the first epoch cannot make it: data\.sources"):
        online(config)


def test_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, "preprocess.online=false")
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert run(["train", str(path)]) == 1
    assert "run mmspeed preprocess first" in capsys.readouterr().err


def test_a_content_marked_val_is_held_out_under_every_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In another row, and in another source; alike in every way to make the cache, and in what `check` counts."""
    config = with_own_videos(tmp_path, clips=4)
    manifest, other = Path(config.data.sources[0].path), tmp_path / "other"
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    copies = [shutil.copy(rows[0]["video"], tmp_path / "copy.mp4"), other / "again.mp4"]
    rows.append({"video": str(copies[0]), "caption": "the same clip again", "split": "train"})
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    other.mkdir()
    shutil.copy(copies[0], copies[1])
    (other / "again.txt").write_text("and again")
    tree = small_tree(tmp_path / "tree") | {"output": str(tmp_path / "runs")}
    tree["data"] |= {"sources": [{"path": str(manifest)}, {"path": str(other)}], "cache": str(tmp_path / "cache")}
    found = {}
    for name, build in {"offline": lambda c: CacheBuilder(c).run(), "online": online}.items():
        made = make_config(tree, [f"name={name}", f"data.cache={tmp_path / name}", "train.steps=1"], origin="test")
        lines = check(made).lines()
        assert "  held out for validation: 3" in lines
        assert f"  held out because another source of the same content is: 2 ({copies[0]}, again.mp4)" in lines
        build(made)
        found[name] = {sample.source for sample in DatasetCache(made.cache_dir, partial=True).split("val")}
    assert found["offline"] == found["online"] == {rows[0]["video"], str(copies[0]), "again.mp4"}
    assert "held out because another source of the same content is: 2" in caplog.text
