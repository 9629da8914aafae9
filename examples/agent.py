"""An agent of thirty lines: it asks for a letter and asks again, and whoever answers is a policy that learns.

    panoply train grpo --world agent:examples/agent.py:play --model DIR

In training `play` is called with the seed of an episode, and returns what was earned. The same function works against
`panoply serve RUN`, which prints an address and a key; what was said there is learned from, too:

    panoply serve DIR --record episodes.jsonl
    OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agent.py 64
    panoply train grpo --data episodes.jsonl --model DIR --steps 4
"""

import json
import os
import sys
import urllib.request

LETTERS = "abcdefgh"


def post(url: str, api_key: str, body: dict) -> dict:
    """What any client of OpenAI's does."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def ask(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "policy", "messages": messages, "max_tokens": 8}
    return post(f"{base_url}/chat/completions", api_key, body)["choices"][0]["message"]["content"]


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


if __name__ == "__main__":  # against panoply serve: every seed four times, so that episodes can be compared
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    for number in range(int(sys.argv[1])):
        name = f"{os.getpid()}-{number}"
        earned = play(number // 4, f"{base}/episodes/{name}", key)
        post(f"{base}/rewards", key, {"episode": name, "reward": earned})
