"""Named shapes: parameters and operations counted from settings, against models on the meta device and published totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula  # noqa: F401

from mmspeed.errors import UserError
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.counts import block_work, count_parameters, forward_work
from mmspeed.models.language.decoder import Decoder, next_tokens
from mmspeed.models.language.shapes import SHAPES, shape_named, tiny_twin
from mmspeed.models.language.weights import on_meta


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_its_published_size(name: str) -> None:
    shape = SHAPES[name]
    counts = count_parameters(shape.settings)
    assert counts.total / 1e9 == pytest.approx(shape.total, rel=0.01)
    active = counts.total if shape.active is None else shape.active * 1e9
    assert counts.active == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize("name", [*SHAPES][::2])
def test_counts_are_those_of_the_model_on_the_meta_device(name: str) -> None:
    for settings in (SHAPES[name].settings, tiny_twin(SHAPES[name].settings)):
        counts, model = count_parameters(settings), on_meta(settings)
        mtp = sum(parameter.numel() for parameter in model.mtp.parameters())
        assert sum(parameter.numel() for parameter in model.parameters()) - mtp == counts.total
        assert (
            mtp == counts.mtp
            and len(model.plan.blocks) == settings.num_hidden_layers + settings.num_nextn_predict_layers
        )
        embedding = model.embed_tokens.weight.numel() + (
            0 if settings.tie_word_embeddings else model.lm_head.weight.numel()
        )
        assert embedding == counts.embedding


def counted(settings: DecoderSettings, tokens: int) -> int:
    """Operations of a forward pass, by torch's counter; grouped products are counted here, since it knows none."""
    grouped = 0

    def product(x_shape: Any, weight_shape: Any, *_: object, **__: object) -> int:
        nonlocal grouped
        return 2 * x_shape[0] * weight_shape[-2] * weight_shape[-1]

    mapping = {torch.ops.aten._grouped_mm: product}
    model = on_meta(settings).to(torch.bfloat16)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(ids)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v3"])
def test_operations_are_those_of_torchs_counter(name: str) -> None:
    from dataclasses import replace

    settings = replace(SHAPES[name].settings, num_hidden_layers=4, num_nextn_predict_layers=0)
    for tokens in (64, 320):
        work = block_work(settings, tokens)
        assert forward_work(settings, [tokens]).matmul == counted(settings, tokens) == sum(work.blocks) + work.after
    further = block_work(replace(settings, num_nextn_predict_layers=1), 64)
    assert len(further.blocks) == 5 and further.after == 2 * block_work(settings, 64).after


def test_documents_attend_within_themselves() -> None:
    settings = SHAPES["qwen3-0.6b"].settings
    one, two = forward_work(settings, [400]), forward_work(settings, [100, 300])
    assert one.products == two.products and two.attention / one.attention == (100**2 + 300**2) / 400**2


@pytest.mark.parametrize("name", [*SHAPES][::3])
def test_a_tiny_twin_learns_on_a_cpu(name: str) -> None:
    settings = tiny_twin(SHAPES[name].settings)
    model, ids = Decoder(settings), torch.arange(48)[None] % 7
    bounds = torch.tensor([0, 20, 48])
    targets = next_tokens(ids, bounds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        output = model(ids, bounds, targets)
        assert output.loss_BN is not None and len(output.mtp) == settings.num_nextn_predict_layers
        loss = output.loss_BN.sum() / 46 + sum(loss_BN.sum() / 44 for loss_BN, _ in output.mtp)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(float(output.loss_BN.detach().sum()) / 46)
    assert losses[-1] < 0.7 * losses[0]


def test_a_name_that_is_none_is_an_error_with_near_ones() -> None:
    with pytest.raises(UserError, match=r"'qwen3-8' is no known shape; did you mean 'qwen3-"):
        shape_named("qwen3-8")
