"""Trackers: one run each that a resumed run goes on with, its config, numbers, prompts and videos; read back from their own files."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker
from PIL import Image

from mmspeed.config import Config
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.run.trackers import Trackers, sampled_videos
from tests.support.runs import small_config

PROMPT = "a rabbit in a meadow"
SAMPLED = (f"validate.prompts=[{PROMPT}]", "validate.every=2", "checkpoint.every=2")


@pytest.fixture(scope="module")
def board(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run with TensorBoard that ended after two steps and went on to four, as if the first part had recorded a third."""
    home = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("trackers") / "home"))
    overrides = ("name=board", "trackers=[tensorboard]", "tracking.run=my-board", *SAMPLED)
    first = small_config(home, *overrides, "train.steps=2")
    TrainPipeline(first).run()
    late = Trackers(first, first.run_dir, 2)  # a killed run tells of steps after its last checkpoint
    late.log({"kind": "train", "step": 3, "loss": 99.0})
    late.finish()
    config = small_config(home, *overrides, "train.steps=4")
    TrainPipeline(config).run()
    return config


@pytest.fixture(scope="module")
def events(board: Config) -> Any:
    """The events of that run, as TensorBoard reads them: those of one folder are one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {path.parent for path in board.run_dir.rglob("events.out.*")}
    assert folders == {board.run_dir / "trackers" / "my-board"}
    events = EventAccumulator(str(folders.pop()), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    return events


def test_a_resumed_run_goes_on_in_the_same_one(events: Any, board: Config) -> None:
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]  # step 3 once: what came after the checkpoint is replaced
    assert all(event.value < 90 for event in losses)
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4]


def test_the_config_is_there(events: Any) -> None:
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "batch_size: 3" in text and "steps: 4" in text
    values = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"train.batch_size" in values and b"model.size" in values


def test_videos_play_with_their_prompts(events: Any, board: Config) -> None:
    images = events.Images("samples/000")
    assert [image.step for image in images] == [2, 4]
    for image in images:
        gif = Image.open(io.BytesIO(image.encoded_image_string))
        assert gif.format == "GIF" and gif.n_frames == 5 and gif.size == (image.width, image.height) == (48, 32)
    texts = events.Tensors("samples/000/text_summary")
    assert [text.step for text in texts] == [2, 4] and texts[0].tensor_proto.string_val[0].decode() == PROMPT


class Notebook(GeneralTracker):
    """A tracker of accelerate's protocol that writes each call into a file."""

    name = "wandb"  # its arguments are those of the package of this name
    requires_logging_directory = False

    def __init__(self, project: str, **arguments: Any) -> None:
        super().__init__()
        self.path = Path(arguments["dir"]) / "notebook.jsonl"
        self._note("start", project=project, **arguments)

    def _note(self, call: str, **values: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, **values}) + "\n")

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._note("config", values=values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._note("log", values=values, step=step)

    def finish(self) -> None:
        self._note("finish")


def test_project_name_and_id_reach_a_tracker_and_stay(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trackers=[wandb]", "tracking.project=rabbits")
    for step in (0, 4):
        trackers = Trackers(config, tmp_path, step, {"wandb": Notebook})
        trackers.log({"kind": "train", "step": step + 1, "loss": 0.5, "bucket": "text", "finite": True})
        trackers.finish()
    rows = [json.loads(line) for line in (tmp_path / "trackers" / "notebook.jsonl").read_text("utf-8").splitlines()]
    starts = [row for row in rows if row["call"] == "start"]
    assert [(row["project"], row["name"], row["resume"]) for row in starts] == [("rabbits", "small", "allow")] * 2
    assert starts[0]["id"] == starts[1]["id"] == json.loads((tmp_path / "trackers.json").read_text("utf-8"))["id"]
    assert len(starts[0]["id"]) == 21 and starts[0]["id"].isalnum() and starts[0]["id"].islower()
    assert [row["call"] for row in rows] == ["start", "config", "log", "finish"] * 2
    assert rows[1]["values"]["train"]["batch_size"] == 3
    assert rows[2]["values"] == {"train/loss": 0.5} and rows[6]["step"] == 5


def test_a_tracker_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    class Offline(Notebook):
        def __init__(self, project: str, **arguments: Any) -> None:
            raise ConnectionError("no key\nmore")

    with pytest.raises(UserError, match=r"trackers: wandb did not start: no key$"):
        Trackers(small_config(tmp_path, "trackers=[wandb]"), tmp_path, 0, {"wandb": Offline})


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"trackers\.json cannot be read .* delete it"):
        Trackers(small_config(tmp_path, "trackers=[wandb]"), tmp_path, 0, {"wandb": Notebook})


@pytest.mark.parametrize("name", ["swanlab"])
def test_a_tracker_that_is_missing_is_named_by_its_own_package(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=f"trackers: {name} is not installed; `pip install {name}`"):
        Trackers(small_config(tmp_path, f"trackers=[{name}]"), tmp_path)


def test_videos_of_a_folder_come_with_their_prompts(board: Config) -> None:
    (video,) = sampled_videos(board.run_dir / "samples" / "step-00000004")
    assert (video.name, video.prompt) == ("000", PROMPT)
    assert sampled_videos(board.run_dir / "nowhere") == []
