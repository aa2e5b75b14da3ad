"""The optimizer step: the same numbers on any number of ranks and for any division into micro-batches (law 2).

Legend: I items of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from mmspeed.comm import Axis, all_gather_objects, all_reduce_sum
from mmspeed.errors import UserError, first_names
from mmspeed.mesh import Mesh
from mmspeed.parallel import sum_shared_gradients
from mmspeed.protocols import Batch, Divisors, MicroBatches, Models, Update, UseName

from .counts import counting, counting_modules, place_of, share_counts
from .gradients import clip_gradients
from .optimizers.gradient_release import ReleasingOptimizer
from .optimizers.make_optimizer import AnyOptimizer
from .runner import Call, Runner, RunRecord, TermsOf, scale_of
from .terms import TermKind, terms_of_all

# reads a step's micro-batches again without some uses; None where none is left
Again = Callable[[Sequence[UseName]], "MicroBatches | None"]

Accept = Callable[[float, float], bool]  # of a loss and a gradient norm


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank but for its record.

    A step ends at its first update that is not finite: updates before it remain, it and those after it changed nothing.
    """

    loss: float  # sum of the terms that train, each over its divisor
    grad_norm: float  # global, of the step's own mean (without its weight), before clipping
    finite: bool  # of all updates
    bad: list[str] = field(default_factory=list)  # sources of the items whose loss was not finite
    bad_uses: tuple[UseName, ...] = ()  # the names of these items
    left_out: tuple[str, ...] = ()  # sources of such items, without which the step was computed again
    # the first module that counted by values that were not finite, or the stage that gave such
    origin: str | None = None
    terms: Mapping[str, float] = field(default_factory=dict)  # each over its divisor
    updated: frozenset[str] = frozenset()  # roles whose weights changed
    broken: str | None = None  # the update that is not finite
    withheld: bool = False  # its update was not accepted, and not applied
    trained: tuple[str, ...] = ()  # the terms that train, of all ranks, of the update whose loss this is
    counts: Mapping[str, torch.Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )  # by module, of all ranks
    # of this rank's micro-batches in that update; it alone differs between ranks
    record: RunRecord | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Learner:
    """An update of a step: the runner that drives its micro-batches, what it runs, and the optimizer that applies the gradients.

    Args:
        call: the forward pass of a micro-batch.
        terms: the terms of what a call returned.
        before: a micro-batch with what is asked before its forward pass; None: nothing is.
    """

    update: Update
    runner: Runner
    optimizer: AnyOptimizer
    call: Call
    terms: TermsOf
    before: Callable[[Batch], Batch] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def releasing(self) -> ReleasingOptimizer | None:
        """The optimizer, where it updates in backward."""
        return self.optimizer if isinstance(self.optimizer, ReleasingOptimizer) else None

    def forget_gradients(self) -> None:
        """Free the gradients of its role."""
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, batches: MicroBatches, divisors: Divisors, weight: float) -> RunRecord:
        """Run forward and backward of all micro-batches."""
        asked = batches if self.before is None else _Asked(batches, self.before)
        return self.runner.run(self.call, self.terms, asked, divisors, weight)


@dataclass(frozen=True)
class _Asked:
    """Micro-batches with what is asked before their forward passes."""

    batches: MicroBatches
    before: Callable[[Batch], Batch]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.before, self.batches)


