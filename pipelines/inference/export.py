"""Export of a run as a repository of diffusers, which the class's `from_pretrained` and the official pipeline load.

Weights go from a checkpoint of any layout to the files one tensor at a time: nothing holds the whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmspeed.config.adapters import AdapterConfig
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine
from mmspeed.loop.checkpoint.load import open_checkpoint
from mmspeed.loop.checkpoint.storage import EMA_UPDATES, ROLES
from mmspeed.models.diffusers.loading import RepositoryWeights, weights_of
from mmspeed.models.diffusers.repository import STEM, Repository
from mmspeed.models.families.complete import completed
from mmspeed.models.sections import bare, outline, repository_of
from mmspeed.models.stored import check_tensors, shapes_of
from mmspeed.models.weights import SMALL_FILES, copy_small_files, resolve
from mmspeed.models.writing import TensorEntry, new_folder, require_new, write_tensors
from mmspeed.pipelines.inference.stored_weights import StoredWeights, write_facts
from mmspeed.pipelines.inference.text_to_video import find_checkpoint, present_weights
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols import stays_float32

Others = Literal["link", "copy", "none"]
OTHER_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # of components; no pickles


@dataclass(frozen=True)
class ExportedRepository:
    """An exported repository. components: those with weights of the run; others: those of the base."""

    folder: Path
    checkpoint: str
    weights: str
    tensors: int
    bytes: int
    components: tuple[str, ...]
    others: tuple[str, ...]


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: str | int = "latest",
    weights: Literal["ema", "model"] = "ema",
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5 * 10**9,
    others: Others = "link",
) -> ExportedRepository:
    """Write the weights of a run's checkpoint into the new folder `out`, as a repository like the base's.

    dtype: number type of the weights; what the class keeps in float32 stays so. shard_bytes: most bytes of a file. others: the base's
    further components (codec, text encoders, scheduler) are linked, copied or left out. Adapters are merged: base + scale * B @ A in
    float32, where the base is that of the files, whatever it was kept in. The folder is whole or absent; every tensor is read again and
    compared. Raises UserError for a run without a repository, another base than the run's, and a folder that exists.
    """
    folder, out = RunFolder.open(run), Path(out)
    section = completed(folder.config()).model  # the expert's folder, where there are two
    if not isinstance(section, PublishedModelConfig):
        raise UserError(
            f"{run}: its config names no repository of diffusers (model.kind: {section.kind}), so no other library has a class for its "
            f"weights: sample with `mmspeed sample {run}`, or write the average with `mmspeed checkpoint merge-ema {run}`"
        )
    require_new(out, "--out: ")
    weights = present_weights(folder.config(), weights)
    repository, place = repository_of(section), find_checkpoint(folder, checkpoint)
    components = trained_components(folder, place, repository)
    parts: dict[str, Any] = {}
    with new_folder(out) as work:
        tensors = nbytes = 0
        for role, component in components:
            own, stored = repository.of(component), StoredWeights(place, role, weights)
            if section.adapter is not None:
                parts[component] = adapted_part(stored, section, own)
            count, size = _write_component(stored, own, work / component, dtype, section.adapter, shard_bytes)
            tensors, nbytes = tensors + count, nbytes + size
        if section.adapter is not None:
            write_facts(work, folder, stored, "merged", section.adapter, parts)
        names = tuple(component for _, component in components)
        further = () if others == "none" else _write_others(repository, work, names, others)
    return ExportedRepository(out, place.name, weights, tensors, nbytes, names, further)


def trained_components(folder: RunFolder, place: Path, repository: Repository) -> list[tuple[str | None, str]]:
    """(role in the checkpoint, component) of each transformer that the run trains; None: the first role.

    Raises UserError where the files of one are not those that the run began with.
    """
    roles = open_checkpoint(place)[0].get(ROLES, {})
    learned = [role for role, facts in roles.items() if EMA_UPDATES in facts and repository.has(role)]
    components = [(None, repository.transformer), *((role, role) for role in learned)]
    folder.check_base({role or "model": repository.of(component).fingerprint for role, component in components})
    return components


def adapted_part(stored: StoredWeights, section: PublishedModelConfig, repository: Repository) -> dict[str, Any]:
    """The adapted layers of a repository's transformer, which are those of the checkpoint or an error, and the base's fingerprint."""
    own = section.model_copy(update={"subfolder": repository.transformer, "second_subfolder": None})
    return {"layers": stored.adapted_layers(outline(own, 0, 0, repository)), "base": repository.fingerprint}


def _write_component(
    stored: StoredWeights,
    repository: Repository,
    target: Path,
    dtype: torch.dtype,
    adapter: AdapterConfig | None,
    shard_bytes: int,
) -> tuple[int, int]:
    """Write a transformer's folder: the base's small files as they are, and the weights. Returns (tensors, bytes)."""
    target.mkdir()
    component = repository.transformer
    root = resolve(repository.pretrained, [component], repository.revision, SMALL_FILES, repository.key)
    copy_small_files(root / component, target)
    entries, value_of = _weights(stored, repository, bare(repository), dtype, adapter)
    with ProgressLine(f"export {repository.transformer}", len(entries), "tensor") as line:
        total = write_tensors(target, STEM, entries, value_of, shard_bytes, line.advance)
    return len(entries), total


def trained_models(
    folder: RunFolder, place: Path, repository: Repository, weights: str, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """The transformers that a run trains, whole in memory and in eval mode, by component: what an export of them would load as.

    folder, place: the run and its checkpoint. dtype: number type of the weights; what the class keeps in float32 stays so.
    Raises UserError as an export.
    """
    models, section = {}, folder.config().model
    assert isinstance(section, PublishedModelConfig)
    for role, component in trained_components(folder, place, repository):
        own, stored = repository.of(component), StoredWeights(place, role, weights)
        if section.adapter is not None:
            adapted_part(stored, section, own)
        model = bare(own)
        entries, value_of = _weights(stored, own, model, dtype, section.adapter)
        model.load_state_dict({entry.name: value_of(entry) for entry in entries}, assign=True)
        models[component] = model.eval().requires_grad_(False)
    return models


def _weights(
    stored: StoredWeights, repository: Repository, model: nn.Module, dtype: torch.dtype, adapter: AdapterConfig | None
) -> tuple[list[TensorEntry], Callable[[TensorEntry], Tensor]]:
    """The tensors of a model, and the function that reads one, from the checkpoint or from the base, with its adapter merged."""
    source, scale = weights_of(repository, model), None if adapter is None else adapter.scale

    def value_of(entry: TensorEntry) -> Tensor:
        return stored.value(entry.name, entry.shape, source, scale).to(entry.dtype).contiguous()

    stored.check_taken(model.state_dict().keys(), adapter is not None)
    return _entries(stored, source, model, dtype), value_of


def _entries(
    stored: StoredWeights, source: RepositoryWeights, model: nn.Module, dtype: torch.dtype
) -> list[TensorEntry]:
    """The tensors of a model in its order. Raises UserError where neither checkpoint nor base has one, or in another shape."""
    state, base = model.state_dict(), source.shapes if stored.frozen else {}
    entries, shapes = [], {}
    for name, tensor in state.items():
        if name in stored:
            shapes[name] = stored.shape(name)
        elif name in base:
            shapes[name] = base[name]
        kind = torch.float32 if stays_float32(model, name) else dtype
        entries.append(TensorEntry(name, tuple(tensor.shape), kind))
    check_tensors(shapes_of(model), shapes, f"checkpoint {stored.place}")
    return entries


def _write_others(repository: Repository, work: Path, trained: Sequence[str], how: Others) -> tuple[str, ...]:
    """Put the base's other components beside the trained ones, and model_index.json with the small files around it. Returns their names."""
    names = [name for name in repository.components if name not in trained]
    root = resolve(repository.pretrained, names, repository.revision, OTHER_FILES, repository.key)
    for name in names:
        if not (root / name).is_dir() or not any((root / name).iterdir()):
            raise UserError(f"{repository.key}: {repository.pretrained} has no files of `{name}`: use --others none")
        for path in sorted(path for path in (root / name).rglob("*") if path.is_file()):
            target = work / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if how == "link":
                target.symlink_to(path.resolve())
            else:
                shutil.copyfile(path, target)
    copy_small_files(resolve(repository.pretrained, [None], repository.revision, SMALL_FILES, repository.key), work)
    return tuple(names)
