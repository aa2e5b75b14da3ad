"""The lists of kept keys of a plan, gathered from blocks of clusters and keys so that the whole matrix is never in memory.

Legend: G groups (samples x heads), M keys, C clusters of queries, K clusters of keys, Z kept keys, g and c some groups and clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# elements of a block of C x M: small enough for a CPU's cache, large enough for an accelerator to be busy
_BLOCK = {"cpu": 1 << 20}
_BLOCK_ELSE = 1 << 26


@dataclass(frozen=True)
class KeyLists:
    """Kept keys of every cluster, including the full one."""

    kv_index_Z: Tensor
    kv_offsets: Tensor
    tau_G: Tensor | None
    kept_GCK: Tensor | None  # kept keys of each cluster of keys, int64


def blocks(groups: int, clusters: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of G x C with a bounded number of pairs with keys: whole groups, or clusters of one group."""
    limit = _BLOCK.get(device.type, _BLOCK_ELSE)
    wide, tall = max(1, limit // max(1, clusters * keys)), max(1, limit // max(1, keys))
    tall = max(tall, clusters) if wide > 1 else tall
    for g in range(0, groups, wide):
        for c in range(0, clusters, tall):
            yield slice(g, min(g + wide, groups)), slice(c, min(c + tall, clusters))


class KeyListBuilder:
    """A builder of the lists of kept keys, block by block."""

    def __init__(
        self,
        groups: int,
        rows: int,
        keys: int,
        device: torch.device,
        label_GM: Tensor | None = None,
        labels: int = 0,
    ) -> None:
        self.keys, self.label_GM, self.labels = keys, label_GM, labels
        self.index: list[Tensor] = []
        self.length_GC = torch.zeros(groups, rows, dtype=torch.int64, device=device)
        self.kept_GCK = None
        if label_GM is not None:
            self.kept_GCK = torch.zeros(groups, rows, labels, dtype=torch.int64, device=device)

    def add(self, groups: slice, rows: slice, flat_Z: Tensor, length_gc: Tensor) -> None:
        """Add the results of `flat_lists` for a block; blocks come in order."""
        row_Z = torch.repeat_interleave(torch.arange(length_gc.numel(), device=flat_Z.device), length_gc.flatten())
        key_Z = flat_Z - row_Z * self.keys
        self.length_GC[groups, rows] = length_gc
        self.index.append(key_Z.to(torch.int32))
        if self.label_GM is not None and self.kept_GCK is not None:
            label_gM = self.label_GM[groups]
            place_Z = key_Z
            if len(label_gM) > 1:
                place_Z = key_Z + row_Z.div(length_gc.shape[1], rounding_mode="floor") * self.keys
            code_Z = row_Z * self.labels + label_gM.reshape(-1)[place_Z]
            counts = torch.bincount(code_Z, minlength=length_gc.numel() * self.labels)
            self.kept_GCK[groups, rows] = counts.view(*length_gc.shape, self.labels)

    def finish(self, tau_G: Tensor | None = None) -> KeyLists:
        """The lists of all blocks."""
        device = self.length_GC.device
        kv_offsets = torch.zeros(self.length_GC.numel() + 1, dtype=torch.int64, device=device)
        torch.cumsum(self.length_GC.flatten(), dim=0, out=kv_offsets[1:])
        return KeyLists(torch.cat(self.index), kv_offsets, tau_G, self.kept_GCK)


def flat_lists(keep_gcM: Tensor) -> tuple[Tensor, Tensor]:
    """The flat indices of True, ascending, and their number in each row, (g, c)."""
    groups, clusters, keys = keep_gcM.shape
    flat_Z = keep_gcM.view(-1).nonzero()[:, 0]
    ends = torch.arange(groups * clusters + 1, device=flat_Z.device) * keys
    return flat_Z, torch.searchsorted(flat_Z, ends).diff().view(groups, clusters)
