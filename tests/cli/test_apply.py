"""apply: files are checked as a whole before the first pool changes."""

import json

import pytest

GOOD = """
[[pools]]
name = "chat"
engine = "sim"
tensor_parallel_size = 2
min_workers = 0
max_workers = 4
policy = { name = "load_ratio", settings = { scale_up_threshold = 0.9, enable_elastic = true } }
placement = { zone = "a" }
role = "decode"
engine_args = ["--seed", "1"]
resources = { licences = 1 }

[[pools]]
name = "code"
engine = "vllm"
policy = "static"
"""


def test_toml_json_and_stdin(cli, stack, tmp_path):
    """CP23: pools from a file, every key of the spec."""
    file = tmp_path / "pools.toml"
    file.write_text(GOOD)
    done = cli("apply", str(file))
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("created") == 2
    spec = stack.controlplane.pools["chat"].spec
    assert spec.HasField("min_workers")
    assert (spec.min_workers, spec.role) == (0, 3)
    assert (dict(spec.placement), dict(spec.resources)) == ({"zone": "a"}, {"licences": 1})
    assert spec.policy.settings["scale_up_threshold"] == 0.9
    assert spec.policy.settings["enable_elastic"] is True
    assert stack.controlplane.pools["code"].spec.policy.name == "static"
    as_json = json.dumps({"pools": [{"name": "chat", "engine": "sim"}]})
    done = cli("apply", "-", "--json", stdin=as_json)
    assert json.loads(done.stdout)[0]["result"] == "updated"
    assert cli("apply", "-", stdin=GOOD).exit_code == 0


def test_dry_run_changes_nothing(cli, stack, tmp_path):
    file = tmp_path / "pools.toml"
    file.write_text(GOOD)
    assert cli("apply", "--dry-run", str(file)).exit_code == 0
    assert set(stack.controlplane.pools) == {"demo"}
    assert all(request.validate_only for request in stack.controlplane.asked)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[pool]]\nname = 'x'", ["pool", "Did you mean pools?"]),
        ("colour = 1", ["colour", "[[pools]]"]),
        ("pools = []", ["pools", "must be a list"]),
        ("[[pools]]\nengine = 'sim'", ["pools[0].name", "is required"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nmin_worker = 1", ["pools[0].min_worker", "Did you mean min_workers?"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nmin_workers = '1'", ["pools[0].min_workers", "'1'", "whole number"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nmin_workers = true", ["pools[0].min_workers", "whole number"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nmax_workers = 99999999999", ["pools[0].max_workers", "31 bits"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nrole = 'both'", ["pools[0].role", "MIXED, PREFILL, DECODE"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nstop_grace_s = 'long'", ["pools[0].stop_grace_s", "a number"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nengine_args = '-v'", ["pools[0].engine_args", "a list"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nplacement = 'a'", ["pools[0].placement", "a table"]),
        (
            "[[pools]]\nname = 'x'\nengine = 'sim'\npolicy = { nam = 'static' }",
            ["pools[0].policy.nam", "mean name?"],
        ),
        (
            "[[pools]]\nname = 'x'\nengine = 'sim'\npolicy = { name = 'static', settings = { a = [1] } }",
            ["pools[0].policy.settings.a", "a number"],
        ),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\n[[pools]]\nname = 'x'\nengine = 'sim'", ["pools[1].name", "twice"]),
        ("[[pools]\n", ["FILE", "Correct the file"]),
        ("[[pools]]\nname = 'x'\nengine = 'sim'\nmin_workers = 3\nmax_workers = 1", ["max_workers", "min_workers 3"]),
    ],
)
def test_bad_files_change_nothing(cli, stack, tmp_path, text, words):
    """Each error names the place in the file, the value and what to do; nothing is half-applied."""
    file = tmp_path / "pools.toml"
    file.write_text(
        "[[pools]]\nname = 'first'\nengine = 'sim'\nmax_workers = 2\n" * text.startswith("[[pools]]\n") + text
    )
    done = cli("apply", str(file))
    assert done.exit_code == 1
    shifted = [word.replace("pools[1]", "pools[2]").replace("pools[0]", "pools[1]") for word in words]
    for word in shifted if text.startswith("[[pools]]\n") else words:
        assert word in done.stderr
    assert set(stack.controlplane.pools) == {"demo"}


def test_a_missing_file(cli):
    done = cli("apply", "/nosuch/pools.toml")
    assert done.exit_code == 1
    assert "/nosuch/pools.toml" in done.stderr
