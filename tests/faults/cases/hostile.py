"""Hostile media, archives, YAML and captions: refused or taken for what they are, counted, and in bounded time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from mmspeed.config import load_config, make_config
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.listing import listed
from tests.support.media import make_zoo, write_hostile_tar, write_video, zoo_tree
from tests.support.runs import small_tree
from tests.unit.config.test_yaml_text import LAUGHS
from tests.unit.test_page_policy import check


@case("media: broken, odd, empty, bombs, playlists", 200)
def media(scene: Scene) -> Outcome:
    zoo = make_zoo(scene.folder / "zoo")
    report = CacheBuilder(make_config(zoo_tree(scene.folder))).run()
    reasons = {rejection.source: rejection.reason for rejection in report.rejections}
    wrong = [
        name
        for name, expect in zoo.items()
        if (name in reasons if expect.good else reasons.get(name) not in expect.reasons)
    ]
    refused = sum(not expect.good for expect in zoo.values())
    figure = f"{len(zoo)} files: {len(zoo) - refused} encoded, {refused} rejected by name and reason"
    return figure if not wrong else f"wrong: {', '.join(wrong[:5])}", not wrong


@case("media: random damages to a video", 200, 1200)
def damaged_media(scene: Scene) -> Outcome:
    count = scene.count(12, 200)
    folder = scene.folder / "zoo"
    whole = write_video(folder / "whole.mp4").read_bytes()
    for number in range(count):
        data = bytearray(whole)
        for _ in range(scene.draw.randrange(1, 4)):
            at, length = scene.draw.randrange(len(data)), scene.draw.choice((1, 16, 2000))
            data[at : at + length] = scene.draw.randbytes(len(data[at : at + length]))
        (folder / f"{number}.mp4").write_bytes(data)
        (folder / f"{number}.txt").write_text(f"quarters {number}")
    (folder / "whole.txt").write_text("quarters")
    report = CacheBuilder(make_config(zoo_tree(scene.folder))).run()
    rejected = len(report.rejections)
    counted = report.encoded + report.reused + rejected == count + 1 == report.sources
    return (
        f"{count} damages: {rejected} rejected by name, the others decode; the build ends",
        counted and report.encoded >= 1,
    )


@case("archives: names that lead out, links, devices, a bomb", 60)
def archives(scene: Scene) -> Outcome:
    media_bytes = write_video(scene.folder / "video.mp4").read_bytes()
    expected = write_hostile_tar(scene.folder / "hostile.tar", media_bytes)
    listing = listed(scene.folder / "hostile.tar")
    reasons = {rejection.source.partition("!")[2]: rejection.reason for rejection in listing.rejections}
    wrong = [name for name, why in expected.items() if (reasons.get(name) not in why if why else name in reasons)]
    outside = [path for path in (scene.folder.parent / "evil.mp4", Path("/etc/evil2.mp4")) if path.exists()]
    bomb = scene.folder / "bomb.jsonl"
    bomb.write_bytes(b"[" * 20_000_000)
    began = time.monotonic()
    try:
        refused = len(listed(bomb).sources) == 0
    except UserError:
        refused = True
    seconds = time.monotonic() - began
    bad = sum(bool(why) for why in expected.values())
    figure = (
        f"{bad - len(wrong)} of {bad} hostile members refused, nothing written outside; "
        f"a manifest of 20 MB of brackets refused in {seconds:.1f} s"
    )
    return figure, not wrong and not outside and refused and seconds < 20


@case("YAML: aliases without end, depth, turning around", 60)
def yaml(scene: Scene) -> Outcome:
    texts = [
        LAUGHS,
        "[" * 5_000 + "]" * 5_000,
        "[" * 200_000,
        "- x\n" * 100_001,
        "a: &a [1, *a]",
        "a: !!python/object:os.system {}",
    ]
    refused, slowest = 0, 0.0
    for text in texts:
        path = scene.folder / "config.yaml"
        path.write_text(text)
        began = time.monotonic()
        try:
            load_config(path)
        except UserError as error:
            print(error, flush=True)
            refused += 1
        slowest = max(slowest, time.monotonic() - began)
    return f"{refused} of {len(texts)} refused with a line, within {slowest:.2f} s", refused == len(
        texts
    ) and slowest < 1.0 + 9.0 * busy()


def busy() -> bool:
    """True where more processes wait than there are processors: limits of a second then mean nothing."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


CAPTIONS = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\x1b]0;owned\x07\u202ewords\u200f\r\nmore",
    "x" * 3_000_000,
    "'; DROP TABLE samples; -- ${HOME} $(id) %s {0}",
    "\ud800 lone",
)


@case("captions: scripts, control signs, megabytes", 120)
def captions(scene: Scene) -> Outcome:
    tree = small_tree(scene.folder, clips=6)
    manifest = Path(tree["data"]["sources"][0]["path"])
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    for row, caption in zip(rows[1:], CAPTIONS, strict=True):
        row["caption"] = caption
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree["validate"] |= {"report": True, "prompts": [CAPTIONS[0]]}
    config = make_config(tree, ["train.steps=2", "train.warmup_steps=1", "validate.every=2"], origin="test")
    report = CacheBuilder(config).run()
    TrainPipeline(config).run()
    pages = [*config.run_dir.rglob("*.html"), *config.cache_dir.rglob("*.html")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        check(text)
        assert "<script" not in text and "onerror=alert" not in text.replace("&lt;img src=x onerror=alert", ""), page
    encoded = report.encoded + report.reused
    refused = [rejection.reason for rejection in report.rejections]  # of half a surrogate
    return (
        f"{encoded} of 6 clips trained, 1 rejected by name; {len(pages)} pages hold no script and keep their policy",
        (encoded, refused) == (5, [Reason.CAPTION_ENCODING]) and len(pages) > 0,
    )
