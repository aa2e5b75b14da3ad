"""FlashAttention 3 (Shah et al., 2024), which torch puts behind its flash operators on Hopper where its package is installed; unrun.

Attention to a part of the keys (the ring) and within packed documents is computed by those operators; torch chooses cuDNN by itself for
the rest.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .torch_internals import cuda_flash, cuda_flash_backward

MODULE = "flash_attn_interface"
HOPPER = 9


class Flash(NamedTuple):
    """The version of FlashAttention behind torch's operators, in words. `broken`: 3 is installed, and does not work."""

    state: Literal["active", "absent", "broken"]
    words: str


@cache
def activate(device: torch.device, generation: int) -> Flash:
    """Put FlashAttention 3 behind torch's operators in this process where a device can use it, and say what they use.

    generation: the major number of the device's compute capability.

    It must give what torch's own gives, within the rounding of bfloat16; else torch's own stays.
    """
    if generation != HOPPER:
        return Flash("absent", "FlashAttention 2; 3 is made for Hopper")
    if find_spec(MODULE) is None:
        return Flash("absent", f"FlashAttention 2; 3 is not installed (module {MODULE})")
    from torch.nn import attention

    before = _attended(device)
    try:
        attention.activate_flash_attention_impl("FA3")
        for old, new in zip(before, _attended(device), strict=True):
            torch.testing.assert_close(new, old, rtol=0.02, atol=0.02)
    except (ImportError, AttributeError, RuntimeError, ValueError, AssertionError) as error:
        if hasattr(attention, "current_flash_attention_impl") and attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        return Flash("broken", f"FlashAttention 2; 3 is installed and does not work: {str(error).splitlines()[0]}")
    return Flash("active", "FlashAttention 3")


def _attended(device: torch.device) -> list[Tensor]:
    """A small causal attention by torch's flash operators with shared heads of keys: output, log-sum-exp and gradients."""
    q = torch.linspace(-20, 20, 4 * 192 * 128, device=device).sin().view(1, 4, 192, 128).bfloat16()
    k, v = q[:, :2].flip(2).contiguous(), q[:, 2:].contiguous()
    out, lse = cuda_flash(q, k, v, 0.0, True, False, scale=0.1)[:2]
    seed, unused = (torch.zeros(size, dtype=torch.uint64, device=device) for size in (2, 0))
    grads = cuda_flash_backward(q, q, k, v, out, lse, None, None, 192, 192, 0.0, True, seed, unused, scale=0.1)
    return [out, lse, *grads]
