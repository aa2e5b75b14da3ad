"""mmspeed: a training suite for Sora-class video diffusion models."""

from typing import Any

from .version import __version__

__all__ = ["__version__", "accelerate_model", "sparsify_model"]


def __getattr__(name: str) -> Any:
    if name == "accelerate_model":  # on first use: `import mmspeed` loads neither torch nor diffusers
        from mmspeed.pipelines.accelerate import accelerate_model

        return accelerate_model
    if name == "sparsify_model":
        from mmspeed.pipelines.sparsify import sparsify_model

        return sparsify_model
    raise AttributeError(f"module 'mmspeed' has no attribute {name!r}")
