"""Names to parts: a name stands for ``module:attribute``, imported when the part is built, not before.

Third parties add names through Python entry points of the group ``uniagent.<kind>``, or use the dotted
``module:attribute`` itself as the name.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from uniagent.engine.errors import UserError, nearest

BUILTIN: dict[str, dict[str, str]] = {
    "engines": {
        "transformers": "uniagent.adapters.engines.transformers:build",
        "scripted": "uniagent.adapters.engines.scripted:build",
        "vllm": "uniagent.adapters.engines.vllm:build",
        "server": "uniagent.adapters.engines.server:build",
    },
    "sandboxes": {
        "local": "uniagent.adapters.sandboxes.local:LocalProvider",
        "container": "uniagent.adapters.sandboxes.container:ContainerProvider",
        "ssh": "uniagent.adapters.sandboxes.ssh:SshProvider",
        "runc": "uniagent.adapters.sandboxes.runc:RuncProvider",
        "modal": "uniagent.adapters.sandboxes.modal:ModalProvider",
        "e2b": "uniagent.adapters.sandboxes.e2b:E2bProvider",
        "daytona": "uniagent.adapters.sandboxes.daytona:DaytonaProvider",
        "none": "uniagent.adapters.sandboxes.none:NoneProvider",
    },
    "tools": {
        "stateful_shell": "uniagent.adapters.tools.shell:StatefulShell",
        "submit": "uniagent.adapters.tools.submit:Submit",
        "str_replace_editor": "uniagent.adapters.tools.editor:StrReplaceEditor",
        "python": "uniagent.adapters.tools.python:Python",
        "mcp": "uniagent.adapters.tools.mcp:Mcp",
        "text_game": "uniagent.tasks.text_game.task:Play",
    },
    "agents": {
        "react": "uniagent.adapters.agents.react:React",
        "command": "uniagent.adapters.agents.command:command",
        "claude_code": "uniagent.adapters.agents.claude_code:CLAUDE_CODE",
        "codex": "uniagent.adapters.agents.codex:CODEX",
        "mini_swe_agent": "uniagent.adapters.agents.mini_swe_agent:MINI_SWE_AGENT",
        "opencode": "uniagent.adapters.agents.opencode:OPENCODE",
        "qwen_code": "uniagent.adapters.agents.qwen_code:QWEN_CODE",
    },
    "transcripts": {
        "claude_events": "uniagent.adapters.agents.transcripts:claude_events",
        "codex_events": "uniagent.adapters.agents.transcripts:codex_events",
        "mini_trajectory": "uniagent.adapters.agents.transcripts:mini_trajectory",
        "opencode_events": "uniagent.adapters.agents.transcripts:opencode_events",
        "text": "uniagent.adapters.agents.transcripts:text",
    },
    "tasks": {
        "shell_quest": "uniagent.tasks.shell_quest.task:ShellQuest",
        "function": "uniagent.tasks.function:Function",
        "reasoning_gym": "uniagent.tasks.reasoning_gym:ReasoningGym",
        "bugfix": "uniagent.tasks.bugfix.task:BugFix",
        "text_game": "uniagent.tasks.text_game.task:TextGame",
        "llm_judge": "uniagent.tasks.llm_judge.task:LlmJudge",
        "swe_bench": "uniagent.tasks.swe.benchmarks:swe_bench",
        "swe_bench_multilingual": "uniagent.tasks.swe.benchmarks:swe_bench",
        "swe_rebench": "uniagent.tasks.swe.benchmarks:swe_rebench",
        "r2e_gym": "uniagent.tasks.swe.r2e_gym:R2eGym",
        "harbor": "uniagent.tasks.harbor.task:Harbor",
        "kernel": "uniagent.tasks.kernel.task:Kernel",
    },
    "parsers": {
        "auto": "uniagent.adapters.parsers.families:choose",
        "deepseek": "uniagent.adapters.parsers.families:deepseek",
        "deepseek_dsml": "uniagent.adapters.parsers.families:deepseek_dsml",
        "gemma4": "uniagent.adapters.parsers.families:gemma4",
        "glm": "uniagent.adapters.parsers.families:glm",
        "gpt_oss": "uniagent.adapters.parsers.families:gpt_oss",
        "kimi": "uniagent.adapters.parsers.families:kimi",
        "kimi_k3": "uniagent.adapters.parsers.families:kimi_k3",
        "llama": "uniagent.adapters.parsers.families:llama",
        "minimax": "uniagent.adapters.parsers.families:minimax",
        "mistral": "uniagent.adapters.parsers.families:mistral",
        "plain": "uniagent.adapters.parsers.families:plain",
        "pythonic": "uniagent.adapters.parsers.families:pythonic",
        "qwen": "uniagent.adapters.parsers.families:qwen",
        "qwen_xml": "uniagent.adapters.parsers.families:qwen_xml",
    },
    "dialects": {
        "chat": "uniagent.adapters.dialects.chat:Chat",
        "responses": "uniagent.adapters.dialects.responses:Responses",
        "anthropic": "uniagent.adapters.dialects.anthropic:Anthropic",
    },
    "datasets": {
        "shell_quest": "uniagent.tasks.shell_quest.data:samples",
        "reasoning_gym": "uniagent.tasks.reasoning_gym:samples",
        "bugfix": "uniagent.tasks.bugfix.data:samples",
        "text_game": "uniagent.tasks.text_game.task:samples",
        "swe_bench": "uniagent.tasks.swe.benchmarks:swe_bench_samples",
        "swe_bench_multilingual": "uniagent.tasks.swe.benchmarks:multilingual_samples",
        "swe_rebench": "uniagent.tasks.swe.benchmarks:swe_rebench_samples",
        "r2e_gym": "uniagent.tasks.swe.r2e_gym:r2e_gym_samples",
        "harbor": "uniagent.tasks.harbor.data:samples",
        "kernel": "uniagent.tasks.kernel.problems:samples",
    },
    "models": {"tiny-shell": "uniagent.tasks.shell_quest.model:folder"},
    "strategies": {
        "uniform": "uniagent.engine.curriculum.strategies:uniform",
        "band": "uniagent.engine.curriculum.strategies:band",
        "learnability": "uniagent.engine.curriculum.strategies:learnability",
        "growth": "uniagent.engine.curriculum.strategies:growth",
        "mixture": "uniagent.engine.curriculum.strategies:mixture",
    },
    "trackers": {},
    "seams": {  # what the composition root takes from the layers above, by name
        "tasks": "uniagent.tasks.config:TaskConfigResolver",
        "samples": "uniagent.tasks.data:samples",
    },
}


def names(kind: str) -> list[str]:
    """Every name of a kind, built in or installed."""
    return sorted({*BUILTIN[kind], *(e.name for e in entry_points(group=f"uniagent.{kind}"))})


def load(kind: str, name: str) -> Any:
    """The part behind a name; raises UserError with the list of names when there is none."""
    one = {"strategies": "strategy"}.get(kind, kind.rstrip("s"))
    target = BUILTIN[kind].get(name) or next(
        (e.value for e in entry_points(group=f"uniagent.{kind}") if e.name == name), name if ":" in name else None
    )
    if target is None:
        raise UserError(f"there is no {one} named {name!r}: {nearest(name, names(kind))}")
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise UserError(f"cannot load {one} {name!r} from {target!r}: {problem}") from problem
