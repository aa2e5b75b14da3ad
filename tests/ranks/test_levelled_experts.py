"""Experts that move between processes, and copies that take a share of their rows: what a model computes, and what a run trains.

Losses and gradients agree with those of experts at home to 1e-5 of the largest entry; bitwise where only places change and no node sums
first. A run that moves experts writes the files of one that does not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mmspeed import rng
from mmspeed.config.parallel import ParallelConfig
from mmspeed.log import read_metrics
from mmspeed.loop import expert_balance
from mmspeed.loop.expert_balance import ExpertBalance
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import parallelize
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.inference.language import export_language_run
from tests.ranks.test_expert_states import WAYS, config, files, home, losses, named
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole
from tests.support.spawn import run_ranks

__all__ = ["home"]  # a fixture
LAYOUTS = {
    "ep": ParallelConfig(ep=4),
    "ep x edp": ParallelConfig(ep=2),
    "nodes": ParallelConfig(ep=4, ep_inner=2),
    "ep x etp": ParallelConfig(ep=2, etp=2),
}


def computed(name: str, meshes: Meshes) -> dict[str, Any]:
    """The loss and the gradients of a step at home, of the same step with moved and lent experts, and the numbers of both."""
    settings = replace(tiny_twin(SHAPES["deepseek-v3"].settings), num_nextn_predict_layers=0)
    mesh, layout = meshes.of(LAYOUTS[name])
    model = Decoder(settings)
    for key, p in model.named_parameters():
        p.data.copy_(rng.normal(p.shape, 3, key) * 0.1)
    model = parallelize(model, mesh, "fsdp", layout=layout)
    optimizer = torch.optim.AdamW(model.parameters())
    nodes = 1 if layout.nodes is None else layout.nodes[0].size
    balance = ExpertBalance(model, "model", optimizer, None, layout.experts, every=1, copies=2, nodes=nodes)
    ids = torch.from_numpy(np.random.default_rng(dist.get_rank()).integers(0, 512, (1, 40)))

    def step() -> tuple[float, dict[str, Any]]:
        model.zero_grad()
        loss = model(ids)[0].float().square().sum()
        loss.backward()
        return loss.item(), {key: whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}

    at_home = step()
    load_LG = np.random.default_rng(5).integers(1, 100, balance.home.shape)
    load_LG[:, 0] = 900
    balance._move(expert_balance.rearrange(load_LG, balance.places, layout.experts.size, nodes))
    balance.plans = expert_balance.plan_shares(load_LG, balance.places, layout.experts.size, 2, nodes)
    balance._tell()
    loss, grads = step()
    experts = [key for key in grads if ".experts." in key]
    for place, key in enumerate(experts):  # two parameters of a layer
        grads[key] = grads[key][balance.places[place // 2]]
    gaps = {key: float(abs(grads[key] - one).max() / abs(one).max()) for key, one in at_home[1].items()}
    moved = int((balance.places != balance.home).sum())
    before = layout.ledger.copy()
    balance.go_home()
    again = step()
    return {
        "loss": abs(loss / at_home[0] - 1),
        "gap": max(gaps.values()),
        "moved": moved,
        "copies": sum(map(len, balance.plans)) or len(layout.ledger.since(before).bytes),
        "home": again[0] == at_home[0] and all((again[1][key] == one).all() for key, one in at_home[1].items()),
    }


def all_computed(names: list[str]) -> dict[str, Any]:
    meshes = Meshes()
    return {name: computed(name, meshes) for name in names}


@pytest.mark.parametrize("names", [["ep"], pytest.param(list(LAYOUTS), marks=pytest.mark.slow)])
def test_moved_and_lent_experts_compute_what_experts_at_home_do(names: list[str]) -> None:
    for rank in run_ranks(all_computed, 4, names):
        for name, result in rank.items():
            assert result["moved"] and result["copies"], (name, result)
            assert result["loss"] <= 1e-5 and result["gap"] <= 1e-5, (name, result)
            assert result["home"], name


def trained(folder: str, runs: list[tuple[str, tuple[str, ...]]], broken_after: int | None = None) -> None:
    """Train runs; with `broken_after`, each breaks off in its so-many-th move, between two tensors."""
    plain, calls = expert_balance.mover, list[None]()

    def breaking(*args: Any) -> Any:
        move = plain(*args)

        def once(part: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            if len(calls) == broken_after:
                raise RuntimeError("broken off")
            return move(part)

        return once

    if broken_after is not None:
        expert_balance.mover = breaking
    for name, overrides in runs:
        try:
            TrainPipeline(config(Path(folder), f"name={name}", *overrides)).run()
        except RuntimeError as error:
            if broken_after is None or "broken off" not in str(error):
                raise


MOVES = ("parallel.balance.migrate_every=3", "parallel.balance.gigabytes_per_second=1e9")
LENDS = ("parallel.balance.copies=2", "parallel.balance.gigabytes_per_second=1e9")


def test_a_run_whose_experts_move_trains_and_writes_the_same(home: Path) -> None:
    """Also one that breaks off in the middle of a move, and one with states and averages on the host."""
    length, host = ("train.steps=8", "checkpoint.every=4", "parallel.ep=2"), WAYS["states and averages on the host"]
    runs = [("still", length), ("moves", (*length, *MOVES)), ("host", (*length, *MOVES, *host))]
    run_ranks(trained, 2, str(home), runs)
    run_ranks(trained, 2, str(home), [("broken", (*length, *MOVES))], 40)
    run_ranks(trained, 2, str(home), [("broken", (*length, *MOVES))])
    for weights in ("model", "ema"):
        for name in ("still", "moves", "host", "broken"):
            export_language_run(config(home, f"name={name}").run_dir, home / f"{name}-{weights}", weights=weights)  # type: ignore[arg-type]
            assert losses(home, name) == losses(home, "still")
            assert files(home / f"{name}-{weights}") == files(home / f"still-{weights}"), name
    rows = read_metrics(config(home, "name=moves").run_dir / "metrics.jsonl")
    assert sum(row["balance"]["moved"] for row in rows if row["kind"] == "train") > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_200_steps_with_moves_and_copies_lose_what_experts_at_home_do(home: Path, way: str) -> None:
    own = ("train.steps=200", "train.lr=1e-5", "parallel.ep=2", *WAYS[way])
    runs = [(named(way, "still"), own), (named(way, "levelled"), (*own, *MOVES, *LENDS[:1]))]
    run_ranks(trained, 2, str(home), runs, timeout=900)
    still, levelled = (losses(home, name) for name, _ in runs)
    assert len(still) == 200 and levelled == pytest.approx(still, rel=1e-5)
