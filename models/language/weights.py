"""Weights of language models in a folder of transformers: read by their names, part by part, and written with the same names.

Blocks of DeepSeek's fp8 (E4M3, a scale for each 128 x 128 numbers) are multiplied out as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.models.assemblies import Assembly, taken_apart
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.families import IGNORED_NAMES, SHARED, hub_names, settings_of
from mmspeed.models.stored import NUMBERS, FileWeights, OpenFiles, shapes_of
from mmspeed.models.weights import (
    copy_small_files,
    fingerprint,
    header_of,
    read_json,
    resolve,
    weight_files,
    weight_patterns,
)
from mmspeed.models.writing import DTYPES, TensorEntry, new_folder, write_tensors
from mmspeed.protocols import Part, declare_source

STEM = "model"
KEY = "model.pretrained"
FP8 = "F8_E4M3"
SCALE = "_scale_inv"  # behind the name of a weight
SHARD_BYTES = 5 * 10**9
MODULE = re.compile(r"^model\.layers\.(\d+)\.")


def stored_decoder(pretrained: str, revision: str | None = None, mtp: int | None = None, key: str = KEY) -> Decoder:
    """The decoder of a folder or hub id of transformers, without memory, to be filled from its files.

    mtp: modules for further tokens; None: those that the files hold. Raises UserError for a family that is not computed, and for files
    that lack a tensor, hold another one, or one of another shape, which it lists.
    """
    patterns = (*weight_patterns(STEM), "*.json")
    folder = resolve(pretrained, [None], revision, patterns, key)
    tree = read_json(folder / "config.json", key)
    if mtp is None:
        mtp = _modules(folder, tree, key)
    return decoder_of(folder, settings_of(tree, key, mtp), key)


def decoder_of(folder: Path, settings: DecoderSettings, key: str = KEY) -> Decoder:
    """The decoder of such settings, without memory, to be filled from the files of a folder. Raises UserError as `stored_decoder`."""
    model = on_meta(settings)
    source = HubWeights(folder, model, key)
    source.check()
    declare_source(model, source)
    return model


def on_meta(settings: DecoderSettings) -> Decoder:
    """A decoder whose parameters have no memory; the buffers of its routers, which are small, have the values of a new model."""
    with torch.device("meta"):
        model = Decoder(settings)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros(buffer.shape), name not in module._non_persistent_buffers_set)
    return model


def _modules(folder: Path, tree: Mapping[str, Any], key: str) -> int:
    """The number of modules for further tokens whose weights a folder holds."""
    depth = int(tree.get("num_hidden_layers", 0))
    numbers = set()
    for path in weight_files(folder, STEM, key):
        if path.suffix == ".safetensors":
            numbers |= {int(match[1]) for name in header_of(path, key) if (match := MODULE.match(name))}
    return len({number for number in numbers if number >= depth}) if tree.get("model_type") == "deepseek_v3" else 0


class HubWeights(FileWeights):
    """The weights of a decoder in a folder of transformers, as a `WeightSource`."""

    def __init__(self, folder: Path, model: Decoder, key: str = KEY) -> None:
        super().__init__(model, key)
        self.folder, self._settings = folder, model.settings
        self._names = hub_names(model.settings, list(shapes_of(model)))

    @property
    def place(self) -> str:
        return str(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of settings and weights, from reading files only."""
        return fingerprint(self.folder, [self.folder / "config.json", *weight_files(self.folder, STEM, self.key)], {})

    def safetensors(self) -> list[Path]:
        """The folder's files."""
        return [path for path in weight_files(self.folder, STEM, self.key) if path.suffix == ".safetensors"]

    @property
    def ignored(self) -> Sequence[str]:
        """Old tables of positions, a tied head, copies of embedding and head, and modules for further tokens that the model lacks."""
        tied = (r"^lm_head\.weight$",) if self._settings.tie_word_embeddings else ()
        depth, mtp = self._settings.num_hidden_layers, self._settings.num_nextn_predict_layers
        copies = [rf"^model\.layers\.{depth + place}\.{re.escape(name)}$" for place in range(mtp) for name in SHARED]
        behind = [] if mtp else [rf"^{re.escape(name)}" for name in self._behind(depth)]
        return (*IGNORED_NAMES, *tied, *copies, *behind, *self._scales())

    def _scales(self) -> list[str]:
        """The scales of weights in fp8."""
        return [rf"^{re.escape(name + SCALE)}$" for name, (_, entry) in self.entries.items() if entry["dtype"] == FP8]

    def _behind(self, depth: int) -> list[str]:
        """The beginnings of names of blocks behind the last one, in a family that has modules for further tokens."""
        if self._settings.latent is None:
            return []
        numbers = {int(match[1]) for name in self.entries if (match := MODULE.match(name))}
        return [f"model.layers.{number}." for number in sorted(numbers) if number >= depth]

    def assembly(self, name: str) -> Assembly:
        return self._names[name]

    def entry_reason(self, entry: Mapping[str, Any]) -> str:
        return (
            ""
            if entry["dtype"] in (*NUMBERS, FP8)
            else "numbers of float32, bfloat16, float16 and float8_e4m3 are read"
        )

    @cached_property
    def _block(self) -> tuple[int, int]:
        """The rows and columns of numbers that share a scale."""
        tree = read_json(self.folder / "config.json", self.key).get("quantization_config") or {}
        rows, columns = tree.get("weight_block_size") or (128, 128)
        return int(rows), int(columns)

    def read_stored(self, files: OpenFiles, name: str, part: Part) -> Tensor:
        """A part of a tensor; numbers of fp8 come as float32, multiplied by the scales of their blocks."""
        value = files.part(name, part)
        if self.entries[name][1]["dtype"] != FP8:
            return value
        scale = f"{name}{SCALE}"
        rows, columns = self._block
        shape = self.shapes[name]
        blocks = tuple(-(-size // block) for size, block in zip(shape, (rows, columns), strict=False))
        if len(shape) != 2 or self.shapes.get(scale) != blocks:
            stored = self.shapes.get(scale)
            raise UserError(
                f"{self.key}: `{name}` of {shape} needs scales `{scale}` of {blocks}, one for each {rows} x {columns} numbers; "
                f"{self.folder} {'lacks them' if stored is None else f'holds {stored}'}"
            )
        return dequantised(value, part, (rows, columns), lambda wanted: files.part(scale, wanted))


def dequantised(value: Tensor, part: Part, block: tuple[int, int], scales: Callable[[Part], Tensor]) -> Tensor:
    """The float32 numbers of a part of a block-scaled matrix. scales: returns a part of the matrix of scales."""
    wanted = tuple(slice(one.start // size, -(-one.stop // size)) for one, size in zip(part, block, strict=True))
    scale = scales(wanted).to(torch.float32)
    for dim, (one, size) in enumerate(zip(part, block, strict=True)):
        first = one.start % size
        scale = scale.repeat_interleave(size, dim).narrow(dim, first, one.stop - one.start)
    return value.to(torch.float32) * scale


# ---- writing


def write_folder(
    model: Decoder,
    base: Path,
    out: Path,
    dtypes: Mapping[str, torch.dtype] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a decoder's weights into the new folder `out`, as transformers reads them, and return the names of the tensors.

    base: the folder that the decoder was read from, whose config.json, tokenizer and other small files are copied. dtypes: number types of
    tensors by their names on the hub, `types_of` the base; None: as they are in the model. Experts are written one by one. The folder is
    whole or absent, and every tensor is read again and compared. Raises UserError for a folder that exists.
    """
    state, names = model.state_dict(), hub_names(model.settings, list(shapes_of(model)))
    values: dict[str, Tensor] = {}
    for name, tensor in state.items():
        values |= dict(taken_apart(names[name], tensor.detach()))  # views
    entries = [
        TensorEntry(name, tuple(value.shape), (dtypes or {}).get(name, value.dtype)) for name, value in values.items()
    ]

    def value_of(entry: TensorEntry) -> Tensor:
        return values[entry.name].to("cpu", entry.dtype).contiguous()

    with new_folder(out) as work:
        write_tensors(work, STEM, entries, value_of, shard_bytes)
        copy_small_files(base, work)
    return [entry.name for entry in entries]


def types_of(source: HubWeights) -> dict[str, torch.dtype]:
    """The number type of each tensor of a folder, but for fp8, which is read as float32."""
    kinds = {kind: dtype for dtype, kind in DTYPES.items()}
    return {name: kinds[entry["dtype"]] for name, (_, entry) in source.entries.items() if entry["dtype"] in kinds}
