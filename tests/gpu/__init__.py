"""Proof on real GPUs: `make test-gpu`. Not collected by `make test`."""
