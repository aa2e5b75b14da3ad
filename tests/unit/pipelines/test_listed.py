"""Tasks whose samples are a list in memory: each sample once an epoch on any number of ranks, their figures, and refusals.

Legend: I items of a micro-batch, N numbers of a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from torch import Tensor, nn

from mmspeed.config import RunConfig
from mmspeed.config.training import Section
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.listed.domain import Length, ListedDomain, ListedSample
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import Batch, Inputs, NumberRule, RunPlace, ShapeClass, Term, Terms, Values, Work
from tests.support.preferences import Preferences


class NetSection(Section):
    """A nested section of the task's own."""

    depth: int = Field(1, description="Layers.")


class MeansConfig(RunConfig):
    """A run of the task of means."""

    task: Literal["means"] = Field("means", description="What is trained.")
    net: NetSection = Field(default_factory=NetSection, description="The model.")
    shift: float = Field(0.0, description="Added to all numbers.")


def sample(name: str, length: int, shift: float = 0.0) -> ListedSample:
    """Numbers (N,) of which the last is padding."""
    x_N = torch.arange(length, dtype=torch.float32) + len(name) + shift
    return ListedSample(name, {"x": x_N}, Length(length), length - 1)


@dataclass
class Distances(Values):
    """The distance of an output to twice the numbers, and the first numbers themselves, which do not train."""

    output_IN: Tensor
    batch: Batch

    @property
    def loss(self) -> Term:
        return Term((self.output_IN - 2 * self.batch["x"]).abs().sum(1), self.batch.weights_I, "tokens")

    def own(self, mtp: bool = True) -> Terms:
        return {"first": self.term(self.batch["x"][:, 0], trains=False)}

    def term(self, value_U: Tensor, trains: bool = True) -> Term:
        return Term(value_U, self.batch.weights_I, "units", trains)


class MeansTask(ListedDomain[MeansConfig]):
    """Learns the mean of some numbers; those of `counts` samples of each length."""

    name = "means"
    rules: ClassVar[Mapping[str, NumberRule]] = {"x": "compute"}
    counts: ClassVar[dict[int, int]] = {2: 5, 3: 4}
    held: ClassVar[dict[int, int]] = {2: 3, 3: 2}

    def build(self) -> dict[str, nn.Module]:
        return {"model": nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))}

    def samples(self) -> tuple[Sequence[ListedSample], Sequence[ListedSample]]:
        return [
            [
                sample(f"{what} {length}-{n}", length, n + self.config.shift)
                for length, of in counts.items()
                for n in range(of)
            ]
            for what, counts in (("train", self.counts), ("held out", self.held))
        ]  # type: ignore[return-value]

    def inputs(self, model: nn.Module, batch: Batch, *others: Any) -> Inputs:
        return Inputs(positional=(batch["x"][..., None],))

    def values(self, output: Tensor, inputs: Inputs, batch: Batch) -> Distances:
        return Distances(output[..., 0], batch)

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        return Work(products=2.0 * shape.numbers)


def make(lengths: dict[int, int] | None = None, **tree: Any) -> MeansTask:
    """The task with the given number of training samples of each length, under a config."""

    class Lengths(MeansTask):
        counts = MeansTask.counts if lengths is None else lengths

    return Lengths(MeansConfig(**tree))


def place(rank: int = 0, world: int = 1) -> RunPlace:
    """A rank among some that compute samples of their own."""
    return RunPlace(Device("cpu", 0), rank, world, groups=world, group=rank, dealt=world, number=rank)


def epoch(task: MeansTask, where: RunPlace, start: int = 0) -> list[int]:
    """The steps of the first epoch, from one on."""
    data = task.data(where)
    return list(takewhile(lambda step: data.locate(step).epoch == 0, count(start)))


@settings(deadline=None, max_examples=30)
@given(
    st.dictionaries(st.integers(1, 4), st.integers(1, 7), min_size=1, max_size=3),
    st.integers(1, 6),
    st.none() | st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["same", "window"]),
)
def test_an_epoch_has_each_sample_once_over_all_ranks(
    counts: dict[int, int], batch: int, micro: int | None, world: int, mix: str
) -> None:
    train = {"batch_size": batch, "micro_batch_size": micro, "prefetch": 0}
    task = make(counts, train=train, batching={"mix": mix})
    steps = epoch(task, place())
    met: Counter[str] = Counter()
    for step in steps:
        ranks = []
        for rank in range(world):
            data = task.data(place(rank, world))
            [(uses, batches)] = [(each, list(each.batches)) for each in data.steps(step, step + 1)]
            shapes = data.shapes(step)
            ranks.append(len(batches))
            assert [{n: tuple(t.shape) for n, t in one.tensors.items()} for one in batches] == [
                dict(shape.tensors) for shape in shapes
            ]
            for one in batches:
                assert one.size <= (micro or batch) and {item.shape for item in one.items} == {one.shape.name}
                for item, weight in zip(one.items, one.weights_I.tolist(), strict=True):
                    met[item.sample] += weight
            samples = [task.by_key[item.sample] for item in uses.items]
            tokens = sum(s.shape.numbers - 1 for s in samples)
            assert uses.divisors == {"samples": len(samples), "units": len(samples), "tokens": tokens}
            assert uses.tokens == uses.divisors["tokens"] and sum(uses.counts.values()) == len(samples)
        assert len({*ranks}) == 1  # or one would wait for another
    assert met == {one.key: 1.0 for one in task.training}


