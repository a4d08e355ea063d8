"""Who decides how to solve a task: white-box loops and external harnesses."""
