"""`mmspeed evaluate`: an adapter beside its base, the same at each call, the measures of videos, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from mmspeed.__main__ import main
from mmspeed.cli.init import write_config
from mmspeed.config import load_config, make_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.inference.measures import ClipScore, diversity, flicker, motion
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.pipelines.report.evaluation import EvaluationJob, evaluate_run
from mmspeed.pipelines.report.scores import scores_of
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.support.runs import small_config
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import save_wan, save_wan_images

SMALL = (
    "data.limit=8", "data.buckets=[{frames: 13, height: 32, width: 48}]", "data.val_fraction=0.4", "validate.samples=3",
    "validate.prompts=[]", "sample.steps=1", "train.warmup_steps=0", "train.lr=0.01", "memory.fraction=null",
    "device.dtype=float32", "model.adapter.kind=lora", "model.adapter.rank=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan with a run of an adapter that learned, and of one that did not: its B is 0."""
    folder = tmp_path_factory.mktemp("evaluated")
    save_wan(folder / "tiny-wan")
    write_config(folder / "own.yaml", model=str(folder / "tiny-wan"))
    for name, steps, rate in (("learned", 2, 0.01), ("zero", 1, 1e-30)):
        config = load_config(folder / "own.yaml", (*SMALL, f"name={name}", f"train.steps={steps}", f"train.lr={rate}"))
        TrainPipeline(config, online=True).run()
    return folder / "runs"


def evaluated(run: Path, **options: object) -> dict[str, object]:
    """What evaluation.json holds."""
    result = evaluate_run(EvaluationJob(run, **options))  # type: ignore[arg-type]
    assert result is not None
    return dict(json.loads(result.write()[0].read_text(encoding="utf-8")))


def test_an_adapter_moves_the_loss_and_its_base_is_the_same(home: Path) -> None:
    base, run = evaluated(home / "learned", requests=())["rows"]  # type: ignore[misc]
    last = [json.loads(line) for line in (home / "learned" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in last if row["kind"] == "validation"][-1]
    assert run["by_quantile"] == trained["by_quantile"] and base["loss"] != run["loss"]
    zero_base, zero_run = evaluated(home / "zero", requests=())["rows"]  # type: ignore[misc]
    assert zero_base["by_quantile"] == zero_run["by_quantile"] == base["by_quantile"]


def test_the_command_writes_table_page_and_videos(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "score.py"
    script.write_text('import os, sys; print(\'{"quality": {"files": %d}}\' % len(os.listdir(sys.argv[1])))')
    command = f"{sys.executable} {script} {{folder}}"
    words = ["evaluate", str(home / "learned"), "-p", "a rabbit", "--layout", "vbench", str(tmp_path / "v")]
    assert main([*words, "--score", command]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1:3] for line in out.splitlines() if line.startswith("quality.files")] == [["2", "2"]]
    assert sorted(path.name for path in (tmp_path / "v" / "run").iterdir()) == ["a rabbit-0.mp4", "a rabbit-1.mp4"]
    page = Path(out.splitlines()[-1]).read_text(encoding="utf-8")
    assert page.count("<video") == 4 and "diversity" in page


def test_another_process_writes_the_same_bytes(home: Path) -> None:
    words = ["evaluate", str(home / "learned"), "-p", "a rabbit", "--checkpoint", "2"]
    assert main(words) == 0
    folder = home / "learned" / "evaluation" / "step-00000002-ema"
    first = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert len(first) == 6 and {path.suffix for path in first} == {".json", ".html", ".mp4"}
    subprocess.run([sys.executable, "-m", "mmspeed", *words], check=True, capture_output=True, timeout=200)
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == first


def tiny_clip(folder: Path) -> Path:
    """The folder of a CLIP of random weights: a word-level tokenizer, pictures of 32 pixels."""
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        "a</w>",
        *(f"{letter}{end}" for letter in ascii_lowercase for end in ("", "</w>")),
    ]
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(dict.fromkeys(words))}))
    (folder / "words" / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer.from_pretrained(folder / "words", model_max_length=12)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    texts = {**size, "vocab_size": len(tokenizer), "max_position_embeddings": 12, "eos_token_id": 1, "bos_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(
            CLIPConfig(text_config=texts, vision_config={**size, "image_size": 32, "patch_size": 16}, projection_dim=8)
        )
    model.save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(size=32, crop_size=32), tokenizer).save_pretrained(folder)
    return folder


