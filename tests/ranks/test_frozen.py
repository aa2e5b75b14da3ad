"""Only what trains is kept, over ranks: bytes of gradients, checkpoints, moments and averages; one fingerprint in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.manager import CheckpointManager, load, step_name
from mmspeed.loop.frozen import frozen_fingerprint
from tests.support.adapted import AdaptedDiT, everything, folder_bytes, share, state_bytes, state_of, steps
from tests.support.spawn import run_ranks

# strategy, tier of the optimizer
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp, bfloat16": ("fsdp", {"master": "split", "states": "host", "ema": "host"}),
}
TRAINS = 4 * sum(p.numel() for p in AdaptedDiT().parameters() if p.requires_grad)  # bytes in float32
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in tensors.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)


def reduced_bytes(events: Any) -> int:
    """Bytes that this process handed to the backend to be summed over ranks: of all-reduces and reduce-scatters, float32."""
    return 4 * sum(
        int(np.prod(shape)) for event in events if event.name == "gloo:all_reduce" for shape in event.input_shapes
    )


def train_and_save(folder: str) -> dict[str, Any]:
    """Each layout on its own: what a step exchanges and keeps, and whether it goes on bitwise from its checkpoint."""
    results: dict[str, Any] = {}
    for name, (strategy, tier) in LAYOUTS.items():
        state = state_of(strategy, **tier)
        steps(state, range(1), strategy)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            steps(state, range(1, 2), strategy)
        manager = CheckpointManager(Path(folder) / name)
        manager.save(2, state, blocking=True)
        at_save, held = arrays(everything(state)), state_bytes(state)
        on = steps(state, range(2, 4), strategy)
        other = state_of(strategy, seed=1, **tier)
        manager.load(Path(folder) / name / step_name(2), other.model, other.optimizer, other.ema)
        loaded = same(arrays(everything(other)), at_save)
        resumed = steps(other, range(2, 4), strategy) == on
        resumed = resumed and same(arrays(everything(other)), arrays(everything(state)))
        try:
            another = state_of(strategy, base=1, **tier)
            manager.load(Path(folder) / name / step_name(2), another.model, another.optimizer, another.ema)
            message = ""
        except UserError as error:
            message = str(error)
        results[name] = {
            "reduced": reduced_bytes(recorded.events()), "held": held, "saved": at_save, "loaded": loaded, "resumed": resumed,
            "fingerprint": frozen_fingerprint(state.model), "message": message, "on": on,
        }  # fmt: skip
    return results


def read_across(folder: str) -> dict[str, bool]:
    """What each layout wrote, read by each; its state is what it is here."""
    results = {}
    for source in LAYOUTS:
        whole = None
        for target, (strategy, tier) in LAYOUTS.items():
            state = state_of(strategy, seed=1, **tier)
            load(Path(folder) / source / step_name(2), state.model, state.optimizer, state.ema)
            values = arrays(everything(state))
            whole = whole or values
            results[f"{source} -> {target}"] = same(values, whole)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(train_and_save, 2, str(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_what_trains(folder: Path, two: list[dict[str, Any]], layout: str) -> None:
    assert share(AdaptedDiT()) < 0.01
    parts = 1 if layout == "ddp" else 2
    for rank in two:
        actual = rank[layout]
        assert TRAINS <= actual["reduced"] <= 1.1 * TRAINS
        assert 2 * TRAINS <= parts * actual["held"]["optimizer"] <= 1.1 * 2 * TRAINS
        assert TRAINS <= parts * actual["held"]["average"] <= 1.1 * TRAINS
    assert 4 * TRAINS <= folder_bytes(folder / layout / step_name(2)) <= 1.1 * 4 * TRAINS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_resume_bitwise_and_on_their_own_base_alone(two: list[dict[str, Any]], layout: str) -> None:
    for rank in two:
        assert rank[layout]["loaded"] and rank[layout]["resumed"] and rank[layout]["on"] == two[0][layout]["on"]
        assert "another base" in rank[layout]["message"]
        assert rank[layout]["fingerprint"] == frozen_fingerprint(AdaptedDiT())


def test_one_process_reads_what_two_wrote_and_they_what_it_wrote(folder: Path, two: list[dict[str, Any]]) -> None:
    for layout in LAYOUTS:
        state = state_of(seed=1)
        load(folder / layout / step_name(2), state.model, state.optimizer, state.ema)
        assert same(arrays(everything(state)), two[0][layout]["saved"])
        assert state.model.get_buffer("blocks.1.attend.tau") == 3.5 and state.model.get_buffer("blocks.0.count") == 2
        assert not torch.equal(state.ema.tensors["blocks.1.bias"], state.model.get_buffer("blocks.1.bias"))  # type: ignore[union-attr]
    for rank in run_ranks(read_across, 2, str(folder)):
        assert rank and all(rank.values()), rank
