"""Sparse attention in the model and in a run: chosen by config, trained, stopped, resumed, sampled, reported."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch

from mmspeed.compute.sparse.module import clustered_layers, warm_plans
from mmspeed.config import make_config
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.memory import BlockPolicies
from mmspeed.models import SoraDiT, SoraDiTConfig, build_model
from mmspeed.parallel import parallelize
from mmspeed.pipelines import TextToVideo, TrainPipeline, write_report
from tests.support.runs import losses, small_config

RECOMPUTED = BlockPolicies.everywhere({"block": "recompute"})

SPARSE = {
    "min_tokens": 16,
    "tile": (2, 2, 2),
    "cluster_size": 32,
    "dense_first": 0,
    "dense_last": 0,
    "dense_steps": 0,
    "tau": 1.0,
}


def model_of(arrangement: str = "full", depth: int = 4, **sparse: object) -> SoraDiT:
    config = SoraDiTConfig(
        width=48,
        depth=depth,
        heads=3,
        latent_channels=4,
        text_width=8,
        adaln_rank=4,
        arrangement=arrangement,
        sparse=SparseConfig(**{**SPARSE, **sparse}),
    )
    return awake(SoraDiT(config).double())  # so that rounding moves no query to another cluster


def awake(model: SoraDiT) -> SoraDiT:
    """Blocks that start as the identity would hide what attention does."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def inputs(frames: int = 4, size: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return (
        torch.randn(2, 4, frames, size, size, dtype=torch.float64),
        torch.tensor([0.3, 0.8]),
        torch.randn(2, 5, 8, dtype=torch.float64),
        torch.ones(2, 5, dtype=torch.bool),
    )


def dense_twin(model: SoraDiT) -> SoraDiT:
    twin = copy.deepcopy(model)
    for layer in clustered_layers(twin).values():
        layer.phase = "dense"
    return twin


@pytest.mark.parametrize(("arrangement", "planner"), [("full", "clusters"), ("factorised", "tiles")])
def test_a_threshold_of_zero_is_dense_attention_with_its_gradients(arrangement: str, planner: str) -> None:
    model = model_of(arrangement, planner=planner, rule="threshold", tau=0.0, min_tokens=4, tail="zero")
    twin = dense_twin(model)
    for each in (model, twin):
        each(*inputs()).square().sum().backward()
    assert all(layer.counter["sparse_grouped"] for layer in clustered_layers(model).values())
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("planner", "tail"), [("clusters", "zero"), ("tiles", "summary"), ("window", "zero"), ("skip", "summary")]
)
def test_the_kernel_of_the_model_is_the_oracle_s(planner: str, tail: str) -> None:
    fields = {"planner": planner, "tail": tail, "tau": None, "dense_steps": 1}
    model = model_of(**fields)
    twin = awake(model_of(**fields, backend="masked"))
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        each(*inputs()).square().sum().backward()
    layers = clustered_layers(model).values()
    assert all(layer.counter["sparse_grouped"] == 1 and not layer.counter["dense"] for layer in layers)
    assert all(0 < layer.work.flops < layer.work.dense_flops for layer in layers)
    for (name, parameter), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other[1].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_which_blocks_are_sparse() -> None:
    def names(**fields: object) -> list[str]:
        return list(clustered_layers(model_of(**fields)))

    assert names(depth=4, dense_first=1, dense_last=1) == ["blocks.1.self_attention", "blocks.2.self_attention"]
    temporal = names(arrangement="factorised", depth=4, spans="temporal")
    assert temporal == ["blocks.1.self_attention", "blocks.3.self_attention"]
    with pytest.raises(UserError, match="none of the 2 blocks is sparse"):
        model_of(depth=2, dense_first=1, dense_last=1)


def test_images_stay_dense() -> None:
    model = model_of(min_tokens=1)
    twin = dense_twin(model)
    assert torch.equal(model(*inputs(frames=1)), twin(*inputs(frames=1)))
    assert not any(layer.counter for layer in clustered_layers(model).values())
    model(*inputs())
    assert all(layer.counter["sparse_grouped"] for layer in clustered_layers(model).values())


