"""Kinds of devices: what this machine lacks is one line, and Apple's has no float64."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mmspeed import device
from mmspeed.__main__ import unsupported
from mmspeed.config.schema import DeviceConfig
from mmspeed.device import Device, pick
from mmspeed.errors import UserError


def test_apple_devices_are_a_kind() -> None:
    assert DeviceConfig.model_validate({"kind": "mps"}).kind == "mps" and "mps" in device.BACKENDS
    apple = Device("mps", 0)
    assert (apple.torch_device, apple.backend, apple.decodes_video) == (torch.device("mps", 0), "gloo", False)
    assert apple.allocations() == [] and apple.growing_segments == "" and apple.mark(apple.side_stream()) is None
    with pytest.raises(UserError, match="mps has no float64 arithmetic"):
        apple.to_device(torch.zeros(2, dtype=torch.float64))


@pytest.mark.skipif(device.available("mps"), reason="this machine has such a device")
def test_a_machine_without_one_says_so() -> None:
    with pytest.raises(UserError, match=r"device.kind is 'mps', but torch .* sees no such device"):
        pick("mps")


def test_windows_is_refused_before_anything_is_imported() -> None:
    """The system's name is all that differs: on Windows nothing else of mmspeed could be imported."""
    assert "Windows is not supported" in unsupported("win32") and not unsupported("linux") and not unsupported("darwin")
    code = (
        "import sys; sys.platform = 'win32'; sys.modules['resource'] = None\n"
        "from mmspeed.__main__ import main; code = main(['doctor'])\n"
        "sys.exit(code if 'typer' not in sys.modules else 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mmspeed: error: Windows is not supported") and "WSL" in line


def test_exchanges_of_hccl_may_last_as_long_as_the_group_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "1")  # so that it is restored
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT")
    Device("cpu", 0).let_exchanges_last(3660.0)
    assert "HCCL_EXEC_TIMEOUT" not in os.environ
    Device("npu", 0).let_exchanges_last(3660.0)
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "3660"
    Device("npu", 0).let_exchanges_last(60.0)
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "3660", "one that is set is kept"


class Slow(TorchFunctionMode):
    """Counts the rows of the matrices that are multiplied; each product takes some time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.matmul or func is torch.Tensor.__matmul__:
            self.rows.append(args[0].shape[0])
            time.sleep(0.03)
        return func(*args, **(kwargs or {}))


def test_a_rate_of_products_is_measured_in_a_moment_where_they_are_slow() -> None:
    """Processors without products of bfloat16 compute them slowly."""
    with Slow() as slow:
        rate, source = Device("cpu", 0).peak_flops(torch.float32)
    assert set(slow.rows) == {256} and len(slow.rows) < 8
    assert 0 < rate <= 2 * 256**3 / 0.03 and source.startswith("measured matmul on ")
