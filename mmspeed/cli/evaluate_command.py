"""`mmspeed evaluate`: a run beside its base, by held-out loss and by videos of the same prompts and seeds."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from mmspeed.config.places import require_run
from mmspeed.errors import UserError

from . import completion, launch, spoken
from .sample_command import RunFolder, Weights, without_nproc


class Layout(str, Enum):
    """The names of videos: those that VBench or FastVideo's eval reads."""

    vbench = "vbench"
    fastvideo = "fastvideo"


def evaluate(
    context: typer.Context,
    run_folder: RunFolder,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text of videos instead of validate.prompts; repeat the option for more."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File with a prompt a line, or .jsonl with an object a line, as of mmspeed sample: prompt, and maybe image, seed, ...",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Videos of each prompt, with seeds from validate.seed on.")] = 2,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the sampler.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(metavar="STEP|best|latest", help="Checkpoint to evaluate.", autocompletion=completion.checkpoints),
    ] = "latest",
    weights: Annotated[Weights, typer.Option(help="The moving average of the weights, or the weights.")] = Weights.ema,
    clip: Annotated[
        str | None, typer.Option(metavar="FOLDER|HUB_ID", help="CLIP's weights, for a CLIP score of the videos.")
    ] = None,
    layout: Annotated[
        tuple[Layout, Path] | None,
        typer.Option(
            metavar="vbench|fastvideo FOLDER",
            help="Write the videos into FOLDER/base and FOLDER/run by the names that VBench, or FastVideo's eval, reads.",
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            metavar='"COMMAND {folder}"',
            help="Command to run for the videos of base and of run; the numbers of the JSON that it prints go into the table.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Processes to start on this machine, which share samples and prompts.")
    ] = None,
) -> None:
    """Compare a run with its base: held-out loss, and videos of the same prompts and seeds, in a table and a page."""
    spoken.begin("evaluate", run_folder)
    require_run(run_folder)
    with spoken.loading():
        from mmspeed.pipelines.inference.prompts import VideoRequest, read_requests
        from mmspeed.pipelines.report.evaluation import EvaluationJob, evaluate_run
        from mmspeed.pipelines.report.scores import check_command

    for command in score or ():
        check_command(command)
    if prompt and prompts is not None:
        raise UserError("give --prompt TEXT or --prompts FILE, not both")
    requests = None if prompts is None else tuple(read_requests(prompts))
    if prompt:
        requests = tuple(VideoRequest(text) for text in dict.fromkeys(prompt))
    if launch.wanted(nproc):
        debug = bool(context.obj.get("debug"))
        raise typer.Exit(launch.launch(without_nproc(context.obj["arguments"]), int(nproc or 1), debug))
    launch.follow_launcher()
    named: tuple[Literal["vbench", "fastvideo"], Path] | None = None if layout is None else (layout[0].value, layout[1])
    job = EvaluationJob(
        run_folder, checkpoint, weights.value, device, requests, seeds, steps, clip, named, tuple(score or ())
    )
    result = evaluate_run(job)
    if result is None:  # another process than the first
        return
    written = result.write()
    table = result.table()
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *cells in table:
        print(
            "  ".join(
                [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
            )
        )
    for line in [*result.notes, *written]:
        print(line)
