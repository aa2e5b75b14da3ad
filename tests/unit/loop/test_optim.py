"""Optimizer, learning-rate course, moving average, throughput arithmetic and stop signals: on one process."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed.config.memory import MemoryConfig
from mmspeed.config.schema import TrainConfig
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA, ema_decay
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load
from mmspeed.loop.checkpoint.state import states_to_save
from mmspeed.loop.optimizers.learning_rate import learning_rate, set_learning_rate
from mmspeed.loop.optimizers.make_optimizer import make_optimizer, muon_share
from mmspeed.loop.optimizers.stacks import MuonOfStacks, orthogonalised
from mmspeed.loop.signals import StopSignals
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.models.language.shapes import SHAPES
from mmspeed.models.language.weights import on_meta
from mmspeed.parallel import make_half
from mmspeed.plan.throughput import ThroughputMeter, mfu, training_flops
from tests.support.tiers import TIERS
from tests.support.toy import ToyDiT


class Kinds(nn.Module):
    """Parameters whose kind their dims do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.ones(1, 6, 4))  # Wan's
        self.table = nn.Parameter(torch.ones(6, 4))  # LTX's, of two dims
        self.norm, self.words = nn.LayerNorm((2, 4)), nn.Embedding(5, 4)
        self.conv, self.attention = nn.Conv3d(1, 2, 2), nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.experts = nn.ParameterDict({"gate_up_proj": torch.ones(3, 4, 4), "gate_up_proj_bias": torch.ones(3, 4)})


def test_decay_is_by_what_a_parameter_is_and_every_parameter_is_there() -> None:
    for model, expected in (
        (ToyDiT(), {name for name, p in ToyDiT().named_parameters() if p.ndim >= 2}),
        (Kinds(), {"words.weight", "conv.weight", "attention.in_proj_weight", "attention.out_proj.weight", "experts.gate_up_proj"}),
    ):  # fmt: skip
        optimizer = make_optimizer(model, TrainConfig(weight_decay=0.1, betas=(0.8, 0.9)))
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        assert {n for n, p in model.named_parameters() if groups[id(p)]["weight_decay"] == 0.1} == expected
        assert {g["weight_decay"] for g in groups.values()} == {0.0, 0.1}
        assert all(g["betas"] == (0.8, 0.9) for g in optimizer.param_groups)


@pytest.mark.parametrize("shape", [(5, 6, 9), (4, 12, 8)], ids=["wide", "tall"])
def test_muon_takes_each_matrix_of_a_stack_as_torchs_takes_it_alone(shape: tuple[int, int, int]) -> None:
    """But for the rounding of bfloat16 products; the expert that no token reached only decays."""
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    one = MuonOfStacks([{"params": [stack], "weight_decay": 0.1}], 0.05)
    other = torch.optim.Muon(alone, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        gradient = torch.randn(shape) * 10.0**-step
        gradient[1] = 0
        stack.grad = gradient.clone()
        for matrix, part in zip(alone, gradient, strict=True):
            matrix.grad = part.clone()
        one.step()
        other.step()
        torch.testing.assert_close(stack.detach(), torch.stack([m.detach() for m in alone]), rtol=0, atol=2e-3)
    orthogonal = orthogonalised(torch.randn(shape), (3.4445, -4.7750, 2.0315), 5)
    assert (torch.linalg.svdvals(orthogonal.float()) - 1).abs().max() < 0.5


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "qwen3-0.6b"])
def test_muon_has_all_of_a_decoder_but_embeddings_and_vectors(name: str) -> None:
    model = on_meta(SHAPES[name].settings)
    plain = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.ndim < 2 or n.startswith(("embed_tokens", "lm_head", "mtp.0.eh"))
    )
    assert muon_share(model) == pytest.approx(1 - plain / sum(p.numel() for p in model.parameters()))
    if SHAPES[name].settings.experts is not None:
        assert muon_share(model) > 0.97


