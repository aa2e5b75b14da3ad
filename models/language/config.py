"""The settings of a decoder: all that its shapes and its mathematics depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmspeed.errors import UserError, nearest

RotaryKind = Literal["default", "linear", "llama3", "yarn"]
ROTARY_KINDS: tuple[RotaryKind, ...] = ("default", "linear", "llama3", "yarn")
Scores = Literal["softmax", "sigmoid"]
# The statistics of an auxiliary loss that balances experts: of each pack, of the micro-batch, of all micro-batches of the step.
Balance = Literal["sequence", "micro_batch", "global_batch"]


@dataclass(frozen=True)
class RotarySettings:
    """Rotary positions in the words of transformers' `rope_parameters`.

    original: the longest sequence before scaling (`original_max_position_embeddings`); longest: after it.
    interleaved: pairs are neighbouring channels, not channels of two halves.
    """

    kind: RotaryKind = "default"
    theta: float = 10_000.0
    factor: float | None = None
    original: int | None = None
    longest: int | None = None
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    attention: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    scale: float | None = None  # yarn's mscale
    scale_all: float | None = None  # and its mscale_all_dim
    truncates: bool = True
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ROTARY_KINDS:
            raise UserError(_refusal(self.kind))
        lacking = {
            "linear": self.factor is None,
            "llama3": self.factor is None or self.original is None,
            "yarn": self.original is None or (self.factor is None and self.longest is None),
        }
        if lacking.get(self.kind, False):
            raise UserError(f"rotary positions of kind {self.kind} need a factor and the original longest sequence")


def _refusal(kind: str) -> str:
    if kind == "dynamic":
        return (
            "rotary positions of kind dynamic are refused: their angles depend on the longest sequence met so far, so a result would "
            "depend on the order of packs; take yarn or llama3"
        )
    return (
        f"rotary positions of kind {kind!r} are not known{nearest(kind, list(ROTARY_KINDS))}: {', '.join(ROTARY_KINDS)}"
    )


@dataclass(frozen=True)
class LatentSettings:
    """Multi-head latent attention (DeepSeek-V2, 2024): queries, keys and values from vectors of low rank.

    query_rank: None takes queries from the tokens. plain, rotary: channels of a head without and with positions. value: width of values.
    """

    query_rank: int | None
    key_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ExpertSettings:
    """Experts in place of the MLPs of most blocks.

    Args:
        num_experts, top_k: experts, and how many of them each token goes to. moe_intermediate_size: hidden width of one.
        n_shared_experts: experts that every token goes to; they are one MLP of `n_shared_experts * moe_intermediate_size`.
        scoring_func: from the router's outputs to scores. norm_topk_prob: the chosen scores of a token sum to 1.
        routed_scaling_factor: a factor to them after that.
        n_group, topk_group: a token goes to experts of `topk_group` groups alone, those with the greatest sum of two scores.
        router_bias: a bias of each expert takes part in the choice, not in the weights (balance without a loss, Wang et al. 2024).
        balance_rate: how far the bias of an expert moves in a step.
        balance: the statistics of an auxiliary loss; None: there is none.
        dense: numbers of blocks with an MLP.
    """

    num_experts: int
    top_k: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    scoring_func: Scores = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    router_bias: bool = False
    balance_rate: float = 0.001
    balance: Balance | None = None
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        experts, groups = self.num_experts, self.n_group
        if not 1 <= self.top_k <= experts:
            raise UserError(f"a token cannot go to {self.top_k} of {experts} experts")
        if experts % groups or not 1 <= self.topk_group <= groups:
            raise UserError(f"{experts} experts cannot be in {groups} groups of which {self.topk_group} are chosen")
        if groups > 1 and experts // groups < 2:
            raise UserError(f"{groups} groups of {experts} experts have fewer than two experts each")
        if self.top_k > self.topk_group * (experts // groups):
            raise UserError(f"{self.topk_group} of {groups} groups hold fewer than {self.top_k} experts")


@dataclass(frozen=True)
class DecoderSettings:
    """A decoder.

    Args:
        intermediate_size: hidden width of dense MLPs.
        head_dim: width of a head of queries and keys; not used with `latent`.
        query_norm: queries and keys are normalised head by head.
        sandwich: attention and MLP are normalised once more before they are added (Pangu Ultra, 2025).
        windows: of each block, how many earlier keys a query sees; None: all.
        tie_word_embeddings: logits use the matrix of the embeddings.
        num_nextn_predict_layers: modules that predict further tokens (multi-token prediction, DeepSeek-V3).
        first_std: standard deviation that matrices start from.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    latent: LatentSettings | None = None
    query_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_eps: float = 1e-6
    sandwich: bool = False
    rotary: RotarySettings = field(default_factory=RotarySettings)
    windows: tuple[int | None, ...] = ()
    tie_word_embeddings: bool = False
    experts: ExpertSettings | None = None
    num_nextn_predict_layers: int = 0
    first_std: float = 0.02

    def __post_init__(self) -> None:
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % key_heads:
            raise UserError(f"{heads} heads of queries cannot share {key_heads} heads of keys")
        if self.windows and len(self.windows) != self.num_hidden_layers:
            raise UserError(f"{len(self.windows)} windows are given for {self.num_hidden_layers} blocks")
        if self.rotated % 2:
            raise UserError(f"{self.rotated} channels of a head cannot rotate in pairs")

    @property
    def rotated(self) -> int:
        """Channels of a head with rotary positions."""
        return self.head_dim if self.latent is None else self.latent.rotary

    def window(self, block: int) -> int | None:
        """The number of earlier keys that a query of a block sees; None: all. Blocks behind the last one see all."""
        return self.windows[block] if block < len(self.windows) else None

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """The number of experts, and the hidden width of one; zeros without experts."""
        return (0, 0) if self.experts is None else (self.experts.num_experts, self.experts.moe_intermediate_size)

    def has_experts(self, block: int) -> bool:
        """True for a block with experts; those of modules for further tokens count on from the last block."""
        return self.experts is not None and block not in self.experts.dense


def rotary_settings(
    parameters: Mapping[str, Any], interleaved: bool = False, longest: int | None = None
) -> RotarySettings:
    """The settings in transformers' words. Raises UserError for kinds and keys that are not computed."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UserError("rotary positions for a part of a head's channels (partial_rotary_factor) are not computed")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UserError("rotary positions that differ by layer are not computed")
    return RotarySettings(
        kind=kind,
        theta=float(parameters.get("rope_theta", 10_000.0)),
        factor=parameters.get("factor"),
        original=parameters.get("original_max_position_embeddings"),
        longest=longest,
        low_frequency=parameters.get("low_freq_factor", 1.0),
        high_frequency=parameters.get("high_freq_factor", 4.0),
        attention=parameters.get("attention_factor"),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        scale=parameters.get("mscale"),
        scale_all=parameters.get("mscale_all_dim"),
        truncates=parameters.get("truncate", True),
        interleaved=interleaved,
    )
