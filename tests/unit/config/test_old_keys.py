"""Keys that earlier versions called otherwise: refused in a user's config, translated in what mmspeed recorded itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mmspeed.config import Bucket, Config, dump_config, load_config, load_record, load_run_config, make_config
from mmspeed.config.renamed import RENAMED, translated, translated_setting
from mmspeed.data.sampling.batch_sizes import Measured, Measurement
from mmspeed.errors import UserError
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.tasks.video_start import other_shape
from mmspeed.pipelines.tuning.memory_search import read_choice
from mmspeed.pipelines.tuning.profile import load_measured
from mmspeed.preprocess.report.show import stored_config

LINE = "memory.spans read as memory.activation_policy"
OLD_MEMORY = {"spans": {"attention": "swap_cheap", "cross_attention": "recompute_cheap", "mlp": "swap", "norm": "save"}}
NEW_MEMORY = {"attention": "offload_selective", "cross_attention": "selective", "mlp": "offload", "norm": "save"}


def tree(**changes: Any) -> dict[str, Any]:
    data = {"sources": [{"path": "clips"}], "buckets": [{"frames": 5, "height": 32, "width": 48}]}
    return {"name": "old", "data": data, **changes}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("section", "content", "error"),
    [
        ("memory", OLD_MEMORY, r"memory\.spans is now memory\.activation_policy \(swap is offload, .*discard is recompute_output"),
        ("memory", {"spans": {}}, r"memory\.spans is now memory\.activation_policy"),
        ("memory", {"swap_from": "1KiB"}, r"memory\.swap_from is now memory\.offload_from$"),
        ("train", {"checkpointing": True}, r"train\.checkpointing is now memory\.activation_policy: write `\{block: recompute\}`"),
        ("train", {"checkpointing": False}, r"train\.checkpointing is now memory\.activation_policy"),
        ("parallel", {"scheme": "switch"}, r"parallel\.scheme is now parallel\.dsp: for `switch` write `dsp` in place"),
        ("memory", {"activation_policy": {"mlp": "swap"}}, r"memory\.activation_policy\.mlp: swap is now offload$"),
        ("memory", {"activation_policy": {"norm": "discard"}}, r"norm: discard is now recompute_output$"),
    ],
)  # fmt: skip
def test_a_users_old_key_is_refused_by_an_error_that_names_the_new_one(
    tmp_path: Path, section: str, content: dict[str, Any], error: str
) -> None:
    path = write(tmp_path / "my-run.yaml", tree(**{section: content}))
    with pytest.raises(UserError, match=error) as caught:
        load_run_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=error):
        make_config(tree(**{section: content}))


@pytest.mark.parametrize(
    "override",
    [
        "memory.spans.block=recompute",
        "memory.spans={}",
        "memory.swap_from=1MiB",
        "train.checkpointing=true",
        "parallel.scheme=ulysses",
    ],
)
def test_so_is_one_on_the_command_line(tmp_path: Path, override: str) -> None:
    path = write(tmp_path / "my-run.yaml", tree())
    key = next(key for key in RENAMED if override.startswith(key))
    with pytest.raises(UserError, match=rf"{key} is now {RENAMED[key]}".replace(".", r"\.")):
        load_run_config(path, [override])


@pytest.mark.parametrize(
    "memory", [None, [], "spans", 3, {"activation_policy": ["swap"]}, {"activation_policy": {"mlp": 3}}]
)
def test_sections_of_another_kind_are_refused_as_ever(memory: Any) -> None:
    with pytest.raises(UserError, match="memory"):
        make_config(tree(memory=memory))


def test_no_old_key_is_a_key_of_today() -> None:
    now = yaml.safe_load(dump_config(make_config(tree())))
    assert translated(now) == (now, [])
    for new in RENAMED.values():
        section, _, name = new.partition(".")
        assert name in now[section]


def old_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run's config.yaml as the old code wrote it: with all keys."""
    new: dict[str, Any] = yaml.safe_load(dump_config(make_config(tree(output=str(folder)))))
    del new["memory"]["activation_policy"], new["memory"]["offload_from"]
    new["memory"] |= {"spans": {}, "swap_from": "1MiB"}
    new["train"]["checkpointing"] = False
    for section, content in changes.items():
        new[section] = {**new[section], **content}
    return new


