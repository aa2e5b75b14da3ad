"""Write documents of token ids to a cache: blocks of many documents in its section `texts`, and one table of all documents.

A block is an entry like any other: its key is a digest of the contents of its documents and of the recipe by which they became ids
(tokenizer, template, version), its payload is safetensors:

    ids      (N,) of the smallest unsigned type that holds the vocabulary: the documents behind one another
    lengths  (n,) uint32: ids of each document; 0 for one that was rejected
    content  (n, 16) uint8: the digest of each document
    reason   (n,) uint8: 0, or the number in `REASONS` of the reason why a document was rejected
    check    (n,) uint32: bits of the XXH3 of each document's ids (and marks), by which readers notice damage
    trained  (ceil(N / 8),) uint8, chats only: a bit for each id, set if it has a loss

`index/documents.arrow` lists the documents that were kept, in the order of the sources. It is made of the blocks, and is mapped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash
from torch import Tensor

from mmspeed.rng import key64

from .index import write_batch
from .keys import canonical_json, digest, entry_key
from .tables import write_info
from .tokenizer_file import TokenizerFacts
from .writer import CacheWriter

SECTION = "texts"
DOCUMENTS_NAME = "documents.arrow"
TABLE_VERSION = 1  # of the table; those of other versions are made again by `mmspeed preprocess`
RECIPE_VERSION = 1  # of the code that turns a document into ids; part of every key
ALTERED_VERSION = 2  # in keys of blocks with a document that version 1 turned into other ids or marks

# The order is stored: append new reasons at the end.
REASONS = (
    "",
    "empty",
    "too_long",
    "not_utf8",
    "not_a_string",
    "missing_column",
    "broken_line",
    "no_tokens",
    "unknown_ids",
    "too_large",
    "bad_chat",
    "special_token",
)
DOCUMENTS_SCHEMA = pa.schema(
    {
        "length": pa.uint32(),  # ids
        "held_out": pa.uint8(),
        "source": pa.uint16(),  # number in the list of sources
        "block": pa.int32(),  # number in the list of blocks
        "begin": pa.int64(),  # offset of the first id in the block's ids
        "check": pa.uint32(),
    }
)
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Document:
    """The ids of one document, or the reason why it has none.

    `content` is the digest (32 hexadecimal digits) of what the ids were made from; `trained` marks the ids that have a loss.
    """

    ids: Array
    content: str
    trained: npt.NDArray[np.bool_] | None = None
    reason: str = ""


@dataclass(frozen=True)
class TextSource:
    """A source in a cache: its name and its share, as the config had them at the last preprocess."""

    name: str
    weight: float | None = None
    repeats: int = 1
    held_out: bool = False  # all of its documents


@dataclass(frozen=True)
class HeldOut:
    """The share of the documents that is held out, drawn by seed and content: equal documents are on one side."""

    share: float = 0.0
    seed: int = 0

    def of(self, content_n16: Array) -> npt.NDArray[np.bool_]:
        """A mark for each digest (n, 16)."""
        halves = np.ascontiguousarray(content_n16).view("<u8").astype(np.uint64)
        mixed = _mixed(halves[:, 1] ^ _mixed(halves[:, 0] ^ np.uint64(key64("held out", self.seed) & (2**64 - 1))))
        return np.asarray((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.share)


def _mixed(words: Array) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def id_type(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds the ids [0, vocabulary). Raises ValueError beyond 32 bits."""
    for kind in (np.uint8, np.uint16, np.uint32):
        if 0 < vocabulary <= int(np.iinfo(kind).max) + 1:
            return np.dtype(kind)
    raise ValueError(f"no vocabulary has {vocabulary} entries")


def check_of(ids: Array, bits: Array | None = None) -> int:
    """32 bits of the XXH3 of a document's ids and marks, not 0."""
    state = xxhash.xxh3_64(np.ascontiguousarray(ids).data)
    if bits is not None:
        state.update(np.packbits(bits).data)
    return state.intdigest() & 0xFFFFFFFF or 1


