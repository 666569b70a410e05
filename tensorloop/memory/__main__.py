"""Entry point of `python -m tensorloop.memory`."""

import sys

from tensorloop.memory.command import main

if __name__ == "__main__":
    sys.exit(main())
