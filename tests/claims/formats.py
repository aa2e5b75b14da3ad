"""The formats that the claim on the loader compares: the same samples written, and read back, as each project does it.

The `.pt` files are written and read by the bench alone, in its temporary folder, and without running pickled code.

Legend: C channels, T h w latent, L caption tokens, D text width; posterior = mean and log-variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from mmspeed.data import CacheWriter, DatasetCache, Sample
from mmspeed.data.cache.keys import digest, entry_key, sample_key
from mmspeed.data.cache.tables import write_info, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.protocols import TextEntry
from mmspeed.rng import normal
from mmspeed.shapes import Bucket

TEXT_WIDTH, TEXT_LENGTHS = 384, (20, 200)
ROWS_A_FILE = 8  # FastVideo's samples_per_file

Reader = Callable[[int], "Numbers"]


class Numbers(NamedTuple):
    """One sample, float32: the posterior and the encoded caption."""

    mean_CThw: np.ndarray
    logvar_CThw: np.ndarray
    embeds_LD: np.ndarray


@dataclass(frozen=True)
class Format:
    """The samples as one format keeps them: the files, and how a process that trains opens and reads them."""

    name: str
    folder: Path
    open: Callable[[], Reader]


def make_samples(count: int, shape_CThw: tuple[int, ...]) -> list[Numbers]:
    """Samples that nothing compresses, always the same ones."""
    span = TEXT_LENGTHS[1] - TEXT_LENGTHS[0] + 1
    return [
        Numbers(
            normal(shape_CThw, 0, "bench mean", number).numpy(),
            normal(shape_CThw, 0, "bench logvar", number).numpy(),
            normal((TEXT_LENGTHS[0] + number * 37 % span, TEXT_WIDTH), 0, "bench text", number).numpy(),
        )
        for number in range(count)
    ]


def write_ours(folder: Path, samples: Sequence[Numbers]) -> tuple[list[str], list[str]]:
    """The dataset cache, written as preprocess writes it; the keys of the latents and of the texts."""
    _, frames, height, width = samples[0].mean_CThw.shape
    bucket = Bucket(4 * frames - 3, 8 * height, 8 * width)
    latents = [entry_key({"bench": "latent", "number": number}) for number in range(len(samples))]
    texts = [entry_key({"bench": "text", "number": number}) for number in range(len(samples))]
    with CacheWriter(folder) as writer:
        for number, sample in enumerate(samples):
            mean, logvar, embeds = (torch.from_numpy(array) for array in sample)
            writer.add("latents", latents[number], latent_tensors(mean, logvar), {"number": number}, bucket=bucket)
            writer.add("texts", texts[number], text_tensors(TextEntry(embeds)), {"number": number})
        null = entry_key({"bench": "null"})
        writer.add("null", null, text_tensors(TextEntry(torch.zeros(1, TEXT_WIDTH))), {})
    rows = [
        Sample(sample_key([latent], [text]), (latent,), (text,), "train", bucket, f"{number}.mp4")
        for number, (latent, text) in enumerate(zip(latents, texts, strict=True))
    ]
    write_samples(folder, rows, null_key=null)
    write_info(folder, {"bench": "loader"})
    return latents, texts


def ours_reader(cache: DatasetCache, latents: Sequence[str], texts: Sequence[str]) -> Reader:
    """Samples as the loader gets them from the cache."""

    def read(number: int) -> Numbers:
        latent, text = cache.latent(latents[number]), cache.text(texts[number])
        return Numbers(latent["mean"].numpy(), latent["logvar"].numpy(), text.embeds_LD.numpy())

    return read


def write_pt(folder: Path, samples: Sequence[Numbers]) -> Format:
    """One `torch.save` a sample, as finetrainers keeps them (there latents and captions are two files)."""
    folder.mkdir()
    for number, sample in enumerate(samples):
        tensors = {name: torch.from_numpy(array) for name, array in sample._asdict().items()}
        torch.save(tensors, folder / f"{number}.pt")

    def read(number: int) -> Numbers:
        tensors = torch.load(folder / f"{number}.pt", weights_only=True)
        return Numbers(**{name: tensor.numpy() for name, tensor in tensors.items()})

    return Format(".pt a sample", folder, lambda: read)


def write_parquet(folder: Path, samples: Sequence[Numbers], name: str, compression: str, group: int) -> Format:
    """Rows of `*_bytes`, `*_shape`, `*_dtype`, as FastVideo keeps them; its map-style reader reads a row group a sample."""
    folder.mkdir()
    for start in range(0, len(samples), ROWS_A_FILE):
        rows = []
        for sample in samples[start : start + ROWS_A_FILE]:
            row: dict[str, Any] = {}
            for field, array in sample._asdict().items():
                row |= {
                    f"{field}_bytes": array.tobytes(),
                    f"{field}_shape": list(array.shape),
                    f"{field}_dtype": "float32",
                }
            rows.append(row)
        path = folder / f"{start // ROWS_A_FILE}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, compression=compression, row_group_size=group)

    def read(number: int) -> Numbers:
        file, row = divmod(number, ROWS_A_FILE)
        with pq.ParquetFile(folder / f"{file}.parquet") as parquet:
            columns = parquet.read_row_group(row // group).to_pydict()
        place = row % group
        return Numbers(
            *(
                np.frombuffer(columns[f"{field}_bytes"][place], np.float32).reshape(columns[f"{field}_shape"][place])
                for field in Numbers._fields
            )
        )

    return Format(name, folder, lambda: read)


def write_safetensors(folder: Path, samples: Sequence[Numbers]) -> Format:
    """One safetensors file a clip and one a caption, as musubi-tuner keeps them."""
    folder.mkdir()
    for number, sample in enumerate(samples):
        mean, logvar, embeds = (torch.from_numpy(array) for array in sample)
        safetensors.torch.save_file({"mean": mean, "logvar": logvar}, folder / f"{number}.safetensors")
        safetensors.torch.save_file({"embeds": embeds}, folder / f"{number}_te.safetensors")

    def read(number: int) -> Numbers:
        latent = safetensors.torch.load_file(folder / f"{number}.safetensors")
        text = safetensors.torch.load_file(folder / f"{number}_te.safetensors")
        return Numbers(latent["mean"].numpy(), latent["logvar"].numpy(), text["embeds"].numpy())

    return Format("safetensors a clip", folder, lambda: read)


def write_others(root: Path, samples: Sequence[Numbers]) -> list[Format]:
    """The same samples in every other format, each in a folder of its own below `root`."""
    return [
        write_pt(root / "pt", samples),
        write_parquet(root / "zstd", samples, "Parquet zstd, 8 rows a group", "zstd", ROWS_A_FILE),
        write_parquet(root / "plain", samples, "Parquet plain, 8 rows a group", "none", ROWS_A_FILE),
        write_parquet(root / "rows", samples, "Parquet plain, 1 row a group", "none", 1),
        write_safetensors(root / "safetensors", samples),
    ]


def contents(reader: Reader, count: int) -> str:
    """A digest of all samples in the order of their numbers: equal for equal tensors."""
    return digest(
        "".join(digest(array.tobytes()) + str(array.shape) for n in range(count) for array in reader(n)).encode()
    )


def files_of(folder: Path) -> list[Path]:
    """The files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
