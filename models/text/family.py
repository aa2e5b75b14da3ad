"""The text encoders of a published model's repository, used by its family's recipe: entries equal those of its official pipeline.

Legend: B batch, L caption tokens, D text width.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from mmspeed.config.schema import FamilyTextConfig
from mmspeed.device import Device, parse_dtype
from mmspeed.errors import UserError
from mmspeed.guards import time_limit
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families import family_of
from mmspeed.models.text.recipes import EncoderRecipe, PictureUse, Template, TextRecipe
from mmspeed.models.weights import fingerprint, first_line, quiet, read_json, resolve, weight_files, weight_patterns
from mmspeed.protocols import TextEntry

KEY = "text.pretrained"
STEM = "model"
# the width of rows in the config.json of common encoders, by their type
WIDTHS = {
    **dict.fromkeys(
        ("bert", "clip_text_model", "gemma2", "llama", "qwen2", "qwen3", "roberta", "xlm-roberta"), "hidden_size"
    ),
    **dict.fromkeys(("mt5", "t5", "umt5"), "d_model"),
}
Ids = tuple[tuple[int, ...], ...]  # of a caption's tokens, for each encoder
Picture = npt.NDArray[np.uint8]  # (H, W, 3)
BLACK = np.zeros((16, 16, 3), np.uint8)  # processors scale it


def family_recipe(cfg: FamilyTextConfig) -> tuple[Repository, TextRecipe]:
    """The repository of a config and its family's recipe. Raises UserError for a family whose texts are not known."""
    repository = Repository.open(cfg.pretrained, cfg.revision, KEY)
    family = family_of(repository.class_name, KEY)
    recipe = family.text_of(repository.index, repository.config)
    if recipe is None:
        pipeline = repository.index.get("_class_name", family.name)
        raise UserError(
            f"text.kind: the text encoders of {pipeline} are not known; name one with text.kind: transformers"
        )
    return repository, recipe


def family_text_identity(cfg: FamilyTextConfig) -> str:
    """A name of everything that entries depend on: recipe, encoders, tokenizers, number type and length; from reading files only."""
    repository, recipe = family_recipe(cfg)
    folders = [_Folders.of(repository, part) for part in recipe.encoders]
    root = folders[0].root
    files = {path for place in folders for path in place.files()}
    templates = [part.template_of() for part in recipe.encoders]
    settings = {
        "recipe": _without_pictures(asdict(recipe)),
        "templates": [None if each is None else _settings_of(each) for each in templates],
        "dtype": cfg.dtype,
        "max_tokens": family_caption_limit(cfg),
        # captions are cleaned by it where it is installed
        "ftfy": any(part.clean for part in recipe.encoders) and importlib.util.find_spec("ftfy") is not None,
    }
    if recipe.sees_pictures:  # transformers scales pictures otherwise where torchvision is not installed
        settings["torchvision"] = importlib.util.find_spec("torchvision") is not None
    return fingerprint(root, files, settings)


def _settings_of(template: Template) -> dict[str, Any]:
    """A template's fields; those of a picture only where it has one, so that the others keep their names."""
    return {name: value for name, value in asdict(template).items() if name != "picture" or any(value)}


