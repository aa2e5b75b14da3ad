"""Decode ahead of the encoder: a few threads, each with a child process that can be killed, a bounded number of clips ahead."""

from __future__ import annotations

import importlib.util
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mmspeed.config import Config
from mmspeed.config.schema import DataConfig
from mmspeed.data.cache.contents import SceneLine, append_scenes, read_scenes
from mmspeed.device import pick
from mmspeed.errors import UserError
from mmspeed.media.other_decoders import OtherDecoder
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected, Rejection, in_words
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.clips import (
    Clip,
    ReadFile,
    clip_name,
    repeats_too_much,
    role_differs,
    select_clips,
    with_roles,
)
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.preprocess.decoding.scenes import PACKAGE, VERSION, SceneDetector
from mmspeed.preprocess.decoding.worker import DecodeWorker, StoppedError
from mmspeed.preprocess.sources.fetched import MediaStore

_SOURCES_AHEAD = 2  # beyond one for each worker
_CLIPS_AHEAD = 2  # of each source
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Selected:
    """A source was probed, and these of its clips were selected."""

    source: Source
    clips: tuple[Clip, ...]
    probe: Probe
    dropped: tuple[Rejection, ...] = ()  # clips that repeat too many frames, beside others that do not
    cuts: int = 0  # scene cuts in it (`data.scenes`)


@dataclass(frozen=True)
class Frames:
    """A wanted clip is decoded: uint8 frames (F, H, W, 3) at the bucket's height and width."""

    source: Source
    clip: Clip
    frames_FHWC: np.ndarray


@dataclass(frozen=True)
class Failed:
    """A wanted clip, or with `clip` None the whole source, is rejected; `probe` is of a source that fits no bucket."""

    source: Source
    clip: Clip | None
    rejected: Rejected
    probe: Probe | None = None


@dataclass(frozen=True)
class Finished:
    """No more events follow for a source."""

    source: Source


Event = Selected | Frames | Failed | Finished


class DecodePool(AbstractContextManager["DecodePool"]):
    """Probe and decode `sources` in order, ahead of the consumer.

    At most two more sources than workers are in progress, each with at most two decoded clips waiting, and
    one more held by each worker. Use as a context manager; leaving it ends the child processes immediately. `recipe` is by default
    that of the config's cache, for reading alone.
    """

    def __init__(self, config: Config, sources: Sequence[Source], recipe: Recipe | None = None) -> None:
        self.config = config
        self.sources = sources
        self.recipe = recipe or Recipe.of(config, sources)
        self.size = max(1, min(config.preprocess.decode_workers, len(sources)))
        self.media = MediaStore.of(config.data)
        self.media.expect(sources)
        self._runs: list[_PoolRun] = []

    def __exit__(self, *error: object) -> None:
        for run in self._runs:
            run.stop()
        self.media.close()

    def waiting_clips(self) -> int:
        """The number of decoded clips that wait for the consumer."""
        return sum(run.waiting_clips() for run in self._runs)

    def run(self, wanted: Callable[[Clip], bool] | None, ordered: bool = True) -> Iterator[Event]:
        """Yield the events of every source, in order; with `ordered` False as they come, sources mixed.

        If sources have many clips each, the order costs speed: while one is consumed, the workers of the next soon wait.

        For each source: `Selected`, then for each `wanted` clip, also of its further roles, one `Frames` or `Failed`, as they are decoded, then
        `Finished`; or, if the whole source is rejected, `Failed` without a clip and `Finished`. `wanted` (None: no clips, the
        sources are only planned) is called in other threads. Their exceptions are raised here.
        """
        run = _PoolRun(self.config, self.sources, wanted, self.size, self.recipe, self.media)
        self._runs.append(run)
        run.start()  # now, not when the first event is requested
        return self._events(run, ordered)

    def _events(self, run: _PoolRun, ordered: bool) -> Iterator[Event]:
        try:
            yield from run.events(ordered)
        finally:
            run.stop()
            self._runs.remove(run)


def chosen_decoder(config: Config, rules: PixelRules) -> OtherDecoder | None:
    """The decoder that a config names, on its device; None for PyAV. Raises UserError where its package or its device is missing."""
    settings = config.preprocess
    if settings.decoder == "pyav":
        return None
    if importlib.util.find_spec(settings.decoder) is None:
        raise UserError(
            f"preprocess.decoder: {settings.decoder} is not installed; pip install {settings.decoder}, or use pyav"
        )
    if settings.decoder_device == "cpu":
        return OtherDecoder(settings.decoder, "cpu", rules)
    device = pick(config.device.kind)
    if not device.decodes_video:
        raise UserError(
            f"preprocess.decoder_device: run, but torch {torch.__version__} has no GPU here that decodes video "
            f"(the run's device is {device.kind}); use decoder_device: cpu"
        )
    return OtherDecoder(settings.decoder, str(device.torch_device), rules)


