"""Pages allow what they hold, and nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from mmspeed.pipelines import TrainPipeline, write_report
from tests.support.character_runs import character_config
from tests.support.characters import CharacterDomain


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
    TrainPipeline(config, task=CharacterDomain(config)).run()
    assert check(write_report(config.run_dir).read_text(encoding="utf-8")) > 0
