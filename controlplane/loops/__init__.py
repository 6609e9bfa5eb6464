"""The loops of the control plane: the leader plans and commits; the hub shows agents and routers what is committed."""
