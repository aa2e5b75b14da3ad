"""Training with the optimizer's weights and states elsewhere: on one process, against float32 weights beside rounded parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmspeed.config import Config
from mmspeed.config.training import TrainConfig
from mmspeed.errors import UserError
from mmspeed.initialize import set_parameter
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.load import load_start
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load, load_weights, step_name
from mmspeed.loop.optimizers.learning_rate import learning_rate, set_learning_rate
from mmspeed.loop.optimizers.make_optimizer import make_adamw, make_groups
from mmspeed.memory.optimizer.split_bits import rounded
from mmspeed.parallel import autocast, make_half
from mmspeed.pipelines.training.trainer import TrainPipeline
from tests.support.runs import small_config
from tests.support.steps import train_step
from tests.support.tiers import HALF, TIERS, TRAIN, differing, everything, losses, parameters, state_of, steps
from tests.support.toy import ToyDiT, flow_loss, make_batch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FAMILIES = {"float32 parameters": ("plain", "states"), "bfloat16 parameters": HALF}


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[TrainingState, list[float]]]:
    """Each tier after three steps of two micro-batches."""
    results = {}
    for tier in TIERS:
        state = state_of(tier)
        results[tier] = state, losses(steps(state, range(3), micro=4))
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_where_weights_and_states_lie_changes_no_bit(trained: Any, family: str) -> None:
    first, *others = FAMILIES[family]
    for tier in others:
        assert trained[tier][1] == trained[first][1]
        assert differing(everything(trained[tier][0]), everything(trained[first][0])) == []
        assert differing(parameters(trained[tier][0].model), parameters(trained[first][0].model)) == []
    assert len(set(trained[first][1])) == 3


def test_bfloat16_parameters_are_those_of_a_plain_loop(trained: Any) -> None:
    """float32 weights that AdamW updates, copied rounded into the parameters; gradients of micro-batches are summed in float32."""
    cfg, model = TrainConfig(**TRAIN), ToyDiT()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    make_half(model)
    autocast(model, torch.bfloat16)
    groups = make_groups(model, cfg)
    master_of = dict(zip(model.parameters(), masters, strict=True))
    for group in groups:
        group["params"] = [master_of[p] for p in group["params"]]
    optimizer = make_adamw(groups, cfg)
    for epoch in range(3):
        with torch.no_grad():
            for parameter, master in master_of.items():
                parameter.copy_(rounded(master))
                master.grad = torch.zeros_like(master)
        for keys in (["s0", "s1", "s2", "s3"], ["s4", "s5", "s6"]):
            model.zero_grad()
            batch = make_batch(keys, epoch, fillers=4 - len(keys))
            (flow_loss(model, batch) * batch.weights_I).sum().mul(1 / 7).backward()
            for parameter, master in master_of.items():
                assert parameter.grad is not None and master.grad is not None
                master.grad += parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
    actual = everything(trained["split"][0])
    for name, master in zip(dict(model.named_parameters()), masters, strict=True):
        assert torch.equal(actual[f"model.{name}"], master.detach()), name
        assert torch.equal(actual[f"optimizer.state.{name}.exp_avg"], optimizer.state[master]["exp_avg"]), name


# -- checkpoints


@pytest.mark.parametrize("source", ["plain", "host"])
def test_a_checkpoint_of_any_tier_is_loaded_by_any_other(tmp_path: Path, trained: Any, source: str) -> None:
    state, _ = trained[source]
    CheckpointManager(tmp_path).save(3, state, blocking=True)
    index = json.loads((tmp_path / step_name(3) / "index.json").read_text())
    assert {entry["dtype"] for entry in index["tensors"].values()} == {"float32"}
    at_save = everything(state)
    held = everything(trained["plain"][0])
    assert index["tensors"].keys() == held.keys() and at_save.keys() == held.keys()
    for target in TIERS:
        other = state_of(target, seed=1)
        steps(other, range(1))  # a used optimizer is overwritten
        assert load(tmp_path / step_name(3), other.model, other.optimizer, other.ema)["step"] == 3
        assert differing(everything(other), at_save) == [], (source, target)
        if target in HALF:
            rounds = {n: rounded(at_save[f"model.{n}"]) for n in parameters(other.model)}
            assert differing(parameters(other.model), rounds) == [], (source, target)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_in_another_tier_as_if_never_stopped(tmp_path: Path, family: str) -> None:
    for number, source in enumerate(FAMILIES[family]):
        state = state_of(source)
        steps(state, range(2))
        manager = CheckpointManager(tmp_path / str(number))
        manager.save(2, state)
        on = losses(steps(state, range(2, 4)))  # while it is written: what is saved was copied
        manager.wait()
        for target in FAMILIES[family]:
            other = state_of(target, seed=1)
            load(tmp_path / str(number) / step_name(2), other.model, other.optimizer, other.ema)
            assert losses(steps(other, range(2, 4))) == on, (source, target)
            assert differing(everything(other), everything(state)) == [], (source, target)


def test_weights_alone_and_a_start(tmp_path: Path, trained: Any) -> None:
    state, _ = trained["host"]
    CheckpointManager(tmp_path).save(3, state, blocking=True)
    actual = everything(state)
    for which in ("model", "ema"):
        plain = ToyDiT(seed=2)
        load_weights(tmp_path / step_name(3), plain, which)  # type: ignore[arg-type]
        assert all(torch.equal(p, actual[f"{which}.{n}"]) for n, p in plain.named_parameters())
    for tier in TIERS:
        other = state_of(tier, seed=1)
        load_start(tmp_path / step_name(3), other.model, other.optimizer)
        assert other.ema is not None
        other.ema.restart(other.model)
        after = everything(other)
        for name in dict(other.model.named_parameters()):
            assert torch.equal(after[f"model.{name}"], actual[f"ema.{name}"]), (tier, name)
            assert torch.equal(after[f"ema.{name}"], actual[f"ema.{name}"]), (tier, name)


FIXED = ("text.weight", "blocks.1.norm.weight", "blocks.1.norm.bias")


@pytest.mark.parametrize("tier", ["host"])
def test_weights_that_do_not_train_stay_float32_and_go_to_any_tier(tmp_path: Path, tier: str) -> None:
    state = state_of(tier, fixed=FIXED)
    steps(state, range(2))
    first, weights = dict(ToyDiT().named_parameters()), parameters(state.model)
    assert all(torch.equal(weights[name], first[name]) and weights[name].dtype == torch.float32 for name in FIXED)
    assert state.ema is not None and not set(FIXED) & set(
        state.ema.tensors
    )  # of what does not change there is no average
    with state.ema.swap(state.model):
        pass
    assert differing(parameters(state.model), weights) == []
    CheckpointManager(tmp_path).save(2, state, blocking=True)
    for target in TIERS:
        other = state_of(target, seed=1, fixed=FIXED)
        with pytest.raises(UserError, match="another base"):
            load(tmp_path / step_name(2), other.model, other.optimizer, other.ema)
        for name in FIXED:
            set_parameter(other.model.get_parameter(name), first[name])
        load(tmp_path / step_name(2), other.model, other.optimizer, other.ema)
        assert differing(everything(other), everything(state)) == []
        assert differing(*({name: parameters(each.model)[name] for name in FIXED} for each in (other, state))) == []


@pytest.mark.parametrize("tier", ["split", "host"])
def test_a_checkpoint_that_is_written_meanwhile_is_of_its_own_step(tmp_path: Path, tier: str) -> None:
    """The next steps change states and averages in place, in the host's memory too."""
    state, manager = state_of(tier), CheckpointManager(tmp_path)
    steps(state, range(2))
    then = everything(state)
    manager.save(2, state)
    steps(state, range(2, 5))
    manager.wait()
    other = state_of(tier, seed=1)
    load(tmp_path / step_name(2), other.model, other.optimizer, other.ema)
    assert differing(everything(other), then) == [] and differing(everything(state), then) != []


