"""What clients have extracted from a text. Every environment that imports this file has pydantic."""

from __future__ import annotations

import pydantic


class Person(pydantic.BaseModel):
    """What `report.PERSON` says of somebody."""

    name: str
    age: int
    city: str
