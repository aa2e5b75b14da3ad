"""The calls of a published transformer by training and by its official pipeline, recorded and compared argument by argument.

Both calls go no further, so the transformer is an outline without weights. The official pipeline gets the same noisy latents, in whatever
shape it draws its noise, the same time, captions and images; it encodes these itself.

Legend: B batch, C channels, T h w latent, L caption tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.weights import quiet
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.inference.media import RATE
from mmspeed.protocols import Batch
from mmspeed.shapes import Bucket, as_bucket

# the largest difference of captions, of their largest number: encoders sum in another order in another batch
ENCODED = 1e-6
Arguments = Mapping[str, Any]
# arguments that change nothing in training, and those that stand for an absent one
SILENT = ("return_dict", "attention_kwargs", "joint_attention_kwargs")


@dataclass(frozen=True)
class Compared:
    """One argument of both calls.

    Args:
        name: of the forward's argument.
        ours, official: the kind of value, in words.
        error: the largest difference of the numbers that count; None where the two cannot be compared.
        allowed: the largest that is right.
    """

    name: str
    ours: str
    official: str
    error: float | None
    allowed: float

    @property
    def right(self) -> bool:
        """True where both calls agree."""
        return self.error is not None and self.error <= self.allowed

    def line(self) -> str:
        """A line of the report."""
        verdict = (
            "cannot be compared" if self.error is None else f"differ by {self.error:.3g}" if self.error else "equal"
        )
        return f"{'' if self.right else 'WRONG: '}{self.name}: ours {self.ours}, official {self.official}: {verdict}"


def time_of(task: VideoDomain, batch: Batch) -> Tensor:
    """The model times (B,) of a batch."""
    bucket, latent = as_bucket(batch.shape), batch["latents"].shape[2:]
    objective = task.objective.sized(bucket, task.predictor.tokens((latent[0], latent[1], latent[2])))
    return objective.time_from_quantile(batch["quantiles"]).float()


def noisy(task: VideoDomain, batch: Batch) -> Tensor:
    """The noisy latents (B, C, T, h, w) of a batch."""
    return task.objective.training_pair(batch["latents"], batch["noise"], time_of(task, batch))[0]


class _RecordedError(Exception):
    """Ends a call whose arguments are known."""


def recorded(model: nn.Module, run: Callable[[], object]) -> Arguments:
    """The arguments, by name, with which `run` first calls a model, which is not computed."""
    calls: list[Arguments] = []
    names = inspect.signature(type(model).forward)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(
            {key: each for key, each in names.bind(module, *args, **kwargs).arguments.items() if key != "self"}
        )
        raise _RecordedError

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        run()
    except _RecordedError:
        pass
    finally:
        handle.remove()
    if not calls:
        raise UserError(f"{type(model).__name__} was not called")
    return calls[0]


def official_pipeline(repository: Repository, model: nn.Module, name: str) -> Any:
    """The pipeline of a name around a repository's transformer, on the CPU. Raises UserError for a pipeline that diffusers lacks."""
    kind = repository.pipeline_class(name)
    own = repository.index.get(repository.transformer)
    places = [part for part, place in repository.index.items() if place == own]  # also a second expert
    with quiet():
        pipeline = kind.from_pretrained(repository.folder, **dict.fromkeys(places, model), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.__class__ = type(name, (kind,), {"_execution_device": torch.device("cpu")})
    return pipeline


def keep_latents(pipeline: Any, x_BCThw: Tensor) -> None:
    """Let a pipeline whose first latents are not noise alone begin with these."""
    own = pipeline.prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        return (x_BCThw.clone(), *own(*args, **kwargs)[1:])

    pipeline.prepare_latents = prepare_latents


def official_calls(
    pipeline: Any,
    model: nn.Module,
    task: VideoDomain,
    batch: Batch,
    prompts: Sequence[str],
    images: Mapping[str, Any] = MappingProxyType({}),
) -> Arguments:
    """The arguments with which a pipeline calls its transformer for the samples of a batch; `images`: its own that hold images.

    A pipeline has one time and one frame rate for all of its samples: it is called for each of the batch's, and its sample is taken.
    """
    x_BCThw, bucket, times_B = noisy(task, batch), as_bucket(batch.shape), time_of(task, batch).tolist()
    rates_B = batch["fps"].tolist() if "fps" in batch else [task.config.data.fps or RATE] * batch.size
    calls: dict[tuple[float, float], Arguments] = {}
    for t, fps in zip(times_B, rates_B, strict=True):
        if (t, fps) not in calls:
            calls[t, fps] = official_call(pipeline, model, x_BCThw, t, prompts, bucket, {"frame_rate": fps, **images})
    return of_samples([calls[each] for each in zip(times_B, rates_B, strict=True)])


def of_samples(calls: Sequence[Arguments]) -> Arguments:
    """One call from a call for each sample: of tensors with a row a sample, row b of call b; of the others those of the first."""

    def row_of_each(name: str) -> Any:
        values = [call.get(name) for call in calls]
        tensors = [each for each in values if isinstance(each, Tensor) and each.ndim and len(each) == len(calls)]
        if len(tensors) < len(calls):
            return values[0]
        return torch.stack([each[place] for place, each in enumerate(tensors)])

    return {name: row_of_each(name) for name in calls[0]}


@torch.no_grad()
def official_call(
    pipeline: Any,
    model: nn.Module,
    x_BCThw: Tensor,
    t: float,
    prompts: Sequence[str],
    bucket: Bucket,
    further: Mapping[str, Any],
) -> Arguments:
    """The arguments with which a pipeline calls its transformer for these noisy latents, at model time `t`.

    further: arguments of the pipeline, of which it gets those that it takes.
    """
    takes, guided = inspect.signature(pipeline.__call__).parameters, _config(model).get("guidance_embeds", False)
    settings: dict[str, Any] = {
        "height": bucket.height,
        "width": bucket.width,
        "num_frames": bucket.frames,
        "num_inference_steps": 2,
        "output_type": "latent",
        **further,
        **({} if guided else {"guidance_scale": 1.0}),  # without a second prediction
    }
    _set_time(pipeline.scheduler, t)
    processor = getattr(pipeline, "video_processor", None)
    # a size that the pipeline would choose by the picture's
    if processor is not None and hasattr(processor, "calculate_default_height_width"):
        processor.calculate_default_height_width = lambda *_, **__: (bucket.height, bucket.width)
    keys = {key: each for key, each in settings.items() if key in takes}

    def run() -> None:
        with _DrawsThese(x_BCThw):
            pipeline(prompt=prompts[0] if len(prompts) == 1 else list(prompts), **keys)  # some take no list

    return recorded(model, run)


def _set_time(scheduler: Any, t: float) -> None:
    """Let a scheduler have one step, at model time `t`, in its own units."""
    steps = scheduler.config.num_train_timesteps
    if scheduler.config.get("prediction_type") == "v_prediction":
        time = torch.tensor([round(t * (steps - 1))])
    else:
        sigma = torch.tensor([t], dtype=torch.float32)
        time = (1.0 - sigma if scheduler.config.get("invert_sigmas") else sigma) * steps

    def set_timesteps(
        num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, timesteps: Any = None, mu: Any = None
    ) -> None:
        scheduler.timesteps, scheduler.num_inference_steps = time, 1
        scheduler.sigmas = torch.tensor([t, 0.0])

    scheduler.set_timesteps = set_timesteps


class _DrawsThese(TorchFunctionMode):
    """A mode in which noise of the latent's size is the latent (B, C, T, h, w), with its dims in the order that is asked for.

    Other noise, such as of a draw from the codec's posterior, is 0.
    """

    def __init__(self, x_BCThw: Tensor) -> None:
        super().__init__()
        self.x_BCThw = x_BCThw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            size = tuple(args[0]) if args and isinstance(args[0], Sequence) else tuple(args)
            x_BCThw = self.x_BCThw
            for each in (x_BCThw, x_BCThw.transpose(1, 2), x_BCThw[:, :, 0]):
                if tuple(each.shape) == size and each.numel() == x_BCThw.numel():
                    return each.clone()
            return func(*args, **(kwargs or {})).zero_()
        return func(*args, **(kwargs or {}))


def compared(ours: Arguments, official: Arguments, marked: Arguments | None = None) -> tuple[Compared, ...]:
    """The arguments of two calls of one class. Rows of captions that a mask leaves out do not count.

    marked: our call with NaN for what the codec gave; those numbers are compared apart from the others, as encodings.
    """
    names = [name for name in dict.fromkeys((*ours, *official)) if name not in SILENT]
    pairs = []
    for name in names:
        one, other, codec = ours.get(name), official.get(name), None if marked is None else marked.get(name)
        if one is None and other is None:
            continue
        if isinstance(codec, Tensor) and codec.is_floating_point() and bool(codec.isnan().any()):
            pairs += _parts(name, one, other, codec.isnan())
            continue
        allowed = (
            ENCODED
            if name.startswith(("encoder_hidden_states", "pooled", "image_embeds")) and "mask" not in name
            else 0.0
        )
        if allowed and isinstance(other, Tensor):
            allowed *= max(1.0, float(other.abs().max()))
        pairs.append(Compared(name, _words(one), _words(other), _difference(name, one, other, ours, official), allowed))
    return tuple(pairs)


def _parts(name: str, one: Any, other: Any, encoded: Tensor) -> list[Compared]:
    """The comparison of a tensor's own numbers, and that of those which the codec gave (`encoded`)."""
    if not isinstance(other, Tensor) or other.shape != one.shape:
        return [Compared(name, _words(one), _words(other), None, 0.0)]
    allowed = ENCODED * max(1.0, float(other[encoded].abs().max()))
    rest, kept = _distance(one[~encoded], other[~encoded]), _distance(one[encoded], other[encoded])
    return [
        Compared(name, _words(one), _words(other), rest, 0.0),
        Compared(f"{name} (encoded frames)", _words(one), _words(other), kept, allowed),
    ]


def _difference(name: str, one: Any, other: Any, ours: Arguments, official: Arguments) -> float | None:
    """The largest difference of two arguments; None for those of other kinds or shapes."""
    if "mask" in name:
        return _of_masks(one, other)
    mask = _mask_of(name, ours)
    if mask is not None and isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim == other.ndim == 3:
        if other.shape[1] < one.shape[1] or one.shape[2] != other.shape[2] or len(one) != len(other):
            return None
        one, other = one[mask], other[:, : one.shape[1]][mask]
    return _distance(one, other)


def _distance(one: Any, other: Any) -> float | None:
    """The largest difference of two values: tensors of one shape and kind, numbers, or sequences of them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return None
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, Sequence) and isinstance(other, Sequence) and len(one) == len(other):
        each = [_distance(*pair) for pair in zip(one, other, strict=True)]
        return None if None in each else max((error for error in each if error is not None), default=0.0)
    # one for each sample, where the pipeline has one for all
    if isinstance(one, Tensor) and isinstance(other, int | float):
        return float((one.double() - torch.tensor(other, dtype=one.dtype).double()).abs().max())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return None


def _of_masks(one: Any, other: Any) -> float | None:
    """0 for masks (B, L) that show the same tokens; an absent one shows all, and what lies beyond the shorter one must be hidden."""
    masks = [mask.bool() for mask in (one, other) if isinstance(mask, Tensor)]
    if len(masks) == 1:
        return float((~masks[0]).any())
    if len(masks) != 2 or len(masks[0]) != len(masks[1]):
        return None
    length = min(mask.shape[1] for mask in masks)
    same = torch.equal(masks[0][:, :length], masks[1][:, :length])
    return float(not same or any(bool(mask[:, length:].any()) for mask in masks))


def _mask_of(name: str, arguments: Arguments) -> Tensor | None:
    """The mask of a caption among the arguments of its call; None where it has none."""
    second = name.endswith("_2")
    for key, each in arguments.items():
        if (
            "mask" in key
            and key.endswith("_2") == second
            and isinstance(each, Tensor)
            and name.startswith("encoder_hidden")
        ):
            return each.bool()
    return None


def _words(value: Any) -> str:
    """A value in words: a tensor by its number type and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Sequence) and any(isinstance(each, Tensor) for each in value):
        return f"[{', '.join(map(_words, value))}]"
    return "none" if value is None else repr(value)


def _config(model: nn.Module) -> Any:
    return model.config
