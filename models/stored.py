"""Weights of a model without memory in safetensors: each process reads the bytes of its own parts alone.

The names and shapes in the files are checked before anything is read. A tensor of the model may be put together from several of the files
(`mmspeed.models.assemblies`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mmspeed.errors import UserError, first_names
from mmspeed.models.assemblies import Assembly, Shape, names_in, part_shapes, read_part
from mmspeed.models.weights import header_of
from mmspeed.protocols import Part

NUMBERS = ("F64", "F32", "F16", "BF16")  # number types of weights that train
LISTED = 5  # names in an error


class FileWeights:
    """The weights of a model in safetensors files, as a `WeightSource`."""

    def __init__(self, model: nn.Module, key: str) -> None:
        self.key = key
        self._tensors = shapes_of(model)
        self._kind = type(model).__name__

    # -- of a kind of folder

    @property
    def place(self) -> str:
        """The place of the files, for messages."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the files."""
        raise NotImplementedError

    def safetensors(self) -> list[Path]:
        """The files. Raises UserError where there are none."""
        raise NotImplementedError

    @property
    def ignored(self) -> Sequence[str]:
        """Patterns of names that files may hold beside the model's."""
        return ()

    def assembly(self, name: str) -> Assembly:
        """The files' tensors that a tensor of the model consists of."""
        return name

    def entry_reason(self, entry: Mapping[str, Any]) -> str:
        """The reason why the numbers of an entry of a header are no weights; "" where they are."""
        return "" if entry["dtype"] in NUMBERS else "only float32, bfloat16 and float16 are trained"

    def read_stored(self, files: OpenFiles, name: str, part: Part) -> Tensor:
        """A part of a files' tensor, as the numbers of the model."""
        return files.part(name, part)

    # -- of all

    def check(self) -> None:
        """Raises UserError where the files lack a tensor of the model, hold another one, or one of another shape."""
        wanted: dict[str, Shape] = {}
        for name, shape in self._tensors.items():
            wanted |= part_shapes(self.assembly(name), shape)
        check_tensors(wanted, self.shapes, f"{self.key}: {self.place}", self.ignored)

    @cached_property
    def entries(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        """(file, entry of its header) of each tensor. Raises UserError for numbers that are no weights."""
        entries = {
            name: (path, entry) for path in self.safetensors() for name, entry in header_of(path, self.key).items()
        }
        for name, (path, entry) in entries.items():
            reason = self.entry_reason(entry)
            if reason:
                raise UserError(f"{self.key}: `{name}` in {path} is {entry['dtype']}: {reason}")
        return entries

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor of the files."""
        return {name: tuple(entry["shape"]) for name, (_, entry) in self.entries.items()}

    def read(self, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted part of each named tensor, file by file. Raises UserError as `check`, and for a file that cannot be read."""
        self.check()
        shapes = self.shapes
        needed = {name: self._files_of(name) for name in parts}
        order = sorted(parts, key=lambda name: needed[name])
        with OpenFiles(self.entries, self.key) as files:
            for number, name in enumerate(order):
                value = read_part(
                    self.assembly(name), parts[name], shapes, lambda stored, part: self.read_stored(files, stored, part)
                )
                yield name, value
                files.keep({path for later in order[number + 1 : number + 2] for path in needed[later]})

    def _files_of(self, name: str) -> list[Path]:
        """The files of a tensor, in their order."""
        return sorted({self.entries[stored][0] for stored in names_in(self.assembly(name))})


class OpenFiles:
    """Open safetensors files, as a context; they are mapped, not read."""

    def __init__(self, entries: Mapping[str, tuple[Path, Mapping[str, Any]]], key: str) -> None:
        self._entries, self._key = entries, key
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(set())

    def keep(self, paths: set[Path]) -> None:
        """Close all but some of the files."""
        for path in self._open.keys() - paths:
            self._open.pop(path).__exit__(None, None, None)

    def part(self, name: str, part: Part) -> Tensor:
        """A part of a tensor. Raises UserError for a file that cannot be read."""
        path = self._entries[name][0]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            if not part:
                scalar: Tensor = self._open[path].get_tensor(name)
                return scalar
            block: Tensor = self._open[path].get_slice(name)[part]
            return block
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._key}: {path} cannot be read: {error}") from None


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """The shape of each parameter and saved buffer of a model, by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_tensors(
    wanted: Mapping[str, Shape], shapes: Mapping[str, Shape], where: str, ignored: Sequence[str] = ()
) -> None:
    """Raises UserError where files lack a wanted tensor, hold another one, or one of another shape: the first ones, and how many.

    `ignored`: patterns of names that files may hold beside.
    """
    missing = [name for name in wanted if name not in shapes]
    surplus = [n for n in shapes if n not in wanted and not any(re.search(pattern, n) for pattern in ignored)]
    other = [name for name in wanted if name in shapes and shapes[name] != wanted[name]]
    for names, words in (
        (missing, "lacks {}"),
        (surplus, "holds {}, which the model does not have"),
        (other, "holds {} in another shape"),
    ):
        if names:
            listed = first_names([f"`{name}`" for name in names], LISTED)
            shape = f": {shapes[names[0]]} there, {wanted[names[0]]} by its config.json" if names is other else ""
            total = f" ({len(missing)} missing, {len(surplus)} surplus, {len(other)} of another shape)"
            raise UserError(f"{where} {words.format(listed)}{shape}{total}")
