"""Upstream's data source classes, over the run's prompts."""

from miles.hooks.compat.data_source import BaseDataSource as DataSource
from miles.hooks.compat.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
