"""Layers of experts in `mmspeed qualify`: tiny on a CPU, with fewer experts where memory ends, short below their goals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mmspeed.bench.qualify import experts, run
from mmspeed.bench.qualify.experts import Layer, check_grouped, check_permutation, expert_checks, that_fits
from mmspeed.bench.qualify.rows import Outcome
from mmspeed.device import Device, pick
from mmspeed.models.language.shapes import SHAPES


def test_layers_of_both_models_run_in_small() -> None:
    checks = list(expert_checks(pick("cpu"), True))
    assert expert_checks in run.PARTS["rates"]
    for check, model in zip(checks, ("qwen3", "qwen3", "deepseek", "deepseek"), strict=True):
        outcome = check.run()
        assert model in check.name and outcome.state == "passed" and 0 < outcome.figures["share"], outcome
        assert "64 tokens x " in outcome.text and outcome.text.endswith(("by grouped_mm", "by gather")), outcome.text


def test_the_sizes_on_a_device_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "number_types", lambda device: (torch.bfloat16,))
    monkeypatch.setattr(experts, "that_fits", lambda measure, layer: layer)
    layers: list[Any] = [check.run() for check in expert_checks(Device("cuda", 0), False)]
    own = [(one.tokens, one.width, one.settings.num_experts, one.settings.moe_intermediate_size) for one in layers[::2]]
    assert own == [(16_384, 2_048, 128, 768), (16_384, 7_168, 256, 2_048)]
    assert [one.settings.top_k for one in layers] == [8] * 4


@dataclass(frozen=True)
class Accelerator(Device):
    """A device that computes as a CPU does, and has goals."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def layer_on(device: Device) -> Layer:
    settings = next(check for check in expert_checks(pick("cpu"), True)).run.args[1].settings  # type: ignore[attr-defined]
    return Layer(device, torch.float32, 16, settings, 8)


def test_what_falls_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_on(Accelerator("cuda", 0))
    monkeypatch.setattr(experts, "seconds_of", lambda device, work: next(seconds))
    for measure, taken, state, words in (
        (check_grouped, (2.0, 1.0, 2.0, 1.0), "short", "50% of a dense product's"),
        (check_grouped, (1.0, 0.7, 1.0, 0.7), "passed", "70% of a dense product's"),
        (check_permutation, (0.06, 1.0), "short", "6.0% of 1 s"),
        (check_permutation, (0.04, 1.0), "passed", "4.0% of 1 s"),
    ):
        seconds = iter(taken)
        outcome = measure(layer)
        assert outcome.state == state and words in outcome.text, outcome
        assert outcome.text.endswith("is expected") == (state == "short")


def test_as_many_experts_as_fit() -> None:
    settings = SHAPES["deepseek-v3"].settings.experts
    assert settings is not None
    tried: list[int] = []

    def measure(layer: Layer, most: int = 64) -> Outcome:
        tried.append(layer.settings.num_experts)
        if layer.settings.num_experts > most:
            raise torch.OutOfMemoryError("out of memory")
        return Outcome("passed", "")

    layer = Layer(Accelerator("cuda", 0), torch.float32, 16, settings, 8)
    assert that_fits(measure, layer).state == "passed" and tried == [256, 128, 64]
    with pytest.raises(torch.OutOfMemoryError):
        that_fits(lambda layer: measure(layer, 0), layer)
    assert tried[-1] == 8  # the choices of a token
