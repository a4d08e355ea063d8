"""File jobs in a small directory, judged by the directory's final state: the quickstart's task and tiny model."""
