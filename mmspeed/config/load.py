"""Load YAML and dotted overrides into a checked `Config`; every mistake is reported in one line with the key's path."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mmspeed.errors import UserError, misspelt, nearest

from .methods import make_method
from .published import DEFAULT_KINDS, default_kind
from .schema import Config, RunConfig
from .tasks import config_class, known_tasks
from .training import MethodConfig
from .words import meanings, plain
from .yaml_text import FastLoader, TooManyNodesError, parse_yaml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved config of a YAML file, of any task.

    `overrides` are strings such as `train.lr=1e-4`, whose values are YAML. Relative paths, in overrides too, are taken from the
    file's folder. Raises UserError for a missing or unreadable file, an unknown key (with the nearest real one) or a bad value.
    """
    path = Path(path)
    return make_config(_read_tree(path), overrides, base=path.resolve().parent, origin=str(path))


def load_record(path: str | Path) -> RunConfig:
    """Load the config that mmspeed wrote into a run's folder. Raises UserError for one that this mmspeed does not know."""
    try:
        return load_config(path)
    except UserError as error:
        raise UserError(f"{error} ({Path(path).parent} was written by another mmspeed, or changed)") from None


def _read_tree(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError for anything else."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), _YamlLoader, _FastYamlLoader)
    except FileNotFoundError:
        near = nearest(path.name, [one.name for one in path.parent.glob("*.y*ml")], 0.6)
        raise UserError(f"{path}: no such config file{near or f'; `mmspeed init {path}` writes one'}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name the config file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a text file: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {_yaml_problem(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: a config is a mapping of sections (data:, train:, ...), this file holds {_kind(tree)}"
        )
    return tree


def make_config(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), base: Path | None = None, origin: str = "config"
) -> RunConfig:
    """The checked config of a mapping, of any task, with the errors of `load_config`; relative paths are taken from `base`, or the working directory."""
    try:
        tree_copy: dict[str, Any] = json.loads(json.dumps(tree, default=str))  # a copy of plain types
    except (TypeError, ValueError, RecursionError) as error:  # keys that are dates, anchors that hold themselves
        raise UserError(f"{origin}: keys must be words, and no section may contain itself ({error})") from None
    for override in overrides:
        _apply_override(tree_copy, override)
    task = tree_copy.get("task", "video")
    kind = config_class(task, origin)
    for section in DEFAULT_KINDS:
        field = kind.model_fields.get(section)
        options = _models_of(field.annotation) if field is not None else []
        if any("kind" in option.model_fields for option in options) and isinstance(tree_copy.get(section), dict):
            tree_copy[section].setdefault("kind", default_kind(section, tree_copy))
    try:
        config = kind.model_validate(tree_copy)
    except ValidationError as error:
        raise UserError(f"{origin}: {_describe(error, kind, task)}") from None
    if config.method != MethodConfig():  # the usual one takes torch to be loaded, and has nothing to check
        try:
            make_method(config.method)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
    return config.absolute(Path.cwd() if base is None else base)


def video_config(config: RunConfig, origin: str) -> Config:
    """Narrow a config to the video task. Raises UserError for another task."""
    if not isinstance(config, Config):
        raise UserError(f"{origin}: this is for the video task, and the config is of the task {config.task}")
    return config


def dump_config(config: RunConfig) -> str:
    """The whole resolved config as YAML, loadable again."""
    tree = config.model_dump(mode="json", by_alias=True)
    ordered = {name: tree[name] for name, _ in sections(type(config)) if name in tree}
    return yaml.dump(ordered, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, width=120)


def sections(kind: type[BaseModel]) -> list[tuple[str, Any]]:
    """(key, field) of each section of a config, in reading order."""
    order = {key: index for index, key in enumerate(kind.order)} if issubclass(kind, RunConfig) else {}
    keyed = [(field.alias or name, field) for name, field in kind.model_fields.items()]
    return sorted(keyed, key=lambda row: order.get(row[0], len(order)))


class _UniqueKeys(yaml.constructor.SafeConstructor):
    """Refuses a duplicate key in a mapping: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{key.value}'", key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


class _YamlLoader(_UniqueKeys, yaml.SafeLoader):
    """YAML's safe loader, with unique keys."""


