"""Counts of a decoder's parameters and operations, from its settings alone.

Legend: E width, A heads, K heads of the keys, D head width, W width of the values, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmspeed.models.language.config import DecoderSettings
from mmspeed.protocols import Work

ELEMENTWISE = 60  # operations of norms, turns and activations for each token and channel of a block


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters. active: those that one token's forward pass uses; embedding: of embeddings and head; further: of the modules
    for further tokens, which are in neither `total` nor `active`."""

    total: int
    active: int
    embedding: int
    further: int = 0


def count_parameters(settings: DecoderSettings) -> ParameterCounts:
    """The parameters of a decoder. Embeddings are active whole, as in published counts; a tied head counts once."""
    embedding = settings.vocabulary * settings.width * (1 if settings.tied else 2)
    total = active = embedding + settings.width
    for block in range(settings.depth):
        whole, used = _block(settings, block)
        total, active = total + whole, active + used
    extra = _block(settings, settings.depth)[0] + 2 * settings.width**2 + 3 * settings.width
    return ParameterCounts(total, active, embedding, settings.further * extra)


def _block(settings: DecoderSettings, block: int) -> tuple[int, int]:
    """(parameters, active ones) of a block."""
    width, experts = settings.width, settings.experts
    shared = _attention(settings) + width * (4 if settings.sandwich else 2)
    if experts is None or not settings.has_experts(block):
        mlp = 3 * width * settings.hidden + (2 * settings.hidden + width if settings.mlp_bias else 0)
        return shared + mlp, shared + mlp
    one = 3 * width * experts.width
    shared += experts.count * width + experts.shared * one
    return shared + experts.count * one, shared + experts.chosen * one


def _products(settings: DecoderSettings) -> int:
    """Numbers in the matrices of an attention."""
    width, heads, latent = settings.width, settings.heads, settings.latent
    if latent is None:
        return 2 * width * settings.head_width * (heads + settings.key_heads)
    query, rank = heads * (latent.plain + latent.rotary), latent.query_rank
    queries = width * query if rank is None else rank * (width + query)
    keys = width * (latent.key_rank + latent.rotary) + latent.key_rank * heads * (latent.plain + latent.value)
    return queries + keys + heads * latent.value * width


def _attention(settings: DecoderSettings) -> int:
    """The parameters of an attention: matrices, biases, norms."""
    latent, out = settings.latent, settings.width if settings.out_bias else 0
    if latent is None:
        biases = settings.head_width * (settings.heads + 2 * settings.key_heads) if settings.qkv_bias else 0
        return _products(settings) + biases + out + (2 * settings.head_width if settings.query_norm else 0)
    rank = latent.query_rank or 0
    biases = rank + latent.key_rank + latent.rotary if settings.qkv_bias else 0
    return _products(settings) + biases + out + rank + latent.key_rank


def forward_work(settings: DecoderSettings, lengths: Sequence[int]) -> Work:
    """Work of the forward pass of a pack of documents of these lengths, without modules for further tokens.

    Attention counts all pairs of tokens of a document, as torch's FlopCounterMode and the formula of PaLM (2022) do; a window counts no
    pairs less.
    """
    tokens, pairs = sum(lengths), sum(length * length for length in lengths)
    latent = settings.latent
    widths = 2 * settings.head_width if latent is None else latent.plain + latent.rotary + latent.value
    numbers = settings.vocabulary * settings.width
    for block in range(settings.depth):
        numbers += _products(settings) + _mlp_products(settings, block)
    attention = 2.0 * settings.depth * pairs * settings.heads * widths
    return Work(2.0 * tokens * numbers, attention, float(ELEMENTWISE * settings.depth * tokens * settings.width))


def _mlp_products(settings: DecoderSettings, block: int) -> int:
    """Numbers that a token of a block is multiplied with behind the attention."""
    width, experts = settings.width, settings.experts
    if experts is None or not settings.has_experts(block):
        return 3 * width * settings.hidden
    return width * experts.count + 3 * width * experts.width * (experts.chosen + experts.shared)
