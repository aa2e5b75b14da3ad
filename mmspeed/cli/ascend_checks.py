"""Checks of an Ascend installation for `mmspeed doctor`: driver, CANN, torch and torch_npu, and the variables of HCCL.

Reads files and variables alone, so that it also says something where torch_npu cannot be imported. No Ascend machine has run it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path

from .diagnosis import Diagnosis

NPU_PACKAGE = "torch_npu"
_DRIVER = "usr/local/Ascend/driver/version.info"
_DEVICES = "dev/davinci_manager"
_TOOLKITS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
_TOOLKIT_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_SET_ENV = "source set_env.sh of the CANN toolkit (/usr/local/Ascend/cann/set_env.sh, or that in ascend-toolkit)"
# as the reference of CANN 8.5 and 9.0 documents them (docs/ascend.md names its pages)
_MOST_SECONDS = 2147483647  # of HCCL_EXEC_TIMEOUT; 0 is for ever
_MOST_VECTOR_SECONDS = 1091  # where collectives run on vector cores, HCCL takes this for 0 and for all above
_RANGES = {  # whole numbers: least, most, unit, and an example
    "HCCL_CONNECT_TIMEOUT": (120, 7200, "seconds", 1800),
    "HCCL_BUFFSIZE": (1, None, "MB, of which each group takes twice as much", 200),
    "HCCL_IF_BASE_PORT": (1024, 65520, "a port; the next 31 are used too", 50000),
}
_CHOICES = {"HCCL_DETERMINISTIC": ("false", "true", "strict"), "HCCL_SOCKET_FAMILY": ("AF_INET", "AF_INET6")}


def ascend_checks(
    root: Path, environment: Mapping[str, str], torch_version: str, torch_npu_version: str | None
) -> list[Diagnosis]:
    """The checks of a machine that has something of Ascend; none for others.

    `root` is the root of its file system and `torch_npu_version` None where it is not installed.
    """
    driver = _version_in(root / _DRIVER)
    home = _toolkit_home(root, environment)
    sets_variables = any(environment.get(name) for name in _TOOLKIT_HOMES)
    if driver is None and home is None and torch_npu_version is None and not sets_variables:
        return []
    checks = [_driver(root, driver), _toolkit(root, home, environment), _torch_npu(torch_version, torch_npu_version)]
    return [*checks, *_hccl(environment)]


def _driver(root: Path, version: str | None) -> Diagnosis:
    if version is None:
        advice = (
            "install the Ascend driver and firmware; in a container, mount /usr/local/Ascend/driver and its devices"
        )
        return Diagnosis("Ascend driver", "warn", f"no version in /{_DRIVER}", advice)
    if not (root / _DEVICES).exists():
        advice = (
            "in a container pass --device /dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc and /dev/davinci0, ..."
        )
        return Diagnosis("Ascend driver", "warn", f"{version}, but /{_DEVICES} is missing", advice)
    return Diagnosis("Ascend driver", "ok", version)


def _toolkit_home(root: Path, environment: Mapping[str, str]) -> Path | None:
    """The folder of the CANN toolkit: the one that is set, else the usual one; None if there is neither."""
    named = next((environment[name] for name in _TOOLKIT_HOMES if environment.get(name)), None)
    if named is not None:
        return root / named.lstrip("/")
    return next((root / path for path in _TOOLKITS if (root / path).is_dir()), None)


def _toolkit(root: Path, home: Path | None, environment: Mapping[str, str]) -> Diagnosis:
    if home is None:
        return Diagnosis(
            "CANN", "warn", "no toolkit", "install the CANN toolkit and the kernels of your device, then " + _SET_ENV
        )
    shown = f"/{home.relative_to(root)}"
    files = [*sorted(home.glob("*-linux/ascend_toolkit_install.info")), home / "version.cfg", home / "version.info"]
    version = next((stated for path in files if (stated := _version_in(path)) is not None), None)
    if version is None:
        return Diagnosis(
            "CANN", "warn", f"no version in {shown}", f"name the toolkit's folder by its script: {_SET_ENV}"
        )
    if not any(environment.get(name) for name in _TOOLKIT_HOMES):
        return Diagnosis("CANN", "warn", f"{version} in {shown}, but its variables are not set", _SET_ENV)
    return Diagnosis("CANN", "ok", f"{version} in {shown}")


def _version_in(path: Path) -> str | None:
    """The version that a file of Ascend's states, as `version=8.2.RC1`, `Version=25.2.0` or `[...:8.2.RC1]`; None without one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^\s*version\s*=\s*\[?(?:[^\s:\]]*:)?([\w.]+)", text, re.IGNORECASE | re.MULTILINE) or re.search(
        r"_running_version=\[?(?:[^\s:\]]*:)?([\w.]+)", text
    )
    return match[1] if match else None


