"""Attention under a structure on one process against a plain loop: causal order, windows, documents, masks of keys."""

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

B, A, N, D = 2, 3, 7, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
MASK = torch.tensor([[True, True, False, True, True, True, True], [True, True, True, True, False, False, True]])
FIELDS: dict[str, Any] = {"causal": True, "window": 2, "documents_BN": DOCUMENTS, "key_mask_BN": MASK}
CASES = [names for size in range(5) for names in itertools.combinations(FIELDS, size)]


def sees(structure: Structure, sample: int, query: int, key: int) -> bool:
    near = structure.window is None or abs(query - key) <= structure.window
    documents, mask = structure.documents_BN, structure.key_mask_BN
    same = documents is None or bool(documents[sample, query] == documents[sample, key])
    return near and same and (key <= query or not structure.causal) and (mask is None or bool(mask[sample, key]))


def in_a_loop(q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, structure: Structure) -> Tensor:
    """Each query by itself; one that sees no key gives zeros."""
    out = []
    for sample, head, query in itertools.product(range(B), range(A), range(N)):
        keys = [key for key in range(N) if sees(structure, sample, query, key)]
        scores = k_BAND[sample, head, keys] @ q_BAND[sample, head, query] / D**0.5
        out.append(scores.softmax(0) @ v_BAND[sample, head, keys] if keys else 0 * v_BAND[sample, head, query])
    return torch.stack(out).view(B, A, N, D)


@pytest.mark.parametrize("names", CASES, ids=str)
def test_attention_and_its_gradients_are_those_of_a_loop(names: tuple[str, ...]) -> None:
    structure = Structure(**{name: FIELDS[name] for name in names})
    dice = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, B, A, N, D, generator=dice, dtype=torch.float64)
    weights = torch.randn(B, A, N, D, generator=dice, dtype=torch.float64)
    found, true = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    out, loop = Attend()(*found.unbind(0), structure), in_a_loop(true[0], true[1], true[2], structure)
    assert torch.allclose(out, loop, rtol=0, atol=1e-12)
    (out * weights).sum().backward()
    (loop * weights).sum().backward()
    assert found.grad is not None and true.grad is not None
    assert torch.allclose(found.grad, true.grad, rtol=0, atol=1e-12)


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
