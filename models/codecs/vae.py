"""Video codecs by config: the built-in linear one, or any `AutoencoderKL*` of diffusers, in a normalised latent space.

Each diffusers class keeps its latents' statistics in another place, and its pipelines apply them by hand. `latent_affine`
gathers them into one affine map, `normalised = (z - shift) * scale`, which agrees with those pipelines.

Legend: B batch, C latent channels, F H W frames, height, width in pixels, T h w latent; R colour channels (3);
K latent frames that have statistics of their own (1: all share them).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.config.schema import DiffusersVaeConfig, LinearVaeConfig
from mmspeed.device import Device, parse_dtype
from mmspeed.errors import UserError, nearest
from mmspeed.models.codecs.linear import LinearCodec
from mmspeed.models.weights import (
    fingerprint,
    first_line,
    inside,
    quiet,
    read_json,
    resolve,
    weight_files,
    weight_patterns,
)
from mmspeed.protocols import Posterior, VideoCodec
from mmspeed.shapes import Bucket, Strides

KEY = "vae.pretrained"
STEM = "diffusion_pytorch_model"
NORMALISATION = 1  # part of the fingerprint; counts up when `latent_affine` gives other numbers
PACKED = 2  # FLUX.2 folds 2 x 2 latent pixels into channels before it normalises them

# Classes whose latents are not those of 1 + k x stride frames in [-1, 1].
UNFIT = {
    "AutoencoderKLAllegro": "encodes windows of 24 frames, the first frame not apart",
    "AutoencoderKLMiniMaxH3": "encodes 17 x n + 5 frames, the first frame not apart",
    "AutoencoderKLHunyuanImageRefiner": "keeps every frame in time, for one image at a time",
    "AutoencoderKLKVAEAudio": "encodes sound",
    "AutoencoderKLLTX2Audio": "encodes sound",
    "AutoencoderKLMiniMaxH3Audio": "encodes sound",
}
# This class reports a log-variance of zeros where it has dropped the encoder's own.
WITHOUT_VARIANCE = ("AutoencoderKLKVAEVideo",)
# Numbers of latent frames that a class decodes to a wrong number of frames: CogVideoX sets the first frame apart only in
# an odd number; KVAE decodes segments of four, and a last segment of one does not grow in time.
MISCOUNTED: dict[str, Callable[[int], bool]] = {
    "AutoencoderKLCogVideoX": lambda frames: frames % 2 == 0,
    "AutoencoderKLKVAEVideo": lambda frames: frames > 5 and frames % 4 == 2,
}


def load_codec(cfg: LinearVaeConfig | DiffusersVaeConfig, device: Device, weights: Path | None = None) -> VideoCodec:
    """The codec of a config, ready on `device`.

    `weights` is the fitted file of the linear codec; None: `cfg.weights`. Raises UserError in one line for files that are
    missing, unreadable or unsuitable.
    """
    if isinstance(cfg, LinearVaeConfig):
        return _load_linear(cfg, weights).to(device.torch_device)
    folder, config = _locate(cfg)
    vae = _load_autoencoder(folder, config, parse_dtype(cfg.dtype))
    _set_memory_options(vae, cfg)
    return DiffusersCodec(vae.to(device.torch_device), _identity(cfg, folder))


def codec_identity(cfg: LinearVaeConfig | DiffusersVaeConfig, weights: Path | None = None) -> str:
    """The `fingerprint` of `load_codec` with the same arguments, from reading files only."""
    if isinstance(cfg, LinearVaeConfig):
        return _load_linear(cfg, weights).fingerprint
    return _identity(cfg, _locate(cfg)[0])


def codec_geometry(cfg: LinearVaeConfig | DiffusersVaeConfig) -> tuple[int, Strides]:
    """(latent channels, strides) of a config's codec. A diffusers one is loaded on the CPU and probed; raises as `load_codec`."""
    if isinstance(cfg, LinearVaeConfig):
        return cfg.channels, LinearCodec.strides
    codec = load_codec(cfg, Device("cpu", 0))
    return codec.channels, codec.strides


def _load_linear(cfg: LinearVaeConfig, weights: Path | None) -> LinearCodec:
    path = weights if weights is not None else cfg.weights
    if path is None:
        raise UserError("vae.weights: the linear codec has not been fitted yet; `mmspeed preprocess` does it")
    codec = LinearCodec.load(Path(path))
    if codec.channels != cfg.channels:
        raise UserError(
            f"vae.channels is {cfg.channels}, but {path} was fitted with {codec.channels}: set it to that, or fit again"
        )
    return codec


