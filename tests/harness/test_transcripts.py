"""What harnesses print, as chat messages: short pieces of what the pinned versions printed, and anything at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.adapters.agents import transcripts
from uniagent.adapters.agents.transcripts import Told


def lines(*events: Any) -> str:
    return "\n".join(json.dumps(event) for event in events)


def claude(role: str, id: str | None, *content: Any, parent: str | None = None) -> dict[str, Any]:
    message = {"role": role, "content": list(content), **({"id": id} if id else {})}
    return {"type": role, "message": message, "parent_tool_use_id": parent}


CLAUDE = (
    {"type": "system", "subtype": "init", "cwd": "/work"},
    claude("assistant", "msg_1", {"type": "thinking", "thinking": "hm"}),
    claude("assistant", "msg_1", {"type": "text", "text": "I look."}),
    claude("assistant", "msg_1", {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}),
    claude("assistant", "msg_s", {"type": "text", "text": "a subagent's"}, parent="c0"),
    claude("user", None, {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "out"}]}),
    claude("assistant", "msg_2", {"type": "text", "text": "Done."}),
)
CLAUDE_END = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 2, "result": "Done."}
TALK = [
    {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "out"},
    {"role": "assistant", "content": "Done."},
]  # fmt: skip


ENDED = [*CLAUDE, CLAUDE_END]


@pytest.mark.parametrize("output", [lines("noise", *ENDED) + "\nwarning: x", json.dumps(ENDED)])
def test_events_of_claude_code_and_qwen_code(output: str) -> None:
    told = transcripts.claude_events(output)
    assert list(told.messages) == TALK
    assert (told.error, told.info) == (None, {"turns": 2, "result": "success"})


def test_a_run_of_claude_code_that_failed_or_was_cut_says_so() -> None:
    failed = {**CLAUDE_END, "is_error": True, "result": "API Error: 403"}
    assert transcripts.claude_events(lines(*CLAUDE, failed)).error == "API Error: 403"
    assert transcripts.claude_events(lines({**CLAUDE_END, "subtype": "error_max_turns", "result": None})).error == (
        "error_max_turns"
    )
    cut = transcripts.claude_events(lines(*CLAUDE)[:-5])
    assert cut.error == transcripts.NO_RESULT
    assert list(cut.messages) == TALK[:2]


RUN = {"id": "i1", "type": "command_execution", "command": "bash -lc ls", "aggregated_output": "out\n", "exit_code": 0}
CODEX = (
    {"type": "thread.started"},
    {"type": "item.completed", "item": {"id": "i0", "type": "agent_message", "text": "I look."}},
    {"type": "item.started", "item": RUN},
    {"type": "item.completed", "item": RUN},
    {"type": "error", "message": "Reconnecting... 1/5"},
)


def test_events_of_codex() -> None:
    told = transcripts.codex_events(lines(*CODEX, {"type": "turn.completed", "usage": {}}))
    assert [(m["role"], m["content"]) for m in told.messages] == [
        ("assistant", "I look."),
        ("assistant", ""),
        ("tool", "out\n"),
    ]
    assert (told.error, told.info) == (None, {"turns": 1})
    assert transcripts.codex_events(lines(*CODEX)).error == "Reconnecting... 1/5"
    assert transcripts.codex_events(lines(*CODEX, {"type": "turn.failed", "error": {"message": "no"}})).error == "no"


def test_the_trajectory_of_mini_swe_agent() -> None:
    messages = [{"role": "system", "content": "s"}, {**TALK[0], "extra": {"cost": 0}}, {"role": "exit", "content": ""}]
    info = {"exit_status": "Submitted", "model_stats": {"api_calls": 1}}
    told = transcripts.mini_trajectory(json.dumps({"info": info, "messages": messages}, indent=2))
    assert list(told.messages) == [messages[0], TALK[0]]
    assert (told.error, told.info) == (None, {"turns": 1, "result": "Submitted"})
    limits = {**info, "exit_status": "LimitsExceeded"}
    assert transcripts.mini_trajectory(json.dumps({"info": limits, "messages": []})).error == "LimitsExceeded"
    assert transcripts.mini_trajectory("").error == "it wrote no trajectory"


OPENCODE = (
    {"type": "step_start", "part": {}},
    {"type": "text", "part": {"text": "I look."}},
    {
        "type": "tool_use",
        "part": {"tool": "bash", "callID": "c1", "state": {"input": {"command": "ls"}, "output": "out\n"}},
    },
    {"type": "step_finish", "part": {"reason": "tool-calls"}},
)


def test_events_of_opencode() -> None:
    told = transcripts.opencode_events(lines(*OPENCODE))
    assert [(m["role"], m["content"]) for m in told.messages] == [
        ("assistant", "I look."),
        ("assistant", ""),
        ("tool", "out\n"),
    ]
    assert told.messages[1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert (told.error, told.info) == (None, {"turns": 1})
    failed = lines(*OPENCODE, {"type": "error", "error": {"name": "X"}})
    assert transcripts.opencode_events(failed).error == '{"name": "X"}'


SAMPLES = {
    transcripts.text: ENDED,
    transcripts.claude_events: ENDED,
    transcripts.codex_events: list(CODEX),
    transcripts.mini_trajectory: [{"info": {"exit_status": "Submitted", "model_stats": {}}, "messages": TALK}],
    transcripts.opencode_events: list(OPENCODE),
}
ODD = st.sampled_from([None, True, 1, "", "text", [], [1], ["a"], {}, {"type": "text"}, [{}], [{"type": "tool_use"}]])


def _spoilt(draw: Any, value: Any) -> Any:
    """The value with something odd in some places."""
    if draw(st.integers(0, 7)) == 0:
        return draw(ODD)
    if isinstance(value, dict):
        return {k: _spoilt(draw, v) for k, v in value.items() if draw(st.integers(0, 9))}
    return [_spoilt(draw, v) for v in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("read", SAMPLES)
@given(data=st.data(), junk=st.sampled_from(["", "\n{", "\nnull", "\x85", "\n[1]"]))
def test_no_output_is_too_odd(read: Any, data: st.DataObject, junk: str) -> None:
    told = read(lines(*(_spoilt(data.draw, event) for event in SAMPLES[read])) + junk)
    assert isinstance(told, Told)
    json.dumps([told.messages, told.error, told.info])
