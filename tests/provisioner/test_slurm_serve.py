"""`springtide serve-slurm`: one command on a real SLURM of virtual nodes, and what it is told wrongly."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from springtide.cli.root import springtide
from springtide.cli.serve_slurm.options import check, engine_args, read_options, spec
from springtide.cli.serve_slurm.stack import table
from springtide.errors import InvalidArgument
from tests.ports import free_port
from tests.provisioner.slurm_cluster import VirtualCluster, running_cluster
from tests.system.stack import ROOT, wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    with running_cluster() as found:
        yield found


class Served:
    """One `springtide serve-slurm` in a folder, started again and again on the same ports."""

    def __init__(self, folder: Path, cluster: VirtualCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.token, self.ca = "", Path()
        self.environ = {**cluster.environ, "PYTHONPATH": str(ROOT), "STACK_UNDER_TEST": str(folder)}
        config = {
            "engine": "sim",
            "partition": "lowcancel",
            "gpus_per_node": 2,
            "tensor_parallel_size": 1,
            "max_nodes": 9,
            "time_limit": "60",
            "notice_s": 20,
            "preempt_grace_s": 6,
            "simulated_gpus": True,
            "log_dir": str(folder / "logs"),
            "engine_extra_args": "--startup-s 0.2 --decode-base-ms 5",
        }
        (folder / "config.json").write_text(json.dumps(config))
        self.flags = [
            *("--config", str(folder / "config.json"), "--model", "org/Tide-7B", "--max-nodes", "2"),
            *("--port", str(self.port), "--controlplane-port", str(free_port()), "--router-port", str(free_port())),
            *("--data-dir", str(folder / "data"), "--advertise-file", str(folder / ".scheduler_url")),
            *("--node-acquire-interval", "0.3"),
        ]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "springtide.cli", *arguments]

    def start(self, *more: str) -> None:
        with (self.folder / "out").open("ab") as out:
            self.process = subprocess.Popen(
                self.command("serve-slurm", *self.flags, *more),
                stdout=out,
                stderr=out,
                env=self.environ,
                cwd=self.folder,
                start_new_session=True,
            )

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        self.process = None
        return code

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()  # its undertaker ends the rest
            self.process.wait(10)
        for job in self.jobs():
            self.cluster.run("scancel", "--signal=KILL", "--full", job, check=False)

    def operate(self, *arguments: str) -> str:
        command = self.command("slurm", *arguments, "--data-dir", str(self.folder / "data"))
        done = subprocess.run(command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def jobs(self) -> set[str]:
        found = self.cluster.run("squeue", "-h", "-t", "PD,CF,R,CG", "-o", "%i %j").splitlines()
        return {line.split()[0] for line in found if line.split()[1].startswith("springtide:slurm:")}

    def get(self, path: str) -> Any:
        url = (self.folder / ".scheduler_url").read_text().strip()
        request = urllib.request.Request(url + path, headers={"authorization": f"Bearer {self.token}"})
        trust = ssl.create_default_context(cafile=str(self.ca)) if self.token else None
        with urllib.request.urlopen(request, timeout=5, context=trust) as answer:
            return json.load(answer)

    def wait(self, ready: int, nodes: int) -> dict[str, Any]:
        """`/cluster_status`, once so many workers are ready on so many jobs."""

        def probe() -> dict[str, Any] | None:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "out").read_text()[-4000:]
            found: dict[str, Any] = self.get("/cluster_status")
            good = found["ready_workers"] == ready and found["total_nodes_active"] == nodes == len(self.jobs())
            return found if good else None

        try:
            return wait_for(f"{ready} ready workers on {nodes} nodes", probe, 90, every_s=0.2)
        except AssertionError as error:
            said = (self.folder / "out").read_text()[-4000:]
            raise AssertionError(f"{error}\n{said}\n{self.cluster.jobs()}") from None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_command_serves(cluster: VirtualCluster, tmp_path: Path) -> None:
    """PV4, CM3, CM9, CP10: the flags win over the file; answers at one address; the target is lowered and raised; a
    worker is cancelled with its job; a restart finds its jobs again; the end releases them only when told."""
    served = Served(tmp_path, cluster)
    try:
        served.start()
        view = served.wait(ready=4, nodes=2)
        shape = ("model", "engine", "max_nodes", "tensor_parallel_size", "dp_per_node", "pending_slurm_jobs")
        assert [view[key] for key in shape] == ["org/Tide-7B", "sim", 2, 1, 2, 0]
        assert {worker["slurm_job_id"] for worker in view["workers"]} == served.jobs()
        body = {"model": "org/Tide-7B", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"http://127.0.0.1:{served.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]

        assert "1 nodes, 2 workers" in served.operate("target", "1")
        view = served.wait(ready=2, nodes=1)
        cancelled = json.loads(served.operate("cancel-worker", view["workers"][0]["worker_id"], "--json"))
        assert (cancelled["job_ends"], cancelled["remaining_workers"]) == (False, 1)
        served.wait(ready=1, nodes=1)
        served.operate("target", "2")
        served.wait(ready=4, nodes=2)

        before = served.jobs()
        assert served.stop() == 0
        assert served.jobs() == before
        assert not (tmp_path / ".scheduler_url").exists()
        served.start("--release-on-exit")
        view = served.wait(ready=4, nodes=2)
        assert {worker["slurm_job_id"] for worker in view["workers"]} == before, "nothing was asked for twice"
        assert served.stop() == 0
        assert served.jobs() == set()
        assert set(cluster.jobs().values()) == {"CANCELLED"}
    finally:
        served.kill()
    wait_for("the end of all jobs", lambda: not served.jobs())
    wait_for("the end of all processes", lambda: not _left(tmp_path))


def _left(folder: Path) -> list[str]:
    mark = f"STACK_UNDER_TEST={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({}, "--model"),
        ({"model": "m", "tensor_parallel_size": 3}, "--tensor-parallel-size"),
        ({"model": "m", "engine": "triton"}, "--engine"),
        ({"model": "m", "gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"model": "m", "host": "0.0.0.0"}, "--host"),
        ({"model": "m", "tls_cert": "a", "tls_key": "b", "tls_ca": "c"}, "--token-file"),
        ({"model": "m", "reasoning_effort": "huge"}, "--reasoning-effort"),
        ({"model": "m", "reasoning_effort": "low", "engine": "sglang"}, "--reasoning-effort"),
        ({"model": "m", "conda_env": "a", "venv_path": "b"}, "--venv-path"),
        ({"model": "m", "max_nodes": 0}, "--max-nodes"),
    ],
)
def test_what_cannot_work_is_said(flags: dict[str, Any], field: str) -> None:
    """PV4: --model is required, the TP size divides the node (3.29), a network address needs TLS or trust."""
    with pytest.raises(InvalidArgument) as wrong:
        read_options(None, flags)
    assert wrong.value.field == field


def test_the_file_and_the_flags(tmp_path: Path) -> None:
    """Flags win only when they are given; an unknown key and a wrong type are named."""
    path = tmp_path / "c.json"
    path.write_text('{"model": "m", "engine": "sglang", "gpus_per_node": 4, "max_nodes": 3}')
    found = read_options(path, {"max_nodes": 5, "engine": None, "gpus_per_node": None})
    assert (found.engine, found.gpus_per_node, found.max_nodes) == ("sglang", 4, 5)
    for text, named in (('{"modell": 1}', "Did you mean model"), ('{"max_nodes": "3"}', "type int"), ("[]", "object")):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=named):
            read_options(path, {})


def test_settings_become_the_engines_flags() -> None:
    """3.13, 3.14: memory, length, prefix caching and reasoning effort, per engine; `oss` is vLLM."""
    base = {"model": "openai/gpt-oss-120b", "max_model_len": 8192, "engine_extra_args": "--seed 1"}
    oss = read_options(None, {**base, "engine": "oss", "reasoning_effort": "high", "enable_prefix_caching": False})
    args = engine_args(oss)
    assert args[:5] == ["--gpu-memory-utilization", "0.9", "--max-model-len", "8192", "--no-enable-prefix-caching"]
    assert args[5:7] == ["--default-chat-template-kwargs", '{"reasoning_effort": "high"}']
    assert args[7:] == ["--seed", "1"]
    assert spec(oss)["engine"] == "vllm"
    assert spec(oss)["name"] == "gpt-oss-120b"
    sglang = engine_args(read_options(None, {**base, "engine": "sglang", "enable_prefix_caching": False}))
    assert sglang[:5] == ["--mem-fraction-static", "0.9", "--context-length", "8192", "--disable-radix-cache"]
    assert engine_args(check(read_options(None, {"model": "m", "engine": "sim"}))) == []


def test_the_table() -> None:
    """3.06: 8 GPUs and 16 nodes."""
    assert [line.split()[:3] for line in table(8, 16, 4)[1:]] == [
        ["1", "8", "128"],
        ["2", "4", "64"],
        ["4", "2", "32"],
        ["8", "1", "16"],
    ]
    assert table(8, 16, 4)[3].endswith("<-")


def test_a_dry_run_shows_everything_and_starts_nothing(tmp_path: Path) -> None:
    """PV4: the one command of the seed, with its defaults."""
    flags = ["--model", "meta-llama/Llama-3-70B-Instruct", "--tensor-parallel-size", "4", "--max-nodes", "16"]
    seed = ["--qos", "h200_lowest", "--partition", "h200", "--account", "dream", "--conda-env", "rl_verl"]
    more = ["--no-exclusive", "--no-prefix-caching", "--data-dir", str(tmp_path / "d"), "--dry-run"]
    said = CliRunner().invoke(springtide, ["serve-slurm", *flags, *seed, *more])
    assert said.exit_code == 0, said.output
    for part in (
        'qos = "h200_lowest"',
        'account = "dream"',
        "exclusive = false",
        "max_nodes = 16",
        "conda run -n rl_verl",
    ):
        assert part in said.output, part
    assert not (tmp_path / "d").exists()


def test_loopback_is_refused_where_jobs_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs could not reach the control plane: said before anything starts."""
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho gpu-17\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = CliRunner().invoke(springtide, ["serve-slurm", "--model", "m", "--data-dir", str(tmp_path / "d")])
    assert said.exit_code == 2
    assert "gpu-17" in said.output
    assert "--host ADDRESS" in said.output


