"""The configuration: mistakes become one helpful line, overrides reach everywhere, and what is dumped loads again."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mmspeed.cli.init import template
from mmspeed.config import all_fields, dump_config, load_config, load_record, make_config
from mmspeed.config.docs import generate, show_value
from mmspeed.config.schema import ObjectiveConfig, ObjectiveSection, SampleConfig
from mmspeed.errors import UserError

BUCKET = {"frames": 13, "height": 96, "width": 160}


def tree(**sections: Any) -> dict[str, Any]:
    """The smallest valid config, with more sections."""
    return {"data": {"sources": [{"path": "clips"}], "buckets": [dict(BUCKET)]}, **sections}


def write(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def problem(content: Any, *overrides: str) -> str:
    """The message that a wrong config gives."""
    with pytest.raises(UserError) as caught:
        make_config(content, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) <= 2, message
    return message


@pytest.mark.parametrize("config", typing.get_args(typing.get_args(ObjectiveConfig)[0]))
def test_every_objective_names_its_samplers(config: type[ObjectiveSection]) -> None:
    (kind,) = typing.get_args(config.model_fields["kind"].annotation)
    every = typing.get_args(SampleConfig.model_fields["sampler"].annotation)
    fitting = ("auto", *config.samplers)
    assert len(fitting) > 1 and set(fitting) <= set(every)
    for sampler in every:
        content = tree(objective={"kind": kind}, sample={"sampler": sampler})
        if sampler in fitting:
            assert make_config(content, origin="test").sample.sampler == sampler
        else:
            message = f"sampler {sampler} does not go with objective {kind}: use {' or '.join(fitting)}"
            assert message in problem(content)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.lr=2e-4", ("train", "lr"), 2e-4),
        ("train.ema_decay=null", ("train", "ema_decay"), None),
        ("train.betas=[0.8, 0.95]", ("train", "betas"), (0.8, 0.95)),
        ("train.betas.1=0.95", ("train", "betas"), (0.9, 0.95)),
        ("validate.prompts=[a fox, a hare]", ("validate_", "prompts"), ("a fox", "a hare")),
        ("sample.negative_prompt=a=b", ("sample", "negative_prompt"), "a=b"),
        ("sample.negative_prompt='dark: blurry'", ("sample", "negative_prompt"), "dark: blurry"),
        (" seed =7", ("seed",), 7),
    ],
)
def test_overrides(override: str, path: tuple[str, ...], value: Any) -> None:
    content = tree(train={"betas": [0.9, 0.99]})
    node: Any = make_config(content, [override])
    for part in path:
        node = getattr(node, part)
    assert node == value


def test_overrides_reach_into_lists_and_switch_unions() -> None:
    config = make_config(
        tree(), ["data.buckets.0.frames=33", "data.sources.0.path=other", "objective.kind=ddpm", "objective.steps=500"]
    )
    assert config.data.buckets[0].frames == 33 and config.data.sources[0].path == str(Path.cwd() / "other")
    assert config.objective.kind == "ddpm" and config.objective.steps == 500


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds nothing"),
        (b"- a\n- b\n", "holds a list"),
        (b"train: [1, 2\n", "not YAML"),
        (b"train:\n\tsteps: 1\n", "line 2"),
        (b"name: \xff\xfe\n", "cannot be read as a text file"),
        (b"2024-01-01: 1\n", "keys must be words"),
        (b"data: &a {sources: *a}\n", "no section may contain itself"),
        (b"!!python/object/apply:os.system ['true']\n", "not YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"run\.yaml") as caught:
        load_config(path)
    assert expected in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such config file; `mmspeed init"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_config(tmp_path)


def test_relative_paths_are_taken_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs"
    (folder / "encoder").mkdir(parents=True)
    content = tree(
        output="../runs", text={"kind": "transformers", "pretrained": "encoder"}, vae={"kind": "linear", "weights": "w"}
    )
    write(folder / "run.yaml", content)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config("../configs/run.yaml", ["data.cache=/absolute/cache"])
    assert Path(config.data.sources[0].path) == folder / "clips"
    assert config.run_dir.resolve() == tmp_path / "runs" / "run"
    assert config.cache_dir == Path("/absolute/cache")
    assert config.text.pretrained == str(folder / "encoder")  # type: ignore[union-attr]
    assert config.vae.weights == str(folder / "w")  # type: ignore[union-attr]


def test_a_hub_id_is_no_path(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", tree(vae={"kind": "diffusers", "pretrained": "owner/name"}))
    assert load_config(path).vae.pretrained == "owner/name"  # type: ignore[union-attr]


def test_a_source_that_is_an_address_stays_one() -> None:
    content = tree(data={"sources": [{"path": "s3://bucket/set"}], "buckets": [BUCKET]})
    assert make_config(content).data.sources[0].path == "s3://bucket/set"


def test_dumped_file_loads_again_from_another_folder(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "run.yaml", tree()))
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_runs_config_that_is_not_known_here_is_named_with_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", tree(memory={"spans": {}}))
    with pytest.raises(UserError, match=r"config\.yaml: unknown key 'memory\.spans'") as error:
        load_record(path)
    assert str(error.value).endswith(f"({tmp_path} was written by another mmspeed, or changed)")
    assert "\n" not in str(error.value)


def test_the_config_cannot_be_changed() -> None:
    config = make_config(tree())
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0


def switched_on(text: str) -> str:
    """The template with every key of the chosen sections switched on."""
    lines, skipping = [], False
    for line in text.splitlines():
        if "# Or, in place of the keys above" in line:
            skipping = True
        elif not line.strip():
            skipping = skipping and line == ""
        if not line.startswith((" ", "#")) and line:
            skipping = False
        bare = line.lstrip()
        is_key = bare.startswith("#") and not bare.startswith(("# ", "#  "))
        if not skipping:
            lines.append(line.replace("#", "", 1) if is_key else line)
    return "\n".join(lines)


def test_template_is_valid_and_shows_the_defaults(demo_clips: Path) -> None:
    text = template("my-run", str(demo_clips))
    config = make_config(yaml.safe_load(text))
    bare = make_config(
        tree(name="my-run", data={"sources": [{"path": str(demo_clips)}], "cache": "cache/my-run", "buckets": [BUCKET]})
    )
    assert config == bare
    all_on = yaml.safe_load(switched_on(text))
    assert make_config(all_on) == config
    assert set(all_on["train"]) == set(type(config.train).model_fields)


def test_template_holds_every_key_and_every_sentence(demo_clips: Path) -> None:
    text = template("my-run", str(demo_clips))
    flat = " ".join(text.replace("\n", " ").replace("#", " ").split())
    for path, field in all_fields():
        key = path.rsplit(".", 1)[-1]
        assert f"{key}:" in text, path
        if key != "kind":  # the other choices are in their section's sentence
            assert " ".join((field.description or "").split()) in flat, path


@given(
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
@example("0\u20280")
@example("a\x85b")
def test_shown_values_are_yaml(value: Any) -> None:
    again = yaml.safe_load(f"key: {show_value(value)}")["key"]
    assert again == value and type(again) is type(value)


def test_config_docs_name_every_field() -> None:
    text = generate()
    for path, field in all_fields():
        assert f"| `{path}` |" in text, path
        assert (field.description or "").replace("|", "\\|") in text, path
