"""Captions given by hand: encoded once, stored beside the run, the encoder freed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from mmspeed.config.schema import TextConfig
from mmspeed.device import Device
from mmspeed.models.text.encoders import load_text_encoder, text_identity
from mmspeed.pipelines.run.run_folder import sync_file
from mmspeed.protocols import TextEntry


def encode_prompts(prompts: list[str], config: TextConfig, device: Device) -> list[TextEntry]:
    """The text entries of prompts, on the CPU; the encoder is gone from memory afterwards."""
    encoder = load_text_encoder(config, device)
    entries = encoder.encode(prompts)
    del encoder
    gc.collect()
    device.empty_cache()
    return entries


def stored_prompts(path: Path, prompts: list[str], config: TextConfig, device: Device) -> list[TextEntry]:
    """As `encode_prompts`, kept in a safetensors file that is used again while prompts and encoder stay the same."""
    wanted = {"prompts": "\x1f".join(prompts), "encoder": text_identity(config)}
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata() == wanted:
                return [TextEntry(file.get_tensor(str(index))) for index in range(len(prompts))]
    entries = encode_prompts(prompts, config, device)
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    save_file({str(i): e.embeds_LD.float().contiguous() for i, e in enumerate(entries)}, temporary, metadata=wanted)
    sync_file(temporary)
    os.replace(temporary, path)
    return entries
