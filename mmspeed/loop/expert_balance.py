"""Level the loads of experts over processes while a model trains: move experts between steps, and lend copies for each step.

What is decided is in `mmspeed.moe.balance`; it follows from counts that all processes know. Only places of experts change, and who computes
which rows: no loss does, but for the order of some sums. Files know experts by their numbers alone: for a checkpoint all go home.

Legend: L layers, G experts, P processes of `ep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmspeed.comm import Axis, RowCounts, swap_rows
from mmspeed.errors import UserError
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.moe.balance import (
    LoadForecast,
    Share,
    Whole,
    first_places,
    plan_shares,
    rearrange,
    shared_loads,
    slots,
    worth_moving,
)
from mmspeed.moe.copies import Lending
from mmspeed.parallel import unwrap
from mmspeed.parallel.experts import spread_modules
from mmspeed.parallel.tensor import local

from .averages import EMA
from .callbacks import BaseCallback, StepOutcome
from .checkpoint.state import packed, unpacked
from .counts import counting_modules, over_modules
from .optimizers.make_optimizer import AnyOptimizer

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Prices:
    """What balance costs, in rows that a process computes meanwhile: an expert that moves with its state, and a copy that is lent."""

    moved: int = 0
    lent: int = 0


class ExpertBalance(BaseCallback):
    """Levels the loads of one model's experts. `every`: steps after which experts may move, 0: never; `copies`: at most, in a layer.

    nodes: experts and copies stay on theirs.
    Raises UserError for a model whose loads nothing counts.
    """

    def __init__(
        self,
        model: nn.Module,
        role: str,
        optimizer: AnyOptimizer,
        ema: EMA | None,
        axis: Axis,
        *,
        every: int,
        copies: int,
        nodes: int = 1,
        prices: Prices | None = None,
    ) -> None:
        self.model, self.optimizer, self.ema, self.axis = model, optimizer, ema, axis
        self.every, self.copies, self.nodes, self.prices = every, copies, nodes, prices or Prices()
        self.modules = spread_modules(unwrap(model))
        self.counters = list(counting_modules({role: model}))
        if len(self.counters) != len(self.modules):
            raise UserError(
                f"parallel.balance: {type(unwrap(model)).__name__} has {len(self.modules)} layers of experts over devices and "
                f"{len(self.counters)} that count loads; each needs a router that does (docs/extending.md)"
            )
        self.experts = self.modules[0]._dispatcher.experts
        self.home = self.places = first_places(len(self.modules), self.experts)
        self.plans: list[list[Share]] = [[] for _ in self.modules]
        self.forecast = LoadForecast(len(self.modules), self.experts)
        self._begin_row()

    def _begin_row(self) -> None:
        self.steps = self.moved = self.lent = 0
        self.error, self.load_LP = 0.0, np.zeros((len(self.modules), self.axis.size))

    @torch.no_grad()
    def after_step(self, outcome: StepOutcome) -> None:
        """Learn the step's loads, move experts where it is their turn and pays, and choose the copies of the next step."""
        counts = {} if outcome.result is None else outcome.result.counts
        if self.counters[0] not in counts:
            return
        load_LG = torch.stack([counts[name] for name in self.counters]).cpu().numpy()
        self.steps, self.lent = self.steps + 1, self.lent + sum(map(len, self.plans))
        self.error += self.forecast.observe(load_LG)
        self.load_LP += shared_loads(load_LG, self.places, self.plans, self.axis.size)
        ranks, load_LG = self.axis.size, self.forecast.predict()
        if self.every and outcome.step % self.every == 0:
            new_LG = rearrange(load_LG, self.places, ranks, self.nodes)
            pays_L = worth_moving(load_LG, self.places, new_LG, ranks, self.every, self.prices.moved)
            new_LG = np.where(pays_L[:, None], new_LG, self.places)
            self.moved += int((new_LG != self.places).sum())
            self._move(new_LG)
        if self.copies:
            lent = self.prices.lent * len(outcome.data.batches)  # weights travel in each micro-batch
            self.plans = plan_shares(load_LG, self.places, ranks, self.copies, self.nodes, price=lent)
            self._tell()

    def row(self) -> dict[str, Any]:
        """The mean error of forecasts, experts that moved, copies a layer and step; and the loads over processes as they were levelled."""
        if not self.steps:
            return {}
        layers = self.steps * len(self.modules)
        fields = {"error": self.error / self.steps, "moved": self.moved, "copies": self.lent / layers}
        most_L = torch.from_numpy(self.load_LP.max(1) / np.maximum(self.load_LP.mean(1), 1e-9))
        self._begin_row()
        return {"balance": fields, "rank_load": over_modules(most_L, self.counters)}

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Have all experts in their order inside, as files know them."""
        places = self.places
        self._move(self.home)
        try:
            yield
        finally:
            self._move(places)

    def go_home(self) -> None:
        """Bring all experts back to their order, without copies."""
        self._move(self.home)
        self.plans = [[] for _ in self.modules]
        self._tell()

    def _tell(self) -> None:
        """Tell each layer where its experts are, and what it lends."""
        device = local(next(self.modules[0].parameters())).device
        every = slots(self.places, self.plans, self.axis.size)
        for module, place_G, plan, each in zip(self.modules, self.places, self.plans, every, strict=True):
            module._dispatcher.slots = each.to(device)
            module._lending = Lending.of(plan, place_G, self.axis)

    def _move(self, new_LG: Whole) -> None:
        """Let experts change places, with their weights, the optimizer's states and the averages."""
        moves: dict[nn.Parameter, Move] = {}
        for module, old_G, new_G in zip(self.modules, self.places, new_LG, strict=True):
            if (old_G != new_G).any():
                move = mover(old_G, new_G, self.axis)
                moves.update(dict.fromkeys(module.parameters(recurse=False), move))
        self.places = new_LG
        if moves:
            apply_moves(self.model, self.optimizer, self.ema, moves)
            self._tell()


