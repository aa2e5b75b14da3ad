"""The words of other trainers for the keys of a config: SimpleTuner's, diffusion-pipe's, musubi-tuner's, HF Trainer's, torchtitan's, Megatron's."""

from __future__ import annotations

# A key, without `[]` and kinds, and the words for it. A word with a section is of that section alone; another one is understood at the
# top, below the sections of ANYWHERE, and below that of its key.
SYNONYMS = {
    "name": "run_name output_name exp_name experiment_name job_name",
    "output": "output_dir output_path out_dir dump_folder save_dir",
    "seed": "random_seed manual_seed global_seed train.seed data.seed",
    # media
    "data.sources": "dataset datasets dataset_config dataset_name dataset_path data_backend_config data_dir data_path data_root "
    "train_data_dir instance_data_dir directory",
    "data.sources.path": "data.root data.folder data.dir video_directory image_directory video_jsonl_file image_jsonl_file",
    "data.sources.repeats": "num_repeats",
    "data.repeats": "num_repeats",
    "data.sources.caption_column": "caption_column caption_key caption_field prompt_column text_column",
    "data.sources.media_column": "video_column image_column media_key video_key",
    "data.caption_prefix": "trigger_word trigger instance_prompt",
    "data.sources.caption_prefix": "data.sources.trigger_word",
    "data.cache": "cache_dir cache_directory cache_dir_vae data_cache_path",
    "data.fps": "framerate frame_rate target_fps video_fps",
    "data.buckets": "resolution resolutions image_size video_size size size_buckets frame_buckets ar_buckets enable_bucket enable_ar_bucket",
    "data.buckets.frames": "frames num_frames target_frames max_frames video_length clip_length",
    "data.windows": "frame_extraction frame_sample video_clip_mode",
    "data.allow_upscale": "bucket_no_upscale",
    "data.mirror": "flip random_flip hflip horizontal_flip",
    "data.limit": "max_samples max_train_samples",
    "data.missing_caption": "skip_empty_caption",
    "data.val_fraction": "val_split validation_split eval_split split",
    # codec, text encoder and cache
    "vae": "autoencoder",
    "vae.pretrained": "vae_path vae_model vae.path vae.name vae.model pretrained_vae_model_name_or_path",
    "vae.dtype": "vae_dtype",
    "vae.tiling": "enable_tiling vae_enable_tiling vae_tiling",
    "vae.slicing": "enable_slicing vae_enable_slicing",
    "text": "text_encoder text_encoders",
    "text.pretrained": "t5 t5_path llm_path clip_path text_encoder_path text.path text.name text.model",
    "text.max_tokens": "max_length max_sequence_length max_token_length tokenizer_max_length text_max_length",
    "preprocess.decode_workers": "preprocess.num_workers preprocess.workers map_num_proc",
    "preprocess.encode_batch": "vae_batch_size caching_batch_size preprocess.batch_size vae.batch_size",
    "preprocess.text_batch": "text_encoder_batch_size text.batch_size",
    # models
    "model.pretrained": "pretrained_model_name_or_path model_name_or_path base_model pretrained_model model_path model_id ckpt_path "
    "model.path model.name model.checkpoint model.id hf_assets_path",
    "model.weights": "transformer_path dit dit_path",
    "model.kind": "model.type model.arch model.architecture",
    "model.size": "flavor model_flavour model_size model.variant model.preset size",
    "model.shape": "flavor model_size model.name model.preset model.size",
    "model.width": "hidden_size hidden_dim d_model embed_dim",
    "model.hidden_size": "hidden_dim d_model embed_dim n_embd",
    "model.depth": "num_layers n_layers num_hidden_layers num_blocks",
    "model.num_hidden_layers": "num_layers n_layers n_layer",
    "model.heads": "num_heads n_heads num_attention_heads",
    "model.num_attention_heads": "num_heads n_heads n_head",
    "model.num_key_value_heads": "num_query_groups n_kv_heads num_kv_heads",
    "model.head_dim": "kv_channels",
    "model.intermediate_size": "ffn_hidden_size ffn_dim",
    "model.num_experts": "n_experts n_routed_experts num_local_experts",
    "model.num_experts_per_tok": "moe_router_topk",
    "model.tie_word_embeddings": "untie_embeddings_and_output_weights",
    "model.patch": "patch_size",
    "model.adapter": "adapter adapters lora lora_config peft peft_config network",
    "model.adapter.kind": "adapter_type adapter_name lora_type network_module network_type model_type",
    "model.adapter.rank": "lora_rank lora_r lora_dim network_dim network_rank adapter_rank rank model.adapter.r model.adapter.dim "
    "model.adapter.linear",
    "model.adapter.alpha": "lora_alpha network_alpha adapter_alpha alpha model.adapter.linear_alpha",
    "model.adapter.rslora": "use_rslora lora_use_rslora rs_lora",
    "model.adapter.targets": "target_modules lora_target_modules lora_target lora_targets lora_layers lora_modules",
    "model.base.dtype": "base_model_precision transformer_dtype base_dtype quantize quantization fp8_base fp8_scaled load_in_8bit "
    "model.base.precision",
    "model.base.place": "blocks_to_swap block_swap memory.blocks_to_swap",
    # texts
    "texts.sources": "dataset datasets dataset_name data_path train_files",
    "texts.sources.column": "dataset_text_field text_column text_field text_key",
    "texts.sources.repeats": "num_repeats",
    "texts.cache": "cache_dir data_cache_path",
    "texts.validation": "val_split validation_split eval_split split",
    "tokenizer.path": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model",
    "sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length max_position_embeddings block_size context_length",
    "packing": "sample_packing",
    # objectives
    "objective.kind": "objective.type objective.name",
    "objective.prediction": "prediction_type",
    "objective.shift": "flow_shift discrete_flow_shift flow_schedule_shift timestep_shift sample.shift",
    "objective.timesteps": "timestep_sampling timestep_sample_method weighting_scheme",
    "objective.range": "min_timestep max_timestep",
    "objective.boundary": "timestep_boundary boundary_ratio",
    "objective.min_snr_gamma": "snr_gamma",
    "objective.balance": "moe_aux_loss_coeff router_aux_loss_coef",
    # training
    "train": "training trainer",
    "train.lr": "learning_rate base_lr peak_lr max_lr",
    "train.steps": "steps max_steps max_train_steps train_steps num_steps total_steps train_iters max_iters epochs num_epochs "
    "num_train_epochs max_train_epochs max_epochs",
    "train.batch_size": "batch batch_size train_batch_size global_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size micro_batch_size_per_gpu local_batch_size gradient_accumulation_steps "
    "gradient_accumulation grad_accum grad_accum_steps",
    "train.optimizer": "optim optimizer_type optimizer_name",
    "train.warmup_steps": "warmup lr_warmup lr_warmup_steps lr_warmup_iters num_warmup_steps warmup_iters warmup_ratio lr_warmup_fraction",
    "train.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style decay_type",
    "train.decay_share": "decay_ratio",
    "train.min_lr_ratio": "min_lr lr_min min_lr_factor",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "train.eps": "adam_epsilon adam_eps epsilon",
    "train.weight_decay": "adam_weight_decay",
    "train.clip_norm": "max_grad_norm gradient_clipping clip_grad grad_clip max_norm clip_grad_norm",
    "train.caption_dropout": "caption_dropout_probability caption_dropout_rate proportion_empty_prompts",
    "train.ema_decay": "ema use_ema",
    "train.compile": "torch_compile compile",
    "train.start_from": "init_from load_from init_from_existing initial_load_path lora_path lora_weights init_lora network_weights",
    "train.log_every": "logging logging_steps log_interval log_freq log_steps steps_per_print",
    "train.prefetch": "prefetch_factor dataloader_prefetch_factor",
    "train.loader_workers": "num_workers dataloader_num_workers max_data_loader_n_workers",
    "train.watchdog": "ddp_timeout distributed_timeout_minutes",
    # checkpoints, validation, samples
    "checkpoint.every": "save_every save_steps save_interval save_every_n_steps save_every_n_epochs checkpointing_steps "
    "checkpoint_every_n_epochs checkpoint_every_n_minutes checkpoint_step_interval checkpoint.interval checkpoint.steps",
    "checkpoint.keep_last": "save_total_limit checkpoints_total_limit keep_latest_k save_last_n_epochs save_last_n_steps",
    "checkpoint.keep_best": "load_best_model_at_end",
    "checkpoint.asynchronous": "async_mode async_save",
    "validate": "validation evaluation eval val",
    "validate.every": "eval_steps eval_every eval_interval eval_every_n_steps eval_every_n_epochs validation_steps validation_step_interval "
    "sample_every_n_steps sample_every_n_epochs sample.every validate.steps validate.interval validate.freq",
    "validate.prompts": "prompt validation_prompt validation_prompts sample_prompts sample.prompt sample.prompts",
    "validate.samples": "eval_iters num_eval_images max_eval_samples",
    "validate.seed": "validation_seed sample.seed",
    "sample": "sampling inference",
    "sample.steps": "num_inference_steps inference_steps sampling_steps validation_num_inference_steps",
    "sample.guidance": "guidance_scale cfg_scale validation_guidance",
    "sample.guidance_rescale": "validation_guidance_rescale",
    "sample.negative_prompt": "validation_negative_prompt",
    "sample.sampler": "sample.scheduler validation_noise_scheduler",
    "sample.frames": "validation_num_video_frames sample.num_frames sample.video_length",
    "sample.height": "validation_resolution sample.resolution sample.size",
    "sample.width": "validation_resolution sample.resolution sample.size",
    # devices and memory
    "parallel": "parallelism distributed",
    "parallel.strategy": "fsdp ddp deepspeed fsdp_config sharding_strategy",
    "parallel.dp_replicate": "data_parallel_replicate_degree dp",
    "parallel.dp_shard": "data_parallel_shard_degree dp data_parallel data_parallel_size",
    "parallel.tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "parallel.ep_backend": "expert_parallel_comm_backend moe_flex_dispatcher_backend",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree",
    "parallel.schedule": "pipeline_schedule pipeline_parallel_schedule",
    "parallel.stages": "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage partition_method",
    "parallel.virtual": "virtual_pipeline_model_parallel_size num_virtual_stages",
    "parallel.etp": "expert_tensor_parallel_size",
    "parallel.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "parallel.ring": "cp context_parallel context_parallel_size context_parallel_degree",
    "parallel.ulysses": "sp sequence_parallel sequence_parallel_size ulysses_degree",
    "memory.activation_policy": "gradient_checkpointing activation_checkpointing activation_checkpoint recompute recompute_granularity "
    "offload cpu_offload",
    "memory.states": "offload_optimizer optimizer_cpu_offload",
    "memory.ema": "ema_device ema_cpu_only",
    "memory.empty_cache": "torch_empty_cache_steps",
    "device.kind": "accelerator device_type device.type",
    "device.dtype": "mixed_precision precision dtype weight_dtype torch_dtype bf16 fp16",
    # trackers
    "trackers": "report_to log_with wandb tensorboard enable_wandb enable_tensorboard use_wandb tracker monitoring tracking.wandb",
    "tracking.project": "wandb_project tracker_project_name project_name project wandb_tracker_name",
    "tracking.run": "tracker_run_name wandb_run_name tracking.name",
}
ANYWHERE = ("train", "data", "model")
_KEYS: dict[str, list[str]] = {}
for _key, _words in SYNONYMS.items():
    for _word in _words.split():
        _KEYS.setdefault(_word, []).append(_key)


def meanings(path: str) -> list[str]:
    """The keys that a dotted path of another trainer may mean, those of its own section alone where there are any."""
    path = plain(path)
    section, _, word = path.rpartition(".")
    top = section.split(".")[0]
    keys = _KEYS.get(path) or [
        key for key in _KEYS.get(word, ()) if top in ("", *ANYWHERE) or key.startswith(f"{top}.")
    ]
    return [key for key in keys if key.rpartition(".")[0] == section] or keys


def plain(word: str) -> str:
    """A word as keys are written: `--Learning-rate` is `learning_rate`."""
    return word.lstrip("-").lower().replace("-", "_")
