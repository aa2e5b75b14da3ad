"""Layouts of an attention's projections over ranks: equal results, and the copies and bytes of a step in each.

Legend: B batch, T rows and S columns of the tokens, E width, A heads, N tokens, D head width, u ranks of the "ulysses" axis. A unit is
the bytes of a rank's queries, which are those of its keys, its values and its output.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed import comm
from mmspeed.comm import Axis, even_sizes
from mmspeed.models.sora.sora_plan import sora_plan
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes, hybrid_attention, memory_order
from mmspeed.protocols.plan import AttentionLayout
from tests.support.spawn import run_ranks

from .test_exchange import Copied
from .test_hybrid_attention import mesh_of

A, D, E = 4, 8, 32
SHAPES = {"full": (1, 24), "columns": (12, 5)}  # T, S; what is split is S of a full model, else T


def axes_of(ulysses: int, ring: int = 1, exchange: str = "collective") -> SequenceAxes:
    mesh = mesh_of(ulysses, ring)
    return SequenceAxes(*(Axis.of(mesh, name, None, exchange) for name in ("ring", "ulysses")))  # type: ignore[arg-type]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def projections(qkv_BTSE: Tensor, columns: bool, layout: AttentionLayout) -> list[Tensor]:
    """Views of a fused product, head by head, or copies of these; queries and keys changed after it, as by a norm."""
    qkv = qkv_BTSE.unflatten(-1, (A, 3, D))  # B T S A 3 D, of a full model with T = 1
    if layout == "BNGAD":
        q, k, v = qkv.permute(4, 0, 2, 3, 1, 5).unbind(0)
    else:
        q, k, v = qkv.permute((4, 0, 2, 3, 1, 5) if columns else (4, 0, 1, 3, 2, 5)).flatten(1, 2).unbind(0)
    if layout == "BAND":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return [q * 1.5, k * 0.5, v]


def tokens(out: Tensor, batch: int, columns: bool, layout: AttentionLayout) -> Tensor:
    """The output as its product reads it, (B, T, S, E)."""
    if layout != "BNGAD":
        out = out.unflatten(0, (batch, -1))
    return out.permute((0, 3, 1, 2, 4) if columns else (0, 1, 3, 2, 4)).flatten(3)


def sdpa(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keys, enable_gqa=q.shape[1] != k.shape[1])


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """A step's results, and what was counted. `turned`: bytes that the forward pass copied beside the exchanges."""

    out: Tensor
    grad: Tensor
    forward: comm.Ledger
    back: comm.Ledger
    turned: int


def step(
    attention: Attention, axes: SequenceAxes, batch: int, columns: bool, layout: AttentionLayout, sizes: tuple[int, ...]
) -> Step:
    """Forward and backward from the fused product to the output's product, of this rank's part."""
    shape, dim = SHAPES["columns" if columns else "full"], 1 if columns else 2
    qkv = noise(batch, *shape, 3 * E).split(sizes, dim)[axes.rank].contiguous()
    if layout == "NBAD" and not columns:  # tokens of (S, B, E)
        qkv = qkv.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    qkv.requires_grad_()
    dout = noise(batch, *shape, E, seed=1).split(sizes, dim)[axes.rank].contiguous()
    with comm.ledger(axes.ulysses, axes.ring) as forward, Copied() as copied:
        result = attention(*projections(qkv, columns, layout))
        out = tokens(result, batch, columns, layout)
    with comm.ledger(axes.ulysses, axes.ring) as back:
        (grad,) = torch.autograd.grad(out, qkv, dout)
    return Step(out.detach(), grad, forward, back, copied.bytes - sum(forward.copied.values()))


def truth(batch: int, columns: bool) -> tuple[Tensor, Tensor]:
    """Output and gradient of all tokens in one process."""
    shape = SHAPES["columns" if columns else "full"]
    qkv = noise(batch, *shape, 3 * E).requires_grad_()
    out = tokens(sdpa(*projections(qkv, columns, "BNAD")), batch, columns, "BNAD")
    return out.detach(), torch.autograd.grad(out, qkv, noise(batch, *shape, E, seed=1))[0]


