"""What is wrong in a config is one line that names its key: an unknown key, a wrong type, a value out of range, keys that contradict."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmspeed.__main__ import main
from mmspeed.config import make_config
from mmspeed.config.methods import METHODS
from mmspeed.errors import UserError
from mmspeed.pipelines.inference.language import export_language_run
from tests.support.runs import CLIPS
from tests.support.tiny_repositories import save_wan
from tests.unit.pipelines.test_export_adapters import adapted_run, language_run

BUCKET = {"frames": 13, "height": 96, "width": 160}
AUTO, DDPM = "objective.shift=auto", "objective.kind=ddpm"
LINEAR = (AUTO, "objective.auto_shift.rule=linear")
NO_WEIGHT = (DDPM, "objective.zero_terminal_snr=true", "objective.prediction=v")
DIFFUSERS = ("model.kind=diffusers", "model.pretrained=a/b")
ADAPTED = (*DIFFUSERS, "model.adapter.kind=lora")
ONE_BYTE = (*ADAPTED, "device.dtype=bfloat16", "model.base.dtype=int8")
HOST = "model.base.place=host"
TARGETS = r"'model\.adapter\.targets': must be attention, attention\+mlp, blocks or a list of layers"
SHIFT = r"'objective\.shift': must be a number above 0, auto, or numbers by bucket such as {13x96x160: 3\.0}"

# Overrides of the smallest config, the last of which is wrong, and what is said; one for each kind of mistake and each rule of our own.
WRONG: list[tuple[tuple[str, ...], str]] = [
    # unknown keys
    (("trian={}",), r"unknown key 'trian'; did you mean 'train'"),
    (("caption_dropout=0.2",), r"unknown key 'caption_dropout'; did you mean 'train\.caption_dropout'"),
    ((DDPM, "objective.predicton=v"), r"unknown key 'objective\.predicton'; did you mean 'objective\.prediction'"),
    (("data.buckets.0.hight=9",), r"unknown key 'data\.buckets\.0\.hight'; did you mean 'data\.buckets\.0\.height'"),
    (("model.pretrained=a/b",), r"unknown key 'model\.pretrained': set `model\.kind: diffusers` beside it"),
    (("lora.rank=4",), r"unknown key 'lora'; did you mean 'model\(diffusers\)\.adapter'"),
    (
        ("model.adapter.kind=lora",),
        r"unknown key 'model\.adapter': adapters are of published models: set `model\.kind: diffus",
    ),
    (("model.base.dtype=int8",), r"unknown key 'model\.base': adapters are of published models"),
    # types, ranges and words
    (("train.steps=2.5",), r"'train\.steps': input should be a valid integer.*got 2\.5"),
    (("train.lr=.inf",), r"'train\.lr': input should be a finite number"),
    (("train.betas=[2, 3]",), r"'train\.betas\.0': input should be less than 1"),
    (("train=null",), r"'train': must be a section of keys"),
    (("trackers=wandb",), r"'trackers': must be a list"),
    (("device.kind=tpu",), r"'device\.kind': input should be 'auto', 'cpu'.*got 'tpu'"),
    (("vae.kind=diffusers",), r"'vae\.pretrained' is missing"),
    (("name=../up",), r"'name'"),
    # methods and their options
    (("method.kind=finetun",), r"method\.kind: 'finetun' is not known; did you mean 'finetune'\? \(known: finetune"),
    (("method={kind: 7}",), r"'method\.kind': input should be a valid string"),
    (("method.beta=1",), r"method\.beta: finetune has no such option \(it has none\)"),
    (("method={kind: preferences, bata: 1}",), r"method\.bata: preferences has no such option; did you mean 'beta'\?"),
    (("method={kind: preferences, beta: much}",), r"method\.beta: input should be a valid number.*got 'much'"),
    # rules of data
    (("data.sources=[]",), r"'data\.sources'"),
    ((f"data.buckets={[BUCKET, BUCKET]}",), r"13x96x160 is listed twice"),
    (("data.background=whitish",), r"'data\.background': 'whitish' is no colour: write #rrggbb"),
    (("data.missing_caption=default", "data.default_caption=' '"), r"default_caption is blank"),
    (("data.default_caption=a video",), r"missing_caption: default and default_caption go together"),
    (("data.mirror_words=[' ']",), r"'data\.mirror_words': ' ' is no word"),
    (("data.min={' ': 5}",), r"min and max: a column's name is blank"),
    (("data.min={a: 5}", "data.max={a: 4.5}"), r"min of a is 5, above its max of 4\.5"),
    (("data.caption_prefix=' '",), r"'data\.caption_prefix': it is blank"),
    (('data.caption_suffix="\\u200b"',), r"'data\.caption_suffix': it holds control or invisible characters"),
    ((f"data.caption_suffix={'x' * 1025}",), r"'data\.caption_suffix': it has 1025 characters, and at most 1024"),
    (
        ("preprocess.decoder=decord", "preprocess.decoder_device=run"),
        r"decoder_device: run goes with decoder: torchcodec",
    ),
    # rules of the objective
    (("objective.weighting=frame",), r"'objective\.weighting': input should be 'step', 'sample' or 'token'"),
    (("objective.shift=0",), SHIFT),
    (("objective.shift={}",), r"'objective\.shift': by bucket it needs one at least"),
    (("objective.shift={13x96: 2}",), r"'objective\.shift': '13x96' is no bucket: write frames x height x width"),
    (("objective.shift={13x96x160: 0}",), r"the shift of 13x96x160 is 0; it must be a number above 0"),
    (
        ("objective.shift={9x96x160: 2}",),
        r"objective\.shift has no number for 13x96x160, which is one of data\.buckets",
    ),
    (("objective.auto_shift.base_tokens=64",), r"'objective': auto_shift goes with shift: auto"),
    ((AUTO, "objective.auto_shift.max_shift=2"), r"max_shift goes with rule: exponential or linear"),
    ((AUTO, "objective.auto_shift.base_shift=0"), r"with rule: sqrt base_shift and max_shift must be above 0"),
    ((*LINEAR, "objective.auto_shift.max_shift=-1"), r"with rule: linear base_shift and max"),
    ((*LINEAR, "objective.auto_shift.base_tokens=5000"), r"max_tokens 4096 must be above base_tokens 5000"),
    ((*NO_WEIGHT, "objective.min_snr_gamma=5"), r"min_snr_gamma with zero_terminal_snr and prediction: v"),
    ((*NO_WEIGHT[:2], "objective.prediction=epsilon"), r"zero_terminal_snr"),
    (("sample.sampler=ddim",), r"sampler ddim does not go with objective flow: use auto or euler"),
    # published models
    (("model.kind=diffusers",), r"'model\.pretrained' is missing"),
    (("model.kind=difusers",), r"'model\.kind' is 'difusers': use 'sora', 'diffusers'"),
    ((*DIFFUSERS, "model.width=64"), r"unknown key 'model\.width'"),
    ((*ADAPTED, "model.adapter.rank=0"), r"'model\.adapter\.rank': input should be greater than or equal to 1"),
    ((*ADAPTED, "model.adapter.alpha=0"), r"'model\.adapter\.alpha': input should be greater than 0"),
    ((*ADAPTED, "model.adapter.alpha=-1"), r"'model\.adapter\.alpha': input should be greater than 0 \(got -1\)"),
    ((*ADAPTED, "model.adapter.targets=atention"), TARGETS),
    ((*ADAPTED, "model.adapter.targets=[]"), TARGETS),
    ((*ADAPTED, "model.adapter.kind=dora"), r"'model\.adapter\.kind': input should be 'lora' \(got 'dora'\)"),
    ((*ADAPTED, "model.adapter.dropout=1"), r"unknown key .*; the keys there are kind, rank, alpha, rslora, targets"),
    ((*ADAPTED, "model.adapter.use_dora=true"), r"adapters are LoRA alone; dropout, DoRA, LoKr"),
    ((*ADAPTED, "model.base.dtype=int8"), r"int8 is computed with in bfloat16: set device\.dtype: bfloat16"),
    ((*ADAPTED, "model.base.dtype=int4"), r"'model\.base\.dtype': input should be 'float32'.*'float8' \(got 'int4'\)"),
    (
        (*ONE_BYTE, "parallel.tp=2"),
        r"dtype int8 keeps layers that parallel\.tp cannot split: use bfloat16, or parallel",
    ),
    ((*ONE_BYTE, HOST, "parallel.strategy=ddp"), r"place host goes with parallel\.strategy auto or fsdp, not ddp"),
    ((*DIFFUSERS, HOST), r"place host is for weights that stay frozen: set model\.adapter"),
    ((*DIFFUSERS, "model.base.dtype=int8"), r"dtype int8 is for weights that stay frozen: set model\.adapter"),
    ((*DIFFUSERS, "parallel.dsp=2"), r"parallel\.dsp 2 .* model\.kind: diffusers has none"),
    # overrides that are none
    (("train.lr",), r"key=value"),
    (("data.buckets.1.frames=9",), r"has 1 entries"),
    (("data.buckets.0.frames.deep=9",), r"data\.buckets\.0\.frames"),
    (("sample.negative_prompt=dark: blurry",), r"'sample\.negative_prompt'"),  # YAML's mapping
]


def smallest() -> dict[str, Any]:
    return {"data": {"sources": [{"path": "clips"}], "buckets": [dict(BUCKET)]}}


@pytest.mark.parametrize(("overrides", "said"), WRONG, ids=[overrides[-1][:60] for overrides, _ in WRONG])
def test_a_mistake_is_one_line_that_names_its_key(
    overrides: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "preferences", "tests.support.preferences:Preferences")
    with pytest.raises(UserError, match=said) as caught:
        make_config(smallest(), overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model.shape=tiny-qwen3-0.6b", "model.adapter.kind=lora"),
            r"`adapter` trains beside a model that has learnt",
        ),
        (("model.pretrained=a/b", "model.base.dtype=float8"), r"dtype float8 is for weights that stay frozen"),
        (("model.pretrained=a/b", *ONE_BYTE[2:], "parallel.tp=2"), r"dtype int8 keeps layers that parallel\.tp cannot"),
        (("model.pretrained=a/b", "model.adapter={kind: lora, dropout: 1}"), r"unknown key 'model\.adapter\.dropout'"),
    ],
)
def test_adapters_of_language_models_are_refused_alike(overrides: tuple[str, ...], said: str) -> None:
    texts = {"sources": [{"path": "a.jsonl"}], "cache": "cache"}
    with pytest.raises(UserError, match=said) as caught:
        make_config({"task": "language", "texts": texts}, overrides)
    assert "\n" not in str(caught.value)


def test_data_must_be_given_and_several_mistakes_are_reported_together() -> None:
    with pytest.raises(UserError, match="'data' is missing"):
        make_config({"train": {}})
    with pytest.raises(UserError, match=r"train\.lr.*1 more: unknown key 'train\.stpes'"):
        make_config({**smallest(), "train": {"stpes": 5, "lr": -1}})


@pytest.mark.parametrize("override", ["data.min={a: many}", "objective.shift=-1", "train.stpes=5", "method.beta=1"])
def test_the_command_ends_with_one_line(override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(smallest()), encoding="utf-8")
    for command in ("train", "check", "preprocess"):
        assert main([command, str(path), override]) == 1
        captured = capsys.readouterr()
        (line,) = captured.err.strip().splitlines()
        assert override.split("=")[0] in line and "Traceback" not in line and captured.out == ""


def test_commands_on_adapters_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the model or the run's folder tells is wrong, such as targets that no layer has."""
    run, _ = adapted_run(tmp_path, save_wan(tmp_path / "base"))
    export_language_run(language_run(tmp_path, "first", shape="tiny-qwen3-30b-a3b"), tmp_path / "experts")
    experts = tmp_path / "runs" / "first" / "config.yaml"
    clips, adapter = f"data.sources=[{{path: {CLIPS}}}]", "model.adapter={kind: lora, targets: attention+mlp}"
    shutil.copytree(run, tmp_path / "unsaved", ignore=shutil.ignore_patterns("step-*"))
    for words, said in (
        (("train", run / "config.yaml", "name=new", clips, "model.adapter.targets=[to_qq]"), r"layer 'to_qq'; did you mean 'to_q'\?"),
        (("train", experts, "name=new", f"model={{pretrained: {tmp_path / 'experts'}}}", adapter), r"layers\.0\.mlp\.\S+ holds the weights of exp"),
        (("export", tmp_path / "unsaved", "-o", tmp_path / "new"), r"unsaved has no checkpoint yet"),
        (("export", run, "-o", tmp_path / "new", "--checkpoint", "best"), r"has no best checkpoint"),
        (("export", run, "-o", tmp_path / "base"), r"--out: \S+base exists already; name a new folder"),
    ):  # fmt: skip
        assert main([str(word) for word in words]) == 1
        *_, line = capsys.readouterr().err.strip().splitlines()
        assert re.search(rf"^mmspeed: error: .*{said}", line), line
    assert not (tmp_path / "new").exists()
