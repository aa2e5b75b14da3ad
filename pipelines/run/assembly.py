"""Assembly of a run: models, optimizers and averages on their devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import comm
from mmspeed.axes import Reader
from mmspeed.config import RunConfig
from mmspeed.config.memory import parse_bytes
from mmspeed.device import Device, parse_dtype
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights, materialize, own_part, read_weights, set_part, stand_in_weights
from mmspeed.log import get_logger
from mmspeed.loop.averages import EMA
from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer, make_optimizer
from mmspeed.loop.resting import Rests
from mmspeed.loop.step import Learner
from mmspeed.memory import ActivationPolicies
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.memory.recompute.policy import make_keeping
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.models.adapters import adapter_values
from mmspeed.moe.deepep import check_backend
from mmspeed.parallel import (
    Strategy,
    TokenLayout,
    is_half,
    make_half,
    make_layout,
    parallelize,
    resolve_strategy,
    unwrap,
)
from mmspeed.parallel.stage_weights import check_waiting
from mmspeed.pipelines.run.compiling import EAGER, Compiling, compiling
from mmspeed.pipelines.run.updates import learning_roles, own_train
from mmspeed.pipelines.tasks import Task
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import InitializesWeights, RunPlace, blocks_of, source_of, trainable

if TYPE_CHECKING:
    from mmspeed.loop.checkpoint.manager import TrainingState

log = get_logger("train")


@dataclass(frozen=True)
class Assembly:
    """The models, learners and averages of a run.

    `models` by role, as `parallelize` made them; a learner for each update of a step; averages of the roles that learn, where the run
    has averages. `rests`: the callback that rests roles between their updates; None where none rests, or the device is the host.
    `compiling`: whether the blocks of those that learn are compiled: of all of them, or of none.
    """

    models: Mapping[str, nn.Module]
    learners: Sequence[Learner]
    averages: Mapping[str, EMA]
    rests: Rests | None = None
    compiling: Compiling = EAGER

    def wake(self) -> None:
        """Bring every role that rests in the host's memory back to the device: it is about to be read."""
        if self.rests is not None:
            self.rests.wake()

    @property
    def roles(self) -> list[str]:
        """The roles that learn, in the order of their updates."""
        return list(self.optimizers)

    @property
    def model(self) -> nn.Module:
        """The first model that learns."""
        return self.models[self.roles[0]]

    @property
    def optimizers(self) -> dict[str, AnyOptimizer]:
        """The optimizer of each role that learns, in the order of their updates."""
        return {learner.update.role: learner.optimizer for learner in self.learners}

    @property
    def rate_factors(self) -> list[tuple[AnyOptimizer, float]]:
        """Each optimizer, with the factor of its learning rate."""
        settings = {learner.update.role: learner.update.optimizer for learner in self.learners}
        rates = {role: 1.0 if setting is None else setting.lr_factor for role, setting in settings.items()}
        return [(optimizer, rates[role]) for role, optimizer in self.optimizers.items()]

    @property
    def optimizer(self) -> AnyOptimizer:
        """The optimizer of the first role that learns."""
        return self.optimizers[self.roles[0]]

    @property
    def ema(self) -> EMA | None:
        """The average of the first model that learns."""
        return self.averages.get(self.roles[0])

    def state(self, meta: dict[str, Any] | None = None) -> TrainingState:
        """The state for checkpoints: that of the first role, those of the others that learn, and the models that do not."""
        from mmspeed.loop.checkpoint.manager import TrainingState

        first, *others = (
            TrainingState(self.models[role], optimizer, self.averages.get(role))
            for role, optimizer in self.optimizers.items()
        )
        frozen = {role: model for role, model in self.models.items() if role not in self.roles}
        return replace(first, meta=meta or {}, others=dict(zip(self.roles[1:], others, strict=True)), frozen=frozen)


@dataclass(frozen=True)
class Placement:
    """The devices of a run, and the place of this process among them."""

    strategy: Strategy
    mesh: Mesh
    layout: TokenLayout
    reader: Reader  # the items that this process reads: its group of those that compute an item together
    first: bool  # True for the process that reports for its group

    def at(self, device: Device, folder: Path) -> RunPlace:
        """The place of this process, for a task."""
        stage = self.mesh.in_stage
        return RunPlace(
            device,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            strategy=self.strategy,
            groups=self.reader.count,
            group=self.reader.index,
            leads=self.first,
            dealt=stage.count,
            number=stage.index,
            folder=folder,
        )


