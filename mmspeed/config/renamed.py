"""Keys and values that earlier versions of mmspeed called otherwise.

A user's file with one of them is refused, by an error that names the new key. Records that mmspeed wrote itself (the config in a run
folder or a cache, settings of measurements, chosen policies) are translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from mmspeed.errors import UserError

# old dotted key -> new dotted key; several old keys may be one now
RENAMED: dict[str, str] = {
    "memory.spans": "memory.activation_policy",
    "memory.swap_from": "memory.offload_from",
    "train.checkpointing": "memory.activation_policy",
}
POLICIES: dict[str, str] = {
    "swap": "offload",
    "swap_cheap": "offload_selective",
    "recompute_cheap": "selective",
    "discard": "recompute_output",
}
# what else an error says of a key
_HINTS = {
    "memory.spans": f" ({', '.join(f'{old} is {new}' for old, new in POLICIES.items())})",
    "train.checkpointing": ": write `{block: recompute}` there for true, and nothing for false",
}


def renamed_policies(policies: Mapping[str, Any]) -> dict[str, Any]:
    """The policy of each region, in today's words."""
    return {region: _today(policy) for region, policy in policies.items()}


def renamed_value(key: str, value: Any) -> Any:
    """The value that the new key has for an old key's; None where the new key is left out."""
    if key == "train.checkpointing":
        return {"block": "recompute"} if value is True else None
    if key == "memory.spans" and isinstance(value, Mapping):
        return renamed_policies(value)
    return value


def translated(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A recorded config, of nested sections, in today's keys and values, and the old keys in it."""
    tree: dict[str, Any] = deepcopy(dict(record))
    found = [key for key in RENAMED if _section(tree, key) is not None]
    for key in found:
        section, name = _parts(key)
        value = renamed_value(key, tree[section].pop(name))
        if value is not None:
            new_section, new_name = _parts(RENAMED[key])
            tree.setdefault(new_section, {})[new_name] = value
    return tree, found


def translated_setting(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded setting, a flat mapping of dotted keys, in today's keys and values."""
    today = {key: value for key, value in setting.items() if key not in RENAMED}
    for key in RENAMED:
        if key in setting and (value := renamed_value(key, setting[key])) is not None:
            today[RENAMED[key]] = value
    return today


def note(origin: str, keys: list[str]) -> str:
    """The line about a record with old keys."""
    read = ", ".join(f"{key} read as {RENAMED[key]}" for key in keys)
    return f"the config of {origin} is of an earlier mmspeed: {read}"


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
    """The section that holds a dotted key; None where the key is not there."""
    section, name = _parts(key)
    found = tree.get(section)
    return found if isinstance(found, Mapping) and name in found else None
