"""An agent of thirty lines: it asks for a letter and asks again, and whoever answers is a policy that learns.

    panoply train grpo --world agent:examples/agent.py:play --model DIR

In training `play` is called with the seed of an episode, and returns what was earned. The same function works against
`panoply serve RUN`, which prints the address and the key.
"""

import json
import urllib.request

LETTERS = "abcdefgh"


def ask(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str:
    """What any client of OpenAI's does."""
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    ) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def play(seed: int, base_url: str, api_key: str) -> float:
    """Two questions in one conversation: half a point for each answer that begins with the letter asked for."""
    messages, earned = [], 0.0
    for turn in range(2):
        letter = LETTERS[(seed + turn) % len(LETTERS)]
        messages.append({"role": "user", "content": f"Say {letter}."})
        said = ask(base_url, api_key, messages)
        messages.append({"role": "assistant", "content": said})
        earned += 0.5 * said.strip().lower().startswith(letter)
    return earned
