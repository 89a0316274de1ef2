"""``python -m fusepass``."""

import sys

from fusepass.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
