"""The tables of a cache: entries (immutable, one per shard), samples and rejects (replaced as a whole), and `cache.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mmspeed.config.roles import ROLES
from mmspeed.errors import UserError
from mmspeed.rng import VERSION
from mmspeed.shapes import Bucket
from mmspeed.version import __version__

from .files import write_whole
from .seals import BLANK, is_sealed, seal, sealed_file
from .versions import VERSIONS, check_versions

SCHEMA_VERSION = 2
SECTIONS = ("latents", "texts", "null")
SPLITS = ("train", "val")
SAMPLES_FILE = Path("index/samples.parquet")
_REJECTS = Path("rejects/rejects.parquet")
NULL_KEY = b"mmspeed.null_key"  # metadata of the table of samples
GENERATOR = b"mmspeed.generator"  # likewise


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the entries' index: one encoded clip, image or caption, and the location of its bytes."""

    key: str
    section: str
    shard: str  # path of the tar, relative to the cache
    offset: int  # of the safetensors payload in the tar
    bytes: int
    checksum: str  # first 32 hexadecimal digits of the payload's SHA-256
    bucket: str | None
    tokens: int
    content_id: str
    frames: tuple[int, ...]  # frames taken from the source
    fps: float | None
    source: str | None  # None after a repair: entries do not depend on file names
    meta: str  # JSON of the parts of the key

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Entry:
        """The entry that a row of the index's table describes."""
        return cls(**{**row, "frames": tuple(row["frames"])})

    @property
    def repeated(self) -> int:
        """Frames that repeat the one before: gaps of a variable frame rate, or a rate below the entry's."""
        return len(self.frames) - len(set(self.frames))


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample of the data set: its latents, its captions (none: the empty caption), and its split.

    Of several latents (windows or crops of one clip, all of one bucket) each use draws one. A sample whose source failed after
    the order of training was fixed is `lost`: it keeps its position in the order, with weight 0. `dataset` is the name of its
    source's data set, one of the config's `data.dataset_names`. `roles` has the keys of further roles (`mmspeed.config.roles`), each
    as many as there are latents, in the same order.
    """

    key: str
    latent_keys: tuple[str, ...]
    text_keys: tuple[str, ...]
    split: str
    bucket: Bucket
    source: str
    tokens: int = 0
    content_id: str = ""
    lost: bool = False
    dataset: str = ""
    roles: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def entries(self) -> dict[str, tuple[str, ...]]:
        """The keys of its entries by role."""
        return {"video": self.latent_keys, "caption": self.text_keys, **self.roles}

    def keys(self, section: str) -> tuple[str, ...]:
        """The keys of its entries in a section, of all roles."""
        return tuple(key for role, keys in self.entries.items() if ROLES[role].section == section for key in keys)


class RejectionRow(NamedTuple):
    """One source that was not encoded, with the reason."""

    path: str
    reason: str
    detail: str = ""


def entry_schema() -> pa.Schema:
    """The columns of `index/<shard>.parquet`."""
    return pa.schema(
        {
            "key": pa.string(),
            "section": pa.string(),
            "shard": pa.string(),
            "offset": pa.int64(),
            "bytes": pa.int64(),
            "checksum": pa.string(),
            "bucket": pa.string(),
            "tokens": pa.int64(),
            "content_id": pa.string(),
            "frames": pa.list_(pa.int32()),
            "fps": pa.float64(),
            "source": pa.string(),
            "meta": pa.string(),
        }
    )


def sample_schema() -> pa.Schema:
    """The columns of `index/samples.parquet`, without those of further roles (`with_roles`)."""
    return pa.schema(
        {
            "key": pa.string(),
            "latent_keys": pa.list_(pa.string()),
            "text_keys": pa.list_(pa.string()),
            "split": pa.string(),
            "bucket": pa.string(),
            "source": pa.string(),
            "tokens": pa.int64(),
            "content_id": pa.string(),
            "lost": pa.bool_(),
            "dataset": pa.string(),
            "captions": pa.int32(),
        }
    )


def with_roles(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema of a table of samples with a column of keys for each further role in `names`; that of another table as it is."""
    if "latent_keys" not in schema.names:
        return schema
    kind = schema.field("latent_keys").type
    more = [pa.field(f"{role}_keys", kind) for role in ROLES if f"{role}_keys" in names]
    return pa.schema([*schema, *more], schema.metadata)


