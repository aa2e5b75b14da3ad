"""Loss curves in the tree: a change that moves them must say why.

`python -m tests.golden.test_curves` writes them again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.covers import slow_but
from tests.support.runs import losses, small_config

CURVES = Path(__file__).with_name("curves.json")
RUNS = {
    "factorised-flow": (),
    "full-ddpm-v": ("model.arrangement=full", "objective.kind=ddpm"),
    "factorised-ddpm-epsilon": (
        "objective={kind: ddpm, prediction: epsilon, zero_terminal_snr: false, min_snr_gamma: 5}",
    ),
}
# The curve passes through a codec fitted here, MiniLM and 12 optimizer steps: other processors round differently on the way.
TOLERANCE = 2e-3


def curve(folder: Path, overrides: tuple[str, ...]) -> list[float]:
    """The losses of a run on the whole cache of `small_config` in a folder."""
    from mmspeed.pipelines import TrainPipeline

    # by step, as curves from before were taken: tests/unit/pipelines/test_weighting.py has the other weightings
    weighting = "objective.weighting=step"
    config = small_config(folder, "train.steps=12", "validate.samples=0", *overrides, weighting)
    TrainPipeline(config).run()
    return losses(config)


@pytest.mark.parametrize("name", slow_but(RUNS, RUNS.keys() - {"factorised-ddpm-epsilon"}))
def test_the_curve_is_the_one_in_the_tree(name: str, small_cache: Path, tmp_path: Path) -> None:
    expected = json.loads(CURVES.read_text(encoding="utf-8"))[name]
    home = Path(shutil.copytree(small_cache, tmp_path / "home"))
    assert curve(home, RUNS[name]) == pytest.approx(expected, rel=TOLERANCE)


if __name__ == "__main__":
    from mmspeed.preprocess import CacheBuilder

    curves = {}
    for run, wanted in RUNS.items():
        with tempfile.TemporaryDirectory() as home:
            CacheBuilder(small_config(Path(home))).run()
            curves[run] = [round(loss, 6) for loss in curve(Path(home), wanted)]
    CURVES.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(CURVES.read_text(encoding="utf-8"))
