"""Configs that read well and are wrong all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.config import load_config
from mmspeed.config.places import absent_hint
from mmspeed.errors import UserError

DATA = "data: {sources: [{path: x}], buckets: [{frames: 5, height: 32, width: 48}]}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {steps: 5}\ntrain: {lr: 0.1}\n", r"line 3: duplicate key 'train'"),
        ("train: {betas: [2, 3]}\n", r"train.betas.0': input should be less than 1"),
        ("train: {lr: .inf}\n", r"train.lr': input should be a finite number"),
        (
            "model: {pretrained: a/b}\n",
            r"unknown key 'model.pretrained': set `model.kind: diffusers` beside it for a published video model",
        ),
        ("lora: {rank: 4}\n", r"unknown key 'lora': adapters train in your own loop, with peft"),
        ("train: {lora: true}\n", r"unknown key 'train.lora': adapters train in your own loop"),
        ("sample: {sampler: ddim}\n", r"sampler ddim does not go with objective flow"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(DATA + text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        load_config(tmp_path / "run.yaml")


def test_a_source_that_is_an_address_stays_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(DATA.replace("path: x", "path: 's3://bucket/set'"), encoding="utf-8")
    assert load_config(tmp_path / "run.yaml").data.sources[0].path == "s3://bucket/set"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3:/bucket/set", "write s3://bucket/set"),  # as a Path of Python
        (
            "owner/name",
            "hf://datasets/owner/name, or download it: `hf download --repo-type dataset owner/name --local-dir name`",
        ),
        ("nothing", "does not exist; correct the path"),
        ("nothing/clips.csv", "does not exist; correct the path"),
        ("a/b/c/d", "does not exist; correct the path"),
    ],
)
def test_places_that_are_no_folders_have_advice(tmp_path: Path, path: str, words: str) -> None:
    hint = absent_hint(path if ":" in path else tmp_path / path)
    assert words in hint and ("hub" in hint) == (path == "owner/name")
