# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench serve``: what users of an LLM server see, with a pool and without.

The same requests go to several OpenAI-compatible servers, or to vLLM engines that are started for it, round by round
and in turn. `workload` says what is asked, `asking` asks one request, `rounds` a round of them, `contest` everything;
`figures` and `report` say what it came to. How to read it is in ``docs/bench.md``.
"""

__all__: list[str] = []