def test_padding_of_a_video_is_no_key() -> None:
    model = model_of(tail="summary").eval()
    mask = torch.ones(2, 4, 16, 16, dtype=torch.bool)
    mask[:, 3] = False
    x, *rest = inputs()
    other = x.clone()
    other[:, :, 3] = 100.0
    with torch.no_grad():
        first, second = (model(each, *rest, mask)[:, :, :3] for each in (x, other))
    # queries of the padding are clustered too, and may move clusters: outputs are near, not equal
    assert (first - second).norm() / first.norm() < 0.2
    for layer in clustered_layers(model).values():
        layer.tau.zero_()
    with torch.no_grad():
        first, second = (model(each, *rest, mask)[:, :, :3] for each in (x, other))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointing_and_graphs_change_nothing(compiled: bool) -> None:
    plain = model_of()
    other = copy.deepcopy(plain)
    parallelize(other, None, "none", keeping=RECOMPUTED, compile="aot_eager" if compiled else False)
    for each in (plain, other):
        each(*inputs()).square().sum().backward()
    for (name, parameter), twin in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-4, atol=1e-5, msg=name)
    for layer, twin in zip(clustered_layers(plain).values(), clustered_layers(other).values(), strict=True):
        assert layer.work.dense_flops == twin.work.dense_flops and int(layer.work.flops) == int(twin.work.flops)


def test_flops_count_what_is_kept() -> None:
    latent = (8, 16, 16)
    config = {"size": "tiny", "arrangement": "full", "sparse": {"keep": 0.1, "min_tokens": 64, "tail": "zero"}}
    from mmspeed.config.schema import ModelConfig

    sparse = build_model(ModelConfig(**config), 4, 8, device="meta")
    dense = build_model(ModelConfig(**{**config, "sparse": None}), 4, 8, device="meta")
    tokens, layers, width = 8 * 8 * 8, sparse.config.depth - 2, sparse.config.width
    saved = 0.9 * layers * 4 * tokens * tokens * width
    assert sparse.dense_flops(latent, 7) == dense.flops(latent, 7)
    assert dense.flops(latent, 7) - sparse.flops(latent, 7) == pytest.approx(saved, rel=1e-6)
    image = (1, 16, 16)
    assert sparse.flops(image, 7) == dense.flops(image, 7)
    for fields, share in (
        ({"planner": "skip", "stride": 4}, 1 / 4),
        ({"planner": "window", "tile": (2, 2, 2), "window": (3, 3, 1)}, 9 * 8 / tokens),
    ):
        fixed = build_model(ModelConfig(**{**config, "sparse": {**config["sparse"], **fields}}), 4, 8, device="meta")
        saved = (1 - share) * layers * 4 * tokens * tokens * width
        assert dense.flops(latent, 7) - fixed.flops(latent, 7) == pytest.approx(saved, rel=1e-6)


# ---- runs


RUN = (
    "model.arrangement=full",
    "model.depth=3",
    "model.sparse.min_tokens=8",
    "model.sparse.cluster_size=4",
    "model.sparse.dense_first=0",
    "model.sparse.keep=0.4",
    "model.sparse.dense_steps=2",
    "model.sparse.update_every=1",
)


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("home") / "home"))


