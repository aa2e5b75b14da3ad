"""Counts of a decoder's parameters and operations, from its settings alone.

Legend: E width, A heads, K heads of the keys, D head width, W width of the values, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmspeed.models.language.config import DecoderSettings
from mmspeed.protocols import BlockWork, Work

ELEMENTWISE = 60  # operations of norms, rotations and activations for each token and channel of a block


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters. active: those that one token's forward pass uses; embedding: of embeddings and head; mtp: of the modules
    for further tokens, which are in neither `total` nor `active`."""

    total: int
    active: int
    embedding: int
    mtp: int = 0


def count_parameters(settings: DecoderSettings) -> ParameterCounts:
    """The parameters of a decoder. Embeddings are active whole, as in published counts; a tied head counts once."""
    embedding = settings.vocab_size * settings.hidden_size * (1 if settings.tie_word_embeddings else 2)
    total = active = embedding + settings.hidden_size
    for block in range(settings.num_hidden_layers):
        whole, used = _block(settings, block)
        total, active = total + whole, active + used
    extra = _block(settings, settings.num_hidden_layers)[0] + 2 * settings.hidden_size**2 + 3 * settings.hidden_size
    return ParameterCounts(total, active, embedding, settings.num_nextn_predict_layers * extra)


def _block(settings: DecoderSettings, block: int) -> tuple[int, int]:
    """(parameters, active ones) of a block."""
    width, experts = settings.hidden_size, settings.experts
    shared = _attention(settings) + width * (4 if settings.sandwich else 2)
    if experts is None or not settings.has_experts(block):
        hidden = settings.intermediate_size
        mlp = 3 * width * hidden + (2 * hidden + width if settings.mlp_bias else 0)
        return shared + mlp, shared + mlp
    one = 3 * width * experts.moe_intermediate_size
    shared += experts.num_experts * width + experts.n_shared_experts * one
    return shared + experts.num_experts * one, shared + experts.top_k * one


def _products(settings: DecoderSettings) -> int:
    """Numbers in the matrices of an attention."""
    width, heads, latent = settings.hidden_size, settings.num_attention_heads, settings.latent
    if latent is None:
        return 2 * width * settings.head_dim * (heads + settings.num_key_value_heads)
    query, rank = heads * (latent.plain + latent.rotary), latent.query_rank
    queries = width * query if rank is None else rank * (width + query)
    keys = width * (latent.key_rank + latent.rotary) + latent.key_rank * heads * (latent.plain + latent.value)
    return queries + keys + heads * latent.value * width


def _attention(settings: DecoderSettings) -> int:
    """The parameters of an attention: matrices, biases, norms."""
    latent, out = settings.latent, settings.hidden_size if settings.out_bias else 0
    if latent is None:
        head, heads = settings.head_dim, settings.num_attention_heads + 2 * settings.num_key_value_heads
        biases = head * heads if settings.qkv_bias else 0
        return _products(settings) + biases + out + (2 * head if settings.query_norm else 0)
    rank = latent.query_rank or 0
    biases = rank + latent.key_rank + latent.rotary if settings.qkv_bias else 0
    return _products(settings) + biases + out + rank + latent.key_rank


def forward_work(settings: DecoderSettings, lengths: Sequence[int]) -> Work:
    """Work of the forward pass of a pack of documents of these lengths, without modules for further tokens.

    Attention counts all pairs of tokens of a document, as torch's FlopCounterMode and the formula of PaLM (2022) do; a window counts no
    pairs less.
    """
    tokens, pairs = sum(lengths), sum(length * length for length in lengths)
    blocks = (_work_of_block(settings, block, tokens, pairs) for block in range(settings.num_hidden_layers))
    return sum(blocks, Work(_head(settings, tokens)))


def block_work(settings: DecoderSettings, tokens: int) -> BlockWork:
    """Work of the forward pass of a document; a module for a further token is a block behind the others, with a head of its own."""
    depth, mtp = settings.num_hidden_layers, settings.num_nextn_predict_layers
    blocks = [_work_of_block(settings, block, tokens, tokens**2).matmul for block in range(depth + mtp)]
    joined = 4.0 * tokens * settings.hidden_size**2  # the projection of two vectors
    blocks[depth:] = [block + joined for block in blocks[depth:]]
    return BlockWork(blocks, after=_head(settings, tokens) * (1 + mtp))


def _work_of_block(settings: DecoderSettings, block: int, tokens: int, pairs: int) -> Work:
    latent = settings.latent
    widths = 2 * settings.head_dim if latent is None else latent.plain + latent.rotary + latent.value
    numbers = _products(settings) + _mlp_products(settings, block)
    attention = 2.0 * pairs * settings.num_attention_heads * widths
    return Work(2.0 * tokens * numbers, attention, float(ELEMENTWISE * tokens * settings.hidden_size))


def _head(settings: DecoderSettings, tokens: int) -> float:
    return 2.0 * tokens * settings.vocab_size * settings.hidden_size


def _mlp_products(settings: DecoderSettings, block: int) -> int:
    """Numbers that a token of a block is multiplied with behind the attention."""
    width, experts = settings.hidden_size, settings.experts
    if experts is None or not settings.has_experts(block):
        return 3 * width * settings.intermediate_size
    used = experts.top_k + experts.n_shared_experts
    return width * experts.num_experts + 3 * width * experts.moe_intermediate_size * used
