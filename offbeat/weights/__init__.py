"""Versions of the weights: manifests, hashes, chunks, and the checkpoint service's client."""
