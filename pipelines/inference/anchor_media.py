"""Images and videos that a sampled video begins with: read from files, fitted to its size, and encoded.

Legend: F frames, H W pixels, P videos of one size, C channels, T h w latent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mmspeed.config import Config
from mmspeed.config.conditioning import Mode
from mmspeed.data.loading.anchor_frames import anchor_frames, prefix_of
from mmspeed.errors import UserError
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.protocols import VideoCodec
from mmspeed.shapes import Bucket


@dataclass(frozen=True)
class Anchors:
    """Given latent frames of videos: bool (P, T), True at given ones, and latents (P, C, T, h, w) that hold them, zeros elsewhere."""

    mask_PT: Tensor
    clean_PCThw: Tensor

    def to(self, device: torch.device) -> Anchors:
        return Anchors(self.mask_PT.to(device), self.clean_PCThw.to(device))


def mode_of(request: VideoRequest, config: Config) -> Mode:
    """The mode that a request's files ask for. Raises UserError for files that do not go together, and for a mode that the run lacks."""
    if request.video is not None and (request.image is not None or request.last_image is not None):
        raise UserError("--video goes on from the end of a video: give it, or --image, not both")
    if request.last_image is not None and request.image is None:
        raise UserError("--last-image goes with --image")
    if request.prefix_frames is not None and request.video is None:
        raise UserError("--prefix-frames goes with --video")
    if request.video is None and request.image is None:
        return "none"
    mode: Mode = "prefix" if request.video is not None else "first_last" if request.last_image is not None else "first"
    shares = config.conditioning.shares
    if mode not in shares and "mask" not in shares:
        option = {"prefix": "--video", "first_last": "--last-image", "first": "--image"}[mode]
        raise UserError(
            f"{option}: the run was trained without conditioning.{mode}, so its model takes no such frames; "
            f"train with a share of it, such as `conditioning: {{{mode}: 0.5}}`"
        )
    trained = config.conditioning.prefix_frames
    if mode == "prefix" and "mask" not in shares and request.prefix_frames not in (None, trained):
        raise UserError(f"--prefix-frames {request.prefix_frames}: the run was trained to go on from {trained} frames")
    return mode


def anchors_of(requests: Sequence[VideoRequest], config: Config, codec: VideoCodec, size: Bucket) -> Anchors | None:
    """The given latents of requests of one size, on the CPU; None where they name no files.

    A last frame is encoded as the end of a video that stands still after the first one. Raises UserError for a file that cannot be read,
    and for given frames that leave nothing to make.
    """
    modes = [mode_of(request, config) for request in requests]
    if set(modes) == {"none"}:
        return None
    masks, cleans = [], []
    frames, height, width = codec.strides.latent(size)
    for request, mode in zip(requests, modes, strict=True):
        clean_CThw = torch.zeros(codec.channels, frames, height, width)
        count = request.prefix_frames or config.conditioning.prefix_frames
        prefix = prefix_of(count, codec.strides) if mode == "prefix" else 0
        mask_T = anchor_frames(mode, frames, prefix, 0, ("", 0, 0))
        if mode != "none" and bool(mask_T.all() | ~mask_T.any()):
            raise UserError(
                f"a video of {size} has {frames} latent frames: with those that are given none is to be made"
            )
        if mode == "prefix":
            pixels = video_end(Path(str(request.video)), count, config.data.fps, size)
            clean_CThw[:, :prefix] = encoded(codec, pixels)
        elif mode != "none":
            first = image_file(Path(str(request.image)), size)
            clean_CThw[:, :1] = encoded(codec, first[None])
            if mode == "first_last":
                last = image_file(Path(str(request.last_image)), size)
                stay = size.frames - codec.strides.temporal
                clean_CThw[:, -1:] = encoded(codec, np.stack([first] * stay + [last] * (size.frames - stay)))[:, -1:]
        masks.append(mask_T)
        cleans.append(clean_CThw)
    return Anchors(torch.stack(masks), torch.stack(cleans))


def encoded(codec: VideoCodec, frames_FHWC: np.ndarray) -> Tensor:
    """The mean of the latents (C, T, h, w) of frames (F, H, W, 3), uint8, on the CPU."""
    video_FHWC = torch.from_numpy(frames_FHWC.astype(np.float32)) / 127.5 - 1
    return codec.encode(video_FHWC.permute(3, 0, 1, 2)[None]).mean_BCThw[0].float().cpu()


def image_file(path: Path, size: Bucket) -> np.ndarray:
    """The picture of a file, upright, scaled to cover the size and cut around its middle: (H, W, 3), uint8. Raises UserError."""
    try:
        with Image.open(path) as image:
            return fitted(ImageOps.exif_transpose(image), size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: is no picture that can be read: {str(error).splitlines()[0]}") from None


def video_end(path: Path, count: int, fps: float | None, size: Bucket) -> np.ndarray:
    """The last `count` frames of a video, `fps` a second (None: its own), fitted to a size: (F, H, W, 3), uint8. Raises UserError."""
    kept: deque[tuple[float, Image.Image]] = deque(maxlen=count if fps is None else None)
    try:
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                time = float(number) if frame.time is None else frame.time
                picture = frame.to_image()
                kept.append((time, picture.rotate(frame.rotation, expand=True) if frame.rotation else picture))
                # one frame before the first that is taken may be the nearest to it
                while fps is not None and len(kept) > 1 and kept[1][0] <= time - (count - 1) / fps:
                    kept.popleft()
    except (OSError, av.FFmpegError, IndexError) as error:
        raise UserError(f"{path}: is no video that can be read: {str(error).splitlines()[0]}") from None
    missing = count / fps - (kept[-1][0] - kept[0][0]) > 2 / fps if fps and kept else len(kept) < count
    if missing:
        rate = "" if fps is None else f" at {fps:g} frames a second"
        raise UserError(f"{path}: is shorter than the {count} frames that are given{rate}")
    if fps is not None:
        wanted = [kept[-1][0] - (count - 1 - i) / fps for i in range(count)]
        pictures = [min(kept, key=lambda each: abs(each[0] - time))[1] for time in wanted]
    else:
        pictures = [picture for _, picture in kept]
    return np.stack([fitted(picture, size) for picture in pictures])


def fitted(picture: Image.Image, size: Bucket) -> np.ndarray:
    """A picture scaled to cover a size and cut around its middle: (H, W, 3), uint8."""
    return np.asarray(ImageOps.fit(picture.convert("RGB"), (size.width, size.height), Image.Resampling.BICUBIC))
