"""Prompts of `mmspeed sample`: a request for each video, from a list or from a file with one a line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmspeed.data.cache.keys import number_duplicates
from mmspeed.errors import UserError, nearest

JSON_LINES = (".jsonl", ".ndjson")
FILES = ("image", "last_image", "video", "control")


@dataclass(frozen=True)
class VideoRequest:
    """A video to sample; None: as the call or the run's config says. `line`: its number in the file that it came from, from 1."""

    prompt: str
    negative: str | None = None
    seed: int | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    image: str | None = None  # files that the video begins or ends with or goes by, as `conditioning_media` reads them
    last_image: str | None = None
    video: str | None = None
    prefix_frames: int | None = None
    control: str | None = None
    line: int = 0


class _Row(BaseModel):
    """The keys of a JSON line."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    negative: str | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    frames: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=8)
    width: int | None = Field(None, ge=8)
    image: str | None = None
    last_image: str | None = None
    video: str | None = None
    prefix_frames: int | None = Field(None, ge=1)
    control: str | None = None


def read_requests(path: str | Path) -> list[VideoRequest]:
    """The requests of a file, in order; empty lines are passed over.

    A file that ends in .jsonl or .ndjson has a JSON object a line (keys: prompt, negative, seed, frames, height, width, image, last_image,
    video, prefix_frames, control; files are taken from its folder), any other a prompt a line.
    Raises UserError, which names the line, for one that cannot be read, and for a file without prompts.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text: {error.reason} at byte {error.start}") from None
    of_json = path.suffix.lower() in JSON_LINES
    requests = [
        _of_json(line, number, path) if of_json else VideoRequest(line.strip(), line=number)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise UserError(f"{path}: there is no prompt in it")
    return requests


def noise_names(requests: Iterable[tuple[str, int]]) -> list[str]:
    """The names of the noise of (prompt, seed), in order: the prompt, numbered where one occurs again with the same seed."""
    requests = list(requests)
    by_seed = {seed: iter(number_duplicates(p for p, s in requests if s == seed)) for _, seed in requests}
    return [next(by_seed[seed]) for _, seed in requests]


def _of_json(line: str, number: int, path: Path) -> VideoRequest:
    origin = f"{path}, line {number}"
    try:
        row = _Row.model_validate_json(line)
    except ValidationError as error:
        raise UserError(f"{origin}: {_describe(error.errors()[0])}") from None
    files = {name: getattr(row, name) for name in FILES}
    places = {name: None if file is None else str(path.parent / file) for name, file in files.items()}
    return VideoRequest(**row.model_dump() | places, line=number)


def _describe(problem: Any) -> str:
    """A mistake in a JSON line."""
    keys, where = list(_Row.model_fields), ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{where}'{nearest(where, keys) or ' (known: ' + ', '.join(keys) + ')'}"
    if problem["type"] == "missing":
        return f"'{where}' is missing"
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"'{where}': {message}" if where else message
