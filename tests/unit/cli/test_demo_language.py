"""The demo of the language task: its config is one of a family of transformers, and the short one runs to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmspeed.cli.app import app
from mmspeed.cli.demo_language import language_demo_config, run_language_demo
from mmspeed.errors import UserError
from mmspeed.models.language.families import config_tree
from mmspeed.pipelines.domains.language.domain import LanguageDomain


@pytest.mark.parametrize("short", [True, False])
def test_the_demos_model_can_be_exported(tmp_path: Path, short: bool) -> None:
    settings = LanguageDomain(language_demo_config(tmp_path, short)).use(1024).settings
    tree = config_tree(settings)
    assert tree["model_type"] == "qwen3_moe" and tree["num_experts"] == 8 and tree["vocab_size"] == 1024


@pytest.mark.slow
def test_the_short_demo_prints_a_sample_and_leaves_an_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = CliRunner().invoke(app, ["demo", "--task", "language", "--short", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8").startswith("Ham.\n")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "short-export")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    (tmp_path / "short-export" / "generation_config.json").unlink()
    with pytest.raises(UserError, match="is no export of a demo"):
        run_language_demo(tmp_path, short=True)
