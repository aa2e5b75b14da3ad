"""The sections of a language run that say where its texts come from, and how they become token ids."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .inputs import Section, check_mixing, distinct_names

Role = Literal["system", "user", "assistant"]


class TextSourceConfig(Section):
    """Files of texts, chats or token ids."""

    path: str = Field(
        description="File or folder: `.jsonl`, `.ndjson`, `.json` (an array, or lines), `.csv`, `.parquet`, `.txt`, `.tar`, each also behind `.gz` or `.zst`; Megatron's `.bin` beside its `.idx`. `*` names several. Hidden folders are not entered, links are followed. Relative paths are taken from the config file."
    )
    name: str | None = Field(
        None,
        min_length=1,
        description="Name of this source; null: the last part of `path`, numbered where two are the same.",
    )
    repeats: int = Field(1, ge=1, description="Times each of its documents is used in an epoch. Not with weights.")
    weight: float | None = Field(
        None,
        gt=0,
        description="Share of this source in an epoch's tokens, relative to the other sources' weights: all have one, or none.",
    )
    held_out: bool = Field(
        False,
        description="Hold out all of its documents for validation, beside the share `texts.validation` of the others.",
    )
    content: Literal["text", "chat", "ids"] = Field(
        "text",
        description="What a row holds: a text; a chat, which is written by the tokenizer's template and has its loss on the assistant's tokens; or token ids.",
    )
    column: str | None = Field(
        None,
        min_length=1,
        description="Column of a table, or key of a JSON line or of a JSON file in a tar; null: `text` or `ids`, and of a chat what the row has of `messages` (`role`, `content`), `conversations` (`from`, `value`), `instruction`, `input` and `output`, or `prompt` and `completion`.",
    )
    turns: dict[Role, str | tuple[str, ...]] | None = Field(
        None,
        min_length=1,
        description="Columns of a chat's turns in place of `column`, such as `{user: [question, context], assistant: answer}`; the texts of several are lines of one turn, `system` and all but the first one of a turn may be missing.",
    )
    split: Literal["file", "blank_line"] = Field(
        "file", description="Documents of a `.txt` file: the whole file, or the parts between blank lines."
    )

    @model_validator(mode="after")
    def _turns_of_chats(self) -> TextSourceConfig:
        if self.turns is not None and (
            self.content != "chat" or self.column is not None or "assistant" not in self.turns
        ):
            raise ValueError(
                "turns are of content: chat, without column, and name the columns of the assistant at least"
            )
        return self


class TextsConfig(Section):
    """Texts and their cache."""

    sources: tuple[TextSourceConfig, ...] = Field(min_length=1, description="Sources of the texts.")
    cache: str = Field(description="Folder of the text cache; a URL for a copy that is read only.")
    validation: float = Field(
        0.01, ge=0, lt=1, description="Share of the documents held out for validation, drawn by content."
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="Mix several sources with shares of size ** (1 / temperature): 1 follows their tokens, larger values are more even. Null: every document once, or by the sources' weights.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Longer documents are rejected as too long, in tokens; null: none are."
    )
    max_document_mb: float = Field(
        64.0, gt=0, description="Larger documents are rejected as too large before they become tokens, in megabytes."
    )
    processes: int = Field(
        0,
        ge=0,
        description="Processes that turn texts into tokens; 0: the command's own alone. The cache has the same bytes.",
    )
    shard_mb: float = Field(256.0, gt=0, description="Size of the cache's shards, in megabytes.")
    online: bool = Field(
        True,
        description="Let `mmspeed train` build or complete the cache before its first step; false: an incomplete cache is an error.",
    )

    @model_validator(mode="after")
    def _mixing(self) -> TextsConfig:
        check_mixing(self.sources, self.temperature, "temperature")
        return self

    def document_settings(self, seed: int) -> dict[str, Any]:
        """The settings that decide which documents a cache holds and which are held out; of no paths, which other machines may have."""
        own = {"weight", "repeats", "path", "name"}
        sources = [
            {"name": name, **source.model_dump(mode="json", exclude=own)}
            for name, source in zip(self.source_names, self.sources, strict=True)
        ]
        settings = {"sources": sources, "validation": self.validation, "max_tokens": self.max_tokens}
        return {**settings, "max_document_mb": self.max_document_mb, "seed": seed if self.validation else None}

    @property
    def source_names(self) -> tuple[str, ...]:
        """The name of each source, in order; all are distinct."""
        return distinct_names(self.sources, "texts")


class BytesTokenizerConfig(Section):
    """The bytes of UTF-8, 256 ids, and one for the end of a document."""

    kind: Literal["bytes"] = Field("bytes", description="The bytes of UTF-8.")


class TrainedTokenizerConfig(Section):
    """A byte-level BPE that is trained once on a sample of the texts, and stored in the cache."""

    kind: Literal["train"] = Field(description="A tokenizer of these texts.")
    size: int = Field(8192, ge=257, description="Number of ids, the end of a document included.")
    sample_mb: float = Field(
        100.0, gt=0, description="Texts that it is trained on, in megabytes; they are taken from the sources in turn."
    )


class StoredTokenizerConfig(Section):
    """The fast tokenizer of a transformers folder; no code in it is run."""

    kind: Literal["transformers"] = Field(description="A tokenizer that is there already.")
    path: str = Field(description="Folder with a `tokenizer.json`, or a hub id.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub; null: its main branch.")
    begin_of_document: Literal[False] | str | None = Field(
        None,
        description="Token before each document; null: what the tokenizer's own post-processor puts around a text; false: none. A chat whose template writes it gets no second one.",
    )
    end_of_document: str | None = Field(
        None, description="Token behind each document; null: its end of sequence (`eos_token`), if it has one."
    )
    chat_template: str | None = Field(
        None, description="Template of chats in place of the folder's, as Jinja text; null: the folder's."
    )


TokenizerConfig = Annotated[
    BytesTokenizerConfig | TrainedTokenizerConfig | StoredTokenizerConfig, Field(discriminator="kind")
]
