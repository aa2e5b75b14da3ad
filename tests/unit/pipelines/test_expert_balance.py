"""Balance of experts in runs of the language task: biases move against the loads of each step, and are part of the run's state.

Legend: T tokens, K experts of a token, G experts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.load import open_checkpoint
from mmspeed.loop.step import apply_update
from mmspeed.models.language.experts import Router
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.inference.language import export_language_run
from mmspeed.pipelines.tasks import as_task
from mmspeed.protocols import CountsSteps
from tests.unit.pipelines.test_language_task import ALONE, MemoryTask, config, losses, model_of, opened

RATE = 0.01
EXPERTS = (
    "model.shape=tiny-deepseek-v3", "model.hidden_size=32", "model.num_hidden_layers=2", "model.head_dim=null", "model.num_nextn_predict_layers=1",
    "model.num_experts=6", "model.num_experts_per_tok=2", "model.moe_intermediate_size=16", "model.n_group=1", "model.topk_group=1",
    f"objective.balance_rate={RATE}", "validate.every=2",
)  # fmt: skip
RECOMPUTED = "memory.activation_policy={block: recompute}"


class Biases(TrainCallback):
    """Biases of all routers after each step, and the loads that hooks counted since the last one."""

    def __init__(self) -> None:
        self.biases: list[dict[str, Tensor]] = []
        self.loads: list[dict[str, Tensor]] = []
        self._counts: dict[str, Counter[int]] = defaultdict(Counter)

    def count(self, name: str, router: nn.Module, args: Any, expert_TK: Tensor) -> None:
        if router.training:
            for experts, counts in zip(expert_TK.tolist(), args[1].tolist(), strict=True):
                self._counts[name].update(experts * counts)

    def on_step(self, event: Any) -> None:
        routers = {name: part for name, part in event.models["model"].named_modules() if isinstance(part, Router)}
        self.biases.append({name: part.e_score_correction_bias.clone() for name, part in routers.items()})
        self.loads.append(
            {name: torch.tensor([float(self._counts[name][g]) for g in range(6)]) for name in self._counts}
        )
        self._counts.clear()


class WatchedTask(MemoryTask):
    """The task on documents in memory, whose routers tell `watch` what they choose."""

    watch: Biases

    def build(self) -> dict[str, nn.Module]:
        models = super().build()
        for name, part in models["model"].named_modules():
            if isinstance(part, Router):
                part.register_forward_hook(lambda router, args, out, n=name: self.watch.count(n, router, args, out[1]))
        return models


def run(folder: Path, *overrides: str) -> Biases:
    """The biases of a run."""
    settings, watch = config(folder, *EXPERTS, *overrides), Biases()
    task = WatchedTask(settings)
    task.watch = watch
    TrainPipeline(settings, task=task, callbacks=[watch]).run()
    return watch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Biases]:
    """A run of six steps: an epoch and more, whose last step is short."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, "train.micro_batch_size=1")


def test_biases_move_against_the_loads_of_each_step(whole: tuple[Path, Biases]) -> None:
    _, watch = whole
    before = {name: torch.zeros(6) for name in watch.biases[0]}
    assert sorted(before) == ["layers.1.mlp.gate", "mtp.0.mtp_block.mlp.gate"]
    for biases, loads in zip(watch.biases, watch.loads, strict=True):
        for name, bias_G in biases.items():
            moved_G = -RATE * torch.sign(loads[name] - loads[name].mean())
            assert torch.equal(bias_G, before[name] + moved_G) and moved_G.any(), name
        before = biases


def test_loads_are_those_of_real_tokens_and_their_spread_is_in_the_metrics(whole: tuple[Path, Biases]) -> None:
    folder, watch = whole
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 6 and any(row["padding"] for row in rows)
    for row, loads in zip(rows, watch.loads, strict=True):
        assert all(int(load_G.sum()) == 2 * row["tokens"] for load_G in loads.values())
        shares = torch.cat([load_G / load_G.mean() for load_G in loads.values()])
        spread = row["expert_load"]
        assert spread["max"] == pytest.approx(float(shares.max())) and spread["min"] == pytest.approx(
            float(shares.min())
        )
        assert spread["median"] == pytest.approx(float(shares.quantile(0.5)), rel=1e-5)
        assert spread["worst"].removeprefix("model.") in loads
        highest = [float((load_G / load_G.mean()).max()) for load_G in loads.values()]
        assert spread["by_layer"] == pytest.approx(highest, abs=1e-3)


def test_recomputation_counts_once(whole: tuple[Path, Biases], tmp_path: Path) -> None:
    folder, watch = whole
    again = run(tmp_path, "train.micro_batch_size=1", RECOMPUTED)
    assert losses(tmp_path) == losses(folder)
    assert all(torch.equal(b[name], a[name]) for a, b in zip(watch.biases, again.biases, strict=True) for name in a)


def test_a_stopped_run_goes_on_with_its_biases(whole: tuple[Path, Biases], tmp_path: Path) -> None:
    folder, watch = whole
    run(tmp_path, "train.micro_batch_size=1", "train.steps=2")
    rest = run(tmp_path, "train.micro_batch_size=1")
    assert losses(tmp_path) == losses(folder) and len(rest.biases) == 4
    for name, bias_G in watch.biases[-1].items():
        assert torch.equal(rest.biases[-1][name], bias_G) and bias_G.any(), name


