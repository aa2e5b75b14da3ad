"""Offloading in the blocks of a real model: equal to plain, with the bytes that were to be moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed.config.memory import ActivationPolicy
from mmspeed.device import Device
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.recompute.region import matmul_operators
from mmspeed.memory.recompute.regions import set_policies
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.parallel import parallelize

CPU = Device("cpu", 0)
FROM = 1 << 13  # bytes


BRANCHES = ("attention", "cross_attention", "mlp")
WAYS: list[dict[str, ActivationPolicy]] = [
    {"block": "offload"},
    {"block": "offload_selective"},
    dict.fromkeys(BRANCHES, "offload"),
    dict.fromkeys(BRANCHES, "offload_selective"),
    {"attention": "offload", "cross_attention": "offload_selective", "mlp": "recompute"},
]


class Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count, self._operators = 0, matmul_operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self._operators
        return func(*args, **(kwargs or {}))


class Noting:
    """A group that keeps all, and notes the memory of what it was asked to store: each storage once."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        root = tensor if tensor._base is None else tensor._base
        is_cast = root.grad_fn is not None and root.grad_fn.name() == "ToCopyBackward0"
        cast = is_cast and isinstance(getattr(root.grad_fn.next_functions[0][0], "variable", None), nn.Parameter)  # type: ignore[union-attr]
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )  # in numbers
        if not isinstance(root, nn.Parameter) and not cast and reach * tensor.element_size() >= FROM:
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        kept = tensor.detach()
        return lambda: kept

    def close(self) -> None: ...

    def fetch(self) -> None: ...

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.store, lambda give: give())


@dataclass
class Step:
    gradients: dict[str, Tensor]
    activations: int  # bytes after forward, by torch's own count
    peak: int
    matmuls: int


@dataclass
class Stage:
    arrangement: str
    dtype: torch.dtype
    ways: dict[str, ActivationPolicy] = field(default_factory=dict)
    groups: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        config = SoraDiTConfig(
            width=96, depth=3, heads=6, latent_channels=8, text_width=32, adaln_rank=8, arrangement=self.arrangement  # type: ignore[arg-type]
        )  # fmt: skip
        self.model = SoraDiT(config)
        for parameter in self.model.parameters():
            if parameter.ndim >= 2 and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        for block in self.model.blocks:
            set_policies(block, self.ways, self.groups)
        parallelize(self.model, None, "none", compute_dtype=self.dtype)
        random = torch.Generator().manual_seed(1)
        self.batch = (
            torch.randn(1, 8, 3, 16, 16, generator=random), torch.rand(1, generator=random), torch.randn(1, 12, 32, generator=random),
            torch.ones(1, 12, dtype=torch.bool),
        )  # fmt: skip

    def loss(self) -> Tensor:
        return self.model(*self.batch).square().mean()

    def gradients(self) -> dict[str, Tensor]:
        results = {
            name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None
        }
        self.model.zero_grad()
        return results

    def step(self) -> Step:
        tracker, matmuls = MemTracker(), Matmuls()
        tracker.track_external(self.model)
        with matmuls, tracker:
            loss = self.loss()
            now = {str(getattr(key, "name", key)): size for key, size in self._of(tracker, "current").items()}
            loss.backward()
            peak = self._of(tracker, "peak")
        return Step(self.gradients(), now["ACT"], sum(peak.values()), matmuls.count)

    @staticmethod
    def _of(tracker: MemTracker, moment: str) -> dict[Any, int]:
        return tracker.get_tracker_snapshot(moment)[torch.device("cpu")]  # type: ignore[arg-type]


@cache
def plain(arrangement: str, dtype: torch.dtype) -> Step:
    return Stage(arrangement, dtype).step()


def noted(arrangement: str, dtype: torch.dtype, ways: dict[str, ActivationPolicy]) -> int:
    """Bytes of all storages that spans of these ways store, over all groups, each storage once."""
    alive: list[Noting] = []

    def group() -> Noting:
        alive.append(Noting())
        return alive[-1]

    stage = Stage(arrangement, dtype, ways, group)
    loss = stage.loss()
    total = sum({key: size for noting in alive for key, (_, size) in noting.seen.items()}.values())
    assert loss.isfinite()
    return total


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and len(one) > 20 and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("arrangement", "dtype", "ways"),
    [
        ("factorised", torch.float32, WAYS[0]),
        pytest.param("full", torch.bfloat16, WAYS[0], marks=pytest.mark.slow),
        pytest.param("factorised", torch.bfloat16, WAYS[1], marks=pytest.mark.slow),
        pytest.param("full", torch.float32, WAYS[2], marks=pytest.mark.slow),
        pytest.param("factorised", torch.float32, WAYS[3], marks=pytest.mark.slow),
        pytest.param("full", torch.bfloat16, WAYS[4], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_bitwise_those_of_plain(
    arrangement: str, dtype: torch.dtype, ways: dict[str, ActivationPolicy]
) -> None:
    base, offloader = plain(arrangement, dtype), Offloader(CPU, FROM)
    stage = Stage(arrangement, dtype, ways, offloader.group)
    step = stage.step()
    assert same(step.gradients, base.gradients)
    assert offloader.moved_out == noted(arrangement, dtype, ways) == offloader.pool.peak
    assert (
        offloader.moved_out >= offloader.moved_back > 0.8 * offloader.moved_out
    )  # what is on the device still does not come
    assert offloader.pool.used == 0
    assert step.peak < base.peak
    if "recompute" not in ways.values():
        assert step.activations <= 0.3 * base.activations
        assert step.matmuls == base.matmuls
    if dtype == torch.bfloat16 and ways == {"block": "offload"}:
        weights = sum(
            p.numel() for b in stage.model.blocks for p in b.parameters() if p.ndim >= 2 and p.numel() * 2 >= FROM
        )
        assert 0.8 * weights * 2 <= offloader.recast <= weights * 2


def test_several_graphs_at_a_time_in_any_order() -> None:
    offloader = Offloader(CPU, FROM)
    stages = [Stage("factorised", torch.float32), Stage("factorised", torch.float32, WAYS[1], offloader.group)]
    results = []
    for stage in stages:
        losses = [stage.loss() * factor for factor in (1, 2, 3)]
        for number in (1, 0, 2):
            losses[number].backward()
        results.append(stage.gradients())
    assert same(*results)
    assert offloader.pool.used == 0


def test_blocks_share_the_caption_and_a_span_its_projection() -> None:
    offloader = Offloader(CPU, from_bytes=1 << 11)
    stage = Stage("full", torch.float32, {"block": "offload_selective"}, offloader.group)
    stage.loss().backward()
    text = 12 * 96 * 4  # bytes of the caption that each of three blocks is given
    assert offloader.shared >= 2 * text
