"""Tiny repositories of published pipelines with random weights, saved as diffusers saves them: one function for each family.

Patch, strides, latent channels, token limits and norms are the published ones; only widths, depths and heads are small.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.tiny_models import save_tiny_text_encoder, save_tiny_vae

MEANS, DEVIATIONS = [0.01 * k - 0.05 for k in range(16)], [1.0 + 0.05 * k for k in range(16)]


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random values in every tensor, also in those that its class begins with zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim > 1 else 0.02
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model


# -- Wan ----------------------------------------------------------------------------------------------------------------


def wan_transformer(**changes: Any) -> Any:
    """A tiny WanTransformer3DModel, text to video; captions of width 16."""
    from diffusers import WanTransformer3DModel

    sizes = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16,
        "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomized(WanTransformer3DModel(**{**sizes, **changes}))


def save_wan(folder: Path, shift: float = 3.0, **changes: Any) -> Path:
    """The repository of a tiny Wan 2.1 text-to-video pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(parts / "vae", "wan", z_dim=16, latents_mean=MEANS, latents_std=DEVIATIONS)
    save_tiny_text_encoder(parts / "text", "umt5")
    pipeline = WanPipeline(
        tokenizer=transformers.T5Tokenizer.from_pretrained(parts / "text"),
        text_encoder=transformers.UMT5EncoderModel.from_pretrained(parts / "text"),
        vae=AutoencoderKLWan.from_pretrained(parts / "vae"),
        transformer=wan_transformer(**changes),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
        ),
    )
    pipeline.save_pretrained(folder)
    return folder


def save_wan_experts(folder: Path, boundary: float = 0.875, shift: float = 3.0, **changes: Any) -> Path:
    """The repository of a tiny Wan 2.2 A14B: two transformers of other weights, of times from `boundary` on and below it."""
    save_wan(folder, shift, **changes)
    randomized(wan_transformer(**changes), seed=1).save_pretrained(folder / "transformer_2")  # type: ignore[operator]
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"boundary_ratio": boundary, "transformer_2": index["transformer"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def save_wan_5b(folder: Path) -> Path:
    """The repository of a tiny Wan 2.2 5B, in which each token has its own time."""
    save_wan(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "expand_timesteps": True}))
    return folder


def tiny_image_encoder(kind: str) -> tuple[Any, Any]:
    """(an image encoder of transformers, its image processor): CLIP with 257 rows, or SigLIP with 729, of width 16."""
    import transformers

    tf: Any = transformers
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": 14,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "clip":
            return tf.CLIPVisionModel(tf.CLIPVisionConfig(**sizes, image_size=224)).eval(), tf.CLIPImageProcessor()
        size = {"height": 384, "width": 384}
        encoder = tf.SiglipVisionModel(tf.SiglipVisionConfig(**sizes, image_size=384)).eval()
        return encoder, tf.SiglipImageProcessor(size=size)


