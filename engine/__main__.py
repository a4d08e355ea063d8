"""``python -m uniagent.engine`` and the console script ``uniagent``."""

from __future__ import annotations

import sys


def main() -> None:
    from uniagent.engine import cli

    sys.exit(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
