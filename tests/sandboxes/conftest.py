"""The stand-ins beside the tests are imported by name. Podman's and runc's tests need UNIAGENT_PODMAN."""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
containers = bool(os.environ.get("UNIAGENT_PODMAN"))
runc = containers and os.getuid() == 0 and shutil.which("runc")
collect_ignore = [*([] if containers else ["test_podman.py"]), *([] if runc else ["test_runc.py"])]