def train_step(
    models: Models,
    learners: Sequence[Learner],
    batches: MicroBatches,
    divisors: Divisors,
    *,
    clip_norm: float | None,
    tensor: Axis | None = None,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
    step: int = 0,
    weight: float = 1.0,
    again: Again | None = None,
    accept: Accept | None = None,
) -> StepResult:
    """Make the updates of step number `step` (from 0), in order, up to the first that is not finite. `weight`: the step's in its epoch.

    With several, the micro-batches are kept, and the result names the terms of all. The loss and the gradient norm are those of the first
    update that every step makes, or of the non-finite one before it. `again`: reads the step again without the items whose loss is not
    finite; an update that is not finite is then computed once more, by the divisors of the whole step, and later ones leave these items
    out, too. `accept`: as for `apply_update`. Raises UserError as `apply_update`.
    """
    several = len(learners) > 1
    due = [learner for learner in learners if learner.update.due(step)]
    if not due:
        raise ValueError(f"no update is made at step {step}: those of a task make at least one at every step")
    reused: MicroBatches = list(batches) if len(due) > 1 else batches
    left_out: tuple[str, ...] = ()
    origin: str | None = None
    results: dict[str, StepResult] = {}
    attempt = partial(
        apply_update,
        models,
        divisors=divisors,
        clip_norm=clip_norm,
        tensor=tensor,
        mesh=mesh,
        group=group,
        weight=weight,
        accept=accept,
    )
    for learner in due:
        result = attempt(learner, reused)
        if result.bad_uses and not left_out and again is not None and (sound := again(result.bad_uses)) is not None:
            reused, left_out = (list(sound) if len(due) > 1 else sound), tuple(result.bad)
            origin, result = result.origin, attempt(learner, reused)
        result = results[learner.update.name] = replace(result, left_out=left_out, origin=result.origin or origin)
        if not result.finite:
            break
    if not several:
        return result
    steady = (
        results[learner.update.name] for learner in due if learner.update.every == 1 and learner.update.name in results
    )
    main = next(steady, result)
    return StepResult(
        main.loss,
        main.grad_norm,
        finite=result.finite,
        bad=result.bad,
        bad_uses=result.bad_uses,
        left_out=left_out,
        origin=result.origin,
        terms={f"{name}.{term}": value for name, each in results.items() for term, value in each.terms.items()},
        updated=frozenset().union(*(each.updated for each in results.values())),
        broken=result.broken,
        trained=main.trained,
        counts={name: counts for each in results.values() for name, counts in each.counts.items()},
        record=main.record,
    )


def apply_update(
    models: Models,
    learner: Learner,
    batches: MicroBatches,
    divisors: Divisors,
    *,
    clip_norm: float | None,
    tensor: Axis | None = None,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
    weight: float = 1.0,
    accept: Accept | None = None,
) -> StepResult:
    """Run forward and backward of this rank's micro-batches, then one update by `weight` times the gradients of all ranks.

    Clipping looks at the gradients of the step's own mean, without `weight`, and so leaves steps their weights. All ranks have equally many
    micro-batches. A loss or gradient that is not finite on any rank leaves parameters and optimizer untouched on all; with an optimizer
    that updates in backward it raises UserError. A divisor that is known only afterwards (None) costs a scaling of the gradients, which is
    merged with clipping. `tensor` is the tensor-parallel axis, where there is one, `mesh` that of the models. `group` is for small CPU
    collectives. `accept`: False for a loss and a gradient norm, the same on all ranks, whose update is not to be applied; it is not asked
    by an optimizer that updates in backward.

    The device is synchronized with once, and once more for divisors that are known only afterwards. Raises UserError for a
    divisor that is not positive, ValueError for such a weight.
    """
    if not weight > 0 or not math.isfinite(weight):
        raise ValueError(f"a step's weight is {weight:g}: it must be above 0")
    update, releasing = learner.update, learner.releasing
    if releasing is not None:
        releasing.begin(len(batches))
    learning = {update.role: models[update.role]}
    counters = counting_modules(learning)
    of_stage = mesh.of_stage if mesh is not None and mesh.staged else group
    with counting(counters, of_stage):
        record = learner.run(batches, divisors, weight)
    if tensor is not None:
        for model in learning.values():
            sum_shared_gradients(model.parameters(), tensor)
    kinds = terms_of_all(record.kinds, group)  # before the wait for the device
    late = _late_divisors(record, kinds, divisors, learner.device, group)
    scale = _late_scale(kinds, late, releasing is not None)
    sums = [record.total(name, learner.device) for name in kinds]
    if releasing is None:
        norm = clip_gradients(list(learning.values()), clip_norm, mesh, scale, weight)
        *local, grad_norm = torch.stack([*sums, norm]).tolist()  # the wait for the device
    else:
        local = torch.stack(sums).tolist()
        grad_norm = releasing.gradient_norm(group) / weight
    broken = not (all(map(math.isfinite, local)) and math.isfinite(grad_norm))
    *totals, broken_ranks = all_reduce_sum([*local, float(broken)], group)
    known = {name: value for name, value in divisors.items() if value is not None} | late
    values = ((name, total, known[kind.divisor]) for (name, kind), total in zip(kinds.items(), totals, strict=True))
    terms = {name: total / divisor for name, total, divisor in values if divisor > 0}  # a mean of no items is left out
    loss = sum(value for name, value in terms.items() if kinds[name].trains)
    trained = tuple(name for name, kind in kinds.items() if kind.trains)
    uses: dict[UseName, str] = {}
    origin = None
    if broken_ranks:
        met = [(place_of(name, learning), name) for name, module in counters.items() if not module.is_finite()]
        stages = [stage for stage, greatest in record.handed_over if not math.isfinite(greatest)]
        of_ranks = all_gather_objects((non_finite(record), met, stages), group)  # tuples come back as lists
        uses = dict(
            sorted(((key, epoch, repeat), source) for pairs, *_ in of_ranks for (key, epoch, repeat), source in pairs)
        )
        bad = sorted(set(uses.values()))
        first = min((stage for *_, found in of_ranks for stage in found), default=None)
        from_stage = None if first is None else f"the tokens behind pipeline stage {first}"
        _, origin = min((each for _, found, _ in of_ranks for each in found), default=(None, from_stage))
        if releasing is not None:
            raise _partly_applied(loss, grad_norm, bad, origin)
    withheld = not broken_ranks and releasing is None and accept is not None and not accept(loss, grad_norm)
    counts: Mapping[str, torch.Tensor] = {}
    if not (broken_ranks or withheld):
        learner.optimizer.step()
        counts = share_counts(counters, of_stage)
    learner.forget_gradients()
    result = StepResult(loss, grad_norm, not broken_ranks, terms=terms, trained=trained, record=record)
    if broken_ranks:
        return replace(result, bad=bad, bad_uses=tuple(uses), broken=update.name, origin=origin)
    if withheld:
        return replace(result, withheld=True)
    return replace(result, updated=frozenset((update.role,)), counts=counts)


