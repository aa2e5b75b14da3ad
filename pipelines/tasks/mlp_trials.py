"""Trials of MLPs in parts, `memory.mlp_exact`: on this process's device, for the shapes that it computes, before the run does.

Legend: B samples of a micro-batch, T S rows and columns of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mmspeed.device import Device
from mmspeed.log import get_logger
from mmspeed.memory.chunked_trial import MlpShape, MlpTrial, trial_line, try_mlp_in_parts
from mmspeed.memory.chunks import exact_chunks
from mmspeed.parallel import TokenLayout
from mmspeed.protocols import Batch
from mmspeed.protocols.model import LaysOutTokens
from mmspeed.protocols.plan import blocks_of, parts_of, plan_of

log = get_logger("train")

Latent = tuple[int, int, int]  # T h w


class MlpTrials:
    """The trials of a run, one for each shape; none where no MLP in parts must have the gradients of the whole one.

    Args:
        model: as `parallelize` left it in place.
        dtype: of its computation.
        first: True for the process that logs all results; the others log only trials that are not bitwise equal.
    """

    def __init__(self, model: nn.Module, layout: TokenLayout, dtype: torch.dtype, device: Device, first: bool) -> None:
        assert isinstance(model, LaysOutTokens)
        self.model, self.plan = model, plan_of(model)
        self.layout, self.dtype, self.device, self.first = layout, dtype, device, first
        self.mlps = [(parts_of(block).attends, mlp) for _, block in blocks_of(model) for mlp in exact_chunks(block)]
        self.trials: dict[MlpShape, MlpTrial] = {}
        self._met: set[tuple[Latent, int]] = set()

    def before_steps(self, usual: Iterable[tuple[Latent, int]]) -> None:
        """Try the usual micro-batches of a run: the latent's shape and the number of samples of each."""
        self._try(set(usual) if self.mlps else set())

    def meet(self, batch: Batch) -> None:
        """Try the new shapes of a micro-batch, such as those of an epoch's last samples."""
        if self.mlps:
            samples, _, frames, height, width = batch["latents"].shape
            self._try({((frames, height, width), samples)})

    def shapes(self, latent: Latent, samples: int) -> set[MlpShape]:
        """The shapes of all MLPs in parts for a micro-batch of `samples` samples of a latent, on this process."""
        layout, factorised = self.layout, self.plan is not None and self.plan.factorised
        shape, tensor = self.model.rows_and_columns(latent), layout.tensor
        shapes_here = set()
        for attends, mlp in self.mlps:
            tokens_here = layout.unsplit(shape) if latent[0] == 1 else layout.held(shape, attends, factorised)
            units = torch.empty(mlp.up.out_features, device="meta").chunk(tensor.size)  # as DTensor cuts rows
            units_here = len(units[tensor.rank]) if tensor.rank < len(units) else 0
            if tokens_here.tokens and units_here:
                sizes = mlp.down.out_features, mlp.size, self.dtype, mlp.up.bias is not None
                shapes_here.add(MlpShape(samples * tokens_here.tokens, mlp.up.in_features, units_here, *sizes))
        return shapes_here

    def _try(self, micro_batches: set[tuple[Latent, int]]) -> None:
        new = micro_batches - self._met
        self._met |= new
        shapes = {shape for latent, samples in new for shape in self.shapes(latent, samples)} - self.trials.keys()
        if not shapes:
            return
        activation = self.mlps[0][1].activation
        results = {
            shape: try_mlp_in_parts(shape, self.device.torch_device, activation) for shape in sorted(shapes, key=str)
        }
        self.trials |= results
        trials = list(results.values())
        if not all(trial.bitwise for trial in trials):
            log.warning(trial_line(trials))
        elif self.first:
            log.info(trial_line(trials))
