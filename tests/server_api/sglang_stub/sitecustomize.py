"""Read by Python itself when SGLang starts: torchvision's wheels want CUDA, and only this module of it says so."""

import sys
import types

import fp8_gemm
import pinned_memory

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
fp8_gemm.install()
pinned_memory.install()