def test_a_run_folder_is_translated_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmspeed")
    folder = RunFolder(tmp_path / "old")
    write(folder.config_file, old_config(tmp_path, memory=OLD_MEMORY, train={"steps": 7}))
    config = folder.config()
    assert config.memory.activation_policy == NEW_MEMORY and config.train.steps == 7
    assert len(caplog.records) == 1
    assert f"the config of {folder.root} is from an earlier mmspeed: {LINE}" in caplog.text
    assert "memory.swap_from read as memory.offload_from" in caplog.text
    # a resumed run differs in nothing, whatever its record calls it, and writes today's keys
    assert folder.check_same(config) == []
    changed = make_config(yaml.safe_load(dump_config(config)), ["memory.activation_policy.mlp=save"])
    assert folder.check_same(changed) == ["memory.activation_policy.mlp"]
    folder.write_start(config, {}, {})
    caplog.clear()
    assert folder.config() == config and not caplog.records


def test_recomputed_blocks_of_an_old_run_are_a_policy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "old")
    write(folder.config_file, old_config(tmp_path, train={"checkpointing": True}))
    assert folder.config().memory.activation_policy == {"block": "recompute"}
    assert load_record(folder.config_file).train == make_config(tree()).train
    assert other_shape(folder.root, make_config(tree(), ["model.arrangement=full"]).model)[0].startswith(
        "train.start_from"
    )


def test_the_config_of_a_run_folder_can_be_named_as_a_config(tmp_path: Path) -> None:
    """`mmspeed train runs/old/config.yaml train.steps=9`: the file is a record, the overrides are the user's."""
    path = write(tmp_path / "old" / "config.yaml", old_config(tmp_path, memory=OLD_MEMORY))
    with pytest.raises(UserError, match=r"memory\.spans is now"):  # no run is beside it, so a user wrote it
        load_run_config(path)
    (path.parent / "run.json").write_text("{}", encoding="utf-8")
    config = load_config(path, ["train.steps=9"])
    assert config.memory.activation_policy == NEW_MEMORY and config.train.steps == 9
    with pytest.raises(UserError, match=r"memory\.spans is now"):
        load_config(path, ["memory.spans.mlp=save"])


def test_a_caches_record_is_translated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmspeed")

    root = tmp_path / "cache"
    record = {"config": yaml.safe_dump(old_config(tmp_path, memory=OLD_MEMORY))}
    config = stored_config(SimpleNamespace(root=root, info=record))  # type: ignore[arg-type]
    assert isinstance(config, Config) and config.memory.activation_policy == NEW_MEMORY
    assert caplog.text.count(LINE) == 1 and str(root) in caplog.text


def test_settings_of_measurements_are_translated(tmp_path: Path) -> None:
    old = {"device.dtype": "float32", "train.checkpointing": False, "memory.spans": {"mlp": "swap"}, "torch": "2"}
    new = {"device.dtype": "float32", "memory.activation_policy": {"mlp": "offload"}, "torch": "2"}
    assert translated_setting(old) == new and translated_setting(new) == new
    recomputed = translated_setting({"train.checkpointing": True, "memory.swap_from": 1})
    assert recomputed == {"memory.activation_policy": {"block": "recompute"}, "memory.offload_from": 1}
    file = tmp_path / "buckets.json"
    Measured((Measurement(Bucket(5, 32, 48), 1, 1.0, 1),), 1, old).save(file)
    measured, message = load_measured(file, new)
    assert message is None and measured.setting == old
    with pytest.raises(UserError, match=r"memory\.activation_policy"):
        load_measured(file, {**new, "memory.activation_policy": {"mlp": "save"}})


def test_policies_chosen_by_an_earlier_version_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    choice = {
        "setting": {"memory.swap_from": "1MiB", "memory.spans": {}, "train.checkpointing": False},
        "blocks": [{"attention": "swap", "mlp": "recompute_cheap"}, {"norm": "discard"}],
        "budget_bytes": 9,
        "expected": {"peak_bytes": 8, "added_seconds": 0.0, "added_share": 0.0},
        "measured": {"peak_bytes": 7, "step_seconds": 1.0},
    }
    file.write_text(json.dumps(choice), encoding="utf-8")
    setting = {"memory.offload_from": "1MiB", "memory.activation_policy": {}}
    actual = read_choice(file, setting, 2)
    assert actual is not None
    assert actual.ways == ({"attention": "offload", "mlp": "selective"}, {"norm": "recompute_output"})
    assert read_choice(file, {**setting, "memory.offload_from": "2MiB"}, 2) is None


# -- degrees of sequence parallelism, which were said by `scheme`


def old_parallel(folder: Path, **keys: Any) -> dict[str, Any]:
    """The parallel section of a run's config.yaml before `dsp`: with all other keys, and `scheme`."""
    section: dict[str, Any] = yaml.safe_load(dump_config(make_config(tree(output=str(folder)))))["parallel"]
    del section["dsp"]
    return {**section, "scheme": "switch", **keys}


