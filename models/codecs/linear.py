"""The built-in video codec: a causal linear autoencoder of stride 4 x 8 x 8, fitted in closed form.

The first frame is cut into 8 x 8 patches, later frames into 4 x 8 x 8 patches, and each patch is projected on the
leading principal components of patches like it (Pearson 1901; Hotelling 1933). No download, a few seconds to fit.

Legend: B batch, C latent channels, F H W frames, height, width in pixels, T h w latent; R colour channels (3);
P numbers in a patch (3 * 8 * 8 in an image patch, four times that in a video patch), M patches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mmspeed import rng
from mmspeed.data.cache.files import write_whole
from mmspeed.data.cache.seals import BLANK, is_sealed, seal
from mmspeed.errors import UserError
from mmspeed.protocols import Posterior
from mmspeed.shapes import Bucket, Strides

STRIDES = Strides(temporal=4, spatial=8)
COLOURS = 3
MAX_CHANNELS = COLOURS * STRIDES.spatial**2  # the image basis has no more components
PATCHES_PER_CLIP = 4096  # of each kind, spread over the clip: more would cost time and change nothing that can be seen
SMALLEST_STD = 1e-3  # of the largest: channels without content are not blown up
FORMAT = "mmspeed.linear_codec/1"


@dataclass(frozen=True)
class Basis:
    """A linear map from patches to latents and back: `(patch - mean) @ components / scale`."""

    mean_P: Tensor
    components_PC: Tensor
    scale_C: Tensor

    def to(self, device: torch.device) -> Basis:
        return Basis(self.mean_P.to(device), self.components_PC.to(device), self.scale_C.to(device))

    def encode(self, patches_MP: Tensor) -> Tensor:
        """Latents (..., C) of patches (..., P)."""
        return (patches_MP - self.mean_P) @ (self.components_PC / self.scale_C)

    def decode(self, latents_MC: Tensor) -> Tensor:
        """Patches (..., P) of latents (..., C)."""
        return latents_MC @ (self.components_PC * self.scale_C).T + self.mean_P


class LinearCodec:
    """A `VideoCodec` of two bases, one for first frames and images, one for the groups of four frames after them."""

    strides = STRIDES

    def __init__(self, image: Basis, video: Basis, whitening: float) -> None:
        self.image, self.video, self.whitening = image, video, whitening
        self.channels = image.scale_C.numel()
        self.fingerprint = _fingerprint(self._tensors())

    @classmethod
    def fit(cls, videos: Iterable[Tensor], channels: int, whitening: float = 0.5) -> LinearCodec:
        """The codec of `channels` latent channels with the least squared error on `videos`, each (3, F, H, W) in [-1, 1].

        One pass, in float64. Images (F = 1) count for the image basis only; when there are images alone, videos are
        coded as still pictures. `whitening` in [0, 1] sets the amplitude of each channel: its standard deviation
        becomes std ** (1 - whitening) times one factor for all channels, which makes the mean variance 1. At 0 the
        squared error of latents is the squared error of pixels; at 1 every channel counts as much as the strongest.
        Raises UserError when there are no videos or `channels` is not in 1..192.
        """
        if not 1 <= channels <= MAX_CHANNELS:
            raise UserError(f"vae.channels is {channels}: the linear codec has 1 to {MAX_CHANNELS}")
        if not 0 <= whitening <= 1:
            raise UserError(f"whitening is {whitening}: it goes from 0 to 1")
        image, video = _Moments(MAX_CHANNELS), _Moments(MAX_CHANNELS * STRIDES.temporal)
        for video_RFHW in videos:
            fitting_RFHW = _cut_to_strides(video_RFHW)
            image.add(_spread(cut_patches(fitting_RFHW, 1)))
            image.add(_spread(cut_patches(fitting_RFHW[:, :1], 1)))  # first frames count more: they use this basis
            if fitting_RFHW.shape[1] > 1:
                video.add(_spread(cut_patches(fitting_RFHW[:, 1:], STRIDES.temporal)))
        if image.count == 0:
            raise UserError("the linear codec has no clips to be fitted on: none of the sources could be decoded")
        if video.count == 0:
            video = image.standing(STRIDES.temporal)
        image_sign_P, video_sign_P = _sign_references()
        return cls(
            _principal_basis(image, channels, whitening, image_sign_P),
            _principal_basis(video, channels, whitening, video_sign_P),
            whitening,
        )

    def to(self, device: torch.device) -> LinearCodec:
        """The same codec with its bases on `device`."""
        return LinearCodec(self.image.to(device), self.video.to(device), self.whitening)

    def encode(self, video_BCFHW: Tensor) -> Posterior:
        """Latents (B, C, 1 + (F - 1) / 4, H / 8, W / 8), float32. Raises ValueError when the strides do not divide."""
        STRIDES.latent(Bucket(*video_BCFHW.shape[2:]))
        # One by one: a matrix product of another shape may round differently, and latents must not depend on the batch.
        return Posterior(torch.stack([self._encode_one(video_RFHW) for video_RFHW in video_BCFHW]))

    def decode(self, latents_BCThw: Tensor) -> Tensor:
        """Pixels (B, 3, F, H, W) in [-1, 1], float32."""
        return torch.stack([self._decode_one(latents_CThw) for latents_CThw in latents_BCThw]).clamp(-1, 1)

    def _encode_one(self, video_RFHW: Tensor) -> Tensor:
        video_RFHW = video_RFHW.to(self.image.mean_P)
        first_1hwC = self.image.encode(cut_patches(video_RFHW[:, :1], 1))
        later_ThwC = self.video.encode(cut_patches(video_RFHW[:, 1:], STRIDES.temporal))
        return torch.cat([first_1hwC, later_ThwC]).permute(3, 0, 1, 2).contiguous()

    def _decode_one(self, latents_CThw: Tensor) -> Tensor:
        latents_ThwC = latents_CThw.to(self.image.mean_P).permute(1, 2, 3, 0)
        first_R1HW = join_patches(self.image.decode(latents_ThwC[:1]), 1)
        later_RFHW = join_patches(self.video.decode(latents_ThwC[1:]), STRIDES.temporal)
        return torch.cat([first_R1HW, later_RFHW], dim=1)

    def _tensors(self) -> dict[str, Tensor]:
        named = {
            f"{part}.{name}": tensor
            for part in ("image", "video")
            for name, tensor in vars(getattr(self, part)).items()
        }
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def save(self, path: Path) -> None:
        """Write the codec to one sealed safetensors file, whole or not at all; an existing file stays."""
        facts = {"format": FORMAT, "whitening": json.dumps(self.whitening), "fingerprint": self.fingerprint}
        write_whole(path, seal(save(self._tensors(), {**facts, "seal": BLANK})), replace=False)

    @classmethod
    def load(cls, path: Path) -> LinearCodec:
        """The codec in a file of `save`, on the CPU. Raises UserError for a missing, damaged or foreign file."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path} is no linear codec of this version; fit it again with `mmspeed preprocess`")
            if "seal" in metadata and not is_sealed(path.read_bytes()):
                raise UserError(
                    f"{path} is damaged: replace it by an intact copy; a newly fitted codec would make every latent stale"
                )
            bases = [Basis(**{n: tensors[f"{part}.{n}"] for n in Basis.__annotations__}) for part in ("image", "video")]
            return cls(bases[0], bases[1], json.loads(metadata["whitening"]))
        except FileNotFoundError:
            raise UserError(f"{path}: no such codec file; `mmspeed preprocess` fits one") from None
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(f"{path} cannot be read as a codec: {error}") from None


