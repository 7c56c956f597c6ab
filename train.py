"""The entry point that upstream's launch scripts use: ``python train.py --flags`` is ``miles train --flags``."""

import sys

from miles.launch.main import main

if __name__ == "__main__":  # a rank's process reads this file too
    sys.argv[1:] = ["train", *sys.argv[1:]]
    sys.exit(main())
