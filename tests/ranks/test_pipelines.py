"""Settings that stages of a pipeline do not go with; what stages compute: `test_pipeline_cover.py`, `test_pipeline_states.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.errors import UserError
from tests.ranks.test_expert_states import config, home

__all__ = ["home"]  # a fixture


@pytest.mark.parametrize(
    "overrides, words",
    [
        (("parallel.virtual=2",), "set pp"),
        (("parallel.stages=[4]",), "set pp, or leave stages out"),
        (("parallel.pp=2", "parallel.stages=[4]"), "write 2 numbers"),
        (("parallel.pp=2", "parallel.stages=[0,4]"), r"write \[1, 4\]"),
        (("parallel.pp=2", "parallel.strategy=ddp"), "fsdp"),
        (
            ("parallel.pp=2", "memory.release_gradients=true", "train.clip_norm=null", "train.skip_non_finite=0"),
            "whole models",
        ),
        (("parallel.pp=2", "parallel.virtual=2", "parallel.schedule=overlap"), "nothing travels there"),
        (
            ("parallel.pp=2", "parallel.schedule=zb_h1", "train.compile=true"),
            "one graph of both: set train.compile: false, or parallel.schedule 1f1b",
        ),
        (
            ("parallel.pp=2", "parallel.schedule=zb_h1", "parallel.ep=2", "parallel.balance.copies=1"),
            "leave copies out, or set schedule 1f1b",
        ),
    ],
)
def test_what_stages_do_not_go_with_is_refused(home: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config(home, *overrides)
