"""Make the optimizer of a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Muon, Optimizer

from mmspeed.config.memory import MemoryConfig, parse_bytes
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device, fuses_updates
from mmspeed.errors import UserError
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.mesh import Mesh, by_mesh, layout_of
from mmspeed.parallel import is_half, take_float32_gradients, unwrap
from mmspeed.protocols import blocks_of
from mmspeed.torch_internals import AdamWOfParts, is_sharded

from .gradient_release import ReleasingOptimizer
from .kinds import decays, kinds_of
from .stacks import MuonOfStacks

FULL = (torch.float32, torch.float64)
AnyOptimizer = Optimizer | TieredOptimizer
Groups = list[dict[str, Any]]


def make_optimizer(
    model: nn.Module,
    cfg: TrainConfig,
    memory: MemoryConfig | None = None,
    device: Device | None = None,
    mesh: Mesh | None = None,
) -> AnyOptimizer:
    """The config's optimizer over the parameters that train; weight decay by what they are (`kinds.decays`).

    Make it after `parallelize`: sharding replaces the parameters. `memory` places its weights and states on `device` or in the
    host's memory; `mesh` is the one that the model was parallelized over, None without.
    Raises UserError for muon over parts of matrices, and where a package is missing.
    """
    memory, device = memory or MemoryConfig(), device or Device("cpu", 0)
    groups = make_groups(model, cfg)
    make = {"adamw": make_adamw, "adamw8bit": make_adamw8bit, "muon": MuonWithAdamW}[cfg.optimizer]
    if cfg.optimizer == "muon":
        _check_whole(groups)
    if cfg.optimizer == "adamw8bit":
        _check_package()
    if is_half(model):
        take_float32_gradients(model)
    # 8-bit states, and Muon's matrix products, need plain tensors: the tiered optimizer passes this process's parts
    sharded = any(is_sharded(p) for group in groups for p in group["params"])
    if not memory.tiered and cfg.optimizer != "adamw8bit" and not (cfg.optimizer == "muon" and sharded):
        return make(groups, cfg)
    kind = partial(ReleasingOptimizer, mesh=mesh) if memory.release_gradients else TieredOptimizer
    return kind(
        groups,
        lambda inner: make(inner, cfg),
        master=memory.master,
        states=memory.states,
        bucket_bytes=parse_bytes(memory.bucket),
        device=device,
    )


def make_groups(model: nn.Module, cfg: TrainConfig) -> Groups:
    """Groups of parameters with the same update; `use` names the optimizer of a group where there are several."""
    bare = unwrap(model)
    kinds, parameters = kinds_of(bare), [p for p in model.parameters() if p.requires_grad]
    muon: dict[str, set[nn.Parameter]] = {"matrix": set(), "stack": set()}
    if cfg.optimizer == "muon":
        for parameter in (p for _, block in blocks_of(bare) for p in block.parameters()):
            muon.get(kinds[parameter], set()).add(parameter)
    hidden = muon["matrix"] | muon["stack"]
    groups: Groups = []
    # separate groups: torch's foreach kernels take tensors of one mesh, buckets of masters those of one number type
    for members in (same for of_mesh in by_mesh(parameters) for same in _by_dtype(of_mesh)):
        groups += [
            {"params": [p for p in members if p in muon["matrix"]], "weight_decay": cfg.weight_decay, "use": "muon"},
            {"params": [p for p in members if p in muon["stack"]], "weight_decay": cfg.weight_decay, "use": "stacks"},
            {
                "params": [p for p in members if decays(kinds[p]) and p not in hidden],
                "weight_decay": cfg.weight_decay,
            },
            {"params": [p for p in members if not decays(kinds[p])], "weight_decay": 0.0},
        ]
    return [group for group in groups if group["params"]]


def muon_share(model: nn.Module) -> float:
    """The share of the parameters that train which Muon would update."""
    groups = make_groups(model, TrainConfig(optimizer="muon"))
    sizes: list[tuple[int, bool]] = [(sum(p.numel() for p in group["params"]), "use" in group) for group in groups]
    return sum(size for size, muon in sizes if muon) / sum(size for size, _ in sizes)


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in lists of one number type each, in the order of their first."""
    lists: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.dtype, []).append(parameter)
    return list(lists.values())


def make_adamw(groups: Groups, cfg: TrainConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019)."""
    for group in groups:
        group["fused"] = all(fuses_updates(p.device.type) and p.dtype in FULL for p in group["params"])
        group["foreach"] = not group["fused"] and _by_lists(group["params"])
    return AdamWOfParts(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)


def _by_lists(parameters: list[nn.Parameter]) -> bool:
    """True where AdamW takes all tensors by one launch, which holds a temporary of each at once.

    On the CPU, where nothing is launched, it goes tensor by tensor, with the same numbers; those of half types would differ.
    """
    return any(by_lists("adamw", p.device.type) or p.dtype not in FULL for p in parameters)


def by_lists(optimizer: str, device_kind: str) -> bool:
    """True where an optimizer of float32 weights takes all tensors by a launch for each operation on a kind of device."""
    return optimizer == "adamw8bit" or (
        device_kind != "cpu" and not (optimizer == "adamw" and fuses_updates(device_kind))
    )


def make_adamw8bit(groups: Groups, cfg: TrainConfig) -> Optimizer:
    """AdamW whose moments have 8 bits and a scale for each block of 256 (Dettmers et al., 2022). Small tensors stay float32."""
    from torchao.optim import AdamW8bit

    eight_bit = [{**group, "eight_bit": True} for group in groups]
    optimizer: Optimizer = AdamW8bit(eight_bit, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)
    return optimizer


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al., 2024) for groups with `use: muon` or `stacks`, AdamW for the others; in the state of one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate serves both.
    """

    def __init__(self, groups: Groups, cfg: TrainConfig) -> None:
        super().__init__(groups, {})
        self._parts: dict[str | None, Optimizer] = {}
        make: dict[str | None, Callable[[Groups], Optimizer]] = {
            "muon": lambda groups: Muon(groups, lr=cfg.lr, adjust_lr_fn="match_rms_adamw"),
            "stacks": lambda groups: MuonOfStacks(groups, cfg.lr),
            None: lambda groups: make_adamw(groups, cfg),
        }
        for use, part in make.items():  # each fills its defaults into the groups
            if mine := self._groups_of(use):
                self._parts[use] = part(mine)

    def _groups_of(self, use: str | None) -> Groups:
        return [group for group in self.param_groups if group.get("use") == use]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by their present gradients."""
        for use, part in self._parts.items():
            part.param_groups = self._groups_of(use)
            part.state = self.state
            part.step()


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Names of the states that a group's optimizer has for each parameter."""
    return ("momentum_buffer",) if "use" in group else ("step", "exp_avg", "exp_avg_sq")


def _check_whole(groups: Groups) -> None:
    """Raises UserError where this process has a part of a matrix that Muon updates."""
    for parameter in (p for group in groups if "use" in group for p in group["params"]):
        if layout_of(parameter).parts:
            raise UserError(
                "train.optimizer: muon needs whole matrices, and here each device has a part: use parallel.strategy: ddp "
                "without ring, ulysses and tp, or train.optimizer: adamw"
            )


def _check_package() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise UserError("train.optimizer: adamw8bit needs the package torchao: pip install torchao")
