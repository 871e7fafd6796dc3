"""The public API by HTTP, as OpenAI's clients speak it: a translation, and what happens in the proxy."""

from deploy.http.proxy import HttpProxy
from deploy.http.servicer import HttpServicer
from deploy.http.wire import Call, Head

__all__ = ["Call", "Head", "HttpProxy", "HttpServicer"]
