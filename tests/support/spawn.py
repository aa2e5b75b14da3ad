"""Run a function on N new gloo processes and bring its results, or its failure, home."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What nearly all ranks import, once in the server that they are forked from: it would be seconds of each.
PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # the first sharded module or distributed tensor would import it: a second and more
    "mmspeed.models",
    "mmspeed.pipelines.training.trainer",
    "pytest",
]
# modules of tests whose ranks make published models, and what they import for that: seconds again
PUBLISHED = {"tests.support.published", "tests.support.tiny_models", "tests.support.video_transformers"}
OF_PUBLISHED = ["diffusers.models.transformers.transformer_ltx", "diffusers.models.transformers.transformer_wan"]


def _enter(
    connection: Connection,
    rank: int,
    world: int,
    store: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    from mmspeed.data.loading.prefetch import STOPS

    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        dist.barrier()  # a rank that ends at once would close connections that others still make
        result = ("ok", function(*args))
        dist.destroy_process_group()
    except BaseException:
        result = ("failed", traceback.format_exc())
    connection.send(result)
    connection.close()


def start_server() -> None:
    """Start the process that ranks are forked from, where there is none; its imports go on beside.

    There is one in a process, and workers of the loader come from it too: it blocks what theirs blocks.
    """
    from mmspeed.data.loading.prefetch import (
        stops_blocked,  # not before the tests have set what torch reads when it is imported
    )

    published = OF_PUBLISHED if PUBLISHED & sys.modules.keys() else []
    mp.set_forkserver_preload(["tests.support.before_imports", *PRELOAD, *published, "tests.support.after_imports"])
    with stops_blocked():
        forkserver.ensure_running()


def _apart(folder: str, environment: dict[str, str], output: str, function: Callable[..., Any], args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(*args)


def run_apart(folder: Path, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> tuple[int | None, str]:
    """Exit code and output of `function(*args)` in a folder, in a process that has imported most when it starts."""
    start_server()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with tempfile.TemporaryDirectory() as other:
        output = Path(other) / "output.txt"
        arguments = (str(folder), environment, str(output), function, args)
        process = mp.get_context("forkserver").Process(target=_apart, args=arguments)
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        return process.exitcode, output.read_text(encoding="utf-8")


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """`function(*args)` on `world` processes of one gloo group; the results in rank order.

    The function stands at a module's top level; arguments and results are plain Python or NumPy. The first failure ends all
    ranks and is raised here as an AssertionError with the rank's own traceback.
    """
    start_server()
    context = mp.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_enter, args=(pipes[r][1], r, world, store, dict(os.environ), function, args), daemon=True
            )
            for r in range(world)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # so that a rank that dies silently ends its pipe
        try:
            return _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()


def _collect(receivers: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while len(results) < len(receivers):
        waiting = [r for i, r in enumerate(receivers) if i not in results]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {[i for i in range(len(receivers)) if i not in results]} hang for {timeout} s")
        for receiver in receivers:
            if receiver not in ready:
                continue
            rank = receivers.index(receiver)
            try:
                state, value = receiver.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if state == "failed":
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]
