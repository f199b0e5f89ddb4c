"""Reference JAX/XLA implementation of DeepInfer for DeepSeek-V4.1."""
