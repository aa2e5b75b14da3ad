"""Clean and bound caption files and fields: untrusted text must not control terminals or fill memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmspeed.config.schema import DataConfig, SourceConfig

MAX_CAPTION_BYTES = 1 << 20  # read of one caption file
MAX_CAPTIONS = 256  # kept of one clip
_MAX_RAW_CHARS = 1 << 16  # examined of one caption, plus four times its limit
# Control characters apart from white space; marks that change the direction of writing (overrides, embeddings, isolates);
# and invisible characters: zero-width space, word joiner and invisible operators, byte order mark, tags.
_UNSEEN = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# Joiners and variation selectors form letters and emoji, in ones and twos.
_JOINERS = re.compile("([\u200c\u200d\ufe00-\ufe0f]{2})[\u200c\u200d\ufe00-\ufe0f]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
LOST = "\ufffd"  # stands for a character that was lost
_MARKS = {  # of byte orders, the longer ones first
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}


class CleanedCaption(NamedTuple):
    """A cleaned caption, with flags of the changes."""

    text: str
    cut: bool  # it was longer than allowed
    broken: bool  # it holds U+FFFD, in place of bytes that are no text or as it was written
    stripped: bool  # control or invisible characters were removed


def clean_caption(text: str, max_chars: int) -> CleanedCaption:
    """The caption with single spaces, at most `max_chars` long, and without control and invisible characters.

    Lone surrogates, as which undecodable bytes are read, become U+FFFD; only that within the limit counts.
    """
    raw = text[: _MAX_RAW_CHARS + 4 * max_chars]
    bare = _JOINERS.sub(r"\1", _UNSEEN.sub("", raw))
    spaced = " ".join(bare.split())
    shortened = spaced[:max_chars].rstrip()
    clean = _SURROGATE.sub(LOST, shortened)
    cut = len(spaced) > max_chars or len(raw) < len(text)
    return CleanedCaption(clean, cut, LOST in clean, len(bare) < len(raw))


_PUNCTUATION = tuple(",.;:!?)]}，。；：！？、")  # marks that follow a word without a space


@dataclass(frozen=True)
class CaptionAffixes:
    """The words before and behind each caption of a data set (`data.caption_prefix`, `data.caption_suffix`)."""

    prefix: str = ""
    suffix: str = ""

    @classmethod
    def of(cls, data: DataConfig, source: SourceConfig) -> CaptionAffixes:
        """Those of a source: its own, else those of `data`."""
        prefix = data.caption_prefix if source.caption_prefix is None else source.caption_prefix
        suffix = data.caption_suffix if source.caption_suffix is None else source.caption_suffix
        return cls(prefix, suffix)

    def around(self, caption: str) -> str:
        """The caption between them, as it is encoded."""
        if not self.suffix:
            return f"{self.prefix} {caption}" if self.prefix else caption
        space = "" if self.suffix.startswith(_PUNCTUATION) else " "
        return f"{self.prefix} {caption}{space}{self.suffix}".lstrip()


@dataclass
class CaptionCounts:
    """Counts of captions that were cut and stripped, and of those dropped beyond their clip's limit."""

    cut: int = 0
    stripped: int = 0
    dropped: int = 0


