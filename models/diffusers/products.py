"""Count operations of matrix products; a multiply-add counts as two."""

from __future__ import annotations


def linear(tokens: int, inputs: int, outputs: int) -> int:
    """Operations of a linear layer, or of a convolution whose patches do not overlap."""
    return 2 * tokens * inputs * outputs


def attention(queries: int, keys: int, width: int) -> int:
    """Operations of scores and values over all heads."""
    return 4 * queries * keys * width
