"""SoraDiT: positions, times of frames, and masks of padded latents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.rope import grid_positions
from mmspeed.compute.structured import Attend
from mmspeed.models.sora.layers import AttentionType, SelfAttention, position_turns
from tests.unit.models.test_sora_dit import ARRANGEMENTS, SMALL, inputs, small


@pytest.mark.parametrize("span", ["spatial", "temporal", "full"])
def test_self_attention_knows_relative_positions_only(span: AttentionType) -> None:
    layer = SelfAttention(SMALL.width, SMALL.heads, span, Attend())
    for name, parameter in layer.named_parameters():
        parameter.data = rng.normal(parameter.shape, 0, name) / parameter.shape[-1] ** 0.5
    zero, one = torch.zeros(1, 1, 1, SMALL.width), torch.ones(1, 1, 1, SMALL.width)  # of the modulation
    x = rng.normal((2, 3, 6, SMALL.width) if span != "full" else (2, 1, 18, SMALL.width), 0, "tokens")

    def attended(shift: tuple[int, int, int], stretch: int = 1) -> Tensor:
        pos = stretch * grid_positions((3, 2, 3)).unflatten(0, x.shape[1:3]) + torch.tensor(shift)
        pos_NX = pos[:, 0] if span == "temporal" else pos[0]
        turn_2NH = position_turns(pos_NX, span, layer.head_width, x.dtype)
        return layer(x, zero, zero, one, pos_NX, turn_2NH, None, False)

    torch.testing.assert_close(attended((5, 2, 9)), attended((0, 0, 0)), rtol=0, atol=1e-4)
    assert (attended((0, 0, 0), stretch=2) - attended((0, 0, 0))).abs().max() > 1e-2


def test_times_of_frames_meet_their_frames() -> None:
    """The same time for all frames is a time of the sample; a frame at another time changes what is predicted."""
    for arrangement in ARRANGEMENTS:
        model = small(arrangement=arrangement)
        x, t, text, mask = inputs()
        of_frames = t[:, None].repeat(1, 3)
        torch.testing.assert_close(model(x, of_frames, text, mask), model(x, t, text, mask))
        times = of_frames.clone()
        times[:, 0] = 0.0
        moved = (model(x, times, text, mask) - model(x, t, text, mask)).abs().amax(dim=(0, 1, 3, 4))
        assert (moved > 1e-4).all()  # the first frame itself, and the others through attention
        with pytest.raises(ValueError, match="times of frames"):
            model(x, of_frames[:, :2], text, mask)


def test_padded_latents_do_not_count() -> None:
    for arrangement in ARRANGEMENTS:
        model = small(arrangement=arrangement)
        x, *rest = inputs()
        real = torch.ones(2, 3, 4, 6, dtype=torch.bool)
        torch.testing.assert_close(model(x, *rest, real), model(x, *rest))
        real[0, 2], real[1, :, :, 4:] = False, False  # a frame of one sample, a column of patches of the other
        other = torch.where(real[:, None], x, x + 3.0)
        seen, out = real[:, None].expand_as(x), model(x, *rest, real)
        torch.testing.assert_close(model(other, *rest, real)[seen], out[seen])
        assert (model(other, *rest)[seen] - model(x, *rest)[seen]).abs().max() > 1e-3
        with pytest.raises(ValueError, match="video mask"):
            model(x, *rest, real[:, :2])


def test_a_caption_without_tokens_is_one_without_real_tokens() -> None:
    """Nothing is attended to, so cross-attention adds nothing but its bias; and every parameter has a gradient."""
    for arrangement in ARRANGEMENTS:
        model = small(arrangement=arrangement)
        x, t, text, mask = inputs()
        none = model(x, t, text[:, :0], mask[:, :0])
        torch.testing.assert_close(none, model(x, t, text, torch.zeros_like(mask)))
        none.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_sample_that_is_all_padding_harms_no_other() -> None:
    for arrangement in ARRANGEMENTS:
        model = small(arrangement=arrangement)
        x, *rest = inputs()
        real = torch.ones(2, 3, 4, 6, dtype=torch.bool)
        real[1] = False
        out = model(x, *rest, real)
        torch.testing.assert_close(out[:1], model(x, *rest)[:1])
        out.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
