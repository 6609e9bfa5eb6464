"""Do launch lines pass the real SGLang's parser? See argument_check.py for how to ask and what is answered.

    .venv-vllm/bin/python tests/engines_real/check_sglang_args.py --model-path MODEL_DIR --tp-size 2 ...

SGLang's import chain wants GPU libraries that have no CPU build; each such module that is not installed is replaced by
a stand-in that gives more stand-ins, so that only SGLang's own code and light packages are needed. That is enough for
its parser; nothing of it could serve a model.
"""

import argparse
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import argument_check

GPU_ONLY = frozenset(
    (
        "triton",
        "sgl_kernel",
        "flashinfer",
        "torch_memory_saver",
        "deep_gemm",
        "tilelang",
        "cutlass",
        "quack",
        "sgl_deep_gemm",
        "flash_attn",
        "nvshmem",
        "cuda",
        "pynvml",
        "decord",
        "torchcodec",
        "torchvision",
        "torchaudio",
        "IPython",
    )
)


class StandIn:
    """Callable, indexable, usable as a base class, a type in an annotation, or a decorator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        as_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if as_decorator else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __getitem__(self, key: Any) -> Any:
        return StandIn()

    def __or__(self, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class StandInModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - read by the import system: it makes the module a package
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = StandIn()
        setattr(self, name, value)
        return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] not in GPU_ONLY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def load() -> argument_check.Engine:
    warnings.filterwarnings("ignore")
    import torch  # noqa: F401 - before the finder, because torch asks for triton and adapts when there is none

    sys.meta_path.append(StandInFinder())  # last, so that whatever is really installed wins
    import sglang
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    return argument_check.Engine(parser, ServerArgs.from_cli_args, sglang.__version__)


if __name__ == "__main__":
    sys.exit(argument_check.main(load))
