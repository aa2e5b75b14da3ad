"""What ranks compare: leaves of the config by key, without what may differ between machines."""

from __future__ import annotations

from pathlib import Path

from mmspeed.config import Config
from mmspeed.config.docs import section_options
from mmspeed.device import pick
from mmspeed.pipelines.run.agreement import _differences, run_facts, source_digest
from tests.support.runs import small_config


def test_declared_keys_exist() -> None:
    """A renamed key must not make its declaration void."""
    for key in (*Config.machine_local, *Config.machine_paths):
        section, _, name = key.partition(".")
        assert section in Config.model_fields
        if name and section != "data":
            assert any(name in option.model_fields for option in section_options(Config.model_fields[section]))


def test_folders_mounted_elsewhere_are_the_same(tmp_path: Path) -> None:
    cpu = pick("cpu")
    here, elsewhere = (run_facts(small_config(tmp_path / name / "same"), cpu) for name in ("a", "b"))
    assert here == elsewhere and here["data.cache"] == '"cache"'
    other = run_facts(small_config(tmp_path / "a" / "same", "data.cache=elsewhere"), cpu)
    assert {key for key in here if here[key] != other[key]} == {"data.cache"}


def test_facts_name_code_and_libraries(tmp_path: Path) -> None:
    facts = run_facts(small_config(tmp_path), pick("cpu"))
    assert source_digest()[:12] in facts["mmspeed"] and len(source_digest()) == 64
    assert {"torch", "python", "backend", "kind of device", "train.lr", "parallel.ring"} <= set(facts)


def test_ranks_that_differ_alike_are_named_together() -> None:
    """A node of eight wrong ranks is one part of the message, and a long list ends."""
    wrong = [["nodeB", 1, [["train.lr", "0.1", "0.2"]]]] * 8
    text = _differences([["nodeA", 0, []], *wrong, ["nodeC", 6, [["seed", "1", None]]]])
    assert text == (
        "the ranks of this run differ from rank 0 (nodeA): "
        "on rank 1 (nodeB), 2 (nodeB), 3 (nodeB), 4 (nodeB) and 4 more train.lr is 0.2, not 0.1; "
        "on rank 9 (nodeC) seed is unset, not 1 and 5 more"
    )
