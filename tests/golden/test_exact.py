"""The exact witness sees one bit: its comparing functions on small made-up records, and its sides."""

from __future__ import annotations

import io
import json
import math
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.golden import exact
from tests.golden.exact_cases import CACHES, QUICK, RUNS
from tests.golden.exact_records import (
    Record,
    difference,
    digest,
    entries_difference,
    read_entries,
    read_record,
    read_tensors,
    renamed,
)

NAME = "optimizer.state.blocks.0.mlp.up.weight.exp_avg"


def record() -> Record:
    numbers: dict[str, float | None] = {}
    for step in (1, 2):
        numbers |= {f"step {step} loss": 1.5 + step / 3, f"step {step} grad_norm": 0.1 * step}
    return Record(numbers, {NAME: torch.linspace(-1, 1, 12).view(3, 4), "model.patch_in.bias": torch.arange(3.0)})


def with_tensor(name: str, tensor: torch.Tensor) -> Record:
    copy = record()
    return replace(copy, tensors={**copy.tensors, name: tensor})


def test_equal_records() -> None:
    assert difference(record(), record(), {}) is None


def test_one_bit_of_a_number_shows_with_both_values() -> None:
    other = record()
    loss = other.numbers["step 2 loss"]
    assert loss is not None
    other.numbers["step 2 loss"] = math.nextafter(loss, 3.0)
    differences = difference(record(), other, {})
    assert differences is not None and differences.startswith("step 2 loss: ")
    assert loss.hex() in differences and math.nextafter(loss, 3.0).hex() in differences


def test_the_sign_of_zero_and_a_missing_number_show() -> None:
    signs = [replace(record(), numbers={"step 1 loss": zero}) for zero in (0.0, -0.0)]
    assert "0x0.0p+0 (0.0) against -0x0.0p+0" in (difference(signs[0], signs[1], {}) or "")
    missing = replace(record(), numbers={**record().numbers, "step 1 grad_norm": None})
    assert (difference(record(), missing, {}) or "").startswith("step 1 grad_norm: ")


@pytest.mark.parametrize("longer", ["old", "new"])
def test_another_number_of_steps_shows(longer: str) -> None:
    more = replace(record(), numbers={**record().numbers, "step 3 loss": 1.0})
    pair = (more, record()) if longer == "old" else (record(), more)
    assert difference(*pair, {}) == f"step 3 loss: only the {longer} run has it"


def test_one_bit_of_a_tensor_shows_with_its_place_and_both_values() -> None:
    tensor = record().tensors[NAME].clone()
    before = tensor[2, 1].item()
    tensor.view(torch.int32)[2, 1] ^= 1
    differences = difference(record(), with_tensor(NAME, tensor), {})
    assert differences == f"{NAME}: 1 of 12 numbers, at 9: {before.hex()} against {tensor[2, 1].item().hex()}"


def test_a_tensor_that_is_not_there_or_of_another_kind_shows() -> None:
    shorter = replace(record(), tensors={NAME: record().tensors[NAME]})
    assert difference(record(), shorter, {}) == "model.patch_in.bias: only the old run has it"
    assert difference(shorter, record(), {}) == "model.patch_in.bias: only the new run has it"
    half = with_tensor(NAME, record().tensors[NAME].bfloat16())
    assert f"{NAME}: torch.float32 [3, 4] against torch.bfloat16 [3, 4]" == difference(record(), half, {})
    flat = with_tensor(NAME, record().tensors[NAME].view(12))
    assert f"{NAME}: torch.float32 [3, 4] against torch.float32 [12]" == difference(record(), flat, {})
    both = replace(shorter, tensors={NAME: record().tensors[NAME] + 1})
    assert (difference(record(), both, {}) or "").endswith("; 2 of 2 tensors differ")


def test_not_a_number_equals_itself() -> None:
    nan = with_tensor("model.patch_in.bias", torch.tensor([math.nan, 0.0, 1.0]))
    assert difference(nan, nan, {}) is None


