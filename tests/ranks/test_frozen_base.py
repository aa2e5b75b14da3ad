"""Runs beside a frozen base of few bytes: they go on bit by bit, and learn the same where the host keeps it.

On a CPU the host's memory is the device's too, so that a base on the host proves the wiring alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.runs import losses
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_adapter_memory import adapted, save_base

FSDP = "parallel.strategy=fsdp"


def train(folder: Path, name: str, kind: str, *overrides: str) -> None:
    """Train beside a base of a kind, on however many ranks call this."""
    half = ("device.dtype=bfloat16", f"model.base.dtype={kind}", "train.ema_decay=0.9", "train.lr=1e-2")
    TrainPipeline(adapted(folder, name, *half, *overrides)).run()


def train_all(folder: Path, kind: str, overrides: tuple[str, ...]) -> None:
    """The run `whole` of four steps, `stopped` after two of them, and `host`, whose base is on the host."""
    train(folder, "whole", kind, "train.steps=4", *overrides)
    for steps in (2, 4):
        train(folder, "stopped", kind, f"train.steps={steps}", *overrides)
    train(folder, "host", kind, "train.steps=4", "model.base.place=host", *overrides)


@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "int8"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "float8"), (1, "bfloat16"), (2, "int8"), (2, "float8"), (2, "bfloat16")))],
)  # fmt: skip
def test_a_stopped_run_and_a_base_on_the_host_give_the_same_bits(tmp_path: Path, world: int, kind: str) -> None:
    save_base(tmp_path)
    run_ranks(train_all, world, tmp_path, kind, () if world == 1 else (FSDP,))
    whole = adapted(tmp_path, "whole")
    for name in ("stopped", "host"):
        other = adapted(tmp_path, name)
        assert losses(other) == losses(whole) and len(losses(other)) == 4
        assert not differing(whole_checkpoint(other.run_dir), whole_checkpoint(whole.run_dir))


def test_another_number_type_is_another_base_beside_which_a_new_run_begins(tmp_path: Path) -> None:
    save_base(tmp_path)
    train(tmp_path, "first", "bfloat16", "train.steps=2")
    with pytest.raises(
        UserError, match=r"another base: .*\(model\.base\.dtype\), or begin a new run with train\.start_"
    ):
        train(tmp_path, "first", "int8")
    start = adapted(tmp_path, "first").run_dir
    train(tmp_path, "second", "int8", f"train.start_from={start}", "train.steps=1")
    before, after = (losses(adapted(tmp_path, name)) for name in ("first", "second"))
    assert after[0] < before[0]
