"""Lightning callbacks; they may import `mtl`, never `data_modules`."""

import mtl  # noqa: F401  (first: it makes torchvision, and with it Lightning, importable)
