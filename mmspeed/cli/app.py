"""The commands of `mmspeed`. Each imports its implementation inside its function, so that `mmspeed --help` loads no torch."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspeed import log
from mmspeed.errors import UserError
from mmspeed.version import __version__

from . import (
    bench_app,
    cache_app,
    checkpoint_app,
    completion,
    demo_command,
    evaluate_command,
    export_command,
    launch,
    plan_command,
    qualify_command,
    sample_command,
    spoken,
)
from .failures import report as report_failure

if TYPE_CHECKING:
    from mmspeed.config import RunConfig

HELP = (
    "Train Sora-class video diffusion models: encode once into a cache, then train on one to many devices.\n\n"
    "Begin with `mmspeed demo`, or with `mmspeed init my-run`."
)
MOST_RANKS = 100_000  # in a schedule preview
EPILOG = "With --debug, anywhere on the line, errors show their traceback. Docs: docs/ in the repository."

app = typer.Typer(
    help=HELP,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app.app, name="cache")
app.add_typer(checkpoint_app.app, name="checkpoint")
app.add_typer(bench_app.app, name="bench")
app.command()(qualify_command.qualify)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", autocompletion=completion.config_files)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override, such as train.lr=2e-4.")
]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Processes to start on this machine, one for each device.")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        metavar="K",
        help="Times that all processes are started again after one of them failed, from the last checkpoint.",
    ),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole resolved configuration and stop.")]


def run(argv: list[str]) -> int:
    """Run one command line and return the exit code. Exceptions become lines on standard error (`failures.py`)."""
    arguments, debug = split_debug(argv)
    try:
        result = _command()(
            args=arguments or ["--help"],
            prog_name="mmspeed",
            standalone_mode=False,
            obj={"debug": debug, "arguments": arguments},
        )
        sys.stdout.flush()
    except SystemExit as end:  # so typer ends after it has written completion
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (Exception, KeyboardInterrupt) as error:
        _settle_stdout()
        if isinstance(error, BrokenPipeError):
            return 1  # the reader of the output has gone (`mmspeed ... | head`): print nothing
        if hasattr(error, "format_message"):
            return _usage_error(error)
        return _leave(report_failure(error, debug))
    code = result if isinstance(result, int) else 0
    # typer turns Ctrl-C into this exit code
    return report_failure(KeyboardInterrupt(), False) if code == 130 else code


@functools.cache
def _command() -> Any:
    """The tree of all commands, built once in a process: to read the types of all options takes a moment."""
    return typer.main.get_command(app)


def _leave(code: int) -> int:
    """End a failed process of several immediately: an orderly end would wait for the others, which wait for this one."""
    if launch.one_of_several():
        launch.end_now(code)  # the launcher ends the others
    return code


def _settle_stdout() -> None:
    """Discard output that cannot be written, about which Python would complain again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def split_debug(argv: list[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, and True if it was among them; arguments after `--` are left alone."""
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = [word for word in argv[:end] if word != "--debug"] + argv[end:]
    return arguments, len(arguments) < len(argv)


def _usage_error(error: Any) -> int:
    """Show a mistake in the command line: click's exceptions, whose module differs between versions of typer."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        path = context.command_path if context is not None else "mmspeed"
        message = " ".join(error.format_message().split())
        print(f"mmspeed: error: {message} See `{path} --help`.", file=sys.stderr)
    return int(error.exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mmspeed {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
) -> None:
    """Options of every command."""
    log.setup()


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Config file to write: my-run or my-run.yaml.")],
    videos: Annotated[
        str | None,
        typer.Option(
            help="Folder, manifest, tars or URL of your videos, which the config is fitted to; without it, the demo clips."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write every key, with its sentence and default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    task: Annotated[str, typer.Option(help="Task to train.", autocompletion=completion.tasks)] = "video",
    model: Annotated[
        str | None,
        typer.Option(
            help="Published model to fine-tune: a short name such as wan2.1-1.3b, a hub id (owner/name) or a folder; "
            "of the task language also a recipe for training from the beginning, such as qwen3-8b."
        ),
    ] = None,
    texts: Annotated[
        str | None, typer.Option(help="Files or folder of texts, to train a language model on (--task language).")
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="lora", help="Train low-rank adapters beside --model, whose own weights stay frozen."),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the adapters; by default 32.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of the device, such as 24GB, that the frozen base is fitted into."),
    ] = None,
) -> None:
    """Write a commented config, ready to edit; with --videos, fitted to your videos; with --model, for fine-tuning a published one."""
    if texts is not None:
        if videos is not None:
            raise UserError("--texts is of the task language: give it without --videos")
        videos, task = texts, "language"
    if videos is not None:  # which are read; anything else takes a moment
        spoken.begin("init", path)
    with spoken.loading():
        from .init import write_config

    with log.Working("looking at the data", tell=False):
        config_path = write_config(
            path,
            videos,
            force,
            task,
            full,
            tell=lambda line: print(line, flush=True),
            model=model,
            option="--videos" if texts is None else "--texts",
            adapter=adapter,
            rank=rank,
            memory=memory,
        )
    print(f"{config_path}: edit it, then run `mmspeed check {config_path}`")


@app.command()
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="HTML page to write; by default OUTPUT/NAME-data.html."),
    ] = None,
    suggest_buckets: Annotated[
        int | None,
        typer.Option(metavar="N", help="Also find the N buckets that lose least of the sources, and show the loss."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="8,64,...", help="Numbers of devices to show the schedule for; by default those of this machine."
        ),
    ] = None,
    schedule: Annotated[bool, typer.Option("--schedule", help="Also show the tables of the schedule.")] = False,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="ulysses=2,...",
            help="Instead, check that this layout computes the same as one process: the config, reduced in size, on CPU processes.",
        ),
    ] = None,
    against_official: Annotated[
        bool,
        typer.Option(
            "--against-official",
            help="Instead, compare the call that training makes of a published model with the official pipeline's.",
        ),
    ] = False,
) -> None:
    """Read the sources, and report what a run of the config takes in lines and as an HTML page; needs no accelerator."""
    from mmspeed.config import load_config

    if parallel is not None:
        from .check import check_parallel

        other_options = {"--report": report_file, "--suggest-buckets": suggest_buckets, "--ranks": ranks}
        other_options["--schedule"] = schedule or None
        with log.Working(f"checking the layout {parallel}"):
            code = check_parallel(load_config(config, overrides or ()), parallel, other_options)
        raise typer.Exit(code)
    if against_official:
        from .check import check_official

        with log.Working("comparing with the official pipeline"):
            code = check_official(load_config(config, overrides or ()))
        raise typer.Exit(code)
    from rich.console import Console

    from mmspeed.pipelines.report.advice import refusals

    from .check import check_config, model_lines

    run_config = load_config(config, overrides or ())
    spoken.begin("check", config)
    numbers = None if ranks is None else numbers_of(ranks)
    with log.Working("checking", tell=False):
        report = check_config(run_config, report_file, suggest_buckets, numbers, schedule)
        console = Console()
        for line in report.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if report.problems:
            raise typer.Exit(1)
        for line in model_lines(run_config, report):
            print(line)
        for line in refusals(run_config):
            print(f"warning: {line}")
    spoken.then(_train_command(config, overrides))


