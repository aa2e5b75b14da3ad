"""Select the clips of a source: its buckets, and for each bucket its time windows and crops. Pure functions.

A latent's key covers the fields of its clip, including the bucket, but not the draw that dropped other buckets.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from mmspeed.config import Bucket
from mmspeed.config.roles import roles_of
from mmspeed.config.schema import DataConfig
from mmspeed.media.decode import Cut
from mmspeed.media.pixel_rules import NEWEST_RULES, PixelRules
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.scaling import pixel_parts
from mmspeed.media.source import Source, content_id
from mmspeed.media.windows import choose_windows
from mmspeed.preprocess.decoding.scenes import scenes_between
from mmspeed.preprocess.decoding.transform import crop_boxes, rank_buckets
from mmspeed.rng import uniform

BLANK = "blank"  # content id of grey frames


@dataclass(frozen=True)
class Clip:
    """The part of a source that becomes one entry: one of its variants."""

    source: Source
    bucket: Bucket
    indices: tuple[int, ...]  # frames taken, counted in presentation order
    crop: tuple[int, int, int, int]  # left, top, right, bottom in the source's displayed pixels
    content_id: str
    fps: float  # frames per second of the entry; 0 for images
    seconds: float  # length of the clip; 0 for images
    decoder: str = ""  # library that decoded it, once it is decoded
    window: int = 0  # number among the windows of its source and bucket
    crop_number: int = 0  # number among the crops of its window; their mirror images have the numbers after them
    mirrored: bool = False  # left and right exchanged
    rules: PixelRules = NEWEST_RULES
    pixel_parts: Mapping[str, Any] = field(default_factory=dict)  # of its key, see `scaling.pixel_parts`
    role: str = "video"
    roles: tuple[Clip, ...] = ()  # of a video's: the same of its further roles

    @property
    def cut(self) -> Cut:
        """The request to the decoder."""
        return Cut(self.indices, self.crop, self.bucket.width, self.bucket.height, self.rules, self.mirrored)

    @property
    def repeated(self) -> int:
        """Frames that repeat the one before, in gaps of the source's times."""
        return len(self.indices) - len(set(self.indices))

    @property
    def all(self) -> tuple[Clip, ...]:
        """The clip itself and those of its further roles."""
        return (self, *self.roles)

    @property
    def distinct(self) -> tuple[Clip, ...]:
        """The clip itself and those of its further roles that have another content."""
        return (self, *(other for other in self.roles if other.content_id != self.content_id))

    def decoded_by(self, decoder: str) -> Clip:
        return replace(self, decoder=decoder)


@dataclass(frozen=True)
class ReadFile:
    """A file that clips are read from: the source as it was listed, its local copy, its probe, and its content id."""

    source: Source
    here: Source
    probe: Probe
    content_id: str


def with_roles(clip: Clip, files: Mapping[str, ReadFile]) -> Clip:
    """The clip of a video with those of its further roles, each the same part of its file; one without a file is blank."""

    def of_role(role: str) -> Clip:
        if (file := files.get(role)) is None:
            blank = Clip(clip.source, clip.bucket, (), (0, 0, 0, 0), BLANK, 0.0, 0.0, role=role)
            return replace(blank, window=clip.window, crop_number=clip.crop_number)
        parts = pixel_parts(clip.rules, file.probe, clip.crop)
        return replace(clip, source=file.source, content_id=file.content_id, pixel_parts=parts, role=role)

    return replace(clip, roles=tuple(map(of_role, roles_of(tuple(files)))))


def role_differs(video: Probe, other: Probe) -> str:
    """The difference of another role's file from its video; empty if it has the same size and shows a frame at the same times."""

    def facts(probe: Probe) -> str:
        return f"{probe.width} x {probe.height} pixels, {len(probe.pts_seconds)} frames, {probe.fps:.4g} a second"

    def times(probe: Probe) -> list[float]:
        return [time - probe.pts_seconds[0] for time in probe.pts_seconds]

    if (other.width, other.height, len(other.pts_seconds)) == (video.width, video.height, len(video.pts_seconds)):
        if all(abs(a - b) <= video.step / 2 + 1e-6 for a, b in zip(times(other), times(video), strict=True)):
            return ""
    return f"it has {facts(other)}; its video {facts(video)}"


def clip_name(source: str, bucket: Bucket, window: int, crop: int) -> str:
    """The name of one clip of a source among the rejections."""
    return f"{source} [{bucket}, window {window}{f', crop {crop}' if crop else ''}]"


def repeats_too_much(clip: Clip, max_repeated: float) -> Rejected | None:
    """The rejection of a clip of which more than the share `max_repeated` are repeated frames; None for others."""
    frames = len(clip.indices)
    if clip.repeated <= max_repeated * frames:
        return None
    return Rejected(
        Reason.REPEATED,
        f"{clip.repeated} of {frames} frames repeat the one before; {frames - clip.repeated} are distinct",
    )


def names_a_side(captions: Sequence[str], words: Sequence[str]) -> bool:
    """True if a caption has one of `words` as a whole word; within Chinese and Japanese, which have no spaces, anywhere."""
    if not words:
        return False
    pattern = "|".join(
        "".join(
            (
                "" if _unspaced(word[0]) else r"(?<!\w)",
                re.escape(word),
                "" if _unspaced(word[-1]) else r"(?!\w)",
            )
        )
        for word in words
    )
    return any(re.search(pattern, caption, re.IGNORECASE) for caption in captions)


