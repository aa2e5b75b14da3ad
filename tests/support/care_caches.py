"""Caches with everything that a built one holds, for the tests of their care; a fingerprint of what readers get from one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from mmspeed import rng
from mmspeed.data import CacheWriter, DatasetCache, Sample
from mmspeed.data.cache.keys import digest, entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.versions import VERSIONS
from mmspeed.errors import UserError
from mmspeed.models.codecs.linear import LinearCodec
from tests.support.caches import BUCKET, add_latent, add_text, latent_parts

CODEC = "codec/linear-4.safetensors"


@cache
def codec(seed: int = 0) -> LinearCodec:
    """A linear codec of 4 channels, fitted on noise."""
    generator = torch.Generator().manual_seed(seed)
    return LinearCodec.fit([torch.rand(3, 5, 16, 16, generator=generator) * 2 - 1 for _ in range(3)], 4)


def describe(
    root: Path, numbers: Sequence[int], texts: list[str], null_key: str, sources: Sequence[str] = ("clips",)
) -> None:
    """The tables and the codec that preprocess writes: sample `n` is of latent `n` and every caption."""
    fitted = codec()
    fitted.save(root / CODEC)
    keys = [entry_key(latent_parts(number)) for number in numbers]
    samples = [
        Sample(key, (latent,), tuple(texts), "train" if number else "val", BUCKET, f"{number}.mp4", 16, f"c{number}")
        for number, latent, key in zip(
            numbers, keys, number_duplicates(sample_key([k], texts) for k in keys), strict=True
        )
    ]
    vae = {"kind": "linear", "fingerprint": fitted.fingerprint, "channels": 4, "strides": [4, 8]}
    info = {
        "encoders": {"vae": vae, "text": {"kind": "minilm", "fingerprint": "t" * 64, "width": 6}},
        "made_for": {"fps": 8.0, "sources": [{"path": name, "name": name} for name in sources]},
        "fps": 8.0,
        "latent_dtype": "float32",
        "text_dtype": "bfloat16",
        "encoding_version": 2,
        "versions": {**VERSIONS, "generator": rng.VERSION},
        "config": "vae: {kind: linear, channels: 4}\n",
    }
    write_rejects(root, [("bad.mp4", "no_video", "no video stream"), (f"{sources[0]}.gif", "too_short", "3 frames")])
    write_info(root, info)
    write_samples(root, samples, null_key=null_key)


def build_whole(
    root: Path, numbers: Sequence[int] = range(12), shard_bytes: int = 6000, sources: Sequence[str] = ("clips",)
) -> None:
    """A cache of these latents in several shards, of two captions, with tables and codec."""
    with CacheWriter(root, shard_bytes) as writer:
        for number in numbers:
            add_latent(writer, number)
        texts = [add_text(writer, "a rabbit"), add_text(writer, "an owl in a tree", pooled=False)]
        null_key = add_text(writer, "", "null")
    describe(root, numbers, texts, null_key, sources)


def contents(root: Path) -> dict[str, str]:
    """What a reader gets: a digest of every sample, latent, caption, and of the codec. `error ...` where it is refused.

    Any exception but UserError goes through.
    """
    got: dict[str, str] = {}
    try:
        got["codec"] = LinearCodec.load(root / CODEC).fingerprint
    except UserError as error:
        got["codec"] = f"error {error}"
    try:
        cache = DatasetCache(root)
        samples = list(cache.samples)
    except UserError as error:
        return got | {"open": f"error {error}"}
    for sample in samples:
        got[f"sample {sample.key}"] = json.dumps({**vars(sample), "bucket": str(sample.bucket)}, sort_keys=True)
    wanted = {("latents", key) for sample in samples for key in sample.latent_keys}
    wanted |= {("texts", key) for sample in samples for key in sample.text_keys}
    for section, key in sorted(wanted):
        got[f"{section} {key}"] = _one(cache, section, key)
    got["null"] = _one(cache, "null", "")
    try:
        got["rejects"] = json.dumps(cache.rejects())
    except UserError as error:
        got["rejects"] = f"error {error}"
    return got


def _one(cache: DatasetCache, section: str, key: str) -> str:
    try:
        if section == "latents":
            tensors = cache.latent(key)
        else:
            text = cache.text(key) if section == "texts" else cache.null_text()
            tensors = {"embeds": text.embeds_LD} | ({} if text.pooled_D is None else {"pooled": text.pooled_D})
        return digest(b"".join(name.encode() + tensors[name].float().numpy().tobytes() for name in sorted(tensors)))
    except UserError as error:
        return f"error {error}"