def recipe_of(tokenizer: TokenizerFacts, **parts: Any) -> dict[str, Any]:
    """All that decides the ids of a document, apart from its content: parts of every block's key."""
    return {"tokenizer": tokenizer.fingerprint, "version": RECIPE_VERSION, **parts}


def block_parts(contents: Sequence[str], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the key of a block with documents of these contents."""
    return {"documents": len(contents), "contents": digest("".join(contents).encode()), "recipe": dict(recipe)}


def block_tensors(documents: Sequence[Document], vocabulary: int) -> dict[str, Tensor]:
    """The payload of a block. Raises ValueError for ids outside of the vocabulary."""
    kind = id_type(vocabulary)
    kept = [np.asarray(document.ids) for document in documents]
    ids = np.concatenate(kept) if kept else np.empty(0, kind)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"ids outside of a vocabulary of {vocabulary}")
    arrays = {
        "ids": ids.astype(kind),
        "lengths": np.array([len(part) for part in kept], np.uint32),
        "content": np.frombuffer(bytes.fromhex("".join(d.content for d in documents)), np.uint8).reshape(-1, 16),
        "reason": np.array([REASONS.index(document.reason) for document in documents], np.uint8),
    }
    marks = None
    if any(document.trained is not None for document in documents):
        each = [np.ones(len(p), bool) if d.trained is None else d.trained for d, p in zip(documents, kept, strict=True)]
        marks = each
        arrays["trained"] = np.packbits(np.concatenate(each))
    checks = [check_of(part.astype(kind), None if marks is None else marks[number]) for number, part in enumerate(kept)]
    arrays["check"] = np.array(checks, np.uint32)
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def longest_turn(tensors: Mapping[str, Tensor]) -> int:
    """The most ids with a loss in a row within a document of a block: an assistant's longest turn; 0 where all ids have one."""
    if "trained" not in tensors:
        return 0
    lengths = tensors["lengths"].numpy().astype(np.int64)
    marks = np.unpackbits(tensors["trained"].numpy())[: lengths.sum()].astype(bool)
    first = np.zeros(len(marks) + 1, bool)  # of a document; ends behind the last one
    first[np.cumsum(lengths) - lengths] = first[-1] = True
    before, behind = np.append(False, marks[:-1]), np.append(marks[1:], False)
    begins = np.flatnonzero(marks & (~before | first[:-1]))
    ends = np.flatnonzero(marks & (~behind | first[1:]))
    return int((ends - begins + 1).max(initial=0))


def add_block(writer: CacheWriter, documents: Sequence[Document], vocabulary: int, recipe: Mapping[str, Any]) -> str:
    """Add a block of documents to a cache and return its key; nothing is written if it is there already.

    Its index names no source: a shard that was sealed and not yet indexed when its writer was killed then gets the same index.
    """
    contents = [document.content for document in documents]
    parts = block_parts(contents, recipe)
    key = entry_key(parts)
    tokens = sum(len(document.ids) for document in documents)
    tensors = block_tensors(documents, vocabulary)
    writer.add(SECTION, key, tensors, parts, tokens=tokens, content_id=parts["contents"])
    return key


@dataclass
class TableCounts:
    """The counts of a table of documents: kept ones, their ids, those held out, and rejected ones by reason."""

    documents: int = 0
    tokens: int = 0
    held_out: int = 0
    rejected: dict[str, int] = field(default_factory=dict)


def write_table(
    root: Path,
    blocks: Iterable[tuple[str, int, Mapping[str, Tensor]]],
    sources: Sequence[TextSource],
    held_out: HeldOut,
    tokenizer: TokenizerFacts,
) -> TableCounts:
    """Write `index/documents.arrow` of blocks: (key, number of the source, payload), in the order that documents are to have.

    A document that a held-out source has, too, is held out in every source. Raises UserError if the disk is full.
    """
    keys: list[str] = []
    columns: dict[str, list[Array]] = {name: [] for name in DOCUMENTS_SCHEMA.names}
    counts = TableCounts()
    contents: list[Array] = []  # (n, 16), by block
    for number, (key, source, payload) in enumerate(blocks):
        keys.append(key)
        lengths, reason = payload["lengths"].numpy(), payload["reason"].numpy()
        kept = reason == 0
        content_n16 = payload["content"].numpy()[kept]
        contents.append(np.ascontiguousarray(content_n16))
        marks = held_out.of(content_n16) | sources[source].held_out
        begin = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) if len(lengths) else np.empty(0)
        rows = int(kept.sum())
        for name, values in {
            "length": lengths[kept],
            "held_out": marks,
            "source": np.full(rows, source),
            "block": np.full(rows, number),
            "begin": begin[kept],
            "check": payload["check"].numpy()[kept],
        }.items():
            columns[name].append(values.astype(DOCUMENTS_SCHEMA.field(name).type.to_pandas_dtype()))
        counts.documents += rows
        counts.tokens += int(lengths[kept].sum(dtype=np.int64))
        for code, many in enumerate(np.bincount(reason, minlength=1).tolist()):
            if code and many:
                counts.rejected[REASONS[code]] = counts.rejected.get(REASONS[code], 0) + many
    held = {number for number, source in enumerate(sources) if source.held_out}
    _hold_out_copies(columns, contents, held)
    counts.held_out = sum(int(marks.sum()) for marks in columns["held_out"])
    store_table(root, columns, keys, sources, tokenizer)
    return counts


