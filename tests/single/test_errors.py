"""The exception tree and the form of its messages."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from tfdistkit import errors

TREE = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.TfdistkitError)]


@pytest.mark.parametrize("kind", TREE)
def test_the_docstring_lists_each_error_with_its_built_in(kind: type[Exception]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line)
    for built_in in (ValueError, ImportError, RuntimeError, TimeoutError):
        assert issubclass(kind, built_in) == (f"({built_in.__name__})" in line)


@pytest.mark.parametrize("kind", TREE)
def test_errors_can_be_pickled(kind: type[Exception]) -> None:
    for copied in (pickle.loads(pickle.dumps(kind("what"))), copy.copy(kind("what"))):
        assert type(copied) is kind
        assert str(copied) == "what"


def test_the_failure_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(errors.WorkerFailedError("what", failure={"rank": 1})))
    assert error.failure == {"rank": 1}


def test_explain() -> None:
    message = errors.explain("`a` is wrong.", received="a=1", expected="a number above 1", do="Raise it.")
    assert message == "`a` is wrong. Received: a=1. Expected: a number above 1.\nRaise it."
    assert errors.explain("`a` is wrong.") == "`a` is wrong."


def test_nearest() -> None:
    assert errors.nearest("mirored", ["mirrored", "multiworker"]) == " Did you mean 'mirrored'?"
    assert errors.nearest("xyz", ["mirrored"]) == ""
