"""`python -m thebes.server.standby DIR`, as a keeper of version 0.1 starts it."""

import sys

from thebes.instance.standby import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
