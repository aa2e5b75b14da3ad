"""Embeddings of a model in pipeline stages: the first stage alone has them, and the last one where it reads them too; gradients stay equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mmspeed.config.parallel import ParallelConfig
from mmspeed.loop.pipeline import runner_of
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages, stages_of
from mmspeed.plan.schedules import Pipeline
from tests.ranks.test_pipelines import MODELS, compared, language
from tests.support.added_model import Meshes
from tests.support.spawn import run_ranks

MODELS["untied"] = partial(language, num_nextn_predict_layers=0)
MODELS["tied"] = partial(language, num_nextn_predict_layers=0, tie_word_embeddings=True)
# model -> (module that embeds, ranks of three that hold it)
HOLD = {
    "untied": ("embed_tokens", [0]),
    "tied": ("embed_tokens", [0, 2]),
    "language": ("embed_tokens", [0, 2]),  # further tokens are predicted from it behind the last block
    "video": ("patch_in", [0]),
    "wan": ("patch_embedding", [0]),
    "ltx": ("proj_in", [0]),
    "cogvideox": ("patch_embed", [0]),
    "hunyuan": ("context_embedder", [0]),
}


def in_three(kinds: list[str]) -> list[Any]:
    """(model, numbers of what embeds on this process, gaps to one process); afterwards a step in bfloat16."""
    meshes, parallel, found = Meshes(), ParallelConfig(pp=3), []
    for kind in kinds:
        model, batches, call, terms = MODELS[kind](3)
        mesh, layout = meshes.of(parallel)
        cut_into_stages(model, mesh.across_stages()[0], Pipeline.of(parallel))
        held = sum(p.numel() for name, p in model.named_parameters() if name.startswith(f"{HOLD[kind][0]}."))
        half = parallelize(model, mesh, "fsdp", layout=layout, compute_dtype=torch.bfloat16)
        record = runner_of(half, "fsdp", torch.device("cpu")).run(partial(call, half), terms, batches, {"samples": 6.0})
        assert not mesh.knows_loss or record.total("loss", torch.device("cpu")).isfinite()
        found.append((kind, held, *compared(kind, parallel, 3, meshes)))
    return found


@pytest.mark.parametrize(
    "kinds",
    [
        ["untied", "tied", "video"],
        pytest.param(["language", "wan", "ltx", "cogvideox", "hunyuan"], marks=pytest.mark.slow),
    ],
)
def test_the_first_stage_alone_holds_what_embeds(kinds: list[str]) -> None:
    for rank, results in enumerate(run_ranks(in_three, 3, kinds)):
        for kind, held, gap, name, norm, term in results:
            assert (held > 0) == (rank in HOLD[kind][1]), (kind, rank, held)
            assert gap <= 1e-5 and norm <= 1e-5 and term <= 1e-5, (kind, gap, name, norm, term)


@pytest.mark.parametrize("sizes", [[1, 2, 1]])
def test_stages_have_the_blocks_that_are_given(sizes: list[int]) -> None:
    for rank, held in enumerate(run_ranks(given, 3, sizes)):
        assert len(held) == sizes[rank]


def given(sizes: list[int]) -> range:
    """The blocks of this process."""
    mesh, _ = Meshes().of(parallel := ParallelConfig(pp=3, stages=sizes))
    model = MODELS["video"](1)[0]
    stages = cut_into_stages(model, mesh.across_stages()[0], Pipeline.of(parallel), parallel.stages)
    assert stages_of(model) is stages
    return stages.bounds[stages.own[0]]
