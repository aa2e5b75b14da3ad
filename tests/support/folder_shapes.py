"""Data sets in five shapes that people have, from the demo clips: media with captions, some of which cannot be used."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import av

from tests.support.media import write_image, write_video
from tests.support.runs import CLIPS

CLIP_ROWS = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()]


def copy_clips(folder: Path, numbers: range) -> list[tuple[str, str]]:
    """Copy demo clips into a folder; returns their file names with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in numbers:
        source = CLIPS.parent / CLIP_ROWS[number]["video"]
        shutil.copy(source, folder / source.name)
        rows.append((source.name, CLIP_ROWS[number]["caption"]))
    return rows


def _captions(folder: Path, rows: list[tuple[str, str]]) -> None:
    for name, caption in rows:
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")


def _still(clip: Path, picture: Path) -> str:
    """Save a clip's first frame as a picture; returns its file name."""
    with av.open(str(clip)) as container:
        next(container.decode(video=0)).to_image().save(picture)
    return picture.name


def flat_folder(folder: Path) -> Path:
    """Clips with `.txt` captions beside them; one has none, one is damaged, one is two frames long, and there is a note."""
    _captions(folder, copy_clips(folder, range(4)))
    write_video(folder / "no-caption.mp4")
    write_video(folder / "short.mp4", frames=2)
    (folder / "damaged.mp4").write_bytes((folder / "bbb_000.mp4").read_bytes()[:3000])
    _captions(folder, [("short.mp4", "Too short"), ("damaged.mp4", "Damaged")])
    (folder / "notes.md").write_text("Not media.", encoding="utf-8")
    return folder


def jsonl_manifest(folder: Path) -> Path:
    """A manifest of JSON lines, which marks a row `val`, names a missing file, and has a row without a caption."""
    rows = [{"video": f"media/{name}", "caption": text} for name, text in copy_clips(folder / "media", range(4, 8))]
    rows[1]["split"] = "val"
    rows += [{"video": "media/absent.mp4", "caption": "Absent"}, {"video": "media/bbb_004.mp4", "caption": ""}]
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "clips.jsonl"


def _beginning(clip: Path, packets: int) -> Path:
    """Cut a clip to its first packets, without encoding anything."""
    whole = clip.rename(clip.with_suffix(".whole"))
    with av.open(str(whole)) as source, av.open(str(clip), "w") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for _, packet in zip(range(packets), source.demux(video=0), strict=False):
            packet.stream = stream
            output.mux(packet)
    whole.unlink()
    return clip


def csv_manifest(folder: Path) -> Path:
    """A table of clips that are all short: less than a second, in which the slowest rate finds no 13 frames."""
    rows = copy_clips(folder, range(15, 19))
    for name, _ in rows:
        _beginning(folder / name, 20)
    with (folder / "clips.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("video", "caption"), *rows])
    return folder / "clips.csv"


def tars(folder: Path) -> Path:
    """Two webdataset tars, as a pattern; a sample of one has no caption."""
    rows = copy_clips(folder / "media", range(8, 14))
    _captions(folder / "media", rows[:-1])
    for number in range(2):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for name, _ in rows[number::2]:
                for file in sorted((folder / "media").glob(f"{Path(name).stem}.*")):
                    tar.add(file, file.name)
    return folder / "*.tar"


def mixed_folder(folder: Path) -> Path:
    """Videos and pictures of mixed shapes and lengths, in folders: wide, tall, small, short; one picture is tiny."""
    rows = copy_clips(folder, range(12, 15))
    rows.append((write_video(folder / "tall.mp4", width=120, height=200, frames=40).name, "Tall squares"))
    rows.append((write_video(folder / "small.mp4", width=64, height=48).name, "Small squares"))
    rows.append((write_video(folder / "short.mp4", width=160, height=96, frames=18).name, "Short squares"))
    rows.append((_still(folder / rows[0][0], folder / "still.png"), "A still"))
    rows.append((write_image(folder / "squares.png").name, "Squares"))
    write_video(folder / "later" / "silent.mp4")
    _captions(folder, rows)
    return folder


FOLDER_SHAPES: dict[str, Callable[[Path], Path]] = {
    make.__name__: make for make in (flat_folder, jsonl_manifest, csv_manifest, tars, mixed_folder)
}
USABLE = {
    "flat_folder": (4, 7),
    "jsonl_manifest": (4, 6),
    "csv_manifest": (4, 4),
    "tars": (5, 6),
    "mixed_folder": (8, 9),
}
