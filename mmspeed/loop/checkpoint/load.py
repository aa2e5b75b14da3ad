"""Finding and reading checkpoints, into any model, on any number of ranks; also the starting weights of a new run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from mmspeed.comm import all_gather_objects, all_reduce_max
from mmspeed.errors import UserError
from mmspeed.initialize import own_span, set_part
from mmspeed.log import get_logger
from mmspeed.loop.averages import EMA
from mmspeed.loop.frozen import fingerprint, frozen_names, some_hold
from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer
from mmspeed.parallel import unwrap
from mmspeed.protocols import BeginsAtZero

from .local import first_lacking
from .seals import digest
from .state import StatesRoom, declared_state, room_for_weights, take_weights
from .storage import (
    EMA_UPDATES,
    FORMAT,
    FROZEN,
    INDEX,
    META,
    ROLES,
    STATE,
    DamagedCheckpointError,
    DamageError,
    SafetensorsReader,
    causes_of,
    check_seal,
    read_index,
    read_meta,
    read_record,
    step_name,
    step_of,
    steps_in,
)

Which = Literal["ema", "model"]
ADAPTER = ".lora_"  # in the names of adapters

# ---- finding ----


def recorded(folder: Path) -> list[dict[str, Any]]:
    """`{"step", "loss"}` of each checkpoint in `folder`, in the order they were written; `loss` may be None.

    Complete checkpoints that were not recorded because of a kill come last, by step; with a damaged record so do all,
    with a warning.
    """
    entries: list[dict[str, Any]] = []
    try:
        entries = read_record(folder)
    except DamageError as error:
        get_logger(__name__).warning(
            f"{folder} {error}; going by the names of the folders there, the recorded validation losses are lost"
        )
    known = {entry["step"] for entry in entries}
    complete = steps_in(folder)
    entries += [{"step": step, "loss": None} for step in complete if step not in known]
    return [entry for entry in entries if entry["step"] in complete]


def latest(folder: Path) -> Path | None:
    """The checkpoint written last, or None. Warns of folders that are left out because they are incomplete."""
    for path in sorted(folder.glob("step-*")):
        if path.is_dir() and step_of(path) is not None and not (path / META).is_file():
            get_logger(__name__).warning(f"checkpoint {path} is left out: it is incomplete, it has no {META}")
    entries = recorded(folder)
    return folder / step_name(entries[-1]["step"]) if entries else None


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, or None when none has one."""
    scored = [entry for entry in recorded(folder) if entry["loss"] is not None]
    return folder / step_name(min(scored, key=lambda entry: entry["loss"])["step"]) if scored else None


# ---- reading ----


def of_role(part: str, role: str | None) -> str:
    """The prefix of a part of a role's state (`model`, `ema`, `optimizer`) in a checkpoint; the first role's is bare."""
    return part if role is None else f"{role}:{part}"


def prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a dict, by names that begin with `prefix`."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _check(
    folder: Path,
    meta: dict[str, Any],
    index: dict[str, Any],
    wanted: dict[str, Tensor],
    alone: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise UserError at the first tensor that the checkpoint and `wanted` do not share in name and shape; state may be in one alone.

    Unless `alone`, all ranks call it and raise the same: what one pipeline stage lacks another may have.
    """
    problem, extra = _problem(folder, meta, index, wanted), _extra(meta, index, wanted)
    if not alone and all_reduce_max([float(problem is not None or bool(extra))], group)[0]:
        problems = all_gather_objects([problem, extra], group)
        problem = next((one for one, _ in problems if one is not None), None)
        extra = [name for name in extra if all(name in others for _, others in problems)]
    if problem is not None:
        raise UserError(problem)
    if extra:
        owner = "optimizer" if extra[0].rpartition(":")[2].startswith("optimizer.") else "model"
        raise UserError(
            f"checkpoint {folder} holds `{extra[0]}`, which the {owner} here does not have: {_advice(extra[0])}"
        )


def _problem(folder: Path, meta: dict[str, Any], index: dict[str, Any], wanted: dict[str, Tensor]) -> str | None:
    """A message about the first wanted tensor that the checkpoint lacks or holds in another shape; None where there is none."""
    stored = index["tensors"]
    for name, tensor in wanted.items():
        if name not in stored:
            return f"checkpoint {folder} has no tensor `{name}`: {_advice(name, FROZEN in meta)}"
        if stored[name]["shape"] != list(tensor.shape):
            shapes = f"{tuple(stored[name]['shape'])} in the checkpoint, {tuple(tensor.shape)} here"
            return f"checkpoint {folder}: `{name}` is {shapes}: {_advice(name)}"
    return None


def _extra(meta: dict[str, Any], index: dict[str, Any], wanted: dict[str, Tensor]) -> list[str]:
    """Names of the checkpoint's tensors that belong to the wanted parts and are not wanted."""
    parts = {name.split(".", 1)[0] for name in wanted}
    # an average stands for its parameter when weights alone are loaded
    stems = {name.split(".", 1)[1] for name in wanted} | meta.get(STATE, {}).keys()
    return [name for name in index["tensors"] if name.split(".", 1)[0] in parts and name.split(".", 1)[1] not in stems]


def _check_adapters(folder: Path, index: dict[str, Any], model: nn.Module, role: str | None) -> None:
    """Raise UserError where a checkpoint alone has adapters, or the model alone."""
    prefix = f"{of_role('model', role)}."
    stored = {name.removeprefix(prefix) for name in index["tensors"] if name.startswith(prefix) and ADAPTER in name}
    own = {name for name, _ in unwrap(model).named_parameters() if ADAPTER in name}
    if stored and not own:
        raise UserError(
            f"checkpoint {folder} holds adapters alone, and this run trains without: merge them by `mmspeed export RUN -o FOLDER --format "
            "merged` and set model.pretrained: FOLDER, or set model.adapter as there"
        )
    if own and not stored:
        raise UserError(
            f"checkpoint {folder} holds no adapters, but whole weights, and the frozen base of this run is read from model.pretrained: "
            "write them by `mmspeed export RUN -o FOLDER` and set model.pretrained: FOLDER"
        )


