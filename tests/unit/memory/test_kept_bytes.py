"""Bytes that one block keeps for backward and moves to the host, by policy, in float32: numbers with their derivation.

The block is one of a full SoraDiT: B = 2 samples, 4 x 4 x 4 tokens, E = 48, A = 4 heads of D = 12, a hidden layer of 4 E, captions of
5 tokens, modulation of rank 4. What a block keeps is what a model of two keeps beyond a model of one: what the model itself makes once
for all of its blocks (conditioning, captions, positions with their cosines and sines) is not the block's.
"""

from __future__ import annotations

from functools import cache

import pytest

from mmspeed.config.memory import ActivationPolicy
from mmspeed.models import SoraDiT, SoraDiTConfig
from tests.support.memory_ways import Step, step_of

TOKENS, TEXT, WIDTH, HEADS, RANK = 2 * 4 * 4 * 4, 2 * 5, 48, 4, 4
SMALLEST = 1 << 10  # bytes of a tensor that is offloaded, in `step_of`

X = 4 * TOKENS * WIDTH  # a tensor of all tokens
TOKEN = 4 * TOKENS  # a number of each token: the mean of a norm, or its standard deviation
HEAD = 4 * TOKENS * HEADS  # a number of each token and head: the same of queries or keys, or the log of a softmax's sum
SCALE = 4 * 2 * WIDTH  # 1 + scale of each sample
DOWN, MODULATION = 4 * 2 * RANK, 4 * 2 * 6 * WIDTH  # the modulation's two products
KV = 4 * TEXT * 2 * WIDTH  # keys and values of captions
MASKS = 4 * TEXT + 2  # of keys as attention takes it, and of samples that see none

# Without the tensor of all tokens that each branch begins with, `x`:
# normed; modulated; qkv (3); queries and keys, each without their scale and turned (2 + 2); attention; the same token by token; its product
ATTENTION = 12 * X + 2 * TOKEN + SCALE + 3 * HEAD
# normed; queries, without their scale, and normed; attention; the same token by token; of captions keys and values, and keys twice more
CROSS_ATTENTION = 6 * X + 2 * TOKEN + 2 * HEAD + KV + 2 * (KV // 2) + 4 * TEXT * HEADS + MASKS
# normed; modulated; hidden (4); activated (4); its product
MLP = 11 * X + 2 * TOKEN + SCALE
PLAIN = 3 * X + ATTENTION + CROSS_ATTENTION + MLP + DOWN + MODULATION

# what `selective` keeps of each: products and attention
ATTENTION_PRODUCTS = 5 * X + HEAD
CROSS_PRODUCTS = 3 * X + HEAD + KV
MLP_PRODUCTS = 5 * X
PRODUCTS = X + ATTENTION_PRODUCTS + CROSS_PRODUCTS + MLP_PRODUCTS + DOWN + MODULATION

# tensors that are too small to be offloaded
ATTENTION_SMALL = 2 * TOKEN + SCALE
CROSS_SMALL = 2 * TOKEN + 4 * TEXT * HEADS + MASKS
MLP_SMALL = 2 * TOKEN + SCALE
SMALL = ATTENTION_SMALL + CROSS_SMALL + MLP_SMALL + DOWN

# kept on the device, moved to the host. The modulation is one tensor for attention and MLP: where one alone offloads it, the other keeps it
EXPECTED: dict[tuple[str, ActivationPolicy], tuple[int, int]] = {
    ("block", "save"): (PLAIN, 0),
    ("block", "recompute"): (X, 0),
    ("block", "selective"): (PRODUCTS, 0),
    ("block", "offload"): (SMALL, PLAIN - SMALL),
    ("block", "offload_selective"): (DOWN, PRODUCTS - DOWN),
    ("block", "offload_recompute"): (0, X),
    ("attention", "recompute"): (PLAIN - ATTENTION, 0),
    ("attention", "selective"): (PLAIN - ATTENTION + ATTENTION_PRODUCTS, 0),
    ("attention", "offload"): (PLAIN - X - ATTENTION + ATTENTION_SMALL, X + ATTENTION - ATTENTION_SMALL + MODULATION),
    ("attention", "offload_selective"): (PLAIN - X - ATTENTION, X + ATTENTION_PRODUCTS + MODULATION),
    ("cross_attention", "recompute"): (PLAIN - CROSS_ATTENTION, 0),
    ("cross_attention", "selective"): (PLAIN - CROSS_ATTENTION + CROSS_PRODUCTS, 0),
    ("cross_attention", "offload"): (PLAIN - X - CROSS_ATTENTION + CROSS_SMALL, X + CROSS_ATTENTION - CROSS_SMALL),
    ("cross_attention", "offload_selective"): (PLAIN - X - CROSS_ATTENTION, X + CROSS_PRODUCTS),
    ("mlp", "recompute"): (PLAIN - MLP, 0),
    ("mlp", "selective"): (PLAIN - MLP + MLP_PRODUCTS, 0),
    ("mlp", "offload"): (PLAIN - X - MLP + MLP_SMALL, X + MLP - MLP_SMALL + MODULATION),
    ("mlp", "offload_selective"): (PLAIN - X - MLP, X + MLP_PRODUCTS + MODULATION),
    ("norm", "recompute"): (PLAIN - 5 * X - 6 * TOKEN - 2 * SCALE, 0),
    ("activation", "recompute"): (PLAIN - 4 * X, 0),
}


def model_of(depth: int) -> SoraDiT:
    return SoraDiT(
        SoraDiTConfig(WIDTH, depth, HEADS, latent_channels=3, text_width=10, adaln_rank=RANK, arrangement="full")
    )


@cache
def step(depth: int, region: str, policy: ActivationPolicy) -> Step:
    return step_of({region: policy}, lambda: model_of(depth), track=True)


FAST = [("block", "offload_selective"), ("attention", "selective"), ("norm", "recompute")]
CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in EXPECTED]


@pytest.mark.parametrize(("region", "policy"), CASES)
def test_bytes_that_a_block_keeps_and_moves(region: str, policy: ActivationPolicy) -> None:
    one, two = step(1, region, policy), step(2, region, policy)
    assert (two.kept - one.kept, two.moved - one.moved) == EXPECTED[region, policy]


def test_positions_are_not_moved_to_the_host() -> None:
    """A model makes them once for all of its blocks, and holds them: 64 places x 3 axes x 8 bytes, more than is too small.

    Their cosines and sines, which backward needs, are moved once for all blocks: 64 places x half a head.
    """
    assert 64 * 3 * 8 >= SMALLEST
    shared, captions = MODULATION, 4 * TEXT * WIDTH  # of the model, which every block is given
    assert step(1, "block", "offload_selective").moved == PRODUCTS - DOWN + shared + captions + 2 * 4 * 64 * 6
