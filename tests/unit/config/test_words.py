"""The words of other trainers, from their example configs: each is answered with the right key, or with the keys of the section."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mmspeed.config.language import LanguageConfig
from mmspeed.config.load import all_fields, make_config
from mmspeed.config.schema import Config
from mmspeed.config.words import SYNONYMS
from mmspeed.errors import UserError

BUCKET = {"frames": 9, "height": 64, "width": 96}
TASKS: dict[str, dict[str, Any]] = {
    "video": {"data": {"sources": [{"path": "clips"}], "buckets": [BUCKET]}},
    "language": {"task": "language", "texts": {"sources": [{"path": "texts"}], "cache": "cache"}},
}
ABSENT = "adapters are LoRA alone"
# By task: the key that is named, without kinds, for each word; "": none is.
ANSWERS: dict[str, dict[str, str]] = {
    "video": {
        "train.lr": "lr train.learning_rate learning_rate --learning_rate",
        "train.steps": "steps epochs train.epochs train.num_epochs train.max_steps train.max_train_steps num_train_epochs max_train_epochs",
        "train.batch_size": "train.batchsize batch_size train.batch data.batch_size train_batch_size",
        "train.micro_batch_size": "micro_batch_size_per_gpu train.gradient_accumulation_steps train.grad_accum",
        "train.optimizer": "optimizer optimizer_type",
        "train.schedule": "train.lr_scheduler lr_scheduler",
        "train.warmup_steps": "train.warmup lr_warmup_steps",
        "train.clip_norm": "gradient_clipping max_grad_norm",
        "train.caption_dropout": "caption_dropout_probability",
        "train.ema_decay": "ema train.ema use_ema",
        "train.log_every": "logging steps_per_print",
        "train.loader_workers": "data.num_workers max_data_loader_n_workers",
        "seed": "train.seed --seed",
        "output": "output_dir",
        "data.sources": "dataset datasets directory data_backend_config",
        "data.sources[].path": "data.path data.sources.0.video_directory",
        "data.sources[].caption_column": "data.caption_column",
        "data.repeats": "data.num_repeats",
        "data.sources[].repeats": "data.sources.0.num_repeats",
        "data.caption_prefix": "data.trigger_word",
        "data.cache": "data.sources.0.cache_directory cache_dir_vae",
        "data.fps": "fps",
        "data.buckets": "data.resolution resolutions data.sources.0.resolution enable_ar_bucket frame_buckets",
        "data.buckets[].frames": "data.frames data.num_frames target_frames",
        "data.windows": "video_clip_mode frame_extraction",
        "preprocess.encode_batch": "caching_batch_size vae_batch_size",
        "model.pretrained": "model.name model.path model.checkpoint model.pretrained_model_name_or_path model.ckpt_path",
        "model.weights": "model.transformer_path dit",
        "model.kind": "model.type",
        "vae.pretrained": "vae.path model.vae_path",
        "vae.tiling": "vae.tiling",
        "text.pretrained": "text.model t5",
        "text.max_tokens": "text.max_length",
        "objective.shift": "discrete_flow_shift flow_schedule_shift",
        "objective.timesteps": "model.timestep_sample_method timestep_sampling",
        "checkpoint.every": "train.save_every save_every_n_epochs checkpointing_steps",
        "checkpoint.keep_last": "checkpoints_total_limit",
        "validate": "validation",
        "validate.every": "validate.steps eval_every_n_epochs validation_steps sample_every_n_steps",
        "validate.prompts": "sample.prompts validation_prompt sample_prompts",
        "sample.steps": "validation_num_inference_steps",
        "device.dtype": "precision dtype fp16 device.bf16 train.mixed_precision model.dtype",
        "memory.activation_policy": "train.gradient_checkpointing memory.gradient_checkpointing memory.offload activation_checkpointing",
        "parallel.strategy": "parallel.fsdp",
        "parallel.dp_replicate": "parallel.dp",
        "parallel.ring": "parallel.cp parallel.context_parallel",
        "parallel.ulysses": "parallel.sp parallel.sequence_parallel",
        "trackers": "wandb report_to tracking.wandb log_with monitoring",
        "tracking.project": "tracker_project_name",
        "": "data.caption_ext data.shuffle data.min_duration data.min_pixels sample.fps "
        "validate.batch_size hub_model_id push_to_hub min_ar general",
        "model.adapter": "lora adapter network peft",
        "model.adapter.kind": "network_module lora_type",
        "model.adapter.rank": "model.lora_rank network_dim lora_r train.rank",
        "model.adapter.alpha": "lora_alpha network_alpha",
        "model.adapter.rslora": "use_rslora",
        "model.adapter.targets": "target_modules model.lora_target_modules",
        "model.base.dtype": "base_model_precision fp8_base model.transformer_dtype model.quantize",
        "model.base.place": "memory.blocks_to_swap blocks_to_swap",
        "train.start_from": "lora_path network_weights",
        ABSENT: "lora_dropout use_dora lycoris_config train.load_in_4bit",
    },
    "language": {
        "train.steps": "train_iters train.num_train_epochs train.stepz",  # `train` is a kind of tokenizer, too
        "train.micro_batch_size": "per_device_train_batch_size train.local_batch_size",
        "train.schedule": "lr_decay_style lr_scheduler_type",
        "train.min_lr_ratio": "min_lr min_lr_factor",
        "train.clip_norm": "clip_grad train.max_norm",
        "train.betas": "adam_beta1",
        "sequence_length": "seq_length train.seq_len max_seq_length",
        "model.num_hidden_layers": "num_layers",
        "model.num_key_value_heads": "num_query_groups",
        "model.shape": "model.flavor",
        "tokenizer.path": "tokenizer_model",
        "texts.sources[].column": "dataset_text_field",
        "texts.validation": "split",
        "checkpoint.every": "save_interval save_steps checkpoint.interval",
        "checkpoint.keep_last": "save_total_limit checkpoint.keep_latest_k",
        "validate.every": "eval_interval eval_steps",
        "parallel.tp": "tensor_model_parallel_size parallel.tensor_parallel_degree",
        "parallel.ring": "context_parallel_size",
        "memory.activation_policy": "recompute_granularity activation_checkpoint",
        "parallel.ep": "parallel.expert_parallel_degree expert_model_parallel_size",
        "": "swiglu per_device_eval_batch_size",
        "model.adapter.rank": "lora_r",
        "model.adapter.targets": "lora_target",
        "model.base.dtype": "load_in_8bit",
        ABSENT: "load_in_4bit lora_dropout",
    },
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_each_word_of_another_trainer_gets_its_key(task: str) -> None:
    wanted = {word: key for key, words in ANSWERS[task].items() for word in words.split()}
    answers = {}
    for word in wanted:
        with pytest.raises(UserError, match="unknown key") as caught:
            make_config(TASKS[task], [f"{word}=5"])
        named = re.search("did you mean '(.*?)'", str(caught.value))
        answers[word] = re.sub(r"\(\w+\)", "", named[1]) if named else ABSENT if ABSENT in str(caught.value) else ""
        assert named or answers[word] or "; the keys there are " in str(caught.value)
    assert answers == wanted


def test_each_key_of_the_table_is_one_of_a_config() -> None:
    keys = {re.sub(r"\(\w+\)|\[\]", "", path) for kind in (Config, LanguageConfig) for path, _ in all_fields(kind)}
    assert set(SYNONYMS) <= keys
