"""What kernels without a contraction share: threads that go over rows and columns, phase after phase; pointwise kernels need nothing else."""
