"""``python reproduce.py ...`` in a checkout: the same as ``mtl reproduce ...``."""

import sys

from mtl.cli.main import main

if __name__ == "__main__":
    main(["reproduce", *sys.argv[1:]])
