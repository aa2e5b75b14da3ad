"""Text encoders: hidden states of real tokens, as a padded batch of transformers gives them, and errors for people.

Legend: B batch, L caption tokens, D text width.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspeed.config.schema import MiniLmTextConfig, TransformersTextConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.text.encoders import TransformersEncoder, load_text_encoder, text_identity
from mmspeed.protocols import TextEntry
from tests.support.tiny_models import SENTENCES, save_tiny_text_encoder

CPU = Device("cpu", 0)
CLASSES = {
    "t5": "T5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "clip": "CLIPTextModel",
    "clip-projection": "CLIPTextModelWithProjection",
    "clip-full": "CLIPTextModel",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "qwen2": "Qwen2Model",
}
CAPTIONS = ["a rabbit", "", "two birds sing", "the dark earth"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saved tiny text encoders by kind, each made on first use."""
    root = tmp_path_factory.mktemp("texts")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else save_tiny_text_encoder(root / kind, kind)

    return folder


def config(folder: Path, max_tokens: int = 16, **fields: Any) -> TransformersTextConfig:
    return TransformersTextConfig(kind="transformers", pretrained=str(folder), max_tokens=max_tokens, **fields)


def load(folder: Path, max_tokens: int = 16, **fields: Any) -> TransformersEncoder:
    encoder = load_text_encoder(config(folder, max_tokens, **fields), CPU)
    assert isinstance(encoder, TransformersEncoder)
    return encoder


