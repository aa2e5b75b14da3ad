"""Memory layouts of an attention's projections, and the order in which heads and tokens are sent.

An attention gets views of its projections with the dims (B, A, N, D), or (B, G, A, N, D) where a factorised model's rows or columns attend
separately. A layout names the same dims in memory order, outermost first. The model's plan declares it for each attention (`Site.layout`,
`Site.rows_layout`), so all ranks know it; strides may differ between ranks where a dim has size 0 or 1.

    layout   in memory                      where
    BNAD     (batch, sequence, hidden): BSH full attention; rows that attend along themselves, B is batch x rows
    NBAD     (sequence, batch, hidden): SBH tokens that run so; columns that attend along themselves, B is the columns of one video
    BNGAD    (batch, rows, columns, hidden) columns that attend along themselves, of any number of videos: no view makes one dim of B and G
    BAND     heads outside tokens           projections that were copied head by head

Between ranks tensors are always sent tokens first (N B A D), whatever the layout. A rank that joins parts along tokens then reads them in
place, and one that splits tokens sends them in place, if its kernel wrote them so. Where heads are split or joined a copy is needed in
every layout, as a matrix product writes and reads all heads of a token together; that copy also makes the transpose between the layouts.

Legend: B batch, G rows or columns that attend separately, A heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Literal

Layout = Literal["BAND", "BNAD", "NBAD", "BNGAD"]


def dims_of(layout: Layout) -> str:
    """The dims of the views, in the order of their shape."""
    return "BGAND" if "G" in layout else "BAND"


def memory_order(layout: Layout) -> tuple[int, ...]:
    """The views' dims in memory order, outermost first."""
    return tuple(dims_of(layout).index(letter) for letter in layout)


def tokens_first(layout: Layout) -> tuple[int, ...]:
    """The order of the views' dims in a message: tokens first."""
    dims = dims_of(layout)
    return tuple(dims.index(letter) for letter in ("N", *dims.replace("N", "")))
