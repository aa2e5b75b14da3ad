"""`mmspeed bench`: measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mmspeed.errors import UserError

from . import bench_decode, bench_reliability, spoken

app = typer.Typer(help="Measure speed, memory and quality.", no_args_is_help=True)


@app.callback()
def _begin(context: typer.Context) -> None:
    spoken.begin_group(context, working=False)


app.command()(bench_decode.decode)
app.command()(bench_reliability.reliability)


def from_checkout(command: str) -> None:
    """Put the repository's root first on the import path, so that `tests.claims` can be imported.

    Raises UserError in an installed package, which has no such folder.
    """
    import mmspeed

    root = Path(mmspeed.__file__).resolve().parent.parent
    if not (root / "tests" / "claims").is_dir() or not (root / "pyproject.toml").is_file():
        raise UserError(
            f"`mmspeed bench {command}` proves a claim of the documentation and runs from a checkout of the repository: "
            "clone it, `pip install -e .` there, and run the command again"
        )
    if sys.path[:1] != [str(root)]:
        sys.path.insert(0, str(root))


@app.command()
def overfit(
    output: Annotated[Path, typer.Option(help="Folder that the measurement writes to.")] = Path("runs/overfit"),
    arrangement: Annotated[str, typer.Option(help="factorised or full.")] = "factorised",
    objective: Annotated[str, typer.Option(help="flow or ddpm.")] = "flow",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
) -> None:
    """Train a tiny model on four demo clips and check that each caption reproduces its clip; exit with 1 if not."""
    from_checkout("overfit")
    from tests.claims.overfit import overfit as run_overfit

    result = run_overfit(output, arrangement, objective, tuple(overrides or ()))
    print("\n".join(result.lines()))
    if not result.passed():
        raise typer.Exit(1)


@app.command()
def loader(
    output: Annotated[Path, typer.Option(help="Folder that the measurement writes to.")] = Path("runs/loader"),
    bucket_latent: Annotated[
        list[str] | None,
        typer.Option(
            help="Latents' shape, such as 16x13x60x106; may be given again. Default: a large and a small one."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per shape; by default half a gigabyte of them.")] = None,
    rounds: Annotated[int, typer.Option(help="Passes of each format; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not the table.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when our reader is not fast enough.")] = False,
) -> None:
    """Compare the speed of reading samples from the cache and from .pt, Parquet and safetensors files, warm and cold."""
    import json

    from mmspeed.data.cache.files import write_whole

    from_checkout("loader")
    from tests.claims.loader import SHAPES, bench_loader, results_json

    results = bench_loader(output, bucket_latent or SHAPES, samples, rounds)
    text = json.dumps(results_json(results, rounds), indent=2)
    write_whole(output / "loader.json", (text + "\n").encode())
    print(text if as_json else "\n\n".join("\n".join(result.lines()) for result in results))
    if strict and not all(verdict.passed for result in results for verdict in result.verdicts):
        raise typer.Exit(1)


@app.command()
def index(
    rows: Annotated[int, typer.Option(min=1, help="Entries of the synthetic index.")] = 10_000_000,
    output: Annotated[Path, typer.Option(help="Folder to create the index in; it is not deleted.")] = Path(
        "runs/bench-index"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Open the index of a large cache and look up entries; exit with 1 when it takes over 2 s or 100 MB."""
    from_checkout("index")
    from tests.claims.index import bench_index, report

    result = bench_index(rows, output)
    print(report(result, as_json))
    if not result.passed():
        raise typer.Exit(1)


