"""SWE-style repair, offline: bugs planted in Python projects by AST mutation, judged by the projects' own tests."""
