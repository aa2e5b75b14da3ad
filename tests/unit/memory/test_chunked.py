"""Computing in parts: equal to computing at once, and never all of it there.

Close everywhere; to the bit where this machine computes the products that are cut with the bits of the whole ones, which it is asked
first (`tests.support.machine`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmspeed.config.memory import MemoryConfig, refused
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies, peak_bytes
from mmspeed.memory.chunked import UNITS, _even_parts, chunked_mlp, in_chunks
from mmspeed.models.sora.layers import Mlp
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.parallel import parallelize
from tests.support.covers import checkered
from tests.support.machine import Machine, parts_have_the_bits_of_the_whole
from tests.support.memory_counts import MatmulCounter, kept_bytes
from tests.support.mlps import PlainMlp, chunk_sizes, gelu, pack

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


def make_mlp(chunk: int | None, readable: bool = True, bias: bool = True) -> tuple[PlainMlp, Tensor]:
    torch.manual_seed(0)
    mlp, x = PlainMlp(WIDTH, 4 * WIDTH, WIDTH), torch.randn(2, TOKENS // 2, WIDTH)
    if not bias:
        mlp.up.bias = mlp.down.bias = None
    return mlp.in_parts(chunk, readable), x.requires_grad_()


def alike(*sizes: int, bias: bool = True) -> bool:
    """Whether this machine gives the products of `make_mlp`, cut into parts of these sizes, the bits of the whole ones."""
    mlp, x = make_mlp(None, bias=bias)
    with torch.no_grad():
        grad = gradient_of(mlp(x))
    return all(parts_have_the_bits_of_the_whole(mlp, x, grad, size) for size in sizes)


def gradient_of(out: Tensor) -> Tensor:
    """Of the result, in `run`'s loss."""
    with torch.enable_grad():
        out = out.detach().requires_grad_()
        (grad,) = torch.autograd.grad(out.float().square().mean(), out)
    return grad


