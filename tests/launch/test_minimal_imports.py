"""Training and the engine in one process need torch, transformers and what they bring, and no server package."""

import subprocess
import sys

SERVER_PACKAGES = ("aiohttp", "mcp", "prometheus_client", "pydantic", "ray", "re2", "sglang")
PROGRAM = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import miles.backends.native.engine.engine, miles.launch.commands.demo, miles.launch.commands.train
"""


def test_training_imports_no_server_package():
    program = PROGRAM.format(blocked=SERVER_PACKAGES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
