"""SWE-style repair, offline: bugs planted in real Python projects by AST mutation, judged by the projects' own tests."""
