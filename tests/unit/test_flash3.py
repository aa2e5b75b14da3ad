"""FlashAttention 3 is asked for where it can be, and nothing changes elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mmspeed import device, flash3
from mmspeed.torch_internals import cpu_flash, cpu_flash_backward

HERE = torch.device("cpu")


def of_host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **more: object) -> object:
    return cpu_flash(q, k, v, *rest[:2], **more)


def test_absent_where_nothing_is_installed() -> None:
    assert device.pick("cpu").flash() is None
    assert flash3.activate(HERE, 8) == ("absent", "FlashAttention 2; 3 is made for Hopper")
    assert flash3.activate(HERE, 9).words.endswith("3 is not installed (module flash_attn_interface)")


def test_an_installation_without_kernels_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU its operators stand for those of the device: torch's registry and the look at the package are the real ones."""
    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash3, "cuda_flash", of_host)
    monkeypatch.setattr(
        flash3, "cuda_flash_backward", lambda *a, scale: cpu_flash_backward(*a[:6], 0.0, True, scale=scale)
    )
    flash3.activate.cache_clear()
    found = flash3.activate(HERE, 9)
    assert found.state == "broken" and "does not work: Module 'flash_attn_interface' does not expose" in found.words
    flash3.activate.cache_clear()
    sys.modules.pop("flash_attn_interface")
