"""`springtide explain` and `springtide preview` (CM4, PL14)."""

import json


def test_explain_a_pool_and_a_decision(cli, stack):
    """A pool's newest decision, or one by its id; an id that is not kept is exit code 4."""
    shown = cli("explain", "demo")
    assert shown.exit_code == 0, shown.stderr
    assert "AT_MAX" in shown.stdout
    assert "Raise max_workers" in shown.stdout
    assert (stack.controlplane.asked[-1].pool, stack.controlplane.asked[-1].decision_id) == ("demo", 0)
    assert json.loads(cli("explain", "9", "--json").stdout)["decision"]["decision_id"] == 9
    assert stack.controlplane.asked[-1].decision_id == 9
    assert cli("explain", "10").exit_code == 4


def test_preview_with_what_if(cli, stack):
    """Policy, settings, bounds and load are passed on; what would happen is shown."""
    shown = cli("preview", "demo", "--policy", "slo", "--set", "attainment=0.95", "--set", "x=true", "--max", "4")
    assert shown.exit_code == 0, shown.stderr
    for word in ("PREVIEWED", "1->2", "need: 1 -> 2", "scale_up_start demo-2", "CANNOT_PLACE"):
        assert word in shown.stdout
    asked = stack.controlplane.asked[-1]
    assert (asked.policy.name, asked.max_workers, asked.HasField("min_workers")) == ("slo", 4, False)
    assert dict(asked.policy.settings) == {"attainment": 0.95, "x": True}
    cli("preview", "demo", "--waiting", "40")
    assert stack.controlplane.asked[-1].waiting == 40
    assert not stack.controlplane.asked[-1].HasField("policy")


def test_preview_refuses(cli):
    """Exit codes: 4 for a pool that there is not, 1 for what is no setting."""
    assert cli("preview", "other").exit_code == 4
    bad = cli("preview", "demo", "--set", "attainment")
    assert bad.exit_code != 0
    assert "KEY=VALUE" in bad.stderr
