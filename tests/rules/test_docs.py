"""The documentation: made from the code where it can be, and complete where it cannot."""

from __future__ import annotations

from mmspeed.config import all_fields
from mmspeed.config.docs import generate
from mmspeed.version import __version__

from .sources import ROOT


def test_config_docs_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == generate(), "run `make docs`"


def test_every_field_is_described() -> None:
    assert [path for path, field in all_fields() if not field.description] == []


def test_version_is_the_same_everywhere() -> None:
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
