"""Secrets never reach lines, run.json or pages."""

from __future__ import annotations

import io
import json
import logging
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed import log
from mmspeed.cli.failures import report
from mmspeed.errors import UserError
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.redaction import redacted, redacted_tree
from tests.support.character_runs import character_config

WORD = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%._~-", min_size=8, max_size=30)
NAMES = [
    "X-Amz-Signature", "X-Amz-Security-Token", "X-Goog-Credential", "sig", "token", "access_token", "api_key",
    "AWSAccessKeyId",
]  # fmt: skip


@given(secret=WORD.map(lambda word: f"s3cr3t{word}"))
def test_no_secret_of_an_address_is_left(secret: str) -> None:
    forms = [
        f"https://{secret}@host.org/a.mp4",
        f"s3://key:{secret}@bucket/x",
        f"from s3://key:{secret}/b+{secret}@{secret}@bucket/x, https://{secret}@{secret}@host/a",
        f"cannot read 'https://host/a.mp4?part=1&{{}}={secret}&more=2' now",
        f"Authorization: Bearer {secret}",
        f"pipe:curl -H 'Authorization: {secret}' https://host/x.tar",
    ]
    for form in forms:
        for name in NAMES if "{}" in form else [""]:
            assert secret not in redacted(form.replace("{}", name), {})


@pytest.mark.parametrize(
    "text",
    [
        "https://host.org/a@b/c.mp4?frames=16&name=cat",
        "https://host.org:80/a.mp4, 'http://host:80/b', me@host.org",
        "hf://datasets/user/set@main/train.tar",
        "runs/my-run: step 12, loss 0.5 (a@b.org)",
        "s3://bucket/my-set/index/{000..009}.tar",
        "set HF_TOKEN, or bearer bonds",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert redacted(text, {}) == text


def test_values_of_secret_variables_are_hidden_and_others_are_not(tmp_path: Path) -> None:
    variables = {
        "HF_TOKEN": "hf_abcdefgh", "AWS_SECRET_ACCESS_KEY": "q/1+xyz98", "WANDB_API_KEY": "0123456789",
        "TOKENIZERS_PARALLELISM": "parallelism", "EDITOR": "emacs-nox-29", "SHORT_TOKEN": "abc",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path),
    }  # fmt: skip
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        assert redacted(f"<{variables[name]}>", variables) == "<***>"
    for name in ("TOKENIZERS_PARALLELISM", "EDITOR", "SHORT_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        assert redacted(variables[name], variables) == variables[name]


def test_lines_of_the_log_and_errors_are_redacted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SECRET", "opensesame")
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    package = logging.getLogger("mmspeed")
    before, propagates, level = list(package.handlers), package.propagate, package.level
    try:
        log.setup()
        log.get_logger("train").info("reading %s", "https://user:pw123@host/x?token=abc")
        try:
            raise ValueError("it was opensesame")
        except ValueError:
            log.get_logger("train").exception("failed")
    finally:
        package.handlers[:], package.propagate = before, propagates
        package.setLevel(level)
    assert report(UserError("https://user:pw123@host is away; opensesame"), debug=True) == 1
    text = stream.getvalue()
    assert "reading https://***@host/x?token=***" in text and "ValueError: it was ***" in text
    assert "error: https://***@host is away; ***" in text
    assert not any(secret in text for secret in ("pw123", "abc", "opensesame"))


def test_a_run_folder_shows_secrets_to_nobody(tmp_path: Path) -> None:
    plain = character_config(tmp_path)
    RunFolder(plain.run_dir).write_start(plain, {"data": {"place": "https://u:pw123456@host/x"}}, {})
    assert json.loads((plain.run_dir / "run.json").read_text()) == {"data": {"place": "https://***@host/x"}}
    assert stat.S_IMODE((plain.run_dir / "config.yaml").stat().st_mode) & 0o600 == 0o600
    secret = plain.model_copy(update={"name": "s3://u:pw/12@3456@bucket"})
    RunFolder(tmp_path / "other").write_start(secret, {}, {})
    assert stat.S_IMODE((tmp_path / "other" / "config.yaml").stat().st_mode) == 0o600
    assert redacted_tree(["a", {"b": ("https://u:p@h", 1)}]) == ["a", {"b": ["https://***@h", 1]}]
