"""Harbor's task folders: read, refused with the file and the key, mapped to sandboxes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import harbor_folders as folders

from uniagent.engine.errors import InfraError, UserError
from uniagent.tasks.config import SandboxConfig
from uniagent.tasks.data import samples
from uniagent.tasks.harbor import place
from uniagent.tasks.harbor.dockerfile import read_dockerfile
from uniagent.tasks.harbor.folder import read_folder
from uniagent.tasks.harbor.reward import combined, falls_short, read_rewards, scalar

# ---------------------------------------------------------------- folders


def test_a_folder_is_read_with_its_limits_and_without_its_canary(tmp_path: Path) -> None:
    found = read_folder(folders.single(tmp_path))
    assert found.turns[0].instruction == "Write hello into greeting.txt."
    config = found.config
    assert (config.agent.timeout_sec, config.verifier.timeout_sec, config.environment.memory_mb) == (20.0, 30.0, 512)


def test_steps_have_instructions_tests_and_solutions_of_their_own(tmp_path: Path) -> None:
    first, second, third = read_folder(folders.steps(tmp_path)).turns
    assert [turn.instruction for turn in (first, second, third)] == ["Make a.", "Make b.", "Make c."]
    assert first.test == tmp_path / "tests/test.sh"
    assert second.test == tmp_path / "steps/second/tests/test.sh"
    assert second.workdir == tmp_path / "steps/second/workdir"
    assert third.solve == tmp_path / "steps/third/solution/solve.sh"


def test_terminal_benchs_own_layout(tmp_path: Path) -> None:
    found = read_folder(folders.terminal_bench(tmp_path))
    assert found.exit_code
    assert found.config.verifier.timeout_sec == 30
    assert found.turns[0].test.name == "run-tests.sh"
    (tmp_path / "docker-compose.yaml").write_text("services:\n  client: {}\n  db: {}\n")
    with pytest.raises(UserError, match=r"docker-compose.yaml: services: client, db: only one"):
        read_folder(tmp_path)


def test_keys_of_earlier_schemas(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "10G"\nallow_internet = false\n'
    found = read_folder(folders.single(tmp_path, task_toml=toml)).config
    assert found.schema_version == "1.0"
    assert (found.environment.memory_mb, found.environment.network_mode) == (2048, "no-network")


def test_an_unknown_key_is_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders.single(tmp_path, task_toml=folders.TOML + "memroy_mb = 3\n")
    with caplog.at_level(logging.WARNING):
        read_folder(tmp_path)
    assert "task.toml: unknown key environment.memroy_mb" in caplog.text


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("x = = 1", "task.toml: not valid TOML"),
        ('[verifier]\ntimeout_sec = "long"', "task.toml: verifier.timeout_sec: 'long' is a text, expected a number"),
        ("[agent]\ntimeout_sec = -1", "task.toml: agent: 'timeout_sec' must be > 0"),
        ('[environment]\nnetwork_mode = "some"', "task.toml: environment: 'network_mode' must be in .*public"),
        ('[environment]\nallowed_hosts = ["a.org"]', "environment.allowed_hosts needs environment.network_mode"),
        ('[environment]\nmemory = "much"', "environment.memory = 'much' is no size"),
        ('[environment]\nos = "Windows"', "not supported here: environment.os: only 'linux'"),
        ('[agent]\nuser = "bob"', "not supported here: agent.user"),
        ('[verifier]\nenvironment_mode = "separate"', "not supported here: verifier.environment"),
        ('[verifier]\nnetwork_mode = "no-network"', "not supported here: verifier.network_mode"),
        ('[[environment.mcp_servers]]\nname = "x"', "not supported here: environment.mcp_servers"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "a"', "steps: the name 'a' is given twice"),
        ('[[steps]]\nname = "a"\nmin_reward = "high"', r"steps\[0\].min_reward = 'high'"),
        ('[[steps]]\nmin_reward = 1', r"steps\[0\].name: is missing"),
        ('[[steps]]\nname = "a"', "steps: there is no folder .*steps/a"),
    ],
)  # fmt: skip
def test_a_bad_config_is_named_with_its_key(tmp_path: Path, toml: str, said: str) -> None:
    folders.single(tmp_path, task_toml=toml)
    with pytest.raises(UserError, match=said):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"instruction_md": ""}, "instruction.md: is missing"),
        ({"instruction_md": "# canary x\n\n"}, "instruction.md: is empty"),
        ({"tests__test_sh": ""}, "tests/test.sh: is missing"),
        ({"environment__Dockerfile": ""}, "no environment: give environment/Dockerfile, or environment.docker_image"),
        ({"task_toml": ""}, "neither task.toml .* nor task.yaml"),
        ({"environment__docker-compose_yaml": "services: {}"}, "docker-compose.yaml: environments of several services"),
        ({"trajectory_json": "{}"}, "trajectory.json: an agent cannot be given earlier context"),
    ],
)
def test_a_folder_that_lacks_something_is_named_with_its_file(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    folders.single(tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        read_folder(tmp_path)


def test_folders_are_samples(tmp_path: Path) -> None:
    folders.single(tmp_path / "all/b")
    folders.terminal_bench(tmp_path / "all/a")
    folders.write(tmp_path, {"all/README.md": "no task"})
    found = list(samples("harbor/all", seed=0, options={"path": str(tmp_path)}))
    assert [Path(row["metadata"]["task"]).name for row in found] == ["a", "b"]
    assert found[1]["prompt"] == [{"role": "user", "content": "Write hello into greeting.txt."}]
    (one,) = samples("harbor/all", seed=0, options={"path": str(tmp_path), "tasks": ["b"]})
    assert one == found[1]
    with pytest.raises(UserError, match=r"no task 'c'.*allowed: a, b"):
        samples("harbor/all", seed=0, options={"path": str(tmp_path), "tasks": ["c"]})


# ---------------------------------------------------------------- sandboxes


def section(path: Path, sandbox: SandboxConfig) -> dict[str, Any]:
    folder = read_folder(path)
    return place.section(folder, sandbox, place.workdir(folder, sandbox)).as_json()


def test_the_folders_resources_lie_under_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST_PLACE", "there")
    task, root = folders.single(tmp_path / "task"), folders.image(tmp_path / "image")
    local = section(task, SandboxConfig("local", str(root), {"memory_mib": 64}))
    assert (local["memory_mib"], local["workdir"]) == (64, "/app")
    assert local["env"] == {"NAME": "world", "SECOND": "two words", "PLACE": "there"}
    assert "network" not in local
    container = section(task, SandboxConfig("container"))
    assert (container["memory_mib"], container["network"], container["workdir"]) == (512, "none", "/app")
    folders.write(root, {"app/content": "of the image"})
    assert "workdir" not in section(task, SandboxConfig("local", str(root)))


def test_networks(tmp_path: Path) -> None:
    def network(toml: str, provider: str) -> Any:
        task = folders.single(tmp_path / "task", task_toml=toml)
        return section(task, SandboxConfig(provider, "x" if provider == "container" else str(tmp_path)))

    allowlist = '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org", "*.example.com"]\n'
    found = network(allowlist, "local")
    assert (found["network"], found["allow"]) == ("allowlist", ["pypi.org", "*.example.com"])
    with pytest.raises(UserError, match=r"allowlist.*provider container cannot"):
        network(allowlist, "container")
    with pytest.raises(UserError, match=r"allowed_hosts: '10.0.0.0/8': hosts by name alone"):
        network(allowlist.replace("pypi.org", "10.0.0.0/8"), "local")
    assert network("# nothing said", "container")["network"] == "bridge"
    assert "network" not in network("# nothing said", "local"), "this machine's network is never given unasked"


def test_an_environment_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOSUCH", raising=False)
    assert place.resolved({"A": "x${NOSUCH:-y}z"}, "w") == {"A": "xyz"}
    with pytest.raises(UserError, match=r"w\.A: the environment variable NOSUCH is not set"):
        place.resolved({"A": "${NOSUCH}"}, "w")


def test_a_local_sandbox_needs_an_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give sandbox\.image, a folder with an unpacked root file system"):
        section(folders.single(tmp_path), SandboxConfig("local"))


ENGINE = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1 $2" in
  "build -q") [ -e "$LOG.fails" ] && { echo 'no space left' >&2; exit 1; }; exit 0;;
  "image inspect") echo /srv/inside;;
esac
"""


