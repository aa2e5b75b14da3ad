"""The parts of `mmspeed bench memory`, one after the other."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from mmspeed.errors import UserError

from . import memory as ways
from . import memory_budget as budgets
from . import memory_tiers as tiers
from .latents import parse_latent

PARTS = ("ways", "optimizer", "budget")
ARRANGEMENTS: tuple[Literal["factorised", "full"], ...] = ("factorised", "full")
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


@dataclass
class MemoryBenchResult:
    """The results of every part."""

    ways: list[ways.PolicyResult] = field(default_factory=list)
    optimizer: list[tiers.TierRow] = field(default_factory=list)
    budget: list[budgets.BudgetResult] = field(default_factory=list)

    def passed(self) -> bool:
        parts = [[each.passed() for each in part] for part in (self.ways, self.optimizer, self.budget)]  # type: ignore[attr-defined]
        return all(map(all, parts))

    def verdict_lines(self) -> list[str]:
        return [f"{'PASSED' if self.passed() else 'FAILED'}: all parts"]

    def to_json(self) -> str:
        figures: dict[str, Any] = {
            "ways": [each.to_dict() for each in self.ways],
            "optimizer": [asdict(row) | {"passed": row.passed()} for row in self.optimizer],
            "budget": [each.to_dict() for each in self.budget],
            "passed": self.passed(),
        }
        return json.dumps(figures, indent=2)


def bench_memory(
    *,
    full: bool,
    only: str | None,
    arrangement: str | None,
    dtype: str | None,
    latent: str | None,
    rounds: int,
    device: str,
    grown: bool,
    shown: bool,
) -> MemoryBenchResult:
    """Measure; `shown`: print each part when it is done. Raises UserError for an unknown choice."""
    parts = _one_of("--only", only, PARTS)
    arrangements = cast(Any, _one_of("--arrangement", arrangement, ARRANGEMENTS))
    dtypes = cast(Any, _one_of("--dtype", dtype, DTYPES))
    shape = parse_latent(latent or ("5x16x16" if full else "5x32x32"))
    result = MemoryBenchResult()

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def show(lines: list[str]) -> None:
        tell("")
        if shown:
            print("\n".join(lines), end="\n\n", flush=True)

    if "ways" in parts:
        make = ways.PolicySetting.full_size if full else ways.PolicySetting
        for each in arrangements:
            for number in dtypes:
                setting = make(arrangement=each, dtype=number, latent=shape, rounds=rounds, device=device, sizes=grown)
                result.ways.append(ways.measure(setting, progress=tell))
                show(result.ways[-1].lines())
    if "optimizer" in parts:
        size = tiers.TierModelSize(1152, 8, 16, 256) if full else tiers.TierModelSize()
        result.optimizer = tiers.measure_tiers(size, rounds=max(1, rounds), device=device, progress=tell)
        show(tiers.lines(result.optimizer))
    if "budget" in parts:
        for each in arrangements:
            result.budget.append(budgets.measure_budgets(each, device=device, full=full, progress=tell))
            show(result.budget[-1].lines())
    return result


def _one_of(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text else known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UserError(f"{option}: {unknown[0]} is not one of {', '.join(known)}")
    return chosen
