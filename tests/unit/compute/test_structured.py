"""Attention under a structure on one process against a plain loop: causal order, windows, documents, masks of keys, grouped keys, values of
another width than keys.

Legend: B batch, A heads, K heads of the keys, N tokens, D head width, W width of the values.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed import comm
from mmspeed.compute import attention as attention_file
from mmspeed.compute.structured import Attend
from mmspeed.protocols.plan import Structure
from tests.ranks.test_exchange import Copied

B, A, N, D = 2, 4, 7, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
MASK = torch.tensor([[True, True, False, True, True, True, True], [True, True, True, True, False, False, True]])
FIELDS: dict[str, Any] = {"causal": True, "window": 2, "documents_BN": DOCUMENTS, "key_mask_BN": MASK}
CASES = [names for size in range(5) for names in itertools.combinations(FIELDS, size)]
HEADS = {
    "keys as queries": (A, D),
    "grouped keys": (2, D),
    "one key head, wide values": (1, 6),
    "narrow values": (A, 3),
}


def sees(structure: Structure, sample: int, query: int, key: int) -> bool:
    near = structure.window is None or abs(query - key) <= structure.window
    documents, mask = structure.documents_BN, structure.key_mask_BN
    same = documents is None or bool(documents[sample, query] == documents[sample, key])
    return near and same and (key <= query or not structure.causal) and (mask is None or bool(mask[sample, key]))


def in_a_loop(q_BAND: Tensor, k_BKND: Tensor, v_BKNW: Tensor, structure: Structure) -> Tensor:
    """Each query by itself; one that sees no key gives zeros."""
    out = []
    for sample, head, query in itertools.product(range(B), range(A), range(N)):
        keys = [key for key in range(N) if sees(structure, sample, query, key)]
        shared = head * k_BKND.shape[1] // A
        scores = k_BKND[sample, shared, keys] @ q_BAND[sample, head, query] / D**0.5
        out.append(scores.softmax(0) @ v_BKNW[sample, shared, keys] if keys else 0 * v_BKNW[sample, shared, query])
    return torch.stack(out).view(B, A, N, -1)


@pytest.mark.parametrize("heads", HEADS)
def test_attention_and_its_gradients_are_those_of_a_loop(heads: str) -> None:
    for names in CASES:
        check_gradients(names, heads)


def check_gradients(names: tuple[str, ...], heads: str) -> None:
    structure, (key_heads, width) = Structure(**{name: FIELDS[name] for name in names}), HEADS[heads]
    dice = torch.Generator().manual_seed(0)
    shapes = (B, A, N, D), (B, key_heads, N, D), (B, key_heads, N, width), (B, A, N, width)
    q, k, v, weights = (torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, loop = Attend()(q, k, v, structure), in_a_loop(q, k, v, structure)
    assert torch.allclose(out, loop, rtol=0, atol=1e-12)
    actual, true = (torch.autograd.grad((each * weights).sum(), inputs) for each in (out, loop))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(actual, true, strict=True))


WRONG = {
    "heads": ({}, (3, N), "4 heads of queries cannot share 3 of keys"),
    "keys": ({"window": 1}, (A, N + 1), "need as many keys as queries, not 7 queries and 8 keys"),
    "documents": (
        {"documents_BN": DOCUMENTS[:, 1:]},
        (A, N),
        r"the documents must have the shape \(batch, keys\) = \(2, 7\)",
    ),
    "mask": ({"causal": True, "key_mask_BN": MASK[:1]}, (A, N), r"the key mask must have the shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shapes_that_do_not_fit_are_named(case: str) -> None:
    fields, (heads, keys), words = WRONG[case]
    k_BKND = torch.zeros(B, heads, keys, D)
    with pytest.raises(ValueError, match=words):
        Attend()(torch.zeros(B, A, N, D), k_BKND, k_BKND, Structure(**fields))


def columns(videos: int, each: int) -> list[Tensor]:
    """Queries, keys and values (B, G, A, N, D), views of a product of tokens (B, N, G, E)."""
    product = torch.randn(videos, N, each, A, 3, D, generator=torch.Generator().manual_seed(1))
    return list(product.permute(4, 0, 2, 3, 1, 5).unbind(0))


@pytest.mark.parametrize("names", [(), ("causal",), ("key_mask_BN",), tuple(FIELDS)], ids=str)
@pytest.mark.parametrize(("videos", "each"), [(1, 2), (2, 1)])
def test_columns_attend_apart(names: tuple[str, ...], videos: int, each: int) -> None:
    structure, qkv = Structure(**{name: FIELDS[name] for name in names}), columns(videos, each)
    wanted = Attend()(*(x.flatten(0, 1) for x in qkv), structure).unflatten(0, (videos, each))
    assert torch.equal(Attend()(*qkv, structure), wanted)


def test_columns_of_several_videos_are_not_copied() -> None:
    qkv = columns(3, 2)
    with Copied() as copied:
        out = Attend()(*qkv, Structure())
    assert copied.bytes == 0 and out.shape == qkv[0].shape
    with Copied() as copied:  # a mask is of columns, not of heads
        masked = attention_file.attention_apart(*qkv, torch.ones(6, N, dtype=torch.bool))
    assert copied.bytes >= 3 * comm.nbytes(out)
    torch.testing.assert_close(masked, out)
