"""Windows over images: a block has an output tile, and what it reads in shared memory."""
