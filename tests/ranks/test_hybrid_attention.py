"""Ulysses and ring attention on gloo processes against plain attention in one: output, gradients, bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from mmspeed import rng
from mmspeed.comm.axis import Axis, Ledger
from mmspeed.errors import UserError
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes, hybrid_attention, split_heads
from mmspeed.parallel.sequence.zigzag import zigzag_lengths, zigzag_order
from tests.support.spawn import run_ranks

BATCH, WIDTH = 3, 8


@dataclass(frozen=True)
class Case:
    """`q`, `k`: lengths of the parts of all ranks; for `causal` only their sum counts."""

    ulysses: int
    ring: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    heads: int = 4
    key_heads: int = 4
    values: int = WIDTH  # width of the values' heads
    mask: str = ""
    causal: bool = False
    window: int | None = None
    dtype: str = "float32"
    backend: str = "auto"
    exchange: str = "collective"
    scale: float | None = None


DEGREES = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
PARTS = {1: (37,), 2: (19, 18), 4: (9, 11, 8, 9)}  # odd, uneven
KEYS = {1: (23,), 2: (8, 15), 4: (7, 5, 6, 5)}
EMPTY = {1: (5,), 2: (5, 0), 4: (0, 6, 0, 3)}
CASES: dict[str, Case] = {}
for u, r in DEGREES:
    n = u * r
    CASES |= {
        f"self-{u}x{r}": Case(u, r, PARTS[n], PARTS[n]),
        f"cross-{u}x{r}": Case(u, r, PARTS[n], KEYS[n], scale=0.5),
        f"mask-{u}x{r}": Case(u, r, PARTS[n], KEYS[n], mask="blocks"),
        f"empty-{u}x{r}": Case(u, r, EMPTY[n], EMPTY[n][::-1], mask="random"),
        f"gqa-{u}x{r}": Case(u, r, PARTS[n], PARTS[n], heads=8, key_heads=2),
        f"causal-{u}x{r}": Case(u, r, (37,), (37,), causal=True),
        f"causal-mask-{u}x{r}": Case(u, r, (5,), (5,), causal=True, mask="random", key_heads=2),
        f"float64-{u}x{r}": Case(u, r, PARTS[n], KEYS[n], mask="blocks", dtype="float64", backend="eager"),
        f"bfloat16-{u}x{r}": Case(u, r, PARTS[n], PARTS[n], mask="random", dtype="bfloat16"),
        f"wide-values-{u}x{r}": Case(u, r, PARTS[n], KEYS[n], key_heads=2, values=12, mask="blocks"),
    }
CASES |= {
    "heads-3-on-2": Case(2, 1, PARTS[2], PARTS[2], heads=3, key_heads=3),
    "heads-3-on-2x2": Case(2, 2, PARTS[4], PARTS[4], heads=3, key_heads=1, mask="random"),
    "heads-5-on-4": Case(4, 1, PARTS[4], KEYS[4], heads=5, key_heads=5),
    "narrow-values-2x2": Case(2, 2, PARTS[4], PARTS[4], values=5, causal=True),
    "no-keys-of-wide-values-2x2": Case(2, 2, PARTS[4], (0, 0, 0, 0), values=12),
    "double": Case(1, 4, PARTS[4], KEYS[4], window=2, mask="blocks"),
    "double-even": Case(1, 4, (6, 6, 6, 6), (6, 6, 6, 6), window=2),
    "double-causal": Case(1, 4, (37,), (37,), window=2, causal=True),
    "double-empty": Case(1, 4, (0, 6, 0, 3), (3, 0, 0, 0), window=2),
    "even-mask": Case(2, 2, (6, 6, 6, 6), (6, 6, 6, 6), mask="random"),
    "even-bfloat16": Case(1, 4, (6, 6, 6, 6), (6, 6, 6, 6), dtype="bfloat16"),
    "nothing-2x2": Case(2, 2, (0, 0, 0, 0), (0, 0, 0, 0)),
    "no-keys-2x2": Case(2, 2, PARTS[4], (0, 0, 0, 0)),
    "no-queries-4x1": Case(4, 1, (0, 0, 0, 0), PARTS[4]),
    "sends-2x2": Case(2, 2, PARTS[4], KEYS[4], mask="blocks", exchange="point_to_point"),
}


@cache
def mesh_of(ulysses: int, ring: int) -> DeviceMesh:
    shape = (dist.get_world_size() // (ulysses * ring), ring, ulysses)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ring", "ulysses"))


def axes_of(case: Case) -> SequenceAxes:
    mesh, ledger = mesh_of(case.ulysses, case.ring), Ledger()
    ring, ulysses = (Axis.of(mesh, name, ledger, case.exchange) for name in ("ring", "ulysses"))  # type: ignore[arg-type]
    return SequenceAxes(ring, ulysses, case.window)


def whole(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, dout of the whole sequence, and the key mask."""
    n, m = sum(case.q), sum(case.k)
    dtype = getattr(torch, case.dtype)
    shapes = {
        "q": (case.heads, n, WIDTH),
        "k": (case.key_heads, m, WIDTH),
        "v": (case.key_heads, m, case.values),
        "dout": (case.heads, n, case.values),
    }
    tensors = [rng.normal((BATCH, *shape), 0, "hybrid", name).to(dtype) for name, shape in shapes.items()]
    if not case.mask:
        return tensors, None
    mask = rng.normal((BATCH, m), 0, "hybrid", "mask") > -0.5
    mask[0] = False  # a sample that sees nothing at all
    if case.mask == "blocks":  # whole parts hidden
        ends = list(accumulate(case.k))
        for place, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            mask[1 + place % 2, start:end] = False
            mask[2 - place % 2, start:end] = True
    return tensors, mask