def test_learning_rate_at_known_steps() -> None:
    cfg = TrainConfig(steps=101, warmup_steps=4, lr=1.0)
    assert [learning_rate(s, cfg) for s in (0, 1, 3, 4, 100)] == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0])
    cosine = TrainConfig(steps=11, warmup_steps=0, lr=1.0, schedule="cosine", min_lr_ratio=0.2)
    assert [learning_rate(s, cosine) for s in (0, 5, 10, 99)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    stable = TrainConfig(steps=21, warmup_steps=1, lr=1.0, schedule="wsd", decay_share=0.2, min_lr_ratio=0.2)
    assert [learning_rate(s, stable) for s in (0, 1, 16, 18, 20, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    optimizer = make_optimizer(ToyDiT(), cfg)
    set_learning_rate(optimizer, 0.125)
    assert [g["lr"] for g in optimizer.param_groups] == [0.125, 0.125]


def test_muon_has_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    """Bitwise torch's own two optimizers, each over its part."""
    cfg = TrainConfig(optimizer="muon", lr=1e-2, weight_decay=0.1)
    model, twin = ToyDiT(), ToyDiT()
    one = make_optimizer(model, cfg)
    hidden = [p for p in twin.blocks.parameters() if p.ndim == 2]
    others = [p for p in twin.parameters() if p.ndim >= 2 and not any(p is h for h in hidden)]
    two = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2, betas=cfg.betas, weight_decay=0.1, foreach=True),
        torch.optim.AdamW([p for p in twin.parameters() if p.ndim < 2], lr=1e-2, betas=cfg.betas, weight_decay=0.0),
    ]
    assert len(hidden) == 6 and len(others) == 3
    for step in range(3):
        set_learning_rate(one, 1e-2 / (step + 1))
        for optimizer in two:
            set_learning_rate(optimizer, 1e-2 / (step + 1))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        for optimizer in (one, *two):
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert isinstance(one, torch.optim.Optimizer)
    assert sum("momentum_buffer" in state for state in one.state.values()) == 6


class _Names(TorchDispatchMode):
    """Keeps the operators of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_adamw_goes_tensor_by_tensor_on_the_cpu_with_the_numbers_of_its_lists() -> None:
    """A list would hold a temporary of every parameter at once."""
    torch.manual_seed(0)
    model = ToyDiT()
    twin = copy.deepcopy(model)
    cfg = TrainConfig(lr=1e-2, weight_decay=0.1)
    one = make_optimizer(model, cfg)
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, foreach=True)
    for _ in range(5):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        with _Names() as seen:
            one.step()
        other.step()
    assert "sqrt" in seen.names and not any(name.startswith("_foreach") for name in seen.names)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torchao"):
        make_optimizer(ToyDiT(), TrainConfig(optimizer="adamw8bit"))


@pytest.mark.parametrize("tier", ["plain", "split", "host"])
def test_moments_of_8_bits(tmp_path: Path, tier: str) -> None:
    """A quarter of the bytes; a checkpoint holds float32 values, which load into the same codes, and into plain AdamW."""
    pytest.importorskip("torchao")
    memory = MemoryConfig(**({"bucket": 32768} | TIERS[tier]))

    def fresh(name: str, memory: MemoryConfig) -> TrainingState:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))  # whole blocks of 256
        if memory.master != "parameters":
            make_half(model)
        return TrainingState(model, make_optimizer(model, TrainConfig(optimizer=name, lr=1e-3), memory))  # type: ignore[arg-type]

    def step(state: TrainingState, seed: int) -> None:
        assert state.optimizer is not None
        for p in state.model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        set_learning_rate(state.optimizer, 1e-3)
        state.optimizer.step()
        state.optimizer.zero_grad()

    state, plain = (
        fresh("adamw8bit", memory),
        fresh("adamw", MemoryConfig(states="host" if tier == "host" else "device")),
    )
    assert isinstance(state.optimizer, TieredOptimizer)
    for seed in range(2):
        step(state, seed)
        step(plain, seed)
    held = state.optimizer.host_bytes() if tier == "host" else state.optimizer.device_bytes()
    numbers = sum(p.numel() for p in state.model.parameters())
    assert held["states"] < 2.6 * numbers  # 2 bytes, scales, and small tensors in float32
    saved = states_to_save(state.model, state.optimizer)
    truth = states_to_save(plain.model, plain.optimizer)  # type: ignore[arg-type]
    assert saved.keys() == truth.keys() and {t.dtype for t in saved.values()} == {torch.float32}
    name = "state.0.weight.exp_avg"
    gap = (saved[name] - truth[name]).norm() / truth[name].norm()
    assert 1e-4 < gap < 2e-2  # rounded to 8 bits

    CheckpointManager(tmp_path).save(2, state, blocking=True)
    other = fresh("adamw8bit", MemoryConfig())
    load(tmp_path / "step-00000002", other.model, other.optimizer)
    again = states_to_save(other.model, other.optimizer)  # type: ignore[arg-type]
    for (
        key,
        value,
    ) in saved.items():  # the codes are the same; a scale that is found by division may be off by its last bit
        torch.testing.assert_close(again[key], value, rtol=2.5e-7, atol=0)
    assert isinstance(other.optimizer, TieredOptimizer)
    kinds = {type(t).__name__ for p in other.model.parameters() for t in other.optimizer.state_of(p).values()}
    assert "OptimState8bit" in kinds
    load(tmp_path / "step-00000002", plain.model, plain.optimizer)
    step(plain, 3)


def test_ema_follows_the_formula_and_swaps_bitwise() -> None:
    model = ToyDiT()
    ema = EMA(model, decay=0.5)
    assert set(ema.state_dict()) == {n for n, _ in model.named_parameters()}
    expected = {n: p.detach().double() for n, p in model.named_parameters()}
    for update in range(1, 12):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * update)
        ema.update(model)
        decay = min(0.5, (1 + update) / (10 + update))
        expected = {n: decay * expected[n] + (1 - decay) * p.detach().double() for n, p in model.named_parameters()}
    for name, average in ema.state_dict().items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert ema_decay(0.5, 1) < ema_decay(0.5, 8) == 0.5

    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    averages = {n: t.clone() for n, t in ema.state_dict().items()}
    with pytest.raises(KeyError), ema.swap(model):
        assert all(torch.equal(p, averages[n]) for n, p in model.named_parameters())
        with pytest.raises(RuntimeError, match="swapped"):
            ema.update(model)
        raise KeyError  # an error in validation must not leave the averages in the model
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert all(torch.equal(t, averages[n]) for n, t in ema.state_dict().items())


def test_throughput_counts_model_flops_only() -> None:
    assert training_flops(10) == 30
    assert mfu(100, seconds=2, peak_flops=300, devices=2) == pytest.approx(0.25)
    meter = ThroughputMeter(peak_flops=100, devices=3)
    for _ in range(2):
        meter.add(samples=8, tokens=80, forward_flops=50, data_wait_s=0.5, wall_s=2.0)
    rates = meter.read()
    assert (rates.samples_per_s, rates.tokens_per_s, rates.data_wait) == (4.0, 40.0, 0.25)
    assert rates.mfu == pytest.approx(300 / (4 * 300))
    assert meter.read().samples_per_s == 0.0  # read starts a new interval


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """The handlers that Python begins with, whatever a launcher in this process has left; those found come back."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_handlers")
def test_stop_signals_and_files(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals(tmp_path) as asked:
        assert asked.poll() == "none"
        (tmp_path / "save").touch()
        assert asked.poll() == "save" and not (tmp_path / "save").exists()
        assert asked.poll() == "none"
        (tmp_path / "save").touch()
        (tmp_path / "stop").touch()
        assert asked.poll() == "stop" and not list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.poll() == "stop"
        with pytest.raises(KeyboardInterrupt):  # the second Ctrl-C interrupts at once
            os.kill(os.getpid(), signal.SIGINT)
    with StopSignals(tmp_path) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.poll() == "stop"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
