"""Compute a module's attention over the processes that hold its tokens, dense or sparse.

    tokens of the attention      dense layer                        sparse layer
    all on this process          the module's own attention         the layer
    on several                   `hybrid_attention` (ulysses x      `sparse_attention` over the same
                                 ring)

A site is either a module that is called with (q, k, v, structure) and does nothing else, or one whose forward calls
`F.scaled_dot_product_attention` once: a `TorchFunctionMode` entered around its forward takes that call over. Nothing in torch is patched,
and other modules, threads and models never see it.

Legend: B batch, A heads, N queries of this process, M keys of this process, D head width, X position axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mmspeed.comm import Axis, all_gather
from mmspeed.compute.attention import with_heads_of
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.rope import grid_positions
from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.compute.structured import structured_attention
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.parallel.document_shares import DocumentShares
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes, hybrid_attention, of_nothing, with_heads_exchanged
from mmspeed.parallel.sequence.packed_attention import packed_attention
from mmspeed.parallel.sparse.sparse_attention import sparse_attention
from mmspeed.protocols.plan import AttentionLayout, Site, Structure
from mmspeed.replay import recording
from mmspeed.torch_internals import in_backward

from .boundary import Boundary
from .record import ForwardRecord

_HIDDEN_BELOW = -1e4  # additive masks at or below this hide a key, as -inf does: exp(-1e4) is 0 in every float type


@dataclass
class SiteBoundary(Boundary):
    """The plan's entry for one attention.

    met: whether it was called. A flag, since torch.compile would recompile for each value of a count.
    """

    site: Site
    met: bool = False

    @property
    def layout(self) -> AttentionLayout:
        """The memory layout of its projections."""
        return self.site.rows_layout if self.attends == "rows" else self.site.layout

    @property
    def keys(self) -> tuple[str, ...]:
        """The sequences of the keys."""
        return self.site.keys or self.site.queries

    @property
    def may_cross(self) -> bool:
        """True where a forward may have some of its tokens on other processes."""
        if self.keys == self.site.queries:
            return any(self.sequences.may_cross(name, self.attends) for name in self.keys)
        layout, long = self.sequences.layout, self.sequences.plan.long_text
        if self.sequences.apart:
            return False
        return layout.whole.size > 1 and any(name != long or layout.text_from is not None for name in self.keys)

    def crosses(self, record: ForwardRecord) -> bool:
        """True where, in this forward, some of its tokens are on other processes."""
        if self.keys == self.site.queries:
            return record.crosses(self.keys, self.attends, self.where)
        return any(record.is_split(name, self.where) for name in self.keys)

    def sizes(self, record: ForwardRecord) -> tuple[SequenceAxes, tuple[int, ...], tuple[int, ...]]:
        """The axes over which the attention is computed, and the lengths of queries and of keys on all their processes."""
        layout = self.sequences.layout
        if self.keys == self.site.queries:
            sizes = record.attended_sizes(self.keys, self.attends, self.where)
            return layout.axes, sizes, sizes
        # a caption is short compared with a video: its keys go round all processes, and no queries are exchanged
        axes = SequenceAxes(layout.whole, Axis.alone("ulysses"))
        if layout.whole.group is None:  # there is no process group of all its processes
            axes = layout.axes
        queries = [record.all_sizes(name, self.attends, self.where) for name in self.site.queries]
        keys = [record.all_sizes(name, self.attends, self.where) for name in self.keys]
        return axes, _added(queries), _added(keys)


class CalledSite(nn.Module):
    """Mixed in before the class of a module that is called with (q, k, v, structure), and computes its attention over all processes.

    `_crosses`: whether its tokens may be on other processes.
    """

    _site: SiteBoundary
    _crosses: bool

    def forward(self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
        self._site.met = True
        if not self._crosses:  # stays in the graph of its block
            return _local(super().forward, q_BAND, k_BAMD, v_BAMD, structure)
        layer = self if isinstance(self, ClusteredAttention) else None
        return _attend(self._site, super().forward, layer, q_BAND, k_BAMD, v_BAMD, structure)


def _local(run: Callable[..., Tensor], q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
    """Run the attention on this process alone, which may have no tokens."""
    if q_BAND.numel() and k_BAMD.numel():
        return run(q_BAND, k_BAMD, v_BAMD, structure)
    return of_nothing(q_BAND, k_BAMD, v_BAMD)


@outside_graphs
def _attend(
    site: SiteBoundary,
    local: Callable[..., Tensor],
    layer: ClusteredAttention | None,
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    structure: Structure,
) -> Tensor:
    """Compute the attention of a called site over the tokens of all processes."""
    record = site.sequences.record(site.where)
    sparse = layer if not structure.image else None
    if sparse is not None:
        _check_plain(structure, q_BAND, k_BAMD, v_BAMD, site.where)
    if not site.crosses(record):
        return _local(local, q_BAND, k_BAMD, v_BAMD, structure)
    axes, q_sizes, k_sizes = site.sizes(record)
    mask = structure.key_mask_BN
    if sparse is not None:
        positions_NX = record.positions_of_all(site.keys[0], site.attends, site.where).long()
        return sparse_attention(
            q_BAND, k_BAMD, v_BAMD, mask, axes, q_sizes, k_sizes, positions_NX, sparse, layout=site.layout
        )  # fmt: skip
    if record.packed is not None and structure.bounds_Z is not None and axes.ring.size > 1:
        return _shared(site, q_BAND, k_BAMD, v_BAMD, structure, axes, q_sizes, record.packed.shares)
    if structure.window is not None or structure.documents_BN is not None or structure.bounds_Z is not None:
        return _joined(site, q_BAND, k_BAMD, v_BAMD, structure, axes, q_sizes, record)
    if structure.causal:
        _check_order(site, axes)
    return hybrid_attention(
        q_BAND, k_BAMD, v_BAMD, mask, axes, q_sizes, k_sizes, causal=structure.causal, layout=site.layout
    )  # fmt: skip


def _check_order(site: SiteBoundary, axes: SequenceAxes) -> None:
    one = site.site.queries == site.keys and len(site.keys) == 1
    if not one or not (site.sequences.zigzag or (axes.ring.size == 1 and site.sequences.layout.tensor.size == 1)):
        raise UserError(f"{site.where}: causal attention across ranks takes one sequence, and a plan with causal=True")


def _shared(
    site: SiteBoundary,
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    structure: Structure,
    axes: SequenceAxes,
    sizes: tuple[int, ...],
    shares: DocumentShares,
) -> Tensor:
    """Attend within documents that the ranks of a ring share."""
    if structure.key_mask_BN is not None or structure.documents_BN is not None or not structure.causal:
        raise UserError(f"{site.where}: attention within bounds of documents is causal and takes no other mask")
    return packed_attention(
        q_BAND, k_BAMD, v_BAMD, shares, axes, sizes, window=structure.window, layout=site.layout
    )  # fmt: skip


def _joined(
    site: SiteBoundary,
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    structure: Structure,
    axes: SequenceAxes,
    sizes: tuple[int, ...],
    record: ForwardRecord,
) -> Tensor:
    """Attend within a window or documents: Ulysses' all-to-all gives each process all tokens for some of the heads."""
    kind = "a window" if structure.window is not None else "documents"
    if site.keys != site.site.queries or (len(site.keys) > 1 and (structure.causal or structure.window is not None)):
        raise UserError(f"{site.where}: attention within {kind} takes one sequence that attends to itself")
    if axes.ring.size > 1:
        raise UserError(
            f"{site.where}: attention within {kind} is not computed over parallel.ring, whose kernels take key masks only; use "
            "parallel.ulysses, tp or dp instead"
        )
    q_BAND, k_BAMD, v_BAMD = autocast_alike(q_BAND, k_BAMD, v_BAMD)
    place_N = torch.arange(sum(sizes), device=q_BAND.device)
    if len(site.keys) == 1:  # with tensor parallelism, the processes' parts are not in the order of the sequence
        place_N = record.in_order_of_all(place_N, site.keys[0], site.attends, site.where)
    documents = structure.documents_BN
    if documents is not None:
        documents = all_gather(documents, axes.ulysses, 1, axes.near(sizes))

    def attend(q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, mask_BN: Tensor | None) -> Tensor:
        if not q_BAND.numel():
            return of_nothing(q_BAND, k_BAND, v_BAND)
        joined = replace(structure, key_mask_BN=mask_BN, documents_BN=documents)
        if structure.bounds_Z is None:
            return structured_attention(q_BAND, k_BAND, v_BAND, joined, place_N)
        order_N = place_N.argsort()  # bounds are of tokens in their order
        q, k, v = (x.index_select(2, order_N) for x in (q_BAND, k_BAND, v_BAND))
        return structured_attention(q, k, v, joined).index_select(2, place_N)

    mask = structure.key_mask_BN
    return with_heads_exchanged(
        q_BAND, k_BAMD, v_BAMD, mask, axes, sizes, sizes, attend, layout=site.layout, reads="strided"
    )  # fmt: skip


