# `make demo` converts the small trained model in demo/ and lets it write; `make test` runs the tests.
# Both make .venv first. EXTRAS adds optional dependencies: `make test EXTRAS=test,peers` compares with other codecs.
PYTHON ?= python3
EXTRAS ?= test
# The oldest Triton there is support for; constraints.txt has the newest. Their machine code differs.
TRITON ?= 3.6.0
OLD_TRITON := .venv/triton-$(TRITON)
BIN := .venv/bin
comma := ,
READY := .venv/ready-$(subst $(comma),-,$(EXTRAS))

.PHONY: demo test test-slow test-triton counts clean

demo: $(READY)
	$(BIN)/tutel-convert demo/model --fmt nvfp4 -o demo/out/nvfp4 --force
	@printf '\nMr. Darcy'
	@$(BIN)/tutel-run generate demo/out/nvfp4 "Mr. Darcy" --temperature 0.7 --seed 3 --max-tokens 80

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# Every kernel compiled by the old Triton, and its machine code looked at.
test-triton: $(OLD_TRITON)
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -m pytest -m '' tests/kernels/test_triton_aot.py

# Renews what both are held to.
counts: $(OLD_TRITON)
	$(BIN)/python bench/kernels_aot.py --write
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python bench/kernels_aot.py --write

$(OLD_TRITON): | $(READY)
	$(BIN)/pip install --quiet --no-deps --target $@ triton==$(TRITON)

$(READY): pyproject.toml setup.py constraints.txt $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info demo/out
