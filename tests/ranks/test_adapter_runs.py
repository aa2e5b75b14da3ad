"""Runs of adapters over processes: they learn what one process learns, go on after a stop to the bit, and leave the base as its files are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspeed.__main__ import main
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import latest, load, open_checkpoint
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState
from mmspeed.loop.checkpoint.storage import FROZEN
from mmspeed.models.adapters import base_name
from mmspeed.models.frozen_linear import FrozenLinear, quantised
from mmspeed.parallel import unwrap
from mmspeed.parallel.stages import stages_of
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.training.events import EndEvent
from tests.support.checkpoints import differing, farthest_gradient, whole_checkpoint
from tests.support.runs import losses
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_adapter_memory import adapted, save_base
from tests.unit.pipelines.test_family_steps import filled

STEPS, STOPS = 20, (1, 11, 20)
FSDP, HALF = "parallel.strategy=fsdp", ("device.dtype=bfloat16", "model.base.dtype=int8")
SPARSE = "model.sparse={planner: tiles, keep: 0.3, tile: [1, 2, 2], min_tokens: 1, dense_first: 0, dense_last: 0, dense_steps: 0}"
# name -> (processes, keys of the config, keys that one process has too)
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "ddp": (2, ("parallel.strategy=ddp",), ()),
    "fsdp": (2, (FSDP,), ()),
    "fsdp of four": (4, (FSDP,), ()),
    "ulysses": (2, (FSDP, "parallel.ulysses=2"), ()),
    "ring": (2, (FSDP, "parallel.ring=2"), ()),
    "tp": (2, (FSDP, "parallel.tp=2"), ()),
    "pipeline": (2, ("parallel.pp=2", "train.micro_batch_size=1"), ()),
    "pipeline of shards": (4, (FSDP, "parallel.pp=2", "train.micro_batch_size=1"), ()),
    "zero bubble": (2, ("parallel.pp=2", "parallel.schedule=zb_h1", "train.micro_batch_size=1"), ()),
    "sparse": (2, (FSDP,), (SPARSE,)),
    "sparse, ulysses": (2, (FSDP, "parallel.ulysses=2"), (SPARSE,)),
    "base on the host": (2, (FSDP, "model.base.place=host"), ()),
    "int8": (2, (FSDP,), HALF),
    "int8, pipeline": (2, ("parallel.pp=2", "train.micro_batch_size=1"), HALF),
    "int8 on the host": (1, ("model.base.place=host",), HALF),
}
FILE = Path("base", "transformer", "diffusion_pytorch_model.safetensors")
DEFAULT = ("ddp", "fsdp")
Run = tuple[str, tuple[str, ...]]  # name, keys of the config


class SameBase(TrainCallback):
    """Compares the frozen tensors at the end of a run, whole, with the files that they were read from."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_end(self, event: EndEvent) -> None:
        [model], files = [*event.models.values()], load_file(self.file)
        layers = {name: layer for name, layer in unwrap(model).named_modules() if isinstance(layer, FrozenLinear)}
        rounded: dict[str, Tensor] = {}
        for name, layer in layers.items():
            parts = quantised(files[base_name(f"{name}.weight")], layer.kind)
            rounded |= {f"{name}.{part}": value for part, value in zip(("weight", "scale"), parts, strict=True)}
        frozen = [(name, p) for name, p in unwrap(model).named_parameters() if not p.requires_grad]
        assert len(frozen) == len(files) + len(layers) or stages_of(unwrap(model)) is not None
        for name, parameter in frozen:
            found: Any = parameter.detach()
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            true = rounded[name] if name in rounded else files[base_name(name)].to(whole.dtype)
            assert torch.equal(whole, true), name


def train_all(folder: Path, runs: list[Run]) -> None:
    """Train, on however many ranks call this: each run with stops and, over processes, once as a whole."""
    watched = SameBase(folder / FILE)
    for name, keys in runs:
        whole = [] if name.startswith("one") else [(f"{name}-whole", STEPS)]
        for again, stop in (*whole, *((name, stop) for stop in STOPS)):
            fixed = f"train.start_from={folder / 'runs' / 'start'}", "validate.samples=0", "checkpoint.keep_last=3"
            config = adapted(folder, again, f"train.steps={stop}", *fixed, *keys)
            TrainPipeline(config, callbacks=[watched]).run()


def run_of(name: str) -> Run:
    _, own, shared = CASES[name]
    return name.replace(",", "").replace(" ", "-"), (*own, *shared)


def alone(shared: tuple[str, ...]) -> Run:
    """The run of one process beside runs that share these keys."""
    return f"one-{[HALF, (SPARSE,), ()].index(shared)}", shared


def ensure(folder: Path, name: str) -> None:
    """Train what a case compares: the runs of a number of processes in one go, those of DEFAULT apart."""
    world = CASES[name][0]
    together = [each for each in CASES if CASES[each][0] == world and (each in DEFAULT) == (name in DEFAULT)]
    for size, runs in (
        (1, [alone(()), *(alone(CASES[each][2]) for each in together)]),
        (world, [run_of(each) for each in together]),
    ):
        missing = [run for run in dict.fromkeys(runs) if not (folder / "runs" / run[0]).exists()]
        if missing:
            run_ranks(train_all, size, folder, missing)


