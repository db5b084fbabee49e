"""The tiny world's judge with noise, which the end of `judge.model` gives: 'noise-2' adds normal
noise with a standard deviation of 2 points of 10 to each score of each reading.

Equal requests get equal noise; a repeat is another request, because its seed differs. A question
that is answered by a label (`expected_score`) gets the probabilities with which the scores of
readings would round to each label, so it differs from a reading only by how it is asked.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from statistics import NormalDist

from rl.judge.reply import DIGITS
from tiny_world.judge_server import JudgeHandler, JudgeServer, main


class NoisyHandler(JudgeHandler):
    """Adds the noise of the whole request."""

    def complete(self, body: bytes) -> None:
        judge = self.server.judge
        assert isinstance(judge, NoisyJudge)
        request = json.loads(body)
        parts = request["messages"][-1]["content"]
        scores = json.loads(judge.answer(parts))["score"]
        if request.get("logprobs"):
            restraint = "left alone" in parts[-1]["text"]
            return self.answer_by_label(label_probs(scores[restraint], judge.noise))
        draw = random.Random(body)
        noisy = [min(10.0, max(0.0, draw.gauss(score, judge.noise))) for score in scores]
        return self.say(json.dumps({"score": noisy}))

    def answer_by_label(self, probs: list[float]) -> None:
        by_label = dict(zip(DIGITS, probs, strict=True))
        pairs = [
            {"token": label, "logprob": math.log(prob)}
            for label, prob in sorted(by_label.items(), key=lambda item: -item[1])
            if prob > 1e-12
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": pairs[0]["token"]},
            "logprobs": {"content": [{**pairs[0], "top_logprobs": pairs}]},
            "finish_reason": "length",
        }
        model = self.server.judge.model
        self.send(200, {"object": "chat.completion", "model": model, "choices": [choice]})


def label_probs(score: float, noise: float) -> list[float]:
    """Probabilities of the labels 0 to 9 for a score of 0 to 10: a reading, clipped to 0..10 and
    scaled to 0..9, is rounded to the nearest label. `noise`: standard deviation, points of 10."""
    reading = NormalDist(score * 0.9, noise * 0.9)
    below = [0.0, *(reading.cdf(label + 0.5) for label in range(9)), 1.0]
    return [high - low for low, high in itertools.pairwise(below)]


class NoisyJudge(JudgeServer):
    """Serves until `close()`."""

    handler = NoisyHandler

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.noise = float(model.rpartition("-")[2])


if __name__ == "__main__":
    main(NoisyJudge)
