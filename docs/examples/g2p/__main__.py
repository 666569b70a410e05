"""Entry point of ``python -m docs.examples.g2p``."""

import sys

from docs.examples.g2p.cli import main

if __name__ == "__main__":
    sys.exit(main())
