"""`mmspeed check`: forecast the work and cost of a config, without an accelerator or an encoder's weights in memory.

The counts of the text and of the page are the same: both come from one `DataStatistics` and one `Costs`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from pathlib import Path

from mmspeed.config import Config
from mmspeed.config.places import is_url
from mmspeed.config.schema import DataConfig
from mmspeed.data import Sample
from mmspeed.data.cache.keys import entry_key
from mmspeed.data.cache.splits import copies_of_held_out, hold_out_copies
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_seconds
from mmspeed.media.rejections import Reason, Rejection, told
from mmspeed.media.source import Source
from mmspeed.models.codecs.vae import codec_geometry, codec_identity
from mmspeed.models.image_encoder import image_fingerprint
from mmspeed.models.sections import stored_conditions
from mmspeed.models.text.encoders import sees_pictures, text_identity
from mmspeed.preprocess.decoding.clips import left_unmirrored, split_of
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Selected
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.preprocess.records.build_report import (
    held_out_line,
    refusal_line,
    scene_line,
    stated_lines,
    unmirrored_line,
)
from mmspeed.preprocess.records.keys import latent_parts, text_parts
from mmspeed.preprocess.records.sample_table import PlannedSource, samples_of
from mmspeed.preprocess.records.stale_entries import StoredEntries, WantedKeys, stale_reasons
from mmspeed.preprocess.records.statistics import DataStatistics
from mmspeed.preprocess.report.bucket_fit import SourceShapes, suggest_lines
from mmspeed.preprocess.report.costs import cost_lines, estimate, folder_bytes, free_bytes, hints, peaks
from mmspeed.preprocess.report.page import (
    CacheState,
    DataPage,
    default_path,
    encode_estimate,
    take_thumbnails,
    write_page,
)
from mmspeed.preprocess.sources.captions import CaptionAffixes
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.preprocess.sources.listing import SourceListing
from mmspeed.protocols import RunWork
from mmspeed.shapes import Strides

__all__ = ["CheckReport", "check", "stale_reasons"]

_SHOWN_CAPTIONS, _SHOWN_CHARS = 2, 300  # captions shown as they are encoded, and characters of each
_NAMES = 3  # rejected sources named for each reason
_NO_CODEC = "not fitted yet"  # in place of the fingerprint of a linear codec that the first build will fit
_ONE_TO_ONE = Strides(1, 1)  # fits every bucket: the number of samples does not depend on the codec


@dataclass
class CheckReport:
    """The result of `check`. `problems` make the command fail; everything else is information. `page` is the path of the HTML page."""

    lines_: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    page: Path | None = None
    statistics: DataStatistics = field(default_factory=DataStatistics)
    works: Sequence[RunWork] = ()  # of the whole training, by numbers of devices

    def lines(self) -> list[str]:
        page = [] if self.page is None else [f"page: {self.page}"]
        return [*self.lines_, *(f"problem: {problem}" for problem in self.problems), *page]


@dataclass
class _Needs:
    """The entries that the config needs of the cache: keys only, since there may be many millions."""

    stored: StoredEntries
    latents: WantedKeys
    texts: WantedKeys
    missing_pixels: int = 0
    roles: dict[str, Counter[str]] = field(default_factory=dict)  # clips of further roles by the keys of their entries


def check(
    config: Config,
    page: Path | None = None,
    suggest_buckets: int | None = None,
    ranks: Sequence[int] | None = None,
    schedule: bool = False,
) -> CheckReport:
    """Probe every source, compare with the cache, estimate size and cost, and write the page (None: its default path).

    The schedule is shown for each number of devices in `ranks` (None: those of this machine), with its tables if `schedule`. With
    `suggest_buckets` the lines end with that many buckets that suit the sources. Decodes only the page's few thumbnails and
    loads no weights. Raises UserError if sources or encoders cannot be found, or the page cannot be written.
    """
    if ranks is not None and (not ranks or min(ranks) < 1):
        raise UserError(f"--ranks {','.join(map(str, ranks))}: give numbers of devices, 1 or more")
    if suggest_buckets is not None and suggest_buckets < 1:
        raise UserError(f"--suggest-buckets {suggest_buckets}: ask for 1 or more")
    shapes = None if suggest_buckets is None else SourceShapes(max(bucket.frames for bucket in config.buckets))
    report = CheckReport()
    if config.cache_dir.exists() and not config.cache_dir.is_dir():
        report.problems.append(f"data.cache: {config.cache_dir} is a file; name a folder")
    listing = list_sources(config.data)
    codec, text = _fingerprints(config)
    stored = StoredEntries(config.cache_dir)
    recipe = Recipe.of(config, listing.sources)
    needs = _Needs(stored, WantedKeys("latents", "content", stored), WantedKeys("texts", "caption", stored))
    started = time.monotonic()
    copies = _survey(config, listing, report.statistics, needs, codec, text, recipe, shapes)
    seconds = time.monotonic() - started
    numbers = report.statistics
    held_out = [held_out_line(copies)] if copies else []
    report.lines_ += [
        *_count_lines(numbers),
        *(f"  role {role}: {of.total()} clips, {len(of)} to encode once" for role, of in needs.roles.items()),
        *held_out,
        *_caption_lines(config.data, listing.sources),
    ]
    scores = [] if listing.scores is None else listing.scores.summaries()
    report.lines_ += [line for score in scores for line in score.lines()]
    if not numbers.usable:
        bare = [Reason.NO_CAPTION.explanation] * (Reason.NO_CAPTION.value in numbers.reasons)
        report.problems.append(". ".join(["no source is usable, so there is nothing to train on", *bare]))
    elif not numbers.samples("train"):
        report.problems.append("every usable sample is held out: nothing is left to train on; lower data.val_fraction")
    cache = _cache_state(config, needs, codec is None)
    costs = None
    if not report.problems:
        costs, problems = estimate(config, numbers, len(needs.texts.keys), *codec_geometry(config.vae), ranks)
        report.problems += problems
    if costs is not None:
        report.lines_ += [*cache.notes, *(line for section in cache.sections for line in section.lines())]
    encode = _encode_rows(config, listing, needs, seconds) if not is_url(config.data.cache) else []
    report.lines_ += [f"{what}: {how_much} ({how})" for what, how_much, how in encode]
    report.lines_ += [] if costs is None else cost_lines(config, costs, schedule)
    report.works = [] if costs is None or costs.schedule is None else costs.schedule.works
    advice = hints(config, numbers, costs)
    report.lines_ += [f"hint: {hint}" for hint in advice]
    if shapes is not None and suggest_buckets is not None:
        report.lines_ += suggest_lines(config, shapes.cells(), suggest_buckets)
    data_page = DataPage(
        config=config,
        command="check",
        statistics=numbers,
        headline=_headline(report, needs, config.data.cache),
        decoded=False,
        problems=report.problems,
        hints=advice,
        costs=costs,
        cache=cache,
        encode=encode,
        peaks=peaks(config) if costs is not None else (),
        scores=scores,
        thumbnails=take_thumbnails(config, numbers.shown),
    )
    report.page = write_page(data_page, page or default_path(config))
    return report


def _fingerprints(config: Config) -> tuple[str | None, str]:
    """Fingerprints of the codec and the text encoder; None for a linear codec that is not fitted yet."""
    weights = config.codec_weights
    fitted = weights is None or weights.exists()
    return codec_identity(config.vae, weights) if fitted else None, text_identity(config.text)


def _survey(
    config: Config,
    listing: SourceListing,
    numbers: DataStatistics,
    needs: _Needs,
    codec: str | None,
    text: str,
    recipe: Recipe,
    shapes: SourceShapes | None = None,
) -> list[str]:
    """Probe every source; count it, its samples, the entries that it needs, and its shape (even if it fits no bucket).

    Returns the sources that are held out because another one of their content is.
    """
    numbers.add_listing(listing)
    name, conditions = codec if codec is not None else _NO_CODEC, stored_conditions(config)
    image = image_fingerprint(config)
    marked = any(source.split == "val" for source in listing.sources)
    later: list[Sample] = []  # counted when all are known: a mark holds out every copy of the content
    no_key: Callable[..., str] = lambda *parts: ""  # noqa: E731 (samples are only counted here)
    beside_pictures = sees_pictures(config.text)
    with (
        DecodePool(config, listing.sources, recipe) as pool,
        ProgressLine("probe", len(listing.sources), "source") as line,
    ):
        for event in pool.run(None):
            if shapes is not None and isinstance(event, Selected | Failed) and event.probe is not None:
                shapes.add(event.probe, config.data.fps)
            if isinstance(event, Failed):
                line.advance()
                numbers.add_rejection(Rejection(event.source.name, event.rejected.reason, event.rejected.detail))
            elif isinstance(event, Selected):
                line.advance()
                source, clips = event.source, event.clips
                numbers.add_source(source, event.probe, clips, left_unmirrored(clips, config.data))
                numbers.add_cuts(event.cuts)
                for rejection in event.dropped:
                    numbers.add_rejection(rejection, whole=False)
                split = split_of(source, clips[0].content_id, config.data, config.seed)
                planned = PlannedSource(source, split, clips[0].content_id, clips)
                for sample in samples_of([planned], no_key, no_key, config.data, _ONE_TO_ONE):
                    if marked:
                        later.append(sample)
                    else:
                        numbers.add_sample(sample.bucket, sample.split, sample.dataset)
                for clip in chain.from_iterable(clip.all for clip in clips):
                    parts = latent_parts(config, name, clip, conditions, image)
                    if clip.role != "video":
                        needs.roles.setdefault(clip.role, Counter()).update([entry_key(parts)])
                    if needs.latents.add(parts):
                        needs.missing_pixels += clip.bucket.frames * clip.bucket.height * clip.bucket.width
                for caption, seen in product(source.captions, clips if beside_pictures else (None,)):
                    needs.texts.add(text_parts(config, text, caption, seen))
    for sample in hold_out_copies(later):
        numbers.add_sample(sample.bucket, sample.split, sample.dataset)
    return sorted({sample.source for sample in copies_of_held_out(later)})


def _count_lines(numbers: DataStatistics) -> list[str]:
    sums = numbers.sums
    lines = [
        f"data: {sums['files']} files, {sums['listed']} sources, {numbers.usable} usable, {numbers.rejected} rejected"
    ]
    for reason, count in sorted(numbers.reasons.items(), key=lambda item: (-item[1], item[0])):
        names = [name for name, _ in numbers.examples[reason][:_NAMES]]
        lines.append(f"  {reason:<16} {count:>5}  {', '.join(names)}{', ...' if count > len(names) else ''}")
        lines += told(reason, numbers.examples[reason][:_NAMES])
    if (clips := sum(numbers.clips().values())) != numbers.usable:
        lines.append(f"  clips: {clips} of {numbers.usable} usable sources")
    decoders, refusals = numbers.counts["decoders"].named, numbers.counts["refusals"].named
    if refusals or set(decoders) - {"pyav", "pillow"}:
        lines.append(f"  decoders: {', '.join(f'{name} {count}' for name, count in sorted(decoders.items()))}")
    if refusals:
        lines.append(refusal_line(refusals))
    lines += stated_lines(numbers.counts["stated"].named)
    if sums["scene_cuts"]:
        lines.append(scene_line(sums["scene_cuts"], sums["cut_videos"]))
    if sums["unmirrored"]:
        lines.append(unmirrored_line(sums["unmirrored"]))
    train = numbers.samples("train")
    for bucket, used in numbers.buckets().items():
        lost = f"{used.cropped:.0%} of pixels cropped, {used.scaled:.0%} scaled away"
        lost += "" if bucket.is_image else f", {used.trimmed:.0%} of frames trimmed"
        lost += f", {used.repeated:.0%} of frames repeated" if used.frames_repeated else ""
        lines.append(f"  bucket {bucket}: {train.get(bucket, 0)} training samples, {lost}")
    if numbers.usable:
        lines.append(f"  held out for validation: {sum(numbers.samples('val').values())}")
    return lines


def _caption_lines(data: DataConfig, sources: Sequence[Source]) -> list[str]:
    """Examples of captions as they are encoded, of the sources that have words before or behind them."""
    named = {
        name
        for source, name in zip(data.sources, data.dataset_names, strict=True)
        if CaptionAffixes.of(data, source) != CaptionAffixes()
    }
    captions = (source.captions[0] for source in sources if source.dataset in named and source.captions)
    shown = (text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..." for text in captions)
    return [f"  caption as it is encoded: {text}" for text in islice(shown, _SHOWN_CAPTIONS)]


def _cache_state(config: Config, needs: _Needs, unfitted: bool) -> CacheState:
    root = config.cache_dir
    notes = [f"cache: {problem}" for problem in needs.stored.problems]
    sections = [needs.latents.state(), needs.texts.state()]
    if is_url(config.data.cache):
        notes.append(f"cache {config.data.cache}: check does not read a remote cache; training from it does")
        return CacheState(root, [], notes, 0, free_bytes(root))
    if needs.stored.empty and not notes:
        latents, texts = len(needs.latents.keys), len(needs.texts.keys)
        notes.append(f"cache {root}: not created yet; {latents} latents and {texts} captions to encode")
    if unfitted and not needs.stored.empty:
        notes.append(f"cache {root}: the linear codec {config.codec_weights} is missing and will be fitted again")
    return CacheState(root, sections, notes, folder_bytes(root), free_bytes(root))


def _encode_rows(config: Config, listing: SourceListing, needs: _Needs, seconds: float) -> list[tuple[str, str, str]]:
    """The work of building the cache: (what, how much, how this is known)."""
    count = len(listing.sources)
    if not count:
        return []
    rate = f"{count / seconds:.1f} sources a second here, with {config.preprocess.decode_workers} decoder processes"
    how = f"measured: {rate}; building does this again, and decodes too"
    remaining = encode_estimate(config, needs.missing_pixels, needs.texts.state().missing)
    return [("probing all sources", format_seconds(seconds), how), ("encoding missing entries", *remaining)]


def _headline(report: CheckReport, needs: _Needs, cache: str) -> str:
    if report.problems:
        count = len(report.problems)
        return f"Not ready: {count} problem{'s' if count > 1 else ''}"
    numbers, (latents, texts) = report.statistics, (needs.latents.state(), needs.texts.state())
    train, val = (sum(numbers.samples(split).values()) for split in ("train", "val"))
    ready = f"Ready: {train:,} training and {val:,} validation samples of {numbers.usable:,} sources"
    if is_url(cache):
        return f"{ready}; the cache is remote, and was not read"
    if latents.missing or texts.missing:
        return f"{ready}; {latents.missing:,} latents and {texts.missing:,} captions are still to be encoded"
    return f"{ready}; every entry is in the cache"
