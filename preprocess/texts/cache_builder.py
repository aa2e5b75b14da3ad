"""Build a text cache: rows of the sources become blocks of documents, in one order, by any number of processes.

Blocks end where the content of a document says so (the last bits of its digest), so that a document added in front changes few of
them. A block whose key is in the cache is not encoded again: a build that was killed goes on, and ends with the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspeed.config.places import is_url
from mmspeed.config.texts import TextsConfig, TextSourceConfig, TokenizerConfig
from mmspeed.data.cache.document_blocks import (
    ALTERED_VERSION,
    REASONS,
    SECTION,
    Document,
    HeldOut,
    TextSource,
    add_block,
    block_parts,
    block_tensors,
    longest_turn,
    recipe_of,
    write_table,
    write_text_info,
)
from mmspeed.data.cache.keys import entry_key
from mmspeed.data.cache.made_from import ListedSource, MadeFrom, SourceChanges, read_made_from
from mmspeed.data.cache.payloads import tensors_of
from mmspeed.data.cache.tables import read_info, write_rejects
from mmspeed.data.cache.text_cache import BlockStore
from mmspeed.data.cache.tokenizer_file import TokenizerFacts, recorded_section, tokenizer_problems
from mmspeed.data.cache.writer import CacheWriter
from mmspeed.errors import UserError
from mmspeed.log import format_seconds, progress
from mmspeed.preprocess.build.coordination import locked
from mmspeed.preprocess.texts.encode import Encoder, Rule, Worker, content_of
from mmspeed.preprocess.texts.sources import TextRow, files_of, rows_of
from mmspeed.preprocess.texts.tokenizers import make_tokenizer

_LEAST, _MOST, _ROWS = 1 << 20, 1 << 22, 65_536  # bytes and rows of a block
_END_BITS = 63  # of a digest: one document in 64 ends a block that has enough bytes
_LISTED = 100_000  # rejected rows that `rejects/` lists; all are counted
_HEAVY = ("ids", "trained")  # of a block's payload: not needed for the table


@dataclass
class TextReport:
    """The outcome of a build: counts of documents, ids, blocks, and rejected rows by reason.

    `spelled` counts documents that spell a special token, which is text in them; `spelling` is one of them; `shortened`: chats with answers
    without a loss, as the template changes them. `changes`: of the sources since the build before.
    """

    root: Path
    documents: int = 0
    tokens: int = 0
    held_out: int = 0
    blocks: int = 0
    reused: int = 0
    longest_turn: int = 0  # ids of an assistant's turn
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    spelled: int = 0
    spelling: str = ""
    shortened: int = 0
    changes: SourceChanges = field(default_factory=SourceChanges)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The report in lines."""
        lines = [
            f"{self.root}: {self.documents:,} documents, {self.tokens:,} tokens; {self.held_out:,} documents are held out",
            f"blocks: {self.blocks}, of which {self.reused} were there; {format_seconds(self.seconds)}",
        ]
        if self.changes:
            lines.append(f"the sources have changed since the build before: {self.changes}")
        if self.spelled:
            lines.append(
                f"special tokens that are spelled are text: in {self.spelled:,} documents, such as {self.spelling}"
            )
        if self.shortened and self.documents:
            lines.append(
                f"answers behind the last question alone have a loss in {self.shortened:,} chat{'s'[: self.shortened != 1]}: the "
                "template changes earlier ones as later turns come; for a loss on all, make a row that ends with each answer"
            )
        rejected = sorted(self.rejected.items())
        return lines + [f"rejected, {name}: {count:,}, such as {self.examples[name]}" for name, count in rejected]


@dataclass(frozen=True)
class _Rows:
    """The rows of a block: places, contents and values, and the block's recipe and key."""

    source: int
    recipe: dict[str, Any]
    key: str
    places: list[str]
    rows: list[tuple[str, Any]]


