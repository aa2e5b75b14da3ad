"""Diffusers autoencoders behind the codec protocol: their latents are those of diffusers' own pipelines.
Legend: B batch, C channels, F H W pixels, T h w latent; R colours.
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
from torch import Tensor

from mmspeed import rng
from mmspeed.config.schema import DiffusersVaeConfig, LinearVaeConfig
from mmspeed.data.loading.collate import first_frame
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.codecs.linear import LinearCodec
from mmspeed.models.codecs.vae import DiffusersCodec, codec_identity, load_codec
from mmspeed.models.weights import weight_files
from tests.support.tiny_models import VAES, save_tiny_vae

CPU = Device("cpu", 0)
STRIDES = {
    "wan": (4, 8), "wan2.2": (4, 16), "cogvideox": (4, 8), "hunyuan": (4, 8), "hunyuan1.5": (4, 16), "ltx": (8, 32),
    "ltx-timed": (8, 32), "mochi": (6, 8), "qwenimage": (4, 8), "kl": (1, 2), "kl-statistics": (1, 2), "flux2": (1, 4),
    "svd": (1, 2), "kvae-video": (4, 8),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saved tiny autoencoders by name, each made on first use."""
    root = tmp_path_factory.mktemp("vaes")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else save_tiny_vae(root / name, name)

    return folder


def config(folder: Path, **fields: Any) -> DiffusersVaeConfig:
    return DiffusersVaeConfig(kind="diffusers", pretrained=str(folder), **fields)


def load(folder: Path, **fields: Any) -> DiffusersCodec:
    codec = load_codec(config(folder, **fields), CPU)
    assert isinstance(codec, DiffusersCodec)
    return codec


def pixels(codec: DiffusersCodec, t: int, batch: int = 1) -> Tensor:
    """A random video of `t` latent frames, (B, 3, F, H, W) in [-1, 1]."""
    shape = (batch, 3, 1 + (t - 1) * codec.strides.temporal, 2 * codec.strides.spatial, 3 * codec.strides.spatial)
    return rng.normal(shape, 0, "pixels", t, batch).mul(0.5).clamp(-1, 1)


def wan(vae: Any, z: Tensor) -> Tensor:
    """The latents of WanVideoToVideoPipeline.prepare_latents."""
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1)
    return (z - mean) * inverse


def scaled(vae: Any, z: Tensor) -> Tensor:
    """The latents of the video-to-video or image-to-video pipelines of CogVideoX and HunyuanVideo."""
    return vae.config.scaling_factor * z


def ltx(vae: Any, z: Tensor) -> Tensor:
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXConditionPipeline

    return LTXConditionPipeline._normalize_latents(z, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def mochi(vae: Any, z: Tensor) -> Tensor:
    """The inverse of what MochiPipeline does before it decodes."""
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (z - mean) / std * vae.config.scaling_factor


def shifted(vae: Any, z: Tensor) -> Tensor:
    """The latents of StableDiffusion3Img2ImgPipeline.prepare_latents."""
    return (z - vae.config.shift_factor) * vae.config.scaling_factor


def sdxl(vae: Any, z: Tensor) -> Tensor:
    """The latents of StableDiffusionXLImg2ImgPipeline.prepare_latents."""
    mean, std = (torch.tensor(vae.config[name]).view(1, 4, 1, 1) for name in ("latents_mean", "latents_std"))
    return (z - mean) * vae.config.scaling_factor / std


def flux2(vae: Any, z: Tensor) -> Tensor:
    from diffusers import Flux2Pipeline

    z = Flux2Pipeline._patchify_latents(z)
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    return (z - mean) / torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)


PIPELINES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "wan": wan, "wan2.2": wan, "qwenimage": wan, "cogvideox": scaled, "hunyuan": scaled, "hunyuan1.5": scaled,
    "ltx": ltx, "ltx-timed": ltx, "mochi": mochi, "kl": shifted, "kl-statistics": sdxl, "flux2": flux2, "svd": scaled,
    "kvae-video": lambda vae, z: z,
}  # fmt: skip


