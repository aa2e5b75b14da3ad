"""Make the optimizer of a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer

from mmspeed.config.memory import MemoryConfig, parse_bytes
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.mesh import Mesh, by_mesh, layout_of
from mmspeed.parallel import is_half, take_float32_gradients, unwrap
from mmspeed.protocols import blocks_of
from mmspeed.torch_internals import AdamWOfParts

from .gradient_release import ReleasingOptimizer

AnyOptimizer = Optimizer | TieredOptimizer
Groups = list[dict[str, Any]]


def make_optimizer(
    model: nn.Module,
    cfg: TrainConfig,
    memory: MemoryConfig | None = None,
    device: Device | None = None,
    mesh: Mesh | None = None,
) -> AnyOptimizer:
    """The config's optimizer over the parameters that train; weight decay on matrices only.

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
    sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
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
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden: set[int] = set()
    if cfg.optimizer == "muon":
        hidden = {id(p) for _, block in blocks_of(unwrap(model)) for p in block.parameters() if p.ndim == 2}
    groups: Groups = []
    # separate groups: torch's foreach kernels take tensors of one mesh, buckets of masters those of one number type
    for members in (same for of_mesh in by_mesh(parameters) for same in _by_dtype(of_mesh)):
        groups += [
            {"params": [p for p in members if id(p) in hidden], "weight_decay": cfg.weight_decay, "use": "muon"},
            {"params": [p for p in members if p.ndim >= 2 and id(p) not in hidden], "weight_decay": cfg.weight_decay},
            {"params": [p for p in members if p.ndim < 2], "weight_decay": 0.0},
        ]
    return [group for group in groups if group["params"]]


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in lists of one number type each, in the order of their first."""
    lists: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.dtype, []).append(parameter)
    return list(lists.values())


def make_adamw(groups: Groups, cfg: TrainConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019)."""
    for group in groups:
        group["foreach"] = _by_lists(group["params"])
    return AdamWOfParts(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)


def _by_lists(parameters: list[nn.Parameter]) -> bool:
    """True where AdamW takes all tensors by one launch, which holds a temporary of each at once.

    On the CPU, where nothing is launched, it goes tensor by tensor, with the same numbers; those of half types would differ.
    """
    full = (torch.float32, torch.float64)
    return any(by_lists("adamw", p.device.type) or p.dtype not in full for p in parameters)


def by_lists(optimizer: str, device_kind: str) -> bool:
    """True where an optimizer of float32 weights takes all tensors by one launch on a kind of device."""
    return device_kind != "cpu" or optimizer == "adamw8bit"


def make_adamw8bit(groups: Groups, cfg: TrainConfig) -> Optimizer:
    """AdamW whose moments have 8 bits and a scale for each block of 256 (Dettmers et al., 2022). Small tensors stay float32."""
    from torchao.optim import AdamW8bit

    eight_bit = [{**group, "eight_bit": True} for group in groups]
    optimizer: Optimizer = AdamW8bit(eight_bit, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)
    return optimizer


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al., 2024) for groups with `use: muon`, AdamW for the others; in the state of one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate serves both.
    """

    def __init__(self, groups: Groups, cfg: TrainConfig) -> None:
        super().__init__(groups, {})
        self._parts: dict[str, Optimizer] = {}
        muons = [group for group in self.param_groups if group.get("use") == "muon"]
        others = [group for group in self.param_groups if group.get("use") != "muon"]
        if muons:  # each fills its defaults into the groups
            self._parts["muon"] = Muon(muons, lr=cfg.lr, adjust_lr_fn="match_rms_adamw")
        if others:
            self._parts["adamw"] = make_adamw(others, cfg)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by their present gradients."""
        for use, part in self._parts.items():
            part.param_groups = [g for g in self.param_groups if (g.get("use") == "muon") == (use == "muon")]
            part.state = self.state
            part.step()


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Names of the states that a group's optimizer has for each parameter."""
    return ("momentum_buffer",) if group.get("use") == "muon" else ("step", "exp_avg", "exp_avg_sq")


def _check_whole(groups: Groups) -> None:
    """Raises UserError where this process has a part of a matrix that Muon updates."""
    for parameter in (p for group in groups if group.get("use") == "muon" for p in group["params"]):
        if layout_of(parameter).parts:
            raise UserError(
                "train.optimizer: muon needs whole matrices, and here each device has a part: use parallel.strategy: ddp "
                "without ring, ulysses and tp, or train.optimizer: adamw"
            )


def _check_package() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise UserError("train.optimizer: adamw8bit needs the package torchao: pip install torchao")
