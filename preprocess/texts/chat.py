"""Write chats by the tokenizer's template, and mark the assistant's tokens: those alone have a loss.

Templates with generation marks (`{% generation %}`) say the spans themselves. For others the chat is written turn by turn, and
what an assistant's turn adds behind the prompt of its generation is its span. An answer that the template writes in another way as
later turns come, as Qwen3's takes its thoughts away, has no loss: there the model never writes what stands in the chat.

Special tokens are those that the template writes. One that a message spells is hidden while the template writes, by a private character
in place of its first one, and then has the ids of its words. So has another added token of the template, such as the head of a turn,
but for one in the assistant's words, which may be `<think>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmspeed.data.cache.tokenizer_file import SpecialTokens
from mmspeed.errors import UserError
from mmspeed.guards import template_limit

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PRIVATE = re.compile("[\U00100000-\U0010ffff]")
# private characters that stand for special tokens, and for the first ones of spelled tokens
_NAMES, _HIDDEN = 0x100000, 0x10F000
Spans: TypeAlias = list[tuple[int, int]]  # of characters


class ChatError(Exception):
    """A chat that the template cannot write, or whose answers it all changes."""


class ChatTemplate:
    """The chat template of a tokenizer's folder, written by transformers in its sandbox; no code of the folder is run.

    Raises UserError if the folder has no template.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken
        from transformers import PreTrainedTokenizerFast

        try:
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # transformers raises its own and others'
            raise UserError(f"{folder} is no tokenizer that transformers loads: {error}") from error
        if not isinstance(tokenizer.chat_template, str):
            raise UserError(
                "the tokenizer has no chat template, which sources of `content: chat` need; set tokenizer.chat_template"
            )
        self._template, self._variables = tokenizer.chat_template, dict(tokenizer.special_tokens_map)
        self.marked = _MARKED.search(self._template) is not None
        probe, self._core = "a \n b", tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        offsets = self._core.encode(probe, add_special_tokens=False).offsets
        self._core.post_processor = None  # it may trim white space off the places of tokens
        self._trims = bool(self._core.encode(probe).offsets != offsets)
        added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.content}
        special = {token.content: number for number, token in added.items() if token.special}
        written = {token.content: number for number, token in added.items() if token.content in self._template}
        self._special = SpecialTokens(special)
        self._control = SpecialTokens(
            special | {word: written[word] for word in written if not (word.isspace() or word.isalnum())}
        )
        self._names = {word: chr(_NAMES + place) * len(word) for place, word in enumerate(self._control.ids)}
        self._first = {sign: chr(_HIDDEN + place) for place, sign in enumerate({word[0] for word in self._names})}
        self._shown = str.maketrans({hidden: sign for sign, hidden in self._first.items()})
        tokens = [token for token in added.values() if token.content in self._names]
        self._single = {token.content for token in tokens if token.single_word}
        self._control.fold(self._core)
        self._core.add_special_tokens(tokens)
        self._core.add_tokens(
            [
                AddedToken(
                    self._names[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for token in tokens
            ]
        )
        self._joined: dict[tuple[str, ...], bool] = {}
        self._ids = {self._core.token_to_id(name): self._control.ids[word] for word, name in self._names.items()}

    def spelled(self, messages: Sequence[Any]) -> str:
        """The first special token that a chat spells; empty if it spells none."""
        return next(filter(None, (self._tokens_of(message).among(strings_of(message)) for message in messages)), "")

    def altered(self, messages: Sequence[Any]) -> bool:
        """True for a chat that version 1 gave other marks, whatever it spells."""
        roles = [str(message.get("role")) if isinstance(message, Mapping) else "" for message in messages]
        other = roles[:1] == ["assistant"] or any(starmap(self._joins, pairwise(roles)))
        other = other or (roles.count("assistant") > 1 and any(self._changes))
        return self._trims or (other and not self.marked) or any(map(self._control.folds, strings_of(list(messages))))

    def shortens(self, messages: Sequence[Any]) -> bool:
        """True for a chat of which the template changes the answers before the last question: they have no loss, others have."""
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        if self.marked or "user" not in roles:
            return False
        last = len(roles) - 1 - roles[::-1].index("user")
        answers = [message for role, message in zip(roles[:last], messages, strict=False) if role == "assistant"]
        thoughts = "</think>" in "".join(strings_of(answers))
        return bool(answers) and "assistant" in roles[last:] and self._changes[thoughts]

    @cached_property
    def _changes(self) -> tuple[bool, bool]:
        """Whether the template changes an answer, and one with thoughts, as a question comes behind it."""

        def changed(answer: str) -> bool:
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
            try:
                return not self._write([*chat, chat[0]])[0].startswith(self._write(chat)[0])
            except ChatError:
                return False

        return changed("b"), changed("<think>b</think>c")

    def _joins(self, *roles: str) -> bool:
        """True for two turns before an assistant's of which the template does not write the first one alone, as it does with the other."""
        if "assistant" in roles:
            return False
        if roles not in self._joined:
            turns = [{"role": role, "content": "a"} for role in roles]
            try:
                self._joined[roles] = not self._write(turns)[0].startswith(self._write(turns[:1])[0])
            except ChatError:
                self._joined[roles] = True
        return self._joined[roles]

    def _named(self, match: re.Match[str]) -> str:
        """The name of a token that the template writes; a word that is one only where it stands alone may stay a word."""
        around = match.string[: match.start()][-1:] + match.string[match.end() :][:1]
        return match[0] if match[0] in self._single and re.search(r"\w", around) else self._names[match[0]]

    def _tokens_of(self, message: Any) -> SpecialTokens:
        """The tokens that are words in a message."""
        return self._special if isinstance(message, Mapping) and message.get("role") == "assistant" else self._control

    def encode(self, messages: Sequence[Any]) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """The ids of a chat, and marks of those with a loss. Raises ChatError."""
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatError("a message without a role")
            if not isinstance(message.get("content", ""), (str, list, type(None))):
                raise ChatError("a message whose content is no text")
        if not any(message["role"] == "assistant" for message in messages):
            raise ChatError("no message of the assistant: nothing has a loss")
        if any(_PRIVATE.search(text) for text in strings_of(messages)):
            raise ChatError("it holds a private character of plane 16")
        try:
            messages = [_hidden(_known(message), self._tokens_of(message), self._first) for message in messages]
        except RecursionError:
            raise ChatError("it is nested too deep") from None
        return self._tokens(*(self._write(messages) if self.marked else self._by_turns(messages)))

    def _by_turns(self, messages: Sequence[Any]) -> tuple[str, Spans]:
        """The text of a chat, and the assistant's spans."""
        text, _ = self._write(messages)
        spans, at = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":  # a template may write several of these as one, or need a further one
                continue
            after, _ = self._write(messages[: number + 1])
            if not text.startswith(after):
                continue
            if len(after) < at:
                raise ChatError("the template writes less of a chat with a turn more")
            start = self._start(messages[:number], after)
            if not after.startswith(start):
                raise ChatError("the template does not begin an assistant's turn with its prompt")
            spans.append((max(len(start), at), len(after)))
            at = len(after)
        if not spans:
            raise ChatError("the template changes each of its answers as later turns come: nothing has a loss")
        return text, spans

    def _start(self, before: Sequence[Any], after: str) -> str:
        """What the template writes before the assistant's words in `after`: earlier turns and the prompt of generation."""
        if before:
            return self._write(before, add_generation_prompt=True)[0]
        place = after.find(self._prompt)  # many templates write no chat without messages
        if place < 0:
            raise ChatError("the template does not begin an assistant's turn with its prompt")
        return after[: place + len(self._prompt)]

    @cached_property
    def _prompt(self) -> str:
        """The prompt of generation alone."""
        turn = [{"role": "user", "content": "a"}]
        return self._write(turn, add_generation_prompt=True)[0].removeprefix(self._write(turn)[0])

    def _write(self, messages: Sequence[Any], **options: Any) -> tuple[str, Spans]:
        """The text that the template writes, and its own marks of generation. Raises ChatError, and UserError for a template without end."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with template_limit():
                written: Any = render_jinja_template(
                    [list(messages)],
                    chat_template=self._template,
                    return_assistant_tokens_mask=self.marked,
                    **options,
                    **self._variables,
                )
        except UserError:
            raise
        except Exception as error:  # templates raise their own errors
            raise ChatError(
                f"the template refuses it: {str(error).splitlines()[0][:200] if str(error) else error!r}"
            ) from error
        texts, spans = written
        return str(texts[0]), [(int(begin), int(end)) for begin, end in spans[0]] if self.marked else []

    def _tokens(self, text: str, spans: Spans) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """The ids of a text that may hold hidden tokens, and marks of those within spans."""
        shown = text.translate(self._shown)
        spelled = shown != text or self._control.folds(text)
        if spelled:  # then those of the template go by other names, of the same length
            shown = self._control.pattern.sub(self._named, text).translate(self._shown)
        self._core.encode_special_tokens = spelled
        row = self._core.encode(shown)
        if spelled and self._control.confused(shown, row.ids):
            raise ChatError("it spells a special token that the tokenizer's vocabulary has as words, too")
        first, behind = np.array(row.offsets, np.int64).reshape(-1, 2).T
        marks = np.zeros(len(first), bool)
        for begin, end in spans:
            # a token over an edge is the assistant's by the template's own marks, as in transformers
            inside = (first < end) & (behind > begin) if self.marked else (first >= begin) & (behind <= end)
            marks |= inside & (behind > first)
        return [self._ids.get(number, number) for number in row.ids], marks


def _known(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without its keys of nothing, as transformers gives it to templates."""
    return {name: value for name, value in message.items() if value is not None}


def _hidden(value: Any, tokens: SpecialTokens, first: Mapping[str, str]) -> Any:
    """A message, or a part of it, whose texts spell no special token any more."""
    if isinstance(value, str):
        return tokens.pattern.sub(lambda match: first[match[0][0]] + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_hidden(name, tokens, first): _hidden(part, tokens, first) for name, part in value.items()}
    return [_hidden(part, tokens, first) for part in value] if isinstance(value, (list, tuple)) else value


def strings_of(value: Any) -> Iterator[str]:
    """The texts in a message, or in a list of messages."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            waiting += [*part, *part.values()]
        elif isinstance(part, (list, tuple)):
            waiting += part
