"""Gives nodes to the control plane and takes them back: one process per provider of nodes."""
