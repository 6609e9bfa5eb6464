"""What NVML says of this host's GPUs: name, bytes in use, whose processes. Without a GPU: nothing, never zero."""

from typing import Any


class Devices:
    """All GPUs in NVML's order. `simulated`: do not look."""

    def __init__(self, simulated: bool) -> None:
        self._nvml: Any = None
        self.handles: list[Any] = []
        if simulated:
            return
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]

    @property
    def there(self) -> bool:
        return bool(self.handles)

    def facts(self) -> dict[str, object]:
        """Cards and driver."""
        if not self.there:
            return {"cards": [], "driver": None}
        names = [_text(self._nvml.nvmlDeviceGetName(handle)) for handle in self.handles]
        return {"cards": names, "driver": _text(self._nvml.nvmlSystemGetDriverVersion())}

    def used_bytes(self) -> list[int]:
        """In use on each GPU, without what the driver keeps for itself."""
        nvml = self._nvml
        return [int(nvml.nvmlDeviceGetMemoryInfo(h, version=nvml.nvmlMemory_v2).used) for h in self.handles]

    def pids(self, gpu: int) -> list[int]:
        """Processes with a context on a GPU; where NVML cannot say (another pid namespace), nothing."""
        if not self.there:
            return []
        return [int(found.pid) for found in self._nvml.nvmlDeviceGetComputeRunningProcesses(self.handles[gpu])]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