def save_wan_images(folder: Path, last: bool = False, **changes: Any) -> Path:
    """The repository of a tiny Wan 2.1 image-to-video pipeline, with `last` of first and last frames; `changes` are the transformer's."""
    from diffusers import WanImageToVideoPipeline, WanPipeline

    sizes = {"in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 24, "pos_embed_seq_len": 514 if last else None}
    save_wan(folder, **{**sizes, **changes})
    encoder, processor = tiny_image_encoder("clip")
    parts = WanPipeline.from_pretrained(folder).components
    WanImageToVideoPipeline(
        **{**parts, "image_encoder": encoder, "image_processor": processor, "transformer_2": None}
    ).save_pretrained(folder)
    return folder


def save_wan_vace(folder: Path, **changes: Any) -> Path:
    """The repository of a tiny Wan 2.1 VACE pipeline; `changes` are the transformer's."""
    from diffusers import WanPipeline, WanVACEPipeline, WanVACETransformer3DModel

    save_wan(folder)
    parts = WanPipeline.from_pretrained(folder).components
    sizes = dict(parts["transformer"].config) | {"num_layers": 3, "vace_layers": (0, 2), "vace_in_channels": 96}
    names = inspect.signature(WanVACETransformer3DModel.__init__).parameters
    kept = {name: value for name, value in {**sizes, **changes}.items() if name in names}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = randomized(WanVACETransformer3DModel(**kept))
    WanVACEPipeline(**{**parts, "transformer": transformer, "transformer_2": None}).save_pretrained(folder)
    return folder


# -- LTX-Video ----------------------------------------------------------------------------------------------------------


def save_ltx(folder: Path, **changes: Any) -> Path:
    """The repository of a tiny LTX-Video text-to-video pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(parts / "vae", "ltx", latent_channels=128, scaling_factor=1.0)
    save_tiny_text_encoder(parts / "text", "t5")
    sizes = {
        "in_channels": 128, "out_channels": 128, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32,
        "num_layers": 2, "caption_channels": 16,
    }  # fmt: skip
    pipeline: Any = LTXPipeline(
        tokenizer=transformers.T5Tokenizer.from_pretrained(parts / "text"),
        text_encoder=transformers.T5EncoderModel.from_pretrained(parts / "text"),
        vae=AutoencoderKLLTXVideo.from_pretrained(parts / "vae"),
        transformer=randomized(LTXVideoTransformer3DModel(**{**sizes, **changes})),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    )  # fmt: skip
    pipeline.save_pretrained(folder)
    return folder


# -- CogVideoX ----------------------------------------------------------------------------------------------------------


def save_cogvideox(folder: Path, kind: str = "5b", images: bool = False, **changes: Any) -> Path:
    """The repository of a tiny CogVideoX pipeline (`kind` 2b, 5b or 1.5), text or image to video; `changes` are the transformer's."""
    import transformers
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXDPMScheduler,
        CogVideoXImageToVideoPipeline,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    parts = folder.with_name(f".{folder.name}-parts")
    invert = images and kind == "1.5"
    save_tiny_vae(parts / "vae", "cogvideox", latent_channels=16, scaling_factor=0.7, invert_scale_latents=invert)
    save_tiny_text_encoder(parts / "text", "t5")
    sizes: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 32 if images else 16, "out_channels": 16, "time_embed_dim": 16,
        "text_embed_dim": 16, "num_layers": 2, "sample_width": 12, "sample_height": 8, "sample_frames": 9,
        "max_text_seq_length": 226, "use_rotary_positional_embeddings": kind != "2b",
    }  # fmt: skip
    if kind == "1.5":
        sizes |= {"patch_size_t": 2, "ofs_embed_dim": 16, "patch_bias": False, "sample_frames": 9}
    scheduler_class = CogVideoXDDIMScheduler if kind == "2b" else CogVideoXDPMScheduler
    scheduler = scheduler_class(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction", set_alpha_to_one=True,
        rescale_betas_zero_snr=True, snr_shift_scale=3.0 if kind == "2b" else 1.0,
        timestep_spacing="linspace" if kind == "2b" else "trailing",
    )  # fmt: skip
    pipeline: Any = (CogVideoXImageToVideoPipeline if images else CogVideoXPipeline)(
        tokenizer=transformers.T5Tokenizer.from_pretrained(parts / "text"),
        text_encoder=transformers.T5EncoderModel.from_pretrained(parts / "text"),
        vae=AutoencoderKLCogVideoX.from_pretrained(parts / "vae"),
        transformer=randomized(CogVideoXTransformer3DModel(**{**sizes, **changes})),
        scheduler=scheduler,
    )
    pipeline.save_pretrained(folder)
    return folder


# -- HunyuanVideo -------------------------------------------------------------------------------------------------------


def tiny_llama_tokenizer(template: str, cut: int, *further: str) -> Any:
    """A byte-level tokenizer that makes `cut` tokens of what stands before the caption in a template, as the published one does.

    further: special tokens beside the usual ones; with some, a text begins with the token of its beginning, as the published one's.
    """
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    marks = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<pad>", *further]
    front = template.partition("{}")[0]
    for size in range(300, 700):
        learnt = ByteLevelBPETokenizer()
        learnt.train_from_iterator(
            [front] * 4, vocab_size=size, min_frequency=1, show_progress=False, special_tokens=marks
        )
        if further:
            learnt._tokenizer.post_processor = TemplateProcessing(
                single=f"{marks[0]} $A", special_tokens=[(marks[0], 0)]
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=learnt._tokenizer,
            bos_token=marks[0],
            eos_token=marks[3],
            pad_token=marks[4],
            padding_side="right",
        )
        if len(tokenizer(front)["input_ids"]) <= cut:
            return tokenizer
    raise AssertionError("no size of the vocabulary gives so few tokens")


