"""Generated code of the Vorrang API."""
