"""Files of adapters, as diffusers, peft and the tools that know the authors' names write and read them.

Names of layers: diffusers' under `transformer.`, peft's under `base_model.model.`, the authors' under `diffusion_model.`, as ComfyUI,
musubi-tuner and diffusion-pipe have them. In the authors' files q, k and v may be one layer. Its matrix A holds those of its parts, its
B is block-diagonal, so that the product is that of the parts exactly; alpha / rank is a factor of B, and no alpha is written, since the
readers of three families refuse a file with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mmspeed.errors import UserError, first_names
from mmspeed.models.diffusers.authors_names import Names, authors_names
from mmspeed.models.stored import LISTED
from mmspeed.models.weights import header_of, read_json

AUTHORS, DIFFUSERS, PEFT = "diffusion_model.", "transformer.", "base_model.model."
FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # of diffusers, of peft
SETTINGS = "adapter_config.json"
METADATA = "lora_adapter_metadata"  # diffusers' key in a file's metadata
FLOATS = ("F64", "F32", "F16", "BF16")
SIDES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
Layers = Mapping[str, tuple[Tensor, Tensor]]  # A (rank, inputs), B (outputs, rank) by the name of the layer

# -- the authors' names -------------------------------------------------------------------------------------------------


def to_authors(kind: str, layers: Layers, scale: float, outputs: Mapping[str, int], what: str) -> dict[str, Tensor]:
    """The tensors of a file under the authors' names, whose product B A has the `scale` in it; float32.

    outputs: the number of outputs of each linear layer of the model, adapted or not, by name. Raises UserError for layers that the
    authors' names do not have.
    """
    names, tensors = authors_names(kind, what), {}
    groups = _groups(names, outputs)
    unknown = [layer for layer in layers if names.of(layer) is None]
    if unknown:
        raise UserError(
            f"{what}: diffusers and ComfyUI know no common name of {_listed(unknown)} of {kind}: use another format, or leave it out of "
            "model.adapter.targets"
        )
    for theirs in dict.fromkeys(str(names.of(layer)) for layer in layers):
        parts = groups[theirs]
        adapted = [layer for layer in parts if layer in layers]
        downs = [layers[layer][0].float() for layer in adapted]
        up = torch.zeros(sum(outputs[layer] for layer in parts), sum(len(down) for down in downs))
        row = column = 0
        for layer in parts:
            if layer in layers:
                block = layers[layer][1].float() * scale
                up[row : row + len(block), column : column + block.shape[1]] = block
                column += block.shape[1]
            row += outputs[layer]
        tensors[f"{AUTHORS}{theirs}.lora_A.weight"] = torch.cat(downs)
        tensors[f"{AUTHORS}{theirs}.lora_B.weight"] = up
    if not any(names.needs in name for name in tensors):
        raise UserError(
            f"{what}: diffusers knows {kind}'s authors' names by `{names.needs}`, and none of it has an adapter"
        )
    return tensors


def from_authors(
    kind: str, stored: Layers, adapted: Sequence[str], rank: int, outputs: Mapping[str, int], what: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """The inverse of `to_authors` for the `adapted` layers of a rank, with the scale left in B.

    A fused layer may also have one A of this rank for all its parts. Raises UserError for a file whose layers are not these.
    """
    names, layers = authors_names(kind, what), {}
    groups = _groups(names, outputs)
    wanted = {str(names.of(layer)): None for layer in adapted}
    _same(wanted, stored, what)
    for theirs in wanted:
        down, up = stored[theirs]
        own = [layer for layer in groups[theirs] if layer in adapted]
        if len(up) != sum(outputs[layer] for layer in groups[theirs]) or len(down) not in (rank, rank * len(own)):
            raise UserError(
                f"{what}: `{theirs}` has A {_shape(down)} and B {_shape(up)}, which do not fit rank {rank} here"
            )
        blocks = dict(zip(groups[theirs], up.split([outputs[layer] for layer in groups[theirs]]), strict=True))
        shared = len(down) == rank
        for number, layer in enumerate(own):
            part = slice(0, rank) if shared else slice(number * rank, (number + 1) * rank)
            block = blocks.pop(layer)
            if not shared and (block[:, : part.start].any() or block[:, part.stop :].any()):
                raise UserError(
                    f"{what}: `{theirs}` mixes its parts at rank {len(down)}, which is not rank {rank} here"
                )
            layers[layer] = (down[part], block[:, part])
        for layer, block in blocks.items():
            if block.any():
                raise UserError(
                    f"{what}: `{theirs}` changes {layer}, which has no adapter here: set model.adapter.targets"
                )
    return layers


def _groups(names: Names, outputs: Mapping[str, int]) -> dict[str, list[str]]:
    """The layers here of each of the authors' names, in the order in which they are fused."""
    groups: dict[str, list[str]] = {}
    order = list(names.layers)
    for layer in outputs:
        theirs = names.of(layer)
        if theirs is not None:
            groups.setdefault(theirs, []).append(layer)
    return {
        theirs: parts
        if len(parts) == 1
        else sorted(parts, key=lambda own: order.index(re.sub(r"\d+", "*", own, count=1)))
        for theirs, parts in groups.items()
    }


