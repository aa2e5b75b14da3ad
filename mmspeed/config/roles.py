"""The roles that entries have in a sample, and the rule of each. A new role is a line of `ROLES`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Role:
    """The rule by which an entry is made and read.

    All but `video` and `caption` take the frames, the crop and the flip of the sample's video, and have as many entries as it has
    windows and crops: the one that a use of the sample draws is the same of all.

    Args:
        name: in `data.sources[].roles`, in the table of samples (`<name>_keys`), and in a batch (`<name>.latents`).
        section: of the cache.
        named: by a column of a manifest; False: it has a key of its own in the config, or comes with another role.
        drawn: a batch holds a draw from the codec's posterior, where one is stored; False: its mean.
        needs: roles that a source must have beside it.
        brings: roles that come with it.
    """

    name: str
    section: Literal["latents", "texts"] = "latents"
    named: bool = True
    drawn: bool = False
    needs: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()


ROLES = {
    role.name: role
    for role in (
        Role("video", named=False, drawn=True),
        Role("caption", section="texts", named=False),
        Role("control", brings=("blank",)),  # depth, poses, edges: what a generated video is to follow
        Role("blank", named=False),  # grey frames alone, of which models with a control take the latent, too
        Role("chosen", drawn=True, needs=("rejected",)),
        Role("rejected", drawn=True, needs=("chosen",)),
    )
}


def checked_roles(columns: dict[str, str]) -> None:
    """Raise ValueError for columns of roles that are unknown, not named by a column, without their partner, or blank."""
    known = [role.name for role in ROLES.values() if role.named]
    for name, column in columns.items():
        if name not in known:
            raise ValueError(f"{name!r} is no role: use {', '.join(known)}")
        if not column.strip():
            raise ValueError(f"the column of the role {name} is blank")
        if missing := [each for each in ROLES[name].needs if each not in columns]:
            raise ValueError(f"the role {name} is one of a pair: name the column of {missing[0]}, too")


def roles_of(named: Sequence[str]) -> tuple[str, ...]:
    """The roles of samples whose sources name these, in the order of the table, with those that come along."""
    present = {*named, *(each for name in named for each in ROLES[name].brings)}
    return tuple(name for name in ROLES if name in present)
