"""mmspeed: a training suite for Sora-class video diffusion models."""

from .version import __version__

__all__ = ["__version__"]
