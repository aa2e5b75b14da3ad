"""Shapes of videos, latents and tokens, and conversions between them.

Legend: F H W frames, height, width of a video in pixels; C T h w channels, frames, height, width of a latent;
N tokens of a sample; L caption tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FAR = 32  # latent positions within which a size that fits is looked for


@dataclass(frozen=True, order=True)
class Bucket:
    """The pixel shape (F, H, W) that a sample is resized and cropped to. An image is F = 1."""

    frames: int
    height: int
    width: int

    @property
    def name(self) -> str:
        """Folder name of the bucket in the cache, such as `049x0176x0320`."""
        return f"{self.frames:03d}x{self.height:04d}x{self.width:04d}"

    @classmethod
    def parse(cls, name: str) -> Bucket:
        """The bucket of a folder name. Raises ValueError when the name is not one."""
        frames, height, width = (int(part) for part in name.split("x"))
        return cls(frames, height, width)

    @property
    def is_image(self) -> bool:
        return self.frames == 1

    @property
    def splits(self) -> bool:
        """True where a sequence-parallel group computes a sample together: a video, not an image."""
        return self.frames != 1

    @property
    def numbers(self) -> int:
        """Pixels of a sample."""
        return self.frames * self.height * self.width

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


class OtherSizeError(ValueError):
    """A latent of a size that a model does not take; `nearest` is one that it does."""

    def __init__(self, message: str, nearest: tuple[int, int, int]) -> None:
        super().__init__(message)
        self.nearest = nearest


def as_bucket(shape: object) -> Bucket:
    """The bucket that a shape class of the video task is. Raises TypeError for one of another task."""
    if not isinstance(shape, Bucket):
        raise TypeError(f"{shape} is no bucket of videos")
    return shape


@dataclass(frozen=True)
class Strides:
    """The frames (temporal) and pixels (spatial) that a latent position covers. Causal: F = 1 + k * temporal."""

    temporal: int
    spatial: int

    def latent(self, bucket: Bucket) -> tuple[int, int, int]:
        """(T, h, w) of the latent of a bucket. Raises ValueError when the bucket does not divide."""
        if (bucket.frames - 1) % self.temporal:
            lower = 1 + (bucket.frames - 1) // self.temporal * self.temporal
            raise ValueError(
                f"{bucket.frames} frames do not fit a causal codec of temporal stride {self.temporal}: "
                f"use {lower} or {lower + self.temporal}"
            )
        for label, size in (("height", bucket.height), ("width", bucket.width)):
            if size % self.spatial:
                lower = size // self.spatial * self.spatial
                raise ValueError(
                    f"{label} {size} is no multiple of the codec's spatial stride {self.spatial}: "
                    f"use {lower} or {lower + self.spatial}"
                )
        return (
            1 + (bucket.frames - 1) // self.temporal,
            bucket.height // self.spatial,
            bucket.width // self.spatial,
        )

    def pixels(self, latent: tuple[int, int, int]) -> Bucket:
        """The bucket whose latent is (T, h, w)."""
        t, h, w = latent
        return Bucket(1 + (t - 1) * self.temporal, h * self.spatial, w * self.spatial)

    def tokens(self, bucket: Bucket, count: Callable[[tuple[int, int, int]], int]) -> int:
        """Tokens of a bucket by a model's count of a latent (T, h, w).

        Raises ValueError, with the nearest sizes in frames or pixels, for a bucket that codec or model does not take.
        """
        latent = self.latent(bucket)
        try:
            return count(latent)
        except OtherSizeError as error:
            raise ValueError(f"{error} (buckets of {self.pixels(error.nearest)} fit)") from None
        except ValueError as error:
            raise ValueError(f"{error}{self._nearest(latent, count)}") from None

    def _nearest(self, latent: tuple[int, int, int], count: Callable[[tuple[int, int, int]], int]) -> str:
        """Words for the nearest sizes along the one dim that is at fault; none where several are, or nothing near fits."""
        for place, label in enumerate(("frames", "height", "width")):
            sizes = []
            for sign in (-1, 1):
                for step in range(1, min(_FAR, latent[place]) if sign < 0 else _FAR):
                    other = tuple(size + sign * step * (at == place) for at, size in enumerate(latent))
                    try:
                        count((other[0], other[1], other[2]))
                    except ValueError:
                        continue
                    sizes.append(getattr(self.pixels((other[0], other[1], other[2])), label))
                    break
            if sizes:
                return f" (buckets of {label} {' or '.join(map(str, sizes))} fit)"
        return ""
