"""What can be decorated, what a decorated function is to Python, and what is refused."""

import copy
import functools
import inspect
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton

from dist_autotune import ContextualAutotuner, StepTuner, TuningError, contextual_autotune
from dist_autotune.tuner import calls
from dist_autotune.tuner.calls import Calls


def thunk() -> str:
    return "result"


@pytest.mark.parametrize(
    "decorate",
    [contextual_autotune, contextual_autotune(), lambda fn: contextual_autotune(fn, False, 2, 1)],
    ids=["bare", "called", "with the function"],
)
def test_the_decorator_works_bare_and_called(decorate):
    decorated = decorate(thunk)
    assert isinstance(decorated, ContextualAutotuner)
    assert decorated() == "result"


def test_threads_that_make_the_first_call_at_once_make_it_of_one_function(monkeypatch):
    def make(*args: object) -> Calls:
        together.wait(30)
        return Calls(*args)

    together, decorated = threading.Barrier(2), contextual_autotune(thunk)
    monkeypatch.setattr(calls, "Calls", make)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: decorated._made_calls(), range(2))
    assert one is other is decorated._calls


def test_what_functools_wraps_promises_holds():
    def documented(x: int, *, y: int = 2) -> int:
        """Say what it does."""
        return x + y

    decorated = contextual_autotune(documented)
    assert decorated.__wrapped__ is documented
    assert (decorated.__name__, decorated.__doc__) == ("documented", "Say what it does.")
    assert inspect.signature(decorated) == inspect.signature(documented)
    assert decorated(1, y=5) == 6
    assert decorated.report is not None
    assert contextual_autotune(functools.wraps(decorated)(lambda: None)).report is None


class Layer:
    scale = 3

    @contextual_autotune
    def method(self, x):
        return self.scale * x

    @classmethod
    @contextual_autotune
    def of_class(cls, x):
        return cls.scale * x

    @staticmethod
    @contextual_autotune
    def static(x):
        return 3 * x


DECORATED = {
    "method": Layer().method,
    "by its class": lambda x: Layer.method(Layer(), x),
    "classmethod": Layer.of_class,
    "classmethod of an instance": Layer().of_class,
    "staticmethod": Layer.static,
    "lambda": contextual_autotune(lambda x: 3 * x),
    "partial": contextual_autotune(functools.partial(lambda factor, x: factor * x, 3)),
}


@pytest.mark.parametrize("call", DECORATED.values(), ids=DECORATED)
def test_methods_lambdas_and_partials_can_be_decorated(call):
    assert call(2) == 6


async def coroutine() -> None: ...


async def async_generator():
    yield 1


class Asynchronous:
    async def __call__(self):
        pass


@contextual_autotune
def by_name(x):
    return 3 * x


def test_a_decorated_function_is_copied_and_pickled_as_functions_are():
    for held in (by_name, contextual_autotune(lambda x: x), Layer.method):
        assert copy.copy(held) is held
        assert copy.deepcopy({"step": held})["step"] is held
    assert pickle.loads(pickle.dumps(by_name)) is by_name
    assert pickle.loads(pickle.dumps(Layer.method)) is Layer.method
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(contextual_autotune(lambda x: x))


class Tuned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.step = contextual_autotune(self.add, preserve=[self.weight], cache=False)
        self.partial = contextual_autotune(functools.partial(Tuned.add, self), cache=False)

    def add(self, x):
        return x + self.weight.detach()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_s_tuned_methods_are_those_of_the_copy(copy_of):
    model = Tuned()
    assert torch.equal(model.step(torch.ones(2)), torch.ones(2))
    copied = copy_of(model)
    torch.nn.init.constant_(copied.weight, 5.0)
    assert torch.equal(copied.step(torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(copied.partial(torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(model.step(torch.ones(2)), torch.ones(2))
    assert copied.step.options.preserve[0] is copied.weight


def test_a_step_tuner_is_copied_and_pickled_without_what_is_under_way():
    tuner = StepTuner(log_dir=None, cache=False)
    with tuner.step():
        pass
    for copied in (copy.deepcopy(tuner), pickle.loads(pickle.dumps(tuner))):
        assert copied.report is None
        with copied.step():
            pass
        assert copied.report is not None


REFUSED = {
    "a number": (3, "decorates a function or method that launches kernels, not 3"),
    "generator": (lambda: (yield), "is a generator function"),
    "async def": (coroutine, "is asynchronous"),
    "async generator": (async_generator, "is asynchronous"),
    "partial of async": (functools.partial(coroutine), "is asynchronous"),
    "async object": (Asynchronous(), "is asynchronous"),
    "classmethod below": (classmethod(thunk), "put @classmethod above @contextual_autotune"),
    "staticmethod below": (staticmethod(thunk), "put @staticmethod above"),
    "class": (Asynchronous, "launches kernels, not <class"),
    "kernel": (triton.jit(thunk), "launches kernels, not"),
}


@pytest.mark.parametrize(("wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_tuned_is_refused_with_what_to_do(wrong, message):
    with pytest.raises(TuningError, match=message):
        contextual_autotune(wrong)


@pytest.mark.parametrize("value", [None, (), (1, "two"), 3.5], ids=["None", "()", "tuple", "float"])
def test_any_result_is_passed_through(value):
    assert contextual_autotune(lambda: value)() is value


def test_a_generator_is_passed_through_untouched():
    assert list(contextual_autotune(lambda: (n for n in (1, 2)))()) == [1, 2]
