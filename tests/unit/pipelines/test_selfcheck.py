"""The self-check without processes of its own: layouts in words, small sizes, verdicts, and children that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.config import Config, make_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.mesh import process_group
from mmspeed.models.sora.sizes import build_model, resolve_config
from mmspeed.parallel import TokenLayout
from mmspeed.pipelines.check.children import Child, run_children
from mmspeed.pipelines.check.exchanges import expected, wrong_exchanges
from mmspeed.pipelines.check.layouts import alone, with_layout
from mmspeed.pipelines.check.verdict import compare, named
from mmspeed.pipelines.check.worker import (
    MicroBatchDigest,
    StepReport,
    WorkerReport,
    disagreements,
    other_gradients,
    uneven,
)
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.small import shrunk_latent, small_sora
from mmspeed.protocols import RunPlace, SmallRun
from tests.support.runs import small_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A nano model (4 heads) with an image and a video bucket."""
    buckets = '[{"frames": 1, "height": 64, "width": 48}, {"frames": 13, "height": 96, "width": 176}]'
    return small_config(tmp_path, f"data.buckets={buckets}")


@given(st.tuples(*[st.integers(1, 80)] * 3), st.integers(1, 8), st.integers(1, 4))
def test_small_latents_split_as_large_ones_do(grid: tuple[int, int, int], sequence: int, tensor: int) -> None:
    latent = (grid[0], 2 * grid[1], 2 * grid[2])
    t, h, w = shrunk_latent(latent, (1, 2, 2), sequence, tensor)
    assert (t == 1) == (grid[0] == 1) and h % 2 == 0 and w % 2 == 0
    assert t % sequence == grid[0] % sequence
    assert (h // 2 * w // 2) % (sequence * tensor) == (grid[1] * grid[2]) % (sequence * tensor)
    assert (t < sequence) == (grid[0] < sequence)  # where each process had a frame, it still has
    assert h // 2 * (w // 2) >= min(sequence * tensor, grid[1] * grid[2])


def small(config: Config, layout: str, folder: Path) -> SmallRun:
    return small_sora(with_layout(config, layout), folder / "small")


def test_the_small_model_keeps_what_decides_its_split(config: Config, tmp_path: Path) -> None:
    config = config.model_copy(update={"model": config.model.model_copy(update={"size": "XL/2", "mlp_ratio": 4.01})})
    mini = small(config, "tp=2,ulysses=2,shard_text=9", tmp_path)
    real, result = (resolve_config(c.model, 4, 16) for c in (config, mini.config))
    assert (result.heads, result.arrangement, result.patch) == (real.heads, real.arrangement, real.patch)
    assert result.hidden % 2 == real.hidden % 2 and result.depth % 2 == real.depth % 2
    assert result.width < real.width and result.depth == 4
    assert mini.kinds == ("images", "videos", "mixed")
    assert mini.config.parallel.shard_text == mini.config.text.max_tokens == 7  # captions are split here too


def test_the_small_run_is_an_ordinary_one(config: Config, tmp_path: Path) -> None:
    """Another process opens it by its config alone, and its first steps are of the kinds."""
    mini, place = small(config, "ulysses=2", tmp_path), RunPlace(Device("cpu", 0))
    task = VideoDomain(make_config(json.loads(alone(mini.config).model_dump_json(by_alias=True))))
    with process_group(place.device):
        task.open(place)
        with closing(task.data(place).steps(0, 3)) as steps:
            met = [{batch.shape: batch for batch in step.batches} for step in steps]
    assert [[shape.splits for shape in sorted(batches)] for batches in met] == [[False], [True], [False, True]]
    assert [batch.size for batches in met[:2] for batch in batches.values()] == [3, 3]
    for batch in met[2].values():
        assert not batch["text_mask"].all() and batch["text_mask"].any(1).all()  # padding, and real tokens, in each


def test_layouts_are_read(config: Config) -> None:
    own = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ring": 8, "shard": "space"})})
    parallel = with_layout(own, "ulysses=2, parallel.dp_shard=3").parallel
    assert (parallel.ring, parallel.ulysses, parallel.dp_shard, parallel.shard) == (1, 2, 3, "space")
    assert named(parallel) == "dp_shard=3 ulysses=2 shard=space"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("ulyses=2", "did you mean 'parallel.ulysses'"),
        ("tp=1", "is one process"),
        ("ulysses=2.5", "parallel.ulysses"),
        ("dp_replicate=0", "a number from 1 on"),
        ("ulysses=4,ring=8", "makes 32 processes"),
        ("ring=4,ring_window=3", "must divide ring 4"),
    ],
)
def test_layouts_that_are_refused(config: Config, layout: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        with_layout(config, layout)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_buckets_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    config = small_config(tmp_path, "data.buckets=[{frames: 6, height: 64, width: 48}]")
    with pytest.raises(UserError, match="does not fit the codec"):
        small(config, "ring=2", tmp_path)


RIGHT = {
    f"blocks.{i}.{name}": np.full(4, 1.0 + i, np.float32) for i in range(3) for name in ("mlp.up.weight", "qkv.weight")
}
SENT = {"all_gather sequence": 10, "all_to_all ulysses": 20}


def report(scale: dict[str, float] | None = None, loss: float = 1.0, **changes: Any) -> WorkerReport:
    """Three steps with the same right gradients, but for those in `scale`; `changes` are of all steps."""
    grads = {name: grad * (scale or {}).get(name, 1.0) for name, grad in RIGHT.items()}
    steps = [
        StepReport(
            kind,
            loss,
            2.0,
            **{"sent": {} if kind == "images" else dict(SENT), "problems": [], "grads": grads} | changes,
        )
        for kind in ("images", "videos", "mixed")
    ]
    return WorkerReport(steps, "fsdp", 1, 2, list(RIGHT), [], [])


LAYERS = "only gradients of blocks.*.qkv differ; the losses are equal, so the mistake is in backward, at blocks.2.qkv"


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (report({f"blocks.{i}.qkv.weight": 1.01 for i in range(3)}), LAYERS),
        (report(dict.fromkeys(RIGHT, 4.0)), "every gradient is 4 times that of one process"),
        (report(loss=1.0001), "the loss differs"),
        (report(loss=float("nan")), "the loss differs"),
        (report({"blocks.1.qkv.weight": float("nan")}), "most that of blocks.1.qkv.weight"),
        (report(grads={name: grad for name, grad in RIGHT.items() if "0.qkv" not in name}), "no gradient of blocks.0.qkv.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_named(config: Config, here: WorkerReport, words: str) -> None:
    result = compare(SmallRun(with_layout(config, "ulysses=2"), "nano"), here, report())
    text = "\n".join(result.lines())
    assert not result.passed and words in text and "FAILED" in text and "report it" in text


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ("ulysses=2,ring=2", {"all_gather sequence", "all_to_all ulysses", "ring ring"}),
        ("dsp=2,ulysses=2", {"all_gather sequence", "all_to_all dsp", "all_to_all ulysses"}),
        ("ring=4,ring_window=2", {"all_gather sequence", "ring ring", "ring ring_outer"}),
        ("tp=2", {"all_gather tp", "reduce_scatter tp", "all_reduce tp"}),
        ("pp=2,dp_shard=1", {"activations pp", "gradients pp"}),
        ("dp_shard=2", set()),
    ],
)
def test_what_a_video_step_must_send(config: Config, layout: str, wanted: set[str]) -> None:
    parallel, model = with_layout(config, layout).parallel, build_model(config.model, 4, 16, "meta")
    assert set(expected(model.plan, parallel, TokenLayout(), True)) == wanted
    assert set(expected(model.plan, parallel, TokenLayout(), False)) == {
        what for what in wanted if what.endswith((" tp", " pp"))
    }
    sparse = {"rows ring" if what == "ring ring" else what for what in wanted if what != "ring ring_outer"}
    assert set(expected(model.plan, parallel, TokenLayout(), True, sparse=True)) == sparse


