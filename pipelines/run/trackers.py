"""Trackers of a run through accelerate: one run each, which a resumed run continues, with its config, numbers and sample videos."""

from __future__ import annotations

import inspect
import io
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mmspeed.config import RunConfig, dump_config
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.pipelines.run.run_folder import write_text
from mmspeed.redaction import redacted, redacted_tree

PREVIEW_SIDE = 320  # pixels: the longest side of a preview


@dataclass(frozen=True)
class TrackedVideo:
    """A video that was sampled while training: its file, its place among the prompts, and its prompt."""

    path: Path
    name: str
    prompt: str


class Trackers:
    """The config's trackers, started; they go on with the run that `trackers.json` in the run's folder records.

    Args:
        folder: the run's folder.
        step: the step that training goes on from; what a tracker holds of later steps is replaced where it can be.
        kinds: accelerate's class of each tracker by name; None: accelerate's own table.

    Raises UserError for a tracker whose package is not installed, and for one that does not start.
    """

    def __init__(
        self, config: RunConfig, folder: Path, step: int = 0, kinds: Mapping[str, type[Any]] | None = None
    ) -> None:
        self._trackers: list[Any] = []
        if not config.trackers:
            return
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

        PartialState(cpu=config.device.kind == "cpu")  # accelerate's trackers read their process from it
        place = folder / "trackers"
        place.mkdir(parents=True, exist_ok=True)
        identity, known = _identity(folder / "trackers.json")
        for name in config.trackers:
            if kinds is None and not filter_trackers(name, str(place)):
                raise UserError(f"trackers: {name} is not installed; `pip install {name}`, or take it off the list")
            kind = (kinds or LOGGER_TYPE_TO_CLASS)[name]
            try:
                tracker = kind(
                    *_positional(kind, config, place), **_ARGUMENTS[name](config, place, identity, known, step)
                )
                if hasattr(tracker, "start"):
                    tracker.start()
                self._trackers.append(tracker)
                _CONFIGS.get(name, _store_config)(tracker, config, step)
            except Exception as error:  # each package raises its own types: no login, no network, another version
                self.finish()
                raise UserError(f"trackers: {name} did not start: {_first_line(error)}") from error

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of a row with `kind` and `step`, as `kind/name`."""
        numbers = {
            f"{row['kind']}/{name}": value
            for name, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
        }
        for tracker in self._trackers:
            tracker.log(numbers, step=row["step"])

    def log_videos(self, videos: Sequence[TrackedVideo], step: int) -> None:
        """Log sampled videos with their prompts. A tracker that fails on them is named in a warning, and the run goes on."""
        for tracker in self._trackers if videos else ():
            try:
                _VIDEOS.get(tracker.name, _log_prompts)(tracker, videos, step)
            except Exception as error:  # a broken upload must not cost a run
                get_logger("train").warning(f"trackers: {tracker.name} took no videos: {_first_line(error)}")

    def finish(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []


def sampled_videos(folder: Path) -> list[TrackedVideo]:
    """The videos in a folder of samples, by name, each with the prompt in the text file beside it."""
    videos = []
    for path in sorted(folder.glob("*.mp4")):
        text = path.with_suffix(".txt")
        videos.append(TrackedVideo(path, path.stem, text.read_text(encoding="utf-8") if text.is_file() else ""))
    return videos


def preview(path: Path) -> tuple[bytes, int, int]:
    """A video as an animated GIF of at most `PREVIEW_SIDE` pixels: (its bytes, height, width)."""
    import av
    from PIL import Image

    frames = []
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        for frame in container.decode(video=0):
            image = frame.to_image()
            image.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
            frames.append(image.quantize(dither=Image.Dither.NONE))
    buffer = io.BytesIO()
    seconds = 1 / float(rate) if rate else 0.1
    frames[0].save(
        buffer, "GIF", save_all=True, append_images=frames[1:], duration=max(20, round(1000 * seconds)), loop=0
    )
    return buffer.getvalue(), frames[0].height, frames[0].width


def _identity(path: Path) -> tuple[str, bool]:
    """(the id of the run at its trackers, whether it was there before); 21 letters and digits, as the strictest of them wants."""
    if path.is_file():
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["id"]), True
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} cannot be read ({error}); delete it, and trackers begin a new run") from None
    identity = uuid.uuid4().hex[:21]
    write_text(path, json.dumps({"id": identity}) + "\n")
    return identity, False


def _positional(kind: type[Any], config: RunConfig, place: Path) -> tuple[str, ...]:
    """A folder and the run's name for a tracker that writes files; the project for another."""
    if kind.requires_logging_directory:
        return _run_name(config), str(place)
    return (config.tracking.project,)


