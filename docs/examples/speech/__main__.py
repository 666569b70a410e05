"""Entry point of ``python -m docs.examples.speech``."""

import sys

from docs.examples.speech.cli import main

if __name__ == "__main__":
    sys.exit(main())
