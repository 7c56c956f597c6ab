"""Upstream's entry point for planes that overlap: ``python train_async.py --flags`` is ``miles train`` one step off.

``--max-weight-staleness`` says how far they may drift apart, and is 1 where nothing says otherwise.
"""

import sys

from miles.launch.main import main

if __name__ == "__main__":  # a rank's process reads this file too
    given = sys.argv[1:]
    drift = any(flag.split("=")[0] == "--max-weight-staleness" for flag in given)
    sys.argv[1:] = ["train", *given, *(() if drift else ("--max-weight-staleness", "1"))]
    sys.exit(main())
