"""Queries, keys and values like those of a video transformer, drawn by name: the inputs of the bench of sparse attention.

A few objects, each with a meaning and with a texture that moves with it, cross a background of regions with a fixed texture. The content
of a token is both, with noise. Heads match, in turn, by meaning, by nearness, and twice by both. Queries and keys go through an RMS norm
with a gain, like learned ones, and through 3-D rotary positions. The data is video-like, but smooth: errors on it are about half of those
of a trained model, which `mmspeed bench attention --run` measures.

The constants were set once, before the measured planners and kernels were written, so that attention is about as peaked, and its dropped
part about as smooth, as in the study behind the goals. The share of the keys with 90 % of a query's mass (`oracle_share`) is, by head: 10,
9, 11 and 10 % of 4,096; 12, 7, 12 and 8 % of 16,384; 12, 8, 11 and 9 % of 32,768.

Legend: B batch (1), A heads, N tokens, D head width, T h w the grid of tokens, X position axes, F content features, O objects.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.rope import apply_rope, axis_pairs, grid_positions, rope_cos_sin

Grid = tuple[int, int, int]

FEATURES = 48  # of the content of a token: half its meaning, half its texture
OBJECTS, REGIONS = 6, 4
NEAR_TURNS = (
    0.06,
    0.6,
)  # radians per step of the channels that distinguish near from far; faster ones repeat within a few tokens
KINDS = ("semantic", "local", "mixed", "mixed")
GAINS = {"semantic": 1.25, "local": 1.3, "mixed": 1.3}  # of queries and of keys, after the norm


def make_qkv(
    grid: Grid, heads: int = 4, width: int = 64, seed: int = 0, noise: float = 0.35, look: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q_BAND, k_BAND, v_BAND, positions_NX) of one video: float32 on the CPU, B = 1; positions are (t, h, w), int64.

    Args:
        grid: tokens along time, height and width.
        width: of a head; even, at least 6.
        noise: its strength in a token's content, relative to the signal.
        look: each number draws other noise over the same video.

    The numbers of a head do not depend on the number of heads.
    """
    positions_NX = grid_positions(grid)
    content_NF = video_content(grid, seed)
    content_NF = content_NF + noise * rng.normal(content_NF.shape, seed, "bench attention", "noise", look)
    cos_NH, sin_NH = rope_cos_sin(positions_NX, width)
    parts_of_heads = [_head(content_NF, KINDS[head % len(KINDS)], width, seed, head) for head in range(heads)]
    q_BAND, k_BAND, v_BAND = (torch.stack(parts)[None] for parts in zip(*parts_of_heads, strict=True))
    return apply_rope(q_BAND, cos_NH, sin_NH), apply_rope(k_BAND, cos_NH, sin_NH), v_BAND, positions_NX


def video_content(grid: Grid, seed: int) -> Tensor:
    """The content `content_NF` without noise: meaning and texture of each token, each feature of mean square about 1."""
    t_N, y_N, x_N = ((grid_positions(grid)[:, axis] + 0.5) / grid[axis] for axis in range(3))
    half = FEATURES // 2

    def draw(*names: object, count: int = half) -> Tensor:
        return rng.normal((count,), seed, "bench attention", *names)

    # the background: soft regions with a meaning each, one texture
    fields = torch.stack([_texture(y_N, x_N, 1, 1.2, seed, "region", r)[:, 0] for r in range(REGIONS)], dim=1)
    meanings = torch.stack([draw("meaning of a region", r) for r in range(REGIONS)])
    meaning_NF = (4.0 * fields).softmax(dim=1) @ meanings
    texture_NF = _texture(y_N, x_N, half, 2.5, seed, "background")
    for number in range(OBJECTS):  # later ones are in front
        place = 0.5 + rng.symmetric((2,), 0.5, seed, "bench attention", "place", number)
        speed = 0.25 * draw("speed", number, count=2)
        radius = 0.08 + 0.10 * rng.uniform(seed, "bench attention", "radius", number)
        stretch = math.exp(0.3 * float(draw("stretch", number, count=1)))
        dy_N = y_N - _bounced(place[0] + speed[0] * t_N)
        dx_N = x_N - _bounced(place[1] + speed[1] * t_N)
        inside_N = (dy_N * stretch).square() + (dx_N / stretch).square() < radius**2
        meaning_NF[inside_N] = draw("meaning", number)
        texture_NF[inside_N] = _texture(dy_N, dx_N, half, 4.0, seed, "object", number)[inside_N]
    return torch.cat((meaning_NF, texture_NF), dim=1)


