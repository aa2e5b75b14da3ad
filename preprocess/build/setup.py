"""What stands before any encoding: the list of sources, the encoders, what processes must agree on, and the linear codec."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mmspeed.config import Config, dump_config
from mmspeed.data.cache.files import TEMP_SUFFIX, ReaderLock, held
from mmspeed.data.cache.keys import canonical_json, digest
from mmspeed.data.cache.tables import write_info, write_rejects
from mmspeed.data.cache.writer import repair
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, get_logger
from mmspeed.models.codecs.linear import LinearCodec
from mmspeed.preprocess.build.coordination import Agreement, locked
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Frames
from mmspeed.preprocess.decoding.transform import to_model_range
from mmspeed.preprocess.encoding.encode import Encoders
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.keys import ENCODING_VERSION
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.preprocess.sources.rejections import Rejection
from mmspeed.preprocess.sources.source import Source
from mmspeed.version import __version__

log = get_logger("preprocess")


class BuildSetup:
    """What every way of making a cache begins with.

    Args:
        config: what is built.
        device: what encodes.
        world: number of processes of a build that share out the work by their number; they must agree on it.

    Raises UserError when sources or the text encoder cannot be found.
    """

    def __init__(self, config: Config, device: Device, world: int = 1) -> None:
        self.config, self.root = config, config.local_cache_dir()
        self._lock: ReaderLock | None = None
        self.listing = list_sources(config.data)
        self.encoders = Encoders(config, device)
        self.agreement = self._agreement(world)

    def mend(self) -> None:
        """Make the cache's folder, and mend what killed writers have left in it. One process at a time does, others wait.

        From here on, until `close`, no command takes entries away. Raises BusyError while one does.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"data.cache: {self.root} is a file, or in one; name a folder") from None
        self._lock = ReaderLock(self.root)
        with locked(self.root / ".mend.lock", "waiting for another process to mend the cache"):
            repair(self.root)
            for folder in (self.root / "parts").glob("online-*"):
                if not any(held(path) for path in folder.glob(f".*{TEMP_SUFFIX}")) and _older(folder, 60.0):
                    self.remove_parts(folder.name)

    def close(self) -> None:
        """Let go of the cache."""
        if self._lock is not None:
            self._lock.close()

    def require_same(self, seen: Sequence[Mapping[str, Any]]) -> None:
        """Raises UserError, the same in every process, when they see different things; `seen` are their agreements as JSON."""
        for rank, other in enumerate(seen):
            Agreement.from_json(other).require_same(seen[0], rank)

    def remove_parts(self, name: str) -> None:
        """Delete `parts/<name>` of the cache."""
        shutil.rmtree(self.root / "parts" / name, ignore_errors=True)
        with suppress(OSError):
            (self.root / "parts").rmdir()  # stays while other builds have parts in it

    def fit_when_missing(self) -> None:
        """Fit the linear codec when the cache has none yet: whichever process comes first does, while the others wait.

        Raises UserError when no clip can be decoded, or when the config names a file that does not exist.
        """
        weights, vae = self.config.codec_weights, self.config.vae
        if weights is None or vae.kind != "linear" or weights.exists():
            return
        if vae.weights:
            raise UserError(f"vae.weights: {weights} does not exist; leave it out to fit a codec on these clips")
        with locked(weights.parent / ".fit.lock", "waiting for another process to fit the linear codec"):
            if not weights.exists():
                codec, clips = self._fit(vae.channels, vae.fit_clips)
                codec.save(weights)
                log.info(f"fitted the linear codec on {clips} clips: {weights}")

    def check_buckets(self) -> None:
        """Raises UserError for a bucket that the codec's strides do not divide."""
        for bucket in self.config.buckets:
            try:
                self.encoders.strides.latent(bucket)
            except ValueError as error:
                raise UserError(f"data.buckets: {bucket} does not fit the codec: {error}") from None

    def write_info(self) -> None:
        """Write `cache.json`."""
        config, encoders = self.config, self.encoders
        strides = encoders.strides
        codec: dict[str, Any] = {
            "kind": config.vae.kind,
            "fingerprint": encoders.codec_fingerprint,
            "channels": encoders.channels,
            "strides": [strides.temporal, strides.spatial],
        }
        text = {"kind": config.text.kind, "fingerprint": encoders.text_fingerprint, "width": encoders.text_width}
        info = {
            "created_with": __version__,
            "encoders": {"vae": codec, "text": text},
            "build": self.agreement.id,
            "made_for": config.samples_made_for(),
            "fps": config.data.fps,
            "latent_dtype": config.preprocess.latent_dtype,
            "text_dtype": config.preprocess.text_dtype,
            "encoding_version": ENCODING_VERSION,
            "config": dump_config(config),
        }
        write_info(self.root, info)

    def _agreement(self, world: int) -> Agreement:
        config = self.config
        listing, stamp = hashlib.sha256(), hashlib.sha256()
        for source in self.listing.sources:
            size, changed = _stat(source)
            listing.update(f"{source.name}\0{size}\0{source.captions}\n".encode("utf-8", "surrogatepass"))
            stamp.update(f"{changed}\n".encode())
        settings = {
            "version": ENCODING_VERSION,
            "made_for": config.samples_made_for(),
            "dtypes": [config.preprocess.latent_dtype, config.preprocess.text_dtype],
            "world": world,
        }
        seen = digest(f"{listing.hexdigest()} {canonical_json(settings)}".encode())
        return Agreement(len(self.listing.sources), seen, self.encoders.text_fingerprint, stamp.hexdigest())

    def _fit(self, channels: int, wanted: int) -> tuple[LinearCodec, int]:
        """A codec fitted on the first clip of some sources, and how many: which ones depends on the listing alone."""
        sources = self.listing.sources
        chosen = sources[:: max(1, len(sources) // wanted)][:wanted]
        refused: list[Rejection] = []

        def videos() -> Iterator[torch.Tensor]:
            used = ""
            with DecodePool(self.config, chosen) as pool, ProgressLine("fit codec", len(chosen), "clip") as line:
                for event in pool.run(lambda clip: clip.window == 0 and clip.crop_number == 0):
                    if isinstance(event, Failed):
                        refused.append(event.rejected.of(event.source.name))
                    if isinstance(event, Frames) and event.source.name != used:
                        used = event.source.name
                        line.advance()
                        yield to_model_range(event.frames_FHWC)

        try:
            return LinearCodec.fit(videos(), channels), len(chosen)
        except (ValueError, UserError) as error:
            if len({rejection.source for rejection in refused}) < len(chosen):
                raise UserError(f"the linear codec could not be fitted: {error}") from None
            report = BuildReport.of(self.root, self.listing)
            report.rejections = [*self.listing.rejections, *refused]
            write_rejects(self.root, [(r.source, r.reason.value, r.detail) for r in report.rejections])
            report.require_some()
            raise


def _older(path: Path, seconds: float) -> bool:
    """Whether a file or folder was last changed so long ago."""
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:
        return False


def _stat(source: Source) -> tuple[int, int]:
    """Bytes of a source, and when its file was last changed, in nanoseconds; -1 when they cannot be told."""
    try:
        on_disk = os.stat(source.path)
    except (OSError, ValueError):
        return -1, -1
    return on_disk.st_size if source.size is None else source.size, on_disk.st_mtime_ns
