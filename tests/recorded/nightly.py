"""`make nightly`: plays random recipes; names the seed of each that isn't right, and how to play it again."""

import argparse
import json
import tempfile
from pathlib import Path

from tests.recorded.draw import draw
from tests.recorded.files import left_out
from tests.recorded.play import Workplace, play_all


def main() -> int:
    """Returns 1 if a recipe isn't right."""
    parser = argparse.ArgumentParser(prog="nightly", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1000, help="the first one (default: 1000)")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder for what is written")
    options = parser.parse_args()
    drawn = [draw(seed) for seed in range(options.seed, options.seed + options.count)]
    reasons = {case.kind: why for case in drawn if (why := left_out(case.kind))}
    cases, wrong = [case for case in drawn if case.kind not in reasons], []
    with tempfile.TemporaryDirectory(prefix="trainer-nightly-") as temporary:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        for case, played in play_all(cases, Workplace((options.keep or Path(temporary)).resolve())):
            if isinstance(played, str):
                wrong.append(case.seed)
                print(f"{case.seed}: {case.kind} WRONG: {played}\n{json.dumps(case)}")
                print(f"again: make nightly SEED={case.seed} N=1", flush=True)
            else:
                print(f"{case.seed}: {case.kind} right; codes {played['codes']}", flush=True)
    for kind, why in reasons.items():
        print(f"left out: {kind}: {why}")
    print(f"{len(cases)} random recipes: {len(wrong)} wrong {wrong or ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