def _run_name(config: RunConfig) -> str:
    return config.tracking.run or config.name


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -- the arguments of each package's own start -------------------------------------------------------------------------


def _tensorboard(config: RunConfig, place: Path, identity: str, known: bool, step: int) -> dict[str, Any]:
    return {"purge_step": step + 1} if known else {}


def _wandb(config: RunConfig, place: Path, identity: str, known: bool, step: int) -> dict[str, Any]:
    return {"name": _run_name(config), "id": identity, "resume": "allow", "dir": str(place)}


def _swanlab(config: RunConfig, place: Path, identity: str, known: bool, step: int) -> dict[str, Any]:
    named = inspect.signature(import_module("swanlab").init).parameters  # 0.7 renamed two of them
    name = "name" if "name" in named else "experiment_name"
    folder = "log_dir" if "log_dir" in named else "logdir"
    (place / "swanlab").mkdir(exist_ok=True)
    return {name: _run_name(config), "id": identity, "resume": "allow", folder: str(place / "swanlab")}


def _trackio(config: RunConfig, place: Path, identity: str, known: bool, step: int) -> dict[str, Any]:
    return {"name": _run_name(config), "resume": "allow" if known else "never"}


_ARGUMENTS: dict[str, Callable[[RunConfig, Path, str, bool, int], dict[str, Any]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "swanlab": _swanlab,
    "trackio": _trackio,
}


# -- config --------------------------------------------------------------------------------------------------------------


def _store_config(tracker: Any, config: RunConfig, step: int) -> None:
    tracker.store_init_configuration(redacted_tree(config.model_dump(mode="json", by_alias=True)))


def _tensorboard_config(tracker: Any, config: RunConfig, step: int) -> None:
    """Write the whole config as a text, and its values for the page HPARAMS; accelerate's way makes a further run at each start."""
    writer = tracker.tracker
    writer.add_text("config", "```yaml\n" + redacted(dump_config(config)) + "```", step)
    writer.add_hparams(_flat(redacted_tree(config.model_dump(mode="json", by_alias=True))), {}, run_name=".")


_CONFIGS: dict[str, Callable[[Any, RunConfig, int], None]] = {"tensorboard": _tensorboard_config}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Dotted keys with plain values; lists and nulls as text."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return flat


# -- videos --------------------------------------------------------------------------------------------------------------


def _log_prompts(tracker: Any, videos: Sequence[TrackedVideo], step: int) -> None:
    tracker.log({f"samples/{video.name}": video.prompt for video in videos}, step=step)


def _tensorboard_videos(tracker: Any, videos: Sequence[TrackedVideo], step: int) -> None:
    """Write GIFs as images, which TensorBoard plays: its own `add_video` needs a further package for the same."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    for video in videos:
        gif, height, width = preview(video.path)
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        value = Summary.Value(tag=f"samples/{video.name}", image=image)
        tracker.tracker.file_writer.add_summary(Summary(value=[value]), step)
        tracker.tracker.add_text(f"samples/{video.name}", video.prompt, step)
    tracker.tracker.flush()


def _file_videos(package: str, tracker: Any, videos: Sequence[TrackedVideo], step: int) -> None:
    make = import_module(package).Video
    shown = {
        f"samples/{video.name}": make(str(video.path), caption=video.prompt, format=video.path.suffix[1:])
        for video in videos
    }
    tracker.log(shown, step=step)


def _swanlab_videos(tracker: Any, videos: Sequence[TrackedVideo], step: int) -> None:
    make = import_module("swanlab").Video  # GIFs alone
    shown = {
        f"samples/{video.name}": make(io.BytesIO(preview(video.path)[0]), caption=video.prompt) for video in videos
    }
    tracker.log(shown, step=step)


_VIDEOS: dict[str, Callable[[Any, Sequence[TrackedVideo], int], None]] = {
    "tensorboard": _tensorboard_videos,
    "wandb": partial(_file_videos, "wandb"),
    "swanlab": _swanlab_videos,
    "trackio": partial(_file_videos, "trackio"),
}
