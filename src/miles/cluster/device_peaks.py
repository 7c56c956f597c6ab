"""Peak FLOP/s, memory bandwidth, interconnect bandwidth and memory size of accelerators, from data sheets. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What a device can do at most in a second: FLOPs of dense bf16 matmuls, and bytes of memory read and written.

    ``link`` are the bytes it can receive from another device (NVLink, Infinity Fabric, PCIe), ``memory_gb`` the size of
    its memory in 10⁹ bytes; None where unknown.
    """

    flops: float
    bandwidth: float
    link: float | None = None
    memory_gb: int | None = None

    @property
    def memory_bytes(self) -> int | None:
        """The size of its memory; None where unknown."""
        return None if self.memory_gb is None else self.memory_gb * 10**9


# Part of a product's name, TFLOP/s, GB/s of memory, GB/s of its fastest link in one direction, and GB of memory (of one
# die where a product has two devices, the smaller where there are two sizes); the first that matches counts.
PEAKS = (
    ("GB300", 2500, 8000, 900, 288),
    ("B300", 2250, 8000, 900, 288),
    ("GB200", 2500, 8000, 900, 186),
    ("B200", 2250, 8000, 900, 180),
    ("GH200", 990, 4900, 450, 144),
    ("H200", 989, 4800, 450, 141),
    ("H100 PCIe", 756, 2000, 300, 80),
    ("H100 NVL", 835, 3900, 300, 94),
    ("H100", 989, 3350, 450, 80),
    ("H20", 148, 4000, 450, 96),
    ("H800", 989, 3350, 200, 80),
    ("A100-SXM4-40GB", 312, 1555, 300, 40),
    ("A100-PCIE-40GB", 312, 1555, 300, 40),
    ("A100", 312, 2039, 300, 80),
    ("A800", 312, 2039, 200, 80),
    ("L40S", 362, 864, 32, 48),
    ("L40", 181, 864, 32, 48),
    ("L4", 121, 300, 32, 24),
    ("A10G", 70, 600, 32, 24),
    ("A10", 125, 600, 32, 24),
    ("RTX 5090", 210, 1792, 64, 32),
    ("RTX 4090", 165, 1008, 32, 24),
    ("RTX 3090", 71, 936, 32, 24),
    ("V100", 125, 900, 150, 16),
    ("MI355X", 2500, 8000, 537, 288),
    ("MI350X", 2300, 8000, 537, 288),
    ("MI325X", 1307, 6000, 448, 256),
    ("MI300X", 1307, 5300, 448, 192),
    ("MI250X", 191, 1600, 400, 64),
)


def find_peak(name: str) -> DevicePeak | None:
    """Return the peak of the product of that name; None for one that the table lacks.

    >>> find_peak("NVIDIA H200")
    DevicePeak(flops=989000000000000.0, bandwidth=4800000000000.0, link=450000000000.0, memory_gb=141)
    """
    found = next((row for row in PEAKS if row[0].lower() in name.lower()), None)
    if found is None:
        return None
    _, tflops, bandwidth, link, memory = found
    return DevicePeak(flops=tflops * 1e12, bandwidth=bandwidth * 1e9, link=link * 1e9, memory_gb=memory)
