"""Reading ahead of training in a thread and in processes: the same batches, a bound, errors in order, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from mmspeed.data import Batching, BatchSampler, DatasetCache, Loader, SampleUse
from mmspeed.data.loading.collate import VideoCollate
from mmspeed.data.loading.prefetch import in_workers, on_device, read_ahead
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.protocols import Batch, StepData
from tests.support.caches import flip
from tests.support.loading import make_cache

CPU = Device("cpu", 0)


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mmspeed-")]


def numbers(stop: int, log: list[int]) -> Iterator[int]:
    for number in range(stop):
        log.append(number)
        yield number


def test_read_ahead_keeps_order_and_its_bound() -> None:
    log: list[int] = []
    seen = []
    for number in read_ahead(numbers(20, log), depth=3):
        seen.append(number)
        time.sleep(0.002)
        # `depth` items wait, and permission for one more is given when the consumer asks for it
        assert len(log) - len(seen) <= 3
    assert seen == log == list(range(20))
    assert list(read_ahead(iter(()), depth=1)) == []


def test_a_closed_read_ahead_closes_what_it_reads_from() -> None:
    log: list[int] = []
    source = numbers(10**6, log)
    ahead = read_ahead(source, depth=2)
    next(ahead)
    assert threads() == ["mmspeed-read-ahead"]
    ahead.close()
    assert threads() == [] and next(source, None) is None and len(log) <= 4


def loaded(cache: DatasetCache, start: int = 0, stop: int = 10, **options: Any) -> list[Batch]:
    """The micro-batches of steps of two epochs (an epoch has 5)."""
    sampler = BatchSampler(cache.samples, Batching(3, most=2), seed=1)
    assert sampler.steps_per_epoch < stop
    loader = Loader(sampler, VideoCollate(cache, 3, 0.3), **options)
    return [batch for step in loader.steps(start, stop) for batch in step.batches]


def same(a: list[Batch], b: list[Batch]) -> bool:
    """Bit for bit, in every field."""

    def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
        return torch.equal(x, y) and x.dtype == y.dtype

    def whole(batch: Batch) -> dict[str, torch.Tensor]:
        return {**batch.tensors, "weights": batch.weights_I}

    return len(a) == len(b) and all(
        (one.items, one.shape, one.rules, whole(one).keys())
        == (other.items, other.shape, other.rules, whole(other).keys())
        and all(equal(x, whole(other)[name]) for name, x in whole(one).items())
        for one, other in zip(a, b, strict=True)
    )


def test_threads_and_processes_change_no_bit(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    truth, late = loaded(cache), loaded(cache, start=4)
    assert len(truth) > 10 and len(late) > 5 and same(truth[-len(late) :], late) and not same(truth[:5], truth[1:6])
    torch.manual_seed(7)
    for options in ({"prefetch": 4}, {"workers": 2, "prefetch": 4}):
        assert same(loaded(cache, **options), truth), options
    assert torch.initial_seed() == 7 and torch.equal(torch.rand(3), torch.manual_seed(7) and torch.rand(3))


def test_a_remote_cache_is_read_by_processes(tmp_path: Path) -> None:
    truth = loaded(make_cache(tmp_path / "there"))
    remote = DatasetCache(f"file://{tmp_path}/there", local_cache=tmp_path / "here")
    assert same(loaded(remote, workers=1), truth)
    assert remote.remote is not None and remote.remote.requests == 0  # by the worker, into the folder of both
    assert list(remote.root.glob("payloads/*/*"))


@pytest.fixture
def _few_objects() -> None:
    """Only objects made from here on are looked through."""
    gc.collect()
    gc.freeze()


def live_batches() -> int:
    return sum(isinstance(thing, Batch) for thing in gc.get_objects())


@pytest.mark.usefixtures("_few_objects")
def test_so_many_batches_are_in_memory_however_many_a_step_has(tmp_path: Path) -> None:
    prefetch = 4
    cache = make_cache(tmp_path, videos=24, images=0)
    loader = Loader(BatchSampler(cache.samples, Batching(12, most=1), seed=1), VideoCollate(cache), prefetch=prefetch)
    before, counted = live_batches(), 0
    for step in loader.steps(0, 2):
        assert len(step.batches) == 12
        for batch in step.batches:
            counted += 1
            most = min(prefetch, 24 - counted) + 1  # and the one that is held here
            until(lambda most=most: live_batches() - before >= most, "too few are read ahead")
            assert live_batches() - before == most and batch.size == 1
            del batch
    assert counted == 24


class Counting(BatchSampler):
    """Counts the steps that were asked for."""

    asked = 0

    def draws(self, step: int) -> list[SampleUse]:
        self.asked += 1
        return super().draws(step)


def test_processes_are_within_the_bound(tmp_path: Path) -> None:
    workers, prefetch, most = 1, 5, 5
    cache = make_cache(tmp_path)
    sampler = Counting(cache.samples, 1, seed=1)
    steps = Loader(sampler, VideoCollate(cache), workers=workers, prefetch=prefetch).steps(0, 10**6)
    for number in range(1, 12):
        assert len(list(next(steps).batches)) == 1
        until(lambda number=number: sampler.asked - number >= most, "too few are read ahead")
        assert sampler.asked - number == most
    steps.close()


@pytest.mark.parametrize("options", [{"prefetch": 3}, {"workers": 2, "prefetch": 4}])
def test_an_error_comes_at_its_step_and_in_its_words(tmp_path: Path, options: dict[str, int]) -> None:
    cache = make_cache(tmp_path, videos=4, images=0)
    sampler = BatchSampler(cache.samples, 1, seed=0)
    key = sampler.draws(2)[0].sample.latent_keys[0]
    flip(tmp_path / cache.entry(key).shard, cache.entry(key).offset + cache.entry(key).bytes - 1)
    steps = Loader(sampler, VideoCollate(cache), **options).steps(0, 4)  # type: ignore[arg-type]
    assert [batch.names[0] for _ in range(2) for batch in next(steps).batches] == [
        sampler.draws(step)[0].name for step in range(2)
    ]
    with pytest.raises(UserError) as caught:
        next(steps)
    assert str(caught.value).startswith(f"cache {tmp_path}: shard ") and str(caught.value).count("\n") == 0
    assert f"is damaged at entry {key}; delete that file" in str(caught.value)
    assert threads() == [] and multiprocessing.active_children() == []


def test_a_worker_that_cannot_open_the_cache_says_why(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    (tmp_path / "cache.json").unlink()
    with pytest.raises(UserError, match=f"^no dataset cache at {tmp_path}; run mmspeed preprocess first$"):
        next(Loader(BatchSampler(cache.samples, 2, seed=0), VideoCollate(cache), workers=1).steps(0, 1))


def test_an_unforeseen_error_names_itself_and_one_in_the_order_comes_last() -> None:
    def jobs(last: int | None) -> Iterator[tuple[str, int]]:
        yield from (("a", 2), ("b", 4))
        if last is None:
            raise KeyError("order")
        yield "c", last

    halves = functools.partial(operator.truediv, 1)
    results = in_workers(jobs(0), halves, 1, 3)
    assert [next(results), next(results)] == [("a", 0.5), ("b", 0.25)]
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError: .*\n.*Traceback"):
        next(results)
    results = in_workers(jobs(None), halves, 1, 3)
    assert [next(results), next(results)] == [("a", 0.5), ("b", 0.25)]
    with pytest.raises(KeyError, match="order"):
        next(results)
    assert list(in_workers(iter(()), halves, 1, 1)) == [] and multiprocessing.active_children() == []


def test_a_killed_worker_is_reported_in_a_line(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    steps = Loader(BatchSampler(cache.samples, 2, seed=0), VideoCollate(cache), workers=2).steps(0, 10**6)
    next(steps)
    victim = multiprocessing.active_children()[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(
        UserError, match=r"a loader worker was ended by SIGKILL: .*lower train\.loader_workers"
    ) as caught:
        for _ in range(10):
            next(steps)
    assert "\n" not in str(caught.value)
    assert multiprocessing.active_children() == [] and threads() == []


def test_workers_outlive_signals_and_end_with_the_generator(tmp_path: Path) -> None:
    """Ctrl-C, a launcher's SIGTERM and Slurm's SIGUSR1 reach the whole group, and training still needs its data for the step it is at."""
    cache = make_cache(tmp_path)
    steps = Loader(BatchSampler(cache.samples, 2, seed=0), VideoCollate(cache), workers=2).steps(0, 10**6)
    next(steps)
    workers = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    assert len(workers) == 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for worker in workers:
            os.kill(worker.pid, number)
    for _ in range(8):
        assert isinstance(next(steps), StepData)
    steps.close()
    assert not any(worker.is_running() for worker in workers)
    assert threads() == [] and multiprocessing.active_children() == []


SCRIPT = """
import multiprocessing, os, signal, sys
from pathlib import Path
from mmspeed.data import BatchSampler, DatasetCache, Loader
from mmspeed.data.loading.collate import VideoCollate

