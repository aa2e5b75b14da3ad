"""Models: the diffusion transformer, and adapters of video codecs and text encoders (imported by their file)."""

from mmspeed.models.sizes import SIZES, build_model
from mmspeed.models.sora_dit import SoraDiT, SoraDiTConfig

__all__ = ["SIZES", "SoraDiT", "SoraDiTConfig", "build_model"]
