"""``python``: code in an interpreter that stays, like the cells of a notebook.

The interpreter runs inside the sandbox and is reached over FIFOs by single programs, so it works on every backend. The
value of a last expression is shown. At the time limit the code is interrupted as by Ctrl-C; an interpreter that does
not react, or that ended, is replaced by a fresh one, and the observation says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from attrs import frozen

from uniagent.adapters.options import options
from uniagent.adapters.tools.text import shorten
from uniagent.engine.config import key
from uniagent.engine.ports import Completed, Json, Observation, Sandbox, ToolSchema

DESCRIPTION = (
    "Run Python code in a persistent interpreter: variables and imports stay between calls. "
    "What is printed, and the value of a last expression, is shown."
)
FIRST_S, INTERRUPT_S = 30.0, 3.0

# argv: folder. Reads code from the FIFO `code` until its end, runs it with stdout and stderr in the file `output`, and
# writes "done" to the FIFO `end`.
SERVER = r"""
import ast, os, signal, sys, traceback
folder = sys.argv[1]
space = {"__name__": "__main__", "__builtins__": __builtins__}
sys.argv = [""]
sys.path.insert(0, "")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process is born ignoring it
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
worker = os.fork()
if worker:  # tells the end of the interpreter to whoever waits for it
    with open(folder + "/pid.new", "w") as f:
        f.write(str(worker) + "\n")
    with open(folder + "/keeper", "w") as f:
        f.write(str(os.getpid()) + "\n")
    os.rename(folder + "/pid.new", folder + "/pid")
    os.waitpid(worker, 0)
    with open(folder + "/end", "w") as f:
        f.write("ended")
    os._exit(0)
def run(text):
    tree = ast.parse(text, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), space)
    if last is not None:
        exec(compile(ast.Interactive([last]), "<cell>", "single"), space)
while True:
    try:
        with open(folder + "/code", encoding="utf-8", errors="surrogateescape") as f:
            text = f.read()
        output = os.open(folder + "/output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        try:
            run(text)
        except SystemExit:
            os._exit(0)
        except BaseException as problem:
            frames = problem.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != "<cell>":
                frames = frames.tb_next
            traceback.print_exception(type(problem), problem, frames)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(null, 1)
        os.dup2(null, 2)
        with open(folder + "/end", "w") as f:
            f.write("done")
    except KeyboardInterrupt:
        pass
"""
START = (
    'mkdir -m 700 "$1" && mkfifo -m 600 "$1/code" "$1/end" && cat > "$1/server.py" && '
    '{ setsid "$2" -u "$1/server.py" "$1" </dev/null >/dev/null 2>&1 & } && '
    'for i in $(seq 500); do [ -s "$1/pid" ] && exit 0; sleep 0.01; done; exit 1'
)
# a dead interpreter is found before its FIFO would block
CALL = 'kill -0 "$(cat "$1/pid")" 2>/dev/null || exit 70; cat > "$1/code"; exec cat "$1/end"'
OUTPUT = 'cat "$1/output" 2>/dev/null'
INTERRUPT = 'kill -INT "$(cat "$1/pid")" && timeout "$2" cat "$1/end"'
END = 'kill -KILL $(cat "$1/pid" "$1/keeper" | tr "\\n" " "); rm -rf -- "$1"'


@frozen
class PythonOptions:
    """Keys of this tool in ``agent.tools``."""

    as_: str = key("python", "the name the model sees")
    description: str = key(DESCRIPTION, "what the model is told")
    program: str = key("python3", "the interpreter, as the sandbox finds it")
    timeout_s: float = key(60.0, "of one call; then the code is interrupted", at_least=0.01)
    max_chars: int = key(10000, "of an observation's output: the rest is cut out of its middle", at_least=16)


class Python:
    """``engine.ports.Tool``."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        self.sandbox = sandbox
        self.options = options(PythonOptions, given, "tool python")
        self.folder: str | None = None  # of the running interpreter
        code = {"type": "string", "description": "Python source"}
        parameters = {
            "type": "object",
            "properties": {"code": code},
            "required": ["code"],
            "additionalProperties": False,
        }
        self.schema = ToolSchema(self.options.as_, self.options.description, parameters)

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        if self.folder is None and (problem := await self._start()):
            return Observation(problem, problem="tool_error")
        code = arguments["code"].encode(errors="surrogateescape")
        done = await self._run(CALL, stdin=code, timeout_s=self.options.timeout_s)
        notes = []
        if done.timed_out:
            notes.append(f"the code was stopped: it ran longer than {self.options.timeout_s:g} s")
            done = await self._run(INTERRUPT, f"{INTERRUPT_S:g}", timeout_s=INTERRUPT_S + FIRST_S)
        output = await self._run(OUTPUT, timeout_s=FIRST_S)
        if done.output != b"done":
            notes.append("the interpreter ended: the next call starts a fresh one, without any variables")
            await self._run(END, timeout_s=FIRST_S)
            self.folder = None
        shown = shorten(output.output.decode(errors="replace").rstrip("\n"), self.options.max_chars)
        text = "\n".join(part for part in (shown, *notes) if part)
        stopped = bool(notes) and notes[0].startswith("the code was stopped")
        return Observation(text or "(no output)", problem="timeout" if stopped else None)

    async def _start(self) -> str | None:
        """Why there is no interpreter; None when there is one."""
        self.folder = f"/tmp/.python-{secrets.token_hex(8)}"
        done = await self._run(START, self.options.program, stdin=SERVER.encode(), timeout_s=FIRST_S)
        if done.code == 0:
            return None
        self.folder = None
        said = done.errors.decode(errors="replace").strip() or f"does {self.options.program} exist in the sandbox?"
        return f"the Python interpreter did not start: {said}"

    async def _run(self, script: str, *words: str, stdin: bytes = b"", timeout_s: float) -> Completed:
        assert self.folder is not None
        argv = ["sh", "-c", script, "sh", self.folder, *words]
        return await self.sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s)
