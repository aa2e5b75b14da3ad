"""A cache and a run folder written by commit e6bf4be (make_fixtures.py) are read, gone on with, sampled and reported today.

By the command line, so that the test outlives moved modules. The user's config is in today's keys (exact_cases.NEW_KEYS); the
records in the cache and the run folder are as the old code wrote them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from mmspeed.data import DatasetCache
from tests.golden.exact import ROOT
from tests.golden.exact_cases import NEW_KEYS, NEW_VALUES, nested, translated
from tests.golden.exact_records import read_record
from tests.golden.make_fixtures import FIXTURE, PROMPT, STEPS, STOPPED, TREE, bring_clips
from tests.support.spawn import run_command

# Three steps of AdamW on another processor; on the one that wrote the fixture they are equal to the bit.
TOLERANCE = 2e-3
TRANSLATED = "is from an earlier mmspeed: memory.spans read as memory.activation_policy"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A copy of the fixture with its clips and the user's config."""
    home = tmp_path / "home"
    shutil.copytree(FIXTURE, home)
    bring_clips(ROOT / "mmspeed" / "assets" / "demo-clips", home)
    tree = nested(translated(TREE, NEW_KEYS, NEW_VALUES))
    (home / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return home


def mmspeed(home: Path, *arguments: str) -> str:
    """What a command writes to standard output and error."""
    code, said = run_command(home, *arguments)
    assert code == 0, said
    return said


@pytest.mark.slow
def test_the_cache_is_read_and_nothing_in_it_is_stale(home: Path) -> None:
    cache = DatasetCache(home / "cache")
    assert [len(cache.split(split)) for split in ("train", "val")] == [2, 1]
    entries = list(cache.entries())
    assert {entry.section for entry in entries} == {"latents", "texts", "null"}
    del cache
    before = {path: path.read_bytes() for path in sorted((home / "cache").rglob("*.tar"))}
    said = mmspeed(home, "preprocess", "config.yaml")
    counts = re.findall(r"(\d+) encoded now, (\d+) already there", said)
    assert [int(new) for new, _ in counts] == [0, 0] and sum(int(kept) for _, kept in counts) == len(entries)
    assert before == {path: path.read_bytes() for path in sorted((home / "cache").rglob("*.tar"))}
    mmspeed(home, "cache", "verify", "cache")


@pytest.mark.slow
def test_the_run_goes_on_where_it_stopped(home: Path) -> None:
    expected = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))
    before = read_record(home / "runs" / "old").numbers
    assert f"step {STOPPED} loss" in before and f"step {STOPPED + 1} loss" not in before
    said = mmspeed(home, "train", "config.yaml", f"train.steps={STEPS}")
    assert said.count(TRANSLATED) == 1
    assert said.count("recorded objective.weighting: step, and continues so") == 1  # the user's config names none
    assert TRANSLATED not in mmspeed(home, "report", "runs/old")  # the record is in today's keys now
    numbers = read_record(home / "runs" / "old").numbers
    assert before.items() <= numbers.items()  # no step is trained again
    assert len(expected) == 2 * (STEPS - STOPPED)
    wanted = {name: float.fromhex(value) for name, value in expected.items()}
    print({name: (value, numbers[name]) for name, value in wanted.items()})
    print("equal to the bit:", all(numbers[name] == value for name, value in wanted.items()))
    assert {name: numbers[name] for name in wanted} == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.slow
def test_the_run_is_sampled_and_reported_without_its_cache(home: Path) -> None:
    shutil.rmtree(home / "cache")
    said = mmspeed(home, "sample", "runs/old", "--prompt", PROMPT, "--out", "butterfly.mp4", "--device", "cpu")
    assert said.count(TRANSLATED) == 1
    assert (home / "butterfly.mp4").stat().st_size > 0
    assert mmspeed(home, "report", "runs/old").count(TRANSLATED) == 1
    page = (home / "runs" / "old" / "report.html").read_text(encoding="utf-8")
    assert PROMPT in page


def test_the_fixture_names_no_machine() -> None:
    files = [path for path in FIXTURE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    text = [path for path in files if path.suffix in (".json", ".jsonl", ".yaml", ".txt")]
    assert text and not [path for path in text if re.search(r"[\"' ]/\w", path.read_text(encoding="utf-8"))]
    assert not [path for path in files if re.search(rb"/(tmp|home|root|Users)/", path.read_bytes())]
