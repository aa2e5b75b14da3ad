"""The tokenizer of a text cache: files of a transformers folder in `tokenizer/`, whose digests stand in `cache.json`.

`tokenizer.json` is read by the `tokenizers` package: it is data alone, and no code of a model's folder is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """

    kind: str
    vocabulary: int
    end_of_document: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides the ids of a text."""
        text = f"{self.vocabulary} {self.end_of_document} {sorted(self.files.items())}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """The facts in JSON's types, with the fingerprint."""
        return {
            "kind": self.kind,
            "vocabulary": self.vocabulary,
            "end_of_document": self.end_of_document,
            "files": dict(self.files),
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> TokenizerFacts:
        """The facts of `to_json`. Raises KeyError, TypeError or ValueError for another value."""
        facts = cls(str(row["kind"]), int(row["vocabulary"]), row["end_of_document"], dict(row["files"]))
        if facts.fingerprint != row["fingerprint"]:
            raise ValueError("another fingerprint")
        return facts


class TextTokenizer:
    """A tokenizer of a `tokenizer.json`: texts to ids and back."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self.core: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exceptions
            raise UserError(f"{path} is not a tokenizer that the package tokenizers reads: {error}") from error
        self.core.no_truncation()
        self.core.no_padding()

    @property
    def vocabulary(self) -> int:
        """The number of ids: one more than the largest."""
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        number: int | None = self.core.token_to_id(token)
        return number

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without tokens of beginning and end."""
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts."""
        return [row.ids for row in self.core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ids, with special tokens if `special`."""
        text: str = self.core.decode([int(number) for number in ids], skip_special_tokens=not special)
        return text


def store_tokenizer(
    root: Path, files: Mapping[str, bytes], kind: str, end_of_document: str | None
) -> tuple[TokenizerFacts, TextTokenizer]:
    """Write a tokenizer's files to the folder of a cache, and return its facts and the tokenizer.

    `end_of_document` is the token behind each document. Raises UserError if the files are not a tokenizer, or lack the token.
    """
    for name, data in sorted(files.items()):
        write_whole(root / FOLDER / name, data)
    tokenizer = TextTokenizer(root / FOLDER / MAIN)
    end = None if end_of_document is None else tokenizer.id_of(end_of_document)
    if end_of_document is not None and end is None:
        raise UserError(f"the tokenizer has no token {end_of_document!r}, which is to end each document")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return TokenizerFacts(kind, tokenizer.vocabulary, end, digests), tokenizer


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