def _unspaced(letter: str) -> bool:
    """True for a letter of a script that puts no spaces between words."""
    return unicodedata.name(letter, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "THAI"))


def left_unmirrored(clips: Sequence[Clip], data: DataConfig) -> bool:
    """True if a source, of which these are clips, is not mirrored for its captions although `data.mirror` asks for it."""
    return data.mirror and not any(clip.mirrored for clip in clips)


def split_of(source: Source, content_id: str, data: DataConfig, seed: int) -> str:
    """The split of a source: `val` if the manifest marks it or the draw by content holds it out, else `train`."""
    if source.split == "val":
        return "val"
    return "val" if uniform(seed, "val_split", content_id) < data.val_fraction else "train"


def kept_buckets(ranked: Sequence[Bucket], keep: Mapping[Bucket, float], content_id: str, seed: int) -> list[Bucket]:
    """The buckets of `ranked`, in order, that a draw keeps, each with its probability `keep`.

    As in Open-Sora, there is one draw for each bucket and content. It depends on nothing else, so that another bucket in the config, or
    another `keep` of one, does not change the draws of the others.
    """
    return [b for b in ranked if keep[b] >= 1 or uniform(seed, "bucket_keep", content_id, b.name) < keep[b]]


def select_clips(
    source: Source,
    probe: Probe,
    data: DataConfig,
    full_hash: bool,
    seed: int,
    identify: Callable[[Source], str] | None = None,
    rules: PixelRules | None = None,
    cuts: Sequence[int] | None = None,
) -> tuple[Clip, ...]:
    """The clips that `data` selects from a probed source: for its best kept buckets, the windows and crops of each, and mirror images.

    Ordered by bucket (the best first), window and crop; at least one. `seed` is for the draws of `data.buckets[].keep`. `identify` gives
    the source's content id (by default its digest), and `rules` are those of its pixels (by default those of new caches). With the
    `cuts` of a video (first frames of scenes by their index) clips are selected from each scene as from a video, and their windows are
    numbered through. Raises Rejected with the reason, and OSError if the file cannot be read.
    """
    rank_buckets(
        probe, [b.bucket() for b in data.buckets], data.fps, data.allow_upscale
    )  # raises before the file is read
    content = content_id(source, full_hash) if identify is None else identify(source)
    rules = rules or PixelRules.of(data)
    if cuts is None or data.scenes is None:
        return tuple(_scene_clips(source, probe, data, content, seed, rules))
    scenes = scenes_between(cuts, probe.pts_seconds, probe.step, data.scenes.min_seconds)
    clips: list[Clip] = []
    windows: Counter[Bucket] = Counter()  # of the scenes before
    refusals = [
        Rejected(Reason.TOO_SHORT, f"all of its {len(cuts) + 1} scenes are shorter than data.scenes.min_seconds")
    ]
    for scene in scenes:
        part = replace(probe, pts_seconds=probe.pts_seconds[scene.start : scene.stop])
        try:
            of_scene = _scene_clips(source, part, data, content, seed, rules)
        except Rejected as refusal:
            why = f"of {len(cuts) + 1} scenes none gives a clip; the last: {refusal.detail}"
            refusals.append(Rejected(refusal.reason, why))
            continue
        for clip in of_scene:
            indices = tuple(index + scene.start for index in clip.indices)
            clips.append(replace(clip, indices=indices, window=clip.window + windows[clip.bucket]))
        windows.update(_windows_of(of_scene))
    if not clips:
        raise refusals[-1]
    return tuple(clips)


def _windows_of(clips: Sequence[Clip]) -> dict[Bucket, int]:
    """The number of windows in each bucket."""
    return {clip.bucket: clip.window + 1 for clip in clips}  # the last of a bucket has its highest number


def _scene_clips(
    source: Source, probe: Probe, data: DataConfig, content: str, seed: int, rules: PixelRules
) -> list[Clip]:
    """The clips of one scene, whose frames `probe` has, or of a whole source. Raises Rejected."""
    keep = {b.bucket(): b.keep for b in data.buckets}
    ranked = rank_buckets(probe, tuple(keep), data.fps, data.allow_upscale)
    buckets = kept_buckets(ranked, keep, content, seed)
    if not buckets:
        raise Rejected(Reason.NOT_KEPT, f"drawn out of {', '.join(map(str, ranked))} by data.buckets[].keep")
    clips = []
    mirrors = (False, True) if data.mirror and not names_a_side(source.captions, data.mirror_words) else (False,)
    for bucket in buckets[: data.buckets_per_clip]:
        fps = 0.0 if bucket.is_image else float(data.fps or probe.fps)
        for window, indices in enumerate(choose_windows(probe.pts_seconds, bucket.frames, data.fps, data.windows)):
            crops = product(mirrors, crop_boxes(probe.width, probe.height, bucket, data.crops))
            for number, (mirrored, crop) in enumerate(crops):
                clip = Clip(
                    source=source,
                    bucket=bucket,
                    indices=tuple(indices),
                    crop=crop,
                    content_id=content,
                    fps=fps,
                    seconds=bucket.frames / fps if fps else 0.0,
                    window=window,
                    crop_number=number,
                    mirrored=mirrored,
                    rules=rules,
                    pixel_parts=pixel_parts(rules, probe, crop),
                )
                clips.append(clip)
    return clips
