"""Orders in which an attention's projections lie in memory, and in which heads and tokens travel.

An attention gets views of its projections with the dims (B, A, N, D), or (B, G, A, N, D) where a factorised model's rows or
columns attend apart. A layout names the same dims from the outermost in memory to the innermost. The model's plan declares it for each
attention (`Site.layout`, `Site.rows_layout`), so all ranks know it; strides may differ between ranks where a dim has size 0 or 1.

    layout   in memory                      where
    BNAD     (batch, sequence, hidden): BSH full attention; rows that attend along themselves, B is batch x rows
    NBAD     (sequence, batch, hidden): SBH tokens that run so; columns that attend along themselves, B is the columns of one video
    BNGAD    (batch, rows, columns, hidden) columns that attend along themselves, of any number of videos: no view makes one dim of B and G
    BAND     heads outside tokens           projections that were copied head by head

Between ranks tokens always travel first (N B A D), whatever the layout. A rank that joins tokens then reads them in place, and one that
cuts tokens sends them in place, if its kernel wrote them so. Where heads are cut or joined a copy is needed in every layout, as a product
writes and reads all heads of a token together; it makes the transpose between the layouts too.

Legend: B batch, G rows or columns that attend apart, A heads, N tokens, D head width.
"""

from __future__ import annotations

from typing import Literal

Layout = Literal["BAND", "BNAD", "NBAD", "BNGAD"]


def dims_of(layout: Layout) -> str:
    """The dims of the views, in their order."""
    return "BGAND" if "G" in layout else "BAND"


def memory_order(layout: Layout) -> tuple[int, ...]:
    """The views' dims from the outermost in memory to the innermost."""
    return tuple(dims_of(layout).index(letter) for letter in layout)


def tokens_first(layout: Layout) -> tuple[int, ...]:
    """The order of the views' dims in which they travel."""
    dims = dims_of(layout)
    return tuple(dims.index(letter) for letter in ("N", *dims.replace("N", "")))