def test_a_run_goes_on_where_it_stopped_with_any_size_of_step() -> None:
    task = make(train={"batch_size": 2})
    data, later = task.data(place()), task.data(place())
    state = data.state(3)
    assert later.resume(state) is None
    names = [[item.name for item in step.items] for step in data.steps(3, 9)]
    assert names == [[item.name for item in step.items] for step in later.steps(3, 9)]
    behind = {item.sample for step in data.steps(0, 3) for item in step.items}
    other = make(train={"batch_size": 1})
    resumed = other.data(place())
    assert "the 3 of 9 uses that are left of epoch 0 are grouped differently" in (resumed.resume(state) or "")
    rest = [item.sample for step in resumed.steps(3, 6) for item in step.items]
    assert {*rest} | behind == {*task.by_key} and len(rest) == 3 and resumed.locate(6).epoch == 1


def test_samples_with_other_numbers_are_other_data() -> None:
    task, shifted = make(), make(shift=0.5)
    assert [one.name for one in task.training] == [one.name for one in shifted.training]
    assert task.data(place()).fingerprint != shifted.data(place()).fingerprint
    message = shifted.data(place()).resume(task.data(place()).state(1))
    assert message is not None and message.startswith("the training data changed since the checkpoint")


@pytest.mark.parametrize("world", [1, 3])
def test_a_validation_is_the_mean_over_the_held_out_samples(world: int) -> None:
    """Made by hand from the model's two numbers; without the dropout that training has."""
    task = make(train={"micro_batch_size": 2}, validate={"samples": 4})
    model = task.build()["model"]
    linear = model[0]  # type: ignore[index]
    a, b = linear.weight.item(), linear.bias.item()
    totals: Counter[str] = Counter()
    calls = set()
    for rank in range(world):
        validation = task.validation({"model": model}, task.data(place()), place(rank, world))
        assert validation is not None
        terms = validation.measure({"model": model})
        totals.update({name: term.total().item() for name, term in terms.items()})
        calls.add(len(terms["first"].loss_I))
        assert model.training and not terms["loss"].loss_I.requires_grad
    numbers = [one.tensors["x"].double() for one in task.held_out]
    tokens, samples = sum(len(x) - 1 for x in numbers), len(numbers)
    assert validation.divisors() == {"samples": samples, "units": samples, "tokens": tokens}
    assert samples == 4 and len(calls) == 1
    distance = sum((a * x + b - 2 * x).abs().sum().item() for x in numbers) / tokens
    first = sum(x[0].item() for x in numbers) / samples
    row = validation.row({"loss": totals["loss"] / tokens, "first": totals["first"] / samples})
    assert row["loss"] == pytest.approx(distance, rel=1e-6)  # sums of float32 in another order
    assert row["terms"] == pytest.approx({"loss": distance, "first": first}, rel=1e-6)
    assert row["samples"] == 4


def test_a_list_without_samples_and_one_with_a_name_twice_are_refused() -> None:
    with pytest.raises(UserError, match="the task means has no samples to train on"):
        make({}).data(place())

    class Twice(MeansTask):
        def samples(self) -> tuple[Sequence[ListedSample], Sequence[ListedSample]]:
            return [sample("a", 2), sample("b", 2), sample("a", 2, 1.0)], []

    with pytest.raises(UserError, match="two samples of the task means have the name 'a'"):
        Twice(MeansConfig()).data(place())


def test_what_a_method_cannot_be_given_is_refused() -> None:
    """Values that the domain lacks, whole models of a pipeline's stages, a plan of memory for one model."""
    domain = make()
    with pytest.raises(
        UserError, match="preferences needs the errors of a model, and means gives no more than its loss"
    ):
        Task(domain, Preferences())
    domain.gives = ("errors",)
    task = Task(domain, Preferences())
    with pytest.raises(UserError, match=r"parallel\.pp: preferences asks whole models .*: leave pp at 1"):
        task.learners(task.updates(), {}, "none", {}, torch.device("cpu"), staged=True)
    with pytest.raises(UserError, match="memory is planned for one model, and preferences has reference model too"):
        task.sketch(nn.Linear(1, 1), Length(2), 1)
