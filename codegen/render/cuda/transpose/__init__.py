"""Tiles that cross a block's shared memory, where one side's neighbours are the other side's strides."""
