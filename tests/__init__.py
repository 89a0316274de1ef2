"""Tests; a package so that test modules can share `tests.support`."""

import os

# oneDNN 3.12, which PyTorch 2.13 comes with, reads memory that nobody wrote where a CPU has tiles (AMX), in convolutions of bfloat16
# in steps whose result is one wide (pytorch/pytorch#169688). That is no oracle. Read by oneDNN once, at its first call.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
