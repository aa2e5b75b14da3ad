"""Traffic of a decoder's tensor parallelism and of its head: bytes that a rank sends, as the ledger counts them, to the byte.

    exchange                                    forward                       backward              kind of the forward, axis
    tokens before a split attention or MLP      (m - 1) own E e               (seen - own) E e      all_gather, tp
    their sums behind it                        (seen - own) E e              (m - 1) own E e       reduce_scatter, tp
    sums of embedded tokens                     (seen - own) E e              (m - 1) own E e       reduce_scatter, tp
    tokens before the head                      (m - 1) own E e               (seen - own) E e      all_gather, tp
    log-sum-exps and targets' logits            (m - 1) 2 seen s              the same              all_gather, tp
    losses, and log-sum-exps                    (n - 1) 2 seen s              2 (all - seen) s      all_gather, sequence
    sums of an auxiliary loss                   (n - 1) P 2 G s               the same              all_gather, sequence
                                                (m - 1) P 2 G s               the same              all_gather, tp

Gradients of shared parameters (`traffic.gradient_traffic`) and exchanges of attention over shards are not counted here. Logits are never
exchanged: a gather of them would send (m - 1) seen V / m numbers, where two numbers of each token suffice.

Legend: own, seen, all: tokens of a rank, of its tensor-parallel ranks together, of the pack. E model width, V vocabulary, e bytes of a
number in the computation, s of one in a loss, m tensor-parallel ranks, n ranks that share the pack. G experts, P packs whose auxiliary loss
is computed apart, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmspeed.comm.packing import even_sizes
from mmspeed.config.parallel import ParallelConfig
from mmspeed.plan.traffic import RankCoordinates, Traffic, ring_traffic, sent_bytes


@dataclass(frozen=True)
class DecoderWorkload:
    """The sizes of a forward and a backward pass.

    Args:
        batch: packs.
        width: of the model.
        split: attentions and MLPs that are split over `tp`; experts are not.
        predictions: the next token, and further ones.
        element_size: bytes of a number in the computation.
        loss_size: bytes of a number in a loss.
        z_loss: log-sum-exps have gradients of their own.
        balanced: blocks whose experts have an auxiliary loss.
        balance_sums: sums of each of these losses: P 2 G.
    """

    batch: int
    width: int
    split: int
    predictions: int = 1
    element_size: int = 2
    loss_size: int = 4
    z_loss: bool = False
    balanced: int = 0
    balance_sums: int = 0


def decoder_traffic(work: DecoderWorkload, seen: Sequence[int], tp: int, place: RankCoordinates, rank: int) -> Traffic:
    """The traffic of a rank. seen: tokens of a pack at each place of the sequence-parallel group; rank: this rank's place in it."""
    here, ends = seen[rank], work.predictions
    own = even_sizes(here, tp)[place.tp]
    token, number = work.batch * work.width * work.element_size, work.batch * work.loss_size
    gathers, sums = (tp - 1) * own * token, (here - own) * token
    split = work.split + ends  # each with a gather and a sum: attentions, MLPs, and the head with the embedding
    of_targets = (tp - 1) * 2 * here * number * ends
    others, kinds = len(seen) - 1, 1 + work.z_loss
    balance = work.balanced * work.balance_sums * work.loss_size
    forward = sent_bytes(
        ("all_gather", "tp", split * gathers + of_targets + (tp - 1) * balance),
        ("reduce_scatter", "tp", split * sums),
        ("all_gather", "sequence", others * (2 * here * number * ends + balance)),
    )
    backward = sent_bytes(
        ("all_gather", "tp", split * gathers),
        ("reduce_scatter", "tp", split * sums + of_targets + (tp - 1) * balance),
        ("reduce_scatter", "sequence", (sum(seen) - here) * kinds * number * ends + others * balance),
    )
    return Traffic(forward, backward)


@dataclass(frozen=True)
class PackedWorkload:
    """The sizes of a decoder's attention over packed documents, in a forward pass and its backward pass.

    Args:
        batch: rows of tokens; 1 over a ring, which takes packs as one row.
        sizes: tokens of a row on each place of ring x ulysses.
        shared: of them those of documents that a ring cuts, on each of its places; none without a ring.
        blocks: with attention, those of modules for further tokens included.
        windowed: of them those within a window that hides keys of a document that a ring cuts.
        key_width, value_width: of a head of queries and keys, and of values.
    """

    batch: int
    sizes: tuple[int, ...]
    shared: tuple[int, ...]
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    blocks: int
    element_size: int = 2
    windowed: int = 0


def packed_traffic(work: PackedWorkload, parallel: ParallelConfig, place: RankCoordinates) -> Traffic:
    """The traffic of attention within documents over ring x ulysses; heads of keys are as many as Ulysses ranks at least.

    The other exchanges of a decoder are those of `decoder_traffic`.
    """
    u, first = parallel.ulysses, place.ring * parallel.ulysses
    own, joined = work.sizes[first + place.ulysses], sum(work.sizes[first : first + u])
    number = work.batch * work.element_size
    queries, keys = (even_sizes(heads // parallel.tp, u)[place.ulysses] for heads in (work.heads, work.key_heads))
    both = work.key_width + work.value_width
    others = (work.heads // parallel.tp - queries, work.key_heads // parallel.tp - keys)  # heads of the other ranks
    cut = own * (others[0] * work.key_width + others[1] * both) + queries * (joined - own) * work.value_width
    back = (joined - own) * (queries * work.key_width + keys * both) + own * others[0] * work.value_width
    attention = Traffic(
        sent_bytes(("all_to_all", "ulysses", cut * number)), sent_bytes(("all_to_all", "ulysses", back * number))
    )  # fmt: skip
    total = sum((attention for _ in range(work.blocks)), Traffic())
    if parallel.ring > 1:
        token, mine = keys * both * number, work.shared[place.ring]
        around = ring_traffic(work.shared, place.ring, parallel.ring_window, token, 0, work.element_size)
        gathered = Traffic(
            sent_bytes(("all_gather", "ring", (parallel.ring - 1) * mine * token)),
            sent_bytes(("reduce_scatter", "ring", (sum(work.shared) - mine) * token)),
        )
        for each, count in ((around, work.blocks - work.windowed), (gathered, work.windowed)):
            total = sum((each for _ in range(count)), total)
    return total
