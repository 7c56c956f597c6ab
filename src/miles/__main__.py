"""``python -m miles``: the command ``miles`` in a checkout that is not installed."""

import sys

from miles.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
