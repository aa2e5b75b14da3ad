"""`mmspeed sample`: prompts from a file, alone and shared by processes, the names of its videos, and what is refused."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from mmspeed.__main__ import main
from mmspeed.cli.sample_command import output_paths, sheet_path
from mmspeed.config import make_config
from mmspeed.errors import UserError
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.inference.agreement import require_same_sampling
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.pipelines.inference.text_to_video import SamplerChoice
from mmspeed.pipelines.report.advice import advised
from mmspeed.pipelines.run.run_folder import RunFolder
from tests.support.decoding import video_of
from tests.support.runs import small_config, small_tree
from tests.support.spawn import run_ranks

LINES = """
{"prompt": "a rabbit", "seed": 3}

{"prompt": "the sea", "negative": "a boat", "frames": 1, "height": 16, "width": 32}
{"prompt": "a rabbit"}
{"prompt": "a rabbit"}
"""


@pytest.fixture(scope="module")
def run(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    home = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("sample") / "home"))
    config = small_config(home, "train.steps=1", "validate.samples=0")
    TrainPipeline(config).run()
    return config.run_dir


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ({"conditioning": {"first": 0.5}}, [""]),
        ({"conditioning": {"first": 1}}, [" --image FILE"]),
        ({"conditioning": {"first_last": 1}}, [" --image FILE --last-image FILE"]),
        ({"task": "language", "texts": {"sources": [{"path": "a"}], "cache": "c"}}, [""]),
        ({"task": "language", "texts": {"sources": [{"path": "a", "content": "chat"}], "cache": "c"}}, [" --chat"]),
        ({"task": "language", "texts": {"sources": [{"path": "a"}], "cache": "c"}, "model": {"windows": [3, 7]}}, []),
        ({"control": True}, [" --control FILE"]),
    ],
)
def test_the_command_that_is_advised_has_what_the_run_needs(
    tmp_path: Path, tree: dict[str, Any], options: list[str]
) -> None:
    base = {} if "task" in tree else small_tree(tmp_path)
    if tree.pop("control", False):
        base["data"]["sources"] = [{"path": "clips.csv", "roles": {"control": "control_path"}}]
    config = make_config({**base, **tree}, (), origin="test")
    assert advised(Path("runs/x"), config) == [f'sample runs/x --prompt "..."{option}' for option in options]


def frames_of(path: Path) -> np.ndarray:
    return video_of(path)[0]


def sample_on_ranks(commands: list[list[str]]) -> tuple[int, str, str]:
    """Exit code, output and errors of this rank's command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(commands[dist.get_rank()])
    return code, out.getvalue(), err.getvalue()


