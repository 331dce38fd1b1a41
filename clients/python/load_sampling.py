"""What the load generator looks at meanwhile: the server's load, and how late it is itself."""

import asyncio
import time

from clients.python.admin_client import ControlClient
from clients.python.errors import AccessDenied, Unimplemented, VorrangError
from workloads.records import Sample

_TICK_S = 0.05


async def watch_lag(lags_s: list[float]) -> None:
    """Note by how much the event loop is late, some twenty times a second, until cancelled."""
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags_s.append(max(0.0, time.monotonic() - due_s))


async def sample_load(
    control: ControlClient, interval_s: float, started_s: float, samples: list[Sample]
) -> None:
    """Note the server's load at an interval, until cancelled; ends where we are no operator.

    Args:
        control: whom to ask.
        interval_s: seconds between two looks.
        started_s: start of the run on ``time.monotonic``.
        samples: what they are added to; a look that fails is left out.
    """
    while True:
        try:
            load = await control.load()
        except (AccessDenied, Unimplemented):
            return
        except VorrangError:
            pass  # it may come back
        else:
            samples.append(
                Sample(
                    time_s=time.monotonic() - started_s,
                    num_running=sum(c.num_running for c in load.classes),
                    num_waiting=sum(c.num_queued for c in load.classes),
                    kv_use=load.kv_use,
                    num_preemptions=load.num_preemptions,
                    waiting_by_class={c.class_name: c.num_queued for c in load.classes},
                )
            )
        await asyncio.sleep(interval_s)
