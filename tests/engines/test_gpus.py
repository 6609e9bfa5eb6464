"""GPU discovery with a driver that is played; a real one cannot be assumed here."""

from dataclasses import dataclass, field

import pytest

from nodeagent.gpus import Device, NvmlDriver, discover, link_groups
from springtide.errors import InvalidArgument

GIB = 1 << 30


@dataclass
class PlayedDriver:
    """Four GPUs; the last one is cut into two MIG slices."""

    used: dict[str, int] = field(default_factory=dict)

    def devices(self) -> list[Device]:
        slices = tuple(Device(at, f"MIG-c0ffee0{at}", "H100 1g.10gb", 10 * GIB) for at in range(2))
        whole = [Device(at, f"GPU-aaaa000{at}", "H100", 80 * GIB) for at in range(3)]
        return [*whole, Device(3, "GPU-bbbb0003", "H100", 80 * GIB, slices)]

    def memory_used_bytes(self, uuid: str) -> int | None:
        return self.used.get(uuid)


def ids(visible: str | None) -> list[str]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [gpu.id for gpu in discover(None, environ, PlayedDriver()).gpus]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2", "MIG-c0ffee00", "MIG-c0ffee01"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("1,-1,2", ["1"]),
        ("GPU-aaaa0001,2", ["GPU-aaaa0001", "2"]),
        ("GPU-aaaa0001 , MIG-c0ffee01", ["GPU-aaaa0001", "MIG-c0ffee01"]),
        ("GPU-b", ["MIG-c0ffee00", "MIG-c0ffee01"]),
    ],
)
def test_cuda_visible_devices_is_honoured(visible: str | None, expected: list[str]) -> None:
    """NA2: indexes, UUIDs (unique beginnings too), MIG names."""
    assert ids(visible) == expected


@pytest.mark.parametrize("visible", ["7", "GPU-ffff", "GPU-aaaa", "MIG-nope", "zero", "1,1", "0,GPU-aaaa0000"])
def test_what_is_not_there_is_named(visible: str) -> None:
    """NA14: GPU not available."""
    with pytest.raises(InvalidArgument) as caught:
        ids(visible)
    assert caught.value.reason == "GPU_NOT_AVAILABLE"
    assert caught.value.field == "CUDA_VISIBLE_DEVICES"


def test_memory_use_is_known_or_unknown_never_guessed() -> None:
    driver = PlayedDriver({"GPU-aaaa0000": 3 * GIB, "MIG-c0ffee00": 0})
    found = discover(None, {}, driver)
    assert found.gpus[0].memory_bytes == 80 * GIB
    assert found.memory_used_bytes("0") == 3 * GIB
    assert found.memory_used_bytes("MIG-c0ffee00") == 0
    assert found.memory_used_bytes("1") is None
    assert found.memory_used_bytes("9") is None


def test_simulated_gpus_are_marked_and_their_memory_unknown() -> None:
    found = discover(3, {"CUDA_VISIBLE_DEVICES": "7"})
    assert [(gpu.id, gpu.simulated) for gpu in found.gpus] == [("sim0", True), ("sim1", True), ("sim2", True)]
    assert found.memory_used_bytes("sim0") is None
    assert discover(0).gpus == ()
    with pytest.raises(InvalidArgument, match="simulated_gpus"):
        discover(-1)


def test_a_host_without_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmlDriver, "open", lambda: None)
    assert discover(None, {}).gpus == ()
    with pytest.raises(InvalidArgument, match="no NVIDIA driver library"):
        discover(None, {"CUDA_VISIBLE_DEVICES": "0"})


class PlayedNvml:
    """As much of the module pynvml as is used: one plain GPU, one with MIG on and one slice in two places."""

    nvmlMemory_v2 = 2  # noqa: N815 - NVML's name

    class NVMLError(Exception):
        """As NVML's."""

    class Memory:
        """As NVML's."""

        def __init__(self, total: int, used: int) -> None:
            self.total, self.used = total, used

    def __init__(self, has_v2: bool = True) -> None:
        self.has_v2 = has_v2

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not uuid.endswith(("gpu0", "gpu1", "slice0")):
            raise self.NVMLError("not found")
        return uuid.rpartition("-")[2]

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return f"{'MIG' if handle.startswith('slice') else 'GPU'}-{handle}".encode()

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"name of {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Memory:
        if version and not self.has_v2:
            raise self.NVMLError("function not found")
        return self.Memory(80 * GIB, 0 if version else GIB // 2)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle == "gpu0":
            raise self.NVMLError("not supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, at: int) -> str:
        if at:
            raise self.NVMLError("not found")
        return "slice0"


def test_nvml_is_read_with_its_slices() -> None:
    found = discover(None, {}, NvmlDriver(PlayedNvml()))
    assert [(gpu.id, gpu.name) for gpu in found.gpus] == [("0", "name of gpu0"), ("MIG-slice0", "name of slice0")]


def test_memory_that_the_driver_keeps_is_not_counted_where_it_can_tell() -> None:
    for has_v2, used in ((True, 0), (False, GIB // 2)):
        driver = NvmlDriver(PlayedNvml(has_v2))
        assert driver.memory_used_bytes("GPU-gpu0") == used
        assert driver.memory_used_bytes("GPU-gone") is None


@pytest.mark.parametrize(
    ("links", "groups"),
    [
        ("", ["", "", "", ""]),
        ("01 23", ["nvlink-0", "nvlink-0", "nvlink-2", "nvlink-2"]),
        ("01 02 03 12 13 23", ["nvlink-0"] * 4),  # a switch joins all
        ("12", ["", "nvlink-1", "nvlink-1", ""]),
        ("03 12 23", ["nvlink-0"] * 4),  # a chain is one group
    ],
)
def test_gpus_that_nvlink_joins_are_a_group(links: str, groups: list[str]) -> None:
    """NA1: pairs that the driver calls linked."""
    pairs = {(int(pair[0]), int(pair[1])) for pair in links.split()}
    assert link_groups(4, lambda a, b: (a, b) in pairs) == groups
