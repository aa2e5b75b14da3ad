"""Pages allow what they hold, and nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from mmspeed import pages
from mmspeed.pipelines import TrainPipeline, write_report
from tests.support.character_runs import character_config
from tests.support.characters import CharacterTask


class PageTags(HTMLParser):
    """All tags of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check(page: str) -> int:
    """Assert that the policy stands before all it governs, and that the page keeps it; returns the number of pictures and videos."""
    tags = PageTags(page).tags
    names = [tag for tag, _ in tags]
    at = next(i for i, (tag, attrs) in enumerate(tags) if attrs.get("http-equiv") == "Content-Security-Policy")
    assert names[at] == "meta" and at < names.index("style") and names.index("head") < at < names.index("body")
    policy = dict(part.split(" ", 1) for part in re.split(r";\s*", str(tags[at][1]["content"])))
    assert policy["default-src"] == "'none'" and policy["img-src"] == policy["media-src"] == "data:"
    assert not {"script", "iframe", "link", "form", "object"} & set(names)
    assert not any(key.startswith("on") for _, attrs in tags for key in attrs)
    sources = [attrs["src"] for _, attrs in tags if "src" in attrs]
    assert all(str(source).startswith("data:") for source in sources)
    return len(sources)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    config = character_config(tmp_path, "train.steps=2")
    TrainPipeline(config, task=CharacterTask(config)).run()
    assert check(write_report(config.run_dir).read_text(encoding="utf-8")) > 0


def bars(heading: str, rows: list[tuple[str, int]]) -> str:
    return str(pages._environment().get_template("macros.html").module.bars(heading, rows))  # type: ignore[attr-defined]


def test_bars_are_as_long_as_their_counts_and_leave_room_for_them() -> None:
    chart = bars("t & <t>", [("few", 1), ("half", 617_283), ("most", 1_234_567)])
    assert "t &amp; &lt;t&gt;" in chart and "<t>" not in chart
    widths = [float(attrs["width"] or 0) for tag, attrs in PageTags(chart).tags if tag == "rect"]
    assert widths[0] == 1 and widths[1] * 2 == widths[2] > 100
    (width,) = [float(number) for number in re.findall(r'viewBox="0 0 (\d+)', chart)]
    place = max(float(x) for x in re.findall(r'<text x="([\d.]+)" y="\d+">', chart))
    assert place + 6 * len("1,234,567") < width  # digits are about 6 wide
    assert place > width / 2
    assert "none" in bars("empty", [])
