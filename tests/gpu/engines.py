"""How each engine is launched here: through its adapter, with a small model, eager, and little memory."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kit:
    """An engine, its interpreter and its flags. `simulated`: no GPU is used, and no memory is measured."""

    engine: str
    interpreter: str
    args: tuple[str, ...]
    sleep_args: tuple[str, ...] = ()
    simulated: bool = False
    start_s: float = 200.0
    tokens: int = 400

    @property
    def version(self) -> str:
        """Of the installed package."""
        if self.engine == "sim":
            return "sim"
        code = f"import importlib.metadata as m; print(m.version('{self.engine}'))"
        done = subprocess.run([self.interpreter, "-c", code], capture_output=True, text=True, timeout=120)
        return done.stdout.strip() or "unknown"


_VLLM = (
    *("--enforce-eager", "--max-model-len", "8192"),
    *("--kv-cache-memory-bytes", "4G", "--max-num-seqs", "64"),
)
_SGLANG = (
    *("--context-length", "8192", "--max-running-requests", "64"),
    *("--mem-fraction-static", "0.2", "--disable-cuda-graph", "--attention-backend", "triton"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-custom-all-reduce"),
    "--enforce-disable-flashinfer-allreduce-fusion",
)
_VLLM_CPU = (
    *("--enforce-eager", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16"),
)
_SIM = ("--startup-s", "0.5", "--decode-base-ms", "10", "--max-num-seqs", "32")


def kits() -> list[Kit]:
    """Those whose interpreters the environment names; SPRINGTIDE_GPU_ENGINES picks some of them.

    Names: vllm, sglang; and to try this suite without a GPU: sim, vllm-cpu.
    """
    vllm, sglang = os.environ.get("SPRINGTIDE_VLLM_PYTHON", ""), os.environ.get("SPRINGTIDE_SGLANG_PYTHON", "")
    cpu = os.environ.get("SPRINGTIDE_VLLM_CPU_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    known = {
        "vllm": Kit("vllm", vllm, _VLLM, ("--enable-sleep-mode",)),
        "sglang": Kit("sglang", sglang, _SGLANG, ("--enable-memory-saver",)),
        "sim": Kit("sim", "", _SIM, ("--enable-sleep-mode",), simulated=True, start_s=30.0),
        "vllm-cpu": Kit("vllm", cpu, _VLLM_CPU, simulated=True, tokens=60),
    }
    wanted = os.environ.get("SPRINGTIDE_GPU_ENGINES", "vllm,sglang").split(",")
    return [known[name] for name in wanted if known[name].interpreter or name == "sim"]
