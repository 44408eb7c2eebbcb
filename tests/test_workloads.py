"""Token ratios of real batches: random ids with the sharing structure of public rollouts and agent trajectories.

`tests/data` holds token lengths and where they come from, no text. Two rows get the same ids exactly where the real
rows agree on the whole prefix as far as the lengths say: static prefix, prompt, and common starts of responses such
that every group has as many distinct tokens as the real one.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from augtree_fx import CostModel, TreeLayout
from augtree_fx.rows import packed_rows

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ROOT.parent / "shared" / "workloads"
W2A, W2B, DOCUMENTS = "w2a_verl_gsm8k_tool_n16", "w2b_tau_airline_4trials", "w3_leval_doc_tree"
# The expected ratios were counted on the real token ids. Ours differ by what lengths do not show (starts of prompts
# beyond the static prefix) and by what the default threshold gives up.
WITHIN = 0.02


def lengths(name: str) -> dict:
    return json.loads((ROOT / "tests" / "data" / f"{name}.json").read_text())


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ids from 31 bits, so that rows do not meet by chance."""
    return rng.integers(1 << 31, size=count)


def branches(rng: np.random.Generator, sizes: list[int], shared: int) -> list[np.ndarray]:
    """Runs of ids of the given sizes that have ``shared`` tokens in common with the longest of them, in all."""
    longest = int(np.argmax(sizes))
    room = [0 if number == longest else size for number, size in enumerate(sizes)]
    starts = rng.multivariate_hypergeometric(room, shared, method="marginals").tolist()
    stem = random_ids(rng, sizes[longest])
    runs = [
        np.concatenate([stem[:start], random_ids(rng, size - start)]) for start, size in zip(starts, sizes, strict=True)
    ]
    runs[longest] = stem
    return runs


def layouts(rows: list[np.ndarray]) -> tuple[TreeLayout, TreeLayout]:
    """The tree by default costs and the one that shares whatever can be shared."""
    bounds = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    host = packed_rows(torch.from_numpy(np.concatenate(rows)), None, bounds)
    return TreeLayout.from_rows(host), TreeLayout.from_rows(host, costs=CostModel.free())


def batch_rows(data: dict, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of a batch whose prompts all start with the static prefix, shuffled: groups are not contiguous."""
    prefix, rows = random_ids(rng, data["static_prompt_tokens"]), []
    for prompt_tokens, trie_tokens, response_tokens in data["groups"]:
        prompt = np.concatenate([prefix, random_ids(rng, prompt_tokens - len(prefix))])
        shared = prompt_tokens + sum(response_tokens) - trie_tokens
        rows += [np.concatenate([prompt, response]) for response in branches(rng, response_tokens, shared)]
    return [rows[index] for index in rng.permutation(len(rows))]


def document_rows(
    lcp_tokens: int, unique_tokens: int, instructions: list[tuple[int, list[int]]], rng: np.random.Generator
) -> list[np.ndarray]:
    """Rows of one document: document, instruction, responses; its distinct tokens are ``unique_tokens``."""
    prefix_tokens = min(lcp_tokens, *(prompt_tokens for prompt_tokens, _ in instructions))
    responses = [sizes for _, sizes in instructions]
    tails = [prompt_tokens - prefix_tokens for prompt_tokens, _ in instructions]
    shared = prefix_tokens + sum(tails) + sum(map(sum, responses)) - unique_tokens
    room = [sum(sizes) - max(sizes) for sizes in responses]
    in_responses = rng.multivariate_hypergeometric(room, min(shared, sum(room)), method="marginals").tolist()
    document, rows = random_ids(rng, prefix_tokens), []
    starts = branches(rng, tails, shared - sum(in_responses))
    for tail, sizes, count in zip(starts, responses, in_responses, strict=True):
        rows += [np.concatenate([document, tail, response]) for response in branches(rng, sizes, count)]
    return rows


@pytest.mark.parametrize(("name", "ratio"), [(W2A, 1.981), (W2B, 2.404)])
def test_batch_wide_token_ratio(name: str, ratio: float) -> None:
    data = lengths(name)
    chosen, free = layouts(batch_rows(data, np.random.default_rng(0)))
    repeated = (len(data["groups"]) - 1) * data["static_prompt_tokens"]
    assert free.num_tokens == sum(trie_tokens for _, trie_tokens, _ in data["groups"]) - repeated
    assert free.token_ratio == pytest.approx(ratio, rel=WITHIN)
    assert chosen.token_ratio == pytest.approx(ratio, rel=WITHIN)
    assert chosen.num_nodes < free.num_nodes
    # What the default threshold gives up for fewer attention pieces.
    assert chosen.num_tokens <= free.num_tokens * (1 + WITHIN), (chosen, free)


def test_documents_under_many_instructions() -> None:
    rng = np.random.default_rng(0)
    row_tokens = free_tokens = chosen_tokens = 0
    for lcp_tokens, unique_tokens, instructions in lengths(DOCUMENTS)["documents"]:
        chosen, free = layouts(document_rows(lcp_tokens, unique_tokens, instructions, rng))
        assert free.num_tokens == unique_tokens
        row_tokens += free.num_row_tokens
        free_tokens += free.num_tokens
        chosen_tokens += chosen.num_tokens
    assert row_tokens / free_tokens == pytest.approx(26.554, rel=1e-4)
    assert row_tokens / chosen_tokens == pytest.approx(26.554, rel=WITHIN)


def test_a_group_alone_shares_less_than_the_batch() -> None:
    data = lengths(W2B)
    rows = batch_rows(data | {"static_prompt_tokens": 0}, np.random.default_rng(0))
    chosen, _ = layouts(rows)
    assert chosen.token_ratio == pytest.approx(1.786, rel=WITHIN)


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the full workload files are not beside this checkout")
@pytest.mark.parametrize("name", [W2A, W2B, DOCUMENTS])
def test_lengths_are_those_of_the_full_files(name: str) -> None:
    full = [json.loads(line) for line in (WORKLOADS / f"{name}.jsonl").read_text().splitlines()]
    if name == DOCUMENTS:
        found = [
            [
                x["lcp_tokens"],
                x["unique_tokens"],
                [[i["prompt_tokens"], i["response_tokens"]] for i in x["instructions"]],
            ]
            for x in full
        ]
        assert lengths(name)["documents"] == found
    else:
        found = [[x["prompt_tokens"], x["trie_tokens"], x["response_tokens"]] for x in full]
        assert lengths(name)["groups"] == found
        static = {x.get("static_prompt_tokens", 282) for x in full}  # w2a: README.md, not in the file
        assert static == {lengths(name)["static_prompt_tokens"]}
