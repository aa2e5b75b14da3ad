"""From sources to the dataset cache: probe -> bucket -> decode -> encode -> write, one pass, resumable.

Every process of a run (torchrun or `--nproc`) lists the same sources and takes its share of them; the entries and their bytes do not
depend on how many processes there are. Decoders run in child processes beside the encoder (worker.py), a bounded number of clips ahead.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspeed import comm
from mmspeed.config import Bucket, Config, dump_config
from mmspeed.data import (
    CacheWriter,
    Sample,
    entry_key,
    latent_tensors,
    number_duplicates,
    repair,
    sample_key,
    text_tensors,
    write_info,
    write_rejects,
    write_samples,
)
from mmspeed.device import Device, is_device_fault, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, get_logger
from mmspeed.mesh import patient_group, process_group
from mmspeed.models.linear_codec import LinearCodec
from mmspeed.models.text import load_text_encoder, text_identity, text_width
from mmspeed.models.vae import load_codec
from mmspeed.preprocess.pool import DecodePool
from mmspeed.preprocess.reasons import Reason, Rejected, Rejection
from mmspeed.preprocess.report import BuildReport
from mmspeed.preprocess.select import Clip, split_of
from mmspeed.preprocess.source import Source
from mmspeed.preprocess.sources import list_sources
from mmspeed.preprocess.transform import resize_crop, to_model_range
from mmspeed.protocol import Posterior, VideoCodec
from mmspeed.version import __version__

log = get_logger("preprocess")

ENCODING_VERSION = 1  # part of every key: raise it when the way from file to entry changes its numbers


def latent_parts(config: Config, codec_fingerprint: str, clip: Clip) -> dict[str, Any]:
    """What a latent's key covers (law 5)."""
    return {
        "version": ENCODING_VERSION,
        "content": clip.content_id,
        "frames": list(clip.indices),
        "crop": list(clip.crop),
        "bucket": clip.bucket.name,
        "fps": clip.fps,
        "codec": codec_fingerprint,
        "dtype": config.preprocess.latent_dtype,
    }


def text_parts(config: Config, text_fingerprint: str, caption: str) -> dict[str, Any]:
    """What a text's key covers."""
    return {
        "version": ENCODING_VERSION,
        "caption": caption,
        "encoder": text_fingerprint,
        "dtype": config.preprocess.text_dtype,
    }


