"""Build the dataset cache from sources: probe -> bucket -> decode -> encode -> write, in one resumable pass.

Every process of a build lists the same sources and takes its share of them, and its share of all captions; the entries, their
bytes and the table of samples do not depend on how many processes there are. They coordinate through files in the cache alone
(coordination.py). Within a process decoding, encoding and writing overlap (encoding/latent_stage.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from mmspeed.config import RunConfig, video_config
from mmspeed.data import CacheWriter
from mmspeed.data.cache.index import compile_index
from mmspeed.data.cache.keys import canonical_json, digest
from mmspeed.data.cache.splits import copies_of_held_out
from mmspeed.data.cache.tables import SAMPLES_FILE, read_info, read_rejects, read_samples, write_rejects, write_samples
from mmspeed.device import parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_bytes, get_logger
from mmspeed.media.rejections import Reason, Rejected, Rejection
from mmspeed.preprocess.build.coordination import BuildCoordinator, ProcessRecord, WorkShare, locked
from mmspeed.preprocess.build.setup import BuildSetup
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import Encoders, TrustedBatches, encode_texts, text_entry
from mmspeed.preprocess.encoding.latent_stage import LatentStage
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.keys import TRANSFORM
from mmspeed.preprocess.records.sample_table import ClipRow, caption_rejections, kept_captions, samples_of_rows
from mmspeed.preprocess.records.stale_entries import StoredEntries
from mmspeed.preprocess.records.statistics import DataStatistics
from mmspeed.preprocess.report.page import default_path, read_record, write_build_page

log = get_logger("preprocess")


class CacheBuilder:
    """Build or complete the dataset cache of a config. `run()` returns the outcome of every source.

    Args:
        config: the config of the cache.
        shard: the part of a job array for this process, such as `3/8`; None: its launcher's share, or all.

    Under a launcher `run()` returns in every process when the cache is complete, with the counts of all; with `shard` it returns
    when the part is done, and completes the cache if all other parts exist. Raises UserError if the config's sources,
    codec or text encoder cannot be read, if the disk is full, and if no source could be encoded.
    """

    def __init__(self, config: RunConfig, shard: str | None = None) -> None:
        self.config = video_config(config, "CacheBuilder")
        self.root = self.config.local_cache_dir()
        self.share = WorkShare.of(shard)

    def run(self) -> BuildReport:
        """Do this process's share, and complete the cache if this process is responsible for it."""
        self._started = time.monotonic()
        device = pick(self.config.device.kind)
        device.activate()
        self.setup = BuildSetup(self.config, device, self.share.world)
        self.encoders, self.listing = self.setup.encoders, self.setup.listing
        with closing(self.setup):
            return self._run()

    def _run(self) -> BuildReport:
        if not self.share.launched or self.share.rank == 0:
            self.setup.mend()
        idle = idle_report(self.setup) if self.share.world == 1 else None
        if idle is not None:
            idle.seconds = time.monotonic() - self._started
            return idle
        with BuildCoordinator(self.root, self.share, self.setup.agreement) as parts:
            self.setup.fit_when_missing()
            self.setup.check_buckets()
            report = BuildReport.of(self.root, self.listing)
            return self._end(parts, self._work(report), report)

    # -- the work -------------------------------------------------------------------------------------------------

    def _work(self, report: BuildReport) -> ProcessRecord:
        """Encode this process's share: the texts, then, with the text encoder out of memory, the latents.

        Texts whose encoder sees a clip's first frame are encoded with the latents.
        """
        if self.share.rank == 0:
            report.rejections += self.listing.rejections
        shard_bytes = int(self.config.preprocess.shard_mb * 1e6)
        with CacheWriter(self.root, shard_bytes, mend=False) as writer:
            with BackgroundWriter(writer, remember=False) as store:
                stage = LatentStage(self.config, self.encoders, store, report, recipe=self.setup.recipe)
                failures = self._encode_texts(store, report, stage.statistics)
                rows = stage.run(self.listing.sources[self.share.rank :: self.share.world])
                failures |= stage.failed_captions
        facts = {
            "codec": self.encoders.codec_fingerprint,
            "report": report.to_json(),
            "statistics": stage.statistics.to_json(),
            "captions_failed": failures,
        }
        return ProcessRecord(rows, facts)

    def _encode_texts(self, store: BackgroundWriter, report: BuildReport, statistics: DataStatistics) -> dict[str, str]:
        """Encode this process's share of all listed captions, and the empty one by process 0; the failures by key.

        Shares go by key, so that each distinct caption is encoded once and no process waits for another. Captions of sources that
        will be rejected are encoded too: rejections are not known yet.
        """
        todo = [""] if self.share.rank == 0 and not store.has("null", self.encoders.text_key("")) else []
        report.texts_reused += self.share.rank == 0 and not todo
        seen: set[str] = set()
        for source in self.listing.sources:
            for caption in () if self.encoders.sees_pictures else source.captions:
                key = self.encoders.text_key(caption)
                if self.share.takes(key) and key not in seen:
                    seen.add(key)
                    if store.has("texts", key):
                        report.texts_reused += 1
                    else:
                        todo.append(caption)
        if not todo:
            return {}
        failures = encode_captions(self.encoders, todo, store, report, statistics)
        before, after = self.encoders.free("text")
        log.debug("text encoder freed: %s in use before, %s after", format_bytes(before), format_bytes(after))
        return failures

    # -- the end --------------------------------------------------------------------------------------------------

    def _end(self, parts: BuildCoordinator, part: ProcessRecord, report: BuildReport) -> BuildReport:
        """Merge the processes' parts, if this process is responsible for it."""
        if self.share.world == 1:
            return conclude(self.setup, [part], report, self._started)
        parts.leave(part)
        if self.share.launched and self.share.rank == 0:
            parts.await_all()
            report = conclude(self.setup, self._checked(parts), report, self._started)
            parts.conclude(report.to_json() | {"buckets": report.buckets, "splits": report.splits})
            return report
        if self.share.launched:
            end = parts.await_end()
            report.merge([BuildReport.from_json(end)])
            report.buckets.update(end["buckets"])
            report.splits.update(end["splits"])
            report.seconds = time.monotonic() - self._started
            return report
        return self._end_of_array(parts, report)

    def _end_of_array(self, parts: BuildCoordinator, report: BuildReport) -> BuildReport:
        """End one part of a job array; complete the cache if it was the last."""
        with locked(self.root / f".{parts.place.name}.lock", "waiting for another process to finish the cache"):
            missing = parts.missing()
            if not missing:
                report = conclude(self.setup, self._checked(parts), report, self._started)
                parts.remove()
                return report
            # If a part has encoded something new, the tables must include it: then the others must be run again too.
            finished = len(missing) >= self.share.world - 1 and not report.clips_encoded and self._finished()
            if finished:  # by another part that ended at the same time, or by an earlier run
                parts.remove()
        report.part = self.share.rank, self.share.world
        report.parts_missing = 0 if finished else len(missing)
        report.seconds = time.monotonic() - self._started
        return report

    def _checked(self, parts: BuildCoordinator) -> list[ProcessRecord]:
        """Read the parts of all processes. Raises UserError if one used another codec, or its entries are missing."""
        records = parts.read()
        stored, failures = StoredEntries(self.root), caption_failures(records)
        for rank, part in enumerate(records):
            advice = f"run part {rank + 1} of {self.share.world} again"
            if part.facts["codec"] != self.encoders.codec_fingerprint:
                raise UserError(f"process {rank} has another codec than process {self.share.rank}; {advice}")
            require_stored(part, stored, failures, f"of part {rank + 1}", advice)
        return records

    def _finished(self) -> bool:
        """True if a build of the same sources and settings has completed the cache."""
        tables = (self.root / "cache.json", self.root / SAMPLES_FILE)
        return all(path.exists() for path in tables) and read_info(self.root).get("build") == self.setup.agreement.id


