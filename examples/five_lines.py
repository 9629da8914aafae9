"""The whole of Panoply from Python: python examples/five_lines.py"""

import panoply as pp

result = pp.train("grpo", world="chain", seed=0, steps=20)
print(f"held-out success {result.before['sampled']:.2f} → {result.after['sampled']:.2f}, run {result.run}")
print(pp.sample(result.run, "3+4*2+1*5+6*2+7=", temperature=0))
