"""Out of memory: the advice, the record, and the return of unused memory before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.cli.failures import describe
from mmspeed.config import Config
from mmspeed.data.loading.loader import Batches
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.callbacks import StepOutcome
from mmspeed.pipelines.training.oom_advice import OomAdvisor, advise
from mmspeed.protocols import StepData
from tests.support.runs import small_config

GB = 10**9
CPU = Device("cpu", 0)
HELD = {"parameters": 0, "gradients": 0, "optimizer": 0, "average": 0, "activations": 0}


class FakeDevice(Device):
    """An accelerator whose memory the test sets, and which counts its calls."""

    def __init__(
        self, segments: list[dict[str, Any]] | None = None, used: int = 10 * GB, reserved: int = 11 * GB
    ) -> None:
        super().__init__("cpu", 0)
        for name, value in {"segments": segments or [], "used": used, "reserved": reserved, "asked": []}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "kind", "fake")

    name = "a fake device"  # type: ignore[assignment]
    growing_segments = "GROW=1"  # type: ignore[assignment]

    def memory_bytes(self) -> int:
        return self.used  # type: ignore[attr-defined, no-any-return]

    def reserved_bytes(self) -> int:
        return self.reserved  # type: ignore[attr-defined, no-any-return]

    def total_memory_bytes(self) -> int:
        return 12 * GB

    def record_allocations(self, on: bool) -> None:
        self.asked.append(on)  # type: ignore[attr-defined]

    def allocations(self) -> list[dict[str, Any]]:
        return self.segments  # type: ignore[attr-defined, no-any-return]

    def empty_cache(self) -> None:
        self.asked.append("empty")  # type: ignore[attr-defined]


def care(config: Config, device: Device, folder: Path) -> OomAdvisor:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    return OomAdvisor(config, device, folder, model, optimizer, EMA(model, 0.9))


def advice(tmp_path: Path, held: dict[str, int], *overrides: str, **options: Any) -> str:
    return "; ".join(advise({**HELD, **held}, small_config(tmp_path, *overrides), **options))


@pytest.mark.parametrize(
    ("held", "overrides", "wanted", "unwanted"),
    [
        ({"activations": 90, "parameters": 10}, (), ("memory.fraction: 0.9", "{block: recompute}", "micro_batch_size to 1"), "states"),
        ({"activations": 90}, ("memory.activation_policy={block: recompute}",), ("memory.mlp_chunk: 4096",), "memory.activation_policy"),
        ({"optimizer": 60, "parameters": 40}, (), ("memory.states: host", "parallel.strategy: fsdp"), "activations"),
        ({"optimizer": 60}, ("memory.states=host",), ("--nproc",), "memory.states"),
        ({"parameters": 90}, ("device.dtype=bfloat16",), ("memory.master: split", "--nproc"), "release_gradients"),
        ({"parameters": 90}, ("train.clip_norm=null",), ("memory.release_gradients: true",), "memory.master"),
        ({"average": 50, "parameters": 50}, (), ("memory.ema: host",), "memory.states"),
    ],
)  # fmt: skip
def test_advice_names_the_key_that_would_help(
    tmp_path: Path, held: dict[str, int], overrides: tuple[str, ...], wanted: tuple[str, ...], unwanted: str
) -> None:
    message = advice(tmp_path, {name: count * GB for name, count in held.items()}, *overrides)
    assert all(text in message for text in wanted), message
    assert unwanted not in message


def test_advice_begins_with_what_takes_most(tmp_path: Path) -> None:
    lines = advise({**HELD, "optimizer": 5 * GB, "activations": 3 * GB, "average": 2 * GB}, small_config(tmp_path))
    places = [
        next(i for i, line in enumerate(lines) if key in line) for key in ("states: host", "fraction", "ema: host")
    ]
    assert places == sorted(places)


def test_advice_knows_shards_batches_and_fragments(tmp_path: Path) -> None:
    assert "over the 4 devices: parallel.strategy: fsdp" in advice(
        tmp_path, {"parameters": GB}, "parallel.strategy=ddp", world=4
    )
    assert "fsdp" not in advice(tmp_path, {"optimizer": GB}, world=4)  # auto shards already
    assert "lower batching.budget" in advice(
        tmp_path, {"activations": GB}, "batching.by=tokens", "train.batch_size=null"
    )
    assert "micro_batch_size" not in advice(tmp_path, {"activations": GB}, "train.batch_size=4", world=4)
    held = {"activations": 6 * GB, "reserved": 10 * GB}
    assert "4.0 GB are taken but unused, in pieces too small: set GROW=1" in advice(
        tmp_path, held, growing_segments="GROW=1"
    )
    assert "pieces" not in advice(tmp_path, held) and "pieces" not in advice(
        tmp_path, held | {"reserved": 65 * GB // 10}, growing_segments="GROW=1"
    )


def block(size: int, *lines: int, state: str = "active_allocated") -> dict[str, Any]:
    frames = [{"filename": "/somewhere/lib/mmspeed/models/m.py", "line": n, "name": "forward"} for n in lines]
    return {"size": size, "state": state, "frames": [{"filename": "x.cpp", "line": 1, "name": "alloc"}, *frames]}


SEGMENTS = [
    {"blocks": [block(10, 1, 2), block(500, 7), block(999, 7, state="inactive")]},
    {"blocks": [block(20, 1, 2)]},
]


def test_out_of_memory_becomes_advice_and_a_record(tmp_path: Path) -> None:
    device = FakeDevice(SEGMENTS)
    with pytest.raises(UserError) as error, care(small_config(tmp_path), device, tmp_path):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    text = str(error.value)
    assert text.startswith("memory of a fake device is full on rank 0: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert (
        "parameters 4.0 MB, gradients 4.0 MB, optimizer 8.0 MB, average 4.0 MB" in text
        and "memory.fraction: 0.9" in text
    )
    record = json.loads((tmp_path / "oom-rank0.json").read_text())
    assert record["blocks"][0]["bytes"] == 500 and record["advice"]
    assert record["held"]["activations"] == 10 * GB - sum(
        record["held"][name] for name in ("parameters", "gradients", "optimizer", "average")
    )
    assert device.asked == [True, False]  # type: ignore[attr-defined]


def test_on_a_cpu_there_is_advice_and_no_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"held: parameters 4\.0 MB.*"), care(small_config(tmp_path), CPU, tmp_path):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert not list(tmp_path.glob("oom*"))


def test_a_record_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with (
        pytest.raises(UserError, match=r"(?s)is full on rank 0.*could not be written.*memory\.fraction"),
        care(small_config(tmp_path), FakeDevice(SEGMENTS), tmp_path / "a file"),
    ):
        raise torch.OutOfMemoryError("full")


def test_other_errors_go_through_as_they_are(tmp_path: Path) -> None:
    device = FakeDevice()
    with pytest.raises(ValueError, match="mine"), care(small_config(tmp_path), device, tmp_path):
        raise ValueError("mine")
    assert device.asked == [True, False]  # type: ignore[attr-defined]


def taken(step: int) -> StepOutcome:
    data = StepData(divisors={}, batches=Batches(0, None, lambda: None), items=[], counts={})
    return StepOutcome(step, 0, data, None)


def test_unused_memory_is_given_back_when_the_config_says(tmp_path: Path) -> None:
    device = FakeDevice()
    kept = care(small_config(tmp_path, "memory.empty_cache=3"), device, tmp_path)
    for step in range(1, 8):
        kept.after_step(taken(step))
    assert device.asked == ["empty"] * 2  # type: ignore[attr-defined]
    device = FakeDevice()
    kept = care(small_config(tmp_path), device, tmp_path)
    kept.after_step(taken(1))
    with pytest.raises(KeyError), kept.around_validation():
        assert device.asked == ["empty"]  # type: ignore[attr-defined]
        raise KeyError
    assert device.asked == ["empty"] * 2  # type: ignore[attr-defined]


def test_anywhere_else_the_command_line_names_keys_too() -> None:
    failure = describe(torch.OutOfMemoryError("x"))
    assert failure.known and "memory.fraction: 0.9" in failure.text and "vae.tiling" in failure.text
    assert not describe(RuntimeError("shapes differ")).known
