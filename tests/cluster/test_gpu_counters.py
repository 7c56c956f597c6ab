"""Counters of GPUs are those of the vendor's library, and nothing where there is none."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from miles.cluster.gpu_counters import HostGpuCounters
from miles.cluster.platform import GpuCounters


class NoDriver(Exception):
    """What NVML raises without a driver."""


def nvml(**changes) -> ModuleType:
    module = ModuleType("pynvml")
    functions = {
        "NVMLError": NoDriver,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=25 * (handle + 1)),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda handle: 250_000,
    }
    for name, function in (functions | changes).items():
        setattr(module, name, function)
    return module


def fail(*args):
    raise NoDriver("Driver Not Loaded")


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch):
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_a_library_there_is_nothing_and_no_error():
    counters = GpuCounters()
    assert not counters.available and counters.read() == {}
    counters.close()


def test_without_a_driver_there_is_nothing_and_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=fail))
    assert not GpuCounters().available


def test_each_gpu_has_its_own_counters_and_lacks_those_it_does_not_have(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetPowerUsage=fail))
    counters = GpuCounters()
    assert counters.read() == {
        "GPU 0": {"utilization": 0.25, "memory_gib": 3.0},
        "GPU 1": {"utilization": 0.5, "memory_gib": 3.0},
    }
    counters.close()
    assert not counters.available


def test_amd_gpus_are_read_by_their_library(monkeypatch):
    module = ModuleType("amdsmi")
    functions = {
        "AmdSmiException": NoDriver,
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: ["a"],
        "amdsmi_get_gpu_activity": lambda handle: {"gfx_activity": 80},
        "amdsmi_get_gpu_vram_usage": lambda handle: {"vram_used": 2048},
        "amdsmi_get_power_info": lambda handle: {"average_socket_power": "N/A"},
    }
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    counters = GpuCounters()
    assert counters.read() == {"GPU 0": {"utilization": 0.8, "memory_gib": 2.0}}
    counters.close()


class TwoHosts:
    """Other hosts, as a cluster reports them: one with a GPU, one without the library."""

    closed = False

    def read(self):
        return {"10.0.0.2": {"GPU 0": {"utilization": 0.75}}, "10.0.0.3": "nvidia-ml-py is not installed"}

    def close(self) -> None:
        self.closed = True


def test_every_host_is_read_and_what_a_host_lacks_is_stated_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    local, hosts, notes = GpuCounters(), TwoHosts(), []
    counters = HostGpuCounters(local.read, hosts, notes.append)
    for _ in range(3):
        found = counters.read()
        assert set(found) == {"GPU 0", "GPU 1", "10.0.0.2 GPU 0"} and found["10.0.0.2 GPU 0"] == {"utilization": 0.75}
    assert notes == ["GPU counters are not recorded on 10.0.0.3: nvidia-ml-py is not installed"]
    counters.close()
    assert hosts.closed


def test_a_host_without_a_library_says_which_are_missing(monkeypatch):
    local, notes = GpuCounters(), []
    counters = HostGpuCounters(lambda: local.why, None, notes.append)
    assert counters.read() == {} and counters.read() == {}
    assert notes == [
        "GPU counters are not recorded on this host: nvidia-ml-py is not installed, and amdsmi is not installed"
    ]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=fail))
    assert "nvidia-ml-py finds no driver (NoDriver)" in GpuCounters().why
