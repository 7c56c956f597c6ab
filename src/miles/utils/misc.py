"""Upstream's small functions: loading by address, singletons, periods."""

from __future__ import annotations

from typing import Any, ClassVar

from miles.hooks.import_path import find_object


def load_function(path: str | None, **_: Any) -> Any:
    """The object at ``package.module.name``; None for None."""
    return find_object(path) if path else None


class SingletonMeta(type):
    """The metaclass of classes with one instance."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Forget all instances."""
        SingletonMeta._instances.clear()


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Whether something that happens every ``interval`` steps, at the end of epochs and at the last step is due."""
    if interval is None:
        return False
    done = rollout_id + 1
    periods = [interval] if num_rollout_per_epoch is None else [interval, num_rollout_per_epoch]
    return done == num_rollout or any(done % period == 0 for period in periods)
