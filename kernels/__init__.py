"""Operations, one folder each: a plain torch reference with its shapes, and faster back ends tested against
it.
"""
