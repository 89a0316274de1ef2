"""C++ kernels with reductions: row by row, or rows side by side."""
