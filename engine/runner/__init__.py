"""Runners compute what a plan grants and decide nothing."""
