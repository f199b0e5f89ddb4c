"""What an engine has done so far, in counts and seconds."""

from dataclasses import dataclass


@dataclass
class Meter:
    """What the engine has done, for tables and figures.

    Attributes:
        prompt_tokens, output_tokens: counts; a prompt that is run again counts again.
        steps: launched.
        prefill_s, decode_s: seconds of steps with and without prompt rows, from one collection to
            the next; compiling is not part of them.
        wait_s, decode_wait_s: of those, seconds in which the host waited for the device.
        compile_s: seconds spent compiling.
        preempted: sequences that gave up their pages.
        cached_tokens: prompt tokens that were not run, because an earlier sequence had.
        skipped_rows: prompt rows that the decoder's layers left out (bounded replay).
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    decode_wait_s: float = 0.0
    compile_s: float = 0.0
    preempted: int = 0
    cached_tokens: int = 0
    skipped_rows: int = 0
