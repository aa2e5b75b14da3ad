"""What all tests share: quiet, deterministic processes, and where the repository and its demo clips are."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.spawn import start_server

# before torch is imported anywhere: many small tests on few cores are fastest with one thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else processes start that each import torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # libraries read it when they are imported

# a busy machine is no failure; tests that need more examples say so
settings.register_profile("mmspeed", deadline=None, max_examples=50)
settings.load_profile("mmspeed")

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.support.scheduling import RulesTogether  # not where there is no xdist

    return RulesTogether(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    gc.disable()  # what tests import stays, and passing over it takes a sixth of the time
    try:
        if hasattr(session.config, "workerinput"):
            from tests.support.scheduling import import_share

            import_share(session.config, ROOT / "tests")
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may ask the network for weights; a test that would need them fails."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """A test that leaves gradients off fails itself, and not the many after it."""
    import torch  # not before the variables above are set

    yield
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on, "the test left gradients off in this thread"


class FrozenImports:
    """Leaves what is there out of later garbage collections, which would pass over millions of objects of imports each time."""

    def __init__(self) -> None:
        self.modules = 0  # imported at the last freeze

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()
        # a full collection waits until a quarter of what it has passed over is new; of the few that are left that is soon
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        self.modules = len(sys.modules)


@pytest.fixture(scope="session")
def _frozen() -> Iterator[FrozenImports]:
    yield FrozenImports()
    gc.unfreeze()  # else extensions report as leaks, at the end, what no collection has seen


@pytest.fixture(scope="module", autouse=True)
def _earlier_modules_are_frozen(_frozen: FrozenImports) -> None:
    _frozen.freeze()


@pytest.fixture(autouse=True)
def _imports_are_frozen(_frozen: FrozenImports) -> None:
    """Also those of a module's fixtures and first tests."""
    if len(sys.modules) > _frozen.modules + 50:
        _frozen.freeze()


@pytest.fixture(scope="session", autouse=True)
def _server(request: pytest.FixtureRequest) -> None:
    """The server of ranks starts first: whoever else starts one would not have it import what ranks need."""
    if any("ranks" in item.path.parts for item in request.session.items):
        start_server()


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the whole cache of `tests.support.runs.small_config`: copy it, and the config of the copy finds all there."""
    from mmspeed.preprocess import CacheBuilder
    from tests.support.runs import small_config

    folder = tmp_path_factory.mktemp("small")
    CacheBuilder(small_config(folder)).run()
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def demo_clips() -> Path:
    """The manifest of the clips that ship with the package."""
    return ROOT / "mmspeed" / "assets" / "demo-clips" / "metadata.jsonl"