@app.command()
def preprocess(
    output: Annotated[Path, typer.Option(help="Folder that the measurement writes to.")] = Path("runs/preprocess"),
    videos: Annotated[Path | None, typer.Option(help="Folder of your own videos; default: generated clips.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of decoding; medians count.")] = 3,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores to use; default: all.")] = None,
    vae_width: Annotated[int, typer.Option(min=8, help="Width of the slow codec: larger is slower.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Check that preprocess keeps its slowest stage busy, the encoder or the decoders; exit with 1 if not."""
    from_checkout("preprocess")
    from tests.claims.preprocess import bench_preprocess

    result = bench_preprocess(output, videos, rounds, cores, vae_width)
    print(result.to_json() if as_json else "\n".join(result.lines()))
    if not result.passed():
        raise typer.Exit(1)


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
def sp(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(min=2, help="Processes to start, unless a launcher has.")] = 2,
    latent: Annotated[str, typer.Option(metavar="TxHxW", help="Latent of the clip that a step trains on.")] = "8x32x32",
    width: Annotated[int, typer.Option(help="Width of the model, a multiple of 24.")] = 192,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians count.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    strict: Annotated[bool, typer.Option(help="Also exit with 1 when degree 1 is not free.")] = False,
) -> None:
    """Measure sequence parallelism on CPU processes; exit with 1 when bytes differ from the formulas."""
    from_checkout("sp")
    from mmspeed import log

    from . import launch

    if launch.wanted(ranks):
        words = ["--ranks", str(ranks), "--latent", latent, "--width", str(width), "--rounds", str(rounds)]
        flags = [flag for flag, is_set in (("--json", as_json), ("--strict", strict)) if is_set]
        debug = bool((context.obj or {}).get("debug"))
        raise typer.Exit(launch.launch(["bench", "sp", *words, *flags], ranks, debug))
    launch.follow_launcher()
    from mmspeed.bench.latents import parse_latent
    from tests.claims.sp import bench_sp

    result = bench_sp(parse_latent(latent), width, rounds)
    if log.rank() == 0:
        print(result.to_json(strict) if as_json else "\n".join(result.lines()))
    if not result.passed(strict):
        raise typer.Exit(1)


@app.command()
def buckets(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file of the run whose buckets are measured.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Measure nothing: compare orders of a synthetic data set; takes no CONFIG."),
    ] = False,
    clips: Annotated[int, typer.Option(min=1, help="With --simulate: samples of the data set.")] = 1_000_000,
    ranks: Annotated[str, typer.Option(help="With --simulate: numbers of ranks.")] = "8,64,512",
    seed: Annotated[int, typer.Option(help="With --simulate: seed of the data set and its order.")] = 0,
    output: Annotated[Path | None, typer.Option(help="With --simulate: folder for the figures, as JSON.")] = None,
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
    """Measure time and memory of a step of each bucket on this device; or, with --simulate, the balance of batches."""
    if simulate:
        if config is not None:
            raise UserError(f"--simulate makes its own data set: leave out {config}")
        from_checkout("buckets --simulate")
        from tests.claims.buckets_simulated import simulate_buckets

        result = simulate_buckets(clips, ranks, seed, output)
        print("\n".join(result.lines()))
        if not result.passed():
            raise typer.Exit(1)
        return
    if config is None:
        raise UserError("no buckets to measure: name a CONFIG, or give --simulate")
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


@app.command(name="sparse-training")
def sparse_training(
    output: Annotated[Path, typer.Option(help="Folder of the runs; finished runs in it are not repeated.")] = Path(
        "runs/sparse-training"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Steps from scratch.")] = 300,
    tune_steps: Annotated[int, typer.Option(min=1, help="Steps of fine-tuning the dense model.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds; each trains all variants.")] = 3,
    keep: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of query-key pairs to keep.")] = 0.15,
    variants: Annotated[
        str | None, typer.Option(help="Some of clusters+summary, clusters+zero, tiles+summary, tiles+zero.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when the loss is too far from dense attention's.")] = False,
) -> None:
    """Train a small model with dense and with sparse attention, and compare the loss on held-out clips."""
    from_checkout("sparse-training")
    from tests.claims.sparse_training import VARIANTS, SparseTrainingSetting, bench_sparse_training

    names = tuple(variants.split(",")) if variants else tuple(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise UserError(f"--variants: {unknown[0]} is not one of {', '.join(VARIANTS)}")
    result = bench_sparse_training(
        output, SparseTrainingSetting(steps=steps, tune_steps=tune_steps, seeds=seeds, keep=keep), names
    )
    print("\n".join(result.lines()))
    if strict and not all(passed for passed, _ in result.verdicts()):
        raise typer.Exit(1)


@app.command()
def finetune(
    output: Annotated[Path, typer.Option(help="Folder of the model, the cache and the run; made anew.")] = Path(
        "runs/finetune"
    ),
    pairs: Annotated[int, typer.Option(min=3, help="Pairs of steps that are counted.")] = 15,
    width: Annotated[int, typer.Option(min=64, help="Width of the model, in heads of 64.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 16,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when time or memory misses its goal.")] = False,
) -> None:
    """Train a Wan-shaped model beside a plain loop of diffusers and accelerate, and compare time and memory."""
    from_checkout("finetune")
    import shutil

    from tests.claims.finetune import FinetuneSetting, bench_finetune

    if (output / "base").is_dir():  # of an earlier measurement
        for name in ("base", "cache", "runs"):
            shutil.rmtree(output / name, ignore_errors=True)
    result = bench_finetune(output.resolve(), FinetuneSetting(width=width, layers=layers, pairs=pairs))
    print("\n".join(result.lines()))
    if strict and not result.passed():
        raise typer.Exit(1)


@app.command()
def lm(
    output: Annotated[Path, typer.Option(help="Folder of the model, the cache and the runs; made anew.")] = Path(
        "runs/lm"
    ),
    rounds: Annotated[int, typer.Option(min=3, help="Steps of each trainer that are counted.")] = 9,
    width: Annotated[int, typer.Option(min=64, help="Width of the model, in heads of 64.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each trainer.")] = 1,
) -> None:
    """Train a language model beside transformers' Trainer, and compare tokens/s, memory of the loss and reading of data."""
    from_checkout("lm")
    from tests.claims.lm import LmSetting, bench_lm

    result = bench_lm(output.resolve(), LmSetting(rounds=rounds, width=width, depth=layers, threads=threads))
    print("\n".join(result.lines()))


@app.command()
def attention(
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Measure the layers of a trained run, and suggest settings for it."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N,...", help="Lengths; default 4096,16384.")] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="SHARE,...", help="Shares of pairs to keep; default 0.05,0.1,0.2.")
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="clusters, clusters-mass, clusters-top, tiles, window, skip."),
    ] = None,
    tail: Annotated[str | None, typer.Option(metavar="NAME,...", help="zero, summary; default both.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The whole set: up to 32,768 tokens, all planners.")] = False,
    backend: Annotated[str, typer.Option(help="Kernel: auto, or one that the output lists.")] = "auto",
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    heads: Annotated[int, typer.Option(min=1, help="Heads; not with --run.")] = 4,
    width: Annotated[int, typer.Option(min=6, help="Width of a head; not with --run.")] = 64,
    cluster_size: Annotated[
        int | None, typer.Option(min=1, help="Approximate number of queries in a cluster; default by the length.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians count.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Videos that errors are means over; not with --run.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; not with --run.")] = "float32",
    samples: Annotated[int, typer.Option(min=1, help="With --run: number of samples to run the model on.")] = 2,
    checkpoint: Annotated[str, typer.Option(help="With --run: latest, best or a step.")] = "latest",
    error: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --run: largest error of the suggested settings.")
    ] = 0.1,
    output: Annotated[
        Path | None, typer.Option(help="Folder of attention.json; default runs/bench-attention, or the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when a goal is missed.")] = False,
) -> None:
    """Measure sparse attention against dense: error, speed, memory; on synthetic video, or with --run on a trained model."""
    from mmspeed.bench.attention import ask, bench_attention
    from mmspeed.data.cache.files import write_whole

    settings = ask(tokens, keep, planner, tail, full)
    common = {"backend": backend, "device": device, "rounds": rounds, "cluster_size": cluster_size}
    if run is not None:
        if strict or tokens is not None:
            raise UserError("--tokens and --strict are for synthetic video: leave them out beside --run")
        from mmspeed.bench.attention_run import bench_run

        run_result = bench_run(
            run, settings, samples=samples, checkpoint=checkpoint, error=error, output=output, **common
        )
        print(run_result.to_json() if as_json else "\n".join(run_result.lines()))
        return
    result = bench_attention(settings | common | {"heads": heads, "width": width, "dtype": dtype, "seeds": seeds})
    write_whole((output or Path("runs/bench-attention")) / "attention.json", (result.to_json() + "\n").encode())
    print(result.to_json() if as_json else "\n".join(result.lines()))
    if strict and not result.passed():
        raise typer.Exit(1)