class Providers:
    def __init__(self, program: str) -> None:
        self.program = program

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {"program": self.program}

    def sandbox(self, name: str) -> Any:
        raise NotImplementedError


async def test_an_engine_builds_the_image_and_names_its_workdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = folders.write(tmp_path, {"docker": ENGINE}) / "docker"
    engine.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    task = read_folder(folders.single(tmp_path / "My Task", environment__Dockerfile="FROM debian:12-slim\n"))
    built = await place.image(task, SandboxConfig("container"), Providers(str(engine)))
    assert built.image is not None
    assert built.image.startswith("uniagent-harbor/my-task:")
    assert built.options["workdir"] == "/srv/inside"
    assert f"build -q -t {built.image} {task.context}" in (tmp_path / "log").read_text()
    again = await place.image(task, SandboxConfig("container"), Providers(str(engine)))
    assert again.image == built.image
    (tmp_path / "log.fails").touch()
    with pytest.raises(InfraError, match="Dockerfile: cannot be built: no space left"):
        await place.image(task, SandboxConfig("container"), Providers(str(engine)))
    toml = '[environment]\ndocker_image = "org/published:1"\n'
    published = read_folder(folders.single(tmp_path / "other", task_toml=toml, environment__Dockerfile=""))
    found = await place.image(published, SandboxConfig("container"), Providers(str(engine)))
    assert (found.image, found.options["workdir"]) == ("org/published:1", "/srv/inside")
    asked = SandboxConfig("container", "mine:1")
    assert await place.image(task, asked, Providers(str(engine))) == asked