def test_renamed_tensors_are_compared_under_their_new_names() -> None:
    table = {"mlp.up": "feed_forward.inner"}
    new = NAME.replace("mlp.up", "feed_forward.inner")
    assert renamed(NAME, table) == new
    assert renamed("model.mlp.upper.weight", table) == "model.mlp.upper.weight"  # whole words only
    old = record()
    moved = replace(old, tensors={new: old.tensors[NAME], "model.patch_in.bias": old.tensors["model.patch_in.bias"]})
    assert difference(old, moved, table) is None
    assert difference(old, moved, {}) is not None


def test_digests_tell_types_shapes_and_bits_apart() -> None:
    tensor = torch.zeros(4)
    others = [tensor.bfloat16(), tensor.view(2, 2), -tensor, torch.zeros(8, dtype=torch.bfloat16)]
    assert len({digest(one) for one in (tensor, *others)}) == 5 and digest(tensor) == digest(torch.zeros(4))
    assert digest(torch.tensor(1.0)) == digest(torch.tensor(1.0))  # no dims


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
        assert digest(read_tensors(tmp_path / name)["model.w"]) == digest(whole)
    write_checkpoint(tmp_path / "lacking", [[0, 3]])
    with pytest.raises(ValueError, match=r"model\.w is not whole"):
        read_tensors(tmp_path / "lacking")


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints" / "step-2", [[0, 4]])
    (tmp_path / "checkpoints" / "latest.json").write_text('{"latest": "step-2"}')
    rows = [
        {"kind": "train", "step": 1, "loss": 0.1, "grad_norm": None, "samples": 3},
        {"kind": "cache", "step": 1},
        {"kind": "validation", "step": 1, "loss": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = read_record(tmp_path)
    assert record.numbers == {
        "step 1 loss": 0.1,
        "step 1 grad_norm": None,
        "step 1 samples": 3,
        "step 1 held-out loss": 0.3,
    }
    assert list(record.tensors) == ["model.w"]


def write_cache(folder: Path, payload: bytes) -> Path:
    (folder / "texts").mkdir(parents=True)
    with tarfile.open(folder / "texts" / "000000.tar", "w") as tar:
        member = tarfile.TarInfo("ab.safetensors")
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    return folder


def test_entries_of_caches(tmp_path: Path) -> None:
    entries = [
        read_entries(write_cache(tmp_path / name, payload)) for name, payload in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    ]
    assert entries_difference(entries[0], entries[1]) is None
    assert (entries_difference(entries[0], entries[2]) or "").startswith("texts/000000.tar:ab.safetensors: ")
    assert "not there" in (entries_difference(entries[0], {}) or "")
    assert entries_difference({}, {}) == "no entries"


# ---- configurations ----


def test_every_run_reads_a_known_cache() -> None:
    assert {run.cache for run in RUNS.values()} == CACHES.keys() and set(QUICK) <= RUNS.keys()
    assert not CACHES.keys() & RUNS.keys()
    assert exact.nested({"a.b": 1, "a.c.d": [2], "e": None}) == {"a": {"b": 1, "c": {"d": [2]}}, "e": None}


def package(folder: Path, cases: str | None = None) -> Path:
    """A checkout whose mmspeed is found, with a file of cases."""
    for name in ("mmspeed", "tests/golden"):
        (folder / name).mkdir(parents=True)
    (folder / "mmspeed" / "__init__.py").touch()
    if cases is not None:
        (folder / "tests" / "golden" / "exact_cases.py").write_text(cases)
    return folder


def test_a_checkout_that_python_does_not_find_is_refused(tmp_path: Path) -> None:
    with pytest.raises(exact.FailedError, match="is not in the old checkout"):
        exact.make_side("old", tmp_path, tmp_path)


def test_each_side_speaks_its_own_keys(tmp_path: Path) -> None:
    """A run that the checkout's own file does not have is that of the file here."""
    cases = "CACHES = {'cache-texts': {'words': 1}}\nRUNS = {'tiers': 'own', 'gone': 'own'}\n"
    old = exact.make_side("old", package(tmp_path / "one", cases), tmp_path)
    assert old.caches == {**CACHES, "cache-texts": {"words": 1}} and old.runs == {**RUNS, "tiers": "own", "gone": "own"}
    new = exact.make_side("new", package(tmp_path / "two"), tmp_path)
    assert (new.caches, new.runs) == (CACHES, RUNS)
