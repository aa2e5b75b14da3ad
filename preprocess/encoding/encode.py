"""Encode clips and captions, with encoders loaded on demand, in batches that give the same bits as one by one.

Legend: B batch, C latent channels, F H W frames, height, width in pixels, T h w latent; L caption tokens.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmspeed.config import Config
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.data.cache.keys import entry_key
from mmspeed.data.cache.payloads import not_finite
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.device import Device, is_device_fault, parse_dtype
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected, in_words
from mmspeed.models.codecs.frames import frame_latents
from mmspeed.models.codecs.vae import codec_geometry, codec_identity, load_codec
from mmspeed.models.image_encoder import ImageEncoder, image_embeddings, image_fingerprint, load_image_encoder
from mmspeed.models.sections import stored_conditions
from mmspeed.models.text.encoders import (
    TransformersEncoder,
    load_text_encoder,
    sees_pictures,
    text_identity,
    text_width,
)
from mmspeed.models.text.family import FamilyTextEncoder
from mmspeed.preprocess.decoding.clips import BLANK, Clip
from mmspeed.preprocess.decoding.transform import to_model_range
from mmspeed.preprocess.records.keys import latent_parts, text_parts
from mmspeed.protocols import Posterior, TextEntry, VideoCodec
from mmspeed.protocols.calls import IMAGES
from mmspeed.shapes import Strides

Item = TypeVar("Item")
Result = TypeVar("Result")
Encode = Callable[[Sequence[Item]], Sequence[Result]]
Equal = Callable[[Result, Result], bool]
Tensors = dict[str, Tensor]  # of an entry, by the names that the reader knows

NAMES = ("codec", "text", "image")  # of encoders
CAPTIONS_AT_ONCE = 4096  # sorted by length together; bounds the memory


class Encoders:
    """The codec, the text encoder and, where its model needs one, the image encoder of a config on a device, loaded at their first use.

    Fingerprints, the text's width, and of the linear codec the geometry too, are read from files without loading. Raises
    UserError at the first use of a missing or unreadable encoder.
    """

    def __init__(self, config: Config, device: Device) -> None:
        self.config, self.device = config, device
        self._codec: VideoCodec | None = None
        self._text: TransformersEncoder | FamilyTextEncoder | None = None
        self._image: ImageEncoder | None = None
        self._known: dict[str, Any] = {}

    @property
    def codec(self) -> VideoCodec:
        """The codec, loaded at first use."""
        if self._codec is None:
            self._codec = load_codec(self.config.vae, self.device, self.config.codec_weights)
            self._known["geometry"] = self._codec.channels, self._codec.strides
        return self._codec

    @property
    def text(self) -> TransformersEncoder | FamilyTextEncoder:
        """The text encoder, loaded at first use."""
        if self._text is None:
            self._text = load_text_encoder(self.config.text, self.device)
        return self._text

    @property
    def image(self) -> ImageEncoder:
        """The image encoder of the model's repository, loaded at first use."""
        if self._image is None:
            assert isinstance(self.config.model, PublishedModelConfig)  # others take no embeddings
            self._image = load_image_encoder(self.config.model, self.device)
        return self._image

    @property
    def loaded(self) -> tuple[str, ...]:
        """The encoders in memory, of `codec`, `text` and `image`."""
        return tuple(name for name in NAMES if getattr(self, f"_{name}") is not None)

    @property
    def codec_fingerprint(self) -> str:
        """Fingerprint of the codec's weights and settings; the linear codec must have been fitted."""
        return self._once("codec", lambda: codec_identity(self.config.vae, self.config.codec_weights))

    @property
    def text_fingerprint(self) -> str:
        """Fingerprint of the text encoder's weights, tokenizer and settings."""
        return self._once("text", lambda: text_identity(self.config.text))

    @property
    def image_fingerprint(self) -> str | None:
        """Fingerprint of the image encoder; None where nothing of it is stored."""
        return self._once("image", lambda: image_fingerprint(self.config))

    @property
    def text_width(self) -> int:
        """Width of a caption's embeddings."""
        return self._once("width", lambda: text_width(self.config.text))

    @property
    def channels(self) -> int:
        """Latent channels. A codec of diffusers is loaded for this, and stays loaded."""
        return self._geometry()[0]

    @property
    def strides(self) -> Strides:
        """Strides of the codec. A codec of diffusers is loaded for this, and stays loaded."""
        return self._geometry()[1]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of what the config's model needs of conditioning frames beside a clip's own latents: further latents, and embeddings."""
        return self._once("conditions", lambda: stored_conditions(self.config))

    def latent_key(self, clip: Clip) -> str:
        """The key of a clip's entry."""
        return entry_key(self.latent_parts(clip))

    def latent_parts(self, clip: Clip) -> dict[str, Any]:
        """The parts of the key of a clip's entry."""
        return latent_parts(self.config, self.codec_fingerprint, clip, self.conditions, self.image_fingerprint)

    @property
    def sees_pictures(self) -> bool:
        """True where the entry of a caption depends on its clip's first frame, too."""
        return self._once("pictures", lambda: sees_pictures(self.config.text))

    def text_key(self, caption: str, clip: Clip | None = None) -> str:
        """The key of a caption's entry, also of the empty one; `clip`: whose caption it is, None for the empty one of training."""
        return entry_key(self.text_parts(caption, clip))

    def text_parts(self, caption: str, clip: Clip | None = None) -> dict[str, Any]:
        """The parts of the key of a caption's entry."""
        return text_parts(self.config, self.text_fingerprint, caption, clip if self.sees_pictures else None)

    def free(self, *names: str) -> tuple[int, int]:
        """Drop the encoders of these names (default: all); return bytes of device memory in use before and after.

        Fingerprints, width and geometry stay known. On CPU the bytes are the process's resident memory.
        """
        before = self.device.memory_bytes()
        for name in names or NAMES:
            setattr(self, f"_{name}", None)
        gc.collect()  # modules have reference cycles
        self.device.empty_cache()
        return before, self.device.memory_bytes()

    def _geometry(self) -> tuple[int, Strides]:
        if self.config.vae.kind == "linear":
            return codec_geometry(self.config.vae)
        if "geometry" not in self._known:
            _ = self.codec
        return self._known["geometry"]

    def _once(self, name: str, read: Callable[[], Any]) -> Any:
        if name not in self._known:
            self._known[name] = read()
        return self._known[name]


