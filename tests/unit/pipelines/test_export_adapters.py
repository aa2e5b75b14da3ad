"""Exports of adapters: their official readers compute what the run does, and what cannot be read is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmspeed.__main__ import main
from mmspeed.config import make_config
from mmspeed.config.adapters import AdapterConfig, BaseConfig
from mmspeed.errors import UserError
from mmspeed.initialize import materialize, read_weights
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.manager import load_weights
from mmspeed.models.adapters import adapt
from mmspeed.models.language.weights import stored_decoder
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.inference.export import export_run
from mmspeed.pipelines.inference.export_adapter import export_adapter
from mmspeed.pipelines.inference.language import LanguageModel, Writing, export_language_run
from mmspeed.pipelines.inference.official import OfficialSampler
from mmspeed.preprocess.texts.preparation import TextPreparation
from mmspeed.protocols import source_of
from tests.support.checkpoints import whole_checkpoint
from tests.support.covers import slow_but
from tests.support.experts import train_experts
from tests.support.official_pipelines import load_official, made_run, official_latents, place_alike, shape_of
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import REPOSITORIES, save_wan, save_wan_experts

LORA = {"kind": "lora", "rank": 3, "alpha": 8, "targets": "attention"}
RSLORA = {**LORA, "alpha": 2, "rslora": True, "targets": "blocks"}


def adapted_run(folder: Path, base: Path, adapter: dict[str, Any] = LORA, **sections: Any) -> tuple[Path, nn.Module]:
    """A run's folder with one checkpoint of adapters of random numbers, and its model."""
    return made_run(
        folder, base, 0, model={"kind": "diffusers", "pretrained": str(base), "adapter": adapter}, **sections
    )


def language_run(folder: Path, name: str, start: Path | None = None, **model: Any) -> Path:
    """The folder of a run of three steps on lines of text; `start`: what it begins with, and then it does not learn."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"the rabbit {n} runs"}) + "\n" for n in range(200)))
    tree: dict[str, Any] = {
        "task": "language",
        "name": name,
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": 0.0},
        "model": model,
        "sequence_length": 64,
        "train": {"steps": 3, "batch_size": 2, "lr": 5e-2, "warmup_steps": 0, "log_every": 1},
        "device": {"kind": "cpu"},
    }
    if start is not None:
        tree["train"] |= {"start_from": str(start), "lr": 1e-30}
    config = make_config(tree, (), origin="test")
    TextPreparation(config).build()
    TrainPipeline(config).run()
    return config.run_dir


def first_output(pipeline: Any, family: str) -> Tensor:
    """What a pipeline's transformer gives in its first call, where matrices lie alike in memory."""
    place_alike(pipeline)
    outputs: list[Tensor] = []
    hook = pipeline.transformer.register_forward_hook(lambda module, given, output: outputs.append(output[0]))
    noise = torch.randn((1, *shape_of(family)[1]), generator=torch.Generator().manual_seed(3))
    official_latents(pipeline, family, noise, 2, 4.0)
    hook.remove()
    return outputs[0]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", slow_but(REPOSITORIES, {"wan", "hunyuan-video-1.5"}))
@pytest.mark.parametrize("adapter", [LORA, RSLORA], ids=["lora", "rslora"])
def test_the_official_reader_computes_what_the_run_does(tmp_path: Path, family: str, adapter: dict[str, Any]) -> None:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    base, out = REPOSITORIES[family](tmp_path / "base"), tmp_path / "out"
    run, model = adapted_run(tmp_path, base, adapter)
    written = export_adapter(run, out)
    pipeline = load_official(base)
    before = first_output(pipeline, family)
    if family == "hunyuan-video-1.5":  # whose pipelines load no adapters
        assert written.format == "peft"
        PeftModel.from_pretrained(pipeline.transformer, out)  # in place
    else:
        assert written.format == "diffusers"
        pipeline.load_lora_weights(str(out))
    loaded = first_output(pipeline, family)
    assert sum(isinstance(layer, LoraLayer) for layer in pipeline.transformer.modules()) == written.layers
    merged = export_adapter(run, tmp_path / "merged", format="merged")
    of_merged = first_output(load_official(tmp_path / "merged"), family)
    own = load_official(base)
    own.register_modules(transformer=model.eval())
    truth = first_output(own, family)
    assert distance(before, truth) > 0.1  # the adapter moves it
    assert distance(loaded, truth) < 1e-6 and distance(of_merged, truth) < 1e-5
    facts = json.loads((out / "export.json").read_text())
    part = facts["parts"]["transformer"]
    assert written.layers == merged.layers == len(part["layers"]) and part["base"]
    assert (facts["rank"], facts["alpha"], facts["rslora"]) == (3, adapter["alpha"], "rslora" in adapter)
    assert facts["reader"].startswith("peft " if family == "hunyuan-video-1.5" else "diffusers ")
    assert (facts["run"], facts["checkpoint"], facts["format"]) == ("own", "step-00000001", written.format)