def encode_captions(
    encoders: Encoders,
    captions: Sequence[str],
    store: BackgroundWriter,
    report: BuildReport,
    statistics: DataStatistics,
) -> dict[str, str]:
    """Encode and store captions, also the empty one; return the details of those that cannot be encoded, by key."""
    failures: dict[str, str] = {}
    config, encoder = encoders.config.preprocess, encoders.text
    trusted = TrustedBatches(config.text_batch, config.exact_batches)
    itemsize = parse_dtype(config.text_dtype).itemsize
    with ProgressLine("captions", len(captions), "caption") as line, report.counting_captions(encoder, itemsize):
        for caption, tensors in encode_texts(encoders, trusted, captions):
            line.advance()
            if isinstance(tensors, Rejected):
                failures[encoders.text_key(caption)] = tensors.detail
                continue
            entry = text_entry(encoders, caption, tensors, "texts" if caption else "null")
            store.add(**entry)
            if caption:
                statistics.add_caption_tokens(entry["tokens"])
    report.texts += len(captions) - len(failures)
    report.texts_failed += len(failures)
    report.text_batches += trusted.counts
    return failures


def caption_failures(parts: Iterable[ProcessRecord]) -> dict[str, str]:
    """The captions that no process could encode: the detail of each, by key."""
    return {key: detail for part in parts for key, detail in part.facts.get("captions_failed", {}).items()}