class TrustedBatches:
    """Divide work into batches, and use a batch only if it gives the same bits as one by one.

    This depends on the device, its libraries, the shape of an item and the size of the batch, so each pair of shape and size is
    tried once, on real items, and then trusted or not for the life of this object. Results are those of one by one.

    Args:
        limit: largest batch; batches are powers of two. Halved when a batch does not fit in the device's memory.
        exact: False uses every batch untried: the last bits of a result then depend on the others in its batch.
    """

    def __init__(self, limit: int, exact: bool = True) -> None:
        self.limit, self.exact = max(1, limit), exact
        self.batched = self.single = self.checked = self.distrusted = self.halved = 0
        self._trusted: dict[tuple[Hashable, int], bool] = {}

    @property
    def counts(self) -> Counter[str]:
        """Items `batched` and `single`; pairs of shape and size `checked` and `distrusted`; times the limit was `halved`."""
        names = ("batched", "single", "checked", "distrusted", "halved")
        return Counter({name: getattr(self, name) for name in names})

    def encode(
        self, items: Sequence[Item], shape: Hashable, encode: Encode[Item, Result], equal: Equal[Result]
    ) -> list[Result]:
        """The result of each item, in order. All items have one shape; `encode` takes any number of them."""
        results: list[Result] = []
        while len(results) < len(items):
            remaining = items[len(results) :]
            size = 1 << (min(self.limit, len(remaining)).bit_length() - 1)
            results += self._batch(remaining[:size], shape, encode, equal)
        return results

    def _batch(
        self, items: Sequence[Item], shape: Hashable, encode: Encode[Item, Result], equal: Equal[Result]
    ) -> Sequence[Result]:
        """One batch's results; none if it did not fit in the device's memory, and the limit was lowered."""
        pair = shape, len(items)
        if len(items) == 1 or self._trusted.get(pair) is False:
            return self._one_by_one(items, encode)
        try:
            together = encode(items)
        except (RuntimeError, ValueError, MemoryError) as error:
            if is_memory_full(error):
                self.limit = len(items) // 2
                self.halved += 1
                return []
            # An item that cannot be encoded must not fail the others of its batch; and some encoders accept no batches.
            self.distrusted += self._trusted.setdefault(pair, False) is False
            return self._one_by_one(items, encode)
        if not self.exact or self._trusted.get(pair):
            self.batched += len(items)
            return together
        alone = self._one_by_one(items, encode)
        self._trusted[pair] = all(map(equal, together, alone))
        self.checked += 1
        self.distrusted += not self._trusted[pair]
        return alone

    def _one_by_one(self, items: Sequence[Item], encode: Encode[Item, Result]) -> list[Result]:
        self.single += len(items)
        return [encode([item])[0] for item in items]


