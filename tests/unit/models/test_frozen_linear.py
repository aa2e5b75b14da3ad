"""A frozen base of one byte a number: rounded by rows as it is read, computed with as its numbers say, gathered at one byte."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmspeed.config.adapters import AdapterConfig, BaseConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.published import PublishedModelConfig
from mmspeed.initialize import materialize, read_weights
from mmspeed.models.adapters import adapter_values
from mmspeed.models.frozen_linear import LARGEST, FrozenLinear, Kind, dequantised, quantised
from mmspeed.models.sections import with_weights
from mmspeed.parallel import parallelize
from mmspeed.protocols import blocks_of, source_of
from mmspeed.rng import normal
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole, worst
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import save_wan, wan_transformer
from tests.support.video_transformers import loss_of, make_inputs

KINDS: tuple[Kind, ...] = ("int8", "float8")


def adapted(folder: Path, dtype: Any) -> nn.Module:
    """A small Wan of the repository in `folder`, with adapters that are not zero."""
    adapter = AdapterConfig(kind="lora", rank=3, alpha=6, targets="attention+mlp")
    section = PublishedModelConfig(
        kind="diffusers", pretrained=str(folder), adapter=adapter, base=BaseConfig(dtype=dtype)
    )
    model = with_weights(section, 1, 1, "meta")
    materialize(model, torch.device("cpu"))
    source = source_of(model)
    assert source is not None
    read_weights(model, source)
    for number, (parameter, value) in enumerate(adapter_values(model, 0)):
        parameter.data.copy_(value + 0.05 * normal(tuple(value.shape), 1, "init", number))
    return model


def dequantised_twin(folder: Path, model: nn.Module) -> nn.Module:
    """The same model with ordinary layers that hold the numbers of the frozen ones."""
    twin = adapted(folder, "bfloat16")
    for name, layer in model.named_modules():
        if isinstance(layer, FrozenLinear):
            twin.get_parameter(f"{name}.weight").data = dequantised(layer.weight, layer.scale, torch.bfloat16)
    return twin


def step(model: nn.Module, share: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    loss = loss_of(model, make_inputs("wan"))
    (loss * share).backward()
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: value.clone() for name, value in gradients.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rounded_to_bytes_once(kind: Kind) -> None:
    weight_RC = normal((5, 64), 0, "weight") * torch.tensor([1.0, 1e-3, 1e3, 1.0, 0.0])[:, None]
    bytes_RC, scale_R1 = quantised(weight_RC, kind)
    assert bytes_RC.element_size() == 1 and scale_R1.shape == (5, 1)
    value_RC = dequantised(bytes_RC, scale_R1, torch.float32)
    largest_R1 = weight_RC.abs().amax(1, keepdim=True)
    step_R1 = largest_R1 / (2 * LARGEST["int8"]) if kind == "int8" else weight_RC.abs() / 16 + largest_R1 * 2**-9
    assert ((value_RC - weight_RC).abs() <= step_R1 * 1.0001).all()
    again, scale = quantised(value_RC, kind)
    assert torch.equal(again, bytes_RC) and torch.allclose(scale.view(torch.float32), scale_R1.view(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_with_the_numbers_of_its_bytes(tmp_path: Path, kind: Kind) -> None:
    model = adapted(save_wan(tmp_path / "wan", in_channels=4, out_channels=4, text_dim=8), kind)
    frozen = [layer for layer in model.modules() if isinstance(layer, FrozenLinear)]
    assert len(frozen) == 2 * 10 and all(layer.weight.element_size() == 1 for layer in frozen)
    with torch.autocast("cpu", torch.bfloat16):
        (loss, gradients), (true, others) = step(model), step(dequantised_twin(tmp_path / "wan", model))
    assert abs(loss - true) <= 1e-5 * true
    assert worst(gradients, others)[0] <= 1e-5 and len(gradients) == 2 * len(frozen)


@pytest.mark.parametrize("dtype", ["bfloat16", *KINDS])
def test_a_base_takes_the_bytes_of_its_number_type(tmp_path: Path, dtype: Any) -> None:
    """One byte a number and four a row of linear layers in blocks, two of all else but what the class keeps in float32."""
    from diffusers import WanTransformer3DModel

    wide = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "freq_dim": 256}
    folder = save_wan(tmp_path / "wan", in_channels=4, out_channels=4, text_dim=8, **wide)
    weights, expected = [p for p in adapted(folder, dtype).parameters() if not p.requires_grad], 0
    for name, parameter in wan_transformer(in_channels=4, out_channels=4, text_dim=8, **wide).named_parameters():
        if dtype in KINDS and name.startswith("blocks.") and parameter.ndim == 2:
            expected += parameter.numel() + 4 * len(parameter)
        else:
            kept = any(part in name.split(".") for part in WanTransformer3DModel._keep_in_fp32_modules)
            expected += (4 if kept else 2) * parameter.numel()
    held = {weight.data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert sum(held.values()) == pytest.approx(expected, rel=0.02)


def _counted(gather: Any, gathered: Counter[str], output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    gathered["bytes"] += output_tensor.nbytes
    return gather(output_tensor, *args, **options)


def on_two(folder: Path, kind: Kind) -> dict[str, Any]:
    """How far a step is from that of the dequantised model, and how many bytes less all-gathers received."""
    results: dict[str, Any] = {}
    call = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )  # of torch 2.13, 2.11
    meshes, gather = Meshes(), getattr(dist, call)
    for dtype in ("bfloat16", kind):
        mesh, layout = meshes.of(ParallelConfig())
        gathered: Counter[str] = Counter()
        model = adapted(folder, kind)
        model = model if dtype == kind else dequantised_twin(folder, model)
        model = parallelize(model, mesh, "fsdp", layout=layout, compute_dtype=torch.bfloat16)
        with mock.patch.object(dist, call, partial(_counted, gather, gathered)):
            loss, gradients = step(model, 1 / dist.get_world_size())
        results[dtype] = loss, gradients, gathered["bytes"]
    (loss, gradients, nbytes), (true, others, plain) = results[kind], results["bfloat16"]
    return {"loss": abs(loss - true) / true, "gradient": worst(gradients, others)[0], "saved": plain - nbytes}


@pytest.mark.parametrize("kind", ["int8", pytest.param("float8", marks=pytest.mark.slow)])
def test_processes_gather_one_byte_a_number(tmp_path: Path, kind: Kind) -> None:
    folder = save_wan(tmp_path / "wan", in_channels=4, out_channels=4, text_dim=8)
    result, model = run_ranks(on_two, 2, folder, kind)[0], adapted(folder, kind)
    assert result["loss"] <= 1e-5 and result["gradient"] <= 1e-5, result
    blocks = [block for _, block in blocks_of(model)]
    frozen = [layer for block in blocks for layer in block.modules() if isinstance(layer, FrozenLinear)]
    saved = sum(layer.weight.numel() - 4 * len(layer.weight) for layer in frozen)
    assert result["saved"] == 2 * saved  # in forward and in backward
