# What the native core is compiled with: by the Makefile beside this, and by setup.py, which reads these lines.
# No contraction to fused multiply-add: the bits must not depend on the machine.
FLAGS = -std=c++17 -Wall -Wextra -fvisibility=hidden -ffp-contract=off -fno-math-errno -pthread
OPT = -O3 -g0
