"""What a provisioner says to the control plane and takes from it.

While no control plane answers, the last orders go on: what was asked for is still brought, nothing else is touched.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

import grpc.aio

from provisioner.metrics import ProvisionerMetrics
from provisioner.runner import Runner
from springtide.session import Say, Session
from springtide.v1 import provisioner_pb2 as pb
from springtide.v1 import provisioner_pb2_grpc as pb_grpc
from springtide.wire.provisioner import ProvisionerHello, hello_to_proto, orders_from_proto, report_to_proto

Request: TypeAlias = pb.ProvisionerServiceSessionRequest
Response: TypeAlias = pb.ProvisionerServiceSessionResponse
ProvisionerSession: TypeAlias = Session[Request, Response]


class ProvisionerSpeaker:
    """Implements springtide.session.Speaker."""

    log = logging.getLogger(__name__)

    def __init__(self, runner: Runner, hello: ProvisionerHello, metrics: ProvisionerMetrics) -> None:
        self._runner = runner
        self._hello = hello
        self.metrics = metrics

    def open(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[Request]
    ) -> "grpc.aio.StreamStreamCall[Request, Response]":
        return pb_grpc.ProvisionerServiceStub(channel).Session(requests)

    def hello(self) -> Request:
        return Request(hello=hello_to_proto(self._hello))

    async def refresh(self) -> None:
        """The runner looks by itself."""

    def report(self) -> Request | None:
        """Nothing is reported before the provider has been looked at: an empty report would say that nothing is
        there."""
        return Request(report=report_to_proto(self._runner.report())) if self._runner.ready else None

    def take(self, response: Response, say: Say[Request]) -> None:
        if response.store_id:
            self._runner.apply(orders_from_proto(response))

    def goodbye(self, reason: str) -> Sequence[Request]:
        return [Request(goodbye=pb.ProvisionerGoodbye(reason=reason))]

    def on_change(self, call: Callable[[], None]) -> None:
        self._runner.on_change(call)
