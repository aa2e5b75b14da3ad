"""Settings of `accelerate launch`: every variable that the installed launcher sets is obeyed, refused or known to change nothing."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import Config, obey_launcher
from mmspeed.config.launcher import NEUTRAL, accounted
from mmspeed.errors import UserError
from tests.support.runs import small_config

FSDP2 = ("--use_fsdp", "--fsdp_version", "2")
SIZES = tuple(f"--parallelism_config_{axis}_size={size}" for axis, size in (("cp", 2), ("sp", 4), ("dp_replicate", 3)))


def launched(monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, str]:
    """The environment that accelerate's own code makes from the flags of a launch."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    for name in ("MASTER_ADDR", "RANK", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "is_port_in_use", lambda port: False)  # a parallel test may hold it
    args = launch_command_parser().parse_args([*flags, "--num_machines", "1", "-m", "mmspeed", "train", "run.yaml"])
    args, _, _ = _validate_launch_command(args)
    several = not args.cpu and (args.use_fsdp or args.multi_gpu or args.use_megatron_lm)
    if several:
        return dict(launch.prepare_multi_gpu_env(args)) | {"RANK": "0"}
    return dict(launch.prepare_simple_launcher_cmd_env(args)[1])


def changed(config: Config, other: Config) -> dict[str, Any]:
    """The keys whose values differ, dotted."""
    before, now = config.model_dump(), other.model_dump()
    return {
        f"{section}.{key}": value
        for section, keys in now.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if before[section][key] != value
    }


def test_every_variable_of_the_installed_launcher_is_accounted_for() -> None:
    from accelerate.utils import launch

    names, prefix = set(), ""
    for line in inspect.getsource(launch).splitlines():
        if match := re.search(r'prefix = "(\w+)"', line):
            prefix = match[1]
        for joined, name in re.findall(r'(?:current_env|environment)\[(prefix \+ )?"(\w+)"\]', line):
            names.add(prefix + name if joined else name)
        names |= set(re.findall(r'"(ACCELERATE_\w+)":', line))
    ours = {name for name in names if name.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_"))}
    assert len(ours) > 60  # the expressions still read accelerate's source
    assert {name for name in ours if not accounted(name)} == set()
    assert set(NEUTRAL) <= ours, "a variable that the launcher no longer sets"


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ((), {}),
        (("--mixed_precision", "bf16"), {"device.dtype": "bfloat16"}),
        (("--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"), {"train.compile": True}),
        (("--use_fsdp",), {"parallel.strategy": "fsdp"}),
        (
            (*FSDP2, "--use_parallelism_config", *SIZES),
            {"parallel.strategy": "fsdp", "parallel.ring": 2, "parallel.ulysses": 4, "parallel.dp_replicate": 3},
        ),
    ],
)
def test_flags_that_are_obeyed(
    flags: tuple[str, ...], keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    environ = launched(monkeypatch, *flags, "--num_processes", "2" if "--use_fsdp" in flags else "1")
    obeyed = obey_launcher(config, environ)
    assert changed(config, obeyed) == keys
    assert obey_launcher(obeyed, environ) is obeyed  # a second look changes and says nothing


def test_cpu_of_the_launcher_is_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, "device.kind=auto")
    environ = launched(monkeypatch, "--cpu", "--num_processes", "1")
    assert changed(config, obey_launcher(config, environ)) == {"device.kind": "cpu"}
    with pytest.raises(UserError, match=r"--cpu contradicts device\.kind: cuda of the config"):
        obey_launcher(small_config(tmp_path, "device.kind=cuda"), environ)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--mixed_precision", "fp16"), r"--mixed_precision fp16 .*device\.dtype: bfloat16"),
        (("--dynamo_backend", "eager"), r"--dynamo_backend eager .*train\.compile: true"),
        (("--use_fsdp", "--fsdp_sharding_strategy", "NO_SHARD"), r"parallel\.strategy: ddp"),
        (("--use_fsdp", "--fsdp_offload_params", "true"), r"--fsdp_offload_params is not .*memory\.states: host"),
        (("--use_fsdp", "--fsdp_activation_checkpointing", "true"), r"activation_policy: \{block: recompute\}"),
        (("--use_megatron_lm",), r"--use_megatron_lm is not .*parallel\.tp"),
        (("--enable_cpu_affinity",), "--numa-binding node"),
        (("--cpu", "--num_processes", "2"), "asked for several processes and started one"),
    ],
)
def test_flags_that_are_refused(
    flags: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = () if "--num_processes" in flags else ("--num_processes", "2" if flags[0].startswith("--use") else "1")
    with pytest.raises(UserError, match=line):
        obey_launcher(small_config(tmp_path), launched(monkeypatch, *flags, *count))


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("ACCELERATE_USE_DEEPSPEED=true", r"--use_deepspeed is not for mmspeed: .*parallel\.strategy: fsdp"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", r"--gradient_accumulation_steps 4 .*train\.micro_batch_size"),
        ("ACCELERATE_USE_NEWTHING=true", "--use_newthing is not for mmspeed: leave it out"),
    ],
)
def test_variables_that_are_refused(variable: str, line: str, tmp_path: Path) -> None:
    name, value = variable.split("=")
    with pytest.raises(UserError, match=line):
        obey_launcher(small_config(tmp_path), {name: value})


def test_what_the_config_sets_is_not_overruled(tmp_path: Path) -> None:
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    with pytest.raises(UserError, match=r"--mixed_precision bf16 contradicts device\.dtype: float32 of the config"):
        obey_launcher(small_config(tmp_path, "device.dtype=float32"), bf16)
    same = small_config(tmp_path, "device.dtype=bfloat16")
    assert obey_launcher(same, bf16) is same
    assert obey_launcher(same, {"ACCELERATE_MIXED_PRECISION": "no"}) is same  # the launcher's default, not a wish


def test_a_wish_that_other_keys_rule_out_is_refused(tmp_path: Path) -> None:
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    config = small_config(tmp_path, "memory.budget=60GiB")
    with pytest.raises(
        UserError, match=r"--dynamo_backend inductor: train\.compile is true, which the config does not"
    ):
        obey_launcher(config, compiled)
