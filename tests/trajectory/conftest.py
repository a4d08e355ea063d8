"""Makes ``harness_kit`` importable: the harness, the codec and the checks that the tests here share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
