"""Send tokens to experts and back by the kernels of DeepEP 2 (DeepSeek-AI), which send a token once to each process.

Calls are held against the signatures of its version 2.1.0, and a stand-in that computes by them; no device has run them. Bytes are not
counted, since kernels alone know them.

Legend: T tokens, K experts of a token, E width, G experts, L experts of a process, Z rows that come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mmspeed.comm import Axis, PendingExchange, all_reduce_max, finish, finish_all
from mmspeed.comm.halves import start
from mmspeed.comm.messages import Underway
from mmspeed.comm.packing import Sizes
from mmspeed.compute.autocast import autocast_alike
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.replay import record_or_replay

from .dispatch import Dispatcher

OLDEST = (9, 0)  # compute capability
MOST_CHOICES = 32
UNIT = 8  # numbers of a row, in bfloat16, that travel together


def missing(kind: str) -> str:
    """What a machine with this kind of device lacks; "" where it has all."""
    if kind != "cuda":
        return f"it has kernels of CUDA, not of {kind}"
    if find_spec("deep_ep") is None:
        return "deep_ep is not installed (https://github.com/deepseek-ai/DeepEP, version 2)"
    capability = torch.cuda.get_device_capability()
    return "" if capability >= OLDEST else f"it takes devices of compute capability {OLDEST}, not {capability}"


def refuses(x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> str:
    """The reason why it does not send such tokens; "" where it does."""
    if reason := missing(x_TE.device.type):
        return reason
    if x_TE.dtype != torch.bfloat16 or weights_TK.dtype != torch.float32:
        return f"it sends bfloat16 tokens with float32 gates, not {x_TE.dtype} with {weights_TK.dtype}: set device.dtype: bfloat16"
    width, choices = x_TE.shape[1], expert_TK.shape[1]
    if width % UNIT or choices > MOST_CHOICES:
        return (
            f"it takes widths that are multiples of {UNIT} and up to {MOST_CHOICES} choices, not {width} and {choices}"
        )
    return ""


def check_backend(kind: str) -> None:
    """Raise UserError where this kind of device, or the machine, has no DeepEP."""
    _raise(missing(kind))


def _raise(reason: str) -> None:
    if reason:
        raise UserError(f"parallel.ep_backend: deepep does not serve: {reason}; use collective")


class Buffers:
    """DeepEP's memory for the exchanges over an axis, which its layers share; it grows to what any of them sends."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self._buffer, self._fits = axis, None, (1, 0, 0)

    def of(self, tokens: int, width: int, choices: int) -> Any:
        """The buffer for this many tokens on any process; a collective call."""
        # on the host: all processes must name one number, and theirs may differ
        (most,) = all_reduce_max([tokens], self.axis.group)
        fits = max(int(most), self._fits[0]), max(width, self._fits[1]), max(choices, self._fits[2])
        if fits != self._fits:
            from deep_ep import ElasticBuffer

            sizes = dict(zip(("num_max_tokens_per_rank", "hidden", "num_topk"), fits, strict=True))
            self._buffer = ElasticBuffer(self.axis.group, **sizes, deterministic=True)  # else a resumed run is another
            self._fits = fits
        return self._buffer


@dataclass(eq=False)
class Route:
    """The way of one pass's tokens through a layer. handle: DeepEP's, once they were sent."""

    buffer: Any
    experts: int
    expert_TK: Tensor
    handle: Any = None

    def out(self, x_TE: Tensor, gates_TK: Tensor | None = None) -> tuple[list[Tensor], Any]:
        """A row for each choice, by expert, and its gate; and the event of their arrival."""
        way = {"handle": self.handle}
        if self.handle is None:
            from deep_ep import topk_idx_t

            way = {"topk_idx": self.expert_TK.to(topk_idx_t).contiguous(), "num_experts": self.experts}
        rows_ZE, _, gates_Z, self.handle, event = self.buffer.dispatch(
            x_TE, topk_weights=gates_TK, do_expand=True, async_with_compute_stream=True, **way
        )
        return [rows_ZE] if gates_TK is None else [rows_ZE, gates_Z], event

    def home(self, rows_ZE: Tensor, gates_Z: Tensor | None = None) -> tuple[list[Tensor], Any]:
        """The sum of each token's rows, and the numbers of its choices; and the event of their arrival."""
        out_TE, gates_TK, event = self.buffer.combine(
            rows_ZE, self.handle, topk_weights=gates_Z, async_with_compute_stream=True
        )
        return [out_TE] if gates_Z is None else [out_TE, gates_TK], event


@dataclass
class _Arrival:
    """An event of DeepEP as a pending message."""

    event: Any

    def wait(self) -> None:
        self.event.current_stream_wait(release_handle=True)


@dataclass(frozen=True)
class _Sending:
    """A way to the experts, or home, as an exchange; that of the gradients is the other one."""

    axis: Axis
    route: Route
    home: bool

    def back(self) -> _Sending:
        return replace(self, home=not self.home)

    def begin(self, xs: Sequence[Tensor], layouts: Sequence[Sizes]) -> Underway:
        sent = [x.contiguous() for x in xs]
        results, event = (self.route.home if self.home else self.route.out)(*sent)
        self.axis.count("combine" if self.home else "dispatch", 0)
        return Underway(self.axis, [_Arrival(event)], sent, lambda: tuple(results))


@dataclass(frozen=True)
class DispatchedByKernels:
    """Rows on their way to experts. kinds: those of copies, of which there are none."""

    route: Route
    pending: PendingExchange
    kinds: tuple[int, ...] = ()


class DeepEpDispatcher(Dispatcher):
    """One exchange there and one back by DeepEP between all processes of an axis, of which each holds G / P experts in order."""

    def __init__(self, buffers: Buffers, experts: int) -> None:
        super().__init__(experts, None)
        self.buffers = buffers

    @outside_graphs
    def start(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> DispatchedByKernels:
        """Start sending each token to its experts. Raises UserError for tokens that DeepEP does not take."""
        assert self.slots is None, "the config has refused balance"
        (x_TE,) = autocast_alike(x_TE)
        _raise(refuses(x_TE, weights_TK, expert_TK))

        def route() -> Route:
            buffer = self.buffers.of(len(x_TE), x_TE.shape[1], expert_TK.shape[1])
            return Route(buffer, self.experts, expert_TK)

        way, _ = record_or_replay(route)
        pending = start(_Sending(self.buffers.axis, way, False), ((0, 1), (0, 1)), [x_TE, weights_TK])
        return DispatchedByKernels(way, pending)

    @outside_graphs
    def finish(self, sent: DispatchedByKernels) -> tuple[Tensor, Tensor, Tensor]:
        """(rows_ZE, gates_Z1, expert_Z1): the rows that came, by expert, each as a token of one choice."""
        rows_ZE, gates_Z = finish_all(sent.pending)
        counts_L = sent.route.handle.num_unaligned_recv_tokens_per_expert
        here_L = torch.arange(len(counts_L), device=counts_L.device)
        return rows_ZE, gates_Z[:, None], here_L.repeat_interleave(counts_L, output_size=len(rows_ZE))[:, None]

    def start_back(self, sent: DispatchedByKernels, out_ZE: Tensor) -> PendingExchange:
        """Start sending the experts' outputs back."""
        return start(_Sending(self.buffers.axis, sent.route, True), ((0, 1),), [out_ZE])

    def finish_back(self, sent: DispatchedByKernels, pending: PendingExchange) -> Tensor:
        """The sum of each token's outputs, (T, E)."""
        return finish(pending)
