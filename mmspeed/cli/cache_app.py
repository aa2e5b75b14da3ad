"""`mmspeed cache`: inspect, verify and maintain a dataset cache."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspeed.errors import UserError

from . import cache_text, spoken

if TYPE_CHECKING:
    from mmspeed.data import DatasetCache

app = typer.Typer(help="Inspect and maintain a dataset cache.", no_args_is_help=True)


@app.callback()
def _begin(context: typer.Context) -> None:
    spoken.begin_group(context, working=True)


CacheFolder = Annotated[Path, typer.Argument(metavar="CACHE", help="Folder of the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def stat(cache: CacheFolder, as_json: AsJson = False) -> None:
    """Show the contents of the cache: entries, samples, buckets, sizes, encoders, disk, and irregularities."""
    from mmspeed.data.maintenance.stats import census

    facts = census(cache)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else "\n".join(cache_text.stat_lines(facts)))


@app.command()
def verify(
    cache: CacheFolder,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop damaged entries and list them; keep everything that is intact.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte and compare it with the stored checksums; exit with 1 when something is damaged."""
    from mmspeed.data.maintenance.repair import mend
    from mmspeed.data.maintenance.verify import verify

    report = mend(cache) if repair else None
    findings = report.found if report is not None else verify(cache)
    if as_json:
        print(json.dumps(asdict(report or findings), indent=2, ensure_ascii=False))
    else:
        print("\n".join(cache_text.verify_lines(findings)))
        if report is not None:
            print("\n".join([*report.done, *(f"dropped: {name}" for name in report.lost)] or ["nothing to repair"]))
            print("".join(f"to do: {what}\n" for what in report.todo), end="")
        elif findings.damage:
            print(f"`mmspeed cache verify --repair {cache}` drops damaged entries and keeps the rest")
    if report.todo if report is not None else findings.damage:
        raise typer.Exit(1)


@app.command()
def prune(
    cache: CacheFolder,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Without this, only list what would be removed.")
    ] = False,
    keep_codec: Annotated[
        list[str] | None,
        typer.Option(metavar="FINGERPRINT", help="Also keep latents of this codec (its first digits suffice)."),
    ] = None,
) -> None:
    """Remove entries that no sample refers to, second copies, and leftovers of killed writers. Not while anything uses the cache."""
    from mmspeed.data.cache.tables import read_info
    from mmspeed.data.maintenance.prune_pack import plan_prune
    from mmspeed.data.maintenance.prune_pack import prune as remove

    read_info(cache)
    plan = plan_prune(cache, keep_codec or [])
    if plan.empty:
        print("nothing to remove: samples refer to every entry")
        return
    print("\n".join(["removing:" if yes else "would remove:", *plan.lines()]))
    if not yes:
        print("run it again with --yes to remove them")
        return
    remove(cache, keep_codec or [])
    print(f"removed {plan.entries} entries")


@app.command()
def pack(
    cache: CacheFolder,
    shard_mb: Annotated[float, typer.Option("--shard-mb", min=0.001, help="Size of the new shards.")] = 256.0,
) -> None:
    """Merge small shards into large ones; entries keep their bytes. Not while anything uses the cache."""
    from mmspeed.data.cache.tables import read_info
    from mmspeed.data.maintenance.prune_pack import pack as merge_shards

    read_info(cache)
    report = merge_shards(cache, int(shard_mb * 1e6))
    copies = f", {report.duplicates} second copies removed" if report.duplicates else ""
    print(f"{report.before} shards are {report.after} now: {report.entries} entries copied{copies}")


@app.command()
def merge(
    into: Annotated[
        Path, typer.Argument(metavar="INTO", help="The cache that receives everything; created if missing.")
    ],
    sources: Annotated[list[Path], typer.Argument(metavar="FROM...", help="Caches to read; they are not changed.")],
) -> None:
    """Merge caches that were built on several machines. Their encoders and settings must be the same."""
    from mmspeed.data.maintenance.merge import merge as bring_together

    report = bring_together(into, sources)
    print(
        f"{into}: {report.samples} {report.noun}; {report.linked} shards taken as they are, {report.copied} entries copied, "
        f"{report.present} were present"
    )
    if report.split_conflicts:
        print(f"{report.split_conflicts} samples are held out in one cache only: the first cache's split counts")
    if report.held_out_copies:
        print(f"{report.held_out_copies} samples are held out because another one of the same content is")


@app.command()
def show(
    cache: CacheFolder,
    key: Annotated[
        str | None, typer.Argument(help="Key of a sample or an entry; without it, samples are listed.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples to list.")] = 20,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The picture to write; KEY.png in this folder if omitted.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the stored record as JSON, and draw no picture.")
    ] = False,
) -> None:
    """List samples, or decode one to a picture beside its source's frames and show its origin."""
    from mmspeed.data import DatasetCache

    dataset_cache = DatasetCache(cache)
    if key is None:
        for number, sample in enumerate(dataset_cache.samples):
            if number == count:
                break
            captions = ", ".join([f"{len(sample.text_keys)} captions", *sample.roles])
            print(f"{sample.key}  {sample.split:5} {sample.bucket!s:>14}  {captions}  {sample.source}")
        if len(dataset_cache.samples) > count:
            print(f"... and {len(dataset_cache.samples) - count} more")
        return
    record = details(dataset_cache, key)
    if as_json or not has_picture(record):
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    from mmspeed.preprocess.report.show import draw_entry

    path = output or Path(f"{key}.png")
    try:
        summary = draw_entry(dataset_cache, key, path)
    except UserError as error:
        if output is not None:
            raise
        print(json.dumps(record, indent=2, ensure_ascii=False))
        print(f"no picture: {error}", file=sys.stderr)
        return
    print(f"{path}: {summary}")


def has_picture(record: dict[str, Any]) -> bool:
    """True if the result of `details` is a latent, or a sample of latents."""
    return "latents" in record or record.get("section") == "latents"


def details(cache: DatasetCache, key: str) -> dict[str, Any]:
    """The row of a sample or an entry, with the parts of its key. Raises UserError for an unknown key."""
    sample = next((sample for sample in cache.samples if sample.key == key), None)
    if sample is not None:
        return {
            "sample": {**vars(sample), "bucket": str(sample.bucket)},
            "latents": [details(cache, latent) for latent in sample.latent_keys],
            "texts": [details(cache, text) for text in sample.text_keys],
            **{role: [details(cache, key) for key in keys] for role, keys in sample.roles.items()},
        }
    entry = cache.entry(key)
    return {**vars(entry), "meta": json.loads(entry.meta)}
