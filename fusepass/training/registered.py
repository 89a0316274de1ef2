"""Registers ``backend="fusepass"`` with `torch.compile`, which imports this module when somebody first asks for it by name.

PyTorch loads the entry point and then registers what it gives, and refuses a name that another thread has registered meanwhile.
So the import, which Python makes but once, registers the backend, and the entry point gives None: that PyTorch takes for a use of
`register_backend` as a decorator, and registers nothing.
"""

from __future__ import annotations

from torch._dynamo.backends.registry import register_backend

from fusepass.training.backend import fusepass_backend

register_backend(fusepass_backend, name="fusepass")

entry_point = None
