"""`python -m services.supervisor`: the same as `millrace up`."""

import sys

from services.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "up")
    main()
