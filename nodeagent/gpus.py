"""GPUs of this host: found through NVML, narrowed by CUDA_VISIBLE_DEVICES, or a configured number of simulated ones.

Ids are what CUDA_VISIBLE_DEVICES takes: NVML's index (engines get CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA counts
alike), the UUID where the host's own CUDA_VISIBLE_DEVICES names UUIDs, and always the UUID for MIG slices.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from springtide.errors import FailedPrecondition, InvalidArgument
from springtide.model.node import Gpu

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the driver lists it. `slices` are its MIG devices; when there are any, only they can be used."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    slices: tuple["Device", ...] = ()
    link_group: str = ""  # of GPUs that reach each other by NVLink


class Driver(Protocol):
    """What discovery needs of NVML."""

    def devices(self) -> list[Device]:
        """All GPUs in NVML's order."""

    def memory_used_bytes(self, uuid: str) -> int | None:
        """Memory in use on a GPU or MIG slice; None when the driver does not say."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs that this agent may give away, and the way to ask for their memory."""

    gpus: tuple[Gpu, ...]
    driver: Driver | None = None
    uuids: Mapping[str, str] | None = None

    def memory_used_bytes(self, gpu_id: str) -> int | None:
        """Memory in use now; None when nobody knows (simulated, unknown GPU, driver gone): not the same as free."""
        uuid = (self.uuids or {}).get(gpu_id)
        return None if uuid is None or self.driver is None else self.driver.memory_used_bytes(uuid)


def discover(
    simulated_gpus: int | None = None, environ: Mapping[str, str] | None = None, driver: Driver | None = None
) -> Inventory:
    """The GPUs of this host.

    simulated_gpus: pretend this many and do not look (0: none). environ: the process environment by default. driver:
    NVML by default. Raises InvalidArgument (bad count, an entry of CUDA_VISIBLE_DEVICES that is no GPU of this host)
    and FailedPrecondition (GPUs are there but the driver does not answer).
    """
    if simulated_gpus is not None:
        if not 0 <= simulated_gpus <= 1024:
            raise InvalidArgument(
                field="simulated_gpus", value=simulated_gpus, problem="is no number of GPUs", remedy="Give 0 to 1024."
            )
        return Inventory(tuple(Gpu(f"sim{at}", "simulated", None, simulated=True) for at in range(simulated_gpus)))
    found = driver if driver is not None else NvmlDriver.open()
    visible = (os.environ if environ is None else environ).get(VISIBLE_DEVICES)
    if found is None:
        if visible:
            raise InvalidArgument(
                field=VISIBLE_DEVICES,
                value=visible,
                problem="names GPUs, but this host has no NVIDIA driver library (NVML)",
                remedy="Install the driver, or unset the variable, or configure simulated GPUs.",
            )
        return Inventory(())
    chosen = _choose(found.devices(), visible)
    gpus = tuple(
        Gpu(gpu_id, device.name, device.memory_bytes, link_group=device.link_group) for gpu_id, device in chosen
    )
    return Inventory(gpus, found, {gpu_id: device.uuid for gpu_id, device in chosen})


def _choose(devices: list[Device], visible: str | None) -> list[tuple[str, Device]]:
    if visible is None:
        return [usable for device in devices for usable in _usable(device, str(device.index))]
    chosen: list[tuple[str, Device]] = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry in ("-1", "NoDevFiles"):
            break  # CUDA sees nothing from here on
        chosen += _entry(devices, entry)
    ids = [device.uuid for _, device in chosen]
    twice = next((gpu_id for gpu_id, device in chosen if ids.count(device.uuid) > 1), None)
    if twice is not None:
        raise _not_available(visible, f"names GPU {twice} twice", "Name each GPU once.")
    return chosen


