"""Device functions of the gather kernel's backward pass. Imported only when a call needs them.
Arguments have no types: the compiler reads annotations, and accepts `constexpr` alone.

dq is computed in the order of the forward pass. dk and dv are summed without atomic additions, so that the same plan gives the same bits:
the keys of a head are split into ranges of equal work, one program owns the sums of a range and takes the clusters in order. The kept keys
of a cluster in a range are neighbours in its ascending list, so nothing is inverted or sorted: a bisection finds their two ends.

Legend: G = B x A heads, N queries, M keys, D head width, W its next power of two, C clusters of queries, K clusters of keys, R ranges of
keys, S shares of the clusters, q and k a block of queries and of keys or means. Logarithms are to base 2 here, `lse` is to base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import LN2, head_of, inside, item, log_count, means_block, places, product, rows


@triton.jit
def levels(lse, index, live):
    """Log-sum-exp of the queries `index`; +inf where they see no key or are not live, so that all their weights are 0."""
    level = tl.load(lse + index, mask=live, other=float("-inf"))
    return tl.where(level == float("-inf"), float("inf"), level / LN2)


@triton.jit
def dq_step(q, k, v, dout, bias, level, delta, dq, scale, EXACT: tl.constexpr):
    """Add a block of keys' share to the gradient of the queries, without the scale."""
    p = tl.exp2(product(q, tl.trans(k), EXACT) * scale + bias[None, :] - level[:, None])
    ds = p * (product(dout, tl.trans(v), EXACT) - delta[:, None])
    return dq + product(ds.to(k.dtype), k, EXACT)


