"""Text entries of published models, after a cache and a batch, are what the official pipelines' `encode_prompt` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.config.schema import FamilyTextConfig
from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.cache.keys import entry_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import text_tensors
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.text.encoders import load_text_encoder, text_identity, text_width
from mmspeed.models.text.family import FamilyTextEncoder
from mmspeed.pipelines.diffusion.predictor import conditions_of_texts
from mmspeed.protocols import TextEntry
from tests.support.covers import every_second
from tests.support.tiny_repositories import REPOSITORIES

NAMES = ["wan", "ltx", "cogvideox-5b", "hunyuan-video", "mochi", "flux", "qwen-image", "hunyuan-video-1.5"]
LIMITS = {"wan": 512, "cogvideox-5b": 226}
CPU = Device("cpu", 0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repositories")
    for name in NAMES:
        REPOSITORIES[name](folder / name)
    return folder


def section(home: Path, name: str, **changes: Any) -> FamilyTextConfig:
    return FamilyTextConfig(kind="family", pretrained=str(home / name), **changes)


def official_pipeline(home: Path, name: str) -> Any:
    """The pipeline of a repository, whose transformer and codec take no part in texts; some ask the codec for its strides."""
    import diffusers

    absent = {"transformer": None} | ({} if name == "hunyuan-video-1.5" else {"vae": None})
    return diffusers.DiffusionPipeline.from_pretrained(home / name, **absent)


@torch.no_grad()
def official(home: Path, name: str, caption: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(rows (L, D), mask (L,) where the pipeline has one, pooled (D) where it has one) of a caption."""
    pipeline = official_pipeline(home, name)
    if name == "hunyuan-video-1.5":
        rows, mask, _, _ = pipeline.encode_prompt(caption, device="cpu")
        return rows[0], mask[0], None
    if name == "qwen-image":
        rows, mask = pipeline.encode_prompt(caption, device="cpu")
        return rows[0], None if mask is None else mask[0], None
    if name == "hunyuan-video":
        rows, pooled, mask = pipeline.encode_prompt(caption, device="cpu")
        return rows[0], mask[0], pooled[0]
    if name == "flux":
        rows, pooled, _ = pipeline.encode_prompt(caption, None, device="cpu")
        return rows[0], None, pooled[0]
    if name in ("ltx", "mochi"):
        rows, mask, *_ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False, device="cpu")
        return rows[0], mask[0], None
    longest = {"max_sequence_length": LIMITS[name]}
    return pipeline.encode_prompt(caption, do_classifier_free_guidance=False, device="cpu", **longest)[0][0], None, None


def stored(root: Path, encoder: FamilyTextEncoder, captions: list[str]) -> list[TextEntry]:
    """The entries of captions, from a cache on disk."""
    keys = []
    with CacheWriter(root) as writer:
        for number, caption in enumerate(captions):
            entry, parts = encoder.encode([caption])[0], {"number": number}
            keys.append(entry_key(parts))
            writer.add("texts", keys[-1], text_tensors(entry), parts, tokens=entry.embeds_LD.shape[0])
        writer.add("null", entry_key({"null": 1}), text_tensors(encoder.encode([""])[0]), {}, tokens=1)
    write_samples(root, [])
    write_rejects(root, [])
    write_info(root, {"encoders": {}, "fps": 8.0, "made_for": {}})
    cache = DatasetCache(root)
    return [cache.text(key) for key in keys]


def prompts(encoder: FamilyTextEncoder) -> list[str]:
    """Empty, a word, as long as the limit allows, one word longer and much longer, with quotes, and in other scripts."""
    words, tokenize = 1, encoder.parts[0].tokenize
    while not tokenize(" ".join(["meadow"] * (words + 1)))[1]:
        words += 1
    fits = " ".join(["meadow"] * words)
    odd = [
        "a sign  says \"OPEN\" &amp; 'shut'",
        "\u4e00\u53ea\u5154\u5b50 \u043a\u0440\u043e\u043b\u0438\u043a \U0001f407",
    ]
    return ["", "rabbit", fits, fits + " meadow" * 40, *odd]


