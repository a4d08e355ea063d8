"""The task ``llm_judge``: another model reads what the agent did and scores it by a rubric."""
