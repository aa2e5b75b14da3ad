"""Sequence parallelism for a model that was written without it: a plan says what is split, where, and who attends across.

Every rank of a ring x ulysses group gets the same inputs. At the modules that the plan names, a rank keeps its own part of a
sequence (`torch.tensor_split` order, lengths that differ by one at most, ring outermost); in between, all layers work on that
part; the attention modules that are named attend over the parts of all ranks (`mmspeed.parallel.sequence.hybrid_attention`); at the end the
parts are gathered. A sequence may be one of several: text and video tokens that attend jointly are split each by itself, and
since attention sees keys as a set, every rank's [text part, video part] is as good as any order.

Gradients: a gather's backward is a reduce-scatter sum, a split's backward a slice, nothing is scaled. Each rank's loss counts,
so parameter gradients summed over ranks are those of the sum of the ranks' losses; averaged (plain DDP, FSDP), of their mean.

Classes are changed by mixins, not wrapped and not patched: state-dict names stay and deep copies work.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmspeed.comm import Axis, ExchangeMethod, Ledger
from mmspeed.errors import UserError, nearest
from mmspeed.graphs import outside_graphs
from mmspeed.memory.recompute.block_checkpoint import replay_checkpoints
from mmspeed.mixin import mix_in
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.replay import record_or_replay, set_fact
from mmspeed.torch_internals import tree_map_only

from .attention_hook import HybridAttention
from .plan import Attends, Gather, Leading, SequencePlan, Split, plan_of
from .split_group import ForwardRecord, SplitGroup

__all__ = ["Attends", "Gather", "Leading", "SequencePlan", "Split", "sequence_axes", "sequence_parallel"]


@dataclass
class _ModuleRole:
    """What the plan says of one module."""

    group: SplitGroup
    where: str
    names: tuple[str, ...]  # of the positional arguments of its forward
    root: bool = False
    inputs: dict[str, Split | Leading] = field(default_factory=dict)
    outputs: dict[int | str, Split | Gather] = field(default_factory=dict)
    attends: Attends | None = None
    marks: bool = False  # the model gathers nothing: its own output begins the backward


class _Declared(nn.Module):
    """Mixed in before a module's own class: its forward splits, attends and gathers as its role says."""

    _sequence_role: _ModuleRole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        role, group, run = self._sequence_role, self._sequence_role.group, super().forward
        if role.root:
            _begin(group, role.names, args, kwargs)
        # graphs are made for an image or a video, and read the record of the forward that is being computed
        record = group.record if torch.compiler.is_compiling() else group.now()
        if record is None:
            raise UserError(f"{role.where} was called outside of the forward of the model that the plan was applied to")
        if record.whole:
            return run(*args, **kwargs)
        if role.inputs:
            args, kwargs = _split_inputs(role, args, kwargs)
        out = run(*args, **kwargs) if role.attends is None else _attend(role, role.attends, run, args, kwargs)
        if role.outputs:
            out = _change_outputs(role, out)
        return tree_map_only(torch.Tensor, group.mark, out) if role.marks else out


