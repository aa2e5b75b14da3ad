"""Format the lines that `mmspeed cache` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmspeed.log import format_bytes

if TYPE_CHECKING:
    from mmspeed.data.maintenance.verify import Findings

_BAR = 30  # characters of the longest bar


def stat_lines(facts: Mapping[str, Any]) -> list[str]:
    """The lines of `stat`."""
    from mmspeed.data.maintenance.stats import should_pack

    lines = [f"cache {facts['root']}, made by mmspeed {facts['mmspeed']}, schema {facts['schema']}"]
    if (documents := facts.get("documents")) is not None:
        lines += [
            f"  source {name}: {row['documents']:,} documents, {row['tokens']:,} tokens"
            for name, row in documents["sources"].items()
        ]
        lines.append(f"  held out: {documents['held_out']:,} documents")
    else:
        lines.append(f"  samples: {', '.join(f'{n} {split}' for split, n in facts['samples'].items()) or 'none'}")
    lines += bars([(f"bucket {b}", sum(splits.values())) for b, splits in facts["buckets"].items()], "samples")
    for folder, count in facts["folders"].items():
        part = folder.replace("/", " ")
        mean = count["disk"] / count["shards"]
        lines.append(
            f"  {part}: {count['entries']} entries, {format_bytes(count['bytes'])},"
            f" {count['shards']} shards of {format_bytes(mean)} on average"
        )
    lines += histogram_lines("tokens of the latent", facts["tokens"], str)
    lines += histogram_lines("bytes of a latent", facts["latent_bytes"], format_bytes)
    lines.append(f"  rejected sources: {sum(facts['rejected'].values())}")
    lines += bars(list(facts["rejected"].items()), "sources")
    lines += [f"  encoder {part}: {short(what)}" for part, what in facts["encoders"].items()]
    lines += [f"  {name}: {value}" for name, value in facts["settings"].items()]
    disk = facts["disk"]
    lines.append(
        f"  disk: {disk['files']} files, {format_bytes(disk['bytes'])}; {format_bytes(disk['free'])} free on its file system"
    )
    return lines + [f"  {hint}" for hint in _hints(facts, [f for f, n in facts["folders"].items() if should_pack(n)])]


def _hints(facts: Mapping[str, Any], small: Sequence[str]) -> list[str]:
    """Lines about irregularities, each with the remedy."""
    lacking, unused = sum(facts["lacking"].values()), sum(facts["unused"].values())
    hints = []
    if lacking or facts["shards_gone"]:
        gone = f", {len(facts['shards_gone'])} shards are gone" if facts["shards_gone"] else ""
        hints.append(
            f"incomplete: {lacking} entries that samples refer to are not stored{gone}; run `mmspeed preprocess`"
        )
    if unused:
        hints.append(f"unused: {unused} entries that no sample refers to; `mmspeed cache prune` lists them")
    if facts["duplicates"]:
        hints.append(f"stored twice: {facts['duplicates']} entries; `mmspeed cache pack` keeps one of each")
    if facts["lost_samples"]:
        hints.append(f"lost: {facts['lost_samples']} samples, whose source failed during training")
    if facts["writers_at_work"]:
        hints.append(f"being written: {facts['writers_at_work']} files in progress")
    if facts["left_by_killed_writers"]:
        hints.append(f"left by killed writers: {facts['left_by_killed_writers']} files; the next writer removes them")
    return hints + [f"small shards: {folder}; `mmspeed cache pack` merges them" for folder in small]


def histogram_lines(label: str, ranges: Sequence[Mapping[str, int]], show: Any) -> list[str]:
    """A histogram as bars."""
    rows = [(show(r["from"]) + ("" if r["from"] == r["to"] else f" to {show(r['to'])}"), r["count"]) for r in ranges]
    return [f"  {label}:", *bars(rows, "latents")] if rows else []


def bars(rows: Sequence[tuple[str, int]], unit: str) -> list[str]:
    """One line for each row: name, bar, number."""
    width, most = max((len(name) for name, _ in rows), default=0), max((count for _, count in rows), default=0)
    return [
        f"    {name:<{width}} {'#' * -(-count * _BAR // most) if most else ''} {count} {unit}" for name, count in rows
    ]


def verify_lines(findings: Findings) -> list[str]:
    """Lines about the findings of `verify`, damage first."""
    lines = [f"damaged: {damage}" for damage in findings.damage]
    lines += [f"note: {note}" for note in findings.notes]
    lines += [f"in progress: {name} (a writer holds it)" for name in findings.live]
    lines += [f"left by a killed writer: {name} (the next writer removes it)" for name in findings.left]
    lines += [f"foreign: {name} is not part of a cache" for name in findings.foreign]
    lines.append(f"{findings.whole} of {findings.entries} entries are intact")
    return lines


def short(value: Any) -> str:
    """A value of cache.json on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(inner)}" for name, inner in value.items())
    return str(value) if isinstance(value, str) else json.dumps(value)
