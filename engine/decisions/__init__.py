"""The decision log as text: lines, files, replay."""
