"""A small run of the language task: a tiny twin of the decoder, and a text cache of synthetic documents."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspeed import rng
from mmspeed.config.language import OF_EXPERTS, SIZES, LanguageConfig, LanguageModelConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.texts import BytesTokenizerConfig, TextsConfig, TextSourceConfig
from mmspeed.config.training import BatchingConfig
from mmspeed.data.cache.document_blocks import (
    Document,
    HeldOut,
    TextSource,
    add_block,
    block_tensors,
    recipe_of,
    write_table,
    write_text_info,
)
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.tokenizer_file import TokenizerFacts
from mmspeed.data.cache.writer import CacheWriter
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.families import config_tree
from mmspeed.models.language.shapes import tiny_twin
from mmspeed.models.language.weights import on_meta, write_folder
from mmspeed.parallel.experts import check_experts
from mmspeed.parallel.tensor import check_heads
from mmspeed.pipelines.domains.small import shrunk_size, small_adapter, small_base, value_off_start
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import SmallRun

SYNTHETIC = "synthetic"  # the only source
TOKENS = 61  # of a pack, at least: a prime number, which few groups divide
WINDOW = 16  # of blocks that see so many earlier keys
LEAST_ROWS = 128  # of the vocabulary
TINY = "tiny-"


def small_language(config: LanguageConfig, settings: DecoderSettings, folder: Path) -> SmallRun:
    """The small run of a config whose decoder has these settings. Raises UserError for heads that do not fit the layout."""
    parallel, train = config.parallel, config.train
    check_heads(settings.num_attention_heads, parallel.ulysses, parallel.tp, settings.num_key_value_heads)
    check_experts(parallel, "the model", *settings.expert_sizes)
    small, remarks, device = shrunk_settings(settings, parallel), list[str](), config.device
    tokens = max(TOKENS, 8 * parallel.group + 5)
    packs = math.prod(parallel.sizes().values()) // parallel.group + 1
    if small.experts is not None and device.dtype != "float32":
        remarks.append(f"compared in float32: in {device.dtype} a token may go to other experts on another layout")
        device = device.model_copy(update={"dtype": "float32"})
    if small.experts is not None and small.experts.balance == "global_batch":
        small = replace(small, experts=replace(small.experts, balance="micro_batch"))
        remarks.append(
            "compared with model.balance: micro_batch: what a step has met so far is more where more processes compute at a time"
        )
    _write_cache(folder / "cache", 4 * packs, tokens, small.vocab_size, config.seed)
    changes: dict[str, Any] = {
        "output": str(folder / "runs"),
        "model": _section(config.model, small, folder / "model", config.seed),
        "texts": TextsConfig(
            sources=(TextSourceConfig(path=str(folder / SYNTHETIC), name=SYNTHETIC),), cache=str(folder / "cache")
        ),
        "tokenizer": BytesTokenizerConfig(kind="bytes"),
        "sequence_length": tokens,
        "curriculum": (),
        "train": train.model_copy(update={"batch_size": packs, "micro_batch_size": 2}),
        "batching": BatchingConfig(),
        "device": device,
    }
    items = [f"a step of {packs} packs of {tokens} tokens, {config.packing}"]
    return SmallRun(config.model_copy(update=changes), _words(small), ("packs",), items=items, remarks=remarks)


def shrunk_settings(settings: DecoderSettings, parallel: ParallelConfig) -> DecoderSettings:
    """The tiny twin of a decoder, with as many heads as a layout needs and sizes that it divides where it divides those of the decoder.

    Processes always divide its vocabulary: they do once a tokenizer says how many ids there are.
    """
    twin, tp = tiny_twin(settings), parallel.tp
    ratio = twin.num_attention_heads // twin.num_key_value_heads
    key_heads = -(-twin.num_key_value_heads // tp) * tp
    while ratio * key_heads // tp < parallel.ulysses:
        key_heads += tp
    rows = shrunk_size(settings.vocab_size, tp, LEAST_ROWS)
    experts = twin.experts
    if experts is not None:
        hidden, parts = experts.moe_intermediate_size, parallel.replicas * parallel.ep
        same = max(
            1, math.prod(parallel.sizes().values()) // parts
        )  # processes that share the hidden units of an expert
        experts = replace(
            experts,
            num_experts=math.lcm(experts.num_experts, parallel.ep),
            moe_intermediate_size=hidden + -hidden % same,
        )
    blocks = max(twin.num_hidden_layers, Pipeline.of(parallel).stages)
    return replace(
        twin,
        experts=experts,
        num_hidden_layers=blocks,
        num_attention_heads=ratio * key_heads,
        num_key_value_heads=key_heads,
        intermediate_size=shrunk_size(settings.intermediate_size, tp, twin.intermediate_size),
        vocab_size=rows + -rows % tp,
        windows=tuple(window and min(window, WINDOW) for window in twin.windows),
    )


def _section(own: LanguageModelConfig, small: DecoderSettings, folder: Path, seed: int) -> LanguageModelConfig:
    """The section of the small decoder: a folder with weights by seed in place of another, else the keys of a named shape's twin."""
    balance = small.experts.balance if small.experts is not None else None
    if own.pretrained is not None:
        write_model(small, folder, seed)
        adapter = small_adapter(own.adapter)
        return LanguageModelConfig(pretrained=str(folder), balance=balance, adapter=adapter, base=small_base(own.base))
    experts: dict[str, Any] = {}
    if small.experts is not None:
        experts = {name: value for name, value in vars(small.experts).items() if name in OF_EXPERTS}
        experts |= {"num_experts_per_tok": small.experts.top_k, "first_k_dense_replace": len(small.experts.dense)}
    return LanguageModelConfig(
        shape=TINY + own.shape.removeprefix(TINY),
        vocab_size=small.vocab_size,
        windows=small.windows or None,
        num_nextn_predict_layers=small.num_nextn_predict_layers,
        balance=balance,
        **{name: getattr(small, name) for name in SIZES},
        **experts,
    )


