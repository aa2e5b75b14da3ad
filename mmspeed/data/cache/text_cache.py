"""Read a text cache: documents of token ids by number, mapped, without a copy; processes share its pages.

Opening reads only the description of the table's columns, so ten million documents open as fast as ten. Each document's ids are
compared with its checksum when they are first read in a process, and ids are below the size of the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from mmspeed.config.places import is_url
from mmspeed.errors import UserError

from .document_blocks import DOCUMENTS_NAME, DOCUMENTS_SCHEMA, SECTION, TABLE_VERSION, TextSource, check_of, id_type
from .files import ReaderLock
from .index import FACTS
from .index_reader import PayloadLocation
from .remote import RemoteStore
from .seals import sealed_file
from .tables import entry_schema, index_files, read_info, read_rejects, read_table
from .tensor_views import tensors_of
from .tokenizer_file import FOLDER, MAIN, TextTokenizer, TokenizerFacts, tokenizer_problems

_CHECKED_BYTES = 1 << 25  # the seal of a table up to this size is checked when it is opened
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class DocumentTable:
    """The mapped table of documents: a column of each, and the facts beside them."""

    columns: dict[str, Array]
    blocks: list[str]
    sources: list[TextSource]
    fingerprint: str


def read_document_table(path: Path, checked: bool = False) -> DocumentTable:
    """Map the table of documents; its seal is checked if it is small, or if `checked`. Raises UserError if it is damaged."""
    try:
        if (checked or path.stat().st_size <= _CHECKED_BYTES) and not sealed_file(path):
            raise ValueError("not as it was written")
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            facts = json.loads((reader.schema.metadata or {})[FACTS])
            if facts["version"] != TABLE_VERSION or not reader.schema.equals(DOCUMENTS_SCHEMA):
                raise ValueError("of another version")
            if reader.num_record_batches != 1:
                raise ValueError("another table")
            batch = reader.get_batch(0)
        batch.validate()
        columns = {name: _column(batch, name) for name in DOCUMENTS_SCHEMA.names}
        sources = [TextSource(**source) for source in facts["sources"]]
        return DocumentTable(columns, list(facts["blocks"]), sources, str(facts["fingerprint"]))
    except FileNotFoundError:
        raise UserError(
            f"cache {path.parent.parent} lists no documents yet; run mmspeed preprocess to its end"
        ) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is damaged ({error}); delete it and run mmspeed preprocess again: it is made from the blocks"
        ) from error


def _column(batch: pa.RecordBatch, name: str) -> Array:
    column, kind = batch.column(name), DOCUMENTS_SCHEMA.field(name).type.to_pandas_dtype()
    if column.null_count or column.offset or len(column) != batch.num_rows:
        raise ValueError(f"a column {name} of another form")
    return np.frombuffer(column.buffers()[1], kind, len(column)) if len(column) else np.empty(0, kind)


@dataclass(frozen=True)
class _BlockIds:
    """The ids of a block and its packed marks, as views of a mapping."""

    ids: Array
    marks: Array | None


class BlockStore:
    """The payloads of a cache's blocks by key, mapped from its shards or fetched from a remote copy."""

    def __init__(self, root: Path, location: str, remote: RemoteStore | None = None) -> None:
        self.root, self.location, self._remote = root, location, remote
        self._places: dict[str, PayloadLocation] | None = None
        self._shards: dict[str, memoryview] = {}

    def tensors(self, key: str, verify: bool = False) -> dict[str, Tensor]:
        """The tensors of a block as views of its payload, whose checksum is compared if `verify`.

        Raises UserError if there is no such block, ValueError if its payload is damaged, OSError if it cannot be read.
        """
        place = self._place(key)
        payload = self._payload(key, place)
        if verify and hashlib.sha256(payload).digest()[: len(place.checksum)] != place.checksum:
            raise ValueError(f"its checksum in {place.shard} differs")
        return tensors_of(payload)

    def _place(self, key: str) -> PayloadLocation:
        if self._places is None:
            names = ("key", "section", "shard", "offset", "bytes", "checksum")
            schema, places = pa.schema([entry_schema().field(name) for name in names]), {}
            for path in index_files(self.root):
                for row in read_table(path, schema).to_pylist():
                    if row["section"] == SECTION:
                        checksum = bytes.fromhex(row["checksum"])
                        places[row["key"]] = PayloadLocation(row["shard"], row["offset"], row["bytes"], checksum)
            self._places = places
        if key not in self._places:
            raise UserError(f"cache {self.location} has no block {key} any more; run mmspeed preprocess again")
        return self._places[key]

    def _payload(self, key: str, place: PayloadLocation) -> memoryview:
        if self._remote is not None:
            return self._remote.view(SECTION, key, place)
        if place.shard not in self._shards:
            fd = os.open(self.root / place.shard, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._shards[place.shard] = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
            finally:
                os.close(fd)
        payload = self._shards[place.shard][place.offset : place.offset + place.size]
        if len(payload) != place.size:
            raise ValueError(f"{place.shard} is cut short")
        return payload


class TextCache:
    """The documents of a text cache, by number in the order of its sources.

    Args:
        path: the cache's folder, or the URL of a copy of it.
        local_cache, local_bytes: for a URL, the folder for fetched files and the bytes of payloads to keep there.

    Attributes:
        lengths: (n,) uint32, ids of each document; mapped.
        held_out: (n,) bool, marks of documents that are not trained on.
        source: (n,) uint16, number of each document's source in `sources`.
        sources: the sources' names; `weights` and `repeats` are theirs at the last preprocess.
        vocabulary, end_of_document: the number of ids, and the id behind each document (None: there is none).
        fingerprint: a digest of the documents, their order, their splits and the tokenizer.
        info: the content of `cache.json`.

    Raises UserError if the cache is missing, unfinished, damaged, or holds no texts.
    """

    def __init__(
        self, path: Path | str, local_cache: str | Path | None = None, local_bytes: int = 64_000_000_000
    ) -> None:
        self._arguments = (path, local_cache, local_bytes)
        self.location = str(path)
        self._remote = RemoteStore(str(path), local_cache, local_bytes) if is_url(path) else None
        self.root = Path(path) if self._remote is None else self._remote.copy_tables(("index", "rejects", FOLDER))
        self.info = read_info(self.root)
        if self.info.get("task") != "language":
            raise UserError(f"cache {self.location} holds videos, not texts; name another folder under texts.cache")
        self._lock = ReaderLock(self.root) if self._remote is None else None  # keeps prune, pack and repair away
        try:
            self._facts = TokenizerFacts.of_json(self.info["tokenizer"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.root / 'cache.json'} does not describe the tokenizer ({error})") from error
        self._table = read_document_table(self.root / "index" / DOCUMENTS_NAME)
        columns = self._table.columns
        self.lengths, self.source = columns["length"], columns["source"]
        self.held_out: npt.NDArray[np.bool_] = columns["held_out"] != 0
        self.sources = [source.name for source in self._table.sources]
        self.weights = [source.weight for source in self._table.sources]
        self.repeats = [source.repeats for source in self._table.sources]
        self.vocabulary, self.end_of_document = self._facts.vocabulary, self._facts.end_of_document
        self.fingerprint = self._table.fingerprint
        self._store = BlockStore(self.root, self.location, self._remote)
        self._blocks: dict[int, _BlockIds] = {}
        self._checked = bytearray(len(self.lengths))
        # views whose items are plain integers: packs of short documents ask for many
        self._length, self._begin, self._number = (columns[name].data for name in ("length", "begin", "block"))

    @property
    def marked(self) -> bool:
        """False where all ids of all documents have a loss, as far as the cache says."""
        return bool(self.info.get("longest_turn", 1))

    def __reduce__(self) -> tuple[type[TextCache], tuple[Any, ...]]:
        """Open the cache again in a spawned process: mappings cannot be pickled."""
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.lengths)

    # -- tokens -----------------------------------------------------------------------------------------------------

    def ids(self, document: int, begin: int = 0, count: int | None = None) -> Array:
        """The ids [begin, begin + count) of a document (None: to its end), (count,), in the smallest unsigned type.

        Raises UserError if the document is damaged or its block is missing, IndexError outside of the document.
        """
        start, stop = self._range(document, begin, count)
        return self._block(document).ids[start:stop]

    def ids_of(self, pieces: Iterable[tuple[int, int, int]]) -> list[Array]:
        """The ids of ranges (document, begin, count), each as `ids` gives them and with its errors."""
        begins, numbers, checked, blocks, lengths = self._begin, self._number, self._checked, self._blocks, self._length
        parts = []
        for document, begin, count in pieces:  # without calls: packs of short documents have many
            if checked[document] and 0 <= begin <= begin + count <= lengths[document]:
                start = begins[document] + begin
                parts.append(blocks[numbers[document]].ids[start : start + count])
            else:
                parts.append(self.ids(document, begin, count))
        return parts

    def trained(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[np.bool_] | None:
        """Marks (count,) of the ids that have a loss; None where all have. Raises like `ids`."""
        start, stop = self._range(document, begin, count)
        block = self._block(document)
        return None if block.marks is None else _bits(block.marks, start, stop)

    def _range(self, document: int, begin: int, count: int | None) -> tuple[int, int]:
        """The places of ids in their block, once the document's checksum was compared in this process."""
        length, start = self._length[document], self._begin[document]
        count = length - begin if count is None else count
        if not 0 <= begin <= begin + count <= length:
            raise IndexError(f"document {document} has {length} ids, not [{begin}, {begin + count})")
        if not self._checked[document]:
            self._check(document, start, start + length)
            self._checked[document] = 1
        return start + begin, start + begin + count

    def _check(self, document: int, start: int, stop: int) -> None:
        block = self._block(document)
        if not 0 <= start <= stop <= len(block.ids):
            raise self._damaged(document, "its range lies outside of its block")
        ids = block.ids[start:stop]
        marks = None if block.marks is None else _bits(block.marks, start, stop)
        if check_of(ids, marks) != int(self._table.columns["check"][document]):
            raise self._damaged(document, "its checksum differs")
        if len(ids) and int(ids.max()) >= self.vocabulary:
            raise self._damaged(document, "it holds an id outside of the vocabulary")

    def _block(self, document: int) -> _BlockIds:
        number = self._number[document]
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._open(document, number)
        return block

    def _open(self, document: int, number: int) -> _BlockIds:
        if not 0 <= number < len(self._table.blocks):
            raise self._damaged(document, "it is of a block that there is not")
        try:
            tensors = self._store.tensors(self._table.blocks[number])
            ids = tensors["ids"].numpy()
            marks = tensors["trained"].numpy() if "trained" in tensors else None
        except (ValueError, KeyError, OSError) as error:
            raise self._damaged(document, f"its block cannot be read: {error}") from error
        if ids.dtype != id_type(self.vocabulary) or ids.ndim != 1 or (marks is not None and len(marks) * 8 < len(ids)):
            raise self._damaged(document, "its block is of another form")
        return _BlockIds(ids, marks)

    def _damaged(self, document: int, why: str) -> UserError:
        return UserError(
            f"cache {self.location} is damaged at document {document}: {why}; `mmspeed cache verify --repair` drops what is "
            "damaged, and `mmspeed preprocess` makes it again"
        )

    # -- tokenizer --------------------------------------------------------------------------------------------------

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the cache's copy of the tokenizer, which transformers reads; None where documents came as ids alone."""
        return self.root / FOLDER if MAIN in self._facts.files else None

    def tokenizer(self) -> TextTokenizer:
        """The cache's own copy of the tokenizer. Raises UserError if there is none, or it is damaged."""
        if self.tokenizer_folder is None:
            raise UserError(f"cache {self.location} was made of ids and has no tokenizer; name one under tokenizer")
        for name, problem in tokenizer_problems(self.root, self.info):
            raise UserError(f"cache {self.location}: {name} {problem}; run mmspeed preprocess again")
        return TextTokenizer(self.tokenizer_folder / MAIN)

    def rejects(self) -> list[dict[str, str]]:
        """The documents that were not taken: place, reason, detail."""
        return read_rejects(self.root)


def _bits(marks: Array, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """The bits [start, stop) of packed marks."""
    first = start // 8
    bits = np.unpackbits(marks[first : (stop + 7) // 8])[start - 8 * first : stop - 8 * first]
    return bits.view(np.bool_)