@pytest.mark.parametrize("name", VAES)
def test_latents_are_those_of_the_pipelines(name: str, folders: Callable[[str], Path]) -> None:
    import diffusers

    codec = load(folders(name))
    vae = getattr(diffusers, VAES[name][0]).from_pretrained(folders(name)).eval()
    assert (codec.strides.temporal, codec.strides.spatial) == STRIDES[name]
    for t in (1, 3):
        video = pixels(codec, t)
        posterior = codec.encode(video)
        with torch.no_grad():
            if codec.strides.temporal == 1:
                truth = torch.stack(
                    [PIPELINES[name](vae, vae.encode(x).latent_dist.mode()) for x in video.unbind(2)], 2
                )
            else:
                truth = PIPELINES[name](vae, vae.encode(video).latent_dist.mode())
        assert posterior.mean_BCThw.shape == (1, codec.channels, t, 2, 3)
        torch.testing.assert_close(posterior.mean_BCThw, truth, atol=1e-5, rtol=1e-4)
        if name not in ("cogvideox", "hunyuan", "kvae-video"):  # causal: what image-to-video needs stands in the entry
            first = first_frame({"mean": posterior.mean_BCThw[0]})
            torch.testing.assert_close(first, codec.encode(video[:, :, :1]).mean_BCThw[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["wan", "cogvideox", "ltx", "mochi", "kl-statistics"])
def test_log_variance_is_that_of_normalised_samples(name: str, folders: Callable[[str], Path]) -> None:
    codec = load(folders(name))
    video = pixels(codec, 2 if codec.strides.temporal > 1 else 1)
    posterior = codec.encode(video)
    assert posterior.logvar_BCThw is not None and posterior.logvar_BCThw.shape == posterior.mean_BCThw.shape
    with torch.no_grad():
        raw = codec.vae.encode(video if codec.strides.temporal > 1 else video[:, :, 0]).latent_dist
    # One standard deviation from the mean, taken through the pipeline's own formula.
    low, high = (PIPELINES[name](codec.vae, raw.mean + sign * raw.std) for sign in (-1, 1))
    std = ((high - low) / 2).abs().reshape_as(posterior.mean_BCThw)
    torch.testing.assert_close(posterior.logvar_BCThw.mul(0.5).exp(), std, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["wan", "cogvideox", "ltx-timed", "kl-statistics", "svd"])
def test_decoding_takes_the_normalisation_back(name: str, folders: Callable[[str], Path]) -> None:
    codec = load(folders(name))
    for t in (1, 2, 3):
        video = pixels(codec, t)
        decoded = codec.decode(codec.encode(video).mean_BCThw)
        assert decoded.shape == video.shape
        assert decoded.dtype == torch.float32 and float(decoded.abs().max()) <= 1
        extra: dict[str, Any] = {"temb": torch.zeros(1)} if name == "ltx-timed" else {}
        if codec.strides.temporal > 1 and not (name == "cogvideox" and t == 2):
            with torch.no_grad():
                truth = codec.vae.decode(codec.vae.encode(video).latent_dist.mode(), **extra).sample.clamp(-1, 1)
            torch.testing.assert_close(decoded, truth, atol=1e-4, rtol=1e-3)
        elif codec.strides.temporal == 1:
            frames = [codec.vae.encode(x).latent_dist.mode() for x in video.unbind(2)]
            extra = {"num_frames": t} if name == "svd" else {}
            with torch.no_grad():
                truth = codec.vae.decode(torch.cat(frames), **extra).sample.clamp(-1, 1).transpose(0, 1)[None]
            torch.testing.assert_close(decoded, truth, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["cogvideox", "kvae-video"])
def test_longer_videos_keep_their_length(name: str, folders: Callable[[str], Path]) -> None:
    """Classes that work in segments of frames: 6 latent frames are more than the first."""
    codec = load(folders(name))
    video = pixels(codec, 6)
    posterior = codec.encode(video)
    assert posterior.mean_BCThw.shape[2] == 6
    assert (posterior.logvar_BCThw is None) == (name == "kvae-video")  # diffusers drops that one's variance
    assert codec.decode(posterior.mean_BCThw).shape == video.shape


@pytest.mark.parametrize("name", ["wan", "kl"])
def test_bytes_do_not_depend_on_the_batch(name: str, folders: Callable[[str], Path]) -> None:
    """`encode` and `decode` take items one by one, so that products have the same shapes in any batch, on every machine."""
    codec = load(folders(name))
    videos = pixels(codec, 2, batch=3)
    together = codec.encode(videos)
    for i in range(3):
        alone = codec.encode(videos[i : i + 1])
        assert torch.equal(alone.mean_BCThw[0], together.mean_BCThw[i])
        assert torch.equal(codec.decode(alone.mean_BCThw)[0], codec.decode(together.mean_BCThw)[i])


def test_frames_and_sizes_that_do_not_fit_are_named(folders: Callable[[str], Path]) -> None:
    codec = load(folders("wan"))
    with pytest.raises(ValueError, match="use 5 or 9"):
        codec.encode(torch.zeros(1, 3, 7, 16, 16))
    with pytest.raises(ValueError, match="height 20"):
        codec.encode(torch.zeros(1, 3, 5, 20, 16))


def test_bfloat16_is_computed_and_float32_returned(folders: Callable[[str], Path]) -> None:
    half, full = load(folders("kl"), dtype="bfloat16"), load(folders("kl"))
    video = pixels(full, 1)
    a, b = half.encode(video).mean_BCThw, full.encode(video).mean_BCThw
    assert next(half.vae.parameters()).dtype == torch.bfloat16 and a.dtype == torch.float32
    assert 0 < float((a - b).abs().max()) < 0.1


def test_tiling_and_slicing_reach_the_class(folders: Callable[[str], Path]) -> None:
    tiled = load(folders("wan"), tiling=True, slicing=False)
    assert tiled.vae.use_tiling and not tiled.vae.use_slicing
    assert not load(folders("wan")).vae.use_tiling and load(folders("wan")).vae.use_slicing
    with pytest.raises(UserError, match=r"vae\.tiling: AutoencoderKLTemporalDecoder"):
        load(folders("svd"), tiling=True)


def test_cosmos_has_statistics_for_each_latent_frame(tmp_path: Path) -> None:
    from mmspeed.models.codecs.vae import latent_affine

    mean, std = torch.arange(12.0), torch.arange(1.0, 13.0)
    vae = _cosmos(latents_mean=mean.tolist(), latents_std=std.tolist())
    shift_CK, scale_CK = latent_affine(vae)
    z = rng.normal((1, 4, 2, 1, 1), 0, "cosmos")
    truth = (z - mean.view(1, 4, -1, 1, 1)[:, :, :2]) / std.view(1, 4, -1, 1, 1)[:, :, :2]
    torch.testing.assert_close((z - shift_CK[None, :, :2, None, None]) * scale_CK[None, :, :2, None, None], truth)
    vae.save_pretrained(tmp_path)
    codec = load(tmp_path)
    assert codec.encode(pixels(codec, 3)).logvar_BCThw is None
    with pytest.raises(UserError, match="statistics for 3 latent frames, not for 4"):
        codec.encode(pixels(codec, 4))


def _cosmos(**changes: Any) -> Any:
    import diffusers

    sizes: dict[str, Any] = {
        "latent_channels": 4,
        "encoder_block_out_channels": (8, 8, 8, 8),
        "decode_block_out_channels": (8, 8, 8, 8),
    }
    cls: Any = diffusers.AutoencoderKLCosmos
    return cls(**sizes, attention_resolutions=(8,), resolution=16, num_layers=1, **changes).eval()


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"_class_name": "AutoencoderKLWam"}, "did you mean 'AutoencoderKLWan'"),
        ({"_class_name": "AutoencoderKLAllegro"}, "windows of 24 frames"),
        ({"scale_factor_temporal": 8}, "states a temporal stride of 8"),
        ({"base_dim": 8}, "does not load as AutoencoderKLWan"),
        ({"num_res_blocks": 2}, "lack .* tensors"),
    ],
)
def test_unfit_configs_are_refused(
    changes: dict[str, Any], problem: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders("wan"), tmp_path / "vae")
    _edit(folder, **changes)
    with pytest.raises(UserError, match=problem) as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) == 1 and "vae.pretrained" in str(caught.value)


