"""Build a cache on Ray Data: captions and sources are blocks of rows, which actors encode into one cache.

An actor returns plain columns: the rows of the clips in the cache, and for each block one JSON text of everything else. By then the
block's entries are sealed, so a later failure does not lose them. If an actor dies, another repeats its block, and finds the entries
sealed before. The driver concludes like `CacheBuilder`: the tables have the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import pyarrow as pa

from mmspeed.config import Config, make_config, video_config
from mmspeed.data import CacheWriter
from mmspeed.data.cache.writer import repair
from mmspeed.device import SCHEDULER_NAMES, pick
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine
from mmspeed.media.rejections import Reason
from mmspeed.media.source import Source
from mmspeed.preprocess.build.coordination import ProcessRecord, locked, plain_rows, row_schema, rows_of_plain
from mmspeed.preprocess.build.offline import caption_failures, conclude, encode_captions, require_stored
from mmspeed.preprocess.build.setup import BuildSetup
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import Encoders, TrustedBatches
from mmspeed.preprocess.encoding.latent_stage import LatentStage
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.sample_table import ClipRow
from mmspeed.preprocess.records.stale_entries import StoredEntries
from mmspeed.preprocess.records.statistics import DataStatistics
from mmspeed.preprocess.sources.remote import StoreFile

SOURCES_A_BLOCK, CAPTIONS_A_BLOCK = 256, 4096
_BLOCKS_EACH = 4  # blocks for each worker, at least, if there is enough work, so that none waits long for the last
_TRIES = 3  # times that a block is repeated after its actor died, before the build fails

Item = TypeVar("Item")


def build_on_ray(config: Config, workers: int | None = None) -> BuildReport:
    """Build or complete the dataset cache of a config with `workers` Ray actors; return the outcome of every source.

    Uses the cluster that RAY_ADDRESS names, where the cache's folder and the sources must be on a file system that all machines
    share; without it, a local Ray that ends with the build. `workers` None: one for each accelerator or, without
    any, as many as the cores allow. Raises UserError like `CacheBuilder`, and if Ray is missing or fails.
    """
    started = time.monotonic()
    ray = import_ray()
    setup = BuildSetup(config, pick("cpu"))  # the driver encodes nothing
    setup.mend()
    setup.fit_when_missing()
    setup.check_buckets()
    setup.recipe.contents.settle()
    report = BuildReport.of(setup.root, setup.listing)
    first = BuildReport(setup.root, rejections=list(setup.listing.rejections))
    captions, first.texts_reused = _missing_captions(setup)
    parts = [ProcessRecord([], {"report": first.to_json(), "statistics": DataStatistics().to_json()})]
    with _running(ray, config, workers) as (count, actor):
        texts = [pa.table({"caption": block}) for block in _blocks(captions, CAPTIONS_A_BLOCK, count)]
        sources = [_table_of(block) for block in _blocks(setup.listing.sources, SOURCES_A_BLOCK, count)]
        parts += _encoded(ray, config, "captions", texts, count, actor)
        parts += _encoded(ray, config, "latents", sources, count, actor)
    _check(setup, parts[1:])
    return conclude(setup, parts, report, started)


def import_ray() -> Any:
    """Import the package `ray`, with Ray Data. Raises UserError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(f"--ray needs Ray Data ({error}): pip install 'ray[data]'") from None
    return ray


