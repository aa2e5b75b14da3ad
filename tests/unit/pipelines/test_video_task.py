"""The video task as the trainer meets it: shapes before batches exist, work by kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmspeed.device import Device
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.protocols import RunPlace
from mmspeed.shapes import Bucket, Strides
from tests.support.runs import small_config

CPU = Device("cpu", 0)


def test_shapes_are_known_before_batches_are_read(home: Path) -> None:
    """The shapes of every tensor of every micro-batch over two epochs, dropped captions included."""
    config = small_config(home, "train.batch_size=4", "train.micro_batch_size=3", "train.caption_dropout=0.5")
    task, place = VideoDomain(config), RunPlace(CPU)
    task.open(place)
    data = task.data(place)
    expected = [data.shapes(step) for step in range(6)]
    lengths = set()
    for shapes, step in zip(expected, data.steps(0, 6), strict=True):
        batches = list(step.batches)
        assert [shape.items for shape in shapes] == [batch.size for batch in batches]
        assert [dict(shape.tensors) for shape in shapes] == [
            {name: tuple(tensor.shape) for name, tensor in batch.tensors.items()} for batch in batches
        ]
        samples = sum(step.counts.values())
        assert step.divisors == {"samples": samples, "tokens": samples * task.tokens(batches[0].shape)}
        lengths |= {shape.tensors["text"][1] for shape in shapes}
    assert len(lengths) > 1  # captions of several lengths, so that the widths are no constant


@pytest.mark.parametrize("arrangement", ["factorised", "full"])
def test_work_by_kind_is_what_the_model_computes(tmp_path: Path, arrangement: str) -> None:
    """Products of linear layers and attention apart add up to torch's count of both; the scale of one bucket by another's."""
    config = small_config(tmp_path, f"model.arrangement={arrangement}")
    task = VideoDomain(config).use(EncoderShapes(4, Strides(4, 8), 16))
    bucket, text = Bucket(5, 32, 48), 6
    model = task._build(config.model, 4, 16, "cpu")
    latent = task.latent(bucket)
    # attention as two products, which torch counts; it does not count its kernel for CPUs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(
            torch.zeros(1, 4, *latent), torch.zeros(1), torch.zeros(1, text, 16), torch.ones(1, text, dtype=torch.bool)
        )
    work = task.work(bucket, text)
    assert work.matmul == work.products + work.attention == counter.get_total_flops()
    by_kind = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in by_kind.items() if "bmm" in str(op))
    assert work.attention == attention > 0 and work.elementwise > 0
