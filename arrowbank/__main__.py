"""`python -m arrowbank`."""

import sys

from arrowbank.cli import main

if __name__ == "__main__":
    sys.exit(main())
