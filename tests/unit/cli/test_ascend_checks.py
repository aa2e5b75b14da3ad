"""`mmspeed doctor` on Ascend machines: folders with the files that the driver and CANN install."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.cli.ascend_checks import ascend_checks
from mmspeed.cli.diagnosis import Diagnosis

HOME = "/usr/local/Ascend/ascend-toolkit/latest"
SET = {"ASCEND_TOOLKIT_HOME": HOME}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a machine with a driver and CANN."""
    files = {
        "usr/local/Ascend/driver/version.info": "Version=25.2.0\nascendhal_version=7.35.23\naicpu_version=1.0\n",
        f"{HOME[1:]}/aarch64-linux/ascend_toolkit_install.info": (
            "package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100R001C23\ncompatible_version=[V100R001C15]\n"
            f"arch=aarch64\nos=linux\npath={HOME}/aarch64-linux\n"
        ),
        "dev/davinci_manager": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _by_name(checks: list[Diagnosis]) -> dict[str, Diagnosis]:
    assert all(check.advice for check in checks if check.state != "ok")
    return {check.name: check for check in checks}


def test_a_machine_without_ascend_has_no_lines(tmp_path: Path) -> None:
    assert ascend_checks(tmp_path, {"HCCL_CONNECT_TIMEOUT": "1"}, "2.13.0", None) == []


def test_a_whole_installation_is_well(root: Path) -> None:
    checks = ascend_checks(root, SET | {"HCCL_CONNECT_TIMEOUT": "1800"}, "2.13.0+cpu", "2.13.0.post2")
    assert [(check.name, check.state, check.found) for check in checks] == [
        ("Ascend driver", "ok", "25.2.0"),
        ("CANN", "ok", f"8.5.0 in {HOME}"),
        ("torch_npu", "ok", "2.13.0.post2 with torch 2.13.0+cpu"),
        ("HCCL", "ok", "HCCL_CONNECT_TIMEOUT=1800"),
    ]


@pytest.mark.parametrize("name", ["version.cfg", "version.info"])
def test_older_toolkits_state_their_version_elsewhere(root: Path, name: str) -> None:
    (root / HOME[1:] / "aarch64-linux/ascend_toolkit_install.info").unlink()
    text = "runtime_running_version=[7.1.0.3.220:8.0.RC2]\n" if name == "version.cfg" else "Version=8.0.RC2\n"
    (root / HOME[1:] / name).write_text(text)
    assert _by_name(ascend_checks(root, SET, "2.13.0", "2.13.0"))["CANN"].found == f"8.0.RC2 in {HOME}"


@pytest.mark.parametrize("version", ["2.13.1", "unknown"])
def test_torch_and_its_plugin_must_agree(root: Path, version: str) -> None:
    check = _by_name(ascend_checks(root, SET, "2.13.0+cpu", version))["torch_npu"]
    assert check.state == "warn" and "another torch than 2.13.0" in check.found and "torch_npu==2.13.0'" in check.advice


def test_what_is_missing_is_named_with_what_to_do(root: Path) -> None:
    checks = _by_name(ascend_checks(root, {}, "2.13.0", None))
    assert checks["CANN"].found == f"8.5.0 in {HOME}, but its variables are not set"
    assert "set_env.sh" in checks["CANN"].advice and checks["torch_npu"].found.startswith("not installed")
    (root / "dev/davinci_manager").unlink()
    assert "--device /dev/davinci_manager" in _by_name(ascend_checks(root, SET, "2.13.0", None))["Ascend driver"].advice
    (root / "usr/local/Ascend/driver/version.info").unlink()
    checks = _by_name(ascend_checks(root, {"ASCEND_TOOLKIT_HOME": "/opt/other"}, "2.13.0", "2.13.0"))
    assert "no version in /usr/local/Ascend/driver" in checks["Ascend driver"].found
    assert checks["CANN"].found == "no version in /opt/other"


REFUSED = [
    ("HCCL_CONNECT_TIMEOUT", "60", "from 120 to 7200"),
    ("HCCL_CONNECT_TIMEOUT", "30m", "seconds"),
    ("HCCL_EXEC_TIMEOUT", "2147483648", "to 2147483647"),
    ("HCCL_BUFFSIZE", "0", "of at least 1"),
    ("HCCL_DETERMINISTIC", "1", "false or true or strict"),
    ("HCCL_SOCKET_FAMILY", "ipv4", "AF_INET or AF_INET6"),
    ("HCCL_IF_IP", "node-1", "address of this node"),
    ("HCCL_IF_BASE_PORT", "80", "from 1024 to 65520"),
]
TAKEN = [
    ("HCCL_EXEC_TIMEOUT", "0.05"),  # since CANN 9.0
    ("HCCL_DETERMINISTIC", "strict"),
    ("HCCL_IF_IP", "fe80::1"),
    ("HCCL_IF_BASE_PORT", "65520"),
    ("HCCL_WHITELIST_DISABLE", "1"),  # not looked at
]


def test_values_that_are_refused_later_are_named_now(root: Path) -> None:
    for name, value, words in REFUSED:
        variables = SET | {name: value, "HCCL_SOCKET_IFNAME": "eth0"}
        check = _by_name(ascend_checks(root, variables, "2.13.0", "2.13.0"))["HCCL"]
        assert (check.state, check.found) == ("warn", f"{name}={value}") and words in check.advice
    for name, value in TAKEN:
        check = _by_name(ascend_checks(root, SET | {name: value}, "2.13.0", "2.13.0"))["HCCL"]
        assert (check.state, check.found) == ("ok", f"{name}={value}")


@pytest.mark.parametrize(("seconds", "state"), [("3660", "warn"), ("1091", "ok")])
def test_collectives_on_vector_cores_have_a_limit_of_their_own(root: Path, seconds: str, state: str) -> None:
    variables = SET | {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": seconds}
    check = _by_name(ascend_checks(root, variables, "2.13.0", "2.13.0"))["HCCL"]
    assert check.state == state and (state == "ok" or "counts as 1091" in check.advice)
