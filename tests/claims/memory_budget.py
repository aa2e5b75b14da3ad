"""The bench of budgets: the memory and time of a step whose ways were chosen under a budget, against the estimates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmspeed.config import Config, make_config, video_config
from mmspeed.device import pick
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.mesh import process_group
from mmspeed.models.sections import sora_section
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.tasks import as_task
from mmspeed.pipelines.tuning.memory_search import MeasuredModel, fastest_within, measured_figures
from mmspeed.protocols import MicroBatchSize
from mmspeed.shapes import Strides

SHARES = (1.0, 0.6, 0.3, 0.15)  # budgets, as shares of the plain step's peak
NEAR = 0.05  # tolerated excess of a step over its budget, as a share
INPUTS = EncoderShapes(4, Strides(4, 8), 32)


@dataclass(frozen=True)
class BudgetRow:
    """The results of a budget; None where nothing fits."""

    share: float
    budget: int
    expected: int | None
    measured: int | None
    expected_time: float | None  # as a ratio to a plain step's
    time: float | None
    ways: dict[str, int]  # spans of each way, over all blocks
    reason: str | None = None  # why nothing fits

    def passed(self) -> bool:
        return self.measured is not None and self.measured <= (1 + NEAR) * self.budget


@dataclass(frozen=True)
class BudgetResult:
    """All budgets of a model."""

    about: str
    plain: int
    plain_seconds: float
    least: int  # least expected peak
    rows: tuple[BudgetRow, ...]

    def passed(self) -> bool:
        return all(row.passed() for row in self.rows)

    def lines(self) -> list[str]:
        text = [
            f"{self.about}; plain peak {format_bytes(self.plain)}, {self.plain_seconds:.2f} s a step; least expected "
            f"{format_bytes(self.least)}",
            f"{'budget':>6} {'':>9} {'expected':>9} {'measured':>9} {'of budget':>9} {'time':>6} {'expected':>8}  ways",
        ]
        for row in self.rows:
            if row.measured is None:
                text.append(f"{row.share:>6.2f} {format_bytes(row.budget):>9}  {row.reason}")
                continue
            assert row.expected is not None and row.time is not None and row.expected_time is not None
            ways = ", ".join(f"{count} x {way}" for way, count in row.ways.items()) or "all saved"
            text.append(
                f"{row.share:>6.2f} {format_bytes(row.budget):>9} {format_bytes(row.expected):>9} {format_bytes(row.measured):>9} "
                f"{row.measured / row.budget:>9.1%} {row.time:>6.2f} {row.expected_time:>8.2f}  {ways}"
            )
        text.append(f"{'PASSED' if self.passed() else 'FAILED'}: every budget kept to within {NEAR:.0%}")
        return text


def setting(arrangement: str, device: str, full: bool) -> Config:
    """The config of a model whose memory is mostly activations."""
    width = 384 if full else 64
    config = make_config(
        {
            "data": {
                "sources": [{"path": "none"}],
                "buckets": [{"frames": 33, "height": 256, "width": 256}],
            },
            "model": {
                "size": "nano", "arrangement": arrangement, "width": width, "depth": 16, "heads": width // 32, "adaln_rank": 16,
            },
            "train": {"ema_decay": None, "micro_batch_size": 1, "batch_size": 1},
            "text": {"max_tokens": 32},
            "device": {"kind": device, "peak_tflops": 1.0},
        },
        origin="bench",
    )  # fmt: skip
    return video_config(config, "bench")


def measure_budgets(
    arrangement: str,
    device: str = "auto",
    full: bool = False,
    shares: Sequence[float] = SHARES,
    progress: Callable[[str], None] = lambda text: None,
) -> BudgetResult:
    """Choose ways under each budget, and measure real steps."""
    config = setting(arrangement, device, full)
    where = pick(device)
    where.activate()
    step = MicroBatchSize(config.buckets[0], 1, False)
    task = as_task(VideoDomain(config).use(INPUTS), config)
    with process_group(where):
        progress("one block of each kind")
        figures = measured_figures(config, task, where, step)
        plain: list[dict[str, Any]] = [{} for _ in figures.kinds]
        tried = MeasuredModel(config, task, where, step, plain)
        peak = tried.peak(plain)
        if peak is None:
            raise UserError("a plain step does not fit into this device's memory; leave out --full")
        plain_seconds = min(tried.seconds() for _ in range(2))
        rows = []
        for share in shares:
            progress(f"budget {share}")
            budget = int(share * peak)
            try:
                choice = fastest_within(figures, budget, tried)
            except UserError as error:
                rows.append(BudgetRow(share, budget, None, None, None, None, {}, str(error)))
                continue
            seconds = min(tried.seconds() for _ in range(2))
            expected = 1 + choice.added_seconds / plain_seconds
            ways = dict(Counter(f"{name}: {way}" for block in choice.ways for name, way in block.items()))
            rows.append(
                BudgetRow(
                    share, budget, choice.expected_peak, choice.measured_peak, expected, seconds / plain_seconds, ways
                )
            )
        tokens = task.domain.tokens(step.shape)
        width = sora_section(config, "this claim").width
        about = f"{arrangement}, float32, width {width}, {len(plain)} blocks, {tokens} tokens; {where.name}"
        return BudgetResult(about, peak, plain_seconds, figures.least(), tuple(rows))
