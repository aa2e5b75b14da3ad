"""Weights of a repository on several processes: each reads its own parts alone, and together they are those of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from mmspeed.config import Config, make_config
from mmspeed.device import pick
from mmspeed.log import get_logger
from mmspeed.mesh import process_group
from mmspeed.models.sections import with_weights
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.run.assembly import Assembly, assemble, place
from mmspeed.pipelines.tasks import as_task
from mmspeed.protocols import Part, declare_source, source_of
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import save_wan

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
LAYOUTS = {
    "fsdp, 2": (2, ("parallel.strategy=fsdp",)),
    "fsdp, 2, halves of masters": (2, ("parallel.strategy=fsdp", "memory.master=split", "device.dtype=bfloat16")),
    "fsdp, 4, replicas": (4, ("parallel.strategy=fsdp", "parallel.dp_replicate=2")),
    "fsdp, 4, tensor parallel": (4, ("parallel.strategy=fsdp", "parallel.tp=2")),
    "ddp, 2": (2, ("parallel.strategy=ddp",)),
}


def config_of(folder: Path, *overrides: str) -> Config:
    """A config of the repository; it needs no data."""
    tree: dict[str, Any] = {
        "name": "own",
        "output": str(folder.parent / "runs"),
        "data": {"sources": [{"path": str(folder)}], "buckets": [{"frames": 9, "height": 32, "width": 48}]},
        "model": {"kind": "diffusers", "pretrained": str(folder)},
        "train": {"steps": 1, "ema_decay": None},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }
    return make_config(tree, overrides, origin="test")


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Counted:
    """A source that counts the bytes that it hands over, and the most memory meanwhile."""

    def __init__(self, source: Any) -> None:
        self.source, self.bytes, self.peak = source, 0, 0
        self.fingerprint: str = source.fingerprint

    def read(self, parts: dict[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in self.source.read(parts):
            self.bytes += part.nbytes
            self.peak = max(self.peak, anonymous())
            yield name, part
            self.peak = max(self.peak, anonymous())


def loaded(folder: Path, overrides: tuple[str, ...]) -> tuple[Assembly, Counted, int]:
    """(models of a run, their files, growth of this process's memory while they were filled)."""
    config, device = config_of(folder, *overrides), pick("cpu")
    task, placement = VideoDomain(config), place(config, device)
    get_logger("train")
    before = anonymous()
    model = with_weights(task.config.model, 16, 16, "meta")
    source = source_of(model)
    assert source is not None
    counted = Counted(source)
    declare_source(model, counted)
    parts = assemble(task.config, as_task(task, task.config), {"model": model}, placement, device)
    return parts, counted, counted.peak - before


def own_bytes(model: nn.Module) -> int:
    """Bytes of this process's parts of all parameters, in float32."""
    return sum(4 * (p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def weights(folder: str, overrides: tuple[str, ...]) -> tuple[dict[str, np.ndarray], int, int]:
    """(whole float32 weights, bytes of this rank's parts, bytes that it read)."""
    with process_group(pick("cpu")):
        parts, counted, _ = loaded(Path(folder), overrides)
        saved = parts.state()
        from mmspeed.loop.checkpoint.state import weights_to_save

        tensors = weights_to_save(saved.model, saved.optimizer)
        whole = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy()
            for name, tensor in tensors.items()
        }
        return whole, own_bytes(parts.model), counted.bytes


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wan(tmp_path_factory.mktemp("repositories") / "wan")


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, {"fsdp, 2, halves of masters"}))
def test_ranks_hold_the_weights_of_the_files_and_read_their_parts_alone(wan: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    truth = load_file(wan / WEIGHTS)
    total = sum(tensor.nbytes for tensor in truth.values())
    ranks = run_ranks(weights, world, str(wan), overrides)
    for whole, own, read in ranks:
        assert whole.keys() == truth.keys()
        assert all(np.array_equal(whole[name], tensor.numpy()) for name, tensor in truth.items())
        assert read == own
    copies = sum(read for _, _, read in ranks) / total
    if "tensor" not in layout:  # there, layers that are not split lie on both processes of a pair
        assert copies == pytest.approx({"ddp, 2": 2, "fsdp, 4, replicas": 2}.get(layout, 1))


def growth(folder: str) -> tuple[int, int, int]:
    """(bytes of this rank's parts, bytes that it read, growth of its memory)."""
    with process_group(pick("cpu")):
        parts, counted, grown = loaded(Path(folder), ("parallel.strategy=fsdp",))
        return own_bytes(parts.model), counted.bytes, grown


@pytest.mark.slow
def test_a_rank_takes_its_shard_and_little_more(tmp_path: Path) -> None:
    """A repository of 2 GB on 4 ranks: memory rises by at most a shard, the largest tensor and 64 MB."""
    folder = save_wan(
        tmp_path / "large", num_attention_heads=8, attention_head_dim=128, ffn_dim=4096, num_layers=29, text_dim=16
    )
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text()) if not (folder / WEIGHTS).exists() else None
    size = index["metadata"]["total_size"] if index else (folder / WEIGHTS).stat().st_size
    assert size > 1.9e9
    for own, read, grown in run_ranks(growth, 4, str(folder)):
        assert read <= 1.05 * own
        assert grown <= own + 4 * 4096 * 1024 + (64 << 20), (own, grown)