def padded_truth(folder: Path, kind: str, captions: list[str], max_tokens: int) -> tuple[Any, torch.Tensor, Any]:
    """(output, mask, model) of a plain transformers call on one padded batch."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    extra = {"config": transformers.AutoConfig.from_pretrained(folder).text_config} if kind == "clip-full" else {}
    model = getattr(transformers, CLASSES[kind]).from_pretrained(folder, **extra).eval()
    batch = tokenizer(captions, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
    with torch.no_grad():
        return (
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]),
            batch["attention_mask"],
            model,
        )


@pytest.mark.parametrize("kind", CLASSES)
def test_real_tokens_are_those_of_a_padded_batch(kind: str, folders: Callable[[str], Path]) -> None:
    encoder = load(folders(kind))
    assert type(encoder.model).__name__ == CLASSES[kind]
    captions = [caption for caption in CAPTIONS if caption] + [SENTENCES[1] * 3]
    entries = encoder.encode(captions)
    output, mask_BL, _ = padded_truth(folders(kind), kind, captions, 16)
    for i, entry in enumerate(entries):
        real = int(mask_BL[i].sum())
        assert entry.embeds_LD.shape == (real, encoder.width)
        torch.testing.assert_close(entry.embeds_LD, output.last_hidden_state[i, :real], atol=1e-5, rtol=1e-4)
    assert entries[-1].embeds_LD.shape[0] == 16


@pytest.mark.parametrize("kind", ["clip", "clip-projection", "clip-full"])
def test_clip_is_pooled(kind: str, folders: Callable[[str], Path]) -> None:
    captions = ["a rabbit", "two birds"]
    entries = load(folders(kind)).encode(captions)
    output, _, _ = padded_truth(folders(kind), kind, captions, 16)
    truth = output.text_embeds if kind == "clip-projection" else output.pooler_output
    for entry, pooled in zip(entries, truth, strict=True):
        assert entry.pooled_D is not None
        torch.testing.assert_close(entry.pooled_D, pooled, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bert"])
def test_others_are_not_pooled(kind: str, folders: Callable[[str], Path]) -> None:
    assert load(folders(kind)).encode(["a rabbit"])[0].pooled_D is None


@pytest.mark.parametrize("kind", ["qwen2", "clip"])
def test_the_empty_caption_has_a_token(kind: str, folders: Callable[[str], Path]) -> None:
    empty = load(folders(kind)).encode([""])[0].embeds_LD
    assert empty.shape[0] >= 1 and torch.isfinite(empty).all()


def test_cut_captions_are_counted_and_keep_their_end_mark(folders: Callable[[str], Path]) -> None:
    encoder = load(folders("bert"), max_tokens=6)
    assert encoder.truncated == 0
    encoder.encode(["a green meadow", SENTENCES[0], SENTENCES[1]])  # 3, 7 and 7 words, and two marks
    assert encoder.truncated == 2
    ids = encoder.tokenize(SENTENCES[0])
    assert len(ids) == 6 and ids[-1] == encoder.tokenizer.sep_token_id


def test_bytes_do_not_depend_on_the_batch(folders: Callable[[str], Path]) -> None:
    """`encode` takes captions one by one, so that products have the same shapes in any batch, on every machine."""
    encoder = load(folders("t5"))
    together = encoder.encode(CAPTIONS)
    for caption, entry in zip(CAPTIONS, together, strict=True):
        assert torch.equal(encoder.encode([caption])[0].embeds_LD, entry.embeds_LD)
    assert encoder.encode([]) == []


def test_bfloat16_is_computed_and_float32_returned(folders: Callable[[str], Path]) -> None:
    half = load(folders("t5"), dtype="bfloat16")
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert half.encode(["a rabbit"])[0].embeds_LD.dtype == torch.float32


@pytest.mark.parametrize(("kind", "limit"), [("clip-full", 16), ("bert", 32)])
def test_positions_limit_the_length(kind: str, limit: int, folders: Callable[[str], Path]) -> None:
    assert load(folders(kind), max_tokens=limit).encode([SENTENCES[0] * 9])[0].embeds_LD.shape[0] == limit
    with pytest.raises(UserError, match=rf"text\.max_tokens is {limit + 1}, but .* has positions for {limit}"):
        load(folders(kind), max_tokens=limit + 1)


def test_minilm_is_its_package_and_means_something() -> None:
    encoder = load_text_encoder(MiniLmTextConfig(kind="minilm"), CPU)
    assert encoder.width == 384
    assert encoder.fingerprint == text_identity(MiniLmTextConfig(kind="minilm"))
    assert encoder.fingerprint != text_identity(MiniLmTextConfig(kind="minilm", max_tokens=64))

    def meaning(entry: TextEntry) -> torch.Tensor:
        return torch.nn.functional.normalize(entry.embeds_LD.mean(0), dim=0)

    rabbit, hare, rocket = (
        meaning(e) for e in encoder.encode(["a rabbit in a meadow", "a hare on the grass", "a rocket engine test"])
    )
    assert float(rabbit @ hare) > float(rabbit @ rocket) + 0.2


def test_folders_of_a_pipeline(folders: Callable[[str], Path], tmp_path: Path) -> None:
    whole = folders("clip")
    shutil.copytree(
        whole, tmp_path / "text_encoder", ignore=shutil.ignore_patterns("tokenizer*", "special*", "vocab*", "merges*")
    )
    shutil.copytree(whole, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match=r"whole pipeline: set text\.subfolder"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"text\.tokenizer_subfolder: .*text_encoder holds no tokenizer"):
        load(tmp_path, subfolder="text_encoder")
    encoder = load(tmp_path, subfolder="text_encoder", tokenizer_subfolder="tokenizer")
    assert torch.equal(encoder.encode(["ab"])[0].embeds_LD, load(whole).encode(["ab"])[0].embeds_LD)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_no_text_encoder_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text\.pretrained: no folder"):
        load(tmp_path / "none")
    for model_type, problem in (("vit", "'vit', which is no text encoder"), ("t6", "'t6'")):
        folder = shutil.copytree(folders("bert"), tmp_path / model_type)
        _edit(folder, model_type=model_type)
        with pytest.raises(UserError, match=problem) as caught:
            load(folder)
        assert len(str(caught.value).splitlines()) == 1
    folder = shutil.copytree(folders("bert"), tmp_path / "deeper")
    _edit(folder, num_hidden_layers=3)
    with pytest.raises(UserError, match=r"lack 16 tensors of BertModel, such as encoder\.layer\.2"):
        load(folder)
    folder = shutil.copytree(folders("bert"), tmp_path / "cut")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="does not load as BertModel"):
        load(folder)


def test_fingerprints_follow_what_changes_numbers(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("bert"), tmp_path / "bert")
    first = text_identity(config(folder))
    assert first == load(folder).fingerprint == text_identity(config(folders("bert")))
    _edit(folder, transformers_version="0.0.1")
    assert text_identity(config(folder)) == first
    seen = {first, text_identity(config(folder, max_tokens=8)), text_identity(config(folder, dtype="bfloat16"))}
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"rabbit"', '"hare"'))
    seen.add(text_identity(config(folder)))
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    seen.add(text_identity(config(folder)))
    assert len(seen) == 5
