"""What `mmspeed check` says of a run's memory and time: a measured step or the reason why there is none, epochs, widths of heads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.__main__ import main
from mmspeed.config import Config, dump_config
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.report.run_forecast import run_lines
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder
from mmspeed.protocols import RunWork
from tests.unit.pipelines.test_language_start import ALONE
from tests.unit.pipelines.test_language_start import config as language_config
from tests.unit.pipelines.test_memory_choice import config_of, task_of


def forecast(
    config: Config, steps: float = 6, world: int = 1, epochs: float = 2, micro_batches: float = 1
) -> list[str]:
    works = [RunWork(world, epochs, "7 samples", {config.buckets[0]: steps}, micro_batches)]
    return run_lines(config, task_of(config), works)


def test_a_step_is_measured_here(tmp_path: Path) -> None:
    memory, time, training = forecast(config_of(tmp_path))
    assert re.match(r"memory of a step of 17x128x128 x \d+, estimated from shapes: [\d.]+ MB with all saved", memory)
    assert re.match(r"time of a step of 17x128x128 x \d+: about [\d.]+ s, measured here on ", time)
    assert re.fullmatch(r"training on 1 device: [\d,]+ steps, 2 epochs of 7 samples; about \d+ s", training)
    values, _ = (line for line in forecast(config_of(tmp_path, "model.sparse={cluster_size: 16, min_tokens: 1}"))[:2])
    assert re.match(r"memory of a step of 17x128x128 x \d+: [\d.]+ MB, measured here", values), values


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("device.kind=npu", "sees no such device"),
        ("parallel.ulysses=2", "2 devices compute an item together (ulysses 2)"),
        ("memory.budget=1GB", "memory's budget chooses policies at the start of training"),
        ("model.width=8192", "GB of memory, more than the"),
        ("data.buckets=[{frames: 401, height: 512, width: 512}]", "one item alone would take about"),
    ],
)  # fmt: skip
def test_a_step_that_is_not_measured_says_why(tmp_path: Path, override: str, reason: str) -> None:
    lines = forecast(config_of(tmp_path, override, "device.peak_tflops=null"), world=2)
    (time,) = (line for line in lines if line.startswith("time of a step of "))
    assert "not measured: " in time and reason in time
    assert any("at 40% of the peak of an H100 (float32)" in line for line in lines)
    fixed = forecast(config_of(tmp_path, "parallel.ulysses=2", "device.peak_tflops=2"), world=2, steps=1e9)[-1]
    assert fixed.endswith(" days at 40% of the peak of device.peak_tflops, without exchanges")


def test_many_epochs_and_padded_heads_are_warned_of(tmp_path: Path) -> None:
    few = forecast(config_of(tmp_path, "train.steps=1000"), epochs=500)[-1]
    assert few.startswith("warning: 500 epochs of 7 samples: ") and "(train.steps: 300 are 150 epochs)" in few
    for width, heads, padded in ((288, 4, "(72 to 128)"), (96, 2, "(48 to 64)"), (256, 4, None)):
        config = config_of(tmp_path, "device.kind=cuda", f"model.heads={heads}", width=width)
        warned = [line for line in forecast(config) if "attention heads of width" in line]
        assert [padded in line for line in warned] == ([] if padded is None else [True]), (width, warned)


@pytest.mark.parametrize(
    ("micro_batches", "count", "share"), [(1, "1 micro-batch,", "50%"), (2, "2 micro-batches,", "33%"), (7, "", "12%")]
)
def test_a_pipeline_that_stands_still_is_warned_of(tmp_path: Path, micro_batches: int, count: str, share: str) -> None:
    config = config_of(tmp_path, "parallel.pp=2")
    lines = forecast(config, world=2, micro_batches=micro_batches)
    training, *warned = lines[[line.startswith("training on") for line in lines].index(True) :]
    assert training.endswith(f", without exchanges and the {share} for which the pipeline stands still")
    assert [
        f"a step on 2 devices has {count} and parallel.pp 2 stands still for {share} of it: lower train.micro_batch_size"
        in line
        for line in warned
    ] == [True] * bool(count)
    (head, *table) = lines[[line.startswith("a step of the pipeline: ") for line in lines].index(True) :][:6]
    assert re.match(r"a step of the pipeline: [\d.]+ [mu]?s, counted at ", head)
    assert table[0].startswith("exposed exchanges, by which the step is longer: messages between stages ")
    assert [line.split()[0] for line in table[-2:]] == ["1f1b", "zb_h1"]
    assert not any("pipeline" in line for line in forecast(config_of(tmp_path), world=2))
    folded = config_of(tmp_path, "parallel.pp=2", "parallel.virtual=2", "parallel.schedule=dualpipe_v", "model.depth=4")
    for micro_batches, short in ((3, True), (4, False)):
        words = (
            f"{micro_batches} micro-batches, fewer than the 4 that fill parallel.schedule dualpipe_v, and parallel.pp 2"
        )
        assert any(words in line for line in forecast(folded, world=2, micro_batches=micro_batches)) == short


def test_memory_goes_by_the_policies_of_the_config(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    whole, own = (plan_memory(config, task=task_of(config), with_swap=False, options=each) for each in (True, False))
    assert own.figures.plain_peak() == pytest.approx(whole.figures.plain_peak(), rel=0.001)
    again = config_of(tmp_path, "memory.activation_policy={block: recompute}")
    recomputed = plan_memory(again, task=task_of(again), with_swap=False, options=False)
    places = [[{"block": "recompute"} == one.ways for one in options].index(True) for options in whole.figures.options]
    chosen = [places[kind] for kind in whole.figures.kinds]
    assert recomputed.figures.plain_peak() == pytest.approx(whole.figures.peak(chosen), rel=0.001)
    assert "with block recompute (" in recomputed.lines()[0] and "least" not in recomputed.lines()[0]
    chunked = config_of(tmp_path, "memory.mlp_chunk=16")
    smaller = plan_memory(chunked, task=task_of(chunked), with_swap=False, options=False)
    assert smaller.figures.plain_peak() < own.figures.plain_peak()


def test_texts_are_counted_before_there_is_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = language_config(tmp_path, "train.steps=400", "tokenizer={kind: train, size: 300}")
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")

    def checked() -> tuple[int, str, int]:
        assert main(["check", str(file)]) == 0
        out = capsys.readouterr().out
        assert "time of a step of packs of 48 x 4: about " in out and "warning: " in out
        (tokens, how), (epochs,) = (
            re.findall(r"source a.jsonl: 40 documents, [\d.]+ k?B, about ([\d,]+) tokens \((.*)\)", out)[0],
            re.findall(r"training on 1 device: 400 steps, ([\d,]+) epochs of about [\d,]+ tokens; about ", out),
        )
        return int(tokens.replace(",", "")), how, int(epochs.replace(",", ""))

    assert checked()[1] == "at 4 bytes each"
    built = TextCacheBuilder(config.texts, config.tokenizer, config.seed).run()
    task = LanguageDomain(config)
    task.open(ALONE)
    tokens, how, epochs = checked()
    assert how == "by the first texts"
    assert tokens + 40 == pytest.approx(built.tokens, rel=0.05)  # an end behind each document
    assert epochs == pytest.approx(task.data(ALONE).locate(399).epoch + 1, rel=0.15)


def test_experts_over_devices_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exchange that is shorter, the memory at even loads, and numbers of devices that do not divide."""
    settings = language_config(tmp_path, "model={shape: tiny-qwen3-30b-a3b}")
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(settings))
    capsys.readouterr()
    assert main(["check", str(file), "parallel.ep=4", "parallel.ep_inner=2"]) == 0
    said = capsys.readouterr().out
    assert "on 2 nodes of 2; without parallel.ep_inner it would send" in said
    assert "estimated from shapes" in said and "experts over 4 devices: counted with even loads" in said
    assert "training on 4 devices" in said
    assert main(["check", str(file), "parallel.ep=4", "--ranks", "6"]) == 1
    assert "ep 4 does not divide the 6 devices that share one copy" in capsys.readouterr().err
