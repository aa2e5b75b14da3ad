"""A plugin of mypy: what a module does not declare is no attribute of it where no domain is known.

`nn.Module.__getattr__` returns Any, so that mypy alone would let the core ask any model for anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mypy.nodes import TypeInfo
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Type

# Folders that know no domain; those of one domain know its models by their classes.
CORE = re.compile(r"(^|/)(mmspeed/(loop|parallel|memory|pipelines)|pipelines)/")
DOMAINS = re.compile(r"(^|/)pipelines/(tasks|diffusion|inference)/")
MODULE = "torch.nn.modules.module.Module"


def in_core(path: str) -> bool:
    """Whether a file lies in the folders that know no domain."""
    path = path.replace("\\", "/")
    return CORE.search(path) is not None and DOMAINS.search(path) is None


class DeclaredPlugin(Plugin):
    """Reports attributes that are found by `__getattr__` of a module alone."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        symbol = self.lookup_fully_qualified(owner) if owner else None
        info = symbol.node if symbol is not None else None
        if not isinstance(info, TypeInfo) or not info.has_base(MODULE) or info.get(name) is not None:
            return None

        def report(context: AttributeContext) -> Type:
            if in_core(context.api.path):  # type: ignore[attr-defined]  # the checker has it, its interface does not
                context.api.fail(f'"{name}" is declared neither by nn.Module nor by a protocol', context.context)
            return context.default_attr_type

        return report


def plugin(version: str) -> type[Plugin]:
    """The plugin's class, of any version of mypy."""
    return DeclaredPlugin
