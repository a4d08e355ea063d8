"""Task folders in Harbor's format, written for the tests, and the smallest image the local sandbox takes."""

from __future__ import annotations

import shutil
from pathlib import Path

TOML = """\
schema_version = "1.4"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 30.0
env = { WANTED = "hello" }

[agent]
timeout_sec = 20.0

[environment]
build_timeout_sec = 60.0
memory_mb = 512
network_mode = "no-network"
env = { PLACE = "${HARBOR_TEST_PLACE:-here}" }
"""
INSTRUCTION = "<!-- benchmark canary 123 -->\n\nWrite hello into greeting.txt.\n"
DOCKERFILE = """\
FROM debian:12-slim
# the file that the task is about
ENV NAME=world \\
    SECOND="two words"
WORKDIR /app
COPY data/ ./data/
COPY note.txt /app/
RUN echo "$NAME $SECOND" > made.txt && \\
    echo ready > /opt/ready
CMD ["bash"]
"""
TEST = """\
#!/bin/bash
if [ "$(cat greeting.txt)" = "$WANTED" ]; then R=1; else R=0; fi
echo $R > /logs/verifier/reward.txt
"""
SOLVE = "#!/bin/bash\necho hello > greeting.txt\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def single(root: Path, **changes: str) -> Path:
    """A task of one step; ``changes`` replace files by name, with __ for / and _ for a dot (empty: left out)."""
    files = {
        "task.toml": TOML,
        "instruction.md": INSTRUCTION,
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/a.txt": "a\n",
        "environment/note.txt": "note\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLVE,
    }
    files |= {name.replace("__", "/").replace("_", "."): text for name, text in changes.items()}
    return write(root, {name: text for name, text in files.items() if text})


STEPS_TOML = """\
schema_version = "1.4"
[environment]
network_mode = "no-network"
[[steps]]
name = "first"
min_reward = 0.5
[steps.agent]
timeout_sec = 20
[[steps]]
name = "second"
min_reward = { words = 1 }
[[steps]]
name = "third"
"""


def steps(root: Path, head: str = "") -> Path:
    """A task of three steps with shared tests; the second has its own."""
    shared = (
        '#!/bin/bash\n[ -e "$(ls /tests/*.wanted | xargs cat)" ] && R=1 || R=0; echo $R > /logs/verifier/reward.txt\n'
    )
    own = (
        '#!/bin/bash\n[ -e b ] && R=1 || R=0; echo "{\\"reward\\": $R, \\"words\\": 2}" > /logs/verifier/reward.json\n'
    )
    return write(
        root,
        {
            "task.toml": head + STEPS_TOML,
            "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
            "tests/test.sh": shared,
            "steps/first/instruction.md": "Make a.\n",
            "steps/first/tests/a.wanted": "a\n",
            "steps/first/solution/solve.sh": "touch a\n",
            "steps/second/instruction.md": "Make b.\n",
            "steps/second/tests/test.sh": own,
            "steps/second/workdir/setup.sh": "test -e a && echo given > given.txt\n",
            "steps/second/solution/solve.sh": "test -e given.txt && touch b\n",
            "steps/third/instruction.md": "Make c.\n",
            "steps/third/tests/c.wanted": "c\n",
            "steps/third/solution/solve.sh": "touch c\n",
        },
    )


def terminal_bench(root: Path) -> Path:
    """The layout before Harbor."""
    compose = "services:\n  client:\n    build: .\n"
    return write(
        root,
        {
            "task.yaml": "instruction: |-\n  Write hello into greeting.txt.\nmax_agent_timeout_sec: 20\n"
            "max_test_timeout_sec: 30\ndifficulty: easy\nparser_name: pytest\n",
            "Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
            "docker-compose.yaml": compose,
            "run-tests.sh": '#!/bin/bash\ntest "$(cat greeting.txt)" = "$(cat $TEST_DIR/wanted.txt)"\n',
            "tests/wanted.txt": "hello\n",
            "solution.sh": "echo hello > greeting.txt\n",
        },
    )


def image(root: Path) -> Path:
    """A root file system of links into /usr, which the sandbox shows read-only (``read_only = ["/usr"]``)."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    shutil.copy("/usr/bin/bash", root / "usr/bin/bash")  # what the backend looks for
    for name in ("etc", "proc", "dev", "tmp", "run", "opt", "work"):
        (root / name).mkdir()
    return root