def test_a_clip_score_is_transformers_own(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, prompt = tiny_clip(tmp_path / "clip"), "a rabbit that is longer than clip reads"
    assert main(["evaluate", str(home / "learned"), "-p", prompt, "--clip", str(weights), "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("CLIP")] == [["CLIP", "score"]]
    frames = [np.full((20, 30, 3), value, np.uint8) for value in (0, 90, 255)]
    model, processor = CLIPModel.from_pretrained(weights), CLIPProcessor.from_pretrained(weights)
    inputs = processor(text=[prompt], images=frames, return_tensors="pt", truncation=True)
    logits = model(**inputs).logits_per_image / model.logit_scale.exp()
    expected = float((100 * logits).clamp(min=0).mean())
    assert ClipScore(str(weights), Device("cpu", 0))(prompt, np.stack(frames)) == pytest.approx(expected)


def test_a_layout_names_videos_as_its_reader_does(home: Path, tmp_path: Path) -> None:
    texts = ("Is it so? A house.", "a  b")
    for layout, stems in (("vbench", texts), ("fastvideo", ("Is it so A house", "a b"))):
        folder = tmp_path / f"{layout} of mine"
        requests = tuple(map(VideoRequest, texts))
        evaluated(home / "learned", requests=requests, layout=(layout, folder), steps=1)
        names = sorted(path.name for path in (folder / "base").iterdir())
        assert names == sorted(f"{stem}-{n}.mp4" for stem in stems for n in (0, 1))
        with pytest.raises(UserError, match="holds other files, such as"):
            evaluated(home / "learned", requests=requests[:1], layout=(layout, folder), steps=1)


def test_a_model_of_given_frames_takes_them_from_the_file_of_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_wan_images(tmp_path / "tiny-wan")
    write_config(tmp_path / "own.yaml", model=str(tmp_path / "tiny-wan"))
    config = load_config(tmp_path / "own.yaml", (*SMALL, "name=images", "train.steps=1"))
    TrainPipeline(config, online=True).run()
    assert "of given files" in str(evaluated(config.run_dir)["notes"])
    capsys.readouterr()
    assert main(["evaluate", str(config.run_dir), "-p", "a"]) != 0
    assert "of given frames alone: give --image, or a .jsonl file of --prompts" in capsys.readouterr().err
    Image.new("RGB", (48, 32), "red").save(tmp_path / "red.png")
    rows = [{"prompt": "a", "image": "red.png", "seed": seed} for seed in (7, 9)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["evaluate", str(config.run_dir), "--prompts", str(tmp_path / "p.jsonl"), "--seeds", "2"]) == 0
    table = json.loads(Path(capsys.readouterr().out.splitlines()[-2]).read_text())
    assert [(one["seed"], Path(one["image"]).name) for one in table["videos"]] == [
        (seed, "red.png") for seed in (7, 8, 9, 10)
    ]


def on_ranks(run: Path) -> list[float] | None:
    result = evaluate_run(EvaluationJob(run, requests=(), device="cpu"))
    return (
        None if dist.get_rank() else [value for row in (result.rows if result else []) for value in row["by_quantile"]]
    )


@pytest.mark.slow
def test_four_processes_measure_the_losses_of_one(home: Path) -> None:
    rows = evaluated(home / "learned", requests=())["rows"]
    alone = [value for row in rows for value in row["by_quantile"]]  # type: ignore[attr-defined]
    assert run_ranks(on_ranks, 4, home / "learned")[0] == pytest.approx(alone, abs=1e-6)


def test_a_run_from_random_weights_has_no_base(small_cache: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_cache, tmp_path / "home"))
    first = small_config(folder, "train.steps=1", "validate.samples=0")
    TrainPipeline(first).run()
    alone = evaluated(first.run_dir, requests=(VideoRequest("a rabbit"),), seeds=1, steps=1)
    assert [row["of"] for row in alone["rows"]] == ["run"] and "no base" in str(alone["notes"])  # type: ignore[attr-defined]
    second = small_config(
        folder, "name=second", "train.steps=1", "validate.samples=0", f"train.start_from={first.run_dir}"
    )
    TrainPipeline(second).run()
    both = evaluated(second.run_dir, requests=(VideoRequest("a rabbit"),), seeds=1, steps=1)
    base, _ = both["rows"]  # type: ignore[misc]
    assert base["motion"] == alone["rows"][0]["motion"]  # type: ignore[index]


def made_run(folder: Path, validation: float, name: str = "first", **train: object) -> Path:
    """The folder of a run of a language model of three steps."""
    lines = [json.dumps({"text": f"the rabbit {n} runs over a meadow of {n * n} flowers"}) for n in range(200)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    texts = {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": validation}
    tree = {
        "task": "language", "name": name, "output": str(folder / "runs"), "texts": texts,
        "model": {"shape": "tiny-qwen3-0.6b"}, "sequence_length": 64, "device": {"kind": "cpu"},
        "train": {"steps": 3, "batch_size": 2, "lr": 1e-2, "warmup_steps": 0, **train},
    }  # fmt: skip
    config = make_config(tree, (), origin="test")
    TextPreparation(config).build()
    TrainPipeline(config).run()
    return config.run_dir


def test_measures_have_their_closed_forms() -> None:
    ramp = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.full((1, 2, 2, 3), 10, np.uint8)
    swing = (np.arange(5) % 2).astype(np.uint8)[:, None, None, None] * np.full((1, 2, 2, 3), 255, np.uint8)
    assert motion(ramp) == pytest.approx(10 / 255) and flicker(ramp) == 0
    assert motion(swing) == 1 and flicker(swing) == 2
    assert diversity([ramp, ramp]) == 0 and diversity([swing, 255 - swing, swing]) == pytest.approx(2 / 3)
    assert (motion(ramp[:1]), flicker(ramp[:2]), diversity([ramp])) == (None, None, None)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("true", "write {folder}"),
        ("'true {folder}", "cannot be split"),
        ("no-such-command {folder}", "cannot be started"),
        ("sh -c 'echo gone >&2; exit 3' {folder}", "exit code 3: gone"),
        ("echo {folder}", "printed no JSON"),
        ("echo 3 {folder}", "printed no JSON"),
        ("""sh -c 'echo "{\\"a\\": NaN}"' {folder}""", "NaN is no number of JSON"),
        ("cat {folder}/../nothing -", "ended with exit code 1"),  # which waits for no one to type
        ("sh -c 'echo [1]' {folder}", "without a named number"),
    ],
)
def test_a_score_command_that_gives_none_is_refused(command: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--score") as caught:
        scores_of(command, tmp_path)
    assert message in str(caught.value)


def test_no_shell_reads_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "$(touch x); y"
    assert scores_of(
        """python3 -c 'import sys, json; print(json.dumps({"same": sys.argv[1].endswith("; y")+0}))' {folder}""", folder
    ) == {"same": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "vbench", "v", "-p", "a/b"], "no file can be named"),
        (["--layout", "vbench", "v", "-p", "a" * 260], "no file can be named"),
        (["--layout", "fastvideo", "v", "-p", "a/b", "-p", "ab"], "'a/b' and 'ab' name one file"),
        (["-p", "a", "--prompts", "a.txt"], "give --prompt TEXT or --prompts FILE, not both"),
        (["--prompts", "no-such.txt"], "no-such.txt: cannot be read"),
        (["--checkpoint", "77"], "has no checkpoint '77'"),
        (["--clip", "no-such-folder/at/all", "-p", "a"], "--clip no-such-folder/at/all"),
        (["--score", "true"], "write {folder}"),
        (["--seeds", "0"], "seeds"),
    ],
)
def test_bad_input_is_one_line(
    home: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(home / "learned"), *options]) != 0
    assert message in capsys.readouterr().err


def test_a_language_model_has_a_base_where_it_began_from_one(tmp_path: Path) -> None:
    first = made_run(tmp_path, validation=0.2)
    (alone,) = evaluated(first)["rows"]  # type: ignore[misc]
    second = made_run(tmp_path, validation=0.2, name="second", start_from=str(first))
    both = evaluated(second)
    base, run = both["rows"]  # type: ignore[misc]
    assert base["loss"] == alone["loss"] != run["loss"] and "lm_eval --model hf" in str(both["notes"])
    with pytest.raises(UserError, match="are of videos"):
        evaluated(second, steps=3)
