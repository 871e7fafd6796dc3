"""The Python API: generate batches of completions in this process, without Ray or gRPC.

    from outrider import LLM, SamplingParams

    with LLM("models/demo/target", draft="models/demo/draft") as llm:
        outputs = llm.generate(["import os", "def f(x):"], SamplingParams(max_tokens=40, temperature=0))

Sessions, policies and engines are the same as in the service, and so are the tokens. To call a running service, use
the package `outrider_client`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.installation import check_packages

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.outputs import Output, RequestOutput
    from outrider.params import SamplingParams

__all__ = ["LLM", "Output", "RequestOutput", "SamplingParams"]

_MODULES = {"LLM": "llm", "Output": "outputs", "RequestOutput": "outputs", "SamplingParams": "params"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, after checking the installed packages. Raises: ImportError."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_packages()
    return getattr(import_module(f"outrider.{_MODULES[name]}"), name)
