"""Both experts of one model over two processes: the steps of one process, and a stopped run goes on bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import differing, farthest, whole_checkpoint
from tests.support.experts import experts_config, rested_and_plain_shards, train_experts, train_whole_and_in_parts
from tests.support.runs import losses
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import save_wan_experts


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_wan_experts(folder / "base")
    train_experts(str(folder), ("name=one",))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process_and_go_on_bitwise(home: Path, strategy: str) -> None:
    layout = (f"parallel.strategy={strategy}",)
    run_ranks(train_whole_and_in_parts, 2, str(home), strategy, layout)
    one, whole, parts = (home / "runs" / name for name in ("one", strategy, f"{strategy}-parts"))
    assert differing(whole_checkpoint(parts), whole_checkpoint(whole)) == []
    configs = [experts_config(home, f"name={name}", *layout) for name in ("one", strategy, f"{strategy}-parts")]
    alone, together, resumed = map(losses, configs)
    assert resumed == together == pytest.approx(alone, rel=1e-5)
    state, expected = whole_checkpoint(whole), whole_checkpoint(one)
    assert state.keys() == expected.keys()
    for part in ("model.", "ema.", "transformer_2:model.", "transformer_2:ema."):
        assert farthest(state, expected, part) < 2e-5


def test_shards_that_rest_train_to_the_bit() -> None:
    """FSDP's parts, and the moments that are laid out like them; the CPU's memory stands in for a device's."""
    first, second = run_ranks(rested_and_plain_shards, 2)
    assert first == second and first[0] == first[1]
