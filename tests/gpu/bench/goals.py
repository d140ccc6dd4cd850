"""Whether the goals were met, from the figures that the other programs left in a folder: python -m gpu.bench.goals
FOLDER"""

import json
import sys
from pathlib import Path

MB = 1 << 20


def figures(folder):
    """Those that can be judged; of other parts of the check, the folder has objects."""
    found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return [
        result
        for results in found
        if isinstance(results, list)
        for result in results
        if "variant" not in result and "refused" not in result
    ]


def find(results, **wanted):
    return [r for r in results if all(r.get(name) == value for name, value in wanted.items())]


def floor_goal(results):
    found = find(results, operation="all_reduce", ranks=4, bytes=256 * MB, backend="custom")
    return [(f"{r['row_us'] / r['floor_us']:.2f} x", r["row_us"] <= 3 * r["floor_us"]) for r in found]


def gloo_goal(results):
    answers = []
    for ours in find(results, operation="all_reduce", backend="custom"):
        for gloo in find(results, operation="all_reduce", ranks=ours["ranks"], bytes=ours["bytes"], backend="gloo"):
            if ours["bytes"] >= MB and ours["ranks"] > 1:
                ratio = gloo["single_us"] / ours["single_us"]
                answers.append((f"{ours['ranks']} ranks, {ours['bytes'] // MB} MB: {ratio:.1f} x", ratio >= 10))
    return answers


def ddp_goal(results):
    answers = []
    for ours in find(results, operation="ddp", backend="custom"):
        for gloo in find(results, operation="ddp", ranks=ours["ranks"], parameters=ours["parameters"], backend="gloo"):
            ratio = gloo["single_us"] / ours["single_us"]
            answers.append(
                (f"{ours['ranks']} ranks, {ours['parameters'] / 1e6:.1f} M parameters: {ratio:.2f} x", ratio >= 1)
            )
    return answers


GOALS = {
    "all_reduce of 256 MB by 4 ranks on one GPU within 3 times the floor": floor_goal,
    "all_reduce of 1 MB and more at least 10 times as fast as gloo": gloo_goal,
    "DDP's step no slower than with gloo": ddp_goal,
}


def main(folder):
    results, told = figures(folder), []
    for goal, judge in GOALS.items():
        answers = judge(results)
        missed = [text for text, met in answers if not met]
        verdict = "not measured" if not answers else "NOT MET" if missed else "met"
        told.append(verdict)
        print(f"{verdict:<13} {goal}")
        for text, met in answers:
            print(f"    {'    ' if met else 'NO  '}{text}")
    if set(told) == {"not measured"}:
        print("NOT RUN: no figure was measured")
        return 3
    print(
        f"SUMMARY: {told.count('met')} of {len(told)} goals met"
        + (", some not measured" if "not measured" in told else "")
    )
    return int(set(told) != {"met"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
