"""Weights that are updated in backward: the same bits as after it, with less memory for gradients, and what stops it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspeed.config.memory import MemoryConfig
from mmspeed.config.training import TrainConfig
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load, step_name
from mmspeed.loop.optimizers.gradient_release import ReleasingOptimizer
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.memory import peak_bytes
from mmspeed.parallel import parallelize
from mmspeed.protocols import Batch
from tests.support.steps import train_step
from tests.support.tiers import BUCKET, CPU, TIERS, differing, everything, losses, parameters, state_of, steps
from tests.support.toy import flow_loss, make_batch


def one_step(state: TrainingState, batches: list[Batch], loss: Any = flow_loss) -> Any:
    assert state.optimizer is not None
    return train_step(state.model, batches, loss, state.optimizer, global_samples=2, clip_norm=None, strategy="none")


@pytest.mark.parametrize(("tier", "optimizer"), [*((tier, "adamw") for tier in TIERS), ("split", "muon")])
def test_released_steps_are_bitwise_steps(tier: str, optimizer: str) -> None:
    state, plain = (state_of(tier, optimizer=optimizer, release_gradients=on, bucket=BUCKET) for on in (True, False))
    assert isinstance(state.optimizer, ReleasingOptimizer) and len(state.optimizer.buckets) > 4
    actual, wanted = (steps(some, range(3), clip=None) for some in (state, plain))
    assert losses(actual) == losses(wanted)
    # a sum of squares in another order
    assert [r.grad_norm for r in actual] == pytest.approx([r.grad_norm for r in wanted], rel=1e-6)
    assert differing(everything(state), everything(plain)) == []
    assert differing(parameters(state.model), parameters(plain.model)) == []


class Deep(nn.Module):
    """Blocks whose weights are large beside their activations."""

    def __init__(self, width: int = 128, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_the_peak_is_lower_by_most_of_the_gradients() -> None:
    peaks = []
    for on in (False, True):
        torch.manual_seed(0)
        model = parallelize(Deep(), None, "none")
        bucket = 4 * 128 * 128
        memory = MemoryConfig(release_gradients=on, states="host", bucket=bucket)
        state = TrainingState(model, make_optimizer(model, TrainConfig(), memory, CPU))

        def loss(of: nn.Module, batch: Batch) -> Tensor:
            return of(torch.ones(2, 128)).square().mean(1)

        one_step(state, [make_batch(["a", "b"])], loss)
        peaks.append(peak_bytes(CPU, 0, lambda state=state, loss=loss: one_step(state, [make_batch(["a", "b"])], loss)))
    gradients = 4 * sum(p.numel() for p in Deep().parameters())
    assert peaks[0] > gradients and peaks[0] - peaks[1] > 0.6 * gradients


def test_several_micro_batches_are_refused_at_the_first_step() -> None:
    state = state_of("plain", release_gradients=True)
    before = parameters(state.model)
    with pytest.raises(UserError, match="one micro-batch a step, and this step has 2"):
        one_step(state, [make_batch(["a"]), make_batch(["b"])])
    assert differing(parameters(state.model), before) == []


@pytest.mark.parametrize("tier", ["plain", "host"])
def test_what_is_not_finite_stops_the_updates_there_and_ends_the_run(tier: str) -> None:
    """The gradient of an early block is broken: buckets of later blocks are updated by then, and no other."""
    state = state_of(tier, release_gradients=True)
    before = parameters(state.model)
    block = state.model.blocks[1]  # type: ignore[index,union-attr]
    block.register_full_backward_hook(
        lambda module, into, out: tuple(g * torch.nan if g is not None else g for g in into)
    )
    with pytest.raises(UserError, match=r"none alone.*a part of this step was applied.*last checkpoint"):
        one_step(state, [make_batch(["a", "b"])])
    after = parameters(state.model)
    assert all(torch.isfinite(value).all() for value in after.values())
    changed = differing(before, after)
    assert "leave.weight" in changed or "blocks.2.up.weight" in changed
    assert not any(name.startswith(("blocks.0", "enter", "text")) for name in changed), changed


def test_a_sample_that_is_not_finite_is_named_and_changes_nothing() -> None:
    state = state_of("split", release_gradients=True)
    before, batch = parameters(state.model), make_batch(["a", "b"])
    # the first: oneDNN's AMX product of an odd width reads one number of the next row, times zero
    batch["latents"][0] = float("nan")
    with pytest.raises(UserError, match=r"samples with a non-finite loss: a\.mp4\."):
        one_step(state, [batch])
    assert differing(parameters(state.model), before) == []


def test_parameters_without_a_gradient_do_not_hold_up_their_bucket() -> None:
    results = []
    for on in (True, False):
        state = state_of("states", release_gradients=on)

        def partly(model: nn.Module, batch: Batch) -> Tensor:
            x_BNE = model.enter(batch["latents"].flatten(2).transpose(1, 2))  # type: ignore[operator,union-attr]
            return x_BNE.square().mean(dim=(1, 2))

        result = one_step(state, [make_batch(["a", "b"])], partly)
        results.append((everything(state), result.loss))
        assert result.grad_norm > 0 and "optimizer.state.leave.weight.exp_avg" not in results[-1][0]
    assert differing(results[0][0], results[1][0]) == [] and results[0][1] == results[1][1]


@pytest.mark.parametrize("tier", ["states", "host"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path, tier: str) -> None:
    """The first bucket to be updated in backward is the one whose states were loaded last."""
    state = state_of(tier, release_gradients=True)
    steps(state, range(2), clip=None)
    CheckpointManager(tmp_path).save(2, state, blocking=True)
    other = state_of(tier, seed=1, release_gradients=True)
    load(tmp_path / step_name(2), other.model, other.optimizer, other.ema)
    actual, wanted = (steps(each, range(2, 4), clip=None) for each in (other, state))
    assert losses(actual) == losses(wanted)
    assert differing(everything(other), everything(state)) == []
