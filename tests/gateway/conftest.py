"""Makes ``gateway_kit`` importable: the gateway, the scripted model and the client that the tests here share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
