"""Opening of a run's cache: complete, or with a maker that completes it during the first epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from mmspeed import comm
from mmspeed.config import Config
from mmspeed.config.inputs import LinearVaeConfig
from mmspeed.config.places import is_url
from mmspeed.data import DatasetCache
from mmspeed.data.cache.codec_file import codec_facts
from mmspeed.data.cache.files import BusyError, write_whole
from mmspeed.data.cache.made_from import DIGEST
from mmspeed.data.cache.tables import read_info
from mmspeed.data.loading.first_epoch import OnlineEncoder
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.models.codecs.vae import codec_identity
from mmspeed.models.text.encoders import text_identity
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.run.source_changes import changes_to_bring_in
from mmspeed.protocols import RunPlace

log = get_logger("train")

CacheT = TypeVar("CacheT")

_ENCODERS = {"vae": "codec", "text": "text encoder"}  # by section
NAMED = 4  # settings that a message names


class OtherEncodersError(UserError):
    """A run was begun with another codec or text encoder than the data have."""


def open_cache(
    config: Config, maker: OnlineEncoder | None, place: RunPlace, group: dist.ProcessGroup | None
) -> tuple[DatasetCache, bool]:
    """The config's cache, and True where it is complete. A collective call; rank 0 decides.

    A cache that is incomplete, was made for other data or encoders, or whose sources have changed since, is planned again by `maker` and
    its present part is opened. Raises UserError when it cannot be used and there is no maker, and when a run that goes on began with
    other encoders.
    """
    cache, problem, final = _looked_at(config, maker, place) if place.rank == 0 else (None, None, False)
    problem, final = comm.broadcast_object([problem, final])
    if problem is None:
        return DatasetCache(config.cache_root) if cache is None else cache, True
    if final or maker is None:
        raise UserError(problem)
    if place.rank == 0:
        log.info(f"{problem.split(';')[0]}: the missing entries are encoded during the first epoch")
    try:
        maker.plan(place.device, place.rank, place.world, group)
    except UserError as error:
        raise UserError(f"{problem.split(';')[0]}, and the first epoch cannot make it: {error}") from None
    comm.first_does(lambda: _check_planned(DatasetCache(config.cache_root, partial=True), config, place), place.rank)
    return DatasetCache(config.cache_root, partial=True), False


def _check_planned(cache: DatasetCache, config: Config, place: RunPlace) -> None:
    _require_encoders(place, _encoders_of_run(place), _fingerprints(cache.info), config)
    check_cache(cache, config)


def opened_or_problem(open_: Callable[[], CacheT]) -> tuple[CacheT | None, str | None, bool]:
    """(the cache that `open_` opens and checks, or the text of its UserError, and True where no maker can help)."""
    try:
        return open_(), None, False
    except UserError as error:
        return None, str(error), isinstance(error, BusyError | OtherEncodersError)


def _looked_at(
    config: Config, maker: OnlineEncoder | None, place: RunPlace
) -> tuple[DatasetCache | None, str | None, bool]:
    """The whole cache, or its problem and True where that is final, as `opened_or_problem`."""
    began = _encoders_of_run(place)
    cache, problem, final = opened_or_problem(lambda: _opened(config, place, began))
    if cache is not None:
        if DIGEST not in cache.info and (copies := cache.samples.copies_of_held_out()):
            log.warning(
                f"{copies} training samples of the cache {cache.location} have a content that is held out under another name: "
                "`mmspeed preprocess` holds them out too"
            )
        problem = changes_to_bring_in(config, cache.info, cache.root, cache.location, place.resumed, maker is not None)
        return (cache, None, False) if problem is None else (None, problem, False)
    if began and maker is not None and not final:
        _, other, final = opened_or_problem(lambda: _require_encoders(place, began, _identities(config), config))
        problem = other or problem
    return None, problem, final


def _opened(config: Config, place: RunPlace, began: Mapping[str, str]) -> DatasetCache:
    """The whole cache. Raises UserError when it cannot be trained on as it is, OtherEncodersError when this run must not use it."""
    if began and not is_url(config.data.cache):
        if (config.cache_dir / "cache.json").exists():
            _require_encoders(place, began, _fingerprints(read_info(config.cache_dir)), config)
        _give_codec(config, RunFolder(place.folder).codec_weights, began)
    cache = DatasetCache(config.cache_root)
    _require_encoders(place, began, _fingerprints(cache.info), config)
    check_cache(cache, config)
    return cache


def _encoders_of_run(place: RunPlace) -> dict[str, str]:
    """The fingerprints of the encoders that a run began with; none for a new run, and where the record is lost."""
    try:
        return _fingerprints(RunFolder(place.folder).info()) if place.resumed else {}
    except UserError:
        return {}


def _fingerprints(info: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprints in a run.json or cache.json, by the encoder's section."""
    encoders = info.get("encoders", {})
    return {name: encoders[name]["fingerprint"] for name in _ENCODERS if "fingerprint" in encoders.get(name, {})}


