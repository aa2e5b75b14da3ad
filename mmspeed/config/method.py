"""The section that names a method."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from .inputs import Section


class MethodConfig(Section):
    """How the models learn; keys beside `kind` are the method's own."""

    kind: str = Field("finetune", description="Name of the method: `finetune` trains by the domain's own loss.")

    model_config = ConfigDict(extra="allow", frozen=True)
