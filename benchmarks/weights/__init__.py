"""The weight path beside raw TCP, a plain gRPC stream, and the engine's own load: `python -m benchmarks.weights`."""