_FastYamlLoader: type[Any] = type("_FastYamlLoader", (_UniqueKeys, FastLoader), {})  # the same over libyaml


class _YamlDumper(yaml.SafeDumper):
    """Writes strings with unusual line breaks in double quotes; in other styles YAML would read them as spaces."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(sign in text for sign in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YamlDumper.add_representer(str, _represent_text)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise UserError(f"override {override!r}: write key=value, such as train.lr=1e-4")
    try:
        value = parse_yaml(text)
    except TooManyNodesError as error:
        raise UserError(f"override {key.strip()}: {error}") from None
    except yaml.YAMLError:
        value = text
    parts = key.strip().split(".")
    node: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise UserError(
                    f"override {override!r}: {'.'.join(parts[:depth])} has {len(node)} entries, counted from 0"
                )
            if last:
                node[int(part)] = value
            else:
                node = node[int(part)]
        elif last:
            node[part] = value
        else:
            if not isinstance(node.get(part), dict | list):
                node[part] = {}
            node = node[part]


def _describe(error: ValidationError, kind: type[RunConfig], task: str) -> str:
    """The first mistake in one line, with the number of further ones."""
    problems = error.errors()
    within = {problem["loc"][: depth + 1] for problem in problems for depth in range(len(problem["loc"]) - 1)}
    # a list of bad items also counts as too short: drop that secondary error
    problems = [problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in within]
    tags = {tag for path, _ in all_fields(kind) for tag in re.findall(r"\((\w+)\)", path)}  # of unions
    lines = []
    for problem in problems:
        path = problem["loc"]
        end = len(path) - (
            problem["type"] in ("extra_forbidden", "missing")
        )  # the last one is then a key, as the first one always is
        loc = [part for at, part in enumerate(path) if part != "[key]" and not (part in tags and 0 < at < end)]
        where = ".".join(str(part) for part in loc)
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key '{where}'{_suggest(loc, problem['loc'], kind, task)}")
        elif problem["type"] == "missing":
            lines.append(f"'{where}' is missing")
        elif problem["type"].startswith("union_tag"):
            value = problem.get("ctx", {}).get("tag")
            expected = problem.get("ctx", {}).get("expected_tags", "")
            lines.append(
                f"'{where}.kind' is {value!r}: use {expected}" if value is not None else f"'{where}' needs a `kind`"
            )
        else:
            message = problem["msg"].removeprefix("Value error, ")
            value = problem.get("input")
            suffix = f" (got {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
            message = _PLAIN.get(problem["type"], message[:1].lower() + message[1:])
            lines.append(f"'{where}': {message}{suffix}" if where else f"{message}{suffix}")
    more = f" (and {len(lines) - 1} more: {'; '.join(lines[1:4])})" if len(lines) > 1 else ""
    return lines[0] + more


_PLAIN = {  # in place of pydantic's words that mean nothing in YAML
    "tuple_type": "must be a list",
    "model_type": "must be a section of keys",
    "dict_type": "must be a section of keys",
}
# Keys that people look for and that do not exist, with the way to what they want.
_ADAPTED = "adapters are of published models: set `model.kind: diffusers` and `model.pretrained` beside it"
_ELSEWHERE = {
    "model.adapter": _ADAPTED,
    "model.base": _ADAPTED,
    **dict.fromkeys(
        "lora_dropout network_dropout use_dora dora lycoris lycoris_config lokr lokr_factor loha load_in_4bit nf4 bnb_4bit_quant_type "
        "bnb_4bit_compute_dtype prior_loss_weight with_prior_preservation".split(),
        "adapters are LoRA alone; dropout, DoRA, LoKr, 4-bit weights and prior preservation are not there (docs/fine-tuning.md)",
    ),
    "model.pretrained": (
        "set `model.kind: diffusers` beside it for a published video model; `train.start_from` begins with the weights of a run"
    ),
    "resume_from_checkpoint": "a run goes on from its newest checkpoint by itself; `train.start_from` begins one with another's weights",
}


def _suggest(loc: list[Any], full_loc: tuple[Any, ...], kind: type[RunConfig], own_task: str) -> str:
    """A hint for an unknown key: the way to what it would do, the key or the task that has it, the nearest key of its section, or all."""
    key, path = str(loc[-1]), ".".join(part for part in loc if isinstance(part, str))
    elsewhere = _ELSEWHERE.get(plain(key)) or (own_task == "video" and _ELSEWHERE.get(path))
    if elsewhere:
        return f": {elsewhere}"
    known: dict[str, tuple[str, Any]] = {}  # by their bare path; of several kinds that have a key the chosen one
    for full, field in all_fields(kind):
        own = [f"({tag})" for tag in full_loc if f"({tag})" in full]
        if own or _bare(full) not in known:
            known[_bare(full)] = (functools.reduce(lambda text, tag: text.replace(tag, ""), own, full), field)
    section = path.rpartition(".")[0]
    below = [one for one in known if f".{one}".endswith(f".{key}") and one.startswith(f"{section}." if section else "")]
    meant = [one for one in meanings(path) if one in known] or (below if len(below) == 1 else [])
    meant = [path] if path in known else meant
    if meant:
        names = " or ".join(f"{known[one][0]!r}" for one in meant)
        return f"; did you mean {names}{_sentence(known[meant[0]][1]) if len(meant) == 1 else ''}?"
    for task, other in _other_configs(kind):
        if any(path == _bare(full) for full, _ in all_fields(other)):
            what = "key" if section else "section"
            return f", which is a {what} of the task {task}; this config is of the task {own_task}"
    at = _section_at(kind, [part for part in full_loc[:-1] if not isinstance(part, int)])
    keys = [] if at is None else [one for one, _ in sections(at)]
    before = "".join(f"{part}." for part in loc[:-1])
    return misspelt(plain(key), keys, before) or (f"; the keys there are {', '.join(keys)}" if keys else "")


def _sentence(field: Any) -> str:
    """The first sentence of a field's description, in brackets; none where it lists the values."""
    words = re.split(r"[.;]( |$)", field.description or "`")[0]
    return "" if words.startswith("`") else f" ({words})"


