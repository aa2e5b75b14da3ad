"""The decoder against classes of transformers with eager attention and experts, on packed documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mmspeed.compute.registry import counting
from mmspeed.models.language.decoder import Decoder, next_tokens
from mmspeed.models.language.weights import HubWeights, types_of, write_folder
from mmspeed.protocols import source_of
from tests.support.language_models import KINDS, class_logits, loaded, pack, saved, widened

CLOSE = 2e-6  # of float32, relative


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Decoder, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return saved(request.param, folder), loaded(folder), folder


def apart(got: Tensor, wanted: Tensor) -> float:
    """The distance of tensors, relative to the size of the wanted one."""
    return float((got - wanted).detach().double().norm() / wanted.detach().double().norm())


def class_loss(logits_BNV: Tensor, target_BN: Tensor) -> Tensor:
    return F.cross_entropy(logits_BNV.flatten(0, 1), target_BN.flatten(), ignore_index=-100, reduction="sum")


def gradients_of_class(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names that the decoder's parameters have."""
    return {name.removeprefix("model."): p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", [3])
def test_logits_and_every_gradient_are_those_of_the_class(pair: tuple[nn.Module, Decoder, Path], rows: int) -> None:
    theirs, ours, _ = pair
    ids, positions, bounds = pack((5, 1, 7, 13, 8, 5), rows)
    targets = next_tokens(ids, bounds)
    theirs.zero_grad()
    ours.zero_grad()
    logits = class_logits(theirs, ids, positions)
    assert apart(ours(ids, bounds).logits_BNV, logits) < CLOSE
    loss = class_loss(logits, targets)
    loss.backward()
    with counting() as counts:
        output = ours(ids, bounds, targets)
    assert output.loss_BN is not None and apart(output.loss_BN.sum(), loss) < CLOSE
    output.loss_BN.sum().backward()
    wanted = gradients_of_class(theirs)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    assert wanted.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # a bias of keys moves the scores of a query alike, but for the turns: its gradient cancels, and rounds as that of values
        size = wanted[name.replace("k_proj.bias", "v_proj.bias")].norm() / wanted[name].norm()
        assert gradient is not None and apart(gradient, wanted[name]) < CLOSE * max(1, float(size)), name
    blocks = ours.settings.num_hidden_layers
    assert counts["document_attention.each"] == blocks and counts["linear_cross_entropy.chunked"] == 1
    with_experts = sum(ours.settings.has_experts(place) for place in range(blocks))
    assert counts["grouped_product.grouped_mm"] == 2 * with_experts


def test_other_documents_are_left_alone_bit_for_bit(pair: tuple[nn.Module, Decoder, Path]) -> None:
    """Moving the tokens of one document; experts' products run over rows of all documents and round by their places."""
    _, ours, _ = pair
    ids, _, bounds = pack()
    moved = ids.clone()
    start, end = bounds[2], bounds[3]
    moved[0, start:end] = ids[0, start:end].flip(0)
    with torch.no_grad():
        before, after = ours(ids, bounds).logits_BNV[0], ours(moved, bounds).logits_BNV[0]
    others = torch.ones(len(before), dtype=torch.bool)
    others[start:end] = False
    assert not torch.equal(before[~others], after[~others])
    if ours.settings.experts is None:
        assert torch.equal(before[others], after[others])
    else:
        assert apart(after[others], before[others]) < CLOSE


def test_an_unchanged_import_is_exported_byte_for_byte(pair: tuple[nn.Module, Decoder, Path], tmp_path: Path) -> None:
    _, ours, folder = pair
    source = source_of(ours)
    assert isinstance(source, HubWeights)
    names = write_folder(ours, folder, tmp_path / "out", types_of(source))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() == set(names)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert (folder / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


@pytest.mark.parametrize("kind", ["qwen3_tied", "deepseek_v3"])
def test_five_steps_of_adamw_are_those_by_hand_on_the_class(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, in which the class is made to compute throughout."""
    theirs, ours = saved(kind, tmp_path).double(), loaded(tmp_path).double()
    start = {name: p.detach().clone() for name, p in ours.named_parameters()}
    ids, positions, bounds = pack()
    targets = next_tokens(ids, bounds)
    with widened(monkeypatch, kind):
        for model in (theirs, ours):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                if model is theirs:
                    loss = class_loss(class_logits(theirs, ids, positions), targets)
                else:
                    loss = ours(ids, bounds, targets).loss_BN.sum()
                (loss / (targets >= 0).sum()).backward()
                optimizer.step()
    wanted = {name.removeprefix("model."): p.detach() for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert (parameter - wanted[name]).abs().max() < 1e-9, name
        assert (parameter - start[name]).abs().max() > 1e-3, name
