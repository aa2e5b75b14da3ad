"""Opening of the text cache of a language run: complete, or with a builder that completes it before the first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from mmspeed import comm
from mmspeed.config.language import LanguageConfig
from mmspeed.config.places import is_url
from mmspeed.config.texts import StoredTokenizerConfig
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.cache.tokenizer_file import FOLDER, MAIN, recorded_section
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.mesh import patient_group
from mmspeed.pipelines.domains.open_cache import NAMED, OtherEncodersError, differing_settings, opened_or_problem
from mmspeed.pipelines.run.source_changes import changes_to_bring_in
from mmspeed.protocols import RunPlace

log = get_logger("train")


class BuildLines(Protocol):
    """The outcome of a build."""

    def lines(self) -> Sequence[str]:
        """The outcome in lines."""
        ...


class TextBuilder(Protocol):
    """A builder of a config's text cache, as `mmspeed.preprocess.TextCacheBuilder`: present blocks are not encoded again."""

    def run(self, processes: int | None = None, tokenizer: Path | None = None) -> BuildLines:
        """Build or complete the cache with so many processes (None: as its config says).

        `tokenizer`: a folder of the one that a new cache takes where it would train one.
        """
        ...


def open_texts(config: LanguageConfig, builder: TextBuilder | None, place: RunPlace) -> TextCache:
    """The config's text cache; one that is missing, unfinished or of other texts is completed by `builder`. A collective call.

    So is one whose texts have changed since, but for a run that goes on. The packs of an epoch follow from the lengths of all documents, so tokens are there before the first step: rank 0 encodes, with as
    many processes as the run has here, while the others wait. Raises UserError for a cache that cannot be used.
    """
    where: Path | str = config.texts.cache if is_url(config.texts.cache) else Path(config.texts.cache)
    began = place.folder / FOLDER if place.resumed else None
    cache, problem, final = opened_or_problem(lambda: _opened(where, config, began)) if place.rank == 0 else (None,) * 3
    if cache is not None:
        online = builder is not None
        problem = changes_to_bring_in(config, cache.info, cache.root, cache.location, place.resumed, online)
    problem, final = comm.broadcast_object([problem, final])
    if problem is not None:
        if builder is None or final:
            raise UserError(problem)
        here = min(int(os.environ.get("LOCAL_WORLD_SIZE", place.world)), os.cpu_count() or 1)

        def build() -> None:
            log.info(f"{problem.split(';')[0]}: the texts become tokens before the first step")
            for line in builder.run(config.texts.processes or (here if here > 1 else 0), began).lines():
                log.info(line)
            _opened(where, config, began)

        cache = None
        comm.first_does(build, place.rank, patient_group())
    return TextCache(where) if cache is None else cache


def _opened(where: Path | str, config: LanguageConfig, began: Path | None) -> TextCache:
    """The cache. Raises UserError when it is not one of the config's texts; one of documents that a program handed over is not compared.

    Raises OtherEncodersError when its tokenizer is not that in the folder `began`.
    """
    cache = TextCache(where)
    stored = cache.info["tokenizer"]["files"].get(MAIN)
    if began is not None and stored is not None and (began / MAIN).is_file() and _sha256(began / MAIN) != stored:
        raise OtherEncodersError(
            f"{began.parent} was begun with another `tokenizer` than the texts in {cache.location}: give it its own cache back, or an "
            "empty folder under texts.cache; or choose another `name` for this run"
        )
    recorded, wanted = cache.info.get("made_for"), config.texts.document_settings(config.seed)
    if recorded is None:
        return cache
    other = [one for name in wanted for one in differing_settings(f"texts.{name}", recorded.get(name), wanted[name])]
    other += _other_tokenizer(config, cache)
    if other:
        raise UserError(
            f"the cache {cache.location} was made with other {first_names(other, NAMED)}; run `mmspeed preprocess` again"
        )
    return cache


def _other_tokenizer(config: LanguageConfig, cache: TextCache) -> list[str]:
    """The tokenizer's settings in which a cache differs; a folder at another place is the same one if its file is."""
    wanted = config.tokenizer
    recorded = recorded_section(cache.root, cache.info)
    other = differing_settings("tokenizer", recorded, wanted.model_dump(mode="json"))
    if other == ["tokenizer.path"] and isinstance(wanted, StoredTokenizerConfig) and Path(wanted.path).is_absolute():
        main = Path(wanted.path) / MAIN
        same = not main.is_file() or _sha256(main) == cache.info["tokenizer"]["files"].get(MAIN)
        return [] if same else other
    return other


def _sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
