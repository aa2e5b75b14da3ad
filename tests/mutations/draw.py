"""The seeded draw: faults over the syntax tree, so many from each room as its share of the lines.

A room is a package below `mmspeed`, the loose files of `mmspeed`, or one of `models`, `pipelines`, `preprocess`. Within a room an operator
is drawn first, then one of its places, so that constants, of which there are most, do not crowd out the rest; at most one a function.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .faults import LISTS, ROOT, Fault
from .operators import OPERATORS, sites

SEED = 17
COUNT = 34
FOLDERS = ("mmspeed", "models", "pipelines", "preprocess")

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


def source_files(root: Path = ROOT) -> list[str]:
    """The Python files of the product in its repository, links not followed."""
    files = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            if parts[:2] not in {("mmspeed", name) for name in FOLDERS} and "__pycache__" not in parts:
                files.append("/".join(parts))
    return files


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


def draw(seed: int = SEED, count: int = COUNT, root: Path = ROOT) -> tuple[list[Fault], dict[str, dict[str, int]]]:
    """The faults, numbered, and each room's lines and faults."""
    sources = {file: (root / file).read_text(encoding="utf-8") for file in source_files(root) if file not in NOT_RUN}
    lines: dict[str, int] = defaultdict(int)
    for file, source in sources.items():
        lines[room_of(file)] += source.count("\n")
    split = shares(lines, count)
    faults: list[Fault] = []
    for room in sorted(lines):
        random_of_room = random.Random(f"{seed} {room}")
        by_kind: dict[str, list[Fault]] = {kind: [] for kind in OPERATORS}
        for file in (file for file in sources if room_of(file) == room):
            for site in sites(file, sources[file]):
                by_kind[site.kind].append(site)
        for _ in range(split[room]):
            site = random_of_room.choice(by_kind[random_of_room.choice([kind for kind in OPERATORS if by_kind[kind]])])
            faults.append(replace(site, id=f"d{len(faults) + 1:02d}"))
            for kind in OPERATORS:
                by_kind[kind] = [s for s in by_kind[kind] if (s.file, s.function) != (site.file, site.function)]
    return faults, {room: {"lines": lines[room], "faults": split[room]} for room in sorted(lines)}


def write(path: Path, about: Mapping[str, object], faults: list[Fault]) -> None:
    """Write a list of faults, one a line."""
    rows = ",\n".join("  " + json.dumps(fault.stored(), ensure_ascii=False) for fault in faults)
    head = "".join(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)},\n" for name, value in about.items())
    path.write_text("{\n" + head + '"faults": [\n' + rows + "\n]\n}\n", encoding="utf-8")


def write_drawn(seed: int = SEED, count: int = COUNT) -> None:
    """Draw, and write the list that is committed."""
    faults, rooms = draw(seed, count)
    write(LISTS["drawn"], {"seed": seed, "rooms": rooms, "lines that weigh nothing": NOT_RUN}, faults)
