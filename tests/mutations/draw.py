"""The seeded draw: faults over the syntax tree, so many from each room as its share of the lines.

A room is a package below `mmspeed`, the loose files of `mmspeed`, or one of `models`, `pipelines`, `preprocess`. Within a room an operator
is drawn first, then one of its places, so that constants, of which there are most, do not crowd out the rest; at most one a function.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.rules.sources import CODE, name, python_files

from .faults import ROOT, Fault
from .operators import OPERATORS, sites

COUNT = 34

# Code that no test can run here, and why. Its lines weigh nothing: a room's share is of the lines that run.
NOT_RUN = {
    "mmspeed/compute/cuda_blocks.py": "operators of CUDA",
    "mmspeed/compute/npu_blocks.py": "operators of torch_npu",
    "mmspeed/compute/sparse/kernels/npu_kernels.py": "operators of torch_npu",
    "mmspeed/compute/sparse/kernels/varlen.py": "operators of CUDA",
    "mmspeed/compute/sparse/kernels/flex.py": "its backward runs on CUDA alone",
    "mmspeed/compute/sparse/kernels/triton_forward.py": "device code, compiled by Triton",
    "mmspeed/compute/sparse/kernels/triton_backward.py": "device code, compiled by Triton",
    "preprocess/build/ray.py": "needs Ray, which the tests' environment has not",
}


def source_files() -> list[str]:
    """The Python files of the product, links not followed."""
    return [name(path) for path in python_files(*CODE)]


def room_of(file: str) -> str:
    """The room of a file."""
    first, second, *rest = file.split("/")
    return f"{first}/{second}" if first == "mmspeed" and rest else first


def shares(lines: Mapping[str, int], count: int) -> dict[str, int]:
    """`count` split in proportion to lines; the largest remainders are rounded up."""
    total = sum(lines.values())
    exact = {room: count * size / total for room, size in lines.items()}
    split = {room: int(share) for room, share in exact.items()}
    by_rest = sorted(lines, key=lambda room: (split[room] - exact[room], room))
    for room in by_rest[: count - sum(split.values())]:
        split[room] += 1
    return split


def _sources() -> dict[str, str]:
    """The text of each file that tests run, by its name."""
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in source_files() if file not in NOT_RUN}


def draw(seed: int, count: int = COUNT) -> list[Fault]:
    """The faults, numbered."""
    sources = _sources()
    lines: Counter[str] = Counter()
    for file, source in sources.items():
        lines[room_of(file)] += source.count("\n")
    split = shares(lines, count)
    faults: list[Fault] = []
    for room in sorted(lines):
        random_of_room = random.Random(f"{seed} {room}")
        changes = [site for file in sources if room_of(file) == room for site in sites(file, sources[file])]
        for _ in range(split[room]):
            kind = random_of_room.choice([kind for kind in OPERATORS if any(site.kind == kind for site in changes)])
            site = random_of_room.choice([site for site in changes if site.kind == kind])
            faults.append(replace(site, id=f"d{len(faults) + 1:02d}"))
            changes = [s for s in changes if (s.file, s.function) != (site.file, site.function)]
    return faults


def draw_another(kind: str, room: str, seed: int) -> Fault:
    """A fault of a kind in a room, for one whose code is gone. Raises IndexError where there is none."""
    inside = [(file, source) for file, source in _sources().items() if room_of(file) == room]
    changes = [site for file, source in inside for site in sites(file, source) if site.kind == kind]
    return random.Random(f"{seed} {room} {kind}").choice(changes)


def write(path: Path, about: Mapping[str, object], faults: list[Fault]) -> None:
    """Write a list of faults, one a line."""
    rows = ",\n".join("  " + json.dumps(fault.stored(), ensure_ascii=False) for fault in faults)
    head = "".join(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)},\n" for name, value in about.items())
    path.write_text("{\n" + head + '"faults": [\n' + rows + "\n]\n}\n", encoding="utf-8")
