"""The JSON schema for editors: current, with every key, and of one mind with the loader about good and bad configs."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmspeed.config import Config, RunConfig, all_fields, dump_config, json_schema, make_config
from mmspeed.config.docs import main
from mmspeed.config.json_schema import SHIPPED, editor_line, schema_text
from mmspeed.errors import UserError
from tests.support.json_schemas import mistakes
from tests.support.runs import small_tree

TREE: dict[str, Any] = {"data": {"sources": [{"path": "clips"}], "buckets": [{"frames": 5, "height": 32, "width": 48}]}}


def test_the_shipped_schema_is_current() -> None:
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == json_schema(), "run `make docs`"


def test_the_tool_of_the_docs_writes_and_compares_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "config.md"), "--schema", str(tmp_path / "schema.json")]
    assert main(files) == 0 and main(["--check", *files]) == 0
    assert (tmp_path / "schema.json").read_text(encoding="utf-8") == schema_text()
    (tmp_path / "schema.json").write_text("{}", encoding="utf-8")
    assert main(["--check", *files]) == 1
    error = capsys.readouterr().err
    assert "schema.json out of date" in error and "config.md" not in error


def properties_of(schema: Any) -> list[str]:
    """The names of all properties, of all sections."""
    sections = [schema, *schema["$defs"].values()]
    return [name for section in sections for name in section.get("properties", {})]


def test_every_key_is_in_it_with_its_sentence() -> None:
    schema = json_schema()
    names, text = set(properties_of(schema)), SHIPPED.read_text(encoding="utf-8")
    for path, field in all_fields():
        assert path.rsplit(".", 1)[-1] in names, path
        if not path.rsplit("(", 1)[0].endswith("data"):  # a section that must be given is a reference alone
            assert json.dumps(field.description, ensure_ascii=False) in text or path == "data", path
    assert list(schema["properties"])[:3] == ["task", "name", "output"], "in reading order"


RIGHT: list[dict[str, Any]] = [
    {},
    {"vae": {"channels": 8}},
    {"objective": {"shift": 3.0}},
    {"text": {"kind": "transformers", "pretrained": "owner/name"}},
    {"model": {"patch": [1, 2, 2], "sparse": None}},
    {"curriculum": [{"weights": {"clips": 1}}]},
    {"data": {**TREE["data"], "windows": "all"}},
]
WRONG: list[dict[str, Any]] = [
    {"trian": {}},
    {"train": {"step": 3}},
    {"train": {"steps": 0}},
    {"train": {"steps": "many"}},
    {"vae": {"kind": "linaer"}},
    {"vae": {"kind": "diffusers"}},
    {"data": {"sources": []}},
    {"model": {"patch": [1, 2]}},
    {"name": "a b"},
    {"trackers": ["paper"]},
]


def test_the_schema_and_the_loader_are_of_one_mind() -> None:
    schema = json_schema()
    for section in RIGHT:
        tree = {**deepcopy(TREE), **section}
        assert mistakes(tree, schema) == []
        assert mistakes(yaml.safe_load(dump_config(make_config(tree))), schema) == []
    for section in WRONG:
        tree = {**deepcopy(TREE), **section}
        assert mistakes(tree, schema), section
        with pytest.raises(UserError):
            make_config(tree)


def test_configs_of_the_tests_and_of_other_tasks(tmp_path: Path) -> None:
    assert mistakes(small_tree(tmp_path), json_schema()) == []
    assert "data" not in json_schema(RunConfig)["properties"] and "train" in json_schema(RunConfig)["properties"]
    assert mistakes({"train": {"steps": 3}}, json_schema(RunConfig)) == []
    assert editor_line(Config) == f"# yaml-language-server: $schema={SHIPPED.as_uri()}" and not editor_line(RunConfig)