# ---------------------------------------------------------------- Dockerfiles


def test_a_dockerfile(tmp_path: Path) -> None:
    found = read_dockerfile(folders.single(tmp_path) / "environment/Dockerfile")
    assert (found.base, str(found.workdir)) == ("debian:12-slim", "/app")
    assert [one.word for one in found.instructions] == ["COPY", "COPY", "RUN"]
    assert found.instructions[-1].text == 'echo "$NAME $SECOND" > made.txt && echo ready > /opt/ready'


def test_variables_and_here_documents(tmp_path: Path) -> None:
    text = """\
ARG VERSION=12
FROM debian:${VERSION}
ENV HOME=/home/x PATH=/more:$PATH
WORKDIR $HOME
WORKDIR sub
RUN <<EOF
echo one
echo two
EOF
RUN cat > f <<'END'
three
END
ENV OLD style value
"""
    found = read_dockerfile(folders.write(tmp_path, {"Dockerfile": text}) / "Dockerfile")
    assert (found.base, str(found.workdir)) == ("debian:12", "/home/x/sub")
    assert [one.text for one in found.instructions] == ["echo one\necho two", "cat > f <<'END'\nthree\nEND"]
    assert found.env["OLD"] == "style value"
    assert found.env["PATH"].startswith("/more:/usr")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RUN x", "it has no FROM"),
        ("FROM a AS b", "Dockerfile:1: FROM: several stages need a container engine"),
        ("FROM a\nUSER bob", "Dockerfile:2: USER bob: another user"),
        ("FROM a\n\nRUN --mount=type=cache x", "Dockerfile:3: RUN --mount=type=cache"),
        ("FROM a\nRUM x", "Dockerfile:2: unknown instruction 'RUM': did you mean 'RUN'"),
        ("FROM a\nENV A=1 B", "Dockerfile:2: ENV 'A=1 B': expected NAME=value"),
    ],
)
def test_what_needs_a_builder_names_the_line(tmp_path: Path, text: str, said: str) -> None:
    folders.write(tmp_path, {"Dockerfile": text})
    with pytest.raises(UserError, match=said):
        read_dockerfile(tmp_path / "Dockerfile")


# ---------------------------------------------------------------- rewards


def test_rewards_are_read_from_json_then_text() -> None:
    assert read_rewards({"reward.txt": b"0.25\n"}) == {"reward": 0.25}
    assert read_rewards({"reward.txt": b"0", "reward.json": b'{"a": 1, "b": 0.5}'}) == {"a": 1.0, "b": 0.5}
    assert read_rewards({"reward.json": b"1"}) == {"reward": 1.0}
    assert read_rewards({}) is None


@pytest.mark.parametrize(
    "files",
    [
        {"reward.txt": b""},
        {"reward.txt": b"nan"},
        {"reward.json": b"{"},
        {"reward.json": b"{}"},
        {"reward.json": b'{"a": "x"}'},
        {"reward.json": b'{"a": 1e999}'},
    ],
)
def test_a_verdict_that_cannot_be_read_is_infrastructure(files: dict[str, bytes]) -> None:
    with pytest.raises(InfraError, match="the tests' reward"):
        read_rewards(files)


def test_one_reward_of_several() -> None:
    steps = [{"reward": 1.0, "style": 1.0}, {"reward": 0.0}]
    assert combined(steps, "mean") == {"reward": 0.5, "style": 0.5}
    assert combined(steps, "final") == {"reward": 0.0}
    assert scalar({"a": 1.0, "b": 0.0}, None) == 0.5
    assert scalar({"a": 1.0, "reward": 0.25}, None) == 0.25
    assert scalar({"a": 1.0, "reward": 0.25}, "a") == 1.0
    with pytest.raises(InfraError, match="gave no reward 'c'; they gave: a"):
        scalar({"a": 1.0}, "c")


def test_a_step_falls_short_of_any_threshold() -> None:
    assert not falls_short({"reward": 0.5}, {"reward": 0.5})
    assert falls_short({"reward": 0.4}, {"reward": 0.5})
    assert falls_short({"reward": 1.0}, {"words": 0.0})
    assert not falls_short({}, {})