def write_model(settings: DecoderSettings, folder: Path, seed: int) -> None:
    """Write a folder of transformers, with weights by seed."""
    model, base = on_meta(settings).to_empty(device="cpu"), folder.with_name("settings")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(value_off_start(name, tensor.shape, seed))
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(config_tree(settings)), encoding="utf-8")
    write_folder(model, base, folder)


def _write_cache(root: Path, count: int, tokens: int, vocabulary: int, seed: int) -> None:
    """Write a text cache of documents drawn by their numbers: of one token, as long as a pack, partly trained."""
    drawn = [1 + rng.key64(seed, "document", number) % (tokens // 2) for number in range(count)]
    documents = []
    for number, length in enumerate([tokens, 1, *drawn]):
        ids = np.array([rng.key64(seed, "id", number, place) % vocabulary for place in range(length)], np.uint32)
        marks = np.array([place % 3 > 0 for place in range(length)], np.bool_)
        documents.append(Document(ids, digest(str(number).encode()), marks if number % 3 == 2 else None))
    facts = TokenizerFacts("ids", vocabulary)
    recipe = recipe_of(facts)
    with CacheWriter(root) as writer:
        key = add_block(writer, documents, vocabulary, recipe)
    write_table(root, [(key, 0, block_tensors(documents, vocabulary))], [TextSource(SYNTHETIC)], HeldOut(), facts)
    write_text_info(root, facts, recipe)


def _words(own: DecoderSettings) -> str:
    """The sizes of a decoder in words."""
    words = [
        f"{own.num_hidden_layers} blocks of width {own.hidden_size}, {own.num_attention_heads} heads, {own.num_key_value_heads} of keys"
    ]
    words += ["latent attention"] if own.latent is not None else []
    words += [f"{own.experts.num_experts} experts"] if own.experts is not None else []
    words += [f"{own.num_nextn_predict_layers} further tokens"] if own.num_nextn_predict_layers else []
    words += [f"{own.vocab_size} rows of the vocabulary, {'tied' if own.tie_word_embeddings else 'not tied'}"]
    return ", ".join(words)
