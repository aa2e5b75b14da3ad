"""Random damages to caches and checkpoints, and runs whose newest checkpoint is damaged."""

from __future__ import annotations

from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.manager import step_name, steps_in
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from tests.faults.case import Outcome, Scene, case
from tests.support.cache_damages import try_damages
from tests.support.care_caches import build_whole, contents
from tests.support.changed_shards import ChangeLatents
from tests.support.character_runs import character_config, losses
from tests.support.characters import CharacterDomain
from tests.support.damages import damage, unnoticed, write_two
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache


@case("random damages to a cache", 120, 2400)
def cache(scene: Scene) -> Outcome:
    count, first = scene.count(60, 2000), scene.draw.randrange(10**6)
    build_whole(scene.folder / "base")
    contents(scene.folder / "base")  # opened once, so that derived files are there too
    wrong = try_damages(str(scene.folder / "base"), str(scene.folder / "copy"), range(first, first + count))
    print("\n".join(wrong))
    return f"{count - len(wrong)} of {count} noticed, and readers give what was stored or an error", not wrong


@case("random damages to checkpoints", 120, 2400)
def checkpoints(scene: Scene) -> Outcome:
    count = scene.count(100, 2000)
    written = write_two(scene.folder / "written")
    lines = unnoticed(written, scene.folder / "copy", count, scene.draw.randrange(10**6))
    print("\n".join(lines))
    return f"{count - len(lines)} of {count} noticed by `verify` and at loading", not lines


@case("newest checkpoint damaged, the run goes on", 180, 900)
def fall_back(scene: Scene) -> Outcome:
    every = ("checkpoint.every=2", "checkpoint.keep_last=3")

    def train(name: str, steps: int) -> list[float]:
        config = character_config(scene.folder, *every, f"name={name}", f"train.steps={steps}")
        TrainPipeline(config, task=CharacterDomain(config)).run()
        return losses(config)

    right, count, same = train("whole", 8), scene.count(5, 40), 0
    for number in range(count):
        train(name := f"run-{number}", 6)
        folder = scene.folder / "runs" / name / "checkpoints"
        print(damage(folder, step_name(6), step_name(4), scene.draw), flush=True)
        same += train(name, 8) == right and 8 in steps_in(folder)
    return f"{same} of {count} go on from an older one, losses bitwise those of a run without damage", same == count


@case("bytes of shards change under a run", 60)
def changed(scene: Scene) -> Outcome:
    config = toy_config(scene.folder, "train.steps=30", "validate.samples=0")
    write_toy_cache(config)
    step, epoch = scene.draw.randrange(3, 9), 3  # seven samples, three a step
    change = ChangeLatents(config.local_cache_dir(), step)
    try:
        TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[change]).run()
        return "trained without a word", False
    except UserError as error:
        named = "its bytes have changed" in str(error) and "shard latents/" in str(error)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    later = max(row["step"] for row in rows if row["kind"] == "train") - step
    figure = f"{'named with shard and entry' if named else 'not named'} {later} steps later, of an epoch of {epoch}"
    return figure, named and later <= epoch + config.train.prefetch
