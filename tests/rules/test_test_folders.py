"""Tests and helpers lie in their folders: unit tests in those of what they test, helpers in tests/support."""

from __future__ import annotations

from pathlib import Path

from .sources import ROOT, name, offenders, python_files

TESTS = ROOT / "tests"
UNIT = TESTS / "unit"


def counterpart(folder: Path) -> Path:
    """The folder of the product that a folder of unit tests is about."""
    return ROOT / "mmspeed" / folder.relative_to(UNIT)


def test_folders_of_unit_tests_have_counterparts() -> None:
    folders = {path.parent for path in python_files("tests/unit")}
    assert len(folders) > 10
    assert sorted(name(folder) for folder in folders if not counterpart(folder).is_dir()) == []
    assert sorted(name(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []


def test_a_folder_without_a_counterpart_is_seen() -> None:
    assert counterpart(UNIT / "compute" / "sparse").is_dir() and counterpart(UNIT / "models").is_dir()
    assert not counterpart(UNIT / "helpers").exists()


def misplaced(path: Path) -> str:
    """Why a Python file cannot lie where it does in tests/ or tests/unit/; nothing where it can."""
    if path.parent == TESTS and path.name not in ("__init__.py", "conftest.py"):
        return "lies in tests/ itself: helpers belong into tests/support"
    if path.is_relative_to(UNIT) and path.name != "__init__.py" and not path.name.startswith("test_"):
        return "is no file of tests: helpers belong into tests/support"
    return ""


def test_helpers_lie_in_support() -> None:
    assert offenders(python_files("tests"), misplaced) == {}


def test_misplaced_helpers_are_seen() -> None:
    for helper in (TESTS / "spawn.py", TESTS / "test_spawn.py", UNIT / "clock.py", UNIT / "memory" / "clock.py"):
        assert misplaced(helper)
    for rightly in (TESTS / "conftest.py", TESTS / "support" / "spawn.py", UNIT / "memory" / "test_tiered.py"):
        assert not misplaced(rightly)
