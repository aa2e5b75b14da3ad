"""`mmspeed plan --pipeline`: counts, the command's words and drawing, the search, and mistakes in one line each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmspeed.__main__ import main
from mmspeed.config import load_config
from mmspeed.pipelines.report.pipeline_plan import PipelinePlanner, Rates
from mmspeed.pipelines.tuning.stage_work import MicroBatchWork, NodeWork, PassWork
from mmspeed.plan.simulate import reckoned
from mmspeed.plan.traffic import EvenRouting, token_bytes

SIZES = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 8, "tie_word_embeddings": True}
EXPERTS = {"shape": "tiny-qwen3-30b-a3b", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}


def written(folder: Path, model: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A config file of a tiny decoder, whose texts nobody reads."""
    tree = {
        "task": "language",
        "name": "tiny",
        "texts": {"cache": "cache", "sources": [{"path": "texts"}]},
        "model": {"shape": "tiny-qwen3-0.6b", **SIZES, **(model or {})},
        "sequence_length": 128,
        "train": {"batch_size": 8, "micro_batch_size": 1},
        "device": {"dtype": "bfloat16"},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree | sections), encoding="utf-8")
    return path


def planner(path: Path, *overrides: str, devices: int | None = None) -> PipelinePlanner:
    config = load_config(path, overrides)
    return PipelinePlanner(config, Rates.of(config, 100.0, None, None), devices)


def test_the_work_of_blocks_is_the_cost_of_the_task(tmp_path: Path) -> None:
    plan = planner(written(tmp_path), "parallel.pp=2")
    size = plan.size(plan.config.parallel)
    work, whole = plan.work(size), plan.task.domain.work(size.shape)
    counted = work.stage(range(len(work.blocks)))
    (forward,), (backward,), blocks = counted.forward, counted.backward, work.blocks
    assert (size.items, size.batches, forward.operations) == (1, 8, whole.matmul)
    # attention's backward is two and a half of its forward, of which none is for weights; the head is computed once more
    head = sum(node.operations for node in work.last.forward)
    assert backward.weights + backward.operations == 2 * whole.products + 2.5 * whole.attention + head
    assert sum(node.weights for block in blocks for node in block.backward) == whole.products - head
    step = plan.step(plan.config.parallel)
    assert sum(step.simulated.busy) == pytest.approx(8 * counted.operations / 100e12)
    again = planner(written(tmp_path, memory={"activation_policy": {"block": "recompute"}}), "parallel.pp=2").work(size)
    # recomputation ends before the last product, whose result no gradient needs
    ((own,), (ahead,), (more,)) = blocks[0].backward, blocks[0].forward, again.blocks[0].backward
    assert own.operations < more.operations < own.operations + ahead.operations and more.weights == own.weights


def test_rows_to_experts_are_those_of_the_formulas(tmp_path: Path) -> None:
    plan = planner(written(tmp_path, EXPERTS), "parallel.pp=2", "parallel.ep=4", "parallel.ep_inner=2")
    assert plan.devices == 8
    routing, tokens = EvenRouting(8, 2), 128
    (_, nodes) = token_bytes(routing, 4, 2, 128, 2)
    out, further, back, home, last = plan.work(plan.size(plan.config.parallel)).blocks[0].forward
    assert back.sent["ep_inner"] + further.sent["ep_inner"] == pytest.approx(tokens * nodes.within / 2, rel=0.01)
    assert out.sent["ep_outer"] + home.sent["ep_outer"] == pytest.approx(tokens * nodes.between / 2, rel=0.01)
    assert [len(each.sent) for each in (out, further, back, home, last)] == [1, 1, 1, 1, 0]


def test_nodes_of_a_block_of_experts(tmp_path: Path) -> None:
    """Attention up to dispatch, experts up to combine, and back; they sum to the block without exchanges, and recomputation is in them."""
    path = written(tmp_path, EXPERTS)

    def nodes(*keys: str) -> tuple[Sequence[NodeWork], Sequence[NodeWork]]:
        plan = planner(path, "parallel.pp=2", *keys)
        block = plan.work(plan.size(plan.config.parallel)).blocks[0]
        return block.forward, block.backward

    (attention, experts, rest), (none, back, behind) = nodes("parallel.ep=2")
    rows = 128 * 2 // 2  # to the other process
    assert [dict(node.sent) for node in (attention, experts, rest)] == [
        {"ep": rows * (2 * 128 + 4)},
        {"ep": rows * 2 * 128},
        {},
    ]
    assert [dict(node.sent) for node in (none, back, behind)] == [
        dict(node.sent) for node in (experts, attention, rest)
    ]
    assert experts.operations == back.operations == back.weights == 3 * 2 * 256 * 128 * 128
    assert (rest.operations, none.operations + none.weights) == (0, 0) and behind.weights > 0
    ((whole,), (whole_back,)) = nodes("parallel.ep=1")
    assert whole.operations == attention.operations + experts.operations
    assert (whole_back.operations, whole_back.weights) == tuple(
        sum(getattr(node, part) for node in (back, behind)) for part in ("operations", "weights")
    )
    _, again = nodes("parallel.ep=2", "memory.activation_policy={block: recompute}", "memory.exchange_again=true")
    assert [bool(node.sent) for node in again] == [True, True, True, False] and again[0].sent == attention.sent
    assert sum(node.weights for node in again) == whole_back.weights
    assert again[0].operations == attention.operations