def require_stored(part: ProcessRecord, stored: StoredEntries, failures: Container[str], whose: str, then: str) -> None:
    """Raise UserError if an entry that a part lists is not in the cache; `whose` and `then` complete the message.

    `failures` holds the keys of captions that could not be encoded.
    """
    latents, texts = stored.keys["latents"], stored.keys["texts"]
    lost = sum(
        not latents.issuperset(row.latent_keys)
        or any(key not in texts and key not in failures for key in row.text_keys)
        for row in part.rows
    )
    if lost:
        raise UserError(f"{lost} clips {whose} are not in the cache (any more); {then}")


def conclude(setup: BuildSetup, parts: Sequence[ProcessRecord], report: BuildReport, started: float) -> BuildReport:
    """Write the tables and the page of the complete cache from all parts; `report` becomes that of the whole build.

    `started` is the time of its start, by `time.monotonic`. Raises UserError if no source is in the cache.
    """
    config, root, encoders = setup.config, setup.root, setup.encoders
    report.merge([BuildReport.from_json(part.facts["report"]) for part in parts])
    statistics = DataStatistics()
    for part in parts:
        statistics.merge(DataStatistics.from_json(part.facts["statistics"]))
    rows = [row for part in parts for row in part.rows]
    rows = reject_captions(rows, caption_failures(parts), report, statistics)
    samples = samples_of_rows(rows, config.data, encoders.strides)
    report.count_samples(samples)
    report.held_out_copies = sorted({row.source for row in copies_of_held_out(rows)})
    write_rejects(root, [(r.source, r.reason.value, r.detail) for r in report.rejections])
    write_samples(root, samples, encoders.text_key(""))
    setup.write_info()  # last: what it records holds of the samples
    compile_index(root)
    report.seconds = time.monotonic() - started
    report.require_some()
    sizes = encoders.channels, encoders.strides
    write_build_page(config, setup.listing, statistics, report, samples, *sizes, state=state_of(setup))
    return report


def reject_captions(
    rows: Sequence[ClipRow], failures: Mapping[str, str], report: BuildReport, statistics: DataStatistics
) -> list[ClipRow]:
    """The rows without captions that could not be encoded; sources that have no other are rejected, all are counted and named."""
    if not failures:
        return list(rows)
    by_source = {row.source: row for row in sorted(rows, key=lambda row: row.order)}
    rejected = set()
    for row in by_source.values():
        rejections = caption_rejections(row.source, row.text_keys, failures)
        report.rejections += rejections
        if rejections and all(key in failures for key in row.text_keys):
            rejected.add(row.source)
            report.rejected += 1
            report.encoded -= row.encoded
            report.reused -= not row.encoded
            statistics.add_rejection(rejections[0])
        else:
            for rejection in rejections:
                statistics.add_rejected_caption(rejection)
    return [
        replace(row, text_keys=kept_captions(row.text_keys, failures)) for row in rows if row.source not in rejected
    ]


# rejections that may be of the moment: a build tries these sources again
_RETRIED = {
    Reason.UNREADABLE, Reason.UNDECODABLE, Reason.TIME_LIMIT, Reason.DECODER_CRASHED, Reason.ENCODE_FAILED, Reason.CAPTION_FAILED,
}  # fmt: skip


def state_of(setup: BuildSetup) -> str:
    """A digest of everything that a build depends on: settings, listed sources, encoders and versions."""
    return digest(canonical_json([setup.info(), TRANSFORM, setup.encoders.image_fingerprint]).encode())


def idle_report(setup: BuildSetup) -> BuildReport | None:
    """The report of a build that would find everything in the cache; None where it may have something to do.

    With `preprocess.full_hash` every build reads all bytes.
    """
    weights, record = setup.config.codec_weights, read_record(setup.config).get("whole")
    if setup.config.preprocess.full_hash or not isinstance(record, dict) or not default_path(setup.config).exists():
        return None
    if (weights is not None and not weights.exists()) or any(
        each.bytes < 0 for each in setup.made_from.sources.values()
    ):
        return None
    try:
        if record["state"] != state_of(setup) or not _is_of(read_info(setup.root), setup.info()):
            return None
        samples, null = read_samples(setup.root)
        with CacheWriter(setup.root, mend=False) as store:  # it looks at the shards' lengths, too
            whole = store.has("null", null or "") and all(
                store.has(section, key)
                for each in samples
                for section in ("latents", "texts")
                for key in each.keys(section)
            )
        rejections = [Rejection(row["path"], Reason(row["reason"]), row["detail"]) for row in read_rejects(setup.root)]
        if not whole or any(each.reason in _RETRIED for each in rejections):
            return None
        report = BuildReport.of(setup.root, setup.listing)
        report.found_again(record["report"], rejections, record["held_out"])
    except (UserError, AttributeError, KeyError, TypeError, ValueError):  # damaged: a build makes it anew
        return None
    report.count_samples(samples)
    return report


def _is_of(stored: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    return all(stored.get(name) == value for name, value in json.loads(json.dumps(info)).items())