class Captions:
    """The distinct captions of one clip, cleaned as they are added, at most `MAX_CAPTIONS`, and its scores.

    `problem` is the reason if there are none and it is known, `broken` says what of one is no text. `scores` has the fields of `columns`,
    as they are written. `encoding`: of caption files without a byte-order mark; None: UTF-8.
    """

    def __init__(
        self, max_chars: int, counts: CaptionCounts, columns: Sequence[str] = (), encoding: str | None = None
    ) -> None:
        self.problem = self.broken = ""
        self.scores: dict[str, Any] = {}
        self._columns = columns
        self._max_chars = max_chars
        self._counts = counts
        self._encoding = encoding
        self._kept: dict[str, None] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._kept)

    def add(self, text: str, whole: bool = True) -> None:
        """Add a caption; `whole` is false if its file was not read to its end."""
        cleaned = clean_caption(text, self._max_chars)
        self._counts.cut += cleaned.cut or not whole
        self._counts.stripped += cleaned.stripped
        if cleaned.broken:
            self.broken = self.broken or no_text(cleaned.text, LOST in text, self._encoding)
        if not cleaned.text or cleaned.text in self._kept:
            return
        if len(self._kept) < MAX_CAPTIONS:
            self._kept[cleaned.text] = None
        else:
            self._counts.dropped += 1

    def add_scores(self, fields: Mapping[str, Any]) -> None:
        """Take the scores among the fields of a row or a JSON object."""
        self.scores.update((name, fields[name]) for name in self._columns if name in fields)

    def add_file(self, name: str, data: bytes, key: str) -> None:
        """Add the captions of a caption file, of which `data` are the first bytes: up to `MAX_CAPTION_BYTES` + 1."""
        whole = len(data) <= MAX_CAPTION_BYTES
        if not name.lower().endswith(".json"):
            text = decode(data[:MAX_CAPTION_BYTES], self._encoding)
            # A character that the limit cuts in two is not damage of the file.
            self.add(text if whole else text[:-3] + _SURROGATE.sub("", text[-3:]), whole)
        elif not whole:
            self.problem = f"its caption file is larger than {MAX_CAPTION_BYTES} bytes"
        else:
            try:
                tree = json_tree(decode(data, self._encoding))
                self.add_scores(tree if isinstance(tree, dict) else {})
                for text in json_captions(tree, key):
                    self.add(text)
            except ValueError as error:
                self.problem = f"its caption file: {error}"


def encoding_of(head: bytes, own: str | None) -> str:
    """The encoding of a text by its byte-order mark, else `own`, else UTF-8. `head`: its first four bytes, or more."""
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), own or "utf-8")


def is_wide(encoding: str) -> bool:
    """True for an encoding in which a line's end is more than one byte."""
    return encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32"))


def decode(data: bytes, own: str | None = None) -> str:
    """Decode by the byte-order mark, else by the encoding `own`, else as UTF-8; each undecodable byte becomes a lone surrogate.

    So does a zero byte among others where no encoding is named: it is of UTF-16 without a mark, whose other bytes may be read as letters.
    """
    encoding = encoding_of(data, own)
    if not is_wide(encoding):
        text = decode_part(data, encoding)
        return text if own or not text.strip("\0") else text.replace("\0", "\udc00")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:  # it has no surrogateescape
        return data.decode(encoding, "replace").replace(LOST, "\udcff")


def decode_part(data: bytes, encoding: str) -> str:
    """Decode a text or a line of one; each byte that is undecodable becomes a lone surrogate.

    So do those of a text in UTF-8 among others in `encoding`: it would be read as other letters. In an encoding of several bytes a few
    characters may be of both by chance.
    """
    if encoding != "utf-8" and not data.isascii():
        with suppress(UnicodeDecodeError):
            text = data.decode("utf-8-sig")
            several = len(b"\xe9\xe9".decode(encoding, "replace")) < 2
            if sum(char > "\x7f" for char in text) > 3 * several and data.decode(encoding, "replace") != text:
                return data.decode("ascii", "surrogateescape")
    return data.decode(encoding, "surrogateescape")


def no_text(shown: str, as_written: bool, encoding: str | None) -> str:
    """The detail of a caption, `shown`, with a character that is lost: in the file itself, or by reading it in another encoding."""
    place = max(0, shown.index(LOST) - 20)
    part = shown[place : place + 40]
    if as_written and encoding is None:
        return f"its caption holds U+FFFD, in place of a character that was lost: {part!r}; write it anew, or in its encoding"
    return (
        f"its caption is not {encoding or 'UTF-8'}: {part!r}; name its encoding under data.caption_encoding, such as gb18030, shift_jis or "
        "cp1252"
    )


def json_tree(text: str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


def json_captions(tree: Any, key: str) -> list[str]:
    """The captions of a JSON value: a string, a list of them, or an object's `key` or `caption`. Raises ValueError."""
    if isinstance(tree, dict):
        tree = tree.get(key, tree.get("caption"))
    return strings(tree)


def strings(value: Any) -> list[str]:
    """The strings of a caption field: nothing, a string, or a list of strings. Raises ValueError for anything else."""
    if is_missing(value):
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(f"the caption is a {type(value).__name__}, not a string or a list of strings")


def is_missing(value: Any) -> bool:
    """True if a field is empty: None, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and value != value)