@pytest.mark.parametrize("name", every_second(NAMES))
def test_entries_are_those_of_the_pipeline(home: Path, tmp_path: Path, name: str) -> None:
    encoder = load_text_encoder(section(home, name), CPU)
    assert isinstance(encoder, FamilyTextEncoder)
    captions = prompts(encoder)
    encoder.truncated = 0
    conditions = conditions_of_texts(stored(tmp_path / "cache", encoder, captions), torch.device("cpu"), 8.0, None)
    text_BLD, mask_BL, pooled_BD = conditions.text_BLD, conditions.text_mask_BL, conditions.pooled_BD
    assert encoder.truncated == 1
    assert encoder.width == text_width(section(home, name)) == text_BLD.shape[2]
    for place, caption in enumerate(captions):
        rows_LD, real_L, pooled_D = official(home, name, caption)
        count = int(mask_BL[place].sum())
        if real_L is not None:  # rows of padding do not reach the model
            assert count == int(real_L.sum())
            rows_LD = rows_LD[:count]
        # captions of a batch are products of other sizes: a few roundings of the largest value
        atol = 2e-6 * max(1.0, float(rows_LD.abs().max()))
        torch.testing.assert_close(text_BLD[place, :count], rows_LD[:count], atol=atol, rtol=1e-5)
        assert bool((rows_LD[count:] == 0).all())  # what is not stored is what the call adds
        assert (pooled_D is None) == (pooled_BD is None)
        if pooled_D is not None and pooled_BD is not None:
            torch.testing.assert_close(pooled_BD[place], pooled_D, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_words_in_quotes_are_a_caption_of_their_own(home: Path, tmp_path: Path) -> None:
    name = "hunyuan-video-1.5"
    encoder = load_text_encoder(section(home, name), CPU)
    assert isinstance(encoder, FamilyTextEncoder)
    captions = [
        "",
        "a rabbit",
        'a sign "OPEN" and "SHUT", again "OPEN"',
        "a \u201cmeadow\u201d",
        '"' + "long " * 80 + '"',
    ]
    conditions = conditions_of_texts(stored(tmp_path / "cache", encoder, captions), torch.device("cpu"), 8.0, None)
    rows_BLD, mask_BL = conditions.named["text_2"], conditions.named["text_2_mask"]
    assert rows_BLD.shape == (5, 256, 24) and mask_BL.sum(1).tolist()[:2] == [0, 0]
    assert encoder.truncated == 0 and encoder.truncated_by == {"text_encoder_2 (256 tokens)": 1}
    for place, caption in enumerate(captions):
        _, _, official_LD, real_L = (each[0] for each in official_pipeline(home, name).encode_prompt(caption, "cpu"))
        assert torch.equal(mask_BL[place], real_L.bool())
        torch.testing.assert_close(rows_BLD[place][mask_BL[place]], official_LD[mask_BL[place]], atol=1e-6, rtol=1e-5)


def test_captions_are_encoded_together_as_alone(home: Path) -> None:
    for name in ("wan", "hunyuan-video"):
        encoder = load_text_encoder(section(home, name), CPU)
        assert isinstance(encoder, FamilyTextEncoder)
        ids = [encoder.tokenize(caption) for caption in ("a rabbit", "a meadow", "two birds")]
        same = [each for each in ids if encoder.lengths(each) == encoder.lengths(ids[0])]
        together = encoder.encode_ids(same)
        for each, entry in zip(same, together, strict=True):
            torch.testing.assert_close(entry.embeds_LD, encoder.encode_ids([each])[0].embeds_LD, atol=1e-6, rtol=1e-5)


def test_the_identity_names_all_that_entries_depend_on(home: Path, tmp_path: Path) -> None:
    import shutil

    base = text_identity(section(home, "hunyuan-video"))
    assert base == text_identity(section(home, "hunyuan-video"))
    assert base != text_identity(section(home, "hunyuan-video", dtype="bfloat16"))
    assert base != text_identity(section(home, "hunyuan-video", max_tokens=64))
    assert base == text_identity(section(home, "hunyuan-video", max_tokens=4096))  # the recipe's limit is smaller
    for changed in ("text_encoder/config.json", "tokenizer_2/tokenizer.json", "text_encoder_2/model.safetensors"):
        other = tmp_path / changed.replace("/", "-")
        shutil.copytree(home / "hunyuan-video", other)
        path = other / changed
        data = path.read_bytes()
        path.write_bytes(
            data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
            if path.suffix == ".safetensors"
            else data.replace(b"2", b"3", 1)
        )
        assert text_identity(section(tmp_path, other.name)) != base, changed


def test_a_repository_that_lacks_an_encoder_says_which(home: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(home / "hunyuan-video", tmp_path / "part", ignore=shutil.ignore_patterns("tokenizer_2"))
    with pytest.raises(UserError, match=r"no folder 'tokenizer_2' with settings \(folders there: .*text_encoder_2"):
        text_identity(section(tmp_path, "part"))


def test_another_tokenizer_than_the_templates_is_refused(home: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(home / "hunyuan-video", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "tokenizer")
    shutil.copytree(home / "hunyuan-video" / "tokenizer_2", tmp_path / "other" / "tokenizer")
    with pytest.raises(UserError, match=r"tokens of the template in front of a caption, and 95 are cut off"):
        load_text_encoder(section(tmp_path, "other"), CPU)
