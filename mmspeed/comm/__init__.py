"""Collectives: the group, or the axis of the mesh, is an argument; tensors that travel are counted in a ledger that the caller owns."""

from .axis import Axis, ExchangeMethod, Ledger, ledger, nbytes
from .collectives import (
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_object,
    first_does,
)
from .exchange import (
    PendingTensors,
    RowCounts,
    all_gather,
    all_to_all,
    even_sizes,
    pass_on,
    reduce_scatter,
    row_counts,
    start_all_gather,
    start_all_to_all,
    start_all_to_all_many,
    start_reduce_scatter,
    start_rows,
    swap_rows,
)
from .halves import PendingExchange, finish, finish_all

__all__ = [
    "Axis",
    "ExchangeMethod",
    "Ledger",
    "PendingExchange",
    "PendingTensors",
    "RowCounts",
    "all_gather",
    "all_gather_objects",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "barrier",
    "broadcast_object",
    "even_sizes",
    "finish",
    "finish_all",
    "first_does",
    "ledger",
    "nbytes",
    "pass_on",
    "reduce_scatter",
    "row_counts",
    "start_all_gather",
    "start_all_to_all",
    "start_all_to_all_many",
    "start_reduce_scatter",
    "start_rows",
    "swap_rows",
]
