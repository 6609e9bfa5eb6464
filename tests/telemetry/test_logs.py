"""Log lines: shape, trace id, levels, and no secret in them."""

import io
import json
import logging

import pytest

from springtide.errors import InvalidArgument
from springtide.telemetry import bind_traceparent, redact
from springtide.telemetry.logs import HumanFormatter, JsonFormatter, configure_logging, parse_levels
from springtide.telemetry.redaction import learn_secrets

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def lines():
    """Configures JSON logging into memory and gives back a reader; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("springtide-test", level="debug", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_line_has_trace_id_and_fields(lines):
    """CM7: each line of a scaling event carries its trace id."""
    log = logging.getLogger("router.watch")
    with bind_traceparent(TRACEPARENT):
        log.info("worker %s is routable", "demo-1", extra={"pool": "demo", "revision": 7})
    log.warning("elsewhere")
    first, second = lines()
    assert first["message"] == "worker demo-1 is routable"
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (first["pool"], first["revision"], first["service"], first["level"]) == (
        "demo",
        7,
        "springtide-test",
        "info",
    )
    assert first["time"].endswith("+00:00")
    assert "trace_id" not in second


def test_exception_is_one_line(lines):
    try:
        raise ValueError("token=abcdef123456 is wrong")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = lines()
    assert "ValueError" in line["error"]
    assert "abcdef123456" not in line["error"]


def test_secret_fields_and_learned_values_are_masked(lines):
    learn_secrets({"HF_TOKEN": "hf_verysecretvalue", "HOME": "/home/somebody"})
    logging.getLogger("x").info(
        "download with hf_verysecretvalue from /home/somebody", extra={"api_key": "k-1", "max_tokens": 5}
    )
    (line,) = lines()
    learn_secrets({})
    assert line["message"] == "download with [redacted] from /home/somebody"
    assert line["api_key"] == "[redacted]"
    assert line["max_tokens"] == 5


@pytest.mark.parametrize(
    ("text", "kept", "gone"),
    [
        ("Authorization: Bearer sk-123456789", "Authorization:", "sk-123456789"),
        ('{"authorization": "Basic dXNlcjpwYXNz"}', "authorization", "dXNlcjpwYXNz"),
        ("env OPENAI_API_KEY=sk-abc HF_HOME=/x", "HF_HOME=/x", "sk-abc"),
        ("--api-key=s3cr3tvalue --tp 2", "--tp 2", "s3cr3tvalue"),
        ("postgres://user:hunter22@db/x", "@db/x", "hunter22"),
        ("sent Bearer abcdefghijkl", "Bearer", "abcdefghijkl"),
    ],
)
def test_redact(text, kept, gone):
    assert kept in redact(text)
    assert gone not in redact(text)


@pytest.mark.parametrize(
    "text", ["max_tokens=64", "completion_tokens: 12", "tokens=3 reason=FULL", "plain words", "a=b"]
)
def test_redact_leaves_ordinary_text(text):
    assert redact(text) == text


def test_levels_of_single_loggers():
    assert parse_levels("info,controlplane.loops=debug") == (20, {"controlplane.loops": 10})
    assert parse_levels("WARNING") == (30, {})
    with pytest.raises(InvalidArgument) as caught:
        parse_levels("loud")
    assert caught.value.reason == "UNKNOWN_LOG_LEVEL"
    assert "debug" in str(caught.value)


def test_formats_are_bounded_and_readable():
    record = logging.LogRecord("router", logging.INFO, __file__, 1, "x" * 100_000, (), None)
    record.traceparent = TRACEPARENT
    record.pool = "demo"
    assert len(JsonFormatter("s").format(record)) < 20_000
    human = HumanFormatter(colour=False).format(record)
    assert "INFO" in human
    assert "pool=demo" in human
    assert human.endswith("trace=4bf92f35")
