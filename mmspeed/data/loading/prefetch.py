"""Prefetching: a thread that reads ahead, processes that read, and copies to the device.

All are generators over an ordered stream of (tag, item), and can be chained. A tag holds information about an item that the
consumer needs and the reader does not.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.guards import end_with_parent
from mmspeed.protocols import Batch
from mmspeed.torch_internals import end_loader, loader_processes

Item = TypeVar("Item")
Job = TypeVar("Job")
Tag = TypeVar("Tag")

# signals that ask a training process to save and stop; its workers must survive them
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def read_ahead(source: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """Yield the items of `source`, produced by a thread that is at most `depth` items ahead of the consumer.

    Items, errors and the end come in order. When the generator is closed, the thread finishes its current item,
    closes `source` and ends.
    """
    done: queue.SimpleQueue[tuple[Item | None, BaseException | None]] = queue.SimpleQueue()
    permits, stopped = threading.Semaphore(depth), threading.Event()

    def produce() -> None:
        try:
            while permits.acquire() and not stopped.is_set():
                done.put((next(source), None))
        except BaseException as error:  # also StopIteration, which is the end
            done.put((None, error))
        finally:
            close(source)

    thread = threading.Thread(target=produce, name="mmspeed-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = done.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            permits.release()
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        permits.release()
        thread.join()


def close(source: Iterator[Any]) -> None:
    """Close a generator; other iterators need no closing."""
    if isinstance(source, Generator):
        source.close()


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WorkerFailure:
    """An error sent by a worker in place of the item."""

    text: str
    known: bool

    def error(self) -> Exception:
        return UserError(self.text) if self.known else RuntimeError(self.text)


class _WorkerResult(Dataset[Any]):
    """Data set that maps a job to its result."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, job: Any) -> Any:
        # Not left to the DataLoader, which sends a traceback as the message.
        try:
            return self.read(job)
        except UserError as error:
            return _WorkerFailure(str(error), known=True)
        except Exception as error:
            return _WorkerFailure(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", known=False)


def in_workers(
    jobs: Iterator[tuple[Tag, Job]],
    read: Callable[[Job], Item],
    workers: int,
    each: int,
    finish: Callable[[Item], Item] | None = None,
) -> Generator[tuple[Tag, Item], None, None]:
    """Yield the tag and `read(job)` of each job, computed by `workers` processes; `finish` is applied to the result here.

    At most `workers * each` jobs are in progress or waiting. Results and errors come in the order of the jobs; a
    UserError has the same text as without processes. A worker that ends by itself raises UserError. Workers survive
    SIGINT and SIGTERM, and end when the generator is closed, or when this process ends for any reason.
    """
    tags: deque[Tag] = deque()
    problems: list[Exception] = []

    def order() -> Iterator[Job]:
        try:
            for tag, job in jobs:
                tags.append(tag)
                yield job
        except Exception as error:  # raised after the results of earlier jobs
            problems.append(error)

    results = _start(order(), read, workers, each)
    processes: Sequence[Any] = loader_processes(results)
    end = functools.partial(_end, processes)
    atexit.register(end)  # before multiprocessing's exit handler, which would send SIGTERM and wait

    def take() -> Item:
        try:
            result = next(results)
        except (RuntimeError, OSError, EOFError) as error:  # no result came, so reading itself did not fail
            raise _lost(processes, error) from None
        if isinstance(result, _WorkerFailure):
            raise result.error()
        return result if finish is None else finish(result)

    try:
        while tags:
            yield tags.popleft(), take()
        if problems:
            raise problems[0]
    finally:
        end_loader(results)  # explicitly: a traceback may hold a reference, so `del` would not end it
        end()
        atexit.unregister(end)


def _start(order: Iterator[Any], read: Callable[[Any], Any], workers: int, each: int) -> Any:
    """Start the processes of a DataLoader and return its iterator."""
    # Never a plain fork, which is not safe beside threads and accelerators. The server has imported what workers need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # as many as the user wants
        loader: DataLoader[Any] = DataLoader(
            _WorkerResult(read),
            sampler=order,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            prefetch_factor=each,
            collate_fn=_as_it_is,
            worker_init_fn=_begin,
            multiprocessing_context=context,
            generator=torch.Generator(),  # leaves the global generator unchanged
        )
    with stops_blocked():
        return iter(loader)


@contextmanager
def stops_blocked() -> Iterator[None]:
    """Block `STOPS` in this thread: processes started meanwhile inherit the mask, and so receive no signal before they are ready."""
    resource_tracker.ensure_running()  # it would open what is closed next
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_it_is(item: Any) -> Any:
    return item


def _begin(number: int) -> None:
    """Initialise a worker process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    threading.Thread(target=_end_with_parent, name="mmspeed-parent", daemon=True).start()
    # The fork server started this process; it ends with the one that reads, even if this one is stopped, where nobody else holds its pipe.
    os.close(cast(Any, forkserver)._forkserver._forkserver_alive_fd)
    end_with_parent()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended: the DataLoader's own watch monitors the fork server."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end(processes: Iterable[Any]) -> None:
    """Kill the workers that are still running. They only read, so nothing is left half done."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _lost(processes: Sequence[Any], error: Exception) -> UserError:
    """The error for a worker that sends no result."""
    wait([process.sentinel for process in processes], timeout=5)  # a broken connection may be known before the end is
    codes = [process.exitcode for process in processes if process.exitcode]
    if not codes:
        how = f"does not respond ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    elif codes[0] < 0:
        how = f"was ended by {signal.Signals(-codes[0]).name}"
    else:
        how = f"ended with exit code {codes[0]}"
    return UserError(
        f"a loader worker {how}: memory or shared memory (/dev/shm) may be too small; "
        "lower train.loader_workers or train.prefetch, or read in a thread with train.loader_workers: 0"
    )


# -- devices ----------------------------------------------------------------------------------------------------------


def on_device(
    source: Iterator[tuple[Tag, Batch | None]], device: Device
) -> Generator[tuple[Tag, Batch | None], None, None]:
    """Yield the batches on `device`: each is copied while the device computes with the previous one.

    One batch is copied ahead, on a separate stream. Only copies from pinned memory overlap with computation.
    """
    copies = read_ahead(_copies(source, device), depth=1)
    try:
        for tag, batch, written in copies:
            if batch is not None:
                device.take_over(batch.movable().values(), written)
            yield tag, batch
            del batch
    finally:
        copies.close()


def _copies(
    source: Iterator[tuple[Tag, Batch | None]], device: Device
) -> Generator[tuple[Tag, Batch | None, torch.Event | None], None, None]:
    """Yield batches that are being copied to `device`, each with the event of its arrival."""
    device.activate()  # streams and the current device belong to a thread
    stream = device.side_stream()
    try:
        for tag, batch in source:
            moved = None
            with stream:
                if batch is not None:
                    moved = batch.to(device.torch_device, torch.float32, non_blocking=True)
                written = device.mark(stream)
            del batch
            yield tag, moved, written
    finally:
        close(source)
