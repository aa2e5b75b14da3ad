"""Draw a stored latent, decoded, beside the source frames that it encodes.

Legend: F frames, H W height and width in pixels, C channels, T h w latent.
"""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont

from mmspeed.config import Config, make_config, video_config
from mmspeed.data import DatasetCache, Entry, Sample
from mmspeed.data.cache.codec_file import own_codec
from mmspeed.data.cache.files import write_whole
from mmspeed.device import pick
from mmspeed.errors import UserError
from mmspeed.models.codecs.vae import load_codec
from mmspeed.preprocess.decoding.clips import BLANK
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Frames, Selected
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.preprocess.decoding.transform import grey_frames
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.protocols import VideoCodec
from mmspeed.shapes import Bucket

COLUMNS = 8  # frames shown, at most
MOST_LATENTS = 4  # of a sample with several windows or crops
_CELL, _GAP, _LINE, _MARGIN = 208, 4, 20, 12  # pixels
_RECORDED = ("seed", "data", "vae", "preprocess")  # sections by which sources are read and latents decoded


def draw_entry(cache: DatasetCache, key: str, path: Path) -> str:
    """Write the picture of a latent, or of a sample's latents, as PNG; return one line about it.

    Raises UserError if the key is unknown, the codec is unavailable, or `path` cannot be written.
    """
    sample = next((s for s in cache.samples if key == s.key or key in s.keys("latents")), None)
    keys = sample.keys("latents") if sample is not None and sample.key == key else (key,)
    config = stored_config(cache)
    codec = _codec(cache, config)
    recipe = Recipe.of(config, root=Path(cache.root))
    rows: list[tuple[str, np.ndarray | str]] = []
    descriptions = []
    for latent_key in keys[:MOST_LATENTS]:
        entry = cache.entry(latent_key, "latents")
        decoded_FHWC = decode_latent(cache, codec, entry)
        source = sample.source if sample is not None else entry.source  # an entry may have an older file name
        source_pixels = source_frames(config, source, entry, recipe)
        closeness = f", without its source: {source_pixels}" if isinstance(source_pixels, str) else ""
        if isinstance(source_pixels, np.ndarray):
            closeness = f", {_psnr(decoded_FHWC, source_pixels):.1f} dB from the source"
        suffix = "" if isinstance(source_pixels, str) else closeness
        rows.append((f"{latent_key}  decoded, {entry.bucket}{suffix}", decoded_FHWC))
        rows.append((f"{source or 'source unknown'}, its frames {_ranges(entry.frames)}", source_pixels))
        repeats = f" ({entry.repeated} repeated)" if entry.repeated else ""
        descriptions.append(f"{len(decoded_FHWC)} frames{repeats} of {latent_key}{closeness}")
    picture = io.BytesIO()
    contact_sheet(rows, captions_of(cache, sample)).save(picture, format="PNG")
    write_whole(path, picture.getvalue())
    return "; ".join(descriptions)


def stored_config(cache: DatasetCache) -> Config:
    """The config that the cache was built with, in what entries depend on. Raises UserError if cache.json does not hold one."""
    text = cache.info.get("config")
    if not isinstance(text, str):
        raise UserError(f"cache {cache.root} does not record the config that it was built with")
    tree = {name: section for name, section in yaml.safe_load(text).items() if name in _RECORDED}
    origin = f"the config in {cache.root / 'cache.json'}"
    return video_config(make_config(tree, origin=origin), origin)


def _codec(cache: DatasetCache, config: Config) -> VideoCodec:
    """The codec that decodes the cache's latents. Raises UserError if it is missing, or not the one that encoded them."""
    codec_file = own_codec(cache.info)
    codec = load_codec(config.vae, pick("cpu"), cache.root / codec_file if codec_file is not None else None)
    fingerprint = cache.info["encoders"]["vae"]["fingerprint"]
    if codec.fingerprint != fingerprint:
        raise UserError(
            f"the latents were encoded with the codec {fingerprint[:12]}, and {config.vae.kind} now loads "
            f"{codec.fingerprint[:12]}: restore the first one"
        )
    return codec


