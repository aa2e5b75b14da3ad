"""Numbers that are not finite, in the data and in the weights."""

from __future__ import annotations

import math
from pathlib import Path

from mmspeed.cli.failures import describe
from mmspeed.data.maintenance.verify import verify as verify_cache
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.maintenance import verify
from mmspeed.loop.checkpoint.manager import step_name, steps_in
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.checkpoints import whole_checkpoint
from tests.support.runs import small_config
from tests.support.spikes import RULE, SPIKE, first_epoch, rows, spoiled, train
from tests.support.toy_runs import toy_config, train_toy, write_toy_cache


@case("NaN in a stored latent", 120)
def latent(scene: Scene) -> Outcome:
    spoiled = scene.draw.randrange(1, 8)
    write_toy_cache(toy_config(scene.folder), factors={spoiled: math.nan})
    damage = verify_cache(toy_config(scene.folder).cache_dir).damage
    train_toy(str(scene.folder), ("name=spoiled", "train.skip_non_finite=99"))
    rows = read_metrics(scene.folder / "runs" / "spoiled" / "metrics.jsonl")
    said = [
        row for row in rows if row["kind"] in ("left_out", "non_finite")
    ]  # the latter where it is alone in its step
    named = [f"{spoiled}.mp4" in str(one) for one in damage] == [True]
    named = named and len(said) >= 2 and all(row["samples"] == [f"{spoiled}.mp4"] for row in said)
    finite = all_finite(scene.folder, "spoiled")
    figure = (
        f"its sample is {'named and left out' if named else 'not named'} in {len(said)} of 6 steps, weights {finite}"
    )
    return figure, named and finite == "finite"


@case("samples that make the loss spike", 120)
def spike(scene: Scene) -> Outcome:
    order = first_epoch(scene.folder / "order")
    step = scene.draw.randrange(SPIKE, 9)
    spoiled(scene.folder, order, 1000.0, step)
    recorder = train(scene.folder, "train.steps=8", "checkpoint.every=2", RULE.format("roll_back"))
    last = dict(recorder.steps)
    used = sorted(source for sources in last.values() for source in sources)
    others = sorted(source for number, sources in enumerate(order, 1) for source in sources if number != step)
    rollbacks = rows(scene.folder, "small", "roll_back")
    named = len(rollbacks) == 1 and sorted(rollbacks[0]["samples"]) == sorted(order[step - 1])
    back = rollbacks[0]["to"] if rollbacks else "none"
    said, once = "named" if named else "not named", "once" if used == others else "not once"
    figure = f"step {step} rolled back to {back}, its samples {said}, each other one {once}"
    return figure, named and used == others and all_finite(scene.folder, "small") == "finite"


def all_finite(folder: Path, name: str) -> str:
    """`finite`, or the names of the tensors of a run's latest checkpoint that are not."""
    tensors = whole_checkpoint(folder / "runs" / name)
    bad = [key for key, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    return ", ".join(bad[:3]) or "finite"


@case("learning rate of 1e38", 120)
def divergence(scene: Scene) -> Outcome:
    config = small_config(scene.folder, "name=diverges", "train.warmup_steps=0", "checkpoint.every=1", "train.steps=9")
    CacheBuilder(config).run()
    try:
        small_config(scene.folder, "train.lr=1e38")
        return "the config is accepted", False
    except UserError as error:
        failure = describe(error)
    greatest = config.model_copy(update={"train": config.train.model_copy(update={"lr": 1e30})})
    try:
        TrainPipeline(greatest).run()
    except Exception as error:
        failure = describe(error) if failure.known else failure
    else:
        return "trained without a word", False
    folder = config.run_dir / "checkpoints"
    kept = steps_in(folder) if folder.exists() else []
    sound = all(verify(folder / step_name(step)) == [] for step in kept)
    finite = all_finite(scene.folder, "diverges") if kept else "finite"
    line = "a line" if failure.known else failure.line()
    figure = f"{line}; {len(kept)} checkpoints kept, {'sound' if sound else 'damaged'} and {finite}"
    return figure, failure.known and sound and finite == "finite"
