"""The bench of sparse attention: its rows are those of direct calls, and its suggestions follow from the rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from mmspeed import rng
from mmspeed.__main__ import main
from mmspeed.bench.attention_bench import AttentionRow, Speedup, relative_error
from mmspeed.bench.attention_data import make_qkv, oracle_share
from mmspeed.bench.attention_plans import method
from mmspeed.bench.attention_run import bench_run
from mmspeed.bench.attention_suggest import LayerResult, MethodResult, suggest
from mmspeed.compute.sparse import clustered_attention
from mmspeed.compute.sparse.planners.clusters import plan_clusters
from mmspeed.compute.sparse.planners.selection import PlannerContext
from mmspeed.config import Config, make_config
from mmspeed.config.sparse import SparseConfig
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.claims.attention import SyntheticSetting, bench_attention
from tests.support.covers import checkered
from tests.support.runs import small_tree

GRID = (8, 8, 8)
ROW = AttentionRow(
    tokens=16_384,
    keep=0.1,
    planner="clusters",
    tail="summary",
    cluster_size=256,
    kept=0.1,
    pairs=100,
    backend="grouped",
    error=0.048,
    gradient_errors=(0.2, 0.2, 0.2),
    warm_error=0.05,
    plan_seconds=0.1,
    warm_seconds=0.06,
    both_seconds=1.0,
    forward=Speedup(4.1, 4.2),
    both=Speedup(5.6, 5.7),
    peak_bytes=180,
    dense_peak_bytes=120,
    throughput=0.7,
)


@pytest.mark.parametrize(
    ("planner", "tail"), [*checkered(["clusters", "tiles"], ["zero", "summary"]), ("skip", "zero")]
)
def test_rows_are_those_of_direct_calls(planner: str, tail: str) -> None:
    setting = SyntheticSetting((0.2,), (planner,), (tail,), rounds=1, device="cpu", tokens=(512,), seeds=1)
    result = bench_attention(setting)
    (row,) = result.rows
    assert row.errors == (row.error,)
    *inputs, positions = make_qkv(GRID)
    q, k, v = (x.requires_grad_() for x in inputs)
    dout = rng.normal(v.shape, 0, "bench attention", "gradient")
    dense = F.scaled_dot_product_attention(q, k, v)
    exact = torch.autograd.grad(dense, (q, k, v), dout)
    plan = method(planner, tail, 0.2, GRID).plan(q.detach(), k.detach(), positions)
    out, _, stats = clustered_attention(q, k, v, plan, tail=tail)  # type: ignore[arg-type]
    actual = torch.autograd.grad(out, (q, k, v), dout)
    assert row.error == pytest.approx(relative_error(out, dense), rel=1e-4)
    assert row.gradient_errors == pytest.approx(
        [relative_error(a, b) for a, b in zip(actual, exact, strict=True)], rel=1e-4
    )
    assert row.kept == pytest.approx(float(stats.kept_BA.mean())) and 0.1 < row.kept < 0.3
    assert (row.backend, row.pairs) == (stats.backend, int(stats.pairs)) == ("grouped", row.pairs)
    assert row.peak_bytes > 4 * q.numel() * 4  # the output and three gradients
    assert (row.warm_error is not None) == (planner == "clusters") and row.both.cpu is not None
    assert result.oracle[512] == pytest.approx(oracle_share(q.detach(), k.detach()).tolist())
    flat = torch.zeros_like(q)
    assert oracle_share(flat, flat).sub(0.9).abs().max() < 0.01  # where all keys count alike


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--planner", "circles"], "--planner circles is not one of clusters"),
        (["--tail", "long"], "--tail long is not one of zero, summary"),
        (["--keep", "2"], "--keep 2 is not a share"),
        (["--keep", "much"], "numbers with commas"),
        (["--backend", "dense"], "--backend dense is not one of auto"),
        ([], "no such run"),
    ],
)
def test_words_that_cannot_be_measured(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--run", "nowhere", *words]) != 0
    assert message in capsys.readouterr().err


def _layers(errors: list[float], span: str = "full") -> list[LayerResult]:
    """Layers with the given error of each block at 0.1 kept; half of it at 0.2, and twice for tiles."""

    def points(error: float) -> list[MethodResult]:
        methods = [("clusters", "summary", 1.0), ("tiles", "summary", 2.0)]
        return [
            MethodResult(p, t, keep, [keep], [e], e)
            for p, t, times in methods
            for keep in (0.1, 0.2)
            for e in [times * error * 0.1 / keep]
        ]

    return [LayerResult(block, span, 16_384, [0.9], [0.1], points(error)) for block, error in enumerate(errors)]


def _timings(clusters: float, tiles: float) -> list[AttentionRow]:
    speeds = {"clusters": clusters, "tiles": tiles}
    return [
        replace(
            ROW, planner=planner, keep=keep, both=Speedup(speed * 0.1 / keep), both_seconds=10 / (speed * 0.1 / keep)
        )
        for planner, speed in speeds.items()
        for keep in (0.1, 0.2)
    ]


def test_a_suggestion_is_the_fastest_within_the_error() -> None:
    timings = {"full": _timings(5.0, 6.0)}
    suggestion = suggest(_layers([0.3, 0.06, 0.06, 0.06]), timings, 4, 0.1, lambda choice: {"cluster_size": 256})
    assert suggestion.settings is not None
    sparse = suggestion.settings["model"]["sparse"]
    assert sparse == {
        "planner": "clusters",
        "tail": "summary",
        "keep": 0.1,
        "cluster_size": 256,
        "dense_first": 1,
        "dense_last": 0,
    }
    assert "2.50x" in suggestion.reason and "0.06" in suggestion.reason  # of four layers of 10 s, three take 2 s
    assert yaml.safe_load("\n".join(suggestion.lines()[2:])) == suggestion.settings
    SparseConfig(**sparse)
    lenient = suggest(_layers([0.3, 0.06, 0.06, 0.06]), timings, 4, 1.0, lambda choice: {})
    assert lenient.settings is not None and lenient.settings["model"]["sparse"]["planner"] == "tiles"


def test_it_says_when_sparse_attention_does_not_pay() -> None:
    slow = suggest(_layers([0.01] * 4), {"full": _timings(0.9, 0.8)}, 4, 0.1, lambda choice: {})
    assert slow.settings is None and "does not pay" in slow.reason and "16,384 tokens" in slow.reason
    wrong = suggest(_layers([0.5] * 4), {"full": _timings(5.0, 6.0)}, 4, 0.1, lambda choice: {})
    assert (
        wrong.settings is None and "no setting has an error of 0.1 or less" in wrong.reason and "0.25" in wrong.reason
    )
    half = suggest(_layers([0.5, 0.5, 0.5, 0.01]), {"full": _timings(1.2, 1.2)}, 4, 0.1, lambda choice: {})
    assert half.settings is None and "within an error of 0.1" in half.reason
    assert suggest([], {}, 4, 0.1, lambda choice: {}).settings is None


def test_spans_of_a_factorised_model_are_chosen_apart() -> None:
    spatial = _layers([0.05, 0.05, 0.05, 0.05])[::2]
    layers = [replace(layer, span="spatial") for layer in spatial]
    temporal = [replace(layer, span="temporal") for layer in _layers([0.9, 0.9, 0.9, 0.9])[1::2]]
    timings = {"spatial": _timings(5.0, 2.0), "temporal": _timings(5.0, 2.0)}
    suggestion = suggest([*layers, *temporal], timings, 4, 0.1, lambda choice: {})
    assert suggestion.settings is not None and suggestion.settings["model"]["sparse"]["spans"] == "spatial"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A full model over 300 tokens."""
    folder = tmp_path_factory.mktemp("run")
    tree = small_tree(folder, clips=2)
    tree["data"]["buckets"] = [{"frames": 17, "height": 96, "width": 160}]
    tree["model"]["arrangement"] = "full"
    tree["train"] |= {"steps": 1, "batch_size": 1}
    tree["validate"]["every"] = 1
    config = make_config(tree, (), origin="test")
    CacheBuilder(config).run()
    TrainPipeline(config).run()
    return config


