"""Trials of the MLPs in parts of a run, `memory.mlp_exact`: of the shapes that this process computes, on its device, before it does.

Legend: B samples of a micro-batch, T S rows and columns of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from mmspeed.device import Device
from mmspeed.log import get_logger
from mmspeed.memory.chunked_trial import MlpShape, MlpTrial, trial_line, try_mlp_in_parts
from mmspeed.models import SoraDiT
from mmspeed.models.sora.layers import Mlp, gelu
from mmspeed.models.sora.model import SoraBlock
from mmspeed.parallel import TokenLayout
from mmspeed.protocols import Batch

log = get_logger("train")

Latent = tuple[int, int, int]  # T h w


class MlpTrials:
    """Tries each shape once; nothing where no MLP computes in parts with the whole one's gradients.

    Args:
        model: as `parallelize` left it in place.
        dtype: of its computation.
        first: whether this process writes a line in any case; others write only what is not bitwise.
    """

    def __init__(self, model: SoraDiT, layout: TokenLayout, dtype: torch.dtype, device: Device, first: bool) -> None:
        self.model, self.layout, self.dtype, self.device, self.first = model, layout, dtype, device, first
        self.mlps = [(block.span, mlp, size) for block in _blocks_of(model) for mlp, size in _in_exact_parts(block)]
        self.trials: dict[MlpShape, MlpTrial] = {}
        self._met: set[tuple[Latent, int]] = set()

    def before_steps(self, usual: Iterable[tuple[Latent, int]]) -> None:
        """Try the micro-batches that a run usually has: the latent's shape and the number of samples of each."""
        self._try(set(usual) if self.mlps else set())

    def meet(self, batch: Batch) -> None:
        """Try the shapes of a micro-batch that were not tried yet, such as those of an epoch's last samples."""
        if self.mlps:
            samples, _, frames, height, width = batch["latents"].shape
            self._try({((frames, height, width), samples)})

    def shapes(self, latent: Latent, samples: int) -> set[MlpShape]:
        """The shapes of all MLPs in parts for a micro-batch of so many samples of a latent, on this process."""
        config, tensor = self.model.config, self.layout.tensor
        positions_TSX = torch.empty(*config.rows_and_columns(config.grid(latent)), 3, device="meta")
        full = config.arrangement == "full"
        spread = self.layout.shard_tokens(positions_TSX, None, 0, full=full, image=latent[0] == 1)
        parts = {span: spread.shard_along("T" if span == "temporal" else "S") for span, _, _ in self.mlps}
        found = set()
        for span, mlp, size in self.mlps:
            tokens = samples * parts[span].held.tokens
            units = torch.empty(mlp.up.out_features, device="meta").chunk(tensor.size)  # as DTensor cuts rows
            own = len(units[tensor.rank]) if tensor.rank < len(units) else 0
            if tokens and own:
                given = mlp.down.out_features, size, self.dtype, mlp.up.bias is not None
                found.add(MlpShape(tokens, mlp.up.in_features, own, *given))
        return found

    def _try(self, micro_batches: set[tuple[Latent, int]]) -> None:
        new = micro_batches - self._met
        self._met |= new
        shapes = {shape for latent, samples in new for shape in self.shapes(latent, samples)} - self.trials.keys()
        if not shapes:
            return
        made = {shape: try_mlp_in_parts(shape, self.device.torch_device, gelu) for shape in sorted(shapes, key=str)}
        self.trials |= made
        found = list(made.values())
        if not all(trial.bitwise for trial in found):
            log.warning(trial_line(found))
        elif self.first:
            log.info(trial_line(found))


def _blocks_of(model: SoraDiT) -> Iterator[SoraBlock]:
    for block in model.blocks:
        assert isinstance(block, SoraBlock)
        yield block


def _in_exact_parts(block: nn.Module) -> Iterator[tuple[Mlp, int]]:
    for mlp in block.modules():
        if isinstance(mlp, Mlp) and mlp.token_chunk is not None and mlp.exact_chunks:
            yield mlp, mlp.token_chunk