# -- averages


@pytest.mark.parametrize("tier", ["plain", "split"])
def test_averages_follow_the_float32_weights_and_swap_bitwise(tier: str) -> None:
    """On the device, and in the host's memory."""
    results = []
    for where in ("device", "host"):
        state = state_of(tier, ema=where)
        ema = state.ema
        assert ema is not None and ema.on_host == (where == "host")
        expected = {n: p.detach().clone() for n, p in ToyDiT().named_parameters()}
        for epoch in range(3):
            steps(state, range(epoch, epoch + 1))
            weight = 1 - min(0.9, (2 + epoch) / (11 + epoch))
            for name, value in everything(state).items():
                if name.startswith("model.") and name[6:] in expected:
                    expected[name[6:]].lerp_(value, weight)
        assert differing({n: t.clone() for n, t in ema.state_dict().items()}, expected) == []
        before, weights = everything(state), parameters(state.model)
        plain = flow_loss(state.model, make_batch(["a"]))
        with pytest.raises(KeyError), ema.swap(state.model):
            inside = parameters(state.model)
            assert differing(inside, {n: t.to(inside[n].dtype) for n, t in expected.items()}) == []
            assert not torch.equal(flow_loss(state.model, make_batch(["a"])), plain)
            with pytest.raises(RuntimeError, match="swapped"):
                ema.update(state.model)
            raise KeyError  # an error in validation must not leave the averages in the model
        assert differing(parameters(state.model), weights) == [] and differing(everything(state), before) == []
        results.append(before)
        assert ema.updates == 3
    assert differing(*results) == []


