"""What the table costs in generation, and what drafting from it saves, on the paper's B."""

from collections.abc import Callable, Iterator

import torch
from transformers import NanoChatConfig, NanoChatForCausalLM, PreTrainedModel

from benchmarks.harness import Result, compare
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.modeling_doctab import CACHE_NAME

PROMPT, NEW = 4096, 24


def run() -> Iterator[Result]:
    """With against without table at batch 1 and 16; NanoChat; drafting on repetitive text."""
    yield from (table_cost(batch) for batch in (1, 16))
    yield against_nanochat()
    yield drafting()


def table_cost(batch: int) -> Result:
    """Greedy decoding after a 4K prompt, with and without the table.

    At batch 16 two thirds of the time is transformers' cache, which copies a gigabyte a token into
    new memory: short calls and many rounds, since page faults come and go in waves.
    """
    new, rounds = (NEW, 3) if batch == 1 else (8, 9)
    cases = {}
    for name, table in (("without table", False), ("with table", True)):
        torch.manual_seed(44)
        model = DocTabForCausalLM(DocTabConfig(document_table=table)).float().eval()
        cases[name] = _decode(model, _prompt(batch, PROMPT, model.config), new)

    def check(outputs: dict[str, torch.Tensor]) -> None:
        assert torch.equal(outputs["with table"], outputs["without table"])  # a zero table

    return compare(
        f"generation_table_batch_{batch}",
        question=f"{new} greedy tokens of the paper's B after {PROMPT:,}, batch {batch}, against B "
        "without the table (prefill left out)",
        prediction="at most 1.05 times the time",
        cases=cases,
        check=check,
        ours="without table",
        target=1.05,
        rounds=rounds,
        facts={"prompt": PROMPT, "new_tokens": new, "batch": batch},
    )


def against_nanochat() -> Result:
    """Greedy decoding after a 4K prompt, against transformers' own relative of the architecture."""
    config = DocTabConfig()
    torch.manual_seed(44)
    nanochat = NanoChatForCausalLM(
        NanoChatConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=2 * PROMPT,
        )
    )
    models = {
        "B with table": DocTabForCausalLM(config).float().eval(),
        "transformers' NanoChat": nanochat.float().eval(),
    }
    prompt = _prompt(1, PROMPT, config)
    return compare(
        "generation_nanochat",
        question=f"{NEW} greedy tokens of the paper's B with table after {PROMPT:,}, batch 1, "
        "against NanoChatForCausalLM of the same width and depth (prefill left out)",
        prediction="1.1x: six of our eight layers look at 1,024 keys, all of NanoChat's at 4,096; "
        "value embeddings, lambdas and the table take some of that back",
        cases={name: _decode(model, prompt) for name, model in models.items()},
        target=1.0,
        rounds=5,
        facts={"prompt": PROMPT, "new_tokens": NEW, "batch": 1},
    )


@torch.no_grad()
def _decode(
    model: PreTrainedModel, prompt: torch.Tensor, new: int = NEW
) -> Callable[[], torch.Tensor]:
    """Decode on from a cache that holds the prompt: each call continues where the last ended."""
    step = 512
    cache = None
    for start in range(0, prompt.shape[1] - 1, step):
        part = prompt[:, start : min(start + step, prompt.shape[1] - 1)]
        held = {} if cache is None else {CACHE_NAME: cache}
        out = model(part, use_cache=True, logits_to_keep=1, **held)
        cache = getattr(out, CACHE_NAME)
    token = prompt[:, -1:]

    @torch.no_grad()
    def decode() -> torch.Tensor:
        nonlocal token
        tokens = []
        for _ in range(new):
            logits = model(token, use_cache=True, **{CACHE_NAME: cache}).logits[:, -1]
            token = logits.argmax(-1, keepdim=True)
            tokens.append(token)
        return torch.cat(tokens, 1)

    return decode


def _prompt(batch: int, length: int, config: DocTabConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size - 4, (batch, length), generator=generator)
    ids[:, 0] = config.bos_token_id
    return ids


def drafting() -> Result:
    """Greedy decoding of text that repeats itself: plain, prompt lookup, drafts from the table.

    The model is B + table whose table says what to copy, as a trained one does on such text: what
    is measured is the machinery and the acceptance that the rule reaches, not a language model.
    """
    torch.manual_seed(44)
    config = DocTabConfig()
    model = DocTabForCausalLM(config).float().eval()
    with torch.no_grad():
        head = torch.nn.functional.normalize(torch.randn(config.vocab_size, config.hidden_size))
        model.lm_head.weight.copy_(head)
        table = model.model.document_table.candidate_embedding.weight
        table.copy_(20 * config.hidden_size**0.5 * head.repeat(config.table_orders, 1))
    ids = _repetitive(config)
    new = 64
    options = {
        "drafts from the table": {"table_draft_tokens": 8},
        "prompt lookup": {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 4},
        "plain greedy": {},
    }

    def case(extra: dict[str, int]) -> Callable[[], torch.Tensor]:
        return lambda: model.generate(ids, max_new_tokens=new, do_sample=False, **extra)

    def check(outputs: dict[str, torch.Tensor]) -> None:
        for name, output in outputs.items():
            assert torch.equal(output, outputs["plain greedy"]), name

    return compare(
        "generation_drafting",
        question=f"{new} greedy tokens on repetitive text with drafts from the table",
        prediction="1.3x plain greedy or more; no slower than prompt lookup",
        cases={name: case(extra) for name, extra in options.items()},
        check=check,
        target={"plain greedy": 1.3, "prompt lookup": 1.0},
        rounds=3,
        facts={"prompt": ids.shape[1], "new_tokens": new},
    )


def _repetitive(config: DocTabConfig) -> torch.Tensor:
    """Phrases of 5 to 20 tokens that return in changing order, as in code and manuals."""
    generator = torch.Generator().manual_seed(1)
    phrases = [
        torch.randint(0, config.vocab_size - 4, (int(n),), generator=generator)
        for n in torch.randint(5, 21, (40,), generator=generator)
    ]
    order = torch.randint(0, 40, (80,), generator=generator)
    tokens = torch.cat([torch.tensor([config.bos_token_id]), *(phrases[i] for i in order)])
    return tokens[None, :1000]
