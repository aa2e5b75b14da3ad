"""The commands: try the faults, record the map of tests, look after the lists."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from .draw import COUNT, draw, draw_another
from .faults import HERE, ROOT, Fault, LostAnchorError, all_faults, apply
from .mend import mend
from .operators import OPERATORS
from .reached import ReachedMap, record, test_files
from .run import Limits, Results, try_all

ARGUMENTS = HERE / "arguments.json"  # of faults that change nothing: the reason by id


def lost_anchors(faults: list[Fault]) -> list[str]:
    """A message for each fault that does not apply to the sources."""
    messages = []
    for fault in faults:
        try:
            apply(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
        except (LostAnchorError, ValueError, FileNotFoundError) as error:
            messages.append(str(error))
    return messages


def run(options: argparse.Namespace) -> int:
    """Try faults; 0 where at most `--allowed` escape without an argument, 1 where more do, 2 where faults have no place."""
    faults = all_faults() if options.seed is None else draw(options.seed)
    wanted = options.only.split(",") if options.only else []
    faults = [f for f in faults if not wanted or any(f.id == w or f.file.startswith(w) or w in f.kind for w in wanted)]
    lost = lost_anchors(faults)
    if lost or not faults:
        print("\n".join(lost) or f"no fault is called {options.only}", file=sys.stderr)
        return 2
    began = time.monotonic()
    limits = Limits(options.limit, options.hang)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Results(options.json, options.again)
    verdicts = try_all(faults, results, options.jobs, limits, lambda verdict: print(verdict.line(), flush=True))
    arguments = json.loads(ARGUMENTS.read_text(encoding="utf-8"))
    escaped = [v for v in verdicts if v.test is None]
    argued = [v for v in escaped if options.seed is None and v.id in arguments]
    for verdict in argued:
        print(f"{verdict.id} changes nothing: {arguments[verdict.id]}")
    left = len(escaped) - len(argued)
    minutes = (time.monotonic() - began) / 60
    caught, how = len(verdicts) - len(escaped), f"of which {len(argued)} with an argument; {minutes:.1f} minutes"
    print(f"{len(verdicts)} faults, {caught} caught, {len(escaped)} escaped, {how}")
    return int(left > options.allowed)


def record_map(options: argparse.Namespace) -> int:
    """Record the given test files, else those that the map lacks."""
    files = options.files or (test_files() if options.all else ReachedMap.read().lacking())
    unknown = sorted(set(files) - set(test_files()))
    if unknown:
        example = "name them as tests/unit/data/test_order.py"
        print(f"no test files of the map: {', '.join(unknown)}; {example}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is recorded by then is written
    print(f"{len(files)} test files to record", flush=True)
    for file, tests, seconds in record(files, options.jobs):
        print(f"{file}: {tests} tests, {seconds:.1f} s", flush=True)
    return 0


def look_after(options: argparse.Namespace) -> int:
    """List the faults that have lost their place; with `--mend` give drawn ones the nearest."""
    if options.mend:
        for message in mend(all_faults()):
            print(message)
    faults = all_faults()
    lost = lost_anchors(faults)
    print("\n".join(lost) or f"all {len(faults)} faults have their places")
    return min(len(lost), 1)


def draw_one(options: argparse.Namespace) -> int:
    """Print a fault of a kind in a room, as a row of the list."""
    print(json.dumps(draw_another(options.kind, options.room, options.seed).stored()))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.mutations", description="Faults, one at a time, and who catches them."
    )
    commands = parser.add_subparsers(dest="command")
    trial = commands.add_parser("run", help="try faults (what happens without a command)")
    trial.set_defaults(do=run)
    trial.add_argument("--only", default="", help="ids, kinds or beginnings of file names, with commas")
    trial.add_argument("--seed", type=int, help=f"{COUNT} faults of another draw in place of the committed lists")
    trial.add_argument(
        "--json", type=Path, default=ROOT / "build" / "mutations.json", help="results, and where to go on from"
    )
    trial.add_argument("--again", action="store_true", help="try faults again that the results hold")
    trial.add_argument("--jobs", type=int, default=2, help="faults at a time")
    trial.add_argument("--limit", type=float, default=Limits.fault, help="seconds of a fault")
    trial.add_argument("--hang", type=float, default=Limits.hang, help="seconds of a test, then it hangs")
    trial.add_argument("--allowed", type=int, default=3, help="how many may escape without an argument")
    recording = commands.add_parser("map", help="record which tests call which functions, where that is not known")
    recording.set_defaults(do=record_map)
    recording.add_argument("files", nargs="*", help="test files; none: those that are new or changed")
    recording.add_argument("--all", action="store_true", help="all test files, also those that are known")
    recording.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    anchors = commands.add_parser("anchors", help="list the faults that have lost their place in the sources")
    anchors.set_defaults(do=look_after)
    anchors.add_argument("--mend", action="store_true", help="move drawn faults to the nearest like place")
    drawing = commands.add_parser("draw", help="draw a fault in place of one whose code is gone")
    drawing.set_defaults(do=draw_one)
    drawing.add_argument("kind", choices=OPERATORS)
    drawing.add_argument("room", help="such as mmspeed/bench or pipelines")
    drawing.add_argument("--seed", type=int, default=17)
    words = sys.argv[1:] if arguments is None else arguments
    plain = words[:1] and words[0] not in commands.choices and words[0] not in ("-h", "--help")
    options = parser.parse_args(["run", *words] if plain or not words else words)
    return int(options.do(options))


if __name__ == "__main__":
    sys.exit(main())