@pytest.mark.slow
def test_a_sparse_run_is_steered_logged_resumed_and_sampled(home: Path) -> None:
    whole = small_config(home, "name=whole", *RUN)
    TrainPipeline(whole).run()
    parts = small_config(home, "name=parts", *RUN)
    for _ in range(5):
        parts.run_dir.mkdir(parents=True, exist_ok=True)
        (parts.run_dir / "stop").touch()
        TrainPipeline(parts).run()
    assert TrainPipeline(parts).run().finished
    assert losses(parts) == losses(whole)  # the thresholds are in the checkpoints

    rows = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert rows[0]["attention"] == [] and rows[0]["mfu"] == pytest.approx(rows[0]["effective_mfu"])
    last = rows[-1]["attention"]
    assert [layer["layer"] for layer in last] == ["blocks.0.self_attention", "blocks.1.self_attention"]
    for layer in last:
        assert layer["kept"] == pytest.approx(0.4, abs=0.2) and layer["error"] > 0
        assert layer["plan_ms"] > 0 and layer["tau"] > 0
    assert 0 < rows[-1]["mfu"] < rows[-1]["effective_mfu"]
    assert "Sparse attention" in write_report(whole.run_dir).read_text(encoding="utf-8")

    pipe = TextToVideo.from_run(whole.run_dir, device="cpu")
    video = pipe("a rabbit", steps=2)[0]
    layers = clustered_layers(pipe.model).values()
    assert all(layer.counter["sparse_grouped"] == 4 for layer in layers)  # two steps, with and without the caption
    assert [float(layer.tau) for layer in layers] == [layer["tau"] for layer in last]
    assert video.frames_FHWC.shape == (5, 32, 48, 3)


def test_a_checkpoint_of_the_dense_steps_samples_densely(home: Path) -> None:
    config = small_config(home, "name=early", *RUN, "train.steps=1")
    TrainPipeline(config).run()
    pipe = TextToVideo.from_run(config.run_dir, device="cpu")
    pipe("a rabbit", steps=2)
    assert all(set(layer.counter) == {"dense"} for layer in clustered_layers(pipe.model).values())


def test_what_cannot_be_started_from(home: Path) -> None:
    dense = small_config(home, "name=dense", "model.arrangement=full", "model.depth=3", "train.steps=1")
    TrainPipeline(dense).run()
    for place, message in (("nowhere", "neither a run with a checkpoint"), (dense.run_dir, "is of another model")):
        config = small_config(home, "name=from", f"train.start_from={home / place}", "model.depth=2")
        with pytest.raises(UserError, match=message):
            TrainPipeline(config).run()


def test_the_planner_of_a_run_that_names_none(tmp_path: Path) -> None:
    """Tiles learn better from scratch; clusters are nearer to the dense attention that a run begins with."""

    def planner(*overrides: str) -> str:
        sparse = small_config(tmp_path, *overrides).model.sparse
        assert sparse is not None
        return sparse.grouping

    assert planner("model.sparse.keep=0.2") == "tiles" and planner("model.sparse={}") == "tiles"
    assert planner("model.sparse.keep=0.2", "train.start_from=runs/dense") == "clusters"
    assert planner("model.sparse.cluster_size=64") == planner("model.sparse.error=0.1") == "clusters"
    assert planner("model.sparse.planner=skip") == "skip"
    config = small_config(tmp_path, "model.sparse.keep=0.2")
    again = make_config(config.model_dump(mode="json", by_alias=True), origin="test")
    assert again.model.sparse == config.model.sparse


def test_a_kernel_that_does_not_serve_is_reported_before_the_first_step(home: Path) -> None:
    config = small_config(home, "name=kernel", *RUN, "model.sparse.backend=flex")
    with pytest.raises(UserError, match=r"model.sparse.backend flex, planner clusters: .* does not serve"):
        TrainPipeline(config).run()
    assert not config.run_dir.joinpath("metrics.jsonl").exists()
    with pytest.raises(UserError, match=r"not one of auto.*did you mean 'triton'"):
        model_of(backend="tritn")


def test_warm_plans_begin_with_those_of_their_own_condition() -> None:
    model = model_of()
    layers = clustered_layers(model).values()
    caption, empty = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    with warm_plans(model) as use:
        for condition, centroids in (("caption", caption), ("empty", empty)):
            use(condition)
            for layer in layers:
                assert layer.warm_start() == (None, None)
                layer.carry_over(centroids, None)
        for condition, centroids in (("caption", caption), ("empty", empty)):
            use(condition)
            assert layers and all(layer.warm_start()[0] is centroids for layer in layers)
    assert all(layer.warm_start() == (None, None) for layer in layers)
