"""Shapes of latents in command-line options."""

from __future__ import annotations

from mmspeed.errors import UserError


def parse_latent(text: str) -> tuple[int, int, int]:
    """The latent (T, h, w) of an option. Raises UserError unless it is three numbers, the last two even (a patch is 1 x 2 x 2)."""
    numbers = [int(word) if word.isdecimal() else 0 for word in text.split("x")]
    if len(numbers) != 3 or min(numbers) < 1 or numbers[1] % 2 or numbers[2] % 2:
        raise UserError(f"--latent {text}: give frames x height x width with even height and width, such as 8x32x32")
    frames, height, width = numbers
    return frames, height, width
