"""The tasks, by name."""

from __future__ import annotations

from ..schema import Task
from . import fewshot, infinitebench, longbench, needle, qa, questions, ruler, running_text

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *needle.TASKS,
        *ruler.TASKS,
        qa.TASK,
        *infinitebench.TASKS,
        *fewshot.TASKS,
        longbench.TASK,
        running_text.TASK,
        questions.TASK,
    )
}
