"""The linear codec: its error on real clips, the scale of its latents, causality and reproducibility.

Legend: B batch, C channels, F H W pixels, T h w latent; R colours.
"""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspeed import rng
from mmspeed.errors import UserError
from mmspeed.models.codecs.linear import LinearCodec

CLIPS = Path(__file__).parents[3] / "mmspeed" / "assets" / "demo-clips" / "videos"


def read_clip(path: Path, frames: int, height: int, width: int) -> Tensor:
    """The first frames of a file, resized, (3, F, H, W) in [-1, 1]."""
    with av.open(str(path)) as container:
        pictures = [
            frame.to_ndarray(format="rgb24", width=width, height=height)
            for frame, _ in zip(container.decode(video=0), range(frames), strict=False)
        ]
    return torch.from_numpy(np.stack(pictures)).permute(3, 0, 1, 2).float() / 127.5 - 1


def smooth_video(name: str, frames: int = 9, height: int = 32, width: int = 48) -> Tensor:
    """A random video whose neighbouring pixels are similar, (3, F, H, W)."""
    coarse = rng.normal((1, 3, 3, 4, 6), 0, "smooth video", name)
    return torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear")[0].mul(0.4).clamp(-1, 1)


@pytest.fixture(scope="module")
def clips() -> tuple[list[Tensor], list[Tensor]]:
    """(clips to fit on, clips held out): real ones, small; held out are whole scenes' ends as well as starts."""
    paths = sorted(CLIPS.glob("*.mp4"))
    assert len(paths) >= 20
    read = [read_clip(path, 17, 176, 320) for path in paths[::6]]
    return read[::2], read[1::2]


@pytest.fixture(scope="module")
def codec(clips: tuple[list[Tensor], list[Tensor]]) -> LinearCodec:
    return LinearCodec.fit(clips[0], channels=16)


def psnr(a: Tensor, b: Tensor) -> float:
    """Decibels of two videos in [-1, 1]."""
    return float(10 * torch.log10(4 / (a - b).square().mean()))


def test_held_out_clips_come_back(codec: LinearCodec, clips: tuple[list[Tensor], list[Tensor]]) -> None:
    wider = LinearCodec.fit(clips[0], channels=64)
    measured = {}
    for each in (codec, wider):
        values = [psnr(each.decode(each.encode(clip[None]).mean_BCThw)[0], clip) for clip in clips[1]]
        measured[each.channels] = sum(values) / len(values)
    print(f"held-out PSNR in dB by channels: {measured}")
    assert measured[16] > 24
    assert measured[64] > measured[16] + 3


def test_shapes_and_strides(codec: LinearCodec) -> None:
    posterior = codec.encode(torch.zeros(2, 3, 9, 16, 24))
    assert posterior.mean_BCThw.shape == (2, 16, 3, 2, 3)
    assert posterior.logvar_BCThw is None
    assert codec.decode(posterior.mean_BCThw).shape == (2, 3, 9, 16, 24)
    assert codec.encode(torch.zeros(1, 3, 1, 16, 24)).mean_BCThw.shape == (1, 16, 1, 2, 3)
    with pytest.raises(ValueError, match="use 5 or 9"):
        codec.encode(torch.zeros(1, 3, 7, 16, 24))
    with pytest.raises(ValueError, match="multiple"):
        codec.encode(torch.zeros(1, 3, 5, 12, 24))


def test_all_channels_lose_nothing_of_an_image() -> None:
    noise = [rng.normal((3, 1, 64, 64), 0, "image", i).mul(0.3).clamp(-1, 1) for i in range(8)]
    codec = LinearCodec.fit(noise, channels=192)
    again = codec.decode(codec.encode(torch.stack(noise)).mean_BCThw)
    torch.testing.assert_close(again, torch.stack(noise), atol=1e-4, rtol=0)


