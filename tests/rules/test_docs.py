"""The documentation: made from the code where it can be, and complete where it cannot."""

from __future__ import annotations

import re

from mmspeed.config import all_fields
from mmspeed.config.docs import generate
from mmspeed.version import __version__

from .sources import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_config_docs_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == generate(), "run `make docs`"


def test_every_field_is_a_sentence() -> None:
    for path, field in all_fields():
        text = field.description or ""
        assert text.endswith(".") and text[0] in "`ABCDEFGHIJKLMNOPQRSTUVWXYZ", f"{path}: {text!r}"


def test_glossary_is_a_table_of_english_chinese_and_meaning() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    assert len(rows) >= 45
    for row in rows:
        assert len(row) == 3 and all(row), row
        assert re.search(r"[\u4e00-\u9fff]", row[1]), f"no Chinese: {row}"
        assert row[2].endswith("."), row
    terms = [row[0].lower() for row in rows]
    assert terms == sorted(terms) and len(set(terms)) == len(terms)


def test_version_is_the_same_everywhere() -> None:
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
