"""The self-check of published transformers: layouts that are right pass, layouts that are broken fail by name, others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
from torch import nn

from mmspeed.config import Config, make_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.mesh import process_group
from mmspeed.models.families.hunyuan_video import HunyuanVideoCall
from mmspeed.models.families.ltx import LtxCall
from mmspeed.parallel.boundaries.attention_sites import InterceptedSite
from mmspeed.parallel.boundaries.linears import SplitNorm
from mmspeed.parallel.boundaries.record import ForwardRecord
from mmspeed.pipelines.check.layouts import alone, compared_run, with_layout
from mmspeed.pipelines.check.verdict import SelfCheck, compare
from mmspeed.pipelines.check.worker import WorkerReport, examine
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.published import PublishedVideoDomain
from mmspeed.pipelines.domains.video.small_published import PublishedModel
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.protocols import SmallRun
from mmspeed.shapes import Strides
from tests.support.published import prepare, published_config
from tests.support.spawn import run_ranks
from tests.support.video_transformers import make_model
from tests.unit.test_mesh import fake_world

CONTROL = "data.sources=[{path: clips.jsonl, roles: {control: control}}]"
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
    "wan vace, tp": ("wan vace", "tp=2", (CONTROL,), "right"),
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


class OwnConfig(Config):
    task: Literal["own"] = "own"  # type: ignore[assignment]


def small(home: Path, folder: Path, case: Case) -> SmallRun:
    name, layout, keys, _ = case
    config = with_layout(published_config(home, name.split()[0], *keys), layout)
    domain = PublishedVideoDomain(config, lambda: make_model(name))
    return compared_run(domain, folder / "small")


def examined(runs: dict[str, tuple[dict[str, Any], tuple[str, ...]]]) -> dict[str, WorkerReport]:
    """The report of each case."""
    reports = {}
    for name, (config, kinds) in runs.items():
        with FAULTS[CASES[name][3]]():
            reports[name] = examine(make_config(config), kinds)
    return reports


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published-check")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def checks(home: Path) -> Callable[[str], SelfCheck]:
    minis = {name: small(home, home / name, case) for name, case in CASES.items()}
    runs = {name: (mini.config.model_dump(mode="json", by_alias=True), mini.kinds) for name, mini in minis.items()}
    reports = run_ranks(examined, 2, runs, timeout=900)[0]

    def check(name: str) -> SelfCheck:
        mini = minis[name]
        with process_group(Device("cpu", 0)):
            truth = examine(alone(mini.config), mini.kinds)
        return compare(mini, reports[name], truth)

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
    assert f"4 heads of width {16 if 'cog' in name else 12}, patch" in text and "captions of up to 7 tokens" in text
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
def test_what_training_refuses_the_check_does(home: Path, tmp_path: Path, name: str) -> None:
    case, words = REFUSED[name]
    mini = small(home, tmp_path, case)
    with fake_world(0, 2), pytest.raises(UserError, match=re.escape(words)):
        examine(mini.config, mini.kinds)


def test_models_that_a_small_one_cannot_stand_for_are_refused(home: Path) -> None:
    class OwnWan(type(make_model("wan"))):  # type: ignore[misc]
        """A class of a user."""

    changed, own = make_model("wan"), make_model("wan")
    changed.blocks[0].attn1.to_q = nn.Sequential(changed.blocks[0].attn1.to_q)  # type: ignore[operator, index, union-attr]
    own.__class__ = OwnWan
    for model, call, words in (
        (make_model("chronoedit, by its own declaration"), None, r"these published classes: Wan.*not of ChronoEditTransformer3DModel"),
        (changed, None, r"changed after it was made: blocks.0.attn1.to_q"),
        (own, None, r"changed after it was made: it is no WanTransformer3DModel"),
        (make_model("wan"), LtxCall(), r"other processes call WanTransformer3DModel as its family does, not by LtxCall"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            PublishedModel.of(model, call)


def test_a_call_of_the_users_and_frozen_weights_are_kept_or_told(home: Path, tmp_path: Path) -> None:
    frozen = make_model("hunyuan")
    frozen.get_submodule("context_embedder").requires_grad_(False)
    config = with_layout(published_config(home, "hunyuan"), "ulysses=2")
    config = OwnConfig.model_validate({**dict(config), "task": "own"})  # of an installed package
    mini = PublishedVideoDomain(config, lambda: frozen, call=HunyuanVideoCall(guidance=2.5)).small(tmp_path / "small")
    assert type(mini.config) is Config and mini.config.task == "video" and not mini.named
    assert "weights that are frozen in training have gradients here" in mini.remarks[0]
    predictor = VideoDomain(mini.config).use(EncoderShapes(4, Strides(4, 8), 16)).predictor
    assert predictor.call == HunyuanVideoCall(guidance=2.5) and predictor.name == "HunyuanVideoTransformer3DModel"
