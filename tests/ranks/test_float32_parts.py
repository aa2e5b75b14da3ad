"""Parts of published models that stay float32 in half precision, and times that never leave it, on one process and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from mmspeed.device import pick
from mmspeed.loop.checkpoint.state import weights_to_save
from mmspeed.mesh import process_group
from mmspeed.parallel import unwrap
from mmspeed.pipelines.diffusion.predictor import predict
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.run.assembly import assemble, place
from mmspeed.pipelines.tasks import as_task
from mmspeed.protocols import Conditions
from mmspeed.shapes import Strides
from tests.ranks.test_stored_weights import WEIGHTS, config_of
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import save_wan

FINE = 1 + 2**-12  # bfloat16 rounds it to 1
KEPT = (
    "scale_shift_table",
    "blocks.0.scale_shift_table",
    "blocks.1.norm2.weight",
    "condition_embedder.time_embedder.linear_1.weight",
)
ROUNDED = ("blocks.0.ffn.net.2.weight", "patch_embedding.weight", "proj_out.weight", "blocks.1.attn1.to_q.weight")
LAYOUTS = {
    "one process, halves of masters": (1, ("memory.master=split",)),
    "one process": (1, ()),
    "fsdp, halves of masters, recomputed": (
        2,
        ("parallel.strategy=fsdp", "memory.master=split", "memory.activation_policy.block=recompute"),
    ),
    "fsdp, tensor parallel": (4, ("parallel.strategy=fsdp", "parallel.tp=2", "memory.master=split")),
    "ddp, halves of masters": (2, ("parallel.strategy=ddp", "memory.master=split")),
}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose kept and other tensors each begin with a number that bfloat16 rounds."""
    folder = save_wan(tmp_path_factory.mktemp("repositories") / "wan")
    tensors = load_file(folder / WEIGHTS)
    for name in (*KEPT, *ROUNDED):
        tensors[name].view(-1)[0] = FINE
    save_file(tensors, folder / WEIGHTS)
    return folder


def watched_step(folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Values met in the forward pass of a training step in bfloat16, and weights before and after it."""
    config, device = config_of(Path(folder), "device.dtype=bfloat16", *overrides), pick("cpu")
    met: dict[str, Any] = {}
    with process_group(device):
        task, placement = VideoDomain(config), place(config, device)
        task.use(EncoderShapes(16, Strides(4, 8), 16))
        parts = assemble(task.config, as_task(task, task.config), task.build(), placement, device)
        model = unwrap(parts.model)

        def gathered(module: Any, names: tuple[str, ...]) -> None:
            for name in names:
                parameter = model.get_parameter(name)
                if not isinstance(parameter, DTensor):  # its own group has gathered it
                    met[name] = (str(parameter.dtype), parameter.detach().float().flatten()[0].item())

        model.get_submodule("blocks.1.ffn.net.2").register_forward_pre_hook(
            lambda module, _: gathered(module, (*KEPT[:1], KEPT[2], *ROUNDED[1:3], ROUNDED[3]))
        )
        model.get_submodule("blocks.0.ffn.net.2").register_forward_pre_hook(
            lambda module, _: gathered(module, (KEPT[1], KEPT[3], ROUNDED[0]))
        )
        embedder = model.get_submodule("condition_embedder.time_embedder")
        embedder.register_forward_hook(
            lambda _, args, out: met.update({"embedded": (str(args[0].dtype), str(out.dtype))})
        )
        model.register_forward_pre_hook(
            lambda _, args, kwargs: met.update(
                {"times": (str(kwargs["timestep"].dtype), kwargs["timestep"].detach().tolist())}
            ),
            with_kwargs=True,
        )
        g = torch.Generator().manual_seed(3)
        before = weights_to_save(parts.model, parts.optimizer)
        before = {name: whole(before[name]) for name in (*KEPT, *ROUNDED)}
        conditions = Conditions(torch.randn(2, 5, 16, generator=g), torch.ones(2, 5, dtype=torch.bool))
        x_BCThw, t_B = torch.randn(2, 16, 3, 4, 6, generator=g), torch.tensor([0.999, 0.75112])
        out = predict(task.predictor, parts.model, x_BCThw, t_B, conditions)
        out.float().square().mean().backward()
        parts.optimizer.step()
        after = weights_to_save(parts.model, parts.optimizer)
        met["began"] = {name: value.flatten()[0].item() for name, value in before.items()}
        met["moved"] = [name for name in before if not torch.equal(whole(after[name]), before[name])]
    return met


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, {"fsdp, halves of masters, recomputed"}))
def test_kept_parts_and_times_stay_float32(wan: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    half = any("master" in each for each in overrides)
    for met in run_ranks(watched_step, world, str(wan), overrides):
        assert met["times"][0] == "torch.float32"
        assert met["times"][1] == (1000.0 * torch.tensor([0.999, 0.75112])).tolist()
        assert met["embedded"] == ("torch.float32", "torch.float32")
        for name in KEPT:
            assert met[name] == ("torch.float32", FINE), name
        narrow = half or "fsdp" in layout
        for name in ROUNDED:
            if "tensor" in layout and name not in met:  # split over processes
                continue
            assert met[name] == (("torch.bfloat16", 1.0) if narrow else ("torch.float32", FINE)), name
        assert set(met["began"].values()) == {FINE}  # of the masters too
        assert set(met["moved"]) == {*KEPT, *ROUNDED}
