"""Checkpoints over ranks: saved on 2 sharded ranks, loaded there and on 1, bit for bit."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mmspeed.axes import AxisSizes
from mmspeed.config.schema import TrainConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.maintenance import verify
from mmspeed.loop.checkpoint.manager import (
    CheckpointManager,
    DamagedCheckpointError,
    TrainingState,
    load,
    load_weights,
    step_name,
    steps_in,
)
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.mesh import make_mesh
from mmspeed.parallel import parallelize, unwrap
from tests.support.spawn import run_ranks
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, split

KEYS = [f"s{i}" for i in range(7)]
Arrays = dict[str, np.ndarray]


def state_of(strategy: Any, replicate: int = 1, seed: int = 0) -> TrainingState:
    mesh = make_mesh(Device("cpu", 0), AxisSizes(replicate, -1)) if dist.is_initialized() else None
    model = parallelize(ToyDiT(seed=seed), mesh, strategy)
    return TrainingState(model, make_optimizer(model, TrainConfig(lr=1e-2, weight_decay=0.1)), EMA(model, 0.9))


def train(state: TrainingState, strategy: Any, steps: range) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for epoch in steps:
        batches = split(KEYS, 8, rank, world, 8 // world, epoch)
        result = train_step(
            state.model, batches, flow_loss, state.optimizer,  # type: ignore[arg-type]
            global_samples=7, clip_norm=1.0, strategy=strategy,
        )  # fmt: skip
        state.ema.update(state.model)  # type: ignore[union-attr]
        losses.append(result.loss)
    return losses


def whole(state: TrainingState) -> Arrays:
    """Every tensor of the state, gathered."""
    assert state.optimizer is not None and state.ema is not None
    tensors = {f"model.{n}": t for n, t in unwrap(state.model).state_dict().items()}
    tensors |= {f"ema.{n}": t for n, t in state.ema.state_dict().items()}
    for name, p in unwrap(state.model).named_parameters():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.optimizer.state[p].items()}
    gathered = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {n: t.detach().numpy().copy() for n, t in gathered.items()}


def same(a: Arrays, b: Arrays) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[n], b[n]) for n in a)


def write_on_two(folder: str) -> dict[str, Any]:
    """Train, save in the background while training goes on, and resume; then a write that fails on one rank."""
    state = state_of("fsdp")
    manager = CheckpointManager(Path(folder))
    train(state, "fsdp", range(2))
    state.meta = {"position": 14}
    at_save = whole(state)
    manager.save(2, state)
    on = train(state, "fsdp", range(2, 4))
    polled = [manager.poll()]
    while polled[-1] is None:
        polled.append(manager.poll())
    assert polled[-1] == 2

    other = state_of("fsdp", seed=1)
    meta = manager.load(Path(folder) / step_name(2), other.model, other.optimizer, other.ema)
    loaded = whole(other)
    again = train(other, "fsdp", range(2, 4))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # writes beyond fail as on a full disk
    try:
        manager.save(4, state, blocking=True)
        message = ""
    except UserError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()  # rank 0 removes what was half-written
    left = sorted(os.listdir(folder))
    return {
        "saved": at_save, "loaded": same(loaded, at_save), "meta": meta, "losses": [on, again],
        "resumed": same(whole(other), whole(state)), "message": message, "left": left,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def read_a_damaged_one(folder: str) -> list[str]:
    """Load a checkpoint on ranks of which one alone reads the damaged chunk; then the one before it."""
    manager = CheckpointManager(Path(folder))
    for step in (2, 4):
        manager.save(step, state_of("fsdp", seed=step), blocking=True)
    newest = Path(folder) / step_name(4)
    if dist.get_rank() == 0:
        path = next(newest.glob("shard-00002-model-*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    state = state_of("fsdp", seed=0)
    messages = []
    manager.check(newest)
    try:
        manager.load(newest, state.model, state.optimizer, state.ema)
    except DamagedCheckpointError as error:
        messages.append(str(error))
    messages.append(str(manager.set_aside(newest.name)))
    manager.load(Path(folder) / step_name(2), state.model, state.optimizer, state.ema)
    return [*messages, str(same(whole(state), whole(state_of("fsdp", seed=2))))]


def test_a_chunk_that_one_rank_reads_is_damaged_for_all(two: list[dict[str, Any]]) -> None:
    first, second = (rank["damaged"] for rank in two)
    assert first == second and first[1:] == [str((f"{step_name(4)}.damaged", step_name(2))), "True"]
    assert "are not those that were written" in first[0]


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(write_and_damage, 2, str(folder), str(tmp_path_factory.mktemp("damaged")))


def write_and_damage(folder: str, other: str) -> dict[str, Any]:
    return {**write_on_two(folder), "damaged": read_a_damaged_one(other)}


def test_resume_on_the_same_ranks_is_bitwise(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["loaded"] and rank["resumed"]
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["meta"] == {"position": 14, "step": 2}


def test_a_write_that_fails_on_one_rank_fails_on_all(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "checkpoint of step 4 could not be written" in rank["message"]
        assert rank["left"] == ["latest.json", "step-00000002"]


def test_each_rank_wrote_its_shards_without_pickles(folder: Path, two: list[dict[str, Any]]) -> None:
    saved = folder / step_name(2)
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    index = json.loads((saved / "index.json").read_text())
    chunks = index["tensors"]["ema.blocks.0.up.weight"]["chunks"]
    assert [chunk["shape"] for chunk in chunks] == [[11, 10], [10, 10]]
    assert len({chunk["file"] for chunk in chunks}) == 2
    assert len(index["tensors"]["model.shift"]["chunks"]) == 1  # held by all, written by one


def check_alone(saved: Path, expected: Arrays) -> None:
    state = state_of("none", seed=1)
    load(saved, state.model, state.optimizer, state.ema)
    assert same(whole(state), expected)
    weights = ToyDiT(seed=1)
    load_weights(saved, weights)
    assert all(np.array_equal(p.detach().numpy(), expected[f"ema.{n}"]) for n, p in weights.named_parameters())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_what_two_wrote(folder: Path, two: list[dict[str, Any]]) -> None:
    check_alone(folder / step_name(2), two[0]["saved"])


def on_hosts(folder: str, strategy: str, hosts: int) -> dict[str, Any]:
    """Save on two ranks on one host or two; resume from the copies; then one copy is damaged, and then lost."""
    rank = dist.get_rank()
    host = rank if hosts == 2 else 0
    socket.gethostname = lambda: f"host-{host}"  # type: ignore[assignment]
    disk = Path(folder) / f"disk-{host}"
    manager = CheckpointManager(Path(folder) / "run", local=disk)
    state = state_of(strategy)
    train(state, strategy, range(2))
    manager.save(2, state)
    train(state, strategy, range(2, 3))
    manager.save(3, state, blocking=True)
    expected, shared = whole(state), Path(folder) / "run" / step_name(3)

    copy = manager.newest_copy(step_name(2))
    assert copy is not None and copy.is_relative_to(disk) and copy.name == step_name(3)
    results: dict[str, Any] = {"problems": verify(copy), "steps": steps_in(copy.parent)}
    other = state_of(strategy, seed=1)
    manager.load(copy, other.model, other.optimizer, other.ema)
    results["same"] = same(whole(other), expected)
    parts = strategy == "fsdp" and hosts == 2
    tensors = json.loads((copy / "index.json").read_text())["tensors"]
    results["parts"] = (
        tensors["model.blocks.0.up.weight"]["chunks"][0]["shape"] != tensors["model.blocks.0.up.weight"]["shape"]
    )
    assert all(len(entry["chunks"]) == 1 for entry in tensors.values())  # of what both ranks of a host hold, one copy

    messages = []
    if parts:  # another layout needs parts of the other host
        plain = state_of("ddp", seed=1)
        try:
            manager.load(copy, plain.model, plain.optimizer, plain.ema)
        except DamagedCheckpointError as error:
            messages.append(str(error))
    if rank == 1:
        path = next(copy.glob("shard-*-model-*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    try:
        manager.load(copy, other.model, other.optimizer, other.ema)
    except DamagedCheckpointError as error:
        messages.append(str(error))
    manager.load(shared, other.model, other.optimizer, other.ema)
    results["shared"] = same(whole(other), expected)
    if rank == 1:
        shutil.rmtree(copy)
    dist.barrier()
    lost = manager.newest_copy(step_name(3))
    return {**results, "messages": messages, "lost": lost}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "hosts"), [("fsdp", 2), ("ddp", 1)])
def test_hosts_go_on_from_their_own_copies_or_all_from_the_shared_one(
    tmp_path: Path, strategy: str, hosts: int
) -> None:
    first, second = run_ranks(on_hosts, 2, str(tmp_path), strategy, hosts)
    assert first == second
    assert first["problems"] == [] and first["steps"] == [3] and first["lost"] is None
    assert first["same"] and first["shared"] and first["parts"] == (strategy == "fsdp")
    assert "another layout" in first["messages"][0] or strategy == "ddp"
    assert "are not those that were written" in first["messages"][-1]
