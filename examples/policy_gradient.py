"""Policy gradient with speculative rollouts: a trainer in transformers, forerun makes the answers.

Each step, forerun samples answers with drafts, as tokens with log probabilities. Those are the policy's own, whatever
was drafted, so the plain REINFORCE estimate holds: no correction for an engine that differs from the model it serves.
Then the trainer takes a step, and forerun gets the new weights.

    python examples/policy_gradient.py FOLDER

trains the model in FOLDER to say one token as often as it can, and prints the mean reward of every step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

import forerun
from forerun.response import Rollout

WANTED = 40  # the token that is rewarded
PROMPT = [50, 60, 70, 50, 60]
ANSWERS, TOKENS, RATE = 16, 12, 3e-3


def reward(answer: Rollout) -> float:
    """The share of the answer that is the wanted token."""
    return sum(token == WANTED for token in answer.tokens) / TOKENS


def step(policy: torch.nn.Module, optimiser: torch.optim.Optimizer, answers: Sequence[Rollout]) -> float:
    """One step of REINFORCE with the mean as its baseline; gives how far the trainer's log probabilities are off."""
    rewards = torch.tensor([reward(answer) for answer in answers])
    advantages = rewards - rewards.mean()
    loss, furthest = torch.zeros(()), 0.0
    for answer, advantage in zip(answers, advantages, strict=True):
        ids = torch.tensor([answer.prompt + answer.tokens])
        logits = policy(ids).logits[0, len(answer.prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        furthest = max(furthest, float((chosen.detach() - torch.tensor(answer.logprobs)).abs().max()))
        loss = loss - advantage * chosen.sum() / len(answers)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return furthest


def train(folder: str, steps: int = 12) -> list[tuple[float, float, int]]:
    """By step: mean reward, the largest difference of a log probability, and drafts accepted."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = forerun.load(folder, device="cpu", dtype="float32", quantize="none")
    optimiser = torch.optim.Adam(policy.parameters(), lr=RATE)
    history = []
    for number in range(steps):
        answers = model.generate_tokens(
            PROMPT, n=ANSWERS, max_tokens=TOKENS, temperature=1.0, seed=number, draft="lookup", draft_tokens=3
        )
        furthest = step(policy, optimiser, answers)
        history.append((
            sum(map(reward, answers)) / len(answers),
            furthest,
            sum(answer.response.accepted for answer in answers),
        ))  # fmt: skip
        model.update_weights({name: tensor for name, tensor in policy.state_dict().items() if "rotary" not in name})
    return history


if __name__ == "__main__":
    for number, (mean, furthest, accepted) in enumerate(train(sys.argv[1])):
        print(f"step {number}: reward {mean:.3f}, log probabilities within {furthest:.1e}, {accepted} drafts accepted")
