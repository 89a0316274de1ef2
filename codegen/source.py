"""What rendering hands to the build: one torch-free translation unit with a plain C entry point."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass


class Target(enum.Enum):
    """The language a program is rendered in."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Source:
    """One generated library.

    Attributes:
        name: the region's name, an identifier; used for file names.
        entry: the C symbol to call: ``int entry(void* buffer..., void* stream)``. It takes one pointer per
            program argument, then one to `numbers` unless these are None, then the stream (ignored on the CPU), and
            returns 0 or an error code.
        target: language of `text`.
        text: the translation unit; includes headers from `templates/include` by file name.
        headers: file names of the headers it includes (their contents are part of the cache key).
        arch: CUDA architecture such as ``"sm_90"``; of a CPU ``"native"``, the one at hand, or a level such as ``"x86-64-v3"``.
        numbers: what `entry` is called with for the sizes at hand, 8 bytes each, where one library serves many sizes:
            ``int64_t``, ``double`` for a float.
        replay: the C symbol of a function as `entry`, for calls that come again and again, mostly with the same pointers; None where
            there is none.
        of_list: whether `entry` takes one pointer in the place of those of the arguments, to an array of them, and these are aligned to nothing.
    """

    name: str
    entry: str
    target: Target
    text: str
    headers: tuple[str, ...]
    arch: str
    numbers: tuple[int | float, ...] | None = None
    replay: str | None = None
    of_list: bool = False

    def packed_numbers(self) -> bytes:
        """The numbers as `entry` reads them."""
        return b"".join(struct.pack("d" if isinstance(each, float) else "q", each) for each in self.numbers or ())