@contextmanager
def _running(ray: Any, config: Config, workers: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run Ray during the block; yields the number of actors and the resources of each. A Ray started here is ended."""
    if ray.is_initialized():
        raise UserError("Ray is already running in this process: end it with ray.shutdown() before the build")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    wish = 1 + config.preprocess.decode_workers  # cores of an actor
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            ray.init(address, **quiet)
        else:
            cores = max(len(os.sched_getaffinity(0)), workers or 1)
            # Ray's default of 15 would starve them beside other processes
            os.environ.setdefault("RAY_worker_niceness", "0")
            ray.init("local", include_dashboard=False, num_cpus=cores, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"Ray does not start: {str(error).splitlines()[0]}") from error
    try:
        resources = ray.cluster_resources()
        kind = config.device.kind
        names = list(SCHEDULER_NAMES.values()) if kind == "auto" else [SCHEDULER_NAMES[kind]]
        device = next((name for name in names if resources.get(name)), "")
        if kind != "auto" and SCHEDULER_NAMES[kind] != device:
            raise UserError(f"device.kind is {kind!r}, but Ray has no {SCHEDULER_NAMES[kind]} here")
        cores = int(resources.get("CPU", 1))
        count = workers or int(resources[device] if device else max(1, cores // wish))
        if count > (resources[device] if device else cores):
            has = f"{resources[device]:g} {device}s" if device else f"{cores} cores"
            raise UserError(f"--ray {count}: Ray has {has} here, and each worker needs one")
        requirement = {} if not device else {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}}
        yield count, {"num_cpus": max(1, min(wish, cores // count)), **requirement}
    finally:
        ray.shutdown()


def _encoded(
    ray: Any, config: Config, what: str, blocks: list[pa.Table], count: int, actor: dict[str, Any]
) -> list[ProcessRecord]:
    """Encode all blocks with `count` actors; return their parts in order. Raises UserError."""
    if not blocks:
        return []
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.log_internal_stack_trace_to_stdout = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    numbered = [block.append_column("block", pa.array([n] * len(block))) for n, block in enumerate(blocks)]
    results = ray.data.from_arrow(numbered).map_batches(
        EncodeActor,
        fn_constructor_args=(what, config.model_dump_json(by_alias=True)),
        compute=ray.data.ActorPoolStrategy(size=min(count, len(blocks))),
        batch_size=None,
        batch_format="pyarrow",
        ray_remote_args_fn=lambda: {"max_restarts": -1, "max_task_retries": _TRIES},
        **actor,
    )
    rows: list[list[ClipRow]] = [[] for _ in blocks]
    facts: dict[int, dict[str, Any]] = {}
    try:
        with ProgressLine(what, sum(map(len, blocks)), what.removesuffix("s")) as line:
            for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
                for row in table.to_pylist():
                    if row["facts"] is None:
                        rows[row["block"]] += rows_of_plain([row])
                        continue
                    facts[row["block"]] = block_facts = json.loads(row["facts"])
                    if "error" in block_facts:
                        raise UserError(block_facts["error"])
                    line.advance(len(blocks[row["block"]]))
    except ray.exceptions.RayTaskError:
        raise  # a bug of mmspeed, with its traceback
    except ray.exceptions.RayError as error:
        raise UserError(f"Ray gave up: {str(error).splitlines()[0]}") from error
    return [ProcessRecord(rows[number], facts[number]) for number in range(len(blocks))]


class EncodeActor:
    """A Ray actor that encodes a block of rows, seals its entries, and returns the rows.

    Args:
        what: `captions` or `latents`.
        config: the build's config as JSON.

    A UserError is returned as the answer, since Ray would wrap it and try again.
    """

    def __init__(self, what: str, config: str) -> None:
        self.what, self.config = what, video_config(make_config(json.loads(config), origin="Ray"), "Ray")
        self._writer: CacheWriter | None = None

    def __call__(self, block: pa.Table) -> pa.Table:
        number = block["block"][0].as_py()
        try:
            part = self._encode(block.to_pylist())
        except UserError as error:
            part = ProcessRecord([], {"error": str(error)})
        return _table_of_part(part, number)

    def _encode(self, rows: list[dict[str, Any]]) -> ProcessRecord:
        writer = self._begun()
        report, statistics = BuildReport(self.config.cache_dir), DataStatistics()
        clip_rows: list[ClipRow] = []
        failures: dict[str, str] = {}
        try:
            with BackgroundWriter(writer, remember=False) as store:
                if self.what == "captions":
                    failures = encode_captions(
                        self.encoders, [row["caption"] for row in rows], store, report, statistics
                    )
                else:
                    stage = LatentStage(
                        self.config, self.encoders, store, report, self.trusted, Recipe.of(self.config, builds=True)
                    )
                    clip_rows, statistics = stage.run([_source_of(row) for row in rows]), stage.statistics
                    failures = stage.failed_captions
        finally:
            writer.close()  # seals the shards, so that the reported entries exist
        facts: dict[str, Any] = {"report": report.to_json(), "statistics": statistics.to_json()}
        facts["captions_failed"] = failures
        if self.what == "latents":
            facts["codec"] = self.encoders.codec_fingerprint
        else:
            facts["text"] = self.encoders.text_fingerprint
        return ProcessRecord(clip_rows, facts)

    def _begun(self) -> CacheWriter:
        """The writer of this actor; the first block sets up the device and opens the cache."""
        if self._writer is None:
            root, settings = self.config.cache_dir, self.config.preprocess
            if not root.is_dir():
                raise UserError(f"a Ray worker does not see {root}: put it on a file system that all machines share")
            device = pick(self.config.device.kind, 0)
            device.activate()
            self.encoders = Encoders(self.config, device)
            self.trusted = TrustedBatches(settings.encode_batch, settings.exact_batches)
            if import_ray().get_runtime_context().was_current_actor_reconstructed:
                with locked(root / ".mend.lock", "waiting for another process to repair the cache"):
                    repair(root)  # cleans up after the dead actor
            self._writer = CacheWriter(root, int(settings.shard_mb * 1e6), mend=False)
        return self._writer


def _missing_captions(setup: BuildSetup) -> tuple[list[str], int]:
    """The distinct captions that the cache lacks, the empty one included, and the number that it has."""
    stored = StoredEntries(setup.root).keys
    missing, stored_count, checked = list[str](), 0, set[tuple[str, str]]()
    sources = () if setup.encoders.sees_pictures else setup.listing.sources  # those go with the latents
    captions = (caption for source in sources for caption in source.captions)
    for section, section_captions in (("null", iter([""])), ("texts", captions)):
        for caption in section_captions:
            key = setup.encoders.text_key(caption)
            if (section, key) not in checked:
                checked.add((section, key))
                if key in stored[section]:
                    stored_count += 1
                else:
                    missing.append(caption)
    return missing, stored_count


def _check(setup: BuildSetup, parts: Sequence[ProcessRecord]) -> None:
    """Raise UserError if the workers used other encoders than this machine, or their entries are not visible here."""
    paths = {source.name: source.path for source in setup.listing.sources}
    stored, failures = StoredEntries(setup.root), caption_failures(parts)
    encoders = {"codec": setup.encoders.codec_fingerprint, "text": setup.encoders.text_fingerprint}
    for part in parts:
        for name, fingerprint in encoders.items():
            if part.facts.get(name, fingerprint) != fingerprint:
                raise UserError(f"a Ray worker has another {name} encoder: give all machines the same files")
        for source, reason, _ in part.facts["report"]["rejections"]:
            if reason == Reason.MISSING_FILE.value and os.path.exists(paths.get(source, "")):
                raise UserError(f"a Ray worker does not see {paths[source]}: are all sources on a shared file system?")
        require_stored(
            part, stored, failures, "of Ray's workers", "is the cache on a file system that all machines share?"
        )


def _blocks(items: Sequence[Item], size: int, workers: int) -> list[Sequence[Item]]:
    """`items` cut into blocks of at most `size`, smaller if the workers could not share them evenly."""
    size = max(1, min(size, -(-len(items) // (_BLOCKS_EACH * workers))))
    return [items[start : start + size] for start in range(0, len(items), size)]


_SOURCE = pa.schema(
    [
        *((name, pa.string()) for name in ("name", "path", "kind", "split", "dataset", "remote", "column", "roles")),
        *((name, pa.int64()) for name in ("offset", "size")),
        ("captions", pa.list_(pa.string())),
    ]
)


def _table_of(sources: Sequence[Source]) -> pa.Table:
    return pa.Table.from_pylist([_row_of(source) for source in sources], _SOURCE)


def _row_of(source: Source) -> dict[str, Any]:
    row = {name: getattr(source, name) for name in _SOURCE.names}
    row["remote"] = None if source.remote is None else json.dumps(asdict(source.remote))
    row["roles"] = json.dumps([(role, _row_of(other)) for role, other in source.roles])
    return row


def _source_of(row: dict[str, Any]) -> Source:
    plain = {name: row[name] for name in _SOURCE.names if name not in ("captions", "remote", "roles")}
    roles = tuple((role, _source_of(other)) for role, other in json.loads(row["roles"]))
    remote = None if row["remote"] is None else json.loads(row["remote"])
    file = None if remote is None else StoreFile(**remote | {"hosts": tuple(remote["hosts"])})
    return Source(**plain, captions=tuple(row["captions"]), remote=file, roles=roles)


def _table_of_part(part: ProcessRecord, number: int) -> pa.Table:
    """The rows of a part, and a last row that holds everything else."""
    rows = [*plain_rows(part.rows), {"facts": json.dumps(part.facts)}]
    schema = row_schema().append(pa.field("facts", pa.string())).append(pa.field("block", pa.int64()))
    return pa.Table.from_pylist([row | {"block": number} for row in rows], schema)
