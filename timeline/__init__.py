"""Runs and requests as people see them: what happened when, as a trace, a picture, or sentences."""
