"""Peak FLOP/s, memory bandwidth and interconnect bandwidth of accelerators, from their data sheets. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What a device can do at most in a second: FLOPs of dense bf16 matmuls, and bytes of memory read and written.

    ``link`` are the bytes it can receive from another device (NVLink, Infinity Fabric, PCIe); None where unknown.
    """

    flops: float
    bandwidth: float
    link: float | None = None


# Part of a product's name, TFLOP/s, GB/s of memory, and GB/s of its fastest link in one direction; the first that
# matches counts.
PEAKS = (
    ("GB300", 2500, 8000, 900),
    ("B300", 2250, 8000, 900),
    ("GB200", 2500, 8000, 900),
    ("B200", 2250, 8000, 900),
    ("GH200", 990, 4900, 450),
    ("H200", 989, 4800, 450),
    ("H100 PCIe", 756, 2000, 300),
    ("H100 NVL", 835, 3900, 300),
    ("H100", 989, 3350, 450),
    ("H20", 148, 4000, 450),
    ("H800", 989, 3350, 200),
    ("A100-SXM4-40GB", 312, 1555, 300),
    ("A100-PCIE-40GB", 312, 1555, 300),
    ("A100", 312, 2039, 300),
    ("A800", 312, 2039, 200),
    ("L40S", 362, 864, 32),
    ("L40", 181, 864, 32),
    ("L4", 121, 300, 32),
    ("A10G", 70, 600, 32),
    ("A10", 125, 600, 32),
    ("RTX 5090", 210, 1792, 64),
    ("RTX 4090", 165, 1008, 32),
    ("RTX 3090", 71, 936, 32),
    ("V100", 125, 900, 150),
    ("MI355X", 2500, 8000, 537),
    ("MI350X", 2300, 8000, 537),
    ("MI325X", 1307, 6000, 448),
    ("MI300X", 1307, 5300, 448),
    ("MI250X", 191, 1600, 400),
)


def find_peak(name: str) -> DevicePeak | None:
    """Return the peak of the product of that name; None for one that the table lacks.

    >>> find_peak("NVIDIA H200")
    DevicePeak(flops=989000000000000.0, bandwidth=4800000000000.0, link=450000000000.0)
    """
    found = next((row for row in PEAKS if row[0].lower() in name.lower()), None)
    if found is None:
        return None
    return DevicePeak(flops=found[1] * 1e12, bandwidth=found[2] * 1e9, link=found[3] * 1e9)
