"""The simulated engine: an ordinary process with vLLM's HTTP surface, a timing model, faults and predictable tokens.

`tokens` says what an answer is (pure, for tests too), `batching` when it comes (pure), the rest serves it.
"""
