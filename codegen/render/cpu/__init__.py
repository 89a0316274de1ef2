"""C++ sources."""
