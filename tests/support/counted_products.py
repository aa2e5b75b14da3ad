"""Count matrix products by number type in a process that a test does not start itself: `hook` makes Python load this first."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def hook(folder: Path) -> dict[str, str]:
    """Environment in which `python -m mmspeed` writes its counts to `folder`, a file for each process."""
    (folder / "sitecustomize.py").write_text("from tests.support.counted_products import start\n\nstart()\n", "utf-8")
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": f"{folder}:{root}", "COUNTED_PRODUCTS": str(folder)}


def counted(folder: Path) -> dict[str, int]:
    """The products of all processes of `hook`, by number type."""
    files = sorted(folder.glob("products-*.json"))
    assert files, "no process counted"
    return dict(sum((Counter(json.loads(file.read_text("utf-8"))) for file in files), Counter()))


def start() -> None:
    """Count in this process if it is `python -m mmspeed`, not its launcher."""
    words = sys.orig_argv
    if words[words.index("-m") + 1 :][:1] != ["mmspeed"] if "-m" in words else True:
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in PRODUCTS:
                counts[str(args[-1].dtype).removeprefix("torch.")] += 1
            return func(*args, **(kwargs or {}))

    Count().__enter__()
    place = Path(os.environ["COUNTED_PRODUCTS"]) / f"products-{os.getpid()}.json"
    atexit.register(lambda: place.write_text(json.dumps(counts), "utf-8"))
