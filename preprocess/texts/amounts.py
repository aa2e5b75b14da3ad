"""The tokens of texts and the work of training on them, before there is a cache: estimated by the first texts of each source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmspeed.config import RunConfig
from mmspeed.config.language import LanguageConfig
from mmspeed.config.texts import BytesTokenizerConfig, StoredTokenizerConfig, TextsConfig, TokenizerConfig
from mmspeed.data.cache.tokenizer_file import FOLDER, MAIN, TextTokenizer
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching
from mmspeed.data.sampling.mixture import rates
from mmspeed.data.sampling.pack_order import PackLength
from mmspeed.device import devices_here
from mmspeed.protocols import RunWork, ShapeClass

BYTES_A_TOKEN = 4.0  # of text in most languages, for a tokenizer that is not here
LOOKED_AT = 1 << 17  # characters of a source that are turned into tokens
MANY = 10**9


class TokenCount:
    """The tokens of a source: ids are counted, and texts by their bytes and the tokens of the first of them."""

    def __init__(self, texts: TextsConfig, tokenizer: TokenizerConfig) -> None:
        self._config, self._folders = tokenizer, [Path(texts.cache) / FOLDER]
        if isinstance(tokenizer, StoredTokenizerConfig):
            self._folders.append(Path(tokenizer.path).expanduser())
        self._ids = self._bytes = self._looked_at = 0
        self._first: list[str] = []

    def add(self, value: Any) -> int:
        """Count a text, chat or array of ids; returns its bytes."""
        if isinstance(value, np.ndarray):
            self._ids += len(value)
            return int(value.nbytes)
        text = value if isinstance(value, str) else str(value)
        if self._looked_at < LOOKED_AT:
            self._first.append(text[: LOOKED_AT - self._looked_at])
            self._looked_at += len(self._first[-1])
        size = len(text.encode("utf-8", "surrogatepass"))
        self._bytes += size
        return size

    def tokens(self) -> tuple[int, str]:
        """The number of tokens, and how it is known. Raises UserError for a tokenizer that cannot be read."""
        if not self._bytes:
            return self._ids, "ids"
        if isinstance(self._config, BytesTokenizerConfig):
            return self._bytes, "bytes"
        files = [folder / MAIN for folder in self._folders if (folder / MAIN).is_file()]
        if not files:
            return round(self._bytes / BYTES_A_TOKEN), f"at {BYTES_A_TOKEN:g} bytes each"
        count = sum(map(len, TextTokenizer(files[0]).encode_all(self._first)))
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in self._first)
        return round(self._bytes * count / size), "by the first texts"


def works_of(config: RunConfig, tokens: Mapping[str, int], ranks: Sequence[int] | None = None) -> list[RunWork]:
    """The work of a config's training on sources of so many tokens, on each number of devices in `ranks` (None: those of this machine).

    Packs count as full. None for a config of another task, and for steps that go by measured or counted work.
    """
    if not isinstance(config, LanguageConfig) or config.batching.by not in ("samples", "tokens"):
        return []
    texts, parallel = config.texts, config.parallel
    named = dict(zip(texts.source_names, texts.sources, strict=True))
    sizes = {name: round(tokens[name] * (1 - texts.validation)) for name in named if not named[name].held_out}
    weights = {name: one.weight for name, one in named.items() if one.weight is not None}
    rate = rates(sizes, {name: one.repeats for name, one in named.items()}, weights or None, texts.temperature)
    epoch = sum(size * rate[name] for name, size in sizes.items())
    if not epoch:
        return []
    costs, lengths = SampleCosts(_numbers, _numbers), list(map(PackLength, config.lengths))
    begun = sum(stage.steps or 0 for stage in config.curriculum[:-1])
    steps = [*(stage.steps or 0 for stage in config.curriculum[:-1]), config.train.steps - begun]
    works = []
    for world in ranks or [devices_here(config.device.kind, parallel.group)]:
        batching = make_batching(config.batching, config.train, lengths, costs, world, parallel)
        packs = Counter[ShapeClass]()
        for length, count in zip(lengths, steps, strict=True):
            packs[length] += batching.supply(length, MANY).step * count
        read = sum(length.numbers * count for length, count in packs.items())
        works.append(
            RunWork(world, read / epoch, f"about {epoch:,.0f} tokens", {k: n / world for k, n in packs.items()})
        )
    return works


def _numbers(shape: ShapeClass) -> int:
    return shape.numbers
