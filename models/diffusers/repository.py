"""Repositories of diffusers: a folder, or a hub id, with `model_index.json` and a folder for each component.

Opening one reads small JSON files only; weights are fetched when they are asked for. Only safetensors are read, never pickles.
Every error is one line that names the config key at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError
from mmspeed.models.weights import fingerprint, folders_in, header_of, read_json, resolve, weight_files, weight_patterns

INDEX = "model_index.json"
STEM = "diffusion_pytorch_model"
# the file of a component's settings: of models, schedulers, image processors and tokenizers
CONFIGS = ("config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer_config.json")
SMALL_FILES = tuple(f"*/{name}" for name in (*CONFIGS, "*.safetensors.index.json"))
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SCALES = ("scale_weight", "weight_scale", "scale_input", "input_scale", "scaled_fp8", "weight_scale_inv")
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass(frozen=True)
class Repository:
    """A repository of diffusers on this machine, from `Repository.open`.

    pretrained, revision: as they were asked for. key: the config key that errors name. folder: the place of its files.
    transformer: the name of the transformer's folder. file: a file with weights of the transformer, instead of the repository's own.
    """

    pretrained: str
    revision: str | None
    key: str
    folder: Path
    transformer: str = "transformer"
    file: Path | None = None

    @classmethod
    def open(
        cls,
        pretrained: str,
        revision: str | None = None,
        key: str = "model.pretrained",
        transformer: str = "transformer",
    ) -> Repository:
        """The repository in a folder or of a hub id; of the latter only small JSON files are fetched.

        Raises UserError where it is neither, the hub cannot be reached, or the repository has no such transformer.
        """
        place = Path(pretrained).expanduser()
        if place.suffix == ".gguf":
            raise UserError(f"{key}: {pretrained} is a GGUF file, whose numbers are quantised: name the repository")
        folder = resolve(pretrained, [None], revision, SMALL_FILES, key)
        repository = cls(pretrained, revision, key, folder, transformer)
        if not (folder / INDEX).is_file() and (folder / "config.json").is_file():
            raise UserError(f"{key}: {folder} is the folder of one model: name the repository around it, with {INDEX}")
        if not (folder / transformer / "config.json").is_file():
            names = folders_in(folder)
            listed = f"folders there: {', '.join(names[:12])}" if names else "it holds no folders"
            raise UserError(f"{key}: {pretrained} has no folder {transformer!r} with a config.json ({listed})")
        return repository

    @property
    def here(self) -> bool:
        """True where weights need not be fetched: they are in a folder that the config names, or in a file."""
        return self.file is not None or Path(self.pretrained).expanduser().is_dir()

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """The contents of model_index.json; empty where there is none."""
        path = self.folder / INDEX
        return read_json(path, self.key) if path.is_file() else {}

    @cached_property
    def components(self) -> Mapping[str, tuple[str, str]]:
        """(library, class) of each component that model_index.json names; those left empty are left out."""
        pairs = {name: value for name, value in self.index.items() if isinstance(value, list) and len(value) == 2}
        return {name: (str(library), str(kind)) for name, (library, kind) in pairs.items() if kind is not None}

    @property
    def pipeline(self) -> str | None:
        """The name of the official pipeline's class; None where model_index.json names none."""
        name = self.index.get("_class_name")
        return str(name) if name is not None else None

    def pipeline_class(self, name: str | None) -> Any:
        """The pipeline of a name in diffusers. Raises UserError where there is none."""
        import diffusers

        kind = getattr(diffusers, name or "", None)
        if kind is None:
            raise UserError(
                f"{self.key}: diffusers {diffusers.__version__} has no pipeline {name or 'of this repository'}"
            )
        return kind

    def has(self, component: str) -> bool:
        """True where there is a folder of that component, with its settings."""
        return any((self.folder / component / name).is_file() for name in CONFIGS)

    def config(self, component: str) -> dict[str, Any]:
        """The settings of a component, from its JSON file. Raises UserError where there is none."""
        for name in CONFIGS:
            path = self.folder / component / name
            if path.is_file():
                return read_json(path, self.key)
        raise UserError(
            f"{self.key}: {self.pretrained} has no folder {component!r} with settings (folders there: "
            f"{', '.join(folders_in(self.folder))})"
        )

    @property
    def class_name(self) -> str:
        """The name of the transformer's class. Raises UserError where its config.json names none."""
        name = self.config(self.transformer).get("_class_name")
        if not isinstance(name, str):
            raise UserError(f"{self.key}: {self.folder / self.transformer / 'config.json'} names no _class_name")
        return name

    def of(self, component: str) -> Repository:
        """The same repository with another transformer, such as the second expert `transformer_2`. Raises UserError without one."""
        if not self.has(component):
            self.config(component)  # names the folders
        return self if component == self.transformer else replace(self, transformer=component, file=None)

    def with_file(self, path: Path, key: str) -> Repository:
        """The same repository with the transformer's weights from one safetensors file. Raises UserError for any other file."""
        if path.suffix == ".gguf":
            raise UserError(f"{key}: {path} is a GGUF file, whose numbers are quantised: name a safetensors file")
        if path.suffix in PICKLES:
            raise UserError(f"{key}: {path} is a pickle, which mmspeed does not read: save it again as safetensors")
        if not path.is_file():
            raise UserError(f"{key}: there is no file {path}")
        refuse_quantised(path, key)
        return replace(self, file=path)

    @property
    def weightless(self) -> bool:
        """True for a folder whose transformer has settings alone, by which shapes are counted, and nothing that may be weights."""
        weights = (".safetensors", ".safetensors.index.json", ".gguf", *PICKLES)
        names = (path.name for path in (self.folder / self.transformer).iterdir())
        return self.here and self.file is None and not any(name.endswith(weights) for name in names)

    # -- weights --------------------------------------------------------------------------------------------------------

    @property
    def weights_folder(self) -> Path:
        """The transformer's folder with its weights, which are fetched from the hub if they are not here. Raises UserError as `resolve`."""
        root = resolve(self.pretrained, [self.transformer], self.revision, weight_patterns(STEM), self.key)
        return root / self.transformer

    def weight_files(self) -> list[Path]:
        """The transformer's safetensors, the index first where there is one.

        Raises UserError for pickles, GGUF files, variants, and quantised numbers.
        """
        if self.file is not None:
            return [self.file]
        folder = self.weights_folder
        single, index = folder / f"{STEM}.safetensors", folder / f"{STEM}.safetensors.index.json"
        if not single.is_file() and not index.is_file():
            hub = "" if self.here else f" (the hub cannot be reached, or {self.pretrained} has no such file there)"
            raise UserError(f"{self.key}: {_without_weights(folder)}{hub}")
        method = self.config(self.transformer).get("quantization_config")
        if method is not None:
            name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
            raise UserError(
                f"{self.key}: {self.pretrained} is quantised (quant_method {name}), and quantised bases are not trained: name one in "
                "float32, bfloat16 or float16"
            )
        files = weight_files(folder, STEM, self.key)
        for path in files:
            if path.suffix == ".safetensors":
                refuse_quantised(path, self.key)
        return files

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the transformer's settings and weights, from reading files only; weights are fetched for it."""
        if self.file is not None:
            settings = self.folder / self.transformer
            weights = fingerprint(self.file.parent, [self.file], {})
            return fingerprint(settings, [settings / "config.json"], {"weights": weights})
        folder = self.weights_folder
        return fingerprint(folder, [folder / "config.json", *self.weight_files()], {})