def mover(old_G: Whole, new_G: Whole, axis: Axis) -> Move:
    """A function that sends this process's part of a tensor, stacked by expert, from old to new places. Collective calls."""
    each = len(old_G) // axis.size
    at_old_G, at_new_G = old_G.argsort(), new_G.argsort()  # the expert at each place
    mine = slice(axis.rank * each, (axis.rank + 1) * each)
    goes, comes = new_G[at_old_G[mine]], old_G[at_new_G[mine]] // each
    counts = RowCounts(*(tuple(np.bincount(ranks, minlength=axis.size).tolist()) for ranks in (goes // each, comes)))
    leaves, arrives = (torch.from_numpy(order.copy()) for order in (goes.argsort(), comes.argsort(kind="stable")))

    def move(part: Tensor) -> Tensor:
        received = swap_rows(part.index_select(0, leaves.to(part.device)), axis, counts, "moved experts")
        return torch.empty_like(received).index_copy_(0, arrives.to(part.device), received)

    return move


@torch.no_grad()
def apply_moves(model: nn.Module, optimizer: AnyOptimizer, ema: EMA | None, moves: Mapping[nn.Parameter, Move]) -> None:
    """Change this process's parts of parameters, of the optimizer's weights and states for them, and of their averages, in place."""
    if isinstance(optimizer, TieredOptimizer):
        _move_tiers(optimizer, moves)
    names = {parameter: name for name, parameter in unwrap(model).named_parameters()}
    averages = {} if ema is None else ema.state_dict()
    for parameter, move in moves.items():
        parts = [averages[name] for name in [names[parameter]] if name in averages]
        if not isinstance(optimizer, TieredOptimizer):
            states = optimizer.state.get(parameter, {}).values()
            parts += [each for each in states if isinstance(each, Tensor) and each.shape == parameter.shape]
        if not (isinstance(optimizer, TieredOptimizer) and optimizer.has(parameter)):
            parts.append(parameter.detach())
        for part in map(local, parts):
            part.copy_(move(unpacked(part).to(local(parameter).device)))


def _move_tiers(optimizer: TieredOptimizer, moves: Mapping[nn.Parameter, Move]) -> None:
    for parameter, values in optimizer.masters():
        if parameter in moves:
            optimizer.set_master(parameter, moves[parameter](values))
    eight_bit = {p for group in optimizer.param_groups if group.get("eight_bit") for p in group["params"]}
    for parameter in (p for bucket in optimizer.buckets for p in bucket if p in moves):
        part, packs, new = local(parameter), optimizer.master_of(parameter) in eight_bit, dict[str, Tensor]()
        for key, state in optimizer.state_of(parameter).items():
            if isinstance(state, Tensor) and state.shape == part.shape:
                values = moves[parameter](unpacked(state).to(part.device))
                new[key] = packed(key, values) if packs else values
        optimizer.load_state_of(parameter, new)
    optimizer.finish()
