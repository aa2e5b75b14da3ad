"""Preparation of the language task: a first config, a check of the texts, and their cache. Methods import what they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from mmspeed.config.known_models import PUBLISHED
from mmspeed.config.places import absolute_places, is_url
from mmspeed.config.texts import TextsConfig, TextSourceConfig, TokenizerConfig
from mmspeed.config.yaml_text import parse_yaml
from mmspeed.errors import UserError, nearest
from mmspeed.log import format_bytes

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.data.cache.made_from import MadeFrom
    from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder
    from mmspeed.protocols import RunWork

DEMO_TEXTS, RECIPES = "assets/demo-texts", "assets/recipes"  # of the package
_LOOKED_AT = 20  # first rows of a source that tell its column
BYTES_OF_TOKEN, RATIO = 4, 3  # of a file; of texts to their compressed file


class TextSections(Protocol):
    """The sections of a config that texts are prepared by."""

    texts: TextsConfig
    tokenizer: TokenizerConfig


@dataclass
class TextCheck:
    """The rows of each source by name: documents, bytes, tokens (about, and how that is known), and rejected ones by reason."""

    documents: Counter[str] = field(default_factory=Counter)
    size: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, tuple[int, str]] = field(default_factory=dict)
    rejected: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    works: Sequence[RunWork] = ()  # of the whole training, by numbers of devices; none where the config says too little

    @property
    def problems(self) -> list[str]:
        """Sources without a document."""
        return [f"source {name} holds no document" for name in self.rejected if not self.documents[name]]

    def lines(self) -> list[str]:
        """The counts in lines."""
        lines = []
        for name, reasons in self.rejected.items():
            count = self.documents[name]
            words = f"source {name}: {count:,} document{'s'[: count != 1]}, {format_bytes(self.size[name])}"
            tokens, how = self.tokens.get(name, (0, ""))
            lines.append(words + (f", about {tokens:,} tokens ({how})" if tokens else ""))
            for reason, count in sorted(reasons.items()):
                lines.append(f"  rejected, {reason}: {count:,}, such as {self.examples[name, reason]}")
        return [*lines, *self.problems]


class TextPreparation:
    """Preparation of texts, chats and token ids, by a config with the sections `texts` and `tokenizer`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        sections = cast(TextSections, config)
        self._texts, self._tokenizer = sections.texts, sections.tokenizer

    @classmethod
    def starting_values(cls, name: str, videos: str | None, model: str | None = None) -> Mapping[str, Any]:
        """Initial values for the texts at a path; None: those of the package.

        model: a recipe of the package, its twin for a CPU (`tiny-` before its name), or a folder or hub id of transformers to go on from;
        a folder that exists is one, whatever its name. Raises UserError for another one.
        """
        sources: list[dict[str, Any]] = [{"path": videos}]
        texts: dict[str, Any] = {"sources": sources, "cache": f"cache/{name}"}
        if videos is None:
            shipped = shipped_texts()
            sources[:] = [{"path": str(shipped / "train")}, {"path": str(shipped / "validation"), "held_out": True}]
            texts["validation"] = 0.0
        return {"texts": texts, **_sections_of(model)}

    @classmethod
    def fitted_values(
        cls, name: str, videos: str | None, folder: Path, model: str | None = None
    ) -> tuple[Mapping[str, Any], Sequence[str]]:
        """The initial sections with the content and column of the first rows. Raises UserError where no row can be used."""
        values = dict(cls.starting_values(name, videos, model))
        weights = _weights_line(model, values)
        if videos is None:
            return values, [
                "the texts of the package: eight works of Shakespeare and one of Milton; two others are held out",
                weights,
            ]
        place = absolute_places(folder, videos)
        stored = values["tokenizer"]["kind"] == "transformers"
        keys, line = _fit(place, stored)
        source = {**values["texts"]["sources"][0], **keys}
        values, size = _sized(values, place, chats=keys.get("content") == "chat")
        return {**values, "texts": {**values["texts"], "sources": [source]}}, [line, weights, size]

    def check(
        self,
        page: Path | None = None,
        suggest_buckets: int | None = None,
        ranks: Sequence[int] | None = None,
        schedule: bool = False,
    ) -> TextCheck:
        """Read every row and count documents and rejected ones; tokens are estimated by the first texts, and no page is written.

        Raises UserError for options of videos, and where there are no texts.
        """
        from mmspeed.preprocess.texts.amounts import TokenCount, works_of
        from mmspeed.preprocess.texts.sources import rows_of

        for option, value in (
            ("--report", page),
            ("--suggest-buckets", suggest_buckets),
            ("--schedule", schedule or None),
        ):
            if value is not None:
                raise UserError(f"{option} is of videos; a check of texts does not take it")
        result, lengths = TextCheck(), {}
        for name, source in zip(self._texts.source_names, self._texts.sources, strict=True):
            reasons, counted = result.rejected.setdefault(name, Counter()), TokenCount(self._texts, self._tokenizer)
            for row in rows_of(self._texts, source):
                if row.reason:
                    reasons[row.reason] += 1
                    result.examples.setdefault((name, row.reason), row.place)
                else:
                    result.documents[name] += 1
                    result.size[name] += counted.add(row.value)
            lengths[name], how = counted.lengths()
            result.tokens[name] = int(lengths[name].sum()), how
        result.works = works_of(self.config, lengths, ranks)
        return result

    def build(self, shard: str | None = None) -> list[str]:
        """Build or complete the text cache. Raises UserError like `TextCacheBuilder`, and for parts."""
        from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder

        if shard is not None:
            raise UserError("--shard is of caches of videos; texts.processes divides the work of a text cache")
        return TextCacheBuilder(self._texts, self._tokenizer, self.config.seed).run().lines()

    def build_on_ray(self, workers: int | None = None) -> list[str]:
        """Raise UserError: text caches are built on one machine."""
        raise UserError("--ray is of caches of videos; texts.processes divides the work of a text cache")

    def sources_now(self) -> MadeFrom:
        """The record of the files of texts as they are now. Raises UserError for a source without files."""
        from mmspeed.preprocess.texts.cache_builder import texts_now

        return texts_now(self._texts)

    def maker(self) -> TextCacheBuilder | None:
        """The builder that completes the cache before the first step; None where the config wants none, and for a copy at a URL."""
        from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder

        texts = self._texts
        return (
            TextCacheBuilder(texts, self._tokenizer, self.config.seed)
            if texts.online and not is_url(texts.cache)
            else None
        )