def _without_weights(folder: Path) -> str:
    """The reason why a transformer's folder has no weights that can be read."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    variants = [name for name in names if name.startswith(f"{STEM}.") and name.endswith(".safetensors")]
    quantised = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if name.endswith(PICKLES)]
    lacks = f"{folder} holds no {STEM}.safetensors"
    if quantised:
        return f"{lacks}, only the GGUF file {quantised[0]}, whose numbers are quantised: name a repository with safetensors"
    if variants:
        return f"{lacks}, only the variant {variants[0]}: rename it, or name a repository with the plain name"
    if pickles:
        return f"{lacks}, only pickles such as {pickles[0]}, which mmspeed does not read: save it again as safetensors"
    return lacks


def refuse_quantised(path: Path, key: str) -> None:
    """Raises UserError for a safetensors file whose numbers are fp8, or come with scales: plain reading would give wrong weights."""
    for name, entry in header_of(path, key).items():
        scaled = name.rpartition(".")[2] in SCALES
        if scaled or entry.get("dtype") in FP8:
            reason = f"`{name}` holds scales" if scaled else f"`{name}` is {entry['dtype']}"
            raise UserError(
                f"{key}: {path} is an fp8 file ({reason}), and quantised bases are not trained: name one in float32, bfloat16 or float16"
            )
