"""How long a start took, by phase, from what real engines write."""

from nodeagent.core.start_phases import start_phases

VLLM = """
(Worker_TP0 pid=1) INFO 11-28 02:33:19 [default_loader.py:431] Loading weights took 0.33 seconds
(Worker_TP0 pid=1) INFO 11-28 02:33:20 [model_runner.py:53] Model loading took 0.02 GiB memory and 1.250000 seconds
(Worker_TP1 pid=2) INFO 11-28 02:33:20 [model_runner.py:53] Model loading took 0.02 GiB memory and 1.500000 seconds
(Worker_TP0 pid=1) INFO 11-28 02:33:26 [monitor.py:20] torch.compile took 4.25 s in total
(Worker_TP0 pid=1) INFO 11-28 02:33:29 [gpu_model_runner.py:6708] Graph capturing finished in 3 secs, took 0.40 GiB
"""
SGLANG = """
[2026-11-28 02:33:19 TP0] Load weight begin. avail mem=78.00 GB
[2026-11-28 02:33:21 TP0] Load weight end. elapsed=2.10 s, type=LlamaForCausalLM, avail mem=77.9 GB, mem usage=0.02 GB.
[2026-11-28 02:33:27 TP0] Capture decode cuda graph end. elapsed=5.50 s, mem usage=0.30 GB, avail mem=60.00 GB.
"""


def _phases(log: str, healthy_s: float = 20.0) -> dict[str, float]:
    return dict(start_phases(slot_s=3.0, process_s=0.4, healthy_s=healthy_s, warm_up_s=0.25, log=log))


def test_a_start_of_vllm() -> None:
    """Ranks load side by side: the longest counts."""
    assert _phases(VLLM) == {
        "slot": 3.0,
        "process": 0.4,
        "import": 11.25,
        "load": 1.5,
        "compile": 7.25,
        "warm_up": 0.25,
    }


def test_a_start_of_sglang() -> None:
    assert _phases(SGLANG) == {
        "slot": 3.0,
        "process": 0.4,
        "import": 12.4,
        "load": 2.1,
        "compile": 5.5,
        "warm_up": 0.25,
    }


def test_an_engine_that_tells_nothing() -> None:
    """What nobody tells is left out, not zero."""
    assert set(_phases("listening")) == {"slot", "process", "import", "warm_up"}


def test_a_log_that_claims_more_than_there_was() -> None:
    """Parts never make more than the whole."""
    found = _phases(VLLM, healthy_s=2.0)
    assert found["load"] + found["compile"] + found.get("import", 0.0) == 2.0
