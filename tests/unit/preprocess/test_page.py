"""The numbers of a data set and its page: merged parts are the whole, the page stands alone, and strangers' text stays text."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmspeed.config import Bucket, Config
from mmspeed.errors import UserError
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.records.stale_entries import SectionState
from mmspeed.preprocess.records.statistics import (
    EXAMPLES,
    SHOWN_SOURCES,
    DataStatistics,
    Histogram,
    NameCounts,
    covered,
)
from mmspeed.preprocess.report.costs import estimate, hints
from mmspeed.preprocess.report.page import (
    PAGE_BYTES,
    CacheState,
    DataPage,
    default_path,
    render,
    thumbnail_jpeg,
    write_page,
)
from mmspeed.preprocess.sources.listing import SourceListing
from mmspeed.preprocess.sources.rejections import Reason, Rejection
from mmspeed.preprocess.sources.source import Source
from mmspeed.shapes import Strides
from tests.support.decoding import probed
from tests.support.runs import small_config
from tests.unit.test_page_policy import check as kept_policy

HOSTILE = "<script>alert(1)</script> \"quoted\" 'single' & </td><img src=http://evil.example/x onerror=alert(2)> \u202eabc\u2066 \x07"
BUCKET, IMAGES = Bucket(5, 32, 48), Bucket(1, 32, 48)
VOID = {"meta", "br", "img", "rect"}


class Reader(HTMLParser):
    """Reads a page: checks that its tags close in order, and keeps tags, attributes, keyed numbers and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.keyed: dict[str, str] = {}
        self.words: list[str] = []
        self._key = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        self._key = dict(attrs).get("data-key") or ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._key = ""

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._key:
            self.keyed[self._key] = self.keyed.get(self._key, "") + data

    @property
    def text(self) -> str:
        return " ".join(self.words)


def video(name: str, content: str, seconds: float = 4.0, caption: str = "words", width: int = 96) -> tuple:
    """A source of 24 frames a second with one clip of its middle."""
    source = Source(name, f"no-such-folder/{name}", None, None, "video", (caption,), "train")
    probe = probed(width, 64, round(seconds * 24))
    left = (width - 96) // 2
    indices = tuple(12 + 3 * k for k in range(5))
    return source, probe, (Clip(source, BUCKET, indices, (left, 0, left + 96, 64), content, 8.0, 0.625),)


def picture(name: str, content: str) -> tuple:
    """An image."""
    source = Source(name, f"no-such-folder/{name}", None, None, "image", ("one", "two words"), "train")
    probe = probed(96, 64)
    return source, probe, (Clip(source, IMAGES, (0,), (0, 0, 96, 64), content, 0.0, 0.0),)


def gathered(items: list, first: bool = True) -> DataStatistics:
    """The statistics of sources and rejections."""
    numbers = DataStatistics()
    sources = [item for item in items if isinstance(item, tuple)]
    rejected = [item for item in items if isinstance(item, Rejection)]
    if first:
        listed = [source for source, _, _ in sources]
        listed += [Source(r.source, "x", None, None, "video", (), "train") for r in rejected]
        numbers.add_listing(SourceListing(listed, [], files=len(listed) + 3, caption_files=2, ignored=1))
    for rejection in rejected:
        numbers.add_rejection(rejection)
    for number, (source, probe, clips) in enumerate(sources):
        numbers.add_source(source, probe, clips)
        for clip in clips:
            numbers.add_sample(clip.bucket, "val" if first and number == 0 else "train", "clips.jsonl")
    return numbers


def page_of(config: Config, numbers: DataStatistics, **more: object) -> DataPage:
    costs, problems = estimate(config, numbers, 3, 4, Strides(4, 8))
    assert not problems
    return DataPage(config, "check", numbers, "Ready", False, hints=hints(config, numbers, costs), costs=costs, **more)  # type: ignore[arg-type]


def test_hints_name_the_setting(tmp_path: Path) -> None:
    numbers = gathered(
        [video(f"{k}.mp4", f"{k:032x}", width=160) for k in range(3)] + [Rejection("x", Reason.NO_BUCKET)]
    )
    numbers.sums["captions_cut"] = 5
    config = small_config(
        tmp_path, "data.buckets=[{frames: 5, height: 32, width: 48}, {frames: 9, height: 32, width: 48}]"
    )
    costs, _ = estimate(config, numbers, 3, 4, Strides(4, 8), worlds=(1, 8, 64))
    text = "\n".join(hints(config, numbers, costs, truncated=2))
    assert "train.batch_size 3 cannot be divided evenly by 8 and 64 devices" in text
    assert "bucket 9x32x48 gets no sample" in text
    assert "84% of the video time is not used; data.windows: all would use 94%" in text
    assert "cropping removes 40% of the pixels" in text and "1 rejected as no_bucket: add a bucket" in text
    assert "5 captions are cut to 4096 characters" in text and "2 captions are cut to 128 tokens" in text
    every = small_config(tmp_path, "data.windows=all")
    assert "data.windows: all" not in "\n".join(hints(every, numbers, None))


