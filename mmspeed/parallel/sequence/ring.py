"""Compute ring attention: queries stay, keys and values go round (`ring_schedule`); each rank merges its outputs over the blocks.

Outputs are merged by their log-sum-exp in float32, and gradients summed in float32 (float64 for float64). The backward pass runs the ring
again with the final output and log-sum-exp; the gradients of keys and values travel with their block. The output and log-sum-exp are
offered to recomputation (`mmspeed.replay.checkpointed`), as an exchange.

Bytes that a rank sends per call, e the element size, f = max(e, 4), for even M (uneven: the sum over the blocks that it passes on):

    block of keys       2 B K M D e, with a key mask B M more  ("keys"); with values of width W, B K M (D + W) e
    block of gradients  2 B K M D f                            ("gradients"); likewise
    single ring         "ring": forward (R - 1) keys; backward (R - 1) (keys + gradients)
    double ring         "ring": forward (R / w) (w - 1) keys; backward (R / w + 1) (w - 1) (keys + gradients)
                        "ring_outer": forward (R / w - 1) keys; backward (R / w - 1) (keys + gradients)

Legend: R ranks of the ring, w ranks of a window, B batch, A heads, K heads of the keys, N queries and M keys of a rank, D head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import pass_on
from mmspeed.comm.packing import inverse, laid_out
from mmspeed.comm.packing import layout as memory_layout
from mmspeed.compute.block_attention import block_backward, block_forward, merge
from mmspeed.replay import checkpointed

from .ring_schedule import (
    Hop,
    PendingBlock,
    RingStep,
    Shapes,
    backward_steps,
    forward_steps,
    run_backward,
    run_forward,
)
from .zigzag import Piece, alike, cut_rows, document_pieces, zigzag_lengths


@dataclass(frozen=True)
class AxisLink:
    """Sends a ring's messages over an axis of the mesh.

    outer: an axis of the same ranks with a process group of its own, for hops between windows. A process group on an accelerator carries
    messages one after the other, so without it a double ring cannot hide its slow hops.
    order: the memory order of the dims of keys, values and their gradients, in messages and on this rank.
    """

    axis: Axis
    outer: Axis | None = None
    order: tuple[int, ...] = (0, 1, 2, 3)

    def start(self, tensors: Sequence[Tensor], hop: Hop, shapes: Shapes) -> PendingBlock:
        axis = self.outer if hop.outer and self.outer is not None else self.axis
        sent = [x.permute(self._order(x.dim())) for x in tensors]
        come = [[shape[dim] for dim in self._order(len(shape))] for shape in shapes]
        pending = pass_on(sent, axis, hop.to, hop.source, come, name="ring_outer" if hop.outer else None)
        return _Reordered(pending, [inverse(self._order(len(shape))) for shape in shapes])

    def _order(self, dims: int) -> tuple[int, ...]:
        return self.order if dims == len(self.order) else tuple(range(dims))


@dataclass(frozen=True)
class _Reordered:
    """Tensors that are received with permuted dims; `wait` permutes them back."""

    pending: PendingBlock
    orders: list[tuple[int, ...]]

    def wait(self) -> list[Tensor]:
        return [x.permute(order) for x, order in zip(self.pending.wait(), self.orders, strict=True)]


def ring_attention(
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    key_mask_BM: Tensor | None,
    axis: Axis,
    k_lengths: Sequence[int],
    *,
    causal: bool = False,
    documents: Sequence[int] | None = None,
    window: int | None = None,
    outer: Axis | None = None,
    scale: float | None = None,
    backend: str = "auto",
    counter: Counter[str] | None = None,
    order: Sequence[int] = (0, 1, 2, 3),
) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks of the axis: `out_BAND`, in the dtype of the queries.

    Keys and values may have fewer heads than queries (GQA), by a whole factor; values may have another width, which is the output's.

    Args:
        k_lengths: the number of keys of each rank, 0 allowed.
        causal: queries and keys are this rank's two chunks in `zigzag` order.
        documents: with `causal`, lengths of documents, which see only themselves. Each is in zigzag order, and on every rank their chunks
            follow one another. None: one document of all keys.
        window: the number of ranks of a double ring's inner ring; None: a single ring.
        outer: see `AxisLink`.
        key_mask_BM, scale, backend, counter: as in `compute.block_attention`.
        order: the memory order of keys and values, outermost dim first, the same on all ranks; tensors that have it are not copied.

    The output has the memory order of the queries. Every rank of the axis makes the call, and its backward, even without tokens. A second
    derivative is not supported and raises RuntimeError. Raises ValueError for lengths, a window or shapes that do not fit.
    """
    if len(k_lengths) != axis.size or k_lengths[axis.rank] != k_BKMD.shape[2]:
        raise ValueError(f"keys of {tuple(k_lengths)} on {axis.size} ranks, and {k_BKMD.shape[2]} on rank {axis.rank}")
    lengths = None
    if causal:
        lengths = (sum(k_lengths),) if documents is None else tuple(documents)
        parts = [zigzag_lengths(length, axis.size) for length in lengths]
        if tuple(k_lengths) != tuple(map(sum, zip(*parts, strict=True))) or q_BAND.shape[2] != k_BKMD.shape[2]:
            raise ValueError(f"causal ring: queries and keys of {tuple(k_lengths)} are not in zigzag order")
    link = AxisLink(axis, outer, tuple(order))
    ring = _Ring(axis.rank, tuple(k_lengths), link, lengths, window, scale, backend, counter)
    result: Tensor = _RingAttention.apply(ring, q_BAND, k_BKMD, v_BKMD, key_mask_BM)
    return result


