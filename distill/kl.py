"""KL divergences between the student p_T and the teacher q_T, both at one temperature."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_kl(student_logits_NV: Tensor, teacher_logits_NV: Tensor, temperature: float) -> Tensor:
    """KL(p_T || q_T) per position, exact over the vocabulary: fp32, shape (N,), nats.

    sum_v p_T(v) (log p_T(v) - log q_T(v)), where p_T = softmax(z_student / T) and
    q_T = softmax(z_teacher / T).
    """
    assert student_logits_NV.shape == teacher_logits_NV.shape, "vocabularies differ"
    log_p_NV = torch.log_softmax(student_logits_NV.float() / temperature, dim=-1)
    log_q_NV = torch.log_softmax(teacher_logits_NV.float() / temperature, dim=-1)
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=-1)
