"""Configs of published models: sections that follow from the repository, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspeed.config import Config, dump_config, make_config
from mmspeed.config.schema import FamilyTextConfig, FlowConfig, ModelConfig, PublishedModelConfig

DATA = {"sources": [{"path": "videos"}], "buckets": [{"frames": 9, "height": 64, "width": 64}]}


def published(**sections: Any) -> Config:
    model = {"kind": "diffusers", "pretrained": "owner/model", "revision": "v1"}
    return make_config({"name": "tuned", "data": DATA, "model": model, **sections})


def test_codec_text_and_objective_come_from_the_repository() -> None:
    config = published()
    assert isinstance(config.model, PublishedModelConfig) and isinstance(config.text, FamilyTextConfig)
    assert config.vae.model_dump(include={"kind", "pretrained", "revision", "subfolder"}) == {
        "kind": "diffusers", "pretrained": "owner/model", "revision": "v1", "subfolder": "vae",
    }  # fmt: skip
    assert (config.text.pretrained, config.text.revision, config.objective.kind) == ("owner/model", "v1", "family")


def test_a_section_may_change_a_key_of_the_repository() -> None:
    config = published(vae={"tiling": True}, text={"dtype": "bfloat16"}, objective={"weighting": "token"})
    assert config.vae.model_dump()["tiling"] and config.vae.model_dump()["pretrained"] == "owner/model"
    assert config.text.model_dump()["dtype"] == "bfloat16" and config.objective.weighting == "token"


def test_a_section_may_name_another_repository_or_kind() -> None:
    vae = {"pretrained": "owner/codec"}
    config = published(vae=vae, text={"kind": "minilm"}, objective={"kind": "flow", "shift": 3.0})
    assert config.vae.model_dump(include={"pretrained", "subfolder", "revision"}) == {
        "pretrained": "owner/codec", "subfolder": None, "revision": None,
    }  # fmt: skip
    assert config.text.kind == "minilm"
    assert isinstance(config.objective, FlowConfig) and config.objective.shift == 3.0


def test_own_models_keep_their_defaults_with_and_without_a_kind() -> None:
    tree = {"data": DATA, "model": {"size": "nano"}}
    assert Config.model_validate(tree).model == make_config(tree).model  # without the loader, too
    for section in ({}, {"model": {"size": "nano"}}, {"model": {"kind": "sora", "size": "nano"}}):
        config = make_config({"name": "own", "data": DATA, **section})
        assert isinstance(config.model, ModelConfig)
        assert (config.vae.kind, config.text.kind, config.objective.kind) == ("linear", "minilm", "flow")


def test_a_dumped_config_is_the_same_config(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "base").mkdir()
    tree = {"name": "tuned", "data": DATA, "model": {"kind": "diffusers", "pretrained": "base"}}
    config = make_config(tree, base=tmp_path)
    assert config.model.model_dump()["pretrained"] == config.text.model_dump()["pretrained"] == str(tmp_path / "base")
    assert make_config(yaml.safe_load(dump_config(config))) == config
