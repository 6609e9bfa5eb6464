"""Trajectories of a model that searches the web, over /v1/completions. See README.md."""
