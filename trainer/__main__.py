"""`python -m trainer`, and what torchrun starts."""

import sys

from trainer.cli import main

sys.exit(main())
