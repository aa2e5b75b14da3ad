"""Device functions of the gather kernel: rows by index, tiles of the softmax, the forward pass. Imported only when a call needs them.
Arguments have no types: the compiler reads annotations, and accepts `constexpr` alone.

Legend: G = B x A heads, N queries, M keys, D head width, W its next power of two, C clusters of queries, K clusters of keys, L kept keys
of a cluster, q and k a block of queries and of keys or means. Logarithms are to base 2 here, results to base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def head_of(pointer, strides, g, heads):
    """Pointer to the start of head `g` in a tensor (B, A, _, D) of the given strides."""
    return pointer + (g // heads).to(tl.int64) * strides[0] + (g % heads).to(tl.int64) * strides[1]


@triton.jit
def places(pointer, stride, index, W: tl.constexpr):
    """Pointers to the rows `index`."""
    return pointer + index.to(tl.int64)[:, None] * stride + tl.arange(0, W)[None, :]


@triton.jit
def inside(live, D: tl.constexpr, W: tl.constexpr):
    """True at the elements of live rows."""
    mask = live[:, None]
    if D != W:
        mask = mask & (tl.arange(0, W) < D)[None, :]
    return mask


@triton.jit
def rows(pointer, stride, index, live, D: tl.constexpr, W: tl.constexpr):
    """The rows `index`, zeros where not live and beyond the width: (rows, W)."""
    return tl.load(places(pointer, stride, index, W), mask=inside(live, D, W), other=0.0)


@triton.jit
def means_block(dropped, mean_k, mean_v, first, K, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """(k_kW, v_kW, bias_k): a block of a head's means, and the log of the number of keys that each stands for."""
    index = first + tl.arange(0, BLOCK)
    live = index < K
    return rows(mean_k, D, index, live, D, W), rows(mean_v, D, index, live, D, W), log_count(dropped, index, live)


@triton.jit
def log_count(dropped, index, live):
    """Log of the numbers at `index`; -inf where one is 0 or not live."""
    count = tl.load(dropped + index, mask=live, other=0.0)
    return tl.where(count > 0, tl.log2(tl.where(count > 0, count, 1.0)), float("-inf"))


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """a @ b, summed in float32. EXACT: the precision of float32 products, or "widen": the interpreter cannot multiply bfloat16."""
    if EXACT == "widen":
        done = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        done = tl.dot(a, b, input_precision=EXACT)
    return done


@triton.jit
def fold(q, k, v, bias, scale, top, total, acc, EXACT: tl.constexpr):
    """Update the running softmax by a block of keys: its maximum, its sum and the weighted values so far."""
    score = product(q, tl.trans(k), EXACT) * scale + bias[None, :]
    above = tl.maximum(top, tl.max(score, 1))
    level = tl.where(above == float("-inf"), 0.0, above)  # a row that has seen no key yet: no -inf minus -inf
    p = tl.exp2(score - level[:, None])
    shrink = tl.exp2(top - level)
    acc = acc * shrink[:, None] + product(p.to(v.dtype), v, EXACT)
    return above, total * shrink + tl.sum(p, 1), acc


@triton.jit
def item(row_of, place_of, q_index, q_offsets, N, C, BLOCK: tl.constexpr):
    """(row, g, queries_q, live_q) of this program: its cluster, counted over all heads, its head and its queries."""
    row = tl.load(row_of + tl.program_id(0))
    place = tl.load(place_of + tl.program_id(0)) + tl.arange(0, BLOCK)
    g, c = row // C, row % C
    live = place < tl.load(q_offsets + g.to(tl.int64) * (C + 1) + c + 1)
    return row, g, tl.load(q_index + g.to(tl.int64) * N + place, mask=live, other=0), live


@triton.jit
def forward(
    q, k, v, out, lse,
    q_strides, k_strides, v_strides, out_strides,
    mean_k, mean_v, dropped,
    row_of, place_of, q_index, q_offsets, kv_index, kv_offsets,
    heads, N, C, K, all_rows, scale,
    D: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute a block of the queries of one cluster in each program: over the keys that it keeps, then over the means."""
    if tl.load(row_of + tl.program_id(0)) >= all_rows:
        return
    row, g, index, live = item(row_of, place_of, q_index, q_offsets, N, C, BLOCK_Q)
    q_block = rows(head_of(q, q_strides, g, heads), q_strides[2], index, live, D, W)
    k_head, v_head = head_of(k, k_strides, g, heads), head_of(v, v_strides, g, heads)
    top, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
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
        top, total, acc = fold(q_block, k_block, v_block, bias, scale, top, total, acc, EXACT)
    if TAIL:
        mean_of = g.to(tl.int64) * K
        for first in range(0, K, BLOCK_K):
            k_block, v_block, bias = means_block(
                dropped + row.to(tl.int64) * K, mean_k + mean_of * D, mean_v + mean_of * D, first, K, D, W, BLOCK_K
            )
            top, total, acc = fold(q_block, k_block, v_block, bias, scale, top, total, acc, EXACT)

    some = total > 0
    total = tl.where(some, total, 1.0)
    done = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(places(head_of(out, out_strides, g, heads), out_strides[2], index, W), done, mask=inside(live, D, W))
    level = tl.where(some, (top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse + g.to(tl.int64) * N + index, level, mask=live)
