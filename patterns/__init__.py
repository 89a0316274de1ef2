"""What may fuse with what: op classes, patterns, legality, partition, and the rules that simplify a graph before."""
