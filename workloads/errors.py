"""How a workload, or a wish about one, is refused."""


class InvalidWorkload(Exception):
    """A workload, a record, or a wish about one breaks a rule.

    Args:
        field: path of the field as its author wrote it, such as ``classes[0].rate_rps``.
        rule: what it must be, such as ``must be at least 0``.
        value: what it was; shortened in the message.
    """

    def __init__(self, field: str, rule: str, value: object) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} {rule}, got {shown}")
        self.field = field
        self.rule = rule
        self.value = value

    def __reduce__(self) -> tuple[type["InvalidWorkload"], tuple[str, str, object]]:
        """So that it may be raised in another process."""
        return type(self), (self.field, self.rule, self.value)