app.command()(plan_command.plan)


@app.command()
def preprocess(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Nproc = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Do only part I of N (1/8 to 8/8), as one job of an array; the last one to end completes the cache.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Use N workers of Ray Data, on the cluster that RAY_ADDRESS names or on this machine; auto: one per device.",
        ),
    ] = None,
    print_config: PrintConfig = False,
) -> None:
    """Probe, filter, cut and encode the sources once, into the cache."""
    if shard is not None and launch.wanted(nproc):
        raise UserError("--shard and --nproc both divide the work: use one of them")
    workers = ray_workers(ray, alone=shard is None and not nproc and "RANK" not in os.environ)
    resolved = _resolve(context, "preprocess", config, overrides, nproc, print_config)
    from .preparations import needed_preparation

    with spoken.loading():
        preparation = needed_preparation(resolved, "preprocess")
    with log.Working("preprocessing", tell=False):
        if ray is not None:
            lines = preparation.build_on_ray(workers)
        else:
            lines = preparation.build(shard)
    _print_lines(lines)
    spoken.then(f"train {config}")


@app.command()
def train(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Nproc = None,
    max_restarts: MaxRestarts = 0,
    print_config: PrintConfig = False,
) -> None:
    """Train from the cache; the first epoch adds missing entries, and a stopped run continues."""
    resolved = _resolve(context, "train", config, overrides, nproc, print_config, max_restarts=max_restarts)
    with spoken.loading():
        from mmspeed.pipelines import TrainPipeline
        from mmspeed.pipelines.report.advice import advised
        from mmspeed.pipelines.tasks import maker_of

        pipeline = TrainPipeline(resolved, maker_of(resolved))
    result = pipeline.run()
    _print_lines(result.lines())
    if not result.finished:
        spoken.then(_train_command(config, overrides), f"report {result.run}")
    else:
        spoken.then(*advised(result.run, resolved), f"report {result.run}")


