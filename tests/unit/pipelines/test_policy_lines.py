"""Lines of `check` about activation policies: the regions that a model's blocks have, and an error for those that they have not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.pipelines.check.data_report import check_task
from mmspeed.pipelines.report.policies import policy_lines
from mmspeed.pipelines.tasks import as_task, make_task
from tests.support.published import prepare, published_config, task_of
from tests.support.runs import small_config

SELECTIVE = (
    "no module makes a norm or an activation alone: `selective` computes them again, and keeps products and attention"
)
REGIONS = {
    "wan": [f"WanTransformerBlock: block, attention, cross_attention, mlp; {SELECTIVE}"],
    "hunyuan": [
        f"HunyuanVideoTransformerBlock: block, attention; {SELECTIVE}",
        f"HunyuanVideoSingleTransformerBlock: block, attention; {SELECTIVE}",
    ],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", REGIONS)
def test_regions_of_published_models_are_reported(home: Path, name: str) -> None:
    config = published_config(home, name)
    lines = policy_lines(as_task(task_of(home, name, config), config), config)
    assert lines == [f"model: memory.activation_policy of {each}" for each in REGIONS[name]]


def test_our_own_norms_and_activations_are_regions(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    (line,) = policy_lines(make_task(config), config)
    assert (
        line == "model: memory.activation_policy of SoraBlock: block, attention, cross_attention, mlp, norm, activation"
    )


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("wan", "activation_policy.atention=recompute", r"no region atention .*did you mean 'attention'"),
        ("hunyuan", "activation_policy.mlp=selective", r"HunyuanVideo.*Block has no region mlp \(it has block, attention\)"),
        ("hunyuan", "mlp_chunk=8", r"memory.mlp_chunk: HunyuanVideo.*Block has no MLP that computes in parts"),
    ],
)  # fmt: skip
def test_a_policy_of_a_region_that_is_not_there_is_an_error(home: Path, name: str, key: str, message: str) -> None:
    config = published_config(home, name, f"memory.{key}")
    with pytest.raises(UserError, match=message):
        check_task(config, (1,), as_task(task_of(home, name, config), config))