def test_the_command_says_how_to_load_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diffusers import WanTransformer3DModel

    run, _ = adapted_run(tmp_path, save_wan(tmp_path / "base"))
    out = tmp_path / "half"
    assert main(["export", str(run), "-o", str(out), "--dtype", "bfloat16", "--format", "diffusers"]) == 0
    assert f'16 layers of step-00000001 (model), diffusers, 4.6 kB; load with pipe.load_lora_weights("{out}")' in (
        capsys.readouterr().out
    )
    stored = whole_checkpoint(run)
    tensors = load_file(out / "pytorch_lora_weights.safetensors")
    for name, tensor in tensors.items():
        own = stored[f"model.{name.removeprefix('transformer.').removesuffix('.weight')}.default.weight"]
        assert torch.equal(tensor, own.to(torch.bfloat16))
    assert len(tensors) == 32
    merged = export_adapter(run, tmp_path / "merged", format="merged").folder
    assert json.loads((merged / "export.json").read_text())["reader"] == "unproven"
    bare = export_adapter(run, tmp_path / "bare", format="merged", others="none")
    loaded = eval(bare.loading, {"WanTransformer3DModel": WanTransformer3DModel})  # noqa: S307  # the printed line is what is tested
    whole = load_file(merged / "transformer" / "diffusion_pytorch_model.safetensors")
    sampled = OfficialSampler.open(run, device="cpu").pipeline.transformer.state_dict()  # mmspeed sample --official
    assert all(torch.equal(sampled[name], tensor) for name, tensor in whole.items())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.state_dict().items())


