"""What this process uses of the cache, as a part of what `torch.compiler.save_cache_artifacts` gives.

PyTorch keeps what its own caches hold as artifacts, each of a type that a class stands for; ours is one more. `load_cache_artifacts` gives
up where it meets a type that nobody registered, and then loads nothing at all. So it is registered where a program asks for it, and not
by itself: what a process saves stays readable for those that know nothing of this package.
"""

from __future__ import annotations

import functools

from torch.compiler import _cache

from fusepass.codegen import cache_archive, cache_uses
from fusepass.errors import BuildError, warn


class FusepassCacheArtifact(_cache.CacheArtifact):
    """A library, a measured choice, or what was generated of a region; `key` says which."""

    @staticmethod
    def type() -> str:
        """The name of the type, in what is saved."""
        return "fusepass"

    def populate_cache(self) -> None:
        """Put it into the cache directory, where it is not there yet; warns where that cannot be."""
        try:
            cache_archive.unpack(self.content)
        except (BuildError, OSError) as error:
            warn(f"{self.key} of the saved caches is not taken in: {error}")


@functools.cache
def register() -> None:
    """See `fusepass.register_cache_artifacts`."""
    _cache.CacheArtifactFactory.register(FusepassCacheArtifact)
    recorded: set[tuple[str, str]] = set()

    def record(folder: str, key: str) -> None:
        if (folder, key) in recorded:
            return
        content = cache_archive.packed(folder, key)
        if content is not None:  # else it was removed meanwhile
            recorded.add((folder, key))
            _cache.CacheArtifactManager.record_artifact(FusepassCacheArtifact.type(), f"{folder}/{key}", content)

    cache_uses.listen(record)