def argument_names(own: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional arguments of the first forward under the mixins that has names."""
    for base in own.__mro__:
        if "forward" in vars(base):
            kinds = list(inspect.signature(vars(base)["forward"]).parameters.values())[1:]
            names = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            if names or not kinds:
                return tuple(names)
    return ()


def _named(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


@outside_graphs
def _begin(group: SplitGroup, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Open the record of a new forward, or of the one that is computed again."""
    group.record, _ = record_or_replay(lambda: _new_record(group, _named(names, args, kwargs)))
    set_fact(group, group.record)


def _new_record(group: SplitGroup, arguments: dict[str, Any]) -> ForwardRecord:
    whole = False
    if group.frames is not None and (value := arguments.get(group.frames[0])) is not None:
        whole = (value if group.frames[1] is None else value.shape[group.frames[1]]) == 1
    if not whole and not group.checked:
        group.check_same(arguments)
        group.checked = True
    return ForwardRecord(whole=bool(whole))


@outside_graphs
def _split_inputs(
    role: _ModuleRole, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    listed, kwargs, names = list(args), dict(kwargs), role.names
    for name, split in role.inputs.items():
        where = f"{role.where}, argument {name!r}"
        if name in kwargs:
            kwargs[name] = _part(role.group, kwargs[name], split, where)
        elif name in names and names.index(name) < len(listed):
            place = names.index(name)
            listed[place] = _part(role.group, listed[place], split, where)
    return tuple(listed), kwargs


def _part(group: SplitGroup, value: Any, split: Split | Leading, where: str) -> Any:
    if value is None:
        return None
    if isinstance(split, Leading):
        return group.leading(int(value), split.sequence, where)
    if isinstance(value, list | tuple):
        return type(value)([_part(group, item, split, where) for item in value])
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{where} is a {type(value).__name__}; the plan can split tensors and lists of them")
    return group.cut(value, split, where)


@outside_graphs
def _change_outputs(role: _ModuleRole, out: Any) -> Any:
    single = isinstance(out, torch.Tensor)
    items: Any = [out] if single else (dict(out) if isinstance(out, Mapping) else list(out))
    for place, what in role.outputs.items():
        where = f"{role.where}, output {place!r}"
        if isinstance(what, Gather):
            items[place] = role.group.gather(items[place], what, where)
        else:
            items[place] = _part(role.group, items[place], what, where)
    return items[0] if single else type(out)(items)


@outside_graphs  # of a compiled block, all but the attention is compiled
def _attend(role: _ModuleRole, attends: Attends, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward, with its attention over all ranks."""
    group, keys = role.group, attends.keys or attends.queries
    q_sizes, k_sizes = group.added(attends.queries, role.where), group.added(keys, role.where)
    ordered = attends.queries == keys and len(keys) == 1 and (group.zigzag or group.axes.ring.size == 1)
    with HybridAttention(group.axes, group.place, q_sizes, k_sizes, ordered, role.where) as mode:
        out = run(*args, **kwargs)
    if mode.calls != 1:
        raise UserError(
            f"{role.where}: its forward called F.scaled_dot_product_attention {mode.calls} times, not once. The plan's modules "
            "must attend by it: with diffusers, model.set_attention_backend('native'); a module of several attentions, or a "
            "torch.nn.MultiheadAttention, must be taken apart"
        )
    return out


def named_like(name: str, pattern: str) -> bool:
    """Whether a module's name is as a plan's pattern: `*` stands for one whole or partial name between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))


def _matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    found = False
    for name, module in model.named_modules():
        if named_like(name, pattern):
            found = True
            yield name, module
    if not found:
        hint = nearest(pattern, [name for name, _ in model.named_modules()])
        raise UserError(f"sequence plan: {type(model).__name__} has no module {pattern!r}{hint}")


def _check_argument(role: _ModuleRole, own: type[nn.Module], argument: str) -> None:
    """Raises UserError for an argument that no call of the module can have."""
    kinds = inspect.signature(own.forward).parameters.values()
    names = [p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if argument not in (*role.names, *names) and not any(p.kind is p.VAR_KEYWORD for p in kinds):
        raise UserError(f"sequence plan: {role.where} has no argument {argument}{nearest(argument, role.names)}")


def _roles(model: nn.Module, plan: SequencePlan, group: SplitGroup) -> dict[nn.Module, _ModuleRole]:
    roles: dict[nn.Module, _ModuleRole] = {}

    def of(name: str, module: nn.Module) -> _ModuleRole:
        where = f"{name} ({type(module).__name__})" if name else type(model).__name__
        return roles.setdefault(module, _ModuleRole(group, where, argument_names(type(module))))

    of("", model).root = True
    for pattern, inputs in plan.inputs.items():
        for name, module in _matching(model, pattern):
            role = of(name, module)
            for argument in inputs:
                _check_argument(role, type(module), argument)
            role.inputs.update(inputs)
    if plan.frames is not None:
        _check_argument(roles[model], type(model), plan.frames[0])
    for pattern, outputs in plan.outputs.items():
        for name, module in _matching(model, pattern):
            of(name, module).outputs.update(outputs)
    for pattern, attends in plan.attention.items():
        for name, module in _matching(model, pattern):
            of(name, module).attends = attends if isinstance(attends, Attends) else Attends(attends)
    gathers = any(isinstance(what, Gather) for role in roles.values() for what in role.outputs.values())
    roles[model].marks = not gathers
    return roles


def sequence_axes(
    mesh: DeviceMesh,
    *,
    window: int | None = None,
    exchange: ExchangeMethod = "collective",
    ledger: Ledger | None = None,
    nodes: Sequence[int] | None = None,
) -> SequenceAxes:
    """The axes `ring` and `ulysses` of a mesh; one that the mesh lacks has one rank. `nodes`: as in `Axis.of`.

    With `window`, a mesh of all processes: hops between windows get a process group of their own.
    """
    ledger = ledger if ledger is not None else Ledger()
    present = mesh.mesh_dim_names or ()
    if not {"ring", "ulysses"} & set(present):
        raise UserError(f"sequence_parallel: the mesh has the axes {list(present)}; one must be named ring or ulysses")
    ring, ulysses = (
        Axis.of(mesh, name, ledger, exchange, nodes) if name in present else Axis.alone(name)
        for name in ("ring", "ulysses")
    )
    outer = None
    if window is not None and window < ring.size:
        ranks = mesh.mesh.movedim(present.index("ring"), -1).reshape(-1, ring.size)
        outer = replace(ring, group=dist.new_subgroups_by_enumeration(ranks.tolist())[0])
    return SequenceAxes(ring, ulysses, window, outer)


def sequence_parallel(
    model: nn.Module,
    mesh: DeviceMesh | SequenceAxes,
    plan: SequencePlan | None = None,
    *,
    window: int | None = None,
    exchange: ExchangeMethod = "collective",
    ledger: Ledger | None = None,
) -> nn.Module:
    """Make `model`, in place, compute one sample on all ranks of `mesh`'s axes `ring` and `ulysses` together.

    plan: what to split; None takes the model's own attribute `sequence_plan`. window: inner ring of a double ring.
    Every rank of a group must hand in the same inputs (checked at the first forward) and gets the whole output. Apply it
    before recomputation, torch.compile, FSDP or DDP, and average gradients over all ranks, those of a group included.

    Raises UserError for a plan that does not fit the model.
    """
    plan = plan if plan is not None else plan_of(model)
    if plan is None:
        raise UserError(
            f"sequence_parallel: no plan for {type(model).__name__}; give `plan=SequencePlan(...)`, or call "
            "mmspeed.accelerate_model, which knows plans of diffusers' models"
        )
    if not isinstance(plan, SequencePlan):
        raise UserError(f"sequence_parallel: the plan is a {type(plan).__name__}, not a SequencePlan")
    if not isinstance(mesh, SequenceAxes):
        mesh = sequence_axes(mesh, window=window, exchange=exchange, ledger=ledger)
    if is_sequence_parallel(model):
        raise UserError(f"sequence_parallel: {type(model).__name__} is sequence-parallel already")
    group = SplitGroup(mesh, plan)
    roles = _roles(model, plan, group)
    for role_module, role in roles.items():
        if "forward" in vars(role_module):
            raise UserError(
                f"sequence_parallel: the forward of {role.where} has been replaced (hooks of diffusers or accelerate do); "
                "apply sequence parallelism first"
            )
    if group.degree > 1:
        replay_checkpoints(model)
        for role_module, role in roles.items():
            # diffusers writes the name into a checkpoint's config
            mix_in(role_module, _Declared, rename=False)._sequence_role = role
    return model


def is_sequence_parallel(model: nn.Module) -> bool:
    """Whether `sequence_parallel` was applied to a model, or to a part of it."""
    return any(isinstance(module, _Declared) for module in model.modules())
