"""The tokenizer of a text cache: files of a transformers folder in `tokenizer/`, whose digests stand in `cache.json`.

`tokenizer.json` is read by the `tokenizers` package: it is data alone, and no code of a model's folder is run. Texts are data, too: a
text that spells a special token has the ids of its words, never that of the token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmspeed.errors import UserError

from .files import write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FOLDER = "tokenizer"
MAIN = "tokenizer.json"
# what makes a tokenizer of transformers; other files of a folder, such as code, are not taken
NAMES = (MAIN, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json")


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts of a cache's tokenizer.

    Args:
        kind: `bytes`, `train` or `transformers`; `ids` where documents came as ids, without a tokenizer.
        vocabulary: the number of ids.
        end_of_document: the id behind each document; None if there is none.
        files: the SHA-256 of each file in the cache's folder `tokenizer/`.
        begin: the ids before each document.
        behind: the ids behind a text and before the end of its document, of tokenizers that put other ones there.
    """

    kind: str
    vocabulary: int
    end_of_document: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    begin: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides the ids of a text."""
        text = f"{self.vocabulary} {self.end_of_document} {sorted(self.files.items())}"
        if self.begin or self.behind:
            text += f" {self.begin} {self.behind}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """The facts in JSON's types, with the fingerprint."""
        return {
            "kind": self.kind,
            "vocabulary": self.vocabulary,
            "end_of_document": self.end_of_document,
            "files": dict(self.files),
            "fingerprint": self.fingerprint,
            **{name: list(ids) for name, ids in (("begin", self.begin), ("behind", self.behind)) if ids},
        }

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> TokenizerFacts:
        """The facts of `to_json`. Raises KeyError, TypeError or ValueError for another value."""
        around = (tuple(row.get(name, ())) for name in ("begin", "behind"))
        facts = cls(str(row["kind"]), int(row["vocabulary"]), row["end_of_document"], dict(row["files"]), *around)
        if facts.fingerprint != row["fingerprint"]:
            raise ValueError("another fingerprint")
        return facts


class TextTokenizer:
    """A tokenizer of a `tokenizer.json`: texts to ids and back.

    facts: those of its cache, with the ids around each text; None: there are none.
    """

    def __init__(self, path: Path, facts: TokenizerFacts | None = None) -> None:
        from tokenizers import Tokenizer

        try:
            self.core: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exceptions
            raise UserError(f"{path} is not a tokenizer that the package tokenizers reads: {error}") from error
        self.core.no_truncation()
        self.core.no_padding()
        self.begin, self.behind = ((), ()) if facts is None else (facts.begin, facts.behind)
        added = self.core.get_added_tokens_decoder()
        named = () if facts is None else (*facts.begin, *facts.behind, facts.end_of_document)
        self.core.add_special_tokens([added[number] for number in named if number in added])  # whatever the file says
        self.core.encode_special_tokens = True
        decoder = self.core.get_added_tokens_decoder()
        self.special = SpecialTokens({token.content: number for number, token in decoder.items() if token.special})
        self.special.fold(self.core)

    @property
    def vocabulary(self) -> int:
        """The number of ids: one more than the largest."""
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        number: int | None = self.core.token_to_id(token)
        return number

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without those around it."""
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, with those around each; none for a text without ids."""
        rows = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*self.begin, *ids, *self.behind] if (ids := row.ids) else [] for row in rows]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ids, with special tokens if `special`."""
        text: str = self.core.decode([int(number) for number in ids], skip_special_tokens=not special)
        return text


class SpecialTokens:
    """The special tokens of a tokenizer, with their ids, as texts may spell them."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        words = sorted(filter(None, ids), key=len, reverse=True)  # the longest one is taken, as tokenizers do
        self.pattern = re.compile("|".join(map(re.escape, words)) or "(?!)")
        # tokens that are looked for in normalized texts: as they are, and normalized
        self._folded: list[tuple[str, str]] = []
        self._normal: Callable[[str], str] = str

    def fold(self, core: Tokenizer) -> None:
        """Know which ones a tokenizer looks for in normalized texts."""
        if core.normalizer is not None:
            words = [token.content for token in core.get_added_tokens_decoder().values() if token.normalized]
            self._normal = core.normalizer.normalize_str
            self._folded = [(word, self._normal(word)) for word in words if word in self.ids]

    def folds(self, text: str) -> bool:
        """True for a text that spells more of them once it is normalized."""
        if not self._folded:
            return False
        normal = self._normal(text)
        return any(normal.count(folded) > text.count(word) for word, folded in self._folded)

    def among(self, texts: Iterable[str]) -> str:
        """The first one that a text spells; empty if none does."""
        return next((match[0] for text in texts if (match := self.pattern.search(text))), "")

    def confused(self, text: str, ids: Iterable[int]) -> bool:
        """True if the ids of a text hold that of one that it spells: a vocabulary that has it as words, too, cannot tell them apart."""
        spelled = {self.ids[word] for word in self.pattern.findall(text)}
        return bool(spelled) and not spelled.isdisjoint(ids)