def _locate(cfg: DiffusersVaeConfig) -> tuple[Path, dict[str, Any]]:
    """The autoencoder's folder and its config.json."""
    root = resolve(cfg.pretrained, [cfg.subfolder], cfg.revision, weight_patterns(STEM), KEY)
    folder = inside(root, cfg.subfolder, KEY, "vae")
    return folder, read_json(folder / "config.json", KEY)


def _identity(cfg: DiffusersVaeConfig, folder: Path) -> str:
    files = [folder / "config.json", *weight_files(folder, STEM, KEY)]
    return fingerprint(folder, files, {"dtype": cfg.dtype, "tiling": cfg.tiling, "normalisation": NORMALISATION})


def autoencoder_class(name: str | None, folder: Path) -> Any:
    """The diffusers class that a config.json names. Raises UserError when it encodes no video or images."""
    import diffusers

    if name is None:
        raise UserError(f"{KEY}: {folder / 'config.json'} names no _class_name, so it is no diffusers model")
    known = [each for each in dir(diffusers) if each.startswith("AutoencoderKL")]
    if name not in known:
        reason = "not an AutoencoderKL*" if hasattr(diffusers, name) else f"not in diffusers {diffusers.__version__}"
        raise UserError(f"{KEY}: {folder} holds a {name}, which is {reason}{nearest(name, known)}")
    if name in UNFIT:
        raise UserError(
            f"{KEY}: {folder} holds a {name}, which {UNFIT[name]}; mmspeed needs a causal video or an image codec"
        )
    return getattr(diffusers, name)