@pytest.mark.parametrize(
    ("arrangement", "keys", "expected"),
    [
        ("factorised", {"ulysses": 4}, (4, 1, 1, None)),
        ("factorised", {"ulysses": 2, "ring": 4, "ring_window": 2}, (8, 1, 1, None)),
        ("factorised", {"ulysses": 2, "ring": 4, "ring_window": 2, "scheme": "ulysses"}, (1, 4, 2, 2)),
        ("factorised", {}, (1, 1, 1, None)),
        ("full", {"ulysses": 2, "ring": 4, "ring_window": 2}, (1, 4, 2, 2)),
    ],
)
def test_old_run_folders_resume_as_they_ran(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arrangement: str, keys: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    caplog.set_level(logging.INFO, "mmspeed")
    folder = RunFolder(tmp_path / "old")
    record = old_config(tmp_path, model={"arrangement": arrangement})
    record["parallel"] = old_parallel(tmp_path, **keys)
    write(folder.config_file, record)
    config = folder.config()
    parallel = config.parallel
    assert (parallel.dsp, parallel.ring, parallel.ulysses, parallel.ring_window) == expected
    assert "parallel.scheme read as parallel.dsp" in caplog.text and len(caplog.records) == 1
    assert folder.check_same(config) == []
    folder.write_start(config, {}, {})
    caplog.clear()
    assert folder.config() == config and not caplog.records
    # a record that lacks the key too is read as what was by default
    del record["parallel"]["scheme"]
    write(folder.config_file, record)
    if keys.get("scheme") is None:
        assert folder.config() == config


def test_settings_of_measurements_have_the_degrees_that_ran() -> None:
    old = {"model.arrangement": "factorised", "parallel.ring": 1, "parallel.ulysses": 4, "parallel.scheme": "switch"}
    moved = {"model.arrangement": "factorised", "parallel.dsp": 4, "parallel.ring": 1, "parallel.ulysses": 1}
    assert translated_setting(old) == moved == translated_setting(moved)
    stays = {**old, "parallel.scheme": "ulysses"}
    assert translated_setting(stays) == {**moved, "parallel.dsp": 1, "parallel.ulysses": 4}
    full = {**old, "model.arrangement": "full"}
    assert translated_setting(full) == {**moved, "model.arrangement": "full", "parallel.dsp": 1, "parallel.ulysses": 4}


@pytest.mark.parametrize(
    ("parallel", "arrangement", "message"),
    [
        ({"ulysses": 2}, "factorised", "`dsp: 2`; now ulysses 2 runs in attention of the temporal blocks"),
        ({"ring": 2, "ulysses": 2, "shard": "space"}, "factorised", "`dsp: 4`; now ring 2 x ulysses 2 runs in attention of the spatial"),
        ({"ulysses": 2, "dsp": 1}, "factorised", None),
        ({"dsp": 2}, "factorised", None),
        ({"ulysses": 2}, "full", None),
        ({}, "factorised", None),
    ],
)  # fmt: skip
def test_a_users_degrees_that_ran_otherwise_before_are_reported_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parallel: dict[str, Any], arrangement: str, message: str | None
) -> None:
    caplog.set_level(logging.INFO, "mmspeed")
    path = write(tmp_path / "my-run.yaml", tree(parallel=parallel, model={"arrangement": arrangement}))
    config = load_config(path)
    assert config.parallel.model_dump(include=set(parallel)) == parallel  # what is written is what runs
    if message is None:
        assert not caplog.records
    else:
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith(f"{path}: parallel has ") and message in line and "\n" not in line
    caplog.clear()
    assert load_config(path, ["parallel.dsp=1"]).parallel.dsp == 1 and not caplog.records


def test_a_users_file_goes_on_as_its_run_folder_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`mmspeed train my-run.yaml` again, after an update, of a run that re-sharded."""
    caplog.set_level(logging.INFO, "mmspeed")
    path = write(tmp_path / "my-run.yaml", tree(output="runs", parallel={"ulysses": 2}))
    record = old_config(tmp_path / "runs")
    record["parallel"] = old_parallel(tmp_path, ulysses=2)
    folder = RunFolder(tmp_path / "runs" / "old")
    write(folder.config_file, record)
    config = load_config(path)
    assert (config.parallel.dsp, config.parallel.ulysses) == (2, 1)
    (line,) = (entry.getMessage() for entry in caplog.records)
    assert f"{folder.root} recorded that, and continues so (with `dsp: 1` it runs ulysses 2)" in line
    folder.write_start(config, {}, {})  # and once more, from what the resumed run recorded
    assert load_config(path).parallel == config.parallel
    assert load_config(path, ["parallel.dsp=1"]).parallel.ulysses == 2
    record["parallel"] = old_parallel(tmp_path, ulysses=2, scheme="ulysses")
    write(folder.config_file, record)
    assert (load_config(path).parallel.dsp, load_config(path).parallel.ulysses) == (1, 2)
