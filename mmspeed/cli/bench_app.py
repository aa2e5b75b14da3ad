"""`mmspeed bench`: measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import spoken

app = typer.Typer(help="Measure speed, memory and quality.", no_args_is_help=True)


@app.callback()
def _begin(context: typer.Context) -> None:
    spoken.begin_group(context, working=False)


@app.command()
def decode(
    videos: Annotated[Path | None, typer.Option(help="Folder of your own videos; default: the demo clips.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Videos to decode, at most.")] = 16,
    size: Annotated[str, typer.Option(help="Height and width that frames are scaled to.")] = "96x160",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare the decoders that are installed, each in one process as preprocess uses it, and say which files each reads."""
    from mmspeed.bench.decode import bench_decode

    result = bench_decode(videos, count, size, rounds)
    print(result.to_json() if as_json else "\n".join(result.lines()))


@app.command()
def reliability(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    megabytes: Annotated[int, typer.Option("--state-mb", min=4, help="Size of the state that is saved.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the watchdog's, the ranks' times' and re-verification's share of a step, and the cost of saving; exit with 1 above a goal."""
    from mmspeed.bench.reliability.reading import bench_reading
    from mmspeed.bench.reliability.saving import bench_saving
    from mmspeed.bench.reliability.watch import bench_watch

    watch, saving, reading = bench_watch(rounds), bench_saving(rounds, megabytes), bench_reading(rounds)
    if as_json:
        parts = {"saving": json.loads(saving.to_json()), "reading": json.loads(reading.to_json())}
        print(json.dumps({**json.loads(watch.to_json()), **parts}, indent=2))
    else:
        print("\n".join([*watch.lines(), *saving.lines(), *reading.lines()]))
    if not (watch.passed() and saving.passed() and reading.passed()):
        raise typer.Exit(1)


@app.command()
def step(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
    count: Annotated[bool, typer.Option("--count", help="Count launches, bytes, waits and copies; no timing.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Count what the step of the largest micro-batch asks of device and host, or time it on this device."""
    from mmspeed.bench.step import StepCount, bench_step, median_line

    result = bench_step(config, overrides or (), count=count, rounds=rounds)
    if isinstance(result, StepCount):
        print(result.to_json() if as_json else "\n".join(result.lines()))
    else:
        print(json.dumps(result) if as_json else median_line(result))


@app.command()
def comm(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(min=2, help="Processes to start, unless a launcher has.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of each rank's part, in float32.")] = 16.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians count.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the exchanges between ranks; exit with 1 when bytes or copies differ from the formulas."""
    from mmspeed import log

    from . import launch

    if launch.wanted(ranks):
        words = ["--ranks", str(ranks), "--megabytes", str(megabytes), "--rounds", str(rounds)]
        debug = bool((context.obj or {}).get("debug"))
        raise typer.Exit(launch.launch(["bench", "comm", *words, *(["--json"] if as_json else [])], ranks, debug))
    launch.follow_launcher()
    from mmspeed.bench.comm import bench_comm

    result = bench_comm(megabytes, rounds)
    if log.rank() == 0:
        print(result.to_json() if as_json else "\n".join(result.lines()))
    if not result.passed():
        raise typer.Exit(1)


@app.command()
def buckets(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run whose buckets are measured.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES|SHARE",
            help="Memory that no batch may exceed, such as 70GB or 80%; default: 90% of an accelerator's memory, 60% of a host's free one.",
        ),
    ] = None,
    budget_seconds: Annotated[
        float, typer.Option(help="A step that takes longer is the last one measured for its bucket.")
    ] = 30.0,
    most: Annotated[int | None, typer.Option(min=1, help="Most samples of a step.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each batch; the median counts.")] = 5,
    minutes: Annotated[
        float, typer.Option(help="Approximate total time: after it no larger batch and no further round is started.")
    ] = 10.0,
) -> None:
    """Measure time and memory of a step of each bucket on this device."""
    from mmspeed.bench.buckets import profile_buckets

    profile_buckets(
        config,
        overrides or (),
        memory_limit=memory_limit,
        budget_seconds=budget_seconds,
        most=most,
        repeats=repeats,
        minutes=minutes,
    )


@app.command()
def attention(
    run: Annotated[Path, typer.Option(metavar="RUN", help="Run whose layers are measured and get suggested settings.")],
    keep: Annotated[
        str | None, typer.Option(metavar="SHARE,...", help="Shares of pairs to keep; default 0.05,0.1,0.2.")
    ] = None,
    planner: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Some of clusters, tiles, window, skip; default all.")
    ] = None,
    tail: Annotated[str | None, typer.Option(metavar="NAME,...", help="zero, summary; default both.")] = None,
    backend: Annotated[str, typer.Option(help="Kernel: auto, or the name of one.")] = "auto",
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    cluster_size: Annotated[
        int | None, typer.Option(min=1, help="Approximate number of queries in a cluster; default by the length.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians count.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to run the model on.")] = 2,
    checkpoint: Annotated[str, typer.Option(help="latest, best or a step.")] = "latest",
    error: Annotated[float, typer.Option(min=0.0, max=1.0, help="Largest error of the suggested settings.")] = 0.1,
    output: Annotated[
        Path | None, typer.Option(help="Folder of attention.json and attention.png; default the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure sparse attention against dense on the layers of a trained model: error, speed, and settings to paste."""
    from mmspeed.bench.attention_bench import ask
    from mmspeed.bench.attention_run import bench_run

    result = bench_run(
        run,
        ask(keep, planner, tail),
        samples=samples,
        checkpoint=checkpoint,
        error=error,
        output=output,
        backend=backend,
        device=device,
        rounds=rounds,
        cluster_size=cluster_size,
    )
    print(result.to_json() if as_json else "\n".join(result.lines()))


@app.command()
def memory(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for memory.json and memory.png; default the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show the memory of a run's training step by category and layer."""
    from mmspeed import log
    from mmspeed.bench.memory_run import report_config

    report = report_config(config, overrides or (), output)
    if log.rank() == 0:
        print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
