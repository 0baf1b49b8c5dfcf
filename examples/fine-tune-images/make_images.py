"""Writes the embedded digits as PNG files: pictures/base has many of 0 to 4, pictures/mine few of 5 to 9."""

from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

rows = np.loadtxt(str(files("trainer") / "data" / "optdigits.csv.gz"), delimiter=",", dtype=np.uint8)
for number, row in enumerate(rows):
    digit = row[64]
    if digit < 5:
        folder = Path("pictures/base", "val" if number % 5 == 0 else "train", str(digit))
    elif number < 400:
        folder = Path("pictures/mine", "train" if number < 100 else "val", str(digit))
    else:
        continue
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(row[:64].reshape(8, 8) * 15).resize((64, 64)).save(folder / f"{number}.png")
print("pictures/base and pictures/mine are written")
