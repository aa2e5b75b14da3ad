"""`mmspeed init`: generate a commented config file, with the keys that people change or with every key of the schema.

Sentences are comments that begin with `# `. In the full file keys at their default are commented out with a bare `#`, and are set by
removing that one character.
"""

from __future__ import annotations

import glob
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mmspeed.config.docs import REQUIRED, default_of, is_list, kind_of, section_options, show_type, show_value
from mmspeed.config.json_schema import editor_line
from mmspeed.config.load import sections
from mmspeed.config.memory import parse_bytes
from mmspeed.config.places import absent_hint, is_url
from mmspeed.config.schema import RunConfig
from mmspeed.config.tasks import config_class, preparation_class
from mmspeed.data.cache.files import write_whole
from mmspeed.errors import UserError
from mmspeed.version import __version__

from .preparations import unsupported_task

# The key to set in each section for which no values are given, so that the section is never empty.
FIRST_KEYS = {
    "train": "steps",
    "batching": "by",
    "model": "size",
    "checkpoint": "every",
    "validate": "every",
    "sample": "sampler",
    "parallel": "strategy",
    "memory": "activation_policy",
    "device": "kind",
    "tracking": "project",
    "preprocess": "decode_workers",
}


# The keys of each section that a short file shows beside those that the task sets.
SHORT_KEYS = {
    "model": ("size",),
    "train": ("steps", "lr"),
    "validate": ("every",),
    "checkpoint": ("every",),
    "device": ("dtype",),
}
LONGEST_LINE = 120
RANK, ADAPTER_RATE = 32, 1e-4  # of a new config's adapters
NO_BASE = "adapters train beside a published model: name one with --model"

# The head of a full file, for tasks with a preparation and for others.
PLACES = "# Relative paths are taken from the folder of this file."
PREPARED = (
    PLACES,
    "#   mmspeed check FILE        show the data, the schedule and its cost",
    "#   mmspeed preprocess FILE   encode the data once, into the cache",
    "#   mmspeed train FILE        train from the cache",
)
PLAIN = (
    PLACES,
    "#   mmspeed check FILE        show the schedule and its cost",
    "#   mmspeed train FILE        train; a stopped run continues",
)


def write_config(
    path: Path,
    videos: Path | str | None = None,
    force: bool = False,
    task: str = "video",
    full: bool = False,
    tell: Callable[[str], object] = lambda line: None,
    model: str | None = None,
    option: str = "--videos",
    adapter: str | None = None,
    rank: int | None = None,
    memory: str | None = None,
) -> Path:
    """Write a config to `path` (`.yaml` is added if it has no such ending) and return the path written.

    `videos` is the folder, manifest, tars or URL to train on, which is probed and which the config is fitted to; `tell` is called
    with each line about it. Without `videos` the packaged clips are used. `full`: with every key. `model`: the published model to
    fine-tune, by a short name, hub id or folder. `option`: the name under which the data were given. `adapter`: a kind of adapter, of a
    `rank`, to train in place of the published model's own weights. `memory`: the size of the device's, such as 24GB, to fit the base into. Raises UserError for a task that is unknown or takes no `videos`, if
    `videos` does not exist or holds nothing to train on, for an adapter of no published model, if `path` names a folder, and if the file
    exists and `force` is false.
    """
    _check_adapter(adapter, rank, model, memory)
    if path.suffix not in (".yaml", ".yml"):
        if not path.name or path.name == "..":
            raise UserError(f"{path} is a folder; name a config file, such as {path / 'my-run.yaml'}")
        path = path.with_name(path.name + ".yaml")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a config file")
    exists = UserError(f"{path} exists already; edit it, name another file, or overwrite it with --force")
    if path.exists() and not force:
        raise exists  # before the videos are read
    name, source = run_name(path), source_path(path, videos, option)
    values = None
    if source is not None or model is not None:
        preparation = preparation_class(task)
        if preparation is None:
            raise unsupported_task(task, f"init {option}" if source is not None else "init --model")
        tell(f"reading {'the data of the package' if videos is None else videos}")
        values, findings = preparation.fitted_values(name, source, path.resolve().parent, model)
        if adapter is not None:
            values = _adapted(values, adapter, rank or RANK, str(model))
        if memory is not None:
            tell(f"looking for the least slow way in which a step fits in {memory}, by shapes")
            values, line = _fitted({"name": name, **values}, task, path.resolve().parent, memory)
            tell(line)
        for line in findings:
            tell(line)
    text = template(name, source, task, full, values)
    if not write_whole(path, text.encode(), replace=force):
        raise exists
    return path


def _check_adapter(adapter: str | None, rank: int | None, model: str | None, memory: str | None) -> None:
    """Raises UserError for an adapter of another kind or of no model, for a rank or a memory without adapter, and for no size."""
    if adapter not in (None, "lora"):
        raise UserError(f"--adapter: {adapter!r} is not known; use lora, the only kind of adapter")
    if rank is not None and (adapter is None or rank < 1):
        raise UserError(f"--rank {rank}: " + ("add --adapter lora" if adapter is None else "use 1 or more"))
    if memory is not None:
        if adapter is None:
            raise UserError(f"--memory {memory} fits the frozen base of an adapter: add --adapter lora")
        try:
            parse_bytes(memory)
        except ValueError as error:
            raise UserError(f"--memory: {error}") from None
    if adapter is not None and model is None:
        raise UserError(f"--adapter: {NO_BASE}")


