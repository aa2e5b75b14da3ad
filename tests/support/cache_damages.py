"""Random damages to the files of a cache, and what `verify` and readers make of them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from mmspeed.data.maintenance.verify import verify
from tests.support.care_caches import contents

WAYS = ("flip", "flip", "zero", "noise", "cut", "append", "delete", "swap", "repeat")


def damage(root: Path, seed: int) -> str:
    """Change one file of a cache (two, when they swap), by a seed; what was done. A way that changes nothing is drawn again."""
    draw = random.Random(seed)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
    while True:
        path, way = draw.choice(files), draw.choice(WAYS)
        before = path.read_bytes()
        at = draw.randrange(max(1, len(before)))
        length = min(draw.choice((1, 16, 512, 4096)), len(before) - at)
        end, after = at + length, bytearray(before)
        what = f"seed {seed}: {way} {path.relative_to(root)} at {at} of {len(before)}, {length} bytes"
        if way == "delete":
            path.unlink()
            return what
        if way == "swap":
            others = [p for p in files if p != path and p.suffix == path.suffix] or [p for p in files if p != path]
            other = draw.choice(others)
            if other.read_bytes() == before:
                continue
            path.write_bytes(other.read_bytes())
            other.write_bytes(before)
            return f"{what} with {other.relative_to(root)}"
        if way == "flip":
            after[at] ^= 1 << draw.randrange(8)
        elif way == "zero":
            after[at:end] = bytes(length)
        elif way == "noise":
            after[at:end] = draw.randbytes(length)
        elif way == "cut":
            del after[at:]
        elif way == "append":
            after += draw.choice((bytes(length), draw.randbytes(length)))
        else:
            after[end:end] = before[at:end]
        if after != before:
            path.write_bytes(after)
            return what


def restore(root: Path, files: dict[Path, bytes]) -> None:
    """Give a cache the files back that it had."""
    for path in root.rglob("*"):
        if path.is_file() and path not in files:
            path.unlink()
    for path, data in files.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def try_damages(base: str, folder: str, seeds: range) -> list[str]:
    """Damage a copy of a cache once for every seed, and mend it again; what went wrong, as lines. Runs in a child process."""
    root, wrong = Path(folder), []
    shutil.copytree(base, root)
    right = contents(root)
    assert not any(value.startswith("error") for value in right.values()), right
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert not verify(root).damage
    restore(root, files)
    for seed in seeds:
        what = damage(root, seed)
        try:
            # Derived files may be compiled again by any reader: without one, nothing is wrong.
            if not verify(root).damage and not (" delete " in f" {what}" and ".arrow" in what):
                wrong.append(f"{what}: not noticed")
        except Exception as error:
            wrong.append(f"{what}: verify failed: {type(error).__name__} {str(error)[:200]}")
        try:
            got = contents(root)
            wrong += [
                f"{what}: {name} is {value[:80]}"
                for name, value in got.items()
                if not value.startswith("error") and value != right.get(name) and name != "rejects"
            ]
        except Exception as error:
            wrong.append(f"{what}: a reader failed: {type(error).__name__} {str(error)[:200]}")
        restore(root, files)
    return wrong
