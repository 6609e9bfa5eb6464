"""Which probes of an engine count as failures."""

from nodeagent.core.health import Health
from nodeagent.core.progress import Facts

BUSY = Facts(in_flight=2, counts_live=True, generation_tokens=100)
GOT_ON = Facts(in_flight=2, counts_live=True, generation_tokens=101)


def test_trouble_counts_until_a_probe_is_well() -> None:
    """NA6: failures in a row, each with its words; a good probe ends the row."""
    health = Health(60.0)
    assert health.judge(0.0, Facts(), "no answer", "") == "no answer"
    assert health.judge(1.0, Facts(), "no answer", "") == "no answer"
    assert health.failures == 2
    assert health.judge(2.0, Facts(), "", "") == ""
    assert health.failures == 0


def test_a_late_answer_of_an_engine_that_gets_on_is_no_failure() -> None:
    """Busy is not dead; it does not end a row of failures either."""
    health = Health(60.0)
    assert health.judge(0.0, BUSY, "late", "") == "late"
    assert health.judge(1.0, GOT_ON, "late", "") == ""
    assert health.failures == 1


def test_a_silent_shim_is_one_whatever_its_engine_does() -> None:
    """No request reaches the engine; the shim's silence is what is told."""
    health = Health(60.0)
    health.judge(0.0, BUSY, "", "")
    assert health.judge(1.0, GOT_ON, "late", "its shim is silent") == "its shim is silent"
    assert health.failures == 1


def test_an_answer_without_work_is_one_after_a_while() -> None:
    """An engine that says that it is well and does nothing of its work; not where it is paused on purpose."""
    health, patient, paused = Health(60.0), Health(0.0), Health(60.0)
    for now in (0.0, 59.0):
        assert health.judge(now, BUSY, "", "") == ""
    assert health.judge(60.0, BUSY, "", "") == "2 requests run and nothing has come of them for 60 s"
    assert health.failures == 1
    assert health.judge(61.0, GOT_ON, "", "") == ""
    assert health.failures == 0
    for now in (0.0, 900.0):
        assert patient.judge(now, BUSY, "", "") == ""
        assert paused.judge(now, BUSY, "", "", held=True) == ""
