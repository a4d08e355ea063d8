"""The local sandbox on a root file system of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.errors import UserError


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with bash, cat, ls and what they load."""
    root = tmp_path_factory.mktemp("image")
    programs = [
        found for name in ("bash", "cat", "ls", "mkdir", "env") if (found := shutil.which(name, path="/usr/bin:/bin"))
    ]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    for source in {*programs, *libraries}:
        target = root / source.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text("NAME=mine\n")
    return root


async def test_an_image_with_a_layer_of_its_own(confined: None, image: Path) -> None:
    section = {"image": str(image), "files": {"a": "planted"}}
    async with LocalProvider({"warm": 0}) as provider:
        async with provider.open(section) as box:
            shell = await box.shell()
            done = await shell.run(
                "cat /etc/os-release a; echo changed > /etc/os-release; mkdir /new; ls /", timeout_s=20
            )
            assert done.output.startswith(b"NAME=mine\nplanted")
            assert b"new\n" in done.output
            assert b"home" not in done.output
        async with provider.open(section) as box:
            done = await (await box.shell()).run("cat /etc/os-release; ls -d /new", timeout_s=20)
            assert done.output.startswith(b"NAME=mine\n")
            assert done.code != 0, "another sandbox's layer is not seen"
    assert (image / "etc/os-release").read_text() == "NAME=mine\n"
    assert not (image / "new").exists()


async def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    async with LocalProvider({"warm": 0, "root": str(tmp_path / "r")}) as provider:
        for section, complaint in (
            ({"image": "ubuntu:24.04"}, "'ubuntu:24.04' is no folder of a root file system"),
            ({"image": str(tmp_path), "isolation": "none"}, "image needs isolation"),
        ):
            with pytest.raises(UserError, match=complaint):
                async with provider.open(section):
                    pass
