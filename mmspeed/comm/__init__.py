"""Collectives: group as an argument, every call counted in bytes by kind in a ledger that the caller owns."""

from .collectives import (
    Ledger,
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_object,
    first_does,
)

__all__ = [
    "Ledger",
    "all_gather_objects",
    "all_reduce_max",
    "all_reduce_sum",
    "barrier",
    "broadcast_object",
    "first_does",
]
