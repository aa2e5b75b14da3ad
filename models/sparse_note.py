"""Lines for people about the sparse blocks of a model, and the videos for which they are dense."""

from __future__ import annotations

from collections.abc import Mapping

from mmspeed.config import Config
from mmspeed.errors import first_names
from mmspeed.models.sora.model import SoraDiTConfig
from mmspeed.shapes import Bucket

Latent = tuple[int, int, int]


def sparse_lines(sizes: SoraDiTConfig, latents: Mapping[Bucket, Latent]) -> list[str]:
    """Lines that name the blocks with sparse attention, and the buckets that stay dense; none for a dense model."""
    sparse = sizes.sparse
    if sparse is None:
        return []
    aim = f"error {sparse.error:.1%}" if sparse.error is not None else f"{sparse.keep:.0%} of the pairs"
    if sparse.tau is not None:
        aim = f"threshold {sparse.tau:g} / keys"
    if sparse.grouping in ("window", "skip"):
        aim = "a fixed pattern"
    lines = [
        f"sparse attention: {sparse.grouping}, tail {sparse.tail}, {aim}, in {len(sizes.sparse_blocks)} of {sizes.depth} blocks, "
        f"after {sparse.dense_steps} dense steps"
    ]
    short = {bucket: _longest(sizes, latent) for bucket, latent in latents.items()}
    dense = [bucket for bucket, keys in short.items() if bucket.frames > 1 and keys < sparse.min_tokens]
    if dense:
        lines.append(
            f"  dense all the same, with fewer than model.sparse.min_tokens ({sparse.min_tokens}): "
            + first_names([f"{bucket} ({short[bucket]} tokens)" for bucket in dense], 4)
        )
    return lines


def sparse_warnings(sizes: SoraDiTConfig, latents: Mapping[Bucket, Latent], config: Config) -> list[str]:
    """Lines about what keeps a run with `model.sparse` from ever having sparse attention; none where nothing does."""
    sparse = sizes.sparse
    if sparse is None:
        return []
    warnings = []
    videos = {bucket: latent for bucket, latent in latents.items() if bucket.frames > 1}
    if not any(_longest(sizes, latent) >= sparse.min_tokens for latent in videos.values()):
        warnings.append("no video is long enough for sparse attention: all stays dense; lower model.sparse.min_tokens")
    if sparse.dense_steps >= config.train.steps:
        steps = f"model.sparse.dense_steps is {sparse.dense_steps}, train.steps {config.train.steps}"
        warnings.append(f"no step will be sparse: {steps}")
    return warnings


def _longest(sizes: SoraDiTConfig, latent: Latent) -> int:
    """Tokens of the longest sequence that a sparse block attends over."""
    grid = sizes.grid(latent)
    return max(sizes.attended(block, grid) for block in sizes.sparse_blocks)