if __name__ == "__main__":
    cache = DatasetCache(Path(sys.argv[1]))
    steps = Loader(BatchSampler(cache.samples, 2, seed=0), VideoCollate(cache), workers=2, prefetch=4).steps(0, 10**6)
    for _ in range(2):  # one of each worker, which would not end with its reader before it has begun
        next(steps)
    pids = [process.pid for process in multiprocessing.active_children()]
    print(*pids, flush=True)
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_process_outlives_training(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and process.wait(timeout=60) == -signal.SIGKILL
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "a worker outlives the process that started it")
        until(lambda: not in_group(process.pid), "a server of workers is left behind")


def in_group(group: int) -> list[int]:
    return [pid for pid in psutil.pids() if group_of(pid) == group]


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_on_the_cpu_nothing_is_copied(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    steps = Loader(BatchSampler(cache.samples, 2, seed=0), VideoCollate(cache), prefetch=2, device=CPU).steps(0, 3)
    (batch,) = next(steps).batches
    assert threads() == ["mmspeed-read-ahead"]  # none that copies
    moved = batch.to(CPU.torch_device, torch.float32)
    assert moved.movable().keys() == batch.movable().keys() >= {"latents", "noise", "text_pooled"}
    assert (
        all(tensor is batch.movable()[name] for name, tensor in moved.movable().items())
        and moved["quantiles"] is batch["quantiles"]
    )
    steps.close()


def test_copies_keep_the_order_and_run_one_ahead(tmp_path: Path) -> None:
    """The way of a batch to an accelerator, gone with the CPU, where its streams and copies are nothing."""
    batches = loaded(make_cache(tmp_path))[:6]
    taken: list[int] = []

    def source() -> Iterator[tuple[int, Batch | None]]:
        for number in numbers(6, taken):
            yield number, None if number == 3 else batches[number]
        raise UserError("the seventh")

    feed = on_device(source(), CPU)
    for number in range(6):
        tag, batch = next(feed)
        until(lambda number=number: len(taken) == min(number + 2, 6), "the next one is not copied ahead")
        assert tag == number and (batch is None if number == 3 else same([batch], [batches[number]]))  # type: ignore[list-item]
    with pytest.raises(UserError, match="the seventh"):
        next(feed)
    assert threads() == []


def test_batches_are_pinned_where_there_is_an_accelerator(tmp_path: Path) -> None:
    batch = loaded(make_cache(tmp_path))[0]
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA"):
            pin_memory(batch)  # torch's own way finds `Batch.pin_memory`
        return
    pinned = pin_memory(batch)
    assert isinstance(pinned, Batch) and pinned["quantiles"] is batch["quantiles"]
    assert all(tensor.is_pinned() for tensor in pinned.movable().values()) and same([pinned], [batch])
