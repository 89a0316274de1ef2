"""CUDA: a program as one translation unit, its kernels by family."""
