"""KL(p_T || q_T) as an outsider measures it: plain transformers, no line of isotherm's.

    python -m tests.e2e.judge STUDENT TEACHER PROMPTS.jsonl T [MAX_NEW_TOKENS] [NUM_PROMPTS]

The student samples by itself at T (one full forward a token, torch.multinomial); at every position
it sampled, the divergence is summed over the whole vocabulary. Nothing is fast here, on purpose.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def exact_reverse_kl(
    student_dir: str,
    teacher_dir: str,
    prompts: list[str],
    temperature: float,
    *,
    max_new_tokens: int,
    samples: int = 1,
    seed: int = 0,
) -> float:
    """Mean exact reverse KL per sampled token, over `samples` responses to each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(student_dir)
    student = AutoModelForCausalLM.from_pretrained(student_dir, dtype=torch.float32).eval()
    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    per_token = []
    for prompt in prompts:
        start = tokenizer(prompt, return_tensors="pt")["input_ids"]
        rows = start.repeat(samples, 1)
        alive = torch.ones(samples, dtype=torch.bool)
        for _ in range(max_new_tokens):
            log_p = torch.log_softmax(student(rows).logits[:, -1].double() / temperature, dim=-1)
            log_q = torch.log_softmax(teacher(rows).logits[:, -1].double() / temperature, dim=-1)
            divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
            per_token += divergence[alive].tolist()
            sampled = torch.multinomial(log_p.exp(), 1, generator=generator)
            rows = torch.cat([rows, sampled], dim=1)
            alive &= sampled[:, 0] != tokenizer.eos_token_id
            if not alive.any():
                break
    return sum(per_token) / len(per_token)


if __name__ == "__main__":
    student, teacher, path, temperature, *rest = sys.argv[1:]
    lines = Path(path).read_text().splitlines()
    limit = int(rest[1]) if len(rest) > 1 else 50
    value = exact_reverse_kl(
        student, teacher, [json.loads(line)["prompt"] for line in lines][:limit],
        float(temperature), max_new_tokens=int(rest[0]) if rest else 64, samples=4,
    )  # fmt: skip
    print(f"exact KL(p_T || q_T) at T={temperature}: {value:.4f} nats per token")
