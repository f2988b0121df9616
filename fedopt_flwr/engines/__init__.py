"""Ways to run a federation: in this process, on Flower's runtimes, over gRPC streams."""