@dataclass(frozen=True)
class _Ring:
    """A call's settings. `documents`: lengths of the whole documents when causal."""

    rank: int
    lengths: tuple[int, ...]
    link: AxisLink
    documents: tuple[int, ...] | None
    window: int | None
    scale: float | None
    backend: str
    counter: Counter[str] | None

    def pieces(self, step: RingStep, queries: int, first: int) -> list[list[Piece]]:
        """The pieces to compute in a step, grouped by shape; `first`: the number of queries in the rows "first"."""
        start, stop = {"all": (0, queries), "first": (0, first), "rest": (first, queries)}[step.rows]
        keys = self.lengths[step.owner]
        whole = [Piece(0, queries, 0, keys)] if keys else []
        if self.documents is not None:
            whole = document_pieces(self.rank, step.owner, self.documents, len(self.lengths))
        return alike([part for piece in whole for part in cut_rows(piece, start, stop)])

    def shapes(self, k_BKMD: Tensor, v_BKMW: Tensor, masked: bool) -> Callable[[int], Shapes]:
        """A function from a rank to the shapes of its block: keys, values, and key mask if there is one."""
        batch, heads = k_BKMD.shape[:2]

        def of(owner: int) -> Shapes:
            length = self.lengths[owner]
            keys = [(batch, heads, length, x.shape[-1]) for x in (k_BKMD, v_BKMW)]
            return [*keys, (batch, length)] if masked else keys

        return of

    def options(self, piece: Piece) -> dict[str, Any]:
        return {"causal": piece.causal, "scale": self.scale, "backend": self.backend, "counter": self.counter}


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None
    ) -> Tensor:
        own = [laid_out(x, ring.link.order) for x in (k_BKMD, v_BKMD)]
        own += [] if key_mask_BM is None else [key_mask_BM.contiguous()]
        ctx.ring = ring
        what = "ring", ring.link, ring.lengths, q_BAND.shape, v_BKMD.shape
        out_BAND, lse_BAN = checkpointed("exchange", lambda: _attend_forward(ring, q_BAND, own), what)
        ctx.save_for_backward(q_BAND, *own[:2], key_mask_BM, out_BAND, lse_BAN)
        return out_BAND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BAND: Tensor) -> Any:
        ring: _Ring = ctx.ring
        q_BAND, k_BKMD, v_BKMD, key_mask_BM, out_BAND, lse_BAN = ctx.saved_tensors
        own = [k_BKMD, v_BKMD] + ([] if key_mask_BM is None else [key_mask_BM.contiguous()])
        dq_BAND = torch.zeros_like(q_BAND, dtype=lse_BAN.dtype)
        queries, dout_BAND = q_BAND.shape[2], laid_out(dout_BAND, ring.link.order)
        first = first_rows(queries, k_BKMD.element_size(), ring.documents is not None and len(ring.documents) == 1)

        def attend(step: RingStep, block: Sequence[Tensor]) -> list[Tensor]:
            grads = [torch.zeros_like(x, dtype=lse_BAN.dtype) for x in block[:2]]
            for pieces in ring.pieces(step, queries, first):
                k, v, mask = _keys(block, pieces)
                q, dout, out, lse = (_rows(x, pieces) for x in (q_BAND, dout_BAND, out_BAND, lse_BAN))
                shares = block_backward(dout, q, k, v, out, lse, mask, **ring.options(pieces[0]))
                for piece, dq, dk, dv in zip(pieces, *(x.chunk(len(pieces)) for x in shares), strict=True):
                    dq_BAND[:, :, piece.q_start : piece.q_stop] += dq
                    grads[0][:, :, piece.k_start : piece.k_stop] += dk
                    grads[1][:, :, piece.k_start : piece.k_stop] += dv
            return grads

        steps = backward_steps(ring.rank, len(ring.lengths), ring.window)
        shapes, grad_shapes = (ring.shapes(k_BKMD, v_BKMD, masked) for masked in (key_mask_BM is not None, False))
        dk, dv = run_backward(steps, ring.rank, own, ring.link, shapes, attend, grad_shapes)
        return None, dq_BAND.to(q_BAND.dtype), dk.to(k_BKMD.dtype), dv.to(v_BKMD.dtype), None


