"""Read by every Python that starts with this folder on its path: a run's ranks have Megatron's CUDA on the CPU."""

import os
import sys

# Not those that only keep semaphores, or serve forks.
if os.environ.get("MILES_TEST_MEGATRON") and any(word in " ".join(sys.orig_argv) for word in ("miles", "spawn_main")):
    from tests.backends.megatron.shim import on_cpu

    _held = on_cpu()
    _held.__enter__()
    if os.environ.get("MILES_TEST_KILL") and "spawn_main" in " ".join(sys.orig_argv):
        from tests.launch.small_run import die_in

        die_in(os.environ["MILES_TEST_KILL"], group=True)