def is_memory_full(error: BaseException) -> bool:
    """True if an error means that the device or the host is out of memory."""
    kinds = tuple(kind for name in ("OutOfMemoryError",) if (kind := getattr(torch, name, None)))
    text = str(error).lower()
    return isinstance(error, (MemoryError, *kinds)) or "out of memory" in text or "can't allocate memory" in text


def encode_latents(
    encoders: Encoders, trusted: TrustedBatches, videos: Sequence[tuple[Clip, np.ndarray]]
) -> list[Tensors | Rejected]:
    """The tensors of each clip's entry, on the CPU; a Rejected with the reason for a clip that cannot be encoded.

    Args:
        encoders: the encoders, for their codec.
        trusted: one for the whole run; keeps its results of trials.
        videos: clips of one bucket with their frames (F, H, W, 3), uint8.

    Raises UserError if the device fails, which is not the fault of a file.
    """
    codec, dtype = encoders.codec, parse_dtype(encoders.config.preprocess.latent_dtype)
    whole = bool(videos) and not videos[0][0].bucket.is_image
    names = (*(["first"] if encoders.config.preprocess.first_frame else []), *encoders.conditions) if whole else ()

    def encode(some: Sequence[tuple[Clip, np.ndarray]]) -> list[Tensors | Rejected]:
        try:
            video_BCFHW = torch.stack([to_model_range(frames_FHWC) for _, frames_FHWC in some])
            encode_all = _together(codec) if len(some) > 1 else codec.encode
            others = frame_latents(video_BCFHW, names, encode_all)
            if any(name in IMAGES for name in names):
                others |= image_embeddings(encoders.image, names, [frames_FHWC for _, frames_FHWC in some])
            return _entries(encode_all(video_BCFHW), others)
        except (RuntimeError, ValueError, MemoryError) as error:
            full = is_memory_full(error)
            if (is_device_fault(error) and not full) or (full and len(some) == 1):
                raise _device_failed(some[0][0], error) from error
            if len(some) > 1:
                raise
            return [Rejected(Reason.ENCODE_FAILED, f"the encoder failed: {in_words(error)}")]

    if not videos:
        return []
    # Compared before rounding: results that round to equal values on the items of a trial may not on others.
    results = trusted.encode(videos, videos[0][0].bucket, encode, _same)
    return [r if isinstance(r, Rejected) else _rounded(r, dtype) for r in results]


def _together(codec: VideoCodec) -> Callable[[Tensor], Posterior]:
    """The codec's method that encodes several videos in one pass, if it has one; `encode` guarantees that each is encoded alone."""
    together: Callable[[Tensor], Posterior] = getattr(codec, "encode_together", codec.encode)
    return together


def _entries(posterior: Posterior, others: dict[str, Tensor]) -> list[Tensors | Rejected]:
    mean_BCThw, logvar_BCThw = posterior.mean_BCThw.cpu(), posterior.logvar_BCThw
    logvar_BCThw = None if logvar_BCThw is None else logvar_BCThw.cpu()
    entries: list[Tensors | Rejected] = []
    for index, mean_CThw in enumerate(mean_BCThw):
        logvar_CThw = None if logvar_BCThw is None else logvar_BCThw[index]
        stored = latent_tensors(mean_CThw, logvar_CThw) | {name: each[index].cpu() for name, each in others.items()}
        entries.append({name: tensor.clone() for name, tensor in stored.items()})
    return entries


def _rounded(entry: Tensors, dtype: torch.dtype) -> Tensors | Rejected:
    """An entry's tensors in the type in which they are stored; Rejected where that holds a number that is not finite."""
    stored = {name: tensor.to(dtype) for name, tensor in entry.items()}
    bad = not_finite(stored)
    if bad is None:
        return stored
    name = {"logvar": "log-variance", "first": "first frame"}.get(bad, bad)
    encoder = "image encoder" if bad in IMAGES else "codec"
    return Rejected(Reason.ENCODE_FAILED, f"the {encoder}'s {name} holds numbers that are not finite")


def _device_failed(clip: Clip, error: BaseException) -> UserError:
    return UserError(
        f"the device failed while encoding {clip.source.name} ({str(error).splitlines()[0]}); "
        "when its memory is full set vae.tiling: true, or use smaller buckets"
    )


