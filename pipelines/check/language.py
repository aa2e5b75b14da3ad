"""Make the language task small, to compare a layout with one process (`mmspeed check --parallel`): a tiny twin, and synthetic documents.

Legend: N tokens of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmspeed import rng
from mmspeed.config import RunConfig
from mmspeed.config.language import LanguageConfig, LanguageModelConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.texts import TextsConfig, TextSourceConfig
from mmspeed.config.training import BatchingConfig
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.loading.loader import Batches
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.shapes import tiny_twin
from mmspeed.parallel.tensor import check_heads
from mmspeed.pipelines.check.video import shrunk_size
from mmspeed.pipelines.domains.language.data import targets_in
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.protocols import CheckNotes, RunPlace, StepData

STEP = "packs"  # the kind of a step
SYNTHETIC = "synthetic"  # the only source
TOKENS = 61  # of a pack, at least: a prime number, which few groups divide
WINDOW = 16  # of blocks that see so many earlier keys
LEAST_ROWS = 128  # of the vocabulary


class SyntheticDocuments:
    """Documents drawn by their numbers, with the attributes of a text cache: of one token, as long as a pack, partly trained."""

    fingerprint, sources, tokenizer_folder = SYNTHETIC, [SYNTHETIC], None
    begin_of_document, end_of_document = (), None
    marked = True

    def __init__(self, count: int, tokens: int, vocabulary: int, seed: int) -> None:
        self.vocabulary, self._seed = vocabulary, seed
        drawn = [1 + rng.key64(seed, "document", number) % (tokens // 2) for number in range(count)]
        self.lengths = np.array([tokens, 1, *drawn], np.uint32)
        self.source, self.held_out = np.zeros(len(self.lengths), np.int64), np.zeros(len(self.lengths), np.bool_)

    def ids(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """The ids [begin, begin + count) of a document."""
        whole = [rng.key64(self._seed, "id", document, place) % self.vocabulary for place in self._places(document)]
        return np.array(whole, np.uint32)[begin:][:count]

    def ids_of(self, pieces: Iterable[tuple[int, int, int]]) -> list[npt.NDArray[Any]]:
        return [self.ids(*piece) for piece in pieces]

    def trained(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[np.bool_] | None:
        """Marks of the ids that have a loss; None where all have."""
        marks = np.array([place % 3 > 0 for place in self._places(document)], np.bool_)
        return marks[begin:][:count] if document % 3 == 2 else None

    def targets(self, document: npt.NDArray[Any], begin: npt.NDArray[Any], count: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The number of ids of each range that have a loss and an id before them in the range."""
        rows = zip(document.tolist(), begin.tolist(), count.tolist(), strict=True)
        return np.array([targets_in(self, *row) for row in rows], np.int64)

    def _places(self, document: int) -> range:
        return range(int(self.lengths[document]))


class SmallLanguageTask(LanguageDomain):
    """The task with settings and documents of its own, which opens nothing."""

    def __init__(self, config: LanguageConfig, settings: DecoderSettings, documents: SyntheticDocuments) -> None:
        super().__init__(config)
        self.settings = settings
        self._cache = cast(TextCache, documents)

    def open(self, place: RunPlace) -> None:
        """Do nothing: the documents are in memory."""


