"""Packed documents in a forward pass over a ring: all rows of packs become one row, whose documents the ranks share.

Legend: B rows, N tokens of a row, T = B x N, Z one more than documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.parallel.document_shares import DocumentShares, share_documents


@dataclass(frozen=True)
class PackedTokens:
    """The packs of a forward pass: `rows` of `columns` tokens, whose documents the ranks of a ring share."""

    rows: int
    columns: int
    shares: DocumentShares

    @classmethod
    def of(cls, bounds_Z: Tensor, rows: int, columns: int, ranks: int, where: str) -> PackedTokens:
        """Share the documents with these bounds among the ranks; the end of a row also ends a document. Waits for the device.

        Raises UserError for bounds that do not rise from 0 to the number of tokens.
        """
        bounds, tokens = bounds_Z.tolist(), rows * columns
        if bounds[0] != 0 or bounds[-1] != tokens or any(left > right for left, right in pairwise(bounds)):
            raise UserError(f"{where}: bounds of documents rise from 0 to the {tokens} tokens, and these do not")
        ends = sorted({*bounds, *range(0, tokens + 1, max(1, columns))})
        lengths = tuple(right - left for left, right in pairwise(ends))
        return cls(rows, columns, share_documents(lengths, ranks))

    def in_one_row(self, x: Tensor, dim: int) -> Tensor:
        """Reshape (..., B, N, ...) to (..., 1, T, ...); `dim` is that of the tokens."""
        return x.flatten(dim - 1, dim).unsqueeze(dim - 1)

    def in_rows(self, x: Tensor, dim: int) -> Tensor:
        """Reshape (..., 1, T, ...) back to (..., B, N, ...)."""
        rows = x.squeeze(dim - 1)
        return rows.reshape(*rows.shape[: dim - 1], self.rows, self.columns, *rows.shape[dim:])