class TextCacheBuilder:
    """Build or complete the text cache of a config's sections; `run` does it.

    Raises UserError if the cache is a URL, or was made with another tokenizer.
    """

    def __init__(self, texts: TextsConfig, tokenizer: TokenizerConfig, seed: int = 0) -> None:
        if is_url(texts.cache):
            raise UserError(f"texts.cache: {texts.cache} is a copy that is read only; build the cache in a folder")
        self._texts, self._config, self._seed = texts, tokenizer, seed
        self.root = Path(texts.cache)
        self._rejects: list[tuple[str, str, str]] = []

    def run(self, processes: int | None = None, tokenizer: Path | None = None) -> TextReport:
        """Build the cache with so many processes (None: `texts.processes`).

        `tokenizer`: a folder of the one that a new cache takes where it would train one. Waits for another build of the cache. Raises UserError
        for sources without texts, a full disk, or a killed worker.
        """
        with locked(self.root / ".build.lock", f"waiting for another build of {self.root}"):
            return self._run(self._texts.processes if processes is None else processes, tokenizer)

    def _run(self, processes: int, tokenizer: Path | None) -> TextReport:
        began, report, record = time.perf_counter(), TextReport(self.root), texts_now(self._texts)
        with suppress(UserError):  # a cache without a record is not compared
            report.changes = record.changes_since(read_made_from(self.root))
        facts = self._tokenizer(tokenizer)
        recipes = [self._recipe(facts, source) for source in self._texts.sources]
        blocks: list[tuple[str, int, dict[str, Tensor]]] = []
        light: dict[str, dict[str, Tensor]] = {}
        with CacheWriter(self.root, int(self._texts.shard_mb * 1e6)) as writer:
            store = BlockStore(self.root, str(self.root))
            blocks_of_rows = self._encoded(writer, facts, recipes, report, processes)
            for rows, documents in progress(blocks_of_rows, "texts to tokens", unit="blocks"):
                if documents is None:
                    tensors = {} if rows.key in light else self._stored(store, rows.key)
                    report.reused += 1
                else:
                    add_block(writer, documents, facts.vocabulary, rows.recipe)
                    tensors = block_tensors(documents, facts.vocabulary)
                if tensors:
                    report.longest_turn = max(report.longest_turn, longest_turn(tensors))
                    light[rows.key] = {name: part.clone() for name, part in tensors.items() if name not in _HEAVY}
                blocks.append((rows.key, rows.source, light[rows.key]))
                self._list_rejected(rows, light[rows.key]["reason"].tolist(), report)
        report.blocks = len(blocks)
        return self._finish(facts, blocks, report, began, record)

    def _stored(self, store: BlockStore, key: str) -> dict[str, Tensor]:
        try:
            return tensors_of(store.again(key))
        except (ValueError, OSError) as error:
            raise UserError(
                f"cache {self.root} is damaged at block {key} ({error}); run `mmspeed cache verify --repair` first"
            ) from error

    def _finish(
        self,
        facts: TokenizerFacts,
        blocks: list[tuple[str, int, dict[str, Tensor]]],
        report: TextReport,
        began: float,
        record: MadeFrom,
    ) -> TextReport:
        names = self._texts.source_names
        sources = [
            TextSource(name, source.weight, source.repeats, source.held_out)
            for name, source in zip(names, self._texts.sources, strict=True)
        ]
        write_rejects(self.root, self._rejects)
        counts = write_table(self.root, blocks, sources, HeldOut(self._texts.validation, self._seed), facts)
        settings = self._texts.document_settings(self._seed)
        rejected = dict(sorted(report.rejected.items()))
        turn, made_from = report.longest_turn, record.write(self.root)
        self._write_info(facts, rejected=rejected, made_for=settings, longest_turn=turn, **made_from)
        report.documents, report.tokens, report.held_out = counts.documents, counts.tokens, counts.held_out
        report.seconds = time.perf_counter() - began
        if not counts.documents:
            raise UserError("\n".join(["the sources hold no document that can be used", *report.lines()[2:]]))
        return report

    # -- tokenizer --------------------------------------------------------------------------------------------------

    def _tokenizer(self, begun: Path | None) -> TokenizerFacts:
        """The facts of the cache's tokenizer, which is made once. Raises UserError if the cache has another one."""
        wanted = self._config.model_dump(mode="json")
        if (self.root / "cache.json").exists():
            info = read_info(self.root)
            if info.get("task") != "language":
                raise UserError(f"cache {self.root} holds videos, not texts; name another folder under texts.cache")
            recorded = recorded_section(self.root, info)
            if recorded != wanted:
                why, keep = "with another tokenizer", ""
                if recorded == {**wanted, "begin_of_document": False}:
                    why = "without the tokens that its tokenizer puts around each text"
                    keep = "; tokenizer.begin_of_document: false keeps it as it is"
                raise UserError(
                    f"cache {self.root} was made {why} ({recorded}); name another folder under texts.cache, or delete it{keep}"
                )
            if not (problems := tokenizer_problems(self.root, info)):
                return TokenizerFacts.of_json(info["tokenizer"])
            facts, _ = make_tokenizer(self.root, self._config, self._texts)
            if facts != TokenizerFacts.of_json(info["tokenizer"]):
                raise UserError(
                    f"cache {self.root}: {problems[0][0]} {problems[0][1]}, and its tokenizer cannot be made again from what "
                    "is there now; name another folder under texts.cache"
                )
            return facts
        facts, _ = make_tokenizer(self.root, self._config, self._texts, begun)
        self._write_info(facts)
        return facts

    def _write_info(self, facts: TokenizerFacts, **more: Any) -> None:
        write_text_info(
            self.root, facts, recipe_of(facts), tokenizer_config=self._config.model_dump(mode="json"), **more
        )

    def _recipe(self, facts: TokenizerFacts, source: TextSourceConfig) -> dict[str, Any]:
        """The recipe of a source's blocks; files of the tokenizer, its template among them, are in its fingerprint."""
        return recipe_of(facts, content=source.content, max_tokens=self._texts.max_tokens)

    # -- rows and blocks --------------------------------------------------------------------------------------------

    def _encoded(
        self,
        writer: CacheWriter,
        facts: TokenizerFacts,
        recipes: list[dict[str, Any]],
        report: TextReport,
        processes: int,
    ) -> Iterator[tuple[_Rows, list[Document] | None]]:
        """Yield the blocks in order, each with its documents; None for one that the cache has."""
        encoder = Encoder(self.root)
        if any(source.content == "chat" for source in self._texts.sources):
            encoder.chat()  # a missing template is one error, not one of each chat
        seen: set[str] = set()
        rules = [
            Rule(source.content, facts.vocabulary, facts.end_of_document, self._texts.max_tokens)
            for source in self._texts.sources
        ]
        if not processes:
            for rows in self._blocks(recipes, encoder, report):
                known = rows.key in seen or writer.has(SECTION, rows.key)
                seen.add(rows.key)
                yield rows, None if known else encoder.documents(rows.rows, rules[rows.source])
            return
        context = multiprocessing.get_context("spawn")
        waiting: deque[tuple[_Rows, Future[list[Document]] | None]] = deque()
        pool = ProcessPoolExecutor(processes, context, initializer=Worker.begin, initargs=(str(self.root),))
        try:
            for rows in self._blocks(recipes, encoder, report):
                known = rows.key in seen or writer.has(SECTION, rows.key)
                seen.add(rows.key)
                waiting.append((rows, None if known else pool.submit(Worker.run, rows.rows, rules[rows.source])))
                if len(waiting) > 2 * processes:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        except BrokenProcessPool as error:
            raise UserError(
                "a process of texts.processes was killed; run the same command again: it goes on"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _blocks(self, recipes: list[dict[str, Any]], encoder: Encoder, report: TextReport) -> Iterator[_Rows]:
        """Yield the rows of each block, in order; rows that hold no document, and those that spell special tokens, are counted."""
        for number, source in enumerate(self._texts.sources):
            plain, altered = recipes[number], {**recipes[number], "version": ALTERED_VERSION}
            places: list[str] = []
            rows: list[tuple[str, Any]] = []
            size, recipe = 0, plain
            for row in rows_of(self._texts, source):
                content = "" if row.reason else _content(row)
                if not content:
                    self._reject(row.place, row.reason or "bad_chat", row.detail, report)
                    continue
                places.append(row.place)
                rows.append((content, row.value))
                size += row.size
                if token := encoder.spelled(row.value):
                    report.spelled += 1
                    report.spelling = report.spelling or f"{row.place} ({token})"
                report.shortened += encoder.shortens(row.value)
                recipe = altered if token or encoder.altered(row.value) else recipe
                full = size >= _MOST or len(rows) >= _ROWS
                if full or (size >= _LEAST and not int(content[-2:], 16) & _END_BITS):
                    yield _rows(number, places, rows, recipe)
                    places, rows, size, recipe = [], [], 0, plain
            if rows:
                yield _rows(number, places, rows, recipe)

    def _list_rejected(self, rows: _Rows, reasons: list[int], report: TextReport) -> None:
        for place, reason, (_, value) in zip(rows.places, reasons, rows.rows, strict=True):
            if reason:
                name = REASONS[reason]
                detail = Encoder(self.root).problem(value) if name == "bad_chat" and name not in report.examples else ""
                self._reject(place, name, detail, report)

    def _reject(self, place: str, reason: str, detail: str, report: TextReport) -> None:
        report.rejected[reason] += 1
        report.examples.setdefault(reason, f"{place}{f' ({detail})' if detail else ''}")
        if len(self._rejects) < _LISTED:
            self._rejects.append((place, reason, detail))


def _rows(source: int, places: list[str], rows: list[tuple[str, Any]], recipe: dict[str, Any]) -> _Rows:
    return _Rows(source, recipe, entry_key(block_parts([content for content, _ in rows], recipe)), places, rows)


def _result(rows: _Rows, future: Future[list[Document]] | None) -> tuple[_Rows, list[Document] | None]:
    return rows, None if future is None else future.result()


def _content(row: TextRow) -> str:
    """The digest of a row; empty for a chat that no JSON can hold."""
    try:
        return content_of(row.value)
    except (TypeError, ValueError, RecursionError):
        return ""


def texts_now(texts: TextsConfig) -> MadeFrom:
    """The record of the sources' files as they are now; none is opened. Raises UserError for a source without files."""
    return MadeFrom.of(_files(texts))


def _files(texts: TextsConfig) -> Iterator[ListedSource]:
    for source, name in zip(texts.sources, texts.source_names, strict=True):
        for file in files_of(source):
            state = os.stat(file)
            place = os.path.relpath(file, os.path.dirname(os.path.expanduser(source.path).rstrip("/")))
            shown = place.encode("utf-8", "backslashreplace").decode()
            yield ListedSource(f"{name}: {shown}", state.st_size, state.st_mtime_ns)
