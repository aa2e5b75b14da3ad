"""Models: the diffusion transformer, and adapters of video codecs and text encoders (imported by their file)."""

from mmspeed.config.model import SIZES
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.models.sora.sizes import build_model

__all__ = ["SIZES", "SoraDiT", "SoraDiTConfig", "build_model"]
