"""Which modules the names of a plan are, and what is said where there are none."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mmspeed.errors import UserError, nearest
from mmspeed.protocols.plan import ModelPlan, PreparesInput, base_of_adapters, check_adapter, named_like


def matching(model: nn.Module, pattern: str, what: str = "plan") -> list[tuple[str, nn.Module]]:
    """The modules whose names are as a pattern. Raises UserError with the nearest names where there is none."""
    found = [(name, module) for name, module in model.named_modules() if named_like(name, pattern)]
    if not found:
        hint = nearest(pattern, [name for name, _ in model.named_modules()])
        raise UserError(f"{what}: {type(model).__name__} has no module {pattern!r}{hint}")
    return found


def _own_parameters(own: type[nn.Module]) -> list[inspect.Parameter]:
    """The parameters of the first forward under the mixins that names one; mixins take any and hand them on."""
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
    """Raises UserError for an argument that no call of a module can have."""
    parameters = _own_parameters(own)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if argument not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"plan: {where} has no argument {argument!r}{nearest(argument, names)}")


def described(name: str, module: nn.Module) -> str:
    """A module for people: its name and class."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def check_plan(model: nn.Module, plan: ModelPlan) -> None:
    """Raises UserError for a plan that names what a model has not: modules, arguments, layers of another kind."""
    for block in plan.blocks:
        ((_, module),) = matching(model, block.name, "plan, blocks")
        for argument in block.tokens:
            check_argument(type(module), argument, described(block.name, module))
    for pattern, inputs in plan.inputs.items():
        for name, module in matching(model, pattern, "plan, inputs"):
            for argument in inputs:
                check_argument(type(base_of_adapters(module)), argument, described(name, module))
    patterns: Mapping[str, Iterable[str]] = {
        "outputs": plan.outputs,
        "attention": plan.attention,
        "linears": plan.linears,
        "channel_norms": plan.channel_norms,
        "divided": plan.divided,
        "before": plan.before,
        "after": plan.after,
        "cuts": plan.cuts or (),
    }
    for what, names in patterns.items():
        for pattern in names:
            matching(model, pattern, f"plan, {what}")
    if plan.image is not None:
        check_argument(type(model), plan.image[0], type(model).__name__)
    for block in plan.blocks:
        check_block(model.get_submodule(block.name), plan)


def check_block(block: nn.Module, plan: ModelPlan) -> None:
    """Raises UserError for regions and chunks that a block has not."""
    for region, part in plan.regions.items():
        if not part.modules:
            raise UserError(f"plan: region {region!r} names no modules")
        names = [name for name, _ in block.named_modules()]
        for pattern in part.modules:
            if not any(named_like(name, pattern) for name in names):
                raise UserError(
                    f"plan: region {region!r}: {type(block).__name__} has no module {pattern!r}{nearest(pattern, names)}"
                )
            for name, module in matching(block, pattern):
                check_adapter(module, f"plan: region {region!r}, {described(name, module)}")
    for chunk in plan.chunks:
        for pattern in filter(None, (chunk.up, chunk.down, chunk.expands)):
            for name, module in matching(block, pattern, "plan, chunks"):
                check_adapter(module, f"plan, chunks: {described(name, module)}")
        prepares = all(isinstance(down, PreparesInput) for _, down in matching(block, chunk.down, "plan, chunks"))
        if (chunk.activation is None) != (chunk.expands is None) or (chunk.activation is None and not prepares):
            raise UserError(
                f"plan, chunks: {chunk.up!r}: name `expands`, the module that is `up` and the activation, and `activation`; or neither, "
                f"where {chunk.down!r} prepares its input itself"
            )


def arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