def _torch_npu(torch_version: str, version: str | None) -> Diagnosis:
    wanted = torch_version.partition("+")[0]
    advice = f"pip install 'torch_npu=={wanted}' or a .postN of it; its page names the CANN that goes with it"
    if version is None:
        return Diagnosis("torch_npu", "warn", "not installed: the devices cannot be used", advice)
    numbers = re.match(r"\d+\.\d+\.\d+", version)  # 2.13.0.post1 and 2.13.0rc1 are for torch 2.13.0
    if numbers is None or numbers[0] != wanted:
        return Diagnosis("torch_npu", "warn", f"{version}, made for another torch than {torch_version}", advice)
    return Diagnosis("torch_npu", "ok", f"{version} with torch {torch_version}")


def _hccl(environment: Mapping[str, str]) -> list[Diagnosis]:
    """A line on the variables of HCCL that are set, and one for each that HCCL would refuse."""
    named = {name: value for name, value in sorted(environment.items()) if name.startswith("HCCL_")}
    problems = [
        Diagnosis("HCCL", "warn", f"{name}={value}", advice)
        for name, value in named.items()
        if (advice := _hccl_advice(name, value, environment.get("HCCL_OP_EXPANSION_MODE", "")))
    ]
    shown = ", ".join(f"{name}={value}" for name, value in named.items()) or "no variables set"
    return problems or [Diagnosis("HCCL", "ok", shown)]


def _hccl_advice(name: str, value: str, mode: str) -> str:
    """The advice on a variable's value, with collectives in an expansion mode; empty if it is as documented."""
    if name in _RANGES:
        least, most, unit, example = _RANGES[name]
        if not (value.isdecimal() and least <= int(value) and (most is None or int(value) <= most)):
            bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
            return f"a whole number {bounds} ({unit}): export {name}={example}"
    if name in _CHOICES and value not in _CHOICES[name]:
        return f"{' or '.join(_CHOICES[name])}: export {name}={_CHOICES[name][-1]}"
    if name == "HCCL_EXEC_TIMEOUT":
        return _exec_advice(value, mode)
    if name == "HCCL_IF_IP":
        try:
            ipaddress.ip_address(value)
        except ValueError:
            return "the address of this node's own network card, another on each node: export HCCL_IF_IP=10.0.0.1"
    return ""


def _exec_advice(value: str, mode: str) -> str:
    """The advice on the seconds that a collective may take. CANN 9 reads hundredths, too."""
    seconds = float(value) if re.fullmatch(r"\d+(\.\d{1,2})?", value) else -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        return f"seconds from 0 (for ever) to {_MOST_SECONDS}: export HCCL_EXEC_TIMEOUT=1836"
    if mode == "AIV" and (seconds == 0 or seconds > _MOST_VECTOR_SECONDS):
        return f"with HCCL_OP_EXPANSION_MODE=AIV it counts as {_MOST_VECTOR_SECONDS}: unset one of the two"
    return ""
