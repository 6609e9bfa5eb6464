"""What the control plane answers on the wire, to agents, routers and operators. Services kick the leader."""
