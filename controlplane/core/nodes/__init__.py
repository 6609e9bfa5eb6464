"""Nodes that come and go: what is asked of provisioners, and the saga of each node.

REQUESTED is committed before the order is sent, and the control plane names the node: so an order that is repeated is
the same order, whoever was restarted in between.

slots (what nodes hold) -> facts (what is known of one node) -> saga (what its provisioner says of it; found, ends) ->
offers (what could be had) -> acquire, release -> orders (what provisioners are told)
"""
