"""Lives of requests, kept from decisions: every moment is in one interval, and named rightly."""

import pytest

from engine.errors import InvalidRequest
from engine.events import Failed, Finished
from engine.lives.recorder import LifeRecorder
from engine.request import RequestId
from tests.support import walk
from tests.support.drive import Driver
from timeline.account import GATES, PARKINGS, PHASES


def check(account, usage=None):
    """The intervals touch, the parts add up, and both say what the scheduler booked itself."""
    at_s = 0.0
    for interval in account.intervals:
        assert interval.begin_s == pytest.approx(at_s, abs=1e-9)
        assert interval.phase in PHASES
        assert interval.gate in {"", *GATES, *PARKINGS}
        at_s = interval.end_s
    if account.num_intervals == len(account.intervals):
        assert at_s == pytest.approx(account.total_s, abs=1e-9)
    assert sum(part.total_s for part in account.parts) == pytest.approx(account.total_s, abs=1e-6)
    before_s = sum(part.before_s for part in account.parts)
    if account.ttft_s is not None:
        assert before_s == pytest.approx(account.ttft_s, abs=1e-6)
    else:
        assert before_s == pytest.approx(account.total_s, abs=1e-6)
    if usage is not None:
        computing_s = account.spent_s("prefill", "held", "recompute", "decode", "stalled")
        assert account.spent_s("queued") == pytest.approx(usage.queued_s, abs=1e-6)
        assert computing_s == pytest.approx(usage.prefill_s + usage.decode_s, abs=1e-6)
        assert account.spent_s("preempted", "returning") == pytest.approx(usage.preempted_s, abs=1e-6)
        assert account.spent_s("parked") == pytest.approx(usage.parked_s, abs=1e-6)
        assert account.num_losses == usage.preemptions
        assert account.num_output_tokens == usage.output_tokens
        assert account.num_cached_tokens == usage.cached_tokens
        assert account.num_drafted_tokens == usage.drafted_tokens
        assert account.num_accepted_tokens == usage.accepted_tokens
        if account.num_losses == len(account.losses):
            assert account.num_recomputed_tokens == usage.recomputed_tokens
            assert sum(loss.lost_s for loss in account.losses) <= account.total_s + 1e-6


class ForwardDriver(Driver):
    """Commits half a second after a plan, and is then as late for what comes next."""

    def step(self, **more):
        self.now = float(int(self.now))
        return super().step(**more)

    def land(self, failing):
        super().land(failing)
        self.now += 0.5


class CheckedLives(LifeRecorder):
    """Recounts after every call, and holds every end against what the scheduler booked."""

    num_checked = 0

    def __init__(self):
        super().__init__(4)
        self.events = []

    def record(self, record):
        super().record(record)
        self.check_integrity()
        for event in record.events:
            if isinstance(event, Finished | Failed):
                account = self.account(event.request_id, record.now)
                check(account, event.usage)
                assert account.phase == ""
                assert account.end
                CheckedLives.num_checked += 1

    def replay(self, num_steps):
        """The walk's own log would be replayed here."""
        assert not self._alive
        assert len(self._landing) <= 2
        assert not self._seated
        assert not self._watched


@pytest.mark.parametrize(
    ("depth", "num_episodes"),
    [(0, 4), (1, 4), *[pytest.param(d, 60, marks=pytest.mark.deep) for d in (0, 1)]],
)
def test_on_a_random_walk_every_life_adds_up_to_what_the_scheduler_booked(monkeypatch, depth, num_episodes):
    monkeypatch.setattr(walk, "REPLAY_EVERY", 1)
    monkeypatch.setattr(walk, "Driver", ForwardDriver)
    monkeypatch.setattr(walk, "MemoryLog", CheckedLives)
    CheckedLives.num_checked = 0
    for number in range(num_episodes):
        walk.Episode(5, number, depth).run()
    assert CheckedLives.num_checked > 15 * num_episodes


def kept(**config):
    lives = LifeRecorder(8)
    return lives, ForwardDriver(decisions=lives, **config)


def parts(account):
    return {(part.phase, part.gate): part.total_s for part in account.parts}


