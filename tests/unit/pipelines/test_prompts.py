"""Files of prompts, the noise of equal ones, and several videos in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.pipelines.inference.prompts import VideoRequest, noise_names, read_requests


def test_a_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffa rabbit \r\n\n  ein Hügel\n".encode())
    assert read_requests(tmp_path / "p.txt") == [VideoRequest("a rabbit", line=1), VideoRequest("ein Hügel", line=3)]


def test_json_lines_have_settings_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "", "seed": 0, "negative": "b", "width": 64}\n', encoding="utf-8")
    assert read_requests(tmp_path / "p.jsonl") == [VideoRequest("", "b", 0, width=64, line=1)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a", "sede": 1}', "line 2: unknown key 'sede'; did you mean 'seed'?"),
        ('{"text": "a"}', "line 2: 'prompt' is missing"),
        ('{"prompt": "a", "seed": -1}', "line 2: 'seed': input should be greater than or equal to 0"),
        ('{"prompt": "a"', "line 2: invalid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_requests(tmp_path / "p.jsonl")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\n \n", "there is no prompt in it"), (b"a\n\xff\n", "is no UTF-8 text")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "p.txt").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        read_requests(tmp_path / "p.txt")


def test_equal_prompts_of_one_seed_have_noise_of_their_own() -> None:
    assert noise_names([("a", 0), ("a", 1), ("a", 0), ("b", 1)]) == ["a", "a", "a-1", "b"]
