"""Check dense, block and ring attention of a device against the formula in float64, forward and backward.

The ring's ranks are computed here one after the other, by the same schedule and order, and blocks go from one to the next in memory.

Legend: B batch, A heads, N queries, M keys, D head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmspeed.comm.exchange import even_sizes
from mmspeed.compute.attention import attention
from mmspeed.compute.block_attention import KERNELS, block_backward, block_forward, choose_kernel, merge
from mmspeed.device import Device
from mmspeed.parallel.sequence.ring_schedule import Hop, RingStep, Shapes, backward_steps, forward_steps, run_forward
from mmspeed.parallel.sequence.zigzag import Piece, causal_pieces, cut_rows, zigzag_lengths, zigzag_order

from .oracle import AttentionCase, Errors, attention_cases, number_types, short_name, truth
from .rows import Check, Outcome

PART = "kernels"
RANKS = 4
WINDOWS = (None, 2)  # a single ring, and a double ring of two windows
NO_OPERATOR = ("no available kernel", "no viable backend")  # torch's words where an operator does not serve a call


def dense_checks(device: Device, small: bool) -> Iterator[Check]:
    """Checks of dense attention as models call it, of each of torch's operators for it, of block kernels and of the ring."""
    for dtype in number_types(device):
        yield Check(PART, f"dense auto {short_name(dtype)}", partial(check_dense, device, dtype, small))
        for name, operator in SDPBackend.__members__.items():
            if name not in ("ERROR", "MATH"):
                what = f"dense {name.lower()} {short_name(dtype)}"
                yield Check(PART, what, partial(check_dense, device, dtype, small, operator))
        yield Check(PART, f"dense with log-sum-exp {short_name(dtype)}", partial(check_fused_lse, device, dtype, small))
        for kernel in KERNELS:
            yield Check(PART, f"block {kernel} {short_name(dtype)}", partial(check_block, device, dtype, small, kernel))
        for kernel in KERNELS:
            yield Check(PART, f"ring {kernel} {short_name(dtype)}", partial(check_ring, device, dtype, small, kernel))


def check_dense(device: Device, dtype: torch.dtype, small: bool, operator: SDPBackend | None = None) -> Outcome:
    """Dense attention by torch's choice of an operator, or by this one."""
    errors, refusals = Errors(dtype), list[str]()
    for case in attention_cases(small):
        if case.causal:
            continue
        context: AbstractContextManager[Any] = nullcontext() if operator is None else sdpa_kernel(operator)
        (q, k, v, dout), mask = case.on(device, dtype)
        leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        try:
            with context, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each operator that it does not take
                out = attention(*leaves, mask)
                grads = torch.autograd.grad(out, leaves, dout)
        except RuntimeError as error:
            if operator is None or not any(words in str(error).lower() for words in NO_OPERATOR):
                raise
            refusals.append(f"torch has none for these calls on {device.kind}")
            continue
        errors.add(case.name, _named(out, grads), truth(case, dtype))
    return errors.outcome(refusals)


def check_fused_lse(device: Device, dtype: torch.dtype, small: bool) -> Outcome:
    """Dense attention that returns its log-sum-exp, fused where there is an operator."""
    errors = Errors(dtype)
    for case in attention_cases(small):
        if case.causal:
            continue
        (q, k, v, _), mask = case.on(device, dtype)
        with torch.no_grad():
            out, lse = attention(q, k, v, mask, return_lse=True)
        errors.add(case.name, {"out": out, "lse": lse}, truth(case, dtype))
    return errors.outcome()


def check_block(device: Device, dtype: torch.dtype, small: bool, kernel: str) -> Outcome:
    """A block kernel, forward and backward, on the cases that it serves."""
    errors, refusals = Errors(dtype), list[str]()
    for case, (q, k, v, dout), mask in _served(attention_cases(small), device, dtype, kernel, refusals):
        right = truth(case, dtype)
        out, lse = block_forward(q, k, v, mask, causal=case.causal, backend=kernel)
        whole, whole_lse = right["out"].to(q), right["lse"].to(device.torch_device, lse.dtype)
        grads = block_backward(dout, q, k, v, whole, whole_lse, mask, causal=case.causal, backend=kernel)
        errors.add(case.name, _named(out, grads) | {"lse": lse}, right)
    return errors.outcome(refusals)


def check_ring(device: Device, dtype: torch.dtype, small: bool, kernel: str) -> Outcome:
    """The ring over four ranks with a block kernel: single and double, plain, masked and causal."""
    errors, refusals = Errors(dtype), list[str]()
    cases = [case for case in attention_cases(small) if case.name in ("plain", "masked", "causal", "shared key heads")]
    for case, tensors, mask in _served(cases, device, dtype, kernel, refusals):
        for window in WINDOWS:
            name = f"{case.name}, {'single' if window is None else 'double'} ring"
            ring = RingHere.of(case, tensors, mask, window, kernel)
            errors.add(name, ring.results(), truth(case, dtype))
    return errors.outcome(refusals)


def _served(
    cases: Sequence[AttentionCase], device: Device, dtype: torch.dtype, kernel: str, refusals: list[str]
) -> Iterator[tuple[AttentionCase, list[Tensor], Tensor | None]]:
    """Yield the cases that a block kernel serves, with tensors and mask; why it does not serve others goes to `refusals`."""
    for case in cases:
        tensors, mask = case.on(device, dtype)
        try:
            choose_kernel(tensors[0], tensors[1], mask, case.causal, kernel)
        except ValueError as error:
            refusals.append(str(error).partition(" does not serve ")[2].partition(";")[0] or str(error))
        else:
            yield case, tensors, mask


