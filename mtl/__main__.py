"""``python -m mtl COMMAND``, the same as ``mtl COMMAND``."""

from mtl.cli.main import main

if __name__ == "__main__":
    main()
