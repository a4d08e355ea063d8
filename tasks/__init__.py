"""What should happen, and how success is measured: tasks, their configuration, data sets and verifiers."""

from uniagent.engine.ports import Failure, Task, TaskResult
from uniagent.tasks.config import TaskConfig, TaskConfigResolver, merge

__all__ = ["Failure", "Task", "TaskConfig", "TaskConfigResolver", "TaskResult", "merge"]
