"""Check that the linear codec's file in a cache is the one that encoded the latents, without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors
import yaml

from mmspeed.config.yaml_text import parse_yaml

from .seals import is_sealed


def codec_facts(path: Path) -> dict[str, str]:
    """The header of a codec's file. Raises ValueError unless the file is exactly as it was written."""
    if not is_sealed(path.read_bytes()):
        raise ValueError("is not as it was written")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except safetensors.SafetensorError as error:
        raise ValueError(f"cannot be read: {error}") from None


def own_codec(info: dict[str, Any]) -> str | None:
    """The path, in a cache with this cache.json, of the codec that was fitted for it; None if its codec is stored elsewhere."""
    vae = info.get("encoders", {}).get("vae", {})
    if vae.get("kind") != "linear" or "config" not in info:
        return None
    try:
        config = parse_yaml(info["config"]) if isinstance(info["config"], str) else info["config"]
        weights = config["vae"].get("weights")
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
    return None if weights else f"codec/linear-{vae.get('channels')}.safetensors"


def codec_problems(root: Path, info: dict[str, Any]) -> list[tuple[str, str]]:
    """(file, problem) of each codec file that is damaged, missing, or not the one that encoded the latents."""
    fitted = own_codec(info)
    names = {f"codec/{path.name}" for path in (root / "codec").glob("[!.]*.safetensors")} | (
        {fitted} if fitted else set()
    )
    problems = []
    for name in sorted(names):
        try:
            fingerprint = codec_facts(root / name).get("fingerprint")
            if name == fitted and fingerprint != info["encoders"]["vae"].get("fingerprint"):
                problems.append((name, "is another codec than the one that cache.json records"))
        except FileNotFoundError:
            problems.append((name, "is missing"))
        except OSError as error:
            problems.append((name, f"cannot be read: {error.strerror}"))
        except ValueError as error:
            problems.append((name, str(error)))
    return problems
