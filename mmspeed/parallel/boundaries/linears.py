"""Tensor parallelism: weight matrices split over the `tp` axis by the roles that a plan names.

After Megatron-LM (Shoeybi et al. 2019) with the norms on shards of the tokens (Korthikanti et al. 2022): between a column
layer and its row layer a process has some heads or hidden units of all tokens; elsewhere all channels of its own tokens. Weights are
DTensors, so that sharding, checkpoints and the optimizer know how they are split.

Parameters without a role are on every process of the axis, and meet other tokens on each: their gradients are summed over it
after the backward pass (`mmspeed.parallel.tensor.sum_shared_gradients`).

Legend: I O channels in and out, K experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mmspeed.comm import all_gather, all_to_all, even_sizes
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.mixin import mix_in
from mmspeed.parallel.tensor import local
from mmspeed.protocols.plan import Attended, Linear, PreparesInput

from .record import Sequences


@dataclass
class LinearBoundary:
    """What the plan says of one linear layer. `channels`: those that are split, over all processes; of experts, their number.

    `applied`: its weight was used. torch.compile would make graphs again for a count, for a flag it does not.
    """

    sequences: Sequences
    where: str
    linear: Linear
    attends: Attended
    bias_share: float
    channels: int
    applied: bool = False

    def __deepcopy__(self, memo: Any) -> LinearBoundary:
        return self

    @property
    def enters(self) -> bool:
        """True where own tokens are gathered before the product."""
        return self.linear.role != "row" and self.linear.sequence is not None

    @property
    def leaves(self) -> bool:
        """True where the product's results travel."""
        return self.linear.role in ("row", "vocabulary", "expert")

    @outside_graphs
    def enter(self, x: Tensor) -> Tensor:
        """The tokens that the product takes."""
        assert self.linear.sequence is not None
        self.sequences.use(self.where)
        record = self.sequences.record(self.where)
        return record.gather_seen(x, self.linear.sequence, self.linear.dim, self.attends, self.where)

    @outside_graphs
    def leave(self, out: Tensor) -> Tensor:
        """What the layer gives: own tokens of a sum, or all channels of own tokens."""
        self.sequences.use(self.where)
        tensor, sequence, dim = self.sequences.layout.tensor, self.linear.sequence, self.linear.dim
        if self.linear.role == "vocabulary":
            if sequence is None:  # of tokens that all processes have
                return all_gather(out, tensor, -1, even_sizes(self.channels, tensor.size))
            return self._all_to_all(out, dim, -1)
        assert sequence is not None
        record = self.sequences.record(self.where)
        return record.scatter_own(out, sequence, dim, self.attends, self.where)

    @outside_graphs
    def of_experts(self, gates: Tensor) -> Tensor:
        """The gates of this process's experts (..., K of this process) for the tokens seen, from those of all experts for own tokens."""
        return self._all_to_all(gates, -1, self.linear.dim)

    def _all_to_all(self, x: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
        """From the tokens seen and a part of the channels to own tokens and all channels, or back: as the dims say."""
        record, tensor = self.sequences.record(self.where), self.sequences.layout.tensor
        assert self.linear.sequence is not None
        widths = record.widths(self.linear.sequence, self.attends, self.where)
        channels = even_sizes(self.channels, tensor.size)
        sizes = {self.linear.dim: widths, -1: channels}
        return all_to_all(x, tensor, scatter_dim, gather_dim, sizes[scatter_dim], sizes[gather_dim])


class SplitLinear(nn.Linear):
    """Mixed in before a linear layer's own class: computes with this process's part of the weight."""

    _linear: LinearBoundary

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.applied_weights())

    def applied_weights(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that this process computes with."""
        return _applied(self)


class SplitPreparingLinear(nn.Linear):
    """The same for a layer that prepares its input: tokens are gathered after that, so that norms meet own tokens."""

    _linear: LinearBoundary

    def prepare(self, *args: Tensor) -> Tensor:
        """The input of the product, of the tokens seen."""
        x: Tensor = super().prepare(*args)  # type: ignore[misc]
        return self._linear.enter(x) if self._linear.enters else x

    def project(self, x: Tensor) -> Tensor:
        """This process's part of the product."""
        return F.linear(x, *self.applied_weights())

    def applied_weights(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that this process computes with."""
        return _applied(self)


class Entering(nn.Module):
    """Mixed in around all else of a column layer that gathers its input, or of the module that expands tokens by it (`Chunked`)."""

    _enters: LinearBoundary

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(self._enters.enter(x))
        return out


class Leaving(nn.Module):
    """Mixed in around all else of a layer whose results travel: a row layer's sums, a vocabulary's logits."""

    _linear: LinearBoundary

    def forward(self, *args: Any) -> Tensor:
        return self._linear.leave(super().forward(*args))


class SplitExperts(nn.Module):
    """Mixed in before a module with the role "expert": weights (K, O, I) of all experts, and a forward of tokens and gates (..., K) to
    the sum. This process computes its own experts, for all tokens seen.
    """

    _linear: LinearBoundary

    @property
    def weight(self) -> Tensor:
        """Weights of this process's experts."""
        whole = self._parameters["weight"]
        assert whole is not None
        return local(whole)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        out: Tensor = super().forward(self._linear.enter(x), self._linear.of_experts(gates))
        return out


class SplitNorm(nn.RMSNorm):
    """Mixed in before an RMSNorm over all heads of which a process has some: the mean square is summed over the axis."""

    _linear: LinearBoundary

    def forward(self, x: Tensor) -> Tensor:
        return _norm_of_all(self, x, self._linear)


@outside_graphs
def _norm_of_all(norm: nn.RMSNorm, x: Tensor, boundary: LinearBoundary) -> Tensor:
    tensor, channels = boundary.sequences.layout.tensor, x.shape[-1]
    boundary.sequences.use(boundary.where)
    wide = x.float() if x.dtype != torch.float64 else x
    squares = all_gather(wide.square().sum(-1, keepdim=True), tensor, -1, (1,) * tensor.size).sum(-1, keepdim=True)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    normed = wide * (squares / boundary.channels + eps).rsqrt()
    if norm.weight is not None:
        start = channels * tensor.rank
        normed = normed * norm.weight[start : start + channels]
    return normed.to(x.dtype)


def _applied(layer: SplitLinear | SplitPreparingLinear) -> tuple[Tensor, Tensor | None]:
    boundary, bias = layer._linear, local(layer.bias) if layer.bias is not None else None
    boundary.applied = True
    if bias is not None and boundary.bias_share != 1.0:
        bias = bias * boundary.bias_share  # every process adds a part: their outputs are summed
    return local(layer.weight), bias


def split_layer(
    layer: nn.Module, mesh: DeviceMesh, linear: Linear, sequences: Sequences, name: str, attends: Attended
) -> None:
    """Split one layer in place: weights along O for a column or vocabulary layer, along I for a row layer, whose bias stays whole, along K
    for experts.

    Raises UserError for a layer that is none, that an adapter or a quantisation holds, or whose channels do not divide.
    """
    where = f"{name} ({type(layer).__name__})"
    if isinstance(layer, SplitLinear | SplitPreparingLinear | SplitExperts):
        raise UserError(f"plan, linears: {where} has two roles; let one pattern alone name it")
    if linear.role in ("row", "expert") and linear.sequence is None:
        raise UserError(
            f"plan, linears: {where} has the role {linear.role}, whose results are summed to own tokens: name their sequence"
        )
    weight = _checked_weight(layer, linear, where)
    parts, place = mesh.size(), mesh.get_local_rank()
    dim = 1 if linear.role == "row" else 0
    if weight.shape[dim] % parts:
        kind = "experts" if linear.role == "expert" else "channels"
        raise UserError(f"parallel.tp {parts} does not divide the {weight.shape[dim]} {kind} of {name}")
    share = 1.0 / parts if linear.role == "row" else 1.0
    boundary = LinearBoundary(sequences, where, linear, attends, share, weight.shape[dim])
    layer.register_parameter("weight", _part(weight, dim, mesh, parts, place))
    if isinstance(layer, nn.Linear) and layer.bias is not None and linear.role != "row":
        layer.bias = _part(layer.bias, 0, mesh, parts, place)
    mixin: type[SplitLinear | SplitPreparingLinear | SplitExperts] = SplitExperts
    if linear.role != "expert":
        mixin = SplitPreparingLinear if isinstance(layer, PreparesInput) else SplitLinear
    mix_in(layer, mixin, rename=False)._linear = boundary


def split_norm(norm: nn.Module, sequences: Sequences, name: str, attends: Attended) -> None:
    """Let a norm over all heads, an RMSNorm, compute for this process's heads with the mean square of all, in place."""
    assert isinstance(norm, nn.RMSNorm)
    where, channels = f"{name} ({type(norm).__name__})", norm.normalized_shape[-1]
    mix_in(norm, SplitNorm, rename=False)._linear = LinearBoundary(
        sequences, where, Linear("column"), attends, 1.0, channels
    )


def _checked_weight(layer: nn.Module, linear: Linear, where: str) -> Tensor:
    """The weight of a layer, where it can be read and split and nothing else is computed with it."""
    known = dict(layer.named_parameters(recurse=False))
    weight = known.get("weight")
    if "base_layer" in dict(layer.named_children()) or (weight is not None and not weight.is_floating_point()):
        raise UserError(
            f"parallel.tp: {where} has the role {linear.role}, and an adapter or a quantisation holds its weight: "
            "merge it first, or use parallel.ulysses, ring or strategy: fsdp"
        )
    if linear.role == "expert":
        if weight is None or weight.dim() != 3 or len(known) > 1:
            raise UserError(
                f"parallel.tp: {where} has the role expert in the plan; such a module has one parameter, `weight` (K, O, I), and a "
                "forward of (x, gates)"
            )
        return weight
    if not isinstance(layer, nn.Linear) or weight is None:
        raise UserError(f"parallel.tp: {where} has the role {linear.role} in the plan and is no linear layer")
    if not isinstance(layer, PreparesInput) and type(layer).forward is not nn.Linear.forward:
        raise UserError(
            f"parallel.tp: {where} has the role {linear.role} and a forward of its own, which a part of its weight would leave out; "
            "give it `prepare` and `project` (mmspeed.protocols.plan.PreparesInput), or no role"
        )
    return weight


def _part(whole: Tensor, along: int, mesh: DeviceMesh, parts: int, place: int) -> nn.Parameter:
    own = whole.detach().chunk(parts, along)[place].clone()
    split = DTensor.from_local(own, mesh, [Shard(along)], run_check=False)
    return nn.Parameter(split, requires_grad=whole.requires_grad)
