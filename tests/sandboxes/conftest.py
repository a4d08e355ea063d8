"""The stand-ins beside the tests are imported by name. Podman's tests are there where UNIAGENT_PODMAN says how."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore = [] if os.environ.get("UNIAGENT_PODMAN") else ["test_podman.py"]
