"""Settings of `accelerate launch`: each is obeyed, or refused with the key of the config to write instead.

The launcher hands its settings to the processes that it starts as environment variables, which `accelerate.Accelerator` would read.
mmspeed makes no Accelerator, so it reads them here. A default of the launcher asks for nothing: its variables do not tell a default
from the same value written by the user.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from mmspeed.errors import UserError

from .schema import RunConfig

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)

OPEN = ("auto", -1)  # values of keys that leave the choice to whoever starts the run
NOTHING = ("", "0", "false", "no", "none")  # values of variables that ask for nothing

# Variables that change nothing here, and why.
NEUTRAL: dict[str, str] = {
    "ACCELERATE_CONFIG_DS_FIELDS": "comes with DeepSpeed, which is refused",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "comes with SageMaker, which is refused",
    "FSDP_VERSION": "parameters are sharded by FSDP2 either way, with the same results",
    "FSDP_MIN_NUM_PARAMS": "read with SIZE_BASED_WRAP alone, which is refused",
    "FSDP_STATE_DICT_TYPE": "checkpoints are mmspeed's own, which any number of processes reads",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "each process draws or reads its own shards alone",
    "FSDP_SYNC_MODULE_STATES": "weights are equal on all processes by their names",
    "PARALLELISM_CONFIG_CP_BACKEND": "the ring is mmspeed's own, with the same results",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "the ring is mmspeed's own, with the same results",
    "PARALLELISM_CONFIG_SP_BACKEND": "Ulysses is mmspeed's own, with the same results",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "the buckets decide on lengths",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "the buckets decide on lengths",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "attention takes the fastest kernel of the device",
}

# Families of variables that only say more of a setting that is refused.
NEUTRAL_PREFIXES = ("ACCELERATE_FP8_", "ACCELERATE_DEEPSPEED_", "MEGATRON_LM_")


@dataclass(frozen=True)
class Refusal:
    """A setting without a counterpart. `allowed`: values in lower case that are no request; `instead`: what to do."""

    words: str
    instead: str
    allowed: tuple[str, ...] = NOTHING


REFUSED: dict[str, Refusal] = {
    "ACCELERATE_USE_DEEPSPEED": Refusal(
        "--use_deepspeed",
        "mmspeed shards by FSDP2; leave it out and write parallel.strategy: fsdp (as ZeRO 3), and memory.states: host for offloading",
    ),
    "ACCELERATE_USE_MEGATRON_LM": Refusal(
        "--use_megatron_lm", "leave it out and write parallel.tp, parallel.ulysses or parallel.ring in the config"
    ),
    "ACCELERATE_USE_SAGEMAKER": Refusal("SageMaker", "start the processes with torchrun"),
    "ACCELERATE_IN_TPU_POD": Refusal("--tpu", "mmspeed has no such device: device.kind names those that it has"),
    "ACCELERATE_DEBUG_MODE": Refusal(
        "--debug", "it checks accelerate's own exchanges; set TORCH_DISTRIBUTED_DEBUG=DETAIL for those of mmspeed"
    ),
    "ACCELERATE_CPU_AFFINITY": Refusal(
        "--enable_cpu_affinity", "start with `torchrun --numa-binding node`, which binds processes too"
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Refusal(
        "--gradient_accumulation_steps",
        "write train.micro_batch_size, or batching.accumulate with batching.by: tokens, flops or time",
        ("", "1", "none", "auto"),
    ),
    "ACCELERATE_GRADIENT_CLIPPING": Refusal("--gradient_clipping", "write train.clip_norm in the config"),
}

REFUSED_COMPILING: dict[str, Refusal] = {
    "ACCELERATE_DYNAMO_MODE": Refusal(
        "--dynamo_mode", "train.compile: true compiles in the default mode", ("", "default", "none")
    ),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": Refusal(
        "--dynamo_use_fullgraph", "train.compile: true compiles block by block, between exchanges"
    ),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": Refusal(
        "--dynamo_use_dynamic", "train.compile: true compiles for the shapes of the buckets"
    ),
}

REFUSED_SHARDING: dict[str, Refusal] = {
    "FSDP_SHARDING_STRATEGY": Refusal(
        "--fsdp_sharding_strategy",
        "write parallel.strategy: ddp for NO_SHARD, parallel.dp_replicate for hybrid sharding; other ways are not there",
        ("", "full_shard", "1", "none"),
    ),
    "FSDP_RESHARD_AFTER_FORWARD": Refusal(
        "--fsdp_reshard_after_forward",
        "mmspeed shards parameters again after forward; parallel.strategy: ddp keeps them whole",
        ("", "true", "full_shard", "none"),
    ),
    "FSDP_OFFLOAD_PARAMS": Refusal(
        "--fsdp_offload_params", "write memory.master: host and memory.states: host in the config"
    ),
    "FSDP_AUTO_WRAP_POLICY": Refusal(
        "--fsdp_auto_wrap_policy",
        "mmspeed shards block by block, as TRANSFORMER_BASED_WRAP",
        ("", "transformer_based_wrap", "none"),
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": Refusal(
        "--fsdp_transformer_layer_cls_to_wrap", "leave it out: the model's plan names its blocks"
    ),
    "FSDP_BACKWARD_PREFETCH": Refusal(
        "--fsdp_backward_prefetch", "FSDP2 prefetches as BACKWARD_PRE", ("", "backward_pre", "none")
    ),
    "FSDP_FORWARD_PREFETCH": Refusal("--fsdp_forward_prefetch", "FSDP2 prefetches by itself: leave it out"),
    "FSDP_USE_ORIG_PARAMS": Refusal(
        "--fsdp_use_orig_params", "FSDP2 always keeps the original parameters", ("", "true", "none")
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": Refusal(
        "--fsdp_activation_checkpointing", "write memory.activation_policy: {block: recompute} in the config"
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": Refusal(
        "--fsdp_activation_checkpointing_offload",
        "write memory.activation_policy: {block: offload_selective} in the config",
    ),
    "FSDP_IGNORED_MODULES": Refusal("--fsdp_ignored_modules", "all parameters that train are sharded: leave it out"),
}

# The key of section `parallel` that an axis of --use_parallelism_config is.
AXES = {"DP_REPLICATE": "dp_replicate", "DP_SHARD": "dp_shard", "TP": "tp", "CP": "ring", "SP": "ulysses"}

OBEYED = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    *(f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in AXES),
)


@dataclass(frozen=True)
class Wish:
    """A setting of the launcher, in the user's words, and the key and value of the config that it means."""

    words: str
    section: str
    key: str
    value: Any


