"""Calls of published video transformers: their arguments against what the classes' own pipelines hand over, and their counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmspeed.config.schema import DdpmConfig, FlowConfig
from mmspeed.errors import UserError
from mmspeed.models.families import FAMILIES
from mmspeed.models.families.cogvideox import CogVideoXCall
from mmspeed.models.families.wan import WanCall
from mmspeed.pipelines.diffusion.objective import DdpmObjective
from mmspeed.pipelines.diffusion.predictor import FamilyPredictor, make_predictor, predict
from mmspeed.protocols import Conditions, blocks_of, plan_of
from mmspeed.shapes import Strides
from tests.support.published import called_by_hand
from tests.support.video_transformers import make_model

B, C, T, H, W, L, D = 2, 4, 3, 4, 6, 5, 8
GLYPHS = 256  # of HunyuanVideo 1.5
TIMES = torch.tensor([0.7507, 0.0421])
FLOW, DDPM = FlowConfig(kind="flow"), DdpmConfig(kind="ddpm")
# name -> (a case of tests.support.video_transformers, changes, objective)
MODELS: dict[str, tuple[str, dict[str, Any], FlowConfig | DdpmConfig]] = {
    "wan": ("wan", {}, FLOW),
    "wan, patches of two frames": ("wan", {"patch_size": (3, 2, 2)}, FLOW),
    "wan vace": ("wan vace", {}, FLOW),
    "ltx": ("ltx", {}, FLOW),
    "ltx, patches": ("ltx", {"in_channels": 16, "out_channels": 16, "patch_size": 2}, FLOW),
    "cogvideox 5b": ("cogvideox", {}, DDPM),
    "cogvideox 2b": ("cogvideox, sincos", {}, DDPM),
    "cogvideox 1.5": ("cogvideox", {"patch_size_t": 3, "ofs_embed_dim": 8, "patch_bias": False}, DDPM),
    "hunyuan": ("hunyuan", {}, FLOW),
    "mochi": ("mochi", {}, FLOW),
    "hunyuan 1.5": ("hunyuan 1.5", {}, FLOW),
    "qwen": ("qwen, images", {}, FLOW),
    "flux": ("flux, images", {}, FLOW),
    "flux, no guidance": ("flux, images", {"guidance_embeds": False, "num_layers": 2}, FLOW),
    "hunyuan, no guidance": ("hunyuan", {"guidance_embeds": False, "num_layers": 2}, FLOW),
}  # fmt: skip

FAMILIES_ONCE = [
    "wan, patches of two frames",
    "wan vace",
    "ltx, patches",
    "cogvideox 1.5",
    "hunyuan",
    "mochi",
    "hunyuan 1.5",
    "qwen",
    "flux",
]


def conditions(seed: int = 0) -> Conditions:
    g = torch.Generator().manual_seed(seed)
    mask_BL = torch.tensor([[True] * L, [True, True] + [False] * (L - 2)])
    text_BLD = torch.randn(B, L, D, generator=g) * mask_BL[..., None]
    glyphs = {
        "text_2": torch.randn(B, GLYPHS, D, generator=g),
        "text_2_mask": torch.arange(GLYPHS) < torch.tensor([[4], [0]]),
    }
    glyphs["text_2"] *= glyphs["text_2_mask"][..., None]
    pooled_BD = torch.randn(B, D, generator=g)
    roles = {f"{role}.latents": torch.randn(B, C, T, H, W, generator=g) for role in ("control", "blank")}
    return Conditions(text_BLD, mask_BL, pooled_BD, torch.tensor([8.0, 24.0]), Strides(4, 8), glyphs | roles)


def frames_of(name: str) -> int:
    return 1 if name.startswith(("qwen", "flux")) else T


def latent(name: str = "", seed: int = 1) -> Tensor:
    return torch.randn(B, C, frames_of(name), H, W, generator=torch.Generator().manual_seed(seed))


def model_of(name: str) -> tuple[nn.Module, FamilyPredictor]:
    case, changes, objective = MODELS[name]
    model = make_model(case, **changes)
    predictor = make_predictor(model, objective, C, D)
    assert isinstance(predictor, FamilyPredictor)
    return model, predictor


@pytest.mark.parametrize("name", MODELS)
def test_a_call_is_the_pipelines(name: str) -> None:
    model, predictor = model_of(name)
    inputs = conditions()
    x = latent(name)
    actual = predict(predictor, model, x, TIMES, inputs)
    assert actual.shape == x.shape
    torch.testing.assert_close(actual, called_by_hand(name, model, x, TIMES, inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["wan", "cogvideox 5b", "mochi", "qwen"])
def test_times_are_not_rounded(name: str) -> None:
    """In bfloat16 too: only the index families have whole ones."""
    _, predictor = model_of(name)
    arguments = predictor.call.call(predictor.config, latent(name).bfloat16(), TIMES, conditions())
    if predictor.call.predicts == "v":
        assert arguments["timestep"].dtype == torch.int64 and arguments["timestep"].tolist() == [750, 42]
    else:
        assert arguments["timestep"].dtype == torch.float32
        if name.startswith(("qwen", "flux")):
            assert torch.equal(arguments["timestep"], 1000 * TIMES / 1000)
        elif name == "mochi":
            assert arguments["timestep"].tolist() == pytest.approx([249.3, 957.9], rel=1e-6)
        else:
            assert arguments["timestep"].tolist() == pytest.approx([750.7, 42.1], rel=1e-6)


@pytest.mark.parametrize("name", ["wan", "hunyuan", "qwen"])
def test_in_bfloat16_the_error_is_at_most_the_official_pipelines(name: str) -> None:
    """Pipelines in bfloat16 round the time too, but Wan's; QwenImage and Flux round it in the class, so that nothing is gained there."""
    model, predictor = model_of(name)
    half = model_of(name)[0].bfloat16()
    x, inputs, errors = latent(name), conditions(), torch.zeros(2)

    def rounded(key: str, value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point() and (name, key) != ("wan", "timestep")
        return value.bfloat16() if floats else value

    with torch.no_grad():
        for t in torch.linspace(0.05, 0.999, 6):
            times = t.expand(B)
            true = predict(predictor, model, x, times, inputs)
            with torch.autocast("cpu", torch.bfloat16):
                ours = predict(predictor, model, x, times, inputs)
            arguments = predictor.call.call(predictor.config, x.bfloat16(), times, inputs)
            output = half(**{key: rounded(key, value) for key, value in arguments.items()})
            official = predictor.call.prediction(predictor.config, output, x)
            errors += torch.stack([(each.float() - true).norm() / true.norm() for each in (ours, official)])
    assert errors[0] <= errors[1] * (1.02 if name in ("qwen", "flux") else 1.0), errors.tolist()


def test_the_index_is_the_objectives_own() -> None:
    objective = DdpmObjective(DDPM)
    indices = torch.arange(1000)
    t_B = objective.time_of(indices).float()
    model = make_model("cogvideox")
    call = CogVideoXCall()
    x = torch.zeros(1000, C, 1, 2, 2)
    conditions = Conditions(torch.zeros(1000, 1, D), torch.ones(1000, 1, dtype=torch.bool))
    arguments = call.call(dict(model.config), x, t_B, conditions)  # type: ignore[arg-type]
    assert torch.equal(arguments["timestep"], indices) and torch.equal(objective.index_of(t_B), indices)


@pytest.mark.parametrize("name", FAMILIES_ONCE)
def test_operations_are_what_torch_counts(name: str) -> None:
    model, predictor = model_of(name)
    one = conditions()
    named = {key: tensor[:1] for key, tensor in one.named.items()}
    single = Conditions(one.text_BLD[:1], one.text_mask_BL[:1], one.pooled_BD[:1], one.fps_B[:1], one.strides, named)  # type: ignore[index]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        predict(predictor, model, latent(name)[:1], TIMES[:1], single)
    assert predictor.flops((frames_of(name), H, W), L) == counter.get_total_flops()
    plan = plan_of(model)
    if plan is not None and plan.carried:  # a pipeline divides its blocks by these
        assert isinstance(predictor, FamilyPredictor)
        parts = counter.get_flop_counts()
        counts = [sum(parts[f"{type(model).__name__}.{block.name}"].values()) for block in plan.blocks]
        assert predictor.block_work((frames_of(name), H, W), L).blocks == counts


@pytest.mark.parametrize(
    ("case", "changes", "objective"),
    [
        ("cogvideox", {"in_channels": 2 * C}, DDPM),
        ("hunyuan", {"in_channels": 2 * C + 1, "image_condition_type": "latent_concat"}, FLOW),
        ("hunyuan, first frame given", {}, FLOW),
    ],
)
def test_models_from_images_count_their_operations(case: str, changes: dict[str, Any], objective: Any) -> None:
    """Also of further channels, and of time 0 for a replaced frame."""
    model = make_model(case, out_channels=C, **changes)
    predictor = make_predictor(model, objective, C, D)
    assert isinstance(predictor, FamilyPredictor) and predictor.conditioning.modes == ("first",)
    one, x_BCThw = conditions(), latent()
    named = {"conditioning_mask": torch.tensor([[True, False, False]]), "condition": x_BCThw[:1]}
    single = Conditions(one.text_BLD[:1], one.text_mask_BL[:1], one.pooled_BD[:1], named=named)  # type: ignore[index]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        assert predict(predictor, model, x_BCThw[:1], TIMES[:1], single).shape == x_BCThw[:1].shape
    assert predictor.flops((T, H, W), L) == counter.get_total_flops()
    if "in_channels" in changes:
        with pytest.raises(UserError, match="set the section `conditioning`"):
            predict(predictor, model, x_BCThw[:1], TIMES[:1], replace(single, named={}))


@pytest.mark.parametrize("name", FAMILIES_ONCE)
def test_tokens_are_those_of_the_patches(name: str) -> None:
    model, predictor = model_of(name)
    seen: list[int] = []
    first = blocks_of(model)[0][1]
    first.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    predict(predictor, model, latent(name), TIMES, conditions())
    assert seen == [predictor.tokens((frames_of(name), H, W))]


@pytest.mark.parametrize("name", ["wan", "qwen"])
def test_a_latent_that_would_be_cut_is_refused(name: str) -> None:
    _, predictor = model_of(name)
    with pytest.raises(ValueError, match=r"latent height 5 of \(\d, 5, 6\) is no multiple of 2 .*: use 4 or 6"):
        predictor.tokens((frames_of(name), 5, W))


LIMITS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = {
    "learnt positions": ("cogvideox", {"use_learned_positional_embeddings": True}, (3, 4, 6), (3, 6, 6)),
    "learnt positions, larger": ("cogvideox", {"use_learned_positional_embeddings": True}, (3, 6, 8), (3, 6, 6)),
    "cut rotary positions": ("cogvideox", {"patch_size_t": 3, "ofs_embed_dim": 8, "patch_bias": False}, (3, 8, 4), (3, 6, 4)),
    "a table of rotary positions": ("wan", {"rope_max_seq_len": 3}, (4, 8, 4), (3, 6, 4)),
    "images": ("qwen, images", {}, (3, 4, 4), (1, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_that_a_class_cannot_take_are_refused_before_it_does(name: str) -> None:
    """With the nearest that it takes: the class computes that one, and fails at the other, or computes another thing."""
    case, changes, beyond, near = LIMITS[name]
    model = make_model(case, **changes)
    predictor = make_predictor(model, DDPM if case == "cogvideox" else FLOW, C, D)
    assert isinstance(predictor, FamilyPredictor)
    bucket = Strides(4, 8).pixels(near)
    with pytest.raises(
        ValueError, match="buckets of .*fit" if name != "images" else "use buckets of 1 frame"
    ) as caught:
        Strides(4, 8).tokens(Strides(4, 8).pixels(beyond), predictor.tokens)
    assert str(bucket) in str(caught.value) or name == "images"
    assert predict(predictor, model, torch.randn(B, C, *near), TIMES, conditions()).shape == (B, C, *near)
    if name != "images":
        with pytest.raises((ValueError, RuntimeError)):
            predict(predictor, model, torch.randn(B, C, *beyond), TIMES, conditions())


@pytest.mark.parametrize("name", ["ltx", "hunyuan", "hunyuan 1.5"])
def test_padding_of_a_masked_caption_means_nothing(name: str) -> None:
    model, predictor = model_of(name)
    inputs, x = conditions(), latent(name)
    other = replace(inputs, text_BLD=torch.where(inputs.text_mask_BL[..., None], inputs.text_BLD, 3.0))
    if name in ("ltx", "mochi", "qwen"):  # the refiners of the others take means by the mask, and attend by it
        assert torch.allclose(
            predict(predictor, model, x, TIMES, inputs), predict(predictor, model, x, TIMES, other), atol=1e-5
        )
    longer = replace(
        inputs,
        text_BLD=torch.cat([inputs.text_BLD, torch.zeros(B, 3, D)], 1),
        text_mask_BL=torch.cat([inputs.text_mask_BL, torch.zeros(B, 3, dtype=torch.bool)], 1),
    )
    torch.testing.assert_close(
        predict(predictor, model, x, TIMES, inputs), predict(predictor, model, x, TIMES, longer), rtol=1e-5, atol=1e-5
    )


def test_captions_are_filled_with_zeros_whatever_lies_in_their_padding() -> None:
    call, inputs = WanCall(), conditions()
    dirty = replace(inputs, text_BLD=inputs.text_BLD + 7 * ~inputs.text_mask_BL[..., None])
    for each in (inputs, dirty):
        text = call.call({}, latent(), TIMES, each)["encoder_hidden_states"]
        assert text.shape == (B, 512, D) and torch.equal(text[:, :L], inputs.text_BLD) and not text[:, L:].any()


@pytest.mark.parametrize(
    ("case", "changes", "objective", "sizes", "message"),
    [
        ("wan", {}, DDPM, (C, D), r"objective.kind is ddpm: WanTransformer3DModel predicts the velocity of a flow; use"),
        ("cogvideox", {}, FLOW, (C, D), r"objective.kind is flow: CogVideoXTransformer3DModel predicts v .*steps: 1000"),
        (
            "cogvideox", {}, DdpmConfig(kind="ddpm", prediction="epsilon", zero_terminal_snr=False), (C, D),
            r"objective.prediction is epsilon .*CogVideoXTransformer3DModel predicts v",
        ),
        ("wan", {"in_channels": 9}, FLOW, (C, D), r"takes 9 channels and returns 4, the latents here have 4: .*image-to-video"),
        ("ltx", {}, FLOW, (3, D), r"LTXVideo.* takes 4 channels and returns 4, the latents here have 3: name .* under `vae`"),
        ("wan", {"image_dim": 8}, FLOW, (C, D), r"image_dim is set, but its input channels do not hold given frames"),
        ("wan vace", {"vace_in_channels": 8}, FLOW, (C, D), r"WanVACE.* has vace_in_channels 8 and image_dim None: known models"),
        ("hunyuan 1.5", {"use_meanflow": True}, FLOW, (C, D), r"use_meanflow is set"),
        ("qwen, images", {"zero_cond_t": True}, FLOW, (C, D), r"zero_cond_t is set: models that edit images"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_said(
    case: str, changes: dict[str, Any], objective: FlowConfig | DdpmConfig, sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_predictor(make_model(case, **changes), objective, *sizes)


@pytest.mark.parametrize("name", ["qwen"])
def test_a_family_of_images_takes_no_video(name: str) -> None:
    _, predictor = model_of(name)
    with pytest.raises(
        ValueError, match=r"latent frames 3 of \(3, 4, 6\): the model makes images: use buckets of 1 frame"
    ):
        predictor.tokens((T, H, W))


def test_wan_5b_takes_a_time_for_each_token() -> None:
    """As its pipeline: each token of a frame has the frame's time; a repository says so in its model_index.json."""
    family, x = FAMILIES["WanTransformer3DModel"], latent()
    model = make_model("wan")
    config = dict(model.config)  # type: ignore[arg-type]
    assert (
        family.call_of({"boundary_ratio": 0.875}, {}.get)
        == family.call_of({"expand_timesteps": False}, {}.get)
        == WanCall()
    )
    call = family.call_of({"expand_timesteps": True}, {}.get)
    arguments = call.call(config, x, TIMES, conditions())
    mask = torch.ones(T, H, W)
    for times, t in zip(arguments["timestep"], 1000 * TIMES, strict=True):
        assert torch.equal(times, (mask[:, ::2, ::2] * t).flatten())
    plain = model(**WanCall().call(config, x, TIMES, conditions()))[0]
    torch.testing.assert_close(model(**arguments)[0], plain, rtol=1e-5, atol=1e-6)
    frames = torch.stack([torch.zeros(B), TIMES, TIMES], dim=1)  # a given first frame
    timestep = call.call(config, x, frames, conditions())["timestep"]
    mask[0] = 0
    assert torch.equal(timestep[0], (mask[:, ::2, ::2] * 1000 * TIMES[0]).flatten())
    one = replace(conditions(), text_BLD=torch.zeros(1, 1, D), text_mask_BL=torch.ones(1, 1, dtype=torch.bool))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**call.call(config, x[:1], TIMES[:1], one))
    assert call.flops(config, (T, H, W), L) == counter.get_total_flops()


def test_what_a_call_lacks_is_said() -> None:
    inputs, x = conditions(), latent()
    long = {"text_2": torch.zeros(B, 257, D), "text_2_mask": torch.ones(B, 257)}
    for name, without, message in (
        ("hunyuan", replace(inputs, pooled_BD=None), r"a pooled vector of width 8 .* gave none"),
        ("ltx", replace(inputs, fps_B=None), r"needs the frames per second"),
        ("wan vace", replace(inputs, named={}), r"the model takes the role `blank`, and the samples have none"),
        ("hunyuan 1.5", replace(inputs, named={}), r"needs a second caption of width 8"),
        (
            "hunyuan 1.5",
            replace(inputs, named=long),
            r"second captions of at most 256 tokens of width 8, here 257 of width 8",
        ),
        (
            "wan",
            replace(inputs, text_BLD=torch.zeros(B, 513, D)),
            r"a caption has 513 tokens.* set text.max_tokens: 512",
        ),
        ("cogvideox 5b", replace(inputs, text_BLD=torch.zeros(B, 9, D)), r"9 tokens.* set text.max_tokens: 7"),
    ):
        model, predictor = model_of(name)
        with pytest.raises(UserError, match=message):
            predict(predictor, model, x[:, :, : frames_of(name)], TIMES, without)


def test_an_unknown_class_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"ChronoEdit.* lacks .*flops, tokens .*known are WanTransformer3DModel, .*call="
    ):
        make_predictor(make_model("chronoedit, by its own declaration"), FLOW, C, D)
