"""What every forked command would import and look up anew, done once in the server that forks them."""

import gc
import importlib
import pkgutil

import numpy.ma  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401
import transformers.models.qwen3.configuration_qwen3  # noqa: F401

import miles.backends.megatron.supported_models
import miles.backends.remote.sglang_fp8
import miles.backends.remote.sglang_lora
import miles.hooks.compat.signature_adapter
import miles.launch.policies.rules
import miles.launch.rules
import miles.launch.upstream.implied
import miles.launch.upstream.rewrite
import miles.models.parallel.quantized_shards
import miles.observe.console
from miles.config.schema import get_options
from miles.launch.config import Config

for module in pkgutil.iter_modules(miles.launch.rules.__path__):
    importlib.import_module(f"miles.launch.rules.{module.name}")
get_options(Config)
# A collection in a child would write to the pages of every object, and so copy them.
gc.freeze()
