"""Offbeat: asynchronous reinforcement learning from feedback, as independent gRPC services.

This package is the library that the services share. It imports neither torch nor vllm, deepspeed or transformers.
"""

__version__ = "0.1.0"