# -- other optimizers


@pytest.mark.parametrize("tier", HALF)
def test_muon_in_tiers_is_bitwise_muon(tier: str) -> None:
    state, other = state_of("float32", optimizer="muon"), state_of(tier, optimizer="muon")
    assert losses(steps(state, range(3))) == losses(steps(other, range(3)))
    assert differing(everything(state), everything(other)) == []
    assert "optimizer.state.blocks.0.up.weight.momentum_buffer" in everything(other)
    assert "optimizer.state.enter.weight.exp_avg" in everything(other)


def test_the_learning_rate_reaches_the_masters() -> None:
    cfg = TrainConfig(steps=11, schedule="cosine", lr=1.0, warmup_steps=0)
    for tier in TIERS:
        state = state_of(tier)
        assert state.optimizer is not None
        set_learning_rate(state.optimizer, learning_rate(10, cfg))
        before = everything(state)
        steps(state, range(1))
        after = {n: t for n, t in everything(state).items() if n.startswith("model.")}
        assert differing(after, {n: t for n, t in before.items() if n.startswith("model.")}) == []


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    for tier in TIERS:
        state = state_of(tier)
        steps(state, range(1))
        before, weights = everything(state), parameters(state.model)
        batch = make_batch(["a"])
        batch["latents"][0] = float("nan")
        assert state.optimizer is not None
        result = train_step(
            state.model, [batch], flow_loss, state.optimizer,
            global_samples=1, clip_norm=1.0, strategy="none",
        )  # fmt: skip
        assert not result.finite and result.bad == ["a.mp4"]
        assert differing(everything(state), before) == [] and differing(parameters(state.model), weights) == []


# -- the whole way


@pytest.mark.slow
def test_a_run_trains_alike_in_every_tier_and_goes_on_in_another(small_cache: Path, tmp_path: Path) -> None:
    """`mmspeed train` on the shipped clips: losses, held-out losses, checkpoints."""
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    runs: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    ways: dict[str, tuple[str, ...]] = {
        "float32": ("memory.master=float32",),
        "split": ("memory.master=split", "memory.ema=host"),
        "host": ("memory.master=host", "memory.states=host", "memory.bucket=64KiB", "memory.ema=host"),
        "released": (
            "memory.master=host",
            "memory.states=host",
            "memory.bucket=64KiB",
            "memory.release_gradients=true",
        ),
    }
    for name, keys in ways.items():
        if name == "host":  # broken off, and gone on with in this tier from one with others
            TrainPipeline(_config(tmp_path, name, *ways["split"], "train.steps=4")).run()
        config = _config(tmp_path, name, *keys)
        TrainPipeline(config).run()
        rows = read_metrics(config.run_dir / "metrics.jsonl")
        results = [row["loss"] for row in rows if row["kind"] == "train"]
        results += [row["loss"] for row in rows if row["kind"] == "validation" and row["step"] in (3, 6)]
        runs[name] = results, _tensors_of(config.run_dir / "checkpoints" / step_name(6))
    first, tensors = runs["float32"]
    assert len(first) == 8 and len(set(first)) == 8
    for name, (seen, others) in runs.items():
        assert seen == first, name
        assert differing(others, tensors) == [], name


def _config(folder: Path, name: str, *keys: str) -> Config:
    plain = ("device.dtype=bfloat16", "train.clip_norm=null", f"name={name}")
    return small_config(folder, *plain, *keys)


def _tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {n: t for path in checkpoint.glob("*.safetensors") for n, t in load_file(path).items()}
