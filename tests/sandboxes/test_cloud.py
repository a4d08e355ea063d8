"""Modal, E2B and Daytona on stand-ins whose calls take what the real SDKs' take, against the contract of sandboxes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_clouds
import pytest
import trio

from uniagent.adapters.sandboxes import daytona as daytona_module
from uniagent.adapters.sandboxes import e2b as e2b_module
from uniagent.adapters.sandboxes import modal as modal_module
from uniagent.adapters.sandboxes.cloud import LABEL, CloudProvider, _host
from uniagent.adapters.sandboxes.contract import CHECKS, Check
from uniagent.adapters.sandboxes.snapshots import snapshot
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.registry import load

SERVICES = ("modal", "e2b", "daytona")
MODULES: dict[str, ModuleType] = {"modal": modal_module, "e2b": e2b_module, "daytona": daytona_module}
NAMES = {"modal": "ModalService", "e2b": "E2bService", "daytona": "DaytonaService"}


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture
def cloud(confined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "cloud").mkdir()
    (tmp_path / "nodes").mkdir()
    monkeypatch.setattr("uniagent.adapters.sandboxes.cloud.root_folder", lambda fast: tmp_path / "nodes")
    return fake_clouds.Cloud(tmp_path / "cloud")


def provider_of(service: str, cloud: Any, given: dict[str, Any] | None = None) -> CloudProvider:
    sdk = getattr(fake_clouds, f"fake_{service}")(cloud)
    kind: Callable[..., Any] = getattr(MODULES[service], NAMES[service])
    return CloudProvider(service, lambda o: kind(sdk, o.app) if service == "modal" else kind(sdk), given)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, service: str, cloud: Any) -> None:
    async with provider_of(service, cloud) as provider, provider.open({}) as sandbox:
        await check(sandbox)
    assert not cloud.machines


async def test_a_session(service: str, cloud: Any) -> None:
    section = {"files": {"a/b": "planted"}, "env": {"GREETING": "hi you"}, "lifetime_s": 120}
    async with provider_of(service, cloud) as provider, provider.open(section) as box:
        shell = await box.shell()
        assert (await shell.run("cat a/b; echo $GREETING; X=5", timeout_s=30)).output == b"plantedhi you\n"
        assert (await shell.run("echo $X", timeout_s=30)).output == b"5\n"
        done = await box.exec(["sh", "-c", "cat; printf '\\377' >&2; exit 3"], stdin=b"\x00\xff", timeout_s=30)
        assert (done.code, done.output, done.errors) == (3, b"\x00\xff", b"\xff"), "bytes, though the line is text"
        await box.write(box.workdir / "c", b"\x00" * 300_000)
        assert await box.read(box.workdir / "c") == b"\x00" * 300_000
        (asked,) = cloud.asked
        assert 120 in (asked.get("timeout"), 60 * asked.get("ttl", 0)), "the service ends it, whatever becomes of us"
        assert asked.get("block_network", not asked.get("internet")), "no network unless asked for"
    assert not cloud.machines


async def test_a_snapshot_is_a_start(service: str, cloud: Any) -> None:
    async with provider_of(service, cloud) as provider:
        async with provider.open({}) as box:
            await box.write(box.workdir / "state", b"kept")
            name = await snapshot(box)
            await box.write(box.workdir / "state", b"changed after")
        async with provider.open({"snapshot": name}) as one, provider.open({"snapshot": name}) as other:
            assert await one.read(one.workdir / "state") == b"kept"
            await one.write(one.workdir / "state", b"of one")
            assert await other.read(other.workdir / "state") == b"kept"
    assert service == "modal" or not cloud.snapshots, "removed with the provider; modal's end by themselves"


async def test_prepared_once_for_all(service: str, cloud: Any) -> None:
    section = {"prepare": "echo $RANDOM$RANDOM > made"}
    seen: set[bytes] = set()
    async with provider_of(service, cloud) as provider:

        async def one() -> None:
            async with provider.open({**section, "files": {"x": "y"}}) as box:
                seen.add(await box.read(box.workdir / "made"))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        with pytest.raises(UserError, match="prepare ended with 3: oh no"):
            async with provider.open({"prepare": "echo oh no; exit 3"}):
                pass
    assert len(seen) == 1
    assert [bool(asked["snapshot"]) for asked in cloud.asked] == [False, True, True, True, False]


async def test_sandboxes_of_a_dead_node_are_ended_and_a_living_nodes_stay(service: str, cloud: Any) -> None:
    cloud.start({LABEL: f"{_host()}.123-dead"}, None)
    cloud.start({LABEL: "elsewhere.123-dead"}, None)
    cloud.start({}, None)
    async with provider_of(service, cloud), provider_of(service, cloud) as living, living.open({}) as box:
        async with provider_of(service, cloud):
            assert (await box.exec(["true"], timeout_s=30)).code == 0
        assert [m.labels.get(LABEL, "").partition(".")[0] for m in cloud.machines.values()] == [
            "elsewhere",
            "",
            _host(),
        ]
    for name in list(cloud.machines):
        del cloud.machines[name]


async def test_a_machine_that_goes_away_is_told(service: str, cloud: Any) -> None:
    async with provider_of(service, cloud) as provider:
        with pytest.raises(InfraError, match=r"the sandbox is gone|Connection|rror"):
            async with provider.open({}) as box:
                (machine,) = cloud.machines.values()
                machine.processes[0].kill()
                await (await box.shell()).run("sleep 5", timeout_s=30)


def test_no_credentials_names_the_variable(service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MODAL_TOKEN_ID", "E2B_API_KEY", "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "MODAL_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    provider = load("sandboxes", service)()
    variable = {"modal": "MODAL_TOKEN_ID", "e2b": "E2B_API_KEY", "daytona": "DAYTONA_API_KEY"}[service]

    async def main() -> None:
        async with provider:
            pass

    with pytest.raises(UserError, match=variable):
        trio.run(main)


def test_no_sdk_names_the_extra(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == service else find(name, *more))

    async def main() -> None:
        async with load("sandboxes", service)():
            pass

    with pytest.raises(UserError, match=rf"pip install 'uniagent\[{service}\]'"):
        trio.run(main)


async def test_mistakes_are_named(service: str, cloud: Any) -> None:
    async with provider_of(service, cloud) as provider:
        for section, complaint in (
            ({"network": "host"}, "network = .*allowed: internet, none"),
            ({"imgae": "x"}, "no key 'imgae'; did you mean 'image'"),
        ):
            with pytest.raises(UserError, match=complaint):
                async with provider.open(section):
                    pass
