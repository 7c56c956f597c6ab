"""The entry point that upstream's launch scripts use: ``python train.py --flags`` is ``miles train --flags``."""

import sys

from miles.launch.main import main

sys.exit(main(["train", *sys.argv[1:]]))
