"""What a pool of a pair sets is --kv-transfer-config; the side channel comes from the node (NA4, F40)."""

from typing import Any

import pytest

from nodeagent.engines.adapter import EngineLaunch
from nodeagent.engines.registry import engine_adapter
from nodeagent.engines.rules import LaunchRules

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
SEVERAL = f'{{"kv_connector": "MultiConnector", "kv_connector_extra_config": {{"connectors": [{NIXL}]}}}}'
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


def launch(engine: str, *args: str, **fields: Any) -> EngineLaunch:
    return EngineLaunch(engine, "org/model", "demo", engine_args=args, uds_path="/run/x/w1.eng", **fields)


@pytest.mark.parametrize("engine", ["vllm", "sim"])
@pytest.mark.parametrize(
    "args",
    [
        ("--kv-transfer-config", NIXL),
        (f"--kv-transfer-config={NIXL}",),
        (f"--kv_transfer_config={NIXL}",),
        ("--kv-transfer-config.kv_connector", "NixlPushConnector"),
        ("--kv-transfer-config", SEVERAL),
    ],
)
def test_nixl_gets_a_side_channel_however_it_is_named(engine: str, args: tuple[str, ...]) -> None:
    adapter = engine_adapter(engine)
    assert adapter.needs_side_channel(args)
    command = adapter.command(launch(engine, *args, side_channel=("10.0.0.7", 7699)))
    assert (command.env[HOST], command.env[PORT]) == ("10.0.0.7", "7699")
    assert command.argv[-len(args) :] == args
    assert adapter.validate(launch(engine, *args, side_channel=("10.0.0.7", 7699)), LaunchRules()) == []


@pytest.mark.parametrize("engine", ["vllm", "sim", "sglang", "llamacpp"])
def test_others_get_none(engine: str) -> None:
    adapter = engine_adapter(engine)
    assert not adapter.needs_side_channel(("--seed", "1"))
    fields = {"port": 4321} if engine == "sglang" else {}
    assert PORT not in adapter.command(launch(engine, **fields)).env


@pytest.mark.parametrize("name", [HOST, PORT])
def test_a_pool_cannot_set_one_for_all_its_workers(name: str) -> None:
    """Two workers of one node would listen on the same port."""
    lifted = LaunchRules(allowed_env=(name,))
    (problem,) = engine_adapter("vllm").validate(launch("vllm", env={name: "5600"}), lifted)
    assert str(problem) == (
        f"engine_env = '{name}': is set by Springtide. Remove it: each worker gets a side channel of its own."
    )


def test_a_connector_of_the_callers_own_is_code() -> None:
    """DESIGN rule 13."""
    args = (
        "--kv-transfer-config",
        '{"kv_connector": "Mine", "kv_connector_module_path": "mine", "kv_role": "kv_both"}',
    )
    (problem,) = engine_adapter("vllm").validate(launch("vllm", *args), LaunchRules())
    assert problem.field == "engine_args"
    assert "kv_connector_module_path" in str(problem)
    allowed = LaunchRules(allowed_flags=("--kv-transfer-config",))
    assert engine_adapter("vllm").validate(launch("vllm", *args), allowed) == []
