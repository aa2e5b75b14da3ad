"""Config section of parallelism: the axes that a model and its items are split over."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from pydantic import Field, model_validator

from mmspeed.axes import DENSE, ITEMS, STAGES, AxisName, AxisSizes, mesh_table, together_along
from mmspeed.errors import UserError

from .inputs import Section


class BalanceConfig(Section):
    """Loads of experts, levelled over the devices of `ep`. No result changes, but for the order of some sums."""

    migrate_every: int = Field(
        0,
        ge=0,
        description="Steps after which experts may move to other devices, by their predicted loads and where that pays; with `ep_inner` each stays on its node. 0: experts stay.",
    )
    copies: int = Field(
        0,
        ge=0,
        description="Copies of experts, in a layer and step, that take a share of the rows of an overloaded device; at most one on a device. 0: none.",
    )
    gigabytes_per_second: float = Field(
        25.0,
        gt=0,
        description="Rate at which a device sends experts to another, by which moves and copies are weighed against the work that they spare.",
    )

    @property
    def on(self) -> bool:
        """True where loads are levelled."""
        return self.migrate_every + self.copies > 0


ScheduleName = Literal["1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v", "overlap"]
FOLDED = (
    "zbv",
    "dualpipe_v",
)  # stages go to the last device and come back, so that the first one also holds the last stage
_STAGES: dict[str, tuple[int, int | None]] = {  # of a device, at least and at most, by schedule
    "1f1b": (1, 1),
    "zb_h1": (1, 1),
    "zbv": (2, 2),
    "dualpipe_v": (2, 2),
    "interleaved": (2, None),
    "overlap": (2, None),
}


class ParallelConfig(Section):
    """Distribution of the model and its items over devices."""

    strategy: Literal["auto", "none", "ddp", "fsdp"] = Field(
        "auto",
        description="`ddp`: every device holds the model; `fsdp`: parameters are sharded; `auto`: `none` on one device, else `fsdp`.",
    )
    pp: int = Field(
        1,
        ge=1,
        description="Pipeline parallelism: devices over which a model's blocks are divided in stages; micro-batches pass through them.",
    )
    virtual: int = Field(
        1,
        ge=1,
        description="Stages of a device of `pp`, every `pp`-th of the model: the pipeline stands still for as many times less (interleaved 1F1B).",
    )
    schedule: Literal["auto", ScheduleName] = Field(
        "auto",
        description="Order in which the stages compute; `auto`: `interleaved` with `virtual` above 1, else `1f1b`. The others compute the gradients of weights later than those of inputs: `zb_h1` (one stage a device), `zbv` and `dualpipe_v` (two, the last one on the first device), and `overlap`, which hides exchanges within stages behind another micro-batch.",
    )
    stages: list[int] | None = Field(
        None,
        description="Blocks of each stage in the model's order, `pp` x `virtual` numbers such as [7, 8, 8, 5]; modules for further tokens come with the last block. null: divided by the work of blocks, embedding and head.",
    )
    extra_warmup: bool = Field(
        False,
        description="One more forward pass of each device of `pp` before its first backward pass, so that neighbouring passes never wait for each other's results; one more micro-batch is in flight.",
    )
    dp_replicate: int = Field(
        1,
        description="Replicas of the sharded model (with `fsdp`); -1: the devices that `dp_shard` leaves. `ddp` uses all devices.",
    )
    dp_shard: int = Field(
        -1,
        description="Devices that share one copy of the parameters (with `fsdp`), beside those of `dsp`, `ring` and `ulysses`; -1: the devices that the other axes leave.",
    )
    dsp: int = Field(
        1,
        ge=1,
        description="Sequence parallelism of a factorised model: parts of an item's tokens that are re-sharded between spatial and temporal blocks (DSP), so that attention needs no exchange. Any number; refused for a full model.",
    )
    ring: int = Field(
        1,
        ge=1,
        description="Sequence parallelism: parts of an item's tokens whose keys and values are passed around a ring (ring attention), in every block of a full model, or in the blocks of a factorised one that `shard` names. Any number; for slow links.",
    )
    ulysses: int = Field(
        1,
        ge=1,
        description="Sequence parallelism: parts of an item's tokens that are exchanged for heads around attention (Ulysses), in the same blocks as `ring`. At most the heads of a device; for fast links.",
    )
    tp: int = Field(
        1, ge=1, description="Tensor parallelism: devices that share each weight matrix; must divide the heads."
    )
    ep: int = Field(
        1,
        ge=1,
        description="Expert parallelism: devices, of those that share one copy of the parameters, over which whole experts are spread; must divide the experts. Takes no devices of its own.",
    )
    ep_inner: int | None = Field(
        None,
        ge=1,
        description="Devices of `ep` that share a node's fast links; must divide `ep`. A token then crosses to a node once for all of its experts there, and their sum comes back. null: each choice travels by itself.",
    )
    etp: int = Field(
        1,
        ge=1,
        description="Tensor parallelism within experts: devices that share the hidden units of each expert; must divide them. With `ep` x `etp` devices of those that share one copy of the parameters; for experts too wide for a device.",
    )
    balance: BalanceConfig = Field(default_factory=BalanceConfig, description="Levelled loads of experts.")
    shard: Literal["frames", "space"] = Field(
        "frames",
        description="The dim of a factorised model's tokens that `ring` x `ulysses` split: `frames`: the temporal blocks exchange; `space`: the spatial ones. Together with `dsp`, each part is split again.",
    )
    shard_text: int | None = Field(
        None,
        ge=1,
        description="Captions of at least this many tokens are also split over the devices of an item; null: every device holds whole captions.",
    )
    ring_window: int | None = Field(
        None,
        ge=2,
        description="Double ring: neighbours among `ring` that share a fast link; must divide `ring`. null: one ring.",
    )
    exchange: Literal["collective", "point_to_point"] = Field(
        "collective",
        description="Implementation of all-to-all and reduce-scatter: the collective, or point-to-point sends and receives (equal results).",
    )

    ep_backend: Literal["collective", "deepep"] = Field(
        "collective",
        description="What sends tokens to experts: collectives, or the kernels of DeepEP 2, where it is installed.",
    )

    @model_validator(mode="after")
    def _fits(self) -> ParallelConfig:
        if self.ring_window is not None and self.ring % self.ring_window:
            raise ValueError(f"ring_window {self.ring_window} must divide ring {self.ring}")
        if self.ep_inner is not None and self.ep % self.ep_inner:
            raise ValueError(f"ep_inner {self.ep_inner} must divide ep {self.ep}")
        if self.ep_backend == "deepep":
            others = {"etp": self.etp > 1, "ep_inner": self.ep_inner is not None, "balance": self.balance.on}
            if self.ep == 1 or any(others.values()):
                raise ValueError(f"ep_backend deepep goes with ep above 1, without {', '.join(others)}")
        if self.tp > 1 and self.strategy in ("ddp", "none"):
            raise ValueError(f"tp goes with strategy fsdp or auto, not with {self.strategy}")
        if self.pp == 1 and (self.virtual > 1 or self.extra_warmup or self.schedule != "auto"):
            keys = {f"virtual {self.virtual}": self.virtual > 1, "extra_warmup": self.extra_warmup}
            key = next((key for key, given in keys.items() if given), f"schedule {self.schedule}")
            raise ValueError(f"{key} is for the stages of pp devices: set pp, or leave it out")
        if not self._holds(*_STAGES.get(self.schedule, (1, None))):
            least, most = _STAGES[self.schedule]
            fitting = " or ".join(name for name, numbers in _STAGES.items() if self._holds(*numbers))
            raise ValueError(
                f"schedule {self.schedule} is for virtual {least}{'' if most else ' or more'}, not {self.virtual}: set virtual {least}, or "
                f"schedule {fitting}"
            )
        if self.extra_warmup and self.weights_wait:
            raise ValueError(
                f"extra_warmup is for the schedules 1f1b and interleaved, not for {self.schedule}: leave one of them out"
            )
        if self.weights_wait and self.balance.copies:
            raise ValueError(
                f"schedule {self.schedule} computes gradients of weights later than those of inputs, and balance.copies lends weights for "
                f"one pass: leave copies out, or set schedule {self.schedule_in_one}"
            )
        if self.stages is not None:
            count = self.pp * self.virtual
            if self.pp == 1 or len(self.stages) != count:
                raise ValueError(
                    f"stages {self.stages} are of {len(self.stages)}, and pp {self.pp} x virtual {self.virtual} makes {count}: "
                    + ("set pp, or leave stages out" if self.pp == 1 else f"write {count} numbers of blocks")
                )
            if min(self.stages) < 1:
                raise ValueError(
                    f"stages {self.stages}: each stage has at least one block; write {[max(1, n) for n in self.stages]} and the model's "
                    "number of blocks in all"
                )
        if self.pp > 1 and self.strategy in ("ddp", "none"):
            raise ValueError(f"pp goes with strategy fsdp or auto, not with {self.strategy}")
        if self.balance.on and self.ep == 1:
            raise ValueError("balance levels the loads of experts over ep devices: set ep, or leave balance out")
        if self.ep * self.etp > 1 and self.strategy in ("ddp", "none"):
            key = "ep" if self.ep > 1 else "etp"
            raise ValueError(
                f"{key} goes with strategy fsdp or auto, which shard the experts, not with {self.strategy}"
            )
        return self

    def _holds(self, least: int, most: int | None) -> bool:
        """True where `virtual` is within these numbers."""
        return least <= self.virtual <= (most or self.virtual)

    @property
    def sequence(self) -> int:
        """Devices that share the tokens of an item."""
        return self.together(split=True) // self.together(split=False)

    @property
    def group(self) -> int:
        """Devices that compute one item together."""
        return self.together(split=True)

    @property
    def exchanges(self) -> bool:
        """True where the devices of a stage exchange rows or tokens within its passes."""
        return max(self.group, self.expert_devices) > 1

    @property
    def expert_devices(self) -> int:
        """Devices that share the experts of one copy of the parameters."""
        return self.ep * self.etp

    @property
    def through(self) -> int:
        """Devices that an item passes through: those that compute it together, in each stage of a pipeline."""
        return self.pp * self.group

    @property
    def divides_models(self) -> bool:
        """True where devices hold other experts, or other blocks, of one model."""
        return self.expert_devices > 1 or self.pp > 1

    @property
    def least_devices(self) -> int:
        """The fewest devices of this layout: in each stage those that compute one item together, as often as experts need."""
        return self.pp * math.lcm(self.group, self.expert_devices)

    def dealt(self, world: int) -> int:
        """The devices of a run that hold one stage of a pipeline each, over which the items of a step are dealt."""
        return world // self.pp

    def groups(self, world: int) -> int:
        """The groups of devices of a run that compute different items."""
        return max(1, world // self.through)

    def together(self, split: bool) -> int:
        """Devices that compute one sample together: a sample whose tokens are split over the group, or, without `split`, one whose tokens are not."""
        sizes = self.sizes()
        return math.prod(sizes.get(axis, 1) for axis in together_along(split))

    @property
    def weights_wait(self) -> bool:
        """True where a pipeline computes the gradients of weights later than those of inputs."""
        return self.schedule not in ("auto", "1f1b", "interleaved")

    @property
    def schedule_in_one(self) -> ScheduleName:
        """The schedule of as many stages a device whose backward passes give the gradients of inputs and weights together."""
        return "1f1b" if self.virtual == 1 else "interleaved"

    @property
    def folded(self) -> bool:
        """True where a pipeline's stages go to the last device and come back (V), so that the first one also holds the last stage."""
        return self.schedule in FOLDED

    @property
    def replicas(self) -> int:
        """Replicas of the sharded model; 1 if the number of processes decides."""
        return max(1, self.dp_replicate)

    def sizes(self, sharded: bool = True) -> dict[str, int]:
        """The size of each axis, with the names of `mmspeed.axes.AxisSizes`; without `sharded`, all remaining devices are replicas."""
        axis_sizes = {axis: int(getattr(self, axis)) for axis in AXES}
        return axis_sizes if sharded else axis_sizes | {AxisName.DP_REPLICATE.value: -1, AxisName.DP_SHARD.value: 1}

    def with_experts(self, named: Collection[str]) -> ParallelConfig:
        """This section with the least `dp_shard` that, with the other axes, gives `ep` x `etp` its devices, unless `dp_shard` is named."""
        if AxisName.DP_SHARD in named:
            return self
        others = math.prod(size for axis, size in self.sizes().items() if axis not in (*ITEMS, *STAGES))
        wanted = self.ep * self.etp
        return self.model_copy(update={"dp_shard": wanted // math.gcd(wanted, others)})

    def axis_sizes(self, sharded: bool = True) -> AxisSizes:
        """The sizes that a mesh is made of; `sharded` as of `sizes`."""
        return AxisSizes(**self.sizes(sharded), ep=self.ep, ep_inner=self.ep_inner, etp=self.etp, folded=self.folded)

    def group_in_words(self) -> str:
        """The axes along which devices compute one sample together, such as "ring 2 x tp 2"."""
        return " x ".join(f"{axis} {n}" for axis, n in self.sizes().items() if axis in together_along() and n > 1)

    def together_in_words(self) -> str:
        """The axes along which devices compute one sample, together or as stages, such as "pp 2 x tp 2"."""
        return " x ".join([f"pp {self.pp}"] * (self.pp > 1) + [self.group_in_words()] * (self.group > 1))

    def check_world(self, world: int) -> None:
        """Raise UserError if the groups of devices, or those that share experts, do not divide the processes of a run."""
        if world % self.through:
            raise UserError(
                f"parallel: {self.together_in_words()} does not divide the {world} processes of this run; change one, or --nproc"
            )
        if self.ep * self.etp > 1:
            mesh_table(world, self.axis_sizes())


AXES = tuple(name for name in ParallelConfig.model_fields if name in DENSE)  # the axes that users set
UNSPLIT: dict[str, object] = {
    **dict.fromkeys((*AXES, "ep", "etp"), 1),
    "virtual": 1,
    "schedule": "auto",
    "stages": None,
    "extra_warmup": False,
    "ring_window": None,
    "ep_inner": None,
    "balance": {},
    "ep_backend": "collective",
}  # one device
