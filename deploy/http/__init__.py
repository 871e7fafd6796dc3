"""The HTTP API, for clients of OpenAI and Anthropic: translation of bodies, and the layer in Serve's proxy."""

from deploy.http.proxy import HttpProxy
from deploy.http.servicer import HttpServicer
from deploy.http.wire import Call, Head

__all__ = ["Call", "Head", "HttpProxy", "HttpServicer"]