def test_missing_places_are_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vae\.pretrained: no folder"):
        load(tmp_path / "none")
    with pytest.raises(UserError, match=r"vae\.pretrained: .* holds no config\.json"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"vae\.pretrained: .* is a file"):
        load(tmp_path / "file")
    pipeline = tmp_path / "pipeline"
    shutil.copytree(folders("wan"), pipeline / "vae")
    (pipeline / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match=r"whole pipeline: set vae\.subfolder \(folders there: vae\)"):
        load(pipeline)
    assert load(pipeline, subfolder="vae").fingerprint == load(folders("wan")).fingerprint
    with pytest.raises(UserError, match=r"vae\.subfolder: .* has no folder 'ae'"):
        load(pipeline, subfolder="ae")
    (pipeline / "vae" / "diffusion_pytorch_model.safetensors").rename(pipeline / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(UserError, match=r"no diffusion_pytorch_model\.safetensors .*no pickles"):
        load(pipeline, subfolder="vae")


def test_fingerprints_follow_what_changes_numbers(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("wan"), tmp_path / "vae")
    first = codec_identity(config(folder))
    assert first == load(folder).fingerprint == codec_identity(config(folder, slicing=False))
    _edit(folder, _diffusers_version="0.0.1", _name_or_path="elsewhere")
    assert codec_identity(config(folder)) == first
    changed = {codec_identity(config(folder, dtype="bfloat16")), codec_identity(config(folder, tiling=True))}
    _edit(folder, latents_std=[1.0, 1.0, 1.0, 1.0])
    changed.add(codec_identity(config(folder)))
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    changed.add(codec_identity(config(folder)))
    assert len(changed | {first}) == 5


def test_sharded_weights_are_found_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_vae(tmp_path / "vae", "wan")
    whole = load(tmp_path / "vae")
    whole.vae.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    files = weight_files(tmp_path / "shards", "diffusion_pytorch_model", "vae.pretrained")
    assert len(files) >= 3
    video = pixels(whole, 2)
    assert torch.equal(load(tmp_path / "shards").encode(video).mean_BCThw, whole.encode(video).mean_BCThw)
    files[-1].unlink()
    with pytest.raises(UserError, match=files[-1].name):
        load(tmp_path / "shards")


def test_the_linear_codec_loads_by_config(tmp_path: Path) -> None:
    path = tmp_path / "codec.safetensors"
    fitted = LinearCodec.fit([rng.normal((3, 5, 32, 32), 0, "fit").clamp(-1, 1)], channels=8)
    fitted.save(path)
    cfg = LinearVaeConfig(kind="linear", channels=8)
    assert load_codec(cfg, CPU, path).fingerprint == fitted.fingerprint == codec_identity(cfg, path)
    assert codec_identity(cfg.model_copy(update={"weights": str(path)})) == fitted.fingerprint
    with pytest.raises(UserError, match="has not been fitted"):
        load_codec(cfg, CPU)
    with pytest.raises(UserError, match=r"vae\.channels is 16, but .* 8"):
        load_codec(LinearVaeConfig(kind="linear", channels=16), CPU, path)
