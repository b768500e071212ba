"""`python -m tenuto` is `tenuto`."""

import sys

from .cli import main

sys.exit(main())
