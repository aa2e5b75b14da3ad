"""Turn the rows of a block into documents of ids: in the command's own process or in workers, with the same result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmspeed.data.cache.document_blocks import Document
from mmspeed.data.cache.keys import canonical_json, digest
from mmspeed.data.cache.tables import read_info
from mmspeed.data.cache.tokenizer_file import FOLDER, MAIN, TextTokenizer, TokenizerFacts
from mmspeed.guards import end_with_parent
from mmspeed.preprocess.texts.chat import ChatError, ChatTemplate


def content_of(value: Any) -> str:
    """The digest of a text, a chat or an array of ids. Raises ValueError or TypeError for a chat that is no JSON."""
    if isinstance(value, str):
        return digest(b"text:" + value.encode())
    if isinstance(value, np.ndarray):
        return digest(b"ids:" + value.astype("<i8").tobytes())
    return digest(b"chat:" + canonical_json(value).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Rule:
    """The rules by which rows become ids: content (`text`, `chat`, `ids`), limit in tokens, ids, and the id behind each document."""

    content: str
    vocabulary: int
    end: int | None
    max_tokens: int | None


class Encoder:
    """The tokenizer of a cache, and the template of its chats."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER
        self._tokenizer = TextTokenizer(self._folder / MAIN, TokenizerFacts.of_json(read_info(root)["tokenizer"]))
        self._chat: ChatTemplate | None = None

    def chat(self) -> ChatTemplate:
        """The template of chats. Raises UserError if there is none."""
        self._chat = self._chat or ChatTemplate(self._folder)
        return self._chat

    def spelled(self, value: Any) -> str:
        """The first special token that a text or a chat spells; empty if there is none."""
        if isinstance(value, str):
            return self._tokenizer.special.among([value])
        return self.chat().spelled(value) if isinstance(value, list) else ""

    def altered(self, value: Any) -> bool:
        """True for a text or a chat that version 1 gave other ids or marks, whatever it spells."""
        if isinstance(value, str):
            return self._tokenizer.special.folds(value)
        return isinstance(value, list) and self.chat().altered(value)

    def shortens(self, value: Any) -> bool:
        """True for a chat with answers that the template changes as later turns come, which have no loss."""
        return isinstance(value, list) and self.chat().shortens(value)

    def problem(self, value: Any) -> str:
        """What is wrong with a chat that is rejected."""
        try:
            self.chat().encode(value)
        except ChatError as error:
            return str(error)
        return ""

    def documents(self, rows: Sequence[tuple[str, Any]], rule: Rule) -> list[Document]:
        """The documents of rows (content, value), in order; what cannot be used has its reason."""
        if rule.content == "chat":
            return [self._of_chat(content, value, rule) for content, value in rows]
        if rule.content == "ids":
            return [_document(content, value, None, rule, end=False) for content, value in rows]
        encoded = self._tokenizer.encode_all([value for _, value in rows])
        return [self._of_text(*row, ids, rule) for row, ids in zip(rows, encoded, strict=True)]

    def _of_text(self, content: str, value: str, ids: list[int], rule: Rule) -> Document:
        begin, behind = self._tokenizer.begin, self._tokenizer.behind
        if self._tokenizer.special.confused(value, ids[len(begin) : len(ids) - len(behind)]):
            return Document(np.empty(0, np.int64), content, reason="special_token")
        return _document(content, ids, None, rule)

    def _of_chat(self, content: str, value: Any, rule: Rule) -> Document:
        try:
            ids, marks = self.chat().encode(value)
        except ChatError:
            return Document(np.empty(0, np.int64), content, reason="bad_chat")
        begin = list(self._tokenizer.begin)
        if begin and ids[: len(begin)] != begin:  # else the template has written it
            ids, marks = begin + ids, np.append(np.zeros(len(begin), bool), marks)
        return _document(content, ids, marks, rule, end=False)


def _document(content: str, ids: Any, marks: Any, rule: Rule, end: bool = True) -> Document:
    array = np.asarray(ids, np.int64)
    reason = ""
    if not len(array):
        reason = "no_tokens"
    elif int(array.min()) < 0 or int(array.max()) >= rule.vocabulary:
        reason = "unknown_ids"
    else:
        array = np.append(array, rule.end) if end and rule.end is not None else array
        reason = "too_long" if rule.max_tokens is not None and len(array) > rule.max_tokens else ""
    return Document(np.empty(0, np.int64), content, reason=reason) if reason else Document(array, content, marks)


class Worker:
    """The encoder of a worker process, kept between its blocks."""

    encoder: Encoder | None = None

    @classmethod
    def begin(cls, root: str) -> None:
        """Load the tokenizer once; the package `tokenizers` would start a thread for each core."""
        end_with_parent()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cls.encoder = Encoder(Path(root))

    @classmethod
    def run(cls, rows: Sequence[tuple[str, Any]], rule: Rule) -> list[Document]:
        """Encode a block."""
        assert cls.encoder is not None
        return cls.encoder.documents(rows, rule)
