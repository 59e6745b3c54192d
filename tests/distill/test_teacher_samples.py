"""Groups that the teacher samples, by id and share."""

import pickle

from distill.group_share import NO_TEACHER_SAMPLES, TeacherSamples


def samples(**changes) -> TeacherSamples:
    settings = {"warmup_groups": 0, "share": 0.0, "groups_per_step": 8, "seed": 3, "vocab_size": 9}
    return TeacherSamples(**settings | changes)


def test_which_ones_is_a_function_of_the_id_and_the_seed_and_of_no_place() -> None:
    chosen = samples(share=0.5)
    ids = {i for i in range(800) if i in chosen}
    again = pickle.loads(pickle.dumps(chosen))
    assert {i for i in reversed(range(800)) if i in again} == ids
    assert {i for i in range(800) if i in samples(share=0.5, seed=4)} != ids
    for place in range(8):  # sources that take turns are sampled alike
        assert 25 < sum(i % 8 == place for i in ids) < 75
    assert all(i in samples(warmup_groups=5) for i in range(5))
    assert not any(i in NO_TEACHER_SAMPLES for i in range(99))
