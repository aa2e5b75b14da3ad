"""Set up a build: list the sources, load the encoders, compare the processes, and fit the linear codec."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mmspeed import rng
from mmspeed.config import Config, dump_config
from mmspeed.config.leaves import flat
from mmspeed.data.cache.files import TEMP_SUFFIX, ReaderLock, held
from mmspeed.data.cache.keys import canonical_json, digest
from mmspeed.data.cache.made_from import DIGEST
from mmspeed.data.cache.tables import write_info, write_rejects
from mmspeed.data.cache.versions import VERSIONS
from mmspeed.data.cache.writer import repair
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, get_logger
from mmspeed.media.rejections import Rejection
from mmspeed.models.codecs.linear import LinearCodec
from mmspeed.preprocess.build.coordination import Agreement, locked
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Frames
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.preprocess.decoding.transform import to_model_range
from mmspeed.preprocess.encoding.encode import Encoders
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.keys import ENCODING_VERSION
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.preprocess.sources.made_from import made_from
from mmspeed.redaction import redacted
from mmspeed.version import __version__

log = get_logger("preprocess")


class BuildSetup:
    """The common first steps of all ways to build a cache.

    Args:
        config: the config of the cache.
        device: the device to encode on.
        world: number of processes that divide the work of a build; they must agree on it.

    Raises UserError if sources or the text encoder cannot be found.
    """

    def __init__(self, config: Config, device: Device, world: int = 1) -> None:
        self.config, self.root = config, config.local_cache_dir()
        self._lock: ReaderLock | None = None
        self.listing = list_sources(config.data)
        self.made_from = made_from(self.listing.sources)
        self.recipe = Recipe.of(config, self.listing.sources, builds=True)
        self.encoders = Encoders(config, device)
        self.agreement = self._agreement(world)

    def mend(self) -> None:
        """Create the cache's folder and clean up after killed writers, one process at a time.

        From here on, until `close`, no command removes entries. Raises BusyError while one does.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"data.cache: {self.root} is a file, or in one; name a folder") from None
        self._lock = ReaderLock(self.root)
        with locked(self.root / ".mend.lock", "waiting for another process to repair the cache"):
            repair(self.root)
            for folder in (self.root / "parts").glob("online-*"):
                if not any(held(path) for path in folder.glob(f".*{TEMP_SUFFIX}")) and _older(folder, 60.0):
                    self.remove_parts(folder.name)

    def close(self) -> None:
        """Release the lock of the cache."""
        if self._lock is not None:
            self._lock.close()

    def require_same(self, seen: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError, the same in every process, if they do not agree; `seen` are their agreements as JSON."""
        for rank, other in enumerate(seen):
            Agreement.from_json(other).require_same(seen[0], rank)

    def remove_parts(self, name: str) -> None:
        """Delete `parts/<name>` of the cache."""
        shutil.rmtree(self.root / "parts" / name, ignore_errors=True)
        with suppress(OSError):
            (self.root / "parts").rmdir()  # stays while other builds have parts in it

    def fit_when_missing(self) -> None:
        """Fit the linear codec if the cache has none yet: the first process does, while the others wait.

        Raises UserError if no clip can be decoded, or if the config names a file that does not exist.
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
        """Raise UserError for a bucket that the codec's strides do not divide, and for captions that belong to no one picture."""
        if self.encoders.sees_pictures and self.config.data.variants == "draw":
            raise UserError(
                "data.variants: the model's text encoder sees the first frame beside the caption, so each variant has captions of its own: "
                "use each"
            )
        for bucket in self.config.buckets:
            try:
                self.encoders.strides.latent(bucket)
            except ValueError as error:
                raise UserError(f"data.buckets: {bucket} does not fit the codec: {error}") from None

    def write_info(self) -> None:
        """Write `cache.json`, and the record of the sources."""
        self.made_from.write(self.root)
        write_info(self.root, self.info())

    def info(self) -> dict[str, Any]:
        """The content of `cache.json`."""
        config, encoders = self.config, self.encoders
        strides = encoders.strides
        codec: dict[str, Any] = {
            "kind": config.vae.kind,
            "fingerprint": encoders.codec_fingerprint,
            "channels": encoders.channels,
            "strides": [strides.temporal, strides.spatial],
        }
        text = {"kind": config.text.kind, "fingerprint": encoders.text_fingerprint, "width": encoders.text_width}
        return {
            "created_with": __version__,
            "encoders": {"vae": codec, "text": text},
            "build": self.agreement.id,
            "made_for": config.sample_settings(),
            "fps": config.data.fps,
            "latent_dtype": config.preprocess.latent_dtype,
            "text_dtype": config.preprocess.text_dtype,
            "encoding_version": ENCODING_VERSION,
            "versions": dict(VERSIONS),
            "config": redacted(dump_config(config)),
            DIGEST: self.made_from.digest,
        }

    def _agreement(self, world: int) -> Agreement:
        config = self.config
        listing, stamp = hashlib.sha256(), hashlib.sha256()
        for source in self.listing.sources:
            listed = self.made_from.sources[source.name]
            words = (source.captions, listed.words) if source.roles else source.captions
            listing.update(f"{source.name}\0{listed.bytes}\0{words}\n".encode("utf-8", "surrogatepass"))
            stamp.update(f"{listed.changed}\n".encode())
        settings = {
            "version": ENCODING_VERSION,
            "generator": rng.VERSION,
            "made_for": config.sample_settings(),
            "versions": {name: version for name, version in VERSIONS.items() if name != "generator"},
            "dtypes": [config.preprocess.latent_dtype, config.preprocess.text_dtype],
            "world": world,
        }
        content = digest(f"{listing.hexdigest()} {canonical_json(settings)}".encode())
        count, encoder = len(self.listing.sources), self.encoders.text_fingerprint
        dtypes = {name: getattr(config.preprocess, name) for name in ("latent_dtype", "text_dtype")}
        named = {name: settings[name] for name in ("version", "generator", "versions", "world")}
        named |= {"data": settings["made_for"], "preprocess": dtypes}
        return Agreement(count, content, encoder, stamp.hexdigest(), flat(named))

    def _fit(self, channels: int, count: int) -> tuple[LinearCodec, int]:
        """Fit a codec on the first clip of some sources, selected by the listing alone; return it with their number."""
        sources = self.listing.sources
        selected = sources[:: max(1, len(sources) // count)][:count]
        refused: list[Rejection] = []

        def videos() -> Iterator[torch.Tensor]:
            last_name = ""
            with (
                DecodePool(self.config, selected, self.recipe) as pool,
                ProgressLine("fit codec", len(selected), "clip") as line,
            ):
                for event in pool.run(lambda clip: clip.role == "video" and clip.window == clip.crop_number == 0):
                    if isinstance(event, Failed):
                        refused.append(event.rejected.of(event.source.name))
                    if isinstance(event, Frames) and event.source.name != last_name:
                        last_name = event.source.name
                        line.advance()
                        yield to_model_range(event.frames_FHWC)

        try:
            return LinearCodec.fit(videos(), channels), len(selected)
        except (ValueError, UserError) as error:
            if len({rejection.source for rejection in refused}) < len(selected):
                raise UserError(f"the linear codec could not be fitted: {error}") from None
            report = BuildReport.of(self.root, self.listing)
            report.rejections = [*self.listing.rejections, *refused]
            write_rejects(self.root, [(r.source, r.reason.value, r.detail) for r in report.rejections])
            report.require_some()
            raise


def _older(path: Path, seconds: float) -> bool:
    """True if a file or folder was last changed more than `seconds` ago."""
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:
        return False
