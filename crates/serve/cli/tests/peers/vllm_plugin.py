"""A plugin of pytest for the tests of vLLM's server, in an environment without vLLM.

What tests import of vLLM, and of packages that they need only for its models, is replaced by objects
that can be called and have any attribute. Tests that do not start a server are left out, because
they test vLLM's own code.
"""

import importlib.abc
import importlib.machinery
import inspect
import sys
import types

REPLACED = {
    "fastapi", "gpt_oss", "huggingface_hub", "lm_eval", "openai_harmony", "psutil", "rapidfuzz",
    "soundfile", "starlette", "torch", "torchvision", "transformers", "vllm",
}


class Anything:
    """An object that can be called and has any attribute. It is false, as a platform's property."""

    def __init__(self, name="anything"):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *arguments, **names):
        return Anything()

    def __repr__(self):
        return "anything"  # The ids of tests may contain it.

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return object

    __ror__ = __or__

    def __getitem__(self, key):
        return Anything()


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith(("Error", "Exception")):
            return type(name, (Exception,), {})
        return Anything(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REPLACED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore")


def starts_server(function):
    try:
        return "RemoteOpenAIServer(" in inspect.getsource(function)
    except (OSError, TypeError):
        return False


def pytest_collection_modifyitems(config, items):
    kept, left_out = [], []
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        functions = [item.function, *(one.func for defined in fixtures for one in defined)]
        (kept if any(map(starts_server, functions)) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
