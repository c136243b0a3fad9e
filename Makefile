# `make demo` converts the small trained model in demo/ and lets it write; `make test` runs the tests.
# Both make .venv first. EXTRAS adds optional dependencies: `make test EXTRAS=test,peers` compares with other codecs.
PYTHON ?= python3
EXTRAS ?= test
BIN := .venv/bin
comma := ,
READY := .venv/ready-$(subst $(comma),-,$(EXTRAS))

.PHONY: demo test test-slow clean

demo: $(READY)
	$(BIN)/tutel-convert demo/model --fmt nvfp4 -o demo/out/nvfp4 --force
	@printf '\nMr. Darcy'
	@$(BIN)/tutel-run generate demo/out/nvfp4 "Mr. Darcy" --temperature 0.7 --seed 3 --max-tokens 80

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

$(READY): pyproject.toml setup.py constraints.txt $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info demo/out
