"""Tiny models with random weights, saved as real checkpoints: what the adapters load in tests, in milliseconds.

Every VAE here compresses as its big sibling does, and carries latent statistics that are not trivial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SENTENCES = (
    "a rabbit runs over a green meadow",
    "the earth turns slowly in the dark",
    "two birds sit on a branch and sing in the morning sun",
    "a person walks along the beach at sunset",
)

_FOUR = {"latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [1.5, 2.0, 0.5, 3.0]}
_WAN = {
    "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
    "temperal_downsample": [False, True, True], **_FOUR,
}  # fmt: skip
_BLOCKS = {"block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
_IMAGE = {
    "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4,
}  # fmt: skip
_LTX = {
    "latent_channels": 8, "block_out_channels": (8, 8, 8, 8), "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_block_out_channels": (8, 8, 8, 8), "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, True, False), "decoder_spatio_temporal_scaling": (True, True, True, False),
    "decoder_inject_noise": (False,) * 5, "scaling_factor": 0.8,
}  # fmt: skip

VAES: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("AutoencoderKLWan", _WAN),
    "wan2.2": (
        "AutoencoderKLWan",
        {**_WAN, "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "is_residual": True},
    ),
    "cogvideox": ("AutoencoderKLCogVideoX", {**_BLOCKS, "temporal_compression_ratio": 4}),
    "hunyuan": ("AutoencoderKLHunyuanVideo", _BLOCKS),
    "hunyuan1.5": (
        "AutoencoderKLHunyuanVideo15",
        {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8, 8), "layers_per_block": 1},
    ),
    "ltx": ("AutoencoderKLLTXVideo", _LTX),
    "ltx-timed": ("AutoencoderKLLTXVideo", {**_LTX, "timestep_conditioning": True}),
    "mochi": (
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": (32, 32, 32, 32), "decoder_block_out_channels": (32, 32, 32, 32),
            "latent_channels": 4, "layers_per_block": (1, 1, 1, 1, 1), "scaling_factor": 0.9, **_FOUR,
        },
    ),
    "qwenimage": ("AutoencoderKLQwenImage", _WAN),
    "kl": ("AutoencoderKL", {**_IMAGE, "norm_num_groups": 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "shift_factor": 0.2}),
    "kl-statistics": (
        "AutoencoderKL", {**_IMAGE, "norm_num_groups": 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **_FOUR},
    ),
    "flux2": ("AutoencoderKLFlux2", {**_IMAGE, "norm_num_groups": 2, "up_block_types": ("UpDecoderBlock2D",) * 2}),
    "svd": ("AutoencoderKLTemporalDecoder", {**_IMAGE, "block_out_channels": (32, 32)}),
    "kvae-video": ("AutoencoderKLKVAEVideo", {"ch": 32, "ch_mult": (1, 1, 1, 1), "num_res_blocks": 1, "z_channels": 4}),
}  # fmt: skip


def save_tiny_vae(folder: Path, name: str = "wan", **changes: Any) -> Path:
    """A tiny autoencoder of `VAES`, saved in `folder`; `changes` override its config. Always the same numbers."""
    import diffusers

    class_name, config = VAES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = getattr(diffusers, class_name)(**{**config, **changes})
        for buffer_name, buffer in vae.named_buffers():
            if buffer_name in ("latents_mean", "latents_std", "bn.running_mean", "bn.running_var"):
                buffer.uniform_(0.5, 1.5)
    vae.save_pretrained(folder)
    return folder


def save_tiny_text_encoder(folder: Path, kind: str = "t5", **changes: Any) -> Path:
    """A tiny text encoder with its tokenizer in `folder`: t5, umt5, clip, clip-projection, clip-full, bert, roberta or qwen2.

    `changes` override its config. t5 and clip-full are whole checkpoints (encoder and decoder; text and vision).
    """
    tokenizer = _TOKENIZERS[kind.split("-")[0]]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _text_model(kind, len(tokenizer), tokenizer, changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_spoiled_text_encoder(folder: Path, word: str = "rabbit") -> Path:
    """A tiny BERT whose embedding of one word is not finite; its folder. Captions without the word are encoded as ever."""
    from transformers import BertModel

    path = save_tiny_text_encoder(folder / "spoiled", "bert")
    model = BertModel.from_pretrained(path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[_wordpiece().convert_tokens_to_ids(word)] = float("inf")
    model.save_pretrained(path)
    return path


def _text_model(kind: str, vocab: int, tokenizer: Any, changes: dict[str, Any]) -> Any:
    import transformers

    tf: Any = transformers
    if kind in ("t5", "umt5"):
        family = kind.upper()
        sizes = {"vocab_size": vocab, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, **changes}
        cls = tf.T5ForConditionalGeneration if kind == "t5" else tf.UMT5EncoderModel
        return cls(getattr(tf, f"{family}Config")(**sizes))
    sizes = {
        "vocab_size": vocab, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    if kind.startswith("clip"):
        marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        sizes |= {"max_position_embeddings": 16, "projection_dim": 8, **marks, **changes}
        if kind == "clip-full":
            vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "image_size": 8, "patch_size": 4}  # fmt: skip
            return tf.CLIPModel(tf.CLIPConfig(text_config=sizes, vision_config=vision, projection_dim=8))
        cls = tf.CLIPTextModelWithProjection if kind == "clip-projection" else tf.CLIPTextModel
        return cls(tf.CLIPTextConfig(**sizes))
    family = {"bert": "Bert", "roberta": "Roberta", "qwen2": "Qwen2"}[kind]
    extra = {"num_key_value_heads": 2} if kind == "qwen2" else {}
    cls = getattr(tf, f"{family}ForCausalLM" if kind == "qwen2" else f"{family}Model")
    return cls(getattr(tf, f"{family}Config")(**{**sizes, **extra, **changes}))


def _unigram() -> Any:
    """A T5 tokenizer: pieces learnt from a few sentences."""
    from tokenizers import SentencePieceUnigramTokenizer
    from transformers import T5Tokenizer

    learnt = SentencePieceUnigramTokenizer()
    learnt.train_from_iterator(
        SENTENCES, vocab_size=80, show_progress=False, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    vocab = sorted(learnt.get_vocab().items(), key=lambda item: item[1])
    return T5Tokenizer(
        vocab=[(piece, 0.0 if place < 3 else -1.0 - 0.01 * place) for piece, place in vocab], extra_ids=0
    )


def _words(marks: tuple[str, ...]) -> dict[str, int]:
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    return {word: place for place, word in enumerate((*marks, *words))}


def _wordpiece() -> Any:
    from transformers import BertTokenizer

    return BertTokenizer(vocab=_words(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")))


def _clip_pairs() -> Any:
    """A CLIP tokenizer that knows letters only: no merges."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["<|startoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[])


def _bytes() -> Any:
    """A Qwen tokenizer that knows bytes only, and adds no marks: the empty caption has no tokens."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Qwen2Tokenizer(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])


def _plain(marks: dict[str, str]) -> Any:
    """A word tokenizer that adds no marks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(_words(tuple(marks.values())), unk_token=marks["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **marks)


_TOKENIZERS = {
    "t5": _unigram,
    "umt5": _unigram,
    "clip": _clip_pairs,
    "bert": _wordpiece,
    "roberta": lambda: _plain({"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "qwen2": _bytes,
}
