"""Build the table of samples from accepted sources. Pure: nothing is opened, decoded or encoded here."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmspeed.config.schema import DataConfig
from mmspeed.data import Sample
from mmspeed.data.cache.keys import number_duplicates, sample_key
from mmspeed.data.cache.splits import hold_out_copies
from mmspeed.media.rejections import Reason, Rejection
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.shapes import Bucket, Strides


@dataclass(frozen=True)
class PlannedSource:
    """The plan of one accepted source: its split, and a clip for each bucket, window and crop."""

    source: Source
    split: str
    content_id: str
    clips: tuple[Clip, ...]


@dataclass(frozen=True)
class ClipRow:
    """One clip in the form that the table of samples needs; processes exchange these rows."""

    source: str
    split: str
    content_id: str
    bucket: str
    window: int
    crop: int
    latent_key: str
    text_keys: tuple[str, ...]
    dataset: str = ""
    encoded: bool = False  # a clip of its source was encoded in this run
    roles: tuple[str, ...] = ()  # further ones, and the keys of their latents in the same order
    role_keys: tuple[str, ...] = ()

    @property
    def latent_keys(self) -> tuple[str, ...]:
        """The keys of the latents of all its roles."""
        return (self.latent_key, *self.role_keys)

    @property
    def order(self) -> tuple[str, str, int, int]:
        """The sort key of a row, independent of the process."""
        return self.source, self.bucket, self.window, self.crop


def rows_of(
    planned: Iterable[PlannedSource], latent_key: Callable[[Clip], str], text_key: Callable[[str, Clip], str]
) -> Iterator[ClipRow]:
    """Yield a row for every clip."""
    for one in planned:
        for clip in one.clips:
            yield ClipRow(
                source=one.source.name,
                split=one.split,
                content_id=one.content_id,
                bucket=clip.bucket.name,
                window=clip.window,
                crop=clip.crop_number,
                latent_key=latent_key(clip),
                text_keys=tuple(text_key(caption, clip) for caption in one.source.captions),
                dataset=one.source.dataset,
                roles=tuple(other.role for other in clip.roles),
                role_keys=tuple(map(latent_key, clip.roles)),
            )


def caption_rejections(source: str, text_keys: Sequence[str], failures: Mapping[str, str]) -> list[Rejection]:
    """The rejections of a source's captions that cannot be encoded: of the source where none is left, else of each by its number.

    Args:
        text_keys: the keys of all its captions, in order.
        failures: the detail of each failed caption, by key.
    """
    failed = {number: failures[key] for number, key in enumerate(text_keys, 1) if key in failures}
    if failed and len(failed) == len(text_keys):
        return [Rejection(source, Reason.CAPTION_FAILED, next(iter(failed.values())))]
    return [
        Rejection(f"{source} [caption {number}]", Reason.CAPTION_FAILED, detail) for number, detail in failed.items()
    ]


def kept_captions(text_keys: Sequence[str], failures: Container[str]) -> tuple[str, ...]:
    """The keys of the captions that could be encoded; all of them where none could: their sample is lost as it is."""
    return tuple(key for key in text_keys if key not in failures) or tuple(text_keys)


def samples_of_rows(rows: Iterable[ClipRow], data: DataConfig, strides: Strides) -> list[Sample]:
    """The samples of a data set, independent of the order of `rows`.

    With `data.variants` "each" every clip is a sample; with "draw" the clips of one source and bucket are one sample of
    several latents. A content that one row holds out is held out in all.
    """
    ordered = sorted(rows, key=lambda row: row.order)
    if data.variants == "draw":
        groups = [list(group) for _, group in groupby(ordered, key=lambda row: (row.source, row.bucket))]
    else:
        groups = [[row] for row in ordered]
    roles = [_keys_of_roles(group) for group in groups]
    keys = number_duplicates(
        sample_key([row.latent_key for row in group], group[0].text_keys, keys)
        for group, keys in zip(groups, roles, strict=True)
    )
    tokens = {name: math.prod(strides.latent(Bucket.parse(name))) for name in {row.bucket for row in ordered}}
    samples = [
        Sample(
            key=key,
            latent_keys=tuple(row.latent_key for row in group),
            text_keys=group[0].text_keys,
            split=group[0].split,
            bucket=Bucket.parse(group[0].bucket),
            source=group[0].source,
            tokens=tokens[group[0].bucket],
            content_id=group[0].content_id,
            dataset=group[0].dataset,
            roles=of_roles,
        )
        for key, group, of_roles in zip(keys, groups, roles, strict=True)
    ]
    return hold_out_copies(samples)


def _keys_of_roles(group: Sequence[ClipRow]) -> dict[str, tuple[str, ...]]:
    """The keys of the clips of a sample by their further roles."""
    keys = zip(*(row.role_keys for row in group), strict=True)
    return dict(zip(group[0].roles, keys, strict=True))


def samples_of(
    planned: Iterable[PlannedSource],
    latent_key: Callable[[Clip], str],
    text_key: Callable[[str, Clip], str],
    data: DataConfig,
    strides: Strides,
) -> list[Sample]:
    """The samples of planned sources; see `samples_of_rows`."""
    return samples_of_rows(rows_of(planned, latent_key, text_key), data, strides)