def raw_videos(run: str, together: int | None, rank: int, world: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(latent, frames (F, H, W, 3) before any video file) of a process's share of three requests of one size, by their prompts."""
    pipe = TextToVideo.from_run(run, device="cpu")
    decode = pipe.codec.decode
    latents: list[np.ndarray] = []
    pipe.codec.decode = lambda x_1CThw: latents.append(x_1CThw.numpy().copy()) or decode(x_1CThw)  # type: ignore[method-assign, func-returns-value]
    requests = [VideoRequest(prompt, seed=1) for prompt in ("a rabbit", "the sea", "a hill")]
    videos = list(pipe.sample(requests, SamplerChoice(steps=4), together=together, rank=rank, world=world))
    pairs = zip(videos, latents, strict=True)
    return {request.prompt: (latent, video.frames_FHWC) for (request, video), latent in pairs}


def raw_on_ranks(run: str) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """`raw_videos` of this rank in batches of its own, and one at a time."""
    return [raw_videos(run, together, dist.get_rank(), dist.get_world_size()) for together in (None, 1)]


def disagreements(cases: list[list[tuple[str, str, int | None]]]) -> list[str]:
    """The error of each case, in which each rank has its own run folder, second prompt and steps; empty where there is none."""
    results = []
    for case in cases:
        folder, prompt, steps = case[dist.get_rank()]
        requests = [VideoRequest("a rabbit", seed=1), VideoRequest(prompt, seed=1)]
        try:
            require_same_sampling(TextToVideo.from_run(folder, device="cpu"), requests, SamplerChoice(steps), 2)
            results.append("")
        except UserError as error:
            results.append(str(error))
    return results


def test_processes_that_differ_make_no_video(run: Path, tmp_path: Path) -> None:
    """They left prompts out and overwrote the videos of others, or mixed those of two models."""
    other = Path(shutil.copytree(run, tmp_path / "other" / run.name))
    trained = RunFolder(run).config().model_copy(update={"output": str(tmp_path / "else"), "seed": 5})
    TrainPipeline(trained).run()
    shutil.rmtree(other / "checkpoints")
    shutil.copytree(tmp_path / "else" / run.name / "checkpoints", other / "checkpoints")
    usual: tuple[str, str, int | None] = (str(run), "the sea", None)
    cases = {
        "": usual,
        "prompt 2.prompt is the see, not the sea": (str(run), "the see", None),
        "model.patch_in.weight is ": (str(other), "the sea", None),
    }
    first, second = run_ranks(disagreements, 2, [[usual, mine] for mine in cases.values()])
    assert first == second and first[0] == ""
    for named, text in zip(list(cases)[1:], first[1:], strict=True):
        assert "on rank 1 (" in text and named in text, (named, text)


def test_a_file_of_prompts_makes_a_video_a_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text(LINES, encoding="utf-8")
    arguments = ["sample", str(run), "--prompts", str(tmp_path / "p.jsonl"), "--seed", "1", "--device", "cpu"]
    assert main([*arguments, "-o", str(tmp_path / "one" / "v.mp4")]) == 0
    names = ["v-0002.mp4", "v-0004.mp4", "v-0005.mp4", "v-0006.mp4"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "one" / name) for name in names]
    videos = {name: frames_of(tmp_path / "one" / name) for name in names}
    assert [video.shape[:3] for video in videos.values()] == [(5, 32, 48), (1, 16, 32), (5, 32, 48), (5, 32, 48)]
    # equal prompts with one seed give other videos, and a line's video is that of its prompt and seed alone
    assert np.abs(videos["v-0005.mp4"].astype(int) - videos["v-0006.mp4"]).mean() > 4
    alone = ["sample", str(run), "-p", "a rabbit", "--seed", "3", "-o", str(tmp_path / "alone.mp4"), "--device", "cpu"]
    assert main(alone) == 0
    # a value that is rounded otherwise in another process or batch moves all that H.264 makes of its block: means, not single pixels
    assert np.abs(frames_of(tmp_path / "alone.mp4").astype(int) - videos["v-0002.mp4"]).mean() <= 1
    # processes share the lines: each makes its own, and the same
    shared = run_ranks(sample_on_ranks, 2, [[*arguments, "-o", str(tmp_path / "two" / "v.mp4")]] * 2)
    assert [(code, [Path(line).name for line in out.splitlines()]) for code, out, _ in shared] == [
        (0, names[0::2]),
        (0, names[1::2]),
    ]
    for name in names:
        assert np.abs(frames_of(tmp_path / "two" / name).astype(int) - videos[name]).mean() <= 1


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "give --prompt TEXT or --prompts FILE"),
        (["-p", "a", "--prompts", "FILE"], "not both"),
        (["--prompts", "none.txt"], "none.txt: cannot be read"),
        (["--prompts", "FILE"], "line 2: a video of 6x32x48"),
        (["-p", "a", "--image", "a.png"], "trained without conditioning.first, so its model takes no such frames"),
    ],
)
def test_what_cannot_be_sampled_is_one_line(
    run: Path, tmp_path: Path, more: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "frames": 6}\n', encoding="utf-8")
    words = [str(tmp_path / "p.jsonl") if word == "FILE" else word for word in more]
    assert main(["sample", str(run), *words, "-o", str(tmp_path / "v.mp4"), "--device", "cpu"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mmspeed: error: ") and expected in line
    assert not list(tmp_path.glob("*.mp4"))


@pytest.mark.slow
def test_raw_frames_of_two_processes_are_those_of_one(run: Path) -> None:
    """One at a time to the bit; in batches, which are smaller with more processes, up to the rounding of a frame to 255 levels."""
    shares = run_ranks(raw_on_ranks, 2, str(run))
    for place, together in enumerate((None, 1)):
        whole = raw_videos(str(run), together, 0, 1)
        parts = shares[0][place] | shares[1][place]
        assert parts.keys() == whole.keys() and len(shares[1][place]) == 1
        for prompt, (latent, frames_FHWC) in whole.items():
            other, others_FHWC = parts[prompt]
            assert np.abs(latent - other).max() <= (1e-4 if together is None else 0)
            assert np.abs(frames_FHWC.astype(int) - others_FHWC).max() <= (1 if together is None else 0)


def test_where_videos_go(tmp_path: Path) -> None:
    assert output_paths(Path("a/fox.mp4"), 1) == [Path("a/fox.mp4")]
    assert output_paths(Path("fox"), 1) == [Path("fox.mp4")]
    assert output_paths(Path("a/fox.gif"), 2) == [Path("a/fox-0.gif"), Path("a/fox-1.gif")]
    assert sheet_path(Path("a/fox.mp4")) == Path("a/fox.png")
    assert sheet_path(Path("fox.png")) == Path("fox-sheet.png")
    with pytest.raises(UserError, match="is a folder"):
        output_paths(tmp_path, 1)