def _load_autoencoder(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    cls = autoencoder_class(config.get("_class_name"), folder)
    weight_files(folder, STEM, KEY)
    try:
        with quiet():
            vae, report = cls.from_pretrained(
                folder, use_safetensors=True, torch_dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # any failure of the constructor by a wrong config or a truncated file
        raise UserError(f"{KEY}: {folder} does not load as {cls.__name__}: {first_line(error)}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(
            f"{KEY}: the weights in {folder} lack {len(missing)} tensors of {cls.__name__}, such as {missing[0]}"
        )
    return vae.eval().requires_grad_(False)


def _set_memory_options(vae: Any, cfg: DiffusersVaeConfig) -> None:
    """Set tiling by the config, and slicing where the class has it; elsewhere the codec's one-by-one encoding has the same effect."""
    name = type(vae).__name__
    if cfg.tiling:
        if not (hasattr(vae, "tiled_encode") or hasattr(vae, "_tiled_encode")):
            raise UserError(f"vae.tiling: {name} has no tiled encoding; set it to false")
        vae.enable_tiling()
    if cfg.slicing and hasattr(vae, "use_slicing"):
        vae.enable_slicing()


class DiffusersCodec:
    """A `VideoCodec` over a diffusers autoencoder.

    Samples are encoded and decoded one by one, so that a latent does not depend on its batch. Image autoencoders see a
    video frame by frame: their temporal stride is 1.
    """

    def __init__(self, vae: Any, fingerprint: str) -> None:
        self.vae, self.fingerprint = vae, fingerprint
        self._name = type(vae).__name__
        self._images = not any(isinstance(module, nn.Conv3d) for module in vae.encoder.modules())
        self._packed = isinstance(getattr(vae, "bn", None), nn.BatchNorm2d)
        parameter = next(vae.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        shift_CK, scale_CK = latent_affine(vae)
        self._shift_CK, self._scale_CK = shift_CK.to(self._device), scale_CK.to(self._device)
        self.strides = declared_strides(vae, self._images, self._packed)
        self.channels = self._probe()

    def encode(self, video_BCFHW: Tensor) -> Posterior:
        """The posterior in normalised space, float32: mean and log-variance (B, C, T, h, w) of pixels in [-1, 1].

        Raises ValueError when the strides do not divide the video's shape.
        """
        self.strides.latent(Bucket(*video_BCFHW.shape[2:]))
        pairs = [self._encode_one(video_RFHW) for video_RFHW in video_BCFHW]
        # Stacked outside of inference mode: a model that is trained on them may keep them for its backward pass.
        logvars = [logvar for _, logvar in pairs if logvar is not None]
        return Posterior(torch.stack([mean for mean, _ in pairs]), torch.stack(logvars) if logvars else None)

    @torch.inference_mode()
    def encode_together(self, video_BCFHW: Tensor) -> Posterior:
        """The posterior of `encode` from one pass of the autoencoder (with `vae.slicing` it may still go one by one).

        The last bits may depend on the number of videos: kernels are chosen by shape.
        """
        if self._images:
            return self.encode(video_BCFHW)
        self.strides.latent(Bucket(*video_BCFHW.shape[2:]))
        distribution = self.vae.encode(video_BCFHW.to(self._device, self._dtype)).latent_dist
        known = hasattr(distribution, "logvar")  # Cosmos: a distribution of one point
        mean_BCThw = (distribution.mean if known else distribution.mode()).float()
        shift_CT11, scale_CT11 = self._statistics(mean_BCThw.shape[2])
        mean_BCThw = (mean_BCThw - shift_CT11) * scale_CT11
        if not known or self._name in WITHOUT_VARIANCE:
            return Posterior(mean_BCThw)
        return Posterior(mean_BCThw, distribution.logvar.float() + 2 * scale_CT11.abs().log())

    def decode(self, latents_BCThw: Tensor) -> Tensor:
        """Pixels (B, 3, F, H, W) in [-1, 1], float32, of normalised latents."""
        return torch.stack([self._decode_one(latents_CThw) for latents_CThw in latents_BCThw])

    @torch.inference_mode()
    def _encode_one(self, video_RFHW: Tensor) -> tuple[Tensor, Tensor | None]:
        mean_CThw, logvar_CThw = self._raw_moments(video_RFHW.to(self._device, self._dtype))
        shift_CT11, scale_CT11 = self._statistics(mean_CThw.shape[1])
        mean_CThw = (mean_CThw - shift_CT11) * scale_CT11
        if logvar_CThw is None or self._name in WITHOUT_VARIANCE:
            return mean_CThw, None
        return mean_CThw, logvar_CThw + 2 * scale_CT11.abs().log()

    def _raw_moments(self, video_RFHW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and log-variance (C, T, h, w) of the autoencoder, float32, not normalised; None where it has no variance."""
        if not self._images:
            distribution = self.vae.encode(video_RFHW[None]).latent_dist
            if not hasattr(distribution, "logvar"):  # Cosmos: a distribution of one point
                return distribution.mode()[0].float(), None
            return distribution.mean[0].float(), distribution.logvar[0].float()
        distributions = [self.vae.encode(image_RHW[None]).latent_dist for image_RHW in video_RFHW.unbind(1)]
        mean_TChw = torch.cat([distribution.mean for distribution in distributions]).float()
        logvar_TChw = torch.cat([distribution.logvar for distribution in distributions]).float()
        if self._packed:
            mean_TChw, logvar_TChw = (F.pixel_unshuffle(part_TChw, PACKED) for part_TChw in (mean_TChw, logvar_TChw))
        return mean_TChw.transpose(0, 1), logvar_TChw.transpose(0, 1)

    @torch.inference_mode()
    def _decode_one(self, latents_CThw: Tensor) -> Tensor:
        frames = 1 + (latents_CThw.shape[1] - 1) * self.strides.temporal
        latents_CThw = latents_CThw.to(self._device, torch.float32)
        shift_CT11, scale_CT11 = self._statistics(latents_CThw.shape[1])
        z_CThw = latents_CThw / scale_CT11 + shift_CT11
        if self._packed:
            z_CThw = F.pixel_shuffle(z_CThw.transpose(0, 1), PACKED).transpose(0, 1)
        if self._name in MISCOUNTED and MISCOUNTED[self._name](z_CThw.shape[1]):
            # Causal: the frames after the last latent frame are cut off again, and hardly affect the frames before it.
            z_CThw = torch.cat([z_CThw, z_CThw[:, -1:]], dim=1)
        video_RFHW = self._decode_z(z_CThw.to(self._dtype))
        if video_RFHW.shape[1] < frames:
            raise UserError(f"{KEY}: {self._name} decodes {latents_CThw.shape[1]} latent frames to fewer than {frames}")
        return video_RFHW[:, :frames].float().clamp(-1, 1)

    def _decode_z(self, z_CThw: Tensor) -> Tensor:
        if not self._images:
            # A pipeline's default where the decoder takes a timestep is 0: no noise was added to the latent.
            timed = getattr(self.vae.config, "timestep_conditioning", False)
            extra = {"temb": torch.zeros(1, device=self._device, dtype=self._dtype)} if timed else {}
            return self.vae.decode(z_CThw[None], **extra).sample[0]
        z_TChw = z_CThw.transpose(0, 1)
        if self._name == "AutoencoderKLTemporalDecoder":  # encodes frame by frame, decodes them together
            return self.vae.decode(z_TChw, num_frames=len(z_TChw)).sample.transpose(0, 1)
        return torch.cat([self.vae.decode(z_1Chw).sample for z_1Chw in z_TChw.split(1)]).transpose(0, 1)

    def _statistics(self, frames: int) -> tuple[Tensor, Tensor]:
        """(shift, scale) for `frames` latent frames, each (C, 1 or T, 1, 1)."""
        known = self._shift_CK.shape[1]
        if known > 1 and frames > known:
            raise UserError(
                f"{KEY}: {self._name} has statistics for {known} latent frames, not for {frames}: use shorter buckets"
            )
        used = slice(None) if known == 1 else slice(frames)
        return self._shift_CK[:, used, None, None], self._scale_CK[:, used, None, None]

    def _probe(self) -> int:
        """Encode a small grey video, whose latent must have the declared strides. Returns the latent channels."""
        latent = (1 if self._images else 3, 2, 4)
        bucket = self.strides.pixels(latent)
        try:
            mean_CThw, _ = self._encode_one(torch.zeros(3, bucket.frames, bucket.height, bucket.width))
        except UserError:
            raise
        except Exception as error:  # a class that needs other channels or sizes may fail anywhere inside
            raise UserError(
                f"{KEY}: this {self._name} cannot encode an RGB video of {bucket}: {first_line(error)}"
            ) from error
        if tuple(mean_CThw.shape[1:]) != latent:
            got = "x".join(str(size) for size in mean_CThw.shape[1:])
            raise UserError(
                f"{KEY}: this {self._name} states a temporal stride of {self.strides.temporal} and a spatial one of "
                f"{self.strides.spatial}, but makes a latent of {got} from {bucket}: not causal, or config.json is wrong"
            )
        return mean_CThw.shape[0]


def latent_affine(vae: Any) -> tuple[Tensor, Tensor]:
    """(shift, scale), each (C or 1, K), float32: pipelines of diffusers diffuse `(z - shift) * scale`.

    - mean and std, kept as buffers (LTX) or in the config (Wan, Qwen-Image, Mochi, Cosmos, some of AutoencoderKL):
      `(z - mean) / std * scaling_factor`; Cosmos has them for each latent frame;
    - batch-norm statistics (FLUX.2): `(z - mean) / sqrt(var + eps)`, of packed latents;
    - else `(z - shift_factor) * scaling_factor`.
    """
    config = vae.config
    factor = float(getattr(config, "scaling_factor", None) or 1.0)
    if isinstance(getattr(vae, "bn", None), nn.BatchNorm2d):
        mean_C, variance_C = vae.bn.running_mean.float(), vae.bn.running_var.float()
        return mean_C[:, None], (variance_C + config.batch_norm_eps).rsqrt()[:, None]
    mean, std = (_statistic(vae, name) for name in ("latents_mean", "latents_std"))
    if mean is not None and std is not None:
        channels = next(int(config[name]) for name in ("z_dim", "latent_channels") if name in config)
        return mean.reshape(channels, -1), factor / std.reshape(channels, -1)
    shift = float(getattr(config, "shift_factor", None) or 0.0)
    return torch.full((1, 1), shift), torch.full((1, 1), factor)


def declared_strides(vae: Any, images: bool, packed: bool) -> Strides:
    """The strides that a class declares, under any of several names; `DiffusersCodec` checks them by a probe."""
    config, own = vae.config, vars(vae)
    blocks = config.get("block_out_channels") or config.get("ch_mult")
    by_depth = 2 ** (len(blocks) - 1) if blocks else None
    spatial = _first(
        own.get("spatial_compression_ratio"), config.get("scale_factor_spatial"),
        config.get("spatial_compression_ratio"), by_depth,
    )  # fmt: skip
    halvings = config.get("temperal_downsample")
    temporal = 1 if images else _first(
        own.get("temporal_compression_ratio"), config.get("scale_factor_temporal"),
        config.get("temporal_compression_ratio"), config.get("temporal_compress_times"),
        2 ** sum(halvings) if halvings else None,
    )  # fmt: skip
    if spatial is None or temporal is None:
        raise UserError(f"{KEY}: {type(vae).__name__} does not declare its compression; mmspeed cannot use it")
    return Strides(int(temporal), int(spatial) * (PACKED if packed else 1))


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _statistic(vae: Any, name: str) -> Tensor | None:
    value = dict(vae.named_buffers(recurse=False)).get(name, vae.config.get(name))
    return None if value is None else torch.as_tensor(value).detach().float().cpu()
