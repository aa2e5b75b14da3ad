"""Random damages to the checkpoints of a run, as disks, networks and hands make them."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

from mmspeed.config.schema import TrainConfig
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.maintenance import verify
from mmspeed.loop.checkpoint.manager import CheckpointManager, DamagedCheckpointError, TrainingState, load, step_name
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from tests.support.toy import ToyDiT

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


def state_of(seed: int) -> TrainingState:
    """The state of a toy model, with an optimizer and an average."""
    model = ToyDiT(seed=seed)
    return TrainingState(model, make_optimizer(model, TrainConfig()), EMA(model, 0.9), {"order": [seed, 3]})


def write_two(folder: Path) -> Path:
    """Checkpoints of steps 2 and 4, with different weights and losses."""
    manager = CheckpointManager(folder)
    for step, loss in ((2, 0.5), (4, 0.7)):
        manager.save(step, state_of(step), blocking=True)
        manager.mark_best(step, loss)
    return folder


def unnoticed(written: Path, place: Path, count: int, seed: int) -> list[str]:
    """Damage a copy (at `place`) of what `write_two` wrote, `count` times; a line for each damage that `verify` or `load` passes over.

    Any exception of `load` but that of a damaged checkpoint goes through.
    """
    lines = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(written, place)
        step, other = rng.sample([step_name(2), step_name(4)], 2)
        text = f"{number}: {damage(place, step, other, rng)}"
        if not verify(place / step):
            lines.append(f"{text} passes `verify`")
        if verify(place / other):
            lines.append(f"{text}: the other checkpoint counts as damaged")
        state = state_of(0)
        try:
            load(place / step, state.model, state.optimizer, state.ema)
        except DamagedCheckpointError as error:
            if step not in str(error):
                lines.append(f"{text}: its message does not name it: {error}")
        else:
            lines.append(f"{text} is loaded")
    return lines
