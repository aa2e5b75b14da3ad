"""Tiers of the optimizer over ranks: against one process in the same tier, against each other bit for bit, and checkpoints between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.manager import CheckpointManager, load, step_name
from mmspeed.loop.optimizers.gradient_release import ReleasingOptimizer
from mmspeed.parallel import is_half
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks
from tests.support.steps import train_step
from tests.support.tiers import HALF, TIERS, everything, losses, parameters, state_of, steps
from tests.support.toy import flow_loss
from tests.support.toy import make_batch as make_toy_batch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Arrays = dict[str, np.ndarray]
# strategy, replicas of two ranks, micro-batch
LAYOUTS: dict[str, tuple[Any, int, int]] = {
    "fsdp": ("fsdp", 1, 8),
    "fsdp, accumulated": ("fsdp", 1, 1),
    "ddp": ("ddp", 2, 8),
    "ddp, accumulated": ("ddp", 2, 1),
}


def arrays(tensors: dict[str, Tensor]) -> Arrays:
    return {name: tensor.float().numpy().copy() for name, tensor in tensors.items()}


def same(a: Arrays, b: Arrays) -> list[str]:
    """Names that differ."""
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not np.array_equal(a[n], b[n]))


def of_tier(tier: str, layout: str) -> dict[str, Any]:
    """Three steps; the state after the first and the last."""
    strategy, replicate, micro = LAYOUTS[layout]
    state = state_of(tier, strategy, replicate=replicate)
    first = steps(state, range(1), strategy, micro)
    begun = arrays(everything(state))
    results = first + steps(state, range(1, 3), strategy, micro)
    return {
        "losses": losses(results),
        "norms": [result.grad_norm for result in results],
        "first": begun,
        "all": arrays(everything(state)),
        "parameters": arrays(parameters(state.model)),
        "grads": {str(p.grad_dtype) for p in state.model.parameters()} if is_half(state.model) else set(),
    }


def released(tier: str) -> dict[str, Any]:
    """Three sharded steps whose weights are updated in backward, and the most gradients there at one time, of all."""
    state = state_of(tier, "fsdp", release_gradients=True)
    assert isinstance(state.optimizer, ReleasingOptimizer)
    most = [0.0]

    sharded: list[Any] = list(state.model.parameters())
    numbers = sum(p.to_local().numel() for p in sharded)

    def count(_: Any) -> None:
        held = sum(p.grad.to_local().numel() for p in sharded if p.grad is not None)
        most[0] = max(most[0], held / numbers)

    for parameter in sharded:
        parameter.register_post_accumulate_grad_hook(count)
    results = steps(state, range(3), "fsdp", clip=None)
    plain = state_of(tier, "fsdp")
    wanted = steps(plain, range(3), "fsdp", clip=None)
    return {
        "losses": [losses(results), losses(wanted)],
        "norms": [[result.grad_norm for result in some] for some in (results, wanted)],
        "differ": same(arrays(everything(state)), arrays(everything(plain))),
        "most": most[0],
    }


def broken_in_backward() -> tuple[str, list[bool]]:
    """One rank meets a NaN while weights are updated in backward."""
    state = state_of("plain", "fsdp", release_gradients=True)
    batch = make_toy_batch([f"s{dist.get_rank()}"])
    if dist.get_rank() == 1:
        batch["latents"][0] = float("nan")
    before = parameters(state.model)
    assert state.optimizer is not None
    try:
        train_step(
            state.model, [batch], flow_loss, state.optimizer,
            global_samples=2, clip_norm=None, strategy="fsdp",
        )  # fmt: skip
    except UserError as error:
        return str(error), [torch.isfinite(p).all().item() for p in parameters(state.model).values()]
    return "", [torch.equal(before[n], p) for n, p in parameters(state.model).items()]


# -- checkpoints


def checkpoints(folder: str) -> dict[str, Any]:
    """Load what one process wrote; write what one process loads."""
    results: dict[str, Any] = {}
    for tier, strategy, replicate in (
        ("split", "fsdp", 1),
        ("plain", "fsdp", 1),
        ("float32", "ddp", 2),
        ("host", "fsdp", 2),
    ):
        state = state_of(tier, strategy, seed=1, replicate=replicate)
        load(Path(folder) / "one" / step_name(2), state.model, state.optimizer, state.ema)
        results[f"{tier} {strategy} {replicate}"] = arrays(everything(state))
        manager = CheckpointManager(Path(folder) / f"{tier}-{strategy}-{replicate}")
        again = losses(steps(state, range(2, 3), strategy))
        manager.save(3, state, blocking=True)
        results[f"{tier} {strategy} {replicate} on"] = again, arrays(everything(state))
    return results


def work(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "released": {tier: released(tier) for tier in ("plain", "host", "states")},
        "broken": broken_in_backward(),
        "checkpoints": checkpoints(folder),
    }


def work_on(layout: str) -> dict[str, Any]:
    """All tiers in a layout."""
    torch.manual_seed(0)
    return {tier: of_tier(tier, layout) for tier in TIERS}


@pytest.fixture(scope="module", params=slow_but(LAYOUTS, {"ddp"}))
def tiers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """By rank, what each tier gave in a layout."""
    return run_ranks(work_on, 2, request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def one(folder: Path) -> Arrays:
    """What one process wrote at step 2."""
    state = state_of("host")
    steps(state, range(2))
    CheckpointManager(folder / "one").save(2, state, blocking=True)
    return arrays(everything(state))


@pytest.fixture(scope="module")
def two(folder: Path, one: Arrays) -> list[dict[str, Any]]:
    return run_ranks(work, 2, str(folder))


def gap(actual: Arrays, truth: Arrays, kind: str) -> float:
    """The largest relative distance of the tensors of a kind."""
    names = [name for name in truth if name.endswith(kind)]
    assert names
    return max(float(np.linalg.norm(actual[n] - truth[n]) / (np.linalg.norm(truth[n]) + 1e-12)) for n in names)


def test_ranks_in_a_tier_are_one_process_in_that_tier(tiers: list[dict[str, Any]]) -> None:
    for tier in TIERS:
        alone = state_of(tier)
        result = steps(alone, range(1))[0]
        truth = arrays(everything(alone))
        # of bfloat16 a product's sum over samples is rounded once a rank, to 8 bits, and sums cancel
        close = 2e-2 if tier in HALF else 1e-5
        for rank in tiers:
            actual = rank[tier]
            assert actual["losses"][0] == pytest.approx(result.loss, rel=close / 10), tier
            assert actual["norms"][0] == pytest.approx(result.grad_norm, rel=close / 2), tier
            assert gap(actual["first"], truth, ".exp_avg") < close, tier
            if tier in HALF:
                assert actual["grads"] == {"torch.float32"}


def test_tiers_over_ranks_are_bitwise_one_another(tiers: list[dict[str, Any]]) -> None:
    for rank in tiers:
        for family in (("plain", "states"), HALF):
            first = rank[family[0]]
            for tier in family[1:]:
                other = rank[tier]
                assert other["losses"] == first["losses"] and other["norms"] == first["norms"]
                assert same(other["all"], first["all"]) == [] and same(other["parameters"], first["parameters"]) == []
            assert len(set(first["losses"])) == 3
    assert tiers[0]["split"]["losses"] == tiers[1]["split"]["losses"]


@pytest.mark.slow
def test_shards_are_updated_in_backward_bit_for_bit(two: list[dict[str, Any]]) -> None:
    for rank in two:
        for tier, actual in rank["released"].items():
            assert actual["losses"][0] == actual["losses"][1] and actual["differ"] == [], tier
            assert actual["norms"][0] == pytest.approx(actual["norms"][1], rel=1e-6), tier
            assert actual["most"] < 0.75, tier  # a block is a quarter, and vectors of all blocks share a bucket


@pytest.mark.slow
def test_a_nan_in_backward_ends_the_run_on_all_ranks(two: list[dict[str, Any]]) -> None:
    for rank in two:
        message, finite = rank["broken"]
        assert "a part of this step was applied" in message and "s1.mp4" in message and all(finite)


@pytest.mark.slow
def test_checkpoints_go_between_ranks_and_tiers_bit_for_bit(
    two: list[dict[str, Any]], folder: Path, one: Arrays
) -> None:
    for rank in two:
        loaded = {name: actual for name, actual in rank["checkpoints"].items() if not name.endswith(" on")}
        assert len(loaded) == 4
        for name, actual in loaded.items():
            assert same(actual, one) == [], name
    for name in loaded:
        for tier in ("plain", "split", "host"):
            state = state_of(tier, seed=1)
            load(folder / name.replace(" ", "-") / step_name(3), state.model, state.optimizer, state.ema)
            assert same(arrays(everything(state)), two[0]["checkpoints"][f"{name} on"][1]) == [], (name, tier)
