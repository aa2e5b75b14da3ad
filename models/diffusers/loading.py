"""Models of diffusers without memory, and the files that fill them: each process reads the bytes of its own parts alone.

A model's parameters are on the meta device, in float32; its buffers, such as tables of positions, are made as its class makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.stored import FileWeights, shapes_of
from mmspeed.models.weights import first_line, quiet
from mmspeed.protocols import Part, declare_float32, declare_source


def empty_model(kind: Any, config: Mapping[str, Any]) -> nn.Module:
    """A model of a class of diffusers, from its settings: parameters on the meta device, and buffers with their values."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), quiet():
        model: nn.Module = kind.from_config(dict(config))
    keep_float32(model)
    return model.train()


def keep_float32(model: nn.Module) -> None:
    """Declare, in place, what a class of diffusers keeps in float32 when it is loaded in half precision: its `_keep_in_fp32_modules`."""
    declare_float32(model, getattr(model, "_keep_in_fp32_modules", None) or ())


def stored_model(repository: Repository, kind: Any) -> nn.Module:
    """The repository's transformer, of the class `kind`, to be filled from its files after it is spread over devices.

    Raises UserError for files that lack a tensor of the model, hold one that it lacks, or hold one of another shape: at once where
    they are here, or when they are read, which fetches them or finds none.
    """
    model = empty_model(kind, repository.config(repository.transformer))
    source = weights_of(repository, model)
    if repository.here and not repository.weightless:
        source.check()
    declare_source(model, source)
    return model


def weights_of(repository: Repository, model: nn.Module) -> RepositoryWeights:
    """The weights of a repository's transformer; `model`: it, without memory. Those of a single file may have the authors' names."""
    source, names = RepositoryWeights(repository, model), shapes_of(model).keys()
    missing = len(names - source.shapes.keys()) if repository.file is not None else 0
    if not missing:
        return source
    original = OriginalWeights(repository, model)
    try:
        return original if len(names - original.shapes.keys()) < missing else source
    except UserError:
        if missing > len(names) / 2:
            raise
        return source  # in the names of diffusers, and `check` says what it lacks


class RepositoryWeights(FileWeights):
    """The weights of a model in a repository's safetensors, as a `WeightSource`."""

    def __init__(self, repository: Repository, model: nn.Module) -> None:
        super().__init__(model, repository.key)
        self._repository = repository
        self._ignored: list[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []

    @property
    def place(self) -> str:
        repository = self._repository
        return str(repository.file or repository.folder / repository.transformer)

    @property
    def ignored(self) -> Sequence[str]:
        return self._ignored

    @cached_property
    def fingerprint(self) -> str:
        """The repository's own."""
        return self._repository.fingerprint

    def safetensors(self) -> list[Path]:
        """The transformer's files, or the single one that the config names."""
        return [path for path in self._repository.weight_files() if path.suffix == ".safetensors"]


class OriginalWeights(RepositoryWeights):
    """The weights in one file with the names and layout of a model's authors, read by the converter of diffusers.

    Tensors are views of the file in memory, but for those that the converter puts together from several.
    """

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in diffusers."""
        return {name: tuple(tensor.shape) for name, tensor in self._converted().items()}

    def read(self, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted part of each named tensor. Raises UserError as `check`."""
        self.check()
        tensors = self._converted()
        for name, part in parts.items():
            yield name, tensors.pop(name)[part]

    def _converted(self) -> dict[str, Tensor]:
        """The tensors by their names in diffusers. Raises UserError for a class without a converter, and for another model's file."""
        from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES as CONVERTERS

        key, (path,) = self._repository.key, self._repository.weight_files()
        converters: Mapping[str, Any] = CONVERTERS
        convert = converters.get(self._kind, {}).get("checkpoint_mapping_fn")
        if convert is None:
            raise UserError(
                f"{key}: the names in {path} are not those of {self._kind} in diffusers, which has no converter for that class: "
                "convert the file first"
            )
        try:
            with quiet():
                converted: dict[str, Tensor] = convert(checkpoint=load_file(path))
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise UserError(f"{key}: {path} is no file of a {self._kind}: {first_line(error)}") from error
        return converted
