"""Text caches: blocks of documents and their table, read back, damaged, held out, far away."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.cli.cache_text import stat_lines
from mmspeed.data.cache.document_blocks import (
    DOCUMENTS_NAME,
    DOCUMENTS_SCHEMA,
    TABLE_VERSION,
    Document,
    HeldOut,
    add_block,
    check_of,
    id_type,
    write_text_info,
)
from mmspeed.data.cache.index import write_batch
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.tables import read_info, write_rejects
from mmspeed.data.cache.text_cache import TextCache, read_document_table
from mmspeed.data.cache.tokenizer_file import END, TokenizerFacts, byte_tokenizer, store_tokenizer
from mmspeed.data.cache.writer import CacheWriter
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.prune_pack import pack, prune
from mmspeed.data.maintenance.repair import mend
from mmspeed.data.maintenance.stats import census
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from tests.support.caches import flip
from tests.support.text_caches import write_text_cache


def _facts(vocabulary: int, end: int | None = None) -> TokenizerFacts:
    return TokenizerFacts("ids", vocabulary, end)


@settings(max_examples=20, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 299), max_size=20), max_size=30),
    vocabulary=st.sampled_from([300, 70_000]),
    block=st.integers(1, 7),
)
def test_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocabulary: int, block: int
) -> None:
    root = tmp_path_factory.mktemp("texts")
    counts = write_text_cache(root, {"a": documents, "b": documents[:3]}, _facts(vocabulary, 2), block=block)
    cache = TextCache(root)
    kept = [ids for ids in [*documents, *documents[:3]] if ids]
    assert [cache.ids(number).tolist() for number in range(len(cache))] == kept
    assert cache.lengths.tolist() == [len(ids) for ids in kept]
    assert counts.documents == len(kept) and counts.tokens == sum(map(len, kept))
    assert counts.rejected.get("empty", 0) == len(documents) + len(documents[:3]) - len(kept)
    assert cache.source.tolist() == [0] * len([ids for ids in documents if ids]) + [1] * len(
        [ids for ids in documents[:3] if ids]
    )
    assert (cache.sources, cache.vocabulary, cache.end_of_document) == (["a", "b"], vocabulary, 2)
    for number, ids in enumerate(kept):
        assert cache.ids(number).dtype == id_type(vocabulary)
        assert cache.ids(number, len(ids) // 2, len(ids) - len(ids) // 2).tolist() == ids[len(ids) // 2 :]
        assert cache.trained(number) is None


@pytest.mark.parametrize(("vocabulary", "kind"), [(256, "uint8"), (65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_the_smallest_type(tmp_path: Path, vocabulary: int, kind: str) -> None:
    write_text_cache(tmp_path, {"a": [[vocabulary - 1, 0]]}, _facts(vocabulary))
    ids = TextCache(tmp_path).ids(0)
    assert (ids.dtype, ids.tolist()) == (np.dtype(kind), [vocabulary - 1, 0])
    with pytest.raises(ValueError, match=f"outside of a vocabulary of {vocabulary}"):
        write_text_cache(tmp_path / "b", {"a": [[vocabulary]]}, _facts(vocabulary))


def test_marks_of_chats(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    marks = [generator.random(length) < 0.5 for length in (3, 17, 1, 8)]
    rows = [Document(np.arange(len(mark)), digest(bytes([n])), mark) for n, mark in enumerate(marks)]
    write_text_cache(tmp_path, {"a": [*rows, [5, 6]]}, _facts(99))
    cache = TextCache(tmp_path)
    for number, mark in enumerate([*marks, np.ones(2, bool)]):
        trained = cache.trained(number)
        assert trained is not None and trained.tolist() == mark.tolist()
        part = cache.trained(number, 1 % len(mark), len(mark) - 1 % len(mark))
        assert part is not None and part.tolist() == mark[1 % len(mark) :].tolist()
    every = [
        (n, b, c)
        for n, length in enumerate(cache.lengths.tolist())
        for b in range(length)
        for c in range(1, length - b + 1)
    ]
    ranges = np.array(generator.permutation(every), np.int32)
    marked = [*marks, np.ones(2, bool)]
    assert cache.targets(*ranges.T).tolist() == [int(marked[n][b + 1 : b + c].sum()) for n, b, c in ranges.tolist()]


def test_equal_documents_are_held_out_together(tmp_path: Path) -> None:
    documents = [[number % 500, 1 + number % 3] for number in range(2_000)]
    write_text_cache(tmp_path / "a", {"a": documents}, _facts(600), HeldOut(0.2, 1))
    write_text_cache(tmp_path / "b", {"a": documents[::-1]}, _facts(600), HeldOut(0.2, 1))
    write_text_cache(tmp_path / "c", {"a": documents}, _facts(600), HeldOut(0.2, 2))
    one, other, seed = (TextCache(tmp_path / name) for name in "abc")
    assert one.held_out.tolist() == other.held_out.tolist()[::-1] != seed.held_out.tolist()
    sides: dict[tuple[int, ...], bool] = {}
    for ids, side in zip(documents, one.held_out.tolist(), strict=True):
        assert sides.setdefault(tuple(ids), side) == side
    assert 0.15 < one.held_out.mean() < 0.25
    assert len({one.fingerprint, other.fingerprint, seed.fingerprint}) == 3


def test_damaged_ids_are_noticed(tmp_path: Path) -> None:
    write_text_cache(tmp_path, {"a": [list(range(100, 160)), list(range(60))]}, _facts(256))
    shard = tmp_path / "texts" / "000000.tar"
    flip(shard, shard.read_bytes().index(bytes(range(100, 160))) + 10)
    cache = TextCache(tmp_path)
    with pytest.raises(UserError, match="damaged at document 0: its checksum differs"):
        cache.ids(0, 0, 1)
    assert cache.ids(1).tolist() == list(range(60))
    with pytest.raises(IndexError, match=r"document 1 has 60 ids, not \[50, 61\)"):
        cache.ids(1, 50, 11)
    for _ in range(2):  # the first time documents are compared with their checksums
        assert [part.tolist() for part in cache.ids_of([(1, 2, 3), (1, 0, 1)])] == [[2, 3, 4], [0]]
        with pytest.raises(UserError, match="damaged at document 0: its checksum differs"):
            cache.ids_of([(1, 0, 1), (0, 0, 1)])
        with pytest.raises(IndexError, match=r"document 1 has 60 ids, not \[50, 61\)"):
            cache.ids_of([(1, 50, 11)])


def test_bytes_that_change_after_they_were_read_are_noticed(tmp_path: Path) -> None:
    long, marks = np.arange(10_000) % 200, np.arange(10_000) % 3 > 0
    few = Document(np.array([250, 251]), digest(b"few"), np.array([False, True]))
    write_text_cache(
        tmp_path, {"a": [list(range(60)), Document(long, digest(b"long"), marks), few]}, _facts(256), block=1
    )
    cache, shard = TextCache(tmp_path), tmp_path / "texts" / "000000.tar"
    data, of_long, whole = shard.read_bytes(), bytes(long.astype(np.uint8)), [(0, 0, 60), (1, 0, 10_000), (2, 0, 2)]
    two = (np.array([2]), np.array([0]), np.array([2]))

    def read() -> list[list[int]]:
        return [
            part.tolist() for part in [*cache.ids_of(whole), cache.trained(1), cache.targets(*two)] if part is not None
        ]

    good = read()
    cache.ids(0)[:] = 0  # in this process alone
    assert read() == good
    for place in (
        data.index(of_long) + 9_005,
        data.index(np.packbits(marks).tobytes()),
        data.index(b"\x40", data.index(b"\xfa\xfb")),
    ):
        flip(shard, place, 64)
        with pytest.raises(UserError, match=r"at document [12]: its checksum differs in texts/000000\.tar"):
            read()
        assert cache.ids(1, 100, 50).tolist() == long[100:150].tolist()  # of a step that is right
        shard.write_bytes(data)
        assert read() == good
    os.truncate(shard, data.index(of_long) + 5_000)
    assert cache.ids(0).tolist() == good[0]
    with pytest.raises(UserError, match=r"at document 1: texts/000000\.tar is cut short"):
        cache.ids(1, 0, 1)


def test_a_table_that_changes_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    write_text_cache(tmp_path, {"a": [[1, 2], [3, 4, 5], [6] * 9]}, _facts(9), block=1)
    cache, table = TextCache(tmp_path), tmp_path / "index" / DOCUMENTS_NAME
    pieces = [(0, 0, 2), (1, 0, 3), (2, 0, 9)]
    good, told = [part.tolist() for part in cache.ids_of(pieces)], 0
    for place in range(table.stat().st_size):
        flip(table, place, 2)
        try:
            assert [part.tolist() for part in cache.ids_of(pieces)] == good
        except UserError:
            told += 1
        flip(table, place, 2)
    assert told > 3 * 8  # bytes of the columns
    os.truncate(table, 100)
    for read in (lambda: cache.ids_of(pieces), lambda: cache.trained(0)):
        with pytest.raises(UserError, match=r"documents\.arrow is damaged \(it is cut short\)"):
            read()


def test_a_reader_in_another_process_takes_the_same_documents_alone(tmp_path: Path) -> None:
    write_text_cache(tmp_path, {"a": [[1, 2]]}, _facts(9))
    opened, arguments = TextCache(tmp_path).__reduce__()
    assert opened(*arguments).ids(0).tolist() == [1, 2]
    write_text_cache(tmp_path, {"a": [[3], [1, 2]]}, _facts(9))
    with pytest.raises(UserError, match="were replaced while a run reads them"):
        opened(*arguments).ids(0)


def test_the_tokenizer_is_the_cache_s_own(tmp_path: Path) -> None:
    facts, tokenizer = store_tokenizer(tmp_path, byte_tokenizer(), "bytes", END)
    text = "Grüße, 世界!\n  \x00 ok"
    assert tokenizer.encode(text) == list(text.encode())
    write_text_cache(tmp_path, {"a": [[*tokenizer.encode(text), 256]]}, facts)
    cache = TextCache(tmp_path)
    assert (cache.vocabulary, cache.end_of_document) == (257, 256)
    assert cache.tokenizer().decode(cache.ids(0).tolist()) == text
    assert cache.tokenizer_folder == tmp_path / "tokenizer"
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not as it was written"):
        cache.tokenizer()


def test_no_tokenizer_no_table_no_texts(tmp_path: Path) -> None:
    write_text_cache(tmp_path, {"a": [[1]]}, _facts(9))
    cache = TextCache(tmp_path)
    assert cache.tokenizer_folder is None
    with pytest.raises(UserError, match="made of ids and has no tokenizer"):
        cache.tokenizer()
    (tmp_path / "index" / DOCUMENTS_NAME).unlink()
    with pytest.raises(UserError, match="lists no documents yet; run mmspeed preprocess"):
        TextCache(tmp_path)


def test_a_copy_far_away(tmp_path: Path) -> None:
    facts, tokenizer = store_tokenizer(tmp_path / "near", byte_tokenizer(), "bytes", END)
    write_text_cache(tmp_path / "near", {"a": [tokenizer.encode("abc"), tokenizer.encode("de")]}, facts)
    for _ in range(2):
        cache = TextCache(f"file://{tmp_path / 'near'}", tmp_path / "mirror")
        assert [cache.tokenizer().decode(cache.ids(number).tolist()) for number in range(2)] == ["abc", "de"]
        assert cache.root != tmp_path / "near"


def test_ten_million_documents_are_mapped(tmp_path: Path) -> None:
    """The table alone; 250 MB of it are written, and compared with their seal."""
    rows = 10_000_000
    arrays = [pa.array(np.zeros(rows, f.type.to_pandas_dtype()), f.type) for f in DOCUMENTS_SCHEMA]
    facts = {"version": TABLE_VERSION, "blocks": ["0" * 32], "sources": [], "fingerprint": "x"}
    write_batch(tmp_path / "index" / DOCUMENTS_NAME, arrays, DOCUMENTS_SCHEMA, facts)
    del arrays
    before = pa.total_allocated_bytes()
    table = read_document_table(tmp_path / "index" / DOCUMENTS_NAME)
    assert len(table.columns["length"]) == rows
    assert pa.total_allocated_bytes() - before < 1 << 20
    flip(tmp_path / "index" / DOCUMENTS_NAME, 100_000_000)
    with pytest.raises(UserError, match="not as it was written"):
        read_document_table(tmp_path / "index" / DOCUMENTS_NAME)


def test_marks_change_the_check() -> None:
    ids = np.arange(5, dtype=np.uint16)
    assert len({check_of(ids), check_of(ids, np.ones(5, bool)), check_of(ids, np.zeros(5, bool))}) == 3


def _whole(root: Path) -> Path:
    facts, tokenizer = store_tokenizer(root, byte_tokenizer(), "bytes", END)
    write_text_cache(root, {"a": [tokenizer.encode(f"document {n} " * 9) for n in range(40)]}, facts, block=13)
    write_rejects(root, [("a:3", "empty", "")])
    write_text_info(root, facts, {}, rejected={"empty": 1})
    return root


def test_a_whole_text_cache_is_verified_and_a_missing_block_is_incomplete(tmp_path: Path) -> None:
    findings = verify(_whole(tmp_path))
    assert (findings.damage, findings.foreign, findings.notes, findings.entries) == ([], [], [], 4)
    for path in [*tmp_path.glob("texts/*"), *tmp_path.glob("index/texts-*")]:
        path.unlink()
    assert verify(tmp_path).lacking == 4


def test_maintenance_of_a_text_cache(tmp_path: Path) -> None:
    facts = TokenizerFacts.of_json(read_info(_whole(tmp_path))["tokenizer"])
    before = [TextCache(tmp_path).ids(number).tolist() for number in range(40)]
    with CacheWriter(tmp_path) as writer:
        add_block(writer, [Document(np.arange(9), digest(b"old"))], facts.vocabulary, {})
    stat = census(tmp_path)
    assert stat["documents"]["sources"]["a"]["documents"] == 40 and stat["unused"]["texts"] == 1
    assert "  source a: 40 documents" in "\n".join(stat_lines(stat))
    assert prune(tmp_path).entries == 1
    pack(tmp_path, 1_000_000)
    assert [TextCache(tmp_path).ids(number).tolist() for number in range(40)] == before
    shard = next(iter((tmp_path / "texts").glob("*.tar")))
    flip(shard, shard.read_bytes().index(np.array([*b"document 20"], np.uint16).tobytes()))
    assert mend(tmp_path).lost and verify(tmp_path).lacking == 1
    with pytest.raises(UserError, match="1 of 4 blocks of documents are in none of the caches"):
        merge(tmp_path / "both", [tmp_path])
