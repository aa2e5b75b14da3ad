"""What became of every source: the end of `mmspeed preprocess`, in numbers and in lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmspeed.data import Sample
from mmspeed.errors import UserError
from mmspeed.log import format_seconds
from mmspeed.preprocess.reasons import Reason, Rejection

EXAMPLES = 3  # rejected sources shown for each reason; all of them stand in rejects/


@dataclass
class BuildReport:
    """Counts of one run of preprocess. `sources` = `encoded` + `reused` + the rejections that are sources."""

    root: Path
    files: int = 0  # files looked at
    sources: int = 0  # media with captions that were found
    ignored: int = 0  # hidden files
    encoded: int = 0
    reused: int = 0
    texts: int = 0
    texts_reused: int = 0
    captions_cut: int = 0  # cut to data.max_caption_chars
    captions_repaired: int = 0  # held bytes that are no UTF-8, which became U+FFFD
    captions_truncated: int = 0  # cut to text.max_tokens by the encoder
    seconds: float = 0.0
    seconds_of_video: float = 0.0
    decoders: Counter[str] = field(default_factory=Counter)
    rejections: list[Rejection] = field(default_factory=list)
    buckets: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)

    _SUMS = ("encoded", "reused", "texts", "texts_reused", "captions_truncated", "seconds_of_video")

    def to_json(self) -> dict[str, Any]:
        """What the processes tell each other."""
        counts = {name: getattr(self, name) for name in self._SUMS}
        rejections = [[r.source, r.reason.value, r.detail] for r in self.rejections]
        return counts | {"decoders": dict(self.decoders), "rejections": rejections}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BuildReport:
        report = cls(root=Path(), **{name: data[name] for name in cls._SUMS})
        report.decoders = Counter(data["decoders"])
        report.rejections = [Rejection(s, Reason(r), d) for s, r, d in data["rejections"]]
        return report

    def merge(self, parts: Sequence[BuildReport]) -> None:
        """Take the sums over all processes' parts (this process's own among them)."""
        for name in self._SUMS:
            setattr(self, name, sum(getattr(part, name) for part in parts))
        self.decoders = sum((part.decoders for part in parts), Counter())
        self.rejections = [rejection for part in parts for rejection in part.rejections]

    def count_samples(self, samples: Sequence[Sample]) -> None:
        self.buckets = Counter(str(sample.bucket) for sample in samples)
        self.splits = Counter(sample.split for sample in samples)

    @property
    def reasons(self) -> Counter[str]:
        """Rejections by the name of their reason."""
        return Counter(rejection.reason.value for rejection in self.rejections)

    def require_some(self) -> None:
        """Raises UserError when no source at all ended in the cache."""
        if self.encoded + self.reused == 0:
            shown = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common(4))
            raise UserError(
                f"none of the {self.files} files could be encoded ({shown or 'no media found'}); "
                f"every one is listed with its reason in {self.root / 'rejects'}"
            )

    def lines(self) -> list[str]:
        """The summary that people read."""
        lines = [
            f"cache {self.root}: {self.encoded + self.reused} of {self.sources} sources in it"
            f" ({self.encoded} encoded now, {self.reused} already there)",
            f"  captions: {self.texts} encoded now, {self.texts_reused} already there",
            f"  samples: {_counts(self.splits)}; buckets (frames x height x width): {_counts(self.buckets)}",
        ]
        if self.encoded:
            rate = self.encoded / self.seconds if self.seconds else 0.0
            lines.append(
                f"  time: {format_seconds(self.seconds)}, {rate:.1f} clips/s,"
                f" {self.seconds_of_video:.0f} s of video; decoded by {_counts(self.decoders)}"
            )
        if self.captions_cut or self.captions_truncated:
            lines.append(
                f"  captions cut: {self.captions_cut} to data.max_caption_chars, {self.captions_truncated} to text.max_tokens"
            )
        if self.captions_repaired:
            lines.append(f"  captions with bytes that are no UTF-8: {self.captions_repaired}; such signs became U+FFFD")
        if self.ignored:
            lines.append(f"  hidden files ignored: {self.ignored}")
        if self.rejections:
            lines.append(f"  rejected: {len(self.rejections)}, listed in {self.root / 'rejects'}")
            for reason, count in self.reasons.most_common():
                names = [r.source for r in self.rejections if r.reason.value == reason]
                more = ", ..." if count > EXAMPLES else ""
                lines.append(f"    {reason:<16} {count:>5}  {', '.join(names[:EXAMPLES])}{more}")
        return lines


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"
