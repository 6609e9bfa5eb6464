"""The router's configuration."""

from dataclasses import dataclass, field

from springtide.config import setting


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files that open the listeners to other machines: both fronts speak TLS and ask for tokens then."""

    tls_cert: str = setting("", doc="certificate (PEM)")
    tls_key: str = setting("", doc="private key (PEM)")
    tls_client_ca: str = setting("", doc="CA that client certificates must come from (mTLS)")
    token_file: str = setting("", doc="file with one accepted bearer token a line")
    insecure: bool = setting(False, doc="allow listeners on other than loopback addresses without TLS and tokens")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds of one request, RT11."""

    connect_timeout_s: float = setting(10.0, doc="connecting to a worker", unit="s", minimum=0.01)
    total_timeout_s: float = setting(
        300.0,
        doc="a whole answer that is no stream, and a stream up to its first token; never cuts a stream that goes on",
        unit="s",
        minimum=0.1,
    )
    first_byte_timeout_s: float = setting(
        0.0, doc="up to the first token of a stream; 0: total_timeout_s", unit="s", minimum=0
    )
    idle_timeout_s: float = setting(120.0, doc="gap between two tokens of a stream", unit="s", minimum=0.1)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`python -m router`."""

    controlplane: str = setting("127.0.0.1:7400", doc="control plane's gRPC address", env="SPRINGTIDE_ADDRESS")
    listen: str = setting("127.0.0.1:7500", doc="gRPC address; port 0 takes a free one")
    generate_front: str = setting(
        "h2", doc="what serves Generate on the gRPC address: h2 (our own HTTP/2, cheap per token) or grpcio"
    )
    http_listen: str = setting("127.0.0.1:8780", doc="OpenAI HTTP address; port 0 takes a free one")
    data_dir: str = setting("springtide-data", doc="folder for router.json, the router's id and its last table")
    router_id: str = setting("", doc="stable name of this router; empty: made once and kept in data_dir")
    metrics_port: int = setting(-1, doc="Prometheus port; 0 takes a free one, -1 is off", minimum=-1, maximum=65535)
    metrics_host: str = setting("127.0.0.1", doc="address of the Prometheus endpoint")
    log_level: str = setting("info", doc="log level, e.g. info or info,router=debug")
    max_attempts: int = setting(5, doc="workers tried for one request before its first token", minimum=1, maximum=100)
    continue_streams: bool = setting(
        True, doc="continue streams on another worker from the tokens that the client has when theirs is lost"
    )
    max_continuations: int = setting(3, doc="how often one stream is continued", minimum=0, maximum=100)
    continuation_max_bytes: int = setting(
        256 * 1024 * 1024,
        doc="token ids kept for all streams together; one over it is not continued",
        unit="bytes",
        minimum=0,
    )
    max_body_bytes: int = setting(32 * 1024 * 1024, doc="largest HTTP request body", unit="bytes", minimum=1024)
    max_connections: int = setting(20_000, doc="HTTP client connections at a time", minimum=1)
    workers: int = setting(
        1,
        doc="processes that share the ports and one view of load; each relays on one core",
        minimum=1,
        maximum=64,
    )
    link: bool = setting(
        True, doc="all requests to one worker over one connection, where its shim offers it; false: one connection each"
    )
    drain_timeout_s: float = setting(30.0, doc="on SIGTERM: how long running requests may finish", unit="s", minimum=0)
    timeouts: Timeouts = field(default_factory=Timeouts)
    security: TlsConfig = field(default_factory=TlsConfig)
