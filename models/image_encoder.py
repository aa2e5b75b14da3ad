"""The image encoder of a published model's repository, used by its family's recipe: embeddings equal those of its official pipeline.

Legend: B clips, F H W frames and pixels, K pictures, L rows of an embedding, D their width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspeed.config.schema import Config, ModelConfig, PublishedModelConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families.base import ImageRecipe
from mmspeed.models.sections import KEY, family_of_section, repository_of, stored_conditions
from mmspeed.models.text.family import load_component
from mmspeed.models.weights import fingerprint, folders_in, resolve, weight_files, weight_patterns
from mmspeed.protocols.calls import IMAGES

STEM = "model"
DTYPE = torch.float32


def image_identity(section: PublishedModelConfig) -> str:
    """A name of everything that embeddings depend on: recipe, encoder, image processor; from reading files only.

    Raises UserError for a repository without them.
    """
    repository, recipe = _recipe(section)
    root = _fetched(repository, recipe)
    encoder, processor = root / recipe.encoder, root / recipe.processor
    files = [encoder / "config.json", *weight_files(encoder, STEM, KEY), *sorted(processor.glob("*.json"))]
    # transformers scales pictures otherwise where torchvision is not installed
    settings = {"recipe": asdict(recipe), "torchvision": importlib.util.find_spec("torchvision") is not None}
    return fingerprint(root, files, settings)


def image_fingerprint(config: Config) -> str | None:
    """The identity of the image encoder whose embeddings a config's cache holds; None where it holds none. Raises UserError."""
    if isinstance(config.model, ModelConfig) or not any(name in IMAGES for name in stored_conditions(config)):
        return None
    return image_identity(config.model)


def load_image_encoder(section: PublishedModelConfig, device: Device) -> ImageEncoder:
    """The image encoder of a model's repository, ready on `device`. Raises UserError for files that are missing or do not load."""
    repository, recipe = _recipe(section)
    root = _fetched(repository, recipe)
    weight_files(root / recipe.encoder, STEM, KEY)
    model = load_component(
        repository, recipe.encoder, root / recipe.encoder, {"dtype": DTYPE, "use_safetensors": True}, KEY
    )
    processor = load_component(repository, recipe.processor, root / recipe.processor, {}, KEY, "AutoImageProcessor")
    return ImageEncoder(model, processor, recipe, device)


def image_embeddings(encoder: ImageEncoder, names: Iterable[str], clips: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """The embeddings (B, L, D) of pictures of clips (F, H, W, 3), uint8, by those of the names that are of such (`IMAGES`)."""
    places = {"image_first": 0, "image_last": -1}
    return {name: encoder.encode([clip[places[name]] for clip in clips]) for name in names if name in IMAGES}


class ImageEncoder:
    """The encoder of pictures to the rows that a model takes beside their latents."""

    def __init__(self, model: Any, processor: Any, recipe: ImageRecipe, device: Device) -> None:
        self.model = model.eval().requires_grad_(False).to(device.torch_device)
        self.processor, self.recipe, self.device = processor, recipe, device.torch_device

    def encode(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """Embeddings (K, L, D), float32 on the CPU, of pictures (H, W, 3), uint8; each is encoded alone."""
        return torch.stack([self._encode_one(Image.fromarray(picture_HW3)) for picture_HW3 in pictures])

    def _encode_one(self, picture: Image.Image) -> Tensor:
        pixels = self.processor(images=picture, return_tensors="pt", **self.recipe.processing)["pixel_values"]
        with torch.inference_mode():
            output = self.model(
                pixel_values=pixels.to(self.device, DTYPE), output_hidden_states=self.recipe.layer is not None
            )
        layer = self.recipe.layer
        rows_1LD = output.last_hidden_state if layer is None else output.hidden_states[layer]
        # outside of inference mode: a model that is trained on it may keep it for its backward pass
        embedding_LD: Tensor = rows_1LD[0].to("cpu", torch.float32, copy=True)
        return embedding_LD


def _recipe(section: PublishedModelConfig) -> tuple[Repository, ImageRecipe]:
    """The repository of a model, and its family's use of an image encoder. Raises UserError where the repository has none."""
    repository, recipe = repository_of(section), family_of_section(section).image
    if recipe is None:
        raise UserError(f"{KEY}: no use of an image encoder is known for {repository.class_name}")
    missing = next((name for name in (recipe.encoder, recipe.processor) if not repository.has(name)), None)
    if missing is not None:
        raise UserError(
            f"{KEY}: {repository.pretrained} has no folder {missing!r}, and its model takes the embedding of a given frame (folders there: "
            f"{', '.join(folders_in(repository.folder))})"
        )
    return repository, recipe


def _fetched(repository: Repository, recipe: ImageRecipe) -> Path:
    """The folder of the repository's files, those of the image encoder among them."""
    patterns = (*weight_patterns(STEM), "*.json")
    return resolve(repository.pretrained, [recipe.encoder, recipe.processor], repository.revision, patterns, KEY)
