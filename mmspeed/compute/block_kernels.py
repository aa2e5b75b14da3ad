"""The kernels of block attention: their interface, the CPU's fused operator, and the eager twin that is the oracle of all.

`forward(q, k, v, key_mask, causal, scale) -> (out, lse)` and `backward(dout, q, k, v, out, lse, key_mask, causal, scale) ->
(dq, dk, dv)`, where out and lse are those of the attention to all keys, of which these may be a part. Shapes are checked and not empty,
rows are contiguous; the results of a forward for queries that see no key are arbitrary, and the caller overwrites them.

Legend: B batch, A heads, K heads of the keys, N queries, n a part of them, M keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.torch_internals import cpu_flash, cpu_flash_backward

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
]
Refuses = Callable[[Tensor, Tensor, Tensor | None, bool], str]

HALF = (torch.float16, torch.bfloat16)
EAGER_SCORES = 1 << 24  # scores that the eager twin holds at a time: 64 MiB in float32


@dataclass(frozen=True)
class BlockKernel:
    """A kernel. `refuses` returns the part of a call that the kernel does not support, or an empty string."""

    name: str
    refuses: Refuses
    forward: Forward
    backward: Backward


def dead_rows(key_mask_BM: Tensor, causal: bool) -> Tensor:
    """True at queries that see no key: (B, 1, N), or (B, 1, 1) when not causal."""
    if causal:
        return (key_mask_BM.cumsum(dim=-1) == 0)[:, None, :]
    return ~key_mask_BM.any(dim=-1)[:, None, None]


def bias(key_mask_BM: Tensor, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    """The bias (B, 1, 1, M): 0 at keys that count, very negative (finite: never inf - inf) at others; rows padded in memory."""
    batch, keys = key_mask_BM.shape
    bias_BM = torch.zeros(batch, -(-keys // multiple) * multiple, dtype=dtype, device=key_mask_BM.device)[:, :keys]
    return bias_BM.masked_fill_(~key_mask_BM, torch.finfo(dtype).min / 2)[:, None, None, :]


def repeat(x_BKMD: Tensor, heads: int) -> Tensor:
    """Keys or values with each head repeated for the query heads that share it."""
    return x_BKMD if x_BKMD.shape[1] == heads else x_BKMD.repeat_interleave(heads // x_BKMD.shape[1], dim=1)


def fold(dx_BAMD: Tensor, key_heads: int) -> Tensor:
    """The backward of `repeat`, summed in float32 at least."""
    if dx_BAMD.shape[1] == key_heads:
        return dx_BAMD
    wide = torch.promote_types(dx_BAMD.dtype, torch.float32)
    return dx_BAMD.unflatten(1, (key_heads, -1)).sum(dim=2, dtype=wide).to(dx_BAMD.dtype)


# ---- CPU: the flash operator takes any number of key heads


def _cpu_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    return "" if q.device.type == "cpu" else f"tensors on {q.device.type}"


def _cpu_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias_B11M = None if key_mask_BM is None else bias(key_mask_BM, q_BAND.dtype)
    out_BAND, lse_BAN = cpu_flash(q_BAND, k_BKMD, v_BKMD, 0.0, causal, attn_mask=bias_B11M, scale=scale)
    return out_BAND, lse_BAN


def _cpu_backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    key_mask_BM: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    bias_B11M = None if key_mask_BM is None else bias(key_mask_BM, q_BAND.dtype)
    dq, dk, dv = cpu_flash_backward(
        dout_BAND, q_BAND, k_BKMD, v_BKMD, out_BAND, lse_BAN, 0.0, causal, attn_mask=bias_B11M, scale=scale
    )
    return dq, dk, dv


# ---- eager: the formulas written out, queries in parts


def _never(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    return ""


def _scores(q_BAnD: Tensor, k_BAMD: Tensor, key_mask_BM: Tensor | None, first: int | None, scale: float) -> Tensor:
    """Scaled scores, -inf at hidden keys; `first`: the position of the first query when causal."""
    score_BAnM = (q_BAnD * scale) @ k_BAMD.mT
    if key_mask_BM is not None:
        score_BAnM = score_BAnM.masked_fill(~key_mask_BM[:, None, None, :], -torch.inf)
    if first is not None:
        n, m = score_BAnM.shape[-2:]
        later = torch.ones(n, m, dtype=torch.bool, device=score_BAnM.device).triu_(first + 1)
        score_BAnM = score_BAnM.masked_fill(later, -torch.inf)
    return score_BAnM


def _parts(q_BAND: Tensor, keys: int) -> list[slice]:
    batch, heads, queries, _ = q_BAND.shape
    step = max(1, EAGER_SCORES // (batch * heads * keys))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]


def _eager_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    outs, lses = [], []
    with torch.autocast(q_BAND.device.type, enabled=False):
        k_BAMD, v_BAMD = (repeat(x, q_BAND.shape[1]).to(wide) for x in (k_BKMD, v_BKMD))
        for part in _parts(q_BAND, k_BKMD.shape[2]):
            score = _scores(q_BAND[:, :, part].to(wide), k_BAMD, key_mask_BM, part.start if causal else None, scale)
            lse_BAn = score.logsumexp(dim=-1)
            outs.append((score - lse_BAn[..., None]).exp_() @ v_BAMD)
            lses.append(lse_BAn)
    return torch.cat(outs, dim=2).to(q_BAND.dtype), torch.cat(lses, dim=2)


def _eager_backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    key_mask_BM: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    dqs = []
    with torch.autocast(q_BAND.device.type, enabled=False):
        k_BAMD, v_BAMD = (repeat(x, q_BAND.shape[1]).to(wide) for x in (k_BKMD, v_BKMD))
        dk_BAMD, dv_BAMD = torch.zeros_like(k_BAMD), torch.zeros_like(v_BAMD)
        for part in _parts(q_BAND, k_BKMD.shape[2]):
            q, dout, out = (x[:, :, part].to(wide) for x in (q_BAND, dout_BAND, out_BAND))
            score = _scores(q, k_BAMD, key_mask_BM, part.start if causal else None, scale)
            p_BAnM = (score - lse_BAN[:, :, part, None]).exp_()
            ds_BAnM = p_BAnM * (dout @ v_BAMD.mT - (dout * out).sum(dim=-1, keepdim=True)) * scale
            dv_BAMD += p_BAnM.mT @ dout
            dk_BAMD += ds_BAnM.mT @ q
            dqs.append(ds_BAnM @ k_BAMD)
        heads = k_BKMD.shape[1]
        dq, dk, dv = torch.cat(dqs, dim=2), fold(dk_BAMD, heads), fold(dv_BAMD, heads)
    return dq.to(q_BAND.dtype), dk.to(q_BAND.dtype), dv.to(q_BAND.dtype)


CPU = BlockKernel("cpu_flash", _cpu_refuses, _cpu_forward, _cpu_backward)
EAGER = BlockKernel("eager", _never, _eager_forward, _eager_backward)