def units(result: Step) -> dict[str, tuple[int, float]]:
    """Copies, and units that they copied, before and after, on the way there and back."""
    unit = comm.nbytes(result.out)
    return {
        f"{way} {side}": (
            counted.copies["all_to_all", "ulysses", side],
            counted.copied["all_to_all", "ulysses", side] / unit,
        )
        for way, counted in (("forward", result.forward), ("back", result.back))
        for side in ("pack", "unpack")
    }


def in_layout(axes: SequenceAxes, sizes: tuple[int, ...], layout: AttentionLayout) -> Attention:
    """The product's attention."""
    return lambda q, k, v: hybrid_attention(q, k, v, None, axes, sizes, sizes, layout=layout)


def declared(columns: bool) -> AttentionLayout:
    """The layout in which SoraDiT's plan says that projections come."""
    site = sora_plan(("spatial", "temporal"), A).attention["blocks.*.self_attention.attend"]
    return site.rows_layout if columns else site.layout


# Every case runs on all ranks and asserts there.

CANDIDATES: dict[tuple[int, bool], tuple[AttentionLayout, ...]] = {
    (1, False): ("BNAD", "NBAD", "BAND"),
    (2, False): ("BNAD", "NBAD", "BAND"),
    (1, True): ("NBAD", "BNGAD", "BAND"),
    (2, True): ("BNGAD", "BAND"),
}


def case_copies_of_a_step() -> None:
    """Where heads are cut or joined a copy each, where tokens are none: by layouts, micro-batches and shapes; equal results."""
    for axes in (axes_of(2), axes_of(4)):
        for (batch, columns), layouts in CANDIDATES.items():
            sizes, dim = even_sizes(12 if columns else 24, axes.size), 1 if columns else 2
            wanted = [x.split(sizes, dim)[axes.rank] for x in truth(batch, columns)]
            beside = {}
            for layout in layouts:
                actual = step(in_layout(axes, sizes, layout), axes, batch, columns, layout, sizes)
                # the CPU's kernel makes gradients as BNAD, where one sample's tokens come first and those of several do not
                one = batch == 1 and (not columns or layout == "BNGAD")  # whose columns are heads to the kernel
                assert units(actual) == {
                    "forward pack": (1, 3),
                    "forward unpack": (1, 1),
                    "back pack": (1, 1) if one else (2, 4),
                    "back unpack": (1, 3),
                }
                # each sample and head is computed by itself, in one order of sums
                assert torch.equal(actual.out, wanted[0]) and torch.equal(actual.grad, wanted[1])
                beside[layout] = actual.turned / comm.nbytes(actual.out)
            # projections and output are views in the default layout, and copies where they do not lie so
            assert beside[declared(columns)] == min(beside.values()) == 0
            assert beside["BAND"] == 4


@dataclass(frozen=True)
class Parts:
    """Lengths of all ranks' parts, and what else an attention may have."""

    ulysses: int
    ring: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    heads: int = 4
    key_heads: int = 4
    masked: bool = False
    exchange: str = "collective"


PARTS = [
    Parts(2, 1, (7, 6), (7, 6), heads=5, key_heads=5),
    Parts(2, 1, (1, 6), (1, 6), masked=True, exchange="point_to_point"),
    Parts(2, 1, (5, 0), (3, 8), masked=True),
    Parts(4, 1, (6, 6, 6, 6), (6, 6, 6, 6), heads=8, key_heads=2),
    Parts(4, 1, (0, 6, 0, 3), (0, 6, 0, 3), masked=True),
    Parts(2, 2, (3, 4, 5, 1), (3, 4, 5, 1), heads=6, key_heads=3, masked=True),
    Parts(2, 2, (3, 0, 5, 1), (2, 4, 0, 0)),
    Parts(1, 4, (3, 4, 5, 1), (3, 4, 5, 1)),
]


