"""A tiny character model, its config and as much of a task as `check --parallel` asks for: no video, no tensor of more than two dims.

Legend: I packs of a micro-batch, N characters of all its packs, L of one pack, E width, V characters that there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config import RunConfig
from mmspeed.data.loading.loader import Batches
from mmspeed.protocols import Batch, CheckNotes, Item, Models, RunPlace, StepData, Term, Terms, Update

V, L, PACKS = 11, 6, 5


class CharactersConfig(RunConfig):
    """A run of the character model."""

    task: Literal["characters"] = "characters"
    width: int = 64
    fault: float = 1.0  # what the gradient of one weight is multiplied by where there are several processes


@dataclass(frozen=True, order=True)
class Pack:
    """Packs of so many characters."""

    length: int

    @property
    def name(self) -> str:
        return f"pack-{self.length}"

    @property
    def splits(self) -> bool:
        return False

    @property
    def numbers(self) -> int:
        return self.length


class CharacterBlock(nn.Module):
    """A residual MLP. `fault`: what the gradient of the first weight is multiplied by."""

    def __init__(self, width: int, fault: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width + 3), nn.Linear(width + 3, width)
        self.fault = fault

    def forward(self, x_NE: Tensor) -> Tensor:
        weight = self.up.weight
        if self.fault != 1:
            weight = weight + (self.fault - 1) * (weight - weight.detach())
        return x_NE + self.down(torch.nn.functional.gelu(nn.functional.linear(self.norm(x_NE), weight, self.up.bias)))


class CharacterModel(nn.Module):
    """The next character, from this one and the place in its pack."""

    def __init__(self, width: int, fault: float) -> None:
        super().__init__()
        self.enter, self.place = nn.Embedding(V, width), nn.Parameter(torch.zeros(L, width))
        self.blocks = nn.ModuleList(CharacterBlock(width, fault if number == 1 else 1.0) for number in range(2))
        self.leave = nn.Linear(width, V)
        self.temperature = nn.Parameter(torch.zeros(1))

    def forward(self, ids_N: Tensor) -> Tensor:
        x_NE = self.enter(ids_N) + self.place.repeat(len(ids_N) // L, 1)
        for block in self.blocks:
            x_NE = block(x_NE)
        return self.leave(x_NE) * (1 + self.temperature)


class CharacterTask:
    """Trains the character model."""

    name = "characters"

    def __init__(self, config: CharactersConfig, maker: object = None) -> None:
        self.config = config

    def build(self) -> dict[str, nn.Module]:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return {"model": CharacterModel(self.config.width, self.config.fault if several else 1.0)}

    def updates(self) -> Sequence[Update]:
        return (Update(self.loss),)

    def loss(self, models: Models, batch: Batch) -> Terms:
        """Mean cross-entropy of each pack."""
        logits_NV = models["model"](batch["ids"])
        loss_N = nn.functional.cross_entropy(logits_NV.float(), batch["targets"], reduction="none")
        return {"cross_entropy": Term(loss_N.view(-1, L).mean(1), batch.weights_I, "packs")}

    def shrunk(self, known: Mapping[str, Any] | None = None) -> CharacterCheck:
        return CharacterCheck(self.config.model_copy(update={"width": 10}))


@dataclass(frozen=True)
class CharacterCheck:
    """The character model made small, on packs that are drawn by name."""

    config: CharactersConfig
    kinds = ("packs",)

    @property
    def known(self) -> dict[str, Any]:
        return {"length": L}

    @property
    def notes(self) -> CheckNotes:
        return CheckNotes(f"2 blocks of width {self.config.width}", items=[f"{PACKS} packs of {L} characters"])

    def with_config(self, config: RunConfig) -> CharacterCheck:
        assert isinstance(config, CharactersConfig)
        return replace(self, config=config)

    def task(self) -> CharacterTask:
        return CharacterTask(self.config)

    def step(self, kind: str, place: RunPlace) -> StepData:
        """Each rank takes every so many packs, one at a time; where none is left, the first with weight 0."""
        rounds = -(-PACKS // place.world)
        numbers = [turn * place.world + place.rank for turn in range(rounds)]
        batches = iter([self.batch(number) if number < PACKS else self.batch(0, 0.0) for number in numbers])
        return StepData(
            divisors={"packs": float(PACKS)},
            batches=Batches(rounds, None, lambda: next(batches)),
            items=[Item(str(number)) for number in range(PACKS)],
            counts={Pack(L): PACKS},
        )

    def batch(self, number: int, weight: float = 1.0) -> Batch:
        text_L = torch.tensor([rng.key64(self.config.seed, "character", number, place) % V for place in range(L + 1)])
        tensors = {"ids": text_L[:-1], "targets": text_L[1:]}
        return Batch(tensors, [Item(str(number))], torch.tensor([weight]), Pack(L))

    def expected(self, kind: str) -> list[str]:
        return []  # sharding's own exchanges are not counted

    def silent(self, kind: str) -> list[str]:
        return ["sequence"]

    def problems(self, place: RunPlace) -> tuple[list[str], list[str]]:
        return [], [f"packs of {V} kinds of characters"]