def test_the_command_prints_and_draws_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(written(tmp_path)), "--pipeline", "parallel.pp=4", "parallel.virtual=2"]
    assert main([*command, "--micro-batches", "6", "--svg", str(tmp_path / "step.svg")]) == 0
    out, told = capsys.readouterr()
    assert "a step of 6 micro-batches of packs of 128 x 1" in out and "parallel.virtual=2" in told
    rows = re.findall(r"^ +(\d) +([\d.]+)% +([\d.]+)% +(\d+) +([\d.]+) MB  (.*)$", out, re.MULTILINE)
    assert [row[-1] for row in rows] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert sum(float(row[1]) for row in rows) == pytest.approx(100, abs=0.3)
    assert (
        out.count("\n  0 ") >= 1
        and (tmp_path / "step.svg").read_text(encoding="utf-8").count("<title>") == 1 + 6 * 8 * 2
    )


def test_what_each_schedule_gains_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rates = written(tmp_path, EXPERTS), ["--tflops", "1", "--inner", "2"]
    keys = ["parallel.pp=2", "parallel.virtual=2", "parallel.ep=2", "parallel.schedule=overlap"]
    assert main(["plan", str(path), "--pipeline", *keys, *rates]) == 0
    out = capsys.readouterr().out
    added = [float(each) for each in re.findall(r"rows of experts [\d.]+ [mu]?s \(([\d.]+)%\)", out)]
    assert len(added) == 2 and added[0] < 0.5 * added[1]
    table = dict(re.findall(r"^  (\w+) +[\d.]+ [mu]?s +[\d.]+% +(.*B)(?:  that of the config)?$", out, re.MULTILINE))
    assert set(table) == {"interleaved", "zbv", "dualpipe_v", "overlap"} and out.count("that of the config") == 1
    plan = planner(path, *keys)
    steps = {each.schedule: plan.step(each) for each in plan.schedules(plan.config.parallel)}
    for schedule, words in table.items():
        weights, activations = (float(each) for each in re.findall(r"([\d.]+) MB", words))
        assert weights + activations == pytest.approx(max(plan.memory(steps[schedule])) / 1e6, abs=0.2), schedule
    one = planner(path, "parallel.pp=2", "parallel.extra_warmup=true")
    assert [each.schedule for each in one.schedules(one.config.parallel)] == ["1f1b", "zb_h1"]


def test_the_search_finds_the_best_of_all_that_fit(tmp_path: Path) -> None:
    plan = planner(written(tmp_path), devices=4)
    layouts = plan.candidates()
    assert {(each.pp, each.virtual, each.schedule) for each in layouts} >= {
        (2, 1, "1f1b"), (2, 4, "interleaved"), (4, 2, "zbv"), (4, 1, "zb_h1"), (4, 2, "dualpipe_v")
    }  # fmt: skip
    steps = [plan.step(each) for each in layouts]
    bytes_of = {id(step): max(plan.memory(step)) for step in steps}
    limit = sorted(bytes_of.values())[len(steps) // 2]
    fits = sorted(step.simulated.step for step in steps if bytes_of[id(step)] <= limit)
    found = plan.search(limit)
    assert [step.simulated.step for step, _ in found] == fits[: len(found)] and len(found) == min(8, len(fits))
    assert all(most <= limit for _, most in found) and plan.search(1) == []


def test_equal_stages_stand_still_as_reckoned(tmp_path: Path) -> None:
    plan = planner(written(tmp_path), "parallel.pp=4", "parallel.virtual=2")
    size = plan.size(plan.config.parallel)
    half = PassWork((NodeWork(1.0),), (NodeWork(1.0, 1.0),))
    plan._works[size.shape, size.items] = MicroBatchWork((half,) * 8, PassWork(), PassWork(), 0)
    step = plan.step(plan.config.parallel)
    assert step.simulated.idle == pytest.approx(reckoned(step.pipeline, 8).idle)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say what to plan: --pipeline"),
        (("--pipeline",), "parallel.pp=2, or --memory"),
        (("--pipeline", "parallel.pp=2", "parallel.schedule=zbw"), "'zbv', 'dualpipe_v' or 'overlap' (got 'zbw')"),
        (("--pipeline", "parallel.pp=3", "--devices", "8"), "takes 3 devices or a multiple of them, such as 9"),
        (("--pipeline", "parallel.pp=16"), "the model has 8 blocks: each stage needs one, so use parallel.pp 8"),
        (("--pipeline", "parallel.pp=2", "--memory", "lots"), "--memory: 'lots' is not a number of bytes"),
        (("--pipeline", "parallel.pp=2", "--memory", "1MB"), "no pipeline of 2 devices fits 1.0 MB a device"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(written(tmp_path)), *words]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "mmspeed: error" in line]
    assert len(errors) == 1 and says in errors[0]
