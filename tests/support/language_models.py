"""Tiny random language models of transformers, saved and loaded, and packs of documents for them.

Legend: B rows, N tokens, Z one more than documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspeed.initialize import materialize, read_weights
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.weights import stored_decoder
from mmspeed.models.weights import quiet
from mmspeed.protocols import source_of

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN,
}
# class of transformers, and its settings beside those of SMALL
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "qwen3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_window": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
         "mlp_only_layers": [1]},
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_plain": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
                                      "n_group": 1, "topk_group": 1, "attention_bias": True}),
}  # fmt: skip


def oracle(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model of a class of transformers, with eager attention and experts; biases of routers are not 0."""
    import transformers

    name, settings = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **settings, **changes})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    with quiet():
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # far from where they start, where norms are 1 and logits near 0
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.train()


def saved(kind: str, folder: Path, **changes: Any) -> nn.Module:
    """`oracle`, saved to a folder by transformers."""
    model: Any = oracle(kind, **changes)
    with quiet():
        model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def loaded(folder: Path, mtp: int | None = None) -> Decoder:
    """Our decoder, filled from a folder."""
    model = stored_decoder(str(folder), mtp=mtp)
    source = source_of(model)
    assert source is not None
    materialize(model, torch.device("cpu"))
    read_weights(model, source)
    return model.train()


def pack(lengths: tuple[int, ...] = (5, 1, 9, 8, 16), rows: int = 1, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """(ids_BN, pos_BN, bounds_Z) of documents of these lengths, which fill the rows."""
    tokens = sum(lengths)
    ids = torch.randint(0, VOCABULARY, (rows, tokens // rows), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths]).view(rows, -1)
    return ids, positions, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def class_logits(model: nn.Module, ids_BN: Tensor, pos_BN: Tensor) -> Tensor:
    """The class's logits of packed documents, which restarting positions separate only where no cache is used."""
    out: Tensor = model(input_ids=ids_BN, position_ids=pos_BN, use_cache=False).logits
    return out


@contextmanager
def widened(monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[None]:
    """Let a class compute in float64 where it names float32: norms, softmax, tables of positions."""
    import importlib

    word = {"Llama": "llama", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3"}[KINDS[kind][0]]

    class Wide:
        def __getattr__(self, name: str) -> Any:
            return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module(f"transformers.models.{word}.modeling_{word}"), "torch", Wide())
        yield
