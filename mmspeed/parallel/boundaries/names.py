"""Check the names in a plan against the model: error messages name those that it lacks, with the nearest ones that it has."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from mmspeed.errors import UserError, nearest
from mmspeed.protocols.plan import (
    Attended,
    Leading,
    ModelPlan,
    Output,
    PreparesInput,
    Split,
    base_of_adapters,
    check_adapter,
    modules_like,
    names_of,
)


def _own_parameters(own: type[nn.Module]) -> list[inspect.Parameter]:
    """The parameters of the first forward below the mixins, whose own forwards take any arguments and pass them on."""
    for base in own.__mro__:
        if "forward" in vars(base):
            parameters = list(inspect.signature(vars(base)["forward"]).parameters.values())[1:]
            if not parameters or any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
                return parameters
    return []


def argument_names(own: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional arguments of a module's own forward."""
    return tuple(p.name for p in _own_parameters(own) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def check_argument(own: type[nn.Module], argument: str, where: str) -> None:
    """Raise UserError for an argument that a module's forward does not take."""
    parameters = _own_parameters(own)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if argument not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"plan: {where} has no argument {argument!r}{nearest(argument, names)}")


def described(name: str, module: nn.Module) -> str:
    """The name and class of a module, for messages."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def check_plan(model: nn.Module, plan: ModelPlan) -> None:
    """Raise UserError for a plan that names modules, arguments or attributes that the model lacks, or layers of the wrong kind."""
    for block in plan.blocks:
        ((_, module),) = modules_like(model, block.name, "plan, blocks")
        for argument in block.tokens:
            check_argument(type(module), argument, described(block.name, module))
    for pattern, inputs in plan.inputs.items():
        for name, module in modules_like(model, pattern, "plan, inputs"):
            for argument in inputs:
                check_argument(type(base_of_adapters(module)), argument, described(name, module))
    patterns: Mapping[str, Iterable[str]] = {
        "outputs": plan.outputs,
        "attention": plan.attention,
        "linears": plan.linears,
        "experts": plan.experts,
        "mlps": plan.mlps,
        "before": plan.before,
        "after": plan.after,
        "cuts": plan.cuts or (),
    }
    for what, names in patterns.items():
        for pattern in names:
            modules_like(model, pattern, f"plan, {what}")
    for pattern in plan.channel_norms:
        for name, module in modules_like(model, pattern, "plan, channel_norms"):
            if not isinstance(module, nn.RMSNorm):
                where = described(name, module)
                raise UserError(
                    f"plan, channel_norms: {where} is a norm over all heads in the plan, and no torch.nn.RMSNorm"
                )
    for pattern, attributes in plan.divided.items():
        for name, module in modules_like(model, pattern, "plan, divided"):
            _check_numbers(module, attributes, described(name, module))
    for named in (plan.image, plan.packed):
        if named is not None:
            check_argument(type(model), named[0], type(model).__name__)
    for block in plan.blocks:
        check_block(model.get_submodule(block.name), plan)


def _check_numbers(module: nn.Module, attributes: Iterable[str], where: str) -> None:
    """Raise UserError for an attribute of a module that is not a whole number."""
    known = [name for name, value in vars(module).items() if isinstance(value, int) and not isinstance(value, bool)]
    for attribute in attributes:
        if attribute not in known:
            raise UserError(f"plan, divided: {where} has no whole number {attribute!r}{nearest(attribute, known)}")


def _moved(plan: ModelPlan) -> Iterator[tuple[str, Leading | Output]]:
    """Yield (where, what) for each argument and output that a plan names."""
    yield from ((f"plan, entering, {key!r}", what) for key, what in plan.entering.items())
    for pattern, inputs in plan.inputs.items():
        yield from ((f"plan, inputs, {pattern!r}, {key!r}", what) for key, what in inputs.items())
    for pattern, outputs in plan.outputs.items():
        yield from ((f"plan, outputs, {pattern!r}, {place!r}", what) for place, what in outputs.items())


def check_sequences(plan: ModelPlan) -> None:
    """Raise UserError for a sequence whose length no split of the plan gives; that takes a split of this sequence alone."""
    splits = [what for _, what in _moved(plan) if isinstance(what, Split)]
    lengths = [split.sequence for split in splits if isinstance(split.sequence, str)]
    for where, name in _sequences(plan):
        if name not in lengths:
            raise UserError(
                f"{where}: no split of the plan gives the length of sequence {name!r}{nearest(name, lengths)}"
            )


def check_positions(plan: ModelPlan, sequence: str, attends: Attended, where: str) -> None:
    """Raise UserError where no split gives the positions of a sequence along a dim, which sparse attention across processes needs."""
    splits = (what for inputs in plan.inputs.values() for what in inputs.values() if isinstance(what, Split))
    if not any((what.sequence, what.positions) == (sequence, attends) for what in splits):
        raise UserError(
            f"plan, attention: {where} is sparse, and no split of an input gives the positions of {sequence!r} along {attends}; "
            f"give that of their tensor `positions={attends!r}`"
        )


def _sequences(plan: ModelPlan) -> Iterator[tuple[str, str]]:
    """Yield (where, name) for each sequence that a plan names."""
    for where, what in _moved(plan):
        yield from ((where, name) for name in names_of(what.sequence))
    for block in plan.blocks:
        for argument, tokens in block.tokens.items():
            yield f"plan, blocks, {block.name!r}, {argument!r}", tokens.sequence
    for pattern, site in plan.attention.items():
        yield from ((f"plan, attention, {pattern!r}", name) for name in (*site.queries, *(site.keys or ())))
    for pattern, linear in plan.linears.items():
        yield from ((f"plan, linears, {pattern!r}", name) for name in linear.sequences)
    if plan.long_text is not None:
        yield "plan, long_text", plan.long_text
    if plan.packed is not None:
        yield "plan, packed", plan.packed[1]


def check_block(block: nn.Module, plan: ModelPlan) -> None:
    """Raise UserError for regions and chunks of the plan that a block lacks."""
    for region, part in plan.regions.items():
        if not part.modules:
            raise UserError(f"plan: region {region!r} names no modules")
        for pattern in part.modules:
            for name, module in modules_like(block, pattern, f"plan, region {region!r}", part.optional):
                check_adapter(module, f"plan: region {region!r}, {described(name, module)}")
    for chunk in plan.chunks:
        for pattern in filter(None, (chunk.up, chunk.down, chunk.expands)):
            for name, module in modules_like(block, pattern, "plan, chunks"):
                check_adapter(module, f"plan, chunks: {described(name, module)}")
        downs = modules_like(block, chunk.down, "plan, chunks")
        prepares = all(isinstance(down, PreparesInput) for _, down in downs)
        if (chunk.activation is None) != (chunk.expands is None) or (chunk.activation is None and not prepares):
            raise UserError(
                f"plan, chunks: {chunk.up!r}: name `expands`, the module that is `up` and the activation, and `activation`; or neither, "
                f"where {chunk.down!r} prepares its input itself"
            )


def arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
