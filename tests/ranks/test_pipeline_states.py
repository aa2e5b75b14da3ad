"""Runs that go on with other stages, another schedule or none, and what is exported, validated and sampled from each.

A run goes through all layouts, two steps in each, in several ways to keep its memory: it loses what one process does, validates as it does,
and takes the same items. What begins with trained weights and a learning rate of nearly 0 exports the bytes of one process, and samples its
videos. Tolerance: as in test_language_train.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.ranks import test_expert_states as experts
from tests.ranks.test_expert_states import WAYS, Layout, exported_alike, losses, named, trained
from tests.ranks.test_sequence_train import held_out, train
from tests.support import runs
from tests.support.checkpoints import farthest, whole_checkpoint
from tests.support.spawn import run_ranks

LAYOUTS: dict[str, Layout] = {
    "1f1b": (2, ("parallel.pp=2", "parallel.stages=[1,3]")),
    "interleaved, one more": (2, ("parallel.pp=2", "parallel.virtual=2", "parallel.extra_warmup=true")),
    "dualpipe_v": (2, ("parallel.pp=2", "parallel.virtual=2", "parallel.schedule=dualpipe_v")),
    "one process": (1, ()),
    "four stages": (4, ("parallel.pp=4",)),
    "shards": (2, ()),
    "stages of shards": (4, ("parallel.pp=2",)),
    "stages of tp": (4, ("parallel.pp=2", "parallel.virtual=2", "parallel.tp=2")),
}
EXPERTS: dict[str, Layout] = {"stages of ep": (4, ("parallel.pp=2", "parallel.ep=2"))}
SMALL = ("train.micro_batch_size=1", "model.num_hidden_layers=4")
MUON = ("train.optimizer=muon", "model.shape=tiny-qwen3-8b")
SORA = ("train.micro_batch_size=1", "model={width: 64, depth: 4, heads: 4}", "train.warmup_steps=0", "train.schedule=constant")  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and their cache, of which some are held out."""
    folder = tmp_path_factory.mktemp("stages")
    experts.write_texts(folder)
    TextPreparation(experts.config(folder, "texts.validation=0.1")).build()
    return folder


def gone_through(home: Path, layouts: list[Layout], ways: dict[str, tuple[str, ...]]) -> None:
    own = (*SMALL, "texts.validation=0.1", "validate.every=2", "validate.samples=4")
    ways = {name: (*way, *own) for name, way in ways.items()}
    trained(home, layouts, ways)
    for way in ways:
        whole, parts = (losses(home, named(way, name), "validation") for name in ("whole", "parts"))
        assert len(whole) == len(layouts) and parts == pytest.approx(whole, **experts.TOLERANCE), way


def test_a_run_goes_from_stages_to_one_process_and_back(home: Path) -> None:
    way = "states and averages on the host"
    some = ["interleaved, one more", "one process", "dualpipe_v"]
    gone_through(home, [LAYOUTS[name] for name in some], {way: WAYS[way]})


@pytest.mark.slow
def test_a_run_goes_through_all_stages_in_all_ways_of_memory(home: Path) -> None:
    every = [*LAYOUTS.values(), *EXPERTS.values(), LAYOUTS["1f1b"]]
    gone_through(home, every, {name: way for name, way in WAYS.items() if "released" not in name})
    gone_through(home, [LAYOUTS[name] for name in ("1f1b", "one process", "four stages")], {"muon": MUON})


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny-deepseek-v3", "tiny-qwen3-8b"])
def test_all_stages_export_and_take_up_the_bytes_of_one_process(home: Path, shape: str) -> None:
    layouts = LAYOUTS | (EXPERTS if "deepseek" in shape else {})
    by_world = dict(sorted(layouts.items(), key=lambda each: each[1][0]))
    exported_alike(home, f"{shape}-stages", (f"model.shape={shape}", *SMALL, "texts.validation=0.1"), by_world)


@pytest.mark.slow
def test_videos_are_trained_validated_and_sampled_as_by_one_process(small_cache: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(small_cache, tmp_path / "home"))

    def config(name: str, *overrides: str) -> runs.Config:
        return runs.small_config(home, f"name={name}", *SORA, *overrides)

    def go(world: int, name: str, *overrides: str) -> None:
        run_ranks(train, world, str(home), False, (f"name={name}", *SORA, *overrides))

    go(1, "whole", f"train.steps={2 * len(LAYOUTS)}", "validate.every=2", "train.ema_decay=0.5")
    for place, (world, settings) in enumerate(LAYOUTS.values(), 1):
        go(world, "parts", f"train.steps={2 * place}", "validate.every=2", "train.ema_decay=0.5", *settings)
    whole, parts = config("whole"), config("parts")
    assert runs.losses(parts) == pytest.approx(runs.losses(whole), **experts.TOLERANCE)
    assert held_out(parts) == pytest.approx(held_out(whole), **experts.TOLERANCE)
    still = (
        "train.steps=1",
        "train.lr=1e-30",
        f"train.start_from={whole.run_dir}",
        "validate.prompts=[a rabbit, an owl]",
    )
    go(1, "still", *still)
    for name, (world, settings) in LAYOUTS.items():
        go(world, named(name), *still, *settings)
        states = [whole_checkpoint(config(each).run_dir) for each in (named(name), "still")]
        assert max(farthest(*states, prefix) for prefix in ("model.", "ema.")) < 1e-20, name
        videos = [sorted((config(each).run_dir / "samples").rglob("*.mp4")) for each in (named(name), "still")]
        assert [path.read_bytes() for path in videos[0]] == [path.read_bytes() for path in videos[1]] and len(
            videos[0]
        ) == 2
