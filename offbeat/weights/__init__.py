"""Versions of the weights: manifests, hashing, chunking, and the client of the checkpoint service."""