def _entry(devices: list[Device], entry: str) -> list[tuple[str, Device]]:
    if entry.isdigit():
        for device in devices:
            if device.index == int(entry):
                return _usable(device, entry)
    elif entry.startswith("MIG-"):
        found = [part for device in devices for part in device.slices if part.uuid.startswith(entry)]
        if len(found) == 1:
            return [(found[0].uuid, found[0])]
    else:
        found = [device for device in devices if device.uuid.startswith(entry)]
        if len(found) == 1:
            return _usable(found[0], found[0].uuid)
    have = ", ".join(_names(devices)) or "none"
    raise _not_available(entry, "is no GPU of this host", f"This host has: {have}.")


def _usable(device: Device, gpu_id: str) -> list[tuple[str, Device]]:
    return [(part.uuid, part) for part in device.slices] or [(gpu_id, device)]


def _names(devices: Iterable[Device]) -> list[str]:
    return [
        name for device in devices for name in (f"{device.index} ({device.uuid})", *(p.uuid for p in device.slices))
    ]


def _not_available(value: str, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        field=VISIBLE_DEVICES, value=value, problem=problem, remedy=remedy, reason="GPU_NOT_AVAILABLE"
    )


class NvmlDriver:
    """NVML through nvidia-ml-py. Use `open`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls) -> "NvmlDriver | None":
        """None when this host has no NVIDIA driver. FailedPrecondition when it has one that does not work."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if error.value in absent:
                return None
            raise _driver_failed(error) from None
        return cls(pynvml)

    def devices(self) -> list[Device]:
        """All GPUs, MIG slices included."""
        nvml = self._nvml
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            groups = link_groups(len(handles), lambda a, b: self._linked(handles[a], handles[b]))
            return [self._device(handle, index, groups[index]) for index, handle in enumerate(handles)]
        except nvml.NVMLError as error:
            raise _driver_failed(error) from None

    def memory_used_bytes(self, uuid: str) -> int | None:
        """Of a GPU or MIG slice."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            return None
        try:
            # The older call counts what the driver keeps for itself too: hundreds of MiB on an idle GPU.
            return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
        except (nvml.NVMLError, AttributeError):
            pass
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError:
            return None

    def _linked(self, one: Any, other: Any) -> bool:
        """Whether two GPUs reach each other by NVLink, through a switch too."""
        nvml = self._nvml
        try:
            status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except (nvml.NVMLError, AttributeError):
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    def _device(self, handle: Any, index: int, link_group: str) -> Device:
        nvml = self._nvml
        return Device(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            slices=self._slices(handle),
            link_group=link_group,
        )

    def _slices(self, handle: Any) -> tuple[Device, ...]:
        nvml = self._nvml
        try:
            enabled, _ = nvml.nvmlDeviceGetMigMode(handle)
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if enabled else 0
        except nvml.NVMLError:
            return ()  # a GPU without MIG
        slices: list[Device] = []
        for at in range(count):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
                uuid, name = _text(nvml.nvmlDeviceGetUUID(part)), _text(nvml.nvmlDeviceGetName(part))
                slices.append(Device(at, uuid, name, int(nvml.nvmlDeviceGetMemoryInfo(part).total)))
            except nvml.NVMLError:
                continue  # an unused place
        return tuple(slices)


def link_groups(count: int, linked: Callable[[int, int], bool]) -> list[str]:
    """The group of each of `count` GPUs: those that a chain of links joins. "" for one without any."""
    first = list(range(count))
    for a in range(count):
        for b in range(a + 1, count):
            if linked(a, b):
                new, old = sorted((first[a], first[b]))
                first = [new if at == old else at for at in first]
    return [f"nvlink-{at}" if first.count(at) > 1 else "" for at in first]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _driver_failed(error: Exception) -> FailedPrecondition:
    return FailedPrecondition(
        f"the NVIDIA driver does not answer: {error}.",
        reason="GPU_DRIVER_FAILED",
        field="gpus",
        remedy="Check nvidia-smi on this host, or configure simulated GPUs.",
    )
