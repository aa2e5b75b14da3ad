"""The config of a run of the language task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mmspeed.errors import UserError

from .adapters import AdapterConfig, BaseConfig, reason_against
from .inputs import Section
from .places import absolute_places, is_url, mirror_folder
from .schema import RunConfig, joined, path_or_id
from .texts import BytesTokenizerConfig, StoredTokenizerConfig, TextsConfig, TokenizerConfig
from .training import PartConfig, Weighting, WeightingSection, check_parts

OF_VIDEO = ("caption_dropout", "loss_frames")  # keys of `train` that say nothing to a language model
# keys of `model`
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings",
)  # fmt: skip
OF_EXPERTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "scoring_func", "norm_topk_prob",
    "routed_scaling_factor", "n_group", "topk_group", "router_bias",
)  # fmt: skip


class LanguageModelConfig(Section):
    """A decoder: a named shape, changed by the other keys, which are those of transformers' `config.json`, or the weights of a transformers folder."""

    shape: str = Field(
        "tiny-qwen3-0.6b",
        description="Named shape with random weights (`mmspeed.models.language.shapes`), such as `qwen3-0.6b` or `llama3-8b`; `tiny-` before a name is its twin for a CPU. Not with `pretrained`.",
    )
    pretrained: str | None = Field(
        None,
        description="Folder or hub id of transformers whose weights training begins with. It is a Llama, Qwen3, Qwen3-MoE or DeepSeek-V3; null: weights drawn from `seed`.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub; null: its main branch.")
    vocab_size: int | None = Field(
        None,
        ge=2,
        description="Rows of the embedding; null: the tokenizer's ids, rounded up to a multiple of 64. Not with `pretrained`.",
    )
    hidden_size: int | None = Field(None, ge=2, description="Model width E; null: the shape's.")
    num_hidden_layers: int | None = Field(None, ge=1, description="Number of blocks; null: the shape's.")
    num_attention_heads: int | None = Field(None, ge=1, description="Heads of queries; null: the shape's.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Heads of keys and values; null: the shape's.")
    head_dim: int | None = Field(None, ge=2, description="Width of a head, an even number; null: the shape's.")
    intermediate_size: int | None = Field(None, ge=1, description="Hidden width of dense MLPs; null: the shape's.")
    tie_word_embeddings: bool | None = Field(
        None, description="Use the embedding as the head; null: as the shape does."
    )
    windows: int | tuple[int | None, ...] | None = Field(
        None,
        description="Earlier tokens that a token sees: a number for all blocks, or a list that the blocks repeat from the first one on, in which null is all of them; null: the shape's.",
    )
    num_experts: int | None = Field(
        None,
        ge=2,
        description="Routed experts in place of the MLPs of most blocks; null: the shape's. Keys of experts are null as the shape has them, or for a shape without experts the value in brackets. None of them with `pretrained`.",
    )
    num_experts_per_tok: int | None = Field(None, ge=1, description="Experts that each token goes to [2].")
    moe_intermediate_size: int | None = Field(
        None, ge=1, description="Hidden width of an expert [`intermediate_size` / `num_experts_per_tok`]."
    )
    n_shared_experts: int | None = Field(None, ge=0, description="Experts that every token goes to [0].")
    first_k_dense_replace: int | None = Field(
        None, ge=0, description="Blocks at the beginning that have an MLP instead of experts [0]."
    )
    scoring_func: Literal["softmax", "sigmoid"] | None = Field(
        None, description="How the router's outputs become scores [softmax]."
    )
    norm_topk_prob: bool | None = Field(None, description="Let the scores of a token's experts sum to 1 [true].")
    routed_scaling_factor: float | None = Field(None, gt=0, description="A factor of the scores behind that [1].")
    n_group: int | None = Field(None, ge=1, description="Groups of experts [1].")
    topk_group: int | None = Field(None, ge=1, description="Groups whose experts a token can go to [1].")
    router_bias: bool | None = Field(
        None,
        description="Balance experts by a bias of each one, which takes part in the choice alone and moves after each step by `objective.balance_rate` [false].",
    )
    num_nextn_predict_layers: int | None = Field(
        None,
        ge=0,
        description="Modules that predict further tokens (multi-token prediction); null: the shape's, or those that the folder holds.",
    )
    balance: Literal["sequence", "micro_batch", "global_batch"] | None = Field(
        None,
        description="Statistics of the experts' auxiliary loss: of each pack, of the micro-batch of a device (or of the devices that share it), or of all that the step has met so far on all devices; null: there is no such loss.",
    )
    unrecorded = ("adapter", "base")
    adapter: AdapterConfig | None = Field(
        None,
        description="Adapters that train while the model of `pretrained` stays frozen; null: all its weights train.",
    )
    base: BaseConfig = Field(default_factory=BaseConfig, description="The frozen weights beside adapters.")

    @model_validator(mode="after")
    def _one_origin(self) -> LanguageModelConfig:
        own = ("shape", "vocab_size", *SIZES, "windows", *OF_EXPERTS)
        both = [name for name in own if name in self.model_fields_set and getattr(self, name) is not None]
        if self.pretrained is not None and both and both != ["shape"]:
            raise ValueError(f"{both[0]} is that of the folder: leave it out beside `pretrained`")
        if self.pretrained is not None and both and self.shape != type(self).model_fields["shape"].default:
            raise ValueError("`shape` and `pretrained` both say which model it is: use one of them")
        if self.pretrained is None and self.adapter is not None:
            raise ValueError("`adapter` trains beside a model that has learnt: set `pretrained`")
        return self

    @field_validator("windows")
    @classmethod
    def _some_windows(cls, windows: int | tuple[int | None, ...] | None) -> int | tuple[int | None, ...] | None:
        listed = windows if isinstance(windows, tuple) else (windows,)
        if not listed or any(window is not None and window < 0 for window in listed):
            raise ValueError("a window is a number of earlier tokens, 0 at least, and the list of them is not empty")
        return windows

    def windows_of(self, depth: int) -> tuple[int | None, ...] | None:
        """The window of each of `depth` blocks; None: the shape's."""
        if self.windows is None:
            return None
        repeated = self.windows if isinstance(self.windows, tuple) else (self.windows,)
        if len(repeated) > depth:
            raise UserError(f"model.windows: {len(repeated)} windows are for more than the model's {depth} blocks")
        return tuple(repeated[block % len(repeated)] for block in range(depth))

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that are set beside the shape."""
        return self._given(*SIZES, "num_nextn_predict_layers")

    @property
    def experts(self) -> dict[str, Any]:
        """The keys of experts that are set."""
        return self._given(*OF_EXPERTS)

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class LanguageObjectiveConfig(WeightingSection):
    """The cross-entropy of each next token, and losses beside it."""

    weighting: Weighting = Field(
        "token",
        description="What counts alike in the gradients of an epoch, each step's being its mean over target tokens. `token`: tokens; `step`: steps, also the short last one of an epoch; `sample`: packs.",
    )
    z_loss: float = Field(
        0.0, ge=0, description="Factor of the squared log-sum-exp of each token's logits (PaLM, 2022), such as 1e-4."
    )
    balance: float = Field(
        0.001, ge=0, description="Factor of the experts' auxiliary loss, where `model.balance` asks for one."
    )
    balance_rate: float = Field(
        0.001,
        ge=0,
        description="Step by which the bias of each expert moves against its load after each optimizer step, where the router has biases (DeepSeek-V3, 2024); 0: they stay.",
    )
    mtp: float = Field(0.3, ge=0, description="Factor of the mean loss of the modules that predict further tokens.")


class LanguageStageConfig(PartConfig):
    """A part of training with packs of a length of its own, or other shares of the sources."""

    sequence_length: int | None = Field(None, ge=2, description="Tokens of a pack in this stage; null: the run's.")


class LanguageConfig(RunConfig):
    """The config of a run of the language task."""

    fixed_on_resume: ClassVar[tuple[str, ...]] = ("seed", "task", "method", "model", "tokenizer")
    machine_local: ClassVar[tuple[str, ...]] = (*RunConfig.machine_local, "texts.processes")
    machine_paths: ClassVar[tuple[str, ...]] = (
        *RunConfig.machine_paths,
        "texts.cache",
        "texts.sources.*.path",
        "tokenizer.path",
        "model.pretrained",
    )
    order: ClassVar[tuple[str, ...]] = (
        "task", "name", "output", "seed", "texts", "tokenizer", "model", "sequence_length", "packing", "curriculum", "objective", "train", "batching",
        "checkpoint", "validate", "parallel", "memory", "device", "trackers", "tracking",
    )  # fmt: skip

    task: Literal["language"] = Field(description="Name of the task: training on texts.")
    texts: TextsConfig = Field(description="The texts to train on, and their cache.")
    tokenizer: TokenizerConfig = Field(
        default_factory=lambda: BytesTokenizerConfig(kind="bytes"), description="How texts become token ids."
    )
    model: LanguageModelConfig = Field(default_factory=LanguageModelConfig, description="The decoder.")
    sequence_length: int = Field(
        1024,
        ge=2,
        description="Tokens of a pack. A run may go on with another one: exactly the tokens that are left of the epoch are packed again.",
    )
    packing: Literal["documents", "stream"] = Field(
        "documents",
        description="`documents`: whole documents by best fit, cut only where they are longer than a pack; `stream`: one behind the other, cut where a pack ends. Attention never crosses a document.",
    )
    curriculum: tuple[LanguageStageConfig, ...] = Field(
        (),
        description="Stages of training one after another, such as short packs, then long ones; empty: one stage. A stage with the same shares goes on with the tokens that are left of the epoch; one with others begins an epoch.",
    )
    objective: LanguageObjectiveConfig = Field(
        default_factory=LanguageObjectiveConfig, description="The training objective."
    )

    @model_validator(mode="after")
    def _base_fits(self) -> LanguageConfig:
        reason = reason_against(
            self.model.adapter, self.model.base, self.device.dtype, self.parallel.strategy, self.parallel.tp
        )
        if reason is not None:
            raise ValueError(reason)
        return self

    free_on_resume: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model", "base"),
    )  # whose number type its fingerprint tells

    @property
    def adapter(self) -> AdapterConfig | None:
        return self.model.adapter

    @property
    def host_base(self) -> bool:
        return self.model.base.place == "host"

    @model_validator(mode="after")
    def _no_keys_of_videos(self) -> LanguageConfig:
        for name in OF_VIDEO:
            if (
                name in self.train.model_fields_set
                and getattr(self.train, name) != type(self.train).model_fields[name].default
            ):
                raise ValueError(f"train.{name} is a key of the task video; this config is of the task language")
        check_parts(self.curriculum, self.texts.source_names, self.train.steps)
        if self.batching.by == "time":
            raise ValueError("batching.by: time is measured for videos: use samples, tokens or flops")
        return self

    def absolute(self, base: Path) -> LanguageConfig:
        """The config with every relative path taken from `base`; hub ids and URLs stay as they are."""
        texts = self.texts
        sources = tuple(
            source.model_copy(update={"path": absolute_places(base, source.path)}) for source in texts.sources
        )
        cache = texts.cache if is_url(texts.cache) else joined(base, texts.cache)
        changes: dict[str, Any] = {"texts": texts.model_copy(update={"sources": sources, "cache": cache})}
        if isinstance(self.tokenizer, StoredTokenizerConfig):
            changes["tokenizer"] = self.tokenizer.model_copy(update={"path": path_or_id(base, self.tokenizer.path)})
        if self.model.pretrained is not None:
            changes["model"] = self.model.model_copy(update={"pretrained": path_or_id(base, self.model.pretrained)})
        shared = super().absolute(base)
        changes |= {"output": shared.output, "train": shared.train, "checkpoint": shared.checkpoint}
        return self.model_copy(update=changes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a pack, stage by stage."""
        return tuple(stage.sequence_length or self.sequence_length for stage in self.curriculum) or (
            self.sequence_length,
        )

    @property
    def cache_dir(self) -> Path:
        """Folder of the text cache; for a remote one, the local folder that holds its tables once it has been opened."""
        return mirror_folder(self.texts.cache) if is_url(self.texts.cache) else Path(self.texts.cache)

    def local_cache_dir(self) -> Path:
        """Folder of the text cache, to write to. Raises UserError if the location is a URL."""
        if is_url(self.texts.cache):
            raise UserError(
                f"texts.cache is {self.texts.cache}: a cache is built in a local folder; build it there and copy it to the URL"
            )
        return self.cache_dir
