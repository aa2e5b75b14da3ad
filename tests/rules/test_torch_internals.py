"""Names of torch that begin with an underscore are in mmspeed/torch_internals.py, each of whose own names is tested."""

from __future__ import annotations

import ast

import torch

from .sources import CODE, ROOT, nodes, offenders, python_files, syntax

HOME = ROOT / "mmspeed" / "torch_internals.py"
TESTS = ROOT / "tests" / "unit" / "test_torch_internals.py"

# attributes of torch's objects, which no import gives away
KNOWN = {
    *("_version", "_base", "_cdata", "_weak_ref", "_new_with_weak_ptr", "_free_weak_ref"),  # tensors, storages
    *("_schema", "_overloadpacket", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks"),
    *("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups", "_orig_dtype", "_local_tensor", "_spec"),
    *("_workers", "_shutdown_workers", "_pcontext"),  # loaders, the launcher
    *("_record_memory_history", "_snapshot", "_MemRefType", "_disable_dynamo"),
    *("_mod_tracker", "_track", "_peak_mem", "_update_peak_stats", "_update_and_maybe_create_winfos"),
    *("_fw_pre_hook", "_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook"),  # of the memory tracker
}


def hidden(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def of_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def root_of(node: ast.expr) -> str:
    """The name with which a chain of attributes and calls begins; empty for other expressions."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.Module) -> tuple[set[str], list[str]]:
    """The names that a file has from torch, and the underscored ones that it imports."""
    names, results = set(), []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            of = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            of = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for path, bound in of:
            if of_torch(path):
                names.add(bound)
                results += [f"{node.lineno}: {path}"] * any(map(hidden, path.split(".")))
    return names, results


def names_operator(text: str) -> bool:
    """Whether a string is the name of an underscored attribute of torch, or of an underscored operator."""
    bare = text.removeprefix("torch.ops.").removeprefix("aten.")
    if not hidden(bare) or not bare.isidentifier():
        return False
    return bare in KNOWN or (bare != "_backward" and hasattr(torch.ops.aten, bare))  # that one ends names of our own


def underscored(tree: ast.Module) -> list[str]:
    """Every use of an underscored name of torch in a file, with its line."""
    names, results = imported(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and hidden(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if root_of(node.value) in names or (node.attr in KNOWN and not own):
                results.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and names_operator(node.value):
            results.append(f"{node.lineno}: {node.value!r}")
    return results


def test_underscored_names_of_torch_are_in_one_file() -> None:
    others = [path for path in python_files(*CODE) if path != HOME]
    assert offenders(others, lambda path: underscored(syntax(path))) == {}


def test_they_are_seen() -> None:
    """Imports, attributes of what is imported, known ones of any object, and names in strings."""
    code = (
        "import torch as t, torch._dynamo\nfrom torch.utils import _pytree as tree\nfrom torch import Tensor as T\n"
        "t.ops.aten._softmax(a); T._make_subclass; t.zeros(1)._base_of; x.untyped_storage()._cdata\n"
        "getattr(group, '_orig_dtype'); text == 'aten._softmax'"
    )
    assert len(underscored(ast.parse(code))) == 8


def test_own_names_are_let_be() -> None:
    text = (
        "import torch\nfrom .a import _b\nself._version\nother._mine\ntorch.__version__\nx['_']\n'_diffusers_version'"
    )
    assert underscored(ast.parse(text)) == []


def test_each_name_is_tested() -> None:
    uses = [node for node in nodes(syntax(TESTS)) if isinstance(node, ast.Attribute)]
    tested = {node.attr for node in uses if ast.unparse(node.value) == "internals"}
    offered = {node.name for node in syntax(HOME).body if isinstance(node, ast.FunctionDef)}
    offered |= {"FakeTensorMode", "TorchDispatchMode", "disable_dynamo", "is_traceable_wrapper_subclass"}
    offered |= {"tree_leaves", "tree_map_only", "MATMUL_NAMES", "ATTENTION_NAMES", "CPU_FLASH"}
    assert offered <= tested
