"""Computing in parts: equal to computing at once, and never all of it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.config.memory import MemoryConfig, refused
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory import Keeping, peak_bytes
from mmspeed.memory.chunked import chunked_cross_entropy, in_chunks
from mmspeed.memory.count import MatmulCount
from mmspeed.memory.report import kept_bytes
from mmspeed.models.layers import Mlp
from mmspeed.models.sora_dit import SoraDiT, SoraDiTConfig
from mmspeed.parallel import parallelize

CPU = Device("cpu", 0)
WIDTH, TOKENS = 64, 1000
CONFIG: dict[str, Any] = {
    "width": 192,
    "depth": 2,
    "heads": 6,
    "latent_channels": 4,
    "text_width": 16,
    "adaln_rank": 16,
}


def make_mlp(chunk: int | None) -> tuple[Mlp, Tensor]:
    torch.manual_seed(0)
    mlp, x = Mlp(WIDTH, 4 * WIDTH, WIDTH), torch.randn(2, TOKENS // 2, WIDTH)
    mlp.token_chunk = chunk
    return mlp, x.requires_grad_()


def run(mlp: Mlp, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = mlp(x)
    out.square().mean().backward()
    return out.detach(), {"x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}  # type: ignore[dict-item]


def close(got: Tensor, wanted: Tensor, within: float) -> bool:
    return bool((got - wanted).abs().max() <= within * wanted.abs().max())


@pytest.mark.parametrize("chunk", [1, 7, 256, 500, 1000, 5000])
def test_an_mlp_in_parts_is_the_mlp(chunk: int) -> None:
    """A row's product has as many terms as before, so it differs by float32's rounding of 4 E terms; a weight's gradient is a sum over N
    tokens in another order. Both stay within sqrt(terms) x 2^-23 of the largest value, with room of a factor of ten."""
    plain, grads = run(*make_mlp(None))
    got, chunked = run(*make_mlp(chunk))
    assert close(got, plain, 1e-6)
    for name, value in grads.items():
        assert close(chunked[name], value, 4e-6), name


def test_one_part_is_bitwise_what_it_was() -> None:
    plain, grads = run(*make_mlp(None))
    got, chunked = run(*make_mlp(TOKENS))
    assert torch.equal(got, plain)
    assert all(torch.equal(chunked[name], value) for name, value in grads.items())


def peak_of(chunk: int | None) -> int:
    mlp, x = make_mlp(chunk)
    return peak_bytes(CPU, 0, lambda: mlp(x).sum().backward())


def test_the_hidden_layer_exists_for_one_part_only() -> None:
    token = 4 * WIDTH  # bytes of a float32 token
    mlp, x = make_mlp(None)
    assert (
        kept_bytes(CPU, mlp, lambda: mlp(x), [x]) >= (4 + 4) * TOKENS * token
    )  # both sides of the activation function
    mlp, x = make_mlp(100)
    assert kept_bytes(CPU, mlp, lambda: mlp(x), [x]) == TOKENS * token  # its result alone: its input was there
    peaks = [peak_of(None), peak_of(100)]
    assert peaks[0] > 12 * TOKENS * token
    assert peaks[1] < 3 * TOKENS * token + 20 * 100 * token + 3 * 8 * WIDTH * token


def test_each_part_computes_its_first_product_again_and_no_more() -> None:
    counts = {}
    for chunk in (None, 250):
        mlp, x = make_mlp(chunk)
        out = mlp(x)
        with MatmulCount() as count:
            out.sum().backward()
        counts[chunk] = count.total
    assert counts == {None: 4, 250: 4 * (4 + 1)}


def test_without_gradients_parts_are_computed_once() -> None:
    mlp, x = make_mlp(300)
    with torch.no_grad(), MatmulCount() as count:
        got = mlp(x)
    assert count.total == 2 * 4
    assert close(got, make_mlp(None)[0](x), 1e-6)


def test_parts_along_another_dim_and_refused_sizes() -> None:
    x = torch.randn(3, 10, 4, dtype=torch.float64, requires_grad=True)
    seen: list[int] = []

    def double(part: Tensor) -> Tensor:
        seen.append(part.shape[1])
        return part.sin() * 2

    assert torch.equal(in_chunks(double, x, 1, 4), x.sin() * 2)
    assert seen == [4, 4, 2]
    with pytest.raises(ValueError, match="at least one place"):
        in_chunks(double, x, 1, 0)


def loss_of(model: nn.Module) -> Tensor:
    g = torch.Generator().manual_seed(3)
    x, text = torch.randn(2, 4, 3, 8, 8, generator=g), torch.randn(2, 5, 16, generator=g)
    mask = torch.ones(2, 5, dtype=torch.bool)
    return model(x, torch.tensor([0.3, 0.7]), text, mask).square().mean()


def step(keeping: Keeping | None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor], nn.Module]:
    model = SoraDiT(SoraDiTConfig(**CONFIG))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(0, 0.02, generator=g)
    model = parallelize(model, None, "none", compute_dtype=dtype, keeping=keeping)
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize("ways", [{}, {"block": "recompute"}, {"attention": "recompute_cheap"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_its_mlps_in_parts(ways: dict[str, Any], dtype: torch.dtype) -> None:
    """Under autocast products are rounded to 8 bits; a weight's gradient is rounded in each part and summed in float32: 2^-8 twice."""
    plain_loss, plain, _ = step(None, dtype)
    loss, grads, model = step(Keeping((ways,), mlp_chunk=20), dtype)
    assert all(
        part.token_chunk == 20 for part in model.modules() if isinstance(part, Mlp) and part is not model.text_in
    )
    within = 2e-5 if dtype == torch.float32 else 1e-2
    assert close(loss, plain_loss, within)
    assert grads.keys() == plain.keys()
    for name, value in plain.items():
        assert value.abs().max() > 0, name
        assert close(grads[name], value, within), name


