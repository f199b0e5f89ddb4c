"""What DeepInfer says when it refuses: every refusal carries what happened, why, and what to do."""


class DeepInferError(Exception):
    """A refusal in three sentences: what happened (with the numbers), why, and what to do."""

    def __init__(self, what: str, why: str, do: str):
        self.what, self.why, self.do = what, why, do
        super().__init__(f"{what} {why} {do}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.do)


class ConfigError(DeepInferError):
    """A configuration value, key or combination that cannot be used."""


class EnvError(DeepInferError):
    """An environment variable with an unknown name or an illegal value."""


class ShardingError(DeepInferError):
    """An array that cannot be laid out on the mesh as asked."""


class MemoryPlanError(DeepInferError):
    """A plan that needs more memory than there is."""


class NoKernelError(DeepInferError):
    """No kernel of an op fits the device and the promises asked for."""


class CheckpointError(DeepInferError):
    """A checkpoint or tokenizer file that is missing, damaged or does not match the config."""


class RequestError(DeepInferError, ValueError):
    """A request that can never run; the others of its batch are not affected."""


class GrammarError(DeepInferError):
    """A grammar or schema that cannot be compiled or enforced."""