def run(mlp: PlainMlp, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    out = mlp(x)
    out.float().square().mean().backward()
    return out.detach(), {"x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}


def close(got: Tensor, wanted: Tensor, within: float) -> bool:
    return bool((got - wanted).abs().max() <= within * wanted.abs().max())


def same(got: Any, wanted: Any) -> bool:
    return got.keys() == wanted.keys() and all(
        value is None if got[name] is None else torch.equal(got[name], value) for name, value in wanted.items()
    )


def assert_close(got: Any, wanted: Any, within: float = 4e-6) -> None:
    """Of `run`. In another order, a float32 sum over n terms differs by about sqrt(n) x 2^-23 of its size: 4e-6 for 1000 tokens. In
    bfloat16 a hidden unit that is rounded the other way is 2^-8 off, and so may be what is made of it: 1e-2."""
    assert close(got[0], wanted[0], within) and got[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert (got[1][name] is None) == (value is None), name
        assert value is None or close(got[1][name], value, within), name


PARTS = [(33, True, None, 1), (500, False, torch.bfloat16, 1), (999, True, torch.bfloat16, 2), (5000, False, None, 2)]


@pytest.mark.parametrize(("chunk", "bias", "dtype", "threads"), PARTS)
def test_an_mlp_in_parts_is_the_mlp(chunk: int, bias: bool, dtype: torch.dtype | None, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            plain, grads = run(*make_mlp(None, bias=bias))
            got, chunked = run(*make_mlp(chunk, bias=bias))
            bitwise = alike(chunk, bias=bias)
    finally:
        torch.set_num_threads(before)
    assert got.dtype == plain.dtype
    if bitwise:
        assert torch.equal(got, plain) and same(chunked, grads)
    assert_close((got, chunked), (plain, grads), 4e-6 if dtype is None else 1e-2)


def test_every_number_is_a_sum_over_the_terms_of_the_whole_mlp() -> None:
    """On a machine that sums all products in one order, the bits are the whole MLP's."""
    torch.manual_seed(0)
    x, results = torch.randn(96, 24), []
    for chunk in (None, 32):
        torch.manual_seed(1)
        mlp = PlainMlp(24, 128, 24).in_parts(chunk)
        with Machine():
            results.append(run(mlp, x.clone().requires_grad_()))
    assert torch.equal(results[0][0], results[1][0]) and same(results[1][1], results[0][1])


@pytest.mark.parametrize(
    "frozen", [("x",), ("down.weight", "up.bias"), ("up.weight", "up.bias", "down.weight", "down.bias")]
)
def test_what_is_frozen_has_no_gradient_and_the_rest_has_its_own(frozen: tuple[str, ...]) -> None:
    results = []
    for chunk in (None, 100):
        mlp, x = make_mlp(chunk)
        for name in frozen:
            (x.detach_() if name == "x" else mlp.get_parameter(name)).requires_grad_(False)
        results.append(run(mlp, x))
    assert_close(results[1], results[0])
    if alike(100):
        assert same(results[1][1], results[0][1])
    assert [name for name, grad in results[1][1].items() if grad is None] == [n for n in results[1][1] if n in frozen]


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 300),
    size=st.integers(1, 400),
    width=st.integers(1, 40),
    units=st.integers(1, 200),
    seed=st.integers(0, 9),
)
def test_parts_of_any_size_are_the_mlp(tokens: int, size: int, width: int, units: int, seed: int) -> None:
    """In float64 and up to its rounding: parts of a few rows are summed in another order."""
    g = torch.Generator().manual_seed(seed)
    shapes = (tokens, width), (units, width), (units,), (width, units), (width,)
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x, up, up_bias, down, down_bias = tensors
    plain = F.linear(gelu(F.linear(x, up, up_bias)), down, down_bias)
    got = chunked_mlp(x, (up, up_bias), gelu, (down, down_bias), size)
    assert close(got, plain, 1e-13)
    for mine, wanted in zip(
        torch.autograd.grad(got.square().sum(), tensors),
        torch.autograd.grad(plain.square().sum(), tensors),
        strict=True,
    ):
        assert close(mine, wanted, 1e-12)


@given(whole=st.integers(0, 5000), size=st.integers(1, 6000), multiple=st.sampled_from([16, 64]))
def test_parts_are_even_and_none_is_small(whole: int, size: int, multiple: int) -> None:
    parts = _even_parts(whole, size, multiple)
    assert sum(parts) == whole and all(part % multiple == 0 for part in parts[:-1])
    assert min(parts) >= min(whole, multiple) and max(parts) < size + 2 * multiple


def test_no_tokens_and_refused_sizes() -> None:
    mlp, _ = make_mlp(10)
    x = torch.randn(2, 0, WIDTH, requires_grad=True)
    mlp(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in mlp.parameters())
    with pytest.raises(ValueError, match="at least one place"):
        chunked_mlp(x[0], (mlp.up.weight, None), gelu, (mlp.down.weight, None), 0)
    with pytest.raises(ValueError, match=r"torch\.float64 do not match weights of torch\.float32"):
        chunked_mlp(x[0].double(), (mlp.up.weight, None), gelu, (mlp.down.weight, None), 1)


def test_casts_of_weights_are_not_kept() -> None:
    mlp, x = make_mlp(100)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mlp(x)

    assert kept_bytes(CPU, mlp, forward, [x]) == 2 * TOKENS * 2 * WIDTH  # its input as bfloat16, and its result


def test_an_mlp_whose_weights_are_not_read_is_the_mlp() -> None:
    """A row's product has as many terms as before, so it differs by float32's rounding of 4 E terms; a weight's gradient is a sum over N
    tokens in another order. Both stay within sqrt(terms) x 2^-23 of the largest value, with room of a factor of ten."""
    plain, grads = run(*make_mlp(None))
    got, chunked = run(*make_mlp(7, readable=False))
    assert close(got, plain, 1e-6)
    for name, value in grads.items():
        assert close(chunked[name], value, 4e-6), name  # type: ignore[arg-type]
    whole, unsplit = run(*make_mlp(TOKENS, readable=False))
    assert torch.equal(whole, plain) and same(unsplit, grads)


def peak_of(chunk: int | None, readable: bool = True) -> int:
    mlp, x = make_mlp(chunk, readable)
    return peak_bytes(CPU, 0, lambda: mlp(x).sum().backward())


@pytest.mark.parametrize("readable", [True, False])
def test_the_hidden_layer_exists_for_one_part_only(readable: bool) -> None:
    token = 4 * WIDTH  # bytes of a float32 token
    mlp, x = make_mlp(None)
    assert (
        kept_bytes(CPU, mlp, lambda: mlp(x), [x]) >= (4 + 4) * TOKENS * token
    )  # both sides of the activation function
    mlp, x = make_mlp(100, readable)
    assert kept_bytes(CPU, mlp, lambda: mlp(x), [x]) == TOKENS * token  # its result alone: its input was there
    peaks = [peak_of(None), peak_of(100, readable)]
    assert peaks[0] > 12 * TOKENS * token
    part = 4 * 100 * token if not readable else UNITS * TOKENS * 4  # of the hidden layer
    assert peaks[1] < 3 * TOKENS * token + (3 if readable else 5) * part + 3 * 8 * WIDTH * token


def test_products_of_backward() -> None:
    counts = {}
    for chunk, readable in ((None, True), (250, False), (250, True)):
        mlp, x = make_mlp(chunk, readable)
        out = mlp(x)
        with MatmulCounter() as count:
            out.sum().backward()
        counts[chunk, readable] = count.total, count.work
    once = 2 * TOKENS * WIDTH * 4 * WIDTH
    assert counts == {(None, True): (4, 4 * once), (250, False): (4 * 5, 5 * once), (250, True): (4 * 7, 7 * once)}


@pytest.mark.parametrize("readable", [True, False])
def test_without_gradients_parts_are_computed_once(readable: bool) -> None:
    mlp, x = make_mlp(300, readable)
    with torch.no_grad(), MatmulCounter() as count:
        got = mlp(x)
    assert count.total == 2 * 4
    whole = make_mlp(None)[0](x)
    assert close(got, whole, 4e-6)
    if alike(300):
        assert torch.equal(got, whole)


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


def step(
    keeping: BlockPolicies | None, dtype: torch.dtype = torch.float32, readable: bool = True
) -> tuple[Tensor, dict[str, Tensor], nn.Module]:
    model = SoraDiT(SoraDiTConfig(**CONFIG))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(0, 0.02, generator=g)
    for block in model.blocks:
        if not readable:
            pack(block.mlp)  # type: ignore[arg-type]
    model = parallelize(model, None, "none", compute_dtype=dtype, keeping=keeping)
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


def parts_of_blocks_have_the_bits_of_the_whole(dtype: torch.dtype) -> bool:
    """Asks the machine with the shapes of `step`'s MLPs: all tokens of both samples, parts of 20."""
    mlp = SoraDiT(SoraDiTConfig(**CONFIG)).blocks[0].mlp
    assert isinstance(mlp, Mlp)
    g = torch.Generator().manual_seed(5)
    tokens = 2 * SoraDiT(SoraDiTConfig(**CONFIG)).tokens((3, 8, 8))
    inputs = [(torch.randn(tokens, 192, generator=g), torch.randn(tokens, 192, generator=g)) for _ in range(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        return all(parts_have_the_bits_of_the_whole(mlp, x, grad, 20) for x, grad in inputs)


@pytest.mark.parametrize(
    ("ways", "dtype", "readable"),
    checkered([{}, {"block": "recompute"}, {"attention": "selective"}], [torch.float32, torch.bfloat16], [True, False]),
)
def test_a_model_with_its_mlps_in_parts(ways: dict[str, Any], dtype: torch.dtype, readable: bool) -> None:
    """Under autocast products are rounded to 8 bits; a sum's gradient is rounded in each part and summed in float32: 2^-8 twice."""
    plain_loss, plain, _ = step(None, dtype)
    loss, grads, model = step(BlockPolicies((ways,), mlp_chunk=20), dtype, readable)
    assert chunk_sizes(model) == [20] * CONFIG["depth"]
    assert all(value.abs().max() > 0 for value in plain.values())
    if readable and parts_of_blocks_have_the_bits_of_the_whole(dtype):
        assert torch.equal(loss, plain_loss) and same(grads, plain)
    within = 2e-5 if dtype == torch.float32 else 1e-2
    assert close(loss, plain_loss, within)
    assert grads.keys() == plain.keys()
    for name, value in plain.items():
        assert close(grads[name], value, within), name


def test_gradients_of_many_parts_are_as_close_to_float32_as_those_of_one() -> None:
    """Summed in bfloat16, those of 96 tokens one by one would be several times as far."""
    _, wanted, _ = step(None)

    def distance(chunk: int | None) -> float:
        _, actual, _ = step(BlockPolicies(mlp_chunk=chunk), torch.bfloat16, readable=False)
        return max(float((actual[n] - v).abs().max() / v.abs().max()) for n, v in wanted.items() if "mlp" in n)

    assert 0 < distance(1) < 1.3 * distance(None)


def test_a_block_without_such_an_mlp_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"memory\.mlp_chunk: Linear has no MLP"):
        BlockPolicies(mlp_chunk=8).apply(nn.Linear(2, 2), 0)


def test_what_does_not_go_with_parts_is_refused_in_a_sentence() -> None:
    rest: dict[str, Any] = {
        "dtype": "float32", "compiles": False, "clips": True, "accumulates": False, "strategy": "none",
        "tp": 1, "averages": True,
    }  # fmt: skip
    for ways, fine in (
        ({"mlp": "recompute"}, False),
        ({"attention": "recompute"}, True),
        ({"block": "recompute"}, True),
    ):
        message = refused(MemoryConfig(mlp_chunk=64, activation_policy=ways), **rest)
        assert (message is None) == fine
        assert fine or "mlp_chunk" in str(message)
    assert "train.ema_decay" in str(refused(MemoryConfig(ema="host"), **rest | {"averages": False}))
