"""Who may open a session: the join tokens of provisioners and of the nodes that they give."""

from collections.abc import Iterable
from typing import Any

from springtide.model.enums import NodeState
from springtide.model.node import Node
from springtide.rpc.tokens import PREFIX, JoinToken, JoinTokens, bearer, expired, not_for

NODE_TOKEN_S = 86_400.0  # a node that is still on its way, or is here, may show it for longer: see `node`
_AWAITED = frozenset({NodeState.REQUESTED, NodeState.UP, NodeState.RELEASING, NodeState.LOST})


class Door:
    """`tokens` None: this control plane listens on loopback only, and asks for none."""

    def __init__(self, tokens: JoinTokens | None = None) -> None:
        self.tokens = tokens

    def provisioner(self, context: Any, provisioner_id: str) -> None:
        """Raises Unauthenticated for a token that is expired or another's."""
        token = self._shown(context)
        if token is None:
            return  # a general token, a client certificate, or loopback: the listener has let it in
        if provisioner_id not in token.ids:
            raise not_for(token, "provisioner", provisioner_id)
        if token.expired:
            raise expired(token)

    def node(self, context: Any, node_id: str, node: Node | None) -> None:
        """A node's token lives as long as the node: while the control plane awaits the node or has it, age does not
        matter (a job may wait for days, an agent may come back after weeks). Raises Unauthenticated."""
        token = self._shown(context)
        if token is None:
            return
        if node_id not in token.ids:
            raise not_for(token, "node", node_id)
        awaited = node is not None and node.provided is not None and node.state in _AWAITED
        if token.expired and not awaited:
            raise expired(token)

    def token_for_nodes(self, node_ids: Iterable[str]) -> str:
        """Empty where none is needed."""
        return "" if self.tokens is None else self.tokens.for_nodes(node_ids, NODE_TOKEN_S)

    def _shown(self, context: Any) -> JoinToken | None:
        if self.tokens is None:
            return None
        shown = bearer(context.invocation_metadata() or ())
        return self.tokens.read(shown) if shown.startswith(PREFIX) else None