def cut_patches(video_RFHW: Tensor, frames: int) -> Tensor:
    """Patches (F / frames, H / 8, W / 8, P) of a video, P running over colour, frame, row and column."""
    colours, total, height, width = video_RFHW.shape
    s = STRIDES.spatial
    split = video_RFHW.reshape(colours, total // frames, frames, height // s, s, width // s, s)
    return split.permute(1, 3, 5, 0, 2, 4, 6).reshape(
        total // frames, height // s, width // s, colours * frames * s * s
    )


def join_patches(patches_ThwP: Tensor, frames: int) -> Tensor:
    """The inverse of `cut_patches`: a video (3, F, H, W)."""
    t, h, w, _ = patches_ThwP.shape
    s = STRIDES.spatial
    split = patches_ThwP.reshape(t, h, w, COLOURS, frames, s, s)
    return split.permute(3, 0, 4, 1, 5, 2, 6).reshape(COLOURS, t * frames, h * s, w * s)


class _Moments:
    """Streaming first and second moments of patches, in float64 on the CPU."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.sum_P = torch.zeros(width, dtype=torch.float64)
        self.product_PP = torch.zeros(width, width, dtype=torch.float64)

    def add(self, patches_MP: Tensor) -> None:
        patches_MP = patches_MP.to("cpu", torch.float64)
        self.count += patches_MP.shape[0]
        self.sum_P += patches_MP.sum(0)
        self.product_PP += patches_MP.T @ patches_MP

    def standing(self, frames: int) -> _Moments:
        """The moments of the same patches, each shown for `frames` frames."""
        repeated = _Moments(self.sum_P.numel() * frames)
        index_P = torch.arange(self.sum_P.numel()).reshape(COLOURS, 1, -1).expand(-1, frames, -1).flatten()
        repeated.count = self.count
        repeated.sum_P = self.sum_P[index_P]
        repeated.product_PP = self.product_PP[index_P][:, index_P]
        return repeated


def _cut_to_strides(video_RFHW: Tensor) -> Tensor:
    """The video cropped to whole patches in frames, rows and columns."""
    if video_RFHW.ndim != 4 or video_RFHW.shape[0] != COLOURS:
        raise ValueError(f"a video is (3, F, H, W), not {tuple(video_RFHW.shape)}")
    frames = 1 + (video_RFHW.shape[1] - 1) // STRIDES.temporal * STRIDES.temporal
    height, width = (size // STRIDES.spatial * STRIDES.spatial for size in video_RFHW.shape[2:])
    return video_RFHW[:, :frames, :height, :width]


def _spread(patches_ThwP: Tensor) -> Tensor:
    """Patches of a clip, evenly spread over it, `PATCHES_PER_CLIP` at most."""
    patches_MP = patches_ThwP.flatten(0, 2)
    if patches_MP.shape[0] <= PATCHES_PER_CLIP:
        return patches_MP
    return patches_MP[torch.linspace(0, patches_MP.shape[0] - 1, PATCHES_PER_CLIP).long()]


def _sign_references() -> tuple[Tensor, Tensor]:
    """Fixed directions that determine the signs of components, for images and for videos.

    The sign of an eigenvector is arbitrary. Random directions are never orthogonal to one, unlike the sum or the largest
    entry of a symmetric component; the video's direction is nearly the image's, repeated, so that a component of a
    still picture has the sign of the image component of the same picture.
    """
    image_P = rng.normal((MAX_CHANNELS,), 0, "linear codec signs", "image").double()
    moving_P = rng.normal((MAX_CHANNELS * STRIDES.temporal,), 0, "linear codec signs", "video").double()
    standing_P = image_P.reshape(COLOURS, 1, -1).expand(-1, STRIDES.temporal, -1).flatten()
    return image_P, standing_P + 0.01 * moving_P


def _principal_basis(moments: _Moments, channels: int, whitening: float, sign_P: Tensor) -> Basis:
    """The leading principal components of the patches, and their scales."""
    mean_P = moments.sum_P / moments.count
    covariance_PP = moments.product_PP / moments.count - torch.outer(mean_P, mean_P)
    variances_P, vectors_PP = torch.linalg.eigh(covariance_PP)  # ascending
    components_PC = vectors_PP.flip(1)[:, :channels]
    signs_C = torch.where(sign_P @ components_PC < 0, -1.0, 1.0).double()
    std_C = variances_P.flip(0)[:channels].clamp_min(0).sqrt()
    return Basis(mean_P.float(), (components_PC * signs_C).float().contiguous(), _scales(std_C, whitening).float())


def _scales(std_C: Tensor, whitening: float) -> Tensor:
    """The divisors (C) of latents of standard deviations `std_C` that make their mean variance 1."""
    if float(std_C.max()) == 0:
        return torch.ones_like(std_C)  # clips of a single colour have no variance to scale
    floored_C = std_C.clamp_min(SMALLEST_STD * float(std_C.max()))
    power_C = floored_C**whitening
    return power_C * ((std_C / power_C) ** 2).mean().sqrt()


def _fingerprint(tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of the tensors' names, shapes and bytes."""
    digest = hashlib.sha256(FORMAT.encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