def parquet_bytes(
    rows: Sequence[Mapping[str, Any]], schema: pa.Schema, facts: Mapping[str, str] | None = None
) -> bytes:
    """Rows as the bytes of a sealed Parquet file, with `facts` in its footer."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        writer.write_table(pa.Table.from_pylist(list(rows), schema=schema))
        writer.add_key_value_metadata({**(facts or {}), "mmspeed.seal": BLANK})
    return seal(sink.getvalue().to_pybytes())


def read_facts(path: Path) -> dict[str, str]:
    """The footer's facts of a Parquet file of the cache. Raises UserError if it is damaged."""
    try:
        metadata = pq.read_metadata(path, memory_map=True).metadata or {}
        return {name.decode(): value.decode() for name, value in metadata.items() if name.startswith(b"mmspeed.")}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def read_table(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a Parquet file of the cache, or the columns of `schema`, with those of further roles that it has.

    Raises UserError unless it is exactly as it was written. The seal is checked first, so damaged bytes reach no parser.
    """
    try:
        if not sealed_file(path):
            raise ValueError("not as it was written")
        if schema is not None:
            schema = with_roles(schema, pq.read_schema(path, memory_map=True).names)
        names = None if schema is None else schema.names
        table = pq.read_table(path, memory_map=True, columns=names, partitioning=None)
        if schema is not None and (table.schema.names != schema.names or table.schema.types != schema.types):
            raise ValueError(f"its columns are {', '.join(table.schema.names)}")
        return table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def read_columns(path: Path, schema: pa.Schema) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Yield the columns of a Parquet file that `schema` names one by one, for a table too large to load as a whole, and those of roles.

    Raises like `read_table`.
    """
    try:
        if not sealed_file(path):
            raise ValueError("not as it was written")
        with pq.ParquetFile(path, memory_map=True) as file:
            for name in with_roles(schema, file.schema_arrow.names).names:
                yield name, file.read(columns=[name])[name]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"cache table {path} is damaged ({error}); delete it and run mmspeed preprocess again")


def index_path(root: Path, shard: str) -> Path:
    """The index file of a shard's entries, such as `index/texts-000000.parquet` for `texts/000000.tar`."""
    return root / "index" / (shard.removesuffix(".tar").replace("/", "-") + ".parquet")


def shard_of_index(path: Path) -> str:
    """The shard, relative to the cache, whose entries an index file lists."""
    return path.stem.replace("-", "/") + ".tar"


def index_files(root: Path) -> list[Path]:
    """The entries' index files, in the order of their shards."""
    return sorted(path for path in (root / "index").glob("[!.]*.parquet") if path != root / SAMPLES_FILE)


def write_index(root: Path, shard: str, entries: Sequence[Entry], size: int, sha256: str, replace: bool = True) -> bool:
    """Write the index of one closed shard; return True if it was written, False if `replace` is false and one existed.

    `size` and `sha256` are the shard's size in bytes and its digest, by which `verify` detects every change of it.
    """
    rows = [dataclasses.asdict(entry) for entry in entries]
    facts = {"mmspeed.shard_bytes": str(size), "mmspeed.shard_sha256": sha256}
    return write_whole(index_path(root, shard), parquet_bytes(rows, entry_schema(), facts), replace=replace)


def write_samples(root: Path | str, samples: Iterable[Sample], null_key: str | None = None) -> None:
    """Replace the table of samples; rows are sorted by key, so that it does not depend on the order of `samples`.

    `null_key` is the entry of the empty caption that belongs to these samples' texts; it must be given if the cache
    holds empty captions of several encoders. Raises ValueError if two samples have the same key or a split is unknown.
    """
    ordered = sorted(samples, key=lambda sample: sample.key)
    for before, sample in zip([None, *ordered], ordered, strict=False):
        if before is not None and before.key == sample.key:
            raise ValueError(f"two samples have the key {sample.key}; number_duplicates makes keys distinct")
        if sample.split not in SPLITS:
            raise ValueError(f"sample {sample.key}: split is {sample.split!r}, not one of {SPLITS}")
    present = {role for sample in ordered for role in sample.roles}
    roles = [role for role in ROLES if role in present]
    rows = [
        {
            **vars(sample),
            "bucket": sample.bucket.name,
            "captions": len(sample.text_keys),
            **{f"{role}_keys": sample.roles.get(role, ()) for role in roles},
        }
        for sample in ordered
    ]
    facts = {NULL_KEY: null_key, GENERATOR: str(VERSION)}  # of the draws of splits and buckets
    schema = with_roles(sample_schema(), [f"{role}_keys" for role in roles]).with_metadata(
        {name: value for name, value in facts.items() if value}
    )
    write_whole(Path(root) / SAMPLES_FILE, parquet_bytes(rows, schema))


