"""Configs that read well and are wrong all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.config import load_config
from mmspeed.errors import UserError

DATA = "data: {sources: [{path: x}], buckets: [{frames: 5, height: 32, width: 48}]}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {steps: 5}\ntrain: {lr: 0.1}\n", r"line 3: duplicate key 'train'"),
        ("train: {betas: [2, 3]}\n", r"train.betas.0': input should be less than 1"),
        ("train: {lr: .inf}\n", r"train.lr': input should be a finite number"),
        ("sample: {sampler: ddim}\n", r"sampler ddim does not go with objective flow"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(DATA + text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        load_config(tmp_path / "run.yaml")
