"""`python -m tfdistkit`: the command line."""

import sys

from tfdistkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