def save_hunyuan_video(folder: Path, shift: float = 7.0, **changes: Any) -> Path:
    """The repository of a tiny HunyuanVideo text-to-video pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(parts / "vae", "hunyuan", latent_channels=16, scaling_factor=0.476986)
    save_tiny_text_encoder(parts / "clip", "clip", max_position_embeddings=77)
    tokenizer = tiny_llama_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = transformers.LlamaModel(
            transformers.LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
            )
        )  # fmt: skip
    sizes = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "guidance_embeds": True,
        "text_embed_dim": 16, "pooled_projection_dim": 16, "rope_axes_dim": (4, 4, 4),
    }  # fmt: skip
    pipeline: Any = HunyuanVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=llama,
        tokenizer_2=transformers.CLIPTokenizer.from_pretrained(parts / "clip"),
        text_encoder_2=transformers.CLIPTextModel.from_pretrained(parts / "clip"),
        vae=AutoencoderKLHunyuanVideo.from_pretrained(parts / "vae"),
        transformer=randomized(HunyuanVideoTransformer3DModel(**{**sizes, **changes})),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
    )
    pipeline.save_pretrained(folder)
    return folder


def save_hunyuan_video_images(folder: Path, replaces: bool = False, **changes: Any) -> Path:
    """The repository of a tiny HunyuanVideo image-to-video pipeline, whose first text encoder is a Llava model.

    The transformer takes the first frame as further channels or, where it `replaces` frames, in its place. `changes`: of its settings.
    """
    import transformers
    from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoPipeline
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE as TEMPLATE

    kind = (
        {"image_condition_type": "token_replace"}
        if replaces
        else {"image_condition_type": "latent_concat", "in_channels": 33}
    )
    save_hunyuan_video(folder, **{**kind, **changes})
    tokenizer = tiny_llama_tokenizer(TEMPLATE["template"], TEMPLATE["crop_start"], "<image>")
    tf: Any = transformers
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llava = tf.LlavaForConditionalGeneration(
            tf.LlavaConfig(
                vision_config=tf.CLIPVisionConfig(**sizes, num_hidden_layers=3, patch_size=14, image_size=336),
                text_config=tf.LlamaConfig(
                    **sizes, vocab_size=len(tokenizer), num_hidden_layers=4, num_key_value_heads=1, max_position_embeddings=1024,
                    pad_token_id=tokenizer.pad_token_id,
                ),
                image_token_index=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=tokenizer.pad_token_id,
            )
        ).eval()  # fmt: skip
    processor = tf.CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    parts = {**HunyuanVideoPipeline.from_pretrained(folder).components, "tokenizer": tokenizer, "text_encoder": llava}
    HunyuanVideoImageToVideoPipeline(**parts, image_processor=processor).save_pretrained(folder)
    return folder


# -- Mochi --------------------------------------------------------------------------------------------------------------


def save_mochi(folder: Path, forced: bool = False, **changes: Any) -> Path:
    """The repository of a tiny Mochi pipeline; `changes` are the transformer's. forced: the empty prompt's rows are masked."""
    import transformers
    from diffusers import AutoencoderKLMochi, FlowMatchEulerDiscreteScheduler, MochiPipeline, MochiTransformer3DModel

    parts = folder.with_name(f".{folder.name}-parts")
    statistics = {"latents_mean": MEANS[:12], "latents_std": DEVIATIONS[:12]}
    save_tiny_vae(parts / "vae", "mochi", latent_channels=12, **statistics)
    save_tiny_text_encoder(parts / "text", "t5")
    sizes = {
        "in_channels": 12, "out_channels": 12, "num_attention_heads": 2, "attention_head_dim": 12, "pooled_projection_dim": 16,
        "num_layers": 2, "text_embed_dim": 16, "time_embed_dim": 16, "max_sequence_length": 256, "patch_size": 2,
    }  # fmt: skip
    pipeline: Any = MochiPipeline(
        tokenizer=transformers.T5Tokenizer.from_pretrained(parts / "text"),
        text_encoder=transformers.T5EncoderModel.from_pretrained(parts / "text"),
        vae=AutoencoderKLMochi.from_pretrained(parts / "vae"),
        transformer=randomized(MochiTransformer3DModel(**{**sizes, **changes})),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        force_zeros_for_empty_prompt=forced,
    )
    pipeline.save_pretrained(folder)
    return folder


# -- Flux ---------------------------------------------------------------------------------------------------------------


def save_flux(folder: Path, **changes: Any) -> Path:
    """The repository of a tiny Flux pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(
        parts / "vae", "kl", latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    save_tiny_text_encoder(parts / "text", "t5")
    save_tiny_text_encoder(parts / "clip", "clip", max_position_embeddings=77)
    sizes = {
        "in_channels": 64, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "num_single_layers": 1,
        "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 4), "guidance_embeds": True,
    }  # fmt: skip
    tokenizer = transformers.CLIPTokenizer.from_pretrained(parts / "clip")
    tokenizer.model_max_length = 77
    pipeline: Any = FluxPipeline(
        tokenizer=tokenizer,
        text_encoder=transformers.CLIPTextModel.from_pretrained(parts / "clip"),
        tokenizer_2=transformers.T5Tokenizer.from_pretrained(parts / "text"),
        text_encoder_2=transformers.T5EncoderModel.from_pretrained(parts / "text"),
        vae=AutoencoderKL.from_pretrained(parts / "vae"),
        transformer=randomized(FluxTransformer2DModel(**{**sizes, **changes})),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
            shift=3.0,
        ),
    )
    pipeline.save_pretrained(folder)
    return folder