def _check_plain(structure: Structure, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, where: str) -> None:
    """Raise UserError for what sparse attention does not compute."""
    kinds = {
        "causal mask": structure.causal,
        "window": structure.window is not None,
        "documents": structure.documents_BN is not None or structure.bounds_Z is not None,
        "grouped keys": q_BAND.shape[-3] != k_BAMD.shape[-3],
        "values of another width than keys": k_BAMD.shape[-1] != v_BAMD.shape[-1],
    }
    if asked := [kind for kind, is_asked in kinds.items() if is_asked]:
        raise UserError(f"{where}: sparse attention has no {' and no '.join(asked)}")


SPARSE_LAYER = "mmspeed_sparse"  # the name of the layer in an attention module that was made sparse


def sparse_layer(module: nn.Module) -> ClusteredAttention | None:
    """The sparse layer of an attention module; None for a dense one."""
    layer = dict(module.named_children()).get(SPARSE_LAYER)
    return layer if isinstance(layer, ClusteredAttention) else None


class InterceptedSite(nn.Module):
    """Mixed in before the class of a module whose forward calls `F.scaled_dot_product_attention`, and computes that over all processes."""

    _site: SiteBoundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run_intercepted(self._site, sparse_layer(self), super().forward, args, kwargs)


@outside_graphs  # the attention is the only part of a compiled block that is not compiled
def _run_intercepted(
    site: SiteBoundary,
    layer: ClusteredAttention | None,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the module's forward with its attention over all processes; sparse where a layer is given."""
    if layer is not None and not recording() and in_backward():
        raise UserError(
            f"{site.where} is computed again in backward by a checkpoint that does not record which keys were kept; use the "
            "model's enable_gradient_checkpointing(), or mmspeed.memory.recompute(block) after sparsify_model"
        )
    site.met = True
    record = site.sequences.record(site.where)
    if layer is not None and record.image:
        layer.counter["dense"] += 1
    sparse = layer if not record.image else None
    if sparse is None and not site.crosses(record):
        return run(*args, **kwargs)
    with _Taken(site, record, sparse) as mode:
        out = run(*args, **kwargs)
    if mode.calls != 1 and site.site.masks != "trimmed":
        raise UserError(
            f"{site.where}: its forward called F.scaled_dot_product_attention {mode.calls} times, not once. The plan's modules "
            "must attend with it: for diffusers, call model.set_attention_backend('native'); split a module of several attentions, or a "
            "torch.nn.MultiheadAttention, into modules of one each"
        )
    return out


class _Taken(TorchFunctionMode):
    """A mode in which the site's attention replaces `F.scaled_dot_product_attention`. `calls` counts the calls."""

    def __init__(self, site: SiteBoundary, record: ForwardRecord, layer: ClusteredAttention | None) -> None:
        super().__init__()
        self.site, self.record, self.layer = site, record, layer
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute the site's attention; takes the arguments of `F.scaled_dot_product_attention`, for this process's tokens."""
        if self.layer is not None:
            return self._sparse(
                self.layer, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )  # fmt: skip
        where = self.site.where
        if query.ndim != 4:
            raise UserError(f"{where}: attention over {tuple(query.shape)}; sequence parallelism takes (B, A, N, D)")
        if dropout_p > 0:
            raise UserError(f"{where}: attention dropout {dropout_p} is not computed across ranks; set it to 0")
        axes, q_sizes, k_sizes = self.site.sizes(self.record)
        whole = self.site.site.masks == "whole"
        if (
            whole and attn_mask is None
        ):  # transformers passes is_causal=False for a single query, but here that may be one of many
            is_causal = self.site.sequences.plan.causal
        if is_causal:
            _check_order(self.site, axes)
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ValueError(f"{where}: {key.shape[1]} key heads for {query.shape[1]}, without enable_gqa")
        if self.site.site.masks == "trimmed":
            return self._trimmed(query, key, value, attn_mask, axes, q_sizes, scale)
        for name, tensor, sizes in (("queries", query, q_sizes), ("keys", key, k_sizes)):
            if tensor.shape[2] != sizes[axes.rank]:
                raise UserError(
                    f"{where}: attention has {tensor.shape[2]} {name} where the plan has {sizes[axes.rank]} on this "
                    "rank; correct the splits of this module in the plan, or leave it out if it attends to whole text"
                )
        if whole and attn_mask is not None:
            return self._under_mask(query, key, value, attn_mask, axes, q_sizes, scale)
        mask = None if attn_mask is None else self._key_mask(attn_mask, query.shape[0], key.shape[2])
        return hybrid_attention(
            query, key, value, mask, axes, q_sizes, k_sizes, causal=is_causal, scale=scale, layout=self.site.layout
        )  # fmt: skip

    def _key_mask(self, mask: Tensor, batch: int, keys: int) -> Tensor:
        """The mask of keys (B, M) that the mask of the call amounts to."""
        if self.site.site.masks == "pairs" and mask.ndim == 4 and mask.shape[2] == mask.shape[3] == keys:
            mask = mask.diagonal(dim1=2, dim2=3)[:, :, None]  # a token that counts sees itself
        return key_mask(mask, batch, keys, self.site.where)

    def _under_mask(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        axes: SequenceAxes,
        sizes: tuple[int, ...],
        scale: float | None,
    ) -> Tensor:
        """Attend under a mask of all pairs of tokens: Ulysses' all-to-all gives each process all tokens for some of the heads."""
        where, tokens = self.site.where, sum(sizes)
        if axes.ring.size > 1:
            raise UserError(
                f"{where}: a mask of all tokens, as of packed documents, padding or a window, is not computed over parallel.ring; use "
                "parallel.ulysses"
            )
        if mask.ndim != 4 or mask.shape[1] != 1 or tuple(mask.shape[2:]) != (tokens, tokens):
            raise UserError(f"{where}: an attention mask of shape {tuple(mask.shape)}, not (B, 1, {tokens}, {tokens})")
        place_N = torch.arange(tokens, device=mask.device)
        place_N = self.record.in_order_of_all(place_N, self.site.keys[0], self.site.attends, where)
        mask = mask.index_select(2, place_N).index_select(3, place_N)

        def attend(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
            key, value = with_heads_of(query, key, value)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

        return with_heads_exchanged(
            query, key, value, None, axes, sizes, sizes, attend, layout=self.site.layout, reads="strided"
        )  # fmt: skip

    def _trimmed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        axes: SequenceAxes,
        sizes: tuple[int, ...],
        scale: float | None,
    ) -> Tensor:
        """Attend where the module has trimmed the padding of its one sample.

        The padding is put back as masked keys, so that every process has as many tokens as the plan says, and trimmed from the output.
        """
        tokens, padding = query.shape[2], sizes[axes.rank] - query.shape[2]
        if padding < 0 or key.shape[2] != tokens or attn_mask is not None:
            raise UserError(
                f"{self.site.where}: attention has {tokens} queries, {key.shape[2]} keys{', a mask' if attn_mask is not None else ''}, "
                f"where the plan has {sizes[axes.rank]} tokens on this rank; correct the splits of this module in the plan"
            )
        query, key, value = (F.pad(part, (0, 0, 0, padding)) for part in (query, key, value))
        mask_BM = torch.arange(sizes[axes.rank], device=query.device)[None].expand(len(query), -1) < tokens
        out = hybrid_attention(query, key, value, mask_BM, axes, sizes, sizes, scale=scale, layout=self.site.layout)
        return out[:, :, :tokens]

    def _sparse(
        self,
        layer: ClusteredAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        where = self.site.where
        if query.ndim != 4 or query.shape[2] != key.shape[2]:
            raise UserError(
                f"{where}: queries {tuple(query.shape)} and keys {tuple(key.shape)}; sparse attention takes queries and keys of one "
                "(B, A, N, D): leave cross-attention out of `attention`"
            )
        if dropout_p > 0:
            raise UserError(f"{where}: sparse attention has no dropout")
        mask_BM = None
        if attn_mask is not None:
            try:
                mask_BM = self._key_mask(attn_mask, query.shape[0], key.shape[2])
            except UserError:
                raise UserError(
                    f"{where}: an attention mask {tuple(attn_mask.shape)} that differs by query or head, or that adds a bias; sparse "
                    "attention takes masks that show or hide keys"
                ) from None
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        _check_plain(Structure(causal=is_causal), query, key, value, where)
        if self.site.site.masks == "trimmed" and layer.warm is not None:
            layer.warm.sample = self.calls - 1
        if scale is not None:
            query = query * (scale * query.shape[-1] ** 0.5)
        if self.site.crosses(self.record):
            axes, q_sizes, k_sizes = self.site.sizes(self.record)
            grid_NX, _ = _places(self.record, self.site.keys, sum(k_sizes), query.device, where)
            positions_NX = self.record.in_order_of_all(grid_NX, self.site.keys[0], self.site.attends, where)
            return sparse_attention(
                query, key, value, mask_BM, axes, q_sizes, k_sizes, positions_NX, layer, layout=self.site.layout
            )  # fmt: skip
        positions_NX, text_M = _places(self.record, self.site.keys, query.shape[2], query.device, where)
        out: Tensor = layer(query, key, value, mask_BM, positions_NX, text_M)
        return out


def _places(
    record: ForwardRecord, sequences: tuple[str, ...], tokens: int, device: torch.device, where: str
) -> tuple[Tensor, Tensor | None]:
    """(positions_NX, text_M) of an attention's tokens; text_M, True at text, is None where there is none.

    Raises UserError where the number of tokens does not fit the video's grid.
    """
    assert record.grid is not None
    text = tokens - math.prod(record.grid)
    if text < 0 or (text and len(sequences) == 1):
        raise UserError(
            f"{where}: {tokens} tokens attend as {' and '.join(sequences)}, but the video has {' x '.join(map(str, record.grid))}; "
            "correct this module's sequences in the plan, or the grid"
        )
    key = f"{sequences} {tokens} {device}"
    if key not in record.positions:
        video_NX, nowhere = grid_positions(record.grid, device), torch.full((text, 3), -1, device=device)
        record.positions[key] = torch.cat([video_NX if name == "video" else nowhere for name in sequences])
    positions_NX = record.positions[key]
    return positions_NX, positions_NX[:, 0] < 0 if text else None


def key_mask(mask: Tensor, batch: int, keys: int, where: str = "attention") -> Tensor:
    """Reduce a mask of `F.scaled_dot_product_attention` to a bool mask (B, M) of keys: True counts.

    The mask is bool, or floats that are 0, or hide a key (-inf, or -1e4 and below); it may be broadcast over heads and queries. Raises
    UserError for a mask that differs by query or head, or that adds a bias.
    """
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    whole = mask.reshape(shape)
    if shape[2] != 1 or shape[3] not in (1, keys) or shape[0] not in (1, batch):
        raise UserError(
            f"{where}: an attention mask of shape {tuple(mask.shape)}; across ranks only masks of keys work, the same for "
            f"every query: (B, 1, 1, {keys})"
        )
    if shape[1] != 1 and not bool((whole == whole[:, :1]).all()):
        raise UserError(
            f"{where}: an attention mask that differs from head to head; across ranks only masks of keys work"
        )
    row_BM = whole[:, 0, 0].expand(batch, keys)
    if row_BM.dtype == torch.bool:
        return row_BM
    hidden_BM = row_BM <= _HIDDEN_BELOW
    if bool(((row_BM != 0) & ~hidden_BM).any()):
        raise UserError(f"{where}: an attention mask that adds a bias; across ranks a mask may only show or hide keys")
    return ~hidden_BM


def _added(each: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(sizes) for sizes in zip(*each, strict=True))