@app.command()
def memory(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="YAML file of a run: shows the memory of its step by category and layer."
        ),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="8 blocks of the model of 0.7 B; on 2 cores 25 minutes with --rounds 0 --no-grown, else hours.",
        ),
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Some of ways, optimizer, budget; default all.")
    ] = None,
    arrangement: Annotated[str | None, typer.Option(help="factorised or full; default both.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default both.")] = None,
    latent: Annotated[
        str | None, typer.Option(metavar="TxHxW", help="Latent of the sample; default 5x32x32, with --full 5x16x16.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Timed rounds; medians count. 0: nothing is timed.")] = 3,
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    grown: Annotated[bool, typer.Option(help="Start a process for each policy, to measure its growth.")] = True,
    output: Annotated[
        Path | None, typer.Option(help="Folder for memory.json; default runs/bench-memory, or the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when a goal is missed.")] = False,
) -> None:
    """Measure the savings and cost of each memory policy; or, with CONFIG, the memory of its training step by category and layer."""
    import json

    from mmspeed import log
    from mmspeed.data.cache.files import write_whole

    if config is not None:
        if full or only or arrangement or dtype or strict:
            raise UserError(
                "--full, --only, --arrangement, --dtype and --strict are for the built-in models: leave them out beside CONFIG"
            )
        from mmspeed.bench.memory_run import report_config

        report = report_config(config, overrides or (), output)
        if log.rank() == 0:
            print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
        return
    from mmspeed.bench.memory_all import bench_memory

    result = bench_memory(
        full=full,
        only=only,
        arrangement=arrangement,
        dtype=dtype,
        latent=latent,
        rounds=rounds,
        device=device,
        grown=grown,
        shown=not as_json,
    )
    write_whole((output or Path("runs/bench-memory")) / "memory.json", (result.to_json() + "\n").encode())
    print(result.to_json() if as_json else "\n".join(result.verdict_lines()))
    if strict and not result.passed():
        raise typer.Exit(1)
