"""The python tool on a real sandbox."""

from __future__ import annotations

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.tools.python import Python


async def test_a_notebook(isolation: str) -> None:
    provider = LocalProvider({"warm": 0, "isolation": isolation})
    async with provider, provider.open({"files": {"data.txt": "from a file"}}) as box:
        tool = Python(box, {"max_chars": 4000})

        async def cell(code: str) -> str:
            return (await tool({"code": code})).text

        assert await cell("x = 20\ndef f(): return x + 1") == "(no output)"
        assert await cell("x += 1; f()") == "22"
        assert await cell("print('a'); import sys; print('b', file=sys.stderr); 'c'") == "a\nb\n'c'"
        assert await cell("open('data.txt').read()") == "'from a file'"
        assert await cell("import os; os.system('echo from a program'); None") == "from a program"
        assert await cell("input()") != ""
        trace = await cell("def g():\n    return 1 / 0\ng()")
        assert trace.startswith('Traceback (most recent call last):\n  File "<cell>", line 3, in <module>')
        assert trace.endswith("ZeroDivisionError: division by zero")
        assert "SyntaxError" in await cell("for")
        assert await cell("x") == "21", "errors lose nothing"
        assert (await cell("'ü' * 3")) == "'üüü'"
        assert "characters left out" in await cell("print('x' * 100000)")


async def test_time_limit_interrupts_and_keeps_the_state(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        tool = Python(box, {"timeout_s": 0.4})
        await tool({"code": "x = 5"})
        seen = await tool({"code": "print('begun', flush=True)\nwhile True: pass"})
        assert seen.problem == "timeout"
        assert seen.text.startswith("begun\n")
        assert "KeyboardInterrupt" in seen.text
        assert "longer than 0.4 s" in seen.text
        assert (await tool({"code": "x"})).text == "5"


async def test_an_interpreter_that_ends_is_replaced_and_says_so(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        tool = Python(box, {"timeout_s": 20})
        for death in ("raise SystemExit", "import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"):
            seen = await tool({"code": f"x = 1; {death}"})
            assert "the interpreter ended" in seen.text
            assert "NameError" in (await tool({"code": "x"})).text


async def test_no_python_in_the_sandbox_is_told(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        seen = await Python(box, {"program": "nosuchpython"})({"code": "1"})
        assert seen.problem == "tool_error"
        assert "did not start" in seen.text
