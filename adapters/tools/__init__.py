"""Model-visible actions, and the toolbox that binds them to one session's sandbox."""
