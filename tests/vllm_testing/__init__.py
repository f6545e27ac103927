# SPDX-License-Identifier: Apache-2.0
"""What the tests with a real vLLM engine share: tiny models, engines, and gates before the pool.

A test module that imports `vllm_testing.engines` is skipped, with the reason, where there is no vLLM.
"""
