"""``python tune.py ...`` in a checkout: the same as ``mtl tune ...``."""

import sys

from mtl.cli.main import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
