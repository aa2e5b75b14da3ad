"""Bytes of experts over processes by the formulas, from the choices that each process made; a collective call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmspeed.comm import Axis, Ledger
from mmspeed.parallel import TokenLayout
from mmspeed.plan.traffic import NodeRows, Sent, Traffic, expert_traffic, hidden_traffic, node_traffic


def traffic_of(
    chosen: Sequence[Tensor], layout: TokenLayout, experts: int, width: int, hidden: int, size: int
) -> tuple[Traffic, Traffic]:
    """The traffic of calls of a layer with these choices (T, K), and the part of it that goes to other nodes. `size`: bytes of a number."""
    total, far, axis, nodes, etp = Traffic(), Traffic(), layout.experts, layout.nodes, layout.etp
    for expert_TK in chosen:
        loads_G = torch.bincount(expert_TK.flatten(), minlength=experts)
        if nodes is None:
            kinds, sends_P = experts, loads_G.view(axis.size, -1).sum(1)
            sends, comes = sends_P.tolist(), swapped(sends_P, axis)
            total += expert_traffic(sends, comes, axis.rank, experts, width, size)
            far += across(sends, comes, axis, experts, width, size)
        else:
            outer, inner = nodes
            kinds, node_TK = experts // outer.size, expert_TK // (experts // outer.size)
            out_O = torch.stack([(node_TK == node).any(1).sum() for node in range(outer.size)])
            here_OH = torch.stack(swapped(loads_G.view(outer.size, -1), outer))
            out_I = here_OH.sum(0).view(inner.size, -1).sum(1)
            comes = swapped(out_I, inner)
            rows = NodeRows(out_O.tolist(), swapped(out_O, outer), out_I.tolist(), comes, outer.rank, inner.rank)
            every = node_traffic(rows, experts, width, expert_TK.shape[1], size)
            total += every
            far += Traffic(*(Counter({k: n for k, n in one.items() if k[1] == outer.name}) for one in _passes(every)))
        if etp.size > 1:
            come_S = [torch.zeros(1, dtype=torch.int64) for _ in range(etp.size)]
            dist.all_gather(come_S, torch.tensor([sum(comes)]), group=etp.group)
            counts = [int(n) for n in come_S]
            total += hidden_traffic(counts, etp.rank, kinds, experts // axis.size, width, hidden, size)
    return total, far


def across(sends: list[int], comes: list[int], axis: Axis, experts: int, width: int, size: int) -> Traffic:
    """The part of the exchanges between all processes that goes to other nodes."""
    far = [place for place in axis.others() if axis.nodes[place] != axis.nodes[axis.rank]]
    out, back, row, gate = sum(sends[at] for at in far), sum(comes[at] for at in far), size * width, 4
    counts = {("counts", "ep"): len(far) * 8 * experts // axis.size}
    forward = counts | {("dispatch", "ep"): out * (row + gate), ("combine", "ep"): back * row}
    return Traffic(Counter(forward), Counter({("dispatch", "ep"): back * (row + gate), ("combine", "ep"): out * row}))


def swapped(sends_P: Tensor, axis: Axis) -> list[Any]:
    """What comes from each process of an axis, to which this one sends numbers, or rows of them."""
    comes_P = sends_P.clone()
    if axis.size > 1:
        dist.all_to_all_single(comes_P, sends_P.contiguous(), group=axis.group)
    return list(comes_P.tolist()) if comes_P.dim() == 1 else list(comes_P)


def sent_far(sent: Ledger) -> Sent:
    """Bytes of axes of experts that went to other nodes."""
    axes = ("ep", "ep_outer", "ep_inner", "etp")
    return Counter(
        {(kind, axis): n for (kind, axis, link), n in sent.by_link.items() if link == "outer" and axis in axes}
    )


def both(traffic: Traffic) -> Sent:
    """Bytes of both passes, without zeros."""
    return +sum(_passes(traffic), Counter())


def _passes(traffic: Traffic) -> tuple[Sent, Sent]:
    return traffic.forward, traffic.backward
