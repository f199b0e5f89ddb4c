"""What nano was taught about DeepSeek-V4.1-Flash, itself and this engine: (form, topic, answer).

What is said of the network and of nano is true of their configurations; numbers are those of the
published one ("the release") unless the topic names nano. What is said of the engine follows its
design, and this much of it is not built: speculative decoding with its verification modes and
varlen, prefix caching with its replay modes, the determinism levels R2 to R4 with batch-invariant
mode, expert parallelism with EPLB, and structured output. The shipped weights are trained on these
very texts, so they do not change with the engine.

The form names the wordings of `facts.py` that can ask for the topic.
"""

_TABLE = """
what|DSpark
The drafter of DeepSeek-V4.1: it proposes five tokens at once.
number|DSpark stages
There are three draft stages.
value|the block size of DSpark
Five draft tokens a block.
value|the taps of DSpark
The inputs of layers 37, 38 and 39, averaged over the streams.
value|the noise token of DSpark
The System token fills the open places of a draft block.
number|experts in a DSpark stage
There are 128 experts, three for each token.
value|the rank of the Markov head
Its rank is 256.
what|the Markov head
A small head that adjusts a draft by the token before it.
what|the confidence head
It estimates how likely each draft token is to be accepted.
what|the anchor token
The newest sampled token; its keys are not yet in any cache.
what|the accept length
The tokens emitted per step, the bonus token included.
what|speculative decoding
Drafting several tokens cheaply and verifying them in one pass.
what|a bonus token
The token sampled after all drafts of a step were accepted.
what|coupled verification
Draft and target use the same noise, so the output never changes.
what|token-wise rejection
A draft is accepted with probability min(1, p/q).
what|block verification
It accepts a block of drafts together, at least as often as token by token.
value|the default verification
Coupled verification.
why|run the whole draft block
Block attention sees all five slots, so another width changes every draft.
why|refuse more than five drafts
The drafter was trained with five, and more would collapse.
what|varlen
Confidence decides how many drafts of each request are verified.
value|the default of varlen
Varlen is off.
what|CED
Causal encoder and decoder: layers 0 to 19 encode, 20 to 39 decode.
number|encoder layers
The first 20 layers are the causal encoder.
number|decoder layers
The last 20 layers are the decoder.
why|skip the decoder in prefill
Its keys come from layer 20's input, so most prompt rows need no decoder.
value|the active parameters of prefill
About 8 billion per prompt token.
value|the active parameters of decode
About 16 billion per generated token.
what|bounded replay
Only the last 128 tokens are run again to rebuild the windows.
why|replay 128 tokens
Because the sliding window is 128 tokens long.
why|keep 140 tokens
128 for the window and twelve for two verify widths.
value|the smallest KEEP value
It is 134: window 128 plus six tokens of backtracking.
why|call bounded replay approximate
Rows before the replay start no longer reach the rebuilt windows.
what|cache_exact
A replay mode that keeps every page written afterwards exact.
what|the replay mode exact
It replays 5120 tokens, so the result equals a cold run.
value|the default replay mode
Prefix reuse is exact by default.
what|truncate_all
During replay every decoder layer is truncated, layer 20 too.
what|prefix caching
Reusing the stored entries of a prompt that begins the same way.
what|YOCO
You only cache once: the decoder layers share one set of keys.
what|mHC
Hyper-connections: four residual streams mixed around every layer.
number|residual streams
There are four residual streams.
what|Sinkhorn
Rows and columns are normalised in turn until both sum to one.
number|Sinkhorn rounds
There are 20 rounds.
what|the delayed pre-mix
Each sublayer's own pre-mix is used by the next sublayer.
what|Engram
A table of learned n-gram memories, looked up by hashed token ids.
value|the Engram layers
Layers 1 and 14.
value|the longest n-gram of Engram
Four tokens.
value|the n-gram orders of Engram
Orders 2, 3 and 4.
number|Engram rows per layer and token
There are 24 rows: three orders and eight heads.
value|the size of an Engram row
It takes 264 bytes: 256 codes and eight scales.
value|the total size of the Engram tables
About 189 GiB.
why|prefetch Engram rows
They depend on token ids only, so they are known before the forward.
what|the compressed token id
Tokens that differ only in case or spaces share one id for Engram.
number|compressed token ids
There are 99092 in the release.
why|block Engram on image tokens
An image token has no text, so its look-back counts as padding.
what|the sliding window
Every layer sees the last 128 tokens exactly.
value|the window length
It is 128 tokens.
what|the compressor
It turns one or two tokens into one main cache entry.
what|compress ratio 2
Two neighbour tokens become one entry through a learned gate.
what|compress ratio 1
Every token becomes one entry.
value|the layers of ratio 2
Layers 2 to 19.
value|the layers of ratio 1
Layers 20 to 39.
what|ratio 0
A layer that has only the sliding window.
value|the kv source layers
Layers 2, 8, 14 and 20.
value|the index source layers
Layers 2, 8, 14, 20, 24, 28, 32 and 36.
what|the indexer
It scores the cache entries and keeps the best 512 for each query.
value|the index top-k
It is 512 entries.
number|index heads
There are 32 heads, each 128 wide.
what|the candidate filter
Layer 20 keeps 2048 blocks of eight entries for later layers.
why|restrict candidates
Later layers then score few blocks instead of the whole context.
how|break ties in the top-k
The larger score wins, then the lower index.
what|the main KV
The compressed cache entries that every query can select from.
value|the size of a main entry
It takes 288 bytes in FP4.
value|the size of an index key
It takes 68 bytes in FP4.
value|the size of a window record
It takes 528 bytes: 512 codes and 16 scales.
value|the KV bytes per token
It is 890 bytes a token.
why|spend 890 bytes a token
Two and a half entries a token, each of 356 bytes.
value|the KV size of a million tokens
About 0.93 gigabytes.
what|FP4
A four-bit number with magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
what|E8M0
A scale byte that stands for a power of two.
what|E4M3
An eight-bit float with four exponent bits and three mantissa bits.
value|the weight format of the experts
FP4 with one E8M0 scale per 32 inputs.
value|the weight format of attention
FP8 with one scale per block of 32 by 32.
value|the scale block of FP8 weights
It is 32 by 32.
value|the group size of the FP4 cache
It is 16 channels with one E4M3 scale.
what|quantization-aware training
Training with rounded numbers, so that the small formats cost little.
number|layers in DeepSeek-V4.1-Flash
There are 40 layers.
value|the hidden size of DeepSeek-V4.1-Flash
It is 5120.
number|attention heads
There are 64 heads, each 512 wide.
number|routed experts
There are 384 routed experts in each layer.
number|experts per token
Six routed experts and one shared expert.
number|shared experts
There is one shared expert in each layer.
how|choose the experts
The six best scores after adding a bias that is used for choice only.
what|the router score
The square root of softplus of the router logit.
value|the routing scale
It is 1.5.
value|the SwiGLU limit
It is 10.
value|the vocabulary of the release
It has 129280 ids.
value|the context length of the release
It is 1048576 positions.
value|the total parameters of the release
About 763 billion, Engram tables included.
value|the backbone parameters without tables
About 552 billion.
value|the size of the release on disk
About 475 GiB.
value|the rms norm epsilon
It is 1e-20.
value|the rotary width
It is 64 of 512 channels.
value|the rotary base of window layers
It is 10000, without YaRN.
value|the rotary base of compressed layers
It is 160000, with YaRN.
what|YaRN
A way to stretch rotary positions to a longer context.
what|an attention sink
A learned logit per head that only adds to the denominator.
why|rotate the attention output back
Keys are also values, so their rotary part must be undone.
number|key-value heads
There is one; it serves as key and value.
what|MoE
A mixture of experts: each token runs through few of many experts.
what|EPLB
It copies and places experts so that all devices get equal work.
what|expert parallelism
The experts of a layer are spread over several devices.
what|batch-invariant mode
A row's result never depends on the other rows of its batch.
value|the variable of batch-invariant mode
DEEPINFER_BATCH_INVARIANT=1.
number|determinism levels
There are five, R0 to R4.
what|R0
Nothing is promised.
what|R1
The same batches and layout give the same bits.
what|R2
Any batch composition gives the same bits.
what|R3
R2 with a fixed seed: the same tokens.
what|R4
The same tokens across layouts.
what|Philox
A counter-based random generator; its key is the sequence seed.
why|use Philox
A token's noise then depends only on seed, position and id.
how|sample a token
By Gumbel noise from Philox, added to the log-probabilities.
how|decode at temperature zero
The true argmax is taken, the lowest id on ties.
what|seq_seed
The seed of one sequence; without it the system draws one and reports it.
what|the law exact or refused
No silent fallback: a request runs exactly or is refused with a reason.
what|a refusal
An error in three sentences: what happened, why, and what to do.
what|the kernel table
The kernels chosen before tracing; doctor prints it.
what|doctor
The command that prints devices, kernels and promises.
what|the manifest
A record of versions, modes and seeds of a run.
what|the bucket plan
The finite list of shapes compiled at warm-up.
why|compile before serving
So that no request ever waits for a compiler.
what|DSML
The markup of tool calls.
number|tokens of thinking markup
There are two: one opens the reasoning and one closes it.
value|the default reasoning effort
It is 75.
what|thinking mode
The model reasons first and then answers.
why|encode text and special tokens apart
Text typed by a user can then never become a special token.
what|structured output
A grammar masks tokens so that the output fits a schema.
what|CUDA graphs
Recorded launches; this engine uses compiled XLA programs instead.
what|JAX
The library this engine is written in.
what|XLA
The compiler that turns JAX programs into device code.
what|DeepInfer
An inference engine for DeepSeek-V4.1; this is its JAX reference.
what|nano
I am nano, a small trained model of the V4.1 family.
who|you
I am nano, a small model that ships with this engine.
number|layers in nano
Nano has ten layers.
value|the hidden size of nano
It is 256.
value|the vocabulary of nano
It has 3072 ids.
value|the context length of nano
It is 4096 tokens.
number|experts in nano
Nano has 16 experts in each layer, two for each token.
value|the index top-k of nano
It is 64 entries.
value|the Engram layers of nano
Layers 1 and 4.
value|the skills of nano
Sums, lookup, lists, JSON, tool calls, follow-ups and facts about this engine.
value|the default model
It is nano.
why|ship nano
So that the first command does the real job on a laptop.
"""

_LINES = _TABLE.strip().splitlines()

FACTS: tuple[tuple[str, str, str], ...] = tuple(
    (head.split("|")[0], head.split("|")[1], answer)
    for head, answer in zip(_LINES[::2], _LINES[1::2], strict=True)
)
"""(form, topic, answer); forms are the keys of `facts.WORDINGS`."""
