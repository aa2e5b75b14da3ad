"""The exact witness sees one bit: its comparing functions on small made-up records, and its sides."""

from __future__ import annotations

import io
import json
import math
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.golden import exact
from tests.golden.exact_cases import CACHES, QUICK, RUNS
from tests.golden.exact_records import Record, difference, read_cache, read_run, read_tensors, renamed

NAME, BIAS = "optimizer.state.blocks.0.mlp.up.weight.exp_avg", "model.patch_in.bias"


def record(**changes: float | None) -> Record:
    numbers = {f"step {step} {name}": 1.5 + step / 3 for step in (1, 2) for name in ("loss", "grad_norm")}
    return {**numbers, **changes, NAME: torch.linspace(-1, 1, 12).view(3, 4), BIAS: torch.arange(3.0)}


def test_one_bit_of_a_number_shows_with_both_values() -> None:
    loss = 1.5 + 2 / 3
    values = loss, math.nextafter(loss, 3.0)
    expected = f"step 2 loss: {values[0].hex()} ({values[0]}) against {values[1].hex()} ({values[1]})"
    assert difference(record(), record(**{"step 2 loss": values[1]}), {}) == expected
    assert difference(record(), record(), {}) is None and difference({}, {}, {}) == "nothing was compared"


def test_the_sign_of_zero_and_a_missing_number_show() -> None:
    assert difference({"loss": 0.0}, {"loss": -0.0}, {}) == "loss: 0x0.0p+0 (0.0) against -0x0.0p+0 (-0.0)"
    missing = difference(record(), record(**{"step 1 grad_norm": None}), {})
    assert missing is not None and missing.startswith("step 1 grad_norm: ") and missing.endswith("against None")


def test_what_one_side_lacks_shows() -> None:
    more = record(**{"step 3 loss": 1.0})
    assert difference(more, record(), {}) == "step 3 loss: only the old code has it"
    assert difference(record(), more, {}) == "step 3 loss: only the new code has it"
    shorter = {name: value for name, value in record().items() if name != BIAS}
    assert difference(record(), shorter, {}) == f"{BIAS}: only the old code has it"


def test_one_bit_of_a_tensor_shows_with_its_place_and_both_values() -> None:
    tensor = torch.linspace(-1, 1, 12).view(3, 4)
    tensor.view(torch.int32)[2, 1] ^= 1
    before, after = float(torch.linspace(-1, 1, 12)[9]), float(tensor[2, 1])
    expected = f"{NAME}: 1 of 12 numbers, at 9: {before.hex()} ({before}) against {after.hex()} ({after})"
    assert difference(record(), {**record(), NAME: tensor}, {}) == expected
    both = difference(record(), {**record(), NAME: tensor, BIAS: torch.ones(3)}, {})
    assert both == f"{expected}; 2 of 6 differ"


def test_a_tensor_of_another_kind_shows() -> None:
    tensor = torch.linspace(-1, 1, 12).view(3, 4)
    for other, kind in ((tensor.bfloat16(), "torch.bfloat16 [3, 4]"), (tensor.view(12), "torch.float32 [12]")):
        assert difference(record(), {**record(), NAME: other}, {}) == f"{NAME}: torch.float32 [3, 4] against {kind}"
    nan: Record = {BIAS: torch.tensor([math.nan, 0.0, 1.0])}
    assert difference(nan, nan, {}) is None
    assert difference({BIAS: torch.tensor(0.0)}, {BIAS: torch.tensor(-0.0)}, {}) is not None  # no dims


def test_renamed_tensors_are_compared_under_their_new_names() -> None:
    table = {"mlp.up": "feed_forward.inner"}
    new = NAME.replace("mlp.up", "feed_forward.inner")
    assert renamed(NAME, table) == new
    assert renamed("model.mlp.upper.weight", table) == "model.mlp.upper.weight"  # whole words only
    moved = {new if name == NAME else name: value for name, value in record().items()}
    assert difference(record(), moved, table) is None
    assert difference(record(), moved, {}) is not None


# ---- files ----


def write_checkpoint(folder: Path, chunks: list[list[int]]) -> torch.Tensor:
    """A checkpoint of one tensor [4, 2] whose rows two ranks hold; `chunks`: [first row, rows] of each."""
    whole, entries = torch.arange(8.0).view(4, 2), []
    folder.mkdir(parents=True)
    for number, (first, rows) in enumerate(chunks):
        save_file({"model.w": whole[first : first + rows].clone()}, folder / f"shard-{number}.safetensors")
        entries.append({"file": f"shard-{number}.safetensors", "offsets": [first, 0], "shape": [rows, 2]})
    index = {"tensors": {"model.w": {"shape": [4, 2], "dtype": "float32", "chunks": entries}}}
    (folder / "index.json").write_text(json.dumps(index))
    return whole


