"""Pretrained weights on disk: finding them by folder or hub id, and fingerprints that need no loading.

Only safetensors are read, never pickles. Every error names the config key at fault, such as `vae.pretrained`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError

BLOCK = 64 * 1024
BLOCKS = 16
WHOLE = 2 * BLOCK * BLOCKS  # safetensors up to this size are hashed whole
VOLATILE = ("_diffusers_version", "_name_or_path", "transformers_version")  # written anew by every save
HEADER_LIMIT = 100 << 20  # bytes; that of safetensors itself
# beside the weights in a model's folder: settings, stops, tokenizers, code, licences
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(
    pretrained: str, subfolders: Iterable[str | None], revision: str | None, patterns: Iterable[str], key: str
) -> Path:
    """The local folder of `pretrained`: itself, or the snapshot of a hub id, fetched if it is not cached.

    Only files in `subfolders` (None: the top) whose names match `patterns` are fetched. Raises UserError, naming `key`,
    when there is no such folder, no such repository or revision, or the hub cannot be reached.
    """
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{key}: {pretrained} is a file; name the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(pretrained):
        raise UserError(f"{key}: no folder {pretrained}")
    wanted = [f"{sub}/{name}" if sub else name for sub in subfolders for name in patterns]
    return _snapshot(pretrained, revision, wanted, key)


def _snapshot(repo: str, revision: str | None, patterns: list[str], key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        with quiet():
            return Path(snapshot_download(repo, revision=revision, allow_patterns=[*patterns, "model_index.json"]))
    except GatedRepoError:
        problem = "asks you to accept its terms: do so on its page, then `hf auth login`"
    except RepositoryNotFoundError:
        problem = "is neither a folder here nor a repository on the hub (a private one needs `hf auth login`)"
    except RevisionNotFoundError:
        problem = f"has no revision {revision!r} on the hub"
    except HFValidationError:
        problem = "is neither a folder here nor a hub id (owner/name)"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        problem = (
            "is no folder here, not in the hub's cache, and the hub cannot be reached: give a folder, or go online once"
        )
    raise UserError(f"{key}: {repo} {problem}")


def inside(folder: Path, subfolder: str | None, key: str, section: str) -> Path:
    """`folder/subfolder`. Raises UserError, naming `key` and the section's `subfolder`, when no model is there."""
    place = folder / subfolder if subfolder else folder
    if not place.is_dir():
        raise UserError(f"{section}.subfolder: {folder} ({key}) has no folder {subfolder!r}{_holds(folder)}")
    if not (place / "config.json").is_file():
        hint = f"; it is a whole pipeline: set {section}.subfolder" if (place / "model_index.json").exists() else ""
        raise UserError(f"{key}: {place} holds no config.json{hint}{_holds(place) if hint else ''}")
    return place


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in a folder, without hidden ones."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _holds(folder: Path) -> str:
    names = folders_in(folder)
    return f" (folders there: {', '.join(names[:12])})" if names else ""


def copy_small_files(folder: Path, target: Path, without: Iterable[str] = ()) -> None:
    """Copy the files beside the weights of a model's folder, but for those whose names match the patterns `without`."""
    for path in sorted(folder.iterdir()):
        wanted = any(fnmatch(path.name, pattern) for pattern in SMALL_FILES)
        if wanted and path.is_file() and not any(fnmatch(path.name, name) for name in (".*", "*.index.json", *without)):
            shutil.copyfile(path, target / path.name)


def read_json(path: Path, key: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError, naming `key`, when it holds none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read as JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{key}: {path} holds no JSON object")
    return tree


def weight_patterns(stem: str) -> tuple[str, ...]:
    """Names of the files that `weight_files` may want, as patterns; without the variants of other precisions."""
    return ("config.json", f"{stem}.safetensors", f"{stem}-*-of-*.safetensors", f"{stem}.safetensors.index.json")


def weight_files(folder: Path, stem: str, key: str) -> list[Path]:
    """The safetensors of a model: `<stem>.safetensors`, or the shards that its index names.

    Raises UserError, naming `key`, when there are none or a shard is missing.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(
            f"{key}: {folder} holds no {stem}.safetensors (mmspeed reads no pickles such as .bin: convert them)"
        )
    names = sorted(set(read_json(index, key).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise UserError(f"{key}: {index} names {missing[0] if missing else 'no files'}, which {folder} lacks")
    return [index, *(folder / name for name in names)]


def header_of(path: Path, key: str) -> dict[str, Any]:
    """The header of a safetensors file, {name: {"dtype", "shape", "data_offsets"}}. Raises UserError for another file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_LIMIT:
                raise ValueError("its header is not one of safetensors")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read as safetensors: {error}") from None
    header.pop("__metadata__", None)
    return header


def fingerprint(root: Path, files: Iterable[Path], settings: Mapping[str, object]) -> str:
    """sha256 over files (by their path below `root`) and the settings that change the numbers.

    A `config.json` counts without the keys that change with every save. Large safetensors count by size, header and 16
    blocks of 64 KiB spread over them; all else counts whole.
    """
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode())
    for path in sorted(files):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
        digest.update(_file_digest(path))
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    if path.name == "config.json":
        tree = json.loads(path.read_text(encoding="utf-8"))
        digest.update(json.dumps(_without_volatile(tree), sort_keys=True).encode())
        return digest.digest()
    size = path.stat().st_size
    with open(path, "rb") as file:
        if path.suffix != ".safetensors" or size <= WHOLE:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
            return digest.digest()
        digest.update(f"{size}".encode())
        prefix = file.read(8)
        digest.update(prefix + file.read(min(int.from_bytes(prefix, "little"), size - 8)))
        for i in range(BLOCKS):
            file.seek((size - BLOCK) * i // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.digest()


def _without_volatile(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _without_volatile(value) for name, value in tree.items() if name not in VOLATILE}
    return [_without_volatile(value) for value in tree] if isinstance(tree, list) else tree


def first_line(error: Exception) -> str:
    """Kind and first line of a library's error, for the end of one of ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without the libraries' progress bars, reports and warnings; their settings are put back afterwards."""
    import huggingface_hub.utils as hub

    names = ("transformers", "diffusers", "huggingface_hub")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    bars = _library_bars()
    hub_bars = not hub.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    for _, disable in bars:
        disable()
    hub.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for enable, _ in bars:
            enable()
        if hub_bars:
            hub.enable_progress_bars()


def _library_bars() -> list[tuple[Any, Any]]:
    """(enable, disable) of the progress bars of those libraries that show them now and are loaded."""
    import sys

    bars = []
    for name in ("transformers.utils.logging", "diffusers.utils.logging"):
        module = sys.modules.get(name)
        if module is not None and module.is_progress_bar_enabled():
            bars.append((module.enable_progress_bar, module.disable_progress_bar))
    return bars
