"""Named terms over all ranks: their union and their values.

Ranks pair their terms by name. A rank whose micro-batches have no such term counts 0 for it, so that images on one rank and videos on
another may have terms of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from mmspeed.comm import all_gather_objects, all_reduce_max, all_reduce_sum, alone
from mmspeed.errors import UserError
from mmspeed.protocols import Divisors, Terms


@dataclass(frozen=True)
class TermKind:
    """The properties of a term that are the same on all ranks: the name of its divisor, and whether it trains."""

    divisor: str
    trains: bool


def terms_of_all(kinds: Mapping[str, TermKind], group: dist.ProcessGroup | None) -> dict[str, TermKind]:
    """The terms of all ranks, sorted by name. A collective call, of two numbers where all ranks have the same terms.

    Raises UserError on every rank for a term whose divisor or whose training differs between ranks.
    """
    ordered = dict(sorted(kinds.items()))
    if alone(group):
        return ordered
    entries_here = [[name, kind.divisor, kind.trains] for name, kind in ordered.items()]
    digest = hashlib.sha256(json.dumps(entries_here).encode()).digest()
    number = float(int.from_bytes(digest[:6], "big"))  # 48 bits, which float64 holds exactly
    largest, smallest = all_reduce_max([number, -number], group)
    if largest == -smallest:
        return ordered
    union: dict[str, TermKind] = {}
    for rank, entries in enumerate(all_gather_objects(entries_here, group)):
        for name, divisor, trains in entries:
            kind = TermKind(divisor, trains)
            if union.setdefault(name, kind) != kind:
                raise UserError(
                    f"the term '{name}' is not the same on all ranks: rank {rank} has {kind}, a rank before it {union[name]}"
                )
    return dict(sorted(union.items()))


def reduce_terms(terms: Terms, divisors: Divisors) -> dict[str, float]:
    """Each term's sum over the items of all ranks in float64, divided by its divisor (None: the sum of its weights). A collective call.

    Empty where no rank has a term; a term without an item that counts is left out. Raises ValueError for a missing divisor.
    """
    kinds = terms_of_all({name: TermKind(term.divisor, term.trains) for name, term in terms.items()}, None)
    for name, kind in kinds.items():
        if kind.divisor not in divisors:
            raise ValueError(f"the term '{name}' has the divisor '{kind.divisor}', and there are {', '.join(divisors)}")
    sums: list[float] = []
    for name in kinds:
        losses, weights = (terms[name].loss_I.tolist(), terms[name].weight_I.tolist()) if name in terms else ([], [])
        sums += [sum(loss * weight for loss, weight in zip(losses, weights, strict=True)), sum(weights)]
    totals = all_reduce_sum(sums) if kinds else []
    values = {}
    for place, (name, kind) in enumerate(kinds.items()):
        declared = divisors[kind.divisor]
        divisor = totals[2 * place + 1] if declared is None else declared
        if divisor:
            values[name] = totals[2 * place] / divisor
    return values
