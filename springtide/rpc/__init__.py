"""gRPC plumbing of every process: servers, channels, and errors that keep their field, value and remedy on the wire.

server = Server(security=...)                     # springtide.rpc.server
server.add(add_AgentServiceServicer_to_server, servicer, "springtide.v1.AgentService")
server.listen("127.0.0.1:0", setting="listen")
await server.start()

async with channel("127.0.0.1:7400") as ch:       # springtide.rpc.client
    with decoded_errors("control plane", "127.0.0.1:7400"):
        await ControlPlaneServiceStub(ch).GetStatus(GetStatusRequest())
"""

from springtide.rpc.address import Address, parse_address
from springtide.rpc.client import DEFAULT_ADDRESS, ChannelSecurity, channel, controlplane_address, decoded_errors
from springtide.rpc.server import Security, Server
from springtide.rpc.status import decode_error, to_status

__all__ = [
    "DEFAULT_ADDRESS",
    "Address",
    "ChannelSecurity",
    "Security",
    "Server",
    "channel",
    "controlplane_address",
    "decode_error",
    "decoded_errors",
    "parse_address",
    "to_status",
]
