"""Drives a scheduler by hand and checks nothing: for long runs of which one thing is looked at.

``tests.support.drive`` is what tests use otherwise.
"""

from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.commands import Command, Finish, Park, SetLevel, Unpark
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager


class LightDriver:
    """A scheduler, and a model that says the same token whoever asks. A step takes a second."""

    def __init__(self, *, num_blocks: int = 4096, block_size: int = 4, **config) -> None:
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(
            self.config, BlockManager(num_blocks, block_size, enable_prefix_cache=False)
        )
        self.now = 0.0

    def submit(self, name: str, num_tokens: int = 8, *, level=0, max_tokens=4, tenant="", family="") -> None:
        spec = RequestSpec(
            RequestId(name), (1,) * num_tokens, SamplingParams(max_tokens=max_tokens), level, tenant=tenant,
            family=family,
        )  # fmt: skip
        self.scheduler.submit(spec, self.now)

    def step(self) -> Plan:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        sampled = {grant.request_id: 1 for grant in plan.grants if grant.output_index is not None}
        self.scheduler.commit(plan, StepResult(sampled), self.now + 0.5)
        return plan

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run_until_ended(self, name: str) -> None:
        while self.is_alive(name):
            self.step()

    def run(self) -> None:
        while self.scheduler.has_requests:
            self.step()
        assert self.scheduler.blocks.num_owners == 0

    def is_alive(self, name: str) -> bool:
        return self.scheduler.find(RequestId(name)) is not None

    def apply(self, command: Command) -> None:
        self.scheduler.apply(command, self.now)

    def cancel(self, name: str) -> None:
        self.apply(Finish(RequestId(name)))

    def park(self, name: str) -> None:
        self.apply(Park(RequestId(name)))

    def unpark(self, name: str) -> None:
        self.apply(Unpark(RequestId(name)))

    def set_level(self, name: str, level: int) -> None:
        self.apply(SetLevel(RequestId(name), level))

    def running(self) -> list[str]:
        return [str(request.request_id) for request in self.scheduler.running()]

    def waiting(self) -> list[str]:
        return [str(request.request_id) for request in self.scheduler.waiting()]
