"""Cut or re-shard a module's arguments at its boundary, and cut, gather or sum its outputs.

Boundaries are mixins that change a module's class, without wrappers or patches: state-dict names stay, and deep copies work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.errors import UserError, nearest
from mmspeed.graphs import outside_graphs
from mmspeed.protocols.plan import Attended, Gather, Leading, Output, Seen, Split, Summed, Tokens, Total
from mmspeed.replay import record_or_replay, set_fact

from .names import arguments
from .record import ForwardRecord, Sequences, begin_forward, end_forward

Arguments = Mapping[str, Any]  # the passed arguments of a model's forward, by name
Grid = Callable[[Arguments], tuple[int, int, int]]  # tokens of the video along time, height and width


@dataclass
class Boundary:
    """A module's boundary. `where` names the module in messages; `attends` is the dim along which the block that holds it attends.

    Copies of a model share it: process groups cannot be copied, and nothing in it belongs to one copy.
    """

    sequences: Sequences
    where: str
    attends: Attended

    def __deepcopy__(self, memo: Any) -> Boundary:
        return self


@dataclass
class ModuleBoundary(Boundary):
    """The plan's entry for one module.

    before: the dim along which the previous block attends. gives: that of the outputs, where it is not `attends`.
    """

    names: tuple[str, ...]  # of the positional arguments of its forward
    before: Attended
    inputs: dict[str, Split | Leading | Seen] = field(default_factory=dict)
    outputs: dict[int | str, Output] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    gives: Attended | None = None

    @outside_graphs
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut or re-shard the arguments to those with which this process computes."""
        record = self.sequences.record(self.where)
        self.sequences.use(self.where)
        listed, kwargs = list(args), dict(kwargs)

        def change(argument: str, how: Callable[[Any, str], Any]) -> None:
            where = f"{self.where}, argument {argument!r}"
            if argument in kwargs:
                kwargs[argument] = how(kwargs[argument], where)
            elif argument in self.names and self.names.index(argument) < len(listed):
                place = self.names.index(argument)
                listed[place] = how(listed[place], where)

        for argument, tokens in self.tokens.items():
            change(argument, lambda x, where, t=tokens: record.reshard(x, t, self.before, self.attends, where))  # type: ignore[misc]
        for argument, what in self.inputs.items():
            change(argument, lambda x, where, w=what: self.piece(record, x, w, where))  # type: ignore[misc]
        return tuple(listed), kwargs

    @outside_graphs
    def leave(self, out: Any) -> Any:
        """Cut, gather or sum the outputs as the plan declares. Raises UserError for an output that the forward does not return."""
        record, items = self.sequences.record(self.where), self._places(out)
        for place, what in self.outputs.items():
            where = f"{self.where}, output {place!r}"
            if place not in items:
                places = nearest(place, [*map(str, items)]) if isinstance(place, str) else ""
                raise UserError(
                    f"{where}: its forward returns {', '.join(map(repr, items)) or 'none'}; correct the plan{places}"
                )
            if not isinstance(what, Gather | Total):
                items[place] = self.piece(record, items[place], what, where)
            elif items[place] is not None:
                if not isinstance(items[place], torch.Tensor):
                    raise UserError(f"{where} is a {type(items[place]).__name__}; the plan can gather and sum tensors")
                if isinstance(what, Total):
                    items[place] = record.total(items[place], what, where)
                else:
                    items[place] = record.gather(items[place], what, self.gives or self.attends, where)
        kind: Any = type(out)
        if isinstance(out, torch.Tensor):
            return items[0]
        if isinstance(out, Mapping):
            return kind(items)
        named = isinstance(out, tuple) and kind is not tuple
        return kind(*items.values()) if named else kind(items.values())

    def _places(self, out: Any) -> dict[int | str, Any]:
        """The outputs of a forward by place. Raises UserError for anything but a tensor, list, tuple or mapping."""
        if isinstance(out, torch.Tensor):
            return {0: out}
        if isinstance(out, Mapping):
            return dict(out)
        if isinstance(out, list | tuple):
            return dict(enumerate(out))
        raise UserError(
            f"{self.where}: its output is a {type(out).__name__}; the plan can change tensors, and those in lists, tuples and dicts"
        )

    def piece(self, record: ForwardRecord, value: Any, what: Split | Leading | Seen | Summed, where: str) -> Any:
        """Cut an argument or output, or each tensor of a list, to the part with which this process computes."""
        if value is None:
            return None
        if isinstance(what, Leading):
            return record.leading(int(value), what.sequence, self.attends, where)
        if isinstance(value, list | tuple):
            return type(value)([self.piece(record, item, what, where) for item in value])
        if not isinstance(value, torch.Tensor):
            raise UserError(f"{where} is a {type(value).__name__}; the plan can split tensors and lists of them")
        if isinstance(what, Seen | Summed):
            if self.sequences.layout.tensor.size == 1:
                return value
            move = record.gather_seen if isinstance(what, Seen) else record.scatter_own
            return move(value, what.sequence, what.dim, self.attends, where)
        return record.cut(value, what, self.attends, where)


