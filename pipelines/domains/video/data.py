"""The order of a video run, its loader, and the first epoch that completes its cache."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmspeed.data import BatchSampler, FirstEpoch, Loader, Sample
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.pipelines.domains.base import SampledData
from mmspeed.protocols import StepData

if TYPE_CHECKING:
    from mmspeed.pipelines.domains.video.domain import VideoDomain


class VideoData(SampledData[Sample]):
    """The order of a video run, its loader, and the first epoch that completes its cache."""

    def __init__(self, task: VideoDomain, sampler: BatchSampler[Sample], loader: Loader) -> None:
        self.tokens = {bucket: task.tokens(bucket) for pools in sampler.pools for bucket in pools}
        super().__init__(sampler, loader, StepWeights(task.weighting, sampler, self.tokens.__getitem__))
        self.task, self._order = task, sampler

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        """The optimizer steps; missing entries of an incomplete cache are made on the way."""
        task = self.task
        if not task.whole and self.loader.first_epoch is None:
            assert task.maker is not None
            self.loader.first_epoch = FirstEpoch(
                task.cache,
                self._order,
                task.maker,
                self.loader.rank,
                self.loader.world,
                start=start,
                stop=stop,
                held_out=task.held_out,
                group=task.group,
            )
        return super().steps(start, stop)

    def measure(self, step: StepData) -> StepData:
        """The step with the number and the tokens of its samples as divisors."""
        tokens = sum(count * self.tokens[bucket] for bucket, count in step.counts.items())
        return replace(step, divisors={**step.divisors, "tokens": float(tokens)}, tokens=tokens)

    def present(self, samples: list[Sample]) -> list[Sample]:
        """The samples without those, and without the captions, that were lost in this run's first epoch."""
        first = self.loader.first_epoch
        return first.present(samples) if first is not None else samples

    def summary(self) -> dict[str, Any] | None:
        """The results of the first epoch as a row of metrics.jsonl; None when the cache was complete."""
        first = self.loader.first_epoch
        if first is None:
            return None
        row: dict[str, Any] = {"kind": "cache", "entries": first.encoded, "lost": len(first.lost)}
        if first.lost_texts:
            row["lost_captions"] = len(first.lost_texts)
        if first.freed is not None:
            row |= {"memory_before": first.freed[0], "memory_after": first.freed[1]}
        return row

    def close(self) -> None:
        """Store the results of an interrupted first epoch."""
        if self.loader.first_epoch is not None:
            self.loader.first_epoch.close()
