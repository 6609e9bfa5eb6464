"""Engines behind workers: launch lines, probes and the two engine processes that the project ships.

Kept empty of imports on purpose: the engine processes (`sim`, `llamacpp_server`) live here and must start fast.
"""