@triton.jit
def query_gradient(
    q, k, v, out, dout, lse, delta, dq,
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides,
    mean_k, mean_v, dropped,
    row_of, place_of, q_index, q_offsets, kv_index, kv_offsets,
    heads, N, C, K, all_rows, scale, natural_scale,
    D: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute, in each program, the gradient of a block of one cluster's queries, and delta_GN = sum(out * dout) for the other kernels."""
    if tl.load(row_of + tl.program_id(0)) >= all_rows:
        return
    row, g, index, live = item(row_of, place_of, q_index, q_offsets, N, C, BLOCK_Q)
    q_block = rows(head_of(q, q_strides, g, heads), q_strides[2], index, live, D, W)
    dout_block = rows(head_of(dout, dout_strides, g, heads), dout_strides[2], index, live, D, W)
    out_block = rows(head_of(out, out_strides, g, heads), out_strides[2], index, live, D, W)
    both = tl.sum(dout_block.to(tl.float32) * out_block.to(tl.float32), 1)
    tl.store(delta + g.to(tl.int64) * N + index, both, mask=live)
    level = levels(lse + g.to(tl.int64) * N, index, live)
    k_head, v_head = head_of(k, k_strides, g, heads), head_of(v, v_strides, g, heads)
    acc = tl.zeros([BLOCK_Q, W], tl.float32)

    begin = tl.load(kv_offsets + row)
    kept = (tl.load(kv_offsets + row + 1) - begin).to(tl.int32)
    for first in range(0, kept, BLOCK_K):
        nth = first + tl.arange(0, BLOCK_K)
        seen = nth < kept
        key = tl.load(kv_index + begin + nth, mask=seen, other=0)
        k_block = rows(k_head, k_strides[2], key, seen, D, W)
        v_block = rows(v_head, v_strides[2], key, seen, D, W)
        bias = tl.where(seen, 0.0, float("-inf"))
        acc = dq_step(q_block, k_block, v_block, dout_block, bias, level, both, acc, scale, EXACT)
    if TAIL:
        mean_of = g.to(tl.int64) * K
        for first in range(0, K, BLOCK_K):
            k_block, v_block, bias = means_block(
                dropped + row.to(tl.int64) * K, mean_k + mean_of * D, mean_v + mean_of * D, first, K, D, W, BLOCK_K
            )
            acc = dq_step(q_block, k_block, v_block, dout_block, bias, level, both, acc, scale, EXACT)
    pointers = places(head_of(dq, dq_strides, g, heads), dq_strides[2], index, W)
    tl.store(pointers, (acc * natural_scale).to(dq.dtype.element_ty), mask=inside(live, D, W))


@triton.jit
def add_cluster(
    q, dout, q_stride, dout_stride, lse, delta, q_index, first, last,
    k, v, bias, dk, dv, scale,
    D: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the share of a head's sorted queries first .. last - 1 to a block of keys or means: (dk_kW without the scale, dv_kW)."""
    for start in range(first, last, BLOCK_Q):
        place = start + tl.arange(0, BLOCK_Q)
        live = place < last
        index = tl.load(q_index + place, mask=live, other=0)
        q_block = rows(q, q_stride, index, live, D, W)
        dout_block = rows(dout, dout_stride, index, live, D, W)
        level = levels(lse, index, live)
        both = tl.load(delta + index, mask=live, other=0.0)
        p = tl.exp2(product(k, tl.trans(q_block), EXACT) * scale + bias[:, None] - level[None, :])
        dv += product(p.to(dout_block.dtype), dout_block, EXACT)
        ds = p * (product(v, tl.trans(dout_block), EXACT) - both[None, :])
        dk += product(ds.to(q_block.dtype), q_block, EXACT)
    return dk, dv


@triton.jit
def key_gradient(
    q, k, v, dout, lse, delta, dk, dv,
    q_strides, k_strides, v_strides, dout_strides,
    q_index, q_offsets, kv_index, kv_offsets, cuts,
    heads, N, M, C, R, scale, natural_scale,
    D: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a range of a head's keys, which one program alone writes: dk and dv, (G, M, D) float32, zero at first."""
    r, g = tl.program_id(0), tl.program_id(1)
    g_wide = g.to(tl.int64)
    q_head, dout_head = head_of(q, q_strides, g, heads), head_of(dout, dout_strides, g, heads)
    k_head, v_head = head_of(k, k_strides, g, heads), head_of(v, v_strides, g, heads)
    dk_head, dv_head = dk + g_wide * M * D, dv + g_wide * M * D
    for c in range(C):
        row = g_wide * C + c
        first = tl.load(q_offsets + g_wide * (C + 1) + c).to(tl.int32)
        last = tl.load(q_offsets + g_wide * (C + 1) + c + 1).to(tl.int32)
        begin = tl.load(kv_offsets + row)
        stop = tl.load(cuts + row * (R + 1) + r + 1)
        for start in range(tl.load(cuts + row * (R + 1) + r), stop, BLOCK_K):
            nth = start + tl.arange(0, BLOCK_K)
            seen = nth < stop
            key = tl.load(kv_index + begin + nth, mask=seen, other=0)
            k_block = rows(k_head, k_strides[2], key, seen, D, W)
            v_block = rows(v_head, v_strides[2], key, seen, D, W)
            zeros = tl.zeros([BLOCK_K, W], tl.float32)
            dk_block, dv_block = add_cluster(
                q_head, dout_head, q_strides[2], dout_strides[2], lse + g_wide * N, delta + g_wide * N,
                q_index + g_wide * N, first, last, k_block, v_block, tl.where(seen, 0.0, float("-inf")), zeros, zeros,
                scale, D, W, BLOCK_Q, EXACT,
            )  # fmt: skip
            mask = inside(seen, D, W)
            dk_sum, dv_sum = places(dk_head, D, key, W), places(dv_head, D, key, W)
            tl.store(dk_sum, tl.load(dk_sum, mask=mask, other=0.0) + dk_block * natural_scale, mask=mask)
            tl.store(dv_sum, tl.load(dv_sum, mask=mask, other=0.0) + dv_block, mask=mask)
            tl.debug_barrier()  # the next cluster's threads read what these wrote


@triton.jit
def mean_gradient(
    q, mean_k, mean_v, dropped, dout, lse, delta, dk, dv,
    q_strides, dout_strides, q_index, q_offsets,
    heads, N, C, K, S, scale, natural_scale,
    D: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sum, in each program, the gradients of a block of a head's means over every S-th cluster; dk and dv are (S, G, K, D) float32."""
    share, g = tl.program_id(1), tl.program_id(2)
    g_wide = g.to(tl.int64)
    q_head, dout_head = head_of(q, q_strides, g, heads), head_of(dout, dout_strides, g, heads)
    index = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = index < K
    k_block = rows(mean_k + g_wide * K * D, D, index, live, D, W)
    v_block = rows(mean_v + g_wide * K * D, D, index, live, D, W)
    dk_block, dv_block = tl.zeros([BLOCK_K, W], tl.float32), tl.zeros([BLOCK_K, W], tl.float32)
    for c in range(share, C, S):
        first = tl.load(q_offsets + g_wide * (C + 1) + c).to(tl.int32)
        last = tl.load(q_offsets + g_wide * (C + 1) + c + 1).to(tl.int32)
        bias = log_count(dropped + (g_wide * C + c) * K, index, live)
        dk_block, dv_block = add_cluster(
            q_head, dout_head, q_strides[2], dout_strides[2], lse + g_wide * N, delta + g_wide * N,
            q_index + g_wide * N, first, last, k_block, v_block, bias, dk_block, dv_block,
            scale, D, W, BLOCK_Q, EXACT,
        )  # fmt: skip
    mine = (share.to(tl.int64) * tl.num_programs(2) + g) * K * D
    mask = inside(live, D, W)
    tl.store(places(dk + mine, D, index, W), dk_block * natural_scale, mask=mask)
    tl.store(places(dv + mine, D, index, W), dv_block, mask=mask)


@triton.jit
def count_work(work, q_offsets, kv_index, kv_offsets, M, C, BLOCK: tl.constexpr):
    """Add to each key of work_GM the number of queries that keep it. Sums of integers do not depend on the order of atomic additions."""
    row = tl.program_id(0).to(tl.int64)
    g, c = row // C, row % C
    size = tl.load(q_offsets + g * (C + 1) + c + 1) - tl.load(q_offsets + g * (C + 1) + c)
    begin = tl.load(kv_offsets + row)
    kept = (tl.load(kv_offsets + row + 1) - begin).to(tl.int32)
    for first in range(0, kept, BLOCK):
        nth = first + tl.arange(0, BLOCK)
        key = tl.load(kv_index + begin + nth, mask=nth < kept, other=0)
        tl.atomic_add(work + g * M + key, tl.zeros([BLOCK], tl.int32) + size.to(tl.int32), mask=nth < kept)


@triton.jit
def cut_lists(cuts, bounds, kv_index, kv_offsets, C, R, steps, BLOCK: tl.constexpr):
    """Write cuts (G C, R + 1) int32: the number of a cluster's kept keys below each of its head's bounds (G, R + 1), by bisection."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = column <= R
    bound = tl.load(bounds + (row // C) * (R + 1) + column, mask=mine, other=0)
    begin = tl.load(kv_offsets + row)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + (tl.load(kv_offsets + row + 1) - begin).to(tl.int32)
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        key = tl.load(kv_index + begin + middle, mask=open_, other=0)
        below = open_ & (key < bound)
        high = tl.where(open_ & (key >= bound), middle, high)
        low = tl.where(below, middle + 1, low)
    tl.store(cuts + row * (R + 1) + column, low, mask=mine)
