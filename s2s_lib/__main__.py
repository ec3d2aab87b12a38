"""`python -m s2s_lib`, and the console script `s2s`."""

import sys

from s2s_lib.training.command import main

if __name__ == "__main__":
    sys.exit(main())
