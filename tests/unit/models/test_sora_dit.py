"""SoraDiT: start, gradients, masks, spans, positions, FLOPs, sizes, initial weights, number types, compilation."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from mmspeed import rng
from mmspeed.compute.attention import attention
from mmspeed.config.schema import ModelConfig
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights, initial_value
from mmspeed.models import SIZES, SoraDiT, SoraDiTConfig, build_model
from mmspeed.models.sora.model import ZERO_MODULES, count_parameters, on_meta
from tests.support.attend_by import attend_by
from tests.support.model_sizes import size_rows

SMALL = SoraDiTConfig(width=48, depth=4, heads=4, latent_channels=3, text_width=10, adaln_rank=4)
ARRANGEMENTS = ("factorised", "full")


def small(perturbed: bool = True, **changes: object) -> SoraDiT:
    """A small model; `perturbed` moves every parameter off its start, so that no zero hides anything."""
    model = SoraDiT(dataclasses.replace(SMALL, **changes))
    if perturbed:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += 0.1 * rng.normal(parameter.shape, 1, "perturb", name)
    return model


def inputs(latent: tuple[int, int, int] = (3, 4, 6), batch: int = 2, config: SoraDiTConfig = SMALL) -> list[Tensor]:
    """x, t, text, mask: the second caption has 3 real tokens of 5."""
    x = rng.normal((batch, config.latent_channels, *latent), 0, "x")
    text = rng.normal((batch, 5, config.text_width), 0, "text")
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4])[:batch, None]
    return [x, torch.linspace(0.2, 0.9, batch), text, mask]


def changed_frames(model: SoraDiT, frame: int) -> list[bool]:
    """Which frames of the output change when one frame of the input does."""
    x, *rest = inputs()
    other = x.clone()
    other[:, :, frame] += 1
    return [bool(d > 1e-4) for d in (model(x, *rest) - model(other, *rest)).abs().amax(dim=(0, 1, 3, 4))]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_at_the_start_blocks_are_the_identity_and_the_output_is_zero(arrangement: str) -> None:
    model = small(perturbed=False, arrangement=arrangement)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append(torch.equal(args[0], out)))
    out = model(*inputs())
    assert out.shape == (2, 3, 3, 4, 6) and torch.equal(out, torch.zeros_like(out))
    assert seen == [True] * 4


@pytest.mark.parametrize(("arrangement", "latent"), [("factorised", (3, 4, 6)), ("full", (1, 2, 2))])
def test_every_parameter_gets_a_gradient(arrangement: str, latent: tuple[int, int, int]) -> None:
    model = small(arrangement=arrangement)
    model(*inputs(latent)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # over a single token the scores do not matter: there the gradient is there, and zero
        if latent != (1, 2, 2) or not any(part in name for part in ("self_attention.q_norm", "self_attention.k_norm")):
            assert parameter.grad.abs().max() > 0, name


def test_masked_text_changes_nothing_and_real_text_does() -> None:
    model = small()
    x, t, text, mask = inputs()
    out = model(x, t, text, mask)
    padding, real = text.clone(), text.clone()
    padding[1, 3:] = 7.0
    real[1, 1] = rng.normal((10,), 0, "other text")
    assert torch.equal(model(x, t, padding, mask), out)
    moved = (model(x, t, real, mask) - out).abs().amax(dim=(1, 2, 3, 4))
    assert moved[0] == 0 and moved[1] > 1e-3
    # what is masked may as well be absent
    torch.testing.assert_close(model(x[1:], t[1:], text[1:, :3], mask[1:, :3]), out[1:], rtol=1e-5, atol=1e-5)


def test_spatial_blocks_do_not_mix_frames_and_temporal_blocks_do_not_mix_positions() -> None:
    assert changed_frames(small(depth=1), 1) == [False, True, False]
    assert changed_frames(small(depth=2), 1) == [True, True, True]
    assert changed_frames(small(depth=1, arrangement="full"), 1) == [True, True, True]
    temporal = small(depth=2)
    temporal.blocks = nn.ModuleList(temporal.blocks[1:])
    x, *rest = inputs()
    other = x.clone()
    other[:, :, 1, 2:, 4:] += 1  # the last patch of the middle frame
    moved = (temporal(x, *rest) - temporal(other, *rest)).abs().amax(dim=(0, 1))
    assert moved[:, 2:, 4:].amin() > 1e-4 and moved[:, :2].amax() == 0 and moved[:, :, :4].amax() == 0


def flip_patches(x_BCThw: Tensor, dim: int) -> Tensor:
    """The patches (1 x 2 x 2) in reverse order along a dim."""
    return x_BCThw.unflatten(dim, (-1, SMALL.patch[dim - 2])).flip(dim).flatten(dim, dim + 1)


@pytest.mark.parametrize("span, dims", [("spatial", (3, 4)), ("temporal", (2,)), ("full", (2, 3, 4))])
def test_the_order_of_tokens_matters_within_a_span(span: str, dims: tuple[int, ...]) -> None:
    model = small(depth=2, arrangement="full" if span == "full" else "factorised")
    model.blocks = nn.ModuleList(model.blocks[1:] if span == "temporal" else model.blocks[:1])
    x, *rest = inputs()
    for dim in dims:  # without positions the output would be flipped with the input
        assert (model(flip_patches(x, dim), *rest) - flip_patches(model(x, *rest), dim)).abs().max() > 1e-3
    frozen = {"spatial": 2, "temporal": 3}.get(span)
    if frozen is not None:  # outside its span the order does not matter: 2 frames, 3 rows of patches
        roll = functools.partial(torch.roll, shifts=1 if frozen == 2 else 2, dims=frozen)
        torch.testing.assert_close(model(roll(x), *rest), roll(model(x, *rest)), rtol=1e-5, atol=1e-5)


def test_latents_that_do_not_divide_are_refused_by_name() -> None:
    model = small(patch=(2, 2, 2))
    assert model(*inputs((4, 4, 6))).shape == (2, 3, 4, 4, 6)
    with pytest.raises(ValueError, match=r"latent frames 3 of \(3, 4, 6\) is no multiple of 2 of the model's patch"):
        model(*inputs((3, 4, 6)))
    with pytest.raises(ValueError, match="latent width 7"):
        model.flops((4, 4, 7), 5)
    with pytest.raises(ValueError, match="latent height 3"):
        model.tokens((4, 3, 6))
    x, *rest = inputs((4, 4, 6))
    with pytest.raises(ValueError, match="the latent has 2 channels, the model 3"):
        model(x[:, :2], *rest)


def counted_flops(config: SoraDiTConfig, latent: tuple[int, int, int], batch: int, device: str) -> tuple[int, int]:
    """(counted by torch, declared) for one batch. torch does not count the fused CPU kernel: eager runs there."""
    backend = functools.partial(attention, backend="eager" if device == "cpu" else "sdpa")
    model = (on_meta(config) if device == "meta" else SoraDiT(config)).to(device)
    attend_by(model, backend)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*[part.to(device) for part in inputs(latent, batch, config)])
    return counter.get_total_flops(), batch * model.flops(latent, 5)


@pytest.mark.parametrize(
    ("arrangement", "latent", "changes"),
    [
        ("factorised", (3, 4, 6), {}),
        ("full", (4, 8, 2), {"mlp_ratio": 2.7, "depth": 3, "patch": (1, 1, 2)}),
        ("factorised", (1, 2, 2), {"width": 96, "heads": 8}),
    ],
)
def test_flops_are_exact(arrangement: str, latent: tuple[int, int, int], changes: dict[str, object]) -> None:
    config = dataclasses.replace(SMALL, arrangement=arrangement, **changes)
    for batch, device in ((1, "cpu"), (2, "cpu"), (2, "meta")):
        counted, declared = counted_flops(config, latent, batch, device)
        assert counted == declared


# name: parameters with 16 latent channels and text of width 4096, worked out once; changes with every checkpoint
PARAMETERS = {
    "S/2": 33_656_256,
    "B/2": 131_002_176,
    "L/2": 462_163_008,
    "XL/2": 671_292_480,
    "XL/2-128": 667_078_208,
    "3B": 3_025_177_664,
    "8B": 7_909_632_064,
}


def test_sizes_have_the_parameters_they_promise() -> None:
    rows = {row.name: row for row in size_rows()}
    assert list(rows) == list(SIZES)
    assert {name: rows[name].parameters for name in PARAMETERS} == PARAMETERS
    assert abs(rows["3B"].parameters / 3e9 - 1) < 0.05 and abs(rows["8B"].parameters / 8e9 - 1) < 0.05
    gflops = [row.gflops for row in rows.values()]
    assert gflops == sorted(gflops) and gflops[0] > 1
    full = {row.name: row.gflops for row in size_rows("full")}
    assert all(full[name] > row.gflops for name, row in rows.items())
    assert count_parameters(build_model(ModelConfig(size="nano"), 16, 384, device="meta")) < 300_000
    assert 3e6 < count_parameters(build_model(ModelConfig(size="tiny"), 16, 384, device="meta")) < 6e6


def test_build_model_takes_the_size_and_the_overrides() -> None:
    section = ModelConfig(size="nano", depth=3, mlp_ratio=2.0, patch=(1, 1, 1), arrangement="full", adaln_rank=5)
    model = build_model(section, 4, 12)
    assert model.config == SoraDiTConfig(64, 3, 4, 4, 12, 2.0, (1, 1, 1), 5, "full")
    assert model(*inputs((2, 3, 5), 1, model.config)).shape == (1, 4, 2, 3, 5)
    assert next(build_model(section, 4, 12, device="meta").parameters()).is_meta


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"size": "nano", "heads": 5}, "model.width 64 is not divisible by model.heads 5; .* fits is 4"),
        ({"size": "nano", "width": 52, "heads": 4}, "heads of width 13: it must be even"),
    ],
)
def test_bad_models_are_refused_in_words(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(ModelConfig(**changes), 4, 12, device="meta")


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="known: nano, tiny"):
        ModelConfig(size="enormous")


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    section = ModelConfig(size="nano")
    torch.manual_seed(1)
    first = build_model(section, 4, 12, seed=3).state_dict()
    torch.manual_seed(2)
    late = build_model(section, 4, 12, device="meta").to_empty(device="cpu")
    init_weights(late, 3)
    other = build_model(section, 4, 12, seed=4).state_dict()
    for name, value in first.items():
        zero = any(f".{part}." in f".{name}" for part in ZERO_MODULES)
        assert torch.equal(value, late.state_dict()[name])
        assert torch.equal(value, initial_value(name, value.shape, 3, zero)), name
        if value.dim() == 2 and not zero:
            assert not torch.equal(value, other[name]), name
            assert 0.9 < value.std() / (2 / sum(value.shape)) ** 0.5 < 1.1, name
    weights = [
        first[f"blocks.{i}.{part}.weight"] for i in (0, 1) for part in ("cross_attention.q", "self_attention.qkv")
    ]
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[1], weights[3])
    deeper = build_model(ModelConfig(size="nano", depth=5), 4, 12, seed=3).state_dict()
    assert all(torch.equal(value, deeper[name]) for name, value in first.items())


@pytest.fixture
def rank_1_of_3() -> Iterator[None]:
    """A process group of torch's fake backend, in which a collective that is waited for would bring no data."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_sharded_weights_are_the_parts_of_the_whole(rank_1_of_3: None) -> None:
    whole = build_model(ModelConfig(size="nano"), 4, 12, seed=3).state_dict()
    model = build_model(ModelConfig(size="nano"), 4, 12, device="meta")
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (3,)))
    model.to_empty(device="cpu")
    init_weights(model, 3)
    for name, parameter in model.named_parameters():
        rows = -(-whole[name].shape[0] // 3)
        assert torch.equal(parameter.to_local(), whole[name][rows : 2 * rows]), name


def test_bfloat16_stays_near_float32() -> None:
    model = small()
    x, t, text, mask = inputs()
    want = model(x, t, text, mask)
    scale = want.std()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = model(x, t, text, mask)
    low = model.bfloat16()(x.bfloat16(), t, text.bfloat16(), mask)
    assert automatic.dtype == torch.float32 and low.dtype == torch.bfloat16
    # 8 bits of mantissa through 4 blocks: an error of a few times 2^-8 of the outputs' spread
    assert 0 < (automatic - want).std() / scale < 0.03
    assert 0 < (low.float() - want).std() / scale < 0.03


def test_all_attention_goes_through_the_one_function() -> None:
    counter: Counter[str] = Counter()
    attend_by(small(), functools.partial(attention, counter=counter))(*inputs())
    assert counter == {"sdpa": 2 * SMALL.depth}
    eager = attend_by(small(), functools.partial(attention, backend="eager"))
    torch.testing.assert_close(eager(*inputs()), small()(*inputs()), rtol=1e-5, atol=1e-5)
