"""What a draft grants, written out for whoever computes it."""

from engine.scheduler.draft import StepDraft
from engine.scheduler.plan import Grant

_new_tuple = tuple.__new__  # a named tuple's own constructor takes twice the time


def decode_grants(draft: StepDraft) -> list[Grant]:
    """A token for each decode, and what was guessed behind it."""
    grants: list[Grant] = []
    now, num_tokens = draft.now, 1
    for request in draft.decodes:
        request.idle_since = now
        start = request.num_computed_tokens
        output_index = start + 1 - request.num_prompt_tokens
        if draft.num_drafts:
            num_tokens = 1 + len(request.draft_token_ids)
        grants.append(_new_tuple(Grant, (request, start, num_tokens, request.block_table, output_index)))
    return grants


def other_grants(draft: StepDraft) -> list[Grant]:
    """Prompts, whole or in chunks, and what is computed again."""
    grants: list[Grant] = []
    for request, num_tokens in draft.granted.items():
        request.idle_since = draft.now
        start = request.num_computed_tokens
        end, num_known = start + num_tokens, request.num_tokens
        index = end - request.num_prompt_tokens if end == num_known else None
        grants.append(_new_tuple(Grant, (request, start, num_tokens, request.block_table, index)))
    return grants
