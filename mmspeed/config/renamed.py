"""Config keys and values that earlier versions of mmspeed named differently.

A user's file with one of them is refused, with an error that names the new key. Records that mmspeed wrote itself (the config in a run
folder or a cache, settings of measurements, chosen policies) are translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from mmspeed.errors import UserError

# old dotted key -> new dotted key; several old keys may map to one
RENAMED: dict[str, str] = {
    "memory.spans": "memory.activation_policy",
    "memory.swap_from": "memory.offload_from",
    "train.checkpointing": "memory.activation_policy",
    "parallel.scheme": "parallel.dsp",
}
POLICIES: dict[str, str] = {
    "swap": "offload",
    "swap_cheap": "offload_selective",
    "recompute_cheap": "selective",
    "discard": "recompute_output",
}
# the keys beside `dsp` of a run that only re-shards tokens: its double ring never ran, so it has none today
RESHARDED: dict[str, int | None] = {"ring": 1, "ulysses": 1, "ring_window": None}
# further text of the error about a key
_HINTS = {
    "memory.spans": f" ({', '.join(f'{old} is {new}' for old, new in POLICIES.items())})",
    "train.checkpointing": ": write `{block: recompute}` there for true, and nothing for false",
    "parallel.scheme": (
        ": for `switch` write `dsp` in place of `ulysses` and `ring`; for `ulysses` leave it out, and those run as they say"
    ),
}


def renamed_policies(policies: Mapping[str, Any]) -> dict[str, Any]:
    """The policy of each region, by today's names."""
    return {region: _today(policy) for region, policy in policies.items()}


def renamed_value(key: str, value: Any) -> Any:
    """The new key's value for an old key's value; None if the new key is left out."""
    if key == "train.checkpointing":
        return {"block": "recompute"} if value is True else None
    if key == "memory.spans" and isinstance(value, Mapping):
        return renamed_policies(value)
    if key == "parallel.scheme":  # gives the degrees beside it their meaning: `degrees_today` reads it
        return None
    return value


def translated(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A recorded config (nested sections) in today's keys and values, and the old keys in it."""
    tree: dict[str, Any] = deepcopy(dict(record))
    objective = tree.get("objective")
    if isinstance(objective, Mapping) and "weighting" not in objective:  # each step counted alike before it had a name
        tree["objective"] = {**objective, "weighting": "step"}
    old_keys = [key for key in RENAMED if _section(tree, key) is not None]
    parallel = tree.get("parallel")
    if isinstance(parallel, Mapping) and "dsp" not in parallel:
        tree["parallel"] = {**parallel, **degrees_today(parallel, attends_over_all(tree))}
        if tree["parallel"].get("dsp", 1) != 1 and "parallel.scheme" not in old_keys:
            old_keys.append("parallel.scheme")
    objective = tree.get("objective")
    if isinstance(objective, Mapping) and trains_no_noise(objective):
        tree["objective"] = {**objective, "allow_zero_weight": True}
    for key in (key for key in old_keys if _section(tree, key) is not None):
        section, name = _parts(key)
        value = renamed_value(key, tree[section].pop(name))
        if value is not None:
            new_section, new_name = _parts(RENAMED[key])
            tree.setdefault(new_section, {})[new_name] = value
    return tree, old_keys


def translated_setting(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded setting, a flat mapping of dotted keys, in today's keys and values."""
    today = {key: value for key, value in setting.items() if key not in RENAMED}
    for key in RENAMED:
        if key in setting and (value := renamed_value(key, setting[key])) is not None:
            today[RENAMED[key]] = value
    parallel = {key.removeprefix("parallel."): value for key, value in setting.items() if key.startswith("parallel.")}
    if "scheme" in parallel:
        degrees = degrees_today(parallel, setting.get("model.arrangement") == "full")
        today |= {"parallel.dsp": 1} | {
            f"parallel.{key}": size for key, size in degrees.items() if key != "ring_window"
        }
    return today


def trains_no_noise(objective: Mapping[str, Any]) -> bool:
    """True for a recorded objective with min-SNR weights that are 0 at pure noise, of a version that took them unasked."""
    return (
        objective.get("kind") == "ddpm"
        and objective.get("min_snr_gamma") is not None
        and objective.get("zero_terminal_snr", True) is True
        and objective.get("prediction", "v") == "v"
        and "allow_zero_weight" not in objective
    )


def attends_over_all(record: Mapping[str, Any]) -> bool:
    """True for a recorded config whose model has no spatial and temporal blocks to re-shard tokens between."""
    model, usual = record.get("model"), "factorised" if record.get("task", "video") == "video" else "full"
    return (model.get("arrangement", usual) if isinstance(model, Mapping) else usual) == "full"


def degrees_today(parallel: Mapping[str, Any], full: bool) -> dict[str, Any]:
    """The degrees that a parallel section without `dsp` meant for a model, `full` or factorised; empty if they are unchanged.

    In earlier versions, `ring` x `ulysses` of a factorised model was the number of parts between which tokens were re-sharded,
    unless `scheme` was `ulysses`.
    """
    ring, ulysses = (parallel.get(axis, 1) for axis in ("ring", "ulysses"))
    if (
        full
        or parallel.get("scheme", "switch") != "switch"
        or not isinstance(ring, int)
        or not isinstance(ulysses, int)
    ):
        return {}
    return {**RESHARDED, "dsp": ring * ulysses} if ring * ulysses > 1 else {}


def note(origin: str, keys: list[str]) -> str:
    """The log line about a record with old keys."""
    renames = ", ".join(f"{key} read as {RENAMED[key]}" for key in keys)
    return f"the config of {origin} is from an earlier mmspeed: {renames}"


def refuse_old(tree: Mapping[str, Any], origin: str) -> None:
    """Raise UserError for an old key or an old name of a policy in a user's config; the error names the new one."""
    for key, new in RENAMED.items():
        if _section(tree, key) is not None:
            raise UserError(f"{origin}: {key} is now {new}{_HINTS.get(key, '')}")
    memory = tree.get("memory")
    policies = memory.get("activation_policy") if isinstance(memory, Mapping) else None
    for region, policy in policies.items() if isinstance(policies, Mapping) else ():
        if _today(policy) != policy:
            raise UserError(f"{origin}: memory.activation_policy.{region}: {policy} is now {_today(policy)}")


def _today(policy: Any) -> Any:
    return POLICIES.get(policy, policy) if isinstance(policy, str) else policy


def _parts(key: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    return section, name


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """The section that holds a dotted key; None if the key is absent."""
    section, name = _parts(key)
    candidate = tree.get(section)
    return candidate if isinstance(candidate, Mapping) and name in candidate else None