def is_cast(config: RunConfig) -> bool:
    """True where weights have another number type than passes."""
    return config.device.dtype != "float32" and config.memory.master == "parameters"


def gathers_again(config: RunConfig) -> bool:
    """True where each pass of a pipeline gathers weights block by block: less memory is asked for than a stage's weights take."""
    return config.host_base or config.memory.chooses


def place(config: RunConfig, device: Device) -> Placement:
    """The config's layout over the processes of this run; a collective call. Raises UserError where it does not fit them."""
    parallel, world = config.parallel, dist.get_world_size()
    # a stage of one device needs no engine, which would only copy its weights, unless they are cast once for all passes
    strategy = resolve_strategy(
        parallel.strategy, world if is_cast(config) else -(-world // Pipeline.of(parallel).ranks)
    )
    parallel.check_world(world)
    if parallel.ep_backend == "deepep":
        check_backend(device.kind)
    if config.host_base and strategy == "none":
        strategy = "fsdp"  # whose groups are brought to the device block by block
    mesh = make_mesh(device, parallel.axis_sizes(sharded=strategy == "fsdp"))
    return Placement(strategy, mesh, make_layout(mesh, parallel), mesh.reader(), mesh.first_of_group)


def assemble(
    config: RunConfig,
    task: Task,
    bare: Mapping[str, nn.Module],
    placement: Placement,
    device: Device,
    choice: Sequence[ActivationPolicies] | None = None,
    drawn: Callable[[str, Tensor], None] | None = None,
    *,
    stand_ins: bool = False,
    resumed: bool = False,
) -> Assembly:
    """Put models on their devices, changed in place, and build the optimizers, averages and learners of all updates.

    A model on the meta device gets the weights of its files, of which each process reads its own parts, or those of the config's seed;
    another keeps its weights. `drawn("role.name", value)` is called with each value that is drawn, whole. `stand_ins`: files are not read,
    and small arbitrary numbers take the place of their weights. `resumed`: a checkpoint will fill the weights that train; in models that
    learn, files are read for the others alone.
    Models that no update trains are frozen. `choice`: the activation policies of each block under a memory budget. Raises UserError for
    a model that lacks part of `TrainableModel`, as `learning_roles`, and for a budget with several roles that learn.
    """
    updates = task.updates()
    settings = learning_roles(task.name, updates, bare)
    learning = list(settings)
    if choice is not None and len(learning) > 1:
        raise UserError(
            f"memory.budget chooses for one model, and the task {task.name} trains {', '.join(learning)}: "
            "set memory.activation_policy instead"
        )
    empty = {role for role, model in bare.items() if any(parameter.is_meta for parameter in model.parameters())}
    choices = [compiling(config, device, bare[role]) for role in learning]
    graphs = next((chosen for chosen in choices if not chosen.on), choices[0])
    models = {
        role: _placed(config, task, model, placement, device, role in learning, choice, graphs.on)
        for role, model in bare.items()
    }
    optimizers = {
        role: make_optimizer(
            models[role], own_train(config.train, settings[role]), config.memory, device, placement.mesh
        )
        for role in learning
    }
    for role in sorted(empty):
        put = part_setter(models[role], optimizers[role]) if role in optimizers else set_part
        model, source = bare[role], source_of(bare[role])
        if source is not None:
            kept = resumed and role in optimizers
            stand_in_weights(model, put) if stand_ins else read_weights(model, source, put, frozen_alone=kept)
            for parameter, value in () if stand_ins or kept else adapter_values(model, config.seed):
                _put_whole(put, parameter, value)
            continue
        assert isinstance(model, InitializesWeights)  # `_placed` has seen to it
        whole = partial(_put_whole, put)
        init_weights(model, config.seed, whole if drawn is None else _with_notice(role, model, whole, drawn))
    averages = {}
    if config.train.ema_decay is not None:
        averages = {role: make_ema(models[role], optimizers[role], config, device) for role in learning}
    learners = task.learners(
        updates, models, placement.strategy, optimizers, device.torch_device, placement.mesh.staged
    )
    rests = None
    if device.kind != "cpu" and any(update.rests for update in updates):
        rests = Rests(learners, models, averages, device.torch_device)
    return Assembly(models, learners, averages, rests, graphs)


def _put_whole(put: Callable[[nn.Parameter, Tensor], None], parameter: nn.Parameter, value: Tensor) -> None:
    """Call `put` with this process's part of a whole value."""
    put(parameter, own_part(parameter, value))


def _with_notice(
    role: str, model: nn.Module, put: Callable[[nn.Parameter, Tensor], None], drawn: Callable[[str, Tensor], None]
) -> Callable[[nn.Parameter, Tensor], None]:
    """`put` that first hands each value to `drawn`, under its parameter's name."""
    names = {parameter: name for name, parameter in model.named_parameters()}

    def put_and_tell(parameter: nn.Parameter, value: Tensor) -> None:
        drawn(f"{role}.{names[parameter]}", value)
        put(parameter, value)

    return put_and_tell


def base_files(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """The fingerprint of the files that the weights of models come from, by role; of models without such files none."""
    sources = {role: source_of(unwrap(model)) for role, model in models.items()}
    return {role: source.fingerprint for role, source in sources.items() if source is not None}


def _placed(
    config: RunConfig,
    task: Task,
    bare: nn.Module,
    placement: Placement,
    device: Device,
    learns: bool,
    choice: Sequence[ActivationPolicies] | None,
    compiled: bool,
) -> nn.Module:
    """A model on its devices, in the config's layout and number types; without weights if it came on the meta device."""
    trainable(bare, task.name)
    empty = any(parameter.is_meta for parameter in bare.parameters())
    if empty and source_of(bare) is None and not isinstance(bare, InitializesWeights):
        raise UserError(
            f"{type(bare).__name__} came without weights, and has neither files of them nor initial_weights to make them"
        )
    if placement.mesh.staged:
        if not learns:
            raise UserError("parallel.pp: a model that does not train is not divided into stages: leave pp at 1")
        if (few := check_waiting(bare, config.parallel)) is not None:
            log.warning(few)
        (group,) = placement.mesh.across_stages()
        stages = task.cut(bare, config.parallel, group)
        stages.gathers_again = gathers_again(config)
        trains = comm.all_gather_objects(any(parameter.requires_grad for parameter in bare.parameters()))
        if not all(trains):
            raise UserError(
                f"parallel.pp: nothing trains in the blocks of process {trains.index(False)}: let some of each stage (model.adapter.targets), "
                "or leave pp at 1"
            )
    keeping, host = None, learns and config.host_base
    if learns:
        keeping = make_keeping(config.memory, len(blocks_of(bare)), device, choice)
    else:
        bare.requires_grad_(False).eval()
    if learns and config.memory.master != "parameters":  # the optimizer holds the float32 weights
        make_half(bare)
    if not empty:
        bare.to(device.torch_device)
    elif placement.strategy != "fsdp":
        materialize(bare, device.torch_device)
    # a model that does not train has no gradients to sum, so replicas need no engine between them
    strategy = "none" if placement.strategy == "ddp" and not learns else placement.strategy
    model = parallelize(
        bare,
        placement.mesh,
        strategy,
        layout=placement.layout,
        compute_dtype=parse_dtype(config.device.dtype),
        keeping=keeping,
        compile=compiled and learns,
        host=host,
    )
    if empty and placement.strategy == "fsdp":  # memory only for this rank's shards
        blocks = [block for _, block in blocks_of(bare)] if host else []
        frozen = [weight for block in blocks for weight in block.parameters() if not weight.requires_grad]
        materialize(bare, device.torch_device, frozen)
    return model


def part_setter(model: nn.Module, optimizer: AnyOptimizer) -> Callable[[nn.Parameter, Tensor], None]:
    """A function that sets this process's part of a parameter's float32 value: in the parameter, or in the optimizer."""
    if not isinstance(optimizer, TieredOptimizer) or not is_half(model):
        return set_part

    def put(parameter: nn.Parameter, part: Tensor) -> None:
        if optimizer.has(parameter):
            optimizer.set_master(parameter, part)
        else:  # it does not train
            set_part(parameter, part)

    return put


def make_ema(model: nn.Module, optimizer: AnyOptimizer, config: RunConfig, device: Device) -> EMA:
    """The moving average of a model's float32 weights, which the optimizer holds where the parameters are bfloat16."""
    memory = config.memory
    assert config.train.ema_decay is not None
    host = device if memory.ema == "host" else None
    return EMA(model, config.train.ema_decay, optimizer, host, parse_bytes(memory.bucket))
