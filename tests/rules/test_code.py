"""What the code must not do: name vendors, read pickles, or ask models for what no protocol declares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .sources import CODE, docstrings, name, nodes, offenders, python_files, syntax, text_files

FILES = python_files(*CODE, "tests/claims")

VENDORS = re.compile(r"\b(cuda|npu|nccl|hccl|torch_npu|cudnn|cublas)\b", re.IGNORECASE)

# Where a vendor may be named: the device file, the choices of `device.kind` with their sentences in the schema, the checks of an
# Ascend installation, the backend files of compute and moe, which pick an operator by the kind of device, beside its eager twin; and the
# claim that runs other projects' readers, one of which asks for its device when it is imported.
VENDOR_FILES = {
    "mmspeed/device.py", "mmspeed/config/device.py", "mmspeed/compute/attention.py", "mmspeed/cli/ascend_checks.py",
    "mmspeed/moe/deepep.py",
    "tests/claims/adapter_readers.py",
}  # fmt: skip
BACKEND_FILE = re.compile(r"mmspeed/compute/((cuda|npu)\w*|sparse/kernels/(npu_kernels|triton_gather|varlen|flex))\.py")

# Calls that read or run what a stranger may have written, or that write pickles.
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "eval", "exec",
    "dist.all_gather_object", "dist.broadcast_object_list", "dist.gather_object", "dist.scatter_object_list",
}  # fmt: skip
# The bench that measures the `.pt` files of others writes such files itself, in its temporary folder, and reads only them.
BENCHED_CALLS = {
    "tests/claims/formats.py": {
        "torch.save(tensors, folder / f'{number}.pt')",
        "torch.load(folder / f'{number}.pt', weights_only=True)",
    }
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}

# Folders of single machines: homes, and the roots that people mount their work under.
MACHINE_PATH = re.compile(r"(?<![\w.~$])/(home|root|Users|work|mnt|workspace|private)/\w")


def vendor_names(tree: ast.Module) -> list[str]:
    """Vendors named in strings (docstrings apart), attributes, variables or imports, with their lines."""
    texts = docstrings(tree)
    results = []
    for node in nodes(tree):
        words: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words = [node.value]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            words = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        results += [f"line {node.lineno}: {word}" for word in words if VENDORS.search(word)]  # type: ignore[attr-defined]
    return results


def test_vendors_are_named_in_one_place() -> None:
    others = [path for path in FILES if name(path) not in VENDOR_FILES and not BACKEND_FILE.fullmatch(name(path))]
    assert offenders(others, lambda path: vendor_names(syntax(path))) == {}


def test_vendor_names_are_seen() -> None:
    code = 'x.to("cuda:0"); torch.cuda.synchronize(); f"{n} npu devices"; barracuda = 1\nimport torch_npu\nfrom torch.cuda import amp'
    assert len(vendor_names(ast.parse(code))) == 5 and vendor_names(ast.parse('"""Says cuda in a docstring."""')) == []


def forbidden(tree: ast.Module, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """Pickles and code from strings, with their lines; calls that are written exactly as one of `allowed` pass."""
    results = []
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node) in allowed:
                continue
            called = ast.unparse(node.func)
            unsafe = {"weights_only", "allow_pickle"} & {keyword.arg for keyword in node.keywords}
            if called in FORBIDDEN_CALLS or unsafe:
                results.append(f"line {node.lineno}: {called}")
        elif isinstance(node, ast.Import):
            results += [
                f"line {node.lineno}: {a.name}" for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            results.append(f"line {node.lineno}: {node.module}")
    return results


def test_no_pickles_and_no_code_from_strings() -> None:
    assert offenders(FILES, lambda path: forbidden(syntax(path), BENCHED_CALLS.get(name(path), set()))) == {}


def test_forbidden_calls_are_seen() -> None:
    code = "import pickle\nfrom pickle import loads\ntorch.load(p); yaml.load(t); eval(t); f(p, allow_pickle=True)"
    assert len(forbidden(ast.parse(code))) == 6
    assert forbidden(ast.parse("model.eval(); yaml.safe_load(t); safetensors.torch.load(b)")) == []


# Names of models and their parts, tasks and batches; folders that know no domain ask these only for what a protocol declares.
ASKED = {
    "model", "models", "net", "transformer", "module", "layer", "part", "block", "blocks", "task", "batch", "batches",
}  # fmt: skip
CORE = ("mmspeed/loop/", "mmspeed/parallel/", "mmspeed/memory/", "pipelines/")
DOMAINS = ("pipelines/domains/", "pipelines/check/", "pipelines/diffusion/", "pipelines/inference/")


def undeclared(tree: ast.Module) -> list[str]:
    """What mypy would take: `getattr`, `hasattr` and casts of a model, a task or a batch, and such a parameter of type Any."""
    results = []
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "cast") and node.args:
            asked = node.args[ast.unparse(node.func) == "cast"]
            asked = asked.value if isinstance(asked, ast.Subscript) else asked
            if ast.unparse(asked).rpartition(".")[2].lstrip("_") in ASKED:
                results.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif (
            isinstance(node, ast.arg)
            and node.arg in ASKED
            and node.annotation
            and "Any" in ast.unparse(node.annotation)
        ):
            results.append(f"line {node.lineno}: {ast.unparse(node)}")
    return results


def test_the_core_asks_models_tasks_and_batches_for_what_they_declare() -> None:
    core = [path for path in FILES if name(path).startswith(CORE) and not name(path).startswith(DOMAINS)]
    assert offenders(core, lambda path: undeclared(syntax(path))) == {}


def test_undeclared_questions_are_seen() -> None:
    code = 'getattr(model, "roles", None); hasattr(self._model.block, "spans"); cast(DiffusionModel, models["model"]).blocks'
    assert len(undeclared(ast.parse(code + "\ndef f(batch: Callable[[], Any]): ..."))) == 4


def machine_paths(path: Path) -> list[str]:
    """The lines of a file that name a folder of one machine."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [f"line {number}: {line.strip()}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert offenders(text_files(), machine_paths) == {}


def test_machine_paths_are_seen() -> None:
    paths = ["/" + "home/anna/x", '"/' + 'root/envs"', "cd /" + "work/main"]
    assert all(MACHINE_PATH.search(path) for path in paths)
    assert MACHINE_PATH.search("/proc/cpuinfo ../work/x a/home/b https://x.org/root/a") is None