@dataclass(frozen=True)
class ShrunkLanguage:
    """A small run of the language task, a `CheckTask`."""

    config: LanguageConfig
    settings: DecoderSettings
    documents: SyntheticDocuments
    remarks: tuple[str, ...] = ()

    kinds = (STEP,)

    @property
    def known(self) -> Mapping[str, Any]:
        """Empty: all follows from the config, and from the settings of the folder that it may name."""
        return {}

    @property
    def notes(self) -> CheckNotes:
        """Sizes of the model, and the packs."""
        own = self.settings
        words = [
            f"{own.num_hidden_layers} blocks of width {own.hidden_size}, {own.num_attention_heads} heads, {own.num_key_value_heads} of keys"
        ]
        words += ["latent attention"] if own.latent is not None else []
        words += [f"{own.experts.num_experts} experts"] if own.experts is not None else []
        words += [f"{own.num_nextn_predict_layers} further tokens"] if own.num_nextn_predict_layers else []
        words += [f"{own.vocab_size} rows of the vocabulary, {'tied' if own.tie_word_embeddings else 'not tied'}"]
        packs, tokens = self.config.train.samples_per_step, self.config.sequence_length
        items = [f"a step of {packs} packs of {tokens} tokens, {self.config.packing}"]
        return CheckNotes(", ".join(words), items=items, remarks=self.remarks)

    def with_config(self, config: RunConfig) -> ShrunkLanguage:
        """The same documents and model under another config."""
        assert isinstance(config, LanguageConfig)
        return replace(self, config=config)

    def task(self) -> SmallLanguageTask:
        """The task of the small run."""
        return SmallLanguageTask(self.config, self.settings, self.documents)

    def step(self, kind: str, place: RunPlace) -> StepData:
        """The first step of training; its micro-batches are read at once."""
        with closing(self.task().data(place).steps(0, 1)) as steps:
            step = next(steps)
            batches = iter(list(step.batches))
        return replace(step, batches=Batches(len(step.batches), None, lambda: next(batches)))

    def expected(self, kind: str) -> Sequence[str]:
        """The exchanges that a step must make: of tensor parallelism, of attention over parts, and of the losses of all parts."""
        parallel = self.config.parallel
        exchanges = [f"{what} tp" for what in ("all_gather", "reduce_scatter", "all_reduce") if parallel.tp > 1]
        exchanges += ["all_to_all ulysses"] if parallel.ulysses > 1 else []
        return exchanges + (["all_gather sequence"] if parallel.sequence > 1 else [])

    def silent(self, kind: str) -> Sequence[str]:
        """Empty: no axes."""
        return []

    def problems(self, place: RunPlace) -> tuple[list[str], list[str]]:
        """Empty: there are no draws to check."""
        return [], []


def shrunk_language(config: LanguageConfig, settings: DecoderSettings) -> ShrunkLanguage:
    """The small run of a config whose decoder has these settings. Raises UserError for heads that do not fit the layout."""
    parallel = config.parallel
    check_heads(settings.num_attention_heads, parallel.ulysses, parallel.tp, settings.num_key_value_heads)
    small, remarks = shrunk_settings(settings, parallel), list[str]()
    tokens = max(TOKENS, 8 * parallel.group + 5)
    lanes = math.prod(parallel.sizes().values()) // parallel.group
    train = config.train.model_copy(update={"batch_size": lanes + 1, "micro_batch_size": 2})
    changes: dict[str, Any] = {
        "model": LanguageModelConfig(),
        "texts": TextsConfig(sources=(TextSourceConfig(path=SYNTHETIC, name=SYNTHETIC),), cache=SYNTHETIC),
        "sequence_length": tokens,
        "train": train,
        "batching": BatchingConfig(),
    }
    if small.experts is not None and config.device.dtype != "float32":
        changes["device"] = config.device.model_copy(update={"dtype": "float32"})
        remarks.append(
            f"compared in float32: in {config.device.dtype} a token may go to other experts on another layout"
        )
    if small.experts is not None and small.experts.balance == "global_batch":
        small = replace(small, experts=replace(small.experts, balance="micro_batch"))
        remarks.append(
            "compared with model.balance: micro_batch: what a step has met so far is more where more processes compute at a time"
        )
    documents = SyntheticDocuments(4 * (lanes + 1), tokens, small.vocab_size, config.seed)
    return ShrunkLanguage(config.model_copy(update=changes), small, documents, tuple(remarks))


def shrunk_settings(settings: DecoderSettings, parallel: ParallelConfig) -> DecoderSettings:
    """The tiny twin of a decoder, with as many heads as a layout needs and sizes that it divides where it divides those of the decoder."""
    twin, tp = tiny_twin(settings), parallel.tp
    ratio = twin.num_attention_heads // twin.num_key_value_heads
    key_heads = -(-twin.num_key_value_heads // tp) * tp
    while ratio * key_heads // tp < parallel.ulysses:
        key_heads += tp
    return replace(
        twin,
        num_attention_heads=ratio * key_heads,
        num_key_value_heads=key_heads,
        intermediate_size=shrunk_size(settings.intermediate_size, tp, twin.intermediate_size),
        vocab_size=shrunk_size(settings.vocab_size, tp, LEAST_ROWS),
        windows=tuple(window and min(window, WINDOW) for window in twin.windows),
    )
