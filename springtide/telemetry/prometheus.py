"""The Prometheus endpoint of a process: `GET /metrics` on its own port, served by a thread."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from springtide.errors import InvalidArgument

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

Page = Callable[[Mapping[str, str]], object]
"""Takes the query's fields (the last of each), gives what becomes the JSON body."""


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A running endpoint. `port` is the one really bound."""

    host: str
    port: int
    _server: Any
    _thread: Any

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)


def prometheus_server(
    host: str,
    port: int,
    registry: "CollectorRegistry | None" = None,
    *,
    insecure: bool = False,
    pages: Mapping[str, Page] | None = None,
) -> PrometheusServer | None:
    """Starts it; port 0 takes a free one, below 0 means off (None). `pages`: further paths that answer with JSON, each
    made anew for a request, in the endpoint's thread. It speaks plain HTTP without tokens: `insecure`
    says that other machines may reach it all the same. Raises InvalidArgument for such a host, or a port in use."""
    if port < 0:
        return None
    from prometheus_client import REGISTRY, start_http_server

    from springtide.rpc.address import Address

    if not (insecure or Address(host, port).is_loopback):
        raise InvalidArgument(
            field="metrics_host",
            value=host,
            problem="is reachable from other machines, and metrics are plain HTTP without tokens",
            remedy="Use 127.0.0.1, or say in the configuration that the network is trusted.",
            reason="INSECURE_LISTENER",
        )
    try:
        server, thread = start_http_server(port, addr=host, registry=registry or REGISTRY)
    except OSError as error:
        raise InvalidArgument(
            field="metrics_port",
            value=f"{host}:{port}",
            problem=error.strerror or str(error),
            remedy="Choose another --metrics-port; 0 takes a free one, -1 turns metrics off.",
            reason="PORT_IN_USE",
        ) from None
    if pages:
        server.set_app(_with_pages(server.get_app(), pages))
    return PrometheusServer(host=host, port=server.server_port, _server=server, _thread=thread)


def _with_pages(metrics: Any, pages: Mapping[str, Page]) -> Any:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        page = pages.get(environ.get("PATH_INFO", ""))
        if page is None:
            return metrics(environ, start_response)
        try:
            status, content = "200 OK", page(dict(parse_qsl(environ.get("QUERY_STRING", ""))))
        except Exception:
            log.exception("the page %s failed", environ.get("PATH_INFO"))
            status, content = "500 Internal Server Error", {"error": "see the log"}
        body = json.dumps(content).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    return app
