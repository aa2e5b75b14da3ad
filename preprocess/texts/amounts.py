"""The tokens of texts and the work of training on them, before there is a cache: estimated by the first texts of each source."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.config import RunConfig
from mmspeed.config.language import LanguageConfig
from mmspeed.config.texts import BytesTokenizerConfig, StoredTokenizerConfig, TextsConfig, TokenizerConfig
from mmspeed.data.cache.tokenizer_file import FOLDER, MAIN, TextTokenizer
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching
from mmspeed.data.sampling.pack_order import DocumentSupply, PackLength, PackSampler
from mmspeed.device import devices_here
from mmspeed.protocols import RunWork, ShapeClass

BYTES_A_TOKEN = 4.0  # of text in most languages, for a tokenizer that is not here
LOOKED_AT = 1 << 17  # characters of a source that are turned into tokens
Lengths = npt.NDArray[np.int64]


class TokenCount:
    """The tokens of a source's documents: ids are counted; of texts their bytes, and the tokens of the first of them."""

    def __init__(self, texts: TextsConfig, tokenizer: TokenizerConfig) -> None:
        self._config, self._folders = tokenizer, [Path(texts.cache) / FOLDER]
        if isinstance(tokenizer, StoredTokenizerConfig):
            self._folders.append(Path(tokenizer.path).expanduser())
        self._sizes, self._looked_at = array("q"), 0
        self._first: list[str] = []
        self._ids = False

    def add(self, value: Any) -> int:
        """Count a text, chat or array of ids; returns its bytes."""
        if isinstance(value, np.ndarray):
            self._sizes.append(len(value))
            self._ids = True
            return int(value.nbytes)
        text = value if isinstance(value, str) else "\n".join(map(str, _parts(value)))
        if self._looked_at < LOOKED_AT:
            self._first.append(text[: LOOKED_AT - self._looked_at])
            self._looked_at += len(self._first[-1])
        self._sizes.append(_size(text))
        return self._sizes[-1]

    def lengths(self) -> tuple[Lengths, str]:
        """The tokens of each document, and how they are known. Raises UserError for a tokenizer that cannot be read."""
        sizes = np.array(self._sizes, np.int64)
        if self._ids or isinstance(self._config, BytesTokenizerConfig):
            return sizes, "ids" if self._ids else "bytes"
        files = [folder / MAIN for folder in self._folders if (folder / MAIN).is_file()]
        rate, how = 1 / BYTES_A_TOKEN, f"at {BYTES_A_TOKEN:g} bytes each"
        if files and self._looked_at:
            counts = map(len, TextTokenizer(files[0]).encode_all(self._first))
            rate, how = sum(counts) / sum(map(_size, self._first)), "by the first texts"
        return np.maximum(1, np.rint(sizes * rate)).astype(np.int64), how


def works_of(config: RunConfig, lengths: Mapping[str, Lengths], ranks: Sequence[int] | None = None) -> list[RunWork]:
    """The work of training on sources with documents of so many tokens, on each number of devices in `ranks` (None: of this machine).

    None for a config of another task, for steps that go by measured or counted work, and where there is nothing to train on. Raises
    UserError for devices that experts do not divide.
    """
    if not isinstance(config, LanguageConfig) or config.batching.by not in ("samples", "tokens"):
        return []
    texts, parallel, named = config.texts, config.parallel, config.texts.source_names
    source = np.repeat(np.arange(len(named)), [len(lengths[name]) for name in named])
    # an even share in place of the one that is drawn by content
    held_out = np.diff(np.floor(np.arange(len(source) + 1) * texts.validation)) > 0
    trained = ~held_out & ~np.array([one.held_out for one in texts.sources])[source]
    if not trained.any():
        return []
    weights = {name: one.weight for name, one in zip(named, texts.sources, strict=True) if one.weight is not None}
    repeats = {name: one.repeats for name, one in zip(named, texts.sources, strict=True)}
    whole = np.concatenate([lengths[name] for name in named])
    supply = DocumentSupply(whole, source, trained, named, "estimated", repeats, weights or None, texts.temperature)
    stages, costs = list(map(PackLength, config.lengths)), SampleCosts(_numbers, _numbers)
    steps = [stage.steps or 0 for stage in config.curriculum[:-1]]
    steps.append(config.train.steps - sum(steps))
    works = []
    for world in ranks or [devices_here(config.device.kind, parallel.least_devices)]:
        parallel.check_world(world)
        batching = make_batching(config.batching, config.train, stages, costs, parallel.dealt(world), parallel)
        packs, epochs, of, micro_batches = Counter[ShapeClass](), 0.0, 0, 0.0
        for stage, count in zip(stages, steps, strict=True):
            order = PackSampler(supply, stage.numbers, config.packing, batching, 0.0, config.seed)
            epochs += count / order.steps_per_epoch
            step = batching.supply(stage, 0).step
            packs[stage] += round(count * step / world)
            own = -(-step // parallel.groups(world))
            micro_batches += -(-own // (batching.at_a_time(stage) or own)) * count / sum(steps)
            of = of or order.packs_of(0).ranges.tokens
        works.append(RunWork(world, epochs, f"about {of:,} tokens", packs, micro_batches))
    return works


def _parts(chat: Sequence[Any]) -> Iterator[Any]:
    """The roles and contents of a chat, in order."""
    for message in chat:
        yield from message.values() if isinstance(message, Mapping) else [message]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _numbers(shape: ShapeClass) -> int:
    return shape.numbers
