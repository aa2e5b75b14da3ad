"""The self-check in processes: layouts that are right pass, layouts that are broken fail and are named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml
from torch import Tensor

from mmspeed.__main__ import main
from mmspeed.config import make_config
from mmspeed.data.loading import collate
from mmspeed.device import Device
from mmspeed.mesh import process_group
from mmspeed.parallel.boundaries.attention_sites import CalledSite, SiteBoundary
from mmspeed.parallel.boundaries.record import ForwardRecord
from mmspeed.pipelines.check.layouts import alone, compared_run, with_layout
from mmspeed.pipelines.check.verdict import SelfCheck, compare
from mmspeed.pipelines.check.worker import WorkerReport, examine
from mmspeed.pipelines.tasks import make_task
from mmspeed.protocols.plan import Structure
from tests.support.runs import small_tree
from tests.support.spawn import run_ranks

BUCKETS = [{"frames": 1, "height": 48, "width": 48}, {"frames": 13, "height": 48, "width": 80}]
LAYOUT = "ulysses=2"


def tree(folder: Path) -> dict[str, Any]:
    small = small_tree(folder)
    small["data"]["buckets"] = BUCKETS
    small["model"] = {"size": "nano", "arrangement": "full"}
    return small


# --- broken on purpose ---


ATTEND, GATHER, QUANTILES = CalledSite.forward, ForwardRecord.gather, collate.draw_quantiles


def doubled(x: Tensor) -> Tensor:
    """The same numbers, with twice the gradient."""
    return x + (x - x.detach())


def gather_doubled(record: ForwardRecord, x: Tensor, *args: Any) -> Tensor:
    return doubled(GATHER(record, x, *args))


def attend_with_doubled_keys(site: Any, q: Tensor, k: Tensor, v: Tensor, structure: Structure) -> Tensor:
    boundary: SiteBoundary = site._site
    own = boundary.keys == boundary.site.queries
    return ATTEND(site, q, doubled(k) if own else k, v, structure)


def early_quantiles(*args: Any) -> Tensor:
    return QUANTILES(*args) / (1 + dist.get_rank())


# What is broken in the engine, and how; what is left out is in test_selfcheck_published.py.
FAULTS: dict[str, Any] = {
    "right": nullcontext,
    # takes a sum of gradients for a mean
    "doubled": lambda: patch.object(ForwardRecord, "gather", gather_doubled),
    # counts the gradient of keys twice
    "doubled keys": lambda: patch.object(CalledSite, "forward", attend_with_doubled_keys),
    # the second process trains on the first half of the times
    "early": lambda: patch.object(collate, "draw_quantiles", early_quantiles),
}


def work(config: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, WorkerReport]:
    results = {}
    for kind, fault in FAULTS.items():
        with fault():
            results[kind] = examine(make_config(config), kinds)
    return results


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SelfCheck]:
    folder = tmp_path_factory.mktemp("selfcheck")
    mini = compared_run(make_task(with_layout(make_config(tree(folder)), LAYOUT)).domain, folder / "small")
    with process_group(Device("cpu", 0)):
        truth = examine(alone(mini.config), mini.kinds)
    actual = run_ranks(work, 2, mini.config.model_dump(mode="json", by_alias=True), mini.kinds)[0]
    return {kind: compare(mini, actual[kind], truth) for kind in FAULTS}


def test_a_right_layout_passes(checks: dict[str, SelfCheck]) -> None:
    check = checks["right"]
    assert check.passed, check.problems
    assert [step.kind for step in check.steps] == ["images", "videos", "mixed"]
    images, videos, _ = check.steps
    assert images.sent == {} and videos.sent["all_to_all ulysses"] > 0


def test_a_sum_taken_for_a_mean_is_distinguished_from_other_mistakes(checks: dict[str, SelfCheck]) -> None:
    check = checks["doubled"]
    assert not check.passed
    assert check.hint == "every gradient is 2 times that of one process: somewhere a sum is taken for a mean"


def test_a_wrong_gradient_is_named(checks: dict[str, SelfCheck]) -> None:
    check = checks["doubled keys"]
    assert not check.passed and max(step.loss_gap for step in check.steps) < 1e-5
    worst = {step.gaps[0].name.split(".", 2)[2] for step in check.steps}
    assert worst <= {"self_attention.k_norm.weight", "self_attention.qkv.weight"}
    assert check.hint is not None and "the mistake is in backward, at blocks.1.modulation" in check.hint
    assert "blocks.1.self_attention.k_norm, blocks.1.self_attention.qkv" in check.hint and "mlp" not in check.hint


def test_uneven_times_are_told(checks: dict[str, SelfCheck]) -> None:
    problems = [problem for problem in checks["early"].problems if "uneven times" in problem]
    assert len(problems) == 1 and problems[0].startswith("rank 1 has uneven times: [")
    assert any("compute micro-batch 0 together and have different samples" in each for each in checks["early"].problems)


# --- the command ---


@pytest.mark.slow
def test_the_command_passes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree(tmp_path)), encoding="utf-8")
    words = [
        "check",
        str(path),
        "model.arrangement=factorised",
        "memory.activation_policy={block: recompute}",
        "train.micro_batch_size=1",
    ]
    assert main([*words, "--parallel", "dsp=2"]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text and "all_to_all dsp" in text and "recompute" in text
    assert main([*words, "--parallel", "tp=3"]) == 1
    error = capsys.readouterr().err
    assert "mmspeed: error: parallel.tp 3 does not divide the model's 4 heads: use one of 1, 2, 4" in error
