"""README's Python example runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from mmspeed.config import dump_config
from tests.support.runs import small_config
from tests.support.spawn import run_apart

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_python_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 1
    (tmp_path / "my-run.yaml").write_text(dump_config(small_config(tmp_path)), encoding="utf-8")
    script = tmp_path / "example.py"
    script.write_text(blocks[0].replace("train.steps=200", "train.steps=2"), encoding="utf-8")
    code, said = run_apart(tmp_path, runpy.run_path, str(script), None, "__main__")
    assert code == 0, said
    assert (tmp_path / "rabbit.mp4").stat().st_size > 500
    assert "8 of 8 sources" in said
    assert (tmp_path / "runs" / "small" / "report.html").exists()
