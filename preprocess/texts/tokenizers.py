"""Make the tokenizer of a text cache: bytes, one trained on a sample of the texts, or the fast one of a transformers folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mmspeed.config.texts import BytesTokenizerConfig, StoredTokenizerConfig, TextsConfig, TokenizerConfig
from mmspeed.data.cache.tokenizer_file import (
    END,
    MAIN,
    NAMES,
    TextTokenizer,
    TokenizerFacts,
    byte_tokenizer,
    plain_config,
    store_tokenizer,
)
from mmspeed.errors import UserError
from mmspeed.models.weights import resolve
from mmspeed.preprocess.texts.sources import TextRow, rows_of


def make_tokenizer(
    root: Path, config: TokenizerConfig, texts: TextsConfig, begun: Path | None = None
) -> tuple[TokenizerFacts, TextTokenizer]:
    """Write the tokenizer of a config to the folder of a cache, and return its facts and the tokenizer.

    `begun`: a folder of the one to take where one would be trained. Raises UserError if there is no such folder, it holds no fast tokenizer, or no texts to train on.
    """
    if isinstance(config, BytesTokenizerConfig):
        return store_tokenizer(root, byte_tokenizer(), config.kind, END)
    if isinstance(config, StoredTokenizerConfig):
        folder = resolve(config.path, (None,), config.revision, NAMES, "tokenizer.path")
        end = _end(folder, config)
        return store_tokenizer(root, _files(folder, config), config.kind, end, config.begin_of_document)
    if begun is not None and (begun / MAIN).is_file():
        files = {name: (begun / name).read_bytes() for name in NAMES if (begun / name).is_file()}
    else:
        files = _trained(_sample(texts, int(config.sample_mb * 1e6)), config.size)
    return store_tokenizer(root, files, config.kind, END)


def _files(folder: Path, config: StoredTokenizerConfig) -> dict[str, bytes]:
    if not (folder / MAIN).is_file():
        raise UserError(
            f"tokenizer.path: {folder} has no {MAIN}; only fast tokenizers are taken: load it with transformers' AutoTokenizer, "
            "call save_pretrained, and name that folder"
        )
    files = {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
    if config.chat_template is not None:
        files["chat_template.jinja"] = config.chat_template.encode()
    return files


def _end(folder: Path, config: StoredTokenizerConfig) -> str | None:
    """The token behind each document: the config's, else the end of sequence of the folder's `tokenizer_config.json`."""
    path = folder / "tokenizer_config.json"
    if config.end_of_document is not None or not path.is_file():
        return config.end_of_document
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _sample(texts: TextsConfig, most: int) -> list[str]:
    """The first texts of all sources in turn, up to `most` bytes. Raises UserError if there are none."""
    streams: list[Iterator[TextRow]] = [rows_of(texts, source) for source in texts.sources if source.content == "text"]
    sample, size, rejected, first = list[str](), 0, Counter[str](), ""
    while streams and size < most:
        for stream in list(streams):
            while (row := next(stream, None)) is not None and row.reason:
                rejected[row.reason] += 1
                first = first or f", such as {row.place}"
            if row is None:
                streams.remove(stream)
            elif size < most:
                sample.append(row.value)
                size += len(row.value.encode())
    if not sample:
        counts = "".join(f"; rejected, {reason}: {count:,}" for reason, count in sorted(rejected.items()))
        raise UserError(f"tokenizer.kind: train needs a source of `content: text` with a text in it{counts}{first}")
    return sample


def _trained(sample: list[str], size: int) -> dict[str, bytes]:
    """The files of a byte-level BPE of `size` ids, trained by the package `tokenizers`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(sample, trainer)
    return {MAIN: core.to_str(pretty=True).encode(), **plain_config()}
