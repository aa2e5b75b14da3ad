"""Exchange kept keys and values: each rank receives the rows that some of its query clusters keep, and nothing else.

The owner of keys knows which of them each rank's clusters keep. It sends a rank the union of these, key and value side by side, and once
per plan a bit list that says which cluster keeps which row. The received rows are placed in a table, by head and in the order of the whole
sequence, and the rank's plan points into the table. Gradients return the same way and are added in the order of the ranks.

Bytes that a rank sends, Z rows of its keys that it sends to other ranks (a key that two ranks keep counts twice), e the element size:

    rows    forward and, for the gradients of what came, backward: Z 2 D e; Z is the rows sent here, the rows received there
    lists   Z ceil(C / 8), C clusters of the rank that they go to, and 8 B A a rank for the numbers of rows
    means   all-gather forward, reduce-scatter of float32 backward

Legend: B batch, A heads, G = B x A, M keys of this rank, T places of the table, D head width, C clusters of queries of a rank, W bytes of C
bits, K clusters of keys of all ranks, R ranks, Z rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import RowCounts, start_all_gather, start_reduce_scatter, start_rows, swap_rows
from mmspeed.comm.halves import finish
from mmspeed.compute.sparse.cluster_plan import ClusterMeans
from mmspeed.replay import apart, checkpointed


@dataclass(frozen=True)
class RowExchange:
    """Which rows go to which rank, and where received rows are placed; the same in every pass of a plan.

    Row g * M + m is key m of head g; place g * T + t is place t of that head's table.
    """

    sends: tuple[int, ...]  # number of rows for each rank, this one included
    comes: tuple[int, ...]
    row_Z: Tensor  # int64: rows to send, those for rank 0 first, ascending for each rank
    place_Z: Tensor  # int64: the places of the rows that come, those from rank 0 first
    table: int  # T

    @property
    def counts(self) -> RowCounts:
        """The numbers of rows that go to, and come from, each rank."""
        return RowCounts(self.sends, self.comes)


def pack_bits(kept_GCM: Tensor) -> Tensor:
    """Pack which clusters keep each key into bits: uint8, (G, M, W); cluster c is bit c % 8 of byte c // 8."""
    groups, clusters, keys = kept_GCM.shape
    bits_GWM = torch.zeros(groups, -(-clusters // 8), keys, dtype=torch.uint8, device=kept_GCM.device)
    for bit in range(min(8, clusters)):
        of_bit = kept_GCM[:, bit::8]
        bits_GWM[:, : of_bit.shape[1]] |= of_bit.to(torch.uint8) << bit
    return bits_GWM.mT.contiguous()


def unpack_bits(bits_GTW: Tensor, clusters: int) -> Tensor:
    """Undo `pack_bits`: bool, (G, C, T)."""
    bit_81 = torch.arange(8, dtype=torch.uint8, device=bits_GTW.device)[:, None]
    on_GCT = (bits_GTW.mT[:, :, None] >> bit_81 & 1).flatten(1, 2)[:, :clusters]
    return on_GCT.bool().contiguous()


def route(bits_RGMW: Sequence[Tensor], axis: Axis) -> tuple[RowExchange, Tensor]:
    """Tell every rank which rows it will get. Waits for the device once.

    `bits_RGMW`: for each rank, which of its clusters keep this rank's keys, (G, M, W) with its own W.
    Returns the exchange, and which of this rank's clusters keep the rows of its table: uint8, (G, T, W).
    """
    own_bits = bits_RGMW[axis.rank]
    groups, keys, width = own_bits.shape
    wanted_RGM = torch.stack([bits.any(dim=2) for bits in bits_RGMW])
    counts_RG = wanted_RGM.sum(dim=2)
    each = (1,) * axis.size
    comes_RG = swap_rows(counts_RG, axis, RowCounts(each, each), "lists").cpu()
    numbers = torch.stack([counts_RG.sum(dim=1).cpu(), comes_RG.sum(dim=1)]).tolist()
    sends, comes = tuple(numbers[0]), tuple(numbers[1])
    index_Z = wanted_RGM.view(-1).nonzero()[:, 0] % max(1, groups * keys)
    lists = [
        bits.flatten(0, 1)[rows].view(-1) for bits, rows in zip(bits_RGMW, index_Z.split(list(sends)), strict=True)
    ]
    list_bytes = RowCounts(tuple(map(len, lists)), tuple(n * width for n in comes))
    came = swap_rows(torch.cat(lists), axis, list_bytes, "lists").view(-1, width)
    table = max(1, int(comes_RG.sum(dim=0).max())) if groups else 1
    place_Z = _places(comes_RG, table).to(came.device)
    bits_GTW = came.new_zeros(groups * table, width).index_copy(0, place_Z, came).view(groups, table, width)
    return RowExchange(sends, comes, index_Z, place_Z, table), bits_GTW


def _places(comes_RG: Tensor, table: int) -> Tensor:
    """The place in the table of each row that comes. Rows come rank by rank, head by head; the table has each head's rows in rank order."""
    flat = comes_RG.reshape(-1)
    first_RG = (comes_RG.cumsum(0) - comes_RG) + torch.arange(comes_RG.shape[1]) * table
    within = torch.arange(int(flat.sum())) - torch.repeat_interleave(flat.cumsum(0) - flat, flat)
    return torch.repeat_interleave(first_RG.reshape(-1), flat) + within


def lists_of(bits_GTW: Tensor, clusters: int, most: int) -> tuple[Tensor, Tensor]:
    """(kv_index_Z, kv_offsets) of a plan, from a table's bits. Unpacks some heads at a time, `most` bools at most."""
    groups, table, _ = bits_GTW.shape
    index, lengths = [], []
    for part in bits_GTW.split(max(1, most // max(1, clusters * table))):
        kept_GCT = unpack_bits(part, clusters)
        index.append((kept_GCT.view(-1).nonzero()[:, 0] % table).int())
        lengths.append(kept_GCT.sum(dim=2).view(-1))
    offsets = torch.zeros(groups * clusters + 1, dtype=torch.int64, device=bits_GTW.device)
    if not index:
        return bits_GTW.new_zeros(0, dtype=torch.int32), offsets
    offsets[1:] = torch.cat(lengths).cumsum(0)
    return torch.cat(index), offsets


def fetch(
    k_BAMD: Tensor, v_BAMD: Tensor, means: ClusterMeans | None, mean_sizes: Sequence[int], rows: RowExchange, axis: Axis
) -> tuple[Tensor, Tensor, ClusterMeans | None]:
    """Fill this rank's tables of keys and values (B, A, T, D), and all-gather the cluster means; gradients return to the owners.

    `means` are those of this rank's key clusters, `mean_sizes` the number of clusters of each rank. Every rank makes the call, and its
    backward.
    """
    how = rows, axis, tuple(mean_sizes)
    if means is None:
        k, v = _Fetch.apply(*how, k_BAMD, v_BAMD, None, None)
        return k, v, None
    k, v, mean_k, mean_v = _Fetch.apply(*how, k_BAMD, v_BAMD, means.k_BAKD, means.v_BAKD)
    return k, v, ClusterMeans(mean_k, mean_v)


def _fetched(
    rows: RowExchange,
    axis: Axis,
    mean_sizes: tuple[int, ...],
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    means: ClusterMeans | None,
) -> tuple[Tensor, ...]:
    """Tables of keys and values, followed by the means of all ranks where there are means. Replay records them as one exchange."""
    batch, heads, width = *k_BAMD.shape[:2], k_BAMD.shape[3]
    sent_ZE = torch.cat([x.flatten(0, 2).index_select(0, rows.row_Z) for x in (k_BAMD, v_BAMD)], dim=1)
    pending, pending_means = start_rows(sent_ZE, axis, rows.counts), None
    if means is not None:  # travels beside the rows
        pending_means = start_all_gather(torch.cat((means.k_BAKD, means.v_BAKD), dim=3), axis, 2, mean_sizes)
    came_ZE = finish(pending)
    tables = []
    for part_ZD in came_ZE.split([width, v_BAMD.shape[3]], dim=1):
        table = part_ZD.new_zeros(batch * heads * rows.table, part_ZD.shape[1])
        tables.append(table.index_copy_(0, rows.place_Z, part_ZD).view(batch, heads, rows.table, -1))
    if pending_means is None:
        return tuple(tables)
    both = finish(pending_means)
    return *tables, both[..., :width].contiguous(), both[..., width:].contiguous()


class _Fetch(torch.autograd.Function):
    """Rows and means in a single autograd function, so that all ranks make the exchanges of backward in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: RowExchange,
        axis: Axis,
        mean_sizes: tuple[int, ...],
        k_BAMD: Tensor,
        v_BAMD: Tensor,
        mean_k: Tensor | None,
        mean_v: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.how = rows, axis, mean_sizes, (k_BAMD.shape, v_BAMD.shape)
        # a rank without queries saves nothing else, and without saved tensors a checkpoint would not recompute on it, as on the others
        ctx.save_for_backward(rows.row_Z)
        means = None if mean_k is None or mean_v is None else ClusterMeans(mean_k, mean_v)
        what = "fetch", axis, rows.counts

        def fetched() -> tuple[Tensor, ...]:
            with apart():
                return _fetched(rows, axis, mean_sizes, k_BAMD, v_BAMD, means)

        return checkpointed("exchange", fetched, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_BATD: Tensor, dv_BATD: Tensor, *dmeans: Tensor) -> Any:
        rows, axis, mean_sizes, shapes = ctx.how
        (row_Z,) = ctx.saved_tensors
        wide = torch.promote_types(dk_BATD.dtype, torch.float32)
        sent_ZE = torch.cat([x.flatten(0, 2).index_select(0, rows.place_Z) for x in (dk_BATD, dv_BATD)], dim=1)
        pending, pending_means = start_rows(sent_ZE, axis, rows.counts.back()), None
        if dmeans:  # travel beside the rows
            pending_means = start_reduce_scatter(torch.cat(dmeans, dim=3).to(wide), axis, 2, mean_sizes)
        came_ZE = finish(pending)
        widths = [shape[3] for shape in shapes]
        sum_ME = came_ZE.new_zeros(shapes[0][:3].numel(), sum(widths), dtype=wide)
        # rank by rank: no rank returns a row twice, so the order of each sum is fixed
        for index_Z, part_ZE in zip(row_Z.split(rows.sends), came_ZE.split(rows.sends), strict=True):
            sum_ME.index_add_(0, index_Z, part_ZE.to(wide))
        dk, dv = (
            part.to(dk_BATD.dtype).view(shape) for part, shape in zip(sum_ME.split(widths, 1), shapes, strict=True)
        )
        if pending_means is None:
            return None, None, None, dk, dv, None, None
        both = finish(pending_means)
        dmean_k, dmean_v = (part.to(dmeans[0].dtype) for part in both.split(widths, dim=3))
        return None, None, None, dk, dv, dmean_k, dmean_v
