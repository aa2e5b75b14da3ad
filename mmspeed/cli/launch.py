"""`--nproc N`: one process per device on this machine, through torch's elastic launcher.

`mmspeed train my-run.yaml --nproc 8` does the same as `torchrun --standalone --nproc-per-node 8 -m mmspeed train
my-run.yaml`. The launcher runs in this process, so that a failure can be shown in one line: for a mistake common to all
ranks, users see one message instead of the launcher's report.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from mmspeed import log
from mmspeed.errors import LAUNCHED, UserError
from mmspeed.guards import end_with_parent

# Time that ranks have after SIGTERM, SIGUSR1 or SIGINT to write a last checkpoint, before they are killed.
GRACE_SECONDS = 300

# seconds that torch's launcher gives the other processes after a failure, less its own delays
LAUNCHER_PATIENCE = 25

_HINTS = {
    signal.SIGKILL: "; often the machine ran out of memory",
    signal.SIGSEGV: ": compiled code of a library or a driver read memory that is not its own",
    signal.SIGABRT: ": compiled code of a library gave up, and said why above",
    signal.SIGBUS: "; often /dev/shm or a disk is full, or a file was cut while it was read",
}


def inside_launcher() -> bool:
    """True if torchrun, accelerate or `--nproc` started this process."""
    return "RANK" in os.environ


def one_of_several() -> bool:
    """True in a process group of more than one process; nothing is imported to find out."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1


def end_now(code: int) -> NoReturn:
    """End this process with its output written, without exit hooks and without taking the interpreter down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wanted(nproc: int | None, max_restarts: int = 0) -> bool:
    """True if this process should start others and compute nothing itself.

    Raises UserError for a count below 1, for restarts below 0, and for restarts where another launcher started this process.
    """
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc is {nproc}: use 1 or more")
    if max_restarts < 0:
        raise UserError(f"--max-restarts is {max_restarts}: use 0 or more")
    if max_restarts and inside_launcher():
        raise UserError("--max-restarts is the launcher's: write it behind torchrun, before `-m mmspeed`")
    return not inside_launcher() and (max_restarts > 0 or (nproc is not None and nproc > 1))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(arguments: list[str], nproc: int, debug: bool = False, max_restarts: int = 0) -> int:
    """Run `mmspeed` with `arguments` in `nproc` processes; print the failure, if any, and return the exit code.

    After a failure all processes are started again, `max_restarts` times at most; not where the user has to correct its cause.

    SIGTERM, SIGUSR1 and SIGINT are passed on to the processes, which may take `GRACE_SECONDS` to stop; if all of them then end with
    exit code 0, the result is 0.
    """
    with log.Working(f"starting {nproc} processes"):  # in which torch is imported
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from mmspeed.torch_internals import asked_before_restarts

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    os.environ[LAUNCHED] = str(os.getpid())
    if not debug:
        logging.disable(logging.CRITICAL)  # silence the launcher's own report: a line of ours replaces it
    flags = ["--debug"] if debug else []
    options = [
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        *(["--max-restarts", str(max_restarts)] if max_restarts else []),
    ]
    args = torchrun.parse_args([*options, "-m", "mmspeed", *flags, *arguments])

    def go_on(failures: dict[int, Any], left: int) -> bool:
        if not worth_a_restart(failures):
            return False
        print(
            f"{explain(failures)[0]}\nmmspeed: restart {max_restarts - left + 1} of {max_restarts}",
            file=sys.stderr,
            flush=True,
        )
        return True

    try:
        with asked_before_restarts(go_on):
            torchrun.run(args)
    except ChildFailedError as error:
        line, code = explain(error.failures)
        print(line, file=sys.stderr, flush=True)
        return code
    except SignalException as error:
        if _all_ended_well(error):
            return 0
        print(f"mmspeed: stopped by {error.sigval.name}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def follow_launcher() -> None:
    """Send SIGTERM to this process when the launcher that started it is gone: a SIGKILL of the launcher is not passed on."""
    launcher = os.environ.get(LAUNCHED)
    if launcher is None or os.getppid() != int(launcher):
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    end_with_parent(signal.SIGCONT)  # a stopped process goes on, and sees it
    threading.Thread(target=watch, name="mmspeed-launcher", daemon=True).start()


def _all_ended_well(error: BaseException) -> bool:
    """True if every process ended by itself, with exit code 0, after the signal in `error`.

    torch's launcher reports only the signal, so the processes are looked up in the agent that `error` passed through;
    False if this version of torch keeps them elsewhere.
    """
    from mmspeed.torch_internals import launched_processes

    for frame, _ in traceback.walk_tb(error.__traceback__):
        processes = launched_processes(frame.f_locals.get("agent"))
        if processes:
            return all(process.returncode == 0 for process in processes)
    return False


def worth_a_restart(failures: dict[int, Any]) -> bool:
    """False where the user has to correct the cause, or has interrupted the run."""
    data = cause_of(failures)[1].error_file_data
    return not (data.get("known", False) and data.get("kind", "input") == "input")


def cause_of(failures: dict[int, Any]) -> tuple[int, Any]:
    """The rank and `ProcessFailure` that the others are consequences of, as far as they show."""

    # by themselves: the launcher, too, kills processes that do not end after its SIGTERM, as those that are stopped
    spoke = [one.timestamp for one in failures.values() if "known" in one.error_file_data]
    patience = min(spoke, default=math.inf) + LAUNCHER_PATIENCE

    def order(item: tuple[int, Any]) -> tuple[int, int, int]:
        rank, failure = item
        data = failure.error_file_data
        # a killed process reports nothing, and the others then fail in an exchange with it; the launcher itself uses SIGTERM
        killed = failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM and failure.timestamp < patience
        known = data.get("known", False) or data.get("kind") == "hang"
        cause = 0 if known else 1 if killed else 2 if "known" in data else 3
        return (4 if data.get("kind") == "connection" else cause, failure.timestamp, rank)

    return min(failures.items(), key=order)


def explain(failures: dict[int, Any]) -> tuple[str, int]:
    """The line and exit code for the failed ranks (`ProcessFailure` by rank): those of the cause, not of its consequences."""
    rank, failure = cause_of(failures)
    data = failure.error_file_data
    if "known" in data:
        prefix = "" if data["known"] and data.get("kind") != "memory" else f"[rank {rank}] "
        return prefix + str(data["message"]), int(data["code"])
    if failure.exitcode < 0:
        hint = _HINTS.get(-failure.exitcode, "")
        return f"mmspeed: error: process {rank} was killed by {failure.signal_name()}{hint}", 1
    return f"mmspeed: error: process {rank} ended with exit code {failure.exitcode}; its own messages are above", 1
