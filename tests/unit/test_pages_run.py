"""The pages' code runs as it stands: an objective, a task, and the messages of docs/troubleshooting.md."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from mmspeed import rng
from mmspeed.__main__ import main
from mmspeed.config import dump_config
from mmspeed.config.docs import REQUIRED, default_of, show_value
from mmspeed.config.load import all_fields
from mmspeed.config.methods import METHODS
from mmspeed.config.schema import FlowConfig
from mmspeed.config.tasks import TASKS
from mmspeed.log import read_metrics
from mmspeed.media.rejections import Reason
from mmspeed.pipelines.diffusion.objective import mean_error
from mmspeed.shapes import Bucket
from tests.rules.sources import CODE, python_files, syntax
from tests.support.pages import ROOT, CodeBlock, blocks, blocks_under, check_command, command_lines, words_of
from tests.support.runs import losses, small_config
from tests.support.toy_runs import toy_config, write_toy_cache

DOCS = ROOT / "docs"
EXTENDING = DOCS / "extending.md"


def imported(code: str, name: str, folder: Path) -> ModuleType:
    """Code as a module, run once."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- docs/extending.md: an objective -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objective_page(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    code = "\n".join(blocks_under(EXTENDING, "An objective"))
    return imported(code, "objective_page", tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_a_perfect_prediction_samples_the_data(objective_page: ModuleType, sampler: str) -> None:
    objective = objective_page.DataObjective(FlowConfig(kind="flow", shift=2.0))
    x0, noise = (rng.normal((2, 3, 2, 4, 4), 0, name) for name in ("data", "noise"))
    sampled = objective.sample(lambda x, t_B: x0, noise, 5, sampler)
    torch.testing.assert_close(sampled, x0)
    with pytest.raises(Exception, match="use euler or heun"):
        objective.sample(lambda x, t_B: x0, noise, 5, "ddim")


def test_an_error_of_the_data_counts_as_one_of_the_velocity(objective_page: ModuleType) -> None:
    objective, t_B = objective_page.DataObjective(FlowConfig(kind="flow")), torch.tensor([0.25, 1.0])
    x0, noise = (rng.normal((2, 3, 2, 4, 4), 0, name) for name in ("data", "noise"))
    _, target = objective.training_pair(x0, noise, t_B)
    assert mean_error(target, target).tolist() == [0.0, 0.0]
    loss_B = mean_error(target + 0.5, target) * objective.weight(t_B)
    torch.testing.assert_close(loss_B, torch.tensor([(0.5 / 0.25) ** 2, 0.5**2]))


def test_the_objective_trains(objective_page: ModuleType, tmp_path: Path) -> None:
    bucket = Bucket(5, 16, 32)
    config = toy_config(tmp_path, "model.size=nano", "train.steps=2", bucket=bucket)
    write_toy_cache(config, bucket=bucket, sizes=(3, 2, 2, 4))
    objective_page.train(config)
    assert len(losses(config)) == 2 and all(math.isfinite(loss) for loss in losses(config))


def test_the_section_names_its_samplers(objective_page: ModuleType) -> None:
    section = objective_page.DataPredictionConfig(kind="data")
    assert section.samplers == objective_page.DataObjective.sampler_names


# -- docs/extending.md: a domain, a method ------------------------------------------------------------------------------------------


def test_the_domain_learns_by_either_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, program = blocks_under(EXTENDING, "A domain")
    method, method_program = blocks_under(EXTENDING, "A method")
    (config,) = blocks_under(EXTENDING, "A domain", "yaml")
    (tmp_path / "waves.yaml").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    imported(module, "waves", tmp_path)
    imported(method, "anchored", tmp_path)
    try:
        imported(program, "program", tmp_path)
        imported(method_program, "method_program", tmp_path)
    finally:
        TASKS.pop("waves", None)
        METHODS.pop("anchored", None)
    assert capsys.readouterr().out.count(f"step {yaml.safe_load(config)['train']['steps']}") >= 2
    plain, anchored = (read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in ("waves", "anchored"))
    losses = [row["loss"] for row in plain if row["kind"] == "train"]
    terms = [row["terms"] for row in anchored if row["kind"] == "train"]
    assert losses[-1] < losses[0] / 4 and losses[-1] < terms[-1]["loss"] < terms[0]["loss"]
    assert 0 < terms[0]["distance"] < terms[-1]["distance"]


# -- docs/python.md ---------------------------------------------------------------------------------------------------


def test_a_page_of_calls_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few steps, which do not learn: the fourth validation stops the longer run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run.yaml").write_text(dump_config(small_config(tmp_path)), encoding="utf-8")
    code = "\n".join(block.text for block in blocks(DOCS / "python.md"))
    for value, other in (('"steps": 200', '"steps": 2'), ("validate.every=50", "validate.every=1"), ("2e-3", "1e-30")):
        assert value in code
        code = code.replace(value, other)
    page = imported(code, "python_page", tmp_path)
    said = capsys.readouterr().out
    assert "runs/notebook: finished at step 2" in said and "on disk:" in said
    assert "runs/notebook: stopped and saved; the same command goes on at step 7" in said
    assert page.result.finished and page.config.conditioning.first == 0.5
    assert (tmp_path / "rabbit.mp4").is_file() and (tmp_path / "again.mp4").is_file()


# -- docs/troubleshooting.md ------------------------------------------------------------------------------------------

TROUBLE = DOCS / "troubleshooting.md"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page describes."""
    folder = tmp_path_factory.mktemp("trouble")
    assert main(["init", str(folder / "my-run")]) == 0
    (folder / "my-videos").mkdir()
    (folder / "clips.csv").write_text("file,text\na.mp4,A rabbit\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("block", [b for b in blocks(TROUBLE) if b.language == "console"], ids=str)
def test_a_command_says_what_the_page_says(
    block: CodeBlock, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.delitem(TASKS, "characters", raising=False)  # of another test of this process
    (line,) = command_lines(block)
    assert main(words_of(line)[1:]) != 0
    captured = capsys.readouterr()
    said = (captured.out + captured.err).replace(f"{workspace}/", "").splitlines()
    shown = block.text.splitlines()[1:]
    assert shown and not [one for one in shown if one not in said], said


def message_templates() -> str:
    """Every string of the code in which `…` stands for values, a line each."""
    texts = []
    for path in python_files(*CODE):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_of_the_table_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(.*)` \| [^|]+ \|$", TROUBLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 8
    templates = message_templates()
    assert not [row for row in rows if row not in templates]


# -- tables that the code knows ---------------------------------------------------------------------------------------


def test_the_twenty_keys_are_twenty_with_their_defaults() -> None:
    fields = {re.sub(r"\(\w+\)|\[\]", "", path): field for path, field in reversed(all_fields())}
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`|must be given) \| .+ \|$", text, re.MULTILINE)
    assert len(rows) == len({key for key, _ in rows}) == 20
    for key, default in rows:
        if key.endswith(".kind"):
            section = default_of(fields[key.removesuffix(".kind")])
            assert section["kind"] == default, key
        else:
            value = default_of(fields[key])
            assert (value is REQUIRED and not default) or show_value(value) == default, key


def test_every_reason_for_a_rejection_is_explained() -> None:
    text = (DOCS / "preparing-data.md").read_text(encoding="utf-8")
    assert not [reason for reason in Reason if f"| `{reason}` | {reason.explanation} |" not in text]


# -- docs/preprocess.md --------------------------------------------------------------------------------------------------

STOPS = 'while [ ! -e runs/my-run/stop ]; do sleep 0.05; done; rm runs/my-run/stop; echo "$@" > srun.txt'


def run_job(folder: Path, srun: str, signal_after: str | None = None) -> tuple[int, str]:
    """(exit code, requeued job) of the page's job file, with `srun` a script of this text and no scheduler."""
    (job,) = (block.text for block in blocks(DOCS / "preprocess.md") if block.text.startswith("#!/bin/bash"))
    (folder / "runs" / "my-run").mkdir(parents=True, exist_ok=True)
    scontrol = 'if [ "$1" = requeue ]; then echo "$2" > requeued.txt; else echo node-1; echo node-2; fi'
    for name, text in {
        "my-run.sbatch": job,
        "srun": f"#!/bin/bash\n{srun}\n",
        "scontrol": f"#!/bin/bash\n{scontrol}\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "node-[1-4]"}
    environment = os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.Popen([folder / "my-run.sbatch"], cwd=folder, env=environment)
    if signal_after is not None:
        deadline = time.monotonic() + 20
        while not (folder / signal_after).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
    code = process.wait(timeout=30)
    requeued = folder / "requeued.txt"
    return code, requeued.read_text().strip() if requeued.exists() else ""


def test_the_job_file_stops_the_run_and_requeues_itself(tmp_path: Path) -> None:
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    (tmp_path / "runs" / "my-run" / "stop").touch()  # of a turn before: it must not stop this one
    assert run_job(tmp_path, f"touch begun; {STOPS}", "begun") == (0, "17")
    words = (tmp_path / "srun.txt").read_text().split()
    assert words[:3] == ["torchrun", "--nnodes", "4"] and "node-1:29500" in words
    check_command(words)


def test_the_job_file_requeues_no_run_that_ended(tmp_path: Path) -> None:
    assert run_job(tmp_path, "exit 0") == (0, "")
    assert run_job(tmp_path, "exit 3") == (3, "")
    # the run fails while it saves
    assert run_job(tmp_path, f"touch begun; {STOPS}; exit 1", "begun") == (1, "")


# -- docs/language-models.md ------------------------------------------------------------------------------------------


def test_a_language_model_is_trained_sampled_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both configs of the page that name a shape, for two steps each of short packs, and the commands behind them."""
    page = DOCS / "language-models.md"
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"Once upon a time {number} rabbits met {number * number} foxes."} for number in range(200)]
    (tmp_path / "stories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    small = ("train.steps=2", "train.batch_size=2", "sequence_length=64", "device.kind=cpu", "validate.report=false")
    yamls = [block.text for block in blocks(page) if block.language == "yaml"]
    texts = [text for text in yamls if "\nmodel:" in text]  # the others train a published one
    for name, text in zip(("stories", "experts"), texts, strict=True):
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        own = () if name == "stories" else (f"name={name}", f"texts.cache=cache/{name}")
        assert main(["train", f"{name}.yaml", *small, *own]) == 0
        kinds = [row["kind"] for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")]
        assert "train" in kinds
    commands = next(
        block for block in blocks(page) if block.language == "bash"
    )  # those of layouts: test_demo_layout.py
    for line in command_lines(commands):
        capsys.readouterr()
        assert main(words_of(line)[1:]) == 0
        if " sample " in line:
            assert capsys.readouterr().out.startswith("Once upon a time")
    assert (tmp_path / "stories-out" / "model.safetensors").is_file()
