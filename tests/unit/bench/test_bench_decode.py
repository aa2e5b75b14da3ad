"""`mmspeed bench decode` on a few real clips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspeed.__main__ import main
from tests.support.media import write_video


@pytest.mark.slow
def test_decoders_are_compared_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_video(tmp_path / "videos" / "a.mp4", frames=9)
    write_video(tmp_path / "videos" / "b.ts", frames=9)
    words = ["bench", "decode", "--videos", str(tmp_path / "videos"), "--size", "32x48", "--rounds", "1", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["files"], result["frames"], result["rows"][0]["name"]) == (2, 18, "pyav")
    for row in result["rows"]:
        assert row["frames_per_s"] > 0 and row["cpu_ms_per_frame"] >= 0
        refused = {} if row["name"] == "pyav" else {"container that PyAV alone reads": 1}
        assert (row["files_read"], row["refusals"]) == (2 - len(refused), refused)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--videos", str(tmp_path)]) == 1
    assert "holds no video files" in capsys.readouterr().err
    assert main(["bench", "decode", "--size", "wide"]) == 1
    assert "--size wide: give height and width" in capsys.readouterr().err
