"""`mmspeed init --videos`: probe the media, and fit frame rate, buckets and held-out share of a new config to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmspeed.config import Bucket, Config, make_config, video_config
from mmspeed.config.known_models import videos_of
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected, Rejection, reasons_in_words, told
from mmspeed.media.source import Source
from mmspeed.media.windows import frames_available
from mmspeed.models.families.complete import boundary_of
from mmspeed.models.sections import conditioning_of, family_of_section, repository_of
from mmspeed.preprocess.decoding.clips import Clip, select_clips, split_of
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Selected, without_repeats
from mmspeed.preprocess.report.bucket_fit import BucketFit, BucketFitter, BucketGrid, SourceShapes, grid_of
from mmspeed.preprocess.sources.contents import ContentIds
from mmspeed.preprocess.sources.discover import list_sources, usual_columns
from mmspeed.preprocess.sources.fetched import MediaStore

MOST_PROBED = 512  # sources; of more, so many are probed, evenly spaced over the listing
MOST_BUCKETS = 6
NEARLY_ALL = 0.98  # of what the most buckets keep; fewer buckets that keep this are better
FRAMES = 13  # of the longest bucket; three latent frames after the first
# Height and width of the first model's largest bucket, then of smaller ones for media that do not fill it.
SIZES = ((96, 160), (80, 128), (64, 112), (48, 80), (32, 64), (32, 48), (16, 32), (16, 16))
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.08)  # of the size that a published model was trained for
RATES = (8.0, 12.0, 16.0, 24.0, 30.0)  # frames per second; the lowest at which clips fill the longest bucket
HELD_OUT = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # shares, of which the first that is enough is taken
ENOUGH, ONE_IN = 16, 12  # samples held out are enough, or this part of a small set
PROMPT_CHARS = 200  # longer captions are prompts only where there are no others
_NO_SOURCE = (Reason.NOT_MEDIA, Reason.ORPHAN_CAPTION)  # rejected files that are no media
_NAMES = 2  # rejected sources named for each reason


@dataclass(frozen=True)
class Target:
    """The videos that buckets are fitted to.

    Args:
        repository: hub id or folder of the published model; None for a model of our own.
        frames: of the longest bucket.
        sizes: height and width of the largest bucket, then of smaller ones for media that do not fill it.
        fps: frames per second that the model was trained with; None: those that suit the media.
        grid: the buckets that fit codec and model; None: of the built-in codec and the smallest model.
        mode: of `conditioning`, for a model that makes videos from images alone; None for others.
        experts: True for a model with two experts.
        control: True for a model that is always given a control video.
    """

    repository: str | None = None
    frames: int = FRAMES
    sizes: tuple[tuple[int, int], ...] = SIZES
    fps: float | None = None
    grid: BucketGrid | None = None
    mode: str | None = None
    experts: bool = False
    control: bool = False


def target_of(model: str) -> Target:
    """The videos that a published model was trained for, and smaller ones that fit it.

    A model in the table of a family is known by its name; of another the repository is read. Raises UserError where it cannot be.
    """
    repository, videos = videos_of(model)
    if videos is not None:
        frames, pixels = videos.grid
        own = {"least": (videos.height, videos.width), "most": (videos.height, videos.width)} if videos.fixed else {}
        grid, mode, control = BucketGrid(frames, 1, pixels, pixels, **own), videos.mode, videos.control
        experts = videos.experts
    else:
        section = PublishedModelConfig(kind="diffusers", pretrained=repository)
        opened = repository_of(section)
        videos = next(iter(family_of_section(section, opened).published.values()))
        buckets = [{"frames": videos.frames, "height": videos.height, "width": videos.width}]
        tree = {"data": {"sources": [{"path": repository}], "buckets": buckets}, "model": section.model_dump()}
        grid, rule = (
            grid_of(video_config(make_config(tree, origin="--model"), "--model")),
            conditioning_of(section, opened),
        )
        mode, control = None if "none" in rule.modes else rule.modes[0], bool(rule.roles)
        experts = boundary_of(opened) is not None
    sizes = [grid.nearest(videos.height * share, videos.width * share) for share in SHARES]
    return Target(repository, videos.frames, tuple(dict.fromkeys(sizes)), videos.fps, grid, mode, experts, control)


@dataclass(frozen=True)
class DataFit:
    """The values that suit a data set, and the sources that preprocessing then encodes.

    `usable`, `held_out` and `clips` (of each bucket) count the `probed` sources; `listed` are all with captions, and `rejections`
    those of the listing and of the probed ones. Files that turn out damaged while they are decoded are not known yet.
    """

    fps: float
    buckets: tuple[Bucket, ...]
    clips: tuple[int, ...]
    val_fraction: float
    held_out: int
    prompts: tuple[str, ...]
    usable: int
    probed: int
    listed: int
    rejections: tuple[Rejection, ...] = field(repr=False)
    columns: Mapping[str, str] = field(default_factory=dict)  # of a manifest, that a config must name
    upscale: bool = False  # the model takes nothing as small as the media

    @property
    def sources(self) -> int:
        """The number of media, with captions or without: those listed or rejected; each probed source is usable or rejected."""
        return self.listed + len(self.rejections) - (self.probed - self.usable)

    def values(self) -> dict[str, dict[str, Any]]:
        """The fitted keys, by section, as a config holds them."""
        buckets = [{"frames": b.frames, "height": b.height, "width": b.width} for b in self.buckets]
        data: dict[str, Any] = {"fps": self.fps, "buckets": buckets, "val_fraction": self.val_fraction}
        data |= {"allow_upscale": True} if self.upscale else {}
        return {"data": data, "validate": {"prompts": list(self.prompts)}}

    def headline(self) -> str:
        """One line: `13 of 16 usable` and the reasons for the rest; if only a part is probed, an estimate for all."""
        reasons = Counter(str(rejection.reason) for rejection in self.rejections)
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
        why = f" ({why})" if why else ""
        if self.probed == self.listed:
            return f"{self.usable} of {self.sources} usable{why}"
        usable = round(self.usable / self.probed * self.listed)
        return f"about {usable:,} of {self.sources:,} usable, by {self.probed:,} that were probed{why}"

    def lines(self) -> list[str]:
        """The outcome for a person: the headline, the buckets, what is held out, and examples of what is rejected."""
        taken = ", ".join(f"{column!r} as {key}" for key, column in self.columns.items())
        lines = [f"columns: {taken}"] if taken else []
        lines.append(f"sources: {self.headline()}")
        lines += [f"  bucket {b}: {count}" for b, count in zip(self.buckets, self.clips, strict=True)]
        if self.upscale:
            lines.append("  scaled up (data.allow_upscale): the model takes nothing as small as these media")
        lines.append(f"  fps {self.fps:g}; held out for validation: {self.held_out}")
        for reason in dict.fromkeys(rejection.reason for rejection in self.rejections):
            named = [(r.source, r.detail) for r in self.rejections if r.reason == reason]
            more = ", ..." if len(named) > _NAMES else ""
            shown = ", ".join(name for name, _ in named[:_NAMES])
            lines += [f"  {reason}: {shown}{more} ({reason.explanation})", *told(reason, named[:_NAMES])]
        return lines


def fit_data(path: str | Path, seed: int = 0, most: int = MOST_PROBED, target: Target | None = None) -> DataFit:
    """Probe the media at `path` (a folder, manifest, tar, pattern of tars or URL) and fit a first config to them.

    `target`: the videos that the model takes; None: those of a small model of our own.

    A manifest without the default columns is read by those of usual names (`USUAL_COLUMNS`), which the fit then says.
    At most `most` sources are probed, none is decoded whole. `seed` is that of the config, which decides what is held out. Raises
    UserError if there are no media, and if none is usable.
    """
    if most < 1:
        raise UserError(f"most is {most}: probe 1 source or more")
    target = target or Target()
    largest = [Bucket(target.frames, *target.sizes[0])]
    config = _config(str(path), 8.0, largest)
    columns = usual_columns(config.data)
    config = _config(str(path), 8.0, largest, columns)
    listing = list_sources(config.data)
    unlisted = [rejection for rejection in listing.rejections if rejection.reason not in _NO_SOURCE]
    sources = _spread(listing.sources, most)
    probes, failed = _probe(config, sources)
    fps = target.fps or fit_rate([probe for _, probe in probes])
    grid = target.grid or grid_of(config)
    outcome = fit_buckets([probe for _, probe in probes], fps, grid, target) if probes else None
    upscale = outcome is not None and not outcome.buckets and grid.least > (1, 1)
    if upscale:  # all are smaller than what the model takes
        outcome = fit_buckets([probe for _, probe in probes], fps, grid, target, upscale)
    if outcome is None or not outcome.buckets:
        raise _unusable(path, [*unlisted, *failed, *(_misfit(source, probe) for source, probe in probes)])
    config = _config(str(path), fps, outcome.buckets, columns, upscale)
    selected: list[tuple[Source, Clip]] = []
    with closing(MediaStore.of(config.data)) as media:
        identify = partial(_identify, media, config)
        for source, probe in probes:
            try:
                clips = select_clips(source, probe, config.data, config.preprocess.full_hash, seed, identify)
                clips, _ = without_repeats(clips, config.data.max_repeated)
            except Rejected as error:
                failed.append(error.of(source.name))
            else:
                selected.append((source, clips[0]))
    if not selected:
        raise _unusable(path, [*unlisted, *failed])
    taken = Counter(clip.bucket for _, clip in selected)
    # the first video bucket is the shape of samples, so the one with most clips comes first
    buckets = tuple(sorted(taken, key=lambda bucket: (bucket.is_image, -taken[bucket], bucket)))
    val_fraction, held_out = fit_held_out(config, selected, seed)
    return DataFit(
        fps=fps,
        buckets=buckets,
        clips=tuple(taken[bucket] for bucket in buckets),
        val_fraction=val_fraction,
        held_out=held_out,
        prompts=choose_prompts([source for source, _ in selected]),
        usable=len(selected),
        probed=len(sources),
        listed=len(listing.sources),
        rejections=(*unlisted, *failed),
        columns=columns,
        upscale=upscale,
    )


def fit_rate(probes: Sequence[Probe]) -> float:
    """Frames per second for the clips: the lowest of `RATES` at which half of the videos fill the longest bucket.

    It is no higher than the rate that two thirds of the videos have, so that few frames are repeated. Without videos, the lowest.
    """
    videos = [probe for probe in probes if len(probe.pts_seconds) > 1]
    if not videos:
        return RATES[0]
    usual = sorted(probe.fps for probe in videos)[len(videos) // 3]
    rates = [rate for rate in RATES if rate <= usual * 1.01] or [round(min(usual, RATES[0]), 3)]
    for rate in rates:
        if sum(frames_available(probe.pts_seconds, rate) >= FRAMES for probe in videos) * 2 >= len(videos):
            return rate
    return rates[-1]


def fit_buckets(
    probes: Sequence[Probe], fps: float, grid: BucketGrid, target: Target = Target(), upscale: bool = False
) -> BucketFit:
    """The fewest buckets, of at most `MOST_BUCKETS`, that take as many sources as the most do and keep nearly as much of them.

    upscale: smaller sources fit, too.
    """
    shapes, wanted = SourceShapes(target.frames), target.sizes
    for probe in probes:
        shapes.add(probe, fps)
    smallest = min(probe.width * probe.height for probe in probes)
    larger = sum(math.prod(size) * 2 > smallest for size in wanted)  # than the smallest picture covers in any shape
    sizes = wanted[: larger + 1]
    images, videos = ([p for p in probes if (len(p.pts_seconds) == 1) == kind] for kind in (True, False))
    present = [Bucket(target.frames, *size) for size in sizes if videos] + [
        Bucket(1, *size) for size in sizes if images
    ]
    fitter = BucketFitter(shapes.cells(), present, upscale)
    best = fitter.fit(grid, MOST_BUCKETS)
    for number in range(1, MOST_BUCKETS):
        fewer = fitter.fit(grid, number)
        if fewer.rejected <= best.rejected and fewer.kept >= NEARLY_ALL * best.kept:
            return fewer
    return best


def fit_held_out(config: Config, selected: Sequence[tuple[Source, Clip]], seed: int) -> tuple[float, int]:
    """`data.val_fraction` and the number of these sources that it holds out; 0 if the manifest marks some, or if they are too few."""
    marked = sum(source.split == "val" for source, _ in selected)
    if marked:
        return 0.0, marked
    wanted = min(ENOUGH, max(1, len(selected) // ONE_IN))
    for share in HELD_OUT:
        data = config.data.model_copy(update={"val_fraction": share})
        held_out = sum(split_of(source, clip.content_id, data, seed) == "val" for source, clip in selected)
        if wanted <= held_out < len(selected):
            return share, held_out
    return 0.0, 0


def choose_prompts(sources: Sequence[Source]) -> tuple[str, ...]:
    """Two different captions, from the first and the middle source; of videos and not too long, where there are such."""
    videos = [source for source in sources if source.kind == "video"] or sources
    captions = list(dict.fromkeys(source.captions[0] for source in videos if source.captions))
    short = [caption for caption in captions if len(caption) <= PROMPT_CHARS]
    chosen = short if len(short) >= 2 else sorted(captions, key=len)[:2]
    return tuple(dict.fromkeys((chosen[0], chosen[len(chosen) // 2])))


def _config(
    path: str, fps: float, buckets: Sequence[Bucket], columns: Mapping[str, str] | None = None, upscale: bool = False
) -> Config:
    """A config of the built-in codec and the smallest model, for this data set."""
    shapes = [{"frames": b.frames, "height": b.height, "width": b.width} for b in buckets]
    source = {"path": path, **(columns or {})}
    data = {"sources": [source], "fps": fps, "buckets": shapes, "allow_upscale": upscale}
    return video_config(make_config({"data": data}, origin=path), path)


def _spread(sources: Sequence[Source], most: int) -> list[Source]:
    """`most` of the sources, evenly spaced; all if they are no more."""
    count = min(most, len(sources))
    return [sources[number * len(sources) // count] for number in range(count)]


def _probe(config: Config, sources: Sequence[Source]) -> tuple[list[tuple[Source, Probe]], list[Rejection]]:
    """The sources that can be read, with their probes, and the others as rejections."""
    probes: list[tuple[Source, Probe]] = []
    failed: list[Rejection] = []
    with DecodePool(config, sources) as pool, ProgressLine("probe", len(sources), "source") as line:
        for event in pool.run(lambda clip: False):
            if isinstance(event, Selected | Failed):
                line.advance()
                if event.probe is not None:
                    probes.append((event.source, event.probe))
                elif isinstance(event, Failed):
                    failed.append(Rejection(event.source.name, event.rejected.reason, event.rejected.detail))
    return probes, failed


def _identify(media: MediaStore, config: Config, source: Source) -> str:
    """The content id of a source; a remote one without a checksum or local copy is fetched again. Raises Rejected, OSError."""
    with media.local(source) as here:
        return ContentIds(config.cache_dir, full=config.preprocess.full_hash).id_of(here)


def _misfit(source: Source, probe: Probe) -> Rejection:
    """The rejection of a probed source that no bucket can take: it is shorter than a latent step, or smaller than a token's patch."""
    short = len(probe.pts_seconds) > 1 and min(probe.width, probe.height) >= SIZES[-1][0]
    reason = Reason.TOO_SHORT if short else Reason.TOO_SMALL
    return Rejection(source.name, reason, reason.explanation)


def _unusable(path: str | Path, rejections: Sequence[Rejection]) -> UserError:
    return UserError(f"{path}: none of the {len(rejections)} sources is usable ({reasons_in_words(rejections)})")
