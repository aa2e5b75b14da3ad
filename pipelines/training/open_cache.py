"""Opening of a run's cache: complete, or with a maker that completes it during the first epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mmspeed import comm
from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.files import BusyError
from mmspeed.data.loading.first_epoch import OnlineEncoder
from mmspeed.device import Device
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.models.codecs.vae import codec_identity
from mmspeed.models.text.encoders import text_identity

log = get_logger("train")

CacheT = TypeVar("CacheT")

NAMED = 4  # settings that a message names


def open_cache(
    config: Config, maker: OnlineEncoder | None, device: Device, rank: int, world: int, group: dist.ProcessGroup | None
) -> tuple[DatasetCache, bool]:
    """The config's cache, and True where it is complete. A collective call; rank 0 decides.

    A cache that is incomplete, or was made for other data or encoders, is planned again by `maker` and its present part is opened. Raises
    UserError when it cannot be used and there is no maker.
    """
    cache, *outcome = opened_or_problem(lambda: _opened(config)) if rank == 0 else (None, None, False)
    problem, busy = comm.broadcast_object(outcome)
    if busy:
        raise UserError(problem)
    if problem is None:
        return DatasetCache(config.cache_root) if cache is None else cache, True
    if maker is None:
        raise UserError(problem)
    if rank == 0:
        log.info(f"{problem.split(';')[0]}: the missing entries are encoded during the first epoch")
    try:
        maker.plan(device, rank, world, group)
    except UserError as error:
        raise UserError(f"{problem.split(';')[0]}, and the first epoch cannot make it: {error}") from None
    comm.first_does(lambda: check_cache(DatasetCache(config.cache_root, partial=True), config), rank)
    return DatasetCache(config.cache_root, partial=True), False


def opened_or_problem(open_: Callable[[], CacheT]) -> tuple[CacheT | None, str | None, bool]:
    """(the cache that `open_` opens and checks, or the text of its UserError, and True where another command is using the cache)."""
    try:
        return open_(), None, False
    except UserError as error:
        return None, str(error), isinstance(error, BusyError)


def _opened(config: Config) -> DatasetCache:
    """The whole cache. Raises UserError when it cannot be trained on as it is."""
    cache = DatasetCache(config.cache_root)
    check_cache(cache, config)
    return cache


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
    identities = {"vae": lambda: codec_identity(config.vae, weights), "text": lambda: text_identity(config.text)}
    for name, identity in identities.items():
        try:
            now = identity()
        except UserError as error:
            log.warning(f"the cache cannot be compared with the config's `{name}`: {error}")
            continue
        if encoders[name]["fingerprint"] != now:
            raise UserError(
                f"the cache {config.cache_root} was made with another `{name}` than the config names; run `mmspeed preprocess` again"
            )


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
