"""Stubs of the contracts in `protos/offbeat/v1`, written by `make protos`; never edited by hand."""
