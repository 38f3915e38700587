"""Keeps the versions of the weights of one run: publish, fetch, watch."""
