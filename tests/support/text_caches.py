"""Text caches of given ids, without a preprocessing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from mmspeed.data.cache.document_blocks import (
    Document,
    HeldOut,
    TableCounts,
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


def write_text_cache(
    root: Path,
    documents: Mapping[str, Iterable[Document | Sequence[int]]],
    tokenizer: TokenizerFacts,
    held_out: HeldOut | None = None,
    block: int = 65_536,
) -> TableCounts:
    """Make a cache of documents of ids, by the name of their source; `block` is the number of documents in a block."""
    recipe = recipe_of(tokenizer)
    written: list[tuple[str, int, Mapping[str, Tensor]]] = []
    with CacheWriter(root) as writer:
        for number, rows in enumerate(documents.values()):
            whole = [row if isinstance(row, Document) else _of_ids(row) for row in rows]
            for begin in range(0, len(whole), block):
                part = whole[begin : begin + block]
                key = add_block(writer, part, tokenizer.vocabulary, recipe)
                written.append((key, number, block_tensors(part, tokenizer.vocabulary)))
    counts = write_table(root, written, [TextSource(name) for name in documents], held_out or HeldOut(), tokenizer)
    write_text_info(root, tokenizer, recipe)
    return counts


def _of_ids(ids: Sequence[int]) -> Document:
    numbers = np.asarray(ids, np.int64)
    content = digest(json.dumps(numbers.tolist()).encode())
    return Document(numbers, content) if len(numbers) else Document(numbers, content, reason="empty")