def outcome(folder: Path, run: Run) -> tuple[list[float], dict[str, Tensor], str]:
    """The losses of a run, the checkpoint of its first step, and the fingerprint of its base."""
    name, keys = run
    config = adapted(folder, name, *keys)
    first, place = config.run_dir / "checkpoints" / "step-00000001", latest(config.run_dir / "checkpoints")
    assert place is not None
    return losses(config), whole_checkpoint(config.run_dir, first), open_checkpoint(place)[0][FROZEN]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, its cache, and a run whose adapters have moved off their zeros."""
    folder = tmp_path_factory.mktemp("adapters")
    save_base(folder)
    file = folder / FILE
    # larger matrices than a fresh model's: 500 equal tokens of padding do not hide a caption's own
    save_file({name: 4 * value if value.ndim > 1 else value for name, value in load_file(file).items()}, file)
    TrainPipeline(adapted(folder, "start", "train.lr=0.05", "train.ema_decay=null")).run()
    return folder


@pytest.mark.parametrize(
    "name", [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_layouts_learn_what_one_process_learns(home: Path, name: str) -> None:
    """Losses, every gradient of the first step, the fingerprint of the base."""
    ensure(home, name)
    world, _, shared = CASES[name]
    (true, wanted, base), (found, saved, kept) = outcome(home, alone(shared)), outcome(home, run_of(name))
    tolerance = 1e-2 if shared == HALF and world > 1 else 1e-5  # gathers round adapters to bfloat16
    assert len(found) == STEPS and found == pytest.approx(true, rel=tolerance) and kept == base
    assert not shared or found != pytest.approx(outcome(home, alone(()))[0], rel=1e-4)
    assert saved.keys() == wanted.keys() and sum(name.endswith(".exp_avg") for name in saved) == 40
    assert farthest_gradient(wanted, saved) <= tolerance


@pytest.mark.parametrize(
    "name", [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(home: Path, name: str) -> None:
    """Adapters, averages and moments are those of a run that never stopped."""
    ensure(home, name)
    run, keys = run_of(name)
    parts, whole = (whole_checkpoint(adapted(home, each, *keys).run_dir) for each in (run, f"{run}-whole"))
    assert not differing(parts, whole)
    kinds = {key.partition(".")[0] for key in whole}
    assert kinds == {"model", "ema", "optimizer"}


def refused(folder: Path) -> str:
    """Why adapters of the first block alone are not divided into stages."""
    keys = "parallel.pp=2", "train.micro_batch_size=1", "model.adapter.targets=[blocks.0.attn1.to_q]"
    with pytest.raises(UserError) as caught:
        TrainPipeline(adapted(folder, "refused", *keys)).run()
    return str(caught.value)


@pytest.mark.slow
def test_a_stage_of_which_nothing_trains_is_refused(home: Path) -> None:
    for words in run_ranks(refused, 2, home):
        assert words.startswith("parallel.pp: nothing trains in the blocks of process 1: let some of each stage")


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp of four", "pipeline"))]
)
def test_processes_export_the_bytes_of_one(home: Path, tmp_path: Path, name: str) -> None:
    """The folders of a checkpoint of several processes, and of that which one process writes once it has read it."""
    ensure(home, name)
    run, keys = run_of(name)
    config = adapted(home, run, *keys)
    again, model = Path(shutil.copytree(config.run_dir, tmp_path / run)), filled(config.model, 4, 8, "cpu")
    step = load(again / "checkpoints" / "step-00000020", model)["step"]
    shutil.rmtree(again / "checkpoints")
    CheckpointManager(again / "checkpoints").save(step, TrainingState(model), blocking=True)
    writers = [{path.name[:11] for path in each.glob("checkpoints/*20/shard-*")} for each in (config.run_dir, again)]
    assert [len(names) for names in writers] == [CASES[name][0], 1]
    for form in ("diffusers", "peft", "original", "merged"):
        folders = []
        for number, each in enumerate((config.run_dir, again)):
            out = tmp_path / f"{form}-{number}"
            assert main(["export", str(each), "-o", str(out), "--format", form, "--weights", "model"]) == 0
            folders.append(bytes_in(out))
        assert folders[0] == folders[1] and any(file.endswith(".safetensors") for file in folders[0]), form


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ulysses=2", "ring=2", "tp=2", "dp_shard=2", "dp_replicate=2"])
def test_the_check_of_a_layout_trains_adapters(
    home: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tree = tmp_path / "run.yaml", adapted(home, "checked").model_dump(mode="json", by_alias=True)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["check", str(path), "--parallel", layout]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text and "images: the 5 gradients of 40 that" in text and ".lora_B.default.weight" in text
