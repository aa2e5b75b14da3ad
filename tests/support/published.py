"""Published video transformers of diffusers, tiny, saved and loaded, through the training pipeline: a small cache and the video task.

Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config import Config, make_config
from mmspeed.data import CacheWriter, Sample
from mmspeed.data.cache.keys import entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.device import pick
from mmspeed.mesh import process_group
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.published import PublishedVideoDomain
from mmspeed.pipelines.run.assembly import Assembly, assemble, place
from mmspeed.pipelines.tasks import as_task
from mmspeed.protocols import Batch, Conditions, RunPlace, TextEntry
from mmspeed.shapes import Bucket
from tests.support.runs import SAVED_ONCE
from tests.support.video_transformers import make_model

C, D, POOLED = 4, 8, 8
BUCKETS = (Bucket(9, 32, 48), Bucket(1, 32, 48))
STRIDES = (4, 8)
FPS = 8.0
# name -> (a case of tests.support.video_transformers, changes, objective)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "wan": ("wan", {}, {"kind": "flow"}),
    "ltx": ("ltx", {}, {"kind": "flow"}),
    "cogvideox": ("cogvideox", {}, {"kind": "ddpm"}),
    "hunyuan": ("hunyuan", {"num_layers": 2, "num_single_layers": 2}, {"kind": "flow"}),
}
# the same of models of images, which take buckets of one frame
IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {"qwen": ("qwen, images", {}, {"kind": "flow"})}
# the same of further families, which `prepare` saves where it is asked to
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "hunyuan15": ("hunyuan 1.5", {"num_layers": 3}, {"kind": "flow"}),
    "mochi": ("mochi", {}, {"kind": "flow"}),
    "flux": ("flux, images", {"num_layers": 2, "num_single_layers": 2}, {"kind": "flow"}),
}
PUBLISHED = MODELS | IMAGES | OTHERS
STILLS = ("qwen", "flux")


def published_config(folder: Path, name: str, *overrides: str) -> Config:
    """Six steps over seven samples, three a step; the encoders are not at hand."""
    tree: dict[str, Any] = {
        "name": name,
        "output": str(folder / "runs"),
        "data": {
            "sources": [{"path": str(folder / "clips.jsonl")}],
            "cache": str(folder / "cache"),
            "buckets": [{"frames": b.frames, "height": b.height, "width": b.width} for b in BUCKETS],
        },
        "vae": {"kind": "diffusers", "pretrained": str(folder / "no-codec")},
        "text": {"kind": "transformers", "pretrained": str(folder / "no-encoder"), "max_tokens": 7},
        "objective": PUBLISHED[name][2],
        "train": {"steps": 6, "batch_size": 3, "lr": 1e-3, "warmup_steps": 2, "log_every": 1},
        "validate": {"every": 3, "samples": 1, "quantiles": 2, "report": False},
        "checkpoint": {**SAVED_ONCE},
        "memory": {"offload_from": 1},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }
    return make_config(tree, overrides, origin="test")


def prepare(folder: Path, names: Iterable[str] = (*MODELS, *IMAGES)) -> None:
    """Save models as checkpoints of diffusers, and write the cache."""
    for name in names:
        case, changes, _ = PUBLISHED[name]
        model: Any = make_model(case, **changes)
        model.save_pretrained(folder / "models" / name)
    write_cache(published_config(folder, "wan"))


def write_cache(
    config: Config,
    samples: int = 12,
    captions: tuple[int, int] = (3, 5),
    taken: Callable[[int, Bucket], Sequence[int]] = lambda _, bucket: range(bucket.frames),
    glyphs: bool = False,
) -> None:
    """Videos and images with captions of two lengths in turn (in tokens) and pooled vectors; the first sample is held out.

    `taken`: the frames of its source that a sample by its number is recorded to be made of. `glyphs`: captions of at least four tokens
    have a second part, `text_2`.
    """
    root = config.local_cache_dir()
    buckets = sorted(config.buckets, key=lambda bucket: bucket.is_image)  # a video's, an image's
    latents, texts = [], []
    with CacheWriter(root) as writer:
        for number in range(samples):
            bucket = buckets[number % 4 == 3 and len(buckets) > 1]
            sizes = (C, 1 + (bucket.frames - 1) // 4, bucket.height // 8, bucket.width // 8)
            parts = {"kind": "latent", "number": number}
            tensors = latent_tensors(rng.normal(sizes, 0, "latent", number), rng.normal(sizes, 0, "spread", number) - 5)
            latents.append((entry_key(parts), bucket))
            writer.add(
                "latents", latents[-1][0], tensors, parts, bucket=bucket, tokens=sizes[1] * 6, content_id=f"c{number}",
                frames=taken(number, bucket), fps=FPS + number if bucket.frames > 1 else None, source=f"{number}.mp4",
            )  # fmt: skip
        for length, section in ((captions[0], "texts"), (captions[1], "texts"), (1, "null")):
            parts = {"kind": "text", "length": length, "section": section}
            if section == "texts":
                texts.append(entry_key(parts))
            embeds_LD = rng.normal((length, D), 0, "text", length).bfloat16()
            second = {"text_2": rng.normal((4 if length > 3 else 0, D), 0, "glyphs", length).bfloat16()}
            entry = TextEntry(
                embeds_LD, rng.normal((POOLED,), 0, "pooled", length).bfloat16(), others=second if glyphs else {}
            )
            writer.add(section, entry_key(parts), text_tensors(entry), {"caption": "x" * (length - 1)}, tokens=length)
    keys = number_duplicates(sample_key([key], texts[row % 2 :][:1]) for row, (key, _) in enumerate(latents))
    rows = [
        Sample(key, (latents[row][0],), tuple(texts[row % 2 :][:1]), "train" if row else "val", latents[row][1],
               f"{row}.mp4", 12, f"c{row}")
        for row, key in enumerate(keys)
    ]  # fmt: skip
    write_samples(root, rows)
    write_rejects(root, [])
    encoders = {
        "vae": {"channels": C, "strides": list(STRIDES), "fingerprint": "made up"},
        "text": {"width": D, "fingerprint": "made up"},
    }
    write_info(root, {"encoders": encoders, "fps": FPS, "made_for": config.sample_settings()})


def load(folder: Path, name: str) -> nn.Module:
    """The saved model, as users load it."""
    import diffusers

    case, changes, _ = PUBLISHED[name]
    model = make_model(case, **changes)
    loaded: nn.Module = getattr(diffusers, type(model).__name__).from_pretrained(folder / "models" / name)
    return loaded


def task_of(folder: Path, name: str, config: Config) -> PublishedVideoDomain:
    """The video task of a saved model."""
    return PublishedVideoDomain(config, lambda: load(folder, name))


def train_published(folder: str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """Train, on however many ranks call this."""
    config = published_config(Path(folder), name, *overrides)
    TrainPipeline(config, task=task_of(Path(folder), name, config)).run()


def one_step(
    folder: str,
    name: str,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Assembly], None] | None = None,
    step: int = 0,
) -> tuple[float, dict[str, Tensor], list[Batch]]:
    """(the loss of this rank's share, whole gradients by name, its micro-batches) of a step that the pipeline's own parts take."""
    config = published_config(Path(folder), name, *overrides)
    device = pick("cpu")
    with process_group(device):
        task, placement = as_task(task_of(Path(folder), name, config), config), place(config, device)
        where: RunPlace = placement.at(device, config.run_dir)
        task.domain.open(where)
        parts = assemble(config, task, task.build(), placement, device)
        task.prepare(parts.models, where)
        if watch is not None:
            watch(parts)
        steps = task.data(where).steps(step, step + 1)
        data = next(steps)
        batches = list(data.batches)
        record = parts.learners[0].run(batches, data.divisors, 1.0)
        loss = sum(float(record.total(kind, device.torch_device)) for kind in record.kinds) / 3
        gradients = {}
        for key, parameter in parts.model.named_parameters():
            assert parameter.grad is not None, key
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients[key.removeprefix("module.")] = whole.detach().clone()
        return loss, gradients, batches


def called_by_hand(name: str, model: nn.Module, x: Tensor, times_B: Tensor, conditions: Conditions) -> Tensor:
    """The class called as its pipeline calls it; LTX sample by sample, since its positions are of one clip."""
    text, mask, config = conditions.text_BLD, conditions.text_mask_BL, _config(model)
    b, _, t, h, w = x.shape
    given, pictures = (conditions.named.get(key) for key in ("condition", "image"))  # of a model from images
    clean = conditions.named.get("conditioning_mask", torch.zeros(b, t, dtype=torch.bool))
    times_BT = times_B[:, None] * ~clean  # where a given frame is in its place
    if name.startswith("wan"):
        real = zip(text, mask, strict=True)
        rows = [torch.cat([row[keep], row.new_zeros(512 - int(keep.sum()), row.shape[1])]) for row, keep in real]
        further: dict[str, Tensor] = {}
        if name == "wan vace":
            blank, own = (conditions.named[f"{role}.latents"] for role in ("blank", "control"))
            further = {"control_hidden_states": torch.cat([blank, own, x.new_ones(b, 64, t, h, w)], dim=1)}
        if given is not None:
            frames = x.new_zeros(b, 4, t, h, w)
            frames[:, :, 0] = 1
            frames[:, 3, -1] = conditions.named["conditioning_mask"][
                :, -1, None, None
            ]  # the last of its frames of pixels
            x = torch.cat([x, frames, given], dim=1)
        if pictures is not None:
            further = {"encoder_hidden_states_image": pictures.flatten(0, 1)}
        times = times_BT.repeat_interleave(h * w // 4, dim=1) if name == "wan 5b" else times_B
        return model(x, times * 1000, torch.stack(rows), return_dict=False, **further)[0]
    if name.startswith("ltx"):
        from diffusers import LTXPipeline

        p, outs = config.patch_size, []
        assert conditions.fps_B is not None and conditions.strides is not None
        strides = conditions.strides
        times = times_BT.repeat_interleave(h * w // p**2, dim=1) if clean.any() else times_B
        for i in range(b):
            packed = LTXPipeline._pack_latents(x[i : i + 1], p, 1)
            scale = strides.temporal / conditions.fps_B[i].item(), strides.spatial, strides.spatial
            out = model(
                packed, text[i : i + 1], times[i : i + 1] * 1000, mask[i : i + 1], num_frames=t, height=h // p,
                width=w // p, rope_interpolation_scale=scale, return_dict=False,
            )[0]  # fmt: skip
            outs.append(LTXPipeline._unpack_latents(out, t, h // p, w // p, p, 1))
        return torch.cat(outs)
    if name.startswith("cogvideox"):
        from diffusers import CogVideoXPipeline

        rotary = None
        if config.use_rotary_positional_embeddings:
            owner: Any = SimpleNamespace(vae_scale_factor_spatial=8, transformer=model)
            rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
                owner, h * 8, w * 8, t, torch.device("cpu")
            )
        missing = config.max_text_seq_length - text.shape[1]
        filled = torch.cat([text, text.new_zeros(b, missing, text.shape[2])], dim=1)
        ofs = x.new_full((1,), 2.0) if config.ofs_embed_dim else None
        indices = (times_B.double() * 999).round().long()
        if given is not None:
            x = torch.cat([x, given / 0.7**2 if name == "cogvideox 1.5" else given], dim=1)  # by its codec's factor
        out = model(
            x.permute(0, 2, 1, 3, 4), filled, indices, ofs=ofs, image_rotary_emb=rotary, return_dict=False
        )[0]  # fmt: skip
        return out.permute(0, 2, 1, 3, 4)
    if name.startswith(("qwen", "flux")):
        return _image_by_hand(name, model, x, times_B, conditions)
    if name.startswith("mochi"):
        return -model(x, text, 1000 * (1 - times_B), mask, return_dict=False)[0]
    if given is not None:  # only the first frame
        x = torch.cat([x, given, torch.zeros_like(x[:, :1])], dim=1)
        x[:, -1, 0] = 1
    if name.startswith("hunyuan 1.5"):
        x = torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1) if given is None else x
        image = x.new_zeros(b, 729, config.image_embed_dim) if pictures is None else pictures[:, 0]
        glyphs, glyphs_mask = (conditions.named[key] for key in ("text_2", "text_2_mask"))
        missing = 256 - glyphs.shape[1]
        glyphs, glyphs_mask = (
            nn.functional.pad(glyphs, (0, 0, 0, missing)),
            nn.functional.pad(glyphs_mask, (0, missing)),
        )
        return model(
            x, times_B * 1000, text, mask, encoder_hidden_states_2=glyphs, encoder_attention_mask_2=glyphs_mask,
            image_embeds=image, return_dict=False,
        )[0]  # fmt: skip
    scale = 1.0 if config.image_condition_type else 6.0  # the default of each pipeline
    guidance = torch.full((b,), 1000 * scale) if config.guidance_embeds else None
    return model(x, times_B * 1000, text, mask.long(), conditions.pooled_BD, guidance, return_dict=False)[0]


def _image_by_hand(name: str, model: nn.Module, x: Tensor, times_B: Tensor, conditions: Conditions) -> Tensor:
    """An image's prediction as its pipeline asks for it."""
    from diffusers import FluxPipeline, QwenImagePipeline

    b, c, _, h, w = x.shape
    text, mask = conditions.text_BLD, conditions.text_mask_BL
    kind: Any = QwenImagePipeline if name.startswith("qwen") else FluxPipeline
    packed = kind._pack_latents(x, b, c, h, w)
    if name.startswith("qwen"):
        out = model(packed, text, mask.long(), times_B, [[(1, h // 2, w // 2)]] * b, return_dict=False)[0]
    else:
        places = FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, x.device, x.dtype)
        guidance = torch.full((b,), 3.5) if _config(model).guidance_embeds else None
        out = model(
            packed, text, conditions.pooled_BD, times_B, places, torch.zeros(text.shape[1], 3), guidance, return_dict=False
        )[0]  # fmt: skip
    return kind._unpack_latents(out, h * 8, w * 8, 8).reshape(x.shape)


def _config(model: nn.Module) -> Any:
    return model.config
