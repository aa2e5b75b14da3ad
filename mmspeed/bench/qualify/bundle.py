"""Collect what `mmspeed qualify` imports, beside torch, as wheels in a folder: for a machine without a package index.

`python -m mmspeed.bench.qualify.bundle FOLDER`, or `make bundle`, from a checkout, with pip and its index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmspeed.errors import UserError

# The packages that `mmspeed qualify` imports; what they need themselves comes with them.
PACKAGES = ("numpy", "safetensors", "pyyaml", "pydantic", "typer", "rich", "fsspec")
PYTHON = "312"
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
LIMIT = 40_000_000  # bytes of all wheels
REQUIREMENTS = "requirements.txt"


def requirements(project: str) -> list[str]:
    """The packages with the versions that the project asks for, from the text of its pyproject.toml."""
    lines = []
    for name in PACKAGES:
        match = re.search(rf'^  "({name}[^a-z"][^"]*|{name})",$', project, re.MULTILINE | re.IGNORECASE)
        lines.append(match[1] if match else name)
    return lines


def checkout() -> Path:
    """The root of the checkout that this file is of. Raises UserError in an installed package, which cannot build its wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file():
        raise UserError(
            "the bundle holds our own wheel, which is built from a checkout: clone the repository and run `make bundle` there"
        )
    return root


def collect(folder: Path) -> list[Path]:
    """Fill the folder with the wheels and their requirements, and return the wheels.

    Raises UserError where pip finds or builds one not, and where all together exceed the limit.
    """
    root = checkout()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    wanted = requirements((root / "pyproject.toml").read_text(encoding="utf-8"))
    (folder / REQUIREMENTS).write_text("\n".join(wanted) + "\n", encoding="utf-8")
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    tags = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    _pip(["download", *tags, "--dest", str(folder), *wanted])
    with tempfile.TemporaryDirectory() as scratch:  # setuptools builds in the tree: none of it is left there
        source = Path(scratch) / "source"
        _copy(root, source)
        _pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(source)])
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size > LIMIT:
        raise UserError(f"{folder}: the wheels take {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f} MB")
    return wheels


def install_lines(folder: Path, own: str) -> list[str]:
    """The commands that install the bundle offline, beside a torch that is there already, and run it.

    Packages that are installed in a version that serves are left alone; of our own wheel (`own`) no dependency is asked for, since most
    of them are not needed here.
    """
    pip = "python -m pip install --no-index"
    return [
        f"{pip} --find-links {folder} -r {folder / REQUIREMENTS} && {pip} --no-deps {folder / own}",
        "python -m mmspeed qualify",
    ]


def _copy(root: Path, target: Path) -> None:
    """The files that a build needs: those that git knows, or that lie there without it."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True
    )
    if listed.returncode:
        raise UserError(f"{root} is no git checkout: the bundle's own wheel is built from the files that git lists")
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, place = root / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            place.symlink_to(source.readlink())
        elif source.is_file() and not name.startswith("tests/"):
            place.write_bytes(source.read_bytes())


def _pip(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise UserError(f"pip {arguments[0]} failed: {' '.join(lines)}")


def main(arguments: Sequence[str]) -> int:
    """Collect the bundle and print how to install it; 1 with a line on standard error where that fails."""
    folder = Path(arguments[0] if arguments else "dist/bundle")
    try:
        wheels = collect(folder)
    except UserError as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB, for Python 3.12 on Linux x86_64, without torch: {folder}")
    own = next(wheel.name for wheel in wheels if wheel.name.startswith("mmspeed-"))
    print("\n".join(install_lines(folder, own)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
