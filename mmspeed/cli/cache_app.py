"""`mmspeed cache`: what is in a dataset cache, and whether it is whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspeed.log import format_bytes, progress

if TYPE_CHECKING:
    from mmspeed.data import DatasetCache, Entry

app = typer.Typer(help="Look into a dataset cache.", no_args_is_help=True)

# told apart from the other lines of `stat`, or too long for it
_NOT_IN_STAT = ("mmspeed", "schema", "created_with", "encoders", "config")

CacheFolder = Annotated[Path, typer.Argument(metavar="CACHE", help="Folder of the cache.")]


@app.command()
def stat(cache: CacheFolder) -> None:
    """Say what the cache holds: entries, samples, buckets, bytes, encoders."""
    from mmspeed.data import DatasetCache

    print("\n".join(describe(DatasetCache(cache))))


@app.command()
def verify(cache: CacheFolder) -> None:
    """Read every entry and compare its checksum; exit with 1 when one is damaged."""
    from mmspeed.data import DatasetCache

    opened = DatasetCache(cache)
    entries = all_entries(opened)
    damaged = [line for entry in progress(entries, "verify", unit="entries") for line in damage(opened.root, entry)]
    print("\n".join([*damaged, f"{len(entries) - len(damaged)} of {len(entries)} entries are whole"]))
    if damaged:
        print("delete the shards named above and run `mmspeed preprocess` again: it remakes only their entries")
        raise typer.Exit(1)


@app.command()
def show(
    cache: CacheFolder,
    key: Annotated[
        str | None, typer.Argument(help="Key of a sample or an entry; without it, samples are listed.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples to list.")] = 20,
) -> None:
    """List samples, or show one sample or entry with what it was made from."""
    from mmspeed.data import DatasetCache

    opened = DatasetCache(cache)
    if key is not None:
        print(json.dumps(details(opened, key), indent=2, ensure_ascii=False))
        return
    for sample in opened.samples[:count]:
        print(
            f"{sample.key}  {sample.split:5} {sample.bucket!s:>14}  {len(sample.text_keys)} captions  {sample.source}"
        )
    if len(opened.samples) > count:
        print(f"... and {len(opened.samples) - count} more")


def all_entries(cache: DatasetCache) -> list[Entry]:
    """Every entry, by shard and place in it."""
    from mmspeed.data import SECTIONS

    entries = [cache.entry(key, section) for section in SECTIONS for key in cache.keys(section)]
    return sorted(entries, key=lambda entry: (entry.shard, entry.offset))


def describe(cache: DatasetCache) -> list[str]:
    """The lines of `stat`."""
    entries = all_entries(cache)
    counts, sizes, shards = Counter[str](), Counter[str](), Counter[str]()
    for entry in entries:
        part = entry.section if entry.bucket is None else f"{entry.section} {entry.bucket}"
        counts[part] += 1
        sizes[part] += entry.bytes
    for shard in {entry.shard for entry in entries}:
        shards[shard.split("/")[0]] += 1
    splits = Counter(sample.split for sample in cache.samples)
    lines = [f"cache {cache.root}, made by mmspeed {cache.info.get('mmspeed', '?')}"]
    lines.append(f"  samples: {', '.join(f'{n} {split}' for split, n in sorted(splits.items())) or 'none'}")
    lines += [f"  {part}: {counts[part]} entries, {format_bytes(sizes[part])}" for part in sorted(counts)]
    lines.append(f"  shards: {', '.join(f'{n} of {section}' for section, n in sorted(shards.items())) or 'none'}")
    lines.append(f"  rejected sources: {len(cache.rejects())}")
    lines += [f"  encoder {part}: {_short(what)}" for part, what in cache.info.get("encoders", {}).items()]
    lines += [f"  {name}: {_short(value)}" for name, value in cache.info.items() if name not in _NOT_IN_STAT]
    return lines


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(inner)}" for name, inner in value.items())
    return str(value) if isinstance(value, str) else json.dumps(value)


def damage(root: Path, entry: Entry) -> list[str]:
    """What is wrong with an entry's bytes, as at most one line."""
    from mmspeed.data.keys import digest

    where = f"{root / entry.shard}: {entry.section} {entry.key}"
    try:
        with open(root / entry.shard, "rb") as file:
            file.seek(entry.offset)
            payload = file.read(entry.bytes)
    except FileNotFoundError:
        return [f"{where}: the shard is missing"]
    except OSError as error:
        return [f"{where}: cannot be read: {error.strerror}"]
    if len(payload) < entry.bytes:
        return [f"{where}: the shard ends after {len(payload)} of {entry.bytes} bytes"]
    return [] if digest(payload) == entry.checksum else [f"{where}: damaged, its checksum differs"]


def details(cache: DatasetCache, key: str) -> dict[str, Any]:
    """A sample's or an entry's row, with what its key was made from. Raises UserError for an unknown key."""
    sample = next((sample for sample in cache.samples if sample.key == key), None)
    if sample is not None:
        return {
            "sample": {**vars(sample), "bucket": str(sample.bucket)},
            "latents": [details(cache, latent) for latent in sample.latent_keys],
            "texts": [details(cache, text) for text in sample.text_keys],
        }
    entry = cache.entry(key)
    return {**vars(entry), "meta": json.loads(entry.meta)}