def test_an_axis_that_does_nothing_is_told(config: Config) -> None:
    parallel, model = with_layout(config, "ulysses=2").parallel, build_model(config.model, 4, 16, "meta")
    lines = wrong_exchanges(model, parallel, TokenLayout(), "videos", True, ["all_gather sequence"])
    assert lines == ["no all_to_all ulysses was sent, so the layout did not take part"]
    lines = wrong_exchanges(model, parallel, TokenLayout(), "images", False, ["all_gather sequence"])
    assert lines == ["images take no part in it, yet all_gather sequence was sent"]


def met(names: list[str], weight: float, digest: str = "x", image: bool = False) -> MicroBatchDigest:
    return MicroBatchDigest(not image, names, [weight] * len(names), digest)


def test_ranks_of_a_group_meet_the_same() -> None:
    both = [met(["a"], 0.5), met(["i"], 1.0, "1", True)]
    other = [met(["a"], 0.5), met(["j"], 1.0, "2", True)]
    assert disagreements([both, other], 2, 1) == []
    assert "have different samples" in disagreements([both, other], 2, 2)[0]  # of tensor-parallel ranks images too
    noisy = [met(["a"], 0.5, "y"), other[1]]
    assert "ranks 0 and 1 compute micro-batch 0 together" in disagreements([both, noisy], 2, 1)[0]
    assert "different numbers" in disagreements([both, other[:1]], 2, 1)[0]