def _without_pictures(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe's fields without the pictures of encoders that see none."""
    encoders = [
        {name: value for name, value in encoder.items() if name != "picture" or value is not None}
        for encoder in recipe["encoders"]
    ]
    return {**recipe, "encoders": encoders}


def family_caption_limit(cfg: FamilyTextConfig) -> int:
    """Tokens of the longest caption, from the family's recipe."""
    return min(cfg.max_tokens, family_recipe(cfg)[1].encoders[0].length)


def family_picture_rows(cfg: FamilyTextConfig) -> int:
    """Rows of an entry that are of a picture, at most; 0 where the encoders see words alone."""
    first = family_recipe(cfg)[1].encoders[0]
    template = first.template_of()
    if first.picture is None or template is None:
        return 0
    return len(range(*template.picture, min(first.picture.every, first.picture.every_of_black)))


def family_sees_pictures(cfg: FamilyTextConfig) -> bool:
    """True where entries depend on a given picture, too."""
    return family_recipe(cfg)[1].sees_pictures


def stated_width(folder: Path) -> int | None:
    """The width of rows that the config.json of a common encoder states; None for others, which transformers knows, a second later."""
    settings = read_json(folder / "config.json", KEY)
    if settings.get("model_type") == "clip":
        settings = settings.get("text_config") or {}
    width = settings.get(WIDTHS.get(str(settings.get("model_type")), ""))
    return width if type(width) is int else None


def family_text_width(cfg: FamilyTextConfig) -> int:
    """The width of rows, from the first encoder's settings."""
    repository, recipe = family_recipe(cfg)
    folder = _Folders.of(repository, recipe.encoders[0]).encoder
    if (width := stated_width(folder)) is not None:
        return width
    from transformers import AutoConfig

    with quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return int(getattr(config, "text_config", config).hidden_size)


def load_family_text_encoder(cfg: FamilyTextConfig, device: Device) -> FamilyTextEncoder:
    """The encoders of a config's repository, ready on `device`. Raises UserError for files that are missing or do not load."""
    repository, recipe = family_recipe(cfg)
    identity = family_text_identity(cfg)
    parts = [_Part(repository, part, cfg, device) for part in recipe.encoders]
    return FamilyTextEncoder(parts, identity)


class FamilyTextEncoder:
    """A `TextEncoder` over all text encoders of a repository.

    `truncated` counts the captions that were cut to `text.max_tokens` or the model's own limit, `truncated_by` those that further
    encoders cut, by the encoder's folder and its limit; `padding_rows` counts rows of padding that the model takes.
    """

    def __init__(self, parts: Sequence[_Part], fingerprint: str) -> None:
        self.parts, self.fingerprint = parts, fingerprint
        self.sees_pictures = any(part.recipe.picture is not None for part in parts)
        self.truncated, self.padding_rows = 0, 0
        self.truncated_by: Counter[str] = Counter()
        self.width = self.encode([""])[0].embeds_LD.shape[1]
        self.padding_rows = 0  # those of captions alone

    def encode(self, captions: list[str], pictures: Sequence[Picture | None] | None = None) -> list[TextEntry]:
        """The entry of each caption, float32 on the CPU.

        pictures: (H, W, 3), uint8, that encoders see beside the captions; None: a black one, as for negative prompts.
        """
        seen = [None] * len(captions) if pictures is None else pictures
        return [
            self.encode_ids([self.tokenize(caption)], picture)[0]
            for caption, picture in zip(captions, seen, strict=True)
        ]

    def tokenize(self, caption: str) -> Ids:
        """The ids of a caption's tokens for each encoder, with padding where it is encoded."""
        tokens = [part.tokenize(caption) for part in self.parts]
        self.truncated += tokens[0][1]
        if self.parts[0].recipe.stored == "all":
            self.padding_rows += len(tokens[0][0]) - _real(tokens[0][0], self.parts[0].tokenizer.pad_token_id)
        further = zip(self.parts[1:], tokens[1:], strict=True)
        self.truncated_by.update(f"{part.recipe.encoder} ({part.length} tokens)" for part, (_, cut) in further if cut)
        return tuple(ids for ids, _ in tokens)

    @staticmethod
    def lengths(ids: Ids) -> tuple[int, ...]:
        """Numbers of tokens; captions with equal ones are encoded together."""
        return tuple(len(each) for each in ids)

    def encode_ids(self, ids: Sequence[Ids], picture: Picture | None = None) -> list[TextEntry]:
        """The entries of captions with equal `lengths`, from one pass of each encoder; all beside one picture, where encoders see it."""
        results = [part.encode([each[place] for each in ids], picture) for place, part in enumerate(self.parts)]
        by_name = {part.recipe.gives: result for part, result in zip(self.parts, results, strict=True)}
        rows, pooled = by_name.pop("rows"), by_name.pop("pooled", None)
        return [
            TextEntry(
                embeds_LD,
                None if pooled is None else pooled[place],
                {name: result[place] for name, result in by_name.items()},
            )
            for place, embeds_LD in enumerate(rows)
        ]


class _Folders:
    """The folders of one encoder and its tokenizer, whose files are fetched where they are not here."""

    def __init__(self, root: Path, encoder: Path, tokenizer: Path, processor: Path | None = None) -> None:
        self.root, self.encoder, self.tokenizer, self.processor = root, encoder, tokenizer, processor

    @classmethod
    def of(cls, repository: Repository, recipe: EncoderRecipe) -> _Folders:
        """The folders in a repository. Raises UserError, with the folders there, where one is missing."""
        processor = None if recipe.picture is None else recipe.picture.processor
        names = [recipe.encoder, recipe.tokenizer, *([] if processor is None else [processor])]
        for name in names:
            if not repository.has(name):
                repository.config(name)  # names the folders
        # whole tokenizer folders: their files have many names
        patterns = (*weight_patterns(STEM), *("*.json", "*.txt", "*.model", "*.jinja"))
        root = resolve(repository.pretrained, names, repository.revision, patterns, KEY)
        return cls(
            root, root / recipe.encoder, root / recipe.tokenizer, None if processor is None else root / processor
        )

    def files(self) -> list[Path]:
        """The files that the encoder's numbers depend on."""
        tokenizer = [
            path for path in sorted(self.tokenizer.iterdir()) if path.suffix in (".json", ".txt", ".model", ".jinja")
        ]
        processor = [] if self.processor is None else sorted(self.processor.glob("*.json"))
        return [self.encoder / "config.json", *weight_files(self.encoder, STEM, KEY), *tokenizer, *processor]


class _Part:
    """One encoder with its tokenizer and recipe."""

    def __init__(self, repository: Repository, recipe: EncoderRecipe, cfg: FamilyTextConfig, device: Device) -> None:
        self.recipe, self.device = recipe, device.torch_device
        folders = _Folders.of(repository, recipe)
        self.tokenizer = load_component(repository, recipe.tokenizer, folders.tokenizer, {})
        settings = {"dtype": parse_dtype(cfg.dtype), "use_safetensors": True}
        weight_files(folders.encoder, STEM, KEY)
        self.model = load_component(repository, recipe.encoder, folders.encoder, settings).eval().requires_grad_(False)
        self.model.to(self.device)
        self.processor: Any = None
        if recipe.picture is not None:
            self.processor = load_component(
                repository,
                recipe.picture.processor,
                folders.root / recipe.picture.processor,
                {},
                KEY,
                "AutoImageProcessor",
            )
        self.template, self.clean = recipe.template_of(), recipe.cleaning()
        self.length = min(cfg.max_tokens, recipe.length) if recipe.gives == "rows" else recipe.length
        self._check_template()

    @property
    def cut(self) -> int:
        """Tokens of the template in front of a caption."""
        return 0 if self.template is None else self.template.cut

    def _check_template(self) -> None:
        """Raises UserError where the tokenizer cuts the template otherwise than the recipe says: captions would lose tokens."""
        if self.template is None:
            return
        if self.template.chat:
            pair = zip(self._ids("rabbit"), self._ids("meadow"), strict=False)
            counted = sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], pair))
        else:
            front = self.template.text.partition("{}")[0]
            counted = len(self.tokenizer(front, verbose=False)["input_ids"])
            place = self.template.picture[0]
            ids = self._ids("")
            if self.recipe.picture is not None and ids[place : place + 1] != [int(self.model.config.image_token_index)]:
                raise UserError(
                    f"{KEY}: the tokenizer does not put the template's image token at place {place}: it is not the model's own"
                )
        if abs(counted - self.cut) > 1:  # a piece of the caption may join the template's last one
            raise UserError(
                f"{KEY}: the tokenizer makes {counted} tokens of the template in front of a caption, and {self.cut} are cut off: "
                "it is not the model's own"
            )

    def tokenize(self, caption: str) -> tuple[tuple[int, ...], bool]:
        """(the ids of a caption, True where it was cut)."""
        words = self.clean(caption)
        if words is None:
            return (), False
        most = self.length + self.cut
        whole = self._ids(words)
        cut = len(whole) > most
        # the model was trained on its own length, however far captions are cut
        length = self.recipe.length + self.cut
        ids = self._ids(words, truncation=True, max_length=most) if cut else whole
        if self.recipe.padded:
            ids = self.tokenizer.pad({"input_ids": [ids]}, padding="max_length", max_length=length)["input_ids"][0]
        return tuple(ids), cut

    def _ids(self, words: str, **limits: Any) -> list[int]:
        """The ids of a caption inside of the template."""
        if self.template is not None and self.template.chat:
            system, user = {"role": "system", "content": self.template.text}, {"role": "user", "content": words or " "}
            with time_limit(
                30.0, f"{self.tokenizer.name_or_path}: the chat template does not end within 30 s of a caption"
            ):
                return _plain_ids(
                    self.tokenizer.apply_chat_template(
                        [system, user], add_generation_prompt=True, tokenize=True, return_dict=True, **limits
                    )
                )
        words = words if self.template is None else self.template.text.format(words)
        return _plain_ids(self.tokenizer(words, verbose=False, **limits))

    def encode(self, ids: Sequence[tuple[int, ...]], picture: Picture | None = None) -> list[Tensor]:
        """The rows (L, D) of each caption, or its vector (D), float32 on the CPU. `picture`: for an encoder that sees one; None: black."""
        if self.recipe.picture is not None:
            return [self._encode_seen(each, picture, self.recipe.picture) for each in ids]
        if not ids[0]:  # of all of them: they are equally long
            width = int(getattr(self.model.config, "text_config", self.model.config).hidden_size)
            return [torch.zeros(0, width) for _ in ids]
        recipe, ids_BL = self.recipe, torch.tensor(ids, device=self.device)
        arguments: dict[str, Any] = {} if recipe.padded else {"attention_mask": torch.ones_like(ids_BL)}
        with torch.inference_mode():
            output = self.model(input_ids=ids_BL, output_hidden_states=recipe.layer is not None, **arguments)
        if recipe.gives == "pooled":
            return [on_host(pooled_D) for pooled_D in output.pooler_output]
        rows_BLD = output.last_hidden_state if recipe.layer is None else output.hidden_states[recipe.layer]
        counts = [rows_BLD.shape[1]] * len(ids)
        if recipe.padded and recipe.stored == "real":
            counts = [_real(each, self.tokenizer.pad_token_id) for each in ids]
        return [on_host(rows_LD[self.cut : count]) for rows_LD, count in zip(rows_BLD, counts, strict=True)]

    def _encode_seen(self, ids: Sequence[int], picture: Picture | None, use: PictureUse) -> Tensor:
        """The rows (L, D) of a picture and a caption, as HunyuanVideo's pipeline takes them from a Llava model."""
        assert self.template is not None
        begin, end = self.template.picture
        more = end - begin - 1  # rows of the picture beyond its token
        token = int(self.model.config.image_token_index)
        place = list(ids).index(token)
        ids_1L = torch.tensor([[*ids[:place], *[token] * (more + 1), *ids[place + 1 :]]], device=self.device)
        shown = Image.fromarray(BLACK if picture is None else picture)
        pixels = self.processor(shown, return_tensors="pt").pixel_values.to(self.device, self.model.dtype)
        with torch.inference_mode():
            output = self.model(
                input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), pixel_values=pixels, output_hidden_states=True
            )
        assert self.recipe.layer is not None
        rows_LD = output.hidden_states[self.recipe.layer][0]
        mark = self.tokenizer.convert_tokens_to_ids(use.mark)
        marks = [number for number, each in enumerate(ids) if each == mark]
        # a caption that was cut has lost the answer's mark: its last tokens are left out in its place
        whole = len(marks) >= self.template.text.count(use.mark)
        answer = (marks[-1] if whole else len(ids) - 1) + 1
        every = use.every_of_black if picture is None else use.every
        parts = (rows_LD[begin:end:every], rows_LD[self.cut + more : answer + more - use.cut], rows_LD[answer + more :])
        return on_host(torch.cat(parts))


