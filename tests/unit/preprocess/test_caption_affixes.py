"""Words around captions: of the data and of one source, with missing and cut captions, in keys, in old caches and in `check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mmspeed.config.schema import DataConfig
from mmspeed.preprocess import check
from mmspeed.preprocess.records.keys import text_parts
from mmspeed.preprocess.sources.captions import CaptionAffixes
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.listing import BUCKETS
from tests.support.runs import small_config


def captions(sources: list[dict[str, Any]], **data: Any) -> dict[str, list[tuple[str, ...]]]:
    """The captions that are listed, by data set."""
    listing = list_sources(DataConfig.model_validate({"sources": sources, "buckets": BUCKETS, **data}))
    results: dict[str, list[tuple[str, ...]]] = {}
    for source in listing.sources:
        results.setdefault(source.dataset, []).append(source.captions)
    return results


def folder_of(path: Path, *texts: str | None) -> dict[str, Any]:
    """A folder with a file of media for each text, and its caption if there is one."""
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number}.mp4").write_bytes(b"media")
        if text is not None:
            (path / f"{number}.txt").write_text(text)
    return {"path": str(path), "name": path.name}


def test_each_source_has_its_own_words_or_those_of_the_data(tmp_path: Path) -> None:
    ours, plain, web = (folder_of(tmp_path / name, "a cat") for name in ("ours", "plain", "web"))
    sources = [{**ours, "caption_prefix": " ohwx   dog,"}, {**plain, "caption_prefix": "", "caption_suffix": ""}, web]
    assert captions(sources, caption_prefix="video of", caption_suffix=", 4k") == {
        "ours": [("ohwx dog, a cat, 4k",)],
        "plain": [("a cat",)],
        "web": [("video of a cat, 4k",)],
    }


def test_every_caption_of_a_manifest_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"media")
    row = {"video": "a.mp4", "caption": ["one", "two"]}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    texts = captions([{"path": str(tmp_path / "m.jsonl")}], caption_suffix="seen at night")
    assert texts == {"m.jsonl": [("one seen at night", "two seen at night")]}


def test_the_default_caption_has_them_and_an_empty_one_does_not(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "x", "a cat", None)
    default = {"missing_caption": "default", "default_caption": "a video"}
    assert captions([source], caption_prefix="ohwx", **default) == {"x": [("ohwx a cat",), ("ohwx a video",)]}
    assert captions([source], caption_prefix="ohwx", missing_caption="empty") == {"x": [("ohwx a cat",), ()]}
    assert captions([source], caption_prefix="ohwx") == {"x": [("ohwx a cat",)]}


def test_the_limit_cuts_the_caption_and_not_the_words_around_it(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "x", "abcdefgh")
    texts = captions([source], caption_prefix="trigger", caption_suffix=". The end", max_caption_chars=4)
    assert texts == {"x": [("trigger abcd. The end",)]}


words = st.text(st.characters(categories=("L", "N", "P")), max_size=8)


@given(words, words, words.filter(bool))
def test_words_stand_in_order_with_single_spaces(prefix: str, suffix: str, caption: str) -> None:
    text = CaptionAffixes(prefix, suffix).around(caption)
    assert text.replace(" ", "") == prefix + caption + suffix
    assert text == " ".join(text.split())
    assert CaptionAffixes().around(caption) == caption


def test_check_shows_captions_as_they_are_encoded_and_their_keys_follow(tmp_path: Path) -> None:
    config = small_config(tmp_path, "data.caption_prefix=ohwx", clips=3)
    shown = [line for line in check(config).lines() if "as it is encoded" in line]
    assert len(shown) == 2 and all(line.startswith("  caption as it is encoded: ohwx ") for line in shown)
    plain = small_config(tmp_path, clips=3)
    assert not any("as it is encoded" in line for line in check(plain).lines())
    with_words, without = (list_sources(one.data).sources[0].captions[0] for one in (config, plain))
    assert with_words == f"ohwx {without}"
    assert text_parts(config, "encoder", with_words) != text_parts(plain, "encoder", without)