def truth(tensors: list[Tensor], mask: Tensor | None, case: Case) -> list[Tensor]:
    """out, dq, dk, dv by the formula, in float64."""
    q, k, v = (x.double().clone().requires_grad_() for x in tensors[:3])
    times = case.heads // case.key_heads
    score = q @ k.repeat_interleave(times, 1).mT * (WIDTH**-0.5 if case.scale is None else case.scale)
    seen = torch.ones_like(score, dtype=torch.bool)
    if case.causal:
        seen = seen.tril()
    if mask is not None:
        seen = seen & mask[:, None, None]
    p = score.masked_fill(~seen, -1e300).softmax(-1) * seen
    out = p @ v.repeat_interleave(times, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


def formula(case: Case, q: tuple[int, ...], k: tuple[int, ...], rank: int) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends, forward and backward, as the heads of hybrid_attention.py and ring.py say."""
    u, r, e = case.ulysses, case.ring, getattr(torch, case.dtype).itemsize
    me, place = divmod(rank, u)
    near = slice(me * u, me * u + u)
    split = split_heads(case.heads, case.key_heads, u)
    sent: Counter[tuple[str, str]] = Counter()
    if u > 1:
        unit, of_values, both = BATCH * WIDTH * e, BATCH * case.values * e, BATCH * (WIDTH + case.values) * e
        elements = unit * q[rank] * (case.heads - split.queries[place])
        elements += both * k[rank] * (split.key_heads - split.keys[place])
        back = of_values * split.queries[place] * (sum(q[near]) - q[rank])
        # the gradients of q, k, v come back as the output does, and that of the output goes as the queries do
        dqkv = unit * split.queries[place] * (sum(q[near]) - q[rank])
        dqkv += both * split.keys[place] * (sum(k[near]) - k[rank])
        dout = of_values * q[rank] * (case.heads - split.queries[place])
        sent["all_to_all", "ulysses"] = elements + back + dqkv + dout
        if case.mask:
            sent["all_gather", "ulysses"] = (u - 1) * BATCH * k[rank]
    joined = [sum(k[ring * u : ring * u + u]) for ring in range(r)]
    heads = split.keys[place] if u > 1 else case.key_heads
    keys = [length * BATCH * (heads * (WIDTH + case.values) * e + bool(case.mask)) for length in joined]
    grads = [length * BATCH * heads * (WIDTH + case.values) * max(e, 4) for length in joined]
    if r > 1 and case.window is None:
        forward = sum(keys[(me - step) % r] for step in range(r - 1))
        sent["ring", "ring"] = 2 * forward + sum(grads[(me - step) % r] for step in range(1, r))
    elif r > 1 and len(set(joined)) == 1:
        w, both = case.window or 1, keys[0] + grads[0]
        sent["ring", "ring"] = (r // w) * (w - 1) * keys[0] + (r // w + 1) * (w - 1) * both
        sent["ring", "ring_outer"] = (r // w - 1) * (keys[0] + both)
    return dict(+sent)


def run_case(case: Case) -> dict[str, Any]:
    axes, (tensors, mask) = axes_of(case), whole(case)
    right = truth(tensors, mask, case)
    q_sizes, k_sizes, order = case.q, case.k, None
    if case.causal:
        order = zigzag_order(sum(case.q), case.ring)
        halves = [(-(-x // case.ulysses), case.ulysses, x) for x in zigzag_lengths(sum(case.q), case.ring)]
        q_sizes = k_sizes = tuple(max(0, min(step, x - step * i)) for step, u, x in halves for i in range(u))
        tensors, right = [x[:, :, order] for x in tensors], [x[:, :, order] for x in right]
        mask = None if mask is None else mask[:, order]
    q, k, v, dout = (
        x.split(list(s), dim=2)[axes.rank].clone()
        for x, s in zip(tensors, (q_sizes, k_sizes, k_sizes, q_sizes), strict=True)
    )
    mine = None if mask is None else mask.split(list(k_sizes), dim=1)[axes.rank]
    for x in (q, k, v):
        x.requires_grad_()
    counter: Counter[str] = Counter()
    options = {"causal": case.causal, "scale": case.scale, "backend": case.backend, "counter": counter}
    out = hybrid_attention(q, k, v, mine, axes, q_sizes, k_sizes, **options)  # type: ignore[arg-type]
    dtypes = out.dtype == q.dtype and out.shape == (*q.shape[:3], case.values)
    out.backward(dout)
    got = [out.detach(), q.grad, k.grad, v.grad]
    errors = []
    for value, full, sizes in zip(got, right, (q_sizes, q_sizes, k_sizes, k_sizes), strict=True):
        part = full.split(list(sizes), dim=2)[axes.rank]
        assert value is not None and value.shape == part.shape
        scale = full.abs().max().item() if full.numel() else 1.0
        worst = (value.double() - part).abs().max().item() if part.numel() else 0.0
        errors.append(worst / (scale or 1.0))
    return {
        "errors": errors,
        "dtypes": dtypes,
        "bytes": dict(axes.ring.ledger.bytes),
        "expected": formula(case, tuple(q_sizes), tuple(k_sizes), axes.rank),
        "counter": dict(counter),
    }


def masked_attention() -> tuple[Any, Any, list[Tensor]]:
    """A call of attention on 2 x 2 ranks, a function that gives a call's output and gradients, and queries, keys, values, gradient."""
    case = CASES["mask-2x2"]
    axes, (tensors, mask) = axes_of(case), whole(case)
    q, k, v, dout = leaves = [
        x.split(list(s), dim=2)[axes.rank].clone()
        for x, s in zip(tensors, (case.q, case.k, case.k, case.q), strict=True)
    ]
    mine = mask.split(list(case.k), dim=1)[axes.rank]  # type: ignore[union-attr]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hybrid_attention(q, k, v, mine, axes, case.q, case.k)

    def grads(function: Any) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    return call, grads, leaves


def around_it() -> dict[str, Any]:
    """Checkpointing, autocast, no_grad, second derivatives on 2 x 2 ranks."""
    call, grads, (q, k, v, dout) = masked_attention()
    plain, results = grads(call), dict[str, Any]()
    again = grads(lambda *x: checkpoint(call, *x, use_reentrant=False))
    results["checkpoint"] = all(map(torch.equal, plain, again))
    with torch.no_grad():
        results["no_grad"] = torch.equal(call(q, k, v), plain[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*inputs)
    results["autocast dtype"] = str(out.dtype)
    half = torch.autograd.grad(out, inputs, dout.bfloat16())
    results["autocast"] = max((a - b).abs().max().item() for a, b in zip(half, plain[1:], strict=True))
    results["twice"] = second_derivative(CASES["mask-1x4"])
    return results


def second_derivative(case: Case) -> str:
    """What the ring says to it."""
    axes, (tensors, _) = axes_of(case), whole(case)
    q, k, v = (
        x.split(list(s), dim=2)[axes.rank].clone().requires_grad_()
        for x, s in zip(tensors[:3], (case.q, case.k, case.k), strict=True)
    )
    out = hybrid_attention(q, k, v, None, axes, case.q, case.k)
    (first,) = torch.autograd.grad(out.square().sum(), (q,), create_graph=True)
    try:
        first.sum().backward()
        return "nothing raised"
    except RuntimeError as error:
        return str(error)


# each kind with Ulysses and a ring together; what only one of them or four ranks have; double rings; what the tests below count
FAST = [name for name in CASES if not name.endswith(("1x1", "2x1", "1x2", "4x1", "1x4"))]
FAST += ["self-4x1", "no-queries-4x1", "self-1x4", "causal-1x4", "empty-1x4"]


def cases_of(names: list[str]) -> dict[str, Any]:
    return {name: run_case(CASES[name]) for name in names} | {"around": around_it()}


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(cases_of, 4, FAST if request.param else [*CASES])


def met(results: list[dict[str, Any]]) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if name in results[0]}


def test_equals_plain_attention(results: list[dict[str, Any]]) -> None:
    for name, case in met(results).items():
        # float32: sums of some 40 products in another order, and exp of merged maxima; float64: the same; bfloat16: 8 bits
        limit = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 3e-2}[case.dtype]
        for rank, result in enumerate(results):
            assert max(result[name]["errors"]) < limit, (name, rank, result[name]["errors"])
            assert result[name]["dtypes"], name


