"""What the allocator of memory does with large results."""

from functools import cache

import torch

__all__ = ["keep_freed_memory"]

# Bytes of the largest block that has an effect on what the allocator of glibc keeps.
_KEPT = 2**25 - 2**16


@cache
def keep_freed_memory() -> None:
    """Let the allocator of the C library keep some of the memory that is freed, once for the process.

    glibc gives free memory at the end of its heap back to the system and asks for it again page by page: up
    to a third of the time of a call with a large result. It keeps twice as much as the largest block of
    up to 32 MiB that was freed before. So one such block, which is never written to, is enough.
    """
    torch.empty(_KEPT, dtype=torch.uint8, device="cpu")