# -- QwenImage and HunyuanVideo 1.5 ----------------------------------------------------------------------------------------

# a conversation as Qwen2.5's tokenizer writes it
CONVERSATION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_qwen_tokenizer(front: str, cut: int) -> Any:
    """A byte-level Qwen tokenizer that makes `cut` tokens of what stands before the caption, as the published one does."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Qwen2Tokenizer

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for size in range(300, 700):
        learnt = ByteLevelBPETokenizer()
        learnt.train_from_iterator([front] * 4, vocab_size=size, min_frequency=1, show_progress=False)
        model = json.loads(learnt._tokenizer.to_str())["model"]
        tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
        tokenizer.add_special_tokens({"pad_token": marks[0], "additional_special_tokens": marks[1:]})
        tokenizer.padding_side, tokenizer.chat_template = "right", CONVERSATION
        if len(tokenizer(front)["input_ids"]) <= cut:
            return tokenizer
    raise AssertionError("no size of the vocabulary gives so few tokens")


def _tiny_qwen(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    }  # fmt: skip


def save_qwen_image(folder: Path, **changes: Any) -> Path:
    """The repository of a tiny QwenImage pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(parts / "vae", "qwenimage", z_dim=16, latents_mean=MEANS, latents_std=DEVIATIONS)
    nothing: Any = None
    bare = QwenImagePipeline(nothing, nothing, nothing, nothing, nothing)
    front = bare.prompt_template_encode.partition("{}")[0]
    tokenizer = tiny_qwen_tokenizer(front, bare.prompt_template_encode_start_idx)
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16, "patch_size": 14,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    sizes = {
        "in_channels": 64, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2,
        "joint_attention_dim": 16, "axes_dims_rope": (4, 4, 4), "patch_size": 2,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=_tiny_qwen(tokenizer), vision_config=vision)
        )
    pipeline: Any = QwenImagePipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=AutoencoderKLQwenImage.from_pretrained(parts / "vae"),
        transformer=randomized(QwenImageTransformer2DModel(**{**sizes, **changes})),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )
    pipeline.save_pretrained(folder)
    return folder


def save_hunyuan_video15(folder: Path, **changes: Any) -> Path:
    """The repository of a tiny HunyuanVideo 1.5 text-to-video pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(parts / "vae", "hunyuan1.5", latent_channels=32, block_out_channels=(8, 16, 32, 64, 64))
    defaults = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    message, cut = defaults["system_message"].default, defaults["crop_start"].default
    tokenizer = tiny_qwen_tokenizer(f"<|im_start|>system\n{message}<|im_end|>\n<|im_start|>user\n", cut)
    sizes = {
        "in_channels": 65, "out_channels": 32, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2,
        "num_refiner_layers": 1, "text_embed_dim": 16, "text_embed_2_dim": 24, "image_embed_dim": 16, "patch_size": 1,
        "patch_size_t": 1, "rope_axes_dim": (4, 4, 4),
    }  # fmt: skip
    glyphs = {"vocab_size": 384, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**_tiny_qwen(tokenizer)))
        of_bytes = transformers.T5EncoderModel(transformers.T5Config(**glyphs))
    pipeline: Any = HunyuanVideo15Pipeline(
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=randomized(HunyuanVideo15Transformer3DModel(**{**sizes, **changes})),
        vae=AutoencoderKLHunyuanVideo15.from_pretrained(parts / "vae"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=of_bytes,
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(),
    )
    pipeline.save_pretrained(folder)
    return folder


def save_hunyuan_video15_images(folder: Path, **changes: Any) -> Path:
    """The repository of a tiny HunyuanVideo 1.5 image-to-video pipeline; `changes` are the transformer's."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline

    save_hunyuan_video15(folder, **changes)
    encoder, extractor = tiny_image_encoder("siglip")
    parts = HunyuanVideo15Pipeline.from_pretrained(folder).components
    HunyuanVideo15ImageToVideoPipeline(
        **{**parts, "image_encoder": encoder, "feature_extractor": extractor}
    ).save_pretrained(folder)
    return folder


REPOSITORIES: dict[str, Callable[[Path], Path]] = {
    "wan": save_wan,
    "ltx": save_ltx,
    "cogvideox-5b": save_cogvideox,
    "hunyuan-video": save_hunyuan_video,
    "mochi": save_mochi,
    "flux": save_flux,
    "qwen-image": save_qwen_image,
    "hunyuan-video-1.5": save_hunyuan_video15,
}
