"""Steps of pipelines as runs measure them: bytes between stages by formula, times that make up the step, the row and the page."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from mmspeed.comm import even_sizes
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.loop.pipeline import PipelineRows, PipelineRunner
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages, shared_parameters
from mmspeed.parallel.tensor import local
from mmspeed.pipelines.report.run_page import write_report
from mmspeed.plan.measured_pipeline import spans_of
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.traffic import AttentionWorkload, carried_bytes, gradient_traffic, held_tokens, stage_traffic
from mmspeed.protocols import Batch
from tests.ranks.test_expert_states import home, train
from tests.support.added_model import Meshes
from tests.support.language_steps import settings_of
from tests.support.pipeline_steps import LATENTS, PLAIN, any_orders, made
from tests.support.sequence_steps import MODEL, Still
from tests.support.spawn import run_ranks

__all__ = ["home"]  # a fixture
FLOAT = 4
LAYOUTS = {
    2: [ParallelConfig(pp=2), ParallelConfig(pp=2, virtual=2), ParallelConfig(pp=2, virtual=2, schedule="dualpipe_v")],
    4: [
        ParallelConfig(pp=4),
        ParallelConfig(pp=2, virtual=2, ulysses=2),
        ParallelConfig(pp=2, virtual=2),
        ParallelConfig(pp=2, virtual=2, ulysses=2, schedule="overlap"),
    ],
}


def carried(kind: str, batch: Batch, parallel: ParallelConfig) -> int:
    """Bytes of a micro-batch between two stages, from its shapes."""
    place = dist.get_rank() % parallel.group
    if kind == "experts":
        packs, tokens = batch["ids"].shape
        held = packs * even_sizes(tokens, parallel.group)[place]
        return carried_bytes(held, settings_of(PLAIN).hidden_size, FLOAT, sums=1)
    latent, spans = LATENTS[int(batch["number"][1])], (MODEL.span(0), MODEL.span(1))
    work = AttentionWorkload(2, MODEL.grid(latent), MODEL.width, MODEL.heads, spans, 1, 1, FLOAT, image=latent[0] == 1)
    return carried_bytes(2 * held_tokens(work, parallel, spans[0])[place], MODEL.width, FLOAT)


def steps_of(kind: str, parallel: ParallelConfig, count: int, meshes: Meshes, file: Path) -> dict[str, Any]:
    """The bytes that the second of two steps sent, those foretold, and its times and row."""
    of = made(kind, 4)
    mesh, layout = meshes.of(parallel)
    (group,) = mesh.across_stages()
    pipeline = Pipeline.of(parallel)
    cut_into_stages(of.model, group, pipeline)
    model = parallelize(of.model, mesh, "fsdp", layout=layout)
    learner = of.learner(model, "fsdp", Still(model.parameters()))
    assert isinstance(learner.runner, PipelineRunner)
    rows = PipelineRows(learner.runner, Device("cpu", 0), lambda step: step == 2, file)
    batches = [of.batch(number, number % 3, 1.0) for number in range(count)]
    divisors = dict.fromkeys(("samples", "tokens", "real_tokens"), 9.0)
    before, timed = layout.ledger.copy(), []
    for step in range(2):
        rows.before_step(step)
        before = layout.ledger.copy()
        learner.run(batches, divisors, 1.0)
        timed.append(learner.runner.passes is not None)
    sent = layout.ledger.since(before).bytes
    shared = sum(local(p).numel() for _, parameters in shared_parameters(model) for p in parameters) * FLOAT
    traffic = stage_traffic(pipeline, dist.get_rank(group), [carried(kind, batch, parallel) for batch in batches])
    wanted = traffic.forward + traffic.backward + gradient_traffic(shared, parallel.pp, "pp")
    row, grads = rows.row()["pipeline"], list[Any]()
    found = learner.runner.orders
    for orders in (found, any_orders(pipeline)):
        learner.runner.orders = orders
        model.zero_grad()
        learner.run(batches, divisors, 1.0)
        grads.append([local(p.grad).tolist() for p in model.parameters() if p.grad is not None])
    return {
        "what": f"{kind}, {parallel.schedule}, {parallel.sizes()}, {count}",
        "sent": {what: n for what, n in sent.items() if what[1] == "pp" and n},
        "wanted": dict(wanted),
        "timed": timed,
        "row": row,
        "orders": sorted(found.items()),
        "same": grads[0] == grads[1],
        "spans": spans_of(file.read_text()),
    }


def all_steps(folder: str, counts: list[int]) -> list[dict[str, Any]]:
    meshes, world = Meshes(), dist.get_world_size()
    file = Path(folder) / f"{dist.get_rank()}.json"
    return [
        steps_of(kind, parallel, count, meshes, file)
        for parallel in LAYOUTS[world]
        for kind in ("sora", "experts")
        for count in counts
    ]


@pytest.mark.parametrize("world, counts", [(2, [3]), pytest.param(4, [1, 5], marks=pytest.mark.slow)])
def test_bytes_and_times_of_a_step_are_told(tmp_path: Path, world: int, counts: list[int]) -> None:
    by_rank = run_ranks(all_steps, world, str(tmp_path), counts)
    for of_ranks in zip(*by_rank, strict=True):
        for found in of_ranks:
            row, what = found["row"], found["what"]
            assert bool(found["orders"]) is ("overlap" in what and row["micro_batches"] == 5), what
            assert found["same"] and found["orders"] == of_ranks[0]["orders"]
            assert found["sent"] == found["wanted"] and found["sent"], what
            assert found["timed"] == [False, True]
            assert row.get("short_steps", 0) == (2 if "dualpipe_v" in what and row["micro_batches"] < 4 else 0)
            for rank, computing in enumerate(row["compute"]):
                waits = [of[rank] for of in row["waits"].values()]
                assert computing + sum(waits) == pytest.approx(row["seconds"], abs=1e-4) and min(waits) >= 0, what
            busiest = max(row["compute"])
            assert row["bubble"] == pytest.approx(1 - busiest / row["seconds"], abs=2e-4)
            assert 0 <= row["exposed"]["messages"] <= row["bubble"] * row["seconds"] and row["reckoned_bubble"] > 0
            for span, computing in zip(found["spans"], row["compute"], strict=True):
                assert sum(end - begin for _, begin, end in span) == pytest.approx(computing, abs=1e-4)
                assert all(before[2] <= after[1] for before, after in itertools.pairwise(span))


def test_a_run_of_stages_has_rows_and_a_picture(home: Path) -> None:
    settings = ("model.num_hidden_layers=4", "train.micro_batch_size=1", "parallel.pp=2", "parallel.virtual=2")
    run_ranks(train, 2, str(home), [("drawn", (*settings, "train.steps=3", "train.log_every=2"))])
    folder = home / "runs" / "drawn"
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [2, 3] and all("bubble" in row["pipeline"] for row in rows)
    assert {"activations pp", "gradients pp", "all_reduce pp"} == set(rows[-1]["sent_bytes"])
    assert "slow_ranks" not in rows[-1], "stages are not compared with each other"
    page = write_report(folder).read_text(encoding="utf-8")
    (picture,) = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    svg = ElementTree.fromstring(base64.b64decode(picture))
    titles = [title.text or "" for group in svg.iter("{http://www.w3.org/2000/svg}g") for title in group[:1]]
    batches = rows[-1]["pipeline"]["micro_batches"]
    assert len(titles) == 2 * 4 * batches and sum("stage 3" in title for title in titles) == 2 * batches
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page.partition("<h2>Pipeline</h2>")[2])
    assert cells[:2] == ["rank 0", f"{rows[-1]['pipeline']['compute'][0]:.4g}"] and cells[6] == "rank 1"
    (folder / "pipeline.json").write_text('{"spans": [[[[["forward"]], 0]]]}')
    with pytest.raises(UserError, match=r"pipeline\.json cannot be read"):
        write_report(folder)
