"""Small dataset caches with known contents, for tests."""

from __future__ import annotations

import tarfile
from pathlib import Path

import torch

from mmspeed.data import CacheWriter, Entry, Sample
from mmspeed.data.cache.keys import entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import index_files, shard_of_index, write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.data.maintenance.stored_entries import trusted_rows
from mmspeed.protocols import TextEntry
from mmspeed.shapes import Bucket

BUCKET = Bucket(5, 16, 32)
FOLDER = "latents/005x0016x0032"


def latent_parts(number: int) -> dict:
    return {"kind": "latent", "number": number}


def latent(number: int) -> torch.Tensor:
    return torch.randn(4, 2, 2, 4, generator=torch.Generator().manual_seed(number))


def add_latent(writer: CacheWriter, number: int, source: str | None = None) -> str:
    key = entry_key(latent_parts(number))
    tensors = latent_tensors(latent(number), latent(number) - 5)
    writer.add(
        "latents",
        key,
        tensors,
        latent_parts(number),
        bucket=BUCKET,
        tokens=16,
        content_id=f"c{number}",
        frames=range(0, 10, 2),
        fps=8.0,
        source=source or f"{number}.mp4",
    )
    return key


def add_text(writer: CacheWriter, caption: str, section: str = "texts", pooled: bool = True) -> str:
    key = entry_key({"kind": "text", "caption": caption})
    generator = torch.Generator().manual_seed(len(caption))
    embeds_LD = torch.randn(1 + len(caption), 6, generator=generator).bfloat16()
    entry = TextEntry(embeds_LD, embeds_LD[0].clone() if pooled else None)
    writer.add(section, key, text_tensors(entry), {"caption": caption}, tokens=1 + len(caption))
    return key


def finish(root: Path, latents: list[str], texts: list[str], **kwargs: str) -> None:
    """Describe the data set, as preprocess does at its end."""
    keys = number_duplicates(sample_key([key], texts) for key in latents)
    rows = [
        Sample(key, (latent_key,), tuple(texts), "val" if row == 0 else "train", BUCKET, f"{row}.mp4", 16, f"c{row}")
        for row, (key, latent_key) in enumerate(zip(keys, latents, strict=True))
    ]
    write_samples(root, rows, **kwargs)
    write_rejects(root, [("bad.mp4", "no_video", "no video stream"), ("a.gif", "too_short", "3 frames")])
    write_info(root, {"encoders": {"vae": {"channels": 4}}, "fps": 8.0})


def build(root: Path, count: int = 4, shard_bytes: int = 10**9) -> tuple[list[str], list[str]]:
    with CacheWriter(root, shard_bytes) as writer:
        latents = [add_latent(writer, number) for number in range(count)]
        texts = [add_text(writer, "a rabbit"), add_text(writer, "an owl in a tree", pooled=False)]
        add_text(writer, "", "null")
    finish(root, latents, texts)
    return latents, texts


def entries_of(root: Path) -> list[Entry]:
    """The rows of all entries, shard by shard."""
    return [entry for path in index_files(root) for entry in trusted_rows(root, shard_of_index(path))]


def tar_bytes(root: Path) -> dict[str, bytes]:
    """Every member of every shard by its name."""
    members = {}
    for path in sorted(root.rglob("*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                file = tar.extractfile(info)
                assert file is not None and info.name not in members
                members[info.name] = file.read()
    return members


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Flip bits of one byte of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))
