"""Draw the picture of the first page from the results of `make demo`.

python docs/img/overview.py [OUT] [FILE]
"""

import sys
from pathlib import Path

from proxsps import figures
from proxsps.sweep.store import Store

out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
target = Path(sys.argv[2] if len(sys.argv) > 2 else out / "overview.svg")
names = ("matrix-fac1-stability", "matrix-fac1")
stability, path = (Store(out / name, name).runs for name in names)
print(f"Picture: {figures.save(figures.overview(stability, path), target)}")
narrow = target.with_name(f"{target.stem}-narrow{target.suffix}")
figures.save(figures.overview(stability, path, stacked=True), narrow)