def read_samples(root: Path) -> tuple[list[Sample], str | None]:
    """The samples of the last preprocess, sorted by key, and the key of their empty caption if it was given."""
    path = root / SAMPLES_FILE
    if not path.exists():
        raise UserError(f"cache {root} lists no samples yet; run mmspeed preprocess to its end")
    table = read_table(path, sample_schema())
    roles = [role for role in ROLES if f"{role}_keys" in table.schema.names]
    null_key = (table.schema.metadata or {}).get(NULL_KEY)
    samples = []
    for row in table.drop_columns(["captions"]).to_pylist():
        row["bucket"] = Bucket.parse(row["bucket"])
        row["latent_keys"], row["text_keys"] = tuple(row["latent_keys"]), tuple(row["text_keys"])
        keys = {role: tuple(row.pop(f"{role}_keys")) for role in roles}
        samples.append(Sample(**row, roles={role: some for role, some in keys.items() if some}))
    return samples, null_key.decode() if null_key else None


def check_recipe(root: Path) -> None:
    """Raise UserError if the cache at `root` was made by another recipe than this mmspeed's, and like `read_info`.

    Where `cache.json` was lost, the table of samples says how splits and buckets were drawn.
    """
    if (root / "cache.json").exists():
        read_info(root)
    elif (root / SAMPLES_FILE).exists():
        check_versions({"generator": int(read_facts(root / SAMPLES_FILE).get(GENERATOR.decode(), 1))}, root)


def write_rejects(root: Path | str, rejections: Iterable[tuple[str, str, str]]) -> None:
    """Replace the list of rejected sources: (path, reason, detail) of each."""
    schema = pa.schema({name: pa.string() for name in RejectionRow._fields})
    rows = [RejectionRow(*rejection)._asdict() for rejection in sorted(rejections)]
    write_whole(Path(root) / _REJECTS, parquet_bytes(rows, schema))


def read_rejects(root: Path) -> list[dict[str, str]]:
    """The rejected sources, as dicts with path, reason and detail."""
    paths = sorted((root / _REJECTS.parent).glob("[!.]*.parquet"))
    return [row for path in paths for row in read_table(path).to_pylist()]


def write_info(root: Path | str, info: Mapping[str, Any]) -> None:
    """Replace `cache.json`: the cache's encoders, fps and number types, and its schema and version."""
    content = {**info, "schema": SCHEMA_VERSION, "mmspeed": __version__, "seal": BLANK}
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_whole(Path(root) / "cache.json", seal((text + "\n").encode()))


def read_info(root: Path | str) -> dict[str, Any]:
    """The content of `cache.json`. Raises UserError if there is no cache, or one of another schema or of an earlier mmspeed."""
    path = Path(root) / "cache.json"
    if not path.exists():
        raise UserError(f"no dataset cache at {root}; run mmspeed preprocess first")
    try:
        data = path.read_bytes()
        info = json.loads(data)
        schema = info["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a description of a cache ({error!r}); delete it and run mmspeed preprocess"
        ) from error
    if schema != SCHEMA_VERSION:
        version = info.get("mmspeed", "of unknown version")
        raise UserError(
            f"cache {root} has schema {schema} (made by mmspeed {version}), this mmspeed reads {SCHEMA_VERSION}; "
            "name another folder under data.cache and run mmspeed preprocess"
        )
    if not is_sealed(data):
        raise UserError(
            f"{path} is not as it was written; delete it and run mmspeed preprocess: nothing is encoded again"
        )
    check_versions({**(dict.fromkeys(VERSIONS, 1) if "build" in info else {}), **info.get("versions", {})}, root)
    return info