def test_gradients_of_many_parts_are_as_close_to_float32_as_those_of_one() -> None:
    """Summed in bfloat16, those of 96 tokens one by one would be several times as far."""
    _, wanted, _ = step(None)

    def distance(chunk: int | None) -> float:
        _, found, _ = step(Keeping(mlp_chunk=chunk), torch.bfloat16)
        return max(float((found[n] - v).abs().max() / v.abs().max()) for n, v in wanted.items() if "mlp" in n)

    assert 0 < distance(1) < 1.3 * distance(None)


def test_a_block_without_such_an_mlp_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"memory\.mlp_chunk: Linear has no MLP"):
        Keeping(mlp_chunk=8).put_on(nn.Linear(2, 2), 0)


def test_what_does_not_go_with_parts_is_refused_in_a_sentence() -> None:
    rest: dict[str, Any] = {
        "dtype": "float32", "compiles": False, "checkpointing": False, "clips": True, "accumulates": False, "strategy": "none",
        "tp": 1,
    }  # fmt: skip
    for ways, fine in (
        ({"mlp": "recompute"}, False),
        ({"attention": "recompute"}, True),
        ({"block": "recompute"}, True),
    ):
        found = refused(MemoryConfig(mlp_chunk=64, spans=ways), **rest)
        assert (found is None) == fine
        assert fine or "mlp_chunk" in str(found)


def logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(37, 12, generator=g, dtype=dtype), torch.randn(50, 12, generator=g, dtype=dtype)
    labels = torch.randint(50, (37,), generator=g)
    labels[[3, 20]] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def both(loss: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = logits(dtype)
    value = loss(hidden, weight, labels)
    (value * 3).backward()
    assert hidden.grad is not None and weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 5, 37, 100])
def test_cross_entropy_in_parts_is_cross_entropy(chunk: int, reduction: Any) -> None:
    """Softmax and sums are of float32: a few of its last bits."""
    wanted = both(lambda h, w, n: F.cross_entropy(h @ w.t(), n, reduction=reduction), torch.float32)
    got = both(lambda h, w, n: chunked_cross_entropy(h, w, n, chunk, reduction=reduction), torch.float32)
    for one, other in zip(got, wanted, strict=True):
        assert close(one, other.float(), 2e-6)
    assert got[1][3].count_nonzero() == 0  # a token that is ignored


def test_cross_entropy_agrees_with_torchs_own_where_there_is_one() -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    wanted = both(lambda h, w, n: F.linear_cross_entropy(h, w, n), torch.float32)
    got = both(lambda h, w, n: chunked_cross_entropy(h, w, n, 8), torch.float32)
    assert all(close(one, other, 2e-6) for one, other in zip(got, wanted, strict=True))


def test_logits_are_never_whole_and_cost_no_product_more() -> None:
    tokens, width, words, chunk = 512, 16, 2000, 32
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    labels = torch.randint(words, (tokens,))
    whole = 4 * tokens * words
    plain = peak_bytes(CPU, 0, lambda: F.cross_entropy(hidden @ weight.t(), labels).backward())
    hidden.grad = weight.grad = None
    parts = peak_bytes(CPU, 0, lambda: chunked_cross_entropy(hidden, weight, labels, chunk).backward())
    assert plain > 2 * whole
    assert parts < 4 * 4 * chunk * words + 4 * 4 * (tokens + words) * width < whole
    with MatmulCount() as count:
        chunked_cross_entropy(hidden, weight, labels, chunk).backward()
    assert count.total == 3 * tokens // chunk


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, labels = logits(torch.float32)
    with torch.no_grad(), MatmulCount() as count:
        chunked_cross_entropy(hidden, weight, labels, 10)
    assert count.total == 4
    chunked_cross_entropy(hidden, weight.detach(), labels, 10).backward()
    assert hidden.grad is not None


def test_all_labels_ignored_and_labels_out_of_place() -> None:
    hidden, weight, labels = logits(torch.float32)
    nothing = torch.full_like(labels, -100)
    assert chunked_cross_entropy(hidden, weight, nothing, 10).isnan()
    assert chunked_cross_entropy(hidden, weight, nothing, 10, reduction="sum") == 0
    with pytest.raises(ValueError, match=r"labels lie in 50\.\.50"):
        chunked_cross_entropy(hidden, weight, torch.full_like(labels, 50), 10)
    with pytest.raises(ValueError, match="are not"):
        chunked_cross_entropy(hidden, weight, labels[1:], 10)


def test_cross_entropy_under_autocast() -> None:
    """Logits and gradients are rounded to bfloat16's 8 bits, as the plain way's are."""
    found = []
    for chunk in (None, 8):
        hidden, weight, labels = logits(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            if chunk is None:
                loss = F.cross_entropy((hidden @ weight.t()).float(), labels)
            else:
                loss = chunked_cross_entropy(hidden, weight, labels, chunk)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for one, other in zip(found[0], found[1], strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype == torch.float32
        assert close(other, one, 3e-2)
