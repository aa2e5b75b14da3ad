"""Balance causal attention over a ring: each rank holds an early and a late chunk of the sequence, so that all have equal work.

A sequence of length N is cut into 2R even chunks; rank r of R holds chunk r and chunk 2R - 1 - r, one after the other (zigzag, as in Llama
3's context parallelism). A later query sees more keys: with one contiguous part each, the last rank would have almost twice the mean work.
In zigzag, every pair of different ranks costs half a square of scores, and each rank's own block a triangle.

All functions are pure. Legend: N length, R ranks, n queries that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspeed.comm.exchange import even_sizes


@dataclass(frozen=True)
class Piece:
    """A rectangle of scores, or a triangle of them if `causal`: queries [q_start, q_stop) see keys [k_start, k_stop) of a block.

    causal: each query sees only the keys up to its own position.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False

    @property
    def work(self) -> float:
        """The number of scores that the piece needs."""
        square = (self.q_stop - self.q_start) * (self.k_stop - self.k_start)
        return (square + self.q_stop - self.q_start) / 2 if self.causal else square


def zigzag_lengths(length: int, ranks: int) -> tuple[int, ...]:
    """The number of tokens that each rank holds."""
    chunks = even_sizes(length, 2 * ranks)
    return tuple(chunks[rank] + chunks[-1 - rank] for rank in range(ranks))


def zigzag_order(length: int, ranks: int) -> Tensor:
    """(N,) the positions of the sequence in zigzag order: those that rank 0 holds, then those of rank 1, and so on.

    `x[order]` is the sequence in zigzag order, and `y[order.argsort()]` is back in its own order.
    """
    chunks = torch.arange(length).split(list(even_sizes(length, 2 * ranks)))
    return torch.cat([chunks[place] for rank in range(ranks) for place in (rank, 2 * ranks - 1 - rank)])


def causal_pieces(rank: int, owner: int, length: int, ranks: int) -> list[Piece]:
    """The scores that `rank` computes for the block of `owner`: at most one piece, none if it would be empty."""
    chunks = even_sizes(length, 2 * ranks)
    early, late = chunks[rank], chunks[-1 - rank]
    if owner == rank:
        piece = Piece(0, early + late, 0, early + late, causal=True)
    elif owner < rank:  # its late chunk comes after all of our queries
        piece = Piece(0, early + late, 0, chunks[owner])
    else:  # both of its chunks lie between our early and our late one
        piece = Piece(early, early + late, 0, chunks[owner] + chunks[-1 - owner])
    return _not_empty([piece])


def document_pieces(rank: int, owner: int, lengths: Sequence[int], ranks: int) -> list[Piece]:
    """`causal_pieces` of several documents, each in zigzag order, whose parts follow one another on every rank: at most one each."""
    pieces, q_at, k_at = [], 0, 0
    for length in lengths:
        held = zigzag_lengths(length, ranks)
        for piece in causal_pieces(rank, owner, length, ranks):
            q_start, q_stop, k_start, k_stop = piece.q_start, piece.q_stop, piece.k_start, piece.k_stop
            pieces.append(Piece(q_at + q_start, q_at + q_stop, k_at + k_start, k_at + k_stop, piece.causal))
        q_at, k_at = q_at + held[rank], k_at + held[owner]
    return pieces


def alike(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces by their shape: those of one shape are batched into one call of a kernel."""
    groups: dict[tuple[int, int, bool], list[Piece]] = {}
    for piece in pieces:
        shape = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start, piece.causal
        groups.setdefault(shape, []).append(piece)
    return list(groups.values())


def cut_rows(piece: Piece, start: int, stop: int) -> list[Piece]:
    """The part of a piece that queries [start, stop) compute. Rows of a triangle are a rectangle and a smaller triangle."""
    first, last = max(piece.q_start, start), min(piece.q_stop, stop)
    if first >= last:
        return []
    if not piece.causal:
        return [replace(piece, q_start=first, q_stop=last)]
    begin = piece.k_start + first - piece.q_start
    square = Piece(first, last, piece.k_start, begin)
    triangle = Piece(first, last, begin, begin + last - first, causal=True)
    return _not_empty([square, triangle])


def _not_empty(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.q_start < piece.q_stop and piece.k_start < piece.k_stop]
