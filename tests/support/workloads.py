"""Workload files for tests."""


def two_classes(
    process: str, duration_s: int, *, interactive: tuple[float, int, int], batch: tuple[float, int, int]
) -> str:
    """A workload named ``small``; of each class requests a second, prompt tokens and output tokens."""
    return f'name = "small"\nduration_s = {duration_s}\n' + "".join(
        f"""
[[stream]]
class = "{name}"
arrivals = {{ process = "{process}", rate_rps = {rate_rps} }}
prompt_tokens = {num_prompt_tokens}
output_tokens = {num_output_tokens}
"""
        for name, (rate_rps, num_prompt_tokens, num_output_tokens) in (
            ("interactive", interactive),
            ("batch", batch),
        )
    )