def test_bytes_equal_the_formula(results: list[dict[str, Any]]) -> None:
    for name, case in met(results).items():
        if case.window and (case.causal or len(set(case.k)) > 1):
            continue  # an uneven double ring: the test below, over all ranks
        for result in results:
            sent, expected = result[name]["bytes"], result[name]["expected"]
            assert {key: count for key, count in sent.items() if count} == expected, name


def test_a_double_ring_uses_both_levels(results: list[dict[str, Any]]) -> None:
    for name, case in ((name, case) for name, case in CASES.items() if case.window):
        sent = [
            sum(result[name]["bytes"].get(("ring", way), 0) for result in results) for way in ("ring", "ring_outer")
        ]
        w, rounds, e = case.window or 1, case.ring // (case.window or 1), 4
        # all ranks' blocks: keys, and in float32 gradients, too
        block = sum(case.k) * BATCH * 2 * case.key_heads * WIDTH * e
        keys = block + sum(case.k) * BATCH * bool(case.mask)
        assert sent[0] == rounds * (w - 1) * keys + (rounds + 1) * (w - 1) * (keys + block), name
        assert sent[1] == (rounds - 1) * keys + (rounds - 1) * (keys + block), name


def test_fused_kernels_serve(results: list[dict[str, Any]]) -> None:
    assert results[0]["self-4x1"]["counter"] == {"sdpa": 1}
    assert results[0]["self-1x4"]["counter"] == {"cpu_flash": 4, "cpu_flash_backward": 5}  # own block in two parts
    assert results[0]["float64-2x2"]["counter"] == {"eager": 2, "eager_backward": 3}
    # zigzag: each rank meets its own triangle and one rectangle of each other rank
    assert results[3]["causal-1x4"]["counter"]["cpu_flash"] == 4


def test_around_it(results: list[dict[str, Any]]) -> None:
    for result in results:
        around = result["around"]
        assert around["checkpoint"] and around["no_grad"]
        assert around["autocast dtype"] == "torch.bfloat16" and around["autocast"] < 0.1
        assert "differentiate twice" in around["twice"]


def test_fewer_heads_than_ranks() -> None:
    with pytest.raises(UserError, match=r"parallel\.ulysses is 4.*has 3 heads"):
        split_heads(3, 3, 4)


def test_wrong_sizes() -> None:
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="rank 0 of 1 has 5 queries"):
        hybrid_attention(x, x, x, None, SequenceAxes.alone(), [4], [5])
