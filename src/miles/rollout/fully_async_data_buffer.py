"""Upstream's contract of an async data buffer."""

from miles.hooks.compat.types import BaseDataBuffer as DataBuffer
from miles.hooks.compat.types import DataBufferConstructorInput, DataBufferInput

__all__ = ["DataBuffer", "DataBufferConstructorInput", "DataBufferInput"]
