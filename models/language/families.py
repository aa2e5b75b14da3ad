"""Families of transformers that the decoder computes: from config.json to settings and back, and the hub's names of tensors.

All four share the names of their parts. On disk each expert is a tensor of its own, and modules for further tokens are blocks behind the
last one; in memory experts are stacked, and gate and up of an expert lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmspeed.errors import UserError
from mmspeed.models.assemblies import Assembly, Joined, Stacked
from mmspeed.models.language.config import DecoderSettings, ExpertSettings, LatentSettings, rotary_settings

Tree = Mapping[str, Any]
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# tensors that files may hold beside the model's: tables of old releases, and the tied head
IGNORED_NAMES = (r"rotary_emb\.inv_freq$",)
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # of a module for further tokens: copies of the model's own


def settings_of(tree: Tree, key: str, mtp: int = 0) -> DecoderSettings:
    """The settings of a config.json. mtp: modules for further tokens. Raises UserError for what the decoder does not compute."""
    kind = tree.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"{key}: models of type {kind!r} are not read, those of type {', '.join(FAMILIES)} are")
    if tree.get("hidden_act", "silu") != "silu":
        raise UserError(f"{key}: hidden_act {tree['hidden_act']!r} is not computed, silu is")
    if tree.get("attention_dropout"):
        raise UserError(
            f"{key}: attention_dropout {tree['attention_dropout']} is not computed: set it to 0 in config.json"
        )
    try:
        width, heads = int(tree["hidden_size"]), int(tree["num_attention_heads"])
        bias = bool(tree.get("attention_bias", False))
        return DecoderSettings(
            vocab_size=int(tree["vocab_size"]),
            hidden_size=width,
            num_hidden_layers=int(tree["num_hidden_layers"]),
            num_attention_heads=heads,
            intermediate_size=int(tree["intermediate_size"]),
            num_key_value_heads=int(tree.get("num_key_value_heads") or heads),
            head_dim=int(tree.get("head_dim") or width // heads),
            latent=_latent(tree) if kind == "deepseek_v3" else None,
            query_norm=kind in ("qwen3", "qwen3_moe"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=kind == "llama" and bool(tree.get("mlp_bias", False)),
            norm_eps=float(tree.get("rms_norm_eps", 1e-6)),
            rotary=rotary_settings(
                _rope(tree),
                kind == "deepseek_v3" and bool(tree.get("rope_interleave", True)),
                tree.get("max_position_embeddings"),
            ),
            windows=_windows(tree),
            tie_word_embeddings=bool(tree.get("tie_word_embeddings", False)),
            experts=_experts(tree, kind),
            num_nextn_predict_layers=mtp,
            first_std=float(tree.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise UserError(f"{key}: config.json lacks {error.args[0]!r}") from None
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _rope(tree: Tree) -> dict[str, Any]:
    """The rotary parameters, in the words of transformers 5 or of before."""
    parameters = dict(tree.get("rope_parameters") or tree.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", tree.get("rope_theta", 10_000.0))
    if parameters.get("rope_type", parameters.get("type")) in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", tree.get("max_position_embeddings"))
    return parameters


def _windows(tree: Tree) -> tuple[int | None, ...]:
    """The windows of blocks: a window of w tokens, the query's own among them, is w - 1 earlier keys."""
    window, depth = tree.get("sliding_window"), int(tree["num_hidden_layers"])
    if window is None or not tree.get("use_sliding_window", False):
        return ()
    kinds = tree.get("layer_types")
    if kinds is None:
        first = int(tree.get("max_window_layers", 0)) if "max_window_layers" in tree else 0
        kinds = ["sliding_attention" if place >= first else "full_attention" for place in range(depth)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UserError(f"layers of type {sorted(unknown)[0]!r} are not computed")
    return tuple(int(window) - 1 if kind == "sliding_attention" else None for kind in kinds)


def _latent(tree: Tree) -> LatentSettings:
    rank = tree.get("q_lora_rank")
    return LatentSettings(
        query_rank=None if rank is None else int(rank),
        key_rank=int(tree["kv_lora_rank"]),
        plain=int(tree["qk_nope_head_dim"]),
        rotary=int(tree["qk_rope_head_dim"]),
        value=int(tree["v_head_dim"]),
    )


def _experts(tree: Tree, kind: str) -> ExpertSettings | None:
    depth = int(tree["num_hidden_layers"])
    if kind == "qwen3_moe":
        step, plain = int(tree.get("decoder_sparse_step", 1)), tree.get("mlp_only_layers") or ()
        dense = tuple(place for place in range(depth) if place in plain or (place + 1) % step)
        return ExpertSettings(
            num_experts=int(tree["num_experts"] if "num_experts" in tree else tree["num_local_experts"]),
            top_k=int(tree["num_experts_per_tok"]),
            moe_intermediate_size=int(tree["moe_intermediate_size"]),
            norm_topk_prob=bool(tree.get("norm_topk_prob", False)),
            dense=dense,
        )
    if kind != "deepseek_v3":
        return None
    computed: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for name, value in computed.items():
        if tree.get(name, value) != value:
            raise UserError(f"{name} {tree[name]!r} is not computed, {value!r} is")
    return ExpertSettings(
        num_experts=int(tree["n_routed_experts"]),
        top_k=int(tree["num_experts_per_tok"]),
        moe_intermediate_size=int(tree["moe_intermediate_size"]),
        n_shared_experts=int(tree.get("n_shared_experts") or 0),
        scoring_func="sigmoid",
        norm_topk_prob=bool(tree.get("norm_topk_prob", True)),
        routed_scaling_factor=float(tree.get("routed_scaling_factor", 1.0)),
        n_group=int(tree.get("n_group") or 1),
        topk_group=int(tree.get("topk_group") or 1),
        router_bias=True,
        dense=tuple(range(min(depth, int(tree.get("first_k_dense_replace", 0))))),
    )


def hub_names(settings: DecoderSettings, names: list[str]) -> dict[str, Assembly]:
    """The tensors of files that each parameter or buffer of a decoder is put together from, by its name here."""
    return {name: _hub_name(settings, name) for name in names}


def _hub_name(settings: DecoderSettings, name: str) -> Assembly:
    if name.startswith("lm_head."):
        return name
    head, _, rest = name.partition(".")
    if head == "mtp":
        module, _, part = rest.partition(".")
        part = part.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        name = f"layers.{settings.num_hidden_layers + int(module)}.{part}"
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
        return f"model.{name}"
    assert settings.experts is not None
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    experts = []
    for number in range(settings.experts.num_experts):
        pieces = tuple(f"model.{stem}.{number}.{part}.weight" for part in parts)
        experts.append(pieces[0] if len(pieces) == 1 else Joined(pieces))
    return Stacked(tuple(experts))


def hub_modules(settings: DecoderSettings, layers: Sequence[str], what: str) -> dict[str, str]:
    """The module of transformers that each linear layer of a decoder is, by its name here.

    Raises UserError, which begins with `what`, for a layer that transformers has none for.
    """
    modules = {}
    for name, assembly in hub_names(settings, [f"{layer}.weight" for layer in layers]).items():
        layer = name.removesuffix(".weight")
        if not isinstance(assembly, str) or name.startswith("mtp."):
            raise UserError(
                f"{what}: transformers has no layer for {layer}, which has an adapter: export a merged model, or train with "
                "model.num_nextn_predict_layers: 0"
            )
        modules[layer] = assembly.removesuffix(".weight")
    return modules


def config_tree(settings: DecoderSettings) -> dict[str, Any]:
    """The config.json of transformers for a decoder. Raises UserError for settings that none of the families has."""
    experts, latent = settings.experts, settings.latent
    kind = "llama" if not settings.query_norm else "qwen3" if experts is None else "qwen3_moe"
    kind = "deepseek_v3" if latent is not None else kind
    tree: dict[str, Any] = {
        "architectures": [FAMILIES[kind]],
        "model_type": kind,
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": settings.qkv_bias,
        "rms_norm_eps": settings.norm_eps,
        "max_position_embeddings": settings.rotary.longest
        or int((settings.rotary.original or 32_768) * (settings.rotary.factor or 1)),
        "rope_parameters": _rope_tree(settings),
        "tie_word_embeddings": settings.tie_word_embeddings,
        "initializer_range": settings.first_std,
        "use_cache": True,
    }
    if kind == "llama":
        tree["mlp_bias"] = settings.mlp_bias
    if any(window is not None for window in settings.windows):
        (window, *_) = {window for window in settings.windows if window is not None}
        names = ["full_attention" if each is None else "sliding_attention" for each in settings.windows]
        tree |= {"use_sliding_window": True, "sliding_window": window + 1, "layer_types": names}
    if latent is not None:
        tree |= {
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.key_rank,
            "qk_nope_head_dim": latent.plain,
            "qk_rope_head_dim": latent.rotary,
            "v_head_dim": latent.value,
            "rope_interleave": settings.rotary.interleaved,
        }
        del tree["head_dim"]
    if experts is not None:
        tree |= {"num_experts_per_tok": experts.top_k, "moe_intermediate_size": experts.moe_intermediate_size}
        tree |= {"norm_topk_prob": experts.norm_topk_prob}
        if latent is None:
            tree |= {
                "num_experts": experts.num_experts,
                "mlp_only_layers": list(experts.dense),
                "decoder_sparse_step": 1,
            }
        else:
            tree |= {"n_routed_experts": experts.num_experts, "n_shared_experts": experts.n_shared_experts}
            tree |= {
                "routed_scaling_factor": experts.routed_scaling_factor,
                "first_k_dense_replace": len(experts.dense),
            }
            tree |= {"n_group": experts.n_group, "topk_group": experts.topk_group}
    elif latent is not None:
        raise UserError(
            "a decoder with latent attention and no experts is of no family of transformers: it cannot be written"
        )
    again = settings_of(tree, "the config.json", settings.num_nextn_predict_layers)
    differing = [name for name in vars(settings) if _comparable(again, name) != _comparable(settings, name)]
    if differing:
        raise UserError(
            f"no family of transformers ({', '.join(FAMILIES)}) has a decoder like this one, which differs in {', '.join(differing)}: it "
            "cannot be written"
        )
    return tree


def _comparable(settings: DecoderSettings, name: str) -> Any:
    """A setting as it is compared: the longest sequence does not matter where positions are not scaled, nor does how experts learn."""
    value = getattr(settings, name)
    if name == "rotary":
        return replace(value, longest=value.longest if value.kind == "yarn" and value.factor is None else None)
    if name == "experts" and value is not None:
        return replace(value, balance=None, balance_rate=0.0)
    if name == "head_dim" and settings.latent is not None:
        return None
    return value if name != "windows" else tuple(value) or (None,) * settings.num_hidden_layers


def _rope_tree(settings: DecoderSettings) -> dict[str, Any]:
    """The rotary parameters in the words of transformers."""
    rotary = settings.rotary
    tree: dict[str, Any] = {"rope_type": rotary.kind, "rope_theta": rotary.theta}
    if rotary.kind != "default":
        tree["factor"] = rotary.factor
    if rotary.kind in ("llama3", "yarn"):
        tree["original_max_position_embeddings"] = rotary.original
    if rotary.kind == "llama3":
        tree |= {"low_freq_factor": rotary.low_frequency, "high_freq_factor": rotary.high_frequency}
    if rotary.kind == "yarn":
        tree |= {"beta_fast": rotary.beta_fast, "beta_slow": rotary.beta_slow, "truncate": rotary.truncates}
        named = {"attention_factor": rotary.attention, "mscale": rotary.scale, "mscale_all_dim": rotary.scale_all}
        tree |= {name: value for name, value in named.items() if value is not None}
    return tree