def test_what_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    base = save_wan(tmp_path / "base")
    run, _ = adapted_run(tmp_path, base)
    whole, _ = made_run(tmp_path, base, 2, name="whole")
    with pytest.raises(UserError, match=r"whole trains whole weights.* leave --format out"):
        export_adapter(whole, tmp_path / "out", format="peft")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*full exists already"):
        export_adapter(run, tmp_path / "full")
    with pytest.raises(UserError, match=r"has no checkpoint 9: there are latest, best and the steps"):
        export_adapter(run, tmp_path / "out", checkpoint=9)
    index = base / "model_index.json"
    before = index.read_text()
    index.write_text(before.replace('"WanPipeline"', '"HunyuanVideo15Pipeline"'))
    with pytest.raises(UserError, match=r"HunyuanVideo15Pipeline loads no adapters: use peft or merged"):
        export_adapter(run, tmp_path / "out", format="diffusers")
    index.write_text(before)
    path = base / "transformer" / "config.json"
    path.write_text(path.read_text().replace('"eps": 1e-06', '"eps": 1e-05'))
    for format in ("diffusers", "peft", "merged"):
        with pytest.raises(UserError, match="was started from another base"):
            export_adapter(run, tmp_path / "out", format=format)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_tensors_that_nothing_takes_are_an_error(tmp_path: Path) -> None:
    base = save_wan(tmp_path / "base")
    run, _ = made_run(tmp_path, base, frozen=2)
    adapted, _ = adapted_run(tmp_path, base, name="adapted")
    others = (adapted / "config.yaml").read_text().replace("rank: 3", "rank: 4")
    (adapted / "config.yaml").write_text(others)
    for format in ("peft", "merged"):
        with pytest.raises(UserError, match=r"lora_A.default.weight.*\(3, 24\).*\(4, 24\)"):
            export_adapter(adapted, tmp_path / "out", format=format)  # type: ignore[arg-type]
    (adapted / "config.yaml").write_text((run / "config.yaml").read_text())  # a run whose config knows no adapter
    with pytest.raises(UserError, match=r"holds `blocks.0.attn1.to_k.lora_A.default.weight`.* no tensor .* takes"):
        export_run(adapted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert main(["checkpoint", "merge-ema", str(adapted)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_expert_has_a_file_which_its_transformer_loads(tmp_path: Path, ranks: int) -> None:
    from peft import PeftModel

    save_wan_experts(tmp_path / "base")
    overrides = tuple(f"model.adapter.{name}={value}" for name, value in LORA.items())
    run_ranks(train_experts, ranks, str(tmp_path), (*overrides, f"parallel.strategy={'fsdp' if ranks > 1 else 'none'}"))
    run = next((tmp_path / "runs").iterdir())
    out, stored = tmp_path / "out", whole_checkpoint(run)
    call = export_adapter(run, out).loading
    pipe = load_official(tmp_path / "base")
    for one in call.split("; "):
        eval(one, {"pipe": pipe})  # noqa: S307  # the printed line is what is tested
    assert {path.name for path in out.iterdir()} == {
        "export.json", "pytorch_lora_weights_high.safetensors", "pytorch_lora_weights_low.safetensors",
    }  # fmt: skip
    of_peft = load_official(tmp_path / "base")
    for one in export_adapter(run, tmp_path / "peft", format="peft").loading.split("; "):
        eval(one, {"pipe": of_peft, "PeftModel": PeftModel})  # noqa: S307  # the printed line is what is tested
    for component, prefix in (("transformer", "ema."), ("transformer_2", "transformer_2:ema.")):
        for each in (pipe, of_peft):
            layer = getattr(each, component).blocks[0].attn1.to_q
            (name,) = layer.lora_B
            own = stored[f"{prefix}blocks.0.attn1.to_q.lora_B.default.weight"]
            assert own.any() and torch.equal(layer.lora_B[name].weight, own) and layer.scaling[name] == 8 / 3
    export_adapter(run, tmp_path / "original", format="original")
    for start in (run, out, tmp_path / "peft", tmp_path / "original"):  # each expert begins with its own
        name, still = f"begun-{start.name}", f"train.start_from={start}"
        train_experts(str(tmp_path), (*overrides, f"name={name}", still, "train.lr=1e-30", "train.ema_decay=null"))
        begun = whole_checkpoint(tmp_path / "runs" / name)
        for prefix, other in (("model.", "ema."), ("transformer_2:model.", "transformer_2:ema.")):
            key = "blocks.0.attn1.to_q.lora_B.default.weight"
            torch.testing.assert_close(begun[prefix + key], stored[other + key], rtol=1e-6, atol=0)
    with pytest.raises(UserError, match=r"with that of each expert \(`\*_high` and `\*_low`\)"):
        one = f"train.start_from={out / 'pytorch_lora_weights_high.safetensors'}"
        train_experts(str(tmp_path), (*overrides, "name=one", one))
    merged = load_official(export_adapter(run, tmp_path / "merged", format="merged").folder)
    base = load_official(tmp_path / "base")
    for component in ("transformer", "transformer_2"):
        own, before = (getattr(each, component).blocks[0].attn1.to_q.weight for each in (merged, base))
        assert not torch.equal(own, before)


@pytest.mark.parametrize("shape", ["tiny-qwen3-0.6b", pytest.param("tiny-deepseek-v3", marks=pytest.mark.slow)])
def test_a_decoders_adapters_are_loaded_by_peft(tmp_path: Path, shape: str) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    base = export_language_run(language_run(tmp_path, "whole", shape=shape), tmp_path / "base").folder
    adapter = {**LORA, "alpha": 60, "targets": "attention+mlp" if "qwen" in shape else "attention"}
    run = language_run(tmp_path, "adapted", pretrained=str(base), adapter=adapter, num_nextn_predict_layers=0)
    written = export_adapter(run, tmp_path / "out")
    assert written.format == "peft" and written.loading.startswith("AutoPeftModelForCausalLM")
    export_adapter(run, tmp_path / "merged", format="merged")
    ids_BN = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))
    models = [
        AutoModelForCausalLM.from_pretrained(base),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out"),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ]
    decoder: Any = adapt(stored_decoder(str(base), mtp=0), AdapterConfig(**adapter), BaseConfig())
    materialize(decoder, torch.device("cpu"))
    read_weights(decoder, source_of(decoder))  # type: ignore[arg-type]
    load_weights(run / "checkpoints" / "step-00000003", decoder)
    with torch.no_grad():
        before, auto, loaded, merged = (model.eval()(ids_BN).logits for model in models)
        truth = decoder.eval()(ids_BN).logits_BNV
    assert distance(before, truth) > 0.1
    assert torch.equal(auto, loaded) and distance(loaded, truth) < (1e-6 if "qwen" in shape else 1e-5)
    assert distance(merged, truth) < 1e-5
    rows = []
    for start in (run, tmp_path / "out"):
        begun = language_run(
            tmp_path, f"begun-{start.name}", start, pretrained=str(base), adapter=adapter, num_nextn_predict_layers=0
        )
        rows.append([row["loss"] for row in read_metrics(begun / "metrics.jsonl") if row["kind"] == "train"])
    assert rows[0] == rows[1] and len(rows[0]) == 3
    with pytest.raises(UserError, match=r"--format diffusers: .* trains a language model"):
        export_adapter(run, tmp_path / "other", format="diffusers")
    if "deepseek" in shape:
        further = language_run(tmp_path, "further", pretrained=str(base), adapter=adapter)
        with pytest.raises(UserError, match=r"--format peft: .*mtp.0.mtp_block.self_attn.q_a_proj.*: export a merged"):
            export_adapter(further, tmp_path / "other")
    assert LanguageModel.from_run(run, device="cpu")("the rabbit", Writing(tokens=4))
