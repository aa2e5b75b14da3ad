"""What mmspeed calls of DeepEP 2.1.0 (dd758ca), with its signatures, by collectives on CPUs; a stand-in where there is no device.

Results arrive when their event was waited for: before, they are NaN. Tensors must be what the kernels take.

Legend: P processes, C most tokens of a process, T tokens, K choices, E width, Z rows that come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmspeed.comm import all_gather_objects

topk_idx_t = torch.int64


@dataclass
class EPHandle:
    """topk_idx: the experts of this process's tokens; slots_PCK: the row of each choice of each process that came here, or -1."""

    topk_idx: Tensor
    num_experts: int
    num_unaligned_recv_tokens_per_expert: Tensor
    slots_PCK: Tensor


@dataclass
class EventOverlap:
    arrive: Callable[[], object] | None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self.arrive is not None
        self.arrive()
        self.arrive = None


def later(*results: Tensor | None) -> tuple[list[Any], EventOverlap]:
    """Tensors that are NaN until the event was waited for, and the event."""
    out = [None if x is None else torch.full_like(x, torch.nan) for x in results]
    pairs = [(to, x) for to, x in zip(out, results, strict=True) if to is not None and x is not None]
    return out, EventOverlap(lambda: [to.copy_(x) for to, x in pairs])


class ElasticBuffer:
    """Memory for the exchanges of a group."""

    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int | None = None, num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False,
        deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        most = all_gather_objects(num_max_tokens_per_rank, group)
        assert most == [num_max_tokens_per_rank] * group.size() and num_max_tokens_per_rank and deterministic
        self.group, self.most, self.hidden, self.num_topk = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(
        self, x: Tensor, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None, do_handle_copy: bool = True, do_cpu_sync: bool | None = None,
        do_expand: bool = False, do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor, None, Tensor | None, EPHandle, EventOverlap]:  # fmt: skip
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] <= self.hidden and len(x) <= self.most
        assert do_expand and async_with_compute_stream and (handle is None) == (topk_idx is not None)
        if handle is None:
            assert topk_idx is not None and topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and num_experts
            assert topk_idx.shape[1] <= self.num_topk
            handle = self._route(topk_idx.clone(), num_experts)
        here_PCK = handle.slots_PCK >= 0
        rows_ZE = x.new_empty(int(here_PCK.sum()), x.shape[1])
        token = here_PCK.nonzero()
        rows_ZE[handle.slots_PCK[here_PCK]] = self._of_all(x)[token[:, 0], token[:, 1]]
        gates_Z = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
            gates_Z = topk_weights.new_empty(len(rows_ZE))
            gates_Z[handle.slots_PCK[here_PCK]] = self._of_all(topk_weights)[here_PCK]
        (rows, gates), event = later(rows_ZE, gates_Z)
        return rows, None, gates, handle, event

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None, bias: Any = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and async_with_compute_stream
        out_TE, weights_TK = self._home(x, handle).sum(1), None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and topk_weights.dim() == 1
            weights_TK = self._home(topk_weights[:, None], handle)[..., 0]
        (out, weights), event = later(out_TE, weights_TK)
        return out, weights, event

    def _of_all(self, x: Tensor) -> Tensor:
        """The tensors of all processes, padded, (P, C, ...)."""
        mine = x.new_zeros(self.most, *x.shape[1:])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, self.group)
        return torch.stack(parts)

    def _route(self, topk_idx: Tensor, experts: int) -> EPHandle:
        each = experts // self.group.size()
        expert_PCK = self._of_all(topk_idx + 1) - 1 - each * self.group.rank()  # -1 where there is no token
        here_PCK = (expert_PCK >= 0) & (expert_PCK < each) & (self._of_all(torch.ones_like(topk_idx)) > 0)
        order = expert_PCK[here_PCK].argsort(stable=True)  # of processes, and of tokens within them
        slots_PCK = torch.full_like(expert_PCK, -1)
        slots_PCK[here_PCK] = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(expert_PCK[here_PCK], minlength=each).int()
        return EPHandle(topk_idx, experts, counts, slots_PCK)

    def _home(self, x: Tensor, handle: EPHandle) -> Tensor:
        """The rows of this process's choices, (T, K, ...); one process has that of each."""
        all_PCKE = x.new_zeros(*handle.slots_PCK.shape, x.shape[1], dtype=torch.float32)
        here_PCK = handle.slots_PCK >= 0
        all_PCKE[here_PCK] = x[handle.slots_PCK[here_PCK]].float()
        dist.all_reduce(all_PCKE, group=self.group)
        return all_PCKE[self.group.rank(), : len(handle.topk_idx)].to(x.dtype)
