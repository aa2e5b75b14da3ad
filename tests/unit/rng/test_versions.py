"""Versions of the generator: what a seed says of it, what records say, and what the first one draws."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch

from mmspeed import rng
from mmspeed.errors import UserError
from mmspeed.rng import NEWEST, VERSIONS, Seed, recorded_version


def test_a_seed_is_its_number_and_keeps_its_generator() -> None:
    assert VERSIONS == (1, 2) and NEWEST == 2 and Seed(5).generator == 2
    seed = Seed(5, generator=1)
    for same in (seed, copy.deepcopy(seed), pickle.loads(pickle.dumps(seed))):  # noqa: S301 - as loader processes get it
        assert (same, same.generator, repr(same)) == (5, 1, "Seed(5, generator=1)")
    assert json.dumps(seed) == "5"
    with pytest.raises(ValueError, match=r"generator 3 is none of \(1, 2\)"):
        Seed(5, generator=3)


def test_the_first_generator_is_torch_s_on_the_cpu() -> None:
    seed, drawn = Seed(4, generator=1), torch.Generator().manual_seed(rng.key64(4, "noise", "a", 1))
    assert torch.equal(rng.normal((3, 4), seed, "noise", "a", 1), torch.randn((3, 4), generator=drawn))
    assert torch.equal(rng.normal_part(40, 8, 40, seed, "noise"), rng.normal((40,), seed, "noise")[8:])
    drawn.manual_seed(rng.key64(4, "timestep"))
    assert rng.uniform(seed, "timestep") == torch.rand((), generator=drawn, dtype=torch.float64).item()
    drawn.manual_seed(rng.key64(4, "init", "w"))
    assert torch.equal(rng.symmetric((9,), 0.2, seed, "init", "w"), torch.empty(9).uniform_(-0.2, 0.2, generator=drawn))
    drawn.manual_seed(rng.key64(4, "order"))
    stream = rng.stream(seed, "order")
    assert [stream.permutation(9).tolist() for _ in "ab"] == [torch.randperm(9, generator=drawn).tolist() for _ in "ab"]


def test_a_plain_number_draws_with_the_newest() -> None:
    assert torch.equal(rng.normal((9,), 4, "noise"), rng.normal((9,), Seed(4, NEWEST), "noise"))
    assert not torch.equal(rng.normal((9,), 4, "noise"), rng.normal((9,), Seed(4, 1), "noise"))


def test_records_from_before_say_nothing() -> None:
    assert recorded_version({}, "cache.json") == 1
    assert recorded_version({"versions": {"chroma": 2}}, "cache.json") == 1
    assert recorded_version({"versions": {"generator": 2}}, "cache.json") == 2


@pytest.mark.parametrize("version", [0, 3, "2", None, True, [1]])
def test_a_version_that_is_not_there_is_named(version: Any) -> None:
    with pytest.raises(UserError, match=r"^runs/a/run\.json draws with generator .*has 1 to 2: use a newer mmspeed$"):
        recorded_version({"versions": {"generator": version}}, "runs/a/run.json")
    with pytest.raises(UserError, match="draws with generator 'x'"):
        recorded_version({"versions": "x"}, "run.json")
