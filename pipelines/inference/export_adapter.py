"""Export of a run's adapters as files that diffusers or peft load beside the base, or merged with it.

Files hold A and B as they were trained; rank, alpha and rsLoRA lie beside them, as metadata of diffusers or in peft's adapter_config.json:
readers that know neither take alpha to be the rank. `export.json` in the folder says what it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspeed.config.adapters import AdapterConfig
from mmspeed.config.language import LanguageConfig
from mmspeed.config.schema import PublishedModelConfig, RunConfig
from mmspeed.data.cache.tensor_files import rows_of, write_safetensors
from mmspeed.errors import UserError
from mmspeed.models.adapter_files import PEFT, to_authors
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families.complete import EXPERTS, boundary_of, completed
from mmspeed.models.language.families import hub_modules
from mmspeed.models.sections import bare, repository_of
from mmspeed.models.stored import shapes_of
from mmspeed.models.writing import new_folder, require_new
from mmspeed.pipelines.inference.export import ExportedRepository, Others, adapted_part, export_run, trained_components
from mmspeed.pipelines.inference.language import ExportedFolder, adapted_decoder, export_language_run, run_decoder
from mmspeed.pipelines.inference.stored_weights import FACTS, WEIGHT, StoredWeights, adapter_name, write_facts
from mmspeed.pipelines.inference.text_to_video import find_checkpoint, present_weights
from mmspeed.pipelines.run.run_folder import RunFolder

Format = Literal["diffusers", "peft", "original", "merged"]
STEM = "pytorch_lora_weights"  # of diffusers


@dataclass(frozen=True)
class ExportedAdapter:
    """An exported adapter. layers: number of adapted layers; bytes: of all tensors; loading: the Python that loads it."""

    folder: Path
    checkpoint: str
    weights: str
    format: Format
    layers: int
    bytes: int
    loading: str


def export_adapter(
    run: str | Path,
    out: str | Path,
    *,
    format: Format | None = None,
    checkpoint: str | int = "latest",
    weights: Literal["ema", "model"] = "ema",
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5 * 10**9,
    others: Others = "link",
) -> ExportedAdapter:
    """Write the adapters of a run's checkpoint into the new folder `out`.

    format: `diffusers`, a file that the official pipeline's `load_lora_weights` reads, of two experts one each, whose names end in `_high`
    and `_low`; `original`, such files under the authors' names, as ComfyUI, musubi-tuner and diffusion-pipe read them too, with alpha / rank
    in B; `peft`, a folder for `PeftModel.from_pretrained`, of two experts the folders `high` and `low`; `merged`, the whole model as
    `export_run` and `export_language_run` write it, for which alone `shard_bytes` and `others` are. None: diffusers where the official
    pipeline has a loader, else peft.

    The folder is whole or absent; what is written is read back by diffusers or peft and compared. Raises UserError for a run without
    adapters, a format that does not go with it, another base than the run's, and a folder that exists.
    """
    folder, out = RunFolder.open(run), Path(out)
    config = folder.run_config()
    adapter = config.adapter
    if adapter is None:
        raise UserError(f"{run} trains whole weights, and a format is of runs with model.adapter: leave --format out")
    require_new(out, "--out: ")
    if format == "merged":
        return _merged(folder, config, out, checkpoint, weights, dtype, shard_bytes, others)
    weights, place = present_weights(config, weights), find_checkpoint(folder, checkpoint)
    if isinstance(config, LanguageConfig):
        return _of_language(folder, config, adapter, place, out, format or "peft", weights, dtype)
    section = completed(folder.config()).model
    assert isinstance(section, PublishedModelConfig)
    repository = repository_of(section)
    format = format or ("diffusers" if _loader(repository) is not None else "peft")
    components = trained_components(folder, place, repository)
    stored = {component: StoredWeights(place, role, weights) for role, component in components}
    parts = {component: adapted_part(one, section, repository.of(component)) for component, one in stored.items()}
    nbytes, loading, reader = 0, [], "peft" if format == "peft" else "diffusers"
    with new_folder(out) as work:
        for component, one in stored.items():
            names = parts[component]["layers"]
            tensors = _tensors(one, {name: name for name in names}, dtype)
            noise = _noise(repository, component)
            if format in ("diffusers", "original"):
                file = f"{STEM}_{noise}.safetensors" if noise else f"{STEM}.safetensors"
                if format == "diffusers":
                    _write_diffusers(repository, work, file, tensors, adapter, names)
                else:
                    tensors = _write_original(repository.of(component), work, file, tensors, adapter, names, dtype)
                loading.append(_call(out, file, noise))
            else:
                base = {"base_model_name_or_path": section.pretrained, "revision": section.revision}
                _write_peft(work / noise, tensors, adapter, names, base)
                loading.append(f'PeftModel.from_pretrained(pipe.{component}, "{out / noise}")')
            nbytes += sum(tensor.nbytes for tensor in tensors.values())
        write_facts(work, folder, one, format, adapter, parts, reader)
    layers = sum(len(part["layers"]) for part in parts.values())
    return ExportedAdapter(out, place.name, weights, format, layers, nbytes, "; ".join(loading))


def _merged(
    folder: RunFolder,
    config: RunConfig,
    out: Path,
    checkpoint: str | int,
    weights: Literal["ema", "model"],
    dtype: torch.dtype,
    shard_bytes: int,
    others: Others,
) -> ExportedAdapter:
    """Export the whole model, with the adapters merged."""
    options: dict[str, Any] = {"checkpoint": checkpoint, "weights": weights, "dtype": dtype, "shard_bytes": shard_bytes}
    written: ExportedFolder | ExportedRepository
    if isinstance(config, LanguageConfig):
        written = export_language_run(folder.root, out, **options)
        loading = f'AutoModelForCausalLM.from_pretrained("{out}")'
    else:
        written = export_run(folder.root, out, **options, others=others)
        loading = f'DiffusionPipeline.from_pretrained("{out}")'
        if others == "none":  # which leaves no whole pipeline
            section = folder.config().model
            assert isinstance(section, PublishedModelConfig)
            kinds = {name: repository_of(section).of(name).class_name for name in written.components}
            loading = "; ".join(f'{kind}.from_pretrained("{out / name}")' for name, kind in kinds.items())
    facts = json.loads((out / FACTS).read_text(encoding="utf-8"))
    layers = sum(len(part["layers"]) for part in facts["parts"].values())
    return ExportedAdapter(out, written.checkpoint, written.weights, "merged", layers, written.bytes, loading)


def _of_language(
    folder: RunFolder,
    config: LanguageConfig,
    adapter: AdapterConfig,
    place: Path,
    out: Path,
    format: Format,
    weights: Literal["ema", "model"],
    dtype: torch.dtype,
) -> ExportedAdapter:
    """Export the adapters of a decoder, under the names of its modules in transformers."""
    if format == "diffusers":
        raise UserError(
            f"--format diffusers: {folder.root} trains a language model, which peft loads: use peft or merged"
        )
    settings, base = run_decoder(folder, config)
    stored = StoredWeights(place, None, weights)
    part = adapted_decoder(stored, config, settings, base)
    layers: list[str] = part["layers"]
    modules = hub_modules(settings, layers, "--format peft")
    tensors = _tensors(stored, modules, dtype)
    known = {"base_model_name_or_path": config.model.pretrained, "revision": config.model.revision}
    with new_folder(out) as work:
        _write_peft(work, tensors, adapter, list(modules.values()), {**known, "task_type": "CAUSAL_LM"})
        write_facts(work, folder, stored, format, adapter, {"model": part}, "peft")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    loading = f'AutoPeftModelForCausalLM.from_pretrained("{out}")'
    return ExportedAdapter(out, place.name, weights, format, len(layers), nbytes, loading)


def _tensors(stored: StoredWeights, names: Mapping[str, str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The matrices of layers' adapters, by the names that peft gives them; `names`: of layers here -> in the file."""
    return {
        f"{name}.lora_{side}{WEIGHT}": stored.tensor(adapter_name(layer, side)).to(dtype).contiguous()
        for layer, name in names.items()
        for side in "AB"
    }


