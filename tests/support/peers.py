"""What the tests of the peers' behaviours share: short views of a plan, and owners of blocks."""

import copy
from collections.abc import Iterable

from engine.scheduler.plan import Plan
from kv.block_manager import BlockManager


def grants(plan: Plan) -> dict[str, int]:
    """Tokens granted, by request, in the order of the plan."""
    return {str(grant.request_id): len(grant.token_ids) for grant in plan.grants}


def of(events, kind) -> list[str]:
    """Requests that an event of this kind happened to, in order."""
    return [str(event.request_id) for event in events if isinstance(event, kind)]


class Owner:
    """Somebody who may hold blocks."""

    def __init__(self, name: str, tokens: Iterable[int], salt: str = "") -> None:
        self.request_id = name
        self.token_ids = list(tokens)
        self.block_hashes: list[bytes] = []
        self.cache_salt = salt
        self.cache_rank = 0


def admit(manager: BlockManager, name: str, tokens: Iterable[int], salt: str = "") -> Owner:
    """Admit somebody and take all its tokens as computed."""
    owner = Owner(name, tokens, salt)
    assert manager.admit(owner, manager.match(owner))
    manager.confirm(owner, len(owner.token_ids))
    manager.check_integrity()
    return owner


def reuse_order(manager: BlockManager) -> list[int]:
    """Free blocks in the order in which they would be handed out; the manager stays as it is."""
    copied = copy.deepcopy(manager)
    size = copied.num_free_blocks * copied.block_size
    admit(copied, "takes all that is free", range(10**6, 10**6 + size))
    return list(copied.table("takes all that is free"))