def decode_latent(cache: DatasetCache, codec: VideoCodec, entry: Entry) -> np.ndarray:
    """The stored mean as frames (F, H, W, 3) uint8. Raises UserError if the entry was encoded with another codec."""
    fingerprint = json.loads(entry.meta).get("codec", codec.fingerprint)
    if fingerprint != codec.fingerprint:
        raise UserError(f"{entry.key} was encoded with the codec {fingerprint[:12]}, not with {codec.fingerprint[:12]}")
    with torch.inference_mode():
        video_CFHW = codec.decode(cache.latent(entry.key)["mean"].float()[None])[0]
    pixels_FHWC = ((video_CFHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)
    return pixels_FHWC.contiguous().cpu().numpy()


def source_frames(config: Config, name: str | None, entry: Entry, recipe: Recipe | None = None) -> np.ndarray | str:
    """The pixels that an entry encodes, (F, H, W, 3) uint8, decoded by the cache's `recipe`; or the reason that there are none."""
    if entry.content_id == BLANK:
        return grey_frames(Bucket.parse(entry.bucket or "")).astype(np.uint8)
    if name is None:
        return "the index does not record the source"
    try:
        source = next((s for s in list_sources(config.data).sources if s.name == name), None)
    except UserError as error:
        return str(error)
    if source is None:
        return f"{name} is no longer among the config's sources"
    key_parts = json.loads(entry.meta)
    reason = "the config now selects other frames of it"
    with DecodePool(config, [source], recipe) as pool:
        for event in pool.run(
            lambda clip: (
                clip.content_id == entry.content_id
                and clip.bucket.name == entry.bucket
                and tuple(clip.indices) == entry.frames
                and list(clip.crop) == key_parts.get("crop", list(clip.crop))
                and clip.mirrored == key_parts.get("mirrored", False)
            )
        ):
            if isinstance(event, Frames):
                return event.frames_FHWC
            if isinstance(event, Failed):
                reason = f"{event.rejected.reason.value}: {event.rejected.detail}"
            elif isinstance(event, Selected) and entry.content_id not in {
                each.content_id for clip in event.clips for each in clip.all
            }:
                reason = "the file has changed"
    return reason


def captions_of(cache: DatasetCache, sample: Sample | None) -> list[str]:
    """The captions of a sample, as encoded."""
    if sample is None:
        return ["no current sample has this latent"]
    captions = [str(json.loads(cache.entry(key, "texts").meta).get("caption", key)) for key in sample.text_keys]
    return captions or ["without a caption"]


def contact_sheet(rows: Sequence[tuple[str, np.ndarray | str]], captions: Sequence[str]) -> Image.Image:
    """Rows of frames under their labels, with captions below; in place of missing frames, a grey strip gives the reason."""
    clips = [frames for _, frames in rows if isinstance(frames, np.ndarray)]
    count = max(min(COLUMNS, len(frames)) for frames in clips)
    height, width = clips[0].shape[1:3]
    scale = min(_CELL / width, _CELL / height)
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    inner = max(count * (cell[0] + _GAP) - _GAP, 640)
    font = ImageFont.load_default(13)
    letters = int(inner / font.getlength("n"))
    below = [line for text in captions for line in textwrap.wrap(text, letters) or [""]]
    total = _MARGIN * 2 + len(rows) * (_LINE + cell[1] + _MARGIN) + len(below) * _LINE
    sheet = Image.new("RGB", (inner + 2 * _MARGIN, total), "white")
    draw, y = ImageDraw.Draw(sheet), _MARGIN
    for label, frames in rows:
        draw.text((_MARGIN, y), textwrap.shorten(label, letters + 20, placeholder="..."), fill="black", font=font)
        y += _LINE
        if isinstance(frames, str):
            draw.rectangle((_MARGIN, y, _MARGIN + inner - 1, y + cell[1] - 1), fill="lightgrey")
            draw.text((_MARGIN * 2, y + cell[1] // 2 - 8), textwrap.shorten(frames, letters), fill="black", font=font)
        else:
            for column, index in enumerate(evenly(len(frames), count)):
                picture = Image.fromarray(frames[index]).resize(cell, Image.Resampling.LANCZOS)
                sheet.paste(picture, (_MARGIN + column * (cell[0] + _GAP), y))
        y += cell[1] + _MARGIN
    for line in below:
        draw.text((_MARGIN, y), line, fill="black", font=font)
        y += _LINE
    return sheet


def evenly(total: int, count: int) -> list[int]:
    """`count` indices of `total` frames, or all of fewer, from first to last."""
    return sorted({int(i) for i in np.linspace(0, total - 1, min(count, total)).round()})


def _psnr(one_FHWC: np.ndarray, other_FHWC: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of two clips of the same shape; infinite if they are equal."""
    error = float(np.mean((one_FHWC.astype(np.float32) - other_FHWC.astype(np.float32)) ** 2))
    return 10 * float(np.log10(255.0**2 / error)) if error else float("inf")


def _ranges(frames: Sequence[int]) -> str:
    """Frame numbers, abbreviated: `0, 3, 6 ... 24`."""
    numbers = [str(frame) for frame in frames]
    return ", ".join(numbers) if len(numbers) <= 6 else f"{', '.join(numbers[:3])} ... {numbers[-1]}"
