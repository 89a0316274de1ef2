"""Kernels that reduce rows or scan them: what begins anywhere, waits in shared memory, or is shared by a team of blocks."""
