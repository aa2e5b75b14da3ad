"""The opening of a run: what it does, and the lines that it says of itself, before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn

from mmspeed import comm
from mmspeed.config import Config, RunConfig
from mmspeed.config.leaves import flat
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.log import Working, get_logger
from mmspeed.loop.expert_balance import ExpertBalance, Prices
from mmspeed.loop.optimizers.learning_rate import learning_rate
from mmspeed.loop.optimizers.make_optimizer import muon_share
from mmspeed.loop.watch.run_watch import RunWatch
from mmspeed.loop.watch.watchdog import longest_wait
from mmspeed.mesh import process_group
from mmspeed.models.sections import size_of
from mmspeed.moe.balance import in_rows
from mmspeed.parallel import unwrap
from mmspeed.parallel.experts import spread_modules
from mmspeed.pipelines.run.agreement import WeightsAgreement, require_agreement, run_facts
from mmspeed.pipelines.run.assembly import Assembly, Placement, assemble, base_files, place
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.training.run_state import Run
from mmspeed.pipelines.tuning.memory_search import policies_under_budget
from mmspeed.protocols import Data, RunPlace
from mmspeed.rendezvous import restarts

log = get_logger("train")

# seconds that a restarted run waits for the folder, which a rank of the last attempt may still hold
LOCK_PATIENCE = 60.0
EXPERTS_UTILISATION = 0.4  # of a device's peak, in products of experts


@contextmanager
def started(config: RunConfig, folder: RunFolder, online: bool) -> Iterator[tuple[Device, RunWatch]]:
    """Start the device, the process group and the watch over the run, and lock its folder, inside."""
    device = pick(config.device.kind)
    device.activate()
    patience = LOCK_PATIENCE if restarts() else 0.0
    with ExitStack() as stack:
        stack.enter_context(process_group(device, longest_wait(config.train.watchdog)))
        rank, world = dist.get_rank(), dist.get_world_size()
        watch = RunWatch(config.train.watchdog, folder.root, rank, world, online)
        stack.enter_context(watch)
        if rank == 0:
            stack.enter_context(folder.locked(patience))
        yield device, watch


def agree_on_place(config: RunConfig, folder: RunFolder, device: Device) -> Placement:
    """The layout over the processes of a run, which agree on its facts. A collective call."""
    require_agreement(run_facts(config, device), "start all of them with the same config and the same software")
    placement = place(config, device)
    # rank 0 looks: another node's view of the folder may be older
    comm.first_does(folder.check_generator, dist.get_rank())
    return placement


def open_data(config: RunConfig, task: Task, where: RunPlace) -> Data:
    """The task's data, the same on all ranks. A collective call."""
    with Working("opening the data", tell=False):
        task.domain.open(where)
        lines, warnings = task.domain.notes() if where.rank == 0 else ([], [])
        for line in lines:
            log.info(line)
        for warning in warnings:
            log.warning(warning)
        data = task.data(where)
    require_agreement(flat({"data": data.fingerprint, **task.domain.info()}), "give all of them the same data")
    tell(where, data_line(data, config.train.steps))
    return data


def build_models(config: RunConfig, task: Task, placement: Placement, where: RunPlace) -> Assembly:
    """The task's models on their devices, with what trains them, the same on all ranks. A collective call."""
    choice = policies_under_budget(config, task, where)
    with Working("building the model", tell=False):
        weights, bare = WeightsAgreement(placement.mesh.staged), task.build()
        weights.require_same_built(bare)
        require_agreement(flat({"base": base_files(bare)}), "give all of them the same files of weights")
        parts = assemble(config, task, bare, placement, where.device, choice, weights.add_drawn, resumed=where.resumed)
        weights.require_same_drawn(parts.models)
        tell(where, model_line(config, parts.models))
        tell(where, parts.compiling.line)
        tell(where, optimizer_line(config, {role: parts.models[role] for role in parts.roles}))
    return parts


def peak_of(config: RunConfig, device: Device) -> tuple[float, str]:
    """(peak FLOP/s of one device, where the figure is from), the same on all ranks."""
    with Working("measuring the device's peak", tell=False):
        if config.device.peak_tflops is not None:
            return config.device.peak_tflops * 1e12, "device.peak_tflops in the config"
        dtype = parse_dtype(config.device.dtype)
        flops, source = comm.broadcast_object(list(device.peak_flops(dtype)) if dist.get_rank() == 0 else None)
        return flops, source