def store_tokenizer(
    root: Path,
    files: Mapping[str, bytes],
    kind: str,
    end_of_document: str | None,
    begin_of_document: str | Literal[False] | None = False,
) -> tuple[TokenizerFacts, TextTokenizer]:
    """Write a tokenizer's files to the folder of a cache, and return its facts and the tokenizer.

    `end_of_document` is the token behind each document, `begin_of_document` the one before it (None: what the tokenizer's own
    post-processor puts around a text; False: none). Raises UserError if the files are not a tokenizer, or lack one of the tokens.
    """
    for name, data in sorted(files.items()):
        write_whole(root / FOLDER / name, data)
    tokenizer = TextTokenizer(root / FOLDER / MAIN)

    def id_of(token: str, job: str) -> int:
        number = tokenizer.id_of(token)
        if number is None:
            raise UserError(f"the tokenizer has no token {token!r}, which is to {job} each document")
        return number

    end = None if end_of_document is None else id_of(end_of_document, "end")
    begin, behind = own_frame(tokenizer, end) if begin_of_document is None else ((), ())
    if begin_of_document:
        begin = (id_of(begin_of_document, "begin"),)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    facts = TokenizerFacts(kind, tokenizer.vocabulary, end, digests, begin, behind)
    return facts, TextTokenizer(root / FOLDER / MAIN, facts)


def frame_of(core: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor of a tokenizer puts before and behind a text."""
    row = core.encode("a")
    text = [place for place, mark in enumerate(row.special_tokens_mask) if not mark]
    return (tuple(row.ids[: text[0]]), tuple(row.ids[text[-1] + 1 :])) if text else (tuple(row.ids), ())


def own_frame(tokenizer: TextTokenizer, end: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer puts around a text; without a last one that is `end`, which each document has already."""
    begin, behind = frame_of(tokenizer.core)
    return begin, behind[:-1] if behind and behind[-1] == end else behind


def recorded_section(root: Path, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section `tokenizer` that a cache was made by.

    An earlier version put nothing around texts: that is said by `begin_of_document: false`, where the tokenizer's own rule is another.
    """
    section: Mapping[str, Any] | None = info.get("tokenizer_config")
    if not section or section.get("kind") != "transformers" or "begin_of_document" in section:
        return section
    own = own_frame(TextTokenizer(root / FOLDER / MAIN), info["tokenizer"]["end_of_document"])
    return {**section, "begin_of_document": False if any(own) else None}


def tokenizer_problems(root: Path, info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(file, problem) of each file of a cache's tokenizer that is damaged, missing, or not recorded in its `cache.json`."""
    try:
        facts = TokenizerFacts.of_json(info["tokenizer"])
    except (KeyError, TypeError, ValueError):
        return [("cache.json", "does not describe the tokenizer")] if info.get("task") == "language" else []
    problems = []
    for name, expected in sorted(facts.files.items()):
        try:
            if hashlib.sha256((root / FOLDER / name).read_bytes()).hexdigest() != expected:
                problems.append((f"{FOLDER}/{name}", "is not as it was written"))
        except FileNotFoundError:
            problems.append((f"{FOLDER}/{name}", "is missing"))
        except OSError as error:
            problems.append((f"{FOLDER}/{name}", f"cannot be read: {error.strerror}"))
    return problems


def byte_tokenizer() -> dict[str, bytes]:
    """The files of a tokenizer whose ids are the bytes of UTF-8, with `<|endoftext|>` as id 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in enumerate(_byte_signs())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True)])
    return {MAIN: core.to_str(pretty=True).encode(), **plain_config()}


END = "<|endoftext|>"


def plain_config() -> dict[str, bytes]:
    """The `tokenizer_config.json` of a tokenizer that mmspeed makes, so that transformers loads its folder."""
    text = f'{{\n  "tokenizer_class": "PreTrainedTokenizerFast",\n  "eos_token": "{END}",\n  "clean_up_tokenization_spaces": false\n}}\n'
    return {"tokenizer_config.json": text.encode()}


def _byte_signs() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2, Radford et al. 2019)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
