"""`mmspeed sample`: videos from text with a trained run, of prompts on the command line or in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspeed import log
from mmspeed.config.places import require_run
from mmspeed.errors import UserError

from . import completion, launch, spoken

if TYPE_CHECKING:
    from mmspeed.pipelines.diffusion.samplers import OnStep
    from mmspeed.pipelines.inference.media import Video
    from mmspeed.pipelines.inference.prompts import VideoRequest
    from mmspeed.shapes import Bucket

    Videos = Iterator[tuple[VideoRequest, Video]]

# steps, guidance, sampler, rescale, guidance of the expert of low noise
Settings = tuple[int | None, float | None, str | None, float | None, float | None]

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
ControlFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Control video of the same frames, for a run whose model takes one.")
]

Official = Annotated[
    bool,
    typer.Option(
        "--official",
        help="Sample with the official pipeline of a published model, from a run or from a folder of mmspeed export.",
    ),
]


SecondGuidance = Annotated[
    float | None, typer.Option("--guidance-2", min=0, help="The same of the expert of low noise, of a model with two.")
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Of a language model: most tokens behind a prompt; 128 without it.")
]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="Of a language model: 0, as without it, takes the likeliest token.")
]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Of a language model: share of the likeliest tokens; 1: all.")
]


Chat = Annotated[
    bool,
    typer.Option("--chat", help="Of a language model: answer each prompt as a user's message, by the chat template."),
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
            "image, last_image, video, prefix_frames, control.",
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
    guidance_2: SecondGuidance = None,
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
    control: ControlFile = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="STEP|best|latest", help="Checkpoint to load.", autocompletion=completion.checkpoints)
    ] = "latest",
    weights: Annotated[Weights, typer.Option(help="The moving average of the weights, or the weights.")] = Weights.ema,
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Processes to start on this machine, which share the prompts.")
    ] = None,
    official: Official = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    chat: Chat = False,
) -> None:
    """Make videos from text with a trained run, or texts with a language model. Omitted options are taken from the run's config."""
    spoken.begin("sample", run_folder)
    if not official:
        require_run(run_folder)
    writing = {"tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "chat": chat or None}
    if writes_texts(context, run_folder, writing):
        _write_texts(run_folder, prompt or [], checkpoint, weights, device, seed, writing)
        return
    requests, paths = requested(prompt or [], prompts, out)
    sizes = {"frames": frames, "height": height, "width": width}
    files = {"image": image, "last_image": last_image, "video": video, "prefix_frames": prefix_frames}
    requests = [completed(each, negative_prompt, seed, sizes, files, control) for each in requests]
    sheet = None if prompts else sheet_path(out)
    job = SampleJob(run_folder, checkpoint, weights, device, requests, paths, sheet)
    settings = (steps, guidance, sampler, guidance_rescale, guidance_2)
    if official:
        if launch.wanted(nproc) or processes() > 1:
            raise UserError("--official: the official pipeline samples in one process: leave --nproc out")
        _sample_officially(job, settings)
        return
    if launch.wanted(nproc):
        debug = bool(context.obj.get("debug"))
        raise typer.Exit(launch.launch(without_nproc(context.obj["arguments"]), int(nproc or 1), debug))
    launch.follow_launcher()
    _sample_run(job, settings)


def task_of(place: Path) -> str:
    """The task of the run in a folder; `video` for a folder without a run's config, such as an exported repository."""
    from mmspeed.config.tasks import recorded_task

    try:
        return recorded_task(place / "config.yaml")
    except (OSError, ValueError, AttributeError, UserError):
        return "video"


OF_TEXTS = (
    "run_folder", "prompt", "checkpoint", "weights", "device", "seed", "max_new_tokens", "temperature", "top_p", "chat",
)  # fmt: skip


def writes_texts(context: typer.Context, place: Path, writing: dict[str, Any]) -> bool:
    """True for a run of a language model. Raises UserError for options of the other task."""
    if task_of(place) != "language":
        if any(value is not None for value in writing.values()):
            raise UserError(
                "--max-new-tokens, --temperature, --top-p and --chat are of language models: leave them out for videos"
            )
        return False
    others = [name for name in context.params if name not in OF_TEXTS and on_command_line(context, name)]
    if others:
        raise UserError(f"--{others[0].replace('_', '-')} is of videos, and {place} is a run of a language model")
    return True


def on_command_line(context: typer.Context, name: str) -> bool:
    """True where an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _write_texts(
    place: Path, prompts: list[str], checkpoint: str, weights: Weights, device: str, seed: int, writing: dict[str, Any]
) -> None:
    """Print the text that a language model writes behind each prompt, after the prompt, or its answer to each."""
    if not prompts:
        raise UserError("give a --prompt")
    with spoken.loading():
        from mmspeed.pipelines.inference.language import LanguageModel, Writing

    with log.Working("loading the run", tell=False):
        model = LanguageModel.from_run(place, checkpoint=checkpoint, weights=weights.value, device=device)
    settings = {name: value for name, value in writing.items() if value is not None}
    chat = settings.pop("chat", False)
    with log.Working("writing", tell=False):
        texts = (model.chat if chat else model)(prompts, Writing(seed=seed, **settings))
    for prompt, text in zip(prompts, texts, strict=True):
        print(text if chat else f"{prompt}{text}")


@dataclass(frozen=True)
class SampleJob:
    """The videos to make of a run's weights, their files, and the file of their contact sheet, if there is to be one."""

    place: Path
    checkpoint: str
    weights: Weights
    device: str
    requests: list[VideoRequest]
    paths: list[Path]
    sheet: Path | None


def completed(
    request: VideoRequest,
    negative: str | None,
    seed: int,
    sizes: dict[str, int | None],
    files: dict[str, Path | int | None],
    control: Path | None = None,
) -> VideoRequest:
    """The request with the command's values where it has none of its own; files of frames together: those of one or of the other."""
    own = asdict(request)
    values: dict[str, Any] = {name: own[name] or size for name, size in sizes.items()}
    if request.image is None and request.video is None:
        values |= {name: str(value) if isinstance(value, Path) else value for name, value in files.items()}
    return replace(
        request,
        negative=negative if request.negative is None else request.negative,
        seed=seed if request.seed is None else request.seed,
        control=str(control) if request.control is None and control is not None else request.control,
        **values,
    )


def processes() -> int:
    """The processes that share the videos, by the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _sample_run(job: SampleJob, settings: Settings) -> None:
    """Make this process's share of the videos with the samplers of mmspeed."""
    with spoken.loading():
        from mmspeed.pipelines import TextToVideo
        from mmspeed.pipelines.inference.agreement import require_same_sampling
        from mmspeed.pipelines.inference.text_to_video import SamplerChoice

    with log.Working("loading the run", tell=False):
        pipe = TextToVideo.from_run(job.place, checkpoint=job.checkpoint, weights=job.weights.value, device=job.device)
    choice = SamplerChoice(*settings)
    require_same_sampling(pipe, job.requests, choice, processes())
    rank, world = log.rank(), processes()
    together = None if job.sheet is None else 1

    def make(tell: OnStep) -> Videos:
        return pipe.sample(job.requests, choice, tell, together=together, rank=rank, world=world)

    mine = job.paths[rank::world]
    count = (choice.steps or pipe.config.sample.steps or 0) * len(mine)
    _write_videos(make, pipe.sizes(job.requests), job.paths, mine, count, job.sheet if world == 1 else None)
    if log.rank() == 0:
        spoken.then(f"report {job.place}")


def _sample_officially(job: SampleJob, settings: Settings) -> None:
    """Make the videos with the official pipeline of a run or an export."""
    with spoken.loading():
        from mmspeed.pipelines.inference.official import OfficialSampler
        from mmspeed.pipelines.inference.text_to_video import SamplerChoice

    with log.Working("loading the official pipeline", tell=False):
        pipe = OfficialSampler.open(job.place, checkpoint=job.checkpoint, weights=job.weights.value, device=job.device)
    choice = SamplerChoice(*settings)
    count = (choice.steps or pipe.sample_config.steps or 0) * len(job.paths)
    _write_videos(
        lambda tell: pipe.sample(job.requests, choice, tell),
        pipe.sizes(job.requests),
        job.paths,
        job.paths,
        count,
        job.sheet,
    )


def _write_videos(
    make: Callable[[OnStep], Videos],
    sizes: Sequence[Bucket],
    paths: Sequence[Path],
    mine: Sequence[Path],
    steps: int,
    sheet: Path | None,
) -> None:
    """Make videos of these sizes and print their files; with a `sheet` also their contact sheet. `mine`: the files of this process."""
    from mmspeed.pipelines.inference.media import check_output, contact_sheet, save_image

    for path, size in zip(paths, sizes, strict=True):
        check_output(path, size.frames)
    videos, prompts, files = [], [], iter(mine)
    with log.ProgressLine("sample", steps, "step") as line:

        def tell(done: int, total: int) -> None:
            line.advance(done - line.done)

        for request, video in make(tell):
            path = next(files)
            video.save(path)
            print(path, flush=True)
            if sheet is not None:
                videos.append(video)
                prompts.append(request.prompt)
    if sheet is not None:
        save_image(contact_sheet(videos, prompts), sheet)
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
