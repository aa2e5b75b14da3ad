"""Modules for further tokens against `transformers.modeling_layers.MtpModel`, which reads our files by names of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.models.language.decoder import Decoder, later_targets, later_tokens, next_tokens
from mmspeed.models.language.weights import stored_decoder, write_folder
from mmspeed.models.weights import quiet
from tests.support.language_models import class_logits, loaded, pack, saved

modeling_layers = pytest.importorskip("transformers.modeling_layers")
pytestmark = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no MtpModel")

MODULES = 2
CLOSE = 2e-6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path]:
    """A decoder with two modules, of random weights, in a folder that it has written."""
    folder = tmp_path_factory.mktemp("models")
    saved("deepseek_v3", folder / "base", num_mtp_layers=MODULES)
    model = Decoder(replace(stored_decoder(str(folder / "base")).settings, num_nextn_predict_layers=MODULES))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, [*model.parameters(), *model.buffers()]):
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    write_folder(model, folder / "base", folder / "out")
    return model, folder / "out"


def classes(folder: Path) -> tuple[Any, Any]:
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    with quiet():
        main: Any = DeepseekV3ForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager"
        )
        main._keys_to_ignore_on_load_unexpected = [
            r"model\.layers\.[34]\."
        ]  # by which it knows modules of 61 layers alone
        return main.train(), MtpModel.from_pretrained(main).train()


def class_predictions(main: Any, mtp: Any, ids: Tensor, positions: Tensor, bounds: Tensor) -> list[Tensor]:
    """Logits of the class's modules, each from the tokens of the one before."""
    x = main.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    logits = []
    for place in range(MODULES):
        later = later_tokens(ids, bounds, place + 1)
        x = mtp.forward_layer(place, x, positions + place + 1, None, input_ids=later)
        logits.append(main.lm_head(x))
    return logits


def apart(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).detach().norm() / wanted.detach().norm())


def test_predictions_and_gradients_are_those_of_the_class(written: tuple[Decoder, Path]) -> None:
    _, folder = written
    ours = loaded(folder)
    assert ours.settings.num_nextn_predict_layers == MODULES
    main, mtp = classes(folder)
    ids, positions, bounds = pack()
    targets = next_tokens(ids, bounds)
    wanted = class_predictions(main, mtp, ids, positions, bounds)
    output = ours(ids, bounds)
    assert apart(output.logits_BNV, class_logits(main, ids, positions)) < CLOSE
    for (logits,), other in zip(output.mtp, wanted, strict=True):
        assert apart(logits, other) < CLOSE
    losses = ours(ids, bounds, targets).mtp
    total = torch.zeros(())
    for place, (other, (loss, _)) in enumerate(zip(wanted, losses, strict=True), 1):
        target = later_targets(targets, bounds, place)
        one = F.cross_entropy(other.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100)
        assert apart(loss.sum(), one) < CLOSE
        total = total + one
    total.backward()
    sum(loss.sum() for loss, _ in losses).backward()
    theirs = {name.removeprefix("model."): p.grad for name, p in main.named_parameters()}
    theirs |= {f"mtp.{name.removeprefix('layers.')}": p.grad for name, p in mtp.named_parameters() if "layers" in name}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and apart(parameter.grad, theirs[name]) < CLOSE, name


def test_targets_are_those_so_many_tokens_on_and_of_the_same_document() -> None:
    ids, bounds = torch.arange(10, 20)[None], torch.tensor([0, 4, 5, 10])
    targets = next_tokens(ids, bounds)
    assert targets[0].tolist() == [11, 12, 13, -100, -100, 16, 17, 18, 19, -100]
    assert later_targets(targets, bounds, 1)[0].tolist() == [12, 13, -100, -100, -100, 17, 18, 19, -100, -100]
    assert later_tokens(ids, bounds, 2)[0].tolist() == [12, 13, 13, 13, 14, 17, 18, 19, 19, 19]
    counts = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0, 1]]).bool()
    assert next_tokens(ids, bounds, counts)[0].tolist() == [-100, 12, 13, -100, -100, 16, -100, -100, 19, -100]


def test_a_further_prediction_leaves_other_documents_alone(written: tuple[Decoder, Path]) -> None:
    ours = written[0]
    ids, _, bounds = pack()
    moved = ids.clone()
    moved[0, bounds[2] : bounds[3]] = ids[0, bounds[2] : bounds[3]].flip(0)
    others = torch.ones(ids.shape[1], dtype=torch.bool)
    others[bounds[2] : bounds[3]] = False
    with torch.no_grad():
        for (before,), (after,) in zip(ours(ids, bounds).mtp, ours(moved, bounds).mtp, strict=True):
            assert apart(after[0, others], before[0, others]) < CLOSE and apart(after, before) > 1e-3


def test_a_folder_is_read_without_its_modules(written: tuple[Decoder, Path]) -> None:
    _, folder = written
    ours = loaded(folder, mtp=0)
    assert not ours.mtp and torch.equal(ours.norm.weight, written[0].norm.weight)