def source_events(
    worker: DecodeWorker,
    source: Source,
    config: Config,
    wanted: Callable[[Clip], bool] | None,
    recipe: Recipe,
    media: MediaStore,
    memory: SceneMemory | None = None,
) -> Iterator[Event]:
    """Yield the events of one source; see `DecodePool.run`. A remote one has a local copy in `media` meanwhile.

    With `memory` videos are cut into scenes.
    """
    data, limit = config.data, config.preprocess.time_limit
    probe: Probe | None = None
    with ExitStack() as stack:
        try:
            here = stack.enter_context(media.local(source))
            probe = worker.open(here, int(data.max_file_mb * 1e6), data.max_pixels, limit)
            select = partial(
                select_clips, source, probe, data, config.preprocess.full_hash, config.seed, rules=recipe.rules
            )
            selected = select(lambda _: recipe.contents.id_of(here))
            cuts: tuple[int, ...] = ()
            if memory is not None and len(probe.pts_seconds) > 1:
                content, detector = selected[0].content_id, memory.detector
                name = ",".join([content, *probe.applied])  # other scenes may be found than in a plain reading
                cuts = memory.cuts(name, partial(worker.scene_cuts, here, detector, limit))
                selected = select(lambda _: content, cuts=cuts)
            clips, dropped = without_repeats(selected, data.max_repeated)
            files = {}
            for role, other in source.roles:
                files[role] = _beside(
                    worker, role, other, stack.enter_context(media.local(other)), probe, config, recipe
                )
            clips = tuple(with_roles(clip, files) for clip in clips)
            files["video"] = ReadFile(source, here, probe, clips[0].content_id)
            for file in files.values() if wanted is not None else ():
                recipe.contents.remember(file.here, file.content_id)
        except (Rejected, OSError) as error:
            yield Failed(source, None, _refused(error), probe if isinstance(error, Rejected) else None)
        else:
            yield Selected(source, clips, probe, dropped, len(cuts))
            every = () if wanted is None else [each for clip in clips for each in clip.distinct if wanted(each)]
            for role in ("video", *(role for role, _ in source.roles)):
                file, wanted_clips = files[role], [clip for clip in every if clip.role == role]
                for position, result in worker.read(file.here, [clip.cut for clip in wanted_clips], limit):
                    clip = wanted_clips[position].decoded_by(file.probe.reader or file.probe.decoder)
                    yield Failed(source, clip, result) if isinstance(result, Rejected) else Frames(source, clip, result)
    yield Finished(source)


def _beside(
    worker: DecodeWorker, role: str, source: Source, here: Source, video: Probe, config: Config, recipe: Recipe
) -> ReadFile:
    """The file of a further role. Raises Rejected, also where it does not go with its video."""
    data = config.data
    try:
        probe = worker.open(here, int(data.max_file_mb * 1e6), data.max_pixels, config.preprocess.time_limit)
        if differs := role_differs(video, probe):
            raise Rejected(Reason.ROLE_DIFFERS, differs)
        return ReadFile(source, here, probe, recipe.contents.id_of(here))
    except (Rejected, OSError) as error:
        rejected = _refused(error)
        raise Rejected(rejected.reason, f"its {role} {source.name}: {rejected.detail}") from None


def without_repeats(clips: Sequence[Clip], max_repeated: float) -> tuple[tuple[Clip, ...], tuple[Rejection, ...]]:
    """The clips that do not repeat too many frames, and the rejections of the others. Raises Rejected if all do."""
    refused = {number: why for number, clip in enumerate(clips) if (why := repeats_too_much(clip, max_repeated))}
    if len(refused) == len(clips):
        raise refused[0]
    rejections = []
    for number, why in refused.items():
        clip = clips[number]
        rejections.append(why.of(clip_name(clip.source.name, clip.bucket, clip.window, clip.crop_number)))
    return tuple(clip for number, clip in enumerate(clips) if number not in refused), tuple(rejections)


def _refused(error: Rejected | OSError) -> Rejected:
    return error if isinstance(error, Rejected) else Rejected(Reason.UNDECODABLE, f"cannot be read: {in_words(error)}")