@pytest.mark.parametrize("tier", [(), ("memory.states=host",)], ids=["plain", "tiered"])
def test_muon_takes_the_experts_of_a_run_that_goes_on(
    tier: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("train.optimizer=muon", "train.weight_decay=0.1", *tier)
    with caplog.at_level("INFO", logger="mmspeed"):
        run(tmp_path / "whole", *words)
    assert re.search(
        "optimizer: muon for [0-9.]+% of the parameters, the matrices of blocks and of their experts; adamw",
        caplog.text,
    )
    run(tmp_path / "stopped", *words, "train.steps=2")
    run(tmp_path / "stopped", *words)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    moments = open_checkpoint(tmp_path / "whole" / "run" / "checkpoints" / "step-00000006")[1]["tensors"]
    assert "optimizer.state.layers.1.mlp.experts.down_proj.momentum_buffer" in moments


def test_a_step_that_is_not_applied_moves_nothing(tmp_path: Path) -> None:
    """Nor do loads from before the step."""
    task = opened(tmp_path, *EXPERTS)
    model = model_of(task).train()
    routers = [part for part in model.modules() if isinstance(part, Router)]
    assert all(isinstance(router, CountsSteps) for router in routers)
    model(torch.randint(0, 90, (1, 20)))
    assert all(router.load_G.sum() == 40 for router in routers)
    trained, optimizer = as_task(task, task.config), torch.optim.SGD(model.parameters(), 0.1)
    (learner,) = trained.learners(
        trained.updates(), {"model": model}, "none", {"model": optimizer}, torch.device("cpu")
    )
    data = task.data(ALONE)
    for step, accepted in zip(data.steps(0, 2), (False, True), strict=True):
        result = apply_update(
            {"model": model}, learner, step.batches, step.divisors, clip_norm=None, accept=lambda *_, ok=accepted: ok
        )
        assert result.withheld != accepted and len(result.counts) == (2 if accepted else 0)
        assert all(router.e_score_correction_bias.any() == accepted for router in routers)
        assert all(int(counts_G.sum()) == 2 * (step.tokens or 0) for counts_G in result.counts.values())


@pytest.mark.parametrize("balance", ["sequence", "global_batch"])
def test_the_auxiliary_loss_alone_reaches_the_router_through_the_task(tmp_path: Path, balance: str) -> None:
    task = opened(tmp_path, *EXPERTS, f"model.balance={balance}", "objective.balance=0.5")
    model = model_of(task).train()
    step = next(task.data(ALONE).steps(0, 1))
    values_of(task, {"model": model}, next(iter(step.batches))).own()["balance"].total().backward()
    for name, part in model.named_modules():
        if isinstance(part, Router):
            assert part.weight.grad is not None and part.weight.grad.norm() > 1e-6, name
    assert model.lm_head.weight is None or model.lm_head.weight.grad is None  # nothing of the other terms


def test_experts_and_windows_of_a_config(tmp_path: Path) -> None:
    def settings(*overrides: str) -> Any:
        return opened(tmp_path, *overrides).settings

    base = ("model.shape=tiny-qwen3-0.6b", "model.num_hidden_layers=4", "model.intermediate_size=48")
    plain = settings(*base, "model.num_experts=8")
    assert (plain.experts.num_experts, plain.experts.top_k, plain.experts.moe_intermediate_size) == (8, 2, 24)
    assert plain.experts.norm_topk_prob and not plain.experts.router_bias and not plain.experts.dense
    ours = settings(
        *base, "model.num_experts=12", "model.num_experts_per_tok=3", "model.n_shared_experts=1", "model.moe_intermediate_size=8",
        "model.first_k_dense_replace=1", "model.scoring_func=sigmoid", "model.router_bias=true", "model.windows=[15, 15, null]",
        "objective.balance_rate=0.25",
    )  # fmt: skip
    sizes = ours.experts
    assert (sizes.num_experts, sizes.top_k, sizes.n_shared_experts, sizes.moe_intermediate_size) == (12, 3, 1, 8)
    assert ours.experts.dense == (0,) and ours.experts.router_bias and ours.experts.balance_rate == 0.25
    assert ours.windows == (15, 15, None, 15) and settings(*base, "model.windows=7").windows == (7,) * 4
    for overrides, message in (
        (("model.num_experts=2", "model.num_experts_per_tok=3"), "cannot go to 3 of 2 experts"),
        (("model.num_experts=8", "model.first_k_dense_replace=4"), "none has experts: lower first_k_dense_replace"),
        (("model.windows=[1, 2, 3, 4, 5]",), "5 windows are for more than the model's 4 blocks"),
        (("model.windows=[]",), "model.windows"),
        (("model.pretrained=some/folder", "model.num_experts=4"), "leave it out beside"),
        (("model.num_expert=4",), "num_experts"),
        (("model.topk_group=1",), "model: topk_group is of experts, and the model has none: set num_experts"),
    ):
        with pytest.raises(UserError, match=message):
            settings(*(base if "pretrained" not in overrides[0] else ()), *overrides)


def test_an_export_holds_the_moved_biases(tmp_path: Path) -> None:
    watch = run(tmp_path, "model.num_nextn_predict_layers=0", "train.ema_decay=0.5")
    for weights in ("model", "ema"):  # biases have no average
        out = tmp_path / weights
        export_language_run(tmp_path / "run", out, weights=weights)
        written = load_file(out / "model.safetensors")
        biases = {f"model.{name.removeprefix('model.')}": value for name, value in watch.biases[-1].items()}
        for name, bias_G in biases.items():
            assert bias_G.any() and torch.equal(written[f"{name}.e_score_correction_bias"], bias_G), (weights, name)
