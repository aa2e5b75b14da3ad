"""Split float32 into bfloat16 and the 16 bits that it lacks, and join them, bit for bit.

Rounded half up in the bit pattern: hi = (bits + 0x8000) >> 16 is a bfloat16, lo = bits & 0xFFFF the rest, and bits = (hi << 16) + lo with
lo read as a signed number. hi differs from torch's rounding, half to even, at exact ties alone. The even kind would need a 17th bit.

Finite numbers and infinities come out as by any rounding (what is nearer to infinity than to the greatest bfloat16 shows as infinity).
float32 has more NaNs than bfloat16 has NaNs times 65536, so a few cannot show as NaN, whatever the code. Here every quiet NaN does, which
are all that arithmetic makes, 0x7FFFFFFF among them. The exceptions have the quiet bit clear and a payload below 65536: 32767 of each sign
show as infinity, 32768 as zero. They too come back exactly.

Why this takes an exchange: adding 0x8000 to 0x7FFF8000..0x7FFFFFFF, quiet NaNs, would carry into the sign and show zero. Before it they
change places with the signalling 0x7F808000..0x7F80FFFF, and likewise those with the sign bit set.

Arguments of `split` and `join` are flat and contiguous; bytes lie little end first, as on all devices that torch knows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# elements at a time: intermediate tensors take 14 bytes of each on an accelerator, and lie in a CPU's cache
CHUNK = 1 << 22
CPU_CHUNK = 1 << 17

_PLACE = 0x7FFF8000  # the bits that distinguish the two places
_PLACES = (0x7FFF8000, 0x7F808000)


def _exchange_nans(values_Z: Tensor) -> Tensor:
    """Exchange the displaced NaNs of float32 values, in place; its own inverse."""
    # a CPU can check first for any; elsewhere the check would make this thread wait
    if values_Z.device.type != "cpu" or values_Z.amax().isnan():
        bits_Z = values_Z.view(torch.int32)
        place_Z = bits_Z & _PLACE
        at_place_Z = (place_Z == _PLACES[0]) | (place_Z == _PLACES[1])
        bits_Z.bitwise_xor_(at_place_Z.to(torch.int32).mul_(_PLACES[0] ^ _PLACES[1]))
    return values_Z


def _low(bits_Z: Tensor) -> Tensor:
    return bits_Z.view(torch.int16).view(-1, 2)[:, 0]  # not by a conversion, which may saturate


def _high(bits_Z: Tensor) -> Tensor:
    return bits_Z.view(torch.int16).view(-1, 2)[:, 1]


def _parts(values_Z: Tensor) -> Iterator[slice]:
    size = CPU_CHUNK if values_Z.device.type == "cpu" else CHUNK
    return (slice(start, start + size) for start in range(0, values_Z.numel(), size))


def split(values_Z: Tensor, hi_Z: Tensor, lo_Z: Tensor | None = None) -> None:
    """Write float32 values into bfloat16 `hi_Z`, and the bits that these lack into int16 `lo_Z`, if given."""
    for part in _parts(values_Z):
        bits_Z = _exchange_nans(values_Z[part].clone()).view(torch.int32)
        if lo_Z is not None:
            lo_Z[part].copy_(_low(bits_Z))
        hi_Z[part].view(torch.int16).copy_(_high(bits_Z.add_(0x8000)))


def join(hi_Z: Tensor, lo_Z: Tensor, values_Z: Tensor) -> None:
    """Write the float32 values of which `split` made bfloat16 `hi_Z` and int16 `lo_Z` into `values_Z`."""
    for part in _parts(values_Z):
        bits_Z = values_Z[part].view(torch.int32).copy_(hi_Z[part].view(torch.int16))
        _exchange_nans(bits_Z.bitwise_left_shift_(16).add_(lo_Z[part]).view(torch.float32))


def halves_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16, int16) halves of float32 values of any shape."""
    flat_Z = values.detach().contiguous().view(-1)
    hi_Z, lo_Z = torch.empty_like(flat_Z, dtype=torch.bfloat16), torch.empty_like(flat_Z, dtype=torch.int16)
    split(flat_Z, hi_Z, lo_Z)
    return hi_Z.view(values.shape), lo_Z.view(values.shape)


def rounded(values: Tensor) -> Tensor:
    """float32 values of any shape as bfloat16, half up."""
    return halves_of(values)[0]