def _bounced(place_N: Tensor) -> Tensor:
    """Places kept in 0..1 by reflection at the borders."""
    return 1 - (place_N % 2 - 1).abs()


def _texture(y_N: Tensor, x_N: Tensor, features: int, waves: float, seed: int, *names: object) -> Tensor:
    """Smooth random functions of a place, mean square 1; `waves` is about their number of periods over the whole picture."""
    turns = waves * rng.normal((2, features), seed, "bench attention", "waves", *names)
    start = rng.symmetric((features,), math.pi, seed, "bench attention", "start", *names)
    return math.sqrt(2) * torch.cos(2 * math.pi * (y_N[:, None] * turns[0] + x_N[:, None] * turns[1]) + start)


def _head(content_NF: Tensor, kind: str, width: int, seed: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (q_ND, k_ND, v_ND) of a head before rotary positions."""

    def matrix(name: str) -> Tensor:
        return rng.normal((content_NF.shape[1], width), seed, "bench attention", name, head) / math.sqrt(FEATURES)

    # queries and keys share a projection; a part of their own makes the match imperfect, as in learned heads
    shared = matrix("shared")
    meets = content_NF @ shared
    place_D = rng.normal((width,), seed, "bench attention", "near", head)  # the same in all tokens: matches where near
    turns_D = torch.cat([10_000.0 ** -(torch.arange(pairs) / pairs) for pairs in axis_pairs(width, 3)]).repeat(2)
    near_D = (turns_D >= NEAR_TURNS[0]) & (turns_D <= NEAR_TURNS[1])
    slow_D = turns_D < NEAR_TURNS[0]
    # learned heads keep meaning in channels that hardly turn with the position
    gain = GAINS[kind] * (64 / width) ** 0.25  # the scores of unlike tokens are as large at every width
    about, near = {"semantic": (1.0, 0.0), "local": (0.35, 1.0), "mixed": (0.8, 0.7)}[kind]
    query_and_key = []
    for side in ("query", "key"):
        sees = meets + 0.5 * content_NF @ matrix(side)
        x_ND = about * sees * torch.where(slow_D, 1.0, 0.4) + near * place_D * torch.where(near_D, 1.0, 0.3)
        query_and_key.append(gain * x_ND / x_ND.square().mean(dim=1, keepdim=True).sqrt())
    return query_and_key[0], query_and_key[1], content_NF @ matrix("value")


def oracle_share(q_BAND: Tensor, k_BAND: Tensor, mass: float = 0.9, queries: int = 256) -> Tensor:
    """The mean share of the keys that hold `mass` of a query's attention, the most probable first, by head (A,).

    Over `queries` evenly spaced queries. No choice of keys can keep fewer.
    """
    some = torch.linspace(0, q_BAND.shape[2] - 1, min(queries, q_BAND.shape[2]), device=q_BAND.device).long()
    share = []
    for q_AND, k_AND in zip(q_BAND[:, :, some].float(), k_BAND.float(), strict=True):
        p_ANM = ((q_AND * q_AND.shape[-1] ** -0.5) @ k_AND.mT).softmax(dim=-1)
        before_ANM = p_ANM.sort(dim=-1, descending=True).values.cumsum(dim=-1)
        share.append(((before_ANM < mass).sum(dim=-1) + 1).float().mean(dim=-1) / k_AND.shape[-2])
    return torch.stack(share).mean(dim=0)