def test_layers_of_a_run(trained: Config, tmp_path: Path) -> None:
    asked = {"keeps": (0.2, 1.0), "planners": ("clusters", "tiles"), "tails": ("summary",)}
    common = {"device": "cpu", "rounds": 1, "cluster_size": 16}
    result = bench_run(trained.run_dir, asked, samples=1, output=tmp_path, **common)
    depth = len(result.layers)
    assert depth == 2 and all(layer.tokens == 300 and layer.span == "full" for layer in result.layers)
    for layer in result.layers:
        assert len(layer.entropy) == len(layer.mass_share) and all(0 < share < 1 for share in layer.mass_share)
        for planner in ("clusters", "tiles"):
            assert layer.error((planner, "summary"), 1.0) < 1e-5 < layer.error((planner, "summary"), 0.2) < 1
        assert all(len(point.errors) == len(layer.entropy) for point in layer.points)
        middle = [point for point in layer.points if point.keep == 0.2 and point.planner == "clusters"]
        assert middle[0].kept == pytest.approx([0.2] * len(middle[0].kept), abs=0.15)
    assert len(result.timings["full"]) == 4
    assert json.loads((tmp_path / "attention.json").read_text())["layers"][0]["tokens"] == 300
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert "300" in "\n".join(result.lines()) and math.isfinite(result.timings["full"][0].both.wall)


def test_cold_plans_take_three_iterations_and_warm_ones_none() -> None:
    q, k, _, positions = make_qkv(GRID)
    chosen = method("clusters", "zero", 0.2, GRID)
    cold = chosen.plan(q, k, positions)
    other = make_qkv(GRID, seed=1)[0]
    warm = chosen.plan(other, k, positions, cold)

    def direct(q_BAND: torch.Tensor, iterations: int, start: torch.Tensor | None) -> torch.Tensor | None:
        context = PlannerContext(positions_NX=positions)
        return plan_clusters(
            q_BAND, k, chosen.rule(), context, cluster_size=chosen.cluster_size, iterations=iterations, start_GCD=start
        ).q_index_GN

    assert torch.equal(cold.q_index_GN, direct(q, 3, None)) and not torch.equal(cold.q_index_GN, direct(q, 0, None))
    start = cold.centroids_GCD
    assert torch.equal(warm.q_index_GN, direct(other, 0, start))
    assert not torch.equal(warm.q_index_GN, direct(other, 3, start))
