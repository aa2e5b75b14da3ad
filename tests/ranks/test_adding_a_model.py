"""The model and the plan of docs/extending.md, run as they stand there with every technique.

Loss and every gradient against one process in float32. Tolerance: 1e-5 of a gradient's largest entry, since sums over keys, heads and
processes are taken in another order. Counters prove that each technique ran.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mmspeed.comm import Axis
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies
from mmspeed.parallel import TokenLayout
from mmspeed.parallel.boundaries.apply import Boundaries
from mmspeed.parallel.boundaries.record import Sequences
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.protocols.plan import Block, Gather, Linear, ModelPlan, Region, Split, declare_plan, plan_of
from tests.support.added_model import PAGE, Case, Meshes, compared, make_model, train_on_toy_cache
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
ODD = ((3, 2, 6, 5), (1, 2, 6, 4), (5, 2, 2, 3))  # odd numbers of tokens, an image among them
IMAGE = ((1, 4, 6, 6),)
KEEPINGS = {
    "block recomputed": BlockPolicies.everywhere({"block": "recompute"}),
    "a region recomputed": BlockPolicies.everywhere({"mlp": "recompute", "cross_attention": "selective"}),
    "selective": BlockPolicies.everywhere({"block": "selective"}),
    "chunks": BlockPolicies(mlp_chunk=5),
}
PLAIN = {"tp": Case(tp=2), "ulysses": Case(ulysses=2), "ring": Case(ring=2)}
TWO: dict[str, Case] = {
    **PLAIN,
    **{f"{name}, {way}": replace(case, keeping=kept) for name, case in PLAIN.items() for way, kept in KEEPINGS.items()},
    **{f"{name}, compiled": replace(case, compile="eager") for name, case in PLAIN.items()},
    **{f"{name}, odd lengths": replace(case, batches=ODD) for name, case in PLAIN.items()},
    **{f"{name}, an image": replace(case, batches=IMAGE) for name, case in PLAIN.items()},
    **{f"{name}, sparse": replace(case, sparse="before") for name, case in PLAIN.items()},
    "ulysses, fsdp": Case(ulysses=2, strategy="fsdp"),
    "ring, ddp": Case(ring=2, strategy="ddp"),
    "ring, fsdp, sparse afterwards, odd lengths": Case(
        ring=2, strategy="fsdp", sparse="after", batches=((3, 2, 6, 5),)
    ),
    "ring, text split": Case(ring=2, text=2),
    "ulysses, text split, block recomputed": Case(ulysses=2, text=2, keeping=KEEPINGS["block recomputed"]),
}
# of two processes, those in every run
FEW = {*PLAIN, "ring, fsdp, sparse afterwards, odd lengths"}


def computed(cases: dict[str, Case]) -> dict[str, Any]:
    meshes, results = Meshes(), {}
    for name, case in cases.items():
        try:
            results[name] = compared(case, meshes)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        results[name].pop("grads")
    return results


@cache
def on_two(few: bool) -> dict[str, Any]:
    """The results of cases: the plain ones, and those in every run or the others."""
    return run_ranks(computed, 2, {name: case for name, case in TWO.items() if name in PLAIN or (name in FEW) == few})[
        0
    ]


def hold(case: Case, actual: dict[str, Any]) -> None:
    """The step is that of one process, and every axis sent bytes."""
    assert actual["loss"] <= TOLERANCE and actual["gradient"] <= TOLERANCE, actual
    assert actual["uncrossed"] == [] and all(actual["uses"].values())
    axes = {kind.split()[-1] for kind in actual["sent"]}
    image = case.batches == IMAGE
    for axis in ("tp", "ulysses", "ring"):
        degree = vars(case)[axis]
        assert (axis in axes) == (degree > 1 and not (image and axis != "tp")), actual["sent"]
    if case.sparse:
        counts = actual["sparse"].values()
        assert len(counts) == 2 and all(any("sparse" in kind and n for kind, n in each.items()) for each in counts)
    assert (actual["graphs"] > 0) == bool(case.compile)


@pytest.mark.parametrize("name", slow_but(TWO, FEW))
def test_two_processes_and_one_agree(name: str) -> None:
    results, case = on_two(name in FEW), TWO[name]
    actual = results[name]
    hold(case, actual)
    if case.keeping is not None and case.text is None:
        plain = results[name.partition(",")[0]]
        counter = "hidden" if case.keeping.mlp_chunk else "kept"
        assert actual[counter] < plain[counter] and plain["hidden"]
        assert case.keeping.mlp_chunk is None or actual["hidden"] == 0
    if case.text is not None:
        assert any(kind in actual["calls"] for kind in ("ring sequence", "all_to_all sequence")), actual["calls"]


def test_layers_exchange_what_the_plan_says() -> None:
    """In each of two blocks, three gathers and three sums, once more in backward, and one gather of what comes out."""
    calls = on_two(True)["tp"]["calls"]
    assert calls["all_gather tp"] == calls["reduce_scatter tp"] == 2 * 2 * 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("parallel.ulysses=2", "memory.mlp_chunk=5"), ("parallel.tp=2",)], ids=str)
def test_the_pipeline_trains_it(overrides: tuple[str, ...], tmp_path: Path) -> None:
    whole = train_on_toy_cache(str(tmp_path / "one"), ())
    assert len(whole) == 6 and len(set(whole)) == 6
    actual = run_ranks(train_on_toy_cache, 2, str(tmp_path / "many"), overrides)[0]
    assert actual == pytest.approx(whole, rel=1e-5)


def errors() -> dict[str, str]:
    """What each wrong plan of the page's table gives."""
    model = make_model()
    plan = plan_of(model)
    assert plan is not None
    wrong: dict[str, ModelPlan] = {
        'Block("block.0")': replace(plan, blocks=(Block("block.0"),)),
        '"blocks.*": {"pos": Split("video", 0)}': replace(plan, inputs={"blocks.*": {"pos": Split("video", 0)}}),
        'Region(("mpl",))': replace(plan, regions={"mlp": Region(("mpl",))}),
        '"final": {0: Gather("vdeo", dim=1)}': replace(plan, outputs={"final": {0: Gather("vdeo", dim=1)}}),
        'cuts=("block.1",)': replace(plan, cuts=("block.1",)),
        '"blocks.*.mlp.2": Linear("column")': replace(plan, linears={"blocks.*.mlp.2": Linear("column")}),
    }
    messages, two = {}, Axis("ulysses", None, 2, 0)  # nothing is computed
    layout = TokenLayout(SequenceAxes(Axis.alone("ring"), two), hybrid=two, whole=two)
    for what, changed in wrong.items():
        with pytest.raises(UserError) as caught:
            if "Block" in what:
                declare_plan(model, changed)
            else:
                Boundaries(model, Sequences(changed, layout))
        messages[what] = str(caught.value)
    return messages


def test_the_page_tells_the_errors_of_wrong_plans() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for what, message in errors().items():
        assert f"| `{what}` | {message} |" in page, message
