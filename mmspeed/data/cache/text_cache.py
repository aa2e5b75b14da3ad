"""Read a text cache: documents of token ids by number, mapped, without a copy; processes share its pages.

Opening compares the table with its seal: 0.2 s for ten million documents. The first read of a document in a process compares it with
its checksum in the table, and later ones the bytes that they touch with their hash at the first. Each read asks first whether the files
are still as long as when they were mapped, since touching a page that was cut off would kill the process.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmspeed.config.places import is_url
from mmspeed.errors import UserError

from .document_blocks import DOCUMENTS_NAME, DOCUMENTS_SCHEMA, SECTION, TABLE_VERSION, TextSource, check_of, id_type
from .files import ReaderLock
from .index import FACTS
from .payloads import LocalStore, PayloadLocation, ShortError, Store, hash_of, tensors_of, xxh3_64
from .remote import RemoteStore
from .seals import is_cut, map_file, sealed_map
from .tables import entry_schema, index_files, read_info, read_rejects, read_table
from .tokenizer_file import FOLDER, MAIN, TextTokenizer, TokenizerFacts, tokenizer_problems

_STEP = 4096  # ids of a longer document that have a hash of their own
_SHARDS = 1 << 16  # that stay mapped
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class DocumentTable:
    """The mapped table of documents: the mapping, a column of each, and the facts beside them."""

    file: mmap.mmap
    columns: dict[str, Array]
    blocks: list[str]
    sources: list[TextSource]
    fingerprint: str


def read_document_table(path: Path) -> DocumentTable:
    """Map the table of documents. Raises UserError unless it is exactly as it was written."""
    try:
        file = map_file(path)
        if not sealed_map(file):
            raise ValueError("not as it was written")
        with pa.ipc.open_file(pa.py_buffer(file)) as reader:
            facts = json.loads((reader.schema.metadata or {})[FACTS])
            if facts["version"] != TABLE_VERSION or not reader.schema.equals(DOCUMENTS_SCHEMA):
                raise ValueError("of another version")
            if reader.num_record_batches != 1:
                raise ValueError("another table")
            batch = reader.get_batch(0)
        batch.validate()
        columns = {name: _column(batch, name) for name in DOCUMENTS_SCHEMA.names}
        sources = [TextSource(**source) for source in facts["sources"]]
        return DocumentTable(file, columns, list(facts["blocks"]), sources, str(facts["fingerprint"]))
    except FileNotFoundError:
        raise UserError(
            f"cache {path.parent.parent} lists no documents yet; run mmspeed preprocess to its end"
        ) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged_table(path, str(error)) from error


def _damaged_table(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged ({why}); delete it and run mmspeed preprocess again: it is made from the blocks"
    )


def _column(batch: pa.RecordBatch, name: str) -> Array:
    column, kind = batch.column(name), DOCUMENTS_SCHEMA.field(name).type.to_pandas_dtype()
    if column.null_count or column.offset or len(column) != batch.num_rows:
        raise ValueError(f"a column {name} of another form")
    return np.frombuffer(column.buffers()[1], kind, len(column)) if len(column) else np.empty(0, kind)


class _BlockIds(NamedTuple):
    """The ids of a block and its packed marks, as views of the mapping of a file; None: of memory."""

    ids: Array
    marks: Array | None
    file: mmap.mmap | None


_NONE = _BlockIds(np.empty(0, np.uint8), None, None)


class BlockStore:
    """The payloads of a cache's blocks by key, mapped from its shards or fetched from a remote copy."""

    def __init__(self, root: Path, location: str, remote: RemoteStore | None = None) -> None:
        self.root, self.location = root, location
        self._store: Store = remote or LocalStore(root, _SHARDS)
        self._places: dict[str, PayloadLocation] | None = None

    def view(self, key: str) -> memoryview:
        """A block's payload, as it lies there. Raises UserError if there is no such block, ValueError, OSError if it cannot be read."""
        return self._payload(key, self._store.view)

    def again(self, key: str) -> memoryview:
        """A block's payload from its source, in memory of its own. Raises as `view`, and ValueError unless its checksum is right."""
        payload, place = self._payload(key, self._store.again), self._place(key)
        if not place.fits(payload):
            raise ValueError(f"its checksum differs in {place.shard}")
        return payload

    def _payload(self, key: str, read: Callable[[str, str, PayloadLocation], memoryview]) -> memoryview:
        place = self._place(key)
        try:
            return read(SECTION, key, place)
        except ShortError:
            raise ValueError(f"{place.shard} is cut short") from None

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