def shipped_texts() -> Path:
    """The folder of the package's texts, in `train` and `validation`."""
    return Path(str(files("mmspeed"))).resolve() / DEMO_TEXTS


def _recipe(name: str) -> dict[str, Any] | None:
    """The sections of a recipe; None: there is none of this name."""
    path = Path(str(files("mmspeed"))) / RECIPES / f"{name}.yaml"
    return dict(parse_yaml(path.read_text(encoding="utf-8"))) if path.is_file() else None


def recipes() -> dict[str, str | None]:
    """The names of all recipes, each with the hub id of its published weights; None: there are none."""
    names = sorted(path.stem for path in (Path(str(files("mmspeed"))) / RECIPES).glob("*.yaml"))
    return {name: ((_recipe(name) or {}).get("tokenizer") or {}).get("path") for name in names}


def _sections_of(model: str | None) -> dict[str, Any]:
    """The sections of a model: those of weights of transformers in a folder, of its recipe, of a tiny twin, or of a hub id.

    Raises UserError for an unknown name, and for a folder or hub id that training does not read.
    """
    local, known = Path(model or "").expanduser(), recipes()
    named = model is not None and not local.is_dir()
    if model is None or (named and model.startswith("tiny-") and model.removeprefix("tiny-") in known):
        return {
            "tokenizer": {"kind": "train", "size": 8192},
            "model": {"shape": model or "tiny-qwen3-0.6b"},
            "sequence_length": 512,
            "train": {"steps": 1000, "lr": 3e-3, "batch_size": 16},
        }
    if named and (recipe := _recipe(model)) is not None:
        return recipe
    if any(model.lower() in family for family in PUBLISHED.values()):
        raise UserError(f"--model: {model} is no language model: leave --task language and --texts out")
    if "/" not in model and named:
        raise UserError(
            f"--model: {model!r} is no recipe{nearest(model, list(known))} (recipes: {', '.join(known)}), nor `tiny-` before one, no folder and no hub id of transformers"
        )
    place = str(local.resolve()) if local.is_dir() else model
    if local.is_dir() or model not in known.values():
        _check_base(place)
    return {
        "tokenizer": {"kind": "transformers", "path": place},
        "model": {"pretrained": place},
        "sequence_length": 1024,
        "train": {"steps": 1000, "lr": 1e-5, "batch_size": 8},
    }


