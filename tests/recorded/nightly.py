"""`make nightly`: plays random recipes; names the seed of each that isn't right, and how to play it again."""

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.recorded.draw import draw
from tests.recorded.files import left_out
from tests.recorded.play import Workplace, WrongError, play


def main() -> int:
    """Returns 1 if a recipe isn't right."""
    parser = argparse.ArgumentParser(prog="nightly", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1000, help="the first one (default: 1000)")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder for what is written")
    options = parser.parse_args()
    wrong, without = [], 0
    with tempfile.TemporaryDirectory(prefix="trainer-nightly-") as temporary:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        place = Workplace((options.keep or Path(temporary)).resolve())
        for seed in range(options.seed, options.seed + options.count):
            case, began = draw(seed), time.monotonic()
            if why := left_out(case.kind):
                print(f"{seed}: {case.kind} left out: {why}", flush=True)
                without += 1
                continue
            try:
                play(case, place)
            except (WrongError, AssertionError) as error:
                wrong.append(seed)
                print(f"{seed}: {case.kind} WRONG: {error}\n{json.dumps(case)}")
                print(f"again: make nightly SEED={seed} N=1", flush=True)
            else:
                took = time.monotonic() - began
                print(f"{seed}: {case.kind} right ({took:.1f} s) {' '.join(case.commands)}", flush=True)
    print(f"{options.count} random recipes: {len(wrong)} wrong {wrong or ''}, {without} left out")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
