"""The router beside its peers: CPU per token and request, first tokens, memory. `make bench`; see docs/benchmarks."""
