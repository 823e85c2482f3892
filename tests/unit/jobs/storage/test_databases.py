"""The databases that tests are given are real, empty and their own."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, inspect, text


@pytest.mark.parametrize("_turn", [1, 2])
def test_each_test_has_an_empty_database_of_its_own(database_url: str, _turn: int) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        assert inspect(connection).get_table_names() == []
        connection.execute(text("CREATE TABLE left_behind (id INTEGER)"))
    assert inspect(engine).get_table_names() == ["left_behind"]
    engine.dispose()
