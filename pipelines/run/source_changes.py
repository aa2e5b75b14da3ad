"""Whether the sources of a complete cache have changed since it was made: told, or a reason to bring the change in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspeed.config import RunConfig
from mmspeed.config.tasks import preparation_class
from mmspeed.data.cache.made_from import DIGEST, ListsSources, read_made_from
from mmspeed.errors import UserError
from mmspeed.log import Working, get_logger

log = get_logger("train")


def changes_to_bring_in(
    config: RunConfig, info: Mapping[str, Any], root: Path, location: str, resumed: bool, online: bool
) -> str | None:
    """The sentence on changed sources for whoever completes the cache now; None where it is used as it is, and the change is told.

    Only the listing is compared: no medium is opened. A cache without a record, as were made before there was one, is not compared.
    A run that goes on keeps its order. Call it on rank 0.

    Args:
        info: `cache.json` of the cache at `location`, whose tables are in the folder `root`.
        online: the cache is completed during the run.
    """
    kind = preparation_class(config.task)
    preparation = None if kind is None or DIGEST not in info else kind(config)
    if not isinstance(preparation, ListsSources):
        return None
    try:
        with Working("comparing the sources with the cache", tell=False):
            now = preparation.sources_now()
        if now.digest == info[DIGEST]:
            return None
        if not now.sources:
            raise UserError("none of them is there")
        changes = now.changes_since(read_made_from(root))
    except UserError as error:
        log.warning(f"the sources cannot be compared with the cache {location}, which is trained on as it is: {error}")
        return None
    since = f"the sources have changed since the cache {location} was made ({changes})"
    if changes and online and not resumed:
        return since
    if changes.copied:
        log.info(
            f"all sources have other times than when the cache {location} was made, and are otherwise the same: taken for a copy"
        )
    elif changes and resumed:
        log.warning(
            f"{since}: this run keeps its order without them; run `mmspeed preprocess`, and at its next start they enter with a new epoch"
        )
    elif changes:
        log.warning(f"{since}: it is trained on as it is; `mmspeed preprocess` brings the change in")
    return None
