"""The packs of each optimizer step of a language model: an order of training whose samples differ from epoch to epoch.

An epoch's documents are packed by `packs.pack`, and its packs dealt to steps of equal cost. The place in the data is the number of packs
behind; whoever goes on with another length, mode, size of steps or number of ranks packs exactly the token ranges that are left.

Packs without a token to predict, as of the question alone of a long chat, are left out before they are dealt to steps: nothing would be
learned from them, and their steps might move weights by old moments alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from mmspeed.data.cache.keys import KEY_LENGTH, canonical_json
from mmspeed.errors import UserError
from mmspeed.protocols import ShapeClass

from .mixture import SamplePool, rates, uses_of
from .order import Batching, StepLocation
from .packs import Array, PackMode, Packs, TokenRanges, pack, steps_of_equal_cost, whole_documents
from .sampler import SampleUse


@dataclass(frozen=True, order=True)
class PackLength:
    """The shape class of packs of `numbers` tokens, real ones or padding; a sequence-parallel group computes a pack together."""

    numbers: int
    splits: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name of the class, such as `pack004096`."""
        return f"pack{self.numbers:06d}"

    def __str__(self) -> str:
        return f"packs of {self.numbers:,}"


@dataclass(frozen=True, eq=False)
class PackSample:
    """A pack as the order of training sees it.

    pieces: (document, begin, count) of each range of tokens, in their order. name: unique in an epoch.
    """

    name: str
    pieces: tuple[tuple[int, int, int], ...]
    shape: PackLength
    dataset: ClassVar[str] = ""
    lost: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """The name: the first range, and a hash of all."""
        return self.name

    @property
    def bucket(self) -> ShapeClass:
        return self.shape

    @property
    def source(self) -> str:
        """The documents of the pack, for messages."""
        first = ", ".join([str(piece[0]) for piece in self.pieces[:4]])
        more = f" and {len(self.pieces) - 4} more" if len(self.pieces) > 4 else ""
        return f"documents {first}{more}"

    @functools.cached_property
    def tokens(self) -> int:
        """Real tokens."""
        return sum([piece[2] for piece in self.pieces])

    @functools.cached_property
    def squares(self) -> int:
        """The sum of the squared lengths of the ranges: the pack's work in attention."""
        return sum(count * count for _, _, count in self.pieces)


@dataclass(frozen=True)
class DocumentSupply:
    """The documents to train on, and how often an epoch uses them.

    Args:
        lengths: tokens of all documents; source: the number of each one's source; trained: False for those held out.
        sources: names by number.
        repeats, weights, temperature: as `mixture.rates` has them; shares are of tokens.
        fingerprint: a name for the documents.
        targets: (documents, begins, counts) -> the number of tokens that are predicted in each of these ranges; None: no pack is left
            out for a lack of them.
    """

    lengths: Array
    source: Array
    trained: Array
    sources: Sequence[str]
    fingerprint: str
    repeats: Mapping[str, int] | int = 1
    weights: Mapping[str, float] | None = None
    temperature: float | None = None
    targets: Callable[[Array, Array, Array], Array] | None = None

    @functools.cached_property
    def pools(self) -> list[SamplePool]:
        """The documents of each source, and their uses in an epoch. Raises UserError where there is none to train on."""
        usable = self.trained & (self.lengths > 0)
        by_source = [np.flatnonzero(usable & (self.source == number)) for number in range(len(self.sources))]
        tokens = {
            name: int(self.lengths[places].sum(dtype=np.int64))
            for name, places in zip(self.sources, by_source, strict=True)
        }
        rate = rates(tokens, self.repeats, self.weights, self.temperature)
        pools = [
            SamplePool(PackLength(0), name, places, uses_of([len(places)], rate[name])[0])
            for name, places in zip(self.sources, by_source, strict=True)
            if len(places) and rate[name]
        ]
        if not pools:
            raise UserError(
                "the sources have no documents to train on; `mmspeed check` shows why texts are rejected, "
                "and texts.validation sets the share held out"
            )
        return pools

    @property
    def documents(self) -> int:
        """Documents to train on."""
        return sum(len(pool.places) for pool in self.pools)

    @property
    def facts(self) -> list[Any]:
        """All that the ranges of an epoch depend on but the seed, in JSON's types."""
        return [self.fingerprint, [[pool.dataset, len(pool.places), pool.uses] for pool in self.pools]]

    def ranges(self, epoch: int, seed: int) -> TokenRanges:
        """The documents of an epoch whole; a document's use number r has the number `document + r * len(lengths)`."""
        total = len(self.lengths)
        parts = []
        for pool in self.pools:
            rounds = pool.uses // len(pool.places)
            parts += [pool.places + turn * total for turn in range(rounds)]
            places, repeats = pool.in_turn(epoch, seed)
            parts.append(places + repeats * total)
        numbers = np.concatenate(parts)
        count = np.asarray(self.lengths)[numbers % total]
        whole = whole_documents(count)
        return TokenRanges(numbers[whole.document], whole.begin, whole.count)

    def without_targets(self, packs: Packs) -> Array:
        """True for each pack in which nothing is predicted."""
        if self.targets is None:
            return np.zeros(len(packs), bool)
        ranges = packs.ranges
        return np.equal(packs.targets(self.targets(ranges.document % len(self.lengths), ranges.begin, ranges.count)), 0)


