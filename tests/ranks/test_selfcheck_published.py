"""The self-check of published transformers: layouts that are right pass, layouts that are broken fail by name, others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from mmspeed.config import make_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.mesh import process_group
from mmspeed.parallel.boundaries.attention_sites import InterceptedSite
from mmspeed.parallel.boundaries.linears import SplitNorm
from mmspeed.parallel.boundaries.record import ForwardRecord
from mmspeed.pipelines.check.layouts import with_layout
from mmspeed.pipelines.check.published import PublishedModel, ShrunkPublished, shrunk_published
from mmspeed.pipelines.check.verdict import SelfCheck, compare
from mmspeed.pipelines.check.worker import WorkerReport, alone, examine
from tests.support.published import load, prepare, published_config
from tests.support.spawn import run_ranks
from tests.support.video_transformers import make_model
from tests.unit.test_mesh import fake_world

SPARSE = "model.sparse={keep: 0.5, dense_steps: 1}"
Case = tuple[str, str, tuple[str, ...], str]  # (model, layout, keys of the config, fault)
INTERCEPTED, NORMED = InterceptedSite.forward, SplitNorm.forward


def past_the_site(site: Any, *args: Any, **kwargs: Any) -> Any:
    """One block attends past its site."""
    if site._site.where.startswith("blocks.1."):
        return super(InterceptedSite, site).forward(*args, **kwargs)
    return INTERCEPTED(site, *args, **kwargs)


def past_the_norm(norm: Any, x: Any) -> Any:
    """One norm takes the mean square of this process's heads alone."""
    if norm._linear.where.startswith("blocks.0.attn1.norm_q"):
        start = x.shape[-1] * norm._linear.sequences.layout.tensor.rank
        return nn.functional.rms_norm(x, x.shape[-1:], norm.weight[start : start + x.shape[-1]], norm.eps)
    return NORMED(norm, x)


FAULTS: dict[str, Callable[[], Any]] = {
    "right": nullcontext,
    "past the site": lambda: patch.object(InterceptedSite, "forward", past_the_site),
    "past the norm": lambda: patch.object(SplitNorm, "forward", past_the_norm),
    # each process attends to its own tokens alone
    "forgetful": lambda: patch.object(ForwardRecord, "crosses", lambda *args: False),
}
RIGHT: dict[str, Case] = {
    "wan, ulysses": ("wan", "ulysses=2", (), "right"),
    "wan, tp, recomputed": ("wan", "tp=2", ("memory.activation_policy.block=recompute",), "right"),
    "wan, ring, sparse": ("wan", "ring=2", (SPARSE,), "right"),
    "hunyuan, tp": ("hunyuan", "tp=2", (), "right"),
    "cogvideox, ring": ("cogvideox", "ring=2", (), "right"),
}
WRONG: dict[str, Case] = {
    "past the site": ("wan", "ulysses=2", (), "past the site"),
    "past the norm": ("wan", "tp=2", (), "past the norm"),
    "forgetful": ("ltx", "ulysses=2", (), "forgetful"),
}
CASES = RIGHT | WRONG
REFUSED: dict[str, tuple[Case, str]] = {
    "dsp": (("wan", "dsp=2", (), "right"), "parallel.dsp 2: every block of WanTransformer3DModel attends over all tokens"),
    "sparse and split": (
        ("hunyuan", "ulysses=2", (SPARSE,), "right"), "joint attention of video and text is either sparse or split",
    ),
}  # fmt: skip


def small(folder: str, case: Case) -> ShrunkPublished:
    name, layout, keys, _ = case
    config = published_config(Path(folder), name, *keys)
    return shrunk_published(with_layout(config, layout), PublishedModel.of(make_model(name), None))


def examined(folder: str) -> dict[str, WorkerReport]:
    """The report of each case."""
    reports = {}
    for name, case in CASES.items():
        with FAULTS[case[3]]():
            reports[name] = examine(small(folder, case))
    return reports


@cache
def truth(folder: str, model: str, keys: tuple[str, ...]) -> WorkerReport:
    case = next(case for case in CASES.values() if case[0] == model and case[2] == keys)
    check = small(folder, case)
    with process_group(Device("cpu", 0)):
        return examine(check.with_config(alone(check.config)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published-check")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def checks(home: Path) -> Callable[[str], SelfCheck]:
    reports = run_ranks(examined, 2, str(home), timeout=900)[0]

    def check(name: str) -> SelfCheck:
        folder, case = str(home), CASES[name]
        return compare(small(folder, case), reports[name], truth(folder, case[0], case[2]))

    return check


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_layout_passes(checks: Callable[[str], SelfCheck], name: str) -> None:
    check = checks(name)
    assert check.passed, check.problems
    assert [step.kind for step in check.steps] == ["images", "videos", "mixed"]
    images, videos, _ = check.steps
    assert videos.sent and bool(images.sent) == ("tp" in name)
    text = "\n".join(check.lines())
    assert f"4 heads of width {16 if 'cog' in name else 12}, patch" in text and "captions of 7 tokens" in text
    assert ("keeps all keys in this check" in text) == ("sparse" in name)


@pytest.mark.slow
def test_boundaries_that_were_not_crossed_are_named(checks: Callable[[str], SelfCheck]) -> None:
    site, norm = "blocks.1.attn1 (WanAttention)", "blocks.0.attn1.norm_q (RMSNorm)"
    for name, boundary in (("past the site", site), ("past the norm", norm)):
        check = checks(name)
        assert not check.passed and f"the boundary {boundary} was never crossed" in check.problems
        assert any("the loss differs" in problem for problem in check.problems), check.problems


@pytest.mark.slow
def test_an_exchange_that_was_dropped_is_named(checks: Callable[[str], SelfCheck]) -> None:
    check = checks("forgetful")
    assert not check.passed and "FAILED" in "\n".join(check.lines())
    assert "videos: no all_to_all ulysses was sent, so the layout did not take part" in check.problems
    assert not any(problem.startswith("images") for problem in check.problems)


@pytest.mark.parametrize("name", REFUSED)
def test_what_training_refuses_the_check_does(home: Path, name: str) -> None:
    case, words = REFUSED[name]
    with fake_world(0, 2), pytest.raises(UserError, match=re.escape(words)):
        examine(small(str(home), case))


def test_models_that_a_small_one_cannot_stand_for_are_refused(home: Path) -> None:
    config = make_config(published_config(home, "wan").model_dump(mode="json", by_alias=True))
    with pytest.raises(UserError, match=r"these published classes: Wan.*not of ChronoEditTransformer3DModel"):
        PublishedModel.of(make_model("chronoedit, by its own declaration"), None)
    changed: Any = make_model("wan")
    changed.blocks[0].attn1.to_q = nn.Sequential(changed.blocks[0].attn1.to_q)
    with pytest.raises(UserError, match=r"changed after it was made: blocks.0.attn1.to_q"):
        PublishedModel.of(changed, None)
    frozen = make_model("wan")
    frozen.get_submodule("condition_embedder").requires_grad_(False)
    model = shrunk_published(config, PublishedModel.of(frozen, None)).task().build()["model"]
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert still and all(name.startswith("condition_embedder.") for name in still)
    assert type(load(home, "wan")) is type(model)


def test_over_a_ring_sparse_attention_is_expected_to_send_rows_of_kept_keys(home: Path) -> None:
    exchanges = small(str(home), RIGHT["wan, ring, sparse"]).expected("videos")
    assert "rows ring" in exchanges and "ring ring" not in exchanges
