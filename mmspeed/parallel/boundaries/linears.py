"""Split weight matrices over the `tp` axis by the roles that a plan names (tensor parallelism with sequence parallelism).

After Megatron-LM (Shoeybi et al. 2019), with norms on shards of the tokens (Korthikanti et al. 2022): between a column layer and its row
layer, a process has some of the heads or hidden units, for all tokens; elsewhere it has all channels of its own tokens. "Own" tokens are
those of one tensor-parallel process; the tokens "seen" are the own tokens of all of them. Weights are DTensors, so that sharding,
checkpoints and the optimizer know how they are split.

Parameters without a role are replicated over the axis, and each process uses them for its own tokens only: their gradients are summed over
the axis after the backward pass (`mmspeed.parallel.tensor.sum_shared_gradients`).

Legend: I O channels in and out, B batch, N tokens, E width, V rows of a vocabulary on this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmspeed.comm import Axis, RowCounts, all_gather, all_to_all, even_sizes, swap_rows
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.heads import TokenHead
from mmspeed.compute.operators.cross_entropy import linear_log_sums, losses_of
from mmspeed.compute.wgrad import Leaves
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.memory.chunks import is_plain_linear
from mmspeed.mixin import mix_in
from mmspeed.parallel.tensor import local
from mmspeed.protocols.plan import Attended, Linear, PreparesInput, Summed, base_of_adapters, named_like

from .adapted import low_rank_parts, refused_weight
from .boundary import Boundary
from .names import described
from .record import Sequences


@dataclass
class LinearBoundary(Boundary):
    """The plan's entry for one linear layer. `channels`: the whole size that is split over processes."""

    linear: Linear
    channels: int

    @property
    def enters(self) -> bool:
        """True where the layer gathers the tokens seen from own tokens before its product."""
        return self.linear.role not in ("row", "embedding") and self.linear.sequence is not None

    @property
    def leaves(self) -> bool:
        """True where the layer itself exchanges its results, rather than a module around it."""
        return self.linear.role != "column" and (self.linear.role != "row" or self.linear.sequence is not None)

    @outside_graphs
    def enter(self, x: Tensor) -> Tensor:
        """Gather the tokens that the product takes."""
        assert self.linear.sequence is not None
        self.sequences.use(self.where)
        record = self.sequences.record(self.where)
        return record.gather_seen(x, self.linear.sequence, self.linear.dim, self.attends, self.where)

    @outside_graphs
    def leave(self, out: Tensor) -> Tensor:
        """Exchange the results: a reduce-scatter to own tokens or, for a vocabulary, an exchange for all channels."""
        self.sequences.use(self.where)
        tensor, sequence, dim = self.sequences.layout.tensor, self.linear.sequence, self.linear.dim
        if self.linear.role == "vocabulary":
            if sequence is None:  # all processes have these tokens
                return all_gather(out, tensor, -1, even_sizes(self.channels, tensor.size))
            return self._all_to_all(out, dim, -1)
        assert sequence is not None
        record = self.sequences.record(self.where)
        return record.scatter_own(out, sequence, dim, self.attends, self.where)

    @property
    def rank(self) -> int:
        """This process's place on the axis."""
        return self.sequences.layout.tensor.rank

    @outside_graphs
    def of_all(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the tensors of all processes along a dim, along which all have equal sizes."""
        self.sequences.use(self.where)
        tensor = self.sequences.layout.tensor
        return all_gather(x, tensor, dim, (x.shape[dim],) * tensor.size)

    def _all_to_all(self, x: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
        """All-to-all between "some channels of the tokens seen" and "all channels of own tokens"; the dims give the direction."""
        record, tensor = self.sequences.record(self.where), self.sequences.layout.tensor
        assert isinstance(self.linear.sequence, str)  # of `split_layer`
        widths = record.widths(self.linear.sequence, self.attends, self.where)
        channels = even_sizes(self.channels, tensor.size)
        sizes = {self.linear.dim: widths, -1: channels}
        return all_to_all(x, tensor, scatter_dim, gather_dim, sizes[scatter_dim], sizes[gather_dim])


@dataclass(frozen=True)
class JoinedColumns:
    """The columns of a weight that belong to several tensors one behind the other, each of which is split over the axis.

    Such is a row layer whose input concatenates them. Every process stores one contiguous piece of the columns, as for any layer, but its
    product takes a piece for each tensor.
    """

    axis: Axis
    widths: tuple[int, ...]

    def __deepcopy__(self, memo: Any) -> JoinedColumns:
        return self  # process groups cannot be copied, and nothing in it belongs to one copy

    @outside_graphs
    def needed(self, stored: Tensor, dim: int = 1) -> Tensor:
        """Exchange the stored columns, which lie along `dim`, for those that this process's product takes, in their order."""
        stored = autocast_alike(stored)[0]  # autocast would round them in the product anyway
        me, places, begin = self.axis.rank, range(self.axis.size), self._stored(self.axis.rank).start

        def cut(piece: range) -> Tensor:
            return stored.narrow(dim, piece.start - begin, len(piece))

        to_all = [self._pieces(me, place) if place != me else [] for place in places]
        sends = tuple(sum(map(len, pieces)) for pieces in to_all)
        comes = tuple(sum(map(len, self._pieces(place, me))) if place != me else 0 for place in places)
        sent = torch.cat([stored.narrow(dim, 0, 0), *(cut(piece) for pieces in to_all for piece in pieces)], dim)
        received = swap_rows(sent.movedim(dim, 0), self.axis, RowCounts(sends, comes), "columns").movedim(0, dim)
        before, after = received.split((sum(comes[:me]), sum(comes[me:])), dim)
        return torch.cat([before, *(cut(piece) for piece in self._pieces(me, me)), after], dim)

    def _stored(self, place: int) -> range:
        each = sum(self.widths) // self.axis.size
        return range(place * each, (place + 1) * each)

    def _pieces(self, source: int, to: int) -> list[range]:
        """The columns stored by process `source` that process `to` needs, in their order."""
        stored, begin, pieces = self._stored(source), 0, []
        for width in self.widths:
            each = width // self.axis.size
            needed = range(begin + to * each, begin + (to + 1) * each)
            piece = range(max(stored.start, needed.start), min(stored.stop, needed.stop))
            pieces += [piece] if len(piece) else []
            begin += width
        return pieces


class HasRole(nn.Module):
    """Mixed in before the class of a layer that has a role in the plan, around which tokens are exchanged; it may be under adapters."""

    _linear: LinearBoundary


class HoldsPart(Leaves, nn.Linear):
    """A linear layer of which this process holds a part of the weight.

    _bias_share: the factor of its bias, where all processes add the bias to one sum. _joined: for a row layer whose input concatenates
    several tensors. _used: whether a forward computed with it; a flag, since torch.compile would recompile for each value of a count.
    """

    _bias_share: float
    _joined: JoinedColumns | None = None
    _used: bool = False

    def applied_weights(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that this process computes with."""
        self._used = True
        bias = local(self.bias) if self.bias is not None else None
        if bias is not None and self._bias_share != 1.0:
            bias = bias * self._bias_share
        weight = local(self.weight)
        return (weight if self._joined is None else self._joined.needed(weight)), bias

    def product(self, x: Tensor) -> Tensor:
        """The product with them."""
        weight, bias = self.applied_weights()
        return F.linear(x, weight, bias) if self._gradients is None else self._gradients.linear(x, weight, bias)


def was_used(layer: nn.Module) -> bool:
    """True where a forward has computed with a layer's part of its weight, or with a part of its adapters'."""
    return any(part._used for part in layer.modules() if isinstance(part, HoldsPart))


class SplitWeight(HoldsPart):
    """Mixed in before a linear layer's own class: computes with this process's part of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class SplitPreparingLinear(HasRole, HoldsPart):
    """`SplitWeight` for a layer that prepares its input: tokens are gathered after `prepare`, so that its norms run on own tokens only."""

    def prepare(self, *args: Tensor) -> Tensor:
        """Prepare the input of the product on own tokens, then gather the tokens seen."""
        x: Tensor = super().prepare(*args)  # type: ignore[misc]
        return self._linear.enter(x) if self._linear.enters else x

    def project(self, x: Tensor) -> Tensor:
        """The product with this process's part of the weight."""
        return self.product(x)


class Entering(nn.Module):
    """Mixed in around a column layer, or around the module that expands tokens with it (`Chunked`), to gather its input first."""

    _enters: LinearBoundary

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(self._enters.enter(x))
        return out


class Leaving(nn.Module):
    """Mixed in around a layer whose results are exchanged: the sums of a row layer, the logits of a vocabulary."""

    _linear: LinearBoundary

    def forward(self, *args: Any) -> Tensor:
        return self._linear.leave(super().forward(*args))


class SplitEmbedding(HasRole, nn.Embedding):
    """Mixed in before an embedding: looks up this process's rows; ids of others give 0."""

    def forward(self, input: Tensor) -> Tensor:
        weight_VE = local(self.weight)
        first = len(weight_VE) * self._linear.rank
        here = (input >= first) & (input < first + len(weight_VE))
        padding = -1 if self.padding_idx is None else self.padding_idx - first
        own = padding if 0 <= padding < len(weight_VE) else None  # a row without gradient
        rows = F.embedding(torch.where(here, input - first, 0), weight_VE, own)
        return torch.where(here[..., None], rows, 0.0)


class SplitHead(HasRole, TokenHead):
    """Mixed in before a `TokenHead`: computes the logits of this process's rows of the vocabulary, for all tokens seen.

    A loss needs only two numbers per token from each process: the log-sum-exp of its logits, and the target's logit. Logits are gathered
    only where they are asked for (vocabulary-parallel cross-entropy, as in Megatron-LM).
    """

    def forward(
        self, x_BNE: Tensor, target_BN: Tensor | None = None, tied_VE: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        boundary, weight_VE = self._linear, local(self.rows(tied_VE))
        if len(weight_VE) == self.vocabulary:
            raise UserError(
                f"plan, linears: {boundary.where} has a role, and the embedding that it is tied to has none"
            )
        x_BNE = boundary.enter(x_BNE)
        if target_BN is None:
            return boundary.of_all(F.linear(x_BNE, weight_VE), -1), None
        place_T = target_BN.flatten() - len(weight_VE) * boundary.rank
        own_2T = torch.stack(linear_log_sums(x_BNE.flatten(0, 1), weight_VE, place_T))
        lse_PT, picked_PT = boundary.of_all(own_2T[None], 0).unbind(1)  # P processes
        loss_T, lse_T = losses_of(lse_PT.logsumexp(0), picked_PT.sum(0), target_BN.flatten())
        return loss_T.view_as(target_BN), lse_T.view_as(target_BN)


class SplitNorm(nn.RMSNorm):
    """Mixed in before an RMSNorm over all heads, of which a process has some: sums of squares are added over the axis."""

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


def split_layer(
    layer: nn.Module, mesh: DeviceMesh, linear: Linear, sequences: Sequences, name: str, attends: Attended
) -> None:
    """Split one layer's weight in place.

    It is split along O for a column or vocabulary layer; along I for a row layer, whose bias stays whole; and along its rows
    for an embedding. A layer under adapters is split as in `adapted`.

    Raises UserError for a module that is no such layer, that computes more than can be split, or whose channels do not divide.
    """
    where = described(name, layer)
    if isinstance(layer, HasRole):
        raise UserError(f"plan, linears: {where} has two roles; keep one of the patterns that match it")
    _check_role(linear, name, where, sequences)
    mixin: type[HasRole] = HasRole
    if base_of_adapters(layer) is not layer:
        base, first, second = low_rank_parts(layer, linear.role, where)
        channels = _check_channels(base.weight, mesh, linear, name)
        row = linear.role == "row"
        for each in (base, *(first if row else second)):
            _split_weight(each, mesh, linear, sequences.layout.tensor)
        for each in second if row else ():  # whole on every process, and its output goes into the same sum
            mix_in(each, SplitWeight, rename=False)._bias_share = 1.0 / mesh.size()
    elif linear.role == "embedding" or isinstance(layer, TokenHead):
        mixin, channels = _split_rows(layer, mesh, linear, name, where)
    else:
        layer = _checked(layer, linear, where)
        channels = _check_channels(layer.weight, mesh, linear, name)
        _split_weight(layer, mesh, linear, sequences.layout.tensor)
    mix_in(layer, mixin, rename=False)._linear = LinearBoundary(sequences, where, attends, linear, channels)


def _check_role(linear: Linear, name: str, where: str, sequences: Sequences) -> None:
    """Raise UserError for a role whose exchange of tokens is not declared, or is declared twice, or is not supported."""
    sums = {
        pattern for pattern, outs in sequences.plan.outputs.items() if any(isinstance(w, Summed) for w in outs.values())
    }
    parts = name.split(".")
    summed = any(named_like(".".join(parts[:depth]), pattern) for depth in range(len(parts)) for pattern in sums)
    if linear.sequence is None and (linear.role == "embedding" or (linear.role == "row" and not summed)):
        raise UserError(
            f"plan, linears: {where} has the role {linear.role}, whose results are summed to own tokens: name their sequence"
        )
    if linear.role == "row" and summed and linear.sequence is not None:
        raise UserError(
            f"plan, linears: {where} has a sequence, and a module around it sums its results (Summed): keep one"
        )
    if linear.role in ("vocabulary", "embedding") and len(linear.sequences) > 1:
        raise UserError(f"plan, linears: {where} has the role {linear.role}, which takes one sequence")
    if linear.joined and linear.role != "row":
        raise UserError(f"plan, linears: {where} has the role {linear.role}; `joined` is for row layers")


def split_norm(norm: nn.Module, sequences: Sequences, name: str, attends: Attended) -> None:
    """Make an RMSNorm over all heads run on this process's heads with the mean square of all, in place."""
    assert isinstance(norm, nn.RMSNorm)
    where, channels = described(name, norm), norm.normalized_shape[-1]
    mix_in(norm, SplitNorm, rename=False)._linear = LinearBoundary(
        sequences, where, attends, Linear("column"), channels
    )


def _split_rows(layer: nn.Module, mesh: DeviceMesh, linear: Linear, name: str, where: str) -> tuple[type[HasRole], int]:
    """Cut an embedding or a head to this process's rows of the vocabulary; a tied head has no weight to cut.

    Returns the mixin, and the number of rows on all processes.
    """
    mixin: type[HasRole]
    if isinstance(layer, TokenHead):
        if linear.role != "vocabulary" or linear.sequence is None:
            raise UserError(f"plan, linears: {where} is a head, whose role is vocabulary, with a sequence")
        mixin, rows = SplitHead, layer.vocabulary
    elif type(layer).forward is nn.Embedding.forward and isinstance(layer, nn.Embedding) and not _looks_more(layer):
        mixin, rows = SplitEmbedding, layer.num_embeddings
    else:
        raise UserError(f"parallel.tp: {where} has the role embedding in the plan and is no plain torch.nn.Embedding")
    if rows % mesh.size():
        raise UserError(f"parallel.tp {mesh.size()} does not divide the {rows} channels of {name}")
    if layer.weight is not None:
        layer.register_parameter("weight", _part(layer.weight, 0, mesh))
    return mixin, rows


def _looks_more(table: nn.Embedding) -> bool:
    """True for an embedding with sparse or scaled gradients, or one that renormalises its rows."""
    return table.sparse or table.max_norm is not None or table.scale_grad_by_freq


def _checked(layer: nn.Module, linear: Linear, where: str) -> nn.Linear:
    """Check that a layer is a linear one whose weight can be split and that computes nothing else, and return it."""
    if not isinstance(layer, nn.Linear):
        raise UserError(f"parallel.tp: {where} has the role {linear.role} in the plan and is no linear layer")
    if not is_plain_linear(layer):
        raise refused_weight(layer, linear.role, where)
    if not isinstance(layer, PreparesInput) and type(layer).forward is not nn.Linear.forward:
        raise UserError(
            f"parallel.tp: {where} has the role {linear.role} and a forward of its own, which a part of its weight would leave out; "
            "give it `prepare` and `project` (mmspeed.protocols.plan.PreparesInput), or no role"
        )
    return layer


def _check_channels(weight: Tensor, mesh: DeviceMesh, linear: Linear, name: str) -> int:
    """Return the number of channels that are split. Raises UserError where it does not divide."""
    count = weight.shape[1 if linear.role == "row" else 0]
    if count % mesh.size():
        raise UserError(f"parallel.tp {mesh.size()} does not divide the {count} channels of {name}")
    if linear.joined and (sum(linear.joined) != count or any(width % mesh.size() for width in linear.joined)):
        widths = " and ".join(map(str, linear.joined))
        raise UserError(
            f"parallel.tp {mesh.size()}: the {count} channels of {name} join {widths}: their sum must be all, and tp divide each"
        )
    return count


def _split_weight(layer: nn.Linear, mesh: DeviceMesh, linear: Linear, tensor: Axis) -> None:
    """Replace a linear layer's weight by this process's part; its bias too, where the outputs are split."""
    row = linear.role == "row"
    layer.register_parameter("weight", _part(layer.weight, 1 if row else 0, mesh))
    if layer.bias is not None and not row:
        layer.bias = _part(layer.bias, 0, mesh)
    mixin: type[HoldsPart] = SplitPreparingLinear if isinstance(layer, PreparesInput) else SplitWeight
    mixed = mix_in(layer, mixin, rename=False)
    mixed._bias_share = 1.0 / mesh.size() if row else 1.0
    mixed._joined = JoinedColumns(tensor, linear.joined) if linear.joined else None


def _part(whole: Tensor, along: int, mesh: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard

    own = whole.detach().chunk(mesh.size(), along)[mesh.get_local_rank()].clone()
    split = DTensor.from_local(own, mesh, [Shard(along)], run_check=False)
    return nn.Parameter(split, requires_grad=whole.requires_grad)