app.command()(sample_command.sample)
app.command()(export_command.export)
app.command()(evaluate_command.evaluate)


@app.command()
def report(run_folder: sample_command.RunFolder) -> None:
    """Write the report of a run: one HTML file with its curves and samples."""
    from mmspeed.config.places import require_run

    spoken.begin("report", run_folder)
    require_run(run_folder)
    with spoken.loading():
        from mmspeed.pipelines import write_report
        from mmspeed.pipelines.report.advice import advised, first_checkpoint
        from mmspeed.pipelines.run.run_folder import RunFolder

    with log.Working("drawing", tell=False):
        page = write_report(run_folder)
    print(page)
    config = RunFolder(run_folder).run_config()
    if not RunFolder(run_folder).steps():
        log.get_logger("cli").info(first_checkpoint(run_folder, config))
    elif commands := advised(run_folder, config):
        spoken.then(*commands)


app.command()(demo_command.demo)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False) -> None:
    """Examine this machine: devices, libraries, and advice on whatever is slow or missing."""
    from .doctor import diagnose, render, to_json

    spoken.begin("doctor")
    with log.Working("examining this machine", tell=False):
        checks = diagnose(Path.cwd())
    print(to_json(checks) if as_json else render(checks))
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)
    spoken.then("demo", "init my-run --videos FOLDER")


def _resolve(
    context: typer.Context,
    command: str,
    path: Path,
    overrides: list[str] | None,
    nproc: int | None,
    print_config: bool,
    max_restarts: int = 0,
) -> RunConfig:
    """Load the config of a command that may run in several processes; exits when launched processes have done the work.

    `max_restarts` is for their launcher.
    """
    from mmspeed.config import dump_config, load_config, obey_launcher

    config_log = logging.getLogger("mmspeed.config")
    launches = launch.wanted(nproc, max_restarts)
    config_log.disabled = launches and not print_config  # the first process logs the notes about the config
    try:
        config = obey_launcher(
            load_config(path, overrides or ())
        )  # before processes start, to report a mistake in it early
    finally:
        config_log.disabled = False
    if print_config:
        _print_lines([dump_config(config).rstrip()])
        raise typer.Exit()
    spoken.begin(command, path, *(overrides or ()))
    if launches:
        if command == "train":
            config.parallel.check_world(int(nproc or 1))
        debug = bool((context.obj or {}).get("debug"))
        words = [command, str(path), *(overrides or [])]
        raise typer.Exit(launch.launch(words, int(nproc or 1), debug, max_restarts))
    launch.follow_launcher()
    return config


def _train_command(config: Path, overrides: list[str] | None) -> str:
    """The command that trains a config with the same overrides."""
    return " ".join(["train", str(config), *map(shlex.quote, overrides or ())])


def _print_lines(lines: list[str]) -> None:
    if log.rank() == 0:
        print("\n".join(lines))


def ray_workers(value: str | None, alone: bool) -> int | None:
    """The number of workers in `--ray`; None for `auto`. Raises UserError for other values, and if another option divides the work."""
    if value is None:
        return None
    if not alone:
        raise UserError("--ray divides the work by itself: not with --shard, --nproc or a launcher")
    if value != "auto" and not (value.isdecimal() and int(value) >= 1):
        raise UserError(f"--ray is {value!r}: write a number of workers, or auto")
    return None if value == "auto" else int(value)


def numbers_of(ranks: str) -> list[int]:
    """The numbers of devices in `--ranks 8,64`, rising. Raises UserError for anything else."""
    words = ranks.replace(" ", "").split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise UserError(f"--ranks is {ranks!r}: write numbers of devices from 1 to {MOST_RANKS}, such as 8,64,512")
    return sorted({int(word) for word in words})
