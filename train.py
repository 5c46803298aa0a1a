"""``python train.py ...`` in a checkout: the same as ``mtl train ...``."""

import sys

from mtl.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
