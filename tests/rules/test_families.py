"""No family of published models is named in the code outside of its file, the registries, plans and codecs."""

from __future__ import annotations

import ast

from mmspeed.models.families import FAMILIES
from tests.rules.sources import CODE, docstrings, name, nodes, python_files, syntax

# codecs have classes of their own; short names are known without loading a family
OWN = ("models/families/", "models/diffusers/", "models/codecs/", "mmspeed/config/known_models.py")
# files with a message that names official pipelines a user may take instead
MESSAGES = ("pipelines/inference/text_to_video.py",)
DEMOS = ("mmspeed/cli/demo_adapter.py",)  # makes a small model of one family


def _words(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of strings other than docstrings, names, attributes and imported modules."""
    texts, results = docstrings(tree), []
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            results.append((node.lineno, node.value))
        elif isinstance(node, ast.Name):
            results.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            results.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom):
            results += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return results


def _named(text: str) -> bool:
    """True for a text that names the class of a published family, its module, or is its name."""
    published = [family for family in FAMILIES.values() if not family.seeded]
    modules = {type(family.call).__module__ for family in published}
    calls = {type(family.call).__name__ for family in published}
    names = {family.name for family in published} | {each for family in published for each in family.published}
    return (
        text in names
        or any(family.transformer in text for family in published)
        or any(text == module or text.startswith(f"{module}.") for module in modules)
        or text in calls
    )


def test_no_family_is_named_elsewhere() -> None:
    files = [
        path for path in python_files(*CODE) if not name(path).startswith(OWN) and name(path) not in MESSAGES + DEMOS
    ]
    assert len(files) > 200
    results = [f"{name(path)}:{line}: {text}" for path in files for line, text in _words(syntax(path)) if _named(text)]
    assert results == []


def test_a_name_is_noticed() -> None:
    code = '"""Wan, WanTransformer3DModel."""\nif kind == "wan" or name == "MochiTransformer3DModel": WanCall()\n'
    code += "from mmspeed.models.families.wan import WanCall\n"
    assert len([text for _, text in _words(ast.parse(code)) if _named(text)]) == 4


# rooms that know models by their families' calls and by protocols alone; benches are of our own model
ROOMS = ("pipelines/", "preprocess/", "mmspeed/loop/", "mmspeed/parallel/", "mmspeed/memory/", "mmspeed/data/")
OWN_SECTIONS = ("pipelines/domains/video/small.py",)  # makes the sections of small models of our own


def test_no_room_asks_for_our_own_class() -> None:
    """SoraDiT is a family like others: no `isinstance` of it, and no import of its class, in what trains, samples and prepares."""
    own = [family.transformer for family in FAMILIES.values() if family.seeded]
    assert own == ["SoraDiT"]
    files = [path for path in python_files(*CODE) if name(path).startswith(ROOMS) and name(path) not in OWN_SECTIONS]
    assert len(files) > 100
    results = [
        f"{name(path)}:{line}: {text}"
        for path in files
        for line, text in _words(syntax(path))
        if any(text == kind or text.endswith(f".{kind}") for kind in own)
    ]
    assert results == []