def obey_launcher(config: AnyConfig, environ: Mapping[str, str] | None = None) -> AnyConfig:
    """The config with the settings of `accelerate launch`, read from `environ` (None: of this process); each change is logged in a line.

    Raises UserError for a setting that mmspeed does not have, with the key to write instead; where a key that the config sets says
    otherwise; and where the launcher was asked for several processes and started one.
    """
    environ = os.environ if environ is None else environ
    if not any(name.startswith("ACCELERATE_") for name in environ):
        return config
    _refuse(environ)
    changes: dict[str, dict[str, Any]] = {}
    lines = []
    for wish in _wishes(environ):
        section = getattr(config, wish.section)
        now = getattr(section, wish.key)
        if now == wish.value:
            continue
        if wish.key in section.model_fields_set and now not in OPEN:
            raise UserError(
                f"accelerate launch {wish.words} contradicts {wish.section}.{wish.key}: {_yaml(now)} of the config: change one of them"
            )
        changes.setdefault(wish.section, {})[wish.key] = wish.value
        lines.append(f"accelerate launch {wish.words}: {wish.section}.{wish.key} is {_yaml(wish.value)}")
    if not changes:
        return config
    changed = config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    )
    try:
        type(config).model_validate(changed.model_dump(by_alias=True))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{'; '.join(lines)}, which the config does not allow: {reason}") from None
    for line in lines:
        logging.getLogger("mmspeed.config").info(line)
    return changed


def accounted(name: str) -> bool:
    """True for a variable of the launcher that is obeyed, refused or neutral here."""
    tables = (OBEYED, REFUSED, REFUSED_COMPILING, REFUSED_SHARDING, NEUTRAL)
    return name.startswith(NEUTRAL_PREFIXES) or any(name in table for table in tables)


def _refuse(environ: Mapping[str, str]) -> None:
    """Raise UserError for the first setting without a counterpart."""
    table = dict(REFUSED)
    if _compiles(environ):
        table |= REFUSED_COMPILING
    if _true(environ, "ACCELERATE_USE_FSDP"):
        table |= REFUSED_SHARDING
    for name, refusal in table.items():
        value = environ.get(name, "")
        if value.lower() not in refusal.allowed:
            said = refusal.words if value.lower() in ("true", "1") else f"{refusal.words} {value}"
            raise UserError(f"accelerate launch {said} is not for mmspeed: {refusal.instead}")
    unknown = sorted(name for name in environ if name.startswith("ACCELERATE_USE_") and not accounted(name))
    for name in unknown:
        if _true(environ, name):
            flag = name.removeprefix("ACCELERATE_").lower()
            raise UserError(f"accelerate launch --{flag} is not for mmspeed: leave it out ({name} is set)")
    # accelerate leaves several processes on CPUs to MPI, and says so by their address alone
    if "ACCELERATE_USE_CPU" in environ and "MASTER_ADDR" in environ and "RANK" not in environ:
        raise UserError(
            "accelerate launch was asked for several processes and started one (on CPUs it leaves them to MPI): "
            "use --nproc N of mmspeed, or torchrun; for one process, unset MASTER_ADDR"
        )


def _wishes(environ: Mapping[str, str]) -> Iterator[Wish]:
    """Yield the settings of the launcher that the config has keys for. Raises UserError for a value without one."""
    if _true(environ, "ACCELERATE_USE_CPU"):
        yield Wish("--cpu", "device", "kind", "cpu")
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision == "bf16":
        yield Wish("--mixed_precision bf16", "device", "dtype", "bfloat16")
    elif precision not in NOTHING:
        raise UserError(
            f"accelerate launch --mixed_precision {precision} is not for mmspeed, which trains in float32 or bfloat16: "
            "use bf16, or write device.dtype: bfloat16 in the config"
        )
    if _compiles(environ):
        backend = environ["ACCELERATE_DYNAMO_BACKEND"].lower()
        if backend != "inductor":
            raise UserError(
                f"accelerate launch --dynamo_backend {backend} is not for mmspeed: train.compile: true compiles by inductor"
            )
        yield Wish("--dynamo_backend inductor", "train", "compile", True)
    if _true(environ, "ACCELERATE_USE_FSDP"):
        yield Wish("--use_fsdp", "parallel", "strategy", "fsdp")
    if _true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        for axis, key in AXES.items():
            size = environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")
            if not size.isdecimal() or int(size) < 1:
                raise UserError(f"PARALLELISM_CONFIG_{axis}_SIZE is {size!r}: give a number of devices, 1 or more")
            if int(size) > 1:
                yield Wish(f"--parallelism_config_{axis.lower()}_size {size}", "parallel", key, int(size))


def _compiles(environ: Mapping[str, str]) -> bool:
    return environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in NOTHING


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() not in NOTHING


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
