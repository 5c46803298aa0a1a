"""Lightning callbacks; they may import `mtl`, never `data_modules`."""
