"""`python -m chronik.cli`, for use when the script is not on the path."""

import sys

from chronik.cli import main

if __name__ == "__main__":
    sys.exit(main())