def laid(x: Tensor, layout: AttentionLayout) -> Tensor:
    order = memory_order(layout)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def case_parts() -> None:
    """Uneven and empty parts, grouped keys, masks and rings, in every layout: the bits of one, near the formula; the output lies so."""
    batch = 2
    for parts in PARTS:
        axes = axes_of(parts.ulysses, parts.ring, parts.exchange)
        shapes = ((parts.heads, sum(parts.q)), (parts.key_heads, sum(parts.k)), (parts.key_heads, sum(parts.k)))
        wholes = [noise(2 * batch, *shape, D, seed=seed) for seed, shape in enumerate(shapes)]
        dout, mask = noise(*wholes[0].shape, seed=3), None
        if parts.masked:
            mask = noise(2 * batch, sum(parts.k), seed=4) > -0.5
        inputs = [x.double().requires_grad_() for x in wholes]
        keys = None if mask is None else mask[:, None, None]
        right = sdpa(*inputs, keys=keys)
        wanted = [right.detach(), *torch.autograd.grad(right, inputs, dout.double())]
        actual = {}
        for layout in ("BAND", "BNAD", "NBAD", "BNGAD"):
            cuts = [
                x.split(s, 2)[axes.rank]
                for x, s in zip((*wholes, dout), (parts.q, parts.k, parts.k, parts.q), strict=True)
            ]
            if layout == "BNGAD":
                cuts = [x.unflatten(0, (batch, 2)) for x in cuts]
            *xs, weight = (laid(x, layout) for x in cuts)  # type: ignore[arg-type]
            for x in xs:
                x.requires_grad_()
            mine = None if mask is None else mask.split(parts.k, 1)[axes.rank]
            out = hybrid_attention(*xs, mine, axes, parts.q, parts.k, layout=layout)  # type: ignore[arg-type, misc]
            assert axes.ulysses.size == 1 or out.permute(memory_order(layout)).is_contiguous()  # type: ignore[arg-type]
            results = [out.detach(), *torch.autograd.grad(out, xs, weight)]
            actual[layout] = [x.flatten(0, -4) for x in results]
        for results in actual.values():
            assert all(map(torch.equal, results, actual["BAND"])), parts
        for part, whole, sizes in zip(actual["BAND"], wanted, (parts.q, parts.q, parts.k, parts.k), strict=True):
            # sums of up to 24 products in another order than in float64
            torch.testing.assert_close(part.double(), whole.split(sizes, 2)[axes.rank], atol=1e-5, rtol=1e-5)


def case_ring_behind() -> None:
    """Keys travel round as they came: the ring copies none of them."""
    axes, sizes = axes_of(2, 2), (6, 6, 6, 6)
    for batch, columns in ((1, False), (2, False), (1, True)):
        layout = declared(columns)
        if columns:
            sizes = (3, 3, 3, 3)
        actual = step(in_layout(axes, sizes, layout), axes, batch, columns, layout, sizes)
        wanted = [x.split(sizes, 1 if columns else 2)[axes.rank] for x in truth(batch, columns)]
        # the ring merges what its queries see in two blocks
        torch.testing.assert_close(actual.out, wanted[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(actual.grad, wanted[1], atol=1e-5, rtol=1e-5)
        assert not actual.forward.copies["ring", "ring", "pack"] and not actual.back.copies["ring", "ring", "pack"]
        assert actual.forward.calls["ring", "ring"] and actual.back.calls["ring", "ring"]


def case_causal_columns() -> None:
    """Block attention, of columns that attend apart."""
    axes, sizes = axes_of(4), (2, 1, 0, 3)
    wholes = [noise(2, 3, A, 6, D, seed=seed) for seed in range(3)]
    wanted = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in wholes), is_causal=True)
    cuts = [laid(x.split(sizes, 3)[axes.rank], "BNGAD") for x in wholes]
    out = hybrid_attention(*cuts, None, axes, sizes, sizes, causal=True, layout="BNGAD")  # type: ignore[misc]
    torch.testing.assert_close(out.flatten(0, 1), wanted.split(sizes, 2)[axes.rank], atol=1e-6, rtol=1e-5)


def case_a_layout_of_other_dims() -> None:
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match=r"queries of shape \(1, 4, 3, 8\), but the layout BNGAD has 5 dims"):
        hybrid_attention(q, q, q, None, SequenceAxes.alone(), [3], [3], layout="BNGAD")


CASES = [
    case_copies_of_a_step,
    case_parts,
    case_ring_behind,
    case_causal_columns,
    case_a_layout_of_other_dims,
]


def run() -> dict[str, str]:
    problems = {}
    for case in CASES:
        try:
            case()
        except Exception:
            problems[case.__name__] = traceback.format_exc()
    return problems


@pytest.fixture(scope="module")
def problems() -> list[dict[str, str]]:
    return run_ranks(run, 4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
def test_layouts(case: Callable[[], None], problems: list[dict[str, str]]) -> None:
    assert not [problem[case.__name__] for problem in problems if case.__name__ in problem]