def _noise(repository: Repository, component: str) -> str:
    """The noise, `high` or `low`, of a component that is one of two experts; "" of another."""
    two = boundary_of(repository) is not None
    return next((noise for noise, folder in EXPERTS.items() if two and folder == component), "")


# -- diffusers ----------------------------------------------------------------------------------------------------------


def _loader(repository: Repository) -> Any | None:
    """The class of the official pipeline, where it loads adapters."""
    kind = repository.pipeline_class(repository.pipeline)
    return kind if hasattr(kind, "save_lora_weights") else None


def _call(out: Path, file: str, noise: str) -> str:
    """The call that loads a file, by its name where there may be two."""
    named = f', weight_name="{file}"' if noise else ""
    return f'pipe.load_lora_weights("{out}"{named}{", load_into_transformer_2=True" if noise == "low" else ""})'


def _write_diffusers(
    repository: Repository,
    work: Path,
    file: str,
    tensors: dict[str, Tensor],
    adapter: AdapterConfig,
    layers: Sequence[str],
) -> None:
    """Write a file by the official pipeline's own writer. Raises UserError where its reader does not give back what was written."""
    import diffusers

    kind = _loader(repository)
    if kind is None:
        raise UserError(f"--format diffusers: {repository.pipeline} loads no adapters: use peft or merged")
    # what all versions of peft know, of which a reader makes a LoraConfig; diffusers 0.36 asks for the patterns
    settings = {**_settings(adapter), "target_modules": list(layers), "rank_pattern": {}, "alpha_pattern": {}}
    with _writing(work / file):
        kind.save_lora_weights(
            work, transformer_lora_layers=tensors, weight_name=file, transformer_lora_adapter_metadata=settings
        )
        _write_in_order(work / file)
    read, *_, metadata = kind.lora_state_dict(
        work, weight_name=file, return_lora_metadata=True, local_files_only=True, use_safetensors=True
    )
    prefix = kind.transformer_name
    _compare(work / file, {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}, read)
    if metadata != {f"{prefix}.{name}": value for name, value in settings.items()}:
        raise UserError(
            f"diffusers {diffusers.__version__} does not keep the settings of adapters of {repository.pipeline}, without which alpha is "
            "lost: use a newer diffusers"
        )


