"""Write chats by the tokenizer's template, and mark the assistant's tokens: those alone have a loss.

Templates with generation marks (`{% generation %}`) say the spans themselves. For others the chat is written turn by turn, and
what an assistant's turn adds behind the prompt of its generation is its span; a template that changes earlier turns as later ones
come (it is not prefix-stable) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.errors import UserError

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(Exception):
    """A chat that the template cannot write, or whose turns it changes."""


class ChatTemplate:
    """The chat template of a tokenizer's folder, written by transformers in its sandbox; no code of the folder is run.

    Raises UserError if the folder has no template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # transformers raises its own and others'
            raise UserError(f"{folder} is no tokenizer that transformers loads: {error}") from error
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise UserError(
                "the tokenizer has no chat template, which sources of `content: chat` need; set tokenizer.chat_template"
            )
        self.marked = _MARKED.search(template) is not None

    def encode(self, messages: Sequence[Any]) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """The ids of a chat, and marks of those with a loss. Raises ChatError."""
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatError("a message without a role")
            if not isinstance(message.get("content", ""), (str, list, type(None))):
                raise ChatError("a message whose content is no text")
        if not any(message["role"] == "assistant" for message in messages):
            raise ChatError("no message of the assistant: nothing has a loss")
        if self.marked:
            rows = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return list(rows["input_ids"]), np.array(rows["assistant_masks"], bool)
        return self._by_turns(messages)

    def _by_turns(self, messages: Sequence[Any]) -> tuple[list[int], npt.NDArray[np.bool_]]:
        text: str = self._apply(messages, tokenize=False)
        spans, at = [], 0
        for number, message in enumerate(messages):
            after: str = self._apply(messages[: number + 1], tokenize=False)
            if not text.startswith(after) or len(after) < at:
                raise ChatError("the template changes earlier turns as later ones come")
            if message["role"] == "assistant":
                start: str = (
                    self._apply(messages[:number], tokenize=False, add_generation_prompt=True) if number else ""
                )
                if not after.startswith(start):
                    raise ChatError("the template does not begin an assistant's turn with its prompt")
                spans.append((max(len(start), at), len(after)))
            at = len(after)
        rows = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(rows["offset_mapping"], np.int64).reshape(-1, 2)
        marks = np.zeros(len(offsets), bool)
        for begin, end in spans:
            marks |= (offsets[:, 0] >= begin) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
        return list(rows["input_ids"]), marks

    def _apply(self, messages: Sequence[Any], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates raise their own errors
            raise ChatError(
                f"the template refuses it: {str(error).splitlines()[0][:200] if str(error) else error!r}"
            ) from error
