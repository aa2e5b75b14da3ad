"""Encoders that are loaded when they are needed, batches that are used where they change no bit, entries stored in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmspeed.config import Bucket, Config
from mmspeed.data import CacheWriter
from mmspeed.data.cache.writer import text_tensors
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.models.text.encoders import load_text_encoder
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import (
    Encoders,
    TrustedBatches,
    encode_latents,
    encode_texts,
    is_memory_full,
    latent_entry,
    text_entry,
)
from tests.support.runs import small_config
from tests.support.tiny_models import SENTENCES, save_spoiled_text_encoder, save_tiny_text_encoder, save_tiny_vae

CPU = Device("cpu", 0)
BUCKET = Bucket(5, 16, 32)
CAPTIONS = sorted(
    {" ".join(sentence.split()[:count]) for sentence in SENTENCES for count in range(1, 12)}
    | {f"{sentence} {word}" for sentence in SENTENCES for word in "sun beach dark bird".split()}
)


class Recorder:
    """Encodes numbers as their squares; `spoils` batches of these sizes by a last bit, and cannot hold more than `most`."""

    def __init__(self, spoils: Sequence[int] = (), most: int = 1000) -> None:
        self.spoils, self.most = spoils, most
        self.sizes: list[int] = []

    def __call__(self, items: Sequence[int]) -> list[float]:
        if len(items) > self.most:
            raise MemoryError
        self.sizes.append(len(items))
        return [item**2 + (1e-9 if len(items) in self.spoils else 0.0) for item in items]


def squares(trusted: TrustedBatches, recorder: Recorder, count: int, shape: str = "a") -> list[float]:
    return trusted.encode(range(1, count + 1), shape, recorder, lambda one, other: one == other)


def test_a_batch_is_tried_once_and_then_trusted() -> None:
    trusted, recorder = TrustedBatches(8), Recorder()
    assert squares(trusted, recorder, 21) == [n**2 for n in range(1, 22)]
    ones = [1] * 8
    assert recorder.sizes == [8, *ones, 8, 4, 1, 1, 1, 1, 1]  # powers of two; the first of each size one by one too
    assert (trusted.batched, trusted.single, trusted.checked, trusted.distrusted) == (8, 13, 2, 0)
    recorder.sizes.clear()
    squares(trusted, recorder, 12)
    assert recorder.sizes == [8, 4]
    squares(trusted, recorder, 8, shape="b")  # another shape: tried again
    assert recorder.sizes == [8, 4, 8, *ones]


def test_a_batch_that_gives_other_bits_is_never_used() -> None:
    trusted, recorder = TrustedBatches(4), Recorder(spoils=[4])
    assert squares(trusted, recorder, 10) == [n**2 for n in range(1, 11)]
    assert recorder.sizes == [4, *[1] * 8, 2, 1, 1]
    assert trusted.counts == {"batched": 0, "single": 10, "checked": 2, "distrusted": 1, "halved": 0}
    loose, recorder = TrustedBatches(4, exact=False), Recorder(spoils=[4])
    assert squares(loose, recorder, 5) == [n**2 + (1e-9 if n < 5 else 0) for n in range(1, 6)]
    assert recorder.sizes == [4, 1]


def test_batches_are_halved_where_memory_does_not_hold_them() -> None:
    trusted, recorder = TrustedBatches(16), Recorder(most=3)
    assert squares(trusted, recorder, 20) == [n**2 for n in range(1, 21)]
    assert trusted.limit == 2 and trusted.halved == 3 and max(recorder.sizes) == 2
    with pytest.raises(MemoryError):
        squares(TrustedBatches(4), Recorder(most=0), 4)
    assert is_memory_full(RuntimeError("NPU out of memory. Tried to allocate")) and not is_memory_full(ValueError("x"))
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60)
    assert is_memory_full(caught.value)


def text_config(tmp_path: Path, kind: str, *overrides: str) -> Config:
    folder = save_tiny_text_encoder(tmp_path / kind, kind)
    return small_config(
        tmp_path, f"text={{kind: transformers, pretrained: {folder}, max_tokens: 12}}", *overrides, clips=1
    )


@pytest.mark.parametrize("kind", ["t5", "qwen2", "minilm"])
def test_texts_in_batches_are_the_bits_of_texts_one_by_one(tmp_path: Path, kind: str) -> None:
    config = small_config(tmp_path, clips=1) if kind == "minilm" else text_config(tmp_path, kind)
    encoders, trusted = Encoders(config, CPU), TrustedBatches(8)
    plain = load_text_encoder(config.text, CPU)
    entries = dict(encode_texts(encoders, trusted, iter(["", *CAPTIONS])))
    assert sorted(entries) == sorted(["", *CAPTIONS])
    for caption, tensors in entries.items():
        expected = text_tensors(plain.encode([caption])[0])
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected), caption
    assert encoders.text.truncated == plain.truncated  # each caption counts once, however often it is encoded
    assert trusted.checked > 0 and trusted.batched + trusted.single >= len(entries)
    assert [len(t["embeds"]) for t in entries.values()] == sorted(len(t["embeds"]) for t in entries.values())


def test_a_caption_whose_encoding_is_not_finite_is_rejected_alone(tmp_path: Path) -> None:
    text = f"text={{kind: transformers, pretrained: {save_spoiled_text_encoder(tmp_path)}, max_tokens: 12}}"
    config = small_config(tmp_path, text, "preprocess.text_dtype=bfloat16")
    entries = dict(encode_texts(Encoders(config, CPU), TrustedBatches(4), ["", *CAPTIONS]))
    failed = {caption for caption, tensors in entries.items() if isinstance(tensors, Rejected)}
    assert failed == {caption for caption in CAPTIONS if "rabbit" in caption} and 0 < len(failed) < len(CAPTIONS)
    assert {t["embeds"].dtype for t in entries.values() if not isinstance(t, Rejected)} == {torch.bfloat16}
    one = entries["a rabbit"]
    assert isinstance(one, Rejected) and one.reason is Reason.CAPTION_FAILED
    assert one.detail == "the text encoder's numbers for 'a rabbit' are not finite"


def test_an_empty_caption_whose_encoding_is_not_finite_is_an_error(tmp_path: Path) -> None:
    encoders = Encoders(text_config(tmp_path, "bert"), CPU)
    with torch.no_grad():
        next(encoders.text.model.parameters()).fill_(float("nan"))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"output for the empty caption is not finite: try text\.dtype: float32$"):
        dict(encode_texts(encoders, TrustedBatches(1), ["a rabbit", ""]))


def clip(number: int) -> Clip:
    source = Source(f"{number}.mp4", f"{number}.mp4", None, None, "video", ("a rabbit",), "train")
    return Clip(source, BUCKET, (0, 2, 4, 6, 8), (0, 0, 32, 16), f"c{number}", 8.0, 0.625)


def videos(count: int) -> list[tuple[Clip, np.ndarray]]:
    generator = np.random.default_rng(0)
    shape = (BUCKET.frames, BUCKET.height, BUCKET.width, 3)
    return [(clip(number), generator.integers(0, 256, shape, np.uint8)) for number in range(count)]


@pytest.fixture
def wan(tmp_path: Path) -> Config:
    return small_config(tmp_path, f"vae={{kind: diffusers, pretrained: {save_tiny_vae(tmp_path / 'vae')}}}", clips=1)


def test_latents_in_batches_are_the_bits_of_latents_one_by_one(wan: Config) -> None:
    encoders, trusted, clips = Encoders(wan, CPU), TrustedBatches(4), videos(7)
    entries = encode_latents(encoders, trusted, clips)
    alone = [encode_latents(encoders, TrustedBatches(1), [one])[0] for one in clips]
    for one, other in zip(entries, alone, strict=True):
        assert isinstance(one, dict) and isinstance(other, dict) and set(one) == {"mean", "logvar"}
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in one.values())  # not a batch's
    assert trusted.checked == 2 and encode_latents(encoders, trusted, []) == []
    encode_latents(encoders, trusted, clips)
    assert trusted.batched + trusted.single == 14


def test_batches_are_compared_before_they_are_rounded(tmp_path: Path, wan: Config) -> None:
    """A few clips may round to equal bfloat16 although float32 differs, and the next ones not."""
    config = wan.model_copy(update={"preprocess": wan.preprocess.model_copy(update={"latent_dtype": "bfloat16"})})
    counts = []
    for one in (wan, config):
        trusted = TrustedBatches(4)
        entries = encode_latents(Encoders(one, CPU), trusted, videos(4))
        counts.append(trusted.counts)
    assert counts[0] == counts[1]
    assert all(isinstance(m, dict) and m["mean"].dtype == torch.bfloat16 for m in entries)


def test_a_clip_that_cannot_be_encoded_takes_no_other_along(wan: Config) -> None:
    encoders, clips = Encoders(wan, CPU), videos(3)
    weight = next(encoders.codec.vae.parameters())  # type: ignore[attr-defined]
    short = clip(9), np.zeros((4, 16, 32, 3), np.uint8)  # no frames of a causal codec
    entries = encode_latents(encoders, TrustedBatches(4), [*clips, short])
    assert [type(result) for result in entries] == [dict, dict, dict, Rejected]
    with torch.no_grad():
        weight.fill_(float("nan"))
    (broken,) = encode_latents(encoders, TrustedBatches(1), clips[:1])
    assert isinstance(broken, Rejected) and broken.reason is Reason.ENCODE_FAILED
    assert broken.detail == "the codec's mean holds numbers that are not finite"


def test_encoders_are_known_without_being_loaded_and_can_be_freed(wan: Config, tmp_path: Path) -> None:
    encoders = Encoders(wan, CPU)
    keys = encoders.latent_key(clip(1)), encoders.text_key("a rabbit"), encoders.text_width
    assert encoders.loaded == ()
    assert (encoders.codec.fingerprint, encoders.text.fingerprint, encoders.text.width) == (
        encoders.codec_fingerprint,
        encoders.text_fingerprint,
        encoders.text_width,
    )
    assert encoders.loaded == ("codec", "text")
    assert (encoders.channels, encoders.strides.temporal, encoders.strides.spatial) == (4, 4, 8)
    encoders.free("text")
    assert encoders.loaded == ("codec",)
    before, after = encoders.free()
    assert encoders.loaded == () and before > 0 and after > 0
    assert encoders.channels == 4 and encoders.loaded == ()
    assert keys == (encoders.latent_key(clip(1)), encoders.text_key("a rabbit"), encoders.text_width)
    encode_latents(encoders, TrustedBatches(1), videos(1))  # loaded again when it is needed again
    assert encoders.loaded == ("codec",)


def test_entries_are_stored_in_the_background_and_errors_come_back(wan: Config, tmp_path: Path) -> None:
    encoders = Encoders(wan, CPU)
    clips = videos(5)
    entries = encode_latents(encoders, TrustedBatches(1), clips)
    root = tmp_path / "stored"
    with CacheWriter(root) as writer:
        with BackgroundWriter(writer, depth=2) as store:
            for (one, _), tensors in zip(clips, entries, strict=True):
                assert isinstance(tensors, dict)
                entry = latent_entry(encoders, one, tensors)
                assert not store.has("latents", entry["key"])
                store.add(**entry)
                assert store.has("latents", entry["key"])
            text = text_entry(encoders, "a rabbit", {"embeds": torch.zeros(3, 8)})
            assert text["tokens"] == 3
            store.add(**text)
        keys = {encoders.latent_key(one) for one, _ in clips}
        assert len(keys) == 5 and all(writer.has("latents", key) for key in keys) and writer.has("texts", text["key"])
    with CacheWriter(root) as writer:
        store = BackgroundWriter(writer, depth=1)
        bad = latent_entry(encoders, replace(clip(8), bucket=BUCKET), {"mean": torch.zeros(1)}) | {"key": "no key"}
        with pytest.raises(ValueError, match="no entry of section 'latents' with key 'no key'"):
            for _ in range(100):  # at the latest when the thread has met it; nobody waits for room for ever
                store.add(**bad)
        with pytest.raises(ValueError, match="no key"):
            store.close()


def test_a_failing_device_is_no_fault_of_a_file(wan: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders = Encoders(wan, CPU)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("NPU error: the device is gone")

    monkeypatch.setattr(encoders.codec.vae, "encode", broken)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"the device failed while encoding 0.mp4 \(NPU error"):
        encode_latents(encoders, TrustedBatches(2), videos(2))
