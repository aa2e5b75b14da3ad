"""What a stage of a pipeline holds: the blocks that are given; embeddings on the first stage alone, and on the last where it reads them.

That gradients stay those of one process: `test_pipeline_cover.py`.
"""

from __future__ import annotations

import math

import pytest
import torch

from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.loop.step import train_step
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.plan.schedules import Pipeline
from tests.support.added_model import Meshes
from tests.support.pipeline_steps import DECODERS, divisors_of, made
from tests.support.sequence_steps import Still
from tests.support.spawn import run_ranks

# model -> (module that embeds, processes of three that hold it)
HOLD = {
    "dense": ("embed_tokens", [0]),
    "tied": ("embed_tokens", [0, 2]),
    "latent": ("embed_tokens", [0, 2]),  # further tokens are predicted from it behind the last block
    "sora": ("patch_in", [0]),
    "wan": ("patch_embedding", [0]),
    "ltx": ("proj_in", [0]),
    "cogvideox": ("patch_embed", [0]),
    "hunyuan": ("context_embedder", [0]),
}
SIZES = [1, 2, 1]


def held() -> list[tuple[str, int, list[int], float]]:
    """(model, numbers of what embeds on this process, blocks of its stages, loss of a step in bfloat16)."""
    meshes, found = Meshes(), []
    for kind, (embeds, _) in HOLD.items():
        mesh, layout = meshes.of(parallel := ParallelConfig(pp=3, stages=SIZES))
        of = made(kind, sum(SIZES))
        (group,) = mesh.across_stages()
        stages = cut_into_stages(of.model, group, Pipeline.of(parallel), sizes=parallel.stages)
        numbers = sum(p.numel() for name, p in of.model.named_parameters() if name.startswith(f"{embeds}."))
        model = parallelize(of.model, mesh, "fsdp", layout=layout, compute_dtype=torch.bfloat16)
        learner, items = of.learner(model, "fsdp", Still(model.parameters())), [(0, 0), (1, 1)]
        result = train_step(
            {"model": model}, [learner], [of.batch(*item, 1.0) for item in items], divisors_of(items, kind in DECODERS), clip_norm=None,
            tensor=layout.tensor, mesh=mesh,
        )  # fmt: skip
        found.append((kind, numbers, [len(stages.bounds[stage]) for stage in stages.own], result.loss))
    return found


def test_the_first_stage_alone_holds_what_embeds() -> None:
    for rank, models in enumerate(run_ranks(held, 3)):
        for kind, numbers, blocks, loss in models:
            further = kind == "latent" and rank == 2  # the module for a further token comes with the last block
            assert (numbers > 0) == (rank in HOLD[kind][1]) and blocks == [SIZES[rank] + further], (kind, rank, numbers)
            assert math.isfinite(loss), kind


def test_an_embedding_that_others_share_is_refused() -> None:
    model = made("sora", 4).model
    model.get_submodule("blocks.3").register_parameter("shared", model.get_parameter("patch_in.weight"))
    with pytest.raises(UserError, match=r"patch_in shares a weight with blocks\.3\.shared"):
        cut_into_stages(model, None, Pipeline(2), rank=0)
