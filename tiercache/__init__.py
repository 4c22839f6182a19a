"""tiercache: a KV cache offloading service for LLM serving."""