def _check_base(place: str) -> None:
    """Raise UserError for a folder or hub id that holds no decoder of a family that is read."""
    from mmspeed.models.language.families import settings_of
    from mmspeed.models.weights import read_json, resolve

    base = resolve(place, [None], None, ("config.json",), "--model")
    settings_of(read_json(base / "config.json", "--model"), f"--model {place}")


def _weights_line(model: str | None, sections: Mapping[str, Any]) -> str:
    """A line about the weights that training begins with, and how to begin with others."""
    section = sections["model"]
    if "pretrained" in section:
        return f"model: training goes on from the weights of {section['pretrained']}"
    hub = recipes().get(str(section["shape"]).removeprefix("tiny-"))
    other = "" if hub is None else f"; for published ones: --model {hub}"
    return f"model: {section['shape']} begins with random weights, to be trained from nothing{other}"


def _sized(values: Mapping[str, Any], place: str, chats: bool) -> tuple[dict[str, Any], str]:
    """The sections with packs, batches and steps for as many tokens as the files at a place hold, and a line about them.

    An epoch has 256 packs where it can, and then 32 steps; from random weights a run has 4 epochs (Muennighoff 2023), from others 3.
    """
    from mmspeed.preprocess.texts.sources import files_of

    size = sum(
        file.stat().st_size * (RATIO if file.suffix.lower() in (".gz", ".zst", ".parquet") else 1)
        for file in files_of(TextSourceConfig(path=place))
    )
    tokens, length, train = max(1, size // BYTES_OF_TOKEN), values["sequence_length"], dict(values["train"])
    while not chats and length > 512 and tokens < 256 * length:
        length //= 2
    packs = -(-tokens // length)
    if (batch := 1 << max(3, (packs // 32).bit_length() - 1)) < train["batch_size"]:
        train["batch_size"] = batch
    epoch, random = -(-packs // train["batch_size"]), "pretrained" not in values["model"]
    most = train["steps"] if random else 100_000
    train["steps"] = min(most, max(1000, 4 * epoch) if random else max(50, 3 * epoch))
    if train.get("warmup_steps", 50) > train["steps"] // 10:
        train["warmup_steps"] = train["steps"] // 10
    epochs = train["steps"] / epoch
    line = (
        f"size: about {float(f'{tokens:.2g}'):,.0f} tokens; a step takes {train['batch_size']:,} packs of {length:,}, and "
        f"{train['steps']:,} steps are about {epochs:,.{1 if epochs < 10 else 0}f} epochs"
    )
    return {**values, "sequence_length": length, "train": train}, line


def _fit(place: str, stored: bool) -> tuple[dict[str, Any], str]:
    """The keys of a source by which its first rows can be used, and a line about them; chats first for a stored tokenizer.

    Raises UserError if there are none, and for chats without a tokenizer whose template writes them.
    """
    from mmspeed.preprocess.texts.columns import ALPACA, COMPLETION, LISTS, ColumnChoice
    from mmspeed.preprocess.texts.sources import rows_of

    chats: list[dict[str, Any]] = [{"content": "chat", "column": name} for name in LISTS]
    chats += [{"content": "chat", "turns": turns} for turns in (ALPACA, COMPLETION)]
    others = [{"content": "ids", "column": "ids"}, {"content": "text", "column": "content"}]
    tried = []
    for keys in [*chats, {}, *others] if stored else [{}, *chats, *others]:
        source = TextSourceConfig(path=place, **keys)
        columns = " and ".join(ColumnChoice(source).choices[0].needed)
        texts = TextsConfig(sources=(source,), cache="-")
        for number, row in enumerate(rows_of(texts, source)):
            if not row.reason:
                if source.content == "chat" and not stored:
                    raise UserError(
                        f"{place}: its rows are chats ({columns}), which are written by a tokenizer's template: name a model with one, "
                        "such as --model Qwen/Qwen3-0.6B (published weights) or --model qwen3-0.6b (random ones)"
                    )
                return keys, f"the texts are taken as {source.content}, column {columns}"
            if number == _LOOKED_AT:
                break
        tried.append(columns)
    raise UserError(f"{place}: none of the columns {', '.join(tried)} holds a text, a chat or ids in its first rows")
