"""`accelerate launch -m mmspeed train`: the launcher's own processes, whose products are counted, or one line and exit code 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmspeed.config import dump_config, load_record
from tests.support.counted_products import counted, hook
from tests.support.runs import small_tree

LAUNCH = ("-m", "accelerate.commands.launch")
ONE_STEP = ("train.steps=1", "validate.every=100", "validate.samples=0")


@pytest.fixture
def home(small_cache: Path, tmp_path: Path) -> Path:
    """A folder with a finished cache, and a config without a number type."""
    home = Path(shutil.copytree(small_cache, tmp_path / "home"))
    (home / "run.yaml").write_text(yaml.safe_dump(small_tree(home)), encoding="utf-8")
    return home


def launch(home: Path, flags: tuple[str, ...], *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch FLAGS -m mmspeed train` on the home's config; the products of its processes are counted."""
    return subprocess.run(
        [sys.executable, *LAUNCH, *flags, "-m", "mmspeed", "train", str(home / "run.yaml"), *ONE_STEP, *overrides],
        capture_output=True,
        text=True,
        cwd=home,
        env=os.environ | hook(home) | {"OMP_NUM_THREADS": "1", "HF_HOME": str(home / "hf")},
        timeout=280,
    )


@pytest.mark.slow
def test_bf16_of_the_launcher_multiplies_in_bfloat16(home: Path) -> None:
    done = launch(home, ("--cpu", "--num_processes", "1", "--mixed_precision", "bf16"))
    assert done.returncode == 0, done.stderr
    assert "accelerate launch --mixed_precision bf16: device.dtype is bfloat16" in done.stderr
    products = counted(home)
    assert products["bfloat16"] > 50 and products["bfloat16"] > 5 * products.get("float32", 0), products
    assert "dtype: bfloat16" in dump_config(load_record(home / "runs" / "small" / "config.yaml"))


@pytest.mark.slow
def test_two_processes_and_shards_of_the_launcher(home: Path) -> None:
    flags = ("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1")
    done = launch(home, (*flags, "--mixed_precision", "bf16", "--main_process_port", "0"))
    assert done.returncode == 0, done.stderr
    assert "accelerate launch --use_fsdp: parallel.strategy is fsdp" in done.stderr
    assert counted(home)["bfloat16"] > 100 and len(list(home.glob("products-*.json"))) == 2
