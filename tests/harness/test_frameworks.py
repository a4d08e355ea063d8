"""The agents of examples/frameworks, as they are, through the gateway: each keeps its conversation in one chain."""

from __future__ import annotations

from pathlib import Path

import pytest
from theatre import play_of, programs, theatre

from uniagent.adapters.agents.check import EXPECTED
from uniagent.adapters.agents.rehearsal import call_text
from uniagent.engine.messages import ModelCall

pytestmark = [pytest.mark.harness, pytest.mark.usefixtures("confined")]
EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
DIALECT = {
    "anthropic_sdk": "anthropic",
    "langchain_agent": "chat",
    "openai_agents": "responses",
    "openai_sdk": "chat",
    "smolagents_agent": "chat",
}


def play(call: ModelCall) -> str:
    said = play_of("codex")(call)
    assert isinstance(said, str)
    if "final_answer" in call.tool_names and "<tool_call>" not in said:
        return call_text("final_answer", {"answer": said})
    return said


@pytest.mark.parametrize("name", DIALECT)
async def test_an_agent_of_the_examples(name: str, root: Path) -> None:
    options = {
        "command": ["python", "{home}/agent.py", "{prompt}"],
        "env": {
            "BASE_URL": "{base_url}" if name == "anthropic_sdk" else "{openai_base_url}",
            "API_KEY": "{api_key}",
            "MODEL": "{model}",
        },
        "files": {"agent.py": (EXAMPLES / f"{name}.py").read_text()},
        "programs": programs("frameworks"),
    }
    async with theatre(play, root) as stage:
        outcome = await stage.run("command", options)
    assert outcome.result.finished, outcome.result
    assert outcome.result.transcript[-1]["content"] == "The file out.txt is there."
    assert outcome.files == {"out.txt": EXPECTED}
    assert {call.dialect for call in outcome.calls} == {DIALECT[name]}
    assert outcome.chains == ["main"]
    assert outcome.export.fates == ("live",) * 3
    assert outcome.export.ledger.trainable == outcome.export.ledger.sampled
    (chain,) = outcome.export.trajectories
    assert ("edited" in chain.echo_tiers) == (name == "smolagents_agent"), "it turns calls into text"
