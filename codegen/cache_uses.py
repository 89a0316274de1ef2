"""Tells whoever listens what this process found in the cache or put there, so that just that can be taken along."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str, str], None]] = []


def listen(listener: Callable[[str, str], None]) -> None:
    """Call `listener` from now on with the folder and the key of each entry or record, every time that it is used."""
    _listeners.append(listener)


def tell(folder: str, key: str) -> None:
    """The entry or record of `key` in `folder` was found, or was just put there."""
    for listener in _listeners:
        listener(folder, key)