def _adapted(values: Mapping[str, Any], kind: str, rank: int, model: str) -> Mapping[str, Any]:
    """A config's values for adapters beside a frozen model. Raises UserError for a model that begins with random weights."""
    if "pretrained" not in values["model"]:
        raise UserError(f"--adapter: {model} begins with random weights; {NO_BASE}")
    adapter = {"kind": kind, "rank": rank, "alpha": rank, "targets": "attention+mlp"}
    return {
        **values,
        "model": {**values["model"], "adapter": adapter, "base": {"dtype": "bfloat16"}},
        "train": {**values.get("train", {}), "lr": ADAPTER_RATE},
        "device": {**values.get("device", {}), "dtype": "bfloat16"},
    }


def _fitted(values: Mapping[str, Any], task: str, folder: Path, memory: str) -> tuple[Mapping[str, Any], str]:
    """A config's values with the base and the memory's budget that fit, and a line about them. Raises UserError where nothing fits."""
    from mmspeed.config import make_config, video_config
    from mmspeed.config.language import LanguageConfig
    from mmspeed.pipelines.tuning.base_choice import BaseChooser

    own = {**values, "task": task, "memory": {}}
    config = make_config(own, base=folder, origin="--memory")
    fitting = config if isinstance(config, LanguageConfig) else video_config(config, "--memory")
    choice = BaseChooser(fitting).choose(parse_bytes(memory))
    kept = choice.base.model_dump() if choice.base.place == "host" else {"dtype": choice.base.dtype}
    model = {**values["model"], "base": kept}
    return {**values, "model": model, "memory": dict(choice.memory)}, f"  {choice.line()}"


def run_name(path: Path) -> str:
    """A run's name, from its config file's name: characters that are not allowed become `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")
    return name or "run"


def source_path(config: Path, videos: Path | str | None, option: str = "--videos") -> str | None:
    """The path of the media, or texts, in the config file: relative if they are beside or below it; None for the demo's.

    URLs stay as they are, and sets behind `::` are placed one by one.
    """
    if videos is None:
        return None
    if isinstance(videos, str) and (is_url(videos) or "::" in videos):
        return "::".join(
            one if is_url(one) else str(source_path(config, Path(one), option)) for one in videos.split("::")
        )
    videos = Path(videos)
    named = "{" in str(videos) or ("*" in str(videos) and glob.glob(str(videos)))
    if not videos.exists() and not named:
        raise UserError(f"{option}: {videos} {absent_hint(videos)}")
    target, base = videos.resolve(), config.resolve().parent
    return os.path.relpath(target, base) if target.is_relative_to(base) else str(target)


def template(
    name: str, source: str | None, task: str = "video", full: bool = True, values: Mapping[str, Any] | None = None
) -> str:
    """The text of the commented config of a run called `name` that trains on the media at `source` (None: the demo's).

    `values` are the task's initial values by section (None: those that do not depend on the data); a task without a preparation has
    all keys at their defaults. Raises UserError for an unknown task, and for media if the task takes none.
    """
    kind = config_class(task, "--task")
    preparation = preparation_class(task)
    if preparation is None and source is not None:
        raise unsupported_task(task, "init --videos")
    if values is None:
        values = {} if preparation is None else preparation.starting_values(name, source)
    shown: dict[str, Any] = {"name": name, **values}
    if task != default_of(RunConfig.model_fields["task"]):  # the default of a config without the key
        shown["task"] = task
    fields = dict(sections(kind))
    lines = [editor_line(kind)] if editor_line(kind) else []
    if full:
        shown = {"output": "runs", "seed": 0, **shown}
        return "\n".join([*lines, *_full_lines(fields, shown, preparation is not None)]) + "\n"
    for section, keys in SHORT_KEYS.items():
        if section in fields and section_options(fields[section]):
            model = _chosen(section_options(fields[section]), shown.get(section, {}))
            defaults = {key: default_of(model.model_fields[key]) for key in keys if key in model.model_fields}
            shown[section] = {**defaults, **shown.get(section, {})}
    shown = {
        key: value for key, value in shown.items() if value != {}
    }  # a task's section may have none of the short keys
    own = [] if preparation is not None else [key for key in fields if key not in RunConfig.model_fields]
    lines += [
        f"# A run of mmspeed {__version__}: the keys that people change. With --full, `mmspeed init` writes every key.",
        PLACES,
    ]
    gap = True  # before the next key
    for key, field in fields.items():
        if key in shown:
            text = _short(key, field, shown[key], "")
        elif key in own:
            text = _render(key, field, None, "")
        else:
            continue
        lines += ["", *text] if gap or len(text) > 1 else text
        gap = len(text) > 1
    return "\n".join(lines) + "\n"


def _full_lines(fields: Mapping[str, FieldInfo], values: dict[str, Any], prepared: bool) -> list[str]:
    """The lines of a file with every key."""
    for section, key in FIRST_KEYS.items():
        if section in fields and section not in values:
            model = section_options(fields[section])[0]
            values[section] = {key: default_of(model.model_fields[key])}
    lines = [
        f"# A run of mmspeed {__version__}. Lines behind a bare # show defaults; remove the # to change one.",
        *(PREPARED if prepared else PLAIN),
    ]
    for key, field in fields.items():
        lines += ["", *_render(key, field, values.get(key), "")]
    return lines


def _short(key: str, field: FieldInfo, value: Any, indent: str) -> list[str]:
    """A set key's lines, without those at their defaults; its sentence stands behind it if there is room."""
    sentence, options = field.description or "", section_options(field)
    if isinstance(value, Mapping) and options:
        chosen = _chosen(options, value)
        parts = {name: chosen.model_fields[name] for name in value}
        if len(value) > 1 or not all(_is_plain(item) for item in value.values()):
            inner = [line for name, part in parts.items() for line in _short(name, part, value[name], indent + "  ")]
            return [f"{indent}{key}:", *inner]
        ((name, item),) = value.items()
        return [_behind(f"{indent}{key}: {{{name}: {show_value(item)}}}", parts[name].description or "")]
    if is_list(field) and value:
        items = (_flow(item) if isinstance(item, Mapping) else show_value(item) for item in value)
        return [_behind(f"{indent}{key}:", sentence), *(f"{indent}  - {item}" for item in items)]
    return [_behind(f"{indent}{key}: {show_value(value)}", sentence)]


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Mapping | list | tuple)


