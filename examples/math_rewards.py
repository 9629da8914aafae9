"""A reward for mathematics, through math-verify: 1/2, 0.5 and \\frac{1}{2} are the same answer.

pip install "panoply-rl[math]"
panoply train grpo --model my-model --data problems.jsonl --reward examples/math_rewards.py:equivalent
"""

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError('this reward needs math-verify: pip install "panoply-rl[math]"') from None


def equivalent(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 where the answer a completion arrives at equals `answer`, a field of the data, as mathematics."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    both = zip(texts, answer, strict=True)
    return [float(verify(parse(f"${right}$"), parse(text))) for text, right in both]
