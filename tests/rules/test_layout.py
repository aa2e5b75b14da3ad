"""The layout: the links, the floors, and what is packaged."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .sources import CODE, LINKS, ROOT, name, nodes, offenders, python_files, syntax

LINT = "from importlinter.cli import lint_imports_command as c; c()"


@pytest.mark.parametrize("folder", LINKS)
def test_links_are_relative_and_lead_to_the_root_folders(folder: str) -> None:
    link = ROOT / "mmspeed" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    assert (ROOT / folder).is_dir() and not (ROOT / folder).is_symlink()
    assert (ROOT / folder / "__init__.py").exists()


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the imports of the `mmspeed` package in `folder` with the contracts of our pyproject.toml."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--config", str(ROOT / "pyproject.toml"), "--no-cache"], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_floors() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_floors_can_break(tmp_path: Path) -> None:
    package = tmp_path / "mmspeed"
    folders = "cli bench pipelines preprocess models loop parallel compute memory data media plan comm config protocols"
    for module in folders.split():
        (package / module).mkdir(parents=True)
        (package / module / "__init__.py").touch()
    files = (
        "__init__ __main__ initialize rng log shapes axes mesh rendezvous lazy mixin replay graphs device flash3 torch_internals redaction "
        "pages guards errors version"
    )
    for module in files.split():
        (package / f"{module}.py").touch()
    assert lint_imports(tmp_path).returncode == 0
    (package / "models" / "__init__.py").write_text("import mmspeed.loop\n", encoding="utf-8")
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and "mmspeed.models is not allowed to import mmspeed.loop" in done.stdout
    (package / "pipelines" / "video.py").write_text("import mmspeed.pipelines.page\n", encoding="utf-8")
    (package / "pipelines" / "page.py").write_text("import mmspeed.pipelines.video\n", encoding="utf-8")
    assert "No cycles are allowed in mmspeed.pipelines." in lint_imports(tmp_path).stdout


def bare_imports(tree: ast.Module) -> list[str]:
    """The names of root folders that a file imports as if they were packages of their own."""
    results = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            results += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            results.append(node.module)
    return [module for module in results if module.split(".")[0] in LINKS]


def test_root_folders_are_imported_through_mmspeed() -> None:
    assert offenders(python_files(*CODE, "tests"), lambda path: bare_imports(syntax(path))) == {}


def test_bare_imports_are_seen() -> None:
    code = "import models.vae\nfrom pipelines import x\nfrom .models import y"
    assert bare_imports(ast.parse(code)) == ["models.vae", "pipelines"]


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from mmspeed.__main__ import main; assert main(['--help']) == 0; "
        "heavy = {'torch', 'numpy', 'transformers', 'diffusers', 'peft', 'av', 'pyarrow', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_config_loads_no_torch() -> None:
    code = "import sys, mmspeed.config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_protocols_load_torch_and_the_standard_library_alone() -> None:
    """`mmspeed.protocols`, beside torch: itself, plain data of ours, and nothing that torch does not load by itself."""
    code = (
        "import sys, torch; known = set(sys.modules)\n"
        "import mmspeed.protocols\n"
        "loaded = {name for name in set(sys.modules) - known if name.split('.')[0] not in sys.stdlib_module_names}\n"
        "ours = {'mmspeed', 'mmspeed.version', 'mmspeed.errors', 'mmspeed.shapes'}\n"
        "others = {name for name in loaded - ours if not name.startswith(('mmspeed.protocols', 'torch.'))}\n"
        "assert not others, others\n"
        "assert not {'pydantic', 'yaml', 'mmspeed.config'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_wheel_holds_the_code_and_the_clips(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: setuptools builds in the tree
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "runs")
    )
    shutil.rmtree(source / "build", ignore_errors=True)
    options = ["--no-build-isolation", "--no-deps", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for path in python_files(*CODE):
        inside = name(path) if name(path).startswith("mmspeed/") else f"mmspeed/{name(path)}"
        assert inside in packed
    assets = ROOT / "mmspeed" / "assets"
    shipped = [name(path) for path in assets.rglob("*") if path.is_file()]
    assert len(shipped) > 70 and set(shipped) <= packed
    assert "mmspeed/py.typed" in packed
    licences = {Path(entry).name for entry in packed if ".dist-info/licenses/" in entry}
    assert {"LICENSE", "ATTRIBUTION.md"} <= licences
    assert not [entry for entry in packed if entry.startswith("tests/")]