def test_parts_of_ranks_are_put_together(tmp_path: Path) -> None:
    for name, chunks in (("one", [[0, 4]]), ("two", [[2, 2], [0, 2]])):
        whole = write_checkpoint(tmp_path / name, chunks)
        assert torch.equal(read_tensors(tmp_path / name)["model.w"], whole)
    write_checkpoint(tmp_path / "lacking", [[0, 3]])
    with pytest.raises(ValueError, match=r"model\.w is not whole"):
        read_tensors(tmp_path / "lacking")


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "checkpoints" / "step-2", [[0, 4]])
    (tmp_path / "checkpoints" / "latest.json").write_text('{"latest": "step-2"}')
    rows = [
        {"kind": "train", "step": 1, "loss": 0.1, "grad_norm": None, "samples": 3},
        {"kind": "cache", "step": 1},
        {"kind": "validation", "step": 1, "loss": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers: Record = {"step 1 loss": 0.1, "step 1 grad_norm": None, "step 1 samples": 3, "step 1 held-out loss": 0.3}
    assert difference(read_run(tmp_path), {**numbers, "model.w": whole}, {}) is None


def write_cache(folder: Path, payload: bytes = b"1", key: str = "ab", table: bytes = b"2", codec: float = 3) -> Record:
    for name in ("texts", "index", "codec"):
        (folder / name).mkdir(parents=True)
    with tarfile.open(folder / "texts" / "000000.tar", "w") as tar:
        member = tarfile.TarInfo(f"{key}.safetensors")
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    (folder / "index" / "texts-000000.parquet").write_bytes(table)
    (folder / "cache.json").write_text(str(folder))
    save_file({"w": torch.tensor([codec])}, folder / "codec" / "linear.safetensors")
    return read_cache(folder)


def test_caches_differ_by_entries_keys_tables_and_codecs(tmp_path: Path) -> None:
    first = write_cache(tmp_path / "first")
    assert difference(first, write_cache(tmp_path / "same"), {}) is None
    for name, change in {
        "texts/000000.tar:ab.safetensors": {"payload": b"2"},
        "texts/000000.tar:ab.safetensors: only the old": {"key": "cd"},
        "index/texts-000000.parquet": {"table": b"3"},
        "codec/linear.safetensors:w": {"codec": 4},
    }.items():
        assert (difference(first, write_cache(tmp_path / str(change), **change), {}) or "").startswith(name)  # type: ignore[arg-type]


# ---- caches and runs ----


def test_every_cache_is_read_or_compared_under_a_name_of_its_own() -> None:
    assert {run.cache for run in RUNS.values()} <= CACHES.keys() and not CACHES.keys() & RUNS.keys()
    assert {*QUICK} <= CACHES.keys() | RUNS.keys()


def test_a_checkout_that_python_does_not_find_is_refused(tmp_path: Path) -> None:
    with pytest.raises(exact.FailedError, match="is not in the old checkout"):
        exact.make_side("old", tmp_path, tmp_path)


def test_each_side_speaks_its_own_keys(tmp_path: Path) -> None:
    """Caches and runs that the checkout's own file lacks are those of the file here; a file of an earlier form has none."""
    for name, cases in (
        ("old", "CACHES = {'cache-texts': 1}\nRUNS = {'tiers': 2, 'gone': 3}\n"),
        ("new", "CASES = {}"),
    ):
        (tmp_path / f"{name}-code" / "mmspeed").mkdir(parents=True)
        (tmp_path / f"{name}-code" / "mmspeed" / "__init__.py").touch()
        (tmp_path / f"{name}-code" / "tests" / "golden").mkdir(parents=True)
        (tmp_path / f"{name}-code" / "tests" / "golden" / "exact_cases.py").write_text(cases)
    old, new = (exact.make_side(name, tmp_path / f"{name}-code", tmp_path) for name in ("old", "new"))
    assert (old.caches, old.runs) == ({**CACHES, "cache-texts": 1}, {**RUNS, "tiers": 2, "gone": 3})
    assert (new.caches, new.runs) == (CACHES, RUNS)
