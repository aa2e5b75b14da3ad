"""Adapters that are switched off within a step, over two processes: the reference of DPO is the base, which a frozen copy is, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.models.adapters import disabled
from mmspeed.protocols import Ask, Batch, Tensors, Update
from tests.support.method_runs import config_of, prepare, train
from tests.support.pairs import PairedPreferences
from tests.support.spawn import run_ranks

ADAPTER = "model.adapter={kind: lora, rank: 3, alpha: 6, targets: attention+mlp}"
LAYOUTS = {"": (), "fsdp": ("parallel.strategy=fsdp",), "ddp": ("parallel.strategy=ddp",)}


class OwnBase(PairedPreferences):
    """Preferences whose errors of the reference are those of the model without adapters, beside the frozen copy's."""

    def __init__(self, of_copy: bool) -> None:
        super().__init__(beta=0.05)
        object.__setattr__(self, "of_copy", of_copy)

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        copied, model = super().before(ask, batch, update), ask.models[update.role]
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        calls = zip(self.entries, self.calls(ask, batch, update), strict=True)
        with disabled(model):
            own = {entry: ask(update.role, inputs, batch).errors()[0] for entry, inputs in calls}
            assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained and all(".lora_" in name for name in trained)
        return copied if self.of_copy else own  # type: ignore[attr-defined]


Numbers = list[float]


def numbers(folder: str, layout: str, of_copy: bool, start: str | None) -> Numbers:
    """The losses and norms of gradients of three steps, on however many ranks call this."""
    name = f"name={layout or 'alone'}-{'copy' if of_copy else 'own'}-{'moved' if start else 'fresh'}"
    keys = ADAPTER, name, "train.steps=3", "train.lr=1e-2", "validate.samples=0", *LAYOUTS[layout]
    config = config_of("wan", Path(folder), *keys, *([f"train.start_from={start}"] if start else []))
    return [row[key] for row in train(config, OwnBase(of_copy)) for key in ("loss", "grad_norm")]


def of_layouts(folder: str, start: str) -> dict[str, tuple[Numbers, Numbers, Numbers]]:
    cases = (False, None), (True, None), (False, start)
    return {layout: tuple(numbers(folder, layout, *case) for case in cases) for layout in LAYOUTS if layout}  # type: ignore[misc]


@pytest.mark.slow
def test_a_model_without_its_adapters_is_the_reference_that_a_frozen_copy_is(tmp_path: Path) -> None:
    prepare(tmp_path, {"wan"})
    alone = numbers(str(tmp_path), "", False, None)
    start = str(tmp_path / "wan" / "alone-own-fresh")  # whose adapters have moved
    moved = numbers(str(tmp_path), "", False, start)
    assert moved != pytest.approx(numbers(str(tmp_path), "", True, start), rel=1e-4)  # there the copy is of the start
    for own, copied, further in run_ranks(of_layouts, 2, str(tmp_path), start)[0].values():
        assert own == copied and len(own) == 6
        assert own == pytest.approx(alone, rel=2e-5) and further == pytest.approx(moved, rel=2e-5)
