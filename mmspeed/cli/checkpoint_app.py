"""`mmspeed checkpoint`: list, verify and remove the checkpoints of a run, and merge their averages."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from mmspeed.errors import UserError

from . import spoken

app = typer.Typer(
    help="List, verify and remove the checkpoints of a run, and merge their averages.", no_args_is_help=True
)


@app.callback()
def _begin(context: typer.Context) -> None:
    spoken.begin_group(context, working=True)


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/NAME.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("list")
def show(run: RunPath, as_json: AsJson = False) -> None:
    """Show the checkpoints of a run: step, time, size, validation loss, and which is the latest and the best."""
    from mmspeed.loop.checkpoint.maintenance import checkpoints_of, entries

    listed = entries(checkpoints_of(run))
    if as_json:
        print(json.dumps([asdict(entry) for entry in listed], indent=2))
        return
    for entry in listed:
        written = datetime.fromtimestamp(entry.written).strftime("%Y-%m-%d %H:%M:%S")
        loss = f"loss {entry.loss:.5f}" if entry.loss is not None else ""
        print(f"{entry.name:24} {written}  {entry.bytes / 1e6:10.1f} MB  {loss:14} {', '.join(entry.marks)}".rstrip())


@app.command()
def verify(
    run: RunPath,
    step: Annotated[int | None, typer.Option(min=0, help="Verify this step's alone.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints and compare it with the stored hashes; exit with 1 when something is damaged."""
    from mmspeed.loop.checkpoint.maintenance import checkpoints_of
    from mmspeed.loop.checkpoint.maintenance import verify as problems_of
    from mmspeed.loop.checkpoint.storage import SEAL, step_name, step_of

    folder = checkpoints_of(run)
    paths = sorted(path for path in folder.glob("step-*") if path.is_dir() and step_of(path) is not None)
    if step is not None:
        paths = [path for path in paths if path.name == step_name(step)]
        if not paths:
            raise UserError(
                f"{run} has no checkpoint of step {step}: `mmspeed checkpoint list {run}` shows those that it has"
            )
    report = {path.name: problems_of(path) for path in paths}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for path in paths:
            sealed = "sound" if (path / SEAL).exists() else "readable; it has no hashes, so damage may go unnoticed"
            print("\n".join(report[path.name]) if report[path.name] else f"{path.name}: {sealed}")
    if any(report.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    run: RunPath,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Number of newest checkpoints to keep.")] = 1,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Without this, only list what would be removed.")
    ] = False,
) -> None:
    """Remove all checkpoints but the newest and the best, and those that were moved aside. Not while the run trains."""
    from mmspeed.loop.checkpoint.maintenance import checkpoints_of, prunable, remove

    paths = prunable(checkpoints_of(run), keep_last)
    if not paths:
        print("nothing to remove")
        return
    print("\n".join(["removing:" if yes else "would remove:", *(path.name for path in paths)]))
    if not yes:
        print("run it again with --yes to remove them")
        return
    remove(paths)
    print(f"removed {len(paths)} checkpoints")


@app.command("merge-ema")
def merge_ema(
    run: RunPath,
    step: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Step of a checkpoint; several times for the mean of several. Default: the newest one."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. Default: ema-STEP.safetensors in the run's folder."),
    ] = None,
    role: Annotated[str | None, typer.Option(help="Role of the model, where a task trains several.")] = None,
) -> None:
    """Write the moving average of the weights, or the mean of those of several steps, as a safetensors file of the model."""
    from mmspeed.loop.checkpoint.load import latest, open_checkpoint
    from mmspeed.loop.checkpoint.maintenance import checkpoints_of
    from mmspeed.loop.checkpoint.merging import merge_averages
    from mmspeed.loop.checkpoint.storage import step_name, step_of
    from mmspeed.models.adapters import is_adapter

    folder = checkpoints_of(run)
    newest = latest(folder)
    paths = [folder / step_name(one) for one in sorted(set(step))] if step else [newest] if newest is not None else []
    if not paths:
        raise UserError(f"{run} has no sound checkpoint: `mmspeed checkpoint list {run}` shows those that it has")
    if any(is_adapter(name) for path in paths for name in open_checkpoint(path)[1]["tensors"]):
        raise UserError(f"{run} trains adapters beside a base, whose files are written by `mmspeed export {run}`")
    label = "-".join(f"{step_of(path):08d}" for path in ((paths[0], paths[-1]) if len(paths) > 1 else paths))
    target = output or run / f"ema-{label}.safetensors"
    if target.suffix != ".safetensors":
        raise UserError(f"--output is {target}: its name must end in .safetensors")
    merged = merge_averages(paths, target, role)
    names = ", ".join(path.name for path in paths)
    print(
        f"{merged.path}: {merged.tensors} tensors, {'the average' if len(paths) == 1 else 'the mean of the averages'} of {names}"
    )
    if merged.partial:
        print("weights that did not train are not in it: load it into the base that the run began with")
