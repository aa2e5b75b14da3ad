"""The kernels of block attention: fused operators by device, and the eager twin that is their oracle.

`forward(q, k, v, key_mask, causal, scale) -> (out, lse)` and `backward(dout, q, k, v, out, lse, key_mask, causal, scale) ->
(dq, dk, dv)`, where out and lse are those of the attention to all keys, of which these may be a part. Shapes are checked and not empty,
rows are whole in memory; what a forward gives for queries that see no key is anything, the caller blanks it.

Legend: B batch, A heads, K heads of the keys, N queries, n a part of them, M keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
]
Refuses = Callable[[Tensor, Tensor, Tensor | None, bool], str]

HALF = (torch.float16, torch.bfloat16)
EAGER_SCORES = 1 << 24  # scores that the eager twin holds at a time: 64 MiB in float32
MASK_BYTES = 1 << 28  # a mask over queries x keys that the NPU operator is given at a time


@dataclass(frozen=True)
class Kernel:
    """`refuses` says what of a call the kernel does not serve, or nothing."""

    name: str
    refuses: Refuses
    forward: Forward
    backward: Backward


def dead_rows(key_mask_BM: Tensor, causal: bool) -> Tensor:
    """(B, 1, N), or (B, 1, 1) when not causal: True at queries that see no key."""
    if causal:
        return (key_mask_BM.cumsum(dim=-1) == 0)[:, None, :]
    return ~key_mask_BM.any(dim=-1)[:, None, None]


def _bias(key_mask_BM: Tensor, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    """(B, 1, 1, M), 0 at keys that count and very negative (finite: never inf - inf) at others; rows padded in memory."""
    batch, keys = key_mask_BM.shape
    bias_BM = torch.zeros(batch, -(-keys // multiple) * multiple, dtype=dtype, device=key_mask_BM.device)[:, :keys]
    return bias_BM.masked_fill_(~key_mask_BM, torch.finfo(dtype).min / 2)[:, None, None, :]


def _repeat(x_BKMD: Tensor, heads: int) -> Tensor:
    """Keys or values with each head as often as queries share it."""
    return x_BKMD if x_BKMD.shape[1] == heads else x_BKMD.repeat_interleave(heads // x_BKMD.shape[1], dim=1)


def _fold(dx_BAMD: Tensor, key_heads: int) -> Tensor:
    """The backward of `_repeat`, summed in float32 at least."""
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
    bias = None if key_mask_BM is None else _bias(key_mask_BM, q_BAND.dtype)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out_BAND, lse_BAN = op(q_BAND, k_BKMD, v_BKMD, 0.0, causal, attn_mask=bias, scale=scale)
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
    bias = None if key_mask_BM is None else _bias(key_mask_BM, q_BAND.dtype)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(dout_BAND, q_BAND, k_BKMD, v_BKMD, out_BAND, lse_BAN, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


# ---- CUDA: flash for half types without a mask, memory-efficient for the rest


def _old(q: Tensor) -> bool:
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0)


def _flash_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    if q.device.type not in ("cuda", "meta"):
        return f"tensors on {q.device.type}"
    if key_mask is not None:
        return "a key mask"
    if _old(q):
        return "devices before compute capability 8.0"
    fits = q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "" if fits else f"{q.dtype} heads of width {q.shape[-1]}"


def _flash_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out_BAND, lse_BAN = op(q_BAND, k_BKMD, v_BKMD, 0.0, causal, False, scale=scale)[:2]
    return out_BAND, lse_BAN[..., : q_BAND.shape[2]]


def _flash_backward(
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
    seed, unused = (torch.zeros(size, dtype=torch.uint64, device=q_BAND.device) for size in (2, 0))  # no dropout
    lengths = (None, None, q_BAND.shape[2], k_BKMD.shape[2])
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    inputs = (dout_BAND, q_BAND, k_BKMD, v_BKMD, out_BAND, lse_BAN)
    dq, dk, dv = op(*inputs, *lengths, 0.0, causal, seed, unused, scale=scale)
    return dq, dk, dv


def _efficient_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    if q.device.type not in ("cuda", "meta"):
        return f"tensors on {q.device.type}"
    if q.dtype == torch.bfloat16 and _old(q):
        return "bfloat16 on devices before compute capability 8.0"
    fits = (q.dtype in HALF and q.shape[-1] % 8 == 0) or (q.dtype == torch.float32 and q.shape[-1] % 4 == 0)
    return "" if fits else f"{q.dtype} heads of width {q.shape[-1]}"


def _efficient_bias(q_BAND: Tensor, key_mask_BM: Tensor | None) -> Tensor | None:
    if key_mask_BM is None:
        return None
    bias_B11M = _bias(key_mask_BM, q_BAND.dtype, multiple=16)  # this kernel reads rows that begin at whole 32 bytes
    return bias_B11M.expand(*q_BAND.shape[:3], -1)


def _efficient_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k_BAMD, v_BAMD = _repeat(k_BKMD, q_BAND.shape[1]), _repeat(v_BKMD, q_BAND.shape[1])
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out_BAND, lse_BAN = op(
        q_BAND, k_BAMD, v_BAMD, _efficient_bias(q_BAND, key_mask_BM), True, 0.0, causal, scale=scale
    )[:2]
    return out_BAND, lse_BAN[..., : q_BAND.shape[2]]  # it pads the queries of its log-sum-exp


def _efficient_backward(
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
    k_BAMD, v_BAMD = _repeat(k_BKMD, q_BAND.shape[1]), _repeat(v_BKMD, q_BAND.shape[1])
    padded = F.pad(lse_BAN, (0, -lse_BAN.shape[-1] % 32), value=torch.inf)
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q_BAND.device) for _ in range(2))  # no dropout
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    inputs = (dout_BAND, q_BAND, k_BAMD, v_BAMD, _efficient_bias(q_BAND, key_mask_BM), out_BAND, padded)
    dq, dk, dv, _ = op(*inputs, seed, offset, 0.0, [True, True, True, False], causal, scale=scale)
    return dq, _fold(dk, k_BKMD.shape[1]), _fold(dv, k_BKMD.shape[1])


# ---- NPU: the operator gives the row maxima and sums of the softmax, each eight times over


def _npu_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    if not hasattr(torch.ops.npu, "npu_fusion_attention"):
        return "a machine without torch_npu"
    return "" if q.dtype in (*HALF, torch.float32) else f"{q.dtype}"


def _npu_masks(
    q_BAND: Tensor, keys: int, key_mask_BM: Tensor | None, causal: bool
) -> list[tuple[slice, dict[str, Any]]]:
    """Parts of the queries, and the mask of each as the operator wants it: True at what is left out.

    Causal alone takes its triangle of 2048 x 2048, whatever the length. A key mask has to be spread over the queries; so that it does not
    fill the memory, the queries go in parts.
    """
    if key_mask_BM is None:
        if not causal:
            return [(slice(None), {})]
        triangle = torch.ones(2048, 2048, dtype=torch.bool, device=q_BAND.device).triu_(1)
        return [(slice(None), {"atten_mask": triangle, "sparse_mode": 2})]
    queries, step = q_BAND.shape[2], max(1, MASK_BYTES // key_mask_BM.numel())
    masks = []
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        hidden_B1nM = (~key_mask_BM)[:, None, None, :].expand(-1, 1, part.stop - start, -1)
        if causal:
            rows = torch.arange(start, part.stop, device=q_BAND.device)[:, None]
            hidden_B1nM = hidden_B1nM | (torch.arange(keys, device=q_BAND.device) > rows)
        masks.append((part, {"atten_mask": hidden_B1nM.contiguous(), "sparse_mode": 1}))
    return masks


def _npu_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for part, mask in _npu_masks(q_BAND, k_BKMD.shape[2], key_mask_BM, causal):
        results = torch.ops.npu.npu_fusion_attention(
            q_BAND[:, :, part].contiguous(), k_BKMD, v_BKMD, q_BAND.shape[1], "BNSD", scale=scale, **mask
        )
        outs.append(results[0])
        lses.append(results[1][..., 0].float() + results[2][..., 0].float().log())
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, dim=2), torch.cat(lses, dim=2))


def _npu_backward(
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
    lse_BAN8 = lse_BAN[..., None].expand(*lse_BAN.shape, 8)  # exp(score - max) / sum with max = lse and sum = 1
    dqs, dk_BKMD, dv_BKMD = [], None, None
    for part, mask in _npu_masks(q_BAND, k_BKMD.shape[2], key_mask_BM, causal):
        top = lse_BAN8[:, :, part].contiguous()
        dq, dk, dv = torch.ops.npu.npu_fusion_attention_grad(
            q_BAND[:, :, part].contiguous(),
            k_BKMD,
            v_BKMD,
            dout_BAND[:, :, part].contiguous(),
            q_BAND.shape[1],
            "BNSD",
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            attention_in=out_BAND[:, :, part].contiguous(),
            scale_value=scale,
            **mask,
        )[:3]
        dqs.append(dq)
        dk_BKMD = dk.float() if dk_BKMD is None else dk_BKMD.add_(dk)
        dv_BKMD = dv.float() if dv_BKMD is None else dv_BKMD.add_(dv)
    assert dk_BKMD is not None and dv_BKMD is not None  # there is at least one part
    return torch.cat(dqs, dim=2), dk_BKMD.to(k_BKMD.dtype), dv_BKMD.to(v_BKMD.dtype)


# ---- eager: the formulas written out, queries in parts


def _never(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    return ""


def _scores(q_BAnD: Tensor, k_BAMD: Tensor, key_mask_BM: Tensor | None, first: int | None, scale: float) -> Tensor:
    """Scaled scores, -inf at what is not seen; `first`: the place of the first query when causal."""
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
        k_BAMD, v_BAMD = (_repeat(x, q_BAND.shape[1]).to(wide) for x in (k_BKMD, v_BKMD))
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
        k_BAMD, v_BAMD = (_repeat(x, q_BAND.shape[1]).to(wide) for x in (k_BKMD, v_BKMD))
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
        dq, dk, dv = torch.cat(dqs, dim=2), _fold(dk_BAMD, heads), _fold(dv_BAMD, heads)
    return dq.to(q_BAND.dtype), dk.to(q_BAND.dtype), dv.to(q_BAND.dtype)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("cpu_flash", _cpu_refuses, _cpu_forward, _cpu_backward),
        Kernel("cuda_flash", _flash_refuses, _flash_forward, _flash_backward),
        Kernel("cuda_efficient", _efficient_refuses, _efficient_forward, _efficient_backward),
        Kernel("npu_fusion", _npu_refuses, _npu_forward, _npu_backward),
        Kernel("eager", _never, _eager_forward, _eager_backward),
    )
}
