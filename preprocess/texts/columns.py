"""The columns of a row that hold its document: one with all of it, or those of a chat's turns.

Chats come as a list of messages (`role` and `content`, or ShareGPT's `from` and `value`), in Alpaca's columns, as a prompt and its
completion, or in columns that the config names by role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from mmspeed.config.texts import Role, TextSourceConfig

LISTS = ("messages", "conversations")  # columns of whole chats
# by role; the first column of each must be there
ALPACA = {"user": ("instruction", "input"), "assistant": ("output",)}
COMPLETION = {"user": ("prompt",), "assistant": ("completion",)}
_SPEAKERS = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}


@dataclass(frozen=True)
class Columns:
    """The columns of a document by role; the role of a column that holds all of it is empty. `chat`: it is one."""

    turns: tuple[tuple[str, tuple[str, ...]], ...]
    chat: bool

    @property
    def whole(self) -> bool:
        """True for one column that holds all of the document."""
        return not self.turns[0][0]

    @property
    def needed(self) -> list[str]:
        """The columns that a row must have."""
        return [columns[0] for role, columns in self.turns if role != "system"]

    @property
    def names(self) -> list[str]:
        """All columns, of which a table is read."""
        return [name for _, columns in self.turns for name in columns]

    def value(self, row: Mapping[str, Any]) -> Any:
        """The document of a row. Raises ValueError for a turn that is no text."""
        if self.whole:
            value = row[self.needed[0]]
            return list(map(_message, value)) if self.chat and isinstance(value, list) else value
        messages: list[Any] = []
        for role, columns in self.turns:
            lines = []
            for name in columns:
                part = row.get(name)
                if isinstance(part, list):
                    messages += map(_message, part)
                elif isinstance(part, str):
                    lines += [part] if part.strip() else []
                elif part is not None:
                    raise ValueError(f"{name} is of type {type(part).__name__}")
            messages += [{"role": role, "content": "\n".join(lines)}] if lines else []
        return messages


class ColumnChoice:
    """The columns that rows of a source may have, of which a row has the first ones that it holds."""

    def __init__(self, source: TextSourceConfig) -> None:
        chat, whole = source.content == "chat", (source.column,) if source.column else LISTS
        kinds: list[Mapping[str, str | tuple[str, ...]]] = [
            {str(role): names for role, names in (source.turns or {}).items()}
        ]
        if source.turns is None:
            kinds = [{"": name} for name in (whole if chat else (source.column or source.content,))]
            kinds += [ALPACA, COMPLETION] if chat and source.column is None else []
        self.choices = [Columns(_in_order(kind), chat) for kind in kinds]

    def of(self, names: Collection[str]) -> Columns | None:
        """The columns of a row, or of a table, that has these ones; None: it lacks them."""
        return next((one for one in self.choices if all(name in names for name in one.needed)), None)

    def __str__(self) -> str:
        return ", ".join(" and ".join(one.needed) for one in self.choices)


def _in_order(kind: Mapping[str, str | tuple[str, ...]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The columns by role, in the order of a chat's turns."""
    named = [(role, kind[role]) for role in ("", *get_args(Role)) if role in kind]
    return tuple((role, (columns,) if isinstance(columns, str) else columns) for role, columns in named)


def _message(message: Any) -> Any:
    """A message with `role` and `content`, from one of ShareGPT's."""
    if not isinstance(message, Mapping) or message.get("role") is not None or not isinstance(message.get("from"), str):
        return message
    speaker = message["from"]
    return {"role": _SPEAKERS.get(speaker, speaker), "content": message.get("value")}
