"""Lightning callbacks; they may import `mtl`, never `data_modules`."""

import mtl  # noqa: F401  (must come first: it makes torchvision, and so Lightning, importable)
