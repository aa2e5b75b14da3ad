"""Regions of experts: bytes that backward finds, gradients to the bit, blocks without experts, and options under a budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from mmspeed.config.memory import MemoryConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory import ActivationPolicies, set_policies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.planning.knapsack import Option
from mmspeed.memory.planning.measure import StorageTracker
from mmspeed.memory.planning.options import combinations, single_policies
from mmspeed.memory.recompute.regions import regions_of
from mmspeed.models.language.decoder import Decoder, next_tokens
from mmspeed.models.language.shapes import SHAPES, tiny_twin

TOKENS = 128
SETTINGS = replace(tiny_twin(SHAPES["deepseek-v3"].settings), num_nextn_predict_layers=0)
assert SETTINGS.experts is not None
ROWS = 4 * TOKENS * SETTINGS.experts.top_k * sum(map(SETTINGS.has_experts, range(SETTINGS.num_hidden_layers)))
INPUT, HIDDEN = ROWS * SETTINGS.hidden_size, ROWS * SETTINGS.experts.moe_intermediate_size  # bytes in all blocks


@cache
def step(**ways: str) -> tuple[int, list[Tensor]]:
    """(bytes kept for backward, gradients) of a step under the ways of all blocks."""
    model, host, counter = Decoder(SETTINGS), Offloader(Device("cpu", 0), 1 << 10), StorageTracker()
    for block in model.layers:
        set_policies(block, ways, host.group)  # type: ignore[arg-type]
    ids = torch.arange(TOKENS)[None] * 7 % SETTINGS.vocab_size
    with counter:
        before = counter.begin()
        loss = model(ids, target_BN=next_tokens(ids)).loss_BN.sum()
        kept = counter.now() - before
        loss.backward()
    return kept, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("ways", "freed"),
    [
        ({"dispatch": "recompute"}, INPUT),
        ({"experts": "recompute"}, 2 * HIDDEN),  # the gated units, and those times their gates
        ({"dispatch": "recompute", "experts": "recompute"}, INPUT + 2 * HIDDEN),
        ({"experts": "offload_recompute"}, 4 * HIDDEN),
        ({"dispatch": "offload"}, INPUT),
    ],
    ids=str,
)
def test_backward_makes_rows_of_experts_again(ways: dict[str, str], freed: int) -> None:
    (kept, grads), (all_kept, wanted) = step(**ways), step()
    assert len(grads) == len(wanted) and all(map(torch.equal, grads, wanted))
    assert freed <= all_kept - kept <= 1.1 * freed


def test_blocks_without_experts_have_no_such_regions_and_nested_ones_are_refused() -> None:
    dense, *others = Decoder(SETTINGS).layers
    assert regions_of(dense) == ("attention", "mlp")
    assert {regions_of(block) for block in others} == {("attention", "mlp", "dispatch", "experts")}
    nested: ActivationPolicies = {"mlp": "recompute", "experts": "recompute"}
    set_policies(dense, {"experts": "recompute"})
    with pytest.raises(UserError, match="experts lies in mlp in DecoderBlock"):
        set_policies(others[0], nested)
    with pytest.raises(ValueError, match="experts is inside mlp"):
        MemoryConfig.model_validate({"activation_policy": nested})


def test_a_budget_may_choose_them_where_the_mlp_has_no_way() -> None:
    each = single_policies(("attention", "mlp", "dispatch", "experts"), with_swap=True)
    options = combinations([Option(100 - place, 0, 0, 0, place, ways) for place, ways in enumerate(each)])
    # 6 ways of attention, beside 6 of the MLP or 3 x 3 of its parts; and 5 of the block
    assert len(options) == 6 * (5 + 9) + 5
    assert not any("mlp" in option.ways and {"dispatch", "experts"} & {*option.ways} for option in options)
    wanted = {"dispatch": "offload_recompute", "experts": "recompute"}
    (found,) = (option for option in options if option.ways == wanted)
    assert found.seconds == each.index({"dispatch": "offload_recompute"}) + each.index({"experts": "recompute"})