def _flow(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {show_value(value)}" for key, value in values.items()) + "}"


def _behind(line: str, sentence: str) -> str:
    """The line with a sentence behind it: all of it, or its first part, or none if there is no room."""
    first = sentence.split(". ")[0].rstrip(".")
    for text in (sentence, f"{first}.", f"{first.split(', ')[0]}."):
        if len(line) + 3 + len(text) <= LONGEST_LINE:
            return f"{line}  # {text}"
    return line


def _render(key: str, field: FieldInfo, value: Any, indent: str) -> list[str]:
    """A field's lines: its sentence, then the key, commented out if `value` is None."""
    options = section_options(field)
    lines = _comment(field.description or "", indent)
    if options and value is None:  # a list, or a section that is left out
        for name, part in options[0].model_fields.items():
            default = default_of(part)
            text = "must be given" if default is REQUIRED else show_value(default)
            lines += _comment(f"- {name}: {text} ({part.description or ''})", indent)
        empty = "[]" if is_list(field) else "null" if field.default_factory is None else "{}"
        return [*lines, _off(indent, key, empty)]
    if is_list(field) and options:
        lines.append(f"{indent}{key}:")
        for item in value:
            lines += _list_item(options[0], item, indent + "  ")
        return lines
    if options:
        return [*lines, f"{indent}{key}:", *_section(options, value, indent + "  ")]
    if value is None:
        default = default_of(field)
        text = f"# {show_type(field.annotation)}, must be given" if default is REQUIRED else show_value(default)
        return [*lines, _off(indent, key, text)]
    return [*lines, f"{indent}{key}: {show_value(value)}"]


def _section(options: list[type[BaseModel]], values: Mapping[str, Any], indent: str) -> list[str]:
    """The fields of the section that `values` selects, then the other choices of `kind`, commented out."""
    selected = _chosen(options, values)
    lines = []
    for key, field in selected.model_fields.items():
        lines += _render(key, field, values.get(key), indent)
    for other in options:
        if other is not selected:
            lines += [
                "",
                *_comment(f"Or, in place of the keys above: {' '.join((other.__doc__ or '').split())}", indent),
            ]
            lines.append(_off(indent, "kind", kind_of(other)))
            for key, field in other.model_fields.items():
                if key != "kind":
                    lines += _render(key, field, None, indent)
    return lines


def _chosen(options: list[type[BaseModel]], values: Mapping[str, Any]) -> type[BaseModel]:
    """The section that `values` selects by its `kind`; the first one if they name none."""
    return next((o for o in options if len(options) > 1 and kind_of(o) == values.get("kind")), options[0])


def _list_item(model: type[BaseModel], values: Mapping[str, Any], indent: str) -> list[str]:
    """The lines of one section in a list: YAML's dash precedes its first key."""
    (first, field), *others = model.model_fields.items()
    lines = [*_comment(field.description or "", indent), f"{indent}- {first}: {show_value(values[first])}"]
    for key, field in others:
        lines += _render(key, field, values.get(key), indent + "  ")
    return lines


def _off(indent: str, key: str, value: str) -> str:
    return f"{indent}#{key}: {value}"


def _comment(sentence: str, indent: str) -> list[str]:
    width = 110 - len(indent)
    return [
        f"{indent}# {line}" for line in textwrap.wrap(sentence, width, break_on_hyphens=False, break_long_words=False)
    ]
