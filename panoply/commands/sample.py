"""`panoply sample`: what a policy writes, or how it acts."""

from __future__ import annotations

import argparse
import sys

from panoply.commands.parser import (
    Commands,
    add_context,
    add_machine,
    add_plugins,
    add_stop,
    add_trust,
    add_which,
    command,
    load_plugins,
    machine,
)
from panoply.errors import PanoplyError, plain

EXAMPLES = """\
  panoply sample runs/RUN "3+4*2+1*5+6*2+7="     what the policy writes
  panoply sample runs/RUN "7*8+1=" --which last  of the last checkpoint, not the best
  panoply sample DIR "7*8+1=" -n 4 --temperature 0
  panoply sample DIR "Think, then answer." --stop '</answer>'
  panoply sample runs/RUN                        a held-out problem: what is written and earned, turn by turn
  panoply sample runs/PPO-RUN --video out.gif    film a held-out episode of a control policy"""


def add(commands: Commands) -> None:
    parser = command(
        commands, "sample", "continue a prompt, play the turns of an episode, or film one", _sample, EXAMPLES
    )
    option = parser.add_argument
    option("source", metavar="RUN|DIR")
    option(
        "prompt",
        nargs="?",
        help="in a world of several turns, one of its problems (default: the first one held out of the run's world)",
    )
    add_which(parser)
    option("--video", metavar="FILE", help="film an episode: FILE.gif, or FILE.mp4 with imageio and ffmpeg")
    option("--world", help="what a policy folder is to play or be filmed in; a run knows its own")
    option("-n", type=int, default=1, help="how many continuations, or episodes")
    option("--temperature", type=float, help="default 1, in a film 0: the likeliest actions")
    option("--max-tokens", type=int, default=128)
    option("--seed", type=int, default=0)
    add_stop(parser)
    add_plugins(parser)
    add_trust(parser)
    add_context(parser)
    add_machine(parser)


def _sample(chosen: argparse.Namespace) -> int:
    from panoply.trust import trusting

    with trusting(chosen.trust):
        return _sampled(chosen)


def _sampled(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.report.text import played
    from panoply.which import take

    load_plugins(chosen)
    if chosen.video:
        if chosen.prompt is not None or chosen.stop:
            what = "prompt: leave it" if chosen.prompt is not None else "text to end: leave --stop"
            raise PanoplyError(f"A film has no {what}, or --video, out.")
        earned = api.video(
            chosen.source,
            chosen.video,
            world=chosen.world,
            which=chosen.which,
            temperature=chosen.temperature or 0.0,
            seed=chosen.seed,
        )
        print(f"{chosen.video}: an episode that earned {earned:g}, of {take(chosen.source, chosen.which)}")
        return 0
    temperature = 1.0 if chosen.temperature is None else chosen.temperature
    common = {"n": chosen.n, "temperature": temperature, "max_tokens": chosen.max_tokens, "seed": chosen.seed}
    common |= machine(chosen)
    taken = take(chosen.source, chosen.which)
    if chosen.world or api.has_turns(chosen.source, single=chosen.prompt is None):
        which = {"world": chosen.world, "which": chosen.which}
        which |= {"settings": {"world.stop": tuple(chosen.stop)} if chosen.stop else {}}
        shown = [played(episode) for episode in api.play(chosen.source, chosen.prompt, **which, **common)]
    elif chosen.prompt is None:
        raise PanoplyError("Name a prompt to continue, or a film to make with --video FILE.gif.")
    else:
        texts = api.sample(
            taken.model, chosen.prompt, stop=api.stops_of(chosen.source, chosen.stop), **common
        )
        shown = [plain(chosen.prompt + text, lines=True) for text in texts]
    if taken.step is not None:
        print(f"From {taken}.", file=sys.stderr, flush=True)
    print("\n".join(shown))
    return 0