def _write_in_order(path: Path) -> None:
    """Write a file again with its metadata in order: safetensors writes several entries in another order each time."""
    with safe_open(path, "pt") as file:
        metadata, tensors = dict(sorted(file.metadata().items())), {name: file.get_tensor(name) for name in file.keys()}
    rows, part = rows_of(tensors), path.with_suffix(".part")  # apart: the tensors still lie in the file
    write_safetensors(part, metadata, rows, (tensors[row.name] for row in rows))
    part.replace(path)


def _write_original(
    repository: Repository,
    work: Path,
    file: str,
    tensors: Mapping[str, Tensor],
    adapter: AdapterConfig,
    layers: Sequence[str],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Write a file under the authors' names, and return its tensors. Raises UserError where diffusers' reader makes another product of them."""
    import diffusers

    what, shapes = "--format original", shapes_of(bare(repository))
    outputs = {name.removesuffix(WEIGHT): shape[0] for name, shape in shapes.items() if len(shape) == 2}
    pairs = {name: (tensors[f"{name}.lora_A{WEIGHT}"], tensors[f"{name}.lora_B{WEIGHT}"]) for name in layers}
    joined = to_authors(repository.class_name, pairs, adapter.scale, outputs, what)
    written = {name: tensor.to(dtype).contiguous() for name, tensor in joined.items()}
    with _writing(work / file):
        save_file(written, work / file, metadata={"format": "pt"})
    kind, version = _loader(repository), f"{what}: diffusers {diffusers.__version__}"
    if kind is None:
        raise UserError(f"{what}: {repository.pipeline} loads no adapters: use peft or merged")
    try:
        read = kind.lora_state_dict(work, weight_name=file, local_files_only=True, use_safetensors=True)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{version} does not read what was written: {error}") from None
    for name, (down, up) in pairs.items():
        own = [read.get(f"{kind.transformer_name}.{name}.lora_{side}{WEIGHT}") for side in "AB"]
        x_K = torch.linspace(-1, 1, down.shape[1])
        right = adapter.scale * (up.float() @ (down.float() @ x_K))
        wrong = any(each is None for each in own) or (
            own[1].float() @ (own[0].float() @ x_K) - right
        ).norm() > 8 * torch.finfo(dtype).eps * (up.float().norm() * adapter.scale * (down.float() @ x_K).norm())
        if wrong:
            raise UserError(f"{version} reads another adapter of {name} than was written: use another format")
    return written


# -- peft ---------------------------------------------------------------------------------------------------------------


def _write_peft(
    target: Path,
    tensors: dict[str, Tensor],
    adapter: AdapterConfig,
    layers: Sequence[str],
    base: Mapping[str, str | None],
) -> None:
    """Write a folder of peft. Raises UserError where peft does not read back what was written."""
    from peft import LoraConfig, PeftConfig
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    config = LoraConfig(**_settings(adapter), **base, inference_mode=True)  # type: ignore[arg-type]
    config.target_modules = list(layers)  # in this order, where peft makes a set
    target.mkdir(exist_ok=True)
    config.save_pretrained(str(target))
    path = target / SAFETENSORS_WEIGHTS_NAME
    named = {f"{PEFT}{name}": tensor for name, tensor in tensors.items()}
    with _writing(path):
        save_file(named, path, metadata={"format": "pt"})
    _compare(path, named, load_file(path))
    read: Any = PeftConfig.from_pretrained(str(target))
    if any(getattr(read, name) != value for name, value in _settings(adapter).items()) or set(
        read.target_modules
    ) != set(layers):
        raise UserError(f"{target}: peft reads other settings than were written")


def _settings(adapter: AdapterConfig) -> dict[str, Any]:
    """The settings of peft's LoraConfig that an adapter has."""
    return {"r": adapter.rank, "lora_alpha": adapter.alpha_or_rank, "use_rslora": adapter.rslora}


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the errors of safetensors inside the block, such as that of a full disk, into a UserError."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{path} cannot be written: {error}") from None


def _compare(path: Path, written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Raises UserError where a reader gives other tensors than were written."""
    if written.keys() != read.keys():
        name = sorted(written.keys() ^ read.keys())[0]
        raise UserError(f"{path}: the reader has other names than were written, such as `{name}`")
    for name, tensor in written.items():
        if read[name].dtype != tensor.dtype or not torch.equal(read[name], tensor):
            raise UserError(f"{path}: `{name}` is not what was written: look at the disk, and export again")