class _PoolRun:
    """The threads of one pass over the sources, and the events that wait for the consumer."""

    def __init__(
        self,
        config: Config,
        sources: Sequence[Source],
        wanted: Callable[[Clip], bool] | None,
        size: int,
        recipe: Recipe,
        media: MediaStore,
    ) -> None:
        self._media = media
        self._config, self._sources, self._wanted, self._recipe = config, sources, wanted, recipe
        self._ahead = size + _SOURCES_AHEAD
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[Event | BaseException]] = {}  # by number of the source, for those in progress
        self._begun = self._done = 0  # numbers of sources; in order, the current one is `_done`
        self._stopped = False
        self._memory = scene_memory(config.data, recipe.contents.root)
        other = chosen_decoder(config, recipe.rules)
        self._workers = [DecodeWorker(other) for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"decode-{number}", daemon=True)
            for number, worker in enumerate(self._workers)
        ]

    def start(self) -> None:
        """Start decoding."""
        for thread in self._threads:
            thread.start()

    def events(self, ordered: bool) -> Iterator[Event]:
        """Yield all events. Raises the exceptions of the threads."""
        while self._done < len(self._sources):
            yield self._get(ordered)

    def waiting_clips(self) -> int:
        """The number of decoded clips that have not been consumed."""
        with self._changed:
            return sum(_clips(waiting) for waiting in self._waiting.values())

    def stop(self) -> None:
        """End the threads and their processes."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)  # one that waits for a remote store ends later by itself

    def _work(self, worker: DecodeWorker) -> None:
        with worker:
            while (number := self._begin()) is not None:
                try:
                    source = self._sources[number]
                    for event in source_events(
                        worker, source, self._config, self._wanted, self._recipe, self._media, self._memory
                    ):
                        self._put(number, event)
                except StoppedError:
                    return
                except BaseException as error:  # raised in the consumer
                    self._put(number, error)
                    return

    def _begin(self) -> int | None:
        """Wait until the next source may be started and return its number; None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._begun < self._done + self._ahead)
            if self._stopped or self._begun == len(self._sources):
                return None
            number, self._begun = self._begun, self._begun + 1
            self._waiting[number] = deque()
            return number

    def _put(self, number: int, event: Event | BaseException) -> None:
        """Queue an event; waits while the most clips of its source are queued. Raises StoppedError."""
        with self._changed:
            waiting = self._waiting[number]
            if isinstance(event, Frames):
                self._changed.wait_for(lambda: self._stopped or _clips(waiting) < _CLIPS_AHEAD)
            if self._stopped:
                raise StoppedError
            waiting.append(event)
            self._changed.notify_all()

    def _get(self, ordered: bool) -> Event:
        """The next event, of the first source in progress or of any. Raises the exception of its thread; StoppedError after `stop`."""

        def number() -> int | None:
            of = [self._done] if ordered else self._waiting
            return next((number for number in of if self._waiting.get(number)), None)

        with self._changed:
            self._changed.wait_for(lambda: self._stopped or number() is not None)
            ready = number()
            if self._stopped or ready is None:
                raise StoppedError
            event = self._waiting[ready].popleft()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Finished):
                del self._waiting[ready]
                self._done += 1
            self._changed.notify_all()
            return event


def _clips(events: deque[Event | BaseException]) -> int:
    return sum(isinstance(event, Frames) for event in events)


def scene_memory(data: DataConfig, root: Path) -> SceneMemory | None:
    """The memory of a config's detector in a cache; None without `data.scenes`. Raises UserError if the package is missing."""
    if data.scenes is None:
        return None
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"data.scenes needs the package {PACKAGE}: pip install 'mmspeed[scenes]', or leave data.scenes out"
        )
    return SceneMemory(root, SceneDetector(data.scenes.detector, data.scenes.least_change))


@dataclass
class SceneMemory:
    """The cuts that a cache in `root` remembers for one detector. Threads may share it."""

    root: Path
    detector: SceneDetector
    _cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _name: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process's lines

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        try:
            lines = list(read_scenes(self.root))
        except OSError:  # found again
            lines = []
        wanted = self.detector.detector, self.detector.threshold, VERSION
        self._cuts |= {one.content: one.cuts for one in lines if (one.detector, one.threshold, one.version) == wanted}

    def cuts(self, content: str, find: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        """The cuts of a content: those remembered, else those that `find` returns, which are remembered. Raises what it raises."""
        if content not in self._cuts:
            cuts = tuple(sorted(set(find())))
            settings = self.detector
            with self._lock:
                self._cuts[content] = cuts
                try:
                    line = SceneLine(content, settings.detector, settings.threshold, VERSION, cuts)
                    append_scenes(self.root, self._name, line)
                except OSError:  # a cache that is not written to, such as one at a URL: they are found again
                    pass
        return self._cuts[content]
