"""`python -m thebes.server.main DIR`, as a keeper of version 0.1 starts it."""

import sys

from thebes.instance.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
