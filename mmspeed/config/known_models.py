"""Published models by their short names, and the videos that they were trained for: known without loading any library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmspeed.errors import UserError, nearest


@dataclass(frozen=True)
class Published:
    """A repository on the hub, and the videos that its model was trained for.

    Args:
        repository: its hub id.
        frames, height, width: of the largest video.
        fps: frames per second.
        grid: (frames, pixels) that videos are multiples of: frames after the first one, and height and width.
        mode: of `conditioning`, in which a model that makes videos from images alone is trained; None for others.
        experts: True for a model with two experts, of times near noise and near data.
        fixed: True for a model that takes this height and width alone.
        control: True for a model that is always given a control video.
    """

    repository: str
    frames: int
    height: int
    width: int
    fps: float
    grid: tuple[int, int]
    mode: str | None = None
    experts: bool = False
    fixed: bool = False
    control: bool = False


# by the file in mmspeed/models/families
PUBLISHED: Mapping[str, Mapping[str, Published]] = {
    "wan": {
        "wan2.1-1.3b": Published("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 81, 480, 832, 16.0, (4, 16)),
        "wan2.1-14b": Published("Wan-AI/Wan2.1-T2V-14B-Diffusers", 81, 720, 1280, 16.0, (4, 16)),
        "wan2.1-i2v-480p": Published("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 81, 480, 832, 16.0, (4, 16), "first"),
        "wan2.1-i2v-720p": Published("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", 81, 720, 1280, 16.0, (4, 16), "first"),
        "wan2.1-flf2v": Published("Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", 81, 720, 1280, 16.0, (4, 16), "first_last"),
        "wan2.2-5b": Published("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 121, 704, 1280, 24.0, (4, 32)),
        "wan2.2-a14b": Published("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 81, 720, 1280, 16.0, (4, 16), experts=True),
    },
    "wan_vace": {
        "wan2.1-vace-1.3b": Published("Wan-AI/Wan2.1-VACE-1.3B-diffusers", 81, 480, 832, 16.0, (4, 16), control=True),
        "wan2.1-vace-14b": Published("Wan-AI/Wan2.1-VACE-14B-diffusers", 81, 720, 1280, 16.0, (4, 16), control=True),
    },
    "ltx": {"ltx-2b": Published("Lightricks/LTX-Video", 161, 512, 704, 25.0, (8, 32))},
    "cogvideox": {
        "cogvideox-2b": Published("zai-org/CogVideoX-2b", 49, 480, 720, 8.0, (4, 16)),
        "cogvideox-5b": Published("zai-org/CogVideoX-5b", 49, 480, 720, 8.0, (4, 16)),
        "cogvideox-5b-i2v": Published("zai-org/CogVideoX-5b-I2V", 49, 480, 720, 8.0, (4, 16), "first", fixed=True),
        "cogvideox1.5-5b": Published("zai-org/CogVideoX1.5-5B", 77, 768, 1360, 16.0, (4, 16)),
        "cogvideox1.5-5b-i2v": Published("zai-org/CogVideoX1.5-5B-I2V", 77, 768, 1360, 16.0, (4, 16), "first"),
    },
    "hunyuan_video": {
        "hunyuan-video": Published("hunyuanvideo-community/HunyuanVideo", 129, 720, 1280, 24.0, (4, 16)),
        "hunyuan-video-i2v": Published(
            "hunyuanvideo-community/HunyuanVideo-I2V", 129, 720, 1280, 24.0, (4, 16), "first"
        ),
        "hunyuan-video-i2v-33ch": Published(
            "hunyuanvideo-community/HunyuanVideo-I2V-33ch", 129, 720, 1280, 24.0, (4, 16), "first"
        ),
    },
    "hunyuan_video15": {
        "hunyuan-video1.5-480p": Published(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", 121, 480, 832, 24.0, (4, 16)
        ),
        "hunyuan-video1.5-720p": Published(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v", 121, 720, 1280, 24.0, (4, 16)
        ),
        "hunyuan-video1.5-480p-i2v": Published(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v", 121, 480, 832, 24.0, (4, 16), "first"
        ),
        "hunyuan-video1.5-720p-i2v": Published(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v", 121, 720, 1280, 24.0, (4, 16), "first"
        ),
    },
    "mochi": {"mochi-1": Published("genmo/mochi-1-preview", 163, 480, 848, 30.0, (6, 16))},
    "qwen_image": {"qwen-image": Published("Qwen/Qwen-Image", 1, 1328, 1328, 1.0, (1, 16))},
    "flux": {"flux.1-dev": Published("black-forest-labs/FLUX.1-dev", 1, 1024, 1024, 1.0, (1, 16))},
}


def videos_of(name: str, key: str = "--model") -> tuple[str, Published | None]:
    """(hub id or folder, the videos that the model was trained for) of a model as a user names it: by a short name, id or folder.

    None for the videos of a repository that no family lists. Raises UserError, with near names, for a word that is none of these.
    """
    known = {short: place for family in PUBLISHED.values() for short, place in family.items()}
    if name.lower() in known:
        return known[name.lower()].repository, known[name.lower()]
    if "/" not in name and not Path(name).is_dir():
        named = [short for short, place in known.items() if _letters(name) in _letters(f"{short} {place.repository}")]
        if named:  # each family lists its commonest first
            others = f", the commonest of {', '.join(named)}" if len(named) > 1 else ""
            raise UserError(f"{key}: {name} is no whole name; did you mean {named[0]!r}{others}?")
        raise UserError(
            f"{key}: {name} is no short name, no hub id (owner/name) and no folder{nearest(name.lower(), list(known))} "
            f"(short names: {', '.join(known)})"
        )
    return name, next((place for place in known.values() if place.repository == name), None)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
