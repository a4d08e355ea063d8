"""Task Config: the two layers, their merge, the endpoint, and every refusal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.errors import UserError
from uniagent.engine.ports import ResolvedTask, SessionSampling
from uniagent.tasks import TaskConfigResolver, merge
from uniagent.tasks.config import PromptMessage

TASK_CONFIG = """
- name: swe_bench
  sandbox:
    provider: modal
  agent:
    name: react
    tools:
      - name: stateful_shell
      - name: str_replace_editor
      - name: submit
    model:
      temperature: 0.8
      top_p: 0.9
      max_total_tokens: 65536
"""
SAMPLE_CONFIG = """
name: swe_bench
sandbox:
  image: swebench/sweb.eval.x86_64.example
agent:
  max_steps: 300
prompt:
  - role: user
    content: Fix the issue in /testbed.
metadata:
  instance_id: example
"""
ENDPOINT = {"base_url": "http://127.0.0.1:8000", "api_key": "secret", "model_name": "policy"}


def resolver(text: str, folder: Path, name: str = "tasks.yaml") -> TaskConfigResolver:
    path = folder / name
    path.write_text(text)
    return TaskConfigResolver.from_file(path)


def test_the_documented_example_resolves_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task_config.yaml").write_text(TASK_CONFIG)
    monkeypatch.chdir(tmp_path)
    sample_config = yaml.safe_load(SAMPLE_CONFIG)
    model_endpoint, api_key, model_name = ENDPOINT.values()

    resolver = TaskConfigResolver.from_file("task_config.yaml")
    resolved = resolver.resolve(
        sample_config,
        runtime_model={
            "base_url": model_endpoint,
            "api_key": api_key,
            "model_name": model_name,
        },
    )

    assert resolved.name == "swe_bench"
    assert (resolved.sandbox.provider, resolved.sandbox.image) == ("modal", "swebench/sweb.eval.x86_64.example")
    assert [tool.name for tool in resolved.agent.tools] == ["stateful_shell", "str_replace_editor", "submit"]
    assert (resolved.agent.name, resolved.agent.max_steps) == ("react", 300)
    assert resolved.prompt == (PromptMessage("user", "Fix the issue in /testbed."),)
    assert resolved.metadata == {"instance_id": "example"}
    model = resolved.agent.model
    assert (model.temperature, model.top_p, model.max_total_tokens) == (0.8, 0.9, 65536)
    assert (model.base_url, model.api_key, model.model_name) == tuple(ENDPOINT.values())


def test_a_resolved_task_is_what_the_node_asks_for(tmp_path: Path) -> None:
    sample = yaml.safe_load(SAMPLE_CONFIG)
    resolved = resolver(TASK_CONFIG, tmp_path).resolve(sample, ENDPOINT)
    assert isinstance(resolved, ResolvedTask)
    assert resolved.sampling == SessionSampling(
        temperature=0.8, top_p=0.9, max_tokens=1024, max_total_tokens=65536, max_generations=300
    )
    assert resolved.as_json() == merge(yaml.safe_load(TASK_CONFIG)[0], sample)
    assert "secret" not in repr(resolved)


def test_toml_list_toml_single_yaml_single_and_yaml_table_are_the_same(tmp_path: Path) -> None:
    forms = {
        "list.toml": '[[tasks]]\nname = "quest"\n[tasks.agent]\nmax_steps = 4',
        "single.toml": 'name = "quest"\n[agent]\nmax_steps = 4',
        "single.yml": "name: quest\nagent: {max_steps: 4}",
        "table.yaml": "tasks:\n  - name: quest\n    agent: {max_steps: 4}",
    }
    resolved = [resolver(text, tmp_path, name).resolve({"name": "quest"}, ENDPOINT) for name, text in forms.items()]
    assert all(task == resolved[0] for task in resolved)
    assert resolved[0].agent.max_steps == 4


def test_one_file_routes_samples_by_name(tmp_path: Path) -> None:
    both = resolver("- {name: a, sandbox: {provider: local}}\n- {name: b, sandbox: {provider: modal}}", tmp_path)
    providers = [both.resolve({"name": name}, ENDPOINT).sandbox.provider for name in "ab"]
    assert providers == ["local", "modal"]


def test_lists_and_single_values_of_the_sample_replace(tmp_path: Path) -> None:
    sample = {"name": "swe_bench", "agent": {"tools": [{"name": "submit"}], "model": {"temperature": 0.5}}}
    resolved = resolver(TASK_CONFIG, tmp_path).resolve(sample, ENDPOINT)
    assert [tool.name for tool in resolved.agent.tools] == ["submit"]
    assert (resolved.agent.model.temperature, resolved.agent.model.top_p) == (0.5, 0.9)


def test_sections_of_parts_keep_their_own_keys(tmp_path: Path) -> None:
    text = "{name: t, sandbox: {provider: local, network: false}, agent: {tools: [{name: shell, timeout_s: 5}]}}"
    resolved = resolver(text, tmp_path).resolve({"name": "t", "sandbox": {"image": "x"}}, ENDPOINT)
    assert resolved.sandbox.as_json() == {"network": False, "image": "x"}
    assert resolved.agent.tools[0].options == {"timeout_s": 5}


def test_names_of_parts_are_not_looked_up_before_they_are_built(tmp_path: Path) -> None:
    text = "{name: no_such_task, sandbox: {provider: nowhere}, agent: {name: nobody, tools: [{name: nothing}]}}"
    resolved = resolver(text, tmp_path).resolve({"name": "no_such_task"}, ENDPOINT)
    with pytest.raises(UserError, match=r"no_such_task.*allowed: .*shell_quest"):
        resolved.build(providers=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("key", ["base_url", "api_key", "model_name"])
def test_the_endpoint_cannot_be_set_by_either_layer(tmp_path: Path, key: str) -> None:
    attempt = {"name": "swe_bench", "agent": {"model": {key: "mine"}}}
    with pytest.raises(UserError, match=rf"agent\.model\.{key} cannot be set"):
        resolver(TASK_CONFIG, tmp_path).resolve(attempt, ENDPOINT)
    with pytest.raises(UserError, match=rf"swe_bench.*agent\.model\.{key} cannot be set"):
        TaskConfigResolver([attempt])


def test_the_endpoint_given_by_the_caller_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="runtime_model"):
        resolver(TASK_CONFIG, tmp_path).resolve({"name": "swe_bench"}, {"base_url": "x"})


def test_a_sample_without_a_name_or_with_an_unknown_one_is_told_what_exists(tmp_path: Path) -> None:
    both = resolver("- name: alpha\n- name: beta", tmp_path)
    with pytest.raises(UserError, match=r"names no task.*alpha, beta"):
        both.resolve({"prompt": []}, ENDPOINT)
    with pytest.raises(UserError, match=r"no task 'alpa'.*did you mean 'alpha'\? allowed: alpha, beta"):
        both.resolve({"name": "alpa"}, ENDPOINT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- name: a\n- name: b\n- name: a", r"'a' is given twice; the tasks are: a, b"),
        ("- name: a\n- agent: {}", r"task 2 has no name"),
        ("[]", r"defines no task"),
        ("- name: a\n- 3", r"a list of tasks"),
        ("name: a\nname: b", r"'name' stands twice"),
        ("name: [", r"not valid YAML"),
        ("tasks: []\nextra: 1", r"'extra'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        resolver(text, tmp_path)
    assert "tasks.yaml" in str(error.value)


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart_tasks.toml").write_text("")
    with pytest.raises(UserError, match=r"did you mean 'quickstart_tasks.toml'"):
        TaskConfigResolver.from_file(tmp_path / "quickstart_task.toml")


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"promt": []}, r"unknown key 'promt': did you mean 'prompt'\?"),
        ({"merged": {}}, r"unknown key 'merged'"),
        ({"agent": {"max_step": 3}}, r"agent: unknown key 'max_step': did you mean 'max_steps'\?"),
        (
            {"agent": {"model": {"temprature": 1}}},
            r"agent\.model: unknown key 'temprature': did you mean 'temperature'",
        ),
        ({"agent": {"max_steps": "3"}}, r"agent\.max_steps: '3' is a text, expected a whole number"),
        ({"agent": {"max_steps": True}}, r"agent\.max_steps: True is true or false"),
        ({"agent": {"max_steps": 0}}, r"max_steps.*>= 1"),
        ({"agent": {"model": {"top_p": 1.5}}}, r"top_p.*<= 1"),
        ({"agent": {"tools": "shell"}}, r"agent\.tools: 'shell' is a text, expected a list"),
        ({"agent": {"tools": [{"name": "a"}, {}]}}, r"agent\.tools\[1\]\.name: is missing"),
        ({"agent": "react"}, r"agent: 'react' is a text, expected a table"),
        ({"sandbox": {"provider": 3}}, r"sandbox\.provider: 3 is a whole number, expected a text"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\]\.content: is missing"),
        ({"metadata": []}, r"metadata: \[\] is a list, expected a table"),
    ],
)
def test_bad_shapes_name_the_key_the_value_and_what_is_allowed(sample: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        TaskConfigResolver([{"name": "t"}]).resolve({"name": "t", **sample}, ENDPOINT)


def test_every_bad_key_of_a_sample_is_told_at_once() -> None:
    with pytest.raises(UserError) as error:
        TaskConfigResolver([{"name": "t"}]).resolve({"name": "t", "promt": [], "metadata": 3}, ENDPOINT)
    assert "promt" in str(error.value)
    assert "metadata" in str(error.value)


# ---------------------------------------------------------------- the merge

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


def paths(table: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Every leaf that is no table, and every empty table, by its path."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found |= {(key, *rest): leaf for rest, leaf in paths(value).items()}
        else:
            found[(key,)] = value
    return found


def at(table: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        table = table[key]
    return table


@given(base=tables, over=tables)
def test_the_upper_layer_wins_everywhere_and_the_lower_fills_the_rest(
    base: dict[str, Any], over: dict[str, Any]
) -> None:
    before = copy.deepcopy((base, over))
    both = merge(base, over)
    assert (base, over) == before
    for path, leaf in paths(over).items():
        if leaf != {}:
            assert at(both, path) == leaf
    for path, leaf in paths(base).items():
        if leaf != {} and not shadowed(over, path):
            assert at(both, path) == leaf


def shadowed(over: Any, path: tuple[str, ...]) -> bool:
    """Whether the upper layer says something on the way to a leaf of the lower one."""
    for key in path:
        if not isinstance(over, dict):
            return True
        if key not in over:
            return False
        over = over[key]
    return True


@given(table=tables, over=tables)
def test_merging_has_an_identity(table: dict[str, Any], over: dict[str, Any]) -> None:
    assert merge(table, {}) == table
    assert merge({}, table) == table
    assert merge(merge(table, over), over) == merge(table, over)
