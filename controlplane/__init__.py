"""The control plane: stores worker state and scaling decisions, and brings the one towards the other."""
