"""The example of a loop of one's own, as `accelerate launch` runs it: it trains, and two processes that share samples compute the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.support.published import prepare

WAN = "models/wan"
TWO_EPOCHS = "--text-tokens 9 --lr 1e-3 --epochs 2 --batch-size 2 --workers 0".split()
TWO = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0".split()
FILE = Path(__file__).resolve().parents[3] / "examples" / "accelerate_loop.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of latents and captions, and a tiny Wan that was saved."""
    home = tmp_path_factory.mktemp("loop")
    prepare(home)
    return home


def losses(home: Path, out: str, launcher: Sequence[str], *arguments: str) -> list[float]:
    """Run two epochs of the example and return the losses that it printed."""
    done = subprocess.run(
        [sys.executable, *launcher, FILE, home / "cache", home / WAN, "--out", home / out, *TWO_EPOCHS, *arguments],
        capture_output=True,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "HF_HOME": str(home / "hf"), "PYTHONPATH": str(FILE.parents[1])}
        | {"ACCELERATE_USE_CPU": "true"},  # the launcher has no flag for several processes on CPUs without MPI
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.slow
def test_the_example_trains_a_saved_model(home: Path) -> None:
    ours = losses(home, "one", ())
    assert len(ours) >= 6 and all(0 < loss < 10 for loss in ours)
    before, after = (WanTransformer3DModel.from_pretrained(home / name).state_dict() for name in (WAN, "one"))
    assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_processes_that_share_samples_compute_the_same(home: Path) -> None:
    alone = losses(home, "alone", ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"))
    shared = losses(home, "shared", TWO, "--ulysses", "2")
    assert shared == pytest.approx(alone, rel=1e-4)
