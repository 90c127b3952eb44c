"""Entry point of the zipapp and of ``python -m``."""

import sys

from .cli import main

sys.exit(main())
