"""A character language model as a task: what a domain that is no diffusion costs.

Legend: I packs of a micro-batch, N characters that are predicted in a pack, V vocabulary, E width, A heads.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from mmspeed import rng
from mmspeed.config import RunConfig
from mmspeed.config.training import BatchingConfig
from mmspeed.data.loading.loader import Batches
from mmspeed.models.sora.layers import initial_value, set_parameter
from mmspeed.pipelines.tasks.base import TaskDefaults
from mmspeed.protocols import (
    Batch,
    BatchShape,
    CheckNotes,
    CheckTask,
    Data,
    Divisors,
    Item,
    MicroBatchSize,
    Models,
    PutWeight,
    RunPlace,
    ShapeClass,
    StepData,
    StepUsage,
    Term,
    Terms,
    Update,
    Work,
)

# Lewis Carroll, "Alice's Adventures in Wonderland" (1865), public domain
TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, and what "
    "is the use of a book, thought Alice, without pictures or conversations? So she was considering in her own mind, as "
    "well as she could, for the hot day made her feel very sleepy and stupid, whether the pleasure of making a daisy-chain "
    "would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran "
    "close by her."
)
VOCABULARY = ["", *sorted(set(TEXT))]  # number 0 is padding


class CharacterConfig(RunConfig):
    """A run of the character task."""

    fixed_on_resume: ClassVar[tuple[str, ...]] = ("seed", "task", "pack", "width", "depth")
    task: Literal["characters"] = Field("characters", description="What is trained: characters of a text.")
    pack: int = Field(24, ge=2, description="Characters that a pack predicts, at most.")
    width: int = Field(16, ge=2, description="Width of the model; two heads.")
    depth: int = Field(3, ge=1, description="Blocks of the model.")

    @model_validator(mode="after")
    def _plain_batches(self) -> CharacterConfig:
        if self.batching != BatchingConfig():
            raise ValueError("batching: packs are of one size; use train.batch_size and train.micro_batch_size")
        return self


class CharacterBlock(nn.Module):
    """Causal attention of two heads, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_INE: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x_INE)).chunk(3, -1))
        later_NN = torch.ones(x_INE.shape[1], x_INE.shape[1], dtype=torch.bool, device=x_INE.device).triu(1)
        scores_IANN = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later_NN, -math.inf)
        x_INE = x_INE + self.out((scores_IANN.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x_INE + self.down(gelu(self.up(self.norm_mlp(x_INE))))


class CharacterModel(nn.Module):
    """Logits of each next character; positions are known by the causal mask alone."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), width)
        self.blocks = nn.ModuleList(CharacterBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, ids_IN: Tensor) -> Tensor:
        x_INE = self.embed(ids_IN)
        for block in self.blocks:
            x_INE = block(x_INE)
        logits_INV: Tensor = self.head(x_INE)
        return logits_INV

    def init_weights(self, seed: int, put: PutWeight = set_parameter) -> None:
        """Fill every parameter, by its name."""
        for name, parameter in self.named_parameters():
            put(parameter, initial_value(name, parameter.shape, seed, zero=False))


@dataclass(frozen=True, order=True)
class PackLength:
    """Packs of so many predicted characters."""

    numbers: int
    splits: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.numbers:05d}"


@dataclass(frozen=True)
class Pack:
    """Characters of the text, and the name of this use of them."""

    text: str
    item: Item

    @property
    def tokens(self) -> int:
        """Characters that are predicted: all but the first."""
        return len(self.text) - 1


@dataclass(frozen=True)
class Place:
    """A step of an epoch."""

    epoch: int
    at: int


def share(packs: Sequence[Pack], rank: int, world: int, most: int | None) -> list[list[tuple[Pack, float]]]:
    """A rank's micro-batches of (pack, weight), as many as every other's; fillers have the weight 0."""
    count = -(-len(packs) // world)
    own = range(rank * count, (rank + 1) * count)
    weighed = [(packs[i], 1.0) if i < len(packs) else (packs[0], 0.0) for i in own]
    return [weighed[i : i + (most or count)] for i in range(0, count, most or count)]


def collate(weighed: Sequence[tuple[Pack, float]], shape: ShapeClass) -> Batch:
    """The packs (I, N + 1) of one micro-batch, padded."""
    ids_IN = torch.zeros(len(weighed), shape.numbers + 1, dtype=torch.long)
    for row, (pack, _) in enumerate(weighed):
        ids_IN[row, : len(pack.text)] = torch.tensor([VOCABULARY.index(sign) for sign in pack.text])
    weights_I = torch.tensor([weight for _, weight in weighed])
    return Batch({"ids": ids_IN}, [pack.item for pack, _ in weighed], weights_I, shape)


class CharacterData:
    """Each epoch's packs in an order drawn by its number, `batch_size` a step; the last step of an epoch may have fewer."""

    def __init__(self, config: CharacterConfig, packs: Sequence[Pack], place: RunPlace) -> None:
        self.config, self.packs, self.place = config, packs, place
        self.waited_seconds = 0.0
        self.each = config.train.samples_per_step

    @property
    def fingerprint(self) -> str:
        text = "\x1f".join([str(self.config.seed), str(self.each), *(pack.text for pack in self.packs)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def locate(self, step: int) -> Place:
        return Place(*divmod(step, -(-len(self.packs) // self.each)))

    def step_packs(self, step: int) -> list[Pack]:
        """The packs of a step over all ranks."""
        where = self.locate(step)
        order = torch.randperm(len(self.packs), generator=rng.generator(self.config.seed, "order", where.epoch))
        chosen = [self.packs[i] for i in order[where.at * self.each : (where.at + 1) * self.each].tolist()]
        return [Pack(p.text, Item(p.item.sample, where.epoch, 0, p.item.source, p.item.shape)) for p in chosen]

    def _parts(self, packs: Sequence[Pack]) -> list[list[tuple[Pack, float]]]:
        return share(packs, self.place.rank, self.place.world, self.config.train.micro_batch_size)

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        shape = PackLength(self.config.pack)
        for step in range(start, stop):
            packs = self.step_packs(step)
            tokens, parts = sum(pack.tokens for pack in packs), self._parts(packs)
            made = (collate(part, shape) for part in parts)
            batches = Batches(len(parts), None, partial(next, made))
            yield StepData(
                {"tokens": float(tokens)}, batches, [pack.item for pack in packs], {shape: len(packs)}, tokens
            )

    def shapes(self, step: int) -> list[BatchShape]:
        shape = PackLength(self.config.pack)
        sizes = [len(part) for part in self._parts(self.step_packs(step))]
        return [BatchShape(shape, size, {"ids": (size, shape.numbers + 1)}) for size in sizes]

    def state(self, step: int) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def resume(self, state: Mapping[str, Any]) -> str | None:
        return None if state["fingerprint"] == self.fingerprint else "the packs or the size of a step are others now"

    def summary(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        """Nothing was started."""


class CharacterValidation:
    """The mean loss of a character of the held-out packs."""

    def __init__(self, task: CharacterTask, place: RunPlace) -> None:
        self.task, self.place, self.packs = task, place, task.held_out

    @torch.no_grad()
    def measure(self, models: Models) -> Terms:
        [part] = share(self.packs, self.place.rank, self.place.world, None)
        batch = collate(part, PackLength(self.task.config.pack)).to(self.place.device.torch_device, torch.float32)
        return {"loss": self.task.loss(models, batch)["loss"]}

    def divisors(self) -> Divisors:
        return {"tokens": float(sum(pack.tokens for pack in self.packs))}

    def row(self, values: Mapping[str, float]) -> dict[str, Any]:
        return {"loss": values["loss"], "perplexity": math.exp(values["loss"]), "samples": len(self.packs)}

    def sample(self, models: Models, step: int) -> None:
        """Nothing is sampled."""


class CharacterTask(TaskDefaults):
    """Trains a model to predict each next character of a text, from packs of whole words."""

    name = "characters"

    def __init__(self, config: CharacterConfig, maker: None = None) -> None:
        self.config, self.shape = config, PackLength(config.pack)
        lines = enumerate(line for line in textwrap.wrap(TEXT, config.pack + 1) if len(line) > 1)
        packs = [Pack(line, Item(f"{n:04d}", source=f"line {n}", shape=self.shape.name)) for n, line in lines]
        self.training = [pack for n, pack in enumerate(packs) if n % 5]
        self.held_out = packs[::5][: config.validate_.samples]

    def build(self) -> dict[str, nn.Module]:
        with torch.device("meta"):
            return {"model": CharacterModel(self.config.width, self.config.depth)}

    def updates(self) -> Sequence[Update]:
        return (Update(self.loss),)

    def loss(self, models: Models, batch: Batch) -> Terms:
        """The cross-entropy of each pack's characters, and how many are guessed right, which does not train."""
        ids_IN, targets_IN = batch["ids"][:, :-1], batch["ids"][:, 1:]
        logits_INV: Tensor = models["model"](ids_IN).float()
        loss_IN = cross_entropy(logits_INV.transpose(1, 2), targets_IN, ignore_index=0, reduction="none")
        right_IN = (logits_INV.detach().argmax(-1) == targets_IN) & (targets_IN != 0)
        right = Term(right_IN.sum(1).float(), batch.weights_I, "tokens", trains=False)
        return {"loss": Term(loss_IN.sum(1), batch.weights_I, "tokens"), "right": right}

    def notes(self) -> tuple[list[str], list[str]]:
        return [f"{len(self.training)} packs of {self.shape.numbers} characters"], []

    def data(self, place: RunPlace) -> CharacterData:
        return CharacterData(self.config, self.training, place)

    def shapes(self) -> Sequence[ShapeClass]:
        return [self.shape]

    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        signs = torch.randint(
            1, len(VOCABULARY), (items, shape.numbers + 1), generator=rng.generator(self.config.seed, "made up")
        )
        made = [(Pack("".join(VOCABULARY[i] for i in row), Item("made up")), 1.0) for row in signs.tolist()]
        return collate(made, shape).to(place.device.torch_device, torch.float32)

    def sketch(
        self, model: nn.Module, shape: ShapeClass, items: int
    ) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
        def loss(ids_IN: Tensor) -> Tensor:
            return cross_entropy(model(ids_IN[:, :-1]).float().transpose(1, 2), ids_IN[:, 1:])

        return lambda: torch.empty(items, shape.numbers + 1, dtype=torch.long), loss

    def synthetic_divisors(self, batch: Batch, batches: int) -> Divisors:
        return {"tokens": float(batch.size * batch.shape.numbers * batches)}

    def largest_micro_batch(self, place: RunPlace) -> MicroBatchSize:
        count = -(-self.config.train.samples_per_step // place.world)
        most = min(count, self.config.train.micro_batch_size or count)
        return MicroBatchSize(self.shape, most, count > most)

    def tokens(self, shape: ShapeClass) -> int:
        return shape.numbers

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        width, depth, length = self.config.width, self.config.depth, shape.numbers
        weights = depth * 12 * width**2 + width * len(VOCABULARY)
        return Work(products=2.0 * length * weights, attention=4.0 * depth * length**2 * width)

    def cost(self, shape: ShapeClass) -> float:
        return 3 * self.work(shape).matmul

    def usage(self, step: StepData) -> StepUsage:
        count = step.counts[self.shape]
        return StepUsage(count, step.tokens or 0, self.work(self.shape) * count)

    def describe(self, step: StepData) -> dict[str, Any]:
        return {"samples": step.counts[self.shape], "tokens": step.tokens}

    def validation(self, models: Models, data: Data, place: RunPlace) -> CharacterValidation | None:
        return CharacterValidation(self, place) if self.held_out else None

    def info(self) -> dict[str, Any]:
        return {"vocabulary": "".join(VOCABULARY)}

    def setting(self) -> dict[str, Any]:
        return {"width": self.config.width, "depth": self.config.depth}

    def shrunk(self, known: Mapping[str, Any] | None = None) -> CheckTask:
        return CharacterCheck(self.config)


class CharacterCheck:
    """The task as it is, since it is small, for comparing layouts."""

    kinds = ("packs",)
    known: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: CharacterConfig) -> None:
        self.config = config

    @property
    def notes(self) -> CheckNotes:
        return CheckNotes(f"{self.config.depth} blocks of width {self.config.width}", items=["one step of its packs"])

    def with_config(self, config: RunConfig) -> CharacterCheck:
        assert isinstance(config, CharacterConfig)
        return CharacterCheck(config)

    def task(self) -> CharacterTask:
        return CharacterTask(self.config)

    def step(self, kind: str, place: RunPlace) -> StepData:
        return next(self.task().data(place).steps(0, 1))

    def expected(self, kind: str) -> list[str]:
        return []  # the exchanges of sharding are torch's, and not counted

    def silent(self, kind: str) -> list[str]:
        return []

    def problems(self, place: RunPlace) -> tuple[list[str], list[str]]:
        return [], []