def own_address() -> str:
    """Of this host's way out, or loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_launchers_are_jobs(cluster: VirtualCluster, tmp_path: Path) -> None:
    """PV4, CM9: the scheduler as a CPU job of seven days that writes `.scheduler_url`; a worker joins by hand."""
    served = Served(tmp_path, cluster)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "springtide"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m springtide.cli "$@"\n')
    command.chmod(0o755)
    served.environ["PATH"] = f"{tmp_path / 'bin'}:{served.environ['PATH']}"
    network = ["--host", "0.0.0.0", "--trusted-network", "--advertise-host", own_address()]
    more = [*served.flags, "--max-nodes", "1", *network]
    where = more.index("--advertise-file")
    del more[where : where + 2]

    def sbatch(option: str, script: str, *arguments: str, **environ: str) -> str:
        launcher = str(ROOT / "deploy" / "slurm" / script)
        done = subprocess.run(
            ["sbatch", "--parsable", "-p", "high", option, launcher, *arguments],
            env={**served.environ, **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return done.stdout.strip()

    scheduler = sbatch("--mem=100", "scheduler.slurm", *more)
    worker = ""
    try:

        def ready(count: int) -> bool:
            found: dict[str, Any] = served.get("/cluster_status")
            return bool(found["ready_workers"] == count)

        wait_for("the scheduler's first worker", lambda: ready(2), 90, every_s=0.2)
        assert "7-00:00:00" in cluster.run("squeue", "-h", "-j", scheduler, "-o", "%l")
        port = more[more.index("--controlplane-port") + 1]
        worker = sbatch("--gres=gpu:2", "worker.slurm", "--gpus", "2", SPRINGTIDE_ADDRESS=f"127.0.0.1:{port}")
        wait_for("the second node", lambda: served.get("/cluster_status")["total_nodes_active"] == 2, 90, every_s=0.2)
        cluster.run("scancel", "--batch", "--signal=TERM", worker)
        wait_for("the worker's end", lambda: cluster.jobs("all").get(worker) == "COMPLETED")
        cluster.run("scancel", "--batch", "--signal=TERM", scheduler)
        wait_for("the scheduler's end", lambda: cluster.jobs("all").get(scheduler) == "COMPLETED", 60)
        assert not (tmp_path / ".scheduler_url").exists()
        assert len(served.jobs()) == 1, "worker jobs stay"
    finally:
        for job in filter(None, (scheduler, worker)):
            cluster.run("scancel", "--signal=KILL", "--full", job, check=False)
        served.kill()
    wait_for("the end of all processes", lambda: not _left(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_with_tls_and_tokens(cluster: VirtualCluster, tmp_path: Path) -> None:
    """PV4, rule 13: the control plane listens for the cluster with TLS; jobs join with tokens of their own; the OpenAI
    address asks for one, too; no secret is in any command line, script or output of a job."""
    host = own_address()
    names = f"subjectAltName=DNS:localhost,IP:127.0.0.1,IP:{host}"
    made = [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        names,
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run(["openssl", "req", "-x509", *curve, *made], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "tokens").write_text("let-me-in\n")
    served = Served(tmp_path, cluster)
    served.token, served.ca = "let-me-in", tmp_path / "cert.pem"
    tls = ("--tls-cert", "cert.pem", "--tls-key", "key.pem", "--tls-ca", "cert.pem", "--token-file", "tokens")
    network = ("--host", "0.0.0.0", "--advertise-host", host, "--trusted-network")
    try:
        served.start(*tls, *network, "--max-nodes", "1", "--release-on-exit")
        served.wait(ready=2, nodes=1)
        assert (tmp_path / ".scheduler_url").read_text().startswith(f"https://{host}:")
        served.token = "wrong"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            served.get("/cluster_status")
        (job,) = served.jobs()
        script = cluster.run("scontrol", "write", "batch_script", job, "-")
        logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
        lines = "".join(_command_lines(tmp_path, cluster))
        for text in (script, logs, lines, cluster.run("scontrol", "show", "job", job)):
            assert "stj1." not in text
            assert "let-me-in" not in text
        assert served.stop() == 0
        assert served.jobs() == set()
    finally:
        served.kill()
    wait_for("the end of all processes", lambda: not _left(tmp_path))


def _command_lines(folder: Path, cluster: VirtualCluster) -> list[str]:
    jobs = [(Path("/proc") / str(pid) / "cmdline") for pid, _ in cluster.processes()]
    found = []
    for path in jobs:
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    assert any("nodeagent" in line for line in found)
    return [*found, *_left(folder)]
