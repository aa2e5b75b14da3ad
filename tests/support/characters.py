"""A character language model as a task: what a domain that is no diffusion costs.

Legend: I packs of a micro-batch, N characters that are predicted in a pack, V vocabulary, E width, A heads.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from mmspeed.config import RunConfig
from mmspeed.initialize import initial_value
from mmspeed.pipelines.domains.listed.domain import Length, ListedDomain, ListedSample
from mmspeed.protocols import Batch, Given, Inputs, LearningPart, ShapeClass, Term, Terms, Values, Work

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

    def initial_weights(self, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with its value, which its name tells."""
        for name, parameter in self.named_parameters():
            yield parameter, initial_value(name, parameter.shape, seed, zero=False)


def pack(number: int, line: str, length: int) -> ListedSample:
    """A line's ids (N + 1,), padded with 0; every character but the first is predicted."""
    ids_N = torch.zeros(length + 1, dtype=torch.long)
    ids_N[: len(line)] = torch.tensor([VOCABULARY.index(sign) for sign in line])
    return ListedSample(f"line {number}", {"ids": ids_N}, Length(length), len(line) - 1)


@dataclass(frozen=True)
class CharacterValues(Values):
    """The values of logits; a unit is a pack."""

    logits_INV: Tensor
    targets_IN: Tensor
    weights_I: Tensor

    def _losses(self) -> Tensor:
        logits_IVN = self.logits_INV.transpose(1, 2)
        return cross_entropy(logits_IVN, self.targets_IN, ignore_index=0, reduction="none").sum(1)

    @property
    def loss(self) -> Term:
        return Term(self._losses(), self.weights_I, "tokens")

    def own(self, mtp: bool = True) -> Terms:
        """The number of characters that are guessed right, which does not train."""
        right_IN = (self.logits_INV.detach().argmax(-1) == self.targets_IN) & (self.targets_IN != 0)
        return {"right": Term(right_IN.sum(1).float(), self.weights_I, "tokens", trains=False)}

    def errors(self) -> tuple[Tensor, Tensor]:
        return self._losses(), torch.arange(len(self.weights_I))

    def term(self, value_U: Tensor, trains: bool = True) -> Term:
        return Term(value_U, self.weights_I, "units", trains)

    def prediction(self) -> Tensor:
        return self.logits_INV


class CharacterDomain(ListedDomain[CharacterConfig]):
    """Trains a model to predict each next character of a text, from packs of whole words."""

    name = "characters"
    gives = ("errors", "prediction")

    def build(self) -> dict[str, nn.Module]:
        with torch.device("meta"):
            return {"model": CharacterModel(self.config.width, self.config.depth)}

    def samples(self) -> tuple[list[ListedSample], list[ListedSample]]:
        lines = [line for line in textwrap.wrap(TEXT, self.config.pack + 1) if len(line) > 1]
        packs = [pack(number, line, self.config.pack) for number, line in enumerate(lines)]
        return [one for number, one in enumerate(packs) if number % 5], packs[::5]

    def inputs(
        self, model: nn.Module, batch: Batch, part: LearningPart, entry: str | None = None, given: Given | None = None
    ) -> Inputs:
        batch = batch if entry is None else batch.entry(entry)
        return Inputs({"ids_IN": batch["ids"][:, :-1]}, {"targets": batch["ids"][:, 1:]})

    def values(self, output: Tensor, inputs: Inputs, batch: Batch) -> CharacterValues:
        return CharacterValues(output.float(), inputs.tensors["targets"], batch.weights_I)

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        width, depth, length = self.config.width, self.config.depth, shape.numbers
        weights = depth * 12 * width**2 + width * len(VOCABULARY)
        return Work(products=2.0 * length * weights, attention=4.0 * depth * length**2 * width)

    def info(self) -> dict[str, Any]:
        return {"vocabulary": "".join(VOCABULARY)}