def balances_of(config: RunConfig, run: Run, peak: float) -> list[ExpertBalance]:
    """What levels the loads of experts of each role that has them over devices, as `parallel.balance` says. peak: FLOP/s of a device."""
    settings, mesh, layout = config.parallel.balance, run.placement.mesh, run.placement.layout
    balances = []
    for role, optimizer in run.parts.optimizers.items() if settings.on else ():
        model, ema = run.parts.models[role], run.parts.averages.get(role)
        spread = spread_modules(unwrap(model))
        if not spread:
            continue
        numbers = max(sum(p[0].numel() for p in module.parameters(recurse=False)) for module in spread)  # of an expert
        row_seconds = 3 * 2 * numbers / (EXPERTS_UTILISATION * peak)
        moved = 4 * numbers * (3 if ema is None else 4)  # weights, two moments, the average
        lent = 2 * parse_dtype(config.device.dtype).itemsize * numbers  # weights there, gradients back
        rate = settings.gigabytes_per_second * 1e9
        prices = Prices(in_rows(moved // mesh.expert_parts, rate, row_seconds), in_rows(lent, rate, row_seconds))
        balances.append(
            ExpertBalance(
                model,
                role,
                optimizer,
                ema,
                layout.experts,
                every=settings.migrate_every,
                copies=settings.copies,
                nodes=1 if layout.nodes is None else layout.nodes[0].size,
                prices=prices,
            )
        )
    return balances


def tell(where: RunPlace, line: str | None) -> None:
    """Say a line on rank 0."""
    if where.rank == 0 and line is not None:
        log.info(line)


def device_line(config: RunConfig, where: RunPlace) -> str:
    """The devices, the number type of forward and backward, and the layout: `device: cpu (AMD EPYC), float32, one process`."""
    device, world, strategy = where.device, where.world, where.strategy
    parts = [f"{device.kind} ({device.name})", config.device.dtype]
    if (flash := device.flash()) is not None and flash.state != "absent":
        parts.append(flash.words)
    if world == 1:
        parts.append("one process")
    else:
        parts.append(f"{world} processes")
        parts.append({"ddp": "a replica each (ddp)", "fsdp": "sharded (fsdp)", "none": "a stage each"}[strategy])
        if config.parallel.group > 1:
            parts.append(f"samples split over {config.parallel.group_in_words()}")
    return f"device: {', '.join(parts)}"


def model_line(config: RunConfig, models: Mapping[str, nn.Module]) -> str:
    """The models by role, with their parameters: `model: SoraDiT tiny, 3.2 M parameters`."""
    size = f" {size_of(config.model)}" if isinstance(config, Config) and len(models) == 1 else ""
    words = []
    for role, model in models.items():
        total = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        part = "" if trained == total else f", {in_short(trained)} of them trained"
        words.append(
            f"{'' if role == 'model' else role + ' '}{type(unwrap(model)).__name__}{size}, {in_short(total)} parameters{part}"
        )
    return f"model: {'; '.join(words)}"


def optimizer_line(config: RunConfig, models: Mapping[str, nn.Module]) -> str | None:
    """The share of the parameters that Muon updates, in each role that learns; None for another optimizer."""
    if config.train.optimizer != "muon":
        return None
    shares = [
        f"{muon_share(model):.1%} of the parameters{f' of {role}' * (len(models) > 1)}"
        for role, model in models.items()
    ]
    return (
        f"optimizer: muon for {' and '.join(shares)}, the matrices of blocks and of their experts; adamw for the rest"
    )


def rate_line(before: TrainConfig, now: TrainConfig, step: int) -> str | None:
    """A warning where the learning rate rises again at step number `step` (from 0) because `train.steps` has been raised; else None."""
    planned = learning_rate(step, now.model_copy(update={"steps": before.steps}))
    last, rate = learning_rate(step - 1, before), learning_rate(step, now)
    if not step or rate <= 1.01 * planned:
        return None
    return (
        f"step {step}: the learning rate rises from {last:.3g} to {rate:.3g}, since the {now.schedule} course was of {before.steps:,} steps "
        f"and is of {now.steps:,} now: to train on at a low rate set train.schedule: constant and train.lr; for a whole course from these "
        "weights begin a new run with train.start_from"
    )


def data_line(data: Data, steps: int) -> str:
    """The samples, the steps of an epoch, and the epochs of `steps`."""
    size = data.size
    left_out = f"; {size.left_out:,} more without a token to predict are left out" if size.left_out else ""
    return (
        f"data: {size.samples:,} samples, {size.steps_per_epoch:,} steps an epoch; "
        f"{steps:,} steps are {steps / size.steps_per_epoch:.3g} epochs{left_out}"
    )


def in_short(count: float) -> str:
    """A count in three digits: `812`, `3.21 M`, `14.2 B`."""
    for unit in ("", " k", " M", " B", " T"):
        if count < 999.5 or unit == " T":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError("unreachable")
