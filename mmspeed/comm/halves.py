"""Differentiable exchanges in two halves: work issued between start and finish overlaps with the communication.

`start_...` packs and issues; `finish` waits, unpacks, and returns the results. Each is an autograd function: the backward of finish starts
the exchange of the gradients and the backward of start finishes it. Backward runs in the reverse order of forward, so work between the
halves in forward is between them in backward too. An empty tensor, the token, connects the halves in the graph and carries nothing else.

`finish` offers its results to recomputation (`mmspeed.replay`): where they were kept, the second pass sends nothing in either half.
Exchanges without gradients are offered too, since a reentrant checkpoint runs its first pass under no_grad. The exchanges of gradients in
backward are not.

On an accelerator messages run on the process group's own stream and neither half blocks the host; call both halves on the same stream. On
the CPU finish blocks until the messages have arrived.

All ranks of the axis must start the same exchanges in the same order, and finish them in the same order, even those with empty parts. This
holds in backward too, so a loss must depend on the result on every rank or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspeed.graphs import outside_graphs
from mmspeed.replay import FirstHalf, begin, complete
from mmspeed.torch_internals import storage_address, version_of

from .messages import Move, Underway
from .packing import Sizes, layout


class _ReverseHalf:
    """Shared by the two halves in the graph: the backward of finish leaves the started exchange of the gradients here for that of start."""

    back: PendingExchange | None = None


class PendingExchange:
    """A started exchange, for `finish`. It holds the tensors that are sent; do not change the arguments in place until it is finished."""

    _link: _ReverseHalf
    _move: Move
    _half: FirstHalf | None
    _token: Tensor
    _layouts_back: tuple[Sizes, ...]
    _records: bool
    _underway: Underway | None = None
    _again = False  # True in a recomputation

    def __init__(self, results: Sequence[Tensor] | None = None) -> None:
        self._results = None if results is None else list(results)  # given for an axis of one rank, without messages
        self._watched: list[tuple[Tensor, int]] = []  # tensors that are sent from their own memory, and their versions

    @classmethod
    def _of(
        cls,
        move: Move,
        layouts: Sequence[Sizes],
        xs: Sequence[Tensor],
        offers: bool,
        layouts_back: Sequence[Sizes] | None = None,
    ) -> PendingExchange:
        """Start a move. `offers`: whether the results are offered for recomputation (see the module's docstring)."""
        pending = cls()
        pending._move, pending._link, pending._records = move, _ReverseHalf(), torch.is_grad_enabled()
        pending._layouts_back = tuple(layout(x) for x in xs) if layouts_back is None else tuple(layouts_back)
        pending._half, issues = begin("exchange") if offers else (None, True)
        pending._again = pending._half is not None and pending._half.recomputed
        pending._token = _Start.apply(pending, tuple(layouts), issues, *xs)
        return pending

    def __del__(self) -> None:
        # a recomputation may stop between the halves, once backward has its tensors: buffers must outlive their messages
        if self._again and self._underway is not None:
            self._underway.wait()

    def _issue(self, layouts: Sequence[Sizes], xs: Sequence[Tensor]) -> None:
        self._underway = self._move.begin(xs, layouts)
        sent = {storage_address(flat.untyped_storage()) for flat in self._underway.sent}
        in_place = [x for x in xs if not x.is_inference() and storage_address(x.untyped_storage()) in sent]
        self._watched = [(x, version_of(x)) for x in in_place]

    def _complete(self) -> tuple[Tensor, ...]:
        if self._underway is None:
            raise RuntimeError(
                "an exchange is finished once: this one was finished before, or its finish is recomputed and its start is not"
            )
        if any(version_of(x) != version for x, version in self._watched):
            raise RuntimeError("a tensor was changed in place between start and finish of its exchange")
        underway, self._underway, self._watched = self._underway, None, []
        gives_way = underway.axis.ledger.gives_way
        if gives_way is None or underway.short:
            underway.wait()
        else:
            gives_way(underway.axis.place, underway.wait)
        return underway.land()


def start(
    move: Move, layouts: Sequence[Sizes], xs: Sequence[Tensor], layouts_back: Sequence[Sizes] | None = None
) -> PendingExchange:
    """Start a move. `layouts`: the memory order of each result's dims; `layouts_back`: that of each gradient's, None: as in `xs`."""
    return _started(move, layouts, xs, layouts_back)


@outside_graphs
def _started(
    move: Move, layouts: Sequence[Sizes], xs: Sequence[Tensor], layouts_back: Sequence[Sizes] | None
) -> PendingExchange:
    return PendingExchange._of(move, layouts, xs, offers=True, layouts_back=layouts_back)


def finish(pending: PendingExchange) -> Tensor:
    """Wait for an exchange of one tensor and return its result.

    Raises RuntimeError where only one half records gradients, where the exchange was finished before, where a tensor was changed in place
    since the start, and where a recomputed region that keeps no exchanges holds the finish without the start. Raises ValueError for an
    exchange of several tensors.
    """
    results = finish_all(pending)
    if len(results) != 1:
        raise ValueError(f"an exchange of {len(results)} tensors: use finish_all")
    return results[0]


def finish_all(pending: PendingExchange) -> list[Tensor]:
    """Wait for an exchange of several tensors and return the results. Raises RuntimeError as `finish` does."""
    return pending._results if pending._results is not None else _finished(pending)


@outside_graphs
def _finished(pending: PendingExchange) -> list[Tensor]:
    if pending._records != torch.is_grad_enabled():
        raise RuntimeError(
            "start and finish of an exchange must both record gradients, or neither: is one of them in a reentrant checkpoint, or "
            "under no_grad?"
        )
    return list(_Finish.apply(pending, pending._token))


class _Start(torch.autograd.Function):
    """The first half as an autograd function: takes the tensors, returns the token."""

    @staticmethod
    def forward(ctx: Any, pending: PendingExchange, layouts: tuple[Sizes, ...], issues: bool, *xs: Tensor) -> Tensor:
        ctx.link = pending._link  # not `pending`, which has the token
        if issues:
            pending._issue(layouts, xs)
        return xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *token: Tensor) -> Any:
        pending, ctx.link.back = ctx.link.back, None
        if pending is None:
            raise RuntimeError("the gradient of a started exchange did not come through its finish")
        return None, None, None, *_Finish.apply(pending, *token)


class _Finish(torch.autograd.Function):
    """The second half as an autograd function: takes the token, returns the results."""

    @staticmethod
    def forward(ctx: Any, pending: PendingExchange, token: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.move, ctx.layouts = pending._link, pending._move, pending._layouts_back
        return complete("exchange", pending._half, pending._complete, pending._move)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = PendingExchange._of(ctx.move.back(), ctx.layouts, grads, offers=False)
        ctx.link.back = back
        return None, back._token
