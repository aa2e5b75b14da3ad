"""The smallest diffusion model of `mmspeed.protocol`, its data and its loss, for tests of the loop and of parallelism.

Legend: B batch, C channels, T h w latent, N tokens, E width, L caption tokens, D text width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.data.loading.collate import video_batch
from mmspeed.protocols import Batch
from mmspeed.shapes import Bucket

C, T, H, W, L, D = 3, 2, 2, 3, 4, 5


class ToyBlock(nn.Module):
    """Norm, MLP, residual; sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x_BNE: Tensor, t_B: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x_BNE)) * (1 + t_B[:, None, None]))
        return x_BNE + self.scale * self.down(hidden)


class ToyDiT(nn.Module):
    """Three blocks over the latent's positions, with the caption's mean added."""

    def __init__(self, width: int = 10, depth: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Linear(C, width)
        self.text = nn.Linear(D, width, bias=False)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(depth))
        self.leave = nn.Linear(width, C)  # 3 rows: on 4 ranks one has none of them
        self.register_buffer("shift", torch.tensor(0.25))
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(rng.normal(p.shape, seed, "toy", name) * 0.4 + (1.0 if name.endswith("scale") else 0.0))

    def tokens(self, latent: tuple[int, int, int]) -> int:
        return latent[0] * latent[1] * latent[2]

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """Matrix products of one sample."""
        block = 2 * 2 * self.width * (2 * self.width + 1)
        return self.tokens(latent) * (2 * 2 * C * self.width + len(self.blocks) * block) + 2 * D * self.width

    def forward(self, x_BCThw: Tensor, t_B: Tensor, text_BLD: Tensor, text_mask_BL: Tensor) -> Tensor:
        mean_BD = (text_BLD * text_mask_BL[..., None]).sum(1) / text_mask_BL.sum(1, keepdim=True)
        x_BNE = self.enter(x_BCThw.flatten(2).transpose(1, 2)) + self.text(mean_BD)[:, None] + self.shift
        for block in self.blocks:
            x_BNE = block(x_BNE, t_B)
        return self.leave(x_BNE).transpose(1, 2).reshape(x_BCThw.shape).clone()  # fully_shard wants no views


def make_batch(keys: list[str], epoch: int = 0, fillers: int = 0) -> Batch:
    """Samples drawn by their keys; the last `fillers` repeat the first sample with weight 0."""
    names = keys + [keys[0] if keys else "filler"] * fillers
    return video_batch(
        latents_BCThw=torch.stack([rng.normal((C, T, H, W), 0, "latent", k) for k in names]),
        text_BLD=torch.stack([rng.normal((L, D), 0, "text", k) for k in names]),
        text_mask_BL=torch.tensor([[True, True, len(k) % 2 == 0, False] for k in names]),
        weights_B=torch.tensor([1.0] * len(keys) + [0.0] * fillers),
        names=[(k, epoch, 0) for k in names],
        bucket=Bucket(5, 16, 24),
        sources=[f"{k}.mp4" for k in names],
    )


def split(keys: list[str], slots: int, rank: int, world: int, micro: int, epoch: int = 0) -> list[Batch]:
    """This rank's micro-batches of a global batch of `slots`, of which `keys` are real and the rest fillers."""
    share = slots // world
    mine = range(rank * share, (rank + 1) * share)
    pieces = [list(mine[i : i + micro]) for i in range(0, share, micro)]
    return [
        make_batch([keys[i] for i in piece if i < len(keys)], epoch, sum(i >= len(keys) for i in piece))
        for piece in pieces
    ]


def flow_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Rectified-flow loss of each sample, with noise and time drawn by the sample's name."""
    noise = torch.stack([rng.normal((C, T, H, W), 0, "noise", *name) for name in batch.names])
    t_B = torch.tensor([rng.uniform(0, "time", *name) for name in batch.names])
    mix = t_B[:, None, None, None, None]
    x_BCThw = (1 - mix) * batch["latents"] + mix * noise
    out = model(x_BCThw, t_B, batch["text"], batch["text_mask"])
    return ((out.float() - (noise - batch["latents"])) ** 2).mean(dim=(1, 2, 3, 4))
