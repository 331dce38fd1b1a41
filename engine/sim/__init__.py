"""The simulator: the real loop and scheduler in virtual time, over a model of what a step costs."""