def _plain_ids(encoding: Any) -> list[int]:
    return list(encoding["input_ids"])


def _real(ids: Sequence[int], padding: int) -> int:
    """Tokens before the padding behind a caption."""
    count = len(ids)
    while count > 1 and ids[count - 1] == padding:
        count -= 1
    return count


def on_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, outside of inference mode: a model that is trained on it may keep it for its backward pass."""
    return tensor.to("cpu", torch.float32, copy=True)


def load_component(
    repository: Repository,
    component: str,
    folder: Path,
    settings: dict[str, Any],
    key: str = KEY,
    usual: str = "AutoTokenizer",
) -> Any:
    """A component of transformers, by the class that model_index.json names: a model with `settings`, a tokenizer or processor without.

    key: the config key that errors name. usual: the class of a tokenizer or processor that the index does not name. Raises UserError where
    it does not load.
    """
    import transformers

    library, name = repository.components.get(component, ("transformers", usual))
    if library != "transformers" or not hasattr(transformers, name):
        name = usual if not settings else "AutoModel"
    if settings and read_json(folder / "config.json", key).get("model_type") is None:
        raise UserError(f"{key}: {folder / 'config.json'} names no model_type, so it is no model of transformers")
    try:
        with quiet():
            return getattr(transformers, name).from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # wrong or truncated files fail anywhere inside
        raise UserError(f"{key}: {folder} does not load as {name}: {first_line(error)}") from error
