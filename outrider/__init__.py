"""The Python API: batches of completions in this process, without Ray and gRPC.

    from outrider import LLM, SamplingParams

    with LLM("models/demo/target", draft="models/demo/draft") as llm:
        outputs = llm.generate(["import os", "def f(x):"], SamplingParams(max_tokens=40, temperature=0))

The sessions, the policies and the engines are those of the service, so the tokens are, too. To call a service that
runs, use the package `outrider_client`.
"""

from outrider.llm import LLM
from outrider.outputs import Output, RequestOutput
from outrider.params import SamplingParams

__all__ = ["LLM", "Output", "RequestOutput", "SamplingParams"]
