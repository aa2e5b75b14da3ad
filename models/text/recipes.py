"""Recipes of the text encoders of published models: what each pipeline does from a caption to the rows that its transformer takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

Clean = Callable[[str], str | None]


@dataclass(frozen=True)
class Template:
    """Words around a caption, and the tokens of them that are cut off in front.

    `text` holds `{}` in the caption's place; with `chat` it is the system's message before the user's, which is the caption, in the
    tokenizer's own form of a conversation. `picture`: the first row of a picture, and the one after its last.
    """

    text: str
    cut: int
    chat: bool = False
    picture: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PictureUse:
    """The use of a picture in an encoder's template, whose image token stands for the rows of the picture.

    Rows of the picture come first, every `every`-th of them, then those of the caption, without the `cut` tokens that end with the last
    `mark` (those that begin the answer).

    Args:
        every: of the rows of a picture; `every_of_black` of the black picture, which the empty caption and negative prompts are encoded
            with.
        processor: folder of the image processor.
        mark, cut: the token, and the number of tokens up to it that are left out.
    """

    every: int
    every_of_black: int
    processor: str = "image_processor"
    mark: str = "<|end_header_id|>"
    cut: int = 4


@dataclass(frozen=True)
class EncoderRecipe:
    """The use of one encoder of a repository.

    Args:
        length: tokens that a caption is cut to, the template's cut ones apart.
        encoder, tokenizer: folders in the repository.
        gives: `rows` for the hidden states of tokens, `pooled` for one vector of a caption; another name, such as `text_2`, for rows
            beside the first ones, which a batch holds under it.
        padded: True for an encoder that runs over padding up to `length`, without a mask: padding changes its rows.
            False for one that is given the mask, or looks backwards only: without padding it gives the same rows.
        stored: rows of an entry: those of `real` tokens, or `all`, where the transformer takes rows of padding, too.
        layer: hidden state, counted from the end; None: the last one, after the encoder's own norm.
        template: reference "module:name" of a mapping with `template` and `crop_start` (and `chat`), or of a function that returns one;
            None: the caption alone.
        clean: reference "module:function" of what is done to a caption first; None: nothing. Where the function returns None, the
            caption has no rows of this encoder.
        picture: the use of a given picture, which the encoder sees beside the caption; None: it sees words alone.
    """

    length: int
    encoder: str = "text_encoder"
    tokenizer: str = "tokenizer"
    gives: str = "rows"
    padded: bool = False
    stored: Literal["real", "all"] = "real"
    layer: int | None = None
    template: str | None = None
    clean: str | None = None
    picture: PictureUse | None = None

    def template_of(self) -> Template | None:
        """The template, from the library that defines it."""
        if self.template is None:
            return None
        reference = _referred(self.template)
        tree = cast("dict[str, Any]", reference() if callable(reference) else reference)
        begin, end = (int(tree.get(name, 0)) for name in ("image_emb_start", "image_emb_end"))
        return Template(str(tree["template"]), int(tree["crop_start"]), bool(tree.get("chat", False)), (begin, end))

    def cleaning(self) -> Clean:
        """The function that a caption goes through first."""
        return (lambda caption: caption) if self.clean is None else cast(Clean, _referred(self.clean))


@dataclass(frozen=True)
class TextRecipe:
    """The text encoders of a family, in the order of their use; the first one gives rows.

    version: counts up when the same files give other numbers.
    """

    encoders: tuple[EncoderRecipe, ...]
    version: int = 1

    @property
    def sees_pictures(self) -> bool:
        """True where entries depend on a given picture, too."""
        return any(encoder.picture is not None for encoder in self.encoders)


def _referred(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