class CacheBuilder:
    """Builds or completes the dataset cache of a config. `run()` returns what became of every source.

    Raises UserError when the config's sources, codec or text encoder cannot be read, when the disk is full, and when not a
    single source could be encoded.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))

    def run(self) -> BuildReport:
        device = pick(self.config.device.kind)
        device.activate()
        with process_group(device) if self.world > 1 else nullcontext():
            self.group = patient_group()
            return self._run(device)

    def _run(self, device: Device) -> BuildReport:
        started = time.monotonic()
        config, root = self.config, self.config.cache_dir
        listing = list_sources(config.data)
        self._check_same_sources(listing.sources)
        root.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            repair(root)
        comm.barrier(self.group)
        report = BuildReport(root=root, files=listing.files, sources=len(listing.sources), ignored=listing.ignored)
        report.captions_cut, report.captions_repaired = listing.captions_cut, listing.captions_repaired
        if self.rank == 0:
            report.rejections += listing.rejections
        codec = self._codec(device, listing.sources, report)
        self._check_buckets(codec)
        shard_bytes = int(config.preprocess.shard_mb * 1e6)
        self.text_fingerprint = text_identity(config.text)  # once: it reads the encoder's files
        with CacheWriter(root, shard_bytes, mend=False) as writer:
            width = self._encode_null(writer, report, device)
            clips = self._encode_clips(listing.sources[self.rank :: self.world], codec, writer, report)
            self._encode_captions(clips, writer, report, device)
        self._finish(clips, codec, width, report)
        report.seconds = time.monotonic() - started
        report.require_some()
        return report

    def _check_same_sources(self, sources: list[Source]) -> None:
        """Raises UserError when the processes see different files: each takes its share by its own list."""
        names = hashlib.sha256(
            "\n".join(source.name for source in sources).encode("utf-8", "surrogatepass")
        ).hexdigest()
        seen = comm.all_gather_objects([len(sources), names], self.group)
        if any(other != seen[0] for other in seen):
            counts = sorted({count for count, _ in seen})
            raise UserError(
                f"the processes see different sources ({counts} of them): is every path on a shared file system?"
            )

    # -- the codec ------------------------------------------------------------------------------------------------

    def _codec(self, device: Device, sources: list[Source], report: BuildReport) -> VideoCodec:
        """The config's codec; the linear one is fitted by rank 0 when the cache has none yet."""
        weights = self.config.codec_weights
        if weights is not None and self.rank == 0 and not weights.exists():
            if self.config.vae.kind == "linear" and self.config.vae.weights:
                raise UserError(f"vae.weights: {weights} does not exist; leave it out to fit a codec on these clips")
            self._fit(weights, sources, report)
        comm.barrier(self.group)
        return load_codec(self.config.vae, device, weights)

    def _fit(self, weights: Path, sources: list[Source], report: BuildReport) -> None:
        assert self.config.vae.kind == "linear"
        wanted = self.config.vae.fit_clips
        step = max(1, len(sources) // wanted)
        chosen = sources[::step][:wanted]
        refused: list[Rejection] = []

        def videos() -> Iterator[torch.Tensor]:
            with DecodePool(self.config, chosen) as pool, ProgressLine("fit codec", len(chosen), "clip") as line:
                for source, clip, frames in pool.clips(lambda clip: True):
                    line.advance()
                    if isinstance(clip, Rejected):
                        refused.append(Rejection(source.name, clip.reason, clip.detail))
                    elif frames is not None:
                        yield to_model_range(resize_crop(frames, clip.bucket))

        try:
            codec = LinearCodec.fit(videos(), self.config.vae.channels)
        except (ValueError, UserError) as error:
            if len(refused) < len(chosen):
                raise UserError(f"the linear codec could not be fitted: {error}") from None
            report.rejections += refused
            write_rejects(report.root, [(r.source, r.reason.value, r.detail) for r in report.rejections])
            report.require_some()
            raise
        codec.save(weights)  # the first of two processes that fit at once is kept, and both load that one
        log.info(f"fitted the linear codec on {len(chosen)} clips: {weights}")

    def _check_buckets(self, codec: VideoCodec) -> None:
        for bucket in self.config.buckets:
            try:
                codec.strides.latent(bucket)
            except ValueError as error:
                raise UserError(f"data.buckets: {bucket} does not fit the codec: {error}") from None

    # -- latents --------------------------------------------------------------------------------------------------

    def _encode_clips(
        self, sources: list[Source], codec: VideoCodec, writer: CacheWriter, report: BuildReport
    ) -> list[tuple[Source, Clip, str]]:
        """Encode what is missing; every source comes back as a (source, clip, key) or in `report.rejections`."""
        dtype = parse_dtype(self.config.preprocess.latent_dtype)
        done: list[tuple[Source, Clip, str]] = []
        keys: dict[str, str] = {}

        def missing(clip: Clip) -> bool:
            key = keys.setdefault(clip.source.name, entry_key(latent_parts(self.config, codec.fingerprint, clip)))
            return not writer.has("latents", key)

        with DecodePool(self.config, sources) as pool, ProgressLine("latents", len(sources), "clip") as line:
            for source, clip, frames in pool.clips(missing):
                line.advance()
                if isinstance(clip, Rejected):
                    report.rejections.append(Rejection(source.name, clip.reason, clip.detail))
                    continue
                key = keys[source.name]
                if frames is None or writer.has("latents", key):
                    report.reused += 1
                else:
                    video = to_model_range(resize_crop(frames, clip.bucket))
                    try:
                        posterior = codec.encode(video[None])
                        _require_finite(posterior)
                    except (RuntimeError, ValueError) as error:
                        if is_device_fault(error):  # no fault of the file
                            raise UserError(
                                f"the device failed while encoding {source.name} ({str(error).splitlines()[0]}); "
                                "when its memory is full set vae.tiling: true, or use smaller buckets"
                            ) from error
                        report.rejections.append(
                            Rejection(source.name, Reason.ENCODE_FAILED, str(error).splitlines()[0])
                        )
                        continue
                    self._write_latent(writer, key, clip, codec, posterior, dtype)
                    report.encoded += 1
                    report.seconds_of_video += clip.seconds
                    report.decoders[clip.decoder] += 1
                done.append((source, clip, key))
        return done

    def _write_latent(
        self, writer: CacheWriter, key: str, clip: Clip, codec: VideoCodec, posterior: Posterior, dtype: torch.dtype
    ) -> None:
        logvar = posterior.logvar_BCThw
        tensors = latent_tensors(posterior.mean_BCThw[0].to(dtype), None if logvar is None else logvar[0].to(dtype))
        writer.add(
            "latents",
            key,
            tensors,
            latent_parts(self.config, codec.fingerprint, clip),
            bucket=clip.bucket,
            tokens=int(np.prod(codec.strides.latent(clip.bucket))),
            content_id=clip.content_id,
            frames=list(clip.indices),
            fps=clip.fps,
            source=clip.source.name,
        )

    # -- texts ----------------------------------------------------------------------------------------------------

    def _text_parts(self, caption: str) -> dict[str, Any]:
        return text_parts(self.config, self.text_fingerprint, caption)

    def _encode_null(self, writer: CacheWriter, report: BuildReport, device: Device) -> int:
        """Encode the empty caption, before the long work: what is wrong with the text encoder shows now. Returns its width."""
        key = entry_key(self._text_parts(""))
        there = writer.has("null", key)
        if self.rank == 0:
            report.texts, report.texts_reused = int(not there), int(there)
            if not there:
                self._encode_texts([(key, "", "null")], writer, device)
        return text_width(self.config.text)

    def _encode_captions(
        self, clips: list[tuple[Source, Clip, str]], writer: CacheWriter, report: BuildReport, device: Device
    ) -> None:
        """Encode each distinct caption of all processes' clips once; a process takes its share by key."""
        mine = sorted({caption for source, _, _ in clips for caption in source.captions})
        captions = sorted({caption for part in comm.all_gather_objects(mine, self.group) for caption in part})
        rows = [(entry_key(self._text_parts(c)), c, "texts") for c in captions]
        share = [row for row in rows if int(row[0][:8], 16) % self.world == self.rank]
        todo = [row for row in share if not writer.has("texts", row[0])]
        report.texts += len(todo)
        report.texts_reused += len(share) - len(todo)
        if todo:
            report.captions_truncated = self._encode_texts(todo, writer, device)

    def _encode_texts(self, rows: list[tuple[str, str, str]], writer: CacheWriter, device: Device) -> int:
        """Encode (key, caption, section) rows; returns how many captions the encoder cut to its length limit."""
        dtype = parse_dtype(self.config.preprocess.text_dtype)
        encoder = load_text_encoder(self.config.text, device)
        with ProgressLine("captions", len(rows), "caption") as line:
            for key, caption, section in rows:
                entry = encoder.encode([caption])[0]
                tensors = {name: tensor.to(dtype) for name, tensor in text_tensors(entry).items()}
                writer.add(section, key, tensors, self._text_parts(caption))
                line.advance()
        return getattr(encoder, "truncated", 0)

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(
        self, clips: list[tuple[Source, Clip, str]], codec: VideoCodec, width: int, report: BuildReport
    ) -> None:
        """Gather every process's part; rank 0 writes the samples, the rejects and cache.json."""
        rows = [
            {
                "latent_key": key,
                "text_keys": [entry_key(self._text_parts(c)) for c in source.captions],
                "split": split_of(source, clip.content_id, self.config.data, self.config.seed),
                "bucket": clip.bucket.name,
                "source": source.name,
                "content_id": clip.content_id,
            }
            for source, clip, key in clips
        ]
        gathered = [row for part in comm.all_gather_objects(rows, self.group) for row in part]
        report.merge([BuildReport.from_json(part) for part in comm.all_gather_objects(report.to_json(), self.group)])
        if self.rank == 0:
            gathered.sort(key=lambda row: row["source"])
            keys = number_duplicates(sample_key([row["latent_key"]], row["text_keys"]) for row in gathered)
            samples = [
                Sample(
                    key=key,
                    latent_keys=(row["latent_key"],),
                    text_keys=tuple(row["text_keys"]),
                    split=row["split"],
                    bucket=Bucket.parse(row["bucket"]),
                    source=row["source"],
                    content_id=row["content_id"],
                    tokens=int(np.prod(codec.strides.latent(Bucket.parse(row["bucket"])))),
                )
                for key, row in zip(keys, gathered, strict=True)
            ]
            report.count_samples(samples)
            write_rejects(report.root, [(r.source, r.reason.value, r.detail) for r in report.rejections])
            write_info(report.root, self._info(codec, width))
            write_samples(report.root, samples, null_key=entry_key(self._text_parts("")))
        comm.barrier(self.group)

    def _info(self, codec: VideoCodec, width: int) -> dict[str, Any]:
        config = self.config
        return {
            "created_with": __version__,
            "encoders": {
                "vae": {
                    "kind": config.vae.kind,
                    "fingerprint": codec.fingerprint,
                    "channels": codec.channels,
                    "strides": [codec.strides.temporal, codec.strides.spatial],
                },
                "text": {"kind": config.text.kind, "fingerprint": self.text_fingerprint, "width": width},
            },
            "made_for": config.samples_made_for(),
            "fps": config.data.fps,
            "latent_dtype": config.preprocess.latent_dtype,
            "text_dtype": config.preprocess.text_dtype,
            "encoding_version": ENCODING_VERSION,
            "config": dump_config(config),
        }


def _require_finite(posterior: Posterior) -> None:
    for name, tensor in (("mean", posterior.mean_BCThw), ("log-variance", posterior.logvar_BCThw)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the codec's {name} holds numbers that are not finite")
