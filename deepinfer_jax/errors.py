"""What DeepInfer says when it refuses: every refusal carries what happened, why, and what to do."""


class DeepInferError(Exception):
    """A refusal in three sentences: what happened (with the numbers), why, and what to do."""

    def __init__(self, what: str, why: str, do: str):
        self.what, self.why, self.do = what, why, do
        super().__init__(f"{what} {why} {do}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.do)

    def as_text(self) -> str:
        """The refusal as it is printed: its kind and three sentences, on three lines."""
        return f"{type(self).__name__}: {self.what}\n  {self.why}\n  {self.do}"

    def as_json(self) -> dict[str, str]:
        """Its kind and three sentences as plain JSON values."""
        return {"kind": type(self).__name__, "what": self.what, "why": self.why, "do": self.do}


class ConfigError(DeepInferError):
    """A configuration value, key or combination that cannot be used."""


class EnvError(DeepInferError):
    """An environment variable with an unknown name or an illegal value."""


class MemoryPlanError(DeepInferError):
    """A plan that needs more memory than there is."""


class NoKernelError(DeepInferError):
    """No kernel of an op fits the device and the promises asked for."""


class LateCompileError(DeepInferError):
    """A program that is needed after warm-up and was not compiled in it."""


class CheckpointError(DeepInferError):
    """A checkpoint or tokenizer file that is missing, damaged or does not match the config."""


class RequestError(DeepInferError, ValueError):
    """A request that can never run; the others of its batch are not affected."""
