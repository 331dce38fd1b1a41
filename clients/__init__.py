"""Clients of Vorrang. They know the wire alone."""