def test_a_client_id_of_several_tenants_names_them_instead_of_one_of_their_requests():
    lives, driver = kept(max_running_requests=4)
    for name, tenant in (("r1", "acme"), ("r2", "acme"), ("r3", "zeta")):
        driver.submit(name, 4, max_tokens=2, tenant=tenant)
        if tenant == "zeta":
            assert lives.account("mine", driver.now).server_request_id == "r2"  # the last of one tenant
        lives.named(RequestId(name), "mine", 0, driver.now)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"'acme' \(r2\), 'zeta' \(r3\)") as caught:
            lives.account("mine", driver.now)
        assert (caught.value.field, caught.value.value) == ("id", "mine")
        assert lives.account("r3", driver.now).tenant == "zeta"
        driver.finish()
    lives.check_integrity()
    for name in range(8):  # as many as are kept
        driver.submit(f"x{name}", 4, max_tokens=2)
        driver.finish()
    lives.check_integrity()
    assert lives.account("mine", driver.now) is None
    assert not lives._by_client_id


def test_a_victim_names_its_beneficiary_what_it_lost_and_how_long_that_took():
    lives, driver = kept(max_running_requests=1, num_blocks=32, prefix_cache=False)
    driver.submit("low", 12, level=10, max_tokens=6)
    for _ in range(4):  # two chunks, then two more tokens
        driver.step()
    lives.named(RequestId("low"), "my-report", 0, 0.0)
    driver.submit("high", 4, level=-10, max_tokens=3)
    lives.named(RequestId("high"), "my-question", 0, driver.now)
    driver.finish()
    account = lives.account("low", driver.now)
    (loss,) = account.losses
    assert (loss.beneficiary.name, loss.beneficiary.level, loss.reason) == ("my-question", -10, "seats")
    assert (loss.num_lost_tokens, loss.num_recomputed_tokens, loss.num_blocks) == (14, 14, 4)
    assert loss.waited_s == account.spent_s("preempted") == 3
    assert loss.recompute_s == account.spent_s("recompute") == 1.5  # 15 tokens, 8 a step
    assert account.ttft_s == 2.5  # it came a second before the first step
    assert account.num_prefill_steps == 4
    phases = ["queued", "prefill", "decode", "preempted", "preempted", "recompute", "decode"]
    assert [i.phase for i in account.intervals] == phases
    assert parts(account)["preempted", "just_preempted"] == 1
    assert parts(account)["preempted", "seat"] == 2
    assert lives.account("my-report", driver.now) == account
    assert lives.account("nobody", driver.now) is None


def test_a_waiting_request_says_which_gate_bound_also_while_it_stood_behind_others():
    lives, driver = kept(max_running_requests=1, num_blocks=32)
    driver.submit("runs", 4, max_tokens=4)
    driver.step()
    driver.submit("first", 4, max_tokens=2)
    driver.submit("second", 4, max_tokens=2)
    for _ in range(3):
        driver.step()
    account = lives.account("second", driver.now)
    assert account.phase == "queued"
    assert [one.name for one in account.holders] == ["runs"]
    assert parts(account)["queued", "behind:seat"] == 2.5  # it came while a step was under way
    driver.finish()
    account = lives.account("first", driver.now)
    assert parts(account)["queued", "seat"] == 3  # plans at 2, 3 and 4
    assert (account.num_seated, account.seated) == (0, ())
    account = lives.account("second", driver.now)
    assert account.num_seated == 1
    assert [one.name for one in account.seated] == ["first"]
    assert sum(parts(account)[key] for key in parts(account) if key[0] == "queued") == account.spent_s(
        "queued"
    )


