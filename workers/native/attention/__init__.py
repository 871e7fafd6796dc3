"""Attention in native code: rows over KV in its slots (`rows`), queries at a time (`tiles`), LLVM code (`reads`)."""
