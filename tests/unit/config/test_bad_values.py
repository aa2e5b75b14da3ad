"""A wrong value of a key is one line that names the key, whatever is wrong with it: its type, its range, or an unknown word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmspeed.__main__ import main
from mmspeed.config import all_fields, make_config
from mmspeed.errors import UserError

FLOW, DDPM = {"kind": "flow"}, {"kind": "ddpm"}
AUTO = {**FLOW, "shift": "auto"}
CHOSEN = {"zero_terminal_snr": True, "prediction": "v", "min_snr_gamma": 5.0}
LIST, WORD = [1, 2], "many"
NAN, INFINITE = float("nan"), float("inf")

# key, the rest of its section, and wrong values: of another type, out of range, unknown
WRONG: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("data.max_repeated", {}, [LIST, WORD, -0.1, 1.1, NAN]),
    ("data.untagged", {}, [LIST, 709, "bt2020", ""]),
    ("data.background", {}, [LIST, 255, "#12345", "whitish", ""]),
    ("data.missing_caption", {}, [LIST, 1, "drop", None]),
    ("data.default_caption", {"missing_caption": "default"}, [LIST, 5, "", " \t"]),
    ("data.default_caption", {}, ["a video"]),  # without missing_caption: default
    ("data.mirror", {}, [LIST, WORD, 2, None]),
    ("data.mirror_words", {}, ["left", 1, [1], [" "], [""], None]),
    ("data.min", {}, [LIST, 5, {"aesthetic": WORD}, {"aesthetic": NAN}, {" ": 5}, {"a": [1]}, None]),
    ("data.max", {"min": {"aesthetic": 5}}, [LIST, {"aesthetic": 4.5}, {"motion": INFINITE}]),
    ("data.scenes", {}, [LIST, 5, "content", {"detectr": "content"}]),
    ("data.scenes.detector", {}, [LIST, 1, "hash", None]),
    ("data.scenes.threshold", {}, [LIST, WORD, 0, -1.0, NAN]),
    ("data.scenes.min_seconds", {}, [LIST, WORD, -0.5, NAN, None]),
    ("data.caption_prefix", {}, [LIST, 1, " ", "a\x1b[31m", "x" * 1025, None]),
    ("data.caption_suffix", {}, [LIST, 1, "\t", "\u200b", "x" * 1025, None]),
    ("data.local_mb", {}, [LIST, WORD, 0, -1.0, NAN]),
    ("preprocess.decoder", {}, [LIST, 1, "ffmpeg", None]),
    ("preprocess.decoder_device", {}, [LIST, 0, "cuda", None]),
    ("objective.weighting", FLOW, [LIST, 1, "samples", None]),
    ("objective.weighting", DDPM, [LIST, 1, "frame"]),
    ("objective.shift", FLOW, [LIST, WORD, 0.0, -1.0, NAN, INFINITE, {"9x96x160": 2.0}, {"13x96x160": 0}, {}]),
    ("objective.auto_shift", AUTO, [LIST, WORD, {"rules": "sqrt"}]),
    ("objective.auto_shift", FLOW, [{"rule": "sqrt"}]),  # without shift: auto
    ("objective.auto_shift.rule", AUTO, [LIST, "cubic", None]),
    ("objective.auto_shift.base_tokens", AUTO, [LIST, WORD, 0, 1.5]),
    ("objective.auto_shift.base_shift", AUTO, [LIST, WORD, -1.0, NAN]),
    ("objective.auto_shift.max_tokens", AUTO, [LIST, WORD, 1]),
    ("objective.auto_shift.max_shift", AUTO, [LIST, WORD, 2.0]),  # which sqrt does not have
    ("objective.allow_zero_weight", {**DDPM, **CHOSEN}, [LIST, WORD, 2, None]),
    ("objective.allow_zero_weight", DDPM, [True]),  # without what it allows
    ("objective.min_snr_gamma", {**DDPM, "zero_terminal_snr": True, "prediction": "v"}, [5.0, 0, WORD, LIST]),
    ("train.loss_frames", {}, [LIST, 1, "new", None]),
    ("validate.report", {}, [LIST, WORD, 2, None]),
    ("sample.guidance_rescale", {}, [LIST, WORD, -0.1, 1.5, NAN]),
    ("sample.sampler", {}, [LIST, 1, "dpm", "ddim", None]),  # ddim does not go with flow
    ("device.kind", {}, [LIST, 1, "tpu", None]),
    ("tracking.project", {}, [LIST, 1, None]),
    ("tracking.run", {}, [LIST, 1]),
    ("tracking.videos", {}, [LIST, WORD, 2, None]),
    ("trackers", {}, ["wandb", 1, ["comet"]]),
]
CASES = [(key, section, value) for key, section, values in WRONG for value in values]


def content_of(key: str, section: dict[str, Any], value: Any) -> dict[str, Any]:
    """The smallest config with this value, and the rest of its section."""
    data = {"sources": [{"path": "clips"}], "buckets": [{"frames": 13, "height": 96, "width": 160}]}
    tree: dict[str, Any] = {"data": data}
    *sections, last = key.split(".")
    place = tree
    for number, name in enumerate(sections):
        place = place.setdefault(name, {})
        place.update(section if number == 0 else {})
    place[last] = value
    return tree


def names(message: str, key: str) -> bool:
    """True if a message names a key, or its section and in it the key."""
    section, _, last = key.rpartition(".")
    return key in message or re.search(rf"'{re.escape(section)}': .*\b{last}\b", message) is not None


@pytest.mark.parametrize(("key", "section", "value"), CASES, ids=lambda part: re.sub(r"\s+", "_", str(part)) or "empty")
def test_a_wrong_value_is_one_line_that_names_its_key(key: str, section: dict[str, Any], value: Any) -> None:
    with pytest.raises(UserError) as caught:
        make_config(content_of(key, section, value))
    message = str(caught.value)
    assert "\n" not in message, message
    assert names(message, key), message


@pytest.mark.parametrize("key", sorted({key for key, *_ in WRONG}))
def test_an_unknown_neighbour_of_a_key_names_it(key: str) -> None:
    section = next(section for name, section, _ in WRONG if name == key)
    with pytest.raises(UserError) as caught:
        make_config(content_of(f"{key}x", section, 1))
    message = str(caught.value)
    assert f"unknown key '{key}x'" in message and f"'{key.rpartition('.')[2]}'" in message


@pytest.mark.parametrize(("key", "section", "value"), [(k, s, v[0]) for k, s, v in WRONG[::4]], ids=str)
def test_the_command_ends_with_one_line(
    key: str, section: dict[str, Any], value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content_of(key, section, value)), encoding="utf-8")
    assert main(["train", str(path), "--print-config"]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert names(line, key) and "Traceback" not in line and captured.out == ""


def test_the_keys_are_those_of_the_configuration() -> None:
    names = {re.sub(r"\(\w+\)|\[\]", "", name) for name, _ in all_fields()}
    assert {key for key, *_ in WRONG} <= names