def _bare(path: str) -> str:
    """A path of `all_fields` without the signs of lists and kinds."""
    return re.sub(r"\(\w+\)|\[\]", "", path)


def _other_configs(kind: type[RunConfig]) -> Iterator[tuple[str, type[RunConfig]]]:
    """Yield the configs of the other tasks, by name; packages that cannot be imported are skipped."""
    for task in known_tasks():
        with contextlib.suppress(UserError):
            other = config_class(task)
            if other is not kind:
                yield task, other


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    """The config sections named in a type annotation (through Annotated, tuple and union)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Annotated, tuple, typing.Union, types.UnionType):
        return [model for arg in typing.get_args(annotation) for model in _models_of(arg)]
    return []


def _section_at(model: type[BaseModel], loc: list[Any]) -> type[BaseModel] | None:
    if not loc:
        return model
    for name, field in model.model_fields.items():
        if (field.alias or name) == loc[0]:
            options = _models_of(field.annotation)
            rest = loc[1:]
            if len(options) > 1 and rest:  # a union: the next part is its tag
                options = [o for o in options if typing.get_args(o.model_fields["kind"].annotation)[0] == rest[0]]
                rest = rest[1:]
            return _section_at(options[0], rest) if options else None
    return None


def all_fields(model: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, Any]]:
    """Every (dotted path, pydantic field) of the tree, depth first. Lists show as `[]`, unions as `(kind)`."""
    rows: list[tuple[str, Any]] = []
    for key, field in sections(model):
        path = f"{prefix}{key}"
        rows.append((path, field))
        options = _models_of(field.annotation)
        many = typing.get_origin(field.annotation) is tuple
        for option in options:
            tag = f"({typing.get_args(option.model_fields['kind'].annotation)[0]})" if len(options) > 1 else ""
            rows += all_fields(option, f"{path}{'[]' if many else ''}{tag}.")
    return rows