def _late_divisors(
    record: RunRecord,
    kinds: Mapping[str, TermKind],
    divisors: Divisors,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """The sums of the weights over all ranks, for the divisors that are not known beforehand; waits for the device.

    Raises UserError where the terms of such a divisor differ in their weights.
    """
    late = sorted({kind.divisor for kind in kinds.values() if divisors[kind.divisor] is None})
    if not late:
        return {}
    local = [record.weight(name, device).item() for name in late]
    *weights, apart = all_reduce_sum([*local, record.disagreement(device).item()], group)
    if apart:
        raise UserError(
            f"the divisor {' or '.join(late)} is the sum of its terms' weights, and its terms have different ones: give them the same "
            "weights, or a divisor each"
        )
    return dict(zip(late, weights, strict=True))


def _late_scale(kinds: Mapping[str, TermKind], late: Mapping[str, float], releasing: bool) -> float | None:
    """The factor of the gradients, where the divisor of the terms that train was not known beforehand; else None.

    Raises UserError where gradients are applied before it is known, where terms that train have several divisors, or where it is 0.
    """
    used = {kind.divisor for kind in kinds.values() if kind.trains}
    if not used & late.keys():
        return None
    name = min(used & late.keys())
    if releasing:
        raise UserError(
            f"memory.release_gradients needs divisors that are known before a step, and this task's '{name}' is not"
        )
    if len(used) > 1:
        raise UserError(f"the divisor '{name}' is known after the step only, so all terms of the loss must have it")
    return scale_of(name, late[name])


def described(bad: Sequence[str], origin: str | None) -> str:
    """The items whose loss is not finite, and the first module that met values that were not."""
    samples = first_names(bad) or "none alone (the gradient overflowed)"
    return f"samples with a non-finite loss: {samples}{first_met(origin)}"


def first_met(origin: str | None) -> str:
    """Words on the first module that met values that are not finite; none where no module tells."""
    return "" if origin is None else f" (not finite from {origin} on)"


def _partly_applied(loss: float, grad_norm: float, bad: Sequence[str], origin: str | None) -> UserError:
    return UserError(
        f"loss {loss}, gradient norm {grad_norm}; {described(bad, origin)}. With memory.release_gradients a part of this "
        "step was applied: lower train.lr or look at these samples, and start again, which resumes from the last checkpoint"
    )


def non_finite(record: RunRecord) -> list[tuple[UseName, str]]:
    """Names and sources of the items with a loss that is not finite."""
    uses: dict[UseName, str] = {}
    for terms, names, sources in zip(record.terms, record.names, record.sources, strict=True):
        for term in terms.values():
            finite: Sequence[bool] = torch.isfinite(term.loss_I).tolist()
            uses |= {name: source for name, source, fine in zip(names, sources, finite, strict=True) if not fine}
    return list(uses.items())
