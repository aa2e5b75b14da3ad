"""Collectives: the group, or the axis of the mesh, is an argument; tensors that travel are counted in a ledger that the caller owns."""

from .axis import Axis, Exchange, Ledger, ledger, nbytes
from .collectives import (
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_object,
    first_does,
)
from .exchange import Pending, all_gather, all_to_all, all_to_all_many, even_sizes, pass_on, reduce_scatter, swap_rows

__all__ = [
    "Axis",
    "Exchange",
    "Ledger",
    "Pending",
    "all_gather",
    "all_gather_objects",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "all_to_all_many",
    "barrier",
    "broadcast_object",
    "even_sizes",
    "first_does",
    "ledger",
    "nbytes",
    "pass_on",
    "reduce_scatter",
    "swap_rows",
]
