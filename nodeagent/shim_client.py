"""The agent's side of a shim's control socket."""

from google.protobuf import json_format

from nodeagent.engines.http import EngineHttp, NoAnswer, Response
from springtide.errors import Conflict, SpringtideError
from springtide.v1 import shim_pb2

_TIMEOUT_S = 5.0


class ShimClient:
    """Calls to one shim. Every call raises NotListening or NoAnswer when the shim is away."""

    def __init__(self, control_path: str) -> None:
        self._http = EngineHttp(f"unix:{control_path}", timeout_s=_TIMEOUT_S)

    async def status(self, after: int = 0, wait_s: float = 0.0) -> shim_pb2.ShimStatus:
        """The status; with `wait_s` it waits so long for a version above `after`."""
        target = f"/v1/status?after={after}&wait_s={wait_s:g}"
        return self._read(await self._http.request("GET", target, timeout_s=wait_s + _TIMEOUT_S))

    async def admission(
        self,
        admission: "shim_pb2.ShimAdmission.ValueType",
        generation: int,
        max_in_flight: int = 0,
        abort_in_flight: bool = False,
    ) -> shim_pb2.ShimStatus:
        """Opens, pauses or drains. Raises Conflict when the shim knows a newer generation."""
        order = shim_pb2.SetAdmission(
            admission=admission, generation=generation, max_in_flight=max_in_flight, abort_in_flight=abort_in_flight
        )
        return self._read(await self._http.post("/v1/admission", json_format.MessageToDict(order)))

    async def stop(self, grace_s: float) -> shim_pb2.ShimStatus:
        """Begins the engine's stop; 0: SIGKILL at once."""
        return self._read(await self._http.post("/v1/stop", {"graceS": grace_s}))

    async def quit(self) -> shim_pb2.ShimStatus:
        """Ends the shim. Raises Conflict while its engine runs."""
        return self._read(await self._http.post("/v1/quit", {}))

    @staticmethod
    def _read(response: Response) -> shim_pb2.ShimStatus:
        if response.status == 409:
            raise Conflict(response.text()[:300])
        if response.status != 200:
            raise SpringtideError(f"the shim answered {response.status}: {response.text()[:300]}")
        try:
            return json_format.Parse(response.body, shim_pb2.ShimStatus(), ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise NoAnswer(f"the shim's status cannot be read: {error}") from None
