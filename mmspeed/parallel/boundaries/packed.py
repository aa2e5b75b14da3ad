"""Tokens of packed documents in a forward pass over a ring: rows of packs as one row, and the shares of their documents.

Legend: B rows, N tokens of a row, T = B x N, Z one more than documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.parallel.documents import DocumentShares, share_documents


@dataclass(frozen=True)
class PackedTokens:
    """The packs of a forward pass: `rows` of `columns` tokens, whose documents the ranks of a ring share."""

    rows: int
    columns: int
    shares: DocumentShares

    @classmethod
    def of(cls, bounds_Z: Tensor, rows: int, columns: int, ranks: int, where: str) -> PackedTokens:
        """The shares of documents with these bounds, which the ends of rows cut; the bounds are read on the host."""
        bounds, tokens = bounds_Z.tolist(), rows * columns
        if bounds[0] != 0 or bounds[-1] != tokens or any(left > right for left, right in pairwise(bounds)):
            raise UserError(f"{where}: bounds of documents rise from 0 to the {tokens} tokens, and these do not")
        ends = sorted({*bounds, *range(0, tokens + 1, max(1, columns))})
        lengths = tuple(right - left for left, right in pairwise(ends))
        return cls(rows, columns, share_documents(lengths, ranks))

    def in_one_row(self, x: Tensor, dim: int) -> Tensor:
        """(..., B, N, ...) as (..., 1, T, ...), with the tokens along `dim`."""
        return x.flatten(dim - 1, dim).unsqueeze(dim - 1)

    def in_rows(self, x: Tensor, dim: int) -> Tensor:
        """(..., 1, T, ...) as (..., B, N, ...)."""
        rows = x.squeeze(dim - 1)
        return rows.reshape(*rows.shape[: dim - 1], self.rows, self.columns, *rows.shape[dim:])
