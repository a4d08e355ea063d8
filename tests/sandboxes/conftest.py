"""The stand-ins beside the tests are imported by name. Podman's and runc's tests need UNIAGENT_PODMAN."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore = [] if os.environ.get("UNIAGENT_PODMAN") else ["test_podman.py", "test_runc.py"]
