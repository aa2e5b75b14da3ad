"""Check a small model beside the CPU, and measure whole training steps: time, MFU and peak memory, dense and sparse.

Legend: B batch, C T h w channels, frames, height, width of a latent, L caption tokens, D text width.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.bench.memory import fill_zeros, largest_distance
from mmspeed.compute.sparse.module import Phase, clustered_layers
from mmspeed.config.memory import ActivationPolicy, MemoryConfig
from mmspeed.config.model import SIZES
from mmspeed.config.sparse import SparseConfig
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device, is_out_of_memory
from mmspeed.initialize import init_weights
from mmspeed.log import format_bytes
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.memory import peak_bytes, resident_bytes, set_policies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig, count_parameters, on_meta
from mmspeed.parallel import autocast

from .oracle import number_types, short_name
from .rates import peak_of
from .rows import Check, Outcome

PART = "steps"
CHANNELS, TEXT_WIDTH, TEXT_TOKENS = 16, 384, 128
LATENTS = {"8k": (8, 64, 64), "32k": (32, 64, 64)}  # 8,192 and 32,768 tokens of 1 x 2 x 2
SMALL_LATENTS = {"64": (4, 8, 8), "256": (4, 16, 16)}
PHASES: tuple[Phase, ...] = ("dense", "sparse")
ROUNDS = 2
BUILD_RATE = 5e7  # parameters a second that are drawn, about
SLOW_SHARE = 0.15  # of the peak: for the estimate of a step's time
# tried in this order until a step fits into the memory
POLICIES: tuple[dict[str, ActivationPolicy], ...] = ({}, {"block": "selective"}, {"block": "recompute"})
BESIDE_CPU = 2e-4  # largest difference of a gradient in float32, relative to its largest value: 10^4 terms in another order, three layers


@dataclass(frozen=True)
class StepInputs:
    """The arguments of the model for one synthetic sample, and the target of its prediction."""

    arguments: list[Tensor]
    target: Tensor

    @classmethod
    def of(cls, latent: tuple[int, int, int], where: torch.device) -> StepInputs:
        """A sample of velocity prediction at time 1/2."""
        x0, noise = (rng.normal((1, CHANNELS, *latent), 0, "qualify", name) for name in ("latent", "noise"))
        text = rng.normal((1, TEXT_TOKENS, TEXT_WIDTH), 0, "qualify", "text")
        mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
        arguments = [(x0 + noise) / 2, torch.full((1,), 0.5), text, mask]
        return cls([x.to(where) for x in arguments], (noise - x0).to(where))

    def loss(self, model: nn.Module) -> Tensor:
        """The mean squared error."""
        prediction: Tensor = model(*self.arguments)
        return (prediction.float() - self.target).square().mean()


class StepBench:
    """A model of one size at a time with its optimizer; sparse layers are set dense for dense rows."""

    def __init__(self, device: Device, small: bool) -> None:
        self.device, self.small = device, small
        self.dtype = number_types(device)[0]
        self._size = ""
        self._model: SoraDiT | None = None
        self._optimizer: Any = None

    def config(self, size: str) -> SoraDiTConfig:
        """The size with attention over all tokens, and the sparse attention of a run from scratch."""
        sparse = SparseConfig.model_validate({"planner": "tiles", "min_tokens": 64, "dense_steps": 0})
        if self.small:
            sparse = sparse.model_copy(update={"dense_first": 0, "dense_last": 0})
        fields: dict[str, Any] = {"arrangement": "full", "latent_channels": CHANNELS, "text_width": TEXT_WIDTH}
        return SoraDiTConfig(**SIZES[size], **fields, sparse=sparse)

    def model(self, size: str) -> tuple[SoraDiT, Any]:
        """The model with its optimizer; that of another size is freed before."""
        if self._model is None or self._size != size:
            self.free()
            model = on_meta(self.config(size)).to_empty(device=self.device.torch_device)
            init_weights(model, 0)
            if self.dtype != torch.float32:
                autocast(model, self.dtype)
            self._size, self._model = size, model
            self._optimizer = make_optimizer(model, TrainConfig(), MemoryConfig(), self.device)
        return self._model, self._optimizer

    def free(self) -> None:
        """Free the model."""
        self._model = self._optimizer = None
        self._size = ""
        gc.collect()
        self.device.empty_cache()

    def estimate(self, size: str, latent: tuple[int, int, int]) -> float:
        """About the seconds of a row: building, and a step more than are timed, at a low share of the peak."""
        if self.small:
            return 1.0
        model = on_meta(self.config(size))
        peak, _ = peak_of(self.device, torch.bfloat16)
        step = 3 * model.dense_flops(latent, TEXT_TOKENS) / (SLOW_SHARE * peak)
        return count_parameters(model) / BUILD_RATE + (ROUNDS + 1) * step


def step_checks(device: Device, small: bool) -> Iterator[Check]:
    """Checks of a small model beside the CPU, then of steps of S/2 and XL/2; on a CPU of the smallest size."""
    yield Check(PART, "nano beside the CPU, float32", lambda: check_beside_cpu(device), 2.0)
    bench = StepBench(device, small)
    for size in ("nano",) if small else ("S/2", "XL/2"):
        for tokens, latent in (SMALL_LATENTS if small else LATENTS).items():
            seconds = bench.estimate(size, latent)
            for phase in PHASES:
                yield Check(
                    PART,
                    f"{size} {tokens} tokens {phase} {short_name(bench.dtype)}",
                    partial(check_step, bench, size, latent, phase),
                    seconds,
                )


def check_beside_cpu(device: Device) -> Outcome:
    """Loss and gradients of a small model on the device, in float32, beside float64 on the CPU."""
    config = SoraDiTConfig(**SIZES["nano"], latent_channels=CHANNELS, text_width=TEXT_WIDTH)
    results = []
    for where, dtype in ((torch.device("cpu"), torch.float64), (device.torch_device, torch.float32)):
        model = SoraDiT(config)
        fill_zeros(model)
        model.to(where, dtype)
        inputs = StepInputs.of((3, 8, 8), where)
        loss = inputs.loss(model)
        loss.backward()
        results.append(
            (float(loss.detach()), [p.grad.cpu().double() for p in model.parameters() if p.grad is not None])
        )
    (right_loss, right), (loss_value, grads) = results
    distance, apart = largest_distance(grads, right), abs(loss_value / right_loss - 1)
    text = f"loss {apart:.0e}, gradients {distance:.0e} apart from float64 on the CPU, limit {BESIDE_CPU:.0e}"
    good = distance <= BESIDE_CPU and apart <= BESIDE_CPU
    figures = {"loss": loss_value, "cpu_loss": right_loss, "distance": distance}
    return Outcome("passed" if good else "failed", text, figures)


def check_step(bench: StepBench, size: str, latent: tuple[int, int, int], phase: Phase) -> Outcome:
    """A training step: the first policy of activations that fits, its time, MFU and peak memory."""
    model, optimizer = bench.model(size)
    for layer in clustered_layers(model).values():
        layer.phase = phase
        layer.counter.clear()
    for ways in POLICIES:
        measured = _measured(bench, model, optimizer, latent, ways)
        if measured is not None:
            break
        gc.collect()
        bench.device.empty_cache()
    else:
        return Outcome("failed", f"memory ran out even with {_policy_words(POLICIES[-1])}")
    seconds, peak_memory, loss = measured
    flops = 3 * (model.flops if phase == "sparse" else model.dense_flops)(latent, TEXT_TOKENS)
    peak, source = peak_of(bench.device, bench.dtype)
    mfu = flops / seconds / peak
    kernels = sorted({name for layer in clustered_layers(model).values() for name in layer.counter})
    figures = {
        "seconds": seconds,
        "mfu": mfu,
        "peak_bytes": peak_memory,
        "loss": loss,
        "flops": flops,
        "peak_flops": peak,
        "peak_from": source,
        "parameters": count_parameters(model),
        "tokens": model.tokens(latent),
        "policy": ways,
        "attention": kernels,
    }
    text = (
        f"{seconds:.3g} s, MFU {mfu:.1%}, peak {format_bytes(peak_memory)}, {_policy_words(ways)}, {', '.join(kernels)}"
    )
    if not math.isfinite(loss):
        return Outcome("failed", f"the loss is {loss}; {text}", figures)
    wrong = ("dense" in kernels) == (phase == "sparse")
    return Outcome("failed" if wrong else "passed", text, figures)


def _policy_words(ways: dict[str, ActivationPolicy]) -> str:
    return ", ".join(f"{region}: {way}" for region, way in ways.items()) or "all activations kept"


def _measured(
    bench: StepBench, model: SoraDiT, optimizer: Any, latent: tuple[int, int, int], ways: dict[str, ActivationPolicy]
) -> tuple[float, int, float] | None:
    """(seconds, peak bytes, loss) of a step; None where the device's memory ran out."""
    offloader = Offloader(bench.device)
    for block in model.blocks:
        set_policies(block, ways, offloader.group)
    device = bench.device
    try:
        inputs = StepInputs.of(latent, device.torch_device)
        losses = [take_step(model, optimizer, inputs)]  # makes the optimizer's states, compiles, chooses kernels
        taken = []
        for _ in range(ROUNDS):
            device.synchronize()
            began = time.perf_counter()
            losses.append(take_step(model, optimizer, inputs))
            device.synchronize()
            taken.append(time.perf_counter() - began)
        resident = resident_bytes(model.parameters(), optimizer)
        peak = peak_bytes(device, resident, lambda: losses.append(take_step(model, optimizer, inputs)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        model.zero_grad(set_to_none=True)
        return None
    return min(taken), peak, max(losses, key=lambda loss: math.inf if math.isnan(loss) else abs(loss))


def take_step(model: SoraDiT, optimizer: Any, inputs: StepInputs) -> float:
    """Forward, backward, clipping and update; the loss."""
    loss = inputs.loss(model)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())