# -- reading ------------------------------------------------------------------------------------------------------------


def adapter_files(place: str | Path) -> dict[str, Path]:
    """The adapter file at a place by "": itself, or that of a folder of diffusers or peft; of two experts the files by `high` and `low`.

    Empty where the place is of another kind.
    """
    path = Path(place)
    if path.suffix == ".safetensors":
        return {"": path}
    diffusers, peft = FILES
    for noises in (("",), ("high", "low")):
        named = {
            noise: (diffusers.replace(".", f"_{noise}." if noise else "."), Path(noise) / peft) for noise in noises
        }
        found = {noise: path / name for noise, names in named.items() for name in names if (path / name).is_file()}
        if found:
            return found
    return {}


def read_adapter(
    path: Path,
    kind: str,
    adapted: Mapping[str, tuple[int, int]],
    rank: int,
    scale: float,
    outputs: Mapping[str, int],
    key: str,
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B in float32 of each layer, from a file; B has the ratio of the file's scale and this `scale` in it.

    adapted: (inputs, outputs) of each adapted layer. Raises UserError, which names the `key`, for a file that is not whole: layers that are
    missing or left over, another rank or shape, an unknown scale, one-byte numbers, DoRA.
    """
    what = f"{key}: {path}"
    stored, alphas, prefix = _read(path, what, key)
    stated = _stated_scale(path, prefix, what)
    if prefix == AUTHORS:
        factors = {
            name: float(alphas[name]) / len(down) if name in alphas else 1.0 for name, (down, _) in stored.items()
        }
    elif stated is None and stored.keys() - alphas.keys():
        raise UserError(
            f"{what} does not say its alpha, without which readers take its effect to be another: it needs diffusers' metadata "
            f"(`{METADATA}`), peft's {SETTINGS} beside it, or an `.alpha` of each layer"
        )
    else:
        factors = {
            name: float(alphas[name]) / len(down) if name in alphas else stated_scale(stated or {}, len(down))
            for name, (down, _) in stored.items()
        }
    layers = {name: (down, up * (factors[name] / scale)) for name, (down, up) in stored.items()}
    if prefix == AUTHORS:
        layers = from_authors(kind, layers, list(adapted), rank, outputs, what)
    _same(adapted, layers, what)
    for name, (inputs, out) in adapted.items():
        for side, tensor, shape in zip("AB", layers[name], ((rank, inputs), (out, rank)), strict=True):
            if tuple(tensor.shape) != shape:
                raise UserError(
                    f"{what}: lora_{side} of `{name}` is {_shape(tensor)} there, {shape} here: compare model.adapter.rank and the model"
                )
    return {name: layers[name] for name in adapted}


def stated_scale(settings: Mapping[str, Any], rank: int) -> float:
    """The factor of the product by peft's settings of an adapter."""
    return float(settings["lora_alpha"]) / (rank**0.5 if settings.get("use_rslora") else rank)


def _read(path: Path, what: str, key: str) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], str]:
    """(A and B in float32 by layer, alphas by layer, the prefix of names) of a file."""
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}")
    header = header_of(path, key)
    for name, entry in header.items():
        if "dora_scale" in name or "lora_magnitude_vector" in name:
            raise UserError(
                f"{what} holds `{name}`, of DoRA, which is not trained here: without it the effect is another"
            )
        if entry["dtype"] not in FLOATS:
            raise UserError(
                f"{what}: `{name}` is {entry['dtype']} without scales: use a file in bfloat16, float16 or float32"
            )
    prefix = next((own for own in (AUTHORS, DIFFUSERS, PEFT) if all(name.startswith(own) for name in header)), None)
    if prefix is None or not header:
        odd = sorted(name for name in header if not name.startswith((AUTHORS, DIFFUSERS, PEFT))) or sorted(header)
        raise UserError(
            f"{what}: names such as {_listed(odd[:1])} are under none of `{DIFFUSERS}` (diffusers), `{PEFT}` (peft) and `{AUTHORS}` "
            "(the authors')"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{what} cannot be read: {error}") from None
    sides: dict[str, dict[str, Tensor]] = {}
    alphas = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(prefix)
        found = re.fullmatch(r"(.+)\.(lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight", own)
        if own.endswith(".alpha") and tensor.numel() == 1:
            alphas[own.removesuffix(".alpha")] = tensor
        elif found is None or tensor.ndim != 2:
            raise UserError(f"{what} holds `{name}`, which is no part of a LoRA of linear layers")
        else:
            sides.setdefault(found[1], {})[SIDES[found[2]]] = tensor.float()
    half = [f"{layer}: no lora_{side}" for layer, own in sides.items() for side in "AB" if side not in own]
    if half or alphas.keys() - sides.keys():
        raise UserError(f"{what} is not whole: {_listed(half or sorted(alphas.keys() - sides.keys()))}")
    return {layer: (own["A"], own["B"]) for layer, own in sides.items()}, alphas, prefix


def _stated_scale(path: Path, prefix: str, what: str) -> dict[str, Any] | None:
    """Peft's settings of an adapter, from diffusers' metadata or the file beside; None without such."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(METADATA)
    if text is not None:
        try:
            settings = {name.removeprefix(DIFFUSERS): value for name, value in json.loads(text).items()}
        except (ValueError, AttributeError):
            raise UserError(f"{what}: its metadata `{METADATA}` is no JSON object") from None
    elif (path.parent / SETTINGS).is_file():
        settings = read_json(path.parent / SETTINGS, what)
    else:
        return None
    if not isinstance(settings.get("lora_alpha"), int | float):
        raise UserError(f"{what}: its settings name no lora_alpha")
    for name in ("use_dora", "alpha_pattern", "rank_pattern", "lora_bias"):
        if settings.get(name):
            raise UserError(f"{what}: its settings have {name}, which is not trained here")
    return settings


def _same(wanted: Mapping[str, object], stored: Mapping[str, object], what: str) -> None:
    """Raises UserError where a file's layers are not those that have adapters here."""
    missing, left = ([name for name in one if name not in other] for one, other in ((wanted, stored), (stored, wanted)))
    if missing:
        raise UserError(
            f"{what} has no adapter of {_listed(missing)}, which has one here: compare model.adapter.targets"
        )
    if left:
        raise UserError(f"{what} has adapters of {_listed(left)}, which has none here: compare model.adapter.targets")


def _listed(names: Sequence[str]) -> str:
    return first_names([f"`{name}`" for name in names], LISTED)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