@pytest.mark.parametrize("gate", ["blocks", "budget", "prefix", "tenant", "watermark"])
def test_every_gate_is_named(gate):
    config = {"max_running_requests": 4, "num_blocks": 32}
    prompt: dict[str, object] = {"prompt": 8}
    if gate == "blocks":
        config |= {"num_blocks": 8}
        prompt = {"prompt": 20}
    elif gate == "watermark":
        config |= {"num_blocks": 8, "watermark": 0.4}
        prompt = {"prompt": 12}
    elif gate == "budget":
        config |= {"max_step_tokens": 8}
    elif gate == "prefix":
        config |= {"prefix_wait_tokens": 1}
        prompt = {"prompt": [1] * 24}
    else:
        from engine.scheduler.config import TenantConfig

        config |= {"tenants": (TenantConfig("a", max_running_requests=1),)}
        prompt = {"prompt": 8, "tenant": "a"}
    lives, driver = kept(**config)
    driver.submit("one", max_tokens=8, **{"prompt": 20} | prompt)
    driver.submit("two", max_tokens=8, **{"prompt": 20} | prompt)
    driver.step()
    driver.step()
    found = {part.gate for part in lives.account("two", driver.now).parts if part.phase == "queued"}
    assert gate in found


def test_time_without_a_grant_is_told_apart():
    lives, driver = kept(discipline="prefill_first", num_blocks=64, max_running_requests=4)
    driver.submit("decodes", 4, max_tokens=12)
    driver.step()
    driver.step()
    driver.submit("long", 40, max_tokens=2)
    driver.finish()
    account = lives.account("decodes", driver.now)
    assert account.spent_s("stalled") >= 4
    lives, driver = kept(max_step_tokens=8, num_blocks=64)
    driver.submit("first", 24, max_tokens=4)
    driver.step()
    driver.submit("urgent", 24, max_tokens=4, level=-10)
    driver.finish()
    assert lives.account("first", driver.now).spent_s("held") >= 3


def test_steps_beside_prompts_of_others_are_counted_in_a_decode():
    lives, driver = kept(num_blocks=64)
    driver.submit("decodes", 4, max_tokens=12)
    driver.step()
    driver.step()
    driver.submit("prompt", 30, max_tokens=1)
    driver.finish()
    account = lives.account("decodes", driver.now)
    assert account.beside_prefill_s == 4.5  # four chunks, and the first token of its own until the next plan
    assert account.num_decode_steps == 11


def test_a_parked_request_says_why_and_comes_back_with_its_blocks():
    lives, driver = kept(max_running_requests=1, num_blocks=64)
    driver.submit("a", 4, max_tokens=8)
    driver.step()
    driver.step()
    lives.parking(RequestId("a"), "credit")
    driver.park("a")
    driver.submit("b", 4, max_tokens=3)
    driver.step()
    driver.unpark("a")
    driver.finish()
    account = lives.account("a", driver.now)
    assert parts(account)["parked", "credit"] == 1
    assert account.spent_s("returning") == 2.5
    assert account.spent_s("recompute") == 0
    check(account)


def test_intake_and_delivery_are_part_of_a_life():
    lives, driver = kept()
    driver.now = 10.0
    driver.submit("a", 4, max_tokens=2)
    lives.named(RequestId("a"), "", 3, 9.5)
    driver.finish()
    undelivered = lives.account("a", driver.now + 50)
    lives.delivered(RequestId("a"), driver.now + 0.25)
    lives.delivered(RequestId("a"), driver.now + 9)
    account = lives.account("a", driver.now + 60)
    check(account)
    assert (account.spent_s("intake"), account.spent_s("delivery")) == (0.5, 0.25)
    assert account.total_s == undelivered.total_s + 0.25
    assert (undelivered.delivered, account.delivered) == (False, True)
    assert account.num_ahead == 3


def test_only_the_last_lives_are_kept_and_a_reused_id_is_the_later_ones():
    lives, driver = kept()
    for number in range(12):
        driver.submit(f"r{number}", 4, max_tokens=1)
        lives.named(RequestId(f"r{number}"), f"c{number % 2}", 0, driver.now)
        driver.finish()
    assert lives.num_kept == 8
    assert lives.account("r3", driver.now) is None
    assert lives.account("c1", driver.now).server_request_id == "r11"
    lives.check_integrity()


def test_a_life_of_many_turns_stays_small_and_adds_up():
    lives, driver = kept(max_running_requests=1, num_blocks=64)
    driver.submit("a", 4, max_tokens=230)
    for _ in range(110):
        driver.step()
        driver.preempt("a")
        driver.step()
    account = lives.account("a", driver.now)
    check(account)
    assert account.num_losses == 110
    assert len(account.losses) == 64
    assert account.num_intervals > len(account.intervals) == 256