def test_a_first_frame_knows_nothing_of_later_ones(codec: LinearCodec) -> None:
    video = smooth_video("causal")[None]
    changed = video.clone()
    changed[:, :, 5:] = 0.5
    latent, latent_changed = codec.encode(video).mean_BCThw, codec.encode(changed).mean_BCThw
    assert torch.equal(latent[:, :, :2], latent_changed[:, :, :2])
    assert not torch.equal(latent[:, :, 2], latent_changed[:, :, 2])
    assert torch.equal(codec.encode(video[:, :, :1]).mean_BCThw, latent[:, :, :1])


@pytest.mark.parametrize("whitening", [0.5, 1.0])
def test_latents_have_mean_0_and_mean_variance_1(whitening: float) -> None:
    videos = [smooth_video(f"scale {i}") + 0.05 * rng.normal((3, 9, 32, 48), 0, "grain", i) for i in range(30)]
    codec = LinearCodec.fit(videos, channels=8, whitening=whitening)
    latents = torch.cat([codec.encode(video[None]).mean_BCThw for video in videos])
    images = torch.cat([codec.encode(video.transpose(0, 1)[:, :, None]).mean_BCThw for video in videos])
    for part in (images, latents[:, :, 1:]):
        variance_C = part.var(dim=(0, 2, 3, 4))
        assert abs(float(variance_C.mean()) - 1) < 0.1
        spread = float(variance_C.max() / variance_C.min())
        assert spread < 1.5 if whitening == 1 else spread > 2
    # First frames count twice in the image basis, so only the video's mean is exactly that of its latents.
    assert float(latents[:, :, 1:].mean(dim=(0, 2, 3, 4)).abs().max()) < 1e-3


def test_fitting_does_not_depend_on_order_or_repetition(codec: LinearCodec) -> None:
    videos = [smooth_video(f"order {i}") for i in range(6)]
    one, same = LinearCodec.fit(videos, channels=4), LinearCodec.fit(iter(videos), channels=4)
    assert one.fingerprint == same.fingerprint
    turned = LinearCodec.fit(reversed(videos), channels=4)
    torch.testing.assert_close(
        turned.encode(videos[0][None]).mean_BCThw, one.encode(videos[0][None]).mean_BCThw, atol=1e-3, rtol=0
    )
    assert one.fingerprint != codec.fingerprint


def test_bytes_do_not_depend_on_the_batch(codec: LinearCodec) -> None:
    """The codec takes items one by one, so that products have the same shapes in any batch, on every machine."""
    videos = torch.stack([smooth_video(f"batch {i}") for i in range(5)])
    together = codec.encode(videos).mean_BCThw
    for i in range(5):
        assert torch.equal(codec.encode(videos[i : i + 1]).mean_BCThw[0], together[i])


def test_files_hold_the_whole_codec(codec: LinearCodec, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "codec.safetensors"
    codec.save(path)
    loaded = LinearCodec.load(path)
    video = smooth_video("file")[None]
    assert (loaded.fingerprint, loaded.channels, loaded.whitening) == (codec.fingerprint, 16, 0.5)
    assert torch.equal(loaded.encode(video).mean_BCThw, codec.encode(video).mean_BCThw)
    assert [each.name for each in path.parent.iterdir()] == ["codec.safetensors"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such codec file"):
        LinearCodec.load(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(UserError, match="cannot be read"):
        LinearCodec.load(tmp_path / "cut.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="no linear codec"):
        LinearCodec.load(tmp_path / "other.safetensors")


def test_degenerate_input() -> None:
    with pytest.raises(UserError, match="no clips"):
        LinearCodec.fit([], channels=4)
    with pytest.raises(UserError, match="1 to 192"):
        LinearCodec.fit([], channels=193)
    black = LinearCodec.fit([torch.full((3, 5, 16, 16), -1.0)], channels=4)
    latents = black.encode(torch.full((1, 3, 5, 16, 16), -1.0)).mean_BCThw
    assert torch.isfinite(latents).all()
    torch.testing.assert_close(black.decode(latents), torch.full((1, 3, 5, 16, 16), -1.0))
