"""The language task: packs of documents from a text cache, a decoder, the cross-entropy of each next token.

Legend: B packs of a micro-batch, N tokens of a pack, Z one more than documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.config.language import LanguageConfig
from mmspeed.config.texts import StoredTokenizerConfig, TrainedTokenizerConfig
from mmspeed.data import Batching, Loader
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching
from mmspeed.data.sampling.pack_order import DocumentSupply, PackLength, PackSample, PackSampler
from mmspeed.data.sampling.pack_stages import StagedPacks
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.device import parse_dtype
from mmspeed.errors import UserError
from mmspeed.models.adapters import adapt
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.counts import block_work, forward_work
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.families import config_tree
from mmspeed.models.language.settings import configured
from mmspeed.models.language.weights import HubWeights, decoder_of, on_meta, stored_decoder
from mmspeed.parallel.experts import check_experts
from mmspeed.pipelines.domains.base import DomainDefaults
from mmspeed.pipelines.domains.language.data import (
    HeldOutPacks,
    LanguageData,
    PackCollate,
    held_out_packs,
    packs_of,
    tokens_by_source,
)
from mmspeed.pipelines.domains.language.small import small_language
from mmspeed.pipelines.domains.language.start import TextBuilder, open_texts
from mmspeed.pipelines.domains.language.values import PackValues
from mmspeed.plan.traffic import EvenRouting, expert_lines
from mmspeed.protocols import (
    Batch,
    BlockWork,
    Data,
    Divisors,
    Given,
    Inputs,
    Item,
    LearningPart,
    Models,
    OrderedSample,
    RunPlace,
    ShapeClass,
    SmallRun,
    StepData,
    StepUsage,
    Validation,
    Work,
    source_of,
)

BYTE_IDS = 257  # of the tokenizer of bytes, and the end of a document


class LanguageDomain(DomainDefaults):
    """The task of training decoders on packed documents. `maker` (`mmspeed.preprocess.TextCacheBuilder`) completes the text cache."""

    name = "language"
    gives = ("errors",)
    config_class = LanguageConfig

    def __init__(self, config: LanguageConfig, maker: TextBuilder | None = None) -> None:
        self.config, self.maker = config, maker
        self._cache: TextCache | None = None
        self._vocabulary: int | None = None
        self._squares: dict[int, float] = {}  # by length of a pack
        self._spare: Decoder | None = None  # a model of a folder, opened for its settings, that `build` will return

    # -- opening --------------------------------------------------------------------------------------------------------

    def open(self, place: RunPlace) -> None:
        """Open the text cache; `maker` completes it. Raises UserError when it cannot be used."""
        self._cache = open_texts(self.config, self.maker, place)
        self.use(self._cache.vocabulary)._check_sizes()

    def open_without_data(self) -> None:
        """Take the number of ids that the config's tokenizer will have; one of a folder has those of the shape."""
        tokenizer = self.config.tokenizer
        if self._vocabulary is None and not isinstance(tokenizer, StoredTokenizerConfig):
            self.use(tokenizer.size if isinstance(tokenizer, TrainedTokenizerConfig) else BYTE_IDS)

    @property
    def _longest_turn(self) -> int:
        """Tokens of an assistant's longest turn; 0 without chats."""
        return 0 if self._cache is None else int(self._cache.info.get("longest_turn", 0))

    def use(self, vocabulary: int | None) -> LanguageDomain:
        """Use a tokenizer of so many ids; None: the shape's own. Returns the task."""
        self._vocabulary = vocabulary
        return self

    @property
    def cache(self) -> TextCache:
        """The opened cache."""
        if self._cache is None:
            raise UserError("this needs the texts: run `mmspeed preprocess` first")
        return self._cache

    @cached_property
    def settings(self) -> DecoderSettings:
        """The decoder's settings. Raises UserError for an unknown shape, and for sizes that do not go together."""
        settings, self._spare = configured(self.config, self._vocabulary)
        return settings

    def _check_sizes(self) -> None:
        """Raise UserError for a tokenizer larger than the embedding, and for heads or rows of it that devices cannot divide."""
        settings, parallel, section = self.settings, self.config.parallel, self.config.model
        if self._vocabulary is not None and self._vocabulary > settings.vocab_size:
            raise UserError(
                f"the tokenizer has {self._vocabulary:,} ids and the model's embedding {settings.vocab_size:,} rows: "
                "use the model's own tokenizer, or raise model.vocab_size"
            )
        turn, length = self._longest_turn, min(self.config.lengths)
        if turn > length:
            raise UserError(
                f"sequence_length: an assistant's turn in the chats has {turn:,} tokens and a pack {length:,}, so that it would be cut "
                "from what it answers; raise sequence_length, or reject longer chats by texts.max_tokens"
            )
        check_experts(parallel, "the model", *settings.expert_sizes)
        devices = parallel.together(False)  # that split heads
        for size, what in ((settings.num_attention_heads, "heads"), (settings.num_key_value_heads, "heads of keys")):
            if settings.latent is None and size % devices:
                raise UserError(
                    f"the model's {size} {what} cannot be divided among the {devices} devices of `parallel`"
                )
        rows, options = settings.vocab_size, (self._vocabulary, section.vocab_size, section.pretrained)
        if rows % devices and any(
            option is not None for option in options
        ):  # else the tokenizer will say how many rows
            sizes = (rows, settings.num_attention_heads, settings.num_key_value_heads)
            fits = ", ".join(str(n) for n in range(1, devices) if not any(size % n for size in sizes))
            even = f"set model.vocab_size: {-(-rows // devices) * devices}"
            raise UserError(
                f"parallel.tp {devices} does not divide the {rows:,} rows of the embedding and the head: "
                f"{even if section.pretrained is None else f'use one of {fits}'}"
            )

    # -- models ---------------------------------------------------------------------------------------------------------

    def build(self) -> dict[str, nn.Module]:
        """The decoder, without memory, under the role "model"."""
        settings, model = self.settings, self._spare
        pretrained = self.config.model.pretrained
        if pretrained is None:
            model = on_meta(settings)
        elif model is None:
            model = stored_decoder(pretrained, self.config.model.revision, settings.num_nextn_predict_layers)
        if model.settings != settings:  # the balance of experts is the config's, not the folder's
            model = decoder_of(cast(HubWeights, source_of(model)).folder, settings)
        self._spare, section = None, self.config.model
        return {"model": adapt(model, section.adapter, section.base)}

    def outlines(self) -> dict[str, nn.Module]:
        """The decoder without weights; its embedding may have other rows than that of the tokenizer. Raises UserError as `open`."""
        self._check_sizes()
        section = self.config.model
        return {"model": adapt(on_meta(self.settings), section.adapter, section.base)}

    def parts(self) -> Sequence[LearningPart]:
        """The decoder."""
        return (LearningPart(baseline=math.log(self._vocabulary) if self._vocabulary else None),)

    def inputs(
        self, model: nn.Module, batch: Batch, part: LearningPart, entry: str | None = None, given: Given | None = None
    ) -> Inputs:
        """Ids, bounds of documents and targets. Raises UserError for inputs that are `given`: texts have no times."""
        if given is not None:
            raise UserError("a decoder has no times: nothing can be given in the place of its texts")
        batch = batch if entry is None else batch.entry(entry)
        named = {name: batch[name] for name in ("ids", "bounds", "targets", "counted") if name in batch}
        arguments = {"ids_BN": named["ids"], "bounds_Z": named.get("bounds"), "target_BN": named["targets"]}
        return Inputs(arguments | {"counted_BN": named.get("counted")}, named)

    def values(self, output: Any, inputs: Inputs, batch: Batch) -> PackValues:
        """The values of each pack and each document."""
        experts = self.settings.experts
        balance = None if experts is None else experts.balance
        return PackValues(output, inputs.tensors, batch.weights_I, self.config.objective, balance)

    def notes(self) -> tuple[list[str], list[str]]:
        """A line about the texts, and a warning where the model can be neither sampled nor exported."""
        supply = self.supply
        tokens = int(np.asarray(self.cache.lengths)[supply.trained].sum(dtype=np.int64))
        held_out = int(np.count_nonzero(self.cache.held_out))
        line = f"texts: {supply.documents:,} documents of {tokens:,} tokens to train on, {held_out:,} held out"
        return [line, *self.exchange_lines()], self.warnings()

    def exchange_lines(self) -> list[str]:
        """What a token sends to experts on other devices, by flat exchanges and by way of nodes."""
        experts, width = self.settings.experts, parse_dtype(self.config.device.dtype).itemsize
        if experts is None:
            return []
        routing = EvenRouting(experts.num_experts, experts.top_k, experts.n_group, experts.topk_group)
        return expert_lines(self.config.parallel, routing, self.settings.hidden_size, width)

    def warnings(self) -> list[str]:
        """A line where transformers has no class for the model, which then can be neither sampled nor exported."""
        if self.config.model.pretrained is None:
            try:
                config_tree(self.settings)
            except UserError as error:
                return [f"`mmspeed sample` and `mmspeed export` will refuse this run: {error}"]
        return []

    # -- data -----------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> PackLength:
        """The shape class of packs, outside of the stages of a curriculum."""
        return PackLength(self.config.sequence_length)

    @cached_property
    def supply(self) -> DocumentSupply:
        """The documents to train on, with the shares of their sources."""
        return self._supply(None)

    def _supply(self, stage: Mapping[str, float] | None) -> DocumentSupply:
        """The documents with the shares of a stage (None: those of the sources)."""
        cache, texts = self.cache, self.config.texts
        named = dict(zip(texts.source_names, texts.sources, strict=True))
        weights = {name: source.weight for name, source in named.items() if source.weight is not None}
        if stage is not None:
            weights = {name: stage.get(name, 0.0) for name in named}
        return DocumentSupply(
            cache.lengths,
            cache.source,
            ~cache.held_out,
            cache.sources,
            cache.fingerprint,
            {name: source.repeats for name, source in named.items()},
            weights or None,
            texts.temperature if not weights else None,
            cache.targets,
        )

    def _mean_squares(self, length: int) -> float:
        """The mean over packs of the sum of squared lengths, of packs that are full of whole or cut documents."""
        if self._cache is None:
            return float(length) ** 2
        if length not in self._squares:
            lengths = np.asarray(self.cache.lengths)[self.supply.trained].astype(np.int64)
            full, rest = np.divmod(lengths, length)
            squares = float((full * length**2 + rest**2).sum() / max(1, lengths.sum()) * length)
            self._squares[length] = squares
        return self._squares[length]

    @cached_property
    def _one(self) -> Work:
        """The work of a document of one token."""
        return forward_work(self.settings, [1])

    def _cost(self, tokens: float, squares: float) -> float:
        """FLOPs of forward and backward."""
        one = self._one
        return 3 * (one.products * tokens + one.attention * squares)

    def batching(self, place: RunPlace) -> Batching:
        """The packs of a step."""
        config = self.config
        costs = SampleCosts(self.tokens, self.cost, lambda sample: self.sample_cost(sample) / self.cost(self.shape))
        return make_batching(config.batching, config.train, self.shapes(), costs, place.dealt, config.parallel)

    def data(self, place: RunPlace) -> LanguageData:
        """The order of each epoch's packs, and this rank's share of each step."""
        config, one = self.config, self._one
        batching = self.batching(place)
        sampler = self._sampler(batching, one.attention / one.products, config.seed)
        loader = Loader(
            sampler,
            rank=place.number,
            world=place.dealt,
            prefetch=config.train.prefetch,
            workers=config.train.loader_workers,
            device=place.device,
            collate=PackCollate(self.cache),
        )
        packs, first = sampler.packs_of(0), config.lengths[0]
        full = packs.ranges.tokens / len(packs) / first
        weights = StepWeights(config.weighting, sampler, lambda shape: full * shape.numbers)
        return LanguageData(self.cache, sampler, loader, weights)

    def _sampler(self, batching: Batching, attention: float, seed: int) -> PackSampler | StagedPacks:
        """The order of the run's packs, stage by stage."""
        config = self.config

        def order(length: int, supply: DocumentSupply) -> PackSampler:
            return PackSampler(supply, length, config.packing, batching, attention, seed)

        if not config.curriculum:
            return order(config.sequence_length, self.supply)
        supplies = [
            self.supply if stage.weights is None else self._supply(stage.weights) for stage in config.curriculum
        ]
        orders = map(order, config.lengths, supplies)
        return StagedPacks(list(zip(orders, [stage.steps for stage in config.curriculum], strict=True)))

    def shapes(self) -> Sequence[ShapeClass]:
        """The classes of packs, by their lengths."""
        return [PackLength(length) for length in sorted(set(self.config.lengths))]

    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        """Packs of random ids, each of two documents."""
        return self._synthetic(shape, items).to(place.device.torch_device, torch.float32)

    def _synthetic(self, shape: ShapeClass, items: int) -> Batch:
        length = shape.numbers
        ids_BN = torch.randint(
            self.settings.vocab_size, (items, length), generator=torch.Generator().manual_seed(self.config.seed)
        )
        targets_BN = ids_BN.roll(-1, 1)
        targets_BN[:, [length // 2 - 1, length - 1]] = IGNORED
        starts = [row * length + part for row in range(items) for part in (0, length // 2)]
        bounds = torch.tensor([*starts, items * length], dtype=torch.int32)
        counted_BN = torch.ones(items, length, dtype=torch.bool)
        tensors = {"ids": ids_BN, "targets": targets_BN, "bounds": bounds, "counted": counted_BN}
        return Batch(
            tensors, [Item(f"synthetic {row}", shape=shape.name) for row in range(items)], torch.ones(items), shape
        )

    def synthetic_divisors(self, batch: Batch, batches: int) -> Divisors:
        """The packs and target tokens of `batches` such batches."""
        targets = int((batch["targets"] != IGNORED).sum()) * batches
        packs = float(batch.size * batches)
        return {
            "samples": packs,
            "tokens": float(max(1, targets)),
            "real_tokens": packs * batch.shape.numbers,
            "units": float((len(batch["bounds"]) - 1) * batches),
        }

    def outline_batch(self, shape: ShapeClass, items: int) -> Batch:
        """Packs of one document each, whose bounds no value tells."""
        batch = self._synthetic(shape, items)
        return replace(batch, tensors={name: batch[name] for name in ("ids", "targets")})

    # -- work -----------------------------------------------------------------------------------------------------------

    def tokens(self, shape: ShapeClass) -> int:
        """Tokens of a pack, padding included."""
        return shape.numbers

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        """Work of a full pack of documents of usual lengths."""
        one = self._one
        squares = self._mean_squares(shape.numbers)
        return Work(one.products * shape.numbers, one.attention * squares, one.elementwise * shape.numbers)

    def block_work(self) -> BlockWork:
        """Work of each block for a document of the longest packs' length."""
        return block_work(self.settings, max(self.config.lengths))

    def sample_cost(self, sample: OrderedSample) -> float:
        """FLOPs of training on a pack, by the lengths of its documents."""
        assert isinstance(sample, PackSample)
        return self._cost(sample.tokens, sample.squares)

    def usage(self, step: StepData) -> StepUsage:
        """Packs, real tokens, and the work of the packs."""
        samples = packs_of(step)
        works = (forward_work(self.settings, [count for _, _, count in sample.pieces]) for sample in samples)
        tokens, frozen = sum(sample.tokens for sample in samples), self.config.adapter is not None
        return StepUsage(len(samples), tokens, sum(works, Work()), frozen)

    # -- looking at a run -----------------------------------------------------------------------------------------------

    def describe(self, step: StepData) -> dict[str, Any]:
        """Packs, real tokens, padding and, with several sources, the tokens of each."""
        samples = packs_of(step)
        tokens = sum(sample.tokens for sample in samples)
        places = max(1, sum(sample.shape.numbers for sample in samples))
        row: dict[str, Any] = {"samples": len(samples), "tokens": tokens, "padding": round(1 - tokens / places, 6)}
        if len(self.cache.sources) > 1:
            row["source_tokens"] = tokens_by_source(self.cache, samples)
        return row

    def validation(self, models: Models, data: Data, place: RunPlace) -> Validation | None:
        """Loss and perplexity of held-out documents, by source; None where there are none."""
        packs = held_out_packs(self.cache, self.config.sequence_length, self.config.validate_.samples)
        if not packs:
            return None
        most = self.config.train.micro_batch_size or 8
        return HeldOutPacks(self, self.cache, packs, most, place)

    def info(self) -> dict[str, Any]:
        """The texts and their tokenizer."""
        cache = self.cache
        facts = {"fingerprint": cache.fingerprint, "vocabulary": cache.vocabulary, "sources": list(cache.sources)}
        ends = {"begin_of_document": list(cache.begin_of_document), "end_of_document": cache.end_of_document}
        return {"texts": facts | ends}

    def files(self) -> Mapping[str, Path]:
        """The tokenizer's files."""
        folder = self.cache.tokenizer_folder
        if folder is None:
            return {}
        return {f"tokenizer/{path.name}": path for path in sorted(folder.iterdir()) if path.is_file()}

    def setting(self) -> dict[str, Any]:
        """The model's section, its vocabulary, and the lengths of packs."""
        section = self.config.model.model_dump(mode="json")
        named = {f"model.{name}": value for name, value in section.items()}
        return {**named, "model.rows": self.settings.vocab_size, "sequence_length": list(self.config.lengths)}

    def small(self, folder: Path) -> SmallRun:
        """A tiny twin of the decoder on synthetic documents. Raises UserError for heads or rows that do not fit the layout."""
        self._check_sizes()
        return small_language(self.config, self.settings, folder)
