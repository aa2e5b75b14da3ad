"""Measure layers of experts of published sizes: their grouped products beside a dense one, and the share of the permutation.

Legend: T tokens, K experts of a token, R = T x K rows, E width, G experts, I hidden width.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute.operators.grouped import grouped_product
from mmspeed.compute.operators.permutation import combine, order_by_expert, permute
from mmspeed.device import Device, is_out_of_memory
from mmspeed.models.language.config import ExpertSettings
from mmspeed.models.language.experts import Experts
from mmspeed.models.language.shapes import SHAPES, tiny_twin

from .oracle import number_types, short_name
from .rates import PART, seconds_of
from .rows import Check, Outcome

NAMES = ("qwen3-30b-a3b", "deepseek-v3")
TOKENS, FEW_TOKENS = 16_384, 64
GROUPED_GOAL = 0.6  # at least: of the rate of a dense product with as many rows
PERMUTATION_GOAL = 0.05  # at most: of the layer's time


@dataclass(frozen=True)
class Layer:
    """The experts of a published model, and tokens for them."""

    device: Device
    dtype: torch.dtype
    width: int
    settings: ExpertSettings
    tokens: int

    def normal(self, *shape: int) -> Tensor:
        """Numbers that a gradient is asked of."""
        return torch.randn(shape, device=self.device.torch_device, dtype=self.dtype).requires_grad_()

    def experts(self) -> Experts:
        """The module."""
        with torch.device("meta"):
            experts = Experts(self.width, self.settings)
        experts.to(self.dtype).to_empty(device=self.device.torch_device)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return experts

    def chosen(self) -> Tensor:
        """The experts of each token, (T, K), at loads that chance makes."""
        scores_TG = torch.rand(self.tokens, self.settings.num_experts, device=self.device.torch_device)
        return scores_TG.topk(self.settings.top_k, dim=-1).indices

    def halved(self) -> Layer:
        """The layer with half of the experts, and as many rows."""
        half = self.settings.num_experts // 2
        return replace(self, settings=replace(self.settings, num_experts=half, n_group=1, topk_group=1))

    def words(self, by: str) -> str:
        """The sizes, and the implementation."""
        own = self.settings
        sizes = f"{self.tokens:,} tokens x {own.top_k} of {own.num_experts} experts, {self.width} x {own.moe_intermediate_size}"
        return f"{sizes}, with gradients, by {by}"


def expert_checks(device: Device, small: bool) -> Iterator[Check]:
    """Two checks of each layer, in the number type of training; on a CPU of tiny twins."""
    dtype = number_types(device)[0]
    for name in NAMES:
        settings = tiny_twin(SHAPES[name].settings) if small else SHAPES[name].settings
        assert settings.experts is not None
        layer = Layer(device, dtype, settings.hidden_size, settings.experts, FEW_TOKENS if small else TOKENS)
        for what, measure in (("grouped products", check_grouped), ("permutation", check_permutation)):
            run = partial(that_fits, measure, layer)
            yield Check(PART, f"experts of {name}, {what} {short_name(dtype)}", run, 1.0 if small else 10.0)


def that_fits(measure: Callable[[Layer], Outcome], layer: Layer) -> Outcome:
    """The outcome with all experts, or with the half, or quarter, that fits into the memory; its text says how many."""
    while True:
        try:
            return measure(layer)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or layer.settings.num_experts // 2 < layer.settings.top_k:
                raise
        gc.collect()
        layer.device.empty_cache()
        layer = layer.halved()


def check_grouped(layer: Layer) -> Outcome:
    """Both products of all experts, beside products of the same rows with one matrix."""
    experts, ends_G = layer.experts(), order_by_expert(layer.chosen(), layer.settings.num_experts).ends_G
    rows, grouped, dense, flops = layer.tokens * layer.settings.top_k, 0.0, 0.0, 0
    for weight_GOI in (experts.gate_up_proj, experts.down_proj):
        x_RI, grad_RO = layer.normal(rows, weight_GOI.shape[2]), layer.normal(rows, weight_GOI.shape[1]).detach()
        one_OI = weight_GOI.detach()[0].clone().requires_grad_()
        ways = (partial(grouped_product, x_RI, weight_GOI, ends_G), (x_RI, weight_GOI)), (partial(F.linear, x_RI, one_OI), (x_RI, one_OI))  # fmt: skip
        taken = [seconds_of(layer.device, partial(_both_ways, run, leaves, grad_RO)) for run, leaves in ways]
        grouped, dense, flops = grouped + taken[0], dense + taken[1], flops + 6 * rows * weight_GOI[0].numel()
        by = grouped_product.choose(x_RI, weight_GOI, ends_G).name
    share = dense / grouped
    text = f"{flops / grouped / 1e12:.3g} TFLOP/s, {share:.0%} of a dense product's; {layer.words(by)}"
    return _outcome(layer, text, f"at least {GROUPED_GOAL:.0%}", share >= GROUPED_GOAL, share, grouped)


def check_permutation(layer: Layer) -> Outcome:
    """Sorting, permuting and combining, beside all that the experts do."""
    experts, expert_TK, x_TE = layer.experts(), layer.chosen(), layer.normal(layer.tokens, layer.width)
    weights_TK = torch.rand(expert_TK.shape, device=expert_TK.device).requires_grad_()
    grad_TE = layer.normal(layer.tokens, layer.width).detach()
    order = order_by_expert(expert_TK, layer.settings.num_experts)

    def moved() -> Tensor:
        own = order_by_expert(expert_TK, layer.settings.num_experts)
        out_TE: Tensor = combine(permute(x_TE, own), own)
        return out_TE

    whole = partial(experts, x_TE, weights_TK, expert_TK)
    leaves = (x_TE, weights_TK, *experts.parameters())
    moves = seconds_of(layer.device, partial(_both_ways, moved, (x_TE,), grad_TE))
    seconds = seconds_of(layer.device, partial(_both_ways, whole, leaves, grad_TE))
    share = moves / seconds
    text = f"{share:.1%} of {seconds:.3g} s; {layer.words(permute.choose(x_TE, order).name)}"
    return _outcome(layer, text, f"at most {PERMUTATION_GOAL:.0%}", share <= PERMUTATION_GOAL, share, seconds)


def _both_ways(run: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor) -> None:
    torch.autograd.grad(run(), leaves, grad)


def _outcome(layer: Layer, text: str, goal: str, reached: bool, share: float, seconds: float) -> Outcome:
    """Short of its goal on an accelerator; on a CPU there is none."""
    figures = {"share": share, "goal": goal, "seconds": seconds, "experts": layer.settings.num_experts}
    if reached or layer.device.kind == "cpu":
        return Outcome("passed", text, figures)
    return Outcome("short", f"{text}; {goal} is expected", figures)