def _hold_out_copies(columns: Mapping[str, list[Array]], contents: list[Array], held: Collection[int]) -> None:
    """Hold out, in place, the documents that a source of the numbers `held` has, too; `contents` (n, 16) are by block."""
    if not held or not contents:
        return
    halves = np.concatenate(contents).view("<u8")  # (documents, 2)
    of_held = np.isin(np.concatenate(columns["source"]), list(held))
    copies = np.flatnonzero(np.isin(halves[:, 0], halves[of_held, 0]) & ~of_held)
    known = set(map(bytes, halves[of_held]))
    marks = np.concatenate(columns["held_out"])
    marks[[row for row in copies.tolist() if bytes(halves[row]) in known] or slice(0)] = 1
    columns["held_out"][:] = [marks]


def store_table(
    root: Path,
    columns: Mapping[str, Sequence[Array]],
    blocks: Sequence[str],
    sources: Sequence[TextSource],
    tokenizer: TokenizerFacts,
) -> None:
    """Write `index/documents.arrow`: parts of each column, to be joined, and the keys of the blocks by number.

    Raises UserError if the disk is full.
    """
    arrays = [
        pa.array(np.concatenate([np.empty(0, f.type.to_pandas_dtype()), *columns[f.name]]), f.type)
        for f in DOCUMENTS_SCHEMA
    ]
    facts = {
        "version": TABLE_VERSION,
        "blocks": list(blocks),
        "sources": [asdict(source) for source in sources],
        "tokenizer": tokenizer.fingerprint,
    }
    facts["fingerprint"] = _fingerprint(arrays, facts)
    write_batch(root / "index" / DOCUMENTS_NAME, arrays, DOCUMENTS_SCHEMA, facts)


def _fingerprint(arrays: Sequence[pa.Array], facts: Mapping[str, Any]) -> str:
    """A digest of the documents, their order, splits and sources' names; of no weights, which may change within a run."""
    state = xxhash.xxh3_128()
    for array in arrays:
        if len(array):
            state.update(memoryview(array.buffers()[1])[: array.nbytes])
    names = [source["name"] for source in facts["sources"]]
    state.update(canonical_json([facts["blocks"], names, facts["tokenizer"]]).encode())
    return state.hexdigest()


def write_text_info(root: Path, tokenizer: TokenizerFacts, recipe: Mapping[str, Any], **more: Any) -> None:
    """Write the `cache.json` of a text cache."""
    write_info(root, {"task": "language", "tokenizer": tokenizer.to_json(), "recipe": dict(recipe), **more})