def _attend_forward(ring: _Ring, q_BAND: Tensor, own: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(out_BAND, lse_BAN) over the blocks of all ranks; `own`: this rank's keys, values and key mask."""
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    out_BAND = like_queries(q_BAND, own[1].shape[-1], wide)
    lse_BAN = q_BAND.new_full(q_BAND.shape[:3], -torch.inf, dtype=wide)

    def attend(step: RingStep, block: Sequence[Tensor]) -> None:
        for pieces in ring.pieces(step, q_BAND.shape[2], 0):
            k, v, mask = _keys(block, pieces)
            both = block_forward(_rows(q_BAND, pieces), k, v, mask, **ring.options(pieces[0]))
            for piece, out, lse in zip(pieces, *(x.chunk(len(pieces)) for x in both), strict=True):
                rows = slice(piece.q_start, piece.q_stop)
                merged = merge(out_BAND[:, :, rows], lse_BAN[:, :, rows], out, lse)
                out_BAND[:, :, rows], lse_BAN[:, :, rows] = merged

    steps = forward_steps(ring.rank, len(ring.lengths), ring.window)
    run_forward(steps, ring.rank, own, ring.link, ring.shapes(own[0], own[1], len(own) == 3), attend)
    return out_BAND.to(q_BAND.dtype), lse_BAN


def like_queries(q_BAND: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros for an output with heads of this width, in the memory order of the queries."""
    if width == q_BAND.shape[-1]:
        return torch.zeros_like(q_BAND, dtype=dtype)
    return laid_out(q_BAND.new_zeros(*q_BAND.shape[:-1], width, dtype=dtype), memory_layout(q_BAND))


def first_rows(queries: int, element_size: int, causal: bool = False) -> int:
    """The number of queries in the first part of a rank's own block in backward.

    The compute of the first part is to that of the rest as the bytes of keys are to those of gradients (see `ring_schedule`).
    """
    share = element_size / (element_size + max(element_size, 4))
    return round(queries * (share**0.5 if causal else share))


def _rows(x: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The queries of pieces of one shape, stacked along the batch."""
    return _stacked([x[:, :, piece.q_start : piece.q_stop] for piece in pieces])


def _keys(block: Sequence[Tensor], pieces: Sequence[Piece]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and key mask of pieces of one shape, stacked along the batch."""
    spans = [slice(piece.k_start, piece.k_stop) for piece in pieces]
    k, v = (_stacked([x[:, :, span] for span in spans]) for x in block[:2])
    return k, v, _stacked([block[2][:, span] for span in spans]) if len(block) == 3 else None


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
