"""Named shapes of published language models, and of Pangu Ultra MoE as far as its paper states it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmspeed.errors import UserError, nearest
from mmspeed.models.language.config import DecoderSettings, ExpertSettings, LatentSettings, RotarySettings


@dataclass(frozen=True)
class Shape:
    """A published model's settings. total, active: parameters as its authors state them, in billions; active None: all."""

    settings: DecoderSettings
    total: float
    active: float | None = None


def _llama(width: int, depth: int, heads: int, hidden: int) -> DecoderSettings:
    """Llama 3.1 (The Llama 3 Herd of Models, 2024)."""
    rotary = RotarySettings("llama3", 500_000.0, factor=8.0, original=8_192, low_frequency=1.0, high_frequency=4.0)
    return DecoderSettings(128_256, width, depth, heads, hidden, 8, 128, norm_eps=1e-5, rotary=rotary)


def _qwen(width: int, depth: int, heads: int, hidden: int, tied: bool = False, key_heads: int = 8) -> DecoderSettings:
    """Qwen3 (technical report, 2025)."""
    return DecoderSettings(
        151_936,
        width,
        depth,
        heads,
        hidden,
        key_heads,
        128,
        query_norm=True,
        rotary=RotarySettings(theta=1e6),
        tie_word_embeddings=tied,
    )


def _qwen_experts(width: int, depth: int, heads: int, hidden: int, expert: int) -> DecoderSettings:
    experts = ExpertSettings(128, 8, expert, norm_topk_prob=True)
    return replace(_qwen(width, depth, heads, hidden, key_heads=4), experts=experts)


LATENT = LatentSettings(1_536, 512, plain=128, rotary=64, value=128)
DEEPSEEK_EXPERTS = ExpertSettings(
    256,
    8,
    2_048,
    n_shared_experts=1,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=8,
    topk_group=4,
    router_bias=True,
    dense=(0, 1, 2),
)
DEEPSEEK = DecoderSettings(
    129_280,
    7_168,
    61,
    128,
    18_432,
    128,
    192,
    latent=LATENT,
    rotary=RotarySettings("yarn", factor=40.0, original=4_096, scale=1.0, scale_all=1.0, interleaved=True),
    experts=DEEPSEEK_EXPERTS,
    num_nextn_predict_layers=1,
)
# Width, depth, dense blocks, experts and their width are of the paper (2025), with MLA, sandwich norms and one module for further tokens;
# vocabulary, heads, hidden, latent, rotary, scores and scaling are assumed.
PANGU = replace(
    DEEPSEEK,
    vocab_size=153_376,
    hidden_size=7_680,
    sandwich=True,
    rotary=RotarySettings(interleaved=True),
    experts=replace(DEEPSEEK_EXPERTS, n_group=1, topk_group=1, router_bias=False),
)

SHAPES: dict[str, Shape] = {
    "llama3-8b": Shape(_llama(4_096, 32, 32, 14_336), 8.03),
    "llama3-70b": Shape(_llama(8_192, 80, 64, 28_672), 70.6),
    "llama3-405b": Shape(_llama(16_384, 126, 128, 53_248), 405.9),
    "qwen3-0.6b": Shape(_qwen(1_024, 28, 16, 3_072, tied=True), 0.6),
    "qwen3-1.7b": Shape(_qwen(2_048, 28, 16, 6_144, tied=True), 1.72),
    "qwen3-4b": Shape(_qwen(2_560, 36, 32, 9_728, tied=True), 4.02),
    "qwen3-8b": Shape(_qwen(4_096, 36, 32, 12_288), 8.19),
    "qwen3-14b": Shape(_qwen(5_120, 40, 40, 17_408), 14.8),
    "qwen3-32b": Shape(_qwen(5_120, 64, 64, 25_600), 32.8),
    "qwen3-30b-a3b": Shape(_qwen_experts(2_048, 48, 32, 6_144, 768), 30.5, 3.3),
    "qwen3-235b-a22b": Shape(_qwen_experts(4_096, 94, 64, 12_288, 1_536), 235.0, 22.0),
    "deepseek-v3": Shape(DEEPSEEK, 671.0, 37.0),
    "pangu-ultra-moe": Shape(PANGU, 718.0, 39.0),
}


def shape_named(name: str) -> Shape:
    """The shape of that name. Raises UserError, with near names, for another one."""
    if name not in SHAPES:
        raise UserError(f"{name!r} is no known shape{nearest(name, list(SHAPES))}: {', '.join(SHAPES)}")
    return SHAPES[name]


def tiny_twin(settings: DecoderSettings) -> DecoderSettings:
    """The same kind of model so small that a CPU trains it: every choice stays, every size shrinks."""
    experts, latent = settings.experts, settings.latent
    heads = 4
    if experts is not None:
        groups = min(experts.n_group, 4)
        experts = replace(
            experts, num_experts=8, top_k=min(experts.top_k, 2), moe_intermediate_size=32, n_shared_experts=min(experts.n_shared_experts, 1),
            n_group=groups, topk_group=min(experts.topk_group, 2) if groups > 1 else 1, dense=(0,) if experts.dense else (),
        )  # fmt: skip
    if latent is not None:
        latent = LatentSettings(None if latent.query_rank is None else 24, 16, plain=16, rotary=8, value=16)
    return replace(
        settings,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=heads,
        intermediate_size=128,
        num_key_value_heads=heads if settings.num_key_value_heads == settings.num_attention_heads else 2,
        head_dim=24 if latent is not None else 16,
        latent=latent,
        experts=experts,
        windows=settings.windows[:3],
    )