class TextCache:
    """The documents of a text cache, by number in the order of its sources.

    Args:
        path: the cache's folder, or the URL of a copy of it.
        local_cache, local_bytes: for a URL, the folder for fetched files and the bytes of payloads to keep there.
        expected: the fingerprint without which no document is read; None: any.

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
        self,
        path: Path | str,
        local_cache: str | Path | None = None,
        local_bytes: int = 64_000_000_000,
        expected: str | None = None,
    ) -> None:
        self._arguments = (path, local_cache, local_bytes)
        self._expected = expected
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
        self._table_path = self.root / "index" / DOCUMENTS_NAME
        self._table = read_document_table(self._table_path)
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
        # by document, 0 where it was not read yet: hashes of its ids, and of its marks; by long document, of each step of ids
        self._hashes, self._mark_hashes = (row.data for row in np.zeros((2, len(self.lengths)), np.uint32))
        self._steps: dict[int, list[int]] = {}
        # views whose items are plain integers: packs of short documents ask for many
        self._length, self._begin, self._number = (columns[name].data for name in ("length", "begin", "block"))

    @property
    def marked(self) -> bool:
        """False where all ids of all documents have a loss, as far as the cache says."""
        return bool(self.info.get("longest_turn", 1))

    def __reduce__(self) -> tuple[type[TextCache], tuple[Any, ...]]:
        """Open the cache again in a spawned process: mappings cannot be pickled."""
        return type(self), (*self._arguments, self.fingerprint)

    def __len__(self) -> int:
        return len(self.lengths)

    # -- tokens -----------------------------------------------------------------------------------------------------

    def ids(self, document: int, begin: int = 0, count: int | None = None) -> Array:
        """The ids [begin, begin + count) of a document (None: to its end), (count,), in the smallest unsigned type.

        Raises UserError if the document is damaged or its block is missing, IndexError outside of the document.
        """
        return self.ids_of([(document, begin, self._length[document] - begin if count is None else count)])[0]

    def ids_of(self, pieces: Iterable[tuple[int, int, int]]) -> list[Array]:
        """The ids of ranges (document, begin, count), each as `ids` gives them and with its errors."""
        begins, numbers, hashes, blocks, lengths = self._begin, self._number, self._hashes, self._blocks, self._length
        parts, asked = list[Array](), set[mmap.mmap | None]()
        self._require_table()
        for document, begin, count in pieces:  # without calls: packs of short documents have many
            known, length = hashes[document], lengths[document]
            if known and 0 <= begin <= begin + count <= length:
                ids, _, file = blocks.get(numbers[document], _NONE)
                if file in asked or not is_cut(file):
                    asked.add(file)
                    start = begins[document]
                    part = ids[start + begin : start + begin + count]
                    if (
                        (xxh3_64(part) & 0xFFFFFFFF or 1) == known  # as `hash_of`
                        if count == length
                        else self._same(document, ids[start : start + length], begin, count)
                    ):
                        parts.append(part)
                        continue
            parts.append(self._ids(document, begin, count))
        return parts

    def _ids(self, document: int, begin: int, count: int) -> Array:
        start, stop = self._read_before(document, begin, count)
        block = self._sound(document, lambda block: self._same(document, block.ids[start:stop], begin, count))
        return block.ids[start + begin : start + begin + count]

    def _same(self, document: int, ids: Array, begin: int, count: int) -> bool:
        """True if those steps of a document's ids that a range touches have the hashes of its first read."""
        first, last = begin // _STEP, -(-(begin + count) // _STEP)
        known = self._steps.get(document) or [self._hashes[document]]
        return _step_hashes(ids, first, last) == known[first:last]

    def trained(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[np.bool_] | None:
        """Marks (count,) of the ids that have a loss; None where all have. Raises like `ids`."""
        count = self._length[document] - begin if count is None else count
        start, stop = self._read_before(document, begin, count)
        known = self._mark_hashes[document]
        block = self._sound(
            document, lambda block: block.marks is None or _hash_of_marks(block.marks, start, stop) == known
        )
        return None if block.marks is None else _bits(block.marks, start + begin, start + begin + count)

    def targets(self, document: Array, begin: Array, count: Array) -> Array:
        """The number of ids of each range [begin, begin + count) of a document that have a loss and an id before them in the range.

        Raises UserError if a block is missing or damaged. Checksums are compared where the number is 0, for such ranges may never be read.
        """
        result = np.asarray(count, np.int64) - 1
        if not self.marked:
            return result
        columns, number = self._table.columns, self._table.columns["block"][document]
        first = columns["begin"][document] + begin + 1
        places = np.argsort(number, kind="stable")
        for one in np.split(places, np.flatnonzero(np.diff(number[places])) + 1) if len(places) else ():
            marks = self._block(int(document[one[0]])).marks
            if marks is not None:
                result[one] = _set_bits(marks, first[one] + result[one]) - _set_bits(marks, first[one])
        for place in np.flatnonzero((result == 0) & (count > 1)).tolist():
            sound = self.trained(*(int(column[place]) for column in (document, begin, count)))
            result[place] = count[place] - 1 if sound is None else sound[1:].sum()
        return result

    def _read_before(self, document: int, begin: int, count: int) -> tuple[int, int]:
        """The places of a document's ids in its block, once they were compared with its checksum in this process."""
        self._require_table()
        length, start = self._length[document], self._begin[document]
        if not 0 <= begin <= begin + count <= length:
            if not sealed_map(self._table.file):
                raise _damaged_table(self._table_path, "it has changed since it was opened")
            raise IndexError(f"document {document} has {length} ids, not [{begin}, {begin + count})")
        if not self._hashes[document]:
            self._compare(document, start, start + length)
        return start, start + length

    def _require_table(self) -> None:
        if is_cut(self._table.file):
            raise _damaged_table(self._table_path, "it is cut short")

    def _compare(self, document: int, start: int, stop: int) -> None:
        """Compare a document with its checksum, and keep the hashes of its bytes for later reads."""
        if self._expected not in (None, self.fingerprint):
            raise UserError(
                f"the documents of cache {self.location} were replaced while a run reads them; run its command again: it goes on"
            )
        check = int(self._table.columns["check"][document])

        def right(block: _BlockIds) -> bool:
            return (
                check_of(block.ids[start:stop], block.marks if block.marks is None else _bits(block.marks, start, stop))
                == check
            )

        block = self._sound(document, right)
        ids = block.ids[start:stop]
        if len(ids) and int(ids.max()) >= self.vocabulary:
            raise self._damaged(document, "it holds an id outside of the vocabulary")
        if block.marks is not None:
            self._mark_hashes[document] = _hash_of_marks(block.marks, start, stop)
        if len(ids) > _STEP:
            self._steps[document] = _step_hashes(ids, 0, -(-len(ids) // _STEP))
        self._hashes[document] = hash_of(ids)  # last: other threads look here first

    def _sound(self, document: int, right: Callable[[_BlockIds], bool]) -> _BlockIds:
        """A document's block; where it is not `right`, its bytes are read once more, past the mapping. Raises UserError."""
        for again in (False, True):
            if right(block := self._block(document, again)):
                return block
        raise self._damaged(document, "its checksum differs from that in the table")

    def _block(self, document: int, again: bool = False) -> _BlockIds:
        number = self._number[document]
        block = self._blocks.get(number)
        if block is None or again or is_cut(block.file):
            block = self._blocks[number] = self._open(document, number, again=block is not None)
        return block

    def _open(self, document: int, number: int, again: bool) -> _BlockIds:
        if not 0 <= number < len(self._table.blocks):
            raise self._damaged(document, "it is of a block that there is not")
        try:
            payload = (self._store.again if again else self._store.view)(self._table.blocks[number])
            tensors = {name: tensor.numpy() for name, tensor in tensors_of(payload).items()}
            ids, marks = tensors["ids"], tensors.get("trained")
            if (
                ids.dtype != id_type(self.vocabulary)
                or ids.ndim != 1
                or (marks is not None and len(marks) * 8 < len(ids))
            ):
                raise ValueError("its block is of another form")
        except (ValueError, KeyError, OSError, RuntimeError, OverflowError) as error:
            if not again:
                return self._open(document, number, again=True)
            why = str(error) if isinstance(error, ValueError) else f"its block cannot be read: {error}"
            raise self._damaged(document, why) from error
        return _BlockIds(ids, marks, payload.obj if isinstance(payload.obj, mmap.mmap) else None)

    def _damaged(self, document: int, why: str) -> UserError:
        return UserError(
            f"cache {self.location} is damaged at document {document}: {why}; `mmspeed cache verify --repair` drops what is "
            "damaged, and `mmspeed preprocess` makes it again"
        )

    # -- tokenizer --------------------------------------------------------------------------------------------------

    @property
    def begin_of_document(self) -> tuple[int, ...]:
        """The ids before each document."""
        return self._facts.begin

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
        return TextTokenizer(self.tokenizer_folder / MAIN, self._facts)

    def rejects(self) -> list[dict[str, str]]:
        """The documents that were not taken: place, reason, detail."""
        return read_rejects(self.root)


_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.int64)  # bits of each byte


def _set_bits(marks: Array, places: Array) -> Array:
    """The number of bits that are set before each place of packed marks."""
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(_SET[marks])))
    byte, bit = np.divmod(places, 8)
    last = np.append(marks, np.uint8(0))[byte]
    return np.asarray(before[byte] + _SET[last & ~(0xFF >> bit) & 0xFF])


def _step_hashes(ids: Array, first: int, last: int) -> list[int]:
    """The hashes of a document's steps of ids [first, last)."""
    return [hash_of(ids[step * _STEP : (step + 1) * _STEP]) for step in range(first, last)]


def _hash_of_marks(marks: Array, start: int, stop: int) -> int:
    """The hash of the bytes that hold the packed marks [start, stop)."""
    return hash_of(marks[start // 8 : (stop + 7) // 8])


def _bits(marks: Array, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """The bits [start, stop) of packed marks."""
    first = start // 8
    bits = np.unpackbits(marks[first : (stop + 7) // 8])[start - 8 * first : stop - 8 * first]
    return bits.view(np.bool_)
