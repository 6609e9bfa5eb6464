"""One connection between a router and a shim that carries all their requests: docs/decisions/link.md.

Router's side: `pool.links = Links()`; then the pool's connections to a shim that offers it are streams of one link.
Shim's side: `server.upgrades = LinkServer(server).upgrade` and `reply_headers=OFFER` on its routes.
"""

from springtide.link.client import Links
from springtide.link.frames import LINK_PATH, LINK_PROTOCOL, OFFER
from springtide.link.server import LinkServer, is_linked

__all__ = ["LINK_PATH", "LINK_PROTOCOL", "OFFER", "LinkServer", "Links", "is_linked"]
