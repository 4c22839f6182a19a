"""Tests of the connectors' logic need no vLLM. Those marked `vllm` do: see `make test-vllm`."""

from __future__ import annotations

import vllm_stand_in

vllm_stand_in.import_connectors()
collect_ignore = [] if vllm_stand_in.INSTALLED else ["test_compat.py", "engines"]