def _named(out: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))


@dataclass(frozen=True)
class _BlockHere:
    """A block that has come already."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.tensors


@dataclass(frozen=True)
class _MemoryLink:
    """A link on which a rank's block comes from this process's memory."""

    blocks: list[list[Tensor]]

    def start(self, tensors: Sequence[Tensor], hop: Hop, shapes: Shapes) -> _BlockHere:
        assert all(torch.equal(x, y) for x, y in zip(tensors, self.blocks[hop.sends], strict=True))
        return _BlockHere(self.blocks[hop.brings])


@dataclass(frozen=True)
class RingHere:
    """The ranks of a ring in one process. Parts are by rank: queries with their gradient, and keys, values and mask."""

    case: AttentionCase
    rows: list[list[Tensor]]
    blocks: list[list[Tensor]]
    order: Tensor  # of the queries over the ranks
    key_order: Tensor
    window: int | None
    kernel: str

    @classmethod
    def of(
        cls, case: AttentionCase, tensors: Sequence[Tensor], mask: Tensor | None, window: int | None, kernel: str
    ) -> RingHere:
        q, k, v, dout = tensors
        if case.causal:
            order = key_order = zigzag_order(case.queries, RANKS).to(q.device)
            sizes = key_sizes = zigzag_lengths(case.queries, RANKS)
        else:
            order, key_order = (torch.arange(length, device=q.device) for length in (case.queries, case.keys))
            sizes, key_sizes = tuple(even_sizes(case.queries, RANKS)), tuple(even_sizes(case.keys, RANKS))
        rows = [x[:, :, order].split(list(sizes), dim=2) for x in (q, dout)]
        keys = [x[:, :, key_order].split(list(key_sizes), dim=2) for x in (k, v)]
        keys += [] if mask is None else [mask[:, key_order].split(list(key_sizes), dim=1)]
        return cls(
            case,
            [[x[rank] for x in rows] for rank in range(RANKS)],
            [[x[rank] for x in keys] for rank in range(RANKS)],
            order,
            key_order,
            window,
            kernel,
        )

    def results(self) -> dict[str, Tensor]:
        """Output, log-sum-exp and gradients of the whole sequence, in its own order."""
        forward = [self.forward(rank) for rank in range(RANKS)]
        wide = forward[0][1].dtype
        sums = [[torch.zeros_like(x, dtype=wide) for x in block[:2]] for block in self.blocks]
        dqs = [self.backward(rank, *forward[rank], sums) for rank in range(RANKS)]
        by_query = {"out": [out for out, _ in forward], "lse": [lse for _, lse in forward], "dq": dqs}
        by_key = {"dk": [dk for dk, _ in sums], "dv": [dv for _, dv in sums]}
        whole = {name: torch.cat(parts, dim=2)[:, :, self.order.argsort()] for name, parts in by_query.items()}
        return whole | {name: torch.cat(parts, dim=2)[:, :, self.key_order.argsort()] for name, parts in by_key.items()}

    def pieces(self, rank: int, step: RingStep, queries: int) -> list[Piece]:
        """The pieces of a step; rows are divided in the middle."""
        keys = self.blocks[step.owner][0].shape[2]
        start, stop = {"all": (0, queries), "first": (0, queries // 2), "rest": (queries // 2, queries)}[step.rows]
        whole = [Piece(0, queries, 0, keys)]
        if self.case.causal:
            whole = causal_pieces(rank, step.owner, self.case.queries, RANKS)
        return [part for piece in whole for part in cut_rows(piece, start, stop)]

    def forward(self, rank: int) -> tuple[Tensor, Tensor]:
        """(out_BAND, lse_BAN) of a rank's queries."""
        q = self.rows[rank][0]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], self.blocks[rank][1].shape[-1], dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)

        def attend(step: RingStep, block: Sequence[Tensor]) -> None:
            for piece in self.pieces(rank, step, q.shape[2]):
                rows = slice(piece.q_start, piece.q_stop)
                k, v, mask = _cut(block, piece)
                part = block_forward(q[:, :, rows], k, v, mask, causal=piece.causal, backend=self.kernel)
                out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *part)

        steps = forward_steps(rank, RANKS, self.window)
        run_forward(steps, rank, self.blocks[rank], _MemoryLink(self.blocks), lambda owner: (), attend)
        return out.to(q.dtype), lse

    def backward(self, rank: int, out: Tensor, lse: Tensor, sums: list[list[Tensor]]) -> Tensor:
        """The gradient of a rank's queries; those of keys and values are added to `sums`, by their owner."""
        q, dout = self.rows[rank]
        dq = torch.zeros_like(q, dtype=lse.dtype)
        for step in backward_steps(rank, RANKS, self.window):
            for piece in self.pieces(rank, step, q.shape[2]):
                rows, keys = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
                k, v, mask = _cut(self.blocks[step.owner], piece)
                parts = (x[:, :, rows] for x in (dout, q, out, lse))
                cut_dout, cut_q, cut_out, cut_lse = parts
                grads = block_backward(
                    cut_dout, cut_q, k, v, cut_out, cut_lse, mask, causal=piece.causal, backend=self.kernel
                )
                dq[:, :, rows] += grads[0]
                sums[step.owner][0][:, :, keys] += grads[1]
                sums[step.owner][1][:, :, keys] += grads[2]
        return dq


def _cut(block: Sequence[Tensor], piece: Piece) -> tuple[Tensor, Tensor, Tensor | None]:
    keys = slice(piece.k_start, piece.k_stop)
    return block[0][:, :, keys], block[1][:, :, keys], block[2][:, keys] if len(block) == 3 else None