@dataclass(frozen=True)
class PastPacks:
    """A part of an epoch: how its packs were made, and how many of them were used.

    size: packs of a step. attention: the cost of a squared token beside that of a token. left_out: places that a roll-back left out.
    without: packs that are left out since they have no target; 0: all are used; None: as many as there are.
    """

    length: int
    mode: PackMode
    size: int
    attention: float
    used: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    without: int | None = 0

    def same_packs(self, other: PastPacks) -> bool:
        """True where packs are the same, and their steps but for packs without targets."""
        return replace(self, used=0, left_out=(), without=0) == replace(other, used=0, left_out=(), without=0)


@dataclass(frozen=True)
class PackOrigin:
    """The place that an order begins at: `past` are the parts of the epoch behind it. planned: (packs, steps) of the whole epoch."""

    step: int = 0
    epoch: int = 0
    past: tuple[PastPacks, ...] = ()
    planned: tuple[int, int] | None = None


@dataclass
class _EpochPacks:
    """The packs of (the rest of) an epoch, in their order; the first of them belong to steps before `begin`, if `behind`."""

    epoch: int
    begin: int
    behind: int
    past: tuple[PastPacks, ...]
    packs: Packs
    order: Array
    size: int
    planned: tuple[int, int]
    left_out: list[tuple[int, int]] = field(default_factory=list)

    @property
    def without(self) -> int:
        """Packs that are left out since they have no target."""
        return len(self.packs) - len(self.order)

    @property
    def end(self) -> int:
        """The step behind its last one."""
        return self.begin + -(-(len(self.order) - self.behind) // self.size)

    def places(self, step: int) -> range:
        """The places in the order of a step's packs."""
        start = self.behind + (step - self.begin) * self.size
        return range(start, min(start + self.size, len(self.order)))


class PackSampler:
    """The order of training on packs, with the same methods as `BatchSampler`.

    Args:
        supply: the documents.
        length, mode: of packs.
        batching: sizes of steps; packs of a step are dealt to ranks by its `share`.
        attention: the cost of a squared token of a document beside that of a token: packs of a step have like costs.
        seed: seed of the order.
    """

    def __init__(
        self, supply: DocumentSupply, length: int, mode: PackMode, batching: Batching, attention: float, seed: int
    ) -> None:
        self.supply, self.batching, self.seed = supply, batching, seed
        self.shape = PackLength(length)
        self.setting = PastPacks(length, mode, batching.supply(self.shape, 0).step, attention, without=None)
        self.origin = PackOrigin()
        self._parts: list[_EpochPacks] = []
        self._left_out: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (epoch, number of parts before) -> places

    # -- the order --------------------------------------------------------------------------------------------------

    def _part(self, step: int) -> _EpochPacks:
        """The part of an epoch that a step is in. Raises IndexError for a step before the origin."""
        if step < self.origin.step:
            raise IndexError(f"there is no step {step}: the order begins at {self.origin.step}")
        while not self._parts or step >= self._parts[-1].end:
            self._parts = [*self._parts[-1:], self._next_part()]  # reading ahead may be an epoch beyond training
        for part in self._parts:
            if part.begin <= step < part.end:
                return part
        self._parts = []  # an earlier epoch than those in memory
        return self._part(step)

    def _next_part(self) -> _EpochPacks:
        if self._parts:
            return self._epoch_packs(self._parts[-1].epoch + 1, self._parts[-1].end, (), 0, None)
        origin = self.origin
        part, past = None, origin.past
        if past and past[-1].same_packs(self.setting):
            part = self._epoch_packs(origin.epoch, origin.step, past[:-1], past[-1].used, origin.planned)
        if part is None or part.without != past[-1].without:  # some that have no target were used then
            part = self._epoch_packs(origin.epoch, origin.step, past, 0, origin.planned)
        if part.begin == part.end:  # the epoch is used up
            return self._epoch_packs(origin.epoch + 1, origin.step, (), 0, None)
        return part

    def _epoch_packs(
        self, epoch: int, begin: int, past: tuple[PastPacks, ...], behind: int, planned: tuple[int, int] | None
    ) -> _EpochPacks:
        """The packs of what the parts before have left of an epoch."""
        ranges = self.supply.ranges(epoch, self.seed)
        for number, before in enumerate(past):
            packs, order = self._packed(ranges, before, epoch, number)
            gone = [order[: before.used], *(order[start:end] for start, end in before.left_out)]
            ranges = packs.rest(np.concatenate(gone))
        packs, order = self._packed(ranges, self.setting, epoch, len(past))
        size = self.setting.size
        if not past and not len(order):
            raise UserError(
                f"no pack of {self.shape.numbers:,} tokens has a token to predict: in the training documents nothing but first tokens has a loss"
            )
        if planned is None:
            planned = len(order), -(-len(order) // size)
        left_out = self._left_out.setdefault((epoch, len(past)), [])
        return _EpochPacks(epoch, begin, behind, past, packs, order, size, planned, left_out)

    def _packed(self, ranges: TokenRanges, how: PastPacks, epoch: int, number: int) -> tuple[Packs, Array]:
        """(packs of ranges, the numbers of those with a target in the order of steps)."""
        packs = pack(ranges, how.length, how.mode, self.seed, epoch, number)
        kept = np.arange(len(packs))
        if how.without != 0:
            kept = kept[~self.supply.without_targets(packs)]
        cost = packs.tokens() + how.attention * packs.squares()
        steps = steps_of_equal_cost(cost[kept], how.size, self.seed, epoch, number)
        return packs, kept[np.concatenate(steps)] if steps else np.zeros(0, np.int64)

    def draws(self, step: int) -> list[SampleUse[PackSample]]:
        """The packs of one optimizer step over all devices; left out ones are marked."""
        part = self._part(step)
        return [
            SampleUse(
                self._sample(part, int(part.order[place])), part.epoch, 0, any(a <= place < b for a, b in part.left_out)
            )
            for place in part.places(step)
        ]

    def _sample(self, part: _EpochPacks, number: int) -> PackSample:
        total = len(self.supply.lengths)
        ranges = part.packs.ranges_of(number)
        rows = ranges.rows()
        numbers = b"".join((ranges.document.tobytes(), ranges.begin.tobytes(), ranges.count.tobytes()))
        digest = hashlib.blake2b(numbers, digest_size=8).hexdigest()
        pieces = tuple([(document % total, begin, count) for document, begin, count in rows])
        return PackSample(f"{rows[0][0]}+{rows[0][1]}-{digest}", pieces, self.shape)

    def leave_out(self, steps: range) -> list[SampleUse[PackSample]]:
        """Leave the packs of these steps out; returns those that counted until now."""
        gone: list[SampleUse[PackSample]] = []
        for step in steps:
            gone += [draw for draw in self.draws(step) if not draw.lost]
            part, places = self._part(step), self._part(step).places(step)
            part.left_out.append((places.start, places.stop))
        return gone

    def locate(self, step: int) -> StepLocation:
        """The position of an optimizer step. Raises IndexError for one before the origin."""
        part = self._part(step)
        return StepLocation(0, part.epoch, step - part.begin)

    def packs_of(self, step: int) -> Packs:
        """The packs of the epoch, or of its rest, that a step is in; without those that have no target."""
        part = self._part(step)
        return part.packs.only(np.sort(part.order)) if part.without else part.packs

    @property
    def without_targets(self) -> int:
        """Packs of the epoch that the order begins in that are left out since they have no target."""
        return self._part(self.origin.step).without

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the epoch that the order begins in."""
        return self._part(self.origin.step).planned[1]

    @property
    def first_pass(self) -> int:
        """The step by which the first epoch has ended."""
        return self._part(self.origin.step).end

    def samples_of(self, stage: int) -> int:
        """Packs of the epoch that the order begins in."""
        return self._part(self.origin.step).planned[0]

    def mean_of_epoch(self, step: int, size: Callable[[ShapeClass], float]) -> float:
        """The mean over the steps of `step`'s epoch, as planned at its beginning, of the sizes of their packs."""
        packs, steps = self._part(step).planned
        return packs * size(self.shape) / steps

    # -- the place in the data --------------------------------------------------------------------------------------

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the documents and of their uses in an epoch."""
        return hashlib.sha256(canonical_json(self.supply.facts).encode()).hexdigest()[:KEY_LENGTH]

    def state(self, step: int) -> dict[str, Any]:
        """The state for a checkpoint taken before `step`, in JSON's types, independent of the number of ranks."""
        part = self._part(step)
        here = replace(self.setting, used=part.places(step).start, left_out=tuple(part.left_out), without=part.without)
        return {
            "data": self.fingerprint,
            "step": step,
            "epoch": part.epoch,
            "past": [asdict(past) for past in (*part.past, here)],
            "planned": list(part.planned),
            "left_out": [[epoch, number, *gap] for (epoch, number), gaps in self._left_out.items() for gap in gaps],
            "documents": self.supply.documents,
        }

    def resume(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a checkpoint's state, before the first step is requested. Returns a message about changes, or None.

        With other lengths, mode, batches, or a number of ranks that sizes of batches depend on, exactly the token ranges that are left of
        the epoch follow, packed again. With other documents a new epoch begins. What is left out stays so.
        """
        self._parts = []
        step, epoch = int(state["step"]), int(state["epoch"])
        if state["data"] != self.fingerprint:
            self.origin = PackOrigin(step, epoch + 1)
            return (
                f"the training data changed since the checkpoint ({state['documents']:,} documents, now "
                f"{self.supply.documents:,}): a new epoch begins"
            )
        past = tuple(
            PastPacks(**{**row, "left_out": tuple((a, b) for a, b in row["left_out"])}) for row in state["past"]
        )
        for place, number, start, end in state["left_out"]:
            gaps = self._left_out.setdefault((place, number), [])
            if (start, end) not in gaps:
                gaps.append((start, end))
        while past and not past[-1].used and not past[-1].left_out:  # nothing of its packs was used
            past = past[:-1]
        planned = None if not past else (int(state["planned"][0]), int(state["planned"][1]))
        self.origin = PackOrigin(step, epoch, past, planned)
        if not past:
            return None
        part = self._part(step)
        if past[-1].same_packs(self.setting) and (part.epoch != epoch or len(part.past) < len(past)):
            return None
        left = part.packs.ranges.tokens if part.epoch == epoch else 0
        return (
            f"packs differ from those before the checkpoint: the {left:,} tokens that are left of epoch {epoch} are "
            "packed again"
        )
