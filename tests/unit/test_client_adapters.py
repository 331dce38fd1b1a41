"""Adapters, from the Python client to a scripted server."""

import pytest

from clients.python import UnknownModel, VorrangClient
from clients.python.request import encode_spec
from engine.runner.scripted import expected_output
from tests.support.server import running_server

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


async def test_a_request_names_its_adapter() -> None:
    assert encode_spec("x", {"adapter": "a"}).adapter == "a"
    assert encode_spec("x", {}).adapter == ""


async def test_a_client_sees_the_adapters_and_gets_the_one_it_asks_for() -> None:
    ids = list(b"hello")
    settings = {"model.adapters": {"a": "", "b": ""}}
    async with running_server(settings) as app, VorrangClient(app.address) as client:
        assert (await client.get_model()).adapters == ("a", "b")
        for adapter in ("", "a", "b"):
            result = await client.generate("hello", temperature=0, max_tokens=6, adapter=adapter)
            assert list(result.token_ids) == expected_output(ids, 6, adapter=adapter)
        outputs = await client.generate("hello", temperature=1, max_tokens=6, adapter="a", n=2)
        assert outputs.usage.output_tokens == 12
        with pytest.raises(UnknownModel, match="adapter 'c' is not served, only 'a', 'b'"):
            await client.generate("hello", max_tokens=1, adapter="c")


async def test_without_adapters_there_are_none() -> None:
    async with running_server() as app, VorrangClient(app.address) as client:
        assert (await client.get_model()).adapters == ()
        with pytest.raises(UnknownModel, match="none at all"):
            await client.generate("hello", max_tokens=1, adapter="c")
