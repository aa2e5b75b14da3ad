"""Only what trains is kept, on one process: bytes, fingerprints of the frozen base, declared state, and checkpoints of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.errors import UserError
from mmspeed.loop import frozen
from mmspeed.loop.averages import EMA, ema_decay
from mmspeed.loop.checkpoint.load import load_start
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load, load_weights, step_name
from mmspeed.loop.checkpoint.state import declared_state
from mmspeed.loop.frozen import fingerprint, frozen_fingerprint, frozen_names
from mmspeed.parallel import is_half, make_half, take_float32_gradients
from tests.support.adapted import (
    KEYS,
    AdaptedBlock,
    AdaptedDiT,
    blocks,
    everything,
    folder_bytes,
    share,
    state_bytes,
    state_of,
    steps,
)
from tests.support.toy import ToyDiT, flow_loss, make_batch

TRAINED = [f"blocks.{number}.{name}.weight" for number in range(2) for name in ("enter", "leave")]
STATE = {
    f"blocks.{number}.{name}": rule
    for number in range(2)
    for name, rule in (("bias", "averaged"), ("count", "kept"), ("attend.tau", "kept"))
}
AVERAGED = [name for name, rule in STATE.items() if rule == "averaged"]
TIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"master": "split"},
    "host": {"master": "host", "states": "host", "ema": "host"},
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n]))


def save(folder: Path, state: TrainingState, step: int = 2) -> Path:
    CheckpointManager(folder).save(step, state, blocking=True)
    return folder / step_name(step)


def values_of(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name in names}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingState, Path]:
    """After two steps, and its checkpoint."""
    state = state_of()
    steps(state, range(2))
    return state, save(tmp_path_factory.mktemp("trained"), state)


@pytest.mark.parametrize("tier", ["plain", "host"])
def test_checkpoint_optimizer_and_average_cost_what_trains(tmp_path: Path, tier: str) -> None:
    state = state_of(**TIERS[tier])
    steps(state, range(2))
    saved = save(tmp_path, state)
    assert share(state.model) < 0.01
    trains = 4 * sum(p.numel() for p in state.model.parameters() if p.requires_grad)  # bytes of float32
    sizes = state_bytes(state)
    assert 2 * trains <= sizes["optimizer"] <= 1.1 * 2 * trains and trains <= sizes["average"] <= 1.1 * trains
    assert 4 * trains <= folder_bytes(saved) <= 1.1 * 4 * trains
    held = json.loads((saved / "index.json").read_text())["tensors"]
    assert {name for name in held if name.startswith("model.")} == {
        f"model.{name}" for name in [*TRAINED, *STATE, "shift"]
    }
    assert {name for name in held if name.startswith("ema.")} == {f"ema.{name}" for name in TRAINED + AVERAGED}


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_a_run_on_a_frozen_base_resumes_bitwise_in_any_tier(tmp_path: Path, tier: str) -> None:
    state = state_of(**TIERS[tier])
    base = values_of(state.model, frozen_names(state.model))
    steps(state, range(2))
    at_save, saved = everything(state), save(tmp_path, state)
    on = steps(state, range(2, 4))
    assert differing(values_of(state.model, list(base)), base) == [] and differing(everything(state), at_save) != []
    for target in TIERS:
        other = state_of(seed=1, **TIERS[target])
        load(saved, other.model, other.optimizer, other.ema)
        assert differing(everything(other), at_save) == []
        if (target == "plain") == (tier == "plain"):
            assert steps(other, range(2, 4)) == on and differing(everything(other), everything(state)) == []


def test_only_what_trains_has_gradients_and_counts_for_the_norm() -> None:
    model = AdaptedDiT()
    flow_loss(model, make_batch(KEYS)).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == TRAINED
    alone = torch.stack([model.get_parameter(name).grad.norm() for name in TRAINED]).norm()  # type: ignore[union-attr]
    plain = state_of()
    assert plain.optimizer is not None
    assert {id(p) for group in plain.optimizer.param_groups for p in group["params"]} == {
        id(plain.model.get_parameter(name)) for name in TRAINED
    }
    assert steps(plain, range(1))[0][1] == pytest.approx(alone.item(), rel=1e-5)


def test_another_base_is_refused(trained: tuple[TrainingState, Path], tmp_path: Path) -> None:
    _, saved = trained
    meta = json.loads((saved / "meta.json").read_text())
    assert meta["frozen"] == frozen_fingerprint(AdaptedDiT()) and meta["state"] == STATE
    other = state_of(base=1)
    with pytest.raises(UserError, match=r"another base: the \d+ tensors here .* such as `enter.weight`"):
        load(saved, other.model, other.optimizer, other.ema)
    for which in ("ema", "model"):
        with pytest.raises(UserError, match="another base"):
            load_weights(saved, AdaptedDiT(base=1), which)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"train.start_from: .*another base"):
        load_start(saved, other.model, other.optimizer)
    changed = state_of()
    with torch.no_grad():
        changed.model.get_parameter("blocks.1.down.bias")[-1] *= 1 + 2**-23  # one bit
    with pytest.raises(UserError, match="another base"):
        load(saved, changed.model, changed.optimizer, changed.ema)
    thawed = state_of()
    thawed.model.get_parameter("enter.weight").requires_grad_(True)
    with pytest.raises(UserError, match=r"no tensor `model.enter.weight`: it did not train when"):
        load(saved, thawed.model)
    whole = save(tmp_path, TrainingState(ToyDiT()))  # nothing is frozen there, and nothing may lack
    deeper = ToyDiT(depth=4)
    deeper.blocks[3].requires_grad_(False)
    with pytest.raises(UserError, match=r"no tensor `model.blocks.3\..*another model"):
        load(whole, deeper)


def test_weights_alone_come_with_the_base_of_the_model(trained: tuple[TrainingState, Path]) -> None:
    state, saved = trained
    held = everything(state)
    for which, frozen_here in (("ema", True), ("model", True), ("ema", False)):
        model = AdaptedDiT(seed=2)
        base = values_of(model, frozen_names(model))
        model.requires_grad_(not frozen_here)  # as whoever samples has it
        load_weights(saved, model, which)  # type: ignore[arg-type]
        assert differing(values_of(model, list(base)), base) == []
        for name in TRAINED:
            assert torch.equal(model.get_parameter(name), held[f"{which}.{name}"])
        for name, rule in STATE.items():
            part = which if rule == "averaged" else "model"
            assert torch.equal(model.get_buffer(name), held[f"{part}.{name}"]), name
    other = state_of(seed=1)
    load_start(saved, other.model, other.optimizer)
    assert all(torch.equal(other.model.get_parameter(name), held[f"ema.{name}"]) for name in TRAINED)


def test_the_fingerprint_tells_bases_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(change: Any = None, **parameters: Tensor) -> str | None:
        model = nn.Module()
        values = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(2.0), "none": torch.empty(0, 3)} | parameters
        for name, value in values.items():
            model.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
        with torch.no_grad():
            if change is not None:
                change(model)
        return frozen_fingerprint(model)

    plain = of()
    assert plain == of() and plain is not None and len(plain) == 64
    swapped = torch.arange(12.0)[torch.tensor([1, 0, *range(2, 12)])].view(3, 4)
    others = [
        of(lambda m: m.b.neg_().mul_(-1).add_(2.0**-22)),
        of(a=swapped),
        of(a=torch.arange(12.0).view(4, 3)),
        of(a=torch.arange(12.0).view(3, 4).double()),
        of(a=torch.arange(12.0).view(3, 4).bfloat16()),
        of(c=torch.empty(0)),
        of(b=torch.arange(12.0).view(3, 4), a=torch.tensor(2.0)),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert of(a=torch.arange(12.0).view(4, 3).t().contiguous().t().reshape(3, 4)) == plain
    zeros = [of(a=torch.zeros(3, 4)), of(a=-torch.zeros(3, 4))]
    assert zeros[0] != zeros[1]  # bits, not values
    monkeypatch.setattr(frozen, "PIECE", 5)
    assert of() == plain
    with_one_that_trains = nn.Linear(2, 2)
    with_one_that_trains.bias.requires_grad_(False)
    assert frozen_fingerprint(with_one_that_trains) == fingerprint(with_one_that_trains, ["bias"])


@pytest.mark.slow
def test_averaged_buffers_are_averaged_and_swapped_in_and_kept_ones_are_not() -> None:
    for tier, options in TIERS.items():
        state = state_of(**options)
        assert state.ema is not None
        expected = [torch.zeros_like(block.bias) for block in blocks(state.model)]
        for epoch in range(3):
            steps(state, range(epoch, epoch + 1))
            for mean, block in zip(expected, blocks(state.model), strict=True):
                mean.lerp_(block.bias, 1 - ema_decay(0.9, epoch + 1))
        before = everything(state)
        with state.ema.swap(state.model):
            for mean, block in zip(expected, blocks(state.model), strict=True):
                assert torch.equal(block.bias, mean) and mean.abs().max() > 0, tier
                assert block.count == 3 and block.attend.tau >= 3.5  # as they are
        assert differing(everything(state), before) == []
        assert torch.equal(before["ema.blocks.0.bias"], expected[0])
        state.ema.restart(state.model)
        assert torch.equal(everything(state)["ema.blocks.1.bias"], before["model.blocks.1.bias"])


def test_state_that_one_side_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with more state serves a model without; one with less leaves a model's as it is."""
    state = state_of()
    steps(state, range(2))
    more = save(tmp_path / "more", state)
    with monkeypatch.context() as patch:
        patch.setattr(AdaptedBlock, "state_buffers", {"count": "kept"})
        fewer = state_of()
        load(more, fewer.model, fewer.optimizer, fewer.ema)  # `bias` is left out, for the record says that it is state
        assert blocks(fewer.model)[0].count == 2 and not blocks(fewer.model)[0].bias.any()
        load_weights(more, AdaptedDiT())
        less = save(tmp_path / "less", fewer)
    other = state_of(seed=1)
    for block in blocks(other.model):
        block.bias.fill_(3.0)
    load(less, other.model, other.optimizer, other.ema)
    assert other.ema is not None
    for number, block in enumerate(blocks(other.model)):
        assert block.bias.eq(3).all() and other.ema.tensors[f"blocks.{number}.bias"].eq(3).all()
        assert block.count == 2 and block.attend.tau == 2.5 + number