def encode_texts(
    encoders: Encoders, trusted: TrustedBatches, captions: Iterable[str]
) -> Iterator[tuple[str, Tensors | Rejected]]:
    """Yield each caption with the tensors of its entry, the shortest first, those of one length in batches without padding.

    A caption whose numbers are not finite comes with a Rejected instead. Captions that the encoder cuts are counted in
    `encoders.text.truncated`. Raises UserError if the device fails, and if the numbers of the empty caption are not finite: every
    training needs it.
    """
    encoder, dtype = encoders.text, parse_dtype(encoders.config.preprocess.text_dtype)

    def encode(ids: Sequence[Any]) -> list[TextEntry]:
        return encoder.encode_ids(list(ids))

    def equal(one: TextEntry, other: TextEntry) -> bool:
        return _same(text_tensors(one), text_tensors(other))

    rest = iter(captions)
    while some := list(islice(rest, CAPTIONS_AT_ONCE)):
        tokens: list[tuple[Any, str]] = [(encoder.tokenize(caption), caption) for caption in some]
        rows = sorted(tokens, key=lambda row: (encoder.lengths(row[0]), row[1]))
        for length, group in groupby(rows, key=lambda row: encoder.lengths(row[0])):
            ids, names = zip(*group, strict=True)
            try:
                entries = trusted.encode(ids, length, encode, equal)
            except (RuntimeError, MemoryError) as error:
                raise UserError(f"the text encoder failed on a caption of {length[0]} tokens: {error}") from error
            for caption, entry in zip(names, entries, strict=True):
                yield caption, _stored_text(caption, entry, dtype)


def encode_seen(encoders: Encoders, captions: Sequence[str], picture_HW3: np.ndarray) -> list[Tensors | Rejected]:
    """The tensors of the entries of a clip's captions, by a text encoder that sees its first frame, uint8, beside them.

    Counts and errors are those of `encode_texts`.
    """
    encoder, dtype = encoders.text, parse_dtype(encoders.config.preprocess.text_dtype)
    assert isinstance(encoder, FamilyTextEncoder)  # others see words alone
    try:
        entries = encoder.encode(list(captions), [picture_HW3] * len(captions))
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"the text encoder failed on a caption and a picture: {error}") from error
    return [_stored_text(caption, entry, dtype) for caption, entry in zip(captions, entries, strict=True)]


def _stored_text(caption: str, entry: TextEntry, dtype: torch.dtype) -> Tensors | Rejected:
    """A caption's tensors in the type in which they are stored; Rejected where they are not finite. UserError for the empty caption."""
    stored = {name: tensor.to(dtype) for name, tensor in text_tensors(entry).items()}
    if not_finite(stored) is None:
        return stored
    if not caption:
        raise UserError("the text encoder's output for the empty caption is not finite: try text.dtype: float32")
    return Rejected(Reason.CAPTION_FAILED, f"the text encoder's numbers for {caption[:80]!r} are not finite")


def latent_entry(encoders: Encoders, clip: Clip, tensors: Tensors) -> dict[str, Any]:
    """The arguments of `CacheWriter.add` for a clip's entry: they do not depend on the process, so its bytes do not either."""
    parts = encoders.latent_parts(clip)
    return {
        "section": "latents",
        "key": entry_key(parts),
        "tensors": tensors,
        "meta": parts,
        "bucket": clip.bucket,
        "tokens": math.prod(encoders.strides.latent(clip.bucket)),
        "content_id": clip.content_id,
        "frames": list(clip.indices),
        "fps": clip.fps,
        "source": None if clip.content_id == BLANK else clip.source.name,
    }


def text_entry(
    encoders: Encoders, caption: str, tensors: Tensors, section: str = "texts", clip: Clip | None = None
) -> dict[str, Any]:
    """The arguments of `CacheWriter.add` for a caption's entry; `section` is `null` for that of the empty caption.

    clip: whose caption it is, where the encoder sees its first frame, too.
    """
    parts = encoders.text_parts(caption, clip)
    tokens = tensors["embeds"].shape[0]
    return {"section": section, "key": entry_key(parts), "tensors": tensors, "meta": parts, "tokens": tokens}


def _same(one: Tensors | Rejected, other: Tensors | Rejected) -> bool:
    """True if two results have the same bits; False if either is a failure."""
    if isinstance(one, Rejected) or isinstance(other, Rejected):
        return False
    return one.keys() == other.keys() and all(_bits(one[name]) == _bits(other[name]) for name in one)


def _bits(tensor: Tensor) -> bytes:
    """The bytes and shape of a tensor, which distinguish 0.0 from -0.0, unlike `torch.equal`."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() + str(tuple(tensor.shape)).encode()
