"""Adapters that a new run begins with: of another run, or of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from mmspeed.config import Config, RunConfig, load_record
from mmspeed.config.adapters import AdapterConfig
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import fill_parameters, open_checkpoint, starting_checkpoint
from mmspeed.loop.checkpoint.seals import digest
from mmspeed.models.adapter_files import read_adapter
from mmspeed.models.adapters import NAME, base_name, is_adapter
from mmspeed.models.diffusers.authors_names import FAMILIES
from mmspeed.models.families.complete import EXPERTS, boundary_of, completed
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.families import hub_modules
from mmspeed.models.sections import repository_of
from mmspeed.parallel import unwrap
from mmspeed.pipelines.run.run_folder import FACTS
from mmspeed.pipelines.training.run_state import Run

KEY = "train.start_from"


def identity_of_files(files: Mapping[str, Path]) -> str:
    """The names of files and the start of their hashes, as JSON; `missing` where one cannot be read."""
    try:
        return json.dumps(", ".join(f"{path.name} ({digest(path.read_bytes())[:16]})" for path in files.values()))
    except OSError:
        return json.dumps("missing")


def check_adapters(start: str, config: RunConfig, files: Mapping[str, str]) -> None:
    """Raise UserError where a run with adapters begins with those of another scale, or that were trained beside another base.

    `files`: the fingerprints of the base's files, by role. What has no adapters is left to the reading of the weights.
    """
    adapter, place = config.adapter, starting_checkpoint(start)
    if adapter is None:
        return
    record = place.parent.parent / "config.yaml"
    if not record.is_file():
        raise UserError(f"{KEY}: {place} lies in no run's folder, whose config.yaml has the scale of its adapters")
    theirs = load_record(record).adapter
    if theirs is None:
        return
    before = open_checkpoint(place)[0]["meta"].get(FACTS, {}).get("base", {})
    other = [role for role, fingerprint in files.items() if before.get(role, fingerprint) != fingerprint]
    if other:
        raise UserError(
            f"{KEY}: the adapters of {place} were trained beside another base: the files of the role {other[0]} are not those of "
            "model.pretrained and model.revision here. Name the same ones"
        )
    if theirs.rank == adapter.rank and theirs.scale != adapter.scale:
        raise UserError(
            f"{KEY}: the adapters of {place} have the scale {theirs.scale:g} and would have {adapter.scale:g} here: set "
            f"model.adapter.alpha: {theirs.alpha_or_rank:g} and rslora: {str(theirs.rslora).lower()} as there"
        )


def start_from_files(files: Mapping[str, Path], config: RunConfig, run: Run) -> None:
    """Fill a run's adapters, and those of the copies of its models, from a file, or from the files of two experts by `high` and `low`.

    Raises UserError for one that does not fit whole.
    """
    adapter, parts, copies, path = config.adapter, run.parts, run.task.copies(), next(iter(files.values()))
    if adapter is None:
        raise UserError(
            f"{KEY}: {path} holds an adapter, and this run trains whole weights: set model.adapter, or merge it into a repository for "
            "model.pretrained (diffusers: fuse_lora and save_pretrained; of a run here `mmspeed export RUN -o FOLDER --format merged`)"
        )
    noises = _noises(config, parts.roles)
    for role in dict.fromkeys([*parts.roles, *copies]):
        noise = noises.get(role) or noises.get(copies.get(role, ""), "")
        own = files.get(noise, files.get("") if len(parts.roles) == 1 else None)
        if own is None:
            raise UserError(
                f"{KEY}: {path} and this run are of other models: for the roles {', '.join(parts.roles)} name a file, or a folder with "
                "that of each expert (`*_high` and `*_low`)"
            )
        model = parts.models[role]
        fill_parameters(model, parts.optimizers.get(role), _values(own, unwrap(model), adapter))
        if role in parts.averages:
            parts.averages[role].restart(model)


def _noises(config: RunConfig, roles: Sequence[str]) -> dict[str, str]:
    """The noise, `high` or `low`, of the roles that are experts of a repository of two."""
    if not isinstance(config, Config) or not isinstance(config.model, PublishedModelConfig):
        return {}
    if boundary_of(repository_of(config.model)) is None:
        return {}
    names = {folder: noise for noise, folder in EXPERTS.items()}
    first = completed(config).model
    assert isinstance(first, PublishedModelConfig)
    return {role: names.get(role, names.get(first.subfolder or "", "")) for role in roles}


def _values(path: Path, model: nn.Module, adapter: AdapterConfig) -> dict[str, Tensor]:
    """The whole adapters of a model from a file, by the names of their parameters."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    downs = {name.partition(".lora_A.")[0]: shape for name, shape in shapes.items() if ".lora_A." in name}
    adapted = {layer: (shape[1], shapes[f"{layer}.lora_B.{NAME}.weight"][0]) for layer, shape in downs.items()}
    outputs = {
        base_name(name).removesuffix(".weight"): shape[0]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and not is_adapter(name)
    }
    kind = next((own.__name__ for own in type(model).__mro__ if own.__name__ in FAMILIES), type(model).__name__)
    names = (
        hub_modules(model.settings, list(downs), KEY) if isinstance(model, Decoder) else {name: name for name in downs}
    )
    theirs = {names[layer]: shape for layer, shape in adapted.items()}
    read = read_adapter(path, kind, theirs, adapter.rank, adapter.scale, outputs, KEY)
    return {
        f"{layer}.lora_{side}.{NAME}.weight": tensor
        for layer, name in names.items()
        for side, tensor in zip("AB", read[name], strict=True)
    }