def _require_encoders(
    place: RunPlace, began: Mapping[str, str], found: Mapping[str, str], config: Config
) -> DatasetCache | None:
    """Raise OtherEncodersError where the cache has other encoders than those that the run began with."""
    for name, fingerprint in began.items():
        if found.get(name, fingerprint) != fingerprint:
            raise OtherEncodersError(
                f"{place.folder} was begun with another {_ENCODERS[name]} (`{name}`, fingerprint {fingerprint[:12]}) than the data in {config.cache_root} "
                f"({found[name][:12]}): give it its own cache back, or an empty folder under data.cache, which is encoded as the run "
                "began; or choose another `name` for this run"
            )
    return None


def _give_codec(config: Config, own: Path, began: Mapping[str, str]) -> None:
    """Give a cache that lacks its fitted codec the one that the run began with."""
    weights = config.codec_weights
    if weights is None or weights.exists() or not isinstance(config.vae, LinearVaeConfig) or config.vae.weights:
        return
    with suppress(OSError, ValueError):  # lost, or damaged
        if codec_facts(own).get("fingerprint") == began.get("vae"):
            write_whole(weights, own.read_bytes(), replace=False)
            log.info(f"{weights} was missing: it is the codec that the run began with")


def check_cache(cache: DatasetCache, config: Config) -> None:
    """Raises UserError when the cache was made for other data, or with another codec or text encoder than the config names.

    Reads the encoders' files, so one process should check for all; an encoder that is not available is not compared.
    """
    encoders = cache.info["encoders"]
    recorded, wanted = cache.info["made_for"], config.sample_settings()
    other = [one for name in wanted for one in differing_settings(f"data.{name}", recorded.get(name), wanted[name])]
    if other:
        raise UserError(
            f"the samples in the cache {config.cache_root} were made with other {first_names(other, NAMED)}; "
            "run `mmspeed preprocess` again (present entries are not encoded again), or give each data set its own data.cache"
        )
    weights = config.codec_weights
    if weights is not None and not weights.exists():
        raise UserError(f"{weights} is missing: run `mmspeed preprocess` again")
    for name, now in _identities(config).items():
        if encoders[name]["fingerprint"] != now:
            raise UserError(
                f"the cache {config.cache_root} was made with another `{name}` than the config names; run `mmspeed preprocess` again"
            )


def _identities(config: Config) -> dict[str, str]:
    """The fingerprints of the config's encoders by section, without those that are not available, which is told."""
    weights = config.codec_weights
    found = {}
    for name, identity in {
        "vae": lambda: codec_identity(config.vae, weights),
        "text": lambda: text_identity(config.text),
    }.items():
        try:
            found[name] = identity()
        except UserError as error:
            log.warning(f"the cache cannot be compared with the config's `{name}`: {error}")
    return found


def differing_settings(name: str, recorded: Any, wanted: Any) -> list[str]:
    """The settings at or below `name` that differ, named as on the command line: `data.sources.0.name`."""
    if recorded == wanted:
        return []
    if isinstance(recorded, list) and isinstance(wanted, list) and len(recorded) == len(wanted):
        if any(isinstance(one, dict) for one in wanted):
            recorded, wanted = dict(enumerate(recorded)), dict(enumerate(wanted))
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        keys = {**wanted, **recorded}
        return [
            other for key in keys for other in differing_settings(f"{name}.{key}", recorded.get(key), wanted.get(key))
        ]
    return [name]
