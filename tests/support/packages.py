"""Tiny packages as an installer leaves them: modules, and a .dist-info folder with their entry points."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

# the character task in a package of its own: all that it needs beside its code is the line in its pyproject.toml
CHARACTERS_PACKAGE = """
from tests.support.characters import CharacterConfig, CharacterDomain


class PackagedTask(CharacterDomain):
    config_class = CharacterConfig
"""
CHARACTERS_PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "character-pack"
version = "0.3"

[project.entry-points."mmspeed.tasks"]
characters = "character_pack:PackagedTask"

[tool.setuptools]
py-modules = ["character_pack"]
"""


def install(
    folder: Path,
    name: str,
    entries: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    version: str = "1.0",
    group: str = "mmspeed.tasks",
) -> Path:
    """Lay a package into `folder`: its modules by name, and the entry points of a group as "module:class" by name."""
    for module, text in (modules or {}).items():
        (folder / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"{task} = {value}" for task, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]), encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")
    return folder
