"""The processor time of comparing cached samples with their hashes each time that they are read."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mmspeed.bench.reliability.watch import STEP_SECONDS
from mmspeed.data import CacheWriter, DatasetCache, Sample
from mmspeed.data.cache.keys import entry_key, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.protocols import TextEntry
from mmspeed.shapes import Bucket

SAMPLES = 4  # of a process in a step
BUCKET = Bucket(81, 480, 832)
LATENT, TEXT = (16, 21, 60, 104), (512, 4096)  # sizes of a latent of the bucket, and of a caption of a large encoder
READING_GOAL = 0.01  # share of a step


@dataclass(frozen=True)
class ReadingCost:
    """Medians in seconds of processor time: of reading a step's samples, `megabytes` of them, again, with the comparison and without."""

    megabytes: float
    checked: float
    plain: float

    @property
    def share(self) -> float:
        """The comparison's share of a step of `STEP_SECONDS`."""
        return (self.checked - self.plain) / STEP_SECONDS

    def passed(self) -> bool:
        """True where the goal is kept."""
        return self.share <= READING_GOAL

    def lines(self) -> list[str]:
        """The figures for people."""
        rate = self.megabytes / 1e3 / max(self.checked - self.plain, 1e-9)
        return [
            f"comparing {self.megabytes:.0f} MB of cached samples, read before, with their hashes: "
            f"{(self.checked - self.plain) * 1e3:.2f} ms ({rate:.1f} GB/s), {self.share:.3%} of a step of {STEP_SECONDS:.0f} s "
            f"(goal: at most {READING_GOAL:.0%})"
        ]

    def to_json(self) -> str:
        """The figures for programs."""
        return json.dumps(asdict(self) | {"share": self.share}, indent=2)


def bench_reading(rounds: int = 5, samples: int = SAMPLES) -> ReadingCost:
    """Write a cache of `samples` of 81 frames of 480 x 832 with captions, and read it again and again; medians of `rounds`."""
    with tempfile.TemporaryDirectory() as folder:
        keys, size = _write(Path(folder), samples)
        times = []
        for verify in (True, False):
            cache = DatasetCache(folder, verify=verify)
            _read(cache, keys)  # compares checksums, and takes the pages in
            times.append(statistics.median(_read(cache, keys) for _ in range(rounds)))
    return ReadingCost(size / 1e6, *times)


def _read(cache: DatasetCache, keys: list[tuple[str, str]]) -> float:
    """Seconds of processor time of reading all entries."""
    began = time.process_time()
    for latent, text in keys:
        cache.latent(latent)
        cache.text(text)
    return time.process_time() - began


def _write(root: Path, samples: int) -> tuple[list[tuple[str, str]], int]:
    """Write the cache; returns the keys of latent and caption of each sample, and the bytes of all of them."""
    keys, size, rows = [], 0, []
    generator = torch.Generator().manual_seed(0)
    with CacheWriter(root) as writer:
        for number in range(samples):
            parts, caption = {"kind": "latent", "number": number}, {"kind": "text", "caption": str(number)}
            latent = torch.randn(LATENT, generator=generator).bfloat16()
            text = TextEntry(torch.randn(TEXT, generator=generator).bfloat16())
            keys.append((entry_key(parts), entry_key(caption)))
            writer.add(
                "latents", keys[-1][0], latent_tensors(latent), parts, bucket=BUCKET, tokens=latent[0].numel(),
                content_id=f"c{number}", frames=range(BUCKET.frames), fps=16.0, source=f"{number}.mp4",
            )  # fmt: skip
            writer.add("texts", keys[-1][1], text_tensors(text), caption, tokens=TEXT[0])
            size += latent.nbytes + text.embeds_LD.nbytes
            rows.append(
                Sample(sample_key([keys[-1][0]], [keys[-1][1]]), (keys[-1][0],), (keys[-1][1],), "train", BUCKET,
                       f"{number}.mp4", latent[0].numel(), f"c{number}")
            )  # fmt: skip
    write_samples(root, rows)
    write_rejects(root, [])
    write_info(root, {"encoders": {"vae": {"channels": LATENT[0]}}, "fps": 16.0})
    return keys, size
