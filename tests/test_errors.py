"""Errors that users can correct."""

import copy
import pickle

import pytest

from heedful.data.encoding import RowError
from heedful.data.tsv import ColumnOrderError
from heedful.errors import UserError
from heedful.pipelines.inputs import LengthError, NoMaskError


@pytest.mark.parametrize(
    "error",
    [
        LengthError("too long", 3, 2),
        LengthError("too long", 3, 2, hint=""),
        NoMaskError("text 1", "<mask>"),
        RowError(3, "no text"),
        ColumnOrderError("wrong order", {"text": 2}),
    ],
)
def test_errors_are_the_same_in_another_process(error: UserError) -> None:
    """Their arguments are not those of the class, with which pickle would call it."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert str(copy.copy(error)) == str(error)