def _check_base(
    folder: Path,
    meta: dict[str, Any],
    model: nn.Module,
    names: list[str],
    alone: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise UserError where the parameters that a checkpoint does not hold are not those that were frozen when it was written."""
    if fingerprint(model, names, alone, group) != meta[FROZEN]:
        raise UserError(
            f"checkpoint {folder} was trained on another base: the {len(names)} tensors here that it does not hold, such as "
            f"`{next(iter(names), 'those of other stages')}`, are not the weights that were frozen then. Begin from the same base, in the same number type (model.base.dtype), "
            f"or begin a new run with train.start_from: {folder}"
        )


def check_frozen_roles(folder: Path, fingerprints: Mapping[str, str]) -> None:
    """Compare the fingerprints of models that do not learn, by role, with those that a checkpoint was trained beside.

    Raises UserError for a role that it was trained without, for one whose weights have changed since, and for one that learned then.
    """
    roles = open_checkpoint(folder)[0].get(ROLES, {})
    for role in sorted(fingerprints):
        if role not in roles:
            raise UserError(f"checkpoint {folder} was trained without the role {role}: begin a new run")
        if EMA_UPDATES in roles[role]:
            raise UserError(
                f"checkpoint {folder} holds learned weights of the role {role}, which does not learn here: begin a new run"
            )
        if roles[role][FROZEN] != fingerprints[role]:
            raise UserError(
                f"checkpoint {folder} was trained beside another {role}: that role's weights, which do not learn, differ from those "
                "at that time. Begin from the same ones, in the same number type, or begin a new run"
            )


def _advice(name: str, has_base: bool = False) -> str:
    if name.rpartition(":")[2].startswith("optimizer."):
        return (
            "the checkpoint is of another train.optimizer, or of an mmspeed whose muon left experts to adamw: restore it, or begin a new "
            "run with train.start_from"
        )
    if ADAPTER in name:
        return "compare model.adapter.rank and targets, and the model, with those of its run's config"
    if has_base:
        return "it did not train when the checkpoint was written; let the same parameters train, or begin a new run"
    return "the checkpoint is of another model; compare the `model` section of its run's config"


def open_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(meta, index) of a checkpoint, compared with its seal.

    Raises DamagedCheckpointError when it is incomplete or damaged, UserError when it is missing, or of a newer or an earlier mmspeed.
    """
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint {folder}")
    try:
        meta = read_meta(folder)
        newer = meta["format"] > FORMAT
        index = {} if newer else read_index(folder)
        sealed = check_seal(folder, index)
    except DamageError as error:
        raise _damaged(folder, error) from None
    if newer:
        raise UserError(
            f"checkpoint {folder} has format {meta['format']}; this mmspeed reads up to {FORMAT}: update mmspeed"
        )
    if not sealed:
        raise UserError(f"checkpoint {folder} is of an earlier mmspeed, which wrote no hashes: begin a new run")
    return meta, index


def _damaged(folder: Path, error: DamageError) -> DamagedCheckpointError:
    others = [entry["step"] for entry in recorded(folder.parent) if step_name(entry["step"]) != folder.name]
    onward = f"go on from step {others[-1]}" if others else "start again"
    return DamagedCheckpointError(f"checkpoint {folder} {error}; copy it again, or delete that folder to {onward}")


def _read(
    folder: Path, index: dict[str, Any], wanted: dict[str, Tensor], group: dist.ProcessGroup | None, alone: bool
) -> None:
    """Fill `wanted`. Raises DamagedCheckpointError on all ranks where one of them reads a chunk that is not what was written."""
    try:
        with warnings.catch_warnings():  # torch warns that one process loads; here that is intended
            warnings.simplefilter("ignore")
            dcp.load(
                cast(dict[str, Any], wanted),
                storage_reader=SafetensorsReader(folder, index),
                process_group=group,
                no_dist=alone,
            )
    except CheckpointException as error:
        damage = next((cause for cause in causes_of(error) if isinstance(cause, DamageError)), None)
        if damage is None:
            raise
        raise _damaged(folder, damage) from None


def _all_hold(folder: Path, index: dict[str, Any], wanted: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise DamagedCheckpointError on all ranks where the folder of one rank's host lacks a part that it needs."""
    lacking = first_lacking(folder, index, wanted)
    for name in all_gather_objects(lacking, group):
        if name is not None:
            raise DamagedCheckpointError(
                f"the copies of {folder.name} on the local disks are of another layout: one lacks a part of `{name}`"
            )


def _read_of_hosts(
    folder: Path,
    index: dict[str, Any],
    wanted: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    host: dist.ProcessGroup | None,
) -> None:
    """Call `_read` on each host. Raises DamagedCheckpointError on all ranks of `group` where one host's folder is damaged."""
    problem = None
    try:
        _read(folder, index, wanted, host, not dist.is_initialized())
    except DamagedCheckpointError as error:
        problem = str(error)
    for message in all_gather_objects(problem, group):
        if message is not None:
            raise DamagedCheckpointError(message)


def _opened(folder: Path, role: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(meta, index) of a checkpoint, the former with the facts of a role; None: the first. Raises UserError where it holds none of it."""
    meta, index = open_checkpoint(folder)
    if role is None:
        return meta, index
    if not _learned(meta, role):
        raise UserError(f"checkpoint {folder} holds no state of the role {role}: begin a new run")
    return {key: value for key, value in meta.items() if key not in (FROZEN, STATE)} | meta[ROLES][role], index


def learned(folder: Path, role: str) -> bool:
    """True where a checkpoint holds the state of a further role that learned."""
    return _learned(open_checkpoint(folder)[0], role)


def _learned(meta: dict[str, Any], role: str) -> bool:
    return EMA_UPDATES in meta.get(ROLES, {}).get(role, {})


def load(
    folder: Path,
    model: nn.Module,
    optimizer: AnyOptimizer | None = None,
    ema: EMA | None = None,
    group: dist.ProcessGroup | None = None,
    role: str | None = None,
    host: dist.ProcessGroup | None = None,
    of_host: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint into the given objects, in place, whatever the ranks, strategy and tiers of memory that wrote it.

    `role`: that of a further model that learned; None: the first. `of_host`: each host has a folder of its own (local.py), which its
    ranks, the group `host`, read; what they need and the folder lacks counts as damage.

    Parameters that do not train and are not in the checkpoint stay as they are, and must be those that it was trained on.

    All ranks call it. Returns the saved `meta` with `step`. Raises DamagedCheckpointError when the checkpoint is incomplete or damaged
    (the objects may then hold a part of it), UserError when it is missing, of another model or optimizer, or of another base.
    """
    meta, index = _opened(folder, role)
    _check_adapters(folder, index, model, role)
    of_model, of_ema, of_optimizer = (of_role(part, role) for part in ("model", "ema", "optimizer"))
    weights = room_for_weights(model, optimizer)
    base = []
    if FROZEN in meta:
        base = [name for name in frozen_names(model) if f"{of_model}.{name}" not in index["tensors"]]
    wanted = prefixed(of_model, {name: tensor for name, tensor in weights.items() if name not in base})
    if ema is not None:
        if meta[EMA_UPDATES] is None:
            raise UserError(f"checkpoint {folder} has no EMA weights: set train.ema_decay to null, or begin a new run")
        wanted |= prefixed(of_ema, ema.state_dict())
    states: StatesRoom | None = None
    if optimizer is not None and any(name.startswith(f"{of_optimizer}.") for name in index["tensors"]):
        states = StatesRoom(model, optimizer)
        wanted |= prefixed(of_optimizer, states.tensors)
    state = declared_state(model)
    lacking = {name for name in wanted if name.split(".", 1)[1] in state and name not in index["tensors"]}
    wanted = {name: tensor for name, tensor in wanted.items() if name not in lacking}
    if of_host:
        _all_hold(folder, index, wanted, group)
    _check(folder, meta, index, wanted, group=group)
    if FROZEN in meta and some_hold(model, base, group):
        _check_base(folder, meta, model, base, group=group)
    if of_host:
        _read_of_hosts(folder, index, wanted, group, host)
    else:
        _read(folder, index, wanted, group, not dist.is_initialized())
    del wanted  # so that each tensor is freed once it is copied
    take_weights(model, optimizer, weights)
    if states is not None:
        states.take()
    if ema is not None:
        ema.updates = meta[EMA_UPDATES]
        ema.begin_state(model, [name.removeprefix(f"{of_ema}.") for name in lacking if name.startswith(f"{of_ema}.")])
    return {**meta["meta"], "step": meta["step"]}


def load_weights(
    folder: Path,
    model: nn.Module,
    which: Which = "ema",
    alone: bool = True,
    optimizer: AnyOptimizer | None = None,
    role: str | None = None,
    spared: Collection[str] = (),
) -> dict[str, Any]:
    """Load weights alone, in the number type that `model` has, by one process `alone` or by all. Returns and raises as `load`.

    `optimizer` is that of a model in training: where it holds the float32 weights, they are loaded there. Parameters that did not
    train, and so are not in the checkpoint, stay as they are and must be those that it was trained on. `role`: as for `load`.
    `spared`: parameters that stay as they are where the checkpoint lacks them.
    """
    meta, index = _opened(folder, role)
    _check_adapters(folder, index, model, role)
    if which == "ema" and meta[EMA_UPDATES] is None:
        raise UserError(f"checkpoint {folder} has no EMA weights: load the model's own")
    stored, state = index["tensors"], declared_state(model)
    averaged = {name for name, _ in unwrap(model).named_parameters()}
    parameters = {name for name, _ in unwrap(model).named_parameters(remove_duplicate=False)}
    weights = room_for_weights(model, optimizer)
    for name in spared:
        if not {f"{of_role(part, role)}.{name}" for part in ("ema", "model")} & stored.keys():
            del weights[name]
    wanted = {}
    base = []  # of which the checkpoint has a fingerprint alone
    for name, tensor in weights.items():
        average = f"{of_role('ema', role)}.{name}"
        key = (
            average
            if which == "ema" and (name in averaged or average in stored)
            else f"{of_role('model', role)}.{name}"
        )
        if key not in stored and name in parameters and FROZEN in meta and ADAPTER not in name:
            base.append(name)
        elif key in stored or name not in state:
            wanted[key] = tensor
    _check(folder, meta, index, wanted, alone)
    if FROZEN in meta and some_hold(model, base):
        _check_base(folder, meta, model, base, alone)
    _read(folder, index, wanted, None, alone)
    take_weights(model, optimizer, weights)
    return {**meta["meta"], "step": meta["step"]}


# ---- starting weights of a new run ----


def starting_checkpoint(place: str | Path) -> Path:
    """The checkpoint at `place`: that of its folder, or a run's latest. Raises UserError when there is none."""
    folder = Path(place)
    if (folder / META).is_file():
        return folder
    checkpoint = latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    if checkpoint is None:
        raise UserError(f"train.start_from: {place} is neither a run with a checkpoint nor a checkpoint")
    return checkpoint


def identity(folder: Path) -> str:
    """A checkpoint's name and the start of the hash of its index, as JSON: the index has the hashes of all tensors.

    `missing` where it cannot be read.
    """
    try:
        return json.dumps(f"{folder.name} ({digest((folder / INDEX).read_bytes())[:16]})")
    except OSError:
        return json.dumps("missing")


def identity_of_start(place: str | Path) -> str:
    """The `identity` of the checkpoint that `load_start` reads at `place`."""
    try:
        return identity(starting_checkpoint(place))
    except UserError:
        return json.dumps("missing")


def load_start(
    place: str | Path, model: nn.Module, optimizer: AnyOptimizer | None = None, role: str | None = None
) -> None:
    """Fill a model's parameters from a checkpoint, whatever its layout: with its moving average where it has one.

    `optimizer` takes them where it holds the float32 weights. `role`: that of a further model that learned; None: the first.

    All ranks call it. Thresholds of sparse attention are loaded too where both models have them. Raises UserError when
    there is no checkpoint, or a parameter is missing, left over or of another shape; one that `begins_at_zero` may be missing.
    """
    folder, bare = starting_checkpoint(place), unwrap(model)
    spared = bare.begins_at_zero if isinstance(bare, BeginsAtZero) else ()
    if any(ADAPTER in name for name, _ in bare.named_parameters()):
        spared = tuple(frozen_names(bare))  # the base, whose files the caller compares: its number type may be another
    try:
        averaged = _opened(folder, role)[0][EMA_UPDATES] is not None
        which, alone = "ema" if averaged else "model", not dist.is_initialized()
        load_weights(folder, bare, which, alone, optimizer, role, spared)  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"train.start_from: {error}") from None


def fill_parameters(model: nn.Module, optimizer: AnyOptimizer | None, values: Mapping[str, Tensor]) -> None:
    """Write whole values on the CPU to some of a model's parameters, by name; `optimizer` takes them where it holds the float32 weights."""
    bare = unwrap(model)
    room = {name: tensor for name, tensor in room_for_weights(bare, optimizer).items() if name in values}
    for name, tensor in room.items():
        set_part(tensor, values[name][own_span(tensor)])
    take_weights(bare, optimizer, room)
