"""What every sandbox must do, as plain async checks: run them against your own backend.

Each check takes an open sandbox and asserts; none leaves anything that disturbs another one on a fresh sandbox:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_contract(check):
        async with MyProvider() as provider, provider.open({...}) as sandbox:
            await check(sandbox)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import trio

from uniagent.engine.ports import Completed, ModelEndpoint, Sandbox

Check = Callable[[Sandbox], Awaitable[None]]
CHECKS: list[Check] = []
PATIENCE_S = 30.0  # for what must end by itself


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


async def _run(sandbox: Sandbox, command: str, timeout_s: float = PATIENCE_S) -> Completed:
    return await (await sandbox.shell()).run(command, timeout_s=timeout_s)


async def _text(sandbox: Sandbox, command: str) -> str:
    return (await _run(sandbox, command)).output.decode()


async def _gone(sandbox: Sandbox, name: str) -> bool:
    """Whether no process with this name (of up to 15 characters) runs any more, within a second."""
    for _ in range(100):
        found = await _text(sandbox, f"cat /proc/[0-9]*/stat 2>/dev/null | grep -c '({name}) [^ZX]'")
        if found.strip() == "0":
            return True
        await trio.sleep(0.01)
    return False


# ---------------------------------------------------------------- the shell


@check
async def exit_codes(sandbox: Sandbox) -> None:
    assert [(await _run(sandbox, c)).code for c in ("true", "false", "(exit 42)", "nosuchcommand")] == [0, 1, 42, 127]
    assert (await _run(sandbox, "bash -c 'kill -9 $$'")).code == 137


@check
async def stdout_and_stderr_come_as_they_were_written(sandbox: Sandbox) -> None:
    assert await _text(sandbox, "echo one; echo two >&2; echo three") == "one\ntwo\nthree\n"


@check
async def state_stays_between_commands(sandbox: Sandbox) -> None:
    await _run(sandbox, "mkdir -p sub && cd sub; X=5; export Y=6; f() { echo called $1; }; declare -a A=(a b)")
    expected = f"{sandbox.workdir}/sub\n5\n6\n6\ncalled x\nb\n"
    assert await _text(sandbox, "pwd; echo $X; echo $Y; bash -c 'echo $Y'; f x; echo ${A[1]}") == expected


@check
async def starts_in_the_working_directory(sandbox: Sandbox) -> None:
    assert await _text(sandbox, "pwd") == f"{sandbox.workdir}\n"


@check
async def readers_of_stdin_get_nothing(sandbox: Sandbox) -> None:
    assert await _text(sandbox, 'cat; read x; echo "[$x]"') == "[]\n"


@check
async def background_processes_do_not_hold_a_command_up(sandbox: Sandbox) -> None:
    done = await _run(sandbox, "sleep 1000 & echo $!", timeout_s=5)
    assert done.code == 0
    pid = done.output.decode().strip()
    assert (await _run(sandbox, f"kill -0 {pid}")).code == 0, "it still runs"
    await _run(sandbox, f"kill {pid}")


@check
async def output_without_a_newline(sandbox: Sandbox) -> None:
    assert await _text(sandbox, "printf abc") == "abc"
    assert await _text(sandbox, "printf ''") == ""


@check
async def binary_output(sandbox: Sandbox) -> None:
    done = await _run(sandbox, r"printf '\000\377\001\n\xfe'")
    assert done.output == b"\x00\xff\x01\n\xfe"


@check
async def unicode_commands_and_output(sandbox: Sandbox) -> None:
    assert await _text(sandbox, "echo 'äöü 你好 🐚'") == "äöü 你好 🐚\n"


@check
async def many_lines_and_quotes(sandbox: Sandbox) -> None:
    assert await _text(sandbox, "cat <<'EOF'\n$HOME 'a' \"b\" `c`\nEOF\necho \"it's\"") == "$HOME 'a' \"b\" `c`\nit's\n"


@check
async def a_syntax_error_leaves_the_shell_usable(sandbox: Sandbox) -> None:
    await _run(sandbox, "X=7")
    for broken in ('echo "never closed', "if true; then", "}", "echo $((1 +"):
        assert (await _run(sandbox, broken, timeout_s=5)).code not in (0, None)
    assert await _text(sandbox, "echo $X") == "7\n"


@check
async def large_output_keeps_head_and_tail(sandbox: Sandbox) -> None:
    done = await _run(sandbox, "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert done.code == 0
    assert done.output.startswith(b"first\nxx")
    assert done.output.endswith(b"xx\nlast\n")
    assert len(done.output) + done.dropped == 100_000_000 + len("first\n\nlast\n")
    assert len(done.output) < 20_000_000


@check
async def a_long_command(sandbox: Sandbox) -> None:
    words = " ".join(f"word{i}" for i in range(20_000))
    assert await _text(sandbox, f"echo {words} | wc -w") == "20000\n"


@check
async def forged_markers_are_output(sandbox: Sandbox) -> None:
    """Whatever a command prints, also on descriptors it finds open, is not taken for its end."""
    lie = "for fd in /proc/self/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && echo '0000000000000000 0' 2>/dev/null >&$n; done"
    done = await _run(sandbox, f"{{ {lie}; }} 2>/dev/null; echo '0123456789abcdef 0'; echo end; false", timeout_s=10)
    assert done.code == 1
    assert done.output.endswith(b"0123456789abcdef 0\nend\n")
    assert await _text(sandbox, "echo next") == "next\n"


@check
async def time_limit_kills_the_whole_tree_and_keeps_the_state(sandbox: Sandbox) -> None:
    await _run(sandbox, "X=8; cp $(command -v sleep) ./sleeper; sleep 1000 & OLD=$!")
    tree = "(./sleeper 1000 & setsid ./sleeper 1000 & ./sleeper 1000); echo never"
    done = await _run(sandbox, tree, timeout_s=0.3)
    assert done.timed_out
    assert done.code is None
    assert not done.restarted
    assert b"never" not in done.output
    assert await _gone(sandbox, "sleeper")
    assert await _text(sandbox, "echo $X") == "8\n"
    assert (await _run(sandbox, "kill -0 $OLD")).code == 0, "what ran before is left alone"
    await _run(sandbox, "kill $OLD")


@check
async def time_limit_ends_loops_of_the_shell_itself(sandbox: Sandbox) -> None:
    await _run(sandbox, "X=9; f() { while :; do :; done; }")
    for endless in ("while :; do :; done", "f", "while sleep 0.01; do :; done", "mkfifo p 2>/dev/null; read x < p"):
        done = await _run(sandbox, endless, timeout_s=0.1)
        assert done.timed_out, endless
        assert not done.restarted, endless
    assert await _text(sandbox, "echo $X") == "9\n"


@check
async def output_before_the_time_limit_is_kept(sandbox: Sandbox) -> None:
    done = await _run(sandbox, "echo before; sleep 1000", timeout_s=0.5)
    assert done.timed_out
    assert done.output.startswith(b"before\n")


@check
async def what_ignores_the_interrupt_is_killed(sandbox: Sandbox) -> None:
    await _run(sandbox, "X=10")
    done = await _run(sandbox, "bash -c 'trap \"\" INT TERM; while :; do sleep 0.05; done'", timeout_s=0.1)
    assert done.timed_out
    assert await _text(sandbox, "echo $X") == "10\n"


@check
async def a_shell_that_cannot_be_stopped_is_replaced_and_says_so(sandbox: Sandbox) -> None:
    done = await _run(sandbox, "trap '' INT; while :; do :; done", timeout_s=0.1)
    assert done.timed_out
    assert done.restarted
    assert await _text(sandbox, "echo fresh") == "fresh\n"


@check
async def exit_gives_its_code_and_a_fresh_shell(sandbox: Sandbox) -> None:
    await _run(sandbox, "X=11; sleep 1000 & echo $! > pid")
    done = await _run(sandbox, "echo bye; exit 5")
    assert (done.code, done.restarted, done.output) == (5, True, b"bye\n")
    assert await _text(sandbox, 'echo "[$X]"') == "[]\n"
    assert (await _run(sandbox, "kill $(cat pid)")).code == 0, "background processes live on"


@check
async def a_cancelled_command_is_stopped(sandbox: Sandbox) -> None:
    """The caller is cancelled, not timed out: the shell is usable again."""
    await _run(sandbox, "X=12; cp $(command -v sleep) ./cancelled")
    with trio.move_on_after(0.1):
        await _run(sandbox, "echo lost; ./cancelled 1000")
    assert await _text(sandbox, "echo $X") == "12\n"
    assert await _gone(sandbox, "cancelled")


@check
async def late_output_of_the_background_belongs_to_no_command_before_it(sandbox: Sandbox) -> None:
    await _run(sandbox, "{ until [ -e go ]; do sleep 0.01; done; echo late; touch told; } &")
    assert await _text(sandbox, "echo now") == "now\n"
    await _run(sandbox, "touch go; until [ -e told ]; do sleep 0.01; done")
    assert await _text(sandbox, "echo after") == "after\n"


@check
async def a_flood_from_the_background_does_not_hold_commands_up(sandbox: Sandbox) -> None:
    await _run(sandbox, "yes flood & F=$!")
    done = await _run(sandbox, "echo here", timeout_s=10)
    assert done.code == 0
    assert b"here\n" in done.output
    await _run(sandbox, "kill $F")


@check
async def shell_options_do_not_break_it(sandbox: Sandbox) -> None:
    await _run(sandbox, "set -u; set -x; set -o pipefail; alias ls='false'; PS1='> '; PROMPT_COMMAND='echo prompt'")
    assert (await _run(sandbox, "echo $nosuchvariable")).code != 0
    done = await _run(sandbox, "echo fine 2>/dev/null")
    assert done.code == 0
    assert b"fine\n" in done.output


# ---------------------------------------------------------------- single programs


@check
async def exec_gives_code_stdout_and_stderr(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["bash", "-c", "echo out; echo err >&2; exit 3"], timeout_s=PATIENCE_S)
    assert (done.code, done.output, done.errors) == (3, b"out\n", b"err\n")


@check
async def exec_takes_arguments_as_they_are(sandbox: Sandbox) -> None:
    words = ["a b", "$HOME", "'", '"', "*", "", "new\nline", "ü"]
    done = await sandbox.exec(["printf", "%s|", *words], timeout_s=PATIENCE_S)
    assert done.output.decode() == "|".join(words) + "|"


@check
async def exec_feeds_stdin(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    done = await sandbox.exec(["md5sum"], stdin=data, timeout_s=PATIENCE_S)
    import hashlib

    assert done.output.split()[0].decode() == hashlib.md5(data).hexdigest()
    assert (await sandbox.exec(["cat"], timeout_s=PATIENCE_S)).output == b""


@check
async def exec_with_cwd_and_env(sandbox: Sandbox) -> None:
    await sandbox.exec(["mkdir", "-p", "deep/er"], timeout_s=PATIENCE_S)
    done = await sandbox.exec(
        ["bash", "-c", "pwd; echo $GREETING"],
        cwd=sandbox.workdir / "deep/er",
        env={"GREETING": "hello you"},
        timeout_s=PATIENCE_S,
    )
    assert done.output.decode() == f"{sandbox.workdir}/deep/er\nhello you\n"


@check
async def exec_of_a_missing_program(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["nosuchprogram"], timeout_s=PATIENCE_S)).code == 127


@check
async def exec_time_limit_kills_the_tree(sandbox: Sandbox) -> None:
    await _run(sandbox, "cp $(command -v sleep) ./execsleeper")
    done = await sandbox.exec(["bash", "-c", "echo hi; ./execsleeper 1000 & ./execsleeper 1000"], timeout_s=1)
    assert done.timed_out
    assert done.output == b"hi\n"
    assert await _gone(sandbox, "execsleeper")


@check
async def exec_runs_beside_a_busy_shell(sandbox: Sandbox) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run, sandbox, "until [ -e done ]; do sleep 0.01; done")
        for _ in range(4):
            nursery.start_soon(lambda: sandbox.exec(["true"], timeout_s=PATIENCE_S))
        assert (await sandbox.exec(["touch", "done"], timeout_s=PATIENCE_S)).code == 0


@check
async def exec_and_shell_share_files_and_processes(sandbox: Sandbox) -> None:
    await _run(sandbox, "echo shared > note; echo tmp > ${TMPDIR:-/tmp}/note; sleep 1000 & echo $! > pid")
    script = 'cat note "${TMPDIR:-/tmp}/note"; kill $(cat pid)'
    done = await sandbox.exec(["bash", "-c", script], timeout_s=PATIENCE_S)
    assert (done.code, done.output) == (0, b"shared\ntmp\n")


@check
async def a_program_with_its_streams(sandbox: Sandbox) -> None:
    """Backends that offer ``open`` (servers inside need it)."""
    if not hasattr(sandbox, "open"):
        return
    channel = await sandbox.open(["sh", "-c", "read x; echo got $x; pwd; read y; echo $y >&2; exit 7"])
    await channel.write(b"one\n")
    output = b""
    while output.count(b"\n") < 2:
        output += await channel.read()
    assert output.decode() == f"got one\n{sandbox.workdir}\n"
    await channel.write(b"two\n")
    assert await channel.read(errors=True) == b"two\n"
    assert await channel.code() == 7
    await channel.close()


# ---------------------------------------------------------------- files


@check
async def write_and_read(sandbox: Sandbox) -> None:
    await sandbox.write(sandbox.workdir / "a/b/c.bin", b"\x00\xffdata")
    assert await sandbox.read(sandbox.workdir / "a/b/c.bin") == b"\x00\xffdata"
    assert await sandbox.read(sandbox.workdir / "a/b/c.bin", limit=2) == b"\x00\xff"
    assert await _text(sandbox, "wc -c < a/b/c.bin") == "6\n"
    await sandbox.write(PurePosixPath("relative.txt"), b"in the workdir")
    assert await sandbox.read(sandbox.workdir / "relative.txt") == b"in the workdir"


@check
async def read_of_what_is_not_there(sandbox: Sandbox) -> None:
    try:
        await sandbox.read(sandbox.workdir / "nosuchfile")
    except FileNotFoundError:
        return
    raise AssertionError("FileNotFoundError was expected")


@check
async def files_gives_the_whole_tree(sandbox: Sandbox) -> None:
    await _run(sandbox, "mkdir -p d/e empty; echo 1 > d/e/f; printf 2 > g; ln -s /etc/passwd link; mkfifo pipe")
    found = await sandbox.files(sandbox.workdir)
    assert {str(path): content for path, content in found.items()} == {
        "d/e/f": b"1\n",
        "g": b"2",
        "link": b"<symlink>",
        "pipe": b"<fifo>",
    }


@check
async def links_do_not_lead_out(sandbox: Sandbox) -> None:
    await _run(sandbox, "ln -s /etc/passwd secret; ln -s /etc outside; echo safe > inside")
    for path in ("secret", "outside/passwd"):
        try:
            await sandbox.read(sandbox.workdir / path)
        except OSError:
            continue
        raise AssertionError(f"{path} was followed")
    try:
        await sandbox.write(sandbox.workdir / "outside/planted", b"x")
    except OSError:
        return
    raise AssertionError("a link was written through")


@check
async def trees_up_and_down(sandbox: Sandbox) -> None:
    with TemporaryDirectory() as temporary:
        source, target = Path(temporary, "up"), Path(temporary, "down")
        (source / "sub").mkdir(parents=True)
        (source / "sub/run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "sub/run.sh").chmod(0o755)
        (source / "data.bin").write_bytes(bytes(range(256)))
        await sandbox.upload(source, sandbox.workdir / "tree")
        assert await _text(sandbox, "tree/sub/run.sh") == "ran\n"
        await _run(sandbox, "echo new > tree/sub/new; ln -s /etc/passwd tree/link")
        await sandbox.download(sandbox.workdir / "tree", target)
        found = {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
        assert found == {
            "sub/run.sh": b"#!/bin/sh\necho ran\n",
            "sub/new": b"new\n",
            "data.bin": bytes(range(256)),
        }
        await sandbox.upload(source / "data.bin", sandbox.workdir / "one.bin")
        await sandbox.download(sandbox.workdir / "one.bin", Path(temporary, "one.bin"))
        assert Path(temporary, "one.bin").read_bytes() == bytes(range(256))


# ---------------------------------------------------------------- the way to the model


@check
async def programs_inside_reach_the_gateway(sandbox: Sandbox) -> None:
    async def shout(stream: trio.SocketStream) -> None:
        async with stream:
            while data := await stream.receive_some():
                await stream.send_all(data.upper())

    async def serve(listener: trio.SocketListener) -> None:
        await trio.serve_listeners(shout, [listener])

    async with trio.open_nursery() as nursery:
        (outside,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(serve, outside)
        origin = f"http://127.0.0.1:{outside.socket.getsockname()[1]}"
        async with sandbox.reach(ModelEndpoint(f"{origin}/s/1", "key", "policy", serve=serve)) as near:
            url = urlsplit(near.base_url)
            assert (url.scheme, url.path, near.openai_base_url) == ("http", "/s/1", f"{near.base_url}/v1")
            say = "; ".join(f"echo {word} >&3; read x <&3; echo $x" for word in ("one", "two"))
            talk = ["bash", "-c", f"exec 3<>/dev/tcp/{url.hostname}/{url.port}; {say}"]
            assert (await sandbox.exec(talk, timeout_s=PATIENCE_S)).output == b"ONE\nTWO\n"
        nursery.cancel_scope.cancel()
