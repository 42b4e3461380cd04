"""Runs the command line: `python -m tfdistkit`."""

import sys

from tfdistkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