def test_samples_count_once() -> None:
    lines = disagreements([[met(["a"], 1.0)], [met(["a"], 1.0)]], 2, 1)
    assert lines == ["sample a counts 2 times over all ranks, not once (1 such samples)"]


def test_ranks_have_the_same_gradients() -> None:
    assert other_gradients([{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0 + 1e-7}]) == []
    assert other_gradients([{"a": 1.0}, {"a": 1.1}]) == [
        "rank 1 has another gradient of a than rank 0 (1 such parameters)"
    ]
    assert other_gradients([{"a": 1.0}, {}]) != []


def test_times_of_a_part_of_their_range_are_seen() -> None:
    assert uneven([100, 103, 97, 100, 99, 101, 98, 102, 100, 100]) < 5
    assert uneven([1000] + [0] * 9) > 1000


SLEEPER = "import sys, time, os, json; job = json.loads(sys.stdin.readline()); open(job['pid'], 'w').write(str(os.getpid()))\n"


def child(name: str, code: str, pid: Path) -> Child:
    return Child(name, [sys.executable, "-c", SLEEPER + code], {"pid": str(pid)})


def gone(pid: Path) -> bool:
    """Whether the process that wrote its id there has ended, within some seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 9)", "b failed: it was killed by SIGKILL; often the machine ran out of memory"),
        (
            "from mmspeed.errors import UserError; from mmspeed.pipelines.check.children import write_error\n"
            "write_error(job['error'], UserError('parallel.tp 3 is odd'), 'trace'); sys.exit(1)",
            "parallel.tp 3 is odd",
        ),
    ],
)
def test_a_child_that_dies_is_reported_and_ends_the_others(tmp_path: Path, code: str, message: str) -> None:
    wait = f"\nwhile not os.path.exists({str(tmp_path / 'a')!r}): time.sleep(0.01)\n"
    with pytest.raises(UserError) as error:
        run_children([child("a", "time.sleep(600)", tmp_path / "a"), child("b", wait + code, tmp_path / "b")], 1)
    assert str(error.value).startswith(message)
    assert gone(tmp_path / "a")


def test_children_end_with_their_killed_parent(tmp_path: Path) -> None:
    pids = [tmp_path / "a", tmp_path / "b"]
    follow = "from mmspeed.pipelines.check.children import follow_parent; follow_parent()\n"
    started = "open(job['pid'] + '.on', 'w')\ntime.sleep(600)"
    jobs = [[pid.name, SLEEPER + follow + started, {"pid": str(pid)}] for pid in pids]
    parent = (
        "import sys, json; from mmspeed.pipelines.check.children import Child, run_children\n"
        "run_children([Child(n, [sys.executable, '-c', c], j) for n, c, j in json.loads(sys.argv[1])], 1)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, json.dumps(jobs)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not all(Path(f"{pid}.on").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert all(gone(pid) for pid in pids)