def test_state_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptedBlock, "state_buffers", {"offset": "kept"})
    with pytest.raises(ValueError, match="AdaptedBlock declares the state `offset`, which is none of its buffers"):
        declared_state(AdaptedDiT())
    monkeypatch.setattr(AdaptedBlock, "state_buffers", {"count": "averaged"})
    with pytest.raises(ValueError, match=r"`blocks.0.count` is torch.int64; a buffer that is averaged is float32"):
        EMA(AdaptedDiT(), 0.9)


@pytest.mark.parametrize("tier", ["host"])
def test_a_checkpoint_that_holds_the_base_too_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Checkpoints as they were written before: all parameters and averages, persistent buffers, states of parameters that train."""
    state = state_of(base=3)
    steps(state, range(2))
    state.model.requires_grad_(True)
    with monkeypatch.context() as patch:
        patch.setattr(AdaptedBlock, "state_buffers", {})
        patch.setattr(ClusteredAttention, "state_buffers", {})
        before = TrainingState(state.model, state.optimizer, EMA(state.model, 0.9))
        saved = save(tmp_path, before)
        held = everything(before)
    meta = json.loads((saved / "meta.json").read_text())
    assert "frozen" not in meta and "state" not in meta
    assert "ema.enter.weight" in held and "model.blocks.0.bias" not in held

    other = state_of(seed=1, **TIERS[tier])
    load(saved, other.model, other.optimizer, other.ema)
    base = frozen_names(other.model)
    assert differing(values_of(other.model, base), {name: held[f"model.{name}"] for name in base}) == []
    now = everything(other)
    for name in set(now) - {f"{part}.{name}" for part in ("model", "ema") for name in AVERAGED}:
        assert torch.equal(now[name], held[name]), name
    for which in ("ema", "model"):
        weights = AdaptedDiT()
        load_weights(saved, weights, which)  # type: ignore[arg-type]
        assert all(torch.equal(p, held[f"{which}.{n}"]) for n, p in weights.named_parameters())
        assert weights.get_buffer("blocks.1.attend.tau") == 3.5
    assert json.loads((save(tmp_path / "on", other) / "meta.json").read_text())["frozen"] == frozen_fingerprint(
        AdaptedDiT(base=3)
    )


def test_a_base_in_bfloat16_makes_no_bfloat16_training() -> None:
    model = AdaptedDiT()
    for name in frozen_names(model):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    assert not is_half(model)
    make_half(model)
    assert is_half(model)
    take_float32_gradients(model)
    dtypes = {p.requires_grad: p.grad_dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
