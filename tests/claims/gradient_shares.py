"""The videos' share of the gradients of an epoch, as `mmspeed check` prints it, by schedule and `objective.weighting`.

Makes 4,000 pictures and 400 clips of 49 frames, 256 x 256 each, in two folders, and runs the command once for each row and column.

python -m tests.claims.gradient_shares
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from tests.support.media import write_video

SIZE, FRAMES = 256, 49
SCHEDULES = {
    "by: samples, 64 a step": ("train.batch_size=64",),
    "by: tokens, mix: same": ("batching.by=tokens",),
    "by: tokens, mix: matched": ("batching.by=tokens", "batching.mix=matched"),
    "by: tokens, mix: window, accumulate: 4": ("batching.by=tokens", "batching.mix=window", "batching.accumulate=4"),
}
WEIGHTINGS = ("step", "sample", "token")


def write_media(folder: Path, pictures: int, clips: int) -> None:
    """Write the folders `images` and `videos`; no two files have the same content."""
    for name in ("images", "videos"):
        (folder / name).mkdir(parents=True)
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    for number in range(pictures):
        picture[0, 0] = np.array([number], "<u4").view(np.uint8)[:3]
        path = folder / "images" / f"{number}.png"
        Image.fromarray(picture).save(path)
        path.with_suffix(".txt").write_text(f"picture {number}")
    with tempfile.TemporaryDirectory() as one:
        clip = write_video(Path(one) / "clip.mp4", "mpeg4", FRAMES, SIZE, SIZE)
        whole = clip.read_bytes()
    for number in range(clips):
        path = folder / "videos" / f"{number}.mp4"
        path.write_bytes(whole + struct.pack(">I4sQ", 16, b"free", number))  # a box that readers pass over
        path.with_suffix(".txt").write_text(f"clip {number}")


def write_config(folder: Path) -> Path:
    """A config of the two folders, with a bucket for each; the model is the default one."""
    sources = [{"path": str(folder / name), "name": name} for name in ("images", "videos")]
    buckets = [{"frames": frames, "height": SIZE, "width": SIZE} for frames in (1, FRAMES)]
    data = {"sources": sources, "buckets": buckets, "cache": str(folder / "cache"), "fps": 24}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "shares", "output": str(folder / "runs"), "data": data}))
    return path


def printed_share(config: Path, overrides: Iterable[str], ranks: str) -> str:
    """The videos' share of the gradient in the lines of `mmspeed check`. Raises RuntimeError where there is none."""
    command = [sys.executable, "-m", "mmspeed", "check", str(config), "--ranks", ranks, *overrides]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    bucket = f"{FRAMES}x{SIZE}x{SIZE}"
    row = re.search(rf"^ +bucket {bucket}: .* of the cost, (\S+%(?: / \S+%)*) of the gradients", process.stdout, re.M)
    if row is None:
        raise RuntimeError(f"{' '.join(command)}\n{process.stdout}\n{process.stderr}")
    return row[1]


def main() -> None:
    """Print a row for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=4000)
    parser.add_argument("--clips", type=int, default=400)
    parser.add_argument("--ranks", default="1,8")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_media(folder, asked.pictures, asked.clips)
        config = write_config(folder)
        sys.stdout.write(f"{'schedule':<40}" + "".join(f"{weighting:>16}" for weighting in WEIGHTINGS) + "\n")
        for schedule, overrides in SCHEDULES.items():
            sys.stdout.write(f"{schedule:<40}")
            for weighting in WEIGHTINGS:
                share = printed_share(config, (*overrides, f"objective.weighting={weighting}"), asked.ranks)
                sys.stdout.write(f"{share:>16}")
                sys.stdout.flush()
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()