class Bounded(nn.Module):
    """Mixed in before a module's own class: cuts its arguments, and changes its outputs, as its boundary says."""

    _boundary: ModuleBoundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self._boundary
        args, kwargs = boundary.enter(args, kwargs)
        out = super().forward(*args, **kwargs)
        return boundary.leave(out) if boundary.outputs else out


@dataclass
class BetweenStages:
    """The tokens that travel between the stages of a model whose items several processes share."""

    sequences: Sequences

    def enter(
        self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut the arguments of the first block of the whole model, whose names are given."""
        plan = self.sequences.plan
        first = plan.attends_all[0]
        boundary = ModuleBoundary(self.sequences, "the first block", first, names, first, dict(plan.entering))
        return boundary.enter(args, kwargs) if plan.entering else (args, kwargs)

    def left_by(self, number: int, argument: str, value: Tensor) -> Tensor:
        """A tensor like what block `number` of the whole model leaves of an argument, from what the first block gets."""
        plan, layout, where = self.sequences.plan, self.sequences.layout, f"{argument} between stages"
        tokens = next((block.tokens[argument] for block in plan.blocks if argument in block.tokens), None)
        if tokens is None or tokens.rows is None:
            return value
        held = self.sequences.record(where).held(tokens.sequence, plan.attends_all[number], where)
        shape, own = list(value.shape), layout.tensor.rank if len(held.columns) > 1 else 0
        shape[tokens.rows], shape[tokens.dim] = len(held.rows), len(held.columns[own])
        return value.new_empty(shape)


def boundary_of(module: nn.Module) -> ModuleBoundary | None:
    """The boundary of a module; None where it has none."""
    return module._boundary if isinstance(module, Bounded) else None


@dataclass
class RootBoundary:
    """The boundary of the whole model, where a forward pass begins and ends.

    check_inputs: whether the first forward checks that all processes of a group got the same inputs. grid: with sparse attention, the
    function that returns the video's tokens along time, height and width.
    """

    boundary: ModuleBoundary
    check_inputs: bool = False
    grid: Grid | None = None

    def __deepcopy__(self, memo: Any) -> RootBoundary:
        return self

    @outside_graphs
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the record of a new forward, or of the one that is being recomputed, and return a token for `end`."""
        record, _ = record_or_replay(lambda: self._new_record(arguments(self.boundary.names, args, kwargs)))
        set_fact(self.boundary.sequences, record)
        return begin_forward(record)

    @outside_graphs
    def end(self, token: Any) -> None:
        """Close the record."""
        end_forward(token)

    def _new_record(self, arguments_by_name: dict[str, Any]) -> ForwardRecord:
        sequences = self.boundary.sequences
        image, grid = False, None
        if self.grid is not None:
            shape: Any = self.grid(arguments_by_name)
            t, h, w = (int(size) for size in shape) if len(shape) == 3 else (0, 0, 0)
            grid = (t, h, w)
            if min(t, h, w) < 1:
                raise UserError(
                    f"{self.boundary.where}: the grid of video tokens is {shape}; it is (time, height, width), 1 at least"
                )
            image = t == 1 and not sequences.plan.stills
        if sequences.plan.image is not None and (value := arguments_by_name.get(sequences.plan.image[0])) is not None:
            dim = sequences.plan.image[1]
            image = (value if dim is None else value.shape[dim]) == 1
        record = ForwardRecord(sequences, bool(image), grid)
        if sequences.plan.packed is not None and sequences.layout.axes.ring.size > 1:
            record.bounds_Z = arguments_by_name.get(sequences.plan.packed[0])
        if self.check_inputs:
            record.check_same(arguments_by_name)
        return record


class Root(nn.Module):
    """Mixed in before the class of the whole model: opens and closes the record of each forward."""

    _root: RootBoundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root, boundary = self._root, self._root.boundary
        token = root.begin(args, kwargs)
        if torch.compiler.is_compiling():  # torch.compile cannot break a graph inside of a try
            out = self._run(super().forward, boundary, args, kwargs)
            root.end(token)
            return out
        try:
            return self._run(super().forward, boundary, args, kwargs)
        finally:
            root.end(token)

    @staticmethod
    def _run(run: Callable[..., Any], boundary: ModuleBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if boundary.inputs:
            args, kwargs = boundary.enter(args, kwargs)
        out = run(*args, **kwargs)
        return boundary.leave(out) if boundary.outputs else out
