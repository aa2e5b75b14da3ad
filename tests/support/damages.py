"""Random damages to the checkpoints of a run, as disks, networks and hands make them."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

JSON_FILES = ("index.json", "meta.json", "seal.json")


def damage(folder: Path, step: str, other: str, rng: random.Random) -> str:
    """Damage the checkpoint `step` in `folder`; `other` is another one. Returns a description."""
    checkpoint = folder / step
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    path = rng.choice(files)
    kind = rng.choice(
        ["flip", "flip", "header", "zeros", "truncation", "growth", "shard", "number", "loss", "folders", "noise"]
    )
    data = path.read_bytes()
    if kind == "flip":
        place = rng.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
    elif kind == "header":
        path = rng.choice([path for path in files if path.suffix == ".safetensors"])
        data = path.read_bytes()
        place = rng.randrange(8 + int.from_bytes(data[:8], "little"))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
    elif kind in ("zeros", "noise"):
        length = rng.randrange(1, min(len(data), 512))
        place = rng.randrange(len(data) - length)
        block = bytes(length) if kind == "zeros" else rng.randbytes(length)
        if data[place : place + length] == block:
            return damage(folder, step, other, rng)
        path.write_bytes(data[:place] + block + data[place + length :])
    elif kind == "truncation":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "growth":
        path.write_bytes(data + rng.randbytes(rng.randrange(1, 64)))
    elif kind == "shard":  # a file of another checkpoint of the run
        if (folder / other / path.name).read_bytes() == data:
            return damage(folder, step, other, rng)
        shutil.copyfile(folder / other / path.name, path)
    elif kind == "number":
        path = checkpoint / rng.choice(JSON_FILES)
        text = path.read_text()
        digit = rng.choice(list(re.finditer("[0-9]", text)))
        path.write_text(text[: digit.start()] + str((int(digit[0]) + rng.randrange(1, 10)) % 10) + text[digit.end() :])
    elif kind == "loss":
        path.unlink()
    else:
        shutil.rmtree(checkpoint)
        shutil.copytree(folder / other, checkpoint)
    return f"{kind} of {path.name}"


def unseal(checkpoint: Path) -> None:
    """Make it a checkpoint of the time before seals."""
    (checkpoint / "seal.json").unlink()
    index = json.loads((checkpoint / "index.json").read_text())
    del index["headers"]
    for entry in index["tensors"].values():
        for chunk in entry["chunks"]:
            del chunk["hash"]
    (checkpoint / "index.json").write_text(json.dumps(index))
