"""The weight push: from the learner to every engine, acknowledged and checked."""