def test_the_page_stands_alone_and_strangers_text_stays_text(tmp_path: Path) -> None:
    items = [video(f"{HOSTILE}{k}.mp4", f"{k:032x}", caption=f"{HOSTILE}{k}") for k in range(3)]
    numbers = gathered([*items, Rejection(HOSTILE, Reason.UNDECODABLE, HOSTILE)])
    jpeg = thumbnail_jpeg(np.zeros((90, 160, 3), np.uint8))
    page = page_of(
        small_config(tmp_path, "validate.prompts=['</pre><script>x</script>']"),
        numbers,
        problems=[HOSTILE],
        cache=CacheState(Path(HOSTILE), [SectionState("texts", 1, 0, 0)], [HOSTILE]),
        thumbnails=[(shown, jpeg) for shown in numbers.shown],
        peaks=[(HOSTILE, 1e12)],
        encode=[(HOSTILE, HOSTILE, HOSTILE)],
    )
    html = render(page)
    read = Reader(html)
    assert {tag for tag, _ in read.tags} & {"script", "link", "iframe", "object", "base", "form"} == set()
    for tag, attributes in read.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert "href" not in attributes
        if "src" in attributes:
            assert tag == "img" and (attributes["src"] or "").startswith("data:image/jpeg;base64,")
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert sum(tag == "img" for tag, _ in read.tags) == kept_policy(html) == 3
    assert not re.search("[\x00-\x08\x0b-\x1f\u200e\u200f\u202a-\u202e\u2066-\u2069]", html)
    assert "\\u202eabc" in read.text and '"quoted"' in read.text  # shown, not obeyed
    assert "<bdi>&lt;script&gt;alert(1)&lt;/script&gt; " in html
    assert html.encode("utf-8").decode("utf-8") == html


def test_a_page_of_many_sources_stays_small(tmp_path: Path) -> None:
    items: list = [video(f"{'n' * 900}{k}.mp4", f"{k:032x}", caption="c" * 4096) for k in range(60)]
    items += [Rejection(f"{'r' * 900}{k}", reason, "d" * 5000) for reason in Reason for k in range(9)]
    numbers = gathered(items)
    noise = np.random.default_rng(0).integers(0, 256, (600, 300, 3), dtype=np.uint8)
    jpeg = thumbnail_jpeg(noise)
    assert Image.open(io.BytesIO(jpeg)).size == (120, 240)
    config = small_config(tmp_path)
    assert len(numbers.shown) == SHOWN_SOURCES and all(len(e) == EXAMPLES for e in numbers.examples.values())
    whole = render(page_of(config, numbers, thumbnails=[(shown, jpeg) for shown in numbers.shown]))
    assert len(whole) < PAGE_BYTES and whole.count("<figure>") == SHOWN_SOURCES
    crowded = render(page_of(config, numbers, thumbnails=[(shown, jpeg * 10) for shown in numbers.shown]))
    assert len(crowded) < PAGE_BYTES and 0 < crowded.count("<figure>") < SHOWN_SOURCES
    assert f"{SHOWN_SOURCES - crowded.count('<figure>')} more are left out" in crowded
    assert len(json.dumps(numbers.to_json())) < 200_000


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.builds(
                video,
                st.text("abc", min_size=1, max_size=3),
                st.text("01", min_size=32, max_size=32),
                st.floats(1.5, 100),
                st.text(max_size=30),
                st.integers(96, 4000),
            ),
            st.builds(picture, st.text("abc", min_size=1, max_size=3), st.text("01", min_size=32, max_size=32)),
            st.builds(Rejection, st.text("xyz", max_size=2), st.sampled_from(list(Reason)), st.text(max_size=9)),
        ),
        max_size=50,
        unique_by=lambda item: item.source if isinstance(item, Rejection) else item[0].name,  # as a listing's names are
    ),
    st.randoms(use_true_random=False),
)
def test_parts_merged_in_any_order_are_the_whole(items: list, random: object) -> None:
    whole = gathered(items, first=False)
    parts: list[list] = [[], [], []]
    for item in items:
        parts[random.randrange(3)].append(item)  # type: ignore[attr-defined]
    statistics = [
        DataStatistics.from_json(json.loads(json.dumps(gathered(part, first=False).to_json()))) for part in parts
    ]
    random.shuffle(statistics)  # type: ignore[attr-defined]
    merged = DataStatistics()
    for part in statistics:
        merged.merge(part)
    assert merged.to_json() == whole.to_json()
    assert merged.rejected == sum(isinstance(item, Rejection) for item in items)


def test_histograms_and_counts_are_bounded_and_count_everything() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    assert histogram.bins() == [("under 1", 1), ("1 to 2", 2), ("2 to 5", 0), ("5 and more", 1)]
    assert (histogram.least, histogram.greatest, histogram.mean, histogram.count) == (0.5, 7.0, 2.5, 4)
    with pytest.raises(ValueError, match="edges"):
        histogram.merge(Histogram((1, 2)))
    many = DataStatistics()
    for k in range(900):
        many.add_sample(Bucket(1 + k % 90, 32, 48), "train", f"set {k % 100}")
    assert len(many.samples_by_group("train")) == 900
    counts = NameCounts(limit=10)
    for k in range(1000):
        counts.add(f"rare {k}")
        counts.add("common")
    assert counts.count == 2000 and counts.named["common"] == 1000 and len(counts.named) <= 10
    top = counts.top(1)
    assert top == [("common", 1000), ("others", 1000)]
    assert covered([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (4.0, 4.0)]) == 3.5


def test_where_a_page_cannot_be_written_is_said(tmp_path: Path) -> None:
    numbers = gathered([video("a.mp4", "0" * 32), video("b.mp4", "1" * 32)])
    page = page_of(small_config(tmp_path), numbers)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.page\.html cannot be written.*--report"):
        write_page(page, tmp_path / "file" / "page.html")
    assert write_page(page, default_path(page.config)) == tmp_path / "runs" / "small-data.html"
    Reader((tmp_path / "runs" / "small-data.html").read_text(encoding="utf-8"))
