"""Named reasons for rejecting a source, so that nothing is dropped uncounted (law 3)."""

from __future__ import annotations

import errno
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from mmspeed.redaction import readable

_LONGEST_NAME, _LONGEST_DETAIL = 1024, 512  # characters of a rejection that are kept


class Reason(str, Enum):
    """The reasons a source can be rejected for. The value is stored in the cache's `rejects` table."""

    NO_CAPTION = "no_caption"
    CAPTION_ENCODING = "caption_encoding"
    ORPHAN_CAPTION = "orphan_caption"
    NOT_MEDIA = "not_media"
    MISSING_FILE = "missing_file"
    UNREADABLE = "unreadable"
    EMPTY_FILE = "empty_file"
    TOO_LARGE = "too_large"
    NO_VIDEO_STREAM = "no_video_stream"
    TRUNCATED = "truncated"
    UNDECODABLE = "undecodable"
    NO_TIMES = "no_times"
    UNKNOWN_GEOMETRY = "unknown_geometry"
    UNKNOWN_COLOURS = "unknown_colours"
    INTERLACED = "interlaced"
    TOO_SHORT = "too_short"
    TOO_SMALL = "too_small"
    NO_BUCKET = "no_bucket"
    NOT_KEPT = "not_kept"
    REPEATED = "repeated"
    TIME_LIMIT = "time_limit"
    DECODER_CRASHED = "decoder_crashed"
    BAD_ROW = "bad_row"
    ROLE_DIFFERS = "role_differs"
    UNSAFE_NAME = "unsafe_name"
    BAD_ADDRESS = "bad_address"
    PICKLE = "pickle"
    BELOW_MINIMUM = "below_minimum"
    ABOVE_MAXIMUM = "above_maximum"
    NO_SCORE = "no_score"
    ENCODE_FAILED = "encode_failed"
    CAPTION_FAILED = "caption_failed"

    def __str__(self) -> str:
        return self.value

    @property
    def explanation(self) -> str:
        """One sentence that explains the reason."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    Reason.NO_CAPTION: "The media file has no caption, or only an empty one; data.missing_caption says what to do with such.",
    Reason.CAPTION_ENCODING: "A caption is neither UTF-8 nor in the encoding of its byte-order mark or of data.caption_encoding.",
    Reason.ORPHAN_CAPTION: "The caption file has no media file of the same name beside it.",
    Reason.NOT_MEDIA: "The file is neither media nor a caption.",
    Reason.MISSING_FILE: "The file that a manifest or a link names does not exist.",
    Reason.UNREADABLE: "The file, its caption or the folder cannot be read: permissions, a failing disk, or a store that does not answer.",
    Reason.EMPTY_FILE: "The file holds no bytes.",
    Reason.TOO_LARGE: "The file or its picture is larger than data.max_file_mb or data.max_pixels allow.",
    Reason.NO_VIDEO_STREAM: "The file opens, but holds no moving or still picture (sound only, or cover art).",
    Reason.TRUNCATED: "The file ends before its declared length: an unfinished copy, download or recording.",
    Reason.UNDECODABLE: "No decoder can read the picture: damaged data, or no known format.",
    Reason.NO_TIMES: "The stream states no times of its frames, as raw .h264 and .hevc do not, or times that contradict their order.",
    Reason.UNKNOWN_GEOMETRY: "The container shows the picture in a way that is not applied here: sheared, turned by no right angle, stretched.",
    Reason.UNKNOWN_COLOURS: "The stored numbers are of colours that are not converted here; the detail says which.",
    Reason.INTERLACED: "The video is interlaced, and this FFmpeg has no filter for it, or only its later frames say so.",
    Reason.TOO_SHORT: "The clip is shorter than the shortest video bucket at data.fps.",
    Reason.TOO_SMALL: "The picture is smaller than every bucket, and data.allow_upscale is false.",
    Reason.NO_BUCKET: "No bucket is for this kind: an image without an F = 1 bucket, or a video with no other.",
    Reason.NOT_KEPT: "Every bucket that the source fits was drawn out by data.buckets[].keep.",
    Reason.REPEATED: "Too many frames would repeat the one before (data.max_repeated): gaps, or a rate far below data.fps.",
    Reason.TIME_LIMIT: "Probing or decoding took longer than preprocess.time_limit.",
    Reason.DECODER_CRASHED: "The decoder process died on this file, or was killed twice before it was ready.",
    Reason.BAD_ROW: "The manifest row cannot be read, or lacks a required value.",
    Reason.ROLE_DIFFERS: "A file of another role, such as a control, has not the size, frames and times of its video; the detail says which.",
    Reason.UNSAFE_NAME: "The archive member is a link, a device, or has a name that leads out of its folder.",
    Reason.BAD_ADDRESS: "The manifest row names an address whose protocol or network is not asked (data.allow_addresses), or whose package is missing.",
    Reason.BELOW_MINIMUM: "A score of the source is below data.min; the detail names the column.",
    Reason.ABOVE_MAXIMUM: "A score of the source is above data.max; the detail names the column.",
    Reason.NO_SCORE: "A score that data.min or data.max names is missing, or no number.",
    Reason.PICKLE: "The file is a pickle or holds one: reading it could run any code, so it is never opened.",
    Reason.ENCODE_FAILED: "The file decoded, but encoding its frames failed.",
    Reason.CAPTION_FAILED: "The text encoder's numbers for the caption are not finite (try text.dtype: float32).",
}


# Reasons of which the explanation says little without the detail: summaries show it.
TOLD: frozenset[Reason] = frozenset(
    {Reason.BAD_ROW, Reason.BAD_ADDRESS, Reason.CAPTION_ENCODING, Reason.NO_SCORE, Reason.ROLE_DIFFERS}
)


def told(reason: str, examples: Iterable[tuple[str, str]]) -> list[str]:
    """Lines on sources that were rejected for a reason, (name, detail) of each, where a name alone says too little."""
    return [f"    {name}: {detail}" for name, detail in examples] if Reason(reason) in TOLD else []


@dataclass(frozen=True)
class Rejection:
    """A source that is not encoded, with the reason. `source` is its readable name.

    Names and details come from untrusted files: both are made readable and short here, in one place.
    """

    source: str
    reason: Reason
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", _short(readable(self.source[: 2 * _LONGEST_NAME]), _LONGEST_NAME))
        object.__setattr__(self, "detail", _short(readable(self.detail[: 2 * _LONGEST_DETAIL]), _LONGEST_DETAIL))


def reasons_in_words(rejections: Sequence[Rejection], most: int = 3) -> str:
    """The most frequent reasons with their counts and explanations, and what the first of each is where that says more."""
    parts = []
    for reason, count in Counter(rejection.reason for rejection in rejections).most_common(most):
        first = next(one for one in rejections if one.reason == reason)
        example = f" {first.detail}." if reason in TOLD else ""
        parts.append(f"{count} {reason}: {reason.explanation}{example}")
    return "; ".join(parts)


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


_BY_ERRNO = {
    errno.EACCES: "no permission to read it",
    errno.EPERM: "no permission to read it",
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "a part of its path is no folder",
    errno.EISDIR: "it is a folder",
    errno.ELOOP: "its links lead in a circle",
    errno.ENAMETOOLONG: "its path is too long",
    errno.EIO: "the disk or its network reports an error",
    errno.ESTALE: "its network file system has lost it",
    errno.ETIMEDOUT: "its file system or store did not answer in time",
    errno.ENOMEM: "it needs more memory than a process that reads files may take",
    errno.EMFILE: "this process has too many files open",
    errno.ENFILE: "this machine has too many files open",
}
_BY_KIND: tuple[tuple[type[BaseException], str], ...] = (
    (MemoryError, "it needs more memory than a process that reads files may take"),
    (UnicodeError, "its text is not UTF-8"),
    (EOFError, "it ends too early"),
    (RecursionError, "its parts are nested too deeply"),
    (TimeoutError, "its file system or store did not answer in time"),
    (ConnectionError, "the connection to its store was lost"),
    (ArithmeticError, "it states a size, a rate or a time that cannot be"),
    (LookupError, "it lacks a part that another part names"),
    (OSError, "reading it failed"),
    (ValueError, "its parts contradict each other"),
)
_SIGNALS = {
    signal.SIGKILL: "was killed, often because the machine ran out of memory",
    signal.SIGTERM: "was told to end",
    signal.SIGSEGV: "crashed: compiled code read memory that is not its own",
    signal.SIGABRT: "crashed: compiled code gave up",
    signal.SIGBUS: "crashed: a disk is full, or a file was cut while it was read",
    signal.SIGFPE: "crashed: a number that compiled code cannot divide by",
    signal.SIGILL: "crashed: compiled code is for another kind of processor",
}


def in_words(error: BaseException) -> str:
    """The meaning of an exception for people: words, and its own text where it has one; no class name or number alone."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    words = next(
        (words for kind, words in _BY_KIND if isinstance(error, kind)), "reading it failed in an unforeseen way"
    )
    return f"{words} ({text})" if text else words


def death_in_words(code: int) -> str:
    """The end of a process by its return code: words, and the signal or exit code."""
    if code >= 0:
        return f"ended by itself (exit code {code})"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was ended by signal {-code}"
    return f"{_SIGNALS.get(number, 'was ended by a signal')} ({number.name})"


class Rejected(Exception):  # noqa: N818 (an outcome, not an error)
    """Raised while a source is probed, decoded or fitted; the caller turns it into a `Rejection`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail

    def of(self, source: str) -> Rejection:
        """The `Rejection` of the source with this name."""
        return Rejection(source, self.reason, self.detail)
