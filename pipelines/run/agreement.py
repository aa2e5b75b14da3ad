"""Comparison of all ranks of a run before its first step: one config, one code, one data set, the same weights.

Ranks of torchrun or of a job array may each read another config file, another checkout or another copy of a cache. Without a
comparison they would train together in silence, or wait for one another for ever.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import comm, version
from mmspeed.config import RunConfig
from mmspeed.config.leaves import flat
from mmspeed.device import Device
from mmspeed.errors import UserError, first_names
from mmspeed.loop.checkpoint.seals import chunk_digest
from mmspeed.parallel import unwrap
from mmspeed.torch_internals import is_sharded

NAMED = 4  # keys, and ranks, that a message names
LONGEST = 60  # characters of a value in a message


def run_facts(config: RunConfig, device: Device) -> dict[str, str]:
    """The facts that ranks must share before they exchange anything, by dotted key: config, code, libraries and kind of device.

    Keys that the config's class declares `machine_local` are left out, and of its `machine_paths` only the last part counts, since
    nodes may mount one folder in several places.
    """
    local = set(config.machine_local)
    facts = {
        key: _last_part(value) if _pattern(key) in config.machine_paths else value
        for key, value in flat(config.model_dump(mode="json", by_alias=True)).items()
        if _pattern(key) not in local
    }
    facts |= {
        "mmspeed": json.dumps(f"{version.__version__} ({source_digest()[:12]})"),
        "torch": json.dumps(torch.__version__),
        "python": json.dumps(".".join(platform.python_version_tuple()[:2])),
        "kind of device": json.dumps(device.kind),
        "backend": json.dumps(" ".join([device.backend, *device.library_versions()])),
    }
    return facts


def require_agreement(own: Mapping[str, str], advice: str) -> None:
    """Raise UserError on every rank where the facts of ranks differ; the message names ranks, hosts and keys. A collective call.

    `own`: this rank's facts, as of `flat`; `advice` ends the message. Only digests travel where all agree.
    """
    if comm.alone():
        return
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(comm.all_gather_objects(digest))) == 1:
        return
    first = comm.broadcast_object(dict(own))
    differing = [key for key in [*first, *(key for key in own if key not in first)] if first.get(key) != own.get(key)]
    values = [[key, first.get(key), own.get(key)] for key in differing[:NAMED]]
    reports = comm.all_gather_objects([socket.gethostname(), len(differing), values])
    raise UserError(f"{_differences(reports)}; {advice}")


def tensor_facts(role: str, model: nn.Module, buffers_alone: bool = False) -> dict[str, str]:
    """Hash, number type and shape of each parameter and buffer of a model by `role.name`, or of its buffers alone.

    All bytes are hashed on the CPU. Tensors on the meta device and shards have no whole value here and are left out.
    """
    bare = unwrap(model)
    named = [*([] if buffers_alone else bare.named_parameters()), *bare.named_buffers()]
    return {
        f"{role}.{name}": tensor_fact(tensor) for name, tensor in named if not (tensor.is_meta or is_sharded(tensor))
    }


def tensor_fact(tensor: Tensor) -> str:
    """The fact of one tensor, in JSON: the start of its XXH3-128 hash, its number type and its shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return json.dumps(f"{chunk_digest(tensor)[:16]} ({dtype} {list(tensor.shape)})")


class WeightsAgreement:
    """Comparison of the values that the models of all ranks start from.

    DistributedDataParallel would replace those of other ranks by rank 0's in silence, and sharding mix the shards of all. So they are
    compared while each rank has them whole: as they were built, or as they are drawn. A process alone hashes nothing.
    """

    def __init__(self, staged: bool = False) -> None:
        self._drawn: dict[str, str] = {}
        self._staged = staged  # ranks hold other parameters

    def require_same_built(self, models: Mapping[str, nn.Module]) -> None:
        """Compare models by role before they are spread over ranks. Raises UserError on all ranks; a collective call."""
        if not comm.alone():
            self._require(
                {key: fact for role, model in models.items() for key, fact in tensor_facts(role, model).items()}
            )

    def add_drawn(self, name: str, value: Tensor) -> None:
        """Take note of the whole value of a parameter that came without one."""
        if not comm.alone():
            self._drawn[name] = tensor_fact(value)

    def require_same_drawn(self, models: Mapping[str, nn.Module]) -> None:
        """Compare the values taken note of, and all buffers. Raises UserError on all ranks; a collective call."""
        if not comm.alone():
            facts = dict(self._drawn)
            for role, model in models.items():
                facts |= tensor_facts(role, model, buffers_alone=True)
            self._require(facts)

    def _require(self, facts: Mapping[str, str]) -> None:
        known: dict[str, str] = {}
        for others in comm.all_gather_objects(dict(facts)) if self._staged else ():
            known = others | known
        require_agreement(known | dict(facts), "give all of them the same code and the same files of weights")


def _differences(reports: list[Any]) -> str:
    """The sentence about all ranks that differ from rank 0.

    `reports` of each rank: its host, the number of differing keys, and (key, value of rank 0, own value) of the first of them.
    """
    others = [(rank, *report) for rank, report in enumerate(reports) if report[1]]
    groups: dict[str, list[str]] = {}  # ranks by how they differ
    for rank, host, count, values in others:
        more = f" and {count - len(values)} more" if count > len(values) else ""
        differs = ", ".join(f"{key} is {_shown(own)}, not {_shown(first)}" for key, first, own in values) + more
        groups.setdefault(differs, []).append(f"{rank} ({host})")
    parts = []
    for differs, ranks in list(groups.items())[:NAMED]:
        parts.append(f"on rank {first_names(ranks, NAMED)} {differs}")
    left = f"; and {len(groups) - NAMED} more kinds of difference" if len(groups) > NAMED else ""
    return f"the ranks of this run differ from rank 0 ({reports[0][0]}): {'; '.join(parts)}{left}"


@functools.cache
def source_digest() -> str:
    """A digest of the package's Python files, so that two checkouts of one version differ."""
    root = Path(version.__file__).parent
    total = hashlib.sha256()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for path in (Path(folder) / name for name in sorted(names) if name.endswith(".py")):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _pattern(key: str) -> str:
    """The key with `*` for each place in a list."""
    return ".".join("*" if part.isdigit() else part for part in key.split("."))


def _last_part(value: str) -> str:
    path = json.loads(value)
    return json.dumps(PurePath(path).name) if isinstance(path, str) and PurePath(path).is_absolute() else value


def _shown(value: str | None) -> str:
    if value is None:
        return "unset"
    text = value.strip('"')
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
