"""Staging: what is written is a copy, in buffers that serve every save; a save that has to wait for the one before says how long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspeed.config.schema import TrainConfig
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, step_name
from mmspeed.loop.checkpoint.staging import Staging
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from tests.support.toy import ToyDiT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_staged_state_is_a_copy_in_buffers_that_are_used_again() -> None:
    staging = Staging()
    whole: Tensor = torch.arange(12.0).reshape(3, 4)
    state = {"a": whole, "b": whole.T[1:], "empty": torch.empty(0, 4), "one": torch.tensor(3)}
    first = staging.stage(state)
    first.wait()
    assert all(torch.equal(first.tensors[name], value) for name, value in state.items())
    places = {name: value.data_ptr() for name, value in first.tensors.items()}
    whole += 1
    assert first.tensors["a"][0, 0] == 0 and first.tensors["b"][0, 0] == 1

    again = staging.stage(state)
    assert {name: value.data_ptr() for name, value in again.tensors.items()} == places
    assert torch.equal(again.tensors["b"], whole.T[1:])
    other = staging.stage({"a": torch.zeros(5), "b": whole.T[1:]})  # another shape gets a buffer of its own
    assert torch.equal(other.tensors["a"], torch.zeros(5)) and other.tensors["b"].data_ptr() == places["b"]


def test_a_save_waits_for_the_write_before_it_and_says_how_long(tmp_path: Path) -> None:
    model = ToyDiT()
    state = TrainingState(model, make_optimizer(model, TrainConfig()))
    manager = CheckpointManager(tmp_path)
    with manager._lock:  # which the write needs at its end
        assert manager.save(1, state).waited < 0.2
        assert manager.poll() is None
        begun = threading.Timer(0.3, manager._lock.release)
        begun.start()
        stall = manager.save(2, state)
        manager._lock.acquire()
    assert stall.waited > 0.2 and stall.copied < stall.waited
    manager.wait()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(1), step_name(2)]
