"""`mmspeed sample`: videos from text with a trained run, of prompts on the command line or in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspeed import log
from mmspeed.errors import UserError

from . import completion, launch, spoken

if TYPE_CHECKING:
    from mmspeed.pipelines import TextToVideo
    from mmspeed.pipelines.inference.prompts import VideoRequest
    from mmspeed.pipelines.inference.text_to_video import SamplerChoice

RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of a run, such as runs/my-run.", autocompletion=completion.run_folders),
]

ImageFile = Annotated[Path | None, typer.Option(metavar="FILE", help="First frame, for a run with conditioning.first.")]
LastImageFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Last frame, beside --image, for a run with conditioning.first_last."),
]
VideoFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Video to go on from, with its last frames, for a run with conditioning.prefix."),
]
PrefixFrames = Annotated[
    int | None, typer.Option(min=1, help="Frames of --video; by default as many as the run was trained with.")
]


class Weights(str, Enum):
    """The weights of a checkpoint to sample from."""

    ema = "ema"
    model = "model"


def sample(
    context: typer.Context,
    run_folder: RunFolder,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text of a video; repeat the option for more videos.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File with a prompt a line, or .jsonl with an object a line: prompt, and maybe negative, seed, frames, height, width, "
            "image, last_image, video, prefix_frames.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Video file; several prompts write out-0.mp4, out-1.mp4, ..., those of a file out-0001.mp4, ... by line.",
        ),
    ] = Path("sample.mp4"),
    negative_prompt: Annotated[str | None, typer.Option(help="Text to steer away from.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the sampler.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Classifier-free guidance scale; 1: none.")] = None,
    guidance_2: Annotated[
        float | None,
        typer.Option("--guidance-2", min=0, help="The same of the expert of low noise, of a model with two."),
    ] = None,
    guidance_rescale: Annotated[
        float | None, typer.Option(min=0, max=1, help="Rescale of the guided prediction; 0: none.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="auto, euler, heun, ddim, unipc or dpm++.", autocompletion=completion.samplers)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of the video.")] = None,
    height: Annotated[int | None, typer.Option(min=8, help="Height in pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Width in pixels.")] = None,
    image: ImageFile = None,
    last_image: LastImageFile = None,
    video: VideoFile = None,
    prefix_frames: PrefixFrames = None,
    checkpoint: Annotated[
        str,
        typer.Option(metavar="STEP|best|latest", help="Checkpoint to load.", autocompletion=completion.checkpoints),
    ] = "latest",
    weights: Annotated[Weights, typer.Option(help="The moving average of the weights, or the weights.")] = Weights.ema,
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Processes to start on this machine, which share the prompts.")
    ] = None,
) -> None:
    """Make videos from text with a trained run. Omitted options are taken from the run's config."""
    spoken.begin("sample", run_folder)
    requests, paths = requested(prompt or [], prompts, out)
    if launch.wanted(nproc):
        debug = bool(context.obj.get("debug"))
        raise typer.Exit(launch.launch(without_nproc(context.obj["arguments"]), int(nproc or 1), debug))
    launch.follow_launcher()
    with spoken.loading():
        from mmspeed.pipelines import TextToVideo
        from mmspeed.pipelines.inference.agreement import require_same_sampling
        from mmspeed.pipelines.inference.text_to_video import SamplerChoice

    with log.Working("loading the run", tell=False):
        pipe = TextToVideo.from_run(run_folder, checkpoint=checkpoint, weights=weights.value, device=device)
    sizes = {"frames": frames, "height": height, "width": width}
    files = {"image": image, "last_image": last_image, "video": video, "prefix_frames": prefix_frames}
    requests = [completed(each, negative_prompt, seed, sizes, files) for each in requests]
    choice = SamplerChoice(steps, guidance, sampler, guidance_rescale, guidance_2)
    require_same_sampling(pipe, requests, choice, processes())
    _write_videos(pipe, requests, paths, choice, None if prompts else sheet_path(out))
    if log.rank() == 0:
        spoken.then(f"report {run_folder}")


def completed(
    request: VideoRequest,
    negative: str | None,
    seed: int,
    sizes: dict[str, int | None],
    files: dict[str, Path | int | None],
) -> VideoRequest:
    """The request with the command's values where it has none of its own; files together: those of one or of the other."""
    own = asdict(request)
    values: dict[str, Any] = {name: own[name] or size for name, size in sizes.items()}
    if request.image is None and request.video is None:
        values |= {name: str(value) if isinstance(value, Path) else value for name, value in files.items()}
    return replace(
        request,
        negative=negative if request.negative is None else request.negative,
        seed=seed if request.seed is None else request.seed,
        **values,
    )


def processes() -> int:
    """The processes that share the videos, by the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _write_videos(
    pipe: TextToVideo, requests: list[VideoRequest], paths: list[Path], choice: SamplerChoice, sheet: Path | None
) -> None:
    """Make this process's share of the videos and print their files; with a `sheet`, one after another, and then their contact sheet."""
    from mmspeed.pipelines.inference.media import check_output, contact_sheet, save_image

    rank, world = log.rank(), processes()
    for path, size in zip(paths, pipe.sizes(requests), strict=True):
        check_output(path, size.frames)
    videos, files = [], iter(paths[rank::world])
    steps = (choice.steps or pipe.config.sample.steps or 0) * len(paths[rank::world])
    with log.ProgressLine("sample", steps, "step") as line:

        def tell(done: int, total: int) -> None:
            line.advance(done - line.done)

        together = None if sheet is None else 1
        for _, video in pipe.sample(requests, choice, tell, together=together, rank=rank, world=world):
            path = next(files)
            video.save(path)
            print(path, flush=True)
            if sheet is not None:
                videos.append(video)
    if sheet is not None and world == 1:
        save_image(contact_sheet(videos, [request.prompt for request in requests]), sheet)
        print(sheet)


def requested(prompt: Sequence[str], file: Path | None, out: Path) -> tuple[list[VideoRequest], list[Path]]:
    """The videos to make and their files. Raises UserError for no prompts, prompts from both places, and a file that cannot be read."""
    if bool(prompt) == (file is not None):
        how = "not both" if prompt else "for the text of the videos"
        raise UserError(f"give --prompt TEXT or --prompts FILE, {how}")
    with spoken.loading():
        from mmspeed.pipelines.inference.prompts import VideoRequest, read_requests

    if file is None:
        return [VideoRequest(text) for text in prompt], output_paths(out, len(prompt))
    requests = read_requests(file)
    first = output_paths(out, 1)[0]
    return requests, [first.with_name(f"{first.stem}-{each.line:04}{first.suffix}") for each in requests]


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of a launched process: those of this one without `--nproc N`, which a launcher takes for its own."""
    words = iter(arguments)
    kept = []
    for word in words:
        if word == "--nproc":
            next(words, None)
        elif not word.startswith("--nproc="):
            kept.append(word)
    return kept


def output_paths(out: Path, count: int) -> list[Path]:
    """The files of `count` videos: `out` for one, `out-0`, `out-1`, ... for several; `.mp4` if the name has no ending.

    Raises UserError if `out` is a folder.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a video file, such as {out / 'sample.mp4'}")
    suffix = out.suffix or ".mp4"
    if count == 1:
        return [out.with_suffix(suffix)]
    return [out.with_name(f"{out.stem}-{index}{suffix}") for index in range(count)]


def sheet_path(out: Path) -> Path:
    """The file of the contact sheet of all videos: a PNG beside them."""
    return out.with_name(f"{out.stem}-sheet.png") if out.suffix == ".png" else out.with_suffix(".png")
