"""Reference JAX/XLA implementation of DeepInfer for DeepSeek-V4.1.

`LLM`, `SamplingParams` and the results are loaded on first use, so that importing the package, or
asking a command for its help, does not wait for JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM as LLM
    from deepinfer_jax.request import RequestOutput as RequestOutput
    from deepinfer_jax.request import Score as Score
    from deepinfer_jax.sampling_params import SamplingParams as SamplingParams
    from deepinfer_jax.settings import EngineConfig as EngineConfig

_HOMES = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "RequestOutput": "request",
    "Score": "request",
    "EngineConfig": "settings",
}
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "Score"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deepinfer_jax' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"deepinfer_jax.{_HOMES[name]}"), name)
