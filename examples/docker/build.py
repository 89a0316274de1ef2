"""First stage: writes the model as an artifact for batches of any size. Calls one row at a time have a signature of their own."""

import sys

import torch
from net import make_net

import fusepass

# "x86-64-v3" runs on every server CPU of the last ten years; "native" would be the one that builds the image.
fusepass.save(
    fusepass.optimize(make_net()),
    sys.argv[1],
    [torch.rand(rows, 4) for rows in (1, 2, 16, 256)],
    architectures=["x86-64-v3"],
    dynamic=True,
)
