"""Builds with nothing to do: nothing that a build depends on differs from the last one of its config, so no medium is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mmspeed.data import CacheWriter
from mmspeed.data.cache.keys import canonical_json, digest
from mmspeed.data.cache.tables import read_info, read_rejects, read_samples
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejection
from mmspeed.preprocess.build.setup import BuildSetup
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.keys import TRANSFORM
from mmspeed.preprocess.report.page import default_path, read_record

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
